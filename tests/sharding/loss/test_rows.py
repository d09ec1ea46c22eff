"""What is proven of losses: the word of each, and that the word is true."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_ext import traced_graph
from sharding.loss._rows import rows_of_loss

from .losses import LOSSES, ROWS

# The words that say how the loss of all rows follows from those of halves.
PROVEN = [name for name, case in LOSSES.items() if case.word in ("mean", "sum", "weighted")]
# One of each kind; the others are of the slow tier.
QUICK = ["vmap by row", "labels by index", "preferences", "a loop that adds rows, over n", "sum"]
QUICK += ["masked, none", "weights that sum to 1", "means by class"]
SOME = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PROVEN]


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
        # Some are found by no single equation.
        in_all = any(x in case.cause for x in ("with 16 rows", "k **", "another program"))
        assert in_all or "losses.py:" in str(found)


def rows_of(batch, index):
    return jax.tree.map(lambda x: x[index], batch)


def filled(params, rng):
    """Parameters, random where there are only types."""
    return jax.tree.map(
        lambda x: (
            jnp.asarray(rng.normal(size=x.shape) / 3, x.dtype)
            if isinstance(x, jax.ShapeDtypeStruct)
            else x
        ),
        params,
    )


def check_word(loss, params, batch, found, order, rtol):
    """Of other orders of rows, and of halves, whose sums and weights are added."""
    halves = [rows_of(batch, index) for index in np.split(order, 2)]
    full, permuted, *each = (loss(params, x) for x in (batch, rows_of(batch, order), *halves))
    np.testing.assert_allclose(permuted, full, rtol, rtol)
    if found.word in ("mean", "sum"):
        share = 1 + (found.word == "mean")
        np.testing.assert_allclose(np.sum(each) / share, full, rtol, rtol)
    if found.word == "weighted":
        check_ratios(loss, params, [batch, *halves], found, rtol)


def check_ratios(loss, params, batches, found, rtol):
    """The totals of sums and weights, in the graph of a half, give the loss of all rows."""

    graphs = [rows_of_loss(loss, (params, batch), (False, True)).graph for batch in batches]
    programs = [[eqn.primitive for eqn in graph.equations] for graph in graphs]
    if programs.count(programs[0]) < len(programs):
        return  # of other numbers of rows it is another program, as of dims that are 1

    @functools.partial(jax.jit, static_argnums=0)
    def values(number, batch, given):
        """The sums and weights, and the loss, with some of them given."""
        graph = graphs[number]
        values = dict(enumerate(jax.tree.leaves((params, batch)))) | graph.constants
        for eqn in graph.equations:
            traced_graph.evaluate([eqn], values)
            values |= {k: x for k, x in given.items() if k in eqn.results}
        return {k: values[k] for k in states}, values[graph.outputs[0]]

    states = {k: found.states[k] for pair in found.ratios for k in pair if k is not None}
    full, loss = values(0, batches[0], {})
    each = [values(number, batches[number], {})[0] for number in (1, 2)]
    totals = {k: sum(x[k] for x in each) / 2 ** (1 - state.power) for k, state in states.items()}
    for k, total in totals.items():
        np.testing.assert_allclose(total, full[k], rtol, rtol)
    if None not in [x for x, _ in found.ratios]:
        divided = [values(number, batches[number], totals)[1] for number in (1, 2)]
        np.testing.assert_allclose(divided, [loss] * 2, rtol, rtol)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", SOME)
def test_the_word_is_true(name):
    case = LOSSES[name]
    params, order = (
        filled(case.params, np.random.default_rng(1)),
        np.random.default_rng(2).permutation(ROWS),
    )
    rtol = 1e-5 if of_float32(params) else 1e-12
    check_word(jax.jit(case.loss), params, case.batch, proven(case), order, rtol)


def of_float32(params):
    return any(x.dtype == jnp.float32 for x in jax.tree.leaves(params))
