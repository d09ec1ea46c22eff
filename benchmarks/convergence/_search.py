"""The search for hyperparameters: one fixed procedure for all, and the same number of runs.

It is a generator of rounds: it yields configurations and is sent their losses. It decides by these
alone, so that a search that was stopped is replayed from what is known.
"""

import dataclasses
import math
from collections.abc import Callable, Generator, Iterable

Hyper = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Space:
    """What is searched.

    Attributes:
      budget: runs.
      centre: of the grid of learning rates, an exponent of 10.
      weight_decays: values, the first from the start.
      betas: the other hyperparameters together, the first from the start.
      shifts: decades by which the learning rate moves with each of these, where they change the
        size of updates; none if empty.
    """

    budget: int
    centre: float
    weight_decays: tuple[float, ...]
    betas: tuple[dict[str, float], ...]
    shifts: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Trial:
    """One configuration; the learning rate is 10 ** exponent to three digits."""

    exponent: float
    weight_decay: float
    betas: tuple[tuple[str, float], ...]

    @property
    def hyper(self) -> Hyper:
        """As a contender takes it."""
        rate = float(f"{10**self.exponent:.3g}")
        return {"learning_rate": rate, "weight_decay": self.weight_decay, **dict(self.betas)}


def search(space: Space) -> Generator[list[Trial], list[float], dict[Trial, float]]:
    """Yields rounds of trials and is sent their losses; returns all.

    1. Learning rates half a decade apart around the centre: five, or three if the budget is below
       ten. While the best is the smallest or the largest, one more beyond it.
    2. The other weight decays, at the best learning rate.
    3. The other betas, at the best of these and its learning rate times what they ask for.
    4. Learning rates a quarter of a decade to both sides of the best, then an eighth, and so on,
       until the budget is spent.

    The budget is kept exactly: what it cannot pay for is left out, in this order.
    """
    found: dict[Trial, float] = {}
    start = Trial(space.centre, space.weight_decays[0], tuple(space.betas[0].items()))

    def trials(wanted: Iterable[Trial]) -> list[Trial]:
        new = [trial for trial in dict.fromkeys(wanted) if trial not in found]
        return new[: space.budget - len(found)]

    def run(wanted: Iterable[Trial]) -> Generator[list[Trial], list[float], None]:
        new = trials(wanted)
        if new:
            found.update(zip(new, (yield new), strict=True))

    reach = 2 if space.budget >= 10 else 1
    yield from run(_move(start, 0.5 * i) for i in range(-reach, reach + 1))
    while (exponent := _beyond(found)) is not None and len(found) < space.budget:
        yield from run([dataclasses.replace(start, exponent=exponent)])
    at = best(found)
    yield from run(dataclasses.replace(at, weight_decay=wd) for wd in space.weight_decays)
    at = best(found)
    for_betas = zip(space.betas, space.shifts or [0.0] * len(space.betas), strict=True)
    yield from run(
        dataclasses.replace(_move(at, shift), betas=tuple(betas.items()))
        for betas, shift in for_betas
    )
    step = 0.25
    while len(found) < space.budget:
        at = best(found)
        around = trials([_move(at, step), _move(at, -step)])
        if around:
            yield from run(around)
        else:
            step /= 2
    return found


def best(found: dict[Trial, float]) -> Trial:
    """The trial of the lowest loss; of equal ones the first."""
    return min(found, key=lambda trial: found[trial])


def _move(trial: Trial, decades: float) -> Trial:
    return dataclasses.replace(trial, exponent=trial.exponent + decades)


def _beyond(found: dict[Trial, float]) -> float | None:
    """The learning rate half a decade beyond the best if that is an edge."""
    exponents, at = [trial.exponent for trial in found], best(found)
    if not math.isfinite(found[at]) or at.exponent == min(exponents):
        return min(exponents) - 0.5  # if all diverged, smaller ones might not
    return max(exponents) + 0.5 if at.exponent == max(exponents) else None


def edges(space: Space, found: dict[Trial, float]) -> list[str]:
    """Names of the hyperparameters whose best value has no worse one beyond it.

    No weight decay at all is no edge: there is nothing beyond. What the budget left out is named,
    too.
    """
    at = best(found)
    alike = [t.exponent for t in found if (t.weight_decay, t.betas) == (at.weight_decay, at.betas)]
    exponents = [trial.exponent for trial in found]
    names = []
    if at.exponent in (min(exponents), max(exponents)):
        names.append("learning_rate")
    elif at.exponent in (min(alike), max(alike)):
        names.append("learning_rate at these betas")
    decays = {trial.weight_decay for trial in found}
    if at.weight_decay == max(decays) and len(decays) > 1:
        names.append("weight_decay")
    betas = {trial.betas for trial in found}
    for name, value in at.betas:
        values = {dict(one)[name] for one in betas}
        if len(values) > 1 and value in (min(values), max(values)):
            names.append(name)
    for name, tried, all_of in (
        ("weight decays", decays, space.weight_decays),
        ("betas", betas, space.betas),
    ):
        if len(tried) < len(all_of):
            names.append(f"{len(tried)} of {len(all_of)} {name} tried")
    return names


def replay(
    space: Space, loss_of: Callable[[Trial], float | None]
) -> tuple[dict[Trial, float], list[Trial]]:
    """Goes as far as losses are known: what was found, and what must be run next, if anything."""
    return follow(search(space), loss_of)


def follow(
    steps: Generator[list[Trial], list[float], dict[Trial, float]],
    loss_of: Callable[[Trial], float | None],
) -> tuple[dict[Trial, float], list[Trial]]:
    """The same of any search."""
    found: dict[Trial, float] = {}
    try:
        wanted = next(steps)
        while True:
            losses = {trial: loss_of(trial) for trial in wanted}
            known = {trial: loss for trial, loss in losses.items() if loss is not None}
            found |= known
            if len(known) < len(wanted):
                return found, [trial for trial in wanted if trial not in known]
            wanted = steps.send([known[trial] for trial in wanted])
    except StopIteration as done:
        return done.value, []
