"""What compiled steps move, hold and wait for: read from the programs, not believed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from sharding.plan.audit._program_collectives import collectives

from .. import model

DEVICES = 8
# Two sharded matrices, two vectors that are too small.
SHAPES = {"w0": (64, 256), "b0": (256,), "w1": (256, 128), "b1": (128,)}
BATCH = np.ones((64, 64), np.float32)
ADAMW = optax.adamw(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)


def make_of(tx):
    return model.make_of(lambda: {k: np.ones(s, np.float32) for k, s in SHAPES.items()}, tx)


def loss_fn(params, x):
    h = jnp.tanh(x @ params["w0"] + params["b0"][None])
    return jnp.mean((h @ params["w1"] + params["b1"][None]) ** 2)


# --- Barriers, without which XLA:TPU would hold more; XLA:CPU does not ----------------------------


def barriers(jaxpr, in_loop=False):
    """The operands' shapes of every barrier, and whether it is in a loop."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "optimization_barrier":
            yield in_loop, [v.aval.shape for v in eqn.invars]
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from barriers(inner, in_loop or eqn.primitive.name == "scan")


@pytest.mark.parametrize("microbatches", [1, 4])
def test_shards_are_taken_before_the_loss_and_accumulated_in_the_loop(microbatches):
    zero = model.zero_on(DEVICES, stage=2, min_shard_size=1024)
    state = zero.abstract_state(make_of(CLIPPED), tx=CLIPPED)
    step = zero.train_step(loss_fn, tx=CLIPPED, microbatches=microbatches)
    found = list(barriers(jax.make_jaxpr(lambda *args: step(*args))(state, BATCH).jaxpr))
    matrices = {name: SHAPES[name] for name in ("w0", "w1")}
    shards = [(64 // DEVICES, 256), (256 // DEVICES, 128)]
    before = [shapes for in_loop, shapes in found if not in_loop and (8, 64) in shapes]
    assert len(before) == 1  # the batch waits for the shards
    assert set(shards) <= set(before[0])
    assert not set(matrices.values()) & set(before[0])  # a parameter that passes is copied
    summed = [shapes for in_loop, shapes in found if in_loop]
    assert len(summed) == (microbatches > 1)
    assert all(set(shards) <= set(shapes) for shapes in summed)


def test_layers_of_a_tensor_parallel_stack_are_gathered_over_the_data_axis_alone():
    zero = model.zero_on(4, 2, names=("data", "model"), stage=3)
    specs = {"up": PartitionSpec(None, None, "model"), "down": PartitionSpec(None, "model")}
    shapes = {"up": (3, 64, 128), "down": (3, 128, 64)}
    make = model.make_of(lambda: {k: np.ones(s, np.float32) for k, s in shapes.items()}, ADAMW)
    layer = zero.gathered(lambda p, x: x + jnp.tanh(x @ p["up"]) @ p["down"])

    def loss(params, x):
        return jnp.mean(jax.lax.scan(lambda x, p: (layer(p, x), None), x, params)[0] ** 2)

    found = collectives(model.lowered(zero, make, ADAMW, loss, BATCH, specs).compile())
    gathers = [c for c in found if c.op == "all-gather" and c.elements > 64]
    assert {c.group_size for c in gathers} == {4}
    assert {c.elements for c in gathers} == {64 * 128 // 2}
    scattered = sum(c.runs * c.elements for c in found if c.op == "reduce-scatter")
    assert scattered == 2 * 3 * 64 * 128 // 2
