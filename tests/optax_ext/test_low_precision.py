"""Low-precision state: the maps, what rounding loses, and what a wrapped optimizer keeps."""

import functools
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import state_bytes

import optax_ext
from optax_ext import BFloat16, Dynamic, Float8, Linear, Quantized, low_precision_state
from optax_ext.low_precision import _formats
from optax_ext.low_precision._code_maps import DynamicMap, Float8Map, LinearMap
from optax_ext.low_precision._formats import decode, encode
from optax_ext.low_precision._rounding import make_key, next_key, uniform

FORMATS = {
    "8 bits": Dynamic(),
    "8 bits linear": Linear(),
    "4 bits": Dynamic(4),
    "4 bits in rows and columns": Dynamic(4, rank1=True),
    "4 bits linear": Linear(4),
    "4 bits rank 1": Linear(4, rank1=True),
    "fp8": Float8(),
    "fp8 plain": Float8(expand=False),
    "bf16": BFloat16(),
}
SHAPES = {
    "whole blocks": (16, 512),
    "ragged last blocks": (13, 300),
    "fewer rows than a block": (3, 131),
    "fewer columns than a block": (300, 8),
    "no long dim": (5, 9, 7),
    "a vector": (1000,),
    "one element": (1,),
    "one column": (640, 1),
    "stacked": (2, 3, 4, 256),
}
every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
every_sign = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
every_rounding = pytest.mark.parametrize("rounding", _formats.ROUNDINGS)


@functools.partial(jax.jit, static_argnames=("fmt", "signed", "rounding"))
def round_trip(x, fmt, signed, rounding="nearest", noise=None):
    q = encode(x, fmt, signed, rounding, noise)
    return q, decode(q)


def example(shape, signed, decades=2.0, seed=0):
    """Rows and columns of different size; squares where nothing may be negative."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * 10.0 ** rng.uniform(
        -decades, 0, shape[:1] + (1,) * (len(shape) - 1)
    )
    x = x * 10.0 ** rng.uniform(-decades / 2, 0, shape[-1:])
    return (x if signed else np.square(x)).astype(np.float32)


# --- Maps -----------------------------------------------------------------------------------------


def published(exponents, signed):
    """The 8-bit optimizers' construction, in float64: magnitudes in ascending order."""
    values = [0.0, 1.0]
    for i in range(exponents):
        ends = np.linspace(0.1, 1, 2**i * (1 if signed else 2) + 1)
        values += list((ends[1:] + ends[:-1]) / 2 * 10.0 ** (i - exponents + 1))
    return np.sort(values)


def values_of(number_map):
    return np.asarray(number_map.value(jnp.arange(number_map.top + 1), jnp.float32))


@every_sign
@pytest.mark.parametrize("exponents", [7, 3])
def test_dynamic_maps_are_the_published_ones(exponents, signed):
    have = values_of(DynamicMap(exponents, signed))
    want = published(exponents, signed)
    assert len(have) + (len(have) - 2 if signed else 0) == 2 ** (exponents + 1)
    # bitsandbytes' own table is float32 arithmetic, too, and as far from the exact values.
    np.testing.assert_allclose(have, want, rtol=2.0**-22)


def test_known_values():
    signed, unsigned = values_of(DynamicMap(7, True)), values_of(DynamicMap(7, False))
    np.testing.assert_allclose(signed[[1, 2, -2, -1]], [5.5e-7, 3.25e-6, 0.99296875, 1], rtol=1e-6)
    np.testing.assert_allclose(unsigned[[1, 2, -2]], [3.25e-7, 7.75e-7, 0.996484375], rtol=1e-6)
    small = [0, 0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1]
    np.testing.assert_allclose(values_of(DynamicMap(3, True)), small, rtol=1e-6)
    np.testing.assert_allclose(values_of(LinearMap(15, zero=False)), np.arange(1, 17) / 16)
    np.testing.assert_allclose(values_of(LinearMap(127, zero=True)), np.arange(128) / 127)
    e4m3 = jnp.arange(127, dtype=jnp.uint8).view(jnp.float8_e4m3fn).astype(jnp.float32)
    np.testing.assert_allclose(values_of(Float8Map()), np.asarray(e4m3) / 448, rtol=2.0**-23)


MAPS = [
    DynamicMap(7, True),
    DynamicMap(7, False),
    DynamicMap(3, True),
    DynamicMap(3, False),
    LinearMap(127, zero=True),
    LinearMap(255, zero=True),
    LinearMap(15, zero=False),
    Float8Map(),
]


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("number_map", MAPS, ids=repr)
def test_positions_are_levels_and_the_share_of_the_way_to_the_next(number_map):
    values = values_of(number_map).astype(np.float64)
    assert (np.diff(values) > 0).all()
    levels = np.arange(number_map.top)
    for share in (0.0, 0.01, 0.5, 0.99):
        between = jnp.asarray(values[:-1] + np.diff(values) * share, jnp.float32)
        np.testing.assert_allclose(number_map.position(between), levels + share, atol=3e-5)
    assert float(number_map.position(jnp.ones(()))) == number_map.top


# --- One array ------------------------------------------------------------------------------------


def of_elements(q, part):
    """What a stored array has for each block, for each element of it, by NumPy."""
    blocks = _formats.Blocks(q.shape, q.format.block_size)
    part = np.asarray(part)
    (row, last), (rows, columns) = blocks.dims, blocks.rows_and_columns
    part = np.take(part, np.arange(q.shape[last]) // columns, axis=last)
    return part if row == last else np.take(part, np.arange(q.shape[row]) // rows, axis=row)


def scales_of(q):
    """The scale of each element: of its block, or the least of its row's and its column's."""
    if getattr(q.format, "rank1", False) and len(q.shape) > 1:
        return functools.reduce(np.minimum, np.ix_(*map(np.asarray, q.scale)))
    return of_elements(q, np.abs(q.scale[0]))


CASES = [(fmt, shape) for fmt in FORMATS for shape in SHAPES if fmt == "8 bits"] + [
    (fmt, shape)
    for fmt in FORMATS
    for shape in ("ragged last blocks", "fewer rows than a block", "a vector")
    if fmt != "8 bits"
]


@pytest.mark.slow(keep=22)
@pytest.mark.parametrize(("fmt", "shape"), CASES)
@every_sign
def test_round_trip(fmt, signed, shape):
    """Every element is within half the distance of the two values beside it."""
    fmt, x = FORMATS[fmt], example(SHAPES[shape], signed)
    q, y = round_trip(x, fmt, signed)
    assert y.shape == x.shape
    assert y.dtype == jnp.float32
    if isinstance(fmt, BFloat16):
        np.testing.assert_array_equal(y, jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32))
        return
    scale, number_map = scales_of(q), _formats._Scaled(fmt, signed, x.shape, jnp.float32).map
    power = of_elements(q, q.scale[1]) / 16 if isinstance(fmt, Float8) and fmt.expand else 1.0
    share = np.abs(x) / np.where(scale == 0, 1, scale)
    values = values_of(number_map).astype(np.float64)
    above = np.searchsorted(values, share**power * (1 - 1e-5))
    low, high = (values[np.clip(above - i, 0, None)] for i in (1, 0))
    low, middle, high = (y ** (1 / power) for y in (low, (low + high) / 2, high))
    bound = np.maximum(high - middle, middle - low) * scale
    # Beside the values: a map without zero; the largest of the sign that has one code less.
    bound = np.where(share < values[0], values[0] * scale, bound)
    if signed and number_map.lowest < number_map.top:
        bound = np.where(share > values[-2], (1 - values[-2]) * scale, bound)
    if not signed:  # the least that is positive stays positive
        bound = np.where(above <= 1, np.maximum(bound, values[1] ** (1 / power) * scale), bound)
    assert (np.abs(y - x) <= bound * (1 + 1e-5) + 1e-30).all()
    if signed:
        assert (np.sign(y) * np.sign(x) >= 0).all()


@pytest.mark.slow(keep=18)
@every_format
@every_sign
@every_rounding
def test_what_is_special(fmt, signed, rounding):
    """Zeros, constants, extremes, and what is not finite."""
    trip = functools.partial(round_trip, fmt=fmt, signed=signed, rounding=rounding)
    noise = jnp.full((2, 256), 0.5)
    for size in (1e-30, 1e30):
        x = np.full((2, 256), size, np.float32)
        np.testing.assert_allclose(trip(x, noise=noise)[1], x, rtol=2.0**-8)
    zeros = np.zeros((2, 256), np.float32)
    np.testing.assert_array_equal(trip(zeros, noise=noise)[1], zeros)
    for value in (np.nan, np.inf):
        x = np.ones((2, 256), np.float32)
        x[1, 3] = value
        assert not np.isfinite(trip(x, noise=noise)[1]).all()
    if signed:
        x = -np.ones((2, 256), np.float32)
        np.testing.assert_allclose(trip(x, noise=noise)[1], x, rtol=2.0**-8)


def test_the_scale_of_a_signed_block_is_its_largest_element(x64):
    """With its sign, positive where both are there: XLA need not look for it twice."""
    x = np.random.default_rng(0).normal(size=(8, 256)).astype(np.float32)
    x[0, :3] = 7, -7, 6.999999
    x[1, 5], x[2, 5], x[3, 5] = -np.inf, np.nan, -np.nan
    x[4], x[5] = 0, -0.0
    for dtype in (np.float32, np.float64):
        scale = _formats.encode(jnp.asarray(x, dtype).reshape(-1), Dynamic(8), True).scale[0]
        y = np.where(np.isnan(x), np.inf, x.astype(scale.dtype))
        largest = np.take_along_axis(y, np.abs(y).argmax(1)[:, None], 1)[:, 0]
        assert (largest < 0).any()
        np.testing.assert_array_equal(np.asarray(scale), largest)


@every_format
@every_rounding
def test_nothing_positive_becomes_zero(fmt, rounding):
    rng = np.random.default_rng(0)
    x = np.exp(4 * rng.normal(size=(64, 512))).astype(np.float32)
    _, y = round_trip(x, fmt, False, rounding, rng.random(x.shape, np.float32))
    assert (np.asarray(y) > 0).all()


def test_without_care_there_would_be_zeros():
    """What the test above is about: a sixth of log-normal values are nearest to 0."""
    x = np.exp(4 * np.random.default_rng(0).normal(size=(64, 512))).astype(np.float32)
    share = x.reshape(64, 2, 256) / x.reshape(64, 2, 256).max(-1, keepdims=True)
    assert np.mean(share < 3.25e-7 / 2) == pytest.approx(0.156, abs=0.02)


@pytest.mark.parametrize(
    ("fmt", "signed", "data", "want"),
    [
        (Dynamic(), True, "normal", 0.0154),
        (Dynamic(block_size=2048), True, "normal", 0.0167),
        (Dynamic(), False, "chi2", 0.0171),
        (Dynamic(4), True, "normal", 0.2006),
        (Dynamic(4, 64), True, "normal", 0.193),
        (Float8(expand=False), True, "normal", 0.0224),
        (Float8(), True, "normal", 0.0126),
        (Float8(), False, "average of 64 chi2", 0.0019),
        (Float8(expand=False), False, "log-normal", 0.0230),
    ],
    ids=str,
)
def test_errors_of_other_implementations(fmt, signed, data, want):
    """Mean relative errors, measured with bitsandbytes, torchao and COAT's formulas."""
    rng = np.random.default_rng(0)
    x = {
        "normal": lambda: rng.normal(size=(512, 2048)),
        "chi2": lambda: rng.normal(size=(512, 2048)) ** 2,
        "average of 64 chi2": lambda: rng.chisquare(64, size=(512, 2048)) / 64,
        "log-normal": lambda: np.exp(rng.normal(size=(512, 2048))),
    }[data]().astype(np.float32)
    _, y = round_trip(x, fmt, signed)
    error = np.minimum(np.abs(y - x) / np.abs(x), 1)  # 1 where theirs become zero
    assert error.mean() == pytest.approx(want, rel=0.05)


@every_format
@every_sign
def test_what_was_stored_is_stored_as_it_is(fmt, signed):
    if isinstance(fmt, Float8) and fmt.expand:
        pytest.skip("the least magnitude of a block moves, and with it the power")
    _, once = round_trip(example((5, 1000), signed), fmt, signed)
    _, twice = round_trip(once, fmt, signed)
    np.testing.assert_allclose(twice, once, rtol=1e-6)


@pytest.mark.slow(keep=6)
@every_format
@every_sign
def test_stochastic_rounding_has_the_right_mean(fmt, signed):
    """The mean of 1000 draws is within five of its own deviations."""
    x = example((2, 300), signed, decades=0.5)
    draws = 1000
    noise = jax.random.uniform(jax.random.key(0), (draws, *x.shape))
    got = jax.jit(jax.vmap(lambda n: decode(encode(x, fmt, signed, "stochastic", n))))(noise)
    got = np.asarray(got, np.float64)
    low = got.min(0)
    # Below the least code of a map without zero nothing can be done; nor below the least positive.
    inside = np.abs(x) >= np.abs(np.where(low == 0, 0, low)) * (1 - 1e-6) if not signed else True
    error = np.abs(got.mean(0) - x)
    bound = 5 * got.std(0) / np.sqrt(draws) + 1e-6 * np.abs(x)
    assert np.mean((error <= bound) | ~np.asarray(inside)) > 0.98  # others: beyond the last code
    if fmt.bits == 4:
        assert got.std() > 0


@pytest.mark.slow(keep=6)
@every_format
@every_sign
def test_compensation_keeps_eight_bits_more(fmt, signed):
    x = example((4, 512), signed, decades=1.0)
    _, plain = round_trip(x, fmt, signed)
    q, better = round_trip(x, fmt, signed, "compensated")
    assert q.rest.shape == x.shape
    assert q.rest.dtype == jnp.uint8
    # Above the least code of the 4-bit map without zero.
    has_zero = fmt.bits == 16 or _formats._map(fmt, signed).zero
    inside = np.abs(x) >= (0 if has_zero else scales_of(q) / 16)
    ratio = np.abs(better - x)[inside].sum() / np.abs(plain - x)[inside].sum()
    assert ratio < 1 / 100


# --- Bytes and layout -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fmt", "signed", "shape", "nbytes"),
    [
        (Dynamic(), True, (768, 3072), 768 * 3072 * (1 + 4 / 256)),
        (Dynamic(), True, (13, 300), 13 * 300 + 4 * 2 * 10),  # ragged blocks have a scale
        (Dynamic(4), True, (768, 3072), 768 * 3072 * (1 / 2 + 4 / 128)),
        (Dynamic(4), True, (5, 301), 3 * 301 + 4 * 19),  # half a byte is left over
        (Linear(4, rank1=True), False, (768, 3072), 768 * 3072 // 2 + 4 * (768 + 3072)),
        (Linear(4, rank1=True), False, (4096,), 2048 + 4 * 32),  # a vector has blocks
        (Float8(), True, (768, 3072), 768 * 3072 * (1 + 5 / 128)),
        (BFloat16(), True, (768, 3072), 2 * 768 * 3072),
        (Dynamic(), True, (768, 12, 64), 768 * 768 * (1 + 4 / 256)),
        (Dynamic(), True, (4096, 8), 4096 * 8 * (1 + 4 / 256)),
        (Dynamic(4), True, (50257, 768), 25136 * 768 + 4 * 6283 * 48),
    ],
    ids=str,
)
def test_bytes(fmt, signed, shape, nbytes):
    q = jax.eval_shape(lambda x: encode(x, fmt, signed), jnp.zeros(shape))
    assert q.nbytes == nbytes
    more = jax.eval_shape(lambda x: encode(x, fmt, signed, "compensated"), jnp.zeros(shape))
    assert more.nbytes == nbytes + np.prod(shape)


def test_blocks_are_eight_rows_high():
    """A split into multiples of eight rows, or of 32 columns, splits no block."""
    shape = {
        (768, 3072): (96, 96),
        (768, 12, 64): (96, 12, 2),  # rows are of the longest dim but the last
        (12, 64, 768): (12, 8, 24),
        (4096, 8): (128, 1),  # few columns: more rows
        (3, 512): (1, 8),  # few rows: more columns
        (4096,): (16,),
    }
    for whole, scales in shape.items():
        q = jax.eval_shape(lambda x: encode(x, Dynamic(), True), jnp.zeros(whole))
        assert q.scale[0].shape == scales, whole


def test_a_code_depends_on_its_block_alone():
    x = example((32, 96), True)
    q = encode(x, Dynamic(4, 128), True)
    other = x.copy()
    other[8:16, 16:32] *= 3.0
    p = encode(other, Dynamic(4, 128), True)
    assert (np.asarray(q.scale[0]) != np.asarray(p.scale[0])).sum() == 1
    moved = np.asarray(decode(q)) != np.asarray(decode(p))
    assert moved[8:16, 16:32].any()
    assert moved.sum() == moved[8:16, 16:32].sum()


# --- Noise ----------------------------------------------------------------------------------------


def test_noise_is_uniform_and_new_each_time():
    key = make_key(7)
    draws = {
        "first": uniform(key, 1, (300, 400)),
        "next step": uniform(next_key(key), 1, (300, 400)),
        "other array": uniform(key, 2, (300, 400)),
        "other seed": uniform(make_key(8), 1, (300, 400)),
    }
    for x in draws.values():
        x = np.asarray(x, np.float64)
        assert 0 <= x.min() < 1e-4
        assert 1 - 1e-4 < x.max() < 1
        counts = np.histogram(x, 64, (0, 1))[0]
        assert ((counts - x.size / 64) ** 2).sum() / (x.size / 64) < 110  # chi squared, 63 degrees
        for dim in (0, 1):
            neighbour = np.roll(x, 1, dim)
            assert abs(np.corrcoef(x.ravel(), neighbour.ravel())[0, 1]) < 5 / np.sqrt(x.size)
    flat = [np.asarray(x).ravel() for x in draws.values()]
    correlation = np.corrcoef(flat) - np.eye(len(flat))
    assert np.abs(correlation).max() < 5 / np.sqrt(flat[0].size)


# --- Optimizers -----------------------------------------------------------------------------------


def drive(tx, steps, level):
    """The second moments after ``steps`` at mean square 1, then ``steps`` at ``level``.

    One element in each block is 30 times as large; the others are what is looked at.
    """
    size = np.ones((8, 128))
    size[::8, ::32] = 30.0
    params = jnp.zeros(size.shape)

    # 4000 steps: LLVM's first level saves more than it costs.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 1})
    def run(state, key, mean_square):
        def body(state, i):
            g = jax.random.normal(jax.random.fold_in(key, i), size.shape)
            g = g * jnp.where(size > 1, size, jnp.sqrt(mean_square))
            return tx.update(g, state, params)[1], None

        return jax.lax.scan(body, state, jnp.arange(steps))[0]

    state = run(jax.jit(tx.init)(params), jax.random.key(1), 1.0)
    state = run(state, jax.random.key(2), level)
    nu = optax.tree.get(getattr(state, "inner_state", state), "nu")
    nu = jax.jit(decode)(nu) if isinstance(nu, Quantized) else nu
    return np.asarray(nu)[size == 1]


def test_a_second_moment_follows_when_it_doubles_beside_an_outlier():
    """What stalls in published 8-bit optimizers: 1.0 to 1.1, where float32 reaches 1.98."""
    adam = optax.scale_by_adam()
    want = drive(adam, 4000, 2.0)
    assert want.mean() == pytest.approx(1.98, abs=0.01)
    assert want.std() / want.mean() == pytest.approx(0.032, abs=0.004)
    spread = {}
    for rounding in ("stochastic", "compensated"):
        have = drive(low_precision_state(adam, rounding=rounding, min_size=0), 4000, 2.0)
        assert have.mean() == pytest.approx(want.mean(), rel=0.02), rounding
        spread[rounding] = have.std() / have.mean()
    assert spread["compensated"] == pytest.approx(want.std() / want.mean(), rel=0.02)
    assert spread["stochastic"] == pytest.approx(0.28, abs=0.05)  # what its noise adds up to
    stalled = drive(low_precision_state(adam, rounding="nearest", min_size=0), 4000, 2.0)
    assert stalled.mean() < 1.2


def tree_of(shapes, seed=0, scale=1.0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.normal(size=s) * scale, dtype) for k, s in shapes.items()}


MODEL = {"embed": (70, 64), "w": (64, 128), "b": (128,), "stack": (2, 32, 70)}


def train(tx, steps=50):
    params = tree_of(MODEL)
    state = jax.jit(tx.init)(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params, value=0.0)
        return optax.apply_updates(params, updates), state

    for i in range(steps):
        params, state = step(params, state, tree_of(MODEL, seed=i + 1, scale=0.01))
    return params, state


@functools.cache
def trained_with(name):
    """The parameters after ``train`` of a plain optimizer."""
    return train(INNER[name])[0]


INNER = {
    "adamw": optax.adamw(1e-3),
    "lion": optax.lion(1e-4),
    "lamb": optax.lamb(1e-3),
    "adafactor": optax_ext.adafactor(1e-3, momentum=0.9),
    "optax.adafactor": optax.adafactor(1e-3, momentum=0.9),
    "came": optax_ext.came(1e-4),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.trace(0.9), optax.scale(-1e-2)),
    "injected": optax.inject_hyperparams(optax.adamw)(1e-3),
}


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize(
    ("name", "bits", "rounding", "bound"),
    [
        *((name, 8, "stochastic", 0.08) for name in INNER),
        ("adamw", 8, "nearest", 0.05),
        ("adamw", 8, "compensated", 1e-3),
        ("adamw", 4, "stochastic", 0.5),
        ("came", 8, "compensated", 1e-3),
        ("adamw", Float8(), "stochastic", 0.08),
        ("adamw", 16, "stochastic", 0.02),
    ],
    ids=str,
)
def test_parameters_follow_those_of_the_plain_optimizer(name, bits, rounding, bound):
    """The path of 50 steps, by norm; small arrays are stored, too."""
    inner, start = INNER[name], tree_of(MODEL)
    want = trained_with(name)
    have, state = train(low_precision_state(inner, bits, rounding=rounding, min_size=0))
    stored = [x for x in jax.tree.leaves(state, is_leaf=_is_stored) if _is_stored(x)]
    assert len(stored) >= len(MODEL)
    if name == "lion":  # of a sum near zero the sign flips: 2 where all else is 1
        bound = 2 * np.sqrt(bound)
    for k in MODEL:
        error = np.linalg.norm(have[k] - want[k]) / np.linalg.norm(want[k] - start[k])
        assert error < bound, k
    assert any((np.asarray(have[k]) != np.asarray(want[k])).any() for k in MODEL)


def _is_stored(x):
    return isinstance(x, Quantized)


def test_lamb_keeps_its_trust_ratio():
    """8-bit LAMB elsewhere is 8-bit Adam, bit for bit."""
    start = tree_of(MODEL)
    lamb, adam = (
        train(low_precision_state(tx, min_size=0))[0] for tx in (optax.lamb(1e-3), optax.adam(1e-3))
    )
    for k in ("w", "stack"):
        path = np.linalg.norm(lamb[k] - start[k])
        assert np.linalg.norm(lamb[k] - adam[k]) > 0.5 * path


def formats_of(tx, params=None, **options):
    params = tree_of(MODEL) if params is None else params
    state = jax.eval_shape(
        low_precision_state(tx, **options).init, tree_of(MODEL) if params is None else params
    )
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (leaf.format, leaf.signed)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.inner_state, is_leaf=_is_stored)
        if _is_stored(leaf)
    }


def test_which_arrays_are_stored_and_how():
    signed, unsigned = (Dynamic(), True), (Dynamic(), False)
    want = {
        f"0/{f}/{k}": s for f, s in (("mu", signed), ("nu", unsigned)) for k in MODEL if k != "b"
    }
    assert formats_of(optax.adamw(1e-3)) == want
    # Vectors, once they are 16 times as large.
    for size, num in ((65535, 0), (65536, 2)):
        assert len(formats_of(optax.adamw(1e-3), {"v": jnp.zeros(size)})) == num
    first, second = (Dynamic(4, rank1=True), True), (Linear(4, rank1=True), False)
    four = {k: first if "mu" in k else second for k in want}
    assert formats_of(optax.adamw(1e-3), bits=4) == four
    assert formats_of(optax.adamw(1e-3), bits=16) == {
        k: (BFloat16(), s) for k, (_, s) in want.items()
    }
    assert formats_of(optax.adamw(1e-3), block_size=64) == {
        k: (Dynamic(8, 64), s) for k, (_, s) in want.items()
    }
    # Factored moments are no parameters' shape, however large; only the momentum is.
    assert formats_of(optax_ext.came(1e-3), min_size=0).keys() == {
        "0/mu/b",
        "0/mu/embed",
        "0/mu/stack",
        "0/mu/w",
        "0/nu/b",
    }
    # What optax keeps whole because dims are short is a second moment.
    assert formats_of(optax.adafactor(1e-3))["0/v/w"] == unsigned
    # Copies of parameters, and sums.
    assert formats_of(optax.contrib.schedule_free_sgd(1e-3)) == {}
    master = optax_ext.master_weights(optax.sgd(1e-3, momentum=0.9))
    assert set(
        formats_of(master, jax.tree.map(lambda x: x.astype("bfloat16"), tree_of(MODEL)))
    ) == {f"inner_state/0/trace/{k}" for k in MODEL if k != "b"}
    multi = optax.MultiSteps(optax.sgd(1e-3, momentum=0.9), 2).gradient_transformation()
    assert all("trace" in k for k in formats_of(multi))
    # By path; the first pattern counts.
    chosen = formats_of(
        optax.adamw(1e-3), formats={"nu/b$": Float8(), "embed": None, "nu": Linear()}
    )
    assert chosen == {k: v for k, v in want.items() if "embed" not in k and "nu" not in k} | {
        "0/nu/b": (Float8(), False),
        "0/nu/w": (Linear(), False),
        "0/nu/stack": (Linear(), False),
    }
    # A single array as the parameters.
    assert set(formats_of(optax.lion(1e-3), jnp.zeros((64, 64)))) == {"0/mu"}


def test_state_is_a_fixed_point_of_types_and_donates():
    params = tree_of({"w": (64, 70)})
    for bits in (8, 4, 16, Float8()):
        for rounding in _formats.ROUNDINGS:
            tx = low_precision_state(optax.adamw(1e-3), bits, rounding=rounding)
            step = jax.jit(tx.update, donate_argnums=(1,))
            state = jax.jit(tx.init)(params)
            types = jax.tree.map(jax.typeof, state)
            for _ in range(2):
                donated = jax.tree.leaves(state)
                _, state = step(params, state, params)
                assert jax.tree.map(jax.typeof, state) == types
                assert all(x.is_deleted() for x in donated)
            assert step._cache_size() == 1


def test_sixteen_bit_state_of_sixteen_bit_parameters_is_read_as_float32():
    """Second moments in bfloat16 stop moving; here they are float32 inside the step."""
    params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    seen = []

    def update(updates, state, params=None):
        seen.append(state["nu"]["w"].dtype)
        return updates, state

    inner = optax.GradientTransformation(lambda p: {"nu": jax.tree.map(jnp.zeros_like, p)}, update)
    tx = low_precision_state(inner)
    tx.update(params, tx.init(params), params)
    assert seen == [jnp.float32]


def test_the_same_seed_gives_the_same_noise():
    grads = tree_of({"w": (64, 70)})
    runs = []
    for seed in (0, 0, 1):
        tx = low_precision_state(optax.trace(0.9), seed=seed)
        _, state = jax.jit(tx.update)(grads, jax.jit(tx.init)(grads))
        runs.append(state.inner_state.trace["w"].codes)
    np.testing.assert_array_equal(runs[0], runs[1])
    assert (np.asarray(runs[0]) != np.asarray(runs[2])).any()


def _type(x):
    return x.shape, x.dtype


def test_composition():
    """Inside and outside of what wraps transformations."""
    params = tree_of(MODEL)
    tx = low_precision_state(optax.adamw(1e-3))
    for outer in (
        optax.MultiSteps(tx, 2).gradient_transformation(),
        optax.apply_if_finite(tx, 3),
        optax.masked(tx, {"embed": True, "w": True, "b": False, "stack": False}),
        optax.inject_hyperparams(
            lambda learning_rate: low_precision_state(optax.adamw(learning_rate))
        )(1e-3),
        optax.chain(optax.clip_by_global_norm(1.0), tx),
        optax.contrib.schedule_free(tx, 1e-3),
    ):
        state = jax.eval_shape(outer.init, params)
        assert any(_is_stored(x) for x in jax.tree.leaves(state, is_leaf=_is_stored))
        updates, new = jax.eval_shape(outer.update, params, state, params)
        assert jax.tree.map(_type, new) == jax.tree.map(_type, state)
        assert jax.tree.map(_type, updates) == jax.tree.map(_type, params)


def test_a_gradient_that_is_not_finite_is_seen_or_skipped():
    params = tree_of({"w": (64, 70)})
    bad = {"w": params["w"].at[0, 0].set(jnp.nan)}
    tx = low_precision_state(optax.adamw(1e-3))
    _, state = jax.jit(tx.update)(bad, jax.jit(tx.init)(params), params)
    assert not np.isfinite(decode(state.inner_state[0].mu["w"])).all()
    safe = optax.apply_if_finite(tx, 3)
    start = jax.jit(safe.init)(params)
    updates, state = jax.jit(safe.update)(bad, start, params)
    jax.tree.map(lambda u: np.testing.assert_array_equal(u, 0), updates)
    chex.assert_trees_all_equal(state.inner_state, start.inner_state)


# --- Bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 3}, "bits must be 4, 8, 16 or a format"),
        ({"bits": "fp8"}, "bits must be 4, 8, 16 or a format .* got 'fp8'"),
        ({"block_size": 100}, "block_size must be a power of two, at least 16, got 100"),
        ({"block_size": 0}, "block_size must be a power of two"),
        ({"bits": 16, "block_size": 64}, "block_size=64 has no effect"),
        ({"bits": Float8(), "block_size": 64}, "block_size=64 has no effect"),
        ({"rounding": "up"}, "rounding must be one of 'nearest', 'stochastic', 'compensated'"),
        ({"formats": {"nu": "fp8"}}, r"formats\['nu'\] must be a format such as Dynamic\(8\)"),
        ({"formats": {"(": None}}, "is not a regular expression"),
        ({"min_size": -1}, "min_size must not be negative, got -1"),
        ({"seed": -1}, "seed must be in"),
    ],
    ids=str,
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        low_precision_state(optax.adamw(1e-3), **options)


def test_errors_of_init():
    params = tree_of(MODEL)
    tx = low_precision_state(optax.adamw(1e-3))
    with pytest.raises(ValueError, match="low_precision_state contains another one"):
        jax.eval_shape(low_precision_state(optax.chain(tx)).init, params)
    with pytest.raises(ValueError, match="pattern 'nux' matches no array of the state"):
        jax.eval_shape(low_precision_state(optax.adamw(1e-3), formats={"nux": None}).init, params)
    with pytest.warns(UserWarning, match="the state has no floating arrays"):
        low_precision_state(
            optax.adafactor(1e-3).__class__(*optax.scale_by_schedule(lambda _: 1.0))
        ).init(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        low_precision_state(optax.adamw(1e-3)).init({"b": jnp.zeros(3)})  # small is no mistake
    for fmt, options in (
        (Dynamic, {"bits": 5}),
        (Linear, {"bits": 16}),
        (Float8, {"block_size": 3}),
    ):
        with pytest.raises(ValueError, match="must be"):
            fmt(**options)


def test_describe_state_counts_every_byte():
    params = tree_of(MODEL)
    tx = low_precision_state(optax.adamw(1e-3), 4, rounding="compensated")
    state = jax.jit(tx.init)(params)
    text = optax_ext.describe_state(state)
    sizes = [int(line.split()[-2].replace(",", "")) for line in text.splitlines()]
    assert sum(sizes) == sum(x.nbytes for x in jax.tree.leaves(state))
    assert "Linear(bits=4, block_size=128, rank1=True) unsigned, 8 bits of error" in text


# --- What it costs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bits", "most"),
    [
        ("optax.adamw", 8, 2.1),
        ("optax.adamw", 4, 1.1),
        ("optax_ext.came, flax_transformer()", 8, 1.1),
        ("optax_ext.came, flax_transformer()", 4, 0.6),
    ],
)
def test_bytes_a_parameter(name, bits, most):
    """Scales included, of a Llama's layers with Flax's attention kernels."""
    params = state_bytes.llama(layers=1)
    tx = low_precision_state(state_bytes.STORED[name], bits)
    state = jax.eval_shape(tx.init, params)
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert most / 1.3 < held / state_bytes.count(params) <= most


def equations_of(tx, params, primitive):
    jaxpr = jax.make_jaxpr(tx.update)(params, tx.init(params)).jaxpr
    return jaxpr, [e for e in jaxpr.eqns if e.primitive.name == primitive]


def test_codes_of_a_parameter_wait_for_those_of_the_one_before():
    """By the barriers: without them a compiler may hold the float32 moments of all at once."""
    tx = low_precision_state(optax.adam(1e-3))
    params = {k: jnp.ones((64, 64 + i)) for i, k in enumerate("abc")}
    jaxpr, barriers = equations_of(tx, params, "optimization_barrier")
    assert len(barriers) == 3
    stored = [v for v in jaxpr.outvars if v.aval.dtype == jnp.uint8]
    for i, barrier in enumerate(barriers):
        read = {v.aval.shape for v in barrier.invars[:4]}
        assert (64, 64 + i) in read
        waits_for = {v.aval.shape for v in barrier.invars[4:] if v in stored}
        assert waits_for == ({(64, 64 + i - 1)} if i else set())


def test_codes_are_read_again_when_the_scales_are_there():
    """Else XLA may keep float32 moments from the scales to the codes."""
    tx = low_precision_state(optax.adam(1e-3))
    params = {k: jnp.ones((64, 64 + i)) for i, k in enumerate("abc")}
    jaxpr, rereads = equations_of(tx, params, "cond")
    assert len(rereads) == 3
    for i, reread in enumerate(rereads):
        _, *codes, mu_scale, nu_scale = reread.invars
        assert [(v.aval.shape, v.aval.dtype) for v in codes] == [((64, 64 + i), jnp.uint8)] * 2
        assert mu_scale in jaxpr.outvars
        assert nu_scale in jaxpr.outvars
        forms = [{e.primitive.name for e in b.jaxpr.eqns} for b in reread.params["branches"]]
        assert sorted(forms, key=len) == [set(), {"optimization_barrier"}]
        used = {v for e in jaxpr.eqns for v in e.invars if isinstance(v, type(codes[0]))}
        assert used.issuperset(reread.outvars)


@pytest.mark.parametrize("light", [True, False])
def test_only_what_is_light_is_computed_twice(light):
    def update(updates, state, params=None):
        del params
        average = jax.tree.map(
            lambda m, g: (0.5 * m if light else m @ jnp.eye(len(m))) + jnp.sin(m + g),
            state.trace,
            updates,
        )
        return average, optax.TraceState(average)

    tx = low_precision_state(optax.GradientTransformation(optax.trace(0.9).init, update))
    params = {"w": jnp.ones((64, 64))}
    assert len(equations_of(tx, params, "dot_general")[1]) == (0 if light else 1)
    assert len(equations_of(tx, params, "sin")[1]) == (2 if light else 1)
