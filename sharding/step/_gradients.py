"""Gradients of a step: each device's loss, its micro-batches, and the sums over devices.

Top down: gradients on the mesh; those of one device; the loss of a device, with rules of the
parameters that it holds.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from sharding._types import Batch, Tree
from sharding.collectives._reduce_scatter import own_shard
from sharding.collectives._sum_dtype import sum_dtype, to_sum_dtype
from sharding.loss._evaluate import Evaluator, Param, is_param
from sharding.loss._stack import numbered_layers
from sharding.placement._on_mesh import over_data_axes
from sharding.placement._specs import axes_of, entry_of
from sharding.step import _model_state, _reduce_later, _sync_state
from sharding.step._gather_and_reduce import DeviceRule, ParamHandle
from sharding.step._global_gradients import global_gradients, mean_metrics
from sharding.step._loss import (
    Inputs,
    StepLoss,
    Sums,
    inverse_weight,
    join_microbatches,
    split_microbatches,
)
from sharding.step._step_plan import (
    IN_PLACE,
    ParamPlan,
    StepPlan,
    StepSpec,
    plan_step,
    warn_of_unsharded,
)

P = PartitionSpec
_AD: Any = jax.ad
_RETURNED = _AD.GradValue()  # a gradient that a backward pass returns, in place of a ref for it


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
        in_layers = any(param.reduced_in_layer for param in plan.params)
        if shards and not (in_layers and plan.reduces_microbatches):
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
    taps = differentiated(plan, params, accumulates=IN_PLACE and loss.microbatches > 1)
    device = _Device(plan, loss, params, taps, inputs.key)
    sums, model_state, aux = device.accumulate(inputs)

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
            inputs.model_state, model_state, device.unchanged, loss.reduction, axes
        )
    return Gradients(grads, metrics, model_state, sync_state)


@dataclasses.dataclass
class _Device:
    """The loss of one device, and its derivative."""

    plan: StepPlan
    loss: StepLoss
    params: list[jax.Array]  # as the device holds them
    inputs: list[jax.Array]  # what is differentiated; see ``differentiated``
    key: Any
    unchanged: list[bool] = dataclasses.field(default_factory=list)  # known after a trace

    def accumulate(self, inputs: Inputs) -> tuple[Sums, Any, Any]:
        """Sums over all micro-batches, one after the other, the model state, and their aux."""
        plan, steps = self.plan, self.loss.microbatches
        split = split_microbatches(inputs.batch, steps)
        if steps == 1:
            first = jax.tree.map(lambda x: x[0], split)
            return self.microbatch(first, 0, inputs.model_state)
        refs = [
            jax.new_ref(
                jnp.zeros(gradient_shape(plan, param), plan.precision.of_accumulator(param.dtype))
            )
            for param in plan.trained
        ]

        def step(model_state: Tree, numbered: tuple[Any, Any]) -> tuple[Any, Any]:
            sums, model_state, aux = self.microbatch(*numbered, model_state, refs)
            return model_state, (sums, aux)

        each = split, jnp.arange(steps)
        model_state, (sums, aux) = lax.scan(step, inputs.model_state, each)
        sums = jax.tree.map(lambda x: jnp.sum(x, 0), sums)
        sums = sums._replace(grads=list(map(jax.freeze, refs)))
        return sums, model_state, jax.tree.map(join_microbatches, aux)

    def total_loss(
        self, trained: list[jax.Array], microbatch: Batch, index: Any, model_state: Tree
    ) -> tuple[jax.Array, Any]:
        """The sum of the losses of a micro-batch; its weight, the new model state, and the aux."""
        plan, loss, in_order = self.plan, self.loss, iter(trained)
        inputs = [
            next(in_order) if param.trained else x
            for param, x in zip(plan.params, self.inputs, strict=True)
        ]
        args = loss.device_args(plan.layout.data_axes, self.key, microbatch, index, model_state)
        out = call_loss(plan, inputs, self.params, args)
        total, weight, new, aux = loss.split(out, model_state)
        both = zip(jax.tree.leaves(model_state), jax.tree.leaves(new), strict=True)
        self.unchanged = [x is y for x, y in both]
        if plan.divides_first:
            divisor = jnp.asarray(self.divisor(lax.stop_gradient(weight)), total.dtype)
            total *= inverse_weight(divisor)
        return total, (weight, new, aux)

    def divisor(self, weight: jax.Array) -> Any:
        """By what the loss of the micro-batch of all devices is divided."""
        axes = self.plan.layout.data_axes
        return lax.psum(weight, axes) if self.loss.weighted else lax.axis_size(axes)

    def microbatch(
        self, microbatch: Batch, index: Any, model_state: Tree, sums: list[Any] | None = None
    ) -> tuple[Sums, Any, Any]:
        """Loss and gradients of a micro-batch, the model state after it, and its aux.

        ``sums`` are refs to which gradients are added, in place of returning them.
        """
        plan, loss = self.plan, self.loss
        trained = [x for x, param in zip(self.inputs, plan.params, strict=True) if param.trained]
        backward: Any
        with jax.named_scope("loss_and_grad"):
            total, backward, (weight, model_state, aux) = jax.vjp(
                lambda x: self.total_loss(x, microbatch, index, model_state), trained, has_aux=True
            )
            # The backward pass itself adds up what is not to be reduced, cast or scaled after it.
            sinks = [_RETURNED] * len(trained)
            if sums and IN_PLACE and not (plan.divides_first or loss.local_norm):
                reduced = _reduce_later.reduced_by_microbatch(plan)
                sinks = [
                    _RETURNED if is_reduced or ref.dtype != x.dtype else ref
                    for ref, x, is_reduced in zip(sums, trained, reduced, strict=True)
                ]
            (grads,) = backward.with_refs(sinks)(jnp.ones_like(total))
        total, weight = to_sum_dtype(total), to_sum_dtype(jnp.asarray(weight))
        weight = weight.astype(jnp.promote_types(weight.dtype, total.dtype))  # counts, too
        shards = _reduce_later.reduce_microbatch(plan, grads)
        if plan.divides_first:
            divisor = self.divisor(weight)
            total *= divisor
            grads, shards = ([to_sum_dtype(g) * divisor for g in x] for x in (grads, shards))
        local: list[jax.Array] = []
        if loss.local_norm:
            with jax.named_scope("local_norm"):
                local = _reduce_later.squares(plan, grads, weight if loss.weighted else None)
        if sums is not None:
            after = [i for i, sink in enumerate(sinks) if sink is _RETURNED]
            # Without the barrier XLA:TPU moves the reductions out of the loop, and accumulates
            # unsharded gradients after all.
            total, weight, local, values = lax.optimization_barrier(
                (total, weight, local, [shards[i] for i in after])
            )
            for i, value in zip(after, values, strict=True):
                sums[i][...] += value.astype(sums[i].dtype)
            shards = []
        return Sums(total, weight, local, shards), model_state, aux


# --- The loss with its parameters -----------------------------------------------------------------


def differentiated(plan: StepPlan, params: list[Any], accumulates: bool = False) -> list[Any]:
    """The differentiated inputs, of the shape and dtype of gradients, or of sums of them."""
    stage, precision = plan.layout.stage, plan.precision

    def input_of(param: ParamPlan, x: jax.Array) -> jax.Array:
        # At stage 3 the cast for the loss is part of it.
        dtype = jnp.promote_types(x.dtype, precision.of_result(x.dtype))
        if not _has_tap(plan, param):
            return x.astype(param.loss_dtype if stage < 3 else dtype)
        if stage < 3:
            dtype = param.reduce_dtype
        if param.synced_by_rows:
            dtype = sum_dtype(dtype)
        if accumulates:
            dtype = precision.of_accumulator(param.dtype)
        return jnp.zeros(gradient_shape(plan, param), dtype)

    return list(map(input_of, plan.params, params))


def _has_tap(plan: StepPlan, param: ParamPlan) -> bool:
    """Whether a tap is differentiated in its place: its gradient arrives reduced, or is added."""
    return bool(param.shard.dim) if plan.layout.stage == 3 else param.has_handle


def gradient_shape(plan: StepPlan, param: ParamPlan) -> tuple[int, ...]:
    """Of this device's gradient of a micro-batch, reduced if the step reduces those."""
    reduced = plan.reduces_microbatches or param.synced_by_rows
    return plan.shard_shape(param) if reduced else param.shape


def call_loss(plan: StepPlan, inputs: list[jax.Array], params: list[Any], args: Any) -> Any:
    """What the loss returns for ``params``, as the device holds them, and ``args``.

    ``inputs`` are the differentiated ones, and in their places the parameters without a gradient.
    """
    rules = _device_rules(plan)

    def param(number: int, held: jax.Array, x: jax.Array) -> Param | jax.Array:
        one = plan.params[number]
        if not _has_tap(plan, one):
            return x.astype(one.loss_dtype)
        held = held if plan.layout.stage == 3 else held.astype(one.loss_dtype)
        return Param(number, rules[number], held, x, {})

    out, fetches = plan.loss.evaluate(param, params, inputs, args, _call_with_handles)
    if plan.layout.stage == 3:
        warn_of_unsharded(plan, fetches)
    return out


def _call_with_handles(evaluator: Evaluator, eqn: Any, operands: list[Any]) -> list[Any]:
    """The results of ``with_handles``; of tables, those that the derivative of ``lookup`` syncs."""
    by_rows = eqn.params["by_rows"]

    def given(x: Any) -> Any:
        if is_param(x) and not x.moves and (x.rule.rows is not None or not by_rows):
            return ParamHandle(x.held, x.tap, x.rule)
        return evaluator.full(x)

    out: list[Any] = eqn.params["fn"](*map(given, operands))
    return out


def _device_rules(plan: StepPlan) -> list[DeviceRule]:
    """How a device gets each parameter, and reduces its gradient."""
    stage = plan.layout.stage
    reduces = stage == 3 or plan.reduces_microbatches
    # A sync over the axes of shards takes the place of the reduce-scatter in the backward pass.
    syncs = stage == 3 and plan.syncs_shard_axes
    sync_one = _reduce_later.sync_one
    sync = functools.partial(sync_one, plan, plan.empty_sync_state()) if syncs else None
    numbered = numbered_layers([param.path for param in plan.params])

    def rule_of(layer: str, param: ParamPlan) -> DeviceRule:
        return param.rule(
            plan.loss,
            gathers=stage == 3,
            bits=plan.precision.gather_bits,
            reduce_dtype=param.reduce_dtype if reduces else None,
            reduce_axes=plan.layout.axes,
            sync=sync and functools.partial(sync, param),
            rows=param.rows,
            again=stage == 3 and layer != "",
        )

    return list(map(rule_of, numbered, plan.params))
