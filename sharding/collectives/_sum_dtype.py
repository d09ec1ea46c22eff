"""The dtype of sums over devices and of error-feedback residuals: float32 or wider."""

from typing import Any

import jax
import jax.numpy as jnp

from sharding._types import DType


def sum_dtype(dtype: DType) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def to_sum_dtype(x: jax.Array) -> jax.Array:
    return x.astype(sum_dtype(x.dtype))
