"""Squared norms of local gradients, for transformations that require them.

A local gradient is that of a micro-batch of one device, before it is reduced; at stage 3, whose
backward pass already sums over the axes of shards, of one replica.
"""

import jax
import jax.numpy as jnp
from jax import lax

from sharding.collectives._dtypes import to_sum_dtype
from sharding.placement._layout import Layout
from sharding.step._step_plan import StepPlan


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
