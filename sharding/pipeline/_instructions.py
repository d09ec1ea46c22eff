"""From a schedule to what the program of every stage reads in each tick: buffers, senders, code."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sharding.pipeline._operations import Op, Place, Task
from sharding.pipeline._schedule import Schedule
from sharding.pipeline.asynchronous._async_schedule import AsyncSchedule

Pairs = tuple[tuple[int, int], ...]  # of stages: sender, receiver


class Code(NamedTuple):
    op: Op
    first: bool  # of the virtual stages: it embeds
    last: bool  # of the virtual stages: it has the head and the loss


class Phase(NamedTuple):
    """What any stage does in the ticks of one place in a loop."""

    codes: tuple[Code, ...]  # branches; a table's code 0 is idle, i is codes[i - 1]
    right: Pairs  # messages to the next device
    left: Pairs  # messages to the device before
    stays: bool  # whether a stage may keep its own message: the next virtual stage is its own too


class Segment(NamedTuple):
    """A loop over ticks, each iteration one tick per phase."""

    phases: tuple[Phase, ...]
    tables: dict[str, np.ndarray]  # columns by name, each [iterations, phases, stages]


class Instructions(NamedTuple):
    """A schedule for the executor."""

    segments: tuple[Segment, ...]  # loops, one after the other
    # Slots for activations and cotangents that wait; one more receives what nobody expects.
    num_messages: int
    # Slots for residuals from the forward to the backward pass; where there are any, one more
    # receives nothing of use in ticks that store none.
    num_residuals: int
    num_crossing: int  # likewise, for what a split backward pass stores until ``WEIGHT``
    num_versions: int  # slots for versions of the parameters, in an asynchronous pipeline
    last_version: tuple[int, ...]  # there, for each stage, the slot of its last version

    def tables(self) -> list[dict[str, jax.Array]]:
        return [jax.tree.map(jnp.asarray, segment.tables) for segment in self.segments]


class Stored(NamedTuple):
    """Something in a slot of a stage: from the tick that writes it to the last that reads it."""

    stage: int
    start: int
    end: int
    key: Any  # names it


# Columns of tables: slots that operations read, and those that are written in every tick, where one
# of no use receives what is not to be stored.
_READ = ("input", "cotangent", "residual", "crossing")
_WRITTEN = ("from_left", "from_right", "from_self", "to_residuals", "to_crossing")
_COLUMNS = ("code", "microbatch", "chunk", "virtual_stage", *_READ, *_WRITTEN)
_VERSIONS = ("version", "new_version")  # read, and written by updates
_ARRIVALS = ("from_left", "from_right", "from_self")
# For each tick, the (sender, receiver) of what arrives in each of these columns.
Arrivals = Sequence[dict[str, set[tuple[int, int]]]]


def instructions(schedule: Schedule, recompute: bool) -> Instructions:
    """Lowers a checked schedule."""
    _check_replicas(schedule)
    # A message arrives at the end of a tick, after the last read in that tick; residuals are
    # written and read within the ticks of their stage, which has one operation a tick.
    stored_by_kind = _stored_between_ticks(schedule, recompute)
    messages, *_, versions = stored_by_kind
    assigned = [assign_slots(stored) for stored in stored_by_kind]
    slots = {key: slot for by_key, _ in assigned for key, slot in by_key.items()}
    num_messages, num_residuals, num_crossing, num_versions = (count for _, count in assigned)

    shape = (schedule.num_ticks, schedule.num_stages)
    unused = (num_messages,) * 3 + (num_residuals, num_crossing)
    idle = {"code": -1} | dict(zip(_WRITTEN, unused, strict=True))
    names = (*_COLUMNS, *_VERSIONS) if versions else _COLUMNS
    table = {name: np.full(shape, idle.get(name, 0), np.int32) for name in names}

    # Messages: where they arrive, and from which side.
    arrivals: Arrivals = [{name: set() for name in _ARRIVALS} for _ in range(schedule.num_ticks)]
    for stored in messages:
        kind, task = stored.key
        neighbour = task.virtual_stage + (-1 if kind == "input" else 1)
        sender = schedule.routes[schedule.route_of[task.microbatch]][neighbour].stage
        column = _direction(schedule, sender, stored.stage, kind)
        table[column][stored.start, stored.stage] = slots[kind, task]
        arrivals[stored.start][column].add((sender, stored.stage))

    # Operations: their branch, and the slots that they read and write.
    branches: dict[Code, int] = {}
    last = schedule.num_virtual_stages - 1
    for tick, stage, task in schedule.tasks():
        op, m, v = task
        code = Code(op, v == 0, v == last) if op != Op.UPDATE else Code(op, False, False)
        forward, backward, weight = (Task(o, m, v) for o in (Op.FORWARD, Op.BACKWARD, Op.WEIGHT))
        values = {
            "code": branches.setdefault(code, len(branches)),
            "microbatch": m,
            "chunk": schedule.chunk[tick, stage],
            "virtual_stage": v,
            "input": slots.get(("input", forward), 0),
            "cotangent": slots.get(("cotangent", backward), 0),
        }
        residual = slots.get(("residual", forward))
        cross = slots.get(("crossing", weight))
        if residual is not None:
            values["to_residuals" if op == Op.FORWARD else "residual"] = residual
        if cross is not None:
            values["to_crossing" if op == Op.BACKWARD else "crossing"] = cross
        if isinstance(schedule, AsyncSchedule):
            version = int(schedule.version[tick, stage])
            if op == Op.UPDATE:  # from the version before
                values["new_version"] = slots[stage, version]
                version -= 1
            values["version"] = slots[stage, version]
        for name, value in values.items():
            table[name][tick, stage] = value

    loops = _loops(arrivals, (2, 3) if versions else (2,))
    segments = tuple(_segment(table, idle, tuple(branches), arrivals, *ticks) for ticks in loops)
    last_version = {key[0]: slots[key] for key in sorted(stored.key for stored in versions)}
    counts = num_messages, num_residuals, num_crossing, num_versions
    return Instructions(segments, *counts, tuple(last_version.values()))


def _stored_between_ticks(schedule: Schedule, recompute: bool) -> tuple[list[Stored], ...]:
    """Messages by their receivers, residuals, crossing values of split passes, and versions."""
    # Keys: ("input" or "cotangent", the task that reads it), ("residual", ...), ("crossing", ...);
    # of versions (stage, version).
    when = {task: (tick, stage) for tick, stage, task in schedule.tasks()}
    last = schedule.num_virtual_stages - 1
    messages = []
    residuals = []
    crossing = []
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
            messages.append(Stored(when[receiver][1], tick, end, ("input", receiver)))
            if backward is not None and not recompute:
                residuals.append(Stored(stage, tick, backward[0], ("residual", task)))
        if op == Op.BACKWARD and v > 0:
            receiver = Task(Op.BACKWARD, m, v - 1)
            end, receiving = when[receiver]
            messages.append(Stored(receiving, tick, end, ("cotangent", receiver)))
        if op == Op.WEIGHT and backward is not None:
            crossing.append(Stored(stage, backward[0], tick, ("crossing", task)))
    ends = schedule.version_ends() if isinstance(schedule, AsyncSchedule) else {}
    versions = [Stored(key[0], start, end, key) for key, (start, end) in ends.items()]
    return messages, residuals, crossing, versions


def _check_replicas(schedule: Schedule) -> None:
    if len(schedule.routes) == 1:
        return
    for r, route in enumerate(schedule.routes):
        if r > 1 or sorted(route) != [Place(s, r) for s in range(schedule.num_stages)]:
            raise ValueError(
                f"{schedule.name}: a pipeline runs one route, or two that lead through every stage "
                f"once, the first through chunks 0 and the second through chunks 1; route {r} of "
                f"{len(schedule.routes)} is {[tuple(place) for place in route]}."
            )


def assign_slots(stored: Sequence[Stored]) -> tuple[dict[Any, int], int]:
    """Slots by interval colouring: one is free again from the tick of its last read on."""
    slots = {}
    num_slots = 0
    for stage in {entry.stage for entry in stored}:
        until: list[int] = []  # per slot, the last tick that reads it
        for entry in sorted((e for e in stored if e.stage == stage), key=lambda e: e.start):
            free = (i for i, end in enumerate(until) if end <= entry.start)
            slot = next(free, len(until))
            until[slot : slot + 1] = [entry.end]
            slots[entry.key] = slot
        num_slots = max(num_slots, len(until))
    return slots, num_slots


def _direction(schedule: Schedule, sender: int, receiver: int, kind: str) -> str:
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


def _loops(arrivals: Arrivals, periods: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first tick, end, ticks per iteration) of loops in which ticks of one kind send one way."""
    # Each tick of a loop runs the collectives of its phase whether messages are there or not.
    # Aligned tables send right in the first ticks of a period and left in the second ones; GPipe's
    # right first, then left.
    sends = [{name for name, pairs in tick.items() if pairs} - {"from_self"} for tick in arrivals]

    def union(sets: Sequence[set[str]]) -> set[str]:
        return set().union(*sets)

    num_ticks = len(sends)
    for period in periods:
        right, left, *none = (union(sends[i::period]) for i in range(period))
        if right and left and not right & left and not any(none):
            yield 0, num_ticks, period
            return
    for middle in range(1, num_ticks):
        before = union(sends[:middle])
        after = union(sends[middle:])
        if before and after and not before & after:
            yield 0, middle, 1
            yield middle, num_ticks, 1
            return
    yield 0, num_ticks, 1


def _segment(
    table: dict[str, np.ndarray],
    idle: dict[str, int],
    branches: Sequence[Code],
    arrivals: Arrivals,
    start: int,
    stop: int,
    period: int,
) -> Segment:
    """One loop over the ticks from ``start`` to ``stop``; idle ticks fill the last iteration."""
    padding = ((0, -(stop - start) % period), (0, 0))
    tables = {}  # [ticks, stages] to [iterations, phases, stages]
    for name, column in table.items():
        padded = np.pad(column[start:stop], padding, constant_values=idle.get(name, 0))
        tables[name] = padded.reshape(-1, period, padded.shape[1])
    phases = []
    for phase in range(period):
        codes = tables["code"][:, phase]
        numbers = sorted(set(codes.ravel().tolist()) - {-1})
        codes[:] = np.searchsorted([-1, *numbers], codes)
        ticks = arrivals[start + phase : stop : period]
        right, left, stays = (
            tuple(sorted(set().union(*(tick[name] for tick in ticks)))) for name in _ARRIVALS
        )
        phases.append(Phase(tuple(branches[i] for i in numbers), right, left, bool(stays)))
    return Segment(tuple(phases), tables)
