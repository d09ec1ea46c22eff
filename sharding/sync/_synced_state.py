"""State of an exchange as global arrays: a row for every device."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sharding.placement._specs import Axis
from sharding.sync._interface import GradientSync


class SyncedState(NamedTuple):
    """What ``Zero`` keeps as ``opt_state`` where its exchange of gradients has a state.

    Attributes:
      inner_state: the transformation's.
      sync_state: the exchange's; each array has a first dim of devices between which gradients are
        exchanged, and a second of those of a copy (1 without copies).
    """

    inner_state: optax.OptState
    sync_state: Any


def transformation(
    sync: GradientSync, axis: Axis, num_devices: int
) -> optax.GradientTransformation:
    """An exchange as a gradient transformation, for a ``shard_map`` of one's own.

    Args:
      sync: the exchange.
      axis: the mesh axis, or axes, over which gradients become their mean.
      num_devices: how many devices these have.

    Returns:
      A ``GradientTransformation``. ``init``, outside the ``shard_map``, gives every array of the
      state a first dim of devices; inside, where ``update`` is called, it is 1: cut it over
      ``axis``.

    Raises:
      ValueError: inside, if ``axis`` is not one of the ``shard_map``'s.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> from sharding import sync
      >>> n = jax.device_count()
      >>> mesh = jax.make_mesh((n,), ("data",), axis_types=(AxisType.Auto,))
      >>> tx = sync.transformation(sync.top_k(0.1, min_size=1), "data", n)
      >>> def step(x, state):
      ...     return tx.update(x[0], state)
      >>> specs = (P("data"), P("data"))
      >>> step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(P(), P("data")),
      ...                              check_vma=False))
      >>> mean, state = step(jnp.ones((n, 10)), tx.init(jnp.ones(10)))
      >>> mean.shape, state.arrays["error"].shape == (n, 10)
      ((10,), True)
    """

    def init(params: optax.Params) -> Any:
        return jax.tree.map(
            lambda x: jnp.broadcast_to(x, (num_devices, *x.shape)), sync.init(params)
        )

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        del params
        mean, new = sync.all_reduce(updates, jax.tree.map(lambda x: x[0], state), axis)
        return mean, jax.tree.map(lambda x: x[None], new)

    return optax.GradientTransformation(init, update)


def resize(state: Any, num_devices: int) -> Any:
    """State of an exchange for another number of devices.

    Every device begins with the mean of what all had: what is sent later stays the same on
    average. For use on ``sync_state``, or on any tree in which the first dim of all arrays is that
    of devices; good inside ``jit``.

    Args:
      state: a tree of arrays.
      num_devices: how many devices there are now.

    Returns:
      The tree, its arrays with a first dim of ``num_devices``. Counts are those of the first
      device.
    """

    def one(x: Any) -> jax.Array:
        floating = jnp.issubdtype(x.dtype, jnp.inexact)
        row = jnp.mean(x, axis=0) if floating else x[0]
        return jnp.broadcast_to(row, (num_devices, *x.shape[1:]))

    return jax.tree.map(one, state)
