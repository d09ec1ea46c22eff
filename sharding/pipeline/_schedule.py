"""Pipeline schedules as data: which operation each stage runs in each tick, checked and timed."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from sharding.pipeline._operations import (
    LETTERS,
    Costs,
    Entry,
    Op,
    Place,
    Route,
    ScheduleError,
    Task,
    dependencies,
    read_csv,
    table_from_orders,
    virtual_stages,
)

# The colours of the papers: forward blue, backward green, weights orange; updates red.
_COLORS = dict(zip(list(Op)[1:], ("#4c78c8", "#59a868", "#e0913a", "#c0504d"), strict=True))


class Figures(NamedTuple):
    """What a table costs."""

    ticks: int  # its length
    busy: tuple[int, ...]  # per stage, the number of ticks with an operation
    bubble: float  # the idle fraction of ``event_time``, where operations take one unit each
    # per stage, the most activations stored at once, one for each micro-batch and chunk, from the
    # forward pass to the last operation that needs them
    live: tuple[int, ...]
    weight_copies: int  # how many replicas of the layers the stages hold together
    messages: tuple[int, ...]  # per stage, activations and cotangents sent to other stages
    weight_versions: tuple[int, ...]  # per stage, the most versions of its parameters at once


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """A table of what each stage of a pipeline runs in each tick.

    A *stage* is a device of the pipeline's mesh axis; a *virtual stage* is a group of consecutive
    layers, of which a stage runs one per chunk. An operation may start in the tick after those that
    it depends on: ``FORWARD`` on that of the virtual stage before, ``BACKWARD`` on its own forward
    pass and on the backward pass of the virtual stage after, ``WEIGHT`` on its own ``BACKWARD``.
    ``print`` shows the table.

    Raises:
      ScheduleError: if the tables differ in shape.

    Example:
      >>> from sharding.pipeline import gpipe
      >>> schedule = gpipe(stages=2, microbatches=1)
      >>> schedule.num_ticks, schedule.check().bubble, schedule.to_csv().splitlines()
      (4, 0.5, ['0F0,,,0B0', ',1F0,1B0,'])
    """

    name: str  #: of the family, such as ``"1f1b"``
    op: np.ndarray  #: [ticks, stages], values of ``Op``
    microbatch: np.ndarray  #: [ticks, stages]; 0 where idle
    chunk: np.ndarray  #: [ticks, stages]; 0 where idle
    routes: tuple[Route, ...]  #: for each route, the place of every virtual stage
    route_of: tuple[int, ...]  #: for each micro-batch, its route

    _OPS: ClassVar = (Op.FORWARD, Op.BACKWARD, Op.WEIGHT)

    def __post_init__(self) -> None:
        tables = [np.array(table, np.int32) for table in (self.op, self.microbatch, self.chunk)]
        if len({table.shape for table in tables}) != 1 or tables[0].ndim != 2:
            raise ScheduleError(
                "op, microbatch and chunk must be tables of one shape [ticks, stages], got "
                f"{[table.shape for table in tables]}."
            )
        routes = tuple(tuple(Place(*place) for place in route) for route in self.routes)
        self._set_tables(op=tables[0], microbatch=tables[1], chunk=tables[2])
        object.__setattr__(self, "routes", routes)
        object.__setattr__(self, "route_of", tuple(self.route_of))

    def _set_tables(self, **tables: np.ndarray) -> None:
        for name, table in tables.items():
            table.setflags(write=False)
            object.__setattr__(self, name, table)

    @property
    def num_ticks(self) -> int:
        """The length of the table."""
        return self.op.shape[0]

    @property
    def num_stages(self) -> int:
        """The number of devices along the pipeline's mesh axis."""
        return self.op.shape[1]

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches of one step."""
        return len(self.route_of)

    @property
    def num_virtual_stages(self) -> int:
        """The number of groups of layers."""
        return len(self.routes[0])

    @property
    def num_chunks(self) -> int:
        """The number of groups of layers that a stage runs, replicas included."""
        return 1 + max(place.chunk for route in self.routes for place in route)

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of parameters are operations of their own."""
        return bool(np.any(self.op == Op.WEIGHT))

    @property
    def forward_only(self) -> bool:
        """Whether it is a table of an evaluation, without backward passes."""
        return not np.any(self.op == Op.BACKWARD)

    def tasks(self) -> Iterator[tuple[int, int, Task]]:
        """Every operation as (tick, stage, task), by tick; a ``ScheduleError`` at a bad one."""
        at = virtual_stages(self.routes)
        table = np.stack([self.op, self.microbatch, self.chunk], -1)
        for tick, stage in np.argwhere(self.op != Op.IDLE).tolist():
            op, microbatch, chunk = table[tick, stage].tolist()
            where = f"{self.name}: tick {tick}, stage {stage}"
            if op not in self._OPS:
                raise ScheduleError(f"{where}: {op} is no operation.")
            if not 0 <= microbatch < self.num_microbatches:
                raise ScheduleError(
                    f"{where}: micro-batch {microbatch} of {self.num_microbatches} does not exist."
                )
            v = at.get((self.route_of[microbatch], Place(stage, chunk)))
            if v is None:
                raise ScheduleError(
                    f"{where}: chunk {chunk} does not run micro-batch {microbatch} on this stage."
                )
            yield tick, stage, Task(Op(op), microbatch, v)

    def check(self) -> Figures:
        """Verifies that a pipeline can run the table, and counts what it costs.

        Raises:
          ScheduleError: if an operation is missing, doubled, or in a tick before those that it
            depends on are complete; names the tick and the stage.
        """
        self._check_routes()
        done: dict[Task, int] = {}
        for tick, stage, task in self.tasks():
            where = f"{self.name}: tick {tick}, stage {stage}: {task}"
            if task in done:
                raise ScheduleError(f"{where} ran already, in tick {done[task]}.")
            for needed in dependencies(task, self.num_virtual_stages):
                if done.get(needed, tick) >= tick:
                    raise ScheduleError(f"{where} needs {needed}, which is not complete.")
            done[task] = tick
        ops = [Op.FORWARD]
        if not self.forward_only:
            ops += [Op.BACKWARD, Op.WEIGHT] if self.splits_backward else [Op.BACKWARD]
        sizes = range(self.num_microbatches), range(self.num_virtual_stages)
        for microbatch, v, op in itertools.product(*sizes, ops):
            if Task(op, microbatch, v) not in done:
                stage = self.routes[self.route_of[microbatch]][v].stage
                raise ScheduleError(
                    f"{self.name}: {Task(op, microbatch, v)} is missing: no tick of stage {stage} "
                    f"has it, {self.num_ticks} ticks in all."
                )
        busy = np.sum(self.op != Op.IDLE, axis=0)
        bubble = 1 - float(busy.sum()) / (self.num_stages * self.event_time(Costs(1, 1, 1, 1)))
        live = tuple(np.max(self.live(), axis=0, initial=0).tolist())
        counts = self.num_ticks, tuple(busy.tolist()), bubble, live, len(self.routes)
        return Figures(*counts, self._messages(), (1,) * self.num_stages)

    def _messages(self) -> tuple[int, ...]:
        sent = [0] * self.num_stages
        for _, stage, (op, microbatch, v) in self.tasks():
            to = v + {Op.FORWARD: 1, Op.BACKWARD: -1}.get(op, 0)
            if 0 <= to < self.num_virtual_stages:
                sent[stage] += self.routes[self.route_of[microbatch]][to].stage != stage
        return tuple(sent)

    def _check_routes(self) -> None:
        used = set(self.route_of)
        if not self.routes or not self.route_of or not used <= set(range(len(self.routes))):
            raise ScheduleError(
                f"{self.name}: route_of must name for each micro-batch one of the "
                f"{len(self.routes)} routes, got {self.route_of}."
            )
        for route in self.routes:
            stages = [place.stage for place in route]
            known = set(stages) <= set(range(self.num_stages))
            if len(route) != self.num_virtual_stages or not known:
                raise ScheduleError(
                    f"{self.name}: every route must lead through {self.num_virtual_stages} virtual "
                    f"stages on stages below {self.num_stages}, got {route}."
                )
        places = [place for route in self.routes for place in route]
        for stage in range(self.num_stages):
            chunks = sorted(place.chunk for place in places if place.stage == stage)
            if chunks != list(range(len(chunks))):
                raise ScheduleError(
                    f"{self.name}: the chunks of stage {stage} must be numbered from 0, each once, "
                    f"got {chunks}."
                )

    def live(self) -> np.ndarray:
        """[ticks, stages]: micro-batches whose activations a stage stores, over all its chunks."""
        last = Op.WEIGHT if self.splits_backward else Op.BACKWARD
        starts = np.cumsum(self.op == Op.FORWARD, axis=0)
        ends = np.cumsum(self.op == last, axis=0)
        ends = np.concatenate([np.zeros_like(ends[:1]), ends[:-1]])  # stored during the last one
        return starts - ends

    def lockstep_time(self, costs: Costs | None = None) -> float:
        """The time of a step in which every tick takes as long as its slowest stage, as in SPMD.

        ``Pipeline`` runs both passes of the last virtual stage in one tick, which plans count.
        ``costs`` None: forward passes take 1 and full backward passes 2; where these are split,
        both halves take 1.
        """
        return float(self._tick_times(self._costs(costs)).sum())

    def _tick_times(self, costs: Costs) -> np.ndarray:
        """[ticks]: the time of the slowest operation."""
        return np.array([costs.of(op) for op in Op])[self.op].max(axis=1)

    def event_time(self, costs: Costs | None = None) -> float:
        """The time of runtimes with a program per stage: operations start when inputs are there.

        Sending is free. ``costs`` are as in ``lockstep_time``.
        """
        costs = self._costs(costs)
        end: dict[Task, float] = {}
        free = [0.0] * self.num_stages
        for _, stage, task in self.tasks():
            needed = dependencies(task, self.num_virtual_stages)
            start = max([free[stage], *(end[other] for other in needed)])
            end[task] = free[stage] = start + costs.of(task.op)
        return max(free)

    def _costs(self, costs: Costs | None) -> Costs:
        return costs or (Costs(1, 1, 1) if self.splits_backward else Costs(1, 2))

    def without_backward(self) -> "Schedule":
        """The table of an evaluation: forward passes alone, in order, as early as possible."""
        return self._retimed(f"{self.name}-forward", [Op.FORWARD])

    def _retimed(self, name: str, ops: Sequence[Op]) -> "Schedule":
        """The table of some operations, in order, as early as possible."""
        orders: list[list[Entry]] = [[] for _ in range(self.num_stages)]
        for tick, stage, task in self.tasks():
            if task.op in ops:
                orders[stage].append((task.op, task.microbatch, int(self.chunk[tick, stage])))
        return Schedule.from_orders(name, orders, self.routes, self.route_of)

    @staticmethod
    def from_orders(
        name: str,
        orders: Sequence[Sequence[Entry]],
        routes: Sequence[Route],
        route_of: Sequence[int],
        *,
        aligned: bool = False,
    ) -> "Schedule":
        """Puts each operation in the earliest tick that its dependencies and its order allow.

        ``orders`` are, for each stage, its operations in order, as (operation, micro-batch, chunk).
        If ``aligned``, even ticks hold forward passes alone, and odd ticks none.

        Raises:
          ScheduleError: if the orders wait for each other; names the first that do.
        """
        op, microbatch, chunk = table_from_orders(name, orders, routes, route_of, aligned=aligned)
        return Schedule(name, op, microbatch, chunk, tuple(routes), tuple(route_of))

    def to_csv(self) -> str:
        """The table in PyTorch's format: a row per stage, such as ``0F0,0F1,,0B0``.

        An entry is virtual stage, operation and micro-batch; ``I`` is the backward pass of the
        input alone, ``W`` that of the parameters.

        Raises:
          ScheduleError: if the table has updates, for which the format has no entry.
        """
        if Op.UPDATE in self._OPS:
            raise ScheduleError(f"{self.name}: PyTorch's format has no updates and no versions.")
        letters = LETTERS | ({Op.BACKWARD: "I"} if self.splits_backward else {})
        rows = [[""] * self.num_ticks for _ in range(self.num_stages)]
        for tick, stage, (op, microbatch, v) in self.tasks():
            rows[stage][tick] = f"{v}{letters[op]}{microbatch}"
        return "".join(",".join(row) + "\n" for row in rows)

    @staticmethod
    def from_csv(text: str, name: str = "csv", *, retime: bool = False) -> "Schedule":
        """Reads a table in PyTorch's format; in tables that have ``W``, ``B`` is the same as ``I``.

        ``retime`` moves each operation to the earliest tick that its dependencies allow, for tables
        that state the order on each stage alone.

        Raises:
          ScheduleError: if an entry cannot be read, naming its row and column, or the table does
            not pass ``check``.
        """
        (op, microbatch, chunk), routes, route_of = read_csv(text, name)
        schedule = Schedule(name, op, microbatch, chunk, routes, route_of)
        schedule = schedule._retimed(name, schedule._OPS) if retime else schedule
        try:
            schedule.check()
        except ScheduleError as error:
            hint = " If columns are not ticks, read the table with retime=True."
            raise ScheduleError(f"{error}{'' if retime else hint}") from None
        return schedule

    def draw(self, ax: Any = None, costs: Costs | None = None) -> Any:
        """Draws a row per stage, a box per operation; needs matplotlib (extra ``cli``).

        ``costs`` are the widths of the boxes, for lockstep time; None draws all ticks alike.
        Returns the matplotlib axes, which are ``ax`` if it is given.
        """
        import matplotlib.pyplot as plt
        from matplotlib.colors import to_rgb

        num_ticks, num_stages = self.op.shape
        if ax is None:
            width = max(4.0, min(18.0, 0.28 * num_ticks))
            _, ax = plt.subplots(figsize=(width, 0.6 + 0.35 * num_stages))
        lengths = np.ones(num_ticks) if costs is None else self._tick_times(costs)
        starts = np.concatenate([[0.0], np.cumsum(lengths)])
        for tick, stage, (op, microbatch, _) in self.tasks():
            length = lengths[tick] if costs is None else costs.of(op)
            # Chunks are told apart by their lightness.
            lighter = 0.55 * int(self.chunk[tick, stage]) / max(1, self.num_chunks - 1)
            color = tuple(c + (1 - c) * lighter for c in to_rgb(_COLORS[op]))
            span = [(starts[tick], length)]
            ax.broken_barh(span, (stage - 0.45, 0.9), facecolors=[color], edgecolor="white")
            style = {"color": "white" if lighter < 0.4 else "black", "fontsize": 7}
            at = starts[tick] + length / 2, stage
            ax.text(*at, str(microbatch), ha="center", va="center", **style)
        ax.set(
            xlim=(0, starts[-1]),
            ylim=(num_stages - 0.5, -0.5),
            yticks=range(num_stages),
            xlabel="ticks" if costs is None else "time",
            ylabel="stage",
            title=self.name,
        )
        ax.set_facecolor("#ececec")  # the bubble
        return ax

    def __str__(self) -> str:
        """A line of figures, then a row per stage: operation, micro-batch, letter of the chunk."""
        figures = self.check()
        head = (
            f"{self.name}: {self.num_stages} stages, {self.num_microbatches} micro-batches, "
            f"{figures.ticks} ticks, bubble {100 * figures.bubble:.1f} %"
        )
        live = " ".join(map(str, figures.live))
        head += "" if self.forward_only else f", live activations {live}"
        cells = [["."] * self.num_ticks for _ in range(self.num_stages)]
        for tick, stage, (op, microbatch, _) in self.tasks():
            chunk = chr(ord("a") + self.chunk[tick, stage]) if self.num_chunks > 1 else ""
            cells[stage][tick] = f"{LETTERS[op]}{microbatch}{chunk}"
        width = max(len(cell) for row in cells for cell in row)
        digits = len(str(self.num_stages - 1))
        rows = [
            f"{stage:{digits}}  " + " ".join(f"{cell:{width}}" for cell in row)
            for stage, row in enumerate(cells)
        ]
        return "\n".join([head, *(row.rstrip() for row in rows)])
