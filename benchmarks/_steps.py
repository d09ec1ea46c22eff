"""An optimizer's step as benchmarks compile it, and steps that take turns to be timed."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optax


def step_of(tx: optax.GradientTransformation) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """From parameters, state and gradients to new parameters and state."""

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def take_turns(
    steps: Mapping[str, Callable[[], None]], rounds: int, warm_up: int = 2
) -> dict[str, np.ndarray]:
    """The seconds of each step in each round; those of the first rounds are not counted.

    Each round has an order of its own: what ran before leaves its marks in caches and allocator.
    """
    rng = np.random.default_rng(0)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds + warm_up):
        for name in rng.permutation(list(steps)):
            start = time.perf_counter()
            steps[name]()
            if i >= warm_up:
                times[name].append(time.perf_counter() - start)
    return {name: np.array(found) for name, found in times.items()}


def quartiles(ratios: np.ndarray) -> str:
    """The median, and between which values the middle half lies."""
    low, middle, high = np.percentile(ratios, (25, 50, 75))
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"
