"""State in host memory: the same numbers, and never much of it on the device."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_ext
import sharding as shd
from optax_ext.execution_order import Graph
from sharding.offload import _layer_rules
from sharding.offload._host_memory import HOST, on_host
from sharding.offload._stream import StreamedRun

from ...compilers import need

STEPS = 5
SHAPES = {
    "stack": (6, 16, 32),  # six layers
    "wide": (4, 32, 64),  # sharded along its last dim or its second, never the first
    "in": (8, 32),
    "out": (32, 64),
    "bias": (64,),
}


@pytest.fixture(autouse=True)
def small_layers(monkeypatch):
    """Layers of the tests are small."""
    monkeypatch.setattr(_layer_rules, "MIN_LAYER_SIZE", 128)


def initial(dtype=jnp.float64):
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(0.3 * rng.normal(size=s), dtype) for k, s in SHAPES.items()}


def loss(params, x):
    """Full-rank gradients for every parameter."""
    x = jnp.tanh(x @ params["in"])
    x, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w.T) @ w, None), x, params["stack"])
    y = jnp.tanh(x @ params["out"]) + params["bias"][None]
    for w in params["wide"]:
        y = y + jnp.tanh(x @ w)
    return jnp.mean((y - 1) ** 2)


GRAD, APPLY = jax.jit(jax.grad(loss)), jax.jit(optax.apply_updates)


def batch_of(seed, dtype=jnp.float64):
    scale = 10.0 ** np.repeat(np.arange(8) / 4, 2)[:, None]  # shards of different size
    return jnp.asarray(np.random.default_rng(seed).normal(size=(16, 8)) * scale, dtype)


BY_LAYER = optax_ext.by_path(
    {"stack": optax_ext.Factoring((1,), (2,), (0,)), "": optax_ext.last_two_dims()}
)
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-3),
    "master": lambda: optax_ext.master_weights(optax.adamw(1e-3)),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3)),
    "came": lambda: optax_ext.came(1e-4),
    "came by layer": lambda: optax_ext.came(1e-4, factoring=BY_LAYER),
    "adafactor": lambda: optax_ext.adafactor(1e-3, momentum=0.9),
    "lamb": lambda: optax.lamb(1e-3),
    "muon": lambda: optax.contrib.muon(1e-3),
    "8 bits": lambda: optax_ext.low_precision_state(optax.adamw(1e-3), 8, min_size=512),
    "4 bits": lambda: optax_ext.low_precision_state(optax.adamw(1e-3), 4, min_size=512),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.adamw)(1e-3),
}


def zero_of(num, stage, kind=AxisType.Auto, offload="optimizer", **options):
    mesh = jax.make_mesh((num,), ("data",), axis_types=(kind,), devices=jax.devices()[:num])
    options = {"min_shard_size": 512, "offload_min_size": 512} | options
    return shd.Zero(mesh, stage, offload=offload, **options)


def run(zero, tx, dtype=jnp.float64, steps=STEPS):
    """The state after some steps."""
    state = zero.init(lambda: (initial(dtype), tx.init(initial(dtype))), tx=tx)
    fn = loss
    if zero.stage == 3:
        fn = lambda params, x: loss(zero.gather(params), x)  # noqa: E731
    step = zero.train_step(fn, tx=tx)
    for i in range(steps):
        state, _ = step(state, zero.put(batch_of(i, dtype)))
    return state


@functools.cache
def alone(name):
    """The state on one device, nothing offloaded; the caller has set the precision."""
    return jax.device_get(run(zero_of(1, 0, offload=None), OPTIMIZERS[name]()))


def assert_same(have, want):
    start = initial()
    have, want = jax.device_get((have, want))
    for k in SHAPES:
        path = np.linalg.norm(want[0][k] - start[k])
        assert path > 0
        assert np.linalg.norm(have[0][k] - want[0][k]) < 1e-12 * path, k
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(have[1]), jax.tree.leaves(want[1]), strict=True
    ):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 1e-11 * np.linalg.norm(b), path


# --- Zero -----------------------------------------------------------------------------------------


@pytest.mark.slow(keep=4)
@pytest.mark.filterwarnings("ignore:the transformation's init")  # codes of so small arrays
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_numbers(name, x64):
    tx = OPTIMIZERS[name]()
    plain = run(zero_of(8, 2, offload=None), tx)
    state = run(zero_of(8, 2), tx)
    assert_same(state, plain)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state[1]) if x.size >= 512}
    assert kinds == {"pinned_host"}
    small = {x.sharding.memory_kind for x in jax.tree.leaves(state) if x.size < 512}
    assert small | {x.sharding.memory_kind for x in jax.tree.leaves(state[0])} == {"device"}


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("num", "stage"), [(1, 0), (8, 0), (4, 1), (2, 3), (8, 3)])
def test_stages_and_devices(num, stage, x64):
    tx = OPTIMIZERS["came by layer"]()
    assert_same(run(zero_of(num, stage), tx), alone("came by layer"))


def test_explicit_axes_and_replicas(x64):
    tx = OPTIMIZERS["clip"]()
    want = alone("clip")
    assert_same(run(zero_of(8, 2, AxisType.Explicit), tx), want)
    mesh = jax.make_mesh((2, 4), ("replica", "data"), axis_types=(AxisType.Auto,) * 2)
    hybrid = shd.Zero(
        mesh,
        3,
        replica_axis="replica",
        shard_state_over_replicas=True,
        min_shard_size=512,
        offload="optimizer",
        offload_min_size=512,
    )
    assert_same(run(hybrid, tx), want)


def test_a_stack_sharded_along_its_first_dim(x64):
    """Its layers are on different devices, so that it is loaded at once."""
    tx = optax.adamw(1e-3)
    specs = {k: P() for k in SHAPES} | {"stack": P("tensor")}
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    zero = shd.Zero(mesh, 2, min_shard_size=512, offload="optimizer", offload_min_size=512)
    state = zero.init(lambda: (initial(), tx.init(initial())), tx=tx, param_specs=specs)
    step = zero.train_step(loss, tx=tx)
    for i in range(STEPS):
        state, _ = step(state, zero.put(batch_of(i)))
    assert_same(state, alone("adamw"))


def test_a_checkpoint_resumes_with_and_without_offload(tmp_path, x64):
    tx = OPTIMIZERS["clip"]()
    want = run(zero_of(4, 2, offload=None), tx, steps=STEPS + 1)
    checkpointer = ocp.StandardCheckpointer()
    for i, (one, other) in enumerate([("optimizer", None), (None, "optimizer")]):
        checkpointer.save(tmp_path / str(i), run(zero_of(8, 2, offload=one), tx))
        checkpointer.wait_until_finished()
        zero = zero_of(4, 2, offload=other)
        make = lambda: (initial(), tx.init(initial()))  # noqa: E731
        state = checkpointer.restore(tmp_path / str(i), zero.abstract_state(make, tx=tx))
        moments = state[1][1][0].mu["stack"]
        assert moments.sharding.memory_kind == ("pinned_host" if other else "device")
        state, _ = zero.train_step(loss, tx=tx)(state, zero.put(batch_of(STEPS)))
        assert_same(state, want)


def test_the_parts_of_a_step(x64):
    tx = OPTIMIZERS["adamw"]()
    zero = zero_of(8, 2)
    state = zero.init(lambda: (initial(), tx.init(initial())), tx=tx)
    placed = jax.tree.map(lambda x: x.sharding, state)

    @jax.jit
    def step(state, batch):
        _, grads = zero.value_and_grad(loss)(state[0], batch)
        return zero.apply_gradients(state, grads, tx=tx)

    for i in range(STEPS):
        state = step(state, zero.put(batch_of(i)))
    assert jax.tree.map(lambda x: x.sharding.memory_kind, state) == jax.tree.map(
        lambda s: s.memory_kind, placed
    )
    assert_same(state, alone("adamw"))


def test_what_is_described():
    tx = optax.adamw(1e-3)
    abstract = jax.eval_shape(lambda: (initial("float32"), tx.init(initial("float32"))))
    plain = zero_of(8, 2, offload=None).describe(abstract, tx=tx)
    found = zero_of(8, 2).describe(abstract, tx=tx)
    large = sum(int(np.prod(s)) for s in SHAPES.values() if np.prod(s) >= 512)
    # "in" is not large, nor is "bias".
    assert large == 6 * 16 * 32 + 4 * 32 * 64 + 32 * 64
    assert found.host_bytes_per_device == 2 * 4 * large / 8
    assert plain.host_bytes_per_device == 0
    parts, before = found.bytes_per_device, plain.bytes_per_device
    assert before["opt_state"] - parts["opt_state"] == found.host_bytes_per_device
    assert found.table().count("in host memory") == 6
    assert "state in host memory" in str(found)
    assert "host memory" not in str(plain)


@pytest.mark.parametrize("min_shard_size", [0, 10**6])
def test_offload_min_size_alone_decides_what_is_offloaded(min_shard_size):
    tx = optax.sgd(1e-3, momentum=0.9)
    abstract = jax.eval_shape(lambda: (initial("float32"), tx.init(initial("float32"))))
    zero = zero_of(8, 2, min_shard_size=min_shard_size, offload_min_size=300)
    on_host = {name for name, shape in SHAPES.items() if np.prod(shape) >= 300}
    assert on_host == {"stack", "wide", "out"}
    kinds = jax.tree.map(lambda x: x.memory_kind, zero.shardings(abstract, tx=tx)[1][0].trace)
    assert {name for name, kind in kinds.items() if kind == "pinned_host"} == on_host
    rows = [row for row in zero.describe(abstract, tx=tx).rows if row.part == "opt_state"]
    assert {row.path.split("/")[-1] for row in rows if row.memory == "host"} == on_host


def test_bad_input():
    with pytest.raises(ValueError, match="offload must be 'optimizer' or None, got 'params'"):
        zero_of(8, 2, offload="params")
    with pytest.raises(ValueError, match="offload_min_size must not be negative, got -1"):
        zero_of(8, 2, offload_min_size=-1)


def test_compile_only_gpu_targets_are_rejected():
    need("h200x8")
    mesh = shd.targets.mesh("h200x8", (8,), ("data",))
    zero = shd.Zero(mesh, 2, offload="optimizer")
    with pytest.raises(ValueError, match=r"pinned_host memory, got .* Compile-only GPU targets"):
        zero.abstract_state(
            lambda: (initial("float32"), optax.adam(1e-3).init(initial("float32"))),
            tx=optax.adam(1e-3),
        )


# --- The transformation ---------------------------------------------------------------------------


@pytest.mark.slow(keep=3)
@pytest.mark.filterwarnings("ignore:the transformation's init")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_transformation_equals_the_inner_one(name, x64):
    inner = OPTIMIZERS[name]()
    tx = shd.offload(inner, min_size=512)
    params, want = initial(), initial()
    state, expected = tx.init(params), jax.jit(inner.init)(want)
    at, home = jax.tree.map(lambda x: x.sharding, (params, state))
    update = jax.jit(
        tx.update, donate_argnums=1, in_shardings=(at, home, at), out_shardings=(at, home)
    )
    plain = jax.jit(inner.update)
    for i in range(STEPS):
        updates, state = update(GRAD(params, batch_of(i)), state, params)
        params = APPLY(params, updates)
        updates_of_inner, expected = plain(GRAD(want, batch_of(i)), expected, want)
        want = APPLY(want, updates_of_inner)
    assert_same((params, state), (want, expected))
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state) if x.size >= 512}
    assert kinds == {"pinned_host"}
    assert all(x.sharding.memory_kind == "device" for x in jax.tree.leaves(updates))


def test_extra_arguments_reach_the_inner_one():
    tx = shd.offload(optax.contrib.reduce_on_plateau(patience=1))
    state = tx.init({"w": jnp.ones(3)})
    _, state = tx.update({"w": jnp.ones(3)}, state, value=2.0)
    assert state.best_value == 2.0


def test_init_inside_jit():
    tx = shd.offload(optax.adam(1e-3))
    state = jax.jit(tx.init)({"w": jnp.ones((64, 64)), "b": jnp.ones(3)})
    assert on_host(state[0].mu["w"])
    assert not on_host(state[0].mu["b"])


def test_a_warning_where_all_state_is_needed_at_once():
    late = optax.chain(optax.adam(1e-3), optax.clip_by_global_norm(1.0))
    params = {k: jnp.ones((64, 64)) for k in "abc"}
    tx = shd.offload(late)
    with pytest.warns(UserWarning, match="clip by global norm after the moments"):
        tx.update(params, tx.init(params), params)
    # One array outweighs the others: no fault of the transformation's.
    params["a"] = jnp.ones((640, 64))
    tx = shd.offload(optax.adam(1e-3))
    tx.update(params, tx.init(params), params)


def test_state_that_changes_its_structure():
    def update(updates, state, params=None):
        return updates, (state, state)

    tx = shd.offload(optax.GradientTransformation(lambda params: params, update))
    params = {"w": jnp.ones((64, 64))}
    with pytest.raises(ValueError, match="changes the structure of"):
        tx.update(params, tx.init(params))


# --- Streaming ------------------------------------------------------------------------------------


def put(x):
    return jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))


def streamed(fn, *arrays):
    """Streams a function of arrays that are all in host memory and replaced."""

    @jax.jit
    def call(*inputs):
        graph = Graph(lambda xs: list(fn(*xs)), inputs, [True] * len(inputs))
        return StreamedRun(graph, inputs).run([0])

    return call, call(*map(put, arrays))


def has_loop(fn, *arrays):
    return re.search(r"\b(scan|while)\[", str(jax.make_jaxpr(fn)(*arrays))) is not None


STACK = (4, 8, 16)
LAYER_BY_LAYER = {
    "elementwise": lambda x: jnp.tanh(x) * 2 + jnp.where(x > 0, x**3, -x),
    "sum of each": lambda x: x + jnp.sum(x, axis=(1, 2), keepdims=True),
    "largest of rows": lambda x: x - jnp.max(x, axis=2)[:, :, None],
    "a vector for all": lambda x: x * jnp.arange(16.0)[None, None],
    "one for each": lambda x: x * jnp.arange(4.0)[:, None, None],
    "which layer": lambda x: x + lax.broadcasted_iota(jnp.float32, STACK, 0),
    "which row": lambda x: x + lax.broadcasted_iota(jnp.float32, STACK, 1),
    "transposed": lambda x: jnp.transpose(jnp.transpose(x, (2, 0, 1)) * 3, (1, 2, 0)),
    "blocks": lambda x: jnp.repeat(x.reshape(4, 8, 2, 8).max(3), 8, axis=2),
    "halves": lambda x: jnp.concatenate([x[:, :, 8:], 2 * x[:, :, :8]], axis=2),
    "split": lambda x: jnp.concatenate(jnp.split(x, 2, axis=1)[::-1], axis=1),
    "padded": lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 2)))[:, :8, 2:],
    "squeezed": lambda x: jnp.squeeze(x[:, None] + 1, 1),
    "stacked": lambda x: jnp.stack([x, -x], 1).sum(1) + x,
    "stacked before": lambda x: jnp.stack([x, -x], 0).max(0),
    "bits": lambda x: lax.bitcast_convert_type(
        lax.bitcast_convert_type(x, jnp.uint32) ^ jnp.uint32(1 << 31), jnp.float32
    ),
    "barrier": lambda x: lax.optimization_barrier((x * 2, x))[0],
    "inner jit": lambda x: jax.jit(lambda y: y * 2)(x),
    "clamped": lambda x: lax.clamp(-0.5, x, 0.5),
}
AT_ONCE = {
    "sum of all": lambda x: x / jnp.sum(x),
    "over layers": lambda x: x - jnp.mean(x, axis=0)[None],
    "sorted": lambda x: jnp.sort(x, axis=0),
    "rolled": lambda x: jnp.roll(x, 1, axis=0),
    "running": lambda x: jnp.cumsum(x, axis=0),
    "reshaped": lambda x: (x.reshape(2, 16, 16) * 2).reshape(STACK),
    "reversed": lambda x: x[::-1],
    "padded": lambda x: jnp.pad(x, ((1, 0), (0, 0), (0, 0)))[:4],
    "conditional": lambda x: lax.cond(x[0, 0, 0] > 0, jnp.sin, jnp.cos, x),
}


@pytest.mark.slow(keep=9)
@pytest.mark.parametrize("name", [*LAYER_BY_LAYER, *(f"at once: {name}" for name in AT_ONCE)])
def test_each_operation(name):
    at_once = name.startswith("at once: ")
    fn = AT_ONCE[name.removeprefix("at once: ")] if at_once else LAYER_BY_LAYER[name]
    x = jnp.asarray(np.random.default_rng(0).normal(size=STACK), jnp.float32)
    call, (have,) = streamed(lambda x: [fn(x)], x)
    np.testing.assert_array_equal(np.asarray(have), np.asarray(jax.jit(fn)(x)))
    assert on_host(have)
    assert has_loop(call, put(x)) == (not at_once)


@pytest.mark.parametrize("name", ["came by layer", "adafactor by layer", "8 bits, came by layer"])
def test_factored_optimizers_go_layer_by_layer(name):
    """With matrices so large that their passes branch on the platform outside of a stream."""
    tx = {
        "came by layer": optax_ext.came(1e-4, factoring=BY_LAYER),
        "adafactor by layer": optax_ext.adafactor(1e-3, momentum=0.9, factoring=BY_LAYER),
        "8 bits, came by layer": optax_ext.came8bit(1e-4, factoring=BY_LAYER),
    }[name]
    params = {"stack": jnp.ones((3, 512, 512))}
    on_device = tx.init(params)
    assert "platform_index" in str(jax.make_jaxpr(tx.update)(params, on_device, params))
    tx = shd.offload(tx)
    state = tx.init(params)
    assert has_loop(tx.update, params, state, params)
    text = str(jax.make_jaxpr(tx.update)(params, state, params))
    assert "cond[" not in text
    assert "platform_index" not in text


def test_a_sharded_first_dim_has_no_loop():
    x = jnp.ones(STACK)
    fn = LAYER_BY_LAYER["elementwise"]
    call, _ = streamed(lambda x: [fn(x)], x)
    assert has_loop(call, put(x))

    def sharded(x):
        graph = Graph(lambda xs: [fn(xs[0])], [x], [True])
        return StreamedRun(graph, [x], first_dim_free=lambda i: False).run([0])

    assert not has_loop(sharded, put(x))


def test_two_stacks_and_a_sum_over_one_of_them():
    """Values that need all layers are computed before the loop, the others in it."""
    rng = np.random.default_rng(1)
    m, v = (jnp.asarray(rng.normal(size=STACK), jnp.float32) for _ in range(2))
    grads = jnp.asarray(rng.normal(size=STACK), jnp.float32)

    def fn(m, v):
        norm = jnp.sqrt(jnp.sum(grads**2))  # of all layers, but not of the state
        return m + grads / norm, v * 0.9 + jnp.mean(m, axis=2, keepdims=True) * grads

    call, have = streamed(fn, m, v)
    for a, b in zip(have, jax.jit(fn)(m, v), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6, atol=1e-6)
    assert has_loop(call, put(m), put(v))


def loads_and_stores(jaxpr):
    """Moves between memories in the order in which data must flow, as (which, shape)."""
    found = []
    for eqn in jaxpr.eqns:
        inner = [p for p in eqn.params.values() if hasattr(p, "eqns") or hasattr(p, "jaxpr")]
        if eqn.primitive.name in ("jit", "pjit"):
            for sub in inner:
                found += loads_and_stores(getattr(sub, "jaxpr", sub))
        elif eqn.primitive.name == "device_put":
            for a, b in zip(eqn.invars, eqn.outvars, strict=True):
                if a.aval.memory_space != b.aval.memory_space:
                    kind = "store" if b.aval.memory_space == HOST else "load"
                    found.append((kind, b.aval.shape))
    return found


def test_each_load_waits_for_the_store_before_it():
    """Without the barriers XLA would load everything first."""
    tx = shd.offload(optax.trace(0.9), min_size=1)
    params = {k: jnp.ones((2 + i, 4)) for i, k in enumerate("abc")}
    jaxpr = jax.make_jaxpr(tx.update)(params, tx.init(params))
    moves = [
        (kind, shape)
        for i in range(3)
        for kind, shape in (("load", (2 + i, 4)), ("store", (2 + i, 4)))
    ]
    assert loads_and_stores(jaxpr.jaxpr) == moves
    barriers = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "optimization_barrier"]
    stored = [
        out
        for e in jaxpr.jaxpr.eqns
        if e.primitive.name == "device_put"
        for out in e.outvars
        if out.aval.memory_space == HOST
    ]
    assert len(barriers) == 3
    assert len(barriers[0].invars) == 1 + 3  # the first load waits for all gradients
    for barrier, before in zip(barriers[1:], stored[:-1], strict=True):
        assert before in barrier.invars


# --- Compiled for TPUs ----------------------------------------------------------------------------


@pytest.mark.parametrize("stacked", [True, False])
def test_memory_of_a_program_for_tpus(stacked, monkeypatch):
    """The peak on the device falls by most of the state; the host holds it once."""
    monkeypatch.undo()
    need("v5e:2x4")
    mesh = shd.targets.mesh("v5e:2x4", (8,), ("data",))
    # Large, since libtpu 0.0.50 has a dozen tables of 16 KiB for each array.
    layers, shape = 8, (2048, 4096)
    tx = optax_ext.master_weights(optax.adamw(1e-3))
    names = ["w"] if stacked else [f"w{i}" for i in range(layers)]
    params = {
        k: jax.ShapeDtypeStruct((layers, *shape) if stacked else shape, jnp.bfloat16) for k in names
    }

    def make():
        made = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), params)
        return made, tx.init(made)

    def memory(offload):
        zero = shd.Zero(mesh, 3, offload=offload)
        state = zero.abstract_state(make, tx=tx)
        placed = jax.tree.map(lambda x: x.sharding, state)
        step = jax.jit(
            lambda state, grads: zero.apply_gradients(state, grads, tx=tx),
            donate_argnums=0,
            out_shardings=placed,
        )
        return step.lower(state, state[0]).compile().memory_analysis()

    plain, found = memory(None), memory("optimizer")
    each = 12 * np.prod(shape) / 8  # a layer's state on a device, in bytes
    moved = layers * each
    assert plain.argument_size_in_bytes - found.argument_size_in_bytes == moved
    assert found.host_argument_size_in_bytes == moved == found.host_alias_size_in_bytes
    assert found.host_temp_size_in_bytes == 0
    assert found.temp_size_in_bytes < 3.5 * each
