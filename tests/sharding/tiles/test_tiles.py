"""Tiles against the plain loss in float64: any head, any chain, both programs, fewer bytes."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

import sharding as shd
from optax_ext.traced_graph import Graph
from sharding.loss._row_states import Rows, Shared
from sharding.loss._row_walk import Walk, steps_of
from sharding.loss._rows import rows_of_loss
from sharding.tiles._chains import ChainSearch

from ...flax_nnx import needs_nnx, nnx
from .. import model

B, T, D, F, V = 4, 13, 8, 48, 51
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def arrays(dtype=np.float64):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / shape[-2] ** 0.5, dtype)  # noqa: E731
    params = {"w": draw(D, V), "up": draw(D, F), "gate": draw(D, F), "down": draw(F, D)}
    batch = {
        "x": draw(B, T, D),
        "y": jnp.asarray(rng.integers(0, V, (B, T))),
        "m": jnp.asarray(rng.random((B, T)) > 0.4, dtype),
    }
    return params, batch


def assert_equal(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * max(1, np.abs(b).max()))


def value_and_grads(fn, *args):
    floating = tuple(i for i, x in enumerate(args) if jax.tree.leaves(x))
    return jax.jit(jax.value_and_grad(fn, floating, allow_int=True))(*args)


# --- cross_entropy --------------------------------------------------------------------------------


def logits_loss(x, w, labels, weights=None, softcap=None, z_loss=0.0, label_smoothing=0.0):
    logits = x @ w
    if softcap:
        logits = softcap * jnp.tanh(logits / softcap)
    words = optax.smooth_labels(jax.nn.one_hot(labels, V, dtype=logits.dtype), label_smoothing)
    losses = optax.softmax_cross_entropy(logits, words)
    losses += z_loss * jax.nn.logsumexp(logits, -1) ** 2
    weights = jnp.ones(labels.shape) if weights is None else weights
    return (losses * weights).sum() / weights.sum()


HEADS = {
    "plain": {},
    "all": {"softcap": 5.0, "z_loss": 1e-2, "label_smoothing": 0.1},
    "capped": {"softcap": 5.0},
    "smoothed": {"label_smoothing": 0.2},
    "with z-loss": {"z_loss": 0.1},
}


@pytest.mark.parametrize("tiles", [1, 3, 4, 51])
@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_that_of_all_logits(name, tiles, x64):
    params, batch = arrays()
    x, w, labels, weights = batch["x"], params["w"], batch["y"], batch["m"]
    options = HEADS[name]
    for mask in (weights, None):
        expected = value_and_grads(
            lambda x, w, mask=mask: logits_loss(x, w, labels, mask, **options), x, w
        )
        found = value_and_grads(
            lambda x, w, mask=mask: shd.cross_entropy(
                x, w, labels, weights=mask, tiles=tiles, **options
            ),
            x,
            w,
        )
        assert_equal(found, expected)


def test_the_table_of_a_tied_head_and_other_reductions(x64):
    params, batch = arrays()
    x, w, labels, m = batch["x"], params["w"], batch["y"], batch["m"]
    losses = cross_entropy(x @ w, labels)
    tied = lambda x, w, **options: shd.cross_entropy(  # noqa: E731
        x, w.T, labels, vocab_dim=0, tiles=5, **options
    )
    assert_equal(tied(x, w, reduction=None), losses)
    assert_equal(tied(x, w, reduction=None, weights=m), losses * m)
    assert_equal(tied(x, w, reduction="sum"), losses.sum())
    expected = value_and_grads(lambda x, w: (cross_entropy(x @ w, labels) * m).sum(), x, w)
    assert_equal(
        value_and_grads(lambda x, w: tied(x, w, reduction="sum", weights=m), x, w), expected
    )
    # By shards of the vocabulary: columns of each in every tile.
    w = jnp.pad(w, ((0, 0), (0, 1)))
    expected = value_and_grads(lambda x, w: cross_entropy(x @ w, labels).mean(), x, w)
    for tiles in (1, 3, 13):
        found = value_and_grads(
            lambda x, w, tiles=tiles: shd.cross_entropy(x, w, labels, tiles=tiles, vocab_shards=4),
            x,
            w,
        )
        assert_equal(found, expected)


def test_a_token_of_no_weight_has_any_label_and_another_one_is_nan(x64):
    params, batch = arrays()
    labels = jnp.where(batch["m"] > 0, batch["y"], -100)
    fn = lambda x, w, labels: shd.cross_entropy(x, w, labels, weights=batch["m"], tiles=4)  # noqa: E731
    found = jax.value_and_grad(fn, (0, 1))(batch["x"], params["w"], labels)
    assert_equal(found, jax.value_and_grad(fn, (0, 1))(batch["x"], params["w"], batch["y"]))
    assert np.isnan(shd.cross_entropy(batch["x"], params["w"], labels))


def test_what_is_not_finite_in_a_token_of_no_weight_stays_so():
    params, batch = arrays(np.float32)
    x, weights = batch["x"].at[0, 0].set(jnp.nan), batch["m"].at[0, 0].set(0)
    assert np.isnan(shd.cross_entropy(x, params["w"], batch["y"], weights=weights, tiles=4))


def test_the_gradient_of_weights_is_that_of_the_plain_loss(x64):
    params, batch = arrays()
    x, w, labels = batch["x"], params["w"], batch["y"]
    found = jax.grad(lambda m: shd.cross_entropy(x, w, labels, weights=m, tiles=4))(batch["m"])
    assert_equal(found, jax.grad(lambda m: logits_loss(x, w, labels, m))(batch["m"]))


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8])
def test_labels_of_8_bits_are_those_of_32(dtype):
    """256 words, of bytes: their number is none of 8 bits."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((6, D), (D, 256)))
    labels = jnp.asarray(rng.integers(0, 128, 6))
    expected = shd.cross_entropy(x, w, labels, tiles=3)
    assert shd.cross_entropy(x, w, labels.astype(dtype), tiles=3) == expected


def test_tiles_of_a_head_start_at_lanes_of_tpus():
    """Else XLA copies the gradient of w to another layout at the end: 1,280 columns in 3 tiles."""
    x, w, labels = jnp.ones((6, D)), jnp.ones((D, 1280)), jnp.zeros(6, int)
    grad = jax.grad(lambda w: shd.cross_entropy(x, w, labels, tiles=3))
    found = re.findall(r"slice_sizes=\(1, 8, (\d+)\)", str(jax.make_jaxpr(grad)(w)))
    assert set(found) == {"512", "256"}


@pytest.mark.parametrize("name", ["softcap", "z_loss", "label_smoothing"])
def test_a_traced_option_raises(name):
    params, batch = arrays(np.float32)
    fn = lambda c: shd.cross_entropy(batch["x"], params["w"], batch["y"], **{name: c})  # noqa: E731
    with pytest.raises(ValueError, match=f"{name} of cross_entropy must be a number of Python"):
        jax.eval_shape(fn, 0.1)


def test_bfloat16_has_float32_logits_and_sums():
    params, batch = arrays(jnp.bfloat16)
    loss, grads = jax.value_and_grad(
        lambda x, w: shd.cross_entropy(x, w, batch["y"], tiles=4), (0, 1)
    )(batch["x"], params["w"])
    assert loss.dtype == jnp.float32
    assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.bfloat16]
    wide = [jnp.asarray(x, jnp.float32) for x in (batch["x"], params["w"])]
    expected, exact = jax.value_and_grad(
        lambda x, w: cross_entropy(x @ w, batch["y"]).mean(), (0, 1)
    )(*wide)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for grad, of in zip(grads, exact, strict=True):
        np.testing.assert_allclose(
            np.asarray(grad, np.float32), of, rtol=0.02, atol=4e-3 * float(jnp.abs(of).max())
        )


def test_rows_of_a_head_are_apart():
    params, batch = arrays(np.float32)
    for options, word in (({}, "mean"), ({"reduction": "sum"}, "sum"), ({"m": True}, "weighted")):
        options = dict(options)
        is_masked = options.pop("m", False)

        def loss(p, b, options=options, is_masked=is_masked):
            weights = b["m"] if is_masked else None
            return shd.cross_entropy(b["x"], p["w"], b["y"], weights=weights, tiles=3, **options)

        assert rows_of_loss(loss, (params, batch), (False, True)).word == word


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tiles": 0}, "tiles must be from 1 to 51"),
        ({"tiles": 52}, "tiles must be from 1 to 51"),
        ({"tiles": 2.0}, "tiles must be from 1 to 51"),
        ({"tiles": True}, "tiles must be from 1 to 51"),
        ({"x": np.ones((B, T, D), int)}, "x of cross_entropy must be floating, got int"),
        ({"labels": np.ones((B, T))}, "labels of cross_entropy must be integers, got float"),
        ({"labels": np.ones((B,), int)}, "labels and weights of (...), got x of (4, 13, 8)"),
        ({"weights": np.ones((B, 1))}, "weights of (4, 1)"),
        ({"vocab_dim": 0}, "w of (V, D)"),
        ({"vocab_dim": 2}, "vocab_dim must be 0 or 1"),
        ({"vocab_shards": 2}, "vocab_shards must divide the vocabulary of 51"),
        ({"softcap": 0.0}, "softcap must be positive or None"),
        ({"label_smoothing": 1.5}, "label_smoothing must be from 0 to 1"),
        ({"reduction": "all"}, "reduction must be 'mean', 'sum' or None"),
    ],
)
def test_a_bad_head_raises(change, message):
    params, batch = arrays(np.float32)
    given = {"x": batch["x"], "w": params["w"], "labels": batch["y"]} | change
    with pytest.raises(ValueError, match=re.escape(message)):
        shd.cross_entropy(**given)


# --- tiled ----------------------------------------------------------------------------------------


def head(p, b):
    return cross_entropy(b["x"] @ p["w"], b["y"]).mean()


def masked(p, b):
    logits = 30 * jnp.tanh(b["x"] @ p["w"] / 30)
    losses = cross_entropy(logits, b["y"]) + 1e-2 * jax.nn.logsumexp(logits, -1) ** 2
    return (losses * b["m"]).sum() / b["m"].sum()


def smoothed(p, b):
    words = 0.9 * jax.nn.one_hot(b["y"], V) + 0.1 / V
    return -(jax.nn.log_softmax(b["x"] @ p["w"]) * words).sum(-1).mean()


def indexed(p, b):
    found = jnp.take_along_axis(jax.nn.softmax(b["x"] @ p["w"]), b["y"][..., None], -1)
    return -jnp.log(found).mean()


def flat(p, b):
    return cross_entropy(b["x"].reshape(-1, D) @ p["w"], b["y"].reshape(-1)).mean()


def flat_later(p, b):
    return cross_entropy((b["x"] @ p["w"]).reshape(-1, V), b["y"].reshape(-1)).mean()


def mlp(p, b):
    return jnp.mean((b["x"] + gated(p, b["x"])) ** 2)


def gated(p, x):
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def with_relu(p, b):
    return jnp.mean((jax.nn.relu(b["x"] @ p["up"]) @ p["down"]) ** 2)


def tied(p, b):
    return cross_entropy(p["w"].T[b["y"]] @ p["w"], b["y"]).mean()


def accuracy(p, b):
    logits = b["x"] @ p["w"]
    return cross_entropy(logits, b["y"]).mean(), (logits.argmax(-1) == b["y"]).mean()


def positions(p, b):
    """What differs by the index of a token, made in the loss."""
    at = jnp.arange(T)[None, :, None] / T
    return jnp.mean((jnp.tanh(b["x"] @ p["up"] + at) @ p["down"]) ** 2)


def dropped(p, b):
    h = jnp.tanh(b["x"] @ p["up"])
    keep = jax.random.bernoulli(jax.random.key(0), 0.7, h.shape)
    return jnp.mean((jnp.where(keep, h / 0.7, 0) @ p["down"]) ** 2)


def attended(x):
    weights = jax.nn.softmax(x @ x.swapaxes(-1, -2) / D**0.5)
    return x + weights @ x


def layer(p, x):
    x = attended(x)
    return x + gated(p, x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6))


def decoder(p, b, wrap=lambda fn: fn):
    stack = {k: jnp.stack([p[k], p[k] / 2]) for k in ("up", "gate", "down")}
    step = wrap(lambda x, p: (layer(p, x), None))
    x, _ = jax.lax.scan(step, b["x"], stack)
    return cross_entropy(x @ p["w"], b["y"]).mean()


def checkpointed(p, b):
    return decoder(p, b, jax.checkpoint)


def unrolled(p, b):
    x = b["x"]
    for _ in range(2):
        x = jax.checkpoint(layer)(p, x)
    return cross_entropy(layer(p, x) @ p["w"], b["y"]).mean()


@jax.custom_vjp
def halved(x):
    """The derivative is not that of the function."""
    return jnp.sin(x)


halved.defvjp(lambda x: (halved(x), x), lambda x, g: (g * jnp.cos(x) / 2,))


def own_gradient(p, b):
    return jnp.mean((halved(b["x"] @ p["up"]) @ p["down"]) ** 2)


def contrastive(p, b):
    """Each token against all others: rows of one side."""
    first = b["x"].reshape(-1, D) @ p["up"][:, :D]
    second = jnp.tanh(b["x"].reshape(-1, D) @ p["gate"][:, :D])
    return cross_entropy(first @ second.T, jnp.arange(B * T)).mean()


def crossed(p, b):
    """Two chains would each read the sum of the other."""
    up, logits = b["x"] @ p["up"], b["x"] @ p["w"]
    first, second = jnp.sum(jnp.tanh(up)), jnp.sum(jnp.tanh(logits))
    return jnp.mean(jnp.sin(up) * second) + jnp.mean(jnp.sin(logits) * first)


LOSSES = {
    fn.__name__: fn
    for fn in (
        *(head, masked, smoothed, indexed, flat, flat_later, mlp, with_relu, tied, positions),
        *(dropped, decoder, checkpointed, unrolled, own_gradient, contrastive, crossed),
    )
}


@pytest.mark.parametrize("forward", [None, False])
@pytest.mark.parametrize("tiles", [4, 5])
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_and_gradients_are_those_of_the_plain_loss(name, tiles, forward, x64):
    params, batch = arrays()
    loss, x = LOSSES[name], batch["x"]
    both = lambda fn: lambda p, x: fn(p, batch | {"x": x})  # noqa: E731
    expected = value_and_grads(both(loss), params, x)
    in_tiles = shd.tiled(loss, tiles, forward_gradient=forward)
    assert_equal(value_and_grads(both(in_tiles), params, x), expected)


def test_gate_and_up_are_one_chain_and_so_is_a_head():
    params, batch = arrays(np.float32)
    (line,) = shd.tiles.report_tiles(mlp, params, batch, tiles=4)
    rows, arrays_of = line.split(": ", 1)
    assert rows == "3 tiles of 4 rows and 1 more"
    inside = "float32[4,13,48] inside, float32[4,13,8] read, float32[] returned"
    assert arrays_of.startswith(inside)
    assert "test_tiles.py" in line
    lines = shd.tiles.report_tiles(decoder, params, batch, tiles=5)
    in_tiles = [line for line in lines if not line.startswith("not")]
    assert len(in_tiles) == 2, lines
    assert "4 tiles of 3 rows and 1 more: float32[4,13,51] inside" in in_tiles[0]
    assert "float32[4,13,8] returned" in in_tiles[1]


def test_what_a_loss_returns_beside_is_kept(x64):
    params, batch = arrays()
    loss = shd.tiled(shd.Loss(accuracy, has_aux=True), 4)
    assert loss.has_aux
    (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
    (expected, right), exact = jax.value_and_grad(accuracy, has_aux=True)(params, batch)
    assert_equal((value, aux, grads), (expected, right, exact))


def coupled_softmax(p, b):
    return jnp.mean((jax.nn.softmax(b["x"] @ p["up"], axis=(0, 1, 2)) @ p["down"]) ** 2)


def normalized(p, b):
    h = b["x"] @ p["up"]
    h = (h - h.mean(keepdims=True)) / h.std(keepdims=True)
    return jnp.mean((h @ p["down"]) ** 2)


def declared(p, b):
    """A function that may be a kernel, of which no tile can be made."""
    fn = shd.keeps_rows_apart(jnp.tanh, in_dims=0, out_dims=0)
    return jnp.mean((fn(b["x"] @ p["up"]) @ p["down"]) ** 2)


def branched(p, b):
    h = b["x"] @ p["up"]
    return jnp.mean((jax.lax.cond(h[0, 0, 0] > 0, jnp.tanh, jnp.sin, h) @ p["down"]) ** 2)


@pytest.mark.parametrize("loss", [coupled_softmax, normalized, declared, branched])
def test_what_is_coupled_does_not_run_in_tiles_and_is_named(loss):
    params, batch = arrays(np.float32)
    with pytest.raises(ValueError, match=r"can run in 13 tiles[\s\S]*test_tiles.py:\d+"):
        shd.tiled(loss, 13)(params, batch)


def weighted(p, b):
    """Examples are weighted by a softmax over the batch."""
    h = b["x"] @ p["up"]
    h = h * jax.nn.softmax(h.mean((1, 2)), axis=0)[:, None, None]
    return jnp.mean((h @ p["down"]) ** 2)


def batch_norm(p, b):
    h = b["x"] @ p["up"]
    h = (h - h.mean((0, 1), keepdims=True)) / jnp.sqrt(h.var((0, 1), keepdims=True) + 1e-5)
    return jnp.mean((jax.nn.relu(h - h.mean(2, keepdims=True)) @ p["down"]) ** 2)


def both_sides(p, b):
    """Each image against all texts, and each text against all images."""
    first, second = (jnp.tanh(b["x"].reshape(-1, D) @ p[k][:, :D]) for k in ("up", "gate"))
    logits, own = first @ second.T, jnp.arange(B * T)
    return (cross_entropy(logits, own) + cross_entropy(logits.T, own)).mean()


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (weighted, "along dims 1, 2: mul: each row meets a sum over all rows"),
        (weighted, "along dim 0: reduce_max: rows are reduced, and not added"),
        (batch_norm, "along dims 0, 1: sub: each row meets a sum over all rows"),
        (both_sides, "reduce_max: rows are reduced, and not added"),
    ],
)
def test_where_rows_of_a_large_value_meet_is_named_with_its_line(loss, words):
    params, batch = arrays(np.float32)
    with pytest.raises(ValueError, match="can run in 4 tiles of their rows") as error:
        jax.eval_shape(shd.tiled(loss, 4), params, batch)
    named = [line for line in str(error.value).splitlines() if "not in tiles" in line]
    for line in named:
        assert re.search(rf"{re.escape(words)}[^;]*test_tiles.py:\d+\)", line), line
    # Values that are small beside it are left out.
    sizes = [np.prod([*map(int, re.findall(r"\d+", x.split("[")[1].split("]")[0]))]) for x in named]
    assert min(sizes) >= max(sizes) / 4
    assert {*shd.tiles.report_tiles(loss, params, batch, tiles=4)} == {x.strip() for x in named}


@pytest.mark.parametrize("tiles", [0, -1, 2.0, True])
def test_bad_tiles_raise(tiles):
    with pytest.raises(ValueError, match="tiles must be a positive int"):
        shd.tiled(head, tiles)
    with pytest.raises(ValueError, match="tiles must be a positive int"):
        shd.tiles.report_tiles(head, *arrays(np.float32), tiles=tiles)


def test_too_many_tiles_raise():
    with pytest.raises(ValueError, match="has 100 rows"):
        shd.tiled(head, 100)(*arrays(np.float32))


def test_a_loss_in_tiles_gets_other_tiles():
    params, batch = arrays(np.float32)
    again = shd.tiled(shd.tiled(shd.Loss(head), 4), 13)
    bodies = str(jax.make_jaxpr(again)(params, batch))
    assert "length=13" in bodies
    assert "length=4" not in bodies


def test_an_empty_batch_runs_as_it_is():
    params, batch = arrays(np.float32)
    none = jax.tree.map(lambda x: x[:0], batch)
    value, grads = jax.value_and_grad(shd.tiled(lambda p, b: jnp.sum(b["x"] @ p["w"]), 4))(
        params, none
    )
    assert value == 0
    assert not grads["w"].any()


def test_masks_of_indices_are_made_in_tiles():
    def attention(q, k):
        later = jnp.triu(jnp.full((len(q), len(k)), -1e30), k=1)
        return jnp.sum((jax.nn.softmax(q @ k.T + later) @ k) ** 2)

    q = jnp.ones((64, 4))
    (line,) = [x for x in shd.tiles.report_tiles(attention, q, q, tiles=4) if "not" not in x]
    assert "float32[64,64] inside, float32[64,4] read, float32[] returned" in line


def test_the_way_back_through_residuals_passes_each_equation_once(monkeypatch, x64):
    """However many values read one, as in a U-Net: the way back does not fork at each of them."""
    passed, operand_rows = collections.Counter(), ChainSearch._operand_rows

    def counted(search, number, rows):
        passed[number, rows] += 1
        return operand_rows(search, number, rows)

    def loss(w, x):
        scales = []
        for _ in range(5):
            scales.append(x + jnp.tanh(x @ w[:D]))
            x = scales[-1].reshape(B, -1, 2, D).sum(2)
        for scale in reversed(scales):
            x = jnp.concatenate([jnp.stack([x, x], 2).reshape(scale.shape), scale], -1) @ w
            x += jnp.tanh(x @ w[:D])
        return jnp.mean(x**2)

    monkeypatch.setattr(ChainSearch, "_operand_rows", counted)
    draw = np.random.default_rng(0).normal
    args = jnp.asarray(draw(size=(2 * D, D)) / 4), jnp.asarray(draw(size=(B, 64, D)))
    found = value_and_grads(shd.tiled(loss, B), *args)
    assert_equal(found, value_and_grads(loss, *args))
    assert max(passed.values()) == 1


def test_marks_of_declared_functions_are_read_in_graphs():
    w = jnp.ones((4, 64))

    def loss(x):
        fn = shd.keeps_rows_apart(lambda w: jnp.tanh(x @ w), in_dims=None, out_dims=None)
        return fn(w)

    graph = Graph.of(jax.make_jaxpr(loss)(jnp.ones((8, 4))))
    states = {0: Rows((0,), 8)}
    Walk().run(steps_of(graph.equations, None, graph.types), states)
    assert isinstance(states[graph.outputs[0]], Shared)


def test_sums_of_bfloat16_are_float32():
    """1 is added 1024 times, which bfloat16 cannot count beyond 256."""

    def loss(w, x):
        return jnp.sum(jnp.tanh(x[:, None] * w) @ jnp.ones((64, 1), x.dtype))

    w, x = jnp.zeros((1, 64), jnp.bfloat16), jnp.ones(1024, jnp.bfloat16)
    for forward in (True, False):
        grads = jax.grad(shd.tiled(loss, 1024, forward_gradient=forward))(w, x)
        np.testing.assert_array_equal(np.asarray(grads, np.float32), 1024)


ELEMENTWISE = {
    "tanh": jnp.tanh,
    "scaled": lambda h: h * jnp.linspace(0.5, 1, h.shape[-1])[None, None],
    "normal": lambda h: h / jnp.sqrt((h**2).mean(-1, keepdims=True) + 1),
    "softmax": lambda h: jax.nn.softmax(h, -1),
    "turned": lambda h: jnp.flip(jnp.cumsum(h, -1), -1) / 9,
    "at": lambda h: h + jnp.arange(h.shape[1])[None, :, None] / 7,
    "causal": lambda h: jnp.where(jnp.arange(h.shape[1])[None, :, None] > 3, h, 0.1),
    "half": lambda h: jnp.concatenate([h[..., ::2], jnp.sin(h[..., 1::2])], -1),
    "relu": jax.nn.relu,
    "heads": lambda h: (
        jnp.sin(h.reshape(*h.shape[:2], 4, -1)).swapaxes(1, 2).swapaxes(1, 2).reshape(h.shape)
    ),
    "kept": lambda h: jax.checkpoint(jnp.cos)(h),
    "best": lambda h: h + jax.lax.top_k(h, 2)[0].sum(-1, keepdims=True),
}


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(sorted(ELEMENTWISE)), min_size=1, max_size=4),
    st.sampled_from([1, 2, 3, 5, 7]),
    st.sampled_from(["sum", "rows", "tokens"]),
)
def test_random_chains(names, tiles, end):
    with jax.enable_x64(True):
        params, batch = arrays()

        def loss(p, x):
            h = x @ p["up"]
            for name in names:
                h = ELEMENTWISE[name](h)
            out = h @ p["down"]
            if end == "sum":
                return jnp.sum(out**2)
            if end == "tokens":
                return jnp.mean(out.reshape(-1, D)[:, 0] ** 2)
            return jnp.mean(jnp.sort(out, axis=1)[:, 0] ** 2)

        expected = value_and_grads(loss, params, batch["x"])
        assert_equal(value_and_grads(shd.tiled(loss, tiles), params, batch["x"]), expected)


# --- Steps ----------------------------------------------------------------------------------------

STEPS = [
    *((stage, loss, {"data": 8}, {}) for stage in range(4) for loss in ("decoder", "flat")),
    (3, "checkpointed", {"data": 4, "model": 2}, {}),
    (2, "masked", {"data": 2}, {"microbatches": 2}),
    (3, "head", {"data": 8}, {"update": "backward"}),
    (3, "decoder", {"data": 4}, {"update": "backward"}),
    (1, "unrolled", {"data": 2, "model": 4}, {}),
]


TX = optax.adam(1e-2)


def rows_of_eight(i=0):
    """A batch of 16 examples."""
    _, batch = arrays()
    batch = jax.tree.map(lambda x: jnp.concatenate([x, x[::-1], x[:, ::-1], x]), batch)
    return batch | {"x": batch["x"] * (1 + i)}


@functools.cache
def alone(name):
    """Two steps of one device, and their losses."""
    params, losses = arrays()[0], []
    state = TX.init(params)
    for i in range(2):
        value, grads = jax.jit(jax.value_and_grad(LOSSES[name]))(params, rows_of_eight(i))
        updates, state = TX.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(value)
    return params, losses


@pytest.mark.parametrize("per_device", [None, False])
@pytest.mark.parametrize(("stage", "name", "axes", "options"), STEPS)
def test_steps_are_those_of_one_device(stage, name, axes, options, per_device, x64):
    zero = shd.Zero(model.mesh_of(**axes), stage=stage)
    params = arrays()[0]
    state = zero.init(lambda: (params, TX.init(params)), tx=TX)
    loss = shd.tiled(shd.Loss(LOSSES[name], per_device=per_device), 4)
    step = zero.train_step(loss, tx=TX, **options)
    expected, losses = alone(name)
    for i in range(2):
        state, metrics = step(state, zero.put(rows_of_eight(i)))
        np.testing.assert_allclose(metrics["loss"], losses[i], rtol=1e-12)
    for a, b in zip(jax.tree.leaves(state[0]), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-9)


def test_dropout_of_keys_and_model_states_are_those_of_the_plain_loss(x64):
    """The masks of a step, drawn by its keys, and what the loss returns beside."""

    def loss(p, b, state, key):
        h = jnp.tanh(b["x"] @ p["up"])
        h = jnp.where(jax.random.bernoulli(key, 0.7, h.shape), h / 0.7, 0)
        return jnp.mean((h @ p["down"]) ** 2), state + 1

    params, steps = arrays()[0], []
    for fn in (lambda given: given, lambda given: shd.tiled(given, 4)):
        zero = model.zero_on(4, stage=2)
        state = zero.init(lambda: (params, TX.init(params)), tx=TX)
        step = zero.train_step(fn(shd.Loss(loss, rngs=True, model_state=True)), tx=TX)
        key = jax.random.key(3)
        more = {"key": key, "model_state": jnp.zeros(())}
        state, metrics = step(state, zero.put(rows_of_eight()), **more)
        steps.append((state[0], metrics["model_state"], metrics["loss"]))
    assert_equal(steps[1], steps[0])


def test_stored_forms_are_decoded_beside_tiles(x64):
    params, batch = arrays()
    forms = {"w": shd.stored.lora(2), "up": shd.stored.lora(2)}
    made = shd.stored.store(params, forms, jax.random.key(0))
    both = lambda p, b: head(p, b) + mlp(p, b)  # noqa: E731
    expected = value_and_grads(lambda p: shd.stored.loss_of(both)(p, batch), made)
    for loss in (
        shd.tiled(shd.stored.loss_of(both), 4),
        shd.stored.loss_of(shd.tiled(both, 4)),
    ):
        assert_equal(value_and_grads(lambda p, loss=loss: loss(p, batch), made), expected)


@pytest.mark.filterwarnings("ignore:stage 3 with a loss that gathers no layer")
@pytest.mark.parametrize("stage", [1, 3])
def test_linen_models_run_in_tiles(stage, x64):
    nn = pytest.importorskip("flax.linen")

    class Head(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = x + nn.Dense(D, param_dtype=float)(nn.gelu(nn.Dense(F, param_dtype=float)(x)))
            return nn.Dense(V, use_bias=False, param_dtype=float)(
                nn.LayerNorm(param_dtype=float)(x)
            )

    net = Head()
    params = net.init(jax.random.key(0), arrays()[1]["x"])
    fn = lambda p, b: cross_entropy(net.apply(p, b["x"]), b["y"]).mean()  # noqa: E731
    zero, batch = model.zero_on(4, stage=stage), rows_of_eight()
    expected = jax.value_and_grad(fn)(params, batch)
    placed = zero.place(params)
    found = zero.value_and_grad(shd.tiled(fn, 4))(placed, zero.put(batch))
    assert_equal(found, expected)


@needs_nnx
def test_nnx_models_run_in_tiles(x64):

    def make():
        net = nnx.Linear(D, V, use_bias=False, param_dtype=float, rngs=nnx.Rngs(0))
        return net, nnx.Optimizer(net, TX, wrt=nnx.Param)

    fn = lambda net, b: cross_entropy(net(b["x"]), b["y"]).mean()  # noqa: E731
    found = []
    for loss in (fn, shd.tiled(fn, 4)):
        zero = model.zero_on(4, stage=2)
        net, optimizer = zero.nnx_init(make)
        metrics = zero.nnx_train_step(loss)(net, optimizer, zero.put(rows_of_eight()))
        found.append((metrics["loss"], net.kernel[...]))
    assert_equal(found[1], found[0])


@pytest.mark.filterwarnings("ignore:stage 3 with a loss that gathers no layer")
@pytest.mark.parametrize("name", ["head", "flat", "masked", "decoder"])
def test_the_loop_over_tiles_sends_nothing(name, x64):
    """At stage 3 parameters are gathered once for all tiles, and sums are reduced after them."""
    params, sent = arrays()[0], []
    for loss in (LOSSES[name], shd.tiled(LOSSES[name], 4)):
        zero = model.zero_on(8, stage=3)
        state = zero.init(lambda: (params, TX.init(params)), tx=TX)
        step = zero.train_step(loss, tx=TX)
        sent.append(shd.wire_bytes(step.lower(state, zero.put(rows_of_eight())).compile()))
    assert sent[0] == sent[1]


@pytest.mark.parametrize("name", ["head", "mlp"])
def test_temporaries_fall(name):
    params = {
        "w": jax.ShapeDtypeStruct((32, 4096), jnp.float32),
        "up": jax.ShapeDtypeStruct((32, 4096), jnp.float32),
        "gate": jax.ShapeDtypeStruct((32, 4096), jnp.float32),
        "down": jax.ShapeDtypeStruct((4096, 32), jnp.float32),
    }
    batch = {
        "x": jax.ShapeDtypeStruct((1, 2048, 32), jnp.float32),
        "y": jax.ShapeDtypeStruct((1, 2048), jnp.int32),
    }
    temporaries = []
    for loss in (LOSSES[name], shd.tiled(LOSSES[name], 16)):
        compiled = jax.jit(jax.value_and_grad(loss)).lower(params, batch).compile()
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
    assert temporaries[1] < temporaries[0] / 4, temporaries


def test_what_is_on_axes_of_another_kind_is_not_tiled():
    """Attention in ``auto_axes``, on a mesh with Explicit axes: its values have another type."""
    mesh = jax.sharding.Mesh(jax.devices()[:1], "x", axis_types=(AxisType.Explicit,))

    @functools.partial(jax.sharding.auto_axes, out_sharding=jax.P())
    def attend(h):
        causal = jnp.tri(64, dtype=bool)[None]
        return jax.nn.softmax(jnp.where(causal, h @ h.swapaxes(1, 2), -1e30)) @ h

    def loss(p, x):
        return jnp.mean(attend(x[:, :, None] * p[None]) ** 2)

    args = jnp.ones((64, 8)), jnp.ones((8, 64))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="axes of another kind"):
        jax.eval_shape(jax.grad(shd.tiled(loss, tiles=4)), *args)
