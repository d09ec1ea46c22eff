"""The kernel of programs for TPUs against XLA's form, interpreted.

Compiled for TPUs and on shards of a mesh: tests/sharding.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _pallas_bytes import calls as kernels_in
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_ext
from optax_ext import Float8, kernels

from ..traces import step_of
from .kernels_and_xla import assert_same, check_steps, gradients_of, interpreted, low, params_of

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
    # In memory, and so in the kernel, columns are the rows; one row in the last block.
    "few columns": (optax.adamw(1e-3), {}, {"w": (3, 301, 99), "v": (129, 64)}, "float32"),
    "sums over rows and columns": (
        optax_ext.came(1e-3, weight_decay=0.1),
        {"rounding": "compensated"},
        # Several tiles below each other and side by side, and as many of columns and rows.
        {"w": (2, 70, 1000), "v": (301, 99), "u": (130, 4200), "t": (1100, 300), "b": (40,)},
        "float32",
    ),
    "norms of updates": (
        optax_ext.lamb(1e-3),
        {},
        {"w": (70, 1000), "v": (2, 301, 99), "b": (40,)},
        "float32",
    ),
    # Norms of what other norms select.
    "sums of sums": (
        optax.chain(optax_ext.scale_by_came(), optax.scale_by_trust_ratio(), optax.scale(-1e-3)),
        {},
        {"w": (130, 300), "v": (2, 300, 64)},
        "float32",
    ),
    # Of an update by the full second moment, and of gradients alone.
    "a norm of an update": (
        optax_ext.adafactor(1e-3, momentum=0.9),
        {},
        {"w": (70, 300)},
        "float32",
    ),
    "no sums of moments": (
        optax_ext.adafactor(1e-3, momentum=0.9),
        {},
        {"w": (130, 300)},
        "float32",
    ),
    "bfloat16 gradients": (
        optax.adamw(1e-3),
        {"bits": Float8(expand=False)},
        {"w": (200, 130), "v": (2, 3, 64, 160)},
        "bfloat16",
    ),
}

# Of each matrix, if not 1: the last pass makes sums that the update alone needs.
PASSES = {"a norm of an update": 2, "sums of sums": 3}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c == "sign" else pytest.mark.slow) for c in CASES]
)
def test_equals_the_form_of_xla(case):
    inner, options, shapes, dtype = CASES[case]
    tx = low(inner, **options)
    params = params_of(shapes, dtype)
    state = jax.jit(tx.init)(params)
    found = kernels_in(tx.update, params, state, params)
    assert len(found) == PASSES.get(case, 1) * sum(len(s) > 1 for s in shapes.values())
    check_steps(jax.jit(tx.update), interpreted(tx.update), params, state, dtype)


def test_the_state_says_how_it_is_rounded():
    params = params_of({"w": (64, 128)})
    state = jax.jit(low(optax.lion(1e-3)).init)(params)
    tx = low(optax.lion(1e-3), rounding="nearest")
    check_steps(jax.jit(tx.update), interpreted(tx.update), params, state, num_steps=2)


@pytest.mark.parametrize(
    ("inner", "options", "shape"),
    [
        (optax.adamw(1e-3), {"bits": 4}, (64, 128)),  # scales of rows and columns
        (optax.adamw(1e-3), {"bits": Float8()}, (64, 128)),  # powers
        (optax.adamw(1e-3), {}, (64, 64)),  # less than a slice
        (optax.adamw(1e-3), {}, (100, 3, 128)),  # rows are dim 0
    ],
)
def test_what_no_kernel_takes(inner, options, shape):
    tx = low(inner, **options)
    params = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
    state = jax.eval_shape(tx.init, params)
    assert not kernels_in(tx.update, params, state, params)


@pytest.mark.parametrize("shape", [(64, 128), (126, 16384, 53248)])
def test_in_programs_for_tpus(shape):
    """One kernel there, XLA's form elsewhere."""
    tx = low(optax.adamw(1e-3))
    params = jax.ShapeDtypeStruct(shape, jnp.float32)
    state = jax.eval_shape(tx.init, params)
    traced = jax.jit(tx.update).trace(params, state, params)
    assert traced.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == 1
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("custom_call") == 0


@pytest.mark.parametrize("how", ["shard", "map", "differentiate"])
def test_the_form_of_xla_remains_where_no_kernel_runs(how):
    """Arrays that jit alone shards, derivatives and maps, in programs for TPUs."""
    tx, params = low(optax.adamw(1e-3)), jnp.ones((64, 128))
    state = jax.jit(tx.init)(params)
    update = lambda g: tx.update(g, state, params)[0]  # noqa: E731
    if how == "shard":
        place = NamedSharding(jax.make_mesh((8,), ("data",)), P("data"))
        fn = jax.jit(update, in_shardings=place)
    elif how == "map":
        fn = jax.jit(lambda g: jax.vmap(update)(jnp.stack([g, 2 * g]))[0])
    else:
        fn = jax.jit(lambda g: jax.jvp(update, (g,), (g,))[0])
    traced = fn.trace(jax.ShapeDtypeStruct(params.shape, params.dtype))
    assert "tpu_custom_call" not in traced.lower(lowering_platforms=("tpu",)).as_text()
    np.testing.assert_allclose(fn(np.ones((64, 128), "float32")), jax.jit(update)(params), 1e-6)


# --- Parameters inside ----------------------------------------------------------------------------


def test_parameters_are_updated_as_by_optax():
    tx = low(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
    update_params = kernels.update_params_of(tx)
    params = params_of({"w": (64, 130), "b": (40,)}, "bfloat16")
    state = jax.jit(tx.init)(params)
    assert len(kernels_in(update_params, params, state, params)) == 1
    by_hand, inside = jax.jit(step_of(tx)), interpreted(update_params)
    for i in range(3):
        grads = gradients_of(i, params)
        want, have = by_hand(grads, state, params), inside(grads, state, params)
        for k, x in want[0].items():
            assert have[0][k].dtype == x.dtype
            error = np.abs(np.asarray(have[0][k] - x, np.float64))
            assert np.max(error) <= float(jnp.finfo(x.dtype).eps) * np.max(np.abs(x))
        assert_same(have[1], want[1])
        params, state = want
