"""A plan for a chain of blocks: what to store, what it costs, and the function that does it."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from sharding.remat._chain import Kept, Rerun, Tree, numbers_in_tree, tree_as_text
from sharding.remat._checkpoint import policy_of, under_policy
from sharding.remat._planned import RematPlan

if TYPE_CHECKING:
    from sharding._zero import Zero


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainPlan(RematPlan):
    """What a chain of blocks stores for its backward pass; its peak is beside the chain's input.

    Attributes:
      blocks: ``block(params, x) -> x``, one after the other.
      tree: blocks whose input is stored, and segments that run again.
      names: for each block and mode, the values that are saved.
    """

    blocks: tuple[Callable[[Any, Any], Any], ...]
    tree: Tree
    names: tuple[tuple[tuple[str, ...], ...], ...]

    def apply(self, zero: "Zero | None" = None) -> Callable[[Sequence[Any], Any], Any]:
        """``fn(params, x)``, the chain with its blocks under ``jax.checkpoint``.

        ``params`` has an entry for each block. Inside ``jax.grad`` it stores what the plan says.

        Args:
          zero: whose ``train_step`` runs it; each block gathers its own parameters, as those that
            ``zero.gathered`` returns.
        """
        return functools.partial(_run_chain, len(self.blocks), self._runners(self.tree, zero))

    def _runners(
        self, tree: Tree, zero: "Zero | None"
    ) -> list[Callable[[Sequence[Any], Any], Any]]:
        runners: list[Callable[[Sequence[Any], Any], Any]] = []
        for part in tree:
            if (
                isinstance(part, Rerun)
                and isinstance(part.parts[-1], Kept)
                and len(part.parts) == 1
            ):
                part = part.parts[-1]  # a single block, which saves nothing
            if isinstance(part, Kept):
                policy = policy_of(self.names[part.block][part.mode])
                block = under_policy(self.blocks[part.block], policy, zero)
                runners.append(functools.partial(_run_block, block, part.block))
            else:
                numbers = numbers_in_tree(part.parts)
                parts = self._runners(part.parts, zero)
                segment = jax.checkpoint(functools.partial(_run_all, parts))
                runners.append(functools.partial(_run_segment, segment, numbers))
        return runners

    @property
    def summary(self) -> str:
        """Blocks, segments in parentheses, and the modes of the blocks."""
        return tree_as_text(self.tree)

    def choices(self) -> list[tuple[str, str, str]]:
        """Rows of the blocks, and of what each mode saves."""
        rows = [("blocks", self.summary, "(run again together)")]
        saved = {(part.block, part.mode) for part in _kept(self.tree)}
        by_names: dict[tuple[str, ...], list[int]] = {}
        for block, mode in sorted(saved):
            by_names.setdefault(self.names[block][mode], []).append(block)
        return rows + [
            (f"  {', '.join(map(str, blocks))}", ", ".join(names) or "its input", "")
            for names, blocks in by_names.items()
        ]


def _kept(tree: Tree) -> list[Kept]:
    return [
        kept for part in tree for kept in ([part] if isinstance(part, Kept) else _kept(part.parts))
    ]


def _run_chain(count: int, runners: Sequence[Callable[..., Any]], params: Any, x: Any) -> Any:
    if len(params) != count:
        raise ValueError(f"expected parameters for each of {count} blocks, got {len(params)}.")
    return _run_all(runners, params, x)


def _run_all(runners: Sequence[Callable[..., Any]], params: Any, x: Any) -> Any:
    for runner in runners:
        x = runner(params, x)
    return x


def _run_block(block: Callable[..., Any], number: int, params: Any, x: Any) -> Any:
    return block(params[number], x)


def _run_segment(segment: Callable[..., Any], numbers: Sequence[int], params: Any, x: Any) -> Any:
    return segment({n: params[n] for n in numbers}, x)
