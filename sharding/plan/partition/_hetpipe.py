"""HetPipe: pipelines of unequal devices, data-parallel with bounded staleness."""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from sharding.plan._format import Printed, Table, check_choice, seconds, size
from sharding.plan.model._layer_costs import LayerCost, check_layers
from sharding.plan.partition import _balanced_stages as dp

_MOST_ORDERS = 1000
POLICIES = ("node", "equal", "hybrid")


@dataclasses.dataclass(frozen=True)
class Node:
    """Equal devices that share fast links."""

    devices: int  #: their number
    memory: float  #: bytes of each
    speed: float = 1.0  #: of each, relative to the device of the costs
    link: float = math.inf  #: bytes per second between two of them


def allocate_workers(
    nodes: Sequence[Node], policy: str, num_workers: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """The nodes of the devices of each virtual worker.

    By ``"node"`` each node is one. By ``"equal"`` each node gives every one of ``num_workers``
    (None: as many as nodes) as many devices. By ``"hybrid"`` the node with the most compute is
    paired with that with the least, and so on, each pair two workers; a node that is left is one.

    Raises:
      ValueError: the policy is unknown, or devices cannot be shared equally.

    >>> nodes = [Node(2, 1.0, speed=s) for s in (1, 4, 2, 3)]
    >>> allocate_workers(nodes, "hybrid")
    ((1, 0), (1, 0), (3, 2), (3, 2))
    """
    if not nodes:
        raise ValueError("nodes are empty; virtual workers need at least one node.")
    check_choice("policy", policy, POLICIES)
    order = sorted(range(len(nodes)), key=lambda i: (-nodes[i].speed * nodes[i].devices, i))
    half = len(nodes) // 2
    groups: list[tuple[tuple[int, ...], int]]  # of nodes, and how many workers share each of them
    if policy == "node":
        groups = [((i,), 1) for i in range(len(nodes))]
    elif policy == "equal":
        groups = [(tuple(range(len(nodes))), num_workers or len(nodes))]
    else:
        groups = [((order[k], order[-1 - k]), 2) for k in range(half)]
        groups += [((i,), 1) for i in order[half : len(nodes) - half]]
    workers: list[tuple[int, ...]] = []
    for numbers, among in groups:
        for i in numbers:
            if nodes[i].devices % among:
                raise ValueError(
                    f"node {i} has {nodes[i].devices} devices, which {among} virtual workers "
                    "cannot share equally."
                )
        workers += [tuple(i for i in numbers for _ in range(nodes[i].devices // among))] * among
    return tuple(workers)


@dataclasses.dataclass(frozen=True)
class VirtualWorker:
    """One pipeline."""

    nodes: tuple[int, ...]  #: the node of each stage's device, in the order of the pipeline
    boundaries: tuple[int, ...]  #: the first layer of each stage, and the number of layers
    period: float  #: seconds of the slowest stage or link
    latency: float  #: seconds of one minibatch through the pipeline and back
    rate: float  #: minibatches per second with the plan's number in the pipeline


@dataclasses.dataclass(frozen=True)
class HetPipePlan(Printed):
    """Virtual workers that together train one model; ``str()`` makes a table of it."""

    policy: str  #: how devices were allocated: ``"node"``, ``"equal"`` or ``"hybrid"``
    workers: tuple[VirtualWorker, ...]  #: the virtual workers
    num_concurrent: int  #: minibatches in each pipeline; one wave
    throughput: float  #: minibatches per second of all workers
    local_staleness: int  #: minibatches of its own whose updates a minibatch may lack
    global_staleness: int  #: minibatches of another worker whose updates it may lack

    def tables(self) -> list[Table]:
        rows = [
            (
                *(" ".join(map(str, numbers)) for numbers in (worker.nodes, worker.boundaries)),
                *map(seconds, (worker.period, worker.latency)),
                f"{worker.rate:.3g}",
            )
            for worker in self.workers
        ]
        title = (
            f"{self.policy}: waves of {self.num_concurrent}, {self.throughput:.3g} minibatches/s, "
            f"staleness {self.local_staleness} and {self.global_staleness}"
        )
        columns = ("nodes of the stages", "boundaries", "period", "latency", "minibatches/s")
        return [Table(title, columns, rows)]


def hetpipe(
    layers: Sequence[LayerCost],
    nodes: Sequence[Node],
    *,
    network: float,
    policies: Sequence[str] = POLICIES,
    num_workers: int | None = None,
    clock_distance: int = 0,
    param_factor: float = 4.0,
    search_order: bool = True,
) -> HetPipePlan:
    """Allocates devices to virtual workers, and partitions the model for each of them, exactly.

    A virtual worker with N minibatches in its pipeline finishes min(1 / period, N / latency) of
    them per second: the period is that of its slowest stage or link, the latency the sum of all.
    Throughput is the number of workers times the rate of the slowest; N is the smallest with the
    highest, at most twice the number of stages. A stage stores the activations of N minibatches,
    the last one those of one. Staleness is s = N - 1 locally and (D + 1)(s + 1) + s - 1 globally.
    The time of pushing and pulling parameters is not counted (Park et al., HetPipe, USENIX ATC
    2020).

    Args:
      layers: costs of one minibatch.
      nodes: the nodes.
      network: bytes per second between two nodes.
      policies: allocations to try; those that cannot share the devices equally are left out.
      num_workers: of the policy ``"equal"``; None: as many as nodes.
      clock_distance: D, waves by which the fastest worker may be ahead.
      param_factor: bytes of parameters, versions, gradients and state for a byte of parameters.
      search_order: whether to try all orders of a worker's devices; else the given one.

    Raises:
      ValueError: nothing fits, no policy can share the devices, or there are too many orders.

    >>> nodes = [Node(1, 100.0, speed=2.0), Node(1, 100.0)]
    >>> plan = hetpipe([LayerCost(1.0, 2.0)] * 3, nodes, network=1e9, num_workers=1)
    >>> plan.workers[0].boundaries, plan.num_concurrent
    ((0, 2, 3), 2)
    """
    check_layers(layers)
    if clock_distance < 0:
        raise ValueError(f"clock_distance must be at least 0, got {clock_distance}.")
    fastest = functools.partial(_fastest, layers, nodes, network, param_factor)
    best, reasons = None, []
    for policy in policies:
        try:
            allocation = allocate_workers(nodes, policy, num_workers)
        except ValueError as error:
            reasons.append(f"{policy}: {error}")
            continue
        longest = max(map(len, allocation))
        if longest > len(layers):
            reasons.append(f"{policy}: {longest} devices of a worker share {len(layers)} layers.")
            continue
        candidate, reason = _best_of(allocation, 2 * longest, fastest, search_order)
        if candidate is None:
            reasons.append(f"{policy}: {reason}")
        elif best is None or candidate[0] > best[0] * (1 + 1e-12):
            best = (*candidate, policy)
    if best is None:
        raise ValueError(f"no policy has a plan. {' '.join(reasons)}")
    throughput, number, workers, policy = best
    ahead = (clock_distance + 1) * number + number - 2
    return HetPipePlan(policy, workers, number, throughput, number - 1, ahead)


# A pipeline, if there is one that fits, and the bytes that are missing.
_Found = tuple[VirtualWorker | None, float]


def _best_of(
    allocation: Sequence[tuple[int, ...]],
    most: int,
    find: Callable[..., _Found],
    search_order: bool,
) -> tuple[tuple[float, int, tuple[VirtualWorker, ...]] | None, str]:
    """Throughput, minibatches in a pipeline and workers of an allocation; or why there is none."""
    best: tuple[float, int, tuple[VirtualWorker, ...]] | None = None
    for number in range(1, most + 1):
        solved: dict[tuple[int, ...], VirtualWorker] = {}
        for devices in dict.fromkeys(allocation):
            found = [find(o, number) for o in (_orders(devices) if search_order else [devices])]
            workers = [worker for worker, _ in found if worker]
            if not workers:  # more minibatches need more memory
                lacking = size(min(excess for _, excess in found))
                return best, f"a worker on nodes {devices} lacks {lacking} on one device."
            solved[devices] = max(workers, key=lambda worker: worker.rate)
        throughput = len(allocation) * min(worker.rate for worker in solved.values())
        if best is None or throughput > best[0] * (1 + 1e-12):
            best = throughput, number, tuple(solved[devices] for devices in allocation)
    return best, ""


def _orders(devices: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All distinct orders of the nodes of devices, in lexicographic order."""
    number = math.factorial(len(devices))
    for i in set(devices):
        number //= math.factorial(devices.count(i))
    if number > _MOST_ORDERS:
        raise ValueError(
            f"{len(devices)} devices of a virtual worker have {number:,} orders, more than "
            f"{_MOST_ORDERS:,}; pass search_order=False."
        )
    orders: set[tuple[int, ...]] = {()}
    for i in devices:
        orders = {(*x[:k], i, *x[k:]) for x in orders for k in range(len(x) + 1)}
    return sorted(orders)


def _fastest(
    layers: Sequence[LayerCost],
    nodes: Sequence[Node],
    network: float,
    param_factor: float,
    order: Sequence[int],
    number: int,
) -> _Found:
    """The partition with the highest rate, or None; and the bytes that are missing at least."""
    links = [nodes[a].link if a == b else network for a, b in itertools.pairwise(order)]
    in_flight = [number] * (len(order) - 1) + [1]
    speeds = [nodes[i].speed for i in order]
    tables = dp.stage_tables(layers, speeds, links, in_flight, param_factor)
    limits = np.array([nodes[i].memory for i in order])[:, None, None]
    # Of a stage, and the link after it.
    limit = np.where(tables.memory <= limits, dp.periods(tables, overlap=True), np.inf)
    shortest, _ = dp.least_maximum(limit)
    if math.isinf(shortest):
        return None, dp.least_maximum(tables.memory - limits)[0]
    time = tables.compute + tables.transfer[:, None, :]

    def at(period: float) -> VirtualWorker:
        """The partition of least latency with this period at most."""
        _, boundaries = dp.least_sum(np.where(limit <= period, time, np.inf))
        ranges = dp.stages_of(boundaries)
        period = max(float(limit[index]) for index in ranges)
        latency = sum(float(time[index]) for index in ranges)
        rate = min(1 / period, number / latency) if period else math.inf
        return VirtualWorker(tuple(order), boundaries, period, latency, rate)

    candidates = np.unique(limit[np.isfinite(limit) & (limit >= shortest)]).tolist()
    # The first period that is at least its latency / N, which falls with it; else the longest.
    low = bisect.bisect_left(candidates[:-1], True, key=lambda x: at(x).latency / number <= x)
    around = [at(candidates[i]) for i in (max(low - 1, 0), low)]
    return max(around, key=lambda worker: (worker.rate, -worker.latency)), 0.0
