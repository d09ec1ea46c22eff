"""Pipelines beside everything else that a step may have, and what they reject."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_ext
import sharding as shd
from sharding.pipeline import Schedule, gpipe, interleaved, one_f_one_b, zb_h1
from sharding.plan.program._wire import collectives

from ...flax_nnx import needs_nnx, nnx
from . import model

AUTO = AxisType.Auto


def mesh_of(kind=AUTO, **axes):
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    kinds = (kind,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=devices)


def check(pipe, zero, name="came", variant="tied", **options):
    want, expected = model.train_alone(name, variant)
    params, losses, state = model.train(pipe, zero, name, variant, **options)
    distance, leaf = model.worst_leaf(params, want)
    assert distance < 1e-12, leaf
    np.testing.assert_allclose(losses, expected, rtol=1e-12)
    return state


# --- Meshes ---------------------------------------------------------------------------------------


@pytest.mark.slow(keep=1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("stage", [1, 3])
def test_hybrid(stage):
    mesh = mesh_of(replica=2, data=2, pipe=2)
    zero = shd.Zero(mesh, stage=stage, replica_axis="replica", min_shard_size=0)
    check(model.pipeline(mesh, one_f_one_b(2, 4)), zero)


@pytest.mark.slow(keep=1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("stage", "kind", "gather"),
    [(2, AUTO, "step"), (3, AUTO, "step"), (3, AUTO, "tick"), (2, AxisType.Explicit, "step")],
)
def test_tensor_parallelism(stage, kind, gather):
    mesh = mesh_of(kind, data=2, pipe=2, model=2)
    pipe = model.pipeline(mesh, one_f_one_b(2, 4), gather=gather)
    of_layers = {
        "norm": P(),
        "query": P(),
        "value": P(),
        "out": P(),
        "up": P(None, None, "model"),
        "down": P(None, "model"),
    }
    specs = {"layers": of_layers, "embed": P(), "norm": P()}
    state = check(pipe, shd.Zero(mesh, stage=stage, min_shard_size=0), variant="tied", specs=specs)
    assert state[0]["layers"]["up"]["kernel"].sharding.spec[0] == "pipe"
    assert state[0]["layers"]["up"]["kernel"].sharding.spec[2] == "model"


@pytest.mark.usefixtures("x64")
def test_without_zero():
    for kind in (AUTO, AxisType.Explicit):
        mesh = mesh_of(kind, pipe=4)
        pipe = model.pipeline(mesh, one_f_one_b(4, 4))
        params, batch = model.init_params("tied"), model.batch(0, "tied")
        stacked = pipe.stack(params)
        specs = pipe.param_specs(stacked)
        placed = jax.device_put(stacked, jax.tree.map(lambda s, m=mesh: NamedSharding(m, s), specs))
        grads, weight = jax.jit(jax.grad(pipe.loss, has_aux=True))(placed, batch)
        want, expected = jax.jit(jax.grad(model.loss_alone, has_aux=True))(params, batch)
        assert model.worst_leaf(pipe.unstack(jax.device_get(grads)), want)[0] < 1e-13
        assert float(weight) == pytest.approx(float(expected), rel=1e-14)
        found = pipe.loss(placed, batch)  # not compiled
        np.testing.assert_allclose(found, model.loss_alone(params, batch), rtol=1e-13)


# --- Options of Zero ------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
def test_microbatches_of_zero_too():
    mesh = mesh_of(data=2, pipe=2)
    pipe = model.pipeline(mesh, one_f_one_b(2, 4))
    check(pipe, shd.Zero(mesh, stage=2, min_shard_size=0), microbatches=2)


@pytest.mark.usefixtures("x64")
def test_offload():
    mesh = mesh_of(data=2, pipe=2)
    zero = shd.Zero(mesh, stage=2, min_shard_size=0, offload="optimizer", offload_min_size=0)
    state = check(model.pipeline(mesh, one_f_one_b(2, 4)), zero)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state[1]) if x.ndim}
    assert "pinned_host" in kinds


def stacked_alone(zero, tx, steps=3):
    """The model with stacked layers by Zero alone: with the same devices of the data axis."""
    mesh = mesh_of(pipe=1)
    pipe = model.pipeline(mesh, one_f_one_b(1, 1))

    def loss(params, batch):
        layers = params["layers"]
        x = model.embed(params, batch)
        x, _ = jax.lax.scan(lambda x, layer: (model.block(layer, x, batch), None), x, layers)
        return model.head(params, x, batch)

    def make():
        params = pipe.stack(jax.tree.map(jnp.asarray, model.init_params("tied")))
        return params, tx.init(params)

    state = zero.init(make, tx=tx)
    step = zero.train_step(loss, tx=tx, weighted=True)
    for i in range(steps):
        state, _ = step(state, zero.put(model.batch(i, "tied")))
    return pipe.unstack(zero.full_params(state))


@pytest.mark.usefixtures("x64")
def test_gradient_sync():
    """Lossless here; tests/sharding/sync/test_other_axes.py has the others."""
    mesh = mesh_of(data=2, pipe=2)
    sync = shd.sync.top_k(1.0, min_size=1)
    zero = shd.Zero(mesh, stage=1, min_shard_size=0, sync=sync)
    check(model.pipeline(mesh, one_f_one_b(2, 4)), zero)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_low_precision_state():
    tx = optax_ext.low_precision_state(optax.adam(1e-3), min_size=0)
    mesh = mesh_of(data=2, pipe=2)
    zero = shd.Zero(mesh, stage=2, min_shard_size=0)
    pipe = model.pipeline(mesh, one_f_one_b(2, 4))
    params, _, _ = model.train(pipe, zero, None, "tied", steps=3, tx=tx)
    want = stacked_alone(shd.Zero(mesh_of(data=2), stage=2, min_shard_size=0), tx)
    assert model.worst_leaf(params, want)[0] < 1e-10


@pytest.mark.usefixtures("x64")
def test_frozen_parameters():
    """Gradients of what is not trained are not computed."""
    mesh = mesh_of(data=2, pipe=2)
    zero = shd.Zero(mesh, stage=2, min_shard_size=0)
    pipe = model.pipeline(mesh, one_f_one_b(2, 4))
    params = pipe.stack(jax.tree.map(jnp.asarray, model.init_params("tied")))
    trainable = jax.tree.map(lambda _: False, params)
    trainable["layers"]["query"] = {"kernel": True, "bias": True}
    shardings = zero.shardings(
        (params, optax.identity().init(params)),
        tx=optax.identity(),
        param_specs=pipe.param_specs(params),
    )
    batch = model.batch(0, "tied")
    value_and_grad = zero.value_and_grad(pipe.loss, weighted=True, trainable=trainable)
    _, grads = value_and_grad(jax.device_put(params, shardings[0]), zero.put(batch))
    want = jax.grad(lambda p: (lambda s, w: s / w)(*model.loss_alone(p, batch)))(
        model.init_params("tied")
    )
    found = pipe.unstack(grads)
    for i in range(model.NUM_LAYERS):
        name = f"block_{i}"
        assert model.worst_leaf(found[name]["query"], want[name]["query"])[0] < 1e-12
        assert not np.any(found[name]["up"]["kernel"])

    def flops(trained):
        def loss(query):
            layers = params["layers"] | ({"query": query} if trained == "query" else query)
            return pipe.loss(params | {"layers": layers}, batch)[0]

        given = params["layers"]["query"] if trained == "query" else params["layers"]
        return jax.jit(jax.grad(loss)).lower(given).compile().cost_analysis()["flops"]

    assert flops("query") < 0.95 * flops("layers")


@pytest.mark.usefixtures("x64")
def test_auxiliary_outputs():
    """Scalars are averaged over micro-batches, arrays of examples concatenated."""
    mesh = mesh_of(data=2, pipe=2)
    zero = shd.Zero(mesh, stage=1, min_shard_size=0)

    def head(shared, x, batch):
        out = model.head(shared, x, batch)
        return out, {"mean": jnp.mean(batch["mask"]), "first": batch["tokens"][:, 0]}

    pipe = shd.Pipeline(
        mesh,
        one_f_one_b(2, 4),
        num_layers=model.NUM_LAYERS,
        embed=model.embed,
        block=model.block,
        head=head,
        numbered="block_{}",
        has_aux=True,
    )
    params = pipe.stack(jax.tree.map(jnp.asarray, model.init_params("tied")))
    tx, batch = optax.sgd(0.1), model.batch(0, "tied")
    state = zero.init(
        lambda: (params, tx.init(params)), tx=tx, param_specs=pipe.param_specs(params)
    )
    step = zero.train_step(pipe.loss, tx=tx, weighted=True, has_aux=True, donate=False)
    _, metrics = step(state, zero.put(batch))
    assert float(metrics["aux"]["mean"]) == pytest.approx(np.mean(batch["mask"]), rel=1e-12)
    np.testing.assert_array_equal(metrics["aux"]["first"], batch["tokens"][:, 0])
    sums, aux = zero.eval_step(pipe.loss)(state, zero.put(batch))
    np.testing.assert_array_equal(aux["first"], batch["tokens"][:, 0])
    expected = np.asarray(pipe.sequential_loss(params, batch)[0][0])
    np.testing.assert_allclose(2 * sums[0], expected, rtol=1e-12)  # a mean over data shards


def test_cotangents_and_narrow_dtypes():
    """The cotangent may be of NumPy, and large sums are scaled before they are cast."""
    pipe = plain(
        mesh_of(pipe=2), one_f_one_b(2, 2), head=lambda shared, x, _: (100 * jnp.sum(x), 1.0)
    )
    params = {"layers": 2 * jnp.ones((4, 1, 1), jnp.bfloat16)}
    x = jnp.ones((4, 1), jnp.bfloat16)
    (total, _), pull = jax.vjp(lambda p: pipe.loss(p, x), params)
    assert float(total) == 100 * 4 * 16
    for one in (np.float32(0.25), jnp.float32(0.25)):
        (grads,) = pull((one, np.float32(0)))
        assert grads["layers"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(grads["layers"].astype(np.float32), 0.25 * 100 * 4 * 8)
    half = jax.tree.map(lambda x: x.astype(jnp.float16), params)
    scaled = jax.grad(lambda p: 1e-3 * pipe.loss(p, jnp.ones((128, 1), jnp.float16))[0])(half)
    np.testing.assert_allclose(scaled["layers"].astype(np.float32), 1e-1 * 128 * 8, rtol=1e-3)


@pytest.mark.usefixtures("x64")
def test_auxiliary_losses_travel_with_the_activations():
    """As the load of experts: a second array of the activations adds up a loss of every layer."""

    def block(layer, x, batch):
        y = model.block(layer, x["h"], batch)
        return {"h": y, "aux": x["aux"] + jnp.mean(y**2, axis=(1, 2))}

    def head(shared, x, batch):
        total, weight = model.head(shared, x["h"], batch)
        return total + 0.01 * jnp.sum(x["aux"]), weight

    def embed(shared, batch):
        x = model.embed(shared, batch)
        return {"h": x, "aux": jnp.zeros(len(x), x.dtype)}

    mesh = mesh_of(pipe=4)
    pipe = shd.Pipeline(
        mesh,
        zb_h1(4, 4),
        num_layers=model.NUM_LAYERS,
        embed=embed,
        block=block,
        head=head,
        numbered="block_{}",
    )
    params, batch = pipe.stack(model.init_params("tied")), model.batch(0, "tied")
    found = jax.jit(jax.grad(lambda p: pipe.loss(p, batch)[0]))(params)
    want = jax.jit(jax.grad(lambda p: pipe.sequential_loss(p, batch)[0]))(params)
    assert model.worst_leaf(found, want)[0] < 1e-12


# --- The compiled program -------------------------------------------------------------------------


def compiled_gradient(schedule, recompute=True, width=64, examples=128):
    """The gradient of a chain of matrices; an activation is ``examples`` by ``width``."""
    pipe = plain(
        mesh_of(pipe=4), schedule, block=lambda w, x, _: jnp.tanh(x @ w), recompute=recompute
    )
    params = {"layers": jax.ShapeDtypeStruct((4, width, width), jnp.float32)}
    x = jax.ShapeDtypeStruct((examples * schedule.num_microbatches, width), jnp.float32)
    return jax.jit(jax.grad(lambda p, x: pipe.loss(p, x)[0])).lower(params, x).compile()


def test_memory_is_flat_in_microbatches_with_1f1b():
    """GPipe stores one activation more for each micro-batch, besides the micro-batch itself."""
    activation = 128 * 64 * 4

    def growth(make):
        few, many = (compiled_gradient(make(4, m)).memory_analysis() for m in (8, 16))
        return (many.temp_size_in_bytes - few.temp_size_in_bytes) / activation

    gpipe_growth, aligned, classic = (
        growth(make) for make in (gpipe, one_f_one_b, functools.partial(one_f_one_b, aligned=False))
    )
    assert aligned == pytest.approx(classic, abs=0.5)
    assert gpipe_growth - aligned == pytest.approx(8, abs=0.5)


def test_permutes():
    """An aligned table sends to one side in a tick; every message is one activation."""
    for make, ticks in ((gpipe, 1), (one_f_one_b, 1), (functools.partial(zb_h1), 2)):
        schedule = make(4, 8)
        found = collectives(compiled_gradient(schedule))
        permutes = [c for c in found if c.op == "collective-permute"]
        assert {c.elements for c in permutes} == {128 * 64}
        runs = sum(c.runs for c in permutes)
        needed = max(schedule.check().messages)
        assert needed <= runs <= ticks * schedule.num_ticks
        others = [c for c in found if c.op != "collective-permute"]
        assert sum(c.wire_bytes for c in others) < 1024  # of the sums


# --- Frameworks -----------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer with dropout."""

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(32, dtype=x.dtype, param_dtype=x.dtype)(nn.LayerNorm(param_dtype=x.dtype)(x))
        y = nn.Dropout(0.2, deterministic=False)(jnp.tanh(y))
        return x + nn.Dense(x.shape[-1], dtype=x.dtype, param_dtype=x.dtype)(y)


@pytest.mark.usefixtures("x64")
def test_linen_with_dropout():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 12)))
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        f"block_{i}": Block().init({"params": k, "dropout": k}, x)["params"]
        for i, k in enumerate(keys)
    }
    mesh = mesh_of(pipe=2)
    pipe = shd.Pipeline(
        mesh,
        one_f_one_b(2, 4),
        num_layers=4,
        embed=lambda shared, x, key: x,
        block=lambda layer, x, _, key: Block().apply({"params": layer}, x, rngs={"dropout": key}),
        head=lambda shared, x, _, key: (jnp.sum(x**2), jnp.asarray(x.shape[0], x.dtype)),
        numbered="block_{}",
        rngs=True,
        recompute=False,
    )
    key = jax.random.key(1)
    found = jax.jit(jax.grad(lambda p: pipe.loss(p, x, key)[0]))(pipe.stack(params))

    def alone(params):
        total = 0.0
        for m, part in enumerate(jnp.split(x, 4)):
            for i in range(4):
                of_layer = jax.random.fold_in(jax.random.fold_in(key, m), i)
                rngs = {"dropout": of_layer}
                part = Block().apply({"params": params[f"block_{i}"]}, part, rngs=rngs)
            total += jnp.sum(part**2)
        return total

    want = jax.jit(jax.grad(alone))(params)
    assert model.worst_leaf(pipe.unstack(found), want)[0] < 1e-12


@needs_nnx
@pytest.mark.usefixtures("x64")
def test_nnx():
    rngs = nnx.Rngs(0)
    layers = [nnx.Linear(12, 12, rngs=rngs, param_dtype=jnp.float64) for _ in range(4)]
    graphdef = nnx.graphdef(layers[0])
    params = {f"block_{i}": nnx.to_pure_dict(nnx.state(x)) for i, x in enumerate(layers)}
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 12)))

    def block(layer, x, batch):
        del batch
        state = nnx.state(nnx.merge(graphdef, nnx.state(layers[0])))
        nnx.replace_by_pure_dict(state, layer)
        return x + jnp.tanh(nnx.merge(graphdef, state)(x))

    pipe = shd.Pipeline(
        mesh_of(pipe=2),
        gpipe(2, 2),
        num_layers=4,
        embed=lambda shared, x: x,
        block=block,
        head=lambda shared, x, _: (jnp.sum(x**2), jnp.asarray(x.shape[0], x.dtype)),
        numbered="block_{}",
    )
    found = jax.jit(jax.grad(lambda p: pipe.loss(p, x)[0]))(pipe.stack(params))

    def alone(params):
        y = x
        for i in range(4):
            y = block(params[f"block_{i}"], y, None)
        return jnp.sum(y**2)

    assert model.worst_leaf(pipe.unstack(found), jax.grad(alone)(params))[0] < 1e-12


# --- Parameters -----------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [8, (1, 2, 1, 2, 1, 1)])
def test_stack_and_unstack_are_inverse(counts):
    pipe = model.pipeline(mesh_of(pipe=3), interleaved(3, 3), num_layers=counts)
    params = model.init_params("tied", layers=8)
    stacked = pipe.stack(params)
    up = stacked["layers"]["up"]["kernel"]
    assert up.shape == (pipe.num_rows, model.WIDTH, model.HIDDEN)
    jax.tree.map(np.testing.assert_array_equal, pipe.unstack(stacked), params)
    # Stage 1 holds virtual stages 1 and 4.
    rows = up.reshape(3, 2, -1, *up.shape[1:])
    first = np.cumsum([0, *pipe.layer_counts])[[1, 4]]
    for chunk, layer in enumerate(first):
        np.testing.assert_array_equal(rows[1, chunk, 0], params[f"block_{layer}"]["up"]["kernel"])
    abstract = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, params))
    types = jax.tree.map(lambda x: (x.shape, x.dtype), jax.eval_shape(pipe.stack, abstract))
    assert types == jax.tree.map(lambda x: (x.shape, x.dtype), pipe.stack(abstract))


@pytest.mark.usefixtures("x64")
def test_state_of_the_optimizer_is_stacked_too():
    """So that a run can go on with another number of stages."""
    pipe = model.pipeline(mesh_of(pipe=2), interleaved(2, 2))
    tx = optax_ext.came(1e-3, factoring=model.RULE)
    params = pipe.stack(model.init_params("tied"))
    state = jax.tree.map(np.asarray, tx.init(params))
    state = jax.tree.map(lambda x: np.random.default_rng(0).normal(size=x.shape), state)
    other = model.pipeline(mesh_of(pipe=4), one_f_one_b(4, 4))
    moved = other.stack(pipe.unstack(state))
    assert jax.tree.structure(moved) == jax.tree.structure(
        tx.init(other.stack(pipe.unstack(params)))
    )
    jax.tree.map(np.testing.assert_array_equal, pipe.stack(other.unstack(moved)), state)


# --- Bad input ------------------------------------------------------------------------------------


def plain(mesh, schedule, **options):
    options = {
        "num_layers": 4,
        "embed": lambda shared, x: x,
        "block": lambda w, x, _: x @ w,
        "head": lambda shared, x, _: (jnp.sum(x), jnp.asarray(1.0)),
    } | options
    return shd.Pipeline(mesh, schedule, **options)


def test_constructor_rejects():
    mesh = mesh_of(pipe=2)
    bad = functools.partial(plain, mesh)
    with pytest.raises(ValueError, match="axis 'stage' is not in the mesh"):
        bad(gpipe(2, 2), axis="stage")
    with pytest.raises(ValueError, match="has 4 stages, but mesh axis 'pipe' has 2"):
        bad(gpipe(4, 2))
    with pytest.raises(ValueError, match="fewer than the 8 virtual stages"):
        bad(interleaved(2, 2, chunks=4))
    with pytest.raises(ValueError, match="each of the 2 virtual stages"):
        bad(gpipe(2, 2), num_layers=(1, 2, 1))
    with pytest.raises(ValueError, match="gather must be one of step, tick"):
        bad(gpipe(2, 2), gather="layer")
    with pytest.raises(ValueError, match=r"numbered must hold \{\} once"):
        bad(gpipe(2, 2), numbered="block")
    with pytest.raises(ValueError, match="no backward passes"):
        bad(gpipe(2, 2).without_backward())
    table = gpipe(2, 2)
    op = table.op.copy()
    op[-1] = 0
    broken = Schedule("broken", op, table.microbatch, table.chunk, table.routes, table.route_of)
    with pytest.raises(
        shd.pipeline.ScheduleError, match="broken: B1 of virtual stage 0 is missing"
    ):
        bad(broken)


def test_loss_rejects():
    pipe = plain(mesh_of(pipe=2), gpipe(2, 4))
    params, x = {"layers": jnp.ones((4, 3, 3))}, jnp.ones((8, 3))
    with pytest.raises(ValueError, match="4 micro-batches, which do not divide the 6 examples"):
        pipe.loss(params, x[:6])
    with pytest.raises(ValueError, match=r"must have 4 rows along dim 0.*pipeline\.stack"):
        pipe.loss({"layers": jnp.ones((6, 3, 3))}, x)
    with pytest.raises(ValueError, match=r"under .layers., got \[.blocks.\]"):
        pipe.loss({"blocks": jnp.ones((4, 3, 3))}, x)
    with pytest.raises(ValueError, match="takes no key"):
        pipe.loss(params, x, jax.random.key(0))
    with pytest.raises(ValueError, match="no gradients of its batch"):
        jax.grad(lambda x: pipe.loss(params, x)[0])(x)
    with pytest.raises(ValueError, match="takes a key"):
        plain(mesh_of(pipe=2), gpipe(2, 4), rngs=True).loss(params, x)
    wide = plain(mesh_of(pipe=2), gpipe(2, 4), block=lambda w, x, _: jnp.concatenate([x, x]))
    with pytest.raises(ValueError, match="activations of one type"):
        wide.loss(params, x)
    integers = plain(
        mesh_of(pipe=2), gpipe(2, 4), embed=lambda s, x: x.astype(int), block=lambda w, x, _: x
    )
    with pytest.raises(ValueError, match="floating-point"):
        integers.loss(params, x)


def test_stack_rejects():
    pipe = plain(mesh_of(pipe=2), gpipe(2, 2), numbered="block_{}")
    with pytest.raises(ValueError, match="expected the 4 layers block_0 to block_3"):
        pipe.stack({f"block_{i}": np.ones(3) for i in range(5)})
    stacked = plain(mesh_of(pipe=2), gpipe(2, 2))
    with pytest.raises(ValueError, match="must have the 4 layers along dim 0, got shape \\(5, 3"):
        stacked.stack({"layers": np.ones((5, 3))})
    with pytest.raises(ValueError, match="no key 'layers'"):
        stacked.stack({"blocks": np.ones((4, 3))})
    with pytest.raises(ValueError, match="dim 0 of stacked layers is sharded over stages"):
        stacked.param_specs({"layers": np.ones((4, 3))}, {"layers": P("model")})
