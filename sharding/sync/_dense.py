"""Lossless dense gradient sync: the baseline."""

import jax
import jax.numpy as jnp
from jax import lax

from sharding._types import DType
from sharding.collectives._reduce_scatter import psum_scatter
from sharding.collectives._sum_dtype import to_sum_dtype
from sharding.placement._specs import Axes
from sharding.sync._interface import GradientSync, Method, StepContext, leafwise, stateless


def dense(dtype: DType = None) -> GradientSync:
    r"""Sends every gradient in full, :math:`\bar g = \frac 1n \sum_i g_i`: the baseline.

    Wire bytes per device: 2 (n - 1) / n times the gradient's for a full mean, (n - 1) / n for a
    shard of it.

    Args:
      dtype: the dtype in which gradients are sent and summed; None for their own.

    Raises:
      ValueError: if ``dtype`` is not a floating dtype.

    Example:
      >>> from sharding import sync
      >>> grad_sync = sync.dense("bfloat16")
    """
    if dtype is not None and not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        raise ValueError(f"dtype must be a floating dtype or None, got {dtype!r}.")
    method = dense_method(dtype)
    return leafwise(lambda path, x: method)


def dense_method(dtype: DType = None) -> Method:
    def mean(x: jax.Array, axes: Axes, context: StepContext, dim: int) -> jax.Array:
        return dense_mean(x.astype(dtype or x.dtype), axes, dim or None)

    return stateless(mean, is_linear=True, in_full=True)


def dense_mean(x: jax.Array, axes: Axes, dim: int | None = None) -> jax.Array:
    """The mean over devices in float32 or wider, or this device's shard of it along a dim."""
    total = lax.psum(x, axes) if dim is None else psum_scatter(x, axes, dim)
    return to_sum_dtype(total) / lax.axis_size(axes)
