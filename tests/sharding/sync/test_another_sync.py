"""Residuals belong to the sum of gradients: on other numbers of devices, and under another sync."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from sharding import sync

from .. import model

WIDTH, SGD = 32, optax.sgd(1.0)
POWERSGD = sync.powersgd(2, min_compression=1.0)
pytestmark = pytest.mark.usefixtures("x64")

BATCH = model.gradients({"w": (WIDTH, WIDTH)}, 0)
GRADIENT = BATCH["w"].mean(0)  # whatever the parameters are
loss, make_state = model.linear_loss, model.make_of(lambda: {"w": np.zeros((WIDTH, WIDTH))}, SGD)


def zero_of(method, *shape, **options):
    names = ("replica", "data")[-len(shape) :]
    options |= {"replica_axis": "replica"} if len(shape) > 1 else {}
    return model.zero_on(*shape, names=names, **({"stage": 1, "sync": method} | options))


def train(zero, state, steps):
    step = zero.train_step(loss, tx=SGD)
    for _ in range(steps):
        state, _ = step(state, zero.put(BATCH))
    return state


def owed(state):
    """The sum of all residuals: what the parameters still lack."""
    error = np.asarray(state[1].sync_state.arrays["w"]["error"])  # (devices, shards, ...)
    if error.shape[1] > 1:  # shards along one dim of the parameter
        dim = next(d for d in (2, 3) if error.shape[d] < WIDTH)
        return np.concatenate(list(error.sum(0)), axis=dim - 2)
    return error.sum((0, 1))


def moved(new, state, devices):
    """The state as restored on another mesh, and resized."""
    target = new.abstract_state(make_state, tx=SGD, sync_devices=devices)
    restored = jax.tree.map(lambda x, t: jax.device_put(np.asarray(x), t.sharding), state, target)
    return new.resize_sync(restored)


@pytest.mark.parametrize(
    ("method", "shapes"),
    [
        (POWERSGD, [(8,), (4,), (8,), (2,)]),
        (sync.top_k(0.05, min_size=1), [(2,), (8,), (4,)]),
        (sync.top_k(0.05, min_size=1), [(4, 2), (2, 2)]),
    ],
    ids=["powersgd", "top_k", "replicas"],
)
def test_moved_and_owed_are_the_sum_of_gradients_across_resizes(method, shapes):
    state, steps, devices = None, 0, 0
    for shape in shapes:
        zero = zero_of(method, *shape)
        state = zero.init(make_state, tx=SGD) if state is None else moved(zero, state, devices)
        state, steps, devices = train(zero, state, 4), steps + 4, shape[0]
        assert np.linalg.norm(owed(state)) > 0.1 * np.linalg.norm(GRADIENT)
        error = np.linalg.norm(-np.asarray(state[0]["w"]) + owed(state) - steps * GRADIENT)
        assert error < 1e-12 * steps * np.linalg.norm(GRADIENT), shape


def test_the_estimate_of_ef21_stays_the_mean():
    method = OTHERS["ef21"]
    state = train(zero_of(method, 8), zero_of(method, 8).init(make_state, tx=SGD), 60)
    for devices, new in ((8, 2), (2, 4)):
        zero = zero_of(method, new)
        state = moved(zero, state, devices)
        own, mean = (np.asarray(state[1].sync_state.arrays["w"][k]) for k in ("own", "mean"))
        np.testing.assert_allclose(own.sum((0, 1)), GRADIENT, atol=1e-10)
        np.testing.assert_allclose(mean[0, 0] * new, GRADIENT, atol=1e-10)


OTHERS = {
    "another rank": sync.powersgd(8, min_compression=1.0),
    "a stateless one": sync.dense(),
    "none": None,
    "top_k": sync.top_k(0.1, min_size=1),
    "momentum": sync.top_k(0.1, momentum=0.9, min_size=1),
    "ef21": sync.top_k(0.1, feedback="ef21", min_size=1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_state_of_another_sync_raises_and_can_be_changed(name):
    """The update of ``change_sync`` applies what was owed; then nothing is, and the sync starts."""
    options = {"kind": AxisType.Explicit if name in ("none", "top_k") else AxisType.Auto}
    old, zero = (zero_of(method, 8, **options) for method in (POWERSGD, OTHERS[name]))
    state = train(old, old.init(make_state, tx=SGD), 2)
    with pytest.raises(ValueError, match=r"another gradient sync, arrays/w/error .*change_sync"):
        zero.train_step(loss, tx=SGD)(state, zero.put(BATCH))
    changed = zero.change_sync(state, tx=SGD)
    np.testing.assert_allclose(-np.asarray(changed[0]["w"]), 2 * GRADIENT, rtol=1e-12, atol=1e-13)
    train(zero, changed, 1)


def test_a_sync_that_begins_and_blocks_of_other_axes():
    zero = zero_of(POWERSGD, 8)
    plain = zero_of(None, 8).init(make_state, tx=SGD)
    with pytest.raises(ValueError, match=r"has a state, which this train state lacks.*change_sync"):
        zero.train_step(loss, tx=SGD)(plain, zero.put(BATCH))
    changed = zero.change_sync(plain, tx=SGD)
    np.testing.assert_array_equal(changed[0]["w"], 0)
    assert not np.any(owed(changed))
    mesh = {"names": ("data", "model"), "stage": 1}
    blocks = model.zero_on(4, 2, sync=OTHERS["top_k"], **mesh)
    with pytest.raises(ValueError, match=r"the mesh axes \['model'\] shard"):
        model.zero_on(4, 2, **mesh).change_sync(blocks.init(make_state, tx=SGD), tx=SGD)


def test_where_a_sync_cannot_keep_its_state():
    with pytest.raises(ValueError, match=r"at stage 3 .* Use a stateless sync"):
        zero_of(POWERSGD, 8, stage=3).init(make_state, tx=SGD)
    with pytest.raises(ValueError, match="value_and_grad cannot return the state"):
        zero_of(POWERSGD, 8).value_and_grad(loss)(make_state()[0], BATCH)
