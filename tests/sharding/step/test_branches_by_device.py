"""Branches and loops that devices take by their own data: gathered before, or an error."""

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import sharding as shd
from sharding.loss._diverging import diverging

from .. import model

WIDTH, ROWS = 64, 32
SGD = optax.sgd(0.1)
pytestmark = pytest.mark.usefixtures("x64")
WARNING = "ignore:.*:UserWarning"


def params():
    rng = np.random.default_rng(0)
    return {f"e{i}": jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / 8) for i in range(4)}


def batch():
    """Each pair of devices has rows of its own expert."""
    x = np.random.default_rng(1).normal(size=(ROWS, WIDTH))
    x[:, 0] = np.repeat([0, 1, 2, 3], ROWS // 4)
    return x


def layer(w, x):
    return jnp.tanh(x @ w)


def switch(block, p, x):
    branches = [lambda x, w=p[f"e{i}"]: block(w, x) for i in range(4)]
    return lax.switch(x[0, 0].astype(int), branches, x)


def condition(block, p, x):
    """One expert for the devices of the first half."""
    y = block(p["e1"], x)
    return lax.cond(x[0, 0] < 2, lambda y: block(p["e0"], y), lambda y: y, y)


def while_loop(block, p, x):
    """As often as the device's own rows say."""

    def body(carry):
        i, y = carry
        return i + 1, y + lax.stop_gradient(block(p["e0"], y))

    _, y = lax.while_loop(lambda carry: carry[0] < x[0, 0], body, (0.0, x))
    return block(p["e1"], y)


def scanned(block, p, x):
    """LayerDrop: the layers of a stack, each where the device's own numbers say."""

    def body(carry, w):
        x, number = carry
        x = lax.cond(number % 2 < 1, lambda x: x + block(w, x), lambda x: x, x)
        return (x, number / 2), None

    stack = jnp.stack([p[f"e{i}"] for i in range(2)])
    return lax.scan(body, (x, x[0, 0]), stack)[0][0]


FORMS = {"switch": switch, "cond": condition, "while": while_loop, "scan": scanned}


@pytest.mark.filterwarnings(WARNING)
@pytest.mark.parametrize("form", FORMS)
def test_each_device_takes_its_own_branch(form):
    """At stage 3, with blocks that gather their parameters: as on one device for each part."""
    zero, x = model.zero_on(8, stage=3, view="device"), batch()
    block = zero.gathered(layer)

    def loss(p, x, block=block):
        return jnp.mean(FORMS[form](block, p, x) ** 2)

    state = zero.init(lambda: (params(), SGD.init(params())), tx=SGD)
    with warnings.catch_warnings(record=True, action="always") as found:
        state, metrics = zero.train_step(loss, tx=SGD)(state, zero.put(x))
    assert not any("Used unsharded: ." in str(warning.message) for warning in found)

    def alone(p):
        return jnp.mean(jnp.stack([loss(p, part, layer) for part in np.split(x, 8)]))

    value, grads = jax.jit(jax.value_and_grad(alone))(params())
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-12)
    for k, p in params().items():
        error = np.linalg.norm(np.asarray(state[0][k]) - (p - 0.1 * grads[k]))
        assert error <= 1e-12 * max(1.0, np.linalg.norm(0.1 * grads[k])), k


@pytest.mark.filterwarnings(WARNING)
def test_evaluation_and_lookups():
    zero, x = model.zero_on(8, stage=3, view="device"), batch()
    state = zero.init(lambda: (params(), SGD.init(params())), tx=SGD)
    block = zero.gathered(layer)
    have = zero.eval_step(lambda p, x: switch(block, p, x))(state, zero.put(x))
    parts = enumerate(np.split(x, 8))
    want = np.concatenate([np.tanh(part @ params()[f"e{i // 2}"]) for i, part in parts])
    np.testing.assert_allclose(have, want, rtol=1e-12)

    def rows(p, ids):
        take = [lambda i, t=p[k]: shd.lookup(t, i) for k in ("e0", "e1")]
        return lax.cond(ids[0] < 16, *take, ids)

    have = zero.eval_step(rows)(state, zero.put(np.arange(ROWS)))
    tables = [np.asarray(params()[k]) for k in ("e0", "e1")]
    want = np.concatenate([tables[0][:16], tables[1][16:ROWS]])
    np.testing.assert_array_equal(have, want)


def test_what_is_gathered_before_the_loss_is_named():
    zero = model.zero_on(8, stage=3, view="device")
    block = zero.gathered(layer)
    loss = lambda p, x: jnp.mean(condition(block, p, x))  # noqa: E731
    with pytest.warns(UserWarning, match=r"uses 1 parameters, .* in a branch .* 'e0'"):
        model.lowered(zero, model.make_of(params, SGD), SGD, loss, batch())


class OwnNorm(nn.Module):
    axis: str | None = None  # of statistics

    @nn.compact
    def __call__(self, x):
        options = {"use_running_average": False, "axis_name": self.axis}
        norms = [nn.BatchNorm(**options, name=f"n{i}") for i in range(2)]
        if self.is_initializing():
            return [norm(x) for norm in norms]
        branches = [lambda _, y, n=norm: n(y) for norm in norms]
        return nn.switch((x[0, 0] > 1).astype(int), branches, self, x)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.filterwarnings(WARNING)
def test_a_collective_in_a_branch_raises(stage):
    """Statistics of all devices, of different layers."""
    zero, x = model.zero_on(8, stage=stage, view="device"), batch()
    variables = OwnNorm().init(jax.random.key(0), x)

    def loss(p, x, stats, axis=None):
        out, new = OwnNorm(axis).apply({"params": p, **stats}, x, mutable=["batch_stats"])
        return jnp.mean(out**3), new

    p, stats = variables["params"], {"batch_stats": variables["batch_stats"]}
    state = zero.init(lambda: (p, SGD.init(p)), tx=SGD)
    options = {"tx": SGD, "model_state": True}
    synced = functools.partial(loss, axis="data")
    with pytest.raises(ValueError, match=r"has a collective \(psum, .*Move it out of the branch"):
        zero.train_step(synced, **options)(state, zero.put(x), model_state=stats)
    _, metrics = zero.train_step(loss, **options)(state, zero.put(x), model_state=stats)
    alone = [loss(p, part, stats)[0] for part in np.split(x, 8)]
    np.testing.assert_allclose(metrics["loss"], np.mean(alone), rtol=1e-6)


PREDICATES = {
    "own data": (lambda x: x.sum() > 0, True),
    "a constant": (lambda x: jnp.ones(()) > 0, False),
    "the sum of all": (lambda x: lax.psum(x.sum(), "data") > 0, False),
    "the sum of some": (lambda x: lax.psum(x.sum(), "other") > 0, True),
    "its own index": (lambda x: lax.axis_index("data") > 0, True),
    "carried by a loop": (
        lambda x: lax.fori_loop(0, 3, lambda i, c: (c[1], x.sum()), (0.0, 0.0))[0] > 0,
        True,
    ),
    "carried by a loop of unknown length": (
        lambda x: (
            lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[2], x[0]), (0, 0.0, 0.0))[1]
            > 0
        ),
        True,
    ),
    "within calls": (lambda x: jax.jit(jax.checkpoint(lambda x: x.max() > 0))(x), True),
}


@pytest.mark.parametrize("name", PREDICATES)
def test_which_predicates_differ(name):
    predicate, differs = PREDICATES[name]

    def fn(x):
        return lax.cond(predicate(x), lambda x: x, lambda x: -x, x)

    axis_env = [("data", 2), ("other", 2)]
    jaxpr = jax.make_jaxpr(fn, axis_env=axis_env)(jnp.ones(3)).jaxpr
    assert bool(diverging(jaxpr, [True], ["data"])) == differs
    assert not diverging(jaxpr, [False], ["data"]) or name == "its own index"
