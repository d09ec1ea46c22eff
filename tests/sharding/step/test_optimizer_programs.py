"""What compiled optimizer steps read, keep and send; the tables are those of the benchmark."""

import re

import jax
import jax.numpy as jnp
import pytest
import step_bytes as benchmark
from jax.sharding import NamedSharding, PartitionSpec

from ...compilers import need
from .. import model

TPUS, V5E, GPU = ("v5e:1x1", "v6e:1x1"), ("v5e:1x1",), ("h200x1",)
IN_MEMORY = {"came": 33.1, "came, 16 bits": 22.1, "adafactor, no scale": 21.1, "adafactor": 25.1}
ON_CHIP = {"came": 28.1, "came, 16 bits": 22.1, "adafactor, no scale": 21.1, "adafactor": 21.1}
MATRICES = ("7B: 4096 x 4096", "GPT-2: 50257 x 768")  # whose rows are not of full tiles
ADAMW_8, CAME_8 = "optax.adamw, 8-bit state", "came, 8-bit state"
# Targets, matrices, bytes per parameter that an optimizer accesses at most, and that it keeps.
BOUNDS = [
    (TPUS, ("7B: 4096 x 11008", "GPT-2: 50257 x 768"), IN_MEMORY, None),
    (TPUS, ("GPT-2: 768 x 3072", "1/8: 512 x 4096"), ON_CHIP, None),
    # Matrices in main memory leave no temporaries.
    (V5E, ("7B: 32000 x 4096",), IN_MEMORY, 0.04),
    # Rows and columns in one pass, whose sums of tiles are an eighth of a byte a parameter.
    (GPU, MATRICES, {"came": 36.6, "adafactor, no scale": 20.4, "adafactor": 24.4}, 0.15),
    (GPU, (*MATRICES, "GPT-2: 768 x 3072"), {CAME_8: 33.0, ADAMW_8: 22.8}, 0.32),
    # GPUs find the scales of 8-bit state first and compute the moments again; TPUs write those of
    # large matrices to memory in between.
    (V5E, ("1/8: 512 x 4096",), {ADAMW_8: 16.2}, 0.5),
    (V5E, ("7B: 32000 x 4096",), {ADAMW_8: 43.5}, 3.1),
    (GPU, ("1/8: 512 x 4096",), {"came": 37.8, CAME_8: 34.2, ADAMW_8: 22.8}, 0.6),
    (V5E, ("1/8: 512 x 4096",), {CAME_8: 18.2}, None),
]


@pytest.mark.parametrize(
    ("target", "matrix", "most", "temporaries"),
    [(t, m, most, held) for ts, ms, most, held in BOUNDS for t in ts for m in ms],
)
def test_bytes(target, matrix, most, temporaries):
    need(target)
    shapes = benchmark.SHAPES[matrix]
    for name, bound in most.items():
        tx, dtype = benchmark.OPTIMIZERS[name]
        moved, held = benchmark.cost(benchmark.compiled(target, tx, shapes, dtype), shapes)
        assert 8 < moved < bound, name
        assert temporaries is None or held < temporaries, name


@pytest.mark.parametrize("name", ["came", "adafactor"])
@pytest.mark.parametrize("spec", [PartitionSpec("data"), PartitionSpec(None, "data")])
def test_partitioned_matrices_are_neither_gathered_nor_looped_over(name, spec):
    """On CPUs, where a matrix of one device would be split into blocks."""
    tx, place = benchmark.OPTIMIZERS[name][0], NamedSharding(model.zero_on(8).mesh, spec)

    def text_of(**options):
        params = {"w": jax.ShapeDtypeStruct((2048, 1024), jnp.float32, **options)}
        update = jax.jit(tx.update, out_shardings=(place, None) if options else None)
        state = jax.eval_shape(tx.init, params)
        return update.lower(params, state, params).compile().as_text()

    moves = r" (?:while|all-gather|all-to-all|collective-permute)\("
    assert not re.findall(moves, text_of(sharding=place))
    assert re.findall(r" while\(", text_of())
