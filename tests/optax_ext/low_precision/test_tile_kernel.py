"""The kernel of ``low_precision_state(implementation="pallas")`` against XLA's form, interpreted.

Compiled for TPUs and on shards of a mesh: tests/sharding.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from optax_ext import Float8, kernels
from optax_ext.low_precision import _row_loop

from ...pallas_calls import kernels_in
from .kernels_and_xla import (
    Interpreted,
    assert_same,
    check_steps,
    gradients_of,
    interpreted,
    pair,
    params_of,
)

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


def num_kernels(fn, *args):
    return len(kernels_in(fn, *args))


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c == "sign" else pytest.mark.slow) for c in CASES]
)
def test_equals_the_form_of_xla(case):
    inner, options, shapes, dtype = CASES[case]
    plain, tiled = pair(inner, **options)
    params = params_of(shapes, dtype)
    state = jax.jit(plain.init)(params)
    num = num_kernels(tiled.update, params, state, params)
    assert num == sum(len(s) > 1 for s in shapes.values())
    check_steps(jax.jit(plain.update), interpreted(tiled.update), params, state, dtype)


class HalvesOfRows(Interpreted):
    """Shards by rows, of which each is computed in turn: what a kernel sees on two devices."""

    def shape_of(self, path, shape):
        del path
        return (*shape[:-2], shape[-2] // 2, shape[-1])

    def run(self, path, fn, operands, dims, result_dims):
        del path
        rows = max(d for of in result_dims for d in of) - 1

        def half(i, x, of):
            if rows not in of:
                return x
            return jnp.split(x, 2, axis=of.index(rows))[i]

        parts = [
            fn(*(half(i, x, of) for x, of in zip(operands, dims, strict=True))) for i in (0, 1)
        ]
        return [
            jnp.concatenate(both, of.index(rows))
            for both, of in zip(zip(*parts, strict=True), result_dims, strict=True)
        ]


@pytest.mark.parametrize("columns", [128, 96], ids=["kernel", "loop"])
def test_codes_do_not_depend_on_shards(columns, monkeypatch):
    """The noise of stochastic rounding is that of the element in the full array."""
    monkeypatch.setattr(_row_loop, "_MIN_SIZE", 0)
    monkeypatch.setattr(_row_loop, "_MIN_STEP", 0)
    plain, other = pair(optax.trace(0.9))
    params = params_of({"w": (2, 32, columns)})
    state = jax.jit(plain.init)(params)
    update = kernels.update_params_of(other)

    def by_hand(grads, state, params):
        updates, state = plain.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    on_shards = interpreted(update, HalvesOfRows())
    check_steps(jax.jit(by_hand), on_shards, params, state, num_steps=2)


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
    assert num_kernels(tiled.update, params, state, params) == 0


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

    @jax.jit
    def by_hand(grads, state, params):
        updates, state = plain.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    assert num_kernels(update_params, params, state, params) == 1
    inside = interpreted(update_params)
    for i in range(3):
        grads = gradients_of(i, params)
        want, have = by_hand(grads, state, params), inside(grads, state, params)
        for k, x in want[0].items():
            assert have[0][k].dtype == x.dtype
            error = np.abs(np.asarray(have[0][k] - x, np.float64))
            assert np.max(error) <= float(jnp.finfo(x.dtype).eps) * np.max(np.abs(x))
        assert_same(have[1], want[1])
        params, state = want
