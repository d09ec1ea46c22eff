"""The dynamic program for chains equals brute force, with a simulator of its own."""

import itertools

import numpy as np
import pytest

from sharding.remat._chain import (
    Block,
    ChainTable,
    Kept,
    Mode,
    Rerun,
    numbers_in_tree,
    peak_bytes,
    time_of,
    tree_as_text,
)


def random_chain(rng, count, modes):
    """Whole numbers, so that slots of one byte round nothing."""
    blocks, sizes = [], [int(rng.integers(1, 6)) for _ in range(count + 1)]
    for _ in range(count):
        saved = [*sorted(rng.integers(1, 8, modes - 1).tolist(), reverse=True), 0]
        recompute = np.sort(rng.integers(0, 9, modes)).tolist()
        ways = [
            Mode((), s, s + int(rng.integers(1, 6)), r)
            for s, r in zip(saved, recompute, strict=True)
        ]
        forward = recompute[-1] + int(rng.integers(0, 5))
        blocks.append(Block(forward, int(rng.integers(1, 9)), tuple(ways)))
    return blocks, sizes


def trees(first, stop, blocks):
    """Every tree over blocks first to stop - 1."""
    last = len(blocks[first].modes) - 1
    if first + 1 == stop:
        yield from ((Kept(first, k),) for k in range(last + 1))
        return
    for k in range(last):  # one that saves nothing is a segment of its own
        for rest in trees(first + 1, stop, blocks):
            yield (Kept(first, k), *rest)
    for middle in range(first + 1, stop):
        single = middle == first + 1
        inner = [(Kept(first, last),)] if single else list(trees(first, middle, blocks))
        for parts, rest in itertools.product(inner, list(trees(middle, stop, blocks))):
            yield (Rerun(parts), *rest)


class Simulation:
    """Runs a tree: the most bytes at once beside the chain's input, and the time."""

    def __init__(self, tree, blocks, sizes):
        self.blocks, self.sizes, self.peak, self.time = blocks, sizes, 0, 0
        self.run(tree, 0, True)

    def hold(self, nbytes):
        self.peak = max(self.peak, nbytes)

    def run(self, parts, base, is_chain):
        """Forward, then backward; ``base`` is stored outside, the input of the parts aside."""
        held, stack, start = base, [], numbers_in_tree(parts)[0]
        for i, part in enumerate(parts):
            numbers = numbers_in_tree((part,))
            stack.append((part, held))
            if i == len(parts) - 1:  # its backward pass follows at once
                block, mode = self.blocks[part.block], self.blocks[part.block].modes[part.mode]
                dead = block.modes[-1].recompute - mode.recompute
                self.time += block.forward if is_chain else dead
                break
            for n in numbers:
                self.time += self.blocks[n].forward
                # The input of the parts is counted by their caller, but while they run.
                inside = self.sizes[n] if n > numbers[0] or n == start else 0
                self.hold(held + inside + self.sizes[n + 1])
            if isinstance(part, Kept):
                held += self.blocks[part.block].modes[part.mode].saved
                inside = self.sizes[part.block] if part.block == start else 0
                self.hold(held + inside + self.sizes[part.block + 1])
            held += self.sizes[numbers[-1] + 1]
        for part, before in reversed(stack):
            if isinstance(part, Rerun) and len(part.parts) > 1:
                self.run(part.parts, before, False)
                continue
            n, k = part if isinstance(part, Kept) else part.parts[0]
            block, mode = self.blocks[n], self.blocks[n].modes[k]
            self.time += block.backward + mode.recompute
            self.hold(before + mode.temporaries + self.sizes[n] + self.sizes[n + 1])


@pytest.mark.parametrize(("count", "modes"), [(1, 2), (2, 1), (2, 3), (3, 2), (4, 2), (5, 1)])
def test_equals_brute_force_at_every_budget(count, modes):
    for seed in range(4):
        blocks, sizes = random_chain(np.random.default_rng(seed), count, modes)
        every = []
        for tree in trees(0, count, blocks):
            run, peak = Simulation(tree, blocks, sizes), peak_bytes(tree, blocks, sizes)
            assert run.peak <= peak
            assert run.time == time_of(tree, blocks)
            every.append((peak, run.time))
        most = max(peak for peak, _ in every) + 2
        table = ChainTable(blocks, sizes, most, slots=most)
        for budget in range(1, most + 1):
            best = min((time for peak, time in every if peak <= budget), default=np.inf)
            assert table.times[budget] == best
            if best < np.inf:
                tree = table.tree(budget)
                assert numbers_in_tree(tree) == list(range(count))
                assert peak_bytes(tree, blocks, sizes) <= budget
                assert time_of(tree, blocks) == best
            else:
                with pytest.raises(ValueError, match="no plan fits"):
                    table.tree(budget)


def test_a_long_chain_is_planned():
    """More memory is never slower; sizes are rounded up to slots, of which there are few."""
    blocks, sizes = random_chain(np.random.default_rng(3), 30, 3)
    for slots in (40, 400):
        table = ChainTable(blocks, sizes, 100, slots=slots)
        assert np.all(table.times[1:] <= table.times[:-1])
        for m in np.flatnonzero(table.times < np.inf):
            tree = table.tree(int(m))
            assert peak_bytes(tree, blocks, sizes) <= 100 * m / slots
            assert time_of(tree, blocks) == pytest.approx(table.times[m])
    assert tree_as_text(tree).count("(") == tree_as_text(tree).count(")") > 0


def hand_written(blocks):
    """Every block again; every block with all its names; Chen's segments, of any length."""
    count, last = len(blocks), len(blocks[0].modes) - 1
    nothing = [Rerun((Kept(i, last),)) for i in range(count - 1)]
    yield (*nothing, Kept(count - 1, last))
    yield tuple(Kept(i, 0) for i in range(count))
    for size in range(2, count):
        for mode in range(last + 1):
            ends = [*range(size, count, size), count]
            starts = [0, *ends[:-1]]
            *segments, tail = (
                tuple(Kept(i, mode) for i in range(a, b)) for a, b in zip(starts, ends, strict=True)
            )
            yield (*map(Rerun, segments), *tail)


@pytest.mark.parametrize("seed", range(2))
def test_plans_dominate_uniform_remat_and_square_roots(seed):
    """At the bytes of a hand-written plan none takes longer, and at some of them less."""
    blocks, sizes = random_chain(np.random.default_rng(seed), 16, 3)
    faster = 0
    for tree in hand_written(blocks):
        nbytes = int(peak_bytes(tree, blocks, sizes))
        found = ChainTable(blocks, sizes, nbytes, slots=nbytes).times[-1]
        assert found <= time_of(tree, blocks)
        faster += found < time_of(tree, blocks)
    assert faster > 5
