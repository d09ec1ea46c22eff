"""Dtypes of a step: what is computed, sent and stored in which, and master weights."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import optax_ext
import sharding as shd
from sharding.plan.program._wire import collectives

from .. import model

STEPS = 5
WIDTH = 256


def zero_of(stage, **kwargs):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    return shd.Zero(mesh, stage=stage, **kwargs)


def make_state(tx, dtype):
    def make():
        params = {
            "in": jnp.ones((WIDTH, 4 * WIDTH), dtype),
            "out": jnp.ones((4 * WIDTH, WIDTH), dtype),
        }
        return params, tx.init(params)

    return make


def make_loss(zero):
    block = zero.gathered(lambda p, x: jnp.tanh(x.astype(p["in"].dtype) @ p["in"]) @ p["out"])
    return lambda params, x: jnp.mean(block(params, x) ** 2)


def lower(zero, tx, dtype, **kwargs):
    step = zero.train_step(make_loss(zero), tx=tx, **kwargs)
    state = zero.abstract_state(make_state(tx, dtype), tx=tx)
    return step.lower(state, jax.ShapeDtypeStruct((32, WIDTH), jnp.float32))


def dtypes_of(text, op):
    """Dtypes of the large collectives as lowered: XLA:CPU widens them when it compiles."""
    found = re.findall(rf"stablehlo\.{op}.*?-> tensor<([0-9x]+)x([a-z0-9]+)>", text, re.DOTALL)
    return {dtype for dims, dtype in found if math.prod(map(int, dims.split("x"))) > 1000}


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(("name", "per_parameter"), [("adamw", 12), ("came", 8), ("adafactor", 4)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bytes_of_optimizer_and_master_weights(stage, name, per_parameter):
    """ZeRO's K: 2 bytes a parameter for the parameters, K / n for optimizer and master weights."""
    tx = optax_ext.master_weights(
        {
            "adamw": optax.adamw(1e-3),
            "came": optax_ext.came(1e-3),
            "adafactor": optax_ext.adafactor(1e-3, factoring=optax_ext.last_two_dims()),
        }[name]
    )
    program = lower(zero_of(stage), tx, jnp.bfloat16).compile()
    count = 8 * WIDTH**2
    params = 2 * count / (8 if stage == 3 else 1)
    batch = 32 / 8 * WIDTH * 4
    expected = params + per_parameter * count / 8 + batch
    assert program.memory_analysis().argument_size_in_bytes == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_dtypes_on_the_wire(stage):
    tx = optax_ext.master_weights(optax.adamw(1e-3))
    precision = shd.Precision(reduce=jnp.float32)
    lowered = lower(zero_of(stage, precision=precision), tx, jnp.bfloat16)
    assert dtypes_of(lowered.as_text(), "reduce_scatter") == {"f32"}
    if stage == 3:  # the gather of the other stages is the partitioner's: in compiled programs only
        assert dtypes_of(lowered.as_text(), "all_gather") == {"bf16"}
    plain = lower(zero_of(stage), tx, jnp.bfloat16)
    assert dtypes_of(plain.as_text(), "reduce_scatter") == {"bf16"}


def test_float32_parameters_are_gathered_in_the_compute_dtype():
    precision = shd.Precision(compute=jnp.bfloat16)
    lowered = lower(zero_of(3, precision=precision), optax.adamw(1e-3), jnp.float32)
    assert dtypes_of(lowered.as_text(), "all_gather") == {"bf16"}
    assert dtypes_of(lowered.as_text(), "reduce_scatter") == {"bf16"}


def train(zero, tx, dtype, **kwargs):
    state = zero.init(model.make_state(tx, dtype), tx=tx)
    step = zero.train_step(model.make_loss(zero), tx=tx, **kwargs)
    for i in range(STEPS):
        state, _ = step(state, zero.put(model.batch(i)))
    return state


@functools.cache
def wide_alone(tx_name):
    """Float32 parameters on one device, all else in float64; and the transformation."""
    tx = optax_ext.master_weights(model.OPTIMIZERS[tx_name](), dtype=jnp.float64)
    state = jax.jit(model.make_state(tx, jnp.float32))()

    @jax.jit
    def step(state, batch):
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), state[0])
        grads = jax.grad(model.loss_fn)(wide, batch)
        updates, opt_state = tx.update(grads, state[1], state[0])
        return optax.apply_updates(state[0], updates), opt_state

    for i in range(STEPS):
        state = step(state, model.batch(i))
    return tx, state


@pytest.mark.slow(keep=2)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("stage", "microbatches", "hybrid"),
    [(0, 1, False), (1, 2, False), (2, 2, False), (3, 1, False), (3, 2, True)],
)
def test_no_step_on_the_way_is_narrower_than_asked(stage, microbatches, hybrid):
    """Float32 parameters with float64 in all else: a cast too many would leave 1e-7, not 1e-15."""
    tx, state = wide_alone("came")
    double = jnp.float64
    mesh = jax.make_mesh((2, 4), ("replica", "data"), axis_types=(AxisType.Auto,) * 2)
    precision = shd.Precision(compute=double, reduce=double, accumulate=double)
    kwargs = {"stage": stage, "precision": precision, "min_shard_size": 0}
    zero = (
        shd.Zero(mesh, replica_axis="replica", shard_state_over_replicas=True, **kwargs)
        if hybrid
        else zero_of(**kwargs)
    )
    distance, leaf = model.worst_leaf(
        train(zero, tx, jnp.float32, microbatches=microbatches), state
    )
    assert distance < 1e-12, leaf


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_are_their_master_weights_rounded(stage):
    tx = optax_ext.master_weights(model.OPTIMIZERS["came"]())
    precision = shd.Precision(reduce=jnp.float32, accumulate=jnp.float32)
    params, opt_state = train(
        zero_of(stage, precision=precision, min_shard_size=0), tx, jnp.bfloat16
    )
    for name, x in jax.device_get(params).items():
        master = np.asarray(jax.device_get(opt_state.master[name]))
        np.testing.assert_array_equal(x, master.astype(x.dtype))
        assert master.dtype == np.float32


@pytest.mark.parametrize("field", ["compute", "reduce", "accumulate"])
def test_a_dtype_that_is_not_floating(field):
    with pytest.raises(ValueError, match=f"Precision.{field} must be a floating dtype, got int8"):
        shd.Precision(**{field: jnp.int8})


# --- Parameters gathered in codes -----------------------------------------------------------------


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


@pytest.mark.slow(keep=2)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize(("dtype", "bits"), [(jnp.int8, 8), (jnp.int4, 4)])
def test_the_loss_sees_codes_and_the_update_the_parameters(dtype, bits, hybrid):
    """Against one device that is given, in each step, the gradient at what codes stand for."""
    mesh = jax.make_mesh(
        (2, 2), ("replica", "data"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    if not hybrid:
        mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    replicas = "replica" if hybrid else None
    precision = shd.Precision(gather=dtype)
    zero = shd.Zero(mesh, 3, replica_axis=replicas, precision=precision, min_shard_size=0)
    tx = optax.adamw(1e-3)
    params, opt_state = model.make_state(tx, jnp.float64)()
    specs, _ = zero.specs((params, opt_state), tx=tx)
    grad, update = jax.jit(jax.grad(model.loss_fn)), jax.jit(tx.update)
    changed = []
    for i in range(STEPS):
        seen = {k: coded(np.asarray(x), specs[k], 2, bits) for k, x in params.items()}
        changed += [k for k, x in seen.items() if np.any(x != np.asarray(params[k]))]
        updates, opt_state = update(grad(seen, model.batch(i)), opt_state, params)
        params = optax.apply_updates(params, updates)
    assert {"embed", "query", "mlp", "down"} <= set(changed)
    assert not {"scale", "prime", "gain"} & set(changed)
    distance, leaf = model.worst_leaf(train(zero, tx, jnp.float64)[0], params)
    assert distance < 1e-12, leaf


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


def test_what_is_no_float_is_gathered_as_it_is():
    zero, tx = zero_of(3, precision=shd.Precision(gather=jnp.int8)), optax.sgd(1.0)
    params = {"ids": jnp.arange(4096).reshape(64, 64), "w": jnp.ones((64, 64))}

    def loss(params, x):
        off = jnp.abs(zero.gather(params["ids"]) - jnp.arange(4096).reshape(64, 64)).max()
        return jnp.mean(x @ zero.gather(params["w"])) + off

    state = zero.init(lambda: (params, tx.init(params)), tx=tx)
    _, metrics = zero.train_step(loss, tx=tx)(state, zero.put(jnp.zeros((8, 64))))
    assert metrics["loss"] == 0


def test_codes_have_no_meaning_below_stage_3():
    with pytest.raises(ValueError, match=r"gather=int8 is for stage 3, .* at stage 2 they are rep"):
        zero_of(2, precision=shd.Precision(gather=jnp.int8))
    with pytest.raises(ValueError, match="gather must be int8, int4 or None, got int16"):
        shd.Precision(gather=jnp.int16)
