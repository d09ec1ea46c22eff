"""Stochastic rounding and its random bits, which fuse and do not depend on the mesh."""

import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp

from optax_ext import _validate
from optax_ext._leaves import path_name

_MAX_INDEXED = 2**32  # elements that a uint32 distinguishes


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every input bit flips half of the output bits."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0x735A2D97)
    return x ^ (x >> 15)


def check_seed(seed: int) -> None:
    _validate.known(seed=seed)
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be in [0, 2**32), got {seed!r}.")


def make_key(seed: int) -> jax.Array:
    """Returns (2,) uint32: the seed, and the number of ``next_key`` calls."""
    return jnp.array([seed, 0], jnp.uint32)


def next_key(key: jax.Array) -> jax.Array:
    return key + jnp.array([0, 1], jnp.uint32)


def salted(key: jax.Array, path: Any) -> jax.Array:
    """Returns the key of the noise of the array with this path."""
    salt = zlib.crc32(path_name(path).encode())
    # The constant is an array: XLA keeps it out of kernels, which are equal for arrays of one shape
    # and compiled once. A number would be in the kernel.
    return key ^ jnp.array([salt, 0], jnp.uint32)


def uniform(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns float32 in [0, 1): a hash of the salted key and each element's global index."""
    num = _num_outer_dims(shape)
    index = _index((*[1] * num, *shape[num:]))
    return uniform_at(index, _hash_of_step(key, shape))


def _hash_of_step(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns a uint32 for the noise of an array in one step, one for each slice of outer dims."""
    step = _mix(_mix(key[0]) + key[1])
    num = _num_outer_dims(shape)
    if num:
        step = _mix(_mix(step) + _index((*shape[:num], *[1] * (len(shape) - num))))
    return step


def uniform_at(index: jax.Array, step: jax.Array) -> jax.Array:
    """Returns float32 in [0, 1) for elements by their index, of a hash of the step."""
    # Mixed twice, so that the noise of one step is not that of another at shifted indices.
    bits = _mix(_mix(index ^ step) + _mix(step))
    # Below 2**24, where conversions from int32 and from uint32 agree; TPUs have the first.
    return (bits >> 8).astype(jnp.int32).astype(jnp.float32) * 2.0**-24


def hashes_of_matrices(key: jax.Array, shape: tuple[int, ...]) -> list[jax.Array]:
    """Returns (num,) ``hashes`` and ``first``, for ``uniform_at(first[i] + index, hashes[i])``."""
    num = _num_outer_dims(shape)
    inner, size = math.prod(shape[num:-2]), math.prod(shape[-2:])
    first = jnp.arange(inner, dtype=jnp.uint32) * jnp.uint32(size & 0xFFFFFFFF)
    hashes = _hash_of_step(key, shape).reshape(-1)
    return [jnp.repeat(hashes, inner), jnp.tile(first, hashes.size)]


def numbers_matrices(shape: tuple[int, ...]) -> bool:
    """Whether a uint32 numbers the elements of a matrix, as ``hashes_of_matrices`` takes it to."""
    return _num_outer_dims(shape) <= len(shape) - 2


def _num_outer_dims(shape: tuple[int, ...]) -> int:
    """Returns the smallest number of leading dims beyond which at most 2**32 elements remain."""
    return next(d for d in range(len(shape) + 1) if math.prod(shape[d:]) <= _MAX_INDEXED)


def _index(shape: tuple[int, ...]) -> jax.Array:
    """Returns the row-major index of each element, modulo 2**32."""
    index = jnp.zeros(shape, jnp.uint32)
    for dim in range(len(shape)):
        stride = math.prod(shape[dim + 1 :]) & 0xFFFFFFFF
        index += jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride)
    return index


def top_half(bits: jax.Array) -> jax.Array:
    """Returns the bfloat16 made of the upper 16 bits of a float32."""
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)


def stochastic_bfloat16(x: jax.Array, noise: jax.Array) -> jax.Array:
    """Returns one of the two nearest bfloat16, such that the mean over the noise is ``x``."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    up = (noise * 65536).astype(jnp.uint32)
    return top_half(jnp.where(jnp.isfinite(x), bits + up, bits))
