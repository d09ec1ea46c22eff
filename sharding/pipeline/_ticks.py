"""From the order of operations on each stage to a table of ticks."""

from collections.abc import Sequence

import numpy as np

from sharding.pipeline._operations import (
    LETTERS,
    Entry,
    Op,
    Place,
    Route,
    ScheduleError,
    Task,
    dependencies,
)


def table_from_orders(
    name: str,
    orders: Sequence[Sequence[Entry]],
    routes: Sequence[Route],
    route_of: Sequence[int],
    *,
    aligned: bool = False,
    in_order: bool = True,
) -> np.ndarray:
    """[3, ticks, stages]: operation, micro-batch and chunk, each as early as its order allows.

    See ``Schedule.from_orders``. If not ``in_order``, a stage does not wait for the next operation
    of its order, but runs the first one that is ready: orders then state preference.
    """
    at = {(r, place): v for r, route in enumerate(routes) for v, place in enumerate(route)}
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
                    row[stage], done[task] = entry, tick
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
