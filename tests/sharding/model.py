"""A small transformer with odd shapes in plain JAX, data of uneven scale, and its optimizers.

No leaf has a true gradient of zero (so no bias of attention keys): there a sharded and an unsharded
run would differ by nothing but rounding noise.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

import sharding as shd
from optax_ext import adafactor, came, last_two_dims

VOCAB, WIDTH, HEADS, LENGTH, BATCH = 61, 40, 5, 6, 16

# Learning rates at which training is calm: chaos would grow rounding by powers of ten a step.
OPTIMIZERS = {
    "came": lambda: optax.chain(optax.clip_by_global_norm(0.5), came(3e-5, weight_decay=0.1)),
    "adafactor": lambda: adafactor(1e-3, momentum=0.9, factoring=last_two_dims()),
    "adamw": lambda: optax.adamw(1e-3),
}


def init_params(dtype):
    """Each shape is here for a reason. NumPy draws: random bits of jax compile slowly."""
    shapes = {
        "embed": (VOCAB, WIDTH),  # first dim odd
        "scale": (WIDTH,),  # a vector
        "query": (WIDTH, HEADS, 8),  # attention kernels: three dims
        "value": (WIDTH, HEADS, 8),
        "out": (HEADS, 8, WIDTH),
        "mlp": (2, WIDTH, 24),  # stacked: two branches
        "mlp_bias": (2, 24),
        "down": (48, WIDTH),
        "narrow": (WIDTH, 1),  # a dim of one
        "odd": (WIDTH, 7),  # only one dim divides
        "prime": (7, 13),  # nothing divides
        "unembed": (13, VOCAB),
        "gain": (),  # a scalar
    }
    rng = np.random.default_rng(0)
    params = {
        name: rng.normal(1.0 if len(shape) < 2 else 0.0, (shape or (1,))[0] ** -0.5, shape)
        for name, shape in shapes.items()
    }
    return {name: jnp.asarray(value, dtype) for name, value in params.items()}


def attention(params, x):
    q = jnp.einsum("bte,ehd->bthd", x, params["query"])
    v = jnp.einsum("bte,ehd->bthd", x, params["value"])
    logits = jnp.einsum("bthd,bshd->bhts", q, jnp.roll(q, 1, axis=-1))
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(mask[None, None], logits, -1e30))
    return x + jnp.einsum("bhts,bshd,hde->bte", weights, v, params["out"])


def mlp(params, x):
    h = jnp.tanh(jnp.einsum("bte,nef->btnf", x, params["mlp"]) + params["mlp_bias"][None, None])
    x = x + h.reshape(*h.shape[:2], -1) @ params["down"]
    return x + jnp.tanh(x @ params["narrow"])


def loss_per_example(params, batch, layer=lambda fn: fn):
    """Cross entropy of the next token, times the weight of the example.

    ``layer`` wraps the functions that are layers; the second is called twice, with the same
    parameters.
    """
    tokens = batch["tokens"]
    x = params["embed"][tokens[:, :-1]] * params["scale"][None, None]
    x = layer(attention)({name: params[name] for name in ("query", "value", "out")}, x)
    for _ in range(2):
        x = layer(mlp)({k: params[k] for k in ("mlp", "mlp_bias", "down", "narrow")}, x)
    y = jnp.tanh(x @ params["odd"]) @ params["prime"] @ params["unembed"] * params["gain"]
    losses = optax.softmax_cross_entropy_with_integer_labels(y, tokens[:, 1:])
    return losses.mean(axis=1) * batch["weight"].astype(y.dtype)


def make_loss(zero):
    """The mean over the batch; at stage 3 layers gather their parameters."""

    def loss_fn(params, batch):
        return loss_per_example(params, batch, zero.gathered).mean()

    return loss_fn


def loss_fn(params, batch):
    """The mean over the batch, of a model that knows nothing of stages."""
    return loss_per_example(params, batch).mean()


def batch(step, size=BATCH):
    """A batch whose eighths differ in scale by up to 1000, as uneven shards of real data do."""
    rng = np.random.default_rng(step)
    return {
        "tokens": rng.integers(0, VOCAB, (size, LENGTH)),
        "weight": np.repeat(10.0 ** rng.uniform(-2, 1, 8), size // 8),
    }


def make_state(tx, dtype):
    return make_of(lambda: init_params(dtype), tx)


def train_alone(tx, dtype, steps):
    return alone(make_state(tx, dtype), tx, loss_fn, batch, steps)


def mesh_of(kind=AxisType.Auto, **axes):
    shape = tuple(axes.values())
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, tuple(axes), axis_types=(kind,) * len(axes), devices=devices)


def zero_on(*shape, names=("data",), kind=AxisType.Auto, **options):
    """With ``view`` its losses run per device, or partitioned, whatever is proven of them."""
    mesh = mesh_of(kind, **dict(zip(names, shape, strict=True)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return shd.Zero(mesh, **({"min_shard_size": 0} | options))


def make_of(make_params, tx):
    """A function that makes (params, opt_state), from one that makes parameters."""

    def make():
        params = jax.tree.map(jnp.asarray, make_params())
        return params, tx.init(params)

    return make


def gradients(shapes, step, dtype=np.float64):
    """A batch of ``linear_loss``: of full rank, and in each example of another size."""
    rng = np.random.default_rng(100 + step)
    size = 10.0 ** rng.uniform(-2, 1, 8)
    drawn = {k: rng.normal(size=(8, *s)) for k, s in shapes.items()}
    return {k: (x.T * size).T.astype(dtype) for k, x in drawn.items()}


def linear_loss(params, batch):
    """Its gradients are the batch, and do not depend on how parameters are rounded."""
    one_each = jax.tree.map(lambda p, b: jnp.sum(b * p[None], range(1, b.ndim)), params, batch)
    return sum(map(jnp.mean, jax.tree.leaves(one_each)))


def regression_batch(outputs):
    rng = np.random.default_rng(0)
    return {k: rng.normal(size=(16, n)).astype(np.float32) for k, n in (("x", 8), ("y", outputs))}


def residual(params, batch):
    return batch["x"] @ params["w"] + params["b"][None] - batch["y"]


def mean_loss(params, batch):
    return (residual(params, batch) ** 2).mean()


def microbatches_of(batch, devices, count):
    """Micro-batch j of the mesh: the j-th parts of all devices' shards."""

    def split(x):
        parts = x.reshape(devices, count, -1, *x.shape[1:]).swapaxes(0, 1)
        return parts.reshape(count, -1, *x.shape[1:])

    parts = jax.tree.map(split, batch)
    return [jax.tree.map(lambda x, i=i: x[i], parts) for i in range(count)]


def run(zero, make, tx, loss_fn, batch, steps, param_specs=None, **options):
    state = zero.init(make, tx=tx, param_specs=param_specs)
    step = zero.train_step(loss_fn, tx=tx, **options)
    for i in range(steps):
        state, _ = step(state, zero.put(batch(i)))
    return state


def alone(make, tx, loss_fn, batch, steps):
    """The state and the losses of plain jax and optax on one device."""

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        update = optax.with_extra_args_support(tx).update
        updates, opt_state = update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    (params, opt_state), losses = jax.jit(make)(), []
    for i in range(steps):
        params, opt_state, loss = step(params, opt_state, batch(i))
        losses.append(float(loss))
    return (params, opt_state), losses


def lowered(zero, make, tx, loss_fn, batch, param_specs=None, **options):
    state = zero.abstract_state(make, tx=tx, param_specs=param_specs)
    types = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, batch))
    return zero.train_step(loss_fn, tx=tx, **options).lower(state, types)


def assert_close(have, want, tolerance):
    """Leaf by leaf, as a part of the leaf's norm."""
    distance, leaf = worst_leaf(have, want)
    assert distance < tolerance, leaf


def assert_codes_close(have, want, others, rtol):
    """Of low-precision state: less than a part of ``others`` may be other codes."""
    for (path, a), b in zip(jax.tree.leaves_with_path(have), jax.tree.leaves(want), strict=True):
        name = jax.tree_util.keystr(path)
        assert a.shape == b.shape, name
        if a.dtype == np.uint8:  # a sum in another order may be across the middle of two codes
            assert np.mean(a != b) < others, name
        else:
            np.testing.assert_allclose(a, b, rtol=rtol, err_msg=name)


def worst_leaf(state, reference):
    """The largest difference of any leaf, as a part of the leaf's norm, and which leaf it is."""

    def distance(path, a, b):
        dtype = np.result_type(np.float64, *(np.complex64 for x in (a, b) if np.iscomplexobj(x)))
        a, b = np.asarray(a, dtype), np.asarray(b, dtype)
        assert a.shape == b.shape
        worst.append((np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-300), path))

    worst = []
    jax.tree_util.tree_map_with_path(distance, state, reference)
    size, path = max(worst, key=lambda pair: np.nan_to_num(pair[0], nan=np.inf))
    return size, jax.tree_util.keystr(path)
