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

from sharding.stored._forms import Form, each_of_stack

BLOCK = 64  # elements of a scale, along the last dim
GROUP = 256  # scales of a block that share a float32

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

    Element j of a row shares a byte with element j + m / 2, where m is the row's length.

    References:
      Dettmers et al.: QLoRA: Efficient Finetuning of Quantized LLMs, NeurIPS 2023,
      arXiv 2305.14314.
    """

    codes: jax.Array  #: uint8 (stack..., rows..., m / 2)
    scale: jax.Array  #: int8 (stack..., rows..., m / 64)
    group: jax.Array  #: float32, at least, (stack..., groups), of each 256 scales in their order
    offset: jax.Array  #: float32, at least, (stack...), the mean scale of a matrix
    dtype: Any = dataclasses.field(metadata={"static": True})  #: of what the loss sees

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    @property
    def stacked(self) -> int:
        return len(self.offset.shape)

    def decode(self) -> jax.Array:
        return each_of_stack(_decode, self.stacked)(self).astype(self.dtype)


def encode(w: jax.Array) -> NormalFloat4:
    """A matrix, or array of more dims, whose last dim is a multiple of 64."""
    x = w.astype(jnp.promote_types(w.dtype, jnp.float32)).reshape(-1, BLOCK)
    # Scales: the largest of each block, less their mean, in 8 bits.
    largest = jnp.max(jnp.abs(x), axis=-1)
    offset = jnp.mean(largest)
    grouped = _scale_groups(largest - offset)
    group = jnp.max(jnp.abs(grouped), axis=-1)
    unit = jnp.where(group > 0, 127 / jnp.where(group > 0, group, 1), 0)
    scale = jnp.round(grouped * unit[:, None]).astype(jnp.int8).reshape(-1)[: len(largest)]
    scale = scale.reshape(*w.shape[:-1], -1)
    # Codes by the scales as they are read.
    read = _scales(scale, group, offset)
    x = x * jnp.where(read > 0, 1 / jnp.where(read > 0, read, 1), 0)[:, None]
    middles = [(low + high) / 2 for low, high in itertools.pairwise(LEVELS)]
    above = [(x > middle).astype(jnp.uint8) for middle in middles]
    codes = functools.reduce(jnp.add, above).reshape(w.shape)
    low, high = jnp.split(codes, 2, axis=-1)
    return NormalFloat4(low | (high << 4), scale, group, offset, w.dtype)


def _decode(stored: NormalFloat4) -> jax.Array:
    codes = jnp.concatenate([stored.codes & 15, stored.codes >> 4], axis=-1)
    values = _level(codes, stored.offset).reshape(-1, BLOCK)
    scales = _scales(stored.scale, stored.group, stored.offset)
    return (values * scales[:, None]).reshape(codes.shape)


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


def _scale_groups(scales: jax.Array) -> jax.Array:
    """Scales by groups, the last one padded."""
    padded = jnp.pad(scales, (0, -len(scales) % GROUP))
    return padded.reshape(-1, GROUP)


def _scales(scale: jax.Array, group: jax.Array, offset: jax.Array) -> jax.Array:
    """The scales of all blocks, in one dim; none is negative."""
    relative = _scale_groups(scale.astype(group.dtype).reshape(-1)) * (group[:, None] / 127)
    return jnp.maximum(relative.reshape(-1)[: scale.size] + offset, 0)
