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

import optax_ext

from ..runs import assert_same, train, train_alone, zero_of

FOLDER = os.environ.get("FLAX_EXAMPLES")
pytestmark = [
    pytest.mark.usefixtures("x64"),
    pytest.mark.skipif(not FOLDER, reason="FLAX_EXAMPLES names no examples of Flax"),
]
STEPS, DEVICES, KEY = 3, 8, 5
ABSENT = [
    *("absl", "clu", "tensorflow", "tensorflow_datasets", "tensorflow_text", "sentencepiece"),
    *("grain", "ml_collections", "input_pipeline", "tokenizer", "bleu", "decode"),
    *("flax.training.checkpoints", "temperature_sampler"),
]


def example(name, *modules):
    """Modules of an example."""
    folder = Path(FOLDER) / name
    stubs = {absent: mock.MagicMock() for absent in ABSENT}
    for absent in ("clu", "tensorflow", "absl"):
        for part in ("metric_writers", "periodic_actions", "logging", "flags", "app"):
            stubs[f"{absent}.{part}"] = mock.MagicMock()
    with (
        mock.patch.dict(sys.modules, stubs),
        mock.patch.object(sys, "path", [str(folder), *sys.path]),
    ):
        for module in {path.stem for path in folder.glob("*.py")} - stubs.keys():
            sys.modules.pop(module, None)
        return SimpleNamespace(**{n: importlib.import_module(n) for n in modules})


class TrainState(train_state.TrainState):
    batch_stats: Any = None


def state_of(variables, tx):
    """In float64."""
    widen = lambda x: x.astype(float) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
    params, stats = (jax.tree.map(widen, variables.get(k)) for k in ("params", "batch_stats"))
    return TrainState.create(apply_fn=None, params=params, batch_stats=stats, tx=tx)


def over_devices(loss_fn):
    """The mean of ``(sum, weight)`` over the shards of devices, which have keys of their own."""

    def mean(params, batch, state, key):
        parts = jax.tree.map(lambda x: x.reshape(DEVICES, -1, *x.shape[1:]), batch)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(DEVICES))
        totals, weights = jax.vmap(loss_fn, (None, 0, 0))(params, parts, keys)
        return totals.sum() / weights.sum(), None

    return mean


def tokens(step):
    """Rows of uneven length: 0 is padding."""

    def rows(seed):
        rng = np.random.default_rng(seed)
        ids = rng.integers(1, 40, (16, 12))
        return np.where(np.arange(12)[None] < rng.integers(3, 13, (16, 1)), ids, 0)

    return {"inputs": rows(2 * step), "targets": rows(2 * step + 1)}


def transformer(name, dropout, tx):
    """Of lm1b or wmt: masks, dropout, a weighted loss."""
    code = example(name, "models", "train")
    config = code.models.TransformerConfig(
        **dict.fromkeys(("vocab_size", "output_vocab_size"), 40),
        **{"emb_dim": 16, "num_heads": 4, "num_layers": 2, "qkv_dim": 16, "mlp_dim": 32},
        **{"max_len": 12, "dtype": jnp.float64, "deterministic": not dropout},
        **dict.fromkeys(("dropout_rate", "attention_dropout_rate"), dropout),
    )
    lm = getattr(code.models, "TransformerLM" if name == "lm1b" else "Transformer")(config)
    inputs_of = lambda batch: list(batch.values())[: 1 if name == "lm1b" else 2]  # noqa: E731

    def make():
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        params = lm.init(keys, *inputs_of(tokens(0)))["params"]
        return state_of({"params": nn.meta.unbox(params)}, tx)

    def loss_fn(params, batch, key):
        inputs = inputs_of({k: batch[k] for k in ("inputs", "targets")})
        logits = lm.apply({"params": params}, *inputs, rngs={"dropout": key})
        weights = jnp.where(inputs[-1] > 0, 1, 0).astype(jnp.float64)
        # A sum and a weight.
        return code.train.compute_weighted_cross_entropy(logits, inputs[-1], weights)

    return make, loss_fn, over_devices(loss_fn), tokens


def resnet():
    """Of imagenet: its batch norms name the axis of pmap."""
    models = example("imagenet", "models").models
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

    def mean(params, batch, state, key):
        """On the axis of pmap, with one device on it."""
        run = jax.vmap(loss_fn, (None, 0, None), axis_name="batch")
        found = run(params, jax.tree.map(lambda x: x[None], batch), state.batch_stats)
        return jax.tree.map(lambda x: x[0], found)

    def images(step):
        rng = np.random.default_rng(step)
        scale = np.repeat(10.0 ** rng.uniform(-1, 0.5, 8), 2)[:, None, None, None]
        return {"image": rng.normal(size=(16, 16, 16, 3)) * scale, "label": rng.integers(0, 5, 16)}

    return make, loss_fn, mean, images


def vae():
    """With a random variable in the loss."""
    code = example("vae", "models", "train")
    net = code.models.model(4)

    def make():
        variables = net.init(jax.random.key(0), jnp.ones((2, 784)), jax.random.key(1))
        return state_of(variables, optax.adam(1e-3))

    def loss_fn(params, batch, key):
        x, mean, logvar = net.apply({"params": params}, batch, key)
        bce = code.train.binary_cross_entropy_with_logits(x, batch).mean()
        return bce + code.train.kl_divergence(mean, logvar).mean()

    data = lambda step: np.random.default_rng(step).uniform(size=(16, 784)).round()  # noqa: E731
    return make, loss_fn, over_devices(lambda *args: (loss_fn(*args), 1)), data


ADAMW, CAME = optax.adamw(1e-3, weight_decay=0.1), optax_ext.came(1e-4, weight_decay=0.1)
WEIGHTED = {"weighted": True, "rngs": True}
# What makes them, their blocks, options of the step.
EXAMPLES = {
    "lm1b": (lambda: transformer("lm1b", 0.1, ADAMW), "EncoderDecoder1DBlock", WEIGHTED),
    "wmt": (
        lambda: transformer("wmt", 0.1, CAME),
        ("Encoder1DBlock", "EncoderDecoder1DBlock"),
        WEIGHTED,
    ),
    "vae": (vae, ("Encoder", "Decoder"), {"rngs": True}),
    "imagenet": (resnet, (), {"model_state": "batch_stats"}),
}


@functools.cache
def alone(name):
    make, _, mean, data = EXAMPLES[name][0]()
    return train_alone(make, mean, data, STEPS, KEY)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_trains_as_on_one_device(name, stage):
    build, blocks, options = EXAMPLES[name]
    make, loss_fn, _, data = build()
    keys = [jax.random.key(KEY)] if "rngs" in options else []
    # The penalty of the ResNet's loss uses all parameters at once.
    warns = name == "imagenet" and stage == 3
    with (
        jax.numpy_rank_promotion("allow"),
        pytest.warns(UserWarning, match="no layer") if warns else contextlib.nullcontext(),
    ):
        zero = zero_of(stage, gathered_blocks=blocks)
        found = train(zero, make, loss_fn, *keys, data=data, steps=STEPS, **options)
        assert_same(found, alone(name))
