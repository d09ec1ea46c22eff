"""Snapshots of one process: every kind of state comes back bit by bit, and no failure is silent."""

import contextlib
import errno
import fcntl
import os
import pathlib
import re
import shutil
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import optax_ext
import sharding as shd
from sharding.recovery import _peer_checkpoints as peers
from sharding.recovery import _snapshot_writer
from sharding.recovery._replica_program import ReplicaProgram
from sharding.recovery._slot import Slot, open_slot, slots_in
from sharding.recovery._snapshot_writer import SlotLayout

from .states import adamw, bits, damage, invent_machines, make_state, random_like, store_of

pytestmark = pytest.mark.filterwarnings("ignore:the transformation's init")  # codes of small arrays


def zero_states(mesh):
    """Types of the train states of several optimizers, stages and syncs."""

    def state(stage, tx, dtype=jnp.float32, param_specs=None, **options):
        zero = shd.Zero(mesh, stage, axis="data", min_shard_size=0, **options)
        return zero.abstract_state(make_state(tx, dtype), tx=tx, param_specs=param_specs)

    low = optax_ext.low_precision_state(optax.adamw(1e-3), 4, min_size=64)
    specs = {"up": P(None, None, "model"), "down": P(None, "model"), "odd": P("model")}
    specs |= dict.fromkeys(("prime", "bias", "gain"), P())
    masked = optax.masked(adamw(), {**dict.fromkeys(specs, False), "up": True})
    host = {"offload": "optimizer", "offload_min_size": 0}
    return {
        "factored, synchronized": state(1, optax_ext.came(1e-3), sync=shd.sync.powersgd(2)),
        "offloaded, 4 bits": state(3, low, jnp.bfloat16, **host),
        "tensor parallel, masked": state(3, masked, param_specs=specs),
    }


def other_leaves(mesh):
    """Dtypes and shapes that no optimizer has here, sharded and not."""
    shapes = {"sharded": ((4, 6), P("data", "model")), "replicated": ((3, 5), P())}
    shapes |= {"scalar": ((), P()), "empty": ((0, 4), P()), "empty shards": ((4, 0), P("data"))}
    return {
        dtype: {
            name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))
            for name, (shape, spec) in shapes.items()
        }
        for dtype in ("bool", "int4", "float8_e4m3fn", "uint64")
    }


def test_kinds_of_states(open_store, x64):
    """All kinds in one snapshot, restored by another store, bit by bit and where they were."""
    kinds = (AxisType.Auto,) * 3
    cube = jax.make_mesh((2, 2, 2), ("data", "model", "pipe"), axis_types=kinds)
    abstract = zero_states(cube) | {"other leaves": other_leaves(cube)}
    keys = [jax.random.key(5, impl=impl) for impl in ("threefry2x32", "rbg")]
    places = [NamedSharding(cube, spec) for spec in (P(), P("data", "model"))]
    many = [jax.random.split(key, (4, 2)) for key in keys]
    keys = {"random keys": jax.device_put([keys, many], places)}
    state = random_like(abstract) | keys
    abstract |= keys
    open_store(mesh=cube).save(7, state, {"kinds": list(state)})
    found = open_store(mesh=cube).restore(abstract)
    assert (found.step, found.extra) == (7, {"kinds": list(state)})
    assert jax.tree.structure(state) == jax.tree.structure(found.state)
    for kind, saved in state.items():
        restored = found.state[kind]
        assert bits(saved) == bits(restored), kind
        for a, b in zip(jax.tree.leaves(saved), jax.tree.leaves(restored), strict=True):
            assert a.sharding == b.sharding
            assert a.sharding.memory_kind == b.sharding.memory_kind
        memories = {x.sharding.memory_kind for x in jax.tree.leaves(restored)}
        assert ("pinned_host" in memories) == kind.startswith("offloaded")


def layout_of(shape, stage, **options):
    """A mesh of some of the devices, and the types of the state on it."""
    devices = jax.devices()[-int(np.prod(shape)) :]
    mesh = jax.make_mesh(shape, ("replica", "data")[-len(shape) :], devices=devices)
    zero = shd.Zero(mesh, stage, min_shard_size=0, **options)
    return mesh, zero.abstract_state(make_state(), tx=adamw())


def test_other_meshes_and_stages(open_store, tmp_path, monkeypatch):
    """Blocks split among the devices of a machine, received ones, and other boxes than those."""
    invent_machines(monkeypatch, "abcdabcd")
    mesh, abstract = layout_of((2, 4), 3, replica_axis="replica")

    def large(mesh, spec):
        return jax.ShapeDtypeStruct((8, 9, 1024), "f4", sharding=NamedSharding(mesh, spec))

    state = random_like((abstract, large(mesh, P("data"))))
    store = open_store(mesh=mesh, replicas=2)
    store.save(3, state)
    store.wait_until_finished()
    (slot,) = slots_in(tmp_path / "run")
    assert [leaf.grid for leaf in slot.table.leaves if leaf.path == "[1]"] == [(8, 1, 1)]
    monkeypatch.undo()
    host = {"offload": "optimizer", "offload_min_size": 0}
    for shape, stage, options in (((8,), 3, {}), ((2,), 2, host)):
        mesh, abstract = layout_of(shape, stage, **options)
        abstract = abstract, large(mesh, P())
        found = open_store(mesh=mesh).restore(abstract)
        assert (found.step, bits(found.state)) == (3, bits(state))
        for x, like in zip(jax.tree.leaves(found.state), jax.tree.leaves(abstract), strict=True):
            assert x.sharding == like.sharding


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


@pytest.fixture
def make(mesh):
    """A state of a step; all have the same types, so that one program is compiled."""
    sharding = NamedSharding(mesh, P("data"))

    def state(step):
        x = np.arange(8 * 6, dtype=np.float32).reshape(8, 6) + 100 * step
        bias = jax.device_put(x[0], NamedSharding(mesh, P()))
        return {"w": jax.device_put(x, sharding), "b": bias}

    return state


@pytest.fixture
def open_store(mesh, tmp_path):
    """Opens stores, and closes the one before: the next attempt of the run."""
    with contextlib.ExitStack() as stack:

        def open_(**options):
            stack.close()
            store = store_of(folder=tmp_path, **{"mesh": mesh} | options)
            return stack.enter_context(contextlib.closing(store))

        yield open_


def write(store, make, *steps):
    """Saves steps, and waits until they are written."""
    for step in steps:
        store.save(step, make(step))
    store.wait_until_finished()
    return store


def steps_in(tmp_path):
    return sorted(slot.id.step for slot in slots_in(tmp_path / "run"))


def slot_of(tmp_path, step):
    (found,) = (slot.path for slot in slots_in(tmp_path / "run") if slot.id.step == step)
    return found


def assert_restores(store, make, step):
    found = store.restore(make(0))
    assert (found.step, bits(found.state)) == (step, bits(make(step)))
    return found


def test_saves_and_restores(mesh, make, open_store, tmp_path):
    """Of this run; a process that had the folder before may have been another one."""
    store = open_store()
    assert store.latest_step() is None
    with pytest.raises(shd.NoCompleteCheckpoint, match="there are none for this run"):
        store.restore(make(0))
    for step in (1, 2, 5):
        assert store.save(step, make(step), {"position": step})
        assert store.latest_step() == step
    assert store.latest() == (5, None, {"position": 5})
    assert_restores(store, make, 5)
    assert (store.counts.saved, store.counts.failed, store.counts.sent) == (3, 0, 0)
    assert store.counts.written >= 3 * (8 * 6 + 6) * 4
    with pytest.raises(OSError, match=r"an earlier PeerCheckpoints of this process .* its close"):
        store_of(mesh, tmp_path)
    with (tmp_path / "run/0.lock").open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    other = store_of(mesh, tmp_path, run_id="other")
    assert other.latest_step() is None
    other.close(delete=True)
    store_of(mesh, tmp_path, run_id="dropped")  # its folder is free, as in a notebook
    store_of(mesh, tmp_path, run_id="dropped").close()
    store = open_store()
    assert assert_restores(store, make, 5).extra == {"position": 5}
    store.close(delete=True)
    assert list(slots_in(tmp_path / "run")) == []
    store.close()  # again
    with pytest.raises(ValueError, match="latest was called after close"):
        store.latest()
    assert open_store().latest_step() is None


def test_bad_options(mesh, tmp_path):
    folder = tmp_path / "memory"
    for options, message in [
        ({"run_id": ".."}, "run_id must be the name of a folder, got '..'"),
        ({"run_id": "a/b"}, "run_id must be the name of a folder, got 'a/b'"),
        ({"interval": 0}, "interval must be at least 1, got 0"),
        ({"replicas": 2}, "replicas=2 needs as many machines, found 1. Give replicas=1 or less"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            store_of(mesh, folder, **options)
    assert not folder.exists()


UNSAFE = {
    "can be written by others .mode 770.": lambda path: (path.mkdir(), path.chmod(0o770)),
    r"is of user \d+, and this process of user ": lambda path: path.mkdir(mode=0o700),
    "holds the link '0-0.slot'": lambda path: (path.mkdir(), link(path / "0-0.slot")),
    "holds the link '0.lock'": lambda path: (path.mkdir(), link(path / "0.lock", hard=True)),
    "is a link or a file": lambda path: path.symlink_to(path.parent),
}


def link(path, hard=False):
    """A link to a file of someone else, which must stay as it is."""
    target = path.parent.with_name("precious")
    target.write_bytes(bytes(9000))
    path.hardlink_to(target) if hard else path.symlink_to(target)


@pytest.mark.parametrize("problem", UNSAFE)
def test_unsafe_folders(mesh, tmp_path, monkeypatch, problem):
    UNSAFE[problem](tmp_path / "run")
    if "user" in problem:
        me = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    message = f"in process 0: .*run {problem}.*snapshots need a folder that this user alone can"
    with pytest.raises(OSError, match=message):
        store_of(mesh, tmp_path)
    assert not (tmp_path / "run" / "0-1.slot").exists()


def test_files_are_opened_without_following_links(tmp_path):
    """A link that is made after the folder was checked."""
    slot = Slot(tmp_path / "run" / "0-0.slot")
    slot.path.parent.mkdir()
    link(slot.path)
    for call in (slot.clear, lambda: slot.reserve(5000), lambda: open_slot(slot.path)):
        with pytest.raises(OSError, match="symbolic links"):
            call()
    assert (tmp_path / "precious").read_bytes() == bytes(9000)


def test_a_folder_that_another_process_cannot_use(mesh, tmp_path, monkeypatch):
    """Raises here, too, and the folder is free."""
    with monkeypatch.context() as patch:
        answers = lambda mine: [mine, "no room"] if mine is None else [mine]  # noqa: E731
        patch.setattr(peers, "gather_json", answers)
        with pytest.raises(OSError, match="cannot use its folder in process 1: no room"):
            store_of(mesh, tmp_path)
    store_of(mesh, tmp_path).close()
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700


def test_save_in_one_process_alone(make, open_store, tmp_path, monkeypatch):
    """The program waits for the others forever; the thread does not, and names those behind."""

    never = types.SimpleNamespace(is_ready=lambda: False, addressable_data=lambda _: never)
    store = open_store()
    monkeypatch.setattr(store._writer, "_num_mates", 2)
    (tmp_path / "run" / "1.lock").write_text("7 3")
    monkeypatch.setattr(_snapshot_writer, "_GIVE_UP_SECONDS", 0.05)
    count_as(monkeypatch, lambda _: never)
    store.save(4, make(4))
    message = r"process 0 called save\(4\), and for 0.05 s .* Of this machine process 7 is behind"
    with pytest.warns(UserWarning, match=message), pytest.raises(RuntimeError, match=message):
        store.save(5, make(5))
    assert store.counts.saved == 0


def test_values_that_cannot_be_saved(make, open_store):
    """Such steps are not taken, nor steps that do not grow."""
    store = open_store()
    for step, state, message in [
        (5.0, make(1), "step must be a whole number, got 5.0"),
        (-5, make(1), "step must not be negative, got -5"),
        (1, {"w": None}, "the state of step 1 has no arrays: got {'w': None}"),
    ]:
        with pytest.raises(ValueError, match=message):
            store.save(step, state)
    with pytest.raises(TypeError, match="not JSON serializable"):
        store.save(1, make(1), {"x": np.zeros(2)})
    store.save(1, make(1))
    for step in (1, 0):
        with pytest.raises(ValueError, match=f"step {step} does not come after step 1, saved last"):
            store.save(step, make(step))
    other = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    bad = {
        r"\['n'\] is int without a sharding on the mesh: .* belong to extra": 3,
        r"\['n'\] is on the mesh": jax.device_put(np.zeros(4), NamedSharding(other, P())),
        r"\['n'\] has dtype complex64, which .* real and imaginary": jax.device_put(
            np.zeros(8, np.complex64), make(1)["w"].sharding
        ),
    }
    for message, leaf in bad.items():
        for call in (lambda state: store.save(2, state), store.restore):
            with pytest.raises(TypeError, match=message):
                call(make(1) | {"n": leaf})
    assert_restores(store, make, 1)
    assert_restores(write(store, make, 2), make, 2)


def test_another_state(make, open_store):
    store = write(open_store(), make, 1)
    w, b = (make(0)[name] for name in ("w", "b"))
    half = jax.device_put(np.zeros((8, 6), np.float16), w.sharding)
    for state, message in [
        ({"w": w, "b": b, "c": b}, r"in 1 leaves: \['c'\] is not in the snapshot"),
        ({"w": w}, r"in 1 leaves: \['b'\] is not in the state"),
        ({"w": half, "b": b}, r"\['w'\] is float32\[8, 6\], not float16\[8, 6\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            store.restore(state)
    assert_restores(store, make, 1)


def test_descriptions(make, open_store, monkeypatch):
    store = open_store()
    expected = store.describe(make(0))
    assert write(store, make, 1).describe() == expected
    assert (expected.stored, expected.sent) == ((8 * 6 * 4 + 6 * 4,), (0,))
    assert "1 machine; two snapshots take" in str(expected)
    invent_machines(monkeypatch, "aabbccdd")
    found = open_store(replicas=2).describe(make(0))
    assert found.holders == ((0, 1), (1, 0), (2, 3), (3, 2))
    assert found.sent == (8 * 6 * 4 // 4,) * 4
    assert found.stored == (2 * 8 * 6 * 4 // 4 + 6 * 4,) * 4
    assert found.host_bytes == 2 * found.stored[0]
    assert "a: also on b" in str(found)
    assert "Any 1 of the machines can be lost without a shard." in str(found)


def count_as(monkeypatch, committed):
    """What programs count becomes ``committed(count)``."""
    call = ReplicaProgram.__call__

    def counted(*args):
        replicas = call(*args)
        return replicas._replace(committed=committed(replicas.committed))

    monkeypatch.setattr(ReplicaProgram, "__call__", counted)


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_full_memory_is_warned_of_once_and_training_goes_on(make, open_store, monkeypatch):
    store = write(open_store(), make, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(Slot, "reserve", full)
        store.save(3, make(3))
        known = r"No space left.* The last complete one that is known here is that of step 2\."
        with pytest.warns(UserWarning, match=f"step 3 was not written .*{known}") as warned:
            store.save(4, make(4))
        assert len(warned) == 1
        with pytest.warns(UserWarning, match="step 4 was not written"):
            store.wait_until_finished()
    assert (store.counts.saved, store.counts.failed) == (2, 2)
    store.wait_until_finished()  # without a warning
    assert_restores(store, make, 2)
    write(store, make, 5)
    assert (store.counts.saved, store.counts.failed) == (3, 2)
    assert_restores(open_store(), make, 5)


def test_the_last_complete_snapshot_stays(make, open_store, monkeypatch):
    """Wherever a write fails, and the next one, and the process after; if there is one."""
    store = open_store()
    for first, point in ((1, "clear"), (11, "reserve"), (21, "commit")):
        write(store, make, first, first + 1, first + 2)
        with monkeypatch.context() as patch:
            patch.setattr(Slot, point, full)
            for step in (first + 3, first + 4):
                with pytest.warns(UserWarning, match=f"step {step} was not written"):
                    write(store, make, step)
        store = open_store()
        assert_restores(store, make, first + 2)


def test_no_process_overwrites_the_last_complete_snapshot(make, open_store, tmp_path, monkeypatch):
    """While others have not written the one after it, which the program counts."""
    for committed, expected in ((8, [2, 3]), (7, [1, 3])):
        store = write(open_store(), make, 1)
        store.save(2, make(2))
        with monkeypatch.context() as patch:
            count_as(patch, lambda _, committed=committed: jnp.int32(committed))
            write(store, make, 3)
        assert steps_in(tmp_path) == expected
        store.close(delete=True)


def test_damaged_while_the_store_is_open(make, open_store, tmp_path, monkeypatch):
    """Restored by the same attempt: what is known to be complete is what was restored."""
    store = write(open_store(), make, 1, 2, 3)
    damage(slot_of(tmp_path, 3))
    assert store.restore(make(0)).step == 2
    assert steps_in(tmp_path) == [2]  # 3 is discarded
    with monkeypatch.context() as patch:
        patch.setattr(Slot, "commit", full)
        with pytest.warns(UserWarning, match="is that of step 2"):
            write(store, make, 3)
    assert_restores(store, make, 2)


def test_attempts_grow(make, open_store, tmp_path, monkeypatch):
    """Even within a second, or if clocks differ, of which all processes take that of the first."""
    found = []
    for i in range(4):
        if i == 3:
            clock = lambda value: [2**40, 7] if isinstance(value, int) else [value]  # noqa: E731
            monkeypatch.setattr(peers, "gather_json", clock)
        store = open_store()
        monkeypatch.undo()
        write(store, make, i)
        found.append(max(slot.id.attempt for slot in slots_in(tmp_path / "run")))
    assert found == sorted(set(found))
    assert found[2] < found[3] == 2**40


def test_waiting_for_the_writer_is_counted_and_reported_once(make, open_store, monkeypatch):
    """Not that for the device, which is training."""

    def slow(call):
        def slowed(*args):
            time.sleep(0.4)
            return call(*args)

        return slowed

    store = open_store()
    with monkeypatch.context() as patch:
        count_as(patch, lambda x: types.SimpleNamespace(addressable_data=slow(x.addressable_data)))
        write(store, make, 1, 2)
    assert store.counts.waited < 0.4
    assert store.counts.slow == 0
    monkeypatch.setattr(SlotLayout, "fill", slow(SlotLayout.fill))
    store.save(3, make(3))
    with pytest.warns(UserWarning, match="until the snapshot before was written"):
        store.save(4, make(4))
    write(store, make, 5)  # without a warning
    assert store.counts.waited > 1.1
    assert store.counts.slow == 2


def test_files_of_processes_that_are_gone_are_removed(make, open_store, tmp_path):
    """Once a snapshot of this attempt is complete, and not before: they may have the last one."""
    write(open_store(), make, 1)
    stale = tmp_path / "run" / "3-1.slot"
    shutil.move(slot_of(tmp_path, 1), stale)  # of a machine that had four processes
    store = open_store()
    assert_restores(store, make, 1)
    store.wait_until_finished()
    assert stale.exists()
    write(write(store, make, 2), make, 3)
    names = sorted(path.name for path in stale.parent.iterdir())
    assert names == ["0-0.slot", "0-1.slot", "0.lock"]


def test_saves_take_no_more_memory(mesh, open_store):
    """A leak of one snapshot in each save would be seven times the bound."""
    sharded = NamedSharding(mesh, P("data"))
    state = {"w": jax.device_put(np.ones((8, 1 << 16), np.float32), sharded)}
    store, size, resident = open_store(), 8 << 18, []
    for steps in (range(20), range(20, 80)):
        for step in steps:
            store.save(step, state)
        store.wait_until_finished()
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        resident.append(pages * os.sysconf("SC_PAGE_SIZE"))
    assert resident[1] - resident[0] < 8 * size
    assert (store.counts.saved, store.counts.written) == (80, 80 * size)
