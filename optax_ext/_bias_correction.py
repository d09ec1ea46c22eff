"""Moving averages: their bias correction, and momentum."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_ext import _validate
from optax_ext._leaves import Leaves, at_least_float32, wide_zeros
from optax_ext._types import DType, Tree


def one_minus_power(beta: Any, count: jax.Array, dtype: DType) -> jax.Array:
    """Returns ``1 - beta**count`` without the cancellation that float32 has at 0.9999."""
    concrete = isinstance(beta, float)
    log_beta: Any = (math.log(beta) if beta > 0 else -math.inf) if concrete else jnp.log(beta)
    return -jnp.expm1(count.astype(dtype) * log_beta)


def momentum(
    make_state: Any, decay: Any, dtype: DType = None, *, dampened: bool, nesterov: bool = False
) -> optax.GradientTransformation:
    """``mu = decay * mu + weight * update``, stored in ``dtype``, computed in float32 or wider.

    The weight is ``1 - decay`` if dampened, else 1. ``make_state`` is a NamedTuple of one field.
    """

    def init(params: optax.Params) -> Any:
        return make_state(wide_zeros(params, dtype))

    def update(updates: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        (old,) = state
        (name,) = make_state._fields
        Leaves.of(updates).averages_in(name, old, dtype)  # raises unless they match

        def average(u: jax.Array, mu: jax.Array) -> jax.Array:
            wide = jnp.promote_types(at_least_float32(u.dtype), mu.dtype)
            b1 = _validate.hyperparameter(decay, wide)
            return b1 * mu.astype(wide) + (1 - b1 if dampened else 1) * u.astype(wide)

        mu = jax.tree.map(average, updates, old)
        out = jax.tree.map(average, updates, mu) if nesterov else mu
        out = jax.tree.map(lambda m, u: m.astype(u.dtype), out, updates)
        return out, make_state(jax.tree.map(lambda m, was: m.astype(was.dtype), mu, old))

    return optax.GradientTransformation(init, update)
