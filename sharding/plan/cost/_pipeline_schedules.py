"""Schedules of a pipeline by name: micro-batches in flight, bubble, time of a step."""

import collections
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sharding.pipeline import Op, Schedule
from sharding.pipeline._instructions import instructions
from sharding.pipeline._layers import StageRows, layer_of_row
from sharding.pipeline._schedules import SCHEDULES as ALL_SCHEDULES
from sharding.pipeline._schedules import make_schedule
from sharding.plan._format import check_choice
from sharding.plan.cost._ledger import WorkRow

# Backward passes of these are split in two: gradients of activations, and of parameters.
SPLIT_SCHEDULES = ("zb-h1", "zb-v")
# Chimera is left out: a tick that has passes of both directions lasts as long as the backward one,
# and the step longer than that of "aligned", with twice the parameters.
SCHEDULES = tuple(name for name in ALL_SCHEDULES if name != "chimera")
# Without a flush between steps: gradients are of older parameters, which is lossy.
ASYNC_SCHEDULES = ("2bw",)

# What runs in a tick: operations, and whether it is the last chunk that runs them.
_Tick = frozenset[tuple[int, bool]]
_Lockstep = Callable[..., float]  # ``lockstep_seconds`` of a schedule


def chunks_of(schedule: str) -> int:
    """Groups of layers on each device: 2 where there may be several, else 1."""
    return 2 if schedule in ("interleaved", "zb-v") else 1


def check_schedule(
    schedule: str, num_stages: int, microbatches: int, chunks: int = 1, layers: int | None = None
) -> None:
    """Raises unless the schedule exists and takes these numbers, and chunks have layers."""
    if layers is not None and num_stages * chunks > layers:
        raise ValueError(
            f"{num_stages} stages with {chunks} groups of layers each need as many layers; the "
            f"model has {layers}."
        )
    check_choice("schedule", schedule, SCHEDULES + ASYNC_SCHEDULES)
    if min(num_stages, microbatches, chunks) < 1:
        raise ValueError(
            f"stages, micro-batches and chunks must be at least 1, got {num_stages}, "
            f"{microbatches} and {chunks}."
        )
    if schedule == "interleaved":
        if microbatches % num_stages:
            raise ValueError(
                f"schedule 'interleaved' needs micro-batches in multiples of its {num_stages} "
                f"stages, got {microbatches}; {-(-microbatches // num_stages) * num_stages} are "
                "possible."
            )
    elif chunks != chunks_of(schedule):
        has = "one chunk" if chunks_of(schedule) == 1 else f"{chunks_of(schedule)} chunks"
        raise ValueError(f"schedule {schedule!r} has {has} on a device, got chunks={chunks}.")
    elif schedule in ASYNC_SCHEDULES and microbatches < 2 * num_stages - 1:
        raise ValueError(
            f"schedule {schedule!r} needs {2 * num_stages - 1} micro-batches to fill its "
            f"{num_stages} stages, got {microbatches}."
        )


def schedule_of(schedule: str, num_stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The table of a schedule; of an asynchronous one that of an evaluation, with a flush."""
    check_schedule(schedule, num_stages, microbatches, chunks)
    if schedule in ASYNC_SCHEDULES:
        return make_schedule("aligned", num_stages, microbatches)
    more = (chunks,) * (schedule == "interleaved")
    return make_schedule(schedule, num_stages, microbatches, *more)


_WIDE = 4  # bytes of a gradient that is summed


def moved_params(
    schedule: str,
    num_stages: int,
    uneven: Sequence[int],
    layer_bytes: float,
    layer: float,
    shared: float,
) -> list[WorkRow]:
    """What stages of one program send each other in a step, beside messages.

    Sums of gradients of ``shared`` parameters, and ``uneven`` numbers of layers, of so many bytes
    and parameters each, to where they run; their gradients come back.
    """
    rows = [WorkRow("transfers", "all-reduce", _WIDE * shared, ("pipe",))]
    if uneven:
        there, back = _layers_sent(schedule, num_stages, tuple(uneven))
        moved = layer_bytes * there + _WIDE * layer * back
        rows.append(WorkRow("transfers", "permute", moved, ("pipe",)))
    return rows


@functools.lru_cache(maxsize=4096)
def _layers_sent(schedule: str, num_stages: int, counts: tuple[int, ...]) -> tuple[float, float]:
    """How many layers a device sends others in a step, and gradients of layers."""
    stages = np.array([stage_of_chunk(schedule, num_stages, v) for v in range(len(counts))])
    own = np.argsort(stages, kind="stable").reshape(num_stages, -1)
    return StageRows("pipe", layer_of_row(own, counts)).sent((sum(counts), num_stages))


def stage_of_chunk(schedule: str, num_stages: int, chunk: int) -> int:
    """The stage of a chunk: they go around the stages, or down and up again (``zb-v``)."""
    around, stage = divmod(chunk, num_stages)
    return num_stages - 1 - stage if schedule == "zb-v" and around % 2 else stage


class Slots(NamedTuple):
    """What one device of a program stores at once."""

    messages: int  # activations or their gradients that wait
    residuals: int  # chunks whose forward pass waits for its backward pass
    crossing: int  # chunks whose split backward pass waits for its second half


def slots_of(schedule: str, num_stages: int, microbatches: int, chunks: int = 1) -> Slots:
    """Slots of a program, without those of no use: those of its stage with most in flight.

    By the name of a ``schedule``, with S = ``num_stages``, M = ``microbatches`` and V = ``chunks``,
    residuals of the first stage are M for ``gpipe``; S for ``1f1b``; 2 (S - 1) + 1 for ``aligned``
    and ``2bw``; 2 (S - 1) + (V - 1) S + 1 for ``interleaved``; at most all. Those of ``zb-h1`` and
    ``zb-v`` are counted in their tables.
    Sources: GPipe, NeurIPS 2019; DAPPLE, PPoPP 2021; Megatron-LM, SC 2021; Zero Bubble, ICLR 2024.

    >>> slots_of("aligned", 4, 8)
    Slots(messages=2, residuals=7, crossing=0)
    """
    check_schedule(schedule, num_stages, microbatches, chunks)
    if schedule in SPLIT_SCHEDULES:
        return _slots_of_table(schedule, num_stages, _steady(num_stages, microbatches))
    if schedule == "gpipe":
        return Slots(microbatches, microbatches, 0)
    most = 2 * (num_stages - 1) + (chunks - 1) * num_stages + 1
    if schedule == "1f1b":
        most = num_stages
    return Slots(min(microbatches, 2), min(most, chunks * microbatches), 0)


def lockstep_seconds(
    schedule: str,
    num_stages: int,
    microbatches: int,
    forward: float,
    backward: float,
    chunks: int = 1,
    *,
    weight: float = 0.0,
    last: tuple[float, float] | None = None,
) -> float:
    """The time of a ``schedule`` whose ticks end on all devices at once, without transfers.

    A tick lasts as long as its slowest operation. With S = ``num_stages``, M = ``microbatches``,
    V = ``chunks`` on each device, and F, B and W seconds of the slowest chunk, ``gpipe``,
    ``aligned`` and ``interleaved`` take (V M + S - 1) (F + B); where the last chunk runs both of
    its own in one tick of L seconds, (V M + S - 2) F + L + (M - 1) max(B, L) + ((V - 1) M + S - 1)
    B. ``1f1b`` takes S F + (2 M + S - 2) max(F, B); those that split the backward pass about
    (3 V M + S - 1) max(F, B, W); ``2bw`` M (F + B) between two updates.

    F is ``forward``, B ``backward`` and W ``weight``, the second half of a split backward pass;
    ``last`` are B and W of the last chunk where its forward pass is in B, as in ``Pipeline``.

    >>> lockstep_seconds("aligned", 4, 8, 1, 2), lockstep_seconds("1f1b", 4, 8, 1, 2)
    (33, 40)
    >>> lockstep_seconds("aligned", 4, 8, 1, 2, last=(3, 0))
    40
    """
    check_schedule(schedule, num_stages, microbatches, chunks)
    if schedule in ("1f1b", *SPLIT_SCHEDULES):
        cost: dict[int, float] = {Op.FORWARD: forward, Op.BACKWARD: backward, Op.WEIGHT: weight}
        of_last = dict(zip(cost, (0, *last) if last else cost.values(), strict=True))
        ticks = _ticks(schedule, num_stages, microbatches)
        return sum(
            number * max((of_last if is_last else cost)[op] for op, is_last in tick)
            for tick, number in ticks.items()
        )
    if schedule in ASYNC_SCHEDULES:
        return microbatches * (forward + max(backward, last[0] if last else 0))
    passes = chunks * microbatches + num_stages - 1
    if last is None:
        return passes * (forward + backward)
    # The first backward pass of the last chunk is alone in its tick, as its last forward pass is.
    beside = (microbatches - 1) * max(backward, last[0])
    return (passes - 1) * forward + last[0] + beside + (passes - microbatches) * backward


def num_ticks(schedule: str, num_stages: int, microbatches: int, chunks: int = 1) -> int:
    """Ticks of a step, or between updates, in which some device computes."""
    check_schedule(schedule, num_stages, microbatches, chunks)
    if schedule in SPLIT_SCHEDULES:
        return sum(_ticks(schedule, num_stages, microbatches).values())
    if schedule in ASYNC_SCHEDULES:
        return 2 * microbatches
    return 2 * (chunks * microbatches + num_stages - 1)


def _steady(num_stages: int, microbatches: int) -> int:
    """Micro-batches of the shortest table that has everything: more of them repeat its middle."""
    return min(microbatches, 2 * num_stages + 2)


@functools.cache
def _ticks(schedule: str, num_stages: int, microbatches: int) -> Mapping[_Tick, int]:
    """Ticks by what runs in them."""
    steady = _steady(num_stages, microbatches)
    if steady < microbatches:
        counts = _ticks(schedule, num_stages, steady)
        before = _ticks(schedule, num_stages, steady - 1)
        more = microbatches - steady
        return {tick: n + more * (n - before.get(tick, 0)) for tick, n in counts.items()}
    table = schedule_of(schedule, num_stages, microbatches, chunks_of(schedule))
    place = table.routes[0][-1]
    last = (np.arange(num_stages) == place.stage) & (table.chunk == place.chunk)
    return collections.Counter(
        frozenset((op, is_last) for op, is_last in zip(*tick, strict=True) if op != Op.IDLE)
        for tick in zip(table.op.tolist(), last.tolist(), strict=True)
    )


@functools.cache
def _slots_of_table(schedule: str, num_stages: int, microbatches: int) -> Slots:
    table = schedule_of(schedule, num_stages, microbatches, chunks_of(schedule))
    program = instructions(table, recompute=False)
    return Slots(program.num_messages, program.num_residuals, program.num_crossing)


class LayerSeconds(NamedTuple):
    """What a layer adds to a tick of a pipeline."""

    forward: float  # seconds of its forward pass
    backward: float  # of its backward pass; where that is split, of the gradient of the input
    weight: float = 0.0  # of the gradients of parameters, where backward passes are split


def layers_of_chunks(
    layers: int, chunks: int, layer: LayerSeconds, head: float, lockstep: _Lockstep | None = None
) -> tuple[int, ...]:
    """Layers of each chunk, of which the last one has the head, seconds of both passes.

    By the least time of ``lockstep``, the ``lockstep_seconds`` of the schedule; None: as equal as
    possible.
    """
    most = math.ceil(layers / chunks)
    if lockstep is None or chunks == 1:
        return shared_layers(layers, chunks, most)
    largest = layers - chunks + 1  # every chunk has a layer
    forward, backward, weight = layer
    both = forward + backward

    def time(most: int) -> tuple[float, int]:
        *others, last = shared_layers(layers, chunks, most)
        n = max(others)
        of_last = (last * both + head, last * weight)
        return lockstep(n * forward, n * backward, weight=n * weight, last=of_last), most

    # The last chunk runs both of its passes in one tick. Where that is as long for the others, or
    # near it, the time is least: it is convex in the number of their layers.
    level = round((layers * both + head) / (max(layer) + (chunks - 1) * both))
    most = min(max(level, 1), largest)
    for step in (-1, 1):
        while 1 <= most + step <= largest and time(most + step) < time(most):
            most += step
    return shared_layers(layers, chunks, most)


def shared_layers(layers: int, chunks: int, most: int) -> tuple[int, ...]:
    """Layers of each chunk, at most so many in all but the last one, which has at least 1.

    >>> shared_layers(32, 8, 5)
    (4, 4, 4, 4, 5, 5, 5, 1)
    """
    if chunks == 1:
        return (layers,)
    # Early stages have more micro-batches in flight, and the fewer layers.
    last = max(1, layers - (chunks - 1) * most)
    fewer, more = divmod(layers - last, chunks - 1)
    return (*[fewer] * (chunks - 1 - more), *[fewer + 1] * more, last)
