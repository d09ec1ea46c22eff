"""How a step reads its matrices, which is all that it costs.

A step does so little with each number that its time is that of reading and writing them. What two
sums read is then best read once, or computed twice; never written in between. XLA sees that on
TPUs, where ``at_once`` is what runs. Elsewhere it needs a form that leaves it no choice: on CPUs
block by block in the caches, or with values that it cannot know to be those of the pass before.

Every form is ``at_once`` to rounding, which is why this is the only file of the package that asks
where a program runs.
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Dims = tuple[int, ...]
# From an array and a tree of others: (x, new), element by element; new may be None.
Function = Callable[[jax.Array, Any], tuple[jax.Array, jax.Array | None]]
Swept = tuple[list[jax.Array], jax.Array | None]

# Elements from which a form of its own is worth its compilation, and those of a CPU's block.
_SMALL = 2**17
_BLOCK = 2**19
# Rows that a GPU adds up first where it sums columns.
_STAGE = 64

_APART = contextvars.ContextVar("apart", default=False)
_SIMPLE = contextvars.ContextVar("simple", default=False)


def mean(x: jax.Array, dims: Dims, keepdims: bool = False) -> jax.Array:
    """The mean over ``dims``, scaled before it is summed: squares of 1e18 fit into float32."""
    return jnp.sum(x * (1.0 / _count(x, dims)), axis=dims, keepdims=keepdims)


def sweep(fn: Function, array: jax.Array, args: Any, *dims: Dims) -> Swept:
    """One pass over a matrix: means of a function of it, and what takes its place.

    Args:
      fn: gives ``(x, new)`` from ``array`` and ``args``, element by element, both of its shape;
        ``new`` also of its dtype, or None.
      array: the matrix.
      args: a tree of arrays that broadcast against it without a change of rank.
      *dims: over which to take the means of ``x``.

    Returns:
      The mean of ``x`` over each of ``dims``, and ``new``.
    """

    def at_once(array: jax.Array, args: Any) -> Swept:
        x, new = fn(array, args)
        return [mean(x, one) for one in dims], new

    if array.size < _SMALL or is_simple():
        return at_once(array, args)
    gpu = functools.partial(_one_by_one, fn, dims, _held, False)
    forms: dict[str, Any] = {"cuda": gpu, "rocm": gpu}
    if not _partitioned(array, args):
        blocks = _num_blocks(array.shape)
        forms["cpu"] = (
            functools.partial(_block_by_block, fn, dims, blocks)
            if blocks > 1
            else functools.partial(_one_by_one, fn, dims, _renewed, True)
        )
    return jax.lax.platform_dependent(array, args, **forms, default=at_once)


def again(factors: Any, after: Any) -> Any:
    """The same small arrays, for a pass that begins when ``after`` is there.

    To XLA they are new: what the pass before computed with them is computed again, not kept.
    Matrices are left alone, since those that a pass reads may be computed on the way.
    """
    if is_simple() or _partitioned(factors, after):
        return _held(factors, after)
    return jax.lax.platform_dependent(factors, after, cpu=_renewed, default=_held)


def reread(arrays: Any, after: Any) -> Any:
    """The same arrays, read once more when ``after`` is there; but not on CPUs."""
    if _APART.get():
        return arrays
    return jax.lax.platform_dependent(arrays, after, cpu=lambda arrays, _: arrays, default=_held)


def together(tree: Any) -> Any:
    """The same arrays, none of which is there before all are.

    Sums over several devices then meet in one all-reduce. XLA for TPUs finds them by itself.
    """
    if _APART.get() or not _partitioned(tree):
        return tree
    hold = jax.lax.optimization_barrier
    return jax.lax.platform_dependent(tree, cuda=hold, rocm=hold, default=lambda tree: tree)


@contextlib.contextmanager
def apart(simple: bool) -> Iterator[None]:
    """What is traced here is to run parameter after parameter: nothing waits for the others.

    Args:
      simple: the form for all machines, of operations that can be done layer by layer.
    """
    tokens = _APART.set(True), _SIMPLE.set(simple or _SIMPLE.get())
    try:
        yield
    finally:
        _APART.reset(tokens[0])
        _SIMPLE.reset(tokens[1])


def is_simple() -> bool:
    """Whether passes that are traced here take the form for all machines."""
    return _SIMPLE.get()


def abstract(aval: Any) -> jax.ShapeDtypeStruct:
    """What to trace in place of an array, so that its passes are those of the array."""
    place = aval.sharding if aval.sharding.mesh.size > 1 else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=place)


def splittable(x: jax.Array, dim: int, groups: int) -> jax.Array:
    """The array, ready for ``dim`` to become two dims of which the first has so many ``groups``.

    Where its type has the dim sharded, and not into groups, the dim is gathered.
    """
    if groups % _num_shards(x, dim) == 0:
        return x
    return _with_entry(x, dim, None)


def sharded_as(x: jax.Array, dim: int, like: jax.Array) -> jax.Array:
    """The array, sharded along ``dim`` as the type of ``like`` is, if it divides."""
    if jax.typeof(x).sharding.spec == jax.typeof(like).sharding.spec:
        return x
    num = _num_shards(like, dim)
    return x if x.shape[dim] % num else _with_entry(x, dim, jax.typeof(like).sharding.spec[dim])


def _num_shards(x: jax.Array, dim: int) -> int:
    """Into how many shards the type of an array divides a dim; 1 where XLA decides."""
    sharding = jax.typeof(x).sharding
    entry = sharding.spec[dim] if dim < len(sharding.spec) else None
    axes = entry if isinstance(entry, tuple) else (entry,)
    return math.prod(sharding.mesh.shape[axis] for axis in axes if axis is not None)


def _with_entry(x: jax.Array, dim: int, entry: Any) -> jax.Array:
    spec = list(jax.typeof(x).sharding.spec)
    spec[dim] = entry
    return jax.sharding.reshard(x, jax.sharding.PartitionSpec(*spec))


def _partitioned(*trees: Any) -> bool:
    """Whether arrays lie on several devices, between which XLA cuts no loops."""
    return any(jax.typeof(a).sharding.mesh.size > 1 for a in jax.tree.leaves(trees))


def _count(x: jax.Array, dims: Dims) -> int:
    return math.prod(x.shape[d] for d in dims)


def _held(factors: Any, after: Any) -> Any:
    return jax.lax.optimization_barrier((factors, after))[0]


def _renewed(factors: Any, after: Any) -> Any:
    """For CPUs, where XLA drops barriers before it looks for what is computed twice."""
    zero = _zero(jax.tree.leaves(after)[-1])
    return jax.tree.map(lambda a: a + zero.astype(a.dtype), factors)


def _zero(after: jax.Array) -> jax.Array:
    """Zero, of unsigned integers, which is there when ``after`` is; the compiler cannot tell."""
    bits = jax.lax.bitcast_convert_type(after.ravel()[0].astype(jnp.float32), jnp.uint32)
    for shift in (31, 1):
        bits = jax.lax.shift_right_logical(bits, jnp.uint32(shift))
    return bits


def _one_by_one(
    fn: Function,
    dims: Sequence[Dims],
    renew: Callable[[Any, Any], Any],
    alone: bool,
    array: jax.Array,
    args: Any,
) -> Swept:
    """A pass for each mean; ``new`` comes with the last of them, or on CPUs ``alone`` after it."""
    treedef: Any
    leaves, treedef = jax.tree.flatten(args)
    small = {i: a for i, a in enumerate(leaves) if a.size < array.size}
    one = jnp.ones((), array.dtype)
    dtype = jax.eval_shape(fn, array, args)[0].dtype

    def run(after: Any, scale: float) -> tuple[jax.Array, jax.Array | None]:
        factors = (small, one, jnp.asarray(scale, dtype))
        fresh, unit, factor = factors if after is None else renew(factors, after)
        x, new = fn(
            array * unit, treedef.unflatten([fresh.get(i, a) for i, a in enumerate(leaves)])
        )
        return x * factor, new

    means: list[jax.Array] = []
    done = None
    for over in reversed(dims):
        x, new = run(done, 1.0 / _count(array, over))
        if alone:
            total = done = jnp.sum(x, over)
        else:
            total, done = _sum_by_stages(x, over)
        means.insert(0, total)
    return means, run(done, 1.0)[1] if alone else new


def _sum_by_stages(x: jax.Array, dims: Dims) -> tuple[jax.Array, jax.Array]:
    """The sum over ``dims``, and what is there once ``x`` has been read.

    Columns are added in two stages: for the first, XLA on GPUs keeps no ``x``, and over several
    devices it waits for none of them.
    """
    length, pieces = x.shape[dims[0]], max(jax.typeof(x).sharding.mesh.size, 1)
    if x.ndim - 1 in dims or length % pieces:
        total = jnp.sum(x, dims)
        return total, total
    stage = next(n for n in range(_STAGE, 0, -1) if length // pieces % n == 0)
    shape = (*x.shape[: dims[0]], length // stage, stage, *x.shape[dims[0] + 1 :])
    part = jax.lax.optimization_barrier(jnp.sum(x.reshape(shape), dims[0] + 1))
    return jnp.sum(part, dims), part


def _num_blocks(shape: Dims) -> int:
    """Into how many equal parts a CPU cuts the first dim: two or more; 1 if none are near."""
    wanted = max(2.0, math.prod(shape) / _BLOCK)
    near = [n for n in range(2, int(16 * wanted) + 1) if shape[0] % n == 0 and n > wanted / 4]
    return min(near, key=lambda n: abs(math.log(n / wanted)), default=1)


def _block_by_block(
    fn: Function, dims: Sequence[Dims], blocks: int, array: jax.Array, args: Any
) -> Swept:
    length = array.shape[0] // blocks
    counts = [_count(array, over) for over in dims]

    def block(a: jax.Array, start: jax.Array) -> jax.Array:
        whole = a.ndim < array.ndim or a.shape[0] == 1
        return a if whole else jax.lax.dynamic_slice_in_dim(a, start, length)

    def body(i: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
        start = jnp.asarray(i) * length
        x, _ = fn(block(array, start), jax.tree.map(lambda a: block(a, start), args))
        # Kept, at the size of a block; the sums are read from here.
        x = jax.lax.optimization_barrier(x * (1.0 / max(counts)))
        sums = [jnp.sum(x, over) * (max(counts) / n) for over, n in zip(dims, counts, strict=True)]
        return [
            total + s if 0 in over else jax.lax.dynamic_update_slice_in_dim(total, s, start, 0)
            for total, s, over in zip(totals, sums, dims, strict=True)
        ]

    x, new = jax.eval_shape(fn, array, args)
    zeros = [
        jnp.zeros([n for d, n in enumerate(array.shape) if d not in over], x.dtype) for over in dims
    ]
    totals = jax.lax.fori_loop(0, blocks, body, zeros)
    if new is None:
        return totals, None
    args = jax.tree.map(lambda a: _renewed(a, totals) if a.size < array.size else a, args)
    return totals, fn(array, args)[1]
