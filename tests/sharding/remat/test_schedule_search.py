"""The search for schedules equals brute force on small graphs, and keeps to its bounds on large."""

import heapq
import math

import numpy as np
import pytest

from sharding.remat import _schedule_search
from sharding.remat._schedule_search import ScheduleSearch, Step, Value


def random_graph(rng, count):
    """Values that read one to three earlier ones, and a step of the gradient for each."""
    values, steps = [], []
    for k in range(count):
        reads = rng.choice(k, min(k, int(rng.integers(1, 4))), replace=False) if k else ()
        sizes = int(rng.integers(1, 6)), int(rng.integers(0, 9)), int(rng.integers(0, 3))
        values.append(Value(sizes[0], sizes[1], tuple(sorted(map(int, reads))), sizes[2]))
    for k in reversed(range(count)):
        reads = (*values[k].reads, k) if rng.integers(2) else values[k].reads
        before = int(rng.integers(0, 4))
        steps.append(Step(reads, before, before + int(rng.integers(0, 4))))
    return values, steps


def chain(count, rng=None):
    values = [
        Value(1 + (rng.integers(3) if rng else 0), 1, (k - 1,) if k else ()) for k in range(count)
    ]
    return values, [Step((k - 1, k) if k else (k,), 1, 2) for k in reversed(range(count))]


def run(values, steps, schedule, budget):
    """The time of a schedule, which keeps to a budget if values are dropped when they can be."""
    events = [("again", k, t) for t, ks in enumerate(schedule.again) for k in ks]
    events += [("step", None, t) for t in range(len(steps))]
    events.sort(key=lambda e: (e[2], e[0] == "step", e[1] or 0))
    have, seconds = set(schedule.stored), 0
    for i, (kind, k, t) in enumerate(events):
        needed = values[k].reads if kind == "again" else steps[t].reads
        assert have.issuperset(needed)
        have |= {k} if kind == "again" else set()
        held = sum(values[v].nbytes for v in have)
        held += values[k].inside + steps[t].before if kind == "again" else steps[t].during
        assert held <= budget
        seconds += values[k].seconds if kind == "again" else 0
        used, made = set(), set()  # what is read before it is computed again
        for other, v, at in events[i + 1 :]:
            used |= set(values[v].reads if other == "again" else steps[at].reads) - made
            made |= {v} if other == "again" else set()
        have &= used
    return seconds


def by_brute_force(values, steps, budget):
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
        if k < count:
            moves.append((seconds, t, k + 1, have))
            before, own = (0 if t < 0 else steps[t].before), have | 1 << k
            if have & bits[k] == bits[k] and sizes[own] + values[k].inside + before <= budget:
                more = 0 if t < 0 else values[k].seconds
                moves.append((seconds + more, t, k + 1, own))
        elif t < 0 or (have & needs[t] == needs[t] and sizes[have] + steps[t].during <= budget):
            moves.append((seconds, t + 1, 0, have))
        for move in moves:
            heapq.heappush(queue, move)
    return None


@pytest.mark.parametrize("seed", range(8))
def test_equals_brute_force_at_every_budget(seed):
    rng = np.random.default_rng(seed)
    values, steps = random_graph(rng, 4 + seed % 4)
    search = ScheduleSearch(values, steps)
    assert search.find(search.most).seconds == 0
    for budget in np.linspace(4, search.most, 6).astype(int):
        found, want = search.find(budget), by_brute_force(values, steps, budget)
        assert (found and found.seconds) == want
        if found:
            assert found.at_least == found.seconds == run(values, steps, found, budget)


@pytest.mark.parametrize("states", [2000, 60])
def test_a_large_graph_is_planned(monkeypatch, states):
    """More bytes are never slower, nor is a schedule below the bound that it has.

    Nothing is computed again where all fits, however few the states, even of many values.
    """
    monkeypatch.setattr(_schedule_search, "_MOST_STATES", states)
    values, steps = chain(40, np.random.default_rng(0))
    search = ScheduleSearch(values, steps)
    seconds = []
    for budget in (14, 20, 30, 50, search.most):
        found = search.find(budget)
        assert run(values, steps, found, budget) == found.seconds >= found.at_least
        seconds.append(found.seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == 0 < seconds[-2]
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
