"""Gathers the updated parameters of stages 1 and 2, group by group."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from sharding._types import Tree
from sharding.collectives._all_gather import gather_axis_groups
from sharding.placement._layout import GATHERED_LAYERS, Layout, Placement


class _Updated(NamedTuple):
    """A sharded parameter between its update and its gather."""

    old: jax.Array
    shard: jax.Array
    shard_spec: PartitionSpec
    spec: PartitionSpec
    dim: int


def gather_updated(
    layout: Layout, shards: Tree, old: Tree, placed: Placement, trained: Tree
) -> Tree:
    """The trained parameters, gathered group by group into the memory of the old ones.

    Runs on the partitioner's global view, inside ``on_mesh``. A compiler for GPUs would gather all
    before it copies the first one, and hold the parameters twice: here each group waits until the
    one before it is in place.
    """
    new, treedef = jax.tree.flatten(old)
    columns = map(treedef.flatten_up_to, (shards, placed.shards, placed.params, placed.dims))
    leaves = [_Updated(*fields) for fields in zip(new, *columns, strict=True)]
    sharded: dict[int, int] = {}  # bytes
    for i, choice in enumerate(treedef.flatten_up_to(trained)):
        if choice and leaves[i].dim:
            sharded[i] = leaves[i].old.nbytes
        elif choice:
            new[i] = leaves[i].shard
    group: list[int] = []
    for following in _gather_groups(layout, sharded):
        xs = [leaves[i].shard for i in following]
        if group:
            xs, done = jax.lax.optimization_barrier((xs, [new[i] for i in group]))
            for i, full in zip(group, done, strict=True):
                new[i] = full
        for i, x in zip(following, xs, strict=True):
            new[i] = _gather_into_old(layout, leaves[i]._replace(shard=x))
        group = following
    return treedef.unflatten(new)


def _gather_groups(layout: Layout, sizes: dict[int, int]) -> Iterator[list[int]]:
    """Consecutive parameters, of as many bytes together as a group has at most, or one alone."""
    group: list[int] = []
    total = 0
    for i, size in sizes.items():
        if group and total + size > layout.gather_group_bytes:
            yield group
            group, total = [], 0
        group.append(i)
        total += size
    if group:
        yield group


def _gather_into_old(layout: Layout, leaf: _Updated) -> jax.Array:
    """One parameter; a stack is gathered and stored some layers at a time, unless it is small.

    The compiler stores transposed what it gathers along another dim than the first, at the end.
    """
    old, x, shard_spec, spec, dim = leaf
    small = old.nbytes <= layout.gather_group_bytes // 8
    gather = functools.partial(gather_shard, layout, shard_spec=shard_spec, spec=spec)
    if small or x.ndim < 3 or dim == -x.ndim or shard_spec[0]:
        return gather(x)

    def gather_layers(first: Any, num: int, full: jax.Array) -> jax.Array:
        # One by one: for several the compiler would transpose the full stack.
        for i in range(num):
            layer = jax.lax.dynamic_slice_in_dim(x, first + i, 1)
            layer = gather(layout.constrain(layer, shard_spec))
            full = jax.lax.dynamic_update_slice_in_dim(full, layer, first + i, 0)
        return full

    num = x.shape[0]
    at_once = max(1, min(num * layout.gather_group_bytes // old.nbytes, GATHERED_LAYERS))
    full = jax.lax.fori_loop(
        0, num // at_once, lambda i, full: gather_layers(i * at_once, at_once, full), old
    )
    return gather_layers(num - num % at_once, num % at_once, full)


def gather_shard(
    layout: Layout, x: jax.Array, shard_spec: PartitionSpec, spec: PartitionSpec
) -> jax.Array:
    """An array with a spec, from its shards."""
    remaining = list(layout.axes)
    for axes in gather_axis_groups(layout)[:-1]:
        remaining = [axis for axis in remaining if axis not in axes]
        x = layout.constrain(x, layout.keep_axes(shard_spec, remaining))
    return layout.constrain(x, spec)
