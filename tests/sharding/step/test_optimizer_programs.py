"""What compiled optimizer steps read, keep and send; the tables are those of the benchmark."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
import step_bytes as benchmark
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optax_ext
import sharding as shd

from ...compilers import need

ADAMW, ADAMW_16 = 28, 22
# Bytes a parameter that a TPU may access: matrices in main memory, and those that fit on chip.
IN_MEMORY = {"came": 33, "came, 16 bits": ADAMW_16, "adafactor, no scale": 21, "adafactor": 25}
ON_CHIP = {"came": ADAMW, "came, 16 bits": ADAMW_16, "adafactor, no scale": 21, "adafactor": 21}
BOUNDS = {
    "7B: 4096 x 11008": IN_MEMORY,
    "7B: 32000 x 4096": IN_MEMORY,
    "GPT-2: 50257 x 768": IN_MEMORY,
    "GPT-2: 768 x 3072": ON_CHIP,
    "1/8: 512 x 4096": ON_CHIP,
    "1/64: 500 x 4096": ON_CHIP,
}


@functools.cache
def costs(target, name, matrix):
    tx, dtype = benchmark.OPTIMIZERS[name]
    shapes = benchmark.SHAPES[matrix]
    return benchmark.cost(benchmark.compiled(target, tx, shapes, dtype), shapes)


@pytest.mark.parametrize("target", ["v5e:1x1", "v6e:1x1"])
@pytest.mark.parametrize("matrix", BOUNDS)
def test_bytes_on_tpus(target, matrix):
    need(target)
    for name, bound in BOUNDS[matrix].items():
        moved, _ = costs(target, name, matrix)
        assert 8 < moved < bound + 0.1, name


# With 8-bit state: bytes of AdamW and of CAME, and what AdamW keeps. GPUs find the scales first and
# compute the moments again; TPUs write those of large matrices to memory in between.
LOW_BIT = {
    ("v5e:1x1", "1/8: 512 x 4096"): (16.2, 18.2, 0.5),
    ("v5e:1x1", "7B: 32000 x 4096"): (43.5, 42.5, 3.1),
    ("h200x1", "1/8: 512 x 4096"): (24.5, 51.6, 1.1),
    ("h200x1", "7B: 32000 x 4096"): (22.5, 51.6, 0.1),
}


@pytest.mark.parametrize(("target", "matrix"), LOW_BIT)
def test_bytes_with_8_bit_state(target, matrix):
    need(target)
    adamw, came, temporaries = LOW_BIT[target, matrix]
    moved, held = costs(target, "optax.adamw, 8-bit state", matrix)
    assert 8 < moved < adamw
    assert held < temporaries
    assert 8 < costs(target, "came, 8-bit state", matrix)[0] < came


@pytest.mark.parametrize("name", IN_MEMORY)
def test_whole_matrices_leave_no_temporaries_on_tpus(name):
    need("v5e:1x1")
    _, held = costs("v5e:1x1", name, "7B: 32000 x 4096")
    assert held < 0.01 * 4


# Where each mean is a pass of its own: two more reads of the momentum, one more of the gradient.
ON_GPU = {"came": 45, "adafactor, no scale": 25, "adafactor": 29}


@pytest.mark.parametrize("matrix", ["7B: 4096 x 4096", "7B: 32000 x 4096", "1/8: 512 x 4096"])
def test_bytes_on_gpus(matrix):
    need("h200x1")
    for name, bound in ON_GPU.items():
        moved, held = costs("h200x1", name, matrix)
        assert 8 < moved < bound, name
        assert held < 0.03 * 4, name


BY_A_KERNEL = {
    "came": (optax_ext.came(1e-3, implementation="pallas"), 33),
    "adafactor, no scale": (
        optax_ext.adafactor(1e-3, multiply_by_parameter_scale=False, implementation="pallas"),
        21,
    ),
    "adafactor": (optax_ext.adafactor(1e-3, implementation="pallas"), 25),
}


@pytest.mark.parametrize(
    "matrix", ["7B: 4096 x 4096", "GPT-2: 50257 x 768", "1/8: 512 x 4096", "1/64: 4096 x 172"]
)
def test_bytes_on_gpus_by_a_kernel(matrix):
    """Both means from one read."""
    need("h200x1")
    shapes = benchmark.SHAPES[matrix]
    for name, (tx, bound) in BY_A_KERNEL.items():
        moved, held = benchmark.cost(benchmark.compiled("h200x1", tx, shapes), shapes)
        assert 8 < moved < bound, name
        assert held < 0.03 * 4, name


@pytest.mark.parametrize("target", ["v5e:4x4", "h200x16"])
@pytest.mark.parametrize(("name", "most"), [("came", 3), ("adafactor, no scale", 2)])
def test_all_reduces_of_a_whole_tree(target, name, most):
    need(target)
    count, sent = benchmark.reductions(target, benchmark.OPTIMIZERS[name][0], 3)
    assert 0 < count <= most
    assert sent > 0


@pytest.mark.parametrize("name", ["came", "adafactor"])
@pytest.mark.parametrize("spec", [PartitionSpec("data"), PartitionSpec(None, "data")])
def test_partitioned_matrices_are_neither_gathered_nor_looped_over(name, spec):
    """On CPUs, where a matrix of one device would be split into blocks."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, spec)
    tx = benchmark.OPTIMIZERS[name][0]
    params = {"w": jax.ShapeDtypeStruct((2048, 1024), jnp.float32, sharding=place)}
    update = jax.jit(tx.update, out_shardings=(place, None))
    state = jax.eval_shape(tx.init, params)
    text = update.lower(params, state, params).compile().as_text()
    assert not re.findall(r" (?:while|all-gather|all-to-all|collective-permute)\(", text)
    alone = {"w": jax.ShapeDtypeStruct((2048, 1024), jnp.float32)}
    text = jax.jit(tx.update).lower(alone, state, alone).compile().as_text()
    assert re.findall(r" while\(", text)


def test_the_state_of_a_large_model_is_made_without_more_memory():
    need("v5e:4x4")
    mesh = shd.targets.mesh("v5e:4x4", (16,), ("data",))
    shapes = {f"w{i}": (4096, 11008) for i in range(8)}
    tx = optax_ext.came(1e-3)

    def make():
        params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
        return params, tx.init(params)

    places = shd.Zero(mesh, stage=3).shardings(jax.eval_shape(make), tx=tx)
    memory = jax.jit(make, out_shardings=places).lower().compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.001 * memory.output_size_in_bytes
