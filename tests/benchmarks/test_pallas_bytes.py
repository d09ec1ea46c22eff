"""The counter of a kernel's bytes: kernels of known traffic, and the library's own."""

import functools
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from _pallas_bytes import Moved, calls, moved, total
from _steps import lowered, step_of
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton

import optax_ext
import sharding as shd
from optax_ext import _sums_kernel

from ..compilers import need

X = jax.ShapeDtypeStruct((32, 256), jnp.float32)


def count(grid, in_specs, out_spec, *arrays, out=X, **options):
    """What a kernel of these blocks moves."""
    call = pl.pallas_call(
        lambda *refs: None,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_spec,
        out_shape=out,
        **options,
    )
    (found,) = calls(call, *arrays)
    return moved(found)


def block(*shape, at=lambda i, j: (i, j)):
    return pl.BlockSpec(shape, at)


def test_every_block_once():
    assert count((4, 2), [block(8, 128)], block(8, 128), X) == Moved(32768, 32768)


def test_a_block_that_stays_is_read_and_written_once():
    row, column = block(8, 128, at=lambda i, j: (i, 0)), block(8, 128, at=lambda i, j: (0, j))
    # Along the inner dim the block of a row stays; that of a column comes back in every row.
    assert count((4, 2), [row], row, X) == Moved(4 * 4096, 4 * 4096)
    assert count((4, 2), [column], column, X) == Moved(8 * 4096, 8 * 4096)
    # One block in all stays to the end.
    assert count((1, 1), [row], column, X) == Moved(4096, 4096)


def test_a_vector_is_read_again_for_every_row():
    vector = jax.ShapeDtypeStruct((256,), jnp.bfloat16)
    spec = block(128, at=lambda i, j: (j,))
    assert count((4, 2), [block(8, 128), spec], block(8, 128), X, vector).read == 32768 + 4 * 512


def test_the_order_of_the_grid_matters():
    spec = block(8, 128, at=lambda i, j: (0, i))
    assert count((2, 3), [spec], spec, X) == Moved(2 * 4096, 2 * 4096)
    spec = block(8, 128, at=lambda i, j: (0, j))
    assert count((2, 3), [spec], spec, X) == Moved(6 * 4096 - 2 * 4096, 6 * 4096 - 2 * 4096)


def test_blocks_end_at_the_border():
    x = jax.ShapeDtypeStruct((20, 200), jnp.uint8)
    found = count((3, 2), [block(8, 128)], block(8, 128), x, out=x)
    assert found == Moved(4000, 4000)
    # The last blocks alone: 4 rows, 72 columns.
    last = block(8, 128, at=lambda i, j: (2, 1))
    assert count((3, 2), [last], last, x, out=x) == Moved(288, 288)


def test_squeezed_dims_and_windows():
    x = jax.ShapeDtypeStruct((3, 32, 256), jnp.float32)
    spec = pl.BlockSpec((None, 32, 256), lambda k: (k, 0, 0))
    assert count((3,), [spec], spec, x, out=x) == Moved(98304, 98304)
    window = pl.BlockSpec(
        (pl.Element(8), pl.Element(256)), lambda k: (4 * k, 0)
    )  # half of it again
    assert count((3,), [window], window, X) == Moved(3 * 8192, 3 * 8192)


def test_scalars_and_no_grid():
    scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
    number = jax.ShapeDtypeStruct((3,), jnp.int32)
    assert count((4, 2), [scalars, block(8, 128)], block(8, 128), number, X).read == 12 + 32768
    assert count((), [pl.BlockSpec()], pl.BlockSpec(), X) == Moved(32768, 32768)


def test_on_a_gpu_each_step_reads_its_blocks():
    row = block(8, 128, at=lambda i, j: (i, 0))
    found = count((4, 2), [row], block(8, 128), X, compiler_params=triton.CompilerParams())
    assert found == Moved(8 * 4096, 32768)


def test_what_cannot_be_counted():
    by_hand = pl.BlockSpec(memory_space=pl.ANY)
    with pytest.raises(ValueError, match=r"copies from .* by itself"):
        count((4, 2), [by_hand], block(8, 128), X)
    prefetched = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(4,),
        in_specs=[pl.BlockSpec((8, 128), lambda i, s: (s[i], 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i, s: (i, 0)),
    )
    call = pl.pallas_call(lambda *refs: None, grid_spec=prefetched, out_shape=X)
    (found,) = calls(call, jax.ShapeDtypeStruct((4,), jnp.int32), X)
    with pytest.raises(ValueError, match="depend on data"):
        moved(found)


def test_loops():
    def in_a_loop(x):
        call = pl.pallas_call(lambda *refs: None, out_shape=X)
        return jax.lax.scan(lambda c, _: (call(c), None), x, None, length=5)[0]

    assert total(in_a_loop, X) == 5 * 2 * 32768
    with pytest.raises(ValueError, match="unknown number of times"):
        total(lambda x: jax.lax.while_loop(lambda c: c[0, 0] < 1, lambda c: in_a_loop(c), x), X)


# --- Kernels of the library -----------------------------------------------------------------------


CASES = {
    "adamw": (optax.adamw(1e-3), {}, 16.06),
    "adam": (optax.adam(1e-3), {}, 16.06),
    "fp8": (optax.adamw(1e-3), {"bits": optax_ext.Float8(expand=False)}, 16.13),
    "lion": (optax.lion(1e-3), {"rounding": "nearest"}, 14.03),
    "compensated": (optax.adamw(1e-3), {"rounding": "compensated"}, 20.06),
}


def arguments(tx, shape):
    params = [jax.ShapeDtypeStruct(shape, jnp.float32)]
    return params, jax.eval_shape(tx.init, params), params


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(4096, 11008), (50257, 768), (4, 2048, 2048)], ids=str)
def test_bytes_of_low_precision_steps(case, shape):
    """Gradient 4, parameter 8; of each moment codes 2, and scales 8 in 256 elements (fp8: 128)."""
    inner, options, per_parameter = CASES[case]
    tx = optax_ext.low_precision_state(inner, implementation="pallas", **options)
    found = total(step_of(tx), *arguments(tx, shape)) / math.prod(shape)
    assert found == pytest.approx(per_parameter, abs=0.006)


@pytest.mark.parametrize("shape", [(4096, 11008), (50257, 768), (4, 2048, 2048)], ids=str)
@pytest.mark.parametrize("case", ["adamw", "lion"])
def test_equals_the_audit(case, shape):
    need("v5e:1x1")
    inner, options, _ = CASES[case]
    tx = optax_ext.low_precision_state(inner, implementation="pallas", **options)
    audit = shd.audit(lowered("v5e:1x1", tx, [shape]).compile())
    counted = total(step_of(tx), *arguments(tx, shape))
    assert counted == pytest.approx(sum(audit.nbytes.values()), rel=0.01)


def test_bytes_of_sums_of_rows_and_columns():
    """4 a parameter, and the sums of each tile: of 64 rows and of 256 columns."""
    x = jax.ShapeDtypeStruct((1000, 1000), jnp.float32)
    sweep = functools.partial(_sums_kernel.sweep, lambda a, _: (a * a, None), ((0,), (1,)))
    tiles = 4 * (1000 * 4 + 1000 * 16)
    assert total(lambda x: sweep(x, ()), x) == 4 * 1000 * 1000 + tiles
