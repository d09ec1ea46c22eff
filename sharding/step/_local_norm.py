"""How large the gradients of the pieces of a batch are, for transformations that ask.

A piece is what has a gradient of its own before gradients meet: at stages below 3 what a device
computes of a micro-batch; at stage 3, where gradients leave the backward pass summed over the
devices of a copy, what a copy computes of it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from sharding.placement._layout import Layout
from sharding.step._param_plan import Exchange
from sharding.step._param_uses import uses
from sharding.step._precision import Precision


def asks(
    tx: optax.GradientTransformation,
    params: Any,
    opt_state: Any,
    precision: Precision,
    trained: Any,
) -> bool:
    """Whether what a transformation computes depends on ``local_squared_norm``."""

    def types(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)

    def update(arrays: list[Any], grads: Any, opt_state: Any, params: Any, value: Any) -> Any:
        extra_args = {"value": value, "local_squared_norm": arrays[0], "num_pieces": 2}
        run = optax.with_extra_args_support(tx).update
        return run(grads, opt_state, params, **extra_args)

    if not isinstance(tx, optax.GradientTransformationExtraArgs):
        return False
    grads = jax.tree.map(
        lambda x, t: jax.ShapeDtypeStruct(x.shape, precision.of_result(x.dtype) if t else x.dtype),
        params,
        trained,
    )
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    return bool(
        uses(update, [scalar], (), grads, types(opt_state), types(params), scalar).otherwise
    )


def num_pieces(layout: Layout, microbatches: int) -> int:
    """How many pieces there are.

    Raises:
      ValueError: if there is but one.
    """
    at_once = layout.num_replicas if layout.stage == 3 else layout.num_devices
    if at_once * microbatches < 2:
        why = (
            "at stage 3 gradients leave the backward pass summed over the devices of a copy, so "
            "that a micro-batch is one piece. Use microbatches=2 or more, a replica_axis, or a "
            "stage below 3"
            if layout.stage == 3 and layout.num_devices > 1
            else "this is one device with one micro-batch. Use microbatches=2 or more"
        )
        raise ValueError(
            "the transformation compares the gradient with those of the pieces of a batch "
            f"(local_squared_norm, as gradient_noise_scale does), and there is one piece: {why}."
        )
    return at_once * microbatches


def squares(
    exchange: Exchange, grads: list[jax.Array], weight: jax.Array | None
) -> list[jax.Array]:
    """This device's part of the sum over all pieces of ``|gradient of the sum|**2 / weight``.

    And with weights of their own its part of the number of pieces, times the devices of a piece.

    Args:
      exchange: how the gradients meet.
      grads: of the sum of losses over a micro-batch, before ``exchange.reduce_each``.
      weight: by which the sum is to be divided; None: by the number of devices.

    Raises:
      ValueError: if the gradient of a table was summed before it could be seen.
    """
    if any(exchange.by_rows):
        names = [p for p, t in zip(exchange.paths, exchange.trained, strict=True) if t]
        table = names[exchange.by_rows.index(True)]
        raise ValueError(
            "the transformation asks how large the gradients of single devices are "
            f"(local_squared_norm), and that of {table!r} is exchanged by rows as the backward "
            "pass makes it: no device has its own. Exchange the table whole (another sync), or use "
            "stage 3 with micro-batches."
        )
    layout = exchange.layout
    if layout.stage < 3:
        total = _sum_of_squares(grads)
    else:
        whole = [not cut.dim for cut in exchange.out()]
        weight = None if weight is None else lax.psum(weight, layout.axes)
        rest = [g for g, w in zip(grads, whole, strict=True) if w]
        total = _sum_of_squares([g for g, w in zip(grads, whole, strict=True) if not w])
        if rest:
            total = total + _sum_of_squares(lax.psum(rest, layout.axes)) / layout.num_shards
    if weight is None:
        return [total / layout.num_shards if layout.stage == 3 else total]
    some = weight > 0
    return [jnp.where(some, total / jnp.where(some, weight, 1), 0), some.astype(total.dtype)]


def _sum_of_squares(arrays: list[jax.Array]) -> jax.Array:
    """In float32 or wider."""
    wide = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in arrays)
    return sum((jnp.sum(jnp.square(x)) for x in wide), start=jnp.zeros((), jnp.float32))


def psum_together(scalars: list[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """Sums of scalars over devices, of several in one collective."""
    if len(scalars) == 1:
        return [lax.psum(scalars[0], axes)]
    dtypes = [x.dtype for x in scalars]
    wide = jnp.result_type(*dtypes)
    sums = lax.psum(jnp.stack([x.astype(wide) for x in scalars]), axes)
    return [x.astype(dtype) for x, dtype in zip(sums, dtypes, strict=True)]
