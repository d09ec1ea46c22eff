"""Whether a loss computes the same from handles of its layers' parameters as from arrays.

Python code can count handles, ask for their type, or read the size of what is in them. Such a
loss gets arrays: below stage 3, and at stage 3 for views, or dropped results, that handles do not
allow.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from sharding._jaxprs import all_equations, inner_jaxprs
from sharding.step._gather_params import FULL_MARK, HANDLE_MARK, call_with_shards, marking
from sharding.step._loss_params import differentiated, loss_params
from sharding.step._param_uses import uses_in, without_dead
from sharding.step._step_plan import ParamPlan, StepPlan, warn_of_unsharded


def confirm_layers(plan: StepPlan, loss: Callable[..., Any], *args: Any) -> StepPlan:
    """The plan, in which the loss of the list of parameters gets the handles it takes as arrays."""
    if plan.layout.stage == 3:
        plan = _confirm_views(plan, loss, args)
        warn_of_unsharded(plan)
    if not plan.has_layers:
        return plan
    # A step that reduces, or adds, all gradients after the backward pass.
    arrays = tuple(param._replace(gathered_by_loss=False) for param in plan.params)
    at_once = dataclasses.replace(plan, params=arrays)
    expected, _ = _trace(at_once, loss, args)
    try:
        found, only_gathered = _trace(plan, loss, args)
    except Exception:  # of the user's code, which gets arrays instead
        return at_once
    return plan if only_gathered and found == expected else at_once


def _confirm_views(plan: StepPlan, loss: Callable[..., Any], args: tuple[Any, ...]) -> StepPlan:
    """At stage 3, without handles that the loss uses as arrays, where it does more than gather."""
    assert plan.uses is not None
    more = plan.uses.viewed.keys() | plan.uses.dead.keys()
    if not any(plan.params[i].gathered_by_loss and plan.params[i].shard.dim for i in more):
        return plan
    arrays = tuple(
        param._replace(gathered_by_loss=False, gather_dim=param.shard.dim) if i in more else param
        for i, param in enumerate(plan.params)
    )
    without = dataclasses.replace(plan, params=arrays)
    try:
        live = without_dead(_traced(plan, loss, args).jaxpr)
    except Exception:  # as below stage 3
        return without
    return without if uses_in(live, 0, [FULL_MARK]).unknown[FULL_MARK] else plan


def _traced(plan: StepPlan, loss: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The trace of a loss of parameters as a device holds them, and of the differentiated ones."""

    def held(param: ParamPlan) -> jax.ShapeDtypeStruct:
        shape = plan.shard_shape(param) if plan.layout.stage == 3 else param.shape
        return jax.ShapeDtypeStruct(shape, param.loss_dtype)

    params = list(map(held, plan.params))
    inputs = jax.eval_shape(lambda params: differentiated(plan, params), params)

    def call(params: list[Any], inputs: list[Any], *args: Any) -> Any:
        return call_with_shards(loss, loss_params(plan, inputs, params), *args)

    with marking():
        return jax.make_jaxpr(call)(params, inputs, *args)


def _trace(
    plan: StepPlan, loss: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[list[Any], bool]:
    """What a loss computes, and whether it passes its handles to ``gather`` alone."""
    traced, num = _traced(plan, loss, args), len(plan.params)
    uses = uses_in(traced.jaxpr, 2 * num, [HANDLE_MARK])
    handles = {i for i, param in enumerate(plan.params) if param.gathered_by_loss}
    taps = {num + i for i in handles}
    # A custom derivative would have to return the gradient of a handle.
    touched = uses.otherwise.keys() | uses.custom | uses.marked[HANDLE_MARK].keys()
    only_gathered = not (taps & touched) and not (handles & uses.otherwise.keys())
    constants = [_constant(x) for x in traced.consts]
    return [*constants, *operations(without_dead(traced.jaxpr))], only_gathered


def operations(jaxpr: Any) -> Iterator[Any]:
    """The operations of a jaxpr and of those in it: literals, result types, plain parameters."""
    for eqn in all_equations(jaxpr):
        # Marks of handles have a name of their own.
        skipped = eqn.primitive.name == "name" or any(True for _ in inner_jaxprs(eqn))
        plain = {} if skipped else {k: v for k, v in eqn.params.items() if _is_plain(v)}
        literals = [_constant(v.val) for v in eqn.invars if hasattr(v, "val")]
        results = [(v.aval.shape, str(v.aval.dtype)) for v in eqn.outvars]
        yield eqn.primitive.name, literals, results, str(plain)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | complex | str | np.dtype)


def _constant(x: Any) -> Any:
    """A constant of a trace: its type, and its value where that is small."""
    kind = (np.shape(x), str(getattr(x, "dtype", type(x))))
    small = isinstance(x, bool | int | float | complex | np.generic | np.ndarray | jax.Array)
    if not small or np.size(x) > 1024 or "key<" in kind[1]:
        return kind
    if isinstance(x, jax.Array) and (isinstance(x, jax.core.Tracer) or not x.is_fully_addressable):
        return kind
    return kind, np.asarray(x).tobytes()
