"""Operations of a pipeline: where they run, what each waits for, and which tick it runs in."""

import dataclasses
import enum
import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Op(enum.IntEnum):
    """What a stage does in one tick."""

    IDLE = 0
    FORWARD = 1
    BACKWARD = 2  # the full backward pass; where WEIGHT operations follow, that of the input alone
    WEIGHT = 3  # the rest of a split backward pass: the gradients of the parameters
    UPDATE = 4  # of the parameters, in an asynchronous pipeline


LETTERS = {Op.IDLE: ".", Op.FORWARD: "F", Op.BACKWARD: "B", Op.WEIGHT: "W", Op.UPDATE: "U"}


class Task(NamedTuple):
    op: Op
    microbatch: int
    virtual_stage: int

    def __str__(self) -> str:
        return f"{LETTERS[self.op]}{self.microbatch} of virtual stage {self.virtual_stage}"


class Place(NamedTuple):
    """Where a virtual stage runs: a stage of the mesh axis, and one of the chunks it holds."""

    stage: int
    chunk: int


# For each virtual stage, where it runs. Micro-batches on different routes run on different replicas
# of the layers (Chimera: one route down the devices, one up).
Route = tuple[Place, ...]


def virtual_stages(routes: Sequence[Route]) -> dict[tuple[int, Place], int]:
    """The virtual stage of each number of a route and place."""
    return {(r, place): v for r, route in enumerate(routes) for v, place in enumerate(route)}


# An operation in the order of a stage: what it does, its micro-batch, its chunk.
Entry = tuple[Op, int, int]


class ScheduleError(ValueError):
    """A table that no pipeline can run; the message names the tick and the stage."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """Times of one chunk's operations on one micro-batch, in any unit."""

    forward: float = 1.0  #: of the forward pass
    backward: float = 2.0  #: of the full backward pass, recomputation included
    weight: float = 0.0  #: of ``WEIGHT``; ``backward`` then is that of the input alone
    update: float = 0.0  #: of ``UPDATE``

    def of(self, op: Op) -> float:
        """The time of one operation."""
        return (0.0, self.forward, self.backward, self.weight, self.update)[op]


def dependencies(task: Task, num_virtual_stages: int) -> list[Task]:
    """The operations that must be complete before ``task`` starts."""
    op, microbatch, v = task
    if op == Op.FORWARD:
        return [Task(op, microbatch, v - 1)] if v else []
    if op in (Op.WEIGHT, Op.UPDATE):
        return [Task(Op.BACKWARD, microbatch, v)]
    before = [Task(Op.FORWARD, microbatch, v)]
    if v + 1 < num_virtual_stages:
        before.append(Task(Op.BACKWARD, microbatch, v + 1))
    return before


def table_from_orders(
    name: str,
    orders: Sequence[Sequence[Entry]],
    routes: Sequence[Route],
    route_of: Sequence[int],
    *,
    aligned: bool = False,
    in_order: bool = True,
) -> np.ndarray:
    """[3, ticks, stages]: operation, micro-batch and chunk, each as early as its order allows."""
    # If not ``in_order``, a stage runs the first operation of its order that is ready.
    at = virtual_stages(routes)
    waiting = [list(order) for order in orders]
    updates = any(op == Op.UPDATE for order in orders for op, _, _ in order)
    period = 3 if updates else 2
    phase = {Op.FORWARD: 0, Op.UPDATE: 2}  # of a period, if aligned; backward passes have 1
    done: dict[Task, int] = {}
    rows: list[list[Entry]] = []
    num_idle = 0
    while any(waiting):
        tick = len(rows)
        row: list[Entry] = [(Op.IDLE, 0, 0)] * len(orders)
        for stage, order in enumerate(waiting):
            for entry in order[:1] if in_order else order:
                op, microbatch, chunk = entry
                if aligned and tick % period != phase.get(op, 1):
                    continue
                task = Task(op, microbatch, at[route_of[microbatch], Place(stage, chunk)])
                needed = dependencies(task, len(routes[0]))
                if all(done.get(other, tick) < tick for other in needed):
                    row[stage] = entry
                    done[task] = tick
                    order.remove(entry)
                    break
        rows.append(row)
        num_idle = 0 if any(entry[0] for entry in row) else num_idle + 1
        if num_idle >= period:
            stuck = ", ".join(
                f"stage {stage} at {LETTERS[order[0][0]]}{order[0][1]}"
                for stage, order in enumerate(waiting)
                if order
            )
            raise ScheduleError(f"{name}: nothing can run in tick {tick - 1}: {stuck}.")
    table = np.array(rows, np.int32).reshape(len(rows), len(orders), 3)  # [ticks, stages, 3]
    return np.moveaxis(table, -1, 0)


# --- Schedules in PyTorch's format: a row of comma-separated operations per stage -----------------

_ENTRY = re.compile(r"(\d+)([FBIW])(\d+)")
_OPS = {"F": Op.FORWARD, "B": Op.BACKWARD, "I": Op.BACKWARD, "W": Op.WEIGHT}


def read_csv(text: str, name: str) -> tuple[np.ndarray, tuple[Route, ...], tuple[int, ...]]:
    """The table [3, ticks, stages], the routes, and which one each micro-batch takes."""
    rows = [line.split(",") for line in text.strip().splitlines()]
    parsed: list[tuple[int, int, Op, int, int]] = []  # stage, tick, op, micro-batch, virtual stage
    first: dict[str, tuple[int, int, str]] = {}  # of each letter: stage, tick, entry
    for stage, row in enumerate(rows):
        for tick, entry in enumerate(map(str.strip, row)):
            if not entry:
                continue
            match = _ENTRY.fullmatch(entry)
            if match is None:
                raise ScheduleError(
                    f"{name}: row {stage}, column {tick}: cannot read {entry!r}; expected virtual "
                    "stage, F, B, I or W, and micro-batch, such as 0F3."
                )
            v, op, microbatch = match.groups()
            first.setdefault(op, (stage, tick, entry))
            parsed.append((stage, tick, _OPS[op], int(microbatch), int(v)))
    if not parsed:
        raise ScheduleError(f"{name}: the table is empty.")
    if "I" in first and ("B" in first or "W" not in first):
        stage, tick, entry = first["B" if "B" in first else "I"]
        raise ScheduleError(
            f"{name}: row {stage}, column {tick}: {entry} is in a table that splits backward "
            "passes. Each of them needs an I and a W."
        )

    # The route of a micro-batch is where its forward passes run. A stage numbers its chunks in the
    # order of routes and virtual stages.
    num_microbatches = 1 + max(microbatch for *_, microbatch, _ in parsed)
    num_virtual = 1 + max(v for *_, v in parsed)
    stage_of: dict[tuple[int, int], int] = {}
    for stage, tick, _, microbatch, v in parsed:
        if stage_of.setdefault((microbatch, v), stage) != stage:
            raise ScheduleError(
                f"{name}: row {stage}, column {tick}: micro-batch {microbatch} runs virtual stage "
                f"{v} in row {stage_of[microbatch, v]} too."
            )
    for microbatch, v in itertools.product(range(num_microbatches), range(num_virtual)):
        if (microbatch, v) not in stage_of:
            raise ScheduleError(
                f"{name}: virtual stage {v} of micro-batch {microbatch} is in no row."
            )
    stages = [tuple(stage_of[m, v] for v in range(num_virtual)) for m in range(num_microbatches)]
    distinct = list(dict.fromkeys(stages))
    route_of = tuple(map(distinct.index, stages))
    chunks = [itertools.count() for _ in rows]
    routes = tuple(tuple(Place(s, next(chunks[s])) for s in route) for route in distinct)

    table = np.zeros((3, max(map(len, rows)), len(rows)), np.int32)
    for stage, tick, op, microbatch, v in parsed:
        table[:, tick, stage] = op, microbatch, routes[route_of[microbatch]][v].chunk
    return table, routes, route_of
