"""ZeRO: shards the optimizer state, gradients and parameters of any optax transformation."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import optax

from sharding.placement._describe import Description
from sharding.placement._layout import Layout
from sharding.placement._on_mesh import no_mesh
from sharding.placement._specs import AnyMesh, Axis, check_patterns, first_names, path_str
from sharding.placement._train_state import full_tree, params_of
from sharding.recovery._peer_checkpoints import PeerCheckpoints
from sharding.step import _placed_state, _put
from sharding.step._check_loss import check_loss
from sharding.step._checks import check_alive, check_options
from sharding.step._eval_step import EvalStep
from sharding.step._gather_params import gather
from sharding.step._gathered_layers import gathered
from sharding.step._loss import Loss, check_arguments
from sharding.step._precision import Precision
from sharding.step._train_step import TrainStep, apply_gradients
from sharding.step._value_and_grad import ValueAndGrad
from sharding.step.flax import _linen
from sharding.step.flax._modules import gathered_module
from sharding.step.flax._nnx import NnxMethods, train_state
from sharding.sync import GradientSync

Tx: TypeAlias = optax.GradientTransformation | None  # of a train state that is a pair


@dataclasses.dataclass(frozen=True)
class Zero(NnxMethods):
    """Data parallelism without replicated optimizer state, for any optax transformation (ZeRO).

    With n devices on ``axis``, Ψ bytes of parameters and as many of gradients, S of optimizer
    state, and k micro-batches, each device holds

    ===== ========== ======================== ================ ==========================
    stage parameters gradients                optimizer state  bytes sent per device and step
    ===== ========== ======================== ================ ==========================
    0     Ψ          Ψ                        S                2Ψ (n - 1) / n
    1     Ψ          Ψ until they are reduced S / n            2Ψ (n - 1) / n
    2     Ψ          Ψ / n                    S / n            (k + 1)Ψ (n - 1) / n
    3     Ψ / n      Ψ / n                    S / n            3kΨ (n - 1) / n
    ===== ========== ======================== ================ ==========================

    A step computes gradients on each device's shard of the batch, reduce-scatters them (stage 0:
    all-reduces), updates the shards and, at stages 1 and 2, gathers the parameters once. At stage 3
    the loss gathers each layer's parameters where it uses them, at stage 2 its backward pass
    reduce-scatters each layer's gradients as soon as they are known: ``gathered`` makes a model do
    so. The update sees arrays with their global shapes: every transformation computes what it
    computes on one device, up to rounding, and sums over shards become small reductions.

    Each parameter is sharded along its longest dim that no other mesh axis shards and that n
    divides. If that is the last dim, and its shards would not be multiples of 256 elements, another
    dim of at least 64 elements is preferred. A parameter that is small or has no such dim is left
    unsharded (see ``describe``). Specs on other mesh axes, the user's, are preserved.

    Attributes:
      mesh: the device mesh; Auto and Explicit axes both work.
      stage: 0 to 3.
      axis: the mesh axis, or axes, to shard over; on TPUs those of the torus, ``("x", "y")``:
        XLA:TPU turns reduce-scatters over most flat axes into all-reduces, and replacing these
        costs steps or memory.
      replica_axis: the mesh axis, or axes, of replicas (hybrid sharding): each holds all shards,
        and the shards of gradients are all-reduced over it once a step. The batch is sharded over
        ``axis`` and these.
      shard_state_over_replicas: reduce-scatter gradients over the replicas instead, update a shard
        in each, and gather the new parameters: state S / (n r) for the same bytes sent.
      min_shard_size: parameters with fewer elements are not sharded.
      reshard_after_forward: at stage 3, free a layer's gathered parameters after its forward pass,
        and gather and compute the layer again in the backward pass. False stores them until then:
        one gather less, and all gathered layers in memory.
      precision: dtypes of computing, reducing, accumulating and gathering.
      offload: ``"optimizer"`` stores the optimizer state, master weights included, in host memory
        (``pinned_host``), and streams it through the device in each step.
      offload_min_size: with ``offload``, state arrays with fewer elements stay on the device.
      sync: the gradient synchronization, such as ``sharding.sync.powersgd(4)``; None sums
        gradients as they are. Replicas synchronize by it if there are any, and gradients are summed
        within one. Its state, such as error-feedback residuals, is part of the train state, in
        ``opt_state`` (``sharding.sync.SyncedState``). It receives gradients in the dtype of
        ``precision.reduce``: a stateful sync once per step, a stateless one at stages 2 and 3 once
        per micro-batch. Stage 3 without replicas requires a stateless sync. Of a parameter that
        other mesh axes shard, each device synchronizes its own block.
      unsharded: regular expressions; a parameter is left unsharded, and so is its state, if one is
        found in its path.
      gathered_blocks: the modules of a Flax linen model (or of an nnx model in ``nnx_train_step``)
        to which ``gathered`` applies without a change to the model: class names, or regular
        expressions of paths. Within a module that gathers, nested ones do not. Each must be found
        in the loss.

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
    offload: str | None = None
    offload_min_size: int = dataclasses.field(default=4096, kw_only=True)
    sync: GradientSync | None = None
    unsharded: str | tuple[str, ...] = ()
    gathered_blocks: str | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("unsharded", "gathered_blocks"):
            given = getattr(self, name)
            patterns = (given,) if isinstance(given, str) else tuple(given or ())
            check_patterns(name, patterns)
            object.__setattr__(self, name, patterns)
        check_options(self)

    # --- Placement ----------------------------------------------------------------------------

    @property
    def num_shards(self) -> int:
        """The number of devices on ``axis``."""
        return self._layout.num_shards

    @property
    def num_devices(self) -> int:
        """The number of data-parallel devices: ``num_shards`` times the number of replicas."""
        return self._layout.num_devices

    @functools.cached_property
    def _layout(self) -> Layout:
        return Layout(
            mesh=self.mesh,
            stage=self.stage,
            axis=self.axis,
            replica_axis=self.replica_axis,
            shard_state_over_replicas=self.shard_state_over_replicas,
            min_shard_size=self.min_shard_size,
            unsharded=tuple(self.unsharded),
        )

    def specs(self, state: Any, *, tx: Tx = None, param_specs: Any = None) -> Any:
        """The partition spec of every array of a train state.

        Args:
          state: a Flax ``TrainState`` or a pair ``(params, opt_state)``; real or abstract
            (``jax.eval_shape(make_state, ...)``).
          tx: the transformation, for a pair.
          param_specs: specs of the parameters on the other mesh axes: a tree, or a prefix of one.
            None takes them from arrays that are sharded already, else from Flax metadata, else
            replicates.

        Raises:
          ValueError: if the state is of neither kind, or a spec does not fit.
        """
        return _placed_state.specs(self, state, tx, param_specs)

    def shardings(self, state: Any, *, tx: Tx = None, param_specs: Any = None) -> Any:
        """``specs`` as ``NamedSharding`` on the mesh: for ``device_put``, or to restore into."""
        specs = self.specs(state, tx=tx, param_specs=param_specs)
        return _placed_state.shardings_of(self, state, specs)

    def describe(self, state: Any, *, tx: Tx = None, param_specs: Any = None) -> Description:
        """The placement of a state, or of ``(nnx model, optimizer)``, with bytes per device.

        Arguments are those of ``specs``. Printed, it shows groups of like parameters; ``table()``
        has a line for each array.
        """
        state, param_specs = train_state(self, state, param_specs)
        return _placed_state.describe(self, state, tx, param_specs)

    # --- Train states -------------------------------------------------------------------------

    def init(
        self,
        make_state: Callable[..., Any],
        *args: Any,
        tx: Tx = None,
        param_specs: Any = None,
    ) -> Any:
        """Makes a train state, each device its shard; its values do not depend on the mesh.

        Args:
          make_state: a function of ``args``, such as a random key, that returns a Flax
            ``TrainState``, or a pair ``(params, opt_state)``.
          *args: its arguments.
          tx: the transformation, for a pair.
          param_specs: see ``specs``, for errors too.
        """
        return _placed_state.init(self, make_state, args, tx, param_specs)

    def abstract_state(
        self,
        make_state: Callable[..., Any],
        *args: Any,
        tx: Tx = None,
        param_specs: Any = None,
        sync_devices: int | None = None,
    ) -> Any:
        """The train state that ``init`` would make, in types: what a checkpoint is restored into.

        Args:
          make_state: as all arguments not listed here, see ``init``.
          *args: of ``make_state``.
          tx: the transformation, for a pair.
          param_specs: specs of the parameters on the other mesh axes.
          sync_devices: the number of devices that synchronized gradients when the checkpoint was
            written, if it differs; ``resize_sync`` converts the restored state. Other mesh axes
            must have the sizes that they had.

        Returns:
          A ``ShapeDtypeStruct`` in place of each array, with the sharding on this mesh at this
          stage, whatever it was when a checkpoint was written.
        """
        return _placed_state.abstract(self, make_state, args, tx, param_specs, sync_devices)

    def resize_sync(self, state: Any) -> Any:
        """Converts the gradient sync's state of another number of devices.

        The sum of all residuals stays the same; each device starts with an equal part of it.
        ``state`` is restored into ``abstract_state(..., sync_devices=...)``.

        Raises:
          ValueError: if the sync has no state, or more differs than the number of devices that
            synchronize: the shards of a replica, the other axes of the mesh, or the sync.
        """
        return _placed_state.resize_sync(self, state)

    def change_sync(self, state: Any, *, tx: Tx = None, param_specs: Any = None) -> Any:
        """Makes a train state of another gradient sync, or of none, one of this sync.

        The residuals that the other sync has not sent are applied as the gradient of one more
        update; what else it stores, such as momentum, is left behind. The state is placed as by
        ``init``, apart from that of the sync; other arguments are those of ``specs``.

        Raises:
          ValueError: where residuals are those of blocks that other mesh axes shard.
        """
        return _placed_state.change_sync(self, state, tx, param_specs)

    def full_params(self, state: Any) -> Any:
        """The unsharded parameters, as NumPy arrays in each process, for export.

        The devices gather one at a time. Those of an nnx model are a state for ``nnx.update``.
        """
        params = params_of(train_state(self, state)[0])
        check_alive(params)
        with no_mesh():
            return full_tree(params)

    def replicate(self, tree: Any) -> Any:
        """Places arrays, the same on all processes, on every device: such as a model state."""
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
        """
        return _placed_state.place(self, tree, param_specs)

    # --- Batches ------------------------------------------------------------------------------

    def data_shard(self) -> tuple[int, int]:
        """Which rows of a batch this process gives to ``put``.

        Returns:
          ``(index, count)``: shard ``index`` of ``count``, for a loader; for a batch in memory
          ``np.split(x, count)[index]``. Processes that other mesh axes span have the same shard.

        Raises:
          ValueError: if this process has no device of the mesh, or rows of processes overlap.
        """
        return _put.data_shard(self._layout)

    def put(self, batch: Any, *, check: bool = True) -> Any:
        """Places this process's rows of a batch on the mesh, sharded along the first dim.

        With several processes it is a collective: all call it, in the same order and from one
        thread, each with the shard of the rows that ``data_shard`` names.

        Args:
          batch: a tree of arrays; the first dim of each is the batch. Scalars are replicated.
            Other arrays that every device needs in full, such as class weights, belong in the
            model state, or in the closure of the loss.
          check: whether several processes compare what they give. Without it nothing waits, but
            rows that do not make one batch hang, or give wrong numbers.

        Raises:
          ValueError: if the batch is empty, first dims differ, or one does not divide by this
            process's devices; in all processes, if that is so in one, or if the rows that they
            give do not make one batch.
        """
        return _put.put(self._layout, batch, check)

    # --- Training -----------------------------------------------------------------------------

    def train_step(
        self,
        loss_fn: Callable[..., Any],
        *,
        tx: Tx = None,
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
    ) -> TrainStep:
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
            batch of all devices. ``"per_example"``: an array of keys, one for each example, which
            depend on the step and the place in the batch alone, on any number of devices. A pair
            has no step count and requires a new ``key`` in each call.
          model_state: ``loss_fn`` takes a third argument, replicated and not differentiated
            (statistics, counters, tables, a teacher), and returns its new value: ``(loss, new)``,
            or with ``has_aux`` ``(loss, (new, aux))``; what it only reads, it returns unchanged. A
            string names the field of the ``TrainState`` that holds it; several names make a dict.
            With True each call passes it, ``step(state, batch, model_state=...)``, and its new
            value is ``metrics["model_state"]``. Micro-batches change it one after the other.
          model_state_reduction: how the new values of all devices are reduced: ``"mean"`` (for
            leaves that are not floating, the first device's value), ``"sum"`` (the old value plus
            what each device added), ``"same"`` (all are equal); or a prefix tree of these.
          microbatches: into how many micro-batches each device splits its shard of the batch.
            Stages 2 and 3 reduce-scatter the gradients of each and accumulate shards; stages 0 and
            1 accumulate unsharded gradients and reduce once.
          trainable: which parameters are trained: a tree of bools, a prefix of one, or a function
            of the parameters that returns it. The others have no gradient, which the transformation
            sees as zeros, and never change; so that they have no state either, wrap it in
            ``optax.masked``. Parameters that are not floating are never trained.
          grad_norm: add ``metrics["grad_norm"]``, the norm of the mean gradient of all trained
            parameters, before the transformation: a float in one more all-reduce.
          sync_batch_norm: ``flax.linen.BatchNorm`` takes its statistics over the micro-batch of all
            devices, without an ``axis_name``; a sum of two vectors for each, forward and backward.
            False leaves the statistics to each device.
          snapshot: where ``store.save(...)`` leaves copying the saved state to the step that takes
            it, so that copies to host memory and to peers run beside the step's own work. A
            snapshot is that of the state before the step, under the number given to ``save``.
          donate: reuse the state's memory for the new state; the old one cannot be used again.

        Returns:
          ``step(state, batch, key=None, model_state=None) -> (state, metrics)``, with a ``lower``
          of the same arguments. ``metrics`` has ``"loss"``, with ``weighted`` also ``"weight"``
          (the total), with ``has_aux`` also ``"aux"``. A transformation that takes extra arguments
          gets ``value=loss``; one that reads ``local_squared_norm``, as
          ``optax_ext.gradient_noise_scale`` does, the mean of the squared norms of the gradients
          of each device (at stage 3 of each replica) and micro-batch, and their number.

        Raises:
          ValueError: on an unknown option. When called: if the state was donated to an earlier
            call, or is not placed as by ``init``; on a batch that does not divide by devices times
            ``microbatches``; if there is only one gradient for ``local_squared_norm``; if the loss
            returns a model state of another structure.
        """
        fn = self._in_step(loss_fn, sync_batch_norm, model_state, rngs)
        stateful = bool(model_state)
        loss = Loss(fn, has_aux, weighted, rngs, microbatches, stateful, model_state_reduction)
        options = model_state, trainable, grad_norm, snapshot, donate
        return TrainStep(self, loss, tx, *options)

    def eval_step(
        self, fn: Callable[..., Any], *, model_state: str | tuple[str, ...] | bool = False
    ) -> EvalStep:
        """A compiled function of the parameters and a batch.

        Args:
          fn: ``fn(params, batch)``, on one device's part of the batch, returns any tree. Scalars
            are averaged over the devices; arrays, whose first dim is the batch, are concatenated.
          model_state: ``fn`` takes a third argument, as in ``train_step``; it is only read.

        Returns:
          ``evaluate(state, batch, key=None, model_state=None) -> tree``, with a ``lower`` of the
          same arguments; ``key`` is not used. The state is as in ``train_step``, not donated.
        """
        return EvalStep(self, self._in_step(fn, True, model_state, all_blocks=False), model_state)

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
    ) -> ValueAndGrad:
        """``jax.value_and_grad`` over the mesh, gradients reduced as the stage requires.

        Arguments are those of ``train_step``, but keys are not folded by a step, and each call
        passes the model state. Inside ``jit``, where arrays do not show them, ``param_specs`` on
        other mesh axes must be given; see ``specs``.

        Returns:
          A function ``(params, batch, key=None, model_state=None)`` that returns ``(loss, grads)``;
          in place of the loss, with ``has_aux`` ``(loss, aux)``, with ``model_state``
          ``(loss, new)``, with both ``(loss, (new, aux))``. Good inside ``jit``.
        """
        fn = self._in_step(loss_fn, sync_batch_norm, model_state, rngs)
        stateful = model_state
        loss = Loss(fn, has_aux, weighted, rngs, microbatches, stateful, model_state_reduction)
        return ValueAndGrad(self, loss, trainable, param_specs)

    def apply_gradients(
        self,
        state: Any,
        grads: Any,
        *,
        tx: Tx = None,
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
          param_specs: see ``value_and_grad``.
          trainable: which parameters may change.
          extra_args: passed on to ``tx.update`` if it takes them, such as ``value``.
          **fields: further fields of a ``TrainState`` to replace, such as ``batch_stats``.

        """
        state = apply_gradients(self, state, grads, tx, trainable, param_specs, extra_args)
        return state.replace(**fields) if fields else state

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
        which has to hold the parameters twice: check a small model, and a few rows that differ.

        Args:
          loss_fn: as for ``train_step``; of an nnx model as for ``nnx_train_step``.
          state: a train state, placed or not, or an nnx model.
          batch: as for the step.
          key: for ``rngs="per_example"``.
          model_state: the names of fields, as in ``train_step``, or the model state itself.
          **options: of ``value_and_grad``. The coupling of micro-batches is checked too.

        Raises:
          ValueError: that names what differs, by how much, and what to do. Loss, gradients and
            new model state may differ by ``sqrt(eps)`` of their norms: 1.5e-8 where all arithmetic
            is float64, 3.5e-4 with float32, 9 % with bfloat16, where it finds large errors alone.
        """
        check_loss(self, loss_fn, state, batch, key, model_state, options)

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
        return _linen.in_step(
            loss_fn, self._layout.data_axes, sync_batch_norm, blocks, self._recomputes, all_blocks
        )

    # --- Layers, in the loss ------------------------------------------------------------------

    @property
    def _recomputes(self) -> bool:
        """Whether layers that gather their parameters are computed again in the backward pass."""
        return self.stage == 3 and self.reshard_after_forward

    def gather(self, tree: Any) -> Any:
        """Gathers parameters where the loss uses them; their gradients are reduce-scattered.

        For use inside the loss, on any subtree of its parameters, such as one layer's in a
        ``lax.scan``. It does not free them between the forward and the backward pass, as
        ``gathered`` does. At stage 2 only gradients are reduce-scattered; below it is the identity.

        Raises:
          ValueError: at stage 3, if called anywhere else than in the loss.
        """
        inside = set(self._layout.data_axes) <= set(jax.sharding.get_abstract_mesh().manual_axes)
        if self.stage == 3 and not inside:
            named = first_names(
                repr(path_str(p)) for p, _ in jax.tree_util.tree_leaves_with_path(tree)
            )
            raise ValueError(
                "zero.gather works in the loss of train_step, value_and_grad or eval_step, and was "
                f"called outside, on {named}. For unsharded parameters use "
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

        At stage 2 the backward pass reduce-scatters the gradients of the layer before it goes on to
        the layer below, so that unreduced gradients of all layers are never in memory together.
        They are reduced after the backward pass where a parameter is used outside of the layer, in
        several calls, or in a branch; where ``sync`` sums over the axes of shards; where norms of
        local gradients are needed; and where the loss does more with its parameters than to pass
        them to layers. Below stage 2, and outside of a step, the target computes what it always
        does.

        Args:
          target: a module class of ``flax.linen`` or ``flax.nnx``, whose ``__call__`` is meant, or
            a function whose first argument is a tree of parameters, such as the ``__call__`` of a
            module that is a pytree.
          policy: what ``jax.checkpoint`` may store; None for nothing. With
            ``jax.checkpoint_policies.dots_saveable`` matrix products are not computed again.

        Returns:
          A function, or a class of the same name, fields and parameters, to use in its place.

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
