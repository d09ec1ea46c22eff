"""The study of lengths: it reuses rows, ends, and tunes each length on its own."""

import math

import _lengths
import _rows
import _sizes
import pytest
from _tasks import VOCABULARY

SIZE = "smoke"


def loss(config):
    """Longer runs have lower learning rates; b3 of 0.999 is better from 80 steps on."""
    exponent = math.log10(config["hyper"]["learning_rate"])
    optimum = -2.5 - 0.25 * math.log2(config["steps"] / 40)
    other = config["steps"] >= 80 and config["hyper"].get("b3") == 0.999
    return 2 + (exponent - optimum) ** 2 - other


def run_all(contenders=("adamw", "came_debiased"), rows=None):
    """Runs what is ready, one at a time; returns the rows in order."""
    rows = {} if rows is None else rows
    while True:
        plans = list(_lengths.plans(rows, SIZE, tasks=("masked",), contenders=contenders))
        ready = [config for plan in plans for config in plan.ready]
        if not ready:
            assert all(plan.done == plan.total and not plan.waits for plan in plans)
            return rows
        key = _rows.key_of(ready[0])
        assert key not in rows
        row = {"config": ready[0], "loss": loss(ready[0]), "diverged": False, "cpu_seconds": 4.0}
        rows[key] = row


@pytest.fixture(scope="module")
def rows():
    return run_all()


def test_a_length_is_complete_before_the_next_one_begins(rows):
    steps = [row["config"]["steps"] for row in rows.values()]
    assert steps == sorted(steps)
    assert set(steps) == {40, 80}


def test_lengths_have_a_model_of_their_own(rows):
    """So that the longest run has 20 bytes for each parameter."""
    assert {row["config"]["size"] for row in rows.values()} == {"smoke_long"}
    size = _sizes.SIZES[_lengths.size_of("cpu")]
    params = 12 * size.layers * size.width**2 + VOCABULARY * size.width
    assert 19 < _lengths.LENGTHS["cpu"][-1] * size.batch * size.context / params < 21


def test_each_length_is_tuned_on_its_own(rows):
    chosen = {
        steps: _lengths.cell(rows, SIZE, "masked", "came_debiased", steps).finals[0]["hyper"]
        for steps in (40, 80)
    }
    assert chosen[40] == {"learning_rate": 0.00316, "weight_decay": 0.1, "b2": 0.999, "b3": 0.9999}
    assert chosen[80] == {"learning_rate": 0.00178, "weight_decay": 0.1, "b2": 0.999, "b3": 0.999}


def test_final_seeds_chose_nothing(rows):
    for contender in ("adamw", "came_debiased"):
        for steps in (40, 80):
            cell = _lengths.cell(rows, SIZE, "masked", contender, steps)
            assert [config["seed"] for config in cell.finals] == [1, 2, 3]
    assert _lengths.seeds_of(3000) == (1, 2, 3)
    assert _lengths.seeds_of(10000) == (1, 2)


def test_its_rows_are_those_that_it_asked_for(rows):
    other = _sizes.config(SIZE, "masked", "lion", 0, {"learning_rate": 1.0})
    more = {**rows, _rows.key_of(other): {"config": other, "loss": 1.0, "diverged": False}}
    assert _lengths.used(more, SIZE).keys() == rows.keys()


def test_a_longer_search_waits_for_the_shorter_one(rows):
    only = {key: row for key, row in rows.items() if row["config"]["steps"] == 80}
    plan = _lengths.plan(only, SIZE, "masked", "adamw", 80)
    assert plan.ready == []
    assert plan.waits


def test_killed_at_any_time_it_runs_only_what_is_missing(rows):
    for kept in (0, 3, 17, len(rows)):
        again = run_all(rows=dict(list(rows.items())[:kept]))
        assert list(again) == list(rows)


def test_published_updates_shrink_and_the_learning_rate_follows():
    betas = (("b2", 0.999), ("b3", 0.9999))
    assert _lengths._shift("came", betas, 300, 1000) == 0.25
    assert _lengths._shift("came", betas, 300, 300, (("b2", 0.999), ("b3", 0.995))) == 0.75
    assert _lengths._shift("came_debiased", betas, 300, 1000) == 0.0


def test_lengths_divide_into_points():
    for size, lengths in _lengths.LENGTHS.items():
        assert lengths[0] == _sizes.SIZES[_lengths.size_of(size)].steps
        assert all(steps % 20 == 0 for steps in lengths)


def test_progress_is_by_measured_time(rows):
    lines = _lengths.progress(rows, SIZE, tasks=("masked",), contenders=("adamw", "came_debiased"))
    assert lines[-1] == "all lengths: about 0.0 CPU hours left"
    assert len(lines) == 3
    assert _lengths.seconds_per_step(rows, SIZE) == {"adamw": 0.05, "came_debiased": 0.05}
