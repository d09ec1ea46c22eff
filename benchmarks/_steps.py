"""An optimizer's step, as the benchmarks of its time, bytes and start-up compile it."""

from collections.abc import Callable
from typing import Any

import optax


def step_of(tx: optax.GradientTransformation) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """From parameters, state and gradients to new parameters and state."""

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step
