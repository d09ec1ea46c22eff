"""Layers are found in losses of any form, and get their parameters through the hook."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from sharding.loss._evaluate import MOVES, Evaluator, Param, is_cast
from sharding.loss._marks import marking
from sharding.step._gather_and_reduce import gather

from .. import model

pytestmark = pytest.mark.usefixtures("x64")
D, L = 6, 4


def layer(x, w):
    return x + jnp.tanh(x @ w["a"]) @ w["b"], jnp.sum(x)


def stack(p, x, wrap=lambda fn: fn, layers=None, **options):
    return lax.scan(wrap(layer), x, layers or {k: p[k] for k in "ab"}, **options)


def tied(p, x):
    return stack(p, x @ p["c"], jax.checkpoint)[0] @ p["c"].T


def cast_before(p, x):
    return stack(p, x, layers={k: p[k].astype(jnp.float32) for k in "ab"})[0]


def transposed(p, x):
    return lax.scan(
        lambda x, w: (jnp.tanh(w["a"].T @ x.T).T @ w["b"], None), x, {k: p[k] for k in "ab"}
    )[0]


def nested(p, x):
    split = jax.tree.map(lambda w: w.reshape(2, L // 2, D, D), {k: p[k] for k in "ab"})
    return lax.scan(lambda x, w: (stack(p, x, layers=w)[0], None), x, split)[0]


def numbered(p, x):
    for i in range(L):
        x = jax.checkpoint(lambda w, x: layer(x, gather(w))[0])({k: p[k][i] for k in "ab"}, x)
    return x


def each_marked(p, x):
    layers = {k: p[k] for k in "ab"}
    return lax.scan(lambda x, w: layer(x @ gather(p["c"]), gather(w)), x, layers)[0] @ p["c"]


def derivative(p, x):
    jax.debug.callback(lambda w: None, p["c"])
    return jax.grad(lambda x: jnp.sum(stack(p, x)[0] ** 2))(x)


@jax.custom_jvp
def own_rule(w, x):
    return x @ gather(w)


@own_rule.defjvp
def _(primals, tangents):
    return own_rule(*primals), 2 * (tangents[1] @ primals[0] + primals[1] @ tangents[0])


def shared(p, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w @ p["c"]), None), x, p["a"])[0] @ p["b"][0]


def in_functions(p, x):
    x = jax.jit(lambda p, x: stack(p, x, reverse=True)[0])(p, x)
    return lax.cond(x[0, 0] > 0, lambda c: x @ c, lambda c: x - x @ c, p["c"])


class Rule:
    """Of a parameter of which half is held: the gradient of a tap is three times that of the half.

    Casts come before it is fetched; loops get slices of what is not moved.
    """

    def __init__(self, by_use=True):
        self.by_use, self.again, self.fetched = by_use, False, []

    def fetch(self, held):
        self.fetched.append(held.ndim)
        return jnp.concatenate([held, 2 * held], -1)

    def reduce(self, grad, tap):
        return 3 * grad[..., : D // 2].astype(tap.dtype)

    def view(self, x, eqn, rest):
        if is_cast(eqn) and not x.moves:
            return [x.of_held(x.held.astype(eqn.params["new_dtype"]), x.tap)]
        return [x.moved_by(eqn)] if eqn.primitive.name in MOVES and not rest else None

    def stack(self, x):
        return None if x.moves else x

    def layer(self, x):
        return x


def params_of(rules, held, taps):
    return [Param(i, *of, {}) for i, of in enumerate(zip(rules, held, taps, strict=True))]


# The loss, and the numbers of dims with which its parameters a, b and c are fetched.
LOSSES = [
    (lambda p, x: stack(p, x)[0], {"a": 2, "b": 2}),
    (lambda p, x: sum(map(jnp.sum, stack(p, x, jax.checkpoint, unroll=2))), {"a": 2, "b": 2}),
    (tied, {"a": 2, "b": 2, "c": 2}),
    (cast_before, {"a": 2, "b": 2}),
    (transposed, {"a": 2, "b": 2}),
    (nested, {"a": 3, "b": 3}),  # reshaped before the loop: as a whole
    (numbered, {"a": 3, "b": 3}),
    (each_marked, {"a": 2, "b": 2, "c": 2}),
    (derivative, {"a": 2, "b": 2, "c": 2}),
    (lambda p, x: own_rule(p["c"], x), {"c": 2}),
    (lambda p, x: (x @ p["c"].astype(complex)).real @ p["c"], {"c": 2}),
    (shared, {"a": 2, "b": 3, "c": 2}),
    (in_functions, {"a": 2, "b": 2, "c": 2}),
    (lambda p, x: jax.nn.relu(x) @ p["c"] + jnp.sum(lax.stop_gradient(p["a"])), {"a": 3, "c": 2}),
]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("fn", "expected"), LOSSES, ids=lambda x: getattr(x, "__name__", ""))
def test_values_and_gradients_by_rules(fn, expected, recompute):
    rng, names = np.random.default_rng(0), "abc"
    full = {"a": (L, D, D), "b": (L, D, D), "c": (D, D)}
    full = {k: jnp.asarray(rng.normal(size=shape) / D) for k, shape in full.items()}
    x = jnp.asarray(rng.normal(size=(3, D)))
    loss = lambda p, x: jnp.sum(fn(p, x) ** 2)  # noqa: E731
    held = [full[k][..., : D // 2] for k in names]
    full = {k: jnp.concatenate([x, 2 * x], -1) for k, x in zip(names, held, strict=True)}
    with marking():
        closed = jax.make_jaxpr(lambda leaves, x: loss(dict(zip(names, leaves, strict=True)), x))(
            list(full.values()), x
        )
    rules = [Rule(name == "c") for name in names]
    taps = [jnp.zeros_like(x) for x in held]
    grad = jax.value_and_grad(
        lambda taps: Evaluator(recompute)(closed, [*params_of(rules, held, taps), x])[0]
    )
    value, grads = jax.jit(grad)(taps)
    fetched = {k: rule.fetched[-1] for k, rule in zip(names, rules, strict=True) if rule.fetched}
    assert fetched == expected
    expected_value, expected_grads = jax.value_and_grad(loss)(full, x)
    model.assert_close(value, expected_value, 1e-12)
    thrice = [3 * g[..., : D // 2] for g in expected_grads.values()]
    model.assert_close(grads, thrice, 1e-6 if fn is cast_before else 1e-12)
    stores = fn in (each_marked, derivative)
    if recompute and set(expected.values()) == {2} and "a" in expected and not stores:
        loops = [e for e in jax.make_jaxpr(grad)(taps).jaxpr.eqns if e.primitive.name == "scan"]
        assert loops
        stored = {v.aval.shape for loop in loops for v in loop.outvars}
        assert not any(len(shape) == 3 and shape[1:] == (D, D) for shape in stored)


@pytest.mark.parametrize("by_use", [False, True])
def test_a_value_that_several_uses_share_is_fetched_once(by_use):
    closed = jax.make_jaxpr(lambda p, x: jax.jit(jnp.dot)(x, p) @ p.T + p[0])(
        jnp.ones((D, D)), jnp.ones(D)
    )
    rule, held = Rule(by_use), [jnp.ones((D, D // 2))]

    def run(taps):
        return jnp.sum(Evaluator(True)(closed, [*params_of([rule], held, taps), jnp.ones(D)])[0])

    program = jax.make_jaxpr(jax.grad(run))(held)
    assert rule.fetched == [2]
    # The three uses have one gradient, which is reduced, or one each.
    reduced = [e for e in program.jaxpr.eqns if e.outvars[0].aval.shape == (D, D // 2)]
    assert len([e for e in reduced if e.primitive.name == "mul"]) == (3 if by_use else 1) + 1
