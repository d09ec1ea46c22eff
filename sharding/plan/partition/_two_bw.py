"""The planner of PipeDream-2BW: width, depth, micro-batch and recomputation by enumeration."""

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Sequence

import numpy as np

from sharding.plan._format import Printed, Table, count, size
from sharding.plan.model._layer_costs import LayerCost, check_layers
from sharding.plan.partition import _balanced_stages as dp


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
