"""What the studies run: each run once, in an order that ends, as many as they say."""

import math

import _rows
import _studies
import pytest


def loss(config):
    """Has its best learning rate between 1e-3 and 1e-2, higher at larger batches."""
    exponent = math.log10(config["hyper"]["learning_rate"])
    tokens = config["batch"] * config["context"]
    return 2 + (exponent + 2.6 - 0.3 * math.log10(tokens / 128)) ** 2


def run_all(studies, contenders, rows=None, loss=loss):
    """Runs what is ready, one at a time, until nothing is; all plans."""
    rows = {} if rows is None else rows
    while True:
        plans = list(_studies.plans(rows, "smoke", studies, ["next_token"], contenders))
        ready = [config for plan in plans for config in plan.ready]
        if not ready:
            return plans, rows
        key = _rows.key_of(ready[0])
        assert key not in rows
        rows[key] = {"config": ready[0], "loss": loss(ready[0]), "diverged": False}


@pytest.mark.parametrize("study", _studies.STUDIES)
def test_studies_end_with_as_many_runs_as_they_say(study):
    studies = [study] if study in ("tuning", "batch") else ["tuning", study]
    plans, rows = run_all(studies, ["came", "lion", "came_8bit"])
    assert all(plan.done == plan.total and not plan.waits for plan in plans)
    assert len(rows) == sum(plan.total for plan in plans)


def test_studies_share_runs():
    plans, rows = run_all(["tuning", "final", "spike"], ["came"])
    assert [plan.total for plan in plans] == [12, 3, 6]
    assert len(rows) == 12 + 6


def test_spikes_are_also_those_of_the_published_betas():
    def run(better):
        plans, rows = run_all(
            ["tuning", "spike"],
            ["came"],
            loss=lambda config: loss(config) - (config["hyper"]["b3"] == better),
        )
        return _studies.spike_hypers(rows, "smoke", "next_token", "came"), plans[1].total

    hypers, total = run(better=0.995)
    assert [hyper["b3"] for hyper in hypers] == [0.995, 0.9999]
    assert total == 12
    hypers, total = run(better=0.9999)
    assert [hyper["b3"] for hyper in hypers] == [0.9999]
    assert total == 6


def test_final_waits_for_tuning():
    (plan,) = _studies.plans({}, "smoke", ["final"], ["masked"], ["came"])
    assert plan.ready == []
    assert plan.waits == "its tuning"


def test_final_takes_the_best_on_other_seeds():
    _, rows = run_all(["tuning", "final"], ["adamw"])
    final = [row["config"] for row in rows.values() if row["config"]["seed"]]
    assert [config["seed"] for config in final] == [1, 2, 3]
    tuning = [row for row in rows.values() if not row["config"]["seed"]]
    lowest = min(tuning, key=lambda row: row["loss"])
    assert all(config["hyper"] == lowest["config"]["hyper"] for config in final)


def test_batches_have_equal_tokens():
    _, rows = run_all(["batch"], ["adamw"])
    configs = [row["config"] for row in rows.values()]
    assert len({config["batch"] * config["steps"] for config in configs}) == 1
    assert {config["batch"] for config in configs} == {1, 4, 16, 64}
    base = _studies.batch_best(rows, "smoke", "adamw", 1).hyper["learning_rate"]
    for times in (4, 16, 64):
        rates = {c["hyper"]["learning_rate"] for c in configs if c["batch"] == times}
        for factor in (times, math.sqrt(times)):
            assert any(rate == pytest.approx(factor * base, rel=0.01) for rate in rates)


def test_the_best_at_the_ends_of_the_batches_is_run_on_other_seeds():
    _, rows = run_all(["batch"], ["adamw"])
    for times in (1, 4, 16, 64):
        here = [row for row in rows.values() if row["config"]["batch"] == times]
        others = [row["config"] for row in here if row["config"]["seed"]]
        assert [config["seed"] for config in others] == ([1, 2] if times in (1, 64) else [])
        best = min((row for row in here if not row["config"]["seed"]), key=lambda r: r["loss"])
        assert all(config["hyper"] == best["config"]["hyper"] for config in others)


def test_few_bits_take_what_the_search_chose_for_float32():
    _, rows = run_all(["tuning", "parent"], ["came", "came_8bit"])
    got = _studies.parent_configs(rows, "smoke", "next_token", "came_8bit")
    assert [config["seed"] for config in got] == [1, 2, 3]
    hyper = _studies.best(rows, "smoke", "next_token", "came")
    assert all(config["hyper"] == hyper for config in got)
    assert {config["contender"] for config in got} == {"came_8bit"}
