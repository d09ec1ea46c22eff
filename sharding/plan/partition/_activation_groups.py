"""1F1B*: the activations that periodic schedules store, and the best partition under memory."""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sharding.plan._format import size
from sharding.plan.model._layer_costs import LayerCost, check_layers
from sharding.plan.partition import _balanced_stages as dp


@dataclasses.dataclass(frozen=True)
class GroupedStages:
    """A partition and its least period under a limit of memory."""

    boundaries: tuple[int, ...]  #: the first layer of each stage, and the number of layers
    groups: tuple[int, ...]  #: micro-batches whose activations each stage stores
    memory: tuple[float, ...]  #: bytes, by stage
    period: float  #: seconds between micro-batches


def activation_groups(
    loads: Sequence[float], period: float, *, transfers: Sequence[float] = ()
) -> tuple[int, ...]:
    """How many micro-batches have activations on each stage, if one begins every ``period``.

    Groups of consecutive stages and links are filled from the last stage, each as long as its loads
    sum to at most the period; a stage of group g stores the activations of g micro-batches, the
    fewest of all periodic schedules (Beaumont, Eyraud-Dubois, Shilova, Euro-Par 2021).

    Args:
      loads: seconds of a forward and a backward pass, by stage.
      period: at least the largest load.
      transfers: seconds of both directions on the link after each stage; empty: none take time.

    >>> activation_groups([3, 3, 3, 3], 6), activation_groups([3, 3, 3, 3], 9)
    ((2, 2, 1, 1), (2, 1, 1, 1))
    """
    chain = _chain(loads, transfers)
    if max(chain) > period:
        raise ValueError(f"the period {period} is shorter than the largest load, {max(chain)}.")
    group, filled, groups = 1, 0.0, []
    for load in chain:
        group, filled = _fill(group, filled, load, period)
        groups.append(int(group))
    return tuple(groups[:0:-2])


def _chain(loads: Sequence[float], transfers: Sequence[float]) -> list[float]:
    """Transfers and loads in turn, from the last stage to the first: as groups are filled."""
    if not loads:
        raise ValueError("loads are empty; a pipeline needs at least one stage.")
    if transfers and len(transfers) != len(loads) - 1:
        raise ValueError(f"transfers must have {len(loads) - 1} values, got {len(transfers)}.")
    after = [*transfers, 0.0] if transfers else [0.0] * len(loads)
    return [float(x) for pair in zip(loads, after, strict=True) for x in pair][::-1]


def _fill(group: Any, filled: Any, load: Any, period: float) -> tuple[Any, Any]:
    """The groups of the next stages or links, and how full they are then."""
    fits = filled + load <= period
    return np.where(fits, group, group + 1), np.where(fits, filled + load, load)


def least_period(
    loads: Sequence[float],
    static: Sequence[float],
    stored: Sequence[float],
    memory: Sequence[float],
    *,
    transfers: Sequence[float] = (),
) -> float:
    """The least period of a partition whose stages fit their memory; inf where none does.

    A stage of group g holds static + g x stored bytes.

    Args:
      loads: as for ``activation_groups``.
      static: bytes that do not depend on the period, by stage.
      stored: bytes of activations of one micro-batch, by stage.
      memory: bytes of each device.
      transfers: as for ``activation_groups``.

    >>> least_period([3, 3, 3, 3], [0] * 4, [1] * 4, [2] * 4)
    6.0
    """

    def fits(period: float) -> bool:
        groups = activation_groups(loads, period, transfers=transfers)
        needs = zip(static, groups, stored, memory, strict=True)
        return all(fixed + group * each <= limit for fixed, group, each, limit in needs)

    # Groups change only at periods that are sums of consecutive loads.
    chain = _chain(loads, transfers)
    sums = {x for i in range(len(chain)) for x in itertools.accumulate(chain[i:])}
    candidates = sorted(x for x in sums if x >= max(chain))
    # Longer periods have no larger groups.
    first = bisect.bisect_left(candidates, True, key=fits)
    return candidates[first] if first < len(candidates) else math.inf


def memory_aware_stages(
    layers: Sequence[LayerCost],
    num_stages: int,
    *,
    memory: float | Sequence[float],
    speeds: Sequence[float] | None = None,
    links: float | Sequence[float] | None = None,
    param_factor: float = 4.0,
) -> GroupedStages:
    """The partition with the least period of 1F1B* under a limit of memory, exactly.

    The search is that of MadPipe (Beaumont et al., IPDPS Workshops 2022), without rounded loads.

    Args:
      layers: their costs.
      num_stages: devices, in the order of the pipeline.
      memory: bytes of each device.
      speeds: of the devices, relative to that of the costs; None: all 1.
      links: bytes per second from each stage to the next; None: transfers take no time.
      param_factor: bytes of parameters, versions, gradients and state for a byte of parameters.

    Raises:
      ValueError: there are fewer layers than stages, a number is out of range, or nothing fits.

    >>> layers = [LayerCost(1.0, 2.0, activation_bytes=1.0)] * 8
    >>> [memory_aware_stages(layers, 4, memory=m).period for m in (8, 6, 2)]
    [6.0, 9.0, 24.0]
    """
    check_layers(layers, num_stages)
    limits = dp.per_stage("memory", memory, num_stages, math.inf)
    speeds = dp.per_stage("speeds", speeds, num_stages, 1.0)
    links = dp.per_stage("links", links, num_stages - 1, math.inf)
    # Memory without activations, and of those of one micro-batch.
    idle = [0] * num_stages
    compute, transfer, static = dp.stage_tables(layers, speeds, links, idle, param_factor)
    stored = dp.over_ranges(np.add, [layer.activation_bytes for layer in layers])  # (L + 1, L + 1)
    none = 2 * num_stages + 1.0  # a group that no stage has

    def found_at(period: float) -> GroupedStages | None:
        """A partition with this period, or with a shorter one, at its own least period."""
        # By the first layer of a suffix: its first group, how full it is, and the next boundary. A
        # smaller pair, in lexicographic order, is never worse for the stages before.
        groups = np.full(len(layers) + 1, none)
        groups[-1], filled, choices = 1, np.zeros(len(layers) + 1), []
        for s in reversed(range(num_stages)):
            linked = _fill(groups, filled, transfer[s], period)
            found, full = _fill(*linked, compute[s], period)  # (L + 1, L + 1)
            fits = static[s] + (found * stored) <= limits[s]
            fits &= (np.maximum(compute[s], transfer[s]) <= period) & (groups < none)
            found = np.where(fits, found, none)
            choice = np.lexsort((full, found))[:, :1]
            groups, filled = (np.take_along_axis(x, choice, 1)[:, 0] for x in (found, full))
            choices.append(choice[:, 0])
        if groups[0] >= none:
            return None
        boundaries = dp.path(choices[::-1], 0)
        ranges = dp.stages_of(boundaries)
        loads = [float(compute[index]) for index in ranges]
        between = [float(transfer[s, j]) for s, _, j in ranges[:-1]]
        fixed = [float(static[index]) for index in ranges]
        each = [float(stored[i, j]) for _, i, j in ranges]
        least = least_period(loads, fixed, each, limits, transfers=between)
        numbers = activation_groups(loads, least, transfers=between)
        held = zip(fixed, numbers, each, strict=True)
        return GroupedStages(boundaries, numbers, tuple(x + g * a for x, g, a in held), least)

    # All layers and links in one group: the longest period that can help.
    slowest = np.diagonal(compute, 1, 1, 2).max(0).sum()
    best = found_at(float(slowest + transfer.max(1).sum()))
    if best is None:
        excess, _ = dp.least_maximum(static + stored - np.array(limits)[:, None, None])
        raise ValueError(
            f"no partition into {num_stages} stages fits, even with one micro-batch in flight: the "
            f"one that exceeds the memory least lacks {size(excess)} on one device."
        )
    # Each partition that is found lowers the bound to its own least period.
    low = 0.0
    while best.period - low > 1e-3 * best.period:
        middle = (low + best.period) / 2
        shorter = found_at(middle)
        low, best = (middle, best) if shorter is None else (low, shorter)
    while shorter := found_at(math.nextafter(best.period, 0.0)):
        best = shorter
    return best
