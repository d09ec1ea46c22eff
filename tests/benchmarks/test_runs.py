"""A run of the comparison is a plain loop with static hyperparameters; GPT-2 small is that."""

import math

import _checkpoints
import _contenders
import _gpt2
import _made_up
import _models
import _rows
import _runs
import _sizes
import jax
import numpy as np
import optax
import pytest
from _corpus import Corpus
from _every import EVERY
from _tasks import TASKS

HYPER = {"learning_rate": 0.00316, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(b"".join(b"def f%d(x): return x + %d\n" % (i, i % 7) for i in range(2000)))
    return path


@pytest.fixture(scope="module")
def trainer(text):
    """One for all tests: none compiles what another has."""
    return _runs.Trainer(text, programs=20)


def config(contender, task="next_token", seed=0, **hyper):
    betas = _contenders.CONTENDERS[contender].betas[0]
    one = _sizes.config("smoke", task, contender, seed, {**HYPER, **betas, **hyper})
    # A layer less to compile; an encoder-decoder needs both.
    return one if task == "span_corruption" else {**one, "layers": 1}


def plain_losses(config, text):
    """One step after the other, with hyperparameters that are Python's numbers."""
    task, corpus = TASKS[config["task"]], Corpus(text, config["context"])
    model = _sizes.model(config)
    params = _models.init(model, config["seed"], task.encoder_decoder)
    tx = _contenders.transformation(
        EVERY[config["contender"]], config["hyper"], config["warmup"], config["steps"]
    )

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(lambda p: _models.loss_fn(model, p, batch, task.causal))(
            params
        )
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = jax.jit(tx.init)(params), []
    for i in range(config["steps"]):
        batch = task.batch(corpus, config["seed"], i, config["batch"])
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return losses


MORE = ("adamw", "adafactor", "lamb", "muon", "lion")


@pytest.mark.parametrize(
    "contender", ["came", *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_traced_hyperparameters_equal_static_ones(contender, text, trainer):
    wanted = config(contender)
    row = trainer.run(wanted)
    np.testing.assert_allclose(row["early_loss"], plain_losses(wanted, text), rtol=2e-4)
    assert not row["diverged"]
    assert row["loss"] < row["curve"][0][1]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["masked", "span_corruption"])
def test_other_tasks_are_learned(task, trainer):
    row = trainer.run(config("adamw", task, learning_rate=0.01))
    assert row["loss"] < row["early_loss"][0] - 1


def test_one_program_runs_all_learning_rates_and_seeds(trainer):
    first, other = config("came"), config("came", b3=0.995)
    same = config("came", seed=1, learning_rate=1e30, weight_decay=0.0)
    assert trainer.program(first) is trainer.program(same)
    assert trainer.program(first) is not trainer.program(other)
    row = trainer.run(same)
    assert trainer.program(first).train._cache_size() == 1
    # A run that diverges has every field, too.
    assert row["diverged"]
    assert row["loss"] is None
    assert row.keys() == _made_up.row(same).keys()


def test_an_interrupted_run_goes_on_bit_for_bit(trainer, tmp_path):
    wanted = config("came")
    whole = trainer.run(wanted)
    saved = _checkpoints.Checkpoints(tmp_path / "run")
    for _ in range(2):  # stopped after a twentieth, then after another
        assert trainer.run(wanted, saved, until=-math.inf) is None
    _, log = saved.restore(initial(trainer, wanted), {})
    assert len(log["loss"]) == 2 * wanted["steps"] // _runs.POINTS
    row = trainer.run(wanted, saved)
    differ = {name for name in row if row[name] != whole[name]}
    assert differ <= {"seconds", "cpu_seconds", "date"}
    saved.delete()
    assert not list(tmp_path.iterdir())


def initial(trainer, config):
    params = _models.init(_sizes.model(config), config["seed"])
    traced = {name: jax.numpy.float32(config["hyper"][name]) for name in _runs.TRACED}
    return trainer.program(config).init(params, traced)


@pytest.mark.slow
@pytest.mark.parametrize("contender", ["came_8bit", "muon"])
def test_all_kinds_of_state_are_restored(contender, trainer, tmp_path):
    state = initial(trainer, config(contender))
    saved = _checkpoints.Checkpoints(tmp_path / "run")
    saved.save(2, state, {"loss": [0.1, 1 / 3]})
    again, log = saved.restore(jax.tree.map(jax.numpy.zeros_like, state), {})
    jax.tree.map(np.testing.assert_array_equal, state, again)
    assert log == {"loss": [0.1, 1 / 3]}


def test_a_size_that_resumes_computes_in_16_bits(text):
    model = _sizes.model({**config("adamw"), "size": "gpu"})
    params = jax.eval_shape(lambda: _models.init(model, 0))
    batch = TASKS["next_token"].batch(Corpus(text, 32), 0, 0, 4)
    graph = str(jax.make_jaxpr(lambda p: _models.loss_fn(model, p, batch, True))(params))
    products = [line for line in graph.splitlines() if "dot_general" in line]
    assert products
    assert all("bf16" in line.split("=")[0] for line in products)
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"float32"}


# --- GPT-2 small ----------------------------------------------------------------------------------

SIZE = "smoke_gpt2"


def gpt2_row(config, **fields):
    return {**_made_up.row(config), "tokens_per_second": 1e5, "peak_bytes": 3 * 2**30, **fields}


def test_it_has_the_parameters_of_gpt2_small():
    model = _sizes.model(_gpt2.config("gpt2_small", "adamw", -3.0))
    shapes = jax.tree.leaves(jax.eval_shape(lambda: _models.init(model, 0)))
    assert 123e6 < sum(x.size for x in shapes) < 125e6


def test_every_contender_has_a_run_before_any_has_a_second_one():
    plans = list(_gpt2.plans({}, SIZE))
    assert [plan.name.split()[0] for plan in plans[:4]] == list(_gpt2.CONTENDERS)
    assert len({_rows.key_of(plan.ready[0]) for plan in plans}) == 12
    done = plans[0].ready[0]
    again = list(_gpt2.plans({_rows.key_of(done): gpt2_row(done)}, SIZE))
    assert [len(plan.ready) for plan in again] == [0] + [1] * 11


def test_the_table_is_of_the_best_learning_rate_and_says_what_is_missing():
    configs = [_gpt2.config(SIZE, "came_debiased", exponent) for exponent in (-3.0, -2.75)]
    rows = {
        _rows.key_of(one): gpt2_row(one, loss=loss, diverged=False, tokens_per_second=speed)
        for one, loss, speed in zip(configs, (2.0, 1.5), (1e5, 2e5), strict=True)
    }
    text = _gpt2.report(rows, SIZE)
    assert "| `came_debiased` | 1.500 | 0.00178 | 0.001: 2.000, 0.00178: 1.500 | 2 of 3 |" in text
    assert "| 200,000 | 3.00 |" in text
    assert "**Not there yet**: adamw at 1e-3," in text


@pytest.mark.slow
def test_blocks_that_run_again_compute_the_same(text):
    batch = TASKS["next_token"].batch(Corpus(text, 32), 0, 0, 4)
    values = {}
    for remat in (False, True):
        model = _models.Config(2, 32, 2, 512, remat=remat)
        fn = jax.value_and_grad(lambda p, m=model: _models.loss_fn(m, p, batch, True))
        params = _models.init(model, 0)
        values[remat] = jax.jit(fn)(params)
        graph = str(jax.make_jaxpr(fn)(params))
        assert ("remat" in graph or "checkpoint" in graph) == remat
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *values.values())


@pytest.mark.slow
def test_rows_with_speed_have_the_others_and_two_more(text):
    config = {**_gpt2.config(SIZE, "came_debiased_8bit", -3.0), "layers": 1}
    got = _runs.Trainer(text, speed=True).run(config)
    assert got.keys() - _made_up.row(config).keys() == {"tokens_per_second", "peak_bytes"}
    assert got["tokens_per_second"] > 0
    assert got["peak_bytes"] is None or got["peak_bytes"] > 0
