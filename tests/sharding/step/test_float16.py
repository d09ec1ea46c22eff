"""float16 gradients: sums over devices do not overflow."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sharding as shd

from .. import model

WIDTH, GRADIENT = 64, 20_000.0  # of each device: the sum over 8 is beyond 65,504
SGD = optax.sgd(1e-4)
make_state = model.make_of(lambda: {"w": np.zeros((WIDTH, WIDTH), np.float16)}, SGD)


def losses(params, batch):
    rows = params["w"][None] * batch.astype(jnp.float16)[:, None, None]
    return jnp.sum(rows, (1, 2)).astype(jnp.float32)


def mean(params, batch):
    return jnp.mean(losses(params, batch))


def weighted(params, batch):
    return jnp.sum(losses(params, batch)), jnp.float32(len(batch))


@pytest.mark.parametrize(
    ("stage", "fn", "microbatches", "options"),
    [
        (0, mean, 1, {}),
        (1, weighted, 2, {}),
        (2, mean, 4, {}),
        (2, weighted, 1, {"precision": shd.Precision(reduce=jnp.float32)}),
        (3, weighted, 2, {}),
        (3, mean, 1, {"sync": shd.sync.dense()}),
    ],
)
@pytest.mark.filterwarnings("ignore:stage 3 with a loss that gathers no layer")
def test_sums_do_not_overflow(stage, fn, microbatches, options):
    zero = model.zero_on(8, stage=stage, **options)
    state = zero.init(make_state, tx=SGD)
    settings = {"weighted": fn is weighted, "microbatches": microbatches, "grad_norm": True}
    step = zero.train_step(fn, tx=SGD, **settings)
    state, metrics = step(state, zero.put(np.full(32, GRADIENT)))
    np.testing.assert_allclose(state[0]["w"], -1e-4 * GRADIENT, rtol=2**-9)
    np.testing.assert_allclose(metrics["grad_norm"], WIDTH * GRADIENT, rtol=2**-9)
    assert metrics["loss"] == 0
