"""Bias correction of moving averages that start at zero."""

import math
from typing import Any

import jax
import jax.numpy as jnp


def one_minus_power(beta: Any, count: jax.Array, dtype: Any) -> jax.Array:
    """Returns ``1 - beta**count`` without the cancellation that float32 has at 0.9999."""
    concrete = isinstance(beta, float)
    log_beta: Any = (math.log(beta) if beta > 0 else -math.inf) if concrete else jnp.log(beta)
    return -jnp.expm1(count.astype(dtype) * log_beta)
