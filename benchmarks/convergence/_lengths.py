"""The study of the length of runs: what it runs, and what must be run next.

Every length is tuned on its own by ``_walk.walk``: the learning rate of all, b3 of CAME and b2 of
AdamW. Weight decay and the other betas are those from which the first search starts, so that a
length differs from the next in nothing that was chosen at one of them.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import _growth
import _search
import _sizes
import _studies
import _walk
from _every import EVERY
from _rows import Row, key_of

LENGTHS = {"cpu": (300, 1000, 3000, 10000), "smoke": (40, 80)}
TASKS = ("next_token", "masked")
# In the order of work: the question first.
CONTESTED = (
    "adamw",
    "came_debiased",
    "came",
    "adafactor",
    "adafactor_momentum",
    "muon",
    "lamb",
)
SEEDS, FEWER_SEEDS = (1, 2, 3), (1, 2)
FEWER_FROM = 10000  # steps of a run
STRIDE = 0.25  # decades of learning rate between neighbours
FIRST_STRIDES = (0.5, STRIDE)  # of the shortest length, which has no shorter one to start from
BETAS: dict[str, tuple[dict[str, float], ...]] = {
    "adamw": ({"b2": 0.999}, {"b2": 0.99}, {"b2": 0.95}),
    **{
        name: tuple({"b2": 0.999, "b3": b3} for b3 in (0.9999, 0.999, 0.995))
        for name in ("came", "came_debiased")
    },
}
USUAL = 4  # trials of a walk, for estimates; as many again as there are other betas, and one

Rows = Mapping[str, Row]
Config = dict[str, Any]
Trials = dict[_search.Trial, float]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One contender on one task at one length.

    Attributes:
      steps: of a run.
      found: the trials of its search that are known.
      searching: what the search must run next; none if it is finished.
      finals: on the seeds that chose nothing; known once the search is finished.
      begun: whether the search can begin: that of the shorter length is finished.
    """

    steps: int
    found: Trials
    searching: list[Config]
    finals: list[Config]
    begun: bool

    @property
    def tuned(self) -> bool:
        """Whether the search is finished."""
        return self.begun and not self.searching


def config(
    size: str, task: str, contender: str, steps: int, trial: _search.Trial, seed: int
) -> Config:
    """A run of this length."""
    base = _sizes.config(size_of(size), task, contender, seed, trial.hyper)
    return {**base, "steps": steps, "warmup": steps // 10}


def size_of(size: str) -> str:
    """The size of the model: lengths have one of their own."""
    return f"{size}_long"


def betas_of(contender: str) -> tuple[dict[str, float], ...]:
    """What is searched, the first from the start."""
    return BETAS.get(contender, EVERY[contender].betas[:1])


def seeds_of(steps: int) -> tuple[int, ...]:
    """Of the final runs."""
    return FEWER_SEEDS if steps >= FEWER_FROM else SEEDS


def cell(rows: Rows, size: str, task: str, contender: str, steps: int) -> Cell:
    """As far as the rows go."""
    lengths = LENGTHS[size]
    one = EVERY[contender]
    first = tuple(betas_of(contender)[0].items())
    start = _search.Trial(one.learning_rate, one.weight_decays[0], first)
    at = lengths.index(steps)
    if at:
        shorter = cell(rows, size, task, contender, lengths[at - 1])
        if not shorter.tuned:
            return Cell(steps, {}, [], [], begun=False)
        start = _search.best(shorter.found)
        start = _walk.move(start, _shift(contender, start.betas, lengths[at - 1], steps))
    others = [tuple(betas.items()) for betas in betas_of(contender)]
    found, wanted = _search.follow(
        _walk.walk(
            start,
            (STRIDE,) if at else FIRST_STRIDES,
            [
                (b, _shift(contender, start.betas, steps, steps, b))
                for b in others
                if b != start.betas
            ],
        ),
        lambda trial: _studies.loss_of(
            rows, config(size, task, contender, steps, trial, _studies.TUNING_SEED)
        ),
    )
    searching = [
        config(size, task, contender, steps, trial, _studies.TUNING_SEED) for trial in wanted
    ]
    finals = []
    if not searching:
        best = _search.best(found)
        finals = [config(size, task, contender, steps, best, seed) for seed in seeds_of(steps)]
    return Cell(steps, found, searching, finals, begun=True)


@functools.cache
def _shift(
    contender: str, betas: _walk.Betas, steps: int, to_steps: int, to: _walk.Betas | None = None
) -> float:
    """Decades of learning rate that keep the size of updates, on the grid.

    Those of CAME as published shrink with the steps of a run and with smaller b3.
    """
    if contender != "came":
        return 0.0
    sizes = [
        _growth.growth({"steps": n, "warmup": n // 10, "hyper": dict(of)})
        for n, of in ((steps, betas), (to_steps, to or betas))
    ]
    return STRIDE * round(math.log10(sizes[0] / sizes[1]) / STRIDE)


def plan(rows: Rows, size: str, task: str, contender: str, steps: int) -> _studies.Plan:
    """What is to be run; its total is an estimate until the search is finished."""
    one = cell(rows, size, task, contender, steps)
    missing = [config for config in one.finals if key_of(config) not in rows]
    tuning = len(one.found) if one.tuned else max(len(one.found) + 1, _usual(contender))
    return _studies.Plan(
        name=f"{steps} steps, {task} {contender}",
        total=tuning + len(seeds_of(steps)),
        done=len(one.found) + len(one.finals) - len(missing),
        ready=one.searching + missing,
        waits="" if one.begun else "the search at a shorter length",
    )


def used(rows: Rows, size: str) -> dict[str, Row]:
    """The rows of this study."""
    keys = []
    for steps in LENGTHS[size]:
        for task in TASKS:
            for contender in CONTESTED:
                one = cell(rows, size, task, contender, steps)
                tuning = _studies.TUNING_SEED
                configs = [config(size, task, contender, steps, t, tuning) for t in one.found]
                keys += [key_of(each) for each in (*configs, *one.finals)]
    return {key: rows[key] for key in keys if key in rows}


def _usual(contender: str) -> int:
    others = len(betas_of(contender)) - 1
    return USUAL + others + bool(others)


def plans(
    rows: Rows,
    size: str,
    lengths: tuple[int, ...] | None = None,
    tasks: tuple[str, ...] = TASKS,
    contenders: tuple[str, ...] = CONTESTED,
) -> Iterator[_studies.Plan]:
    """All plans in the order of work: a length is complete before the next one begins."""
    for steps in lengths or LENGTHS[size]:
        for contender in contenders:
            for task in tasks:
                yield plan(rows, size, task, contender, steps)


def seconds_per_step(rows: Rows, size: str) -> dict[str, float]:
    """CPU time by contender: the median of its longest runs, where compiling counts least."""
    runs: dict[str, list[tuple[int, float]]] = {}
    for row in rows.values():
        if row["config"]["size"] == size_of(size) and not row["diverged"]:
            steps = row["config"]["steps"]
            each = row["cpu_seconds"] / steps
            runs.setdefault(row["config"]["contender"], []).append((steps, each))
    return {
        name: statistics.median(each for steps, each in times if steps == max(times)[0])
        for name, times in runs.items()
    }


def progress(rows: Rows, size: str, **chosen: Any) -> list[str]:
    """A line for each length: runs that are there, CPU hours left by measured time of a step."""
    each = seconds_per_step(rows, size)
    usual = statistics.median(each.values()) if each else 0.0
    lines, total = [], 0.0
    for steps in chosen.get("lengths") or LENGTHS[size]:
        done = of = 0
        hours = 0.0
        for one in plans(rows, size, **{**chosen, "lengths": (steps,)}):
            done, of = done + one.done, of + one.total
            contender = one.name.split()[-1]
            hours += (one.total - one.done) * steps * each.get(contender, usual) / 3600
        total += hours
        lines.append(f"{steps} steps: {done} of about {of} runs, about {hours:.1f} CPU hours left")
    return [*lines, f"all lengths: about {total:.1f} CPU hours left"]
