"""The kernel of ``low_precision_state(implementation="pallas")`` against XLA's form, interpreted.

The two round in other places, as XLA fuses them. Updates agree to 1e-6 of their largest element and
scales to 1e-6; one code in a thousand may be the next one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from optax_ext import Dynamic, Float8, Linear, Quantized, kernels, low_precision_state

from ..pallas_calls import kernels_in


def grads_of(step, params, dtype="float32"):
    """Rows differ by decades, so that blocks do; of full rank."""
    rng = np.random.default_rng(step)

    def make(x):
        rows = 10.0 ** rng.uniform(-4, 1, (*x.shape[:-1], 1))
        return jnp.asarray(rng.normal(size=x.shape) * rows, dtype)

    return jax.tree.map(make, params)


def params_of(shapes, dtype="float32"):
    rng = np.random.default_rng(99)
    return {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in shapes.items()}


def pair(inner, **options):
    options = {"min_size": 0} | options
    return (
        low_precision_state(inner, **options),
        low_precision_state(inner, implementation="pallas", **options),
    )


def num_kernels(fn, *args):
    return len(kernels_in(fn, *args))


def interpreted(fn):
    def call(*args):
        with kernels.interpreted():
            return fn(*args)

    return jax.jit(call)


def assert_same(have, want):
    is_stored = lambda x: isinstance(x, Quantized)  # noqa: E731
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(have, is_leaf=is_stored),
        jax.tree.leaves(want, is_leaf=is_stored),
        strict=True,
    ):
        name = jax.tree_util.keystr(path)
        if is_stored(a):
            for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
                x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
                if x.shape == a.shape:
                    assert np.mean(x != y) < 1e-3, name
                else:
                    np.testing.assert_allclose(x, y, rtol=1e-6, err_msg=name)
        else:
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            assert np.all(np.abs(a - b) <= 1e-6 * np.max(np.abs(b))), name


CASES = {
    "adamw": (optax.adamw(1e-3), {}, {"w": (128, 256), "b": (40,)}, "float32"),
    "nothing divides": (optax.adamw(1e-3), {}, {"w": (3, 101, 299)}, "float32"),
    "few rows": (optax.adamw(1e-3), {}, {"w": (9, 300), "v": (2, 17, 140)}, "float32"),
    "wide": (optax.nadam(1e-3), {}, {"w": (70, 4500)}, "float32"),
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
    "a norm of all gradients": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
        {"rounding": "compensated"},
        {"w": (90, 140), "v": (64, 128)},
        "float32",
    ),
    "injected": (optax.inject_hyperparams(optax.adamw)(1e-3), {}, {"w": (64, 128)}, "float32"),
    "a second moment alone": (
        optax.adam(1e-3),
        {"formats": {r"\bmu": None}},
        {"w": (64, 160)},
        "float32",
    ),
}


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_form_of_xla(case):
    inner, options, shapes, dtype = CASES[case]
    plain, tiled = pair(inner, **options)
    params = params_of(shapes, dtype)
    state = plain.init(params)
    num = num_kernels(tiled.update, params, plain.init(params), params)
    assert num == sum(len(s) > 1 for s in shapes.values())
    update, update_tiled = jax.jit(plain.update), interpreted(tiled.update)
    for step in range(4):
        grads = grads_of(step, params, dtype)
        want, have = update(grads, state, params), update_tiled(grads, state, params)
        assert_same(have, want)
        state = want[1]


def test_hundreds_of_steps():
    plain, tiled = pair(optax.adamw(1e-2))
    params = params_of({"w": (65, 129)})
    runs = {}
    for name, tx in (("xla", plain), ("pallas", tiled)):

        def step(carry, i, tx=tx):
            params, state = carry
            grads = {"w": jnp.sin(params["w"] * 3 + i) + 0.3 * jnp.cos(i + params["w"] ** 2)}
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        run = interpreted(lambda carry, step=step: jax.lax.scan(step, carry, jnp.arange(300.0)))
        runs[name] = run((params, tx.init(params)))[0]
    (want, _), (have, _) = runs["xla"], runs["pallas"]
    moved = np.linalg.norm(want["w"] - params["w"])
    # A rounding difference moves a code now and then; the paths stay together.
    assert np.linalg.norm(have["w"] - want["w"]) < 0.01 * moved


@pytest.mark.slow(keep=3)
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
    params = params_of({"w": shape})
    grads, state = grads_of(0, params), plain.init(params)
    assert num_kernels(tiled.update, grads, state, params) == 0
    want, have = (
        jax.jit(plain.update)(grads, state, params),
        interpreted(tiled.update)(grads, state, params),
    )
    jax.tree.map(np.testing.assert_array_equal, have, want)


def test_programs_for_other_platforms_are_those_of_xla():
    plain, tiled = pair(optax.adamw(1e-3))
    params = params_of({"w": (64, 128)})
    state = plain.init(params)
    for grads in (grads_of(0, params), grads_of(1, params)):
        want, have = (jax.jit(tx.update)(grads, state, params) for tx in (plain, tiled))
        jax.tree.map(np.testing.assert_array_equal, have, want)


def test_in_programs_for_tpus():
    _, tiled = pair(optax.adamw(1e-3))
    params = params_of({"w": (64, 128), "v": (128, 300)})
    traced = jax.jit(tiled.update).trace(params, tiled.init(params), params)
    assert traced.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == 2
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("custom_call") == 0


@pytest.mark.parametrize("shape", [(126, 16384, 53248), (128256, 16384), (40, 5120, 13824)])
def test_large_models_lower(shape):
    _, tiled = pair(optax.adamw(1e-3))
    params = {"w": jax.ShapeDtypeStruct(shape, jnp.bfloat16)}
    state = jax.eval_shape(tiled.init, params)
    traced = jax.jit(tiled.update).trace(params, state, params)
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_noise_of_matrices_beyond_2_32_elements():
    """Each matrix has its own hash; the noise is that of the full array."""
    from optax_ext.low_precision import _rounding

    key, shape = _rounding.make_key(3), (2, 3, 5, 7)
    hashes, first = _rounding.hashes_of_matrices(key, 11, shape)
    index = jnp.arange(35, dtype=jnp.uint32).reshape(5, 7)
    have = [_rounding.uniform_at(f + index, h) for h, f in zip(hashes, first, strict=True)]
    np.testing.assert_array_equal(np.stack(have).reshape(shape), _rounding.uniform(key, 11, shape))


def test_matrices_beyond_2_32_elements(monkeypatch):
    from optax_ext.low_precision import _rounding

    monkeypatch.setattr(_rounding, "_MAX_INDEXED", 100)
    test_noise_of_matrices_beyond_2_32_elements()
    assert _rounding.numbers_matrices((4, 10, 10))
    assert not _rounding.numbers_matrices((10, 11))


def test_bad_input():
    message = "implementation must be 'xla', 'rows' or 'pallas', got 'triton'"
    with pytest.raises(ValueError, match=message):
        low_precision_state(optax.adamw(1e-3), implementation="triton")


def test_x64_mode_has_the_form_of_xla(x64):
    plain, tiled = pair(optax.adamw(1e-3))
    params = params_of({"w": (64, 128)})
    state = plain.init(params)
    want, have = (jax.jit(tx.update)(params, state, params) for tx in (plain, tiled))
    jax.tree.map(np.testing.assert_array_equal, have, want)


@pytest.mark.parametrize(
    ("inner", "num"),
    [
        # An array that is copied, one that is not of a kernel's dtypes.
        (
            optax.chain(optax.trace(0.9), optax.stateless(lambda u, _: jax.tree.map(jnp.array, u))),
            1,
        ),
        (
            optax.chain(
                optax.trace(0.9),
                optax.stateless(lambda u, _: jax.tree.map(lambda x: x.astype(jnp.float16), u)),
            ),
            0,
        ),
    ],
)
def test_odd_transformations_in_programs_for_tpus(inner, num):
    _, tiled = pair(inner)
    params = params_of({"w": (64, 128)})
    traced = jax.jit(tiled.update).trace(params, tiled.init(params), params)
    assert traced.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == num


# --- Parameters inside ----------------------------------------------------------------------------


SHAPES = {"w": (128, 256), "v": (64, 130), "b": (40,)}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_are_updated_as_by_optax(dtype):
    plain, tiled = pair(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
    update_params = kernels.update_params_of(tiled)
    params = params_of(SHAPES, dtype)
    state = plain.init(params)

    @jax.jit
    def by_hand(grads, state, params):
        updates, state = plain.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    assert num_kernels(update_params, params, state, params) == 2
    for i in range(3):
        grads = grads_of(i, params)
        want, have = by_hand(grads, state, params), interpreted(update_params)(grads, state, params)
        for k, x in want[0].items():
            assert have[0][k].dtype == x.dtype
            error = np.abs(np.asarray(have[0][k] - x, np.float64))
            assert np.max(error) <= float(jnp.finfo(dtype).eps) * np.max(np.abs(x))
        assert_same(have[1], want[1])
        eager = update_params(grads, state, params)[0]
        np.testing.assert_allclose(eager["b"].astype(float), want[0]["b"].astype(float), rtol=1e-2)
        params, state = want


def test_only_the_outermost_transformation_updates_parameters():
    plain, tiled = pair(optax.adamw(1e-3))
    assert kernels.update_params_of(plain) is None
    assert kernels.update_params_of(optax.chain(tiled, optax.scale(0.5))) is None
    assert optax.with_extra_args_support(tiled) is tiled


def test_no_update_passes_through_memory():
    """A kernel reads gradient and parameter, this once for decay and sum, and writes the latter."""
    _, tiled = pair(optax.adamw(1e-3))
    params = params_of({"w": (128, 256)})
    state = tiled.init(params)
    (call,) = kernels_in(kernels.update_params_of(tiled), params, state, params)

    def num_wide(variables):
        types = [v.aval for v in variables]
        return sum(x.size == 128 * 256 and x.dtype == jnp.float32 for x in types)

    assert (num_wide(call.invars), num_wide(call.outvars)) == (2, 1)
