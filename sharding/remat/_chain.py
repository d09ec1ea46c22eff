"""The best places to store activations in a chain of blocks: Rotor's dynamic program."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Mode(NamedTuple):
    """One way to run a block's backward pass.

    Attributes:
      names: of values that are saved between the block's forward and backward pass.
      saved: bytes of them.
      temporaries: bytes of the program of the backward pass alone, what is saved included.
      recompute: time that it takes to compute the others again.
    """

    names: tuple[str, ...]
    saved: float
    temporaries: float
    recompute: float


class Block(NamedTuple):
    """A block of a chain. Times in any unit.

    Attributes:
      forward: time of the forward pass.
      backward: time of the backward pass without recomputation.
      modes: ways to run it; the last one saves nothing.
    """

    forward: float
    backward: float
    modes: tuple[Mode, ...]


class Kept(NamedTuple):
    """A block whose input is stored, and what its mode saves.

    Attributes:
      block: its number.
      mode: the number of its mode.
    """

    block: int
    mode: int


class Rerun(NamedTuple):
    """Blocks of which the input alone is stored, and that run again in the backward pass.

    Attributes:
      parts: blocks and segments, in order.
    """

    parts: "tuple[Kept | Rerun, ...]"


Tree = tuple[Kept | Rerun, ...]


class ChainTable:
    r"""What to store in a chain of blocks, so that a step takes the least time, for all budgets.

    Blocks s to t are run with m bytes beside their input. Either blocks s to s' - 1 become a
    segment, of which the input alone is stored, or block s stores what mode k saves:

    .. math::

      C(s, t, m) = \min \Big(
        &\min_{s'} \textstyle\sum_{j = s}^{s' - 1} u_j + C(s', t, m - a_{s'}) + C(s, s' - 1, m), \\
        &\min_k u_s + v_s + r_{s k} + C(s + 1, t, m - b_{s k} - a_{s + 1}) \Big)

    with input sizes a, forward times u, backward times v, saved bytes b and recomputation r. The
    forward pass of a segment's last block is charged only for what its backward pass needs of it:
    XLA removes the rest.

    Args:
      blocks: the chain.
      sizes: bytes of the input of every block, and of the last one's output.
      budget: bytes of activations and temporaries beside the chain's input.
      slots: into which the budget is divided; sizes are rounded up to them.

    Attributes:
      times: for each number of slots, the time of the best tree; infinite where none fits.

    References:
      Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: Optimal checkpointing for heterogeneous
      chains: how to train deep neural networks with limited memory, ACM TOMS 2024, arXiv
      1911.13214. Several modes of a block and the rule for a segment's last block are ours.
    """

    def __init__(
        self, blocks: Sequence[Block], sizes: Sequence[float], budget: float, slots: int = 1000
    ):
        self._blocks, self._sizes = blocks, sizes
        self._unit, self._slots = budget / slots, slots
        self._fill()
        self.times = self._cost[0, -1]

    def _up(self, nbytes: float) -> int:
        """Slots that hold some bytes, or one more than there are."""
        return min(math.ceil(nbytes / self._unit - 1e-9), self._slots + 1)

    def _fill(self) -> None:
        blocks, sizes, slots, up = self._blocks, self._sizes, self._slots, self._up
        count, memory = len(blocks), np.arange(slots + 1)

        def after(row: np.ndarray, used: int) -> np.ndarray:
            """The costs of what follows, with ``used`` slots taken."""
            out = np.full(slots + 1, np.inf)
            if used <= slots:
                out[used:] = row[: slots + 1 - used]
            return out

        starts = np.concatenate([[0.0], np.cumsum([block.forward for block in blocks])])
        cost = np.full((count, count, slots + 1), np.inf)
        # What is best: mode k as k, a segment up to s' - 1 as -s'.
        choice = np.zeros((count, count, slots + 1), np.int32)
        for s, block in enumerate(blocks):
            for k in reversed(range(len(block.modes))):  # of equal times, that of fewest bytes
                time = _leaf_time(blocks, s, k)
                better = (memory >= up(leaf_bytes(block, sizes, s, k))) & (time < cost[s, s])
                cost[s, s][better], choice[s, s][better] = time, k
        for length in range(1, count):
            for s in range(count - length):
                t, block = s + length, blocks[s]
                row, chosen = cost[s, t], choice[s, t]
                for stop in range(s + 1, t + 1):
                    inner = cost[s, stop - 1]
                    if stop == s + 1:  # a single block, which saves nothing
                        last = len(block.modes) - 1
                        fits = memory >= up(leaf_bytes(block, sizes, s, last))
                        inner = np.where(fits, block.backward + block.modes[last].recompute, np.inf)
                    total = starts[stop] - starts[s] + after(cost[stop, t], up(sizes[stop])) + inner
                    running = max(sizes[j] + sizes[j + 1] for j in range(s, stop))
                    better = (memory >= up(running)) & (total < row)
                    row[better], chosen[better] = total[better], -stop
                for k, mode in reversed(list(enumerate(block.modes[:-1]))):
                    held = mode.saved + sizes[s + 1]
                    time = block.forward + block.backward + mode.recompute
                    total = time + after(cost[s + 1, t], up(held))
                    needed = max(leaf_bytes(block, sizes, s, k), held + sizes[s])
                    better = (memory >= up(needed)) & (total < row)
                    row[better], chosen[better] = total[better], k
        self._cost, self._choice = cost, choice

    def tree(self, slots: int | None = None) -> Tree:
        """The best tree in some of the slots; None for all.

        Raises:
          ValueError: if none fits.
        """
        slots = self._slots if slots is None else slots
        if not np.isfinite(self.times[slots]):
            raise ValueError(f"no plan fits {slots * self._unit:,.0f} bytes.")
        return self._tree(0, len(self._blocks) - 1, slots)

    def _tree(self, s: int, t: int, m: int) -> Tree:
        blocks, sizes, up = self._blocks, self._sizes, self._up
        found = int(self._choice[s, t, m])
        if s == t:
            return (Kept(s, found),)
        if found >= 0:
            held = blocks[s].modes[found].saved + sizes[s + 1]
            return (Kept(s, found), *self._tree(s + 1, t, m - up(held)))
        stop, last = -found, len(blocks[s].modes) - 1
        inner = (Kept(s, last),) if stop == s + 1 else self._tree(s, stop - 1, m)
        return (Rerun(inner), *self._tree(stop, t, m - up(sizes[stop])))


def _leaf_time(blocks: Sequence[Block], s: int, k: int) -> float:
    """The time of a block that ends a segment or the chain, forward and backward."""
    block = blocks[s]
    # What a segment's last block saves is computed in its forward pass; the rest of that is dead.
    dead = block.modes[-1].recompute - block.modes[k].recompute
    forward = block.forward if s == len(blocks) - 1 else dead
    return forward + block.backward + block.modes[k].recompute


def leaf_bytes(block: Block, sizes: Sequence[float], s: int, k: int) -> float:
    """Bytes of a block's backward pass: temporaries, and the cotangents of output and input."""
    return block.modes[k].temporaries + sizes[s + 1] + sizes[s]


def peak_bytes(tree: Tree, blocks: Sequence[Block], sizes: Sequence[float]) -> float:
    """The most bytes of activations and temporaries at once, the chain's input aside."""
    first, rest = tree[0], tree[1:]
    if isinstance(first, Kept):
        s, k = first
        own = leaf_bytes(blocks[s], sizes, s, k)
        if not rest:
            return own
        held = blocks[s].modes[k].saved + sizes[s + 1]
        return max(own, held + sizes[s], held + peak_bytes(rest, blocks, sizes))
    numbers = numbers_in_tree(first.parts)
    running = max(sizes[j] + sizes[j + 1] for j in numbers)
    inner = peak_bytes(first.parts, blocks, sizes)
    if not rest:
        return max(running, inner)
    return max(running, inner, sizes[numbers[-1] + 1] + peak_bytes(rest, blocks, sizes))


def stored_bytes(tree: Tree, blocks: Sequence[Block], sizes: Sequence[float]) -> float:
    """Bytes that a chain stores between its forward and its backward pass, its input aside."""
    starts = [numbers_in_tree((part,))[0] for part in tree[1:]]
    saved = [blocks[p.block].modes[p.mode].saved for p in tree if isinstance(p, Kept)]
    return sum(sizes[start] for start in starts) + sum(saved)


def numbers_in_tree(tree: Tree) -> list[int]:
    """The numbers of its blocks, in order."""
    return [
        n
        for part in tree
        for n in ([part.block] if isinstance(part, Kept) else numbers_in_tree(part.parts))
    ]


def time_of(tree: Tree, blocks: Sequence[Block], last: bool = True) -> float:
    """The time of a step; ``last`` says whether the tree ends the chain, and not a segment."""
    total = 0.0
    for i, part in enumerate(tree):
        ends = i == len(tree) - 1
        if isinstance(part, Kept):
            block, recompute = blocks[part.block], blocks[part.block].modes[part.mode].recompute
            if ends and not last:
                total += blocks[part.block].modes[-1].recompute - recompute
            else:
                total += block.forward
            total += block.backward + recompute
            continue
        total += sum(blocks[n].forward for n in numbers_in_tree(part.parts))
        if len(part.parts) == 1 and isinstance(part.parts[0], Kept):
            block = blocks[part.parts[0].block]
            total += block.backward + block.modes[-1].recompute
        else:
            total += time_of(part.parts, blocks, last=False)
    return total


def tree_as_text(tree: Tree) -> str:
    """Blocks in order; segments in parentheses, the number of a mode after a slash."""
    return " ".join(
        f"{part.block}/{part.mode}" if isinstance(part, Kept) else f"({tree_as_text(part.parts)})"
        for part in tree
    )
