"""A loss in a step: its arguments, and its parameters as a device has them."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sharding._types import Batch, Tree
from sharding.collectives._map_arrays import sum_dtype
from sharding.loss._loss_options import Loss
from sharding.placement._on_mesh import over_other_axes
from sharding.placement._specs import of_last_dims
from sharding.step._checks import check_whole_number
from sharding.step._gather_params import GatherSpec, ParamHandle, gather
from sharding.step._layer_hooks import HookedParam
from sharding.step._rng import microbatch_key
from sharding.step._step_plan import ParamPlan, StepPlan, warn_of_unsharded
from sharding.step._traced_loss import DeviceHooks


@dataclasses.dataclass(frozen=True)
class StepLoss(Loss):
    """A loss in a step, of micro-batches."""

    microbatches: int = 1
    # Whether the transformation requires the norms of the local gradients.
    local_norm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole_number("microbatches", self.microbatches, 1)

    def first_args(self, axes: tuple[str, ...], inputs: "Inputs") -> tuple[Any, ...]:
        """The arguments for the first micro-batch, to be traced for their types."""
        first = jax.tree.map(
            lambda x: x[: x.shape[0] // self.microbatches] if jnp.ndim(x) else x, inputs.batch
        )
        return self.device_args(axes, inputs.key, first, 0, inputs.model_state)

    def device_args(
        self, axes: tuple[str, ...], key: Any, microbatch: Batch, index: Any, model_state: Tree
    ) -> tuple[Any, ...]:
        """``loss_args`` for micro-batch ``index`` of this device."""
        # Micro-batches are numbered in the order of the batch of all devices.
        number = lax.axis_index(axes) * self.microbatches + index
        keys = microbatch_key(self.rngs, key, number, microbatch)
        return loss_args(self, microbatch, model_state, keys)


class Inputs(NamedTuple):
    """The arguments of a loss beside the parameters; None for those it does not take."""

    batch: Any  # sharded over the data axes
    key: Any = None  # the same on all devices
    model_state: Any = None  # the same on all devices


def loss_args(loss: Loss, microbatch: Batch, model_state: Tree, keys: Any) -> tuple[Any, ...]:
    """The arguments of the loss after the parameters: those that its options ask for."""
    args = (microbatch, model_state) if loss.model_state else (microbatch,)
    return (*args, keys) if loss.rngs else args


# --- Parameters as a loss of one device gets them, and as its gradient is taken -------------------


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
    loss, dtypes = plan.loss, [param.loss_dtype for param in plan.params]
    syncs = _backward_syncs(plan)

    def run(inputs: list[Any], params: list[Any], *flat: Any) -> list[Any]:
        given = []
        both = zip(plan.params, loss.reshard(inputs), loss.reshard(params), strict=True)
        for i, (param, x, held) in enumerate(both):
            if _has_tap(plan, param):
                held = held if plan.layout.stage == 3 else held.astype(dtypes[i])
                of = {"dim": param.shard.dim, "dtype": dtypes[i]}
                given.append(HookedParam(i, held, x, {}, **of))
            else:
                given.append(x.astype(dtypes[i]))
        hooked = _WithParams(plan, syncs)
        outs = hooked.run([*given, *flat])
        if plan.layout.stage == 3:
            warn_of_unsharded(plan, hooked.fetches)
        return outs

    return loss.result(loss.on_explicit_axes(run)(inputs, params, *jax.tree.leaves(args)))


class _WithParams(DeviceHooks):
    """The loss, whose parameters are gathered where it uses them, and reduced after that."""

    def __init__(self, plan: StepPlan, syncs: list[Any]):
        super().__init__(plan.loss, lambda x: gather(self._handle(x)), plan.layout.recomputes)
        self.plan, self.syncs = plan, syncs

    def _handle(self, x: HookedParam) -> ParamHandle:
        plan, param, reduce = self.plan, self.plan.params[x.number], self.syncs[x.number]
        reduce_dtype = param.reduce_dtype
        if plan.layout.stage < 3 and not plan.reduces_microbatches:
            reduce, reduce_dtype = (lambda grad, _: grad), x.tap.dtype
        held = x.held if x.dtype == param.loss_dtype else x.held.astype(param.loss_dtype)
        dtypes, bits = (x.dtype, reduce_dtype), plan.precision.gather_bits
        where = plan.layout, x.dim, _entries(param)
        return ParamHandle(held, x.tap, GatherSpec(*where, *dtypes, reduce, param.rows, bits))

    def _call(self, eqn: Any, operands: list[Any]) -> list[Any]:
        def given(k: int, x: Any) -> Any:
            by_rows = eqn.params["by_rows"]
            if not isinstance(x, HookedParam) or x.moves:
                return self._full(x)
            has_rows = self.plan.params[x.number].rows is not None
            return self._handle(x) if has_rows or not by_rows else self._full(x)

        out: list[Any] = eqn.params["fn"](*(given(k, x) for k, x in enumerate(operands)))
        return out


def _backward_syncs(plan: StepPlan) -> list[Callable[[jax.Array, int], jax.Array] | None]:
    """Per parameter, the sync of its gradient in the backward pass; None for a reduce-scatter."""
    if plan.sync is None or not plan.syncs_shard_axes or plan.layout.stage < 3:
        return [None] * len(plan.params)
    layout, sync, state = plan.layout, plan.sync, plan.empty_sync_state()
    nothing = {param.path: None for param in plan.params}
    dims = dict.fromkeys(nothing, 0)

    def sync_of(param: ParamPlan) -> Callable[[jax.Array, int], jax.Array]:
        path, entries = param.path, _entries(param)

        def reduce(grad: jax.Array, dim: int) -> jax.Array:
            def sync_block(block: jax.Array) -> jax.Array:
                grads, at = nothing | {path: block}, dims | {path: dim}
                return sync.reduce_scatter(grads, state, layout.axes, at)[0][path]

            spec = of_last_dims(entries, grad.ndim)
            mean = over_other_axes(layout, sync_block, (spec,), spec)(grad)
            return mean * lax.axis_size(layout.axes)

        return reduce

    return [sync_of(param) for param in plan.params]


def _entries(param: ParamPlan) -> tuple[Any, ...]:
    """Per dim, the entry of the spec on the user's axes of the mesh."""
    entries = tuple(param.shard.spec)
    return entries + (None,) * (len(param.shape) - len(entries))
