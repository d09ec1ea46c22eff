"""No default takes steps far above float32's, however far apart the sizes of columns are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from low_precision_steps import OPTIMIZERS

import optax_ext
from optax_ext import STATE_FORMATS, Dynamic, Float8, Linear
from optax_ext.low_precision._formats import decode, encode

SHAPE, STEPS = (32, 128), 300
# An element of an update over the largest of float32: the first figure where a second moment is
# stored, whose codes next to each other are up to 2.7 times apart, the other where it is not.
MOST = {"bfloat16": (1.1, 1.1), "8bit": (5.0, 1.2), "fp8": (3.0, 1.2), "4bit": (5.0, 1.3)}

# Hundreds of steps: what LLVM's first level costs is a tenth of what it saves.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 1})


def ratios(plain, low, scales):
    """In each step, the largest element of an update over that of float32."""
    params = jnp.ones(SHAPE)
    direction = jax.random.normal(jax.random.key(0), SHAPE)

    def step(states, key):
        grads = (0.5 * direction + jax.random.normal(key, SHAPE)) * scales
        (want, first), (have, second) = (
            tx.update(grads, state, params) for tx, state in zip((plain, low), states, strict=True)
        )
        return (first, second), jnp.max(jnp.abs(have)) / jnp.max(jnp.abs(want))

    keys = jax.random.split(jax.random.key(1), STEPS)
    return jax.lax.scan(step, (plain.init(params), low.init(params)), keys)[1]


def spread(size, decades, seed=0):
    """Scales from 1 down to 10^-decades, in random order."""
    scales = 10.0 ** -np.linspace(0, decades, size)
    return jnp.asarray(np.random.default_rng(seed).permutation(scales), jnp.float32)


# Each format with a stored second moment and without; the other optimizers with what users choose.
@pytest.mark.slow(keep=4)
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        *((name, optimizer) for name in STATE_FORMATS for optimizer in ("AdamW", "CAME")),
        *(("8bit", optimizer) for optimizer in OPTIMIZERS if optimizer not in ("AdamW", "CAME")),
        ("4bit", "LAMB"),
    ],
)
def test_columns_that_span_decades(name, optimizer):
    plain = OPTIMIZERS[optimizer]
    low = optax_ext.low_precision_state(plain, STATE_FORMATS[name], min_size=0)
    run = jit(lambda scales: jnp.max(ratios(plain, low, scales)))
    most = MOST[name][optimizer not in ("AdamW", "LAMB")]
    for decades in (0, 1, 3, 6):
        assert run(spread(SHAPE[1], decades)[None]) < most, decades


def test_rows_and_columns_that_span_decades():
    plain = OPTIMIZERS["AdamW"]
    low = optax_ext.low_precision_state(plain, 4, min_size=0)
    run = jit(lambda scales: jnp.max(ratios(plain, low, scales)))
    rows = spread(SHAPE[0], 3)[:, None]
    assert run(rows * jnp.ones(SHAPE)) < MOST["4bit"][0]
    assert run(rows * spread(SHAPE[1], 3, seed=1)[None]) < MOST["4bit"][0]


def test_blocks_in_place_of_rows_and_columns_would_not_do():
    """What the bound is against: the least code of a block over an exact second moment."""
    plain = OPTIMIZERS["AdamW"]
    low = optax_ext.low_precision_state(plain, 4, formats={r"\bmu": Dynamic(4)}, min_size=0)
    run = jit(lambda scales: jnp.max(ratios(plain, low, scales)))
    assert run(spread(SHAPE[1], 3)[None]) > 20


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(
    "fmt", [Dynamic(8), Dynamic(4), Dynamic(4, rank1=True), Linear(8), Linear(4), Float8()], ids=str
)
def test_noise_next_to_one_lifts_nothing_above_the_largest_code(fmt, signed):
    """255 + (1 - 2^-24) is 256 in float32, and 256 is code 0: the largest of a block was lost."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 64)), jnp.float32)
    x = x if signed else jnp.minimum(jnp.square(x), 4.0)
    # The largest are stored without an error, above or below zero.
    x = jnp.where(jnp.arange(64)[None] % 16 == 5, 8.0, x)
    x = x.at[8:].multiply(-1.0) if signed else x
    got = decode(encode(x, fmt, signed, "stochastic", jnp.full(x.shape, 1 - 2.0**-24)))
    largest = jnp.abs(x) == 8
    np.testing.assert_allclose(got[largest], x[largest], rtol=1e-6)
