"""Operations and memory traffic of traced functions: those of a loss, and those of an update."""

import collections
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.extend.core import Jaxpr, JaxprEqn

from optax_ext.equations import (
    Scan,
    UnknownOperationError,
    inner_jaxprs,
    name_of,
    params_of,
    record_of,
    trace,
)
from optax_ext.traced_graph import ELEMENTWISE, REDUCTIONS, Equation, Graph
from sharding._jaxprs import all_equations, product_flops
from sharding._types import Tree
from sharding.plan.machine._devices import KINDS, DeviceKind, num_bytes
from sharding.stored._forms import DECODE

# Where the device is not known: only relative times count then.
ANY_DEVICE = KINDS["h100"]
# Element-wise operations are fused: of four, about one reads or writes main memory.
_MOVED = 0.25
MOVES = frozenset(("reshape", "transpose", "squeeze", "broadcast_in_dim", "name", "pvary"))
_PRODUCTS = ("dot_general", "conv_general_dilated")
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
    low: float = 0.0  # the part of ``flops`` whose operands have 8 bits
    convolved: float = 0.0  # the part of ``flops`` of convolutions
    filtered: float = 0.0  # the part of ``touched`` of convolutions
    summed: float = 0.0  # bytes that loops add up, the rest of what ``seconds`` move aside

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
    name = name_of(eqn)
    params = params_of(eqn)
    inner = [work_of_jaxpr(jaxpr, kind) for jaxpr in inner_jaxprs(eqn)]
    others = _MOVED * sum(map(num_bytes, results)) / kind.bandwidth
    if inner and "grid_mapping" in params:  # a Pallas kernel, whose values stay on the chip
        flops = sum(work.flops for work in inner) * math.prod(params["grid_mapping"].grid)
        return Work(flops, flops / kind.flops + others)
    if inner and "branches" in params:  # as pl.when, whose other branch is empty
        return max(inner, key=lambda work: (work.seconds, work.flops))
    if inner:
        added = 2 * _bytes_added_up(eqn)
        sums = Work(0.0, added / kind.bandwidth, summed=added)
        total = sum(inner, sums).times(params.get("length", 1))
        if is_fused(eqn):  # no more than a pass, as where codes are decoded
            passed = num_bytes([*operands, *results]) / kind.bandwidth
            total = total._replace(seconds=min(total.seconds, passed))
        return total
    if name in _PRODUCTS:
        return _work_of_product(eqn, operands, results, kind)
    if name in _FREE:
        return Work(0.0, 0.0)
    return Work(0.0, others)


def _bytes_added_up(eqn: Any) -> float:
    """Bytes of the sums that a loop carries, which each iteration reads and writes.

    A sum is carried where nothing but its addition reads it: as gradients, not as activations.
    """
    scan = record_of(eqn)
    if not isinstance(scan, Scan):
        return 0.0
    body = scan.body.jaxpr
    carried = body.invars[scan.num_consts :][: scan.num_carry]
    read = collections.Counter(v for x in body.eqns for v in x.invars if not hasattr(v, "val"))
    adds = [x for x in body.eqns if name_of(x) in ("add", "add_any")]
    sums = {(v, x.outvars[0]) for x in adds for v in x.invars if not hasattr(v, "val")}
    pairs = zip(carried, body.outvars, strict=False)
    return float(num_bytes([v.aval for v, out in pairs if read[v] == 1 and (v, out) in sums]))


def _work_of_product(
    eqn: Any, operands: Sequence[Any], results: Sequence[Any], kind: DeviceKind
) -> Work:
    flops = float(product_flops(eqn, operands, results))
    touched = float(num_bytes([*operands, *results]))
    low = flops if all(x.dtype.itemsize == 1 for x in operands) else 0.0
    of_images = name_of(eqn) == "conv_general_dilated"
    convolved = (flops, touched) if of_images else (0.0, 0.0)
    return Work(flops, flops / kind.flops, 1.0, touched, low, *convolved)


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
    """The types of what the matrix products of a function read and write, without parameters.

    Of what forms of parameters decode to, which is there for one product at a time, the largest.
    """
    traced = trace(fn, params, *args)[0].jaxpr
    own = traced.invars[: len(jax.tree.leaves(params))]
    decoded: dict[Any, int] = {}  # bytes

    def touched(jaxpr: Jaxpr) -> Iterator[Any]:
        for eqn in jaxpr.eqns:
            for inner in inner_jaxprs(eqn):
                yield from touched(inner)
            if params_of(eqn).get("name") == DECODE:
                decoded[eqn.outvars[0]] = num_bytes([eqn.outvars[0].aval])
            if eqn.primitive.name == "dot_general":
                yield from (var for var in (*eqn.invars, *eqn.outvars) if not hasattr(var, "val"))

    every = [var for var in dict.fromkeys(touched(traced)) if var not in own]
    largest = max(decoded, key=lambda var: decoded[var], default=None)
    return [var.aval for var in every if var not in decoded or var is largest]


# On which the seconds of work are bytes.
UNIT = dataclasses.replace(KINDS["h100"], flops=math.inf, bandwidth=1.0)


class Traced(NamedTuple):
    """Forward and backward passes of some examples, without parameters."""

    flops: float  # of matrix products, with those that run again
    products: float  # how many
    touched: float  # bytes that these read and write, and sums of these in loops
    moved: float  # bytes that all other operations do
    stored: float  # bytes that the forward pass stores for the backward pass
    working: float  # bytes of temporaries of the backward pass beside these
    low: float = 0.0  # the part of ``flops`` whose operands have 8 bits
    convolved: float = 0.0  # the part of ``flops`` of convolutions
    filtered: float = 0.0  # the part of ``touched`` of convolutions


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


def seconds_one_by_one(jaxpr: Jaxpr, kind: DeviceKind) -> float:
    """Of all operations, in loops, too, as if none ran together with others."""
    work = work_of_jaxpr(jaxpr, kind)
    every = (eqn for eqn in all_equations(jaxpr) if name_of(eqn) in _PRODUCTS)
    is_wide = any(eqn.invars[0].aval.dtype.itemsize > 2 for eqn in every)
    return work.seconds - work.flops / kind.flops + _seconds_of_products(work, is_wide, kind)


def _seconds_of_products(work: Work, is_wide: bool, kind: DeviceKind) -> float:
    """By their operations or bytes; GPUs compute products of float32 in TF32."""
    slower = 2 if kind.tile is None and is_wide else 1
    return max(slower * work.flops / kind.flops, work.touched / kind.bandwidth)


def work_of_group(
    equations: Sequence[Equation], graph: Graph, written: set[int], kind: DeviceKind
) -> Work:
    """Of operations that run together: products by their operations or bytes, others by theirs.

    The others read what is not made here, and write what is in ``written``.
    """
    types = graph.types
    work = Work(0.0, 0.0)
    moved = set[int]()
    made = {v for eqn in equations for v in eqn.results} | graph.constants.keys()
    for eqn in equations:
        operands, results = ([types[v] for v in vs] for vs in (eqn.operands, eqn.results))
        if is_light(eqn):
            moved |= (set(eqn.operands) - made) | (set(eqn.results) & written)
            continue
        own = work_of_equation(eqn, operands, results, kind)
        if own.touched and not any(inner_jaxprs(eqn)):
            is_wide = results[0].dtype.itemsize > 2
            own = own._replace(seconds=_seconds_of_products(own, is_wide, kind))
        work = work + own
    return work + Work(0.0, num_bytes([types[v] for v in moved]) / kind.bandwidth)


# Whose operands and results are in memory, as are those of all that have a jaxpr of their own.
_ALONE = {"dot_general", "sort", "top_k", "cumsum", "gather", "scatter", "scatter-add"}
_LEAST = 8  # elements for each result of a reduction that ends a pass
_TILE = 64  # rows, or columns, that a GPU adds first: optax_ext._matrix_passes


def update_bytes(tx: optax.GradientTransformation, params: Tree, *, gpu: bool) -> float:
    """Bytes that an update moves for one parameter, the mean of one array of each type.

    ``params`` are abstract; gradients have their dtypes. 0 for an update that needs what only a
    step has, such as the loss.
    """
    seen = set[Any]()

    def first(x: Any) -> Any:
        known = (x.shape, x.dtype) in seen
        seen.add((x.shape, x.dtype))
        return None if known else x

    one_each = jax.tree.map(first, params)
    try:
        moved = _bytes_of(tx, one_each, gpu)
    except UnknownOperationError:
        raise
    except (TypeError, ValueError, AttributeError):
        return 0.0
    size = sum(math.prod(x.shape) for x in jax.tree.leaves(one_each))
    return round(moved / size, 2)  # without keys and counters


def _bytes_of(tx: optax.GradientTransformation, params: Tree, gpu: bool) -> float:
    """The bytes of all of it."""
    state = jax.eval_shape(tx.init, params)
    leaves, tree = jax.tree.flatten((params, state, params))
    update = optax.with_extra_args_support(tx).update

    def step(leaves: list[Any]) -> Tree:
        grads, state, params = jax.tree.unflatten(tree, leaves)
        updates, state = update(grads, state, params)
        return optax.apply_updates(params, updates), state

    graph = Graph(step, leaves, [False] * len(leaves), portable=True)
    results = set(graph.outputs) & graph.producer.keys()
    kept: set[int] = set()  # values that nothing is fused with
    number: dict[int, int] = {}  # of the first pass that a value can be used in
    reads: dict[tuple[int, Any], set[int]] = {}  # of each pass; of several with one number, by kind
    partial = 0.0  # bytes of sums of tiles, written and read

    def add(key: tuple[int, Any], values: Iterable[int]) -> None:
        """Adds what a pass must read to compute these values."""
        found = reads.setdefault(key, set())
        pending = list(values)
        seen = set[int]()
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            was_written = value in results and number[value] < key[0]
            if value in graph.constants:
                continue
            if value not in graph.producer or value in kept or was_written:
                found.add(value)
            elif not _ends_pass(eqn := graph.equations[graph.producer[value]], graph):
                pending += eqn.operands

    for i, eqn in enumerate(graph.equations):
        at = max((number.get(x, 0) for x in eqn.operands), default=0)
        if gpu and eqn.primitive.name == "optimization_barrier":
            at = max(number.values(), default=0)  # what is computed from it is of the next pass
        alone = eqn.primitive.name in _ALONE or any(inner_jaxprs(eqn))
        ends = _ends_pass(eqn, graph)
        if alone:
            kept |= set(eqn.results)
            add((at, i), eqn.operands)
        elif ends:
            shape = graph.shape(eqn.operands[0])
            is_tiled = len(eqn.params["axes"]) == 1 and eqn.params["axes"][0] >= len(shape) - 2
            dims = shape if is_tiled else (str(eqn.params["axes"]), shape)
            partial += 2 * gpu * is_tiled * num_bytes([graph.types[eqn.operands[0]]]) / _TILE
            add((at, dims if gpu else None), eqn.operands)
        number |= dict.fromkeys(eqn.results, at + (alone or ends))
    # A result is written by a pass of its number, if there is one.
    last = {key[0]: key for key in reads}
    for value in results - kept:
        key = last.get(number[value], (number[value], None))
        add(key, graph.equations[graph.producer[value]].operands)
    touched = [*(value for values in reads.values() for value in values), *results | kept]
    return num_bytes([graph.types[value] for value in touched]) + partial


def _ends_pass(eqn: Equation, graph: Graph) -> bool:
    """Whether all of an array must be read before the result is used."""
    if eqn.primitive.name not in REDUCTIONS:
        return False
    whole, reduced = (math.prod(graph.shape(x[0])) for x in (eqn.operands, eqn.results))
    return whole >= _LEAST * reduced
