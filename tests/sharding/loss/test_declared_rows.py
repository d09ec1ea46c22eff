"""Functions that are declared to keep rows apart, under the transformations of JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import sharding as shd
from sharding.loss._rows import rows_of_loss

ROWS, TOKENS, WIDTH = 4, 6, 8
RNG = np.random.default_rng(0)
W = RNG.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 3
X = RNG.normal(size=(ROWS, TOKENS, WIDTH)).astype(np.float32)


def kernel(x_ref, w_ref, y_ref):
    y_ref[...] = jnp.tanh(x_ref[...] @ w_ref[...])


@jax.custom_vjp
def opaque(x, w):
    """``tanh(x w)`` as a kernel, with a derivative of its own, which is one, too."""
    call = pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)
    return call(x, w)


def backward(residuals, g):
    (x, w), g = residuals, g * (1 - opaque(*residuals) ** 2)
    return opaque(g, 0 * w.T) + g @ w.T, jnp.einsum("...td,...te->de", x, g)


opaque.defvjp(lambda x, w: (opaque(x, w), (x, w)), backward)
declared = shd.keeps_rows_apart(opaque, in_dims=(0, None), out_dims=0)


def stacked(fn, w, x):
    layer = jax.checkpoint(lambda x, w: (x + fn(x, w), None))
    return lax.scan(layer, x, jnp.stack([w, w]))[0]


def meta(fn, w, x):
    """A loss after a step on it: with the gradient of every row, and of all rows."""
    by_row = jax.grad(lambda x: jnp.sum(fn(x, w) ** 2))(x)
    return jnp.mean(fn(x - by_row, w) ** 2)


LOSSES = {
    "plain": lambda fn, w, x: jnp.mean(fn(x, w) ** 2),
    "jit": lambda fn, w, x: jnp.mean(jax.jit(fn)(x, w) ** 2),
    "scan and checkpoint": lambda fn, w, x: jnp.mean(stacked(fn, w, x) ** 2),
    "twice": lambda fn, w, x: jnp.mean(fn(fn(x, w), w) ** 2),
    "map": lambda fn, w, x: jnp.mean(lax.map(lambda x: fn(x[None], w)[0], x)),
    "gradient of rows": meta,
    "swapped by vmap": lambda fn, w, x: jnp.mean(
        jax.vmap(lambda x: fn(x, w), 1, 1)(x[..., None, :])
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_declared_is_proven(name):
    word = lambda fn: rows_of_loss(functools.partial(LOSSES[name], fn), (W, X), (False, True))  # noqa: E731
    assert word(declared).word == "mean", str(word(declared))
    assert word(opaque).word == "coupled"
    assert word(opaque).cause.equation == "pallas_call"


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("map", "scan and checkpoint", "gradient of rows")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in LOSSES
    ],
)
def test_a_declared_function_computes_what_it_did(name):
    """Value and gradient are the same program, or have the same numbers."""
    both = [jax.value_and_grad(functools.partial(LOSSES[name], fn)) for fn in (opaque, declared)]
    plain, marked = (jax.jit(run).lower(W, X) for run in both)
    if plain.as_text() == marked.as_text():
        return
    found = [jax.tree.leaves(program.compile()(W, X)) for program in (plain, marked)]
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_a_mapped_row_is_apart():
    """``vmap`` keeps what it maps apart, whatever the function does with its own dims."""
    whole = shd.keeps_rows_apart(opaque, in_dims=None, out_dims=None)
    by_row = lambda w, x: jnp.mean(jax.vmap(whole, (0, None))(x, w))  # noqa: E731
    assert rows_of_loss(by_row, (W, X), (False, True)).word == "mean"
    both = lambda w, x: jnp.mean(whole(x, w))  # noqa: E731
    assert "not declared" in str(rows_of_loss(both, (W, X), (False, True)))


def test_gradients_have_rows_or_are_sums():
    def loss(w, x):
        """Of a linear function of the gradient of all rows, and of that of each."""
        of_all, of_each = jax.grad(lambda w, x: jnp.sum(declared(x, w)), (0, 1))(w, x)
        return jnp.sum(of_all) + jnp.sum(of_each)

    assert rows_of_loss(loss, (W, X), (False, True)).word == "sum"
    square = lambda w, x: jnp.sum(jax.grad(lambda w: jnp.sum(declared(x, w)))(w) ** 2)  # noqa: E731
    assert "not linear" in str(rows_of_loss(square, (W, X), (False, True)))


def test_declared_rows_must_be_those():
    other = shd.keeps_rows_apart(opaque, in_dims=(1, None), out_dims=1)
    found = rows_of_loss(lambda w, x: jnp.mean(other(x, w)), (W, X), (False, True))
    assert "rows are along a dim that is not declared" in str(found)
    swapped = lambda w, x: jnp.mean(other(x.swapaxes(0, 1), w))  # noqa: E731
    assert rows_of_loss(swapped, (W, X), (False, True)).word == "mean"
    sums = lambda w, x: jnp.mean(declared(x.mean(0, keepdims=True) + 0 * x, w))  # noqa: E731
    assert rows_of_loss(sums, (W, X), (False, True)).word == "coupled"


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ((0,), "was called with 2. Give one dim, or None, for each"),
        ((3, None), r"rows are along dim 3 of argument \[0\], which has the shape \(4, 6, 8\)"),
        ((0, 0), "dims of different sizes"),
    ],
)
def test_a_declaration_is_checked(dims, message):
    with pytest.raises(ValueError, match=message):
        shd.keeps_rows_apart(opaque, in_dims=dims, out_dims=0)(X, W)
