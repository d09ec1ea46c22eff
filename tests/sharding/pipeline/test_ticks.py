"""What a compiled pipeline keeps between ticks, also where that is more than its schedule says."""

import jax
import jax.numpy as jnp
import pytest

from sharding.pipeline import gpipe, one_f_one_b
from sharding.plan.audit._program_memory import temporary_bytes

from .model import chain, mesh_of
from .ticks import ticks

pytestmark = pytest.mark.usefixtures("scopes_in_cache_key")

WIDTH, LENGTH, ROWS = 32, 64, 2  # rows of a micro-batch on one of two replicas
MESSAGE = 4 * ROWS * LENGTH * WIDTH
LAYER = 4 * 2 * WIDTH * 2 * WIDTH  # bytes of its parameters


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


def test_the_compiler_takes_what_is_kept_and_copied():
    """GPipe stores each micro-batch, so that its temporaries grow by what is found to be kept."""
    pipelines = [make(gpipe(4, n), recompute=False) for n in (8, 16)]
    programs = [compiled(each) for each in pipelines]
    few, many = (
        ticks(program, pipeline) for program, pipeline in zip(programs, pipelines, strict=True)
    )
    grown = many.kept + many.copied - few.kept - few.copied
    assert grown >= 8 * MESSAGE
    few, many = (temporary_bytes(x.memory_analysis(), tiled=False) for x in programs)
    assert many - few == pytest.approx(grown, rel=0.02)


def test_an_aux_of_activations():
    pipeline = make(one_f_one_b(4, 8), head=lambda *args: (head(*args), args[1]), has_aux=True)
    program = compiled(pipeline, lambda *args: (lambda out: (out[0][0], out))(pipeline.loss(*args)))
    found = ticks(program, pipeline)
    assert (found.activations.scheduled, found.activations.found) == (8, 16)
    assert found.excess == 8 * MESSAGE


def test_parameters_among_residuals():
    """A block that changes its parameters stores them for every micro-batch."""

    def reversed_(w, x, microbatch):
        return block(jax.tree.map(lambda p: p[::-1], w), x, microbatch)

    pipeline = make(one_f_one_b(4, 8), block=reversed_, recompute=False)
    found = ticks(compiled(pipeline), pipeline)
    # Kept in 8 slots for each of 2 layers; one of the two has the shape of a message.
    assert found.excess == 8 * 2 * LAYER
    assert found.residuals.found == 8
