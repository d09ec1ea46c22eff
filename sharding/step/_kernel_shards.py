"""Kernels of an update run on the shards of each device."""

from collections.abc import Callable, Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec

from optax_ext import kernels
from sharding._types import Tree
from sharding.placement._layout import Layout
from sharding.placement._specs import is_spec


class KernelShards(kernels.Shards):
    """How parameters are sharded on a mesh."""

    def __init__(self, layout: Layout, params: Tree, specs: Tree):
        self.layout = layout
        leaves = jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec)
        self.specs: dict[kernels.Path, PartitionSpec] = dict(leaves)
        self._shapes = {p: x.shape for p, x in jax.tree_util.tree_leaves_with_path(params)}

    def shape_of(self, path: kernels.Path, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Returns the shape of a shard; None if there is no such parameter of this shape."""
        if self._shapes.get(path) != shape:
            return None
        return NamedSharding(self.layout.mesh, self.specs[path]).shard_shape(shape)

    def run(
        self,
        path: kernels.Path,
        fn: Callable[..., list[jax.Array]],
        operands: Sequence[jax.Array],
        dims: Sequence[tuple[int, ...]],
        result_dims: Sequence[tuple[int, ...]],
    ) -> list[jax.Array]:
        """Calls a function of one device's arrays on all; ``dims`` are those of the parameter."""
        entries = self.specs[path]

        def spec(of: tuple[int, ...]) -> PartitionSpec:
            return PartitionSpec(*(entries[d] if d < len(entries) else None for d in of))

        return jax.shard_map(
            fn,
            # Inside auto_axes the mesh is that of the context.
            mesh=None if self.layout.explicit_axes else self.layout.mesh,
            in_specs=tuple(map(spec, dims)),
            out_specs=[spec(of) for of in result_dims],
            check_vma=False,
        )(*operands)
