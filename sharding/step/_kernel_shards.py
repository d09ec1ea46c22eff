"""Kernels of an update run on the shards of each device."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from optax_ext import kernels
from sharding.placement._layout import Layout
from sharding.placement._specs import is_spec, path_str


@contextlib.contextmanager
def on_shards(layout: Layout, specs: Any) -> Iterator[None]:
    """Kernels traced here run on the mesh; ``specs`` are those of the shards of parameters."""
    leaves = jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec)
    with kernels.kernels_on(_Shards(layout, {path_str(path): spec for path, spec in leaves})):
        yield


class _Shards:
    """How parameters are sharded on a mesh; see ``optax_ext.kernels.Shards``."""

    def __init__(self, layout: Layout, specs: Mapping[str, PartitionSpec]):
        self._layout, self._specs = layout, specs

    def _entries(self, path: str, ndim: int) -> list[Any]:
        spec = self._specs[path]
        return [*spec, *[None] * (ndim - len(spec))]

    def shape_of(self, path: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Returns the shape of a shard of a parameter; None if the path is not one's."""
        if path not in self._specs:
            return None
        local = []
        for size, entry in zip(shape, self._entries(path, len(shape)), strict=True):
            axes = entry if isinstance(entry, tuple) else (entry,)
            num = math.prod(self._layout.mesh.shape[axis] for axis in axes if axis is not None)
            local.append(size // num)
        return tuple(local)

    def run(
        self,
        path: str,
        fn: Callable[..., list[jax.Array]],
        operands: Sequence[jax.Array],
        dims: Sequence[tuple[int, ...]],
        result_dims: Sequence[tuple[int, ...]],
    ) -> list[jax.Array]:
        """Calls a function of one device's arrays on all; ``dims`` are those of the parameter."""
        entries = self._entries(path, 1 + max(d for of in dims for d in of))

        def spec(of: tuple[int, ...]) -> PartitionSpec:
            return PartitionSpec(*(entries[d] for d in of))

        return jax.shard_map(
            lambda *local: fn(*local),
            # Inside auto_axes the mesh is that of the context.
            mesh=None if self._layout.explicit_axes else self._layout.mesh,
            in_specs=tuple(map(spec, dims)),
            out_specs=[spec(of) for of in result_dims],
            check_vma=False,
        )(*operands)
