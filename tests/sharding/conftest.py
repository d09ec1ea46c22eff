"""Warnings of small models, and again in each test."""

import pytest

from sharding import _user_line
from sharding.step import _step_plan


@pytest.fixture(autouse=True)
def warns_of_small_models():
    """Stage 3 warns of what it gathers before the loss, also of the models of tests."""
    # Not the test's monkeypatch: that one must be undone before the test's other fixtures end.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_step_plan, "FEW_BYTES", 0)
        _user_line.warn_once.cache_clear()
        yield
