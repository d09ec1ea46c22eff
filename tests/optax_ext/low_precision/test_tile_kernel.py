"""The kernel of ``low_precision_state(implementation="pallas")`` against XLA's form, interpreted.

Compiled for TPUs and on shards of a mesh: tests/sharding.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from optax_ext import Dynamic, Float8, Linear, kernels

from ...pallas_calls import kernels_in
from .kernels_and_xla import assert_same, check_steps, gradients_of, interpreted, pair, params_of

CASES = {
    # Options, sums over all gradients, stacks and vectors beside; nothing divides.
    "a norm of all gradients": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
        {"rounding": "compensated"},
        {"w": (3, 70, 140), "b": (40,)},
        "float32",
    ),
    "few rows": (optax.adamw(1e-3), {}, {"w": (9, 300), "v": (2, 17, 140)}, "float32"),
    "a stack of stacks": (
        optax.adam(1e-3),
        {"bits": Linear(8), "rounding": "compensated"},
        {"w": (2, 3, 128, 160)},
        "float32",
    ),
    "bfloat16 gradients": (
        optax.adamw(1e-3),
        {"bits": Float8(expand=False)},
        {"w": (200, 130), "v": (64, 1000)},
        "bfloat16",
    ),
    "sign": (optax.lion(1e-3), {"rounding": "nearest"}, {"w": (70, 1000)}, "float32"),
    "a second moment alone": (
        optax.adam(1e-3),
        {"formats": {r"\bmu": None}},
        {"w": (64, 160)},
        "float32",
    ),
}
DEFAULT = ("sign",)


def init(tx, params):
    return jax.jit(tx.init)(params)


def num_kernels(fn, *args):
    return len(kernels_in(fn, *args))


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in DEFAULT else pytest.mark.slow) for c in CASES]
)
def test_equals_the_form_of_xla(case):
    inner, options, shapes, dtype = CASES[case]
    plain, tiled = pair(inner, **options)
    params = params_of(shapes, dtype)
    state = init(plain, params)
    num = num_kernels(tiled.update, params, state, params)
    assert num == sum(len(s) > 1 for s in shapes.values())
    check_steps(jax.jit(plain.update), interpreted(tiled.update), params, state, dtype)


class HalvesOfRows:
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


@pytest.mark.parametrize("implementation", ["pallas", "rows"])
def test_codes_do_not_depend_on_shards(implementation, monkeypatch):
    """The noise of stochastic rounding is that of the element in the full array."""
    from optax_ext.low_precision import _row_loop

    monkeypatch.setattr(_row_loop.LoopOfUpdates, "min_size", 0)
    monkeypatch.setattr(_row_loop, "_MIN_STEP", 0)
    plain, other = pair(optax.trace(0.9), implementation)
    params = params_of({"w": (2, 32, 128)})
    state = init(plain, params)

    def on_shards(*args):
        with kernels.kernels_on(HalvesOfRows()):
            return other.update(*args)

    check_steps(jax.jit(plain.update), interpreted(on_shards), params, state, num_steps=2)


@pytest.mark.parametrize(
    ("inner", "options", "shape"),
    [
        (optax_ext.lamb(1e-3), {}, (64, 128)),  # norms of updates
        (optax_ext.came(1e-3), {}, (64, 128)),  # sums over rows and columns
        (optax.adamw(1e-3), {"bits": 4}, (64, 128)),  # scales of rows and columns
        (optax.adamw(1e-3), {"bits": Float8()}, (64, 128)),  # powers
        (optax.adamw(1e-3), {"bits": Dynamic(8, block_size=2048)}, (64, 512)),
        (optax.adamw(1e-3), {"bits": 16}, (64, 128)),
        (optax.adamw(1e-3), {}, (128, 64)),  # less than a slice
        (optax.adamw(1e-3), {}, (7, 512)),
        (optax.adamw(1e-3), {}, (100, 3, 128)),  # rows are dim 0
        (optax.adamw(1e-3), {}, (8192,)),
    ],
)
def test_what_no_kernel_takes(inner, options, shape):
    plain, tiled = pair(inner, **options)
    params = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
    state = jax.eval_shape(plain.init, params)
    with kernels.interpreted():
        assert num_kernels(tiled.update, params, state, params) == 0


@pytest.mark.parametrize("mode", ["another platform", "x64"])
def test_what_has_the_form_of_xla(mode):
    with jax.enable_x64(mode == "x64"):
        plain, tiled = pair(optax.trace(0.9))
        params = params_of({"w": (64, 128)})
        state = init(plain, params)
        call = interpreted if mode == "x64" else jax.jit
        want, have = jax.jit(plain.update)(params, state, params), call(tiled.update)(params, state)
        jax.tree.map(np.testing.assert_array_equal, have, want)


def copied(u, _):
    return jax.tree.map(jnp.array, u)


def narrowed(u, _):
    return jax.tree.map(lambda x: x.astype(jnp.float16), u)


@pytest.mark.parametrize(
    ("inner", "shapes", "num"),
    [
        (optax.adamw(1e-3), [(64, 128), (128, 300)], 2),
        (optax.adamw(1e-3), [(126, 16384, 53248)], 1),
        # An array that is copied, one that is not of a kernel's dtypes.
        (optax.chain(optax.trace(0.9), optax.stateless(copied)), [(64, 128)], 1),
        (optax.chain(optax.trace(0.9), optax.stateless(narrowed)), [(64, 128)], 0),
    ],
)
def test_in_programs_for_tpus(inner, shapes, num):
    _, tiled = pair(inner)
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    state = jax.eval_shape(tiled.init, params)
    traced = jax.jit(tiled.update).trace(params, state, params)
    assert traced.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == num
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("custom_call") == 0


# --- Parameters inside ----------------------------------------------------------------------------


def test_parameters_are_updated_as_by_optax():
    plain, tiled = pair(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
    update_params = kernels.update_params_of(tiled)
    params = params_of({"w": (64, 130), "b": (40,)}, "bfloat16")
    state = init(plain, params)

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


def test_only_the_outermost_transformation_updates_parameters():
    plain, tiled = pair(optax.adamw(1e-3))
    assert kernels.update_params_of(plain) is None
    assert kernels.update_params_of(optax.chain(tiled, optax.scale(0.5))) is None
    assert optax.with_extra_args_support(tiled) is tiled


def test_no_update_passes_through_memory():
    """A kernel reads gradient and parameter, this once for decay and sum, and writes the latter."""
    _, tiled = pair(optax.adamw(1e-3))
    params = {"w": jax.ShapeDtypeStruct((128, 256), jnp.float32)}
    state = jax.eval_shape(tiled.init, params)
    (call,) = kernels_in(kernels.update_params_of(tiled), params, state, params)

    def num_wide(variables):
        types = [v.aval for v in variables]
        return sum(x.size == 128 * 256 and x.dtype == jnp.float32 for x in types)

    assert (num_wide(call.invars), num_wide(call.outvars)) == (2, 1)
