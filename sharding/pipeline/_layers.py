"""The layers of a model in one array each, in the order in which stages hold them."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from sharding._types import Array, Tree
from sharding.pipeline._schedule import Schedule
from sharding.placement._specs import with_axis

_REPLICATED = PartitionSpec()


def owned_virtual_stages(schedule: Schedule) -> np.ndarray:
    """[stages, chunks]: the virtual stages whose parameters a stage holds: those of route 0."""
    places = {place: v for v, place in enumerate(schedule.routes[0])}
    held: list[list[int]] = [[] for _ in range(schedule.num_stages)]
    for place in sorted(places):
        held[place.stage].append(places[place])
    if len(set(map(len, held))) > 1:
        raise ValueError(
            f"{schedule.name}: every stage must hold as many groups of layers as the others, got "
            f"{list(map(len, held))}."
        )
    return np.array(held, np.int32)


def layer_of_row(virtual_stages: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """The layer of each row, [stages, rows], -1 for padding, of [stages, chunks] and all counts."""
    size = max(counts)
    starts = np.concatenate([[0], np.cumsum(counts)])
    rows = [
        starts[v] + i if i < counts[v] else -1 for v in virtual_stages.ravel() for i in range(size)
    ]
    return np.array(rows, np.int64).reshape(len(virtual_stages), -1)


@dataclasses.dataclass(frozen=True, eq=False)
class StageRows:
    """Which layers of stacked arrays [layers, ...] are the rows of which stage.

    Where all virtual stages have as many layers, arrays are in the order of the stages, and sharded
    over them along dim 0. Otherwise they are in the order of the model, and stages pad their rows
    within the loss. If the stages divide the layers, arrays are sharded along dim 0, and stages
    send each other layers that are elsewhere; if not, along another dim, with an all-to-all.
    """

    axis: str  # of the mesh
    layer: np.ndarray  # [stages, rows]: the number of the layer; -1 for padding

    @functools.cached_property
    def uneven(self) -> bool:
        return bool(np.any(self.layer < 0))

    @functools.cached_property
    def order(self) -> np.ndarray:
        """[layers]: which layer of the model each layer of a stacked array is."""
        return np.arange(self.layer.max() + 1) if self.uneven else self.layer.ravel()

    @functools.cached_property
    def _moves(self) -> "tuple[Moves, Moves] | None":
        """To the stages and back; None where arrays are sharded along another dim."""
        stages = len(self.layer)
        if len(self.order) % stages:
            return None
        own = self.layer.copy()
        held = len(self.order) // stages
        for stage, layers in enumerate(own):
            layers[layers < 0] = stage * held  # padding, of which nothing is read
        # Rows sorted by their layers: those of padding, then one of each layer.
        rows = np.argsort(self.layer.ravel(), kind="stable")
        back = rows[-len(self.order) :].reshape(stages, held)
        return Moves.of(own, held), Moves.of(back, self.layer.shape[1])

    def dim(self, shape: Sequence[int], spec: PartitionSpec = _REPLICATED) -> int | None:
        """The dim of a stacked array that stages shard; None if no free one divides by them."""
        if not self.uneven or self._moves is not None:
            return 0
        return other_dim(shape, len(self.layer), spec)

    def spec(self, x: Array, spec: PartitionSpec = _REPLICATED) -> PartitionSpec:
        """The spec of a stacked array: ``spec``, on other mesh axes, and the stages' axis."""
        dim = self.dim(x.shape, spec)
        return spec if dim is None else with_axis(spec, x.ndim, dim, self.axis)

    def sent(self, shape: Sequence[int]) -> tuple[float, float]:
        """How many layers of an array a device sends, and how many of its gradient."""
        if not self.uneven:
            return 0.0, 0.0
        if self._moves is not None:
            to_stages, back = (sum(rows.shape[1] for _, rows in m.sends) for m in self._moves)
            return float(to_stages), float(back)
        dim = self.dim(shape)
        stages, rows = self.layer.shape
        of_one = (stages - 1) / stages * rows
        return (0.0, of_one * stages) if dim is None else (of_one, of_one)

    # Within a shard_map over the stages.

    def to_stage(self, x: jax.Array, like: Array) -> jax.Array:
        """The rows of this stage, from its shard of ``like``; padding has any layer."""
        if not self.uneven:
            return x
        with jax.named_scope("layers_to_stages"):
            if self._moves is not None:
                return self._moves[0](x, self.axis)
            dim = self.dim(like.shape)
            rows = np.maximum(self.layer, 0)
            if dim is None:
                return x[jnp.asarray(rows)[lax.axis_index(self.axis)]]
            # [layers, ..., shard] to [stages * rows, ..., shard], of which a stage gets its rows.
            return lax.all_to_all(x[rows.ravel()], self.axis, 0, dim, tiled=True)

    def from_stage(self, x: jax.Array) -> jax.Array:
        """The inverse of ``to_stage``."""
        if not self.uneven:
            return x
        with jax.named_scope("layers_from_stages"):
            if self._moves is not None:
                return self._moves[1](x, self.axis)
            dim = self.dim(x.shape)
            rows = np.argsort(self.layer.ravel(), kind="stable")
            if dim is None:
                x = lax.all_gather(x, self.axis, tiled=True)  # [stages * rows, ...]
            else:
                x = lax.all_to_all(x, self.axis, dim, 0, tiled=True)  # a shard of dim
            return x[rows[-len(self.order) :]]  # [layers, ...]: those of padding are the first


def other_dim(shape: Sequence[int], num_stages: int, spec: PartitionSpec) -> int | None:
    """The first free dim, but dim 0, that stages divide; shards over data axes have the same."""
    free = [d for d in range(1, len(shape)) if d >= len(spec) or spec[d] is None]
    return next((d for d in free if shape[d] and shape[d] % num_stages == 0), None)


class Moves(NamedTuple):
    """Rows that stages take from each other, by permutes: one for each distance between stages."""

    # For each distance, the pairs of stages, and [stages, rows] which rows a stage sends.
    sends: tuple[tuple[list[tuple[int, int]], np.ndarray], ...]
    take: np.ndarray  # [stages, rows]: which of its own rows, then of those received, a stage takes

    @staticmethod
    def of(source: np.ndarray, held: int) -> "Moves":
        """Moves to [stages, rows] of these numbers, of which each stage holds ``held`` in a row."""
        stages = len(source)
        home = source // held
        take = source % held
        sends = []
        start = held
        away = home - np.arange(stages)[:, None]  # [stages, rows]: how far its home is
        for distance in sorted({int(d) for d in away.ravel()} - {0}):
            receivers = [s for s in range(stages) if np.any(away[s] == distance)]
            most = max(int(np.sum(away[s] == distance)) for s in receivers)
            rows = np.zeros((stages, most), np.int64)  # one shape: stages with fewer send row 0 too
            for s in receivers:
                (there,) = np.nonzero(away[s] == distance)
                rows[s + distance, : len(there)] = take[s, there]
                take[s, there] = start + np.arange(len(there))
            sends.append(([(s + distance, s) for s in receivers], rows))
            start += most
        return Moves(tuple(sends), take)

    def __call__(self, x: jax.Array, axis: str) -> jax.Array:
        stage = lax.axis_index(axis)
        received = [
            lax.ppermute(x[jnp.asarray(rows)[stage]], axis, pairs) for pairs, rows in self.sends
        ]
        return jnp.concatenate([x, *received])[jnp.asarray(self.take)[stage]]


def reordered(x: Array, order: np.ndarray) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct) or np.array_equal(order, np.arange(len(order))):
        return x
    return _unsharded_dim(x)[order] if isinstance(x, jax.Array) else np.asarray(x)[order]


def _unsharded_dim(x: Array) -> Any:
    """The array with dim 0 unsharded on Explicit axes, where jax takes no rows of a sharded one."""
    sharding = jax.typeof(x).sharding
    if not sharding.spec or sharding.spec[0] is None:
        return x
    spec = PartitionSpec(None, *sharding.spec[1:])
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, spec))


def map_layers(tree: Tree, name: str, fn: Callable[[Any], Any]) -> Any:
    """The tree with ``fn(subtree)`` in place of every subtree under the key ``name``."""
    return _map_parents(tree, name, lambda parent: {**parent, name: fn(parent[name])})


def join_numbered(tree: Tree, numbered: str, name: str, count: int) -> Any:
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


def split_numbered(tree: Tree, numbered: str, name: str, count: int) -> Any:
    def split(parent: Mapping[Any, Any]) -> dict[Any, Any]:
        layers = {
            numbered.format(i): jax.tree.map(lambda a, i=i: _layer(a, i), parent[name])
            for i in range(count)
        }
        return {**{k: v for k, v in parent.items() if k != name}, **layers}

    return _map_parents(tree, name, split)


def _map_parents(tree: Tree, key: str, fn: Callable[[Mapping[Any, Any]], Any]) -> Any:
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


def _layer(x: Array, i: int) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    return _unsharded_dim(x)[i]
