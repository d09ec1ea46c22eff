"""A search that starts near the optimum and walks the grid of learning rates to a bracketed one.

It takes a third of the runs of ``_search.search`` where a good start is known. It is a generator of
rounds like that one, so that a search that was stopped is replayed from what is known.
"""

import dataclasses
import math
from collections.abc import Generator, Sequence

from _search import Trial, best

LIMIT = 16  # trials; a search that needs more has no optimum on this grid

Betas = tuple[tuple[str, float], ...]
Search = Generator[list[Trial], list[float], dict[Trial, float]]


def walk(
    start: Trial, strides: Sequence[float], others: Sequence[tuple[Betas, float]] = ()
) -> Search:
    """Yields rounds of trials and is sent their losses; returns all.

    1. From ``start`` the learning rate moves by the first stride while a neighbour is better, the
       lower one asked first; then the next stride from there. It ends at a rate whose neighbours
       are both known and no better.
    2. Each of the ``others`` once, at that learning rate times what they ask for.
    3. If one of them is better, its learning rate moves by the last stride, to a bracketed one.

    Args:
      start: where it begins.
      strides: decades of learning rate, the coarsest first.
      others: other betas, and decades by which the learning rate moves with them.
    """
    found: dict[Trial, float] = {}

    def run(trial: Trial) -> Generator[list[Trial], list[float], None]:
        if trial not in found:
            found[trial] = (yield [trial])[0]

    def bracket(at: Trial, stride: float) -> Generator[list[Trial], list[float], Trial]:
        yield from run(at)
        while len(found) < LIMIT:
            for side in (-stride, stride):
                near = move(at, side)
                yield from run(near)
                lost = math.isinf(found[at]) and side < 0  # lower ones might not diverge
                if lost or found[near] < found[at]:
                    at = near
                    break
            else:
                break
        return at

    at = start
    for stride in strides:
        at = yield from bracket(at, stride)
    for betas, shift in others:
        yield from run(dataclasses.replace(move(at, shift), betas=betas))
    if best(found).betas != start.betas:
        yield from bracket(best(found), strides[-1])
    return found


def bracketed(found: dict[Trial, float], stride: float) -> bool:
    """Whether both neighbours of the best learning rate are known, at the best betas."""
    at = best(found)
    return math.isfinite(found[at]) and all(move(at, x) in found for x in (-stride, stride))


def move(trial: Trial, decades: float) -> Trial:
    """The trial at another learning rate."""
    return dataclasses.replace(trial, exponent=trial.exponent + decades)
