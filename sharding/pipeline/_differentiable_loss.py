"""The loss of a pipeline and its derivative: one run of a schedule gives both."""

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from sharding.pipeline._executor import Buffers, Executor, own_columns, sum_totals
from sharding.pipeline._instructions import Instructions
from sharding.pipeline._model import over_axis, spec_of_layers
from sharding.pipeline._schedule import Schedule
from sharding.pipeline._stage import Arrays, LayerParams

if TYPE_CHECKING:
    from sharding.pipeline._pipeline import Pipeline

P = PartitionSpec


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def loss(pipeline: "Pipeline", params: tuple[Any, Any], microbatches: Any, key: Any) -> Any:
    """``((sum, weight), aux)`` of an evaluation."""
    nothing = jax.tree.map(lambda _: False, params)
    return _run(pipeline, *pipeline._evaluation, params, nothing, microbatches, key)[0]


def _loss_forward(pipeline: "Pipeline", params: Any, microbatches: Any, key: Any) -> Any:
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
    out, grads = _run(pipeline, *pipeline._training, *args)
    return out, (grads, jax.tree.map(lambda x: jnp.zeros(0, x.dtype), values(params)))


def _loss_backward(pipeline: "Pipeline", residuals: Any, cotangents: Any) -> Any:
    del pipeline
    grads, like = residuals
    (of_sum, _), _ = cotangents  # weight and aux do not depend on the parameters
    if isinstance(of_sum, SymbolicZero):
        grads = jax.tree.map(jnp.zeros_like, grads)
    else:  # before the cast: a sum over a batch may be more than a narrow dtype holds
        grads = jax.tree.map(lambda g: g * of_sum, grads)
    return jax.tree.map(lambda g, x: g.astype(x.dtype), grads, like), None, None


loss.defvjp(_loss_forward, _loss_backward, symbolic_zeros=True)


def _run(
    pipeline: "Pipeline",
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
    layers, shared = (LayerParams.of(*part) for part in zip(params, trained, strict=True))
    tables = [segment.tables for segment in program.segments]

    def on_stage(shards: Any, shared: Any, microbatches: Any, key: Any, tables: Any) -> Any:
        rows = jax.tree.map(
            lambda x, like: _with_replicas(pipeline, pipeline._rows.to_stage(x, like.shape)),
            shards,
            params[0],
        )
        own = LayerParams.of(rows, trained[0]), LayerParams.of(shared, trained[1])
        executor = Executor(pipeline, schedule, program, own[0], own[1], microbatches, key)
        return _sum_over_stages(pipeline, executor.run(own_columns(tables)))

    nothing, on_stages = P(), functools.partial(jax.tree.map, pipeline._rows.spec)
    leaves, of_shared = jax.tree.leaves(layers.trained), jax.tree.leaves(shared.trained)
    mapped = over_axis(
        pipeline,
        on_stage,
        (on_stages(params[0]), nothing, nothing, nothing, P(None, None, pipeline.axis)),
        (nothing, on_stages(leaves), [nothing] * len(of_shared)),
        (
            nothing,
            [spec_of_layers(pipeline, x) for x in leaves],
            [jax.typeof(x).sharding.spec for x in of_shared],
        ),
    )
    totals, *grads = mapped(*params, microbatches, key, jax.tree.map(jnp.asarray, tables))
    if schedule.forward_only:
        return totals, None
    return totals, tuple(map(_with_zeros, (layers, shared), grads))


def _with_zeros(part: LayerParams, grads: Arrays) -> Any:
    """The tree of gradients: zeros of leaves that are not trained."""
    trained = jax.tree.unflatten(jax.tree.structure(part.trained), grads)
    return LayerParams(trained, jax.tree.map(jnp.zeros_like, part.frozen)).tree


def _sum_over_stages(pipeline: "Pipeline", buffers: Buffers) -> tuple[Any, Arrays, Arrays]:
    """Sums over stages; gradients of rows stay where the rows are."""
    totals = sum_totals(buffers.totals, pipeline.axis)
    with jax.named_scope("shared_gradients"):
        shared = lax.psum(buffers.shared_grads, pipeline.axis)
    rows = [
        pipeline._rows.from_stage(_without_replicas(pipeline, x))
        for x in jax.tree.leaves(buffers.layer_grads)
    ]
    return totals, rows, jax.tree.leaves(shared)


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
    """The transpose of ``_with_replicas``."""
    if len(pipeline.schedule.routes) == 1:
        return x
    own, replica = jnp.split(x, 2)
    back = [(there, here) for here, there in _mirror(pipeline)]
    with jax.named_scope("replicas"):
        return own + lax.ppermute(replica, pipeline.axis, back)
