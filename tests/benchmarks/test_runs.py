"""A run of the comparison is a plain loop with static hyperparameters."""

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

HYPER = {"learning_rate": 0.00316, "weight_decay": 0.1, **_contenders.CONTENDERS["came"].betas[0]}
# With one layer, which compiles sooner.
CAME = {**_sizes.config("smoke", "next_token", "came", 0, HYPER), "layers": 1}


def plain_losses(config, text):
    """One step after the other, with hyperparameters that are Python's numbers."""
    task, corpus = TASKS[config["task"]], Corpus(text, config["context"])
    model = _sizes.model(config)
    params = _models.init(model, config["seed"], task.encoder_decoder)
    contender = _contenders.EVERY[config["contender"]]
    tx = _contenders.transformation(contender, config["hyper"], config["warmup"], config["steps"])

    @jax.jit
    def step(params, state, batch):
        loss_of = jax.value_and_grad(lambda p: _models.loss_fn(model, p, batch, task.causal))
        loss, grads = loss_of(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = jax.jit(tx.init)(params), []
    for i in range(config["steps"]):
        batch = task.batch(corpus, config["seed"], i, config["batch"])
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return losses


@pytest.mark.slow
def test_traced_hyperparameters_equal_static_ones(text):
    row = _runs.Trainer(text).run(CAME)
    np.testing.assert_allclose(row["early_loss"], plain_losses(CAME, text), rtol=2e-4)
    assert not row["diverged"]
    assert row["loss"] < row["curve"][0][1]
