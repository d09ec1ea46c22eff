"""The report: right numbers from made-up rows, and something to say whatever is missing."""

import math

import _contenders
import _growth
import _made_up
import _plots
import _rows
import _sizes
import _studies
import _summary
import _tables
import numpy as np
import pytest
import report
from scipy import stats

import optax_ext

SIZE, TASK = "smoke", "next_token"
NO_TIMES = {"ratios": {}}
FEW = ("adamw", "came", "lion")


@pytest.fixture(scope="module")
def rows():
    return _made_up.rows(SIZE)


def final_rows(rows, contender):
    return _summary.final(rows, SIZE, TASK, contender).rows


def test_intervals_hold_what_they_say():
    """Of 2,000 made-up comparisons, 95 % hold the true difference, and one further seed's."""
    rng, n = np.random.default_rng(0), 3
    inside = further = 0
    for _ in range(2000):
        seeds = rng.normal(size=n + 1)  # what all contenders have in common
        losses = np.arange(5.0)[:, None] + seeds + 0.1 * rng.normal(size=(5, n + 1))
        apart = _summary.spread(list(losses[:, :n]))
        assert apart.freedom == 8
        found = (losses[4] - losses[0])[:n].mean()
        inside += abs(found - 4) <= apart.half_width(n)
        further += abs(losses[4, n] - losses[0, n] - found) <= apart.half_width(n, further=True)
    assert 0.935 < inside / 2000 < 0.965
    assert 0.935 < further / 2000 < 0.965


def test_spread_of_two_is_that_of_paired_differences():
    a, b = np.array([0.1, 0.2, 0.6]), np.array([0.5, 0.1, 0.3])
    low, high = stats.t.interval(0.95, 2, (a - b).mean(), stats.sem(a - b))
    assert _summary.spread([a, b]).half_width(3) == pytest.approx((high - low) / 2)
    assert _summary.spread([a]) is None
    assert _summary.spread([a[:1], b[:1]]) is None


def test_differences_are_taken_seed_by_seed(rows):
    one, base = (_summary.final(rows, SIZE, TASK, name) for name in ("came", "adamw"))
    got = _summary.difference(one, base)
    want = [one.rows[s]["loss"] - base.rows[s]["loss"] for s in (1, 2, 3)]
    np.testing.assert_allclose(got, want)
    # A seed that one of them lacks is left out.
    less = dict(rows)
    del less[one.rows[2]["key"]]
    one = _summary.final(less, SIZE, TASK, "came")
    np.testing.assert_allclose(_summary.difference(one, base), [want[0], want[2]])


@pytest.mark.parametrize(("wanted", "steps"), [(5.0, 10), (3.5, 15), (3.0, 20), (1.9, math.inf)])
def test_steps_to_a_loss(wanted, steps):
    row = {"curve": [(10, 4.0), (20, 3.0), (30, 2.0)]}
    assert _summary.steps_to(row, wanted) == steps


def test_losses_name_what_diverged(rows):
    some = dict(rows)
    row = final_rows(rows, "came")[2]
    some[row["key"]] = {**row, "loss": None, "diverged": True}
    text = _tables.losses(_summary.finals(some, SIZE, TASK, FEW), {})
    assert "diverged (1 of 3)" in text
    assert text.splitlines()[-1].startswith("| `came`")


def test_few_bits_are_compared_with_their_parent_s_settings(rows):
    of = _summary.final(rows, SIZE, TASK, "came")
    own = {
        (row["config"]["seed"], row["config"]["contender"], str(row["config"]["hyper"])): row
        for row in rows.values()
    }
    want = [own[s, "came_8bit", str(of.hyper)]["loss"] - of.rows[s]["loss"] for s in (1, 2, 3)]
    np.testing.assert_allclose(_summary.at_parents(rows, SIZE, TASK, "came_8bit"), want)
    assert f"| `came_8bit` | `came` | {np.mean(want):+.4f} | {want[0]:+.4f}, " in _tables.parents(
        rows, SIZE, TASK
    )


def test_a_best_at_the_linear_rule_is_no_edge_inside_of_the_search(rows):
    def edges(losses):
        """Of a batch at which these are the losses of the exponents, as far as known."""
        some = {
            key: row
            for key, row in rows.items()
            if row["config"]["batch"] != 4 or row["config"]["contender"] != "adamw"
        }
        while True:
            _, wanted = _studies.batch_trials(some, SIZE, "adamw", 4)
            if not wanted:
                return _summary.batches(some, SIZE, "adamw")[1]
            for config in wanted:
                loss = losses(math.log10(config["hyper"]["learning_rate"]))
                some[_rows.key_of(config)] = {
                    **_made_up.row(config),
                    "loss": loss,
                    "diverged": False,
                }

    linear = _studies.batch_linear(rows, SIZE, "adamw", 4).exponent
    at = edges(lambda exponent: 2 + abs(exponent - linear))
    assert at.best == pytest.approx(at.linear)
    assert not at.on_edge
    assert edges(lambda exponent: 2 - exponent).on_edge
    assert edges(lambda exponent: 2 + exponent).on_edge


def test_growth_is_what_debiasing_takes_away():
    """Updates of CAME as published and debiased differ by a factor alone; this is its mean."""
    steps, warmup, b3 = 40, 4, 0.99
    published = optax_ext.scale_by_came(b3=b3)
    debiased = optax_ext.scale_by_came(b3=b3, debias_instability=True)
    rng, rate = np.random.default_rng(0), _contenders.schedule(1.0, warmup, steps)
    params = np.ones((8, 8), np.float32)
    states = [published.init(params), debiased.init(params)]
    factors, weights = [], []
    for i in range(steps):
        grads = rng.normal(size=params.shape).astype(np.float32)
        large, states[0] = published.update(grads, states[0], params)
        small, states[1] = debiased.update(grads, states[1], params)
        factors.append(float(np.median(large / small)))
        weights.append(float(rate(i)))
    got = _growth.growth({"steps": steps, "warmup": warmup, "hyper": {"b3": b3}})
    assert got == pytest.approx(np.average(factors, weights=weights), rel=1e-4)


def test_a_lead_is_the_baseline_s_at_the_same_batch(rows):
    for at in _summary.batches(rows, SIZE, "came"):
        (base,) = [x for x in _summary.batches(rows, SIZE, "adamw") if x.batch == at.batch]
        lead = _summary.lead(rows, SIZE, "came")[at.batch]
        assert lead == pytest.approx(at.best - base.best)
    assert not _summary.lead(rows, SIZE, "adamw")


@pytest.mark.parametrize("there", [0, 1, 5, 40, 80])
def test_a_report_of_part_of_the_rows_says_what_is_missing(rows, there, tmp_path, monkeypatch):
    for name in ("finals", "curves", "sensitivity", "batches", "spike"):
        monkeypatch.setattr(_plots, name, lambda *args: None)
    part = dict(list(rows.items())[:there])
    # Holes, as several workers leave them.
    part = {key: row for i, (key, row) in enumerate(part.items()) if i % 7 != 5}
    text = "\n\n".join(report.parts(part, SIZE, tmp_path, NO_TIMES))
    assert "Not finished" in text
    todo = text.split("## Not there yet")[1]
    for study in _studies.STUDIES:
        assert f"| {study} | {TASK} |" in todo
    if there == 1:
        assert "adamw 1 of 12" in todo


def test_a_search_shows_until_its_finals_do(rows):
    seeds = {key: row for key, row in rows.items() if row["config"]["seed"] == 0}
    assert "| `came` | 12 of 12 |" in _tables.searching(seeds, SIZE, TASK)
    assert _tables.searching(rows, SIZE, TASK) == ""
    assert _tables.searching({}, SIZE, TASK) == ""


def test_a_whole_report_and_its_pictures(rows, tmp_path):
    measured = {"ratios": {"came": [1.1, 1.2, 1.3]}, "about": "2 rounds."}
    text = "\n\n".join(report.parts(rows, SIZE, tmp_path, measured))
    assert "1.20 (1.10-1.30)" in text
    named = {part.split(")")[0] for part in text.split("](")[1:]}
    assert named == {path.name for path in tmp_path.iterdir()}
    assert len(named) == 5
    assert f"| tuning | {TASK} |" not in text
    assert "| tuning | masked | 0 of 9 |" in text


def test_pictures_of_what_diverged_or_is_missing(rows, tmp_path):
    """Every picture is drawn, whatever is in it."""
    broken = {
        key: {**row, "loss": None, "diverged": True, "curve": [(2, None)], "early_loss": [None]}
        for key, row in rows.items()
    }
    for some in (broken, dict(list(rows.items())[:30])):
        report.parts(some, SIZE, tmp_path, NO_TIMES)


def test_best_known_of_a_search_under_way(rows):
    assert _studies.best_known({}, SIZE, TASK, "came") == (
        {"learning_rate": 0.001, "weight_decay": 0.1, "b2": 0.999, "b3": 0.9999},
        0,
    )
    hyper, runs = _studies.best_known(dict(list(rows.items())[:5]), SIZE, TASK, "adamw")
    assert runs == 5
    assert hyper["learning_rate"] == 0.00316
    whole, runs = _studies.best_known(rows, SIZE, TASK, "adamw")
    assert (whole, runs) == (_studies.best(rows, SIZE, TASK, "adamw"), 12)


def reran(rows, loss_of):
    """Rerun rows of another text, with the losses of a function of the contender."""
    plans = [_studies.rerun(rows, {}, SIZE, name) for name in _studies.RERUN]
    fresh = [{**_made_up.row(plan.ready[0]), "corpus": 2} for plan in plans]
    return {row["key"]: {**row, "loss": loss_of(row["config"]["contender"])} for row in fresh}


def test_a_rerun_is_no_final(rows):
    fresh = reran(rows, lambda name: 1.0)
    assert not fresh.keys() & rows.keys()
    assert {row["config"]["seed"] for row in fresh.values()} == {4}
    before = _tables.losses(_summary.finals(rows, SIZE, TASK, FEW), {})
    assert _tables.losses(_summary.finals({**rows, **fresh}, SIZE, TASK, FEW), {}) == before
    assert _studies.rerun(rows, fresh, SIZE, "came").ready == []


def test_a_rerun_agrees_if_its_difference_does(rows):
    base = _summary.final(rows, SIZE, TASK, "adamw")
    # All losses 3 nats higher, as on another text, but CAME's 1 nat higher still.
    means = {name: _summary.final(rows, SIZE, TASK, name).losses.mean() for name in _studies.RERUN}
    fresh = reran(rows, lambda name: 3 + means[name] + (name == "came"))
    found = {one.name: one for one in _summary.reruns(rows, fresh, SIZE, _studies.RERUN)}
    assert {name: one.verdict for name, one in found.items()} == {
        "adamw": "-",
        "adafactor": "yes",
        "came": "no",
        "lamb": "yes",
        "muon": "yes",
    }
    want = means["came"] + 1 - base.losses.mean()
    assert found["came"].difference == pytest.approx(want)
    text = _tables.rerun(rows, fresh, SIZE)
    assert "another text" in text
    same = {key: {**row, "corpus": _made_up.CORPUS} for key, row in fresh.items()}
    assert "another text" not in _tables.rerun(rows, same, SIZE)


def test_a_rerun_without_committed_rows_stands_alone():
    fresh = reran({}, lambda name: 2.0)
    text = _tables.rerun({}, fresh, SIZE)
    assert text.count("| 0 of 12 | - | 2.000 | - |") == len(_studies.RERUN)


def test_the_large_model_takes_what_the_small_one_found(rows):
    configs = _studies.large_configs(rows, SIZE, "came")
    best = _studies.best(rows, SIZE, TASK, "came")
    assert [config["size"] for config in configs] == ["smoke_large"] * 3
    assert [config["hyper"]["learning_rate"] for config in configs] == pytest.approx(
        [times * best["learning_rate"] for times in (1, 10**-0.25, 10**-0.5)], rel=0.01
    )
    assert {config["layers"] for config in configs} == {_sizes.SIZES["smoke_large"].layers}
    assert all(_rows.key_of(config) in rows for config in configs)


def test_every_size_divides():
    for name, size in _sizes.SIZES.items():
        assert size.steps % 20 == 0, name
        assert size.width % (2 * size.heads) == 0, name
        assert size.curve_windows % size.slice == size.final_windows % size.slice == 0, name
