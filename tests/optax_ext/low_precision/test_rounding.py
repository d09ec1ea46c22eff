"""Noise, and bfloat16 parameters that are rounded stochastically."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from optax_ext.low_precision._rounding import make_key, next_key, salted, uniform

from .. import traces

SHAPE = (64, 64)


def test_noise_is_uniform_and_new_each_time():
    @jax.jit
    def draw():
        key, other = make_key(7), make_key(8)
        cases = ((key, "a"), (next_key(key), "a"), (key, "b"), (other, "a"))  # step, array, seed
        return [uniform(salted(k, [jax.tree_util.DictKey(x)]), (300, 400)) for k, x in cases]

    draws = [np.asarray(x, np.float64) for x in draw()]
    for x in draws:
        assert 0 <= x.min() < 1e-4
        assert 1 - 1e-4 < x.max() < 1
        counts = np.histogram(x, 64, (0, 1))[0]
        assert ((counts - x.size / 64) ** 2).sum() / (x.size / 64) < 110  # chi squared, 63 degrees
        for dim in (0, 1):
            neighbour = np.roll(x, 1, dim)
            assert abs(np.corrcoef(x.ravel(), neighbour.ravel())[0, 1]) < 5 / np.sqrt(x.size)
    correlation = np.corrcoef([x.ravel() for x in draws]) - np.eye(len(draws))
    assert np.abs(correlation).max() < 5 / np.sqrt(draws[0].size)


# --- Parameters -----------------------------------------------------------------------------------


def test_apply_updates_rounds_to_one_of_two_neighbours_with_the_right_frequency():
    p = jnp.ones(2000, jnp.bfloat16)
    apply = jax.jit(lambda p, u: optax_ext.apply_updates(p, u, jax.random.key(0)))
    for share in (0.1, 0.5, 0.9):
        new = np.asarray(apply(p, np.full(2000, share / 128, np.float32)), np.float32)
        assert set(new) == {1.0, 1.0 + 1 / 128}
        assert np.mean(new > 1) == pytest.approx(share, abs=0.04)
    special = [np.nan, np.inf, -np.inf, 0.0]
    new = apply(p, np.resize(np.array(special, np.float32), 2000))
    np.testing.assert_array_equal(np.asarray(new, np.float32)[:4], [np.nan, np.inf, -np.inf, 1.0])

    def run(i, p):
        return optax_ext.apply_updates(p, -1e-3 * p.astype(jnp.float32), jax.random.key(i))

    params = jax.jit(lambda p: jax.lax.fori_loop(0, 500, run, p))(p)
    assert params.dtype == jnp.bfloat16
    assert np.asarray(params, np.float32).mean() == pytest.approx(0.999**500, rel=3e-3)

    params = {"a": jnp.ones(2), "b": jnp.ones(2, jnp.bfloat16), "c": jnp.ones(2)}
    updates = {"a": jnp.full(2, 0.25), "b": None, "c": None}
    new = optax_ext.apply_updates(params, updates, jax.random.key(0))
    np.testing.assert_array_equal(new["a"], 1.25)
    assert new["b"] is params["b"]


def test_the_update_is_the_difference_to_the_rounded_sum():
    """In every step another noise, of parameters and gradients in float32."""
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=SHAPE).astype(jnp.bfloat16), "b": np.ones(3, np.float32)}
    grads = jax.tree.map(lambda p: np.zeros((8, *p.shape), p.dtype), params)
    grads["w"][:], grads["b"][:] = rng.normal(size=SHAPE), 1
    tx = optax_ext.stochastic_rounding(optax.sgd(0.01))
    _, seen, _ = traces.unroll(tx, grads, params)
    before = np.concatenate([params["w"][None], seen["w"][:-1]]).astype(np.float64)
    exact = before - 0.01 * grads["w"].astype(np.float64)
    error = seen["w"].astype(np.float64) - exact
    assert seen["w"].dtype == jnp.bfloat16
    assert (np.abs(error) <= np.abs(exact) / 128 + 1e-8).all()  # the distance of two bfloat16
    # Steps of the same size, rounded up in some of eight steps and down in others.
    assert np.mean((error > 0).any(0) & (error < 0).any(0)) > 0.8
    np.testing.assert_allclose(seen["b"][-1], 1 - 0.08, rtol=1e-6)  # as ever
    tx = optax_ext.stochastic_rounding(optax.adamw(1e-2))
    state = jax.eval_shape(tx.init, params)
    assert {x.dtype for x in jax.tree.leaves(state.inner_state)} == set(map(np.dtype, ("f4", "i4")))
    _, new = jax.eval_shape(tx.update, params, state, params)
    assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, state)


def test_errors():
    tx = optax_ext.stochastic_rounding(optax.sgd(1e-3))
    params = jnp.ones(3, jnp.bfloat16)
    with pytest.raises(ValueError, match="stochastic_rounding needs params"):
        tx.update(params, tx.init(params))
    with pytest.raises(ValueError, match=r"seed must be in \[0, 2\*\*32\), got -1"):
        optax_ext.stochastic_rounding(optax.sgd(1e-3), seed=-1)


@pytest.mark.parametrize("around", [lambda tx: tx, lambda tx: optax.MultiSteps(tx, 2)])
def test_infinite_parameters_stay(around):
    """Masks of -inf: frozen, without a gradient, or with a finite step; NaN remains NaN."""
    p = jnp.array([-np.inf, np.inf, -np.inf, np.inf, -np.inf], jnp.bfloat16)
    grads = np.array([0, 0, 1, -1, np.nan], np.float32)
    tx = around(optax_ext.stochastic_rounding(optax.sgd(1.0)))
    state = tx.init(p)
    for _ in range(2):
        updates, state = tx.update(grads, state, p)
        p = optax.apply_updates(p, updates)
    want = [-np.inf, np.inf, -np.inf, np.inf, np.nan]
    np.testing.assert_array_equal(np.asarray(p, np.float32), want)
