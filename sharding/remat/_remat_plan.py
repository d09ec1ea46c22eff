"""What all plans for activations have in common: figures, the check of a program, frontiers."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from sharding.plan._format import NEED, Table, size, text_of
from sharding.plan.audit._liveness import temporaries_of
from sharding.plan.model._traced_model import Work


class OverBudgetError(ValueError):
    """A program needs more bytes than its plan or its budget allows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RematPlan:
    """Figures of a plan; ``print`` it for a table."""

    peak: float  #: bytes of activations and temporaries of one device
    saved: float  #: bytes of the device that are stored between the forward and the backward pass
    host: float = 0.0  #: bytes that are stored in host memory
    budget: float  #: bytes that were allowed
    work: Work  #: operations of a step
    plain: Work  #: operations of a step that runs nothing again

    @property
    def extra_flops(self) -> float:
        """Operations in matrix products that run again."""
        return self.work.flops - self.plain.flops

    @property
    def extra_time(self) -> float:
        """Time of what runs again and of waiting for copies, as a fraction of the plain step's."""
        return _ratio(self.work.seconds - self.plain.seconds, self.plain.seconds)

    def check(self, compiled: Any, tolerance: float = 0.03) -> int:
        """Returns the temporaries of a compiled step with these blocks, for the plan's device.

        Raises:
          OverBudgetError: if they are above the plan by more than ``tolerance``, a fraction of it,
            or above the budget.
        """
        temporaries = temporaries_of(compiled)
        for limit, most, what in (
            (self.peak, self.peak * (1 + tolerance), "plan"),
            (self.budget, self.budget, "budget"),
        ):
            if temporaries > most:
                raise OverBudgetError(
                    f"the program has {size(temporaries)} of temporaries, above its {what} of "
                    f"{size(limit)}."
                )
        return temporaries

    def tables(self) -> list[Table]:
        """The table to print."""
        rows = [
            ("peak", size(self.peak), f"of {size(self.budget)}"),
            ("saved", size(self.saved), "between forward and backward pass"),
        ]
        if self.host:
            rows.append(("in host memory", size(self.host), ""))
        again, plain = (f"{flops / 1e12:,.2f}" for flops in (self.extra_flops, self.plain.flops))
        rows += [
            ("products again", f"{again} TFLOP", f"of {plain}"),
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
        return ValueError(
            f"no plan fits {size(budget)}, nor the memory of the device (docs: how_to/recompute)."
        )
    return ValueError(
        f"no plan fits {size(budget)}: {who_needs} {size(least)} at least, "
        f"{math.ceil(least):,} bytes (docs: how_to/recompute)."
    )


Kind = TypeVar("Kind", bound=RematPlan)


def unbeaten(plans: Iterable[Kind]) -> list[Kind]:
    """Of plans, the fastest first, those that no faster one beats, by ascending bytes."""
    kept: list[Kind] = []
    for plan in plans:
        if plan.peak < (kept[-1].peak if kept else math.inf):
            kept.append(plan)
    return kept[::-1]


def _ratio(again: float, plain: float) -> float:
    """A fraction of operations; 0 where there are none, as in blocks without products."""
    return again / plain if plain else 0.0


class Frontier(list[Any]):
    """Plans that no other one beats in bytes and time, from the fewest bytes to the most."""

    def tables(self) -> list[Table]:
        """The table to print."""
        columns = ("stores", "peak", "in host memory", "products again", "extra time")
        rows = []
        for plan in self:
            nbytes = size(plan.peak), size(plan.host) if plan.host else ""
            again = _ratio(plan.extra_flops, plan.plain.flops), plan.extra_time
            rows.append((plan.summary, *nbytes, *(f"{fraction:.1%}" for fraction in again)))
        return [Table("Activations of one device", columns, rows)]

    def __str__(self) -> str:
        return text_of(self.tables())


def plot(frontiers: Mapping[str, Sequence[RematPlan]], others: Any = None) -> Any:
    """A ``matplotlib.figure.Figure`` of bytes against time, a line for each frontier by its name.

    ``frontiers`` are as of ``frontier``, whose example draws one. ``others`` are, by name, plans to
    be shown as points, such as those of presets.

    Raises:
      ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(f"a picture needs matplotlib: {NEED}.") from None
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    for name, plans in frontiers.items():
        peaks, times = ([point[i] for point in map(_point, plans)] for i in range(2))
        axes.plot(peaks, times, drawstyle="steps-post", marker="o", markersize=4, label=name)
    for name, plan in (others or {}).items():
        point = _point(plan)
        axes.plot(*point, "x", color="black", markersize=5)
        axes.annotate(name, point, xytext=(4, 3), textcoords="offset points", fontsize=7)
    axes.set_xlabel("peak of activations and temporaries, GiB")
    axes.set_ylabel("extra time, % of a step")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    if any(frontiers):
        axes.legend(fontsize=8, frameon=False)
    return figure


def _point(plan: RematPlan) -> tuple[float, float]:
    """GiB and percent of a step."""
    return plan.peak / 2**30, 100 * plan.extra_time
