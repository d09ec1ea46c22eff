"""Bfloat16 parameters that are rounded stochastically, and the 8-bit optimizers by their names."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext

SHAPE = (64, 64)


def quadratic(tx, steps=2000, dtype=jnp.bfloat16):
    """Steps of 1e-3 of the way; nearest rounding loses those below 1/256 of the parameter."""
    target = jnp.linspace(0.5, 1.5, 64)[:, None] * jnp.ones(SHAPE)
    params = jnp.full(SHAPE, 2.0, dtype)

    def step(carry, _):
        params, state = carry
        grads = params.astype(jnp.float32) - target
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    run = jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), None, length=steps)[0])
    return np.asarray(run(params)[0], np.float32)


def test_small_steps_that_nearest_rounding_loses():
    exact = quadratic(optax.sgd(1e-3), dtype=jnp.float32)
    nearest = quadratic(optax.sgd(1e-3))
    stochastic = quadratic(optax_ext.stochastic_rounding(optax.sgd(1e-3)))
    assert (nearest == 2.0).all()  # it never moved
    rows = stochastic.mean(1) - exact.mean(1)
    assert np.abs(rows).max() < 0.01  # a row's mean; one element is within its own rounding
    assert np.abs(stochastic - exact).max() < 0.15


def test_apply_updates_does_the_same():
    def run(i, p):
        return optax_ext.apply_updates(p, -1e-3 * p.astype(jnp.float32), jax.random.key(i))

    params = jax.lax.fori_loop(0, 500, run, jnp.ones(SHAPE, jnp.bfloat16))
    assert params.dtype == jnp.bfloat16
    assert np.asarray(params, np.float32).mean() == pytest.approx(0.999**500, rel=2e-3)


def test_each_result_is_one_of_the_two_neighbours_with_the_right_frequency():
    p = jnp.ones((2000,), jnp.bfloat16)
    for share in (0.1, 0.5, 0.9):
        new = optax_ext.apply_updates(p, jnp.full(2000, share / 128), jax.random.key(0))
        new = np.asarray(new, np.float32)
        assert set(new) == {1.0, 1.0 + 1 / 128}
        assert np.mean(new > 1) == pytest.approx(share, abs=0.04)


@pytest.mark.parametrize("jit", [True, False])
def test_the_update_is_the_difference_to_the_rounded_sum(jit):
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=SHAPE), jnp.bfloat16), "b": jnp.ones(3)}
    grads = {"w": jnp.asarray(rng.normal(size=SHAPE), jnp.bfloat16), "b": jnp.ones(3)}
    tx = optax_ext.stochastic_rounding(optax.adamw(1e-2))
    state = tx.init(params)
    assert {x.dtype for x in jax.tree.leaves(state.inner_state)} == {
        jnp.dtype("f4"),
        jnp.dtype("i4"),
    }
    updates, new_state = (jax.jit(tx.update) if jit else tx.update)(grads, state, params)
    have = optax.apply_updates(params, updates)
    assert have["w"].dtype == jnp.bfloat16
    exact = np.asarray(params["w"], np.float64) + np.asarray(
        optax.adamw(1e-2).update(
            jax.tree.map(lambda x: x.astype("f4"), grads),
            optax.adamw(1e-2).init(jax.tree.map(lambda x: x.astype("f4"), params)),
            jax.tree.map(lambda x: x.astype("f4"), params),
        )[0]["w"],
        np.float64,
    )
    error = np.abs(np.asarray(have["w"], np.float64) - exact)
    assert (error <= np.abs(exact) / 128 + 1e-8).all()  # the distance of two bfloat16
    assert error.max() > 0
    np.testing.assert_allclose(have["b"], 1 - 1e-2 * (1 + 1e-4), rtol=1e-6)  # as ever
    assert jax.tree.map(jax.typeof, new_state) == jax.tree.map(jax.typeof, state)


def test_what_is_not_finite_stays_so():
    p = jnp.ones((4,), jnp.bfloat16)
    u = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 0.0])
    new = np.asarray(optax_ext.apply_updates(p, u, jax.random.key(0)), np.float32)
    np.testing.assert_array_equal(new, [np.nan, np.inf, -np.inf, 1.0])


def test_none_and_other_dtypes():
    params = {"a": jnp.ones(2), "b": jnp.ones(2, jnp.bfloat16), "c": jnp.ones(2)}
    updates = {"a": jnp.full(2, 0.25), "b": None, "c": None}
    new = optax_ext.apply_updates(params, updates, jax.random.key(0))
    np.testing.assert_array_equal(new["a"], 1.25)
    assert new["b"] is params["b"]


def test_errors():
    tx = optax_ext.stochastic_rounding(optax.sgd(1e-3))
    params = jnp.ones(3, jnp.bfloat16)
    with pytest.raises(ValueError, match="stochastic_rounding needs params"):
        tx.update(params, tx.init(params))
    with pytest.raises(ValueError, match=r"seed must be in \[0, 2\*\*32\), got -1"):
        optax_ext.stochastic_rounding(optax.sgd(1e-3), seed=-1)


# --- 8-bit optimizers by name ---------------------------------------------------------------------

NAMED = {
    "adamw8bit": optax.adamw,
    "lion8bit": optax.lion,
    "lamb8bit": optax_ext.lamb,
    "came8bit": optax_ext.came,
    "adafactor8bit": lambda rate: optax_ext.adafactor(rate, momentum=0.9),
}


@pytest.mark.parametrize("name", NAMED)
def test_is_low_precision_state_of_the_plain_one(name):
    params = {"w": jnp.ones((128, 128))}
    have = jax.eval_shape(getattr(optax_ext, name)(1e-3).init, params)
    want = jax.eval_shape(optax_ext.low_precision_state(NAMED[name](1e-3)).init, params)
    assert have == want
    stored = [x for x in jax.tree.leaves(have, is_leaf=_is_stored) if _is_stored(x)]
    assert len(stored) == {"adamw8bit": 2, "lamb8bit": 2}.get(name, 1)


def _is_stored(x):
    return isinstance(x, optax_ext.Quantized)


@pytest.mark.parametrize("name", NAMED)
def test_takes_what_the_plain_one_takes(name):
    make = getattr(optax_ext, name)
    assert make.__name__ == name
    assert "learning_rate" in inspect.signature(make).parameters
    params = {"w": jnp.ones((64, 128))}
    injected = optax.inject_hyperparams(make)(learning_rate=1e-3)
    state = jax.eval_shape(injected.init, params)
    assert "learning_rate" in state.hyperparams
    updates, new = jax.eval_shape(injected.update, params, state, params)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert updates["w"].shape == (64, 128)
