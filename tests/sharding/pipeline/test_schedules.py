"""Tables of schedules: their figures, what is rejected, and the forms in which they are shown."""

import itertools
import re

import numpy as np
import pytest

from sharding.pipeline import (
    Costs,
    Op,
    Place,
    Schedule,
    ScheduleError,
    chimera,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_v,
)

from .families import CASES, FAMILIES, SIZES

F, B, W = Op.FORWARD, Op.BACKWARD, Op.WEIGHT
COSTS = [Costs(1, 1), Costs(1, 2), Costs(1, 2.88), Costs(3, 0.5)]


# --- Figures, from the papers ---------------------------------------------------------------------


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_figures_of_gpipe(stages, microbatches):
    figures = gpipe(stages, microbatches).check()
    assert figures.ticks == 2 * (microbatches + stages - 1)
    assert figures.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert figures.live == (microbatches,) * stages
    assert figures.busy == (2 * microbatches,) * stages
    assert figures.weight_copies == 1


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_figures_of_1f1b(stages, microbatches):
    figures = one_f_one_b(stages, microbatches, aligned=False).check()
    assert figures.ticks == 2 * (microbatches + stages - 1)
    assert figures.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert figures.live == tuple(min(stages - s, microbatches) for s in range(stages))


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_figures_of_aligned_1f1b(stages, microbatches):
    schedule = one_f_one_b(stages, microbatches)
    figures = schedule.check()
    assert figures.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert figures.live == tuple(min(2 * (stages - 1 - s) + 1, microbatches) for s in range(stages))
    for costs in COSTS:
        time = (microbatches + stages - 1) * (costs.forward + costs.backward)
        assert schedule.lockstep_time(costs) == pytest.approx(time)
        assert schedule.event_time(costs) == pytest.approx(time)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize(("stages", "microbatches"), [s for s in SIZES if s[1] % s[0] == 0])
def test_figures_of_interleaved(stages, microbatches, chunks, aligned):
    schedule = interleaved(stages, microbatches, chunks, aligned=aligned)
    figures = schedule.check()
    units = chunks * microbatches
    assert figures.bubble == pytest.approx((stages - 1) / (units + stages - 1))
    assert figures.live == tuple(
        min(2 * (stages - 1 - s) + (chunks - 1) * stages + 1, units) for s in range(stages)
    )
    for costs in COSTS:
        time = (units + stages - 1) * (costs.forward + costs.backward)
        assert schedule.event_time(costs) == pytest.approx(time)
        if aligned:
            assert schedule.lockstep_time(costs) == pytest.approx(time)


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_figures_of_zb_h1(stages, microbatches):
    schedule = zb_h1(stages, microbatches)
    figures = schedule.check()
    assert figures.live == (min(stages, microbatches),) * stages
    if microbatches < stages:
        return
    assert figures.ticks == 3 * microbatches + stages - 1
    assert figures.bubble == pytest.approx((stages - 1) / (3 * microbatches + stages - 1))
    for f, b, w in [(1, 1, 1), (1, 1.25, 0.75), (2, 2, 1)]:
        bubble = (stages - 1) * (f + b - w)
        assert schedule.event_time(Costs(f, b, w)) == pytest.approx(
            microbatches * (f + b + w) + bubble
        )


@pytest.mark.parametrize(
    ("stages", "microbatches"), [*SIZES, (3, 4), (4, 6), (5, 9), (8, 14), (8, 15)]
)
def test_figures_of_zb_v(stages, microbatches):
    figures = zb_v(stages, microbatches).check()
    assert max(figures.live) <= 2 * stages
    if microbatches >= 2 * stages - 2:
        assert figures.ticks == 6 * microbatches + stages - 1
        assert figures.bubble == pytest.approx((stages - 1) / figures.ticks)


@pytest.mark.parametrize("stages", [2, 4, 6, 8, 10, 12, 14, 16])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_figures_of_chimera(stages, groups):
    microbatches = groups * stages
    figures = chimera(stages, microbatches).check()
    assert figures.ticks == 2 * microbatches + stages - 2
    assert figures.bubble == pytest.approx((stages - 2) / figures.ticks)
    assert figures.weight_copies == 2
    if groups == 1:
        live = [stages // 2 + 1 + min(s, stages - 1 - s) for s in range(stages)]
        assert figures.live == tuple(live)
    else:
        assert figures.live == (stages,) * stages


def test_activations_are_stored_until_their_last_operation_is_complete():
    assert one_f_one_b(2, 2, aligned=False).live().T.tolist() == [
        [1, 2, 2, 2, 1, 1],  # F0 F1 . B0 . B1
        [0, 1, 1, 1, 1, 0],  # . F0 B0 F1 B1 .
    ]
    assert zb_h1(1, 2).live().T.tolist() == [[1] * 6]


# Units of one stage's forward pass. A tick takes as long as its slowest stage.
LOCKSTEP = [
    # Residuals are stored: a backward pass takes 2.
    (lambda s, m: one_f_one_b(s, m, aligned=False), Costs(1, 2), 40, 276),
    (one_f_one_b, Costs(1, 2), 33, 213),
    (interleaved, Costs(0.5, 1), 28.5, 202.5),
    (chimera, Costs(1, 2), 30, 246),
    (zb_h1, Costs(1, 1, 1), 27, 199),
    (zb_v, Costs(0.5, 0.5, 0.5), 25.5, 195.5),
    # Backward passes compute the forward pass again: 2.88 as measured.
    (lambda s, m: one_f_one_b(s, m, aligned=False), Costs(1, 2.88), 55.8, 393.9),
    (one_f_one_b, Costs(1, 2.88), 42.7, 275.5),
    (interleaved, Costs(0.5, 1.44), 36.9, 261.9),
    (lambda s, m: interleaved(s, m, aligned=False), Costs(0.5, 1.44), 47.2, 373.8),
    (zb_h1, Costs(1, 1.88, 1), 46.4, 366.2),
    (zb_h1, Costs(1, 1.88, 2.75), 63.8, 526.3),
]


@pytest.mark.parametrize(("family", "costs", "small", "large"), LOCKSTEP)
def test_lockstep_times(family, costs, small, large):
    assert family(4, 8).lockstep_time(costs) == pytest.approx(small, abs=0.051)
    assert family(8, 64).lockstep_time(costs) == pytest.approx(large, abs=0.051)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_lockstep_is_never_faster_than_events(case):
    name, stages, microbatches = case
    schedule = FAMILIES[name](stages, microbatches)
    for costs in [None, Costs(1, 1, 1), Costs(1, 2.5, 0.5), Costs(2, 1, 3)]:
        assert schedule.event_time(costs) <= schedule.lockstep_time(costs) + 1e-9
    default = Costs(1, 1, 1) if name.startswith("zb") else Costs(1, 2)
    assert schedule.lockstep_time() == schedule.lockstep_time(default)
    assert schedule.event_time() == schedule.event_time(default)
    if stages == 1:
        assert schedule.check().bubble == 0
        assert schedule.lockstep_time() == schedule.event_time()


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_messages(case):
    name, stages, microbatches = case
    figures = FAMILIES[name](stages, microbatches).check()
    chunks = {"interleaved-2": 2, "interleaved-3": 3}.get(name.removesuffix("-aligned"), 1)
    total = 2 * microbatches * (chunks * stages - 1)  # each boundary, once in each direction
    if name == "zb-v":
        total = 4 * microbatches * (stages - 1)  # the turn of the V stays on its stage
    if stages == 1:
        total = 0
    assert sum(figures.messages) == total


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_evaluation(case):
    name, stages, microbatches = case
    schedule = FAMILIES[name](stages, microbatches)
    forward = schedule.without_backward()
    assert forward.forward_only
    assert not schedule.forward_only
    figures = forward.check()
    assert np.all(forward.op[forward.op > 0] == F)
    each = {"interleaved-2": 2, "interleaved-3": 3, "zb-v": 2}
    chunks = each.get(name.removesuffix("-aligned"), 1)
    assert figures.busy == (chunks * microbatches,) * stages
    if name in ("gpipe", "1f1b", "1f1b-aligned", "zb-h1"):
        assert figures.ticks == microbatches + stages - 1


# --- An independent checker -----------------------------------------------------------------------


def first_fault(schedule):
    """Plays a table as a game of tokens: every operation takes some and leaves others.

    Tokens left in a tick can be taken in later ones. An operation that finds none is the fault.

    Returns:
      None if every token is where it should be in the end, "missing" if not, or the tick and stage
      of the first operation that cannot run.
    """
    last, ops = len(schedule.routes[0]) - 1, set(schedule.op.ravel().tolist())
    tokens = {("x", m, 0) for m in range(len(schedule.route_of))}
    for tick in range(schedule.op.shape[0]):
        left = set()
        for stage in range(schedule.op.shape[1]):
            op, m, chunk = (
                int(t[tick, stage]) for t in (schedule.op, schedule.microbatch, schedule.chunk)
            )
            if op == Op.IDLE:
                continue
            places = (
                [] if not 0 <= m < len(schedule.route_of) else schedule.routes[schedule.route_of[m]]
            )
            if (stage, chunk) not in places:
                return tick, stage
            v = places.index((stage, chunk))
            if op == F:
                takes, leaves = {("x", m, v)}, {("saved", m, v)}
                leaves.add(("g", m, v) if v == last else ("x", m, v + 1))
            elif op == B:
                takes, leaves = {("saved", m, v), ("g", m, v)}, {("half", m, v)}
                leaves |= {("g", m, v - 1)} if v else set()
            else:
                takes, leaves = {("half", m, v)}, {("done", m, v)}
            if not takes <= tokens:
                return tick, stage
            tokens -= takes
            left |= leaves
        tokens |= left
    end = "done" if W in ops else "half" if B in ops else "saved"
    want = {(end, m, v) for m in range(len(schedule.route_of)) for v in range(last + 1)}
    if end == "saved":
        want |= {("g", m, last) for m in range(len(schedule.route_of))}
    return None if tokens == want else "missing"


def fault_in_message(schedule):
    """What ``check`` says, in the form of ``first_fault``."""
    try:
        schedule.check()
    except ScheduleError as error:
        message = str(error)
    else:
        return None
    if re.search(r"is missing: no tick of stage \d+ has it, \d+ ticks in all", message):
        return "missing"
    return tuple(map(int, re.search(r": tick (\d+), stage (\d+): ", message).groups()))


def with_tables(schedule, op, microbatch, chunk):
    return Schedule(schedule.name, op, microbatch, chunk, schedule.routes, schedule.route_of)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_family_passes_an_independent_check(case):
    name, stages, microbatches = case
    schedule = FAMILIES[name](stages, microbatches)
    assert first_fault(schedule) is None
    assert first_fault(schedule.without_backward()) is None
    schedule.check()


def dropped(tables, cell, rng):
    tables[0][cell] = Op.IDLE


def doubled(tables, cell, rng):
    idle = np.argwhere(tables[0][:, cell[1]] == Op.IDLE).ravel()
    tick = rng.choice(idle) if len(idle) else cell[0] - 1
    for table in tables:
        table[tick, cell[1]] = table[cell]


def swapped(tables, cell, rng):
    busy = np.argwhere(tables[0][:, cell[1]] != Op.IDLE).ravel()
    tick = rng.choice(busy)
    for table in tables:
        table[[cell[0], tick], cell[1]] = table[[tick, cell[0]], cell[1]]


def early(tables, cell, rng):
    before = max(cell[0] - rng.integers(1, 4), 0)
    for table in tables:
        table[[cell[0], before], cell[1]] = table[[before, cell[0]], cell[1]]


def late(tables, cell, rng):
    after = min(cell[0] + rng.integers(1, 4), len(tables[0]) - 1)
    for table in tables:
        table[[cell[0], after], cell[1]] = table[[after, cell[0]], cell[1]]


def other_microbatch(tables, cell, rng):
    tables[1][cell] += rng.choice([-1, 1])


def other_chunk(tables, cell, rng):
    tables[2][cell] += rng.choice([-1, 1])


def other_operation(tables, cell, rng):
    tables[0][cell] = rng.choice([op for op in (F, B, W) if op != tables[0][cell]])


def other_stage(tables, cell, rng):
    stage = (cell[1] + 1) % tables[0].shape[1]
    for table in tables:
        table[cell[0], [cell[1], stage]] = table[cell[0], [stage, cell[1]]]


# How many of 40 mutants are faulty at least: a swap of independent operations is not.
MUTATIONS = {
    dropped: 40,
    doubled: 40,
    swapped: 30,
    early: 20,
    late: 20,
    other_microbatch: 40,
    other_chunk: 40,
    other_operation: 40,
    other_stage: 35,
}


@pytest.mark.parametrize("size", [(2, 4), (4, 8)], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_mutants_are_rejected_where_their_fault_is(mutate, name, size):
    schedule = FAMILIES[name](*size)
    rng = np.random.default_rng(0)
    cells = np.argwhere(schedule.op != Op.IDLE)
    faulty = 0
    for _ in range(40):
        tables = [t.copy() for t in (schedule.op, schedule.microbatch, schedule.chunk)]
        mutate(tables, tuple(rng.choice(cells)), rng)
        mutant = with_tables(schedule, *tables)
        fault = first_fault(mutant)
        assert fault_in_message(mutant) == fault
        faulty += fault is not None
    assert faulty >= MUTATIONS[mutate]


def test_a_swap_of_independent_operations_is_a_schedule():
    schedule = gpipe(2, 2)
    tables = [t.copy() for t in (schedule.op, schedule.microbatch, schedule.chunk)]
    last = np.flatnonzero(schedule.op[:, 0] == B)
    for table in tables:
        table[last, 0] = table[last[::-1], 0]  # B1 before B0 on stage 0: B1 has not arrived
    assert fault_in_message(with_tables(schedule, *tables)) == (4, 0)
    for table in tables:
        ticks = np.flatnonzero(schedule.op[:, 1] == B)
        table[ticks, 1] = table[ticks[::-1], 1]  # and now it has
    assert with_tables(schedule, *tables).check() == schedule.check()


# --- What is rejected -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize(("stages", "microbatches", "name"), [(0, 4, "stages"), (4, 0, "micro")])
def test_sizes_below_one(family, stages, microbatches, name):
    with pytest.raises(ValueError, match=rf"{name}\w* must be at least 1, got 0\."):
        family(stages, microbatches)


def test_sizes_that_a_family_does_not_take():
    with pytest.raises(ValueError, match=r"got 6 micro-batches for 4 stages. Use a multiple of 4"):
        interleaved(4, 6)
    with pytest.raises(ValueError, match="chunks must be at least 1, got 0"):
        interleaved(4, 8, 0)
    for size in [(3, 6), (1, 1), (4, 6)]:
        with pytest.raises(ValueError, match="an even number of stages and a multiple of it"):
            chimera(*size)


ROUTE = (Place(0, 0), Place(1, 0))


def test_orders_that_wait_for_each_other():
    orders = [[(F, 0, 0), (B, 0, 0)], [(B, 0, 0), (F, 0, 0)]]
    for aligned in (False, True):
        with pytest.raises(
            ScheduleError, match=r"stuck: nothing can run in tick \d+: stage 0 at B0, stage 1 at B0"
        ):
            Schedule.from_orders("stuck", orders, [ROUTE], [0], aligned=aligned)


@pytest.mark.parametrize(
    ("routes", "route_of", "message"),
    [
        ([], [0], "route_of must name"),
        ([ROUTE], [], "route_of must name"),
        ([ROUTE], [1], "one of the 1 routes"),
        ([ROUTE, ROUTE[:1]], [0], "must lead through 2 virtual stages"),
        ([(Place(0, 0), Place(2, 0))], [0], "on stages below 2"),
        ([ROUTE, ROUTE], [0], "two virtual stages are in one place"),
        ([(Place(0, 0), Place(1, 1))], [0], "chunks of stage 1 must be numbered from 0"),
    ],
)
def test_routes(routes, route_of, message):
    op = np.array([[F, 0], [0, F]])
    zeros = np.zeros_like(op)
    with pytest.raises(ScheduleError, match=message):
        Schedule("x", op, zeros, zeros, tuple(routes), tuple(route_of)).check()


def test_tables_of_different_shapes():
    with pytest.raises(ScheduleError, match="tables of one shape"):
        Schedule("x", np.zeros((2, 2)), np.zeros((2, 2)), np.zeros((2, 3)), (ROUTE,), (0,))
    with pytest.raises(ScheduleError, match="tables of one shape"):
        Schedule("x", np.zeros(2), np.zeros(2), np.zeros(2), (ROUTE,), (0,))


def test_tables_are_read_only_and_those_of_the_caller_are_not():
    op = np.array([[F, 0], [0, F]], np.int32)
    zeros = np.zeros_like(op)
    schedule = Schedule("x", op, zeros, zeros, (ROUTE,), (0,))
    schedule.check()
    op[0, 0] = Op.IDLE
    schedule.check()
    with pytest.raises(ValueError, match="read-only"):
        schedule.op[0, 0] = Op.IDLE


# --- PyTorch's format -----------------------------------------------------------------------------


@pytest.mark.parametrize("retime", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_csv_round_trip(case, retime):
    name, stages, microbatches = case
    schedule = FAMILIES[name](stages, microbatches)
    again = Schedule.from_csv(schedule.to_csv(), retime=retime)
    if not (retime and name.endswith("aligned")):
        assert np.array_equal(again.op, schedule.op)
        assert np.array_equal(again.microbatch, schedule.microbatch)
        assert np.array_equal(again.chunk, schedule.chunk)
    assert again.num_virtual_stages == schedule.num_virtual_stages
    assert len(again.routes) == len(schedule.routes)
    assert [t for *_, t in again.tasks() if t.op == F and t.virtual_stage == 0] == [
        t for *_, t in schedule.tasks() if t.op == F and t.virtual_stage == 0
    ] or retime
    figures, found = schedule.check(), again.check()
    assert found.busy == figures.busy
    assert found.bubble == pytest.approx(figures.bubble)
    assert found.messages == figures.messages


def test_csv_text():
    assert one_f_one_b(2, 2, aligned=False).to_csv() == "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n"
    assert zb_h1(1, 2).to_csv() == "0F0,0I0,0W0,0F1,0I1,0W1\n"
    assert interleaved(1, 1, aligned=False).to_csv() == "0F0,1F0,1B0,0B0\n"


def interleaved_zero_bubble(stages, microbatches, chunks):
    """The orders of PyTorch's interleaved zero-bubble tables, in its format and without idle ticks.

    Interleaved warm-up, then a forward pass, a backward pass, and the weights of s passes ago.
    """
    group, count = stages * chunks, microbatches * chunks

    def entry(letter, k, stage):
        chunk = k % group // stages
        chunk = chunk if letter == "F" else chunks - 1 - chunk
        return f"{chunk * stages + stage}{letter}{k // group * stages + k % stages}"

    rows = []
    for s in range(stages):
        warmup = (chunks - 1) * stages + stages - 1 - s
        row = [entry("F", k, s) for k in range(warmup)]
        for k in range(count):
            row += [entry("F", k + warmup, s)] if k + warmup < count else []
            row += [entry("B", k, s)]
            row += [entry("W", k - s, s)] if k >= s else []
        row += [entry("W", k, s) for k in range(count - s, count)]
        rows.append(", ".join(row))
    return "\n".join(rows)


def test_pytorch_table_of_orders():
    # PyTorch's tests compare with this table (zb1p, 2 ranks, 2 stages each, 8 micro-batches), which
    # writes B for the backward pass of the input alone.
    text = interleaved_zero_bubble(2, 8, 2)
    assert text.startswith("0F0, 0F1, 2F0, 2F1, 2B0, 2W0, 0F2, ")
    schedule = Schedule.from_csv(text, "zb1p", retime=True)
    assert first_fault(schedule) is None
    assert schedule.splits_backward
    figures = schedule.check()
    assert figures.ticks == 49
    assert figures.bubble == pytest.approx(1 / 49)
    assert schedule.routes == interleaved(2, 2).routes
    # A row of operations is not a row of ticks.
    with pytest.raises(ScheduleError, match=r"zb1p: tick 0, stage 1: .* retime=True"):
        Schedule.from_csv(text, "zb1p")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the table is empty"),
        (",,\n,,", "the table is empty"),
        ("0F0,0B0\n,0X1", "row 1, column 1: cannot read '0X1'"),
        ("0F0,F0", "row 0, column 1: cannot read 'F0'"),
        ("0F0,0SEND_F0", "row 0, column 1: cannot read '0SEND_F0'"),
        ("0F0,-1F0", "row 0, column 1"),
        ("0F0,,\n,0B0,", "row 1, column 1: micro-batch 0 runs virtual stage 0 in row 0 too"),
        ("0F0,0F2", "virtual stage 0 of micro-batch 1 is in no row"),
        ("0F0,2F0", "virtual stage 1 of micro-batch 0 is in no row"),
        ("0F0,0B0,0B0", "csv: tick 2, stage 0: B0 of virtual stage 0 ran already, in tick 1"),
        ("0B0,0F0", "tick 0, stage 0: .* needs F0 of virtual stage 0"),
        # Halves of backward passes beside full ones, and halves without the other half.
        ("0F0,0I0,0W0,0F1,0B1", "row 0, column 4: 0B1 is in a table that splits"),
        ("0F0,0I0", "row 0, column 1: 0I0 is in a table that splits"),
        ("0F0,0I0,0W0,0F1,0I1", "W1 of virtual stage 0 is missing: no tick of stage 0 has it"),
    ],
)
def test_csv_errors(text, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_csv(text)


@pytest.mark.parametrize("text", ["0F0,0B0\n", "\n 0F0 , 0B0 \n  ", "0F0,0B0\r\n", "0F0,0B0,,"])
def test_csv_spaces(text):
    assert Schedule.from_csv(text, "one").check().busy == (2,)


# --- Text and picture -----------------------------------------------------------------------------

TEXTS = {
    "gpipe": """\
gpipe: 2 stages, 2 micro-batches, 6 ticks, bubble 33.3 %, live activations 2 2
0  F0 F1 .  .  B0 B1
1  .  F0 F1 B0 B1 .""",
    "1f1b": """\
1f1b: 2 stages, 2 micro-batches, 6 ticks, bubble 33.3 %, live activations 2 1
0  F0 F1 .  B0 .  B1
1  .  F0 B0 F1 B1 .""",
    "1f1b-aligned": """\
1f1b-aligned: 2 stages, 2 micro-batches, 8 ticks, bubble 33.3 %, live activations 2 1
0  F0 .  F1 .  .  B0 .  B1
1  .  .  F0 B0 F1 B1 .  .""",
    "interleaved-2": """\
interleaved-2: 2 stages, 2 micro-batches, 10 ticks, bubble 20.0 %, live activations 4 3
0  F0a F1a F0b F1b .   B0b .   B1b B0a B1a
1  .   F0a F1a F0b B0b F1b B1b B0a B1a .""",
    "zb-h1": """\
zb-h1: 2 stages, 2 micro-batches, 7 ticks, bubble 14.3 %, live activations 2 2
0  F0 F1 .  B0 W0 B1 W1
1  .  F0 B0 F1 B1 W0 W1""",
    "chimera": """\
chimera: 2 stages, 2 micro-batches, 4 ticks, bubble 0.0 %, live activations 2 2
0  F0a F1b B1b B0a
1  F1b F0a B0a B1b""",
}


@pytest.mark.parametrize("name", TEXTS)
def test_text(name):
    assert str(FAMILIES[name](2, 2)) == TEXTS[name]


def test_text_of_an_evaluation_and_of_many_stages():
    text = str(one_f_one_b(11, 1).without_backward())
    assert text.splitlines()[0] == (
        "1f1b-aligned-forward: 11 stages, 1 micro-batches, 11 ticks, bubble 90.9 %"
    )
    assert text.splitlines()[1] == " 0  F0 .  .  .  .  .  .  .  .  .  ."
    assert text.splitlines()[11] == "10  .  .  .  .  .  .  .  .  .  .  F0"


def test_a_table_that_cannot_run_has_no_text():
    schedule = gpipe(2, 2)
    mutant = with_tables(schedule, schedule.op[::-1], schedule.microbatch, schedule.chunk)
    with pytest.raises(ScheduleError):
        str(mutant)


@pytest.fixture
def pyplot():
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("agg")
    yield plt
    plt.close("all")


def boxes(ax):
    """(left, right, stage, color) of each box."""
    found = []
    for box in ax.collections:
        extents = box.get_paths()[0].get_extents()
        color = tuple(np.round(box.get_facecolor()[0][:3], 3))
        found.append((extents.x0, extents.x1, round((extents.y0 + extents.y1) / 2), color))
    return found


@pytest.mark.parametrize("costs", [None, Costs(1, 2, 0.5)], ids=["ticks", "costs"])
@pytest.mark.parametrize("name", FAMILIES)
def test_picture(name, costs, pyplot):
    schedule = FAMILIES[name](2, 4)
    ax = schedule.draw(costs=costs)
    found = boxes(ax)
    tasks = list(schedule.tasks())
    assert len(found) == len(tasks) == len(ax.texts)
    assert [text.get_text() for text in ax.texts] == [str(task.microbatch) for *_, task in tasks]
    assert [stage for *_, stage, _ in found] == [stage for _, stage, _ in tasks]
    for (left, right, *_), (tick, _, task) in zip(found, tasks, strict=True):
        assert right - left == pytest.approx(1 if costs is None else costs.of(task.op))
        assert costs is not None or left == tick
    # One colour for each operation and chunk; boxes of a stage do not overlap.
    kinds = {(task.op, int(schedule.chunk[tick, stage])) for tick, stage, task in tasks}
    assert len({color for *_, color in found}) == len(kinds)
    for stage in range(2):
        mine = sorted(box[:2] for box in found if box[2] == stage)
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(mine))
    end = schedule.num_ticks if costs is None else schedule.lockstep_time(costs)
    assert ax.get_xlim() == pytest.approx((0, end))
    assert ax.get_title() == schedule.name


def test_picture_in_axes_of_the_caller(pyplot):
    _, ax = pyplot.subplots()
    assert gpipe(2, 2).draw(ax) is ax
    assert len(pyplot.get_fignums()) == 1
