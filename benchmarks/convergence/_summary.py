"""Numbers of the report, from rows alone."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import _search
import _studies
import numpy as np
from _contenders import CONTENDERS
from _rows import Row, key_of
from scipy import stats

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
    configs = _studies.final_configs(size, task, contender, hyper)
    there = {c["seed"]: rows[key_of(c)] for c in configs if key_of(c) in rows}
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


@dataclasses.dataclass(frozen=True)
class Spread:
    """How far apart runs are of which only the seed differs, from all contenders together.

    Attributes:
      deviation: standard deviation of what the means of contenders and of seeds leave.
      freedom: its degrees of freedom.
    """

    deviation: float
    freedom: int

    def half_width(self, seeds: int, further: bool = False) -> float:
        """Of the 95 % interval of the difference of two contenders, a mean over seeds.

        Or of that of the difference on one ``further`` seed.
        """
        scale = 2 / seeds + (2 if further else 0)
        quantile = float(stats.t.ppf(0.975, self.freedom))
        return quantile * self.deviation * math.sqrt(scale)


def spread(losses: Sequence[np.ndarray]) -> Spread | None:
    """Of the losses of contenders, each on the same seeds; None of less than two of them."""
    if len(losses) < 2 or len(losses[0]) < 2:
        return None
    x = np.array(losses)
    rest = x - x.mean(0) - x.mean(1, keepdims=True) + x.mean()
    freedom = (x.shape[0] - 1) * (x.shape[1] - 1)
    return Spread(math.sqrt(float((rest**2).sum()) / freedom), freedom)


def spread_of(found: Mapping[str, Final]) -> Spread | None:
    """Of the contenders that have all final runs, none of which diverged."""
    whole = [one for one in found.values() if len(one.rows) == len(_studies.FINAL_SEEDS)]
    return spread([one.losses for one in whole if one.finite])


def at_parents(rows: Rows, size: str, task: str, contender: str) -> np.ndarray:
    """Loss minus that of the float32 parent with the same hyperparameters, for each seed."""
    parent = CONTENDERS[contender].parent
    of = final(rows, size, task, parent) if parent else None
    if of is None:
        return np.array([])
    configs = _studies.parent_configs(rows, size, task, contender)
    pairs = [(rows.get(key_of(config)), of.rows.get(config["seed"])) for config in configs]
    return np.array([loss(one) - loss(other) for one, other in pairs if one and other])


def numbers(values: Sequence[float | None]) -> np.ndarray:
    """Of a row; not a number where the run had none."""
    return np.array([np.nan if x is None else x for x in values])


def curve(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """Steps and validation losses; not a number where the loss was none."""
    steps, losses = zip(*row["curve"], strict=True)
    return np.array(steps), numbers(losses)


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
    """A contender's losses at one batch; None where a run is missing, infinite if it diverged.

    ``others`` are those of the best learning rate on other seeds.
    """

    batch: int
    steps: int
    linear: float | None
    square_root: float | None
    best: float | None
    learning_rate: float | None
    on_edge: bool
    others: np.ndarray


def batches(rows: Rows, size: str, contender: str) -> list[AtBatch]:
    """By batch, as far as there are runs."""
    if _studies.batch_search(rows, size, contender, 1)[1]:
        return []
    return [_at_batch(rows, size, contender, times) for times in _studies.BATCH_BUDGETS]


def lead(rows: Rows, size: str, contender: str) -> dict[int, float]:
    """The best loss minus the baseline's at the same batch, where both are there."""
    base = {at.batch: at.best for at in batches(rows, size, BASELINE)}
    out = {}
    for at in batches(rows, size, contender):
        other = base.get(at.batch)
        if contender != BASELINE and at.best is not None and other is not None:
            out[at.batch] = at.best - other
    return {batch: less for batch, less in out.items() if math.isfinite(less)}


def batch_finals(rows: Rows, size: str) -> dict[int, dict[str, np.ndarray]]:
    """Losses on the other seeds by batch and contender, where all are there and finite."""
    out: dict[int, dict[str, np.ndarray]] = {}
    for name in _studies.MAIN:
        for at in batches(rows, size, name):
            if len(at.others) == len(_studies.BATCH_SEEDS) and np.isfinite(at.others).all():
                out.setdefault(at.batch, {})[name] = at.others
    return out


def _at_batch(rows: Rows, size: str, contender: str, times: int) -> AtBatch:
    def config(trial: _search.Trial) -> _studies.Config:
        return _studies.batch_config(size, contender, trial, times)

    linear = config(_studies.batch_linear(rows, size, contender, times))
    root = config(_studies.batch_square_root(rows, size, contender, times))
    found, _ = _studies.batch_trials(rows, size, contender, times)
    best = _studies.batch_best(rows, size, contender, times)
    exponents = [trial.exponent for trial in found]
    others = _studies.batch_seeds(rows, size, contender, times)
    return AtBatch(
        batch=linear["batch"],
        steps=linear["steps"],
        linear=_studies.loss_of(rows, linear),
        square_root=_studies.loss_of(rows, root),
        best=None if best is None else found[best],
        learning_rate=None if best is None else best.hyper["learning_rate"],
        on_edge=best is not None and best.exponent in (min(exponents), max(exponents)),
        others=np.array([loss(rows[key_of(one)]) for one in others if key_of(one) in rows]),
    )


def spike(
    rows: Rows, size: str, task: str, contender: str, hyper: dict[str, float], warm: bool
) -> list[Row]:
    """The runs of that study with warm-up or without, as far as they are there."""
    configs = _studies.spike_configs(size, task, contender, hyper, warm)
    return [rows[key_of(config)] for config in configs if key_of(config) in rows]


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
      half_width: of the interval around their mean in which a further one is expected.
    """

    name: str
    searched: int
    committed: Final | None
    loss: float | None
    difference: float | None
    expected: np.ndarray | None
    half_width: float | None

    @property
    def verdict(self) -> str:
        """Whether the rerun's difference is one that the committed ones let expect."""
        if self.difference is None or self.expected is None or self.half_width is None:
            return "-"
        away = abs(self.difference - float(np.mean(self.expected)))
        return "yes" if away <= self.half_width else "no"


def reruns(known: Rows, fresh: Rows, size: str, contenders: Sequence[str]) -> list[Rerun]:
    """Of the contenders in order; ``known`` are the committed rows, ``fresh`` the others."""

    def of(name: str) -> float | None:
        return _studies.loss_of(fresh, _studies.rerun_config(known, size, name))

    every = finals(known, size, "next_token", list(CONTENDERS))
    baseline, apart, out = every.get(BASELINE), spread_of(every), []
    for name in contenders:
        _, searched = _studies.best_known(known, size, "next_token", name)
        committed, loss, base = every.get(name), of(name), of(BASELINE)
        other = name != BASELINE
        difference = loss - base if other and loss is not None and base is not None else None
        expected = difference_of(committed, baseline) if other else None
        seeds = 0 if expected is None else len(expected)
        half = apart.half_width(seeds, further=True) if apart and seeds else None
        out.append(Rerun(name, searched, committed, loss, difference, expected, half))
    return out


def difference_of(one: Final | None, baseline: Final | None) -> np.ndarray | None:
    """Loss minus the baseline's by seed, if both are there."""
    return None if one is None or baseline is None else difference(one, baseline)
