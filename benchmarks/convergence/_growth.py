"""How much larger CAME's updates are as published than debiased."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from _contenders import schedule


def growth(config: Mapping[str, Any]) -> float:
    """How many times larger CAME's updates are as published than debiased, over a run.

    The mean of 1 / sqrt(1 - b3**t), weighted by the learning rate.
    """
    steps = np.arange(config["steps"])
    rate = np.asarray(schedule(1.0, config["warmup"], config["steps"])(steps))
    factor = (1 - config["hyper"]["b3"] ** (steps + 1.0)) ** -0.5
    return float((factor * rate).sum() / rate.sum())
