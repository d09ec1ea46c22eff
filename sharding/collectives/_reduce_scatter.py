"""Reduce-scatter in several forms: what ``lax.psum_scatter`` compiles to depends on the target."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from sharding._types import DType
from sharding.collectives._sum_dtype import to_sum_dtype
from sharding.placement._layout import Layout
from sharding.placement._on_mesh import over_other_axes
from sharding.placement._specs import Axes, Axis, axes_of

# From how many bytes per step, in both directions, a ring is used. Chosen, not measured: a compiled
# program does not show what a step waits for.
_MIN_RING_BYTES = 1 << 16
# Elements in one row of a TPU's vector register.
LANES = 128


class ArrayLayout(NamedTuple):
    """How one array is sharded."""

    dim: int  # that ZeRO shards, counted from the end; 0 if the array is unsharded
    spec: PartitionSpec  # on the user's axes of the mesh


def psum_scatter(x: jax.Array, axis: Axis, dim: int, form: str | None = None) -> jax.Array:
    """Sums over manual mesh axes and leaves each device its shard along a dim, which has to divide.

    Equals ``lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)`` up to the order of the
    sum. Forms: ``"native"``, whatever XLA makes of that; ``"axes"``, over one mesh axis after the
    other; ``"ring"``, from neighbour to neighbour, half of every shard in each direction;
    ``"all_to_all"``, an all-to-all and a local sum (in float32 for narrower floats); None, the one
    for the devices of the enclosing ``shard_map``.
    """
    names, dim = axes_of(axis), dim % x.ndim
    sizes = [lax.axis_size(name) for name in names]
    num = math.prod(sizes)
    if x.shape[dim] % num:
        raise ValueError(
            f"psum_scatter: dim {dim} of shape {x.shape} cannot be sharded over {num} devices of "
            f"axis {axis!r}. Pad it to a multiple of {num}."
        )
    if form is None:
        form = choose_form(current_platform(), sizes, x.shape, dim, x.dtype)
    return FORMS[form](x, names, dim)


def current_platform() -> str:
    """The platform of the devices of the enclosing ``shard_map``, ``"unknown"`` without devices."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return "unknown" if device is None else device.platform


def choose_form(
    platform: str, axis_sizes: Sequence[int], shape: Sequence[int], dim: int, dtype: DType
) -> str:
    """The form that sends no more than a reduce-scatter must, in the fewest steps.

    From the programs of ``benchmarks/results/scatter_forms.md``: on TPUs ``lax.psum_scatter``
    mostly compiles to a full all-reduce. Over one axis of the torus after the other it does not,
    unless shards of the last dim are narrower than a register. Over a single flat axis a ring sends
    the least and needs no extra memory, but waits n - 1 times; if its steps are small, an
    all-to-all sends as much at once. The shape is that on one device.
    """
    sizes = [size for size in axis_sizes if size > 1]
    if platform != "tpu" or not sizes:
        return "native"
    if len(sizes) > 1:
        last = 0 < dim % len(shape) == len(shape) - 1
        return "all_to_all" if last and shape[-1] // math.prod(sizes) < LANES else "axes"
    step_bytes = math.prod(shape) * jnp.dtype(dtype).itemsize // sizes[0]
    return "ring" if step_bytes >= _MIN_RING_BYTES else "all_to_all"


def reduce_scatter_arrays(
    layout: Layout,
    axes: tuple[str, ...],
    xs: Sequence[jax.Array],
    array_layouts: Sequence[ArrayLayout],
) -> list[jax.Array]:
    """Sums over manual axes: this device's shards, and the full sums of unsharded arrays."""

    def reduce(x: jax.Array, dim: int) -> jax.Array:
        if lax.axis_size(axes) == 1:
            return x  # XLA for CPUs copies it
        return psum_scatter(x, axes, dim) if dim else lax.psum(x, axes)

    return _map_arrays(layout, reduce, xs, array_layouts)


def _map_arrays(
    layout: Layout,
    fn: Callable[[jax.Array, int], jax.Array],
    xs: Sequence[jax.Array],
    array_layouts: Sequence[ArrayLayout],
) -> list[jax.Array]:
    """``fn(x, dim)`` of every array, where ``fn`` runs collectives over ZeRO's axes."""

    def run(xs: list[jax.Array]) -> list[jax.Array]:
        return [fn(x, array.dim) for x, array in zip(xs, array_layouts, strict=True)]

    specs = [array.spec for array in array_layouts]
    return over_other_axes(layout, run, (specs,), specs)(list(xs))


def own_shard(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """This device's shard of a replicated array along a dim."""
    dim %= x.ndim
    size = x.shape[dim] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, dim)


def _scatter_axis_by_axis(x: jax.Array, names: tuple[str, ...], dim: int) -> jax.Array:
    """Scatters over the first axis, then its shards over the next: row-major order."""
    if 0 < dim >= x.ndim - 2:
        for name in names:
            x = lax.psum_scatter(x, name, scatter_dimension=dim, tiled=True)
        return x
    # TPU compilers scatter leading dims directly. A dim between the first and the last two, which
    # are those of the tiles in memory, becomes an all-reduce instead. So does a transposed one, if
    # more than one dim is left before the last: the compiler undoes the transpose.
    sizes = [lax.axis_size(name) for name in names]
    shape = (*x.shape[:dim], x.shape[dim] // math.prod(sizes), *x.shape[dim + 1 :])
    # (..., dim, ...) -> (..., *sizes, dim / devices, ...) -> (*sizes, ..., dim / devices, ...)
    x = x.reshape(*shape[:dim], *sizes, *shape[dim:])
    x = jnp.moveaxis(x, range(dim, dim + len(sizes)), range(len(sizes)))
    if dim:
        x = x.reshape(*sizes, -1, shape[-1])
    for name in names:
        x = lax.psum_scatter(x, name, scatter_dimension=0, tiled=False)
    return x.reshape(shape)


def _scatter_in_ring(x: jax.Array, names: tuple[str, ...], dim: int) -> jax.Array:
    """Passes partial sums from neighbour to neighbour: half of every shard in each direction."""
    me, num = lax.axis_index(names), lax.axis_size(names)
    if num == 1:
        return x
    size = x.shape[dim] // num
    up = size // 2  # rows of a shard that travel upwards; a shard of one row travels downwards

    def half(direction: int, shard: jax.Array) -> jax.Array:
        """The local contribution to the half of a shard that travels in this direction."""
        start, length = (0, up) if direction > 0 else (up, size - up)
        return lax.dynamic_slice_in_dim(x, shard % num * size + start, length, dim)

    def body(i: jax.Array, sums: dict[int, jax.Array]) -> dict[int, jax.Array]:
        return {
            direction: lax.ppermute(sent, names, [(j, (j + direction) % num) for j in range(num)])
            + half(direction, me - direction * (i + 2))
            for direction, sent in sums.items()
        }

    # A sum moves num - 1 times before it reaches its owner, so it starts one device past it.
    directions = (1, -1) if up else (-1,)
    sums = {direction: half(direction, me - direction) for direction in directions}
    sums = lax.fori_loop(0, num - 1, body, sums)
    return lax.concatenate([sums[direction] for direction in directions], dim)


def _scatter_by_all_to_all(x: jax.Array, names: tuple[str, ...], dim: int) -> jax.Array:
    """Sends every device its shard and sums the received ones."""
    num = lax.axis_size(names)
    x = lax.all_to_all(x, names, split_axis=dim, concat_axis=dim, tiled=True)
    # (..., dim, ...) -> (..., devices, dim / devices, ...)
    shards = x.reshape(*x.shape[:dim], num, x.shape[dim] // num, *x.shape[dim + 1 :])
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return jnp.sum(shards, dim, dtype=jnp.float32 if narrow else x.dtype).astype(x.dtype)


FORMS = {
    "native": lambda x, names, dim: lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True),
    "axes": _scatter_axis_by_axis,
    "ring": _scatter_in_ring,
    "all_to_all": _scatter_by_all_to_all,
}


# --- All-gathers of shards, as they are or in 8-bit or 4-bit codes --------------------------------

_TILE_BYTES = 4096  # of a vector in TPU memory
BLOCK_SIZE = 512  # elements per scale when shards are gathered in codes


def all_gather_arrays(
    layout: Layout, xs: Sequence[jax.Array], layouts: Sequence[ArrayLayout], bits: int | None = None
) -> list[jax.Array]:
    """Gathers full arrays from shards on ``layout.axes``, matrices in codes of ``bits``."""

    def gather(x: jax.Array, dim: int) -> jax.Array:
        if not dim:
            return x
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        if bits and floating and x.ndim > 1 and x.size >= BLOCK_SIZE:
            return _all_gather_codes(layout, x, dim, bits)
        for axes in gather_axis_groups(layout, x.shape[-1] if dim == -1 else None):
            x = lax.all_gather(x, axes, axis=x.ndim + dim, tiled=True)
        return x

    return _map_arrays(layout, gather, xs, layouts)


def _all_gather_codes(layout: Layout, x: jax.Array, dim: int, bits: int) -> jax.Array:
    """Gathers the codes of all shards and decodes them, in the dtype of the array."""
    codes, scales = quantize(to_sum_dtype(x).reshape(1, -1), bits, BLOCK_SIZE)
    for axes in gather_axis_groups(layout):
        codes, scales = (lax.all_gather(part, axes, tiled=True) for part in (codes, scales))
    shards = dequantize(codes, scales, bits, BLOCK_SIZE)[:, : x.size].astype(x.dtype)
    # (devices, ..., dim, ...) -> (..., devices, dim, ...) -> (..., devices * dim, ...)
    dim += x.ndim
    shards = jnp.moveaxis(shards.reshape(-1, *x.shape), 0, dim)
    return shards.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])


def gather_axis_groups(layout: Layout, last_dim: int | None = None) -> list[tuple[str, ...]]:
    """Groups of mesh axes over which shards are gathered, one group after the other.

    XLA turns an all-gather over all three axes of a TPU's torus at once into an all-reduce, and one
    over two axes if the last dim is sharded and a shard of it (``last_dim``) is narrower than a
    register. In both cases every axis is a group, the last axis first.
    """
    narrow = last_dim is not None and last_dim < LANES
    if layout.platform == "tpu" and len(layout.axes) > (1 if narrow else 2):
        return [(axis,) for axis in reversed(layout.axes)]
    return [layout.axes]


def all_gather_concat(x: jax.Array, axes: Axes) -> jax.Array:
    """The arrays of all devices, concatenated along the first dim."""
    tile = _TILE_BYTES // x.dtype.itemsize
    if current_platform() != "tpu" or x.ndim > 1 or x.size < tile or x.size % tile == 0:
        return lax.all_gather(x, axes, tiled=True)
    # XLA:TPU gathers vectors that do not fill whole tiles by an all-reduce, twice the bytes.
    padded = lax.all_gather(jnp.pad(x, (0, -x.size % tile)), axes)  # (devices, padded size)
    return padded[:, : x.size].ravel()


# --- 8-bit and 4-bit codes on the wire, as QSGD sends them: one scale for each block of elements --


def quantize(
    x: jax.Array, bits: int, block_size: int, key: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Codes (rows, padded elements * bits / 8), float32 scales (rows, blocks) of (rows, elements).

    8 bits are int8 codes, 4 bits uint8 that hold two. ``key`` rounds stochastically, None to
    nearest.
    """
    num_levels = 2 ** (bits - 1) - 1
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block_size)))
    blocks = x.reshape(x.shape[0], -1, block_size)  # (rows, blocks, block_size)
    # One scale per block: its largest magnitude is num_levels steps. NaN counts as infinite, since
    # maxima on CPUs may ignore it: the scale makes a block that is not finite NaN.
    scales = jnp.where(jnp.isnan(blocks), jnp.inf, jnp.abs(blocks)).max(-1).astype(jnp.float32)
    scales *= np.float32(1 / num_levels)  # as XLA divides by a constant
    steps = blocks / jnp.where(scales == 0, 1, scales)[..., None].astype(x.dtype)
    if key is None:
        steps = jnp.round(steps)
    else:
        steps = jnp.floor(steps + jax.random.uniform(key, steps.shape, steps.dtype))
    # A scale rounded to float32 may lift the largest element above the last level.
    codes = jnp.clip(steps, -num_levels, num_levels).astype(jnp.int8).reshape(x.shape)
    if bits == 4:
        # Two neighbours share a byte, the first in its lower half.
        low, high = jnp.split(codes.reshape(x.shape[0], -1, 2), 2, -1)
        codes = ((low & 15) | (high << 4)).squeeze(-1).astype(jnp.uint8)
    return codes, scales


def dequantize(codes: jax.Array, scales: jax.Array, bits: int, block_size: int) -> jax.Array:
    """The inverse of ``quantize`` up to rounding: (rows, padded elements), float32."""
    if bits == 4:
        both = lax.bitcast_convert_type(codes, jnp.int8)
        codes = jnp.stack([(both << 4) >> 4, both >> 4], -1)  # shifts extend the sign
    blocks = codes.reshape(*scales.shape, block_size).astype(jnp.float32) * scales[..., None]
    return blocks.reshape(scales.shape[0], -1)
