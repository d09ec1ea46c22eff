"""The audit of a pipeline: programs that keep or send more than their schedule says."""

import json

import jax
import jax.numpy as jnp
import pytest

import sharding as shd
from sharding.pipeline import gpipe, one_f_one_b

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


def test_an_aux_of_activations():
    pipeline = make(one_f_one_b(4, 8), head=lambda *args: (head(*args), args[1]), has_aux=True)
    found = audited(pipeline, lambda *args: (lambda out: (out[0][0], out))(pipeline.loss(*args)))
    assert found.pipeline.excess == 8 * MESSAGE
    assert (found.pipeline.slots[0].scheduled, found.pipeline.slots[0].found) == (8, 16)
    text = about_pipeline(found)[0]
    assert "keeps 256 KiB from tick to tick, 128 KiB more than the schedule 1f1b-aligned" in text
    assert "f32[8,2,64,32] of dynamic_update_slice" in text


def test_parameters_among_residuals():
    """A block that changes its parameters stores them for every micro-batch."""

    def reversed_(w, x, microbatch):
        return block(jax.tree.map(lambda p: p[::-1], w), x, microbatch)

    found = audited(make(one_f_one_b(4, 8), block=reversed_, recompute=False))
    # Kept in 8 slots for each of 2 layers; one of the two has the shape of a message.
    assert found.pipeline.excess == 8 * 2 * LAYER
    assert found.pipeline.slots[1].found == 8
    assert "parameters among residuals" in about_pipeline(found)[0]


def test_another_program():
    pipeline = chain(mesh_of(pipe=4), one_f_one_b(4, 8))
    found = shd.audit(jax.jit(lambda x: x * 2).lower(jnp.ones(8)), pipeline=pipeline)
    assert about_pipeline(found) == [
        "no loop of the program permutes along the axis of the 4 stages: it is no step of this "
        "pipeline"
    ]


def test_table_and_json():
    found = audited(make(one_f_one_b(4, 8)))
    assert found.pipeline.sums == 8 * LAYER / 4 + SHARED
    assert "Pipeline: 1f1b-aligned, 4 stages, 8 micro-batches, 28 ticks" in str(found)
    rows = {row[0].strip(): row[1:] for row in found.pipeline.tables()[0].rows}
    assert rows["permutes"] == ("28", "28", "448 KiB")
    assert rows["of which the busiest stage needs"] == ("16", "", "256 KiB")
    assert rows["live activations, by stage"] == ("7 5 3 1", "", "")
    assert rows["slots: activations, cotangents"] == ("8", "8", "128 KiB")
    again = json.loads(json.dumps(found.to_dict()))["pipeline"]
    assert (again["permutes"], again["live"]) == (28, [7, 5, 3, 1])
    assert (again["kept"], again["excess"], again["wire_bytes"]) == (8 * MESSAGE, 0, 28 * MESSAGE)
