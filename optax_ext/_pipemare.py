"""PipeMare: smaller steps for delayed stages (T1), parameters of the forward pass (T2)."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_ext import _validate
from optax_ext._delays import check_delays, delays_of, map_slots
from optax_ext._leaves import Leaves, at_least_float32, wide_zeros
from optax_ext._types import Tree

_DECAY = math.exp(-2)  # D of the paper


class ScaleByDelayState(NamedTuple):
    """State of ``scale_by_delay``."""

    count: jax.Array  # type: ignore[assignment]  # (), int32, steps taken; hides tuple.count


def _divided(u: jax.Array, delay: Any, count: jax.Array, anneal_steps: Any) -> jax.Array:
    """Returns ``u / max(delay, 1) ** (1 - min(count / anneal_steps, 1))``."""
    dtype = at_least_float32(u.dtype)
    steps = _validate.hyperparameter(anneal_steps, dtype)
    power = 1 - jnp.minimum(count.astype(dtype) / steps, 1)
    scale = jnp.maximum(jnp.asarray(delay, dtype), 1) ** -power
    return (u.astype(dtype) * scale).astype(u.dtype)


def scale_by_delay(
    delays: Any, anneal_steps: jax.typing.ArrayLike
) -> optax.GradientTransformationExtraArgs:
    r"""Divides updates by their delay, less and less over the first steps (PipeMare's T1).

    In step k = 0, 1, ..., the update of a parameter with delay :math:`\tau` becomes

    .. math::

      u \leftarrow \frac{u}{\max(\tau, 1)^{p_k}}, \quad p_k = 1 - \min\left(\frac{k}{K}, 1\right)

    The largest stable rate of SGD is nearly proportional to :math:`1 / \tau`; after K steps the
    optimizer must be stable by itself. It goes after the optimizer, or after its learning rate.

    Args:
      delays: :math:`\tau`, in updates, in the forms of ``discrepancy_correction``.
      anneal_steps: K, in steps; above 0.

    Raises:
      ValueError: if a delay is negative, ``anneal_steps`` is not positive, the delays do not fit
        the parameters, or a parameter is not real and floating.

    Example:
      >>> import jax.numpy as jnp, optax, optax_ext
      >>> tx = optax.chain(optax.sgd(1.0), optax_ext.scale_by_delay({"a": 4.0, "b": 0.5}, 2))
      >>> ones = {"a": jnp.ones(()), "b": jnp.ones(())}
      >>> {name: float(u) for name, u in tx.update(ones, tx.init(ones))[0].items()}
      {'a': -0.25, 'b': -1.0}

    References:
      Yang et al.: PipeMare, MLSys 2021, arXiv 1910.05124. The maximum with 1 is not in the paper.
    """
    check_delays(delays)
    _validate.positive(anneal_steps=anneal_steps)

    def init(params: optax.Params) -> ScaleByDelayState:
        delays_of(delays, Leaves.of(params))  # raises unless they fit
        return ScaleByDelayState(jnp.zeros([], jnp.int32))

    def update(
        updates: Tree, state: ScaleByDelayState, params: Tree = None, **extra_args: Any
    ) -> tuple[Tree, ScaleByDelayState]:
        leaves = Leaves.of(updates)
        with jax.named_scope("scale_by_delay"):
            pairs = zip(leaves.arrays, delays_of(delays, leaves), strict=True)
            out = [_divided(u, delay, state.count, anneal_steps) for u, delay in pairs]
        return leaves.unflatten(out), ScaleByDelayState(optax.safe_increment(state.count))

    return optax.GradientTransformationExtraArgs(init, update)


class DiscrepancyCorrectionState(NamedTuple):
    """State of ``discrepancy_correction``; float32, or wider if the parameter is."""

    correction: optax.Updates  # tau * delta: the parameter's shape


def _averaged(correction: jax.Array, u: jax.Array, delay: Any, decay: Any) -> jax.Array:
    """Returns the correction after a step of ``u``."""
    dtype = correction.dtype
    delay = jnp.asarray(delay, dtype)
    positive = delay > 0
    # 1 - decay ** (1 / delay), without the cancellation that float32 has for long delays.
    log_decay = jnp.log(jnp.asarray(decay, dtype))
    weight = -jnp.expm1(log_decay / jnp.where(positive, delay, 1))
    weight = jnp.where(positive, weight, 1)
    return correction + weight * (delay * u.astype(dtype) - correction)


def discrepancy_correction(
    delays: Any, decay: jax.typing.ArrayLike = _DECAY
) -> optax.GradientTransformationExtraArgs:
    r"""Averages updates, from which ``backward_params`` estimates the parameters of the past.

    In an asynchronous pipeline the parameters of a forward pass are :math:`\tau` updates older than
    those of its backward pass. PipeMare's technique T2 takes the backward pass at an estimate of
    the former:

    .. math::

      \gamma = D^{1 / \tau}, \quad
      \delta \leftarrow \gamma \delta + (1 - \gamma) (w_{t+1} - w_t), \quad
      u_\text{bkwd} = w - \tau \, \delta

    Updates pass unchanged, and count as :math:`w_{t+1} - w_t`: it goes last in a chain.

    Args:
      delays: :math:`\tau`, in updates: a number; a tree of numbers like the parameters, or a prefix
        of one; or ``delays_by_path``. An array broadcasts against the leading dims of its
        parameter: (1, S) for parameters [V, S, ...] whose stages are dim 1.
      decay: D, the decay over the full delay, in [0, 1); exp(-2) in the paper.

    Raises:
      ValueError: if ``decay`` or a delay is out of range, the delays do not fit the parameters, a
        parameter is not real and floating, or gradients do not match the state.

    Example:
      >>> import jax.numpy as jnp, optax, optax_ext
      >>> tx = optax.chain(optax.sgd(1.0), optax_ext.discrepancy_correction(3.0))
      >>> params = jnp.asarray(10.0)
      >>> state = tx.init(params)
      >>> for _ in range(9):
      ...     updates, state = tx.update(jnp.ones(()), state)
      ...     params = optax.apply_updates(params, updates)
      >>> print(params, optax_ext.backward_params(params, state).round(2))  # 3 steps ago it was 4
      1.0 3.99

    References:
      Yang et al.: PipeMare, MLSys 2021, arXiv 1910.05124.
    """
    check_delays(delays)
    _validate.unit_interval(decay=decay)

    def init(params: optax.Params) -> DiscrepancyCorrectionState:
        delays_of(delays, Leaves.of(params))  # raises unless they fit
        return DiscrepancyCorrectionState(wide_zeros(params))

    def update(
        updates: Tree, state: DiscrepancyCorrectionState, params: Tree = None, **extra_args: Any
    ) -> tuple[Tree, DiscrepancyCorrectionState]:
        leaves = Leaves.of(updates)
        old = leaves.averages_in("correction", state.correction)
        with jax.named_scope("discrepancy_correction"):
            average = functools.partial(_averaged, decay=decay)
            new = list(map(average, old, leaves.arrays, delays_of(delays, leaves)))
        return updates, DiscrepancyCorrectionState(leaves.unflatten(new))

    return optax.GradientTransformationExtraArgs(init, update)


def backward_params(params: optax.Params, state: optax.OptState) -> optax.Params:
    """Estimates the parameters of the forward pass, at which the backward pass is taken.

    ``params`` are the current parameters, ``state`` contains those of ``discrepancy_correction``,
    in a chain, under ``optax.masked``, ``optax.partition`` or other wrappers. Returns a tree like
    ``params``, in their dtypes; parameters that are masked out are unchanged.

    Raises:
      ValueError: if the state contains none of ``discrepancy_correction``, several for a parameter,
        or one of other parameters.

    Example:
      >>> import jax.numpy as jnp, optax_ext
      >>> tx, params = optax_ext.discrepancy_correction(1.0, decay=0.0), jnp.asarray(10.0)
      >>> _, state = tx.update(jnp.asarray(-2.0), tx.init(params))
      >>> print(optax_ext.backward_params(params - 2, state))  # those of one update ago
      10.0
    """
    names, state_type = ("backward_params", "discrepancy_correction"), DiscrepancyCorrectionState

    def corrected(p: jax.Array, correction: jax.Array) -> jax.Array:
        return (p.astype(correction.dtype) - correction).astype(p.dtype)

    return map_slots(names, corrected, params, state, state_type, lambda own: own.correction)
