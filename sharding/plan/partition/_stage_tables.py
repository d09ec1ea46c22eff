"""Costs of all ranges of layers on all stages, and the two dynamic programs that read them."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sharding.plan.model._layer_costs import LayerCost


class StageTables(NamedTuple):
    """Costs of layers ``i`` to ``j - 1`` on stage ``s``; the number of layers is L."""

    # seconds of a forward and a backward pass; (S, L + 1, L + 1), inf where j <= i
    compute: np.ndarray
    # seconds that the link after stage s needs for both directions where the next stage
    # begins with layer j; (S, L + 1), 0 on the last stage
    transfer: np.ndarray
    memory: np.ndarray  # bytes; (S, L + 1, L + 1), inf where j <= i


def stage_tables(
    layers: Sequence[LayerCost],
    speeds: Sequence[float],
    links: Sequence[float],
    in_flight: Sequence[int],
    param_factor: float,
    recompute: bool = False,
) -> StageTables:
    """Tables for S stages of these speeds, relative to the device of the costs.

    ``links`` are the S - 1 between them, in bytes per second; ``in_flight`` the micro-batches that
    have activations on each stage; a byte of parameters takes ``param_factor`` bytes. If
    ``recompute``, stages store the input of their first layer, and compute their forward pass
    again.
    """
    forward, backward, params, stored, output, _ = _columns(layers)
    seconds = forward + backward + (forward if recompute else 0.0)  # (L,)
    compute = np.stack([of_layers(range_sums(seconds) / speed) for speed in speeds])
    received = np.concatenate([[0.0], output])  # (L + 1,), by the first layer of a stage
    per_byte = np.array([1 / link for link in links] + [0.0])
    transfer = 2.0 * per_byte[:, None] * received  # (S, L + 1)

    held = param_factor * range_sums(params)
    working = range_maxima([layer.working_bytes for layer in layers])
    stash = range_sums(stored)
    if recompute:
        stash, working = np.broadcast_to(received[:, None], held.shape), working + stash
    memory = np.stack([of_layers(held + number * stash + working) for number in in_flight])
    return StageTables(compute, transfer, memory)


def _columns(layers: Sequence[LayerCost]) -> np.ndarray:
    """The fields of the layers as rows; (6, L)."""
    return np.array(
        [
            [
                layer.forward,
                layer.backward,
                layer.param_bytes,
                layer.activation_bytes,
                layer.output_bytes,
                layer.working_bytes,
            ]
            for layer in layers
        ],
        float,
    ).T


def range_sums(values: np.ndarray) -> np.ndarray:
    """Sums of values[i:j]; (L + 1, L + 1), 0 where j <= i."""
    size = len(values) + 1
    sums = np.zeros((size, size))
    for i in range(size - 1):
        sums[i, i + 1 :] = np.cumsum(values[i:])
    return sums


def of_layers(costs: np.ndarray) -> np.ndarray:
    """Costs of ranges, with inf where there is no layer: j <= i."""
    return np.where(np.triu(np.ones(costs.shape, bool), 1), costs, np.inf)


def range_maxima(values: Sequence[float]) -> np.ndarray:
    """Maxima of values[i:j]; (L + 1, L + 1), 0 where j <= i."""
    size = len(values) + 1
    maxima = np.zeros((size, size))
    for i in range(size - 1):
        maxima[i, i + 1 :] = np.maximum.accumulate(values[i:])
    return maxima


def least_maximum(costs: np.ndarray) -> tuple[float, tuple[int, ...]]:
    """The partition whose largest cost is least: that cost, and S + 1 boundaries from 0 to L.

    best[s + 1][j] = min over i of max(best[s][i], costs[s][i][j]), where costs are those of layers
    i to j - 1 on stage s, (S, L + 1, L + 1), inf where that is impossible. The cost is inf where no
    partition is possible.
    """
    first = np.full(costs.shape[1], np.inf)
    first[0] = -np.inf
    best, choices = first, []
    for cost in costs:
        candidates = np.maximum(best[:, None], cost)  # (L + 1, L + 1)
        choices.append(candidates.argmin(0))
        best = candidates.min(0)
    return float(best[-1]), _boundaries(choices)


def least_sum(costs: np.ndarray) -> tuple[float, tuple[int, ...]]:
    """As ``least_maximum``, of the partition whose sum of costs is least."""
    best = np.full(costs.shape[1], np.inf)
    best[0] = 0.0
    choices = []
    for cost in costs:
        candidates = best[:, None] + cost
        choices.append(candidates.argmin(0))
        best = candidates.min(0)
    return float(best[-1]), _boundaries(choices)


def _boundaries(choices: list[np.ndarray]) -> tuple[int, ...]:
    """Follows the choices back from the last layer."""
    found = [len(choices[-1]) - 1]
    for choice in reversed(choices):
        found.append(int(choice[found[-1]]))
    return tuple(reversed(found))


def per_stage(
    name: str, value: float | Sequence[float] | None, number: int, default: float
) -> tuple[float, ...]:
    """One number above 0 for each stage or link, of a number for all, a sequence or None."""
    if value is None:
        value = default
    if isinstance(value, int | float):
        value = [value] * number
    found = tuple(float(each) for each in value)
    if len(found) != number:
        raise ValueError(f"{name} must have {number} values, got {len(found)}.")
    for each in found:
        if not each > 0 or math.isnan(each):
            raise ValueError(f"{name} must be above 0, got {each}.")
    return found
