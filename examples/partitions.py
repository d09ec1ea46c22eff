"""Layers to the stages of a pipeline, as papers do it; nothing in the library runs this file.

Each program takes costs of layers and finds the best partition exactly; None where nothing fits:

- ``balanced``: devices in a given order (PipeDream), of unequal links (Pipe-torch);
- ``memory_aware``: the least period of 1F1B* under a limit of memory (MadPipe);
- ``pipedream``: stages with as many replicas as they need, over levels of machines;
- ``two_bw``: parallel pipelines, of any width and depth (PipeDream-2BW);
- ``hetpipe``: virtual workers of unequal devices.

``sharding.plan.search`` chooses among what this library trains. This prints four partitions:

  python examples/partitions.py
"""

import bisect
import itertools
import math
from typing import NamedTuple

import numpy as np


class Layer(NamedTuple):
    """One layer, for one micro-batch."""

    forward: float  # seconds
    backward: float
    params: float = 0.0  # bytes of its parameters
    stored: float = 0.0  # bytes that the forward pass stores for the backward pass
    output: float = 0.0  # bytes to the next layer; as many of gradients come back
    working: float = 0.0  # bytes of temporaries of the backward pass


class Node(NamedTuple):
    """Equal devices that share fast links."""

    devices: int
    memory: float  # bytes of each
    speed: float = 1.0  # of each, relative to the device of the costs
    link: float = math.inf  # bytes per second between two of them


class Partition(NamedTuple):
    """What a program finds."""

    bounds: tuple = ()  # the first layer of each stage, and the number of layers
    period: float = 0.0  # seconds between micro-batches
    memory: tuple = ()  # bytes, by stage
    stored: tuple = ()  # micro-batches whose activations each stage stores (1F1B*)
    replicas: tuple = ()  # of each stage (PipeDream)
    inner: tuple = ()  # partitions of each replica's devices (PipeDream); workers (HetPipe)
    nodes: tuple = ()  # the node of each stage's device (HetPipe)
    rate: float = 0.0  # sequences (2BW) or minibatches (HetPipe) per second of all
    choice: tuple = ()  # 2BW: width, depth, micro-batch, recompute, what fills a host first
    # HetPipe: policy, and minibatches in each pipeline


# --- Tables of all ranges of layers ---------------------------------------------------------------


class Tables(NamedTuple):
    """Costs of layers ``i`` to ``j - 1`` on stage ``s``; the number of layers is L."""

    compute: np.ndarray  # seconds of both passes; (S, L + 1, L + 1), inf where j <= i
    transfer: np.ndarray  # seconds on the link after it, both ways, by the next layer: (S, L + 1)
    memory: np.ndarray  # bytes; (S, L + 1, L + 1), inf where j <= i

    def periods(self, overlap):
        """Seconds of a stage for each micro-batch; without overlap with both of its links."""
        after = self.transfer[:, None, :]
        if overlap:
            return np.maximum(self.compute, after)
        before = np.concatenate([np.zeros((1, self.transfer.shape[1])), self.transfer[:-1]])
        return self.compute + before[:, :, None] + after


def over_ranges(combine, values):
    """Sums of values[i:j] by ``np.add``, maxima by ``np.maximum``; (L + 1, L + 1), 0 if j <= i."""
    result = np.zeros((len(values) + 1, len(values) + 1))
    for i in range(len(values)):
        result[i, i + 1 :] = combine.accumulate(values[i:])
    return result


def of_layers(costs):
    """Costs of ranges, with inf where there is no layer: j <= i."""
    return np.where(np.triu(np.ones(costs.shape, bool), 1), costs, np.inf)


def tables_of(layers, speeds, links, in_flight, factor, recompute=False):
    """Tables for S stages of these relative speeds, and S - 1 links in bytes per second.

    ``in_flight`` micro-batches have activations on each stage, which holds ``factor`` bytes for a
    byte of parameters. If ``recompute``, stages store their input, and run forward passes again.
    """
    forward, backward, params, stored, output, working = np.array(layers, float).T
    seconds = forward + backward + (forward if recompute else 0.0)
    compute = np.stack([of_layers(over_ranges(np.add, seconds) / speed) for speed in speeds])
    received = np.concatenate([[0.0], output])  # (L + 1,), by the first layer of a stage
    per_byte = np.array([1 / link for link in links] + [0.0])
    held = factor * over_ranges(np.add, params)
    working, stash = over_ranges(np.maximum, working), over_ranges(np.add, stored)
    if recompute:
        stash, working = np.broadcast_to(received[:, None], held.shape), working + stash
    memory = np.stack([of_layers(held + number * stash + working) for number in in_flight])
    return Tables(compute, 2.0 * per_byte[:, None] * received, memory)


def least(costs, combine=np.maximum, start=-np.inf):
    """The partition whose largest cost, or sum by ``np.add``, is least: that cost, and its bounds.

    best[s + 1][j] = min over i of combine(best[s][i], costs[s][i][j])
    """
    best = np.full(costs.shape[1], np.inf)
    best[0] = start
    choices = []
    for cost in costs:
        candidates = combine(best[:, None], cost)  # (L + 1, L + 1)
        choices.append(candidates.argmin(0))
        best = candidates.min(0)
    return float(best[-1]), path(choices[::-1], len(best) - 1)[::-1]


def path(choices, start):
    """The bounds from one on, each of which chooses the next."""
    bounds = [start]
    for choice in choices:
        bounds.append(int(choice[bounds[-1]]))
    return tuple(bounds)


def stages_of(bounds):
    """The indices of a partition in tables: stage, first layer, and the one after."""
    return [(s, i, j) for s, (i, j) in enumerate(itertools.pairwise(bounds))]


def at(table, bounds):
    """What a table says of each stage."""
    return tuple(float(table[index]) for index in stages_of(bounds))


# --- One device for each stage --------------------------------------------------------------------


def balanced(layers, speeds, links, limits, in_flight, *, factor=4.0, overlap=True):
    """The least period of devices in order, each with bytes of memory.

    Narayanan et al., PipeDream, SOSP 2019, section 3.1; on unequal links, and without overlap,
    Pipe-torch (Zhan and Zhang, CBD 2019).
    """
    tables = tables_of(layers, speeds, links, in_flight, factor)
    fits = tables.memory <= np.array(limits)[:, None, None]
    period, bounds = least(np.where(fits, tables.periods(overlap), np.inf))
    return None if math.isinf(period) else Partition(bounds, period, at(tables.memory, bounds))


def groups_of(loads, period):
    """How many micro-batches have activations on each stage, if one begins every ``period``.

    ``loads`` are seconds of stages and, between them, of links. Groups of consecutive ones are
    filled from the last, each as long as its loads sum to at most the period; a stage of group g
    stores the activations of g micro-batches, the fewest of all periodic schedules (Beaumont,
    Eyraud-Dubois, Shilova, Euro-Par 2021).
    """
    group, filled, groups = 1, 0.0, []
    for load in reversed(loads):
        group, filled = fill(group, filled, load, period)
        groups.append(int(group))
    return tuple(groups[::-2])


def fill(group, filled, load, period):
    """The groups of the next stages or links, and how full they are then."""
    fits = filled + load <= period
    return np.where(fits, group, group + 1), np.where(fits, filled + load, load)


def memory_aware(layers, limits, links, *, factor=4.0):
    """The least period of 1F1B* on devices with bytes of memory (MadPipe, IPDPSW 2022)."""
    num, count = len(limits), len(layers)
    idle = tables_of(layers, [1.0] * num, links, [0] * num, factor)  # without activations
    stored = over_ranges(np.add, [layer.stored for layer in layers])  # (L + 1, L + 1)
    none = 2 * num + 1.0  # a group that no stage has

    def bounds_at(period):
        """A partition with this period at most, if there is any."""
        # By the first layer of a suffix: its first group, how full it is, and the next bound. A
        # smaller pair, in lexicographic order, is never worse for the stages before.
        groups, filled, choices = np.full(count + 1, none), np.zeros(count + 1), []
        groups[-1] = 1
        for s in reversed(range(num)):
            linked = fill(groups, filled, idle.transfer[s], period)
            found, full = fill(*linked, idle.compute[s], period)  # (L + 1, L + 1)
            fits = idle.memory[s] + found * stored <= limits[s]
            fits &= np.maximum(idle.compute[s], idle.transfer[s]) <= period
            found = np.where(fits & (groups < none), found, none)
            choice = np.lexsort((full, found))[:, :1]
            groups, filled = (np.take_along_axis(x, choice, 1)[:, 0] for x in (found, full))
            choices.append(choice[:, 0])
        return path(choices[::-1], 0) if groups[0] < none else None

    # All layers and links in one group: the longest period that can help.
    slowest = np.diagonal(idle.compute, 1, 1, 2).max(0).sum()
    longest = np.float64(slowest + idle.transfer.max(1).sum())
    if bounds_at(longest) is None:
        return None

    # The least period to the last bit: floats from 0 on are in the order of their bits.
    def period_of(bits):
        return float(np.int64(bits).view(np.float64))

    shorter = range(int(longest.view(np.int64)))
    bits = bisect.bisect_left(shorter, True, key=lambda x: bool(bounds_at(period_of(x))))
    bounds, period = bounds_at(period_of(bits)), period_of(bits)
    ranges = stages_of(bounds)
    loads = [float(x) for s, i, j in ranges for x in (idle.compute[s, i, j], idle.transfer[s, j])]
    groups = groups_of(loads[:-1], period)
    held = [
        float(idle.memory[s, i, j] + group * stored[i, j])
        for (s, i, j), group in zip(ranges, groups, strict=True)
    ]
    return Partition(bounds, period, tuple(held), groups)


# --- Several devices for each stage ---------------------------------------------------------------


class Level(NamedTuple):
    """The least periods A of one level of machines."""

    stages: np.ndarray  # T by number of replicas
    transfers: np.ndarray  # seconds of activations and gradients, by the first layer that receives
    fits: np.ndarray  # which ranges, by micro-batches in flight
    best: list  # A by number of components; (L + 1, columns), ends of ranges

    def solve(self, columns):
        """Fills ``best``, and returns that of all components."""
        for m in range(1, len(self.stages) + 1):
            shortest = self.stage(m, m)[:, columns]
            for replicas in range(1, m):
                others = np.maximum(self.transfers[:, None], self.best[m - replicas - 1])
                split = np.maximum(self.stage(replicas, m)[:, :, None], others[None])
                shortest = np.minimum(shortest, split.min(1))
            self.best.append(shortest)
        return self.best[-1]

    def stage(self, replicas, components):
        """T of a stage where this many components are left; inf where it does not fit."""
        fits = self.fits[-(-components // replicas) - 1]
        return np.where(fits, self.stages[replicas - 1], np.inf)


def pipedream(layers, levels, *, memory=math.inf, factor=4.0, overlap=True):
    """Stages and their replicas for a hierarchy of equal workers, with the least period.

    ``levels`` are components and bytes per second of each level, from the lowest: ``[(8, 3e11),
    (4, 1e10)]`` are four hosts of eight devices. At level k, m components with links of B_k process
    layers i to j - 1 (Narayanan et al., SOSP 2019, section 3.1):

    - T_k(i, j, m) = max(A_{k-1}(i, j, m_{k-1}), 2 (m - 1) / m x params / B_k) / m as one stage with
      m replicas, where A_0 is the compute of the layers; a sum where they do not overlap;
    - A_k(i, j, m) = T_k(i, j, m), or the least over splits s and m' of
      max(T_k(i, s, m'), 2 output(s - 1) / B_k, A_k(s, j, m - m')).

    ``memory`` is for one level: a stage with r replicas and n workers from it to the end has
    ceil(n / r) micro-batches in flight.
    """
    _, _, params, stored, output, working = np.array(layers, float).T
    params, stored = over_ranges(np.add, params), over_ranges(np.add, stored)  # (L + 1, L + 1)
    static = factor * params + over_ranges(np.maximum, working)
    output = np.concatenate([[0.0], output])  # (L + 1,)
    inner = of_layers(over_ranges(np.add, [x.forward + x.backward for x in layers]))
    solved = []
    for k, (number, link) in enumerate(levels):
        numbers = np.arange(1, number + 1)[:, None, None]
        sync = 2 * (numbers - 1) / numbers * params / link
        each = (np.maximum(inner, sync) if overlap else inner + sync) / numbers
        level = Level(each, 2 * output / link, static + numbers * stored <= memory, [])
        # Only the highest level needs no ranges that end before the last layer.
        inner = level.solve(slice(len(layers), None) if k == len(levels) - 1 else slice(None))
        solved.append(level)
    found = stages_at(solved, len(levels) - 1, 0, len(layers))
    return None if math.isinf(found.period) else found


def stages_at(levels, k, i, j):
    """The stages of layers i to j - 1 on all components of level k: first match from the left."""
    level, m, ends, replicas = levels[k], len(levels[k].stages), [i], []
    column = -1 if level.best[0].shape[1] == 1 else j
    period = float(level.best[m - 1][i, column])
    while i < j and math.isfinite(period):
        r, s = next(
            (r, s)
            for r in range(m, 0, -1)
            for s in ([j] if r == m else range(i + 1, j))
            if max(
                level.stage(r, m)[i, s],
                0.0 if s == j else max(level.transfers[s], level.best[m - r - 1][s, column]),
            )
            == level.best[m - 1][i, column]
        )
        ends.append(s)
        replicas.append(r)
        i, m = s, m - r
    inner = [stages_at(levels, k - 1, a, b) for a, b in itertools.pairwise(ends) if k]
    return Partition(tuple(ends), period, replicas=tuple(replicas), inner=tuple(inner))


def two_bw(layers, num_devices, batch, microbatches, memory, link, network, host, **options):
    """All configurations of 2BW that fit, each with its best partition, the fastest first.

    With w x d devices and micro-batches of b sequences, m = batch / (w b) of them in a batch,
    w b / throughput is (Narayanan et al., ICML 2021, section 4)

    max over stages of max(compute(b) + transfers(b), 2 (w - 1) / w x params / (m B_width)).

    Stage s of d stores the activations of d - s micro-batches; with ``recompute`` d - s inputs and
    the activations of one. Two versions of the parameters suffice where m >= d. Costs are of one
    sequence; ``link`` and ``network`` are bytes per second within a host of ``host`` devices and
    between hosts.
    """
    params = over_ranges(np.add, [layer.params for layer in layers])  # (L + 1, L + 1)
    found = []
    for width, sequences in itertools.product(range(1, num_devices + 1), microbatches):
        depth, over = divmod(num_devices, width)
        m, left = divmod(batch, width * sequences)
        if over or left or depth > min(m, len(layers)):
            continue
        inners = ("depth", "width") if num_devices > host and min(width, depth) > 1 else ("depth",)
        for recompute, inner in itertools.product((False, True), inners):
            # Links of the pipeline, and of the replicas.
            outer = network if num_devices > host else link
            within = link if (depth if inner == "depth" else width) <= host else network
            between, wide = (within, outer) if inner == "depth" else (outer, within)
            sync = 2 * (width - 1) / width * params / wide / m
            choice = (width, depth, sequences, recompute, inner)
            one = pipeline_of(layers, choice, between, sync, memory, **options)
            found += [one] if one else []
    return sorted(found, key=lambda x: (-x.rate, max(x.memory), x.choice))


def pipeline_of(layers, choice, link, sync, memory, *, factor=5.0, efficiency=lambda b: 1.0):
    """The best partition of one configuration; ``efficiency`` is that of b sequences beside one."""
    width, depth, sequences, recompute, _ = choice
    # Seconds of both passes; bytes of parameters, activations, outputs and temporaries.
    factors = (*[sequences / efficiency(sequences)] * 2, 1, *[sequences] * 3)
    scaled = np.array(layers, float) * factors
    in_order = [1.0] * depth, [link] * (depth - 1), range(depth, 0, -1)
    tables = tables_of(scaled, *in_order, factor, recompute)
    costs = np.maximum(tables.periods(overlap=False), sync)
    period, bounds = least(np.where(tables.memory <= memory, costs, np.inf))
    if math.isinf(period):
        return None
    rate = width * sequences / period if period else math.inf
    return Partition(bounds, period, at(tables.memory, bounds), rate=rate, choice=choice)


# --- Unequal devices ------------------------------------------------------------------------------


def allocate(nodes, policy):
    """The nodes of the devices of each virtual worker; None where they cannot be shared equally.

    By ``"node"`` each node is one. By ``"equal"`` each node gives every one of as many workers as
    many devices. By ``"hybrid"`` the node with the most compute is paired with that with the least,
    and so on, each pair two workers; a node that is left is one.
    """
    order = sorted(range(len(nodes)), key=lambda i: (-nodes[i].speed * nodes[i].devices, i))
    half = len(nodes) // 2
    groups = {  # of nodes, and how many workers share each of them
        "node": [((i,), 1) for i in range(len(nodes))],
        "equal": [(tuple(range(len(nodes))), len(nodes))],
        "hybrid": [((order[k], order[-1 - k]), 2) for k in range(half)]
        + [((i,), 1) for i in order[half : len(nodes) - half]],
    }[policy]
    workers = []
    for numbers, among in groups:
        if any(nodes[i].devices % among for i in numbers):
            return None
        workers += [tuple(i for i in numbers for _ in range(nodes[i].devices // among))] * among
    return tuple(workers)


def hetpipe(layers, nodes, network, *, policies=("node", "equal", "hybrid"), factor=4.0):
    """Allocates devices to virtual workers, and partitions the model for each of them, exactly.

    A virtual worker with N minibatches in its pipeline finishes min(1 / period, N / latency) of
    them per second: the period is that of its slowest stage or link, the latency the sum of all.
    Throughput is the number of workers times the rate of the slowest; N is the smallest with the
    highest, at most twice the number of stages. A stage stores the activations of N minibatches,
    the last one those of one. All orders of a worker's devices are tried (Park et al., ATC 2020).
    """
    best = Partition()
    for policy in policies:
        allocation = allocate(nodes, policy)
        if not allocation or max(map(len, allocation)) > len(layers):
            continue
        for number in range(1, 2 * max(map(len, allocation)) + 1):
            solved = {}
            for devices in set(allocation):
                orders = set(itertools.permutations(devices))
                ways = [fastest(layers, nodes, network, factor, o, number) for o in sorted(orders)]
                solved[devices] = max(filter(None, ways), key=lambda x: x.rate, default=None)
            if None in solved.values():
                break  # more minibatches need more memory
            rate = len(allocation) * min(worker.rate for worker in solved.values())
            if rate > best.rate * (1 + 1e-12):
                workers = tuple(solved[devices] for devices in allocation)
                best = Partition(inner=workers, rate=rate, choice=(policy, number))
    return best if best.rate else None


def staleness(number, clock_distance=0):
    """Minibatches whose updates one may lack: of its own worker s = N - 1, and of another one.

    (D + 1) (s + 1) + s - 1 of another, where the fastest may be D waves ahead.
    """
    return number - 1, (clock_distance + 1) * number + number - 2


def fastest(layers, nodes, network, factor, order, number):
    """The partition with the highest rate on devices of these nodes in order, or None."""
    links = [nodes[a].link if a == b else network for a, b in itertools.pairwise(order)]
    in_flight = [number] * (len(order) - 1) + [1]
    tables = tables_of(layers, [nodes[i].speed for i in order], links, in_flight, factor)
    fits = tables.memory <= np.array([nodes[i].memory for i in order])[:, None, None]
    limit = np.where(fits, tables.periods(overlap=True), np.inf)  # a stage, and the link after it
    shortest, _ = least(limit)
    if math.isinf(shortest):
        return None
    time = tables.compute + tables.transfer[:, None, :]

    def partition(period):
        """That of least latency with this period at most, and its latency."""
        _, bounds = least(np.where(limit <= period, time, np.inf), np.add, 0.0)
        period, latency = max(at(limit, bounds)), sum(at(time, bounds))
        rate = min(1 / period, number / latency) if period else math.inf
        return Partition(bounds, period, at(tables.memory, bounds), nodes=order, rate=rate), latency

    candidates = np.unique(limit[np.isfinite(limit) & (limit >= shortest)]).tolist()
    # The first period that is at least its latency / N, which falls with it; else the longest.
    low = bisect.bisect_left(candidates[:-1], True, key=lambda x: partition(x)[1] / number <= x)
    around = [partition(candidates[i]) for i in (max(low - 1, 0), low)]
    return max(around, key=lambda found: (found[0].rate, -found[1]))[0]


def main():
    """24 layers and a head of a third of their time, in milliseconds and MiB, on 4 devices."""
    head = Layer(8.0, 16.0, 77.0, 4.0, 0.0, 98.0)
    layers = [Layer(1.0, 2.0, 14.0, 34.0, 4.0, 20.0)] * 24 + [head]
    links, limits = [2.0] * 3, [1500.0] * 4
    found = {
        "balanced, of 1F1B": balanced(layers, [1.0] * 4, links, limits, [4, 3, 2, 1]),
        "memory-aware, of 1F1B*": memory_aware(layers, limits, links),
        "PipeDream": pipedream(layers, [(4, 2.0)], memory=2500.0),
        "2BW": two_bw(layers, 4, 32, [1, 2], 2500.0, 2.0, 2.0, 8)[0],
    }
    for name, one in found.items():
        print(f"{name}: layers {one.bounds}, one every {one.period:.1f} ms {one.replicas or ''}")


if __name__ == "__main__":
    main()
