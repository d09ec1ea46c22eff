"""Scales in the train state: PACT's clips and delayed scaling, against NumPy and one device."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from sharding import matmuls
from sharding.matmuls import _carried, _grids
from sharding.matmuls._product import quantized_product
from sharding.matmuls._recipes import Quantizer, quantized

from ...flax_nnx import needs_nnx, nnx
from .. import model
from .test_products import EVERY, decoder, decoder_params, low, numbered, tokens

SEED = jnp.zeros((), jnp.uint32)
PACT = EVERY._replace(activation=Quantizer(_grids.INT4, "pact"))
UNSIGNED = _grids.Grid("uint4", 15.0, 4, 4, signed=False)
FP8 = matmuls.RECIPES["fp8_delayed"]


# --- PACT -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [_grids.INT4, UNSIGNED], ids=lambda grid: grid.name)
def test_pact_is_that_of_numpy(grid, x64):
    rng = np.random.default_rng(0)
    x, w, g, clip = (
        rng.normal(size=(24, 16)),
        rng.normal(size=(16, 8)),
        rng.normal(size=(24, 8)),
        1.25,
    )
    x[0, :2] = clip, -clip  # at the clip a number is clipped
    recipe = PACT._replace(activation=Quantizer(grid, "pact"))
    eqn = jax.make_jaxpr(jnp.matmul)(x, w).eqns[0]

    def product(x, w, clip):
        return quantized_product(eqn, recipe, 1, [x, w], SEED, {"activation": clip})

    y, pull = jax.vjp(product, jnp.asarray(x), jnp.asarray(w), jnp.full(1, clip))
    dx, dw, d_clip = pull(jnp.asarray(g))

    low = -clip if grid.signed else 0.0
    step = clip / grid.top
    numbers = np.rint(np.clip(x, low, clip) / step) * step
    of_numbers = g @ w.T
    np.testing.assert_allclose(y, numbers @ w, rtol=1e-12)
    np.testing.assert_allclose(dw, numbers.T @ g, rtol=1e-12)
    np.testing.assert_allclose(dx, of_numbers * ((x > low) & (x < clip)), rtol=1e-12)
    beyond = (x >= clip) * 1.0 - (x <= low) * grid.signed
    np.testing.assert_allclose(d_clip, [np.sum(of_numbers * beyond)], rtol=1e-11)


def test_pact_starts_at_the_clip_of_sawb_and_is_trained(x64):
    fn, params = low(decoder, "sun4"), decoder_params()
    scaled = matmuls.scaled_params(fn, params, tokens())
    assert jax.tree.map(jnp.shape, scaled.pact) == {
        f"layers/{name}": {"activation": (3, 1)} for name in ("qkv", "out", "up", "down")
    }
    x = np.asarray(params["embed"])[tokens()[:, :-1]]
    clip = 12.035 * np.sqrt(np.mean(x**2)) - 12.03 * np.mean(np.abs(x))
    np.testing.assert_allclose(scaled.pact["layers/qkv"]["activation"][0, 0], clip, rtol=1e-12)
    grads = jax.jit(jax.grad(fn))(scaled, tokens())
    assert all(np.abs(x).min() > 0 for x in jax.tree.leaves(grads.pact))


@pytest.mark.parametrize("recipe", ["sun4", "fp8_delayed"])
def test_layers_of_a_loop_and_by_their_numbers_have_the_same_scales(recipe):
    params = decoder_params(np.float32)
    found = []
    for loss in (decoder, numbered):
        fn = low(loss, recipe)
        scaled = matmuls.scaled_params(fn, params, tokens())
        found.append((scaled, *jax.jit(jax.value_and_grad(fn))(scaled, tokens(1))))
    model.assert_close(*found, 1e-5)


# --- Delayed scaling ------------------------------------------------------------------------------


def coded(x, history, dtype, top):
    """Numbers of a tensor, by the largest magnitude of a history, up to a quarter of its octave."""
    largest = np.float32(max(history))
    bits = (largest.view(np.uint32) // 2**21 + 1) * 2**21
    scale = float(np.uint32(bits).view(np.float32)) / top
    return np.clip(x / scale, -top, top).astype(dtype).astype(np.float64) * scale


def of_history(q, history):
    """Delayed by so many steps, of codes that products sum in float64."""
    return q._replace(history=history, grid=q.grid._replace(dtype=None))


def test_delayed_scaling_is_that_of_numpy(x64):
    """Of a loop of checkpoints, where magnitudes rise beyond the scales, fall, and leave them."""
    history, rate, steps = 3, 0.05, 9

    def loss(w, x):
        x, _ = jax.lax.scan(jax.checkpoint(lambda x, w: (x @ w, None)), x, w)
        return jnp.mean(x**2)

    fn = low(
        loss, FP8._replace(**{k: of_history(getattr(FP8, k), history) for k in FP8._fields[1:5]})
    )
    rng = np.random.default_rng(0)
    w = rng.normal(size=(2, 8, 8)) / 3
    batches = [rng.normal(size=(16, 8)) * s for s in (1, 1, 4, 0.1, 0.1, 0.1, 0.1, 3, 1)]
    tx = matmuls.scaled_optimizer(optax.sgd(rate))
    state = matmuls.scaled_params(fn, jnp.asarray(w), jnp.asarray(batches[0]))
    opt_state = tx.init(state)
    e4m3 = functools.partial(coded, dtype=ml_dtypes.float8_e4m3fn, top=448.0)
    e5m2 = functools.partial(coded, dtype=ml_dtypes.float8_e5m2, top=57344.0)
    past = [{"x": [], "w": [], "g": []} for _ in range(2)]

    def one_step(x, first=False):
        """Loss and gradient; ``first`` by scales of the step itself, to the bin."""

        def of(kind, layer, value):
            seen = past[layer][kind]
            seen.append(np.abs(value).max())
            return seen[-1:] if first else seen[-history - 1 : -1]

        codes, grads = [], np.zeros_like(w)
        for i in range(2):
            codes.append((e4m3(x, of("x", i, x)), e4m3(w[i], of("w", i, w[i]))))
            x = codes[i][0] @ codes[i][1]
        g = 2 * x / x.size
        for i in (1, 0):
            low_g = e5m2(g, of("g", i, g))
            grads[i] = codes[i][0].T @ low_g
            g = low_g @ codes[i][1].T
        return np.mean(x**2), grads

    for layer in range(2):  # what the first scales are of
        for kind, field in (("x", "activation"), ("w", "weight"), ("g", "cotangent")):
            ages = np.asarray(state.delayed[""][field][layer])
            (index,) = np.flatnonzero(ages == 0)
            past[layer][kind].append(float(np.uint32(index * 2**21).view(np.float32)))
    for x in batches[:steps]:
        value, grads = jax.jit(jax.value_and_grad(fn))(state, jnp.asarray(x))
        updates, opt_state = tx.update(grads, opt_state, state)
        state = optax.apply_updates(state, updates)
        expected, of_w = one_step(x)
        np.testing.assert_allclose(value, expected, rtol=1e-12)
        np.testing.assert_allclose(grads.params, of_w, rtol=1e-10, atol=1e-14)
        w = w - rate * of_w


def test_a_step_that_is_not_finite_leaves_no_magnitude():
    q = FP8.activation
    ages = jnp.where(_carried.bin_of(jnp.float32(3.0)) > 0, 0.0, _carried.NEVER)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32)
    _, scale = quantized(x.at[1, 1].set(np.inf), q, (0,), 1, SEED, ages)
    assert not np.isfinite(scale).any()
    assert not np.asarray(_carried.bin_of(jnp.float32(np.inf))).any()
    assert not np.asarray(_carried.bin_of(jnp.float32(np.nan))).any()
    assert float(_carried.clip_of(ages, 16)) == 3.5  # the top of the bin from 3 on


def test_noise_is_of_the_step_where_the_scale_is_not():
    q = matmuls.RECIPES["int8_delayed"].cotangent
    ages = jnp.where(_carried.bin_of(jnp.float32(4.0)) > 0, 0.0, _carried.NEVER)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), jnp.float32)
    errors = []
    for times in (1.0, 1 + 2**-12):
        codes, scale = quantized(x * times, q, (0,), 1, SEED, ages)
        errors.append(np.asarray(codes * scale - x * times).ravel())
    assert abs(np.corrcoef(*errors)[0, 1]) < 0.1


# --- In steps -------------------------------------------------------------------------------------

# Codes that products sum in float64.
DELAYED = Quantizer(_grids.INT8._replace(dtype=None), "delayed")
FORWARD = EVERY._replace(activation=DELAYED, weight=DELAYED)


def with_clips(scaled):
    """With the magnitudes that scales are of: devices know of smaller ones, too."""
    clips = jax.vmap(lambda ages: _carried.clip_of(ages, 16))
    return scaled._replace(delayed=jax.tree.map(clips, scaled.delayed))


@pytest.mark.parametrize(
    ("recipe", "stage", "microbatches", "update"),
    [
        (FORWARD, 2, 2, "after"),
        (FORWARD, 3, 1, "backward"),
        (PACT, 2, 1, "backward"),
        (PACT, 3, 2, "after"),
    ],
)
def test_steps_on_devices_are_those_of_one(recipe, stage, microbatches, update, x64):
    """To the last bits: the largest magnitudes are those of all rows of the step."""
    fn = low(decoder, recipe)
    tx = matmuls.scaled_optimizer(optax.adamw(1e-2))
    alone = matmuls.scaled_params(fn, decoder_params(), tokens())
    opt_state, zero = tx.init(alone), model.zero_on(8, stage=stage)
    state = zero.init(lambda start=alone: (start, tx.init(start)), tx=tx)
    step = zero.train_step(fn, tx=tx, update=update, microbatches=microbatches)

    @jax.jit
    def one_device(params, opt_state, batch):
        value, grads = jax.value_and_grad(fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    for i in range(3):
        state, metrics = step(state, zero.put(tokens(i)))
        alone, opt_state, value = one_device(alone, opt_state, tokens(i))
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-9)
    both = [with_clips(params) for params in (state[0], alone)]
    model.assert_close((both[0], state[1]), (both[1], opt_state), 1e-8)


@pytest.mark.parametrize("update", ["after", "backward"])
def test_magnitudes_are_not_trained(update):
    fn, tx = low(decoder, "fp8_delayed"), optax.sgd(1e-2)
    scaled = matmuls.scaled_params(fn, decoder_params(), tokens())
    step = model.zero_on(1).train_step(fn, tx=tx, update=update)
    with pytest.raises(ValueError, match=r"counted, not trained: .* matmuls.scaled_optimizer"):
        step((scaled, tx.init(scaled)), tokens())


@needs_nnx
def test_an_nnx_model_carries_scales():
    """As a whole, whose statistics its loss changes, and split, as a step of stage 3 takes it."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(2)])
            self.norm = nnx.BatchNorm(16, rngs=rngs)

        def __call__(self, x):
            for dense in self.layers:
                x = nnx.relu(dense(x))
            return self.norm(x)

    def loss(made, x):
        return jnp.mean(made(x) * x)

    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 16)), jnp.float32)
    with jax.numpy_rank_promotion("allow"):
        made, fn = Model(nnx.Rngs(0)), low(loss, FP8)
        graph, params, rest = nnx.split(made, nnx.Param, ...)
        value = fn(matmuls.scaled_params(fn, made, x), x)
        assert np.abs(made.norm.mean[...]).max() > 0
        fn = low(lambda p, x: loss(nnx.merge(graph, p, rest, copy=True), x), FP8)
        scaled, zero = matmuls.scaled_params(fn, params, x), model.zero_on(8, stage=3)
        tx = matmuls.scaled_optimizer(optax.adam(1e-2))
        state = zero.init(lambda: (scaled, tx.init(scaled)), tx=tx)
        step, losses = zero.train_step(fn, tx=tx), []
        for _ in range(3):
            state, metrics = step(state, zero.put(x))
            losses.append(metrics["loss"])
    np.testing.assert_allclose(losses[0], value, rtol=1e-5)
    assert losses[2] < losses[1] < losses[0]


def test_magnitudes_are_the_largest_of_any_device():
    fn, params = low(decoder, "fp8_delayed"), decoder_params(np.float32)
    scaled = matmuls.scaled_params(fn, params, tokens()[:2])  # the rows of a device
    grads = jax.jit(jax.grad(fn))(scaled, tokens())
    zero = model.zero_on(8, stage=2)
    _, of_all = zero.value_and_grad(fn)(zero.place(scaled), zero.put(tokens()))
    for name, fields in of_all.delayed.items():
        for field, seen in fields.items():
            # Each device has the mean over its rows, eight times the cotangents of all rows'.
            least, most = (10, 14) if field == "cotangent" else (0, 0)
            for layer, alone in zip(seen, grads.delayed[name][field], strict=True):
                shift = max(np.flatnonzero(layer)) - max(np.flatnonzero(alone))
                assert least <= shift <= most, (name, field)
                assert len(np.flatnonzero(layer)) <= 8


# --- What is refused ------------------------------------------------------------------------------


def test_bad_input():
    fn, params = low(decoder, "sun4"), decoder_params(np.float32)
    with pytest.raises(ValueError, match=r"sun4 carries scales .* of layers/qkv .*scaled_params\("):
        fn(params, tokens())
    other = matmuls.scaled_params(low(decoder, "fp8_delayed"), params, tokens())
    with pytest.raises(ValueError, match="sun4 carries scales"):
        fn(other, tokens())
    with pytest.raises(ValueError, match=r"what shd.quantized_matmuls returned, got decoder"):
        matmuls.scaled_params(decoder, params, tokens())
    block = low(lambda p, x: x @ p["w"], "sun4")
    with pytest.raises(ValueError, match=r"the loss is float32\[8, 8\], and must be one"):
        matmuls.scaled_params(block, {"w": jnp.ones((8, 8))}, jnp.ones((8, 8)))


def test_what_is_read_as_a_stack_and_as_a_whole_carries_no_scales():
    def both(w, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w["layers"])
        return jnp.mean(jnp.einsum("bk,lkn->bln", x, w["layers"]) @ w["head"])

    w = {"layers": jnp.ones((2, 8, 8)), "head": jnp.ones((8, 8))}
    rows = matmuls.report_products(low(both, "sun4"), w, jnp.ones((8, 8))).rows
    assert re.match("scales are carried by layers, and", rows[0].reason)
    assert matmuls.report_products(low(both, "fp8"), w, jnp.ones((8, 8))).rows[0].formats


def test_weights_behind_a_barrier_have_their_scales():
    def loss(w, x, barrier=jax.lax.optimization_barrier):
        w = barrier(w)
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])

    w, x = jnp.ones((2, 8, 8)) / 8, jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)))
    fn = low(loss, "sun4")
    plain = low(functools.partial(loss, barrier=lambda w: w), "sun4")
    scaled = matmuls.scaled_params(fn, w, x)
    found = (jax.jit(jax.value_and_grad(each))(scaled, x) for each in (fn, plain))
    model.assert_close(*found, 1e-6)
