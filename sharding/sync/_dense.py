"""The exchange that loses nothing: all of every gradient."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sharding.collectives._reduce_scatter import psum_scatter_auto
from sharding.placement._specs import Axes
from sharding.sync._interface import GradientSync, Method, Noise, leafwise, wide


def dense(dtype: Any = None) -> GradientSync:
    r"""All of every gradient: the baseline.

    .. math::

      \bar g = \frac 1n \sum_i g_i

    On the wire 2 (n - 1) / n of a gradient's bytes to each device, (n - 1) / n where it keeps a
    piece alone.

    Args:
      dtype: in which gradients are sent and summed; None for their own. The mean of a narrow float
        is of that precision, whatever it is returned in.

    Returns:
      A ``GradientSync`` without state.

    Raises:
      ValueError: if ``dtype`` is no floating dtype.

    Example:
      >>> from sharding import sync
      >>> exchange = sync.dense("bfloat16")
    """
    if dtype is not None and not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        raise ValueError(f"dtype must be a floating dtype or None, got {dtype!r}.")
    method = dense_method(dtype)
    return leafwise(lambda path, x: method)


def dense_method(dtype: Any = None) -> Method:
    """``dense`` for one array."""

    def mean(x: jax.Array, state: Any, axes: Axes, noise: Noise) -> tuple[jax.Array, Any]:
        del noise
        return dense_mean(x.astype(dtype or x.dtype), axes), state

    def piece(
        x: jax.Array, state: Any, axes: Axes, noise: Noise, dim: int
    ) -> tuple[jax.Array, Any]:
        del noise
        return dense_piece(x.astype(dtype or x.dtype), axes, dim), state

    return Method(lambda x: (), mean, piece, is_linear=True)


def dense_mean(x: jax.Array, axes: Axes) -> jax.Array:
    """The mean, summed in the array's dtype; in float32 at least."""
    return wide(lax.psum(x, axes)) / lax.axis_size(axes)


def dense_piece(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """This device's piece of it."""
    return wide(psum_scatter_auto(x, axes, dim)) / lax.axis_size(axes)
