"""Lowered schedules: a replay in plain Python shows that every operation reads what was sent."""

import numpy as np
import pytest

from sharding.pipeline import Op, Place, Schedule, interleaved, one_f_one_b
from sharding.pipeline._instructions import instructions

from .families import CASES, FAMILIES, ticks_of

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
recomputes = pytest.mark.parametrize("recompute", [True, False])


class Stage:
    """Slots of a stage: tuples of a kind, a micro-batch and a virtual stage."""

    def __init__(self):
        self.messages, self.residuals, self.crossing = {}, {}, {}

    def run(self, code, column, recompute, forward_only, split):
        """One operation; returns the message to send, or None."""
        m, v = column["microbatch"], column["virtual_stage"]
        recomputes = code.op == Op.FORWARD or recompute or code.last
        if code.op == Op.WEIGHT:
            assert self.crossing.pop(column["crossing"]) == ("crossing", m, v)
            return None
        if code.op == Op.FORWARD and code.last and not forward_only:
            return None  # runs as the first half of its backward pass
        if recomputes and not code.first:
            assert self.messages[column["input"]] == ("input", m, v)
        if code.op == Op.FORWARD:
            if not (recompute or forward_only):
                self.put(self.residuals, column["to_residuals"], ("residual", m, v))
            return None if code.last else ("input", m, v + 1)
        if not recomputes:
            assert self.residuals.pop(column["residual"]) == ("residual", m, v)
        if not code.last:
            assert self.messages[column["cotangent"]] == ("cotangent", m, v)
        if split:
            self.put(self.crossing, column["to_crossing"], ("crossing", m, v))
        return None if code.first else ("cotangent", m, v - 1)

    @staticmethod
    def put(slots, slot, value):
        assert slot not in slots, "read before it is overwritten"
        slots[slot] = value


def replay(schedule, recompute):
    """Runs the tables of a schedule; raises AssertionError where an operation reads another's."""
    program = instructions(schedule, recompute)
    stages = [Stage() for _ in range(schedule.num_stages)]
    ran = []
    for phase, columns in ticks_of(program):
        row = replay_tick(schedule, recompute, program, phase, stages, columns)
        ran += [row] if any(task is not None for task in row) else []
    expected = [[None] * schedule.num_stages for _ in range(schedule.num_ticks)]
    for tick, stage, task in schedule.tasks():
        expected[tick][stage] = (*task, schedule.chunk[tick, stage])
    assert ran == [row for row in expected if any(task is not None for task in row)]
    assert not any(stage.residuals or stage.crossing for stage in stages)
    return program


def replay_tick(schedule, recompute, program, phase, stages, columns):
    size, last = schedule.num_stages, schedule.num_virtual_stages - 1
    options = recompute, schedule.forward_only, schedule.splits_backward
    sent, ran = [None] * size, [None] * size
    for s, (stage, column) in enumerate(zip(stages, columns, strict=True)):
        if not column["code"]:
            continue
        code = phase.codes[column["code"] - 1]
        v = column["virtual_stage"]
        assert (code.first, code.last) == (v == 0, v == last)
        sent[s] = stage.run(code, column, *options)
        ran[s] = (code.op, column["microbatch"], v, column["chunk"])
    delivered = [False] * size
    for pairs, name, step in [(phase.right, "from_left", 1), (phase.left, "from_right", -1)]:
        if not pairs:
            assert all(column[name] == program.num_messages for column in columns)
            continue
        senders, receivers = zip(*pairs, strict=True)
        assert len(set(senders)) == len(set(receivers)) == len(pairs)
        # Around the ring, one device on; with two stages both neighbours are one.
        assert all((b - a) % size == step % size for a, b in pairs)
        arrived = {b: (a, sent[a]) for a, b in pairs}  # others receive zeros
        for s, (stage, column) in enumerate(zip(stages, columns, strict=True)):
            sender, message = arrived.get(s, (None, None))
            stage.messages[column[name]] = message
            if column[name] < program.num_messages:
                assert message is not None
                delivered[sender] = True
    for s, (stage, column) in enumerate(zip(stages, columns, strict=True)):
        if phase.stays:
            stage.messages[column["from_self"]] = sent[s]
        if column["from_self"] < program.num_messages:
            assert phase.stays
            delivered[s] = True
    assert delivered == [message is not None for message in sent]
    return ran


@cases
def test_operations_read_what_was_sent_to_them(case):
    name, stages, microbatches = case
    schedule = FAMILIES[name](stages, microbatches)
    for recompute in (True, False):
        program = replay(schedule, recompute)
        assert program.num_residuals <= (0 if recompute else max(schedule.check().live))
        assert (program.num_crossing > 0) == schedule.splits_backward
    evaluation = replay(schedule.without_backward(), recompute=True)
    assert evaluation.num_residuals == evaluation.num_crossing == 0


@recomputes
def test_tables_of_others_read_what_was_sent_to_them(recompute):
    orders = "0F0,0F1,3F0,3B0,3W0,3F1,3B1,0B0,3W1,0B1,0W0,0W1\n1F0,1F1,1B0,1B1,1W0,1W1\n"
    orders += "2F0,2F1,2B0,2B1,2W0,2W1"  # four virtual stages around three stages
    replay(Schedule.from_csv(orders, retime=True), recompute)
    # Layers on other chunks than in the order of virtual stages.
    route = tuple(Place(v % 2, 1 - v // 2) for v in range(4))
    base = interleaved(2, 4)
    chunk = np.where(base.op > 0, 1 - base.chunk, 0)
    replay(Schedule("x", base.op, base.microbatch, chunk, (route,), (0,) * 4), recompute)


# By family: permutes in each tick.
PERMUTES = {"gpipe": 1, "1f1b-aligned": 1, "interleaved-2-aligned": 1}
PERMUTES |= dict.fromkeys(("1f1b", "interleaved-2", "zb-h1", "zb-v", "chimera"), 2)


def collectives(schedule):
    """Of the ticks that run: how many there are, and how many permutes each runs on average."""
    segments = instructions(schedule, recompute=True).segments
    ticks = sum(len(s.tables["code"]) * len(s.phases) for s in segments)
    permutes = sum(
        len(s.tables["code"]) * sum(bool(p.right) + bool(p.left) for p in s.phases)
        for s in segments
    )
    return ticks, permutes / ticks


@pytest.mark.parametrize("name", PERMUTES)
def test_slots_do_not_grow_and_loops_send_only_where_their_ticks_do(name):
    schedule = FAMILIES[name](4, 8)
    period = len(instructions(schedule, True).segments[0].phases)
    ticks = schedule.num_ticks + schedule.num_ticks % period
    assert collectives(schedule) == (ticks, PERMUTES[name])
    if name != "chimera":
        assert collectives(FAMILIES[name](1, 4))[1] == 0
    for recompute in (True, False):
        few, many = (instructions(FAMILIES[name](4, m), recompute) for m in (16, 48))
        if name == "gpipe":
            kind = "num_messages" if recompute else "num_residuals"
            assert [getattr(x, kind) for x in (few, many)] == [16 + recompute, 48 + recompute]
            continue
        assert many[1:] == few[1:]
        live = max(FAMILIES[name](4, 16).check().live)
        # Beside inputs, of which one may arrive early, cotangents that wait.
        assert few.num_messages <= live + (4 if recompute else 1)


def test_stages_that_are_not_neighbours():
    base, order = one_f_one_b(4, 4), [0, 2, 1, 3]
    route = tuple(Place(stage, 0) for stage in order)
    tables = (table[:, order] for table in (base.op, base.microbatch, base.chunk))
    schedule = Schedule("jumps", *tables, (route,), (0,) * 4)
    schedule.check()
    with pytest.raises(ValueError, match="jumps: stage 0 sends to stage 2; only neighbours on"):
        instructions(schedule, recompute=True)


def test_routes_that_are_not_replicas():
    text = "0F0,,,0B0,0F1,1F1,1B1,0B1\n,1F0,1B0"  # one of the two stays on its stage
    with pytest.raises(ValueError, match="csv: a pipeline runs one route, or two that lead"):
        instructions(Schedule.from_csv(text), recompute=True)
