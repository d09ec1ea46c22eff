"""Parameters without a gradient: frozen, integers, none; gradients that are not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext

from .. import model

STEPS = 4
WIDTH, RANK = 64, 8
TRAINED = {"base": False, "down": True, "up": True, "head": True, "order": False, "bias": None}
TX = optax.masked(
    optax.chain(optax.clip_by_global_norm(0.5), optax_ext.came(1e-3, weight_decay=0.1)), TRAINED
)


def lora_params():
    """A frozen matrix with a trained low-rank addition, a table of integers, and a slot unused."""
    shapes = {"base": (WIDTH, 2 * WIDTH), "down": (WIDTH, RANK), "up": (RANK, 2 * WIDTH)}
    rng = np.random.default_rng(0)
    params = {k: rng.normal(0, s[0] ** -0.5, s) for k, s in shapes.items()}
    params["head"] = rng.normal(0, 0.1, (2 * WIDTH, WIDTH))
    return params | {"order": np.arange(WIDTH)[::-1].reshape(8, -1), "bias": None}


def make_loss(wrap):
    layer = wrap(lambda p, x: jnp.tanh(x @ p["base"] + x @ p["down"] @ p["up"]))

    def loss_fn(params, x):
        y = layer({k: params[k] for k in ("base", "down", "up")}, x) @ params["head"]
        return jnp.mean((y[:, params["order"].reshape(-1)] - x) ** 2)

    return loss_fn


def batch(step):
    rng = np.random.default_rng(step)
    return rng.normal(size=(16, WIDTH)) * np.repeat(10.0 ** rng.uniform(-1, 1, 8), 2)[:, None]


def train_alone():
    loss_fn = make_loss(lambda fn: fn)
    trained = [k for k, t in TRAINED.items() if t]

    @jax.jit
    def step(params, opt_state, x):
        grads = jax.grad(lambda some: loss_fn(params | some, x))({k: params[k] for k in trained})
        grads = jax.tree.map(jnp.zeros_like, params) | grads
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    state = jax.jit(model.make_of(lora_params, TX))()
    for i in range(STEPS):
        state = step(*state, batch(i))
    return state


@pytest.mark.parametrize("stage", [2, 3])
def test_lora(stage, x64):
    zero, make = model.zero_on(8, stage=stage), model.make_of(lora_params, TX)
    loss_fn, start = make_loss(zero.gathered), lora_params()
    state = model.run(zero, make, TX, loss_fn, batch, STEPS, trainable=TRAINED)
    model.assert_close(state, train_alone(), 1e-12)
    # The frozen matrix has no state.
    assert all(x.shape != (WIDTH, 2 * WIDTH) for x in jax.tree.leaves(state[1]))
    for name in ("base", "order"):
        np.testing.assert_array_equal(state[0][name], start[name])
    assert np.linalg.norm(state[0]["up"] - start["up"]) > 1e-4


def test_a_mask_by_function_and_by_prefix_is_the_same():
    zero, tx = model.zero_on(8, stage=0), optax.adamw(1e-2)
    make = model.make_of(lambda: {"a": {"w": np.ones((8, 8), "f")}, "b": np.ones((8, 8), "f")}, tx)

    def loss_fn(params, x):
        return jnp.mean((x @ params["a"]["w"] @ params["b"]) ** 2)

    def trained(mask):
        ones = lambda i: np.ones((8, 8), np.float32)  # noqa: E731
        return jax.device_get(model.run(zero, make, tx, loss_fn, ones, 1, trainable=mask))

    by_prefix, by_function = {"a": False, "b": True}, lambda p: {"a": {"w": False}, "b": True}
    states = trained(by_prefix), trained(by_function)
    for params, _ in states:
        np.testing.assert_array_equal(params["a"]["w"], np.ones((8, 8)))
    assert np.any(states[0][0]["b"] != 1)
    jax.tree.map(np.testing.assert_array_equal, *states)
    grad = zero.value_and_grad(lambda p, x: jnp.sum(p["w"]), trainable={"v": True})
    with pytest.raises(ValueError, match="trainable does not match the parameters"):
        grad({"w": jnp.ones(8)}, np.ones(8))


def test_one_device_not_finite_and_all_skip_the_step():
    tx, zero = optax.apply_if_finite(optax.adamw(1e-2), 3), model.zero_on(8, stage=3)
    block, x = zero.gathered(lambda p, x: x @ p["w"]), np.ones((16, 64), np.float32)
    x[3, 5] = np.nan  # of the second device alone
    make = model.make_of(lambda: {"w": np.ones((64, 64), "f")}, tx)
    state = model.run(zero, make, tx, lambda p, x: jnp.mean(block(p, x) ** 2), lambda _: x, 1)
    np.testing.assert_array_equal(state[0]["w"], np.ones((64, 64)))
    counts = [int(shard.data) for shard in state[1].notfinite_count.addressable_shards]
    assert counts == [1] * 8
