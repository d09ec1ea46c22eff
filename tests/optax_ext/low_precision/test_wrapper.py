"""What a wrapped optimizer stores, how it moves, what its program reads; 8-bit ones by name."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from low_precision_steps import OPTIMIZERS

import optax_ext
from optax_ext import BFloat16, Dynamic, Float8, Linear, Quantized, kernels, low_precision_state
from optax_ext.low_precision._quantize import ROUNDINGS, dequantize, quantize

from .. import traces

MODEL = {"embed": (70, 64), "w": (64, 128), "b": (128,), "stack": (2, 32, 70)}
ABSTRACT = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in MODEL.items()}
ADAMW = optax.adamw(1e-3)


def is_stored(x):
    return isinstance(x, Quantized)


def stored_in(state):
    return [x for x in jax.tree.leaves(state, is_leaf=is_stored) if is_stored(x)]


# --- Steps ----------------------------------------------------------------------------------------

# Thousands of steps: what LLVM's first level costs is a tenth of what it saves.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 1})


def test_parameters_follow_those_of_the_plain_optimizer():
    """The path of 50 steps, by norm; small arrays are stored, too; each seed has its noise."""

    def tree_of(seed):
        rng = np.random.default_rng(seed)
        return {k: rng.normal(size=s).astype("float32") for k, s in MODEL.items()}

    start, plain = tree_of(0), optax.adamw(1e-3)
    grads = jax.tree.map(lambda *g: np.float32(0.01) * np.stack(g), *map(tree_of, range(1, 51)))
    low, other = (low_precision_state(plain, min_size=0, seed=seed) for seed in (0, 1))
    _, have, states = traces.unroll(low, grads, start)
    _, again, _ = traces.unroll(other, grads, start)
    _, want, _ = traces.unroll(plain, grads, start)
    assert len(stored_in(states)) == 2 * len(MODEL)
    for k, x in have.items():
        error = np.linalg.norm(x[-1] - want[k][-1]) / np.linalg.norm(want[k][-1] - start[k])
        assert error < 0.08, k
        assert (x[-1] != want[k][-1]).any()
        assert (x[-1] != again[k][-1]).any()


SHAPE, STEPS = (32, 128), 300
# An element of an update over the largest of float32: the first figure where a second moment is
# stored, whose codes next to each other are up to 2.7 times apart, the other where it is not.
MOST = {"bfloat16": (1.1, 1.1), "8bit": (5.0, 1.2), "fp8": (3.0, 1.2), "4bit": (5.0, 1.3)}


def spread(size, decades, seed=0):
    """Scales from 1 down to 10^-decades, in random order."""
    scales = 10.0 ** -np.linspace(0, decades, size)
    return np.random.default_rng(seed).permutation(scales).astype("float32")


def largest_ratios(plain, low, scales):
    """For each of ``scales``, the most that an element of an update is over float32's largest."""

    @jit
    @jax.vmap
    def run(scales):
        params = jnp.ones(SHAPE)
        direction = jax.random.normal(jax.random.key(0), SHAPE)

        def step(states, key):
            grads = (0.5 * direction + jax.random.normal(key, SHAPE)) * scales
            (want, first), (have, second) = (
                tx.update(grads, s, params) for tx, s in zip((plain, low), states, strict=True)
            )
            return (first, second), jnp.max(jnp.abs(have)) / jnp.max(jnp.abs(want))

        keys = jax.random.split(jax.random.key(1), STEPS)
        return jnp.max(jax.lax.scan(step, (plain.init(params), low.init(params)), keys)[1])

    return run(np.stack([np.broadcast_to(x, SHAPE) for x in scales]))


CASES = [(name, "AdamW") for name in optax_ext.STATE_FORMATS]
CASES += [("8bit", name) for name in OPTIMIZERS if name != "AdamW"]


# By default the format with the fewest codes; the other optimizers with what users choose.
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [pytest.param(*x, marks=() if x == ("4bit", "AdamW") else pytest.mark.slow) for x in CASES],
)
def test_no_step_is_far_above_those_of_float32(name, optimizer):
    """However far apart the sizes of columns are, of rows, or of both."""
    plain = OPTIMIZERS[optimizer]
    low = low_precision_state(plain, optax_ext.STATE_FORMATS[name], min_size=0)
    rows, columns = spread(SHAPE[0], 3)[:, None], spread(SHAPE[1], 3, seed=1)[None]
    scales = [spread(SHAPE[1], decades)[None] for decades in (0, 1, 3, 6)]
    have = largest_ratios(plain, low, [*scales, rows, rows * columns])
    assert max(have) < MOST[name][optimizer not in ("AdamW", "LAMB")], have


# --- What is stored, and how ----------------------------------------------------------------------


def formats_of(tx, params=ABSTRACT, **options):
    state = jax.eval_shape(low_precision_state(tx, **options).init, params)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (leaf.format, leaf.signed)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.inner_state, is_leaf=is_stored)
        if is_stored(leaf)
    }


def test_which_arrays_are_stored_and_how():
    adamw, momentum = optax.adamw(1e-3), optax.sgd(1e-3, momentum=0.9)
    signed, unsigned = (Dynamic(), True), (Dynamic(), False)
    want = {
        f"0/{f}/{k}": s for f, s in (("mu", signed), ("nu", unsigned)) for k in MODEL if k != "b"
    }
    assert formats_of(adamw) == want
    # Vectors, once they are 16 times as large.
    for size, num in ((65535, 0), (65536, 2)):
        assert len(formats_of(adamw, {"v": jax.ShapeDtypeStruct((size,), jnp.float32)})) == num
    first, second = (Dynamic(4, rank1=True), True), (Linear(4, rank1=True), False)
    assert formats_of(adamw, bits=4) == {k: first if "mu" in k else second for k in want}
    assert formats_of(adamw, bits=16) == {k: (BFloat16(), s) for k, (_, s) in want.items()}
    smaller = {k: (Dynamic(8, 64), s) for k, (_, s) in want.items()}
    assert formats_of(adamw, block_size=64) == smaller
    # Factored moments are no parameters' shape, however large; only the momentum is.
    came = formats_of(optax_ext.came(1e-3), min_size=0)
    assert came.keys() == {f"0/mu/{k}" for k in MODEL} | {"0/nu/b"}
    # What optax keeps unfactored because dims are short is a second moment.
    assert formats_of(optax.adafactor(1e-3))["0/v/w"] == unsigned
    # Copies of parameters, and sums.
    assert formats_of(optax.contrib.schedule_free_sgd(1e-3)) == {}
    narrow = {k: jax.ShapeDtypeStruct(s, jnp.bfloat16) for k, s in MODEL.items()}
    master = formats_of(optax_ext.master_weights(momentum), narrow)
    assert set(master) == {f"inner_state/0/trace/{k}" for k in MODEL if k != "b"}
    multi = optax.MultiSteps(momentum, 2).gradient_transformation()
    assert all("trace" in k for k in formats_of(multi))
    # By path; the first pattern counts.
    chosen = formats_of(adamw, formats={"nu/b$": Float8(), "embed": None, "nu": Linear()})
    assert chosen == {k: v for k, v in want.items() if "embed" not in k and "nu" not in k} | {
        "0/nu/b": (Float8(), False),
        "0/nu/w": (Linear(), False),
        "0/nu/stack": (Linear(), False),
    }


def test_types_of_the_state_stay():
    """By every rounding, inside and outside of what wraps transformations."""
    tx = low_precision_state(ADAMW)
    txs = [
        low_precision_state(optax.trace(0.9), bits, rounding=rounding)
        for bits in (8, 4, 16, Float8())
        for rounding in ROUNDINGS
    ]
    txs += [
        optax.MultiSteps(tx, 2).gradient_transformation(),
        optax.masked(tx, {"embed": True, "w": True, "b": False, "stack": False}),
        optax.inject_hyperparams(lambda x: low_precision_state(optax.adamw(x)))(1e-3),
        optax.contrib.schedule_free(tx, 1e-3),
    ]
    for outer in txs:
        state = jax.eval_shape(outer.init, ABSTRACT)
        assert stored_in(state)
        found = jax.eval_shape(outer.update, ABSTRACT, state, ABSTRACT)
        assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, (ABSTRACT, state))


def test_arrays_of_no_or_one_element_are_no_obstacle():
    """Scales are not discarded with moments of their size."""
    tx = low_precision_state(optax.adam(1e-3), min_size=0)
    params = {"w": jnp.ones((16, 32)), "none": jnp.ones((0, 3)), "one": jnp.ones(1)}
    state = jax.jit(tx.init)(params)
    updates, state = jax.jit(tx.update)(params, state, params)
    np.testing.assert_allclose(updates["w"], -1e-3, rtol=1e-4)
    np.testing.assert_allclose(jax.jit(dequantize)(state.inner_state[0].mu["w"]), 0.1, rtol=1e-4)


def test_describe_state_counts_every_byte():
    tx = optax.MultiSteps(optax.adamw(1e-3), 2).gradient_transformation()
    tx = low_precision_state(tx, 4, rounding="compensated")
    state = jax.eval_shape(tx.init, ABSTRACT)
    text = optax_ext.describe_state(state)
    sizes = [int(line.split()[-2].replace(",", "")) for line in text.splitlines()]
    assert sum(sizes) == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert "Linear(bits=4, block_size=128, rank1=True) unsigned, 8 bits of error" in text
    assert re.search(r"inner_state/acc_grads/w +\(64, 128\) +float32 +32,768 bytes", text)


# --- In other places ------------------------------------------------------------------------------


MOMENTUM = optax.sgd(0.5, momentum=0.9)
FINITE = {
    "8 bits": optax.apply_if_finite(low_precision_state(MOMENTUM), 3),
    "4 bits": optax.apply_if_finite(low_precision_state(MOMENTUM, 4), 3),
    "master_weights": optax_ext.master_weights(optax.apply_if_finite(MOMENTUM, 3)),
    "stochastic_rounding": optax_ext.stochastic_rounding(optax.apply_if_finite(MOMENTUM, 3)),
}


@pytest.mark.parametrize("name", FINITE)
def test_a_step_of_bfloat16_that_is_skipped(name):
    """Its branches have the same types, in this order."""
    tx = FINITE[name]
    step = jax.jit(traces.step_of(tx))
    params = {k: jnp.ones(s, jnp.bfloat16) for k, s in {"w": (64, 128), "b": (5,)}.items()}
    state = tx.init(params)
    # 1 - 0.5, kept, and 0.5 - 0.5 (0.9 + 0.5).
    for factor, want in ((1, 0.5), (np.nan, 0.5), (1, -0.2)):
        grads = jax.tree.map(lambda x, by=factor: x * jnp.bfloat16(by), params)
        params, state = step(grads, state, params)
        for x in params.values():
            np.testing.assert_allclose(np.asarray(x, float), want, atol=2e-3 * (want < 0))


def test_updates_have_the_dtypes_of_the_inner_transformation():
    """Of bfloat16 parameters the dequantized moments are wider."""
    params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
    inner = {"bfloat16": ADAMW, "float32": optax_ext.master_weights(ADAMW)}
    for dtype, tx in inner.items():
        low = low_precision_state(tx)
        updates, _ = jax.eval_shape(low.update, params, low.init(params), params)
        assert updates["w"].dtype == dtype
    low = low_precision_state(optax.apply_if_finite(ADAMW, 3))
    with pytest.raises(TypeError) as error:
        low.update(params, low.init(params), params)
    assert "around it, as in optax.apply_if_finite(low" in error.value.__notes__[-1]


def test_a_state_is_converted_and_back():
    """A float32 checkpoint is read into an 8-bit run, or into one of 4 bits, and back."""

    def make(low):
        chain = lambda rate: optax.chain(low(optax.adamw(rate)), optax.scale(0.5))  # noqa: E731
        masked = optax.masked(optax.inject_hyperparams(chain)(1e-3), {"w": True, "v": False})
        return optax.chain(optax.clip_by_global_norm(1.0), masked)

    rng = np.random.default_rng(0)
    params = {k: rng.normal(size=(64, 128)).astype(np.float32) for k in "wv"}
    plain = make(lambda tx: tx)
    low = {bits: make(functools.partial(low_precision_state, bits=bits, seed=7)) for bits in (8, 4)}
    _, state = plain.update(params, plain.init(params), params)
    convert = jax.jit(optax_ext.convert_state)
    in_8 = convert(state, low[8].init(params))
    mu, nu = stored_in(in_8)
    want = [x["w"] for x in state[1].inner_state.inner_state[0][0][1:]]
    for have, moment, signed in zip((mu, nu), want, (True, False), strict=True):
        expected = quantize(moment, Dynamic(8), signed)
        jax.tree.map(np.testing.assert_array_equal, have, expected)
    # As this state goes on, noise included, so does what comes of it by way of others.
    _, in_8 = low[8].update(params, in_8, params)
    in_4 = convert(in_8, low[4].init(params))
    assert {q.format.bits for q in stored_in(in_4)} == {4}
    back = convert(in_8, jax.eval_shape(plain.init, params))
    assert not stored_in(back)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    for kept in (convert(in_8, low[8].init(params)), convert(back, in_8)):
        jax.tree.map(np.testing.assert_array_equal, kept, in_8)
    assert int(back[1].inner_state.inner_state[0][0].count) == 2
    with pytest.raises(ValueError, match=r"has shape \(64, 128\), and \(3, 5\) in"):
        convert(in_8, plain.init({k: np.ones((3, 5), np.float32) for k in "wv"}))


# --- What the program reads -----------------------------------------------------------------------


def equations_of(tx, params, primitive):
    """Of the form of CPUs and GPUs."""
    jaxpr = jax.make_jaxpr(tx.update)(params, jax.eval_shape(tx.init, params), params).jaxpr
    forms = [e.params["default"].jaxpr for e in jaxpr.eqns if e.primitive is kernels.FOR_TPUS]
    jaxpr = forms[0] if forms else jaxpr
    return jaxpr, [e for e in jaxpr.eqns if e.primitive.name == primitive]


THREE = {k: jax.ShapeDtypeStruct((64, 64 + i), jnp.float32) for i, k in enumerate("abc")}


def test_codes_of_a_parameter_wait_for_those_of_the_one_before():
    """By the barriers: without them a compiler may hold the float32 moments of all at once."""
    tx = low_precision_state(optax.adam(1e-3))
    jaxpr, barriers = equations_of(tx, THREE, "optimization_barrier")
    assert len(barriers) == 3
    stored = [v for v in jaxpr.outvars if v.aval.dtype == jnp.uint8]
    for i, barrier in enumerate(barriers):
        read = {v.aval.shape for v in barrier.invars[:4]}
        assert (64, 64 + i) in read
        waits_for = {v.aval.shape for v in barrier.invars[4:] if v in stored}
        assert waits_for == ({(64, 64 + i - 1)} if i else set())


def test_codes_are_read_again_when_the_scales_are_there():
    """Else XLA may keep float32 moments from the scales to the codes; no codes of others are."""
    tx = low_precision_state(optax.adam(1e-3))
    smaller = {k: jax.ShapeDtypeStruct((64, 66 - i), jnp.float32) for i, k in enumerate("abc")}
    jaxpr, rereads = equations_of(tx, smaller, "cond")
    assert len(rereads) == 3
    for i, reread in enumerate(rereads):
        _, *codes, mu_scale, nu_scale = reread.invars
        assert [(v.aval.shape, v.aval.dtype) for v in codes] == [((64, 66 - i), jnp.uint8)] * 2
        assert mu_scale in jaxpr.outvars
        assert nu_scale in jaxpr.outvars
        forms = [{e.primitive.name for e in b.jaxpr.eqns} for b in reread.params["branches"]]
        assert sorted(forms, key=len) == [set(), {"optimization_barrier"}]
        used = {v for e in jaxpr.eqns for v in e.invars if isinstance(v, type(codes[0]))}
        assert used.issuperset(reread.outvars)


@pytest.mark.parametrize("name", ["dequantize", "uniform", "scales_of", "codes_of"])
def test_arrays_of_one_shape_share_a_function(name):
    """Compiled once each, what is done with first and with second moments: noise is an operand."""
    tx = low_precision_state(optax.adam(1e-3))
    params = {k: jax.ShapeDtypeStruct((64, 64), jnp.float32) for k in "abc"}
    text = jax.jit(tx.update).lower(params, jax.eval_shape(tx.init, params)).as_text()
    assert len(re.findall(rf"func private @{name}(_\d+)?\(", text)) == (
        1 if name == "uniform" else 2
    )


# --- Bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 3}, "bits must be 4, 8, 16 or a format"),
        ({"block_size": 100}, "block_size must be a power of two, at least 16, got 100"),
        ({"bits": 16, "block_size": 64}, "block_size=64 has no effect"),
        ({"rounding": "up"}, "rounding must be one of 'nearest', 'stochastic', 'compensated'"),
        ({"formats": {"nu": "fp8"}}, r"formats\['nu'\] must be a format such as Dynamic\(8\)"),
        ({"formats": {"(": None}}, "is not a regular expression"),
        ({"formats": {"nux": None}}, "pattern 'nux' matches no array of the state"),
        ({"min_size": -1}, "min_size must not be negative, got -1"),
        ({"seed": -1}, "seed must be in"),
        ({"inner": low_precision_state(ADAMW)}, "low_precision_state contains another one"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(low_precision_state(**{"inner": ADAMW} | options).init, ABSTRACT)


def test_a_state_without_floating_arrays_is_warned_of():
    with pytest.warns(UserWarning, match="the state has no floating arrays"):
        jax.eval_shape(low_precision_state(optax.scale_by_schedule(lambda _: 1.0)).init, ABSTRACT)


# --- 8-bit optimizers by name ---------------------------------------------------------------------

NAMED = {
    "adamw8bit": optax.adamw,
    "lion8bit": optax.lion,
    "lamb8bit": optax_ext.lamb,
    "came8bit": optax_ext.came,
    "adafactor8bit": lambda rate: optax_ext.adafactor(rate, momentum=0.9),
}


@pytest.mark.parametrize("name", NAMED)
def test_is_low_precision_state_of_the_plain_one(name):
    """The same program; it takes what the plain one takes."""
    make, params = getattr(optax_ext, name), {"w": jnp.ones((128, 128)), "b": jnp.ones(128)}
    have, want = make(1e-3), low_precision_state(NAMED[name](1e-3))
    states = [jax.eval_shape(tx.init, params) for tx in (have, want)]
    assert states[0] == states[1]
    assert len(stored_in(states[0])) == {"adamw8bit": 2, "lamb8bit": 2}.get(name, 1)
    first, second = (jax.make_jaxpr(tx.update)(params, states[0], params) for tx in (have, want))
    assert str(first) == str(second)
    assert make.__name__ == name
    injected = optax.inject_hyperparams(make)(learning_rate=1e-3)
    assert "learning_rate" in jax.eval_shape(injected.init, params).hyperparams
