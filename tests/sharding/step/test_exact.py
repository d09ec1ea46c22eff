"""A sharded step equals the single-device step, over steps, stages and mesh shapes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sharding as shd
from sharding.placement._layout import Layout

from .. import model

STEPS = 10
# Of parameters and losses, and of the optimizer's state. Measured in float32: parameters differ by
# 2e-7 at most, moments by 5e-6. Moments are averages of gradients, whose own rounding is as large:
# on one device the moments of float32 are up to 8e-6 from those of float64.
TOLERANCE = {jnp.float32: (1e-6, 1e-5), jnp.float64: (1e-12, 1e-12)}


@functools.cache
def reference(name, dtype):
    """The single-device run; the caller has set the precision."""
    return model.train_alone(model.OPTIMIZERS[name](), dtype, STEPS)


def train(zero, tx, dtype, **kwargs):
    state = zero.init(model.make_state(tx, dtype), tx=tx)
    placed = zero.shardings(state, tx=tx)
    step = zero.train_step(model.make_loss(zero), tx=tx, **kwargs)
    losses = []
    for i in range(STEPS):
        state, metrics = step(state, zero.put(model.batch(i)))
        losses.append(float(metrics["loss"]))
    same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), state, placed)
    assert all(jax.tree.leaves(same))
    return state, losses


def mesh_of(n, kind=AxisType.Auto):
    return jax.make_mesh((n,), ("data",), axis_types=(kind,), devices=jax.devices()[:n])


def check(name, zero, dtype, **kwargs):
    expected, expected_losses = reference(name, dtype)
    state, losses = train(zero, model.OPTIMIZERS[name](), dtype, **kwargs)
    for have, want, tolerance in zip(state, expected, TOLERANCE[dtype], strict=True):
        distance, leaf = model.worst_leaf(have, want)
        assert distance < tolerance, leaf
    np.testing.assert_allclose(losses, expected_losses, rtol=TOLERANCE[dtype][0])


@pytest.mark.slow(keep=4)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", model.OPTIMIZERS)
def test_float64(name, stage):
    check(name, shd.Zero(mesh_of(8), stage=stage, min_shard_size=0), jnp.float64)


@pytest.mark.slow(keep=2)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("stage", "devices"), [(2, 1), (2, 4), (3, 2)])
def test_fewer_devices(stage, devices):
    check("came", shd.Zero(mesh_of(devices), stage=stage, min_shard_size=0), jnp.float64)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    ("name", "stage"), [("adamw", 2), ("adafactor", 2), ("came", 2), ("came", 3), ("lamb", 3)]
)
def test_float32(name, stage):
    check(name, shd.Zero(mesh_of(8), stage=stage, min_shard_size=0), jnp.float32)


@pytest.mark.slow(keep=3)
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
        (3, 2, AxisType.Auto),
        (3, 2, AxisType.Explicit),
    ],
)
def test_stages_and_microbatches(stage, microbatches, kind):
    zero = shd.Zero(mesh_of(8, kind), stage=stage, min_shard_size=0)
    check("came", zero, jnp.float64, microbatches=microbatches)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["came", "muon"])
def test_gathered_parameters_kept_for_the_backward_pass(name):
    zero = shd.Zero(mesh_of(8), stage=3, min_shard_size=0, reshard_after_forward=False)
    check(name, zero, jnp.float64)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("stage", [2, 3])
def test_two_data_axes(stage):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    check("adafactor", shd.Zero(mesh, stage=stage, axis=("a", "b"), min_shard_size=0), jnp.float64)


@pytest.mark.slow(keep=1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("stage", [2, 3])
def test_scatter_and_gather_one_axis_after_the_other(stage, monkeypatch):
    """As on TPUs, whose platform the mesh pretends to be of."""
    monkeypatch.setattr(Layout, "platform", "tpu")
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=(AxisType.Auto,) * 3)
    zero = shd.Zero(mesh, stage=stage, axis=("x", "y", "z"), min_shard_size=0)
    check("adafactor", zero, jnp.float64)


@pytest.mark.slow(keep=2)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "stage", "shape", "microbatches", "kind", "everywhere"),
    [
        ("came", 1, (2, 4), 2, AxisType.Auto, True),
        ("lamb", 2, (4, 2), 1, AxisType.Auto, False),
        ("lamb", 2, (4, 2), 1, AxisType.Auto, True),
        ("adafactor", 3, (2, 4), 2, AxisType.Auto, False),
        ("came", 3, (2, 4), 1, AxisType.Explicit, False),
        ("came", 3, (2, 4), 1, AxisType.Explicit, True),
    ],
)
def test_hybrid(name, stage, shape, microbatches, kind, everywhere):
    """Shards within, replicas across; the optimizer state over both, or as the parameters."""
    mesh = jax.make_mesh(shape, ("replica", "data"), axis_types=(kind,) * 2)
    zero = shd.Zero(
        mesh,
        stage=stage,
        replica_axis="replica",
        shard_state_over_replicas=everywhere,
        min_shard_size=0,
    )
    check(name, zero, jnp.float64, microbatches=microbatches)


@pytest.mark.usefixtures("x64")
def test_hybrid_stage_0():
    mesh = jax.make_mesh((2, 4), ("replica", "data"), axis_types=(AxisType.Auto,) * 2)
    check("adamw", shd.Zero(mesh, stage=0, replica_axis="replica"), jnp.float64)


@pytest.mark.slow(keep=1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_of_ones_own(stage):
    """``value_and_grad`` and ``apply_gradients`` under jit are the same step."""
    tx = model.OPTIMIZERS["came"]()
    zero = shd.Zero(mesh_of(8), stage=stage, min_shard_size=0)
    state = zero.init(model.make_state(tx, jnp.float64), tx=tx)
    specs = zero.specs(state, tx=tx)[0]  # inside jit arrays have no specs

    @jax.jit
    def step(state, batch):
        _, grads = zero.value_and_grad(model.make_loss(zero), param_specs=specs)(state[0], batch)
        return zero.apply_gradients(state, grads, tx=tx, param_specs=specs)

    for i in range(STEPS):
        state = step(state, zero.put(model.batch(i)))
    assert model.worst_leaf(state, reference("came", jnp.float64)[0])[0] < 1e-12


@pytest.mark.slow(keep=1)
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
