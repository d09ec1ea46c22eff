"""Model state beside the parameters: batch statistics, counters, tables, a teacher."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.training import train_state
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sharding as shd

from ...tiers import tiers
from ..model import make_of, microbatches_of
from .runs import F64, TOLERANCE, TX, WIDTH, assert_same, batch, draw, train, train_alone, zero_of

pytestmark = pytest.mark.usefixtures("x64")


class TrainState(train_state.TrainState):
    batch_stats: Any
    ema: Any = None


class Block(nn.Module):
    """A residual block; its batch norm names no axis."""

    @nn.compact
    def __call__(self, x, train):
        # No bias before the norm: its true gradient is zero.
        h = nn.Dense(24, use_bias=False, **F64)(x)
        h = nn.BatchNorm(use_running_average=not train, momentum=0.9, **F64)(h)
        return x + nn.Dense(WIDTH, **F64)(jnp.tanh(h))


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        for _ in range(2):
            x = Block()(x, train)
        return nn.Dense(8, **F64)(x)


def make_state():
    shapes = jax.eval_shape(Classifier().init, jax.random.key(0), jnp.ones((2, WIDTH)))
    stats = {"mean": np.zeros(24), "var": np.ones(24)}
    made = draw(shapes["params"]), {f"Block_{i}": {"BatchNorm_0": stats} for i in range(2)}
    params, stats = jax.tree.map(jnp.array, made)
    return TrainState.create(apply_fn=None, params=params, batch_stats=stats, tx=TX)


def loss_fn(params, batch, stats):
    variables = {"params": params, "batch_stats": stats}
    y, new = Classifier().apply(variables, batch["x"], mutable=["batch_stats"])
    return jnp.mean((y - batch["y"]) ** 2), new["batch_stats"]


@functools.cache
def reference(devices=1, count=1, apart=False):
    """Of one device; ``apart``: each eighth has statistics of its own, and their mean goes on."""

    def of_eighths(params, part, stats):
        eighths = jax.tree.map(lambda x: x.reshape(8, -1, *x.shape[1:]), part)
        every = jax.vmap(loss_fn, (None, 0, None))(params, eighths, stats)
        return jax.tree.map(lambda x: x.mean(0), every)

    def mean(params, batch, state, key):
        total, stats = 0.0, state.batch_stats
        for part in microbatches_of(batch, devices, count):
            loss, stats = (of_eighths if apart else loss_fn)(params, part, stats)
            total += loss / count
        return total, stats

    return train_alone(make_state, mean)


# stage, mesh, kind of axes, micro-batches, options
CASES = {
    "four": (1, AxisType.Auto, 2, {"unsharded": ("BatchNorm", r"^Dense_0/kernel$")}),
    "replicas": (2, AxisType.Explicit, 1, {}),
    "torus": (3, AxisType.Auto, 2, {"gathered_blocks": "Block"}),
}


@functools.cache
def run(mesh, **options):
    """``zero, (state, metrics)`` of a case."""
    stage, kind, count, more = CASES[mesh]
    zero = zero_of(stage, mesh, kind, **more)
    options |= {"coupled": "by_microbatch"} if count > 1 else {}
    loss = shd.Loss(loss_fn, model_state="batch_stats", **options)
    return zero, train(zero, make_state, loss, grad_norm=True, microbatches=count)


@pytest.mark.parametrize("mesh", tiers(CASES, ["four"]))
def test_batch_norm_needs_no_axis_name(mesh):
    zero, found = run(mesh)
    expected = reference(zero.num_devices, CASES[mesh][2])
    assert_same(found, expected)
    for metrics, one in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(metrics["grad_norm"], one["grad_norm"], rtol=TOLERANCE)


def test_batch_norm_of_each_device():
    """It differs, but all devices go on with one value: the mean."""
    _, found = run("replicas", per_device=True)
    assert_same(found, reference(apart=True))
    state = found[0]
    for leaf in jax.tree.leaves(state.batch_stats):
        shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert all(np.array_equal(shards[0], shard) for shard in shards)


@pytest.mark.parametrize("view", ["device", "global"])
@pytest.mark.parametrize("new", [np.zeros, jnp.zeros])
def test_one_program_is_lowered_and_called_with_new_arrays_and_those_of_a_step(new, view):
    traces = []

    def loss_fn(w, batch, mean):
        traces.append(w)
        return jnp.mean((batch @ w) ** 2), 0.9 * mean + batch.mean(0)

    def make():
        return jnp.ones((8, 8)), TX.init(jnp.ones((8, 8)))

    zero = zero_of(2, "four", view=view)
    step = zero.train_step(loss_fn, tx=TX, model_state=True)
    rows, mean = jax.ShapeDtypeStruct((8, 8), float), jax.ShapeDtypeStruct((8,), float)
    step.lower(zero.abstract_state(make, tx=TX), rows, model_state=mean)
    state, mean, once = zero.init(make, tx=TX), new(8), len(traces)
    for _ in range(3):
        state, metrics = step(state, zero.put(np.ones((8, 8))), model_state=mean)
        mean = metrics["model_state"]
    assert len(traces) == once


def test_unsharded_by_path():
    zero, (state, _) = run("four")
    for tree in (state.params, state.opt_state[0].trace):
        assert tree["Dense_0"]["kernel"].sharding.is_fully_replicated
    assert state.opt_state[0].trace["Block_0"]["Dense_0"]["kernel"].sharding.spec == P(None, "data")
    found = zero.describe(state)
    reasons = {row.path: row.note for row in found.rows if row.part == "grads"}
    assert "unsharded='^Dense_0/kernel$'" in reasons["Dense_0/kernel"]
    assert "unsharded='BatchNorm'" in reasons["Block_0/BatchNorm_0/scale"]
    with pytest.raises(ValueError, match="unsharded: pattern '\\(' is not a regular expression"):
        zero_of(2, unsharded="(")
    # The model state is described, too; so is a number in a field.
    assert found.bytes_per_device["model_state"] == 4 * 24 * 8
    found = zero.describe(state.replace(ema=0.9))
    assert found.bytes_per_device["model_state"] == 4 * 24 * 8 + 8


def test_an_axis_name_of_pmap_is_left_out():
    def old_loss(params, x, stats):
        norm = nn.BatchNorm(use_running_average=False, axis_name="batch", **F64)
        y, new = norm.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
        return jnp.mean((y - 1) ** 2), new["batch_stats"]

    x, zeros, ones = batch(0)["x"], jnp.zeros(WIDTH), jnp.ones(WIDTH)
    run = zero_of(0).value_and_grad(old_loss, model_state=True)
    with pytest.raises(ValueError, match=r"leave the collective out .* unbound axis name: batch"):
        run({"scale": ones, "bias": zeros}, x, model_state={"mean": zeros, "var": ones})


def test_evaluation_reads_the_model_state():
    zero, (state, _) = run("torus")

    def predict(params, batch, stats):
        variables = {"params": params, "batch_stats": stats}
        return Classifier().apply(variables, batch["x"], train=False)

    expected, _ = reference(8, 2)
    want = jax.jit(predict)(expected.params, batch(9), expected.batch_stats)
    found = zero.eval_step(predict, model_state="batch_stats")(state, zero.put(batch(9)))
    np.testing.assert_allclose(found, want, rtol=1e-10)
    given = zero.eval_step(predict, model_state=True)
    found = given(state, zero.put(batch(9)), model_state=zero.replicate(expected.batch_stats))
    np.testing.assert_allclose(found, want, rtol=1e-10)


PARAMS = {"w": np.linspace(-1, 1, WIDTH * 8).reshape(WIDTH, 8)}
pair = make_of(lambda: PARAMS, TX)


def quadratic(params, batch):
    return jnp.mean((batch["x"] @ params["w"]) ** 2)


def counting_loss(params, batch, state):
    new = {
        "seen": state["seen"] + batch["x"].shape[0],
        "ratio": 0.5 * state["ratio"] + 0.5 * batch["x"].mean(),
        "steps": state["steps"] + 1,
        "key": jax.random.split(state["key"])[0],
        "flag": ~state["flag"],
        "table": state["table"],
        "narrow": jnp.full((), 0.25),
    }
    return quadratic(params, batch) * state["table"].sum(), new


REDUCTION = {"seen": "sum", "steps": "same"} | dict.fromkeys(
    ("ratio", "key", "flag", "table", "narrow"), "mean"
)


def test_reductions():
    count, zero = 2, zero_of(2, "three")
    start = {
        "seen": jnp.zeros((), jnp.int32),
        "ratio": jnp.zeros(()),
        "steps": jnp.zeros((), jnp.int32),
        "key": jax.random.key(3),
        "flag": jnp.zeros((), bool),
        "table": jnp.linspace(0.1, 0.3, 8),
        "narrow": jnp.zeros((), jnp.float32),
    }
    options = {"model_state": True, "reduction": REDUCTION, "per_device": True}
    loss = shd.Loss(counting_loss, **options)
    step = zero.train_step(loss, tx=TX, microbatches=count)
    state, kept = zero.init(pair, tx=TX), zero.replicate(start)
    expected, key = np.zeros(zero.num_devices), jax.random.key(3)
    for x in np.random.default_rng(0).normal(size=(3, 48, WIDTH)):
        state, metrics = step(state, zero.put({"x": x}), model_state=kept)
        kept = metrics["model_state"]
        for part in x.reshape(zero.num_devices, count, -1, WIDTH).swapaxes(0, 1):
            expected = 0.5 * expected + 0.5 * part.mean((1, 2))
            key = jax.random.split(key)[0]
        expected = np.full(zero.num_devices, expected.mean())
    assert kept["seen"] == 144
    assert kept["steps"] == 3 * count
    assert kept["narrow"] == 0.25
    np.testing.assert_allclose(kept["ratio"], expected[0], rtol=1e-12)
    assert (jax.random.key_data(kept["key"]) == jax.random.key_data(key)).all()
    assert not kept["flag"]  # turned six times
    np.testing.assert_array_equal(kept["table"], start["table"])  # as it came, to the bit
    assert all(kept[name].dtype == x.dtype for name, x in start.items())
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(kept))


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_only_read_is_not_sent(count):
    zero, table = zero_of(2), jnp.ones((64, 64))

    def sent(change, per_device=None):
        def loss_fn(params, batch, table):
            return quadratic(params, batch) * table.mean(), table + 1 if change else table

        loss = shd.Loss(loss_fn, model_state=True, per_device=per_device)
        step = zero.train_step(loss, tx=TX, microbatches=count)
        state = zero.abstract_state(pair, tx=TX)
        return shd.wire_bytes(step.lower(state, batch(0), model_state=table).compile())

    assert sent(True) == sent(False)  # all devices are proven to have the same
    assert sent(True, per_device=True) - sent(False, per_device=True) == 2 * table.nbytes * 7 / 8


STATE, FLAG, NUMBER = {"a": np.ones(4)}, {"a": np.zeros((), bool)}, {"a": 0}
same = lambda a: {"a": a}  # noqa: E731
# The error: the new state, the model state of the call, options of the step.
ERRORS = {
    "names no field": (same, None, {"model_state": "stats"}),
    "the call passes a model state": (same, STATE, {"model_state": False}),
    "the structure of the old one": (lambda a: {"b": a}, STATE, {}),
    r"'a' of shape \(2,\), and got it with \(4,\)": (lambda a: {"a": a[:2]}, STATE, {}),
    # No value is cut short in silence.
    "'a' as float64, and received it as int": (lambda a: {"a": 0.9 * a + 0.5}, NUMBER, {}),
    "'a' is bool, of which there is no sum": (same, FLAG, {"reduction": "sum"}),
}


@pytest.mark.parametrize("message", ERRORS)
def test_bad_model_states_raise(message):
    zero, (new, given, options) = zero_of(2), ERRORS[message]
    loss = lambda p, batch, state=STATE: (quadratic(p, batch), new(state["a"]))  # noqa: E731
    own = {"model_state": True} | options
    own |= {"per_device": True} if "reduction" in own else {}
    state = zero.abstract_state(pair, tx=TX)
    with pytest.raises(ValueError, match=message):
        zero.train_step(shd.Loss(loss, **own), tx=TX).lower(state, batch(0), model_state=given)


def test_a_teacher_that_begins_as_the_parameters():
    """On CPUs an array that is donated and also given ends the process."""

    def averaging(params, batch, ema):
        return quadratic(params, batch), jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, ema, params)

    def make(params):
        own = {"batch_stats": None, "ema": params}
        return TrainState.create(apply_fn=None, params=params, tx=TX, **own)

    zero, x = zero_of(1), zero_of(1).put(batch(0))
    state, step = zero.init(pair, tx=TX), zero.train_step(averaging, tx=TX, model_state=True)
    with pytest.raises(ValueError, match=r"'0/w' of the state and 'model_state/w' of the call"):
        step(state, x, model_state=state[0])
    teacher = zero.replicate(state[0])
    step(state, x, model_state=teacher)
    assert not teacher["w"].is_deleted()
    state, step = zero.init(make, PARAMS), zero.train_step(averaging, model_state="ema")
    alone = make(jax.tree.map(jnp.asarray, PARAMS))
    for same in (state.replace(ema=state.params), jax.device_put(alone, zero.shardings(alone))):
        with pytest.raises(ValueError, match="are one array in memory"):
            step(same, x)
    state, _ = step(state, x)
    np.testing.assert_allclose(state.ema["w"], PARAMS["w"], rtol=1e-12)
