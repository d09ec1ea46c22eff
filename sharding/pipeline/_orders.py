"""From the order of operations on each stage to a table of ticks."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sharding.pipeline._ops import LETTERS, Op, Place, Route, ScheduleError, Task, dependencies

# One entry of an order: operation, micro-batch, chunk.
Entry = tuple[Op, int, int]


def table_from_orders(
    name: str,
    orders: Sequence[Sequence[Entry]],
    routes: Sequence[Route],
    route_of: Sequence[int],
    *,
    aligned: bool = False,
) -> np.ndarray:
    """The table of ``Schedule.from_orders``: [3, ticks, stages], operation, micro-batch, chunk."""
    at = {(r, place): v for r, route in enumerate(routes) for v, place in enumerate(route)}
    done: dict[Task, int] = {}
    position, idle = [0] * len(orders), 0
    updates = any(op == Op.UPDATE for order in orders for op, _, _ in order)
    # Aligned: forward passes, backward passes, and updates where there are any, in their own ticks.
    period = 3 if updates else 2
    phase = {Op.FORWARD: 0, Op.UPDATE: 2}
    rows: list[list[Entry]] = []
    while any(p < len(order) for p, order in zip(position, orders, strict=True)):
        tick = len(rows)
        row: list[Entry] = [(Op.IDLE, 0, 0)] * len(orders)
        for stage, order in enumerate(orders):
            if position[stage] == len(order):
                continue
            op, microbatch, chunk = order[position[stage]]
            if aligned and tick % period != phase.get(op, 1):
                continue
            task = Task(op, microbatch, at[route_of[microbatch], Place(stage, chunk)])
            needed = dependencies(task, len(routes[0]))
            if all(done.get(other, tick) < tick for other in needed):
                row[stage] = (op, microbatch, chunk)
                done[task] = tick
                position[stage] += 1
        rows.append(row)
        idle = 0 if any(entry[0] for entry in row) else idle + 1
        if idle >= period:
            stuck = [
                f"stage {stage} at {LETTERS[order[p][0]]}{order[p][1]}"
                for stage, (p, order) in enumerate(zip(position, orders, strict=True))
                if p < len(order)
            ]
            raise ScheduleError(f"{name}: nothing can run in tick {tick - 1}: {', '.join(stuck)}.")
    return _table(rows, len(orders))


def list_schedule(
    routes: Sequence[Route],
    route_of: Sequence[int],
    num_stages: int,
    priority: Callable[[Task], Any],
) -> np.ndarray:
    """Gives each stage in each tick the forward or backward pass of least priority that can run.

    Args:
      routes: for each route, the place of every virtual stage.
      route_of: for each micro-batch, its route.
      num_stages: of the mesh axis.
      priority: of a task; the least runs first.

    Returns:
      [3, ticks, stages]: operation, micro-batch and chunk.
    """
    left: list[list[tuple[Task, Entry]]] = [[] for _ in range(num_stages)]
    for microbatch, route in enumerate(route_of):
        for v, place in enumerate(routes[route]):
            left[place.stage] += [
                (Task(op, microbatch, v), (op, microbatch, place.chunk))
                for op in (Op.FORWARD, Op.BACKWARD)
            ]
    done: dict[Task, int] = {}
    rows: list[list[Entry]] = []
    while any(left):
        tick = len(rows)
        row: list[Entry] = [(Op.IDLE, 0, 0)] * num_stages
        for stage in range(num_stages):
            ready = [
                (priority(task), task, entry)
                for task, entry in left[stage]
                if all(done.get(n, tick) < tick for n in dependencies(task, len(routes[0])))
            ]
            if ready:
                _, task, entry = min(ready)
                row[stage] = entry
                done[task] = tick
                left[stage].remove((task, entry))
        rows.append(row)
    return _table(rows, num_stages)


def _table(rows: Sequence[Sequence[Entry]], num_stages: int) -> np.ndarray:
    return np.moveaxis(np.array(rows, np.int32).reshape(len(rows), num_stages, 3), -1, 0)
