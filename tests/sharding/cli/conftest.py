"""Runs command lines in this process."""

import json
import sys
import textwrap

import pytest

from sharding.cli import main


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs a command line: the exit code, and what it printed."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which the command adds the directory

    def run(line):
        code = main(line.split())
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def text(run):
    """Runs a command line that succeeds: what it printed, as one line."""

    def text(line):
        code, out, _ = run(line)
        assert code == 0
        return " ".join(out.split())

    return text


@pytest.fixture
def figures(text):
    """Runs a command line that succeeds: the figures that it printed as JSON."""

    def figures(line):
        return json.loads(text(f"{line} --json"), parse_constant=pytest.fail)  # Infinity is no JSON

    return figures


@pytest.fixture
def error(run):
    """Runs a command line that is refused: the one sentence."""

    def error(line):
        code, out, err = run(line)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        return err.rstrip("\n")

    return error


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of the user's, named ``mine``."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text):
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        (tmp_path / "mine.py").write_text(textwrap.dedent(text))

    return write
