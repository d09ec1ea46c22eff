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
# Of Student's t, 97.5 %, by the number of values; more are not needed.
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}


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
    def finite(self) -> bool:
        """Whether none diverged."""
        return bool(np.isfinite(self.losses).all())

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


def half_width(values: np.ndarray, further: bool = False) -> float:
    """Of the 95 % interval of a mean, or of that of one ``further`` value; 0 for one value."""
    n = len(values)
    if n < 2:
        return 0.0
    scale = 1 / n + (1 if further else 0)
    return STUDENT[n] * float(np.std(values, ddof=1)) * math.sqrt(scale)


def curve(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """Steps and validation losses; not a number where the loss was none."""
    steps, losses = zip(*row["curve"], strict=True)
    return np.array(steps), np.array([np.nan if x is None else x for x in losses])


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


def steps_to_baseline(one: Final, baseline: Final) -> np.ndarray:
    """Steps until the loss with which the baseline ends on the same seed; infinite if never."""
    seeds = sorted(one.rows.keys() & baseline.rows.keys())
    ends = [curve(baseline.rows[seed])[1][-1] for seed in seeds]
    return np.array([steps_to(one.rows[s], y) for s, y in zip(seeds, ends, strict=True)])


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


def lead(rows: Rows, size: str, contender: str) -> dict[int, float]:
    """Searched loss minus the baseline's at the same batch, where both are there."""
    base = {at.batch: at.searched for at in batches(rows, size, BASELINE)}
    out = {}
    for at in batches(rows, size, contender):
        other = base.get(at.batch)
        if contender != BASELINE and at.searched is not None and other is not None:
            out[at.batch] = at.searched - other
    return {batch: less for batch, less in out.items() if math.isfinite(less)}


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


def spike(rows: Rows, size: str, task: str, contender: str, warm: bool) -> list[Row]:
    """The runs of that study with warm-up or without, as far as they are there."""
    configs = _studies.spike_configs(rows, size, task, contender)
    return [
        rows[key_of(config)]
        for config in configs
        if bool(config["warmup"]) == warm and key_of(config) in rows
    ]


def early_update(row: Row) -> np.ndarray:
    """RMS of the first updates of matrices over the peak learning rate; nan where it was none."""
    values = [np.nan if x is None else x for x in row["early_update_rms"]]
    return np.array(values) / row["config"]["hyper"]["learning_rate"]


def corpus(rows: Rows) -> int | None:
    """The text of rows that all have the same; None of none."""
    return next((row["corpus"] for row in rows.values()), None)


@dataclasses.dataclass(frozen=True)
class Rerun:
    """A run on a fresh seed beside the committed ones; None is what is not there.

    Attributes:
      name: of the contender.
      searched: runs of the search that chose its hyperparameters.
      committed: runs of the comparison.
      loss: of the rerun.
      difference: of that to the baseline's rerun.
      expected: differences of the committed runs, by seed.
    """

    name: str
    searched: int
    committed: Final | None
    loss: float | None
    difference: float | None
    expected: np.ndarray | None

    @property
    def verdict(self) -> str:
        """Whether the rerun's difference is one that the committed ones let expect."""
        if self.difference is None or self.expected is None or len(self.expected) < 2:
            return "-"
        half = half_width(self.expected, further=True)
        return "yes" if abs(self.difference - np.mean(self.expected)) <= half else "no"


def reruns(known: Rows, fresh: Rows, size: str, contenders: Sequence[str]) -> list[Rerun]:
    """Of the contenders in order; ``known`` are the committed rows, ``fresh`` the others."""

    def of(name: str) -> float | None:
        hyper, _ = _studies.best_known(known, size, "next_token", name)
        config = _sizes.config(size, "next_token", name, _studies.RERUN_SEED, hyper)
        return _studies.loss_of(fresh, config)

    baseline, out = final(known, size, "next_token", BASELINE), []
    for name in contenders:
        _, searched = _studies.best_known(known, size, "next_token", name)
        committed, loss, base = final(known, size, "next_token", name), of(name), of(BASELINE)
        other = name != BASELINE
        difference = loss - base if other and loss is not None and base is not None else None
        expected = difference_of(committed, baseline) if other else None
        out.append(Rerun(name, searched, committed, loss, difference, expected))
    return out


def difference_of(one: Final | None, baseline: Final | None) -> np.ndarray | None:
    """Loss minus the baseline's by seed, if both are there."""
    return None if one is None or baseline is None else difference(one, baseline)
