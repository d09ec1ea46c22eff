"""Micro-batches of one device: losses, gradients and model states, one after the other."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sharding.collectives._dtypes import to_sum_dtype
from sharding.step import _local_norm, _model_state
from sharding.step._gather_params import call_with_shards
from sharding.step._loss import Inputs, Loss, loss_args
from sharding.step._loss_params import differentiated, loss_params
from sharding.step._reduce_gradients import reduce_microbatch
from sharding.step._step_plan import StepPlan


class Sums(NamedTuple):
    """Sums over micro-batches, of one device."""

    loss: jax.Array
    weight: jax.Array
    local: list[jax.Array]  # as _local_norm.squares returns them
    grads: list[jax.Array]


def accumulate(
    plan: StepPlan, loss: Loss, params: list[jax.Array], inputs: Inputs
) -> tuple[Sums, Any, list[bool], Any]:
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

    def run(microbatch: Any, index: Any, model_state: Any) -> tuple[Sums, Any, Any]:
        """The sums of one micro-batch, the model state after it, and its aux."""

        def total_loss(trained: list[jax.Array]) -> tuple[Any, Any]:
            in_order = iter(trained)
            leaves = [next(in_order) if x is None else x for x in untrained]
            args = loss_args(loss, axes, inputs.key, microbatch, index, model_state)
            out = call_with_shards(loss.fn, loss_params(plan, leaves, params), *args)
            total, weight, new, aux = loss.split(out)
            if loss.model_state:
                new, unchanged[:] = _model_state.checked(model_state, new)
            if plan.divides_first:
                total *= inverse_weight(
                    jnp.asarray(divisor_of(lax.stop_gradient(weight)), total.dtype)
                )
            return total, (weight, new, aux)

        def divisor_of(weight: jax.Array) -> Any:
            """What the micro-batch of all devices is divided by."""
            return lax.psum(weight, axes) if loss.weighted else lax.axis_size(axes)

        with jax.named_scope("loss_and_grad"):
            value_and_grad = jax.value_and_grad(total_loss, has_aux=True)
            (total, (weight, model_state, aux)), grads = value_and_grad(trained)
        total, weight = (to_sum_dtype(jnp.asarray(x)) for x in (total, weight))
        reduced = reduce_microbatch(plan, grads)
        if plan.divides_first:
            divisor = divisor_of(weight)
            total *= divisor
            grads, reduced = ([to_sum_dtype(g) * divisor for g in x] for x in (grads, reduced))
        local: list[jax.Array] = []
        if loss.local_norm:
            with jax.named_scope("local_norm"):
                local = _local_norm.squares(plan, grads, weight if loss.weighted else None)
        return Sums(total, weight, local, reduced), model_state, aux

    split = split_microbatches(inputs.batch, steps)
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
    return sums, model_state, unchanged, jax.tree.map(join_microbatches, aux)


def inverse_weight(weight: jax.Array) -> jax.Array:
    """What divides sums by their weight; 0 where nothing has a weight."""
    return jnp.where(weight == 0, 0.0, 1 / jnp.where(weight == 0, 1.0, weight))


def split_microbatches(batch: Any, count: int) -> Any:
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
