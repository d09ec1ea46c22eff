"""The study of formats: runs that differ in rounding alone, and what is reported of them."""

import _format_report
import _format_study
import _formats
import _lengths
import _made_up
import _rows
import _runs
import _sizes
import jax
import jax.numpy as jnp
import length_study
import numpy as np
import optax
import pytest

SIZE = "smoke"


@pytest.fixture(scope="module")
def rows():
    return _made_up.length_rows(SIZE)


def test_a_format_differs_from_float32_in_its_name_alone(rows):
    assert len(_formats.FORMATS) == 2 * (2 * 3 + 3)
    for name in ("came_4bit_nearest", "adamw_bf16_master"):
        cell = _lengths.cell(rows, SIZE, "next_token", _formats.FORMATS[name].parent, 80)
        got = _format_study.configs(rows, SIZE, name)
        assert [config["seed"] for config in got] == [1, 2, 3]
        for config, parent in zip(got, cell.finals, strict=True):
            assert {**config, "contender": parent["contender"]} == parent
            assert config["contender"] == name


def test_formats_wait_for_their_optimizer_and_end_seed_by_seed(rows):
    plans = list(_format_study.plans({}, SIZE))
    assert len(plans) == 3 * len(_formats.FORMATS)
    assert all(not plan.ready and plan.waits for plan in plans)
    parents = ("adamw", "came")
    some = {key: row for key, row in rows.items() if row["config"]["contender"] in parents}
    ready = [config for plan in _format_study.plans(some, SIZE) for config in plan.ready]
    seeds = [config["seed"] for config in ready]
    assert seeds == sorted(seeds)
    assert len(ready) == len(plans)


def test_formats_are_run_before_longer_runs():
    lengths, formats = (list(study.plans({}, "cpu")) for study in (_lengths, _format_study))
    order = length_study.in_order(lengths, formats, _format_study.STEPS["cpu"])
    assert len(order) == len(lengths) + len(formats)
    names = [plan.name for plan in order]
    first, last = (names.index(plan.name) for plan in (formats[0], formats[-1]))
    assert names[first - 1].startswith("3000 steps")
    assert names[last + 1].startswith("10000 steps")


def test_drift_is_the_difference_to_the_same_seed(rows):
    name = "adamw_8bit_nearest"
    got = _format_study.drift(rows, SIZE, name)
    one = _format_study.configs(rows, SIZE, name)
    other = _lengths.cell(rows, SIZE, "next_token", "adamw", 80).finals
    losses = [[rows[_rows.key_of(config)]["loss"] for config in of] for of in (one, other)]
    np.testing.assert_allclose(got.end, np.subtract(*losses))
    assert got.curve.shape == (3, 20)
    assert got.early[0] == 12  # 15 % of 80 steps


def test_a_report_names_what_diverged_and_what_is_missing(rows, tmp_path):
    name = "came_4bit_nearest"
    key = _rows.key_of(_format_study.configs(rows, SIZE, name)[0])
    broken = {**rows, key: {**rows[key], "loss": None, "diverged": True}}
    del broken[_rows.key_of(_format_study.configs(rows, SIZE, "adamw_8bit_nearest")[2])]
    text = "\n\n".join(_format_report.parts(broken, SIZE, tmp_path))
    assert f"Diverged: `{name}`." in text
    assert "**Not there yet**: seed 3: adamw_8bit_nearest." in text
    assert all(f"| `{name}` |" in text for name in _formats.FORMATS)
    assert _format_report.parts({}, SIZE, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16_master", "bf16_stochastic", "bf16_nearest"])
def test_bfloat16_parameters_stay_so_and_train(name):
    hyper = {"learning_rate": 0.01, "weight_decay": 0.1, "b2": 0.999}
    config = {**_sizes.config(SIZE, "next_token", f"adamw_{name}", 0, hyper), "layers": 1}
    row = _runs.Trainer().run(config)
    assert not row["diverged"]
    assert row["loss"] < row["curve"][0][1]
    traced = {k: jnp.float32(hyper[k]) for k in _runs.TRACED}
    weights = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    params, _ = jax.eval_shape(_runs.Program(config).init, weights, traced)
    assert params["w"].dtype == jnp.bfloat16


def test_only_the_nearest_rounding_loses_small_steps():
    """A hundred steps of a quarter of the spacing of bfloat16."""

    @jax.jit
    def trained():
        found = {}
        for name, wrap in _formats.PARAMS.items():
            tx, params = wrap(optax.sgd(2.0**-10)), jnp.ones(1000, jnp.bfloat16)

            def step(_, carry, tx=tx):
                params, state = carry
                updates, state = tx.update(jnp.ones_like(params), state, params)
                return optax.apply_updates(params, updates), state

            params, _ = jax.lax.fori_loop(0, 100, step, (params, tx.init(params)))
            found[name] = 1 - params.astype(jnp.float32).mean()
        return found

    moved = trained()
    assert moved["bf16_nearest"] == 0
    assert moved["bf16_master"] == pytest.approx(100 / 1024, abs=2e-3)
    assert moved["bf16_stochastic"] == pytest.approx(100 / 1024, abs=5e-3)
