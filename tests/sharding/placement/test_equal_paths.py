"""Parameters whose paths are equal as text, ``x/y`` here, are not taken for one another."""

import jax
import numpy as np
import optax
import pytest

import sharding as shd
from sharding import sync

from .. import model

NAMES = [r"x\/y", "x/y"]
SGD = optax.sgd(1.0)


def tree_of(one, two):
    return {"x/y": one, "x": {"y": two}}


def leaves_of(tree):
    return [tree["x/y"], tree["x"]["y"]]


def make_of(tx, *shapes):
    return model.make_of(lambda: tree_of(*map(np.zeros, shapes)), tx)


POWERSGD = sync.powersgd(2, min_compression=1.0)


@pytest.mark.parametrize(
    ("method", "stage"),
    [(POWERSGD, 1), (sync.by_path({"^x/y$": POWERSGD}, default=sync.top_k(0.1, min_size=1)), 2)],
    ids=["residuals", "a rule"],
)
def test_a_sync_keeps_them_apart(method, stage, x64):
    """What has moved and what is owed is the sum of gradients; a rule sees the plain path."""
    shapes = [(32, 32)] * 2
    one, two = model.gradients(dict(enumerate(shapes)), 0).values()
    batch, zero = tree_of(one, 100 * two), model.zero_on(8, stage=stage, sync=method)
    state = model.run(zero, make_of(SGD, *shapes), SGD, model.linear_loss, lambda _: batch, 2)
    found = jax.tree.leaves_with_path(state[1].sync_state)
    assert {path[-2].key for path, _ in found if path[-1].key == "q"} == set(NAMES)
    changed, _ = model.zero_on(8, stage=stage).change_sync(state, tx=SGD)
    for have, g in zip(leaves_of(changed), (one, 100 * two), strict=True):
        np.testing.assert_allclose(-np.asarray(have), 2 * g.mean(0), rtol=1e-12, atol=1e-11)


def test_what_is_described_belongs_to_its_parameter():
    """The first has a momentum, the second has none."""
    tx = optax.masked(optax.trace(0.9), tree_of(True, False))
    found = model.zero_on(4, stage=1).describe(make_of(tx, (8, 16), (16, 8))(), tx=tx)
    rows = {(row.part, row.path): row.shape for row in found.rows}
    assert [rows["params", name] for name in NAMES] == [(8, 16), (16, 8)]
    lines = {line.split()[0]: line.split() for line in str(found).splitlines()}
    full = str(8 * 16 * 4)
    assert [lines[name][5:] for name in NAMES] == [
        ["(None,", "'data')", full, full, str(8 * 16)],
        ["()", full, full],
    ]


def test_matrices_with_owners_keep_their_placement(x64):
    """The first is sharded by its stack, the second, whose stack does not divide, by its rows."""
    cube = optax.stateless(lambda g, p: jax.tree.map(lambda x: -x @ x.T @ x, g))
    tx, shapes = shd.by_owner(cube), [(8, 33, 35), (9, 40, 33)]
    gradients = [np.random.default_rng(i).normal(size=(8, *s)) for i, s in enumerate(shapes)]
    zero, make = model.zero_on(4, stage=2), make_of(tx, *shapes)
    batch = tree_of(*gradients)
    params, _ = model.run(zero, make, tx, model.linear_loss, lambda _: batch, 1)
    for have, g in zip(leaves_of(params), gradients, strict=True):
        g = g.mean(0)
        np.testing.assert_allclose(have, -g @ g.swapaxes(1, 2) @ g, rtol=1e-10, atol=1e-12)
