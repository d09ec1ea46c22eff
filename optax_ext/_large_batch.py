"""Large batches: learning rates, by scaling rules and warm-up; the gradient noise scale."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_ext import _validate
from optax_ext._bias_correction import one_minus_power
from optax_ext._leaves import at_least_float32, states_of
from optax_ext._types import Tree


def _check_numbers(**values: Any) -> None:
    for name, value in values.items():
        if callable(value):
            raise ValueError(
                f"{name} must be a number, got {value!r}; scale the rates from which the schedule "
                "is made, or its values."
            )
    _validate.positive(**values)


def linear_scaling(base_lr: float, base_batch: float, batch: float) -> float:
    r"""Returns the rate in proportion to the batch, :math:`\eta = \eta_0 \, B / B_0`, for SGD.

    Args:
      base_lr: :math:`\eta_0`, the rate tuned for ``base_batch``.
      base_batch: :math:`B_0`, in any unit: examples, tokens.
      batch: :math:`B`, in the same unit.

    Raises:
      ValueError: if an argument is not a positive number.

    Example:
      >>> from optax_ext import linear_scaling
      >>> linear_scaling(0.1, base_batch=256, batch=8192)
      3.2

    References:
      Goyal et al.: Accurate, Large Minibatch SGD, 2017, arXiv 1706.02677.
    """
    _check_numbers(base_lr=base_lr, base_batch=base_batch, batch=batch)
    return base_lr * (batch / base_batch)


def square_root_scaling(base_lr: float, base_batch: float, batch: float) -> float:
    r"""Returns the rate in proportion to the batch's root, :math:`\eta = \eta_0 \sqrt{B / B_0}`.

    For adaptive methods such as Adam and LAMB. Arguments and errors are those of
    ``linear_scaling``.

    Example:
      >>> from optax_ext import square_root_scaling
      >>> square_root_scaling(1e-3, base_batch=512, batch=32768)
      0.008

    References:
      Krizhevsky: One Weird Trick, 2014, arXiv 1404.5997. For LAMB: You et al., arXiv 1904.00962.
    """
    _check_numbers(base_lr=base_lr, base_batch=base_batch, batch=batch)
    return base_lr * math.sqrt(batch / base_batch)


def gradual_warmup(
    learning_rate: optax.ScalarOrSchedule, warmup_steps: int, start: float = 0.0
) -> optax.Schedule:
    r"""Replaces the first steps of a schedule by a linear ramp from ``start``.

    With the schedule :math:`\eta(t)`, which is not shifted, and W steps of warm-up,

    .. math::

      \eta'(t) = \begin{cases}
        s + (\eta(W) - s) \, t / W & t < W \\ \eta(t) & t \ge W \end{cases}

    Args:
      learning_rate: a number or a schedule of the step count.
      warmup_steps: W; 0 for no warm-up. In the paper, those of 5 epochs.
      start: s, the rate of the first step; in the paper, ``base_lr``.

    Raises:
      ValueError: if ``warmup_steps``, ``start`` or a constant rate is negative.

    Example:
      >>> import optax, optax_ext
      >>> decay = optax.piecewise_constant_schedule(0.4, {30: 0.1, 60: 0.1})
      >>> schedule = optax_ext.gradual_warmup(decay, 5, start=0.1)
      >>> [round(float(schedule(t)), 3) for t in (0, 1, 4, 5, 29, 31, 61)]
      [0.1, 0.16, 0.34, 0.4, 0.4, 0.04, 0.004]

    References:
      That of ``linear_scaling``.
    """
    _validate.non_negative(warmup_steps=warmup_steps, start=start)
    _validate.rate(learning_rate=learning_rate)
    rate = functools.partial(_validate.value_at, learning_rate)

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        done = jnp.asarray(count, float) / max(warmup_steps, 1)
        ramp = start + (rate(warmup_steps) - start) * done
        return jnp.where(jnp.asarray(count) < warmup_steps, ramp, rate(count))

    return schedule


# --- The gradient noise scale, which estimates the critical batch size ----------------------------

_HOW = (
    "gradient_noise_scale compares the gradient with those of sub-batches: update needs "
    "local_squared_norm, the mean of the squared norms of their gradients, and num_pieces, their "
    "number. The train_step of sharding.Zero passes both"
)


class GradientNoiseScaleState(NamedTuple):
    """State of ``gradient_noise_scale``: bias-corrected averages of the steps so far."""

    count: jax.Array  # type: ignore[assignment]  # (), int32, steps averaged; hides tuple.count
    squared_norm: jax.Array  # (), float32, |G|^2 of the true gradient
    variance: jax.Array  # (), float32, tr(Sigma): the variance of one example's gradient


def gradient_noise_scale(
    batch_size: jax.typing.ArrayLike, *, decay: jax.typing.ArrayLike = 0.99
) -> optax.GradientTransformationExtraArgs:
    r"""Measures the noise of gradients, and leaves them unchanged.

    With :math:`|G_B|^2` the squared norm of the gradient of B examples and :math:`|G_b|^2` the mean
    of the squared norms of n sub-batches of b = B / n, such as those of devices or micro-batches,

    .. math::

      |G|^2 \approx \frac{B |G_B|^2 - b |G_b|^2}{B - b}, \quad
      \operatorname{tr} \Sigma \approx \frac{|G_b|^2 - |G_B|^2}{1 / b - 1 / B}, \quad
      B_\text{simple} = \frac{\operatorname{tr} \Sigma}{|G|^2}

    Both are averaged over steps; ``noise_scale`` divides the averages. It goes first in a chain,
    outside of ``optax.MultiSteps``. Steps with fewer than two sub-batches of nonzero weight, or
    with gradients that are not finite, are skipped.

    Args:
      batch_size: B, above 0, in the unit of the noise scale: examples, tokens, or mean weight. Of
        batches that grow, each size has a transformation of its own; their states are alike.
      decay: decay of the averages, in [0, 1).

    Returns:
      A ``GradientTransformation`` whose ``update`` needs ``local_squared_norm``, a scalar, and
      ``num_pieces``, the number of sub-batches; ``sharding.Zero`` passes both in ``train_step``.

    Raises:
      ValueError: if ``batch_size`` or ``decay`` is out of range. In ``update``: if one of its
        arguments is missing, or if there are fewer than two sub-batches.

    Example:
      >>> import jax, jax.numpy as jnp, optax_ext
      >>> tx = optax_ext.gradient_noise_scale(batch_size=4)
      >>> params, x = jnp.zeros(3), jnp.eye(4, 3) + 1.0  # each of four examples is a sub-batch
      >>> grads = jax.vmap(jax.grad(lambda p, x: jnp.sum((p - x) ** 2)), (None, 0))(params, x)
      >>> sizes = {"local_squared_norm": jnp.mean(jnp.sum(grads**2, axis=1)), "num_pieces": 4}
      >>> _, state = tx.update(grads.mean(0), tx.init(params), **sizes)
      >>> round(float(optax_ext.noise_scale(state)), 3)
      0.167

    References:
      McCandlish et al.: An Empirical Model of Large-Batch Training, 2018, arXiv 1812.06162.
    """
    _validate.positive(batch_size=batch_size)
    _validate.unit_interval(decay=decay)

    def init(params: optax.Params) -> GradientNoiseScaleState:
        # Buffers of their own: a train state that is donated must not hold one array twice.
        zero = functools.partial(jnp.zeros, [])
        return GradientNoiseScaleState(zero(jnp.int32), zero(jnp.float32), zero(jnp.float32))

    def update(
        updates: Tree,
        state: GradientNoiseScaleState,
        params: Tree = None,
        *,
        local_squared_norm: jax.typing.ArrayLike | None = None,
        num_pieces: Any = None,
        **extra_args: Any,
    ) -> tuple[Tree, GradientNoiseScaleState]:
        given = {"local_squared_norm": local_squared_norm, "num_pieces": num_pieces}
        missing = [name for name, value in given.items() if value is None]
        if missing:
            raise ValueError(f"{_HOW}; missing: {', '.join(missing)}.")
        concrete = not isinstance(num_pieces, jax.core.Tracer)
        if concrete and not num_pieces >= 2:
            raise ValueError(f"{_HOW}; got num_pieces={num_pieces}, but at least 2 are required.")
        with jax.named_scope("noise_scale"):
            arrays = (x.astype(at_least_float32(x.dtype)) for x in jax.tree.leaves(updates))
            zero = jnp.zeros([], jnp.float32)
            squared_norm = sum((jnp.sum(jnp.square(x)) for x in arrays), start=zero)
            local = jnp.asarray(local_squared_norm)
            enough = jnp.asarray(num_pieces) >= 2
            usable = enough & jnp.isfinite(squared_norm) & jnp.isfinite(local)
            # Unbiased estimates of |G|^2 and of tr(Sigma) from this step.
            dtype = squared_norm.dtype
            others = jnp.asarray(jnp.where(enough, num_pieces, 2), dtype) - 1
            size = _validate.hyperparameter(batch_size, dtype)
            local = local.astype(dtype)
            norm = ((others + 1) * squared_norm - local) / others
            variance = (local - squared_norm) * (size / others)
            count = optax.safe_increment(state.count)
            b = _validate.hyperparameter(decay, jnp.float32)
            weight = (1 - b) / one_minus_power(b, count, jnp.float32)  # bias correction
            pairs = zip(state[1:], (norm, variance), strict=True)
            averages = (old + weight * (x.astype(old.dtype) - old) for old, x in pairs)
            new = GradientNoiseScaleState(count, *averages)
            return updates, jax.tree.map(functools.partial(jnp.where, usable), new, state)

    return optax.GradientTransformationExtraArgs(init, update)


def noise_scale(state: optax.OptState) -> jax.Array:
    r"""Reads the gradient noise scale :math:`B_\text{simple}` from an optimizer's state.

    A scalar in the unit of ``batch_size``: NaN before the first step; it may be negative after the
    first few, or where the gradient is pure noise.

    Raises:
      ValueError: if the state contains none of ``gradient_noise_scale``, or several.

    Example:
      >>> import jax.numpy as jnp, optax, optax_ext
      >>> tx = optax.chain(optax_ext.gradient_noise_scale(batch_size=64), optax.sgd(0.1))
      >>> print(optax_ext.noise_scale(tx.init(jnp.ones(3))))
      nan
    """
    states = states_of(GradientNoiseScaleState, state)
    if len(states) != 1:
        raise ValueError(
            "noise_scale reads the state of one gradient_noise_scale, found "
            f"{len(states)} in this optimizer state. Pass the part that contains exactly one."
        )
    return states[0].variance / states[0].squared_norm


def batch_advice(noise_scale: jax.Array | float, batch_size: float, near: float = 2.0) -> str:
    r"""Compares a batch size with the critical size, which is about the noise scale.

    A run takes :math:`1 + B_\text{noise} / B` times the minimum of steps.

    Args:
      noise_scale: the noise scale, averaged over many steps.
      batch_size: the batch, in the same unit.
      near: the largest ratio at which the two count as near; at least 1.

    Returns:
      ``"below"`` (a larger batch needs fewer steps), ``"near"``, ``"above"``, or ``"unknown"``: the
      noise scale is not positive and finite.

    Raises:
      ValueError: if ``batch_size`` is not positive, or ``near`` is below 1.

    Example:
      >>> from optax_ext import batch_advice
      >>> [batch_advice(1000.0, batch) for batch in (64, 1500, 8192)]
      ['below', 'near', 'above']
    """
    _validate.positive(batch_size=batch_size)
    if not near >= 1:
        raise ValueError(f"near must be at least 1, got {near}.")
    size = float(noise_scale)
    if not 0 < size < float("inf"):
        return "unknown"
    if batch_size * near < size:
        return "below"
    return "above" if batch_size > near * size else "near"
