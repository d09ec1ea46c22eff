"""Quantizes arrays to codes and scales of a format, and dequantizes them.

Blocks depend on an array's global shape alone.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from optax_ext._leaves import at_least_float32
from optax_ext._matrix_passes import is_partitioned, sharded_as, splittable
from optax_ext._types import DType
from optax_ext.low_precision._formats import (
    ZERO,
    BFloat16,
    Dynamic,
    DynamicMap,
    Float8,
    Float8Map,
    Format,
    Linear,
    LinearMap,
    Map,
    Quantized,
)
from optax_ext.low_precision._rounding import stochastic_bfloat16, top_half

ROUNDINGS = ("nearest", "stochastic", "compensated")
BLOCK_ROWS = 8  # rows of a block, as of a TPU register: scales are found and applied in registers

# --- Layout ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of an array: rows along the longest dim except the last, columns along the last."""

    shape: tuple[int, ...]
    size: int
    shard_rows: int = 0  # rows on each device; 0: all, or unknown

    @property
    def dims(self) -> tuple[int, int]:
        """The dims of rows and of columns; the same in a vector, which has no rows."""
        last = len(self.shape) - 1
        return max(range(last), key=lambda d: (self.shape[d], d), default=last), last

    @property
    def rows_and_columns(self) -> tuple[int, int]:
        row, last = self.dims
        most = 1 if row == last else min(self.size, _power_of_two(self.shape[row]))
        # Eight rows if the array has them: shards of either dim rarely split such a block.
        rows = min(most, max(BLOCK_ROWS, self.size // _power_of_two(self.shape[last])))
        return rows, self.size // rows

    def reduce(self, op: Any, x: jax.Array, neutral: float) -> jax.Array:
        (row, last), (rows, columns) = self.dims, self.rows_and_columns
        # Where shards end within blocks, only maxima of the rows that no device splits are sent.
        unsplit = math.gcd(rows, self.shard_rows)
        steps = [(row, unsplit), (last, columns), (row, rows // unsplit)]
        if not is_partitioned(x):  # columns first: else XLA for GPUs may write what is reduced
            steps[:2] = steps[1], steps[0]
        for dim, size in steps:
            x = op(_split(x, dim, size, neutral), axis=dim + 1) if size > 1 else x
        return x

    def largest(self, x: jax.Array, signed: bool = True) -> jax.Array:
        """Returns each block's element of largest magnitude; none is negative, or ``signed``."""
        # Unsigned integers in the order of magnitude, NaN last; positive values win ties. One
        # reduction of them is enough: XLA writes no array first, for GPUs nor for CPUs, whose
        # maximum of floats may also ignore NaN.
        bits = x.dtype.itemsize * 8
        unsigned = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}"))
        if signed:
            unsigned = (unsigned << 1) | (1 - (unsigned >> (bits - 1)))
        unsigned = self.reduce(jnp.max, unsigned, 0)
        if signed:
            unsigned = (unsigned >> 1) | ((1 - (unsigned & 1)) << (bits - 1))
        return _finite(jax.lax.bitcast_convert_type(unsigned, x.dtype))

    def repeat(self, per_block: jax.Array) -> jax.Array:
        (row, last), (rows, columns) = self.dims, self.rows_and_columns
        unsplit = math.gcd(rows, self.shard_rows)
        if rows > unsplit:
            per_block = _repeat(per_block, row, rows // unsplit, -(-self.shape[row] // unsplit))
        out = _repeat(per_block, last, columns, self.shape[last])
        return _repeat(out, row, unsplit, self.shape[row]) if unsplit > 1 else out


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isnan(x), jnp.inf, x)


def _power_of_two(extent: int) -> int:
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
    x = x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])
    return x if x.shape[dim] == extent else jax.lax.slice_in_dim(x, 0, extent, axis=dim)


def _repeat(x: jax.Array, dim: int, times: int, extent: int) -> jax.Array:
    shape = (*x.shape[: dim + 1], times, *x.shape[dim + 1 :])
    dims = [d for d in range(len(shape)) if d != dim + 1]
    return _join(jax.lax.broadcast_in_dim(x, shape, dims), dim, extent)


def _half(extent: int) -> int:
    """Returns the distance in rows between the two codes of a byte."""
    return min(BLOCK_ROWS, -(-extent // 2))


def _pack_4bit(codes: jax.Array, dim: int) -> jax.Array:
    half = _half(codes.shape[dim])
    pairs = _split(_split(codes, dim, half), dim, 2)
    low, high = (jax.lax.index_in_dim(pairs, i, dim + 1, keepdims=False) for i in (0, 1))
    both = low | (high << 4)
    return _join(both, dim, both.shape[dim] * half)


def _unpack_4bit(packed: jax.Array, dim: int, extent: int) -> jax.Array:
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
        self, fmt: Any, signed: bool, shape: tuple[int, ...], dtype: DType, blocks: Any = None
    ):
        self.signed = signed
        self.dtype = dtype
        self.rank1 = isinstance(fmt, Dynamic | Linear) and fmt.rank1 and len(shape) > 1
        self.map = _map(fmt, signed, self.rank1)
        self.expand = isinstance(fmt, Float8) and fmt.expand
        self.blocks = Blocks(shape, fmt.block_size) if blocks is None else blocks

    def measure(self, x: jax.Array) -> tuple[jax.Array, ...]:
        if self.signed and self.map.lowest < self.map.top:
            # 1 has no negative code: a block whose largest element is negative is stored negated.
            return (self.blocks.largest(x),)
        if self.rank1:
            size = jnp.abs(_finite(x))
            dims = range(x.ndim)
            return tuple(jnp.max(size, axis=[e for e in dims if e != d]) for d in dims)
        size = jnp.abs(x)
        largest = self.blocks.largest(size, signed=False)
        if not self.expand:
            return (largest,)
        least = self.blocks.reduce(jnp.min, jnp.where(size > 0, size, jnp.inf), jnp.inf)
        # Sixteenths of the power that stretches the block to the normal range of E4M3. Logarithms
        # are of finite numbers: the difference of two infinite ones is NaN.
        high = jnp.where(largest > 0, jnp.minimum(largest, jnp.finfo(x.dtype).max), 1)
        octaves = jnp.log2(high) - jnp.log2(jnp.minimum(least, high))
        power = jnp.floor(16 * math.log2(448**2 / 2) / jnp.maximum(octaves, 1e-6))
        return largest, jnp.clip(jnp.where(largest > 0, power, 16), 1, 255).astype(jnp.uint8)

    def normalize(self, x: jax.Array, scale: tuple[jax.Array, ...]) -> jax.Array:
        """Returns an array relative to its scales; 0 where they are 0."""
        # Where a scale is infinite, infinite elements are divided by a finite number: they become
        # the largest level, with their sign.
        limits = jnp.finfo(self.dtype)
        if self.rank1:
            least = self.largest(tuple(jnp.minimum(s, limits.max) for s in scale))
            return x / jnp.where(least > 0, least, 1)
        known = jnp.abs(scale[0]) >= limits.tiny
        inverse = jnp.where(known, 1 / jnp.where(known, scale[0], 1), 0)
        least = jnp.clip(scale[0], -limits.tiny, limits.tiny)
        inverse = jnp.where(jnp.isinf(scale[0]), least, inverse)
        return jnp.clip(x * self.blocks.repeat(inverse), -1, 1)

    def largest(self, scale: tuple[jax.Array, ...]) -> jax.Array:
        """Returns the magnitude that level ``top`` represents, per element."""
        if not self.rank1:
            return self.blocks.repeat(scale[0])
        out = jnp.full([1] * len(scale), jnp.inf, self.dtype)
        for d, part in enumerate(scale):
            others = [e for e in range(len(scale)) if e != d]
            out = jnp.minimum(out, jax.lax.expand_dims(part, others))
        return out

    def power(self, scale: tuple[jax.Array, ...]) -> Any:
        return self.blocks.repeat(scale[1].astype(self.dtype) / 16) if self.expand else None

    def position(self, y: jax.Array, power: Any) -> jax.Array:
        return jnp.clip(self.map.position(y if power is None else y**power), ZERO, self.map.top)

    def value(self, level: jax.Array, power: Any, fine: bool) -> jax.Array:
        """Returns the magnitude of a level, which is in 256ths if ``fine``."""
        levels = [jnp.minimum((level >> 8) + i, self.map.top) for i in (0, 1)] if fine else [level]
        out, *high = (self.map.value(each, self.dtype) for each in levels)
        if fine:
            out = out + (high[0] - out) * ((level & 255).astype(self.dtype) / 256)
        return out if power is None else out ** (1 / power)


def quantize(
    x: jax.Array,
    fmt: Format,
    signed: bool,
    rounding: str = "nearest",
    noise: Any = None,
    blocks: Any = None,
) -> Quantized:
    """Quantizes an array that is not empty, of rank at least 1, with one of ``ROUNDINGS``.

    Without a sign negative elements become 0, and positive ones do not. ``noise``, for stochastic
    rounding, is uniform in [0, 1); ``blocks`` has the methods of ``Blocks``.
    """
    scale = scales_of(x, fmt, signed, blocks)
    codes, rest = codes_of(x, scale, noise, fmt, signed, rounding, blocks)
    return Quantized(codes, scale, rest, tuple(x.shape), at_least_float32(x.dtype), fmt, signed)


def rounding_of(q: Quantized, noise: Any) -> str:
    """Returns the rounding of new codes in place of those that an array has."""
    if q.rest is not None:
        return "compensated"
    return "nearest" if noise is None else "stochastic"


def scales_of(x: jax.Array, fmt: Format, signed: bool, blocks: Any = None) -> tuple[Any, ...]:
    """Returns the scales with which ``quantize`` divides an array."""
    x = _clipped(x, signed)
    if isinstance(fmt, BFloat16):
        return ()
    return _Scaled(fmt, signed, tuple(x.shape), x.dtype, blocks).measure(x)


def codes_of(
    x: jax.Array,
    scale: tuple[Any, ...],
    noise: Any,
    fmt: Format,
    signed: bool,
    rounding: str,
    blocks: Any = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns ``codes`` and ``rest`` of an array that has these scales."""
    x = _clipped(x, signed)
    if isinstance(fmt, BFloat16):
        return _split_bfloat16(x.astype(jnp.float32), signed, rounding, noise)
    scaled = _Scaled(fmt, signed, tuple(x.shape), x.dtype, blocks)
    lowest = scaled.map.lowest
    positive = x > ZERO
    x = scaled.normalize(x, scale)
    power = scaled.power(scale)
    position = scaled.position(jnp.abs(x), power)
    if rounding == "compensated":
        level = jnp.round(position * 256)
        lowest = lowest << 8
    else:
        # Clipped to the top: float32 rounds 255 + (1 - 2^-24) to 256, which is code 0.
        level = jnp.floor(position + (noise if rounding == "stochastic" else 0.5))
        level = jnp.minimum(level, scaled.map.top)
    if signed:
        level = jnp.maximum(jnp.where(x < ZERO, -level, level), -lowest) + lowest
    elif scaled.map.zero:
        level = jnp.where(positive, jnp.maximum(level, 1), level)
    # Integers of at most 16 bits: of 2^23 + level in float32 the lower bits are the level. One is
    # added and subtracted again, as an integer: where the lowest byte of a float is stored, ptxas
    # of CUDA 13 stores that number converted to a byte, here always 255. No more bits than a code
    # has: those of NaN would change the other code of a byte.
    num_bits = fmt.bits + (8 if rounding == "compensated" else 0)
    bits = jax.lax.bitcast_convert_type(level.astype(jnp.float32) + (2.0**23 + 1), jnp.uint32)
    level = (bits - 1) & (2**num_bits - 1)
    rest = None
    if rounding == "compensated":
        level, rest = level >> 8, (level & 255).astype(jnp.uint8)
    codes = level.astype(jnp.uint8)
    if fmt.bits == 4:
        dim = scaled.blocks.dims[0]
        codes = sharded_as(_pack_4bit(codes, dim), dim, codes)
    return codes, rest


def _clipped(x: jax.Array, signed: bool) -> jax.Array:
    """Returns the numbers that are quantized: without a sign, none is negative."""
    x = x.astype(at_least_float32(x.dtype))
    return x if signed else jnp.maximum(x, ZERO)


def dequantize(q: Quantized, blocks: Any = None) -> jax.Array:
    if isinstance(q.format, BFloat16):
        if q.rest is None:
            return q.codes.astype(jnp.float32).astype(q.dtype)
        bits = jax.lax.bitcast_convert_type(q.codes, jnp.uint16).astype(jnp.uint32) << 16
        bits = bits | (q.rest.astype(jnp.uint32) << 8)
        return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(q.dtype)
    scaled = _Scaled(q.format, q.signed, q.shape, q.dtype, blocks)
    codes = q.codes
    if q.format.bits == 4:
        dim = scaled.blocks.dims[0]
        codes = _unpack_4bit(codes, dim, q.shape[dim])
    level = codes.astype(jnp.int32)
    fine = q.rest is not None
    if q.rest is not None:
        level = (level << 8) | q.rest
    power = scaled.power(q.scale)
    if q.signed:
        level = level - (scaled.map.lowest << (8 if fine else 0))
    out = scaled.value(jnp.abs(level), power, fine)
    if q.signed:
        out = jnp.where(level < 0, -out, out)
    return out * scaled.largest(q.scale)


def _split_bfloat16(x: jax.Array, signed: bool, rounding: str, noise: Any) -> tuple[Any, Any]:
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
