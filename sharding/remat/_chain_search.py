"""Best places to store activations in a chain of blocks: Rotor's dynamic program."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

# Steps of memory that are told apart for blocks s to t; chains of few kinds of blocks have fewer.
_MOST_STEPS = 500
_ROUNDING = 1e-12


class Mode(NamedTuple):
    """One way to run a block's backward pass."""

    names: tuple[str, ...]  # of values that are saved between the block's forward and backward pass
    saved: float  # bytes of them
    temporaries: float  # bytes of the program of the backward pass alone, what is saved included
    recompute: float  # time that it takes to compute the others again


class Block(NamedTuple):
    """A block of a chain. Times in any unit."""

    forward: float  # time of the forward pass
    backward: float  # time of the backward pass without recomputation
    modes: tuple[Mode, ...]  # ways to run it; the last one saves nothing


class Kept(NamedTuple):
    """A block whose input is stored, and the mode that says what it saves, by their numbers."""

    block: int
    mode: int


class Rerun(NamedTuple):
    """Blocks and segments, in order, that store their input alone and run again in backward."""

    parts: "tuple[Kept | Rerun, ...]"


Tree = tuple[Kept | Rerun, ...]


class _Steps(NamedTuple):
    """A step function of bytes, by its steps."""

    peaks: np.ndarray  # [steps], bytes from which on a time is possible
    times: np.ndarray  # [steps]
    choices: np.ndarray  # [steps], what takes that time: mode k as k, a segment of n blocks as -n

    def at(self, nbytes: Any) -> Any:
        return np.searchsorted(self.peaks, nbytes, side="right") - 1


def _step(peak: float, time: float, choice: int) -> _Steps:
    return _Steps(np.array([peak]), np.array([time]), np.array([choice]))


class ChainSearch:
    r"""What to store in a chain of blocks, so that a step takes the least time, for all budgets.

    Blocks s to t are run with m bytes beside their input. Either blocks s to s' - 1 become a
    segment, of which the input alone is stored, or block s stores what mode k saves:

    .. math::

      C(s, t, m) = \min \Big(
        &\min_{s'} \textstyle\sum_{j = s}^{s' - 1} u_j + C(s', t, m - a_{s'}) + C(s, s' - 1, m), \\
        &\min_k u_s + v_s + r_{s k} + C(s + 1, t, m - b_{s k} - a_{s + 1}) \Big)

    with input sizes a, forward times u, backward times v, saved bytes b and recomputation r. The
    forward pass of a segment's last block is charged only for what its backward pass needs of it:
    XLA removes the rest. C is a step function of m: its steps are found, and no size is rounded.
    ``peaks`` are bytes of the trees that no other one beats, ascending; ``times`` are theirs.
    """

    def __init__(self, blocks: Sequence[Block], sizes: Sequence[float]):
        # Sizes: bytes of the input of every block, and of the last one's output.
        self._blocks, self._sizes, count = blocks, sizes, len(blocks)
        self._steps: dict[tuple[int, int], _Steps] = {}
        self._starts = np.concatenate([[0.0], np.cumsum([block.forward for block in blocks])])
        known: dict[Any, _Steps] = {}  # by kinds of blocks, and whether they end the chain
        described = list(zip(blocks, sizes[:-1], sizes[1:], strict=True))
        kinds = [described.index(kind) for kind in described]
        for length in range(count):
            for s in range(count - length):
                t = s + length
                key = t == count - 1, *kinds[s : t + 1]
                if key not in known:
                    known[key] = _best(self._ways(s, t))
                self._steps[s, t] = known[key]
        self.peaks, self.times, _ = self._steps[0, count - 1]

    def _ways(self, s: int, t: int) -> Iterator[_Steps]:
        """Steps of every choice for blocks s to t; of equal ones the first is taken."""
        blocks, sizes, block = self._blocks, self._sizes, self._blocks[s]
        if s == t:
            for k, mode in enumerate(block.modes):
                time = _last_forward(blocks, s, k) + block.backward + mode.recompute
                yield _step(leaf_bytes(block, sizes, s, k), time, k)
            return
        # A segment of blocks s to stop - 1, whose input alone is stored.
        for stop in range(s + 1, t + 1):
            inner = self._steps[s, stop - 1]
            if stop == s + 1:  # a single block, which saves nothing
                last = len(block.modes) - 1
                time = block.backward + block.modes[last].recompute
                inner = _step(leaf_bytes(block, sizes, s, last), time, 0)
            after = self._steps[stop, t]
            running = max(sizes[j] + sizes[j + 1] for j in range(s, stop))
            # Both parts are step functions: their sum has a step where either has one.
            peaks = np.union1d(inner.peaks, after.peaks + sizes[stop])
            peaks = peaks[peaks >= max(inner.peaks[0], after.peaks[0] + sizes[stop])]
            times = inner.times[inner.at(peaks)] + after.times[after.at(peaks - sizes[stop])]
            times = times + self._starts[stop] - self._starts[s]
            yield _Steps(np.maximum(peaks, running), times, np.full(len(peaks), s - stop))
        # Block s alone, with what mode k saves. The last mode saves nothing: it is a segment above.
        for k, mode in reversed(list(enumerate(block.modes[:-1]))):
            after, held = self._steps[s + 1, t], mode.saved + sizes[s + 1]
            needed = max(leaf_bytes(block, sizes, s, k), held + sizes[s])
            times = after.times + block.forward + block.backward + mode.recompute
            yield _Steps(np.maximum(after.peaks + held, needed), times, np.full(len(times), k))

    def tree(self, budget: float) -> Tree:
        """Finds the best tree within a budget, which is at least the first of ``peaks``."""
        return self._tree(0, len(self._blocks) - 1, budget)

    def _tree(self, s: int, t: int, budget: float) -> Tree:
        blocks, sizes, steps = self._blocks, self._sizes, self._steps[s, t]
        i = steps.at(budget)
        most, choice = float(steps.peaks[i]), int(steps.choices[i])
        if s == t:
            return (Kept(s, choice),)
        if choice >= 0:
            held = blocks[s].modes[choice].saved + sizes[s + 1]
            return (Kept(s, choice), *self._tree(s + 1, t, most - held))
        stop, last = s - choice, len(blocks[s].modes) - 1
        inner = (Kept(s, last),) if stop == s + 1 else self._tree(s, stop - 1, most)
        return (Rerun(inner), *self._tree(stop, t, most - sizes[stop]))


def _best(ways: Iterable[_Steps]) -> _Steps:
    """Takes the least time of all ways at every number of bytes, ascending."""
    peaks, times, choices = map(np.concatenate, zip(*ways, strict=True))
    order = np.lexsort((times, peaks))
    least = np.minimum.accumulate(times[order])
    # The sum of equal times in another order is no less of them.
    order = order[times[order] < np.concatenate([[np.inf], least[:-1]]) * (1 - _ROUNDING)]
    order = order[some(peaks[order], _MOST_STEPS)]
    return _Steps(peaks[order], times[order], choices[order])


def some(peaks: np.ndarray, most: int) -> Any:
    """Chooses at most so many of ascending peaks, in equal ratios, the first and last included."""
    if len(peaks) <= most:
        return slice(None)
    above = np.log((peaks + 1) / (peaks[0] + 1))
    part = np.floor(above / above[-1] * (most - 1))
    return np.unique(part, return_index=True)[1]


def _last_forward(blocks: Sequence[Block], s: int, k: int) -> float:
    """Time of the forward pass of a block that ends a segment or the chain."""
    block = blocks[s]
    # What a segment's last block saves is computed in its forward pass; the rest of that is dead.
    dead = block.modes[-1].recompute - block.modes[k].recompute
    return block.forward if s == len(blocks) - 1 else dead


def leaf_bytes(block: Block, sizes: Sequence[float], s: int, k: int) -> float:
    """Bytes of a block's backward pass: temporaries, and the cotangents of output and input."""
    return block.modes[k].temporaries + sizes[s + 1] + sizes[s]


def peak_bytes(tree: Tree, blocks: Sequence[Block], sizes: Sequence[float]) -> float:
    """Most bytes of activations and temporaries at once, the chain's input aside."""
    first, after = tree[0], tree[1:]
    if isinstance(first, Kept):
        s, k = first
        own = leaf_bytes(blocks[s], sizes, s, k)
        held = blocks[s].modes[k].saved + sizes[s + 1]
        return max(own, held + sizes[s], held + peak_bytes(after, blocks, sizes)) if after else own
    numbers = numbers_in_tree(first.parts)
    running = max(sizes[j] + sizes[j + 1] for j in numbers)
    most = max(running, peak_bytes(first.parts, blocks, sizes))
    if after:
        most = max(most, sizes[numbers[-1] + 1] + peak_bytes(after, blocks, sizes))
    return most


def stored_bytes(tree: Tree, blocks: Sequence[Block], sizes: Sequence[float]) -> float:
    """Bytes that a chain stores between its forward and its backward pass, its input aside."""
    starts = [numbers_in_tree((part,))[0] for part in tree[1:]]
    saved = [blocks[p.block].modes[p.mode].saved for p in tree if isinstance(p, Kept)]
    return sum(sizes[start] for start in starts) + sum(saved)


def kept_in_tree(tree: Tree) -> list[Kept]:
    """Blocks with their modes, in order, those of segments too."""
    return [
        kept
        for part in tree
        for kept in ([part] if isinstance(part, Kept) else kept_in_tree(part.parts))
    ]


def numbers_in_tree(tree: Tree) -> list[int]:
    return [kept.block for kept in kept_in_tree(tree)]


def time_of(tree: Tree, blocks: Sequence[Block]) -> float:
    """Time of a step of a chain, or of a segment that runs again."""
    total = 0.0
    for i, part in enumerate(tree):
        if isinstance(part, Rerun):
            total += sum(blocks[n].forward for n in numbers_in_tree(part.parts))
            total += time_of(part.parts, blocks)
        else:
            block, ends = blocks[part.block], i == len(tree) - 1
            total += _last_forward(blocks, *part) if ends else block.forward
            total += block.backward + block.modes[part.mode].recompute
    return total


def tree_as_text(tree: Tree) -> str:
    """Blocks in order; segments in parentheses, the number of a mode after a slash."""
    return " ".join(
        f"{part.block}/{part.mode}" if isinstance(part, Kept) else f"({tree_as_text(part.parts)})"
        for part in tree
    )
