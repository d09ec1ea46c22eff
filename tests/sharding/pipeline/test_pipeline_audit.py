"""The audit of a pipeline: what its program sends and keeps, beside what its schedule says."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sharding as shd
from sharding.pipeline import gpipe, interleaved, one_f_one_b, zb_h1
from sharding.plan import estimate, pipeline_wire
from sharding.plan._format import text_of
from sharding.plan.program._hlo import Program
from sharding.plan.program._tick_loops import tick_loops

from .families import FAMILIES

pytestmark = pytest.mark.usefixtures("scopes_in_cache_key")

WIDTH, LENGTH, ROWS = 32, 64, 2  # rows of a micro-batch on one of two replicas
MESSAGE = 4 * ROWS * LENGTH * WIDTH
LAYER = 4 * 2 * WIDTH * 2 * WIDTH  # bytes of its parameters
SHARED = 4 * 2 * WIDTH * WIDTH


def mesh_of(data, pipe):
    devices = jax.devices()[: data * pipe]
    return jax.make_mesh((data, pipe), ("data", "pipe"), (AxisType.Auto,) * 2, devices=devices)


def embed(shared, x):
    return jnp.tanh(x @ shared["in"])


def block(w, x, _):
    return x + jnp.tanh(jnp.tanh(x @ w["up"]) @ w["down"])


def head(shared, x, _):
    return jnp.sum((x @ shared["out"]) ** 2), jnp.float32(x.shape[0])


def make(schedule, data=2, layers=8, **options):
    """A pipeline, and abstract parameters as it stacks them."""
    pipeline = shd.Pipeline(
        mesh_of(data, schedule.num_stages),
        schedule,
        num_layers=layers,
        **{"embed": embed, "block": block, "head": head} | options,
    )
    of_layers = {"up": jnp.ones((layers, WIDTH, 2 * WIDTH))}
    of_layers["down"] = jnp.ones((layers, 2 * WIDTH, WIDTH))
    model = {"in": jnp.ones((WIDTH, WIDTH)), "out": jnp.ones((WIDTH, WIDTH)), "layers": of_layers}
    return pipeline, jax.eval_shape(pipeline.stack, model)


def batch_of(pipeline, rows=ROWS):
    shape = pipeline.schedule.num_microbatches * rows, LENGTH, WIDTH
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def lowered(pipeline, params, loss=None, stage=1, **options):
    """The lowered step of a loss, by default the pipeline's."""
    tx, zero = optax.adamw(1e-3), shd.Zero(pipeline.mesh, stage=stage, min_shard_size=0)

    def make_state():
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
        return zeros, tx.init(zeros)

    state = zero.abstract_state(make_state, tx=tx, param_specs=pipeline.param_specs(params))
    step = zero.train_step(loss or pipeline.loss, tx=tx, weighted=True, **options)
    return step.lower(state, batch_of(pipeline, 2 * ROWS * options.get("microbatches", 1)))


def audited(pipeline, params, *args, **options):
    """The audit of a step, and the compiler's temporaries."""
    found = shd.audit(lowered(pipeline, params, *args, **options), pipeline=pipeline)
    return found, found.temporaries


def about_pipeline(found):
    """The warnings of the pipeline."""
    return [text for text in found.warnings if text in found.pipeline.warnings]


# --- What a program of a pipeline has -------------------------------------------------------------

# By family, for 4 stages and 8 micro-batches: iterations of the loops, permutes, messages of the
# busiest stage, slots for activations and cotangents. Two directions in each tick of 1F1B, ZB and
# Chimera, one of the others.
COUNTS = {
    "gpipe": ((10, 12), 22, 16, 10),
    "1f1b": ((22,), 2 * 22, 16, 6),
    "1f1b-aligned": ((14,), 28, 16, 8),
    "interleaved-2-aligned": ((26,), 52, 32, 12),
    "zb-h1": ((27,), 2 * 27, 16, 6),
    "zb-v": ((51,), 2 * 51, 32, 12),
    "chimera": ((18,), 2 * 18, 16, 7),
}


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("name", COUNTS)
def test_what_the_program_runs_and_keeps_is_what_the_schedule_says(name):
    pipeline, params = make(FAMILIES[name](4, 8))
    found = audited(pipeline, params)[0]
    of, (iterations, permutes, messages, slots) = found.pipeline, COUNTS[name]
    assert (of.iterations, of.scheduled_iterations) == (iterations, iterations)
    assert (of.permutes, of.scheduled_permutes, of.runs) == (permutes, permutes, 1)
    assert (of.messages, of.message_bytes, of.wire_bytes) == (messages, MESSAGE, permutes * MESSAGE)
    assert of.live == pipeline.schedule.check().live
    activations, residuals, others = of.slots
    assert (activations.scheduled, activations.found) == (slots, slots)
    assert activations.nbytes == slots * MESSAGE
    assert (residuals.nbytes > 0) == (residuals.scheduled > 0) == pipeline.schedule.splits_backward
    assert residuals.found == residuals.scheduled
    assert (others.found, of.excess) == (0, 0)
    assert of.copied == 0
    assert of.sums == 8 * LAYER / (2 if name == "chimera" else 4) + SHARED
    # The rest of the audit counts the same permutes.
    sent = sum(each.wire_bytes for each in found.traffic if each.op == "collective-permute")
    replicas = 2 * 8 * LAYER / 4 if name == "chimera" else 0
    assert sent == of.wire_bytes + replicas
    assert not [text for text in about_pipeline(found) if "more than the schedule" in text]
    assert len(set(found.warnings)) == len(found.warnings)


@pytest.mark.parametrize("recompute", [True, False])
def test_the_compiler_takes_what_is_kept_and_copied(recompute):
    """GPipe stores each micro-batch, so that its temporaries grow by what the audit finds."""
    (few, temporaries), (many, more) = (
        audited(*make(gpipe(4, n), recompute=recompute)) for n in (8, 16)
    )
    grown = many.pipeline.kept + many.pipeline.copied - few.pipeline.kept - few.pipeline.copied
    assert grown >= 8 * MESSAGE
    assert more - temporaries == pytest.approx(grown, rel=0.02)


def test_residuals_have_slots():
    found = audited(*make(one_f_one_b(4, 8), recompute=False))[0].pipeline
    activations, residuals, others = found.slots
    assert (activations.scheduled, activations.found) == (3, 3)
    assert (residuals.scheduled, residuals.found) == (8, 8)  # 7, and one for what is not stored
    assert residuals.nbytes % 8 == 0
    assert (others.nbytes, found.excess) == (0, 0)
    split = audited(*make(zb_h1(4, 8), recompute=False))[0].pipeline.slots[1]
    assert (split.scheduled, split.found) == (10, 10)  # residuals, and halves of backward passes


def test_residuals_are_kept_by_the_loop_that_reads_them():
    """GPipe's forward passes are one loop, its backward passes another."""
    pipeline, params = make(gpipe(4, 8), recompute=False)
    program = Program(lowered(pipeline, params).compile().as_text())
    loops = tick_loops(program, pipeline.mesh, "pipe", microbatches=8, rows=2)
    kept = [sorted(each.array.dims for each in loop.kept if not each.returned) for loop in loops]
    assert kept[0] == kept[1]
    assert len(kept[0]) == 6  # of messages, and of a layer x, two products, their derivatives
    assert [any(each.returned for each in loop.kept) for loop in loops] == [False, True]


@pytest.mark.parametrize("schedule", [interleaved(2, 4), one_f_one_b(2, 4)], ids=lambda s: s.name)
def test_two_stages_whose_directions_are_one(schedule):
    pipeline, params = make(schedule)
    found = audited(pipeline, params)[0].pipeline
    assert found.permutes == found.scheduled_permutes == schedule.num_ticks
    assert found.slots[0].found == found.slots[0].scheduled
    assert found.message_bytes == MESSAGE


def test_activations_of_several_arrays_of_two_dtypes():
    """The permutes of a message count once; CPUs send bfloat16 as float32 and store it as it is."""
    pipeline, params = make(
        one_f_one_b(4, 8),
        embed=lambda shared, x: (x @ shared["in"], x[..., :1].astype(jnp.bfloat16)),
        block=lambda w, x, _: (x[0] + jnp.tanh(x[0] @ w["up"] @ w["down"]) * x[1], x[1] * 2),
        head=lambda shared, x, _: (jnp.sum((x[0] @ shared["out"]) ** 2 * x[1]), 1.0),
    )
    found = audited(pipeline, params)[0].pipeline
    column = ROWS * LENGTH
    assert (found.permutes, found.scheduled_permutes) == (28, 28)
    assert found.message_bytes == MESSAGE + 4 * column
    assert (found.slots[0].found, found.slots[0].nbytes) == (8, 8 * (MESSAGE + 2 * column))
    assert found.excess == 0


def test_one_stage_has_nothing_to_send():
    found = audited(*make(one_f_one_b(1, 4)))[0].pipeline
    assert (found.iterations, found.permutes, found.messages) == ((), 0, 0)
    assert found.warnings == ()
    assert "gradients" not in text_of([found.table()])


# --- Programs that keep more ----------------------------------------------------------------------


def test_an_aux_of_activations():
    def with_aux(shared, x, microbatch):
        return head(shared, x, microbatch), x

    pipeline, params = make(one_f_one_b(4, 8), head=with_aux, has_aux=True)
    found = audited(pipeline, params, has_aux=True)[0]
    assert found.pipeline.excess == 8 * MESSAGE
    assert (found.pipeline.slots[0].scheduled, found.pipeline.slots[0].found) == (8, 16)
    text = about_pipeline(found)[0]
    assert "keeps 256 KiB from tick to tick, 128 KiB more than the schedule 1f1b-aligned" in text
    assert "f32[8,2,64,32] of dynamic_update_slice" in text


def test_activations_computed_before_the_pipeline():
    pipeline, params = make(one_f_one_b(4, 8), embed=lambda shared, x: x * 2)

    def loss(params, batch):
        fixed = lax.stop_gradient(params["in"])
        return pipeline.loss(params, jnp.tanh(batch @ fixed))

    found = audited(pipeline, params, loss)[0]
    assert found.pipeline.excess == 8 * MESSAGE
    assert len(about_pipeline(found)) == 1
    # A batch of the same shape is an argument.
    assert audited(pipeline, params)[0].pipeline.excess == 0


def by_hand(mesh, microbatches, *, through_branches=False, over_data=False):
    """A pipeline of 4 stages that jax.grad differentiates: a loop over ticks, backwards again."""
    num_ticks = microbatches + 3

    def on_stage(w, x):
        me, w = lax.axis_index("pipe"), w[0]

        def tick(carry, t):
            message, total, seen = carry
            entering = lax.dynamic_index_in_dim(x, jnp.minimum(t, microbatches - 1), keepdims=False)
            y = jnp.tanh(jnp.where(me == 0, entering, message) @ w)
            total = total + jnp.where((me == 3) & (t >= 3), jnp.sum(y**2), 0.0)
            if through_branches:
                y, seen = lax.switch(
                    t % 3,
                    [
                        lambda seen: (y @ w, lax.dynamic_update_index_in_dim(seen, y, t % 7, 0)),
                        lambda seen: (y, seen),
                        lambda seen: (y + seen[0], seen),
                    ],
                    seen,
                )
            if over_data:
                y = lax.ppermute(y, "data", [(0, 1), (1, 0)])
            pairs = [(i, i + 1) for i in range(3)]
            return (lax.ppermute(y, "pipe", pairs), total, seen), None

        start = jnp.zeros(x.shape[1:]), jnp.float32(0), jnp.zeros((7, *x.shape[1:]))
        (_, total, _), _ = lax.scan(tick, start, jnp.arange(num_ticks))
        return lax.psum(total, "pipe")

    def loss(w, x):
        mapped = jax.shard_map(
            on_stage,
            mesh=mesh,
            in_specs=(P("pipe"), P(None, "data")),
            out_specs=P(),
            check_vma=False,
        )
        return mapped(w, x.reshape(microbatches, -1, *x.shape[1:]))

    return loss


def lowered_by_hand(pipeline, loss):
    w = jax.ShapeDtypeStruct((4, WIDTH, WIDTH), jnp.float32)
    return jax.jit(loss).lower(w, batch_of(pipeline, 2 * ROWS))


def test_parameters_among_residuals():
    """A block that changes its parameters stores them for every micro-batch."""

    def reversed_(w, x, microbatch):
        return block(jax.tree.map(lambda p: p[::-1], w), x, microbatch)

    found = [
        audited(*make(one_f_one_b(4, 8), block=each, recompute=False))[0]
        for each in (block, reversed_)
    ]
    alone, changed = (each.pipeline for each in found)
    assert alone.excess == 0
    # Kept in 8 slots for each of 2 layers; one of the two has the shape of a message.
    assert changed.excess == 8 * 2 * LAYER
    assert changed.slots[1] == alone.slots[1]
    assert "parameters among residuals" in about_pipeline(found[1])[0]


def test_a_loop_by_hand_that_is_differentiated():
    """It stores what each tick needs for its backward pass, for all ticks."""
    pipeline, _ = make(one_f_one_b(4, 8))
    grad = jax.grad(by_hand(pipeline.mesh, 8))
    found = shd.audit(lowered_by_hand(pipeline, grad), pipeline=pipeline)
    of, activations = found.pipeline, found.pipeline.slots[0]
    assert (of.iterations, of.permutes) == ((11, 11), 22)
    assert activations.found >= 11 > activations.scheduled == 8
    assert of.excess >= (activations.found - 8) * MESSAGE
    assert "more than the schedule 1f1b-aligned needs" in about_pipeline(found)[0]
    assert "f32[11,2,64,32]" in about_pipeline(found)[0]


def test_other_axes_are_no_pipeline():
    pipeline, _ = make(one_f_one_b(4, 8))
    loss = by_hand(pipeline.mesh, 8, over_data=True)
    found = shd.audit(lowered_by_hand(pipeline, loss), pipeline=pipeline)
    assert found.pipeline.permutes == 11
    assert sum(each.count for each in found.traffic if each.op == "collective-permute") == 22


def test_a_buffer_that_branches_copy():
    """XLA's CPU compiler copies results of branches, so that they are in memory twice."""
    pipeline, _ = make(one_f_one_b(4, 8))
    found = []
    for through_branches in (True, False):
        loss = by_hand(pipeline.mesh, 8, through_branches=through_branches)
        found.append(shd.audit(lowered_by_hand(pipeline, loss), pipeline=pipeline))
    of = found[0].pipeline
    assert of.copied >= 7 * MESSAGE
    assert of.slots[0].found == 8  # 7 of the buffer, one on its way
    assert of.excess == 0
    (text,) = about_pipeline(found[0])
    assert "each tick copies 1" in text
    assert "in memory twice" in text
    assert not about_pipeline(found[1])


def test_a_pipeline_that_runs_several_times():
    found = audited(*make(one_f_one_b(2, 4)), microbatches=3)[0]
    assert (found.pipeline.runs, found.pipeline.permutes) == (3, 3 * 12)
    (text,) = about_pipeline(found)
    assert "filled and drained 3 times in a step: give its schedule 12 micro-batches" in text


def test_another_program():
    pipeline, _ = make(one_f_one_b(4, 8))
    found = shd.audit(jax.jit(lambda x: x * 2).lower(jnp.ones(8)), pipeline=pipeline)
    assert about_pipeline(found) == [
        "no loop of the program permutes along the axis of the 4 stages: it is no step of this "
        "pipeline"
    ]


# --- What it sends --------------------------------------------------------------------------------


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    ("name", "stages", "stage"),
    [
        ("1f1b-aligned", 4, 0),
        ("1f1b-aligned", 4, 2),
        ("1f1b-aligned", 4, 3),
        ("gpipe", 4, 1),
        ("chimera", 4, 1),
        ("zb-v", 2, 1),  # both directions are one permute
        ("interleaved-2-aligned", 2, 3),
    ],
)
def test_wire_of_a_step(name, stages, stage):
    """The bytes of ``Zero`` and those of the pipeline, known before anything is compiled."""
    pipeline, params = make(FAMILIES[name](stages, 2 * stages))
    zero = shd.Zero(pipeline.mesh, stage=stage, min_shard_size=0)
    specs = pipeline.param_specs(params)
    plan = estimate(params, optax.adamw(1e-3), zero, param_specs=specs, gathered_once="")
    expected = plan.stage(plan.requested).wire + pipeline_wire(pipeline, params, batch_of(pipeline))
    found = audited(pipeline, params, stage=stage)[0]
    assert found.wire_bytes == pytest.approx(expected, rel=1e-3)  # the loss and its weight


def test_wire_with_random_keys():
    """A layer's key changes nothing of what is sent."""
    keyed, params = make(
        one_f_one_b(4, 8), rngs=True, embed=lambda shared, x, key: embed(shared, x), head=None
    )
    plain, _ = make(one_f_one_b(4, 8))
    batch = batch_of(plain)
    assert pipeline_wire(keyed, params, batch) == pipeline_wire(plain, params, batch)


# --- Shown ----------------------------------------------------------------------------------------


def test_table_and_json():
    pipeline, params = make(one_f_one_b(4, 8))
    found = audited(pipeline, params)[0]
    shown = str(found)
    assert "Pipeline: 1f1b-aligned, 4 stages, 8 micro-batches, 28 ticks" in shown
    rows = {row[0].strip(): row[1:] for row in found.pipeline.table().rows}
    assert rows["permutes"] == ("28", "28", "448 KiB")
    assert rows["of which the busiest stage needs"] == ("16", "", "256 KiB")
    assert rows["live activations, by stage"] == ("7 5 3 1", "", "")
    assert rows["slots: activations, cotangents"] == ("8", "8", "128 KiB")
    assert max(map(len, text_of([found.pipeline.table()]).splitlines())) <= 80
    again = json.loads(json.dumps(found.to_dict()))["pipeline"]
    assert (again["permutes"], again["live"]) == (28, [7, 5, 3, 1])
    assert (again["kept"], again["excess"], again["wire_bytes"]) == (8 * MESSAGE, 0, 28 * MESSAGE)
    wide = dataclasses.replace(found.pipeline, stages=16, live=tuple(range(31, 0, -2)))
    assert "at most 31" in text_of([wide.table()])
