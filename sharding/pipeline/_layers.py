"""The layers of a model in one array each, in the order in which stages hold them."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from sharding.pipeline._ops import Place
from sharding.pipeline._schedule import Schedule
from sharding.placement._specs import with_axis

_REPLICATED = PartitionSpec()


def even_counts(num_layers: int, num_virtual_stages: int) -> tuple[int, ...]:
    """Layers per virtual stage; the first ones have one more where they do not divide."""
    each, more = divmod(num_layers, num_virtual_stages)
    return tuple(each + (v < more) for v in range(num_virtual_stages))


def owned_virtual_stages(schedule: Schedule) -> np.ndarray:
    """[stages, chunks]: the virtual stages whose parameters a stage holds: those of route 0."""
    places = {place: v for v, place in enumerate(schedule.routes[0])}
    chunks = [sorted(p.chunk for p in places if p.stage == s) for s in range(schedule.num_stages)]
    if len(set(map(len, chunks))) > 1:
        raise ValueError(
            f"{schedule.name}: every stage must hold as many groups of layers as the others, got "
            f"{list(map(len, chunks))}."
        )
    return np.array(
        [[places[Place(stage, chunk)] for chunk in held] for stage, held in enumerate(chunks)],
        np.int32,
    )


def stage_rows(schedule: Schedule, counts: Sequence[int], axis: str) -> "StageRows":
    """The rows of every stage, for layers per virtual stage and a mesh axis."""
    size, starts = max(counts), np.concatenate([[0], np.cumsum(counts)])
    rows = [
        starts[v] + i if i < counts[v] else -1
        for v in owned_virtual_stages(schedule).ravel()
        for i in range(size)
    ]
    return StageRows(axis, np.array(rows, np.int64).reshape(schedule.num_stages, -1))


@dataclasses.dataclass(frozen=True, eq=False)
class StageRows:
    """Which layers of stacked arrays [layers, ...] are the rows of which stage.

    Where all virtual stages have as many layers, arrays are in the order of the stages and sharded
    over them along dim 0. Where they have not, arrays are in the order of the model, and sharded
    along another dim, so that no optimizer sees padding: stages pad their rows within the loss. For
    a run of the schedule one all-to-all sends every stage its layers, and another one returns their
    gradients.

    Attributes:
      axis: of the mesh.
      layer: [stages, rows], the number of the layer; -1 for padding.
    """

    axis: str
    layer: np.ndarray

    @functools.cached_property
    def uneven(self) -> bool:
        """Whether some rows are padding."""
        return bool(np.any(self.layer < 0))

    @functools.cached_property
    def order(self) -> np.ndarray:
        """[layers]: which layer of the model each layer of a stacked array is."""
        return np.arange(self.layer.max() + 1) if self.uneven else self.layer.ravel()

    def dim(self, shape: Sequence[int], spec: PartitionSpec = _REPLICATED) -> int | None:
        """The dim that stages shard, if any; ``spec`` is that on other mesh axes."""
        return dim_of_uneven(shape, len(self.layer), spec) if self.uneven else 0

    def spec(self, x: Any, spec: PartitionSpec = _REPLICATED) -> PartitionSpec:
        """The spec of a stacked array; its spec on other mesh axes, and the stages' axis."""
        dim = self.dim(x.shape, spec)
        return spec if dim is None else with_axis(spec, x.ndim, dim, self.axis)

    # Within a shard_map over the stages.

    def to_stage(self, x: jax.Array, shape: Sequence[int]) -> jax.Array:
        """The rows of this stage, from its shard of an array; in padding those of layer 0.

        Args:
          x: the shard.
          shape: of the array.
        """
        if not self.uneven:
            return x
        dim, rows = self.dim(shape), np.maximum(self.layer, 0)
        with jax.named_scope("layers_to_stages"):
            if dim is None:
                return x[jnp.asarray(rows)[lax.axis_index(self.axis)]]
            return lax.all_to_all(x[rows.ravel()], self.axis, 0, dim, tiled=True)

    def from_stage(self, x: jax.Array) -> jax.Array:
        """The inverse of ``to_stage``."""
        if not self.uneven:
            return x
        dim, rows = self.dim(x.shape), np.argsort(self.layer.ravel(), kind="stable")
        with jax.named_scope("layers_from_stages"):
            if dim is None:
                x = lax.all_gather(x, self.axis, tiled=True)
            else:
                x = lax.all_to_all(x, self.axis, dim, 0, tiled=True)
            return x[rows[-len(self.order) :]]


def dim_of_uneven(shape: Sequence[int], num_stages: int, spec: PartitionSpec) -> int | None:
    """The dim of stacked layers that stages of unequal numbers of them shard; None for none.

    The first free one that divides: a shard over the data axes has the same.
    """
    free = [d for d in range(1, len(shape)) if d >= len(spec) or spec[d] is None]
    return next((d for d in free if shape[d] and shape[d] % num_stages == 0), None)


def reordered(x: Any, order: np.ndarray) -> Any:
    """Layers [layers, ...] in another order."""
    if isinstance(x, jax.ShapeDtypeStruct) or np.array_equal(order, np.arange(len(order))):
        return x
    return (x if isinstance(x, jax.Array) else np.asarray(x))[order]


def map_layers(tree: Any, name: str, fn: Callable[[Any], Any]) -> Any:
    """The tree with ``fn(subtree)`` in place of every subtree under the key ``name``."""
    return _map_parents(tree, name, lambda parent: {**parent, name: fn(parent[name])})


def join_numbered(tree: Any, numbered: str, name: str, count: int) -> Any:
    """Subtrees under numbered keys as one, whose arrays are stacked under the key ``name``."""
    keys = [numbered.format(i) for i in range(count)]
    pattern = re.compile(re.escape(numbered).replace(r"\{\}", r"\d+"))

    def join(parent: Mapping[Any, Any]) -> dict[Any, Any]:
        there = [key for key in parent if isinstance(key, str) and pattern.fullmatch(key)]
        if sorted(there) != sorted(keys):
            raise ValueError(f"expected the {count} layers {keys[0]} to {keys[-1]}, got {there}.")
        stacked = jax.tree.map(lambda *layers: _stack(layers), *(parent[key] for key in keys))
        return {**{k: v for k, v in parent.items() if k not in keys}, name: stacked}

    return _map_parents(tree, keys[0], join)


def split_numbered(tree: Any, numbered: str, name: str, count: int) -> Any:
    """The inverse of ``join_numbered``."""

    def split(parent: Mapping[Any, Any]) -> dict[Any, Any]:
        layers = {
            numbered.format(i): jax.tree.map(lambda a, i=i: _layer(a, i), parent[name])
            for i in range(count)
        }
        return {**{k: v for k, v in parent.items() if k != name}, **layers}

    return _map_parents(tree, name, split)


def _map_parents(tree: Any, key: str, fn: Callable[[Mapping[Any, Any]], Any]) -> Any:
    """The tree with ``fn(mapping)``, in its type, in place of every mapping that has the key."""

    def is_parent(x: Any) -> bool:
        return isinstance(x, Mapping) and key in x

    def convert(x: Any) -> Any:
        return type(x)(fn(x)) if is_parent(x) else x

    return jax.tree.map(convert, tree, is_leaf=is_parent)


def _stack(layers: Sequence[Any]) -> Any:
    if isinstance(layers[0], jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(layers), *layers[0].shape), layers[0].dtype)
    return (jnp if isinstance(layers[0], jax.Array) else np).stack(layers)


def _layer(x: Any, i: int) -> Any:
    return (
        jax.ShapeDtypeStruct(x.shape[1:], x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x[i]
    )
