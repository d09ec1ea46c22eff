"""The loss of a pipeline and its derivative: one run of a schedule gives both."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from sharding.pipeline._buffers import Buffers, Ends
from sharding.pipeline._executor import Executor
from sharding.pipeline._instructions import Instructions, instructions
from sharding.pipeline._layers import StageRows
from sharding.pipeline._schedule import Schedule
from sharding.pipeline._stage import Arrays, LayerParams, Stage
from sharding.placement._specs import AnyMesh, axes_of, is_spec
from sharding.step._gather_params import gather
from sharding.step._microbatches import join_microbatches

P = PartitionSpec


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A model on a pipeline; see ``Pipeline``.

    Attributes:
      mesh: the device mesh.
      axis: of the stages.
      schedule: of a training step.
      layer_counts: layers of every virtual stage.
      rows: of the stages.
      embed: before the layers.
      block: one layer.
      head: after the layers.
      has_aux: whether ``head`` returns more than the sum and the weight.
      recompute: whether backward passes compute their layers again.
      gather_layers: whether each layer is gathered where it runs.
    """

    mesh: AnyMesh
    axis: str
    schedule: Schedule
    layer_counts: tuple[int, ...]
    rows: StageRows
    embed: Callable[..., Any]
    block: Callable[..., Any]
    head: Callable[..., Any]
    has_aux: bool
    recompute: bool
    gather_layers: bool

    @functools.cached_property
    def training(self) -> tuple[Schedule, Instructions]:
        """The schedule, and its instructions: made once, not in every trace."""
        return self.schedule, instructions(self.schedule, self.recompute)

    @functools.cached_property
    def evaluation(self) -> tuple[Schedule, Instructions]:
        """The schedule without its backward passes, and its instructions."""
        schedule = self.schedule.without_backward()
        return schedule, instructions(schedule, self.recompute)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def loss(model: Model, params: tuple[Any, Any], microbatches: Any, key: Any) -> Any:
    """``((sum, weight), aux)`` of an evaluation."""
    nothing = jax.tree.map(lambda _: False, params)
    return _run(model, *model.evaluation, params, nothing, microbatches, key)[0]


def _loss_forward(model: Model, params: Any, microbatches: Any, key: Any) -> Any:
    def is_primal(x: Any) -> bool:
        return hasattr(x, "perturbed")

    def values(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.value, tree, is_leaf=is_primal)

    if any(x.perturbed for x in jax.tree.leaves(microbatches, is_leaf=is_primal)):
        raise ValueError(
            "a pipeline has no gradients of its batch. Pass what is trained as parameters."
        )
    trained = jax.tree.map(lambda x: x.perturbed, params, is_leaf=is_primal)
    args = values(params), trained, values(microbatches), values(key)
    out, grads = _run(model, *model.training, *args)
    return out, (grads, jax.tree.map(lambda x: jnp.zeros(0, x.dtype), values(params)))


def _loss_backward(model: Model, residuals: Any, cotangents: Any) -> Any:
    del model
    grads, like = residuals
    (of_sum, _), _ = cotangents  # weight and aux do not depend on the parameters
    if isinstance(of_sum, SymbolicZero):
        grads = jax.tree.map(jnp.zeros_like, grads)
    else:  # before the cast: a sum over a batch may be more than a narrow dtype holds
        grads = jax.tree.map(lambda g: g * of_sum, grads)
    return jax.tree.map(lambda g, x: g.astype(x.dtype), grads, like), None, None


loss.defvjp(_loss_forward, _loss_backward, symbolic_zeros=True)


def _run(
    model: Model,
    schedule: Schedule,
    program: Instructions,
    params: Any,
    trained: Any,
    microbatches: Any,
    key: Any,
) -> tuple[Any, Any]:
    """Runs a schedule over the pipeline's mesh axis.

    Returns:
      ``((sum, weight), aux)``, and gradients as the parameters: zeros of those not trained.
    """
    treedef: Any
    shared_treedef: Any
    (layers, treedef), (shared, shared_treedef) = map(jax.tree.flatten, params)
    of_layers, of_shared = ([bool(t) for t in jax.tree.leaves(part)] for part in trained)
    masks = of_layers, of_shared
    tables = [segment.tables for segment in program.segments]

    def on_stage(layers: Arrays, shared: Arrays, microbatches: Any, key: Any, tables: Any) -> Any:
        tables = [{name: x[..., 0] for name, x in table.items()} for table in tables]
        trees = (treedef, of_layers), (shared_treedef, of_shared)
        executor = make_executor(model, schedule, program, *trees)
        rows = [
            _with_replicas(model, model.rows.to_stage(x, shape))
            for x, shape in zip(layers, shapes, strict=True)
        ]
        buffers = executor.run(
            LayerParams(*_partition(rows, of_layers)),
            LayerParams(*_partition(shared, of_shared)),
            microbatches,
            key,
            tables,
        )
        return _sum_over_stages(model, buffers)

    shapes = [x.shape for x in layers]
    on_stages, nothing = [model.rows.spec(x) for x in layers], P()
    trained_layers, _ = _partition(layers, of_layers)
    trained_shared, _ = _partition(shared, of_shared)
    mapped = over_axis(
        model,
        on_stage,
        (on_stages, nothing, nothing, nothing, P(None, None, model.axis)),
        (nothing, _partition(on_stages, of_layers)[0], [nothing] * len(trained_shared)),
        (
            nothing,
            [spec_of_layers(model, x) for x in trained_layers],
            [jax.typeof(x).sharding.spec for x in trained_shared],
        ),
    )
    totals, *grads = mapped(layers, shared, microbatches, key, jax.tree.map(jnp.asarray, tables))
    if schedule.forward_only:
        return totals, None
    full = map(_merge, grads, (layers, shared), masks)
    return totals, tuple(
        t.unflatten(x) for t, x in zip((treedef, shared_treedef), full, strict=True)
    )


def make_executor(
    model: Model,
    schedule: Schedule,
    program: Instructions,
    layers: tuple[Any, list[bool]],
    shared: tuple[Any, list[bool]],
    kind: Any = Executor,
    **more: Any,
) -> Any:
    """The executor of one stage, over leaves in place of trees of parameters.

    Args:
      model: the model.
      schedule: the table.
      program: its instructions.
      layers: the tree of the layers, and for each leaf whether it is trained.
      shared: those of the shared parameters.
      kind: ``Executor``, or a class derived from it.
      **more: what the derived class has beside.
    """

    def args(microbatch: Any, key: Any) -> tuple[Any, ...]:
        return (microbatch,) if key is None else (microbatch, key)

    def layer(params: LayerParams, x: Any, microbatch: Any, key: Any) -> Any:
        tree = layers[0].unflatten(_interleave(*params, layers[1]))
        # Elsewhere the layers are whole. A gather would hide that residuals are parameters.
        tree = gather(tree) if model.gather_layers else tree
        return model.block(tree, x, *args(microbatch, key))

    def embed(params: Any, microbatch: Any, key: Any) -> Any:
        return model.embed(params, *args(microbatch, key))

    def head(params: Any, x: Any, microbatch: Any, key: Any) -> Any:
        out = model.head(params, x, *args(microbatch, key))
        (sum_, weight), aux = out if model.has_aux else (out, ())
        return jnp.asarray(sum_), (lax.stop_gradient(jnp.asarray(weight)), aux)

    def join(trained: Arrays, frozen: Arrays) -> Any:
        return shared[0].unflatten(_interleave(trained, frozen, shared[1]))

    counts = model.layer_counts
    stage = Stage(layer, max(counts), uneven=min(counts) < max(counts))
    ends = Ends(embed, head, join)
    return kind(schedule, program, stage, ends, counts, model.recompute, model.axis, **more)


def over_axis(
    model: Model,
    fn: Callable[..., Any],
    in_specs: Any,
    out_specs: Any,
    out_types: Any,
) -> Callable[..., Any]:
    """A ``shard_map`` over the pipeline's axis; other mesh axes stay as they are.

    Args:
      model: the mesh and the axis.
      fn: the function.
      in_specs: of its arguments, on the pipeline's axis.
      out_specs: of its results.
      out_types: specs of the results on all axes, or a prefix: Explicit axes require them.
    """
    context = jax.sharding.get_abstract_mesh()
    # Inside another shard_map and inside auto_axes, the mesh is that of the context.
    given = context.empty and AxisType.Explicit not in model.mesh.axis_types
    mapped: Callable[..., Any] = jax.shard_map(
        fn,
        mesh=model.mesh if given else None,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={model.axis},
        check_vma=False,
    )
    # Called eagerly, a shard_map over some of the axes knows nothing of the others.
    return jax.jit(on_auto_axes(model.mesh, mapped, out_types))


def on_auto_axes(mesh: AnyMesh, fn: Callable[..., Any], out_types: Any) -> Callable[..., Any]:
    """A function inside which Explicit axes are Auto.

    Args:
      mesh: with such axes or not; in a context that has a mesh, that one is meant.
      fn: the function.
      out_types: specs of its results, or a prefix.
    """
    context = jax.sharding.get_abstract_mesh()
    mesh = mesh if context.empty else context
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(name for name, kind in kinds if kind == AxisType.Explicit)
    if not explicit:
        return fn
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), out_types, is_leaf=is_spec)
    return jax.sharding.auto_axes(fn, axes=explicit, out_sharding=shardings)


def spec_of_layers(model: Model, x: Any) -> PartitionSpec:
    """On all axes, as far as they are Explicit, and on the stages'."""
    spec = jax.typeof(x).sharding.spec
    named = any(model.axis in axes_of(entry) for entry in spec)
    return spec if named else model.rows.spec(x, spec)


def _sum_over_stages(model: Model, buffers: Buffers) -> tuple[Any, Arrays, Arrays]:
    """Sums over stages; gradients of rows stay where the rows are."""
    totals = lax.psum(buffers.totals, model.axis)
    aux = jax.tree.map(lambda x, one: x.astype(one.dtype), totals.aux, buffers.totals.aux)
    aux = jax.tree.map(join_microbatches, aux)
    with jax.named_scope("shared_gradients"):
        shared = lax.psum(buffers.shared_grads, model.axis)
    rows = [model.rows.from_stage(_without_replicas(model, x)) for x in buffers.layer_grads]
    return ((totals.sum, totals.weight), aux), rows, shared


def _mirror(model: Model) -> list[tuple[int, int]]:
    """(stage, other stage): where the same virtual stage is on the other route."""
    routes = model.schedule.routes
    return [(here.stage, there.stage) for here, there in zip(*routes, strict=True)]


def _with_replicas(model: Model, x: jax.Array) -> jax.Array:
    """This stage's rows, and those that it has as a replica: of the second of two routes."""
    if len(model.schedule.routes) == 1:
        return x
    with jax.named_scope("replicas"):
        return jnp.concatenate([x, lax.ppermute(x, model.axis, _mirror(model))])


def _without_replicas(model: Model, x: jax.Array) -> jax.Array:
    """The transpose of ``_with_replicas``."""
    if len(model.schedule.routes) == 1:
        return x
    own, replica = jnp.split(x, 2)
    back = [(there, here) for here, there in _mirror(model)]
    with jax.named_scope("replicas"):
        return own + lax.ppermute(replica, model.axis, back)


# --- Trees and leaves -----------------------------------------------------------------------------


def _partition(leaves: Arrays, is_trained: Sequence[bool]) -> tuple[Arrays, Arrays]:
    """The trained leaves, and the others."""
    pairs = list(zip(leaves, is_trained, strict=True))
    return [x for x, t in pairs if t], [x for x, t in pairs if not t]


def _interleave(trained: Arrays, frozen: Arrays, is_trained: Sequence[bool]) -> Arrays:
    """The inverse of ``_partition``."""
    parts = iter(trained), iter(frozen)
    return [next(parts[0 if t else 1]) for t in is_trained]


def _merge(grads: Arrays, leaves: Arrays, is_trained: Sequence[bool]) -> Arrays:
    """Gradients of all parameters: zeros of those not trained."""
    found = iter(grads)
    return [
        next(found) if t else jnp.zeros_like(x) for x, t in zip(leaves, is_trained, strict=True)
    ]
