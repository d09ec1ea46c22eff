"""Any shapes on any mesh: a few steps equal those on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

import optax_ext
import sharding as shd

from .. import model

TX = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax_ext.came(1e-3, weight_decay=0.1, factoring=optax_ext.two_largest_dims(2)),
)
MESHES = [(1, 1), (2, 1), (8, 1), (1, 2), (2, 2), (4, 2), (2, 4), (1, 8)]
STEPS = 3


@st.composite
def zeros(draw):
    """A stage on a mesh of shards and replicas."""
    stage = draw(st.integers(0, 3))
    shape = draw(st.sampled_from(MESHES))
    kind = draw(st.sampled_from([AxisType.Auto, AxisType.Explicit]))
    count = shape[0] * shape[1]
    mesh = jax.make_mesh(
        shape, ("data", "replica"), axis_types=(kind,) * 2, devices=jax.devices()[:count]
    )
    return shd.Zero(
        mesh,
        stage=stage,
        replica_axis="replica",
        shard_state_over_replicas=stage > 0 and draw(st.booleans()),
        min_shard_size=draw(st.sampled_from([0, 40])),
        reshard_after_forward=draw(st.booleans()),
    )


@pytest.mark.usefixtures("x64")
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    zero=zeros(),
    width=st.sampled_from([1, 2, 6, 8, 13, 16]),
    hidden=st.sampled_from([1, 4, 7, 8, 24]),
    layers=st.integers(1, 3),
    microbatches=st.sampled_from([1, 2]),
)
def test_any_shape_on_any_mesh(zero, width, hidden, layers, microbatches):
    rng = np.random.default_rng(width * 100 + hidden)
    shapes = {
        "blocks": [{"in": (width, hidden), "b": (hidden,), "out": (hidden, width)}] * layers,
        "head": (width, 3, hidden),
    }
    params = jax.tree.map(
        lambda s: jnp.asarray(rng.normal(0, 0.5, s)), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )

    def make():
        # A copy: init may donate what it is given.
        own = jax.tree.map(jnp.copy, params)
        return own, TX.init(own)

    def make_loss(wrap):
        def block(p, x):
            return x + jnp.tanh(x @ p["in"] + p["b"][None]) @ p["out"]

        def loss_fn(params, x):
            y = x
            for layer in params["blocks"]:
                y = wrap(block)(layer, y)
            y = jnp.einsum("bw,wch->bch", y, params["head"])
            return jnp.mean(jnp.sum(jnp.cos(y) * y, axis=(1, 2)) * jnp.exp(x[:, 0]))

        return loss_fn

    loss_alone = make_loss(lambda fn: fn)

    @jax.jit
    def step_alone(state, x):
        grads = jax.grad(loss_alone)(state[0], x)
        updates, opt_state = TX.update(grads, state[1], state[0])
        return optax.apply_updates(state[0], updates), opt_state

    alone, state = make(), zero.init(make, tx=TX)
    step = zero.train_step(make_loss(zero.gathered), tx=TX, microbatches=microbatches)
    for i in range(STEPS):
        x = np.random.default_rng(i).normal(size=(16, width))
        alone = step_alone(alone, x)
        state, _ = step(state, zero.put(x))
    distance, leaf = model.worst_leaf(state, alone)
    assert distance < 1e-11, leaf
