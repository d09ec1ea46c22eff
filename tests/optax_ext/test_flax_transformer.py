"""One rule for Flax transformers: what it makes of parameters, what that costs, what decays."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from optax_ext import Factoring, decay_mask, describe_factoring, flax_transformer, hidden_matrices

RULE = flax_transformer()
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
        ("params/encoder/encoderblock_1/MlpBlock_0/Dense_0/kernel", (512, 2048), MATRIX),
        ("params/decoder/logitdense/kernel", (512, 32000), MATRIX),
        # Matrices of modules that have "norm" in their names.
        ("params/blocks_0/pre_norm_mlp/kernel", (512, 2048), MATRIX),
        ("params/blocks_0/pre_norm_mlp/bias", (2048,), FULL),
    ],
    "linen, scanned": [
        ("params/layers/attn/query/kernel", (12, 512, 8, 64), Factoring((1,), (2, 3), (0,))),
        ("params/layers/attn/query/bias", (12, 8, 64), STACKED_FULL),
        ("params/layers/attn/out/kernel", (12, 8, 64, 512), Factoring((1, 2), (3,), (0,))),
        ("params/layers/mlp/wi/kernel", (12, 512, 2048), STACKED_MATRIX),
        ("params/layers/norm/scale", (12, 512), STACKED_FULL),
        # A dense projection of that name, not one with heads.
        ("params/layers/q_proj/kernel", (12, 512, 512), STACKED_MATRIX),
        # Nothing to stack: one dim would be left.
        ("layers/11/mlp/kernel", (512, 2048), MATRIX),
        ("params/moe_layers/wi/kernel", (8, 512, 2048), Factoring((1,), (2,))),  # not named so
    ],
    "gemma": [
        ("embedder/input_embedding", (256128, 2048), MATRIX),
        ("layers/0/attn/q_einsum/kernel", (8, 2048, 256), Factoring((1,), (0, 2))),
        ("layers/0/attn/kv_einsum/kernel", (2, 1, 2048, 256), Factoring((2,), (1, 3), (0,))),
        ("layers/0/attn/attn_vec_einsum/kernel", (8, 256, 2048), OUT),
        ("layers/0/pre_attention_norm/scale", (2048,), FULL),
        ("layers/attn/qkv_einsum/kernel", (18, 3, 16, 3072, 256),
         Factoring((3,), (2, 4), (0, 1))),
        ("layers/attn/q_einsum/w", (18, 8, 2048, 256), Factoring((2,), (1, 3), (0,))),
        ("layers/mlp/gating_einsum", (18, 2, 3072, 24576), Factoring((2,), (3,), (0,))),
    ],
    # Known by shapes: heads are on one side; a stack has (layers, n) beside (layers, n, m).
    "levanter, scanned": [
        ("transformer/stacked/ln_1/weight", (12, 768), STACKED_FULL),
        ("transformer/stacked/attn/c_attn/weight", (12, 768, 3, 12, 64),
         Factoring((1,), (2, 3, 4), (0,))),
        ("transformer/stacked/attn/c_attn/b", (12, 3, 12, 64), STACKED_FULL),
        ("transformer/stacked/attn/c_proj/weight", (12, 12, 64, 768),
         Factoring((1, 2), (3,), (0,))),
        ("transformer/stacked/mlp/w", (12, 768, 3072), STACKED_MATRIX),
        ("transformer/ln_f/weight", (768,), FULL),
        ("other/stacked/conv/weight", (3, 64, 32, 3, 3), Factoring((1,), (2, 3, 4), (0,))),
        ("other/stacked/conv/b", (3, 64, 1, 1), STACKED_FULL),
        ("other/stacked/prelu/slope", (3,), FULL),
        ("other/stacked/up/weight", (3, 64, 32), STACKED_MATRIX),
        ("other/stacked/ln/weight", (3, 32), STACKED_FULL),
    ],
    "matrices of a stack alone": [
        ("transformer/stacked/c_proj/weight", (12, 12, 64, 768), Factoring((1, 2), (3,), (0,))),
        ("transformer/stacked/up/w", (12, 768, 3072), STACKED_MATRIX),
        ("transformer/stacked/down/w", (12, 3072, 768), STACKED_MATRIX),
        ("experts/wi/w", (8, 768, 3072), Factoring((1,), (2,))),
        ("experts/wo/w", (8, 3072, 768), Factoring((1,), (2,))),
    ],
    "vision": [
        ("cls", (1, 1, 768), FULL),
        ("pos_embedding", (1, 197, 768), Factoring((0, 1), (2,))),
        ("patch/kernel", (16, 16, 3, 768), Factoring((0, 1, 2), (3,))),
        ("conv1d/kernel", (3, 80, 768), OUT),
        ("depthwise/kernel", (7, 7, 1, 384), Factoring((0, 1, 2), (3,))),
        ("keras/depthwise_kernel", (7, 7, 384, 1), Factoring((0, 1), (2, 3))),
        ("block/attn/q/w", (768, 12, 64), QUERY),
        ("block/attn/q/b", (12, 64), FULL),
        ("block/attn/o/w", (12, 64, 768), OUT),
        ("block/mlp/gate/w", (768, 8), MATRIX),  # of 8 experts
        ("block/mlp/w1", (8, 768, 3072), Factoring((1,), (2,))),
        ("block/mlp/w2", (8, 3072, 768), Factoring((1,), (2,))),
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
]  # fmt: skip


@pytest.mark.parametrize("model", [*MODELS, "maxtext"])
def test_parameters_of_models(model):
    rule = flax_transformer(stack_dim=1) if model == "maxtext" else flax_transformer()
    rows = MODELS.get(model, MAXTEXT)
    tree = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape, _ in rows}
    wanted = {path: want for path, _, want in rows}
    for row in describe_factoring(optax_ext.by_path({"^none$": None}, default=rule), tree).rows:
        assert row.factoring == wanted[row.path], row.path
    for path, hidden in hidden_matrices(tree, rule).items():
        outer = re.search("embed|logit|head", path)
        assert hidden == (wanted[path].factored and not outer), path


def test_what_is_stacked_can_be_named():
    rule = flax_transformer(stacked=None)
    assert rule.resolve("layers/query/kernel", (12, 512, 8, 64)) == Factoring((1,), (2, 3))
    assert flax_transformer(r"^tower/").resolve("tower/mlp/w", (4, 8, 16)) == STACKED_MATRIX
    with pytest.raises(ValueError, match=r"whether 'layers/w' of .* depends on the other param"):
        flax_transformer().resolve("layers/w", (12, 8, 4))


# Arrays in a module called "layers": shapes by path, whether they are a stack; None: it is open.
IN_LAYERS = [
    ({"a/query/kernel": (8, 2, 4), "a/out/kernel": (2, 4, 8)}, False),
    ({"Dense_0/kernel": (8, 8), "Dense_0/bias": (8,)}, False),
    ({"linear/w": (8, 8), "linear/b": (8,)}, False),
    ({"Conv_0/kernel": (3, 3, 3, 8), "Conv_0/bias": (8,)}, False),
    ({"q_proj/kernel": (8, 8, 8), "mlp/kernel": (8, 8, 32), "norm/scale": (8, 8)}, True),
    ({"mlp/kernel": (3, 8, 9), "alpha": (3,)}, True),  # a number of each layer
    ({"norm/scale": (3, 8), "mlp/bias": (3, 8)}, True),
    ({"a/query/kernel": (8, 2, 4), "a/key/kernel": (8, 2, 4)}, None),
    ({"w": (8, 8)}, None),
]


@pytest.mark.parametrize(("shapes", "stack"), IN_LAYERS)
def test_a_stack_is_known_by_all_its_arrays(shapes, stack):
    """Also within a module that has such a name and is none, and not beside others."""
    shapes = {f"blocks/layers/{path}": shape for path, shape in shapes.items()}
    rows = [*(shapes | {"blocks/norm/scale": (8,)}).items()]
    if stack is None:
        message = r"'blocks/layers/' may be of .*stacked='\^blocks/layers/'"
        with pytest.raises(ValueError, match=message):
            flax_transformer().for_tree(rows)
    else:
        rule = flax_transformer().for_tree(rows)
        assert rule.stacked == ("^(blocks/layers/)" if stack else None)


def test_the_same_numbers_stacked_apart_and_in_a_module_called_blocks():
    """In float64, of layers whose gradients differ in scale."""
    rng = np.random.default_rng(0)
    shapes = {
        "attn": {"query": {"kernel": (12, 2, 6), "bias": (2, 6)}, "out": {"kernel": (2, 6, 12)}},
        "q_proj": {"kernel": (12, 12)},
        "mlp": {"w": (12, 14), "g": (12,)},
        "norm": {"scale": (12,)},
    }
    shapes = jax.tree.map(np.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))

    def draw(i):
        return jax.tree.map(lambda x: 10.0**i * rng.normal(size=x.shape), shapes)

    def run(form, steps):
        tx = optax_ext.came(0.1, weight_decay=0.1, weight_decay_mask=decay_mask, factoring=RULE)
        params = form(steps[0])
        state = tx.init(params)
        for layers in steps[1:]:
            updates, state = jax.jit(tx.update)(form(layers), state, params)
            params = optax.apply_updates(params, updates)
        return params

    steps = [[draw(i) for i in range(3)] for _ in range(4)]
    with jax.enable_x64(True):
        apart = run(lambda layers: {f"block_{i}": x for i, x in enumerate(layers)}, steps)
        inside = run(lambda layers: {"blocks": {f"b{i}": x for i, x in enumerate(layers)}}, steps)
        stacked = run(lambda x: {"transformer": jax.tree.map(lambda *a: np.stack(a), *x)}, steps)
    apart = [apart[f"block_{i}"] for i in range(3)]
    jax.tree.map(np.testing.assert_array_equal, apart, [*inside["blocks"].values()])
    unstacked = [jax.tree.map(lambda x, i=i: x[i], stacked["transformer"]) for i in range(3)]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), unstacked, apart)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: flax_transformer(stacked="("), "stacked: pattern .* is not a regular expression"),
        (lambda: flax_transformer(stack_dim=-1), "stack_dim must not be negative, got -1"),
        (lambda: describe_factoring(lambda path, shape: None, {}), "rule must be a Factoring"),
        (lambda: hidden_matrices({}, not_hidden="("), "not_hidden: pattern .* is not a regular"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_table_says_what_is_factored_how():
    """And the bytes that the state has."""
    params = {
        "layers": {"attn": {"query": {"kernel": jnp.ones((2, 8, 4, 16), jnp.bfloat16)}}},
        "experts": {"kernel": jnp.ones((6, 8, 3))},
    }
    table = describe_factoring(flax_transformer(), params)
    init = optax_ext.scale_by_adafactor(factoring=flax_transformer()).init
    averages = jax.tree.leaves(jax.eval_shape(init, params)[1:])
    assert table.nbytes == sum(4 * x.size for x in averages)
    lines = str(table).splitlines()
    assert [re.split(r"  +", line) for line in lines] == [
        ["experts/kernel", "(6, 8, 3)", "8 x 3, 6 stacked", "264 bytes"],
        ["layers/attn/query/kernel", "(2, 8, 4, 16)", "8 x 4*16, 2 apart", "576 bytes"],
        ["all", "840 bytes"],
    ]


def test_the_table_marks_what_saves_less_than_it_could():
    shapes = {"q": (2, 768, 12, 64), "w": (2, 768, 768)}
    tree = {k: jax.ShapeDtypeStruct(n, jnp.float32) for k, n in shapes.items()}
    lines = str(describe_factoring(optax_ext.last_two_dims(batch=(0,)), tree)).splitlines()
    assert "12 x 64, 2 apart, 768 stacked; 38 times 768 x 12*64" in lines[0]
    assert "times" not in lines[1]


def test_the_kernel_of_a_value_head_decays_and_tokens_do_not():
    tree = {"head": {"kernel": jnp.ones((8, 1)), "bias": jnp.ones(1)}, "mask": jnp.ones((1, 1, 8))}
    assert decay_mask(tree) == {"head": {"kernel": True, "bias": False}, "mask": False}


def test_a_pattern_of_all_paths_leaves_embedding_and_head_unstacked():
    rule = flax_transformer(stacked=".")
    for path in ("embed/embedding", "head/kernel"):
        assert rule.resolve(path, (500, 64)) == MATRIX
    assert rule.resolve("layers/mlp/kernel", (3, 64, 96)) == STACKED_MATRIX
    assert rule.resolve("layers/mlp/bias", (3, 96)) == STACKED_FULL


OUTER = """
embed embed/embedding embedder/input_embedding mm_input_embedding Embed_0/embedding unembed
embed_tokens/embedding token_emb/embedding embeddings/word_embeddings/embedding pos_embed positions
posembed_output/pos_embedding wte wpe/embedding head/kernel lm_head/kernel mlp_head/kernel logits
logitdense/kernel classifier/kernel readout/kernel layers/head/kernel
"""
HIDDEN = """
attention/heads/kernel attn/out/kernel output/kernel member/kernel header/kernel embed_proj/kernel
embedding_model/layers_0/mlp/kernel decomposition/kernel attn_vec_einsum/w qkv layers/0/up
"""
VECTORS = "layers/mlp/bias layers/norm/scale"


def test_matrices_of_hidden_layers_are_known_by_name():
    """As models name embeddings, positions and heads, and what resembles them; matrices decay."""
    for paths, decays, hidden in ((OUTER, 1, 0), (HIDDEN, 1, 1), (VECTORS, 0, 0)):
        for path in paths.split():
            shape = (8, 4, 6) if path.endswith("einsum/w") else (8, 6) if decays else (6,)
            tree = jax.ShapeDtypeStruct(shape, "float32")
            for key in reversed(path.split("/")):
                tree = {key: tree}
            assert jax.tree.leaves(hidden_matrices(tree)) == [hidden], path
            assert jax.tree.leaves(decay_mask(tree)) == [decays], path
    tree = {"table": jnp.ones((8, 6)), "embed": jnp.ones((8, 6)), "bias": jnp.ones(6)}
    found = hidden_matrices(tree, not_hidden="^table$")
    assert found == {"table": False, "embed": True, "bias": False}
