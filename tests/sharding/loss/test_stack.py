"""Stacks are found in one way, whatever a loss wraps around its loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from optax_ext.traced_graph import Graph
from sharding.loss._derivatives import Differentiated
from sharding.loss._stack import find_stacks, numbered_layers, params_of_one_loop
from sharding.plan.model._loss_layers import LossTrace
from sharding.remat._loss_search import PlannableLoss

LAYERS, WIDTH = 6, 4
PARAMS = {"a": jnp.ones((LAYERS, WIDTH)), "b": jnp.ones((LAYERS, WIDTH)), "c": jnp.ones(WIDTH)}
X = jnp.ones(WIDTH)


def loop(x, *ws, **options):
    return lax.scan(lambda x, ws: (jnp.sin(x * ws[0]) + sum(ws), None), x, ws, **options)[0]


def nested(p, x):
    """Loops over two layers each, in one over three."""
    pairs = p["a"].reshape(LAYERS // 2, 2, WIDTH)
    return lax.scan(lambda x, pair: (loop(x, pair), None), x, pairs)[0]


# Of a loss, trained parameters: those that each of its loops owns, and those that it slices beside.
CASES = {
    "plain": (lambda p, x: loop(x, p["a"], p["b"]), "ab", [("ab", "")]),
    "frozen": (lambda p, x: loop(x, p["a"], p["b"]), "a", [("a", "b")]),
    "cast": (lambda p, x: loop(x, p["a"].astype(jnp.bfloat16).astype(x.dtype)), "abc", [("a", "")]),
    "jit": (
        lambda p, x: jax.jit(loop)(jax.jit(loop)(x, p["a"]), p["b"]),
        "ab",
        [("a", ""), ("b", "")],
    ),
    "changed": (lambda p, x: loop(x, (2 * p["a"][:, None] + 1)[:, 0]), "a", [("a", "")]),
    "nested": (nested, "a", [("", "")]),
    "along the second dim": (
        lambda p, x: loop(jnp.repeat(x[:1], LAYERS), p["a"].T),
        "a",
        [("", "")],
    ),
    "mixed layers": (
        lambda p, x: loop(x, p["a"] - p["a"].mean(0, keepdims=True), p["b"]),
        "ab",
        [("b", "")],
    ),
    "sliced twice": (
        lambda p, x: loop(loop(x, p["a"]), p["a"], p["b"]),
        "ab",
        [("", ""), ("b", "")],
    ),
    "used beside": (lambda p, x: loop(x, p["a"]) + p["a"][0], "a", [("", "")]),
    "checkpoint": (lambda p, x: jax.checkpoint(loop)(x, p["a"]), "a", []),
    "no derivative": (
        lambda p, x: x * p["c"] + lax.stop_gradient(loop(x, p["a"])),
        "ac",
        [("", "")],
    ),
    "not needed": (lambda p, x: (loop(x, p["a"]), x * p["c"])[1], "ac", []),
}


@pytest.mark.parametrize("name", CASES)
def test_what_loops_own(name):
    fn, trained, expected = CASES[name]
    given = [*PARAMS.values(), X]
    graph = Graph(
        lambda given: jnp.sum(fn(dict(zip("abc", given, strict=False)), given[-1])),
        given,
        [True] * 4,
        exact=True,
    )
    params = sum(1 << "abc".index(i) for i in trained)
    stacks = find_stacks(graph, 3, Differentiated.of(graph, params))
    found = [
        ("".join("abc"[i] for i in s.params), "".join("abc"[x.param] for x in s.frozen.values()))
        for s in stacks
    ]
    assert found == expected


@pytest.mark.parametrize("name", CASES)
def test_which_parameters_one_loop_alone_reads(name):
    """Those that it owns as they are, or cast; also in a checkpoint."""
    fn, trained, expected = CASES[name]
    leaves = [*PARAMS.values(), X]
    closed = jax.make_jaxpr(lambda *x: jnp.sum(fn(dict(zip("abc", x, strict=False)), x[-1])))(
        *leaves
    )
    found = params_of_one_loop(closed, sum(1 << "abc".index(i) for i in trained))
    own = {"changed": "", "checkpoint": "a"}.get(name, "".join(own for own, _ in expected))
    assert {"abc"[i] for i in found} == set(own)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("frozen", "checkpoint")])
def test_plans_find_the_same(name):
    """The planner those that own parameters; remat all, and in checkpoints, too."""
    fn, _, expected = CASES[name]
    loss = lambda p, x: jnp.sum(fn(p, x))  # noqa: E731
    layers = LossTrace(loss, PARAMS, X).layers
    assert [{"abc"[i] for i in layer.params} for layer in layers] == [
        set(a) for a, _ in expected if a
    ]
    planned = PlannableLoss(loss, PARAMS, X, jax.devices()[0])
    assert len(planned.loops_of(None, False)) == len(expected)


def test_which_parameters_are_of_numbered_layers():
    layers = {
        "layers/0/w": "layers/0",
        "layers/1/v/2": "layers/1",
        "Embed_0/w": "",
        "Block_2": "Block_2",
        "Block_10": "Block_10",
        "w2/v": "",
        "0/a/3": "0/a/3",
        "0/a/4/w": "0/a/4",
    }
    assert numbered_layers(list(layers)) == list(layers.values())


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("segment", [1, 2])
def test_a_stack_with_another_body(reverse, segment):
    def layer(x, w):
        return x + w, x * w

    graph = Graph(
        lambda given: lax.scan(layer, *given, reverse=reverse), [X, PARAMS["a"]], [True] * 2
    )
    (stack,) = find_stacks(graph, 0, Differentiated.of(graph, 0))
    w = jnp.arange(LAYERS * WIDTH, dtype=jnp.float32).reshape(LAYERS, WIDTH)
    doubled = lambda x, w: layer(x, 2 * w)  # noqa: E731
    out = stack.run([X, w], doubled, segment)
    jax.tree.map(np.testing.assert_array_equal, out, [*lax.scan(doubled, X, w, reverse=reverse)])
