"""The closed form of lost training time against a simulation of failures, step by step."""

import math
import runpy

import numpy as np
import pytest

from ..multiprocess.processes import ROOT

lost_time = runpy.run_path(str(ROOT / "examples" / "lost_time.py"))
# Failures every 2,000 s, checkpoints every 200 s or more: terms of second order count.
RUN = lost_time["Run"](1 / 2000, step=10.0, restart=100.0, write=60.0, blocked=60.0, delay=0.0)


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
    ("blocking", "recovered", "overhead"), [(None, 0.9, 1.5), (4.0, 0.0, 15.0), (0.0, 1.0, 1.5)]
)
def test_against_a_simulation(blocking, recovered, overhead):
    run = RUN if blocking is None else RUN._replace(blocked=blocking, delay=60.0)
    files = (20, 60.0, 0.0) if blocking is None else (20, blocking, 60.0)
    assert run.on_disk(20) == pytest.approx(share_lost(files, None, recovered), rel=0.02)
    found = share_lost(files, (2, overhead, 20.0), recovered)
    assert run.with_peers(2, overhead, 10.0, recovered, 20) == pytest.approx(found, rel=0.02)


def test_without_failures_only_the_overhead_is_lost():
    run = RUN._replace(failures=0.0)
    assert run.on_disk(20) == pytest.approx(60 / 260)
    found = run.with_peers(2, 0.5, 10.0, 0.9, disk_interval=2_000)
    assert found == pytest.approx(1 - 20_000 / (20_000 + 500 + 60))


def test_the_best_interval_is_youngs_where_failures_are_rare():
    """sqrt(2 b / f); and as long as writing a file takes."""
    run = RUN._replace(failures=16e-9, step=1.0)
    assert run.best_interval() == pytest.approx(math.sqrt(2 * 60 / 16e-9), rel=2e-3)
    assert RUN._replace(failures=1 / 200, blocked=4.0, delay=60.0).best_interval() == 6


def test_the_page_shows_what_it_prints(capsys):
    lost_time["main"]()
    page = (ROOT / "docs" / "how_to" / "lost_machines.md").read_text()
    assert f"```text\n{capsys.readouterr().out}```" in page
