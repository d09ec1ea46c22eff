"""Devices that share each layer: the specs of the models, their steps, programs and memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sharding as shd
from sharding.plan import MODELS, kind_of, layer_costs
from sharding.plan._models import Decoder
from sharding.plan.fastest._plan_file import PlanFile
from sharding.plan.timing._parallel_plan import ParallelPlan

from .. import model as models

STEPS, SLOW = 4, pytest.mark.slow
LLAMA = Decoder(2, 32, 4, 2, 64, 48, 8)  # groups of heads, and a gate
GPT = Decoder(2, 32, 4, 4, 64, 48, 8, gated=False, tied=True, biased=True)
MODEL_OF = {
    "llama": LLAMA,
    "gpt": GPT,
    "unrolled": dataclasses.replace(LLAMA, scan=False),
    "odd tokens": dataclasses.replace(GPT, vocabulary=47),
}


# --- Specs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
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


def test_specs_of_layers_that_are_not_stacked():
    stacked, alone = LLAMA.specs(), MODEL_OF["unrolled"].specs()
    assert len(alone["layers"]) == 2
    for name, spec in alone["layers"][0].items():
        if "norm" not in name:
            assert tuple(stacked["layers"][name]) == (None, *spec)
    with pytest.raises(ValueError, match=r"4 devices cannot share a model with kv_heads=2"):
        LLAMA.specs(shards=4)


# --- Steps ----------------------------------------------------------------------------------------


def make_state(model, tx):
    rng = np.random.default_rng(0)
    shapes = model.abstract()

    def draw(path, x):
        mean = 1.0 if path[-1].key == "scale" else 0.0
        return jnp.asarray(rng.normal(mean, 0.1, x.shape), jnp.float64)

    def make():
        params = jax.tree_util.tree_map_with_path(draw, shapes)
        return params, tx.init(params)

    return make


def batch(step):
    return np.random.default_rng(step).integers(0, 47, (8, LLAMA.length + 1))


@functools.cache
def reference(name):
    """The same steps on one device, by plain jax and optax."""
    tx, loss = optax.adamw(1e-2), MODEL_OF[name].make_loss()
    params, opt_state = make_state(MODEL_OF[name], tx)()

    @jax.jit
    def step(params, opt_state, tokens):
        updates, opt_state = tx.update(jax.grad(loss)(params, tokens), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for i in range(STEPS):
        params, opt_state = step(params, opt_state, batch(i))
    return params


def distance_of(name, params):
    expected = reference(name)
    if MODEL_OF[name].biased:  # their true gradient is zero
        params, expected = (
            x | {"layers": {k: v for k, v in x["layers"].items() if k != "key_bias"}}
            for x in (params, expected)
        )
    return models.worst_leaf(params, expected)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("gpt", 3),
        *(pytest.param(*x, marks=SLOW) for x in (("llama", 2), ("unrolled", 2), ("odd tokens", 1))),
    ],
)
def test_shared_layers_are_exact(name, stage):
    model, tx = MODEL_OF[name], optax.adamw(1e-2)
    mesh = jax.make_mesh((4, 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
    zero = shd.Zero(mesh, stage=stage, min_shard_size=0)
    specs = model.specs("model", 2)
    state = zero.init(make_state(model, tx), tx=tx, param_specs=specs)
    step = zero.train_step(model.make_loss(zero.gathered(model.apply_layer)), tx=tx, microbatches=2)
    for i in range(STEPS):
        state, _ = step(state, zero.put(batch(i)))
    distance, leaf = distance_of(name, state[0])
    assert distance < 1e-12, leaf
    layers = state[0]["layers"]
    up = (layers if model.scan else layers[0])["up"]
    assert "model" in tuple(up.sharding.spec)
    held = model.abstract(shards=2)
    assert state[0]["embed"].addressable_shards[0].data.shape[0] == held["embed"].shape[0]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("gpt", {"stage": 1, "recompute": "save_qkv_proj"}),
        pytest.param("llama", {"stage": 3, "schedule": "zb-h1", "recompute": "none"}, marks=SLOW),
        pytest.param("gpt", {"stage": 2, "schedule": "1f1b"}, marks=SLOW),
    ],
)
def test_pipelines_of_shared_layers_are_exact(name, fields):
    model, tx = MODEL_OF[name], optax.adamw(1e-2)
    plan = ParallelPlan(*(2, 2, 2), microbatches=2, **fields)
    file = PlanFile("", "", "cpu:8", model.length, "float64", (1, 1), plan, {})
    auto = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.make_mesh(tuple(file.mesh_axes.values()), tuple(file.mesh_axes), auto)
    mesh = file.arranged(mesh)
    pipeline = file.pipeline(mesh, model)
    zero = dataclasses.replace(file.zero(mesh), min_shard_size=0)
    make = make_state(model, tx)
    specs = pipeline.param_specs(pipeline.stack(model.abstract()), file.param_specs(model))
    state = zero.init(lambda: pipeline.stack(make()), tx=tx, param_specs=specs)
    step = zero.train_step(pipeline.loss, tx=tx, weighted=True)
    for i in range(STEPS):
        state, _ = step(state, zero.put(batch(i)))
    distance, leaf = distance_of(name, pipeline.unstack(state[0]))
    assert distance < 1e-12, leaf
    assert state[0]["layers"]["up"].sharding.spec[0] == "pipe"
    assert "model" in tuple(state[0]["layers"]["up"].sharding.spec)


# --- Memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_activations_are_of_the_shared_heads_and_hidden_values(name):
    """Bytes of n devices are a + b / n: the stream is not divided, all of the scores are."""
    model = dataclasses.replace(MODEL_OF[name], kv_heads=4)
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
        assert costs[1].forward == every[0][1].forward / n
        again = layer_costs(model, kind_of("h100"), tensor=n, **options | {"recompute": True})
        assert again[1].activation_bytes == stream
