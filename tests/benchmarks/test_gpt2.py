"""GPT-2 small: its shape, the order of its runs, and a table that measures what it says."""

import _gpt2
import _made_up
import _models
import _rows
import _runs
import _sizes
import jax
import numpy as np
import pytest
from _corpus import Corpus
from _tasks import TASKS

SIZE = "smoke_gpt2"


def row(config, **fields):
    return {**_made_up.row(config), "tokens_per_second": 1e5, "peak_bytes": 3 * 2**30, **fields}


def test_it_has_the_parameters_of_gpt2_small():
    model = _sizes.model(_gpt2.config("gpt2_small", "adamw", -3.0))
    sizes = [x.size for x in jax.tree.leaves(_models.init(model, 0))]
    assert 123e6 < sum(sizes) < 125e6


def test_every_contender_has_a_run_before_any_has_a_second_one():
    plans = list(_gpt2.plans({}, SIZE))
    assert [plan.name.split()[0] for plan in plans[:4]] == list(_gpt2.CONTENDERS)
    assert len({_rows.key_of(plan.ready[0]) for plan in plans}) == 12
    done = plans[0].ready[0]
    again = list(_gpt2.plans({_rows.key_of(done): row(done)}, SIZE))
    assert [len(plan.ready) for plan in again] == [0] + [1] * 11


def test_the_table_is_of_the_best_learning_rate_and_says_what_is_missing():
    configs = [_gpt2.config(SIZE, "came_debiased", exponent) for exponent in (-3.0, -2.75)]
    rows = {
        _rows.key_of(one): row(one, loss=loss, diverged=False, tokens_per_second=speed)
        for one, loss, speed in zip(configs, (2.0, 1.5), (1e5, 2e5), strict=True)
    }
    text = _gpt2.report(rows, SIZE)
    assert "| `came_debiased` | 1.500 | 0.00178 | 0.001: 2.000, 0.00178: 1.500 | 2 of 3 |" in text
    assert "| 200,000 | 3.00 |" in text
    assert "**Not there yet**: adamw at 1e-3," in text


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(b"".join(b"def f%d(x): return x + %d\n" % (i, i % 7) for i in range(2000)))
    return path


def test_blocks_that_run_again_compute_the_same(text):
    batch = TASKS["next_token"].batch(Corpus(text, 32), 0, 0, 4)
    values = {}
    for remat in (False, True):
        model = _models.Config(2, 32, 2, 512, remat=remat)
        params = _models.init(model, 0)
        found = jax.value_and_grad(lambda p, m=model: _models.loss_fn(m, p, batch, True))(params)
        values[remat] = found
        graph = str(jax.make_jaxpr(lambda p, m=model: _models.loss_fn(m, p, batch, True))(params))
        assert ("remat" in graph or "checkpoint" in graph) == remat
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *values.values())


def test_rows_with_speed_have_the_others_and_two_more(text):
    config = {**_gpt2.config(SIZE, "came_debiased_8bit", -3.0), "layers": 1}
    got = _runs.Trainer(text, speed=True).run(config)
    assert got.keys() - _made_up.row(config).keys() == {"tokens_per_second", "peak_bytes"}
    assert got["tokens_per_second"] > 0
    assert got["peak_bytes"] is None or got["peak_bytes"] > 0
