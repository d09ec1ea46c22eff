"""A run of the comparison: the same as a plain loop with static hyperparameters."""

import _contenders
import _models
import _runs
import _sizes
import jax
import numpy as np
import optax
import pytest
from _corpus import Corpus
from _tasks import TASKS

HYPER = {"learning_rate": 0.00316, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(b"".join(b"def f%d(x): return x + %d\n" % (i, i % 7) for i in range(2000)))
    return path


def config(contender, task="next_token", seed=0, **hyper):
    betas = _contenders.CONTENDERS[contender].betas[0]
    return _sizes.config("smoke", task, contender, seed, {**HYPER, **betas, **hyper})


def plain_losses(config, text):
    """One step after the other, with hyperparameters that are Python's numbers."""
    task, corpus = TASKS[config["task"]], Corpus(text, config["context"])
    model = _sizes.model(config)
    params = _models.init(model, config["seed"], task.encoder_decoder)
    tx = _contenders.transformation(
        config["contender"], config["hyper"], config["warmup"], config["steps"]
    )

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(lambda p: _models.loss_fn(model, p, batch, task.causal))(
            params
        )
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = tx.init(params), []
    for i in range(config["steps"]):
        batch = task.batch(corpus, config["seed"], i, config["batch"])
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("contender", ["adamw", "adafactor", "came", "lamb", "muon", "lion"])
def test_traced_hyperparameters_equal_static_ones(contender, text):
    wanted = config(contender)
    row = _runs.Trainer(text).run(wanted)
    np.testing.assert_allclose(row["early_loss"], plain_losses(wanted, text), rtol=2e-4)
    assert not row["diverged"]
    assert row["loss"] < row["curve"][0][1]


@pytest.mark.parametrize("task", ["masked", "span_corruption"])
def test_other_tasks_are_learned(task, text):
    row = _runs.Trainer(text).run(config("adamw", task, learning_rate=0.01))
    assert row["loss"] < row["early_loss"][0] - 1


def test_one_program_runs_all_learning_rates_and_seeds(text):
    trainer = _runs.Trainer(text)
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


def test_a_run_that_diverges_says_so(text):
    row = _runs.Trainer(text).run(config("adamw", learning_rate=1e30))
    assert row["diverged"]
    assert row["loss"] is None
