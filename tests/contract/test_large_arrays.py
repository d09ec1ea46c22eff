"""Parameters of more than 2**31 elements: traced and lowered at the shapes of large models."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from optax_ext import BFloat16, Dynamic, Float8, Linear
from optax_ext.low_precision._rounding import make_key, salted, uniform

from .table import every, make

STACKED = {"w": (126, 16384, 53248), "b": (126, 16384), "q": (126, 16384, 128, 128)}  # 405B
APART = {"w": (128256, 16384), "b": (16384,), "q": (16384, 128, 128)}
PLATFORMS = ("cpu", "cuda", "tpu")


def trace(tx, shapes, dtype=jnp.bfloat16, platforms=PLATFORMS, **extra):
    """Init and update on abstract parameters; the text for the compilers of these platforms."""
    params = {k: jax.ShapeDtypeStruct(shape, dtype) for k, shape in shapes.items()}
    tx = optax.with_extra_args_support(tx)
    state = jax.eval_shape(tx.init, params)
    traced = jax.jit(functools.partial(tx.update, **extra)).trace(params, state, params)
    if platforms:
        traced.lower(lowering_platforms=platforms)
    updates, new = traced.out_info
    assert jax.tree.map(lambda x: x.shape, updates) == {k: tuple(s) for k, s in shapes.items()}
    chex.assert_trees_all_equal_shapes_and_dtypes(new, state)


@every
def test_every_transformation_of_the_contract(name):
    trace(make(name, masks=False), STACKED)
    trace(make(name, masks=False), APART, platforms=())


@pytest.mark.parametrize(
    ("bits", "rounding"),
    [
        (Dynamic(8), "stochastic"),
        (4, "compensated"),
        (Linear(8, rank1=True), "stochastic"),
        (Float8(), "stochastic"),
        (BFloat16(), "compensated"),
    ],
    ids=str,
)
def test_every_format(bits, rounding):
    tx = optax_ext.low_precision_state(optax.adamw(1e-3), bits, rounding=rounding)
    trace(tx, STACKED, platforms=("cpu",))


def test_what_goes_around_them():
    came = optax_ext.came(1e-3)
    noise = optax.chain(optax_ext.gradient_noise_scale(batch_size=32), came)
    trace(optax_ext.master_weights(optax_ext.came8bit(1e-3)), STACKED)
    trace(optax_ext.stochastic_rounding(came), STACKED)
    trace(optax_ext.lazy_rows(came, {"w": True, "q": False, "b": False}), APART)
    trace(noise, STACKED, local_squared_norm=1.0, num_pieces=4)


def test_noise_of_elements_that_one_uint32_cannot_number():
    """Elements 2**32 apart have noise of their own, uniform and unlike that of the others."""
    shape = (5, 2**16, 2**16)

    @jax.jit
    def corner(key):  # XLA computes no more than is read
        return jnp.stack([uniform(salted(key, ()), shape)[i, 7, :4096] for i in range(5)])

    compiled = corner.lower(make_key(0)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20
    noise = np.asarray(compiled(make_key(0)), np.float64)
    assert np.abs(noise.mean(1) - 0.5).max() < 4 * np.sqrt(1 / 12 / 4096)
    correlation = np.corrcoef(noise) - np.eye(5)
    assert np.abs(correlation).max() < 5 / np.sqrt(4096)
