"""Plans within sharded steps: every stage, Flax modules, tensor parallelism."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sharding as shd
from sharding.plan._devices import KINDS
from sharding.plan.timing._traced_work import work_of_jaxpr

from ...flax_nnx import needs_nnx, nnx

LENGTH, WIDTH, ROWS, STEPS = 4, 16, 512, 3


def block(p, x):
    hidden = checkpoint_name(x @ p["up"], "hidden")
    return x + jnp.tanh(hidden) @ p["down"]


def init():
    rng = np.random.default_rng(0)
    shapes = {"up": (LENGTH, WIDTH, 4 * WIDTH), "down": (LENGTH, 4 * WIDTH, WIDTH)}
    return {k: jnp.asarray(rng.normal(size=s) / s[-2] ** 0.5) for k, s in shapes.items()}


def layers(params):
    return [jax.tree.map(lambda w, i=i: w[i], params) for i in range(LENGTH)]


def data(step):
    scale = np.linspace(0.2, 3.0, ROWS)[:, None]  # shards of different scale
    return jnp.asarray(np.random.default_rng(step).normal(size=(ROWS, WIDTH)) * scale)


def plain(params, x):
    for p in layers(params):
        x = block(p, x)
    return x


def trained(zero, fn, form=lambda params: params, param_specs=None):
    """Parameters after some steps; ``zero`` of None trains on one device."""
    tx = optax.adam(1e-2)

    def loss(params, x):
        return jnp.mean(jnp.sum(jnp.sin(fn(params, x)) ** 2, axis=-1))

    def make_state():
        params = form(init())
        return params, tx.init(params)

    if zero is None:
        state = make_state()
        for i in range(STEPS):
            grads = jax.grad(loss)(state[0], data(i))
            updates, opt_state = tx.update(grads, state[1], state[0])
            state = optax.apply_updates(state[0], updates), opt_state
        return state[0]
    state = zero.init(make_state, tx=tx, param_specs=param_specs)
    step = zero.train_step(loss, tx=tx)
    for i in range(STEPS):
        state, _ = step(state, zero.put(data(i)))
    return zero.full_params(state)


@functools.cache
def plans():
    """Of a stack and of a chain: the fewest bytes, and the most."""
    params, x = init(), jnp.ones((ROWS, WIDTH))
    stack = shd.remat.frontier(block, params, x, length=LENGTH)
    chain = shd.remat.frontier(block, layers(params), x)
    return {"stack": (stack[0], stack[-1]), "chain": (chain[0], chain[-1])}


@pytest.mark.slow(keep=3)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["stack", "chain"])
def test_training_is_that_of_one_device(stage, kind):
    form = layers if kind == "chain" else (lambda params: params)
    want = form(trained(None, plain))
    zero = shd.Zero(jax.make_mesh((4,), ("data",)), stage=stage)
    for found in plans()[kind]:
        got = trained(zero, found.apply(zero), form)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), got, want)


def equations(jaxpr, name, in_loop=False):
    """The equations of a kind, and whether each is in a loop."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == name:
            yield in_loop
        for value in jax.tree.leaves(dict(eqn.params)):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner, name, in_loop or eqn.primitive.name == "scan")


def traced(zero, fn):
    tx = optax.sgd(0.1)

    def make_state():
        return init(), tx.init(init())

    step = zero.train_step(lambda p, x: jnp.mean(fn(p, x) ** 2), tx=tx)
    return jax.make_jaxpr(step)(zero.abstract_state(make_state, tx=tx), jnp.ones((ROWS, WIDTH)))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_layer_gathers_and_reduces_as_by_hand(stage):
    """One ``jax.checkpoint``, and the collectives of ``zero.gathered`` within the loop."""
    zero = shd.Zero(jax.make_mesh((4,), ("data",)), stage=stage)
    most = plans()["stack"][-1]
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
    for found in plans()["stack"]:
        one_scan = dataclasses.replace(found, lengths=(LENGTH,))
        planned = traced(zero, one_scan.apply(zero)).jaxpr
        same = [list(equations(each, "all_gather")) for each in (planned, alone)]
        assert same[0] == same[1] == [True] * 2


def test_stage_3_runs_a_block_again_once():
    zero = shd.Zero(jax.make_mesh((4,), ("data",)), stage=3)

    def products(fn):
        return work_of_jaxpr(traced(zero, fn).jaxpr, KINDS["h100"]).flops

    most = plans()["stack"][-1]
    fewest = dataclasses.replace(most, lengths=(2, 2), names=())
    one = 2 * (ROWS // 4) * WIDTH * (4 * WIDTH) * LENGTH  # one product of each block
    assert products(most.apply(zero)) == 6 * one
    assert products(lambda p, x: scan(zero.gathered(block), p, x)) == 7 * one
    assert products(fewest.apply(zero)) == 9 * one  # the forward pass, and the first product


def scan(fn, params, x):
    return jax.lax.scan(lambda x, p: (fn(p, x), None), x, params)[0]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("stage", [2, 3])
def test_beside_tensor_parallelism(stage):
    """Planned with the shards of a model axis, and trained on a mesh that has one."""
    specs = {"up": P(None, None, "model"), "down": P(None, "model", None)}
    model = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
    params = {
        name: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=NamedSharding(model, specs[name]))
        for name, w in init().items()
    }
    x = jax.ShapeDtypeStruct(
        (ROWS // 2, WIDTH), params["up"].dtype, sharding=NamedSharding(model, P())
    )
    whole = shd.remat.frontier(
        block, jax.tree.map(lambda w: w.update(sharding=None), params), x.update(sharding=None),
        length=LENGTH,
    )  # fmt: skip
    found = shd.remat.frontier(block, params, x, length=LENGTH)
    assert found[-1].names == whole[-1].names == ("hidden",)
    # Hidden values are shards, inputs are not.
    inputs = LENGTH * ROWS // 2 * WIDTH * 8
    assert whole[-1].saved == 5 * inputs
    assert found[-1].saved == 3 * inputs
    assert found[-1].peak < whole[-1].peak

    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    zero = shd.Zero(mesh, axis="data", stage=stage)
    want = trained(None, plain)
    for each in (found[0], found[-1]):
        got = trained(zero, each.apply(zero), param_specs=specs)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), got, want)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        hidden = checkpoint_name(nn.Dense(4 * WIDTH, name="up")(x), "hidden")
        return x + nn.Dense(WIDTH, name="down")(jnp.tanh(hidden))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("stage", [2, 3])
def test_the_policy_of_a_linen_model(stage):
    """``nn.scan`` over blocks with the plan's policy: by ``zero.gathered`` or ``nn.remat``."""

    def fn(p, x):
        return Block().apply({"params": p}, x)

    x = jnp.ones((ROWS // 4, WIDTH))
    one = Block().init(jax.random.key(0), x)["params"]
    found = shd.remat.frontier(fn, jax.tree.map(lambda w: jnp.stack([w] * 4), one), x, length=4)[-1]
    assert found.names == ("hidden",)
    zero = shd.Zero(jax.make_mesh((4,), ("data",)), stage=stage)
    wrapped = (
        zero.gathered(Block, policy=found.policy)
        if stage == 3
        else nn.remat(zero.gathered(Block), policy=found.policy, prevent_cse=False)
    )

    def model(block_class):
        class Stack(nn.Module):
            @nn.compact
            def __call__(self, x):
                scan = nn.scan(
                    lambda block, x, _: (block(x), None),
                    variable_axes={"params": 0},
                    split_rngs={"params": True},
                    length=LENGTH,
                )
                return scan(block_class(name="block"), x, None)[0]

        return Stack()

    tx = optax.sgd(0.1)

    def make_state():
        params = model(Block).init(jax.random.key(0), data(0))["params"]
        return params, tx.init(params)

    def losses(zero, block_class):
        state = zero.init(make_state, tx=tx)
        step = zero.train_step(
            lambda p, x: jnp.mean(model(block_class).apply({"params": p}, x) ** 2), tx=tx
        )
        out = []
        for i in range(STEPS):
            state, metrics = step(state, zero.put(data(i)))
            out.append(float(metrics["loss"]))
        return out

    alone = shd.Zero(jax.make_mesh((1,), ("data",)), stage=0)
    np.testing.assert_allclose(losses(zero, wrapped), losses(alone, Block), rtol=1e-5)


@needs_nnx
@pytest.mark.parametrize("stage", [2, 3])
def test_the_policy_of_an_nnx_model(stage):
    """``zero.gathered`` at stage 3, ``nnx.remat`` below it."""

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
            self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            return x + self.down(jnp.tanh(checkpoint_name(self.up(x), "hidden")))

    graph, params = nnx.split(Layer(nnx.Rngs(0)))
    found = shd.remat.plan(
        lambda p, x: nnx.merge(graph, p)(x), [params] * 3, jnp.ones((ROWS // 4, WIDTH)), "1GiB"
    )
    saved = {found.names[part.block][part.mode] for part in found.tree}
    assert saved == {("hidden",)}
    policy = jax.checkpoint_policies.save_only_these_names("hidden")
    zero = shd.Zero(jax.make_mesh((4,), ("data",)), stage=stage)

    def wrapped(cls, zero):
        if zero.stage == 3:
            return zero.gathered(cls, policy=policy)

        class Recomputed(cls):
            def __call__(self, x):
                return nnx.remat(cls.__call__, policy=policy)(self, x)

        return Recomputed

    def losses(zero, cls):
        def make(key):
            rngs = nnx.Rngs(key)
            model = nnx.Sequential(*[cls(rngs) for _ in range(3)])
            return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

        model, optimizer = zero.nnx_init(make, jax.random.key(0))
        step = zero.nnx_train_step(lambda model, x: jnp.mean(model(x) ** 2))
        return [float(step(model, optimizer, zero.put(data(i)))["loss"]) for i in range(STEPS)]

    alone = shd.Zero(jax.make_mesh((1,), ("data",)), stage=0)
    np.testing.assert_allclose(losses(zero, wrapped(Layer, zero)), losses(alone, Layer), rtol=1e-5)
