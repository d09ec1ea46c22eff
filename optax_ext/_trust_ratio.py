"""Trust ratios: the norms of LARS and LAMB, and which arrays have a ratio.

Norms are those of arrays with their global shapes, however they are sharded.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_ext import _validate
from optax_ext._factoring_rules import Dims, FactoringRule, factorings
from optax_ext._leaves import Leaves, at_least_float32

# Powers of two: multiplying by them is exact.
_DOWN, _UP = 2.0**-90, 2.0**90


class Layer(NamedTuple):
    """One array of a step, and how it is treated.

    Attributes:
      g: the gradient, in the dtype of the step.
      w: the parameter, likewise.
      batch: dims along which slices are separate layers.
      decays: whether its weights decay.
      has_ratio: whether its update is scaled by a trust ratio.
    """

    g: jax.Array
    w: jax.Array
    batch: Dims
    decays: bool
    has_ratio: bool


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def norm(x: jax.Array, batch: Dims = ()) -> jax.Array:
    """Returns the 2-norm of each batch slice, shaped to broadcast against ``x``.

    One pass computes three sums: where the squares overflow or vanish, those of scaled elements do
    not. The derivative is that of the norm, and 0 where it is 0.
    """
    dims = _summed(x, batch)
    if all(x.shape[d] == 1 for d in dims):
        return jnp.abs(x)  # XLA would square the scale of a single square: 0 * inf

    def sum_of_squares(scale: float) -> jax.Array:
        return jnp.sum(jnp.square(x * scale), axis=dims, keepdims=True)

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
    (x,), (dx,) = primals, tangents
    found = norm(x, batch)
    unit = x / jnp.where(found == 0, 1.0, found)
    return found, jnp.sum(unit * dx, axis=_summed(x, batch), keepdims=True)


def ratio(numerator: jax.Array, denominator: jax.Array, zero: jax.Array) -> jax.Array:
    """Returns the quotient, and 1 where a norm is ``zero``."""
    return jnp.where(zero, 1.0, numerator / jnp.where(zero, 1.0, denominator))


def check_masks(**masks: Any) -> None:
    """Raises on a mask that is a string other than ``"matrices"``, or was a function."""
    for name, mask in masks.items():
        if name != "trust_ratio_mask" or not isinstance(mask, bool):  # False: no ratios
            _validate.not_called(name, mask)
        if isinstance(mask, str) and mask != "matrices":
            raise ValueError(
                f"{name} must be 'matrices', a tree of bools, a function that makes one from the "
                f"parameters, or None for all parameters; got {mask!r}."
            )


def layers(
    name: str,
    leaves: Leaves,
    params: optax.Params | None,
    stacked: FactoringRule | None,
    weight_decay_mask: Any,
    trust_ratio_mask: Any,
) -> list[Layer]:
    """Returns the arrays of a step of the transformation ``name``, from its gradients' leaves."""
    if params is None:
        raise ValueError(f"{name} needs params in update.")
    arrays = leaves.arrays_in("params", params)
    batches = [dims.batch for dims in factorings(stacked, leaves)]

    def resolve(argument: str, mask: Any) -> list[bool]:
        if isinstance(mask, str):
            return [g.ndim - len(b) > 1 for g, b in zip(leaves.arrays, batches, strict=True)]
        return _validate.mask(argument, True if mask is None else mask, params)

    decays = resolve("weight_decay_mask", weight_decay_mask)
    ratios = resolve("trust_ratio_mask", trust_ratio_mask)

    def layer(g: jax.Array, w: jax.Array, batch: Dims, decays: bool, has_ratio: bool) -> Layer:
        dtype = at_least_float32(w.dtype)
        return Layer(g.astype(dtype), w.astype(dtype), batch, decays, has_ratio)

    return list(map(layer, leaves.arrays, arrays, batches, decays, ratios))


def decay_rate(weight_decay: optax.ScalarOrSchedule, count: jax.Array | None) -> Any:
    """Returns the rate of this step: a number, or a schedule's value at the count."""
    return weight_decay(count) if callable(weight_decay) else weight_decay


def check_decay(weight_decay: optax.ScalarOrSchedule) -> None:
    """Raises on a negative rate."""
    if not callable(weight_decay):
        _validate.non_negative(weight_decay=weight_decay)


def decayed(u: jax.Array, layer: Layer, rate: Any) -> jax.Array:
    """Returns ``u + rate * w`` if the layer's weights decay, else ``u``."""
    return u + _validate.hyperparameter(rate, u.dtype) * layer.w if layer.decays else u
