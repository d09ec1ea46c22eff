"""``AsyncPipeline``: many minibatches without a flush, each stage with updates of its own."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from sharding.pipeline._executor import own_columns, sum_totals
from sharding.pipeline._instructions import Instructions, instructions
from sharding.pipeline._model import ParamTree, over_axis, spec_of_layers
from sharding.pipeline._pipeline import Pipeline
from sharding.pipeline._stage import Arrays, LayerParams
from sharding.pipeline.asynchronous._async_executor import AsyncExecutor, Leaves, versions_of
from sharding.pipeline.asynchronous._async_schedule import AsyncSchedule
from sharding.pipeline.asynchronous._padded_optimizer import PaddedOptimizer
from sharding.step._param_uses import find_uses

P = PartitionSpec


class AsyncState(NamedTuple):
    """Parameters and optimizer state of an asynchronous pipeline.

    Attributes:
      params: stacked, as ``Pipeline.stack`` makes them.
      opt_state: of each stage's optimizer, leaves [stages, ...].
    """

    params: Any
    opt_state: Any


@dataclasses.dataclass(frozen=True)
class AsyncPipeline:
    r"""Trains on many minibatches in one program, without a flush between them.

    Each stage updates its own parameters as soon as it has their gradients, while micro-batches
    that began with older parameters are still under way. The table says which version each
    operation reads: ``pipedream``, ``pipedream_2bw`` and ``pipemare`` make tables. There is no
    bubble but at the start and the end of a run, and gradients are late. The updates of a stage are

    .. math::

      g_t = \frac{\sum_m \nabla \ell_m}{\sum_m \text{weight}_m}, \quad
      w_{t+1} = w_t + \operatorname{tx}(g_t, w_t)

    over the micro-batches m of minibatch t, the gradients taken at the versions of the table.

    The optimizer of a stage sees the parameters of that stage, and those that all stages share:
    ``{"layers": [layers of the stage, ...], ...}``. Norms over all parameters, as in
    ``optax.clip_by_global_norm``, are those of the stage. Shared parameters have one owner: the
    first stage where ``embed`` uses them, the last one where ``head`` does; tied embeddings, which
    both use, are rejected. ``tx`` gets no extra arguments, and its random numbers are the same on
    all stages; to change a hyperparameter in the state, pass one for each stage. In a minibatch
    whose weight is 0 gradients are 0, and ``tx`` runs.

    One program runs all stages: each holds as many versions of its layers and of the shared
    parameters as the one that needs most. The state is sharded over the stages alone, and
    replicated over other mesh axes.

    Attributes:
      pipeline: the model, with its layers on the stages, and a schedule for evaluation.
      schedule: the table, of the same stages.
      tx: the optimizer of every stage; or ``tx(forward=..., backward=...)``, which returns it for
        the delays of a stage in updates, scalars of the trace.
      backward_params: ``backward_params(params, opt_state)``: the parameters of backward passes,
        such as ``optax_ext.backward_params``. None for the versions of the table. The last stage,
        whose forward and backward pass are one, does not use it.

    Raises:
      ValueError: if the schedule has other stages than the pipeline, gathers are in each tick, or
        ``tx`` is neither an optimizer nor a function.
      ScheduleError: if the schedule cannot run.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sharding as shd
      >>> n = jax.device_count()
      >>> auto = (jax.sharding.AxisType.Auto,)
      >>> pipeline = shd.Pipeline(
      ...     jax.make_mesh((n,), ("pipe",), auto),
      ...     shd.pipeline.one_f_one_b(stages=n, microbatches=2),
      ...     num_layers=n,
      ...     embed=lambda shared, x: x @ shared["in"],
      ...     block=lambda w, x, _: x + jnp.tanh(x @ w),
      ...     head=lambda shared, x, _: (jnp.sum((x @ shared["out"]) ** 2), x.shape[0]),
      ... )
      >>> schedule = shd.pipeline.pipedream_2bw(stages=n, microbatches=2, minibatches=5)
      >>> training = shd.AsyncPipeline(pipeline, schedule, optax.sgd(1e-3))
      >>> layers = jnp.full((n, 16, 16), 0.1)
      >>> params = pipeline.stack({"in": jnp.ones((3, 16)), "layers": layers, "out": jnp.ones(16)})
      >>> state = training.init(params)
      >>> batches = jnp.ones((5, 2, 2, 3))  # five minibatches of four examples
      >>> state, (sums, weights) = jax.jit(training.run, donate_argnums=0)(state, batches)
      >>> sums.shape, weights.tolist()
      ((5,), [4.0, 4.0, 4.0, 4.0, 4.0])

    References:
      See the schedules. ``optax_ext.params_history`` is the same on one device, for studies.
    """

    pipeline: Pipeline
    schedule: AsyncSchedule
    tx: Any
    _: dataclasses.KW_ONLY
    backward_params: Callable[[Any, Any], Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, AsyncSchedule):
            raise ValueError(
                f"the schedule {getattr(self.schedule, 'name', self.schedule)} has no updates. "
                "Use pipedream, pipedream_2bw or pipemare, or Pipeline.loss."
            )
        if self.schedule.routes != self.pipeline.schedule.routes:
            raise ValueError(
                f"the schedule {self.schedule.name} has {self.schedule.num_stages} stages in a "
                f"row; the pipeline's, {self.pipeline.schedule.name}, has "
                f"{self.pipeline.schedule.num_stages} stages and other groups of layers. Give the "
                "pipeline one_f_one_b, gpipe or zb_h1 of as many stages."
            )
        if self.pipeline.gather != "step":
            raise ValueError(
                "an asynchronous pipeline holds the full parameters of a stage: use gather='step'."
            )
        if not isinstance(self.tx, optax.GradientTransformation) and not callable(self.tx):
            raise ValueError(
                "tx must be an optax gradient transformation, or a function that returns one, got "
                f"{type(self.tx).__name__}."
            )
        self.schedule.check()
        _ = self._program

    @functools.cached_property
    def _program(self) -> Instructions:
        return instructions(self.schedule, self.pipeline.recompute, versions_of(self.schedule))

    def init(self, params: Any) -> AsyncState:
        """The state before the first update, with each stage's layers on its devices.

        Args:
          params: stacked, floating-point arrays; see ``Pipeline.stack``. They are copied, so that a
            state may be donated; shardings over other mesh axes stay. A trace takes them as is.

        Raises:
          ValueError: if a parameter is no floating-point array, or not of this pipeline.
        """
        self._leaves(params)  # raises unless they fit
        specs = self.pipeline.param_specs(params, jax.tree.map(self._other_axes, params))
        params = jax.tree.map(self._place, params, specs)
        leaves, trees = self._leaves(params)

        def on_stage(layers: Arrays, shared: Arrays) -> Any:
            rows = self._to_stage(layers, leaves[0])
            return _with_stage(self._optimizer().init(self._to_tree(params, trees, (rows, shared))))

        on_stages = P(self.pipeline.axis)
        in_specs = self._specs(leaves[0]), P()
        mapped = over_axis(self.pipeline._model, on_stage, in_specs, on_stages, on_stages)
        # States are mostly zeros: no argument is left that would name the devices.
        placed = NamedSharding(self.pipeline.mesh, on_stages)
        return AsyncState(params, jax.jit(mapped, out_shardings=placed)(*leaves))

    def run(self, state: AsyncState, batches: Any, key: Any = None) -> tuple[AsyncState, Any]:
        """Trains on all minibatches of the schedule; the pipeline is empty before and after.

        Args:
          state: see ``init``.
          batches: arrays [updates, micro-batches, examples, ...], the micro-batches those of an
            update. Scalars are the same in all.
          key: with ``rngs``; another one for each run.

        Returns:
          The state, and ``(sums, weights)`` of the losses of each minibatch, [updates]; with
          ``has_aux`` ``((sums, weights), aux)``, scalars of ``aux`` averaged over the run, batch
          arrays concatenated.

        Raises:
          ValueError: if the batches, the parameters or the state do not fit, ``embed`` and ``head``
            use the same parameter, or ``block`` changes its parameters where this would mix
            versions.
        """
        self.pipeline._check_key(key)
        leaves, trees = self._leaves(state.params)
        self._check_batches(batches)
        self._check_state(state.opt_state)
        pipeline, program = self.pipeline, self._program
        axis, on_stages = pipeline.axis, P(pipeline.axis)
        tables = [segment.tables for segment in program.segments]
        to_tree = functools.partial(self._to_tree, state.params, trees)

        def on_stage(
            layers: Arrays, shared: Arrays, opt_state: Any, batches: Any, key: Any, tables: Any
        ) -> Any:
            layers, tx = self._to_stage(layers, leaves[0]), self._optimizer()
            backward_params = self.backward_params
            if backward_params is not None and isinstance(tx, PaddedOptimizer):
                backward_params = functools.partial(tx.backward_params, backward_params)
            executor = AsyncExecutor(
                pipeline._model,
                self.schedule,
                program,
                trees,
                LayerParams(layers, []),
                LayerParams(shared, []),
                self._microbatches(batches),
                key,
                tx=tx,
                to_tree=to_tree,
                of_tree=self._of_tree,
                backward_params=backward_params,
            )
            stage = lax.axis_index(axis)
            shared_params = pipeline._parts(to_tree((layers, shared)))[1]
            owners = stages_of_shared(pipeline, shared_params, batches, key)
            (layers, shared), opt_state, totals = executor.run_updates(
                jax.tree.map(lambda x: x[0], opt_state),
                own_columns(tables),
                jnp.asarray(program.last_version)[stage],
            )
            # Every stage gets what the owner of a shared parameter made of it.
            shared = [
                lax.psum(jnp.where(stage == owner, x, jnp.zeros_like(x)), axis)
                for x, owner in zip(shared, owners, strict=True)
            ]
            out = sum_totals(totals, axis)
            layers = [pipeline._rows.from_stage(x) for x in layers]
            return layers, shared, _with_stage(opt_state), out

        layers, shared = leaves
        specs = self._specs(layers)
        mapped = over_axis(
            pipeline._model,
            on_stage,
            (specs, P(), on_stages, P(), P(), P(None, None, axis)),
            (specs, P(), on_stages, P()),
            (
                [spec_of_layers(pipeline._model, x) for x in layers],
                [jax.typeof(x).sharding.spec for x in shared],
                on_stages,
                P(),
            ),
        )
        layers, shared, opt_state, (sums, aux) = mapped(
            *leaves, state.opt_state, batches, key, jax.tree.map(jnp.asarray, tables)
        )
        new = AsyncState(to_tree((layers, shared)), opt_state)
        return new, (sums, aux) if pipeline.has_aux else sums

    # --- Parameters -------------------------------------------------------------------------------

    def _other_axes(self, x: Any) -> PartitionSpec:
        """The spec of an array that is on the mesh already, without the axis of the stages."""
        sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh != self.pipeline.mesh:
            return P()
        return P(*(None if entry == self.pipeline.axis else entry for entry in sharding.spec))

    def _place(self, x: Any, spec: PartitionSpec) -> Any:
        if isinstance(x, jax.core.Tracer):
            return x
        return jnp.copy(jax.device_put(x, NamedSharding(self.pipeline.mesh, spec)))

    def _leaves(self, params: Any) -> tuple[Leaves, tuple[ParamTree, ParamTree]]:
        """The leaves of the layers and of the shared parameters, and their trees."""
        for path, x in jax.tree_util.tree_leaves_with_path(params):
            if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
                raise ValueError(
                    f"an asynchronous pipeline trains all parameters, and "
                    f"{jax.tree_util.keystr(path)} has dtype {jnp.result_type(x)}."
                )
        (layers, layer_tree), (shared, shared_tree) = map(
            jax.tree.flatten, self.pipeline._parts(params)
        )
        for x in layers:
            self.pipeline._check_layers(x)
        trees = ParamTree(layer_tree, [True] * len(layers))
        return (layers, shared), (trees, ParamTree(shared_tree, [True] * len(shared)))

    def _to_tree(self, params: Any, trees: tuple[ParamTree, ParamTree], leaves: Leaves) -> Any:
        """The tree of leaves, with the type and the keys of ``params``."""
        layers, shared = (t.treedef.unflatten(x) for t, x in zip(trees, leaves, strict=True))
        parts = {**shared, self.pipeline.layers: layers}
        return type(params)({name: parts[name] for name in params})

    def _specs(self, layers: Arrays) -> list[PartitionSpec]:
        """Specs of stacked arrays on the axis of the stages."""
        return [self.pipeline._rows.spec(x) for x in layers]

    def _to_stage(self, shards: Arrays, layers: Arrays) -> Arrays:
        """The rows of a stage, from its shards of stacked arrays."""
        rows = self.pipeline._rows
        return [rows.to_stage(x, like.shape) for x, like in zip(shards, layers, strict=True)]

    def _of_tree(self, params: Any) -> Leaves:
        """The inverse of ``_to_tree``."""
        layers, shared = self.pipeline._parts(params)
        return jax.tree.leaves(layers), jax.tree.leaves(shared)

    # --- Batches and optimizers -------------------------------------------------------------------

    def _check_batches(self, batches: Any) -> None:
        """Raises unless arrays are [updates, micro-batches, examples, ...]."""
        expected = self.schedule.num_updates, self.schedule.microbatches_per_update
        for x in jax.tree.leaves(batches):
            if jnp.ndim(x) and (jnp.ndim(x) < 3 or x.shape[:2] != expected):
                raise ValueError(
                    f"the schedule {self.schedule.name} has {expected[0]} updates of {expected[1]} "
                    "micro-batches: arrays of batches must be [updates, micro-batches, examples, "
                    f"...], got shape {jnp.shape(x)}."
                )

    def _check_state(self, opt_state: Any) -> None:
        """Raises unless leaves are [stages, ...]."""
        stages = self.schedule.num_stages
        for path, x in jax.tree_util.tree_leaves_with_path(opt_state):
            if not jnp.ndim(x) or x.shape[0] != stages:
                raise ValueError(
                    f"opt_state{jax.tree_util.keystr(path)} must have dim 0 for the {stages} "
                    f"stages, got shape {jnp.shape(x)}. A state goes with its number of stages: "
                    "make one with init."
                )

    def _microbatches(self, batches: Any) -> Any:
        """[updates, micro-batches, examples, ...] to [micro-batches, examples, ...]."""
        count = self.schedule.num_microbatches

        def merge(x: Any) -> Any:
            return jnp.reshape(x, (count, *x.shape[2:])) if x.ndim else jnp.broadcast_to(x, count)

        return jax.tree.map(merge, batches)

    def _optimizer(self) -> Any:
        """The optimizer of this stage."""
        tx = self.tx
        if not isinstance(tx, optax.GradientTransformation):
            stage = lax.axis_index(self.pipeline.axis)
            forward, backward = (jnp.asarray(d)[stage] for d in self.schedule.delays())
            tx = tx(forward=forward, backward=backward)
            if not isinstance(tx, optax.GradientTransformation):
                raise ValueError(
                    "tx(forward=..., backward=...) must return an optax gradient transformation, "
                    f"got {type(tx).__name__}."
                )
        tx, rows = optax.with_extra_args_support(tx), self.pipeline._rows
        return PaddedOptimizer(tx, rows, self.pipeline.layers) if rows.uneven else tx


def _with_stage(opt_state: Any) -> Any:
    """A state with a first dim for the stages, of which this is one."""
    return jax.tree.map(lambda x: jnp.asarray(x)[None], opt_state)


def stages_of_shared(pipeline: Pipeline, shared: Any, batches: Any, key: Any) -> list[int]:
    """For each leaf of the shared parameters, the stage that updates it.

    Raises:
      ValueError: if ``embed`` and ``head`` both use one, on different stages.
    """

    def types(tree: Any, skipped: int) -> Any:
        """Without shardings, and without the first dims."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[skipped:], jnp.result_type(x)), tree
        )

    treedef: Any
    leaves, treedef = jax.tree.flatten(types(shared, 0))
    args = types(batches, 2), *([] if key is None else [key])  # batches: [updates, micro-batches]

    def used_by(fn: Callable[..., Any], *args: Any) -> Any:
        """The numbers of the leaves that a function reads."""

        def of_leaves(leaves: Any, *args: Any) -> Any:
            return fn(treedef.unflatten(leaves), *args)

        return find_uses(of_leaves, leaves, (), *args).otherwise

    by_embed = used_by(pipeline.embed, *args)
    x = jax.eval_shape(pipeline.embed, treedef.unflatten(leaves), *args)
    by_head = used_by(pipeline.head, x, *args)
    last = pipeline.schedule.num_stages - 1
    for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(shared)):
        if last and i in by_embed and i in by_head:
            raise ValueError(
                f"embed and head both use {jax.tree_util.keystr(path)}. In an asynchronous "
                "pipeline the first and the last stage would update it independently: give each a "
                "parameter of its own."
            )
    return [last if i in by_head else 0 for i in range(len(leaves))]
