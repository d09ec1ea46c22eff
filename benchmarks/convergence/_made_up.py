"""Rows of runs that never were, to try the report with: every field, no training."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import _long
import _rows
import _runs
import _studies
import numpy as np
from _contenders import CONTENDERS, EVERY

CORPUS = 1


def row(config: dict[str, Any]) -> _rows.Row:
    """A run whose loss is a parabola of the learning rate's exponent, with noise of its own.

    It diverges where the learning rate is 16 times too high.
    """
    key, steps = _rows.key_of(config), config["steps"]
    rng = np.random.default_rng(int(key, 16))
    position = list(EVERY).index(config["contender"])
    off = math.log10(config["hyper"]["learning_rate"]) - EVERY[config["contender"]].learning_rate
    end = 2 + 0.03 * position + 0.3 * (off - 0.1) ** 2 + 0.01 * rng.normal()
    diverged = off > 1.2
    points = [steps * i // _runs.POINTS for i in range(1, _runs.POINTS + 1)]
    curve = [
        (point, None if diverged else float(end + 3.5 * np.exp(-4 * point / steps)))
        for point in points
    ]
    early = min(steps, _runs.EARLY)
    rms = (1 + 9 * np.exp(-np.arange(early) / 5)) * config["hyper"]["learning_rate"]
    return {
        "key": key,
        "config": config,
        "loss": None if diverged else float(end),
        "diverged": diverged,
        "curve": curve,
        "train": curve,
        "early_loss": np.linspace(5.5, 4, early).tolist(),
        "early_update_rms": rms.tolist(),
        "num_params": 1000,
        "state_bytes": 1000 * (position + 1),
        "tokens": steps * config["batch"] * config["context"],
        "seconds": 1.0,
        "cpu_seconds": 1.0,
        "commit": "0000000",
        "jax": "0",
        "optax": "0",
        "python": "0",
        "corpus": CORPUS,
        "machine": "none",
        "date": "2000-01-01T00:00:00",
    }


def rows(
    size: str,
    studies: Sequence[str] = _studies.STUDIES,
    tasks: Sequence[str] = ("next_token",),
    contenders: Sequence[str] = tuple(CONTENDERS),
) -> dict[str, _rows.Row]:
    """All runs of the studies."""
    return _all(lambda found: _studies.plans(found, size, studies, tasks, contenders))


def long_rows(size: str) -> dict[str, _rows.Row]:
    """All long runs."""
    return _all(lambda found: _long.plans(found, size))


def _all(plans: Callable[[dict[str, _rows.Row]], Iterable[_studies.Plan]]) -> dict[str, _rows.Row]:
    """All that is ready, until nothing is."""
    found: dict[str, _rows.Row] = {}
    while ready := [config for plan in plans(found) for config in plan.ready]:
        found |= {_rows.key_of(config): row(config) for config in ready}
    return found
