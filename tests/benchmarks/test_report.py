"""The reports: right numbers from made-up rows."""

import _contenders
import _long_report
import _made_up
import _studies
import _summary
import _tables
import jax
import numpy as np
import pytest
from scipy import stats

import optax_ext

SIZE, TASK = "smoke", "next_token"


@pytest.fixture(scope="module")
def rows():
    return _made_up.rows(SIZE)


def finals(rows):
    return _summary.finals(rows, SIZE, TASK)


def test_intervals_hold_what_they_say():
    """Of 2,000 made-up comparisons, 95 % hold the true difference, and one further seed's."""
    rng, n = np.random.default_rng(0), 3
    inside = further = 0
    for _ in range(2000):
        seeds = rng.normal(size=n + 1)  # what all contenders have in common
        losses = np.arange(5.0)[:, None] + seeds + 0.1 * rng.normal(size=(5, n + 1))
        runs = list(losses[:, :n])
        found = (losses[4] - losses[0])[:n].mean()
        inside += abs(found - 4) <= _summary.half_width(runs)
        rest = losses[4, n] - losses[0, n] - found
        further += abs(rest) <= _summary.half_width(runs, further=True)
    assert 0.935 < inside / 2000 < 0.965
    assert 0.935 < further / 2000 < 0.965
    # Of 8 degrees of freedom; wider for a mean over fewer seeds.
    left = losses[:, :n] - losses[:, :n].mean(0)
    left -= left.mean(1, keepdims=True)
    want = stats.t.ppf(0.975, 8) * np.sqrt((left**2).sum() / 8 * 2 / n)
    assert _summary.half_width(runs) == pytest.approx(want)
    assert _summary.half_width(runs, seeds=1) == pytest.approx(want * n**0.5)
    assert _summary.half_width(runs[:1]) is None


def test_differences_are_taken_seed_by_seed(rows):
    found = finals(rows)
    one, base = found["came"].rows, found["adamw"].rows
    want = [one[s]["loss"] - base[s]["loss"] for s in (1, 2, 3)]
    assert _summary.difference(found, "came").mean == pytest.approx(np.mean(want))
    # A seed that one of them lacks is left out, here and of the width of the interval.
    less = finals({key: row for key, row in rows.items() if key != one[2]["key"]})
    got = _summary.difference(less, "came")
    assert got.mean == pytest.approx((want[0] + want[2]) / 2)
    whole = [of.losses for name, of in found.items() if name != "came"]
    assert got.half_width == pytest.approx(_summary.half_width(whole, 2))
    lost = {key: {**row, "diverged": row["key"] == one[2]["key"]} for key, row in rows.items()}
    assert _summary.difference(finals(lost), "came") is None


def test_growth_is_what_debiasing_takes_away():
    """Updates of CAME as published and debiased differ by a factor alone; this is its mean."""
    steps, warmup, b3 = 40, 4, 0.99
    pair = [optax_ext.scale_by_came(b3=b3, debias_instability=debias) for debias in (False, True)]
    rng, rate = np.random.default_rng(0), _contenders.schedule(1.0, warmup, steps)
    params = np.ones((8, 8), np.float32)
    grads = rng.normal(size=(steps, *params.shape)).astype(np.float32)

    @jax.jit
    def updates_of(grads):
        def step(states, g):
            found = [tx.update(g, s, params) for tx, s in zip(pair, states, strict=True)]
            updates, states = zip(*found, strict=True)
            return states, updates

        return jax.lax.scan(step, tuple(tx.init(params) for tx in pair), grads)[1]

    large, small = updates_of(grads)
    factors = np.median(np.asarray(large) / np.asarray(small), axis=(1, 2))
    weights = [float(rate(i)) for i in range(steps)]
    got = _contenders.growth({"steps": steps, "warmup": warmup, "hyper": {"b3": b3}})
    assert got == pytest.approx(np.average(factors, weights=weights), rel=1e-4)


def test_a_rerun_agrees_if_its_difference_does(rows):
    # All losses 3 nats higher, as on another text, but CAME's 1 nat higher still.
    known, fresh = finals(rows), {}
    means = {name: known[name].losses.mean() for name in _studies.RERUN}
    for name, mean in means.items():
        row = _made_up.row(_studies.rerun(rows, SIZE, name))
        fresh[row["key"]] = {**row, "corpus": 2, "loss": 3 + mean + (name == "came")}
    text = _tables.rerun(rows, fresh, SIZE)
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if "`" in line]
    verdicts = {"adamw": "-", "adafactor": "yes", "came": "no", "lamb": "yes", "muon": "yes"}
    assert {line[0].strip("`"): line[-1] for line in cells} == verdicts
    want = means["came"] + 1 - means["adamw"]
    assert [line[-2] for line in cells if line[0] == "`came`"] == [f"{want:+.3f}"]
    assert "another text" in text
    same = {key: {**row, "corpus": _made_up.CORPUS} for key, row in fresh.items()}
    assert "another text" not in _tables.rerun(rows, same, SIZE)


def test_differences_of_lengths_and_their_contrasts():
    found = _long_report.finals(_made_up.long_rows(SIZE), SIZE, "masked")
    one, base = (found[80][name].rows for name in ("came", "adamw"))
    want = [one[seed]["loss"] - base[seed]["loss"] for seed in (1, 2, 3)]
    assert _long_report.difference(found, 80, "came").mean == pytest.approx(np.mean(want))
    text = _long_report._contrasts(found)
    line = next(line for line in text.splitlines() if line.startswith("| debiasing |"))
    assert "`came_debiased` minus `came`" in line
    debiasing = _long_report.difference(found, 40, "came_debiased", "came")
    assert f"{debiasing.mean:+.3f} (" in line
