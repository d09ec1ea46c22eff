"""The study of formats: state and parameters in few bits, in runs long enough to drift.

Each has the hyperparameters that the study of lengths chose for its optimizer in float32 at the
same length, and the seeds of its final runs, so that runs differ in rounding alone.
"""

import dataclasses
from collections.abc import Iterator, Mapping

import _lengths
import _studies
import _summary
import numpy as np
from _formats import FORMATS
from _rows import Row, key_of

STEPS = {"cpu": 3000, "smoke": 80}
TASK = "next_token"
EARLY = 0.15  # of a run: the nearest point of a curve is what short runs would have seen

Rows = Mapping[str, Row]


def configs(rows: Rows, size: str, name: str) -> list[_lengths.Config]:
    """The runs of a format; none until the search of its optimizer is finished."""
    finals = _parents(rows, size, name)
    return [{**config, "contender": name} for config in finals]


def _parents(rows: Rows, size: str, name: str) -> list[_lengths.Config]:
    parent = FORMATS[name].parent
    assert parent is not None
    return _lengths.cell(rows, size, TASK, parent, STEPS[size]).finals


def used(rows: Rows, size: str) -> dict[str, Row]:
    """The rows of this study, float32's included."""
    found = [c for name in FORMATS for of in (configs, _parents) for c in of(rows, size, name)]
    return {key_of(config): rows[key_of(config)] for config in found if key_of(config) in rows}


def plans(rows: Rows, size: str) -> Iterator[_studies.Plan]:
    """All formats on the first seed before the next: stopped early, seeds are complete."""
    for place, seed in enumerate(_lengths.seeds_of(STEPS[size])):
        for name in FORMATS:
            found = configs(rows, size, name)[place : place + 1]
            missing = [config for config in found if key_of(config) not in rows]
            yield _studies.Plan(
                name=f"format, seed {seed}, {name}",
                total=1,
                done=len(found) - len(missing),
                ready=missing,
                waits="" if found else "the search of its optimizer in float32",
            )


@dataclasses.dataclass(frozen=True)
class Drift:
    """A format beside float32, by seed.

    Attributes:
      end: final loss minus float32's, on the large set of windows.
      steps: of the curve.
      curve: validation loss minus float32's, (seeds, points), on fewer windows.
      state_bytes: of the optimizer, for each parameter.
    """

    end: np.ndarray
    steps: np.ndarray
    curve: np.ndarray
    state_bytes: float

    @property
    def early(self) -> tuple[int, np.ndarray]:
        """The step of the curve's point at which a short run would end, and its values."""
        at = int(np.abs(self.steps - EARLY * self.steps[-1]).argmin())
        return int(self.steps[at]), self.curve[:, at]


def drift(rows: Rows, size: str, name: str) -> Drift | None:
    """Of the seeds on which both are there; None without any, or where one diverged."""
    pairs = [
        (rows[key_of(one)], rows[key_of(other)])
        for one, other in zip(configs(rows, size, name), _parents(rows, size, name), strict=True)
        if key_of(one) in rows and key_of(other) in rows
    ]
    if not pairs or any(row["diverged"] for pair in pairs for row in pair):
        return None
    curves = [[_summary.curve(row)[1] for row in pair] for pair in pairs]
    return Drift(
        end=np.array([one["loss"] - other["loss"] for one, other in pairs]),
        steps=_summary.curve(pairs[0][0])[0],
        curve=np.array([one - other for one, other in curves]),
        state_bytes=pairs[0][0]["state_bytes"] / pairs[0][0]["num_params"],
    )


def diverged(rows: Rows, size: str) -> list[str]:
    """Formats of which a run diverged."""
    return [
        name
        for name in FORMATS
        if any(
            rows[key_of(config)]["diverged"]
            for config in configs(rows, size, name)
            if key_of(config) in rows
        )
    ]
