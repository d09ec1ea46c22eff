"""Losses made of random operations: what is proven of them is true in float64."""

import collections

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from sharding.loss._rows import rows_of_loss

from .test_rows import check_word

ROWS, KEY = 10, jax.random.key(0)
RNG = np.random.default_rng(0)
# Tuples: their order is that of a trace. No two dims that differ in meaning have one size.
PARAMS = tuple(RNG.normal(size=shape) for shape in ((3, 3), (3,), (4, 3)))
BATCH = tuple(RNG.normal(size=shape) for shape in ((ROWS, 2, 3), (ROWS,), (ROWS,), (ROWS, 3)))

# Of two values, and of an axis of the first.
OPERATIONS = {
    "tanh": lambda a, b, d: jnp.tanh(a),
    "square": lambda a, b, d: a**2,
    "abs": lambda a, b, d: jnp.abs(a),
    "relu": lambda a, b, d: jax.nn.relu(a),
    "floor": lambda a, b, d: jnp.floor(a).astype(jnp.int32) + 0.5,
    "add": lambda a, b, d: a + b,
    "sub": lambda a, b, d: a - b,
    "mul": lambda a, b, d: a * b,
    "div": lambda a, b, d: a / (1 + jnp.abs(b)),
    "ratio": lambda a, b, d: a / jnp.maximum(jnp.sum(jnp.abs(b)), 1e-3),
    "where": lambda a, b, d: jnp.where(b > 0, a, 0),
    "where both": lambda a, b, d: jnp.where(a > 0, a, b),
    "maximum": lambda a, b, d: jnp.maximum(a, b),
    "over rows": lambda a, b, d: a / len(b),
    "times rows": lambda a, b, d: a * len(b),
    "sum": lambda a, b, d: a.sum(d),
    "mean": lambda a, b, d: a.mean(d),
    "all": lambda a, b, d: a.sum(),
    "mean of all": lambda a, b, d: a.mean(),
    "max": lambda a, b, d: a.max(d),
    "logsumexp": lambda a, b, d: jax.nn.logsumexp(a, d),
    "softmax": lambda a, b, d: jax.nn.softmax(a, d),
    "sort": lambda a, b, d: jnp.sort(a, d),
    "cumsum": lambda a, b, d: jnp.cumsum(a, d),
    "flip": lambda a, b, d: jnp.flip(a, d),
    "roll": lambda a, b, d: jnp.roll(a, 1, d),
    "first": lambda a, b, d: a.take(0, d),
    "half": lambda a, b, d: lax.slice_in_dim(a, 0, a.shape[d] // 2 or 1, axis=d),
    "diff": lambda a, b, d: jnp.diff(a, axis=d),
    "pad": lambda a, b, d: jnp.pad(a, [(0, 2 * (k == d)) for k in range(a.ndim)]),
    "swap": lambda a, b, d: a.swapaxes(0, d),
    "flat": lambda a, b, d: a.reshape(-1),
    "split": lambda a, b, d: a.reshape(*a.shape[:d], -1, 3, *a.shape[d + 1 :]),
    "tiles": lambda a, b, d: a.reshape(5, -1),
    "new dim": lambda a, b, d: jnp.expand_dims(a, d),
    "join": lambda a, b, d: jnp.concatenate([a, b], d),
    "stack": lambda a, b, d: jnp.stack([a, b], d),
    "tile": lambda a, b, d: jnp.tile(a, [1 + (k == d) for k in range(a.ndim)]),
    "repeat": lambda a, b, d: jnp.repeat(a, 2, d),
    "product": lambda a, b, d: a @ b,
    "transposed product": lambda a, b, d: a.T @ b,
    "product with transpose": lambda a, b, d: a @ b.T,
    "inner": lambda a, b, d: jnp.vdot(a, b),
    "outer": lambda a, b, d: a[..., None] * b[None],
    "index": lambda a, b, d: jnp.arange(a.shape[d]) * 1.0,
    "ones": lambda a, b, d: jnp.ones(len(a)),
    "noise": lambda a, b, d: jax.random.normal(KEY, a.shape),
    "noise of a row": lambda a, b, d: jax.random.normal(KEY, a.shape[1:]),
    "look up": lambda a, b, d: a[jnp.clip(jnp.abs(b).astype(jnp.int32), 0, 2)],
    "own entry": lambda a, b, d: a[jnp.arange(len(b)), jnp.clip(b.astype(jnp.int32), 0, 1)],
    "along": lambda a, b, d: jnp.take_along_axis(a, jnp.argsort(b, d), d),
    "scatter": lambda a, b, d: jnp.zeros(3).at[jnp.clip(b.astype(jnp.int32), 0, 2)].add(a),
    "write": lambda a, b, d: a.at[:, 0].set(b),
    "convolution": lambda a, b, d: lax.conv_general_dilated(a, b[..., None], (1,), "SAME"),
    "map": lambda a, b, d: lax.map(lambda x: jnp.sum(x[0] * x[1]), (a, b)),
    "loop over rows": lambda a, b, d: lax.scan(lambda c, x: (c + x.sum(), x * 2), 0.0, a)[0],
    "decaying loop": lambda a, b, d: lax.scan(lambda c, x: (c * 0.5 + x.sum(), x), 0.0, a)[0],
    "prefix loop": lambda a, b, d: lax.scan(lambda c, x: (c + x, c), a[0] * 0, a)[1],
    "loop": lambda a, b, d: lax.fori_loop(0, 3, lambda _, z: jnp.tanh(z + a), a),
    "loop of n": lambda a, b, d: lax.fori_loop(0, len(b), lambda _, z: z * 0.9, a),
    "while": lambda a, b, d: lax.while_loop(lambda z: jnp.max(jnp.abs(z)) > 1, lambda z: z / 2, a),
    "while of each": lambda a, b, d: jax.vmap(
        lambda a: lax.while_loop(lambda z: jnp.max(jnp.abs(z)) > 1, lambda z: z / 2, a)
    )(a),
    "branch": lambda a, b, d: lax.cond(b.sum() > 0, lambda: a, lambda: -a),
    "checkpoint": lambda a, b, d: jax.checkpoint(lambda a: jnp.sin(a) * a)(a),
    "gradient": lambda a, b, d: jax.grad(lambda a: jnp.sum(jnp.sin(a) * a))(a),
}
STEPS = st.lists(
    st.tuples(
        st.sampled_from(list(OPERATIONS)), st.integers(0, 9), st.integers(0, 9), st.integers(0, 2)
    ),
    min_size=1,
    max_size=7,
)


ENDS = {
    "mean": lambda a, b: a.mean(),
    "sum": lambda a, b: a.sum(),
    "ratio": lambda a, b: a.sum() / (1 + jnp.abs(b)).sum(),
    "ratio of means": lambda a, b: a.mean() / jnp.maximum(jnp.abs(b).mean(), 0.1),
}


def made_of(steps, end):
    """A loss; what does not fit is left out. It says which operations are in it."""
    used = collections.defaultdict(set)

    def loss(params, batch):
        values, count = [jnp.asarray(x) for x in (*params, *batch)], len(batch[0])
        for number, (name, i, j, dim) in enumerate(steps):
            a, b = values[-1 - i % len(values)], values[-1 - j % len(values)]
            try:
                values.append(OPERATIONS[name](a, b, dim % max(jnp.ndim(a), 1)))
                used[count].add(number)
            except (TypeError, ValueError, IndexError, AssertionError, ZeroDivisionError):
                pass
        return ENDS[end](values[-1], values[-2])

    return loss, used


def check_random_losses(count):
    """What is proven of so many losses."""

    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(STEPS, st.sampled_from(list(ENDS)), st.permutations(range(ROWS)))
    def check(steps, end, order):
        loss, used = made_of(steps, end)
        with jax.numpy_rank_promotion("allow"):
            found = rows_of_loss(loss, (PARAMS, BATCH), (False, True))
            hypothesis.assume(found.word in ("mean", "sum", "weighted"))
            try:
                check_word(jax.jit(loss), PARAMS, BATCH, found, np.array(order), 1e-9)
            except AssertionError:  # unless it is another loss of other numbers of rows
                assert len({frozenset(x) for x in used.values()}) > 1

    check()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("count", [6, pytest.param(150, marks=pytest.mark.slow)])
def test_what_is_proven_is_true(count):
    check_random_losses(count)
