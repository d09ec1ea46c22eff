"""A plan for a chain of blocks: what to store, what it costs, and the function that does it."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from sharding.remat._chain import Kept, Rerun, Tree, numbers_in_tree, tree_as_text
from sharding.remat._work import Work

MIB = 2**20


class OverBudgetError(ValueError):
    """A program needs more bytes than its plan or its budget allows."""


@dataclasses.dataclass(frozen=True)
class ChainPlan:
    """What a chain of blocks stores for its backward pass.

    Attributes:
      blocks: ``block(params, x) -> x``, one after the other.
      tree: blocks whose input is stored, and segments that run again.
      names: for each block and mode, the values that are saved.
      peak: bytes of activations and temporaries beside the chain's input, as planned.
      saved: bytes that are stored between the forward and the backward pass.
      budget: bytes that were allowed.
      work: operations of a step.
      plain: operations of a step that runs nothing again.
    """

    blocks: tuple[Callable[[Any, Any], Any], ...]
    tree: Tree
    names: tuple[tuple[tuple[str, ...], ...], ...]
    peak: float
    saved: float
    budget: float
    work: Work
    plain: Work

    @property
    def extra_flops(self) -> float:
        """Operations in matrix products that run again."""
        return self.work.flops - self.plain.flops

    @property
    def extra_time(self) -> float:
        """Time of all operations that run again, as a fraction of the step without them."""
        return self.work.seconds / self.plain.seconds - 1

    def apply(self) -> Callable[[Sequence[Any], Any], Any]:
        """``fn(params, x)``, the chain with its blocks under ``jax.checkpoint``.

        ``params`` has an entry for each block. Inside ``jax.grad`` it stores what the plan says.
        """
        return functools.partial(_run_all, self._runners(self.tree))

    def check(self, compiled: Any, tolerance: float = 0.03) -> int:
        """Compares with a program that was compiled for the plan's device.

        Args:
          compiled: of ``jax.jit(...).lower(...).compile()``: a step with this chain.
          tolerance: by which temporaries may be above the plan, as a fraction of it.

        Returns:
          Bytes of temporaries of the program.

        Raises:
          OverBudgetError: if temporaries are above the plan, or above the budget.
        """
        found = int(compiled.memory_analysis().temp_size_in_bytes)
        for limit, what in ((self.peak * (1 + tolerance), "plan"), (self.budget, "budget")):
            if found > limit:
                raise OverBudgetError(
                    f"the program has {found / MIB:,.1f} MiB of temporaries, above its {what} of "
                    f"{(self.peak if what == 'plan' else self.budget) / MIB:,.1f} MiB."
                )
        return found

    def _runners(self, tree: Tree) -> list[Callable[[Sequence[Any], Any], Any]]:
        runners: list[Callable[[Sequence[Any], Any], Any]] = []
        for part in tree:
            if (
                isinstance(part, Rerun)
                and isinstance(part.parts[-1], Kept)
                and len(part.parts) == 1
            ):
                part = part.parts[-1]  # a single block, which saves nothing
            if isinstance(part, Kept):
                names = self.names[part.block][part.mode]
                policy = jax.checkpoint_policies.save_only_these_names(*names)
                block = jax.checkpoint(self.blocks[part.block], policy=policy)
                runners.append(functools.partial(_run_block, block, part.block))
            else:
                numbers = numbers_in_tree(part.parts)
                segment = jax.checkpoint(functools.partial(_run_all, self._runners(part.parts)))
                runners.append(functools.partial(_run_segment, segment, numbers))
        return runners

    def __str__(self) -> str:
        rows = [
            ("peak", f"{self.peak / MIB:,.1f} MiB", f"of {self.budget / MIB:,.1f} MiB"),
            ("saved", f"{self.saved / MIB:,.1f} MiB", "between forward and backward pass"),
            (
                "products again",
                f"{self.extra_flops / 1e12:,.2f} TFLOP",
                f"of {self.plain.flops / 1e12:,.2f}",
            ),
            ("extra time", f"{100 * self.extra_time:.1f} %", "by the device's figures"),
        ]
        return "\n".join([f"{a:15} {b:>16}  {c}" for a, b, c in rows] + [tree_as_text(self.tree)])


def _run_all(runners: Sequence[Callable[..., Any]], params: Any, x: Any) -> Any:
    for runner in runners:
        x = runner(params, x)
    return x


def _run_block(block: Callable[..., Any], number: int, params: Any, x: Any) -> Any:
    return block(params[number], x)


def _run_segment(segment: Callable[..., Any], numbers: Sequence[int], params: Any, x: Any) -> Any:
    return segment({n: params[n] for n in numbers}, x)
