"""What a loss gets beside the parameters, and errors where jax's own do not say what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType

import sharding as shd

from .runs import zero_of

TX = optax.sgd(0.1)
BATCH = np.ones((8, 16), np.float32)


def make():
    params = {"w": jnp.linspace(-1.0, 1.0, 128).reshape(16, 8)}
    return params, TX.init(params)


def make_train_state():
    return TrainState.create(apply_fn=None, params=make()[0], tx=TX)


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


# --- Random keys ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "microbatches", "rngs", "state"),
    [
        ("flat", 1, True, "train state"),
        ("four", 2, True, "train state without a key"),
        ("torus", 1, "per_example", "pair"),
    ],
)
def test_keys_are_folded_by_step_and_number(mesh, microbatches, rngs, state):
    """The number of the micro-batch, or of the example, in the batch of all devices."""
    zero = zero_of(2, mesh)
    tx, init = (TX, make) if state == "pair" else (None, make_train_state)
    rows = 16 if rngs == "per_example" else zero.num_devices * microbatches

    def with_key(params, x, key):
        return loss_fn(params, x), jax.random.key_data(key.reshape(-1))

    step = zero.train_step(with_key, tx=tx, rngs=rngs, has_aux=True, microbatches=microbatches)
    current, x = zero.init(init, tx=tx), zero.put(np.ones((16, 16), np.float32))
    if state == "pair":
        with pytest.raises(ValueError, match="a pair needs a new key in each call"):
            step(current, x)
    for i in range(2):
        key = jax.random.key(0 if "without" in state else 7)
        current, metrics = step(current, x, *([] if "without" in state else [key]))
        of_step = key if state == "pair" else jax.random.fold_in(key, i)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(of_step, jnp.arange(rows))
        np.testing.assert_array_equal(metrics["aux"], jax.random.key_data(keys))


# --- Parameters -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [2, 3])
def test_accumulating_in_bfloat16_rounds_no_parameters(stage):
    zero = zero_of(stage, precision=shd.Precision(accumulate=jnp.bfloat16))

    def gathering(params, x):
        return loss_fn(zero.gather(params), x)

    params, _ = make()
    loss, grads = zero.value_and_grad(gathering)(params, BATCH)
    want, want_grads = jax.value_and_grad(loss_fn)(params, BATCH)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    np.testing.assert_allclose(grads["w"].astype(float), want_grads["w"], rtol=1e-2, atol=1e-6)


# --- Errors that say what to do -------------------------------------------------------------------


def test_a_closure_over_an_array_on_an_explicit_mesh():
    zero = zero_of(2, "four", AxisType.Explicit)
    table = zero.replicate(jnp.linspace(0.0, 1.0, 8))
    state, x = zero.abstract_state(make, tx=TX), zero.put(BATCH)
    step = zero.train_step(lambda params, x: loss_fn(params, x) * table.sum(), tx=TX)
    with pytest.raises(ValueError, match=r"closes over an array .* model_state"):
        step.lower(state, x)
    # What the error says to do.
    given = zero.train_step(
        lambda params, x, table: (loss_fn(params, x) * table.sum(), table), tx=TX, model_state=True
    )
    given.lower(state, x, model_state=table)


def test_without_compiling():
    zero = zero_of(2, "four")
    state, x = zero.init(make, tx=TX), zero.put(BATCH)
    step = zero.train_step(loss_fn, tx=TX)
    with jax.disable_jit():
        for call in (lambda: step(state, x), lambda: zero.init(make, tx=TX)):
            with pytest.raises(ValueError, match=r"do not run under jax\.disable_jit"):
                call()
        with jax.disable_jit(False):
            step(state, x)
