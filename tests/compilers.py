"""Programs for machines that are not here: tests of them skip without its compiler."""

import pytest

import sharding as shd


def need(target):
    """Skips the test where nothing compiles for the target."""
    try:
        shd.targets.topology(target)
    except ValueError as error:
        if "installed" in str(error) or "not found" in str(error):
            pytest.skip(str(error))
        raise
