"""Layers of plain trees and Equinox modules: gathered at stage 3, reduced one by one at stage 2."""

import functools
import warnings
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sharding as shd
from sharding import _user_line
from sharding.step import _step_plan

from .. import model
from . import runs
from .runs import TX, WIDTH, assert_same, batch, make_train_state_of, train, train_alone, zero_of

pytestmark = pytest.mark.usefixtures("x64")
SHAPES = {"inputs": (WIDTH, WIDTH), "outputs": (WIDTH, 8), "up": (WIDTH, 24), "down": (24, WIDTH)}


class Layer(NamedTuple):
    """``bias`` is not there in every layer."""

    up: jax.Array
    down: jax.Array
    bias: jax.Array | None = None
    act = staticmethod(jnp.tanh)

    def __call__(self, x, *, scale=1.0):
        h = x @ self.up if self.bias is None else x @ self.up + self.bias[None]
        return x + self.act(h) @ self.down * scale


class Module(eqx.Module):
    """As ``Layer``; ``act`` is a leaf that is no array."""

    up: jax.Array
    down: jax.Array
    bias: jax.Array | None
    act: Any = jnp.tanh
    __call__ = Layer.__call__


def params_of(cls):
    rng = np.random.default_rng(0)
    normal = lambda name: rng.normal(size=SHAPES[name]) * SHAPES[name][0] ** -0.5  # noqa: E731
    layers = [cls(normal("up"), normal("down"), rng.normal(size=24) if i else None) for i in (0, 1)]
    ends = {name: normal(name) for name in ("inputs", "outputs")}
    return eqx.partition({"layers": layers, "none": None, **ends}, eqx.is_array)


def make_of(cls):
    return model.make_of(lambda: params_of(cls)[0], TX)


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
    loss, make = loss_of(Layer), make_train_state_of(lambda: params_of(Layer)[0])
    return train_alone(make, lambda params, batch, *_: (loss(params, batch), None))


# A shard is a node of several leaves: where the parameters come first, trees match in one order.
@pytest.mark.parametrize(
    ("cls", "stage", "static_first"), [(Layer, 2, True), (Layer, 3, True), (Module, 3, False)]
)
def test_equals_one_device(cls, stage, static_first):
    zero = zero_of(stage)
    loss_fn = loss_of(cls, zero.gathered, static_first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing to warn of
        found = state, _ = train(zero, make_of(cls), loss_fn, tx=TX)
        program = zero.train_step(loss_fn, tx=TX).lower(state, zero.put(batch(0))).as_text()
    assert_same(found, reference())
    assert state[0]["layers"][0].bias is state[0]["none"] is None
    assert state[0]["layers"][1].up.sharding.spec == (P(None, "data") if stage == 3 else P())
    # Five arrays of layers, in both passes and never before their input; two others, once.
    found = runs.gathers_behind(program, "4x16xf64")
    assert (len(found), sum(found)) == ((12, 10) if stage == 3 else (0, 0))
    # Their gradients are reduced before those of the layer below are computed.
    assert runs.reduced_before(program, "4x16xf64") == (5 if stage == 3 else 0)


def test_numbered_layers_are_gathered_one_by_one():
    """Of an unmodified loss: its matrices in both passes, and never before their inputs."""
    zero, loss_fn = zero_of(3), loss_of(Layer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = state, _ = train(zero, make_of(Layer), loss_fn, tx=TX)
        lowered = zero.train_step(loss_fn, tx=TX).lower(state, zero.put(batch(0)))
    assert_same(found, reference())
    # Two matrices of two layers; the bias and two other arrays once.
    found = [runs.gathers_behind(lowered.as_text(), f"4x{dim}xf64") for dim in (16, 24)]
    assert [(len(x), sum(x)) for x in found] == [(11, 4), (11, 4)]
    # Nothing else is computed again: a product, and two of its derivative, of each matrix but that
    # of the batch.
    assert lowered.as_text().count("stablehlo.dot_general") == 3 * 6 - 1


def test_what_several_equations_read_is_gathered_once():
    """An unrolled recurrent layer: its gradient is reduced once, too."""

    def loss_fn(params, x):
        for w in params["cells"]:
            for _ in range(3):
                x = jnp.tanh(x @ w)
        return jnp.mean(x)

    zero = zero_of(3)
    make = model.make_of(lambda: {"cells": [jnp.eye(16), jnp.ones((16, 16))]}, TX)
    step = zero.train_step(loss_fn, tx=TX)
    with pytest.warns(UserWarning, match="with a loss that gathers no layer"):
        text = step.lower(zero.init(make, tx=TX), zero.put(np.ones((16, 16)))).as_text()
    assert text.count('"stablehlo.all_gather"') == 2
    assert text.count('"stablehlo.reduce_scatter"') == 2


def test_a_loss_that_gathers_nothing_is_exact_and_says_so():
    """What is sharded is gathered at once."""
    names, numbered = ("first", "last"), loss_of(Layer)

    def make_params():
        params = params_of(Layer)[0]
        return params | {"layers": dict(zip(names, params["layers"], strict=True))}

    def loss_fn(params, batch):
        return numbered(params | {"layers": [params["layers"][name] for name in names]}, batch)

    zero = zero_of(3)
    with pytest.warns(UserWarning, match="with a loss that gathers no layer"):
        found = state, _ = train(zero, model.make_of(make_params, TX), loss_fn, tx=TX)
    listed = state[0] | {"layers": [state[0]["layers"][name] for name in names]}
    assert_same(((listed, *state[1:]), found[1]), reference())
    step = zero.train_step(loss_fn, tx=TX)
    _user_line.warn_once.cache_clear()
    with pytest.warns(UserWarning, match="with a loss that gathers no layer") as seen:
        program = step.lower(state, zero.put(batch(0))).as_text()
    assert [warning.filename for warning in seen] == [__file__]  # the line that calls the step
    assert runs.gathers_behind(program, "4x16xf64") == [False] * 7


@pytest.mark.parametrize(("width", "num"), [(64, 0), (512, 1)])
def test_of_a_model_there_is_one_warning_and_none_of_a_small_one(width, num, monkeypatch):
    """Of 48 KiB, and of 3 MiB, whose losses are traced by steps, evaluations and gradients."""
    monkeypatch.setattr(_step_plan, "FEW_BYTES", 2**20)  # the limit of users
    params = dict.fromkeys("abc", jnp.ones((width, width), jnp.float32))
    zero = zero_of(3)
    loss_fn = lambda p, x: jnp.mean(functools.reduce(jnp.matmul, p.values(), x))  # noqa: E731
    state, x = (zero.place(params), None), zero.put(np.ones((16, width), np.float32))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for microbatches in (1, 2):
            jax.eval_shape(zero.value_and_grad(loss_fn, microbatches=microbatches), params, x)
        zero.eval_step(loss_fn).lower(state, x)
    assert len(seen) == num


def block(p, x):
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def scan(block, p, x):
    return jax.lax.scan(lambda x, q: (block(q, x), None), x, p)[0]


def each(fn, p):
    return jax.tree.map(fn, p)


def dead(block, p, x):
    p["up"][0], p["down"][:, :1], jnp.sum(p["up"]), optax.tree.norm(p)
    return scan(block, p, x)


def unrolled(block, p, x):
    for i in (0, 1):
        x = block({name: stack[i] for name, stack in p.items()}, x)
    return x


def dynamic(block, p, x):
    layer = lambda i: each(lambda a: jax.lax.dynamic_index_in_dim(a, i, keepdims=False), p)  # noqa: E731
    return jax.lax.fori_loop(0, 2, lambda i, x: block(layer(i), x), x)


def chosen(block, p, x):
    i = (x[0, 0] > 0).astype(int)  # by the data of each device
    return block(each(lambda a: a[i], p), x)


VIEWS = {
    "dead": dead,
    "frozen": lambda block, p, x: scan(block, p | {"up": jax.lax.stop_gradient(p["up"])}, x),
    "second": lambda block, p, x: scan(block, each(lambda a: jnp.moveaxis(a, 1, 0), p), x),
    "unrolled": unrolled,
    "reversed": lambda block, p, x: scan(block, each(lambda a: a[::-1], p), x),
    "halves": lambda block, p, x: scan(
        block, each(lambda a: a[1:], p), scan(block, each(lambda a: a[:1], p), x)
    ),
    "dynamic": dynamic,
    "chosen": chosen,
}


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 11),
    reason="XLA for CPUs aborts: it runs an early gather beside a loop of gathers",
)
def test_views_and_what_is_not_needed_leave_a_parameter_to_its_layers():
    """Only what devices choose by their own data is gathered before the loss, with a warning."""

    def make_params():
        stack = {k: jax.ShapeDtypeStruct((2, *SHAPES[k]), jnp.float64) for k in ("up", "down")}
        params = runs.draw(dict.fromkeys(VIEWS, stack))
        return params | {"second": each(lambda a: a.swapaxes(0, 1), params["second"])}

    def loss_fn(block, params, batch):
        x = batch["x"]
        for name, view in VIEWS.items():
            x = view(block, params[name], x / 2)
        return jnp.mean((x[:, :8] - batch["y"]) ** 2)

    def mean(params, batch, *_):  # of the shards of eight devices
        shards = each(lambda a: a.reshape(8, -1, a.shape[1]), batch)
        return jnp.mean(jax.vmap(functools.partial(loss_fn, block, params))(shards)), None

    zero, make_state = zero_of(3), make_train_state_of(make_params)
    own_loss = shd.Loss(functools.partial(loss_fn, zero.gathered(block)), per_device=True)
    used = r"uses 2 parameters, 12.0 KiB, in .*: 'chosen/\w+' \(6.0 KiB\) in dynamic_slice at "
    message = rf"{used}{__file__}:\d+, 'chosen.*single layers,"
    with pytest.warns(UserWarning, match=message) as seen:
        found = state, _ = train(zero, make_state, own_loss)
    assert len(seen) == 1
    expected = train_alone(make_state, mean)
    assert_same(found, expected)
    step = zero.train_step(own_loss)
    _user_line.warn_once.cache_clear()
    with pytest.warns(UserWarning, match=used):
        program = step.lower(state, zero.put(batch(0))).as_text()
    assert runs.gathers_behind(program, "4x16xf64").count(False) == 2


LOOP = lambda body, x, w: jax.lax.scan(lambda x, v: (body(x, v), None), x, w)[0]  # noqa: E731
OF_SHARDED_DIMS = {
    "a part of what another axis shards": lambda w, x: x[:, :3] + jnp.tanh(x @ w[0][:, :3]),
    "loops in loops in a loop": lambda w, x: LOOP(
        functools.partial(LOOP, functools.partial(LOOP, lambda x, v: x + jnp.tanh(x @ v))),
        x,
        w.reshape(3, 2, 2, WIDTH, WIDTH),
    ),
}


@pytest.mark.filterwarnings("ignore:stage 3 with a loss")
@pytest.mark.parametrize("name", OF_SHARDED_DIMS)
def test_views_beside_another_axis(name):
    loss = lambda p, x: jnp.mean(OF_SHARDED_DIMS[name](p, x) ** 2)  # noqa: E731
    p = np.random.default_rng(0).normal(size=(12, WIDTH, WIDTH)) / WIDTH
    x, tx = np.random.default_rng(1).normal(size=(8, WIDTH)), optax.sgd(1.0)
    zero = model.zero_on(4, 2, names=("data", "model"), stage=3, min_shard_size=0)
    state = zero.init(lambda: (p, tx.init(p)), tx=tx, param_specs=P(None, None, "model"))
    state, _ = zero.train_step(loss, tx=tx)(state, zero.put(x))
    found = p - zero.full_params(state)
    np.testing.assert_allclose(found, jax.grad(loss)(p, x), rtol=1e-9, atol=1e-13)
