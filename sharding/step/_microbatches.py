"""The loss of one device, by rules of the parameters that it holds, and its derivative.

Micro-batches run one after the other: losses, gradients and model states.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sharding._types import Batch, Tree
from sharding.collectives._sum_dtype import sum_dtype, to_sum_dtype
from sharding.loss._evaluate import Evaluator, Param, is_param
from sharding.loss._stack import numbered_layers
from sharding.placement._specs import by_dim
from sharding.step import _model_state
from sharding.step._gather_and_reduce import DeviceRule, ParamHandle
from sharding.step._loss import Inputs, StepLoss
from sharding.step._reduce_later import (
    reduce_microbatch,
    reduced_by_microbatch,
    squares,
    sync_one,
)
from sharding.step._step_plan import IN_PLACE, ParamPlan, StepPlan, warn_of_unsharded

_AD: Any = jax.ad
_RETURNED = _AD.GradValue()  # a gradient that a backward pass returns, in place of a ref for it


class Sums(NamedTuple):
    """Sums over micro-batches, of one device."""

    loss: jax.Array
    weight: jax.Array
    local: list[jax.Array]  # as squares returns them
    grads: list[jax.Array]  # of trained parameters


class Accumulated(NamedTuple):
    """What all micro-batches of a device leave."""

    sums: Sums
    model_state: Any
    unchanged: list[bool]  # the leaves of the model state that no loss changed
    aux: Any


@dataclasses.dataclass
class _Device:
    """The loss of one device, and its derivative."""

    plan: StepPlan
    loss: StepLoss
    params: list[jax.Array]  # as the device holds them
    inputs: list[jax.Array]  # what is differentiated; see ``differentiated``
    key: Any
    unchanged: list[bool] = dataclasses.field(default_factory=list)  # known after a trace

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
        total, weight, new, aux = loss.split(out)
        if loss.model_state:
            new, self.unchanged[:] = _model_state.checked(model_state, new)
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
                sinks = [
                    _RETURNED if reduced or ref.dtype != x.dtype else ref
                    for ref, x, reduced in zip(
                        sums, trained, reduced_by_microbatch(plan), strict=True
                    )
                ]
            (grads,) = backward.with_refs(sinks)(jnp.ones_like(total))
        total, weight = to_sum_dtype(total), to_sum_dtype(jnp.asarray(weight))
        weight = weight.astype(jnp.promote_types(weight.dtype, total.dtype))  # counts, too
        # At stage 3 the backward pass reduced them.
        reduced = reduce_microbatch(plan, grads) if plan.layout.stage < 3 else grads
        if plan.divides_first:
            divisor = self.divisor(weight)
            total *= divisor
            grads, reduced = ([to_sum_dtype(g) * divisor for g in x] for x in (grads, reduced))
        local: list[jax.Array] = []
        if loss.local_norm:
            with jax.named_scope("local_norm"):
                local = squares(plan, grads, weight if loss.weighted else None)
        if sums is not None:
            after = [i for i, sink in enumerate(sinks) if sink is _RETURNED]
            # Without the barrier XLA:TPU moves the reductions out of the loop, and accumulates
            # unsharded gradients after all.
            total, weight, local, values = lax.optimization_barrier(
                (total, weight, local, [reduced[i] for i in after])
            )
            for i, value in zip(after, values, strict=True):
                sums[i][...] += value.astype(sums[i].dtype)
            reduced = []
        return Sums(total, weight, local, reduced), model_state, aux


def accumulate(
    plan: StepPlan, loss: StepLoss, params: list[jax.Array], inputs: Inputs
) -> Accumulated:
    """Runs the micro-batches one after the other, with ``params`` as this device holds them."""
    steps = loss.microbatches
    taps = differentiated(plan, params, accumulates=IN_PLACE and steps > 1)
    device = _Device(plan, loss, params, taps, inputs.key)
    split = split_microbatches(inputs.batch, steps)
    if steps == 1:
        first = jax.tree.map(lambda x: x[0], split)
        sums, model_state, aux = device.microbatch(first, 0, inputs.model_state)
        return Accumulated(sums, model_state, device.unchanged, aux)
    refs = [
        jax.new_ref(
            jnp.zeros(gradient_shape(plan, param), plan.precision.of_accumulator(param.dtype))
        )
        for param in plan.trained
    ]

    def step(model_state: Tree, numbered: tuple[Any, Any]) -> tuple[Any, Any]:
        sums, model_state, aux = device.microbatch(*numbered, model_state, refs)
        return model_state, (sums, aux)

    model_state, (each, aux) = lax.scan(step, inputs.model_state, (split, jnp.arange(steps)))
    sums = jax.tree.map(lambda x: jnp.sum(x, 0), each)._replace(grads=list(map(jax.freeze, refs)))
    return Accumulated(sums, model_state, device.unchanged, jax.tree.map(join_microbatches, aux))


def inverse_weight(weight: jax.Array) -> jax.Array:
    """What divides sums by their weight; 0 where nothing has a weight."""
    return jnp.where(weight == 0, 0.0, 1 / jnp.where(weight == 0, 1.0, weight))


def split_microbatches(batch: Batch, count: int) -> Any:
    """(examples of a device, ...) to (micro-batch, examples, ...); scalars are the same in all."""
    return jax.tree.map(
        lambda x: (
            jnp.reshape(x, (count, x.shape[0] // count, *x.shape[1:]))
            if jnp.ndim(x)
            else jnp.full(count, x)
        ),
        batch,
    )


def join_microbatches(x: jax.Array) -> jax.Array:
    """(micro-batch, ...) to one value: scalars are averaged, batch arrays concatenated."""
    if x.ndim == 1:
        return jnp.mean(x, axis=0)
    return x.reshape(math.prod(x.shape[:2]), *x.shape[2:])


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
    sync = functools.partial(sync_one, plan, plan.empty_sync_state()) if syncs else None
    numbered = numbered_layers([param.path for param in plan.params])

    def rule_of(number: int, param: ParamPlan) -> DeviceRule:
        of_param = plan.loss, number, param.shard.dim, param.loss_dtype, param.loss_dtype
        entries = tuple(by_dim(param.shard.spec, len(param.shape)))
        fetch = stage == 3, entries, plan.precision.gather_bits
        reduce_dtype = param.reduce_dtype if reduces else None
        own_sync = sync and functools.partial(sync, param)
        of_grad = reduce_dtype, own_sync, param.rows
        return DeviceRule(*of_param, *fetch, *of_grad, again=stage == 3 and numbered[number] != "")

    return [rule_of(number, param) for number, param in enumerate(plan.params)]
