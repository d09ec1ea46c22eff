"""A checkpoint saved on some devices resumes, equal, on others; exports are unsharded."""

import pathlib
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_ext

from ...tiers import tiers
from .. import model

TX = optax_ext.came(3e-5)


def make_state(tx=TX, dtype=jnp.float64):
    return model.make_state(tx, dtype)


def train(zero, state, steps, step=None):
    step = step or zero.train_step(model.make_loss(zero), tx=TX)
    losses = []
    for i in steps:
        state, metrics = step(state, zero.put(model.batch(i)))
        losses.append(float(metrics["loss"]))
    return state, losses


def on_host(tree):
    return jax.tree.map(lambda x: np.array(jax.device_get(x)), tree)


class Run(NamedTuple):
    """An unbroken run of 6 steps at stage 3 on 8 devices, saved after 3."""

    directory: pathlib.Path
    saved: Any
    exported: Any  # by full_params, when it was saved
    final: Any
    losses: list[float]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory, zero = tmp_path_factory.mktemp("run"), model.zero_on(8, stage=3)
    with jax.enable_x64(True):
        step = zero.train_step(model.make_loss(zero), tx=TX)
        state, _ = train(zero, zero.init(make_state(), tx=TX), range(3), step)
        saved, exported = on_host(state), zero.full_params(state)
        with ocp.CheckpointManager(directory) as manager:
            # The next step takes the state's memory while this one is being written.
            manager.save(3, args=ocp.args.StandardSave(state))
            final, losses = train(zero, state, range(3, 6), step)
        return Run(directory, saved, exported, on_host(final), losses)


def restore(directory, target, step=3):
    with ocp.CheckpointManager(directory) as manager:
        return manager.restore(step, args=ocp.args.StandardRestore(target))


HYBRID = {"names": ("replica", "data"), "replica_axis": "replica"}
OVER_MODEL = {"query": P(None, None, "model"), "mlp": P(None, None, "model")}
LAYOUTS = {
    "4 devices": ((4,), {"stage": 3}),
    "1 device": ((1,), {"stage": 3}),
    "hybrid, state over all": ((2, 4), {"stage": 3, "shard_state_over_replicas": True, **HYBRID}),
    "offload": ((8,), {"stage": 2, "offload": "optimizer", "offload_min_size": 256}),
    "model axis": ((4, 2), {"stage": 3, "names": ("data", "model")}),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("layout", tiers(LAYOUTS, lambda name: name != "1 device"))
def test_goes_on_elsewhere(run, layout):
    shape, options = LAYOUTS[layout]
    zero = model.zero_on(*shape, **options)
    specs = {k: OVER_MODEL.get(k, P()) for k in run.exported} if layout == "model axis" else None
    target = zero.abstract_state(make_state(), tx=TX, param_specs=specs)
    state = restore(run.directory, target)
    chex.assert_trees_all_equal(state, run.saved, strict=True)
    for x, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(target), strict=True):
        assert x.sharding == wanted.sharding
    if layout == "1 device":  # on all others the same step from the same state
        state, losses = train(zero, state, range(3, 6))
        np.testing.assert_allclose(losses, run.losses, rtol=1e-12)
        model.assert_close(state, run.final, 1e-12)


def test_full_params_stay_when_steps_take_the_memory_of_the_state(run):
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(run.exported))
    chex.assert_trees_all_equal(run.exported, run.saved[0], strict=True)


def test_full_params_where_a_process_has_some_of_the_shards_alone(monkeypatch):
    """What runs on many processes gathers on the devices; here one process takes that way."""
    zero = model.zero_on(8, stage=3)
    state = zero.init(make_state(TX, jnp.float32), tx=TX)
    monkeypatch.setattr(NamedSharding, "is_fully_addressable", False)
    want = model.init_params(jnp.float32)
    chex.assert_trees_all_equal(zero.full_params(state), want, strict=True)
