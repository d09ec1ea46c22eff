"""Micro-batches of one device: losses, gradients and model states, one after the other."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sharding._types import Batch, Tree
from sharding.collectives._map_arrays import to_sum_dtype
from sharding.step import _model_state
from sharding.step._call_loss import call_loss, differentiated, gradient_shape
from sharding.step._loss import Inputs, StepLoss
from sharding.step._reduce_gradients import reduce_microbatch, reduced_by_microbatch, squares
from sharding.step._step_plan import IN_PLACE, StepPlan

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
        reduced = reduce_microbatch(plan, grads)
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
