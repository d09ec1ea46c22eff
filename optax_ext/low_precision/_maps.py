"""Number maps: which values between 0 and 1 the codes of a format stand for.

A map orders the magnitudes that it has: level 0 is the smallest, level ``top`` is 1. ``value``
gives the magnitude of a level, ``level`` the last level that is not above a magnitude. Both are
arithmetic: a table look-up in each element does not vectorize on TPUs, nor fuse.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class DynamicMap:
    """Powers of ten, each divided into twice as many equal parts as the one below it.

    Attributes:
      exponents: how many powers of ten: bits - 1.
      signed: half of the codes are negative; else there are twice as many parts.
    """

    exponents: int
    signed: bool
    zero = True  # level 0 is 0

    @property
    def top(self) -> int:
        """The level of 1."""
        return 2**self.exponents if self.signed else 2 ** (self.exponents + 1) - 1

    @property
    def lowest(self) -> int:
        """The highest level that also has a negative."""
        return self.top - 1

    @property
    def _shift(self) -> int:
        """What makes the first level of each power of ten a power of two."""
        return 0 if self.signed else 1

    def _lines(self) -> list[tuple[float, float]]:
        """Per power of ten: the value at its first level, and the slope over all its levels."""
        lines = []
        for i in range(self.exponents):
            unit, parts = 10.0 ** (i - self.exponents + 1), 2 ** (i + self._shift)
            lines.append((unit * (0.1 + 0.45 / parts), 0.9 * unit))
        return lines

    def value(self, level: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """The magnitude of each level."""
        # M = 2^i (1 + f): the bits of a float32 hold i and f.
        bits = jax.lax.bitcast_convert_type((level + self._shift).astype(jnp.float32), jnp.int32)
        power = (bits >> 23) - 127 - self._shift
        share = jax.lax.bitcast_convert_type((bits & 0x7FFFFF) | 0x3F800000, jnp.float32)
        lines = self._lines()
        first = _select(power, [line[0] for line in lines], dtype)
        slope = _select(power, [line[1] for line in lines], dtype)
        out = first + slope * (share.astype(dtype) - 1)
        out = jnp.where(level >= self.top, jnp.ones([], dtype), out)
        return jnp.where(level <= 0, jnp.zeros([], dtype), out)

    def level(self, y: jax.Array) -> jax.Array:
        """The last level that is not above each magnitude, to rounding."""
        lines = self._lines()
        power = jnp.zeros(y.shape, jnp.int32)
        for first, _ in lines[1:]:
            power += (y >= first).astype(jnp.int32)
        parts = 1 << (power + self._shift)
        start = _select(power, [line[0] for line in lines], y.dtype)
        over = _select(power, [1 / line[1] for line in lines], y.dtype)
        part = jnp.floor((y - start) * over * parts.astype(y.dtype)).astype(jnp.int32)
        out = parts + jnp.clip(part, 0, parts - 1) - self._shift
        out = jnp.where(y < lines[0][0], 0, out)
        return jnp.where(y >= 1, self.top, out)


@dataclasses.dataclass(frozen=True)
class LinearMap:
    """Equal steps up to 1.

    Attributes:
      top: the level of 1.
      zero: whether level 0 is 0; else it is one step.
    """

    top: int
    zero: bool

    @property
    def lowest(self) -> int:
        """The highest level that also has a negative."""
        return self.top

    def value(self, level: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """The magnitude of each level."""
        if self.zero:
            return level.astype(dtype) / self.top
        return (level + 1).astype(dtype) / (self.top + 1)

    def level(self, y: jax.Array) -> jax.Array:
        """The last level that is not above each magnitude, to rounding; the first if all are."""
        steps = jnp.floor(y * self.top) if self.zero else jnp.floor(y * (self.top + 1)) - 1
        return jnp.clip(steps.astype(jnp.int32), 0, self.top)


@dataclasses.dataclass(frozen=True)
class Float8Map:
    """The magnitudes of E4M3 (4 bits of exponent, 3 of fraction, no infinity) over 448."""

    top = 0x7E
    lowest = top
    zero = True

    def value(self, level: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """The magnitude of each level."""
        normal = jax.lax.bitcast_convert_type((level + (120 << 3)) << 20, jnp.float32)
        small = level.astype(jnp.float32) * 2.0**-9
        return jnp.where(level < 8, small, normal).astype(dtype) / 448

    def level(self, y: jax.Array) -> jax.Array:
        """The last level that is not above each magnitude."""
        x = jnp.minimum(y * 448, 448).astype(jnp.float32)
        normal = (jax.lax.bitcast_convert_type(x, jnp.int32) >> 20) - (120 << 3)
        return jnp.where(x < 2.0**-6, (x * 512).astype(jnp.int32), normal)


Map = DynamicMap | LinearMap | Float8Map


def _select(index: jax.Array, values: Sequence[float], dtype: jax.typing.DTypeLike) -> jax.Array:
    """``values[index]``, without a look-up in memory."""
    out = jnp.full([], values[0], dtype)
    for i, value in enumerate(values[1:], 1):
        out = jnp.where(index >= i, jnp.full([], value, dtype), out)
    return out
