"""Number maps: the magnitudes between 0 and 1 that the codes of a format represent.

A map numbers its magnitudes in levels: level 0 is the smallest, and 0 if ``zero``; level ``top`` is
1, and ``lowest`` is the highest level that also has a negative code. ``value`` maps a level to its
magnitude; ``position`` maps a magnitude to a level with a fraction. Both are arithmetic: table
look-ups per element neither vectorize on TPUs nor fuse.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

# Zero as large arrays are compared with it. XLA makes one array of all that are +0, also of those
# that loops over layers start from, and reads it from memory; -0 is another one, a constant.
ZERO = -0.0


class _Map:
    zero = True

    @property
    def lowest(self: Any) -> int:
        return self.top


@dataclasses.dataclass(frozen=True)
class DynamicMap(_Map):
    """Powers of ten, each divided into twice as many equal intervals as the one below it.

    The midpoints of those of power i are ``10^(i + 1 - exponents) (0.1 + 0.9 (j + 1/2) / parts)``.
    """

    exponents: int
    signed: bool
    symmetric: bool = False  # without the level that has no negative: that below it is 1

    @property
    def top(self) -> int:
        return 2 ** (self.exponents + (not self.signed)) - (self.symmetric or not self.signed)

    @property
    def lowest(self) -> int:
        return self.top - (not self.symmetric)

    @property
    def _shift(self) -> int:
        """The offset that makes each power's first level its number of intervals."""
        return 0 if self.signed else 1

    @property
    def _largest(self) -> float:
        """The magnitude of the level of 1 where all levels have negatives."""
        return 1 - 0.45 / 2 ** (self.exponents - 1)

    def value(self, level: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        # The level is parts * (1 + share), with parts a power of two: the exponent of a float32.
        x = (level + self._shift).astype(jnp.float32)
        exponent = jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7F800000
        inverse = jax.lax.bitcast_convert_type((254 << 23) - exponent, jnp.float32)  # of parts
        unit = jnp.full([], 10.0 ** (1 - self.exponents), dtype)
        for i in range(1, self.exponents):
            first = 2 ** (i + self._shift) - self._shift
            unit = jnp.where(level >= first, jnp.full([], 10.0 ** (i + 1 - self.exponents)), unit)
        out = unit * (0.1 + 0.9 * ((x + 0.5) * inverse - 1).astype(dtype))
        out = out * (1 / self._largest) if self.symmetric else out
        out = jnp.where(level >= self.top, 1, out).astype(dtype)
        # Level 0 is 0; others are at least 1, and their magnitudes at most.
        return jnp.minimum(out, level.astype(dtype))

    def position(self, y: jax.Array) -> jax.Array:
        y = y * self._largest if self.symmetric else y
        # y is multiplied by a power of ten that takes it to 0.1 ... 1, in steps of 4, 2 and 1
        # decades: fewer operations than a comparison with each power.
        share, parts = y, jnp.full([], 2.0 ** (self.exponents - 1 + self._shift), y.dtype)
        highest = parts
        decades = 2 ** ((self.exponents - 1).bit_length() - 1)
        while decades:
            below = share < 10.0**-decades
            share = share * jnp.where(below, jnp.full([], 10.0**decades, y.dtype), 1)
            parts = parts * jnp.where(below, jnp.full([], 2.0**-decades, y.dtype), 1)
            decades //= 2
        inside = (share - 0.1) * (parts * (1 / 0.9)) - 0.5
        # Intervals are 0.9 wide. From the last midpoint of one power to the first of the next, seen
        # from below, it is 2.7, and to 1 it is 0.45; seen from above it is 0.54.
        beyond = inside - (parts - 1)
        above = parts - 1 + beyond * jnp.where(parts == highest, jnp.full([], 2.0, y.dtype), 1 / 3)
        out = jnp.where(beyond > ZERO, above, inside)
        out = jnp.where(inside < ZERO, inside * (1 / 0.6), out)
        least = 10.0 ** (1 - self.exponents) * (0.1 + 0.45 / 2**self._shift)
        return jnp.where(y < least, y * (1 / least), out + (parts - self._shift))


@dataclasses.dataclass(frozen=True)
class LinearMap(_Map):
    """Equal steps up to 1; level 0 is 0 if ``zero``, else one step."""

    top: int
    zero: bool

    def value(self, level: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        if self.zero:
            return level.astype(dtype) / self.top
        return (level + 1).astype(dtype) / (self.top + 1)

    def position(self, y: jax.Array) -> jax.Array:
        return y * self.top if self.zero else jnp.maximum(y * (self.top + 1) - 1, ZERO)


@dataclasses.dataclass(frozen=True)
class Float8Map(_Map):
    """The magnitudes of E4M3 (4 bits of exponent, 3 of fraction, no infinity) over 448."""

    top = 0x7E

    def value(self, level: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        normal = jax.lax.bitcast_convert_type((level + (120 << 3)) << 20, jnp.float32)
        small = level.astype(jnp.float32) * 2.0**-9
        return jnp.where(level < 8, small, normal).astype(dtype) / 448

    def position(self, y: jax.Array) -> jax.Array:
        x = (y * 448).astype(jnp.float32)
        bits = jax.lax.bitcast_convert_type(x, jnp.int32) - (120 << 23)
        return jnp.where(x < 2.0**-6, x * 512, bits.astype(jnp.float32) * 2.0**-20).astype(y.dtype)


Map = DynamicMap | LinearMap | Float8Map
