"""Where the arrays of a train state are, that of the gradient sync among them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import tree_leaves_with_path

from sharding._types import Array, Tree
from sharding.offload._host_memory import host_shardings, is_offloaded
from sharding.placement._describe import Description, describe_tree
from sharding.placement._layout import Placement
from sharding.placement._on_mesh import no_mesh, on_mesh, step_context
from sharding.placement._specs import path_str, sharding_on
from sharding.placement._state_specs import state_specs
from sharding.placement._train_state import (
    opt_state_of,
    params_of,
    parts,
    with_opt_state,
    with_params,
)
from sharding.step._batch_rows import describe_rows
from sharding.step._checks import check_compiled
from sharding.step._sync_state import (
    check_sync_state,
    has_sync_state,
    init_sync_state,
    join_sync_state,
    local_gradients,
    owed_gradients,
    resize_sync_state,
    split_sync_state,
    sync_spec,
    sync_state_types,
    types_for_devices,
)

P = PartitionSpec


def with_sync(zero: Any, state: Tree, param_specs: Tree, real: bool = False) -> Any:
    """A state with that of the gradient sync, if it has one: its types, or ``real`` arrays."""
    if zero.sync is None or has_sync_state(state):
        return state
    params = params_of(state)
    placed = zero._layout.place(params, param_specs)
    sync_state = sync_state_types(zero._layout, zero.sync, params, placed)
    if real and sync_state is not None:
        types = local_gradients(zero._layout, params, placed)
        sync_state = init_sync_state(zero.sync, zero._layout, types)
    return join_sync_state(state, sync_state)


def specs(zero: Any, state: Tree, tx: Any, param_specs: Tree) -> Any:
    """See ``Zero.specs``."""
    state, sync_state = split_sync_state(with_sync(zero, state, param_specs))
    params, opt_state, tx = parts(state, tx)
    placed = zero._layout.place(params, param_specs)
    opt_specs = state_specs(tx, params, placed.shards, zero.mesh)
    expected, structure = jax.tree.structure(opt_specs), jax.tree.structure(opt_state)
    if expected != structure:
        # The first array that the other lacks; types, where none does.
        paths = [[path_str(p) for p, _ in tree_leaves_with_path(x)] for x in (opt_specs, opt_state)]
        names = zip(paths, paths[::-1], (expected, structure), strict=True)
        wanted, found = (next((x for x in a if x not in b), str(types)) for a, b, types in names)
        raise ValueError(
            "the optimizer state is not that of tx.init(params) (docs: how_to/eight_bits). "
            f"Expected {wanted}; found {found}."
        )
    if isinstance(state, tuple):
        new: Any = (placed.params, opt_specs)
    else:
        new = jax.tree.map(lambda _: P(), state)
        new = new.replace(params=placed.params, opt_state=opt_specs)
    return join_sync_state(new, jax.tree.map(lambda _: sync_spec(zero._layout), sync_state))


def shardings_of(zero: Any, state: Tree, specs: Tree) -> Any:
    """The shardings of a state with these specs; offloaded state is in host memory."""
    shardings = zero._layout.shardings(specs)
    if zero.offload is None:
        return shardings
    shardings, sync = split_sync_state(shardings)
    state, options = split_sync_state(state)[0], (zero.offload, zero.offload_min_size)
    params, moved = params_of(shardings), opt_state_of(shardings)
    moved = host_shardings(moved, opt_state_of(state), *options)
    if zero.offload == "all":
        params = host_shardings(params, params_of(state), *options)
    return join_sync_state(with_params(with_opt_state(shardings, moved), params), sync)


def places(
    zero: Any, state: Tree, tx: optax.GradientTransformation | None, param_specs: Tree = None
) -> tuple[Any, Placement, Any]:
    """Shardings of a state, the placement of its parameters, and specs of ``tx``'s state."""
    state_specs = specs(zero, state, tx, param_specs)
    plain, sync_state = split_sync_state(state)
    check_sync_state(sync_state, split_sync_state(with_sync(zero, plain, param_specs))[1])
    param_specs, opt_specs, _ = parts(split_sync_state(state_specs)[0], tx)
    placed = zero._layout.place(params_of(state), param_specs)
    return shardings_of(zero, state, state_specs), placed, opt_specs


def describe(zero: Any, state: Tree, tx: Any, param_specs: Tree) -> Description:
    """See ``Zero.describe``."""
    layout = zero._layout
    state = with_sync(zero, state, param_specs)
    both = state, specs(zero, state, tx, param_specs)
    (state, sync_state), (state_specs, sync_specs) = map(split_sync_state, both)
    params, opt_state, _ = parts(state, tx)
    param_specs, opt_specs, _ = parts(state_specs, tx)
    placed = layout.place(params, param_specs)
    grads = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, zero.precision.of_result(x.dtype)), params
    )
    # At stage 1 gradients of several micro-batches are unsharded until they are reduced.
    grad_specs = placed.shards if zero.stage >= 2 else param_specs
    reasons = jax.tree.leaves(placed.reasons)
    own_reasons = reasons if zero.stage == 3 else None
    rows = describe_tree("params", params, param_specs, zero.mesh, own_reasons)
    rows = _in_host_memory(zero, rows, params) if zero.offload == "all" else rows
    rows += describe_tree("grads", grads, grad_specs, zero.mesh, reasons)
    of_state = describe_tree("opt_state", opt_state, opt_specs, zero.mesh, params=params)
    rows += _in_host_memory(zero, of_state, opt_state)
    rows += describe_tree("sync", sync_state, sync_specs, zero.mesh)
    if not isinstance(state, tuple):
        others = state.replace(step=None, params=None, opt_state=None)
        others = jax.tree.map(_type_of, others)
        replicated = [P()] * len(jax.tree.leaves(others))
        rows += describe_tree("model_state", others, replicated, zero.mesh)
    axes = layout.axes, layout.replica_axes
    group = layout.gather_group_bytes
    described = Description(zero.mesh, zero.stage, *axes, tuple(rows), describe_rows(layout), group)
    return dataclasses.replace(described, view=zero.view)


def _in_host_memory(zero: Any, rows: Any, tree: Tree) -> list[Any]:
    """Rows of a description, those of offloaded arrays marked as such."""
    options = zero.offload, zero.offload_min_size
    return [
        dataclasses.replace(row, memory="host") if is_offloaded(x, *options) else row
        for row, x in zip(rows, jax.tree.leaves(tree), strict=True)
    ]


def init(
    zero: Any, make_state: Callable[..., Any], args: tuple[Any, ...], tx: Any, param_specs: Tree
) -> Any:
    """See ``Zero.init``."""
    make = make_state
    if zero.sync is not None:

        def make(*args: Any) -> Any:
            return with_sync(zero, make_state(*args), param_specs, real=True)

    check_compiled()
    # One function, traced once: a TrainState whose tx it makes is equal to itself alone.
    types = abstract(zero, make, args, tx, param_specs)
    out_shardings = jax.tree.map(lambda x: x.sharding, types)
    with step_context(zero._layout, keep=zero.mesh):
        run = jax.jit(_on_mesh(zero, make), out_shardings=out_shardings)
        return run(*zero._layout.replicate_foreign(args))


def _on_mesh(zero: Any, make_state: Callable[..., Any]) -> Callable[..., Any]:
    """In the global view a model may name axes of the mesh where it is made."""
    layout = zero._layout
    if zero.view == "device" or not layout.explicit_axes:
        return make_state

    def replicated(out: Tree) -> Any:
        return jax.tree.map(lambda _: layout.replicated, out)

    return on_mesh(layout, lambda _, *args: make_state(*args), replicated)


def abstract(
    zero: Any,
    make_state: Callable[..., Any],
    args: tuple[Any, ...],
    tx: Any,
    param_specs: Tree,
    sync_devices: int | None = None,
) -> Any:
    """See ``Zero.abstract_state``."""
    with step_context(zero._layout, keep=zero.mesh):
        types = with_sync(zero, jax.eval_shape(_on_mesh(zero, make_state), *args), param_specs)
    shardings = zero.shardings(types, tx=tx, param_specs=param_specs)
    types = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        types,
        shardings,
    )
    if sync_devices is None:
        return types
    plain, sync_state = split_sync_state(types)
    return join_sync_state(plain, types_for_devices(zero._layout, sync_state, sync_devices))


def resize_sync(zero: Any, state: Tree) -> Any:
    """See ``Zero.resize_sync``."""
    plain, sync_state = split_sync_state(state)
    _, types = split_sync_state(with_sync(zero, plain, None))
    with no_mesh():
        return join_sync_state(plain, resize_sync_state(zero._layout, sync_state, types))


def change_sync(zero: Any, state: Tree, tx: Any, param_specs: Tree) -> Any:
    """See ``Zero.change_sync``."""
    plain, other = split_sync_state(state)
    placed = zero._layout.place(params_of(plain), param_specs)
    owed = owed_gradients(zero._layout, other, params_of(plain), placed)
    if owed is not None:
        without = dataclasses.replace(zero, sync=None)
        plain = without.apply_gradients(plain, owed, tx=tx, param_specs=param_specs)
    state = with_sync(zero, plain, param_specs, real=True)
    return jax.device_put(state, zero.shardings(state, tx=tx, param_specs=param_specs))


def place(zero: Any, tree: Tree, param_specs: Tree) -> Any:
    """See ``Zero.place``."""
    layout = zero._layout
    axes = layout.axes if zero.stage == 3 else ()

    def without_data_axes(x: Array) -> Any:
        sharding = sharding_on(x, zero.mesh)
        if sharding is None:
            return _type_of(x)
        own = NamedSharding(zero.mesh, layout.keep_axes(sharding.spec, axes))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own)

    types = jax.tree.map(without_data_axes, tree)
    shardings = layout.shardings(layout.place(types, param_specs).params)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree)):
        return jax.tree.map(lambda x, to: x.update(sharding=to), types, shardings)
    with no_mesh():
        return layout.copy(tree, shardings)


def _type_of(x: Array) -> Any:
    """The shape and dtype of an array, or of a Python number."""
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return x
    return jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.canonicalize_dtype(np.result_type(x)))
