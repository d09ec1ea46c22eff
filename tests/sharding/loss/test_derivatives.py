"""Which values of a loss are differentiated: those whose cotangent JAX does not know to be zero."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from optax_ext.traced_graph import Graph
from sharding.loss._derivatives import Differentiated, carried_derivatives, members


@jax.custom_jvp
def flat(x):
    return x * 1.0


flat.defjvp(lambda primals, tangents: (flat(*primals), jnp.zeros_like(tangents[0])))


@jax.custom_vjp
def first_alone(x, y):
    return x * y


first_alone.defvjp(lambda x, y: (x * y, y), lambda y, ct: (ct * y, None))

by_key = lambda x, y: lax.sort((x, y), num_keys=1)[1]  # noqa: E731
grown = lambda c: (c[0] + 1, c[1] * 2.0)  # noqa: E731
counted = lambda c: (c[0] + 1, c[1] + 1.0)  # noqa: E731
# Of x and y: by which the sum of a result is differentiated.
LOSSES = {
    "sum": (lambda x, y: x + y, "xy"),
    "stopped": (lambda x, y: x + lax.stop_gradient(y), "x"),
    "straight through": (lambda x, y: y + lax.stop_gradient(jnp.round(y) - y) + jnp.sign(x), "y"),
    "integers": (lambda x, y: y[jnp.argsort(x)], "y"),
    "sort": (by_key, "y"),
    "sort again": (jax.checkpoint(by_key), "y"),
    "sort in jit": (jax.jit(by_key), "y"),
    "bits": (lambda x, y: y * lax.bitcast_convert_type(x, jnp.float32), "y"),
    "own zero": (lambda x, y: flat(x) + y, "y"),
    "own None": (lambda x, y: first_alone(x, y), "x"),
    "cond": (lambda x, y: lax.cond(x[0] > 0, lambda x, y: y, lambda x, y: 2 * y, x, y), "y"),
    "scan": (lambda x, y: lax.scan(lambda c, _: (grown(c), c[1]), (x, y), None, 3)[1], "y"),
    "scan over": (lambda x, y: lax.scan(lambda c, s: (c + s, c), y[0], x)[1], "xy"),
    "while": (lambda x, y: lax.while_loop(lambda c: c[1] < 4, counted, (x, 0.0))[1] + y, "y"),
    "fori": (lambda x, y: lax.fori_loop(0, 3, lambda i, c: grown(c), (x, y))[1], "y"),
    "cumulative": (lambda x, y: jnp.linalg.cholesky(jnp.outer(x, x))[0] + lax.cummax(y), "xy"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_by_what_a_loss_is_differentiated(name):
    fn, expected = LOSSES[name]
    x = jnp.ones(3, jnp.float32)
    graph = Graph(lambda given: jnp.sum(fn(*given)), [x, x], [True] * 2, exact=True)
    found = Differentiated.of(graph, 0b11)
    assert "".join("xy"[i] for i in (0, 1) if i in found.values) == expected
    assert [*members(found.reads[graph.outputs[0]])] == [i for i in (0, 1) if "xy"[i] in expected]


def test_what_layers_carry():
    """A value that the loss reads through the one that another layer makes of it."""

    def layer(a, b, c, w):
        return a * w, b + a, c + b

    carried = carried_derivatives(jax.make_jaxpr(layer)(*[1.0] * 4).jaxpr, range(3), {3}, {1})
    assert carried == {0, 1}
