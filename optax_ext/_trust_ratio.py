"""Trust ratios of LARS and LAMB, from norms of arrays with their global shapes."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_ext import _validate
from optax_ext._factoring import Dims, FactoringRule, check_rule, factorings
from optax_ext._leaves import Leaves, at_least_float32
from optax_ext._types import Tree

# Powers of two: multiplying by them is exact.
_DOWN = 2.0**-90
_UP = 2.0**90


class Layer(NamedTuple):
    """How one array of a step is treated."""

    batch: Dims  # dims along which slices are separate layers
    decays: bool  # whether its weights decay
    has_ratio: bool  # whether its update is scaled by a trust ratio


class Leaf(NamedTuple):
    """One parameter in a step of LAMB, or of LARS, which has no averages."""

    u: jax.Array  # the gradient, then the direction with weight decay, then the update
    w: jax.Array
    mu: jax.Array | None = None
    nu: jax.Array | None = None
    t: Any = None  # (), int32, number of this step
    ratio: jax.Array | None = None  # size 1 in all dims but those of batch

    @property
    def dtype(self) -> Any:
        return (self.w if self.mu is None else self.mu).dtype


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def norm(x: jax.Array, batch: Dims = ()) -> jax.Array:
    """Returns the 2-norm of each batch slice, shaped to broadcast against ``x``."""
    dims = _summed(x, batch)
    if all(x.shape[d] == 1 for d in dims):
        return jnp.abs(x)  # XLA would square the scale of a single square: 0 * inf

    def sum_of_squares(scale: float) -> jax.Array:
        return jnp.sum(jnp.square(x * scale), axis=dims, keepdims=True)

    # One pass, as all three sums read x; scaled ones where squares overflow or vanish.
    plain = sum_of_squares(1.0)
    return jnp.where(
        plain < 1e-20,
        jnp.sqrt(sum_of_squares(_UP)) * _DOWN,
        jnp.where(
            plain <= float(jnp.finfo(x.dtype).max),
            jnp.sqrt(plain),
            jnp.sqrt(sum_of_squares(_DOWN)) * _UP,
        ),
    )


def _summed(x: jax.Array, batch: Dims) -> tuple[int, ...]:
    return tuple(d for d in range(x.ndim) if d not in batch)


@norm.defjvp
def _norm_jvp(batch: Dims, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x,) = primals
    (dx,) = tangents
    x_norm = norm(x, batch)
    unit = x / jnp.where(x_norm == 0, 1.0, x_norm)
    return x_norm, jnp.sum(unit * dx, axis=_summed(x, batch), keepdims=True)


def ratio(
    w_norm: jax.Array, u_norm: jax.Array, numerator: jax.Array, denominator: jax.Array
) -> jax.Array:
    """Returns the quotient, and 1 where a norm is 0; ``u`` of LARS's paper is without decay."""
    # Nor does an infinite norm scale: zeros times infinity are NaN.
    none = (w_norm == 0) | (u_norm == 0) | jnp.isinf(w_norm)
    return jnp.where(none, 1.0, numerator / jnp.where(none, 1.0, denominator))


def check_options(weight_decay: Any, stacked: Any, **masks: Any) -> None:
    _validate.rate(weight_decay=weight_decay)
    check_rule("stacked", stacked)
    for name, mask in masks.items():
        if name != "trust_ratio_mask" or not isinstance(mask, bool):  # False: no ratios
            _validate.not_called(name, mask)
        if isinstance(mask, str) and mask != "matrices":
            raise ValueError(
                f"{name} must be 'matrices', a tree of bools, a function that makes one from the "
                f"parameters, or None for all parameters; got {mask!r}."
            )


def layers(
    name: str, leaves: Leaves, params: Tree, stacked: FactoringRule | None, **masks: Any
) -> tuple[list[Layer], list[jax.Array], list[jax.Array]]:
    """Returns how the transformation ``name`` treats each array; gradients and parameters, wide."""
    if params is None:
        raise ValueError(f"{name} needs params in update.")
    weights = leaves.arrays_in("params", params)
    batches = [dims.batch for dims in factorings(stacked, leaves)]

    def resolve(argument: str) -> list[bool]:
        mask = masks[argument]
        if isinstance(mask, str):
            return [g.ndim - len(b) > 1 for g, b in zip(leaves.arrays, batches, strict=True)]
        return _validate.mask(argument, True if mask is None else mask, params)

    kinds = list(map(Layer, batches, resolve("weight_decay_mask"), resolve("trust_ratio_mask")))
    dtypes = [at_least_float32(w.dtype) for w in weights]
    grads = [g.astype(dtype) for g, dtype in zip(leaves.arrays, dtypes, strict=True)]
    return kinds, grads, [w.astype(dtype) for w, dtype in zip(weights, dtypes, strict=True)]


def decayed(u: jax.Array, w: jax.Array, layer: Layer, rate: Any) -> jax.Array:
    return _validate.decayed(u, w, rate) if layer.decays else u


def scale(hyper: Any, layer: Layer, leaf: Leaf) -> Leaf:
    return leaf if leaf.ratio is None else leaf._replace(u=leaf.u * leaf.ratio)
