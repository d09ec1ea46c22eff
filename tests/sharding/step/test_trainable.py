"""Parameters without a gradient: frozen, integers, none; gradients that are not finite."""

import chex
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
WIDTH, RANK = 64, 8


def zero_of(stage, **kwargs):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    return shd.Zero(mesh, stage=stage, min_shard_size=0, **kwargs)


def lora_params(dtype):
    """A frozen matrix with a trained low-rank addition, a table of integers, and a slot unused."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(0, shape[0] ** -0.5, shape), dtype)

    return {
        "base": draw(WIDTH, 2 * WIDTH),
        "down": draw(WIDTH, RANK),
        "up": draw(RANK, 2 * WIDTH),
        "head": draw(2 * WIDTH, WIDTH),
        "order": jnp.arange(WIDTH)[::-1].reshape(8, -1),
        "bias": None,
    }


TRAINED = {"base": False, "down": True, "up": True, "head": True, "order": False, "bias": None}


def make_loss(zero):
    def layer(params, x):
        return jnp.tanh(x @ params["base"] + x @ params["down"] @ params["up"])

    gathered = zero.gathered(layer)

    def loss_fn(params, x):
        y = gathered({k: params[k] for k in ("base", "down", "up")}, x) @ params["head"]
        return jnp.mean((y[:, params["order"].reshape(-1)] - x) ** 2)

    return loss_fn


def batch(step):
    rng = np.random.default_rng(step)
    return rng.normal(size=(16, WIDTH)) * np.repeat(10.0 ** rng.uniform(-1, 1, 8), 2)[:, None]


def optimizer():
    return optax.masked(
        optax.chain(optax.clip_by_global_norm(0.5), optax_ext.came(1e-3, weight_decay=0.1)), TRAINED
    )


def train_alone(params):
    tx = optimizer()
    loss_fn = make_loss(zero_of(0))
    trained = {k: params[k] for k in params if TRAINED[k]}

    @jax.jit
    def step(params, opt_state, x):
        grads = jax.grad(lambda some: loss_fn(params | some, x))({k: params[k] for k in trained})
        grads = jax.tree.map(jnp.zeros_like, params) | grads
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = tx.init(params)
    for i in range(STEPS):
        params, opt_state = step(params, opt_state, batch(i))
    return params, opt_state


@pytest.mark.slow(keep=2)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_lora(stage):
    tx, zero = optimizer(), zero_of(stage)

    def make_state():
        params = lora_params(jnp.float64)
        return params, tx.init(params)

    state = zero.init(make_state, tx=tx)
    # The frozen matrix has no state.
    assert all(x.shape != (WIDTH, 2 * WIDTH) for x in jax.tree.leaves(state[1]))
    start = jax.device_get(state[0])
    step = zero.train_step(make_loss(zero), tx=tx, trainable=TRAINED)
    for i in range(STEPS):
        state, _ = step(state, zero.put(batch(i)))
    distance, leaf = model.worst_leaf(state, train_alone(lora_params(jnp.float64)))
    assert distance < 1e-12, leaf
    for name in ("base", "order"):
        np.testing.assert_array_equal(jax.device_get(state[0][name]), start[name])
    assert np.linalg.norm(jax.device_get(state[0]["up"]) - start["up"]) > 1e-4


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_frozen_is_not_reduced_but_gathered(stage):
    tx, zero = optimizer(), zero_of(stage)

    def make_state():
        params = lora_params(jnp.float32)
        return params, tx.init(params)

    step = zero.train_step(make_loss(zero), tx=tx, trainable=TRAINED)
    state = jax.eval_shape(make_state)
    program = step.lower(state, jax.ShapeDtypeStruct((16, WIDTH), jnp.float32)).compile()
    sums, gathers = (
        sum(c.elements for c in collectives(program) if c.op == op)
        for op in ("reduce-scatter", "all-gather")
    )
    trained = 3 * WIDTH * RANK + 2 * WIDTH * WIDTH
    assert sums == trained
    if stage < 3:
        assert gathers == trained  # the frozen matrix never left
    else:
        assert gathers >= trained + 2 * WIDTH * WIDTH + WIDTH  # the integers, too


def test_a_mask_by_function_and_by_prefix_is_the_same():
    tx, zero = optax.adamw(1e-2), zero_of(2)

    def make_state():
        params = {"a": {"w": jnp.ones((8, 8))}, "b": jnp.ones((8, 8))}
        return params, tx.init(params)

    def loss_fn(params, x):
        return jnp.mean((x @ params["a"]["w"] @ params["b"]) ** 2)

    states = []
    for trainable in ({"a": False, "b": True}, lambda p: {"a": {"w": False}, "b": True}):
        state = zero.init(make_state, tx=tx)
        step = zero.train_step(loss_fn, tx=tx, trainable=trainable)
        state, _ = step(state, zero.put(np.ones((8, 8), np.float32)))
        np.testing.assert_array_equal(jax.device_get(state[0]["a"]["w"]), np.ones((8, 8)))
        states.append(jax.device_get(state))
    assert np.any(states[0][0]["b"] != 1)
    chex.assert_trees_all_equal(*states)


def test_a_mask_that_does_not_match():
    zero = zero_of(2)
    grad = zero.value_and_grad(lambda p, x: jnp.sum(p["w"]), trainable={"v": True})
    with pytest.raises(ValueError, match="trainable does not match the parameters"):
        grad({"w": jnp.ones(8)}, np.ones(8))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_one_device_not_finite_and_all_skip_the_step(stage):
    tx = optax.apply_if_finite(optax.adamw(1e-2), 3)
    zero = zero_of(stage)

    def make_state():
        params = {"w": jnp.ones((WIDTH, WIDTH))}
        return params, tx.init(params)

    block = zero.gathered(lambda p, x: x @ p["w"])
    step = zero.train_step(lambda p, x: jnp.mean(block(p, x) ** 2), tx=tx)
    state = zero.init(make_state, tx=tx)
    x = np.ones((16, WIDTH), np.float32)
    x[3, 5] = np.nan  # of the second device alone
    state, _ = step(state, zero.put(x))
    np.testing.assert_array_equal(jax.device_get(state[0]["w"]), np.ones((WIDTH, WIDTH)))
    counts = [shard.data for shard in state[1].notfinite_count.addressable_shards]
    assert [int(c) for c in counts] == [1] * 8
    state, _ = step(state, zero.put(np.ones((16, WIDTH), np.float32)))
    assert np.all(jax.device_get(state[0]["w"]) < 1)
    assert int(state[1].notfinite_count) == 0
