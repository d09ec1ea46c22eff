"""The list of planted faults cannot rot: each text occurs once, and each test is there."""

import ast
import re

import pytest

from . import mutations

FAULTS = mutations.faults()


def test_there_are_enough():
    assert len(FAULTS) >= 100
    assert len({(fault.file, fault.old) for fault in FAULTS}) == len(FAULTS)
    mended = sum(bool(re.search(r"\([0-9a-f]{7}\)$", fault.breaks)) for fault in FAULTS)
    assert mended >= 150  # faults that were made once


def without_comments(text):
    return [line.partition("#")[0].rstrip() for line in text.splitlines()]


def test_each_text_occurs_once_and_each_fault_is_code():
    for fault in FAULTS:
        ast.parse(fault.plant((mutations.ROOT / fault.file).read_text()))
        assert without_comments(fault.old) != without_comments(fault.new), fault


def test_each_test_is_there():
    for fault in FAULTS:
        assert fault.tests, fault
        for test in fault.tests:
            path, *names = test.split("::")
            text = (mutations.ROOT / path).read_text()
            for name in names:
                assert re.search(rf"(def|class) {name}\b", text), test


def test_a_text_that_is_not_there_raises():
    fault = mutations.Fault.parse("optax_ext/_came.py tests/x.py\nit breaks\n-no such text\n+a")
    with pytest.raises(ValueError, match="0 times, not once"):
        fault.plant((mutations.ROOT / fault.file).read_text())
