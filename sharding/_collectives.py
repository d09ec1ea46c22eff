"""Collectives of gradient trees, for use inside a ``shard_map`` over the data axes."""

from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

Axis = str | tuple[str, ...]


def reduce_scatter(tree: Any, dims: Any, axis: Axis, other_axes: frozenset[str], specs: Any) -> Any:
    """Sums a tree over a manual mesh axis; each device keeps its part of every leaf.

    Args:
      tree: one array per leaf, different on every device of ``axis``.
      dims: as ``tree``: the dim to scatter, or -1 to keep the whole sum on every device.
      axis: the manual mesh axis, or axes, to sum over.
      other_axes: the mesh axes that are left to the partitioner.
      specs: as ``tree``: how each leaf lies on ``other_axes``. There the sum is made device by
        device: left to the partitioner, every leaf would first be gathered over them.

    Returns:
      A tree of sums; a scattered leaf has its dim divided by the size of ``axis``.
    """

    def sum_leaf(x: jax.Array, dim: int) -> jax.Array:
        if dim < 0:
            return lax.psum(x, axis)
        return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)

    def sum_tree(tree: Any) -> Any:
        return jax.tree.map(sum_leaf, tree, dims)

    if not other_axes:
        return sum_tree(tree)
    return jax.shard_map(
        sum_tree,
        in_specs=(specs,),
        out_specs=specs,
        axis_names=other_axes,
        check_vma=False,
    )(tree)


def scatter_spec(dim: int, axis: Axis) -> PartitionSpec:
    """How a leaf that ``reduce_scatter`` cut along ``dim`` leaves the ``shard_map``."""
    return PartitionSpec() if dim < 0 else PartitionSpec(*[None] * dim, axis)
