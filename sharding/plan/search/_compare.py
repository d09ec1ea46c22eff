"""Chosen plans side by side, with and without a pipeline: one table."""

import dataclasses
from typing import Any

from sharding.plan._format import Printed, Table, count, seconds, size
from sharding.plan.cost._parallel_plan import PLAN_COLUMNS, cells
from sharding.plan.cost._step_time import PARTS_OF_STEP
from sharding.plan.search._search import ChosenPlan

# Rows of seconds: what a step waits for, all of it, and both ends of what may overlap.
_SECONDS = {name: name for name in PARTS_OF_STEP} | {
    "seconds": "step",
    "full_overlap": "step, all wires hidden",
    "no_overlap": "step, nothing hidden",
}


@dataclasses.dataclass(frozen=True)
class ComparedPlans(Printed):
    """Plans beside each other; ``str()`` is a table, in which a * marks the fastest."""

    plans: tuple[ChosenPlan, ...]  #: in the order of the columns

    @property
    def fastest(self) -> ChosenPlan:
        """The plan whose predicted step is shortest; of equal ones the first."""
        return min(self.plans, key=lambda plan: plan.seconds.seconds)

    def to_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON."""
        fastest = self.plans.index(self.fastest)
        return {"plans": [plan.to_dict() for plan in self.plans], "fastest": fastest}

    def tables(self) -> list[Table]:
        words = zip(PLAN_COLUMNS, *(cells(plan.plan) for plan in self.plans), strict=True)
        rows = [row for row in words if {*row[1:]} != {"-"}]
        for name, text in _SECONDS.items():
            values = [getattr(plan.seconds, name) for plan in self.plans]
            rows += [(text, *map(seconds, values))] if any(values) else []
        rows.append(("tokens/s", *(count(plan.tokens_per_second) for plan in self.plans)))
        for part in self.plans[0].held:
            words_of_part = "memory" if part == "total" else f"memory of {part}"
            rows.append((words_of_part, *(size(plan.held[part]) for plan in self.plans)))
        marks = {self.plans.index(self.fastest): " *"}
        names = [f"{i + 1}{marks.get(i, '')}" for i in range(len(self.plans))]
        return [Table("One step", ("", *names), rows)]

    @property
    def notes(self) -> tuple[str, ...]:
        """The plans in short, and whether the order is certain."""
        found = [f"{i + 1}: {plan.summary}." for i, plan in enumerate(self.plans)]
        ends = ("full_overlap", "no_overlap")
        first = [min(self.plans, key=lambda x: getattr(x.seconds, name)) for name in ends]
        if any(plan is not self.fastest for plan in first):
            found.append("Which is fastest depends on how much of the wires is hidden: measure.")
        return (*found, "Times are predicted, not measured. A * marks the fastest.")


def compare(*plans: ChosenPlan) -> ComparedPlans:
    """Plans that ``search`` chose, side by side, such as the fastest with and without a pipeline.

    Args:
      *plans: of one model and one machine, such as those of ``SearchResult.plans``.

    Raises:
      ValueError: there are none.

    >>> import optax
    >>> from sharding.plan import MODELS, search
    >>> model, tx = MODELS["llama2-7b"], optax.adamw(1e-3)
    >>> def best(pipe):
    ...     keep = {"pipe": pipe, "tensor": 1, "recompute": "full"}
    ...     return search(model, tx, "h100x8", sequences=32, keep=keep, top=1).best
    >>> compare(best(4), best(1)).fastest.plan.pipe
    1
    """
    if not plans:
        raise ValueError("compare needs plans, such as those of search(...).plans, got none.")
    return ComparedPlans(plans)
