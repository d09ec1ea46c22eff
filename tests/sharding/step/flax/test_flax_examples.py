"""Flax's own examples, models and losses unmodified, train as on one device at every stage.

They are not part of this repository: ``FLAX_EXAMPLES`` names the folder ``examples`` of a checkout
of Flax. What they import beside Flax (data sets, metrics) is replaced by nothing.
"""

import contextlib
import functools
import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training import train_state
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_ext
import sharding as shd

from ....flax_nnx import needs_nnx, nnx
from ..runs import assert_close, assert_same, train, train_alone

FOLDER = os.environ.get("FLAX_EXAMPLES")
pytestmark = [
    pytest.mark.usefixtures("x64"),
    pytest.mark.skipif(not FOLDER, reason="FLAX_EXAMPLES names no examples of Flax"),
]
STEPS, DEVICES, KEY = 3, 8, 5
KEYED = {"weighted": True, "rngs": True}
train = functools.partial(train, steps=STEPS)
alone = functools.partial(train_alone, steps=STEPS, key=KEY)
ABSENT = [
    *("absl", "clu", "tensorflow", "tensorflow_datasets", "tensorflow_text", "sentencepiece"),
    *("grain", "ml_collections", "input_pipeline", "tokenizer", "bleu", "decode", "kagglehub"),
    *("flax.training.checkpoints", "temperature_sampler"),
]
MODULES = {"gemma": ("transformer", "transformer_cfg"), "imagenet": ("models",)}


@pytest.fixture(autouse=True)
def _as_the_examples_are_run():
    with jax.numpy_rank_promotion("allow"):
        yield


@functools.cache
def example(name):
    """The modules ``models`` (or ``transformer``) and ``train`` of an example."""
    folder = Path(FOLDER) / name
    stubs = {absent: mock.MagicMock() for absent in ABSENT}
    for absent in ("clu", "tensorflow", "absl"):
        for part in ("metric_writers", "periodic_actions", "logging", "flags", "app"):
            stubs[f"{absent}.{part}"] = mock.MagicMock()
    names = MODULES.get(name, ("models", "train"))
    with (
        mock.patch.dict(sys.modules, stubs),
        mock.patch.object(sys, "path", [str(folder), *sys.path]),
    ):
        for module in {path.stem for path in folder.glob("*.py")} - stubs.keys():
            sys.modules.pop(module, None)
        return SimpleNamespace(**{n: importlib.import_module(n) for n in names})


class TrainState(train_state.TrainState):
    batch_stats: Any = None


def state_of(variables, tx):
    """In float64."""
    widen = lambda x: x.astype(float) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
    params, stats = (jax.tree.map(widen, variables.get(k)) for k in ("params", "batch_stats"))
    return TrainState.create(apply_fn=None, params=params, batch_stats=stats, tx=tx)


def zero_of(stage, blocks, shape=(DEVICES,), names=("data",), axis="data"):
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))
    return shd.Zero(mesh, stage=stage, axis=axis, min_shard_size=0, gathered_blocks=blocks)


def over_devices(loss_fn):
    """The mean of ``(sum, weight)`` over the shards of devices, which have keys of their own."""

    def mean(params, batch, state, key):
        parts = jax.tree.map(lambda x: x.reshape(DEVICES, -1, *x.shape[1:]), batch)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(DEVICES))
        totals, weights = jax.vmap(loss_fn, (None, 0, 0))(params, parts, keys)
        return totals.sum() / weights.sum(), None

    return mean


# --- lm1b and wmt: linen transformers with masks and dropout --------------------------------------

CONFIG = dict.fromkeys(("vocab_size", "output_vocab_size"), 40) | {
    **{"emb_dim": 16, "num_heads": 4, "num_layers": 2, "qkv_dim": 16, "mlp_dim": 32},
    **{"max_len": 12, "dtype": jnp.float64},
}
BLOCKS = {
    "lm1b": "EncoderDecoder1DBlock",
    "wmt": ("Encoder1DBlock", "EncoderDecoder1DBlock"),
}
TXS = {
    "adamw": optax.adamw(1e-3, b2=0.98, eps=1e-9, weight_decay=0.1),
    "came": optax_ext.came(1e-4, weight_decay=0.1),
}


def tokens(step):
    """Rows of uneven length: 0 is padding."""

    def rows(seed):
        rng = np.random.default_rng(seed)
        ids = rng.integers(1, 40, (16, 12))
        return np.where(np.arange(12)[None] < rng.integers(3, 13, (16, 1)), ids, 0)

    return {"inputs": rows(2 * step), "targets": rows(2 * step + 1)}


def transformer(name, dropout=0.0, boxed=False):
    """``(make(tx), loss_fn)``; the loss takes a key."""
    code = example(name)
    config = code.models.TransformerConfig(
        **CONFIG, dropout_rate=dropout, attention_dropout_rate=dropout, deterministic=not dropout
    )
    lm = getattr(code.models, "TransformerLM" if name == "lm1b" else "Transformer")(config)
    inputs_of = lambda batch: list(batch.values())[: 1 if name == "lm1b" else 2]  # noqa: E731

    def make(tx):
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        params = lm.init(keys, *inputs_of(tokens(0)))["params"]
        return state_of({"params": params if boxed else nn.meta.unbox(params)}, tx)

    def loss_fn(params, batch, key):
        inputs = inputs_of({k: batch[k] for k in ("inputs", "targets")})
        logits = lm.apply({"params": params}, *inputs, rngs={"dropout": key})
        weights = jnp.where(inputs[-1] > 0, 1, 0).astype(jnp.float64)
        # A sum and a weight.
        return code.train.compute_weighted_cross_entropy(logits, inputs[-1], weights)

    return make, loss_fn


@functools.cache
def transformer_alone(name, dropout, tx_name):
    make, loss_fn = transformer(name, dropout)

    def at_once(params, batch, state, key):
        """Without dropout nothing of the reference knows of devices."""
        total, weight = loss_fn(params, batch, key)
        return total / weight, None

    mean = over_devices(loss_fn) if dropout else at_once
    return alone(functools.partial(make, TXS[tx_name]), mean, tokens)


@pytest.mark.parametrize(
    ("name", "stage", "dropout", "tx_name"),
    [
        *[("lm1b", stage, 0.0, "adamw") for stage in (1, 2, 3)],
        *[("wmt", stage, 0.0, "came") for stage in (1, 2, 3)],
        ("lm1b", 3, 0.1, "came"),
        ("wmt", 2, 0.1, "adamw"),
    ],
)
def test_transformers(name, stage, dropout, tx_name):
    make, loss_fn = transformer(name, dropout)
    zero, make = zero_of(stage, BLOCKS[name]), functools.partial(make, TXS[tx_name])
    found = train(zero, make, loss_fn, jax.random.key(KEY), data=tokens, **KEYED)
    assert_same(found, transformer_alone(name, dropout, tx_name))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_lm1b_in_its_own_form(stage):
    """Its mesh, its logical axes and rules: at stage 3 they say what is sharded over fsdp."""
    # Below stage 3 parameters are unsharded over the axis of ZeRO.
    embed = ["embed", "fsdp" if stage == 3 else None]
    rules = [["mlp", "tensor"], ["vocab", "tensor"], embed, ["heads", "tensor"]]
    make, loss_fn = transformer("lm1b", boxed=True)
    zero = zero_of(stage, BLOCKS["lm1b"], (1, 4, 2), ("data", "fsdp", "tensor"), "fsdp")
    with nn.logical_axis_rules(rules):
        make = functools.partial(make, TXS["adamw"])
        found = train(
            zero, make, loss_fn, jax.random.key(KEY), data=tokens, weighted=True, rngs=True
        )
    table = found[0].params["decoder"]["Embed_0"]["embedding"].value
    assert table.sharding.spec == P("tensor", "fsdp" if stage == 3 else None)
    assert_same(found, transformer_alone("lm1b", 0.0, "adamw"))


# --- imagenet: a ResNet with batch norms that name the axis of pmap -------------------------------


def images(step):
    rng = np.random.default_rng(step)
    scale = np.repeat(10.0 ** rng.uniform(-1, 0.5, 8), 2)[:, None, None, None]
    return {"image": rng.normal(size=(16, 16, 16, 3)) * scale, "label": rng.integers(0, 5, 16)}


def resnet():
    """``(make_state, loss_fn)`` with the options of the example."""
    models = example("imagenet").models
    options = {"num_classes": 5, "num_filters": 8, "dtype": jnp.float64}
    net = models.ResNet(stage_sizes=[1, 1], block_cls=models.ResNetBlock, **options)

    def make():
        variables = net.init(jax.random.key(0), jnp.ones((1, 16, 16, 3)))
        return state_of(variables, optax.sgd(0.1, momentum=0.9, nesterov=True))

    def loss_fn(params, batch, stats):
        variables = {"params": params, "batch_stats": stats}
        logits, new = net.apply(variables, batch["image"], mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        penalty = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
        return loss + 0.5e-4 * penalty, new["batch_stats"]

    return make, loss_fn


@functools.cache
def resnet_alone():
    make, loss_fn = resnet()

    def mean(params, batch, state, key):
        """On the axis of pmap, with one device on it."""
        run = jax.vmap(loss_fn, (None, 0, None), axis_name="batch")
        found = run(params, jax.tree.map(lambda x: x[None], batch), state.batch_stats)
        return jax.tree.map(lambda x: x[0], found)

    return alone(make, mean, images)


@pytest.mark.parametrize(("stage", "axis"), [(1, "batch"), (2, "batch"), (3, "batch"), (2, "data")])
def test_resnet(stage, axis):
    make, loss_fn = resnet()
    zero = zero_of(stage, (), names=(axis,), axis=axis)
    # The penalty of the loss uses all parameters at once.
    warns = pytest.warns(UserWarning, match="no layer")
    with warns if stage == 3 else contextlib.nullcontext():
        found = train(zero, make, loss_fn, data=images, model_state="batch_stats")
    assert_same(found, resnet_alone())


# --- vae: a random variable in the loss -----------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_vae(stage):
    code = example("vae")
    vae = code.models.model(4)

    def make():
        variables = vae.init(jax.random.key(0), jnp.ones((2, 784)), jax.random.key(1))
        return state_of(variables, optax.adam(1e-3))

    def loss_fn(params, batch, key):
        x, mean, logvar = vae.apply({"params": params}, batch, key)
        bce = code.train.binary_cross_entropy_with_logits(x, batch).mean()
        return bce + code.train.kl_divergence(mean, logvar).mean()

    data = lambda step: np.random.default_rng(step).uniform(size=(16, 784)).round()  # noqa: E731
    zero = zero_of(stage, ("Encoder", "Decoder"))
    found = train(zero, make, loss_fn, jax.random.key(KEY), data=data, rngs=True)
    assert_same(found, alone(make, over_devices(lambda *args: (loss_fn(*args), 1)), data))


# --- gemma: an nnx transformer --------------------------------------------------------------------


def gemma():
    """``(model, optimizer)``; grouped queries, local and global attention, norms after layers."""
    code = example("gemma")
    kinds = code.transformer_cfg.AttentionType
    sizes = {"num_layers": 2, "num_embed": 40, "embed_dim": 16, "hidden_dim": 24, "num_heads": 4}
    config = code.transformer_cfg.TransformerConfig(
        **sizes,
        head_dim=8,
        num_kv_heads=2,
        final_logit_softcap=30.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        use_qk_norm=True,
        attention_types=(kinds.LOCAL_SLIDING, kinds.GLOBAL),
        sliding_window_size=4,
        dtype=jnp.float64,
        weight_dtype=jnp.float64,
    )
    lm = code.transformer.Transformer(config, rngs=nnx.Rngs(0))
    return lm, nnx.Optimizer(lm, optax_ext.came(1e-4), wrt=nnx.Param)


def gemma_loss(lm, batch):
    code, mask = example("gemma").transformer, batch["inputs"] > 0
    logits, _ = lm(
        batch["inputs"],
        positions=code.build_positions_from_mask(mask),
        attention_mask=code.make_causal_attn_mask(mask),
        cache=None,
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return jnp.mean(losses * mask)


@functools.cache
def gemma_alone():
    lm, optimizer = nnx.jit(gemma)()

    @nnx.jit
    def step(lm, optimizer, batch):
        loss, grads = nnx.value_and_grad(gemma_loss)(lm, batch)
        optimizer.update(lm, grads)
        return loss

    losses = [float(step(lm, optimizer, tokens(i))) for i in range(STEPS)]
    return nnx.as_pure((nnx.state(lm, nnx.Param), optimizer.opt_state)), losses


@needs_nnx
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gemma(stage):
    zero = zero_of(stage, r"^layers/\d+$")
    lm, optimizer = zero.nnx_init(gemma)
    step = zero.nnx_train_step(gemma_loss)
    losses = [float(step(lm, optimizer, zero.put(tokens(i)))["loss"]) for i in range(STEPS)]
    state = nnx.as_pure((nnx.state(lm, nnx.Param), optimizer.opt_state))
    expected, expected_losses = gemma_alone()
    # Its norms compute in float32; with float64 there, 1e-12 holds.
    assert_close(state, expected, 1e-6)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
