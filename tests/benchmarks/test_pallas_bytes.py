"""The counter of a kernel's bytes: kernels of known traffic, and the library's own."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest
from _pallas_bytes import Moved, calls, moved, total
from _steps import step_of
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import optax_ext

X = jax.ShapeDtypeStruct((32, 256), jnp.float32)


def count(grid, in_specs, out_spec, *arrays, out=X):
    """What a kernel of these blocks moves."""
    specs = {"grid": grid, "in_specs": in_specs, "out_specs": out_spec}
    call = pl.pallas_call(lambda *refs: None, out_shape=out, **specs)
    (found,) = calls(call, *arrays)
    return moved(found)


def block(*shape, at=lambda i, j: (i, j)):
    return pl.BlockSpec(shape, at)


VECTOR = jax.ShapeDtypeStruct((256,), jnp.bfloat16)
ODD = jax.ShapeDtypeStruct((20, 200), jnp.uint8)
STACK = jax.ShapeDtypeStruct((3, 32, 256), jnp.float32)
NUMBERS = jax.ShapeDtypeStruct((3,), jnp.int32)
BLOCK = block(8, 128)
ROW, COLUMN = block(8, 128, at=lambda i, j: (i, 0)), block(8, 128, at=lambda i, j: (0, j))
LAYER = pl.BlockSpec((None, 32, 256), lambda k: (k, 0, 0))
WINDOW = pl.BlockSpec((pl.Element(8), pl.Element(256)), lambda k: (4 * k, 0))  # half of it again
SCALARS = pl.BlockSpec(memory_space=pltpu.SMEM)

KERNELS = {
    "every block once": (((4, 2), [BLOCK], BLOCK, X), (32768, 32768)),
    # Along the inner dim the block of a row stays; that of a column comes back in every row.
    "a row stays": (((4, 2), [ROW], ROW, X), (4 * 4096, 4 * 4096)),
    "a column comes back": (((4, 2), [COLUMN], COLUMN, X), (8 * 4096, 8 * 4096)),
    "a vector is read again for every row": (
        ((4, 2), [BLOCK, block(128, at=lambda i, j: (j,))], BLOCK, X, VECTOR),
        (32768 + 4 * 512, 32768),
    ),
    "the order of the grid matters": (
        ((2, 3), [block(8, 128, at=lambda i, j: (0, i))], BLOCK, X),
        (2 * 4096, 4 * 4096),
    ),
    "blocks end at the border": (((3, 2), [BLOCK], BLOCK, ODD), (4000, 4000)),
    "a squeezed dim": (((3,), [LAYER], LAYER, STACK), (98304, 98304)),
    "windows": (((3,), [WINDOW], WINDOW, X), (3 * 8192, 3 * 8192)),
    "scalars": (((4, 2), [SCALARS, BLOCK], BLOCK, NUMBERS, X), (12 + 32768, 32768)),
}


@pytest.mark.parametrize("case", KERNELS)
def test_kernels_of_known_traffic(case):
    arguments, (read, written) = KERNELS[case]
    out = next(x for x in arguments[3:] if x.ndim > 1)
    assert count(*arguments, out=out) == Moved(read, written)


def test_what_cannot_be_counted():
    by_hand = pl.BlockSpec(memory_space=pl.ANY)
    with pytest.raises(ValueError, match=r"copies from .* by itself"):
        count((4, 2), [by_hand], block(8, 128), X)


def test_loops():
    def in_a_loop(x):
        call = pl.pallas_call(lambda *refs: None, out_shape=X)
        return jax.lax.scan(lambda c, _: (call(c), None), x, None, length=5)[0]

    assert total(in_a_loop, X) == 5 * 2 * 32768
    with pytest.raises(ValueError, match="unknown number of times"):
        total(lambda x: jax.lax.while_loop(lambda c: c[0, 0] < 1, lambda c: in_a_loop(c), x), X)


# Of the library's own kernels: the optimizer, options, and bytes of a parameter.

CASES = {
    "adamw": (optax.adamw(1e-3), {}, 16.06),
    "adam": (optax.adam(1e-3), {}, 16.06),
    "fp8": (optax.adamw(1e-3), {"bits": optax_ext.Float8(expand=False)}, 16.13),
    "lion": (optax.lion(1e-3), {"rounding": "nearest"}, 14.03),
    "compensated": (optax.adamw(1e-3), {"rounding": "compensated"}, 20.06),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(4096, 11008), (50257, 768), (4, 2048, 2048)], ids=str)
def test_bytes_of_low_precision_steps(case, shape):
    """Gradient 4, parameter 8; of each moment codes 2, and scales 8 in 256 elements (fp8: 128)."""
    inner, options, per_parameter = CASES[case]
    tx = optax_ext.low_precision_state(inner, **options)
    params = [jax.ShapeDtypeStruct(shape, jnp.float32)]
    found = total(step_of(tx), params, jax.eval_shape(tx.init, params), params) / math.prod(shape)
    assert found == pytest.approx(per_parameter, abs=0.006)
