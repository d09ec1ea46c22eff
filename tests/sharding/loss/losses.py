"""Losses of many kinds, and what is to be proven of each: the word, and what couples its rows."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType

from ...flax_nnx import nnx

ROWS, TOKENS, WIDTH, OUT, VOCAB = 8, 6, 8, 4, 11
RNG = np.random.default_rng(0)
KEY = jax.random.key(0)


def normal(*shape):
    return RNG.normal(size=shape)


def integers(limit, *shape):
    return RNG.integers(0, limit, shape).astype(np.int32)


X, Y, CLASSES = normal(ROWS, WIDTH), normal(ROWS, OUT), integers(OUT, ROWS)
TEXT = integers(VOCAB, ROWS, TOKENS + 1)
PAIR = (X, Y)
DENSE = {"a": normal(WIDTH, WIDTH) / 3, "b": normal(WIDTH, OUT) / 3}
DECODER = {
    "embed": normal(VOCAB, WIDTH),
    "position": normal(TOKENS, WIDTH),
    "layers": {name: normal(3, WIDTH, WIDTH) / 3 for name in "qkvo"},
}
EXPERTS = {"router": normal(WIDTH, 3), "w": normal(3, WIDTH, OUT)}
IMAGES = normal(ROWS, 6, 6, 3)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


@dataclasses.dataclass(frozen=True)
class Case:
    word: str
    loss: Any  # of parameters and a batch
    params: Any = dataclasses.field(default_factory=lambda: DENSE)
    batch: Any = PAIR
    cause: str = ""  # the primitive in which rows meet, or another part of what is said


def mlp(p, x):
    return jnp.tanh(x @ p["a"]) @ p["b"]


@jax.custom_vjp
def scaled_by(p, _):
    return p


scaled_by.defvjp(
    lambda p, s: (p, s), lambda s, g: (jax.tree.map(lambda g: g * s, g), jnp.zeros_like(s))
)


def transposed_to_norm_1(w):
    transpose = lambda _, ct: ct / jnp.linalg.norm(ct)  # noqa: E731
    return jax.custom_derivatives.linear_call(lambda _, w: w * 1, transpose, (), w)


def drawn_by_rbg(p, b):
    key = jax.random.key(0, impl="rbg")
    keys = jax.vmap(lambda x: jax.random.fold_in(key, x))(b[0][:, 0].astype(jnp.uint32))
    return jnp.mean(errors(p, b) * jax.vmap(jax.random.uniform)(keys))


def errors(p, b):
    """The loss of each row."""
    return jnp.mean((mlp(p, b[0]) - b[1]) ** 2, axis=-1)


def attention(p, x):
    q, k, v = ((x @ p[name]).reshape(*x.shape[:2], 2, WIDTH // 2) for name in "qkv")
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return out.reshape(x.shape) @ p["o"]


def layer_norm(x):
    centered = x - x.mean(-1, keepdims=True)
    return centered / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def decoder(p, text, checkpoint=jax.checkpoint):
    x = p["embed"][text[:, :-1]] + p["position"]
    layer = checkpoint(lambda x, w: (x + attention(w, layer_norm(x)), None))
    return layer_norm(lax.scan(layer, x, p["layers"])[0]) @ p["embed"].T


def token_losses(p, text):
    return cross_entropy(decoder(p, text), text[:, 1:])


def bigram_losses(p, text):
    """Of the smallest model of text, where another would be as good."""
    return cross_entropy(p["embed"][text[:, :-1]] @ p["embed"].T, text[:, 1:])


def mask_of(text):
    return (text[:, 1:] > 3).astype(float)


def masked(p, text):
    losses, mask = token_losses(p, text), mask_of(text)
    return jnp.sum(losses * mask) / jnp.maximum(mask.sum(), 1)


def masked_and_regularized(p, text):
    losses, mask, logits = token_losses(p, text), mask_of(text), decoder(p, text)
    z = jax.nn.logsumexp(logits, -1) ** 2
    mean = lambda x: jnp.sum(x * mask) / (mask.sum() + 1e-6)  # noqa: E731
    return mean(losses) + 1e-3 * mean(z) + 1e-2 * jnp.sum(p["position"] ** 2)


def where_any(p, text):
    total, weight = jnp.sum(bigram_losses(p, text) * mask_of(text)), mask_of(text).sum()
    return jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1.0), 0.0)


def in_tiles(p, text):
    """The head, a tile of all tokens after the other."""
    x = (p["embed"][text[:, :-1]] + p["position"]).reshape(4, -1, WIDTH)
    labels = text[:, 1:].reshape(4, -1)

    def tile(total, both):
        return total + cross_entropy(both[0] @ p["embed"].T, both[1]).sum(), None

    return lax.scan(jax.checkpoint(tile), 0.0, (x, labels))[0] / labels.size


def route(p, x):
    gates = jax.nn.softmax(x @ p["router"])
    expert = jnp.argmax(gates, -1)
    each = jnp.einsum("nd,edf->nef", x, p["w"])
    y = jnp.take_along_axis(each, expert[:, None, None], 1)[:, 0]
    return y * gates.max(-1, keepdims=True), gates, expert


def balanced(p, b):
    y, gates, expert = route(p, b[0])
    load = jax.nn.one_hot(expert, 3).mean(0)
    return jnp.mean((y - b[1]) ** 2) + 0.01 * 3 * jnp.sum(gates.mean(0) * load)


def with_capacity(p, b):
    y, _, expert = route(p, b[0])
    place = jnp.cumsum(jax.nn.one_hot(expert, 3), 0).max(-1)
    return jnp.mean((y - b[1]) ** 2 * (place < 4)[:, None])


def info_nce(p, b):
    z = mlp(p, b[0])
    return cross_entropy(z @ (z + b[1]).T, jnp.arange(len(z))).mean()


def batch_norm(p, b):
    h = b[0] @ p["a"]
    return jnp.mean(((h - h.mean(0)) * lax.rsqrt(h.var(0) + 1e-5)) ** 4)


def dropped(p, b):
    h = jnp.tanh(b[0] @ p["a"])
    return jnp.mean(((jax.random.bernoulli(KEY, 0.9, h.shape) * h) @ p["b"] - b[1]) ** 2)


def dropped_alike(p, b):
    h = jnp.tanh(b[0] @ p["a"])
    mask = jax.random.bernoulli(KEY, 0.9, h.shape[1:])
    return jnp.mean(((h * mask) @ p["b"] - b[1]) ** 2)


def dropped_by_keys(p, b):
    drop = jax.vmap(lambda key, x: x * jax.random.bernoulli(key, 0.9, x.shape))
    return jnp.mean((drop(b[2], jnp.tanh(b[0] @ p["a"])) @ p["b"] - b[1]) ** 2)


def dropped_by_split_keys(p, b):
    return dropped_by_keys(p, (*b, jax.random.split(KEY, len(b[0]))))


def drawn_by_gamma(p, b, shape):
    return errors(p, (b[0] * jax.random.gamma(KEY, shape), b[1])).mean()


def mixed_up(p, b, order):
    x, y = (0.7 * v + 0.3 * order(v) for v in b)
    return errors(p, (x, y)).mean()


def shuffled(v):
    return v[jax.random.permutation(KEY, len(v))]


def by_newton(p, x, goes_on):
    """A fixed point z = tanh(z a + x), as a while-loop finds it."""
    step = lambda c: (jnp.tanh(c[0] @ p["a"] / 4 + x), c[0], c[2] + 1)  # noqa: E731
    start = (jnp.zeros_like(x), x, 0)
    return lax.while_loop(lambda c: goes_on(c[0], c[1]) & (c[2] < 20), step, start)[0]


def solved(p, b, goes_on):
    return jnp.mean(lax.stop_gradient(by_newton(p, b[0], goes_on)) @ p["b"] * b[1])


def moved(z, old):
    return jnp.abs(z - old).max() > 1e-3


def solved_each(p, b):
    one = jax.vmap(lambda x: by_newton(p, x, moved))
    return jnp.mean(lax.stop_gradient(one(b[0])) @ p["b"] * b[1])


def clipped_gradients(p, b):
    """The norms of the gradients of each row, clipped."""
    grad = jax.vmap(jax.grad(lambda p, x, y: jnp.sum((mlp(p, x) - y) ** 2)), (None, 0, 0))
    norms = jax.vmap(optax.tree.norm)(grad(p, *b))
    return jnp.mean(jnp.minimum(norms, 1.0))


def over_rows(p, b, step, start=0.0):
    return lax.scan(functools.partial(step, p), start, b)


def add_row(p, total, row):
    return total + jnp.sum((mlp(p, row[0]) - row[1]) ** 2), None


def dropped_row(p, carry, row):
    """Keys are carried."""
    key, own = jax.random.split(carry[0])
    x = row[0] * jax.random.bernoulli(own, 0.5, row[0].shape)
    return (key, add_row(p, carry[1], (x, row[1]))[0]), None


def decayed_row(p, total, row):
    return 0.9 * total + jnp.sum((mlp(p, row[0]) - row[1]) ** 2), None


def swapped_sums(p, totals, row):
    error = jnp.sum((mlp(p, row[0]) - row[1]) ** 2)
    return (totals[1] + error, totals[0] - error), None


def previous_row(p, last, row):
    return row[0], jnp.sum((mlp(p, row[0] - last) - row[1]) ** 2)


def recurrent(p, text):
    """Tokens one after the other, rows side by side."""

    def step(h, token):
        h = jnp.tanh(h @ p["layers"]["q"][0] + p["embed"][token])
        return h, h @ p["embed"].T

    start = jnp.zeros((len(text), WIDTH))
    logits = lax.scan(step, start, text[:, :-1].T)[1]
    return cross_entropy(logits, text[:, 1:].T).mean()


def physics(p, b):
    trace = jax.vmap(lambda x: jnp.trace(jax.hessian(lambda x: mlp(p, x).sum())(x)))
    return jnp.mean(trace(b[0]) ** 2)


def gradient_clipped(p, b, bound):
    """The identity, whose derivative clips the cotangent."""
    through = jax.custom_vjp(lambda x: x)
    through.defvjp(lambda x: (x, None), lambda _, g: (bound(g),))
    return jnp.mean((through(mlp(p, b[0])) - b[1]) ** 2)


def fused_sum(p, b):
    """A kernel of its own, say, of all rows; labels have no derivative."""
    total = jax.custom_vjp(lambda x, y: jnp.sum((x - y) ** 2))
    total.defvjp(lambda x, y: (total(x, y), x - y), lambda x, g: (2 * g * x, None))
    return total(mlp(p, b[0]), b[1])


def gradient_of_weights_clipped(p, b, bound):
    """The same of a matrix, which all rows share."""
    through = jax.custom_vjp(lambda x: x)
    through.defvjp(lambda x: (x, None), lambda _, g: (bound(g),))
    return jnp.mean(errors({**p, "a": through(p["a"])}, b))


def with_a_gradient_of_its_own(p, b):
    """The identity, whose derivative reads no cotangent."""
    through = jax.custom_vjp(lambda x: x)
    through.defvjp(lambda x: (x, x), lambda x, _: (x,))
    return jnp.mean((through(mlp(p, b[0])) - b[1]) ** 2)


def straight_through(p, b):
    sign = jax.custom_jvp(jnp.sign)
    sign.defjvp(lambda primals, tangents: (sign(*primals), tangents[0]))
    return jnp.mean((sign(b[0] @ p["a"]) @ p["b"] - b[1]) ** 2)


def ctc(p, b):
    logits = jnp.stack([mlp(p, b[0] * k) for k in (1.0, 2.0, 3.0, 4.0)], 1)
    none = jnp.zeros(logits.shape[:2])
    labels = b[2][:, None] % (OUT - 1) + 1
    return optax.ctc_loss(logits, none, labels, jnp.zeros(labels.shape)).mean()


def graph_edges(p, b):
    """Edges are rows; nodes are shared by them."""
    nodes = jax.ops.segment_sum(mlp(p, b[0]), b[2], 3)
    return jnp.mean(nodes**2)


def counted_classes(p, b):
    """Per class, a mean over its rows; a shared table of sums."""
    totals = jnp.zeros(OUT).at[b[2]].add(errors(p, b))
    counts = jnp.zeros(OUT).at[b[2]].add(1.0)
    return jnp.sum(totals / jnp.maximum(counts, 1))


class Convolution(nn.Module):
    norm: Any

    @nn.compact
    def __call__(self, x):
        x = nn.max_pool(nn.relu(self.norm()(nn.Conv(4, (3, 3))(x))), (2, 2), (2, 2))
        x = nn.Conv(4, (3, 3), feature_group_count=4)(x)
        return nn.Dense(OUT)(x.reshape(len(x), -1))


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(nn.Embed(VOCAB, WIDTH)(x))
        return nn.MultiHeadDotProductAttention(2)(x)


def of_images(norm):
    model = Convolution(norm)
    params = jax.eval_shape(model.init, KEY, IMAGES)

    def loss(p, b):
        out = model.apply(p, b[0], mutable=["batch_stats"])[0]
        return jnp.mean((out - b[1]) ** 2)

    return {"loss": loss, "params": params, "batch": (IMAGES, Y)}


def of_encoder():
    model = Encoder()
    loss = lambda p, b: jnp.mean(model.apply(p, b) ** 2)  # noqa: E731
    return {"loss": loss, "params": jax.eval_shape(model.init, KEY, TEXT), "batch": TEXT}


def of_equinox():
    model = eqx.nn.MLP(WIDTH, OUT, 16, 2, key=KEY)
    params, static = eqx.partition(model, eqx.is_array)

    def loss(p, b):
        return jnp.mean((jax.vmap(eqx.combine(p, static))(b[0]) - b[1]) ** 2)

    return {"loss": loss, "params": params}


def of_nnx(make, batch=PAIR):
    def loss(p, b):
        return jnp.mean((nnx.merge(graph, p)(b[0]) - b[1]) ** 2)

    graph, params = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    return {"loss": loss, "params": params, "batch": batch}


def in_batch_groups(p, b):
    images, kernel = b[0].transpose(0, 3, 1, 2), jnp.ones((4, 3, 1, 1))
    return jnp.mean(lax.conv_general_dilated(images, kernel, (1, 1), "SAME", batch_group_count=4))


def solved_systems(p, b):
    systems = jax.vmap(lambda x: jnp.outer(x, x) + jnp.eye(OUT))(mlp(p, b[0]))
    return jnp.mean(jnp.linalg.solve(systems, b[1][..., None]) ** 2)


def preferences(p, b):
    """DPO: two answers a row, one after the other in a batch of twice the rows."""
    chosen, rejected = jnp.split(mlp(p, jnp.concatenate([b[0], b[0][:, ::-1]])).sum(-1), 2)
    return -jax.nn.log_sigmoid(chosen - rejected).mean()


def covariance(p, b):
    z = mlp(p, b[0])
    return jnp.sum((z.T @ z / len(z)) ** 2)


def with_reference(p, b):
    total = jax.new_ref(jnp.zeros(()))
    total[...] += errors(p, b).sum()
    return total[...] ** 2


mean = functools.partial(Case, "mean")
coupled = functools.partial(Case, "coupled")
KEYS = jax.random.split(KEY, ROWS)
ADD = lambda p, b: over_rows(p, b, add_row)[0]  # noqa: E731

LOSSES = {
    # --- What each row gives alone
    "mean": mean(lambda p, b: errors(p, b).mean()),
    "vmap by row": mean(
        lambda p, b: jax.vmap(lambda x, y: jnp.sum((mlp(p, x) - y) ** 2))(*b).mean()
    ),
    "map by row": mean(
        lambda p, b: lax.map(lambda xy: jnp.sum((mlp(p, xy[0]) - xy[1]) ** 2), b).mean()
    ),
    "decoder": mean(lambda p, t: token_losses(p, t).mean(), DECODER, TEXT),
    "flat tokens": mean(
        lambda p, t: cross_entropy(decoder(p, t).reshape(-1, VOCAB), t[:, 1:].reshape(-1)).mean(),
        DECODER,
        TEXT,
    ),
    "tiles": mean(in_tiles, DECODER, TEXT),
    "tokens in turn": mean(recurrent, DECODER, TEXT),
    "one-hot": mean(
        lambda p, t: (
            -(jax.nn.log_softmax(decoder(p, t)) * jax.nn.one_hot(t[:, 1:], VOCAB)).sum(-1).mean()
        ),
        DECODER,
        TEXT,
    ),
    "weight decay": mean(lambda p, b: errors(p, b).mean() + 1e-3 * optax.tree.norm(p) ** 2),
    "times 1/n": mean(lambda p, b: errors(p, b) @ jnp.full(len(b[0]), 1 / len(b[0]))),
    "divided by n first": mean(lambda p, b: jnp.sum(errors(p, b) / len(b[0]))),
    "sum over n of a mask of ones": mean(
        lambda p, b: jnp.sum(errors(p, b)) / jnp.sum(jnp.ones(len(b[0])))
    ),
    "two views": mean(
        lambda p, b: jnp.mean(mlp(p, jnp.concatenate([b[0], b[0] + 1])).reshape(2, -1, OUT).std(0))
    ),
    "a token of each row": mean(
        lambda p, b: jnp.mean(
            jnp.concatenate([jnp.tile(p["b"][:1], (len(b[0]), 1)), mlp(p, b[0])], 1) ** 2
        )
    ),
    "labels by index": mean(
        lambda p, b: -jax.nn.log_softmax(mlp(p, b[0]))[jnp.arange(len(b[2])), b[2]].mean(),
        batch=(X, Y, CLASSES),
    ),
    "one-hot by index": mean(
        lambda p, b: jnp.mean(
            mlp(p, b[0]) * jnp.zeros(b[1].shape).at[jnp.arange(len(b[2])), b[2]].set(1)
        ),
        batch=(X, Y, CLASSES),
    ),
    "median, top-k and sort of a row": mean(
        lambda p, b: jnp.mean(
            jnp.median(mlp(p, b[0]), -1)
            + lax.top_k(mlp(p, b[0]), 2)[0].sum(-1)
            + jnp.sort(mlp(p, b[0]), -1)[:, 0]
        )
    ),
    "Huber, cosine, hinge": mean(
        lambda p, b: jnp.mean(
            optax.huber_loss(mlp(p, b[0]), b[1]).sum(-1)
            + optax.cosine_distance(mlp(p, b[0]), b[1])
            + optax.hinge_loss(mlp(p, b[0]), jnp.sign(b[1])).sum(-1)
        )
    ),
    "CTC": mean(ctc, batch=(X, Y, CLASSES)),
    "an entry of each row less": mean(
        lambda p, b: jnp.mean(mlp(p, b[0]).at[jnp.arange(len(b[0])), b[2]].subtract(1.0) ** 2),
        batch=(X, Y, CLASSES),
    ),
    "experts": mean(lambda p, b: jnp.mean((route(p, b[0])[0] - b[1]) ** 2), EXPERTS),
    "Hessians": mean(physics),
    "gradients clipped by row": mean(clipped_gradients),
    "a solver that stops by row": mean(solved_each),
    "a solver of fixed steps": mean(
        lambda p, b: jnp.mean(lax.fori_loop(0, 5, lambda _, z: jnp.tanh(z @ p["a"] + b[0]), b[0]))
    ),
    "linear systems of rows": mean(
        lambda p, b: jnp.mean(
            jnp.linalg.cholesky(jax.vmap(lambda x: jnp.outer(x, x) + jnp.eye(WIDTH))(b[0] @ p["a"]))
        )
    ),
    "a branch by row": mean(
        lambda p, b: lax.map(
            lambda x: lax.cond(x[0] > 0, lambda x: mlp(p, x).sum(), lambda x: x.sum(), x), b[0]
        ).mean()
    ),
    "solved systems": mean(solved_systems),
    "preferences": mean(preferences),
    "smoothed labels, of a teacher": mean(
        lambda p, b: optax.losses.softmax_cross_entropy(
            mlp(p, b[0]), optax.smooth_labels(jax.nn.softmax(lax.stop_gradient(mlp(p, b[0]))), 0.1)
        ).mean()
    ),
    "quantiles": mean(
        lambda p, b: sum(
            jnp.maximum(q * (b[1] - mlp(p, b[0])), (q - 1) * (b[1] - mlp(p, b[0]))).mean()
            for q in (0.1, 0.5, 0.9)
        )
    ),
    "noise that rows share": mean(dropped_alike),
    "dropout by keys of the batch": mean(dropped_by_keys, batch=(*PAIR, KEYS)),
    "a custom_vjp linear in its cotangent": mean(
        lambda p, b: gradient_clipped(p, b, lambda g: 2 * g)
    ),
    "a custom_vjp of weights, linear": mean(
        lambda p, b: gradient_of_weights_clipped(p, b, lambda g: 2 * g)
    ),
    "a custom_jvp": mean(straight_through),
    "linen, group norm": mean(**of_images(functools.partial(nn.GroupNorm, 2))),
    "linen, attention": mean(**of_encoder()),
    "Equinox": mean(**of_equinox()),
    # --- Sums, ratios, random numbers
    "sum": Case("sum", lambda p, b: jnp.sum(errors(p, b))),
    "a loop that adds rows": Case("sum", ADD),
    "a custom_vjp that sums rows": Case("sum", fused_sum),
    "a sum times the number that is 1/n here": Case(
        "sum", lambda p, b: jnp.sum(errors(p, b)) * (1 / ROWS)
    ),
    "a loop that adds rows, over n": mean(lambda p, b: ADD(p, b) / len(b[0])),
    "masked": Case("weighted", masked, DECODER, TEXT),
    "masked, twice, and decay": Case("weighted", masked_and_regularized, DECODER, TEXT),
    "masked, none": Case("weighted", where_any, DECODER, TEXT),
    "jnp.mean(where=)": Case(
        "weighted", lambda p, t: jnp.mean(bigram_losses(p, t), where=t[:, 1:] > 3), DECODER, TEXT
    ),
    "jnp.average": Case(
        "weighted", lambda p, t: jnp.average(bigram_losses(p, t), weights=mask_of(t)), DECODER, TEXT
    ),
    "weights that sum to 1": Case(
        "weighted",
        lambda p, t: jnp.sum(bigram_losses(p, t) * (mask_of(t) / mask_of(t).sum())),
        DECODER,
        TEXT,
    ),
    "the inverse of a weight": Case(
        "weighted",
        lambda p, t: jnp.sum(bigram_losses(p, t) * mask_of(t) * (1 / mask_of(t).sum())),
        DECODER,
        TEXT,
    ),
    "a ratio of means": Case(
        "weighted",
        lambda p, t: (bigram_losses(p, t) * mask_of(t)).mean() / mask_of(t).mean(),
        DECODER,
        TEXT,
    ),
    "means by class": Case("weighted", counted_classes, batch=(X, Y, CLASSES)),
    "dropout": Case("random", dropped),
    "dropout by split keys": Case("random", dropped_by_split_keys),
    "gamma draws": Case("random", lambda p, b: drawn_by_gamma(p, b, jnp.full(b[0].shape, 2.0))),
    "gamma draws of rows": Case("random", lambda p, b: drawn_by_gamma(p, b, 1 + b[0] ** 2)),
    "one gamma draw for all": Case("mean", lambda p, b: drawn_by_gamma(p, b, 2.0)),
    "dropout by keys of a loop": Case(
        "random", lambda p, b: over_rows(p, b, dropped_row, (KEY, 0.0))[0][1]
    ),
    # --- Rows meet
    "sum and weight decay": coupled(
        lambda p, b: jnp.sum(errors(p, b)) + optax.tree.norm(p), cause="what all rows share"
    ),
    "sum over sqrt(n)": coupled(
        lambda p, b: jnp.sum(errors(p, b)) / np.sqrt(len(b[0])), cause="number"
    ),
    "n times a masked mean": coupled(
        lambda p, t: masked(p, t) * len(t), DECODER, TEXT, cause="k ** 1"
    ),
    "a weight of half the rows at least": coupled(
        lambda p, t: bigram_losses(p, t).sum() / jnp.maximum(mask_of(t).sum(), len(t) / 2),
        DECODER,
        TEXT,
        cause="clipped",
    ),
    "a weight of another mean": coupled(
        lambda p, t: bigram_losses(p, t).mean() / mask_of(t).sum(), DECODER, TEXT, cause="k ** -1"
    ),
    "batch norm": coupled(batch_norm, cause="sub"),
    "linen, batch norm": coupled(
        **of_images(functools.partial(nn.BatchNorm, use_running_average=False)), cause="sub"
    ),
    "InfoNCE": coupled(info_nce, cause="dot_general"),
    "two tokens in turn": coupled(
        lambda p, b: jnp.mean(mlp(p, b[0]) * jnp.tile(p["b"][:2], (len(b[0]) // 2, 1))),
        cause="depends on their number",
    ),
    "load balance": coupled(balanced, EXPERTS, cause="mul"),
    "experts of some capacity": coupled(with_capacity, EXPERTS, cause="cumsum"),
    "variance over rows": coupled(
        lambda p, b: jnp.mean(jax.nn.relu(1 - jnp.std(mlp(p, b[0]), 0))), cause="sub"
    ),
    "a loss of a mean": coupled(lambda p, b: jnp.mean(mlp(p, b[0])) ** 2, cause="integer_pow"),
    "a function of ratios": coupled(
        lambda p, t: jnp.mean(jnp.tanh(bigram_losses(p, t) / mask_of(t).mean())),
        DECODER,
        TEXT,
        cause="not linear",
    ),
    "squares of sums of groups": coupled(
        lambda p, b: jnp.mean(errors(p, b).reshape(4, -1).sum(1) ** 2), cause="not linear"
    ),
    "a number in place of the sum of each group": coupled(
        lambda p, b: jnp.where(p["a"][0, 0] < 9, errors(p, b).reshape(4, -1).sum(1), 5.0).sum(),
        cause="added to what all rows share",
    ),
    "a power that is the number of rows": coupled(
        lambda p, b: jnp.mean(mlp(p, b[0]) ** len(b[0])), cause="number"
    ),
    "parameters at the number of rows": coupled(
        lambda p, b: jnp.mean(errors(p, b) * p["a"][len(b[0]) // ROWS, 0]), cause="number"
    ),
    "parameters joined once for each row": coupled(
        lambda p, b: (errors(p, b).mean(), jnp.concatenate([p["a"]] * len(b[0]))),
        cause="another program",
    ),
    "no elements of rows": coupled(
        lambda p, b: errors(p, b).mean() + b[0][:, :0].reshape(-1).sum(), cause="no elements"
    ),
    "a product of means": coupled(lambda p, b: errors(p, b).mean() * b[1].mean(), cause="mul"),
    "the largest": coupled(lambda p, b: jnp.max(mlp(p, b[0])), cause="reduce_max"),
    "the five hardest rows": coupled(
        lambda p, b: lax.top_k(errors(p, b), 5)[0].mean(), cause="top_k"
    ),
    "logsumexp over rows": coupled(lambda p, b: jax.nn.logsumexp(errors(p, b)), cause="reduce_max"),
    "groups of a batch": coupled(in_batch_groups, batch=(IMAGES, Y), cause="conv"),
    "a covariance": coupled(covariance, cause="integer_pow"),
    "a reference": coupled(with_reference, cause="reference"),
    "parts of a batch": coupled(
        lambda p, b: sum(mlp(p, x).mean() for x in jnp.split(b[0], 4)), cause="split"
    ),
    "eight groups, which are rows of a batch of eight": coupled(
        lambda p, b: jnp.mean(
            (errors(p, b).reshape(ROWS, -1) * jnp.arange(len(b[0]) // ROWS)[None]).reshape(-1)
        ),
        cause="another program",
    ),
    "another program for 16 rows": coupled(
        lambda p, b: jnp.mean(
            jnp.exp(mlp(p, b[0]) - b[1] if len(b[0]) == ROWS else b[1] - mlp(p, b[0]))
        ),
        cause="another program",
    ),
    "each row with all indices": coupled(
        lambda p, b: jnp.mean(errors(p, b)[:, None] * jnp.arange(len(b[0]))[None]),
        cause="along another dim",
    ),
    "as many steps as rows": coupled(
        lambda p, b: jnp.mean(lax.fori_loop(0, len(b[0]), lambda _, z: 0.9 * z, mlp(p, b[0]))),
        cause="for each row",
    ),
    "a pool over rows": coupled(
        lambda p, b: jnp.mean(
            nn.max_pool(mlp(p, b[0])[None, ..., None], (2, 1), padding="SAME") * b[1][..., None]
        ),
        cause="window",
    ),
    "ranks": coupled(lambda p, b: jnp.mean(jnp.argsort(errors(p, b)) * b[1][:, 0]), cause="sort"),
    "differences of neighbours": coupled(
        lambda p, b: jnp.mean(jnp.diff(mlp(p, b[0]), axis=0) ** 2), cause="slice"
    ),
    "the first row": coupled(lambda p, b: jnp.mean((mlp(p, b[0]) - b[1][0]) ** 2), cause="slice"),
    "the reverse": coupled(lambda p, b: jnp.mean((mlp(p, b[0][::-1]) - b[1]) ** 2), cause="rev"),
    "padded rows": coupled(
        lambda p, b: jnp.mean(mlp(p, jnp.pad(b[0], ((0, 8), (0, 0)))) ** 2), cause="pad"
    ),
    "mixup with the reverse": coupled(lambda p, b: mixed_up(p, b, lambda v: v[::-1]), cause="rev"),
    "mixup with a shuffle": coupled(lambda p, b: mixed_up(p, b, shuffled), cause="gather"),
    "weights by index": coupled(
        lambda p, b: jnp.mean(errors(p, b) * (jnp.arange(len(b[0])) + 1.0)), cause="mul"
    ),
    "ramp over the batch": coupled(
        lambda p, b: jnp.mean(errors(p, b) * jnp.linspace(0, 1, len(b[0]))), cause="number"
    ),
    "weights of 8 rows": coupled(
        lambda p, b: jnp.mean(errors(p, b) * np.arange(ROWS)), cause="index"
    ),
    "a batch of 8 rows": coupled(
        lambda p, b: jnp.mean(mlp(p, b[0]).reshape(ROWS, OUT)), cause="with 16 rows"
    ),
    "pairs of rows": coupled(
        lambda p, b: jnp.mean(jnp.abs(mlp(p, b[0])[:, None] - mlp(p, b[0])[None])), cause="sub"
    ),
    "a spectrum over rows": coupled(
        lambda p, b: jnp.mean(jnp.abs(jnp.fft.fft(mlp(p, b[0]), axis=0)) ** 2), cause="fft"
    ),
    "a determinant of a Gram matrix": coupled(
        lambda p, b: jnp.linalg.slogdet(mlp(p, b[0]).T @ mlp(p, b[0]))[1], cause="lu"
    ),
    "nodes that share edges": coupled(graph_edges, batch=(X, Y, CLASSES % 3), cause="integer_pow"),
    "a solver that stops for all": coupled(
        functools.partial(solved, goes_on=moved), cause="reduce_max"
    ),
    "a branch by a mean": coupled(
        lambda p, b: lax.cond(
            errors(p, b).mean() > 1, lambda: errors(p, b).mean(), lambda: b[1].mean()
        ),
        cause="cond",
    ),
    "a loop that forgets rows": coupled(
        lambda p, b: over_rows(p, b, decayed_row)[0], cause="sum over the rows so far"
    ),
    "a loop whose sums change places": coupled(
        lambda p, b: over_rows(p, b, swapped_sums, (0.0, 0.0))[0][0], cause="to the next one"
    ),
    "a loop that reads the last row": coupled(
        lambda p, b: over_rows(p, b, previous_row, jnp.zeros(WIDTH))[1].mean(),
        cause="to the next one",
    ),
    "cotangents clipped by their mean": coupled(
        lambda p, b: gradient_clipped(p, b, lambda g: g / jnp.linalg.norm(g)), cause="derivative"
    ),
    "cotangents squared": coupled(
        lambda p, b: gradient_clipped(p, b, lambda g: g * jnp.abs(g)), cause="derivative"
    ),
    "cotangents of weights clipped": coupled(
        lambda p, b: gradient_of_weights_clipped(p, b, lambda g: g / jnp.linalg.norm(g)),
        cause="derivative",
    ),
    "vmap over keys that are not threefry's": coupled(drawn_by_rbg, cause="threefry"),
    "a derivative that reads a sum": coupled(
        lambda p, b: jnp.mean(errors(scaled_by({"a": p["a"] * 1, "b": p["b"]}, jnp.mean(b[0])), b)),
        cause="may read a sum",
    ),
    "a transpose that is not linear": coupled(
        lambda p, b: jnp.mean(errors({"a": transposed_to_norm_1(p["a"]), "b": p["b"]}, b)),
        cause="linear_call",
    ),
    "a solution whose transpose couples": coupled(
        lambda p, b: jnp.mean(
            lax.custom_linear_solve(
                lambda x: 2 * x, mlp(p, b[0]), lambda _, y: y / 2, lambda _, ct: ct - ct.mean(0)
            )
        ),
        cause="sub",
    ),
    "one index for all": coupled(
        lambda p, b: jnp.mean(mlp(p, b[0])[jnp.broadcast_to(jnp.arange(1), len(b[0])), b[1]]),
        batch=(X, CLASSES),
        cause="",
    ),
    "a sum that wraps": coupled(
        lambda p, b: jnp.sum(b[1] - 3).astype(jnp.uint32).astype(float) * p["a"][0, 0],
        batch=(X, CLASSES),
        cause="",
    ),
    "cotangents that are not read": coupled(with_a_gradient_of_its_own, cause="derivative"),
    "over n - 1": coupled(
        lambda p, b: jnp.sum(errors(p, b)) / (jnp.sum(jnp.ones(len(b[0]) - 1))), cause="number"
    ),
    "cotangents clipped": coupled(
        lambda p, b: gradient_clipped(p, b, lambda g: jnp.clip(g, -0.1, 0.1)), cause="derivative"
    ),
    "a shard_map": coupled(
        lambda p, b: jnp.mean(
            jax.shard_map(
                lambda x: mlp(p, x),
                mesh=jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,)),
                in_specs=jax.P("data"),
                out_specs=jax.P("data"),
            )(b[0])
        ),
        cause="shard_map: what it does with rows is not known",
    ),
    "a callback": coupled(
        lambda p, b: jnp.mean(
            jax.pure_callback(np.tanh, jax.ShapeDtypeStruct((len(b[0]), OUT), b[1].dtype), b[1])
            * mlp(p, b[0])
        ),
        cause="pure_callback: what it does with rows is not known",
    ),
}
if nnx is not None:
    LOSSES |= {
        "nnx": mean(**of_nnx(lambda rngs: nnx.Linear(WIDTH, OUT, rngs=rngs))),
        "nnx, attention": mean(
            **of_nnx(
                lambda rngs: nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs),
                (normal(ROWS, TOKENS, WIDTH), normal(ROWS, TOKENS, WIDTH)),
            )
        ),
        "nnx, batch norm": coupled(
            **of_nnx(lambda rngs: nnx.BatchNorm(WIDTH, rngs=rngs), (X, X)), cause="sub"
        ),
    }
