"""The runner's loop, with a trainer that trains nothing: each run once, in the time there is."""

import argparse
import fcntl
import pathlib
import time
import types

import _made_up
import _rows
import _runs
import _sizes
import _studies
import numpy as np
import pytest
import run
import step_ratios
from _steps import time_alternately


class Trainer:
    """Notes what it is asked; with ``stops`` it is saved as often before a run is finished."""

    stops = 0

    def __init__(self, path, speed=False):
        self.asked, self.deleted = [], []
        Trainer.last = self

    def corpus(self, context):
        return types.SimpleNamespace(checksum=_made_up.CORPUS)

    def checkpoints(self, config, folder):
        key = _rows.key_of(config)
        return types.SimpleNamespace(delete=lambda: self.deleted.append(key))

    def run(self, config, saved=None, until=None):
        self.asked.append(_rows.key_of(config))
        self.until = until
        if saved and Trainer.stops:
            Trainer.stops -= 1
            return None
        return _made_up.row(config)


@pytest.fixture
def work(tmp_path, monkeypatch):
    """Works on the tuning of one contender; returns the trainer."""
    monkeypatch.setattr(_runs, "Trainer", Trainer)
    monkeypatch.setattr(run, "CLAIMS", tmp_path / "claims")

    def go(minutes=None, **kwargs):
        chosen = argparse.Namespace(
            size="smoke", corpus=None, rows=tmp_path / "rows.jsonl", minutes=minutes
        )
        run.work(
            chosen, lambda rows: [_studies.tuning(rows, "smoke", "next_token", "lion")], **kwargs
        )
        return Trainer.last

    go.rows = tmp_path / "rows.jsonl"
    return go


def test_each_run_is_done_once(work):
    trainer = work()
    assert len(trainer.asked) == len(set(trainer.asked)) == 6
    assert list(_rows.finished(work.rows)) == trainer.asked
    assert trainer.deleted == []
    assert work().asked == []


def test_it_ends_after_as_many_runs_as_it_may_finish(work):
    assert len(work(runs=1).asked) == 1
    assert len(work(runs=2).asked) == 2
    assert len(_rows.finished(work.rows)) == 3


def test_longer_runs_than_those_of_the_size_are_saved_on_the_way():
    base = _sizes.config("cpu", "masked", "adamw", 0, {})
    assert not run.resumes(base)
    assert not run.resumes(_sizes.config("cpu_batch", "masked", "adamw", 0, {}, times=4))
    assert run.resumes({**base, "steps": 1000})
    assert run.resumes(_sizes.config("gpu", "masked", "adamw", 0, {}))


def test_no_run_is_begun_that_would_end_later(work, capsys):
    plan = _studies.tuning({}, "smoke", "next_token", "lion")
    _rows.append(work.rows, {**_made_up.row(plan.ready[0]), "seconds": 100.0})
    assert work(minutes=2.0).asked == []  # expected to take 125 seconds
    assert "No time is left for the next of 2 runs." in capsys.readouterr().out
    assert work(minutes=5).asked != []


def test_a_run_that_is_saved_goes_on_in_the_next_call(work, monkeypatch):
    resumes = types.SimpleNamespace(**{**vars(_sizes.SIZES["smoke"]), "resumes": True})
    monkeypatch.setitem(_sizes.SIZES, "smoke", resumes)
    Trainer.stops = 1
    before = time.monotonic()
    first = work(minutes=8.0)
    assert len(first.asked) == 1
    assert before + 480 <= first.until <= time.monotonic() + 480
    assert not _rows.finished(work.rows)
    second = work()
    assert second.asked[0] == first.asked[0]
    assert len(second.asked) == 6
    assert second.deleted == second.asked


def test_what_another_process_runs_is_left_to_it(work, monkeypatch):
    taken, free = map(_rows.key_of, _studies.tuning({}, "smoke", "next_token", "lion").ready[:2])
    run.CLAIMS.mkdir()
    with (run.CLAIMS / f"{taken}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr(time, "sleep", lambda seconds: held.close())  # it dies meanwhile
        trainer = work()
    assert trainer.asked[0] == free
    assert trainer.asked.count(taken) == 1


def test_ratios_are_taken_round_by_round():
    times = {"adamw": np.array([1.0, 2.0, 4.0]), "came": np.array([2.0, 4.0, 8.0])}
    assert step_ratios.ratios(times) == {"adamw": [1, 1, 1], "came": [2, 2, 2]}


def test_rounds_have_orders_of_their_own():
    order = []
    time_alternately({name: lambda n=name: order.append(n) for name in "abcd"}, 10, warm_up=0)
    rounds = [tuple(order[i : i + 4]) for i in range(0, 40, 4)]
    assert all(sorted(one) == list("abcd") for one in rounds)
    assert len(set(rounds)) > 3


def test_smoke_commands_exist():
    folder = pathlib.Path(run.__file__).parent
    scripts = {path.name for path in folder.glob("*.py") if not path.name.startswith("_")}
    ci = (folder.parents[1] / ".ci" / "run").read_text()
    assert scripts == {
        "run.py",
        "report.py",
        "step_ratios.py",
        "evidence.py",
        "length_study.py",
        "gpt2_small.py",
    }
    assert all(f"benchmarks/convergence/{name} --smoke" in ci for name in scripts)
