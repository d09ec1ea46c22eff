"""Which values of a traced loss are differentiated: no other has a cotangent, not even zeros.

JAX differentiates a value if a derivative passes from a parameter to it, and from it to the loss.
Zeros in the place of no cotangent would be wrong: zero times an infinite derivative, such as that
of a norm at 0, is NaN. Sets of operands and of inputs are the bits of an int.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Jaxpr, Literal

from optax_ext.equations import Call, Remat, Scan, record_of
from optax_ext.traced_graph import Graph, Value, bind
from sharding._jaxprs import inputs_read

# Operations on real numbers whose derivative is zero everywhere, or is stopped; and those whose one
# result has a derivative by each of them. JAX is asked about all others.
_FLAT = {"ceil", "floor", "round", "sign", "stop_gradient"}
_DENSE_NAMES = """
abs add add_any broadcast_in_dim concatenate convert_element_type copy cos cumsum div dot_general
dynamic_slice dynamic_update_slice erf exp exp2 expand_dims expm1 gather integer_pow log log1p
logistic max min mul neg pad pow reduce_max reduce_min reduce_sum reshape rev rsqrt select_n
sharding_constraint sin slice sqrt square squeeze sub tanh transpose
"""
_DENSE = frozenset(_DENSE_NAMES.split())


def bits(numbers: Iterable[int]) -> int:
    """The set of some numbers."""
    return _union(1 << i for i in numbers)


def members(mask: int) -> Iterator[int]:
    """The numbers of a set."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


class Differentiated(NamedTuple):
    """What is differentiated in a graph whose first output is a loss."""

    params: int  # the inputs by which
    reads: list[int]  # for each value, those by which it has a derivative
    values: set[Value]  # those by which the loss has a derivative, too

    @classmethod
    def of(cls, graph: Graph, params: int) -> "Differentiated":
        """With respect to some inputs."""
        reads, steps = [0] * len(graph.types), []
        for i in filter(lambda i: _is_inexact(graph.types[i]), members(params)):
            reads[i] = 1 << i
        for eqn in graph.equations:
            types = [graph.types[v] for v in eqn.operands], [graph.types[v] for v in eqn.results]
            moved = bits(k for k, v in enumerate(eqn.operands) if reads[v])
            operands = _of_equation(eqn, *types, moved)
            steps.append((eqn, operands))
            for v, mask in zip(eqn.results, operands, strict=True):
                reads[v] = _union(reads[eqn.operands[k]] for k in members(mask))
        reached = {graph.outputs[0]}
        for eqn, operands in reversed(steps):
            found = [mask for v, mask in zip(eqn.results, operands, strict=True) if v in reached]
            reached |= {eqn.operands[k] for k in members(_union(found))}
        return cls(params, reads, {v for v in reached if reads[v]})


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
    reached, given = set[int](results), bits(by)
    before: Any = None
    while before != (given, reached):  # until another layer reaches no more values
        before = given, set(reached)
        given |= bits(carried[j] for j in carry if operands[j] & given)
        reached |= {j for i in reached for j in carry if operands[i] >> carried[j] & 1}
    found = (j for j in carry if j in reached and given >> carried[j] & 1)
    return {carried[j] for j in found}


def of_jaxpr(jaxpr: Jaxpr) -> list[int]:
    """For each result, the inputs by which it has a derivative."""
    found: dict[Any, int] = {x: 1 << i for i, x in enumerate(jaxpr.invars)}
    read: Callable[[Any], int] = lambda x: 0 if isinstance(x, Literal) else found.get(x, 0)  # noqa: E731
    for eqn in jaxpr.eqns:
        types = [x.aval for x in eqn.invars], [x.aval for x in eqn.outvars]
        moved = bits(k for k, x in enumerate(eqn.invars) if read(x))
        for var, mask in zip(eqn.outvars, _of_equation(eqn, *types, moved), strict=True):
            found[var] = _union(read(eqn.invars[k]) for k in members(mask))
    return list(map(read, jaxpr.outvars))


def _of_equation(
    eqn: Any, operands: Sequence[Any], results: Sequence[Any], moved: int
) -> list[int]:
    """For each result of an equation, the operands of ``moved`` by which it has a derivative."""
    inexact = moved & bits(k for k, x in enumerate(operands) if _is_inexact(x))
    record = record_of(eqn)
    if eqn.primitive.name in _FLAT:
        masks = [0] * len(results)
    elif eqn.primitive.name in _DENSE or not inexact:
        masks = [inexact] * len(results)
    elif isinstance(record, Call):
        masks = of_jaxpr(record.body.jaxpr)
    elif isinstance(record, Remat):
        masks = of_jaxpr(record.body)
    elif isinstance(record, Scan):
        layer = of_jaxpr(record.body.jaxpr)
        masks = _of_loop(layer, record.num_consts, record.num_carry)
    elif eqn.primitive.name == "while":
        first, num_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        layer = of_jaxpr(eqn.params["body_jaxpr"].jaxpr)
        after = _of_loop(layer, num_consts, len(results))
        masks = [(mask | 1 << num_consts + j) << first for j, mask in enumerate(after)]
    elif eqn.primitive.name == "cond":
        branches = [of_jaxpr(branch.jaxpr) for branch in eqn.params["branches"]]
        masks = [_union(of_branches) << 1 for of_branches in zip(*branches, strict=True)]
    else:
        masks = [
            _asked(eqn, operands, inexact, j) if _is_inexact(x) else 0
            for j, x in enumerate(results)
        ]
    return [mask & inexact if _is_inexact(x) else 0 for x, mask in zip(results, masks, strict=True)]


def _asked(eqn: Any, operands: Sequence[Any], by: int, result: int) -> int:
    """The operands of ``by`` by which JAX differentiates a result of an equation."""
    numbers = list(members(by))
    found: set[int] = set()

    def of_result(others: Sequence[Any], *real: Any) -> Any:
        rest = iter(others)
        marked = {k: _noted(found, k)(x) for k, x in zip(numbers, real, strict=True)}
        args = [marked[k] if k in marked else next(rest) for k in range(len(operands))]
        return bind(eqn, args)[result]

    def backward(real: Sequence[Any], others: Sequence[Any]) -> Any:
        out, derivative = jax.vjp(functools.partial(of_result, others), *real)
        return derivative(jnp.zeros_like(out))

    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    real = [types[k] for k in numbers]
    others = [x for k, x in enumerate(types) if k not in numbers]
    # Where JAX has none in reverse it is asked forward; where it has none at all, nothing is known.
    # What it raises then differs from operation to operation.
    with contextlib.suppress(Exception):
        jax.eval_shape(backward, real, others)
        return bits(found)

    def forward(tangents: Sequence[Any], real: Sequence[Any], others: Sequence[Any]) -> Any:
        return jax.jvp(functools.partial(of_result, others), tuple(real), tuple(tangents))[1]

    with contextlib.suppress(Exception):
        read = inputs_read(jax.make_jaxpr(forward)(real, real, others).jaxpr)
        return bits(k for k, is_read in zip(numbers, read, strict=False) if is_read)
    return bits(numbers)


def _noted(found: set[int], number: int) -> Callable[[Any], Any]:
    """The identity, which notes that a cotangent comes back, other than JAX's symbolic zeros."""

    def backward(_: None, cotangent: Any) -> tuple[Any]:
        if isinstance(cotangent, SymbolicZero):
            return (None,)
        found.add(number)
        return (cotangent,)

    identity = jax.custom_vjp(lambda x: x)
    identity.defvjp(lambda x: (x.value, None), backward, symbolic_zeros=True)
    return identity


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
