"""The loop over rows of programs for TPUs against XLA's form.

Run on the CPU; the values are the same up to where XLA fuses and so rounds.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

from optax_ext import kernels
from optax_ext.low_precision import _row_loop

from .kernels_and_xla import check_steps, interpreted, low, params_of


def num_loops(fn, *args):
    return str(jax.make_jaxpr(fn)(*args)).count("scan[")


@pytest.fixture
def small(monkeypatch):
    """Small matrices take loops of several steps."""
    for name in ("_MIN_SIZE", "_MIN_PADDED", "_MIN_STEP"):
        monkeypatch.setattr(_row_loop, name, 0)
    monkeypatch.setattr(_row_loop, "_STEP_SIZE", 2**11)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("shape", "options", "apply"),
    [
        ((3, 101, 99), {}, False),
        # One row in the last block.
        pytest.param((129, 64), {"rounding": "compensated"}, True, marks=pytest.mark.slow),
    ],
)
def test_equals_the_form_of_xla(shape, options, apply):
    tx = low(optax.adamw(1e-3), **options)
    params = params_of({"w": shape})
    state = jax.jit(tx.init)(params)
    update = kernels.update_params_of(tx) if apply else tx.update
    looped = interpreted(update)
    # Over steps of equal height, and over the last rows of each matrix.
    assert num_loops(looped, params, state, params) == 2
    check_steps(jax.jit(update), looped, params, state)


@pytest.mark.parametrize(
    ("shape", "apply", "loops"),
    [
        ((50257, 96), False, 2),
        ((2**18, 64), True, 1),
        ((2**18, 64), False, 1),
        # XLA's form stays in fast memory; a stack of small matrices would take too many steps.
        ((2**15, 64), True, 0),
        ((2**12, 65, 96), True, 0),
    ],
)
def test_which_matrices(shape, apply, loops):
    tx = low(optax.adamw(1e-3))
    params = jax.ShapeDtypeStruct(shape, jnp.float32)
    update = kernels.update_params_of(tx) if apply else tx.update
    state = jax.eval_shape(tx.init, params)
    assert num_loops(interpreted(update), params, state, params) == loops
