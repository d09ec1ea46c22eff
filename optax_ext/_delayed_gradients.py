"""Gradients that reach the optimizer some steps late."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_ext._delays import check_number, whole_number
from optax_ext._leaves import Leaves, wide_zeros


class DelayedGradientsState(NamedTuple):
    """Gradients that the optimizer has not received yet, and the state of the optimizer."""

    count: jax.Array  # type: ignore[assignment]  # (), int32, steps taken; hides tuple.count
    # A tree per step of delay, oldest last: the parameter's shape; float32, or wider if it is.
    gradients: tuple[optax.Updates, ...]
    inner_state: optax.OptState


def delayed_gradients(
    inner: optax.GradientTransformation, delay: int
) -> optax.GradientTransformationExtraArgs:
    r"""Passes each gradient to ``inner`` a number of steps after it was taken.

    .. math::

      u_t = \begin{cases}
        0 & t < \tau \\ \operatorname{inner}(g_{t - \tau}, w_t) & t \ge \tau \end{cases}, \quad
      g_t = \nabla f(w_t; B_t)

    In the first :math:`\tau` steps updates are 0, and the state of ``inner`` does not change.

    All parameters have one delay. Where delays differ, each gradient depends on several versions of
    the parameters: ``params_history`` takes gradients at earlier parameters instead. On the same
    batches :math:`w_{t + \tau}` here is :math:`w_t` of ``params_history(delay)``.

    Args:
      inner: the transformation that receives the delayed gradients, current parameters, and the
        extra arguments of the current step.
      delay: :math:`\tau`, a whole number of steps, which cannot be traced.

    Returns:
      A ``GradientTransformation``; its state holds :math:`\tau` gradients in float32, or wider if
      the parameter is.

    Raises:
      ValueError: if ``delay`` is negative, fractional or traced, a parameter is not real and
        floating, or gradients do not match the state.

    Example:
      >>> import jax.numpy as jnp, optax, optax_ext
      >>> tx = optax_ext.delayed_gradients(optax.sgd(1.0), 2)
      >>> state = tx.init(jnp.zeros(()))
      >>> for g in (1.0, 2.0, 3.0, 4.0):
      ...     update, state = tx.update(jnp.asarray(g), state)
      ...     print(float(update))
      0.0
      0.0
      -1.0
      -2.0

    References:
      Langford, Smola, Zinkevich: Slow Learners are Fast, NeurIPS 2009, arXiv 0911.0491. For
      pipelines, see ``params_history``.
    """
    inner = optax.with_extra_args_support(inner)
    check_number("delay", delay)
    if np.ndim(delay):
        raise ValueError(
            f"delay must be one number, got {delay!r}; params_history has a delay per parameter."
        )
    steps = int(whole_number("delay", delay))

    def init(params: optax.Params) -> DelayedGradientsState:
        Leaves.of(params)  # raises unless all are floating
        waiting = tuple(wide_zeros(params) for _ in range(steps))
        return DelayedGradientsState(jnp.zeros([], jnp.int32), waiting, inner.init(params))

    def update(
        updates: optax.Updates,
        state: DelayedGradientsState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, DelayedGradientsState]:
        leaves = Leaves.of(updates)
        if len(state.gradients) != steps:
            raise ValueError(
                f"the state holds {len(state.gradients)} gradients, but delay is {steps}; make a "
                "new state with init."
            )
        waiting = [leaves.arrays_in("gradients", tree) for tree in state.gradients]
        with jax.named_scope("delayed_gradients"):
            queue = [leaves.arrays, *waiting]
            oldest = [old.astype(g.dtype) for g, old in zip(leaves.arrays, queue[-1], strict=True)]
            # Buffers of their own: a state that is donated must not hold one that others hold.
            shifted = [
                [x.astype(slot.dtype, copy=True) for x, slot in zip(new, old, strict=True)]
                for new, old in zip(queue[:-1], waiting, strict=True)
            ]
        out, inner_state = inner.update(
            leaves.unflatten(oldest), state.inner_state, params, **extra_args
        )
        started = state.count >= steps
        out = jax.tree.map(lambda u: jnp.where(started, u, jnp.zeros_like(u)), out)
        inner_state = jax.tree.map(
            lambda new, old: jnp.where(started, new, old), inner_state, state.inner_state
        )
        return out, DelayedGradientsState(
            optax.safe_increment(state.count), tuple(map(leaves.unflatten, shifted)), inner_state
        )

    return optax.GradientTransformationExtraArgs(init, update)
