"""The equations inside a jaxpr, those of its inputs that it reads; loops with another body."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, primitives
from jax.interpreters import partial_eval

from optax_ext.equations import Remat, Scan, check_known, inner_jaxprs, record_of


def all_equations(jaxpr: Jaxpr) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from all_equations(inner)


def is_checkpoint(eqn: Any) -> bool:
    """Whether an equation is a ``jax.checkpoint``."""
    return isinstance(record_of(eqn), Remat)


def without_checkpoints(jaxpr: Any) -> Any:
    """The same operations, in loops and branches, too, with no ``jax.checkpoint`` around them."""
    if type(jaxpr) in (list, tuple):
        return type(jaxpr)(map(without_checkpoints, jaxpr))
    inner = getattr(jaxpr, "jaxpr", jaxpr)  # of one that is closed; since jax 0.11 it is itself
    if not isinstance(inner, Jaxpr):
        return jaxpr
    equations = []
    for eqn in inner.eqns:
        params = {name: without_checkpoints(value) for name, value in eqn.params.items()}
        if isinstance(record := record_of(eqn), Remat):
            params = {"call_jaxpr": ClosedJaxpr(without_checkpoints(record.body), ())}
            eqn = eqn.replace(primitive=primitives.closed_call_p)
        equations.append(eqn.replace(params=params))
    inner = inner.replace(eqns=equations)
    return jaxpr.replace(jaxpr=inner) if isinstance(jaxpr, ClosedJaxpr) else inner


def inputs_read(jaxpr: Jaxpr) -> list[bool]:
    """For each input, whether an output depends on it."""
    check_known(jaxpr)
    used: list[bool] = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1]
    return used


def run_scan(
    scan: Scan, operands: Sequence[Any], layer: Callable[..., Sequence[Any]], **options: Any
) -> list[Any]:
    """The results of a loop, with another function in the place of its body."""
    first, last = scan.num_consts, scan.num_consts + scan.num_carry
    consts, carry, slices = operands[:first], list(operands[first:last]), list(operands[last:])

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        out = layer(*consts, *carry, *slices)
        return list(out[: scan.num_carry]), list(out[scan.num_carry :])

    carry, outs = lax.scan(step, carry, slices, **scan.options | options)
    return [*carry, *outs]
