"""Which values of a loss are stored for its gradient, and which are computed again, and when.

The operations of the gradient keep their order. Before each, values are computed again, each at
most once; what is computed is kept as long as it is worth it, and may be computed yet again.
Instead, the forward pass may copy a value to the host, from where it is fetched.
"""

import dataclasses
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
_BITS = np.uint64(1) << np.arange(64, dtype=np.uint64)


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


class ScheduledTask(NamedTuple):
    """What runs in front of a step: a value is computed again, or fetched from the host."""

    value: int
    fetches: bool = False


class LossSchedule(NamedTuple):
    stored: tuple[int, ...]  # values that the forward pass leaves
    # For each step, in order, what runs in front of it; () if steps are as the compiler orders them
    again: tuple[tuple[ScheduledTask, ...], ...]
    seconds: float  # of all that
    at_least: float  # seconds that any schedule takes: those of this one if it is optimal


class _States:
    """Sets of values that must be in memory, at one point."""

    def __init__(self, table: np.ndarray):
        self.table = table  # [6 + words, states]
        self.nbytes = table[0]  # sums over the values
        self.keys = table[1]  # as well; equal of equal sets, and of no others
        self.seconds = table[2]  # of what is computed again or fetched from here on
        self.last = table[3:5]  # how many tasks that is of a ``_Find``, and the state's column
        self.stored = table[5]  # the number of the set that the forward pass leaves
        self.words = table[6:].view(np.uint64)  # value k is bit k % 64 of word k // 64

    def __len__(self) -> int:
        return self.table.shape[1]

    def take(self, columns: np.ndarray) -> "_States":
        return _States(self.table.take(columns, axis=1))

    def where(self, chosen: np.ndarray) -> "_States":
        """A copy of those with true, or other than 0."""
        return self.take(chosen.nonzero()[0])

    def joined(self, other: "_States") -> "_States":
        return _States(np.concatenate([self.table, other.table], axis=1))

    def having(self, k: int) -> np.ndarray:
        """Not 0 for those with this value."""
        return self.words[k // 64] & _BITS[k % 64]

    def add(self, values: Iterable[int], numbers: np.ndarray) -> None:
        """Values that some of them may have, each of so many bytes and of this key."""
        for k in values:
            lack = self.having(k) == 0
            self.nbytes += lack * numbers[k, 0]
            self.keys += lack * numbers[k, 1]
            self.words[k // 64] |= _BITS[k % 64]

    def remove(self, k: int, numbers: np.ndarray) -> None:
        """A value that all of them have."""
        self.nbytes -= numbers[k, 0]
        self.keys -= numbers[k, 1]
        self.words[k // 64] ^= _BITS[k % 64]


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
        self._count = len(values)
        self._num_steps = len(steps)
        order = sorted(range(len(values)), key=lambda k: values[k].nbytes)
        sums = np.cumsum([0.0, *(values[k].nbytes for k in order)])
        few = int(np.searchsorted(sums, _SMALL * sums[-1], side="right")) - 1
        self._small = order[:few]
        self._fixed = float(sums[few])
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
        keys = np.floor(2.0**48 * keys / max(1, len(number)) ** 2)  # their sums are exact
        self._numbers = np.stack([[value.nbytes for value in self._values], keys], axis=1)

    def find(
        self, budget: float, most: int | None = None, bound: float = math.inf
    ) -> LossSchedule | None:
        """None if no schedule of less than ``bound`` seconds is found, with ``most`` states."""
        if budget >= self.most and bound > 0:
            return self.in_any_order._replace(again=((),) * self._num_steps)
        own = min(_MOST_STATES, _WORK // max(1, self._count))
        # A given number of states is to find few bytes: those of the most are left out.
        sizes, growth = (_SIZES, 1) if most else (min(_SIZES, own), 2)
        return _Find(self, budget - self._fixed, most or own, sizes, growth, bound).run()

    def _stored(self, values: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted([*self._small, *(self._large[k] for k in values)]))

    @property
    def in_any_order(self) -> LossSchedule:
        """That which computes nothing again, without steps."""
        read = {k for _, step in self._steps for k in step.reads}
        return LossSchedule(self._stored(read), (), 0.0, 0.0)

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
        peak = 0.0
        live = set(self._results)
        for step, later in self._with_later():
            peak = max(peak, self._nbytes(later) + step.during)
            live |= set(step.reads)
        for k, value in reversed([*enumerate(self._values)]):  # as in the forward pass of ``find``
            if k in live:
                live.update(value.reads)
                peak = max(peak, self._nbytes(live) + value.inside)
                live.remove(k)
        return self._fixed + peak


@dataclasses.dataclass
class _Find:
    """One search, from the last step to the first."""

    search: ScheduleSearch
    limit: float  # bytes of values, and of a step beside them
    most: int  # states, of so many ...
    sizes: int  # ... numbers of bytes
    growth: int  # of the number of states before some are left out
    bound: float  # of seconds
    room: int = 1  # states that need not be left out
    exact: bool = True  # whether none was
    # What ran, from the last on: in front of which step, and ``last`` of the states it is from.
    tasks: list[tuple[int, ScheduledTask, np.ndarray]] = dataclasses.field(default_factory=list)

    def run(self) -> LossSchedule | None:
        search = self.search
        limit = self.limit
        self.exact = search._count <= _FEW
        words = -(-len(search._values) // 64)
        left = _States(np.zeros((6 + words, 1)))  # by the forward pass
        for t, step in reversed(search._steps):
            left = self._before_step(left, t, step)
        left = left.where(left.seconds < self.bound)
        left.stored[:] = np.arange(len(left))
        # The forward pass computes all.
        states = left.where(np.ones(len(left)))
        states.add(search._results, search._numbers)
        for k in reversed(range(len(search._values))):
            rest = states.where(states.having(k) == 0)
            states = rest.joined(self._compute(states, k, limit))
        if not len(states):
            return None
        best = states.take(np.argmin(states.seconds, keepdims=True))
        seconds = float(best.seconds[0])
        stored = left.take(best.stored.astype(int))
        values = [k for k in range(len(search._values)) if stored.having(k)[0]]
        least = seconds if self.exact else min(seconds, search._at_least(limit))
        return LossSchedule(search._stored(values), self._tasks(best.last[:, 0]), seconds, least)

    def _before_step(self, states: _States, t: int, step: Step) -> _States:
        """The states in front of a step, and of what is computed again and fetched for it."""
        search = self.search
        during = np.full(len(states), step.during)
        if step.over >= 0:
            during[states.having(step.over) == 0] -= step.own
        states.add(step.reads, search._numbers)
        states = states.where(states.nbytes + during <= self.limit)
        states = self._with_fetched(states, t, step.reads)
        # Of many values, those that the step, or what is computed in front of it, reads.
        used = set(step.reads if search._count > _FEW else range(len(search._values)))
        for k, value in reversed([*enumerate(search._values)]):
            if used.isdisjoint((k, *value.reads)):
                continue
            new = self._compute(states, k, self.limit - step.before)
            if len(new):
                used.update(value.reads)
                self._record(new, t, ScheduledTask(k), value.seconds)
                states = self._joined(states, self._with_fetched(new, t, value.reads))
        return states

    def _with_fetched(self, states: _States, t: int, reads: Iterable[int]) -> _States:
        for k in reads:
            if self.search._values[k].fetch < math.inf:
                new = states.where(states.having(k))
                new.remove(k, self.search._numbers)
                self._record(new, t, ScheduledTask(k, fetches=True), self.search._values[k].fetch)
                states = self._joined(states, new)
        return states

    def _record(self, states: _States, t: int, task: ScheduledTask, seconds: float) -> None:
        """A task of these states, in front of all that they had."""
        self.tasks.append((t, task, states.last.copy()))
        states.seconds += seconds
        states.last[0] = len(self.tasks)
        states.last[1] = np.arange(len(states))

    def _compute(self, states: _States, k: int, limit: float) -> _States:
        """States in front of the computation of a value, of those that have it."""
        search = self.search
        states = states.where(states.having(k))
        if len(states):
            states.add(search._values[k].reads, search._numbers)
            states = states.where(states.nbytes + search._values[k].inside <= limit)
            states.remove(k, search._numbers)
        return states

    def _joined(self, states: _States, new: _States) -> _States:
        states = states.joined(new)
        if len(states) > self.room:
            columns = _distinct(states)
            columns = columns[states.seconds[columns] < self.bound]
            self.exact = self.exact and len(columns) <= self.most
            if len(columns) > self.most:
                columns = columns[_some(states.nbytes[columns], self.most, self.sizes)]
            states = states.take(columns)
            self.room = self.growth * len(states)
        return states

    def _tasks(self, last: np.ndarray) -> tuple[tuple[ScheduledTask, ...], ...]:
        """Those of each step, in order, of a state with this ``last``."""
        again: list[list[ScheduledTask]] = [[] for _ in range(self.search._num_steps)]
        while last[0]:
            t, task, before = self.tasks[int(last[0]) - 1]
            again[t].append(task._replace(value=self.search._large[task.value]))
            last = before[:, int(last[1])]
        return tuple(map(tuple, again))


def _distinct(states: _States) -> np.ndarray:
    """Of states with the same values the fastest; the fastest first, then those of late values.

    In front of late values segments are left for earlier steps.
    """
    keys = states.keys.astype(np.int64)
    order = _order(-keys)
    order = order[np.argsort(states.seconds[order], kind="stable")]
    keys = keys[order]
    equal = _order(keys)
    keys = keys[equal]
    repeated = equal[1:][keys[1:] == keys[:-1]]
    order[repeated] = -1
    return order[order >= 0]


def _some(nbytes: np.ndarray, most: int, num_sizes: int) -> np.ndarray:
    """Of every number of bytes, the first with about as many."""
    sizes = nbytes - nbytes.min()
    bins = (sizes / max(float(sizes.max()), 1e-30) * (num_sizes - 1)).astype(np.int16)
    order = np.argsort(bins, kind="stable")
    counts = np.bincount(bins)
    rank = np.arange(len(bins)) - np.repeat(np.cumsum(counts) - counts, counts)
    return order[np.argsort(rank.astype(np.int16), kind="stable")[:most]]


def _order(numbers: np.ndarray) -> np.ndarray:
    """The stable order of integers below 2**49, ten times as fast as ``argsort``."""
    bits = len(numbers).bit_length()
    return np.sort((numbers << bits) + np.arange(len(numbers))) & ((1 << bits) - 1)
