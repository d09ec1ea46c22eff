"""1F1B*: the activations that periodic schedules store, and the best partition under memory."""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence

from sharding.plan._format import size
from sharding.plan.model._layer_costs import LayerCost, check_layers
from sharding.plan.partition._balanced_stages import least_maximum, per_stage, stage_tables


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
    sum to at most the period; a stage of group g stores the activations of g micro-batches. No
    periodic schedule with this period stores fewer on any stage.

    Args:
      loads: seconds of a forward and a backward pass, by stage.
      period: at least the largest load.
      transfers: seconds of both directions on the link after each stage; empty: none take time.

    >>> activation_groups([3, 3, 3, 3], 6), activation_groups([3, 3, 3, 3], 9)
    ((2, 2, 1, 1), (2, 1, 1, 1))

    References:
      Beaumont, Eyraud-Dubois, Shilova: Pipelined Model Parallelism: Complexity Results and Memory
      Considerations, Euro-Par 2021; MadPipe, IPDPS Workshops 2022.
    """
    transfers = _padded(loads, transfers)
    if max(*loads, *transfers, 0.0) > period:
        raise ValueError(
            f"the period {period} is shorter than the largest load, {max(*loads, *transfers, 0.0)}."
        )
    group, filled = 1, 0.0
    groups = []
    for load, transfer in zip(reversed(loads), reversed(transfers), strict=True):
        group, filled = _fill(group, filled, transfer, period)  # of the link after the stage
        group, filled = _fill(group, filled, load, period)
        groups.append(group)
    return tuple(reversed(groups))


def _padded(loads: Sequence[float], transfers: Sequence[float]) -> list[float]:
    """One transfer for each stage, 0 after the last."""
    if not loads:
        raise ValueError("loads are empty; a pipeline needs at least one stage.")
    if transfers and len(transfers) != len(loads) - 1:
        raise ValueError(f"transfers must have {len(loads) - 1} values, got {len(transfers)}.")
    return [*transfers, 0.0] if transfers else [0.0] * len(loads)


def _fill(group: int, filled: float, load: float, period: float) -> tuple[int, float]:
    """The group of the next stage or link, and how full it is then."""
    return (group, filled + load) if filled + load <= period else (group + 1, load)


def least_period(
    loads: Sequence[float],
    static: Sequence[float],
    stored: Sequence[float],
    memory: Sequence[float],
    *,
    transfers: Sequence[float] = (),
) -> float:
    """The least period of a partition whose stages fit their memory; inf where none does.

    A stage of group g holds static + g x stored bytes. Groups change only at periods that are sums
    of consecutive loads, so that these are all candidates.

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
        return all(
            fixed + group * activations <= limit for fixed, group, activations, limit in needs
        )

    # Sums are taken from the last stage to the first, as groups are filled.
    after = _padded(loads, transfers)
    chain = [float(x) for pair in zip(loads, after, strict=True) for x in pair][::-1]
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

    For a given period the state of a suffix of layers is its first group and how full this group
    is; a smaller pair, in lexicographic order, is never worse for the stages before. Periods are
    bisected; each partition that is found lowers the bound to its own least period, until no
    partition has a shorter one.

    Args:
      layers: their costs.
      num_stages: devices, in the order of the pipeline.
      memory: bytes of each device.
      speeds: of the devices, relative to that of the costs; None: all 1.
      links: bytes per second from each stage to the next; None: transfers take no time.
      param_factor: bytes of parameters, gradients, optimizer state and further versions of the
        parameters for a byte of parameters.

    Raises:
      ValueError: there are fewer layers than stages, a number is out of range, or no partition
        fits, at any period.

    >>> layers = [LayerCost(1.0, 2.0, activation_bytes=1.0)] * 8
    >>> [memory_aware_stages(layers, 4, memory=m).period for m in (8, 6, 2)]
    [6.0, 9.0, 24.0]

    References:
      As ``activation_groups``; the search over partitions without the papers' rounding of loads.
    """
    check_layers(layers, num_stages)
    limits = per_stage("memory", memory, num_stages, math.inf)
    speeds = per_stage("speeds", speeds, num_stages, 1.0)
    links = per_stage("links", links, num_stages - 1, math.inf)
    # Memory with one micro-batch in flight, and how much each further one needs.
    tables = stage_tables(layers, speeds, links, [1] * num_stages, param_factor)
    more = stage_tables(layers, speeds, links, [2] * num_stages, param_factor).memory
    compute, transfer, once = (table.tolist() for table in tables)
    twice = more.tolist()

    def found_at(period: float, strictly: bool) -> tuple[int, ...] | None:
        """Boundaries of a partition with this period, or with a shorter one."""
        period = math.nextafter(period, 0.0) if strictly else period
        count = len(layers)
        # By the first layer of a suffix: its first group, how full it is, and the next boundary.
        states: dict[int, tuple[int, float]] = {count: (1, 0.0)}
        choices: list[dict[int, int]] = []
        for s in reversed(range(num_stages)):
            best: dict[int, tuple[int, float]] = {}
            choice: dict[int, int] = {}
            for j, (group, filled) in states.items():
                if transfer[s][j] > period and s < num_stages - 1:
                    continue
                linked = _fill(group, filled, transfer[s][j], period)
                for i in range(s, j):
                    if compute[s][i][j] > period:
                        continue
                    state = _fill(*linked, compute[s][i][j], period)
                    needed = once[s][i][j] + (state[0] - 1) * (twice[s][i][j] - once[s][i][j])
                    if needed <= limits[s] and state < best.get(i, (math.inf, 0.0)):
                        best[i], choice[i] = state, j
            states = best
            choices.append(choice)
        if 0 not in states:
            return None
        boundaries = [0]
        for choice in reversed(choices):
            boundaries.append(choice[boundaries[-1]])
        return tuple(boundaries)

    def grouped(boundaries: tuple[int, ...]) -> GroupedStages:
        """A partition at its own least period."""
        ranges = list(enumerate(itertools.pairwise(boundaries)))
        loads = [compute[s][i][j] for s, (i, j) in ranges]
        between = [transfer[s][j] for s, (_, j) in ranges[:-1]]
        one = [once[s][i][j] for s, (i, j) in ranges]
        stored = [twice[s][i][j] - once[s][i][j] for s, (i, j) in ranges]
        static = [held - more for held, more in zip(one, stored, strict=True)]
        period = least_period(loads, static, stored, limits, transfers=between)
        groups = activation_groups(loads, period, transfers=between)
        held = zip(static, groups, stored, strict=True)
        return GroupedStages(boundaries, groups, tuple(x + g * a for x, g, a in held), period)

    # All layers and links in one group: the longest period that can help.
    slowest = sum(max(row[i][i + 1] for row in compute) for i in range(len(layers)))
    high = slowest + sum(map(max, transfer))
    start = found_at(high, strictly=False)
    if start is None:
        over = tables.memory - [[[limit]] for limit in limits]
        excess, _ = least_maximum(over)
        raise ValueError(
            f"no partition into {num_stages} stages fits, even with one micro-batch in flight: the "
            f"one that exceeds the memory least lacks {size(excess)} on one device."
        )
    best = grouped(start)
    low = 0.0
    while best.period - low > 1e-3 * best.period:
        middle = (low + best.period) / 2
        shorter = found_at(middle, strictly=False)
        low, best = (middle, best) if shorter is None else (low, grouped(shorter))
    while shorter := found_at(best.period, strictly=True):
        best = grouped(shorter)
    return best
