"""What the compiled CPU programs move and hold: read from the program, not believed."""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import optax_ext
import sharding as shd
from sharding.plan.program._wire import collectives

from .. import model

pytestmark = pytest.mark.usefixtures("scopes_in_cache_key")

DEVICES = 8
# Two sharded matrices, two vectors that are too small.
SHAPES = {"w0": (64, 256), "b0": (256,), "w1": (256, 128), "b1": (128,)}
SHARDED = [math.prod(SHAPES[name]) for name in ("w0", "w1")]
SMALL = max(n + m for n, m in ((64, 256), (256, 128))) * 4


def init(tx):
    def make(key):
        keys = jax.random.split(key, len(SHAPES))
        params = {
            n: jax.random.normal(k, s) for k, (n, s) in zip(keys, SHAPES.items(), strict=True)
        }
        return params, tx.init(params)

    return make


def loss_fn(params, x):
    h = jnp.tanh(x @ params["w0"] + params["b0"][None])
    return jnp.mean((h @ params["w1"] + params["b1"][None]) ** 2)


def zero_of(stage, kind=AxisType.Auto):
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(kind,))
    return shd.Zero(mesh, stage=stage, min_shard_size=1024)


@functools.cache
def compiled(stage, optimizer, microbatches, kind=AxisType.Auto):
    tx = {
        "came": lambda: optax_ext.came(1e-3),
        "adafactor": lambda: optax_ext.adafactor(1e-3, factoring=optax_ext.last_two_dims()),
        "adamw": lambda: optax.adamw(1e-3),
        "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(1e-3)),
    }[optimizer]()
    zero = zero_of(stage, kind)
    state = jax.eval_shape(init(tx), jax.random.key(0))
    step = zero.train_step(loss_fn, tx=tx, microbatches=microbatches)
    batch = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    return step.lower(state, batch).compile()


def large(program):
    """Counts of (op, in a loop) among collectives of matrix size; small ones are statistics."""
    found = collectives(program)
    return collections.Counter((c.op, c.runs > 1) for c in found if c.elements > SMALL)


def elements(program, op):
    return sum(c.elements for c in collectives(program) if c.op == op)


def test_stage_0_all_reduces_and_gathers_nothing():
    program = compiled(0, "came", 1)
    assert elements(program, "all-reduce") >= sum(SHARDED)
    assert elements(program, "reduce-scatter") == 0
    assert elements(program, "all-gather") == 0


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("optimizer", ["came", "adafactor", "adamw", "clipped"])
@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_reduce_scatter_and_parameters_are_gathered_once(stage, optimizer):
    program = compiled(stage, optimizer, 1)
    assert elements(program, "reduce-scatter") == sum(SHARDED)
    assert elements(program, "all-gather") == sum(SHARDED)
    # What is all-reduced: gradients of the vectors, statistics, norms; nothing like a matrix.
    biggest = max(c.elements for c in collectives(program) if c.op == "all-reduce")
    assert biggest <= SMALL
    assert elements(program, "all-to-all") == elements(program, "collective-permute") == 0


def test_explicit_mesh_gives_the_same_collectives():
    auto, explicit = (compiled(2, "came", 1, kind) for kind in (AxisType.Auto, AxisType.Explicit))
    for op in ("all-reduce", "reduce-scatter", "all-gather"):
        assert elements(auto, op) == elements(explicit, op)


def test_stage_1_reduces_once_and_stage_2_in_each_micro_batch():
    assert large(compiled(1, "adamw", 8))["reduce-scatter", False] == len(SHARDED)
    assert large(compiled(1, "adamw", 8))["reduce-scatter", True] == 0
    assert large(compiled(2, "adamw", 8))["reduce-scatter", True] == len(SHARDED)
    assert large(compiled(2, "adamw", 8))["reduce-scatter", False] == 0


def test_state_bytes_are_cut_and_donated():
    """What the program is given shrinks as ZeRO says, and the new state takes its place."""
    unsharded = compiled(0, "adamw", 1).memory_analysis()
    sharded = compiled(2, "adamw", 1).memory_analysis()
    moments = 2 * 4 * sum(SHARDED)
    saved = unsharded.argument_size_in_bytes - sharded.argument_size_in_bytes
    assert saved == moments - moments // DEVICES
    state = sharded.argument_size_in_bytes - 64 // DEVICES * 64 * 4  # all but the batch
    assert sharded.alias_size_in_bytes == state


def test_stage_2_accumulates_less_than_stage_1():
    temp = {s: compiled(s, "adamw", 8).memory_analysis().temp_size_in_bytes for s in (1, 2)}
    assert temp[2] < temp[1]


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", ["came", "muon"])
def test_one_compile_and_no_drift(name, kind):
    """The state of one step has the shardings of the next; nothing is compiled twice."""
    tx = model.OPTIMIZERS[name]()
    zero = shd.Zero(jax.make_mesh((8,), ("data",), axis_types=(kind,)), min_shard_size=0)
    state = zero.init(model.make_state(tx, jnp.float32), tx=tx)
    want = zero.shardings(state, tx=tx)
    traces = []

    def loss_fn(params, batch):
        traces.append(1)
        return model.loss_fn(params, batch)

    step = zero.train_step(loss_fn, tx=tx)
    types = jax.tree.map(jax.typeof, state)
    for i in range(3):
        old = state
        state, _ = step(state, zero.put(model.batch(i)))
        assert all(x.is_deleted() for x in jax.tree.leaves(old))
        if i == 0:
            first = len(traces)
        same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), state, want)
        assert all(jax.tree.leaves(same))
        assert jax.tree.map(jax.typeof, state) == types
    assert len(traces) == first


def test_the_state_is_born_sharded():
    """No program of init holds an unsharded moment on one device."""
    tx = optax.adamw(1e-3)
    zero = zero_of(2)
    make = init(tx)
    abstract = jax.eval_shape(make, jax.random.key(0))
    out = zero.shardings(abstract, tx=tx)
    memory = jax.jit(make, out_shardings=out).lower(jax.random.key(0)).compile().memory_analysis()
    params = sum(math.prod(s) for s in SHAPES.values()) * 4
    moments = 2 * (sum(SHARDED) // DEVICES + 256 + 128) * 4
    assert memory.output_size_in_bytes <= params + moments + 64 * 12
    state = zero.init(make, jax.random.key(0), tx=tx)
    assert state[1][0].mu["w1"].addressable_shards[0].data.shape == (256 // DEVICES, 128)
    assert state[1][0].mu["w1"].sharding.spec == PartitionSpec("data")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_program_names_its_arguments(kind):
    """By these names an audit knows parameters from state."""
    text = compiled(2, "adamw", 1, kind).as_text()
    for name in (r"state[0][\'w0\']", r"state[1][0].mu[\'w0\']", "batch"):
        assert f'op_name="{name}"' in text
