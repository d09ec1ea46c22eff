"""Planners of pipeline stages equal brute force on small cases."""

import itertools
import math
import runpy
import types

import numpy as np
import pytest

from ..multiprocess.processes import ROOT

of = types.SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "partitions.py")))


def random_layers(rng, count, heavier=1):
    """Costs in whole numbers, so that sums are exact in any order; parameters may be heavier."""
    factors = np.array([1, 1, heavier, 1, 1, 1])
    return [of.Layer(*map(float, factors * rng.integers(0, 9, 6))) for _ in range(count)]


def partitions(count, num_stages):
    """Boundaries of all partitions of layers into consecutive stages."""
    for inner in itertools.combinations(range(1, count), num_stages - 1):
        yield (0, *inner, count)


def ranges_of(boundaries):
    return list(itertools.pairwise(boundaries))


def compute_of(layers):
    return sum(layer.forward + layer.backward for layer in layers)


def memory_of(layers, in_flight, factor):
    return (
        factor * sum(layer.params for layer in layers)
        + in_flight * sum(layer.stored for layer in layers)
        + max(layer.working for layer in layers)
    )


def brute_balanced(layers, speeds, links, limits, in_flight, factor, overlap):
    """The least period of all partitions; inf where none fits."""
    best = math.inf
    for boundaries in partitions(len(layers), len(speeds)):
        stages = [layers[i:j] for i, j in ranges_of(boundaries)]
        held = [memory_of(x, n, factor) for x, n in zip(stages, in_flight, strict=True)]
        if any(x > limit for x, limit in zip(held, limits, strict=True)):
            continue
        compute = [compute_of(x) / speed for x, speed in zip(stages, speeds, strict=True)]
        between = [2 * x[-1].output / b for x, b in zip(stages[:-1], links, strict=True)]
        if overlap:
            period = max(*compute, *between)
        else:
            around = zip([0.0, *between], compute, [*between, 0.0], strict=True)
            period = max(before + own + after for before, own, after in around)
        best = min(best, period)
    return best


@pytest.mark.parametrize("overlap", [True, False])
def test_balanced_equals_brute_force(overlap):
    rng = np.random.default_rng(0)
    fitted = 0
    for _ in range(300):
        count = int(rng.integers(2, 9))
        stages = int(rng.integers(2, min(count, 4) + 1))
        layers = random_layers(rng, count)
        speeds = (2.0 ** rng.integers(-1, 3, stages)).tolist()
        links = (2.0 ** rng.integers(-2, 3, stages - 1)).tolist()
        limits = rng.integers(20, 200, stages).astype(float).tolist()
        in_flight = sorted(rng.integers(1, 8, stages).tolist(), reverse=True)
        given = (layers, speeds, links, limits, in_flight)
        expected = brute_balanced(*given, 2.0, overlap)
        found = of.balanced(*given, factor=2.0, overlap=overlap)
        assert (found is None) == math.isinf(expected)
        if found is None:
            continue
        fitted += 1
        assert found.period == expected
        # The bounds have this period, too, and the memory that is reported.
        pieces = [layers[i:j] for i, j in ranges_of(found.bounds)]
        assert found.memory == tuple(
            memory_of(x, n, 2.0) for x, n in zip(pieces, in_flight, strict=True)
        )
        *between, _ = [2 * x[-1].output for x in pieces]
        between = [x / link for x, link in zip(between, links, strict=True)]
        compute = [compute_of(x) / speed for x, speed in zip(pieces, speeds, strict=True)]
        around = zip([0.0, *between], compute, [*between, 0.0], strict=True)
        apart = max(map(sum, around))
        assert found.period == (max(*compute, *between) if overlap else apart)
    assert 80 < fitted < 300


def groups_by_hand(loads, transfers, period):
    """The groups of stages, from the last; stages and links are in order."""
    chain = [x for pair in zip(loads, [*transfers, 0.0], strict=True) for x in pair][:-1]
    numbers, load = [1], 0.0
    for each in reversed(chain):
        fits = load + each <= period
        load = load + each if fits else each
        numbers.append(numbers[-1] + (not fits))
    return numbers[:0:-1][::2]


def test_memory_aware_equals_brute_force():
    rng = np.random.default_rng(4)
    fitted = 0
    for _ in range(150):
        count = int(rng.integers(2, 8))
        stages = int(rng.integers(1, min(count, 4) + 1))
        layers = random_layers(rng, count)
        limits = rng.integers(20, 110, stages).astype(float).tolist()
        expected = math.inf
        for boundaries in partitions(count, stages):
            pieces = [layers[i:j] for i, j in ranges_of(boundaries)]
            loads = [compute_of(x) for x in pieces]
            transfers = [2 * x[-1].output for x in pieces[:-1]]
            least, total = max(*loads, *transfers, 0), sum(loads) + sum(transfers)
            for period in range(int(least), int(min(total, expected - 1)) + 1):
                groups = groups_by_hand(loads, transfers, period)
                held = zip(pieces, groups, limits, strict=True)
                if all(memory_of(x, g, 2.0) <= limit for x, g, limit in held):
                    expected = period
                    break
        found = of.memory_aware(layers, limits, [1.0] * (stages - 1), factor=2.0)
        assert (found is None) == math.isinf(expected)
        if found is None:
            continue
        fitted += 1
        assert found.period == expected
        assert all(x <= limit for x, limit in zip(found.memory, limits, strict=True))
        pieces = [layers[i:j] for i, j in ranges_of(found.bounds)]
        held = zip(pieces, found.stored, strict=True)
        assert found.memory == tuple(memory_of(x, g, 2.0) for x, g in held)
    assert 40 < fitted < 150


def sync_of(layers, replicas, link):
    return 2 * (replicas - 1) / replicas * sum(layer.params for layer in layers) / link


def brute_pipedream(layers, levels, memory, factor, overlap):
    """The least period, by recursion over all nested plans."""

    def component(k, i, j):
        """Of all components of level k."""
        return compute_of(layers[i:j]) if k < 0 else best(k, i, j, levels[k][0])

    def stage(k, i, j, replicas, left):
        in_flight = math.ceil(left / replicas)
        if memory < math.inf and memory_of(layers[i:j], in_flight, factor) > memory:
            return math.inf
        sync = sync_of(layers[i:j], replicas, levels[k][1])
        inner = component(k - 1, i, j)
        return (max(inner, sync) if overlap else inner + sync) / replicas

    def best(k, i, j, left):
        found = stage(k, i, j, left, left)
        for s in range(i + 1, j):
            sent = 2 * layers[s - 1].output / levels[k][1]
            for replicas in range(1, left):
                rest = best(k, s, j, left - replicas)
                found = min(found, max(stage(k, i, s, replicas, left), sent, rest))
        return found

    return component(len(levels) - 1, 0, len(layers))


def period_of(found, layers, levels, overlap):
    """By the stages that were found, and those within each."""
    k, parts, ranges = len(levels) - 1, [], ranges_of(found.bounds)
    for number, ((i, j), replicas) in enumerate(zip(ranges, found.replicas, strict=True)):
        span = layers[i:j]
        inner = compute_of(span)
        if k:
            inner = period_of(found.inner[number], layers, levels[:-1], overlap)
            assert found.inner[number].bounds[:: len(found.inner[number].bounds) - 1] == (i, j)
        sync = sync_of(span, replicas, levels[k][1])
        parts.append((max(inner, sync) if overlap else inner + sync) / replicas)
    return max(parts + [2 * layers[j - 1].output / levels[k][1] for _, j in ranges[:-1]])


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("levels", "limited"),
    [([(4, 2.0)], True), ([(5, 4.0)], False), ([(2, 4.0), (3, 1.0)], False)],
)
def test_pipedream_equals_brute_force(levels, limited, overlap):
    rng = np.random.default_rng(5)
    num, several, fitted = 80 if limited else 30, 0, 0
    for _ in range(num):
        layers = random_layers(rng, int(rng.integers(1, 6)), heavier=1 if limited else 16)
        memory = float(rng.integers(20, 100)) if limited else math.inf
        expected = brute_pipedream(layers, levels, memory, 2.0, overlap)
        found = of.pipedream(layers, levels, memory=memory, factor=2.0, overlap=overlap)
        assert (found is None) == math.isinf(expected)
        if found is None:
            continue
        fitted += 1
        assert found.period == pytest.approx(expected, rel=1e-12)
        assert period_of(found, layers, levels, overlap) == pytest.approx(expected)
        left = levels[-1][0]
        assert sum(found.replicas) == left
        assert found.bounds[:: len(found.replicas)] == (0, len(layers))
        several += len(found.replicas) > 1
        for (i, j), replicas in zip(ranges_of(found.bounds), found.replicas, strict=True):
            assert memory_of(layers[i:j], math.ceil(left / replicas), 2.0) <= memory
            left -= replicas
    assert several > 5
    assert (20 < fitted < num) if limited else fitted == num


def brute_two_bw(layers, n, batch, microbatches, memory, link, network, host, factor, efficiency):
    """The throughput of every configuration that fits, by enumeration of all partitions."""
    found = {}
    for width, depth in itertools.product(range(1, n + 1), repeat=2):
        if width * depth != n or depth > len(layers):
            continue
        ways = itertools.product(microbatches, (False, True), ("depth", "width"))
        for b, recompute, inner in ways:
            if batch % (width * b) or batch // (width * b) < depth:
                continue
            if inner == "width" and (n <= host or width == 1 or depth == 1):
                continue  # the same as "depth"
            m = batch // (width * b)
            if inner == "depth":
                between = link if depth <= host else network
                wide = network if n > host else link
            else:
                between = network if n > host else link
                wide = link if width <= host else network
            best = math.inf
            for boundaries in partitions(len(layers), depth):
                periods = []
                for s, (i, j) in enumerate(ranges_of(boundaries)):
                    span = layers[i:j]
                    params = sum(x.params for x in span)
                    stored = sum(x.stored for x in span) * b
                    working = max(x.working for x in span) * b
                    received = layers[i - 1].output * b if i else 0.0
                    sent = layers[j - 1].output * b if j < len(layers) else 0.0
                    seconds = sum((2 if recompute else 1) * x.forward + x.backward for x in span)
                    seconds *= b / efficiency(b)
                    held = factor * params + working
                    held += (depth - s) * received + stored if recompute else (depth - s) * stored
                    if held > memory:
                        break
                    sync = 2 * (width - 1) / width * params / wide / m
                    periods.append(max(seconds + 2 * (received + sent) / between, sync))
                else:
                    best = min(best, max(periods))
            if best < math.inf:
                key = (width, depth, b, recompute, inner)
                found[key] = width * b / best if best else math.inf
    return found


def test_two_bw_equals_brute_force():
    rng = np.random.default_rng(7)
    fitted = 0
    for _ in range(60):
        layers = random_layers(rng, int(rng.integers(1, 6)))
        n = int(rng.choice([2, 4, 6, 8]))
        batch = int(rng.choice([8, 12, 16]))
        memory = float(rng.integers(60, 400))
        host = int(rng.choice([2, 4]))
        rate = [1.0, 1.3, 1.5, 1.6, 1.65]
        args = (layers, n, batch, [1, 2, 4], memory, 8.0, 1.0, host)
        expected = brute_two_bw(*args, 3.0, rate.__getitem__)
        configurations = of.two_bw(*args, factor=3.0, efficiency=rate.__getitem__)
        found = {x.choice: x.rate for x in configurations}
        assert len(found) == len(configurations)
        assert found.keys() == expected.keys()
        if not expected:
            continue
        fitted += 1
        assert max(max(x.memory) for x in configurations) <= memory
        assert all(found[key] == pytest.approx(expected[key]) for key in found)
        assert configurations[0].rate == pytest.approx(max(expected.values()))
    assert fitted > 30


def brute_order(layers, nodes, network, order, number, factor):
    """The highest rate over all partitions."""
    best = 0.0
    for boundaries in partitions(len(layers), len(order)):
        busy, fits, latency = [], True, 0.0
        for s, (i, j) in enumerate(ranges_of(boundaries)):
            span = layers[i:j]
            in_flight = number if s < len(order) - 1 else 1
            fits &= memory_of(span, in_flight, factor) <= nodes[order[s]].memory
            busy.append(compute_of(span) / nodes[order[s]].speed)
            latency += busy[-1]
            if s < len(order) - 1:
                same = order[s] == order[s + 1]
                link = nodes[order[s]].link if same else network
                busy.append(2 * span[-1].output / link)
                latency += busy[-1]
        if fits:
            slowest = max(*busy, latency / number)
            best = max(best, 1 / slowest if slowest else math.inf)
    return best


def test_hetpipe_equals_brute_force():
    rng = np.random.default_rng(8)
    fitted, policies = 0, set()
    for _ in range(40):
        layers = random_layers(rng, int(rng.integers(4, 6)))
        layers[0] = of.Layer(1.0, 1.0, 1.0, 1.0, 1.0)
        nodes = [
            of.Node(2, float(rng.integers(40, 160)), 2.0 ** int(rng.integers(0, 3)), 4.0)
            for _ in range(2)
        ]
        expected = {}
        for policy in ("node", "equal"):
            allocation = of.allocate(nodes, policy)
            for number in range(1, 2 * len(allocation[0]) + 1):
                rates = [
                    max(
                        brute_order(layers, nodes, 1.0, order, number, 2.0)
                        for order in set(itertools.permutations(devices))
                    )
                    for devices in allocation
                ]
                expected[policy, number] = len(rates) * min(rates)
        most = max(expected.values())
        plan = of.hetpipe(layers, nodes, 1.0, policies=("node", "equal"), factor=2.0)
        assert (plan is None) == (not most)
        if plan is None:
            continue
        fitted += 1
        policy, number = plan.choice
        policies.add(policy)
        assert plan.rate == pytest.approx(most)
        # Neither fewer minibatches in flight nor an earlier policy would do.
        same = [n for (p, n), x in expected.items() if p == policy and x == pytest.approx(most)]
        assert number == min(same)
        rates = [worker.rate for worker in plan.inner]
        assert plan.rate == pytest.approx(len(rates) * min(rates))
    assert fitted > 20
    assert policies == {"node", "equal"}


def test_policies_share_devices():
    nodes = [of.Node(4, 1.0, speed=s) for s in (8.0, 4.0, 2.0, 1.0)]
    assert of.allocate(nodes, "node") == tuple((i,) * 4 for i in range(4))
    assert of.allocate(nodes, "equal") == ((0, 1, 2, 3),) * 4
    assert of.allocate(nodes, "hybrid") == ((0, 0, 3, 3),) * 2 + ((1, 1, 2, 2),) * 2
    assert of.allocate(nodes[:3], "hybrid") == ((0, 0, 2, 2),) * 2 + ((1,) * 4,)
    assert of.allocate([of.Node(3, 1.0), of.Node(2, 1.0)], "hybrid") is None


def test_staleness_of_waves():
    """s_local = N - 1; s_global = (D + 1)(s_local + 1) + s_local - 1."""
    assert [of.staleness(4, distance) for distance in (0, 1, 4)] == [(3, 6), (3, 10), (3, 22)]


def test_it_prints_a_partition_of_each(capsys):
    of.main()
    assert capsys.readouterr().out.count("one every") == 4
