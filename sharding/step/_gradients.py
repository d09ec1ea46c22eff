"""Gradients of a step: each device's loss, its micro-batches, and the sums over devices."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from sharding.collectives._dtypes import to_sum_dtype
from sharding.placement._layout import Layout
from sharding.placement._on_mesh import over_data_axes
from sharding.placement._specs import entry_of
from sharding.step import _local_norm, _model_state, _sync_state
from sharding.step._gather_params import call_with_shards
from sharding.step._loss_params import differentiated, loss_params
from sharding.step._reduce_gradients import reduce_accumulated, reduce_microbatch, sync_accumulated
from sharding.step._rng import RNGS, microbatch_key
from sharding.step._step_plan import StepPlan, StepSpec, plan_step

P = PartitionSpec


class Loss(NamedTuple):
    """A loss function, and what it takes and returns; see ``Zero.train_step``."""

    fn: Callable[..., Any]
    has_aux: bool = False
    weighted: bool = False
    rngs: bool | str = False
    microbatches: int = 1
    # Whether the transformation requires the norms of the local gradients.
    local_norm: bool = False
    model_state: bool = False
    # How the model states of all devices are reduced: a prefix tree of _model_state.REDUCTIONS.
    reduction: Any = "mean"

    def check(self) -> "Loss":
        """Itself, or an error that names the bad option."""
        if self.microbatches < 1:
            raise ValueError(f"microbatches must be at least 1, got {self.microbatches}.")
        if self.rngs not in RNGS:
            raise ValueError(f"rngs must be a bool or 'per_example', got {self.rngs!r}.")
        _model_state.check_reduction(self.reduction)
        return self

    def split(self, out: Any) -> tuple[Any, Any, Any]:
        """``(value, new model state, aux)`` of what ``fn`` returned; None for what it does not."""
        if self.model_state and self.has_aux:
            value, (model_state, aux) = out
        elif self.model_state:
            (value, model_state), aux = out, None
        else:
            (value, aux), model_state = out if self.has_aux else (out, None), None
        return value, model_state, aux


class Inputs(NamedTuple):
    """The arguments of a loss beside the parameters; None for those it does not take."""

    batch: Any  # sharded over the data axes
    key: Any = None  # the same on all devices
    model_state: Any = None  # the same on all devices


class Gradients(NamedTuple):
    """Reduced gradients, and all else that a step computes before the update."""

    grads: Any
    metrics: dict[str, Any]
    sync_state: Any
    model_state: Any


class _Scalar(NamedTuple):
    """Marks a scalar of each device: on the mesh it is an array over the devices."""

    value: jax.Array


def mark_scalars(tree: Any) -> Any:
    """Gives every leaf a first dim along which devices are concatenated; scalars are marked."""
    return jax.tree.map(lambda x: x if jnp.ndim(x) else _Scalar(jnp.asarray(x)[None]), tree)


def average_scalars(tree: Any) -> Any:
    """Undoes ``mark_scalars`` on the mesh: marked scalars become their mean over the devices."""
    return jax.tree.map(
        lambda x: jnp.mean(x.value, axis=0) if isinstance(x, _Scalar) else x,
        tree,
        is_leaf=lambda x: isinstance(x, _Scalar),
    )


# --- On the mesh ----------------------------------------------------------------------------------


def gradients(
    layout: Layout,
    spec: StepSpec,
    loss: Loss,
    params: Any,
    inputs: Inputs,
    sync_state: Any = None,
) -> Gradients:
    """Reduced gradients of the mean loss over a batch, and its metrics; inside ``on_mesh``.

    Gradients are placed as ``spec.placed.shards``; those of untrained parameters are zeros.
    """
    treedef: Any
    leaves, treedef = jax.tree.flatten(params)
    trained = treedef.flatten_up_to(spec.trained)
    has_state = sync_state is not None
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)

    def of_leaves(leaves: list[Any], *args: Any) -> Any:
        return loss.fn(treedef.unflatten(leaves), *args)

    def on_device(leaves: list[jax.Array], inputs: Inputs, sync_state: Any) -> Gradients:
        args = jax.eval_shape(functools.partial(_first_args, loss, layout.data_axes), inputs)
        plan = plan_step(layout, spec, types, has_state, of_leaves, *args)
        local = loss._replace(fn=of_leaves)
        own = jax.tree.map(lambda x: x[0, 0], sync_state) if has_state else plan.empty_sync_state()
        found = device_gradients(plan, local, leaves, inputs, own)
        new = jax.tree.map(lambda x: x[None, None], found.sync_state)
        return found._replace(sync_state=new)

    metric_specs = {"loss": P()}
    if loss.weighted:
        metric_specs["weight"] = P()
    if loss.local_norm:
        metric_specs["local"] = P()
    if loss.has_aux:
        metric_specs["aux"] = P(entry_of(layout.data_axes))
    param_specs, shard_specs = (
        [layout.manual_spec(spec) for spec in treedef.flatten_up_to(tree)]
        for tree in (spec.placed.params, spec.placed.shards)
    )
    grad_specs = [s for s, t in zip(shard_specs, trained, strict=True) if t]
    sync_spec = _sync_state.sync_spec(layout)
    run = over_data_axes(
        layout,
        on_device,
        (param_specs, Inputs(layout.batch_specs(inputs.batch), P(), P()), sync_spec),
        Gradients(grad_specs, metric_specs, sync_spec, P()),
    )
    found = run(leaves, inputs, sync_state)
    reduced = iter(found.grads)
    grads = [
        next(reduced).astype(spec.precision.of_result(x.dtype)) if t else jnp.zeros_like(x)
        for x, t in zip(leaves, trained, strict=True)
    ]
    return Gradients(
        treedef.unflatten(grads),
        average_scalars(found.metrics),
        found.sync_state if has_state else None,
        found.model_state,
    )


def evaluate(
    layout: Layout, spec: StepSpec, fn: Callable[..., Any], params: Any, args: tuple[Any, ...]
) -> Any:
    """``fn(params, *args)``; inside ``on_mesh``.

    The first of ``args`` is a batch that is sharded over the data axes; the others are replicated.
    """
    treedef: Any
    leaves, treedef = jax.tree.flatten(params)
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)

    def of_leaves(leaves: list[Any], *args: Any) -> Any:
        return fn(treedef.unflatten(leaves), *args)

    def on_device(leaves: list[jax.Array], args: tuple[Any, ...]) -> Any:
        plan = plan_step(layout, spec, types, False, of_leaves, *args)
        return mark_scalars(call_with_shards(of_leaves, loss_params(plan, leaves, leaves), *args))

    specs = [layout.manual_spec(spec) for spec in treedef.flatten_up_to(spec.placed.params)]
    arg_specs = (layout.batch_specs(args[0]), *(P() for _ in args[1:]))
    run = over_data_axes(layout, on_device, (specs, arg_specs), P(entry_of(layout.data_axes)))
    return average_scalars(run(leaves, args))


# --- On one device --------------------------------------------------------------------------------


def device_gradients(
    plan: StepPlan, loss: Loss, params: list[jax.Array], inputs: Inputs, sync_state: Any = None
) -> Gradients:
    """Gradients of the mean loss over all devices and micro-batches; inside a ``shard_map``.

    Args:
      plan: how parameters are gathered and gradients reduced.
      loss: of the list of parameters.
      params: as this device holds them.
      inputs: this device's shard of the batch, and the arguments that are replicated.
      sync_state: this device's.

    Returns:
      The reduced gradients of the trained parameters; the metrics, scalars of aux marked; the new
      state of the sync, and the new model state, which is the same on all devices.
    """
    axes = plan.layout.data_axes
    sums, model_state, unchanged, aux = _accumulate(plan, loss, params, inputs)

    # One sum over devices for the loss and the local norms, one for the weight.
    metrics: dict[str, Any] = {}
    total, *local = _local_norm.psum_stacked([sums.loss, *sums.local], axes)
    scale: Any = 1.0 / (loss.microbatches * lax.axis_size(axes))
    if loss.weighted:
        weight = lax.psum(sums.weight, axes)
        scale = jnp.where(weight == 0, 0.0, 1 / jnp.where(weight == 0, 1.0, weight))
        metrics["weight"] = weight
    metrics["loss"] = total * scale
    if loss.local_norm:
        metrics["local"] = {"local_squared_norm": local[0] * scale}
        if loss.weighted:
            metrics["local"]["num_pieces"] = local[1] / _local_norm.devices_per_gradient(plan)
    if loss.has_aux:
        metrics["aux"] = mark_scalars(aux)

    if plan.sync is not None:
        grads, sync_state = sync_accumulated(plan, sums.grads, sync_state, scale)
    else:
        grads = [g * scale for g in reduce_accumulated(plan, sums.grads)]
    if loss.model_state:
        model_state = _model_state.reduce_over_devices(
            inputs.model_state, model_state, unchanged, loss.reduction, axes
        )
    return Gradients(grads, metrics, sync_state, model_state)


class _Sums(NamedTuple):
    """Sums over micro-batches, of one device."""

    loss: jax.Array
    weight: jax.Array
    local: list[jax.Array]  # as _local_norm.squares returns them
    grads: list[jax.Array]


def _accumulate(
    plan: StepPlan, loss: Loss, params: list[jax.Array], inputs: Inputs
) -> tuple[_Sums, Any, list[bool], Any]:
    """Runs the micro-batches one after the other.

    Returns:
      The sums; the model state after the last micro-batch, with which of its leaves no loss
      changed; and the aux of all micro-batches.
    """
    steps, axes = loss.microbatches, plan.layout.data_axes
    unchanged: list[bool] = []  # per leaf of the model state; known when the loss is traced
    primals = differentiated(plan, params)
    untrained = [
        None if param.trained else x for param, x in zip(plan.params, primals, strict=True)
    ]
    trained = [x for param, x in zip(plan.params, primals, strict=True) if param.trained]

    def run(microbatch: Any, index: Any, model_state: Any) -> tuple[_Sums, Any, Any]:
        """The sums of one micro-batch, the model state after it, and its aux."""

        def total_loss(trained: list[jax.Array]) -> tuple[Any, Any]:
            in_order = iter(trained)
            leaves = [next(in_order) if x is None else x for x in untrained]
            args = _loss_args(loss, axes, inputs.key, microbatch, index, model_state)
            out = call_with_shards(loss.fn, loss_params(plan, leaves, params), *args)
            value, new, aux = loss.split(out)
            if loss.model_state:
                new, unchanged[:] = _model_state.checked(model_state, new)
            total, weight = value if loss.weighted else (value, jnp.ones(()))
            return total, (weight, new, aux)

        with jax.named_scope("loss_and_grad"):
            value_and_grad = jax.value_and_grad(total_loss, has_aux=True)
            (total, (weight, model_state, aux)), grads = value_and_grad(trained)
        total, weight = (to_sum_dtype(jnp.asarray(x)) for x in (total, weight))
        local: list[jax.Array] = []
        if loss.local_norm:
            with jax.named_scope("local_norm"):
                local = _local_norm.squares(plan, grads, weight if loss.weighted else None)
        return _Sums(total, weight, local, reduce_microbatch(plan, grads)), model_state, aux

    split = jax.tree.map(
        lambda x: x.reshape(steps, -1, *x.shape[1:]) if jnp.ndim(x) else jnp.full(steps, x),
        inputs.batch,
    )  # (micro-batch, examples of a device, ...)
    first = jax.tree.map(lambda x: x[0], split)
    if steps == 1:
        sums, model_state, aux = run(first, 0, inputs.model_state)
        return sums, model_state, unchanged, aux

    def add(carry: Any, numbered: tuple[Any, Any]) -> tuple[Any, Any]:
        sums, model_state = carry
        new, model_state, aux = run(*numbered, model_state)
        # Without the barrier XLA:TPU moves the reductions out of the loop, and accumulates
        # unsharded gradients after all.
        new = lax.optimization_barrier(new)
        sums = jax.tree.map(lambda a, x: a + x.astype(a.dtype), sums, new)
        return (sums, model_state), aux

    like, _, _ = jax.eval_shape(run, first, 0, inputs.model_state)
    accumulators = [
        jnp.zeros(g.shape, plan.precision.of_accumulator(param.dtype))
        for g, param in zip(like.grads, plan.trained, strict=True)
    ]
    zeros = jax.tree.map(lambda x: jnp.zeros((), x.dtype), like._replace(grads=[]))
    carry = (zeros._replace(grads=accumulators), inputs.model_state)
    (sums, model_state), aux = lax.scan(add, carry, (split, jnp.arange(steps)))
    return sums, model_state, unchanged, jax.tree.map(_join_microbatches, aux)


def _first_args(loss: Loss, axes: tuple[str, ...], inputs: Inputs) -> tuple[Any, ...]:
    """The arguments of the loss for the first micro-batch, to be traced for their types."""
    first = jax.tree.map(
        lambda x: x[: x.shape[0] // loss.microbatches] if jnp.ndim(x) else x, inputs.batch
    )
    return _loss_args(loss, axes, inputs.key, first, 0, inputs.model_state)


def _loss_args(
    loss: Loss, axes: tuple[str, ...], key: Any, microbatch: Any, index: Any, model_state: Any
) -> tuple[Any, ...]:
    """The arguments of the loss after the parameters, for micro-batch ``index`` of this device."""
    args = (microbatch, model_state) if loss.model_state else (microbatch,)
    # Micro-batches are numbered in the order of the batch of all devices.
    number = lax.axis_index(axes) * loss.microbatches + index
    return (*args, microbatch_key(loss.rngs, key, number, microbatch)) if loss.rngs else args


def _join_microbatches(x: jax.Array) -> jax.Array:
    """(micro-batch, ...) to one value: scalars are averaged, batch arrays concatenated."""
    if x.ndim == 1:
        return jnp.mean(x, axis=0)
    return x.reshape(math.prod(x.shape[:2]), *x.shape[2:])
