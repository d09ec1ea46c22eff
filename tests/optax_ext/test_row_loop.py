"""The loop of ``low_precision_state(implementation="rows")`` against XLA's form, run on the CPU.

The values are the same up to where XLA fuses and so rounds.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_ext import Linear, kernels, low_precision_state
from optax_ext.low_precision import _row_loop

from .test_tile_kernel import assert_same


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
@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("apply", [False, True])
@pytest.mark.parametrize(
    ("shape", "options", "loops"),
    [
        ((128, 256), {}, 1),
        ((129, 128), {}, 2),  # one row in the last block, less than a block in the last step
        ((3, 101, 299), {}, 2),
        ((2, 3, 128, 160), {"bits": Linear(8), "rounding": "compensated"}, 1),
        ((70, 4500), {"rounding": "nearest"}, 2),
    ],
)
@pytest.mark.usefixtures("small")
def test_equals_the_form_of_xla(shape, options, loops, apply):
    tx = low_precision_state(optax.adamw(1e-3), min_size=0, implementation="rows", **options)
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=shape), jnp.float32)}
    state = tx.init(params)

    def update(grads, state, params):
        if apply:
            return kernels.update_params_of(tx)(grads, state, params)
        return tx.update(grads, state, params)

    def looped(*args):
        with kernels.interpreted():
            return update(*args)

    assert num_loops(looped, params, state, params) == loops
    by_xla, by_loop = jax.jit(update), jax.jit(looped)
    for _ in range(4):
        # Rows differ by decades, so that blocks do.
        rows = 10.0 ** rng.uniform(-4, 1, (*shape[:-1], 1))
        grads = {"w": jnp.asarray(rng.normal(size=shape) * rows, jnp.float32)}
        want, have = (fn(grads, state, params) for fn in (by_xla, by_loop))
        assert_same(have, want)
        state = want[1]


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
