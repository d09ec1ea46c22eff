"""Formats of stored arrays: scales, codes, and how both are cut from an array of any shape.

What is stored depends on an array's global shape alone.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from optax_ext.low_precision._maps import DynamicMap, Float8Map, LinearMap, Map
from optax_ext.low_precision._rounding import stochastic_bfloat16, top_half

ROUNDINGS = ("nearest", "stochastic", "compensated")
_MIN_DIM = 64  # a shorter dim would take many scales
_PAIR = 256  # two codes of a byte are half of this apart
_CUTS = 8  # dims that divide by this can be cut
_MAX_MASKS = 64  # blocks of a dim that are told apart by their index in it


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """Steps that grow with the value, so that small values keep digits beside large ones.

    The map of 8-bit optimizers, with seven powers of ten, and its 4-bit twin with three. Each block
    is scaled by its largest magnitude.

    Attributes:
      bits: 8 or 4.
      block_size: elements that share a float32 scale; None means 256 of 8 bits, 128 of 4 bits.

    References:
      Dettmers, Lewis, Shleifer, Zettlemoyer: 8-bit Optimizers via Block-wise Quantization,
      ICLR 2022, arXiv 2110.02861.
    """

    bits: int = 8
    block_size: int | None = None

    def __post_init__(self) -> None:
        """Raises unless the fields make sense."""
        _check(self)


@dataclasses.dataclass(frozen=True)
class Linear:
    """Equal steps up to the scale. Unsigned with 4 bits it has no zero: 1/16, 2/16, ... 1.

    Attributes:
      bits: 8 or 4.
      block_size: elements that share a float32 scale; None means 256 of 8 bits, 128 of 4 bits.
      rank1: in place of blocks, an element's scale is the least of the maxima of its row, its
        column, and of every other dim; arrays of one dim keep blocks.

    References:
      Li, Chen, Zhu: Memory Efficient Optimizers with 4-bit States, NeurIPS 2023, arXiv 2309.01507.
    """

    bits: int = 8
    block_size: int | None = None
    rank1: bool = False

    def __post_init__(self) -> None:
        """Raises unless the fields make sense."""
        _check(self)


@dataclasses.dataclass(frozen=True)
class Float8:
    """E4M3 floats, after each block's magnitudes are raised to the power that fills their range.

    Attributes:
      block_size: elements that share a float32 scale and an exponent of 8 bits.
      expand: whether to raise; without, a block is only scaled.

    References:
      Xi, Cai, Zhu, Lu, Keutzer, Chen, Han: COAT: Compressing Optimizer States and Activation for
      Memory-Efficient FP8 Training, ICLR 2025, arXiv 2410.19313.
    """

    block_size: int = 128
    expand: bool = True

    bits = 8

    def __post_init__(self) -> None:
        """Raises unless the fields make sense."""
        _check(self)


@dataclasses.dataclass(frozen=True)
class BFloat16:
    """Float32 without the last 16 bits of its fraction: no scales."""

    bits = 16


Format = Dynamic | Linear | Float8 | BFloat16


def _check(fmt: Any) -> None:
    if fmt.bits not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, got {fmt.bits!r}.")
    size = fmt.block_size
    if size is None:
        object.__setattr__(fmt, "block_size", 256 if fmt.bits == 8 else 128)
    elif isinstance(size, bool) or not isinstance(size, int) or size < 16 or size & (size - 1):
        raise ValueError(f"block_size must be a power of two from 16 on, got {size!r}.")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An array in a low-precision format; a node of the state's tree.

    Attributes:
      codes: uint8 (bfloat16 for that format) of the array's shape; two 4-bit codes to a byte along
        the dim of the blocks.
      scale: what each block, or row and column, is scaled by; negative where a block was negated.
      rest: 8 further bits of each element, uint8 of the array's shape, where rounding errors are
        kept; else None.
      shape: the array's shape.
      dtype: what it is read as: float32, or float64 if it was.
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


# --- Layout ---------------------------------------------------------------------------------------


def block_dim(shape: tuple[int, ...]) -> int:
    """The dim that blocks lie along: the last of at least 64 elements, else the longest."""
    long = [d for d, extent in enumerate(shape) if extent >= _MIN_DIM]
    return long[-1] if long else max(range(len(shape)), key=lambda d: shape[d])


def is_cut_through(shape: tuple[int, ...], size: int) -> bool:
    """Whether an array can be cut only along its blocks' dim, and there between their ends.

    As (50257, 768), which over 8 devices is cut into columns of 96.
    """
    dim = block_dim(shape)
    others = [n for d, n in enumerate(shape) if d != dim and n >= _MIN_DIM and n % _CUTS == 0]
    return not others and shape[dim] % _CUTS == 0 and shape[dim] // _CUTS % size != 0


def _pack_dim(shape: tuple[int, ...], size: int) -> int:
    """The dim along which two codes share a byte."""
    dim = block_dim(shape)
    if len(shape) == 1 or not is_cut_through(shape, size):
        return dim
    return max((d for d in range(len(shape)) if d != dim), key=lambda d: shape[d])


def _split(x: jax.Array, dim: int, size: int) -> jax.Array:
    """One dim as two: which block, and where in it. A last block that is not full gets zeros."""
    missing = -x.shape[dim] % size
    if missing:
        x = jnp.pad(x, [(0, missing if d == dim else 0) for d in range(x.ndim)])
    return x.reshape(*x.shape[:dim], x.shape[dim] // size, size, *x.shape[dim + 1 :])


def _join(x: jax.Array, dim: int, extent: int) -> jax.Array:
    """The inverse of ``_split``: ``extent`` elements along the dim."""
    x = x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])
    return jax.lax.slice_in_dim(x, 0, extent, axis=dim)


def _half(extent: int) -> int:
    """How far apart the two codes of a byte are, so that a cut of whole pairs moves nothing."""
    return _PAIR // 2 if extent % _PAIR == 0 else -(-extent // 2)


def _pack(codes: jax.Array, dim: int) -> jax.Array:
    """Two 4-bit codes to a byte."""
    half = _half(codes.shape[dim])
    pairs = _split(_split(codes, dim, half), dim, 2)
    low, high = (jax.lax.index_in_dim(pairs, i, dim + 1, keepdims=False) for i in (0, 1))
    bytes_ = low | (high << 4)
    return _join(bytes_, dim, bytes_.shape[dim] * half)


def _unpack(packed: jax.Array, dim: int, extent: int) -> jax.Array:
    """The inverse of ``_pack``."""
    bytes_ = _split(packed, dim, _half(extent))
    pairs = jnp.stack([bytes_ & 15, bytes_ >> 4], dim + 1)
    return _join(_join(pairs, dim, 2 * bytes_.shape[dim]), dim, extent)


# --- Codes ----------------------------------------------------------------------------------------


def _map(fmt: Any, signed: bool) -> Map:
    if isinstance(fmt, Dynamic):
        return DynamicMap(fmt.bits - 1, signed)
    if isinstance(fmt, Float8):
        return Float8Map()
    if signed:
        return LinearMap(2 ** (fmt.bits - 1) - 1, zero=True)
    return LinearMap(2**fmt.bits - 1, zero=fmt.bits == 8)


class _Scaled:
    """How the elements of an array, in the shape that its scales fit, relate to a map's levels."""

    def __init__(self, fmt: Any, signed: bool, shape: tuple[int, ...], dtype: Any):
        self.map = _map(fmt, signed)
        self.signed, self.shape, self.dtype = signed, shape, dtype
        self.rank1 = isinstance(fmt, Linear) and fmt.rank1 and len(shape) > 1
        self.expand = isinstance(fmt, Float8) and fmt.expand
        self.dim = block_dim(shape)
        self.extent = shape[self.dim]
        self.size = min(fmt.block_size, self.extent)
        self.count = -(-self.extent // self.size)
        self.masked = self.count <= _MAX_MASKS and is_cut_through(shape, self.size)

    def fold(self, x: jax.Array) -> jax.Array:
        """An array as its blocks, where the scales want it so."""
        return x if self.rank1 or self.masked else _split(x, self.dim, self.size)

    def unfold(self, x: jax.Array) -> jax.Array:
        """The inverse of ``fold``."""
        return x if self.rank1 or self.masked else _join(x, self.dim, self.extent)

    def _reduce(self, op: Any, x: jax.Array, neutral: float) -> jax.Array:
        """What ``op`` makes of each block."""
        if not self.masked:
            return op(x, axis=self.dim + 1)
        block = self._block_of()
        parts = [op(jnp.where(block == i, x, neutral), axis=self.dim) for i in range(self.count)]
        return jnp.stack(parts, self.dim)

    def _repeat(self, scale: jax.Array) -> jax.Array:
        """For each element what its block has."""
        if not self.masked:
            return jnp.expand_dims(scale, self.dim + 1)
        block = self._block_of()
        out, *others = (
            jax.lax.slice_in_dim(scale, i, i + 1, axis=self.dim) for i in range(self.count)
        )
        for i, other in enumerate(others, 1):
            out = jnp.where(block >= i, other, out)
        return out

    def _block_of(self) -> jax.Array:
        shape = [self.extent if d == self.dim else 1 for d in range(len(self.shape))]
        return jax.lax.broadcasted_iota(jnp.int32, shape, self.dim) // self.size

    def measure(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """What to store as the scales of a folded array."""
        x = jnp.where(jnp.isnan(x), jnp.inf, x)  # XLA's maximum may pass over NaN on CPUs
        if self.rank1:
            dims = range(x.ndim)
            size = jnp.abs(x)
            return tuple(jnp.max(size, axis=[e for e in dims if e != d]) for d in dims)
        if self.signed and self.map.lowest < self.map.top:
            # 1 has no negative: a block whose largest element is negative is stored negated.
            up, down = (self._reduce(jnp.max, part, -jnp.inf) for part in (x, -x))
            return (jnp.where(down > up, -down, up),)
        size = jnp.abs(x)
        largest = self._reduce(jnp.max, size, 0.0)
        if not self.expand:
            return (largest,)
        least = self._reduce(jnp.min, jnp.where(size > 0, size, jnp.inf), jnp.inf)
        # Sixteenths of the power that stretches the block to the normal range of E4M3.
        octaves = jnp.log2(largest) - jnp.log2(jnp.minimum(least, largest))
        power = jnp.floor(16 * math.log2(448**2 / 2) / jnp.maximum(octaves, 1e-6))
        return largest, jnp.clip(jnp.where(largest > 0, power, 16), 1, 255).astype(jnp.uint8)

    def normalize(self, x: jax.Array, scale: tuple[jax.Array, ...]) -> jax.Array:
        """A folded array relative to its scales; 0 where they are 0."""
        if self.rank1:
            least = self.largest(scale)
            return x / jnp.where(least > 0, least, 1)
        known = jnp.abs(scale[0]) >= jnp.finfo(self.dtype).tiny
        inverse = jnp.where(known, 1 / jnp.where(known, scale[0], 1), 0)
        return jnp.clip(x * self._repeat(inverse), -1, 1)

    def largest(self, scale: tuple[jax.Array, ...]) -> jax.Array:
        """For each folded element what stands for 1."""
        if not self.rank1:
            return self._repeat(scale[0])
        ndim = len(scale)
        out = jnp.full([1] * ndim, jnp.inf, self.dtype)
        for d, part in enumerate(scale):
            others = [e for e in range(ndim) if e != d]
            out = jnp.minimum(out, jax.lax.expand_dims(part, others))
        return out

    def power(self, scale: tuple[jax.Array, ...]) -> Any:
        """The power that each folded element was raised to, or None."""
        return self._repeat(scale[1].astype(self.dtype) / 16) if self.expand else None

    def level(self, y: jax.Array, power: Any) -> jax.Array:
        """The last level not above a magnitude relative to its scale."""
        return self.map.level(y if power is None else y**power)

    def value(self, level: jax.Array, power: Any) -> jax.Array:
        """A level's magnitude relative to the scale."""
        out = self.map.value(level, self.dtype)
        return out if power is None else out ** (1 / power)


def encode(
    x: jax.Array, fmt: Format, signed: bool, rounding: str = "nearest", noise: Any = None
) -> Quantized:
    """An array in a format.

    Args:
      x: the array; of rank at least 1, and not empty.
      fmt: the format.
      signed: whether elements may be negative; if not, negative ones become 0, and no positive one
        does.
      rounding: one of ``ROUNDINGS``.
      noise: for stochastic rounding: uniform in [0, 1), of the array's shape.
    """
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    x = x.astype(dtype) if signed else jnp.maximum(x.astype(dtype), 0)
    shape = tuple(x.shape)
    if isinstance(fmt, BFloat16):
        codes, rest = _encode_bfloat16(x.astype(jnp.float32), signed, rounding, noise)
        return Quantized(codes, (), rest, shape, dtype, fmt, signed)
    scaled = _Scaled(fmt, signed, shape, dtype)
    top, lowest = scaled.map.top, scaled.map.lowest
    x = scaled.fold(x)
    scale = scaled.measure(x)
    positive = x > 0
    x = scaled.normalize(x, scale)
    power = scaled.power(scale)
    y = jnp.abs(x)
    level = scaled.level(y, power)
    low, high = (scaled.value(jnp.minimum(level + i, top), power) for i in (0, 1))
    gap = high - low
    part = jnp.clip((y - low) / jnp.where(gap > 0, gap, 1), 0, 1)
    if rounding == "compensated":
        level = (level << 8) + jnp.round(part * 256).astype(jnp.int32)
        top, lowest = top << 8, lowest << 8
    elif rounding == "stochastic":
        level = level + (scaled.fold(noise) < part)
    else:
        level = level + (part >= 0.5)
    level = jnp.clip(level, 0, top)
    if signed:
        level = jnp.maximum(jnp.where(x < 0, -level, level), -lowest) + lowest
    elif scaled.map.zero:
        level = jnp.where(positive, jnp.maximum(level, 1), level)
    level = scaled.unfold(level)
    rest = None
    if rounding == "compensated":
        level, rest = level >> 8, (level & 255).astype(jnp.uint8)
    codes = level.astype(jnp.uint8)
    if fmt.bits == 4:
        codes = _pack(codes, _pack_dim(shape, scaled.size))
    return Quantized(codes, scale, rest, shape, dtype, fmt, signed)


def decode(q: Quantized) -> jax.Array:
    """The array that was stored, to rounding."""
    if isinstance(q.format, BFloat16):
        return _decode_bfloat16(q.codes, q.rest).astype(q.dtype)
    scaled = _Scaled(q.format, q.signed, q.shape, q.dtype)
    codes = q.codes
    if q.format.bits == 4:
        dim = _pack_dim(q.shape, scaled.size)
        codes = _unpack(codes, dim, q.shape[dim])
    level = codes.astype(jnp.int32)
    if q.rest is not None:
        level = (level << 8) | q.rest
    level = scaled.fold(level)
    power = scaled.power(q.scale)
    if q.signed:
        level = level - (scaled.map.lowest << (0 if q.rest is None else 8))
    size = jnp.abs(level)
    if q.rest is None:
        out = scaled.value(size, power)
    else:
        out = scaled.value(size >> 8, power)
        above = scaled.value(jnp.minimum((size >> 8) + 1, scaled.map.top), power)
        out = out + (above - out) * ((size & 255).astype(q.dtype) / 256)
    if q.signed:
        out = jnp.where(level < 0, -out, out)
    return scaled.unfold(out * scaled.largest(q.scale))


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
