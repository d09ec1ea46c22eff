"""Searches for hyperparameters: one fixed procedure for all, and one from a good start.

Each is a generator of rounds: it yields trials, is sent their losses, and returns all. It decides
by these alone, so that a search that was stopped is replayed from what is known.
"""

import dataclasses
import math
from collections.abc import Callable, Generator, Iterable, Sequence

from _contenders import Contender

LIMIT = 16  # trials of a walk; one that needs more has no optimum on this grid

Betas = tuple[tuple[str, float], ...]


@dataclasses.dataclass(frozen=True)
class Trial:
    """One configuration; the learning rate is 10 ** exponent to three digits."""

    exponent: float
    weight_decay: float
    betas: Betas

    @property
    def hyper(self) -> dict[str, float]:
        """As a contender takes it."""
        rate = float(f"{10**self.exponent:.3g}")
        return {"learning_rate": rate, "weight_decay": self.weight_decay, **dict(self.betas)}

    def move(self, decades: float) -> "Trial":
        """At another learning rate."""
        return dataclasses.replace(self, exponent=self.exponent + decades)


Found = dict[Trial, float]
Search = Generator[list[Trial], list[float], Found]


def start(of: Contender) -> Trial:
    """Where searches start."""
    return Trial(of.learning_rate, of.weight_decays[0], tuple(of.betas[0].items()))


def search(of: Contender) -> Search:
    """With a contender's number of runs, in the order that it lists weight decays and betas.

    1. Learning rates half a decade apart around the centre: five, or three if the budget is below
       ten. While the best is the smallest or the largest, one more beyond it.
    2. The other weight decays, at the best learning rate.
    3. The other betas, at the best of these and its learning rate times what they ask for.
    4. Learning rates a quarter of a decade to both sides of the best, then an eighth, and so on,
       until the budget is spent.

    The budget is kept exactly: what it cannot pay for is left out, in this order.
    """
    found: Found = {}
    first = start(of)

    def trials(wanted: Iterable[Trial]) -> list[Trial]:
        new = [trial for trial in dict.fromkeys(wanted) if trial not in found]
        return new[: of.budget - len(found)]

    def run(wanted: Iterable[Trial]) -> Generator[list[Trial], list[float], None]:
        new = trials(wanted)
        if new:
            found.update(zip(new, (yield new), strict=True))

    reach = 2 if of.budget >= 10 else 1
    yield from run(first.move(0.5 * i) for i in range(-reach, reach + 1))
    while (exponent := _beyond(found)) is not None and len(found) < of.budget:
        yield from run([dataclasses.replace(first, exponent=exponent)])
    at = best(found)
    yield from run(dataclasses.replace(at, weight_decay=wd) for wd in of.weight_decays)
    at = best(found)
    for_betas = zip(of.betas, of.shifts or [0.0] * len(of.betas), strict=True)
    yield from run(
        dataclasses.replace(at.move(shift), betas=tuple(betas.items()))
        for betas, shift in for_betas
    )
    step = 0.25
    while len(found) < of.budget:
        at = best(found)
        around = trials([at.move(step), at.move(-step)])
        if around:
            yield from run(around)
        else:
            step /= 2
    return found


def rates(of: Contender, budget: int, centre: float) -> Search:
    """The same for learning rates around a centre alone."""
    alone = {"weight_decays": of.weight_decays[:1], "betas": of.betas[:1], "shifts": ()}
    return search(dataclasses.replace(of, budget=budget, learning_rate=centre, **alone))


def best(found: Found) -> Trial:
    """The trial of the lowest loss; of equal ones the first."""
    return min(found, key=lambda trial: found[trial])


def _beyond(found: Found) -> float | None:
    """The learning rate half a decade beyond the best if that is an edge."""
    exponents, at = [trial.exponent for trial in found], best(found)
    if not math.isfinite(found[at]) or at.exponent == min(exponents):
        return min(exponents) - 0.5  # if all diverged, smaller ones might not
    return max(exponents) + 0.5 if at.exponent == max(exponents) else None


def edges(of: Contender, found: Found) -> list[str]:
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
    names += edges_of_betas(found)
    betas = {trial.betas for trial in found}
    for name, tried, all_of in (
        ("weight decays", decays, of.weight_decays),
        ("betas", betas, of.betas),
    ):
        if len(tried) < len(all_of):
            names.append(f"{len(tried)} of {len(all_of)} {name} tried")
    return names


def edges_of_betas(found: Found) -> list[str]:
    """The same of betas alone."""
    names = []
    for name, value in best(found).betas:
        values = {dict(trial.betas)[name] for trial in found}
        if len(values) > 1 and value in (min(values), max(values)):
            names.append(name)
    return names


def walk(
    first: Trial, strides: Sequence[float], others: Sequence[tuple[Betas, float]] = ()
) -> Search:
    """From a good start, in a third of the runs: along learning rates to a bracketed one.

    1. From ``first`` the learning rate moves by the first stride while a neighbour is better, the
       lower one asked first; then the next stride from there. It ends at a rate whose neighbours
       are both known and no better.
    2. Each of the ``others`` once, at that learning rate times what they ask for.
    3. If one of them is better, its learning rate moves by the last stride, to a bracketed one.

    Args:
      first: where it begins.
      strides: decades of learning rate, the coarsest first.
      others: other betas, and decades by which the learning rate moves with them.
    """
    found: Found = {}

    def run(trial: Trial) -> Generator[list[Trial], list[float], None]:
        if trial not in found:
            found[trial] = (yield [trial])[0]

    def bracket(at: Trial, stride: float) -> Generator[list[Trial], list[float], Trial]:
        yield from run(at)
        while len(found) < LIMIT:
            for side in (-stride, stride):
                near = at.move(side)
                yield from run(near)
                lost = math.isinf(found[at]) and side < 0  # lower ones might not diverge
                if lost or found[near] < found[at]:
                    at = near
                    break
            else:
                break
        return at

    at = first
    for stride in strides:
        at = yield from bracket(at, stride)
    for betas, shift in others:
        yield from run(dataclasses.replace(at.move(shift), betas=betas))
    if best(found).betas != first.betas:
        yield from bracket(best(found), strides[-1])
    return found


def bracketed(found: Found, stride: float) -> bool:
    """Whether both neighbours of the best learning rate are known, at the best betas."""
    at = best(found)
    return math.isfinite(found[at]) and all(at.move(x) in found for x in (-stride, stride))


def follow(steps: Search, loss_of: Callable[[Trial], float | None]) -> tuple[Found, list[Trial]]:
    """Goes as far as losses are known: what was found, and what must be run next, if anything."""
    found: Found = {}
    try:
        wanted = next(steps)
        while True:
            found |= {t: loss for t in wanted if (loss := loss_of(t)) is not None}
            if missing := [trial for trial in wanted if trial not in found]:
                return found, missing
            wanted = steps.send([found[trial] for trial in wanted])
    except StopIteration as done:
        return done.value, []
