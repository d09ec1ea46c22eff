"""The loss of a pipeline and its derivative: one run of a schedule gives both."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from sharding.pipeline._executor import Buffers, Executor, own_columns, sum_totals
from sharding.pipeline._instructions import Instructions
from sharding.pipeline._model import Model, ParamTree, over_axis, spec_of_layers
from sharding.pipeline._schedule import Schedule
from sharding.pipeline._stage import Arrays

P = PartitionSpec


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
    (layers, shared), trees = zip(*map(jax.tree.flatten, params), strict=True)
    layer_tree, shared_tree = (
        ParamTree(treedef, [bool(t) for t in jax.tree.leaves(part)])
        for treedef, part in zip(trees, trained, strict=True)
    )
    tables = [segment.tables for segment in program.segments]
    shapes = [x.shape for x in layers]

    def on_stage(layers: Arrays, shared: Arrays, microbatches: Any, key: Any, tables: Any) -> Any:
        rows = [
            _with_replicas(model, model.rows.to_stage(x, shape))
            for x, shape in zip(layers, shapes, strict=True)
        ]
        executor = Executor(
            model,
            schedule,
            program,
            (layer_tree, shared_tree),
            layer_tree.split(rows),
            shared_tree.split(shared),
            microbatches,
            key,
        )
        return _sum_over_stages(model, executor.run(own_columns(tables)))

    on_stages, nothing = [model.rows.spec(x) for x in layers], P()
    trained_layers, trained_shared = layer_tree.split(layers).trained, shared_tree.split(shared)[0]
    mapped = over_axis(
        model,
        on_stage,
        (on_stages, nothing, nothing, nothing, P(None, None, model.axis)),
        (nothing, layer_tree.split(on_stages).trained, [nothing] * len(trained_shared)),
        (
            nothing,
            [spec_of_layers(model, x) for x in trained_layers],
            [jax.typeof(x).sharding.spec for x in trained_shared],
        ),
    )
    out = mapped(layers, shared, microbatches, key, jax.tree.map(jnp.asarray, tables))
    totals, layer_grads, shared_grads = out
    if schedule.forward_only:
        return totals, None
    return totals, (layer_tree.full(layer_grads, layers), shared_tree.full(shared_grads, shared))


def _sum_over_stages(model: Model, buffers: Buffers) -> tuple[Any, Arrays, Arrays]:
    """Sums over stages; gradients of rows stay where the rows are."""
    totals = sum_totals(buffers.totals, model.axis)
    with jax.named_scope("shared_gradients"):
        shared = lax.psum(buffers.shared_grads, model.axis)
    rows = [model.rows.from_stage(_without_replicas(model, x)) for x in buffers.layer_grads]
    return totals, rows, shared


# --- Two routes: each stage has a replica of another one's layers ---------------------------------


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
