"""The loss of one device, by rules of the parameters that it holds."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sharding.collectives._map_arrays import sum_dtype
from sharding.loss._evaluate import Evaluator, Param, is_param
from sharding.loss._stack import numbered_layers
from sharding.placement._on_mesh import over_other_axes
from sharding.placement._specs import by_dim, of_last_dims
from sharding.step._device_rules import DeviceRule
from sharding.step._gather_params import ParamHandle
from sharding.step._step_plan import ParamPlan, StepPlan, warn_of_unsharded


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
    rules = device_rules(plan)

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


def device_rules(plan: StepPlan) -> list[DeviceRule]:
    """How a device gets each parameter, and reduces its gradient."""
    stage = plan.layout.stage
    reduces = stage == 3 or plan.reduces_microbatches
    # A sync over the axes of shards takes the place of the reduce-scatter in the backward pass.
    syncs = stage == 3 and plan.syncs_shard_axes
    sync = functools.partial(_sync_one, plan, plan.empty_sync_state()) if syncs else None
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


def _sync_one(plan: StepPlan, state: Any, param: ParamPlan, grad: jax.Array, dim: int) -> jax.Array:
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
