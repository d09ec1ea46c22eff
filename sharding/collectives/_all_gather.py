"""All-gathers of shards, as they are or in 8-bit or 4-bit codes."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from sharding.collectives._array_layout import ArrayLayout, on_each
from sharding.collectives._block_codec import dequantize, quantize
from sharding.collectives._reduce_scatter import LANES, platform
from sharding.placement._layout import Layout
from sharding.placement._specs import Axes

# Of a vector in a TPU's memory.
_TILE_BYTES = 4096
# Elements to a scale, where parameters are gathered in codes.
_BLOCK = 512


def all_gather(
    layout: Layout, xs: Sequence[jax.Array], cuts: Sequence[ArrayLayout], bits: int | None = None
) -> list[jax.Array]:
    """Whole arrays from the shards on ``layout.axis``; what is not cut stays as it is.

    Args:
      layout: the mesh.
      xs: this device's shards.
      cuts: how they are cut.
      bits: 8 or 4 to send codes of matrices; None to send arrays as they are.
    """

    def gather(x: jax.Array, dim: int) -> jax.Array:
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        if dim and bits and floating and x.ndim > 1 and x.size >= _BLOCK:
            return _gather_codes(layout, x, dim, bits)
        if dim:
            for axes in gather_steps(layout, x.shape[-1] if dim == -1 else None):
                x = lax.all_gather(x, axes, axis=x.ndim + dim, tiled=True)
        return x

    return on_each(layout, gather, xs, cuts)


def _gather_codes(layout: Layout, x: jax.Array, dim: int, bits: int) -> jax.Array:
    """What the codes of all shards stand for, in the dtype of the array."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    codes, scales = quantize(wide.reshape(1, -1), bits, _BLOCK)
    for axes in gather_steps(layout):
        codes, scales = (lax.all_gather(part, axes, tiled=True) for part in (codes, scales))
    pieces = dequantize(codes, scales, bits, _BLOCK)[:, : x.size].astype(x.dtype)
    pieces = jnp.moveaxis(pieces.reshape(-1, *x.shape), 0, x.ndim + dim)
    shape = list(x.shape)
    shape[dim] = -1
    return pieces.reshape(shape)


def gather_steps(layout: Layout, lanes: int | None = None) -> list[tuple[str, ...]]:
    """Over which axes, one group after the other, shards are gathered; the last axis first.

    Over all three axes of a TPU's torus at once XLA makes an all-reduce of it; over two where
    the last dim is cut into less than a register's ``lanes``.
    """
    narrow = lanes is not None and lanes < LANES
    if layout.platform == "tpu" and len(layout.axes) > (1 if narrow else 2):
        return [(axis,) for axis in reversed(layout.axes)]
    return [layout.axes]


def gather_all(x: jax.Array, axes: Axes) -> jax.Array:
    """All devices' arrays, one after the other along the first dim."""
    tile = _TILE_BYTES // x.dtype.itemsize
    if platform() != "tpu" or x.ndim > 1 or x.size < tile or x.size % tile == 0:
        return lax.all_gather(x, axes, tiled=True)
    # Of vectors that do not fill whole tiles XLA:TPU would make an all-reduce, twice the bytes.
    found = lax.all_gather(jnp.pad(x, (0, -x.size % tile)), axes)
    return found[:, : x.size].ravel()
