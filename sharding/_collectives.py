"""Collectives of lists of arrays, for use inside a ``shard_map`` over the data axes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from sharding._layout import Layout
from sharding._scatter import psum_scatter
from sharding.sync._quantized import dequantize, quantize

# Elements to a scale, where parameters are gathered in codes.
_BLOCK = 512


class Cut(NamedTuple):
    """How one array is cut.

    Attributes:
      dim: the dim that ZeRO cuts, counted from the end; 0: none.
      spec: how the array lies on the user's axes of the mesh.
    """

    dim: int
    spec: PartitionSpec


def all_gather(
    layout: Layout, xs: Sequence[jax.Array], cuts: Sequence[Cut], bits: int | None = None
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
            for axes in layout.gather_steps(x.shape[-1] if dim == -1 else None):
                x = lax.all_gather(x, axes, axis=x.ndim + dim, tiled=True)
        return x

    return _on_each(layout, gather, xs, cuts)


def _gather_codes(layout: Layout, x: jax.Array, dim: int, bits: int) -> jax.Array:
    """What the codes of all shards stand for, in the dtype of the array."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    codes, scales = quantize(wide.reshape(1, -1), bits, _BLOCK)
    for axes in layout.gather_steps():
        codes, scales = (lax.all_gather(part, axes, tiled=True) for part in (codes, scales))
    pieces = dequantize(codes, scales, bits, _BLOCK)[:, : x.size].astype(x.dtype)
    pieces = jnp.moveaxis(pieces.reshape(-1, *x.shape), 0, x.ndim + dim)
    shape = list(x.shape)
    shape[dim] = -1
    return pieces.reshape(shape)


def reduce_scatter(
    layout: Layout, axes: tuple[str, ...], xs: Sequence[jax.Array], cuts: Sequence[Cut]
) -> list[jax.Array]:
    """Sums over manual axes; each device keeps its part, and the whole of what is not cut."""

    def reduce(x: jax.Array, dim: int) -> jax.Array:
        if not dim:
            return lax.psum(x, axes)
        return psum_scatter(x, axes, dim, layout.scatter_form(axes, x, dim))

    return _on_each(layout, reduce, xs, cuts)


def _on_each(
    layout: Layout,
    fn: Callable[[jax.Array, int], jax.Array],
    xs: Sequence[jax.Array],
    cuts: Sequence[Cut],
) -> list[jax.Array]:
    def run(xs: list[jax.Array]) -> list[jax.Array]:
        return [fn(x, cut.dim) for x, cut in zip(xs, cuts, strict=True)]

    if not layout.other_axes:
        return run(list(xs))
    # Left to the partitioner, every array would first be gathered over the other axes.
    specs = [cut.spec for cut in cuts]
    mapped = jax.shard_map(
        run, in_specs=(specs,), out_specs=specs, axis_names=layout.other_axes, check_vma=False
    )
    return mapped(list(xs))
