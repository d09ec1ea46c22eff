"""What all plans for activations have in common: their figures, and the check of a program."""

import dataclasses
import math
from typing import Any

from sharding.plan._format import Table, size, text_of
from sharding.plan.audit._liveness import temporaries_of
from sharding.plan.model._traced_model import Work


class OverBudgetError(ValueError):
    """A program needs more bytes than its plan or its budget allows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RematPlan:
    """Figures of a plan; ``print`` it for a table.

    Attributes:
      peak: bytes of activations and temporaries of one device.
      saved: bytes of the device that are stored between the forward and the backward pass.
      host: bytes that are stored in host memory.
      budget: bytes that were allowed.
      work: operations of a step.
      plain: operations of a step that runs nothing again.
    """

    peak: float
    saved: float
    host: float = 0.0
    budget: float
    work: Work
    plain: Work

    @property
    def extra_flops(self) -> float:
        """Operations in matrix products that run again."""
        return self.work.flops - self.plain.flops

    @property
    def extra_time(self) -> float:
        """Time of what runs again and of waiting for copies, as a fraction of the plain step's."""
        return _ratio(self.work.seconds - self.plain.seconds, self.plain.seconds)

    @property
    def products_again(self) -> float:
        """``extra_flops`` as a fraction of the plain step's."""
        return _ratio(self.extra_flops, self.plain.flops)

    def check(self, compiled: Any, tolerance: float = 0.03) -> int:
        """Compares with a program that was compiled for the plan's device.

        Args:
          compiled: of ``jax.jit(...).lower(...).compile()``: a step with these blocks.
          tolerance: by which temporaries may be above the plan, as a fraction of it.

        Returns:
          Bytes of temporaries of the program.

        Raises:
          OverBudgetError: if temporaries are above the plan, or above the budget.
        """
        found = temporaries_of(compiled)
        for limit, most, what in (
            (self.peak, self.peak * (1 + tolerance), "plan"),
            (self.budget, self.budget, "budget"),
        ):
            if found > most:
                raise OverBudgetError(
                    f"the program has {size(found)} of temporaries, above its {what} of "
                    f"{size(limit)}."
                )
        return found

    def tables(self) -> list[Table]:
        """The table to print."""
        rows = [
            ("peak", size(self.peak), f"of {size(self.budget)}"),
            ("saved", size(self.saved), "between forward and backward pass"),
        ]
        if self.host:
            rows.append(("in host memory", size(self.host), ""))
        rows += [
            (
                "products again",
                f"{self.extra_flops / 1e12:,.2f} TFLOP",
                f"of {self.plain.flops / 1e12:,.2f}",
            ),
            ("extra time", f"{100 * self.extra_time:.1f} %", "by the device's figures"),
            *self.choices(),
        ]
        return [Table("Activations of one device", ("", "", ""), rows)]

    @property
    def summary(self) -> str:
        """What is stored, in a few words."""
        raise NotImplementedError

    def choices(self) -> list[tuple[str, str, str]]:
        """Rows of what is stored."""
        raise NotImplementedError

    def __str__(self) -> str:
        return text_of(self.tables())


def no_plan_fits(budget: float, who_needs: str, least: float) -> ValueError:
    """An error with the least bytes that fit, all digits of them: a budget that does."""
    if least == math.inf:
        return ValueError(f"no plan fits {size(budget)}, nor the memory of the device.")
    return ValueError(
        f"no plan fits {size(budget)}: {who_needs} {size(least)} at least, "
        f"{math.ceil(least):,} bytes."
    )


def _ratio(part: float, whole: float) -> float:
    """Of operations; 0 where there are none, as in blocks without products."""
    return part / whole if whole else 0.0
