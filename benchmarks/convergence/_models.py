"""A small transformer in three forms: decoder, encoder, and encoder with decoder.

Pre-norm blocks with RMSNorm, rotary positions, no biases, tied embedding. Each layer's matrices
are arrays of their own, so that an optimizer that treats a matrix as a whole sees one.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a model.

    Attributes:
      layers: of the stack; an encoder-decoder has half of them in each.
      width: of the residual stream.
      heads: of attention.
      vocabulary: tokens.
      dtype: of activations; parameters are float32.
      remat: whether blocks are run again in the backward pass.
      one_hot: whether the embedding is read by a product, whose gradient is the same in every run.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    dtype: str = "float32"
    remat: bool = False
    one_hot: bool = False


def init(config: Config, seed: int, encoder_decoder: bool = False) -> Params:
    """Float32 parameters, drawn by NumPy: nothing to compile, and the same on every platform."""
    rng = np.random.default_rng(seed)

    def draw(shape: tuple[int, int], scale: float) -> np.ndarray:
        return np.float32(scale) * rng.standard_normal(shape, np.float32)

    def attention(prefix: str) -> Params:
        width = config.width
        scales = {"q": scale, "k": scale, "v": scale, "o": depth * scale}
        matrices = {prefix + name: draw((width, width), scales[name]) for name in scales}
        return {prefix + "norm": np.ones(width, np.float32), **matrices}

    def block(cross: bool) -> Params:
        width = config.width
        return {
            **attention("self_"),
            **(attention("cross_") if cross else {}),
            "mlp_norm": np.ones(width, np.float32),
            "up": draw((width, 4 * width), scale),
            "down": draw((4 * width, width), depth * scale / 2),
        }

    # A product keeps the scale of what it reads, and so does the sum of all that a stack adds.
    scale, depth = config.width**-0.5, (2 * config.layers) ** -0.5
    params = {
        "embed": draw((config.vocabulary, config.width), 0.02),
        "embed_norm": np.ones(config.width, np.float32),
        "norm": np.ones(config.width, np.float32),
    }
    if not encoder_decoder:
        return params | {"blocks": [block(False) for _ in range(config.layers)]}
    return params | {
        "source_blocks": [block(False) for _ in range(config.layers // 2)],
        "source_norm": np.ones(config.width, np.float32),
        "blocks": [block(True) for _ in range(config.layers // 2)],
    }


def loss_fn(config: Config, params: Params, batch: dict[str, jax.Array], causal: bool) -> jax.Array:
    """Mean cross entropy of ``targets``, weighted by ``weights`` if there are any.

    ``batch`` has ``inputs`` and ``targets``, (batch, length), and of an encoder-decoder
    ``source``, (batch, other length), what its encoder reads.
    """
    params = jax.tree.map(lambda x: x.astype(config.dtype), params)
    x = last_layer(config, params, batch, causal)
    logits = (x @ params["embed"].T).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    if "weights" not in batch:
        return losses.mean()
    return jnp.sum(losses * batch["weights"]) / jnp.sum(batch["weights"])


def last_layer(
    config: Config, params: Params, batch: dict[str, jax.Array], causal: bool
) -> jax.Array:
    """What the stack that reads ``inputs`` ends with, normalized, (batch, length, width)."""
    run = jax.checkpoint(_block, static_argnums=(0, 3)) if config.remat else _block
    source = None
    if "source" in batch:
        source = _embed(config, params, batch["source"])
        for block in params["source_blocks"]:
            source = run(config, block, source, False)
        source = _norm(source, params["source_norm"])
    x = _embed(config, params, batch["inputs"])
    for block in params["blocks"]:
        x = run(config, block, x, causal, source)
    return _norm(x, params["norm"])


def _embed(config: Config, params: Params, tokens: jax.Array) -> jax.Array:
    table = params["embed"]
    rows = jax.nn.one_hot(tokens, len(table), dtype=table.dtype) @ table
    return _norm(rows if config.one_hot else table[tokens], params["embed_norm"])


def _block(
    config: Config, params: Params, x: jax.Array, causal: bool, source: jax.Array | None = None
) -> jax.Array:
    y = _norm(x, params["self_norm"])
    x = x + _attention(config, params, "self_", y, y, causal)
    if source is not None:
        y = _norm(x, params["cross_norm"])
        x = x + _attention(config, params, "cross_", y, source, False)
    y = _norm(x, params["mlp_norm"])
    return x + jax.nn.gelu(y @ params["up"]) @ params["down"]


def _attention(
    config: Config, params: Params, prefix: str, x: jax.Array, y: jax.Array, causal: bool
) -> jax.Array:
    """``x`` asks, ``y`` answers; positions count where both are the same."""

    def heads(z: jax.Array, name: str) -> jax.Array:
        z = z @ params[prefix + name]
        return z.reshape(*z.shape[:2], config.heads, -1).swapaxes(1, 2)

    q, k, v = heads(x, "q"), heads(y, "k"), heads(y, "v")
    if prefix == "self_":
        q, k = _rotate(q), _rotate(k)
    scores = (q @ k.swapaxes(2, 3)).astype(jnp.float32) * q.shape[-1] ** -0.5
    if causal:
        scores += np.triu(np.full(scores.shape[2:], -1e9, np.float32), 1)[None, None]
    out = jax.nn.softmax(scores).astype(x.dtype) @ v
    return out.swapaxes(1, 2).reshape(x.shape) @ params[prefix + "o"]


def _rotate(x: jax.Array) -> jax.Array:
    """Rotary positions: turns pairs of features of (batch, heads, length, head_dim)."""
    length, half = x.shape[2], x.shape[3] // 2
    angle = np.arange(length)[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = (jnp.asarray(f(angle), x.dtype)[None, None] for f in (np.cos, np.sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype) * scale[None, None]
