"""``Zero(view="global")``: losses of plain jit, whatever they do with the batch and with the mesh.

The options of a step are covered by ``test_covering``.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import sharding as shd
from optax_ext import gradient_noise_scale

from ...flax_nnx import needs_nnx, nnx
from .. import model
from . import runs

pytestmark = pytest.mark.usefixtures("x64")
WIDTH, LAYERS = runs.WIDTH, 3
TX = runs.TX


def params():
    shapes = {"w": (WIDTH, 24), "scale": (24,), "layers": (LAYERS, 24, 24), "out": (24, 8)}
    return runs.draw({k: jax.ShapeDtypeStruct(shape, np.float64) for k, shape in shapes.items()})


def forward(p, x, remat=True):
    layer = lambda x, w: (x + jnp.tanh(x @ w), None)  # noqa: E731
    x = jnp.tanh(x @ p["w"] * 0.1) * p["scale"][None]
    return lax.scan(jax.checkpoint(layer) if remat else layer, x, p["layers"])[0]


def contrastive(p, batch):
    a, b = (
        z / jnp.linalg.norm(z, axis=1, keepdims=True)
        for z in (batch["y"], forward(p, batch["x"]) @ p["out"])
    )
    return optax.softmax_cross_entropy_with_integer_labels(a @ b.T, jnp.arange(len(a))).mean()


def variance(p, batch):
    return jnp.mean(jax.nn.relu(2 - jnp.std(forward(p, batch["x"]) @ p["out"], axis=0)))


def masked_mean(p, batch):
    mask = batch["y"][:, 0] > 0.3  # on one device perhaps none
    return jnp.sum(jnp.mean((forward(p, batch["x"]) @ p["out"] - 1) ** 2, 1) * mask) / mask.sum()


def load_balance(p, batch):
    gates = jax.nn.softmax(forward(p, batch["x"]) @ p["out"])
    return 8 * jnp.sum(gates.mean(0) * jax.nn.one_hot(gates.argmax(-1), 8).mean(0))


def coupled(p, batch, state, key):
    """All of these, a BatchNorm by hand whose statistics it returns, and dropout."""
    loss = sum(f(p, batch) for f in (contrastive, variance, masked_mean, load_balance))
    h = forward(p, batch["x"], remat=False)
    mean, var = h.mean(0, keepdims=True), h.var(0, keepdims=True)
    h = (h - mean) * lax.rsqrt(var + 1e-3) * jax.random.bernoulli(key, 0.7, h.shape)
    new = {"mean": 0.9 * state["mean"] + 0.1 * mean, "var": 0.9 * state["var"] + 0.1 * var}
    return loss + jnp.mean((h @ p["out"] - batch["y"]) ** 2), new


class State(TrainState):
    batch_stats: dict


def make_state():
    stats = {"mean": jnp.zeros((1, 24)), "var": jnp.ones((1, 24))}
    return State.create(
        apply_fn=None, params=jax.tree.map(jnp.asarray, params()), tx=TX, batch_stats=stats
    )


def mean_alone(p, batch, state, key):
    return coupled(p, batch, state.batch_stats, jax.random.fold_in(key, 0))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", ["flat", "replicas"])
def test_losses_that_couple_examples(stage, mesh, kind):
    if mesh == "replicas" and (stage, kind) not in ((2, AxisType.Auto), (3, AxisType.Explicit)):
        return
    zero = runs.zero_of(stage, mesh, kind, min_shard_size=0, view="global")
    found = runs.train(zero, make_state, coupled, rngs=True, model_state="batch_stats")
    runs.assert_same(found, runs.train_alone(make_state, mean_alone))
    if stage == 3:
        assert found[0].params["layers"].addressable_shards[0].data.size < LAYERS * 24 * 24


# --- Models that name axes of the mesh ------------------------------------------------------------


def dense(width, names):
    init = nn.with_partitioning(nn.initializers.lecun_normal(), names)
    bias = nn.with_partitioning(nn.initializers.normal(0.1), names[-1:])
    return nn.Dense(width, kernel_init=init, bias_init=bias, **runs.F64)


class Partitioned(nn.Module):
    """Metadata and constraints over Zero's own axis, as in MaxText."""

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(dense(64, ("data", None))(x))
        x = lax.with_sharding_constraint(x, P("data"))
        x = x - jnp.mean(x, 0, keepdims=True)
        return dense(8, (None, "data"))(x)


class Logical(nn.Module):
    """The same by rules, with layers in a scan."""

    @nn.compact
    def __call__(self, x):
        part = nn.with_logical_partitioning
        kernel = part(nn.initializers.lecun_normal(), ("embed", "mlp"))

        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                x = nn.with_logical_constraint(x, ("batch", None))
                return x + jnp.tanh(nn.Dense(WIDTH, False, kernel_init=kernel, **runs.F64)(x)), None

        layers = nn.scan(
            nn.remat(Layer),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return layers()(x, None)[0] @ self.param(
            "out", part(nn.initializers.normal(0.1), ("embed", None)), (WIDTH, 8), jnp.float64
        )


RULES = [("batch", "data"), ("embed", "data"), ("mlp", None), ("layers", None)]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("cls", [Partitioned, Logical])
def test_annotated_linen_models_run_unmodified(cls, stage, kind):
    module = cls()
    zero = runs.zero_of(stage, "flat", kind, min_shard_size=0, view="global")

    def loss_fn(p, batch):
        out = module.apply({"params": p}, batch["x"] * 0.1)
        return jnp.mean((out - batch["y"]) ** 2)

    def make(box=lambda x: x):
        init = jax.eval_shape(module.init, jax.random.key(0), jnp.ones((8, WIDTH)))
        return box(nn.meta.replace_boxed(init["params"], runs.draw(nn.unbox(init["params"]))))

    with nn.logical_axis_rules(RULES):
        found = runs.train(zero, runs.make_train_state_of(make), loss_fn)
        held = nn.unbox(found[0].params)
    with nn.logical_axis_rules(()), jax.set_mesh(model.mesh_of(data=1)):
        plain = runs.make_train_state_of(lambda: make(nn.unbox))
        expected = runs.train_alone(plain, lambda p, batch, *_: (loss_fn(p, batch), None))
    runs.assert_same((found[0].replace(params=held), found[1]), expected)
    kernel = held["Dense_0"]["kernel"] if cls is Partitioned else held["out"]
    assert kernel.sharding.spec[:1] == (("data",) if stage == 3 else ())  # the dim that is named


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_out_sharding_over_every_axis(stage):
    """A typed loss on an Explicit mesh, with a tensor axis, as it is under jit."""
    zero = runs.zero_of(stage, "tensor", AxisType.Explicit, min_shard_size=0, view="global")
    specs = {"w": P(None, "model"), "out": P("model"), "scale": P(), "layers": P()}

    def loss_fn(p, batch):
        h = jnp.einsum("be,ef->bf", batch["x"] * 0.1, p["w"], out_sharding=P("data", "model"))
        h = jnp.tanh(h) * reshard(p["scale"], P("model"))[None]
        y = jnp.einsum("bf,fe->be", h, p["out"], out_sharding=P("data"))
        y = y + jnp.mean(reshard(y, P()) ** 3)  # of the whole batch
        return jnp.mean((y - batch["y"]) ** 2)

    def alone(p, batch, *_):
        y = (jnp.tanh(batch["x"] * 0.1 @ p["w"]) * p["scale"][None]) @ p["out"]
        return jnp.mean((y + jnp.mean(y**3) - batch["y"]) ** 2), None

    make = runs.make_train_state_of(params)
    found = runs.train(zero, make, loss_fn, param_specs=specs)
    runs.assert_same(found, runs.train_alone(make, alone))
    assert found[0].params["w"].sharding.spec == P("data" if stage == 3 else None, "model")


@needs_nnx
def test_nnx_models_train_unmodified():
    """BatchNorm and dropout of nnx are those of the whole batch."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(WIDTH, 32, rngs=rngs, **runs.F64)
            self.norm = nnx.BatchNorm(32, rngs=rngs, **runs.F64)
            self.norm.mean.set_value(jnp.zeros(32))
            self.norm.var.set_value(jnp.ones(32))
            self.drop = nnx.Dropout(0.3, rngs=rngs)
            self.out = nnx.Linear(32, 8, rngs=rngs, **runs.F64)

        def __call__(self, x):
            return self.out(self.drop(jnp.tanh(self.norm(self.inner(x)))))

    def make():
        model = Model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, TX, wrt=nnx.Param)

    def loss_fn(model, batch):
        y = model(batch["x"])
        return jnp.mean((y - batch["y"] + y.mean(0, keepdims=True)) ** 2)

    losses = []
    for mesh in ("one", "flat"):
        zero = runs.zero_of(2, mesh, AxisType.Auto, min_shard_size=0, view="global")
        built, optimizer = zero.nnx_init(make)
        step = zero.nnx_train_step(loss_fn)
        losses.append([step(built, optimizer, zero.put(runs.batch(i)))["loss"] for i in range(4)])
    np.testing.assert_allclose(*losses, rtol=1e-12)


# --- The rest of Zero -----------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [2, 3])
def test_micro_batches_are_rows_of_every_device(stage):
    """Keys of examples, aux arrays and weights are in the order of the batch."""
    zero = runs.zero_of(stage, "flat", min_shard_size=0, view="global")

    def loss_fn(p, batch, keys):
        noise = jax.vmap(lambda key: jax.random.normal(key, (8,)))(keys)
        each = jnp.mean((forward(p, batch["x"]) @ p["out"] - batch["y"] + noise) ** 2, 1)
        return (each.sum(), 1.0 * len(each)), {"each": each, "mean": each.mean(), "of": each.std()}

    state = zero.place(params())
    options = {"has_aux": True, "weighted": True, "rngs": "per_example"}
    found = [
        zero.value_and_grad(loss_fn, microbatches=k, **options)(
            state, zero.put(runs.batch(0)), jax.random.key(1)
        )
        for k in (1, 2)
    ]
    (one, first), (two, second) = found
    model.assert_close(second, first, 1e-12)
    np.testing.assert_allclose(two[0], one[0], rtol=1e-12)
    np.testing.assert_allclose(two[1]["each"], one[1]["each"], rtol=1e-12)
    assert two[1]["of"].shape == ()


def test_one_state_for_both_views():
    """A run goes from one to the other, in the same placement."""
    zeros = [
        runs.zero_of(2, "replicas", min_shard_size=0, view=view) for view in ("device", "global")
    ]
    loss_fn = lambda p, batch, *_: (  # noqa: E731
        jnp.mean((forward(p, batch["x"]) @ p["out"] - batch["y"]) ** 2)
    )
    make = runs.make_train_state_of(params)
    states = [zero.init(make) for zero in zeros]
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        assert a.sharding == b.sharding
    state, losses = states[0], []
    for i in range(4):
        zero = zeros[i % 2]
        state, metrics = zero.train_step(loss_fn)(state, zero.put(runs.batch(i)))
        losses.append(metrics)
    runs.assert_same((state, losses), runs.train_alone(make, lambda *args: (loss_fn(*args), None)))


def test_eval_sees_the_whole_batch():
    zero = runs.zero_of(3, "flat", AxisType.Explicit, min_shard_size=0, view="global")
    batch = runs.batch(0)
    found = zero.eval_step(contrastive)((zero.place(params()), None), zero.put(batch))
    np.testing.assert_allclose(found, contrastive(params(), batch), rtol=1e-12)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_closures_aux_and_own_derivatives(kind):
    """Arrays of the mesh, aux whose dims the devices do not divide, a rule that gathers."""
    zero = runs.zero_of(3, "flat", kind, min_shard_size=0, view="global")
    eye = jax.device_put(np.eye(WIDTH), NamedSharding(zero.mesh, P("data")))
    twice = jax.custom_vjp(zero.gather)
    twice.defvjp(lambda w: (w, w), lambda w, grad: (2 * grad + 0 * zero.gather(w),))

    def loss_fn(p, x):
        x = lax.with_sharding_constraint(x, P("data"))
        return jnp.mean((x @ twice(p["w"])) ** 2), p["w"][:3, 0]

    run = zero.value_and_grad(lambda p, batch: loss_fn(p, batch["x"] @ eye), has_aux=True)
    run = jax.jit(run)  # where no mesh is set
    value, grads = run(zero.place(params()), zero.put(runs.batch(0)))
    run = jax.value_and_grad(
        lambda p, x: (jnp.mean((x @ p["w"]) ** 2), p["w"][:3, 0]), has_aux=True
    )
    expected, once = run(params(), runs.batch(0)["x"])
    model.assert_close(value, expected, 1e-12)
    model.assert_close(grads, jax.tree.map(lambda g: 2 * g, once), 1e-12)


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match="view must be 'device', 'global' or None"):
        runs.zero_of(2, view="whole")
    for more in (
        {"sync": shd.sync.dense()},
        {"stage": 3, "precision": shd.Precision(gather="int8")},
    ):
        with pytest.raises(ValueError, match="need view='device'"):
            runs.zero_of(**({"stage": 2} | more), view="global")
    zero = runs.zero_of(2, view="global")
    with pytest.raises(ValueError, match="sync_batch_norm=False"):
        zero.train_step(contrastive, sync_batch_norm=False)
    with pytest.raises(ValueError, match="leave the collective out"):
        zero.value_and_grad(lambda p, b: lax.pmean(jnp.mean(b["x"] @ p["w"]), "data"))(
            zero.place(params()), zero.put(runs.batch(0))
        )
    tx = optax.chain(optax.chain(gradient_noise_scale(16), TX))
    with pytest.raises(ValueError, match="norms of the gradients of single devices"):
        runs.train(zero, runs.make_train_state_of(params, tx), lambda p, b: masked_mean(p, b))


@pytest.mark.parametrize("view", ["device", "global"])
@pytest.mark.parametrize(("n", "k"), [(4, 2), (2, 4), (8, 1)])
def test_rows_that_share_a_key(view, n, k):
    """As the page on random keys has it: parts of the batch, or of the rows of every device."""
    zero = model.zero_on(n, stage=0, view=view)

    def loss_fn(params, x, key):
        return jnp.mean(params) * jnp.mean(x), jnp.full(len(x), jax.random.uniform(key))

    tx = optax.sgd(0.1)
    state = zero.init(lambda: (jnp.ones(4), tx.init(jnp.ones(4))), tx=tx)
    step = zero.train_step(loss_fn, tx=tx, rngs=True, microbatches=k, has_aux=True)
    _, metrics = step(state, zero.put(np.ones(16)), jax.random.key(3))
    row = np.arange(16)
    number = row // (16 // (n * k))
    number = number if view == "device" else number % k
    want = [jax.random.uniform(jax.random.fold_in(jax.random.key(3), i)) for i in number]
    np.testing.assert_array_equal(metrics["aux"], want)
