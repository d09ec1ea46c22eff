"""A permutation that scatters neighbours, computed without a table."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Odd, so that they can be undone; their bits are those of the golden ratio and of the root of 3.
_FACTORS = (0x9E3779B1, 0xBB67AE85)


class Mixer:
    """A permutation of 0, 1, ... size - 1.

    Numbers of as many bits as size - 1 has are multiplied by odd factors and xored with their own
    upper halves; what leaves the range goes round again until it is back in it, as it must.

    Args:
      size: how many numbers, at most 2**31.
      seed: which permutation.
    """

    def __init__(self, size: int, seed: int = 0):
        self._size = size
        self._bits = max(2, math.ceil(math.log2(max(size, 2))))
        offsets = np.random.default_rng(seed).integers(0, 2**31, 2)
        self._factors = [(f + 2 * int(o)) % 2**32 for f, o in zip(_FACTORS, offsets, strict=True)]

    def mix(self, x: jax.Array) -> jax.Array:
        """Where each number goes; int32."""
        return self._walk(x, self._step)

    def unmix(self, x: jax.Array) -> jax.Array:
        """What goes to each number: undoes ``mix``."""
        return self._walk(x, self._step_back)

    def _walk(self, x: jax.Array, step: object) -> jax.Array:
        x = step(x.astype(jnp.uint32))  # type: ignore[operator]
        if self._size < 2**self._bits:
            x = lax.while_loop(
                lambda x: jnp.any(x >= self._size),
                lambda x: jnp.where(x < self._size, x, step(x)),  # type: ignore[operator]
                x,
            )
        return x.astype(jnp.int32)

    def _step(self, x: jax.Array) -> jax.Array:
        for factor in self._factors:
            x = self._fold(self._times(x, factor))
        return x

    def _step_back(self, x: jax.Array) -> jax.Array:
        for factor in reversed(self._factors):
            x = self._times(self._fold(x), pow(factor, -1, 2**32))
        return x

    def _times(self, x: jax.Array, factor: int) -> jax.Array:
        return (x * jnp.uint32(factor)) & jnp.uint32(2**self._bits - 1)

    def _fold(self, x: jax.Array) -> jax.Array:
        """Undoes itself: the upper half, which is xored into the lower one, stays what it is."""
        return x ^ (x >> ((self._bits + 1) // 2))
