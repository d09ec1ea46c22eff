"""Plans of stacks within sharded steps: every stage, Flax modules, tensor parallelism."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding

import sharding as shd
from sharding._jaxprs import inner_jaxprs

from .. import model

LENGTH, WIDTH, ROWS, STEPS = 4, 16, 512, 3


def block(p, x):
    hidden = checkpoint_name(x @ p["up"], "hidden")
    return x + jnp.tanh(hidden) @ p["down"]


def init():
    rng = np.random.default_rng(0)
    shapes = {"up": (LENGTH, WIDTH, 4 * WIDTH), "down": (LENGTH, 4 * WIDTH, WIDTH)}
    return {k: jnp.asarray(rng.normal(size=s) / s[-2] ** 0.5) for k, s in shapes.items()}


def data(step):
    scale = np.linspace(0.2, 3.0, ROWS)[:, None]  # shards of different scale
    return jnp.asarray(np.random.default_rng(step).normal(size=(ROWS, WIDTH)) * scale)


def scan(fn, params, x):
    return jax.lax.scan(lambda x, p: (fn(p, x), None), x, params)[0]


TX = optax.adam(1e-2)


def loss_by(fn):
    return lambda params, x: jnp.mean(jnp.sum(jnp.sin(fn(params, x)) ** 2, axis=-1))


@functools.cache
def trained_alone():
    loss = loss_by(functools.partial(scan, block))
    return model.alone(model.make_of(init, TX), TX, loss, data, STEPS)[0][0]


def assert_trained_as_alone(zero, fn, form=lambda params: params, param_specs=None):
    make = model.make_of(lambda: form(init()), TX)
    state = model.run(zero, make, TX, loss_by(fn), data, STEPS, param_specs)
    have, want = zero.full_params(state), form(trained_alone())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), have, want)


@functools.cache
def plans():
    """One that runs blocks again, and one that saves what it can."""
    found = shd.remat.plan(block, init(), jnp.ones((ROWS, WIDTH)), "1GiB", length=LENGTH)
    return dataclasses.replace(found, lengths=(2, 2), names=()), found


@pytest.mark.usefixtures("x64")
def test_training_is_that_of_one_device():
    zero = shd.Zero(jax.make_mesh((4,), ("data",)), stage=3)
    assert_trained_as_alone(zero, plans()[0].apply(zero))


def equations(jaxpr, name, in_loop=False):
    """The equations of a kind, and whether each is in a loop."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == name:
            yield in_loop
        for inner in inner_jaxprs(eqn):
            yield from equations(inner, name, in_loop or eqn.primitive.name == "scan")


def traced(zero, fn):
    tx = optax.sgd(0.1)
    step = zero.train_step(lambda p, x: jnp.mean(fn(p, x) ** 2), tx=tx)
    state = zero.abstract_state(model.make_of(init, tx), tx=tx)
    return jax.make_jaxpr(step)(state, jnp.ones((ROWS, WIDTH)))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_layer_gathers_and_reduces_as_by_hand(stage):
    """One ``jax.checkpoint``, and the collectives of ``zero.gathered`` within the loop."""
    zero = shd.Zero(jax.make_mesh((4,), ("data",)), stage=stage)
    most = plans()[-1]
    planned = traced(zero, most.apply(zero)).jaxpr

    def by_hand(p, x):
        block_ = zero.gathered(block, policy=most.policy)
        if stage == 2:
            block_ = jax.checkpoint(block_, policy=most.policy, prevent_cse=False)
        return scan(block_, p, x)

    same = traced(zero, by_hand).jaxpr
    for name in ("reduce_scatter", "all_gather", "checkpoint", "remat2"):
        assert list(equations(planned, name)) == list(equations(same, name))
    assert True in equations(planned, "reduce_scatter")


def test_gathered_parameters_are_stored_without_resharding():
    """As by ``zero.gathered`` alone: the backward pass gathers nothing."""
    zero = shd.Zero(jax.make_mesh((4,), ("data",)), stage=3, reshard_after_forward=False)
    alone = traced(zero, lambda p, x: scan(zero.gathered(block), p, x)).jaxpr
    for found in plans():
        one_scan = dataclasses.replace(found, lengths=(LENGTH,))
        planned = traced(zero, one_scan.apply(zero)).jaxpr
        same = [list(equations(each, "all_gather")) for each in (planned, alone)]
        assert same[0] == same[1] == [True] * 2


@pytest.mark.usefixtures("x64")
def test_beside_tensor_parallelism():
    """Planned with the shards of a model axis, and trained on a mesh that has one."""
    specs = {"up": P(None, None, "model"), "down": P(None, "model", None)}
    shared = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
    params = {
        name: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=NamedSharding(shared, specs[name]))
        for name, w in init().items()
    }
    replicated = NamedSharding(shared, P())
    x = jax.ShapeDtypeStruct((ROWS // 2, WIDTH), params["up"].dtype, sharding=replicated)
    alone = jax.tree.map(lambda t: t.update(sharding=None), (params, x))
    whole, found = (shd.remat.plan(block, *a, "1GiB", length=LENGTH) for a in (alone, (params, x)))
    assert found.names == whole.names == ("hidden",)
    # Hidden values are shards, inputs are not.
    inputs = LENGTH * ROWS // 2 * WIDTH * 8
    assert (whole.saved, found.saved) == (5 * inputs, 3 * inputs)
    assert found.peak < whole.peak

    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    zero = shd.Zero(mesh, axis="data", stage=3)
    assert_trained_as_alone(zero, found.apply(zero), param_specs=specs)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, use_bias=False)
        hidden = checkpoint_name(dense(4 * WIDTH, name="up")(x), "hidden")
        return x + dense(WIDTH, name="down")(jnp.tanh(hidden))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_the_policy_of_a_linen_model(stage):
    """``nn.scan`` over blocks: by ``zero.gathered`` at stage 3, by ``nn.remat`` below it."""

    def form(params):
        return {"block": jax.tree.map(lambda w: {"kernel": w}, params)}

    apply, own = (lambda p, x: Block().apply({"params": p}, x)), form(init())["block"]
    found = shd.remat.plan(apply, own, data(0), "1GiB", length=LENGTH)
    assert found.names == ("hidden",)
    zero = shd.Zero(jax.make_mesh((4,), ("data",)), stage=stage)
    if stage == 3:
        wrapped = zero.gathered(Block, policy=found.policy)
    else:
        wrapped = nn.remat(zero.gathered(Block), policy=found.policy, prevent_cse=False)

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(
                lambda block, x, _: (block(x), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=LENGTH,
            )
            return scan(wrapped(name="block"), x, None)[0]

    assert_trained_as_alone(zero, lambda p, x: Stack().apply({"params": p}, x), form)
