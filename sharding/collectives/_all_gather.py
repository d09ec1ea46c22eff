"""All-gathers of shards, as they are or in 8-bit or 4-bit codes."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from sharding.collectives._dtypes import to_sum_dtype
from sharding.collectives._map_arrays import ArrayLayout, map_arrays
from sharding.collectives._quantize_blocks import dequantize, quantize
from sharding.collectives._reduce_scatter import LANES, current_platform
from sharding.placement._layout import Layout
from sharding.placement._specs import Axes

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

    return map_arrays(layout, gather, xs, layouts)


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
