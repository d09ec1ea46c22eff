"""Gradients of a step: each device's loss, its micro-batches, and the sums over devices."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from sharding._types import Tree
from sharding.collectives._reduce_scatter import own_shard
from sharding.placement._on_mesh import over_data_axes
from sharding.placement._specs import axes_of, entry_of
from sharding.step import _model_state, _reduce_later, _sync_state
from sharding.step._global_gradients import global_gradients, mean_metrics
from sharding.step._loss import Inputs, StepLoss
from sharding.step._microbatches import accumulate
from sharding.step._step_plan import StepPlan, StepSpec, plan_step

P = PartitionSpec


class Gradients(NamedTuple):
    """Reduced gradients, and all else that a step computes before the update."""

    grads: Any
    metrics: dict[str, Any]
    model_state: Any
    sync_state: Any = None
    shards: Any = None  # of the parameters


class _Scalar(NamedTuple):
    """Marks a scalar of each device: on the mesh it is an array over the devices."""

    value: jax.Array


def mark_scalars(tree: Tree) -> Any:
    """Gives every leaf a first dim along which devices are concatenated; scalars are marked."""
    return jax.tree.map(lambda x: x if jnp.ndim(x) else _Scalar(jnp.asarray(x)[None]), tree)


def average_scalars(tree: Tree) -> Any:
    """Undoes ``mark_scalars`` on the mesh: marked scalars become their mean over the devices."""
    return jax.tree.map(
        lambda x: jnp.mean(x.value, axis=0) if isinstance(x, _Scalar) else x,
        tree,
        is_leaf=lambda x: isinstance(x, _Scalar),
    )


# --- On the mesh ----------------------------------------------------------------------------------


def gradients(
    spec: StepSpec, loss: StepLoss, params: Tree, inputs: Inputs, sync_state: Tree, early: bool
) -> Gradients:
    """Reduced gradients of the mean loss over a batch, and its metrics; inside ``on_mesh``.

    Gradients are placed as ``spec.placed.shards``; those of untrained parameters are zeros. With
    ``early`` it returns the shards of the parameters too, for an update that waits for all
    gradients and would hold all unsharded parameters until then.
    """
    layout = spec.layout
    if not layout.per_device:
        return Gradients(*global_gradients(spec, loss, params, inputs))
    leaves, treedef = jax.tree.flatten(params)
    trained = treedef.flatten_up_to(spec.trained)
    param_specs, shard_specs = (
        [layout.manual_spec(spec) for spec in treedef.flatten_up_to(tree)]
        for tree in (spec.placed.params, spec.placed.shards)
    )
    metric_specs = {"loss": P()}
    metric_specs |= {"weight": P()} if loss.weighted else {}
    metric_specs |= {"local": P()} if loss.local_norm else {}
    metric_specs |= {"aux": P(entry_of(layout.data_axes))} if loss.has_aux else {}
    grad_specs = [s for s, t in zip(shard_specs, trained, strict=True) if t]
    sync_spec = layout.manual_spec(_sync_state.sync_spec(layout))
    early_specs = shard_specs if early else None
    has_state = sync_state is not None

    def on_device(leaves: list[jax.Array], inputs: Inputs, sync_state: Tree) -> Gradients:
        """Plans the step of one device, and runs it up to the reduced gradients."""
        args = jax.eval_shape(functools.partial(loss.first_args, layout.data_axes), inputs)
        more: Any = {"microbatches": loss.microbatches, "reduce_in_backward": not loss.local_norm}
        plan = plan_step(spec, params, has_state, loss.fn, *args, **more)
        own = jax.tree.map(lambda x: x[0, 0], sync_state) if has_state else plan.empty_sync_state()
        shards = list(map(_own_shard, leaves, shard_specs)) if early else None
        if shards and not (plan.has_layers and plan.reduces_microbatches):
            # Before the loss: unsharded gradients will need the memory. The barrier is for the
            # batch, since parameters that pass through one are copied.
            shards, batch = lax.optimization_barrier((shards, inputs.batch))
            inputs = inputs._replace(batch=batch)
        reduced = device_gradients(plan, loss, leaves, inputs, own)
        new = jax.tree.map(lambda x: x[None, None], reduced.sync_state)
        return reduced._replace(sync_state=new, shards=shards)

    run = over_data_axes(
        layout,
        on_device,
        (param_specs, Inputs(layout.batch_specs(inputs.batch), P(), P()), sync_spec),
        Gradients(grad_specs, metric_specs, P(), sync_spec, early_specs),
    )
    reduced = run(leaves, inputs, sync_state)
    in_order = iter(reduced.grads)
    grads = [
        next(in_order).astype(spec.precision.of_result(x.dtype)) if t else jnp.zeros_like(x)
        for x, t in zip(leaves, trained, strict=True)
    ]
    return Gradients(
        treedef.unflatten(grads),
        average_scalars(reduced.metrics),
        reduced.model_state,
        reduced.sync_state if has_state else None,
        treedef.unflatten(reduced.shards) if early else None,
    )


def _own_shard(x: jax.Array, spec: P) -> jax.Array:
    """This device's shard of an array that is replicated over the data axes."""
    for dim, entry in enumerate(spec):
        if entry is not None:
            x = own_shard(x, axes_of(entry), dim)
    return x


# --- On one device --------------------------------------------------------------------------------


def device_gradients(
    plan: StepPlan, loss: StepLoss, params: list[jax.Array], inputs: Inputs, sync_state: Tree = None
) -> Gradients:
    """Gradients of the mean loss over all devices and micro-batches; inside a ``shard_map``.

    Returns the reduced gradients of the trained ones;
    the metrics, scalars of aux marked; the new states of the sync and of the model.
    """
    axes = plan.layout.data_axes
    sums, model_state, unchanged, aux = accumulate(plan, loss, params, inputs)

    # One sum over devices for the loss and the local norms, one for the weight.
    total, *local = _reduce_later.psum_stacked([sums.loss, *sums.local], axes)
    weight = lax.psum(sums.weight, axes) if loss.weighted else None
    scale, metrics = mean_metrics(loss, total, weight, mark_scalars(aux), lax.axis_size(axes))
    if loss.local_norm:
        metrics["local"] = {"local_squared_norm": local[0] * scale}
        if loss.weighted:
            metrics["local"]["num_pieces"] = local[1] / _reduce_later.devices_per_gradient(plan)

    if plan.sync is not None:
        grads, sync_state = _reduce_later.sync_accumulated(plan, sums.grads, sync_state, scale)
    elif plan.divides_first:
        grads = _reduce_later.reduce_accumulated(plan, [g * scale for g in sums.grads])
    else:
        grads = [g * scale for g in _reduce_later.reduce_accumulated(plan, sums.grads)]
    if loss.model_state:
        model_state = _model_state.reduce_over_devices(
            inputs.model_state, model_state, unchanged, loss.reduction, axes
        )
    return Gradients(grads, metrics, model_state, sync_state)
