"""The parameters as the loss gets them, and as its gradient is taken."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from sharding._types import Array, Tree
from sharding.collectives._dtypes import sum_dtype
from sharding.placement._layout import Layout
from sharding.placement._on_mesh import over_other_axes
from sharding.placement._specs import is_spec
from sharding.step._gather_params import GatherSpec, ParamHandle, Shard, gather
from sharding.step._lookup import TableHandle
from sharding.step._step_plan import ParamPlan, StepPlan


def differentiated(
    plan: StepPlan, params: list[jax.Array], accumulates: bool = False
) -> list[jax.Array]:
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


def loss_params(plan: StepPlan, inputs: list[jax.Array], params: list[jax.Array]) -> list[Any]:
    """What the loss gets: unsharded parameters, and handles of those it gathers by itself.

    ``inputs`` are the differentiated ones, and in their places the parameters without a gradient.
    """

    def handle(param: ParamPlan, x: jax.Array, held: jax.Array, reduce: Any) -> Any:
        if not _has_tap(plan, param):
            return x.astype(param.loss_dtype)
        spec = _gather_spec(plan, param, reduce)
        if param.gathered_by_loss and not plan.reduces_microbatches:
            spec = spec._replace(reduce=lambda grad, _: grad, reduce_dtype=x.dtype)
        held = held if plan.layout.stage == 3 else held.astype(spec.dtype)
        return (TableHandle if param.synced_by_rows else Shard)(held, x, spec)

    leaves = list(map(handle, plan.params, inputs, params, _backward_syncs(plan)))
    if plan.layout.stage < 3:
        return leaves
    by_loss = [param.gathered_by_loss for param in plan.params]
    at_once = iter(gather([x for x, own in zip(leaves, by_loss, strict=True) if not own]))
    return [x if own else next(at_once) for x, own in zip(leaves, by_loss, strict=True)]


def of_leaves(layout: Layout, fn: Callable[..., Any], specs: Tree) -> Callable[..., Any]:
    """``fn(params, *args)`` as a function of the leaves, or handles, inside a ``shard_map``.

    The user's mesh axes are Auto in it. If it names one, as ``out_sharding`` and ``reshard`` do,
    they become Explicit: arrays then have the types that they have under ``jit``.
    """
    treedef: Any
    flat, treedef = jax.tree.flatten(specs, is_leaf=is_spec)
    explicit = False

    def call(leaves: list[Any], *args: Any) -> Any:
        nonlocal explicit
        if not explicit:
            try:
                return fn(treedef.unflatten(leaves), *args)
            except ValueError as error:
                explicit = bool(layout.other_axes) and "AxisType.Auto." in str(error)
                if not explicit:
                    raise

        def run(*args: Any) -> Any:
            typed = [_reshard(x, layout.other_spec(s)) for x, s in zip(leaves, flat, strict=True)]
            return fn(treedef.unflatten(typed), *args)

        axes = tuple(sorted(layout.other_axes))
        return jax.sharding.explicit_axes(run, axes=axes, in_sharding=PartitionSpec())(*args)

    return call


def _reshard(x: Array, spec: PartitionSpec) -> Any:
    if not isinstance(x, ParamHandle):
        return jax.sharding.reshard(x, spec)
    arrays = {name: x for name, x in vars(x).items() if isinstance(x, jax.Array)}
    handle: Any = x
    return dataclasses.replace(handle, **jax.sharding.reshard(arrays, spec))


def _gather_spec(plan: StepPlan, param: ParamPlan, reduce: Any) -> GatherSpec:
    is_moved, bits = param.gather_dim != param.shard.dim, plan.precision.gather_bits
    moved = (param.shape, plan.shard_shape(param)) if is_moved else None
    where = plan.layout, param.gather_dim, _entries(param)
    dtypes = param.loss_dtype, param.reduce_dtype
    return GatherSpec(*where, *dtypes, reduce, param.rows, bits, moved)


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

            # Loops over layers take dims off the front.
            spec = PartitionSpec(*entries[len(entries) - grad.ndim :])
            mean = over_other_axes(layout, sync_block, (spec,), spec)(grad)
            return mean * lax.axis_size(layout.axes)

        return reduce

    return [sync_of(param) for param in plan.params]


def _entries(param: ParamPlan) -> tuple[Any, ...]:
    """Per dim, the entry of the spec on the user's axes of the mesh."""
    entries = tuple(param.shard.spec)
    return entries + (None,) * (len(param.shape) - len(entries))
