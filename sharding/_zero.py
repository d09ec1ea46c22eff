"""ZeRO: shards the optimizer state, gradients and parameters of any optax transformation."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from sharding.collectives._reduce_scatter import FORMS
from sharding.offload._host_memory import host_shardings, is_large
from sharding.placement._describe import Description, describe_tree
from sharding.placement._export import full_tree
from sharding.placement._layout import Layout, Placement
from sharding.placement._on_mesh import no_mesh, on_mesh, with_remedies
from sharding.placement._specs import AnyMesh, Axis, check_patterns, is_spec, path_str, sharding_on
from sharding.placement._state_specs import state_specs
from sharding.placement._train_state import (
    model_state_of,
    opt_state_of,
    params_of,
    parts,
    resolve_trainable,
    with_model_state,
    with_opt_state,
)
from sharding.recovery._peer_checkpoints import PeerCheckpoints
from sharding.recovery._step_copies import StepCopies
from sharding.step import _flax_linen, _flax_nnx, _local_norm
from sharding.step._check_loss import check_loss
from sharding.step._checks import check_alive, check_batch, check_compiled, check_placed
from sharding.step._compiled_step import CompiledStep, signature_of
from sharding.step._flax_modules import gathered_module
from sharding.step._gather_params import gather
from sharding.step._gathered_layers import gathered
from sharding.step._gradients import evaluate, gradients
from sharding.step._loss import Inputs, Loss, check_arguments
from sharding.step._precision import Precision
from sharding.step._put import data_shard, describe_rows, put
from sharding.step._rng import step_key
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
from sharding.step._update import global_norm, update
from sharding.step._update_traits import update_traits
from sharding.sync import GradientSync

P = PartitionSpec


@dataclasses.dataclass(frozen=True)
class Zero:
    """Data parallelism without replicated optimizer state, for any optax transformation (ZeRO).

    With n devices on ``axis``, Ψ bytes of parameters and as many of gradients, S of optimizer
    state, each device holds

    ===== ========== ======================== ================ ==========================
    stage parameters gradients                optimizer state  bytes sent per device and step
    ===== ========== ======================== ================ ==========================
    0     Ψ          Ψ                        S                2Ψ (n - 1) / n
    1     Ψ          Ψ until they are reduced S / n            2Ψ (n - 1) / n
    2     Ψ          Ψ / n                    S / n            (k + 1)Ψ (n - 1) / n
    3     Ψ / n      Ψ / n                    S / n            3kΨ (n - 1) / n
    ===== ========== ======================== ================ ==========================

    with k micro-batches. A step computes gradients on each device's shard of the batch,
    reduce-scatters them (stage 0: all-reduces), updates the shards and, at stages 1 and 2, gathers
    the parameters once. At stage 3 the loss gathers each layer's parameters where it uses them;
    ``gathered`` makes a model do so. At stage 2 it makes the backward pass reduce-scatter each
    layer's gradients as soon as they are known. The update sees arrays with their global shapes:
    every transformation computes what it computes on one device, up to rounding, and sums over
    shards become small reductions.

    Each parameter is sharded along its longest dim that no other mesh axis shards and that n
    divides. If that is the last dim, and its shards would not be multiples of 256 elements, another
    dim of at least 64 elements is preferred. A parameter that is small or has no such dim is left
    unsharded (see ``describe``). Other mesh axes are the user's: parameter specs on them are
    preserved.

    With ``replica_axis`` (hybrid sharding) each of its r devices holds a replica of all shards:
    the shards of the gradients are all-reduced over it, once a step. With
    ``shard_state_over_replicas`` they are reduce-scattered instead, each replica updates its shard,
    and the new parameters are gathered: S / (n r) for the same bytes on the wire.

    Attributes:
      mesh: the device mesh; Auto and Explicit axes both work.
      stage: 0 to 3.
      axis: the mesh axis, or axes, to shard over.
      replica_axis: the mesh axis, or axes, of replicas. The batch is sharded over ``axis`` and
        these.
      shard_state_over_replicas: shard gradients and optimizer state over the replicas, too;
        the placement of parameters stays the same.
      min_shard_size: parameters with fewer elements are not sharded.
      reshard_after_forward: at stage 3, free a layer's gathered parameters after its forward pass,
        and gather and compute the layer again in the backward pass. False stores them until then:
        one gather less, and all gathered layers in memory.
      precision: dtypes of computing, reducing, accumulating and gathering.
      scatter: the form of the reduce-scatter. ``"auto"`` chooses by platform, axes and size. On
        GPUs and CPUs it is XLA's (``"native"``). XLA:TPU turns that into an all-reduce, twice the
        bytes, unless it runs over one torus axis after the other (``"axes"``: make the mesh with
        the axes of the torus, ``axis=("x", "y")``); over one flat axis ``"ring"`` or
        ``"all_to_all"`` replace it.
      offload: ``"optimizer"`` stores the optimizer state, master weights included, in host memory
        (``pinned_host``), and streams it through the device in each step; see
        ``sharding.offload``.
      offload_min_size: with ``offload``, state arrays with fewer elements stay on the device.
      sync: the gradient synchronization, such as ``sharding.sync.powersgd(4)``; None sums
        gradients as they are. With a ``replica_axis``, replicas synchronize by it, and gradients
        are summed within a replica. Its state, such as error-feedback residuals, is part of the
        train state, in ``opt_state`` (``sharding.sync.SyncedState``). It receives gradients in the
        dtype of ``precision.reduce``. Stateful syncs run once per step, stateless ones at stages 2
        and 3 once per micro-batch; stage 3 without replicas requires a stateless sync. Of a
        parameter that other mesh axes shard, each device synchronizes its own block.
      unsharded: regular expressions; a parameter is left unsharded, and so is its state, if one is
        found in its path.
      gathered_blocks: the modules of a Flax linen model (or of an nnx model in ``nnx_train_step``)
        that at stage 3 gather their own parameters, and at stage 2 reduce their own gradients,
        without a change to the model: class names, or regular expressions of paths. Within a module
        that gathers, nested ones do not. Each must be found in the loss.

    Raises:
      ValueError: on a stage other than 0 to 3, an axis that is not in the mesh or named twice.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sharding as shd
      >>> zero = shd.Zero(jax.make_mesh((jax.device_count(),), ("data",)), stage=2)
      >>> tx = optax.adamw(1e-2)
      >>> def make_state(key):
      ...     params = {"w": jax.random.normal(key, (64, 128))}
      ...     return params, tx.init(params)
      >>> state = zero.init(make_state, jax.random.key(0), tx=tx)
      >>> step = zero.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), tx=tx)
      >>> state, metrics = step(state, zero.put(jnp.ones((8 * jax.device_count(), 64))))
      >>> metrics["loss"].shape
      ()

    References:
      Rajbhandari, Rasley, Ruwase, He: ZeRO: Memory Optimizations Toward Training Trillion
      Parameter Models, SC 2020, arXiv 1910.02054. Xu, Lee, Chen, Hechtman, Huang, Joshi, Krikun,
      Lepikhin, Ly, Maggioni, Pang, Shazeer, Wang, Wang, Wu, Chen: Automatic Cross-Replica Sharding
      of Weight Update in Data-Parallel Training, 2020, arXiv 2004.13336.
    """

    mesh: AnyMesh
    stage: int = 2
    axis: Axis = "data"
    replica_axis: Axis | None = None
    shard_state_over_replicas: bool = False
    min_shard_size: int = 4096
    reshard_after_forward: bool = True
    precision: Precision = Precision()
    scatter: str = "auto"
    offload: str | None = None
    offload_min_size: int = dataclasses.field(default=4096, kw_only=True)
    sync: GradientSync | None = None
    unsharded: str | tuple[str, ...] = ()
    gathered_blocks: str | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("unsharded", "gathered_blocks"):
            object.__setattr__(self, name, _patterns(name, getattr(self, name)))
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"stage must be 0, 1, 2 or 3, got {self.stage!r}.")
        if not self._layout.axes:
            raise ValueError("axis must name at least one mesh axis, got none.")
        named = self._layout.axes + self._layout.replica_axes
        for axis in named:
            if axis not in self.mesh.axis_names:
                raise ValueError(
                    f"axis {axis!r} is not in the mesh {self.mesh.axis_names}: name axes of the "
                    "mesh in Zero(mesh, axis=...), 'data' by default, and replica_axis."
                )
            if named.count(axis) > 1:
                raise ValueError(
                    f"axis {axis!r} is named twice: axis={self.axis!r}, "
                    f"replica_axis={self.replica_axis!r}. A mesh axis shards or replicates, once."
                )
        if self.shard_state_over_replicas and not (self._layout.replica_axes and self.stage):
            raise ValueError(
                "shard_state_over_replicas needs a replica_axis and stage 1, 2 or 3, got "
                f"replica_axis={self.replica_axis!r} and stage {self.stage}."
            )
        if self.scatter not in ("auto", *FORMS):
            raise ValueError(
                f"scatter must be 'auto' or one of {', '.join(FORMS)}, got {self.scatter!r}."
            )
        if self.offload not in (None, "optimizer"):
            raise ValueError(f"offload must be 'optimizer' or None, got {self.offload!r}.")
        if self.sync is not None and not isinstance(self.sync, GradientSync):
            raise ValueError(f"sync must be a GradientSync or None, got {self.sync!r}.")
        if self.precision.gather is not None and self.stage < 3:
            raise ValueError(
                f"precision.gather={self.precision.gather} is for stage 3, where a step gathers "
                f"parameters for the loss; at stage {self.stage} they are replicated between steps."
            )
        for name in ("min_shard_size", "offload_min_size"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}.")

    # --- Placement ----------------------------------------------------------------------------

    @property
    def num_shards(self) -> int:
        """The number of devices on ``axis``."""
        return self._layout.num_shards

    @property
    def num_devices(self) -> int:
        """The number of data-parallel devices: ``num_shards`` times the number of replicas."""
        return self._layout.num_devices

    @property
    def _layout(self) -> Layout:
        return Layout(
            self.mesh,
            self.stage,
            self.axis,
            self.replica_axis,
            self.shard_state_over_replicas,
            self.min_shard_size,
            self.scatter,
            tuple(self.unsharded),
        )

    @property
    def _recomputes(self) -> bool:
        """Whether layers that gather their parameters are computed again in the backward pass."""
        return self.stage == 3 and self.reshard_after_forward

    def specs(
        self,
        state: Any,
        *,
        tx: optax.GradientTransformation | None = None,
        param_specs: Any = None,
    ) -> Any:
        """The partition spec of every array of a train state.

        Args:
          state: a Flax ``TrainState`` or a pair ``(params, opt_state)``; real or abstract
            (``jax.eval_shape(make_state, ...)``).
          tx: the transformation, for a pair.
          param_specs: specs of the parameters on the other mesh axes: a tree, or a prefix of one.
            None takes them from arrays that are sharded already, else from Flax metadata, else
            replicates.

        Returns:
          The state with a ``PartitionSpec`` in place of each array.

        Raises:
          ValueError: if the state is of neither kind, or a spec does not fit.
        """
        state = self._with_sync(state, param_specs)
        state, sync_state = split_sync_state(state)
        params, opt_state, tx = parts(state, tx)
        placed = self._layout.place(params, param_specs)
        opt_specs = state_specs(tx, params, placed.shards, self.mesh)
        expected: Any = jax.tree.structure(opt_specs)
        found: Any = jax.tree.structure(opt_state)
        if expected != found:
            raise ValueError(
                f"the optimizer state is not that of tx.init(params): expected {expected}, "
                f"found {found}."
            )
        if isinstance(state, tuple):
            specs: Any = (placed.params, opt_specs)
        else:
            specs = jax.tree.map(lambda _: P(), state)
            specs = specs.replace(params=placed.params, opt_state=opt_specs)
        return join_sync_state(specs, jax.tree.map(lambda _: sync_spec(self._layout), sync_state))

    def _with_sync(self, state: Any, param_specs: Any, real: bool = False) -> Any:
        """A state with that of the gradient sync, if it has one: its types, or ``real`` arrays."""
        if self.sync is None or has_sync_state(state):
            return state
        sync, params = self.sync, params_of(state)
        placed = self._layout.place(params, param_specs)
        kept = sync_state_types(self._layout, sync, params, placed)
        if real and kept is not None:
            types = local_gradients(self._layout, params, placed)
            kept = init_sync_state(sync, self._layout, types)
        return join_sync_state(state, kept)

    def shardings(
        self,
        state: Any,
        *,
        tx: optax.GradientTransformation | None = None,
        param_specs: Any = None,
    ) -> Any:
        """``specs`` as ``NamedSharding`` on the mesh: for ``device_put``, or to restore into."""
        return self._shardings(state, self.specs(state, tx=tx, param_specs=param_specs))

    def _shardings(self, state: Any, specs: Any) -> Any:
        shardings = self._layout.shardings(specs)
        if self.offload is None:
            return shardings
        shardings, sync = split_sync_state(shardings)
        opt_state = opt_state_of(split_sync_state(state)[0])
        moved = host_shardings(opt_state_of(shardings), opt_state, self.offload_min_size)
        return join_sync_state(with_opt_state(shardings, moved), sync)

    def _places(
        self, state: Any, tx: optax.GradientTransformation | None, param_specs: Any = None
    ) -> tuple[Any, Placement, Any]:
        """Shardings of a state, the placement of its parameters, and specs of ``tx``'s state."""
        specs = self.specs(state, tx=tx, param_specs=param_specs)
        plain, found = split_sync_state(state)
        check_sync_state(found, split_sync_state(self._with_sync(plain, param_specs))[1])
        param_specs, opt_specs, _ = parts(split_sync_state(specs)[0], tx)
        placed = self._layout.place(params_of(state), param_specs)
        return self._shardings(state, specs), placed, opt_specs

    def describe(
        self,
        state: Any,
        *,
        tx: optax.GradientTransformation | None = None,
        param_specs: Any = None,
    ) -> Description:
        """The placement of a state: a row per array, bytes per device, and what is left unsharded.

        Args:
          state: real or abstract, as all arguments here: see ``specs``.
          tx: the transformation, for a pair.
          param_specs: specs of the parameters on the other mesh axes.

        Returns:
          A ``Description``; printed, groups of like parameters with totals on top; its
          ``table()`` has a line for each array.
        """
        state = self._with_sync(state, param_specs)
        specs = self.specs(state, tx=tx, param_specs=param_specs)
        (state, sync_state), (specs, sync_specs) = map(split_sync_state, (state, specs))
        params, opt_state, _ = parts(state, tx)
        param_specs, opt_specs, _ = parts(specs, tx)
        placed = self._layout.place(params, param_specs)
        grads = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, self.precision.of_result(x.dtype)), params
        )
        # At stage 1 gradients are unsharded until they are reduced.
        grad_specs = placed.shards if self.stage >= 2 else param_specs
        reasons = jax.tree.leaves(placed.reasons)
        rows = describe_tree(
            "params", params, param_specs, self.mesh, reasons if self.stage == 3 else None
        )
        rows += describe_tree("grads", grads, grad_specs, self.mesh, reasons)
        kept = describe_tree("opt_state", opt_state, opt_specs, self.mesh, params=params)
        for row, x in zip(kept, jax.tree.leaves(opt_state), strict=True):
            moved = self.offload and is_large(x, self.offload_min_size)
            rows.append(dataclasses.replace(row, memory="host") if moved else row)
        rows += describe_tree("sync", sync_state, sync_specs, self.mesh)
        if not isinstance(state, tuple):
            others = state.replace(step=None, params=None, opt_state=None)
            others = jax.tree.map(_type_of, others)
            replicated = [P()] * len(jax.tree.leaves(others))
            rows += describe_tree("model_state", others, replicated, self.mesh)
        axes, given = (self._layout.axes, self._layout.replica_axes), describe_rows(self._layout)
        return Description(self.mesh, self.stage, *axes, tuple(rows), given)

    # --- Training -----------------------------------------------------------------------------

    def init(
        self,
        make_state: Callable[..., Any],
        *args: Any,
        tx: optax.GradientTransformation | None = None,
        param_specs: Any = None,
    ) -> Any:
        """Makes a train state, each device its own shard of it.

        Args:
          make_state: a function of ``args`` that returns a Flax ``TrainState``, or a pair
            ``(params, opt_state)``.
          *args: its arguments, such as a random key.
          tx: the transformation, for a pair.
          param_specs: see ``specs``.

        Returns:
          The state, sharded; its values do not depend on the mesh.

        Raises:
          ValueError: as ``specs``.
        """
        make = make_state
        if self.sync is not None:

            def make(*args: Any) -> Any:
                return self._with_sync(make_state(*args), param_specs, real=True)

        check_compiled()
        # One function, traced once: a TrainState whose tx it makes is equal to itself alone.
        abstract = self.abstract_state(make, *args, tx=tx, param_specs=param_specs)
        out = jax.tree.map(lambda x: x.sharding, abstract)
        with no_mesh(keep=self.mesh):
            return jax.jit(make, out_shardings=out)(*self._layout.replicate_foreign(args))

    def abstract_state(
        self,
        make_state: Callable[..., Any],
        *args: Any,
        tx: optax.GradientTransformation | None = None,
        param_specs: Any = None,
        sync_devices: int | None = None,
    ) -> Any:
        """The train state that ``init`` would make, in types: what a checkpoint is restored into.

        Args:
          make_state: as all arguments: see ``init``.
          *args: arguments of ``make_state``.
          tx: the transformation, for a pair.
          param_specs: specs of the parameters on the other mesh axes.
          sync_devices: the number of devices that synchronized gradients when the checkpoint was
            written, if it differs; ``resize_sync`` converts the restored state. Other mesh axes
            must have the sizes that they had.

        Returns:
          The state with a ``ShapeDtypeStruct`` in place of each array: shape, dtype, and sharding
          on this mesh at this stage, whatever they were when a checkpoint was written.

        Raises:
          ValueError: as ``specs``.
        """
        with no_mesh(keep=self.mesh):
            abstract = self._with_sync(jax.eval_shape(make_state, *args), param_specs)
        abstract = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            abstract,
            self.shardings(abstract, tx=tx, param_specs=param_specs),
        )
        if sync_devices is None:
            return abstract
        plain, sync_state = split_sync_state(abstract)
        return join_sync_state(plain, types_for_devices(self._layout, sync_state, sync_devices))

    def resize_sync(self, state: Any) -> Any:
        """Converts the gradient sync's state of another number of devices.

        The sum of all residuals, which is what the updates still lack, stays the same; each device
        starts with an equal part of it.

        Args:
          state: as restored into ``abstract_state(..., sync_devices=...)``.

        Returns:
          The state, placed as by ``init``.

        Raises:
          ValueError: if the sync has no state, or more differs than the number of devices that
            synchronize: the shards of a replica, the other axes of the mesh, or the sync.
        """
        plain, sync_state = split_sync_state(state)
        _, types = split_sync_state(self._with_sync(plain, None))
        with no_mesh():
            return join_sync_state(plain, resize_sync_state(self._layout, sync_state, types))

    def change_sync(
        self, state: Any, *, tx: optax.GradientTransformation | None = None, param_specs: Any = None
    ) -> Any:
        """Makes a train state of another gradient sync, or of none, one of this sync.

        The residuals that the other sync has not sent are applied as the gradient of one more
        update; what else it stores, such as momentum, is left behind.

        Args:
          state: placed as by ``init``, apart from the state of the sync.
          tx: the transformation, for a pair.
          param_specs: see ``specs``.

        Returns:
          The state, with a new state of this sync.

        Raises:
          ValueError: where residuals are those of blocks that other mesh axes shard.
        """
        plain, other = split_sync_state(state)
        placed = self._layout.place(params_of(plain), param_specs)
        owed = owed_gradients(self._layout, other, params_of(plain), placed)
        if owed is not None:
            without = dataclasses.replace(self, sync=None)
            plain = without.apply_gradients(plain, owed, tx=tx, param_specs=param_specs)
        with_sync = self._with_sync(plain, param_specs, real=True)
        return jax.device_put(with_sync, self.shardings(with_sync, tx=tx, param_specs=param_specs))

    def full_params(self, state: Any) -> Any:
        """The unsharded parameters in host memory, for export.

        Each process gets all of them, as NumPy arrays. The devices gather one parameter at a time.

        Args:
          state: a Flax ``TrainState``, or a pair ``(params, opt_state)``.

        Returns:
          The tree of parameters.

        Raises:
          ValueError: if the state is of neither kind.
        """
        params = params_of(state)
        check_alive(params)
        with no_mesh():
            return full_tree(params)

    def data_shard(self) -> tuple[int, int]:
        """Which rows of a batch this process gives to ``put``.

        Returns:
          ``(index, count)``: shard ``index`` of ``count``, for a loader; for a batch in memory
          ``np.split(x, count)[index]``. Processes have the same shard where the other mesh axes,
          such as the stages of a pipeline, span them.

        Raises:
          ValueError: if this process has no device of the mesh, or the rows of two processes
            overlap.
        """
        return data_shard(self._layout)

    def put(self, batch: Any, *, check: bool = True) -> Any:
        """Places this process's rows of a batch on the mesh, sharded along the first dim.

        With several processes it is a collective: all call it, in the same order and from one
        thread, and it waits for steps before it. Each gives the shard of the rows that
        ``data_shard`` names.

        Args:
          batch: a tree of arrays; the first dim of each is the batch. Scalars are replicated.
            Other arrays that every device needs in full, such as class weights, belong in the
            model state, or in the closure of the loss.
          check: whether several processes compare what they give. Without it nothing waits, but
            rows that do not make one batch hang, or give wrong numbers.

        Returns:
          The tree as global arrays.

        Raises:
          ValueError: if the batch is empty, first dims differ, or one does not divide by this
            process's devices. In all processes, if that is so in one; if they give different
            numbers of rows, other arrays or other scalars; if two that have the same shard give
            different rows.
        """
        return put(self._layout, batch, check)

    def replicate(self, tree: Any) -> Any:
        """Places arrays on every device in full, such as a model state.

        Args:
          tree: a tree of arrays, the same on all processes.

        Returns:
          The tree as replicated global arrays, in memory of their own.
        """
        return self._layout.copy(tree, self._layout.replicated)

    def place(self, tree: Any, *, param_specs: Any = None) -> Any:
        """Places a tree as parameters are at this stage: a second model, or an average of one.

        Args:
          tree: of real arrays, wherever they are, the same on all processes; or of types.
          param_specs: specs on the other mesh axes; None as in ``specs``.

        Returns:
          The tree, in memory of its own. ``eval_step`` takes it as ``(tree, None)``, beside the
          parameters ``((params, tree), None)``; ``value_and_grad`` as ``(params, tree)``, where
          ``trainable=(True, False)`` leaves it without a gradient. At stage 3 it is gathered in
          the loss as the parameters are. Types get their shardings.

        Example:
          >>> import jax, jax.numpy as jnp, optax, sharding as shd
          >>> zero = shd.Zero(jax.make_mesh((jax.device_count(),), ("data",)), stage=3)
          >>> params = zero.place({"w": jnp.ones((64, 128))})
          >>> average = zero.place(params)
          >>> average = jax.jit(optax.incremental_update)(params, average, 0.01)
          >>> predict = zero.eval_step(zero.gathered(lambda params, x: x @ params["w"]))
          >>> predict((average, None), zero.put(jnp.ones((jax.device_count(), 64)))).shape[1]
          128
        """
        layout = self._layout
        kept = layout.axes if self.stage == 3 else ()

        def without_data_axes(x: Any) -> Any:
            sharding = sharding_on(x, self.mesh)
            if sharding is None:
                return _type_of(x)
            own = NamedSharding(self.mesh, layout.keep_axes(sharding.spec, kept))
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own)

        types = jax.tree.map(without_data_axes, tree)
        shardings = layout.shardings(layout.place(types, param_specs).params)
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree)):
            return jax.tree.map(lambda x, to: x.update(sharding=to), types, shardings)
        with no_mesh():
            return layout.copy(tree, shardings)

    def train_step(
        self,
        loss_fn: Callable[..., Any],
        *,
        tx: optax.GradientTransformation | None = None,
        has_aux: bool = False,
        weighted: bool = False,
        rngs: bool | str = False,
        model_state: str | tuple[str, ...] | bool = False,
        model_state_reduction: Any = "mean",
        microbatches: int = 1,
        trainable: Any = None,
        grad_norm: bool = False,
        sync_batch_norm: bool = True,
        snapshot: PeerCheckpoints | None = None,
        donate: bool = True,
    ) -> CompiledStep:
        """A compiled training step: ``step(state, batch) -> (state, metrics)``.

        Args:
          loss_fn: ``loss_fn(params, batch) -> loss``, the mean loss over one device's shard of the
            batch.
          tx: the transformation, where the state is a pair.
          has_aux: ``loss_fn`` returns ``(loss, aux)``. Scalars of ``aux`` are averaged over
            devices and micro-batches; arrays, whose first dim is the batch, are concatenated.
          weighted: the loss is a pair ``(sum, weight)``; both are added over devices and
            micro-batches and divided once, as masked tokens need. A total weight of zero gives a
            zero loss and zero gradients.
          rngs: ``loss_fn`` takes a random key as its last argument: ``key`` of the call, or
            ``jax.random.key(0)``, folded by the step and by the number of the micro-batch in the
            batch of all devices. A run draws the same on another number of devices if devices
            times ``microbatches`` stay the same. With ``"per_example"`` the argument is an array
            of keys, one for each example, for models under ``jax.vmap``: they depend on the step
            and on the place of the example in the batch alone, so that a run goes on as it was on
            any number of devices. A pair has no step count and requires a new ``key`` in each call.
          model_state: ``loss_fn`` takes a third argument beside the parameters and the batch,
            replicated and not differentiated (statistics, counters, tables, a teacher), and
            returns its new value: ``(loss, new)``, or with ``has_aux`` ``(loss, (new, aux))``. What
            it only reads, it returns unchanged. A string names the field of the ``TrainState`` that
            holds it; several names make a dict. With True each call passes it,
            ``step(state, batch, model_state=...)``, and its new value is
            ``metrics["model_state"]``. Micro-batches change it one after the other.
          model_state_reduction: how the new values of all devices are reduced: ``"mean"`` (for
            leaves that are not floating, the first device's value), ``"sum"`` (the old value plus
            what each device added), ``"same"`` (all are equal already); or a prefix tree of these.
            Leaves that the loss returns unchanged cost nothing.
          microbatches: the number of micro-batches into which each device splits its shard of the
            batch. Stages 2 and 3 reduce-scatter the gradients of each and accumulate shards; stages
            0 and 1 accumulate unsharded gradients and reduce once.
          trainable: which parameters are trained: a tree of bools, a prefix of one, or a function
            of the parameters that returns it, as optax takes masks. The others have no gradient,
            which the transformation sees as zeros, and never change; so that they have no state
            either, wrap the transformation in ``optax.masked``. Parameters that are not floating
            are never trained.
          grad_norm: add ``metrics["grad_norm"]``, the norm of the mean gradient of all trained
            parameters, before the transformation: a float in one more all-reduce.
          sync_batch_norm: ``flax.linen.BatchNorm`` takes its statistics over the micro-batch of all
            devices, as it does on one device, without an ``axis_name``; a sum of two vectors for
            each, forward and backward. False leaves the statistics to each device.
          snapshot: where ``store.save(...)`` leaves copying the saved state to the step that takes
            it, so that copies to host memory and to peers run beside the step's own work. A
            snapshot is that of the state before the step, under the number given to ``save``.
          donate: reuse the state's memory for the new state; the old one cannot be used again.

        Returns:
          ``step(state, batch, key=None, model_state=None) -> (state, metrics)``, with a ``lower``
          of the same arguments. ``metrics`` has ``"loss"``, with ``weighted`` also ``"weight"``
          (the total), with ``has_aux`` also ``"aux"``. A transformation that takes extra arguments
          gets ``value=loss``; one that reads ``local_squared_norm`` gets it with ``num_pieces``, as
          ``optax_ext.gradient_noise_scale`` requires: the mean of the squared norms of the
          gradients of each device and micro-batch, or at stage 3 of each replica and micro-batch,
          in proportion to their weights. That costs a float or two in the all-reduce of the loss;
          at stage 3 also a sum of the unsharded gradients for each micro-batch. With a lossy
          ``sync`` the transformation compares them with the synchronized mean.

        Raises:
          ValueError: on an unknown option. When called: if the state was donated to an earlier
            call, or is not placed as by ``init``; if a batch is empty, has first dims that differ
            or does not divide by devices times ``microbatches``; if a transformation requires
            ``local_squared_norm`` where there is only one gradient, or where a table is
            synchronized by rows; if the loss returns a model state of another structure.
        """
        loss = Loss(
            self._in_step(loss_fn, sync_batch_norm, model_state, rngs),
            has_aux,
            weighted,
            rngs,
            microbatches,
            model_state=bool(model_state),
            reduction=model_state_reduction,
        ).check()
        names = model_state if isinstance(model_state, str | tuple) else None

        if snapshot is not None:
            _check_same_devices(self.mesh, snapshot)
            snapshot.copy_in_steps()

        def compile_step(state: Any, batch: Any, copies: StepCopies | None) -> Any:
            shardings, placed, opt_specs = self._places(state, tx)
            check_placed(state, shardings)
            trained = resolve_trainable(params_of(state), trainable)
            spec = StepSpec(self.precision, placed, trained, self.sync)

            def step(
                layout: Layout, state: Any, batch: Any, key: Any, passed: Any, copied: Any = None
            ) -> tuple[Any, dict[str, Any]]:
                _check_passed(passed, model_state)
                key = step_key(state, key) if rngs in (True, "per_example") else key
                inputs = Inputs(batch, key, model_state_of(state, names) if names else passed)
                state, sync_state = split_sync_state(state)
                params, opt_state, own_tx = parts(state, tx)
                extra_args: dict[str, Any] = {}
                traits = update_traits(own_tx, params, opt_state, self.precision, trained)
                if traits.local_norm:
                    extra_args["num_pieces"] = _local_norm.num_local_gradients(layout, microbatches)
                own_loss = loss._replace(local_norm=traits.local_norm)
                early = traits.sums and layout.stage in (1, 2)
                found = gradients(layout, spec, own_loss, params, inputs, sync_state, early)
                metrics = found.metrics
                extra_args |= {"value": metrics["loss"], **metrics.pop("local", {})}
                if grad_norm:
                    metrics["grad_norm"] = global_norm(layout, found.grads, placed)
                if copied is not None:
                    # Without an order of copies and update, XLA duplicates what both access.
                    state, _ = jax.lax.optimization_barrier((state, copied))
                new = update(
                    layout, spec, opt_specs, state, found.grads, tx, extra_args, found.shards
                )
                if names:
                    new = with_model_state(new, names, found.model_state)
                elif model_state:
                    # Replicated, as the next call gets it, also where other axes shard features.
                    new_state = found.model_state
                    specs = jax.tree.map(lambda _: P(), new_state)
                    metrics["model_state"] = layout.constrain(new_state, specs)
                return join_sync_state(new, found.sync_state), metrics

            def out_shardings(out: Any) -> Any:
                metrics = self._layout.batch_shardings(out[1])
                if "model_state" in metrics:
                    metrics["model_state"] = jax.tree.map(
                        lambda _: self._layout.replicated, out[1]["model_state"]
                    )
                return shardings, metrics

            run = on_mesh(self._layout, step, out_shardings)
            inputs: tuple[Any, ...] = (
                shardings,
                self._layout.batch_shardings(batch),
                None,
                self._layout.replicated,
            )
            outputs: tuple[Any, Any] = (shardings, None)
            if copies is not None:
                run, inputs, outputs = copies.beside(run), (*inputs, None), (outputs, None)
            return jax.jit(
                run,
                in_shardings=inputs,
                out_shardings=outputs,
                donate_argnums=(0,) if donate else (),
            )

        def prepare(batch: Any) -> Any:
            check_batch(batch, self.num_devices, microbatches)
            return self._layout.place_batch(batch)

        return CompiledStep(
            compile_step,
            prepare,
            layout=self._layout,
            donates=donate,
            snapshot=snapshot,
        )

    def eval_step(
        self, fn: Callable[..., Any], *, model_state: str | tuple[str, ...] | bool = False
    ) -> CompiledStep:
        """A compiled function of the parameters and a batch.

        Args:
          fn: ``fn(params, batch)``, on one device's part of the batch, returns any tree. Scalars
            are averaged over the devices; arrays, whose first dim is the batch, are concatenated.
          model_state: ``fn`` takes a third argument, as in ``train_step``; it is only read.

        Returns:
          ``evaluate(state, batch, key=None, model_state=None) -> tree``, with a ``lower`` of the
          same arguments; ``key`` is not used. The state is as in ``train_step``; it is not
          donated.

        Raises:
          ValueError: when called with parameters that are not placed as by ``init``, or a
            batch that is empty, has first dims that differ or does not divide by the devices.
        """
        names = model_state if isinstance(model_state, str | tuple) else None
        fn = self._in_step(fn, True, model_state, all_blocks=False)

        def select(state: Any) -> Any:
            return params_of(state), model_state_of(state, names) if names else None

        def compile_eval(selected: Any, batch: Any, copies: StepCopies | None) -> Any:
            params, fields = selected
            placed = self._layout.place(params)
            shardings = (
                self._layout.shardings(placed.params),
                jax.tree.map(lambda _: self._layout.replicated, fields),
            )
            check_placed(selected, shardings)
            untrained = jax.tree.map(lambda _: False, params)
            spec = StepSpec(self.precision, placed, untrained, self.sync)

            def run(layout: Layout, selected: Any, batch: Any, key: Any, passed: Any) -> Any:
                del key
                _check_passed(passed, model_state)
                params, fields = selected
                args = (batch, fields if names else passed) if model_state else (batch,)
                return evaluate(layout, spec, fn, params, args)

            return jax.jit(
                on_mesh(self._layout, run, self._layout.batch_shardings),
                in_shardings=(
                    shardings,
                    self._layout.batch_shardings(batch),
                    None,
                    self._layout.replicated,
                ),
            )

        def prepare(batch: Any) -> Any:
            check_batch(batch, self.num_devices, 1)
            return self._layout.place_batch(batch)

        return CompiledStep(compile_eval, prepare, select, layout=self._layout)

    def check_loss(
        self,
        loss_fn: Callable[..., Any],
        state: Any,
        batch: Any,
        key: Any = None,
        *,
        model_state: Any = False,
        **options: Any,
    ) -> None:
        """Raises if a loss on this mesh is not that of one device: if it couples examples.

        A loss sees the rows of one device. The mean over devices is the loss of the batch if each
        example has a loss of its own; not for masked means, contrastive losses, or statistics of
        the batch. This runs value and gradient of one batch on the mesh, and on a single device,
        which has to hold the parameters twice: check a small model, and a batch of few rows that
        differ.

        Args:
          loss_fn: as for ``train_step``; of an nnx model as for ``nnx_train_step``.
          state: a train state, placed or not, or an nnx model.
          batch: as for the step.
          key: for ``rngs="per_example"``.
          model_state: the names of fields, as in ``train_step``, or the model state itself.
          **options: of ``value_and_grad``. With micro-batches, which the single device does not
            have, their coupling is checked too.

        Raises:
          ValueError: that names what differs, by how much, and what to do. Loss, gradients and
            new model state may differ by ``sqrt(eps)`` of their norms: 1.5e-8 where all arithmetic
            is float64, 3.5e-4 with float32, 9 % with bfloat16, where it finds large errors alone.

        Example:
          >>> import jax, jax.numpy as jnp, numpy as np, sharding as shd
          >>> zero = shd.Zero(jax.make_mesh((jax.device_count(),), ("data",)), stage=2)
          >>> def loss_fn(params, x):
          ...     return jnp.mean((x @ params["w"]) ** 2)
          >>> x = np.random.default_rng(0).normal(size=(2 * jax.device_count(), 8))
          >>> zero.check_loss(loss_fn, ({"w": jnp.ones((8, 4))}, None), x)
        """
        if _flax_nnx.is_module(state):
            loss_fn, state, model_state = _flax_nnx.pure_loss(self, loss_fn, state, options)
        names = (model_state,) if isinstance(model_state, str) else model_state
        if isinstance(names, tuple) and all(isinstance(name, str) for name in names):
            model_state = model_state_of(state, model_state)
        passed = None if model_state is False else model_state
        options = {"has_aux": False} | options | {"model_state": passed is not None}
        check_loss(self, loss_fn, params_of(state), (batch, key, passed), options)

    def _in_step(
        self,
        loss_fn: Callable[..., Any],
        sync_batch_norm: bool,
        model_state: Any,
        rngs: Any = False,
        all_blocks: bool = True,
    ) -> Callable[..., Any]:
        """A loss whose Flax modules know that the batch, and from stage 2 the model, is sharded."""
        check_arguments(loss_fn, "params", "batch", model_state=model_state, key=rngs)
        blocks = tuple(self.gathered_blocks) if self.stage >= 2 else ()
        axes = self._layout.data_axes
        unchecked = all_blocks

        @functools.wraps(loss_fn)
        def call(params: Any, *args: Any) -> Any:
            nonlocal unchecked
            context = _flax_linen.in_step(axes, sync_batch_norm, blocks, self._recomputes)
            with context as check_found:
                out = loss_fn(_flax_linen.without_names(params, axes), *args)
                if unchecked:  # the first trace alone: jax caches that of a jitted model
                    check_found()
                    unchecked = False
            return out

        return call

    # --- Flax nnx -----------------------------------------------------------------------------

    def nnx_init(self, make: Callable[..., Any], *args: Any, param_specs: Any = None) -> Any:
        """Makes an nnx model and its optimizer, each device its own shard of them.

        Args:
          make: a function of ``args`` that returns ``(model, nnx.Optimizer(model, tx, wrt=...))``.
          *args: its arguments, such as a random key; traced, so bind others with
            ``functools.partial``.
          param_specs: specs of the parameters on the other mesh axes; None takes their metadata.

        Returns:
          ``(model, optimizer)``; their values do not depend on the mesh.
        """
        with no_mesh(keep=self.mesh):
            return _flax_nnx.init(self, make, self._layout.replicate_foreign(args), param_specs)

    def nnx_train_step(
        self,
        loss_fn: Callable[..., Any],
        *,
        has_aux: bool = False,
        weighted: bool = False,
        rngs: bool = False,
        microbatches: int = 1,
        reductions: Mapping[type, str] = MappingProxyType({}),
        trainable: Any = None,
        grad_norm: bool = False,
        donate: bool = True,
    ) -> _flax_nnx.NnxStep:
        """A training step of an nnx model that updates it in place, as under ``nnx.jit``.

        Batch statistics, counters and all other variables come back into the model. ``nnx.Rngs``
        that the model holds draw anew for each micro-batch of each device and for each step.
        ``nnx.BatchNorm`` takes its statistics over the micro-batch of all devices, without an
        ``axis_name``. Variables that the loss creates, as ``sow`` does, are dropped: return them in
        ``aux``.

        Args:
          loss_fn: ``loss_fn(model, batch) -> loss``; it may change variables of the model.
          has_aux: as all arguments not listed here: see ``train_step``.
          weighted: the loss is a pair ``(sum, weight)``.
          rngs: ``loss_fn`` takes a key as its last argument, such as for ``nnx.Rngs(key)``.
          microbatches: the number of micro-batches of each device.
          reductions: how the variables of all devices are reduced, by their type, such as
            ``{Counter: "sum"}``; ``"mean"`` for all others.
          trainable: which of the parameters that the optimizer has are trained.
          grad_norm: add ``metrics["grad_norm"]``.
          donate: reuse the memory of parameters and optimizer state for the new ones. An
            ``nnx.clone`` of the model shares that memory, and is deleted by the step.

        Returns:
          ``step(model, optimizer, batch, key=None) -> metrics``, with a ``lower`` of the same
          arguments. Parameters are what the optimizer's ``wrt`` selects. A model that is on one
          device is placed on the mesh by the first call; ``nnx_init`` makes it there.

        Example:
          >>> import jax, jax.numpy as jnp, optax, sharding as shd
          >>> from flax import nnx
          >>> zero = shd.Zero(jax.make_mesh((jax.device_count(),), ("data",)), stage=2)
          >>> def make():
          ...     model = nnx.Sequential(nnx.Linear(64, 64, rngs=(r := nnx.Rngs(0))), nnx.relu)
          ...     return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
          >>> model, optimizer = zero.nnx_init(make)
          >>> step = zero.nnx_train_step(lambda model, x: jnp.mean(model(x) ** 2))
          >>> metrics = step(model, optimizer, zero.put(jnp.ones((8 * jax.device_count(), 64))))
          >>> int(optimizer.step[...])
          1
        """
        options = {
            "has_aux": has_aux,
            "weighted": weighted,
            "microbatches": microbatches,
            "trainable": trainable,
            "grad_norm": grad_norm,
            "donate": donate,
        }
        return _flax_nnx.NnxStep(self, loss_fn, rngs, reductions, options)

    def nnx_eval_step(
        self, fn: Callable[[Any, Any], Any], *, wrt: Any = None
    ) -> Callable[[Any, Any], Any]:
        """A compiled function of an nnx model and a batch; the model is only read.

        Args:
          fn: ``fn(model, batch)``, as in ``eval_step``.
          wrt: what selects the parameters, as in ``nnx.Optimizer``; None for ``nnx.Param``.

        Returns:
          ``evaluate(model, batch) -> tree``.
        """
        return _flax_nnx.eval_step(self, fn, wrt)

    # --- Layers, in the loss -----------------------------------------------------------------

    def gather(self, tree: Any) -> Any:
        """Gathers parameters where the loss uses them; their gradients are reduce-scattered.

        For use inside the loss, on any subtree of its parameters, such as one layer's in the body
        of a ``lax.scan`` over stacked layers. By itself it does not free the gathered parameters
        between the forward and the backward pass: ``gathered`` does. At stage 2 only the gradients
        are reduce-scattered; below it is the identity.

        Args:
          tree: parameters as the loss received them.

        Returns:
          The tree, unsharded.

        Raises:
          ValueError: at stage 3, if called anywhere else than in the loss.
        """
        inside = set(self._layout.data_axes) <= set(jax.sharding.get_abstract_mesh().manual_axes)
        if self.stage == 3 and not inside:
            paths = [path_str(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
            described = ", ".join(map(repr, paths[:3])) + (", ..." if len(paths) > 3 else "")
            raise ValueError(
                "zero.gather works in the loss of train_step, value_and_grad or eval_step, and was "
                f"called outside, on {described}. For unsharded parameters use "
                "zero.full_params(state); for a function that is also called outside, "
                "zero.gathered(fn)."
            )
        return gather(tree) if self.stage >= 2 else tree

    def gathered(
        self, target: Callable[..., Any], *, policy: Callable[..., bool] | None = None
    ) -> Any:
        """Makes a layer gather its own parameters in each call, and free them after it.

        The layer runs under ``jax.checkpoint``: the backward pass gathers and computes it again. A
        barrier keeps XLA from gathering a layer before its input exists. With
        ``reshard_after_forward=False`` there is no ``jax.checkpoint``.

        At stage 2 nothing is gathered or computed again: the backward pass reduce-scatters the
        gradients of the layer before it goes on to the layer below, so that unreduced gradients of
        all layers are never in memory together. Gradients are reduced after the backward pass where
        a parameter is used outside of the layer, in several calls, or in a branch; where ``sync``
        sums over the axes of shards; where the transformation needs the norms of local gradients;
        and where the loss does more with its parameters than to pass them to layers, such as to
        count them or to take derivatives by itself. Outside the loss of a step the target computes
        what it always does; below stage 2 it is unchanged.

        Args:
          target: a module class of ``flax.linen`` or ``flax.nnx``, whose ``__call__`` is meant
            (its subclass has the same name, fields and parameters), or a function whose first
            argument is a tree of parameters, such as the ``__call__`` of a module that is a
            pytree.
          policy: what ``jax.checkpoint`` may store; None for nothing. With
            ``jax.checkpoint_policies.dots_saveable`` matrix products are not computed again.

        Returns:
          A class or function to be used in place of the target.

        Raises:
          ValueError: if the target is a class of another kind.

        Example:
          >>> import jax, jax.numpy as jnp, optax, sharding as shd
          >>> zero = shd.Zero(jax.make_mesh((jax.device_count(),), ("data",)), stage=3)
          >>> block = zero.gathered(lambda p, x: x + jnp.tanh(x @ p["in"]) @ p["out"])
          >>> def loss_fn(params, x):
          ...     x, _ = jax.lax.scan(lambda x, p: (block(p, x), None), x, params)
          ...     return jnp.mean(x**2)
          >>> tx = optax.sgd(0.1)
          >>> def make_state():
          ...     params = {"in": jnp.ones((4, 64, 128)), "out": jnp.ones((4, 128, 64))}
          ...     return params, tx.init(params)
          >>> state = zero.init(make_state, tx=tx)
          >>> step = zero.train_step(loss_fn, tx=tx)
          >>> state, metrics = step(state, zero.put(jnp.ones((8 * jax.device_count(), 64))))
        """
        wrap: Any = gathered_module if isinstance(target, type) else gathered
        return wrap(target, policy, self._recomputes) if self.stage >= 2 else target

    # --- The parts, for a step of one's own ---------------------------------------------------

    def value_and_grad(
        self,
        loss_fn: Callable[..., Any],
        *,
        has_aux: bool = False,
        weighted: bool = False,
        rngs: bool | str = False,
        model_state: bool = False,
        model_state_reduction: Any = "mean",
        microbatches: int = 1,
        trainable: Any = None,
        param_specs: Any = None,
        sync_batch_norm: bool = True,
    ) -> Callable[..., Any]:
        """``jax.value_and_grad`` over the mesh, gradients reduced as the stage requires.

        Args:
          loss_fn: as all arguments not listed here: see ``train_step``.
          has_aux: ``loss_fn`` returns ``(loss, aux)``.
          weighted: the loss is a pair ``(sum, weight)``.
          rngs: ``loss_fn`` takes a key; here it is not folded by the step.
          model_state: ``loss_fn`` takes a model state, which each call passes.
          model_state_reduction: how the new values of all devices are reduced.
          microbatches: the number of micro-batches of each device.
          trainable: which parameters have a gradient; zeros for the others.
          param_specs: see ``specs``; required inside ``jit``, where arrays do not show them.
          sync_batch_norm: see ``train_step``.

        Returns:
          A function ``(params, batch, key=None, model_state=None)`` that returns ``(loss, grads)``;
          in place of the loss, with ``has_aux`` ``(loss, aux)``, with ``model_state``
          ``(loss, new)``, with both ``(loss, (new, aux))``. Good inside ``jit``.
        """
        loss = Loss(
            self._in_step(loss_fn, sync_batch_norm, model_state, rngs),
            has_aux,
            weighted,
            rngs,
            microbatches,
            model_state=model_state,
            reduction=model_state_reduction,
        ).check()
        takes_model_state = model_state
        compiled: dict[Any, Any] = {}

        def value_and_grad(
            params: Any, batch: Any, key: Any = None, model_state: Any = None
        ) -> Any:
            check_compiled()
            check_alive(params, batch=batch, key=key, model_state=model_state)
            _check_passed(model_state, takes_model_state)
            if rngs and key is None:
                raise ValueError("rngs requires a key: value_and_grad(...)(params, batch, key).")
            key, model_state = self._layout.replicate_foreign((key, model_state))
            check_batch(batch, self.num_devices, microbatches)
            placed = self._layout.place(params, param_specs)
            sync = self.sync
            if sync and sync_state_types(self._layout, sync, params, placed) is not None:
                raise ValueError(
                    "value_and_grad cannot return the state of the gradient sync; use train_step, "
                    "or sharding.sync.transformation in a shard_map of your own."
                )
            trained = resolve_trainable(params, trainable)
            spec = StepSpec(self.precision, placed, trained, self.sync)

            def run(layout: Layout, params: Any, *inputs: Any) -> Any:
                found = gradients(layout, spec, loss, params, Inputs(*inputs))
                metrics = found.metrics
                return metrics["loss"], metrics.get("aux"), found.model_state, found.grads

            def out_shardings(out: Any) -> Any:
                grad_shardings = self._layout.shardings(placed.shards)
                replicated = jax.tree.map(lambda _: self._layout.replicated, out[2])
                return *self._layout.batch_shardings(out[:2]), replicated, grad_shardings

            batch = self._layout.place_batch(batch)
            args = (params, batch, key, model_state)
            wrapped = on_mesh(self._layout, run, out_shardings)
            if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
                # Called eagerly, a shard_map over some of the axes knows nothing of the others.
                name = (signature_of(args), *jax.tree.leaves(placed.shards, is_leaf=is_spec))
                if name not in compiled:
                    out = (None, None, None, self._layout.shardings(placed.shards))
                    compiled[name] = jax.jit(wrapped, out_shardings=out)
                wrapped = compiled[name]
            with no_mesh(), with_remedies(self._layout):
                value, aux, new, grads = wrapped(*args)
            extra = (
                (new, aux) if has_aux and takes_model_state else new if takes_model_state else aux
            )
            return ((value, extra) if has_aux or takes_model_state else value), grads

        return value_and_grad

    def apply_gradients(
        self,
        state: Any,
        grads: Any,
        *,
        tx: optax.GradientTransformation | None = None,
        trainable: Any = None,
        param_specs: Any = None,
        extra_args: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Any:
        """Updates a train state with gradients from ``value_and_grad``, each device its shard.

        Args:
          state: a ``TrainState``, or a pair ``(params, opt_state)``.
          grads: a tree as the parameters.
          tx: the transformation, for a pair.
          param_specs: see ``specs``; required inside ``jit``, where arrays do not show them.
          trainable: which parameters may change; as in ``value_and_grad``.
          extra_args: passed on to ``tx.update`` if it takes extra arguments, such as ``value``.
          **fields: further fields of a ``TrainState`` to replace, such as ``batch_stats``.

        Returns:
          The new state, placed as the old one.
        """
        check_alive(state, grads=grads, extra_args=extra_args)
        state = self._layout.place_scalars(state)
        shardings, placed, opt_specs = self._places(state, tx, param_specs)
        trained = resolve_trainable(params_of(state), trainable)
        spec = StepSpec(self.precision, placed, trained, self.sync)

        def run(layout: Layout, state: Any, grads: Any, extra_args: Any) -> Any:
            state, sync_state = split_sync_state(state)
            new = update(layout, spec, opt_specs, state, grads, tx, extra_args)
            return join_sync_state(new, sync_state)

        with no_mesh():
            state = on_mesh(self._layout, run, lambda _: shardings)(state, grads, extra_args or {})
        return state.replace(**fields) if fields else state


def _type_of(x: Any) -> Any:
    """The shape and dtype of an array, or of a Python number."""
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return x
    return jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.canonicalize_dtype(np.result_type(x)))


def _patterns(name: str, given: Any) -> tuple[str, ...]:
    """Regular expressions as a tuple, or an error that names the argument."""
    patterns = (given,) if isinstance(given, str) else tuple(given or ())
    check_patterns(name, patterns)
    return patterns


def _check_same_devices(mesh: AnyMesh, snapshot: PeerCheckpoints) -> None:
    if mesh != snapshot.mesh:
        raise ValueError(
            f"snapshot stores states on the mesh {dict(snapshot.mesh.shape)}, Zero has "
            f"{dict(mesh.shape)} or other devices: make PeerCheckpoints with zero.mesh."
        )


def _check_passed(passed: Any, model_state: Any) -> None:
    """Raises unless a call passes a model state exactly if the step takes it from there."""
    if model_state is True and passed is None:
        raise ValueError(
            "the step was made with model_state=True, and the call passes none. Call it as "
            "step(..., model_state=...)."
        )
    if model_state is not True and passed is not None:
        raise ValueError(
            "the call passes a model state, but the step was made with "
            f"model_state={model_state!r}. Make it with model_state=True."
        )
