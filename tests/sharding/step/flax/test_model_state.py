"""Model state beside the parameters: batch statistics, counters, tables, a teacher."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training import train_state
from jax.sharding import AxisType

import optax_ext
import sharding as shd

from ... import model

pytestmark = pytest.mark.usefixtures("x64")
STEPS, BATCH, TOLERANCE = 4, 16, 1e-12
F64 = {"param_dtype": jnp.float64}


class TrainState(train_state.TrainState):
    batch_stats: Any
    ema: Any = None


class Block(nn.Module):
    """A residual block; its batch norm names no axis."""

    @nn.compact
    def __call__(self, x, train):
        # No bias before the norm: its true gradient is zero.
        h = nn.Dense(32, use_bias=False, **F64)(x)
        h = nn.BatchNorm(use_running_average=not train, momentum=0.9, **F64)(h)
        return x + nn.Dense(16, **F64)(jnp.tanh(h))


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        for _ in range(2):
            x = Block()(x, train)
        return nn.Dense(8, **F64)(x)


CLASSIFIER = Classifier()
TX = optax_ext.came(1e-3, weight_decay=0.1)


def batch(step):
    """Eighths that differ in scale by up to 30: their own statistics are not those of all."""
    rng = np.random.default_rng(step)
    scale = np.repeat(10.0 ** rng.uniform(-1, 0.5, 8), BATCH // 8)[:, None]
    return {"x": rng.normal(size=(BATCH, 16)) * scale, "y": rng.normal(size=(BATCH, 8))}


def make_state():
    variables = CLASSIFIER.init(jax.random.key(0), jnp.ones((2, 16)))
    stats = jax.tree.map(lambda x: x.astype(jnp.float64), variables["batch_stats"])
    params = variables["params"]
    return TrainState.create(apply_fn=None, params=params, batch_stats=stats, tx=TX)


def loss_fn(params, batch, stats):
    variables = {"params": params, "batch_stats": stats}
    y, new = CLASSIFIER.apply(variables, batch["x"], mutable=["batch_stats"])
    return jnp.mean((y - batch["y"]) ** 2), new["batch_stats"]


def microbatches_of(batch, devices, count):
    """Micro-batch j of the mesh: the j-th parts of all devices' shards."""

    def split(x):
        parts = x.reshape(devices, count, -1, *x.shape[1:]).swapaxes(0, 1)
        return parts.reshape(count, -1, *x.shape[1:])

    parts = jax.tree.map(split, batch)
    return [jax.tree.map(lambda x, i=i: x[i], parts) for i in range(count)]


@functools.cache
def reference(devices=1, count=1):
    """``(params, opt_state, batch_stats), losses, norms`` of one device."""

    @jax.jit
    def grad(state, part):
        return jax.value_and_grad(loss_fn, has_aux=True)(state.params, part, state.batch_stats)

    state, losses, norms = make_state(), [], []
    for i in range(STEPS):
        total, grads = 0.0, None
        for part in microbatches_of(batch(i), devices, count):
            (loss, stats), new = grad(state, part)
            state = state.replace(batch_stats=stats)
            total += loss / count
            new = jax.tree.map(lambda g: g / count, new)
            grads = new if grads is None else jax.tree.map(jnp.add, grads, new)
        norms.append(float(optax.tree.norm(grads)))
        losses.append(float(total))
        state = state.apply_gradients(grads=grads)
    return (state.params, state.opt_state, state.batch_stats), losses, norms


def mesh_of(shape=(8,), names=("data",), kind=AxisType.Auto):
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names), devices=devices)


def train(zero, **kwargs):
    state = zero.init(make_state)
    step = zero.train_step(loss_fn, model_state="batch_stats", grad_norm=True, **kwargs)
    losses, norms = [], []
    for i in range(STEPS):
        state, metrics = step(state, zero.put(batch(i)))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    return state, losses, norms


CASES = [
    # stage, mesh, micro-batches, options
    (0, mesh_of, 1, {}),
    (1, functools.partial(mesh_of, (4,)), 2, {}),
    (2, functools.partial(mesh_of, kind=AxisType.Explicit), 1, {}),
    (2, functools.partial(mesh_of, (2, 4), ("copy", "data")), 2, {"replica_axis": "copy"}),
    (3, mesh_of, 1, {"gathered_blocks": "Block"}),
    (3, functools.partial(mesh_of, kind=AxisType.Explicit), 2, {"gathered_blocks": "Block"}),
    (3, functools.partial(mesh_of, (2, 4), ("a", "b")), 1, {"axis": ("a", "b")}),
    (2, functools.partial(mesh_of, (1,)), 1, {}),
]


@pytest.mark.slow(keep=2)
@pytest.mark.filterwarnings("ignore:stage 3 with a loss that gathers no layer")
@pytest.mark.parametrize(("stage", "mesh", "count", "options"), CASES)
def test_batch_norm_needs_no_axis_name(stage, mesh, count, options):
    zero = shd.Zero(mesh(), stage=stage, min_shard_size=0, **options)
    state, losses, norms = train(zero, microbatches=count)
    expected, expected_losses, expected_norms = reference(zero.num_devices, count)
    found = (state.params, state.opt_state, state.batch_stats)
    distance, leaf = model.worst_leaf(found, expected)
    assert distance < TOLERANCE, leaf
    np.testing.assert_allclose(losses, expected_losses, rtol=TOLERANCE)
    np.testing.assert_allclose(norms, expected_norms, rtol=TOLERANCE)


def test_batch_norm_of_each_device_is_another_thing():
    zero = shd.Zero(mesh_of(), stage=2, min_shard_size=0)
    state, _, _ = train(zero, sync_batch_norm=False)
    found = (state.params, state.opt_state, state.batch_stats)
    assert model.worst_leaf(found, reference()[0])[0] > 1e-3
    # But all devices go on with one value.
    for leaf in jax.tree.leaves(state.batch_stats):
        shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert all(np.array_equal(shards[0], shard) for shard in shards)


def test_an_axis_name_of_pmap_means_the_mesh():
    class Old(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.BatchNorm(use_running_average=False, axis_name="batch", **F64)(x)

    def old_loss(params, batch, stats):
        y, new = Old().apply(
            {"params": params, "batch_stats": stats}, batch["x"], mutable=["batch_stats"]
        )
        return jnp.mean((y - 1) ** 2), new["batch_stats"]

    variables = Old().init(jax.random.key(0), jnp.ones((2, 16)))
    for name in ("data", "batch"):
        zero = shd.Zero(mesh_of(names=(name,)), stage=0, axis=name)
        run = jax.jit(zero.value_and_grad(old_loss, model_state=True))
        (_, stats), _ = run(variables["params"], batch(0), model_state=variables["batch_stats"])
        mean = stats["BatchNorm_0"]["mean"]
        np.testing.assert_allclose(mean, 0.01 * batch(0)["x"].mean(0), rtol=1e-5)


def test_evaluation_reads_the_model_state():
    zero = shd.Zero(mesh_of(), stage=2, min_shard_size=0)
    state, _, _ = train(zero)

    def predict(params, batch, stats):
        variables = {"params": params, "batch_stats": stats}
        return CLASSIFIER.apply(variables, batch["x"], train=False)

    params, _, stats = reference()[0]
    expected = predict(params, batch(9), stats)
    found = zero.eval_step(predict, model_state="batch_stats")(state, zero.put(batch(9)))
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    given = zero.eval_step(predict, model_state=True)
    found = given(state, zero.put(batch(9)), model_state=zero.replicate(stats))
    np.testing.assert_allclose(found, expected, rtol=1e-10)


# --- Reductions, arguments, cost ------------------------------------------------------------------

PARAMS = {"w": jnp.ones((16, 8))}
SGD = optax.sgd(0.1)


def pair():
    return dict(PARAMS), SGD.init(PARAMS)


def counting_loss(params, batch, state):
    new = {
        "seen": state["seen"] + batch["x"].shape[0],
        "ratio": 0.5 * state["ratio"] + 0.5 * batch["x"].mean(),
        "steps": state["steps"] + 1,
        "key": jax.random.split(state["key"])[0],
        "flag": ~state["flag"],
        "table": state["table"],
    }
    scale = state["table"].sum()
    return jnp.mean((batch["x"] @ params["w"] * scale) ** 2), new


def counters():
    return {
        "seen": jnp.zeros((), jnp.int32),
        "ratio": jnp.zeros(()),
        "steps": jnp.zeros((), jnp.int32),
        "key": jax.random.key(3),
        "flag": jnp.zeros((), bool),
        "table": jnp.linspace(0.1, 0.3, 8),
    }


REDUCTION = {
    "seen": "sum",
    "ratio": "mean",
    "steps": "same",
    "key": "mean",
    "flag": "mean",
    "table": "mean",
}


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize(("devices", "count"), [(8, 1), (4, 2), (3, 1)])
def test_reductions(devices, count, stage):
    zero = shd.Zero(mesh_of((devices,)), stage=stage, min_shard_size=0)
    options = {"model_state": True, "model_state_reduction": REDUCTION, "microbatches": count}
    step = zero.train_step(counting_loss, tx=SGD, **options)
    state, kept = zero.init(pair, tx=SGD), zero.replicate(counters())
    xs = np.random.default_rng(0).normal(size=(3, 48, 16))
    for x in xs:
        state, metrics = step(state, zero.put({"x": x}), model_state=kept)
        kept = metrics["model_state"]
    expected, key = np.zeros(devices), jax.random.key(3)
    for x in xs:
        for part in x.reshape(devices, count, -1, 16).swapaxes(0, 1):
            expected = 0.5 * expected + 0.5 * part.mean((1, 2))
            key = jax.random.split(key)[0]
        expected = np.full(devices, expected.mean())
    assert kept["seen"] == 144
    assert kept["steps"] == 3 * count
    np.testing.assert_allclose(kept["ratio"], expected[0], rtol=1e-12)
    assert (jax.random.key_data(kept["key"]) == jax.random.key_data(key)).all()
    assert kept["flag"] == (count == 1)  # turned 3 or 6 times
    np.testing.assert_array_equal(kept["table"], counters()["table"])  # as it came, to the bit
    assert {x.dtype for x in jax.tree.leaves(kept)} == {
        x.dtype for x in jax.tree.leaves(counters())
    }
    for leaf in jax.tree.leaves({k: v for k, v in kept.items() if k != "key"}):
        assert leaf.sharding.is_fully_replicated


def test_what_is_only_read_is_not_sent():
    zero = shd.Zero(mesh_of(), stage=2, min_shard_size=0)
    table = jnp.ones((64, 64))

    def reading(params, batch, table):
        return jnp.mean((batch["x"] @ params["w"]) ** 2) * table.mean(), table

    def changing(params, batch, table):
        return jnp.mean((batch["x"] @ params["w"]) ** 2) * table.mean(), table + 1

    def sent(loss, count):
        step = zero.train_step(loss, tx=SGD, model_state=True, microbatches=count)
        state = zero.init(pair, tx=SGD)
        compiled = step.lower(state, {"x": jnp.ones((16, 16))}, model_state=table).compile()
        return shd.wire_bytes(compiled)

    for count in (1, 2):
        assert sent(changing, count) - sent(reading, count) > table.nbytes
        assert sent(reading, count) < table.nbytes


def test_several_fields_make_a_dict():
    def with_teacher(params, batch, state):
        teacher = jnp.tanh(batch["x"] @ state["ema"]["w"])
        loss, stats = loss_fn(params, batch, state["batch_stats"])
        decayed = jax.tree.map(lambda x: 0.9 * x, state["ema"])
        new = {"batch_stats": stats, "ema": decayed}
        return loss + jnp.mean(teacher**2), (new, {"teacher": teacher})

    def make():
        return make_state().replace(ema={"w": jnp.full((16, 4), 0.5)})

    zero = shd.Zero(mesh_of(), stage=2, min_shard_size=0)
    state = zero.init(make)
    step = zero.train_step(with_teacher, has_aux=True, model_state=("batch_stats", "ema"))
    state, metrics = step(state, zero.put(batch(0)))
    np.testing.assert_allclose(
        metrics["aux"]["teacher"], np.tanh(batch(0)["x"] @ np.full((16, 4), 0.5))
    )
    np.testing.assert_allclose(state.ema["w"], 0.45)
    assert state.step == 1


ERRORS = [
    ({"model_state": "stats"}, {}, "names no field"),
    ({"model_state": True}, {}, "the call passes none"),
    ({}, {"model_state": 1.0}, "the call passes a model state"),
    ({"model_state": True, "model_state_reduction": "max"}, {}, "'mean', 'sum', 'same'"),
    (
        {"model_state": True, "model_state_reduction": {"a": "sum"}},
        {"model_state": {"b": 1.0}},
        "does not match",
    ),
    ({"rngs": "each"}, {}, "per_example"),
    ({"rngs": "numbered"}, {}, "per_example"),
]


@pytest.mark.parametrize(("options", "given", "message"), ERRORS)
def test_bad_model_states_raise(options, given, message):
    zero = shd.Zero(mesh_of(), stage=2)
    state, x = zero.init(pair, tx=SGD), zero.put({"x": np.ones((8, 16))})

    def run():
        step = zero.train_step(lambda params, batch, s: (params["w"].sum(), s), tx=SGD, **options)
        return step(state, x, **given)

    with pytest.raises(ValueError, match=message):
        run()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda s: {"other": s["a"]}, "must have the structure of the old one"),
        (lambda s: {"a": s["a"][:2]}, r"'a' of shape \(2,\), and got it with \(4,\)"),
    ],
)
def test_a_model_state_comes_back_as_it_was(returned, message):
    zero = shd.Zero(mesh_of(), stage=2)
    step = zero.train_step(
        lambda params, batch, s: (params["w"].sum(), returned(s)), tx=SGD, model_state=True
    )
    state = zero.init(pair, tx=SGD)
    with pytest.raises(ValueError, match=message):
        step(state, zero.put({"x": np.ones((8, 16))}), model_state={"a": np.ones(4)})


def test_it_is_described():
    zero = shd.Zero(mesh_of(), stage=2, min_shard_size=0)
    state = zero.init(make_state)
    found = zero.describe(state)
    stats = [row for row in found.rows if row.part == "model_state"]
    assert {row.path for row in stats} == {
        f"batch_stats/Block_{i}/BatchNorm_0/{name}" for i in range(2) for name in ("mean", "var")
    }
    assert found.bytes_per_device["model_state"] == 4 * 32 * 8
    assert "model_state" in str(found)


# --- Random keys ----------------------------------------------------------------------------------


def dropped(params, batch, key):
    mask = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    return jnp.mean((jnp.where(mask, batch["x"], 0) @ params["w"]) ** 2)


def dropped_by_example(params, batch, keys):
    return jnp.mean(jax.vmap(lambda x, key: dropped(params, {"x": x[None]}, key))(batch["x"], keys))


def losses_of(loss, devices, count, rngs):
    zero = shd.Zero(mesh_of((devices,)), stage=2, min_shard_size=0)
    step = zero.train_step(loss, tx=SGD, rngs=rngs, microbatches=count)
    state, losses = zero.init(pair, tx=SGD), []
    for i in range(3):
        x = np.random.default_rng(i).normal(size=(16, 16))
        state, metrics = step(state, zero.put({"x": x}), jax.random.fold_in(jax.random.key(1), i))
        losses.append(float(metrics["loss"]))
    return losses


def test_keys_depend_on_the_number_of_the_micro_batch_alone():
    expected = losses_of(dropped, 8, 1, True)
    for devices, count in [(4, 2), (2, 4), (1, 8)]:
        np.testing.assert_allclose(losses_of(dropped, devices, count, True), expected, rtol=1e-12)
    assert not np.allclose(losses_of(dropped, 4, 1, True), expected, rtol=1e-3)


def test_keys_of_examples_do_not_depend_on_the_devices():
    keys = [jax.random.fold_in(jax.random.key(1), i) for i in range(3)]
    x = np.random.default_rng(0).normal(size=(16, 16))
    per_example = jax.vmap(jax.random.fold_in, (None, 0))(keys[0], jnp.arange(16))
    first = dropped_by_example(PARAMS, {"x": x}, per_example)
    expected = losses_of(dropped_by_example, 8, 1, "per_example")
    np.testing.assert_allclose(expected[0], first, rtol=1e-12)
    for devices, count in [(8, 2), (4, 1), (2, 4), (1, 1)]:
        found = losses_of(dropped_by_example, devices, count, "per_example")
        np.testing.assert_allclose(found, expected, rtol=1e-12)


# --- Unsharded parameters -------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 3])
def test_unsharded_by_path(stage):
    zero = shd.Zero(
        mesh_of(),
        stage=stage,
        min_shard_size=0,
        unsharded=("BatchNorm", r"^Dense_0/kernel$"),
        gathered_blocks="Block",
    )
    state, _, _ = train(zero)
    found = (state.params, state.opt_state, state.batch_stats)
    assert model.worst_leaf(found, reference()[0])[0] < TOLERANCE
    assert state.params["Dense_0"]["kernel"].sharding.is_fully_replicated
    assert state.opt_state[0].mu["Dense_0"]["kernel"].sharding.is_fully_replicated
    assert not state.opt_state[0].mu["Block_0"]["Dense_0"]["kernel"].sharding.is_fully_replicated
    reasons = {row.path: row.note for row in zero.describe(state).rows if row.part == "grads"}
    assert "unsharded='^Dense_0/kernel$'" in reasons["Dense_0/kernel"]
    assert "unsharded='BatchNorm'" in reasons["Block_0/BatchNorm_0/scale"]


def test_a_pattern_that_is_none_raises():
    with pytest.raises(ValueError, match="unsharded: pattern '\\(' is not a regular expression"):
        shd.Zero(mesh_of(), unsharded="(")


# --- What goes wrong ------------------------------------------------------------------------------


def reading(params, batch, state):
    return jnp.mean((batch["x"] @ params["w"]) ** 2), state


def test_a_teacher_that_begins_as_the_parameters():
    """On CPUs an array that is donated and also given ends the process."""
    zero = shd.Zero(mesh_of(), stage=2)
    state, batch = zero.init(pair, tx=SGD), zero.put({"x": np.ones((8, 16))})
    step = zero.train_step(reading, tx=SGD, model_state=True)
    with pytest.raises(ValueError, match=r"'0/w' of the state and 'model_state/w' of the call"):
        step(state, batch, model_state=state[0])
    teacher = zero.replicate(state[0])
    state, metrics = step(state, batch, model_state=teacher)
    assert metrics["model_state"]["w"].shape == (16, 8)
    assert not teacher["w"].is_deleted()


@pytest.mark.parametrize("shared", ["the same array", "the same memory"])
def test_an_average_that_begins_as_the_parameters(shared):
    def averaging(params, batch, ema):
        loss = jnp.mean((batch["x"] @ params["w"]) ** 2)
        return loss, jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, ema, params)

    def make(params):
        return TrainState.create(
            apply_fn=None, params=params, batch_stats=None, ema=params, tx=optax.sgd(0.1)
        )

    zero = shd.Zero(mesh_of(), stage=2)
    state, batch = zero.init(make, PARAMS), zero.put({"x": np.ones((8, 16))})
    step = zero.train_step(averaging, model_state="ema")
    same = state.replace(ema=state.params)
    if shared == "the same memory":
        alone = make(jax.tree.map(jnp.asarray, PARAMS))
        same = jax.device_put(alone, zero.shardings(alone))
    with pytest.raises(ValueError, match="are one array in memory"):
        step(same, batch)
    state, _ = step(state, batch)


def test_no_value_is_cut_short_in_silence():
    zero = shd.Zero(mesh_of(), stage=2)
    state, batch = zero.init(pair, tx=SGD), zero.put({"x": np.ones((8, 16))})

    def averaging(params, batch, ema):
        return params["w"].sum(), {"ema": 0.9 * ema["ema"] + 0.5}

    step = zero.train_step(averaging, tx=SGD, model_state=True)
    with pytest.raises(ValueError, match="'ema' as float64, and received it as int"):
        step(state, batch, model_state={"ema": 0})
    step = zero.train_step(reading, tx=SGD, model_state=True, model_state_reduction="sum")
    with pytest.raises(ValueError, match="'flag' is bool, of which there is no sum"):
        step(state, batch, model_state={"flag": np.zeros((), bool)})


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_keys_and_states_on_one_device_are_moved(kind):
    zero = shd.Zero(mesh_of(kind=kind), stage=2)
    batch = zero.put({"x": np.ones((8, 16))})
    key, table = jax.device_put((jax.random.key(1), jnp.ones(3)), jax.devices()[0])

    def loss_fn(params, batch, table, key):
        loss = jnp.mean((batch["x"] @ params["w"]) ** 2) + jax.random.uniform(key)
        return loss * table.sum(), table

    options = {"rngs": True, "model_state": True}
    step = zero.train_step(loss_fn, tx=SGD, **options)
    state, metrics = step(zero.init(pair, tx=SGD), batch, key, model_state=table)
    grad = zero.value_and_grad(loss_fn, **options)
    (loss, _), _ = grad(zero.init(pair, tx=SGD)[0], batch, key, model_state=table)
    np.testing.assert_allclose(loss, metrics["loss"], rtol=1e-12)
    with pytest.raises(ValueError, match="rngs requires a key"):
        grad(state[0], batch, model_state=table)


def test_a_number_in_a_field_is_described():
    class Decaying(train_state.TrainState):
        decay: float = 0.9

    zero = shd.Zero(mesh_of(), stage=2)
    state = Decaying.create(apply_fn=None, params=PARAMS, tx=SGD)
    assert zero.describe(state).bytes_per_device["model_state"] == 8
