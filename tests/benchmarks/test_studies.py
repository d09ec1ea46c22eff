"""The studies: which runs they ask for, and what they run next."""

import dataclasses
import math

import _format_study
import _formats
import _lengths
import _made_up
import _rows
import _search
import _studies
import _walk
import numpy as np
import pytest

# --- Searches -------------------------------------------------------------------------------------

SPACE = _search.Space(12, -2.5, (0.1, 0.0, 1.0), ({"b2": 0.999}, {"b2": 0.99}, {"b2": 0.95}))


def bowl(exponent, weight_decay=0.1, b2=0.99):
    """A loss with one best configuration."""

    def loss(trial):
        return (
            (trial.exponent - exponent) ** 2
            + 0.01 * (trial.weight_decay - weight_decay) ** 2
            + 0.1 * abs(dict(trial.betas)["b2"] - b2)
        )

    return loss


def searched(space, loss):
    """Runs a search; all trials in order."""
    order, known = [], {}
    while True:
        found, wanted = _search.replay(space, known.get)
        if not wanted:
            return order, found
        order += wanted
        known |= {trial: loss(trial) for trial in wanted}


def test_a_search_keeps_its_budget_and_is_replayed_from_what_is_known():
    for budget in (1, 4, 6, 9, 12, 20):
        for exponent in (-7.3, -3.6, -2.5, -1.0, 3.0):
            order, found = searched(dataclasses.replace(SPACE, budget=budget), bowl(exponent))
            assert len(order) == len(set(order)) == len(found) == budget
    order, found = searched(SPACE, bowl(-2.4))
    for cut in range(len(order)):
        known = {trial: found[trial] for trial in order[:cut]}
        assert _search.replay(SPACE, known.get)[1][0] == order[cut]
    best = {"learning_rate": 0.00422, "weight_decay": 0.1, "b2": 0.99}
    assert _search.best(found).hyper == best
    # A best at the edge of the space is named, by value, wherever it stands.
    assert _search.edges(SPACE, found) == []
    found = searched(SPACE, bowl(-2.5, weight_decay=2.0, b2=0.9))[1]
    assert _search.edges(SPACE, found) == ["weight_decay", "b2"]
    assert "learning_rate" in _search.edges(SPACE, searched(SPACE, bowl(9.0))[1])


def test_a_walk_ends_at_the_best_of_the_grid_with_both_neighbours():
    start, other = _search.Trial(-3.0, 0.1, (("b3", 0.9999),)), (("b3", 0.995),)
    for optimum in (-4.5, -3.25, -3.0, -2.9, -2.25, -1.0):
        for strides in ((0.25,), (0.5, 0.25)):
            walk = _walk.walk(start, strides, [(other, 0.5)])
            found, wanted = _search.follow(
                walk, lambda t, o=optimum: (t.exponent - o) ** 2 - (t.betas == other)
            )
            assert not wanted
            best = _search.best(found)
            assert abs(best.exponent - optimum) <= 0.125
            assert best.betas == other
            assert _walk.bracketed(found, 0.25)
    found, _ = _search.follow(_walk.walk(start, (0.25,)), lambda trial: trial.exponent)
    assert len(found) <= _walk.LIMIT + 1
    assert not _walk.bracketed(found, 0.25)


# --- Plans ----------------------------------------------------------------------------------------


def loss(config):
    """Has its best learning rate between 1e-3 and 1e-2, higher at larger batches and lengths."""
    exponent = math.log10(config["hyper"]["learning_rate"])
    tokens = config["batch"] * config["context"]
    other = config["steps"] >= 80 and config["hyper"].get("b3") == 0.999
    return 2 + (exponent + 2.6 - 0.3 * math.log10(tokens / 128)) ** 2 - other


def complete(plans_of):
    """Runs what is ready, one at a time, until nothing is; all plans, and the rows in order."""
    rows = {}
    while True:
        plans = list(plans_of(rows))
        ready = [config for plan in plans for config in plan.ready]
        if not ready:
            assert all(plan.done == plan.total and not plan.waits for plan in plans)
            return plans, rows
        key = _rows.key_of(ready[0])
        assert key not in rows
        row = {"config": ready[0], "loss": loss(ready[0]), "diverged": False, "cpu_seconds": 4.0}
        rows[key] = row


def run_all(studies, contenders):
    return complete(lambda rows: _studies.plans(rows, "smoke", studies, ["next_token"], contenders))


def test_final_takes_the_best_on_other_seeds_after_its_tuning():
    (plan,) = _studies.plans({}, "smoke", ["final"], ["masked"], ["came"])
    assert (plan.ready, plan.waits) == ([], "its tuning")
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
    base = _studies.batch_best(rows, "smoke", "adamw", 1).hyper["learning_rate"]
    for times in (1, 4, 16, 64):
        here = [config for config in configs if config["batch"] == times]
        rates = {config["hyper"]["learning_rate"] for config in here}
        for factor in (times, math.sqrt(times)):
            assert any(rate == pytest.approx(factor * base, rel=0.01) for rate in rates)
        seeds = [config["seed"] for config in here if config["seed"]]
        assert seeds == ([1, 2] if times in (1, 64) else [])


def test_each_length_is_complete_before_the_next_and_tuned_on_its_own():
    contenders = ("adamw", "came_debiased")
    rows = complete(
        lambda rows: _lengths.plans(rows, "smoke", tasks=("masked",), contenders=contenders)
    )[1]
    steps = [row["config"]["steps"] for row in rows.values()]
    assert steps == sorted(steps)
    for length, b3 in ((40, 0.9999), (80, 0.999)):
        cell = _lengths.cell(rows, "smoke", "masked", "came_debiased", length)
        assert [config["seed"] for config in cell.finals] == [1, 2, 3]
        assert {config["hyper"]["b3"] for config in cell.finals} == {b3}


# --- Formats --------------------------------------------------------------------------------------


def test_a_format_differs_from_float32_in_its_name_alone():
    rows = _made_up.length_rows("smoke")
    for name in ("came_4bit_nearest", "adamw_bf16_master"):
        parent = _formats.FORMATS[name].parent
        cell = _lengths.cell(rows, "smoke", "next_token", parent, 80)
        got = _format_study.configs(rows, "smoke", name)
        assert [config["seed"] for config in got] == [1, 2, 3]
        assert [{**config, "contender": parent} for config in got] == cell.finals
        losses = [[rows[_rows.key_of(c)]["loss"] for c in of] for of in (got, cell.finals)]
        drift = _format_study.drift(rows, "smoke", name)
        np.testing.assert_allclose(drift.end, np.subtract(*losses))
