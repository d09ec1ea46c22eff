"""Planners of pipeline stages equal brute force on small cases."""

import itertools
import math

import jax
import numpy as np
import pytest

from sharding.plan.cost._parallel_plan import ParallelPlan
from sharding.plan.cost._pipeline_schedules import max_in_flight
from sharding.plan.cost._step_time import step_seconds
from sharding.plan.machine._collective_time import Machine
from sharding.plan.machine._devices import kind_of
from sharding.plan.model._layer_costs import LayerCost, layer_costs
from sharding.plan.model._models import MODELS
from sharding.plan.partition._balanced_stages import balanced_stages, memory_aware_stages
from sharding.plan.partition._hetpipe import Node, allocate_workers, hetpipe
from sharding.plan.partition._pipedream import pipedream_stages, two_bw


def random_layers(rng, count, heavier=1):
    """Costs in whole numbers, so that sums are exact in any order; parameters may be heavier."""
    factors = np.array([1, 1, heavier, 1, 1, 1])
    return [LayerCost(*map(float, factors * rng.integers(0, 9, 6))) for _ in range(count)]


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
        factor * sum(layer.param_bytes for layer in layers)
        + in_flight * sum(layer.activation_bytes for layer in layers)
        + max(layer.working_bytes for layer in layers)
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
        between = [2 * x[-1].output_bytes / b for x, b in zip(stages[:-1], links, strict=True)]
        if overlap:
            period = max(*compute, *between)
        else:
            around = zip([0.0, *between], compute, [*between, 0.0], strict=True)
            period = max(before + own + after for before, own, after in around)
        best = min(best, period)
    return best


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "aligned"])
def test_balanced_stages_equal_brute_force(schedule, overlap):
    rng = np.random.default_rng(0)
    fitted = 0
    for _ in range(150):
        count = int(rng.integers(2, 9))
        stages = int(rng.integers(2, min(count, 4) + 1))
        microbatches = int(rng.integers(1, 9))
        layers = random_layers(rng, count)
        speeds = (2.0 ** rng.integers(-1, 3, stages)).tolist()
        links = (2.0 ** rng.integers(-2, 3, stages - 1)).tolist()
        limits = rng.integers(20, 200, stages).astype(float).tolist()
        in_flight = [max_in_flight(schedule, stages, s, microbatches) for s in range(stages)]
        expected = brute_balanced(layers, speeds, links, limits, in_flight, 2.0, overlap)
        kwargs = {"speeds": speeds, "links": links, "memory": limits, "schedule": schedule}
        kwargs |= {"microbatches": microbatches, "param_factor": 2.0, "overlap": overlap}
        if math.isinf(expected):
            with pytest.raises(ValueError, match=r"no partition into .* fits"):
                balanced_stages(layers, stages, **kwargs)
            continue
        fitted += 1
        found = balanced_stages(layers, stages, **kwargs)
        assert found.period == expected
        # The boundaries have this period, too, and the memory that is reported.
        pieces = [layers[i:j] for i, j in ranges_of(found.boundaries)]
        held = [memory_of(x, n, 2.0) for x, n in zip(pieces, in_flight, strict=True)]
        assert found.memory == tuple(held)
        compute = [compute_of(x) / speed for x, speed in zip(pieces, speeds, strict=True)]
        assert found.compute == tuple(compute)
        ends = zip(pieces[:-1], links, strict=True)
        assert found.transfers == tuple(2 * x[-1].output_bytes / link for x, link in ends)
    assert 40 < fitted < 150


GIB = 2.0**30
BAD_QUESTIONS = [
    ({"num_stages": 5}, "5 stages were requested of 4 layers"),
    ({"layers": [LayerCost(1.0, math.nan)] * 4}, "layer 0: backward must be finite"),
    ({"links": [1.0, 1.0]}, "links must have 1 values, got 2"),
    ({"schedule": "zb-v"}, "schedule must be 'gpipe', '1f1b' or 'aligned', got 'zb-v'"),
    (
        {"layers": [LayerCost(1.0, 1.0, 3 * GIB)] * 4, "memory": [10 * GIB, math.inf]},
        r"needs 12.0 GiB on stage 0 and has 10.0 GiB, 2.00 GiB",
    ),
]


@pytest.mark.parametrize(("kwargs", "message"), BAD_QUESTIONS)
def test_bad_questions(kwargs, message):
    given = {"layers": [LayerCost(1.0, 1.0)] * 4, "num_stages": 2} | kwargs
    with pytest.raises(ValueError, match=message):
        balanced_stages(given.pop("layers"), given.pop("num_stages"), **given)


def groups_by_hand(loads, transfers, period):
    """The groups of stages, from the last; stages and links are in order."""
    chain = [x for pair in zip(loads, [*transfers, 0.0], strict=True) for x in pair][:-1]
    numbers, load = [1], 0.0
    for each in reversed(chain):
        fits = load + each <= period
        load = load + each if fits else each
        numbers.append(numbers[-1] + (not fits))
    return numbers[:0:-1][::2]


def test_memory_aware_stages_equal_brute_force():
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
            transfers = [2 * x[-1].output_bytes for x in pieces[:-1]]
            least, total = max(*loads, *transfers, 0), sum(loads) + sum(transfers)
            for period in range(int(least), int(min(total, expected - 1)) + 1):
                groups = groups_by_hand(loads, transfers, period)
                held = zip(pieces, groups, limits, strict=True)
                if all(memory_of(x, g, 2.0) <= limit for x, g, limit in held):
                    expected = period
                    break
        if math.isinf(expected):
            with pytest.raises(ValueError, match="even with one micro-batch in flight"):
                memory_aware_stages(layers, stages, memory=limits, links=1.0, param_factor=2.0)
            continue
        fitted += 1
        found = memory_aware_stages(layers, stages, memory=limits, links=1.0, param_factor=2.0)
        assert found.period == expected
        assert all(x <= limit for x, limit in zip(found.memory, limits, strict=True))
        pieces = [layers[i:j] for i, j in ranges_of(found.boundaries)]
        held = zip(pieces, found.groups, strict=True)
        assert found.memory == tuple(memory_of(x, g, 2.0) for x, g in held)
    assert 40 < fitted < 150


def sync_of(layers, replicas, link):
    return 2 * (replicas - 1) / replicas * sum(layer.param_bytes for layer in layers) / link


def brute_pipedream(layers, levels, memory, factor, overlap):
    """The least period, by recursion over all nested plans."""

    def component(k, i, j):
        """Of all components of level k."""
        return compute_of(layers[i:j]) if k < 0 else best(k, i, j, levels[k][0])

    def stage(k, i, j, replicas, left):
        if memory is not None:
            in_flight = math.ceil(left / replicas)
            if memory_of(layers[i:j], in_flight, factor) > memory:
                return math.inf
        sync = sync_of(layers[i:j], replicas, levels[k][1])
        inner = component(k - 1, i, j)
        return (max(inner, sync) if overlap else inner + sync) / replicas

    def best(k, i, j, left):
        found = stage(k, i, j, left, left)
        for s in range(i + 1, j):
            sent = 2 * layers[s - 1].output_bytes / levels[k][1]
            for replicas in range(1, left):
                rest = best(k, s, j, left - replicas)
                found = min(found, max(stage(k, i, s, replicas, left), sent, rest))
        return found

    return component(len(levels) - 1, 0, len(layers))


def period_of(stages, layers, levels, overlap):
    k, parts = len(levels) - 1, []
    for stage in stages:
        span = layers[stage.first : stage.last + 1]
        inner = period_of(stage.inner, layers, levels[:-1], overlap) if k else compute_of(span)
        sync = sync_of(span, stage.replicas, levels[k][1])
        parts.append((max(inner, sync) if overlap else inner + sync) / stage.replicas)
    return max(parts + [2 * layers[x.last].output_bytes / levels[k][1] for x in stages[:-1]])


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
        memory = float(rng.integers(20, 100)) if limited else None
        kwargs = {"memory": memory, "param_factor": 2.0, "overlap": overlap}
        expected = brute_pipedream(layers, levels, memory, 2.0, overlap)
        if math.isinf(expected):
            with pytest.raises(ValueError, match="no plan fits 4 workers"):
                pipedream_stages(layers, levels, **kwargs)
            continue
        fitted += 1
        found = pipedream_stages(layers, levels, **kwargs)
        assert found.period == pytest.approx(expected, rel=1e-12)
        assert period_of(found.stages, layers, levels, overlap) == pytest.approx(expected)
        left = levels[-1][0]
        assert sum(stage.replicas for stage in found.stages) == left
        held = [i for stage in found.stages for i in range(stage.first, stage.last + 1)]
        assert held == list(range(len(layers)))
        several += len(found.stages) > 1
        for stage in found.stages if limited else ():
            in_flight = math.ceil(left / stage.replicas)
            assert memory_of(layers[stage.first : stage.last + 1], in_flight, 2.0) <= memory
            left -= stage.replicas
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
                    params = sum(x.param_bytes for x in span)
                    stored = sum(x.activation_bytes for x in span) * b
                    working = max(x.working_bytes for x in span) * b
                    received = layers[i - 1].output_bytes * b if i else 0.0
                    sent = layers[j - 1].output_bytes * b if j < len(layers) else 0.0
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
        args = (layers, n, batch, [1, 2, 4], memory, 8.0, 1.0, host, 3.0, rate.__getitem__)
        expected = brute_two_bw(*args)
        kwargs = {"global_batch": batch, "microbatches": [1, 2, 4], "memory": memory}
        kwargs |= {"link": 8.0, "network": 1.0, "devices_per_host": host}
        kwargs |= {"param_factor": 3.0, "efficiency": rate.__getitem__}
        if not expected:
            with pytest.raises(ValueError, match=r"fits|no width x depth"):
                two_bw(layers, n, **kwargs)
            continue
        fitted += 1
        plan = two_bw(layers, n, **kwargs)
        found = {
            (x.width, x.depth, x.microbatch, x.recompute, x.inner): x.throughput
            for x in plan.choices
        }
        assert len(found) == len(plan.choices)
        assert max(each.memory for each in plan.choices) <= memory
        assert found.keys() == expected.keys()
        assert all(found[key] == pytest.approx(expected[key]) for key in found)
        assert plan.best.throughput == pytest.approx(max(expected.values()))
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
                busy.append(2 * span[-1].output_bytes / link)
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
        layers[0] = LayerCost(1.0, 1.0, 1.0, 1.0, 1.0)
        nodes = [
            Node(2, float(rng.integers(40, 160)), 2.0 ** int(rng.integers(0, 3)), 4.0)
            for _ in range(2)
        ]
        expected = {}
        for policy in ("node", "equal"):
            allocation = allocate_workers(nodes, policy)
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
        kwargs = {"network": 1.0, "policies": ("node", "equal"), "param_factor": 2.0}
        if not most:
            with pytest.raises(ValueError, match="no policy has a plan"):
                hetpipe(layers, nodes, **kwargs)
            continue
        fitted += 1
        plan = hetpipe(layers, nodes, **kwargs)
        policies.add(plan.policy)
        assert plan.throughput == pytest.approx(most)
        # Neither fewer minibatches in flight nor an earlier policy would do.
        same = [
            number
            for (policy, number), x in expected.items()
            if policy == plan.policy and x == pytest.approx(most)
        ]
        assert plan.num_concurrent == min(same)
        rates = [worker.rate for worker in plan.workers]
        assert plan.throughput == pytest.approx(len(rates) * min(rates))
    assert fitted > 20
    assert policies == {"node", "equal"}


def test_policies_share_devices():
    nodes = [Node(4, 1.0, speed=s) for s in (8.0, 4.0, 2.0, 1.0)]
    assert allocate_workers(nodes, "node") == tuple((i,) * 4 for i in range(4))
    assert allocate_workers(nodes, "equal") == ((0, 1, 2, 3),) * 4
    assert allocate_workers(nodes, "hybrid") == ((0, 0, 3, 3),) * 2 + ((1, 1, 2, 2),) * 2
    assert allocate_workers(nodes[:3], "hybrid") == ((0, 0, 2, 2),) * 2 + ((1,) * 4,)
    with pytest.raises(ValueError, match="node 0 has 3 devices, which 2 virtual workers"):
        allocate_workers([Node(3, 1.0), Node(2, 1.0)], "hybrid")


def test_staleness_of_waves():
    """s_local = N - 1; s_global = (D + 1)(s_local + 1) + s_local - 1."""
    layers = [LayerCost(1.0, 1.0)] * 4
    nodes = [Node(4, 100.0)]
    plans = [hetpipe(layers, nodes, network=1.0, clock_distance=d) for d in (0, 1, 4)]
    assert {plan.num_concurrent for plan in plans} == {4}
    assert {plan.local_staleness for plan in plans} == {3}
    assert [plan.global_staleness for plan in plans] == [6, 10, 22]


def test_layer_costs_sum_to_the_model():
    """Their seconds are those of a step on one device; their bytes those of the parameters."""
    device = kind_of("h100x8")
    for name in ("gpt2-small", "llama2-7b"):
        model = MODELS[name]
        costs = layer_costs(model, device, batch=2, length=512)
        plain = layer_costs(model, device, batch=2, length=512, recompute=False)
        partly = layer_costs(model, device, batch=2, length=512, recompute="minimal")
        for layers, form in ((costs, "full"), (plain, "none"), (partly, "minimal")):
            plan = ParallelPlan(microbatch=2, recompute=form)
            step = step_seconds(model, plan, Machine(device, 1), length=512)
            seconds = sum(layer.forward + layer.backward for layer in layers)
            assert seconds == pytest.approx(step.compute, rel=1e-12)
        assert costs[-1].backward == plain[-1].backward  # nothing of the head is computed again
        params = 2 * sum(x.size for x in jax.tree.leaves(model.abstract()))
        tied = 2 * model.vocabulary * model.width if model.tied else 0
        assert sum(layer.param_bytes for layer in costs) == params + tied
        assert costs[1].activation_bytes == costs[1].output_bytes == 2 * 1024 * model.width
        # A layer that is computed again has no more temporaries than it would store.
        assert plain[1].activation_bytes > costs[1].working_bytes > 10 * costs[1].output_bytes
        assert len(costs) == model.layers + 2
