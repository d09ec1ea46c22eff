"""Stages 1, 2: the backward pass of a wrapped layer reduces the gradients of its parameters."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from sharding.plan.audit._program_collectives import collectives

from ...tiers import slow
from .. import model

LAYERS, WIDTH, VOCAB, STEPS = 3, 16, 24, 4
SHAPES = {
    "embed": (VOCAB, WIDTH),  # tied: used outside of layers
    "stack": (LAYERS, WIDTH, 32),
    "down": (LAYERS, 32, WIDTH),
    "nested": (2, 2, WIDTH, 8),  # a loop over layers in another one
    "single": (WIDTH, 40),  # a layer that is not in a loop
    "shared": (WIDTH, WIDTH),  # of a layer that is called twice, and perhaps computed again
    "looped": (WIDTH, WIDTH),  # of a layer that a loop repeats
    "branch": (WIDTH, WIDTH),  # of a layer in a branch
    "by_layer": (8, 7, 9),  # sharded along the dim that the loop slices off
    "frozen": (LAYERS, WIDTH, WIDTH),
    "bias": (LAYERS, WIDTH),
}
# Reduced in the backward pass, and how often.
ONCE = {"stack": LAYERS, "down": LAYERS, "bias": LAYERS, "nested": 4, "single": 1}


def loss_per_example(params, batch, layer=lambda fn: fn, remat=False):
    """Gradients have full rank; each example has another scale."""
    wrap = lambda fn: jax.checkpoint(layer(fn)) if remat else layer(fn)  # noqa: E731
    dense = wrap(lambda p, x: x + jnp.tanh(x @ p["w"]))

    def block(p, x):
        y = jnp.tanh(x @ p["stack"] + 0.1) @ p["down"] + p["bias"][None]
        return jnp.sin(x + y) + x @ p["frozen"]

    x = params["embed"][batch["ids"]]
    jnp.sum(params["stack"])  # which no output needs
    stacks = {k: params[k] for k in ("stack", "down", "bias", "frozen")}
    x, _ = jax.lax.scan(lambda x, p: (wrap(block)(p, x), None), x, stacks)
    narrow = wrap(lambda p, x: x + jnp.tanh(x @ p) @ p.T)
    inner = lambda x, p: jax.lax.scan(lambda x, p: (narrow(p, x), None), x, p)  # noqa: E731
    x, _ = jax.lax.scan(inner, x, params["nested"])
    x = x + wrap(lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"].T)({"w": params["single"]}, x)
    for _ in range(2):
        x = dense({"w": params["shared"]}, x)
    x, _ = jax.lax.scan(lambda x, _: (dense({"w": params["looped"]}, x), None), x, length=2)
    branches = (lambda x: x, lambda x: dense({"w": params["branch"]}, x))
    x = jax.lax.cond(params["frozen"][0, 0, 0] < 100, *branches, x)
    small = wrap(lambda p, x: x.at[:, :7].add(jnp.tanh(x[:, :9] @ p.T)))
    x, _ = jax.lax.scan(lambda x, p: (small(p, x), None), x, params["by_layer"])
    logits = x @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"]) * batch["scale"]


def batch(step, size=48):
    rng = np.random.default_rng(step)
    ids = rng.integers(0, VOCAB, (2, size))
    return {"ids": ids[0], "next": ids[1], "scale": 10.0 ** rng.uniform(-2, 1, size)}


def initial():
    rng = np.random.default_rng(0)
    return {k: rng.normal(size=s) / s[-1] ** 0.5 for k, s in SHAPES.items()}


# Sums over all gradients: their shards of the parameters are taken before the update.
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
MAKE = model.make_of(initial, TX)
TRAINED = {k: k != "frozen" for k in SHAPES}


@functools.cache
def reference():
    def loss(params, batch):
        fixed = {k: x if TRAINED[k] else jax.lax.stop_gradient(x) for k, x in params.items()}
        return jnp.mean(loss_per_example(fixed, batch))

    tx = optax.chain(TX, optax.masked(optax.set_to_zero(), {k: not t for k, t in TRAINED.items()}))
    return model.alone(model.make_of(initial, tx), tx, loss, batch, STEPS)[0][0]


@pytest.mark.usefixtures("x64", "scopes_in_cache_key")
@pytest.mark.parametrize(
    ("stage", "num", "kind", "microbatches", "remat"),
    [slow((1, 8, AxisType.Auto, 1, False)), (2, 4, AxisType.Explicit, 2, True)],
)
def test_each_layer_is_reduced_by_itself_and_each_parameter_once(
    stage, num, kind, microbatches, remat
):
    zero = model.zero_on(num, kind=kind, stage=stage)
    options = {"trainable": TRAINED, "microbatches": microbatches}

    def loss_fn(params, batch):
        return jnp.mean(loss_per_example(params, batch, zero.gathered, remat))

    program = model.lowered(zero, MAKE, TX, loss_fn, batch(0), **options).compile()
    state = zero.init(MAKE, tx=TX)
    for i in range(STEPS):
        state, _ = program(state, zero.put(batch(i)), None, None)
    model.assert_close(state[0], reference(), 1e-11)

    found = [c for c in collectives(program) if c.op == "reduce-scatter"]
    in_backward = [c for c in found if "transpose(" in c.scope]
    # In loops the arrays of one layer, as often as there are layers.
    in_layers = ONCE | ({} if remat else {"shared": 1})
    sizes = {k: math.prod(SHAPES[k]) // n for k, n in in_layers.items()}
    once = sum(n * sizes[k] for k, n in in_layers.items())
    assert sum(c.runs * c.elements for c in in_backward) == microbatches * once
    assert max(c.elements for c in in_backward) == max(sizes.values())
    # Every other sharded and trained parameter is reduced after the backward pass, once.
    other = sum(math.prod(SHAPES[k]) for k in SHAPES if k not in in_layers and TRAINED[k])
    after = [c for c in found if c not in in_backward]
    assert sum(c.runs * c.elements for c in after) == microbatches * other


def stack_loss(wrap, params, batch):
    layer = wrap(lambda p, x: jnp.tanh(x @ p["up"]) @ p["frozen"] @ p["down"])
    x, _ = jax.lax.scan(lambda x, p: (layer(p, x), None), batch, params)
    return jnp.mean(x**2)


def compiled_stack(zero, tx, loss, layers=4, width=16, hidden=32):
    shapes = {"up": (layers, width, hidden), "frozen": (layers, hidden, hidden)}
    shapes["down"] = (layers, hidden, width)
    make = model.make_of(lambda: {k: np.ones(s, np.float32) for k, s in shapes.items()}, tx)
    trained = {"up": True, "frozen": False, "down": True}
    x = np.ones((8, width), np.float32)
    return model.lowered(zero, make, tx, loss, x, trainable=trained).compile()


def test_unreduced_gradients_of_layers_are_never_together_in_memory():
    """Nor a second copy of parameters that are in the layers, and not trained."""

    # The gradients are 16 layers of 128 KiB. (XLA transposes half of the parameters in advance.)
    zero = model.zero_on(8)
    for wrap in (zero.gathered, lambda fn: fn):
        loss = functools.partial(stack_loss, wrap)
        program = compiled_stack(zero, optax.sgd(0.1), loss, 16, 64, 256)
        assert program.memory_analysis().temp_size_in_bytes < 9 * 2**17


def test_a_stack_split_into_loops_within_loops_is_gathered_layer_by_layer():
    zero = model.zero_on(8, stage=3)

    def loss(params, x):
        split = jax.tree.map(lambda w: w.reshape(2, 2, *w.shape[1:]), params)
        outer = lambda total, p: (total + stack_loss(zero.gathered, p, x), None)  # noqa: E731
        return jax.lax.scan(outer, 0.0, split)[0]

    found = collectives(compiled_stack(zero, optax.sgd(0.1), loss))
    assert {c.elements for c in found if c.op == "all-gather"} == {16 * 32, 32 * 32}


def dense(w, x):
    return jnp.sum(jnp.tanh(x @ w), -1)


def squared_gradient(p, x, gather):
    grads = jax.grad(lambda p: jnp.sum(product(p, x, gather)))(p)
    return sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))


def product(p, x, gather):
    return dense(gather(p["a"]), x) * dense(gather(p["b"]), x)


def total(weights, x, gather):
    return sum((dense(gather(w), x) for w in weights), 0.0 * x[:, 0])


READERS = {
    "leaves": lambda p, x, gather: total(jax.tree.leaves(p), x, gather),
    "size": lambda p, x, gather: (
        total(p.values(), x, gather) / sum(w.size for w in jax.tree.leaves(p))
    ),
    "arrays alone": lambda p, x, gather: total(
        [w for w in p.values() if isinstance(w, jax.Array)], x, gather
    ),
    "bytes": lambda p, x, gather: product(p, x, gather) / p["a"].nbytes,
    "gradient": lambda p, x, gather: jax.vmap(lambda x: squared_gradient(p, x[None], gather))(x),
}


@pytest.mark.usefixtures("x64")
def test_losses_that_need_arrays_get_arrays():
    rng = np.random.default_rng(0)
    params = {k: rng.normal(size=(16, 16)) / 4 for k in "ab"}
    x, zero = rng.normal(size=(8, 16)), model.zero_on(8)

    @jax.jit
    def expected(params, x):
        def loss(params, name):
            return jnp.mean(READERS[name](params, x, lambda w: w))

        return {name: jax.grad(loss)(params, name) for name in READERS}

    @jax.jit
    def found(params, x):
        def loss(name):
            return lambda p, x: jnp.mean(READERS[name](p, x, zero.gather))

        return {name: zero.value_and_grad(loss(name))(params, x)[1] for name in READERS}

    wanted = expected(params, x)
    for name, grads in found(params, x).items():
        for k, g in grads.items():
            np.testing.assert_allclose(g, wanted[name][k], rtol=1e-10, atol=1e-13, err_msg=name)
