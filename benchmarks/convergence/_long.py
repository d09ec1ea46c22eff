"""The studies of long runs: what they run, and what must be run next.

Every length is tuned on its own by ``_search.walk``: the learning rate of all, b3 of CAME and b2 of
AdamW. Weight decay and the other betas are those from which the first search starts, so that a
length differs from the next in nothing that was chosen at one of them.

A format, state or parameters in few bits, has the hyperparameters and seeds of the final runs of
its optimizer in float32, so that runs differ in rounding alone.
"""

import functools
import math
from collections.abc import Iterator, Sequence

import _search
import _sizes
import _studies
from _contenders import EVERY, FORMATS, growth
from _studies import Cell, Config, Rows

LENGTHS = {"cpu": (300, 1000, 3000, 10000), "smoke": (40, 80)}
TASKS = ("next_token", "masked")
# In the order of work: the question first.
CONTESTED = ("adamw", "came_debiased", "came", "adafactor", "adafactor_momentum", "muon", "lamb")
SEEDS, FEWER_SEEDS = (1, 2, 3), (1, 2)
FEWER_FROM = 10000  # steps of a run
STRIDE = 0.25  # decades of learning rate between neighbours
FIRST_STRIDES = (0.5, STRIDE)  # of the shortest length, which has no shorter one to start from
_B3 = [{"b2": 0.999, "b3": b3} for b3 in (0.9999, 0.999, 0.995)]
BETAS = {  # searched, the first from the start
    "adamw": [{"b2": 0.999}, {"b2": 0.99}, {"b2": 0.95}],
    "came": _B3,
    "came_debiased": _B3,
}
FORMAT_STEPS, FORMAT_TASK = {"cpu": 3000, "smoke": 80}, "next_token"


def size_of(size: str) -> str:
    """The size of the model: lengths have one of their own."""
    return f"{size}_long"


def seeds_of(steps: int) -> tuple[int, ...]:
    """Of the final runs."""
    return FEWER_SEEDS if steps >= FEWER_FROM else SEEDS


def cell(rows: Rows, size: str, task: str, contender: str, steps: int) -> Cell:
    """As far as the rows go; it begins once the search of the shorter length is finished."""
    every = BETAS.get(contender, EVERY[contender].betas[:1])
    betas = [tuple(of.items()) for of in every]
    at, lengths = _search.start(EVERY[contender]), LENGTHS[size]
    if place := lengths.index(steps):
        shorter = cell(rows, size, task, contender, lengths[place - 1])
        if not shorter.finals:
            return Cell({}, [], [], [])
        at = _search.best(shorter.found)
        at = at.move(_shift(contender, at.betas, lengths[place - 1], at.betas, steps))
    others = [(of, _shift(contender, at.betas, steps, of, steps)) for of in betas if of != at.betas]

    def config(trial: _search.Trial, seed: int) -> Config:
        base = _sizes.config(size_of(size), task, contender, seed, trial.hyper)
        return {**base, "steps": steps, "warmup": steps // 10}

    strides = (STRIDE,) if place else FIRST_STRIDES
    return _studies.searched(rows, _search.walk(at, strides, others), config, seeds_of(steps))


@functools.cache
def _shift(
    contender: str, betas: _search.Betas, steps: int, to: _search.Betas, to_steps: int
) -> float:
    """Decades of learning rate that keep the size of updates, on the grid.

    Those of CAME as published shrink with the steps of a run and with smaller b3.
    """
    if contender != "came":
        return 0.0
    sizes = [
        growth({"steps": n, "warmup": n // 10, "hyper": dict(of)})
        for n, of in ((steps, betas), (to_steps, to))
    ]
    return STRIDE * round(math.log10(sizes[0] / sizes[1]) / STRIDE)


def in_float32(rows: Rows, size: str, name: str) -> list[Config]:
    """The final runs of a format's optimizer; none until its search is finished."""
    parent = FORMATS[name].parent
    return cell(rows, size, FORMAT_TASK, parent, FORMAT_STEPS[size]).finals


def formats(rows: Rows, size: str, name: str) -> list[Config]:
    """The runs of a format."""
    return [{**config, "contender": name} for config in in_float32(rows, size, name)]


def length_plans(
    rows: Rows,
    size: str,
    lengths: Sequence[int],
    tasks: Sequence[str] = TASKS,
    contenders: Sequence[str] = CONTESTED,
) -> Iterator[_studies.Plan]:
    """A length is complete before the next one begins."""
    for steps in lengths:
        for contender in contenders:
            for task in tasks:
                of = cell(rows, size, task, contender, steps)
                total = len(of.tried) + len(of.wanted) + len(seeds_of(steps))
                name, waits = (
                    f"{steps:,} steps, {task} {contender}",
                    "the search at a shorter length",
                )
                yield _studies.plan(name, rows, of.configs, total, waits)


def format_plans(rows: Rows, size: str) -> Iterator[_studies.Plan]:
    """All formats on the first seed before the next: stopped early, seeds are complete."""
    for place, seed in enumerate(seeds_of(FORMAT_STEPS[size])):
        for name in FORMATS:
            configs = formats(rows, size, name)[place : place + 1]
            yield _studies.plan(f"formats, seed {seed} {name}", rows, configs, 1)


def plans(rows: Rows, size: str) -> Iterator[_studies.Plan]:
    """All in the order of work: formats behind the length that they have."""
    lengths = LENGTHS[size]
    behind = lengths.index(FORMAT_STEPS[size]) + 1
    yield from length_plans(rows, size, lengths[:behind])
    yield from format_plans(rows, size)
    yield from length_plans(rows, size, lengths[behind:])
