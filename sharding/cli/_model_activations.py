"""``--remat``: what a loss stores, planned for a target and a number of bytes."""

from argparse import Namespace

import jax
import jax.numpy as jnp

from sharding.cli._setup import Setup, dtype_of, target_of
from sharding.plan._format import read_size, size
from sharding.plan.cost._estimate import Plan
from sharding.plan.search._traced_model import TracedModel
from sharding.remat._loss_plan import LossPlan
from sharding.remat._plan_activations import loss_search


def planned_loss(options: Namespace, setup: Setup, plan: Plan, stage: str) -> LossPlan:
    """The fastest plan with which the loss takes at most ``--remat`` bytes."""
    model, auto = setup.model, options.remat == "auto"
    if model is None:
        raise ValueError(
            "--remat plans a loss: give --model a model by name, or MODULE:NAME of a TracedModel."
        )
    if auto and setup.device is None:
        raise ValueError(f"--remat auto needs the memory of {options.target}: give --memory GIB.")
    budget = _left_for_activations(setup, plan, stage) if auto else read_size(options.remat)
    target = "cpu:1" if target_of(options).kind == "cpu" else options.target
    dtype = jnp.dtype(options.compute_dtype) if options.compute_dtype else dtype_of(options)
    if isinstance(model, TracedModel):
        loss, batch = model.loss_fn, model.batch(setup.batch)
    else:
        loss = model.make_loss()
        batch = jax.ShapeDtypeStruct((setup.batch, setup.length + 1), jnp.int32)
    in_loops = plan.stage(stage).share < 1  # parameters are gathered layer by layer
    search = loss_search(loss, model.abstract(dtype), batch, target, in_loops=in_loops)
    return search.fastest(budget)


def _left_for_activations(setup: Setup, plan: Plan, stage: str) -> float:
    """What the state of a stage leaves of a device."""
    assert setup.device is not None
    left = setup.device.memory - plan.stage(stage).with_activations(None).peak
    if left <= 0:
        memory = f"the {size(setup.device.memory)} of a device"
        raise ValueError(f"--remat auto: {stage} leaves nothing of {memory}.")
    return left


def note_on(planned: LossPlan) -> str:
    return (
        f"Activations: the loss computes again {planned.summary}, and needs {size(planned.peak)} "
        f"in a program compiled for one device; {planned.extra_time:.0%} of a step's time is "
        "recomputation, by the device's figures."
    )
