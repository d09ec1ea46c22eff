"""The search for hyperparameters: its budget, its edges, and that it is replayed."""

import dataclasses
import math

import _search
import pytest

SPACE = _search.Space(12, -2.5, (0.1, 0.0, 1.0), ({"b2": 0.999}, {"b2": 0.99}, {"b2": 0.95}))


def bowl(exponent, weight_decay=0.1, b2=0.99):
    """A loss with one best configuration."""

    def loss(trial):
        return (
            (trial.exponent - exponent) ** 2
            + 0.01 * (trial.weight_decay - weight_decay) ** 2
            + 0.1 * abs(dict(trial.betas)["b2"] - b2)
        )

    return loss


def run(space, loss):
    """Runs a search; all trials in order."""
    order, known = [], {}
    while True:
        found, wanted = _search.replay(space, known.get)
        if not wanted:
            assert found == known
            return order, found
        order += wanted
        known |= {trial: loss(trial) for trial in wanted}


@pytest.mark.parametrize("budget", [1, 4, 6, 9, 12, 20])
@pytest.mark.parametrize("exponent", [-7.3, -3.6, -2.5, -1.0, 3.0])
def test_budget_is_kept_exactly(budget, exponent):
    space = _search.Space(budget, SPACE.centre, SPACE.weight_decays, SPACE.betas)
    order, found = run(space, bowl(exponent))
    assert len(order) == len(set(order)) == len(found) == budget


def test_order_of_work():
    order, found = run(SPACE, bowl(-2.4))
    assert [t.exponent for t in order[:5]] == [-3.5, -3.0, -2.5, -2.0, -1.5]
    assert [t.weight_decay for t in order[5:7]] == [0.0, 1.0]
    assert [dict(t.betas)["b2"] for t in order[7:9]] == [0.99, 0.95]
    assert [t.exponent for t in order[9:11]] == [-2.25, -2.75]
    assert order[11].exponent == -2.375
    at = _search.best(found)
    assert at.hyper == {"learning_rate": 0.00422, "weight_decay": 0.1, "b2": 0.99}
    assert _search.edges(SPACE, found) == []


@pytest.mark.parametrize("exponent", [-4.0, -1.0])
def test_an_edge_is_extended_until_it_is_none(exponent):
    order, found = run(SPACE, bowl(exponent))
    rates = {t.exponent for t in order}
    assert {exponent - 0.5, exponent, exponent + 0.5} <= rates
    assert "learning_rate" not in _search.edges(SPACE, found)


def test_edges_that_remain_are_named():
    _, found = run(SPACE, bowl(9.0, weight_decay=1.0, b2=0.9))
    assert "learning_rate" in _search.edges(SPACE, found)
    _, found = run(SPACE, bowl(-2.5, weight_decay=2.0, b2=0.9))
    assert _search.edges(SPACE, found) == ["weight_decay", "b2"]
    # By value, wherever it stands among the betas.
    _, found = run(SPACE, bowl(-2.5, b2=0.9))
    assert _search.edges(SPACE, found) == ["b2"]
    turned = dataclasses.replace(SPACE, betas=SPACE.betas[::-1])
    assert _search.edges(turned, run(turned, bowl(-2.5, b2=0.99))[1]) == []
    assert _search.edges(turned, run(turned, bowl(-2.5, b2=0.9))[1]) == ["b2"]


def test_what_the_budget_left_out_is_named():
    few = dataclasses.replace(SPACE, budget=6)
    _, found = run(few, bowl(-2.5))
    assert _search.edges(few, found)[-1] == "2 of 3 betas tried"
    few = dataclasses.replace(SPACE, budget=4)
    _, found = run(few, bowl(-2.5))
    assert _search.edges(few, found)[-2:] == ["2 of 3 weight decays tried", "1 of 3 betas tried"]


def test_learning_rates_move_with_betas():
    """Where betas change the size of updates they are tried at a rate that suits them."""
    moved = dataclasses.replace(SPACE, shifts=(0.0, 0.75, 0.25))

    def loss(trial):
        b2 = dict(trial.betas)["b2"]
        best = {0.999: -2.5, 0.99: -1.7, 0.95: 0.0}[b2]
        return (trial.exponent - best) ** 2 + (0.2 if b2 != 0.99 else 0)

    order, found = run(moved, loss)
    assert [(t.exponent, dict(t.betas)["b2"]) for t in order[7:9]] == [(-1.75, 0.99), (-2.25, 0.95)]
    assert dict(_search.best(found).betas)["b2"] == 0.99
    # In place it would have lost.
    assert loss(dataclasses.replace(order[7], exponent=-2.5)) > found[order[2]]


def test_a_search_that_diverges_goes_down():
    order, found = run(SPACE, lambda t: math.inf if t.exponent > -4.2 else bowl(-4.5)(t))
    assert _search.best(found).exponent == -4.5
    assert len(order) == SPACE.budget


def test_a_search_is_replayed_from_what_is_known():
    order, found = run(SPACE, bowl(-1.6))
    for cut in range(len(order)):
        known = {trial: found[trial] for trial in order[:cut]}
        _, wanted = _search.replay(SPACE, known.get)
        assert wanted[0] == order[cut]
    # Also with a hole, as two workers leave it.
    known = {trial: loss for trial, loss in found.items() if trial != order[2]}
    assert _search.replay(SPACE, known.get)[1] == [order[2]]
