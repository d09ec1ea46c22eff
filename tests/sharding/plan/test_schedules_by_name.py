"""Schedules that planners know by name: their figures are those of the tables, and of programs."""

import functools
import math

import numpy as np
import pytest

from sharding.pipeline import Costs, Op, pipedream_2bw
from sharding.pipeline._instructions import instructions
from sharding.pipeline.asynchronous._async_executor import versions_of
from sharding.plan.cost._pipeline_schedules import (
    SCHEDULES,
    LayerSeconds,
    all_chunks,
    bubble_share,
    chunks_of,
    layers_of_chunks,
    lockstep_seconds,
    max_in_flight,
    num_ticks,
    schedule_of,
    slots_of,
    stage_of_chunk,
)

from ..pipeline.families import seconds_in_lockstep


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("stages", "microbatches"),
    [(1, 1), (2, 1), (2, 2), (2, 6), (3, 2), (3, 9), (4, 4), (4, 12), (5, 15), (4, 40)],
)
def test_figures_by_name_equal_the_tables(schedule, stages, microbatches):
    if schedule == "interleaved" and microbatches % stages:
        pytest.skip("takes multiples of its stages")
    args, chunks = (schedule, stages, microbatches), chunks_of(schedule)
    table = schedule_of(*args, chunks)
    figures = table.check()
    for forward, backward, weight in ((1, 2, 3), (1, 3, 2), (2, 2, 2), (3, 1, 2)):
        costs = Costs(forward, backward, weight if table.splits_backward else None)
        expected = table.lockstep_time(costs)
        assert lockstep_seconds(*args, forward, backward, chunks, weight=weight) == expected
    found = [max_in_flight(schedule, stages, s, microbatches, chunks) for s in range(stages)]
    assert tuple(found) == figures.live
    busy = np.count_nonzero(np.any(table.op, axis=1))
    assert num_ticks(*args, chunks) == busy
    assert bubble_share(*args, chunks) == pytest.approx(1 - max(figures.busy) / busy)
    where = [place.stage for place in table.routes[0]]
    assert [stage_of_chunk(schedule, stages, v) for v in range(len(where))] == where


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (2, 4), (3, 9), (4, 8), (4, 40)])
def test_the_last_chunk_runs_both_passes_in_one_tick(schedule, stages, microbatches):
    if schedule == "interleaved" and microbatches % stages:
        pytest.skip("takes multiples of its stages")
    chunks = chunks_of(schedule)
    table = schedule_of(schedule, stages, microbatches, chunks)
    weight = 2.0 if table.splits_backward else 0.0
    for forward, backward, rest, head in ((1, 2, 1, 0), (1, 3, 1, 5), (2, 3, 2, 1)):
        layers = [2] * (stages * chunks - 1) + [rest]
        expected = seconds_in_lockstep(
            table, layers, forward=forward, backward=backward, weight=weight, head=head
        )
        found = lockstep_seconds(
            *(schedule, stages, microbatches, 2 * forward, 2 * backward, chunks),
            weight=2 * weight,
            last=(rest * (forward + backward) + head, rest * weight),
        )
        assert found == expected


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (4, 4), (4, 12), (5, 40)])
def test_slots_by_name_are_those_of_programs(schedule, stages, microbatches):
    chunks = chunks_of(schedule)
    program = instructions(schedule_of(schedule, stages, microbatches, chunks), recompute=False)
    expected = program.num_messages, program.num_residuals, program.num_crossing
    assert slots_of(schedule, stages, microbatches, chunks) == expected


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("head", [0.0, 2.5, 9.0])
@pytest.mark.parametrize(
    ("layers", "stages", "microbatches"), [(8, 2, 4), (12, 4, 8), (13, 3, 3), (24, 2, 16)]
)
def test_chunks_share_layers_so_that_a_step_is_fastest(
    schedule, head, layers, stages, microbatches
):
    """By all numbers of the last chunk, and of the largest other one."""
    chunks = chunks_of(schedule)
    number = stages * chunks
    table = schedule_of(schedule, stages, microbatches, chunks)
    layer = LayerSeconds(1.0, 1.2, 0.9) if table.splits_backward else LayerSeconds(1.0, 2.1)

    def taken(last):
        return seconds_in_lockstep(
            *(table, [*[math.ceil((layers - last) / (number - 1))] * (number - 1), last]),
            forward=layer.forward,
            backward=layer.backward,
            weight=layer.weight,
            head=head,
        )

    lockstep = functools.partial(lockstep_seconds, schedule, stages, microbatches, chunks=chunks)
    most, last = layers_of_chunks(layers, number, layer, head, lockstep)
    least = min(taken(n) for n in range(1, layers - number + 2))
    assert taken(last) == pytest.approx(least)
    shared = all_chunks(layers, number, last)
    assert sum(shared) == layers
    assert shared[-1] == last
    assert max(shared[:-1]) == most


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 3), (2, 8), (4, 7), (4, 12)])
def test_figures_without_a_flush(stages, microbatches):
    """What one more update adds to the table of 2BW, beside its own ticks."""
    few, more = (pipedream_2bw(stages, microbatches, updates) for updates in (3, 4))
    for forward, backward, of_last in ((1, 2, 3), (2, 3, 3), (1, 2, 1)):
        added = [
            seconds_in_lockstep(
                *(table, [1] * (stages - 1) + [0]), forward=forward, backward=backward, head=of_last
            )
            for table in (few, more)
        ]
        found = lockstep_seconds(
            *("2bw", stages, microbatches, forward, backward), last=(of_last, 0)
        )
        assert found == added[1] - added[0]
    program = instructions(more, recompute=False, versions=versions_of(more))
    slots = slots_of("2bw", stages, microbatches)
    assert slots == (program.num_messages, program.num_residuals, 0)
    assert program.num_versions == 2
    busy = [np.count_nonzero(np.any((t.op > 0) & (t.op != Op.UPDATE), axis=1)) for t in (few, more)]
    assert num_ticks("2bw", stages, microbatches) == busy[1] - busy[0]
    assert bubble_share("2bw", stages, microbatches) == 0


def test_schedules_reject_bad_numbers():
    with pytest.raises(ValueError, match="needs 7 micro-batches to fill its 4 stages, got 6"):
        max_in_flight("2bw", 4, 0, 6)
    with pytest.raises(ValueError, match="multiples of its 4 stages, got 6; 8 are possible"):
        bubble_share("interleaved", 4, 6, 2)
    with pytest.raises(ValueError, match="has one chunk on a device, got chunks=2"):
        bubble_share("gpipe", 4, 6, 2)
