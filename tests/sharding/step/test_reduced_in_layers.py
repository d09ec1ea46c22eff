"""Stage 2: the backward pass of a wrapped layer reduces the gradients of its parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import optax_ext
import sharding as shd
from sharding import sync
from sharding.plan.program._wire import collectives

from .. import model

LAYERS, WIDTH, VOCAB, STEPS = 3, 16, 24, 6
SHAPES = {
    "embed": (VOCAB, WIDTH),  # tied: used outside of layers
    "stack": (LAYERS, WIDTH, 32),
    "down": (LAYERS, 32, WIDTH),
    "nested": (2, 2, WIDTH, 8),  # a loop over layers in another one
    "single": (WIDTH, 40),  # a layer that is not in a loop
    "shared": (WIDTH, WIDTH),  # of a layer that is called twice
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
    x = jax.lax.cond(batch["scale"][0] > 0, *branches, x)
    small = wrap(lambda p, x: x.at[:, :7].add(jnp.tanh(x[:, :9] @ p.T)))
    x, _ = jax.lax.scan(lambda x, p: (small(p, x), None), x, params["by_layer"])
    logits = x @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"]) * batch["scale"]


def batch(step, size=48):
    rng = np.random.default_rng(step)
    ids = rng.integers(0, VOCAB, (2, size))
    return {"ids": ids[0], "next": ids[1], "scale": 10.0 ** rng.uniform(-2, 1, size)}


def make_state(tx):
    def make():
        rng = np.random.default_rng(0)
        draw = lambda s: jnp.asarray(rng.normal(size=s) / s[-1] ** 0.5)  # noqa: E731
        params = {k: draw(s) for k, s in SHAPES.items()}
        return params, tx.init(params)

    return make


OPTIMIZERS = {
    "came": lambda: optax_ext.came(1e-3, factoring=optax_ext.last_two_dims(batch=(0,))),
    "adamw": lambda: optax.adamw(1e-2),
}
TRAINED = {k: k != "frozen" for k in SHAPES}


@functools.cache
def reference(name):
    tx = OPTIMIZERS[name]()
    state = jax.jit(make_state(tx))()

    @jax.jit
    def step(state, batch):
        params, opt_state = state
        grads = jax.grad(lambda p: jnp.mean(loss_per_example(p, batch)))(params)
        grads = {k: g if TRAINED[k] else jnp.zeros_like(g) for k, g in grads.items()}
        updates, opt_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates)
        return {k: new[k] if TRAINED[k] else params[k] for k in new}, opt_state

    for i in range(STEPS):
        state = step(state, batch(i))
    return jax.device_get(state[0])


MESHES = {
    "flat": ((8,), ("data",), AxisType.Auto, {}),
    "torus": ((2, 4), ("x", "y"), AxisType.Auto, {"axis": ("x", "y")}),
    "explicit": ((4,), ("data",), AxisType.Explicit, {}),
    "replicas": ((2, 4), ("replica", "data"), AxisType.Auto, {"replica_axis": "replica"}),
    "tensor parallel": ((4, 2), ("data", "model"), AxisType.Auto, {}),
}


def zero_on(mesh, **options):
    shape, names, kind, more = MESHES[mesh]
    devices = jax.devices()[: int(np.prod(shape))]
    made = jax.make_mesh(shape, names, axis_types=(kind,) * len(names), devices=devices)
    return shd.Zero(made, **({"stage": 2, "axis": "data", "min_shard_size": 0} | more | options))


def train_step(zero, tx, loss=loss_per_example, **options):
    def loss_fn(params, batch):
        return jnp.mean(loss(params, batch, zero.gathered))

    return zero.train_step(loss_fn, tx=tx, trainable=TRAINED, **options)


@pytest.mark.slow(keep=2)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "mesh", "microbatches", "remat"),
    [
        ("came", "flat", 1, False),
        ("came", "flat", 3, True),
        ("adamw", "torus", 1, True),
        ("came", "explicit", 2, False),
        ("adamw", "replicas", 2, False),
        ("came", "tensor parallel", 1, True),
    ],
)
def test_equals_one_device(name, mesh, microbatches, remat):
    tx, zero = OPTIMIZERS[name](), zero_on(mesh)
    state = zero.init(make_state(tx), tx=tx)
    loss = functools.partial(loss_per_example, remat=remat)
    step = train_step(zero, tx, loss, microbatches=microbatches)
    for i in range(STEPS):
        state, _ = step(state, zero.put(batch(i)))
    distance, leaf = model.worst_leaf(jax.device_get(state[0]), reference(name))
    assert distance < 1e-11, leaf


def compiled_step(zero, loss=loss_per_example, microbatches=1):
    tx = optax.adamw(1e-2)
    state = zero.abstract_state(make_state(tx), tx=tx)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch(0))
    return train_step(zero, tx, loss, microbatches=microbatches).lower(state, shapes).compile()


@pytest.mark.usefixtures("x64", "scopes_in_cache_key")
def test_each_layer_is_reduced_by_itself_and_each_parameter_once():
    zero = zero_on("flat")
    program = compiled_step(zero)
    found = [c for c in collectives(program) if c.op == "reduce-scatter"]
    in_backward = [c for c in found if "transpose(" in c.scope]
    # In loops the arrays of one layer, as often as there are layers.
    sizes = {k: int(np.prod(SHAPES[k])) // n for k, n in ONCE.items()}
    assert sum(c.runs * c.elements for c in in_backward) == sum(
        n * sizes[k] for k, n in ONCE.items()
    )
    assert max(c.elements for c in in_backward) == max(sizes.values())
    # Every other sharded and trained parameter is reduced after the backward pass, once.
    other = [k for k in SHAPES if k not in ONCE and TRAINED[k]]
    after = [c for c in found if c not in in_backward]
    assert sum(c.runs * c.elements for c in after) == sum(int(np.prod(SHAPES[k])) for k in other)


@pytest.mark.usefixtures("x64")
def test_unreduced_gradients_of_layers_are_never_together_in_memory():
    """Nor a second copy of parameters that are in the layers, and not trained."""

    def loss(params, batch, layer):
        wide = layer(lambda p, x: jnp.tanh(x @ p["up"]) @ p["frozen"] @ p["down"])
        x, _ = jax.lax.scan(lambda x, p: (wide(p, x), None), batch, params)
        return jnp.mean(x**2)

    def temporaries(wrap):
        zero = zero_on("flat")
        params = {"up": (16, 64, 256), "frozen": (16, 256, 256), "down": (16, 256, 64)}
        trained = {"up": True, "frozen": False, "down": True}
        tx = optax.sgd(0.1)

        def make():
            made = {k: jnp.zeros(s) for k, s in params.items()}
            return made, tx.init(made)

        state = zero.abstract_state(make, tx=tx)
        fn = functools.partial(loss, layer=zero.gathered if wrap else lambda fn: fn)
        step = zero.train_step(fn, tx=tx, trainable=trained)
        lowered = step.lower(state, jax.ShapeDtypeStruct((8, 64), float))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    # The gradients are 16 layers of 256 KiB. (XLA transposes half of the parameters in advance.)
    assert temporaries(wrap=False) > 24 * 2**18
    assert temporaries(wrap=True) < 9 * 2**18


@pytest.mark.usefixtures("x64")
def test_a_loss_that_asks_for_arrays_gets_them():
    """Stage 2 worked for it before; its gradients are reduced after the backward pass."""

    def loss(params, batch, layer):
        if not all(isinstance(x, jax.Array) for x in params.values()):
            raise TypeError("the parameters are no arrays")
        return loss_per_example(params, batch, layer)

    tx, zero = OPTIMIZERS["came"](), zero_on("flat")
    state = zero.init(make_state(tx), tx=tx)
    step = train_step(zero, tx, loss)
    for i in range(STEPS):
        state, _ = step(state, zero.put(batch(i)))
    distance, leaf = model.worst_leaf(jax.device_get(state[0]), reference("came"))
    assert distance < 1e-11, leaf


@pytest.mark.usefixtures("x64", "scopes_in_cache_key")
@pytest.mark.parametrize("kind", ["a sync over the shards", "norms of local gradients"])
def test_what_takes_the_gradients_of_single_devices_gets_them(kind):
    tx = optax.adamw(1e-2)
    options = {}
    if kind == "a sync over the shards":
        options["sync"] = sync.qsgd(8)
    else:
        tx = optax.chain(optax_ext.gradient_noise_scale(48), tx)
    zero = zero_on("flat", **options)
    state = zero.abstract_state(make_state(tx), tx=tx)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch(0))
    program = train_step(zero, tx).lower(state, shapes).compile()
    assert not [c for c in collectives(program) if "transpose(" in c.scope and c.elements > 300]


def test_evaluation_reduces_nothing():
    zero = zero_on("flat")
    state = make_state(optax.sgd(0.1))()
    evaluate = zero.eval_step(functools.partial(loss_per_example, layer=zero.gathered))
    found = evaluate(zero.init(lambda: state, tx=optax.sgd(0.1)), zero.put(batch(0)))
    np.testing.assert_allclose(found, loss_per_example(state[0], batch(0)), rtol=1e-4)


# --- Losses that read more from their parameters than gather gives them ---------------------------


def dense(w, x):
    return jnp.sum(jnp.tanh(x @ w), -1)


def custom(w, x, gather):
    """A derivative by hand, of a function that gathers."""
    fn = jax.custom_vjp(lambda w, x: dense(gather(w), x))
    fn.defvjp(
        lambda w, x: (dense(gather(w), x), (gather(w), x)),
        lambda saved, g: jax.vjp(dense, *saved)[1](g),
    )
    return fn(w, x)


def squared_gradient(p, x, gather):
    grads = jax.grad(lambda p: jnp.sum(dense(gather(p["a"]), x) * dense(gather(p["b"]), x)))(p)
    return sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))


def of_one(w, x, gather):
    return jnp.tanh(jnp.sum(jnp.tanh(x @ gather(w)) ** 2))


def arrays(p):
    return [w for w in p.values() if isinstance(w, jax.Array)]


def only(condition):
    assert condition
    return 1.0


READERS = {
    "leaves": lambda p, x, gather: sum(dense(gather(w), x) for w in jax.tree.leaves(p)),
    "penalty": lambda p, x, gather: (
        sum(jnp.sum((gather(w) - 0.3) ** 2) for w in jax.tree.leaves(p)) + jnp.sum(x, -1)
    ),
    "one leaf": lambda p, x, gather: (
        dense(gather(jax.tree.leaves(p["a"])[-1]), x) * dense(gather(p["b"]), x)
    ),
    "size": lambda p, x, gather: (
        sum(dense(gather(w), x) for w in p.values()) / sum(w.size for w in jax.tree.leaves(p))
    ),
    "arrays alone": lambda p, x, gather: sum(
        [dense(gather(w), x) for w in arrays(p)], 0.0 * x[:, 0]
    ),
    "assertion": lambda p, x, gather: (
        dense(gather(p["a"]), x) * dense(gather(p["b"]), x) * only(len(arrays(p)) == 2)
    ),
    "bytes": lambda p, x, gather: (
        dense(gather(p["a"]), x) * dense(gather(p["b"]), x) / p["a"].nbytes
    ),
    "gradient": lambda p, x, gather: jax.vmap(lambda x: squared_gradient(p, x[None], gather))(x),
    "gathered gradient": lambda p, x, gather: (
        jax.vmap(lambda x: jnp.sum(gather(jax.grad(of_one)(p["a"], x, gather)) ** 2))(x)
        * dense(gather(p["b"]), x)
    ),
    "custom derivative": lambda p, x, gather: custom(p["a"], x, gather) * dense(gather(p["b"]), x),
}


@pytest.mark.slow(keep=3)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", READERS)
def test_a_loss_that_needs_arrays_gets_arrays(name):
    rng = np.random.default_rng(0)
    params = {k: jnp.asarray(rng.normal(size=(16, 16))) / 4 for k in "ab"}
    x = rng.normal(size=(8, 16))
    zero, loss = zero_on("flat"), READERS[name]
    expected = jax.grad(lambda p: jnp.mean(loss(p, jnp.asarray(x), lambda w: w)))(params)
    state = zero.init(lambda: (params, optax.sgd(1.0).init(params)), tx=optax.sgd(1.0))
    step = zero.train_step(lambda p, x: jnp.mean(loss(p, x, zero.gather)), tx=optax.sgd(1.0))
    (new, _), _ = step(state, zero.put(x))
    for k, before in params.items():
        np.testing.assert_allclose(before - new[k], expected[k], rtol=1e-10, atol=1e-13)
