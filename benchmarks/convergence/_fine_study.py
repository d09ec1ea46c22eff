"""What is fine-tuned, and what must be run next, from the rows that are there."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import _fine_data
import _search
import _studies
from _contenders import EVERY
from _rows import key_of
from _studies import Cell, Config, Rows

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
CELLS = [(task, start) for task in _fine_data.TASKS for start in _fine_data.STARTS]
DTYPES = {"gpu": "bfloat16", "cpu": "float32"}  # of activations; parameters are float32
CENTRES = {"full": -0.5, "lora": 0.0}  # decades from where runs from scratch start to search
BATCH = 8


class Scale(NamedTuple):
    """How much is run of a size of models: lengths and runs of a search by mode, final seeds."""

    size: str
    steps: dict[str, tuple[int, ...]]
    budgets: dict[str, int]
    seeds: tuple[int, ...]
    lanes: int  # runs at once
    chunk: int  # steps of a call, of which all lengths are multiples


SCALES = {
    "cpu": Scale(
        "cpu",
        {"full": (200, 1000), "lora": (1000,)},
        {"full": 10, "lora": 6},
        seeds=(1, 2, 3, 4, 5),
        lanes=15,
        chunk=200,
    ),
    "smoke": Scale("smoke", {"full": (4,)}, {"full": 3}, seeds=(1, 2), lanes=18, chunk=2),
}


def cells(
    rows: Rows, scale: Scale, dtype: str, contender: str, mode: str, steps: int
) -> list[Cell]:
    """Of one optimizer, in the order of CELLS, as far as the rows go."""
    one = EVERY[contender]
    space = dataclasses.replace(
        one,
        budget=scale.budgets[mode],
        learning_rate=one.learning_rate + CENTRES[mode],
        weight_decays=one.weight_decays[:1],
        betas=one.betas[:1],
        shifts=(),
    )
    run = {"study": "fine_tuning", "size": f"{scale.size}_long", "dtype": dtype, "mode": mode}
    run |= {"steps": steps, "warmup": steps // 10, "batch": BATCH, "window": _fine_data.WINDOW}
    out = []
    for task, start in CELLS:
        of = {**run, "contender": contender, "task": task, "start": start}

        def config(trial: _search.Trial, seed: int, of: Config = of) -> Config:
            return {**of, "seed": seed, "hyper": trial.hyper}

        out.append(_studies.searched(rows, _search.search(space), config, scale.seeds))
    return out


def ready(rows: Rows, scale: Scale, dtype: str, contender: str, mode: str) -> list[Config]:
    """What can be run now, all of one length: searches first, then final runs."""
    for steps in scale.steps[mode]:
        every = cells(rows, scale, dtype, contender, mode, steps)
        finals = [c for one in every for c in one.finals if key_of(c) not in rows]
        if found := [config for one in every for config in one.wanted] + finals:
            return found
    return []


def programs(scale: Scale, contenders: Sequence[str]) -> list[tuple[str, str]]:
    """Optimizers and modes; state of matrices of rank 8 is too small to be stored in 8 bits."""
    pairs = [(name, mode) for mode in scale.steps for name in contenders]
    return [(name, mode) for name, mode in pairs if (mode, name[-4:]) != ("lora", "8bit")]
