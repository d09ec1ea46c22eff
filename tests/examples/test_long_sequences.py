"""Ulysses and ring attention against one device, in float64, and what they send."""

import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sharding as shd

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "long_sequences.py"
LENGTH, WIDTH, LAYERS = 16, 16, 2


def on_one_device(example, params, batches, tx):
    """Losses and parameters of ordinary steps, with attention of whole sequences."""

    def whole(q, k, v):
        y, total, _ = example["causal"](q, k, v)
        return y / total

    grad = jax.jit(jax.value_and_grad(example["make_loss"](whole)))
    state, losses = tx.init(params), []
    for tokens in batches:
        value, grads = grad(params, tokens)
        updates, state = tx.update(grads, state, params)
        params, losses = optax.apply_updates(params, updates), [*losses, float(value)]
    return losses, jax.device_get(params)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("name", "stage"), [("ring", 3), ("ulysses", 2)])
def test_exact_and_sends_what_theory_says(name, stage):
    """With a head in tiles; each part of a layer's attention goes over two devices."""
    example, tx = runpy.run_path(str(EXAMPLE)), optax.adam(1e-2)
    params = example["make_params"](jax.random.key(0), width=WIDTH, layers=LAYERS)
    params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
    batches = np.random.default_rng(0).integers(0, 64, (3, 4, LENGTH + 1))
    losses, want = on_one_device(example, params, batches, tx)

    mesh = jax.make_mesh((2, 2), ("data", "sequence"), devices=jax.devices()[:4])
    zero = shd.Zero(mesh, stage, axis="data", min_shard_size=16)
    state = zero.init(lambda: (params, tx.init(params)), tx=tx)
    loss = example["make_loss"](example["over_sequence"](example[name]))
    step = zero.train_step(loss, tx=tx)
    found = shd.audit(step.lower(state, zero.put(batches[0])), mesh=mesh).ledger().sent
    array = 2 * (LENGTH // 2) * WIDTH * 8  # of a device: 2 rows of 8 tokens
    op, arrays = {"ring": ("collective-permute", 2), "ulysses": ("all-to-all", 4 / 2)}[name]
    labels = 2 * 8 * (name == "ring")  # of each row the first one, to the device before
    assert found[f"{op} over sequence"] == 2 * LAYERS * arrays * array + labels
    assert step.loss_program(state, zero.put(batches[0])).per_device
    for tokens, loss in zip(batches, losses, strict=True):
        state, metrics = step(state, zero.put(tokens))
        assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-13)
    for have, x in zip(jax.tree.leaves(state[0]), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(have, x, atol=1e-12)
