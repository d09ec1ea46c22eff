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
from sharding.remat._chain import Kept, Rerun

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


def scan(fn, params, x):
    return jax.lax.scan(lambda x, p: (fn(p, x), None), x, params)[0]


TX = optax.adam(1e-2)


def loss_by(fn):
    return lambda params, x: jnp.mean(jnp.sum(jnp.sin(fn(params, x)) ** 2, axis=-1))


@functools.cache
def trained_alone():
    """Parameters after some steps on one device, without plans."""

    @jax.jit
    def step(params, opt_state, x):
        grads = jax.grad(loss_by(functools.partial(scan, block)))(params, x)
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params, opt_state = init(), TX.init(init())
    for i in range(STEPS):
        params, opt_state = step(params, opt_state, data(i))
    return params


def trained(zero, fn, form=lambda params: params, param_specs=None):
    def make_state():
        params = form(init())
        return params, TX.init(params)

    state = zero.init(make_state, tx=TX, param_specs=param_specs)
    step = zero.train_step(loss_by(fn), tx=TX)
    for i in range(STEPS):
        state, _ = step(state, zero.put(data(i)))
    return zero.full_params(state)


@functools.cache
def plans():
    """Of a stack and of a chain: one that runs blocks again, and one that saves what it can."""
    params, x = init(), jnp.ones((ROWS, WIDTH))
    stack = shd.remat.plan(block, params, x, "1GiB", length=LENGTH)
    chain = shd.remat.plan(block, layers(params), x, "1GiB")
    segment = Rerun((Kept(0, 0), Rerun((Kept(1, -1),)), Kept(2, -1)))
    return {
        "stack": (dataclasses.replace(stack, lengths=(2, 2), names=()), stack),
        "chain": (dataclasses.replace(chain, tree=(segment, Kept(3, 0))), chain),
    }


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("kind", "stage"),
    [("stack", 3), ("chain", 2)]
    + [
        pytest.param(kind, stage, marks=pytest.mark.slow)
        for kind, stages in (("stack", (0, 1, 2)), ("chain", (0, 1, 3)))
        for stage in stages
    ],
)
def test_training_is_that_of_one_device(kind, stage):
    form = layers if kind == "chain" else (lambda params: params)
    zero = shd.Zero(jax.make_mesh((4,), ("data",)), stage=stage)
    got = trained(zero, plans()[kind][0].apply(zero), form)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), got, form(trained_alone())
    )


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


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.slow)])
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
    alone = jax.tree.map(lambda t: t.update(sharding=None), (params, x))
    whole, found = (
        shd.remat.plan(block, *args, "1GiB", length=LENGTH) for args in (alone, (params, x))
    )
    assert found.names == whole.names == ("hidden",)
    # Hidden values are shards, inputs are not.
    inputs = LENGTH * ROWS // 2 * WIDTH * 8
    assert (whole.saved, found.saved) == (5 * inputs, 3 * inputs)
    assert found.peak < whole.peak

    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    zero = shd.Zero(mesh, axis="data", stage=stage)
    got = trained(zero, found.apply(zero), param_specs=specs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), got, trained_alone())


# --- Flax: the policy of a plan, where modules gather themselves ----------------------------------


def under_scan(x):
    """Types of the stack's input and of one layer, for a plan of it."""
    return jax.tree.map(lambda w: {"kernel": w}, init()), x


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
    found = shd.remat.plan(
        lambda p, x: Block().apply({"params": p}, x), *under_scan(data(0)), "1GiB", length=LENGTH
    )
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

    def form(params):
        return {"block": jax.tree.map(lambda w: {"kernel": w}, params)}

    got = trained(zero, lambda p, x: Stack().apply({"params": p}, x), form)
    want = form(trained_alone())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), got, want)


@needs_nnx
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_the_policy_of_an_nnx_model(stage):
    """``zero.gathered`` at stage 3, ``nnx.remat`` below it."""

    class Layer(nnx.Module):
        def __init__(self, p):
            self.up, self.down = nnx.Param(p["up"]), nnx.Param(p["down"])

        def __call__(self, x):
            hidden = checkpoint_name(x @ self.up[...], "hidden")
            return x + jnp.tanh(hidden) @ self.down[...]

    graph, params = nnx.split(Layer(layers(init())[0]))
    found = shd.remat.plan(
        lambda p, x: nnx.merge(graph, p)(x), [params] * 2, jnp.ones((ROWS // 4, WIDTH)), "1GiB"
    )
    assert {found.names[part.block][part.mode] for part in found.tree} == {("hidden",)}
    policy = jax.checkpoint_policies.save_only_these_names("hidden")
    zero = shd.Zero(jax.make_mesh((4,), ("data",)), stage=stage)

    class Recomputed(Layer):
        def __call__(self, x):
            return nnx.remat(Layer.__call__, policy=policy)(self, x)

    wrapped = zero.gathered(Layer, policy=policy) if stage == 3 else Recomputed

    def make():
        model = nnx.Sequential(*(wrapped(p) for p in layers(init())))
        return model, nnx.Optimizer(model, TX, wrt=nnx.Param)

    model, optimizer = zero.nnx_init(make)
    step = zero.nnx_train_step(loss_by(lambda model, x: model(x)))
    for i in range(STEPS):
        step(model, optimizer, zero.put(data(i)))
    for layer, want in zip(model.layers, layers(trained_alone()), strict=True):
        for name, w in want.items():
            np.testing.assert_allclose(getattr(layer, name)[...], w, rtol=1e-9)
