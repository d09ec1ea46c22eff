"""Gradients: each device's loss and micro-batches, and what is summed over the devices."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from sharding.placement._layout import Layout, Placement
from sharding.placement._specs import entry_of
from sharding.step import _local_norm, _model_state, _sync_state
from sharding.step._gather_params import call_with_shards
from sharding.step._param_plan import Exchange, exchange_of
from sharding.step._precision import Precision
from sharding.sync import GradientSync

P = PartitionSpec


# What a loss may ask of ``rngs``: nothing, a key for each micro-batch of a device, one for each
# example, or (for nnx models, which hold keys of their own) the number of the micro-batch, too.
NUMBERED: Any = object()
RNGS = (False, True, "per_example", NUMBERED)


class LossOptions(NamedTuple):
    """What a loss function takes and returns; see ``Zero.train_step``."""

    has_aux: bool = False
    weighted: bool = False
    rngs: bool | str = False
    microbatches: int = 1
    # Whether the transformation asks how large the gradients of the pieces of a batch are.
    local_norm: bool = False
    model_state: bool = False
    # How devices' model states become one: a prefix tree of _model_state.REDUCTIONS.
    reduction: Any = "mean"

    def check(self) -> "LossOptions":
        """Itself, or an error that names the bad option."""
        if self.microbatches < 1:
            raise ValueError(f"microbatches must be at least 1, got {self.microbatches}.")
        if self.rngs not in RNGS:
            raise ValueError(f"rngs must be a bool or 'per_example', got {self.rngs!r}.")
        _model_state.check_reduction(self.reduction)
        return self

    def split(self, out: Any) -> tuple[Any, Any, Any]:
        """``(value, new model state, aux)`` of what a loss returned; None for what it does not."""
        if self.model_state and self.has_aux:
            value, (model_state, aux) = out
        elif self.model_state:
            (value, model_state), aux = out, None
        else:
            (value, aux), model_state = out if self.has_aux else (out, None), None
        return value, model_state, aux


class Inputs(NamedTuple):
    """What a loss takes beside the parameters; None for what its options do not ask for."""

    batch: Any
    key: Any = None  # the same on all devices
    model_state: Any = None  # the same on all devices


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
    inputs: Inputs,
    sync_state: Any = None,
) -> tuple[list[jax.Array], dict[str, Any], Any, Any]:
    """Gradients of the mean loss over all devices and micro-batches; runs inside a ``shard_map``.

    Args:
      exchange: how parameters and gradients travel.
      loss: of the list of parameters, a micro-batch, and what else ``options`` asks for.
      options: what it takes and returns.
      params: as each device holds them.
      inputs: this device's shard of the batch, and what is the same on all devices.
      sync_state: of the exchange, this device's.

    Returns:
      The reduced gradients of the trained parameters; the metrics, scalars of aux marked, with
      ``local`` what ``options.local_norm`` asks for; the new state of the exchange; and the new
      model state, the same on all devices.
    """
    steps, axes = options.microbatches, exchange.layout.data_axes
    cut = jax.tree.map(
        lambda x: x.reshape(steps, -1, *x.shape[1:]) if jnp.ndim(x) else jnp.full(steps, x),
        inputs.batch,
    )

    def loss_args(part: Any, index: Any, model_state: Any) -> tuple[Any, ...]:
        args = (part, model_state) if options.model_state else (part,)
        # Micro-batches are numbered as they follow each other in the batch of all devices.
        number = lax.axis_index(axes) * steps + index
        return (*args, _key(options, inputs.key, number, part)) if options.rngs else args

    first = jax.tree.map(lambda x: x[0], cut)
    args = jax.eval_shape(loss_args, first, 0, inputs.model_state)
    exchange = exchange.of_loss(loss, *args)
    unchanged: list[bool] = []  # of the leaves of the model state; known when the loss is traced
    primals = exchange.primals(params)
    frozen = [None if t else x for t, x in zip(exchange.trained, primals, strict=True)]
    trained = [x for t, x in zip(exchange.trained, primals, strict=True) if t]

    def one(part: Any, index: Any, model_state: Any) -> tuple[Any, Any, Any]:
        """Sums over one micro-batch, the model state after it, and its aux."""

        def total_loss(trained: list[jax.Array]) -> tuple[Any, Any]:
            rest = iter(trained)
            whole = [next(rest) if x is None else x for x in frozen]
            leaves = exchange.open(whole, params)
            out = call_with_shards(loss, leaves, *loss_args(part, index, model_state))
            value, new, aux = options.split(out)
            if options.model_state:
                new, unchanged[:] = _model_state.checked(model_state, new)
            total, weight = value if options.weighted else (value, jnp.ones(()))
            return total, (weight, new, aux)

        with jax.named_scope("loss_and_grad"):
            value_and_grad = jax.value_and_grad(total_loss, has_aux=True)
            (total, (weight, model_state, aux)), grads = value_and_grad(trained)
        local: list[jax.Array] = []
        if options.local_norm:
            with jax.named_scope("local_norm"):
                local = _local_norm.squares(
                    exchange, grads, _wide(weight) if options.weighted else None
                )
        sums = (_wide(total), _wide(weight), local, exchange.reduce_each(grads))
        return sums, model_state, aux

    model_state = inputs.model_state
    if steps == 1:
        (total, weight, local, grads), model_state, aux = one(first, 0, model_state)
    else:

        def add(carry: Any, numbered: tuple[Any, Any]) -> tuple[Any, Any]:
            sums, model_state = carry
            new, model_state, aux = one(*numbered, model_state)
            # Without the barrier XLA:TPU moves the reductions out of the loop, and the whole
            # gradient is accumulated after all.
            new = lax.optimization_barrier(new)
            sums = jax.tree.map(lambda a, x: a + x.astype(a.dtype), sums, new)
            return (sums, model_state), aux

        (total, weight, local, grads), _, _ = jax.eval_shape(one, first, 0, model_state)
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
        (sums, model_state), aux = lax.scan(add, (zeros, model_state), (cut, jnp.arange(steps)))
        total, weight, local, grads = sums
        aux = jax.tree.map(_join_microbatches, aux)
    metrics: dict[str, Any] = {}
    total, *local = _local_norm.psum_together([total, *local], axes)
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
    if options.model_state:
        model_state = _model_state.reduced(
            inputs.model_state, model_state, unchanged, options.reduction, axes
        )
    return grads, metrics, sync_state, model_state


def _key(options: LossOptions, key: Any, number: jax.Array, part: Any) -> Any:
    """What the loss gets as its key for one micro-batch, by the number it has in the batch."""
    if options.rngs is NUMBERED:
        return number, None if key is None else jax.random.fold_in(key, number)
    if options.rngs != "per_example":
        return jax.random.fold_in(key, number)
    sizes = [x.shape[0] for x in jax.tree.leaves(part) if jnp.ndim(x)]
    if not sizes:
        raise ValueError("rngs='per_example': the batch holds scalars alone, and no examples.")
    size = sizes[0]
    return jax.vmap(jax.random.fold_in, (None, 0))(key, number * size + jnp.arange(size))


def gradients(
    layout: Layout,
    precision: Precision,
    loss_fn: Callable[..., Any],
    options: LossOptions,
    params: Any,
    inputs: Inputs,
    placed: Placement,
    trained: Any,
    sync: GradientSync | None = None,
    sync_state: Any = None,
) -> tuple[dict[str, Any], Any, Any, Any]:
    """Metrics and reduced gradients of a batch that is cut over the mesh; inside ``on_mesh``.

    Gradients lie as ``placed.shards``; those of parameters that are not trained are zeros. Last the
    new state of the exchange, and the new model state.
    """
    keeps_state = sync_state is not None
    exchange = exchange_of(layout, precision, params, placed, trained, sync, keeps_state)
    treedef: Any
    leaves, treedef = jax.tree.flatten(params)

    def loss(leaves: list[Any], *args: Any) -> Any:
        return loss_fn(treedef.unflatten(leaves), *args)

    def local(leaves: list[jax.Array], inputs: Inputs, sync_state: Any) -> Any:
        own = jax.tree.map(lambda x: x[0, 0], sync_state) if keeps_state else exchange.no_state()
        grads, metrics, own, model_state = device_gradients(
            exchange, loss, options, leaves, inputs, own
        )
        return grads, metrics, jax.tree.map(lambda x: x[None, None], own), model_state

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
    at = _sync_state.spec(layout)
    input_specs = Inputs(layout.batch_specs(inputs.batch), P(), P())
    run = layout.shard_map(local, (specs, input_specs, at), (out_specs, metric_specs, at, P()))
    reduced, metrics, sync_state, model_state = run(leaves, inputs, sync_state)
    rest = iter(reduced)
    grads = [next(rest) if t else x for t, x in zip(exchange.trained, leaves, strict=True)]
    grads = [
        g.astype(precision.of_result(x.dtype)) if t else jnp.zeros_like(g)
        for g, x, t in zip(grads, leaves, exchange.trained, strict=True)
    ]
    sync_state = sync_state if keeps_state else None
    return average_scalars(metrics), treedef.unflatten(grads), sync_state, model_state


def evaluate(
    layout: Layout,
    precision: Precision,
    fn: Callable[..., Any],
    params: Any,
    args: tuple[Any, ...],
    placed: Placement,
    sync: GradientSync | None,
) -> Any:
    """``fn(params, *args)``; inside ``on_mesh``.

    The first of ``args`` is a batch that is cut over the mesh; others are replicated. ``sync`` says
    which tables are fetched by rows.
    """
    trained = jax.tree.map(lambda _: False, params)
    exchange = exchange_of(layout, precision, params, placed, trained, sync)
    treedef: Any
    leaves, treedef = jax.tree.flatten(params)

    def of_leaves(leaves: list[Any], *args: Any) -> Any:
        return fn(treedef.unflatten(leaves), *args)

    def local(leaves: list[jax.Array], args: tuple[Any, ...]) -> Any:
        opened = exchange.of_loss(of_leaves, *args).open(leaves, leaves)
        return mark_scalars(call_with_shards(of_leaves, opened, *args))

    specs = [layout.manual_spec(spec) for spec in treedef.flatten_up_to(placed.params)]
    arg_specs = (layout.batch_specs(args[0]), *(P() for _ in args[1:]))
    run = layout.shard_map(local, (specs, arg_specs), P(entry_of(layout.data_axes)))
    return average_scalars(run(leaves, args))


def _wide(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _join_microbatches(x: jax.Array) -> jax.Array:
    """(micro-batch, ...) to one value: scalars are averaged, batch arrays concatenated."""
    if x.ndim == 1:
        return jnp.mean(x, axis=0)
    return x.reshape(math.prod(x.shape[:2]), *x.shape[2:])
