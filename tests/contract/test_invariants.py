"""Symmetries of the algorithms, which hold whatever the formulas are.

In float64, over 8 steps of full-rank gradients whose rows and columns differ by decades.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from optax_ext import last_two_dims

from .table import TRANSFORMATIONS, wide

NUM_STEPS, ROWS, COLS = 8, 6, 4
SCALED = [name for name, row in TRANSFORMATIONS.items() if row.scale_invariant]
FACTORED = [name for name, row in TRANSFORMATIONS.items() if row.factored]

pytestmark = pytest.mark.usefixtures("x64")


def example(shape=(ROWS, COLS)):
    """(gradients of every step, parameters)."""
    rng = np.random.default_rng(0)
    scale = 10.0 ** rng.uniform(-3, 3, (1, *shape[:-1], 1)) * 10.0 ** rng.uniform(-3, 3, shape[-1])
    grads = rng.normal(size=(NUM_STEPS, *shape)) * scale
    return grads * rng.choice([0.1, 1.0, 10.0], (NUM_STEPS,) + (1,) * len(shape)), rng.normal(
        size=shape
    )


def without_mask(name, **overrides):
    row = TRANSFORMATIONS[name]
    mask = {"weight_decay_mask": None} if "weight_decay_mask" in row.arguments else {}
    return wide(name)(**mask | overrides)


def unroll(tx, grads, params):
    """The updates of every step, of one array named w."""
    params = {"w": jnp.asarray(params)}
    state, seen = tx.init(params), []
    for g in grads:
        updates, state = tx.update({"w": jnp.asarray(g)}, state, params)
        params = optax.apply_updates(params, updates)
        seen.append(np.asarray(updates["w"]))
    return np.stack(seen)


def assert_same(have, want):
    """Every element within 1e-12 of it, or of the largest of its step."""
    largest = np.abs(want).max(axis=tuple(range(1, want.ndim)), keepdims=True)
    largest[largest == 0] = 1
    np.testing.assert_allclose(have / largest, want / largest, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_gradient_scale(name, scale):
    grads, params = example()
    tx = without_mask(name)
    assert_same(unroll(tx, scale * grads, params), unroll(tx, grads, params))


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_sign(name):
    """Exactly, with the parameters' sign too: weight decay follows them."""
    grads, params = example()
    tx = without_mask(name)
    np.testing.assert_array_equal(unroll(tx, -grads, -params), -unroll(tx, grads, params))


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transpose(name):
    grads, params = example()
    tx = without_mask(name)
    want = unroll(tx, grads, params).transpose(0, 2, 1)
    assert_same(unroll(tx, grads.transpose(0, 2, 1), params.T), want)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_permutation_of_rows_and_of_columns(name):
    grads, params = example()
    tx = without_mask(name)
    rng = np.random.default_rng(1)
    rows, cols = rng.permutation(ROWS), rng.permutation(COLS)
    want = unroll(tx, grads, params)[:, rows][:, :, cols]
    assert_same(unroll(tx, grads[:, rows][:, :, cols], params[rows][:, cols]), want)


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize("name", FACTORED)
@pytest.mark.parametrize("shape", [(3, ROWS, COLS), (3, COLS)], ids=["matrices", "vectors"])
def test_stacked_equals_apart(name, shape):
    """Slices along a batch dim are parameters of their own, wherever the dim is."""
    grads, params = example(shape)
    grads = grads * np.array([1e-4, 1.0, 50.0]).reshape(3, *[1] * (len(shape) - 1))
    params = params * np.array([1e-5, 1.0, 50.0]).reshape(3, *[1] * (len(shape) - 1))
    grads[3, 1] *= 100  # one slice is clipped where the others are not
    alone = without_mask(name, factoring=last_two_dims())
    want = np.stack([unroll(alone, grads[:, i], params[i]) for i in range(3)], axis=1)
    for dim in (0, len(shape) - 1):
        tx = without_mask(name, factoring=last_two_dims(batch=(dim,)))
        have = unroll(tx, np.moveaxis(grads, 1, dim + 1), np.moveaxis(params, 0, dim))
        have = np.moveaxis(have, dim + 1, 1)
        for i in range(3):
            assert_same(have[:, i], want[:, i])


@pytest.mark.parametrize("name", FACTORED)
def test_without_a_batch_dim_the_clip_is_shared(name):
    """What distinguishes the two; else the test above could not fail."""
    grads, params = example((3, ROWS, COLS))
    grads[3, 1] *= 100
    batch = without_mask(name, factoring=last_two_dims(batch=(0,)))
    stacked = without_mask(name, factoring=last_two_dims())
    have, want = unroll(stacked, grads, params), unroll(batch, grads, params)
    assert np.linalg.norm(have - want) > 1e-2 * np.linalg.norm(want)


@pytest.mark.parametrize("make", [optax_ext.scale_by_came, optax_ext.scale_by_adafactor])
def test_the_factored_moment_of_rank_one_gradients_is_the_full_one(make):
    rng = np.random.default_rng(0)
    size = np.outer(10 ** rng.uniform(-3, 3, ROWS), 10 ** rng.uniform(-3, 3, COLS))
    factored, full = make(factoring=last_two_dims()), make(factoring=None)
    params = jnp.zeros((ROWS, COLS))
    state, want = factored.init(params), full.init(params)
    for _ in range(NUM_STEPS):
        g = jnp.asarray(size * rng.choice([-1.0, 1.0], size.shape) * 10 ** rng.uniform(-1, 1))
        _, state = factored.update(g, state)
        _, want = full.update(g, want)
        row, col = np.asarray(state.nu_row), np.asarray(state.nu_col)
        np.testing.assert_allclose(np.outer(row, col) / row.mean(), want.nu, rtol=1e-12)


@pytest.mark.parametrize("name", FACTORED)
def test_a_rule_that_never_applies_is_no_factoring(name):
    grads, params = example()
    never = without_mask(name, factoring=last_two_dims(min_dim_size=100))
    none = without_mask(name, factoring=None)
    np.testing.assert_array_equal(unroll(never, grads, params), unroll(none, grads, params))


def test_the_examples_clip_sometimes():
    """Adafactor's raw directions are above and below the threshold."""
    grads, params = example()
    tx = optax_ext.scale_by_adafactor(factoring=last_two_dims(), clipping_threshold=None)
    sizes = np.sqrt(np.mean(unroll(tx, grads, params) ** 2, axis=(1, 2)))
    assert sizes.min() < 0.9
    assert sizes.max() > 1.1
    assert jax.tree.leaves(params)[0].dtype == np.float64
