"""State in host memory: the same numbers, and never much of it on the device."""

import dataclasses
import functools
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_ext
import sharding as shd
from optax_ext.equations import inner_jaxprs
from optax_ext.traced_graph import Graph
from sharding._jaxprs import all_equations
from sharding.offload import _host_update, _layer_rules
from sharding.offload._host_memory import HOST, on_host
from sharding.offload._transformation import StreamedRun

from ...compilers import need
from ...tiers import slow
from .. import model

STEPS = 4
SHAPES = {
    "stack": (6, 16, 32),  # six layers
    "wide": (4, 32, 64),  # sharded along its last dim or its second, never the first
    "in": (8, 32),
    "out": (32, 64),
    "bias": (64,),
}


@pytest.fixture(autouse=True)
def small_layers(monkeypatch):
    monkeypatch.setattr(_layer_rules, "MIN_LAYER_SIZE", 128)


def initial():
    rng = np.random.default_rng(0)
    return {k: 0.3 * rng.normal(size=s) for k, s in SHAPES.items()}


def loss(params, x):
    """Full-rank gradients for every parameter."""
    x = jnp.tanh(x @ params["in"])
    x, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w.T) @ w, None), x, params["stack"])
    y = jnp.tanh(x @ params["out"]) + params["bias"][None]
    for w in params["wide"]:
        y = y + jnp.tanh(x @ w)
    return jnp.mean((y - 1) ** 2)


def batch_of(seed):
    scale = 10.0 ** np.repeat(np.arange(8) / 4, 2)[:, None]  # shards of different size
    return np.random.default_rng(seed).normal(size=(16, 8)) * scale


BY_LAYER = optax_ext.by_path(
    {"stack": optax_ext.Factoring((1,), (2,), (0,)), "": optax_ext.last_two_dims()}
)
LAYERWISE = optax_ext.came(1e-4, factoring=BY_LAYER)


def zero_of(*shape, offload="optimizer", **options):
    sizes = {"min_shard_size": 512, "offload_min_size": 512}
    return model.zero_on(*shape, offload=offload, **(sizes | options))


def run(zero, tx, **options):
    return model.run(zero, model.make_of(initial, tx), tx, loss, batch_of, STEPS, **options)


def assert_same(have, want):
    """Parameters as a part of the way that they went."""
    have, want = jax.device_get((have, want))
    paths = [jax.tree.map(np.subtract, state[0], initial()) for state in (have, want)]
    model.assert_close(*paths, 1e-12)
    model.assert_close(have[1], want[1], 1e-11)


def kinds_of(tree, large):
    leaves = [x for x in jax.tree.leaves(tree) if (x.size >= 512) == large]
    return {x.sharding.memory_kind for x in leaves}


# --- Zero -----------------------------------------------------------------------------------------


def test_a_stack_sharded_along_its_first_dim(x64):
    """Its layers are on different devices, so that it is loaded at once."""
    tx, specs = optax.adamw(1e-3), {k: P() for k in SHAPES} | {"stack": P("tensor")}
    state = run(zero_of(2, 2, names=("data", "tensor")), tx, param_specs=specs)
    assert_same(state, run(zero_of(1, offload=None), tx))
    assert kinds_of(state[1], large=True) == {"pinned_host"}
    assert kinds_of(state[1], large=False) | kinds_of(state[0], large=True) == {"device"}


def test_the_parts_of_a_step(x64):
    tx, zero = optax.adamw(1e-3), zero_of(8)

    @jax.jit
    def step(state, batch):
        _, grads = zero.value_and_grad(loss)(state[0], batch)
        return zero.apply_gradients(state, grads, tx=tx)

    state = zero.init(model.make_of(initial, tx), tx=tx)
    placed = jax.tree.map(lambda x: x.sharding.memory_kind, state)
    for i in range(STEPS):
        state = step(state, zero.put(batch_of(i)))
    assert jax.tree.map(lambda x: x.sharding.memory_kind, state) == placed
    assert_same(state, run(zero_of(1, offload=None), tx))
    # Nothing is loaded before all gradients are there.
    update = jax.make_jaxpr(lambda state, grads: zero.apply_gradients(state, grads, tx=tx))
    eqns = update(state, state[0]).eqns
    first = next(eqn for eqn in eqns if eqn.primitive.name == "optimization_barrier")
    assert set(SHAPES.values()) <= {v.aval.shape for v in first.invars}


def test_offload_min_size_alone_decides_what_is_offloaded():
    tx = optax.adamw(1e-3)
    abstract = jax.eval_shape(model.make_of(initial, tx))
    large = {name: math.prod(shape) for name, shape in SHAPES.items() if math.prod(shape) >= 300}
    assert large.keys() == {"stack", "wide", "out"}
    for min_shard_size, num_shards in ((0, 8), (10**6, 1)):
        options = {"min_shard_size": min_shard_size, "offload_min_size": 300}
        zero = zero_of(8, **options)
        kinds = jax.tree.map(lambda x: x.memory_kind, zero.shardings(abstract, tx=tx)[1][0].mu)
        assert {name for name, kind in kinds.items() if kind == "pinned_host"} == large.keys()
        found = zero.describe(abstract, tx=tx)
        plain = zero_of(8, offload=None, **options).describe(abstract, tx=tx)
        assert found.host_bytes_per_device == 2 * 4 * sum(large.values()) / num_shards
        assert plain.host_bytes_per_device == 0
        saved = plain.bytes_per_device["opt_state"] - found.bytes_per_device["opt_state"]
        assert saved == found.host_bytes_per_device
        assert found.table().count("in host memory") == 2 * len(large)
        assert "state in host memory" in str(found)
        assert "host memory" not in str(plain)


# --- The update on the CPU ------------------------------------------------------------------------

SCHEDULE = optax.cosine_decay_schedule(1e-3, 30)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(SCHEDULE, weight_decay=0.1))
ON_CPU = [
    (0, LAYERWISE),
    (1, CLIPPED),
    slow((1, optax_ext.lamb(1e-3))),
    (2, optax_ext.master_weights(CLIPPED)),
    slow((2, optax_ext.low_precision_state(optax.adamw(1e-3), min_size=512))),
    slow((2, optax.chain(optax.adam(1e-3), optax.clip_by_global_norm(1e-3)))),
    (3, optax_ext.adafactor(1e-3, momentum=0.9, factoring=BY_LAYER)),
    slow((3, optax.apply_if_finite(optax.adamw(1e-3), 3))),
]


@pytest.mark.parametrize(("stage", "tx"), ON_CPU)
@pytest.mark.filterwarnings("ignore:stage 3 with a loss", "ignore:offload", "ignore:update_on")
def test_the_update_on_the_cpu(x64, stage, tx):
    """It equals that of the devices; bfloat16 parameters have masters, in float32."""
    masters = "master" in str(jax.eval_shape(tx.init, initial()))
    dtype = jnp.bfloat16 if masters else np.float64

    def make_params():
        return {k: jnp.asarray(x, dtype) for k, x in initial().items()}

    def trained(update_on):
        zero, make = zero_of(8, stage=stage, update_on=update_on), model.make_of(make_params, tx)
        return model.run(zero, make, tx, loss, batch_of, 20)

    found, wanted = map(trained, ("host", "device"))
    if masters:  # whose last bit is that of each program's fusions
        model.assert_close(found[1], wanted[1], 1e-6)
    else:
        assert_same(found, wanted)
    assert kinds_of(found[1], large=True) == {"pinned_host"}
    assert kinds_of(found[0], large=True) == {"device"}


def test_sums_of_what_the_cpu_computed(x64, monkeypatch):
    monkeypatch.setattr(_host_update, "_MAX_BLOCK", 1)
    with pytest.warns(UserWarning, match="needs sums, over all devices"):
        state = run(zero_of(8, update_on="host"), LAYERWISE)
    assert_same(state, run(zero_of(8), LAYERWISE))


@pytest.mark.parametrize(
    ("num", "tx", "sent"),
    [
        (8, optax_ext.master_weights(CLIPPED), 4),  # gradients and parameters in bfloat16
        (1, optax_ext.master_weights(LAYERWISE), 4),
        (8, optax.adamw(SCHEDULE), 4),  # updates come back, and meet the parameters on the device
    ],
)
def test_what_moves_to_the_cpu_and_back(num, tx, sent):
    zero = zero_of(num, update_on="host")
    make = model.make_of(lambda: {"w": jnp.ones((6, 2048, 2048), jnp.bfloat16)}, tx)
    state = zero.abstract_state(make, tx=tx)
    eqns = jax.make_jaxpr(functools.partial(zero.apply_gradients, tx=tx))(state, state[0]).eqns
    (call,) = (eqn for eqn in eqns if eqn.primitive.name == "compute_on")
    moved = [v.aval for eqn in eqns for v in crossing(eqn)]
    moved += [v.aval for v in call.outvars if v.aval.memory_space != HOST]
    nbytes = sum(x.size * x.dtype.itemsize for x in moved)
    assert nbytes / state[0]["w"].size == pytest.approx(sent, rel=0.02)


def crossing(eqn):
    """The results of an equation that it moves to another memory."""
    pairs = zip(eqn.invars, eqn.outvars, strict=True) if eqn.primitive.name == "device_put" else ()
    return [b for a, b in pairs if a.aval.memory_space != b.aval.memory_space]


def test_wrong_options():
    assert zero_of(1, offload=None, update_on="host").offload == "optimizer"
    with pytest.raises(ValueError, match="'device' or 'host', got 'cpu'"):
        zero_of(1, update_on="cpu")
    with pytest.raises(ValueError, match="update_on='host' leaves the update to the CPU"):
        zero_of(8, offload="all", update_on="host")
    with pytest.raises(ValueError, match="'optimizer', 'all' or None, got 'params'"):
        zero_of(1, offload="params")


# --- Losses of stacks in host memory --------------------------------------------------------------


def penalized(params, x):
    """The stack is used beside its loop, by another one that runs backward, and in part."""
    again, _ = lax.scan(lambda x, w: (x + jnp.sin(w[0, 0] * x), None), x, params["stack"][::-1])
    penalty = 0.1 * jnp.sum(jnp.square(params["stack"]))
    return loss(params, x) + jnp.mean(again) + jnp.mean(x @ params["stack"][0, :8]) + penalty


def reshaped(params, x):
    """In jit, in a checkpoint, and by a loop over indices."""
    body = lambda i, x: jnp.tanh(x + x[:, :1] * params["wide"][i % 4, 0, 0])  # noqa: E731
    x = lax.fori_loop(0, 3, body, x)
    stack = 0.5 * jnp.swapaxes(params["stack"], 1, 2).reshape(6, 512).reshape(6, 16, 32)
    return jax.jit(jax.checkpoint(loss))(params | {"stack": stack}, x)


def weighted(params, x):
    """The sum and the weight of its rows."""
    each = jax.vmap(lambda row: loss(params, row[None]))(x)
    return jnp.sum(each * x[:, 0] ** 2), jnp.sum(x[:, 0] ** 2)


# What reads the stacks, stage, mesh and kind of its axes; options.
LOSSES = [
    (loss, 2, (1,), AxisType.Auto, {"microbatches": 2}),
    slow((loss, 3, (4,), AxisType.Explicit, {})),
    (penalized, 3, (4, 2), AxisType.Auto, {"microbatches": 2}),
    (penalized, 1, (1,), AxisType.Explicit, {"trainable": {k: k != "wide" for k in SHAPES}}),
    slow((reshaped, 3, (8,), AxisType.Auto, {})),
    (weighted, 2, (2,), AxisType.Auto, {"microbatches": 2, "weighted": True}),
]


def zero_of_stacks(*sizes, **options):
    names = ("data", "model")[: len(sizes)]
    return zero_of(*sizes, names=names, offload="all", **options)


@pytest.mark.parametrize(("fn", "stage", "sizes", "kind", "options"), LOSSES)
def test_a_loss_of_stacks_in_host_memory(x64, fn, stage, sizes, kind, options):
    """It has the values of plain JAX; gradients are where parameters are."""

    def mean(params, x):
        return fn(params, x) if fn is not weighted else jnp.divide(*fn(params, x))

    zero, params = zero_of_stacks(*sizes, stage=stage, kind=kind), initial()
    placed, x = zero.place(params), zero.put(batch_of(0))
    expected, grads = jax.jit(jax.value_and_grad(mean))(params, batch_of(0))
    trained = options.get("trainable") or dict.fromkeys(SHAPES, True)
    grads = {k: g * trained[k] for k, g in grads.items()}
    np.testing.assert_allclose(zero.eval_step(mean)((placed, None), x), expected, rtol=1e-12)
    run = zero.value_and_grad(fn, **options)
    for each in (run, jax.jit(run)):  # a step of one's own
        value, found = each(placed, x)
        np.testing.assert_allclose(value, expected, rtol=1e-12)
        model.assert_close(found, grads, 1e-12)
        kinds = [jax.tree.map(lambda x: x.sharding.memory_kind, tree) for tree in (found, placed)]
        assert kinds[0] == kinds[1]
    assert {k for k, kind in kinds[1].items() if kind == "pinned_host"} == {"stack", "wide"}
    # In host memory arrays are moved, and nothing is computed.
    eqns = all_equations(jax.make_jaxpr(run)(placed, x).jaxpr)
    made = {eqn.primitive.name for eqn in eqns for v in eqn.outvars if v.aval.memory_space == HOST}
    assert made <= MOVING, made


MOVING = {"device_put", "jit", "optimization_barrier", "reshard", "scan", "sharding_constraint"}


def loaded(jaxpr):
    """The sizes of arrays that are moved to the device or the host, in loops and outside."""
    own = [v.aval.size for eqn in jaxpr.eqns for v in crossing(eqn)]
    return own + [x for eqn in jaxpr.eqns for inner in inner_jaxprs(eqn) for x in loaded(inner)]


@pytest.mark.parametrize("cast", [False, True])
def test_loops_load_layer_by_layer(cast):
    """Cast or not; so they do in the backward pass, and leave gradients there."""

    def fn(params, x):
        stack = params["stack"].astype(jnp.bfloat16 if cast else jnp.float32)
        layer = lambda x, w: (x + jnp.tanh(x @ w.T) @ w, None)  # noqa: E731
        return jnp.mean(lax.scan(layer, jnp.tanh(x @ params["in"]).astype(stack.dtype), stack)[0])

    zero = zero_of_stacks(1)
    params = zero.place({k: jax.ShapeDtypeStruct(SHAPES[k], jnp.float32) for k in ("stack", "in")})
    x = jnp.ones((4, 8))
    for microbatches in (1, 2):
        run = zero.value_and_grad(fn, microbatches=microbatches)
        traced = jax.make_jaxpr(run)(params, x).jaxpr
        assert set(loaded(traced)) == {16 * 32}
        made = [v.aval for eqn in all_equations(traced) for v in eqn.outvars]
        assert not [a for a in made if a.shape == SHAPES["stack"] and a.memory_space != HOST]
    (once,) = loaded(jax.make_jaxpr(zero.eval_step(fn))((params, None), x).jaxpr)
    assert once == 16 * 32


PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "how_to" / "ema.md"


@pytest.mark.parametrize(("offload", "sizes"), [("optimizer", (4,)), ("all", (1,)), ("all", (4,))])
def test_averages_as_documented(x64, offload, sizes):
    """The recipes of the page on averages: values are plain ones, memory is that of parameters."""
    tx = optax.contrib.schedule_free_sgd(0.1)
    zero = zero_of(*sizes, stage=3, offload=offload, view="global")
    make = model.make_of(initial, tx)
    new = jax.tree.map(lambda x: np.sin(3 * x), initial())
    average, state = zero.place(initial()), (zero.place(new), zero.init(make, tx=tx)[1])
    placed = jax.tree.map(lambda x: x.sharding, state[0])
    assert placed == jax.tree.map(lambda x: x.sharding, zero.init(make, tx=tx)[0])
    assert placed["stack"].memory_kind == ("pinned_host" if offload == "all" else "device")

    # In memory of their own: a step donates it.
    again = zero.place(average)
    for a, b in zip(jax.tree.leaves(average), jax.tree.leaves(again), strict=True):
        pointers = [x.addressable_data(0).unsafe_buffer_pointer() for x in (a, b)]
        assert pointers[0] != pointers[1]

    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    names = {"jax": jax, "optax": optax, "state": state, "average": average}
    exec(next(block for block in blocks if "def on_device" in block), names)
    expected = optax.incremental_update(new, initial(), 0.001)
    free = optax.contrib.schedule_free_eval_params(make()[1], new)
    for name, like in (("average", expected), ("free", free)):
        model.assert_close(names[name], like, 1e-12)
        assert jax.tree.map(lambda x: x.sharding, names[name]) == placed
    x = zero.put(batch_of(0))
    differ = lambda both, x: loss(both[0], x) - loss(both[1], x)  # noqa: E731
    found = zero.eval_step(differ)(((names["average"], names["free"]), None), x)
    np.testing.assert_allclose(found, differ((expected, free), batch_of(0)), rtol=1e-10)
    if offload == "all":
        loaded = jax.device_put(average, jax.memory.Space.Device)
        with pytest.raises(ValueError, match=r"in pinned_host memory on the mesh"):
            zero.eval_step(loss)((loaded, None), x)


# --- The transformation ---------------------------------------------------------------------------


def test_the_transformation_equals_the_inner_one(x64):
    tx = shd.offload(LAYERWISE, min_size=512)
    params, state = model.make_of(initial, tx)()
    at, home = jax.tree.map(lambda x: x.sharding, (params, state))

    def step(tx, params, state, x):
        updates, state = tx.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    placement = {"in_shardings": (at, home, at["in"]), "out_shardings": (at, home)}
    streamed = jax.jit(functools.partial(step, tx), donate_argnums=1, **placement)
    plain = jax.jit(functools.partial(step, LAYERWISE))
    want = jax.jit(model.make_of(initial, LAYERWISE))()
    for i in range(STEPS):
        params, state = streamed(params, state, batch_of(i))
        want = plain(*want, batch_of(i))
    assert_same((params, state), want)
    assert kinds_of(state, large=True) == {"pinned_host"}
    assert kinds_of(params, large=True) == {"device"}


def traced_update(tx, params):
    return jax.make_jaxpr(lambda params: tx.update(params, tx.init(params), params))(params)


def test_a_warning_where_all_state_is_needed_at_once():
    late = optax.chain(optax.adam(1e-3), optax.clip_by_global_norm(1.0))
    params = {k: np.ones((64, 64), np.float32) for k in "abc"}
    with pytest.warns(UserWarning, match="clip by global norm after the moments"):
        traced_update(shd.offload(late), params)
    # One array outweighs the others: no fault of the transformation's.
    params["a"] = np.ones((640, 64), np.float32)
    traced_update(shd.offload(optax.adam(1e-3)), params)


# --- Streaming ------------------------------------------------------------------------------------


def put(x):
    return jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))


def streamed(fn, **options):
    """Streams a function of arrays that are all in host memory and replaced."""

    def call(*inputs):
        graph = Graph(lambda xs: list(fn(*xs)), inputs, [True] * len(inputs))
        return StreamedRun(graph, inputs, **options).run([0])

    return call


LOOP = re.compile(r"\b(scan|while)\[")
STACK = (4, 8, 16)
LAYER_BY_LAYER = {
    "elementwise": lambda x: jnp.tanh(x) * 2 + jnp.where(x > 0, x**3, -x),
    "sum of each": lambda x: x + jnp.sum(x, axis=(1, 2), keepdims=True),
    "largest of rows": lambda x: x - jnp.max(x, axis=2)[:, :, None],
    "a vector for all": lambda x: x * jnp.arange(16.0)[None, None],
    "one for each": lambda x: x * jnp.arange(4.0)[:, None, None],
    "which layer": lambda x: x + lax.broadcasted_iota(jnp.float32, STACK, 0),
    "transposed": lambda x: jnp.transpose(jnp.transpose(x, (2, 0, 1)) * 3, (1, 2, 0)),
    "blocks": lambda x: jnp.repeat(x.reshape(4, 8, 2, 8).max(3), 8, axis=2),
    "halves": lambda x: jnp.concatenate([x[:, :, 8:], 2 * x[:, :, :8]], axis=2),
    "padded": lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 2)))[:, :8, 2:],
    "squeezed": lambda x: jnp.squeeze(x[:, None] + 1, 1),
    "stacked": lambda x: jnp.stack([x, -x], 1).sum(1) + x,
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
    "rolled": lambda x: jnp.roll(x, 1, axis=0),
    "running": lambda x: jnp.cumsum(x, axis=0),
    "reshaped": lambda x: (x.reshape(2, 16, 16) * 2).reshape(STACK),
    "reversed": lambda x: x[::-1],
    "padded": lambda x: jnp.pad(x, ((1, 0), (0, 0), (0, 0)))[:4],
    "conditional": lambda x: lax.cond(x[0, 0, 0] > 0, jnp.sin, jnp.cos, x),
}


def test_each_operation():
    """Equal to the operation as it is, all in one program; some in a loop over layers."""
    fns = LAYER_BY_LAYER | {f"at once: {name}": fn for name, fn in AT_ONCE.items()}
    x = put(jnp.asarray(np.random.default_rng(0).normal(size=STACK), jnp.float32))
    calls = {name: streamed(lambda x, fn=fn: [fn(x)]) for name, fn in fns.items()}
    found = jax.jit(lambda x: {name: call(x)[0] for name, call in calls.items()})(x)
    wanted = jax.jit(lambda x: {name: fn(x) for name, fn in fns.items()})(np.asarray(x))
    for name, call in calls.items():
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
        assert on_host(found[name])
        text = str(jax.make_jaxpr(call)(x))
        assert bool(LOOP.search(text)) == (name in LAYER_BY_LAYER), name


@pytest.mark.parametrize("name", ["came by layer", "adafactor by layer", "8 bits, came by layer"])
def test_factored_optimizers_go_layer_by_layer(name):
    """With matrices so large that their passes branch on the platform outside of a stream."""
    tx = {
        "came by layer": optax_ext.came(1e-4, factoring=BY_LAYER),
        "adafactor by layer": optax_ext.adafactor(1e-3, momentum=0.9, factoring=BY_LAYER),
        "8 bits, came by layer": optax_ext.came8bit(1e-4, factoring=BY_LAYER),
    }[name]
    params = {"stack": np.ones((3, 512, 512), np.float32)}
    assert "platform_index" in str(traced_update(tx, params))
    text = str(traced_update(shd.offload(tx), params))
    assert LOOP.search(text)
    assert "cond[" not in text
    assert "platform_index" not in text


def test_each_load_waits_for_the_store_before_it():
    """Without the barriers XLA would load everything first."""
    tx = shd.offload(optax.trace(0.9), min_size=1)
    shapes = [(2, 4), (3, 4), (4, 4)]
    params = {str(i): jnp.ones(s) for i, s in enumerate(shapes)}
    eqns = jax.make_jaxpr(tx.update)(params, tx.init(params)).eqns
    moves, stored = [], []  # between memories, in the order in which data must flow
    for eqn in eqns:
        if eqn.primitive.name == "device_put":
            for a, b in zip(eqn.invars, eqn.outvars, strict=True):
                if a.aval.memory_space != b.aval.memory_space:
                    is_store = b.aval.memory_space == HOST
                    moves.append(("store" if is_store else "load", b.aval.shape))
                    stored += [b] * is_store
    assert moves == [(kind, shape) for shape in shapes for kind in ("load", "store")]
    barriers = [eqn for eqn in eqns if eqn.primitive.name == "optimization_barrier"]
    assert len(barriers) == 3
    assert len(barriers[0].invars) == 1 + 3  # the first load waits for all gradients
    for barrier, before in zip(barriers[1:], stored[:-1], strict=True):
        assert before in barrier.invars


@pytest.mark.parametrize(("target", "devices"), [("v5e:1x1", 1), ("v5e:2x4", 8)])
def test_memory_of_a_stream_of_layers_for_tpus(target, devices):
    """A layer and its state at a time, both updated in place; of each device its shard."""
    need(target)
    mesh = shd.targets.mesh(target, (devices,), ("data",))
    zero = shd.Zero(mesh, 3, offload="all")
    tx, shape = optax.adamw(1e-3), (16, 2048, 2048)
    make = model.make_of(lambda: {"v": jnp.ones(shape), "w": jnp.ones(shape)}, tx)

    def loss(params, x):
        layer = lambda x, p: (x + jnp.tanh(x @ p["v"]) @ p["w"], None)  # noqa: E731
        return jnp.mean(lax.scan(layer, x, params)[0])

    state = zero.abstract_state(make, tx=tx)
    step = zero.train_step(loss, tx=tx, update="backward")
    program = step.lower(state, np.ones((8, 2048), np.float32)).compile()
    memory = program.memory_analysis()
    matrix = 4 * 2048**2
    host = memory.host_alias_size_in_bytes, memory.host_argument_size_in_bytes
    assert host == (96 * matrix / devices,) * 2
    assert memory.host_temp_size_in_bytes == 0
    if devices == 1:  # of several it begins before the loop
        moves = len(re.findall(r"S\(5\).* dynamic(?:-update)?-slice-start\(", program.as_text()))
        planned = shd.plan.estimate(state[0], tx, zero, update="backward").stage("stage 3")
        assert moves * shape[0] * matrix == planned.host_wire
    # Each moment once, and of matrices that are gathered and reduced one in full.
    assert memory.temp_size_in_bytes < (7.5 if devices == 1 else 1.5) * matrix
    # Without an update, too.
    x = np.ones((8, 2048), np.float32)
    evaluated = zero.eval_step(loss).lower(state, x).compile().memory_analysis()
    assert evaluated.temp_size_in_bytes < (2.5 if devices == 1 else 0.5) * matrix
    found = zero.value_and_grad(loss).lower(state[0], x).compile().memory_analysis()
    assert found.host_output_size_in_bytes == 32 * matrix / devices
    assert found.temp_size_in_bytes < (3.5 if devices == 1 else 1.5) * matrix


def test_memory_of_a_program_for_tpus(monkeypatch):
    """The peak on the device falls by most of the state; the host holds it once."""
    monkeypatch.undo()
    need("v5e:2x4")
    mesh = shd.targets.mesh("v5e:2x4", (8,), ("data",))
    # Large, since libtpu 0.0.50 has a dozen tables of 16 KiB for each array.
    layers, shape = 8, (2048, 4096)
    tx = optax_ext.master_weights(optax.adamw(1e-3))
    make = model.make_of(lambda: {"w": jnp.ones((layers, *shape), jnp.bfloat16)}, tx)

    def program(zero):
        state = zero.abstract_state(make, tx=tx)
        placed = jax.tree.map(lambda x: x.sharding, state)
        update = functools.partial(zero.apply_gradients, tx=tx)
        step = jax.jit(update, donate_argnums=0, out_shardings=placed)
        return step.lower(state, state[0]).compile()

    plain, streamed = (shd.Zero(mesh, 3, offload=x) for x in (None, "optimizer"))
    plain, found = (program(zero).memory_analysis() for zero in (plain, streamed))
    each = 12 * np.prod(shape) / 8  # a layer's state on a device, in bytes
    moved = layers * each
    assert plain.argument_size_in_bytes - found.argument_size_in_bytes == moved
    assert found.host_argument_size_in_bytes == moved == found.host_alias_size_in_bytes
    assert found.host_temp_size_in_bytes == 0
    assert found.temp_size_in_bytes < 3.5 * each
    zero = dataclasses.replace(streamed, update_on="host")
    compiled = program(zero)
    on_cpu = compiled.memory_analysis()
    assert on_cpu.host_alias_size_in_bytes == moved
    assert on_cpu.host_temp_size_in_bytes == 0
    assert on_cpu.temp_size_in_bytes < 2.1 * moved / 6  # in bfloat16, of gradients and parameters
    # All of them at the ends of one call, as planned: nothing runs beside the update.
    (call,) = re.findall(r"= (.*)call-start\(", compiled.as_text())
    sent = re.findall(r"bf16\[([\d,]+)\]", call)
    nbytes = sum(2 * math.prod(map(int, shape.split(","))) for shape in sent)
    params = jax.eval_shape(make)[0]
    planned = shd.plan.estimate(params, tx, zero, gathered_once="").stage("stage 3")
    assert nbytes == planned.host_wire == moved / 3
    assert planned.moments["update"]["gathered"] == moved / 6
