"""Rows seeded at any value and any dim: of the body of a scan, of equations, of a loss at scale."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from optax_ext.traced_graph import Graph
from sharding.loss._row_states import Coupled, Rows, Shared
from sharding.loss._row_walk import Walk, steps_of
from sharding.loss._rows import rows_of_loss

from .losses import DECODER, EXPERTS, TEXT, TOKENS, VOCAB, WIDTH, X, attention, decoder, route


def rows_of_equations(equations, dims, types=()):
    """The states of values of equations of a jaxpr, or of a graph of these types.

    ``dims`` are those that have rows, of some values; all rows share the others.
    """
    avals = {v: v.aval if hasattr(v, "aval") else types[v] for v in dims}
    states = {v: Rows((dim,), avals[v].shape[dim]) for v, dim in dims.items()}
    Walk().run(steps_of(list(equations), None, types), states)
    return states


def equation(jaxpr, name):
    return next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == name)


def dims(state):
    """Where a value has rows, or the primitive in which they meet."""
    return state.dims if isinstance(state, Rows) else state.equation


def test_layers_of_a_contrastive_loss():
    """The loss couples rows; its layers do not, as a scan and equation by equation."""

    def loss(p, x):
        layer = lambda x, w: (x + attention(w, jnp.tanh(x)), w["q"].sum())  # noqa: E731
        x = lax.scan(layer, x, p)[0]
        z = x.mean(1)
        return optax.softmax_cross_entropy_with_integer_labels(z @ z.T, jnp.arange(len(z))).sum()

    x = np.zeros((5, TOKENS, WIDTH))
    assert rows_of_loss(loss, (DECODER["layers"], x), (False, True)).word == "coupled"
    jaxpr = jax.make_jaxpr(loss)(DECODER["layers"], x).jaxpr
    scan = equation(jaxpr, "scan")
    carry = next(v for v in scan.invars if v.aval.shape == x.shape)
    for dim, found in ((0, (0,)), (1, "dot_general"), (2, "dot_general")):
        states = rows_of_equations([scan], {carry: dim})
        new, sums = (states[v] for v in scan.outvars)
        assert dims(new) == found, dim
        assert isinstance(sums, Shared)
    body = scan.params["jaxpr"].jaxpr
    of_body = next(v for v in body.invars if v.aval.shape == x.shape)
    assert dims(rows_of_equations(body.eqns, {of_body: 0})[body.outvars[0]]) == (0,)


def test_tokens_of_a_head_are_apart():
    """As a tile of tokens: seeded at the hidden states and labels, along their second dim."""

    def head(x, w, labels):
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ w, labels)
        return losses.mean(), (x @ w).argmax(-1)

    types = [jnp.zeros((4, 6, WIDTH)), jnp.zeros((WIDTH, VOCAB)), jnp.zeros((4, 6), int)]
    graph = Graph(lambda args: head(*args), types, [False] * 3, exact=True)
    states = rows_of_equations(graph.equations, {0: 1, 2: 1}, graph.types)
    loss, best = (states[value] for value in graph.outputs)
    assert loss.is_sum
    assert best == Rows((1,), 6)
    of_classes = rows_of_equations(graph.equations, {1: 1}, graph.types)
    assert isinstance(of_classes[graph.outputs[0]], Coupled)
    without_labels = rows_of_equations(graph.equations, {0: 1}, graph.types)
    assert isinstance(without_labels[graph.outputs[0]], Coupled)


def test_experts_are_apart():
    """Rows may be anything: here the experts, of whose outputs a token takes one."""

    def each(w, x):
        return jnp.einsum("nd,edf->enf", x, w)

    jaxpr = jax.make_jaxpr(each)(EXPERTS["w"], X).jaxpr
    states = rows_of_equations(jaxpr.eqns, {jaxpr.invars[0]: 0})
    assert dims(states[jaxpr.outvars[0]]) == (0,)
    jaxpr = jax.make_jaxpr(lambda p, x: route(p, x)[0])(EXPERTS, X).jaxpr
    states = rows_of_equations(jaxpr.eqns, {jaxpr.invars[1]: 0})
    assert isinstance(states[jaxpr.outvars[0]], Coupled)


@pytest.mark.parametrize("shape", [(8, 12), (4, 2, 12), (2, 4, 3, 4), (96,), (24, 4), (1, 8, 12)])
def test_reshapes_of_tokens(shape):
    """Rows of 3 x 4 entries, merged and split, also within rows, and over several dims."""
    x = np.zeros((8, 3, 4))
    jaxpr = jax.make_jaxpr(lambda x: x.reshape(shape).sum())(x).jaxpr
    states = rows_of_equations(jaxpr.eqns, {jaxpr.invars[0]: 0})
    assert states[jaxpr.outvars[0]].is_sum
    rows = next(v for v in states.values() if isinstance(v, Rows) and len(v.dims) >= 1)
    assert rows.count == 8


def test_a_decoder_of_70_billion_parameters():
    """Of abstract shapes."""
    layers, width, hidden, vocab = 80, 8192, 28672, 128256
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    stacked = {"q": (width, width), "k": (width, 1024), "v": (width, 1024), "o": (width, width)}
    stacked |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    stacked = {name: of(layers, *shape) for name, shape in stacked.items()}
    params = {"embed": of(vocab, width), "head": of(width, vocab), "layers": stacked}
    assert sum(np.prod(x.shape) for x in jax.tree.leaves(params)) > 70e9

    def norm(x):
        scale = lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True) + 1e-5)
        return (x * scale).astype(x.dtype)

    def layer(x, w):
        heads = lambda a: a.reshape(*a.shape[:2], -1, 128)  # noqa: E731
        q, k, v = (heads(norm(x) @ w[name]) for name in "qkv")
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ w["o"]
        h = norm(x)
        return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None

    def loss(p, text):
        x = lax.scan(jax.checkpoint(layer), p["embed"][text[:, :-1]], p["layers"])[0]
        logits = (norm(x) @ p["head"]).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:])
        mask = text[:, 1:] > 0
        return jnp.sum(losses * mask) / jnp.sum(mask)

    text = jax.ShapeDtypeStruct((64, 8193), jnp.int32)
    assert rows_of_loss(loss, (params, text), (False, True)).word == "weighted"


def test_the_text_is_a_batch():
    with pytest.raises(ValueError, match=r"have \[4, 8\] rows"):
        rows_of_loss(lambda p, b: jnp.sum(b[0]), (0.0, (X, X[:4])), (False, True))
    with jax.numpy_rank_promotion("allow"):
        found = rows_of_loss(lambda p, t: decoder(p, t).mean(), (DECODER, TEXT[:1]), (False, True))
    assert found.word == "mean"  # of one row, too
