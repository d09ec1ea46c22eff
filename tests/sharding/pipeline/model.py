"""A small residual model of tokens in plain JAX, and its training on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_ext
import sharding as shd

# For the tests beside.
from ..model import alone, assert_close, lowered, make_of, mesh_of, run  # noqa: F401

NUM_LAYERS, VOCAB, WIDTH, HEADS, LENGTH, BATCH = 8, 31, 24, 4, 6, 48
STEPS = 3

STACKED = optax_ext.by_path({"layers": optax_ext.Factoring(batch=(0,))}, default=None)
RULE = optax_ext.flax_transformer()


def muon():
    """Muon for the layers' matrices, each on one device of the data axis; AdamW for the others."""
    matrices = shd.by_owner(optax.contrib.muon(3e-4), factoring=RULE)
    others = optax.adamw(1e-4)
    return optax.partition({True: matrices, False: others}, optax_ext.hidden_matrices)


# For the stacked model. Learning rates at which training is calm: chaos would grow rounding by
# powers of ten a step.
OPTIMIZERS = {
    "sgd": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9)),
    "adamw": lambda: optax.adamw(1e-3, mask=optax_ext.decay_mask, weight_decay=0.1),
    "came": lambda: optax_ext.came(3e-5, weight_decay=0.1, factoring=RULE),
    "lamb": lambda: optax_ext.lamb(1e-3, stacked=STACKED),
    "muon": muon,
}
OF_A_LAYER = OPTIMIZERS | {"lamb": lambda: optax_ext.lamb(1e-3)}


def init_params(variant, layers=NUM_LAYERS):
    """The model's own parameters; NumPy draws."""
    rng = np.random.default_rng(0)

    def draw(*shape, mean=0.0):
        return rng.normal(mean, 0.4 * WIDTH**-0.5 if len(shape) > 1 else 0.1, shape)

    def layer():
        return {
            "up": {"kernel": draw(WIDTH, WIDTH)},
            "query": {"kernel": draw(WIDTH, HEADS, 8), "bias": draw(HEADS, 8)},
            "out": {"kernel": draw(HEADS, 8, WIDTH)},
        }

    params = {"embed": {"embedding": 2.5 * draw(VOCAB, WIDTH)}}
    params["norm"] = {"scale": draw(WIDTH, mean=1.0)}
    if variant == "untied":
        params["head"] = {"kernel": draw(WIDTH, VOCAB)}
    return params | {f"block_{i}": layer() for i in range(layers)}


def drop(x, key):
    """Random scales for random masks, which take longer to compile."""
    if key is None:
        return x
    return x * (0.9 + (jax.random.key_data(key)[-1] % 32).astype(x.dtype) / 160)


def embed(shared, batch, key=None):
    return drop(shared["embed"]["embedding"][batch["tokens"][:, :-1]], key)


def block(layer, x, batch, key=None):
    """Reads the micro-batch, which must be the one of ``x``."""
    y = jnp.tanh(x @ layer["up"]["kernel"])
    q = jnp.einsum("bte,ehd->bthd", y, layer["query"]["kernel"])
    q = jnp.tanh(q + layer["query"]["bias"][None, None]) * batch["gain"]
    return x + drop(jnp.einsum("bthd,hde->bte", q, layer["out"]["kernel"]), key)


def head(shared, x, batch, key=None):
    y = drop(x, key) * shared["norm"]["scale"][None, None]
    kernel = shared["head"]["kernel"] if "head" in shared else shared["embed"]["embedding"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(y @ kernel, batch["tokens"][:, 1:])
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])


def batch(step):
    """Tokens, and weights of uneven scale: the first eighth of each half counts for nothing."""
    rng = np.random.default_rng(step)
    mask = np.repeat(10.0 ** rng.uniform(-1, 0.5, (BATCH, 1)), LENGTH - 1, axis=1)
    mask *= rng.random(mask.shape) < 0.7
    mask.reshape(2, 8, -1)[:, 0] = 0
    gain = rng.uniform(0.5, 2.0, (BATCH, 1, 1, 1))
    return {"tokens": rng.integers(0, VOCAB, (BATCH, LENGTH)), "mask": mask, "gain": gain}


def stack_layers(params):
    """The layers in one array each; a loop over them compiles in less time."""
    layers = [params[f"block_{i}"] for i in range(NUM_LAYERS)]
    rest = {name: x for name, x in params.items() if not name.startswith("block_")}
    return rest | {"layers": jax.tree.map(lambda *x: np.stack(x), *layers)}


def unstack_layers(params):
    params = jax.tree.map(np.asarray, params)
    layers = params.pop("layers")
    split = {f"block_{i}": jax.tree.map(lambda x, i=i: x[i], layers) for i in range(NUM_LAYERS)}
    return params | split


def loss_of_stacked(params, batch, key=None):
    """``(sum, weight)`` of a batch on one device.

    Keys are those that the pipeline documents: by micro-batch, then by layer; the embedding's and
    the head's come after those of the layers.
    """

    def keyed(i):
        return None if key is None else jax.random.fold_in(key, i)

    def layer(x, indexed):
        i, of_layer = indexed
        return block(of_layer, x, batch, keyed(i)), None

    x = embed(params, batch, keyed(NUM_LAYERS))
    x, _ = jax.lax.scan(layer, x, (jnp.arange(NUM_LAYERS), params["layers"]))
    return head(params, x, batch, keyed(NUM_LAYERS + 1))


def step_key(step):
    return jax.random.fold_in(jax.random.key(7), step)


def parts_of(params):
    """The layers, and the shared parameters."""
    return {"block_0": params["layers"]}, {k: x for k, x in params.items() if k != "layers"}


class PerLayer:
    """An optimizer that sees the model unstacked: by ``vmap``, each layer alone."""

    def __init__(self, tx):
        self.tx = tx

    def init(self, params):
        layers, shared = parts_of(params)
        return jax.vmap(self.tx.init)(layers), self.tx.init(shared)

    def update(self, grads, state, params):
        (layers, shared), (own, others) = parts_of(grads), parts_of(params)
        layers, first = jax.vmap(self.tx.update)(layers, state[0], own)
        shared, second = self.tx.update(shared, state[1], others)
        return {"layers": layers["block_0"]} | shared, (first, second)


@functools.cache
def step_alone(name, variant, num_shards, microbatches):
    """An optimizer, and a step of plain JAX and optax on one device.

    Only random masks depend on the data shards and micro-batches.
    """
    tx = OF_A_LAYER[name]()
    tx = tx if name == "sgd" else PerLayer(tx)  # of sgd the norm is that of all gradients

    def total(params, batch, key):
        if variant != "dropout":
            return loss_of_stacked(params, batch)
        count = num_shards * microbatches
        pieces = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
        keys = [
            jax.random.fold_in(jax.random.fold_in(key, i // microbatches), i % microbatches)
            for i in range(count)
        ]
        sums, weights = jax.vmap(loss_of_stacked, (None, 0, 0))(params, pieces, jnp.stack(keys))
        return jnp.sum(sums), jnp.sum(weights)

    @jax.jit
    def step(params, opt_state, batch, key, trained):
        (loss, weight), grads = jax.value_and_grad(total, has_aux=True)(params, batch, key)
        grads = jax.tree.map(lambda g, t: g * t / weight, grads, trained)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss / weight

    return tx, step


@functools.cache
def train_alone(name, variant, num_shards=1, microbatches=1, trainable=None):
    """The reference's parameters and losses; ``trainable`` is a key of layers, None trains all."""
    tx, step = step_alone(name, variant, num_shards, microbatches)
    params = jax.tree.map(jnp.asarray, stack_layers(init_params(variant)))
    trained = jax.tree.map(lambda _: trainable is None, params)
    if trainable:
        trained["layers"][trainable] = jax.tree.map(lambda _: True, params["layers"][trainable])
    opt_state, losses = jax.jit(tx.init)(params), []
    for i in range(STEPS):
        params, opt_state, loss = step(params, opt_state, batch(i), step_key(i), trained)
        losses.append(float(loss))
    return unstack_layers(params), losses


def pipeline(mesh, schedule, variant="tied", **options):
    """The same model on a pipeline."""
    options = {"num_layers": NUM_LAYERS, "rngs": variant == "dropout", "head": head} | options
    return shd.Pipeline(mesh, schedule, embed=embed, block=block, numbered="block_{}", **options)


def make_state(pipe, variant, tx):
    return make_of(lambda: pipe.stack(init_params(variant)), tx)()


def linear_embed(shared, batch, key=None):
    return drop(batch["x"] @ shared["in"], key)


def squared_head(shared, h, batch, key=None):
    error = h @ shared["out"] - batch["y"]
    return jnp.sum(batch["weight"] * jnp.sum(error**2, 1)), jnp.sum(batch["weight"])


def chain(mesh, schedule, **options):
    """Four layers ``x @ w``; the loss is the sum of what they give."""
    options = {
        "num_layers": 4,
        "embed": lambda shared, x: x,
        "block": lambda w, x, _: x @ w,
        "head": lambda shared, x, _: (jnp.sum(x), jnp.asarray(1.0)),
    } | options
    return shd.Pipeline(mesh, schedule, **options)
