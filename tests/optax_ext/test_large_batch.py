"""Learning rates for large batches, and the gradient noise scale where it is known."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from optax_ext import batch_advice, gradient_noise_scale, gradual_warmup, noise_scale


def test_the_rates_of_the_paper():
    """ResNet-50 at batch 8192: 3.2, from 0.1 for 256."""
    assert optax_ext.linear_scaling(0.1, 256, 8192) == pytest.approx(3.2, rel=1e-15)
    assert optax_ext.square_root_scaling(0.1, 256, 1024) == pytest.approx(0.2, rel=1e-15)
    assert optax_ext.linear_scaling(0.1, 256, 64) == pytest.approx(0.025, rel=1e-15)


def test_warm_up_takes_the_place_of_the_first_steps():
    """As in the paper: the schedule goes on at the step at which it would be without it."""
    decay = optax.cosine_decay_schedule(4.0, 100)
    schedule = gradual_warmup(decay, 20, start=0.5)
    at = np.array([schedule(t) for t in range(120)])
    np.testing.assert_allclose(at[:21], np.linspace(0.5, decay(20), 21), rtol=1e-6)
    np.testing.assert_array_equal(at[20:], [decay(t) for t in range(20, 120)])
    assert at[100] == 0
    assert gradual_warmup(2.0, 4)(1) == 0.5
    assert gradual_warmup(2.0, 0)(0) == 2.0
    # Under jit, of a count that is traced, in an optimizer.
    traced = jax.jit(jax.vmap(schedule))(jnp.arange(120))
    np.testing.assert_allclose(traced, at, rtol=1e-6, atol=1e-6)
    tx = optax.inject_hyperparams(optax.sgd)(schedule)
    assert jax.jit(tx.init)(jnp.ones(3)).hyperparams["learning_rate"] == 0.5


@pytest.mark.usefixtures("x64")
def test_averages_are_the_weighted_means_by_hand():
    """Steps weigh as powers of the decay, and from the first step on the weights add up to 1."""
    rng = np.random.default_rng(0)
    tx = gradient_noise_scale(96.0, decay=0.8)
    step = jax.jit(lambda g, s, n: tx.update(g, s, local_squared_norm=n, num_pieces=6, value=0.0))
    state, seen = tx.init(None), []
    for _ in range(12):
        local_grads = rng.normal(size=(6, 5)) + 1
        full, local = local_grads.mean(axis=0), (local_grads**2).sum(axis=1).mean()
        out, state = step(full, state, local)
        np.testing.assert_array_equal(out, full)
        big, small, squared = 96.0, 16.0, full @ full
        squared_norm = (big * squared - small * local) / (big - small)
        seen.append([squared_norm, (local - squared) / (1 / small - 1 / big)])
        weights = 0.8 ** np.arange(len(seen))[::-1]
        squared_norm, variance = weights @ np.array(seen) / weights.sum()
        np.testing.assert_allclose(state.squared_norm, squared_norm, rtol=1e-5)
        np.testing.assert_allclose(state.variance, variance, rtol=1e-5)
        np.testing.assert_allclose(noise_scale(state), variance / squared_norm, rtol=1e-5)


def test_state_and_gradients_keep_their_types():
    """And squares are summed in float32: in float16 that of 300 is infinite."""
    tx = gradient_noise_scale(64)
    grads = {"w": jnp.full((8, 8), 300.0, "float16"), "none": None}
    state = tx.init(grads)
    assert np.isnan(noise_scale(state))
    step = jax.jit(lambda g, s: tx.update(g, s, local_squared_norm=64 * 9e4 + 4, num_pieces=2))
    out, new = step(grads, state)
    assert jax.tree.map(jax.typeof, (out, new)) == jax.tree.map(jax.typeof, (grads, state))
    np.testing.assert_array_equal(out["w"], grads["w"])
    assert (float(new.squared_norm), float(new.variance)) == (64 * 9e4 - 4, 4 * 64)


def test_a_step_that_tells_nothing_is_left_out():
    tx = gradient_noise_scale(8)
    step = jax.jit(lambda g, s, norm, n: tx.update(g, s, local_squared_norm=norm, num_pieces=n)[1])
    good = step(jnp.ones(3), tx.init(None), 5.0, 2)
    assert int(good.count) == 1
    for args in ((jnp.ones(3), 5.0, 1), (jnp.ones(3), jnp.nan, 2), (jnp.array([jnp.inf]), 5.0, 2)):
        after = step(args[0], good, *args[1:])
        chex.assert_trees_all_equal(after, good)


def test_it_is_found_in_any_state():
    noise = optax.inject_hyperparams(gradient_noise_scale)(batch_size=8)
    tx = optax.chain(noise, optax.adam(1e-3))
    params = {"w": jnp.ones((16, 16))}
    _, state = jax.jit(tx.update)(
        params, tx.init(params), params, local_squared_norm=320.0, num_pieces=4
    )
    want = 64 * (8 / 3) / ((4 * 256 - 320) / 3)
    np.testing.assert_allclose(noise_scale({"opt": state}), want, rtol=1e-6)


def test_advice():
    """Bounds themselves are near; a scale that means nothing is unknown."""
    known = {64.1: "below", 64.0: "near", 16.0: "near", 15.9: "above"}
    for size, want in (known | dict.fromkeys((np.nan, 0.0, np.inf), "unknown")).items():
        assert batch_advice(jnp.asarray(size), 32) == want
    assert batch_advice(100.0, 32, near=4.0) == "near"


NOISE = gradient_noise_scale(8)
STATE = NOISE.init(None)
ERRORS = {
    "^base_lr must be positive, got 0": lambda: optax_ext.linear_scaling(0, 256, 8192),
    "warmup_steps must not be negative, got -1": lambda: gradual_warmup(1.0, -1),
    "learning_rate must not be negative, got nan": lambda: gradual_warmup(np.nan, 5),
    "batch_size must be positive": lambda: gradient_noise_scale(0),
    r"decay must be in \[0, 1\), got 1": lambda: gradient_noise_scale(8, decay=1),
    "missing: local_squared_norm, num_pieces": lambda: NOISE.update(jnp.ones(3), STATE),
    "got num_pieces=1, but at least 2 are required": lambda: NOISE.update(
        jnp.ones(3), STATE, local_squared_norm=1.0, num_pieces=1
    ),
    "one gradient_noise_scale, found 0": lambda: noise_scale(()),
    "one gradient_noise_scale, found 2": lambda: noise_scale((STATE, STATE)),
    r"near must be at least 1, got 0\.5": lambda: batch_advice(1.0, 1, near=0.5),
}


@pytest.mark.parametrize("message", ERRORS)
def test_bad_input(message):
    with pytest.raises(ValueError, match=message):
        ERRORS[message]()
