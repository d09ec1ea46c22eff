"""Codes, scales and blocks of stored arrays, and what rounding loses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_ext import BFloat16, Dynamic, Float8, Linear
from optax_ext.low_precision import _quantize
from optax_ext.low_precision._formats import DynamicMap, Float8Map, LinearMap
from optax_ext.low_precision._quantize import ROUNDINGS, dequantize, quantize

FORMATS = {
    "8 bits": Dynamic(),
    "4 bits in rows and columns": Dynamic(4, rank1=True),
    "4 bits rank 1": Linear(4, rank1=True),
    "fp8": Float8(),
    "bf16": BFloat16(),
}
SHAPES = {
    "ragged last blocks": (13, 300),
    "fewer rows than a block": (3, 131),
    "a vector": (1000,),
    "fewer columns than a block": (300, 8),
    "no long dim": (5, 9, 7),
    "one column": (640, 1),
    "stacked": (2, 3, 4, 256),
}


def example(shape, signed, decades=2.0, seed=0):
    """Rows and columns of different size; squares where nothing may be negative."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * 10.0 ** rng.uniform(-decades, 0, (shape[0], *[1] * len(shape[1:])))
    x = x * 10.0 ** rng.uniform(-decades / 2, 0, shape[-1:])
    return (x if signed else np.square(x)).astype(np.float32)


# --- Maps -----------------------------------------------------------------------------------------


@functools.cache
def values_of(number_map):
    levels = np.arange(number_map.top + 1)
    return np.asarray(jax.jit(lambda x: number_map.value(x, jnp.float32))(levels))


def published(exponents, signed):
    """The 8-bit optimizers' construction, in float64: magnitudes in ascending order."""
    values = [0.0, 1.0]
    for i in range(exponents):
        ends = np.linspace(0.1, 1, 2**i * (1 if signed else 2) + 1)
        values += list((ends[1:] + ends[:-1]) / 2 * 10.0 ** (i - exponents + 1))
    return np.sort(values)


def test_known_values():
    """Dynamic maps are the published ones; bitsandbytes' table has rounded as ours has."""
    for exponents in (7, 3):
        for signed in (True, False):
            have = values_of(DynamicMap(exponents, signed))
            assert len(have) + (len(have) - 2 if signed else 0) == 2 ** (exponents + 1)
            np.testing.assert_allclose(have, published(exponents, signed), rtol=2.0**-22)
    signed = values_of(DynamicMap(7, True))
    np.testing.assert_allclose(signed[[1, 2, -2, -1]], [5.5e-7, 3.25e-6, 0.99296875, 1], rtol=1e-6)
    np.testing.assert_allclose(values_of(LinearMap(15, zero=False)), np.arange(1, 17) / 16)
    np.testing.assert_allclose(values_of(LinearMap(127, zero=True)), np.arange(128) / 127)
    e4m3 = np.asarray(jnp.arange(127, dtype=jnp.uint8).view(jnp.float8_e4m3fn), np.float32)
    np.testing.assert_allclose(values_of(Float8Map()), e4m3 / 448, rtol=2.0**-23)


MAPS = [
    *(DynamicMap(exponents, signed) for exponents in (7, 3) for signed in (True, False)),
    LinearMap(127, zero=True),
    LinearMap(15, zero=False),
    Float8Map(),
]


@pytest.mark.parametrize("number_map", MAPS, ids=repr)
def test_positions_are_levels_and_the_share_of_the_way_to_the_next(number_map):
    values = values_of(number_map).astype(np.float64)
    assert (np.diff(values) > 0).all()
    shares = np.array([0.0, 0.01, 0.5, 0.99])[:, None]
    between = (values[:-1] + np.diff(values) * shares).astype(np.float32)
    have = jax.jit(number_map.position)(np.append(between, np.float32(1)))
    np.testing.assert_allclose(
        have[:-1].reshape(between.shape), np.arange(number_map.top) + shares, atol=3e-5
    )
    assert have[-1] == number_map.top


# --- One array ------------------------------------------------------------------------------------

# By default each kind of code and each kind of scale, with a sign or without.
DEFAULT = [
    ("8 bits", True),
    ("8 bits", False),
    ("4 bits in rows and columns", True),
    ("4 bits rank 1", False),
    ("fp8", False),
    ("bf16", False),
]
every = pytest.mark.parametrize(
    ("name", "signed"),
    [
        pytest.param(name, signed, marks=() if (name, signed) in DEFAULT else pytest.mark.slow)
        for name in FORMATS
        for signed in (True, False)
    ],
)
SPECIAL = np.ones((6, 2, 256), np.float32)
SPECIAL *= np.array([1e-30, 1e30, 0, -1, 1, 1], np.float32)[:, None, None]
SPECIAL[4, 1, 3], SPECIAL[5, 1, 3] = np.nan, np.inf
DRAWS = 1000


def inputs_of(name, signed):
    """What is stored; each array is for a test below."""
    rng = np.random.default_rng(0)
    shapes = SHAPES if (name, signed) == ("8 bits", True) else list(SHAPES)[:3]
    top = np.where(np.arange(64) % 16 == 5, 8.0, rng.normal(size=(16, 64)))
    top[8:] *= -1 if signed else 1
    wide = np.exp(4 * rng.normal(size=(64, 512))).astype(np.float32)
    if name != "fp8":
        wide[0, :2] = 1e-30, 1e30  # whose ratio is 0
    return {
        "shapes": {k: example(SHAPES[k], signed) for k in shapes},
        "special": SPECIAL if signed else np.delete(SPECIAL, 3, 0),
        "log-normal": wide,
        "average": example((2, 300), signed, decades=0.5),
        "fine": example((4, 512), signed, decades=1.0),
        "top": (top if signed else np.minimum(top**2, 8)).astype(np.float32),
        "noise": rng.random((64, 512), np.float32),
        "draws": rng.random((DRAWS, 2, 300), np.float32),
    }


@functools.cache
def stored(name, signed):
    """The inputs of all tests of a format, and what becomes of them, by one program."""
    fmt, inputs = FORMATS[name], inputs_of(name, signed)

    def trip(x, rounding="nearest", noise=None):
        q = quantize(x, fmt, signed, rounding, noise)
        return q, dequantize(q)

    @jax.jit
    def run(x):
        half = jnp.full((2, 256), 0.5)
        shapes = jax.tree.map(trip, x["shapes"])
        return {
            "shapes": shapes,
            "again": trip(shapes["ragged last blocks"][1]),
            "special": {
                r: jax.vmap(lambda x, r=r: trip(x, r, half)[1])(x["special"]) for r in ROUNDINGS
            },
            "log-normal": {r: trip(x["log-normal"], r, x["noise"])[1] for r in ROUNDINGS},
            "average": jax.vmap(lambda n: trip(x["average"], "stochastic", n)[1])(x["draws"]),
            "fine": (trip(x["fine"]), trip(x["fine"], "compensated")),
            "top": trip(x["top"], "stochastic", jnp.full((16, 64), 1 - 2.0**-24))[1],
        }

    return inputs, jax.device_get(run(inputs))


def of_elements(q, part):
    """What a stored array has for each block, for each element of it, by NumPy."""
    blocks = _quantize.Blocks(q.shape, q.format.block_size)
    (row, last), (rows, columns) = blocks.dims, blocks.rows_and_columns
    part = np.take(np.asarray(part), np.arange(q.shape[last]) // columns, axis=last)
    return part if row == last else np.take(part, np.arange(q.shape[row]) // rows, axis=row)


def scales_of(q):
    """The scale of each element: of its block, or the least of its row's and its column's."""
    if getattr(q.format, "rank1", False) and len(q.shape) > 1:
        return functools.reduce(np.minimum, np.ix_(*map(np.asarray, q.scale)))
    return of_elements(q, np.abs(q.scale[0]))


@every
def test_every_element_is_within_half_the_distance_of_the_values_beside_it(name, signed):
    fmt, (inputs, outputs) = FORMATS[name], stored(name, signed)
    for shape, (q, y) in outputs["shapes"].items():
        x = inputs["shapes"][shape]
        assert y.shape == x.shape
        assert y.dtype == np.float32
        if isinstance(fmt, BFloat16):
            np.testing.assert_array_equal(y, x.astype(jnp.bfloat16).astype(np.float32))
            continue
        scale, number_map = scales_of(q), _quantize._Scaled(fmt, signed, x.shape, jnp.float32).map
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
            least = values[1] ** (1 / power) * scale
            bound = np.where(above <= 1, np.maximum(bound, least), bound)
        assert (np.abs(y - x) <= bound * (1 + 1e-5) + 1e-30).all(), shape
        if signed:
            assert (np.sign(y) * np.sign(x) >= 0).all(), shape
    if name != "fp8":  # the least magnitude of a block moves, and with it the power
        once, twice = outputs["shapes"]["ragged last blocks"][1], outputs["again"][1]
        np.testing.assert_allclose(twice, once, rtol=1e-6)


@every
def test_what_is_special(name, signed):
    """Constants, zeros, extremes, and what is not finite, by every rounding."""
    inputs, outputs = stored(name, signed)
    for rounding, have in outputs["special"].items():
        np.testing.assert_allclose(have[:-2], inputs["special"][:-2], rtol=2.0**-8)
        for x in have[-2:]:
            assert not np.isfinite(x).all(), rounding
    # 255 + (1 - 2^-24) is 256 in float32, which is code 0: the largest of a block was lost.
    largest = np.abs(inputs["top"]) == 8
    np.testing.assert_allclose(outputs["top"][largest], inputs["top"][largest], rtol=2.0**-8)
    # A sixth of log-normal values are nearest to 0: none becomes it.
    assert signed or all((have > 0).all() for have in outputs["log-normal"].values())


@every
def test_stochastic_rounding_has_the_right_mean(name, signed):
    """The mean of 1000 draws is within five of its own deviations."""
    inputs, outputs = stored(name, signed)
    x, got = inputs["average"], outputs["average"].astype(np.float64)
    low = got.min(0)
    # Below the least code of a map without zero nothing can be done; nor below the least positive.
    inside = np.abs(x) >= np.abs(np.where(low == 0, 0, low)) * (1 - 1e-6) if not signed else True
    error = np.abs(got.mean(0) - x)
    bound = 5 * got.std(0) / np.sqrt(DRAWS) + 1e-6 * np.abs(x)
    assert np.mean((error <= bound) | ~np.asarray(inside)) > 0.98  # others: beyond the last code


@every
def test_compensation_keeps_eight_bits_more(name, signed):
    fmt, (inputs, outputs) = FORMATS[name], stored(name, signed)
    x, ((q, plain), (fine, better)) = inputs["fine"], outputs["fine"]
    assert fine.rest.shape == x.shape
    assert fine.rest.dtype == jnp.uint8
    # Above the least code of the 4-bit map without zero.
    has_zero = fmt.bits == 16 or _quantize._map(fmt, signed).zero
    inside = np.abs(x) >= (0 if has_zero else scales_of(q) / 16)
    error = (better - x)[inside]
    assert np.abs(error).sum() < np.abs(plain - x)[inside].sum() / 100
    # To the nearest: the errors are not towards zero.
    assert np.abs(np.mean(error * np.sign(x[inside]))) < 0.5 * np.mean(np.abs(error))


def test_errors_of_other_implementations():
    """Mean relative errors, measured with bitsandbytes, torchao and COAT's formulas."""
    rng = np.random.default_rng(0)
    normal = rng.normal(size=(256, 2048))
    data = {
        "normal": normal,
        "chi2": normal**2,
        "average of 64 chi2": rng.chisquare(64, size=normal.shape) / 64,
        "log-normal": np.exp(normal),
    }
    data = {k: x.astype(np.float32) for k, x in data.items()}
    cases = [
        (Dynamic(), True, "normal", 0.0154),
        (Dynamic(block_size=2048), True, "normal", 0.0167),
        (Dynamic(), False, "chi2", 0.0171),
        (Dynamic(4), True, "normal", 0.2006),
        (Dynamic(4, 64), True, "normal", 0.193),
        (Float8(expand=False), True, "normal", 0.0224),
        (Float8(), True, "normal", 0.0126),
        (Float8(), False, "average of 64 chi2", 0.0019),
        (Float8(expand=False), False, "log-normal", 0.0230),
    ]
    stored = jax.jit(
        lambda data: [dequantize(quantize(data[k], f, signed)) for f, signed, k, _ in cases]
    )
    for y, (fmt, _, kind, want) in zip(stored(data), cases, strict=True):
        error = np.minimum(np.abs(y - data[kind]) / np.abs(data[kind]), 1)  # 1: theirs became 0
        assert error.mean() == pytest.approx(want, rel=0.05), fmt


# --- Bytes and layout -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fmt", "shape", "nbytes"),
    [
        (Dynamic(), (768, 3072), 768 * 3072 + 4 * 96 * 96),
        (Dynamic(), (13, 300), 13 * 300 + 4 * 2 * 10),  # ragged blocks have a scale
        (Dynamic(), (768, 12, 64), 768 * 768 + 4 * 96 * 12 * 2),  # rows: the longest but the last
        (Dynamic(), (4096, 8), 4096 * 8 + 4 * 128),  # few columns: more rows
        (Dynamic(), (3, 512), 3 * 512 + 4 * 8),  # few rows: more columns
        (Dynamic(4), (768, 3072), 768 * 3072 * (1 / 2 + 4 / 128)),
        (Dynamic(4), (5, 301), 3 * 301 + 4 * 19),  # half a byte is left over
        (Linear(4, rank1=True), (768, 3072), 768 * 3072 // 2 + 4 * (768 + 3072)),
        (Linear(4, rank1=True), (4096,), 2048 + 4 * 32),  # a vector has blocks
        (Float8(), (768, 3072), 768 * 3072 * (1 + 5 / 128)),
        (BFloat16(), (768, 3072), 2 * 768 * 3072),
    ],
    ids=str,
)
def test_bytes(fmt, shape, nbytes):
    """Blocks are eight rows high: a split into multiples of eight rows splits none."""
    x, signed = jax.ShapeDtypeStruct(shape, jnp.float32), not isinstance(fmt, Linear)
    assert jax.eval_shape(lambda x: quantize(x, fmt, signed), x).nbytes == nbytes
    more = jax.eval_shape(lambda x: quantize(x, fmt, signed, "compensated"), x)
    assert more.nbytes == nbytes + np.prod(shape)
    if (fmt, shape) == (Dynamic(), (768, 3072)):
        assert jax.eval_shape(lambda x: quantize(x, fmt, signed), x).scale[0].shape == (96, 96)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("signed", [True, False])
def test_no_code_is_the_low_byte_of_a_float(signed, rounding):
    # ptxas of CUDA 13 would store the float converted to a byte (_quantize.codes_of).
    def codes(x, noise):
        return quantize(x, Dynamic(8), signed, rounding, noise).codes

    x = jnp.ones((16, 64))
    jaxpr = jax.make_jaxpr(codes)(x, x).jaxpr
    producer = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    eqn = producer[jaxpr.outvars[0]]
    while eqn.primitive.name in ("convert_element_type", "and"):  # which leave the byte as it is
        eqn = producer[eqn.invars[0]]
    assert eqn.primitive.name in ("sub", "shift_right_logical")


@pytest.mark.parametrize("rank1", [False, True])
@pytest.mark.parametrize("fmt", [Dynamic(4), Linear(4), Dynamic(8), Linear(8)], ids=str)
def test_what_is_not_finite_spoils_its_block_alone(fmt, rank1):
    """In rows and columns, its element alone: codes of rows 2 and 10 share bytes of 4 bits."""
    fmt = dataclasses.replace(fmt, rank1=rank1)
    x = np.full((20, 48), 0.25, np.float32)
    x[:, 0] = 1.0
    bad = [(row, value) for row in (2, 10, 17) for value in (np.nan, np.inf, -np.inf)]
    many = np.stack([x] * (len(bad) + 1))
    for case, (row, value) in zip(many, bad, strict=False):
        case[row, 5] = value

    @jax.jit
    def run(many):
        def trips(x):
            return [
                dequantize(quantize(x, fmt, signed, rounding, jnp.full(x.shape, 0.5)))
                for signed in (True, False)
                for rounding in ROUNDINGS
            ]

        return jax.vmap(trips)(many)

    rows, columns = (1, 1) if rank1 else _quantize.Blocks(x.shape, fmt.block_size).rows_and_columns
    for i, have in enumerate(jax.device_get(run(many))):
        for case, (row, value) in zip(have, bad, strict=False):
            of_block = np.zeros(x.shape, bool)
            of_block[row // rows * rows :, 5 // columns * columns :][:rows, :columns] = True
            if value == -np.inf and i >= len(ROUNDINGS):  # becomes 0, or the least, without a sign
                assert case[row, 5] <= 1 / 16
                of_block[:] = np.arange(48) == 5
            else:
                assert case[row, 5] == value or np.isnan(value)
                assert not np.isfinite(case[of_block]).any()
            # The scale of rank 1 is that of the row alone where the column has an infinite one.
            np.testing.assert_allclose(case[~of_block], have[-1][~of_block], atol=0.07)


@pytest.mark.parametrize("name", FORMATS)
def test_no_number_within_is_nan(name):
    """Of zeros, and of what is infinite: ``jax_debug_nans`` stops at the user's own NaN alone."""
    zeros = jnp.zeros((16, 64))
    with jax.debug_nans(True):
        for x in (zeros, zeros.at[3, 5].set(jnp.inf), jnp.full((16, 64), jnp.inf)):
            for signed in (True, False):
                codes = quantize(x, FORMATS[name], signed).codes
        dequantize(quantize(zeros, FORMATS[name], True))
    assert codes.size
