"""Training steps that copy snapshots: nothing of training changes, and what is copied is right."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType

import sharding as shd
from sharding.step import _compiled_step

from ..model import zero_on
from .states import adamw, batch_of, bits, invent_machines, loss_fn, make_state, store_of


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
        return self.store.save(self.i, self.state if state is None else state, extra)

    def assert_restores(self, step, expected, abstract=None):
        found = self.store.restore(self.abstract if abstract is None else abstract)
        assert (found.step, bits(found.state)) == (step, expected)
        return found


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """At stage 3: tests go on where those before them ended."""
    zero = zero_on(8, stage=3)
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
    original = _compiled_step.CompiledStep._program

    def counted(self, *args):
        found = original(self, *args)
        compiled.append(found.run)
        return found

    monkeypatch.setattr(_compiled_step.CompiledStep, "_program", counted)
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

    zero = zero_on(8, stage=1, kind=AxisType.Explicit)
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
    store.close()


def test_on_four_machines(tmp_path, monkeypatch):
    invent_machines(monkeypatch, "aabbccdd")
    zero = zero_on(8, stage=2)
    run = Run(zero, store_of(zero.mesh, tmp_path, replicas=2), microbatches=2)
    batch = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    plain, copying = (s.lower(run.abstract, batch).compile() for s in (run.plain, run.copying))
    num = len(jax.tree.leaves(run.abstract))
    scalars = 4 * num + 2 * 7 / 8 * 4  # checksums and flags
    grown = shd.wire_bytes(copying) - shd.wire_bytes(plain)
    sharded = [x for x in jax.tree.leaves(run.abstract) if not x.sharding.is_fully_replicated]
    assert grown == sum(x.size * x.dtype.itemsize / 8 for x in sharded) + scalars
    for _ in range(3):
        run.step()
        run.save()
    saved, expected = run.i, run.step()
    run.assert_restores(saved, expected)
    run.store.close()
