"""The layers of a model in one array each, in the order in which stages hold them."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.pipeline._ops import Place
from sharding.pipeline._schedule import Schedule


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


def layer_of_row(schedule: Schedule, counts: Sequence[int]) -> np.ndarray:
    """For each row of a stacked array, the number of its layer; -1 for padding."""
    size, starts = max(counts), np.concatenate([[0], np.cumsum(counts)])
    rows = [
        starts[v] + i if i < counts[v] else -1
        for v in owned_virtual_stages(schedule).ravel()
        for i in range(size)
    ]
    return np.array(rows, np.int64)


def row_of_layer(layer: np.ndarray) -> np.ndarray:
    """The inverse of ``layer_of_row``: for each layer, the number of its row."""
    return np.argsort(layer, kind="stable")[np.sum(layer < 0) :]


def to_rows(x: Any, layer: np.ndarray) -> Any:
    """Layers [num_layers, ...] in the order of rows, zeros in padding."""
    if np.array_equal(layer, np.arange(len(layer))):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(layer), *x.shape[1:]), x.dtype)
    array = jnp if isinstance(x, jax.Array) else np
    rows = _unsharded_dim(array.asarray(x))[np.maximum(layer, 0)]
    padding = (layer < 0).reshape(-1, *[1] * (rows.ndim - 1))
    return array.where(padding, array.zeros((), rows.dtype), rows) if padding.any() else rows


def from_rows(x: Any, layer: np.ndarray) -> Any:
    """The inverse of ``to_rows``."""
    if np.array_equal(layer, np.arange(len(layer))):
        return x
    rows = row_of_layer(layer)
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(rows), *x.shape[1:]), x.dtype)
    return _unsharded_dim(x)[rows]


def _unsharded_dim(x: Any) -> Any:
    """The array with dim 0 unsharded on Explicit axes, where jax takes no rows of a sharded one."""
    sharding = jax.typeof(x).sharding
    if not sharding.spec or sharding.spec[0] is None:
        return x
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, P(None, *sharding.spec[1:])))


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
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    return _unsharded_dim(x)[i]
