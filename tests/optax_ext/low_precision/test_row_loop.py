"""The loop of ``low_precision_state(implementation="rows")`` against XLA's form, run on the CPU.

The values are the same up to where XLA fuses and so rounds.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

from optax_ext import Linear, kernels, low_precision_state
from optax_ext.low_precision import _row_loop

from .kernels_and_xla import check_steps, interpreted, pair, params_of


def num_loops(fn, *args):
    return str(jax.make_jaxpr(fn)(*args)).count("scan[")


@pytest.fixture
def small(monkeypatch):
    """Small matrices take loops of several steps."""
    for form in (_row_loop.RowLoop, _row_loop.LoopOfUpdates):
        monkeypatch.setattr(form, "min_size", 0)
        monkeypatch.setattr(form, "min_padded", 0)
    monkeypatch.setattr(_row_loop, "_MIN_STEP", 0)
    monkeypatch.setattr(_row_loop, "_STEP_SIZE", 2**12)


# The loops: over steps of equal height, and over the last rows of each matrix.
CASES = [
    ((3, 101, 299), {}, 2, False),
    ((129, 128), {"rounding": "compensated"}, 2, True),  # one row in the last block
    ((2, 3, 128, 160), {"bits": Linear(8), "rounding": "compensated"}, 1, False),
]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("shape", "options", "loops", "apply"),
    [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])],
)
def test_equals_the_form_of_xla(shape, options, loops, apply):
    _, tx = pair(optax.adamw(1e-3), "rows", **options)
    params = params_of({"w": shape})
    state = jax.jit(tx.init)(params)

    def update(grads, state, params):
        if apply:
            return kernels.update_params_of(tx)(grads, state, params)
        return tx.update(grads, state, params)

    looped = interpreted(update)
    assert num_loops(looped, params, state, params) == loops
    check_steps(jax.jit(update), looped, params, state)


@pytest.mark.parametrize(
    ("shape", "apply", "loops"),
    [
        ((50257, 768), False, 2),
        ((50257, 768), True, 2),
        ((4096, 11008), True, 2),
        # Updates would be an array of their own.
        ((4096, 11008), False, 0),
        # XLA's form stays in fast memory; a stack of small matrices would take too many steps.
        ((768, 3072), True, 0),
        ((2**12, 65, 128), True, 0),
    ],
)
def test_which_matrices(shape, apply, loops):
    tx = low_precision_state(optax.adamw(1e-3), implementation="rows")
    params = jax.ShapeDtypeStruct(shape, jnp.float32)
    update = kernels.update_params_of(tx) if apply else tx.update
    assert num_loops(update, params, jax.eval_shape(tx.init, params), params) == loops


def test_the_default_has_no_loop():
    tx = low_precision_state(optax.adamw(1e-3))
    params = jax.ShapeDtypeStruct((50257, 768), jnp.float32)
    assert num_loops(tx.update, params, jax.eval_shape(tx.init, params), params) == 0
    assert kernels.update_params_of(tx) is None
