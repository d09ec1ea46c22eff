"""What is fine-tuned, and what must be run next, from the rows that are there."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import _fine_data
import _search
import _studies
from _every import EVERY
from _fine_starts import STARTS
from _rows import Row, key_of

CONTENDERS = (
    "adamw",
    "adafactor_plain",
    "adafactor_momentum",
    "came",
    "came_debiased",
    "muon",
    "adamw_8bit",
    "came_8bit",
)
# State of matrices of rank 8 is too small to be stored in 8 bits.
LORA = tuple(name for name in CONTENDERS if not name.endswith("8bit"))
DTYPES = {"gpu": "bfloat16", "cpu": "float32"}  # of activations; parameters are float32
CENTRES = {"full": -0.5, "lora": 0.0}  # decades from where runs from scratch start to search

Config = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much is run.

    Attributes:
      size: of the model; the starts are of the longest of its long runs.
      steps: lengths of runs, by mode.
      budgets: runs of a search, by mode.
      seeds: of the final runs.
      lanes: runs at once.
      chunk: steps of a call.
    """

    size: str
    steps: Mapping[str, tuple[int, ...]]
    budgets: Mapping[str, int]
    seeds: tuple[int, ...]
    lanes: int
    chunk: int


SCALES = {
    "cpu": Scale(
        "cpu",
        {"full": (200, 1000), "lora": (1000,)},
        {"full": 10, "lora": 6},
        seeds=(1, 2, 3, 4, 5),
        lanes=15,
        chunk=200,
    ),
    "smoke": Scale(
        "smoke", {"full": (4, 8), "lora": (8,)}, {"full": 3, "lora": 3}, (1, 2), lanes=18, chunk=4
    ),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One optimizer on one task from one start: its search, and its final runs once that ends."""

    found: dict[_search.Trial, float]
    wanted: list[Config]
    finals: list[Config]


def cell(rows: Mapping[str, Row], scale: Scale, dtype: str, **of: Any) -> Cell:
    """As far as the rows go; ``of`` has mode, steps, contender, task and start."""
    one, mode, steps = EVERY[of["contender"]], of["mode"], of["steps"]
    centre = one.learning_rate + CENTRES[mode]
    space = _search.Space(scale.budgets[mode], centre, one.weight_decays[:1], one.betas[:1])

    def config(trial: _search.Trial, seed: int = _studies.TUNING_SEED) -> Config:
        fixed = {"study": "fine_tuning", "size": f"{scale.size}_long", "dtype": dtype}
        run = {"warmup": steps // 10, "batch": 8, "window": _fine_data.WINDOW}
        return {**fixed, **of, **run, "seed": seed, "hyper": trial.hyper}

    found, wanted = _studies.searched(rows, space, config)
    best = [] if wanted else [config(_search.best(found), seed) for seed in scale.seeds]
    return Cell(found, wanted, best)


def cells(
    rows: Mapping[str, Row], scale: Scale, dtype: str, contender: str, mode: str, steps: int
) -> dict[tuple[str, str], Cell]:
    """By task and start."""
    of = {"mode": mode, "steps": steps, "contender": contender}
    return {
        (task, start): cell(rows, scale, dtype, **of, task=task, start=start)
        for task in _fine_data.TASKS
        for start in STARTS
    }


def ready(
    rows: Mapping[str, Row], scale: Scale, dtype: str, contender: str, mode: str
) -> list[Config]:
    """What can be run now, all of one length: searches first, then final runs."""
    for steps in scale.steps[mode]:
        every = cells(rows, scale, dtype, contender, mode, steps).values()
        wanted = [config for one in every for config in one.wanted]
        finals = [c for one in every for c in one.finals if key_of(c) not in rows]
        if wanted or finals:
            return wanted + finals
    return []
