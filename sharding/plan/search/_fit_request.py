"""What is asked of ``fit``: the machine that steps are for, the model, and what plans may do."""

import contextlib
import dataclasses
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AxisType

from optax_ext import STATE_FORMATS
from sharding._jaxprs import all_equations
from sharding._types import Batch, Tree
from sharding._zero import Tx, Zero
from sharding.loss._loss_options import Loss
from sharding.loss._rows import rows_of_loss
from sharding.placement._train_state import model_state_of, parts
from sharding.plan._format import check_choice, nearest, read_size, users_code
from sharding.plan.audit._find_batch import largest
from sharding.plan.cost._parallel_plan import MATMULS
from sharding.plan.machine import targets
from sharding.plan.machine._devices import KINDS, DeviceKind, kind_of, num_bytes
from sharding.plan.search._chosen_plan import ChosenPlan, SearchResult
from sharding.plan.search._search import NoPlanFits, search
from sharding.plan.search._traced_model import TracedModel
from sharding.step._checks import check_batch
from sharding.step._loss import loss_args, microbatch_key
from sharding.step.flax._nnx import is_module


class FitMachine(NamedTuple):
    """A machine, and what a step may take of it."""

    target: str  # its name
    devices: int
    kind: DeviceKind  # its figures, with the memory that this process has
    usable: float  # bytes of a device
    runs: bool  # whether steps can run: it is this machine

    @classmethod
    def of(
        cls,
        target: str | None,
        device: DeviceKind | None,
        memory: float | str | None,
        headroom: float,
        zero: Zero | None,
    ) -> "FitMachine":
        memory = None if memory is None else read_size(memory, "memory: ")
        if target is not None and targets.parse(target, other_gpus=True).compiles:
            targets.topology(target)  # before jax is used
        devices = [*zero.mesh.devices.flat] if zero else jax.devices()
        name = machine_name(devices) if target is None else target
        parsed = targets.parse(name, other_gpus=True)
        kind = device or kind_of(name)
        if kind is None and parsed.kind == "cpu":
            # Figures of a core: times are compared with each other only.
            kind = DeviceKind("cpu", memory or 0.0, 2e10, 1e11, 1e10, None, "none: any CPU")
        if kind is None:
            known = nearest(parsed.kind, list(KINDS))
            raise ValueError(f"fit needs the figures of {name}: give device=, a DeviceKind{known}.")
        if target is None and memory is None:
            memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
        kind = dataclasses.replace(kind, memory=memory or kind.memory)
        if not kind.memory > 0:
            raise ValueError(f"fit needs the memory of a device of {name}: give memory= in bytes.")
        runs = {*devices} <= {*jax.devices()} if target is None else parsed.kind == "cpu"
        return cls(name, parsed.num_devices, kind, (1 - headroom) * kind.memory, runs)

    def mesh(self, axes: Mapping[str, int]) -> Any:
        sizes = tuple(axes.values())
        auto = (AxisType.Auto,) * len(axes)
        if self.runs:
            return jax.make_mesh(sizes, tuple(axes), auto, devices=jax.devices()[: self.devices])
        if targets.parse(self.target, other_gpus=True).compiles:
            return targets.mesh(self.target, sizes, tuple(axes))
        return jax.sharding.AbstractMesh(sizes, tuple(axes), auto)


def machine_name(devices: Sequence[jax.Device]) -> str:
    """The name of the machine that devices are."""
    first = devices[0]
    kind = kind_of(first.device_kind)
    name = kind.name if kind else re.sub(r"[^a-z0-9]+", "-", first.device_kind.lower()).strip("-")
    if first.platform == "cpu":
        return f"cpu:{len(devices)}"
    if first.platform != "tpu":
        return f"{name}x{len(devices)}"
    columns: Any = zip(*(device.coords for device in devices), strict=True)
    sizes = [len({*column}) for column in columns]
    sizes = sorted(sizes[:2]) if name in ("v5e", "v6e") else sizes
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    return f"{name}:{'x'.join(map(str, sizes))}" + (f"*{slices}" if slices > 1 else "")


def of_all(value: float) -> np.ndarray:
    """A value of each process."""
    return np.asarray(multihost_utils.process_allgather(np.array(value)))


NOT_COMPARED = "Pipelines are not compared, and tensor axes are those of the mesh of zero=."


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raises unless the arguments of ``fit`` are what they must be, by their names."""
    zero = given["zero"]
    headroom = given["headroom"]
    measure = given["measure"]
    is_loss = callable(given["loss_fn"]) or hasattr(given["loss_fn"], "as_loss")
    is_real = zero is None or isinstance(getattr(zero, "mesh", None), jax.sharding.Mesh)
    is_share = isinstance(headroom, int | float | np.number) and 0 <= headroom < 1
    is_path = isinstance(given["folder"], str | os.PathLike | None)
    for name, valid, words in (
        ("loss_fn", is_loss, "must be a function of parameters and a batch"),
        ("make_state", callable(given["make_state"]), "must be a function"),
        ("tx", given["tx"] is None or hasattr(given["tx"], "update"), "must be a transformation"),
        ("target", isinstance(given["target"], str | None), "must be a name such as 'h100x8'"),
        ("device", isinstance(given["device"], DeviceKind | None), "must be a DeviceKind"),
        ("zero", is_real, "must be a Zero on a mesh of devices"),
        ("param_specs", zero or given["param_specs"] is None, "needs zero, whose axes they name"),
        ("keep", isinstance(given["keep"], Mapping | None), "must be a dict such as {'stage': 3}"),
        ("lossy", isinstance(given["lossy"], Sequence), "must be names such as '8bit'"),
        ("headroom", is_share, "must be from 0 to below 1"),
        ("measure", isinstance(measure, int) and measure >= 0, "must be True, or a number"),
        ("folder", is_path, "must be a path"),
    ):
        if not valid:
            raise ValueError(f"{name} {words}, got {given[name]!r}.")
    if zero and (given["target"] is not None or zero.sync):
        raise ValueError(
            "zero has devices in its mesh, and fit chooses: leave out target and sync."
        )


def check_step_options(loss_fn: Any, options: Mapping[str, Any]) -> None:
    """Raises for options of ``Zero.train_step`` that it does not have, or ``fit`` chooses."""
    for name, value in options.items():
        check_choice("an option", name, [*inspect.signature(Zero.train_step).parameters][3:])
        if name in ("microbatches", "update"):
            fixed = {name: value} if name != "update" else {"update_in_backward": True}
            raise ValueError(f"fit chooses {name}. To fix what it chooses, give keep={fixed}.")
    named = isinstance(loss_fn, Loss) and loss_fn.model_state
    if options.get("model_state", named) is True:
        raise ValueError(
            "fit needs the model state in the train state: model_state names its field."
        )


def allowed_plans(keep: Mapping[str, Any] | None, lossy: Sequence[str]) -> dict[str, Any]:
    """What plans may do, as arguments of ``search``."""
    kept = dict(keep or {})
    names = (lossy,) if isinstance(lossy, str) else lossy
    matmuls = [name for name in MATMULS if f"matmuls({name})" in names]
    products = [f"matmuls({name})" for name in MATMULS]
    # Of those in parentheses, search checks syncs.
    syncs = [name for name in names if "(" in str(name) and not str(name).startswith("matmuls")]
    others = [name for name in names if name not in syncs]
    for name in others:
        known = (*STATE_FORMATS, *products, "stochastic", "powersgd(RANK)", "qsgd(8)", "qsgd(4)")
        check_choice("lossy", name, known)
    formats = [name for name in others if name in STATE_FORMATS]
    return {
        "keep": kept,
        "offload": "update" if "update" in _values(kept.get("offload")) else True,
        "update_in_backward": True,
        "state_formats": (None, *formats),
        "weights": ("plain", "stochastic") if "stochastic" in others else ("plain",),
        "syncs": (None, *syncs),
        "matmuls": (None, *matmuls),
    }


class FitRequest:
    """What was asked of ``fit``: the machine, the model, and what plans may do."""

    def __init__(
        self,
        machine: FitMachine,
        loss: Loss,
        make_state: Callable[..., Any],
        batch: Batch,
        tx: Tx,
        options: dict[str, Any],
        allowed: dict[str, Any],
        *,
        zero: Zero | None = None,
        param_specs: Tree = None,
    ):
        self.machine = machine
        self.loss = loss
        self.options = options
        self.allowed = allowed
        self.slower = 1.0, 1.0  # than by the figures: operations, and all else
        check_batch(batch, zero.num_devices if zero else machine.devices, 1)
        if not any(map(np.ndim, jax.tree.leaves(batch))):
            raise ValueError("no array of the batch has rows, which devices would share.")
        every = inspect.signature(make_state).parameters.values()
        takes_key = any(x.default is x.empty and x.kind.name[:3] != "VAR" for x in every)
        self.args = (jax.random.key(0),) if takes_key else ()
        # Metadata of parameters is of a mesh of one's own.
        linen = None if zero else sys.modules.get("flax.linen")
        self.make_state = (lambda *args: linen.unbox(make_state(*args))) if linen else make_state
        params = self._take_state(tx)
        self.key = jax.random.key(0) if loss.rngs else None
        own: dict[str, Any] = {"zero": zero, "param_specs": param_specs}
        own |= {"trainable": options.get("trainable")}
        self.model = TracedModel(self._mean_loss(), lambda dtype: as_zeros(params), batch, **own)
        self.fixed = self._fixed_values(zero)
        self.allowed["keep"] = self.fixed | self.allowed["keep"]
        _check_trace(self.model, machine.devices)

    def _take_state(self, tx: Tx) -> Any:
        """Sets the types of the train state, and its transformation; returns its parameters."""
        must = "make_state must make a train state of nothing or a random key"
        with users_code(f"{must}, and failed where it was traced"):
            self.state = jax.eval_shape(self.make_state, *self.args)
        params, _, self.tx = parts(self.state, tx)
        if is_module(params):
            raise ValueError(
                "fit takes the arrays of an nnx model: use nnx.split, and nnx.merge in the loss."
            )
        if not isinstance(self.tx, optax.GradientTransformation):  # such as optax.MultiSteps
            self.tx = optax.with_extra_args_support(self.tx)
        self.is_pair = tx is not None
        if not num_bytes(params):
            raise ValueError("the train state has no parameters: there is nothing to plan.")
        return params

    def _mean_loss(self) -> Callable[..., Any]:
        """The loss of parameters and a batch alone."""
        loss = self.loss
        stateful = model_state_of(self.state, loss.model_state)

        def mean_loss(params: Tree, batch: Batch) -> jax.Array:
            keys = microbatch_key(loss.rngs, self.key, 0, batch)
            args = loss_args(loss, batch, as_zeros(stateful), keys)
            total, weight, _, _ = loss.split(loss(params, *args))
            return total / weight

        return mean_loss

    def _fixed_values(self, zero: Zero | None) -> dict[str, Any]:
        """What all plans have."""
        fixed: dict[str, Any] = {"pipe": 1, "tensor": self.model.tensor}
        if zero:
            fixed["replicas"] = zero.num_devices // zero.num_shards
        kept = self.allowed["keep"]
        wrong = {k: x for k, x in fixed.items() if x not in _values(kept.get(k, x))}
        if wrong:
            raise ValueError(f"keep must have {wrong}, as all plans here. {NOT_COMPARED}")
        # Where rows meet, the loss of a batch is not that of its micro-batches.
        if self.loss.model_state or (self.loss.coupled is None and self._rows_meet()):
            fixed["microbatches"] = 1
        return fixed

    def _rows_meet(self) -> bool:
        """Whether the loss is not known to keep rows apart."""
        try:
            args = self.model.abstract(), self.model.example
            return rows_of_loss(self.model.loss_fn, args, (False, True)).word == "coupled"
        except Exception:  # of the user's function: its trace says what it is
            return True

    def search(self, count: int, budget: float, *, top: int = 1, **changes: Any) -> SearchResult:
        """The fastest plans of so many examples, within planned bytes."""
        computing, others = self.slower
        slower = dict.fromkeys(("flops", "fp8", "int8", "bandwidth"), computing)
        slower |= {"link": others, "network": others}
        figures = {name: getattr(self.machine.kind, name) for name in slower}
        speeds = {name: x and x / slower[name] for name, x in figures.items()}
        device = dataclasses.replace(self.machine.kind, memory=budget, **speeds)
        options = {"device": device, "headroom": 0.0, "top": top, **self.allowed, **changes}
        return search(self.model, self.tx, self.machine.target, sequences=count, **options)

    def search_largest(self, budget: float) -> ChosenPlan:
        """The fastest plan of the most examples that fit without micro-batches."""
        keep = {"microbatches": 1} | self.allowed["keep"]
        found: dict[int, ChosenPlan] = {}

        def nbytes_of(count: int) -> float:
            with contextlib.suppress(NoPlanFits):
                found[count] = self.search(count, budget, keep=keep).best
            return found[count].memory if count in found else math.inf

        first = self.machine.devices
        count = largest(nbytes_of, budget, unit=first, doubled=True)
        return found[count] if count else self.search(first, budget, keep=keep).best


def as_zeros(tree: Tree) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)


def _values(kept: Any) -> tuple[Any, ...]:
    """What plans may have of a value that is kept, as for ``search``."""
    return kept if isinstance(kept, tuple) else (kept,)


def _check_trace(model: TracedModel, devices: int) -> None:
    """Raises unless a loss can be traced, and compiled for several devices."""
    with users_code(
        "loss_fn must take parameters and a batch of any number of examples, in shapes that depend "
        "on no value, and sum over no mesh axis itself; its gradient was traced for "
        f"{model.size} and for {devices} examples, and failed"
    ):
        every = [*all_equations(model.trace.graph.jaxpr)]
        model.traced(devices, jnp.dtype(jnp.bfloat16), "none")
    own = dict(model.zero.mesh.shape) if model.zero else None
    for eqn in every:
        name = eqn.primitive.name
        if "callback" in name and not name.startswith("debug"):
            raise ValueError(f"the loss calls functions of the host ({name}): leave them out.")
        if name == "shard_map" and (mesh := dict(eqn.params["mesh"].shape)) != own:
            raise ValueError(
                f"the loss has a shard_map over a mesh {mesh}, and fit chooses the mesh: give "
                "zero=, a Zero on the mesh of the loss, or leave out shard_map."
            )
