"""Which values of a loss are stored for its gradient, and which are computed again, and when.

The operations of the gradient keep their order. Before each, values are computed again, each at
most once; what is computed is kept as long as it is worth it, and may be computed yet again.
Instead, the forward pass may copy a value to the host, from where it is fetched.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

_MOST_STATES = 2000  # from which the search goes on, of small graphs
_WORK = 120_000  # states times values of large ones
_FEW = 40  # values for which no steps are joined, and all schedules are compared
_SMALL = 0.005  # of the bytes of all values
_SIZES = 100  # numbers of bytes that are told apart if there are more


class Value(NamedTuple):
    """A value of a loss. Times in any unit."""

    nbytes: float
    seconds: float  # to compute it
    reads: tuple[int, ...]  # values in front of it
    inside: float = 0.0  # bytes in memory while it is computed, beside what it reads and itself
    fetch: float = math.inf  # seconds to the host and back; of values that the results need


class Step(NamedTuple):
    """An operation of the gradient."""

    reads: tuple[int, ...]  # values of the loss
    before: float  # bytes of the gradient's own values when it begins
    during: float  # and while it runs
    over: int = -1  # a value in whose place, if nothing reads it later, its result may be
    own: float = 0.0  # bytes of its result


class LossSchedule(NamedTuple):
    stored: tuple[int, ...]  # values that the forward pass leaves
    # For each step, in order, what is computed again in front of it; ~k: k is fetched. () if steps
    # are as the compiler orders them.
    again: tuple[tuple[int, ...], ...]
    seconds: float  # of all that
    at_least: float  # seconds that any schedule takes: those of this one if it is optimal


class _States:
    """Sets of values that must be in memory, at one point; a row for each."""

    def __init__(self, masks: np.ndarray, numbers: np.ndarray):
        self.masks = masks  # [states, values]
        self.numbers = numbers  # [states, 5]
        self.nbytes, self.keys = numbers[:, 0], numbers[:, 1]  # sums over the values; keys differ
        self.seconds = numbers[:, 2]  # of what is computed again or fetched from here on
        self.last = numbers[:, 3]  # the number of the last of that in ``find``
        self.stored = numbers[:, 4]  # the number of the set that the forward pass leaves

    def __len__(self) -> int:
        return len(self.masks)

    def where(self, rows: np.ndarray) -> "_States":
        return _States(self.masks.compress(rows, axis=0), self.numbers.compress(rows, axis=0))

    def take(self, rows: np.ndarray) -> "_States":
        return _States(self.masks.take(rows, axis=0), self.numbers.take(rows, axis=0))

    def joined(self, other: "_States") -> "_States":
        masks = np.concatenate([self.masks, other.masks])
        return _States(masks, np.concatenate([self.numbers, other.numbers]))


class ScheduleSearch:
    """The fastest schedule for any budget of bytes.

    A state is the set of values that must be in memory at some point. From the last step to the
    first, and in each from the last value to the first, a value that must be there either has been
    there before the step, or is computed in it from what it reads, or is fetched in front of what
    reads it. The least time to each state is found: the optimum of few values, unless states are
    left out at some point, of those with about as many bytes the slowest. Values of ``_SMALL``
    bytes are always stored.
    """

    def __init__(self, values: Sequence[Value], steps: Sequence[Step], results: Sequence[int] = ()):
        # ``results`` are values that the loss returns.
        self._count, self._num_steps = len(values), len(steps)
        order = sorted(range(len(values)), key=lambda k: values[k].nbytes)
        sums = np.cumsum([0.0, *(values[k].nbytes for k in order)])
        few = int(np.searchsorted(sums, _SMALL * sums[-1], side="right")) - 1
        self._small, self._fixed = order[:few], float(sums[few])
        self._large = sorted(order[few:])  # from here on by their numbers in it
        number = {k: n for n, k in enumerate(self._large)}

        def large(ks: Iterable[int]) -> tuple[int, ...]:
            return tuple(number[k] for k in ks if k in number)

        self._values = [values[k]._replace(reads=large(values[k].reads)) for k in self._large]
        self._results = large(results)
        self._steps: list[tuple[int, Step]] = []  # with their numbers
        for t, step in enumerate(steps):
            step = step._replace(reads=large(step.reads), over=number.get(step.over, -1))
            old = self._steps and set(step.reads) <= set(self._steps[-1][1].reads)
            if old and self._count > _FEW:  # nothing new is read: they are one
                first, before = self._steps[-1]
                during = max(before.during, step.during)
                own = max(0.0, during - max(before.during - before.own, step.during))
                self._steps[-1] = first, before._replace(during=during, own=own)
            else:
                self._steps.append((t, step))
        keys = np.arange(len(number)) + np.random.default_rng(0).random(len(number))
        keys = np.floor(2.0**51 * keys / max(1, len(number)) ** 2)  # their sums are exact
        self._numbers = np.stack([[value.nbytes for value in self._values], keys], axis=1)

    def find(
        self, budget: float, most: int | None = None, bound: float = math.inf
    ) -> LossSchedule | None:
        """None if no schedule of less than ``bound`` seconds is found, with ``most`` states."""
        if budget >= self.most and bound > 0:
            return self.in_any_order._replace(again=((),) * self._num_steps)
        own = min(_MOST_STATES, _WORK // max(1, self._count))
        # A given number of states is to find few bytes: those of the most are left out.
        growth = 1 if most else 2  # of the number of states before some are left out
        most, sizes = most or own, _SIZES if most else min(_SIZES, own)
        limit, exact = budget - self._fixed, self._count <= _FEW
        states = _States(np.zeros((1, len(self._values)), bool), np.zeros((1, 5)))
        room, done = 1, list[tuple[int, int, np.ndarray]]()  # step, value, the last before

        def do(states: _States, t: int, k: int, seconds: float) -> None:
            done.append((t, k, states.last.copy()))
            states.seconds += seconds
            states.last[:] = np.arange(len(states)) + (len(done) << 32)

        def with_fetched(states: _States, t: int, reads: Iterable[int]) -> _States:
            for k in reads:
                if self._values[k].fetch < math.inf:
                    new = states.where(states.masks[:, k])
                    self._remove(new, k)
                    do(new, t, ~k, self._values[k].fetch)
                    states = joined(states, new)
            return states

        def joined(states: _States, new: _States) -> _States:
            nonlocal exact, room
            states = states.joined(new)
            if len(states) > room:
                states = _distinct(states.where(states.seconds < bound))
                exact = exact and len(states) <= most
                states = _some(states, most, sizes)
                room = growth * len(states)
            return states

        for t, step in reversed(self._steps):
            replaced = ~states.masks[:, step.over] if step.over >= 0 else False
            self._require(states, step.reads)
            states = states.where(states.nbytes + step.during - step.own * replaced <= limit)
            states = with_fetched(states, t, step.reads)
            # Of many values, those that the step, or what is computed in front of it, reads.
            used = set(step.reads if self._count > _FEW else range(len(self._values)))
            for k, value in reversed([*enumerate(self._values)]):
                if used.isdisjoint((k, *value.reads)):
                    continue
                new = self._compute(states, k, limit - step.before)
                if len(new):
                    used.update(value.reads)
                    do(new, t, k, value.seconds)
                    states = joined(states, with_fetched(new, t, value.reads))
        states = states.where(states.seconds < bound)
        # The forward pass computes all.
        masks = states.masks.copy()
        states.stored[:] = np.arange(len(states))
        self._require(states, self._results)
        for k in reversed(range(len(self._values))):
            states = states.where(~states.masks[:, k]).joined(self._compute(states, k, limit))
        if not len(states):
            return None
        _, _, seconds, last, row = map(float, states.numbers[np.argmin(states.seconds)])
        again: list[list[int]] = [[] for _ in range(self._num_steps)]
        while last:
            part, number = divmod(int(last), 1 << 32)
            t, k, before = done[part - 1]
            again[t].append(self._large[k] if k >= 0 else ~self._large[~k])
            last = before[number]
        least = seconds if exact else min(seconds, self._at_least(limit))
        stored = self._stored(np.flatnonzero(masks[int(row)]))
        return LossSchedule(stored, tuple(map(tuple, again)), seconds, least)

    def _stored(self, values: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted([*self._small, *(self._large[k] for k in values)]))

    @property
    def in_any_order(self) -> LossSchedule:
        """That which computes nothing again, without steps."""
        read = {k for _, step in self._steps for k in step.reads}
        return LossSchedule(self._stored(read), (), 0.0, 0.0)

    def _require(self, states: _States, values: Sequence[int]) -> None:
        lack = ~states.masks[:, values]
        states.numbers[:, :2] += lack @ self._numbers[[*values]]
        states.masks[:, values] = True

    def _compute(self, states: _States, k: int, limit: float) -> _States:
        """States in front of the computation of a value, of those that have it."""
        states = states.where(states.masks[:, k])
        self._require(states, self._values[k].reads)
        states = states.where(states.nbytes + self._values[k].inside <= limit)
        self._remove(states, k)
        return states

    def _remove(self, states: _States, k: int) -> None:
        states.numbers[:, :2] -= self._numbers[k]
        states.masks[:, k] = False

    def _with_later(self) -> Iterator[tuple[Step, set[int]]]:
        """The steps from the last one on, with what they and later ones read."""
        later = set[int]()
        for _, step in reversed(self._steps):
            later |= set(step.reads)
            yield step, later

    def _nbytes(self, values: Iterable[int]) -> float:
        return sum(self._values[k].nbytes for k in values)

    def _at_least(self, limit: float) -> float:
        """What later steps read, and does not fit beside a step, is computed or fetched once."""
        values = [v._replace(seconds=min(v.seconds, v.fetch)) for v in self._values]
        least = 0.0
        for step, later in self._with_later():
            excess = self._nbytes(later) + step.during - limit
            seconds = 0.0
            others = (values[k] for k in later.difference(step.reads))
            for value in sorted(others, key=lambda v: v.seconds / max(v.nbytes, 1.0)):
                share = min(1.0, max(0.0, excess) / max(value.nbytes, 1.0))
                seconds, excess = seconds + share * value.seconds, excess - value.nbytes
            least = max(least, seconds)
        return least

    @property
    def floor(self) -> float:
        """Bytes that each schedule needs: those of one step."""
        steps = (step for _, step in self._steps)
        needs = (self._nbytes({*step.reads}) + step.during - step.own for step in steps)
        return self._fixed + max(needs, default=0.0)

    @functools.cached_property
    def most(self) -> float:
        """Bytes with which nothing is computed again."""
        peak, live = 0.0, set(self._results)
        for step, later in self._with_later():
            peak = max(peak, self._nbytes(later) + step.during)
            live |= set(step.reads)
        for k, value in reversed([*enumerate(self._values)]):  # as in the forward pass of ``find``
            if k in live:
                live.update(value.reads)
                peak = max(peak, self._nbytes(live) + value.inside)
                live.remove(k)
        return self._fixed + peak


def _distinct(states: _States) -> _States:
    """Of states with the same values, the fastest."""
    order = np.lexsort((states.seconds, -states.keys))
    return states.take(order[np.diff(states.keys[order], prepend=-1) != 0])


def _some(states: _States, most: int, num_sizes: int) -> _States:
    """The fastest with about as many bytes, of every number of bytes."""
    if len(states) <= most:
        return states
    sizes = states.nbytes - states.nbytes.min()
    bins = (sizes / max(float(sizes.max()), 1e-30) * (num_sizes - 1)).astype(int)
    # Of equal ones those of late values, in front of which segments are left for earlier steps.
    order = np.lexsort((-states.keys, states.seconds, bins))
    rank = np.arange(len(bins)) - np.searchsorted(bins[order], bins[order])
    return states.take(order[np.argsort(rank, kind="stable")[:most]])
