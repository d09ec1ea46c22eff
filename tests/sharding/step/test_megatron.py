"""ZeRO beside tensor parallelism: attention sharded by heads, MLPs by hidden features."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _transformer import Config, apply_block, init, make_loss
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_ext
import sharding as shd
from sharding.plan.program._wire import collectives

from .. import model

STEPS = 5
CONFIG = Config(layers=2, width=32, heads=2, vocabulary=48)


def specs(config):
    block = {
        "attention_norm": P(),
        "qkv": P(None, None, "model"),
        "out": P("model"),
        "mlp_norm": P(),
        "up": P(None, "model"),
        "down": P("model"),
    }
    blocks = (
        {name: P(None, *spec) for name, spec in block.items()}
        if config.scan
        else [block] * config.layers
    )
    return {"embed": P("model"), "blocks": blocks, "norm": P()}


def make_state(tx, config=CONFIG, dtype=jnp.float64):
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: init(config, dtype))

    def draw(path, x):
        mean = 1.0 if "norm" in jax.tree_util.keystr(path) else 0.0
        return jnp.asarray(rng.normal(mean, 0.1, x.shape), dtype)

    def make():
        params = jax.tree_util.tree_map_with_path(draw, shapes)
        return params, tx.init(params)

    return make


def batch(step):
    return np.random.default_rng(step).integers(0, CONFIG.vocabulary, (8, 7))


def optimizer():
    return optax.chain(optax.clip_by_global_norm(0.5), optax_ext.came(1e-3))


@functools.cache
def reference():
    tx, loss_fn = optimizer(), make_loss()
    params, opt_state = make_state(tx)()

    @jax.jit
    def step(params, opt_state, tokens):
        grads = jax.grad(loss_fn)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for i in range(STEPS):
        params, opt_state = step(params, opt_state, batch(i))
    return params, opt_state


def mesh_of(kind, hybrid=False):
    if hybrid:
        return jax.make_mesh((2, 2, 2), ("replica", "data", "model"), axis_types=(kind,) * 3)
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)


@pytest.mark.slow(keep=2)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("stage", "kind", "hybrid"),
    [
        (1, AxisType.Auto, False),
        (2, AxisType.Explicit, False),
        (3, AxisType.Auto, False),
        (3, AxisType.Explicit, False),
        (3, AxisType.Auto, True),
    ],
)
def test_exact_and_the_users_specs_are_kept(stage, kind, hybrid):
    tx = optimizer()
    more = {"replica_axis": "replica", "shard_state_over_replicas": True} if hybrid else {}
    zero = shd.Zero(mesh_of(kind, hybrid), stage=stage, min_shard_size=0, **more)
    state = zero.init(make_state(tx), tx=tx, param_specs=specs(CONFIG))
    before = jax.tree.map(lambda x: x.sharding.spec, state)
    step = zero.train_step(make_loss(zero.gathered(apply_block)), tx=tx)
    for i in range(STEPS):
        state, _ = step(state, zero.put(batch(i)))
    distance, leaf = model.worst_leaf(state, reference())
    assert distance < 1e-12, leaf
    assert jax.tree.map(lambda x: x.sharding.spec, state) == before
    up = state[0]["blocks"]["up"].sharding.spec
    assert up == (P(None, "data", "model") if stage == 3 else P(None, None, "model"))
    # The first moment is sharded over both axes at every stage.
    assert state[1][1][0].mu["blocks"]["up"].addressable_shards[0].data.size == 2 * 32 * 128 // 8


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_is_gathered_over_the_model_axis(stage):
    """What the partitioner does when left alone: it gathers every gradient over ``model`` first."""
    config = Config(layers=2, width=128, heads=4, vocabulary=256, scan=False)
    tx = optax_ext.came(1e-3)
    zero = shd.Zero(mesh_of(AxisType.Auto), stage=stage, min_shard_size=0)
    state = zero.abstract_state(
        make_state(tx, config, jnp.float32), tx=tx, param_specs=specs(config)
    )
    step = zero.train_step(make_loss(zero.gathered(apply_block)), tx=tx)
    lowered = step.lower(state, jax.ShapeDtypeStruct((8, 9), jnp.int32))
    found = collectives(lowered.compile())
    matrix = 128 * 128 // 2
    large = [c for c in found if c.op == "all-gather" and c.elements >= matrix]
    assert large
    assert {c.group_size for c in large} == {4}
    scattered = sum(c.elements for c in found if c.op == "reduce-scatter")
    sharded = [x for x in jax.tree.leaves(state[0]) if x.ndim > 1]
    norms = 128 * 5  # their vectors are sharded, too, and replicated over the model axis
    assert scattered == sum(x.size for x in sharded) // 2 + norms
