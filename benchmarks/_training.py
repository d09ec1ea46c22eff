"""Runs of examples/train_lm.py for benchmarks that compare how they learn."""

import json
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence

import _results


def summary_of(runs: pathlib.Path, name: str, options: Sequence[str]) -> dict:
    """The summary of the run runs/name; it is trained with the options unless it is finished.

    Of its other files only the checkpoints are removed, which a finished run does not need.
    """
    summary = runs / name / "summary.json"
    if not summary.exists():
        script = _results.ROOT / "examples" / "train_lm.py"
        command = [sys.executable, str(script), "--runs-dir", str(runs), "--name", name, *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        shutil.rmtree(runs / name / "checkpoints")
    return json.loads(summary.read_text())


def losses_of(runs: pathlib.Path, name: str, kind: str) -> list[tuple[int, float]]:
    """Steps and losses of a run, ``"loss"`` (training) or ``"val_loss"``."""
    lines = (runs / name / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [(row["step"], row[kind]) for row in rows if kind in row]
