"""Gradient sync of parameters that axes besides the data axes shard: each block by itself."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sharding as shd
from sharding import sync
from sharding.pipeline import one_f_one_b
from sharding.plan.program._wire import collectives

from ..pipeline import model as transformer
from .harness import SyncRunner

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
STEPS, RATE = 4, 1e-3
SGD = optax.sgd(RATE)

METHODS = {
    "dense": sync.dense,
    "qsgd": lambda: sync.qsgd(8, block_size=64, min_size=1),
    "qsgd nearest": lambda: sync.qsgd(4, block_size=64, rounding="nearest", min_size=1),
    "powersgd": lambda: sync.powersgd(2, start_step=1, min_compression=1.0),
    "powersgd alternate": lambda: sync.powersgd(2, min_compression=1.0, alternate=True),
    "top_k": lambda: sync.top_k({0: 0.5, 2: 0.1}, momentum=0.9, nesterov=True, min_size=1),
    "ef21": lambda: sync.top_k(0.2, feedback="ef21", min_size=1),
    "zen": lambda: sync.zen(0.5, min_size=1),
    "zen element": lambda: sync.zen(0.5, granularity="element", min_size=1),
    "agsparse": lambda: sync.agsparse(0.5, min_size=1),
    "by_path": lambda: sync.by_path(
        {"kernel|up|stack": sync.powersgd(2, min_compression=1.0), "": sync.top_k(0.2, min_size=1)}
    ),
}


def mesh_of(kind=AUTO, **axes):
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    kinds = (kind,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=devices)


# --- A model that a mesh axis shards --------------------------------------------------------------

SHAPES = {"up": (32, 64), "stack": (4, 64, 64), "shared": (64, 64), "down": (64, 16), "bias": (64,)}
# Blocks along rows, columns and layers; ``shared`` and ``bias`` are replicated.
SPECS = {
    "up": P(None, "model"),
    "stack": P("model"),
    "shared": P(),
    "down": P("model"),
    "bias": P(),
}
# Layers over the one, columns over the other; rows over both.
SPECS_OF_TWO = SPECS | {"stack": P("pipe", None, "model"), "down": P(("pipe", "model"))}


def initial(dtype=jnp.float64):
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(0.1 * rng.normal(size=s), dtype) for k, s in SHAPES.items()}


def loss(params, x, gather=lambda tree: tree):
    """Full-rank gradients; those of blocks differ in scale."""
    scale = 2.0 ** (np.arange(64) // 16 - 2)[None]
    x = jnp.tanh(x @ (gather(params["up"]) * scale) + gather(params["bias"])[None])
    x = x + jnp.tanh(x @ gather(params["shared"]))

    def layer(x, indexed):
        i, w = indexed
        return x + 2.0 ** (i - 2) * jnp.tanh(x @ gather(w)), None

    x, _ = lax.scan(layer, x, (jnp.arange(4), params["stack"]))
    return jnp.mean((x @ (gather(params["down"]) * scale.T) - 1) ** 2)


def batch_of(step, num, rows=32, dtype=jnp.float64):
    """Devices of different size."""
    scale = np.repeat(2.0 ** (np.arange(num) - 2), rows // num)[:, None]
    return jnp.asarray(np.random.default_rng(step).normal(size=(rows, 32)) * scale, dtype)


def make_state(dtype=jnp.float64):
    return lambda: (initial(dtype), SGD.init(initial(dtype)))


def zero_of(mesh, stage, method, **options):
    return shd.Zero(mesh, stage, sync=method, **({"min_shard_size": 256} | options))


def train(zero, specs=None, steps=STEPS, rows=32, state=None, start=0, microbatches=1):
    specs = SPECS if specs is None else specs
    if state is None:
        state = zero.init(make_state(), tx=SGD, param_specs=specs)

    def replicated(params, x):
        # XLA:CPU runs independent collectives over different groups in any order, and may wait for
        # ever: all of the other axes come before the loss.
        return loss(lax.with_sharding_constraint(params, P()), x, zero.gather)

    step = zero.train_step(replicated, tx=SGD, microbatches=microbatches)
    for i in range(start, start + steps):
        state, _ = step(state, zero.put(batch_of(i, zero.num_devices, rows)))
    return state


# --- The same by hand -----------------------------------------------------------------------------


class BlockwiseSync:
    """A sync method for every block of the gradients by itself, on a mesh of the data axis alone.

    Args:
      method: the gradient sync.
      shapes: of the gradients, by path.
      specs: of the gradients on the other axes, by path.
      sizes: of the other axes, by name.
      num: the number of devices of the data axis.
      dims: the sharded dims of the gradients, by path.
    """

    def __init__(self, method, shapes, specs, sizes, num, dims):
        places = itertools.product(*(range(size) for size in sizes.values()))
        self.shapes = shapes
        self.blocks = [
            {
                k: _slices(shapes[k], specs[k], sizes, dict(zip(sizes, place, strict=True)))
                for k in shapes
            }
            for place in places
        ]
        self.runners = [
            SyncRunner(
                method, {k: np.empty(shapes[k])[at].shape for k, at in blocks.items()}, num, dims
            )
            for blocks in self.blocks
        ]

    def __call__(self, grads):
        """The sums of gradients (devices, ...) by path, as means that are scaled back."""
        out = {k: np.full(shape, np.nan) for k, shape in self.shapes.items()}
        for blocks, runner in zip(self.blocks, self.runners, strict=True):
            own = {k: grads[k][(slice(None), *at)] for k, at in blocks.items()}
            for k, mean in runner(own).items():
                out[k][blocks[k]] = mean * len(grads[k])
        return out


def _slices(shape, spec, sizes, place):
    """The block of an array at a place on the other axes."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    at = []
    for size, entry in zip(shape, entries, strict=True):
        axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        index, count = 0, 1
        for axis in axes:
            index, count = index * sizes[axis] + place[axis], count * sizes[axis]
        at.append(slice(index * size // count, (index + 1) * size // count))
    return tuple(at)


def sharded_dims(zero, state, specs, tx=SGD):
    """The dims along which gradients are sharded over the data axis, by path; 0 for none."""
    rows = zero.describe(state, tx=tx, param_specs=specs).rows
    return {
        row.path: tuple(row.spec).index("data") - len(row.shape) if "data" in row.spec else 0
        for row in rows
        if row.part == "grads"
    }


GRADS = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))


@functools.cache
def by_hand(name, num, stage, two=False):
    """On one device: the gradients of each shard of the batch, the sync by itself, the update."""
    sizes = {"pipe": 2, "model": 2} if two else {"model": 2}
    specs = SPECS_OF_TWO if two else SPECS
    # Means are quantized twice, shards of them once.
    zero = zero_of(mesh_of(data=num, **sizes), 2 if stage else 0, None)
    dims = sharded_dims(zero, make_state()(), specs)
    sum_of = BlockwiseSync(METHODS[name](), SHAPES, specs, sizes, num, dims)
    params = jax.device_get(initial())
    for i in range(STEPS):
        grads = jax.device_get(GRADS(params, batch_of(i, num).reshape(num, -1, 32)))
        sums = sum_of({k: g / num for k, g in grads.items()})
        params = jax.tree.map(lambda p, g: p - RATE * g, params, sums)
    return params, sum_of


def tolerance_of(name):
    """Scales of quantized blocks are float32: rounding noise may change their last bit."""
    return 1e-8 if name.startswith("qsgd") else 1e-12


def assert_same(have, want, tolerance=1e-12):
    for (k, a), b, start in zip(
        have.items(), want.values(), jax.device_get(initial()).values(), strict=True
    ):
        path = np.linalg.norm(b - start)
        assert path > 0
        assert np.linalg.norm(a - b) < tolerance * path, k


@pytest.mark.slow(keep=3)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", METHODS)
def test_each_block_is_synchronized_by_itself(name):
    """Parameters and state, at the stage of means and at that of shards."""
    for stage in (0, 2) if name in ("top_k", "qsgd", "zen") else (2,):
        want, by_blocks = by_hand(name, 4, stage)
        zero = zero_of(mesh_of(data=4, model=2), stage, METHODS[name]())
        state = train(zero)
        assert_same(zero.full_params(state), want, tolerance_of(name))
        if not isinstance(state[1], sync.SyncedState):
            continue
        found = jax.device_get(state[1].sync_state)
        for device, runner in enumerate(by_blocks.runners):
            expected = jax.device_get(runner.state)
            for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
                a = a[:, 0, device]
                assert np.linalg.norm(a - b) <= 1e-11 * np.linalg.norm(b)


@pytest.mark.slow(keep=1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("name", ["by_path", "qsgd"])
def test_two_other_axes(name, kind):
    zero = zero_of(mesh_of(kind, data=2, pipe=2, model=2), 1, METHODS[name]())
    state = train(zero, SPECS_OF_TWO)
    assert_same(zero.full_params(state), by_hand(name, 2, 1, two=True)[0], tolerance_of(name))
    leaf = jax.tree.leaves(state[1].sync_state)[-1]
    assert leaf.shape[:3] == (2, 1, 4)
    assert leaf.sharding.spec == P("data", None, ("pipe", "model"))


@pytest.mark.usefixtures("x64")
def test_the_state_of_replicated_parameters_is_the_same_on_all_devices():
    state = train(zero_of(mesh_of(data=4, model=2), 1, METHODS["top_k"]()))
    arrays = jax.device_get(state[1].sync_state.arrays)
    for k in SHAPES:
        one, other = (arrays[k]["error"][:, 0, i] for i in range(2))
        assert np.any(one)
        assert np.array_equal(one, other) == (k in ("shared", "bias")), k


# --- Lossless settings ----------------------------------------------------------------------------

LOSSLESS = {
    "top_k": lambda: sync.top_k(1.0, min_size=1),
    "ef21": lambda: sync.top_k(1.0, feedback="ef21", min_size=1),
    "qsgd": lambda: sync.qsgd(8, rounding="nearest", min_size=10**6),
    "zen": lambda: sync.zen(0.5, min_size=1),
    "agsparse": lambda: sync.agsparse(0.5, min_size=1),
}


@functools.cache
def plain(num, rows=32):
    """The parameters after the plain sum on the data axis alone."""
    zero = zero_of(mesh_of(data=num), 0, None)
    return zero.full_params(train(zero, P(), rows=rows))


@pytest.mark.slow(keep=3)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "stage", "kind", "microbatches"),
    [
        ("top_k", 1, EXPLICIT, 1),
        ("top_k", 2, AUTO, 2),
        ("ef21", 2, EXPLICIT, 1),
        ("qsgd", 2, AUTO, 1),
        ("qsgd", 3, EXPLICIT, 1),
        ("zen", 3, AUTO, 2),
        ("zen", 2, EXPLICIT, 1),
        ("agsparse", 3, AUTO, 1),
    ],
)
def test_lossless_methods_equal_the_plain_sum(name, stage, kind, microbatches):
    zero = zero_of(mesh_of(kind, data=4, model=2), stage, LOSSLESS[name]())
    have = zero.full_params(train(zero, microbatches=microbatches))
    assert_same(have, plain(4))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("stage", "spread"), [(1, True), (2, False), (3, False)])
def test_replicas(stage, spread):
    """Between replicas a method synchronizes shards of blocks; at stage 3 too."""
    mesh = mesh_of(replicas=2, data=2, model=2)
    options = {"replica_axis": "replicas", "shard_state_over_replicas": spread}
    zero = zero_of(mesh, stage, LOSSLESS["top_k"](), **options)
    state = train(zero)
    assert_same(zero.full_params(state), plain(4))
    error = state[1].sync_state.arrays["up"]["error"]
    assert error.shape == (2, 2, 2, 32, 32 // 2) or error.shape == (2, 2, 2, 32 // 2, 32)
    assert error.sharding.spec == P("replicas", "data", "model")


@pytest.mark.usefixtures("x64")
def test_powersgd_of_low_rank_gradients_equals_the_plain_sum():
    """The batch has as many examples as the matrices have ranks, so that nothing is lost."""
    zero = zero_of(mesh_of(data=4, model=2), 2, sync.powersgd(8, min_compression=1.0))
    assert_same(zero.full_params(train(zero, rows=8)), plain(4, rows=8), 1e-9)


# --- Lookups --------------------------------------------------------------------------------------


def lookup_loss(params, ids):
    return jnp.mean((jnp.tanh(shd.lookup(params["table"], ids) @ params["out"]) - 1) ** 2)


def train_lookups(zero, specs):
    """The parameters, and the compiled step."""

    def make():
        rng = np.random.default_rng(0)
        shapes = {"table": (512, 16), "out": (16, 32)}
        params = {k: jnp.asarray(rng.normal(size=s)) for k, s in shapes.items()}
        return params, SGD.init(params)

    def ids(step):
        return zero.put(np.random.default_rng(step).integers(0, 512, (16, 3)))

    state = zero.init(make, tx=SGD, param_specs=specs)
    step = zero.train_step(lookup_loss, tx=SGD)
    compiled = step.lower(state, ids(0)).compile()
    for i in range(STEPS):
        state, _ = step(state, ids(i))
    return zero.full_params(state), compiled


@pytest.mark.slow(keep=2)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("spec", "kind"), [(P(), AUTO), (P(None, "model"), EXPLICIT), (P("model"), AUTO)], ids=str
)
def test_looked_up_rows(spec, kind, stage):
    """Rows are synchronized as on the data axis alone; sharded columns are not gathered."""
    method = sync.by_path({"table": sync.zen(0.05, min_size=1)})
    columns = spec == P(None, "model")
    specs = {"table": spec, "out": P("model") if columns else P()}
    zero = zero_of(mesh_of(kind, data=4, model=2), stage, method)
    have, compiled = train_lookups(zero, specs)
    want, _ = train_lookups(zero_of(mesh_of(data=4), 0, None), P())
    for k, x in want.items():
        assert np.linalg.norm(have[k] - x) < 1e-12 * np.linalg.norm(x)
    if columns:
        assert {c.op for c in crossing(compiled, 2)} == {"all-reduce"}  # of activations


# --- On the wire ----------------------------------------------------------------------------------


def crossing(compiled, num_others):
    """The collectives between devices of the other axes, the last ones of the mesh."""
    return [
        c
        for c in collectives(compiled)
        if any(len({device % num_others for device in group}) > 1 for group in c.groups)
    ]


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize(
    ("name", "stage"),
    [
        *itertools.product(["top_k", "powersgd", "qsgd", "zen", "by_path"], [1, 2]),
        *itertools.product(["qsgd nearest", "zen"], [3]),
    ],
)
def test_nothing_crosses_the_other_axes(name, stage):
    """Between them a step sends what it sends with the plain sum: activations."""
    batch = jax.ShapeDtypeStruct((32, 32), jnp.float32)

    def sent(method):
        zero = zero_of(mesh_of(data=4, model=2), stage, method)
        state = zero.abstract_state(make_state(jnp.float32), tx=SGD, param_specs=SPECS)
        step = zero.train_step(lambda p, x: loss(p, x, zero.gather), tx=SGD)
        compiled = step.lower(state, batch).compile()
        assert all(c.groups for c in collectives(compiled))
        return sorted((c.op, c.elements, c.runs) for c in crossing(compiled, 2))

    found = sent(METHODS[name]())
    assert found
    assert found == sent(None)


# --- Pipelines ------------------------------------------------------------------------------------


def flat(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, P))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


@functools.cache
def pipeline_by_hand(name, num, stages):
    """The model with stacked layers on one device, each stage's gradients synchronized alone."""
    mesh = mesh_of(data=num, pipe=stages)
    pipe = transformer.pipeline(mesh, one_f_one_b(stages, 4))
    params = transformer.stack_layers(transformer.init_params("tied"))
    tree, specs = jax.tree.structure(params), pipe.param_specs(params)
    shapes = {k: x.shape for k, x in flat(params).items()}
    zero = zero_of(mesh, 2, None, min_shard_size=0)
    dims = sharded_dims(zero, (params, SGD.init(params)), specs)
    sum_of = BlockwiseSync(METHODS[name](), shapes, flat(specs), {"pipe": stages}, num, dims)
    grads_of = jax.jit(
        jax.vmap(jax.grad(transformer.loss_of_stacked, has_aux=True), in_axes=(None, 0))
    )
    for i in range(STEPS):
        shards = jax.tree.map(
            lambda x: x.reshape(num, -1, *x.shape[1:]), transformer.batch(i, "tied")
        )
        grads, weights = jax.device_get(grads_of(params, shards))
        sums = sum_of({k: g / np.sum(weights) for k, g in flat(grads).items()})
        update = tree.unflatten([sums[k] for k in shapes])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, update)
    return pipe.unstack(params)


@pytest.mark.slow(keep=3)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", METHODS)
def test_stages_of_a_pipeline(name):
    mesh = mesh_of(data=2, pipe=2)
    pipe = transformer.pipeline(mesh, one_f_one_b(2, 4))
    zero = zero_of(mesh, 2, METHODS[name](), min_shard_size=0)
    have, _, _ = transformer.train(pipe, zero, None, "tied", tx=optax.sgd(0.1), steps=STEPS)
    assert transformer.worst_leaf(have, pipeline_by_hand(name, 2, 2))[0] < tolerance_of(name)


@pytest.mark.slow(keep=2)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "stage", "kind", "gather"),
    [("top_k", 0, EXPLICIT, "step"), ("zen", 3, AUTO, "tick"), ("qsgd", 3, EXPLICIT, "tick")],
)
def test_lossless_pipelines_with_tensor_parallelism(name, stage, kind, gather):
    mesh = mesh_of(kind, data=2, pipe=2, model=2)
    pipe = transformer.pipeline(mesh, one_f_one_b(2, 4), gather=gather)
    layers = dict.fromkeys(("norm", "query", "value", "out"), P())
    layers |= {"up": P(None, None, "model"), "down": P(None, "model")}
    specs = {"layers": layers, "embed": P(), "norm": P()}
    runs = [
        transformer.train(
            pipe,
            zero_of(mesh, stage, method, min_shard_size=0),
            None,
            "tied",
            tx=optax.sgd(0.1),
            steps=2,
            specs=specs,
        )[0]
        for method in (None, LOSSLESS[name]())
    ]
    assert transformer.worst_leaf(*runs)[0] < 1e-12


# --- Other numbers of devices ---------------------------------------------------------------------


@pytest.mark.slow(keep=1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_a_checkpoint_resumes_on_another_number_of_data_devices(kind, tmp_path):
    """The mean of the residuals of each block is unchanged."""
    old, new = (zero_of(mesh_of(kind, data=n, model=2), 2, METHODS["top_k"]()) for n in (4, 2))
    state = train(old, steps=2)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        arguments = {"tx": SGD, "param_specs": SPECS}
        target = new.abstract_state(make_state(), sync_devices=4, **arguments)
        restored = new.resize_sync(checkpointer.restore(tmp_path / "state", target))
        expected = jax.tree.map(
            lambda x: (x.shape, x.sharding), new.abstract_state(make_state(), **arguments)
        )
        assert jax.tree.map(lambda x: (x.shape, x.sharding), restored) == expected
    before, after = (jax.device_get(s[1].sync_state.arrays) for s in (state, restored))
    for k in SHAPES:
        assert np.any(before[k]["error"][:, :, 0] != before[k]["error"][:, :, 1]) == bool(
            any(SPECS[k])
        )
        mean = before[k]["error"].mean(0)
        assert np.linalg.norm(after[k]["error"][1] - mean) <= 1e-14 * np.linalg.norm(mean)
    train(new, state=restored, start=2, steps=1)


# --- Bad input ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
def test_a_state_of_other_axes_of_other_sizes():
    state = train(zero_of(mesh_of(data=4, model=2), 2, METHODS["top_k"]()), steps=1)
    for mesh in (mesh_of(data=2, model=4), mesh_of(data=2)):
        other = zero_of(mesh, 2, METHODS["top_k"]())
        with pytest.raises(ValueError, match="of other axes of other sizes than"):
            other.resize_sync(state)
    another = zero_of(mesh_of(data=2, model=2), 2, METHODS["powersgd"]())
    with pytest.raises(ValueError, match="is that of another sync"):
        another.resize_sync(state)


def test_stage_3_takes_stateless_methods_alone():
    zero = zero_of(mesh_of(data=4, model=2), 3, METHODS["top_k"]())
    with pytest.raises(ValueError, match=r"at stage 3 .* Use a stateless sync"):
        zero.init(make_state(jnp.float32), tx=SGD, param_specs=SPECS)


def test_powersgd_counts_the_rows_of_blocks():
    """A matrix whose blocks are too small for the rank is not compressed."""
    zero = zero_of(mesh_of(data=2, model=4), 1, sync.powersgd(9, min_compression=1.0))
    state = zero.abstract_state(make_state(jnp.float32), tx=SGD, param_specs=SPECS)
    arrays = state[1].sync_state.arrays
    assert arrays["down"] == ()  # (16, 16); (64, 16) would be compressed
    assert arrays["stack"]["q"].shape == (2, 1, 4, 1, 64, 9)
    only_down = {"down": initial(jnp.float32)["down"]}
    with pytest.raises(ValueError, match=r"compresses no parameter.*\(16, 16\)"):
        zero.init(lambda: (only_down, SGD.init(only_down)), tx=SGD, param_specs=P("model"))


def test_what_is_described():
    zero = zero_of(mesh_of(data=4, model=2), 2, METHODS["top_k"]())
    found = zero.describe(jax.eval_shape(make_state(jnp.float32)), tx=SGD, param_specs=SPECS)
    row = next(row for row in found.rows if row.part == "sync" and row.path == "arrays/up/error")
    assert row.shape == (4, 1, 2, 32, 32)
    assert row.bytes_per_device == 32 * 32 * 4
