"""What is proven of losses: the word of each, and that the word is true."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_ext import traced_graph
from sharding.loss._rows import rows_of_loss

from .losses import LOSSES, ROWS

# The words that say how the loss of all rows follows from those of halves.
PROVEN = [name for name, case in LOSSES.items() if case.word in ("mean", "sum", "weighted")]


@pytest.fixture(autouse=True)
def as_users_write():
    with jax.numpy_rank_promotion("allow"):
        yield


def proven(case, batch=None):
    batch = case.batch if batch is None else batch
    return rows_of_loss(case.loss, (case.params, batch), (False, True))


@pytest.mark.parametrize("name", LOSSES)
def test_the_word_of_a_loss(name):
    case = LOSSES[name]
    found = proven(case)
    assert found.word == case.word, str(found)
    if case.word == "coupled":
        assert case.cause in str(found)
        in_all = "with 16 rows" in case.cause or "k **" in case.cause  # no single equation
        assert in_all or "losses.py:" in str(found)


def rows_of(batch, index):
    return jax.tree.map(lambda x: x[index], batch)


def filled(params, rng):
    """Parameters, random where there are only types."""
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape) / 3, x.dtype)
        if isinstance(x, jax.ShapeDtypeStruct)
        else x,
        params,
    )


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", PROVEN)
def test_the_word_is_true(name):
    """Of other orders of rows, and of halves: sums and weights are added, and put in their place."""
    case = LOSSES[name]
    params, order = filled(case.params, np.random.default_rng(1)), np.random.permutation(ROWS)
    batches = [case.batch, rows_of(case.batch, order)]
    halves = [rows_of(case.batch, order[: ROWS // 2]), rows_of(case.batch, order[ROWS // 2 :])]
    if case.word != "weighted":
        run = jax.jit(lambda params, batches: [case.loss(params, batch) for batch in batches])
        full, permuted, *each = run(params, batches + halves)
        rtol = 1e-12 if full.dtype == jnp.float64 else 1e-5
        np.testing.assert_allclose(permuted, full, rtol=rtol)
        np.testing.assert_allclose(np.sum(each) / (1 + (case.word == "mean")), full, rtol=rtol)
        return

    def values(batch, given=()):
        """Those of the graph, if some are given."""
        graph = proven(case, batch).graph
        found = dict(enumerate(jax.tree.leaves((params, batch)))) | graph.constants
        for eqn in graph.equations:
            traced_graph.evaluate([eqn], found)
            found |= {k: x for k, x in dict(given).items() if k in eqn.results}
        return found

    found = proven(case)
    full, each = values(case.batch), [values(half) for half in halves]
    states = {k: found.states[k] for pair in found.ratios for k in pair if k is not None}
    totals = {k: sum(x[k] for x in each) / (2 - state.power) for k, state in states.items()}
    for k, total in totals.items():
        np.testing.assert_allclose(total, full[k], rtol=1e-12)
    loss = found.graph.outputs[0]
    divided = [values(half, totals)[loss] for half in halves]
    if all(x is not None for x, _ in found.ratios):
        np.testing.assert_allclose(divided, [full[loss]] * 2, rtol=1e-12)
    else:  # rows that are divided before they are added
        np.testing.assert_allclose(sum(divided), full[loss], rtol=1e-12)
