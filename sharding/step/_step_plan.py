"""The plan of a step: how each parameter is sharded, gathered, differentiated and synchronized.

Where the gradient of a parameter is reduced, in the loss of a device:

| stage | its use | reduced |
|---|---|---|
| 3 | any | where it was gathered, by the rule of the parameter (``DeviceRule.reduce``) |
| 2; 1 of one micro-batch | in a layer that fetches for itself | there, too (``reduced_in_layer``) |
| | elsewhere | after each micro-batch (``reduce_microbatch``) |
| 0; 1 of several; a sync with a state | any | once, after the last one |
| any | rows of a table (``lookup``) whose sync knows rows | where they are looked up |
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from sharding._types import Tree
from sharding._user_line import warn, warn_once
from sharding.collectives._reduce_scatter import ArrayLayout
from sharding.loss._evaluate import Evaluator, Fetch, Param, is_param
from sharding.placement._layout import Layout, Placement
from sharding.placement._specs import axes_of, by_dim, leaf_names
from sharding.step._gather_and_reduce import DeviceLoss, DeviceRule
from sharding.step._precision import Precision
from sharding.sync import GradientSync, RowMethod

# Backward passes of jax 0.10 mix up the gradients of a loop if some are refs and others are not.
IN_PLACE = jax.__version_info__ >= (0, 11)


FEW_BYTES = 2**20  # of parameters whose gathers before the loss are not worth a warning


class StepSpec(NamedTuple):
    """The placement, training and synchronization of parameters; trees as the parameters."""

    layout: Layout
    precision: Precision
    placed: Placement
    trained: Any  # bools, whether each parameter has a gradient
    # Makes the mean of gradients, in place of a sum: over the replica axes if there are any, else
    # over the axes of shards.
    sync: GradientSync | None = None
    opt_specs: Any = None  # of the optimizer state
    blocks: tuple[str, ...] = ()  # names of layers that are to gather their own parameters
    pieces: Any = None  # a list that gets the parts of a partitioned loss, once that is traced


class ParamPlan(NamedTuple):
    """One parameter in a step."""

    path: str  # unlike that of all others; see ``leaf_names``
    shape: tuple[int, ...]  # unsharded
    dtype: Any  # in the train state
    loss_dtype: Any  # as the loss sees it
    reduce_dtype: Any  # in which its gradient is summed over devices
    trained: bool  # whether it has a gradient
    shard: ArrayLayout  # over the axes of shards; so is its gradient
    replica_shard: ArrayLayout  # of its gradient, over the replica axes as well
    rows: RowMethod | None  # the sync of rows that were looked up; None for the full gradient
    # Below stage 3, whether the backward pass of its layer reduces the gradient, or adds it to
    # others.
    reduced_in_layer: bool = False
    synced_by_rows: bool = False  # below stage 3, whether the derivative of ``lookup`` syncs it

    def rule(self, loss: DeviceLoss, **options: Any) -> DeviceRule:
        """How a device gets it, and reduces its gradient."""
        entries = tuple(by_dim(self.shard.spec, len(self.shape)))
        of_param = self.shard.dim, self.loss_dtype, self.loss_dtype
        return DeviceRule(loss.layout, *of_param, entries=entries, apart=loss.apart, **options)

    @property
    def has_handle(self) -> bool:
        """Whether below stage 3 the backward pass gives the gradient to a tap."""
        return self.reduced_in_layer or self.synced_by_rows


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """All parameters in a step."""

    layout: Layout
    precision: Precision
    params: tuple[ParamPlan, ...]
    loss: DeviceLoss
    sync: GradientSync | None
    sync_has_state: bool  # such as error-feedback residuals
    microbatches: int  # of each device

    @property
    def trained(self) -> tuple[ParamPlan, ...]:
        return tuple(param for param in self.params if param.trained)

    @property
    def reduces_microbatches(self) -> bool:
        """Whether each micro-batch is reduced; not by a sync with a state, which runs once.

        Stage 1 accumulates unreduced gradients; of a single micro-batch there are none.
        """
        once = self.sync_has_state and not self.layout.replica_axes
        return self.layout.stage >= (1 if self.microbatches == 1 else 2) and not once

    def adds(self, param: ParamPlan) -> bool:
        """Whether layers add its unreduced gradients to a sum of another dtype, in place."""
        other = self.precision.of_accumulator(param.dtype) != param.loss_dtype
        return other and IN_PLACE and self.microbatches > 1 and not self.reduces_microbatches

    @property
    def divides_first(self) -> bool:
        """Whether the loss is divided before it is differentiated."""
        return self.precision.divides_first(param.dtype for param in self.trained)

    @property
    def syncs_shard_axes(self) -> bool:
        """Whether ``sync`` makes the mean over the axes of shards."""
        return self.sync is not None and not self.layout.replica_axes

    def shard_shape(self, param: ParamPlan) -> tuple[int, ...]:
        """The shape of a device's shard of a parameter and of its gradient."""
        shape, dim = list(param.shape), param.shard.dim
        if dim:
            shape[dim] //= self.layout.num_shards
        return tuple(shape)

    def empty_sync_state(self) -> Any:
        """The state of a ``sync`` that has no arrays in it."""
        if self.sync is None:
            return None
        block = self.layout.block_shape
        types = [jax.ShapeDtypeStruct(block(p.shape, p.shard.spec), p.dtype) for p in self.params]
        return self.sync.init({p.path: x for p, x in zip(self.params, types, strict=True)})


def plan_step(
    spec: StepSpec,
    params: Tree,
    sync_has_state: bool,
    loss: Callable[..., Any],
    *args: Any,
    microbatches: int = 1,
    reduce_in_backward: bool = True,
) -> StepPlan:
    """The plan of a step with one loss of the tree of parameters and ``args``, in types."""
    layout, treedef = spec.layout, jax.tree.structure(params)
    flat = zip(
        leaf_names(params),
        jax.tree.leaves(params),
        *map(treedef.flatten_up_to, (spec.trained, *spec.placed[:3])),
        strict=True,
    )
    rows = spec.sync.rows if spec.sync is not None else None
    plans = []
    for name, x, trained, param_spec, shard_spec, dim in flat:
        other = layout.other_spec(param_spec)
        axes = {axis for entry in shard_spec for axis in axes_of(entry)}
        shard = ArrayLayout(dim, other)
        replica_shard = ArrayLayout(dim if axes & set(layout.replica_axes) else 0, other)
        loss_dtype = spec.precision.of_loss(x.dtype)
        dtypes = x.dtype, loss_dtype, spec.precision.of_sum(loss_dtype)
        shards, method = (shard, replica_shard), None if rows is None else rows(name, x)
        plans.append(ParamPlan(name, x.shape, *dtypes, trained, *shards, method))
    types = [jax.ShapeDtypeStruct(param.shape, param.loss_dtype) for param in plans]
    traced = DeviceLoss(layout, loss, treedef.unflatten(types), spec.placed.params, args)
    options = spec.sync, sync_has_state, microbatches
    plan = StepPlan(layout, spec.precision, tuple(plans), traced, *options)
    # A sync over the axes of shards takes all gradients of a micro-batch together.
    in_layers = plan.reduces_microbatches and not plan.syncs_shard_axes
    in_layers = (in_layers or any(map(plan.adds, plans))) and reduce_in_backward
    with_rows = {i for i, p in enumerate(plans) if p.rows and (p.trained or layout.stage == 3)}
    if layout.stage < 3 and not in_layers:
        _warn_of_unused(
            spec, "each micro-batch has its own reduced, without a sync over these devices"
        )
    if not (with_rows or (in_layers and layout.stage < 3)):
        return plan
    uses = _Uses(plan, args)
    by_rows = _tables(plan, with_rows, uses)
    if layout.stage == 3:
        complete = [p if i in by_rows else p._replace(rows=None) for i, p in enumerate(plans)]
    else:
        layers = {i for i in range(len(plans)) if in_layers and _is_reduced_once(plan, i, uses)}
        if in_layers and not layers:
            _warn_of_unused(spec, "a layer has all that the loss uses of a parameter, once")
        complete = [
            p._replace(reduced_in_layer=i in layers, synced_by_rows=i in by_rows)
            for i, p in enumerate(plans)
        ]
    return dataclasses.replace(plan, params=tuple(complete))


class _Uses:
    """How a loss uses its parameters, found by evaluating it without values."""

    def __init__(self, plan: StepPlan, args: Any):
        self.by_rows: dict[int, list[int]] = {}  # of tables: the numbers of dims, in ``lookup``
        self.not_tables: list[tuple[int, ...]] = []  # shapes of what ``lookup`` gets otherwise

        def param(number: int, held: jax.Array, _: Any) -> Param:
            return Param(number, plan.params[number].rule(plan.loss), held, None, {})

        def run(held: list[Any], args: Any) -> None:
            self.fetches = plan.loss.evaluate(param, held, held, args, self._call)[1]

        jax.eval_shape(run, plan.loss.types, args)

    def of(self, number: int) -> list[Fetch]:
        return [x for x in self.fetches if x.number == number]

    def _call(self, evaluator: Evaluator, eqn: Any, operands: list[Any]) -> list[Any]:
        held = []
        for k, x in enumerate(operands):
            by_rows = eqn.params["by_rows"] and not k
            if not is_param(x):
                if by_rows:
                    self.not_tables.append(x.shape)
                held.append(x)
            elif by_rows and not (x.moves or x.rule.is_part or x.rule.dtype != x.held.dtype):
                self.by_rows.setdefault(x.number, []).append(x.held.ndim)
                held.append(x.held)
            else:
                if by_rows:
                    self.not_tables.append(x.held.shape)
                held.append(evaluator.full(x._replace(in_layer=True, repeats=True)))
        return jaxpr_as_fun(eqn.params["default"])(*held)


def _is_reduced_once(plan: StepPlan, number: int, uses: _Uses) -> bool:
    """Below stage 3, whether a layer has all of a parameter that the loss uses.

    A gradient with several terms is reduced once, after the backward pass.
    """
    param, places = plan.params[number], uses.of(number)
    if number in uses.by_rows or len(places) != 1 or not param.trained:
        return False
    (place,) = places
    if place.repeats or place.rule.is_part or not place.in_layer or plan.loss.is_early(place):
        return False
    return bool(param.shard.dim) if plan.reduces_microbatches else plan.adds(param)


def _tables(plan: StepPlan, with_rows: set[int], uses: _Uses) -> set[int]:
    """The tables whose gradients are synced by rows: the loss looks up rows, and nothing else."""
    tables = with_rows & uses.by_rows.keys()
    for i in tables:
        for place in uses.of(i)[:1]:
            _warn_full_sync(
                f"the loss looks up rows of {plan.params[i].path!r}, and uses it otherwise too, "
                f"or in a branch ({place.place})"
            )
    for shape in uses.not_tables if with_rows else ():
        _warn_full_sync(
            f"the loss looks up rows of an array of shape {shape} that is not an unmodified "
            "parameter: it was gathered, cast or computed"
        )
    # A stack that is sharded along a dim that loops slice off has no shard of a single slice.
    return {
        i for i in tables if not uses.of(i) and -plan.params[i].shard.dim <= min(uses.by_rows[i])
    }


def _warn_of_unused(spec: StepSpec, where: str) -> None:
    """Warns if layers were named, and no gradient is reduced in any."""
    if spec.blocks:
        warn(
            f"gathered_blocks={spec.blocks} has no effect in this step of stage "
            f"{spec.layout.stage}: below stage 3 nothing is gathered, and the backward pass "
            f"reduces gradients layer by layer only where {where} (docs: how_to/stage_3)."
        )


def _warn_full_sync(found: str) -> None:
    warn(f"{found}: its full gradient is synchronized, and at stage 3 it is gathered.")


def warn_of_unsharded(plan: StepPlan, fetches: list[Fetch]) -> None:
    """Warns of parameters that stage 3 gathers outside of layers: all, or some that a layer has."""
    in_layers = any(x.in_layer for x in fetches) or any(param.rows for param in plan.params)
    early = [x for x in fetches if plan.loss.is_early(x) or not in_layers]
    if not early:
        return

    def size(number: int) -> int:
        param = plan.params[number]
        return math.prod(param.shape) * jnp.dtype(param.loss_dtype).itemsize

    first = {x.number: x for x in reversed(early)}
    in_all = sum(map(size, first))
    if in_all < FEW_BYTES:
        return
    largest = sorted(first, key=lambda i: (-size(i), i))[:4]
    used = ", ".join(
        f"{plan.params[i].path!r} ({_printed_size(size(i))}) {first[i].place}" for i in largest
    )
    total = _printed_size(in_all)
    found = (
        f"stage 3 with a loss that uses {len(first)} parameters, {total}, in a branch or a loop "
        "that gathers, or at a place that each device chooses by its own data: they"
        if in_layers
        else f"stage 3 with a loss that gathers no layer where it is used: all parameters, {total},"
    )
    warn_once(
        f"{found} are gathered before, and each device holds them unsharded until the backward "
        f"pass has used them. Used unsharded: {used}. Wrap the model's blocks in zero.gathered, or "
        "call zero.gather in each layer, and before a branch; of a stack, pass single layers, and "
        "shard another dim than the one that a loop slices off, by param_specs (docs: "
        "how_to/stage_3)."
    )


def _printed_size(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"
