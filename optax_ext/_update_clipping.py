"""Update clipping of Adafactor and CAME: by the RMS of each update."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from optax_ext import _matrix_passes
from optax_ext._factored_moments import inverse_root, multiply
from optax_ext._factoring import Factoring


def clip(hyper: Any, dims: Factoring, leaf: Any) -> Any:
    """Adds the factors of ``u``, which is ``g / sqrt(v)`` clipped by its RMS: a phase of a step."""
    factors, threshold = inverse_root(leaf.v, dims), hyper.clipping_threshold
    if threshold is not None and leaf.g.size:
        u = multiply(leaf.g.astype(leaf.dtype), _matrix_passes.recomputed(factors, factors))
        factors += (1.0 / jnp.maximum(1.0, rms(u, dims) / threshold),)  # (1, 1)
    return leaf._replace(factors=factors)


def rms(x: jax.Array, dims: Factoring) -> jax.Array:
    """Returns the root mean square of every batch slice, shaped to broadcast against ``x``."""
    reduced = tuple(d for d in range(x.ndim) if d not in dims.batch)
    # Divided last: XLA on CPUs would write a matrix of the scale that arrays share. By a float: JAX
    # converts integers to int32, and large models have arrays of more elements.
    count = float(math.prod(x.shape[d] for d in reduced))
    mean = jnp.sum(jnp.square(x), reduced, keepdims=True) / count
    zero = mean == 0  # where the derivative of the root is not finite
    return jnp.where(zero, 0.0, jnp.sqrt(jnp.where(zero, 1.0, mean)))
