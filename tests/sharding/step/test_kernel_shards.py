"""Kernels of an update run on shards: the numbers of XLA's form, and the promised bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _pallas_bytes import calls as kernels_in
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_ext
from sharding.placement._layout import Layout
from sharding.step._update import KernelShards

from .. import model

SHAPES = {
    "up": (512, 256),
    "wide": (72, 2048),  # sharded by columns
    "stack": (2, 512, 256),
    "bias": (64,),
    "heads": (256, 8, 128),  # of which no kernel takes the rows
    "uneven": (520, 130),  # shards of 65 rows end within a block
    "narrow": (512, 96),  # in the kernel, columns are the rows
}


def make_state(tx, names):
    rng = np.random.default_rng(0)
    drawn = {k: rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}
    return model.make_of(lambda: {k: drawn[k] for k in names}, tx)


TX, SUMMING = (
    optax_ext.low_precision_state(inner, min_size=1024)
    for inner in (
        optax.chain(optax.clip_by_global_norm(100.0), optax.adamw(1e-2)),
        optax_ext.came(1e-2, weight_decay=0.1),
    )
)


def assert_same(have, want, start):
    for k, x in want[0].items():
        assert np.any(x != start[k])
        assert np.max(np.abs(have[0][k] - x)) <= 1e-6 * np.max(np.abs(x)), k
    model.assert_codes_close(have[1], want[1], others=1e-3, rtol=1e-6)


def zero_of(*shape, **options):
    return model.zero_on(*shape, **({"stage": 2, "min_shard_size": 512} | options))


@pytest.mark.parametrize("tx", [TX, pytest.param(SUMMING, marks=pytest.mark.slow)])
def test_equals_the_form_of_xla(tx, monkeypatch):
    """Each step of the kernel's from a state of XLA's, so that no rounding adds up.

    The noise of stochastic rounding is that of the element in the full array.
    """
    zero = zero_of(4, 2, names=("data", "model"), kind=AxisType.Explicit)
    specs = {"stack": P(None, "model"), "wide": P(), "narrow": P()}
    state = zero.init(make_state(tx, specs), tx=tx, param_specs=specs)
    step, step_tiled = (zero.train_step(model.linear_loss, tx=tx) for _ in range(2))
    places = jax.tree.map(lambda x: x.sharding, state)
    shapes = {k: SHAPES[k] for k in specs}
    for i in range(2):
        before, data = jax.device_get(state), zero.put(model.gradients(shapes, i, "float32"))
        with monkeypatch.context() as patch:
            patch.setattr(KernelShards, "interpret", True)
            have, _ = step_tiled(jax.device_put(before, places), data)
        state, _ = step(jax.device_put(before, places), data)
        assert_same(*jax.device_get((have, state)), before[0])


def test_paths_that_read_alike_are_not_confused():
    shards = {"a": {"b": (64, 128)}, "a/b": (64, 256), "c": (64, 128)}
    layout = Layout(zero_of(8).mesh, 2, "data")
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, "float32"), shards, is_leaf=is_shape)
    specs = {"a": {"b": P("data")}, "a/b": P(None, "data"), "c": P()}
    found = KernelShards(layout, params, specs)
    paths = {jax.tree_util.keystr(p): p for p, _ in jax.tree_util.tree_leaves_with_path(params)}
    assert found.shape_of(paths["['a']['b']"], (64, 128)) == (8, 128)
    assert found.shape_of(paths["['a/b']"], (64, 256)) == (64, 32)
    # A transformation may have flattened what it is given.
    assert found.shape_of(paths["['c']"], (64 * 128,)) is None
    assert found.shape_of((), (64, 128)) is None


def kernels_of_step(zero, *names):
    """The shapes of the codes that kernels write, on one device."""
    state = zero.abstract_state(make_state(TX, names), tx=TX)
    step = zero.train_step(model.linear_loss, tx=TX)
    gradients = model.gradients({k: SHAPES[k] for k in names}, 0, "float32")
    calls = kernels_in(lambda *args: step(*args), state, gradients)
    return sorted(next(v.aval.shape for v in c.outvars if v.aval.dtype == jnp.uint8) for c in calls)


def test_each_device_updates_its_shard():
    # (matrices, rows, columns); "uneven" and "heads" are left to XLA.
    found = kernels_of_step(zero_of(8), "wide", "stack", "heads", "uneven")
    assert found == [(1, 72, 256), (2, 64, 256)]
    # As it is in memory, with the fewest registers.
    assert kernels_of_step(zero_of(1, stage=0), "uneven") == [(1, 130, 520)]
