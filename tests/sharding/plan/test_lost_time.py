"""The closed form of lost training time against a simulation of failures, step by step."""

import math

import numpy as np
import pytest

from sharding.plan import lost_time
from sharding.recovery._peer_placement import place_replicas, recovery_probability


def arguments(**changed):
    """Failures every 2,000 s, checkpoints every 200 s or more: terms of second order count."""
    return {
        "state_bytes": 60e9,
        "num_machines": 16,
        "machine_mtbf": 32_000.0,
        "step": 10.0,
        "restart": 100.0,
        "disk_bandwidth": 1e9,
        "disk_interval": 20,
    } | changed


def share_lost(files, snapshots, recovered):
    """The share of the time of a run, on a clock, that brings no progress.

    Both kinds of checkpoints have the steps between, seconds blocked, seconds until restorable.
    """
    rng, kinds = np.random.default_rng(3), {"files": files, "snapshots": snapshots}
    between, step, num_failures = 32_000 / 16, 10.0, 6_000
    clock, done = 0.0, 0
    stored = {"files": [(0.0, 0)], "snapshots": []}
    failure = rng.exponential(between)
    while True:
        # One step, and the checkpoints after it.
        clock, done = clock + step, done + 1
        for kind in ("snapshots", "files"):
            if (one := kinds[kind]) and done % one[0] == 0:
                clock += one[1]
                stored[kind].append((clock + one[2], done))
        if clock < failure:
            continue
        if not num_failures:
            return 1 - done * step / clock
        num_failures -= 1
        from_peers = snapshots is not None and rng.random() < recovered
        known = stored["files"] + (stored["snapshots"] if from_peers else [])
        done = max(step for time, step in known if time <= failure)
        restart = 110.0 if from_peers else 160.0
        clock = failure + restart
        failure += rng.exponential(between)
        while failure < clock:  # in the restart, which begins again
            clock = failure + restart
            failure += rng.exponential(between)
        # What is restored stays restorable; what was being written is gone.
        stored = {
            "files": [max(x for x in stored["files"] if x[1] <= done and x[0] <= clock)],
            "snapshots": [(clock, done)] if from_peers else [],
        }


@pytest.mark.parametrize(
    ("blocking", "recovery", "overhead"), [(None, 0.9, 1.5), (4.0, 0.0, 15.0), (0.0, 1.0, 1.5)]
)
def test_against_a_simulation(blocking, recovery, overhead):
    peers = {"peer_interval": 2, "peer_overhead": overhead, "peer_restore": 10.0}
    given = arguments(disk_blocking=blocking, **peers)
    lost = lost_time(**given, recovery=lambda lost: recovery)
    files = (20, 60.0, 0.0) if blocking is None else (20, blocking, 60.0)
    for expected, snapshots in ((lost.disk, None), (lost.peers, (2, overhead, 20.0))):
        found = share_lost(files, snapshots, recovery)
        assert expected.share == pytest.approx(found, rel=0.02)


def test_geminis_wasted_time():
    """Writing, half an interval, and reading; each lost without peers."""
    lost = lost_time(**arguments(disk_blocking=0.0), replicas=1)
    assert lost.disk.lost == pytest.approx(60 + 200 / 2 + 100 + 60)
    assert lost.recovered == 0
    assert lost.peers.lost == lost.disk.lost
    assert lost.peers.share == pytest.approx(lost.disk.share)


def test_recovery_is_that_of_the_placement():
    lost = lost_time(**arguments(), lost_machines={1: 0.5, 2: 0.25, 3: 0.25})
    holders = place_replicas(range(16), 2)
    chances = [recovery_probability(holders, 16, k) for k in (1, 2, 3)]
    assert lost.recovered == pytest.approx(np.dot(chances, [0.5, 0.25, 0.25]))
    assert lost.recovered == pytest.approx(0.5 + 0.25 * 14 / 15 + 0.25 * 0.8)
    # Killed processes need no replicas.
    assert lost_time(**arguments(), replicas=1, lost_machines={0: 0.75, 1: 0.25}).recovered == 0.75


def test_without_failures_only_the_overhead_is_lost():
    given = arguments(machine_mtbf=1e18, peer_overhead=0.5, peer_interval=2)
    lost = lost_time(**given, disk_interval_with_peers=2_000)
    assert lost.disk.overhead == pytest.approx(60 / 260)
    assert lost.peers.overhead == pytest.approx(1 - 20_000 / (20_000 + 500 + 60))
    assert lost.best_disk.overhead < 1e-5
    for each in (lost.disk, lost.best_disk, lost.peers):
        assert each.share == pytest.approx(each.overhead, abs=1e-7)


@pytest.mark.parametrize(
    ("blocking", "mtbf"), [(None, 3e3), (None, 1e6), (0.0, 32e3), (4.0, 32e3), (30.0, 3e3)]
)
def test_the_best_interval_is_the_best_of_all(blocking, mtbf):
    given = arguments(machine_mtbf=mtbf, disk_blocking=blocking)
    best = lost_time(**given).best_disk
    shortest = 1 if blocking is None else math.ceil((60 - blocking) / 10)
    shares = [
        lost_time(**given | {"disk_interval": n}).disk.share
        for n in range(shortest, 4 * best.interval + 10)
    ]
    assert best.interval == shortest + int(np.argmin(shares))
    assert best.share == min(shares)
    # Young's sqrt(2 b / f) where failures are rare.
    best = lost_time(**arguments(machine_mtbf=1e9, step=0.1)).best_disk
    assert best.interval * 0.1 == pytest.approx(math.sqrt(2 * 60 * 1e9 / 16), rel=2e-3)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_machines": 0}, "num_machines must be a whole number above 0, got 0"),
        ({"machine_mtbf": 0.0}, "machine_mtbf must be above 0 and finite, got 0.0"),
        ({"lost_machines": {1: 0.5}}, "must add up to 1, got 0.5"),
        (
            {"disk_interval": 2, "disk_blocking": 4.0},
            "disk_interval=2 steps are 24 s, and writing a checkpoint takes 60 s: give at least 6",
        ),
    ],
)
def test_errors(changed, message):
    with pytest.raises(ValueError, match=message):
        lost_time(**arguments(**changed))
