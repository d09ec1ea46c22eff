"""Which cases of a parametrized test run always, and which with the slow ones alone."""

import pytest


def tiers(cases, fast):
    """Cases of ``parametrize``: those that are not in ``fast`` are slow, since others see as much.

    ``fast`` is a container of cases, or a function that says whether a case is one of them.
    """
    is_fast = fast if callable(fast) else fast.__contains__
    return [case if is_fast(case) else slow(case) for case in cases]


def slow(case):
    """A case that ``make test-all`` runs."""
    return pytest.param(*(case if type(case) is tuple else (case,)), marks=pytest.mark.slow)
