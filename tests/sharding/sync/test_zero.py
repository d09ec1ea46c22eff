"""``Zero(sync=...)``: dtypes, and errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sharding as shd
from sharding import sync

from .harness import mesh_of

SHAPES = {"w": (32, 64), "out": (64, 16), "b": (64,)}
SGD = optax.sgd(1e-2)
STATEFUL = sync.powersgd(4, min_compression=1.0)


def zero_of(method, stage, **options):
    return shd.Zero(mesh_of(data=8), stage, sync=method, min_shard_size=256, **options)


def params_of():
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(0.2 * rng.normal(size=s), jnp.float32) for k, s in SHAPES.items()}


def make_state():
    return params_of(), SGD.init(params_of())


def loss(params, x, gather=lambda tree: tree):
    x = jnp.tanh(x @ gather(params["w"]) + gather(params["b"])[None])
    return jnp.mean((x @ gather(params["out"]) - 1) ** 2)


@pytest.mark.parametrize(("reduce", "sent_in"), [(None, "bf16"), (jnp.float32, "f32")])
@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_are_sent_in_the_dtype_that_precision_says(stage, reduce, sent_in):
    precision = shd.Precision(compute=jnp.bfloat16, reduce=reduce)
    zero = zero_of(sync.dense(), stage, precision=precision)

    def mixed_loss(params, x):
        return loss(params, x.astype(jnp.bfloat16), zero.gather).astype(jnp.float32)

    traced = jax.make_jaxpr(zero.value_and_grad(mixed_loss))(params_of(), np.ones((32, 32), "f4"))
    found = set(re.findall(r":(\w+)\[[\d,]+\] = reduce_scatter\[", str(traced)))
    assert found == {sent_in}


def test_bad_input():
    with pytest.raises(ValueError, match=r"at stage 3 .* Use a stateless sync"):
        zero_of(STATEFUL, 3).init(make_state, tx=SGD)
    batch = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    state = zero_of(None, 1).abstract_state(make_state, tx=SGD)
    with pytest.raises(ValueError, match="has a state, which this train state lacks"):
        zero_of(STATEFUL, 1).train_step(loss, tx=SGD).lower(state, batch)
    with pytest.raises(ValueError, match="value_and_grad cannot return the state"):
        zero_of(STATEFUL, 1).value_and_grad(loss)(params_of(), np.ones((32, 32), "f4"))
    with pytest.raises(ValueError, match="sync must be a GradientSync or None, got 'powersgd'"):
        zero_of("powersgd", 1)
