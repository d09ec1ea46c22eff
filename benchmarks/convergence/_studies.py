"""What each study runs, and what must be run next, from the rows that are there."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import _search
import _sizes
from _contenders import CONTENDERS
from _rows import Row, key_of

TUNING_SEED = 0
FINAL_SEEDS = (1, 2, 3)
RERUN_SEED = 4
RERUN = ("adamw", "adafactor", "came", "lamb", "muon")
MAIN = tuple(name for name, one in CONTENDERS.items() if one.budget >= 10)
BATCHES = (1, 4, 16, 64)  # times the base's batch
BATCH_BUDGET = 7
BATCH_ENDS = (1, 64)  # of these the best is run on other seeds
BATCH_SEEDS = (1, 2)
SPIKE = ("came", "came_debiased", "adafactor", "adamw")

Config = dict[str, Any]
Rows = Mapping[str, Row]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Runs of one contender.

    Attributes:
      name: for messages; it ends with the contender.
      total: runs; an estimate until the search of a long run is finished.
      configs: those that are known.
      ready: of these, those without rows.
      waits: what must be finished before more are known.
    """

    name: str
    total: int
    configs: list[Config]
    ready: list[Config]
    waits: str

    @property
    def done(self) -> int:
        """Runs that are there."""
        return len(self.configs) - len(self.ready)


def plan(
    name: str, rows: Rows, configs: Iterable[Config], total: int, waits: str = "its tuning"
) -> Plan:
    """Of all configurations that are known; if none are, it waits."""
    configs = list(configs)
    ready = [config for config in configs if key_of(config) not in rows]
    return Plan(name, total, configs, ready, waits if total and not configs else "")


class Cell(NamedTuple):
    """A search, and the runs of the best on other seeds, which are known once it is finished."""

    found: _search.Found
    tried: list[Config]  # the runs of ``found``
    wanted: list[Config]  # what the search must run next
    finals: list[Config]

    @property
    def configs(self) -> list[Config]:
        """All that are known."""
        return [*self.tried, *self.wanted, *self.finals]


def searched(
    rows: Rows,
    search: _search.Search,
    config: Callable[[_search.Trial, int], Config],
    seeds: Sequence[int],
    others: Sequence[_search.Trial] = (),
) -> Cell:
    """A search as far as the rows go.

    Args:
      rows: those that are there.
      search: whose losses are those of the rows.
      config: makes the run of a trial on a seed.
      seeds: of the final runs.
      others: trials beside those of the search.
    """

    def known(trial: _search.Trial) -> float | None:
        return loss_of(rows, config(trial, TUNING_SEED))

    found, wanted = _search.follow(search, known)
    wanted = [*(trial for trial in others if known(trial) is None), *wanted]
    found |= {trial: x for trial in others if (x := known(trial)) is not None}
    best = [] if wanted else [config(_search.best(found), seed) for seed in seeds]
    runs = [[config(trial, TUNING_SEED) for trial in trials] for trials in (found, wanted)]
    return Cell(found, *runs, best)


def loss(row: Row) -> float:
    """At the end; infinite if the run diverged."""
    return math.inf if row["diverged"] else row["loss"]


def loss_of(rows: Rows, config: Config) -> float | None:
    """The loss of a run; None if there is no row."""
    row = rows.get(key_of(config))
    return None if row is None else loss(row)


def there(rows: Rows, configs: Iterable[Config]) -> dict[str, Row]:
    """The rows of these, as far as there are any."""
    return {key: rows[key] for key in map(key_of, configs) if key in rows}


def cell(rows: Rows, size: str, task: str, contender: str) -> Cell:
    """The search of a contender on a task, on a seed of its own, and the best on fresh seeds."""
    return searched(
        rows,
        _search.search(CONTENDERS[contender]),
        lambda trial, seed: _sizes.config(size, task, contender, seed, trial.hyper),
        FINAL_SEEDS,
    )


def parent(rows: Rows, size: str, task: str, contender: str) -> list[Config]:
    """State in few bits with what the search chose for its float32 parent, on the same seeds."""
    of = CONTENDERS[contender].parent
    finals = cell(rows, size, task, of).finals if of else []
    return [{**config, "contender": contender} for config in finals]


def spike(rows: Rows, size: str, task: str, contender: str) -> Iterator[list[Config]]:
    """The final runs with warm-up, then without it; then the same with other betas.

    Those are the betas that the search started with, where they change the size of updates, and so
    the spike.
    """
    of, one = cell(rows, size, task, contender), CONTENDERS[contender]
    if contender not in SPIKE or not of.finals:
        return
    best, first = _search.best(of.found), _search.start(one).betas
    hypers = [best.hyper]
    if one.shifts and best.betas != first:
        there = {trial: loss for trial, loss in of.found.items() if trial.betas == first}
        hypers.append(_search.best(there).hyper)
    for hyper in hypers:
        yield [{**config, "hyper": hyper} for config in of.finals]
        yield [{**config, "hyper": hyper, "warmup": 0} for config in of.finals]


def batch(rows: Rows, size: str, contender: str, times: int) -> Cell:
    """The search for the learning rate at a batch, at equal tokens, and the best on other seeds.

    Above the base it is around the square-root rule, and the linear rule is tried, too. Weight
    decay and betas are those from which all searches start.
    """
    one, others = CONTENDERS[contender], []
    centre = one.learning_rate
    if times > 1:
        centre = batch_rule(rows, size, contender, math.sqrt(times)).exponent
        others = [batch_rule(rows, size, contender, times)]
    return searched(
        rows,
        _search.rates(one, BATCH_BUDGET, centre),
        lambda trial, seed: batch_config(size, contender, trial, times, seed),
        BATCH_SEEDS if times in BATCH_ENDS else (),
        others,
    )


def batch_rule(rows: Rows, size: str, contender: str, factor: float) -> _search.Trial:
    """The best of the base with its learning rate times this."""
    return _search.best(batch(rows, size, contender, 1).found).move(math.log10(factor))


def batch_config(
    size: str, contender: str, trial: _search.Trial, times: int, seed: int = TUNING_SEED
) -> Config:
    """The configuration of a trial at a batch."""
    return _sizes.config(f"{size}_batch", "next_token", contender, seed, trial.hyper, times)


def rerun(known: Rows, size: str, contender: str) -> Config:
    """The best that is ``known`` on a fresh seed."""
    return {**cell(known, size, "next_token", contender).finals[0], "seed": RERUN_SEED}


STUDIES = ("tuning", "final", "parent", "spike", "batch")


def _plan(rows: Rows, size: str, study: str, task: str, contender: str) -> Plan:
    one, configs, total = CONTENDERS[contender], [], 0
    if study == "tuning":
        of = cell(rows, size, task, contender)
        configs, total = [*of.tried, *of.wanted], one.budget
    elif study == "final":
        configs, total = cell(rows, size, task, contender).finals, len(FINAL_SEEDS)
    elif study == "parent" and one.parent:
        configs, total = parent(rows, size, task, contender), len(FINAL_SEEDS)
    elif study == "spike" and contender in SPIKE:
        configs = [config for of in spike(rows, size, task, contender) for config in of]
        total = len(configs) or 2 * len(FINAL_SEEDS)
    elif study == "batch" and contender in MAIN and task == "next_token":
        base = batch(rows, size, contender, 1)
        cells = [base, *(batch(rows, size, contender, n) for n in BATCHES[1:] if not base.wanted)]
        configs = [config for of in cells for config in of.configs]
        total = len(BATCHES) * BATCH_BUDGET + len(BATCHES) - 1 + len(BATCH_ENDS) * len(BATCH_SEEDS)
    return plan(f"{study} {task} {contender}", rows, configs, total)


def plans(
    rows: Rows, size: str, studies: Sequence[str], tasks: Sequence[str], contenders: Sequence[str]
) -> Iterator[Plan]:
    """All plans in the order of work: by task, then by study."""
    for task in tasks:
        for study in studies:
            for contender in contenders:
                yield _plan(rows, size, study, task, contender)
