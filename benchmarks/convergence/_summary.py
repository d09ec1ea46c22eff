"""Numbers of the report, from rows alone."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import _search
import _sizes
import _studies
import numpy as np
from _rows import Row, key_of

Rows = Mapping[str, Row]
BASELINE = "adamw"


@dataclasses.dataclass(frozen=True)
class Final:
    """The final runs of a contender on a task.

    Attributes:
      rows: by seed; those that are there.
      hyper: what they were run with.
      edges: hyperparameters that lie on an edge of what was searched.
      searched: runs of the search.
    """

    rows: dict[int, Row]
    hyper: dict[str, float]
    edges: list[str]
    searched: int

    @property
    def losses(self) -> np.ndarray:
        """By seed; infinite where a run diverged."""
        return np.array([loss(row) for row in self.rows.values()])

    @property
    def state_bytes(self) -> float:
        """Of the optimizer, for each parameter."""
        row = next(iter(self.rows.values()))
        return row["state_bytes"] / row["num_params"]


def loss(row: Row) -> float:
    """At the end; infinite if the run diverged."""
    return math.inf if row["diverged"] else row["loss"]


def final(rows: Rows, size: str, task: str, contender: str) -> Final | None:
    """None where the search is not finished or no final run is there."""
    found, wanted = _studies.tuned(rows, size, task, contender)
    if wanted:
        return None
    hyper = _search.best(found).hyper
    configs = {
        seed: _sizes.config(size, task, contender, seed, hyper) for seed in _studies.FINAL_SEEDS
    }
    there = {seed: rows[key_of(c)] for seed, c in configs.items() if key_of(c) in rows}
    if not there:
        return None
    edges = _search.edges(_studies.space(contender), found)
    return Final(there, hyper, edges, len(found))


def finals(rows: Rows, size: str, task: str, contenders: Sequence[str]) -> dict[str, Final]:
    """Of the contenders that have any."""
    found = {name: final(rows, size, task, name) for name in contenders}
    return {name: one for name, one in found.items() if one is not None}


def difference(one: Final, baseline: Final) -> np.ndarray:
    """Loss minus the baseline's, for each seed that both have."""
    seeds = sorted(one.rows.keys() & baseline.rows.keys())
    return np.array([loss(one.rows[s]) - loss(baseline.rows[s]) for s in seeds])


def curve(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """Steps and validation losses; not a number where the loss was none."""
    steps, losses = zip(*row["curve"], strict=True)
    return np.array(steps), np.array([np.nan if x is None else x for x in losses])


def target(baseline: Final) -> float:
    """The baseline's last validation loss on the windows of the curves, mean over its seeds."""
    return float(np.mean([curve(row)[1][-1] for row in baseline.rows.values()]))


def steps_to(row: Row, wanted: float) -> float:
    """Steps until the validation loss is first at ``wanted``, between points in a straight line.

    Infinite if it never is.
    """
    steps, losses = curve(row)
    below = np.flatnonzero(losses <= wanted)
    if not below.size:
        return math.inf
    i = below[0]
    if i == 0:
        return float(steps[0])
    share = (losses[i - 1] - wanted) / (losses[i - 1] - losses[i])
    return float(steps[i - 1] + share * (steps[i] - steps[i - 1]))


@dataclasses.dataclass(frozen=True)
class AtBatch:
    """A contender's losses at one batch; None where a run is missing, infinite if it diverged."""

    batch: int
    steps: int
    linear: float | None
    square_root: float | None
    searched: float | None
    learning_rate: float | None
    on_edge: bool


def batches(rows: Rows, size: str, contender: str) -> list[AtBatch]:
    """By batch, as far as there are runs."""
    if _studies.batch_search(rows, size, contender, 1)[1]:
        return []
    return [_at_batch(rows, size, contender, times) for times in _studies.BATCH_BUDGETS]


def _at_batch(rows: Rows, size: str, contender: str, times: int) -> AtBatch:
    found, wanted = _studies.batch_search(rows, size, contender, times)
    linear = _studies.batch_linear(rows, size, contender, times)
    at_linear = _studies.loss_of(rows, linear)
    at_root = _studies.loss_of(rows, _studies.batch_square_root(rows, size, contender, times))
    trial = None if wanted else _search.best(found)
    exponents = [one.exponent for one in found]
    on_edge = trial is not None and trial.exponent in (min(exponents), max(exponents))
    rate = None if trial is None else trial.hyper["learning_rate"]
    searched = None if trial is None else found[trial]
    if searched is not None and at_linear is not None and at_linear < searched:
        searched, rate, on_edge = at_linear, linear["hyper"]["learning_rate"], True
    return AtBatch(linear["batch"], linear["steps"], at_linear, at_root, searched, rate, on_edge)
