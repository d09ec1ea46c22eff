"""The state of an exchange of gradients, which lies beside the optimizer's."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from sharding.placement._layout import Layout, Placement
from sharding.placement._specs import entry_of, path_str
from sharding.sync import GradientSync, SyncedState, resize


def local_types(layout: Layout, params: Any, placed: Placement) -> dict[str, Any]:
    """Of each parameter by its path, the type of what a device has of its gradient to exchange.

    All of it; with replicas, which exchange what a copy has summed, the device's shard.
    """
    treedef: Any = jax.tree.structure(params)
    types = {}
    for (path, x), dim in zip(
        jax.tree_util.tree_leaves_with_path(params), treedef.flatten_up_to(placed.dims), strict=True
    ):
        shape = list(x.shape)
        if dim and layout.replica_axes:
            shape[dim] //= layout.num_shards
        types[path_str(path)] = jax.ShapeDtypeStruct(tuple(shape), x.dtype)
    return types


def init(sync: GradientSync, layout: Layout, types: dict[str, Any]) -> Any:
    """The exchange's state of all devices: (exchanging devices, devices of a copy, ...)."""
    first, second = _axes(layout)
    sizes = [math.prod(layout.mesh.shape[axis] for axis in axes) for axes in (first, second)]
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (*sizes, *x.shape)), sync.init(types))


def types_of(layout: Layout, state: Any, devices: int) -> Any:
    """Types of such a state of another number of devices; cut if they divide."""
    first, _ = _axes(layout)
    divides = devices % math.prod(layout.mesh.shape[axis] for axis in first) == 0
    at = spec(layout) if divides else PartitionSpec(None, *spec(layout)[1:])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            (devices, *x.shape[1:]), x.dtype, sharding=NamedSharding(layout.mesh, at)
        ),
        state,
    )


def resized(layout: Layout, state: Any) -> Any:
    """The state of another number of devices as one of these."""
    sizes = [math.prod(layout.mesh.shape[axis] for axis in axes) for axes in _axes(layout)]
    leaves = jax.tree.leaves(state)
    if not leaves:
        raise ValueError("the train state holds no state of an exchange of gradients.")
    if leaves[0].shape[1] != sizes[1]:
        raise ValueError(
            f"the exchange kept what {leaves[0].shape[1]} shards of a copy had to send, and now "
            f"there are {sizes[1]}: only the number of copies may change."
        )
    at = NamedSharding(layout.mesh, spec(layout))
    return jax.jit(resize, static_argnums=1, out_shardings=at)(state, sizes[0])


def spec(layout: Layout) -> PartitionSpec:
    """How every array of the state lies."""
    return PartitionSpec(*(entry_of(axes) for axes in _axes(layout)))


def _axes(layout: Layout) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return (layout.replica_axes, layout.axes) if layout.replica_axes else (layout.axes, ())


def state_types(layout: Layout, sync: GradientSync, params: Any, placed: Placement) -> Any:
    """The types of ``init``; None if the exchange keeps nothing.

    Raises:
      ValueError: at stage 3 without replicas, if it keeps something; if other axes cut parameters.
    """
    types = local_types(layout, params, placed)
    state = jax.eval_shape(lambda: init(sync, layout, types))
    keeps_state = bool(jax.tree.leaves(state))
    if layout.stage == 3 and not layout.replica_axes and keeps_state:
        raise ValueError(
            "sync: at stage 3 gradients are exchanged layer by layer, in the backward pass, and no "
            "device has room for what an exchange keeps of all of them; this one has a state. Use "
            "one without (dense, qsgd with rounding='nearest'), a stage below 3, or a "
            "replica_axis: then it exchanges shards, between the copies."
        )
    treedef: Any = jax.tree.structure(params)
    specs = zip(types, treedef.flatten_up_to(placed.params), strict=True)
    cut = [path for path, spec in specs if any(layout.other_spec(spec))]
    if cut:
        raise ValueError(
            f"sync: {cut[0]!r} is cut over other axes of the mesh than those of data parallelism; "
            "only the plain exchange (sync=None) takes such parameters."
        )
    return state if keeps_state else None


# --- In a train state -----------------------------------------------------------------------------


def has_sync(state: Any) -> bool:
    """Whether a train state holds the state of an exchange."""
    found = state[1:2] if isinstance(state, tuple) else [getattr(state, "opt_state", None)]
    return any(isinstance(x, SyncedState) for x in found)


def opt_state_of(state: Any) -> Any:
    """The ``opt_state`` of a ``TrainState`` or a pair."""
    return state[1] if isinstance(state, tuple) else state.opt_state


def with_opt_state(state: Any, opt_state: Any) -> Any:
    """A train state with another ``opt_state``."""
    if isinstance(state, tuple):
        return (state[0], opt_state)
    return state.replace(opt_state=opt_state)


def take(state: Any) -> tuple[Any, Any]:
    """A train state whose ``opt_state`` is the transformation's alone, and the exchange's state."""
    if not has_sync(state):
        return state, None
    both = opt_state_of(state)
    return with_opt_state(state, both.inner_state), both.sync_state


def put(state: Any, sync_state: Any) -> Any:
    """Undoes ``take``."""
    if sync_state is None:
        return state
    return with_opt_state(state, SyncedState(opt_state_of(state), sync_state))
