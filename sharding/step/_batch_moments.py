"""Statistics of the batch of all devices, in a loss of each device's rows."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sharding._types import Array
from sharding.placement._specs import Axis


def batch_moments(
    x: Array, axis: Axis, dims: int | tuple[int, ...] = 0
) -> tuple[jax.Array, jax.Array]:
    """Mean and variance over the batch of all devices, as a batch norm computes them.

    In a ``Loss`` with ``per_device=True``, or any function that is mapped over ``axis``, they are
    those of the rows of all devices, and so are their gradients; elsewhere those of ``x`` alone.

    Args:
      x: (rows, ..., features); each device has as many rows.
      axis: the mesh axis, or axes, that the batch is sharded over.
      dims: the dims to reduce, the batch among them.

    Returns:
      ``(mean, variance)`` without ``dims``, the variance biased; in float32 at least.

    Raises:
      ValueError: in a function that is mapped over other axes of a mesh.

    Example:
      >>> import jax.numpy as jnp, sharding as shd
      >>> mean, var = shd.batch_moments(jnp.array([[1.0, 2.0], [3.0, 6.0]]), "data")
      >>> print(mean, var)
      [2. 4.] [1. 4.]
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    bound = _is_bound(axis)
    if manual and not bound:
        raise ValueError(f"axis {axis!r} is not among the axes {manual} that shard the batch here.")
    x = jnp.asarray(x)
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean, var = jnp.mean(x, dims), jnp.var(x, dims)
    if not bound:
        return mean, var
    total = lax.pmean(mean, axis)
    return total, lax.pmean(var + jnp.square(mean - total), axis)


def _is_bound(axis_name: Any) -> bool:
    """Whether there is such a mesh axis, or axis of ``vmap``, where this is called."""
    if axis_name is None:
        return False
    try:
        jax.lax.axis_size(axis_name)
    except NameError:
        return False
    return True
