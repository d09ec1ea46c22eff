"""Every wrapper of ours in a plain ``nnx.Optimizer``: the numbers of a plain pair."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext

from ..flax_nnx import needs_nnx, nnx

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


def loss(model, x):
    return jnp.mean((model(x).astype(jnp.float32) - 1) ** 2)


@pytest.mark.parametrize("name", TXS)
def test_five_updates_equal_those_of_a_pair(name):
    """With ``nnx.jit``, through ``nnx.split`` and ``nnx.merge``; and step by step without."""
    dtype = jnp.bfloat16 if name in ("master", "stochastic rounding") else jnp.float32
    batches = np.random.default_rng(0).normal(size=(STEPS, 8, WIDTH)).astype(np.float32)

    def make():
        model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0), param_dtype=dtype)
        return model, nnx.Optimizer(model, TXS[name](), wrt=nnx.Param)

    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(loss)(model, x))

    model, optimizer = make()
    jitted = nnx.jit(step)
    for i, x in enumerate(batches):
        jitted(model, optimizer, x)
        if i == 2:
            model, optimizer = nnx.merge(*nnx.split((model, optimizer)))

    graph, params = nnx.split(make()[0])
    params = nnx.as_pure(params)  # the same paths, of which the noise depends
    tx = TXS[name]()
    state = tx.init(params)

    @jax.jit
    def pair(params, state, x):
        grads = jax.grad(lambda p: loss(nnx.merge(graph, p), x))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for x in batches:
        params, state = pair(params, state, x)
    for a, b in zip(*map(jax.tree.leaves, (nnx.state(model), params)), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        tolerance = 1e-5 if dtype == jnp.float32 else 2e-3  # another program rounds otherwise
        assert np.linalg.norm(a - b) < tolerance * np.linalg.norm(b)

    model, optimizer = make()
    for x in batches[:2]:
        step(model, optimizer, x)  # eagerly: to rounding
