"""Consecutive layers for devices in a given order: the fastest slowest stage, and 1F1B*."""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sharding.plan._format import Printed, Table, layer_range, seconds, size
from sharding.plan.cost._pipeline_schedules import max_in_flight
from sharding.plan.model._layer_costs import LayerCost, check_layers


class StageTables(NamedTuple):
    """Costs of layers ``i`` to ``j - 1`` on stage ``s``; the number of layers is L."""

    compute: np.ndarray  # seconds of both passes; (S, L + 1, L + 1), inf where j <= i
    # seconds of both directions on the link after it, if the next stage begins with layer j
    transfer: np.ndarray  # (S, L + 1), 0 on the last stage
    memory: np.ndarray  # bytes; (S, L + 1, L + 1), inf where j <= i


def stage_tables(
    layers: Sequence[LayerCost],
    speeds: Sequence[float],
    links: Sequence[float],
    in_flight: Sequence[int],
    param_factor: float,
    recompute: bool = False,
) -> StageTables:
    """Tables for S stages of these relative speeds, and S - 1 links in bytes per second.

    ``in_flight`` micro-batches have activations on each stage. If ``recompute``, stages store the
    input of their first layer, and compute their forward pass again.
    """
    fields = np.array([dataclasses.astuple(layer) for layer in layers], float).T  # (8, L)
    forward, backward, params, stored, output, working, *_ = fields
    seconds = forward + backward + (forward if recompute else 0.0)  # (L,)
    compute = np.stack([of_layers(over_ranges(np.add, seconds) / speed) for speed in speeds])
    received = np.concatenate([[0.0], output])  # (L + 1,), by the first layer of a stage
    per_byte = np.array([1 / link for link in links] + [0.0])
    transfer = 2.0 * per_byte[:, None] * received  # (S, L + 1)

    held = param_factor * over_ranges(np.add, params)
    working, stash = over_ranges(np.maximum, working), over_ranges(np.add, stored)
    if recompute:
        stash, working = np.broadcast_to(received[:, None], held.shape), working + stash
    memory = np.stack([of_layers(held + number * stash + working) for number in in_flight])
    return StageTables(compute, transfer, memory)


def of_layers(costs: np.ndarray) -> np.ndarray:
    """Costs of ranges, with inf where there is no layer: j <= i."""
    return np.where(np.triu(np.ones(costs.shape, bool), 1), costs, np.inf)


def over_ranges(combine: np.ufunc, values: Any) -> np.ndarray:
    """Sums of values[i:j] by ``np.add``, maxima by ``np.maximum``; (L + 1, L + 1), 0 if j <= i."""
    size = len(values) + 1
    result = np.zeros((size, size))
    for i in range(size - 1):
        result[i, i + 1 :] = combine.accumulate(values[i:])
    return result


def least_maximum(
    costs: np.ndarray, combine: np.ufunc = np.maximum, start: float = -np.inf
) -> tuple[float, tuple[int, ...]]:
    """The partition whose largest cost is least: that cost, and S + 1 boundaries from 0 to L.

    ``costs`` are those of layers i to j - 1 on stage s, (S, L + 1, L + 1), inf where impossible.
    """
    # best[s + 1][j] = min over i of combine(best[s][i], costs[s][i][j])
    best = np.full(costs.shape[1], np.inf)
    best[0] = start
    choices = []
    for cost in costs:
        candidates = combine(best[:, None], cost)  # (L + 1, L + 1)
        choices.append(candidates.argmin(0))
        best = candidates.min(0)
    return float(best[-1]), path(choices[::-1], len(best) - 1)[::-1]


def least_sum(costs: np.ndarray) -> tuple[float, tuple[int, ...]]:
    """The partition whose sum of costs is least, as ``least_maximum`` returns it."""
    return least_maximum(costs, np.add, 0.0)


def path(choices: Sequence[np.ndarray], start: int) -> tuple[int, ...]:
    """The boundaries from one on, each of which chooses the next."""
    bounds = [start]
    for choice in choices:
        bounds.append(int(choice[bounds[-1]]))
    return tuple(bounds)


def stages_of(boundaries: Sequence[int]) -> list[tuple[int, int, int]]:
    """The indices of a partition in ``StageTables``: stage, first layer, and the one after."""
    return [(s, i, j) for s, (i, j) in enumerate(itertools.pairwise(boundaries))]


def per_stage(
    name: str, value: float | Sequence[float] | None, number: int, default: float
) -> tuple[float, ...]:
    """One number above 0 for each stage or link, of a number for all, a sequence or None."""
    if value is None:
        value = default
    numbers = [value] * number if isinstance(value, int | float) else value
    numbers = tuple(float(x) for x in numbers)
    if len(numbers) != number:
        raise ValueError(f"{name} must have {number} values, got {len(numbers)}.")
    for x in numbers:
        if not x > 0:
            raise ValueError(f"{name} must be above 0, got {x}.")
    return numbers


@dataclasses.dataclass(frozen=True)
class StagePartition(Printed):
    """Layers by stage; ``str()`` makes a table of it, ``to_dict()`` JSON."""

    boundaries: tuple[int, ...]  #: the first layer of each stage, and the number of layers
    compute: tuple[float, ...]  #: seconds of both passes of a micro-batch, by stage
    transfers: tuple[float, ...]  #: seconds of a micro-batch on the link after each but the last
    memory: tuple[float, ...]  #: bytes, by stage
    period: float  #: seconds between micro-batches: of the slowest stage, or link

    def layers(self, stage: int) -> range:
        """The layers of a stage."""
        return range(self.boundaries[stage], self.boundaries[stage + 1])

    def tables(self) -> list[Table]:
        sent = [*map(seconds, self.transfers), ""]
        rows = [
            (str(s), layer_range(self.layers(s)), seconds(time), sent[s], size(self.memory[s]))
            for s, time in enumerate(self.compute)
        ]
        title = f"{len(self.compute)} stages, a micro-batch every {seconds(self.period)}"
        return [Table(title, ("stage", "layers", "compute", "transfer", "memory"), rows)]


def balanced_stages(
    layers: Sequence[LayerCost],
    num_stages: int,
    *,
    speeds: Sequence[float] | None = None,
    links: float | Sequence[float] | None = None,
    memory: float | Sequence[float] | None = None,
    schedule: str = "1f1b",
    microbatches: int | None = None,
    param_factor: float = 4.0,
    overlap: bool = True,
) -> StagePartition:
    """The partition into stages of consecutive layers with the least period, exactly.

    best[s + 1][j] = min over i of max(best[s][i], period(s, i, j)), over ranges of layers that fit
    the memory of stage s (Narayanan et al., PipeDream, SOSP 2019, section 3.1); of equal ones that
    with the least sum of squares of the stages' periods. Per micro-batch a link moves the output of
    a layer, and its gradient back.

    Args:
      layers: their costs.
      num_stages: devices, in the order of the pipeline.
      speeds: of the devices, relative to that of the costs; None: all 1.
      links: bytes per second from each stage to the next; None: transfers take no time.
      memory: bytes of each device; None: unlimited.
      schedule: ``"gpipe"``, ``"1f1b"`` or ``"aligned"``, for the micro-batches in flight.
      microbatches: in a step; None: as many as fill the pipeline.
      param_factor: bytes of parameters, gradients and optimizer state for a byte of parameters.
      overlap: whether devices compute while they send and receive; if not, the period of a stage is
        its compute and both of its links together.

    Raises:
      ValueError: there are fewer layers than stages, a number is out of range, or nothing fits.

    >>> layers = [LayerCost(1.0, 2.0)] * 6
    >>> balanced_stages(layers, 2, speeds=[1, 2]).boundaries
    (0, 2, 6)
    """
    check_layers(layers, num_stages)
    if schedule == "interleaved":
        raise ValueError(
            "balanced_stages takes one chunk on a device; for 'interleaved' request num_stages "
            "times chunks without a limit of memory."
        )
    if schedule not in ("gpipe", "1f1b", "aligned"):
        raise ValueError(f"schedule must be 'gpipe', '1f1b' or 'aligned', got {schedule!r}.")
    if microbatches is None:
        microbatches = num_stages if schedule == "gpipe" else 2 * num_stages
    compute, transfer, held = tables = stage_tables(
        layers,
        per_stage("speeds", speeds, num_stages, 1.0),
        per_stage("links", links, num_stages - 1, math.inf),
        [max_in_flight(schedule, num_stages, s, microbatches) for s in range(num_stages)],
        param_factor,
    )
    limits = np.array(per_stage("memory", memory, num_stages, math.inf))  # (S,)
    costs = np.where(held <= limits[:, None, None], periods(tables, overlap=overlap), np.inf)
    period, boundaries = least_maximum(costs)
    if math.isinf(period):
        over = np.where(np.isfinite(held), held, 0) - limits[:, None, None]
        excess, boundaries = least_maximum(np.where(np.isfinite(held), over, np.inf))
        needed = [held[index] for index in stages_of(boundaries)]
        worst = int(np.argmax(needed - limits))
        raise ValueError(
            f"no partition into {num_stages} stages fits: the one that exceeds the memory least "
            f"needs {size(needed[worst])} on stage {worst} and has {size(limits[worst])}, "
            f"{size(excess)} too little."
        )
    _, boundaries = least_sum(np.where(costs <= period, costs**2, np.inf))
    ranges = stages_of(boundaries)
    return StagePartition(
        boundaries=boundaries,
        compute=tuple(float(compute[index]) for index in ranges),
        transfers=tuple(float(transfer[s, j]) for s, _, j in ranges[:-1]),
        memory=tuple(float(held[index]) for index in ranges),
        period=period,
    )


def periods(tables: StageTables, *, overlap: bool) -> np.ndarray:
    """Seconds that each micro-batch takes on stage s with layers i to j - 1; (S, L + 1, L + 1)."""
    after = tables.transfer[:, None, :]
    if overlap:
        return np.maximum(tables.compute, after)
    before = np.concatenate([np.zeros((1, tables.transfer.shape[1])), tables.transfer[:-1]])
    return tables.compute + before[:, :, None] + after


@dataclasses.dataclass(frozen=True)
class GroupedStages:
    """A partition and its least period under a limit of memory."""

    boundaries: tuple[int, ...]  #: the first layer of each stage, and the number of layers
    groups: tuple[int, ...]  #: micro-batches whose activations each stage stores
    memory: tuple[float, ...]  #: bytes, by stage
    period: float  #: seconds between micro-batches


def _activation_groups(loads: Sequence[float], period: float) -> tuple[int, ...]:
    """How many micro-batches have activations on each stage, if one begins every ``period``.

    ``loads`` are seconds of stages and, between them, of links. Groups of consecutive ones are
    filled from the last, each as long as its loads sum to at most the period; a stage of group g
    stores the activations of g micro-batches, the fewest of all periodic schedules (Beaumont,
    Eyraud-Dubois, Shilova, Euro-Par 2021).

    >>> _activation_groups([3, 0, 3, 0, 3, 0, 3], 6), _activation_groups([3, 0, 3, 0, 3, 0, 3], 9)
    ((2, 2, 1, 1), (2, 1, 1, 1))
    """
    group, filled, groups = 1, 0.0, []
    for load in reversed(loads):
        group, filled = _fill(group, filled, load, period)
        groups.append(int(group))
    return tuple(groups[::-2])


def _fill(group: Any, filled: Any, load: Any, period: float) -> tuple[Any, Any]:
    """The groups of the next stages or links, and how full they are then."""
    fits = filled + load <= period
    return np.where(fits, group, group + 1), np.where(fits, filled + load, load)


def memory_aware_stages(
    layers: Sequence[LayerCost],
    num_stages: int,
    *,
    memory: float | Sequence[float],
    links: float | Sequence[float] | None = None,
    param_factor: float = 4.0,
) -> GroupedStages:
    """The partition with the least period of 1F1B* under a limit of memory, exactly.

    The search is that of MadPipe (Beaumont et al., IPDPS Workshops 2022), without rounded loads.
    Arguments and errors are those of ``balanced_stages``; ``param_factor`` counts versions, too.

    >>> layers = [LayerCost(1.0, 2.0, activation_bytes=1.0)] * 8
    >>> [memory_aware_stages(layers, 4, memory=m).period for m in (8, 6, 2)]
    [6.0, 9.0, 24.0]
    """
    check_layers(layers, num_stages)
    limits = per_stage("memory", memory, num_stages, math.inf)
    links = per_stage("links", links, num_stages - 1, math.inf)
    # Memory without activations, and of those of one micro-batch.
    idle = [0] * num_stages
    compute, transfer, static = stage_tables(layers, [1.0] * num_stages, links, idle, param_factor)
    stored = over_ranges(np.add, [layer.activation_bytes for layer in layers])  # (L + 1, L + 1)
    none = 2 * num_stages + 1.0  # a group that no stage has

    def boundaries_at(period: float) -> tuple[int, ...] | None:
        """A partition with this period, or with a shorter one, if there is any."""
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
        return path(choices[::-1], 0) if groups[0] < none else None

    # All layers and links in one group: the longest period that can help.
    slowest = np.diagonal(compute, 1, 1, 2).max(0).sum()
    longest = np.float64(slowest + transfer.max(1).sum())
    if boundaries_at(longest) is None:
        excess, _ = least_maximum(static + stored - np.array(limits)[:, None, None])
        raise ValueError(
            f"no partition into {num_stages} stages fits, even with one micro-batch in flight: the "
            f"one that exceeds the memory least lacks {size(excess)} on one device."
        )

    # The least period to the last bit: floats from 0 on are in the order of their bits.
    def period_of(bits: int) -> float:
        return float(np.int64(bits).view(np.float64))

    shorter = range(int(longest.view(np.int64)))
    bits = bisect.bisect_left(shorter, True, key=lambda x: bool(boundaries_at(period_of(x))))
    boundaries = boundaries_at(period_of(bits))
    assert boundaries is not None
    ranges = stages_of(boundaries)
    loads = [float(x) for s, i, j in ranges for x in (compute[s, i, j], transfer[s, j])][:-1]
    groups = _activation_groups(loads, period_of(bits))
    pairs = zip(ranges, groups, strict=True)
    held = (float(static[index] + group * stored[index[1:]]) for index, group in pairs)
    return GroupedStages(boundaries, groups, tuple(held), period_of(bits))
