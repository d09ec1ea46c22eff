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
RERUN_SEED = 4
RERUN = ("adamw", "adafactor", "came", "lamb")
MAIN = tuple(name for name, one in CONTENDERS.items() if one.budget >= 10)
BATCH_BUDGETS = {1: 7, 4: 5, 16: 5, 64: 5}  # times the base's batch: runs of the search
SPIKE = ("came", "came_debiased", "adafactor", "adamw")
LARGE = (1.0, 0.562, 0.316)  # times the learning rate that is best in the small model

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


def searched(
    rows: Rows, space: _search.Space, config: Callable[[_search.Trial], Config]
) -> tuple[dict[_search.Trial, float], list[Config]]:
    """The trials of a search that are known, and the configurations that must be run next."""
    found, wanted = _search.replay(space, lambda trial: loss_of(rows, config(trial)))
    return found, [config(trial) for trial in wanted]


def tuned(
    rows: Rows, size: str, task: str, contender: str
) -> tuple[dict[_search.Trial, float], list[Config]]:
    """The search of a contender on a task."""
    return searched(
        rows,
        space(contender),
        lambda trial: _sizes.config(size, task, contender, TUNING_SEED, trial.hyper),
    )


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
    configs = spike_configs(rows, size, task, contender)
    return _plan(f"spike {task} {contender}", rows, configs, 2 * len(FINAL_SEEDS), not configs)


def spike_configs(rows: Rows, size: str, task: str, contender: str) -> list[Config]:
    """Its runs, which are known once the search is finished."""
    hyper = best(rows, size, task, contender)
    if hyper is None:
        return []
    configs = [_sizes.config(size, task, contender, seed, hyper) for seed in FINAL_SEEDS]
    return configs + [{**config, "warmup": 0} for config in configs]


def batch(rows: Rows, size: str, task: str, contender: str) -> Plan:
    """Batches of 1, 4, 16 and 64 times the base at equal tokens.

    The learning rate of the base is searched; a larger batch takes it by the linear rule and by
    the square-root rule, around which it is searched as well.
    """
    name, total = f"batch {task} {contender}", sum(BATCH_BUDGETS.values()) + len(BATCH_BUDGETS) - 1
    if contender not in MAIN or task != "next_token":
        return Plan(name, 0, 0, [])
    base, wanted = batch_search(rows, size, contender, 1)
    if wanted:
        return Plan(name, total, len(base), wanted, "the base's learning rate")
    done, ready = len(base), []
    for times in list(BATCH_BUDGETS)[1:]:
        found, wanted = batch_search(rows, size, contender, times)
        linear = batch_linear(rows, size, contender, times)
        missing = [linear] if key_of(linear) not in rows else []
        done += len(found) + 1 - len(missing)
        ready += missing + wanted
    return Plan(name, total, done, ready)


def batch_search(
    rows: Rows, size: str, contender: str, times: int
) -> tuple[dict[_search.Trial, float], list[Config]]:
    """The search for the learning rate at a batch; above the base around the square-root rule.

    Weight decay and betas are those from which all searches start.
    """
    one = space(contender)
    centre = one.centre if times == 1 else _base_exponent(rows, size, contender)
    centre += math.log10(times) / 2
    small = _search.Space(BATCH_BUDGETS[times], centre, one.weight_decays[:1], one.betas[:1])
    return searched(rows, small, lambda trial: _batch_config(size, contender, trial.hyper, times))


def batch_linear(rows: Rows, size: str, contender: str, times: int) -> Config:
    """The run at the learning rate of the linear rule."""
    return _batch_rule(rows, size, contender, times, power=1.0)


def batch_square_root(rows: Rows, size: str, contender: str, times: int) -> Config:
    """The run at the learning rate of the square-root rule."""
    return _batch_rule(rows, size, contender, times, power=0.5)


def _batch_rule(rows: Rows, size: str, contender: str, times: int, power: float) -> Config:
    one = space(contender)
    exponent = _base_exponent(rows, size, contender) + power * math.log10(times)
    trial = _search.Trial(exponent, one.weight_decays[0], tuple(one.betas[0].items()))
    return _batch_config(size, contender, trial.hyper, times)


def _base_exponent(rows: Rows, size: str, contender: str) -> float:
    return _search.best(batch_search(rows, size, contender, 1)[0]).exponent


def _batch_config(size: str, contender: str, hyper: dict[str, float], times: int) -> Config:
    return _sizes.config(f"{size}_batch", "next_token", contender, TUNING_SEED, hyper, times)


def large(rows: Rows, size: str, task: str, contender: str) -> Plan:
    """What the search chose in a larger model, at its learning rate and two lower ones."""
    name = f"large {task} {contender}"
    if contender not in MAIN or task != "next_token" or f"{size}_large" not in _sizes.SIZES:
        return Plan(name, 0, 0, [])
    configs = large_configs(rows, size, contender)
    return _plan(name, rows, configs, len(LARGE), not configs)


def large_configs(rows: Rows, size: str, contender: str) -> list[Config]:
    """Its runs, which are known once the search is finished."""
    hyper = best(rows, size, "next_token", contender)
    if hyper is None:
        return []
    rates = [float(f"{times * hyper['learning_rate']:.3g}") for times in LARGE]
    return [
        _sizes.config(
            f"{size}_large", "next_token", contender, TUNING_SEED, {**hyper, "learning_rate": rate}
        )
        for rate in rates
    ]


def best_known(rows: Rows, size: str, task: str, contender: str) -> tuple[dict[str, float], int]:
    """The best hyperparameters of a search as far as it went, and after how many runs.

    Without any they are those from which the search starts.
    """
    found, _ = tuned(rows, size, task, contender)
    if not any(math.isfinite(loss) for loss in found.values()):
        one = space(contender)
        start = _search.Trial(one.centre, one.weight_decays[0], tuple(one.betas[0].items()))
        return start.hyper, 0
    return _search.best(found).hyper, len(found)


def rerun(known: Rows, rows: Rows, size: str, contender: str) -> Plan:
    """One run on a fresh seed with the best that is ``known``; ``rows`` has the reruns."""
    hyper, _ = best_known(known, size, "next_token", contender)
    config = _sizes.config(size, "next_token", contender, RERUN_SEED, hyper)
    return _plan(f"rerun next_token {contender}", rows, [config], 1, False)


def _plan(name: str, rows: Rows, configs: Sequence[Config], total: int, waits: bool) -> Plan:
    missing = [config for config in configs if key_of(config) not in rows]
    why = "its tuning" if waits else ""
    return Plan(name, total, len(configs) - len(missing), missing, why)


STUDIES: dict[str, Callable[[Rows, str, str, str], Plan]] = {
    "tuning": tuning,
    "final": final,
    "batch": batch,
    "spike": spike,
    "large": large,
}


def plans(
    rows: Rows, size: str, studies: Sequence[str], tasks: Sequence[str], contenders: Sequence[str]
) -> Iterator[Plan]:
    """All plans in the order of work: by task, then by study."""
    for task in tasks:
        for study in studies:
            for contender in contenders:
                yield STUDIES[study](rows, size, task, contender)
