"""Collectives of lists of arrays whose other dims other mesh axes may shard."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec

from sharding.placement._layout import Layout


class ArrayLayout(NamedTuple):
    """How one array is cut.

    Attributes:
      dim: the dim that ZeRO cuts, counted from the end; 0: none.
      spec: how the array lies on the user's axes of the mesh.
    """

    dim: int
    spec: PartitionSpec


def on_each(
    layout: Layout,
    fn: Callable[[jax.Array, int], jax.Array],
    xs: Sequence[jax.Array],
    cuts: Sequence[ArrayLayout],
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
