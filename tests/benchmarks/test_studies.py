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


def run_all(studies, contenders, rows=None):
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
    plans, rows = run_all(studies, ["came", "lion"])
    assert all(plan.done == plan.total and not plan.waits for plan in plans)
    assert len(rows) == sum(plan.total for plan in plans)


def test_studies_share_runs():
    plans, rows = run_all(["tuning", "final", "spike"], ["came"])
    assert [plan.total for plan in plans] == [12, 3, 6]
    assert len(rows) == 12 + 6


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
    base = _studies._base_exponent(rows, "smoke", "adamw")
    for times in (4, 16, 64):
        config = _studies.batch_linear(rows, "smoke", "adamw", times)
        assert config["hyper"]["learning_rate"] == pytest.approx(times * 10**base, rel=0.01)
        rates = {c["hyper"]["learning_rate"] for c in configs if c["batch"] == times}
        assert float(f"{math.sqrt(times) * 10**base:.3g}") in rates
