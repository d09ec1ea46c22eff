"""Numbers of the report, from rows alone."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import _search
import _studies
import numpy as np
from _contenders import CONTENDERS
from _rows import Row
from _studies import Rows, loss
from scipy import stats

BASELINE = "adamw"


@dataclasses.dataclass(frozen=True)
class Final:
    """The final runs of a contender on a task.

    Attributes:
      rows: by seed; those that are there.
      edges: hyperparameters that lie on an edge of what was searched.
      searched: runs of the search.
    """

    rows: dict[int, Row]
    edges: list[str]
    searched: int

    @property
    def losses(self) -> np.ndarray:
        """By seed; infinite where a run diverged."""
        return np.array([loss(row) for row in self.rows.values()])

    @property
    def first(self) -> Row:
        """One of the runs."""
        return next(iter(self.rows.values()))

    @property
    def hyper(self) -> dict[str, float]:
        """Of all of them."""
        return self.first["config"]["hyper"]


Finals = Mapping[str, Final]


def final(
    rows: Rows, of: _studies.Cell, edges: Callable[[_search.Found], list[str]]
) -> Final | None:
    """None where the search is not finished or no final run is there."""
    there = {row["config"]["seed"]: row for row in _studies.there(rows, of.finals).values()}
    return Final(there, edges(of.found), len(of.found)) if there else None


def finals(rows: Rows, size: str, task: str) -> dict[str, Final]:
    """Of the contenders that have any."""
    found = {
        name: final(
            rows, _studies.cell(rows, size, task, name), functools.partial(_search.edges, one)
        )
        for name, one in CONTENDERS.items()
    }
    return {name: one for name, one in found.items() if one is not None}


def half_width(
    runs: Sequence[np.ndarray], seeds: int | None = None, further: bool = False
) -> float | None:
    """Of the 95 % interval of the difference of two contenders, a mean over seeds.

    By how far apart runs are of which only the seed differs: what the means of contenders and of
    seeds leave of all losses.

    Args:
      runs: losses of contenders, each on the same seeds; of less than two it is None.
      seeds: of the mean, if not all.
      further: asks for the difference on one further seed instead.
    """
    if len(runs) < 2 or len(runs[0]) < 2:
        return None
    x = np.array(runs)
    rest = x - x.mean(0) - x.mean(1, keepdims=True) + x.mean()
    freedom = (x.shape[0] - 1) * (x.shape[1] - 1)
    deviation = math.sqrt(float((rest**2).sum()) / freedom)
    scale = 2 / (seeds or x.shape[1]) + 2 * further
    return float(stats.t.ppf(0.975, freedom)) * deviation * math.sqrt(scale)


class Difference(NamedTuple):
    """Of two contenders: the mean over seeds, and of its interval what is known."""

    mean: float
    half_width: float | None


def difference(
    found: Finals,
    name: str,
    other: str = BASELINE,
    seeds: int = len(_studies.FINAL_SEEDS),
    further: bool = False,
) -> Difference | None:
    """Loss minus the other's on the seeds that both have; None where one has none or diverged.

    The width of the interval comes from all contenders that have so many seeds.
    """
    one, base = found.get(name), found.get(other)
    if one is None or base is None:
        return None
    both = sorted(one.rows.keys() & base.rows.keys())
    less = np.array([loss(one.rows[seed]) - loss(base.rows[seed]) for seed in both])
    if not less.size or not np.isfinite(less).all():
        return None
    whole = [of.losses for of in found.values() if len(of.rows) == seeds]
    whole = [losses for losses in whole if np.isfinite(losses).all()]
    return Difference(float(less.mean()), half_width(whole, less.size, further))


def at_parents(rows: Rows, size: str, task: str, contender: str) -> np.ndarray:
    """Loss minus that of the float32 parent with the same hyperparameters, for each seed."""
    configs = _studies.parent(rows, size, task, contender)
    parent = CONTENDERS[contender].parent
    pairs = [
        [_studies.loss_of(rows, {**c, "contender": n}) for n in (contender, parent)]
        for c in configs
    ]
    return np.array([one - other for one, other in pairs if None not in (one, other)])


def numbers(values: Sequence[float | None]) -> np.ndarray:
    """Of a row; not a number where the run had none."""
    return np.array(values, float)


def curve(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """Steps and validation losses; not a number where the loss was none."""
    steps, losses = zip(*row["curve"], strict=True)
    return np.array(steps), numbers(losses)


def steps_to_baseline(one: Final, baseline: Final) -> np.ndarray:
    """Steps until the loss with which the baseline ends on the same seed; infinite if never."""
    seeds = sorted(one.rows.keys() & baseline.rows.keys())
    return np.array([_steps_to(one.rows[s], curve(baseline.rows[s])[1][-1]) for s in seeds])


def _steps_to(row: Row, wanted: float) -> float:
    """Steps until the validation loss is first at ``wanted``, between points in a straight line."""
    steps, losses = curve(row)
    below = np.flatnonzero(losses <= wanted)
    if not below.size:
        return math.inf
    i = below[0]
    if i == 0:
        return float(steps[0])
    share = (losses[i - 1] - wanted) / (losses[i - 1] - losses[i])
    return float(steps[i - 1] + share * (steps[i] - steps[i - 1]))


class AtBatch(NamedTuple):
    """A contender's losses at one batch; None where a run is missing, infinite if it diverged."""

    batch: int
    steps: int
    linear: float | None
    square_root: float | None
    best: float | None
    lead: float | None  # of the best, minus the baseline's
    learning_rate: float | None
    on_edge: bool
    others: np.ndarray  # of the best learning rate on other seeds


def batches(rows: Rows, size: str) -> dict[str, list[AtBatch]]:
    """Of the contenders whose base is searched, by batch."""
    searched = [n for n in _studies.MAIN if not _studies.batch(rows, size, n, 1).wanted]
    return {
        name: [_at_batch(rows, size, name, times) for times in _studies.BATCHES]
        for name in searched
    }


def _at_batch(rows: Rows, size: str, contender: str, times: int) -> AtBatch:
    def by_rule(factor: float) -> _studies.Config:
        trial = _studies.batch_rule(rows, size, contender, factor)
        return _studies.batch_config(size, contender, trial, times)

    of, base = (_studies.batch(rows, size, name, times) for name in (contender, BASELINE))
    best, other = (None if one.wanted else _search.best(one.found) for one in (of, base))
    lead = of.found[best] - base.found[other] if best and other else math.nan
    exponents = [trial.exponent for trial in of.found]
    return AtBatch(
        batch=by_rule(times)["batch"],
        steps=by_rule(times)["steps"],
        linear=_studies.loss_of(rows, by_rule(times)),
        square_root=_studies.loss_of(rows, by_rule(math.sqrt(times))),
        best=best and of.found[best],
        lead=lead if math.isfinite(lead) and contender != BASELINE else None,
        learning_rate=best and best.hyper["learning_rate"],
        on_edge=best is not None and best.exponent in (min(exponents), max(exponents)),
        others=np.array([loss(row) for row in _studies.there(rows, of.finals).values()]),
    )
