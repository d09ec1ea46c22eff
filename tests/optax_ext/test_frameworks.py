"""Every wrapper of ours in the homes that other frameworks give it: the numbers of a plain pair."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as orbax
import pytest
from flax.serialization import from_bytes, to_bytes
from flax.training.train_state import TrainState

import optax_ext

from ..flax_nnx import needs_nnx, nnx
from ..tiers import tiers
from .traces import step_of

pytestmark = needs_nnx
STEPS, WIDTH = 5, 64
TXS = {
    "came": lambda: optax_ext.came(1e-3),
    "came8bit": lambda: optax_ext.came8bit(1e-3),
    "adafactor8bit": lambda: optax_ext.adafactor8bit(1e-3),
    "lamb8bit": lambda: optax_ext.lamb8bit(1e-3),
    "4 bits": lambda: optax_ext.low_precision_state(optax.adamw(1e-3), 4),
    "16 bits": lambda: optax_ext.low_precision_state(optax_ext.came(1e-3), 16),
    "compensated": lambda: optax_ext.low_precision_state(optax.adamw(1e-3), rounding="compensated"),
    "master": lambda: optax_ext.master_weights(optax_ext.came(1e-3)),
    "stochastic rounding": lambda: optax_ext.stochastic_rounding(optax.adamw(1e-3)),
}


def dtype_of(name):
    return jnp.bfloat16 if name in ("master", "stochastic rounding") else jnp.float32


def make(name):
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0), param_dtype=dtype_of(name))
    return model, nnx.Optimizer(model, TXS[name](), wrt=nnx.Param)


def loss(model, x):
    return jnp.mean((model(x).astype(jnp.float32) - 1) ** 2)


def as_function(name):
    """The loss of pure parameters, and these; paths, of which noise depends, are the same."""
    graph, params = nnx.split(make(name)[0])
    return (lambda params, x: loss(nnx.merge(graph, params), x)), nnx.as_pure(params)


BATCHES = np.random.default_rng(0).normal(size=(STEPS, 8, WIDTH)).astype(np.float32)


def of_a_pair(name):
    function, params = as_function(name)
    tx = TXS[name]()
    update = step_of(tx)
    step = jax.jit(lambda x, state, params: update(jax.grad(function)(params, x), state, params))
    state = tx.init(params)
    for x in BATCHES:
        params, state = step(x, state, params)
    return params


def assert_same(have, want):
    for a, b in zip(*map(jax.tree.leaves, (have, want)), strict=True):
        tolerance = 1e-5 if a.dtype == jnp.float32 else 2e-3  # another program rounds otherwise
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.linalg.norm(a - b) < tolerance * np.linalg.norm(b)


@pytest.mark.parametrize("name", tiers(TXS, ["came8bit", "4 bits", "compensated", "master"]))
def test_nnx(name, tmp_path):
    """With ``nnx.jit``, through ``nnx.split``, orbax and ``nnx.merge``; and without ``nnx.jit``."""

    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(loss)(model, x))

    model, optimizer = make(name)
    jitted = nnx.jit(step)
    for i, x in enumerate(BATCHES):
        jitted(model, optimizer, x)
        if i == 2:
            graph, state = nnx.split((model, optimizer))
            with orbax.StandardCheckpointer() as checkpointer:
                checkpointer.save(tmp_path / "state", state)
                checkpointer.wait_until_finished()
                empty = jax.tree.map(jnp.zeros_like, state)
                state = checkpointer.restore(tmp_path / "state", empty)
            model, optimizer = nnx.merge(graph, state)
    assert_same(nnx.state(model), of_a_pair(name))

    model, optimizer = make(name)
    for x in BATCHES[:2]:
        step(model, optimizer, x)  # eagerly: to rounding


@pytest.mark.parametrize("name", ["came8bit", "4 bits", "compensated"])
def test_a_train_state_of_flax_and_a_module_of_equinox(name):
    function, params = as_function(name)
    state = TrainState.create(apply_fn=None, params=params, tx=TXS[name]())

    class Model(eqx.Module):
        kernel: jax.Array
        bias: jax.Array

    @jax.jit
    def flax_step(state, x):
        return state.apply_gradients(grads=jax.grad(function)(state.params, x))

    model, tx = Model(**params), TXS[name]()
    opt_state = tx.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def equinox_step(model, opt_state, x):
        grads = eqx.filter_grad(lambda m: function({"kernel": m.kernel, "bias": m.bias}, x))(model)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state

    for x in BATCHES:
        state, (model, opt_state) = flax_step(state, x), equinox_step(model, opt_state, x)
    want = of_a_pair(name)
    assert_same(state.params, want)
    assert_same({"kernel": model.kernel, "bias": model.bias}, want)


@pytest.mark.parametrize("name", TXS)
def test_bytes_of_flax(name):
    params = {"w": jnp.ones((WIDTH, 2 * WIDTH), dtype_of(name))}
    fresh = TrainState.create(apply_fn=None, params=params, tx=TXS[name]())
    state = fresh.apply_gradients(grads=params)
    have = from_bytes(fresh, to_bytes(state))
    assert jax.tree.structure(have) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, have, state)
    is_stored = lambda x: isinstance(x, optax_ext.Quantized)  # noqa: E731
    for stored in filter(is_stored, jax.tree.leaves(fresh.opt_state, is_leaf=is_stored)):
        with pytest.raises(ValueError, match=r"then call optax_ext\.convert_state"):
            from_bytes([stored], to_bytes([params["w"]]))
