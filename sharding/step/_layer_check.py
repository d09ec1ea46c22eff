"""Stage 2: whether a loss computes the same from handles of its layers' parameters as from arrays.

Handles are no arrays: Python code in the loss can count them, ask for their type, or read the size
of what is in them. Stage 2 does not need them, so that it gives such a loss arrays.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from sharding.step._gather_params import HANDLE_MARK, call_marking
from sharding.step._loss_params import differentiated, loss_params
from sharding.step._param_uses import uses_in
from sharding.step._step_plan import StepPlan


def confirm_layers(plan: StepPlan, loss: Callable[..., Any], *args: Any) -> StepPlan:
    """The plan, which reduces gradients in layers only if the loss takes handles as arrays.

    Args:
      plan: of the step.
      loss: a function of the list of parameters and ``args``.
      *args: abstract arrays.
    """
    if not plan.reduces_in_layers:
        return plan
    at_once = plan.reducing_at_once()
    expected, _ = _trace(at_once, loss, args)
    try:
        found, only_gathered = _trace(plan, loss, args)
    except Exception:  # of the user's code, which gets arrays instead
        return at_once
    return plan if only_gathered and found == expected else at_once


def _trace(
    plan: StepPlan, loss: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[list[Any], bool]:
    """What a loss computes, and whether it passes its handles to ``gather`` alone."""
    full = [jax.ShapeDtypeStruct(param.shape, param.loss_dtype) for param in plan.params]
    inputs = jax.eval_shape(lambda full: differentiated(plan, full), full)

    def call(full: list[Any], inputs: list[Any], *args: Any) -> Any:
        return call_marking(loss, loss_params(plan, inputs, full), *args)

    traced = jax.make_jaxpr(call)(full, inputs, *args)
    uses = uses_in(traced.jaxpr, 2 * len(full), [HANDLE_MARK])
    handles = {i for i, param in enumerate(plan.params) if param.gathered_by_loss}
    taps = {len(full) + i for i in handles}
    # A custom derivative would have to return the gradient of a handle.
    touched = uses.otherwise | uses.custom | uses.marked[HANDLE_MARK].keys()
    only_gathered = not (taps & touched) and not (handles & uses.otherwise)
    constants = [_constant(x) for x in traced.consts]
    return [*constants, *operations(traced.jaxpr)], only_gathered


def operations(jaxpr: Any) -> Iterator[Any]:
    """The operations of a jaxpr and of those in it: literals, result types, plain parameters."""
    for eqn in jaxpr.eqns:
        inner = [getattr(x, "jaxpr", x) for value in eqn.params.values() for x in _items(value)]
        inner = [x for x in inner if hasattr(x, "eqns")]
        skipped = inner or eqn.primitive.name == "name"  # marks of handles have one of their own
        plain = {} if skipped else {k: v for k, v in eqn.params.items() if _is_plain(v)}
        literals = [_constant(v.val) for v in eqn.invars if hasattr(v, "val")]
        results = [(v.aval.shape, str(v.aval.dtype)) for v in eqn.outvars]
        yield eqn.primitive.name, literals, results, str(plain)
        for sub in inner:
            yield from operations(sub)


def _items(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else (value,)


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
