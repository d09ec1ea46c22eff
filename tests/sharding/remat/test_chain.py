"""The dynamic program for chains equals brute force, with a simulator of its own."""

import itertools

import numpy as np
import pytest

from sharding.remat import _chain_search
from sharding.remat._chain_search import Block, ChainSearch, Kept, Mode, Rerun, peak_bytes, time_of


def random_chain(rng, count, modes):
    """Whole numbers, so that slots of one byte round nothing."""
    blocks, sizes = [], [int(rng.integers(1, 6)) for _ in range(count + 1)]
    for _ in range(count):
        saved = [*sorted(rng.integers(1, 8, modes - 1).tolist(), reverse=True), 0]
        recompute = np.sort(rng.integers(0, 9, modes)).tolist()
        pairs = zip(saved, recompute, strict=True)
        ways = [Mode((), s, s + int(rng.integers(1, 6)), r) for s, r in pairs]
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

    def run(self, parts, base, is_chain):
        """Forward, then backward; ``base`` is stored outside, the input of the parts aside."""
        held, stack, start = base, [], _chain_search.numbers_in_tree(parts)[0]
        for i, part in enumerate(parts):
            numbers = _chain_search.numbers_in_tree((part,))
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
                self.peak = max(self.peak, held + inside + self.sizes[n + 1])
            if isinstance(part, Kept):
                held += self.blocks[part.block].modes[part.mode].saved
                inside = self.sizes[part.block] if part.block == start else 0
                self.peak = max(self.peak, held + inside + self.sizes[part.block + 1])
            held += self.sizes[numbers[-1] + 1]
        for part, before in reversed(stack):
            if isinstance(part, Rerun) and len(part.parts) > 1:
                self.run(part.parts, before, False)
                continue
            n, k = part if isinstance(part, Kept) else part.parts[0]
            block, mode = self.blocks[n], self.blocks[n].modes[k]
            self.time += block.backward + mode.recompute
            own = mode.temporaries + self.sizes[n] + self.sizes[n + 1]
            self.peak = max(self.peak, before + own)


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
        found = ChainSearch(blocks, sizes)
        least = {peak: min(t for p, t in every if p <= peak) for peak, _ in sorted(every)}
        steps = [next(p for p in least if least[p] == time) for time in sorted(set(least.values()))]
        assert found.peaks.tolist() == steps[::-1]
        for peak, time in zip(found.peaks, found.times, strict=True):
            for budget in (peak, peak + 0.5):
                tree = found.tree(budget)
                assert _chain_search.numbers_in_tree(tree) == list(range(count))
                assert peak_bytes(tree, blocks, sizes) == peak
                assert time_of(tree, blocks) == time == least[peak]


@pytest.mark.parametrize("most", [500, 7])
def test_a_long_chain_is_planned(monkeypatch, most):
    """More memory is never slower; of many steps some are left out, the ends never."""
    monkeypatch.setattr(_chain_search, "_MOST_STEPS", most)
    blocks, sizes = random_chain(np.random.default_rng(3), 30, 3)
    found = ChainSearch(blocks, sizes)
    assert min(most, 20) - 3 < len(found.peaks) <= most
    assert np.all(np.diff(found.peaks) > 0)
    assert np.all(np.diff(found.times) < 0)
    assert found.times[-1] == sum(b.forward + b.backward + b.modes[0].recompute for b in blocks)
    for peak, time in zip(found.peaks, found.times, strict=True):
        tree = found.tree(peak)
        assert peak_bytes(tree, blocks, sizes) <= peak
        assert time_of(tree, blocks) == time
    assert _chain_search.tree_as_text(found.tree(found.peaks[0])).count("(") > 0
