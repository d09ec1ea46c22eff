"""A decoder-only transformer in plain JAX, whose blocks are stacked and scanned, or are not."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    vocabulary: int = 512
    scan: bool = True

    @property
    def num_params(self) -> int:
        """All parameters: matrices of 12 width² a block, tied embedding, scales of the norms."""
        width = self.width
        return self.layers * (12 * width**2 + 2 * width) + self.vocabulary * width + width


def init(config: Config, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Parameters, all of one dtype."""
    width, heads = config.width, config.heads
    shapes = {
        "attention_norm": (width,),
        "qkv": (width, 3, heads, width // heads),
        "out": (heads, width // heads, width),
        "mlp_norm": (width,),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }

    def draw(shape: tuple[int, ...]) -> jax.Array:
        if len(shape) == 1:
            return jnp.ones(shape, dtype)
        return 0.02 * jax.random.normal(jax.random.key(0), shape, dtype)

    block = {name: draw(shape) for name, shape in shapes.items()}
    if config.scan:
        blocks: Any = jax.tree.map(lambda x: jnp.stack([x] * config.layers), block)
    else:
        blocks = [jax.tree.map(jnp.copy, block) for _ in range(config.layers)]
    return {"embed": draw((config.vocabulary, width)), "blocks": blocks, "norm": draw((width,))}


def apply_block(params: dict[str, jax.Array], x: jax.Array, causal: bool = True) -> jax.Array:
    """Attention, then an MLP; ``x`` is (batch, length, width)."""
    y = _norm(x, params["attention_norm"])
    q, k, v = jnp.unstack(jnp.einsum("btw,wchd->cbthd", y, params["qkv"]))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    scores = _wide(scores)
    if causal:
        past = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))[None, None]
        scores = jnp.where(past, scores, -1e30)
    weights = jax.nn.softmax(scores).astype(x.dtype)
    x = x + jnp.einsum("bhts,bshd,hdw->btw", weights, v, params["out"])
    y = _norm(x, params["mlp_norm"])
    return x + jax.nn.gelu(y @ params["up"]) @ params["down"]


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    mean = jnp.mean(jnp.square(_wide(x)), axis=-1, keepdims=True)
    return (x * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype) * scale[None, None]


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def make_loss(block: Callable[..., Any] = apply_block) -> Callable[..., Any]:
    """The mean cross entropy of the next token; the embedding is tied."""

    def loss_fn(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
        x = params["embed"][tokens[:, :-1]]
        if isinstance(params["blocks"], dict):
            x, _ = jax.lax.scan(lambda x, p: (block(p, x), None), x, params["blocks"])
        else:
            for layer in params["blocks"]:
                x = block(layer, x)
        logits = _norm(x, params["norm"]) @ params["embed"].T
        losses = optax.softmax_cross_entropy_with_integer_labels(_wide(logits), tokens[:, 1:])
        return losses.mean()

    return loss_fn
