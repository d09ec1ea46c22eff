"""The walk over learning rates: it brackets the optimum, in few runs, and is replayed."""

import math

import _search
import _walk
import pytest

START = _search.Trial(-3.0, 0.1, (("b3", 0.9999),))
OTHER = (("b3", 0.995),)


def parabola(optimum, better=0.0):
    """Losses with the optimum at an exponent; other betas are better by an amount."""

    def loss(trial):
        return (trial.exponent - optimum) ** 2 - better * (trial.betas == OTHER)

    return loss


@pytest.mark.parametrize("optimum", [-4.5, -3.25, -3.0, -2.9, -2.25, -1.0])
@pytest.mark.parametrize("strides", [(0.25,), (0.5, 0.25)])
def test_it_ends_at_the_best_of_the_grid_with_both_neighbours(optimum, strides):
    found, wanted = _search.follow(_walk.walk(START, strides), parabola(optimum))
    assert not wanted
    best = _search.best(found)
    assert abs(best.exponent - optimum) <= 0.125
    assert _walk.bracketed(found, 0.25)


def test_three_runs_suffice_at_the_optimum_and_a_fourth_one_step_off():
    for optimum, runs in ((-3.0, 3), (-3.25, 3), (-2.75, 4)):
        found, _ = _search.follow(_walk.walk(START, (0.25,)), parabola(optimum))
        assert len(found) == runs


def test_the_lower_learning_rate_is_asked_first():
    walk = _walk.walk(START, (0.25,))
    assert next(walk) == [START]
    assert walk.send([1.0])[0].exponent == -3.25


def test_other_betas_are_tried_at_their_learning_rate_and_walked_if_better():
    others = [(OTHER, 0.5)]
    worse, _ = _search.follow(_walk.walk(START, (0.25,), others), parabola(-3.0, better=-1.0))
    assert [t.exponent for t in worse if t.betas == OTHER] == [-2.5]
    assert _search.best(worse).betas == START.betas
    better, _ = _search.follow(_walk.walk(START, (0.25,), others), parabola(-3.0, better=1.0))
    best = _search.best(better)
    assert (best.betas, best.exponent) == (OTHER, -3.0)
    assert _walk.bracketed(better, 0.25)


def test_what_diverges_is_left_downwards():
    def loss(trial):
        return math.inf if trial.exponent > -4 else (trial.exponent + 4.5) ** 2

    found, _ = _search.follow(_walk.walk(START, (0.25,)), loss)
    assert _search.best(found).exponent == -4.5


def test_a_search_without_an_optimum_ends_and_says_so():
    found, wanted = _search.follow(_walk.walk(START, (0.25,)), lambda trial: trial.exponent)
    assert not wanted
    assert len(found) <= _walk.LIMIT + 1
    assert not _walk.bracketed(found, 0.25)


def test_a_stopped_search_goes_on_where_it_was():
    loss = parabola(-2.5, better=1.0)
    others = [(OTHER, 0.5)]
    whole, _ = _search.follow(_walk.walk(START, (0.5, 0.25), others), loss)
    known = {}
    while True:
        found, wanted = _search.follow(_walk.walk(START, (0.5, 0.25), others), known.get)
        assert found == known
        if not wanted:
            break
        known |= {trial: loss(trial) for trial in wanted}
    assert known == whole
