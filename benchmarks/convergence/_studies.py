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
RERUN = ("adamw", "adafactor", "came", "lamb", "muon")
MAIN = tuple(name for name, one in CONTENDERS.items() if one.budget >= 10)
BATCH_BUDGETS = {1: 7, 4: 7, 16: 7, 64: 7}  # times the base's batch: runs of the search
BATCH_ENDS = (1, 64)  # of these the best is run on other seeds
BATCH_SEEDS = (1, 2)
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
    return _search.Space(one.budget, one.learning_rate, one.weight_decays, one.betas, one.shifts)


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
    configs = final_configs(size, task, contender, hyper) if hyper else []
    return _plan(f"final {task} {contender}", rows, configs, len(FINAL_SEEDS), hyper is None)


def final_configs(size: str, task: str, contender: str, hyper: dict[str, float]) -> list[Config]:
    """Runs with these hyperparameters on the seeds that did not choose them."""
    return [_sizes.config(size, task, contender, seed, hyper) for seed in FINAL_SEEDS]


def parent(rows: Rows, size: str, task: str, contender: str) -> Plan:
    """State in few bits with what the search chose for its float32 parent, on the same seeds."""
    configs = parent_configs(rows, size, task, contender)
    total = len(FINAL_SEEDS) if CONTENDERS[contender].parent else 0
    return _plan(f"parent {task} {contender}", rows, configs, total, bool(total and not configs))


def parent_configs(rows: Rows, size: str, task: str, contender: str) -> list[Config]:
    """Its runs, which are known once the search of the parent is finished."""
    of = CONTENDERS[contender].parent
    hyper = best(rows, size, task, of) if of else None
    return final_configs(size, task, contender, hyper) if hyper else []


def spike(rows: Rows, size: str, task: str, contender: str) -> Plan:
    """The best configuration with warm-up and without."""
    if contender not in SPIKE:
        return Plan(f"spike {task} {contender}", 0, 0, [])
    hypers = spike_hypers(rows, size, task, contender)
    configs = [
        c for h in hypers for warm in (1, 0) for c in spike_configs(size, task, contender, h, warm)
    ]
    total = len(configs) or 2 * len(FINAL_SEEDS)
    return _plan(f"spike {task} {contender}", rows, configs, total, not configs)


def spike_hypers(rows: Rows, size: str, task: str, contender: str) -> list[dict[str, float]]:
    """The best hyperparameters, and the best with the betas that the search started with.

    The latter only where betas change the size of updates, and so the spike. They are known once
    the search is finished.
    """
    found, wanted = tuned(rows, size, task, contender)
    if wanted:
        return []
    hypers, of = [_search.best(found).hyper], space(contender)
    if of.shifts:
        first = tuple(of.betas[0].items())
        there = {trial: loss for trial, loss in found.items() if trial.betas == first}
        hypers.append(_search.best(there).hyper)
    return hypers if hypers[0] != hypers[-1] else hypers[:1]


def spike_configs(
    size: str, task: str, contender: str, hyper: dict[str, float], warm: bool
) -> list[Config]:
    """The runs with these hyperparameters, with warm-up or without."""
    configs = final_configs(size, task, contender, hyper)
    return configs if warm else [{**config, "warmup": 0} for config in configs]


def batch(rows: Rows, size: str, task: str, contender: str) -> Plan:
    """Batches of 1, 4, 16 and 64 times the base at equal tokens.

    The learning rate of the base is searched; a larger batch takes it by the linear rule and by
    the square-root rule, around which it is searched as well. The best of the smallest and of the
    largest batch is run on other seeds.
    """
    name = f"batch {task} {contender}"
    if contender not in MAIN or task != "next_token":
        return Plan(name, 0, 0, [])
    total = sum(BATCH_BUDGETS.values()) + len(BATCH_BUDGETS) - 1
    total += len(BATCH_ENDS) * len(BATCH_SEEDS)
    done, ready, waits = 0, [], ""
    for times in BATCH_BUDGETS:
        found, wanted = batch_trials(rows, size, contender, times)
        seeds = batch_seeds(rows, size, contender, times)
        missing = [config for config in seeds if key_of(config) not in rows]
        done += len(found) + len(seeds) - len(missing)
        ready += wanted + missing
        if times == 1 and wanted:
            waits = "the base's learning rate"
            break
    return Plan(name, total, done, ready, waits)


def batch_search(
    rows: Rows, size: str, contender: str, times: int
) -> tuple[dict[_search.Trial, float], list[Config]]:
    """The search for the learning rate at a batch; above the base around the square-root rule.

    Weight decay and betas are those from which all searches start.
    """
    one = space(contender)
    centre = one.centre if times == 1 else batch_square_root(rows, size, contender, times).exponent
    small = _search.Space(BATCH_BUDGETS[times], centre, one.weight_decays[:1], one.betas[:1])
    return searched(rows, small, lambda trial: batch_config(size, contender, trial, times))


def batch_trials(
    rows: Rows, size: str, contender: str, times: int
) -> tuple[dict[_search.Trial, float], list[Config]]:
    """All trials at a batch that are known, and what must be run: the search and the linear rule.

    Above the base they need the base's.
    """
    found, wanted = batch_search(rows, size, contender, times)
    if times == 1:
        return found, wanted
    trial = batch_linear(rows, size, contender, times)
    config = batch_config(size, contender, trial, times)
    loss = loss_of(rows, config)
    return (found, [config, *wanted]) if loss is None else ({**found, trial: loss}, wanted)


def batch_best(rows: Rows, size: str, contender: str, times: int) -> _search.Trial | None:
    """The best of all trials at a batch; None until they are finished."""
    found, wanted = batch_trials(rows, size, contender, times)
    return None if wanted else _search.best(found)


def batch_seeds(rows: Rows, size: str, contender: str, times: int) -> list[Config]:
    """The best at a batch on other seeds, where there are to be any."""
    trial = batch_best(rows, size, contender, times)
    if trial is None or times not in BATCH_ENDS:
        return []
    return [batch_config(size, contender, trial, times, seed) for seed in BATCH_SEEDS]


def batch_linear(rows: Rows, size: str, contender: str, times: int) -> _search.Trial:
    """What the linear rule says."""
    return _batch_rule(rows, size, contender, times)


def batch_square_root(rows: Rows, size: str, contender: str, times: int) -> _search.Trial:
    """What the square-root rule says."""
    return _batch_rule(rows, size, contender, math.sqrt(times))


def _batch_rule(rows: Rows, size: str, contender: str, factor: float) -> _search.Trial:
    base = _search.best(batch_search(rows, size, contender, 1)[0])
    return dataclasses.replace(base, exponent=base.exponent + math.log10(factor))


def batch_config(
    size: str, contender: str, trial: _search.Trial, times: int, seed: int = TUNING_SEED
) -> Config:
    """The configuration of a trial at a batch."""
    return _sizes.config(f"{size}_batch", "next_token", contender, seed, trial.hyper, times)


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
    config = rerun_config(known, size, contender)
    return _plan(f"rerun next_token {contender}", rows, [config], 1, False)


def rerun_config(known: Rows, size: str, contender: str) -> Config:
    """Its configuration."""
    hyper, _ = best_known(known, size, "next_token", contender)
    return _sizes.config(size, "next_token", contender, RERUN_SEED, hyper)


def _plan(name: str, rows: Rows, configs: Sequence[Config], total: int, waits: bool) -> Plan:
    missing = [config for config in configs if key_of(config) not in rows]
    why = "its tuning" if waits else ""
    return Plan(name, total, len(configs) - len(missing), missing, why)


STUDIES: dict[str, Callable[[Rows, str, str, str], Plan]] = {
    "tuning": tuning,
    "final": final,
    "parent": parent,
    "spike": spike,
    "batch": batch,
}


def plans(
    rows: Rows, size: str, studies: Sequence[str], tasks: Sequence[str], contenders: Sequence[str]
) -> Iterator[Plan]:
    """All plans in the order of work: by task, then by study."""
    for task in tasks:
        for study in studies:
            for contender in contenders:
                yield STUDIES[study](rows, size, task, contender)
