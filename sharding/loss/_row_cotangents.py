"""Derivatives that a user wrote: the states that their cotangents must have.

A cotangent of a result has rows where the result has; one of an operand must, too, or be a sum over
rows where all rows share the operand. Their power says whether the rule is linear in them: it is
``_LOSS`` less that of the value, and no function that is not linear keeps it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from optax_ext import traced_graph
from sharding.loss._row_rules import RowStep
from sharding.loss._row_states import EVERY_DIM, Coupled, Rows, RowsMeet, Shared, State

_LOSS = 1000  # the power of a loss that no value has by itself


def _inexact(avals: Sequence[Any]) -> list[int]:
    return [k for k, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.inexact)]


def pullback_of(step: RowStep) -> Any:
    """The traced pullback, of operands and cotangents of results; None if it has no derivative."""
    eqn, inexact, results = step.equation, _inexact(step.types), _inexact(step.result_types)
    if not (inexact and results):
        return None
    is_graphs = isinstance(eqn, traced_graph.Equation)
    bind = traced_graph.bind if is_graphs else traced_graph.bind_equation

    def pull(operands: list[Any], cotangents: list[Any]) -> Any:
        def fn(*values: Any) -> list[Any]:
            given = dict(enumerate(operands)) | dict(zip(inexact, values, strict=True))
            outs = bind(eqn, list(given.values()))
            return [outs[k] for k in results]

        return jax.vjp(fn, *[operands[k] for k in inexact])[1](cotangents)

    def types(avals: Sequence[Any]) -> list[Any]:
        return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]

    given = types(step.types), types([step.result_types[k] for k in results])
    try:
        return jax.make_jaxpr(pull)(*given)
    except Exception as error:  # of the user's rule, whatever it raises
        raise RowsMeet(f"its own derivative cannot be traced: {error}") from error


def cotangents_of(step: RowStep, outs: list[State]) -> list[State]:
    """The states of the cotangents of results."""
    return [_cotangent(outs[k]) for k in _inexact(step.result_types)]


def _cotangent(v: State) -> State:
    if isinstance(v, Rows) and v.dims:
        power = _LOSS - v.power - 1
        return dataclasses.replace(v, power=power, summed=False, ratios=frozenset(), random=False)
    if isinstance(v, Rows | Shared):
        return Shared(EVERY_DIM, _LOSS - (v.power or 0))
    return v if isinstance(v, Coupled) else v.cause


def check_cotangents(step: RowStep, ins: list[State], found: list[State]) -> None:
    """Raises if the cotangents ``found`` of operands ``ins`` do not keep rows apart as these do."""
    for k, state in zip(_inexact(step.types), found, strict=True):
        if isinstance(state, Coupled):
            where = f" ({state.line})" if state.line else ""
            raise RowsMeet(f"in its own derivative, {state.equation}: {state.reason}{where}")
        if not isinstance(step.operands[k], Literal) and not _is_cotangent(state, ins[k]):
            raise RowsMeet("its own derivative does not keep rows apart")


def _is_cotangent(found: Any, of: Any) -> bool:
    if isinstance(of, Coupled) or (isinstance(found, Shared) and found.is_zero):
        return True
    power = _LOSS - (of.power or 0)
    if isinstance(of, Rows) and of.dims:
        is_same = isinstance(found, Rows) and found.place == of.place and not found.is_linear
        return is_same and found.power == power - 1 and found.random <= of.random
    if isinstance(found, Rows):  # the sum over rows may be taken after the function
        return found.power == power - bool(found.dims) and found.random <= of.random
    return isinstance(found, Shared) and bool(found.power == power)
