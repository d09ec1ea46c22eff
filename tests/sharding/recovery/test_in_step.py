"""Training steps that copy snapshots: nothing of training changes, and what is copied is right."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax import P
from jax.sharding import AxisType, NamedSharding

import sharding as shd
from sharding.step import _compiled_step

from ...compilers import need
from .states import adamw, batch_of, bits, invent_machines, loss_fn, make_state, store_of


def zero_of(stage, kind=AxisType.Auto):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    return shd.Zero(mesh, stage, min_shard_size=0)


def step_of(zero, **options):
    """At stage 3 the loss gathers its parameters."""

    def loss(params, batch):
        return loss_fn(zero.gather(params) if zero.stage == 3 else params, batch)

    return zero.train_step(loss, tx=adamw(), **options)


class Run:
    """A store, a step that copies, and beside it the same training without copies."""

    def __init__(self, zero, store, **options):
        self.zero, self.store = zero, store
        self.plain = step_of(zero, **options)
        self.copying = step_of(zero, snapshot=store, **options)
        self.state, self.other = (zero.init(make_state(), tx=adamw()) for _ in range(2))
        self.abstract = zero.abstract_state(make_state(), tx=adamw())
        self.i = 0

    def step(self):
        """One step of both, to the same bits, of which it returns those before it."""
        self.i += 1
        batch, before = self.zero.put(batch_of(self.i)), bits(self.state)
        self.state, metrics = self.copying(self.state, batch)
        self.other, expected = self.plain(self.other, batch)
        assert bits(self.state) == bits(self.other)
        assert float(metrics["loss"]) == float(expected["loss"])
        return before

    def save(self, state=None, extra=None):
        """Under the number of the step."""
        return self.store.save(self.i, self.state if state is None else state, extra)

    def assert_restores(self, step, expected, abstract=None):
        found = self.store.restore(self.abstract if abstract is None else abstract)
        assert (found.step, bits(found.state)) == (step, expected)
        return found


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """At stage 3: tests go on where those before them ended."""
    zero = zero_of(3)
    store = store_of(zero.mesh, tmp_path_factory.mktemp("shared"))
    yield Run(zero, store)
    store.close()


@pytest.fixture
def run(shared):
    shared.step()
    return shared


def test_the_snapshot_is_the_state_before_the_step(run, monkeypatch):
    """One program copies, one does not, however often either runs."""
    compiled = []
    original = _compiled_step.CompiledStep._jitted

    def counted(self, *args):
        found = original(self, *args)
        compiled.append(found)
        return found

    monkeypatch.setattr(_compiled_step.CompiledStep, "_jitted", counted)
    saved = run.store.counts.saved
    for i in range(4):
        if i != 2:
            assert run.save(extra={"position": i})
        before = run.step()
    assert run.assert_restores(run.i - 1, before).extra == {"position": 3}
    assert (run.store.counts.saved, run.store.counts.failed) == (saved + 3, 0)
    compiled = [found for found in compiled if found._cache_size()]
    assert len(set(map(id, compiled))) == 3  # with copies, without them, and that of ``plain``
    assert {found._cache_size() for found in compiled} == {1}


def test_values_beside_the_train_state(run):
    """Random keys and counters that the step does not take are copied in it, too."""
    replicated = NamedSharding(run.zero.mesh, P())
    key = jax.device_put(jax.random.key(7), replicated)
    beside = {"key": key, "count": jax.device_put(np.int32(3), replicated)}
    run.save({"train": run.state, **beside})
    expected = bits({"train": run.state, **beside})
    run.step()
    like = jax.ShapeDtypeStruct((), key.dtype, sharding=replicated)
    abstract = {"train": run.abstract, "key": like, "count": beside["count"]}
    found = run.assert_restores(run.i - 1, expected, abstract)
    assert found.state["key"].dtype == key.dtype


def test_a_part_of_the_train_state(run):
    """Parameters alone are saved; the step donates them all the same."""
    run.save(run.state[0])
    expected = bits(run.state[0])
    run.step()
    run.assert_restores(run.i - 1, expected, run.abstract[0])


def test_a_state_that_no_step_takes(run):
    """It is copied when the next one is saved, or when snapshots are waited for."""
    kept = jax.tree.map(jnp.copy, run.state)  # not what the next step takes
    run.save(kept)
    saved, expected = run.i, run.step()
    jax.tree.map(lambda x: x.delete(), kept)  # copied when the step took another state
    run.store.wait_until_finished()
    run.assert_restores(saved, expected)
    run.save()
    run.store.wait_until_finished()  # no step in between
    run.assert_restores(run.i, bits(run.state))
    run.step()
    count = run.store.counts.saved
    run.save(jax.tree.map(jnp.copy, run.state))
    run.i += 1
    run.save()  # copies the one before
    saved, expected = run.i, run.step()
    run.store.wait_until_finished()
    assert run.store.counts.saved == count + 2
    run.assert_restores(saved, expected)


def test_a_state_of_which_the_step_takes_some_leaves(run):
    """New leaves after the save, each time another one: what is saved is what was given to save."""
    for part in ("mu", "nu"):
        run.save()
        expected = bits(run.state)
        params, (adam, *rest) = run.state
        moments = getattr(adam, part)
        mixed = adam._replace(**{part: moments | {"odd": moments["odd"] * 2}})
        run.state, _ = run.copying((params, (mixed, *rest)), run.zero.put(batch_of(9)))
        run.assert_restores(run.i, expected)
        run.other = jax.tree.map(jnp.copy, run.state)
        run.step()


def test_lost_states_and_failed_steps(run):
    """A state that was donated elsewhere is lost, once; after a failed step the next one copies."""
    saved = run.store.counts.saved
    kept = jax.tree.map(jnp.copy, run.state)
    run.save(kept)
    jax.jit(jnp.negative, donate_argnums=0)(kept[0]["up"])
    with pytest.raises(RuntimeError, match=r"is lost: \[0\]\['up'\] was donated"):
        run.store.wait_until_finished()
    run.store.wait_until_finished()
    assert run.store.counts.saved == saved
    run.step()
    run.save()
    with pytest.raises(ValueError, match="batch"):
        run.copying(run.state, np.zeros((9, 16), np.float32))
    saved, expected = run.i, run.step()
    run.assert_restores(saved, expected)


def test_flax_train_states(tmp_path):
    """``state.replace`` keeps most leaves; random keys are copied as integers.

    A step that does not donate its state may take it twice.
    """

    class KeyedState(TrainState):
        key: jax.Array

    def make():
        params, tx = {"w": jnp.ones((8, 16))}, optax.sgd(0.1)
        return KeyedState.create(apply_fn=None, params=params, tx=tx, key=jax.random.key(3))

    zero = zero_of(1, AxisType.Explicit)
    store = store_of(zero.mesh, tmp_path, interval=3)
    loss = lambda p, x: jnp.mean(jnp.square(p["w"] @ x.T))  # noqa: E731
    step = zero.train_step(loss, snapshot=store, donate=False)
    state = zero.init(make)
    expected = bits(state)
    assert not store.save(2, state)
    assert store.save(3, state)
    count = jax.device_put(state.step + 10, state.step.sharding)
    new, _ = step(state.replace(step=count), zero.put(batch_of(0)))
    again, _ = step(state.replace(step=count), zero.put(batch_of(0)))
    assert bits(new) == bits(again)
    assert int(new.step) == 11
    found = store.restore(zero.abstract_state(make))
    assert (found.step, bits(found.state)) == (3, expected)
    assert store.counts.saved == 1
    lowered = step.lower(zero.abstract_state(make), jax.ShapeDtypeStruct((16, 16), jnp.float32))
    assert len(jax.tree.leaves(lowered.out_info)) > len(jax.tree.leaves(state)) + 1
    store.close()


def test_a_store_of_another_mesh(tmp_path):
    for shape, axes in [((4, 2), ("data", "model")), ((8,), ("x",))]:
        store = store_of(jax.make_mesh(shape, axes), tmp_path)
        with pytest.raises(ValueError, match="snapshot stores states on the mesh"):
            step_of(zero_of(2), snapshot=store)
        store.close()


# --- On several machines --------------------------------------------------------------------------


def shard_bytes(abstract, sharded=True):
    """Bytes of one device's shards of the leaves, of those alone that are sharded."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(abstract)
        if not (sharded and x.sharding.is_fully_replicated)
    )


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


@pytest.mark.parametrize("stage", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_on_four_machines(stage, tmp_path, monkeypatch):
    """Bytes grow by what is sent; on CPUs before a loop, beside which threads would wait for ever.

    Micro-batches are such a loop, with reduce-scatters at stage 2.
    """
    invent_machines(monkeypatch, "aabbccdd")
    zero = zero_of(stage)
    run = Run(zero, store_of(zero.mesh, tmp_path, replicas=2), microbatches=2)
    batch = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    plain, copying = (s.lower(run.abstract, batch).compile() for s in (run.plain, run.copying))
    num = len(jax.tree.leaves(run.abstract))
    scalars = 4 * num + 2 * 7 / 8 * 4  # checksums and flags
    grown = shd.wire_bytes(copying) - shd.wire_bytes(plain)
    assert grown == shard_bytes(run.abstract) + scalars
    text = copying.as_text()
    sends = re.findall(r"%(\S+) = \S+ collective-permute\(", text)
    (loop,) = re.findall(r"%(\S+) = \(.*\) while\(", text)
    assert len(sends) >= 2
    assert set(sends) <= ancestors(text, loop)
    for _ in range(3):
        run.step()
        run.save()
    saved, expected = run.i, run.step()
    run.assert_restores(saved, expected)
    run.store.close()


# --- Programs for TPUs and GPUs -------------------------------------------------------------------

LAYERS, LARGE = 8, 4096


def large_state():
    shapes = {"up": (LARGE, 4 * LARGE), "down": (4 * LARGE, LARGE), "scale": (LARGE,)}
    params = {k: jnp.zeros((LAYERS, *shape)) for k, shape in shapes.items()}
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


@pytest.mark.slow
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
    shard = shard_bytes(abstract, sharded=False)
    before, after = plain.memory_analysis(), copying.memory_analysis()
    assert after.temp_size_in_bytes - before.temp_size_in_bytes < 0.1 * shard
    assert after.alias_size_in_bytes == before.alias_size_in_bytes  # the state is donated
    assert after.output_size_in_bytes - before.output_size_in_bytes < 1e6
    host = after.host_output_size_in_bytes - before.host_output_size_in_bytes
    assert host == pytest.approx(2 * shard, rel=0.01)
    grown = shd.wire_bytes(copying) - shd.wire_bytes(plain)
    assert grown == pytest.approx(shard_bytes(abstract), rel=1e-3)
