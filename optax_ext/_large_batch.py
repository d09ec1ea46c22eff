"""Learning rates for large batches: scaling rules and warm-up."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_ext import _validate


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
