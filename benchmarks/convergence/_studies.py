"""What each study runs, and what must be run next, from the rows that are there."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import _search
import _sizes
from _contenders import CONTENDERS
from _rows import Row, key_of

TUNING_SEED = 0
FINAL_SEEDS = (1, 2, 3)
MAIN = tuple(name for name, one in CONTENDERS.items() if one.budget >= 10)
SPIKE = ("came", "came_debiased", "adafactor", "adamw")

Config = dict[str, Any]
Rows = Mapping[str, Row]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A study of one task and contender.

    Attributes:
      name: for messages.
      total: runs.
      done: of these, those with rows.
      ready: configurations that can be run now.
      waits: what else is missing; its configurations depend on other runs.
    """

    name: str
    total: int
    done: int
    ready: list[Config]
    waits: str = ""


def loss_of(rows: Rows, config: Config) -> float | None:
    """The loss of a run, infinite if it diverged; None if there is no row."""
    row = rows.get(key_of(config))
    if row is None:
        return None
    return math.inf if row["diverged"] else row["loss"]


def space(contender: str) -> _search.Space:
    """What is searched for a contender."""
    one = CONTENDERS[contender]
    return _search.Space(one.budget, one.learning_rate, one.weight_decays, one.betas)


def tuned(
    rows: Rows, size: str, task: str, contender: str
) -> tuple[dict[_search.Trial, float], list[Config]]:
    """The trials of the search that are known, and the configurations that must be run next."""

    def config(trial: _search.Trial) -> Config:
        return _sizes.config(size, task, contender, TUNING_SEED, trial.hyper)

    found, wanted = _search.replay(space(contender), lambda t: loss_of(rows, config(t)))
    return found, [config(trial) for trial in wanted]


def best(rows: Rows, size: str, task: str, contender: str) -> dict[str, float] | None:
    """The hyperparameters that a finished search chose; None if it is not finished."""
    found, wanted = tuned(rows, size, task, contender)
    return None if wanted else _search.best(found).hyper


def tuning(rows: Rows, size: str, task: str, contender: str) -> Plan:
    """The search for hyperparameters, on a seed of its own."""
    found, wanted = tuned(rows, size, task, contender)
    budget = CONTENDERS[contender].budget
    return Plan(f"tuning {task} {contender}", budget, len(found), wanted)


def final(rows: Rows, size: str, task: str, contender: str) -> Plan:
    """The best configuration on fresh seeds."""
    hyper = best(rows, size, task, contender)
    configs = [_sizes.config(size, task, contender, seed, hyper) for seed in FINAL_SEEDS if hyper]
    return _plan(f"final {task} {contender}", rows, configs, len(FINAL_SEEDS), hyper is None)


def spike(rows: Rows, size: str, task: str, contender: str) -> Plan:
    """The best configuration with warm-up and without."""
    if contender not in SPIKE:
        return Plan(f"spike {task} {contender}", 0, 0, [])
    hyper = best(rows, size, task, contender)
    configs = []
    if hyper:
        configs = [_sizes.config(size, task, contender, seed, hyper) for seed in FINAL_SEEDS]
        configs += [{**config, "warmup": 0} for config in configs]
    return _plan(f"spike {task} {contender}", rows, configs, 2 * len(FINAL_SEEDS), hyper is None)


def _plan(name: str, rows: Rows, configs: Sequence[Config], total: int, waits: bool) -> Plan:
    missing = [config for config in configs if key_of(config) not in rows]
    why = "its tuning" if waits else ""
    return Plan(name, total, len(configs) - len(missing), missing, why)


STUDIES: dict[str, Callable[[Rows, str, str, str], Plan]] = {
    "tuning": tuning,
    "final": final,
    "spike": spike,
}


def plans(
    rows: Rows, size: str, studies: Sequence[str], tasks: Sequence[str], contenders: Sequence[str]
) -> Iterator[Plan]:
    """All plans in the order of work: by task, then by study."""
    for task in tasks:
        for study in studies:
            for contender in contenders:
                yield STUDIES[study](rows, size, task, contender)
