"""Pipelines without ``Zero``: trees of activations, dtypes, frozen parameters; what they reject."""

import functools

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

from . import model
from .model import chain, mesh_of


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_trees_of_activations_without_zero(kind):
    """As the load of experts: a second array of the activations adds up a loss of every layer."""

    def block(w, x, batch):
        y = x["h"] + batch["gain"][:, None] * jnp.tanh(x["h"] @ w)
        return {"h": y, "aux": x["aux"] + jnp.mean(y**2, axis=1)}

    def head(shared, x, batch):
        return jnp.sum(x["h"] @ shared["out"]) + 0.1 * jnp.sum(x["aux"]), jnp.sum(batch["gain"])

    def embed(shared, batch):
        x = batch["x"] * shared["out"][None]
        return {"h": x, "aux": jnp.zeros(len(x), x.dtype)}

    mesh, rng = mesh_of(kind, pipe=2), np.random.default_rng(0)
    pipe = chain(mesh, zb_h1(2, 4), num_layers=3, embed=embed, block=block, head=head)
    layers, out = 0.5 * rng.normal(size=(3, 6, 6)), rng.normal(size=6)
    batch = {"x": rng.normal(size=(8, 6)), "gain": rng.uniform(1, 2, 8)}

    def alone(params):
        x = embed(params, batch)
        for w in params["layers"]:
            x = block(w, x, batch)
        return head(params, x, batch)

    params = {"layers": layers, "out": out}
    want, expected = jax.jit(jax.grad(alone, has_aux=True))(params)
    stacked = pipe.stack(params)
    specs = pipe.param_specs(stacked)
    placed = jax.device_put(stacked, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    grads, weight = jax.jit(jax.grad(pipe.loss, has_aux=True))(placed, batch)
    model.assert_close(pipe.unstack(grads), want, 1e-12)  # of rows that axes shard
    np.testing.assert_allclose(weight, expected, rtol=1e-14)
    eager = [pipe.sequential_loss] * (kind == AxisType.Explicit)
    for sequential in (jax.jit(pipe.sequential_loss), *eager):
        np.testing.assert_allclose(sequential(placed, batch), jax.jit(alone)(params), rtol=1e-13)
    if kind == AxisType.Auto:  # not compiled, and an evaluation
        np.testing.assert_allclose(pipe.loss(placed, batch), jax.jit(alone)(params), rtol=1e-13)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("form", ["tiled", "cross_entropy"])
def test_the_head_of_the_last_stage_runs_in_tiles(form):
    """Of every micro-batch, beside one device with all logits; layers are in tiles, too."""

    def block(w, x, batch):
        return x + batch["gain"][:, None] * (jnp.tanh(x @ w) @ w.T)

    def plain(shared, x, batch):
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ shared["out"], batch["y"])
        return jnp.sum(losses * batch["gain"]), jnp.sum(batch["gain"])

    def own(shared, x, batch):
        given = {"weights": batch["gain"], "reduction": "sum", "tiles": 3}
        return shd.cross_entropy(x, shared["out"], batch["y"], **given), jnp.sum(batch["gain"])

    def alone(params):
        x = batch["x"]
        for w in params["layers"]:
            x = block(w, x, batch)
        return plain(params, x, batch)

    rng = np.random.default_rng(0)
    params = {"layers": 0.5 * rng.normal(size=(3, 6, 48)), "out": rng.normal(size=(6, 31))}
    batch = {"x": rng.normal(size=(20, 6)), "gain": rng.uniform(1, 2, 20)}
    batch["y"] = rng.integers(0, 31, 20)
    tiled = {"block": shd.tiled(block, 3), "head": shd.tiled(plain, 3)}
    blocks = tiled if form == "tiled" else {"block": block, "head": own}
    embed = {"embed": lambda shared, batch: batch["x"]}
    pipe = chain(mesh_of(pipe=2), zb_h1(2, 4), num_layers=3, **embed, **blocks)
    found = jax.jit(jax.value_and_grad(pipe.loss, has_aux=True))(pipe.stack(params), batch)
    expected = jax.jit(jax.value_and_grad(alone, has_aux=True))(params)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-12)
    model.assert_close(pipe.unstack(found[1]), expected[1], 1e-12)


def test_cotangents_and_narrow_dtypes():
    """Of NumPy, too; large sums are scaled before they are cast."""
    pipe = chain(mesh_of(pipe=2), one_f_one_b(2, 2), head=lambda _, x, __: (100 * jnp.sum(x), 1.0))
    params = {"layers": 2 * jnp.ones((4, 1, 1), jnp.bfloat16)}
    x = jnp.ones((4, 1), jnp.bfloat16)
    (total, _), pull = jax.vjp(lambda p: pipe.loss(p, x), params)
    assert float(total) == 100 * 4 * 16
    (grads,) = pull((np.float32(0.25), np.float32(0)))
    assert grads["layers"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(grads["layers"].astype(np.float32), 0.25 * 100 * 4 * 8)
    half = jax.tree.map(lambda x: x.astype(jnp.float16), params)
    scaled = jax.grad(lambda p: 1e-3 * pipe.loss(p, jnp.ones((128, 1), jnp.float16))[0])(half)
    np.testing.assert_allclose(scaled["layers"].astype(np.float32), 1e-1 * 128 * 8, rtol=1e-3)


def test_gradients_of_bfloat16_parameters_are_summed_in_float32():
    """In bfloat16 256 + 1 is 256, whatever the order of the micro-batches."""
    pipe = chain(mesh_of(pipe=2), one_f_one_b(2, 4), num_layers=2)
    params = {"layers": jnp.ones((2, 1, 1), jnp.bfloat16)}
    x = jnp.asarray([[256], [1], [1], [1]], jnp.bfloat16)
    grads = jax.jit(jax.grad(lambda p: pipe.loss(p, x)[0]))(params)
    np.testing.assert_array_equal(grads["layers"].astype(np.float32), 260)  # 259, rounded once


def test_gradients_of_frozen_parameters_are_not_computed():
    pipe = chain(
        mesh_of(pipe=2), zb_h1(2, 2), block=lambda p, x, _: x + jnp.tanh(x @ p["a"]) @ p["b"]
    )
    layers = {"a": jnp.ones((4, 3, 3)), "b": jnp.ones((4, 3, 3))}

    def products(trained):
        def loss(part):
            return pipe.loss({"layers": layers | part}, jnp.ones((4, 3)))[0]

        part = {name: layers[name] for name in trained}
        return str(jax.make_jaxpr(jax.grad(loss))(part)).count("dot_general")

    # Of the split backward pass and of the last stage's.
    assert products("a") < products("ab") > products("b")


@pytest.mark.parametrize("counts", [12, 8, (1, 2, 1, 2, 1, 1)])
def test_stack_and_unstack_are_inverse(counts):
    """Layers are in the order of the stages; of stages of unequal numbers in that of the model."""
    pipe = model.pipeline(mesh_of(pipe=3), interleaved(3, 3), num_layers=counts)
    params = model.init_params("tied", layers=sum(pipe.layer_counts))
    stacked = pipe.stack(params)
    trees = stacked, pipe.param_specs(stacked)
    up, spec = (tree["layers"]["up"]["kernel"] for tree in trees)
    assert up.shape == (sum(pipe.layer_counts), model.WIDTH, model.WIDTH)
    jax.tree.map(np.testing.assert_array_equal, pipe.unstack(stacked), params)
    # Stage 1 of three holds virtual stages 1 and 4.
    order = [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11] if counts == 12 else range(8)
    assert spec == (P("pipe") if counts == 12 else P(None, "pipe"))
    for row, layer in zip(up, order, strict=True):
        np.testing.assert_array_equal(row, params[f"block_{layer}"]["up"]["kernel"])


def test_layers_that_explicit_axes_shard_are_reordered():
    mesh, layers = mesh_of(AxisType.Explicit, pipe=2), np.arange(4.0)
    pipe = chain(mesh, interleaved(2, 2))
    placed = jax.device_put(layers[[0, 2, 1, 3]], NamedSharding(mesh, P("pipe")))
    np.testing.assert_array_equal(pipe.unstack({"layers": placed})["layers"], layers)


def test_state_of_the_optimizer_is_stacked_too():
    """So that a run can go on with another number of stages."""
    pipe = model.pipeline(mesh_of(pipe=2), interleaved(2, 2))
    other = model.pipeline(mesh_of(pipe=4), one_f_one_b(4, 4))
    tx, params = optax_ext.came(1e-3, factoring=model.RULE), model.init_params("tied")
    abstract, of_other = (jax.eval_shape(tx.init, p.stack(params)) for p in (pipe, other))
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: rng.normal(size=x.shape), abstract)
    moved = other.stack(pipe.unstack(state))
    assert jax.tree.map(np.shape, moved) == jax.tree.map(lambda x: x.shape, of_other)
    jax.tree.map(np.testing.assert_array_equal, pipe.stack(other.unstack(moved)), state)


def test_constructor_rejects():
    table = gpipe(2, 2)
    op = table.op.copy()
    op[-1] = 0
    broken = Schedule("broken", op, table.microbatch, table.chunk, table.routes, table.route_of)
    for pattern, schedule, options in (
        ("axis 'stage' is not in the mesh", table, {"axis": "stage"}),
        ("has 4 stages, but mesh axis 'pipe' has 2", gpipe(4, 2), {}),
        ("each of the 2 virtual stages", table, {"num_layers": (1, 2, 1)}),
        ("gather='tick' needs recompute=True", table, {"gather": "tick", "recompute": False}),
        ("no backward passes", table.without_backward(), {}),
        ("broken: B1 of virtual stage 0 is missing", broken, {}),
    ):
        with pytest.raises(ValueError, match=pattern):
            chain(mesh_of(pipe=2), schedule, **options)


def test_loss_rejects():
    make = functools.partial(chain, mesh_of(pipe=2), gpipe(2, 4))
    pipe, params, x = make(), {"layers": jnp.ones((4, 3, 3))}, jnp.ones((8, 3))
    wide = make(block=lambda w, x, _: jnp.concatenate([x, x]))
    for pattern, loss, args in (
        ("4 micro-batches, which do not divide the 6 examples", pipe, (params, x[:6])),
        (r"must have 4 layers along dim 0.*pipeline\.stack", pipe, ({"layers": x}, x)),
        ("takes a key", make(rngs=True), (params, x)),
        ("activations of one type", wide, (params, x)),
    ):
        with pytest.raises(ValueError, match=pattern):
            loss.loss(*args)
    with pytest.raises(ValueError, match="no gradients of its batch"):
        jax.grad(lambda x: pipe.loss(params, x)[0])(x)


def test_stack_rejects():
    make = functools.partial(chain, mesh_of(pipe=2), gpipe(2, 2))
    with pytest.raises(ValueError, match="expected the 4 layers block_0 to block_3"):
        make(numbered="block_{}").stack({f"block_{i}": np.ones(3) for i in range(5)})
    stacked = make()
    with pytest.raises(ValueError, match="must have the 4 layers along dim 0, got shape \\(5, 3"):
        stacked.stack({"layers": np.ones((5, 3))})
    with pytest.raises(ValueError, match="dim 0 of stacked layers is sharded over stages"):
        stacked.param_specs({"layers": np.ones((4, 3))}, {"layers": P("model")})
