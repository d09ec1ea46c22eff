"""A gradient sync as a transformation: its state as global arrays, with a row for every device."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sharding._types import Array, Tree
from sharding.placement._specs import Axis
from sharding.sync._interface import GradientSync


class SyncedState(NamedTuple):
    """The ``opt_state`` of a train state under ``Zero`` with a stateful gradient sync.

    Attributes:
      inner_state: the state of the transformation.
      sync_state: the state of the sync, [synchronizing devices, shards of a replica, ...]; on a
        mesh with other axes dim 2 is that of their devices.
    """

    inner_state: optax.OptState
    sync_state: Any


def transformation(
    sync: GradientSync, axis: Axis, num_devices: int
) -> optax.GradientTransformation:
    """A gradient sync as a gradient transformation, for a ``shard_map`` of one's own.

    ``init`` runs outside the ``shard_map`` and gives every array of the state a first dim of
    ``num_devices``. ``update`` runs inside, where that dim is 1: shard it over ``axis``.

    Args:
      sync: the gradient sync.
      axis: the mesh axis, or axes, over which gradients are averaged.
      num_devices: how many devices are on them.

    Raises:
      ValueError: in ``update``, if the ``shard_map`` is not manual over ``axis``.

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
        state = sync.init(params)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_devices, *x.shape)), state)

    def update(updates: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        mean, new = sync.all_reduce(updates, jax.tree.map(lambda x: x[0], state), axis)
        return mean, jax.tree.map(lambda x: x[None], new)

    return optax.GradientTransformation(init, update)


def resize(state: Tree, num_devices: int) -> Any:
    """The state of a gradient sync, arrays (devices, ...), for ``num_devices`` others.

    Every device starts with the mean of the residuals, so that what is sent later stays the same on
    average; integers are those of the first device. Runs inside ``jit`` too.

    Example:
      >>> import jax.numpy as jnp
      >>> from sharding import sync
      >>> sync.resize({"error": jnp.array([[1.0], [3.0]])}, 3)["error"].tolist()
      [[2.0], [2.0], [2.0]]
    """

    def resize_array(x: Array) -> jax.Array:
        floating = jnp.issubdtype(x.dtype, jnp.inexact)
        row = jnp.mean(x, axis=0) if floating else x[0]
        return jnp.broadcast_to(row, (num_devices, *x.shape[1:]))

    return jax.tree.map(resize_array, state)
