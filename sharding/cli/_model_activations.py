"""``--remat``: what a model or a loss stores, planned for a target and a number of bytes."""

import math
from argparse import Namespace
from typing import Any

import jax
import jax.numpy as jnp

from sharding.cli._setup import Setup, dtype_of, target_of
from sharding.plan._format import size
from sharding.plan.cost._estimate import Plan
from sharding.plan.model._traced_model import TracedModel
from sharding.remat._choose_saved_names import NameRequest
from sharding.remat._plan_activations import device_of_target, in_bytes, loss_search
from sharding.remat._program_bytes import types_of
from sharding.remat._remat_plan import RematPlan, no_plan_fits
from sharding.remat._stack_plan import Stack, StackPlan


def planned_model(options: Namespace, setup: Setup, plan: Plan, stage: str) -> tuple[Any, float]:
    """The fastest plan with which the whole loss takes at most ``--remat`` bytes.

    It is one of the layers of a ``Decoder``, or of a loss of one's own. The second result is bytes
    of activations and temporaries of the loss.
    """
    model, auto = setup.model, options.remat == "auto"
    if model is None:
        raise ValueError(
            "--remat plans a loss: give --model a model by name, or MODULE:NAME of a TracedModel."
        )
    if auto and setup.device is None:
        raise ValueError(f"--remat auto needs the memory of {options.target}: give --memory GIB.")
    budget = _memory_for_layers(setup, plan, stage) if auto else in_bytes(options.remat)
    on_cpu = target_of(options).kind == "cpu"
    kind, device = device_of_target("cpu:1" if on_cpu else options.target)
    dtype = jnp.dtype(options.compute_dtype) if options.compute_dtype else dtype_of(options)
    if isinstance(model, TracedModel):
        given = model.loss_fn, model.abstract(dtype), model.batch(setup.batch)
        found = loss_search(*given, device).fastest(budget)
        return found, found.peak
    params = types_of(model.abstract(dtype))
    x = jax.ShapeDtypeStruct((setup.batch, setup.length, model.width), dtype)
    tokens = jax.ShapeDtypeStruct((setup.batch, setup.length + 1), jnp.int32)
    stack = Stack(model.apply_layer, params["layers"], x, model.layers, device, kind)
    candidates = stack.candidates(NameRequest(), False)

    def whole_model(fn: Any, layers: Any) -> tuple[Any, Any, Any]:
        return model.make_loss(stack=fn), params | {"layers": layers}, tokens

    def with_whole(choice: Any) -> tuple[StackPlan, float]:
        whole = stack.temporaries(choice, whole_model)
        return stack.plan(choice, stack.peak(choice), budget), whole

    limit = budget
    while limit > 0:
        try:
            choice = stack.fastest(candidates, limit)
        except ValueError:
            break
        planned, whole = with_whole(choice)
        if whole <= budget:
            return planned, whole
        # What is beside the layers takes the rest: on to plans of fewer bytes.
        limit = min(planned.peak, limit - (whole - budget)) * (1 - 1e-9)
    planned, whole = with_whole(stack.least(candidates))
    if whole == math.inf:
        raise ValueError(f"--remat: the loss does not fit {options.target} by itself.")
    if whole > budget:
        raise no_plan_fits(budget, "layers, logits and loss need", whole)
    return planned, whole


def _memory_for_layers(setup: Setup, plan: Plan, stage: str) -> float:
    """What the state of a stage leaves of a device."""
    assert setup.device is not None
    left = setup.device.memory - plan.stage(stage).with_activations(None).peak
    if left <= 0:
        memory = f"the {size(setup.device.memory)} of a device"
        raise ValueError(f"--remat auto: {stage} leaves nothing of {memory}.")
    return left


def note_on(planned: RematPlan, activations: float) -> str:
    parts = f"layers store {planned.summary} and need {size(planned.peak)}, the whole loss "
    if not isinstance(planned, StackPlan):
        parts = f"the loss stores {planned.summary}, and needs "
    return (
        f"Activations: {parts}{size(activations)} in a program compiled for one device; "
        f"{planned.extra_time:.0%} of a step's time is recomputation, by the device's figures."
    )
