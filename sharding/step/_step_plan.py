"""The plan of a step: how each parameter is sharded, gathered, differentiated and synchronized."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sharding._types import Tree
from sharding._user_line import warn
from sharding.collectives._map_arrays import ArrayLayout
from sharding.placement._layout import Layout, Placement
from sharding.placement._specs import axes_of, leaf_names
from sharding.step import _gather_params, _lookup
from sharding.step._param_uses import ParamUses, find_uses, place_of
from sharding.step._precision import Precision
from sharding.sync import GradientSync, RowMethod

# Backward passes of jax 0.10 mix up the gradients of a loop if some are refs and others are not.
IN_PLACE = jax.__version_info__ >= (0, 11)


class StepSpec(NamedTuple):
    """The placement, training and synchronization of parameters; trees as the parameters."""

    precision: Precision
    placed: Placement
    trained: Any  # bools, whether each parameter has a gradient
    # Makes the mean of gradients, in place of a sum: over the replica axes if there are any, else
    # over the axes of shards.
    sync: GradientSync | None = None


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
    gather_dim: int  # its sharded dim, counted from the end, in the view that the loss gathers
    # At stage 3, whether the loss gathers it, or looks up rows of it, by itself; below, whether it
    # passes it to ``gather``, whose derivative then reduces the gradient, or adds it to others.
    gathered_by_loss: bool = False
    synced_by_rows: bool = False  # below stage 3, whether the derivative of ``lookup`` syncs it

    @property
    def has_handle(self) -> bool:
        """Whether the loss gets a handle, whose tap the backward pass gives the gradient."""
        return self.gathered_by_loss or self.synced_by_rows


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """All parameters in a step."""

    layout: Layout
    precision: Precision
    params: tuple[ParamPlan, ...]
    sync: GradientSync | None
    sync_has_state: bool  # such as error-feedback residuals
    microbatches: int  # of each device
    uses: ParamUses | None = None  # of the parameters in the loss, if it was traced

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
    def has_layers(self) -> bool:
        """Whether the backward pass reduces or adds gradients layer by layer, below stage 3."""
        return self.layout.stage < 3 and any(param.gathered_by_loss for param in self.params)

    @property
    def divides_first(self) -> bool:
        """Whether the loss is divided before it is differentiated: float16 overflows in sums."""
        dtypes = {self.precision.compute} | {
            dtype for param in self.trained for dtype in (param.dtype, param.reduce_dtype)
        }
        return jnp.dtype(jnp.float16) in dtypes

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
    layout: Layout,
    spec: StepSpec,
    params: Tree,
    sync_has_state: bool,
    loss: Callable[..., Any],
    *args: Any,
    microbatches: int = 1,
    reduce_in_backward: bool = True,
    check_branches: bool = False,
) -> StepPlan:
    """The plan of a step with one loss of the list of parameters and ``args``, in types."""
    treedef: Any = jax.tree.structure(params)
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
        plans.append(ParamPlan(name, x.shape, *dtypes, trained, *shards, method, gather_dim=dim))
    options = spec.sync, sync_has_state, microbatches
    plan = StepPlan(layout, spec.precision, tuple(plans), *options)
    by_loss, by_rows, uses = _handles(plan, reduce_in_backward, check_branches, loss, args)
    complete = tuple(
        param._replace(
            gathered_by_loss=i in by_loss,
            synced_by_rows=i in by_rows,
            gather_dim=min(uses.dims[i]) if uses and i in by_loss else param.gather_dim,
        )
        for i, param in enumerate(plans)
    )
    return dataclasses.replace(plan, params=complete, uses=uses)


def _handles(
    plan: StepPlan,
    reduce_in_backward: bool,
    check_branches: bool,
    loss: Callable[..., Any],
    args: tuple[Any, ...],
) -> tuple[set[int], set[int], ParamUses | None]:
    """The parameters that the loss gets as handles: for ``gather``, and below 3 for ``lookup``."""
    params, stage = plan.params, plan.layout.stage
    with_rows = {i for i, param in enumerate(params) if param.rows is not None}
    # A sync over the axes of shards takes all gradients of a micro-batch together.
    in_layers = stage < 3 and plan.reduces_microbatches and not plan.syncs_shard_axes
    in_layers = (in_layers or any(map(plan.adds, params))) and reduce_in_backward
    if stage < 3:
        with_rows = {i for i in with_rows if params[i].trained}
        if not (with_rows or in_layers or check_branches):
            return set(), set(), None  # the loss need not be traced
    like = [jax.ShapeDtypeStruct(param.shape, param.loss_dtype) for param in params]
    marks = [_gather_params.MARK, _lookup.MARK, _gather_params.DERIVATIVE_MARK]
    axes = plan.layout.data_axes
    dims = [param.shard.dim for param in params]
    with _gather_params.marking():
        uses = find_uses(loss, like, marks, *args, axes=axes, dims=dims)
    if uses.apart:
        raise ValueError(
            f"the loss has a collective ({uses.apart}, such as that of a BatchNorm with the "
            "statistics of all devices) in a branch or a loop that devices take by their own data: "
            "devices would exchange what does not belong together. Move it out of the branch, or "
            "pass sync_batch_norm=False."
        )
    if uses.unknown[_gather_params.DERIVATIVE_MARK]:
        # A derivative by a handle would be that of this device's shard.
        uses.otherwise.update(dict.fromkeys(uses.marked[_gather_params.MARK]))
    for i in uses.marked[_lookup.MARK].keys() & (uses.viewed.keys() | uses.dead.keys()):
        uses.otherwise.setdefault(i, uses.viewed.get(i) or uses.dead[i])  # of rows, no views
    _warn_of_full_tables(params, with_rows, uses)
    if stage == 3:
        return _gathered_by_loss(params, uses), set(), uses
    layers = _layers_of(plan, uses) if in_layers else set()
    return layers, _synced_by_rows(params, with_rows, uses), uses


def _layers_of(plan: StepPlan, uses: ParamUses) -> set[int]:
    """Below stage 3, the parameters that the loss gathers once, and uses in no other way.

    A gradient with several terms is reduced once, after the backward pass. So is that of a
    parameter that is gathered in a branch: devices that take the other one would leave those that
    reduce waiting. And that of a stack which is sharded along a dim that loops slice off.
    """
    gathered = uses.marked[_gather_params.MARK]
    own = gathered.keys() - uses.marked[_lookup.MARK].keys() - uses.otherwise.keys()
    own = own - uses.viewed.keys() - uses.branched - uses.repeated
    plans = plan.params
    own = {i for i in own if plans[i].trained and -plans[i].shard.dim <= gathered[i]}
    reduces = plan.reduces_microbatches
    return {i for i in own if (plans[i].shard.dim if reduces else plan.adds(plans[i]))}


def _gathered_by_loss(plans: Sequence[ParamPlan], uses: ParamUses) -> set[int]:
    """At stage 3, the parameters that the loss gathers, or looks up rows of, and nothing else.

    Not where devices take a branch by their own data: those that take another one would not take
    part. These parameters are gathered before the loss, with a warning.
    """
    marked = set().union(*uses.marked.values()) - uses.otherwise.keys()
    moved = {i for i, dims in uses.dims.items() if dims != {plans[i].shard.dim}}
    unlike = {i for i in moved if len(uses.dims[i]) > 1 or any(plans[i].shard.spec)}
    marked -= unlike
    own = marked - uses.diverging
    if marked - own:
        names = ", ".join(repr(plans[i].path) for i in sorted(marked - own)[:4])
        warn(
            f"the loss gathers {len(marked - own)} parameters, such as {names}, in a branch or a "
            "loop that devices take by their own data. They are gathered before the loss instead, "
            "and each device holds them unsharded. Gather them before the branch, or make its "
            "predicate the same on all devices."
        )
    return own


def warn_of_unsharded(plan: StepPlan) -> None:
    """Warns of parameters that stage 3 gathers before the loss: all, or some that a layer has."""
    assert plan.uses is not None
    params = plan.params
    sharded = {i for i, param in enumerate(params) if param.shard.dim}
    own = {i for i in sharded if params[i].gathered_by_loss}
    marked = plan.uses.marked[_gather_params.MARK].keys() | plan.uses.moved
    early = (sharded & marked) - own - plan.uses.diverging if own else sharded
    if early <= plan.uses.diverging - plan.uses.otherwise.keys():  # warned of already
        return

    def size(i: int) -> int:
        return math.prod(params[i].shape) * jnp.dtype(params[i].loss_dtype).itemsize

    # Of a parameter whose handle did not do, what asked for more.
    places = plan.uses.dead | plan.uses.viewed | plan.uses.otherwise
    largest = sorted(early & places.keys(), key=lambda i: (-size(i), i))[:4]
    used = ", ".join(
        f"{params[i].path!r} ({_printed_size(size(i))}) {place_of(places[i])}" for i in largest
    )
    total = _printed_size(sum(map(size, early)))
    found = (
        f"stage 3 with a loss that uses {len(early)} parameters, {total}, outside of the layers "
        "that gather them: they"
        if own
        else f"stage 3 with a loss that gathers no layer where it is used: all parameters, {total},"
    )
    warn(
        f"{found} are gathered at once, and each device holds them unsharded from the forward to "
        f"the backward pass. Used unsharded: {used}. Wrap the model's blocks in zero.gathered, or "
        "call zero.gather in each layer; of a stack, pass single layers."
    )


def _printed_size(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"


def _synced_by_rows(plans: Sequence[ParamPlan], with_rows: set[int], uses: ParamUses) -> set[int]:
    """Below stage 3, the tables whose gradient is synced by the rows that were looked up."""
    looked_up = uses.marked[_lookup.MARK]
    tables = (with_rows & looked_up.keys()) - uses.otherwise.keys()
    for i in tables & uses.branched:  # devices that take the other one would leave others waiting
        _warn_full_sync(f"the loss looks up rows of {plans[i].path!r} in a branch or a while loop")
    tables -= uses.branched
    # A stack that is sharded along a dim that loops slice off has no shard of a single slice.
    return {i for i in tables if -plans[i].shard.dim <= looked_up[i]}


def _warn_of_full_tables(plans: Sequence[ParamPlan], with_rows: set[int], uses: ParamUses) -> None:
    """Warns about tables that could be synced by rows, if the loss did not use them otherwise."""
    tables = with_rows & uses.marked[_lookup.MARK].keys()
    for i in tables & uses.otherwise.keys():
        _warn_full_sync(f"the loss looks up rows of {plans[i].path!r}, and uses it otherwise too")
    for i in tables & uses.marked[_gather_params.MARK].keys():
        _warn_full_sync(f"the loss looks up rows of {plans[i].path!r}, and gathers it too")
    for shape in uses.unknown[_lookup.MARK] if with_rows else ():
        _warn_full_sync(
            f"the loss looks up rows of an array of shape {shape} that is not an unmodified "
            "parameter: it was gathered, cast or computed"
        )


def _warn_full_sync(found: str) -> None:
    warn(f"{found}: its full gradient is synchronized, and at stage 3 it is gathered.")
