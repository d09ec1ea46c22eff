"""The kernel of ``low_precision_state(implementation="pallas")`` against XLA's form, interpreted.

Compiled for TPUs and on shards of a mesh: tests/sharding.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _pallas_bytes import calls as kernels_in

import optax_ext
from optax_ext import Float8, kernels

from ..traces import step_of
from .kernels_and_xla import assert_same, check_steps, gradients_of, interpreted, pair, params_of

# Inner transformation, options, shapes, the gradients' dtype.
CASES = {
    "sign": (optax.lion(1e-3), {"rounding": "nearest"}, {"w": (70, 1000)}, "float32"),
    # Sums over all gradients, stacks and vectors beside; nothing divides.
    "a norm of all gradients": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
        {"rounding": "compensated"},
        {"w": (3, 70, 140), "b": (40,)},
        "float32",
    ),
    "few rows": (optax.adamw(1e-3), {}, {"w": (9, 300), "v": (2, 17, 140)}, "float32"),
    "bfloat16 gradients": (
        optax.adamw(1e-3),
        {"bits": Float8(expand=False)},
        {"w": (200, 130), "v": (2, 3, 64, 160)},
        "bfloat16",
    ),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c == "sign" else pytest.mark.slow) for c in CASES]
)
def test_equals_the_form_of_xla(case):
    inner, options, shapes, dtype = CASES[case]
    plain, tiled = pair(inner, **options)
    params = params_of(shapes, dtype)
    state = jax.jit(plain.init)(params)
    found = kernels_in(tiled.update, params, state, params)
    assert len(found) == sum(len(s) > 1 for s in shapes.values())
    check_steps(jax.jit(plain.update), interpreted(tiled.update), params, state, dtype)


@pytest.mark.parametrize(
    ("inner", "options", "shape"),
    [
        (optax_ext.lamb(1e-3), {}, (64, 128)),  # norms of updates
        (optax_ext.came(1e-3), {}, (64, 128)),  # sums over rows and columns
        (optax.adamw(1e-3), {"bits": 4}, (64, 128)),  # scales of rows and columns
        (optax.adamw(1e-3), {"bits": Float8()}, (64, 128)),  # powers
        (optax.adamw(1e-3), {}, (128, 64)),  # less than a slice
        (optax.adamw(1e-3), {}, (100, 3, 128)),  # rows are dim 0
    ],
)
def test_what_no_kernel_takes(inner, options, shape):
    plain, tiled = pair(inner, **options)
    params = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
    state = jax.eval_shape(plain.init, params)
    assert not kernels_in(tiled.update, params, state, params)


@pytest.mark.parametrize("shape", [(64, 128), (126, 16384, 53248)])
def test_in_programs_for_tpus(shape):
    """One kernel there, XLA's form elsewhere."""
    _, tiled = pair(optax.adamw(1e-3))
    params = jax.ShapeDtypeStruct(shape, jnp.float32)
    state = jax.eval_shape(tiled.init, params)
    traced = jax.jit(tiled.update).trace(params, state, params)
    assert traced.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == 1
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("custom_call") == 0


# --- Parameters inside ----------------------------------------------------------------------------


def test_parameters_are_updated_as_by_optax():
    plain, tiled = pair(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
    update_params = kernels.update_params_of(tiled)
    params = params_of({"w": (64, 130), "b": (40,)}, "bfloat16")
    state = jax.jit(plain.init)(params)
    assert len(kernels_in(update_params, params, state, params)) == 1
    by_hand, inside = jax.jit(step_of(plain)), interpreted(update_params)
    for i in range(3):
        grads = gradients_of(i, params)
        want, have = by_hand(grads, state, params), inside(grads, state, params)
        for k, x in want[0].items():
            assert have[0][k].dtype == x.dtype
            error = np.abs(np.asarray(have[0][k] - x, np.float64))
            assert np.max(error) <= float(jnp.finfo(x.dtype).eps) * np.max(np.abs(x))
        assert_same(have[1], want[1])
        params, state = want
