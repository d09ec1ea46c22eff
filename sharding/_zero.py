"""ZeRO: any optax transformation, its state and gradients cut over the data-parallel devices."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec

from sharding._describe import Description, describe_tree
from sharding._gradients import LossOptions, average_scalars, gradients, mark_scalars
from sharding._layout import Layout
from sharding._specs import AnyMesh, state_specs
from sharding._state import (
    CompiledStep,
    check_batch,
    check_placed,
    params_of,
    parts,
    step_key,
)
from sharding._update import update

P = PartitionSpec


@dataclasses.dataclass(frozen=True)
class Zero:
    """Data parallelism that keeps one copy of the optimizer state, for any optax transformation.

    With n devices on ``axis``, Ψ bytes of parameters and as many of gradients, S of optimizer
    state, each device holds

    ===== ======================== ========================= =================
    stage parameters               gradients                 optimizer state
    ===== ======================== ========================= =================
    0     Ψ                        Ψ                         S
    1     Ψ                        Ψ until they are reduced  S / n
    2     Ψ                        Ψ / n                     S / n
    ===== ======================== ========================= =================

    A step computes each device's gradients on its part of the batch, reduce-scatters them
    (stage 0: all-reduces), updates the shards and gathers the parameters once. The update sees
    arrays with their global shapes, so that every transformation computes what it computes on one
    device, up to rounding; what it must sum over shards becomes small reductions. Each parameter
    is cut along its longest dim that no other mesh axis uses and that n divides; where there is
    none, or the parameter is small, it stays whole, which ``describe`` tells. Other axes of the
    mesh stay the user's: his parameter specs are kept.

    Attributes:
      mesh: the device mesh; Auto and Explicit axes both work.
      stage: 0, 1 or 2.
      axis: the mesh axis, or axes, of data parallelism.
      min_shard_size: parameters of fewer elements are not cut.

    Raises:
      ValueError: on a stage other than 0, 1 or 2, or an axis that is not in the mesh.

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
    axis: str | tuple[str, ...] = "data"
    min_shard_size: int = 4096

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2):
            raise ValueError(f"stage must be 0, 1 or 2, got {self.stage!r}.")
        if not self._layout.axes:
            raise ValueError("axis must name at least one mesh axis, got none.")
        for axis in self._layout.axes:
            if axis not in self.mesh.axis_names:
                raise ValueError(f"axis {axis!r} is not in the mesh {self.mesh.axis_names}.")
        if self.min_shard_size < 0:
            raise ValueError(f"min_shard_size must not be negative, got {self.min_shard_size}.")

    # --- Where everything lies ----------------------------------------------------------------

    @property
    def num_shards(self) -> int:
        """The number of data-parallel devices."""
        return self._layout.num_shards

    @property
    def _layout(self) -> Layout:
        return Layout(self.mesh, self.stage, self.axis, self.min_shard_size)

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
          param_specs: how the parameters lie on the mesh's other axes: a tree of specs, or a
            prefix of one. None takes it from the arrays where they are sharded already, else from
            Flax metadata, else replicates.

        Returns:
          The state with a ``PartitionSpec`` in place of each array.

        Raises:
          ValueError: if the state is of neither kind, or a spec does not fit.
        """
        params, opt_state, tx = parts(state, tx)
        param_specs = self._layout.param_specs(params, param_specs)
        shard_specs, _, _ = self._layout.cuts(params, param_specs)
        opt_specs = state_specs(tx, params, shard_specs, self.mesh)
        expected: Any = jax.tree.structure(opt_specs)
        found: Any = jax.tree.structure(opt_state)
        if expected != found:
            raise ValueError(
                f"the optimizer state is not that of tx.init(params): expected {expected}, "
                f"found {found}."
            )
        if isinstance(state, tuple):
            return (param_specs, opt_specs)
        return jax.tree.map(lambda _: P(), state).replace(params=param_specs, opt_state=opt_specs)

    def shardings(
        self,
        state: Any,
        *,
        tx: optax.GradientTransformation | None = None,
        param_specs: Any = None,
    ) -> Any:
        """``specs`` as ``NamedSharding`` on the mesh: for ``device_put``, or to restore into."""
        specs = self.specs(state, tx=tx, param_specs=param_specs)
        return self._layout.shardings(specs)

    def describe(
        self,
        state: Any,
        *,
        tx: optax.GradientTransformation | None = None,
        param_specs: Any = None,
    ) -> Description:
        """What lies where: a row per array, bytes per device, and every leaf that stays whole.

        Args:
          state: real or abstract, as all arguments here: see ``specs``.
          tx: the transformation, for a pair.
          param_specs: how the parameters lie on the mesh's other axes.

        Returns:
          A ``Description``; printed, it is a table.
        """
        specs = self.specs(state, tx=tx, param_specs=param_specs)
        params, opt_state, _ = parts(state, tx)
        param_specs, opt_specs, _ = parts(specs, tx)
        grad_specs, _, reasons = self._layout.cuts(params, param_specs)
        if self.stage < 2:
            grad_specs = param_specs
        rows = describe_tree("params", params, param_specs, self.mesh)
        rows += describe_tree("grads", params, grad_specs, self.mesh, jax.tree.leaves(reasons))
        rows += describe_tree("opt_state", opt_state, opt_specs, self.mesh)
        return Description(self.mesh, self.stage, self._layout.axes, tuple(rows))

    # --- Training -----------------------------------------------------------------------------

    def init(
        self,
        make_state: Callable[..., Any],
        *args: Any,
        tx: optax.GradientTransformation | None = None,
        param_specs: Any = None,
    ) -> Any:
        """Makes a train state, each device its own part of it.

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
        abstract = jax.eval_shape(make_state, *args)
        out = self.shardings(abstract, tx=tx, param_specs=param_specs)
        return jax.jit(make_state, out_shardings=out)(*args)

    def put(self, batch: Any) -> Any:
        """Lays this process's part of a batch on the mesh, cut along the first dim.

        Args:
          batch: a tree of arrays; the first dim of each is the batch. Scalars are replicated.

        Returns:
          The tree as global arrays.

        Raises:
          ValueError: if a first dim does not divide by this process's devices.
        """
        check_batch(batch, max(1, self.num_shards // jax.process_count()), 1)
        return jax.tree.map(
            lambda sharding, x: jax.make_array_from_process_local_data(sharding, np.asarray(x)),
            self._layout.batch_shardings(batch),
            batch,
        )

    def train_step(
        self,
        loss_fn: Callable[..., Any],
        *,
        tx: optax.GradientTransformation | None = None,
        has_aux: bool = False,
        weighted: bool = False,
        rngs: bool = False,
        microbatches: int = 1,
        donate: bool = True,
    ) -> CompiledStep:
        """A compiled training step: ``step(state, batch) -> (state, metrics)``.

        Args:
          loss_fn: ``loss_fn(params, batch) -> loss``, the mean loss over the part of the batch
            that one device holds.
          tx: the transformation, where the state is a pair.
          has_aux: ``loss_fn`` returns ``(loss, aux)``. Scalars of ``aux`` are averaged over
            devices and micro-batches; arrays, whose first dim is the batch, are concatenated.
          weighted: the loss is a pair ``(sum, weight)``; both are added over devices and
            micro-batches and divided once, as masked tokens need. A total weight of zero gives a
            zero loss and zero gradients.
          rngs: ``loss_fn`` takes a third argument, a random key that differs by step, device and
            micro-batch: ``key`` of the call, or ``jax.random.key(0)``, folded by these. A pair has
            no step count: it needs a new ``key`` each call.
          microbatches: into how many parts each device cuts its batch. Stage 2 reduce-scatters the
            gradients of each and accumulates shards; stages 0 and 1 accumulate whole gradients and
            reduce once. Accumulators are at least float32.
          donate: give the state's memory to the new state; the old one cannot be used again.

        Returns:
          ``step(state, batch, key=None) -> (state, metrics)``, with a ``lower`` of the same
          arguments. ``metrics`` has ``"loss"``, with ``weighted`` also ``"weight"`` (the total),
          with ``has_aux`` also ``"aux"``. A transformation that takes extra arguments gets
          ``value=loss``.

        Raises:
          ValueError: if ``microbatches`` is below 1. When called: if the state does not lie as
            ``init`` lays it, or a batch does not divide by devices times ``microbatches``.
        """
        options = LossOptions(has_aux, weighted, rngs, microbatches).check()

        def compile_step(state: Any, batch: Any) -> Any:
            specs = self.specs(state, tx=tx)
            placed = self._layout.shardings(specs)
            check_placed(state, placed)
            param_specs = params_of(specs)

            def step(
                layout: Layout, state: Any, batch: Any, key: Any
            ) -> tuple[Any, dict[str, Any]]:
                key = step_key(state, key) if rngs else None
                params = params_of(state)
                metrics, grads = gradients(
                    layout, loss_fn, options, params, batch, key, param_specs
                )
                extra_args = {"value": metrics["loss"]}
                return update(layout, state, grads, tx, specs, extra_args), metrics

            return jax.jit(
                self._layout.on_mesh(
                    step, lambda out: (placed, self._layout.batch_shardings(out[1]))
                ),
                in_shardings=(placed, self._layout.batch_shardings(batch), None),
                out_shardings=(placed, None),
                donate_argnums=(0,) if donate else (),
            )

        return CompiledStep(compile_step, lambda b: check_batch(b, self.num_shards, microbatches))

    def eval_step(self, fn: Callable[[Any, Any], Any]) -> CompiledStep:
        """A compiled function of the parameters and a batch.

        Args:
          fn: ``fn(params, batch)``, on one device's part of the batch, returns any tree. Scalars
            are averaged over the devices; arrays, whose first dim is the batch, are concatenated.

        Returns:
          ``evaluate(state, batch) -> tree``, with a ``lower`` of the same arguments. The state is
          as in ``train_step``, and is kept.

        Raises:
          ValueError: when called with parameters that do not lie as ``init`` lays them, or a
            batch that does not divide by the devices.
        """

        def compile_eval(params: Any, batch: Any) -> Any:
            placed = self._layout.shardings(self._layout.param_specs(params))
            check_placed(params, placed)

            def evaluate(layout: Layout, params: Any, batch: Any, key: Any) -> Any:
                del key
                run = layout.shard_map(
                    lambda params, batch: mark_scalars(fn(params, batch)),
                    (P(), layout.batch_specs(batch)),
                    P(layout.axis),
                )
                return average_scalars(run(params, batch))

            return jax.jit(
                self._layout.on_mesh(evaluate, self._layout.batch_shardings),
                in_shardings=(placed, self._layout.batch_shardings(batch), None),
            )

        return CompiledStep(
            compile_eval, lambda batch: check_batch(batch, self.num_shards, 1), params_of
        )

    # --- The parts, for a step of one's own ---------------------------------------------------

    def value_and_grad(
        self,
        loss_fn: Callable[..., Any],
        *,
        has_aux: bool = False,
        weighted: bool = False,
        rngs: bool = False,
        microbatches: int = 1,
        param_specs: Any = None,
    ) -> Callable[..., Any]:
        """``jax.value_and_grad`` over the mesh, gradients reduced as the stage asks.

        Args:
          loss_fn: as all arguments not listed here: see ``train_step``.
          has_aux: ``loss_fn`` returns ``(loss, aux)``.
          weighted: the loss is a pair ``(sum, weight)``.
          rngs: ``loss_fn`` takes a key; here it is folded by device and micro-batch only.
          microbatches: into how many parts each device cuts its batch.
          param_specs: see ``specs``; inside ``jit`` the arrays cannot tell.

        Returns:
          A function ``(params, batch, key=None)`` that returns ``(loss, grads)``, or with
          ``has_aux`` ``((loss, aux), grads)``; good inside ``jit``.
        """
        options = LossOptions(has_aux, weighted, rngs, microbatches).check()

        def value_and_grad(params: Any, batch: Any, key: Any = None) -> Any:
            check_batch(batch, self.num_shards, microbatches)
            specs = self._layout.param_specs(params, param_specs)

            def run(layout: Layout, params: Any, batch: Any, key: Any) -> Any:
                metrics, grads = gradients(layout, loss_fn, options, params, batch, key, specs)
                value = (metrics["loss"], metrics["aux"]) if has_aux else metrics["loss"]
                return value, grads

            grad_shardings = self._layout.shardings(self._layout.cuts(params, specs)[0])
            wrapped = self._layout.on_mesh(
                run, lambda out: (self._layout.batch_shardings(out[0]), grad_shardings)
            )
            return wrapped(params, batch, key)

        return value_and_grad

    def apply_gradients(
        self,
        state: Any,
        grads: Any,
        *,
        tx: optax.GradientTransformation | None = None,
        param_specs: Any = None,
        extra_args: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Any:
        """Updates a train state with gradients from ``value_and_grad``, each device its shard.

        Args:
          state: a ``TrainState``, or a pair ``(params, opt_state)``.
          grads: a tree as the parameters.
          tx: the transformation, for a pair.
          param_specs: see ``specs``; inside ``jit`` the arrays cannot tell.
          extra_args: passed on to ``tx.update`` if it takes extra arguments, such as ``value``.
          **fields: further fields of a ``TrainState`` to replace, such as ``batch_stats``.

        Returns:
          The new state, laid out as the old one.
        """
        specs = self.specs(state, tx=tx, param_specs=param_specs)
        placed = self._layout.shardings(specs)

        def run(layout: Layout, state: Any, grads: Any, extra_args: Any) -> Any:
            return update(layout, state, grads, tx, specs, extra_args)

        state = self._layout.on_mesh(run, lambda _: placed)(state, grads, extra_args or {})
        return state.replace(**fields) if fields else state
