"""The audit of a pipeline: programs that keep or send more than their schedule says.

``test_pipeline.py`` audits every family beside ``Zero``.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import sharding as shd
from sharding.pipeline import gpipe, one_f_one_b
from sharding.plan._format import text_of
from sharding.plan.program._hlo import Program
from sharding.plan.program._tick_loops import tick_loops

from .model import chain, mesh_of

pytestmark = pytest.mark.usefixtures("scopes_in_cache_key")

WIDTH, LENGTH, ROWS = 32, 64, 2  # rows of a micro-batch on one of two replicas
MESSAGE = 4 * ROWS * LENGTH * WIDTH
LAYER = 4 * 2 * WIDTH * 2 * WIDTH  # bytes of its parameters
SHARED = 4 * 2 * WIDTH * WIDTH


def embed(shared, x):
    return jnp.tanh(x @ shared["in"])


def block(w, x, _):
    return x + jnp.tanh(jnp.tanh(x @ w["up"]) @ w["down"])


def head(shared, x, _):
    return jnp.sum((x @ shared["out"]) ** 2), jnp.float32(x.shape[0])


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PARAMS = {
    "in": array(WIDTH, WIDTH),
    "out": array(WIDTH, WIDTH),
    "layers": {"up": array(8, WIDTH, 2 * WIDTH), "down": array(8, 2 * WIDTH, WIDTH)},
}


def make(schedule, **options):
    options = {"num_layers": 8, "embed": embed, "block": block, "head": head} | options
    return chain(mesh_of(pipe=schedule.num_stages), schedule, **options)


def compiled(pipeline, loss=None):
    """The gradient of a loss, by default the pipeline's."""
    x = array(pipeline.schedule.num_microbatches * ROWS, LENGTH, WIDTH)
    return jax.jit(jax.grad(loss or pipeline.loss, has_aux=True)).lower(PARAMS, x).compile()


def audited(pipeline, loss=None):
    return shd.audit(compiled(pipeline, loss), pipeline=pipeline)


def about_pipeline(found):
    """The warnings of the pipeline."""
    return [text for text in found.warnings if text in found.pipeline.warnings]


def test_the_compiler_takes_what_is_kept_and_copied():
    """GPipe stores each micro-batch, so that its temporaries grow by what the audit finds."""
    pipelines = [make(gpipe(4, n), recompute=False) for n in (8, 16)]
    programs = [compiled(each) for each in pipelines]
    few, many = (
        shd.audit(program, pipeline=each) for program, each in zip(programs, pipelines, strict=True)
    )
    grown = many.pipeline.kept + many.pipeline.copied - few.pipeline.kept - few.pipeline.copied
    assert grown >= 8 * MESSAGE
    assert many.temporaries - few.temporaries == pytest.approx(grown, rel=0.02)
    # Residuals are kept by the loop that reads them, of forward and of backward passes.
    program, mesh = Program(programs[0].as_text()), pipelines[0].mesh
    loops = tick_loops(program, mesh, "pipe", microbatches=8, rows=2)
    kept = [sorted(each.array.dims for each in loop.kept if not each.returned) for loop in loops]
    assert kept[0] == kept[1]
    assert len(kept[0]) == 6  # of messages, and of a layer x, two products, their derivatives
    assert [any(each.returned for each in loop.kept) for loop in loops] == [False, True]


def test_activations_of_several_arrays_of_two_dtypes():
    """The permutes of a message count once; CPUs send bfloat16 as float32 and store it as it is."""
    pipeline = make(
        one_f_one_b(4, 8),
        embed=lambda shared, x: (x @ shared["in"], x[..., :1].astype(jnp.bfloat16)),
        block=lambda w, x, _: (x[0] + jnp.tanh(x[0] @ w["up"] @ w["down"]) * x[1], x[1] * 2),
        head=lambda shared, x, _: (jnp.sum((x[0] @ shared["out"]) ** 2 * x[1]), 1.0),
    )
    found = audited(pipeline).pipeline
    column = ROWS * LENGTH
    assert (found.permutes, found.scheduled_permutes) == (28, 28)
    assert found.message_bytes == MESSAGE + 4 * column
    assert (found.slots[0].found, found.slots[0].nbytes) == (8, 8 * (MESSAGE + 2 * column))
    assert found.excess == 0


def test_one_stage_has_nothing_to_send():
    found = audited(make(one_f_one_b(1, 4))).pipeline
    assert (found.iterations, found.permutes, found.messages) == ((), 0, 0)
    assert found.warnings == ()
    assert "gradients" not in text_of([found.table()])


# --- Programs that keep more ----------------------------------------------------------------------


def test_an_aux_of_activations():
    pipeline = make(one_f_one_b(4, 8), head=lambda *args: (head(*args), args[1]), has_aux=True)
    found = audited(pipeline, lambda *args: (lambda out: (out[0][0], out))(pipeline.loss(*args)))
    assert found.pipeline.excess == 8 * MESSAGE
    assert (found.pipeline.slots[0].scheduled, found.pipeline.slots[0].found) == (8, 16)
    text = about_pipeline(found)[0]
    assert "keeps 256 KiB from tick to tick, 128 KiB more than the schedule 1f1b-aligned" in text
    assert "f32[8,2,64,32] of dynamic_update_slice" in text


def test_activations_computed_before_the_pipeline():
    pipeline = make(one_f_one_b(4, 8), embed=lambda shared, x: x * 2)

    def loss(params, batch):
        fixed = lax.stop_gradient(params["in"])
        return pipeline.loss(params, jnp.tanh(batch @ fixed))

    found = audited(pipeline, loss)
    assert found.pipeline.excess == 8 * MESSAGE
    assert len(about_pipeline(found)) == 1


def test_parameters_among_residuals():
    """A block that changes its parameters stores them for every micro-batch."""

    def reversed_(w, x, microbatch):
        return block(jax.tree.map(lambda p: p[::-1], w), x, microbatch)

    found = audited(make(one_f_one_b(4, 8), block=reversed_, recompute=False))
    # Kept in 8 slots for each of 2 layers; one of the two has the shape of a message.
    assert found.pipeline.excess == 8 * 2 * LAYER
    assert found.pipeline.slots[1].found == 8
    assert "parameters among residuals" in about_pipeline(found)[0]


def by_hand(mesh, microbatches, *, through_branches=False):
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
            # Other axes are no pipeline.
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


def audited_by_hand(differentiated=False, **options):
    mesh = mesh_of(data=2, pipe=4)
    loss = by_hand(mesh, 8, **options)
    fn = jax.grad(loss) if differentiated else loss
    lowered = jax.jit(fn).lower(array(4, WIDTH, WIDTH), array(8 * 2 * ROWS, LENGTH, WIDTH))
    return shd.audit(lowered, pipeline=chain(mesh, one_f_one_b(4, 8)))


def test_a_loop_by_hand_that_is_differentiated():
    """It stores what each tick needs for its backward pass, for all ticks."""
    found = audited_by_hand(differentiated=True)
    of, activations = found.pipeline, found.pipeline.slots[0]
    assert (of.iterations, of.permutes) == ((11, 11), 22)
    assert sum(each.count for each in found.traffic if each.op == "collective-permute") == 44
    assert activations.found >= 11 > activations.scheduled == 8
    assert of.excess >= (activations.found - 8) * MESSAGE
    assert "more than the schedule 1f1b-aligned needs" in about_pipeline(found)[0]
    assert "f32[11,2,64,32]" in about_pipeline(found)[0]


def test_a_buffer_that_branches_copy():
    """XLA's CPU compiler copies results of branches, so that they are in memory twice."""
    found = audited_by_hand(through_branches=True)
    of = found.pipeline
    assert of.copied >= 7 * MESSAGE
    assert of.slots[0].found == 8  # 7 of the buffer, one on its way
    assert of.excess == 0
    (text,) = about_pipeline(found)
    assert "each tick copies 1" in text
    assert "in memory twice" in text


def test_another_program():
    pipeline = chain(mesh_of(pipe=4), one_f_one_b(4, 8))
    found = shd.audit(jax.jit(lambda x: x * 2).lower(jnp.ones(8)), pipeline=pipeline)
    assert about_pipeline(found) == [
        "no loop of the program permutes along the axis of the 4 stages: it is no step of this "
        "pipeline"
    ]


# --- Shown ----------------------------------------------------------------------------------------


def test_table_and_json():
    found = audited(make(one_f_one_b(4, 8)))
    assert found.pipeline.sums == 8 * LAYER / 4 + SHARED
    assert "Pipeline: 1f1b-aligned, 4 stages, 8 micro-batches, 28 ticks" in str(found)
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
