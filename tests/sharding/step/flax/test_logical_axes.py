"""Logical axis names of Flax linen: rules map them to the mesh, as ``lm1b`` has it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_ext
import sharding as shd

from ... import model

pytestmark = pytest.mark.usefixtures("x64")
STEPS = 4
RULES = (
    ("batch", ["data"]),  # as rules in YAML are
    ("embed", None),
    ("mlp", "tensor"),
    ("heads", ("tensor",)),
)
TX = optax_ext.came(1e-3, weight_decay=0.1)


def kernel(*names):
    return nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, use_bias=False, param_dtype=jnp.float64)
        h = dense(32, kernel_init=kernel("embed", "mlp"))(x)
        h = nn.with_logical_constraint(jnp.tanh(h), ("batch", "mlp"))
        return x + dense(16, kernel_init=kernel("mlp", "embed"))(h)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = Block()(x)
        # "unknown" has no rule: the dim is not sharded by the model.
        return nn.Dense(8, kernel_init=kernel("embed", "unknown"), param_dtype=jnp.float64)(x)


MODEL = Model()


def make():
    params = MODEL.init(jax.random.key(0), jnp.ones((2, 16)))["params"]
    return TrainState.create(apply_fn=MODEL.apply, params=params, tx=TX)


def loss_fn(params, batch):
    return jnp.mean((MODEL.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)


def batch(step):
    rng = np.random.default_rng(step)
    scale = np.repeat(10.0 ** rng.uniform(-1, 0.5, 8), 2)[:, None]
    return {"x": rng.normal(size=(16, 16)) * scale, "y": rng.normal(size=(16, 8))}


@functools.cache
def reference():
    @jax.jit
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    state, losses = jax.jit(make)(), []
    for i in range(STEPS):
        state, loss = step(state, batch(i))
        losses.append(float(loss))
    return (state.params, state.opt_state), losses


def mesh_of(kind):
    return jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(kind,) * 2)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("stage", [2, 3])
def test_rules_in_context(stage, kind):
    zero = shd.Zero(mesh_of(kind), stage=stage, min_shard_size=0, gathered_blocks="Block")
    with nn.logical_axis_rules(RULES):
        state = zero.init(make)
        step = zero.train_step(loss_fn)
        losses = []
        for i in range(STEPS):
            state, metrics = step(state, zero.put(batch(i)))
            losses.append(float(metrics["loss"]))
    found = state.params["Block_0"]["Dense_0"]["kernel"].value.sharding.spec
    assert found == (P("data", "tensor") if stage == 3 else P(None, "tensor"))
    expected, expected_losses = reference()
    distance, leaf = model.worst_leaf((state.params, state.opt_state), expected)
    assert distance < 1e-12, leaf
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-12)
    # Rules are for making the state: afterwards the arrays themselves say where they are.
    state, _ = zero.train_step(loss_fn)(state, zero.put(batch(STEPS)))


def test_rules_of_the_metadata_itself():
    class Own(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_logical_partitioning(
                nn.initializers.lecun_normal(), ("embed", "mlp"), rules=RULES
            )
            return nn.Dense(32, kernel_init=init)(x)

    abstract = jax.eval_shape(lambda: Own().init(jax.random.key(0), jnp.ones((1, 16))))["params"]
    state = abstract, jax.eval_shape(optax.sgd(0.1).init, abstract)
    specs = shd.Zero(mesh_of(AxisType.Auto), stage=2).specs(state, tx=optax.sgd(0.1))
    assert specs[0]["Dense_0"]["kernel"].value == P(None, "tensor")
