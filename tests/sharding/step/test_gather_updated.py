"""After the update each group of parameters is gathered into the memory of the old ones."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import sharding as shd
from sharding.placement._layout import Layout
from sharding.plan import kind_of
from sharding.plan.machine._collective_time import NodeGroup, collective_seconds

from ...compilers import need
from ...tiers import tiers
from .. import model

ADAMW = optax.adamw(1e-2)
SHAPES = {"a": (64, 32), "b": (32, 64), "c": (64, 32), "small": (3,), "stack": (11, 64, 32)}
GROUP = 2**14  # bytes: two of the matrices, or two layers of the stack
PLACED = {
    "one axis": ((8,), ("data",), {}),
    "stage 1": ((8,), ("data",), {"stage": 1}),
    "explicit": ((8,), ("data",), {"kind": AxisType.Explicit}),
    "two axes": ((4, 2), ("x", "y"), {"axis": ("x", "y")}),
    "replicas": ((2, 4), ("replica", "data"), {"replica_axis": "replica"}),
    "all": (
        (2, 4),
        ("replica", "data"),
        {"replica_axis": "replica", "shard_state_over_replicas": True},
    ),
    "tensor": ((4, 2), ("data", "model"), {}),
    "sync": ((8,), ("data",), {"sync": shd.sync.qsgd()}),
}


def set_group(monkeypatch, nbytes):
    """CPUs have one group."""
    monkeypatch.setattr(Layout, "gather_group_bytes", property(lambda _: nbytes))


def make():
    rng = np.random.default_rng(0)
    params = {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in SHAPES.items()}
    return params, ADAMW.init(params)


def batch_of(step):
    return model.gradients(SHAPES, step, np.float32)


@pytest.mark.parametrize("name", tiers(PLACED, ["explicit", "two axes", "all", "sync"]))
def test_groups_change_no_bit(name, monkeypatch):
    shape, names, options = PLACED[name]
    zero = model.zero_on(*shape, names=names, **({"stage": 2} | options))
    specs = {k: PartitionSpec() for k in SHAPES}
    specs |= {"stack": PartitionSpec(None, None, "model"), "a": PartitionSpec("model")}
    specs = specs if name == "tensor" else None
    trainable = {k: k != "c" for k in SHAPES}

    def train():
        state = model.run(
            zero, make, ADAMW, model.linear_loss, batch_of, 3, specs, trainable=trainable
        )
        return jax.tree.map(np.asarray, state)

    want = train()
    set_group(monkeypatch, GROUP)
    assert "gathered in groups of" in str(zero.describe(jax.eval_shape(make), tx=ADAMW))
    jax.tree.map(np.testing.assert_array_equal, train(), want)


def equations(jaxpr):
    """Of a function, and of the functions in it; those of a loop once."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def test_each_group_waits_for_the_one_before(monkeypatch):
    """Two matrices, the third one, and the stack: in loops of two layers, the last one alone."""
    set_group(monkeypatch, GROUP)
    zero = model.zero_on(8, stage=2)
    state = zero.abstract_state(make, tx=ADAMW)
    step = zero.train_step(model.linear_loss, tx=ADAMW)
    found = list(equations(jax.make_jaxpr(lambda *args: step(*args))(state, batch_of(0)).jaxpr))
    waits = [
        [v.aval.shape for v in eqn.invars]
        for eqn in found
        if eqn.primitive.name == "optimization_barrier"
    ]
    assert waits == [
        [(64, 32), (64, 32), (32, 64)],
        [(11, 64, 32), (64, 32)],
    ]
    loops = [eqn.params["length"] for eqn in found if eqn.primitive.name == "scan"]
    assert loops == [5]
    stored = [
        eqn.invars[0].aval.shape for eqn in found if eqn.primitive.name == "dynamic_update_slice"
    ]
    assert stored == 3 * [SHAPES["stack"]]


def test_a_group_keeps_the_link_busy():
    """By the planner's model of it, nine tenths of the time that a gather takes are sending."""
    group = shd.Zero(jax.sharding.AbstractMesh((8,), ("data",)))._layout.gather_group_bytes
    times = [
        collective_seconds("all-gather", size, NodeGroup(8, 8), kind_of("h100")) / size
        for size in (group, 2**50)
    ]
    assert 0.9 < times[1] / times[0] < 0.92


def large_step(target, shapes, stage):
    """A program of a stack and single matrices, in a step on little data."""
    zero = shd.Zero(shd.targets.mesh(target, (8,), ("data",)), stage=stage)
    layer = zero.gathered(lambda p, x: jnp.tanh(x @ p))

    def loss(params, x):
        x = layer(params["first"], x)
        x = jax.lax.scan(lambda x, p: (jax.checkpoint(layer)(p, x), None), x, params["stack"])[0]
        return jnp.mean(layer(params["last"], x).astype(jnp.float32) ** 2)

    make = model.make_of(lambda: {k: jnp.zeros(s, jnp.bfloat16) for k, s in shapes.items()}, ADAMW)
    state = zero.abstract_state(make, tx=ADAMW)
    x = jax.ShapeDtypeStruct((8, shapes["first"][0]), jnp.bfloat16)
    return zero.train_step(loss, tx=ADAMW).lower(state, x).compile()


@pytest.mark.parametrize(
    ("target", "width", "stage"),
    [("h100x8", 2048, 1), ("h100x8", 2048, 2), ("v5e:2x4", 4096, 1), ("v5e:2x4", 4096, 2)],
)
def test_parameters_are_held_once(target, width, stage, monkeypatch):
    """Beside the state there are shards of gradients, and a few layers of the backward pass.

    At stage 1 too: there is one micro-batch.
    """
    need(target)
    shapes = {"first": (512, width), "stack": (8, width, width), "last": (width, 512)}
    layer, params = 2 * width**2, sum(2 * math.prod(s) for s in shapes.values())
    set_group(monkeypatch, layer)
    memory = large_step(target, shapes, stage).memory_analysis()
    assert memory.alias_size_in_bytes >= params * (1 + 2 / 8)
    assert memory.temp_size_in_bytes < params / 8 + 4 * layer
