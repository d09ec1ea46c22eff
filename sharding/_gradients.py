"""Gradients: each device's loss and micro-batches, and what is summed over the devices."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from sharding._collectives import Axis, reduce_scatter, scatter_spec
from sharding._layout import Layout

P = PartitionSpec


class LossOptions(NamedTuple):
    """What a loss function takes and returns; see ``Zero.train_step``."""

    has_aux: bool = False
    weighted: bool = False
    rngs: bool = False
    microbatches: int = 1

    def check(self) -> "LossOptions":
        """Itself, or an error that names the bad option."""
        if self.microbatches < 1:
            raise ValueError(f"microbatches must be at least 1, got {self.microbatches}.")
        return self


class _Scalar(NamedTuple):
    """Marks what was a scalar on each device: on the mesh it is an array over the devices."""

    value: jax.Array


def mark_scalars(tree: Any) -> Any:
    """Gives every leaf a first dim to concatenate devices along; scalars are marked."""
    return jax.tree.map(lambda x: x if jnp.ndim(x) else _Scalar(jnp.asarray(x)[None]), tree)


def average_scalars(tree: Any) -> Any:
    """Undoes ``mark_scalars`` on the mesh: marked scalars become their mean over the devices."""
    return jax.tree.map(
        lambda x: jnp.mean(x.value, axis=0) if isinstance(x, _Scalar) else x,
        tree,
        is_leaf=lambda x: isinstance(x, _Scalar),
    )


def device_gradients(
    loss_fn: Callable[..., Any],
    options: LossOptions,
    params: Any,
    batch: Any,
    key: Any,
    *,
    axis: Axis,
    reduce: Callable[[Any], Any],
    reduce_each: bool,
) -> tuple[Any, dict[str, Any]]:
    """Gradients of the mean loss over all devices and micro-batches; runs inside a ``shard_map``.

    Args:
      loss_fn: see ``Zero.train_step``.
      options: what it takes and returns.
      params: whole parameters.
      batch: this device's part.
      key: a random key that is the same on all devices, or None.
      axis: the mesh axes to sum over.
      reduce: sums a gradient tree over the axes and keeps this device's part.
      reduce_each: reduce the gradients of each micro-batch, and accumulate what is kept.

    Returns:
      The reduced gradients in the parameters' dtypes, and the metrics, scalars of aux marked.
    """
    steps = options.microbatches
    if options.rngs:
        key = jax.random.fold_in(key, lax.axis_index(axis))

    def one(part: Any, index: Any) -> tuple[Any, Any]:
        """Sums over one micro-batch, and its aux."""
        args = (part, jax.random.fold_in(key, index)) if options.rngs else (part,)

        def total_loss(params: Any) -> tuple[Any, Any]:
            out = loss_fn(params, *args)
            loss, aux = out if options.has_aux else (out, None)
            total, weight = loss if options.weighted else (loss, jnp.ones(()))
            return total, (weight, aux)

        with jax.named_scope("loss_and_grad"):
            value_and_grad = jax.value_and_grad(total_loss, has_aux=True)
            (total, (weight, aux)), grads = value_and_grad(params)
        return (_wide(total), _wide(weight), reduce(grads) if reduce_each else grads), aux

    if steps == 1:
        (total, weight, grads), aux = one(batch, 0)
    else:
        cut = jax.tree.map(
            lambda x: x.reshape(steps, -1, *x.shape[1:]) if jnp.ndim(x) else jnp.full(steps, x),
            batch,
        )

        def add(sums: Any, inputs: Any) -> tuple[Any, Any]:
            new, aux = one(*inputs)
            # Without the barrier XLA:TPU moves the reductions out of the loop, and the whole
            # gradient is accumulated after all.
            new = lax.optimization_barrier(new)
            return jax.tree.map(lambda a, x: a + x.astype(a.dtype), sums, new), aux

        shapes, _ = jax.eval_shape(one, jax.tree.map(lambda x: x[0], cut), 0)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, _wide_dtype(x)), shapes)
        (total, weight, grads), aux = lax.scan(add, zeros, (cut, jnp.arange(steps)))
        aux = jax.tree.map(_join_microbatches, aux)
    if not reduce_each:
        grads = reduce(_cast_like(grads, params))
    total = lax.psum(total, axis)
    metrics = {}
    scale: Any = 1.0 / (steps * lax.axis_size(axis))
    if options.weighted:
        weight = lax.psum(weight, axis)
        scale = jnp.where(weight == 0, 0.0, 1 / jnp.where(weight == 0, 1.0, weight))
        metrics["weight"] = weight
    metrics["loss"] = total * scale
    if options.has_aux:
        metrics["aux"] = mark_scalars(aux)
    return _cast_like(jax.tree.map(lambda g: g * scale, grads), params), metrics


def gradients(
    layout: Layout,
    loss_fn: Callable[..., Any],
    options: LossOptions,
    params: Any,
    batch: Any,
    key: Any,
    param_specs: Any,
) -> tuple[dict[str, Any], Any]:
    """Metrics and reduced gradients of a batch that is cut over the mesh; inside ``on_mesh``.

    Stages 1 and 2 return shards, as ``layout.cuts`` lays them.
    """
    _, dims, _ = layout.cuts(params, param_specs)

    def local(params: Any, batch: Any, key: Any) -> Any:
        return device_gradients(
            loss_fn,
            options,
            params,
            batch,
            key,
            axis=layout.axis,
            reduce=lambda grads: reduce_scatter(
                grads, dims, layout.axis, layout.other_axes, param_specs
            ),
            reduce_each=layout.stage == 2,
        )

    metric_specs = {"loss": P()}
    if options.weighted:
        metric_specs["weight"] = P()
    if options.has_aux:
        metric_specs["aux"] = P(layout.axis)
    run = layout.shard_map(
        local,
        (P(), layout.batch_specs(batch), P()),
        (jax.tree.map(lambda dim: scatter_spec(dim, layout.axis), dims), metric_specs),
    )
    grads, metrics = run(params, batch, key)
    return average_scalars(metrics), grads


def _wide_dtype(x: Any) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _wide(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    return x.astype(_wide_dtype(x))


def _cast_like(tree: Any, like: Any) -> Any:
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)


def _join_microbatches(x: jax.Array) -> jax.Array:
    """(micro-batch, ...) to one value: scalars are averaged, batch arrays concatenated."""
    if x.ndim == 1:
        return jnp.mean(x, axis=0)
    return x.reshape(math.prod(x.shape[:2]), *x.shape[2:])
