"""PipeMare's corrections against plain NumPy recursions, in float64 over hundreds of steps."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from optax_ext import discrepancy_correction

NUM_STEPS = 300

x64 = pytest.mark.usefixtures("x64")


@x64
def test_the_division_by_hand():
    """Delays below 1 divide nothing; beyond the annealing no delay does; one is traced."""
    delays, anneal_steps = np.array([6.5, 1.0, 0.25, 0.0]), 40
    params = jnp.zeros((4, 3))
    tx = optax.inject_hyperparams(optax_ext.scale_by_delay)(jnp.asarray(delays), anneal_steps)
    state, step = tx.init(params), jax.jit(tx.update)
    for k, g in enumerate(np.random.default_rng(2).normal(size=(NUM_STEPS, 4, 3))):
        have, state = step(jnp.asarray(g), state)
        power = max(1 - k / anneal_steps, 0)
        want = g / np.array([6.5**power, 1.0, 1.0, 1.0])[:, None]
        np.testing.assert_allclose(have, want, rtol=1e-12)


@x64
def test_the_correction_by_hand():
    """Without a delay there is no correction; delays are traced."""
    rng = np.random.default_rng(1)
    updates = rng.normal(size=(NUM_STEPS, 3, 2))
    delays = np.array([6.0, 0.25, 0.0])
    tx = optax.inject_hyperparams(discrepancy_correction)(jnp.asarray(delays), 0.3)
    params = jnp.zeros((3, 2))
    state, step = tx.init(params), jax.jit(tx.update)
    delta = np.zeros((3, 2))
    for u in updates:
        out, state = step(jnp.asarray(u), state)
        np.testing.assert_array_equal(out, u)
        for i, n in enumerate(delays):
            gamma = 0.3 ** (1 / n) if n else 0.0
            delta[i] = gamma * delta[i] + (1 - gamma) * u[i]
        want = 7.0 - delays[:, None] * delta
        np.testing.assert_allclose(optax_ext.backward_params(params + 7, state), want, rtol=1e-12)
    np.testing.assert_array_equal(optax_ext.backward_params(params, state)[2], params[2])


def test_an_average_over_long_delays_does_not_lose_its_weight():
    """In float32, 1 - decay ** (1 / 20000) has four digits if it is computed as written."""
    tx = discrepancy_correction(20_000.0)
    state = tx.init(jnp.zeros(()))
    _, state = tx.update(jnp.ones(()), state)
    np.testing.assert_allclose(state.correction, -20_000 * np.expm1(-2 / 20_000), rtol=1e-6)


PARAMS = {"w": jnp.ones((6, 4)), "b": jnp.ones(4)}
LAST = discrepancy_correction(2.0)
UPDATED = LAST.update(PARAMS, LAST.init(PARAMS))[1]
NARROW, TURNED = {"w": PARAMS["w"]}, PARAMS | {"w": jnp.ones((4, 6))}
ERRORS = {
    r"delays must not be negative, got -1\.0": lambda: discrepancy_correction(-1.0),
    "delays must be a number or an array, got True": lambda: discrepancy_correction({"w": True}),
    r"an array of shape \(4,\) for parameter 'w' of shape \(6, 4\)": (
        lambda: discrepancy_correction(np.ones(4)).init(PARAMS)
    ),
    # States of other transformations.
    r"reads the state of discrepancy_correction, .* none": (
        lambda: optax_ext.backward_params(PARAMS, ())
    ),
    "one state of discrepancy_correction for each parameter, found several": (
        lambda: optax_ext.backward_params(PARAMS, (UPDATED, UPDATED))
    ),
    "tree does not match": lambda: optax_ext.backward_params(NARROW, UPDATED),
    r"shape \(4, 6\) does not match the state of discrepancy": (
        lambda: optax_ext.backward_params(TURNED, UPDATED)
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_bad_input(message):
    with pytest.raises(ValueError, match=message):
        ERRORS[message]()


def test_the_state_is_found_in_wrappers():
    """Each parameter has at most one state; those that are masked out are as they are."""
    last = optax.chain(optax.sgd(1.0), LAST)
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    wrapped = {
        "chain": last,
        "masked": optax.masked(last, {"w": True, "b": False}),
        "partition": optax.partition({"a": last, "b": last}, {"w": "a", "b": "b"}),
        "injected": optax.inject_hyperparams(lambda x: optax.chain(optax.scale(x), last))(1.0),
    }
    for name, tx in wrapped.items():
        params, state = PARAMS, tx.init(PARAMS)
        chex.assert_trees_all_equal(optax_ext.backward_params(params, state), params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        corrected = optax_ext.backward_params(params, [state])
        # gamma is exp(-1): a step of -1 counts 2 (1 - 1 / e) in its first update.
        np.testing.assert_allclose(corrected["w"], 2 * (1 - np.exp(-1)), rtol=1e-6, err_msg=name)
        if name == "masked":
            chex.assert_trees_all_equal(corrected["b"], params["b"])
        else:
            np.testing.assert_allclose(corrected["b"], 2 * (1 - np.exp(-1)), rtol=1e-6)
