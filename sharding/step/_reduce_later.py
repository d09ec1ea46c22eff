"""Sums over devices of gradients that the backward pass did not reduce: of micro-batches, of steps.

Every array is reduced by a collective of its own; combining several is left to the compiler.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from sharding._types import Tree
from sharding.collectives._reduce_scatter import ArrayLayout, reduce_scatter_arrays
from sharding.collectives._sum_dtype import to_sum_dtype
from sharding.placement._layout import Layout
from sharding.placement._on_mesh import over_other_axes
from sharding.placement._specs import Axes, by_dim, of_last_dims
from sharding.step._step_plan import ParamPlan, StepPlan
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


def sync_one(plan: StepPlan, state: Any, param: ParamPlan, grad: jax.Array, dim: int) -> jax.Array:
    """The sum of one gradient over devices, by the plan's sync: this device's shard of it."""
    layout, sync, paths = plan.layout, plan.sync, [one.path for one in plan.params]
    assert sync is not None
    dims = dict.fromkeys(paths, 0) | {param.path: dim}

    def sync_block(block: jax.Array) -> jax.Array:
        grads = dict.fromkeys(paths) | {param.path: block}
        return sync.reduce_scatter(grads, state, layout.axes, dims)[0][param.path]

    spec = of_last_dims(by_dim(param.shard.spec, len(param.shape)), grad.ndim)
    mean = over_other_axes(layout, sync_block, (spec,), spec)(grad)
    return mean * lax.axis_size(layout.axes)


# --- Squared norms of local gradients, for transformations that require them ----------------------

# A local gradient is that of a micro-batch of one device, before it is reduced; at stage 3, whose
# backward pass already sums over the axes of shards, of one replica.


def num_local_gradients(layout: Layout, microbatches: int) -> int:
    """The number of local gradients in a step, which transformations get as ``num_pieces``."""
    at_once = layout.num_replicas if layout.stage == 3 else layout.num_devices
    if at_once * microbatches < 2:
        why = "this is one device with one micro-batch. Use microbatches=2 or more"
        if layout.num_devices > 1:
            why = (
                "at stage 3 the backward pass sums gradients over the devices of a replica, so "
                "that a micro-batch has one gradient. Use microbatches=2 or more, a replica_axis, "
                "or a stage below 3"
            )
        raise ValueError(
            "the transformation compares the mean gradient with the gradients of devices and "
            "micro-batches (local_squared_norm, as gradient_noise_scale does), and there is only "
            f"one: {why} (docs: how_to/large_batches)."
        )
    return at_once * microbatches


def devices_per_gradient(plan: StepPlan) -> int:
    return plan.layout.num_shards if plan.layout.stage == 3 else 1


def squares(plan: StepPlan, grads: list[jax.Array], weight: jax.Array | None) -> list[jax.Array]:
    """This device's terms of sums over all local gradients; inside a ``shard_map``.

    ``grads`` are of the sum of losses over a micro-batch, before ``reduce_microbatch``; ``weight``
    is by what that sum is to be divided, None for the number of devices. The sums are that of
    ``|gradient|**2 / weight``, and with a ``weight`` the number of local gradients whose weight is
    above zero, times ``devices_per_gradient``.
    """
    table = next((param.path for param in plan.trained if param.synced_by_rows), None)
    if table is not None:
        raise ValueError(
            "the transformation requires the norms of the gradients of single devices "
            f"(local_squared_norm), and that of {table!r} is synchronized by rows in the backward "
            "pass: no device has its own. Use another sync for the table, or stage 3 with "
            "micro-batches."
        )
    layout = plan.layout
    if layout.stage < 3:
        total = _sum_of_squares(grads)
    else:
        # Sharded gradients are sums over the axes of shards already, unsharded ones are not.
        dims = [param.shard.dim for param in plan.trained]
        unsharded = [g for g, dim in zip(grads, dims, strict=True) if not dim]
        weight = None if weight is None else lax.psum(weight, layout.axes)
        total = _sum_of_squares([g for g, dim in zip(grads, dims, strict=True) if dim])
        if unsharded:
            total = total + _sum_of_squares(lax.psum(unsharded, layout.axes)) / layout.num_shards
    if weight is None:
        return [total / layout.num_shards if layout.stage == 3 else total]
    counts = weight > 0
    return [jnp.where(counts, total / jnp.where(counts, weight, 1), 0), counts.astype(total.dtype)]


def _sum_of_squares(arrays: list[jax.Array]) -> jax.Array:
    squared = (jnp.sum(jnp.square(to_sum_dtype(x))) for x in arrays)
    return sum(squared, start=jnp.zeros((), jnp.float32))


def psum_stacked(scalars: list[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """Sums of scalars over devices, in one collective."""
    if len(scalars) == 1:
        return [lax.psum(scalars[0], axes)]
    wide = jnp.result_type(*(x.dtype for x in scalars))
    sums = lax.psum(jnp.stack([x.astype(wide) for x in scalars]), axes)
    return [total.astype(x.dtype) for total, x in zip(sums, scalars, strict=True)]
