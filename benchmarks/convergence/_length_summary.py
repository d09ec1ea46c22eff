"""Numbers of the study of lengths, from rows alone."""

import dataclasses
from collections.abc import Mapping, Sequence

import _lengths
import _search
import _summary
import _walk
import numpy as np
from _rows import Row, key_of
from _summary import BASELINE, Final

Rows = Mapping[str, Row]

# What is asked beside the difference to the baseline: a name, and which minus which.
CONTRASTS = {
    "confidence, debiased": ("came_debiased", "adafactor"),
    "confidence, as published": ("came", "adafactor"),
    "debiasing": ("came_debiased", "came"),
}


@dataclasses.dataclass(frozen=True)
class Point:
    """A difference of two contenders at one length.

    Attributes:
      steps: of the runs.
      mean: over the seeds that both have.
      half_width: of its 95 % interval; None while less than two contenders have all seeds.
      seeds: how many.
    """

    steps: int
    mean: float
    half_width: float | None
    seeds: int

    @property
    def level(self) -> bool:
        """Whether the interval has 0 in it."""
        return self.half_width is not None and abs(self.mean) <= self.half_width


def final(rows: Rows, size: str, task: str, contender: str, steps: int) -> Final | None:
    """The final runs that are there; None without any."""
    cell = _lengths.cell(rows, size, task, contender, steps)
    there = {c["seed"]: rows[key_of(c)] for c in cell.finals if key_of(c) in rows}
    if not there:
        return None
    edges = [] if _walk.bracketed(cell.found, _lengths.STRIDE) else ["learning_rate"]
    betas = [dict(trial.betas) for trial in cell.found]
    for name, value in _search.best(cell.found).betas:
        values = {of[name] for of in betas}
        if len(values) > 1 and value in (min(values), max(values)):
            edges.append(name)
    return Final(there, cell.finals[0]["hyper"], edges, len(cell.found))


def finals(rows: Rows, size: str, task: str, steps: int) -> dict[str, Final]:
    """Of the contenders that have any."""
    found = {name: final(rows, size, task, name, steps) for name in _lengths.CONTESTED}
    return {name: one for name, one in found.items() if one is not None}


def every(rows: Rows, size: str, task: str) -> dict[int, dict[str, Final]]:
    """By length; those without finals are left out."""
    found = {steps: finals(rows, size, task, steps) for steps in _lengths.LENGTHS[size]}
    return {steps: contenders for steps, contenders in found.items() if contenders}


def spread(found: Mapping[str, Final], steps: int) -> _summary.Spread | None:
    """Of the contenders that have all seeds of this length, none of which diverged."""
    seeds = list(_lengths.seeds_of(steps))
    whole = [one for one in found.values() if sorted(one.rows) == seeds and one.finite]
    return _summary.spread([np.array([one.rows[s]["loss"] for s in seeds]) for one in whole])


def points(
    found: Mapping[int, Mapping[str, Final]], contender: str, other: str = BASELINE
) -> list[Point]:
    """Loss minus the other's by length, where both are there and finite."""
    out = []
    for steps, contenders in found.items():
        one, base = contenders.get(contender), contenders.get(other)
        if one is None or base is None:
            continue
        less = _summary.difference(one, base)
        if less.size and np.isfinite(less).all():
            apart = spread(contenders, steps)
            half = apart.half_width(len(less)) if apart else None
            out.append(Point(steps, float(less.mean()), half, len(less)))
    return out


def level_at(points: Sequence[Point]) -> str:
    """The lengths at which the intervals have 0 in them, in words."""
    known = [point for point in points if point.half_width is not None]
    if not known:
        return "-"
    level = [f"{point.steps:,}" for point in known if point.level]
    return ", ".join(level) if level else f"none of {len(known)}"
