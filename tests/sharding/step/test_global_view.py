"""``Zero(view="global")``: losses of plain jit, whatever they do with the batch and with the mesh.

The options of a step are covered by ``test_covering``.
"""

import functools

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

from optax_ext import gradient_noise_scale
from sharding.step._global_gradients import GlobalLoss

from ...flax_nnx import needs_nnx, nnx
from ...tiers import tiers
from .. import model
from . import runs

pytestmark = pytest.mark.usefixtures("x64")
WIDTH, LAYERS = runs.WIDTH, 3
TX = runs.TX
KINDS = AxisType.Auto, AxisType.Explicit


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


COUPLED = [("flat", stage, kind) for stage in range(4) for kind in KINDS]
COUPLED += [("replicas", 2, AxisType.Auto), ("replicas", 3, AxisType.Explicit)]
FAST = [("flat", 1, AxisType.Auto), ("flat", 2, AxisType.Explicit), COUPLED[-1]]


@functools.cache
def trained_alone():
    return runs.train_alone(make_state, mean_alone)


@pytest.mark.parametrize(("mesh", "stage", "kind"), tiers(COUPLED, FAST))
def test_losses_that_couple_examples(stage, mesh, kind):
    zero = runs.zero_of(stage, mesh, kind, min_shard_size=0, view="global")
    found = runs.train(zero, make_state, coupled, rngs=True, model_state="batch_stats")
    runs.assert_same(found, trained_alone())
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


ANNOTATED = [
    (cls, stage, kind) for cls in (Partitioned, Logical) for stage in (1, 2, 3) for kind in KINDS
]
OF_EACH = [
    (Partitioned, 1, AxisType.Auto),
    (Partitioned, 3, AxisType.Explicit),
    (Logical, 2, AxisType.Explicit),
    (Logical, 3, AxisType.Auto),
]


@pytest.mark.parametrize(("cls", "stage", "kind"), tiers(ANNOTATED, OF_EACH))
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


# --- Pieces that keep rows apart, per device ------------------------------------------------------


@pytest.fixture
def ran(monkeypatch):
    """How the parts of each loss that is traced ran."""
    found, run = [], GlobalLoss._run

    def spy(self, *args):
        out = run(self, *args)
        found.append(self.pieces)
        return out

    monkeypatch.setattr(GlobalLoss, "_run", spy)
    return found


def numbered():
    """Layers one after the other, in a list."""
    return params() | {"layers": [{"kernel": w, "bias": 0.1 * w[0]} for w in params()["layers"]]}


def first(p, batch):
    return jnp.tanh(batch["x"] @ p["w"] * 0.1) * p["scale"][None]


def info_nce(z, y):
    a, b = (v / jnp.linalg.norm(v, axis=1, keepdims=True) for v in (z, y))
    return optax.softmax_cross_entropy_with_integer_labels(a @ b.T, jnp.arange(len(a))).mean()


def of_numbered(p, batch, norm=lambda x: x):
    x = first(p, batch)
    for layer in p["layers"]:
        x = x + norm(jnp.tanh(x @ layer["kernel"] + layer["bias"][None]))
    return info_nce(x @ p["out"], batch["y"])


def of_slices(p, batch):
    """Layers one after the other, of a stack."""
    x = first(p, batch)
    for i in range(LAYERS):
        x = jax.checkpoint(lambda x, w: x + jnp.tanh(x @ w))(x, p["layers"][i])
    return info_nce(x @ p["out"], batch["y"])


def of_layers(p, batch, layer, more=()):
    """Contrastive; the layers carry something else, too."""
    x, *rest = lax.scan(jax.checkpoint(layer), (first(p, batch), *more), p["layers"])[0]
    return info_nce(x @ p["out"], batch["y"]) + 0.3 * sum(a for a in rest if not jnp.ndim(a))


def batch_norm(x):
    mean = x.mean(0, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.var(x, 0, keepdims=True) + 1e-3)


def norm_after_layers(p, batch):
    return jnp.mean((batch_norm(forward(p, batch["x"])) @ p["out"] - batch["y"]) ** 2)


def norm_in_layers(p, batch):
    layer = lambda x, w: ((x[0] + batch_norm(jnp.tanh(x[0] @ w)),), None)  # noqa: E731
    return of_layers(p, batch, layer)


def balance_in_layers(p, batch):
    def layer(carry, w):
        x, loss = carry
        y = jnp.tanh(x @ w)
        gates = jax.nn.softmax(y[:, :4])
        loss += jnp.sum(gates.mean(0) * jax.nn.one_hot(gates.argmax(-1), 4).mean(0))
        return (x + y, loss), None

    return of_layers(p, batch, layer, (0.0,))


def dropout_in_layers(p, batch):
    def layer(carry, w):
        x, seed = carry
        mask = jax.random.bernoulli(jax.random.key(seed[0]), 0.7, x.shape)
        return (x + jnp.tanh(x @ w) * mask, seed + 1), None

    return of_layers(p, batch, layer, (jnp.zeros(1, int),))


def ratios_in_layers(p, batch):
    """Over a sum of all rows, times their number: as large whatever that is."""

    def layer(x, w):
        y = jnp.tanh(x[0] @ w)
        return (x[0] + y * len(y) / jnp.sum(1 + y[:, 0] ** 2),), None

    return of_layers(p, batch, layer)


def gradients_clipped_in_layers(p, batch):
    """A rule that is not linear: it needs the sum over all rows."""
    clip = jax.custom_vjp(lambda w: w)
    clip.defvjp(lambda w: (w, None), lambda _, g: (g / (1 + jnp.linalg.norm(g)),))
    return of_layers(p, batch, lambda x, w: ((x[0] + jnp.tanh(x[0] @ clip(w)),), None))


def used_within_and_outside(p, batch):
    """Two uses in a piece, one in another, one in none."""
    x = forward(p, batch["x"])
    z = x @ p["w"].T + jnp.var(x)
    return info_nce(x @ p["out"], z @ p["w"] @ p["out"]) + jnp.sum(p["w"] ** 2) + jnp.var(z)


def numbers_of_rows(p, batch):
    """Of all rows, not of those of a device."""
    n = len(batch["x"])
    x = jnp.tanh(forward(p, batch["x"] / n) * jnp.ones(n).sum() * 0.1)
    return info_nce(x @ p["out"], batch["y"] * (1 + jnp.arange(n))[:, None])


def loops_and_views(p, batch):
    """A loop over rows; flat tokens; two views of each row, one after the other."""
    h = lax.map(lambda row: jnp.tanh(row @ p["w"]), batch["x"]) * p["scale"][None]
    h = jnp.concatenate([h, jax.nn.softplus(h[:, ::-1])]).reshape(-1, 2, 12)
    h = jnp.repeat(h, 2, 2).reshape(-1, 24)  # (2 views * rows * 2, 24)
    h = lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), h, p["layers"])[0]
    z = h.reshape(2, -1, 2, 24).mean(2) @ p["out"]
    return info_nce(*z) + 0.1 * jnp.std(jnp.cumsum(h[:, 0]))


MEET, SUMMED = "each row meets the others", "rows are summed"
# The loss, its parameters, how many pieces run per device, and a reason why others do not.
PIECES = {
    "scanned": (contrastive, params, 1, MEET),
    "numbered": (of_numbered, numbered, 1, MEET),
    "slices": (of_slices, params, 1, MEET),
    "batch norm after": (norm_after_layers, params, 2, SUMMED),
    "batch norm within": (norm_in_layers, params, 3, SUMMED),
    "batch norm within, numbered": (
        lambda p, batch: of_numbered(p, batch, batch_norm),
        numbered,
        4,
        SUMMED,
    ),
    "balance within": (balance_in_layers, params, 3, SUMMED),
    "ratios": (ratios_in_layers, params, 3, SUMMED),
    "dropout": (dropout_in_layers, params, 3, "random numbers"),
    "clipped": (gradients_clipped_in_layers, params, 2, "its own derivative"),
    "within and outside": (used_within_and_outside, params, 2, SUMMED),
    "numbers": (numbers_of_rows, params, 1, "depends on their number"),
    "loops and views": (loops_and_views, params, 2, MEET),
}
MAIN = ["scanned", "numbered", "batch norm after", "balance within"]
PLACES = [(3, "torus", AxisType.Auto), (2, "replicas", AxisType.Explicit)]
PLACED = [(name, *PLACES[i % 2]) for i, name in enumerate(PIECES)]
MORE = [(name, *place) for name in MAIN for place in PLACES if (name, *place) not in PLACED]


@pytest.mark.parametrize(("name", "stage", "mesh", "kind"), tiers(PLACED + MORE, PLACED))
def test_pieces_that_keep_rows_apart(ran, name, stage, mesh, kind):
    loss_fn, make_params, count, reason = PIECES[name]
    zero = runs.zero_of(stage, mesh, kind, min_shard_size=0, view="global")
    make = runs.make_train_state_of(make_params)
    found = runs.train(zero, make, loss_fn)
    runs.assert_same(found, runs.train_alone(make, lambda p, b, *_: (loss_fn(p, b), None)))
    assert [piece.per_device for piece in ran[-1]].count(True) == count, ran[-1]
    left = [piece for piece in ran[-1] if not piece.per_device]
    assert any(reason in piece.reason for piece in left), left
    assert all("test_global_view.py" in piece.where for piece in ran[-1]), ran[-1]


@pytest.mark.parametrize(("stage", "gathers"), [(2, 0), (3, 5)])
def test_a_piece_gathers_and_scatters_by_layers(stage, gathers):
    """Three arrays once, the layers in both passes; each gradient is scattered where it is made."""
    zero = runs.zero_of(stage, min_shard_size=0, view="global")
    make = model.make_of(params, TX)
    text = model.lowered(zero, make, TX, contrastive, runs.batch(0)).as_text()
    assert text.count('"stablehlo.all_gather"') == gathers
    assert text.count('"stablehlo.reduce_scatter"') == 4
    text = model.lowered(zero, make, TX, of_slices, runs.batch(0)).as_text()
    assert text.count('"stablehlo.all_gather"') == gathers + (2 * LAYERS - 2 if gathers else 0)
    assert text.count('"stablehlo.reduce_scatter"') == 3 + LAYERS


@pytest.mark.parametrize("stage", [2, 3])
def test_what_several_pieces_use_is_scattered_once(stage):
    """As a table that is looked up and is the head, too, around a batch norm."""
    zero = runs.zero_of(stage, min_shard_size=0, view="global")
    state, batch = {"w": params()["w"]}, runs.batch(0)

    def loss_fn(p, batch):
        x = batch_norm(jnp.tanh(batch["x"] @ p["w"] * 0.1))
        return jnp.mean((batch_norm(x @ p["w"].T) @ p["w"]) ** 2)

    run = zero.value_and_grad(loss_fn)
    placed, rows = zero.place(state), zero.put(batch)
    assert run.lower(placed, rows).as_text().count('"stablehlo.reduce_scatter"') == 1
    expected, wanted = jax.value_and_grad(loss_fn)(state, batch)
    value, grads = run(placed, rows)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    model.assert_close(grads, wanted, 1e-12)


def test_a_stack_that_loops_of_several_pieces_use_is_scattered_by_layers():
    """Also of loops within checkpoints: no device holds the gradients of all layers."""
    zero = runs.zero_of(2, min_shard_size=0, view="global")

    @jax.checkpoint
    def through(x, layers):
        return lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, layers)[0]

    def loss_fn(p, batch):
        x = through(batch_norm(through(first(p, batch), p["layers"])), p["layers"])
        return jnp.mean(batch_norm(x) ** 2)

    placed, rows = zero.place(params()), zero.put(runs.batch(0))
    text = zero.value_and_grad(loss_fn).lower(placed, rows).as_text()
    shape = "x".join(map(str, (zero.num_devices, *params()["layers"].shape)))
    assert f"tensor<{shape}x" not in text


def test_a_stack_that_is_sharded_by_layers():
    """Loops slice what is gathered."""
    zero = runs.zero_of(3, min_shard_size=0, view="global")
    more = params() | {"layers": np.concatenate([params()["layers"]] * 3)[:8]}
    specs = {k: P("data") if k == "layers" else P() for k in more}
    state = jax.device_put(more, {k: NamedSharding(zero.mesh, specs[k]) for k in specs})
    run = zero.value_and_grad(contrastive, param_specs=specs)
    value, grads = run(state, zero.put(runs.batch(0)))
    expected, wanted = jax.value_and_grad(contrastive)(more, runs.batch(0))
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    model.assert_close(grads, wanted, 1e-12)
    assert grads["layers"].sharding.spec[0] == "data"


def test_indices_of_rows_are_those_of_all_rows():
    """A device counts its own rows; what it counts does not leave the piece."""
    zero = runs.zero_of(3, min_shard_size=0, view="global")
    numbers = lax.GatherDimensionNumbers((), (0, 1), (0, 1))

    def loss_fn(p, batch):
        h = forward(p, batch["x"])
        n = len(h)
        own = lax.broadcasted_iota(int, (n, 1), 0)
        index = jnp.concatenate([own, 3 * (h[:, :1] > 0).astype(int)], 1)
        taken = lax.gather(h, index, numbers, (1, 1), mode="clip")
        return jnp.std(taken), index

    state, batch = zero.place(params()), runs.batch(0)
    (value, index), grads = zero.value_and_grad(loss_fn, has_aux=True)(state, zero.put(batch))
    (expected, same), wanted = jax.value_and_grad(loss_fn, has_aux=True)(params(), batch)
    np.testing.assert_array_equal(index, same)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    model.assert_close(grads, wanted | {"out": grads["out"]}, 1e-12)
    assert not jnp.any(grads["out"])


def reshaped(p, batch):
    return contrastive(p, {k: x.reshape(runs.ROWS, -1) for k, x in batch.items()})


def constrained(p, batch):
    x = lax.with_sharding_constraint(batch["x"], P("data"))
    return contrastive(p, batch | {"x": x})


def printing(p, batch):
    jax.debug.callback(lambda x: None, batch["x"][0, 0])
    return contrastive(p, batch)


@pytest.mark.parametrize(
    ("loss_fn", "reason"),
    [
        (reshaped, "cannot be traced with the rows of one device"),
        (constrained, "cannot be traced with the rows of one device"),
        (printing, "it has effects"),
    ],
)
def test_a_loss_without_pieces_is_partitioned(ran, loss_fn, reason):
    zero = runs.zero_of(3, min_shard_size=0, view="global")
    make = runs.make_train_state_of(params)
    found = runs.train(zero, make, loss_fn, steps=1)
    ((piece,),) = ran
    assert (piece.what, piece.per_device) == ("the loss", False)
    assert reason in piece.reason
    value, grads = jax.value_and_grad(contrastive)(params(), runs.batch(0))
    np.testing.assert_allclose(found[1][0]["loss"], value, rtol=1e-12)
    moved = jax.tree.map(lambda p, g: p - 0.05 * g, params(), grads)
    model.assert_close(found[0].params, moved, 1e-12)


def test_pieces_with_a_tensor_axis_and_untrained_parameters(ran):
    zero = runs.zero_of(3, "tensor", min_shard_size=0, view="global")
    specs = {"w": P(None, "model"), "layers": P(None, "model"), "out": P("model"), "scale": P()}
    trained = {k: k != "w" for k in specs}
    run = zero.value_and_grad(contrastive, trainable=trained, param_specs=specs)
    state = jax.device_put(params(), {k: NamedSharding(zero.mesh, specs[k]) for k in specs})
    value, grads = run(state, zero.put(runs.batch(0)))
    expected, wanted = jax.value_and_grad(contrastive)(params(), runs.batch(0))
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    model.assert_close(grads, wanted | {"w": 0 * wanted["w"]}, 1e-12)
    assert sum(piece.per_device for piece in ran[-1]) == 1


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


def test_eval_sees_the_whole_batch(ran):
    zero = runs.zero_of(3, "flat", AxisType.Explicit, min_shard_size=0, view="global")
    batch = runs.batch(0)
    found = zero.eval_step(contrastive)((zero.place(params()), None), zero.put(batch))
    np.testing.assert_allclose(found, contrastive(params(), batch), rtol=1e-12)
    assert any(piece.per_device for piece in ran[-1])  # nothing is trained, and layers are gathered


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
    zero = runs.zero_of(2, view="global")
    with pytest.raises(ValueError, match="leave the collective out"):
        zero.value_and_grad(lambda p, b: lax.pmean(jnp.mean(b["x"] @ p["w"]), "data"))(
            zero.place(params()), zero.put(runs.batch(0))
        )
    tx = optax.chain(optax.chain(gradient_noise_scale(16), TX))
    with pytest.raises(ValueError, match="gradient_noise_scale needs gradients of single devices"):
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
