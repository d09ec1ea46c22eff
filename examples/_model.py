"""The model of train_lm.py: a small decoder-only transformer over bytes, in Flax linen."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name as named


@dataclasses.dataclass(frozen=True)
class Config:
    """The size of a model, with its batch size, steps and learning rate scale."""

    layers: int
    width: int
    heads: int
    context: int  # bytes
    batch_size: int  # windows of `context` bytes, over all devices
    steps: int
    vocabulary: int = 256
    learning_rate_scale: float = 1.0  # times the optimizer's: wide models need smaller steps
    ngrams: int = 0  # rows of a table of hashed n-grams; 0 for none


NGRAM_DISTANCES = (1, 2)  # how far back the first byte of a bigram and of a trigram is

CONFIGS = {
    "smoke": Config(layers=2, width=32, heads=2, context=32, batch_size=8, steps=30),
    "smoke-deep": Config(layers=4, width=32, heads=2, context=32, batch_size=16, steps=30),
    "small": Config(layers=4, width=128, heads=4, context=128, batch_size=16, steps=500),
    # Nine tenths of these two are the n-gram table; a batch reads at most 4096 or 2048 of its rows.
    "ngrams": Config(
        layers=4, width=128, heads=4, context=128, batch_size=16, steps=500, ngrams=65536
    ),
    "ngrams-small": Config(
        layers=2, width=64, heads=2, context=64, batch_size=16, steps=500, ngrams=16384
    ),
    "medium": Config(
        layers=8,
        width=512,
        heads=8,
        context=512,
        batch_size=64,
        steps=5000,
        learning_rate_scale=0.3,
    ),
    # The shape of GPT-2 small: 124M parameters. Bytes are the first 256 words of its vocabulary.
    "gpt2-small": Config(
        layers=12,
        width=768,
        heads=12,
        context=1024,
        batch_size=64,
        steps=20000,
        vocabulary=50257,
        learning_rate_scale=0.2,
    ),
}


class Block(nn.Module):
    """Causal attention, then an MLP, each on the normalized residual stream.

    With --memory, values with a name may be stored for the backward pass. The names are MaxText's.
    """

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """``x`` and the result: (batch, length, width)."""
        config = self.config
        width, head_dim = config.width, config.width // config.heads
        # `into` keeps the scale of the residual stream; `out` keeps it for the sum of all blocks.
        into = nn.initializers.normal(width**-0.5)
        out = nn.initializers.normal((2 * config.layers * width) ** -0.5)

        def heads(name: str) -> nn.Module:
            return nn.DenseGeneral(
                (config.heads, head_dim), use_bias=False, kernel_init=into, name=name
            )

        y = nn.RMSNorm(name="attention_norm")(x)
        q = named(rotate(heads("query")(y)), "query_proj")
        k = named(rotate(heads("key")(y)), "key_proj")
        v = named(heads("value")(y), "value_proj")
        y = named(jax.nn.dot_product_attention(q, k, v, is_causal=True), "context")
        y = nn.DenseGeneral(width, axis=(-2, -1), use_bias=False, kernel_init=out, name="out")(y)
        x += named(y, "out_proj")

        y = nn.RMSNorm(name="mlp_norm")(x)
        y = nn.Dense(4 * width, use_bias=False, kernel_init=into, name="up")(y)
        y = jnp.square(jax.nn.relu(named(y, "mlpwi")))  # before relu: its derivative reads that
        return x + nn.Dense(width, use_bias=False, kernel_init=out, name="down")(y)


class TransformerLM(nn.Module):
    """Tokens (batch, length) to logits (batch, length, vocabulary).

    A pipeline and --memory call ``embed_tokens``, the blocks and ``logits`` by themselves.

    Attributes:
      config: the size of the model.
      block_class: the class of the layers, such as ``Block``.
      table_class: the class of the n-gram table, such as ``nn.Embed``.
    """

    config: Config
    block_class: type[nn.Module] = Block
    table_class: type[nn.Module] = nn.Embed

    def setup(self) -> None:
        """The names of the parameters are those of these attributes."""
        config = self.config
        small, zeros = nn.initializers.normal(0.02), nn.initializers.zeros
        self.embed = nn.Embed(config.vocabulary, config.width, embedding_init=small)
        if config.ngrams:
            # Rows start at zero: an n-gram that was never seen adds nothing.
            self.ngram_embed = self.table_class(config.ngrams, config.width, embedding_init=zeros)
        self.embed_norm = nn.RMSNorm()
        self.block = [self.block_class(config) for _ in range(config.layers)]
        self.norm = nn.RMSNorm()

    def embed_tokens(self, tokens: jax.Array) -> jax.Array:
        """What enters the first block: (batch, length, width)."""
        x = self.embed(tokens)
        if self.config.ngrams:
            x += self.ngram_embed(ngram_rows(tokens, self.config.ngrams)).sum(-2)
        return self.embed_norm(x)

    def logits(self, x: jax.Array) -> jax.Array:
        """Of what leaves the last block; the output head is the embedding of tokens."""
        return self.embed.attend(self.norm(x))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Each position's logits are for the token after it."""
        x = self.embed_tokens(tokens)
        for block in self.block:
            x = block(x)
        return self.logits(x)


def ngram_rows(tokens: jax.Array, num_rows: int) -> jax.Array:
    """Row numbers of the bigram and the trigram that end at each token: (batch, length, 2).

    Hash n-gram embeddings of the Byte Latent Transformer (Pagnoni et al. 2024, arXiv 2412.09871).
    Zeros are padded before the first token. Different n-grams may share a row.
    """
    tokens = tokens.astype(jnp.uint32)
    rows_of_ngrams, code = [], tokens
    for distance in NGRAM_DISTANCES:
        previous = jnp.pad(tokens, ((0, 0), (distance, 0)))[:, : tokens.shape[1]]
        code = (code ^ jnp.uint32(distance)) * jnp.uint32(0x9E3779B1) + previous
        mixed = (code ^ (code >> 15)) * jnp.uint32(0x85EBCA6B)
        rows_of_ngrams.append((mixed ^ (mixed >> 13)) % jnp.uint32(num_rows))
    return jnp.stack(rows_of_ngrams, -1).astype(jnp.int32)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding of ``x``: (batch, length, heads, head_dim)."""
    length, half = x.shape[1], x.shape[3] // 2
    angle = jnp.arange(length)[:, None, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def sample(model: TransformerLM, params: dict, prompt: bytes, length: int, seed: int = 0) -> bytes:
    """Continues ``prompt`` by ``length`` bytes, sampled one by one at temperature 0.8."""

    @jax.jit
    def generate(params: dict, window: jax.Array, key: jax.Array) -> jax.Array:
        def append(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = model.apply({"params": params}, window[None])[0, -1, :256]
            token = jax.random.categorical(key, logits / 0.8)
            return jnp.append(window[1:], token), token

        return jax.lax.scan(append, window, jax.random.split(key, length))[1]

    window = jnp.asarray(list(prompt[-model.config.context :]), jnp.int32)
    return bytes(generate(params, window, jax.random.key(seed)).tolist())
