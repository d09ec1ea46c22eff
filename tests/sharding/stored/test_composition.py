"""Forms with models of frameworks, with other state of their adapters, and with plans."""

import dataclasses
import math
import re

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import optax_ext
import sharding as shd
from sharding import stored
from sharding.plan import Decoder

from ...compilers import need
from ...flax_nnx import needs_nnx, nnx
from .. import model
from .test_stored import (
    KEY,
    LAYERS,
    arrays,
    batch,
    checkpointed,
    differentiable,
    layer,
    of_decoded,
    scanned,
    trained_b,
)

WIDTH, HIDDEN = 64, 128
NF4_LORA = stored.frozen(4), stored.lora(4, alpha=8)
X = np.random.default_rng(0).normal(size=(8, WIDTH))


def of_nnx():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs, param_dtype=jnp.float64)
            self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs, param_dtype=jnp.float64)

        def __call__(self, x):
            return x + self.down(jnp.tanh(self.up(x)))

    graph, params = nnx.split(Model(nnx.Rngs(0)))
    return params, "kernel", lambda params, x: jnp.mean(nnx.merge(graph, params)(x) ** 2)


def of_linen():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            h = nn.Dense(HIDDEN, param_dtype=jnp.float64)(x)
            return x + nn.Dense(WIDTH, param_dtype=jnp.float64)(jnp.tanh(h)), None

    split = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
    stack = nn.scan(nn.remat(Layer), length=3, **split)()
    params = stack.init(jax.random.key(0), X, None)
    return params, "kernel", lambda params, x: jnp.mean(stack.apply(params, x, None)[0] ** 2)


def of_equinox():
    class Model(eqx.Module):
        up: eqx.nn.Linear
        down: eqx.nn.Linear

        def __init__(self, up, down):
            self.up = eqx.nn.Linear(WIDTH, HIDDEN, dtype=jnp.float64, key=up)
            self.down = eqx.nn.Linear(HIDDEN, WIDTH, dtype=jnp.float64, key=down)

        def __call__(self, x):
            return x + self.down(jnp.tanh(self.up(x)))

    both = Model(*jax.random.split(jax.random.key(0)))
    params, static = eqx.partition(both, eqx.is_array)
    run = lambda params, x: jnp.mean(jax.vmap(eqx.combine(params, static))(x) ** 2)  # noqa: E731
    return params, "weight", run


@pytest.mark.parametrize("framework", [pytest.param(of_nnx, marks=needs_nnx), of_linen, of_equinox])
def test_models_of_frameworks(framework, x64):
    """Value and gradients of adapters are those of what is decoded; the step takes the state."""
    params, matrices, loss = framework()
    params = trained_b(stored.store(params, {matrices: NF4_LORA}, KEY))
    found, chosen = differentiable(stored.loss_of(loss), params)
    expected, _ = differentiable(of_decoded(loss), params)
    found = jax.jit(jax.value_and_grad(found))(chosen, X)
    expected = jax.jit(jax.value_and_grad(expected))(chosen, X)
    model.assert_close(found, expected, 1e-12)
    zero, tx = model.zero_on(8, stage=3), optax.masked(optax.sgd(1.0), stored.trained)
    step = zero.train_step(stored.loss_of(loss), tx=tx, trainable=stored.trained)
    (after, _), metrics = step(zero.init(lambda: (params, tx.init(params)), tx=tx), zero.put(X))
    np.testing.assert_allclose(metrics["loss"], expected[0], rtol=1e-12)
    moved = jax.tree.map(
        lambda own, x, y: np.subtract(x, y) if own else None, stored.trained(params), params, after
    )
    model.assert_close(moved, expected[1], 1e-11)


OF_ADAPTERS = {
    "master weights": optax_ext.master_weights(optax.adamw(1e-2)),
    "8 bits": optax_ext.adamw8bit(1e-2),
}


@pytest.mark.parametrize("name", OF_ADAPTERS)
@pytest.mark.parametrize("update", ["after", "backward"])
def test_state_is_of_adapters_alone(name, update):
    """And eight devices do what one does."""
    tx = optax.masked(OF_ADAPTERS[name], stored.trained)
    forms = {"layers/(up|down)": NF4_LORA, "embed|head": stored.frozen(8)}
    params = trained_b(stored.store(arrays(np.float32), forms, KEY))
    runs = []
    for devices, how in ((8, update), (1, "after")):
        zero = model.zero_on(devices, stage=2 if devices > 1 else 0, min_shard_size=0)
        options = {"tx": tx, "trainable": stored.trained, "microbatches": 2 if devices == 1 else 1}
        step = zero.train_step(stored.loss_of(checkpointed), update=how, **options)
        state = zero.init(lambda: (params, tx.init(params)), tx=tx)
        for i in range(2):
            state, metrics = step(state, zero.put(batch(i)))
        runs.append((jax.device_get(state[0]), metrics["loss"]))
        adapters = jax.tree.leaves(jax.tree.map(lambda own, x: x if own else None, *_both(params)))
        held = sum(x.size for x in jax.tree.leaves(state[1]))
        assert held < 4 * sum(x.size for x in adapters)
    np.testing.assert_allclose(runs[0][1], runs[1][1], rtol=1e-5)
    for x, y in zip(*(jax.tree.leaves(stored.merge(p)) for p, _ in runs), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-4)


def _both(params, tree=None):
    return stored.trained(params), params if tree is None else tree


def test_averages_of_adapters():
    """Of what is trained alone: an average of codes would be none."""
    params = stored.store(arrays(np.float32), {"layers/(up|down)": NF4_LORA}, KEY)
    other = trained_b(params)
    average = jax.tree.map(
        lambda own, new, old: optax.incremental_update(new, old, 0.25) if own else old,
        *(stored.trained(params), other, params),
    )
    zero = model.zero_on(8, stage=3)
    found = zero.eval_step(stored.loss_of(checkpointed))((zero.place(average), None), batch())
    quarter = jax.tree.map(
        lambda x: dataclasses.replace(x, b=x.b / 4) if isinstance(x, stored.Adapted) else x,
        other,
        is_leaf=lambda x: isinstance(x, stored.Form),
    )
    expected = checkpointed(stored.merge(quarter), batch())
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_checkpoint_of_what_is_trained(tmp_path):
    """Orbax saves the base once and adapters, and restores both as sharded."""
    params = trained_b(stored.store(arrays(np.float32), {"layers/(up|down)": NF4_LORA}, KEY))
    params = model.zero_on(8, stage=3, min_shard_size=0).place(params)
    types = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )

    def part(is_trained, tree):
        return jax.tree.map(lambda own, x: x if own == is_trained else None, *_both(params, tree))

    with ocp.StandardCheckpointer() as checkpointer:
        for name, is_trained in (("base", False), ("adapters", True)):
            checkpointer.save(tmp_path / name, part(is_trained, params))
        checkpointer.wait_until_finished()
        base = checkpointer.restore(tmp_path / "base", part(False, types))
        adapters = checkpointer.restore(tmp_path / "adapters", part(True, types))
    is_none = lambda x: x is None  # noqa: E731
    joined = jax.tree.map(lambda x, y: y if x is None else x, base, adapters, is_leaf=is_none)
    assert jax.tree.structure(joined) == jax.tree.structure(params)
    for x, y in zip(jax.tree.leaves(joined), jax.tree.leaves(params), strict=True):
        assert x.sharding == y.sharding
        np.testing.assert_array_equal(x, y)
    sizes = [sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in (base, adapters)]
    assert sizes[1] < 0.4 * sizes[0]


def test_stages_of_a_pipeline_decode_their_layers(x64):
    """A block merges what it gets: codes are sharded over stages, and gathered at stage 3."""
    params = trained_b(stored.store(arrays(), {"layers/(up|down)": NF4_LORA}, KEY))
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, LAYERS), ("data", "pipe"), auto, devices=jax.devices()[: 2 * LAYERS])

    def head(shared, x, tokens):
        logits = x @ shared["head"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.sum(), jnp.asarray(losses.size, losses.dtype)

    pipeline = shd.Pipeline(
        mesh,
        shd.pipeline.one_f_one_b(LAYERS, 4),
        num_layers=LAYERS,
        embed=lambda shared, tokens: shared["embed"][tokens[:, :-1]],
        block=lambda p, x, _: layer(x, stored.merge(p)),
        head=head,
    )
    zero = shd.Zero(mesh, stage=3, min_shard_size=0)
    tx = optax.masked(optax.sgd(1.0), stored.trained)
    specs = pipeline.param_specs(params)
    state = zero.init(lambda: (params, tx.init(params)), tx=tx, param_specs=specs)
    step = zero.train_step(pipeline, tx=tx, trainable=stored.trained)
    (after, _), metrics = step(state, zero.put(batch()))
    fn, chosen = differentiable(of_decoded(scanned), params)
    value, grads = jax.jit(jax.value_and_grad(fn))(chosen, batch())
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-12)
    moved = jax.tree.map(
        lambda own, x, y: np.subtract(x, y) if own else None, stored.trained(params), params, after
    )
    model.assert_close(moved, grads, 1e-11)


def test_descriptions_estimates_and_plans_of_forms():
    params = stored.store(arrays(np.float32), {"layers/(up|down)": NF4_LORA}, KEY)
    tx = optax.masked(optax.adamw(1e-3), stored.trained)
    zero = model.zero_on(8, stage=3, min_shard_size=0)
    state = params, tx.init(params)
    described = zero.describe(state, tx=tx)
    plan = shd.plan.estimate(params, tx, zero, gathered_once="^(?!layers/)")
    assert plan.num_params == sum(math.prod(x.shape) for x in jax.tree.leaves(arrays(np.float32)))
    stage = plan.stage("stage 3")
    assert stage.params == described.bytes_per_device["params"]
    # Codes, masks and others are gathered twice, a byte of each eighth but one's own.
    step = zero.train_step(stored.loss_of(checkpointed), tx=tx, trainable=stored.trained)
    lowered = step.lower(zero.abstract_state(lambda: state, tx=tx), zero.put(batch()))
    sent = shd.audit(lowered.compile(), mesh=zero.mesh).wire_bytes
    np.testing.assert_allclose(stage.wire, sent, rtol=0.05)


def test_the_dtype_of_the_loss_is_not_that_of_codes():
    precision = shd.Precision(compute=jnp.bfloat16)
    found = [precision.of_loss(jnp.dtype(x)) for x in ("float32", "uint32", "bool")]
    assert found == [jnp.bfloat16, jnp.uint32, jnp.bool_]


def test_activations_of_a_loss_of_forms_are_planned():
    params = trained_b(stored.store(arrays(np.float32), {"layers/(up|down)": NF4_LORA}, KEY))
    fn = stored.loss_of(checkpointed)
    planned = shd.remat.plan(fn, params, batch(), "1MiB")
    run = lambda fn: jax.value_and_grad(differentiable(fn, params)[0])  # noqa: E731
    chosen = differentiable(fn, params)[1]
    model.assert_close(run(planned)(chosen, batch()), run(fn)(chosen, batch()), 1e-5)


def test_codes_are_streamed_as_they_are_on_tpus():
    """No stack is copied to be stored otherwise: each layer of it is sliced in host memory."""
    need("v5e:1x1")
    decoder = Decoder(8, 1024, 8, 8, 1024, 256, 128)
    zero = shd.Zero(shd.targets.mesh("v5e:1x1", (1,), ("data",)), offload="all")
    tx = optax.masked(optax.adamw(1e-4), stored.trained)

    def make_state():
        forms = {"^layers/(query|key|value|out|gate|up|down)$": NF4_LORA}
        params = stored.store(decoder.init(jnp.bfloat16), forms, KEY)
        return params, tx.init(params)

    loss = stored.loss_of(decoder.make_loss(jax.checkpoint(decoder.apply_layer)))
    step = zero.train_step(loss, tx=tx, trainable=stored.trained)
    compiled = step.lower(zero.abstract_state(make_state, tx=tx), decoder.batch(1)).compile()
    text = compiled.as_text()
    assert "u32[8,1024,128]" in text
    assert not re.search(r"= \(?u32\[8,\d+,\d+\][^=]* copy", text)
