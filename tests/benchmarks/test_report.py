"""The reports: right numbers from made-up rows."""

import _contenders
import _growth
import _length_summary
import _length_tables
import _made_up
import _studies
import _summary
import _tables
import jax
import numpy as np
import pytest

import optax_ext

SIZE, TASK = "smoke", "next_token"


@pytest.fixture(scope="module")
def rows():
    return _made_up.rows(SIZE)


def final(rows, contender):
    return _summary.final(rows, SIZE, TASK, contender)


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


def test_differences_are_taken_seed_by_seed(rows):
    one, base = final(rows, "came"), final(rows, "adamw")
    want = [one.rows[s]["loss"] - base.rows[s]["loss"] for s in (1, 2, 3)]
    np.testing.assert_allclose(_summary.difference(one, base), want)
    # A seed that one of them lacks is left out.
    less = {key: row for key, row in rows.items() if key != one.rows[2]["key"]}
    found = _summary.difference(final(less, "came"), base)
    np.testing.assert_allclose(found, [want[0], want[2]])


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
    got = _growth.growth({"steps": steps, "warmup": warmup, "hyper": {"b3": b3}})
    assert got == pytest.approx(np.average(factors, weights=weights), rel=1e-4)


def test_a_rerun_agrees_if_its_difference_does(rows):
    # All losses 3 nats higher, as on another text, but CAME's 1 nat higher still.
    means, fresh = {name: final(rows, name).losses.mean() for name in _studies.RERUN}, {}
    for name, mean in means.items():
        row = _made_up.row(_studies.rerun(rows, {}, SIZE, name).ready[0])
        fresh[row["key"]] = {**row, "corpus": 2, "loss": 3 + mean + (name == "came")}
    found = {one.name: one for one in _summary.reruns(rows, fresh, SIZE, _studies.RERUN)}
    verdicts = {"adamw": "-", "adafactor": "yes", "came": "no", "lamb": "yes", "muon": "yes"}
    assert {name: one.verdict for name, one in found.items()} == verdicts
    want = means["came"] + 1 - means["adamw"]
    assert found["came"].difference == pytest.approx(want)
    assert "another text" in _tables.rerun(rows, fresh, SIZE)
    same = {key: {**row, "corpus": _made_up.CORPUS} for key, row in fresh.items()}
    assert "another text" not in _tables.rerun(rows, same, SIZE)


def test_differences_of_lengths_and_their_contrasts():
    long_rows = _made_up.length_rows(SIZE)
    every = _length_summary.every(long_rows, SIZE, "masked")
    point = _length_summary.points(every, "came", "adamw")[1]
    one, base = (
        _length_summary.final(long_rows, SIZE, "masked", name, 80).rows
        for name in ("came", "adamw")
    )
    want = [one[seed]["loss"] - base[seed]["loss"] for seed in (1, 2, 3)]
    assert (point.steps, point.seeds) == (80, 3)
    assert point.mean == pytest.approx(np.mean(want))
    text = _length_tables.contrasts(every, SIZE)
    line = next(line for line in text.splitlines() if line.startswith("| debiasing |"))
    assert "`came_debiased` minus `came`" in line
    debiasing = _length_summary.points(every, "came_debiased", "came")[0]
    assert f"{debiasing.mean:+.3f} (" in line
