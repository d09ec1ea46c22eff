"""Scales that the train state carries: clips that are trained, and magnitudes of earlier steps.

Both are leaves beside the parameters, and what is learned of them in a step is their gradient.
PACT's clip (Choi et al. 2018) has an ordinary one. For delayed scaling a leaf has one element for
each quarter of a power of two: the number of steps since a largest magnitude was in that bin. Its
"gradient" is positive in the bins of the step. Sums and means, over micro-batches and devices,
keep which these are, so that the largest magnitude of the bins is that of all rows of the step.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sharding._types import Tree
from sharding.matmuls._grids import Grid

# Of the bits of float32 those of the exponent and two of the fraction, up to infinity. A prime
# number: no stage shards bins.
BINS = 1021
NEVER = 2.0**20  # steps; in 16 bits it is above any history, too


class ScaledParams(NamedTuple):
    """Parameters, and what a recipe carries for scales of their products, by their paths."""

    params: Tree
    pact: dict[str, dict[str, Any]]  #: clips of activations, (layers, 1) or (1,); they are trained
    delayed: dict[str, dict[str, Any]]  #: of each operand, (layers, 1021), steps since magnitudes


def clip_of(carried: jax.Array, history: int) -> jax.Array:
    """The largest magnitude that has a code: PACT's clip, or the top of the largest recent bin."""
    if carried.shape == (1,):
        return carried
    recent = jnp.where(carried < history, jnp.arange(1, BINS + 1, dtype=jnp.uint32), 0)
    return lax.bitcast_convert_type(jnp.max(recent) << 21, jnp.float32)


def bin_of(x: jax.Array) -> jax.Array:
    """One for the bin of the largest magnitude; zeros if that is not finite."""
    largest = jnp.max(jnp.abs(x), initial=0)
    bits = lax.bitcast_convert_type(largest.astype(jnp.float32), jnp.uint32) >> 21
    index = jnp.where(jnp.isfinite(largest), bits.astype(jnp.int32), BINS)
    return jax.nn.one_hot(index, BINS, dtype=jnp.float32)


def clipped(x: jax.Array, clip: jax.Array, grid: Grid) -> jax.Array:
    """Within PACT's clip, which gets the cotangents of what is not; these are not finite, still."""
    inside = jnp.where(x >= clip, clip, x)
    low = -clip if grid.signed else jnp.zeros_like(clip)
    return jnp.where(jnp.isfinite(x), jnp.where(x <= low, low, inside), x)
