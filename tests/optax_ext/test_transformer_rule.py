"""One rule for Flax transformers: what it makes of parameters, what that costs, what decays."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import optax_ext
from optax_ext import (
    Factoring,
    decay_mask,
    describe_factoring,
    flax_attention,
    flax_transformer,
    hidden_matrices,
)

MATRIX, FULL = Factoring((0,), (1,)), Factoring()
QUERY, OUT = Factoring((0,), (1, 2)), Factoring((0, 1), (2,))
STACKED_FULL = Factoring(batch=(0,))
STACKED_MATRIX = Factoring((1,), (2,), (0,))

# What each is there for: (path, shape, factoring).
MODELS = {
    "linen, layers apart (lm1b, wmt)": [
        ("params/shared_embedding/embedding", (32000, 512), MATRIX),
        ("params/decoder/posembed_output/pos_embedding", (256, 512), MATRIX),
        ("params/decoder/encoderdecoderblock_0/LayerNorm_0/scale", (512,), FULL),
        ("params/encoder/encoderblock_1/MultiHeadDotProductAttention_0/query/kernel",
         (512, 8, 64), QUERY),
        ("params/encoder/encoderblock_1/MultiHeadDotProductAttention_0/query/bias", (8, 64), FULL),
        ("params/encoder/encoderblock_1/MultiHeadDotProductAttention_0/out/kernel",
         (8, 64, 512), OUT),
        ("params/encoder/encoderblock_1/MultiHeadDotProductAttention_0/out/bias", (512,), FULL),
        ("params/encoder/encoderblock_1/MlpBlock_0/Dense_0/kernel", (512, 2048), MATRIX),
        ("params/decoder/logitdense/kernel", (512, 32000), MATRIX),
        # Matrices of modules that have "norm" in their names.
        ("params/blocks_0/pre_norm_mlp/kernel", (512, 2048), MATRIX),
        ("params/encoder/layernorm_embedding/embedding", (1000, 64), MATRIX),
        ("params/blocks_0/pre_norm_mlp/bias", (2048,), FULL),
    ],
    "linen, scanned": [
        ("params/embed/embedding", (32000, 512), MATRIX),
        ("params/layers/attn/query/kernel", (12, 512, 8, 64), Factoring((1,), (2, 3), (0,))),
        ("params/layers/attn/query/bias", (12, 8, 64), STACKED_FULL),
        ("params/layers/attn/out/kernel", (12, 8, 64, 512), Factoring((1, 2), (3,), (0,))),
        ("params/layers/mlp/wi/kernel", (12, 512, 2048), STACKED_MATRIX),
        ("params/layers/mlp/wi/bias", (12, 2048), STACKED_FULL),
        ("params/layers/norm/scale", (12, 512), STACKED_FULL),
        ("params/ScanBlock_0/Dense_0/kernel", (12, 512, 2048), STACKED_MATRIX),
        # A dense projection of that name, not one with heads.
        ("params/layers/q_proj/kernel", (12, 512, 512), STACKED_MATRIX),
        # Nothing to stack: one dim would be left.
        ("params/layers/head/kernel", (512, 32000), MATRIX),
        ("params/head/kernel", (512, 32000), MATRIX),
        ("params/moe_layers/wi/kernel", (8, 512, 2048), Factoring((1,), (2,))),  # not named so
    ],
    "nnx, layers in a list": [
        ("layers/0/attn/query/kernel", (512, 8, 64), QUERY),
        ("layers/0/attn/key/bias", (8, 64), FULL),
        ("layers/11/mlp/kernel", (512, 2048), MATRIX),
        ("layers/11/norm/scale", (512,), FULL),
    ],
    "gemma": [
        ("embedder/input_embedding", (256128, 2048), MATRIX),
        ("layers/0/attn/qkv_einsum/kernel", (3, 16, 3072, 256), Factoring((2,), (1, 3), (0,))),
        ("layers/0/attn/q_einsum/kernel", (8, 2048, 256), Factoring((1,), (0, 2))),
        ("layers/0/attn/kv_einsum/kernel", (2, 1, 2048, 256), Factoring((2,), (1, 3), (0,))),
        ("layers/0/attn/attn_vec_einsum/kernel", (8, 256, 2048), OUT),
        ("layers/0/mlp/gate_proj/kernel", (2048, 16384), MATRIX),
        ("layers/0/pre_attention_norm/scale", (2048,), FULL),
        ("layers/attn/qkv_einsum/kernel", (18, 3, 16, 3072, 256),
         Factoring((3,), (2, 4), (0, 1))),
        ("layers/attn/q_einsum/w", (18, 8, 2048, 256), Factoring((2,), (1, 3), (0,))),
    ],
}  # fmt: skip
# MaxText stacks along the second dim.
MAXTEXT = [
    ("params/token_embedder/embedding", (32000, 4096), MATRIX),
    ("params/decoder/layers/self_attention/query/kernel", (4096, 32, 16, 128),
     Factoring((0,), (2, 3), (1,))),
    ("params/decoder/layers/self_attention/out/kernel", (16, 32, 128, 4096),
     Factoring((0, 2), (3,), (1,))),
    ("params/decoder/layers/mlp/wi_0/kernel", (4096, 32, 11008), Factoring((0,), (2,), (1,))),
    ("params/decoder/layers/pre_self_attention_layer_norm/scale", (4096, 32),
     Factoring(batch=(1,))),
    ("params/decoder/decoder_norm/scale", (4096,), FULL),
]  # fmt: skip


@pytest.mark.parametrize("model", [*MODELS, "maxtext"])
def test_parameters_of_models(model):
    rule = flax_transformer(stack_dim=1) if model == "maxtext" else flax_transformer()
    for path, shape, want in MODELS.get(model, MAXTEXT):
        assert rule.resolve(path, shape) == want, path
        tree = {path: jax.ShapeDtypeStruct(shape, jnp.float32)}
        outer = re.search("embed|logit|head", path)
        if model != "maxtext":
            assert hidden_matrices(tree) == {path: want.factored and not outer}, path


def test_what_is_stacked_can_be_named():
    rule = flax_transformer(stacked=None)
    assert rule.resolve("layers/query/kernel", (12, 512, 8, 64)) == Factoring((1,), (2, 3))
    assert flax_transformer(r"^tower/").resolve("tower/mlp/w", (4, 8, 16)) == STACKED_MATRIX


def test_errors():
    with pytest.raises(ValueError, match=r"stacked: pattern .* is not a regular expression"):
        flax_transformer(stacked="(")
    with pytest.raises(ValueError, match="stack_dim must not be negative, got -1"):
        flax_transformer(stack_dim=-1)
    with pytest.raises(ValueError, match="rule must be a Factoring"):
        describe_factoring(lambda path, shape: None, {})


class Block(nn.Module):
    """Attention, a norm and a dense layer."""

    @nn.compact
    def __call__(self, x, _=None):
        x = x + nn.MultiHeadDotProductAttention(num_heads=4, name="attn")(nn.LayerNorm()(x))
        return x + nn.Dense(24, name="mlp")(x), None


class Model(nn.Module):
    """Stacked blocks between an embedding and a head."""

    scanned: bool

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(50, 24, name="embed")(tokens)
        if self.scanned:
            over = nn.scan(
                Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
            )
            x, _ = over(name="layers")(x, None)
        else:
            for i in range(3):
                x, _ = Block(name=f"layers_{i}")(x)
        return nn.Dense(50, name="head")(x)


@functools.cache
def params_of(scanned):
    """The shapes of the parameters."""
    return jax.eval_shape(Model(scanned).init, jax.random.key(0), jnp.zeros((1, 5), int))


@pytest.mark.parametrize("scanned", [True, False])
def test_the_bytes_are_those_of_the_state(scanned):
    params = params_of(scanned)
    table = describe_factoring(flax_transformer(), params)
    init = optax_ext.scale_by_adafactor(factoring=flax_transformer()).init
    averages = jax.tree.leaves(jax.eval_shape(init, params)[1:])
    assert table.nbytes == sum(4 * x.size for x in averages)
    assert len(table.rows) == len(jax.tree.leaves(params))
    assert f"{table.nbytes:,} bytes" in str(table)
    # Both keep the same of the same layers.
    assert table.nbytes == describe_factoring(flax_transformer(), params_of(not scanned)).nbytes
    matrices = [row for row in table.rows if re.search("kernel$|embedding$", row.path)]
    assert all(row.factoring.factored for row in matrices)
    assert not any(row.factoring.factored for row in table.rows if row not in matrices)


def test_a_table_says_what_is_factored_how():
    params = {
        "layers": {"attn": {"query": {"kernel": jnp.ones((2, 8, 4, 16), jnp.bfloat16)}}},
        "experts": {"kernel": jnp.ones((6, 8, 3))},
    }
    lines = str(describe_factoring(flax_transformer(), params)).splitlines()
    assert [re.split(r"  +", line) for line in lines] == [
        ["experts/kernel", "(6, 8, 3)", "8 x 3, 6 stacked", "264 bytes"],
        ["layers/attn/query/kernel", "(2, 8, 4, 16)", "8 x 4*16, 2 apart", "576 bytes"],
        ["all", "840 bytes"],
    ]


def test_the_older_rule_factors_embedding_and_head_beside_stacked_layers():
    rule = flax_attention(batch=(0,))
    for path in ("embed/embedding", "head/kernel"):
        assert rule.resolve(path, (500, 64)) == MATRIX
    assert rule.resolve("layers/mlp/kernel", (3, 64, 96)) == STACKED_MATRIX
    assert rule.resolve("layers/mlp/bias", (3, 96)) == STACKED_FULL


@pytest.mark.parametrize("scanned", [True, False])
def test_masks_of_a_model(scanned):
    """Matrices decay; those of blocks are hidden."""
    params = params_of(scanned)
    for (path, decays), hidden in zip(
        jax.tree.leaves_with_path(decay_mask(params)),
        jax.tree.leaves(hidden_matrices(params)),
        strict=True,
    ):
        name, block = path[-1].key, path[1].key.startswith("layers")
        assert decays is (name in ("kernel", "embedding")), jax.tree_util.keystr(path)
        assert hidden is (block and name == "kernel"), jax.tree_util.keystr(path)


# Names that models give to embeddings, positions and output heads, and to what resembles them.
OUTER = """
embed embed/embedding embedder/input_embedding mm_input_embedding shared_embedding/embedding
Embed_0/embedding embed_tokens/embedding token_embed/embedding token_emb/embedding
embeddings/word_embeddings/embedding token_embedder/embedding ngram_embed/embedding unembed
posembed_output/pos_embedding pos_embed positions position_embedder/embedding pos_emb wte wpe
wte/embedding wpe/embedding head/kernel lm_head/kernel output_head/kernel mlp_head/kernel logits
logits/kernel logitdense/kernel logits_dense/kernel classifier/kernel readout/kernel
layers/head/kernel
"""
HIDDEN = """
attention/heads/kernel attn/out/kernel attn/output/dense/kernel output/kernel member/kernel
MultiHeadDotProductAttention_0/query/kernel header/kernel embedding_model/layers_0/mlp/kernel
embed_proj/kernel out_proj/kernel decomposition/kernel attn_vec_einsum/w qkv layers/0/up
"""


@pytest.mark.parametrize(("paths", "hidden"), [(OUTER, False), (HIDDEN, True)])
def test_matrices_of_hidden_layers_are_known_by_name(paths, hidden):
    for path in paths.split():
        tree = jax.ShapeDtypeStruct((8, 4, 6) if path.endswith("einsum/w") else (8, 6), "float32")
        for key in reversed(path.split("/")):
            tree = {key: tree}
        assert jax.tree.leaves(hidden_matrices(tree)) == [hidden], path


def test_the_names_of_hidden_matrices_can_be_changed():
    params = {"table": jnp.ones((8, 6)), "embed": jnp.ones((8, 6)), "bias": jnp.ones(6)}
    found = hidden_matrices(params, not_hidden="^table$")
    assert found == {"table": False, "embed": True, "bias": False}
    with pytest.raises(ValueError, match=r"not_hidden: pattern .* is not a regular expression"):
        hidden_matrices(params, not_hidden="(")
    with pytest.raises(ValueError, match="rule must be a Factoring"):
        hidden_matrices(params, lambda path, shape: None)
