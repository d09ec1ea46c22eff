"""Grids, scales and noise against NumPy, number by number."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from sharding import matmuls
from sharding.matmuls import _carried, _grids
from sharding.matmuls._grids import noise_of, rounded
from sharding.matmuls._product import quantized_product
from sharding.matmuls._recipes import hadamard, quantized

SEED = jnp.zeros((), jnp.uint32)


def of_dtype(dtype):
    every = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    return every[np.isfinite(every)]


def both_signs(magnitudes):
    return np.array([s * x for x in magnitudes for s in (1, -1)])


NUMBERS = {
    _grids.E4M3: of_dtype(ml_dtypes.float8_e4m3fn),
    _grids.E5M2: of_dtype(ml_dtypes.float8_e5m2),
    _grids.E2M1: both_signs([0, 0.5, 1, 1.5, 2, 3, 4, 6]),
    _grids.INT8: np.arange(-127, 128.0),
    _grids.INT4: np.arange(-7, 8.0),
    _grids.POWERS_OF_2: both_signs([0, 1, 2, 4, 8, 16, 32, 64]),
    _grids.POWERS_OF_4: both_signs([0, 1 / 64, 1 / 16, 1 / 4, 1, 4, 16, 64]),
    _grids.ODD_POWERS: both_signs([0, 1 / 32, 1 / 8, 1 / 2, 2, 8, 32, 128]),
}
GRIDS = pytest.mark.parametrize("grid", NUMBERS, ids=lambda grid: grid.name)


@GRIDS
def test_a_grid_is_its_numbers(grid):
    numbers = np.unique(NUMBERS[grid]).astype(np.float32)
    np.testing.assert_array_equal(rounded(jnp.asarray(numbers), grid), numbers)
    assert numbers.max() == grid.top
    rng = np.random.default_rng(0)
    y = (rng.normal(size=4096) * grid.top * 10.0 ** rng.uniform(-6, 0, 4096)).astype(np.float32)
    assert set(np.unique(rounded(jnp.asarray(y), grid))) <= set(numbers)


@GRIDS
def test_rounding_is_to_the_nearest_number_and_of_ties_to_the_even_one(grid, x64):
    numbers = np.unique(NUMBERS[grid])
    if grid.radix == 4:  # from zero on, in the shares of the paper
        numbers = numbers[numbers >= 0]
        middles = numbers[1:] / 1.6
    else:
        middles = (numbers[1:] + numbers[:-1]) / 2
    below, above = numbers[:-1], numbers[1:]
    for shift, expected in ((-1e-9, below), (1e-9, above)):
        y = middles + shift * np.maximum(np.abs(middles), 1e-3)
        np.testing.assert_array_equal(rounded(jnp.asarray(y), grid), expected)
    ties = np.asarray(rounded(jnp.asarray(middles), grid))
    if grid.radix == 4:
        np.testing.assert_array_equal(ties, above)
        return
    for tie, low, high in zip(ties, below, above, strict=True):
        step = max(abs(high - low), 1e-30)
        even = low if round(low / step) % 2 == 0 else high
        assert tie == even or grid.mantissa == 0, (low, high)  # of powers, both are even or odd


@GRIDS
def test_beyond_the_largest_number_is_that_and_nan_is_nan(grid):
    y = jnp.array([np.nan, np.inf, -np.inf, 1e30, -0.0], jnp.float32)
    expected = [np.nan, grid.top, -grid.top, grid.top, 0.0]
    np.testing.assert_array_equal(rounded(y, grid), expected)


@pytest.mark.parametrize("grid", [_grids.INT8, _grids.INT4, _grids.E2M1, _grids.POWERS_OF_2])
def test_stochastic_rounding_is_unbiased(grid):
    """The mean of many draws is the number, within four of its standard errors."""
    y = jnp.asarray(np.linspace(-grid.top, grid.top, 101), jnp.float32)
    noise = noise_of(jnp.ones(3), SEED, (4096, 101))
    found = np.asarray(rounded(jnp.broadcast_to(y, noise.shape), grid, noise), np.float64)
    error = found.std(0) / 64
    assert (np.abs(found.mean(0) - np.asarray(y)) <= 4.5 * error + 1e-6).all()
    assert set(np.unique(found)) <= set(NUMBERS[grid])


def test_noise_is_uniform_and_of_the_seed_the_scales_and_the_index():
    scale = jnp.asarray(np.random.default_rng(0).normal(size=(64, 1)), jnp.float32)
    first = np.asarray(noise_of(scale, SEED, (1024, 64)))
    assert 0 <= first.min() < first.max() < 1
    counts, _ = np.histogram(first, 64, (0, 1))
    assert np.square(counts / 1024 - 1).sum() * 1024 < 110  # chi squared, 63 degrees of freedom
    others = [
        np.asarray(noise_of(scale, SEED + 1, (1024, 64))),
        np.asarray(noise_of(scale.at[3, 0].multiply(1 + 2e-7), SEED, (1024, 64))),
        np.roll(first, 1),
        np.roll(first, 1, 1),
    ]
    for other in others:
        assert abs(np.corrcoef(first.ravel(), other.ravel())[0, 1]) < 0.02
    np.testing.assert_array_equal(first, noise_of(scale[::-1], SEED, (1024, 64)))


def test_integers_are_rounded_without_their_exponents():
    """XLA:TPU takes arrays of ones out of loops, and reads them in each layer."""
    jaxpr = jax.make_jaxpr(lambda y: rounded(y, _grids.INT8))(jnp.zeros((4, 4)))
    assert len(jaxpr.eqns) < 8


# --- Operands -------------------------------------------------------------------------------------


def uniform(bits, x, scale):
    top = 2 ** (bits - 1) - 1
    return np.clip(np.rint(x / scale), -top, top) * scale


def in_numpy(name, x):
    """A weight, (k, n), of which a product sums k, as numbers; in NumPy's float64."""
    x = np.asarray(x, np.float64)
    columns = np.abs(x).max(0, keepdims=True)
    if name == "fp8":
        return (x / (columns / 448)).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * (
            columns / 448
        )
    if name == "int8":
        return uniform(8, x, columns / 127)
    if name in ("sun4", "luq"):
        clip = 12.035 * np.sqrt(np.mean(x**2)) - 12.03 * np.mean(np.abs(x))
        return uniform(4, x, clip / 7)
    blocks = x.reshape(-1, {"mxfp8": 32}.get(name, 16), x.shape[1])
    largest = np.abs(blocks).max(1, keepdims=True)
    if name == "mxfp8":
        scale = 2.0 ** (np.floor(np.log2(largest)) - 8)
        y = np.clip(blocks / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        return (y.astype(np.float64) * scale).reshape(x.shape)
    top, dtype = (6, ml_dtypes.float4_e2m1fn) if name == "nvfp4" else (7, None)
    whole = largest.max() / (448 * top)
    scale = (largest / (top * whole)).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * whole
    y = np.clip(blocks / scale, -top, top)
    y = np.rint(y) if dtype is None else y.astype(dtype).astype(np.float64)
    return (y * scale).reshape(x.shape)


@pytest.mark.parametrize("name", ["fp8", "int8", "mxfp8", "nvfp4", "ufp4", "sun4", "luq"])
def test_an_operand_is_that_of_numpy(name, x64):
    x = np.random.default_rng(0).normal(size=(64, 48)) * np.exp(np.arange(48) / 16)
    q = matmuls.RECIPES[name].weight._replace(hadamard=0)
    codes, scale = quantized(jnp.asarray(x), q, (1,), 0, SEED)
    found = np.asarray(codes, np.float64) * (1 if scale is None else np.asarray(scale))
    np.testing.assert_allclose(found, in_numpy(name, x), rtol=1e-12, atol=0)


def test_a_hadamard_transform_is_orthogonal_and_spreads_what_is_large(x64):
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=(5, 32))) for _ in range(2))
    np.testing.assert_allclose(hadamard(a, 1, 16) @ hadamard(b, 1, 16).T, a @ b.T, rtol=1e-12)
    one = jnp.zeros((32, 3)).at[3, 1].set(8.0)
    np.testing.assert_allclose(np.abs(hadamard(one, 0, 16)[:16, 1]), 2.0, rtol=1e-12)
    assert hadamard(a[:, :31], 1, 16) is not None  # 16 does not divide 31
    np.testing.assert_array_equal(hadamard(a[:, :31], 1, 16), a[:, :31])


def test_phases_of_sun4_share_a_scale():
    """So that even and odd powers stand beside each other, and a power of two is exact."""
    g = jnp.asarray(np.random.default_rng(0).normal(size=(32, 32)), jnp.float32)
    recipe = matmuls.RECIPES["sun4"]
    even, odd = (quantized(g, q, (0,), 1, SEED) for q in (recipe.cotangent, recipe.of_weight))
    assert float(even[1].item()) == float(odd[1].item())
    assert np.log2(even[1].item()) % 1 == 0
    assert np.abs(g).max() <= 64 * even[1].item() < 2 * np.abs(g).max()
    # Biases of the phases have other signs, between a power and the next one.
    y = jnp.linspace(1.0, 4.0, 301)
    errors = [np.asarray(rounded(y, q.grid) - y) for q in (recipe.cotangent, recipe.of_weight)]
    assert np.abs(sum(errors).mean()) < max(np.abs(e).mean() for e in errors)


# --- Edges ----------------------------------------------------------------------------------------

DOT = jax.make_jaxpr(lambda x, w: x @ w)


def product(name, x, w):
    eqn, recipe = DOT(x, w).jaxpr.eqns[0], matmuls.RECIPES[name]

    def carried(field):
        """The largest finite magnitude, as the clip of an operand or the bin of the step before."""
        given = {"activation": x, "weight": w}.get(field, jnp.ones(()))
        top = jnp.max(jnp.where(jnp.isfinite(given), jnp.abs(given), 0), initial=0)
        top = top.astype(jnp.float32)
        if getattr(recipe, field).scale == "pact":
            return jnp.maximum(top, 1e-30)[None]
        return jnp.where(_carried.bin_of(top) > 0, 0.0, _carried.NEVER)

    def run(x, w):
        own = {field: carried(field) for field in recipe.carried}
        return quantized_product(eqn, recipe, 1, [x, w], SEED, own)

    def both(x, w):
        y, pull = jax.vjp(run, x, w)
        return y, *pull(jnp.ones_like(y))

    return jax.jit(both)(x, w)


NAMES = pytest.mark.parametrize("name", matmuls.RECIPES)


@NAMES
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((0, 4, 3), jnp.float32), ((3, 0, 2), jnp.bfloat16), ((1, 40, 5), jnp.float16)],
)
def test_shapes_and_types(name, dtype, shape):
    m, k, n = shape
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.normal(size=(m, k)), dtype), jnp.asarray(rng.normal(size=(k, n)), dtype)
    y, dx, dw = product(name, x, w)
    assert [a.shape for a in (y, dx, dw)] == [(m, n), (m, k), (k, n)]
    assert {a.dtype for a in (y, dx, dw)} == {jnp.dtype(dtype)}
    assert all(np.isfinite(np.asarray(a, np.float32)).all() for a in (y, dx, dw))


@NAMES
def test_zeros_and_tiny_numbers(name):
    """Rows of zeros beside others; and numbers whose scales are below the normal ones."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=(32, 32)), jnp.float32) for _ in range(2))
    y, dx, dw = product(name, x.at[3].set(0), w.at[:, 5].set(0))
    assert not np.asarray(y[3]).any()
    assert not np.asarray(y[:, 5]).any()
    assert all(np.isfinite(a).all() for a in (y, dx, dw))
    for scale in (1e-38, 1e-41):
        found = product(name, x * scale, w)
        assert all(np.isfinite(a).all() for a in found)
        assert np.abs(found[0]).max() < 1e3 * scale + 1e-35


@NAMES
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_does_not_become_finite(name, bad):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=(32, 32)), jnp.float32) for _ in range(2))
    y, _, dw = product(name, x.at[3, 4].set(bad), w)
    assert not np.isfinite(y[3]).any()
    assert not np.isfinite(dw[4]).all()
    y, dx, _ = product(name, x, w.at[4, 3].set(bad))
    assert not np.isfinite(y[:, 3]).any()
    assert not np.isfinite(dx[:, 4]).any()
