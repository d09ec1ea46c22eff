"""Sums gradients of trained parameters over devices: of micro-batches, and accumulated ones.

Every array is reduced by a collective of its own; combining several is left to the compiler.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from sharding._types import Tree
from sharding.collectives._map_arrays import ArrayLayout
from sharding.collectives._reduce_scatter import reduce_scatter_arrays
from sharding.placement._on_mesh import over_other_axes
from sharding.placement._specs import Axes
from sharding.step._step_plan import StepPlan
from sharding.step._sync_state import sync_spec

Arrays = list[jax.Array]


def reduce_microbatch(plan: StepPlan, grads: Arrays) -> Arrays:
    """Reduce-scatters the sharded gradients of one micro-batch, where its backward pass did not."""
    chosen = reduced_by_microbatch(plan)
    if not any(chosen):
        return grads
    if plan.syncs_shard_axes:
        return _sync(plan, grads, chosen, plan.empty_sync_state())[0]
    return _sum(plan, grads, plan.layout.axes, chosen, _shards(plan))


def reduced_by_microbatch(plan: StepPlan) -> list[bool]:
    reduces = plan.layout.stage < 3 and plan.reduces_microbatches
    return [reduces and bool(param.shard.dim) and not param.has_handle for param in plan.trained]


def reduce_accumulated(plan: StepPlan, grads: Arrays) -> Arrays:
    """Sums the accumulated gradients over all axes that they were not summed over yet."""
    layout, sharded = plan.layout, [bool(param.shard.dim) for param in plan.trained]
    if not plan.reduces_microbatches:
        grads = _sum(plan, grads, layout.axes, sharded, _shards(plan))
    if layout.replica_axes:
        replica_shards = [param.replica_shard for param in plan.trained]
        grads = _sum(plan, grads, layout.replica_axes, sharded, replica_shards)
    unsharded = [not choice for choice in sharded]
    return _sum(plan, grads, layout.data_axes, unsharded, _shards(plan))


def sync_accumulated(plan: StepPlan, grads: Arrays, state: Tree, scale: Any) -> tuple[Arrays, Any]:
    """``reduce_accumulated`` times ``scale`` by the plan's sync, and the new state of the sync."""
    chosen = [
        not (param.synced_by_rows or (param.shard.dim and plan.reduces_microbatches))
        for param in plan.trained
    ]
    if plan.layout.replica_axes:
        grads = _sum(plan, grads, plan.layout.axes, chosen, _shards(plan))
        chosen = [True] * len(grads)
    # Scaled before they are sent: residuals are those of the gradient, not of a sum.
    return _sync(plan, [g * scale for g in grads], chosen, state)


def _shards(plan: StepPlan) -> list[ArrayLayout]:
    return [param.shard for param in plan.trained]


def _sum(
    plan: StepPlan, grads: Arrays, axes: Axes, chosen: list[bool], arrays: Sequence[ArrayLayout]
) -> Arrays:
    """Sums the chosen gradients over axes; reduce-scatters those whose array has a sharded dim."""
    picked = [i for i, choice in enumerate(chosen) if choice]
    if not picked:
        return grads
    with jax.named_scope("reduce_gradients"):
        cast = [grads[i].astype(plan.trained[i].reduce_dtype) for i in picked]
        sums = reduce_scatter_arrays(plan.layout, axes, cast, [arrays[i] for i in picked])
    new = dict(zip(picked, sums, strict=True))
    return [new.get(i, g) for i, g in enumerate(grads)]


def _sync(plan: StepPlan, grads: Arrays, chosen: list[bool], state: Tree) -> tuple[Arrays, Any]:
    """The sums of the chosen gradients by the plan's sync, and its new state.

    Of a parameter that other axes shard, every device synchronizes its own block; of a replicated
    one all synchronize the same array and random keys, and get the same mean.
    """
    layout, sync = plan.layout, plan.sync
    assert sync is not None
    replicas = layout.replica_axes
    axes = replicas or layout.axes
    tree: dict[str, Any] = {param.path: None for param in plan.params}
    dims = dict.fromkeys(tree, 0)
    for param, g, choice in zip(plan.trained, grads, chosen, strict=True):
        if choice:
            tree[param.path] = g.astype(param.reduce_dtype)
            dims[param.path] = (param.replica_shard if replicas else param.shard).dim

    def sync_blocks(tree: Tree, state: Tree) -> tuple[Any, Any]:
        own = jax.tree.map(lambda x: x[0], state) if layout.other_axes else state
        means, new = sync.reduce_scatter(tree, own, axes, dims)
        return means, jax.tree.map(lambda x: x[None], new) if layout.other_axes else new

    param_specs = {param.path: param.shard.spec for param in plan.params}
    specs = (param_specs, PartitionSpec(*sync_spec(layout)[2:]))  # on the other axes
    with jax.named_scope("reduce_gradients"):
        means, state = over_other_axes(layout, sync_blocks, specs, specs)(tree, state)
    num = lax.axis_size(axes)
    return [
        means[param.path] * num if choice else g
        for param, g, choice in zip(plan.trained, grads, chosen, strict=True)
    ], state
