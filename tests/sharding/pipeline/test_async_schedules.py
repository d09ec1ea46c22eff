"""Tables of asynchronous pipelines: figures, mutants, and a replay of versions slot by slot."""

import dataclasses

import numpy as np
import pytest

from sharding.pipeline import Op, ScheduleError, one_f_one_b, pipedream, pipedream_2bw, pipemare
from sharding.pipeline._instructions import instructions

from .families import ticks_of

U = Op.UPDATE
STAGES, MINIBATCHES = (1, 2, 4), (1, 12)


def every():
    for stages in STAGES:
        for n in MINIBATCHES:
            for aligned in (False, True):
                yield pipedream(stages, n, aligned=aligned)
                yield pipedream(stages, n, vertical_sync=True, aligned=aligned)
                for m in (1, 3):
                    yield pipedream_2bw(stages, m, n, aligned=aligned)
                    yield pipemare(stages, m, n, aligned=aligned)


ALL = list(every())


def test_every_table_passes_the_check():
    for schedule in ALL:
        figures, name = schedule.check(), schedule.name
        stale = "pipemare" in name and schedule.num_stages > 1 and schedule.num_updates > 1
        assert schedule.stashes_weights == (not stale), name
        busy = 2 * schedule.num_microbatches + schedule.num_updates
        assert all(each == busy for each in figures.busy), name


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("aligned", [False, True])
def test_versions_and_delays_of_pipedream(stages, aligned):
    behind = np.arange(stages)[::-1] * (2 if aligned else 1)
    schedule = pipedream(stages, 50, aligned=aligned)
    assert schedule.check().weight_versions == tuple(behind + 1)
    for delays in schedule.delays():
        np.testing.assert_array_equal(delays, behind)
    vertical = pipedream(stages, 50, vertical_sync=True, aligned=aligned)
    assert vertical.check().weight_versions == (behind[0] + 1,) * stages
    for delays in vertical.delays():
        np.testing.assert_array_equal(delays, behind[0])


@pytest.mark.parametrize(
    ("stages", "microbatches"), [(1, 3), (2, 1), (3, 7), (4, 1), (4, 3), (8, 10)]
)
@pytest.mark.parametrize("aligned", [False, True])
def test_two_versions_of_2bw_and_one_of_pipemare(stages, microbatches, aligned):
    schedule = pipedream_2bw(stages, microbatches, 12, aligned=aligned)
    assert schedule.check().weight_versions == (2,) * stages
    for delays in schedule.delays():
        np.testing.assert_array_equal(delays, 1)
    schedule = pipemare(stages, microbatches, 40, aligned=aligned)
    assert schedule.check().weight_versions == (1,) * stages
    forward, backward = schedule.delays()
    behind = np.arange(stages)[::-1] * (2 if aligned else 1)
    np.testing.assert_allclose(forward, behind / microbatches, rtol=1e-12)
    np.testing.assert_array_equal(backward, 0)


def changed(schedule, name, tick, stage, value):
    table = getattr(schedule, name).copy()
    table[tick, stage] = value
    return dataclasses.replace(schedule, **{name: table})


CASES = [
    pipedream(3, 6),
    pipedream(4, 5, vertical_sync=True, aligned=True),
    pipedream_2bw(3, 4, 3),
    pipemare(4, 2, 5, aligned=False),
]
cases = pytest.mark.parametrize("schedule", CASES, ids=lambda s: s.name)


@cases
def test_versions_that_are_not_there_are_rejected(schedule):
    for tick, stage in np.argwhere(schedule.op != Op.IDLE).tolist():
        done = int(np.sum(schedule.op[:tick, stage] == U))
        is_update = schedule.op[tick, stage] == U
        for version in (-1, done + (2 if is_update else 1)):
            mutant = changed(schedule, "version", tick, stage, version)
            with pytest.raises(ScheduleError, match=f"tick {tick}, stage {stage}"):
                mutant.check()


@cases
def test_updates_must_be_there_once_in_order_and_of_their_minibatch(schedule):
    for tick, stage in np.argwhere(schedule.op == U).tolist():
        with pytest.raises(ScheduleError, match=f"stage {stage}"):
            changed(schedule, "op", tick, stage, Op.IDLE).check()
        for microbatch in {*range(schedule.num_microbatches)} - {schedule.microbatch[tick, stage]}:
            with pytest.raises(ScheduleError, match="stage"):
                changed(schedule, "microbatch", tick, stage, microbatch).check()
        # Moved before the backward pass that it follows.
        before = int(np.max(np.flatnonzero(schedule.op[:tick, stage] == Op.BACKWARD)))
        tables = {}
        for name in ("op", "microbatch", "version"):
            tables[name] = getattr(schedule, name).copy()
            tables[name][[tick, before], stage] = tables[name][[before, tick], stage]
        with pytest.raises(ScheduleError, match=f"stage {stage}"):
            dataclasses.replace(schedule, **tables).check()


def test_the_last_stage_has_one_version_for_both_passes():
    schedule = pipedream_2bw(3, 2, 4)
    last = schedule.num_stages - 1
    ticks = np.flatnonzero((schedule.op[:, last] == Op.BACKWARD) & (schedule.version[:, last] > 0))
    mutant = changed(schedule, "version", int(ticks[0]), last, 0)
    with pytest.raises(ScheduleError, match="they run together"):
        mutant.check()


def test_tables_that_are_not_asynchronous():
    sync = one_f_one_b(2, 2)
    op = sync.op.copy()
    op[-1, 1] = U
    with pytest.raises(ScheduleError, match="4 is no operation"):
        dataclasses.replace(sync, op=op).check()
    with pytest.raises(ScheduleError, match="not a multiple"):
        dataclasses.replace(pipedream(2, 3), microbatches_per_update=2)
    with pytest.raises(ScheduleError, match="must be a table of shape"):
        dataclasses.replace(pipedream(2, 3), version=np.zeros((2, 2)))
    with pytest.raises(ScheduleError, match="no updates and no versions"):
        pipedream(2, 3).to_csv()


@pytest.mark.parametrize("schedule", [s for s in ALL if s.num_updates > 1 and s.num_stages != 2])
def test_operations_read_the_slot_of_their_version(schedule):
    program = instructions(schedule, recompute=True)
    assert program.num_versions == max(schedule.check().weight_versions)
    slots = [dict.fromkeys(range(program.num_versions), 0) for _ in range(schedule.num_stages)]
    ran = np.zeros(schedule.num_stages, np.int64)
    for phase, columns in ticks_of(program):
        for s, (versions, column) in enumerate(zip(slots, columns, strict=True)):
            if not column["code"]:
                continue
            op, m = phase.codes[column["code"] - 1].op, column["microbatch"]
            where = (schedule.op[:, s] == op) & (schedule.microbatch[:, s] == m)
            (version,) = schedule.version[where, s]
            assert versions[column["version"]] == version - (op == U)
            if op == U:
                versions[column["new_version"]] = version
            ran[s] += 1
    assert np.all(ran == np.sum(schedule.op != Op.IDLE, axis=0))
    for versions, last in zip(slots, program.last_version, strict=True):
        assert versions[last] == schedule.num_updates
