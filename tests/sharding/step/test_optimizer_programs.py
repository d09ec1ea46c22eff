"""What compiled optimizer steps read, keep and send; the tables are those of the benchmark."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
import step_bytes as benchmark
from jax.sharding import NamedSharding, PartitionSpec

import optax_ext
import sharding as shd

from ...compilers import need
from .. import model

OPTIMIZERS = benchmark.OPTIMIZERS | {
    f"{name}, kernel": (tx, jnp.float32)
    for name, tx in {
        "came": optax_ext.came(1e-3, implementation="pallas"),
        "adafactor": optax_ext.adafactor(1e-3, implementation="pallas"),
        "adafactor, no scale": optax_ext.adafactor(
            1e-3, multiply_by_parameter_scale=False, implementation="pallas"
        ),
    }.items()
}
TPUS, V5E, GPU = ("v5e:1x1", "v6e:1x1"), ("v5e:1x1",), ("h200x1",)
IN_MEMORY = {"came": 33.1, "came, 16 bits": 22.1, "adafactor, no scale": 21.1, "adafactor": 25.1}
ON_CHIP = {"came": 28.1, "came, 16 bits": 22.1, "adafactor, no scale": 21.1, "adafactor": 21.1}
BY_A_KERNEL = {"came, kernel": 33, "adafactor, no scale, kernel": 21, "adafactor, kernel": 25}
ADAMW_8, CAME_8 = "optax.adamw, 8-bit state", "came, 8-bit state"
# Targets, matrices, bytes a parameter that an optimizer accesses at most, and that it keeps.
BOUNDS = [
    (TPUS, ("7B: 4096 x 11008", "7B: 32000 x 4096", "GPT-2: 50257 x 768"), IN_MEMORY, None),
    (TPUS, ("GPT-2: 768 x 3072", "1/8: 512 x 4096", "1/64: 500 x 4096"), ON_CHIP, None),
    # Matrices in main memory leave no temporaries.
    (V5E, ("7B: 32000 x 4096",), IN_MEMORY, 0.04),
    # Each mean is a pass of its own: two more reads of the momentum, one more of the gradient.
    (
        GPU,
        ("7B: 4096 x 4096", "7B: 32000 x 4096", "1/8: 512 x 4096"),
        {"came": 45, "adafactor, no scale": 25, "adafactor": 29},
        0.12,
    ),
    # Both means from one read.
    (
        GPU,
        ("7B: 4096 x 4096", "GPT-2: 50257 x 768", "1/8: 512 x 4096", "1/64: 4096 x 172"),
        BY_A_KERNEL,
        0.12,
    ),
    # GPUs find the scales of 8-bit state first and compute the moments again; TPUs write those of
    # large matrices to memory in between.
    (V5E, ("1/8: 512 x 4096",), {ADAMW_8: 16.2}, 0.5),
    (V5E, ("7B: 32000 x 4096",), {ADAMW_8: 43.5}, 3.1),
    (GPU, ("1/8: 512 x 4096",), {ADAMW_8: 24.5}, 1.1),
    (GPU, ("7B: 32000 x 4096",), {ADAMW_8: 22.5}, 0.1),
    (V5E, ("1/8: 512 x 4096",), {CAME_8: 18.2}, None),
    (V5E, ("7B: 32000 x 4096",), {CAME_8: 42.5}, None),
    (GPU, ("1/8: 512 x 4096", "7B: 32000 x 4096"), {CAME_8: 51.6}, None),
]


@functools.cache
def costs(target, name, matrix):
    (tx, dtype), shapes = OPTIMIZERS[name], benchmark.SHAPES[matrix]
    return benchmark.cost(benchmark.compiled(target, tx, shapes, dtype), shapes)


@pytest.mark.parametrize(
    ("target", "matrix", "most", "temporaries"),
    [(t, m, most, held) for ts, ms, most, held in BOUNDS for t in ts for m in ms],
)
def test_bytes(target, matrix, most, temporaries):
    need(target)
    for name, bound in most.items():
        moved, held = costs(target, name, matrix)
        assert 8 < moved < bound, name
        assert temporaries is None or held < temporaries, name


@pytest.mark.parametrize("target", ["v5e:4x4", "h200x16"])
@pytest.mark.parametrize(("name", "most"), [("came", 3), ("adafactor, no scale", 2)])
def test_all_reduces_of_a_tree(target, name, most):
    need(target)
    count, sent = benchmark.reductions(target, OPTIMIZERS[name][0], 3)
    assert 0 < count <= most
    assert sent > 0


@pytest.mark.parametrize("name", ["came", "adafactor"])
@pytest.mark.parametrize("spec", [PartitionSpec("data"), PartitionSpec(None, "data")])
def test_partitioned_matrices_are_neither_gathered_nor_looped_over(name, spec):
    """On CPUs, where a matrix of one device would be split into blocks."""
    tx, place = OPTIMIZERS[name][0], NamedSharding(model.zero_on(8).mesh, spec)

    def text_of(**options):
        params = {"w": jax.ShapeDtypeStruct((2048, 1024), jnp.float32, **options)}
        update = jax.jit(tx.update, out_shardings=(place, None) if options else None)
        state = jax.eval_shape(tx.init, params)
        return update.lower(params, state, params).compile().as_text()

    moves = r" (?:while|all-gather|all-to-all|collective-permute)\("
    assert not re.findall(moves, text_of(sharding=place))
    assert re.findall(r" while\(", text_of())


def test_the_state_of_a_large_model_is_made_without_more_memory():
    need("v5e:4x4")
    mesh, tx = shd.targets.mesh("v5e:4x4", (16,), ("data",)), optax_ext.came(1e-3)
    make = model.make_of(lambda: {f"w{i}": jnp.zeros((4096, 11008)) for i in range(8)}, tx)
    places = shd.Zero(mesh, stage=3).shardings(jax.eval_shape(make), tx=tx)
    memory = jax.jit(make, out_shardings=places).lower().compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.001 * memory.output_size_in_bytes
