"""Which values of a traced loss are differentiated: no other has a cotangent, not even zeros.

JAX differentiates a value if a derivative passes from a parameter to it, and from it to the loss.
Zeros in the place of no cotangent would be wrong: zero times an infinite derivative, such as that
of a norm at 0, is NaN. Sets of operands and of inputs are the bits of an int.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal

from optax_ext.equations import Call, Remat, Scan, record_of
from optax_ext.traced_graph import Equation, Graph

# Operations on real numbers whose derivative is zero everywhere, or is stopped.
_FLAT = {"ceil", "floor", "nextafter", "round", "sign", "stop_gradient"}


def bits(numbers: Iterable[int]) -> int:
    """The set of some numbers."""
    return functools.reduce(operator.or_, (1 << i for i in numbers), 0)


def members(mask: int) -> Iterator[int]:
    """The numbers of a set."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


class Differentiated(NamedTuple):
    """What is differentiated in a graph whose first output is a loss."""

    reads: list[int]  # for each value, the parameters by which it has a derivative
    values: set[int]  # those by which the loss has a derivative, too

    @classmethod
    def of(cls, graph: Graph, params: int) -> "Differentiated":
        """With respect to some inputs."""
        steps = [(eqn, _operand_sets(eqn, graph.types)) for eqn in graph.equations]
        reads = [0] * len(graph.types)
        for i in filter(lambda i: _is_inexact(graph.types[i]), members(params)):
            reads[i] = 1 << i
        for eqn, operands in steps:
            for v, mask in zip(eqn.results, operands, strict=True):
                reads[v] = _union(reads[eqn.operands[k]] for k in members(mask))
        reached = {graph.outputs[0]}
        for eqn, operands in reversed(steps):
            found = [mask for v, mask in zip(eqn.results, operands, strict=True) if v in reached]
            reached |= {eqn.operands[k] for k in members(_union(found))}
        return cls(reads, {v for v in reached if reads[v]})


def carried_derivatives(
    jaxpr: Jaxpr, carried: range, by: Iterable[int], results: Iterable[int]
) -> set[int]:
    """The carried operands of a loop that are differentiated in some layer.

    Args:
      jaxpr: of one layer.
      carried: the positions of those operands.
      by: operands by which there is a derivative.
      results: of the loop, by which the loss has one.
    """
    operands = of_jaxpr(jaxpr)
    carry = range(len(carried))
    reached, given = set(results), bits(by)

    before: Any = None
    while before != (given, reached):  # until another layer reaches no more values
        before = given, set(reached)
        given |= bits(carried[j] for j in carry if operands[j] & given)
        reached |= {j for i in reached for j in carry if operands[i] >> carried[j] & 1}
    return {carried[j] for j in carry if j in reached and given >> carried[j] & 1}


def of_jaxpr(jaxpr: Jaxpr) -> list[int]:
    """For each result, the inputs by which it has a derivative."""
    found: dict[Any, int] = {x: 1 << i for i, x in enumerate(jaxpr.invars)}
    read: Callable[[Any], int] = lambda x: 0 if isinstance(x, Literal) else found.get(x, 0)  # noqa: E731
    for eqn in jaxpr.eqns:
        types = [x.aval for x in eqn.invars], [x.aval for x in eqn.outvars]
        for var, mask in zip(eqn.outvars, _of_equation(eqn, *types), strict=True):
            found[var] = _union(read(eqn.invars[k]) for k in members(mask))
    return list(map(read, jaxpr.outvars))


def _operand_sets(eqn: Equation, types: Sequence[Any]) -> list[int]:
    return _of_equation(eqn, [types[v] for v in eqn.operands], [types[v] for v in eqn.results])


def _of_equation(eqn: Any, operands: Sequence[Any], results: Sequence[Any]) -> list[int]:
    """For each result of an equation, the operands by which it has a derivative."""
    inexact = bits(k for k, x in enumerate(operands) if _is_inexact(x))
    record = record_of(eqn)
    masks = [inexact] * len(results)  # if nothing is known, by all
    if eqn.primitive.name in _FLAT:
        masks = [0] * len(results)
    elif isinstance(record, Call):
        masks = of_jaxpr(record.body.jaxpr)
    elif isinstance(record, Remat):
        masks = of_jaxpr(record.body)
    elif isinstance(record, Scan):
        layer = of_jaxpr(record.body.jaxpr)
        masks = _of_loop(layer, record.num_consts, record.num_carry)
    elif eqn.primitive.name == "cond":
        branches = [of_jaxpr(branch.jaxpr) for branch in eqn.params["branches"]]
        masks = [_union(of_branches) << 1 for of_branches in zip(*branches, strict=True)]
    return [mask & inexact if _is_inexact(x) else 0 for x, mask in zip(results, masks, strict=True)]


def _of_loop(layer: list[int], num_consts: int, num_carry: int) -> list[int]:
    """Of all layers of a loop, from what is so of one."""
    after = list(layer)
    while True:
        carried = [(1 << num_consts + j, after[j]) for j in range(num_carry)]
        more = [mask | _union(x for k, x in carried if mask & k) for mask in after]
        if more == after:
            return after
        after = more


def _is_inexact(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def _union(masks: Iterable[int]) -> int:
    return functools.reduce(operator.or_, masks, 0)
