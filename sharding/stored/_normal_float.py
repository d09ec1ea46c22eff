"""NF4: 4 bits of normally distributed parameters, whose scales are stored in 8 bits.

| | bits of a parameter |
|---|---|
| codes | 4 |
| a scale of 64 elements, in 8 bits | 0.125 |
| a scale of 256 such scales, float32 | 0.002 |
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from sharding.stored._forms import Form

BLOCK = 64  # elements of a scale, along the last dim
GROUP = 256  # scales of a block that share a float32
PADDED = 512  # a multiple of so many scales is stored: words for the 128 lanes of a TPU

# Quantiles of the normal distribution, relative to the largest; 0 is one of them. Half of the codes
# of one sign more: 7 negative and 8 positive ones (QLoRA, appendix E).
LEVELS = (
    *(-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NormalFloat4(Form):
    r"""A stack of matrices in NF4 with scales in 8 bits; 4.127 bits an element.

    .. math:: w = q_c \, (o + s_8 \, s_{32} / 127)

    Elements share words of 32 bits, which XLA slices in host memory as they are, other than bytes:
    element j of a row of m shares one with elements j + k m / 8.

    References:
      Dettmers et al.: QLoRA: Efficient Finetuning of Quantized LLMs, NeurIPS 2023,
      arXiv 2305.14314.
    """

    codes: jax.Array  #: uint32 (stack..., rows..., m / 8)
    scale: jax.Array  #: uint32 (stack..., groups / 2, 128), of 4 scales each
    group: jax.Array  #: float32, at least, (stack..., groups), an even number
    offset: jax.Array  #: float32, at least, (stack...), the mean scale of a matrix
    dtype: Any = dataclasses.field(metadata={"static": True})  #: of what the loss sees

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], 8 * self.codes.shape[-1])

    @property
    def stacked(self) -> int:
        return len(self.offset.shape)

    def decode_one(self) -> jax.Array:
        codes = _unpacked(self.codes, 4)
        values = _level(codes, self.offset).reshape(-1, BLOCK)
        scale = _unpacked(self.scale, 8).reshape(-1, GROUP)
        scales = _scales(scale, self.group, self.offset, len(values))
        return (values * scales[:, None]).reshape(codes.shape).astype(self.dtype)


def encode(w: jax.Array) -> NormalFloat4:
    """A matrix, or array of more dims, whose last dim is a multiple of 64."""
    x = w.astype(jnp.promote_types(w.dtype, jnp.float32)).reshape(-1, BLOCK)
    # Scales: the largest of each block, less their mean, in 8 bits.
    largest = jnp.max(jnp.abs(x), axis=-1)
    offset = jnp.mean(largest)
    grouped = jnp.pad(largest - offset, (0, -len(largest) % PADDED)).reshape(-1, GROUP)
    group = jnp.max(jnp.abs(grouped), axis=-1)
    unit = jnp.where(group > 0, 127 / jnp.where(group > 0, group, 1), 0)
    scale = jnp.round(grouped * unit[:, None]) + 128
    # Codes by the scales as they are read.
    read = _scales(scale, group, offset, len(x))
    x = x * jnp.where(read > 0, 1 / jnp.where(read > 0, read, 1), 0)[:, None]
    middles = [(low + high) / 2 for low, high in itertools.pairwise(LEVELS)]
    above = [(x > middle).astype(jnp.uint8) for middle in middles]
    codes = functools.reduce(jnp.add, above).reshape(w.shape)
    scale = _packed(scale.reshape(-1, PADDED), 8)
    return NormalFloat4(_packed(codes, 4), scale, group, offset, w.dtype)


def _level(codes: jax.Array, offset: jax.Array) -> jax.Array:
    """The level of each code, by its bits: look-ups neither vectorize on TPUs nor fuse."""
    # Constants of a loop would be arrays of its largest shapes, made before it, for JAX and XLA.
    values: list[Any] = [level + 0 * offset for level in LEVELS]
    for bit in range(4):
        is_set = (codes >> bit) & 1 > 0
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [jnp.where(is_set, high, low) for low, high in pairs]
    found: jax.Array = values[0]
    return found


def _scales(scale: jax.Array, group: jax.Array, offset: jax.Array, blocks: int) -> jax.Array:
    """The scales of blocks; none is negative."""
    relative = (scale.astype(group.dtype) - 128) * (group[:, None] / 127)
    return jnp.maximum(relative.reshape(-1)[:blocks] + offset, 0)


def _packed(x: jax.Array, bits: int) -> jax.Array:
    """Words of several numbers of so many bits, each from another part of the last dim."""
    parts = jnp.split(x.astype(jnp.uint32), 32 // bits, axis=-1)
    words = (part << (bits * k) for k, part in enumerate(parts))
    return functools.reduce(jnp.bitwise_or, words)


def _unpacked(words: jax.Array, bits: int) -> jax.Array:
    parts = [(words >> shift) & (2**bits - 1) for shift in range(0, 32, bits)]
    return jnp.concatenate([part.astype(jnp.uint8) for part in parts], axis=-1)
