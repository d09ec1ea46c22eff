"""``--remat``: what a loss stores, planned for a target and a number of bytes."""

import contextlib
from argparse import Namespace

import jax
import jax.numpy as jnp

from sharding.cli._setup import Setup, dtype_of, target_of
from sharding.plan._format import read_size, size
from sharding.plan.cost._estimate import Plan
from sharding.plan.machine import targets
from sharding.plan.search._traced_model import TracedModel
from sharding.remat._loss_search import LossSearch, PlannableLoss
from sharding.remat._planned_loss import LossPlan


def planned_loss(options: Namespace, setup: Setup, plan: Plan, stage: str) -> tuple[LossPlan, str]:
    """The fastest plan with which the loss takes at most ``--remat`` bytes, and a note on it."""
    model = setup.model
    auto = options.remat == "auto"
    if model is None:
        raise ValueError(
            "--remat plans a loss: give --model a model by name, or MODULE:NAME of a TracedModel."
        )
    if auto and setup.device is None:
        raise ValueError(f"--remat auto needs the memory of {options.target}: give --memory GIB.")
    budget = _left_for_activations(setup, plan, stage) if auto else read_size(options.remat)
    device, compiled = _compiled_for(options)
    dtype = jnp.dtype(options.compute_dtype) if options.compute_dtype else dtype_of(options)
    if isinstance(model, TracedModel):
        loss = model.loss_fn
        batch = model.batch(setup.batch)
    else:
        loss = model.make_loss()
        batch = jax.ShapeDtypeStruct((setup.batch, setup.length + 1), jnp.int32)
    in_loops = plan.stage(stage).share < 1  # parameters are gathered layer by layer
    plannable = PlannableLoss(loss, model.abstract(dtype), batch, device)
    planned = LossSearch(plannable, setup.device, in_loops=in_loops).fastest(budget)
    return planned, (
        f"Activations: the loss computes again {planned.summary}, and needs {size(planned.peak)} "
        f"in a program compiled for {compiled}; {planned.extra_time:.0%} of a step's time is "
        "recomputation, by the device's figures."
    )


def _compiled_for(options: Namespace) -> tuple[jax.Device, str]:
    """A device to compile for, and its name: of the target, or of what is likest to it."""
    target = target_of(options)
    likest = ["h100x1"] * (target.kind != "cpu" and not target.is_torus)
    for name in [options.target] * (target.kind != "cpu") + likest:
        with contextlib.suppress(ValueError):  # nothing compiles for it here
            device = targets.topology(name)[0]
            instead = f" instead of {target.kind}" * (name != options.target)
            return device, f"one {targets.parse(name).kind}{instead}"
    instead = f", as nothing here compiles for {options.target}" * (target.kind != "cpu")
    return targets.topology("cpu:1")[0], f"one device of this machine's CPU{instead}"


def _left_for_activations(setup: Setup, plan: Plan, stage: str) -> float:
    """What the state of a stage leaves of a device."""
    assert setup.device is not None
    left = setup.device.memory - plan.stage(stage).with_activations(None).peak
    if left <= 0:
        memory = f"the {size(setup.device.memory)} of a device"
        raise ValueError(f"--remat auto: {stage} leaves nothing of {memory}.")
    return left
