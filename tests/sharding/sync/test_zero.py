"""``Zero(sync=...)``: where the state is, what is described, dtypes, and errors.

What it computes is in ``test_other_axes.py``, of lossless methods in ``step/test_covering.py``.
"""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import sharding as shd
from sharding import sync

from .harness import mesh_of

SHAPES = {"w": (32, 64), "out": (64, 16), "b": (64,)}
SGD = optax.sgd(1e-2)
STATEFUL = sync.powersgd(4, min_compression=1.0)


def zero_of(method, stage, num=8, **options):
    return shd.Zero(mesh_of(data=num), stage, sync=method, **({"min_shard_size": 256} | options))


def params_of():
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(0.2 * rng.normal(size=s), jnp.float32) for k, s in SHAPES.items()}


def make_state(tx=SGD):
    return lambda: (params_of(), tx.init(params_of()))


def loss(params, x, gather=lambda tree: tree):
    x = jnp.tanh(x @ gather(params["w"]) + gather(params["b"])[None])
    return jnp.mean((x @ gather(params["out"]) - 1) ** 2)


def abstract(zero, tx=SGD, **options):
    return zero.abstract_state(make_state(tx), tx=tx, **options)


def test_a_flax_train_state():
    model, x = nn.Dense(8), jnp.ones((4, 16))

    def make():
        params = model.init(jax.random.key(0), x)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1))

    zero = zero_of(sync.powersgd(2, min_compression=1.0), 1, 2)
    state = zero.init(make)
    assert isinstance(state.opt_state, sync.SyncedState)
    step = zero.train_step(lambda p, x: jnp.mean(model.apply({"params": p}, x) ** 2))
    state, metrics = step(state, zero.put(x))
    assert int(state.step) == 1
    assert np.isfinite(metrics["loss"])
    assert np.any(state.opt_state.sync_state.arrays["kernel"]["error"])


def test_the_state_of_the_optimizer_alone_is_offloaded():
    tx = optax.adamw(1e-3)
    zero = zero_of(STATEFUL, 1, offload="optimizer", offload_min_size=256)
    found = abstract(zero, tx)[1]
    assert found.inner_state[0].mu["w"].sharding.memory_kind == "pinned_host"
    assert found.sync_state.arrays["w"]["error"].sharding.memory_kind == "device"


def test_what_is_described():
    """With the blocks of other axes; vectors have no state."""
    found = zero_of(STATEFUL, 2).describe(jax.eval_shape(make_state()), tx=SGD)
    assert "sync/arrays/w/error" in str(found)
    text = found.table()
    assert re.search(r"sync +arrays/w/error +\(8, 1, 32, 64\)", text)
    assert re.search(r"sync +total", text)
    assert "arrays/b" not in text
    zero = shd.Zero(mesh_of(data=4, model=2), 2, sync=STATEFUL, min_shard_size=256)
    specs = {"w": jax.P(None, "model"), "out": jax.P(), "b": jax.P()}
    found = zero.describe(jax.eval_shape(make_state()), tx=SGD, param_specs=specs)
    row = next(row for row in found.rows if row.part == "sync" and row.path == "arrays/w/error")
    assert row.shape == (4, 1, 2, 32, 32)
    assert row.bytes_per_device == 32 * 32 * 4


def test_powersgd_counts_the_rows_of_blocks():
    """A matrix whose blocks are too small for the rank is not compressed."""
    zero = shd.Zero(mesh_of(data=2, model=4), 1, sync=sync.powersgd(9, min_compression=1.0))
    specs = {"w": jax.P(), "out": jax.P("model"), "b": jax.P()}
    arrays = abstract(zero, param_specs=specs)[1].sync_state.arrays
    assert arrays["out"] == ()  # (16, 16); (64, 16) would be compressed
    assert arrays["w"]["q"].shape == (2, 1, 4, 1, 64, 9)
    only = {"out": params_of()["out"]}
    with pytest.raises(ValueError, match=r"compresses no parameter.*\(16, 16\)"):
        zero.init(lambda: (only, SGD.init(only)), tx=SGD, param_specs=jax.P("model"))


@pytest.mark.parametrize(("reduce", "sent_in"), [(None, "bf16"), (jnp.float32, "f32")])
@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_are_sent_in_the_dtype_that_precision_says(stage, reduce, sent_in):
    precision = shd.Precision(compute=jnp.bfloat16, reduce=reduce)
    zero = zero_of(sync.dense(), stage, precision=precision)

    def mixed_loss(params, x):
        return loss(params, x.astype(jnp.bfloat16), zero.gather).astype(jnp.float32)

    traced = jax.make_jaxpr(zero.value_and_grad(mixed_loss))(params_of(), np.ones((32, 32), "f4"))
    found = set(re.findall(r":(\w+)\[[\d,]+\] = reduce_scatter\[", str(traced)))
    assert found == {sent_in}


# --- Bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 4, "model": 2}])
def test_stage_3_rejects_stateful_methods(axes):
    zero = shd.Zero(mesh_of(**axes), 3, sync=STATEFUL, min_shard_size=256)
    specs = {"w": jax.P(None, "model"), "out": jax.P(), "b": jax.P()} if "model" in axes else None
    with pytest.raises(ValueError, match=r"at stage 3 .* Use a stateless sync"):
        zero.init(make_state(), tx=SGD, param_specs=specs)


def test_other_bad_input():
    batch = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    with pytest.raises(ValueError, match="has a state, which this train state lacks"):
        zero_of(STATEFUL, 1).train_step(loss, tx=SGD).lower(abstract(zero_of(None, 1)), batch)
    with pytest.raises(ValueError, match="value_and_grad cannot return the state"):
        zero_of(STATEFUL, 1).value_and_grad(loss)(params_of(), np.ones((32, 32), "f4"))
    with pytest.raises(ValueError, match="sync must be a GradientSync or None, got 'powersgd'"):
        zero_of("powersgd", 1)
