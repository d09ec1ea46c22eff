"""A run of the comparison: the same as a plain loop with static hyperparameters."""

import math

import _checkpoints
import _contenders
import _made_up
import _models
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


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("contender", ["adamw", "adafactor", "came", "lamb", "muon", "lion"])
def test_traced_hyperparameters_equal_static_ones(contender, text, trainer):
    wanted = config(contender)
    row = trainer.run(wanted)
    np.testing.assert_allclose(row["early_loss"], plain_losses(wanted, text), rtol=2e-4)
    assert not row["diverged"]
    assert row["loss"] < row["curve"][0][1]


@pytest.mark.parametrize("task", ["masked", "span_corruption"])
def test_other_tasks_are_learned(task, trainer):
    row = trainer.run(config("adamw", task, learning_rate=0.01))
    assert row["loss"] < row["early_loss"][0] - 1


def test_one_program_runs_all_learning_rates_and_seeds(trainer):
    first, same, other = (
        config("came"),
        config("came", seed=1, learning_rate=0.1, weight_decay=0.0),
        config("came", b3=0.995),
    )
    assert trainer.program(first) is trainer.program(same)
    assert trainer.program(first) is not trainer.program(other)
    rows = [trainer.run(one) for one in (first, same)]
    assert trainer.program(first).train._cache_size() == 1
    assert rows[0]["loss"] != rows[1]["loss"]


def test_a_run_that_diverges_says_so(trainer):
    row = trainer.run(config("adamw", learning_rate=1e30))
    assert row["diverged"]
    assert row["loss"] is None
    assert row.keys() == _made_up.row(row["config"]).keys()


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


@pytest.mark.parametrize("contender", ["came_8bit", "muon"])
def test_all_kinds_of_state_are_restored(contender, trainer, tmp_path):
    state = initial(trainer, config(contender))
    saved = _checkpoints.Checkpoints(tmp_path / "run")
    saved.save(2, state, {"loss": [0.1, 1 / 3]})
    zeros = jax.tree.map(jax.numpy.zeros_like, state)
    again, log = saved.restore(zeros, {})
    jax.tree.map(np.testing.assert_array_equal, state, again)
    assert log == {"loss": [0.1, 1 / 3]}


def initial(trainer, config):
    params = _models.init(_sizes.model(config), config["seed"])
    return trainer.program(config).init(params, traced_of(config))


def traced_of(config):
    return {name: jax.numpy.float32(config["hyper"][name]) for name in _runs.TRACED}


def test_a_size_that_resumes_computes_in_16_bits(text):
    model = _sizes.model({**config("adamw"), "size": "gpu"})
    params = _models.init(model, 0)
    batch = TASKS["next_token"].batch(Corpus(text, 32), 0, 0, 4)
    graph = str(jax.make_jaxpr(lambda p: _models.loss_fn(model, p, batch, True))(params))
    products = [line for line in graph.splitlines() if "dot_general" in line]
    assert products
    assert all("bf16" in line.split("=")[0] for line in products)
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"float32"}
