"""The studies: which runs they ask for, and what they run next."""

import math

import _contenders
import _long
import _long_report
import _made_up
import _rows
import _studies
import numpy as np


def loss(config):
    """Has its best learning rate between 1e-3 and 1e-2, higher at larger batches and lengths."""
    exponent = math.log10(config["hyper"]["learning_rate"])
    tokens = config["batch"] * config["context"]
    other = config["steps"] >= 80 and config["hyper"].get("b3") == 0.999
    return 2 + (exponent + 2.6 - 0.3 * math.log10(tokens / 128)) ** 2 - other


def complete(plans_of):
    """Runs what is ready, one at a time, until nothing is; the rows in order."""
    rows = {}
    while True:
        plans = list(plans_of(rows))
        ready = [config for plan in plans for config in plan.ready]
        if not ready:
            assert all(plan.done == plan.total and not plan.waits for plan in plans)
            return rows
        key = _rows.key_of(ready[0])
        assert key not in rows
        row = {"config": ready[0], "loss": loss(ready[0]), "diverged": False, "cpu_seconds": 4.0}
        rows[key] = row


def test_final_takes_the_best_on_other_seeds_after_its_tuning():
    (plan,) = _studies.plans({}, "smoke", ["final"], ["masked"], ["came"])
    assert (plan.ready, plan.waits) == ([], "its tuning")
    which = (["tuning", "final"], ["next_token"], ["adamw"])
    rows = complete(lambda rows: _studies.plans(rows, "smoke", *which))
    final = [row["config"] for row in rows.values() if row["config"]["seed"]]
    assert [config["seed"] for config in final] == [1, 2, 3]
    tuning = [row for row in rows.values() if not row["config"]["seed"]]
    lowest = min(tuning, key=lambda row: row["loss"])
    assert all(config["hyper"] == lowest["config"]["hyper"] for config in final)


def test_each_length_is_complete_before_the_next_and_tuned_on_its_own():
    options = {"tasks": ("masked",), "contenders": ("adamw", "came_debiased")}
    rows = complete(lambda rows: _long.length_plans(rows, "smoke", (40, 80), **options))
    steps = [row["config"]["steps"] for row in rows.values()]
    assert steps == sorted(steps)
    for length, b3 in ((40, 0.9999), (80, 0.999)):
        cell = _long.cell(rows, "smoke", "masked", "came_debiased", length)
        assert [config["seed"] for config in cell.finals] == [1, 2, 3]
        assert {config["hyper"]["b3"] for config in cell.finals} == {b3}


def test_a_format_differs_from_float32_in_its_name_alone():
    rows = _made_up.long_rows("smoke")
    for name in ("came_4bit_nearest", "adamw_bf16_master"):
        parent = _contenders.FORMATS[name].parent
        cell = _long.cell(rows, "smoke", "next_token", parent, 80)
        got = _long.formats(rows, "smoke", name)
        assert [config["seed"] for config in got] == [1, 2, 3]
        assert [{**config, "contender": parent} for config in got] == cell.finals
        losses = [[rows[_rows.key_of(c)]["loss"] for c in of] for of in (got, cell.finals)]
        drift = _long_report.drift(rows, "smoke", name)
        np.testing.assert_allclose(drift.end, np.subtract(*losses))
