"""Rows without a gradient stay what they were, and all others learn as they did."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext

from . import traces

ROWS, WIDTH = 50, 8


def gradient(step):
    """Of a table: none, a third or all of the rows, of very different size."""
    rng = np.random.default_rng(step)
    used = rng.random((ROWS, 1)) < rng.choice([0.0, 0.3, 1.0])
    return used * rng.normal(size=(ROWS, WIDTH)) * 10.0 ** rng.integers(-3, 3, (ROWS, 1))


def initial():
    rng = np.random.default_rng(99)
    return {"table": rng.normal(size=(ROWS, WIDTH)), "w": rng.normal(size=(WIDTH, WIDTH))}


def run(tx, steps):
    table = np.stack([gradient(i) for i in range(steps)])
    w = np.random.default_rng(1000).normal(size=(steps, WIDTH, WIDTH))
    _, params, state = traces.unroll(tx, {"table": table, "w": w}, initial())
    return jax.tree.map(lambda x: x[-1], (params, state))


def test_adamw_by_hand(x64):
    """300 steps in NumPy, row by row."""
    lr, b1, b2, eps, decay = 1e-2, 0.9, 0.99, 1e-8, 0.1
    table = np.array(initial()["table"])
    mu, nu = np.zeros_like(table), np.zeros_like(table)
    for i in range(300):
        g = gradient(i)
        for r in np.flatnonzero(g.any(1)):
            mu[r] = b1 * mu[r] + (1 - b1) * g[r]
            nu[r] = b2 * nu[r] + (1 - b2) * g[r] ** 2
            step = mu[r] / (1 - b1 ** (i + 1)) / (np.sqrt(nu[r] / (1 - b2 ** (i + 1))) + eps)
            table[r] -= lr * (step + decay * table[r])
    tx = optax.adamw(lr, b1, b2, eps, weight_decay=decay)
    params, state = run(optax_ext.lazy_rows(tx, {"table": True, "w": False}), 300)
    np.testing.assert_allclose(params["table"], table, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(state[0].mu["table"], mu, rtol=1e-10, atol=1e-14)
    plain, _ = run(tx, 300)
    # Two programs, whose products and sums LLVM joins in different places.
    np.testing.assert_allclose(params["w"], plain["w"], rtol=1e-14, atol=1e-15)
    assert np.abs(params["table"] - plain["table"]).max() > 1e-2


def test_what_belongs_to_a_row(x64):
    """Statistics of rows stay, of columns do not; where all rows are used nothing changes."""
    inner = optax_ext.came(1e-2, weight_decay=0.1)
    tx = optax_ext.lazy_rows(inner, {"table": True, "w": False})
    params, state = run(tx, 5)
    one = np.zeros((ROWS, WIDTH))
    one[7] = 1.0
    steps = jax.jit(lambda g, s, p: [t.update(g, s, p) for t in (tx, inner)])
    g = {"table": one, "w": np.ones((WIDTH, WIDTH))}
    (updates, new), _ = steps(g, state, params)
    assert np.flatnonzero(np.any(updates["table"] != 0, 1)).tolist() == [7]
    others = np.arange(ROWS) != 7
    kept = 0
    for (path, a), b in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(new), strict=True):
        if "table" not in str(path):
            continue
        if a.shape[:1] == (ROWS,):
            np.testing.assert_array_equal(a[others], b[others])
            assert np.any(a[7] != b[7])
            kept += 1
        elif a.size:
            assert np.any(a != b)
    assert kept == 3
    full = g | {"table": np.ones((ROWS, WIDTH))}
    for a, b in zip(*map(jax.tree.leaves, steps(full, state, params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-14)


def test_parameters_in_a_list():
    """Whose keys are numbers, as those of a chain's states are."""
    params = [jnp.ones((8, 3)), jnp.ones((8, 3))]
    for mask, want in (([True, False], [1, 8]), ([False, True], [8, 1])):
        tx = optax_ext.lazy_rows(optax.chain(optax.trace(0.9), optax.scale(-1.0)), mask)
        state = tx.init(params)
        _, state = tx.update([jnp.ones((8, 3))] * 2, state)
        _, state = tx.update([jnp.zeros((8, 3)).at[5].set(1.0)] * 2, state)
        assert [np.any(x != 1.0, 1).sum() for x in state[0].trace] == want
    # A row that is not finite is used.
    updates, _ = tx.update([jnp.zeros((8, 3)).at[2, 0].set(jnp.nan)] * 2, state)
    assert np.isnan(updates[1][2, 0])
    assert not np.any(updates[1][:2])


def test_stored_in_blocks():
    """Rows of moments in blocks are unknown: the transformation that stores them goes outside."""
    params = {"table": jnp.ones((512, 128))}
    inner = optax.sgd(1.0, momentum=0.9)
    with pytest.raises(ValueError, match=r"belongs to a table .* outside: low_precision_state"):
        jax.eval_shape(optax_ext.lazy_rows(optax_ext.low_precision_state(inner), True).init, params)
    tx = optax_ext.low_precision_state(optax_ext.lazy_rows(inner, True))
    state = jax.eval_shape(tx.init, params)
    assert isinstance(state.inner_state[0].trace["table"], optax_ext.Quantized)


def test_bad_input():
    params = {"square": jnp.ones((3, 3))}
    with pytest.raises(ValueError, match=r"'square' has shape .*; its first dim, of rows"):
        optax_ext.lazy_rows(optax.sgd(1.0), True).init(params)
    with pytest.raises(ValueError, match="the mask does not fit the parameters"):
        optax_ext.lazy_rows(optax.sgd(1.0), {"other": True}).init(params)
