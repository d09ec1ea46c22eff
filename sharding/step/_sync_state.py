"""The state of a gradient sync in a train state: its placement, and where it is stored."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from sharding._types import Array, Tree
from sharding.placement._layout import Layout, Placement
from sharding.placement._on_mesh import on_mesh
from sharding.placement._specs import entry_of, first_names, leaf_names, path_str
from sharding.placement._train_state import opt_state_of, with_opt_state
from sharding.sync import GradientSync, SyncedState, resize

# --- Arrays with a row for every device -----------------------------------------------------------


def local_gradients(layout: Layout, params: Tree, placed: Placement) -> dict[str, Any]:
    """The types of the gradients that a device passes to the sync, by the names of parameters.

    They are unsharded over the data axes, with replicas sharded over those of shards; of a
    parameter that other axes shard they are the device's block.
    """
    leaves, treedef = jax.tree.flatten(params)
    specs, dims = map(treedef.flatten_up_to, (placed.params, placed.dims))
    types = {}
    for name, x, spec, dim in zip(leaf_names(params), leaves, specs, dims, strict=True):
        shape = list(layout.block_shape(x.shape, spec))
        if dim and layout.replica_axes:
            shape[dim] //= layout.num_shards
        types[name] = jax.ShapeDtypeStruct(tuple(shape), x.dtype)
    return types


def init_sync_state(sync: GradientSync, layout: Layout, gradients: Tree) -> Tree:
    """All devices' states: (synchronizing devices, devices of a replica, [other axes,] ...)."""
    state = sync.init(gradients)
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (*_sizes(layout), *x.shape)), state)


def sync_spec(layout: Layout) -> PartitionSpec:
    """The spec of every array of the state."""
    return PartitionSpec(*map(entry_of, _sync_axes(layout)))


def _sync_axes(layout: Layout) -> tuple[tuple[str, ...], ...]:
    """The axes between which gradients are synchronized, those within a replica, and others."""
    data = (layout.replica_axes, layout.axes) if layout.replica_axes else (layout.axes, ())
    others = tuple(name for name in layout.mesh.axis_names if name in layout.other_axes)
    return (*data, others) if others else data


def _sizes(layout: Layout) -> list[int]:
    return [math.prod(layout.mesh.shape[axis] for axis in axes) for axes in _sync_axes(layout)]


def sync_state_types(layout: Layout, sync: GradientSync, params: Tree, placed: Placement) -> Tree:
    """The types of the state; None for a stateless sync, as stage 3 without replicas requires."""
    gradients = local_gradients(layout, params, placed)
    state = jax.eval_shape(lambda: init_sync_state(sync, layout, gradients))
    if not jax.tree.leaves(state):
        return None
    if layout.stage == 3 and not layout.replica_axes:
        raise ValueError(
            "sync: at stage 3 without replicas the backward pass synchronizes gradients layer by "
            "layer, and no device holds the full gradients whose residuals this stateful sync "
            "stores. Use a stateless sync (dense, qsgd with rounding='nearest'), a stage below 3, "
            "or a replica_axis, over which shards are synchronized (docs: how_to/compress)."
        )
    return state


# --- Another number of devices --------------------------------------------------------------------


def types_for_devices(layout: Layout, state: Tree, devices: int) -> Tree:
    """The types of a state of another number of devices; sharded if that number divides."""
    spec = sync_spec(layout)
    if devices % _sizes(layout)[0]:
        spec = PartitionSpec(None, *spec[1:])
    sharding = NamedSharding(layout.mesh, spec)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((devices, *x.shape[1:]), x.dtype, sharding=sharding), state
    )


def resize_sync_state(layout: Layout, state: Tree, types: Tree) -> Tree:
    """A state of another number of synchronizing devices as one of this layout, of ``types``."""
    sizes, leaves = _sizes(layout), jax.tree.leaves(state)
    if not leaves:
        raise ValueError("the train state holds no state of a gradient sync to resize.")
    if leaves[0].shape[1] != sizes[1]:
        raise ValueError(
            f"the state of the gradient sync is that of {leaves[0].shape[1]} shards in a replica, "
            f"and the mesh has {sizes[1]}: only the number of replicas may change."
        )
    have, want = ([x.shape[1:] for x in jax.tree.leaves(tree)] for tree in (state, types))
    if have != want:
        others = {axis: layout.mesh.shape[axis] for axis in sorted(layout.other_axes)}
        raise ValueError(
            "the state of the gradient sync is that of another sync, or of other axes of other "
            f"sizes than {others}: each device has arrays of shapes {have} there, and here "
            f"{want}. Only the number of synchronizing devices may change."
        )
    sharding = NamedSharding(layout.mesh, sync_spec(layout))
    # Each of n devices synchronizes its part g_i / n of the mean gradient: their sum stays.
    factor = leaves[0].shape[0] / sizes[0]

    def run(layout: Layout, state: Tree) -> Tree:
        del layout
        scaled = lambda x: x * factor if jnp.issubdtype(x.dtype, jnp.inexact) else x  # noqa: E731
        return jax.tree.map(scaled, resize(state, sizes[0]))

    def out_shardings(out: Tree) -> Tree:
        return jax.tree.map(lambda _: sharding, out)

    return jax.jit(on_mesh(layout, run, out_shardings), out_shardings=sharding)(state)


# --- Another sync ---------------------------------------------------------------------------------


def check_sync_state(state: Tree, expected: Tree) -> None:
    """Raises unless a train state holds the state, if any, that the sync has."""
    if jax.tree.map(_type, state) == jax.tree.map(_type, expected):
        return
    if state is None:
        raise ValueError(
            "the gradient sync has a state, which this train state lacks. Make the train state "
            "with zero.init, or from one of another sync with zero.change_sync."
        )
    raise ValueError(
        f"the train state holds the state of another gradient sync, {_described(state)}; this one "
        f"has {_described(expected)}. zero.change_sync(state) applies the residuals and makes it a "
        "state of this sync; for another number of devices there is zero.resize_sync(state) "
        "(docs: how_to/compress)."
    )


def _type(x: Array) -> tuple[tuple[int, ...], str]:
    return tuple(x.shape), str(x.dtype)


def _described(state: Tree) -> str:
    flat = jax.tree.leaves_with_path(state)
    return first_names(f"{path_str(path)} {tuple(x.shape)}" for path, x in flat) or "none"


def owed_gradients(layout: Layout, state: Tree, params: Tree, placed: Placement) -> Tree:
    """The sum of the residuals of all devices, a tree as the parameters; None if there are none."""
    errors = {
        path[-2].key: x
        for path, x in jax.tree.leaves_with_path(state)
        if getattr(path[-1], "key", None) == "error"
    }
    if not errors:
        return None
    if layout.other_axes:
        raise ValueError(
            "the residuals are those of blocks of parameters, which the mesh axes "
            f"{sorted(layout.other_axes)} shard, and cannot be applied at once. Train with the "
            "sync that they belong to, or drop its state (docs: how_to/compress)."
        )

    def owed(error: Any, x: Array, dim: int) -> jax.Array:
        if error is None:
            return jnp.zeros(x.shape, x.dtype)
        error = jnp.sum(error, axis=0)  # (devices of a replica, ...)
        if dim and layout.replica_axes:
            return jnp.concatenate(list(error), axis=dim)
        return jnp.sum(error, axis=0)

    leaves, treedef = jax.tree.flatten(params)
    dims = treedef.flatten_up_to(placed.dims)

    @jax.jit
    def all_owed(errors: list[Any], leaves: list[Any]) -> Tree:
        return treedef.unflatten(list(map(owed, errors, leaves, dims)))

    return all_owed([errors.get(name) for name in leaf_names(params)], leaves)


# --- In a train state -----------------------------------------------------------------------------


def has_sync_state(state: Tree) -> bool:
    opt_states = state[1:2] if isinstance(state, tuple) else [getattr(state, "opt_state", None)]
    return any(isinstance(x, SyncedState) for x in opt_states)


def split_sync_state(state: Tree) -> tuple[Any, Any]:
    """A train state with the transformation's own ``opt_state``, and the state of the sync."""
    if not has_sync_state(state):
        return state, None
    both = opt_state_of(state)
    return with_opt_state(state, both.inner_state), both.sync_state


def join_sync_state(state: Tree, sync_state: Tree) -> Any:
    if sync_state is None:
        return state
    return with_opt_state(state, SyncedState(opt_state_of(state), sync_state))
