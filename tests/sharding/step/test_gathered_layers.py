"""Layers of plain trees and Equinox modules: gathered at stage 3, reduced one by one at stage 2."""

import functools
import warnings
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

from .runs import (
    TOLERANCE,
    TX,
    WIDTH,
    assert_close,
    assert_same,
    batch,
    gathers_behind,
    train,
    train_alone,
    zero_of,
)

pytestmark = pytest.mark.usefixtures("x64")
SHAPES = {"inputs": (WIDTH, WIDTH), "outputs": (WIDTH, 8), "up": (WIDTH, 24), "down": (24, WIDTH)}


class Layer(NamedTuple):
    """``bias`` is not there in every layer."""

    up: jax.Array
    down: jax.Array
    bias: jax.Array | None = None

    def __call__(self, x, *, scale=1.0):
        h = x @ self.up if self.bias is None else x @ self.up + self.bias[None]
        return x + jnp.tanh(h) @ self.down * scale


class Module(eqx.Module):
    """As ``Layer``; ``act`` is a leaf that is no array."""

    up: jax.Array
    down: jax.Array
    bias: jax.Array | None
    act: Any = jnp.tanh

    def __call__(self, x, *, scale=1.0):
        h = x @ self.up if self.bias is None else x @ self.up + self.bias[None]
        return x + self.act(h) @ self.down * scale


def params_of(cls):
    rng = np.random.default_rng(0)
    normal = lambda name: rng.normal(size=SHAPES[name]) * SHAPES[name][0] ** -0.5  # noqa: E731
    layers = [cls(normal("up"), normal("down"), rng.normal(size=24) if i else None) for i in (0, 1)]
    ends = {name: normal(name) for name in ("inputs", "outputs")}
    return eqx.partition({"layers": layers, "none": None, **ends}, eqx.is_array)


def make(cls):
    params = jax.tree.map(jnp.asarray, params_of(cls)[0])
    return params, TX.init(params)


def loss_of(cls, wrap=lambda fn: fn, static_first=True):
    """A layer is wrapped as a function of itself and its input."""
    call, static = wrap(cls.__call__), params_of(cls)[1]

    def loss_fn(params, batch):
        tree = eqx.combine(*((static, params) if static_first else (params, static)))
        x = jnp.sin(batch["x"] @ tree["inputs"])
        for layer in tree["layers"]:
            x = call(layer, x, scale=0.5)
        return jnp.mean((x @ tree["outputs"] - batch["y"]) ** 2)

    return loss_fn


@functools.cache
def reference():
    """Of ``Layer``; the other kind computes the same."""
    loss, params = loss_of(Layer), make(Layer)[0]
    create = functools.partial(TrainState.create, apply_fn=None, params=params, tx=TX)
    return train_alone(create, lambda params, batch, *_: (loss(params, batch), None))


# A shard is a node of several leaves: where the parameters come first, trees match in one order.
@pytest.mark.parametrize(
    ("cls", "stage", "static_first"), [(Layer, 2, True), (Layer, 3, True), (Module, 3, False)]
)
def test_equals_one_device(cls, stage, static_first):
    zero = zero_of(stage)
    loss_fn = loss_of(cls, zero.gathered, static_first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing to warn of
        found = state, _ = train(zero, lambda: make(cls), loss_fn, tx=TX)
        program = zero.train_step(loss_fn, tx=TX).lower(state, zero.put(batch(0))).as_text()
    assert_same(found, reference())
    assert state[0]["layers"][0].bias is state[0]["none"] is None
    assert state[0]["layers"][1].up.sharding.spec == (P(None, "data") if stage == 3 else P())
    # Five arrays of layers, in both passes and never before their input; two others, once.
    found = gathers_behind(program, "4x16xf64")
    assert (len(found), sum(found)) == ((12, 10) if stage == 3 else (0, 0))


def test_a_loss_that_gathers_nothing_is_exact_and_says_so():
    """What is sharded is gathered at once."""
    zero, loss_fn = zero_of(3), loss_of(Layer)
    with pytest.warns(UserWarning, match="with a loss that gathers no layer"):
        found = state, _ = train(zero, lambda: make(Layer), loss_fn, tx=TX)
    assert_same(found, reference())
    step = zero.train_step(loss_fn, tx=TX)
    with pytest.warns(UserWarning, match="with a loss that gathers no layer"):
        program = step.lower(state, zero.put(batch(0))).as_text()
    assert gathers_behind(program, "4x16xf64") == [False] * 7


def test_at_stage_2_a_loss_that_counts_its_parameters_gets_arrays():
    """Handles are trees of more leaves: what the loss would compute from them is another thing."""

    def loss_fn(layer, params, batch):
        factor = sum(x.size for x in jax.tree.leaves(params["layers"]))
        x = batch["x"]
        for each in params["layers"]:
            x = layer(each, x)
        return jnp.mean(x**2) / factor

    zero, (params, _) = zero_of(2), make(Layer)
    found = zero.value_and_grad(functools.partial(loss_fn, zero.gathered(Layer.__call__)))
    loss, grads = found(params, batch(0))
    expected = jax.jit(jax.value_and_grad(functools.partial(loss_fn, Layer.__call__)))
    want, want_grads = expected(params, batch(0))
    np.testing.assert_allclose(loss, want, rtol=TOLERANCE)
    assert_close(grads["layers"], want_grads["layers"])
