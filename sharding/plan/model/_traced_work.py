"""Work of traced operations: products, bytes, time; what a backward pass stores."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from optax_ext.equations import inner_jaxprs, name_of, params_of, trace
from optax_ext.traced_graph import ELEMENTWISE, REDUCTIONS, Equation, Graph
from sharding._types import Tree
from sharding.plan.machine._devices import KINDS, DeviceKind
from sharding.plan.machine._tiles import num_bytes

# Where the device is not known: only relative times count then.
ANY_DEVICE = KINDS["h100"]
# Element-wise operations are fused: of four, about one reads or writes main memory.
_MOVED = 0.25
MOVES = frozenset(("reshape", "transpose", "squeeze", "broadcast_in_dim", "name", "pvary"))
# ``jax.checkpoint`` rounds what it saves to its own dtype.
_FREE = MOVES | {"iota", "optimization_barrier", "reduce_precision"}
_OTHERS = """
add_any concatenate dynamic_slice integer_pow iota one_minus_square pad random_fold_in random_seed
random_split random_unwrap random_wrap rev slice
"""
# What XLA fuses with the operations that read it.
_FUSED = MOVES | ELEMENTWISE | frozenset(_OTHERS.split())


class Work(NamedTuple):
    """Operations and their time."""

    flops: float  # of matrix products
    seconds: float  # of all operations on a device: products at its peak, others at its bandwidth
    products: float = 0.0  # how many matrix products
    touched: float = 0.0  # bytes that these read and write

    def __add__(self, other: "Work") -> "Work":  # type: ignore[override]
        return Work(*map(operator.add, self, other))

    def __sub__(self, other: "Work") -> "Work":
        return Work(*map(operator.sub, self, other))

    def times(self, count: int) -> "Work":
        return Work(*(value * count for value in self))


def work_of(fn: Callable[..., Any], *args: Any, kind: DeviceKind | None) -> Work:
    return work_of_jaxpr(trace(fn, *args)[0].jaxpr, kind or ANY_DEVICE)


def work_of_equation(
    eqn: JaxprEqn | Equation, operands: list[Any], results: list[Any], kind: DeviceKind | None
) -> Work:
    """The work of one operation; operands and results have ``shape`` and ``dtype``."""
    kind = kind or ANY_DEVICE
    name, params = name_of(eqn), params_of(eqn)
    inner = [work_of_jaxpr(jaxpr, kind) for jaxpr in inner_jaxprs(eqn)]
    others = _MOVED * sum(map(num_bytes, results)) / kind.bandwidth
    if inner and "grid_mapping" in params:  # a Pallas kernel, whose values stay on the chip
        flops = sum(work.flops for work in inner) * math.prod(params["grid_mapping"].grid)
        return Work(flops, flops / kind.flops + others)
    if inner and "branches" in params:  # as pl.when, whose other branch is empty
        return max(inner, key=lambda work: (work.seconds, work.flops))
    if inner:
        return sum(inner, Work(0.0, 0.0)).times(params.get("length", 1))
    if name == "dot_general":
        (summed, _), _ = params["dimension_numbers"]
        flops = 2.0 * math.prod(results[0].shape)
        flops *= math.prod(operands[0].shape[dim] for dim in summed)
        return Work(flops, flops / kind.flops, 1.0, float(num_bytes([*operands, *results])))
    if name == "conv_general_dilated":
        spec = params["dimension_numbers"].rhs_spec
        kernel = operands[1].shape
        flops = 2.0 * math.prod(results[0].shape) * math.prod(kernel) / kernel[spec[0]]
        return Work(flops, flops / kind.flops, 1.0, float(num_bytes([*operands, *results])))
    if name in _FREE:
        return Work(0.0, 0.0)
    return Work(0.0, others)


@functools.lru_cache(maxsize=1024)
def work_of_jaxpr(jaxpr: Jaxpr, kind: DeviceKind) -> Work:
    total = Work(0.0, 0.0)
    for eqn in jaxpr.eqns:
        operands, results = ([v.aval for v in vs] for vs in (eqn.invars, eqn.outvars))
        total += work_of_equation(eqn, operands, results, kind)
    return total


def stored_by(fn: Callable[..., Any], params: Tree, *args: Any) -> list[Any]:
    """The types of what the vector-Jacobian product of a function stores beside its matrices."""
    vjp = jax.eval_shape(lambda *args: jax.vjp(lambda *args: fn(*args), *args)[1], params, *args)
    return no_matrices(vjp, params)


def no_matrices(stored: Tree, params: Tree) -> list[Any]:
    matrices = {(x.shape, x.dtype) for x in jax.tree.leaves(params) if len(x.shape) > 1}
    return [x for x in jax.tree.leaves(stored) if (x.shape, x.dtype) not in matrices]


def products_of(fn: Callable[..., Any], params: Tree, *args: Any) -> list[Any]:
    """The types of what the matrix products of a function read and write, without parameters."""
    traced = trace(fn, params, *args)[0].jaxpr
    own = traced.invars[: len(jax.tree.leaves(params))]

    def touched(jaxpr: Jaxpr) -> Iterator[Any]:
        for eqn in jaxpr.eqns:
            for inner in inner_jaxprs(eqn):
                yield from touched(inner)
            if eqn.primitive.name == "dot_general":
                yield from (var for var in (*eqn.invars, *eqn.outvars) if not hasattr(var, "val"))

    return [var.aval for var in dict.fromkeys(touched(traced)) if var not in own]


# On which the seconds of work are bytes.
UNIT = dataclasses.replace(KINDS["h100"], flops=math.inf, bandwidth=1.0)


class Traced(NamedTuple):
    """Forward and backward passes of some examples, without parameters."""

    flops: float  # of matrix products, with those that run again
    products: float  # how many
    touched: float  # bytes that these read and write
    moved: float  # bytes that all other operations do
    stored: float  # bytes that the forward pass stores for the backward pass
    working: float  # bytes of temporaries of the backward pass beside these


def is_fused(eqn: Any) -> bool:
    name = name_of(eqn)
    if name in ("jit", "pjit", "custom_jvp_call"):
        return all(is_fused(inner) for jaxpr in inner_jaxprs(eqn) for inner in jaxpr.eqns)
    return name in _FUSED


def is_light(eqn: Any) -> bool:
    return is_fused(eqn) or eqn.primitive.name in REDUCTIONS


def bytes_inside(jaxpr: Any) -> float:
    """Bytes in memory while a body or a branch runs."""
    inside = 0.0
    for eqn in jaxpr.eqns:
        inside += sum(map(bytes_inside, inner_jaxprs(eqn)))
        if not is_fused(eqn):
            inside += num_bytes([v.aval for v in eqn.outvars])
    return inside


def work_of_group(
    equations: Sequence[Equation], graph: Graph, written: set[int], kind: DeviceKind
) -> Work:
    """Of operations that run together: products by their operations or bytes, others by theirs.

    The others read what is not made here, and write what is in ``written``.
    """
    types, work, moved = graph.types, Work(0.0, 0.0), set[int]()
    made = {v for eqn in equations for v in eqn.results} | graph.constants.keys()
    for eqn in equations:
        operands, results = ([types[v] for v in vs] for vs in (eqn.operands, eqn.results))
        if is_light(eqn):
            moved |= (set(eqn.operands) - made) | (set(eqn.results) & written)
            continue
        own = work_of_equation(eqn, operands, results, kind)
        if own.touched and not any(inner_jaxprs(eqn)):  # GPUs compute float32 products in TF32
            slower = 2 if kind.tile is None and results[0].dtype.itemsize > 2 else 1
            seconds = max(slower * own.flops / kind.flops, own.touched / kind.bandwidth)
            own = own._replace(seconds=seconds)
        work = work + own
    return work + Work(0.0, num_bytes([types[v] for v in moved]) / kind.bandwidth)
