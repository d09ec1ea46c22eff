"""8-bit and 4-bit codes on the wire, as QSGD sends them: one scale for each block of elements."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def quantize(
    x: jax.Array, bits: int, block_size: int, key: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Codes (rows, padded elements * bits / 8), float32 scales (rows, blocks) of (rows, elements).

    8 bits are int8 codes, 4 bits uint8 that hold two. ``key`` rounds stochastically, None to
    nearest.
    """
    num_levels = 2 ** (bits - 1) - 1
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block_size)))
    blocks = x.reshape(x.shape[0], -1, block_size)  # (rows, blocks, block_size)
    # One scale per block: its largest magnitude is num_levels steps.
    scales = jnp.abs(blocks).max(-1).astype(jnp.float32)
    scales *= np.float32(1 / num_levels)  # as XLA divides by a constant
    steps = blocks / jnp.where(scales == 0, 1, scales)[..., None].astype(x.dtype)
    if key is None:
        steps = jnp.round(steps)
    else:
        steps = jnp.floor(steps + jax.random.uniform(key, steps.shape, steps.dtype))
    # A scale rounded to float32 may lift the largest element above the last level.
    codes = jnp.clip(steps, -num_levels, num_levels).astype(jnp.int8).reshape(x.shape)
    if bits == 4:
        # Two neighbours share a byte, the first in its lower half.
        low, high = jnp.split(codes.reshape(x.shape[0], -1, 2), 2, -1)
        codes = ((low & 15) | (high << 4)).squeeze(-1).astype(jnp.uint8)
    return codes, scales


def dequantize(codes: jax.Array, scales: jax.Array, bits: int, block_size: int) -> jax.Array:
    """The inverse of ``quantize`` up to rounding: (rows, padded elements), float32."""
    if bits == 4:
        both = lax.bitcast_convert_type(codes, jnp.int8)
        codes = jnp.stack([(both << 4) >> 4, both >> 4], -1)  # shifts extend the sign
    blocks = codes.reshape(*scales.shape, block_size).astype(jnp.float32) * scales[..., None]
    return blocks.reshape(scales.shape[0], -1)
