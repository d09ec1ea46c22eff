"""ZeRO stage 3 in plain JAX: a scanned stack of layers, bfloat16 compute, masked tokens.

Parameters are sharded over the devices. Each iteration of the scan gathers the parameters of one
layer in bfloat16, and the backward pass gathers them again: no device ever holds the full stack.

  python examples/scanned_stack.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_ext
import sharding as shd

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = 4, 64, 4, 64, 32, 32

jax.config.update("jax_num_cpu_devices", 8)  # before JAX looks for devices
mesh = jax.make_mesh((jax.device_count(),), ("data",))
# The state is float32; the loss computes in bfloat16, and gradients are summed in float32.
precision = shd.Precision(compute=jnp.bfloat16, reduce=jnp.float32)
zero = shd.Zero(mesh, stage=3, precision=precision)
# Dim 0 of a stacked parameter is the layer: each layer has second moments of its own.
factoring = optax_ext.by_path({"layers": optax_ext.last_two_dims(batch=(0,))})
tx = optax_ext.came(3e-3, factoring=factoring, debias_instability=True)


def make_state(key):
    """Parameters and optimizer state. ``zero.init`` compiles this: arrays are created sharded."""
    keys = iter(jax.random.split(key, 6))

    def normal(*shape):
        return jax.random.normal(next(keys), shape) * shape[-2] ** -0.5

    layers = {
        "qkv": normal(LAYERS, WIDTH, 3 * WIDTH),
        "out": normal(LAYERS, WIDTH, WIDTH),
        "up": normal(LAYERS, WIDTH, 4 * WIDTH),
        "down": normal(LAYERS, 4 * WIDTH, WIDTH),
    }
    embed, head = normal(VOCABULARY, WIDTH), normal(WIDTH, VOCABULARY)
    params = {"embed": embed, "layers": layers, "head": head}
    return params, tx.init(params)


@zero.gathered  # gathers the first argument in each call
def block(layer, x):
    """Causal attention and an MLP, with the parameters of one layer."""
    qkv = (jax.nn.standardize(x) @ layer["qkv"]).reshape(*x.shape[:2], 3, HEADS, -1)
    q, k, v = jnp.moveaxis(qkv, 2, 0)  # (batch, length, heads, head_dim) each
    x += jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ layer["out"]
    return x + jax.nn.gelu(jax.nn.standardize(x) @ layer["up"]) @ layer["down"]


def loss_fn(params, batch):
    """The sum of the losses of unmasked tokens, and their number."""
    x = params["embed"][batch["tokens"][:, :-1]]  # (batch, length, width)
    x, _ = jax.lax.scan(lambda x, layer: (block(layer, x), None), x, params["layers"])
    logits = (jax.nn.standardize(x) @ params["head"]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])


def make_batch(step):
    """Sequences that count in strides of 1 to 7, masked beyond 4 to 32 tokens."""
    rng = np.random.default_rng(step)
    first, stride, lengths = rng.integers([[0], [1], [4]], [[64], [8], [33]], (3, BATCH))
    tokens = (first[:, None] + stride[:, None] * np.arange(LENGTH + 1)) % VOCABULARY
    return {"tokens": tokens, "mask": (np.arange(LENGTH) < lengths[:, None]).astype(np.float32)}


state = zero.init(make_state, jax.random.key(0), tx=tx)
# weighted: sums and weights are added over all devices, then divided once: no mean of means.
train_step = zero.train_step(loss_fn, tx=tx, weighted=True)
for step in range(1, 41):
    state, metrics = train_step(state, zero.put(make_batch(step)))
    loss = float(metrics["loss"])  # waits: programs of virtual devices can starve each other
    if step % 10 == 0:
        print(f"step {step}: loss {loss:.3f} over {metrics['weight']:.0f} tokens")
