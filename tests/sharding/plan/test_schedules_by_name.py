"""Schedules that planners know by name: their figures are those of the tables, and of programs."""

import functools
import math

import numpy as np
import pytest

from sharding.pipeline import Costs, Op, pipedream_2bw
from sharding.pipeline._instructions import instructions
from sharding.plan.cost import _pipeline_schedules as by_name

from ..pipeline.families import seconds_in_lockstep, takes

SIZES = [
    *[(1, 1), (2, 1), (2, 2), (2, 4), (2, 6), (3, 2), (3, 9)],
    *[(4, 4), (4, 8), (4, 12), (4, 40), (5, 15), (5, 40)],
]
ARGS = [(name, *size) for name in by_name.SCHEDULES for size in SIZES if takes(name, *size)]


@pytest.mark.parametrize(("schedule", "stages", "microbatches"), ARGS)
def test_figures_by_name_equal_the_tables(schedule, stages, microbatches):
    args, chunks = (schedule, stages, microbatches), by_name.chunks_of(schedule)
    table = by_name.schedule_of(*args, chunks)
    figures = table.check()
    for forward, backward, weight in ((1, 2, 3), (1, 3, 2), (2, 2, 2), (3, 1, 2)):
        costs = Costs(forward, backward, weight if table.splits_backward else None)
        expected = table.lockstep_time(costs)
        assert by_name.lockstep_seconds(*args, forward, backward, chunks, weight=weight) == expected
    if not table.splits_backward:
        assert by_name.slots_of(*args, chunks).residuals == max(figures.live)
    busy = np.count_nonzero(np.any(table.op, axis=1))
    assert by_name.num_ticks(*args, chunks) == busy
    where = [place.stage for place in table.routes[0]]
    assert [by_name.stage_of_chunk(schedule, stages, v) for v in range(len(where))] == where
    if stages > 1:  # one stage sends nothing
        program = instructions(table, recompute=False)
        slots = program.num_messages, program.num_residuals, program.num_crossing
        assert by_name.slots_of(*args, chunks) == slots


@pytest.mark.parametrize(("schedule", "stages", "microbatches"), ARGS)
def test_the_last_chunk_runs_both_passes_in_one_tick(schedule, stages, microbatches):
    chunks = by_name.chunks_of(schedule)
    table = by_name.schedule_of(schedule, stages, microbatches, chunks)
    weight = 2.0 if table.splits_backward else 0.0
    for forward, backward, rest, head in ((1, 2, 1, 0), (1, 3, 1, 5), (2, 3, 2, 1)):
        layers = [2] * (stages * chunks - 1) + [rest]
        expected = seconds_in_lockstep(
            table, layers, forward=forward, backward=backward, weight=weight, head=head
        )
        found = by_name.lockstep_seconds(
            *(schedule, stages, microbatches, 2 * forward, 2 * backward, chunks),
            weight=2 * weight,
            last=(rest * (forward + backward) + head, rest * weight),
        )
        assert found == expected


@pytest.mark.parametrize("schedule", by_name.SCHEDULES)
@pytest.mark.parametrize("head", [0.0, 2.5, 9.0])
@pytest.mark.parametrize(
    ("layers", "stages", "microbatches"), [(8, 2, 4), (12, 4, 8), (13, 3, 3), (24, 2, 16)]
)
def test_chunks_share_layers_so_that_a_step_is_fastest(
    schedule, head, layers, stages, microbatches
):
    """By all numbers of the last chunk, and of the largest other one."""
    chunks = by_name.chunks_of(schedule)
    number = stages * chunks
    table = by_name.schedule_of(schedule, stages, microbatches, chunks)
    layer = by_name.LayerSeconds(*((1.0, 1.2, 0.9) if table.splits_backward else (1.0, 2.1)))

    def taken(last):
        return seconds_in_lockstep(
            *(table, [*[math.ceil((layers - last) / (number - 1))] * (number - 1), last]),
            forward=layer.forward,
            backward=layer.backward,
            weight=layer.weight,
            head=head,
        )

    args = schedule, stages, microbatches
    lockstep = functools.partial(by_name.lockstep_seconds, *args, chunks=chunks)
    shared = by_name.layers_of_chunks(layers, number, layer, head, lockstep)
    least = min(taken(n) for n in range(1, layers - number + 2))
    assert taken(shared[-1]) == pytest.approx(least)
    assert sum(shared) == layers
    assert max(shared[:-1]) == math.ceil((layers - shared[-1]) / (number - 1))


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
        found = by_name.lockstep_seconds(
            "2bw", stages, microbatches, forward, backward, last=(of_last, 0)
        )
        assert found == added[1] - added[0]
    program = instructions(more, recompute=False)
    slots = by_name.slots_of("2bw", stages, microbatches)
    assert slots == (program.num_messages, program.num_residuals, 0)
    assert program.num_versions == 2
    busy = [np.count_nonzero(np.any((t.op > 0) & (t.op != Op.UPDATE), axis=1)) for t in (few, more)]
    assert by_name.num_ticks("2bw", stages, microbatches) == busy[1] - busy[0]


def test_schedules_reject_bad_numbers():
    with pytest.raises(ValueError, match="multiples of its 4 stages, got 6; 8 are possible"):
        by_name.num_ticks("interleaved", 4, 6, 2)
    with pytest.raises(ValueError, match="has one chunk on a device, got chunks=2"):
        by_name.num_ticks("gpipe", 4, 6, 2)
