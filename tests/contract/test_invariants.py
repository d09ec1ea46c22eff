"""Symmetries of the algorithms, which hold whatever the formulas are.

In float64, over 8 steps of full-rank gradients whose rows and columns differ by decades.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from optax_ext import last_two_dims

from .table import TRANSFORMATIONS, WIDE, distinct, make

NUM_STEPS, ROWS, COLS = 8, 6, 4
# By default the algorithms, not what is around them.
factored = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if row.covered or row.make not in WIDE else ())
        for name, row in TRANSFORMATIONS.items()
        if row.factored
    ],
)

pytestmark = pytest.mark.usefixtures("x64")


def example(shape=(ROWS, COLS)):
    """(gradients of every step, parameters)."""
    rng = np.random.default_rng(0)
    scale = 10.0 ** rng.uniform(-3, 3, (1, *shape[:-1], 1)) * 10.0 ** rng.uniform(-3, 3, shape[-1])
    grads = rng.normal(size=(NUM_STEPS, *shape)) * scale
    return grads * rng.choice([0.1, 1.0, 10.0], (NUM_STEPS,) + (1,) * len(shape)), rng.normal(
        size=shape
    )


def unroll(tx, *runs):
    """The updates of every step of each (grads, params), of one array named w, in one program."""

    @jax.jit
    @jax.vmap
    def run(grads, params):
        def step(carry, g):
            params, state = carry
            updates, state = tx.update({"w": g}, state, params)
            return (optax.apply_updates(params, updates), state), updates["w"]

        params = {"w": params}
        return jax.lax.scan(step, (params, tx.init(params)), grads)[1]

    return np.asarray(run(*map(np.stack, zip(*runs, strict=True))))


def assert_same(have, want):
    """Every element within 1e-12 of it, or of the largest of its step."""
    largest = np.abs(want).max(axis=tuple(range(1, want.ndim)), keepdims=True)
    largest[largest == 0] = 1
    np.testing.assert_allclose(have / largest, want / largest, rtol=0, atol=1e-12)


@distinct
def test_scale_sign_and_permutation(name):
    """The parameters' sign too: weight decay follows them."""
    grads, params = example()
    rng = np.random.default_rng(1)
    rows, cols = rng.permutation(ROWS), rng.permutation(COLS)
    want, small, large, negated, permuted = unroll(
        make(name, wide=True, masks=False),
        (grads, params),
        (1e-3 * grads, params),
        (1e4 * grads, params),
        (-grads, -params),
        (grads[:, rows][:, :, cols], params[rows][:, cols]),
    )
    np.testing.assert_array_equal(negated, -want)
    assert_same(permuted, want[:, rows][:, :, cols])
    if TRANSFORMATIONS[name].scale_invariant:
        assert_same(small, want)
        assert_same(large, want)


@factored
def test_transpose(name):
    grads, params = example()
    tx = make(name, wide=True, masks=False)
    [want], [have] = unroll(tx, (grads, params)), unroll(tx, (grads.swapaxes(1, 2), params.T))
    assert_same(have, want.swapaxes(1, 2))


@factored
@pytest.mark.parametrize(
    "shape", [(3, ROWS, COLS), pytest.param((3, COLS), marks=pytest.mark.slow)], ids=str
)
def test_stacked_equals_apart(name, shape):
    """Slices along a batch dim are parameters of their own, wherever the dim is."""
    grads, params = example(shape)
    grads = grads * np.array([1e-4, 1.0, 50.0]).reshape(3, *[1] * (len(shape) - 1))
    params = params * np.array([1e-5, 1.0, 50.0]).reshape(3, *[1] * (len(shape) - 1))
    grads[3, 1] *= 100  # one slice is clipped where the others are not
    of = functools.partial(make, name, wide=True, masks=False)
    apart = of(factoring=last_two_dims())
    want = unroll(apart, *((grads[:, i], params[i]) for i in range(3)))
    for dim in (0, len(shape) - 1):
        tx = of(factoring=last_two_dims(batch=(dim,)))
        [have] = unroll(tx, (np.moveaxis(grads, 1, dim + 1), np.moveaxis(params, 0, dim)))
        for i, x in enumerate(np.moveaxis(have, dim + 1, 0)):
            assert_same(x, want[i])
    if len(shape) == 3:  # else the test could not fail: without a batch dim the clip is shared
        [have] = unroll(apart, (grads, params))
        assert np.linalg.norm(have - want.swapaxes(0, 1)) > 1e-2 * np.linalg.norm(want)


@factored
def test_a_rule_that_never_applies_is_no_factoring(name):
    of = functools.partial(make, name, wide=True, masks=False)
    never, none = (
        unroll(of(factoring=rule), example()) for rule in (last_two_dims(min_dim_size=100), None)
    )
    np.testing.assert_array_equal(never, none)


@pytest.mark.parametrize("of", [optax_ext.scale_by_came, optax_ext.scale_by_adafactor])
def test_the_factored_moment_of_rank_one_gradients_is_the_full_one(of):
    rng = np.random.default_rng(0)
    size = np.outer(10 ** rng.uniform(-3, 3, ROWS), 10 ** rng.uniform(-3, 3, COLS))
    grads = size * rng.choice([-1.0, 1.0], (NUM_STEPS, *size.shape))
    grads *= 10 ** rng.uniform(-1, 1, (NUM_STEPS, 1, 1))
    both = [of(factoring=rule) for rule in (last_two_dims(), None)]

    def step(states, g):
        states = [tx.update(g, s)[1] for tx, s in zip(both, states, strict=True)]
        return states, states

    start = [tx.init(jnp.zeros(size.shape)) for tx in both]
    factored, full = jax.jit(lambda g: jax.lax.scan(step, start, g)[1])(grads)
    row, col = np.asarray(factored.nu_row), np.asarray(factored.nu_col)
    have = row[:, :, None] * col[:, None] / row.mean(1)[:, None, None]
    np.testing.assert_allclose(have, full.nu, rtol=1e-12)


def test_the_examples_clip_sometimes():
    """Adafactor's raw directions are above and below the threshold."""
    tx = optax_ext.scale_by_adafactor(factoring=last_two_dims(), clipping_threshold=None)
    sizes = np.sqrt(np.mean(unroll(tx, example())[0] ** 2, axis=(1, 2)))
    assert sizes.min() < 0.9
    assert sizes.max() > 1.1
