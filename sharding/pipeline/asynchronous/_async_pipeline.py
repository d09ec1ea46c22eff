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

from optax_ext.equations import trace
from sharding._jaxprs import inputs_read
from sharding._types import Array, OptState, Tree
from sharding.pipeline._differentiable_loss import over_axis, spec_of_layers
from sharding.pipeline._executor import sum_totals
from sharding.pipeline._instructions import Instructions, instructions
from sharding.pipeline._pipeline import Pipeline
from sharding.pipeline._stage import LayerParams
from sharding.pipeline.asynchronous._async_executor import AsyncExecutor, Parts
from sharding.pipeline.asynchronous._async_schedule import AsyncSchedule
from sharding.placement._specs import only_axes, sharding_on

P = PartitionSpec


class AsyncState(NamedTuple):
    """Parameters and optimizer state of an asynchronous pipeline."""

    params: Any  # stacked, as ``Pipeline.stack`` makes them
    opt_state: Any  # of each stage's optimizer, leaves [stages, ...]


@dataclasses.dataclass(frozen=True)
class AsyncPipeline:
    r"""Trains on many minibatches in one program, without a flush between them.

    Each stage updates its own parameters as soon as it has their gradients, while micro-batches
    that began with older parameters are still under way. The updates of a stage are

    .. math::

      g_t = \frac{\sum_m \nabla \ell_m}{\sum_m \text{weight}_m}, \quad
      w_{t+1} = w_t + \operatorname{tx}(g_t, w_t)

    over the micro-batches m of minibatch t, the gradients taken at the versions of the table, and 0
    where all weights are.

    The optimizer of a stage sees the parameters of that stage, and those that all stages share:
    ``{"layers": [layers of the stage, ...], ...}``. Shared parameters have one owner: the first
    stage where ``embed`` uses them, the last one where ``head`` does. To change a hyperparameter in
    the state, pass one for each stage. :doc:`/understand/asynchronous` has an example.

    Raises:
      ValueError: if the schedule has other stages than the pipeline, these have unequal numbers of
        layers, gathers are in each tick, or ``tx`` is neither an optimizer nor a function.
      ScheduleError: if the schedule cannot run.
    """

    pipeline: Pipeline  #: the model, with its layers on the stages, and a schedule for evaluation
    schedule: AsyncSchedule  #: the table, of the same stages
    #: the optimizer of every stage; or ``tx(forward=..., backward=...)``, which returns it for the
    #: delays of a stage in updates, scalars of the trace
    tx: Any
    _: dataclasses.KW_ONLY
    #: ``backward_params(params, opt_state)``: the parameters of backward passes, such as
    #: ``optax_ext.backward_params``; None for the versions of the table. The last stage, whose
    #: forward and backward pass are one, does not use it
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
        counts = self.pipeline.layer_counts
        if len(set(counts)) > 1:
            raise ValueError(
                f"an asynchronous pipeline needs as many layers on each stage, got {counts} on "
                f"{len(counts)}. Give a number of layers that the stages divide, or train with "
                "Pipeline, whose stages may differ."
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
        return instructions(self.schedule, self.pipeline.recompute)

    def init(self, params: Tree) -> AsyncState:
        """The state before the first update, with each stage's layers on its devices.

        ``params`` are stacked, floating-point arrays. They are copied, so that a state may be
        donated; shardings over other mesh axes stay. A trace takes them as is.

        Raises:
          ValueError: if a parameter is no floating-point array, or not of this pipeline.
        """
        self._parts(params)  # raises unless they fit
        specs = self.pipeline.param_specs(params, jax.tree.map(self._other_axes, params))
        params = jax.tree.map(self._place, params, specs)
        parts = self._parts(params)

        def on_stage(rows: Tree, shared: Any) -> Any:
            return _with_stage(self._optimizer().init(self._to_tree(params, (rows, shared))))

        on_stages = P(self.pipeline.axis)
        in_specs = jax.tree.map(self.pipeline._rows.spec, parts[0]), P()
        mapped = over_axis(self.pipeline, on_stage, in_specs, on_stages, on_stages)
        # States are mostly zeros: no argument is left that would name the devices.
        placed = NamedSharding(self.pipeline.mesh, on_stages)
        return AsyncState(params, jax.jit(mapped, out_shardings=placed)(*parts))

    def run(self, state: AsyncState, batches: Any, key: Any = None) -> tuple[AsyncState, Any]:
        """Trains on all minibatches of the schedule; the pipeline is empty before and after.

        Args:
          state: see ``init``.
          batches: arrays [updates, micro-batches, examples, ...]. Scalars are the same in all.
          key: with ``rngs``; another one for each run.

        Returns:
          The state, and ``(sums, weights)`` of the losses of each minibatch, [updates]; with
          ``has_aux`` ``((sums, weights), aux)``, as of ``Pipeline.loss`` for the entire run.

        Raises:
          ValueError: if the batches, the parameters or the state do not fit, ``embed`` and ``head``
            use the same parameter, or ``block`` changes parameters where this would mix versions.
        """
        self.pipeline._check_key(key)
        layers, shared = self._parts(state.params)
        self._check_batches(batches)
        self._check_state(state.opt_state)
        pipeline = self.pipeline
        program = self._program
        axis = pipeline.axis
        on_stages = P(pipeline.axis)
        to_tree = functools.partial(self._to_tree, state.params)

        def on_stage(rows: Tree, shared: Any, opt_state: OptState, *args: Any) -> Any:
            batches, key, tables = args
            own = LayerParams(rows), LayerParams(shared), self._microbatches(batches), key
            more = self._optimizer(), to_tree, self.backward_params
            executor = AsyncExecutor(pipeline, self.schedule, program, *own, *more)
            stage = lax.axis_index(axis)
            owners = stages_of_shared(pipeline, shared, batches, key)
            opt_state = jax.tree.map(lambda x: x[0], opt_state)
            (rows, shared), opt_state, totals = executor.run_updates(opt_state, tables)
            # Every stage gets what the owner of a shared parameter made of it.
            shared = jax.tree.map(
                lambda x, owner: lax.psum(jnp.where(stage == owner, x, jnp.zeros_like(x)), axis),
                shared,
                owners,
            )
            out = sum_totals(totals, axis)
            return rows, shared, _with_stage(opt_state), out

        specs = jax.tree.map(pipeline._rows.spec, layers)
        in_specs = specs, P(), on_stages, P(), P(), P(None, None, axis)
        of_layers = jax.tree.map(functools.partial(spec_of_layers, pipeline), layers)
        of_shared = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, shared)
        out_types = of_layers, of_shared, on_stages, P()
        mapped = over_axis(pipeline, on_stage, in_specs, (specs, P(), on_stages, P()), out_types)
        args = layers, shared, state.opt_state, batches, key, program.tables()
        *parts, opt_state, (sums, aux) = mapped(*args)
        new = AsyncState(to_tree(parts), opt_state)
        return new, (sums, aux) if pipeline.has_aux else sums

    # --- Parameters -------------------------------------------------------------------------------

    def _other_axes(self, x: Array) -> PartitionSpec:
        """The spec of an array that is on the mesh already, without the axis of the stages."""
        mesh = self.pipeline.mesh
        sharding = sharding_on(x, self.pipeline.mesh)
        others = set(mesh.axis_names) - {self.pipeline.axis}
        return P() if sharding is None else only_axes(sharding.spec, others)

    def _place(self, x: Array, spec: PartitionSpec) -> Any:
        if isinstance(x, jax.core.Tracer):
            return x
        return jnp.copy(jax.device_put(x, NamedSharding(self.pipeline.mesh, spec)))

    def _parts(self, params: Tree) -> Parts:
        """The layers and the shared parameters, checked."""
        for path, x in jax.tree.leaves_with_path(params):
            if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
                raise ValueError(
                    f"an asynchronous pipeline trains all parameters, and "
                    f"{jax.tree_util.keystr(path)} has dtype {jnp.result_type(x)}."
                )
        layers, shared = self.pipeline._parts(params)
        jax.tree.map(self.pipeline._check_layers, layers)
        return layers, shared

    def _to_tree(self, params: Tree, parts: Parts) -> Any:
        own = {**parts[1], self.pipeline.layers: parts[0]}
        return type(params)({name: own[name] for name in params})

    # --- Batches and optimizers -------------------------------------------------------------------

    def _check_batches(self, batches: Any) -> None:
        expected = self.schedule.num_updates, self.schedule.microbatches_per_update
        for x in jax.tree.leaves(batches):
            if jnp.ndim(x) and (jnp.ndim(x) < 3 or x.shape[:2] != expected):
                raise ValueError(
                    f"the schedule {self.schedule.name} has {expected[0]} updates of {expected[1]} "
                    "micro-batches: arrays of batches must be [updates, micro-batches, examples, "
                    f"...], got shape {jnp.shape(x)}."
                )

    def _check_state(self, opt_state: OptState) -> None:
        stages = self.schedule.num_stages
        for path, x in jax.tree.leaves_with_path(opt_state):
            if not jnp.ndim(x) or x.shape[0] != stages:
                raise ValueError(
                    f"opt_state{jax.tree_util.keystr(path)} must have dim 0 for the {stages} "
                    f"stages, got shape {jnp.shape(x)}. A state goes with its number of stages: "
                    "make one with init."
                )

    def _microbatches(self, batches: Any) -> Any:
        def merge(x: Array) -> Any:  # [updates, micro-batches, ...] to [micro-batches, ...]
            count = self.schedule.num_microbatches
            return jnp.reshape(x, (count, *x.shape[2:])) if x.ndim else jnp.broadcast_to(x, count)

        return jax.tree.map(merge, batches)

    def _optimizer(self) -> Any:
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
        return optax.with_extra_args_support(tx)


def _with_stage(opt_state: OptState) -> Any:
    """A state with a first dim for the stages, of which this is one."""
    return jax.tree.map(lambda x: jnp.asarray(x)[None], opt_state)


def stages_of_shared(pipeline: Pipeline, shared: Any, batches: Any, key: Any) -> Any:
    """The stage that updates each shared parameter; raises if ``embed`` and ``head`` use one."""

    def types(tree: Tree, skipped: int) -> Any:
        """Without shardings, and without the first dims."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[skipped:], jnp.result_type(x)), tree
        )

    leaves, treedef = jax.tree.flatten(types(shared, 0))
    args = types(batches, 2), *([] if key is None else [key])  # batches: [updates, micro-batches]

    def used_by(fn: Callable[..., Any], *args: Any) -> Any:
        """The numbers of the leaves that a function reads."""

        def of_leaves(leaves: Any, *args: Any) -> Any:
            return fn(treedef.unflatten(leaves), *args)

        read = inputs_read(trace(of_leaves, leaves, *args)[0].jaxpr)[: len(leaves)]
        return {i for i, used in enumerate(read) if used}

    by_embed = used_by(pipeline.embed, *args)
    x = jax.eval_shape(pipeline.embed, treedef.unflatten(leaves), *args)
    by_head = used_by(pipeline.head, x, *args)
    last = pipeline.schedule.num_stages - 1
    for i, (path, _) in enumerate(jax.tree.leaves_with_path(shared)):
        if last and i in by_embed and i in by_head:
            raise ValueError(
                f"embed and head both use {jax.tree_util.keystr(path)}. In an asynchronous "
                "pipeline the first and the last stage would update it independently: give each a "
                "parameter of its own."
            )
    return treedef.unflatten([last if i in by_head else 0 for i in range(len(leaves))])
