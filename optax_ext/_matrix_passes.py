"""How a step reads its matrices on each kind of machine, which determines its time.

An operand of two sums is best read once or computed twice, and never written in between. XLA for
TPUs finds this by itself: there the plain form, ``_fused``, runs. CPUs read block by block within
their caches; GPUs make one pass per sum from values that XLA cannot identify with those of the
previous pass. All forms agree to rounding.

Only this file, by ``jax.lax.platform_dependent``, and ``kernels.py`` read the platform;
``traced_graph.Graph`` may take the default form of both.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_ext._types import Array, Tree

Dims = tuple[int, ...]
# From an array and a tree of others to x, element by element.
Function = Callable[[jax.Array, Any], jax.Array]

_MIN_SIZE = 2**17  # elements from which a platform's own form is worth its compilation
_BLOCK_SIZE = 2**19  # elements of a CPU's block
_STAGE_ROWS = 64  # rows that a GPU adds in the first stage of a sum over columns
# Rows, and columns, that it adds in the first stage of both sums, by the least extent of a matrix.
_TILES = {768: 64, 256: 16, 32: 32, 16: 16}


def mean(x: jax.Array, dims: Dims, keepdims: bool = False) -> jax.Array:
    """Returns the mean over ``dims``, scaled before it is summed: 1e18**2 fits into float32."""
    return jnp.sum(x * (1.0 / _count(x, dims)), axis=dims, keepdims=keepdims)


def sweep(fn: Function, array: jax.Array, args: Any, *dims: Dims) -> Any:
    """Returns the means of ``fn(array, args)`` over each of ``dims``."""
    if array.size < _MIN_SIZE:
        return _fused(fn, dims, array, args)
    gpu = functools.partial(_pass_per_mean, fn, dims, False)
    if tile := _tile(array, dims):
        gpu = functools.partial(_tile_by_tile, fn, dims, tile)
    forms: dict[str, Any] = {"cuda": gpu, "rocm": gpu}
    if not is_partitioned(array, args):
        blocks = _num_blocks(array.shape)
        in_blocks = functools.partial(_block_by_block, fn, dims, blocks)
        in_passes = functools.partial(_pass_per_mean, fn, dims, True)
        forms["cpu"] = in_blocks if blocks > 1 else in_passes
    # The array twice: a ``Graph`` makes it again for the second sum, and XLA does not write it.
    fused = lambda array, args, _: _fused(fn, dims, array, args)  # noqa: E731
    return jax.lax.platform_dependent(array, args, array, **forms, default=fused)


def recomputed(factors: Any, after: Any) -> Any:
    """Returns small arrays as new values: XLA recomputes from them and writes no matrix."""
    if is_partitioned(factors, after):
        return hold(factors, after)
    return jax.lax.platform_dependent(factors, after, cpu=_plus_zero, default=hold)


def recomputed_in_last_pass(factors: Any, after: Any, array: jax.Array) -> Any:
    """As ``recomputed``, for a large array that a step stores: TPUs write it a pass before."""
    if array.size < _MIN_SIZE:
        return factors
    return jax.lax.platform_dependent(
        factors, after, tpu=lambda factors, _: factors, default=recomputed
    )


def reread(arrays: Any, after: Any) -> Any:
    """Returns the arrays, read again once ``after`` is computed; on CPUs, unchanged."""
    return jax.lax.platform_dependent(arrays, after, cpu=lambda arrays, _: arrays, default=hold)


def hold(arrays: Any, after: Any = ()) -> Any:
    """Returns the arrays behind a barrier: none is available before all are, and ``after`` is."""
    leaves, treedef = jax.tree.flatten(arrays)
    # In a shard_map each waits for those that vary over no other axes, or its type would change.
    axes = list(map(_varying, leaves))
    later = jax.tree.leaves(after)
    for own in dict.fromkeys(axes):
        members = [i for i, varying in enumerate(axes) if varying == own]
        others = [x for x in later if _varying(x) <= own]
        held = jax.lax.optimization_barrier([*(leaves[i] for i in members), *others])
        for i, x in zip(members, held, strict=False):
            leaves[i] = x
    return jax.tree.unflatten(treedef, leaves)


def _varying(x: Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


def barrier(tree: Tree) -> Any:
    """Returns the same arrays, none available before all are: their sums become one all-reduce."""
    if not is_partitioned(tree):
        return tree
    return jax.lax.platform_dependent(tree, cuda=hold, rocm=hold, default=lambda tree: tree)


# --- Placement ------------------------------------------------------------------------------------


def abstract(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns a stand-in for an array of this type, whose passes take the same form."""
    mesh = aval.sharding.mesh
    return jax.ShapeDtypeStruct(
        aval.shape,
        aval.dtype,
        weak_type=aval.weak_type,
        sharding=aval.sharding if _is_shared(mesh) or mesh.explicit_axes else None,
        manual_axis_type=aval.manual_axis_type,
    )


def splittable(x: jax.Array, dim: int, groups: int) -> jax.Array:
    """Returns the array, gathered along ``dim`` if its shards do not hold full ``groups``."""
    if groups % _num_shards(x, dim) == 0:
        return x
    return _with_entry(x, dim, None)


def sharded_as(x: jax.Array, dim: int, like: jax.Array) -> jax.Array:
    """Returns the array sharded along ``dim`` as the type of ``like`` is, if the size divides."""
    if jax.typeof(x).sharding.spec == jax.typeof(like).sharding.spec:
        return x
    num = _num_shards(like, dim)
    return x if x.shape[dim] % num else _with_entry(x, dim, jax.typeof(like).sharding.spec[dim])


def _num_shards(x: jax.Array, dim: int) -> int:
    """Returns the number of shards along a dim by the array's type; 1 on Auto mesh axes."""
    sharding = jax.typeof(x).sharding
    entry = sharding.spec[dim] if dim < len(sharding.spec) else None
    axes = entry if isinstance(entry, tuple) else (entry,)
    return math.prod(sharding.mesh.shape[axis] for axis in axes if axis is not None)


def _with_entry(x: jax.Array, dim: int, entry: Any) -> jax.Array:
    spec = list(jax.typeof(x).sharding.spec)
    spec[dim] = entry
    return jax.sharding.reshard(x, jax.sharding.PartitionSpec(*spec))


def in_this_mesh(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that is traced later, as if it were here."""
    mesh = jax.sharding.get_abstract_mesh()

    def call(*arguments: Any, **options: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh):
            return fn(*arguments, **options)

    return call


def is_partitioned(*trees: Any) -> bool:
    """Whether arrays are on several devices or in a ``shard_map``: no loops of blocks there."""
    return any(_is_shared(jax.typeof(a).sharding.mesh) for a in jax.tree.leaves(trees))


def _is_shared(mesh: Any) -> bool:
    return mesh.size > 1 or bool(mesh.manual_axes)


# --- Values of a new pass -------------------------------------------------------------------------


def _plus_zero(factors: Any, after: Any) -> Any:
    """For CPUs, where XLA removes barriers before it eliminates common subexpressions."""
    last = jax.tree.leaves(after)[-1]
    zero = jax.lax.bitcast_convert_type(last[(0,) * last.ndim].astype(jnp.float32), jnp.uint32)
    # XLA does not simplify two shifts, by 32 bits in all; one shift by 32 would be undefined.
    for shift in (31, 1):
        zero = jax.lax.shift_right_logical(zero, jnp.uint32(shift))
    return jax.tree.map(lambda a: a + zero.astype(a.dtype), factors)


# --- Forms ----------------------------------------------------------------------------------------


def _count(x: jax.Array, dims: Dims) -> int:
    return math.prod(x.shape[d] for d in dims)


def _fused(fn: Function, dims: Sequence[Dims], array: jax.Array, args: Any) -> list[jax.Array]:
    x = fn(array, args)
    return [mean(x, reduced) for reduced in dims]


def _pass_per_mean(
    fn: Function, dims: Sequence[Dims], on_cpu: bool, array: jax.Array, args: Any, _: Any
) -> list[jax.Array]:
    """One pass for each mean."""
    small, with_small = _smaller_than(array, args)
    one = jnp.ones((), array.dtype)
    dtype = jax.eval_shape(fn, array, args).dtype
    means: list[jax.Array] = []
    done = None
    for reduced in reversed(dims):
        # The products with one and with the scale make this pass's values others than those of the
        # pass before, which XLA would otherwise write to memory and read again.
        factors = (small, one, jnp.asarray(1.0 / _count(array, reduced), dtype))
        renew = _plus_zero if on_cpu else hold
        fresh, unit, scale = factors if done is None else renew(factors, done)
        x = fn(array * unit, with_small(fresh)) * scale
        if on_cpu:
            total = done = jnp.sum(x, reduced)
        else:
            total, done = _sum_by_stages(x, reduced)
        means.insert(0, total)
    return means


def _smaller_than(array: jax.Array, args: Any) -> tuple[dict[int, Any], Callable[..., Any]]:
    """The arrays of a tree that are smaller than another, and what puts new ones in their place."""
    leaves, treedef = jax.tree.flatten(args)
    small = {i: a for i, a in enumerate(leaves) if a.size < array.size}
    return small, lambda new: treedef.unflatten([new.get(i, a) for i, a in enumerate(leaves)])


def _sum_by_stages(x: jax.Array, dims: Dims) -> tuple[jax.Array, jax.Array]:
    """Returns the sum over ``dims``, and a value that is available once ``x`` has been read."""
    # Columns in two stages: with a barrier after the first, XLA on GPUs does not write x, and the
    # next pass does not wait for an all-reduce.
    length = x.shape[dims[0]]
    shards = _num_devices(x)
    if x.ndim - 1 in dims or length % shards:
        total = jnp.sum(x, dims)
        return total, total
    stage = next(n for n in range(_STAGE_ROWS, 0, -1) if length // shards % n == 0)
    shape = (*x.shape[: dims[0]], length // stage, stage, *x.shape[dims[0] + 1 :])
    stages = x.reshape(shape)  # (..., length // stage, stage, ...)
    part = jax.lax.optimization_barrier(jnp.sum(stages, dims[0] + 1))  # (..., length // stage, ...)
    return jnp.sum(part, dims), part


def _tile(array: jax.Array, dims: Sequence[Dims]) -> int:
    """Returns the rows, and columns, of a GPU's tiles, which no shard splits; 0: no tiles."""
    matrices = sorted(dims) == [(array.ndim - 2,), (array.ndim - 1,)]
    sizes, num = array.shape[-2:] if matrices else (0,), _num_devices(array)
    for least, tile in _TILES.items():
        whole = all(n % (num * tile) == 0 or math.gcd(n, num) == 1 for n in sizes)
        # A row of tiles of two matrices stays in the cache: 16 MB.
        if whole and min(sizes) >= least and tile * min(sizes[-1], 2**17) <= 2**21:
            return tile
    return 0


def _num_devices(x: jax.Array) -> int:
    """Returns how many devices may have shards of an array; on Auto axes types do not tell."""
    return max(jax.typeof(x).sharding.mesh.size, 1)


def _tile_by_tile(
    fn: Function, dims: Sequence[Dims], tile: int, array: jax.Array, args: Any, again: jax.Array
) -> list[jax.Array]:
    """One pass for both means: one reduction of two operands. XLA makes two passes of two sums."""
    small, with_small = _smaller_than(array, args)
    factors = (small, jnp.ones((), array.dtype))
    again = array if min(array.shape[-2:]) < 256 else again  # XLA would write both
    # Values of the second other than those of the first, which XLA would otherwise write to memory.
    held = hold(factors)
    last = array.ndim - 1

    def tiles(dim: int) -> jax.Array:
        x, (fresh, one) = (array, factors) if (dim,) == dims[0] else (again, held)
        x = fn(x * one, with_small(fresh)) * (1.0 / x.shape[dim])
        missing = [(0, -n % tile if d >= last - 1 else 0) for d, n in enumerate(x.shape)]
        x = jnp.pad(x, missing) if any(n for _, n in missing) else x
        # Columns of a tile are apart: threads side by side read adjacent ones.
        shards = math.gcd(x.shape[-1] // tile, _num_devices(array))
        x = x.reshape(*x.shape[:-2], x.shape[-2] // tile, tile, x.shape[-1])
        x = x.reshape(*x.shape[:-1], shards, tile, -1)
        return x.swapaxes(-4, -2) if dim == last else x

    operands = [tiles(dim) for (dim,) in dims]
    zeros = [jnp.zeros((), x.dtype) for x in operands]
    sums = jax.lax.reduce(operands, zeros, functools.partial(jax.tree.map, jax.lax.add), [last])
    means = []  # of (..., rows of tiles, shards, rows or columns of a tile, tiles of a shard)
    for x, (dim,) in zip(jax.lax.optimization_barrier(sums), dims, strict=True):
        x = jnp.sum(x, (-3, -1) if dim == last else -4)
        # One shard's dim aside: JAX merges dims of which the first may be on an Explicit axis.
        x = x.squeeze(-3) if dim != last and x.shape[-3] == 1 else x
        x = x.reshape(*array.shape[:-2], -1)
        means.append(x[..., : array.shape[last - 1 if dim == last else last]])
    return means


def _num_blocks(shape: Dims) -> int:
    """Returns into how many equal blocks a CPU divides the first dim; 1 if no divisor is near."""
    wanted = max(2.0, math.prod(shape) / _BLOCK_SIZE)
    near = [n for n in range(2, int(16 * wanted) + 1) if shape[0] % n == 0 and n > wanted / 4]
    return min(near, key=lambda n: abs(math.log(n / wanted)), default=1)


def _zeros_like(total: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns zeros of this type; arrays on an Explicit mesh of one device have its axes in it."""
    mesh = total.sharding.mesh if total.sharding else jax.sharding.get_abstract_mesh()
    with jax.sharding.use_abstract_mesh(mesh):
        return jnp.zeros_like(total)


def _block_by_block(
    fn: Function, dims: Sequence[Dims], blocks: int, array: jax.Array, args: Any, _: Any
) -> list[jax.Array]:
    length = array.shape[0] // blocks
    counts = [_count(array, reduced) for reduced in dims]

    def block(a: jax.Array, start: jax.Array) -> jax.Array:
        broadcast = a.ndim < array.ndim or a.shape[0] == 1
        return a if broadcast else jax.lax.dynamic_slice_in_dim(a, start, length)

    def body(i: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
        start = jnp.asarray(i) * length
        x = fn(block(array, start), jax.tree.map(lambda a: block(a, start), args))
        # The barrier makes XLA write one block of x, from which all sums are read.
        x = jax.lax.optimization_barrier(x * (1.0 / max(counts)))  # (length, ...)
        sums = [
            jnp.sum(x, reduced) * (max(counts) / n) for reduced, n in zip(dims, counts, strict=True)
        ]
        # Sums over the first dim accumulate; others fill their own rows.
        return [
            total + s if 0 in reduced else jax.lax.dynamic_update_slice_in_dim(total, s, start, 0)
            for total, s, reduced in zip(totals, sums, dims, strict=True)
        ]

    means = jax.eval_shape(functools.partial(_fused, fn, dims), array, args)
    totals: list[jax.Array] = jax.lax.fori_loop(0, blocks, body, list(map(_zeros_like, means)))
    return totals
