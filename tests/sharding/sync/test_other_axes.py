"""Gradient sync under ZeRO equals the methods by themselves, of each block on other mesh axes.

Parameters that axes besides the data axes shard are synchronized block by block; with replicas, so
are the shards of a replica. Lossless methods are in ``step/test_covering.py``.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import sharding as shd
from sharding import sync
from sharding.plan.audit._program_collectives import collectives, wire_bytes

from .harness import SyncRunner, mesh_of, norm

pytestmark = pytest.mark.usefixtures("x64", "scopes_in_cache_key")
STEPS, RATE, ROWS = 4, 0.1, 32

SHAPES = {
    **{"qsgd": (32, 64), "nearest": (32, 64), "power": (4, 32, 32)},
    **{"zip": (32, 64), "top": (32, 64), "bias": (64,), "frozen": (32, 64), "ef21": (32, 64)},
}
TRAINABLE = {k: k != "frozen" for k in SHAPES}
# Blocks along rows, columns and layers; others are replicated.
SPECS = {
    **{"qsgd": P(None, "model"), "nearest": P("model"), "power": P("model")},
    **{"top": P("model"), "bias": P(), "ef21": P(), "frozen": P(None, "model")},
    "zip": P(None, "model"),
}
TOP_K = sync.top_k(0.1, momentum=0.9, min_size=1)
STATEFUL = sync.by_path(
    {
        "qsgd": sync.qsgd(8, block_size=64, min_size=1),
        "nearest": sync.qsgd(4, block_size=64, rounding="nearest", min_size=1),
        "power": sync.powersgd(2, min_compression=1.0),
        "zip": sync.gradzip(2, min_compression=1.0),
        "ef21": sync.top_k(0.2, feedback="ef21", min_size=1),
        "top|bias|frozen": TOP_K,
    }
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, and how the model is trained on it."""

    axes: tuple[tuple[str, int], ...]
    stage: int
    method: sync.GradientSync = STATEFUL
    microbatches: int = 1

    def zero(self, **options):
        mesh = mesh_of(**dict(self.axes))
        if "replicas" in mesh.shape:
            options["replica_axis"] = "replicas"
        options = {"sync": self.method, "min_shard_size": 256} | options
        return shd.Zero(mesh, self.stage, **options)


LAYOUTS = {
    "tensor": Layout((("data", 4), ("model", 2)), 2, microbatches=2),
    "replicas": Layout((("replicas", 2), ("data", 2), ("model", 2)), 3),
}


def initial():
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(0.1 * rng.normal(size=s)) for k, s in SHAPES.items()}


def tx():
    return optax.apply_if_finite(optax.sgd(RATE), max_consecutive_errors=3)


def make_state():
    return initial(), tx().init(initial())


def losses(params, x, gather=lambda tree: tree):
    """Of each example. Gradients have full rank; those of blocks differ in scale."""
    x = x * 2.0 ** (np.arange(32) // 8 - 2)[None]
    scale = 2.0 ** (np.arange(64) // 16 - 2)[None]
    outputs = [jnp.tanh(gather(params["bias"])[None] * scale + x[:, :1])]
    for k in SHAPES:
        if k not in ("power", "bias"):
            outputs.append(jnp.tanh((x @ gather(params[k])) * scale))

    def layer(y, indexed):
        i, w = indexed
        return y + 2.0 ** (i - 2) * jnp.tanh(y @ gather(w)), None

    outputs.append(lax.scan(layer, x, (jnp.arange(4), params["power"]))[0])
    return sum(jnp.mean((y - 0.5) ** 2, 1) for y in outputs)


def loss(params, x, gather=lambda tree: tree):
    """A weighted sum and its weight."""
    weight = jnp.where(x[:, 0] > 0, 2.0, 1.0)
    return jnp.sum(losses(params, x, gather) * weight), jnp.sum(weight)


def batch_of(step, num):
    """Devices of different size."""
    scale = np.repeat(2.0 ** (np.arange(num) - 2), ROWS // num)[:, None]
    return np.random.default_rng(step).normal(size=(ROWS, 32)) * scale


@functools.cache
class Run:
    """A layout's compiled step, its state after some steps, and after one that is not finite."""

    def __init__(self, name):
        layout = LAYOUTS[name]
        self.zero = layout.zero()
        zero, num = self.zero, self.zero.num_devices
        state = zero.init(make_state, tx=tx(), param_specs=SPECS)

        def fn(params, x):
            # XLA:CPU runs independent collectives over different groups in any order, and may wait
            # for ever: all of the other axes come before the loss.
            params = lax.with_sharding_constraint(params, P())
            return loss(params, x, zero.gather)

        options = {"weighted": True, "microbatches": layout.microbatches}
        self.step = zero.train_step(fn, tx=tx(), trainable=TRAINABLE, **options)
        self.lowered = self.step.lower(state, zero.put(batch_of(0, num)))
        for i in range(STEPS):
            state, _ = self.step(state, zero.put(batch_of(i, num)))
        self.params, self.opt_state = jax.device_get(state)
        self.shardings = jax.tree.map(lambda x: x.sharding, state[1])
        bad = batch_of(9, num)
        bad[5] = np.nan  # an example of one device
        state, _ = self.step(state, zero.put(bad))
        self.after_bad = jax.device_get(state)


class BlockwiseSync:
    """A sync method for every block of the gradients by itself, between the devices of one axis.

    That axis has ``num`` devices; ``specs`` and ``sizes`` are of the other axes, ``dims`` sharded.
    """

    def __init__(self, method, specs, sizes, num, dims):
        mesh = mesh_of(**sizes)
        places = {k: jax.NamedSharding(mesh, P(*specs[k])) for k in SHAPES}
        indices = {k: x.devices_indices_map(SHAPES[k]) for k, x in places.items()}
        self.blocks = [{k: indices[k][device] for k in SHAPES} for device in mesh.devices.flat]
        own = {k: np.empty(SHAPES[k])[at].shape for k, at in self.blocks[0].items()}
        self.runner = SyncRunner(method, own, num, dims)
        self.states = [self.runner.state] * len(self.blocks)

    def __call__(self, grads):
        """The sums of gradients (devices, ...) by path, as means that are scaled back."""
        out = {k: np.full(shape, np.nan) for k, shape in SHAPES.items()}
        for i, blocks in enumerate(self.blocks):
            self.runner.state = self.states[i]
            means = self.runner({k: grads[k][(slice(None), *at)] for k, at in blocks.items()})
            self.states[i] = self.runner.state
            for k, mean in means.items():
                out[k][blocks[k]] = mean * len(grads[k])
        return out


@functools.cache
def by_hand(name):
    """On one device: the gradients of each shard of the batch, the sync by itself, the update."""
    layout = LAYOUTS[name]
    sizes = dict(layout.axes)
    num = sizes.pop("replicas" if "replicas" in sizes else "data")
    inner = sizes.get("data", 1)
    zero = dataclasses.replace(layout, stage=2 if layout.stage else 0).zero(sync=None)
    rows = zero.describe(jax.eval_shape(make_state), tx=tx(), param_specs=SPECS).rows
    found = {row.path: tuple(row.spec) for row in rows if row.part == "grads"}
    specs, dims = found, dict.fromkeys(SHAPES, 0)  # a replica's shards are blocks
    if inner == 1:
        of_data = {k: s.index("data") - len(SHAPES[k]) for k, s in found.items() if "data" in s}
        specs, dims = SPECS, dims | of_data
    sum_of = BlockwiseSync(layout.method, specs, sizes, num, dims)
    params, total = jax.device_get(initial()), num * inner
    grads_of = jax.jit(jax.vmap(jax.grad(loss, has_aux=True), (None, 0)))
    for i in range(STEPS):
        parts = batch_of(i, total).reshape(total, -1, 32)
        grads, weights = jax.device_get(grads_of(params, parts))
        own = {k: g.reshape(num, inner, *g.shape[1:]).sum(1) for k, g in grads.items()}
        own["frozen"] = np.zeros_like(own["frozen"])
        sums = sum_of({k: g / np.sum(weights) for k, g in own.items()})
        params = jax.tree.map(lambda p, g: p - RATE * g, params, sums)
    return params, sum_of


@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_the_sync_by_hand(name):
    """Parameters, and the state of each device; then a step that is not finite."""
    run, (want, sum_of) = Run(name), by_hand(name)
    start = jax.device_get(initial())
    np.testing.assert_array_equal(run.params["frozen"], start["frozen"])
    for k in SHAPES.keys() - {"frozen"}:
        path = norm(want[k] - start[k])
        # Scales of codes are float32: rounding noise may change their last bit.
        tolerance = 1e-8 if k in ("qsgd", "nearest") else 1e-12
        assert path > 0
        assert norm(run.params[k] - want[k]) < tolerance * path, k

    # The optimizer sees what is not finite; no state changes.
    params, opt_state = run.after_bad
    for k in SHAPES:
        np.testing.assert_array_equal(params[k], run.params[k])
    assert int(opt_state.inner_state.notfinite_count) == 1
    for new, old in zip(opt_state.sync_state, run.opt_state.sync_state, strict=True):
        jax.tree.map(np.testing.assert_array_equal, new.arrays, old.arrays)

    # Of parameters that no axis shards it is the same on all other devices.
    found = run.opt_state.sync_state
    for i, state in enumerate(sum_of.states):
        place = (i // 2, i % 2) if name == "replicas" else (0, i)
        expected = jax.device_get(state)
        for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            a = a[(slice(None), *place)]
            assert norm(a - b) <= 1e-11 * norm(b)
    middle = "data" if name == "replicas" else None
    want = {P("replicas", "data", "model") if middle else P("data", None, "model")}
    assert {x.spec for x in jax.tree.leaves(run.shardings.sync_state)} == want
    errors = {k: x["error"] for k, x in found[-2].arrays.items()}
    assert not np.any(errors.pop("frozen"))
    for k, error in errors.items():
        assert np.any(error)
        same = np.array_equal(error[:, :, 0], error[:, :, 1])
        assert same == (not any(SPECS[k]))


def test_bytes_on_the_wire():
    """Over the data axis those of the method by itself, and between other axes none."""
    compiled = Run("tensor").lowered.compile()
    found = [c for c in collectives(compiled) if "reduce_gradients" in c.scope]
    assert all(len({device % 2 for device in group}) == 1 for c in found for group in c.groups)
    frozen = 3 * 103 * 12 + 6  # of the block of 1024, by itself: the largest, and a flag
    alone = wire_bytes(by_hand("tensor")[1].runner.compiled)
    # XLA may send the sums of the losses in one all-reduce with PowerSGD's factors.
    assert sum(c.wire_bytes for c in found) - (alone - frozen) in (0, 12)


def test_a_checkpoint_resumes_on_another_number_of_data_devices(tmp_path):
    """The sum of the residuals of each block is unchanged."""
    run, rng = Run("tensor"), np.random.default_rng(0)
    fewer = dataclasses.replace(LAYOUTS["tensor"], axes=(("data", 2), ("model", 2)))
    arguments = {"tx": tx(), "param_specs": SPECS}

    def draw(path, x):
        """Residuals as after some steps."""
        drawn = "error" in str(path)
        return jax.device_put(rng.normal(size=x.shape), x.sharding) if drawn else x

    old, new = fewer.zero(), run.zero
    params, opt_state = old.init(make_state, **arguments)
    drawn = jax.tree_util.tree_map_with_path(draw, opt_state.sync_state)
    state = params, opt_state._replace(sync_state=drawn)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        target = new.abstract_state(make_state, sync_devices=2, **arguments)
        restored = new.resize_sync(checkpointer.restore(tmp_path / "state", target))
    expected = new.abstract_state(make_state, **arguments)
    kinds = [jax.tree.map(lambda x: (x.shape, x.sharding), s) for s in (restored, expected)]
    assert kinds[0] == kinds[1]
    before, after = (jax.device_get(s) for s in (state, restored))
    np.testing.assert_array_equal(after[0]["qsgd"], before[0]["qsgd"])
    found = jax.tree_util.tree_leaves_with_path(after[1].sync_state)
    for (path, x), y in zip(found, jax.tree.leaves(before[1].sync_state), strict=True):
        np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))
        if "error" in str(path):
            assert norm(x.sum(0) - y.sum(0)) <= 1e-14 * norm(y.sum(0))
        else:  # factors of PowerSGD, in proportion
            assert norm(x[0] - y[0] * len(y) / len(x)) <= 1e-14 * norm(y[0])
    run.step(restored, new.put(batch_of(0, 4)))


def test_states_that_cannot_be_resized():
    """Of other axes, of another sync, of other shards, and of none."""
    layout = LAYOUTS["tensor"]

    def zero_on(method=STATEFUL, **axes):
        return dataclasses.replace(layout, axes=tuple(axes.items()), method=method).zero()

    def state_of(zero):
        return zero.abstract_state(make_state, tx=tx(), param_specs=SPECS)

    state = state_of(layout.zero())
    for axes in ({"data": 2, "model": 4}, {"data": 2, "model": 1}):
        with pytest.raises(ValueError, match="of other axes of other sizes than"):
            zero_on(**axes).resize_sync(state)
    another = zero_on(sync.powersgd(2, min_compression=1.0), data=2, model=2)
    with pytest.raises(ValueError, match="is that of another sync"):
        another.resize_sync(state)
    with pytest.raises(ValueError, match=r"of 1 shards in a replica, and the mesh has 2"):
        zero_on(replicas=2, data=2, model=2).resize_sync(state)
    with pytest.raises(ValueError, match="holds no state of a gradient sync"):
        layout.zero().resize_sync(state_of(layout.zero(sync=None)))
