"""Tables of schedules: their figures, what is rejected, and the forms in which they are shown."""

import numpy as np
import pytest

from sharding.pipeline import Costs, Op, Place, Schedule, ScheduleError, interleaved, one_f_one_b

from .families import CASES, FAMILIES

F, B = Op.FORWARD, Op.BACKWARD
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))


def expected_figures(name, stages, microbatches):
    """Ticks, bubble and live activations of a paper; None where it has no formula."""
    s, m, every = stages, microbatches, range(stages)
    ends = s - 1  # of a fill or a drain
    if name == "gpipe":
        return 2 * (m + ends), ends / (m + ends), (m,) * s
    if name == "1f1b":
        return 2 * (m + ends), ends / (m + ends), tuple(min(s - i, m) for i in every)
    if name == "1f1b-aligned":
        live = tuple(min(2 * (ends - i) + 1, m) for i in every)
        return 2 * (m + 2 * ends), ends / (m + ends), live
    if name.startswith("interleaved"):
        chunks = int(name.split("-")[1])
        most = [2 * (ends - i) + (chunks - 1) * s + 1 for i in every]
        units = chunks * m
        return None, ends / (units + ends), tuple(min(x, units) for x in most)
    if name == "zb-h1":
        ticks = 3 * m + ends if m >= s else None
        return ticks, ticks and ends / ticks, (min(s, m),) * s
    if name == "zb-v":
        ticks = 6 * m + ends if m >= 2 * ends else None
        return ticks, ticks and ends / ticks, None
    ticks = 2 * m + s - 2
    live = (s,) * s if m > s else tuple(s // 2 + 1 + min(i, ends - i) for i in every)
    return ticks, (s - 2) / ticks, live


LARGER = [("zb-v", *size) for size in [(3, 4), (4, 6), (5, 9)]]
LARGER += [("chimera", *size) for size in [(6, 6), (6, 18), (10, 10)]]


@pytest.mark.parametrize("case", CASES + LARGER, ids=lambda case: "-".join(map(str, case)))
def test_figures(case):
    name, stages, microbatches = case
    schedule = FAMILIES[name](stages, microbatches)
    figures, split = schedule.check(), name.startswith("zb")
    ticks, bubble, live = expected_figures(*case)
    assert ticks in (None, figures.ticks)
    assert bubble is None or figures.bubble == pytest.approx(bubble)
    assert live in (None, figures.live)
    assert max(figures.live) <= (2 * stages if name == "zb-v" else microbatches * 3)
    several = {"interleaved-2": 2, "interleaved-3": 3, "zb-v": 2}
    chunks = several.get(name.removesuffix("-aligned"), 1)
    assert figures.busy == ((3 if split else 2) * chunks * microbatches,) * stages
    assert figures.weight_copies == (2 if name == "chimera" else 1)
    # Each boundary, once in each direction; the turn of a V stays on its stage.
    crossed = 2 * (stages - 1) if name == "zb-v" else chunks * stages - 1
    assert sum(figures.messages) == 2 * microbatches * crossed * (stages > 1)
    for costs in [None, Costs(1, 1, 1), Costs(1, 2.5, 0.5), Costs(2, 1, 3)]:
        assert schedule.event_time(costs) <= schedule.lockstep_time(costs) + 1e-9
    default = Costs(1, 1, 1) if split else Costs(1, 2)
    assert schedule.lockstep_time() == schedule.lockstep_time(default)
    assert schedule.event_time() == schedule.event_time(default)
    if stages == 1:
        assert figures.bubble == 0
        assert schedule.lockstep_time() == schedule.event_time()
    if name.startswith("interleaved") or name == "1f1b-aligned":
        for costs in (Costs(1, 1), Costs(1, 2), Costs(1, 2.88), Costs(3, 0.5)):
            time = (chunks * microbatches + stages - 1) * (costs.forward + costs.backward)
            assert schedule.event_time(costs) == pytest.approx(time)
            if name.endswith("aligned"):
                assert schedule.lockstep_time(costs) == pytest.approx(time)
    if name == "zb-h1" and microbatches >= stages:
        for f, b, w in [(1, 1, 1), (1, 1.25, 0.75), (2, 2, 1)]:
            time = microbatches * (f + b + w) + (stages - 1) * (f + b - w)
            assert schedule.event_time(Costs(f, b, w)) == pytest.approx(time)
    forward = schedule.without_backward()
    assert forward.forward_only
    assert not schedule.forward_only
    assert set(forward.op.ravel().tolist()) <= {0, F}
    assert forward.check().busy == (chunks * microbatches,) * stages
    if name in ("gpipe", "1f1b", "1f1b-aligned", "zb-h1"):
        assert forward.check().ticks == microbatches + stages - 1


def test_activations_are_stored_until_their_last_operation_is_complete():
    assert one_f_one_b(2, 2, aligned=False).live().T.tolist() == [
        [1, 2, 2, 2, 1, 1],  # F0 F1 . B0 . B1
        [0, 1, 1, 1, 1, 0],  # . F0 B0 F1 B1 .
    ]
    assert FAMILIES["zb-h1"](1, 2).live().T.tolist() == [[1] * 6]


@cases
@pytest.mark.parametrize("retime", [False, True])
def test_every_family_round_trips(case, retime):
    name, stages, microbatches = case
    schedule = FAMILIES[name](stages, microbatches)
    again = Schedule.from_csv(schedule.to_csv(), retime=retime)
    if not (retime and name.endswith("aligned")):
        for table in ("op", "microbatch", "chunk"):
            assert np.array_equal(getattr(again, table), getattr(schedule, table))
    assert again.num_virtual_stages == schedule.num_virtual_stages
    assert len(again.routes) == len(schedule.routes)
    figures, found = schedule.check(), again.check()
    assert (found.busy, found.messages) == (figures.busy, figures.messages)
    assert found.bubble == pytest.approx(figures.bubble)


def test_sizes_that_a_family_does_not_take():
    for family in FAMILIES.values():
        with pytest.raises(ValueError, match=r"stages must be at least 1, got 0\."):
            family(0, 4)
    with pytest.raises(ValueError, match=r"got 6 micro-batches for 4 stages. Use a multiple of 4"):
        interleaved(4, 6)
    for size in [(3, 6), (4, 6)]:
        with pytest.raises(ValueError, match="an even number of stages and a multiple of it"):
            FAMILIES["chimera"](*size)


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
        ([ROUTE], [1], "one of the 1 routes"),
        ([(Place(0, 0), Place(2, 0))], [0], "on stages below 2"),
        ([ROUTE, ROUTE], [0], "chunks of stage 0 must be numbered from 0, each once"),
        ([(Place(0, 0), Place(1, 1))], [0], "chunks of stage 1 must be numbered from 0"),
    ],
)
def test_routes(routes, route_of, message):
    op = np.array([[F, 0], [0, F]])
    zeros = np.zeros_like(op)
    with pytest.raises(ScheduleError, match=message):
        Schedule("x", op, zeros, zeros, tuple(routes), tuple(route_of)).check()


def test_csv_text():
    assert one_f_one_b(2, 2, aligned=False).to_csv() == "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n"
    assert FAMILIES["zb-h1"](1, 2).to_csv() == "0F0,0I0,0W0,0F1,0I1,0W1\n"
    assert interleaved(1, 1, aligned=False).to_csv() == "0F0,1F0,1B0,0B0\n"
    for text in ("\n 0F0 , 0B0 \n  ", "0F0,0B0\r\n", "0F0,0B0,,"):
        assert Schedule.from_csv(text, "one").check().busy == (2,)


def test_pytorch_table_of_orders():
    """As PyTorch's zb1p, which writes B for the backward pass of the input alone.

    Two ranks with two stages each; interleaved warm-up, then a forward pass, a backward pass, and
    the weights of as many passes ago as the number of the rank.
    """
    text = "0F0, 0F1, 2F0, 2F1, 2B0, 2W0, 2B1, 2W1, 0B0, 0W0, 0B1, 0W1\n"
    text += "1F0, 1F1, 3F0, 3B0, 3F1, 3B1, 3W0, 1B0, 3W1, 1B1, 1W0, 1W1"
    schedule = Schedule.from_csv(text, "zb1p", retime=True)
    assert schedule.splits_backward
    figures = schedule.check()
    assert figures.ticks == 13
    assert figures.bubble == pytest.approx(1 / 13)
    assert schedule.routes == interleaved(2, 2).routes
    # A row of operations is not a row of ticks.
    with pytest.raises(ScheduleError, match=r"zb1p: tick 0, stage 1: .* retime=True"):
        Schedule.from_csv(text, "zb1p")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (",,\n,,", "the table is empty"),
        ("0F0,0B0\n,0X1", "row 1, column 1: cannot read '0X1'"),
        ("0F0,,\n,0B0,", "row 1, column 1: micro-batch 0 runs virtual stage 0 in row 0 too"),
        ("0F0,0F2", "virtual stage 0 of micro-batch 1 is in no row"),
        ("0F0,0B0,0B0", "csv: tick 2, stage 0: B0 of virtual stage 0 ran already, in tick 1"),
        ("0B0,0F0", "tick 0, stage 0: .* needs F0 of virtual stage 0"),
        ("0F0\n1F0", "tick 0, stage 1: .* needs F0 of virtual stage 0"),  # of the same tick
        ("0F0,,0B0,\n,1F0,,1B0", "tick 2, stage 0: .* needs B0 of virtual stage 1"),
        ("0F0,0W0,0I0", "tick 1, stage 0: .* needs B0 of virtual stage 0"),
        # Halves of backward passes beside full ones, and halves without the other half.
        ("0F0,0I0,0W0,0F1,0B1", "row 0, column 4: 0B1 is in a table that splits"),
        ("0F0,0I0,0W0,0F1,0I1", "W1 of virtual stage 0 is missing: no tick of stage 0 has it"),
    ],
)
def test_csv_errors(text, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_csv(text)


# Docstrings have those of other families.
TEXT = """\
interleaved-2: 2 stages, 2 micro-batches, 10 ticks, bubble 20.0 %, live activations 4 3
0  F0a F1a F0b F1b .   B0b .   B1b B0a B1a
1  .   F0a F1a F0b B0b F1b B1b B0a B1a ."""


def test_text():
    assert str(FAMILIES["interleaved-2"](2, 2)) == TEXT
    lines = str(one_f_one_b(11, 1).without_backward()).splitlines()
    assert lines[0] == "1f1b-aligned-forward: 11 stages, 1 micro-batches, 11 ticks, bubble 90.9 %"
    assert lines[1] == " 0  F0 .  .  .  .  .  .  .  .  .  ."


@pytest.mark.parametrize(("name", "costs"), [("chimera", None), ("zb-v", Costs(1, 2, 0.5))])
def test_picture(name, costs):
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("agg")
    schedule, (_, ax) = FAMILIES[name](2, 4), plt.subplots()
    assert schedule.draw(ax, costs=costs) is ax
    plt.close("all")
    tasks = list(schedule.tasks())
    boxes = [box.get_paths()[0].get_extents() for box in ax.collections]
    assert [text.get_text() for text in ax.texts] == [str(task.microbatch) for *_, task in tasks]
    for box, (tick, stage, task) in zip(boxes, tasks, strict=True):
        assert round((box.y0 + box.y1) / 2) == stage
        assert box.width == pytest.approx(1 if costs is None else costs.of(task.op))
        assert costs is not None or box.x0 == tick
    end = schedule.num_ticks if costs is None else schedule.lockstep_time(costs)
    assert ax.get_xlim() == pytest.approx((0, end))
