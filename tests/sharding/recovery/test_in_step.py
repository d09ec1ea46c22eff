"""Training steps that copy snapshots: nothing of training changes, and what is copied is right."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import sharding as shd
from sharding.step import _compiled_step

from ...compilers import need
from .states import adamw, batch_of, bits, invent_machines, loss_fn, make_state, store_of

STEPS = 4


def zero_of(stage, kind=AxisType.Auto, shape=(8,)):
    axes = ("replica", "data")[-len(shape) :]
    mesh = jax.make_mesh(shape, axes, axis_types=(kind,) * len(shape))
    replica = "replica" if len(shape) > 1 else None
    return shd.Zero(mesh, stage, replica_axis=replica, min_shard_size=0)


def step_of(zero, **options):
    """At stage 3 the loss gathers its parameters."""

    def loss(params, batch):
        return loss_fn(zero.gather(params) if zero.stage == 3 else params, batch)

    return zero.train_step(loss, tx=adamw(), **options)


def initial(zero):
    return zero.init(make_state(), tx=adamw())


CONFIGS = {
    "stage 0": (0, AxisType.Auto, {}),
    "stage 1": (1, AxisType.Auto, {}),
    "stage 2": (2, AxisType.Auto, {}),
    "stage 3": (3, AxisType.Auto, {}),
    "stage 2, explicit axes": (2, AxisType.Explicit, {}),
    "stage 3, explicit axes": (3, AxisType.Explicit, {}),
    # Reduce-scatters in a loop, beside the sends of the copies.
    "stage 2, micro-batches": (2, AxisType.Auto, {"microbatches": 2}),
}


@functools.cache
def plain_run(stage, kind, microbatches):
    """States and losses without a store: the bits before each step, and the loss of each."""
    zero = zero_of(stage, kind)
    state, step = initial(zero), step_of(zero, microbatches=microbatches)
    states, losses = [bits(state)], []
    for i in range(STEPS):
        state, metrics = step(state, zero.put(batch_of(i)))
        states.append(bits(state))
        losses.append(float(metrics["loss"]))
    return states, losses


# --- The same bits --------------------------------------------------------------------------------


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("stage", "kind", "options"), CONFIGS.values(), ids=CONFIGS)
def test_training_is_the_same_and_the_snapshot_is_the_state_before(
    stage, kind, options, tmp_path, monkeypatch
):
    """On four machines, each step copied but for the first and the last one."""
    invent_machines(monkeypatch, "aabbccdd")
    states, losses = plain_run(stage, kind, options.get("microbatches", 1))
    zero = zero_of(stage, kind)
    store = store_of(zero.mesh, tmp_path, replicas=2)
    step = step_of(zero, snapshot=store, **options)
    state, found = initial(zero), []
    abstract = jax.tree.map(lambda x: x, zero.abstract_state(make_state(), tx=adamw()))
    for i in range(STEPS):
        if i:
            assert store.save(i, state, {"position": i})
        state, metrics = step(state, zero.put(batch_of(i)))
        found.append(float(metrics["loss"]))
        assert bits(state) == states[i + 1]
        if i == 2:
            restored = store.restore(abstract)
            assert restored.step == i
            assert restored.extra == {"position": i}
            assert bits(restored.state) == states[i]
    assert found == losses
    assert store.restore(abstract).step == STEPS - 1
    assert bits(store.restore(abstract).state) == states[STEPS - 1]
    assert (store.counts.saved, store.counts.failed) == (STEPS - 1, 0)
    store.close()


# --- One run of everything else, at stage 3 -------------------------------------------------------


class Run:
    """A store, a step and a state at stage 3, with the bits of the plain run."""

    def __init__(self, folder, **options):
        self.zero = zero_of(3)
        self.store = store_of(self.zero.mesh, folder, **options)
        self.step_fn = step_of(self.zero, snapshot=self.store)
        self.state, self.i = initial(self.zero), 0
        self.abstract = self.zero.abstract_state(make_state(), tx=adamw())
        self.states, _ = plain_run(3, AxisType.Auto, 1)

    def step(self):
        self.state, _ = self.step_fn(self.state, self.zero.put(batch_of(self.i)))
        self.i += 1
        assert bits(self.state) == self.states[self.i]

    def assert_restores(self, step, abstract=None):
        found = self.store.restore(abstract or self.abstract)
        assert found.step == step
        assert bits(found.state) == self.states[step]


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path)
    yield made
    made.store.close()


def test_interval(tmp_path):
    run = Run(tmp_path, interval=3)
    for i in range(1, STEPS + 1):
        run.step()
        assert run.store.save(i, run.state) == (i == 3)
    run.store.wait_until_finished()
    assert run.store.counts.saved == 1
    run.assert_restores(3)


def test_nothing_is_compiled_twice(run, monkeypatch):
    """One program copies, one does not, however often either runs."""
    compiled = []
    original = _compiled_step.CompiledStep._jitted

    def counted(self, *args):
        found = original(self, *args)
        compiled.append(found)
        return found

    monkeypatch.setattr(_compiled_step.CompiledStep, "_jitted", counted)
    for i in range(1, 8):
        run.state, _ = run.step_fn(run.state, run.zero.put(batch_of(i)))
        if i % 3:
            run.store.save(i, run.state)
    assert len(set(map(id, compiled))) == 2
    assert [found._cache_size() for found in compiled] == [1] * 7
    run.store.wait_until_finished()
    assert run.store.counts.saved == 5


def test_values_beside_the_train_state(run):
    """Random keys and counters that the step does not take are copied in it, too."""
    replicated = NamedSharding(run.zero.mesh, P())
    key = jax.device_put(jax.random.key(7), replicated)
    count = jax.device_put(np.int32(3), replicated)
    run.step()
    run.store.save(1, {"train": run.state, "key": key, "count": count})
    run.step()
    run.store.save(2, {"train": run.state, "key": key, "count": count})
    expected = bits({"train": run.state, "key": key, "count": count})
    run.step()
    like = jax.ShapeDtypeStruct((), key.dtype, sharding=replicated)
    found = run.store.restore({"train": run.abstract, "key": like, "count": count})
    assert found.step == 2
    assert bits(found.state) == expected
    assert run.store.counts.saved == 2
    assert found.state["key"].dtype == key.dtype


def test_a_part_of_the_train_state(run):
    """Parameters alone are saved; the step donates them all the same."""
    run.step()
    run.store.save(1, run.state[0])
    expected = bits(run.state[0])
    run.step()
    assert bits(run.store.restore(run.abstract[0]).state) == expected


def test_a_state_that_no_step_takes(run):
    """It is copied when the next one is saved, or when snapshots are waited for."""
    run.step()
    kept = jax.tree.map(jnp.copy, run.state)  # not what the next step takes
    run.store.save(1, kept)
    run.step()
    jax.tree.map(lambda x: x.delete(), kept)  # copied when the step took another state
    run.store.wait_until_finished()
    run.assert_restores(1)
    run.store.save(2, run.state)
    run.store.wait_until_finished()  # no step in between
    run.assert_restores(2)
    run.step()
    run.store.save(3, jax.tree.map(jnp.copy, run.state))
    run.store.save(4, run.state)
    run.step()  # takes 4; 3 was copied by save
    run.store.wait_until_finished()
    assert run.store.counts.saved == 4
    found = run.store.restore(run.abstract)
    assert (found.step, bits(found.state)) == (4, run.states[3])


def test_a_state_of_which_the_step_takes_some_leaves(run):
    """New parameters after the save: what is saved is what was given to save."""
    run.step()
    expected = bits(run.state)
    run.store.save(1, run.state)
    params, opt_state = run.state
    changed = {**params, "gain": jax.device_put(jnp.float32(2), params["gain"].sharding)}
    run.step_fn((changed, opt_state), run.zero.put(batch_of(9)))
    found = run.store.restore(run.abstract)
    assert found.step == 1
    assert bits(found.state) == expected


def test_flax_train_state(tmp_path):
    """``state.replace`` keeps most leaves."""
    train_state = pytest.importorskip("flax.training.train_state")
    zero = zero_of(2)
    store = store_of(zero.mesh, tmp_path)

    def make():
        params, _ = make_state()()
        return train_state.TrainState.create(apply_fn=None, params=params, tx=adamw())

    state = zero.init(make)
    step = zero.train_step(loss_fn, snapshot=store)
    state, _ = step(state, zero.put(batch_of(0)))
    expected = bits(state)
    store.save(1, state)
    count = jax.device_put(state.step + 10, state.step.sharding)
    state, _ = step(state.replace(step=count), zero.put(batch_of(1)))
    assert int(state.step) == 12
    found = store.restore(zero.abstract_state(make))
    assert (found.step, int(found.state.step)) == (1, 1)
    assert bits(found.state) == expected
    store.close()


def test_a_state_that_was_donated_elsewhere(run):
    run.step()
    run.store.save(1, run.state)
    jax.jit(jnp.negative, donate_argnums=0)(run.state[0]["up"])
    with pytest.raises(RuntimeError, match=r"of step 1 is lost: \[0\]\['up'\] was donated"):
        run.store.wait_until_finished()
    run.store.wait_until_finished()  # once
    assert run.store.counts.saved == 0


def test_a_step_that_fails(run):
    """The next one copies the snapshot."""
    run.step()
    run.store.save(1, run.state)
    with pytest.raises(ValueError, match="batch"):
        run.step_fn(run.state, np.zeros((9, 16), np.float32))
    run.step()
    run.assert_restores(1)
    assert run.store.counts.saved == 1


def test_random_keys_in_the_train_state(tmp_path):
    """They are copied as integers, and so they are in the program that ``lower`` shows."""
    train_state = pytest.importorskip("flax.training.train_state")

    class KeyedState(train_state.TrainState):
        key: jax.Array

    def make():
        params = {"w": jnp.ones((8, 16))}
        key = jax.random.key(3)
        return KeyedState.create(apply_fn=None, params=params, tx=optax.sgd(0.1), key=key)

    zero = zero_of(1)
    store = store_of(zero.mesh, tmp_path)
    step = zero.train_step(lambda p, x: jnp.mean(jnp.square(p["w"] @ x.T)), snapshot=store)
    state = zero.init(make)
    expected = bits(state)
    store.save(1, state)
    step(state, zero.put(batch_of(0)))
    found = store.restore(zero.abstract_state(make))
    assert bits(found.state) == expected
    batch = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    lowered = step.lower(zero.abstract_state(make), batch)
    assert len(jax.tree.leaves(lowered.out_info)) > len(jax.tree.leaves(state)) + 1
    store.close()


def test_steps_that_do_not_donate(tmp_path):
    """Evaluation of the same state in between, too."""
    zero = zero_of(3)
    store = store_of(zero.mesh, tmp_path)
    step = step_of(zero, snapshot=store, donate=False)
    state = initial(zero)
    store.save(1, state)
    step(state, zero.put(batch_of(0)))
    step(state, zero.put(batch_of(0)))
    store.wait_until_finished()
    assert store.counts.saved == 1
    found = store.restore(zero.abstract_state(make_state(), tx=adamw()))
    assert bits(found.state) == bits(state)
    store.close()


def test_a_store_of_another_mesh(tmp_path):
    for shape, axes in [((4, 2), ("data", "model")), ((8,), ("x",))]:
        store = store_of(jax.make_mesh(shape, axes), tmp_path)
        with pytest.raises(ValueError, match="snapshot stores states on the mesh"):
            step_of(zero_of(2), snapshot=store)
        store.close()


# --- Bytes ----------------------------------------------------------------------------------------


def shard_bytes(abstract):
    """Bytes of one device's shards of the leaves that are sharded."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(abstract)
        if not x.sharding.is_fully_replicated
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_bytes_on_the_wire_grow_by_what_is_sent(stage, tmp_path, monkeypatch):
    invent_machines(monkeypatch, "aabbccdd")
    zero = zero_of(stage)
    store = store_of(zero.mesh, tmp_path, replicas=2)
    abstract = zero.abstract_state(make_state(), tx=adamw())
    batch = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    plain = shd.wire_bytes(step_of(zero).lower(abstract, batch).compile())
    copying = step_of(zero, snapshot=store).lower(abstract, batch).compile()
    scalars = 4 * len(jax.tree.leaves(abstract)) + 2 * 7 / 8 * 4  # checksums and flags
    assert shd.wire_bytes(copying) - plain == shard_bytes(abstract) + scalars
    store.close()


def ancestors(text, name):
    """The instructions of the entry computation on whose data one depends."""
    entry = text[text.index("\nENTRY") :]
    operands = {
        found[1]: re.findall(r"%([\w.\-]+)", found[2].partition("metadata=")[0])
        for found in re.finditer(r"^ +(?:ROOT )?%([\w.\-]+) = (.*)$", entry, re.M)
    }
    seen, waiting = set(), [name]
    while waiting:
        new = set(operands.get(waiting.pop(), ())) - seen
        seen |= new
        waiting += new
    return seen


def test_copies_are_sent_before_the_step_on_cpus(tmp_path, monkeypatch):
    """Else its threads may wait for each other: some in a loop, some in a send beside it."""
    invent_machines(monkeypatch, "aabbccdd")
    zero = zero_of(2)
    store = store_of(zero.mesh, tmp_path, replicas=2)
    abstract = zero.abstract_state(make_state(), tx=adamw())
    batch = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    step = step_of(zero, snapshot=store, microbatches=2)
    text = step.lower(abstract, batch).compile().as_text()
    sends = re.findall(r"%(\S+) = \S+ collective-permute\(", text)
    (loop,) = re.findall(r"%(\S+) = \(.*\) while\(", text)
    assert len(sends) >= 2
    assert set(sends) <= ancestors(text, loop)
    store.close()


# --- Programs for TPUs and GPUs -------------------------------------------------------------------

LAYERS, LARGE = 8, 4096


def large_state():
    params = {
        "up": jnp.zeros((LAYERS, LARGE, 4 * LARGE)),
        "down": jnp.zeros((LAYERS, 4 * LARGE, LARGE)),
        "scale": jnp.zeros((LAYERS, LARGE)),
    }
    return params, adamw().init(params)


def large_loss(zero):
    @zero.gathered
    def block(params, x):
        hidden = jax.nn.gelu((x * params["scale"][None]) @ params["up"])
        return x + hidden @ params["down"]

    def loss(params, x):
        x, _ = jax.lax.scan(lambda x, p: (block(p, x), None), x, params)
        return jnp.mean(jnp.square(x))

    return loss


@pytest.mark.parametrize("target", ["v5e:4x4", "h100x16"])
def test_steps_for_accelerators(target, tmp_path):
    """Copies to hosts and peers add few bytes on the device, and what is sent on the wire."""
    need(target)
    mesh = shd.targets.mesh(target, (16,), ("data",))
    zero = shd.Zero(mesh, 3)
    store = store_of(mesh, tmp_path, replicas=2)
    abstract = zero.abstract_state(large_state, tx=adamw())
    batch = jax.ShapeDtypeStruct((1024, LARGE), jnp.float32)
    plain, copying = (
        zero.train_step(large_loss(zero), tx=adamw(), snapshot=snapshot)
        .lower(abstract, batch)
        .compile()
        for snapshot in (None, store)
    )
    shard = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(abstract)
    )
    before, after = plain.memory_analysis(), copying.memory_analysis()
    assert after.temp_size_in_bytes - before.temp_size_in_bytes < 0.1 * shard
    assert after.alias_size_in_bytes == before.alias_size_in_bytes  # the state is donated
    assert after.output_size_in_bytes - before.output_size_in_bytes < 1e6
    host = after.host_output_size_in_bytes - before.host_output_size_in_bytes
    assert host == pytest.approx(2 * shard, rel=0.01)
    grown = shd.wire_bytes(copying) - shd.wire_bytes(plain)
    assert grown == pytest.approx(shard_bytes(abstract), rel=1e-3)
