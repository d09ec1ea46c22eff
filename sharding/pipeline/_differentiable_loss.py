"""The loss of a pipeline and its derivative: one run of a schedule gives both."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from sharding._types import Array, Tree
from sharding.pipeline._executor import Executor, sum_totals
from sharding.pipeline._instructions import Instructions
from sharding.pipeline._schedule import Schedule
from sharding.pipeline._stage import LayerParams
from sharding.placement._specs import AnyMesh, axes_of, explicit_axes, is_spec

if TYPE_CHECKING:
    from sharding.pipeline._pipeline import Pipeline

P = PartitionSpec
Lowered = tuple[Schedule, Instructions]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def loss(pipeline: "Pipeline", params: tuple[Any, Any], microbatches: Any, key: Any) -> Any:
    nothing = jax.tree.map(lambda _: False, params)
    return _run(pipeline, pipeline._evaluation, params, nothing, microbatches, key)[0]


def _loss_forward(pipeline: "Pipeline", params: Tree, microbatches: Any, key: Any) -> Any:
    def is_primal(x: Any) -> bool:
        return hasattr(x, "perturbed")

    def values(tree: Tree) -> Any:
        return jax.tree.map(lambda x: x.value, tree, is_leaf=is_primal)

    if any(x.perturbed for x in jax.tree.leaves(microbatches, is_leaf=is_primal)):
        raise ValueError(
            "a pipeline has no gradients of its batch. Pass what is trained as parameters."
        )
    trained = jax.tree.map(lambda x: x.perturbed, params, is_leaf=is_primal)
    args = values(params), trained, values(microbatches), values(key)
    out, grads = _run(pipeline, pipeline._training, *args)
    return out, (grads, jax.tree.map(lambda x: jnp.zeros(0, x.dtype), values(params)))


def _loss_backward(pipeline: "Pipeline", residuals: Tree, cotangents: Tree) -> Any:
    grads, like = residuals
    (of_sum, _), _ = cotangents  # weight and aux do not depend on the parameters
    if isinstance(of_sum, SymbolicZero):
        grads = jax.tree.map(jnp.zeros_like, grads)
    else:  # before the cast: a sum over a batch may be more than a narrow dtype holds
        grads = jax.tree.map(lambda g: g * of_sum, grads)
    return jax.tree.map(lambda g, x: g.astype(x.dtype), grads, like), None, None


loss.defvjp(_loss_forward, _loss_backward, symbolic_zeros=True)


def _run(
    pipeline: "Pipeline", lowered: Lowered, params: Tree, trained: Tree, microbatches: Any, key: Any
) -> tuple[Any, Any]:
    """``((sum, weight), aux)``, and gradients as the parameters: zeros of those not trained."""
    schedule, program = lowered
    parts = [LayerParams.of(*part) for part in zip(params, trained, strict=True)]
    layers, shared = (part.trained for part in parts)

    def on_stage(shards: Tree, shared: Any, microbatches: Any, key: Any, tables: Any) -> Any:
        rows = jax.tree.map(pipeline._rows.to_stage, shards, params[0])
        rows = jax.tree.map(functools.partial(_with_replicas, pipeline), rows)
        own = LayerParams.of(rows, trained[0]), LayerParams.of(shared, trained[1])
        buffers = Executor(pipeline, schedule, program, *own, microbatches, key).run(tables)
        # Sums over stages; gradients of rows stay where the rows are.
        totals = sum_totals(buffers.totals, pipeline.axis)
        with jax.named_scope("shared_gradients"):
            of_shared = lax.psum(buffers.shared_grads, pipeline.axis)
        of_rows = jax.tree.map(functools.partial(_without_replicas, pipeline), buffers.layer_grads)
        return totals, jax.tree.map(pipeline._rows.from_stage, of_rows), of_shared

    nothing = P()
    on_stages = functools.partial(jax.tree.map, pipeline._rows.spec)
    in_specs = on_stages(params[0]), nothing, nothing, nothing, P(None, None, pipeline.axis)
    of_layers = jax.tree.map(functools.partial(spec_of_layers, pipeline), layers)
    out_types = nothing, of_layers, jax.tree.map(lambda x: jax.typeof(x).sharding.spec, shared)
    out_specs = nothing, on_stages(layers), nothing
    mapped = over_axis(pipeline, on_stage, in_specs, out_specs, out_types)
    totals, *grads = mapped(*params, microbatches, key, program.tables())
    if schedule.forward_only:
        return totals, None
    zeros = [jax.tree.map(jnp.zeros_like, part.frozen) for part in parts]
    return totals, tuple(LayerParams(*both).tree for both in zip(grads, zeros, strict=True))


# --- Two routes: each stage has a replica of another one's layers ---------------------------------


def _mirror(pipeline: "Pipeline") -> list[tuple[int, int]]:
    """(stage, other stage): where the same virtual stage is on the other route."""
    routes = pipeline.schedule.routes
    return [(here.stage, there.stage) for here, there in zip(*routes, strict=True)]


def _with_replicas(pipeline: "Pipeline", x: jax.Array) -> jax.Array:
    """This stage's rows, and those that it has as a replica: of the second of two routes."""
    if len(pipeline.schedule.routes) == 1:
        return x
    with jax.named_scope("replicas"):
        return jnp.concatenate([x, lax.ppermute(x, pipeline.axis, _mirror(pipeline))])


def _without_replicas(pipeline: "Pipeline", x: jax.Array) -> jax.Array:
    if len(pipeline.schedule.routes) == 1:
        return x
    own, replica = jnp.split(x, 2)
    back = [(there, here) for here, there in _mirror(pipeline)]
    with jax.named_scope("replicas"):
        return own + lax.ppermute(replica, pipeline.axis, back)


# --- Functions over the axis of the stages --------------------------------------------------------


def over_axis(
    pipeline: "Pipeline", fn: Callable[..., Any], in_specs: Any, out_specs: Any, out_types: Any
) -> Callable[..., Any]:
    """A ``shard_map`` over the pipeline's axis; Explicit axes require types of its results."""
    # Inside another shard_map and inside auto_axes, the mesh is that of the context.
    given = jax.sharding.get_abstract_mesh().empty
    given = given and AxisType.Explicit not in pipeline.mesh.axis_types
    mapped: Callable[..., Any] = jax.shard_map(
        fn,
        mesh=pipeline.mesh if given else None,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={pipeline.axis},
        check_vma=False,
    )
    # Called eagerly, a shard_map over some of the axes knows nothing of the others.
    return jax.jit(on_auto_axes(pipeline.mesh, mapped, out_types))


def on_auto_axes(mesh: AnyMesh, fn: Callable[..., Any], out_types: Any) -> Callable[..., Any]:
    """A function inside which Explicit axes, of the context or of the mesh, are Auto."""
    context = jax.sharding.get_abstract_mesh()
    mesh = mesh if context.empty else context
    explicit = explicit_axes(mesh)
    if not explicit:
        return fn
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), out_types, is_leaf=is_spec)
    return jax.sharding.auto_axes(fn, axes=explicit, out_sharding=shardings)


def spec_of_layers(pipeline: "Pipeline", x: Array) -> PartitionSpec:
    """The spec of stacked layers on Explicit axes and on that of the stages."""
    spec = jax.typeof(x).sharding.spec
    named = any(pipeline.axis in axes_of(entry) for entry in spec)
    return spec if named else pipeline._rows.spec(x, spec)
