"""Devices that share each layer: the specs of the models, their steps, programs and memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sharding.plan import MODELS, kind_of, layer_costs
from sharding.plan.cost._parallel_plan import ParallelPlan
from sharding.plan.model._models import Decoder
from sharding.plan.search._build import build, mesh_axes

from .. import model as models

STEPS = 4
LLAMA = Decoder(2, 32, 4, 2, 64, 48, 8)  # groups of heads, and a gate
GPT = Decoder(2, 32, 4, 4, 64, 48, 8, gated=False, tied=True, biased=True)


@pytest.mark.parametrize("name", [name for name in MODELS if not MODELS[name].experts])
def test_shards_of_every_model_are_equal(name):
    """All matrices are sharded, but for tables whose tokens the devices do not divide."""
    model = MODELS[name]
    tensor = 5 if name == "gpt2-xl" else 4
    params, of_device = model.abstract(), model.abstract(shards=tensor)
    specs = model.specs("model", tensor)
    num = 0
    for x, own, spec in zip(*map(jax.tree.leaves, (params, of_device, specs)), strict=True):
        assert own.size * (tensor if "model" in tuple(spec) else 1) == x.size
        num += "model" in tuple(spec)
    layer = 7 if model.gated else 6 + 4  # biases of the sharded outputs
    tables = 0 if model.vocabulary % tensor else 1 if model.tied else 2
    assert num == layer + tables


def make_params():
    rng = np.random.default_rng(0)

    def draw(path, x):
        mean = 1.0 if path[-1].key == "scale" else 0.0
        return jnp.asarray(rng.normal(mean, 0.1, x.shape), jnp.float64)

    return jax.tree_util.tree_map_with_path(draw, GPT.abstract())


def batch(step):
    return np.random.default_rng(step).integers(0, 47, (8, GPT.length + 1))


@pytest.mark.usefixtures("x64")
def test_pipelines_of_shared_layers_are_exact():
    """All but the biases of keys, whose true gradient is zero."""
    tx = optax.adamw(1e-2)
    plan = ParallelPlan(*(2, 2, 2), microbatches=2, stage=1, recompute="save_qkv_proj")
    mesh = models.mesh_of(**mesh_axes(plan, "cpu:8"))
    built = build(plan, GPT, tx, mesh, layers=(1, 1), dtype="float64")
    pipeline, specs = built.loss, built.param_specs
    zero = dataclasses.replace(built.zero, min_shard_size=0)
    make = models.make_of(lambda: pipeline.stack(make_params()), tx)
    state = models.run(zero, make, tx, pipeline, batch, STEPS, specs)
    alone, _ = models.alone(models.make_of(make_params, tx), tx, GPT.make_loss(), batch, STEPS)
    params, expected = (
        x | {"layers": {k: v for k, v in x["layers"].items() if k != "key_bias"}}
        for x in (pipeline.unstack(state[0]), alone[0])
    )
    models.assert_close(params, expected, 1e-12)
    assert state[0]["layers"]["up"].sharding.spec[0] == "pipe"
    assert "model" in tuple(state[0]["layers"]["up"].sharding.spec)


@pytest.mark.parametrize("model", [dataclasses.replace(LLAMA, kv_heads=4), GPT], ids=str)
def test_activations_are_of_the_shared_heads_and_hidden_values(model):
    """Bytes of n devices are a + b / n: the stream is not divided, all of the scores are."""
    options = {"batch": 2, "dtype": jnp.float32, "recompute": False}
    every = [layer_costs(model, kind_of("h100"), tensor=n, **options) for n in (1, 2, 4)]
    one, two, four = (costs[1].activation_bytes for costs in every)
    divided = 2 * (one - two)
    assert divided == 4 * (two - four)
    tokens = 2 * model.length
    scores, hidden = tokens * model.length * model.heads, tokens * model.hidden
    # Softmax and its result; queries, keys, values and context; the MLP before its nonlinearity.
    assert divided >= 4 * (scores + 4 * tokens * model.width + hidden)
    stream = 4 * tokens * model.width
    assert one - divided >= 3 * stream  # the inputs of both norms, and of one matrix at least
    for costs, n in zip(every, (1, 2, 4), strict=True):
        assert costs[-1].activation_bytes == stream + 4 * tokens * model.vocabulary / n
        table = 4 * model.vocabulary * model.width
        assert costs[-1].param_bytes == every[0][-1].param_bytes - table * (1 - 1 / n)
        assert costs[1].forward < every[0][1].forward or n == 1
        again = layer_costs(model, kind_of("h100"), tensor=n, **options | {"recompute": True})
        assert again[1].activation_bytes == stream
