"""Losses that take derivatives by themselves, through layers that gather."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding as shd

from ...tiers import tiers
from .. import model

pytestmark = pytest.mark.usefixtures("x64")


def layers(wrap, params, x):
    layer = wrap(lambda p, x: x + jnp.tanh(x @ p["up"]) @ p["down"])
    stack = {name: params[name] for name in ("up", "down")}
    return jax.lax.scan(lambda x, p: (layer(p, x), None), x, stack)[0]


def by_inputs(wrap, params, x):
    """A penalty on the slope, as of WGAN-GP; layers are called within the derivative alone."""
    slope = jax.grad(lambda x: jnp.sum(layers(wrap, params, x) ** 2))(x)
    return jnp.mean(slope**2)


def by_inputs_pulled_back(wrap, params, x):
    out, pull_back = jax.vjp(lambda x: layers(wrap, params, x), x)
    return jnp.mean(pull_back(out)[0] ** 2)


def by_params(wrap, params, x):
    """The inner gradient is that of the batch."""
    inner = lambda params: jnp.mean(layers(wrap, params, x) ** 2)  # noqa: E731
    value, grads = jax.value_and_grad(inner)(params)
    return value + sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))


def by_rows(wrap, params, x):
    del wrap
    ids = jnp.argsort(x[:, :5])[:, 0]  # that depend on rows
    fn = jax.checkpoint(lambda x: jnp.tanh(x * shd.lookup(params["table"], ids)))
    return jnp.mean(jax.grad(lambda x: jnp.sum(fn(x) ** 2))(x) ** 2)


LOSSES = by_inputs, by_inputs_pulled_back, by_params, by_rows


@pytest.mark.filterwarnings("ignore:stage 3 with a loss:UserWarning")
@pytest.mark.parametrize(
    ("loss", "stage"),
    tiers(
        [(loss, stage) for loss in LOSSES for stage in (2, 3)],
        [(by_inputs, 2), (by_inputs_pulled_back, 3), (by_params, 2), (by_rows, 3)],
    ),
)
def test_equals_one_device(loss, stage):
    rng = np.random.default_rng(0)
    shapes = {"up": (2, 16, 32), "down": (2, 32, 16), "table": (64, 16)}
    params = {name: 0.3 * rng.normal(size=shape) for name, shape in shapes.items()}
    x = rng.normal(size=(16, 16))
    value, grads = jax.jit(jax.value_and_grad(lambda p: loss(lambda fn: fn, p, x)))(params)
    sync = shd.sync.zen(0.5, min_size=1) if loss is by_rows else None
    zero = model.zero_on(8, stage=stage, sync=sync)
    run = zero.value_and_grad(lambda p, x: loss(zero.gathered, p, x))
    have = run(zero.place(params), zero.put(x))
    assert abs(have[0] - value) < 1e-13 * abs(value)
    model.assert_close(have[1], grads, 1e-13)


@pytest.mark.parametrize("view", ["device", "global"])
def test_inside_jit_a_loss_is_traced_anew(view):
    """It may close over what each outer function traces."""
    factor = []
    zero = model.zero_on(8, view=view)
    run = zero.value_and_grad(lambda p, x: factor[-1] * jnp.mean(x @ p))

    def scaled(p, x, scale):
        factor.append(scale)
        return run(p, x)[0]

    p, x = zero.place(jnp.ones(8) / 8), zero.put(np.ones((8, 8)))
    assert jax.jit(scaled)(p, x, 2.0) == 2
    assert jax.jit(lambda *args: 3 * scaled(*args))(p, x, 2.0) == 6


def test_a_weight_that_is_a_count_divides_in_the_dtype_of_the_loss():
    x = np.random.default_rng(0).normal(size=(24, 4))
    zero = model.zero_on(8)
    run = zero.value_and_grad(lambda p, x: (jnp.sum(x @ p), jnp.sum(x[:, 0] > 0)), weighted=True)
    loss, grads = run(zero.place(np.ones(4)), zero.put(x))
    count = np.sum(x[:, 0] > 0)
    np.testing.assert_allclose(loss, x.sum() / count, rtol=1e-14)
    np.testing.assert_allclose(grads, x.sum(0) / count, rtol=1e-13)
