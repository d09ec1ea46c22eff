"""Sentences beside a plan: which stage to take, and what an optimizer saves."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sharding.plan._format import size
from sharding.plan.cost._stage_plan import StagePlan
from sharding.plan.machine._devices import DeviceKind

# The share of the memory that a recommended stage leaves for activations.
_ROOM = 0.2
# A warning is issued where a stage leaves less than this share, which is also what a recommended
# stage leaves where activations are counted.
_TIGHT = 0.1


def activations_counted(stages: Sequence[StagePlan]) -> bool:
    """Whether activations are part of the stages."""
    return all(stage.activations is not None for stage in stages)


def recommend(stages: Sequence[StagePlan], device: DeviceKind | None) -> tuple[str, str]:
    """The stage that sends least among those that leave room, and why."""
    if device is None:
        return "", "What fits is not known: nothing is known of the device's memory."
    counted = activations_counted(stages)
    room, use = (_TIGHT, "free") if counted else (_ROOM, "for activations")
    fitting = [stage for stage in stages if stage.peak <= device.memory]
    if not fitting:
        least = min(stages, key=lambda stage: stage.peak)
        return "", (
            f"Does not fit a {device.name}: {least.name} needs least, {size(least.peak)} of "
            f"{size(device.memory)}, {'with' if counted else 'before'} activations."
        )
    roomy = [stage for stage in fitting if stage.peak <= (1 - room) * device.memory]
    if not roomy:
        best = min(fitting, key=lambda stage: stage.peak)
        left = size(device.memory - best.peak)
        return best.name, (
            f"{best.name} is recommended: it needs least; only {left} are left {use}."
        )
    # Within 1 % of the fewest bytes sent, the smallest.
    fewest = min(stage.wire for stage in roomy)
    best = min(
        (stage for stage in roomy if stage.wire <= 1.01 * fewest), key=lambda stage: stage.peak
    )
    left = size(device.memory - best.peak)
    return best.name, (
        f"{best.name} is recommended: it sends least among the stages that leave {room:.0%} of "
        f"the memory {use} ({left} here); ties go to the smaller."
    )


def tight_notes(stages: Sequence[StagePlan], device: DeviceKind | None) -> list[str]:
    """A warning of stages that fit, but leave next to nothing."""
    if device is None:
        return []
    names = [s.name for s in stages if (1 - _TIGHT) * device.memory < s.peak <= device.memory]
    if not names:
        return []
    leave = "leaves" if len(names) == 1 else "leave"
    uses = "for activations and for what the allocator loses: hardly enough to train"
    if activations_counted(stages):
        uses = "free: hardly enough for what the allocator loses"
    return [f"warning: {', '.join(names)} {leave} less than {_TIGHT:.0%} of the memory {uses}."]


def deepspeed_stage_2(num_params: float, devices: int) -> dict[str, float]:
    """DeepSpeed's figures for Adam on one device at stage 2 without offload, in bytes.

    Its documentation counts 4 P + 16 P / n, its code 2 P + 18 P / n: two bytes a parameter of
    float16 weights; gradients in both float16 and float32, and float32 master and moments, sharded.

    References:
      DeepSpeed's estimate_zero2_model_states_mem_needs and the page on memory requirements.
    """
    return {
        "documentation": 4 * num_params + 16 * num_params / devices,
        "code": 2 * num_params + 18 * num_params / devices,
    }


def saving_of(mine: StagePlan, theirs: StagePlan, names: tuple[str, str] = ("it", "AdamW")) -> str:
    """A sentence on what one optimizer saves beside another at a stage."""
    saved = theirs.memory - mine.memory
    share = saved / theirs.memory if theirs.memory else 0.0
    dominate = mine.params + mine.grads > 2 * (mine.opt_state + mine.master - mine.host)
    text = (
        f"At {mine.name} {names[0]} holds {size(abs(saved))} {'less' if saved >= 0 else 'more'} "
        f"than {names[1]}: {abs(share):.0%} of a device's {size(theirs.memory)}."
    )
    if dominate and abs(share) < 0.1:
        text += " Parameters and gradients dominate; the optimizer hardly matters for memory here."
    return text


def why_wider(
    params: Any,
    tx: optax.GradientTransformation,
    other: optax.GradientTransformation,
    names: tuple[str, str] = ("it", "AdamW"),
) -> str:
    """A sentence where the state of one optimizer is wider than that of another; else empty.

    The moments of optax have the dtype of their parameters, bfloat16 as well.
    """
    mine, theirs = (_widest(params, each) for each in (tx, other))
    if theirs is None or mine is None or mine.itemsize <= theirs.itemsize:
        return ""
    return (
        f"{names[1]} keeps its moments in {theirs}, the dtype of the parameters; {names[0]} keeps "
        f"its averages in {mine}, so that small steps are not lost. With --master both are float32."
    )


def _widest(params: Any, tx: optax.GradientTransformation) -> Any:
    """The widest dtype of large floating arrays of the state, as wide parameters make them."""
    state = jax.tree.leaves(jax.eval_shape(tx.init, params))
    limit = max((math.prod(x.shape) for x in jax.tree.leaves(params)), default=0)
    wide = [
        jnp.dtype(x.dtype)
        for x in state
        if jnp.issubdtype(x.dtype, jnp.floating) and 2 * math.prod(x.shape) >= limit
    ]
    return max(wide, key=lambda dtype: dtype.itemsize, default=None)
