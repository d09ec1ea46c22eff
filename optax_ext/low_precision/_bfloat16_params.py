"""Bfloat16 parameters without master weights, by stochastic rounding of each step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_ext._leaves import check_arrays
from optax_ext._types import Array, Tree
from optax_ext.low_precision._rounding import (
    check_seed,
    make_key,
    next_key,
    salted,
    stochastic_bfloat16,
    uniform,
)


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

        def difference(path: Any, u: Array, p: Any) -> Any:
            if p.dtype != jnp.bfloat16:
                return u
            return _rounded_sum(path, p, u, key) - p.astype(jnp.float32)

        with jax.named_scope("stochastic_rounding"):
            out = jax.tree.map_with_path(difference, out, params)
        return out, StochasticRoundingState(key, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _widen(x: Array, p: Any) -> Any:
    """Returns a parameter or its gradient in the dtype that ``inner`` receives."""
    return jnp.asarray(x, jnp.float32) if p.dtype == jnp.bfloat16 else x


def _rounded_sum(path: Any, p: jax.Array, u: Array, key: jax.Array) -> jax.Array:
    """Returns ``p + u``; for bfloat16 ``p``, rounded to bfloat16 and stored in float32."""
    if p.dtype != jnp.bfloat16:
        return p + u
    noise = uniform(salted(key, path), p.shape)
    new = p.astype(jnp.float32) + jnp.asarray(u, jnp.float32)
    return stochastic_bfloat16(new, noise).astype(jnp.float32)
