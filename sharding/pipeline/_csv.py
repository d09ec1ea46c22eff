"""Reads schedules in PyTorch's format: a row of comma-separated operations per stage."""

import itertools
import re

import numpy as np

from sharding.pipeline._operations import Op, Place, Route, ScheduleError

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
