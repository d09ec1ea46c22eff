"""The checksum of a stored block, on its source device and in host memory.

``OpenSlot.intact`` in ``_slot.py`` compares the two; ``_find_snapshot.py`` takes no block where
they differ, and refuses a snapshot that then lacks one.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sharding.recovery._stored_leaf import stored_dtype

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_CHUNK = 1 << 16  # elements that a host sums at a time, in its cache


def as_words(x: jax.Array) -> jax.Array:
    """The bits of an array as unsigned integers of its width."""
    x = x.astype(stored_dtype(x.dtype))
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    return lax.bitcast_convert_type(x, WORDS[x.dtype.itemsize])


def checksum(words: jax.Array) -> jax.Array:
    """Sums (2 i + 1) w_i modulo 2**32, i counting row by row; uint32."""
    # Odd factors make any change of one word change the sum; different ones, of two words' places.
    if words.dtype.itemsize == 8:  # two words, the low one first
        words = lax.bitcast_convert_type(words, jnp.uint32)
    factor = jnp.ones((), jnp.uint32)
    stride = 2
    for d in reversed(range(words.ndim)):
        index = lax.broadcasted_iota(jnp.uint32, words.shape, d)
        factor = lax.broadcast(factor, words.shape) if factor.ndim == 0 else factor
        factor = factor + index * jnp.uint32(stride % 2**32)
        stride *= words.shape[d]
    return jnp.sum(words.astype(jnp.uint32) * factor, dtype=jnp.uint32)


def host_checksum(block: np.ndarray) -> int:
    """``checksum`` of the words of a contiguous array in host memory."""
    raw = block.reshape(-1).view(np.uint8)
    words = raw.view(WORDS[min(4, block.dtype.itemsize)])
    factors = np.arange(1, 2 * _CHUNK, 2, dtype=np.uint32)
    total = 0
    for start in range(0, len(words), _CHUNK):
        chunk = words[start : start + _CHUNK].astype(np.uint32, copy=False)
        weighted = int((chunk * factors[: len(chunk)]).sum(dtype=np.uint32))
        total += weighted + 2 * start * int(chunk.sum(dtype=np.uint32))
    return total % 2**32
