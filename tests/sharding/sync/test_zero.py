"""Gradient sync under ZeRO equals one device that updates with the synchronized gradients."""

import dataclasses
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sharding as shd
from sharding import sync
from sharding.plan.program._wire import collectives

from .harness import SyncRunner

STEPS = 5
SHAPES = {"w": (32, 64), "stack": (3, 64, 64), "out": (64, 16), "b": (64,)}


def initial(dtype=jnp.float64):
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(0.2 * rng.normal(size=s), dtype) for k, s in SHAPES.items()}


def loss(params, x, gather=lambda tree: tree):
    """Full-rank gradients for every parameter."""
    x = jnp.tanh(x @ gather(params["w"]) + gather(params["b"])[None])
    x, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ gather(w)), None), x, params["stack"])
    return jnp.mean((x @ gather(params["out"]) - 1) ** 2)


def batch_of(step, dtype=jnp.float64):
    scale = 10.0 ** np.repeat(np.arange(8) / 4, 4)[:, None]  # devices of different size
    return jnp.asarray(np.random.default_rng(step).normal(size=(32, 32)) * scale, dtype)


def mesh_of(sizes, kind=AxisType.Auto):
    names = ("replicas", "data")[-len(sizes) :]
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes), devices=devices)


def zero_of(method, stage, sizes=(8,), kind=AxisType.Auto, **options):
    replicas = "replicas" if len(sizes) > 1 else None
    options = {"min_shard_size": 256, "replica_axis": replicas, "sync": method} | options
    return shd.Zero(mesh_of(sizes, kind), stage, **options)


def make_state(tx, dtype=jnp.float64):
    return lambda: (initial(dtype), tx.init(initial(dtype)))


def run(zero, tx, steps=STEPS, state=None, start=0, **options):
    state = zero.init(make_state(tx), tx=tx) if state is None else state
    step = zero.train_step(lambda p, x: loss(p, x, zero.gather), tx=tx, **options)
    for i in range(start, start + steps):
        state, _ = step(state, zero.put(batch_of(i)))
    return state


SHARD_GRADS = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))


def by_hand(method, tx, num, steps=STEPS):
    """On one device: the gradients of each shard of the batch, the sync by itself, the update."""
    params, opt_state = initial(), tx.init(initial())
    mean_of = SyncRunner(method, SHAPES, num)
    for i in range(steps):
        grads = SHARD_GRADS(params, batch_of(i).reshape(num, -1, 32))
        updates, opt_state = tx.update(mean_of(jax.device_get(grads)), opt_state, params)
        params = optax.apply_updates(params, updates)
    return params


def assert_same(have, want, tolerance=1e-12):
    start = jax.device_get(initial())
    for k in SHAPES:
        path = np.linalg.norm(np.asarray(want[k]) - start[k])
        assert path > 0
        off = np.linalg.norm(np.asarray(jax.device_get(have[k])) - np.asarray(want[k]))
        assert off < tolerance * path, (k, off / path)


def mixed():
    return sync.by_path({"stack": sync.powersgd(2), "out": sync.top_k(0.2, min_size=1)})


METHODS = {
    "dense": sync.dense,
    "powersgd": lambda: sync.powersgd(4, start_step=2, min_compression=1.0),
    "top_k": lambda: sync.top_k({0: 0.5, 2: 0.1}, momentum=0.9, nesterov=True, min_size=1),
    "ef21": lambda: sync.top_k(0.2, feedback="ef21", min_size=1),
    "by_path": mixed,
}
SGD = optax.sgd(1e-2)


# --- The same numbers -----------------------------------------------------------------------------


@functools.cache
def sgd_by_hand(name, num):
    return by_hand(METHODS[name](), SGD, num)


# Means at stage 0, shards at 1 and 2, which differ in the accumulation of micro-batches alone.
@pytest.mark.slow(keep=4)
@pytest.mark.parametrize(
    ("name", "stage", "num"),
    [*((name, stage, 8) for name in METHODS for stage in (0, 2)), ("powersgd", 1, 4)],
)
def test_equals_the_sync_by_hand(name, stage, num, x64):
    zero = zero_of(METHODS[name](), stage, (num,))
    assert_same(run(zero, SGD)[0], sgd_by_hand(name, num))


def test_with_a_chain_of_transformations(x64):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    method = mixed()
    # Adam divides by the root of what may be rounding noise of the first step.
    assert_same(run(zero_of(method, 2), tx)[0], by_hand(method, tx, 8), 1e-10)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    ("sizes", "stage"),
    [((8,), 1), ((8,), 3), ((2, 4), 0), ((2, 4), 1), ((4, 2), 2), ((2, 4), 3)],
    ids=str,
)
def test_lossless_methods_equal_no_sync_method(sizes, stage, x64):
    """In all layouts."""
    tx = optax.adamw(1e-3)
    if stage == 3 and sizes == (8,):
        method = sync.dense()
    else:
        method = sync.top_k(1.0, min_size=1)
    plain = zero_of(None, stage, sizes)
    want = run(plain, tx)[0]
    assert_same(run(dataclasses.replace(plain, sync=method), tx)[0], want)
    if stage and len(sizes) == 2:
        spread = dataclasses.replace(plain, sync=method, shard_state_over_replicas=True)
        assert_same(run(spread, tx)[0], want)


@functools.cache
def alone():
    """The parameters after SGD on one device."""
    return jax.device_get(run(zero_of(None, 0, (1,)), SGD)[0])


@pytest.mark.parametrize(
    ("name", "stage"), [("stateful", 1), ("stateful", 2), ("stateless", 2), ("stateless", 3)]
)
def test_micro_batches_and_explicit_axes(name, stage, x64):
    method = sync.top_k(1.0, min_size=1) if name == "stateful" else sync.dense()
    zero = zero_of(method, stage, kind=AxisType.Explicit)
    assert_same(run(zero, SGD, microbatches=2)[0], alone())


def test_weighted_losses_synchronize_gradients_not_sums(x64):
    """Residuals are scaled by the weights of their own step."""

    def weighted(params, x):
        weight = jnp.sum(jnp.where(x[:, 0] > 0, 2.0, 1.0))
        return loss(params, x) * weight, weight

    method = mixed()
    have = run_weighted(zero_of(method, 2), weighted)
    params = initial()
    mean_of = SyncRunner(method, SHAPES, 8)
    grads_of = jax.jit(jax.vmap(jax.grad(weighted, has_aux=True), (None, 0)))
    for i in range(STEPS):
        grads, weights = grads_of(params, batch_of(i).reshape(8, -1, 32))
        share = 8 / np.sum(weights)
        mean = mean_of({k: np.asarray(g) * share for k, g in grads.items()})
        params = jax.tree.map(lambda p, g: p - 1e-2 * g, params, mean)
    assert_same(have, params)


def run_weighted(zero, fn):
    state = zero.init(make_state(SGD), tx=SGD)
    step = zero.train_step(fn, tx=SGD, weighted=True)
    for i in range(STEPS):
        state, _ = step(state, zero.put(batch_of(i)))
    return state[0]


def test_quantized_gradients_of_stage_3_are_those_of_stage_2(x64):
    """Without scanned layers the same shards are quantized, up to the order of sums."""

    def flat_loss(params, x, gather):
        x = jnp.tanh(x @ gather(params["w"]) + gather(params["b"])[None])
        return jnp.mean((x @ gather(params["out"]) - 1) ** 2)

    found = {}
    for stage in (2, 3):
        zero = zero_of(sync.qsgd(8, rounding="nearest", block_size=64, min_size=256), stage)
        state = zero.init(make_state(SGD), tx=SGD)
        step = zero.train_step(lambda p, x, zero=zero: flat_loss(p, x, zero.gather), tx=SGD)
        state, _ = step(state, zero.put(batch_of(0)))
        found[stage] = jax.device_get(state[0])
    for k in ("w", "out"):
        path = np.linalg.norm(found[2][k] - np.asarray(initial()[k]))
        assert np.linalg.norm(found[3][k] - found[2][k]) < 1e-3 * path
        assert np.mean(found[3][k] != found[2][k]) < 0.5


def test_frozen_parameters_are_not_sent(x64):
    trainable = {"w": True, "stack": False, "out": True, "b": True}
    zero = zero_of(sync.top_k(0.1, min_size=1), 2)
    state = zero.init(make_state(SGD), tx=SGD)
    before = jax.device_get(state)
    after = jax.device_get(run(zero, SGD, state=state, trainable=trainable))
    np.testing.assert_array_equal(after[0]["stack"], before[0]["stack"])
    assert np.linalg.norm(after[0]["w"] - before[0]["w"]) > 0
    errors = after[1].sync_state.arrays
    assert not np.any(errors["stack"]["error"])
    assert np.any(errors["w"]["error"])


def test_a_flax_train_state():
    model = nn.Dense(64)
    x = jnp.ones((16, 32))

    def make():
        tx = optax.adam(1e-3)
        params = model.init(jax.random.key(0), x)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    zero = zero_of(sync.powersgd(2), 1)
    state = zero.init(make)
    assert isinstance(state.opt_state, sync.SyncedState)
    step = zero.train_step(lambda p, x: jnp.mean(model.apply({"params": p}, x) ** 2))
    for _ in range(3):
        state, metrics = step(state, zero.put(x))
    assert int(state.step) == 3
    assert float(metrics["loss"]) < 2.0
    assert np.any(state.opt_state.sync_state.arrays["kernel"]["error"])


def test_offload_moves_the_optimizer_state_alone():
    """The state of the optimizer is offloaded; that of the sync stays on the device."""
    tx = optax.adamw(1e-3)
    zero = zero_of(sync.powersgd(2), 1, offload="optimizer", offload_min_size=256)
    state = zero.init(make_state(tx, jnp.float32), tx=tx)
    step = zero.train_step(loss, tx=tx)
    for _ in range(2):
        state, _ = step(state, zero.put(batch_of(0, jnp.float32)))
    assert state[1].inner_state[0].mu["w"].sharding.memory_kind == "pinned_host"
    assert state[1].sync_state.arrays["w"]["error"].sharding.memory_kind == "device"


# --- Nonfinite gradients --------------------------------------------------------------------------


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    "method",
    [sync.powersgd(4), sync.top_k(0.1, min_size=1), sync.qsgd(8, min_size=1)],
    ids=["powersgd", "top_k", "qsgd"],
)
def test_a_nonfinite_gradient_is_seen_by_the_optimizer_and_changes_no_state(method, x64):
    tx = optax.apply_if_finite(SGD, max_consecutive_errors=3)
    zero = zero_of(method, 2)
    before = run(zero, tx, 2)
    expected = jax.device_get(before)
    step = zero.train_step(loss, tx=tx)
    bad = batch_of(7).at[5, 3].set(jnp.nan)  # one row, of one device
    state, metrics = step(before, zero.put(bad))
    assert np.isnan(metrics["loss"])
    assert int(state[1].inner_state.notfinite_count) == 1
    for a, b in zip(jax.tree.leaves(state[0]), jax.tree.leaves(expected[0]), strict=True):
        np.testing.assert_array_equal(a, b)
    arrays = (state[1].sync_state.arrays, expected[1].sync_state.arrays)
    for a, b in zip(*map(jax.tree.leaves, arrays), strict=True):
        np.testing.assert_array_equal(a, b)
    state, metrics = step(state, zero.put(batch_of(8)))
    assert np.isfinite(metrics["loss"])
    assert int(state[1].inner_state.notfinite_count) == 0


# --- Other numbers of devices ---------------------------------------------------------------------


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [(8, 4, AxisType.Auto), (4, 8, AxisType.Explicit), (2, 1, AxisType.Auto)],
    ids=str,
)
def test_a_checkpoint_resumes_on_another_number_of_devices(before, after, kind, tmp_path, x64):
    """No residual is lost: the mean over devices is unchanged."""
    old, new = (zero_of(mixed(), 2, (num,), kind) for num in (before, after))
    state = run(old, SGD, 3)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        abstract = new.abstract_state(make_state(SGD), tx=SGD, sync_devices=before)
        restored = new.resize_sync(checkpointer.restore(tmp_path / "state", abstract))
    want, have = jax.device_get((state, restored))
    for k in SHAPES:
        np.testing.assert_array_equal(have[0][k], want[0][k])
    flat = jax.tree_util.tree_leaves_with_path(have[1].sync_state)
    assert any("error" in str(path) for path, _ in flat)
    for (path, x), y in zip(flat, jax.tree.leaves(want[1].sync_state), strict=True):
        assert x.shape == (after, 1, *y.shape[2:])
        np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))
        if "error" in str(path):
            assert np.linalg.norm(x[0] - y.mean(0)) <= 1e-14 * np.linalg.norm(y.mean(0))
            assert np.linalg.norm(x) > 0
    run(new, SGD, 2, restored, 3)


def test_states_that_cannot_be_resized(x64):
    zero = zero_of(mixed(), 2)
    with pytest.raises(ValueError, match="holds no state of a gradient sync"):
        zero.resize_sync(run(zero_of(None, 2), SGD, 1))
    hybrid = zero_of(mixed(), 2, (2, 4))
    with pytest.raises(ValueError, match=r"of 1 shards in a replica, and the mesh has 4"):
        hybrid.resize_sync(run(zero, SGD, 1))


def test_residuals_of_replicas_are_sharded(x64):
    zero = zero_of(sync.powersgd(2, min_compression=1.0), 3, (2, 4))
    state = run(zero, SGD, 2)
    arrays = state[1].sync_state.arrays
    assert arrays["w"]["error"].shape == (2, 4, 32, 16)
    assert arrays["w"]["error"].sharding.spec == P("replicas", "data")
    assert arrays["b"] == ()


# --- On the wire ----------------------------------------------------------------------------------


def sent(method, stage, dtype=jnp.float32):
    """Bytes that a device sends for gradients, and the dtypes that all-to-alls send."""
    tx = optax.sgd(1e-2)
    zero = zero_of(method, stage)
    state = zero.abstract_state(make_state(tx, dtype), tx=tx)
    batch = jax.ShapeDtypeStruct((32, 32), dtype)
    compiled = zero.train_step(loss, tx=tx).lower(state, batch).compile()
    found = [c for c in collectives(compiled) if "reduce_gradients" in c.scope]
    return sum(c.wire_bytes for c in found), {c.dtype for c in found if c.op == "all-to-all"}


@pytest.mark.slow(keep=3)
@pytest.mark.usefixtures("scopes_in_cache_key")
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("name", ["qsgd 8", "qsgd 4", "powersgd", "top_k"])
def test_bytes_are_those_of_the_formula(name, stage):
    """Within 5 %, since flags of nonfinite gradients are sent too."""
    n, share = 8, 7 / 8
    sizes = {k: int(np.prod(s)) for k, s in SHAPES.items()}
    large = sum(size for k, size in sizes.items() if k != "b")
    small = sizes["b"] * 4 * 2 * share
    if name.startswith("qsgd"):
        bits = int(name[-1])
        method = sync.qsgd(bits, block_size=64, min_size=256)
        want = share * large * (bits / 8 + 4 / 64) * (1 if stage else 2) + small
    elif name == "powersgd":
        method = sync.powersgd(2, min_compression=1.0)
        matrices = [(1, *SHAPES["w"]), SHAPES["stack"], (1, *SHAPES["out"])]
        want = sum(2 * share * 4 * 2 * count * (rows + cols) for count, rows, cols in matrices)
        want += small
    else:
        method = sync.top_k(0.05, min_size=256)
        counts = [int(np.ceil(0.05 * size)) for k, size in sizes.items() if k != "b"]
        want = share * n * 8 * sum(counts) + small
    have, dtypes = sent(method, stage)
    assert abs(have - want) < 0.05 * want
    plain, _ = sent(sync.dense(), stage)
    assert have < plain
    if name.startswith("qsgd"):
        assert ("s8" if name == "qsgd 8" else "u8") in dtypes


@pytest.mark.parametrize(("reduce", "sent_in"), [(None, "bf16"), (jnp.float32, "f32")])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_sent_in_the_dtype_that_precision_says(stage, reduce, sent_in):
    precision = shd.Precision(compute=jnp.bfloat16, reduce=reduce)
    zero = zero_of(sync.dense(), stage, precision=precision)

    def mixed_loss(params, x):
        return loss(params, x.astype(jnp.bfloat16), zero.gather).astype(jnp.float32)

    jaxpr = str(
        jax.make_jaxpr(zero.value_and_grad(mixed_loss))(
            initial(jnp.float32), batch_of(0, jnp.float32)
        )
    )
    found = set(re.findall(r":(\w+)\[[\d,]+\] = reduce_scatter\[", jaxpr))
    assert found == {sent_in}


# --- Bad input ------------------------------------------------------------------------------------


def test_stage_3_rejects_stateful_methods():
    zero = zero_of(sync.top_k(0.1), 3)
    with pytest.raises(ValueError, match=r"at stage 3 .* Use a stateless sync"):
        zero.init(make_state(SGD, jnp.float32), tx=SGD)


def test_a_train_state_without_sync_state():
    zero = zero_of(mixed(), 1)
    state = zero_of(None, 1).init(make_state(SGD, jnp.float32), tx=SGD)
    with pytest.raises(ValueError, match="has a state, which this train state lacks"):
        zero.train_step(loss, tx=SGD)(state, zero.put(batch_of(0, jnp.float32)))


def test_gradients_alone():
    params, x = initial(jnp.float32), batch_of(0, jnp.float32)
    with pytest.raises(ValueError, match="value_and_grad cannot return the state"):
        zero_of(mixed(), 1).value_and_grad(loss)(params, x)
    _, have = jax.jit(zero_of(sync.dense(), 1).value_and_grad(loss))(params, x)
    _, want = jax.jit(zero_of(None, 1).value_and_grad(loss))(params, x)
    for k in SHAPES:
        np.testing.assert_allclose(have[k], want[k], rtol=1e-5, atol=1e-6)


def test_sync_that_is_no_gradient_sync():
    with pytest.raises(ValueError, match="sync must be a GradientSync or None, got 'powersgd'"):
        zero_of("powersgd", 1)


# --- Description ----------------------------------------------------------------------------------


def test_what_is_described():
    zero = zero_of(sync.powersgd(4, min_compression=1.0), 2)
    found = zero.describe(jax.eval_shape(make_state(SGD, jnp.float32)), tx=SGD)
    assert "sync/arrays/w/error" in str(found)
    text = found.table()
    assert re.search(r"sync +arrays/w/error +\(8, 1, 32, 64\)", text)
    assert re.search(r"sync +total", text)
    assert "arrays/b" not in text
