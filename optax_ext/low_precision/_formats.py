"""Formats of stored arrays: their scales and codes, and the blocks of an array of any shape.

Blocks depend on an array's global shape alone, not on its placement.
"""

import dataclasses
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp

from optax_ext._leaves import at_least_float32
from optax_ext._matrix_passes import sharded_as, splittable
from optax_ext.low_precision._code_maps import DynamicMap, Float8Map, LinearMap, Map
from optax_ext.low_precision._rounding import stochastic_bfloat16, top_half

ROUNDINGS = ("nearest", "stochastic", "compensated")
BLOCK_ROWS = 8  # rows of a block, as of a TPU register: scales are found and applied in registers


class _Coded:
    """A format of 8 or 4 bits."""

    bits: int
    block_size: int | None

    def __post_init__(self) -> None:
        """Raises unless the fields are valid."""
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
    """Steps that grow with the value, so that small values have digits next to large ones.

    The map of 8-bit optimizers, with seven powers of ten, and its 4-bit twin with three. Each block
    is scaled by its largest magnitude.

    Attributes:
      bits: 8 or 4.
      block_size: elements that share a float32 scale; None means 256 for 8 bits, 128 for 4 bits.
      rank1: as for ``Linear``, for rows and columns whose magnitudes differ by decades.

    References:
      Dettmers, Lewis, Shleifer, Zettlemoyer: 8-bit Optimizers via Block-wise Quantization,
      ICLR 2022, arXiv 2110.02861.
    """


class Linear(_Steps):
    """Equal steps up to the scale. Unsigned with 4 bits it has no zero: 1/16, 2/16, ... 1.

    Attributes:
      bits: 8 or 4.
      block_size: as for ``Dynamic``.
      rank1: instead of blocks, an element's scale is the minimum of the maxima of its row, its
        column, and every other dim; arrays of one dim have blocks.

    References:
      Li, Chen, Zhu: Memory Efficient Optimizers with 4-bit States, NeurIPS 2023, arXiv 2309.01507.
    """


@dataclasses.dataclass(frozen=True)
class Float8(_Coded):
    """E4M3 floats of magnitudes raised to a power per block that fills the range of E4M3.

    Attributes:
      block_size: elements that share a float32 scale and an exponent of 8 bits.
      expand: whether to raise to a power; if not, a block is only scaled.

    References:
      Xi, Cai, Zhu, Lu, Keutzer, Chen, Han: COAT: Compressing Optimizer States and Activation for
      Memory-Efficient FP8 Training, ICLR 2025, arXiv 2410.19313.
    """

    block_size: int = 128
    expand: bool = True

    bits = 8


@dataclasses.dataclass(frozen=True)
class BFloat16:
    """Float32 without the lower 16 bits of its fraction; there are no scales."""

    bits = 16


Format = Dynamic | Linear | Float8 | BFloat16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An array in a low-precision format; a node of the state's tree.

    Attributes:
      codes: uint8 (bfloat16 for that format) of the array's shape; 4-bit codes, two to a byte, have
        half as many rows.
      scale: the scale of each block, or of rows and columns; negative for a negated block.
      rest: 8 more bits per element, uint8 of the array's shape, if rounding errors are stored; else
        None.
      shape: the array's shape.
      dtype: the dtype of the decoded array: float32, or float64 if the array had it.
      format: the format.
      signed: whether half of the codes are negative.
    """

    codes: jax.Array
    scale: tuple[jax.Array, ...]
    rest: jax.Array | None
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})
    format: Format = dataclasses.field(metadata={"static": True})
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


# --- Layout ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of an array: rows along the longest dim except the last, columns along the last.

    Blocks have eight rows if the array does, so that shards of either dim rarely split a block.
    """

    shape: tuple[int, ...]
    size: int

    @property
    def dims(self) -> tuple[int, int]:
        """The dims of rows and of columns; the same in a vector, which has no rows."""
        last = len(self.shape) - 1
        return max(range(last), key=lambda d: (self.shape[d], d), default=last), last

    @property
    def rows_and_columns(self) -> tuple[int, int]:
        """The rows and columns of a full block."""
        row, last = self.dims
        most = 1 if row == last else min(self.size, _power_of_two(self.shape[row]))
        rows = min(most, max(BLOCK_ROWS, self.size // _power_of_two(self.shape[last])))
        return rows, self.size // rows

    def reduce(self, op: Any, x: jax.Array, neutral: float) -> jax.Array:
        """Reduces each block by ``op``."""
        (row, last), (rows, columns) = self.dims, self.rows_and_columns
        if rows > 1:  # rows first: a cheap reduction to an eighth
            x = op(_split(x, row, rows, neutral), axis=row + 1)
        return op(_split(x, last, columns, neutral), axis=last + 1)

    def largest(self, x: jax.Array) -> jax.Array:
        """Returns the element of largest magnitude of each block, with its sign."""
        return _from_order(self.reduce(jnp.max, _order(x), 0), x.dtype)

    def repeat(self, per_block: jax.Array) -> jax.Array:
        """Repeats the value of each block for its elements."""
        (row, last), (rows, columns) = self.dims, self.rows_and_columns
        out = _repeat(per_block, last, columns, self.shape[last])
        return _repeat(out, row, rows, self.shape[row]) if rows > 1 else out


def _power_of_two(extent: int) -> int:
    """Returns the smallest power of two that is at least ``extent``."""
    return 1 << (extent - 1).bit_length()


def _split(x: jax.Array, dim: int, size: int, neutral: float = 0) -> jax.Array:
    """Splits a dim into groups and positions within; pads the last group."""
    missing = -x.shape[dim] % size
    if missing:
        pad = [(0, missing if d == dim else 0) for d in range(x.ndim)]
        x = jnp.pad(splittable(x, dim, x.shape[dim] + missing), pad, constant_values=neutral)
    x = splittable(x, dim, x.shape[dim] // size)
    return x.reshape(*x.shape[:dim], x.shape[dim] // size, size, *x.shape[dim + 1 :])


def _join(x: jax.Array, dim: int, extent: int) -> jax.Array:
    """Inverts ``_split``, to ``extent`` elements along the dim."""
    x = x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])
    return jax.lax.slice_in_dim(x, 0, extent, axis=dim)


def _repeat(x: jax.Array, dim: int, times: int, extent: int) -> jax.Array:
    shape = (*x.shape[: dim + 1], times, *x.shape[dim + 1 :])
    dims = [d for d in range(len(shape)) if d != dim + 1]
    return _join(jax.lax.broadcast_in_dim(x, shape, dims), dim, extent)


def _half(extent: int) -> int:
    """Returns the distance in rows between the two codes of a byte."""
    return min(BLOCK_ROWS, -(-extent // 2))


def _pack(codes: jax.Array, dim: int) -> jax.Array:
    """Packs two 4-bit codes into each byte."""
    half = _half(codes.shape[dim])
    pairs = _split(_split(codes, dim, half), dim, 2)
    low, high = (jax.lax.index_in_dim(pairs, i, dim + 1, keepdims=False) for i in (0, 1))
    both = low | (high << 4)
    return _join(both, dim, both.shape[dim] * half)


def _unpack(packed: jax.Array, dim: int, extent: int) -> jax.Array:
    """Inverts ``_pack``."""
    both = _split(packed, dim, _half(extent))
    pairs = jnp.stack([both & 15, both >> 4], dim + 1)
    return _join(_join(pairs, dim, 2 * both.shape[dim]), dim, extent)


# --- Codes ----------------------------------------------------------------------------------------


def _map(fmt: Any, signed: bool, rank1: bool = False) -> Map:
    if isinstance(fmt, Dynamic):
        # A row cannot be negated for its largest element.
        return DynamicMap(fmt.bits - 1, signed, symmetric=rank1 and signed)
    if isinstance(fmt, Float8):
        return Float8Map()
    if signed:
        return LinearMap(2 ** (fmt.bits - 1) - 1, zero=True)
    return LinearMap(2**fmt.bits - 1, zero=fmt.bits == 8)


class _Scaled:
    """Conversions between the elements of an array, their scales and a map's levels."""

    def __init__(
        self, fmt: Any, signed: bool, shape: tuple[int, ...], dtype: Any, blocks: Any = None
    ):
        self.signed, self.dtype = signed, dtype
        self.rank1 = isinstance(fmt, Dynamic | Linear) and fmt.rank1 and len(shape) > 1
        self.map = _map(fmt, signed, self.rank1)
        self.expand = isinstance(fmt, Float8) and fmt.expand
        self.blocks = Blocks(shape, fmt.block_size) if blocks is None else blocks

    def measure(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the scales of an array."""
        if self.signed and self.map.lowest < self.map.top:
            # 1 has no negative code: a block whose largest element is negative is stored negated.
            largest = self.blocks.largest(x)
            return (jnp.where(jnp.isnan(largest), jnp.inf, largest),)
        x = jnp.where(jnp.isnan(x), jnp.inf, x)  # XLA's maximum may ignore NaN on CPUs
        if self.rank1:
            dims = range(x.ndim)
            size = jnp.abs(x)
            return tuple(jnp.max(size, axis=[e for e in dims if e != d]) for d in dims)
        size = jnp.abs(x)
        largest = self.blocks.reduce(jnp.max, size, 0.0)
        if not self.expand:
            return (largest,)
        least = self.blocks.reduce(jnp.min, jnp.where(size > 0, size, jnp.inf), jnp.inf)
        # Sixteenths of the power that stretches the block to the normal range of E4M3.
        octaves = jnp.log2(largest) - jnp.log2(jnp.minimum(least, largest))
        power = jnp.floor(16 * math.log2(448**2 / 2) / jnp.maximum(octaves, 1e-6))
        return largest, jnp.clip(jnp.where(largest > 0, power, 16), 1, 255).astype(jnp.uint8)

    def normalize(self, x: jax.Array, scale: tuple[jax.Array, ...]) -> jax.Array:
        """Returns an array relative to its scales; 0 where they are 0."""
        if self.rank1:
            least = self.largest(scale)
            return x / jnp.where(least > 0, least, 1)
        known = jnp.abs(scale[0]) >= jnp.finfo(self.dtype).tiny
        inverse = jnp.where(known, 1 / jnp.where(known, scale[0], 1), 0)
        return jnp.clip(x * self.blocks.repeat(inverse), -1, 1)

    def largest(self, scale: tuple[jax.Array, ...]) -> jax.Array:
        """Returns the magnitude that level ``top`` represents, per element."""
        if not self.rank1:
            return self.blocks.repeat(scale[0])
        ndim = len(scale)
        out = jnp.full([1] * ndim, jnp.inf, self.dtype)
        for d, part in enumerate(scale):
            others = [e for e in range(ndim) if e != d]
            out = jnp.minimum(out, jax.lax.expand_dims(part, others))
        return out

    def power(self, scale: tuple[jax.Array, ...]) -> Any:
        """Returns the power that each element was raised to, or None."""
        return self.blocks.repeat(scale[1].astype(self.dtype) / 16) if self.expand else None

    def position(self, y: jax.Array, power: Any) -> jax.Array:
        """Returns the level of a magnitude relative to its scale, with a fraction."""
        return jnp.clip(self.map.position(y if power is None else y**power), 0, self.map.top)

    def value(self, level: jax.Array, power: Any) -> jax.Array:
        """Returns the magnitude of a level relative to its scale."""
        out = self.map.value(level, self.dtype)
        return out if power is None else out ** (1 / power)

    def fine_value(self, fine: jax.Array, power: Any) -> jax.Array:
        """Returns the magnitude of a level given in 256ths."""
        low, high = (
            self.map.value(jnp.minimum((fine >> 8) + i, self.map.top), self.dtype) for i in (0, 1)
        )
        out = low + (high - low) * ((fine & 255).astype(self.dtype) / 256)
        return out if power is None else out ** (1 / power)


def _order(x: jax.Array) -> jax.Array:
    """Maps floats to unsigned integers in the order of magnitude; positive values win ties.

    The element of largest magnitude, with its sign, is then one reduction. For the maximum and the
    minimum, XLA for GPUs would first write the array to memory.
    """
    bits = x.dtype.itemsize * 8
    unsigned = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}"))
    return (unsigned << 1) | (1 - (unsigned >> (bits - 1)))


def _from_order(order: jax.Array, dtype: Any) -> jax.Array:
    """Inverts ``_order``."""
    bits = order.dtype.itemsize * 8
    return jax.lax.bitcast_convert_type((order >> 1) | ((1 - (order & 1)) << (bits - 1)), dtype)


def _to_integer(level: jax.Array) -> jax.Array:
    """Converts floats that are integers from 0 to 65,535, without the tests for others.

    Of ``2^23 + level`` in float32 the lower bits are the level.
    """
    bits = jax.lax.bitcast_convert_type(level.astype(jnp.float32) + 2.0**23, jnp.uint32)
    return bits & 0xFFFF


def encode(
    x: jax.Array,
    fmt: Format,
    signed: bool,
    rounding: str = "nearest",
    noise: Any = None,
    blocks: Any = None,
) -> Quantized:
    """Encodes an array.

    Args:
      x: the array; of rank at least 1, and not empty.
      fmt: the format.
      signed: whether elements may be negative; if not, negative ones become 0, and positive ones do
        not.
      rounding: one of ``ROUNDINGS``.
      noise: uniform in [0, 1), of the array's shape; for stochastic rounding.
      blocks: what ``reduce``, ``largest`` and ``repeat`` do, if not as ``Blocks``.
    """
    dtype = at_least_float32(x.dtype)
    x = x.astype(dtype) if signed else jnp.maximum(x.astype(dtype), 0)
    shape = tuple(x.shape)
    if isinstance(fmt, BFloat16):
        codes, rest = _encode_bfloat16(x.astype(jnp.float32), signed, rounding, noise)
        return Quantized(codes, (), rest, shape, dtype, fmt, signed)
    scaled = _Scaled(fmt, signed, shape, dtype, blocks)
    lowest = scaled.map.lowest
    scale = scaled.measure(x)
    positive = x > 0
    x = scaled.normalize(x, scale)
    power = scaled.power(scale)
    position = scaled.position(jnp.abs(x), power)
    if rounding == "compensated":
        level, lowest = jnp.round(position * 256), lowest << 8
    else:
        # Clipped to the top: float32 rounds 255 + (1 - 2^-24) to 256, which is code 0.
        level = jnp.floor(position + (noise if rounding == "stochastic" else 0.5))
        level = jnp.minimum(level, scaled.map.top)
    if signed:
        level = jnp.maximum(jnp.where(x < 0, -level, level), -lowest) + lowest
    elif scaled.map.zero:
        level = jnp.where(positive, jnp.maximum(level, 1), level)
    level = _to_integer(level)
    rest = None
    if rounding == "compensated":
        level, rest = level >> 8, (level & 255).astype(jnp.uint8)
    codes = level.astype(jnp.uint8)
    if fmt.bits == 4:
        dim = scaled.blocks.dims[0]
        codes = sharded_as(_pack(codes, dim), dim, codes)
    return Quantized(codes, scale, rest, shape, dtype, fmt, signed)


def decode(q: Quantized, blocks: Any = None) -> jax.Array:
    """Decodes an array; ``blocks`` as for ``encode``."""
    if isinstance(q.format, BFloat16):
        return _decode_bfloat16(q.codes, q.rest).astype(q.dtype)
    scaled = _Scaled(q.format, q.signed, q.shape, q.dtype, blocks)
    codes = q.codes
    if q.format.bits == 4:
        dim = scaled.blocks.dims[0]
        codes = _unpack(codes, dim, q.shape[dim])
    level = codes.astype(jnp.int32)
    if q.rest is not None:
        level = (level << 8) | q.rest
    power = scaled.power(q.scale)
    if q.signed:
        level = level - (scaled.map.lowest << (0 if q.rest is None else 8))
    read = scaled.value if q.rest is None else scaled.fine_value
    out = read(jnp.abs(level), power)
    if q.signed:
        out = jnp.where(level < 0, -out, out)
    return out * scaled.largest(q.scale)


def _encode_bfloat16(
    x: jax.Array, signed: bool, rounding: str, noise: Any
) -> tuple[jax.Array, jax.Array | None]:
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    if rounding == "nearest":
        codes, rest = x.astype(jnp.bfloat16), None
    elif rounding == "stochastic":
        codes, rest = stochastic_bfloat16(x, noise), None
    else:
        bits = jnp.where(jnp.isfinite(x), bits + 128, bits)
        codes, rest = top_half(bits), ((bits >> 8) & 255).astype(jnp.uint8)
    if not signed and rest is None:
        codes = jnp.where(x > 0, jnp.maximum(codes, jnp.finfo(jnp.bfloat16).tiny), codes)
    return codes, rest


def _decode_bfloat16(codes: jax.Array, rest: jax.Array | None) -> jax.Array:
    if rest is None:
        return codes.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(codes, jnp.uint16).astype(jnp.uint32) << 16
    return jax.lax.bitcast_convert_type(bits | (rest.astype(jnp.uint32) << 8), jnp.float32)
