"""How a step reads its matrices, which is all that it costs.

A step does so little with each number that its time is that of reading and writing them. A form of
the mathematics that computes one matrix for two means is read twice, and written in between, where
the compiler does not see that both could be had at once. XLA sees it on TPUs. On CPUs a pass goes
through the matrix block by block, each small enough for the caches.

What is computed is in ``at_once``, and is the same in every form to rounding.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Dims = tuple[int, ...]

# Elements of a block: the most that a CPU's caches hold, the least that are worth a loop.
_MOST, _LEAST = 2**20, 2**16


def mean(x: jax.Array, dims: Dims, keepdims: bool = False) -> jax.Array:
    """The mean over ``dims``, scaled before it is summed: squares of 1e18 fit into float32."""
    count = math.prod(x.shape[d] for d in dims)
    return jnp.sum(x * (1.0 / count), axis=dims, keepdims=keepdims)


def sweep(
    fn: Callable[[jax.Array, Any], tuple[jax.Array, jax.Array | None]],
    array: jax.Array,
    args: Any,
    *dims: Dims,
) -> tuple[list[jax.Array], jax.Array | None]:
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

    def at_once(array: jax.Array, args: Any) -> tuple[list[jax.Array], jax.Array | None]:
        x, new = fn(array, args)
        return [mean(x, one) for one in dims], new

    forms: dict[str, Any] = {}
    blocks = _blocks(array.shape)
    if blocks > 1 and not _partitioned(array, args):
        forms["cpu"] = lambda array, args: _block_by_block(fn, array, args, dims, blocks)
    if array.size >= _LEAST:
        forms["cuda"] = forms["rocm"] = lambda array, args: _one_by_one(fn, array, args, dims)
    return jax.lax.platform_dependent(array, args, **forms, default=at_once)


def again(factors: Any, after: Any) -> Any:
    """The same small arrays, for a pass that begins when ``after`` is there.

    To XLA they are new: what the pass before computed with them is computed again, not kept.
    Matrices are left alone, since those that a pass reads may be computed on the way.
    """

    def held(factors: Any, after: Any) -> Any:
        return jax.lax.optimization_barrier((factors, after))[0]

    def renewed(factors: Any, after: Any) -> Any:
        # XLA for CPUs drops barriers before it looks for what is computed twice.
        zero = _zero(jax.tree.leaves(after)[-1])
        return jax.tree.map(lambda a: a + zero.astype(a.dtype), factors)

    if _partitioned(factors, after):
        return held(factors, after)
    return jax.lax.platform_dependent(factors, after, cpu=renewed, default=held)


def _one_by_one(
    fn: Callable[..., Any], array: jax.Array, args: Any, dims: tuple[Dims, ...]
) -> tuple[list[jax.Array], jax.Array | None]:
    """A pass for each mean, the first of them last and with what takes the array's place."""
    results: list[jax.Array] = []
    leaves, treedef = jax.tree.flatten(args)
    small = [i for i, a in enumerate(leaves) if a.size < array.size]
    for one in reversed(dims):
        scale = jnp.asarray(1.0 / math.prod(array.shape[d] for d in one), jnp.float32)
        fresh, scale, results = jax.lax.optimization_barrier(
            ([leaves[i] for i in small], scale, results)
        )
        for i, a in zip(small, fresh, strict=True):
            leaves[i] = a
        x, new = fn(array, treedef.unflatten(leaves))
        results.insert(0, _sum_by_stages(x * scale.astype(x.dtype), one))
    return results, new


def _sum_by_stages(x: jax.Array, dims: Dims) -> jax.Array:
    """The sum over ``dims``; of columns in two stages, for which XLA does not write ``x`` first."""
    pieces = max(jax.typeof(x).sharding.mesh.size, 1)
    length = x.shape[dims[0]]
    if x.ndim - 1 in dims or length % pieces:
        return jnp.sum(x, dims)
    stage = next(n for n in range(64, 0, -1) if length // pieces % n == 0)
    shape = (*x.shape[: dims[0]], length // stage, stage, *x.shape[dims[0] + 1 :])
    x = jax.lax.optimization_barrier(jnp.sum(x.reshape(shape), dims[0] + 1))
    return jnp.sum(x, dims)


def _partitioned(*trees: Any) -> bool:
    """Whether arrays lie on several devices: XLA cuts such programs best where they have no loops."""
    return any(jax.typeof(a).sharding.mesh.size > 1 for a in jax.tree.leaves(trees))


def _zero(after: jax.Array) -> jax.Array:
    """Zero, of unsigned integers, which is there when ``after`` is; not known to the compiler."""
    bits = jax.lax.bitcast_convert_type(after.ravel()[0].astype(jnp.float32), jnp.uint32)
    for shift in (31, 1):
        bits = jax.lax.shift_right_logical(bits, jnp.uint32(shift))
    return bits


def _blocks(shape: Dims) -> int:
    """Into how many equal parts a pass cuts the first dim; 1 where that is of no use."""
    size = math.prod(shape)
    if size < 2 * _MOST:
        return 1
    counts = range(-(-size // _MOST), size // _LEAST + 1)
    return next((n for n in counts if shape[0] % n == 0), 1)


def _block_by_block(
    fn: Callable[..., Any], array: jax.Array, args: Any, dims: tuple[Dims, ...], blocks: int
) -> tuple[list[jax.Array], jax.Array | None]:
    length = array.shape[0] // blocks
    counts = [math.prod(array.shape[d] for d in one) for one in dims]

    def part(a: jax.Array, start: jax.Array) -> jax.Array:
        whole = a.ndim < array.ndim or a.shape[0] == 1
        return a if whole else jax.lax.dynamic_slice_in_dim(a, start, length)

    def at(start: jax.Array, array: jax.Array) -> Any:
        return fn(part(array, start), jax.tree.map(lambda a: part(a, start), args))

    x, new = jax.eval_shape(fn, array, args)

    def body(i: jax.Array, carry: Any) -> Any:
        array, sums = carry
        start = i * length
        # Kept, at the size of a block: from here both means are read.
        scaled = jax.lax.optimization_barrier(at(start, array)[0] * (1.0 / max(counts)))
        parts = [
            jnp.sum(scaled, one) * (max(counts) / count)
            for one, count in zip(dims, counts, strict=True)
        ]
        sums = [
            total + part
            if 0 in one
            else jax.lax.dynamic_update_slice_in_dim(total, part, start, 0)
            for total, part, one in zip(sums, parts, dims, strict=True)
        ]
        if new is not None:
            # After the sums, so that the old values are not needed any more and it fits in place.
            start += _zero(parts[0]).astype(start.dtype)
            array = jax.lax.dynamic_update_slice_in_dim(array, at(start, array)[1], start, 0)
        return array, sums

    zeros = [
        jnp.zeros([n for d, n in enumerate(array.shape) if d not in one], x.dtype) for one in dims
    ]
    array, sums = jax.lax.fori_loop(0, blocks, body, (array, zeros))
    return sums, None if new is None else array
