"""Collectives of lists of arrays whose other dims other mesh axes may shard."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec

from sharding.placement._layout import Layout
from sharding.placement._on_mesh import over_other_axes


class ArrayLayout(NamedTuple):
    """How one array is sharded."""

    dim: int  # that ZeRO shards, counted from the end; 0 if the array is unsharded
    spec: PartitionSpec  # on the user's axes of the mesh


def map_arrays(
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
