"""Stochastic rounding and its random bits, which fuse and do not depend on the mesh."""

import functools
import math
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_ext import _validate
from optax_ext._leaves import check_arrays, path_name
from optax_ext._types import Array, Tree

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


def next_key(key: jax.Array | None) -> Any:
    """Returns the key of the next step; None if nothing is rounded stochastically."""
    return None if key is None else key + jnp.array([0, 1], jnp.uint32)


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


# --- Bfloat16 parameters without master weights, by stochastic rounding of each step --------------


class StochasticRoundingState(NamedTuple):
    """State of ``stochastic_rounding``."""

    key: jax.Array  # (2,), uint32: seed, steps taken
    inner_state: optax.OptState


def apply_updates(params: optax.Params, updates: optax.Updates, key: jax.Array) -> optax.Params:
    r"""``optax.apply_updates`` with stochastic rounding of bfloat16 parameters.

    With :math:`\lfloor \cdot \rfloor` and :math:`\lceil \cdot \rceil` the bfloat16 neighbours of a
    float32, :math:`\theta \leftarrow \lceil s \rceil` with probability
    :math:`(s - \lfloor s \rfloor) / (\lceil s \rceil - \lfloor s \rfloor)`, else
    :math:`\lfloor s \rfloor`, for :math:`s = \theta + u` in float32.

    Args:
      params: the parameters; those that are not bfloat16 are updated as by optax.
      updates: a tree of the same structure; None leaves a parameter as it is.
      key: a new ``jax.random.key`` for each step.

    Raises:
      ValueError: if the trees do not match.

    Example:
      >>> import jax, jax.numpy as jnp, optax_ext
      >>> params = jnp.ones(1000, jnp.bfloat16)
      >>> for i in range(100):  # to the nearest, it would stay 1
      ...     params = optax_ext.apply_updates(params, jnp.full(1000, -1e-3), jax.random.key(i))
      >>> round(float(params.astype(jnp.float32).mean()), 2)
      0.9

    References:
      Gupta et al.: Deep Learning with Limited Numerical Precision, ICML 2015, arXiv 1502.02551.
    """
    seed = jax.random.bits(key, (2,), jnp.uint32)

    def add(path: Any, p: Any, u: Array) -> Any:
        if u is None or p is None:
            return p
        return _rounded_sum(path, p, u, seed).astype(p.dtype)

    return jax.tree.map_with_path(add, params, updates, is_leaf=lambda x: x is None)


def stochastic_rounding(
    inner: optax.GradientTransformation, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Runs ``inner`` in float32 on bfloat16 parameters, and rounds their sums stochastically.

    Replaces ``optax_ext.apply_updates`` where other code calls ``optax.apply_updates``: the update
    is the difference to the rounded sum, exact in float32. The state adds a key to that of
    ``inner``.

    Args:
      inner: the transformation; it receives bfloat16 parameters and their gradients as float32. No
        later transformation may change the updates: this one goes last in a chain, and around
        wrappers of optax that may skip an update, such as ``apply_if_finite``, whose branches would
        differ in dtype.
      seed: the seed of the noise, which depends on it and the step alone, not on the mesh.

    Raises:
      ValueError: if ``update`` is called without ``params``, or the seed is not a uint32.

    Example:
      >>> import jax.numpy as jnp, optax, optax_ext
      >>> params = jnp.ones(10000, jnp.bfloat16)
      >>> tx = optax_ext.stochastic_rounding(optax.sgd(1e-3))
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> round(float(updates.mean()), 4)  # -1/256 or 0
      -0.001
    """
    inner = optax.with_extra_args_support(inner)
    check_seed(seed)

    def init(params: optax.Params) -> StochasticRoundingState:
        check_arrays(params)
        return StochasticRoundingState(
            make_key(seed), inner.init(jax.tree.map(_widen, params, params))
        )

    def update(
        updates: Tree, state: StochasticRoundingState, params: Tree = None, **extra_args: Any
    ) -> tuple[Tree, StochasticRoundingState]:
        if params is None:
            raise ValueError("stochastic_rounding needs params in update.")
        grads = jax.tree.map(_widen, updates, params)
        wide = jax.tree.map(_widen, params, params)
        out, inner_state = inner.update(grads, state.inner_state, wide, **extra_args)
        key = next_key(state.key)
        with jax.named_scope("stochastic_rounding"):
            out = jax.tree.map_with_path(functools.partial(_rounded_update, key), out, params)
        return out, StochasticRoundingState(key, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _widen(x: Array, p: Any) -> Any:
    """Returns a parameter or its gradient in the dtype that ``inner`` receives."""
    return jnp.asarray(x, jnp.float32) if p.dtype == jnp.bfloat16 else x


def _rounded_update(key: jax.Array, path: Any, u: Array, p: Any) -> Any:
    """Returns the difference of the rounded sum and the parameter."""
    if p.dtype != jnp.bfloat16:
        return u
    new = _rounded_sum(path, p, u, key)
    old = p.astype(jnp.float32)
    return jnp.where(jnp.isinf(old) & (new == old), 0, new - old)  # inf - inf is NaN


def _rounded_sum(path: Any, p: jax.Array, u: Array, key: jax.Array) -> jax.Array:
    """Returns ``p + u``; for bfloat16 ``p``, rounded to bfloat16 and stored in float32."""
    if p.dtype != jnp.bfloat16:
        return p + u
    noise = uniform(salted(key, path), p.shape)
    new = p.astype(jnp.float32) + jnp.asarray(u, jnp.float32)
    return stochastic_bfloat16(new, noise).astype(jnp.float32)
