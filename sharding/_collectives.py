"""Collectives of lists of arrays, for use inside a ``shard_map`` over the data axes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax import lax
from jax.sharding import PartitionSpec

from sharding._layout import Layout
from sharding._scatter import psum_scatter


class Cut(NamedTuple):
    """How one array is cut.

    Attributes:
      dim: the dim that ZeRO cuts, counted from the end; 0: none.
      spec: how the array lies on the user's axes of the mesh.
    """

    dim: int
    spec: PartitionSpec


def all_gather(layout: Layout, xs: Sequence[jax.Array], cuts: Sequence[Cut]) -> list[jax.Array]:
    """Whole arrays from the shards on ``layout.axis``; what is not cut stays as it is."""

    def gather(x: jax.Array, dim: int) -> jax.Array:
        if dim:
            for axes in layout.gather_steps(x.shape[-1] if dim == -1 else None):
                x = lax.all_gather(x, axes, axis=x.ndim + dim, tiled=True)
        return x

    return _on_each(layout, gather, xs, cuts)


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
