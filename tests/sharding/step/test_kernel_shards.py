"""Kernels of an update run on shards: the numbers of XLA's form, and the promised bytes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_ext
import sharding as shd
from optax_ext import kernels
from optax_ext.low_precision import _row_loop
from sharding.placement._layout import Layout
from sharding.step._kernel_shards import KernelShards

from ...compilers import need
from ...pallas_calls import kernels_in

SHAPES = {
    "up": (512, 256),
    "wide": (72, 2048),  # sharded by columns
    "stack": (2, 512, 256),
    "bias": (64,),
    "heads": (256, 8, 128),  # of which no kernel takes the rows
    "uneven": (520, 130),  # shards of 65 rows end within a block
}


def initial():
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in SHAPES.items()}


def batch(step, num=8):
    """The gradient of each example: of full rank, on each device another, of another size."""
    rng = np.random.default_rng(100 + step)
    size = 10.0 ** rng.uniform(-2, 1, num)
    return {
        k: (rng.normal(size=(num, *s)) * size.reshape(num, *[1] * len(s))).astype(np.float32)
        for k, s in SHAPES.items()
    }


def loss(params, batch):
    """Linear, so that gradients do not depend on how parameters are rounded."""
    one_each = {k: jnp.sum(batch[k] * p[None], range(1, p.ndim + 1)) for k, p in params.items()}
    return sum(map(jnp.mean, one_each.values()))


def transformation(implementation):
    inner = optax.chain(optax.clip_by_global_norm(100.0), optax.adamw(1e-2))
    return optax_ext.low_precision_state(inner, implementation=implementation, min_size=1024)


def assert_same(have, want):
    start = initial()
    for k, x in want[0].items():
        moved = np.max(np.abs(x - start[k]))
        assert moved > 0
        assert np.max(np.abs(have[0][k] - x)) <= 1e-6 * np.max(np.abs(x)), k
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(have[1]), jax.tree.leaves(want[1]), strict=True
    ):
        if a.dtype == np.uint8:
            assert np.mean(a != b) < 1e-3, path
        else:
            np.testing.assert_allclose(a, b, rtol=1e-6, err_msg=str(path))


def check(zero, specs=None, wrap=lambda tx: tx, form="pallas"):
    """Each step of the kernel's from a state of XLA's, so that no rounding adds up."""
    tx, tiled = wrap(transformation("xla")), wrap(transformation(form))
    state = zero.init(lambda: (initial(), tx.init(initial())), tx=tx, param_specs=specs)
    step, step_tiled = (zero.train_step(loss, tx=one) for one in (tx, tiled))
    places = jax.tree.map(lambda x: x.sharding, state)
    for i in range(2):
        before, data = jax.device_get(state), zero.put(batch(i))
        with kernels.interpreted():
            have, _ = step_tiled(jax.device_put(before, places), data)
        state, _ = step(jax.device_put(before, places), data)
        assert_same(*jax.device_get((have, state)))


CASES = {
    "stage 2": ({"stage": 2}, (8,), ("data",), AxisType.Auto),
    "stage 1, two axes": ({"stage": 1, "axis": ("x", "y")}, (2, 4), ("x", "y"), AxisType.Auto),
    "stage 2, replicas": (
        {"stage": 2, "replica_axis": "replica", "shard_state_over_replicas": True},
        (2, 4),
        ("replica", "data"),
        AxisType.Auto,
    ),
    "stage 3, Explicit": ({"stage": 3}, (8,), ("data",), AxisType.Explicit),
}


@pytest.mark.slow(keep=1)
@pytest.mark.filterwarnings("ignore:stage 3 with a loss that gathers no layer")
@pytest.mark.parametrize("case", CASES)
def test_equals_the_form_of_xla(case):
    fields, shape, axes, kind = CASES[case]
    mesh = jax.make_mesh(shape, axes, axis_types=(kind,) * len(axes))
    zero = shd.Zero(mesh, min_shard_size=512, **fields)
    check(zero)


def test_beside_tensor_parallelism():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    zero = shd.Zero(mesh, stage=2, min_shard_size=512)
    specs = dict.fromkeys(SHAPES, P()) | {"up": P(None, "model"), "stack": P(None, "model")}
    check(zero, specs)


@pytest.mark.slow
def test_updates_that_leave_the_kernel():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    zero = shd.Zero(mesh, stage=2, min_shard_size=512)
    check(zero, wrap=lambda tx: optax.chain(tx, optax.scale(0.5)))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: optax.chain(tx, optax.scale(0.5))])
def test_a_loop_over_rows(wrap, monkeypatch):
    for form in (_row_loop.RowLoop, _row_loop.LoopOfUpdates):
        monkeypatch.setattr(form, "min_size", 0)
        monkeypatch.setattr(form, "min_padded", 0)
    monkeypatch.setattr(_row_loop, "_MIN_STEP", 0)
    monkeypatch.setattr(_row_loop, "_STEP_SIZE", 2**12)
    shapes, update = [], _row_loop.RowLoop.__call__

    def looped(self, *operands):
        made = update(self, *operands)
        shapes.append(next(x.shape for x in made if x.dtype == jnp.uint8))
        return made

    monkeypatch.setattr(_row_loop.RowLoop, "__call__", looped)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    check(shd.Zero(mesh, stage=2, min_shard_size=512), wrap=wrap, form="rows")
    # "uneven" and "heads" are left to XLA.
    assert {(64, 256), (72, 256), (2, 64, 256)} <= set(shapes)


def test_paths_that_read_alike_are_not_confused():
    shards = {"a": {"b": (64, 128)}, "a/b": (64, 256), "c": (64, 128)}
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    layout = Layout(mesh, 2, "data")
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


def kernels_of_step(zero):
    """The shapes of the codes that kernels write, on one device."""
    tx = transformation("pallas")
    state = zero.abstract_state(lambda: (initial(), tx.init(initial())), tx=tx)
    step = zero.train_step(loss, tx=tx)
    calls = kernels_in(lambda *args: step(*args), state, batch(0))
    return sorted(
        next(v.aval.shape for v in call.outvars if v.aval.dtype == jnp.uint8) for call in calls
    )


def test_each_device_updates_its_shard():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    zero = shd.Zero(mesh, stage=2, min_shard_size=512)
    # (matrices, rows, columns); "uneven" and "heads" are left to XLA.
    assert kernels_of_step(zero) == [(1, 64, 256), (1, 72, 256), (2, 64, 256)]
    flat = shd.Zero(jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,)), stage=0)
    assert kernels_of_step(flat) == [
        (1, 72, 2048), (1, 512, 256), (1, 520, 130), (2, 512, 256),
    ]  # fmt: skip


# --- Bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["v5e:1x1", "v6e:1x1"])
@pytest.mark.parametrize(
    "shape", [(4096, 11008), (50257, 768), (32000, 4096), (4, 2048, 2048), (4096, 1376)], ids=str
)
def test_bytes_and_temporaries(target, shape):
    """16.1 bytes a parameter with the parameters inside: gradient 4, parameter 8, codes 4."""
    need(target)
    mesh = shd.targets.mesh(target, (1,), ("data",))
    zero, size = shd.Zero(mesh, stage=0), math.prod(shape)
    tx = optax_ext.low_precision_state(optax.adamw(1e-3), implementation="pallas")

    def step(state, grads):
        return zero.apply_gradients(state, grads, tx=tx, param_specs={"w": P()})

    state = zero.abstract_state(lambda: (lambda p: (p, tx.init(p)))({"w": jnp.zeros(shape)}), tx=tx)
    grads = {"w": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=state[0]["w"].sharding)}
    compiled = jax.jit(step, donate_argnums=0).lower(state, grads).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.1 * size
    assert sum(shd.audit(compiled).nbytes.values()) <= 16.5 * size


def test_bytes_of_updates_that_leave_the_kernel():
    """Update and parameter are 12 bytes more than in the kernel; Adam does not read parameters."""
    need("v5e:1x1")
    mesh = shd.targets.mesh("v5e:1x1", (1,), ("data",))
    tx = optax_ext.low_precision_state(optax.adam(1e-3), implementation="pallas")
    place, shape = jax.NamedSharding(mesh, P()), (50257, 768)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        (params, jax.eval_shape(tx.init, params), params),
    )
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()
    assert sum(shd.audit(compiled).nbytes.values()) <= 24.5 * math.prod(shape)
