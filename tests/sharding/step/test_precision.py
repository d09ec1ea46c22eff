"""Dtypes of a step: what is computed, sent and stored in which, and master weights."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
import sharding as shd
from sharding import sync
from sharding.plan.audit._program_collectives import collectives

from ...tiers import slow
from .. import model
from . import runs

STEPS = 4
WIDTH = 256


def zero_of(stage, **options):
    return model.zero_on(8, stage=stage, **({"min_shard_size": 4096} | options))


def make_state(tx, dtype):
    shapes = {"in": (WIDTH, 4 * WIDTH), "out": (4 * WIDTH, WIDTH)}
    return model.make_of(lambda: {k: jnp.ones(s, dtype) for k, s in shapes.items()}, tx)


def make_loss(zero):
    block = zero.gathered(lambda p, x: jnp.tanh(x.astype(p["in"].dtype) @ p["in"]) @ p["out"])
    return lambda params, x: jnp.mean(block(params, x) ** 2)


def lower(zero, tx, dtype):
    x = np.ones((32, WIDTH), np.float32)
    return model.lowered(zero, make_state(tx, dtype), tx, make_loss(zero), x)


def dtypes_of(text, op):
    """Dtypes of the large collectives as lowered: XLA:CPU widens them when it compiles."""
    found = re.findall(rf"stablehlo\.{op}.*?-> tensor<([0-9x]+)x([a-z0-9]+)>", text, re.DOTALL)
    return {dtype for dims, dtype in found if math.prod(map(int, dims.split("x"))) > 1000}


BF16, F32 = jnp.bfloat16, jnp.float32
# Stage, dtype of parameters, precision, sync; dtypes that are reduced, and at stage 3 gathered.
# (The gather of the other stages is the partitioner's: in compiled programs only.)
ON_THE_WIRE = {
    "stage 2": (2, BF16, {"reduce": F32}, None, "f32", None),
    "stage 3": (3, BF16, {"reduce": F32}, None, "f32", "bf16"),
    "a sync": (2, BF16, {"reduce": F32}, sync.dense(), "f32", None),
    "a sync at stage 1": (1, F32, {"compute": BF16, "reduce": F32}, sync.dense(), "f32", None),
    "a sync, compute": (1, F32, {"compute": BF16}, sync.dense(), "bf16", None),
    "a sync at stage 3": (3, F32, {"compute": BF16, "reduce": F32}, sync.dense(), "f32", "bf16"),
    "a sync, compute at stage 3": (3, F32, {"compute": BF16}, sync.dense(), "bf16", "bf16"),
    "as autodiff makes them": (2, BF16, {}, None, "bf16", None),
    "compute": (2, F32, {"compute": BF16}, None, "bf16", None),
    "compute at stage 3": (3, F32, {"compute": BF16}, None, "bf16", "bf16"),
}


@pytest.mark.parametrize("case", ON_THE_WIRE)
def test_dtypes_on_the_wire(case):
    stage, dtype, precision, by, reduced, gathered = ON_THE_WIRE[case]
    zero = zero_of(stage, precision=shd.Precision(**precision), sync=by)
    text = lower(zero, optax.adamw(1e-3), dtype).as_text()
    assert dtypes_of(text, "reduce_scatter") == {reduced}
    if gathered:
        assert dtypes_of(text, "all_gather") == {gathered}


def train(zero, tx, dtype, **options):
    make, loss_fn = model.make_state(tx, dtype), model.make_loss(zero)
    return model.run(zero, make, tx, loss_fn, model.batch, STEPS, **options)


def wide_alone(tx):
    """Float32 parameters on one device, all else in float64."""

    @jax.jit
    def step(state, batch):
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), state[0])
        updates, opt_state = tx.update(jax.grad(model.loss_fn)(wide, batch), *state[::-1])
        return optax.apply_updates(state[0], updates), opt_state

    state = jax.jit(model.make_state(tx, jnp.float32))()
    for i in range(STEPS):
        state = step(state, model.batch(i))
    return state


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("stage", "mesh"), [pytest.param(2, "flat", marks=pytest.mark.slow), (3, "replicas")]
)
def test_no_step_on_the_way_is_narrower_than_asked(stage, mesh):
    """Float32 parameters with float64 in all else: a cast too many would leave 1e-7, not 1e-15."""
    tx, double = optax_ext.master_weights(optax.adamw(1e-3), dtype=jnp.float64), jnp.float64
    precision = shd.Precision(compute=double, reduce=double, accumulate=double)
    spread = {"shard_state_over_replicas": mesh == "replicas"}
    zero = runs.zero_of(stage, mesh, precision=precision, **spread)
    state = train(zero, tx, jnp.float32, microbatches=2)
    model.assert_close(state, wide_alone(tx), 1e-12)
    for param, master in zip(*map(jax.tree.leaves, (state[0], state[1].master)), strict=True):
        np.testing.assert_array_equal(param, master.astype(param.dtype))  # bit for bit


def test_bad_dtypes():
    with pytest.raises(ValueError, match="compute must be a floating dtype, got int8"):
        zero_of(2, precision=shd.Precision(compute=jnp.int8))
    with pytest.raises(ValueError, match="gather must be int8, int4 or None, got int16"):
        zero_of(2, precision=shd.Precision(gather=jnp.int16))
    with pytest.raises(ValueError, match=r"gather=int8 is for stage 3, .* at stage 2 they are rep"):
        zero_of(2, precision=shd.Precision(gather=jnp.int8))


def coded(x, spec, num, bits):
    """In NumPy: what the codes of an array's shards stand for, of matrices of at least 512."""
    dims = [d for d, entry in enumerate(spec) if entry == "data"]
    if not dims or x.ndim < 2 or x.size // num < 512:
        return x
    shards = []
    for shard in np.split(x, num, dims[0]):
        flat = np.pad(shard.ravel(), (0, -shard.size % 512)).reshape(-1, 512)
        levels = 2 ** (bits - 1) - 1
        scale = np.abs(flat).max(1, keepdims=True).astype(np.float32) * np.float32(1 / levels)
        codes = np.round(flat / np.where(scale == 0, 1, scale)).astype(np.float32)
        shards.append((codes * scale).ravel()[: shard.size].reshape(shard.shape))
    return np.concatenate(shards, dims[0]).astype(x.dtype)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("dtype", "bits", "hybrid"), [slow((jnp.int8, 8, False)), (jnp.int4, 4, True)]
)
def test_the_loss_sees_codes_and_the_update_the_parameters(dtype, bits, hybrid):
    """Against one device that is given, in each step, the gradient at what codes stand for."""
    shape, names = ((2, 2), ("replica", "data")) if hybrid else ((2,), ("data",))
    options = {"replica_axis": "replica" if hybrid else None, "names": names}
    zero = model.zero_on(*shape, stage=3, precision=shd.Precision(gather=dtype), **options)
    tx = optax.adamw(1e-3)
    params, opt_state = jax.jit(model.make_state(tx, jnp.float64))()
    specs, _ = zero.specs((params, opt_state), tx=tx)

    @jax.jit
    def advance(params, opt_state, seen, batch):
        updates, opt_state = tx.update(jax.grad(model.loss_fn)(seen, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    changed = []
    for i in range(STEPS):
        seen = {k: coded(np.asarray(x), specs[k], 2, bits) for k, x in params.items()}
        changed += [k for k, x in seen.items() if np.any(x != np.asarray(params[k]))]
        params, opt_state = advance(params, opt_state, seen, model.batch(i))
    assert {"embed", "query", "mlp", "down"} <= set(changed)
    assert not {"scale", "prime", "gain"} & set(changed)
    model.assert_close(train(zero, tx, jnp.float64)[0], params, 1e-12)


@pytest.mark.parametrize(("dtype", "sent"), [(jnp.int8, "i8"), (jnp.int4, "ui8")])
def test_codes_are_what_is_gathered(dtype, sent):
    """Twice, each time a byte or half of one a parameter and a scale for 512 of them."""
    zero, tx = zero_of(3, precision=shd.Precision(gather=dtype)), optax.sgd(1e-3)
    lowered = lower(zero, tx, jnp.float32)
    assert dtypes_of(lowered.as_text(), "all_gather") == {sent}
    found = [c for c in collectives(lowered.compile()) if c.op == "all-gather"]
    count, size = 8 * WIDTH**2, {"i8": 1, "ui8": 0.5}[sent]
    gathers = len([c for c in found if c.dtype != "f32"]) / 2  # XLA:CPU computes no layer again
    want = gathers * 7 / 8 * count * (size + 4 / 512)
    assert sum(c.wire_bytes for c in found) == pytest.approx(want, rel=1e-6)
