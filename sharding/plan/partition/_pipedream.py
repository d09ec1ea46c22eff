"""The planners of PipeDream: stages on as many workers as they need, and 2BW."""

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from sharding.plan._format import Printed, Table, count, seconds, size
from sharding.plan.model._layer_costs import LayerCost, check_layers
from sharding.plan.partition import _balanced_stages as dp
from sharding.plan.partition._balanced_stages import of_layers, over_ranges


@dataclasses.dataclass(frozen=True)
class ReplicatedStage:
    """Layers ``first`` to ``last`` on a number of workers that share the micro-batches."""

    first: int  #: the first layer
    last: int  #: the last layer
    replicas: int  #: components of the level that process the same layers
    inner: tuple["ReplicatedStage", ...] = ()  #: within each component, at the level below


@dataclasses.dataclass(frozen=True)
class PipeDreamPlan(Printed):
    """The stages of the highest level; ``str()`` makes a table of it."""

    stages: tuple[ReplicatedStage, ...]  #: from the first layer to the last
    period: float  #: seconds between micro-batches

    def tables(self) -> list[Table]:
        title = f"a micro-batch every {seconds(self.period)}"
        return [Table(title, ("stage", "layers", "replicas"), _stage_rows(self.stages, ""))]


def _stage_rows(stages: Sequence[ReplicatedStage], indent: str) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for number, stage in enumerate(stages):
        rows.append((f"{indent}{number}", f"{stage.first}-{stage.last}", str(stage.replicas)))
        rows += _stage_rows(stage.inner, indent + "  ")
    return rows


def pipedream_stages(
    layers: Sequence[LayerCost],
    levels: Sequence[tuple[int, float]],
    *,
    memory: float | None = None,
    param_factor: float = 4.0,
    overlap: bool = True,
) -> PipeDreamPlan:
    """Stages and their replicas for a hierarchy of equal workers, with the least period.

    At level k, m components with links of B_k bytes per second process layers i to j - 1
    (Narayanan et al., PipeDream, SOSP 2019, section 3.1):

    - T_k(i, j, m) = max(A_{k-1}(i, j, m_{k-1}), 2 (m - 1) / m x param_bytes / B_k) / m as one stage
      with m replicas, where A_0 is the compute of the layers;
    - A_k(i, j, m) = T_k(i, j, m), or the least over splits s and m' of
      max(T_k(i, s, m'), 2 output_bytes(s - 1) / B_k, A_k(s, j, m - m')).

    Args:
      layers: their costs.
      levels: components of each level and their links, from the lowest: ``[(8, 3e11), (4, 1e10)]``
        are four hosts of eight devices.
      memory: bytes of a worker; requires one level. A stage with r replicas and n workers from it
        to the end has ceil(n / r) micro-batches in flight.
      param_factor: bytes of parameters, versions, gradients and state for a byte of parameters.
      overlap: whether replicas compute while they synchronize; if not, both times are added.

    Raises:
      ValueError: a level is out of range, or nothing fits.

    >>> layers = [LayerCost(1.0, 2.0, param_bytes=1e4), LayerCost(2.0, 4.0)]
    >>> print(pipedream_stages(layers, [(3, 1e3)]))
    a micro-batch every 3 s
      stage layers replicas
      0        0-0        1
      1        1-1        2
    """
    check_layers(layers)
    if not levels:
        raise ValueError("levels are empty; give (workers, bytes per second) of at least one.")
    for number, link in levels:
        if number < 1 or not link > 0:
            raise ValueError(
                f"a level needs at least 1 component and a link above 0, got {(number, link)}."
            )
    if memory is not None and len(levels) > 1:
        raise ValueError(
            f"memory is checked for one level of workers, got {len(levels)} levels; the number of "
            "micro-batches in flight is not known of several."
        )
    count = len(layers)
    _, _, params, stored, output, working, *_ = np.array([*map(dataclasses.astuple, layers)]).T
    params, stored = over_ranges(np.add, params), over_ranges(np.add, stored)  # (L + 1, L + 1)
    static = param_factor * params + over_ranges(np.maximum, working)
    output = np.concatenate([[0.0], output])  # (L + 1,)

    inner = of_layers(over_ranges(np.add, [x.forward + x.backward for x in layers]))
    solved = []
    for k, (number, link) in enumerate(levels):
        numbers = np.arange(1, number + 1)[:, None, None]
        sync = 2 * (numbers - 1) / numbers * params / link
        level = _Level(
            (np.maximum(inner, sync) if overlap else inner + sync) / numbers,
            2 * output / link,
            static + numbers * stored <= (math.inf if memory is None else memory),
            [],
        )
        # Only the highest level needs no ranges that end before the last layer.
        inner = level.solve(slice(count, None) if k == len(levels) - 1 else slice(None))
        solved.append(level)
    period = float(inner[0, -1])
    if math.isinf(period):
        held = static + stored
        raise ValueError(
            f"no plan fits {levels[0][0]} workers of {size(memory or 0.0)}: with one micro-batch "
            f"in flight the largest layer needs {size(np.diag(held, 1).max())}, and all layers "
            f"need {size(held[0, count])} together."
        )
    return PipeDreamPlan(_stages_at(solved, len(levels) - 1, 0, count), period)


class _Level(NamedTuple):
    """The least periods A of one level."""

    stages: np.ndarray  # T by number of replicas
    transfers: np.ndarray  # seconds of activations and gradients, by the first layer that receives
    fits: np.ndarray  # which ranges, by micro-batches in flight
    best: list[np.ndarray]  # A by number of components; (L + 1, columns), ends of ranges

    def solve(self, columns: slice) -> np.ndarray:
        """Fills ``best``, and returns that of all components."""
        for m in range(1, len(self.stages) + 1):
            least = self.stage(m, m)[:, columns]
            for replicas in range(1, m):
                others = np.maximum(self.transfers[:, None], self.best[m - replicas - 1])
                split = np.maximum(self.stage(replicas, m)[:, :, None], others[None])
                least = np.minimum(least, split.min(1))
            self.best.append(least)
        return self.best[-1]

    def stage(self, replicas: int, components: int) -> np.ndarray:
        """T of a stage where this many components are left; inf where it does not fit."""
        fits = self.fits[-(-components // replicas) - 1]
        return np.where(fits, self.stages[replicas - 1], np.inf)


def _stages_at(levels: Sequence[_Level], k: int, i: int, j: int) -> tuple[ReplicatedStage, ...]:
    """The stages of layers i to j - 1 on all components of level k: first match from the left."""
    if k < 0:
        return ()
    level = levels[k]
    m, stages = len(level.stages), []
    column = -1 if level.best[0].shape[1] == 1 else j
    while i < j:
        target = level.best[m - 1][i, column]
        replicas, end = next(
            (r, s)
            for r in range(m, 0, -1)
            for s in ([j] if r == m else range(i + 1, j))
            if max(
                level.stage(r, m)[i, s],
                0.0 if s == j else max(level.transfers[s], level.best[m - r - 1][s, column]),
            )
            == target
        )
        stages.append(ReplicatedStage(i, end - 1, replicas, _stages_at(levels, k - 1, i, end)))
        i, m = end, m - replicas
    return tuple(stages)


@dataclasses.dataclass(frozen=True)
class TwoBWChoice:
    """One configuration of parallel pipelines."""

    width: int  #: replicas of the pipeline
    depth: int  #: stages of the pipeline
    microbatch: int  #: sequences in a micro-batch
    recompute: bool  #: whether stages store only their input, and compute their forward pass again
    inner: str  #: what fills a host first: ``"depth"``, stages, or ``"width"``, replicas of a stage
    boundaries: tuple[int, ...]  #: the first layer of each stage, and the number of layers
    period: float  #: seconds between the micro-batches of a pipeline
    throughput: float  #: sequences per second of all pipelines
    memory: float  #: bytes of the fullest device


@dataclasses.dataclass(frozen=True)
class TwoBWPlan(Printed):
    """All configurations that fit, the fastest first; ``str()`` makes a table of the first ten."""

    #: the best partition of each; those of equal throughput by memory, then by width
    choices: tuple[TwoBWChoice, ...]

    @property
    def best(self) -> TwoBWChoice:
        """The fastest."""
        return self.choices[0]

    def tables(self) -> list[Table]:
        rows = [
            (
                *(f"{choice.width} x {choice.depth}", choice.inner, str(choice.microbatch)),
                "yes" if choice.recompute else "no",
                *(size(choice.memory), count(choice.throughput)),
            )
            for choice in self.choices[:10]
        ]
        names = ("width x depth", "in a host", "micro-batch", "recompute", "memory")
        columns = (*names, "sequences/s")
        return [Table(f"{len(self.choices)} configurations fit", columns, rows)]


def two_bw(
    layers: Sequence[LayerCost],
    num_devices: int,
    *,
    global_batch: int,
    microbatches: Sequence[int],
    memory: float,
    link: float,
    network: float | None = None,
    devices_per_host: int | None = None,
    param_factor: float = 5.0,
    efficiency: Callable[[int], float] | None = None,
) -> TwoBWPlan:
    """Enumerates configurations of 2BW, each with its best partition, under a limit of memory.

    With w x d = n devices and micro-batches of b sequences, m = global_batch / (w b) of them in a
    batch, w b / throughput is (Narayanan et al., ICML 2021, section 4)

    max over stages of max(compute(b) + transfers(b), 2 (w - 1) / w x param_bytes / (m B_width)).

    Stage s of d stores the activations of d - s micro-batches; with ``recompute`` d - s inputs and
    the activations of one. Two versions of the parameters suffice where m >= d.

    Args:
      layers: costs of a micro-batch of one sequence.
      num_devices: n.
      global_batch: sequences between two updates.
      microbatches: sizes b to try.
      memory: bytes of a device.
      link: bytes per second within a host.
      network: bytes per second of a device to other hosts; None: as ``link``.
      devices_per_host: None: all are in one.
      param_factor: bytes of both versions, gradients and optimizer state for a byte of parameters.
      efficiency: of a micro-batch of b sequences, relative to one of the costs; None: 1.

    Raises:
      ValueError: nothing fits, or nothing divides the global batch.

    >>> layers = [LayerCost(1.0, 2.0, param_bytes=10.0)] * 4
    >>> plan = two_bw(layers, 4, global_batch=16, microbatches=[1], memory=150.0, link=1e3)
    >>> [(choice.width, choice.depth) for choice in plan.choices]
    [(1, 4), (2, 2), (1, 4), (2, 2)]
    """
    check_layers(layers)
    for name, value in (("num_devices", num_devices), ("memory", memory), ("link", link)):
        if not value > 0:
            raise ValueError(f"{name} must be above 0, got {value}.")
    for sequences in microbatches:
        if sequences < 1:
            raise ValueError(f"microbatches must be at least 1, got {sequences}.")
    host = devices_per_host or num_devices
    network = network or link
    params = dp.over_ranges(np.add, [layer.param_bytes for layer in layers])  # (L + 1, L + 1)
    choices, least, tried = [], math.inf, 0
    for width, sequences in itertools.product(range(1, num_devices + 1), microbatches):
        depth, over = divmod(num_devices, width)
        m, left = divmod(global_batch, width * sequences)
        if over or left or depth > min(m, len(layers)):
            continue
        faster = efficiency(sequences) if efficiency else 1.0
        # Seconds of both passes; bytes of parameters, activations, outputs and temporaries.
        factors = (*[sequences / faster] * 2, 1, *[sequences] * 3)
        scaled = [LayerCost(*map(operator.mul, dataclasses.astuple(x), factors)) for x in layers]
        inners = ("depth", "width") if num_devices > host and min(width, depth) > 1 else ("depth",)
        for recompute, inner in itertools.product((False, True), inners):
            # Links of the pipeline, and of the replicas.
            outer = network if num_devices > host else link
            within = link if (depth if inner == "depth" else width) <= host else network
            between, wide = (within, outer) if inner == "depth" else (outer, within)
            links = [between] * (depth - 1)
            in_order = scaled, [1.0] * depth, links, range(depth, 0, -1)
            tables = dp.stage_tables(*in_order, param_factor, recompute)
            sync = 2 * (width - 1) / width * params / wide / m
            costs = np.maximum(dp.periods(tables, overlap=False), sync)
            least, tried = min(least, dp.least_maximum(tables.memory)[0]), tried + 1
            period, bounds = dp.least_maximum(np.where(tables.memory <= memory, costs, np.inf))
            if math.isinf(period):
                continue
            held = max(float(tables.memory[index]) for index in dp.stages_of(bounds))
            rate = width * sequences / period if period else math.inf
            choices.append(
                TwoBWChoice(width, depth, sequences, recompute, inner, bounds, period, rate, held)
            )
    if not choices and tried:
        raise ValueError(
            f"none of {tried} configurations on {num_devices} devices fits {size(memory)}: the "
            f"smallest needs {size(least)}, {size(least - memory)} more."
        )
    if not choices:
        raise ValueError(
            f"no width x depth = {num_devices} devices has depth at most {len(layers)} layers and "
            f"at least as many micro-batches of {list(microbatches)} sequences of a global batch "
            f"of {global_batch}."
        )
    choices.sort(key=lambda c: (-c.throughput, c.memory, c.width, c.microbatch, c.recompute))
    return TwoBWPlan(tuple(choices))
