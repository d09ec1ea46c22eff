"""A plan for a chain of blocks: what to store, what it costs, and the function that does it."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from sharding._types import Array
from sharding.plan.model._traced_model import Work
from sharding.remat._block_costs import MeasuredBlock, step_temporaries
from sharding.remat._chain_search import (
    Block,
    ChainSearch,
    Kept,
    Rerun,
    Tree,
    kept_in_tree,
    numbers_in_tree,
    peak_bytes,
    some,
    stored_bytes,
    time_of,
    tree_as_text,
)
from sharding.remat._checkpoint import Fn, policy_of, under_policy
from sharding.remat._remat_plan import RematPlan, no_plan_fits, unbeaten

if TYPE_CHECKING:
    from sharding._zero import Zero

_MOST_PLANS = 16  # of a frontier; each is compiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainPlan(RematPlan):
    """What a chain of blocks stores for its backward pass; its peak is beside the chain's input."""

    blocks: tuple[Fn, ...]  #: ``block(params, x) -> x``, one after the other
    tree: Tree  #: blocks whose input is stored, and segments that run again
    #: for each block and mode, the values that are saved
    names: tuple[tuple[tuple[str, ...], ...], ...]

    def apply(self, zero: "Zero | None" = None) -> Callable[[Sequence[Any], Any], Any]:
        """``fn(params, x)``, the chain; with ``zero`` each block gathers its own parameters."""
        run = self._runner(self.tree, zero)

        def chain(params: Sequence[Any], x: Array) -> Any:
            if len(params) != len(self.blocks):
                raise ValueError(
                    f"expected parameters for each of {len(self.blocks)} blocks, got {len(params)}."
                )
            return run(dict(enumerate(params)), x)

        return chain

    def _runner(self, tree: Tree, zero: "Zero | None") -> Fn:
        """``fn(params, x)`` with parameters by the numbers of their blocks."""
        parts: list[tuple[Fn, list[int]]] = []  # what runs, and whose parameters it takes
        for part in tree:
            if isinstance(part, Rerun) and len(part.parts) == 1:
                (part,) = part.parts  # a single block, which saves nothing
            if isinstance(part, Kept):
                policy = policy_of(self.names[part.block][part.mode])
                block = under_policy(self.blocks[part.block], policy, zero)
                fn: Fn = functools.partial(_by_number, block, part.block)
            else:
                fn = jax.checkpoint(self._runner(part.parts, zero))
            parts.append((fn, numbers_in_tree((part,))))

        def run(params: dict[int, Any], x: Array) -> Any:
            for fn, numbers in parts:
                x = fn({n: params[n] for n in numbers}, x)
            return x

        return run

    @property
    def summary(self) -> str:
        """Blocks, segments in parentheses, and the modes of the blocks."""
        return tree_as_text(self.tree)

    def choices(self) -> list[tuple[str, str, str]]:
        blocks_of: dict[tuple[str, ...], list[int]] = {}  # by names
        for block, mode in sorted(set(kept_in_tree(self.tree))):
            blocks_of.setdefault(self.names[block][mode], []).append(block)
        rows = [("blocks", self.summary, "(run again together)")]
        for names, blocks in blocks_of.items():
            rows.append((f"  {', '.join(map(str, blocks))}", ", ".join(names) or "its input", ""))
        return rows


def _by_number(block: Fn, number: int, params: dict[int, Any], x: Array) -> Any:
    return block(params[number], x)


@dataclasses.dataclass(frozen=True)
class MeasuredChain:
    fns: tuple[Fn, ...]  # the blocks
    params: Sequence[Any]  # of each block, abstract
    x: Any  # the input of the first block, abstract
    device: jax.Device  # for which they are compiled
    measured: tuple[MeasuredBlock, ...]  # what each costs
    sizes: tuple[float, ...]  # bytes of each block's input, and of the last one's output

    @property
    def blocks(self) -> list[Block]:
        return [measured.block for measured in self.measured]

    @functools.cached_property
    def search(self) -> ChainSearch:
        return ChainSearch(self.blocks, self.sizes)

    def fastest(self, budget: float) -> ChainPlan:
        """Finds the fastest plan within a budget, no slower than one of ``frontier`` that is."""
        peaks = self.search.peaks
        tried = {*self._some_peaks(), *peaks[peaks <= budget][-1:]}
        least = math.inf
        for planned in sorted(tried, reverse=True):
            if planned <= budget:
                plan = self.plan(planned)
                if plan.peak <= budget:
                    return dataclasses.replace(plan, budget=budget)
                least = min(least, plan.peak)
        for planned in sorted(tried):
            if budget < planned < least:
                least = min(least, self.plan(planned).peak)
        raise no_plan_fits(budget, "these blocks need", least)

    def frontier(self) -> list[ChainPlan]:
        return unbeaten(map(self.plan, reversed(self._some_peaks())))

    def _some_peaks(self) -> list[float]:
        return list(map(float, self.search.peaks[some(self.search.peaks, _MOST_PLANS)]))

    def plan(self, planned: float) -> ChainPlan:
        """Makes the plan of a tree whose peak is ``planned``; its program may need more."""
        # How XLA packs arrays of several sizes into its temporaries is not known before. On CPUs,
        # where it merges what runs again with its first run, nothing is compiled.
        tree = self.search.tree(planned)
        flops = time_of(tree, [measured.in_flops() for measured in self.measured])
        peak = peak_bytes(tree, self.blocks, self.sizes)
        plan = ChainPlan(
            blocks=self.fns,
            tree=tree,
            names=tuple(tuple(mode.names for mode in block.modes) for block in self.blocks),
            peak=peak,
            saved=stored_bytes(tree, self.blocks, self.sizes),
            budget=peak,
            work=Work(flops, time_of(tree, self.blocks)),
            plain=sum((block.forward + block.backward for block in self.measured), Work(0.0, 0.0)),
        )
        if self.device.platform == "cpu":
            return plan
        temporaries = step_temporaries(plan.apply(), self.params, self.x, self.device)
        peak = max(plan.peak, temporaries)
        return dataclasses.replace(plan, peak=peak, budget=peak)
