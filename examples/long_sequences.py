"""Sequences that devices share: a loss of jit with Ulysses or ring attention, trained under Zero.

Devices of the axis "sequence", which is yours, have parts of each sequence. Attention alone needs
the others': it runs in a shard_map that is declared to keep the rows of the batch apart, so that
Zero runs the loss of each device's rows. Elsewhere the partitioner follows the parts by itself.

  python examples/long_sequences.py    # 8 virtual CPU devices, if there are no others
"""

import functools
import math

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import sharding as shd


def over_sequence(attention):
    """Attention of queries, keys and values, (batch, length, heads, dim), in parts of length."""
    parts = P(None, "sequence")

    def shared(*args):  # on the mesh of the program that it is traced in
        options = {"in_specs": parts, "out_specs": parts, "axis_names": {"sequence"}}
        return jax.shard_map(attention, **options)(*args)

    return shd.keeps_rows_apart(shared, in_dims=0, out_dims=0)


def causal(q, k, v, first_query=0, first_key=0):
    """Sums of weighted values and of weights, relative to the largest score, and this one.

    Positions of queries and keys count from the first ones.
    """
    scores = jnp.einsum("bqhd,bkhd->bqhk", q, k) * q.shape[-1] ** -0.5
    queries = first_query + jnp.arange(q.shape[1])
    keys = first_key + jnp.arange(k.shape[1])
    seen = queries[:, None] >= keys[None]
    scores = jnp.where(seen[None, :, None], scores, -1e30)
    top = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - top)
    return jnp.einsum("bqhk,bkhd->bqhd", weights, v), weights.sum(-1, keepdims=True), top


def ulysses(q, k, v):
    """All positions of some heads on each device: four all-to-alls of a device's part.

    Jacobs et al.: DeepSpeed Ulysses, 2023, arXiv 2309.14509. The devices divide the heads.
    """
    move = functools.partial(jax.lax.all_to_all, axis_name="sequence", tiled=True)
    to_heads = functools.partial(move, split_axis=2, concat_axis=1)
    y, total, _ = jax.checkpoint(causal)(to_heads(q), to_heads(k), to_heads(v))
    return move(y / total, split_axis=1, concat_axis=2)


def ring(q, k, v):
    """Keys and values go around n devices in n - 1 permutes; any number of heads.

    Liu et al.: Ring Attention with Blockwise Transformers, 2023, arXiv 2310.01889.
    """
    n, own, length = jax.lax.axis_size("sequence"), jax.lax.axis_index("sequence"), q.shape[1]
    to_next = [(i, (i + 1) % n) for i in range(n)]
    attend = jax.checkpoint(causal)  # scores are computed again
    y, total, top = attend(q, k, v, own * length, own * length)
    for i in range(1, n):
        k, v = jax.lax.ppermute((k, v), "sequence", to_next)
        first_key = (own - i) % n * length
        more, more_total, more_top = attend(q, k, v, own * length, first_key)
        highest = jnp.maximum(top, more_top)
        old, new = jnp.exp(top - highest), jnp.exp(more_top - highest)
        y, total, top = y * old + more * new, total * old + more_total * new, highest
    return y / total


def make_loss(attention, tiles=4):
    """A decoder's loss, its head in tiles of the vocabulary; tokens are (batch, length + 1)."""

    def layer(x, p):
        q, k, v = (jnp.einsum("btw,whd->bthd", x, p[name]) for name in ("q", "k", "v"))
        x = x + jnp.einsum("bthd,hdw->btw", attention(q, k, v), p["out"])
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None

    def loss(params, tokens):
        x = params["embed"][tokens[:, :-1]]
        x, _ = jax.lax.scan(layer, x, params["layers"])
        return shd.cross_entropy(x, params["head"], tokens[:, 1:], tiles=tiles)

    return loss


def make_params(key, width=32, heads=4, layers=2, vocabulary=64):
    """Parameters of layers that are stacked."""
    of_heads = dict.fromkeys(("q", "k", "v"), (layers, width, heads, width // heads))
    of_heads["out"] = (layers, heads, width // heads, width)
    of_mlp = {"up": (layers, width, 4 * width), "down": (layers, 4 * width, width)}
    shapes = {"embed": (vocabulary, width), "head": (width, vocabulary)}
    shapes["layers"] = of_heads | of_mlp
    is_shape = {"is_leaf": lambda x: isinstance(x, tuple)}
    return jax.tree.map(lambda s: 0.3 * jax.random.normal(key, s), shapes, **is_shape)


def main():
    """Trains a few steps, each sequence on up to four devices; prints losses and what is sent."""
    shared_by = math.gcd(jax.device_count(), 4)
    axes = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((jax.device_count() // shared_by, shared_by), ("data", "sequence"), axes)
    zero, tx = shd.Zero(mesh, stage=3, axis="data"), optax.adam(1e-3)

    def make_state(key):
        params = make_params(key)
        return params, tx.init(params)

    state = zero.init(make_state, jax.random.key(0), tx=tx)
    step = zero.train_step(make_loss(over_sequence(ring)), tx=tx)
    tokens = jax.random.randint(jax.random.key(1), (jax.device_count(), 65), 0, 64)
    print(step.loss_program(state, zero.put(tokens)))
    print(shd.audit(step.lower(state, zero.put(tokens)), mesh=mesh))
    for _ in range(5):
        state, metrics = step(state, zero.put(tokens))
        print(float(metrics["loss"]))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
