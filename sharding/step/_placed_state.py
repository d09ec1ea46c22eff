"""Where the arrays of a train state are, and what ``Zero`` does with it outside of steps."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from sharding._types import Array, Tree
from sharding.offload._host_memory import copy_to, host_shardings, is_offloaded
from sharding.placement import _train_state
from sharding.placement._describe import Description, describe_tree
from sharding.placement._layout import Layout, Placement
from sharding.placement._on_mesh import no_mesh, on_mesh, step_context
from sharding.placement._specs import absent_axes, path_str, sharding_on
from sharding.placement._state_specs import state_specs
from sharding.step._batch_rows import describe_rows
from sharding.step._checks import check_alive, check_compiled, check_makes, check_not_streamed
from sharding.step._step_plan import StepSpec
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
from sharding.step._update import shard_update, update
from sharding.step.flax._nnx import train_state

P = PartitionSpec
Tx: TypeAlias = optax.GradientTransformation | None  # of a train state that is a pair
_OF_EXISTING = "of a state that exists, zero.init(lambda: state)"


class StateMethods:
    """What ``Zero`` does with train states: makes, describes, converts and places them."""

    def specs(self: Any, state: Tree, *, tx: Tx = None, param_specs: Tree = None) -> Any:
        """The partition spec of every array of a train state.

        Args:
          state: a Flax ``TrainState`` or a pair ``(params, opt_state)``, real or abstract.
          tx: the transformation, for a pair.
          param_specs: specs of the parameters on the other mesh axes: a tree, or a prefix of one.
            None takes them from sharded arrays, else from Flax metadata, else replicates.

        Raises:
          ValueError: if the state is of neither kind, or a spec does not fit.
        """
        state, sync_state = split_sync_state(with_sync(self, state, param_specs))
        params, opt_state, tx = _train_state.parts(state, tx)
        placed = self._layout.place(params, param_specs)
        opt_specs = state_specs(tx, params, placed.shards, self.mesh)
        expected, structure = jax.tree.structure(opt_specs), jax.tree.structure(opt_state)
        if expected != structure:
            # The first array that the other lacks; types, where none does.
            trees = opt_specs, opt_state
            paths = [[path_str(path) for path, _ in jax.tree.leaves_with_path(x)] for x in trees]
            names = zip(paths, paths[::-1], (expected, structure), strict=True)
            wanted, found = (next((x for x in a if x not in b), str(t)) for a, b, t in names)
            raise ValueError(
                "the optimizer state is not that of tx.init(params) (docs: how_to/eight_bits). "
                f"Expected {wanted}; found {found}."
            )
        if isinstance(state, tuple):
            new: Any = (placed.params, opt_specs)
        else:
            new = jax.tree.map(lambda _: P(), state)
            new = new.replace(params=placed.params, opt_state=opt_specs)
        return join_sync_state(new, jax.tree.map(lambda _: sync_spec(self._layout), sync_state))

    def shardings(self: Any, state: Tree, *, tx: Tx = None, param_specs: Tree = None) -> Any:
        """``specs`` as ``NamedSharding`` on the mesh: for ``device_put``, or to restore into."""
        return shardings_of(self, state, self.specs(state, tx=tx, param_specs=param_specs))

    def describe(
        self: Any, state: Tree, *, tx: Tx = None, param_specs: Tree = None, trainable: Tree = None
    ) -> Description:
        """The placement of a state, or of ``(nnx model, optimizer)``, with bytes per device.

        Arguments are those of ``specs``, and ``trainable`` of ``train_step``: only parameters that
        are trained have gradients. A step has a ``describe`` of its own, which knows both.
        """
        absent = absent_axes(self.mesh, state)
        state, param_specs = train_state(self, state, param_specs)
        layout = self._layout
        state = with_sync(self, state, param_specs)
        both = state, self.specs(state, tx=tx, param_specs=param_specs)
        (state, sync_state), (state_specs, sync_specs) = map(split_sync_state, both)
        params, opt_state, _ = _train_state.parts(state, tx)
        param_specs, opt_specs, _ = _train_state.parts(state_specs, tx)
        placed = layout.place(params, param_specs)
        grads = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, self.precision.of_result(x.dtype)), params
        )
        # At stage 1 gradients of several micro-batches are unsharded until they are reduced.
        grad_specs = placed.shards if self.stage >= 2 else param_specs
        reasons = jax.tree.leaves(placed.reasons)
        own_reasons = reasons if self.stage == 3 else None
        rows = describe_tree("params", params, param_specs, self.mesh, own_reasons)
        rows = _in_host_memory(self, rows, params) if self.offload == "all" else rows
        of_grads = describe_tree("grads", grads, grad_specs, self.mesh, reasons)
        trained = jax.tree.leaves(_train_state.resolve_trainable(params, trainable))
        rows += itertools.compress(of_grads, trained)
        of_state = describe_tree("opt_state", opt_state, opt_specs, self.mesh, params=params)
        rows += _in_host_memory(self, of_state, opt_state)
        rows += describe_tree("sync", sync_state, sync_specs, self.mesh)
        if not isinstance(state, tuple):
            others = state.replace(step=None, params=None, opt_state=None)
            others = jax.tree.map(_type_of, others)
            replicated = [P()] * len(jax.tree.leaves(others))
            rows += describe_tree("model_state", others, replicated, self.mesh)
        axes, shown = (layout.axes, layout.replica_axes), (tuple(rows), describe_rows(layout))
        options: Any = layout.gather_group_bytes, self.gathered_blocks, tuple(absent)
        return Description(self.mesh, self.stage, *axes, *shown, *options)

    def init(
        self: Any,
        make_state: Callable[..., Any],
        *args: Any,
        tx: Tx = None,
        param_specs: Tree = None,
    ) -> Any:
        """Makes a train state, each device its shard; its values do not depend on the mesh.

        Args:
          make_state: a function of ``args``, such as a random key, that returns a state of
            ``specs``.
          *args: its arguments.
          tx: the transformation, for a pair.
          param_specs: see ``specs``, for errors too.
        """
        check_makes("init", make_state, _OF_EXISTING)

        def make_all(*args: Any) -> Any:
            return with_sync(self, make_state(*args), param_specs, real=True)

        check_compiled()
        # One function, traced once: a TrainState whose tx it makes is equal to itself alone.
        make = _on_mesh(self, make_all)
        types = _abstract_state(self, make, args, tx, param_specs)
        out_shardings = jax.tree.map(lambda x: x.sharding, types)
        with step_context(self._layout):
            run = jax.jit(make, out_shardings=out_shardings)
            return run(*self._layout.replicate_foreign(args))

    def abstract_state(
        self: Any,
        make_state: Callable[..., Any],
        *args: Any,
        tx: Tx = None,
        param_specs: Tree = None,
        sync_devices: int | None = None,
    ) -> Any:
        """The train state that ``init`` would make of these arguments, as types, to restore into.

        ``sync_devices`` is how many devices synchronized gradients when the checkpoint was written,
        if that differs; ``resize_sync`` converts the restored state. Other mesh axes keep their
        sizes.
        """
        check_makes("abstract_state", make_state, _OF_EXISTING)
        types = _abstract_state(self, _on_mesh(self, make_state), args, tx, param_specs)
        if sync_devices is None:
            return types
        plain, sync_state = split_sync_state(types)
        return join_sync_state(plain, types_for_devices(self._layout, sync_state, sync_devices))

    def resize_sync(self: Any, state: Tree) -> Any:
        """Converts the gradient sync's state of another number of devices.

        The sum of all residuals stays; each device starts with an equal part of it. ``state`` is
        restored into ``abstract_state(..., sync_devices=...)``, the result placed as by ``init``.

        Raises:
          ValueError: if the sync has no state, or more differs than that number.
        """
        plain, sync_state = split_sync_state(state)
        _, types = split_sync_state(with_sync(self, plain, None))
        with no_mesh():
            return join_sync_state(plain, resize_sync_state(self._layout, sync_state, types))

    def change_sync(self: Any, state: Tree, *, tx: Tx = None, param_specs: Tree = None) -> Any:
        """Makes a train state of another gradient sync, or of none, one of this sync.

        Its residuals are applied as the gradient of one more update; other state of that sync is
        dropped. ``state`` is placed as by ``init``; other arguments are those of ``specs``.

        Raises:
          ValueError: where residuals are those of blocks that other mesh axes shard.
        """
        plain, other = split_sync_state(state)
        placed = self._layout.place(_train_state.params_of(plain), param_specs)
        owed = owed_gradients(self._layout, other, _train_state.params_of(plain), placed)
        if owed is not None:
            without = dataclasses.replace(self, sync=None)
            plain = without.apply_gradients(plain, owed, tx=tx, param_specs=param_specs)
        state = with_sync(self, plain, param_specs, real=True)
        return jax.device_put(state, self.shardings(state, tx=tx, param_specs=param_specs))

    def full_params(self: Any, state: Tree) -> Any:
        """The unsharded parameters, gathered one at a time, as NumPy arrays in each process.

        Those of an nnx model are a state for ``nnx.update``.
        """
        params = _train_state.params_of(train_state(self, state)[0])
        check_alive(params)
        with no_mesh():
            return _train_state.full_tree(params)

    def replicate(self: Any, tree: Tree) -> Any:
        """Places arrays, the same on all processes, on every device: such as a model state."""
        return self._layout.copy(tree, self._layout.replicated)

    def place(self: Any, tree: Tree, *, param_specs: Tree = None) -> Any:
        """Places a tree as parameters are at this stage: a second model, or an average of one.

        Args:
          tree: of real arrays, the same on all processes; or of types, which get their shardings.
          param_specs: specs on the other mesh axes; None as in ``specs``.

        Returns:
          The tree, in memory of its own, with ``offload="all"`` its stacks in host memory.
          ``eval_step`` takes it as ``(tree, None)``, beside the parameters as ``((params, tree),
          None)``, ``value_and_grad`` as ``(params, tree)``, with ``trainable=(True, False)`` for no
          gradient.
        """
        layout = self._layout
        axes = layout.axes if self.stage == 3 else ()

        def without_data_axes(x: Array) -> Any:
            sharding = sharding_on(x, self.mesh)
            if sharding is None:
                return _type_of(x)
            own = NamedSharding(self.mesh, layout.keep_axes(sharding.spec, axes))
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own)

        types = jax.tree.map(without_data_axes, tree)
        shardings = param_shardings(self, types, layout.place(types, param_specs).params)
        is_abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree))
        with no_mesh():
            return copy_to(layout, types if is_abstract else tree, shardings)

    def apply_gradients(
        self: Any,
        state: Tree,
        grads: Tree,
        *,
        tx: Tx = None,
        trainable: Tree = None,
        param_specs: Tree = None,
        extra_args: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Any:
        """Updates a train state with gradients from ``value_and_grad``, each device its shard.

        Args:
          state: a ``TrainState``, or a pair ``(params, opt_state)``.
          grads: a tree as the parameters.
          tx: the transformation, for a pair.
          param_specs: see ``value_and_grad``.
          trainable: which parameters may change.
          extra_args: passed on to ``tx.update`` if it takes them, such as ``value``.
          **fields: further fields of a ``TrainState`` to replace, such as ``batch_stats``.
        """
        check_not_streamed(self)
        check_alive(state, grads=grads, extra_args=extra_args)
        state = self._layout.place_scalars(state)
        shardings, placed, opt_specs = places(self, state, tx, param_specs)
        trained = _train_state.resolve_trainable(_train_state.params_of(state), trainable)
        options = self.precision, placed, trained, self.sync, opt_specs

        def run(layout: Layout, state: Tree, grads: Tree, extra_args: Any) -> Any:
            state, sync_state = split_sync_state(state)
            spec = StepSpec(layout, *options)
            transform = functools.partial(
                shard_update(spec, _train_state.parts(state, tx)[2]), extra_args
            )
            new = update(spec, state, grads, transform)
            return join_sync_state(new, sync_state)

        with no_mesh():
            new = on_mesh(self._layout, run, lambda _: shardings)(state, grads, extra_args or {})
        return new.replace(**fields) if fields else new


def with_sync(zero: Any, state: Tree, param_specs: Tree, real: bool = False) -> Any:
    """A state with that of the gradient sync, if it has one: its types, or ``real`` arrays."""
    if zero.sync is None or has_sync_state(state):
        return state
    params = _train_state.params_of(state)
    placed = zero._layout.place(params, param_specs)
    sync_state = sync_state_types(zero._layout, zero.sync, params, placed)
    if real and sync_state is not None:
        types = local_gradients(zero._layout, params, placed)
        sync_state = init_sync_state(zero.sync, zero._layout, types)
    return join_sync_state(state, sync_state)


def shardings_of(zero: Any, state: Tree, specs: Tree) -> Any:
    """The shardings of a state with these specs; offloaded state is in host memory."""
    shardings = zero._layout.shardings(specs)
    if zero.offload is None:
        return shardings
    shardings, sync = split_sync_state(shardings)
    state, options = split_sync_state(state)[0], (zero.offload, zero.offload_min_size)
    moved = _train_state.opt_state_of(shardings)
    moved = host_shardings(moved, _train_state.opt_state_of(state), *options)
    own = _train_state.params_of(split_sync_state(specs)[0])
    params = param_shardings(zero, _train_state.params_of(state), own)
    return join_sync_state(
        _train_state.with_params(_train_state.with_opt_state(shardings, moved), params), sync
    )


def param_shardings(zero: Any, params: Tree, specs: Tree) -> Any:
    """The shardings of parameters, or their gradients; stacks are perhaps in host memory."""
    shardings = zero._layout.shardings(specs)
    if zero.offload != "all":
        return shardings
    return host_shardings(shardings, params, zero.offload, zero.offload_min_size)


def places(zero: Any, state: Tree, tx: Tx, param_specs: Tree = None) -> tuple[Any, Placement, Any]:
    """Shardings of a state, the placement of its parameters, and specs of ``tx``'s state."""
    state_specs = zero.specs(state, tx=tx, param_specs=param_specs)
    plain, sync_state = split_sync_state(state)
    check_sync_state(sync_state, split_sync_state(with_sync(zero, plain, param_specs))[1])
    param_specs, opt_specs, _ = _train_state.parts(split_sync_state(state_specs)[0], tx)
    placed = zero._layout.place(_train_state.params_of(state), param_specs)
    return shardings_of(zero, state, state_specs), placed, opt_specs


def _in_host_memory(zero: Any, rows: Any, tree: Tree) -> list[Any]:
    """Rows of a description, those of offloaded arrays marked as such."""
    options = zero.offload, zero.offload_min_size
    return [
        dataclasses.replace(row, memory="host") if is_offloaded(x, *options) else row
        for row, x in zip(rows, jax.tree.leaves(tree), strict=True)
    ]


def _abstract_state(
    zero: Any, make: Callable[..., Any], args: Any, tx: Tx, param_specs: Tree
) -> Any:
    """The types, with shardings, of what a function of ``_on_mesh`` makes."""
    with step_context(zero._layout):
        types = with_sync(zero, jax.eval_shape(make, *args), param_specs)
    shardings = zero.shardings(types, tx=tx, param_specs=param_specs)
    return jax.tree.map(lambda x, to: x.update(sharding=to, weak_type=False), types, shardings)


def _on_mesh(zero: Any, make_state: Callable[..., Any]) -> Callable[..., Any]:
    """A model may name axes of the mesh where it is made, or, as Flax metadata do, others."""
    layout = zero._layout

    def make_there(*args: Any) -> Any:
        try:
            return make_state(*args)
        except ValueError as error:
            if "is not found in mesh" not in str(error):
                raise
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return make_state(*args)

    if not layout.explicit_axes:
        return make_there
    made: list[Any] = []  # the structure as first traced, which that of another trace differs from

    def leaves_of(_: Layout, *args: Any) -> list[Any]:
        leaves, treedef = jax.tree.flatten(make_there(*args))
        made.append(treedef)
        return leaves

    run = on_mesh(layout, leaves_of, lambda leaves: [layout.replicated] * len(leaves))

    def make(*args: Any) -> Any:
        leaves = run(*args)
        return made[0].unflatten(leaves)

    return make


def _type_of(x: Array) -> Any:
    """The shape and dtype of an array, or of a Python number."""
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return x
    return jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.canonicalize_dtype(np.result_type(x)))
