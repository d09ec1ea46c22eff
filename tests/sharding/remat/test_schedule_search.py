"""The search for schedules equals brute force on small graphs, and keeps to its bounds on large."""

import heapq
import math

import numpy as np
import pytest

from sharding.remat import _schedule_search
from sharding.remat._schedule_search import ScheduleSearch, Step, Value


def random_graph(rng, count, fetched=False):
    """Values that read one to three earlier ones, and a step of the gradient for each.

    What the last value needs may be ``fetched``.
    """
    values, steps = [], []
    for k in range(count):
        reads = rng.choice(k, min(k, int(rng.integers(1, 4))), replace=False) if k else ()
        sizes = int(rng.integers(1, 6)), int(rng.integers(0, 9)), int(rng.integers(0, 3))
        values.append(Value(sizes[0], sizes[1], tuple(sorted(map(int, reads))), sizes[2]))
    for k in reversed(range(count)):
        reads = (*values[k].reads, k) if rng.integers(2) else values[k].reads
        before = int(rng.integers(0, 4))
        steps.append(Step(reads, before, before + int(rng.integers(0, 4))))
    needed = {count - 1} if fetched else set()
    for k in reversed(range(count)):
        if k in needed:
            needed.update(values[k].reads)
            values[k] = values[k]._replace(fetch=int(rng.integers(0, 4)))
    return values, steps


def chain(count, rng=None):
    values = [
        Value(1 + (rng.integers(3) if rng else 0), 1, (k - 1,) if k else ()) for k in range(count)
    ]
    return values, [Step((k - 1, k) if k else (k,), 1, 2) for k in reversed(range(count))]


def run(values, steps, schedule, budget):
    """The time of a schedule, which keeps to a budget if values are dropped when they can be."""
    events = []  # what they read, make, and need beside values
    for step, ks in zip(steps, schedule.again, strict=True):
        for k, fetches in ks:
            if fetches:
                assert values[k].fetch < math.inf
                events.append(((), {k}, step.before, values[k].fetch))
            else:
                events.append(
                    (values[k].reads, {k}, step.before + values[k].inside, values[k].seconds)
                )
        events.append((step.reads, set(), step.during, 0))
    have = set(schedule.stored)
    for i, (reads, made, beside, _) in enumerate(events):
        assert have.issuperset(reads)
        have |= made
        assert sum(values[v].nbytes for v in have) + beside <= budget
        used, made = set(), set()  # what is read before it is there again
        for later, own, *_ in events[i + 1 :]:
            used |= set(later) - made
            made |= own
        have &= used
    return sum(seconds for *_, seconds in events)


def by_brute_force(values, steps, budget, result):
    """The least time over all schedules: the shortest path over what is in memory, in real time."""
    count = len(values)
    sizes = [sum(v.nbytes for k, v in enumerate(values) if m >> k & 1) for m in range(1 << count)]
    bits = [sum(1 << k for k in v.reads) for v in values]
    needs = [sum(1 << k for k in s.reads) for s in steps]
    # The forward pass is a step in front of the others, in which time does not count.
    start = (0, -1, 0, 0)
    queue, seen = [start], set()
    while queue:
        seconds, t, k, have = heapq.heappop(queue)
        if (t, k, have) in seen:
            continue
        seen.add((t, k, have))
        if t == len(steps):
            return seconds
        moves = [(seconds, t, k, have & ~(1 << v)) for v in range(count) if have >> v & 1]
        before = 0 if t < 0 else steps[t].before
        for v in range(count if t >= 0 else 0):
            if values[v].fetch < math.inf and sizes[have | 1 << v] + before <= budget:
                moves.append((seconds + values[v].fetch, t, k, have | 1 << v))
        if k < count:
            moves.append((seconds, t, k + 1, have))
            own = have | 1 << k
            if have & bits[k] == bits[k] and sizes[own] + values[k].inside + before <= budget:
                more = 0 if t < 0 else values[k].seconds
                moves.append((seconds + more, t, k + 1, own))
        elif t < 0:
            moves += [(seconds, 0, 0, have)] if have & result == result else []
        elif have & needs[t] == needs[t] and sizes[have] + steps[t].during <= budget:
            moves.append((seconds, t + 1, 0, have))
        for move in moves:
            heapq.heappush(queue, move)
    return None


@pytest.mark.parametrize("fetched", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_equals_brute_force_at_every_budget(seed, fetched):
    """Also where values may be copied to the host."""
    rng = np.random.default_rng(seed)
    values, steps = random_graph(rng, 4 + seed % 4, fetched)
    results = [len(values) - 1] * fetched
    search = ScheduleSearch(values, steps, results)
    assert search.find(search.most).seconds == 0
    for budget in np.linspace(4, search.most, 6).astype(int):
        found = search.find(budget)
        want = by_brute_force(values, steps, budget, sum(1 << k for k in results))
        assert (found and found.seconds) == want
        if found:
            assert found.at_least == found.seconds == run(values, steps, found, budget)


@pytest.mark.parametrize("states", [2000, 60])
def test_a_large_graph_is_planned(monkeypatch, states):
    """More bytes are never slower, nor is a schedule below the bound that it has.

    Little is computed again where almost all fits, however few the states, even of many values.
    """
    monkeypatch.setattr(_schedule_search, "_MOST_STATES", states)
    values, steps = chain(40, np.random.default_rng(0))
    search = ScheduleSearch(values, steps)
    seconds = []
    for budget in (14, 20, 30, 50, search.most - 1, search.most):
        found = search.find(budget)
        assert run(values, steps, found, budget) == found.seconds >= found.at_least
        seconds.append(found.seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-2:] == [1, 0]
    assert search.find(3) is None


@pytest.mark.parametrize("length", [5, 10, 40])
def test_a_chain_is_that_of_revolve(length):
    """No more steps again than Griewank and Walther's schedule, with a value more in memory."""
    values = [Value(1, 1, (k - 1,) if k else ()) for k in range(length - 1)]
    steps = [Step((k - 1,) if k else (), 0, 0) for k in reversed(range(length))]
    search = ScheduleSearch(values, steps)
    for snapshots in range(1, 7):
        r = next(r for r in range(length) if math.comb(snapshots + r, r) >= length)
        revolve = r * length - math.comb(snapshots + r, r - 1) - (length - 1)
        assert search.find(snapshots + 1).seconds <= revolve
