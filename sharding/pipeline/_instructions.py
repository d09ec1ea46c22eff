"""From a schedule to what the program of every stage reads in each tick: buffers, senders, code."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sharding.pipeline._async_schedule import AsyncSchedule
from sharding.pipeline._ops import Op, Place, Task
from sharding.pipeline._schedule import Schedule

Pairs = tuple[tuple[int, int], ...]


class Code(NamedTuple):
    """A branch of the program: what a stage computes in one tick."""

    op: Op
    first: bool  # of the virtual stages: it embeds
    last: bool  # of the virtual stages: it has the head and the loss


class Phase(NamedTuple):
    """What any stage does in the ticks of one place in a loop.

    Attributes:
      codes: the branches; a table's code 0 is idle, i is ``codes[i - 1]``.
      right: (sender, receiver) of messages to the next device.
      left: of messages to the device before.
      stays: whether a stage may keep its own message: the next virtual stage is its own too.
    """

    codes: tuple[Code, ...]
    right: Pairs
    left: Pairs
    stays: bool


class Segment(NamedTuple):
    """A loop over ticks, each iteration one tick per phase.

    Attributes:
      phases: of one iteration.
      tables: columns by name, each [iterations, phases, stages].
    """

    phases: tuple[Phase, ...]
    tables: dict[str, np.ndarray]


class Instructions(NamedTuple):
    """A schedule for the executor.

    Attributes:
      segments: loops, one after the other.
      num_messages: slots for activations and cotangents that wait; one more receives what nobody
        expects.
      num_residuals: slots for residuals from the forward to the backward pass; where there are
        any, one more receives nothing of use in ticks that store none. Likewise
      num_crossing: slots for what a split backward pass stores until ``WEIGHT``.
      num_versions: slots for versions of the parameters, in an asynchronous pipeline.
      last_version: for each stage, the slot of its last version.
    """

    segments: tuple[Segment, ...]
    num_messages: int
    num_residuals: int
    num_crossing: int
    num_versions: int = 0
    last_version: tuple[int, ...] = ()


# Of the tables: the columns that name slots, and all others.
_SLOTS = ("input", "cotangent", "residual", "crossing")  # that are read
# That are written in every tick; one of no use, where nothing is to be stored.
_WRITTEN = ("from_left", "from_right", "from_self", "to_residuals", "to_crossing")
_COLUMNS = ("code", "microbatch", "chunk", "virtual_stage", *_SLOTS, *_WRITTEN)
# Of asynchronous pipelines: the slots of the versions that an operation reads and makes.
_VERSIONS = ("version", "new_version")


class _Stored(NamedTuple):
    """Something in a slot of a stage: from the tick that writes it to the last that reads it."""

    stage: int
    start: int
    end: int
    key: tuple[str, Task]


def instructions(schedule: Schedule, recompute: bool) -> Instructions:
    """Lowers a checked schedule.

    Args:
      schedule: the table.
      recompute: whether backward passes compute the forward pass again from its input; otherwise
        forward passes store residuals.

    Raises:
      ValueError: if a stage sends to one that is not its neighbour, or routes are not such that the
        second one has a replica of every stage's layers on one other stage.
    """
    _check_replicas(schedule)
    when = {task: (tick, stage) for tick, stage, task in schedule.tasks()}
    last = schedule.num_virtual_stages - 1
    messages, residuals, crossing = [], [], []
    for task, (tick, stage) in when.items():
        op, m, v = task
        backward = when.get(Task(Op.BACKWARD, m, v))
        if op == Op.FORWARD and v < last:
            receiver = Task(Op.FORWARD, m, v + 1)
            # The last virtual stage runs its forward pass as the first half of its backward pass.
            reads = [receiver]
            if backward is not None and (recompute or v + 1 == last):
                reads.append(Task(Op.BACKWARD, m, v + 1))
            end = max(when[t][0] for t in reads)
            messages.append(_Stored(when[receiver][1], tick, end, ("input", receiver)))
            if backward is not None and not recompute:
                residuals.append(_Stored(stage, tick, backward[0], ("residual", task)))
        if op == Op.BACKWARD and v > 0:
            receiver = Task(Op.BACKWARD, m, v - 1)
            end, receiving = when[receiver]
            messages.append(_Stored(receiving, tick, end, ("cotangent", receiver)))
        if op == Op.WEIGHT and backward is not None:
            crossing.append(_Stored(stage, backward[0], tick, ("crossing", task)))

    # A message arrives at the end of a tick, after the last read in that tick; residuals are
    # written and read within the ticks of their stage, which has one operation a tick.
    slots, num_messages = _assign(messages)
    residual_slots, num_residuals = _assign(residuals)
    crossing_slots, num_crossing = _assign(crossing)
    slots |= residual_slots | crossing_slots

    shape = (schedule.num_ticks, schedule.num_stages)
    asynchronous = isinstance(schedule, AsyncSchedule)
    columns = _COLUMNS + (_VERSIONS if asynchronous else ())
    table = {name: np.zeros(shape, np.int32) for name in columns}
    counts = (num_messages,) * 3 + (num_residuals, num_crossing)
    unused = dict(zip(_WRITTEN, counts, strict=True))
    for name, slot in unused.items():
        table[name][:] = slot
    directions: list[dict[str, set[tuple[int, int]]]] = [
        {"from_left": set(), "from_right": set(), "from_self": set()} for _ in range(shape[0])
    ]
    for stored in messages:
        kind, task = stored.key
        neighbour = task.virtual_stage + (-1 if kind == "input" else 1)
        sender = schedule.routes[schedule.route_of[task.microbatch]][neighbour].stage
        column = _direction(schedule, sender, stored.stage, kind)
        table[column][stored.start, stored.stage] = slots[kind, task]
        directions[stored.start][column].add((sender, stored.stage))
    codes = np.full(shape, -1)
    branches: list[Code] = []
    for tick, stage, task in schedule.tasks():
        op, m, v = task
        code = Code(op, v == 0, v == last) if op != Op.UPDATE else Code(op, False, False)
        if code not in branches:
            branches.append(code)
        codes[tick, stage] = branches.index(code)
        table["microbatch"][tick, stage] = m
        table["chunk"][tick, stage] = schedule.chunk[tick, stage]
        table["virtual_stage"][tick, stage] = v
        table["input"][tick, stage] = slots.get(("input", Task(Op.FORWARD, m, v)), 0)
        table["cotangent"][tick, stage] = slots.get(("cotangent", Task(Op.BACKWARD, m, v)), 0)
        for kind, of, to, writer in (
            ("residual", Op.FORWARD, "to_residuals", Op.FORWARD),
            ("crossing", Op.WEIGHT, "to_crossing", Op.BACKWARD),
        ):
            found = slots.get((kind, Task(of, m, v)))
            if found is not None:
                table[to if op == writer else kind][tick, stage] = found
    num_versions, last_version = 0, tuple[int, ...]()
    if isinstance(schedule, AsyncSchedule):
        num_versions, last_version = _fill_versions(schedule, table)
    segments = tuple(
        _segment(table, unused, codes, branches, directions, *ticks)
        for ticks in _loops(directions, periods=(2, 3) if asynchronous else (2,))
    )
    return Instructions(
        segments, num_messages, num_residuals, num_crossing, num_versions, last_version
    )


def _fill_versions(
    schedule: AsyncSchedule, table: dict[str, np.ndarray]
) -> tuple[int, tuple[int, ...]]:
    """Fills the columns of versions; returns the number of slots, and the last one's per stage."""

    def key(stage: int, version: int) -> tuple[str, Task]:
        return "version", Task(Op.UPDATE, version, stage)

    stored = [
        _Stored(stage, start, end, key(stage, version))
        for (stage, version), (start, end) in schedule.version_ends().items()
    ]
    slots, num_versions = _assign(stored)
    for tick, stage, task in schedule.tasks():
        version = int(schedule.version[tick, stage])
        if task.op == Op.UPDATE:
            table["new_version"][tick, stage] = slots[key(stage, version)]
            version -= 1
        table["version"][tick, stage] = slots[key(stage, version)]
    last = tuple(slots[key(s, schedule.num_updates)] for s in range(schedule.num_stages))
    return num_versions, last


def _check_replicas(schedule: Schedule) -> None:
    """Raises unless there is one route, or route r has chunk r of every stage and no other."""
    if len(schedule.routes) == 1:
        return
    for r, route in enumerate(schedule.routes):
        if r > 1 or sorted(route) != [Place(s, r) for s in range(schedule.num_stages)]:
            raise ValueError(
                f"{schedule.name}: a pipeline runs one route, or two that lead through every stage "
                f"once, the first through chunks 0 and the second through chunks 1; route {r} of "
                f"{len(schedule.routes)} is {[tuple(place) for place in route]}."
            )


def _assign(stored: Sequence[_Stored]) -> tuple[dict[tuple[str, Task], int], int]:
    """Slots by interval colouring: one is free again from the tick of its last read on."""
    slots, used = {}, 0
    for stage in {entry.stage for entry in stored}:
        until: list[int] = []  # per slot, the last tick that reads it
        for entry in sorted((e for e in stored if e.stage == stage), key=lambda e: e.start):
            free = [i for i, end in enumerate(until) if end <= entry.start]
            slot = free[0] if free else len(until)
            until[slot : slot + 1] = [entry.end]
            slots[entry.key] = slot
        used = max(used, len(until))
    return slots, used


def _direction(schedule: Schedule, sender: int, receiver: int, kind: str) -> str:
    """The column of the slot in which a message arrives."""
    distance = (receiver - sender) % schedule.num_stages
    if distance == 0:
        return "from_self"
    if schedule.num_stages == 2:  # both neighbours are one device
        return "from_left" if kind == "input" else "from_right"
    if distance in (1, schedule.num_stages - 1):
        return "from_left" if distance == 1 else "from_right"
    raise ValueError(
        f"{schedule.name}: stage {sender} sends to stage {receiver}; only neighbours on the ring "
        f"of {schedule.num_stages} stages may."
    )


def _loops(
    directions: Sequence[dict[str, set[tuple[int, int]]]], periods: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """(first tick, end, ticks per iteration) of loops in which ticks of one kind send one way.

    Each tick of a loop runs the collectives of its phase whether messages are there or not. Aligned
    tables send right in the first ticks of a period and left in the second ones, and nothing in
    those of updates; GPipe's right first, then left.
    """
    sends = [{name for name, pairs in tick.items() if pairs} - {"from_self"} for tick in directions]

    def union(sets: Sequence[set[str]]) -> set[str]:
        return set().union(*sets)

    num_ticks = len(sends)
    for period in periods:
        right, left, *none = (union(sends[i::period]) for i in range(period))
        if right and left and not right & left and not any(none):
            yield 0, num_ticks, period
            return
    for middle in range(1, num_ticks):
        before, after = union(sends[:middle]), union(sends[middle:])
        if before and after and not before & after:
            yield 0, middle, 1
            yield middle, num_ticks, 1
            return
    yield 0, num_ticks, 1


def _segment(
    table: dict[str, np.ndarray],
    unused: dict[str, int],
    codes: np.ndarray,
    branches: Sequence[Code],
    directions: Sequence[dict[str, set[tuple[int, int]]]],
    start: int,
    stop: int,
    period: int,
) -> Segment:
    """One loop over the ticks from ``start`` to ``stop``; idle ticks fill the last iteration."""
    iterations = -(-(stop - start) // period)
    padding = ((0, iterations * period - (stop - start)), (0, 0))
    shape = (iterations, period, codes.shape[1])
    tables = {
        name: np.pad(column[start:stop], padding, constant_values=unused.get(name, 0)).reshape(
            shape
        )
        for name, column in table.items()
    }
    used = np.pad(codes[start:stop], padding, constant_values=-1).reshape(shape)
    phases = []
    for phase in range(period):
        found = sorted(set(used[:, phase].ravel().tolist()) - {-1})
        for i, code in enumerate(found):
            tables["code"][:, phase][used[:, phase] == code] = i + 1
        ticks = directions[start + phase : stop : period]
        pairs = {
            name: tuple(sorted(set().union(*(tick[name] for tick in ticks))))
            for name in ("from_left", "from_right", "from_self")
        }
        phases.append(
            Phase(
                tuple(branches[i] for i in found),
                pairs["from_left"],
                pairs["from_right"],
                bool(pairs["from_self"]),
            )
        )
    return Segment(tuple(phases), tables)
