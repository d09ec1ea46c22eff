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
from ... import model

FOLDER = os.environ.get("FLAX_EXAMPLES")
pytestmark = [
    pytest.mark.usefixtures("x64"),
    pytest.mark.skipif(not FOLDER, reason="FLAX_EXAMPLES names no examples of Flax"),
]
STEPS, TOLERANCE, DEVICES = 3, 1e-12, 8
ABSENT = [
    *("absl", "clu", "tensorflow", "tensorflow_datasets", "tensorflow_text", "sentencepiece"),
    *("grain", "ml_collections", "input_pipeline", "tokenizer", "bleu", "decode", "kagglehub"),
    *("flax.training.checkpoints", "temperature_sampler"),
]


@pytest.fixture(autouse=True)
def _as_the_examples_are_run():
    with jax.numpy_rank_promotion("allow"):
        yield


@functools.cache
def example(name):
    """The modules ``models`` (or ``transformer``) and ``train`` of an example."""
    folder = Path(FOLDER) / name
    own = {path.stem for path in folder.glob("*.py")}
    stubs = {absent: mock.MagicMock() for absent in ABSENT}
    for absent in ("clu", "tensorflow", "absl"):
        for part in ("metric_writers", "periodic_actions", "logging", "flags", "app"):
            stubs[f"{absent}.{part}"] = mock.MagicMock()
    names = ["transformer", "transformer_cfg"] if name == "gemma" else ["models", "train"]
    with mock.patch.dict(sys.modules, stubs), contextlib.ExitStack() as stack:
        for module in own - stubs.keys():
            sys.modules.pop(module, None)
        stack.callback(sys.path.remove, str(folder))
        sys.path.insert(0, str(folder))
        if name == "imagenet":
            names = ["models"]
        return SimpleNamespace(**{n: importlib.import_module(n) for n in names})


def wide(tree):
    return jax.tree.map(
        lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


class TrainState(train_state.TrainState):
    batch_stats: Any = None


def zero_of(stage, blocks, axis="data"):
    mesh = jax.make_mesh((DEVICES,), (axis,), axis_types=(AxisType.Auto,))
    return shd.Zero(mesh, stage=stage, axis=axis, min_shard_size=0, gathered_blocks=blocks)


def parts_of(batch):
    """The shards of the devices, for losses that differ by device."""
    return [jax.tree.map(lambda x, i=i: np.split(x, DEVICES)[i], batch) for i in range(DEVICES)]


def compare(state, reference, losses, expected, tolerance=TOLERANCE):
    distance, leaf = model.worst_leaf(state, reference)
    assert distance < tolerance, leaf
    np.testing.assert_allclose(losses, expected, rtol=tolerance)


# --- lm1b and wmt: linen transformers with masks and dropout --------------------------------------

CONFIG = {
    "vocab_size": 40,
    "output_vocab_size": 40,
    "emb_dim": 16,
    "num_heads": 4,
    "num_layers": 2,
    "qkv_dim": 16,
    "mlp_dim": 32,
    "max_len": 12,
    "dtype": jnp.float64,
}


def tokens(step):
    """Rows of uneven length: 0 is padding."""
    rng = np.random.default_rng(step)
    ids = rng.integers(1, 40, (16, 12))
    return np.where(np.arange(12)[None] < rng.integers(3, 13, (16, 1)), ids, 0)


def transformer(name, dropout):
    """``(make_state, loss_fn, blocks)``; the loss takes a key."""
    code = example(name)
    config = code.models.TransformerConfig(
        **CONFIG, dropout_rate=dropout, attention_dropout_rate=dropout, deterministic=not dropout
    )
    cls = code.models.TransformerLM if name == "lm1b" else code.models.Transformer
    first = (tokens(0),) if name == "lm1b" else (tokens(0), tokens(1))

    def make(tx):
        params = cls(config).init(
            {"params": jax.random.key(0), "dropout": jax.random.key(1)}, *first
        )
        params = wide(nn.meta.unbox(params["params"]))
        return TrainState.create(apply_fn=None, params=params, tx=tx)

    def loss_fn(params, batch, key):
        inputs = (batch["inputs"],) if name == "lm1b" else (batch["inputs"], batch["targets"])
        targets = inputs[-1]
        logits = cls(config).apply({"params": params}, *inputs, rngs={"dropout": key})
        weights = jnp.where(targets > 0, 1, 0).astype(jnp.float64)
        return code.train.compute_weighted_cross_entropy(
            logits, targets, weights
        )  # a sum, a weight

    return (
        make,
        loss_fn,
        "EncoderDecoder1DBlock"
        if name == "lm1b"
        else (
            "Encoder1DBlock",
            "EncoderDecoder1DBlock",
        ),
    )


TXS = {
    "adamw": lambda: optax.adamw(1e-3, b2=0.98, eps=1e-9, weight_decay=0.1),
    "came": lambda: optax_ext.came(1e-4, weight_decay=0.1),
}


@functools.cache
def transformer_alone(name, dropout, tx_name):
    make, loss_fn, _ = transformer(name, dropout)
    tx = TXS[tx_name]()

    @jax.jit
    def step(state, parts, key):
        key = jax.random.fold_in(key, state.step)

        def mean(params):
            pairs = [
                loss_fn(params, part, jax.random.fold_in(key, i)) for i, part in enumerate(parts)
            ]
            return sum(total for total, _ in pairs) / sum(weight for _, weight in pairs)

        loss, grads = jax.value_and_grad(mean)(state.params)
        return state.apply_gradients(grads=grads), loss

    state, losses = jax.jit(functools.partial(make, tx))(), []  # eager initializers round otherwise
    for i in range(STEPS):
        batch = {"inputs": tokens(2 * i), "targets": tokens(2 * i + 1)}
        # Without dropout all of the batch at once: nothing of the reference knows of devices.
        parts = parts_of(batch) if dropout else [batch]
        state, loss = step(state, parts, jax.random.key(5))
        losses.append(float(loss))
    return (state.params, state.opt_state), losses


def train(zero, make, loss_fn):
    """The state and the losses of a transformer."""
    state, losses = zero.init(make), []
    step = zero.train_step(loss_fn, weighted=True, rngs=True)
    for i in range(STEPS):
        batch = {"inputs": tokens(2 * i), "targets": tokens(2 * i + 1)}
        state, metrics = step(state, zero.put(batch), jax.random.key(5))
        losses.append(float(metrics["loss"]))
    return state, losses


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
    make, loss_fn, blocks = transformer(name, dropout)
    state, losses = train(zero_of(stage, blocks), functools.partial(make, TXS[tx_name]()), loss_fn)
    reference, expected = transformer_alone(name, dropout, tx_name)
    compare((state.params, state.opt_state), reference, losses, expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_lm1b_in_its_own_form(stage):
    """Its mesh, its logical axes and rules: at stage 3 they say what is sharded over fsdp."""
    code = example("lm1b")
    config = code.models.TransformerConfig(**CONFIG, dropout_rate=0.0, deterministic=True)
    rules = [["mlp", "tensor"], ["vocab", "tensor"], ["embed", "fsdp"], ["heads", "tensor"]]
    if stage < 3:  # parameters are unsharded over the axis of ZeRO
        rules[2] = ["embed", None]

    def make():
        params = code.models.TransformerLM(config).init(jax.random.key(0), tokens(0))["params"]
        return TrainState.create(apply_fn=None, params=wide(params), tx=TXS["adamw"]())

    _, loss_fn, blocks = transformer("lm1b", 0.0)
    mesh = jax.make_mesh((1, 4, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    zero = shd.Zero(mesh, stage=stage, axis="fsdp", min_shard_size=0, gathered_blocks=blocks)
    with nn.logical_axis_rules(rules):
        state, losses = train(zero, make, loss_fn)
    table = state.params["decoder"]["Embed_0"]["embedding"].value
    assert table.sharding.spec == P("tensor", "fsdp" if stage == 3 else None)
    reference, expected = transformer_alone("lm1b", 0.0, "adamw")
    found = jax.tree.leaves((state.params, state.opt_state))
    compare(found, jax.tree.leaves(reference), losses, expected)


# --- imagenet: a ResNet with batch norms that name the axis of pmap -------------------------------


def images(step):
    rng = np.random.default_rng(step)
    scale = np.repeat(10.0 ** rng.uniform(-1, 0.5, 8), 2)[:, None, None, None]
    return {"image": rng.normal(size=(16, 16, 16, 3)) * scale, "label": rng.integers(0, 5, 16)}


def resnet(tx):
    """``(make_state, loss_fn)`` with the options of the example."""
    models = example("imagenet").models
    net = models.ResNet(
        stage_sizes=[1, 1],
        block_cls=models.ResNetBlock,
        num_classes=5,
        num_filters=8,
        dtype=jnp.float64,
    )

    def make():
        variables = wide(net.init(jax.random.key(0), jnp.ones((1, 16, 16, 3))))
        params, stats = variables["params"], variables["batch_stats"]
        return TrainState.create(apply_fn=None, params=params, batch_stats=stats, tx=tx)

    def loss_fn(params, batch, stats):
        logits, new = net.apply(
            {"params": params, "batch_stats": stats}, batch["image"], mutable=["batch_stats"]
        )
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        penalty = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
        return loss + 0.5e-4 * penalty, new["batch_stats"]

    return make, loss_fn


MOMENTUM = optax.sgd(0.1, momentum=0.9, nesterov=True)


@functools.cache
def resnet_alone():
    make, loss_fn = resnet(MOMENTUM)

    @jax.jit
    def step(state, batch):
        # The axis of pmap, with one device on it.
        def over_axis(params, stats):
            run = jax.vmap(loss_fn, (None, 0, None), axis_name="batch")
            loss, stats = run(params, jax.tree.map(lambda x: x[None], batch), stats)
            return loss[0], jax.tree.map(lambda x: x[0], stats)

        (loss, stats), grads = jax.value_and_grad(over_axis, has_aux=True)(
            state.params, state.batch_stats
        )
        return state.apply_gradients(grads=grads, batch_stats=stats), loss

    state, losses = jax.jit(make)(), []
    for i in range(STEPS):
        state, loss = step(state, images(i))
        losses.append(float(loss))
    return (state.params, state.opt_state, state.batch_stats), losses


@pytest.mark.parametrize(("stage", "axis"), [(1, "batch"), (2, "batch"), (3, "batch"), (2, "data")])
def test_resnet(stage, axis):
    make, loss_fn = resnet(MOMENTUM)
    zero = zero_of(stage, (), axis)
    state = zero.init(make)
    step = zero.train_step(loss_fn, model_state="batch_stats")
    losses = []
    # The penalty of the loss uses all parameters at once.
    allowed = (
        pytest.warns(UserWarning, match="no layer") if stage == 3 else contextlib.nullcontext()
    )
    with allowed:
        for i in range(STEPS):
            state, metrics = step(state, zero.put(images(i)))
            losses.append(float(metrics["loss"]))
    reference, expected = resnet_alone()
    compare((state.params, state.opt_state, state.batch_stats), reference, losses, expected)


# --- gemma: an nnx transformer --------------------------------------------------------------------


def gemma():
    """``(model, optimizer)``; grouped queries, local and global attention, norms after layers."""
    code = example("gemma")
    cfg = code.transformer_cfg
    config = cfg.TransformerConfig(
        num_layers=2,
        num_embed=40,
        embed_dim=16,
        hidden_dim=24,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        final_logit_softcap=30.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        use_qk_norm=True,
        attention_types=(cfg.AttentionType.LOCAL_SLIDING, cfg.AttentionType.GLOBAL),
        sliding_window_size=4,
        dtype=jnp.float64,
        weight_dtype=jnp.float64,
    )
    lm = code.transformer.Transformer(config, rngs=nnx.Rngs(0))
    return lm, nnx.Optimizer(lm, optax_ext.came(1e-4), wrt=nnx.Param)


def gemma_loss(lm, batch):
    code = example("gemma").transformer
    mask = batch["inputs"] > 0
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

    losses = [
        float(step(lm, optimizer, {"inputs": tokens(2 * i), "targets": tokens(2 * i + 1)}))
        for i in range(STEPS)
    ]
    return nnx.as_pure((nnx.state(lm, nnx.Param), optimizer.opt_state)), losses


@needs_nnx
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gemma(stage):
    zero = zero_of(stage, r"^layers/\d+$")
    lm, optimizer = zero.nnx_init(gemma)
    step = zero.nnx_train_step(gemma_loss)
    losses = []
    for i in range(STEPS):
        batch = {"inputs": tokens(2 * i), "targets": tokens(2 * i + 1)}
        losses.append(float(step(lm, optimizer, zero.put(batch))["loss"]))
    state = nnx.as_pure((nnx.state(lm, nnx.Param), optimizer.opt_state))
    reference, expected = gemma_alone()
    found = jax.tree.leaves(state), jax.tree.leaves(reference)
    # Its norms compute in float32; with float64 there, 1e-12 holds.
    compare(*found, losses, expected, 1e-6)


# --- vae: a random variable in the loss -----------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_vae(stage):
    code = example("vae")
    vae = code.models.model(4)
    tx = optax.adam(1e-3)

    def make():
        params = vae.init(jax.random.key(0), jnp.ones((2, 784)), jax.random.key(1))["params"]
        return TrainState.create(apply_fn=None, params=wide(params), tx=tx)

    def loss_fn(params, batch, key):
        x, mean, logvar = vae.apply({"params": params}, batch, key)
        bce = code.train.binary_cross_entropy_with_logits(x, batch).mean()
        return bce + code.train.kl_divergence(mean, logvar).mean()

    def data(step):
        return np.random.default_rng(step).uniform(size=(16, 784)).round()

    @jax.jit
    def alone(state, parts, key):
        key = jax.random.fold_in(key, state.step)

        def mean(params):
            losses = [loss_fn(params, x, jax.random.fold_in(key, i)) for i, x in enumerate(parts)]
            return sum(losses) / len(losses)

        loss, grads = jax.value_and_grad(mean)(state.params)
        return state.apply_gradients(grads=grads), loss

    zero = zero_of(stage, ("Encoder", "Decoder"))
    state, reference = zero.init(make), jax.jit(make)()
    step = zero.train_step(loss_fn, rngs=True)
    losses, expected = [], []
    for i in range(STEPS):
        reference, loss = alone(reference, parts_of(data(i)), jax.random.key(5))
        expected.append(float(loss))
        state, metrics = step(state, zero.put(data(i)), jax.random.key(5))
        losses.append(float(metrics["loss"]))
    found = (state.params, state.opt_state), (reference.params, reference.opt_state)
    compare(*found, losses, expected)
