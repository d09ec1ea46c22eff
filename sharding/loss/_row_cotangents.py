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

from optax_ext.traced_graph import bind
from sharding.loss._row_dims import RowStep
from sharding.loss._row_states import CLIPPED, Coupled, Rows, RowsMeet, Shared, unknown

_LOSS = 1000  # the power of a loss that no value has by itself


def _inexact(avals: Sequence[Any]) -> list[int]:
    return [k for k, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.inexact)]


def pullback_of(step: RowStep) -> Any:
    """The traced pullback, of operands and cotangents of results; None if it has no derivative."""
    eqn, inexact, results = step.equation, _inexact(step.types), _inexact(step.result_types)
    if not (inexact and results):
        return None

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


def cotangents_of(step: RowStep, outs: list[Any]) -> list[Any]:
    """The states of the cotangents of results."""
    return [_cotangent(outs[k], step.result_types[k]) for k in _inexact(step.result_types)]


def _cotangent(v: Any, aval: Any) -> Any:
    if isinstance(v, Rows) and v.dims:
        return _of_rows(v)
    if isinstance(v, Rows | Shared):
        return dataclasses.replace(unknown(aval), power=_LOSS - (v.power or 0))
    return v if isinstance(v, Coupled) else Coupled(CLIPPED)


def _of_rows(v: Rows) -> Rows:
    return Rows(v.dims, v.count, v.before, v.after, power=_LOSS - v.power - 1)


def check_cotangents(step: RowStep, ins: list[Any], found: list[Any]) -> None:
    """Raises if the cotangents ``found`` of operands ``ins`` do not keep rows apart as these do."""
    for k, state in zip(_inexact(step.types), found, strict=True):
        if isinstance(state, Coupled):
            where = f" ({state.line})" if state.line else ""
            raise RowsMeet(f"in its own derivative, {state.equation}: {state.reason}{where}")
        is_fixed = isinstance(step.operands[k], Literal) or isinstance(ins[k], Coupled)
        if not is_fixed and not _is_cotangent(state, ins[k]):
            raise RowsMeet("its own derivative does not keep rows apart")


def _is_cotangent(found: Any, of: Any) -> bool:
    if isinstance(found, Shared) and found.is_zero:
        return True
    if not isinstance(found, Shared | Rows) or not isinstance(of, Shared | Rows):
        return False
    if isinstance(found, Rows) and found.random > of.random:
        return False
    if isinstance(of, Rows) and of.dims:
        return found == dataclasses.replace(_of_rows(of), random=found.random)
    # The sum over rows may be taken after the function.
    later = isinstance(found, Rows) and bool(found.dims)
    return found.power == _LOSS - (of.power or 0) - later
