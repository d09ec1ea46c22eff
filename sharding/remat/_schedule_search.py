"""Which values of a loss are stored for its gradient, and which are computed again, and when.

The operations of the gradient keep their order. Before each, values are computed again, each at
most once; what is computed is kept as long as it is worth it, and may be computed yet again.
Instead, the forward pass may copy a value to the host, from where it is fetched.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

_MOST_STATES = 2000  # from which the search goes on, of small graphs
_WORK = 80_000  # states times values of large ones
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
    # For each step, in order, what is computed again in front of it; ~k: k is fetched.
    again: tuple[tuple[int, ...], ...]
    seconds: float  # of all that
    at_least: float  # seconds that any schedule takes: those of this one if it is optimal


class _States(NamedTuple):
    """Sets of values that must be in memory, at one point; a row for each."""

    masks: np.ndarray  # [states, words], a bit for each value
    keys: np.ndarray  # [states], equal for equal masks
    nbytes: np.ndarray  # [states], of the values
    seconds: np.ndarray  # [states], of what is computed again or fetched from here on
    last: np.ndarray  # [states], the number of the last one in ``_Trace``
    stored: np.ndarray  # [states], the number of the set that the forward pass leaves

    def at(self, rows: Any) -> "_States":
        return _States(*(x[rows] for x in self))

    def joined(self, other: "_States") -> "_States":
        return _States(*map(np.concatenate, zip(self, other, strict=True)))


class _Trace:
    """What was computed again, or fetched, on the way to each state."""

    def __init__(self) -> None:
        self.starts, self.parts = [0], list[tuple[int, int, np.ndarray]]()

    def add(self, states: _States, step: int, value: int, seconds: float) -> _States:
        self.parts.append((step, value, states.last))
        self.starts.append(self.starts[-1] + len(states.last))
        last = np.arange(*self.starts[-2:])
        return states._replace(seconds=states.seconds + seconds, last=last)

    def read(self, last: int) -> Iterator[tuple[int, int]]:
        while last >= 0:
            part = int(np.searchsorted(self.starts, last, side="right")) - 1
            step, value, before = self.parts[part]
            yield step, value
            last = int(before[last - self.starts[part]])


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
        self._values, self._num_steps = values, len(steps)
        order = sorted(range(len(values)), key=lambda k: values[k].nbytes)
        sums = np.cumsum([values[k].nbytes for k in order])
        few = _SMALL * float(sums[-1]) if values else 0.0
        self._small = set(order[: np.searchsorted(sums, few, side="right")])
        self._fixed = float(sum(values[k].nbytes for k in self._small))
        self._large = [k for k in range(len(values)) if k not in self._small]
        self._reads = [self._of_large(value.reads) for value in values]
        self._fetched = {k for k in self._large if values[k].fetch < math.inf}
        self._results = self._of_large(results)
        self._steps: list[tuple[int, Step]] = []  # with their numbers
        for t, step in enumerate(steps):
            over = -1 if step.over in self._small else step.over
            step = step._replace(reads=self._of_large(step.reads), over=over)
            old = self._steps and set(step.reads) <= set(self._steps[-1][1].reads)
            if old and len(values) > _FEW:  # nothing new is read: they are one
                first, before = self._steps[-1]
                during = max(before.during, step.during)
                own = max(0.0, during - max(before.during - before.own, step.during))
                self._steps[-1] = first, before._replace(during=during, own=own)
            else:
                self._steps.append((t, step))
        self._words = len(values) // 64 + 1
        self._bits = [np.uint64(1) << np.uint64(k % 64) for k in range(len(values))]
        self._keys = np.random.default_rng(0).integers(2**63, size=len(values), dtype=np.uint64)

    def _of_large(self, values: Iterable[int]) -> tuple[int, ...]:
        return tuple(k for k in values if k not in self._small)

    def find(self, budget: float, most: int | None = None) -> LossSchedule | None:
        """None if no schedule is found, with ``most`` states."""
        own = min(_MOST_STATES, _WORK // max(1, len(self._values)))
        # A given number of states is to find few bytes: those of the most are left out.
        most, sizes = most or own, _SIZES if most else min(_SIZES, own)
        limit, none = budget - self._fixed, np.full(1, -1)
        masks, zero = np.zeros((1, self._words), np.uint64), np.zeros(1)
        states = _States(masks, np.zeros(1, np.uint64), zero, zero, none, none)
        trace, exact = _Trace(), len(self._values) <= _FEW

        def joined(states: _States, new: _States) -> _States:
            nonlocal exact
            states = states.joined(new)
            states = states.at(_distinct(states))
            exact = exact and len(states.last) <= most
            return states.at(_some(states, most, sizes))

        def with_fetched(states: _States, t: int, reads: Iterable[int]) -> _States:
            for k in filter(self._fetched.__contains__, reads):
                new = self._without(states.at(self._has(states, k)), k)
                states = joined(states, trace.add(new, t, ~k, self._values[k].fetch))
            return states

        for t, step in reversed(self._steps):
            replaced = ~self._has(states, step.over) if step.over >= 0 else False
            states = self._require(states, step.reads)
            states = states.at(states.nbytes + step.during - step.own * replaced <= limit)
            states = with_fetched(states, t, step.reads)
            # Of many values, those that the step, or what is computed in front of it, reads.
            used = set(step.reads if len(self._values) > _FEW else self._large)
            for k in reversed(self._large):
                rows = self._has(states, k)
                if used.isdisjoint((k, *self._reads[k])) or not rows.any():
                    continue
                new = self._compute(states.at(rows), k, limit - step.before)
                if len(new.last):
                    used.update(self._reads[k])
                    new = trace.add(new, t, k, self._values[k].seconds)
                    states = joined(states, with_fetched(new, t, self._reads[k]))
        # The forward pass computes all.
        stored = states.masks
        states = self._require(states._replace(stored=np.arange(len(stored))), self._results)
        for k in reversed(self._large):
            rows = self._has(states, k)
            states = states.at(~rows).joined(self._compute(states.at(rows), k, limit))
        if not len(states.last):
            return None
        best = int(np.argmin(states.seconds))
        seconds, row = float(states.seconds[best]), stored[states.stored[best]]
        again: list[list[int]] = [[] for _ in range(self._num_steps)]
        for t, k in trace.read(int(states.last[best])):
            again[t].append(k)
        left = [k for k, bit in enumerate(self._bits) if row[k // 64] & bit or k in self._small]
        least = seconds if exact else min(seconds, self._at_least(limit))
        return LossSchedule(tuple(left), tuple(map(tuple, again)), seconds, least)

    def _has(self, states: _States, k: int) -> np.ndarray:
        return (states.masks[:, k // 64] & self._bits[k]) != 0

    def _require(self, states: _States, values: Iterable[int]) -> _States:
        masks, keys, nbytes = states.masks.copy(), states.keys, states.nbytes
        for k in values:
            lack = ~self._has(states, k)
            nbytes = nbytes + lack * self._values[k].nbytes
            keys = keys ^ (lack * self._keys[k])
            masks[:, k // 64] |= self._bits[k]
        return states._replace(masks=masks, keys=keys, nbytes=nbytes)

    def _compute(self, states: _States, k: int, limit: float) -> _States:
        """States in front of the computation of a value, which is in all of them."""
        value = self._values[k]
        states = self._require(states, self._reads[k])
        return self._without(states.at(states.nbytes + value.inside <= limit), k)

    def _without(self, states: _States, k: int) -> _States:
        states.masks[:, k // 64] &= ~self._bits[k]
        nbytes, keys = states.nbytes - self._values[k].nbytes, states.keys ^ self._keys[k]
        return states._replace(nbytes=nbytes, keys=keys)

    def _at_least(self, limit: float) -> float:
        """What later steps read, and does not fit beside a step, is computed or fetched once."""
        values = [v._replace(seconds=min(v.seconds, v.fetch)) for v in self._values]
        least, later = 0.0, set[int]()
        for _, step in reversed(self._steps):
            later |= set(step.reads)
            excess = sum(values[k].nbytes for k in later) + step.during - limit
            seconds = 0.0
            others = (values[k] for k in later.difference(step.reads))
            for value in sorted(others, key=lambda v: v.seconds / max(v.nbytes, 1.0)):
                share = min(1.0, max(0.0, excess) / max(value.nbytes, 1.0))
                seconds, excess = seconds + share * value.seconds, excess - value.nbytes
            least = max(least, seconds)
        return least

    @property
    def most(self) -> float:
        """Bytes with which nothing is computed again."""
        peak, later = 0.0, set[int]()
        for _, step in reversed(self._steps):
            later |= set(step.reads)
            peak = max(peak, sum(self._values[k].nbytes for k in later) + step.during)
        live = later.union(self._results)  # as in the forward pass of ``find``
        for k in reversed(self._large):
            if k in live:
                live.update(self._reads[k])
                held = sum(self._values[i].nbytes for i in live)
                peak = max(peak, held + self._values[k].inside)
                live.remove(k)
        return self._fixed + float(peak)


def _distinct(states: _States) -> np.ndarray:
    """Of states with the same values, the fastest."""
    order = np.lexsort((states.seconds, states.keys))
    return order[np.diff(states.keys[order], prepend=~states.keys[order[:1]]) != 0]


def _some(states: _States, most: int, num_sizes: int) -> Any:
    """The fastest with about as many bytes, of every number of bytes."""
    count = len(states.last)
    if count <= most:
        return slice(None)
    sizes = states.nbytes - states.nbytes.min()
    bins = (sizes / max(float(sizes.max()), 1e-30) * (num_sizes - 1)).astype(int)
    # Of equal ones those of late values, in front of which segments are left for earlier steps.
    order = np.lexsort((*~states.masks.T, states.seconds, bins))
    position = np.arange(count)
    first = np.diff(bins[order], prepend=-1) != 0
    rank = position - np.maximum.accumulate(np.where(first, position, 0))
    return order[np.argsort(rank, kind="stable")[:most]]
