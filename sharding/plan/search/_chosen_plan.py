"""Plans that a search chose: their figures, their tables, and several side by side."""

import dataclasses
from typing import Any

from sharding.plan._format import (
    Printed,
    Table,
    count,
    document,
    entry,
    seconds,
    size,
)
from sharding.plan.cost._parallel_plan import PLAN_COLUMNS, ParallelPlan, cells, short
from sharding.plan.cost._step_time import PARTS_OF_STEP, StepSeconds
from sharding.plan.machine._devices import DeviceKind

_NOTED = 0.01  # a share of the operations
COLUMNS = (*PLAN_COLUMNS, "step", "MFU", "tokens/s", "memory", "most")


@dataclasses.dataclass(frozen=True)
class ChosenPlan:
    """A plan that was compared."""

    plan: ParallelPlan  #: how the step is shared
    seconds: StepSeconds  #: what it takes, by what it waits for
    held: dict[str, float]  #: bytes of the fullest device by what they are, and their ``"total"``
    #: seconds that no program of this plan can go below: everything at its peak, at once
    bound: float
    layers: tuple[int, ...]  #: of each chunk, from the first to the last
    tokens: float  #: of all devices in a step
    utilization: float  #: the share of the peak, without recomputation (MFU)
    change: str = ""  #: of a plan that does not fit, an argument of ``search`` with which it does

    @property
    def lossy(self) -> bool:
        return self.plan.lossy

    @property
    def memory(self) -> float:
        """Bytes of the fullest device."""
        return self.held["total"]

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all devices per second."""
        return self.tokens / self.seconds.seconds

    @property
    def summary(self) -> str:
        """The plan in short.

        >>> short(ParallelPlan(data=64, stage=3, replicas=8, microbatches=2, recompute="full"))
        'stage 3 over 8, 8 replicas; 2 micro-batches of 1; recompute full'
        """
        return short(self.plan)

    def row(self) -> tuple[str, ...]:
        """Its cells under ``COLUMNS``."""
        return (
            *cells(self.plan),
            seconds(self.seconds.seconds),
            f"{100 * self.utilization:.0f} %",
            count(self.tokens_per_second),
            size(self.memory),
            self.seconds.limit,
        )

    def to_dict(self, name: str = "") -> dict[str, Any]:
        """Its figures, ready for JSON."""
        names = ("tokens", "layers", "utilization", "lossy", "change")
        figures: dict[str, Any] = {x: getattr(self, x) for x in names}
        figures |= {"seconds": self.seconds.to_dict(), "at_least": {"total": self.bound}}
        return entry(name or self.summary, self.held, self.plan, **figures)


@dataclasses.dataclass(frozen=True)
class SearchResult(Printed):
    """The fastest plans; ``str()`` makes tables, ``to_dict()`` JSON."""

    target: str  #: the name of the machine
    device: DeviceKind  #: its figures
    headroom: float  #: the share of its memory that plans leave free
    plans: tuple[ChosenPlan, ...]  #: the fastest ones that fit, fastest first
    rejected: tuple[ChosenPlan, ...]  #: faster than the last of these, which fit after a change
    bound: float  #: seconds below which no plan of the space can go that fits
    compared: int  #: the number of plans
    sequences: int  #: of all devices in a step
    length: int  #: tokens of a sequence
    #: operations of matrix products in the update of the best plan, as a share of the step's
    of_update: float = 0.0
    about: tuple[str, ...] = ()  #: what was found in a loss of one's own

    @property
    def memory(self) -> float:
        """Bytes of a device that a plan may take."""
        return self.device.memory * (1 - self.headroom)

    @property
    def best(self) -> ChosenPlan:
        """The fastest plan."""
        return self.plans[0]

    @property
    def gap(self) -> float:
        """How much longer the best plan takes than the bound, as a share of the bound."""
        return self.best.seconds.seconds / self.bound - 1

    def tables(self) -> list[Table]:
        title = f"fastest of {self.compared:,} plans on {self.target}"
        tables = [Table(title, COLUMNS, [plan.row() for plan in self.plans])]
        if self.rejected:
            rows = [
                (
                    *cells(it.plan),
                    seconds(it.seconds.seconds),
                    *map(size, (it.memory, it.memory - self.memory)),
                    it.change,
                )
                for it in self.rejected
            ]
            columns = (*PLAN_COLUMNS, "step", "memory", "too much", "fits with")
            tables.append(Table(f"faster, but above {size(self.memory)}", columns, rows))
        return tables

    @property
    def notes(self) -> tuple[str, ...]:
        """What the figures mean."""
        best = self.best.seconds
        update = (
            f"The update of the best plan computes products of {self.of_update:.0%} of the step's "
            "operations, which are in its time, and in no planned operations."
        )
        return (
            f"A step has {self.sequences:,} sequence{'s' * (self.sequences > 1)} of "
            f"{self.length:,} token{'s' * (self.length > 1)}.",
            *self.about,
            f"Best: {self.best.summary}.",
            *([update] if self.of_update > _NOTED else []),
            f"Its parts: {_parts(best)}. With all wires hidden it takes "
            f"{seconds(best.full_overlap)}, with none {seconds(best.no_overlap)}.",
            f"No plan that fits can take less than {seconds(self.bound)} a step, even at "
            f"{self.device.about} with everything hidden; the best is predicted to take "
            f"{self.gap:.0%} more.",
            "ZeRO is the stage, its shards and its replicas (spread: they share the state), where "
            "the state is, and what is lossy; tensor is the number of devices that share each "
            "layer; pipeline is the number of stages with their schedule, even where groups of "
            "layers are equal; micro is the number of micro-batches and their sequences; stored "
            "is what a layer stores for its backward pass: all that this reads, its input alone, "
            "or results of products beside it (queries, keys and values; attention; its output; "
            "hidden values); most is the largest part of a step. Memory of activations is "
            "estimated: verify compiles the step.",
        )

    def to_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON, in the form of all commands."""
        return document(
            [plan.to_dict() for plan in self.plans],
            device=self.device,
            num_devices=self.best.plan.num_devices,
            headroom=self.headroom,
            chosen=0,
            rejected=[plan.to_dict() for plan in self.rejected],
            bound=self.bound,
            compared=self.compared,
            notes=[*self.notes],
        )


def _parts(step: StepSeconds) -> str:
    """What a step waits for, longest first; nothing below 1 %."""
    parts = sorted(((name, getattr(step, name)) for name in PARTS_OF_STEP), key=lambda x: -x[1])
    least = 0.01 * step.no_overlap
    return ", ".join(f"{name} {seconds(value)}" for name, value in parts if value > least)


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
