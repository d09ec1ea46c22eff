"""Equations inside a jaxpr, FLOPs of products; inputs that it reads; loops with another body."""

import math
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


def product_flops(eqn: Any, operands: Sequence[Any], results: Sequence[Any]) -> int:
    """Two for each term of each result of a matrix product or a convolution; 0 of what is none."""
    if eqn.primitive is lax.dot_general_p:
        (summed, _), _ = eqn.params["dimension_numbers"]
        terms = math.prod(operands[0].shape[dim] for dim in summed)
    elif eqn.primitive is lax.conv_general_dilated_p:
        kernel, out = operands[1].shape, eqn.params["dimension_numbers"].rhs_spec[0]
        terms = math.prod(kernel) // max(kernel[out], 1)
    else:
        return 0
    return 2 * math.prod(results[0].shape) * terms


def is_checkpoint(eqn: Any) -> bool:
    """Whether an equation is a ``jax.checkpoint``."""
    return isinstance(record_of(eqn), Remat)


def rewritten(jaxpr: Any, change: Callable[[Any], Any]) -> Any:
    """The same function, in loops and branches, too, with other equations; None leaves one out."""
    if type(jaxpr) in (list, tuple):
        return type(jaxpr)(rewritten(x, change) for x in jaxpr)
    inner = getattr(jaxpr, "jaxpr", jaxpr)  # of one that is closed; since jax 0.11 it is itself
    if not isinstance(inner, Jaxpr):
        return jaxpr
    equations = [new for new in map(change, inner.eqns) if new is not None]
    before, after = ({x for eqn in eqns for x in eqn.effects} for eqns in (inner.eqns, equations))
    inner = inner.replace(eqns=equations, effects=set(inner.effects) - (before - after))
    return jaxpr.replace(jaxpr=inner) if isinstance(jaxpr, ClosedJaxpr) else inner


def call_of(body: Jaxpr) -> dict[str, Any]:
    """Primitive and parameters of an equation that calls a function without constants."""
    params = {"call_jaxpr": ClosedJaxpr(body, ())}
    return {"primitive": primitives.closed_call_p, "params": params}


def without_checkpoints(jaxpr: Any) -> Any:
    """The same operations, with no ``jax.checkpoint`` around them."""

    def change(eqn: Any) -> Any:
        if isinstance(record := record_of(eqn), Remat):
            return eqn.replace(**call_of(without_checkpoints(record.body)))
        params = {name: without_checkpoints(value) for name, value in eqn.params.items()}
        return eqn.replace(params=params)

    return rewritten(jaxpr, change)


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
