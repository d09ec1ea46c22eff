"""Formats of stored arrays, and ``Quantized``, an array in one of them."""

import dataclasses
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp


class _Coded:
    """A format of 8 or 4 bits."""

    bits: int
    block_size: int | None

    def __post_init__(self) -> None:
        size = self.block_size
        if self.bits not in (4, 8):
            raise ValueError(f"bits must be 4 or 8, got {self.bits!r}.")
        if size is None:
            object.__setattr__(self, "block_size", 256 if self.bits == 8 else 128)
        elif isinstance(size, bool) or not isinstance(size, int) or size < 16 or size & (size - 1):
            raise ValueError(f"block_size must be a power of two, at least 16, got {size!r}.")


@dataclasses.dataclass(frozen=True)
class _Steps(_Coded):
    """Codes of equal or growing steps, relative to scales of blocks or of rows and columns."""

    bits: int = 8
    block_size: int | None = None
    rank1: bool = False


class Dynamic(_Steps):
    """Steps that grow with the value: seven powers of ten in 8 bits, three in 4 bits.

    Attributes:
      bits: 8 or 4.
      block_size: elements that share a float32 scale, their largest magnitude; None means 256 for 8
        bits, 128 for 4 bits.
      rank1: as for ``Linear``, for rows and columns whose magnitudes differ by decades.

    Raises:
      ValueError: if ``bits`` is neither, or ``block_size`` no power of two from 16 on.

    Example:
      >>> import optax, optax_ext
      >>> tx = optax_ext.low_precision_state(optax.adam(1e-3), optax_ext.Dynamic(8, block_size=64))

    References:
      Dettmers et al.: 8-bit Optimizers via Block-wise Quantization, ICLR 2022, arXiv 2110.02861.
    """


class Linear(_Steps):
    """Equal steps up to the scale. Unsigned with 4 bits it has no zero: 1/16, 2/16, ... 1.

    Attributes:
      bits: 8 or 4.
      block_size: as for ``Dynamic``.
      rank1: instead of blocks, an element's scale is the minimum of the maxima of its row, its
        column, and every other dim; arrays of one dim have blocks.

    Example:
      >>> import optax, optax_ext
      >>> formats = {"nu": optax_ext.Linear(4, rank1=True)}
      >>> tx = optax_ext.low_precision_state(optax.adam(1e-3), formats=formats)

    References:
      Li, Chen, Zhu: Memory Efficient Optimizers with 4-bit States, NeurIPS 2023, arXiv 2309.01507.
    """


@dataclasses.dataclass(frozen=True)
class Float8(_Coded):
    """E4M3 floats of magnitudes raised to a power per block that fills the range of E4M3.

    Attributes:
      block_size: elements that share a float32 scale and an exponent of 8 bits.
      expand: whether to raise to a power; if not, a block is only scaled.

    Example:
      >>> import optax, optax_ext
      >>> tx = optax_ext.low_precision_state(optax.adamw(1e-3), optax_ext.Float8(expand=False))

    References:
      Xi et al.: COAT: Memory-Efficient FP8 Training, ICLR 2025, arXiv 2410.19313.
    """

    block_size: int = 128
    expand: bool = True

    bits = 8


@dataclasses.dataclass(frozen=True)
class BFloat16:
    """Float32 without the lower 16 bits of its fraction; there are no scales.

    Example:
      >>> import optax, optax_ext
      >>> tx = optax_ext.low_precision_state(optax.adam(1e-3), optax_ext.BFloat16())
    """

    bits = 16


Format = Dynamic | Linear | Float8 | BFloat16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An array in a low-precision format; a node of the state's tree."""

    #: uint8 (bfloat16 for that format) of the array's shape; 4-bit codes, two to a byte, have half
    #: as many rows
    codes: jax.Array
    scale: tuple[jax.Array, ...]  #: of each block, or of rows and columns; negative: block negated
    rest: jax.Array | None  #: 8 more bits of each element, uint8, if rounding errors are stored
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})  #: the array's shape
    #: of the dequantized array: float32, or float64 if the array had it
    dtype: Any = dataclasses.field(metadata={"static": True})
    format: Format = dataclasses.field(metadata={"static": True})  #: the format
    #: whether half of the codes are negative
    signed: bool = dataclasses.field(metadata={"static": True})

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays, over all devices."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(self))


def register_with_flax() -> None:
    """Lets Flax, where a program has imported it, serialize ``Quantized`` (``to_bytes``)."""
    flax = sys.modules.get("flax.serialization")
    if flax is None:
        return

    def fields(q: Quantized) -> dict[str, Any]:
        return {"codes": q.codes, "scale": q.scale, "rest": q.rest}

    def from_fields(q: Quantized, restored: Any) -> Quantized:
        if not isinstance(restored, dict):
            raise ValueError(
                f"a moment of shape {q.shape} has the format {q.format}, and the checkpoint has an "
                "array. Restore it into the state that wrote it, then call optax_ext.convert_state."
            )
        return dataclasses.replace(q, **flax.from_state_dict(fields(q), restored))

    flax.register_serialization_state(
        Quantized, lambda q: flax.to_state_dict(fields(q)), from_fields, override=True
    )


# --- Number maps: the magnitudes between 0 and 1 that the codes of a format represent -------------

# A map numbers its magnitudes in levels: level 0 is the smallest, and 0 if ``zero``; level ``top``
# is 1, and ``lowest`` is the highest level that also has a negative code. ``value`` maps a level to
# its magnitude; ``position`` maps a magnitude to a level with a fraction. Both are arithmetic:
# table look-ups per element neither vectorize on TPUs nor fuse.

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
        share = y
        parts = jnp.full([], 2.0 ** (self.exponents - 1 + self._shift), y.dtype)
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
