"""Gradients: each device's loss and micro-batches, and what is summed over the devices."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from sharding import _pieces, _synced
from sharding._exchange import Exchange, exchange_of
from sharding._layout import Layout, Placement
from sharding._precision import Precision
from sharding._specs import entry_of
from sharding.sync import GradientSync

P = PartitionSpec


class LossOptions(NamedTuple):
    """What a loss function takes and returns; see ``Zero.train_step``."""

    has_aux: bool = False
    weighted: bool = False
    rngs: bool = False
    microbatches: int = 1
    # Whether the transformation asks how large the gradients of the pieces of a batch are.
    local_norm: bool = False

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
    exchange: Exchange,
    loss: Callable[..., Any],
    options: LossOptions,
    params: list[jax.Array],
    batch: Any,
    key: Any,
    sync_state: Any = None,
) -> tuple[list[jax.Array], dict[str, Any], Any]:
    """Gradients of the mean loss over all devices and micro-batches; runs inside a ``shard_map``.

    Args:
      exchange: how parameters and gradients travel.
      loss: of the list of parameters, a part of the batch, and a key if ``options`` says so.
      options: what it returns.
      params: as each device holds them.
      batch: this device's part.
      key: a random key that is the same on all devices, or None.
      sync_state: of the exchange, this device's.

    Returns:
      The reduced gradients of the trained parameters; the metrics, scalars of aux marked, with
      ``local`` what ``options.local_norm`` asks for; and the new state of the exchange.
    """
    steps, axes = options.microbatches, exchange.layout.data_axes
    if options.rngs:
        key = jax.random.fold_in(key, lax.axis_index(axes))
    cut = jax.tree.map(
        lambda x: x.reshape(steps, -1, *x.shape[1:]) if jnp.ndim(x) else jnp.full(steps, x), batch
    )

    def loss_args(part: Any, index: Any) -> tuple[Any, ...]:
        return (part, jax.random.fold_in(key, index)) if options.rngs else (part,)

    first = jax.tree.map(lambda x: x[0], cut)
    exchange = exchange.of_loss(loss, *jax.eval_shape(loss_args, first, 0))
    primals = exchange.primals(params)
    frozen = [None if t else x for t, x in zip(exchange.trained, primals, strict=True)]
    trained = [x for t, x in zip(exchange.trained, primals, strict=True) if t]

    def one(part: Any, index: Any) -> tuple[Any, Any]:
        """Sums over one micro-batch, and its aux."""

        def total_loss(trained: list[jax.Array]) -> tuple[Any, Any]:
            rest = iter(trained)
            whole = [next(rest) if x is None else x for x in frozen]
            out = loss(exchange.open(whole, params), *loss_args(part, index))
            value, aux = out if options.has_aux else (out, None)
            total, weight = value if options.weighted else (value, jnp.ones(()))
            return total, (weight, aux)

        with jax.named_scope("loss_and_grad"):
            value_and_grad = jax.value_and_grad(total_loss, has_aux=True)
            (total, (weight, aux)), grads = value_and_grad(trained)
        local: list[jax.Array] = []
        if options.local_norm:
            with jax.named_scope("local_norm"):
                local = _pieces.squares(
                    exchange, grads, _wide(weight) if options.weighted else None
                )
        return (_wide(total), _wide(weight), local, exchange.reduce_each(grads)), aux

    if steps == 1:
        (total, weight, local, grads), aux = one(first, 0)
    else:

        def add(sums: Any, inputs: Any) -> tuple[Any, Any]:
            new, aux = one(*inputs)
            # Without the barrier XLA:TPU moves the reductions out of the loop, and the whole
            # gradient is accumulated after all.
            new = lax.optimization_barrier(new)
            return jax.tree.map(lambda a, x: a + x.astype(a.dtype), sums, new), aux

        (total, weight, local, grads), _ = jax.eval_shape(one, first, 0)
        own = [x.dtype for t, x in zip(exchange.trained, params, strict=True) if t]
        zeros = (
            jnp.zeros((), total.dtype),
            jnp.zeros((), weight.dtype),
            [jnp.zeros((), x.dtype) for x in local],
            [
                jnp.zeros(x.shape, exchange.precision.of_accumulator(dtype))
                for x, dtype in zip(grads, own, strict=True)
            ],
        )
        (total, weight, local, grads), aux = lax.scan(add, zeros, (cut, jnp.arange(steps)))
        aux = jax.tree.map(_join_microbatches, aux)
    metrics: dict[str, Any] = {}
    total, *local = _pieces.psum_together([total, *local], axes)
    scale: Any = 1.0 / (steps * lax.axis_size(axes))
    if options.weighted:
        weight = lax.psum(weight, axes)
        scale = jnp.where(weight == 0, 0.0, 1 / jnp.where(weight == 0, 1.0, weight))
        metrics["weight"] = weight
    metrics["loss"] = total * scale
    if options.local_norm:
        metrics["local"] = {"local_squared_norm": local[0] * scale}
        if options.weighted:
            of_one = exchange.layout.num_shards if exchange.layout.stage == 3 else 1
            metrics["local"]["num_pieces"] = local[1] / of_one
    if options.has_aux:
        metrics["aux"] = mark_scalars(aux)
    if exchange.sync is not None:
        grads, sync_state = exchange.sync_rest(grads, sync_state, scale)
    else:
        grads = [g * scale for g in exchange.reduce_rest(grads)]
    return grads, metrics, sync_state


def gradients(
    layout: Layout,
    precision: Precision,
    loss_fn: Callable[..., Any],
    options: LossOptions,
    params: Any,
    batch: Any,
    key: Any,
    placed: Placement,
    trained: Any,
    sync: GradientSync | None = None,
    sync_state: Any = None,
) -> tuple[dict[str, Any], Any, Any]:
    """Metrics and reduced gradients of a batch that is cut over the mesh; inside ``on_mesh``.

    Gradients lie as ``placed.shards``; those of parameters that are not trained are zeros. Last the
    new state of the exchange.
    """
    keeps_state = sync_state is not None
    exchange = exchange_of(layout, precision, params, placed, trained, sync, keeps_state)
    treedef: Any
    leaves, treedef = jax.tree.flatten(params)

    def loss(leaves: list[Any], *args: Any) -> Any:
        return loss_fn(treedef.unflatten(leaves), *args)

    def local(leaves: list[jax.Array], batch: Any, key: Any, sync_state: Any) -> Any:
        own = jax.tree.map(lambda x: x[0, 0], sync_state) if keeps_state else exchange.no_state()
        grads, metrics, new = device_gradients(exchange, loss, options, leaves, batch, key, own)
        return grads, metrics, jax.tree.map(lambda x: x[None, None], new)

    metric_specs = {"loss": P()}
    if options.weighted:
        metric_specs["weight"] = P()
    if options.local_norm:
        metric_specs["local"] = P()
    if options.has_aux:
        metric_specs["aux"] = P(entry_of(layout.data_axes))
    specs, shard_specs = (
        [layout.manual_spec(spec) for spec in treedef.flatten_up_to(tree)]
        for tree in (placed.params, placed.shards)
    )
    out_specs = [spec for spec, t in zip(shard_specs, exchange.trained, strict=True) if t]
    at = _synced.spec(layout)
    run = layout.shard_map(
        local, (specs, layout.batch_specs(batch), P(), at), (out_specs, metric_specs, at)
    )
    reduced, metrics, sync_state = run(leaves, batch, key, sync_state)
    rest = iter(reduced)
    grads = [next(rest) if t else x for t, x in zip(exchange.trained, leaves, strict=True)]
    grads = [
        g.astype(precision.of_result(x.dtype)) if t else jnp.zeros_like(g)
        for g, x, t in zip(grads, leaves, exchange.trained, strict=True)
    ]
    return average_scalars(metrics), treedef.unflatten(grads), sync_state if keeps_state else None


def evaluate(
    layout: Layout,
    precision: Precision,
    fn: Callable[..., Any],
    params: Any,
    batch: Any,
    placed: Placement,
    sync: GradientSync | None,
) -> Any:
    """``fn(params, batch)`` of a batch that is cut over the mesh; inside ``on_mesh``.

    ``sync`` says which tables are fetched by rows.
    """
    trained = jax.tree.map(lambda _: False, params)
    exchange = exchange_of(layout, precision, params, placed, trained, sync)
    treedef: Any
    leaves, treedef = jax.tree.flatten(params)

    def of_leaves(leaves: list[Any], batch: Any) -> Any:
        return fn(treedef.unflatten(leaves), batch)

    def local(leaves: list[jax.Array], batch: Any) -> Any:
        opened = exchange.of_loss(of_leaves, batch).open(leaves, leaves)
        return mark_scalars(of_leaves(opened, batch))

    specs = [layout.manual_spec(spec) for spec in treedef.flatten_up_to(placed.params)]
    run = layout.shard_map(local, (specs, layout.batch_specs(batch)), P(entry_of(layout.data_axes)))
    return average_scalars(run(leaves, batch))


def _wide(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _join_microbatches(x: jax.Array) -> jax.Array:
    """(micro-batch, ...) to one value: scalars are averaged, batch arrays concatenated."""
    if x.ndim == 1:
        return jnp.mean(x, axis=0)
    return x.reshape(math.prod(x.shape[:2]), *x.shape[2:])
