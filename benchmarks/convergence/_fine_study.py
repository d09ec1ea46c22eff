"""What is fine-tuned, and what must be run next, from the rows that are there."""

import itertools
import pathlib
from collections.abc import Iterator

import _fine_data
import _long
import _rows
import _search
import _studies
from _contenders import EVERY
from _studies import Cell, Config, Rows

CONTENDERS = (
    *("adamw", "adafactor_plain", "adafactor_momentum", "came", "came_debiased", "muon"),
    *("adamw_8bit", "came_8bit"),
)
CELLS = [(task, start) for task in _fine_data.TASKS for start in _fine_data.STARTS]
DTYPES = {"gpu": "bfloat16", "cpu": "float32"}  # of activations; parameters are float32
SEEDS = (1, 2, 3, 4, 5)
BATCH = 8
# By size, modes and steps.
RUNS = {
    "cpu": (("full", 200), ("full", 1000), ("lora", 1000)),
    "smoke": (("full", 20),),
}
# Adapters by sharding.stored: AdamW from the model that it trained, at the learning rate from which
# the search of ``lora`` starts.
STORED = ("lora_16", "lora_nf4", "lora_linear4")
# By mode, runs of a search, and its centre in decades from that of runs from scratch.
SEARCHES = {"full": (10, -0.5), "lora": (6, 0.0)}


def record(backend: str, stored: bool = False) -> pathlib.Path:
    """The rows of a platform, of optimizers or of adapters on stored parameters."""
    return _rows.FOLDER / f"fine_tuning_{'stored_' * stored}{backend}.jsonl"


def _run(size: str, backend: str, mode: str, steps: int, contender: str) -> Config:
    """What all runs of an optimizer at one length have in common."""
    run = {"study": "fine_tuning", "size": _long.size_of(size), "dtype": DTYPES[backend]}
    run |= {"mode": mode, "steps": steps, "warmup": steps // 10, "batch": BATCH}
    return run | {"window": _fine_data.WINDOW, "contender": contender}


def stored_configs(size: str, backend: str, mode: str) -> list[Config]:
    """Of adapters on one kind of base, by task, then by seed."""
    run = _run(size, backend, mode, RUNS[size][0][1], "adamw")
    run |= {"start": "adamw", "hyper": _search.start(EVERY["adamw"]).hyper}
    return [{**run, "task": t, "seed": s} for t in _fine_data.TASKS for s in SEEDS]


def stored_plans(rows: Rows, size: str, backend: str) -> Iterator[_studies.Plan]:
    """Of adapters by ``sharding.stored``, seed by seed."""
    for seed, mode in itertools.product(SEEDS, STORED):
        configs = [c for c in stored_configs(size, backend, mode) if c["seed"] == seed]
        yield _studies.plan(f"stored, seed {seed} {mode}", rows, configs, len(configs))


def cells(rows: Rows, size: str, backend: str, mode: str, steps: int, contender: str) -> list[Cell]:
    """Of one optimizer, in the order of CELLS, as far as the rows go."""
    one, (budget, decades) = EVERY[contender], SEARCHES[mode]
    run = _run(size, backend, mode, steps, contender)

    def cell(task: str, start: str) -> Cell:
        def config(trial: _search.Trial, seed: int) -> Config:
            return {**run, "task": task, "start": start, "seed": seed, "hyper": trial.hyper}

        search = _search.rates(one, budget, one.learning_rate + decades)
        return _studies.searched(rows, search, config, SEEDS)

    return [cell(*of) for of in CELLS]


def plans(rows: Rows, size: str, backend: str) -> Iterator[_studies.Plan]:
    """In the order of work; state of matrices of rank 8 is too small to be stored in 8 bits."""
    for (mode, steps), name in itertools.product(RUNS[size], CONTENDERS):
        if (mode, name[-4:]) != ("lora", "8bit"):
            configs = [
                c for of in cells(rows, size, backend, mode, steps, name) for c in of.configs
            ]
            total = len(CELLS) * (SEARCHES[mode][0] + len(SEEDS))
            yield _studies.plan(f"{mode}, {steps:,} steps {name}", rows, configs, total)
