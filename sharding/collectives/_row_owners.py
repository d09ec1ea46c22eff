"""Which device owns each row of a sparse gradient: ranges of rows, or of their hash."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Odd, hence invertible modulo 2**32; the bits of the golden ratio and of the square root of 3.
_FACTORS = (0x9E3779B1, 0xBB67AE85)


class RowHash:
    """The hash of rows: a pseudorandom permutation of 0, ..., size - 1, at most 2**31.

    Neighbours are far apart. Numbers of as many bits as size - 1 are multiplied by odd factors and
    xored with their own upper halves; both steps are invertible. A result of size or more is
    permuted again until it is less (cycle walking).
    """

    def __init__(self, size: int, seed: int = 0):
        self._size = size
        self._bits = max(2, math.ceil(math.log2(max(size, 2))))
        offsets = np.random.default_rng(seed).integers(0, 2**31, 2)
        self._factors = [(f + 2 * int(o)) % 2**32 for f, o in zip(_FACTORS, offsets, strict=True)]

    def apply(self, x: jax.Array) -> jax.Array:
        """The image of each number; int32."""
        return self._walk(x, self._forward)

    def invert(self, x: jax.Array) -> jax.Array:
        """The number whose image is each of these; int32."""
        return self._walk(x, self._backward)

    def _walk(self, x: jax.Array, step: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Repeats a step on the numbers that are outside the range."""
        size, x = self._size, step(x.astype(jnp.uint32))
        if size < 2**self._bits:
            again = lambda x: jnp.where(x < size, x, step(x))  # noqa: E731
            x = lax.while_loop(lambda x: jnp.any(x >= size), again, x)
        return x.astype(jnp.int32)

    def _forward(self, x: jax.Array) -> jax.Array:
        for factor in self._factors:
            x = self._fold(self._multiply(x, factor))
        return x

    def _backward(self, x: jax.Array) -> jax.Array:
        for factor in reversed(self._factors):
            x = self._multiply(self._fold(x), pow(factor, -1, 2**32))
        return x

    def _multiply(self, x: jax.Array, factor: int) -> jax.Array:
        return (x * jnp.uint32(factor)) & jnp.uint32(2**self._bits - 1)

    def _fold(self, x: jax.Array) -> jax.Array:
        """Xors the upper half into the lower one; its own inverse, as the upper half stays."""
        return x ^ (x >> ((self._bits + 1) // 2))


class RowOwners:
    """Which device owns each row of an array, and in which slot of its memory.

    The permutation maps rows to slots, counted over all owners; without one each owner has
    contiguous rows. Each owner has ``num_slots``; the last ones of the last owners may be empty.
    """

    def __init__(self, num_rows: int, num_owners: int, permutation: RowHash | None = None):
        self.num_rows, self.num_owners = num_rows, num_owners
        self.num_slots = -(-num_rows // num_owners)
        self._permutation = permutation

    def row_of_slots(self) -> jax.Array:
        """The row in every slot, owner after owner; ``num_rows`` in empty slots."""
        slot = jnp.arange(self.num_owners * self.num_slots, dtype=jnp.int32)
        if self._permutation is None:
            return jnp.minimum(slot, self.num_rows)
        row = self._permutation.invert(jnp.minimum(slot, self.num_rows - 1))
        return jnp.where(slot < self.num_rows, row, self.num_rows)

    def slot_of(self, rows: jax.Array) -> jax.Array:
        """The slot of each row, counted over all owners."""
        return rows if self._permutation is None else self._permutation.apply(rows)
