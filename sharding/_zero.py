"""ZeRO: shards the optimizer state, gradients and parameters of any optax transformation."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from sharding._types import Batch, Tree
from sharding._user_line import warn_once
from sharding.loss._loss_options import AnyLoss, Loss, as_loss
from sharding.matmuls import Recipe
from sharding.matmuls._quantized_loss import quantized_matmuls
from sharding.placement._layout import Layout
from sharding.placement._specs import AnyMesh, Axis, check_patterns
from sharding.recovery._peer_checkpoints import PeerCheckpoints
from sharding.step import _batch_rows
from sharding.step._check_loss import check_loss
from sharding.step._checks import check_all_rows, check_options
from sharding.step._eval_step import EvalStep, ValueAndGrad
from sharding.step._gather_and_reduce import gather, gathered
from sharding.step._loss import StepLoss
from sharding.step._placed_state import StateMethods
from sharding.step._placed_state import Tx as Tx
from sharding.step._precision import Precision
from sharding.step._train_step import TrainStep
from sharding.step.flax._modules import gathered_module, in_step
from sharding.step.flax._nnx import NnxMethods
from sharding.sync import GradientSync

_DEPRECATED = {
    "global": "Zero(view='global') is deprecated: a loss is that of all rows, as under jit. Write "
    "Zero(mesh, ...) without it.",
    "device": "Zero(view='device') is deprecated: a loss is that of all rows, as under jit. Write "
    "Zero(mesh, ...) without it; and for the mean of the losses of each device's rows, as in DDP, "
    "give its steps shd.Loss(loss_fn, per_device=True).",
}


@dataclasses.dataclass(frozen=True)
class Zero(StateMethods, NnxMethods):
    """Data parallelism without replicated optimizer state, for any optax transformation (ZeRO).

    With n devices on ``axis``, Ψ bytes of parameters and as many of gradients, S of optimizer
    state, and k micro-batches, each device holds

    ===== ========== ======================== ================ ==========================
    stage parameters gradients                optimizer state  bytes sent per device and step
    ===== ========== ======================== ================ ==========================
    0     Ψ          Ψ                        S                2Ψ (n - 1) / n
    1     Ψ          Ψ; Ψ / n where k is 1    S / n            2Ψ (n - 1) / n
    2     Ψ          Ψ / n                    S / n            (k + 1)Ψ (n - 1) / n
    3     Ψ / n      Ψ / n                    S / n            3kΨ (n - 1) / n
    ===== ========== ======================== ================ ==========================

    The update sees arrays with their global shapes: every transformation computes what it computes
    on one device, up to rounding. The layers of a model should be ``gathered``: stages 1 and 2 then
    reduce gradients layer by layer.

    Each parameter is sharded along its longest dim that no other mesh axis shards and that n
    divides. If that is the last dim, and its shards would not be multiples of 256 elements, another
    dim of at least 64 elements is preferred. A parameter that is small or has no such dim is left
    unsharded (see ``describe``). Specs on other mesh axes, the user's, are preserved.

    Attributes:
      mesh: the device mesh, with Auto or Explicit axes.
      stage: 0 to 3.
      axis: the mesh axis, or axes, to shard over; on TPUs those of the torus, ``("x", "y")``: over
        a flat axis XLA:TPU turns most reduce-scatters into all-reduces.
      replica_axis: the mesh axis, or axes, of replicas (hybrid sharding), each of which holds all
        shards; the shards of gradients are all-reduced over it once a step.
      shard_state_over_replicas: reduce-scatter gradients over the replicas instead, and gather the
        new parameters: state S / (n r) for the same bytes sent.
      min_shard_size: parameters with fewer elements are not sharded.
      reshard_after_forward: at stage 3, gather and compute a layer again in the backward pass;
        False holds all gathered layers until then, and saves that gather.
      precision: dtypes of computing, reducing, accumulating and gathering.
      offload: ``"optimizer"`` stores the optimizer state, master weights included, in host memory
        (``pinned_host``), and streams it through the device in each step. ``"all"`` stores stacked
        parameters there, too, and streams both layer by layer, forward and backward: each device
        its shards. It implies ``update="backward"`` of ``train_step``. Arrays of fewer than three
        dims stay on the device. ``eval_step`` and ``value_and_grad``, whose gradients of stacks are
        there, too, load layers where a loop reads them, and for any other use the full stack.
      update_on: ``"host"`` leaves the state in host memory, as ``offload="optimizer"``, and updates
        it on the CPU, as ZeRO-Offload does: gradients are moved to the host, new parameters back.
        Sums over arrays, as of a clip, are computed on the devices. TPUs refuse 8-bit state.
      offload_min_size: with ``offload``, state arrays with fewer elements stay on the device.
      sync: the gradient synchronization, such as ``sharding.sync.powersgd(4)``, over the replicas
        if there are any; None sums gradients. It receives them in ``precision.reduce``; its state
        is in ``opt_state`` (``sharding.sync.SyncedState``). A stateful sync runs once per step, a
        stateless one at stages 2 and 3 once per micro-batch; stage 3 without replicas requires a
        stateless one. Of a parameter that other axes shard, each device synchronizes its block.
        The loss must have gradients of single devices: be proven a mean, a sum or ``weighted``, or
        a ``Loss`` with ``per_device=True``.
      unsharded: regular expressions; parameters in whose paths one is found are not sharded.
      gathered_blocks: modules of a Flax linen model (or of an nnx model in ``nnx_train_step``) that
        are ``gathered``, outermost only: class names, or regular expressions of paths. Each must be
        found in the loss. Below stage 3 nothing is gathered (see ``gathered``).
      view: deprecated. A loss is that of all rows, as under ``jit``; ``view="device"`` is
        ``Loss(fn, per_device=True)``.

    Raises:
      ValueError: on a stage other than 0 to 3, or an axis that is not in the mesh or named twice.

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
      Rajbhandari, Rasley, Ruwase, He: ZeRO: Memory Optimizations Toward Training Trillion Parameter
      Models, SC 2020, arXiv 1910.02054. Xu, Lee, Chen et al.: Automatic Cross-Replica Sharding of
      Weight Update in Data-Parallel Training, 2020, arXiv 2004.13336.
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
    update_on: str = dataclasses.field(default="device", kw_only=True)
    offload_min_size: int = dataclasses.field(default=4096, kw_only=True)
    sync: GradientSync | None = None
    unsharded: str | tuple[str, ...] = ()
    gathered_blocks: str | tuple[str, ...] = ()
    view: str | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("unsharded", "gathered_blocks"):
            given = getattr(self, name)
            patterns = (given,) if isinstance(given, str) else tuple(given or ())
            check_patterns(name, patterns)
            object.__setattr__(self, name, patterns)
        if self.update_on == "host" and self.offload is None:
            object.__setattr__(self, "offload", "optimizer")
        check_options(self)
        if self.view is not None:
            warn_once(_DEPRECATED[self.view], DeprecationWarning)

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
        shared = {f.name for f in dataclasses.fields(Layout)} & {
            f.name for f in dataclasses.fields(self)
        }
        return Layout(**{name: getattr(self, name) for name in shared})

    # --- Batches ------------------------------------------------------------------------------

    def data_shard(self) -> tuple[int, int]:
        """``(index, count)``: ``put`` takes shard ``index`` of ``count`` from this process.

        Processes have the same shard where other mesh axes, such as the stages of a pipeline, span
        them.

        Raises:
          ValueError: if this process has no device of the mesh, or rows of processes overlap.
        """
        return _batch_rows.data_shard(self._layout)

    def put(self, batch: Batch, *, check: bool = True) -> Any:
        """Places this process's rows of a batch on the mesh, sharded along the first dim.

        With several processes it is a collective: all call it, in the same order and from one
        thread.

        Args:
          batch: a tree of arrays whose first dim is the batch; scalars are replicated. What every
            device needs in full, such as class weights, belongs in the model state or the closure.
          check: whether processes compare what they give. Without it nothing waits, but rows that
            do not make one batch hang, or give wrong numbers.

        Raises:
          ValueError: if the batch is empty, first dims differ, or one does not divide by this
            process's devices; in all processes, if one raises or their rows do not make one batch.
        """
        return _batch_rows.put(self._layout, batch, check)

    # --- Training -----------------------------------------------------------------------------

    def train_step(
        self,
        loss_fn: AnyLoss,
        *,
        tx: Tx = None,
        has_aux: bool = False,
        weighted: bool = False,
        rngs: bool | str = False,
        model_state: str | tuple[str, ...] | bool = False,
        microbatches: int = 1,
        trainable: Tree = None,
        grad_norm: bool = False,
        snapshot: PeerCheckpoints | None = None,
        donate: bool = True,
        update: str = "after",
        matmuls: str | Recipe | None = None,
    ) -> TrainStep:
        """A compiled training step: ``step(state, batch) -> (state, metrics)``.

        A step with gradients that are not finite is not skipped: wrap ``tx`` in
        ``optax.apply_if_finite`` for that.

        Args:
          loss_fn: ``loss_fn(params, batch) -> loss``, of the whole batch, as under ``jit``; or a
            ``Loss``, which has the next five arguments in it, or a ``Pipeline``. Each device runs
            it on its own rows where it is proven a mean, a sum or ratios of sums over rows, else
            the partitioner runs it: ``loss_program`` of the step says which, and why.
          has_aux: ``loss_fn`` returns ``(loss, aux)``. Of several micro-batches scalars of ``aux``
            are averaged; arrays, whose first dim is the batch, are concatenated.
          weighted: the loss is a pair ``(sum, weight)``; both are added over micro-batches and
            divided once, the weight as a constant. A total weight of zero gives zeros. (A masked
            mean needs no pair, if what it divides by depends on the batch alone.)
          rngs: ``loss_fn`` takes a random key as its last argument: ``key`` of the call (a pair
            needs a new one in each, a ``TrainState`` may have ``jax.random.key(0)``), folded by the
            step and by the number of the micro-batch. ``"per_example"``: an array of keys, one per
            example, the same with any micro-batches on any number of devices.
          model_state: ``loss_fn`` takes a third argument, replicated and not differentiated
            (statistics, counters, a teacher), and returns its new value: ``(loss, new)``, or with
            ``has_aux`` ``(loss, (new, aux))``. A string names its field of the ``TrainState``;
            several make a dict. With True each call passes it, ``step(state, batch,
            model_state=...)``, and gets ``metrics["model_state"]``. Micro-batches change it one
            after the other.
          tx: the transformation, where the state is a pair.
          microbatches: how many micro-batches the rows of each device are split into. A loss in
            which rows meet raises, unless it is a ``Loss`` with ``coupled="by_microbatch"``.
            Stages 2 and 3 reduce-scatter the gradients of each, stages 0 and 1 reduce once. (Of one
            micro-batch, stages 1 and 2 do the same.)
          trainable: which parameters are trained: a tree of bools, a prefix of one, or a function
            of the parameters that returns it; None for all, or ``stored.trained`` where some are
            stored in forms. The others get zero gradients and never change, as all that are not
            floating; ``optax.masked`` saves their state.
          grad_norm: add ``metrics["grad_norm"]``, the norm of the mean gradient of all trained
            parameters, before the transformation: a float in one more all-reduce.
          snapshot: where ``store.save(...)`` leaves copying the state before the step to the step,
            so that copies run beside its own work.
          donate: reuse the state's memory for the new state; the old one cannot be used again.
          update: ``"after"`` the backward pass, or in it, ``"backward"``: each parameter is updated
            as soon as its gradient exists, so that the gradients of one layer are in memory. Layers
            are found where the loss scans over stacked parameters, or uses one after the other.
            Scanned layers, and with micro-batches all, are computed again in the backward pass;
            each accumulates the gradients of all micro-batches. State and results are the same. The
            transformation must treat each layer by itself, but for sums of each gradient, as in a
            clip by the global norm: these take a backward pass of their own. The partitioner runs
            such a step.
          matmuls: a recipe for ``quantized_matmuls``, which then makes the loss, as ``"fp8"``.

        Returns:
          ``step(state, batch, key=None, model_state=None) -> (state, metrics)``, with a ``lower``
          of the same arguments. ``metrics`` has ``"loss"``, with ``weighted`` also ``"weight"``
          (the total), with ``has_aux`` also ``"aux"``. A transformation that takes extra arguments
          gets ``value=loss``; one that reads ``local_squared_norm``, as
          ``optax_ext.gradient_noise_scale``, the mean squared norm of the gradients of single
          devices (at stage 3 replicas) and micro-batches, and their number.

        Raises:
          ValueError: on an unknown option. When called: if the state was donated to an earlier call
            or is not placed as by ``init``; if the batch does not divide by devices times
            ``microbatches``, or these would train another loss; if ``sync`` or
            ``local_squared_norm`` needs gradients of devices and there are none; if the loss
            returns a model state of another structure.
        """
        loss = as_loss(loss_fn, has_aux, weighted, rngs, model_state)
        if matmuls is not None:
            loss = quantized_matmuls(loss, matmuls)
        options = tx, trainable, grad_norm, snapshot, donate, update
        in_backward = update == "backward"
        loss = self._in_step(loss, microbatches, updates_in_backward=in_backward)
        return TrainStep(self, loss, *options)

    def eval_step(
        self, fn: AnyLoss, *, model_state: str | tuple[str, ...] | bool = False
    ) -> EvalStep:
        """A compiled function of the parameters and a batch.

        Args:
          fn: ``fn(params, batch)``, of the whole batch, as under ``jit``, returns any tree. Of a
            ``Loss`` or a ``Pipeline`` it is the mean loss, with ``has_aux`` ``(loss, aux)``.
          model_state: ``fn`` takes a third argument, as in ``train_step``; it is only read.

        Returns:
          ``evaluate(state, batch, key=None, model_state=None) -> tree``, with a ``lower``. ``key``
          is for a ``Loss`` with ``rngs``; the state is not donated.
        """
        loss = as_loss(fn, False, False, False, model_state)
        return EvalStep(self, self._in_step(loss, all_blocks=False), is_loss=loss.fn is not fn)

    def value_and_grad(
        self,
        loss_fn: AnyLoss,
        *,
        has_aux: bool = False,
        weighted: bool = False,
        rngs: bool | str = False,
        model_state: bool = False,
        microbatches: int = 1,
        trainable: Tree = None,
        param_specs: Tree = None,
    ) -> ValueAndGrad:
        """``jax.value_and_grad`` over the mesh, gradients reduced as the stage requires.

        Arguments are those of ``train_step``, but keys are not folded by a step, and each call
        passes the model state. Inside ``jit``, ``param_specs`` on other mesh axes must be given
        (``specs``).

        Returns:
          A function ``(params, batch, key=None, model_state=None)`` that returns ``(loss, grads)``;
          in place of the loss, with ``has_aux`` ``(loss, aux)``, with ``model_state`` ``(loss,
          new)``, with both ``(loss, (new, aux))``.
        """
        loss = as_loss(loss_fn, has_aux, weighted, rngs, model_state)
        return ValueAndGrad(self, self._in_step(loss, microbatches), trainable, param_specs)

    def check_loss(
        self,
        loss_fn: AnyLoss,
        state: Tree,
        batch: Batch,
        key: Any = None,
        *,
        model_state: Any = False,
        **options: Any,
    ) -> str:
        """Says what a loss does with rows; raises if on this mesh it is not that of one device.

        With ``per_device=True``, and by micro-batches, another loss than that of the batch may be
        trained. If its trace proves that they are equal, no numbers are computed. Otherwise this
        runs one batch on the mesh, and on a single device, which has to hold the parameters twice:
        check a small model, and a few rows that differ.

        Args:
          loss_fn: as for ``train_step``; of an nnx model as for ``nnx_train_step``.
          state: a train state, placed or not, or an nnx model.
          batch: as for the step.
          key: for ``rngs="per_example"``.
          model_state: the names of fields, as in ``train_step``, or the model state itself.
          **options: of ``value_and_grad``. The coupling of micro-batches is checked too.

        Returns:
          What the loss is by its trace: ``mean``, ``sum``, ``weighted`` (ratios of sums),
          ``random`` (random numbers depend on the index of a row), or ``coupled``, with the
          operation in which rows meet and its line; there, numbers decide.

        Raises:
          ValueError: that names what differs, by how much, and what to do. Loss, gradients and new
            model state may differ by ``sqrt(eps)`` of their norms: 1.5e-8 where all arithmetic is
            float64, 3.5e-4 with float32, 9 % with bfloat16.
        """
        return check_loss(self, loss_fn, state, batch, key, model_state, options)

    @property
    def needs_devices(self) -> dict[str, bool]:
        """Which options are given that need gradients of single devices."""
        is_quantized = self.precision.gather is not None
        return {"sync=": self.sync is not None, "Precision(gather=...)": is_quantized}

    def _in_step(
        self,
        loss: Loss,
        microbatches: int = 1,
        all_blocks: bool = True,
        updates_in_backward: bool = False,
    ) -> StepLoss:
        given = vars(loss) | {"fn": in_step(self, loss.fn, all_blocks)}
        if self.view is not None and loss.per_device is None:
            given["per_device"] = self.view == "device"
        if updates_in_backward or self.offload == "all":  # refs and host memory are in no shard_map
            check_all_rows(self, loss)
            given["per_device"] = False
        return StepLoss(**given, microbatches=microbatches)

    # --- Layers, in the loss ------------------------------------------------------------------

    def gather(self, tree: Tree) -> Any:
        """Gathers parameters where the loss uses them; their gradients are reduce-scattered.

        For use inside the loss, on any subtree of its parameters, such as one layer's in a
        ``lax.scan``. Unlike ``gathered``, it does not free them before the backward pass. Below
        stage 3 only gradients are reduce-scattered, or added to those of other micro-batches.
        Outside of a loss it changes nothing.
        """
        return gather(tree)

    def gathered(
        self, target: Callable[..., Any], *, policy: Callable[..., bool] | None = None
    ) -> Any:
        """Makes a layer gather its own parameters in each call, and free them after it.

        The layer runs under ``jax.checkpoint``, unless ``reshard_after_forward`` is False: the
        backward pass gathers and computes it again. A barrier keeps XLA from gathering a layer
        before its input exists.

        At stage 2, and at stage 1 with one micro-batch, the backward pass reduce-scatters the
        gradients of the layer before it goes on; after it, where a parameter is used outside of the
        layer, in several calls, or in a branch, where ``sync`` sums over the axes of shards, where
        norms of local gradients are needed, and where the loss does more with its parameters than
        to pass them to layers. With several micro-batches stages 0 and 1 add the layer's gradients
        to wider sums, on jax 0.11 and newer. Outside of a step the target is unchanged.

        Args:
          target: a module class of ``flax.linen`` or ``flax.nnx``, whose ``__call__`` is meant, or
            a function whose first argument is a tree of parameters, such as the ``__call__`` of a
            module that is a pytree.
          policy: what ``jax.checkpoint`` may store; None for nothing.

        Returns:
          A function, or a class of the same name, fields and parameters, to use in its place.

        Example:
          >>> import jax, jax.numpy as jnp, optax, sharding as shd
          >>> zero = shd.Zero(jax.make_mesh((jax.device_count(),), ("data",)), stage=3)
          >>> block = zero.gathered(lambda p, x: x + jnp.tanh(x @ p["in"]) @ p["out"])
          >>> def loss_fn(params, x):
          ...     x, _ = jax.lax.scan(lambda x, p: (block(p, x), None), x, params)
          ...     return jnp.mean(x**2)
          >>> params = zero.place({"in": jnp.ones((4, 64, 128)), "out": jnp.ones((4, 128, 64))})
          >>> x = zero.put(jnp.ones((8 * jax.device_count(), 64)))
          >>> loss, grads = zero.value_and_grad(loss_fn)(params, x)
        """
        wrap: Any = gathered_module if isinstance(target, type) else gathered
        return wrap(target, policy, self._layout.recomputes)
