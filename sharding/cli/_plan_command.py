"""The command ``plan``: the stages side by side, and what to know beside them."""

import contextlib
import dataclasses
import math
import re
import warnings
from argparse import Namespace
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

import optax_ext
from sharding._types import Tree
from sharding.cli import _setup as opts
from sharding.cli._model_activations import planned_loss
from sharding.cli._output import print_json
from sharding.plan._format import show, size
from sharding.plan.cost._estimate import Plan, activations_counted
from sharding.plan.cost._parallel_plan import ParallelPlan, cells
from sharding.plan.search._traced_model import TracedModel


def run_plan(options: Namespace) -> int:
    """Plans and prints; 2 where nothing fits."""
    setup = opts.setup_of(options)
    plan, shared = setup.compared_stages(options.state)
    planned = None
    if options.remat is not None:
        stage = plan.recommended or plan.requested
        planned, about = planned_loss(options, setup, plan, stage)
        setup = dataclasses.replace(setup, activations=planned.peak, extra_time=planned.extra_time)
        plan, shared = setup.compared_stages(options.state)

    # Notes: on times, on other optimizers, on what would fit.
    notes = list(plan.notes)
    if plan.device is None:
        unknown = f"no figures of {options.target}. Give them: {opts.FIGURES}."
        notes[0] = f"What fits is not known: {unknown}"
    target = opts.target_of(options)
    if target.groups > 1 and not {"host", "slice"} & set(plan.mesh):
        axes = ",".join(f"{name}={number}" for name, number in target.mesh_axes.items())
        notes.append(f"What leaves a host or slice is not counted: it needs an axis, as in {axes}.")
    if target.groups > 1 and setup.device and not setup.device.network:
        notes.append("warning: the speed between hosts is not known: give --network GB/S.")
    if setup.is_number and "layers" in setup.params:
        layers, width, _ = setup.params["layers"]["up"].shape
        shape = f"a decoder of {layers} layers of width {width:,}"
        notes.append(f"A number is planned as {shape}, without temporaries, as by the ZeRO paper.")
    if planned:
        notes.append(about)
    elif activations_counted(plan.stages):
        notes.append(_about_layers(shared if plan.predicted else {}))
    if any(map(plan.seconds, plan.stages)):
        notes.append(_about_times(setup))
    if plan.recommended and not re.search("adamw?$", options.optimizer):
        notes += _beside_adamw(options, setup, plan)
    if plan.fits is False:
        with warnings.catch_warnings(action="ignore"):  # of layouts that are only tried
            notes += _what_would_fit(options, setup)

    # The command compares all stages: no one of them is requested.
    plan = dataclasses.replace(plan, notes=tuple(notes), requested="")
    if options.json:
        figures = plan.to_dict()
        for row in figures["plans"]:
            row["plan"] = dataclasses.asdict(shared[row["name"]])
            row["plan"] |= {"recompute": None} if planned else {}
        asked = {"sequences": setup.sequences * setup.zero.num_devices, "length": setup.length}
        print_json(options, figures, params=setup.params, **asked)
    else:
        show(plan.tables(), plan.sentences)
    return 2 if plan.fits is False else 0


def _about_layers(shared: dict[str, ParallelPlan]) -> str:
    """What the layers of each timed stage store."""
    if not shared:
        return "Layers store their input only, and are computed again; --remat plans more."
    stages = dict[str, list[str]]()
    for name, plan in shared.items():
        stages.setdefault(cells(plan)[-1], []).append(name)
    stored = "; ".join(f"{what} at {', '.join(names)}" for what, names in stages.items())
    return (
        f"Layers store what is fastest of what fits, as search chooses: {stored}. Sequences, at "
        "most, are those of layers that store their input; --remat plans more."
    )


def _about_times(setup: opts.Setup) -> str:
    assert setup.device is not None
    passed = "that a token passes" if getattr(setup.model, "experts", None) else "and token"
    counted = f"{setup.flops_of_parameter:.0f} operations per parameter {passed}, "
    counted += "attention in full" if setup.costs else "without attention"
    if isinstance(setup.model, TracedModel):
        counted = "the products of its loss"
    return (
        f"Bounds are at {setup.device.about}, for "
        f"{setup.sequences} sequence{'s' if setup.sequences > 1 else ''} of {setup.length:,} "
        f"tokens on each device in a step: {counted}, no recomputation."
    )


def _beside_adamw(options: Namespace, setup: opts.Setup, plan: Plan) -> list[str]:
    """What the optimizer saves beside AdamW; where it saves nothing, why."""
    adamw = dataclasses.replace(setup, optimizer=optax.adamw(1e-3)).tx()
    on_device = dataclasses.replace(setup.zero, offload=None, update_on="device")
    other = setup.plan(on_device, adamw)
    mine = plan.stage(plan.recommended)
    theirs = other.stage(plan.recommended)
    saved = theirs.memory - mine.memory
    name = options.optimizer
    share = abs(saved) / theirs.memory
    note = (
        f"At {mine.name} {name} holds {size(abs(saved))} {'less' if saved >= 0 else 'more'} than "
        f"adamw: {share:.0%} of a device's {size(theirs.memory)}."
    )
    dominate = mine.params + mine.grads > 2 * (mine.opt_state + mine.master - mine.host)
    if dominate and share < 0.1:
        note += " Parameters and gradients dominate; the optimizer hardly matters for memory here."
    wide, narrow = (_widest_of_state(tx, setup.params) for tx in (setup.tx(), adamw))
    if mine.opt_state <= theirs.opt_state or not wide or not narrow or wide <= narrow:
        return [note]
    # The moments of optax have the dtype of their parameters, bfloat16 as well.
    return [
        note,
        f"adamw keeps its moments in {8 * narrow} bits, those of the parameters; {name} keeps its "
        f"averages in {8 * wide}, so that small steps are not lost. With --master both have 32.",
    ]


def _widest_of_state(tx: optax.GradientTransformation, params: Tree) -> int:
    """Bytes of an element of large floating arrays of the state; 0 if there are none."""
    limit = max((x.size for x in jax.tree.leaves(params)), default=0)
    state = jax.tree.leaves(jax.eval_shape(tx.init, params))
    large = [x.dtype for x in state if 2 * x.size >= limit]
    return max((x.itemsize for x in large if jnp.issubdtype(x, jnp.floating)), default=0)


def _what_would_fit(options: Namespace, setup: opts.Setup) -> list[str]:
    zero = setup.zero
    state = options.state
    fitting = []

    # More devices, along the last axis that shards.
    name = zero.axis[-1]
    for factor in (2, 4, 8, 16, 32, 64, 128, 256):
        mesh_axes = dict(zero.mesh.shape) | {name: zero.mesh.shape[name] * factor}
        larger = dataclasses.replace(zero, mesh=opts.abstract_mesh(mesh_axes))
        if setup.plan(larger, state_format=state).fits:
            num_devices = math.prod(mesh_axes.values())
            fitting.append(f"{num_devices} devices instead of {num_devices // factor}")
            break

    # Less state on the same devices.
    came = optax_ext.came(1e-3, mu_dtype=jnp.bfloat16)
    offloaded = dataclasses.replace(zero, offload="optimizer")

    def update_in_backward() -> Plan:
        asked = vars(options) | {"update_in_backward": True, "update_on_host": False}
        other = dataclasses.replace(
            opts.setup_of(Namespace(**asked)), activations=setup.activations
        )
        return other.plan(other.zero, state_format=state)

    changes: list[tuple[str, Callable[[], Plan]]] = [
        ("--update-in-backward", update_in_backward),
        ("--state 8bit", lambda: setup.plan(zero, state_format="8bit")),
        ("--offload", lambda: setup.plan(offloaded, state_format=state)),
        ("CAME with a bfloat16 momentum and no master weights", lambda: setup.plan(zero, came)),
    ]
    for name, make in changes:
        with contextlib.suppress(ValueError):  # such as low-bit state, whose format is its own
            fitting += [name] if make().fits else []
    if not fitting:
        return ["No change that is known here makes it fit: shard it over a model axis, too."]
    before = "" if activations_counted(setup.plan(zero).stages) else ", before activations"
    return [f"Each of these makes it fit{before}: {'; '.join(fitting)}."]
