"""Snapshots of one process: every kind of state comes back bit by bit, and no failure is silent."""

import errno
import itertools
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import optax_ext
import sharding as shd
from sharding.recovery._slot import Slot, slots_in

from ...compilers import need
from ...flax_nnx import nnx
from .states import adamw, bits, init_params, invent_machines, make_state, random_like, store_of

pytestmark = pytest.mark.filterwarnings("ignore:the transformation's init")  # codes of small arrays


# --- Every kind of state --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cube():
    """A mesh for data, tensor and pipeline parallelism."""
    return jax.make_mesh((2, 2, 2), ("data", "model", "pipe"), axis_types=(AxisType.Auto,) * 3)


def zero_states(mesh):
    """Types of the train states of several optimizers, stages and syncs."""

    def state(stage, tx, dtype=jnp.float32, *, param_specs=None, **options):
        zero = shd.Zero(mesh, stage, axis="data", min_shard_size=0, **options)
        return zero.abstract_state(make_state(tx, dtype), tx=tx, param_specs=param_specs)

    low = {
        f"{n} bits": optax_ext.low_precision_state(optax.adamw(1e-3), n, min_size=64)
        for n in (4, 8)
    }
    specs = {"up": P(None, None, "model"), "down": P(None, "model"), "odd": P("model")}
    specs |= dict.fromkeys(("prime", "bias", "gain"), P())
    host = {"offload": "optimizer", "offload_min_size": 0}
    return {
        "stage 0": state(0, adamw()),
        "stage 3, factored": state(3, optax_ext.came(1e-3)),
        "offloaded": state(2, adamw(), **host),
        "offloaded, 8 bits": state(3, low["8 bits"], jnp.bfloat16, **host),
        **{name: state(2, tx, jnp.bfloat16) for name, tx in low.items()},
        "master weights": state(3, optax_ext.master_weights(adamw()), jnp.bfloat16),
        "synchronized by powersgd": state(1, adamw(), sync=shd.sync.powersgd(2)),
        "tensor parallel": state(3, adamw(), param_specs=specs),
        "with hyperparameters": state(2, optax.inject_hyperparams(optax.adamw)(1e-3)),
        "masked": state(2, optax.masked(adamw(), {**dict.fromkeys(specs, False), "up": True})),
    }


def flax_states(mesh):
    train_state = pytest.importorskip("flax.training.train_state")
    zero = shd.Zero(mesh, 2, axis="data", min_shard_size=0)

    def make():
        return train_state.TrainState.create(apply_fn=None, params=init_params(), tx=adamw())

    found = {"flax": zero.abstract_state(make)}
    if nnx is not None:
        state = jax.eval_shape(lambda: nnx.state(nnx.Linear(8, 6, rngs=nnx.Rngs(0))))
        found["nnx"] = jax.tree.map(
            lambda x: x.update(sharding=NamedSharding(mesh, P("data") if x.ndim else P())), state
        )
    return found


def pipeline_state(mesh):
    """Layers in rows of stages, and the optimizer's state of them."""
    pipeline = shd.Pipeline(
        mesh,
        shd.pipeline.one_f_one_b(stages=2, microbatches=2),
        num_layers=3,  # uneven: a row without a layer
        embed=lambda shared, x: x @ shared["in"],
        block=lambda w, x, _: x + jnp.tanh(x @ w),
        head=lambda shared, x, _: (jnp.sum((x @ shared["out"]) ** 2), x.shape[0]),
    )

    def make():
        layers = jnp.ones((3, 8, 8))
        params = pipeline.stack({"in": jnp.ones((3, 8)), "layers": layers, "out": jnp.ones(8)})
        return params, adamw().init(params)

    zero = shd.Zero(mesh, 2, axis="data", min_shard_size=0)
    params = jax.eval_shape(make)[0]
    return zero.abstract_state(make, tx=adamw(), param_specs=pipeline.param_specs(params))


def other_leaves(mesh):
    """Dtypes and shapes that no optimizer has here, sharded and not."""
    shapes = {"sharded": ((4, 6), P("data", "model")), "replicated": ((3, 5), P())}
    shapes |= {"scalar": ((), P()), "empty": ((0, 4), P()), "empty shards": ((4, 0), P("data"))}
    dtypes = ["bool", "int4", "uint4", "int8", "uint32", "float16", "float8_e4m3fn"]

    def leaf(dtype, shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))

    return {d: {name: leaf(d, *each) for name, each in shapes.items()} for d in dtypes}


def random_keys(mesh):
    """Of each kind, one and many."""
    found = {}
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        one = jax.random.key(5, impl=impl)
        many = jax.random.split(jax.random.key(6, impl=impl), (4, 2))
        found[impl] = {
            "one": jax.device_put(one, NamedSharding(mesh, P())),
            "many": jax.device_put(many, NamedSharding(mesh, P("data", "model"))),
        }
    found["raw"] = jax.device_put(jax.random.PRNGKey(3), NamedSharding(mesh, P()))
    return found


def typed(tree):
    """The types of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


KINDS = [
    *("stage 0", "stage 3, factored", "offloaded", "offloaded, 8 bits", "4 bits", "8 bits"),
    *("master weights", "synchronized by powersgd", "tensor parallel", "with hyperparameters"),
    *("masked", "flax", "nnx", "pipeline", "other leaves", "random keys"),
]


@pytest.fixture(scope="module")
def round_trip(cube, tmp_path_factory):
    """All kinds in one snapshot, restored by another store: two programs instead of forty."""
    abstract = zero_states(cube) | flax_states(cube) | {"pipeline": pipeline_state(cube)}
    abstract["other leaves"] = other_leaves(cube)
    state = random_like(abstract) | {"random keys": random_keys(cube)}
    abstract["random keys"] = typed(state["random keys"])
    folder = tmp_path_factory.mktemp("kinds")
    store = store_of(cube, folder)
    store.save(7, state, {"kinds": KINDS})
    store.wait_until_finished()
    store.close()
    store = store_of(cube, folder)
    found = store.restore(abstract)
    store.close()
    assert (found.step, found.extra) == (7, {"kinds": KINDS})
    return state, found.state


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_states(kind, round_trip):
    saved, restored = round_trip
    if kind == "nnx" and kind not in saved:
        pytest.skip("flax.nnx does not import")
    saved, restored = saved[kind], restored[kind]
    assert jax.tree.structure(saved) == jax.tree.structure(restored)
    assert bits(saved) == bits(restored)
    for a, b in zip(jax.tree.leaves(saved), jax.tree.leaves(restored), strict=True):
        assert a.sharding == b.sharding
        assert a.sharding.memory_kind == b.sharding.memory_kind
    memories = {x.sharding.memory_kind for x in jax.tree.leaves(restored)}
    assert ("pinned_host" in memories) == kind.startswith("offloaded")


def test_restored_keys_draw_the_same(round_trip):
    saved, restored = (tree["random keys"] for tree in round_trip)
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        draws = [jax.random.bits(tree[impl]["one"]) for tree in (saved, restored)]
        assert draws[0] == draws[1]


def test_wide_leaves(cube, tmp_path, x64):
    sharding = NamedSharding(cube, P("data"))
    state = random_like(
        {
            d: jax.ShapeDtypeStruct((4, 3), jnp.dtype(d), sharding=sharding)
            for d in ("float64", "int64", "uint64")
        }
    )
    store = store_of(cube, tmp_path)
    store.save(1, state)
    assert bits(store.restore(typed(state)).state) == bits(state)
    store.close()


# --- Other meshes and stages ----------------------------------------------------------------------

LAYOUTS = {
    "8 devices, stage 3": ((8,), 3, {}),
    "8 devices, stage 0": ((8,), 0, {}),
    "4x2, hybrid": ((2, 4), 3, {"replica_axis": "replica"}),
    "4 devices, stage 1": ((4,), 1, {}),
    "2 devices, stage 2, offloaded": ((2,), 2, {"offload": "optimizer", "offload_min_size": 0}),
    "1 device": ((1,), 2, {}),
}


def layout_of(name):
    """A mesh of some of the devices, and the types of the state on it."""
    shape, stage, options = LAYOUTS[name]
    devices = jax.devices()[-int(np.prod(shape)) :]
    mesh = jax.make_mesh(shape, ("replica", "data")[-len(shape) :], devices=devices)
    zero = shd.Zero(mesh, stage, min_shard_size=0, **options)
    return mesh, zero.abstract_state(make_state(), tx=adamw())


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(
    ("source", "target"), [p for p in itertools.permutations(LAYOUTS, 2) if "stage 3" in str(p)]
)
def test_other_meshes_and_stages(source, target, tmp_path):
    mesh, abstract = layout_of(source)
    state = random_like(abstract)
    store = store_of(mesh, tmp_path)
    store.save(3, state)
    store.close()
    mesh, abstract = layout_of(target)
    store = store_of(mesh, tmp_path)
    found = store.restore(abstract)
    assert found.step == 3
    assert bits(found.state) == bits(state)
    for x, like in zip(jax.tree.leaves(found.state), jax.tree.leaves(abstract), strict=True):
        assert x.sharding == like.sharding
    store.close()


def test_several_machines_of_another_mesh(tmp_path, monkeypatch):
    """Blocks split among the devices of a machine, received ones, and other boxes than those."""
    invent_machines(monkeypatch, "abcdabcd")
    mesh, abstract = layout_of("4x2, hybrid")
    large = {"w": jax.ShapeDtypeStruct((8, 9, 1024), jnp.float32)}
    sharded = NamedSharding(mesh, P("data"))
    state = random_like((abstract, jax.tree.map(lambda x: x.update(sharding=sharded), large)))
    store = store_of(mesh, tmp_path, replicas=2)
    store.save(3, state)
    store.close()
    (slot,) = slots_in(tmp_path / "run")
    (leaf,) = (leaf for leaf in slot.table.leaves if leaf.path == "[1]['w']")
    assert leaf.grid == (8, 1, 1)
    monkeypatch.undo()
    mesh, abstract = layout_of("8 devices, stage 3")
    sharded = NamedSharding(mesh, P(None, None, "data"))
    large = {
        "w": jax.ShapeDtypeStruct((8, 9, 1024), jnp.float32, sharding=NamedSharding(mesh, P()))
    }
    store = store_of(mesh, tmp_path)
    found = store.restore((abstract, large))
    assert bits(found.state) == bits(state)
    store.close()


# --- A small state, for the rest ------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


@pytest.fixture
def make(mesh):
    """A state of a step; all have the same types, so that one program is compiled."""
    sharding = NamedSharding(mesh, P("data"))

    def state(step):
        x = np.arange(8 * 6, dtype=np.float32).reshape(8, 6) + 100 * step
        return {
            "w": jax.device_put(x, sharding),
            "b": jax.device_put(x[0], NamedSharding(mesh, P())),
        }

    return state


@pytest.fixture
def open_store(mesh, tmp_path):
    """Opens stores, and closes the one before: the next attempt of the run."""
    stores = []

    def open_(**options):
        if stores:
            stores.pop().close()
        stores.append(store_of(mesh, tmp_path, **options))
        return stores[-1]

    yield open_
    while stores:
        stores.pop().close()


def slot_of(tmp_path, step):
    """The file that has a step."""
    (found,) = (slot.path for slot in slots_in(tmp_path / "run") if slot.id.step == step)
    return found


def damage(path):
    """Flips a bit of a block."""
    with path.open("r+b") as file:
        file.seek(4096)
        byte = file.read(1)[0]
        file.seek(4096)
        file.write(bytes([byte ^ 1]))


def test_saves_and_restores(make, open_store):
    store = open_store()
    assert store.latest_step() is None
    with pytest.raises(shd.NoCompleteCheckpoint, match="there are none for this run"):
        store.restore(make(0))
    for step in (1, 2, 5):
        assert store.save(step, make(step), {"position": step})
        assert store.latest_step() == step
    assert store.latest().extra == {"position": 5}
    assert store.latest().state is None
    assert bits(store.restore(make(0)).state) == bits(make(5))
    assert (store.counts.saved, store.counts.failed, store.counts.sent) == (3, 0, 0)
    assert store.counts.written >= 3 * (8 * 6 + 6) * 4
    store = open_store()
    found = store.restore(make(0))
    assert (found.step, found.extra) == (5, {"position": 5})
    assert bits(found.state) == bits(make(5))


def test_the_state_may_be_donated_at_once(make, open_store):
    store = open_store()
    for step in (1, 2, 3):
        state = make(step)
        store.save(step, state)
        jax.jit(lambda x: jax.tree.map(jnp.negative, x), donate_argnums=0)(state)
    assert bits(store.restore(make(0)).state) == bits(make(3))


def test_interval(make, open_store):
    store = open_store(interval=4)
    assert [step for step in range(10) if store.save(step, make(step))] == [0, 4, 8]
    assert store.latest_step() == 8


def test_other_runs_are_not_seen(mesh, make, open_store, tmp_path):
    open_store().save(1, make(1))
    other = store_of(mesh, tmp_path, run_id="other")
    assert other.latest_step() is None
    other.close(delete=True)
    assert open_store().latest_step() == 1


def test_deleted_snapshots_are_gone(make, open_store, tmp_path):
    store = open_store()
    store.save(1, make(1))
    store.save(2, make(2))
    store.close(delete=True)
    assert list(slots_in(tmp_path / "run")) == []
    store.close()  # again
    assert open_store().latest_step() is None


# --- Errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"run_id": "a/b"}, "run_id must be the name of a folder, got 'a/b'"),
        ({"run_id": "/tmp"}, "run_id must be the name of a folder, got '/tmp'"),
        ({"run_id": ""}, "run_id must be the name of a folder, got ''"),
        ({"run_id": "."}, "run_id must be the name of a folder, got '.'"),
        ({"run_id": ".."}, "run_id must be the name of a folder, got '..'"),
        ({"interval": 0}, "interval must be at least 1, got 0"),
        ({"replicas": 2}, "replicas=2 needs as many machines, found 1. Give replicas=1 or less"),
        ({"replicas": 0}, "replicas=0 needs as many machines, found 1"),
        ({"placement": "star"}, "placement must be one of ('group', 'ring'), got 'star'"),
    ],
)
def test_bad_options(mesh, tmp_path, options, message):
    folder = tmp_path / "memory"
    with pytest.raises(ValueError) as error:  # noqa: PT011
        store_of(mesh, folder, **options)
    assert message in str(error.value)
    assert not folder.exists()


def test_another_process_uses_the_folder(mesh, make, open_store, tmp_path):
    store = open_store()
    with pytest.raises(OSError, match=r"another process uses .*: machines, and runs of the same"):
        store_of(mesh, tmp_path)
    store.save(1, make(1))  # the first one goes on
    assert store.latest_step() == 1


def test_steps_must_grow(make, open_store):
    store = open_store()
    store.save(3, make(3))
    for step in (3, 2):
        with pytest.raises(ValueError, match=f"step {step} does not come after step 3, saved last"):
            store.save(step, make(step))
    store.save(4, make(4))
    assert store.restore(make(0)).step == 4
    with pytest.raises(ValueError, match="step 4 does not come after step 4"):
        store.save(4, make(4))
    store = open_store()
    assert store.restore(make(0)).step == 4
    store.save(5, make(5))
    assert store.latest_step() == 5


def test_a_value_that_json_cannot_hold(make, open_store):
    store = open_store()
    for extra in ({"x": np.zeros(2)}, {1, 2}, {"key": jax.random.key(0)}):
        with pytest.raises(TypeError, match="not JSON serializable"):
            store.save(1, make(1), extra)
    store.save(1, make(1), {"x": [1, None, "é", 0.1, True]})  # that step was not taken
    assert store.latest().extra == {"x": [1, None, "é", 0.1, True]}


def test_leaves_that_are_not_on_the_mesh(make, open_store):
    store = open_store()
    store.save(1, make(1))
    other = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    bad = {
        r"\['n'\] is int without a sharding on the mesh: .* belong to extra": 3,
        r"\['n'\] is ndarray without a sharding": np.zeros(3),
        r"\['n'\] is on the mesh": jax.device_put(np.zeros(4), NamedSharding(other, P())),
    }
    for message, leaf in bad.items():
        with pytest.raises(TypeError, match=message):
            store.save(2, make(1) | {"n": leaf})
        with pytest.raises(TypeError, match=message):
            store.restore(make(1) | {"n": leaf})
    assert store.latest_step() == 1


def test_another_state(mesh, make, open_store):
    store = open_store()
    store.save(1, make(1))
    w, b = (make(0)[name] for name in ("w", "b"))
    half = jax.device_put(np.zeros((8, 6), np.float16), w.sharding)
    short = jax.device_put(np.zeros((8, 5), np.float32), w.sharding)
    for state, message in [
        ({"w": w, "b": b, "c": b}, r"in 1 leaves: \['c'\] is not in the snapshot"),
        ({"w": w}, r"in 1 leaves: \['b'\] is not in the state"),
        ({"w": half, "b": b}, r"\['w'\] is float32\[8, 6\], not float16\[8, 6\]"),
        ({"w": short, "b": b}, r"\['w'\] is float32\[8, 6\], not float32\[8, 5\]"),
        ([w, b], r"in 4 leaves: "),
    ]:
        with pytest.raises(ValueError, match=message):
            store.restore(state)
    assert bits(store.restore(make(0)).state) == bits(make(1))


def test_describe_needs_a_state(make, open_store):
    store = open_store()
    with pytest.raises(ValueError, match="describe needs a state before the first save"):
        store.describe()
    expected = store.describe(make(0))
    store.save(1, make(1))
    assert store.describe() == expected
    assert expected.stored == (8 * 6 * 4 + 6 * 4,)
    assert expected.sent == (0,)
    assert "1 machine; two snapshots take" in str(expected)


def test_plans_of_other_machines(mesh, make, open_store, monkeypatch):
    invent_machines(monkeypatch, "aabbccdd")
    found = open_store(replicas=2).describe(make(0))
    assert found.holders == ((0, 1), (1, 0), (2, 3), (3, 2))
    assert found.sent == (8 * 6 * 4 // 4,) * 4
    assert found.stored == (2 * 8 * 6 * 4 // 4 + 6 * 4,) * 4
    assert found.host_bytes == 2 * found.stored[0]
    assert [found.recovery_probability(k) for k in (1, 2, 3)] == [1.0, 2 / 3, 0.0]
    assert "a: also on b" in str(found)
    assert "Recovers from lost machines: 1: 100.0%, 2: 66.7%, 3: 0.0%, 4: 0.0%." in str(found)


def test_compile_only_targets_are_planned(tmp_path):
    need("v5e:2x4")
    mesh = shd.targets.mesh("v5e:4x4", (16,), ("data",))
    abstract = shd.Zero(mesh, 3).abstract_state(make_state(), tx=adamw())
    store = shd.PeerCheckpoints(mesh, tmp_path / "memory", run_id="run")
    for call in (
        lambda: store.save(1, abstract),
        lambda: store.restore(abstract),
        store.latest_step,
        store.wait_until_finished,
    ):
        with pytest.raises(ValueError, match="the mesh is of a compile-only target, for which"):
            call()
    assert len(store.describe(abstract).machines) > 1
    store.close()
    assert not (tmp_path / "memory").exists()


# --- Failures -------------------------------------------------------------------------------------


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_full_memory_is_warned_of_once_and_training_goes_on(make, open_store, monkeypatch):
    store = open_store()
    store.save(1, make(1))
    store.save(2, make(2))
    store.wait_until_finished()
    with monkeypatch.context() as patch:
        patch.setattr(Slot, "reserve", full)
        store.save(3, make(3))
        with pytest.warns(UserWarning, match="step 3 was not written .*No space left") as warned:
            store.save(4, make(4))
        assert len(warned) == 1
        assert "The last complete one that is known here is that of step 2." in str(
            warned[0].message
        )
        with pytest.warns(UserWarning, match="step 4 was not written"):
            store.wait_until_finished()
    assert (store.counts.saved, store.counts.failed) == (2, 2)
    store.wait_until_finished()  # without a warning
    assert bits(store.restore(make(0)).state) == bits(make(2))
    store.save(5, make(5))
    store.wait_until_finished()
    assert (store.counts.saved, store.counts.failed) == (3, 2)
    assert bits(open_store().restore(make(0)).state) == bits(make(5))


def test_full_memory_from_the_start(make, open_store, monkeypatch):
    store = open_store()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        store.save(1, make(1))
        with pytest.warns(UserWarning, match="known here is none"):
            store.wait_until_finished()
    assert store.latest_step() is None


@pytest.mark.parametrize("point", ["clear", "reserve", "commit"])
def test_the_last_complete_snapshot_stays(make, open_store, monkeypatch, point):
    """Wherever a write fails, and the next one, and the process after."""
    store = open_store()
    for step in (1, 2, 3):
        store.save(step, make(step))
    store.wait_until_finished()
    with monkeypatch.context() as patch:
        patch.setattr(Slot, point, full)
        for step in (4, 5):
            store.save(step, make(step))
            with pytest.warns(UserWarning, match=f"step {step} was not written"):
                store.wait_until_finished()
    store = open_store()
    found = store.restore(make(0))
    assert (found.step, bits(found.state)) == (3, bits(make(3)))


def test_an_error_that_is_not_of_memory_is_raised(make, open_store, monkeypatch):
    store = open_store()
    store.save(1, make(1))
    store.wait_until_finished()

    def broken(*_):
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(Slot, "commit", broken)
        store.save(2, make(2))
        with pytest.raises(ZeroDivisionError, match="a bug"):
            store.wait_until_finished()
    store.save(3, make(3))
    assert store.latest_step() == 3


def test_a_damaged_snapshot_is_not_restored(make, open_store, tmp_path):
    """The one before is, what is newer is discarded, and steps are saved again."""
    store = open_store()
    for step in (1, 2, 3):
        store.save(step, make(step))
    store.wait_until_finished()
    damage(slot_of(tmp_path, 3))
    store = open_store()
    found = store.restore(make(0))
    assert (found.step, bits(found.state)) == (2, bits(make(2)))
    store.wait_until_finished()
    assert sorted(slot.id.step for slot in slots_in(tmp_path / "run")) == [2, 2]
    store.save(3, make(30))
    assert bits(open_store().restore(make(0)).state) == bits(make(30))


def test_damaged_while_the_store_is_open(make, open_store, tmp_path, monkeypatch):
    """Restored by the same attempt: what is known to be complete is what was restored."""
    store = open_store()
    for step in (1, 2, 3):
        store.save(step, make(step))
    store.wait_until_finished()
    damage(slot_of(tmp_path, 3))
    assert store.restore(make(0)).step == 2
    assert [slot.id.step for slot in slots_in(tmp_path / "run")] == [2]  # 3 is discarded
    with monkeypatch.context() as patch:
        patch.setattr(Slot, "commit", full)
        store.save(3, make(3))
        with pytest.warns(UserWarning, match="is that of step 2"):
            store.wait_until_finished()
    assert bits(store.restore(make(0)).state) == bits(make(2))


def test_nothing_intact(make, open_store, tmp_path):
    store = open_store()
    store.save(1, make(1))
    store.save(2, make(2))
    store.wait_until_finished()
    for step in (1, 2):
        damage(slot_of(tmp_path, step))
    with pytest.raises(shd.NoCompleteCheckpoint) as error:
        open_store().restore(make(0))
    for step in (1, 2):
        assert f"step {step} has no intact replica of shards of ['b'] (1 of 1)" in str(error.value)


def test_newer_steps_of_an_older_attempt_are_discarded(make, open_store, tmp_path):
    store = open_store()
    store.save(8, make(8))
    store.save(9, make(9))
    store = open_store()  # trains from the start: nothing is restored
    store.save(1, make(1))
    store.wait_until_finished()
    assert sorted(slot.id.step for slot in slots_in(tmp_path / "run")) == [1, 9]
    found = open_store().restore(make(0))
    assert (found.step, bits(found.state)) == (1, bits(make(1)))
    assert {slot.id.step for slot in slots_in(tmp_path / "run")} <= {1, 9}


def test_attempts_grow(make, open_store, tmp_path):
    """Even if they follow each other within a second, or the clock was set back."""
    found = []
    for i in range(3):
        store = open_store()
        store.save(i, make(i))
        store.wait_until_finished()
        found.append(max(slot.id.attempt for slot in slots_in(tmp_path / "run")))
    assert found == sorted(set(found))


def test_files_of_processes_that_are_gone_are_removed(make, open_store, tmp_path):
    """Once a snapshot of this attempt is complete, and not before: they may have the last one."""
    store = open_store()
    store.save(1, make(1))
    store.wait_until_finished()
    stale = tmp_path / "run" / "3-1.slot"
    shutil.move(slot_of(tmp_path, 1), stale)  # of a machine that had four processes
    store = open_store()
    assert bits(store.restore(make(0)).state) == bits(make(1))
    store.wait_until_finished()
    assert stale.exists()
    for step in (2, 3):
        store.save(step, make(step))
        store.wait_until_finished()
    assert not stale.exists()
    assert sorted(path.name for path in stale.parent.iterdir()) == [
        "0-0.slot",
        "0-1.slot",
        "0.lock",
    ]


def test_killed_while_writing(make, open_store, tmp_path):
    """A file without a header, as a killed process leaves it."""
    store = open_store()
    store.save(1, make(1))
    store.save(2, make(2))
    store.wait_until_finished()
    Slot(slot_of(tmp_path, 2)).clear()
    found = open_store().restore(make(0))
    assert (found.step, bits(found.state)) == (1, bits(make(1)))


# --- Memory ---------------------------------------------------------------------------------------


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_hundred_saves_take_no_more_memory(mesh, open_store):
    """A leak of one snapshot in each save would be a hundred times the bound."""
    sharded = NamedSharding(mesh, P("data"))
    state = {"w": jax.device_put(np.ones((8, 1 << 16), np.float32), sharded)}
    store, size = open_store(), 8 << 18
    for step in range(20):
        store.save(step, state)
    store.wait_until_finished()
    before = resident_bytes()
    for step in range(20, 120):
        store.save(step, state)
    store.wait_until_finished()
    assert resident_bytes() - before < 8 * size
    assert store.counts.saved == 120
    assert store.counts.written == 120 * size
