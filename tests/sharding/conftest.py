"""Warnings of small models, and again in each test."""

import pytest

from sharding.step import _step_plan


@pytest.fixture(autouse=True)
def warns_of_small_models(monkeypatch):
    """Stage 3 warns of what it gathers before the loss, also of the models of tests."""
    monkeypatch.setattr(_step_plan, "FEW_BYTES", 0)
    _step_plan.warn_once.cache_clear()
