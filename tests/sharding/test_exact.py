"""A sharded step equals the single-device step, over steps, stages and mesh shapes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sharding as shd

from . import model

STEPS = 10
TOLERANCE = {jnp.float32: 1e-5, jnp.float64: 1e-12}


@functools.cache
def reference(name, dtype):
    """The single-device run; the caller has set the precision."""
    return model.train_alone(model.OPTIMIZERS[name](), dtype, STEPS)


def train(zero, tx, dtype, **kwargs):
    state = zero.init(model.make_state(tx, dtype), tx=tx)
    step = zero.train_step(model.loss_fn, tx=tx, **kwargs)
    losses = []
    for i in range(STEPS):
        state, metrics = step(state, zero.put(model.batch(i)))
        losses.append(float(metrics["loss"]))
    return state, losses


def mesh_of(n, kind=AxisType.Auto):
    return jax.make_mesh((n,), ("data",), axis_types=(kind,), devices=jax.devices()[:n])


def check(name, zero, dtype, **kwargs):
    expected, expected_losses = reference(name, dtype)
    state, losses = train(zero, model.OPTIMIZERS[name](), dtype, **kwargs)
    distance, leaf = model.worst_leaf(state, expected)
    assert distance < TOLERANCE[dtype], leaf
    np.testing.assert_allclose(losses, expected_losses, rtol=TOLERANCE[dtype])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("name", model.OPTIMIZERS)
def test_stage_2_float64(name, devices):
    check(name, shd.Zero(mesh_of(devices), stage=2, min_shard_size=0), jnp.float64)


@pytest.mark.parametrize("name", model.OPTIMIZERS)
def test_stage_2_float32(name):
    check(name, shd.Zero(mesh_of(8), stage=2, min_shard_size=0), jnp.float32)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("stage", "microbatches", "kind"),
    [
        (0, 1, AxisType.Auto),
        (0, 2, AxisType.Auto),
        (1, 1, AxisType.Explicit),  # what jax.make_mesh gives by default
        (1, 2, AxisType.Auto),
        (2, 2, AxisType.Auto),
        (2, 2, AxisType.Explicit),
    ],
)
def test_stages_and_microbatches(stage, microbatches, kind):
    zero = shd.Zero(mesh_of(8, kind), stage=stage, min_shard_size=0)
    check("came", zero, jnp.float64, microbatches=microbatches)


@pytest.mark.usefixtures("x64")
def test_two_data_axes():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    check("adafactor", shd.Zero(mesh, stage=2, axis=("a", "b"), min_shard_size=0), jnp.float64)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_beside_tensor_parallelism(kind):
    tx = model.OPTIMIZERS["came"]()
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    zero = shd.Zero(mesh, stage=2, min_shard_size=0)
    specs = dict.fromkeys(model.init_params(jnp.float64), P())
    specs |= {"mlp": P(None, None, "model"), "mlp_bias": P(None, "model")}
    state = zero.init(model.make_state(tx, jnp.float64), tx=tx, param_specs=specs)
    assert state[0]["mlp"].sharding.spec == P(None, None, "model")
    step = zero.train_step(model.loss_fn, tx=tx)
    for i in range(STEPS):
        state, _ = step(state, zero.put(model.batch(i)))
    distance, leaf = model.worst_leaf(state, reference("came", jnp.float64)[0])
    assert distance < 1e-12, leaf
    assert state[0]["mlp"].sharding.spec == P(None, None, "model")


@pytest.mark.usefixtures("x64")
def test_a_step_of_ones_own():
    """``value_and_grad`` and ``apply_gradients`` under jit are the same step."""
    tx = model.OPTIMIZERS["came"]()
    zero = shd.Zero(mesh_of(8), stage=2, min_shard_size=0)
    state = zero.init(model.make_state(tx, jnp.float64), tx=tx)

    @jax.jit
    def step(state, batch):
        _, grads = zero.value_and_grad(model.loss_fn)(state[0], batch)
        return zero.apply_gradients(state, grads, tx=tx)

    for i in range(STEPS):
        state = step(state, zero.put(model.batch(i)))
    assert model.worst_leaf(state, reference("came", jnp.float64)[0])[0] < 1e-12


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["came", "adafactor"])
def test_statistics_of_each_shard_alone_would_be_seen(name):
    """What others shipped: every device factors its own block. The comparison must reject it."""
    tx = model.OPTIMIZERS[name]()
    mesh = mesh_of(8)
    params, _ = model.make_state(tx, jnp.float64)()
    specs = {k: P("data") if p.ndim and p.shape[0] % 8 == 0 else P() for k, p in params.items()}

    def update(grads, params):
        return tx.update(grads, tx.init(params), params)[0]

    grads = jax.jit(jax.grad(model.loss_fn))(params, model.batch(0))
    sharded = jax.shard_map(
        update, mesh=mesh, in_specs=(specs, specs), out_specs=specs, check_vma=False
    )
    distance, leaf = model.worst_leaf(
        jax.jit(sharded)(grads, params), jax.jit(update)(grads, params)
    )
    assert distance > 1e-2, leaf
