"""The page about long sequences: its code against one device, in float64, and its wire."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sharding as shd

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "how_to" / "long_sequences.md"


def page_on(num_devices):
    """The names that the page's code defines, on the first devices, without its last block."""
    *blocks, _ = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    names = {}
    for block in blocks:
        exec(block, names)
        if "mesh" in names and names["mesh"].size != num_devices:
            devices = jax.devices()[:num_devices]
            sizes = (num_devices // 2, 2)
            names["mesh"] = jax.make_mesh(sizes, ("data", "sequence"), devices=devices)
    return names


def on_one_device(page, params, batches, tx):
    """Losses and parameters of ordinary steps, with attention of whole sequences."""
    own = page | {"over_sequence": lambda attention: attention}

    def whole(q, k, v):
        y, total, _ = page["causal"](q, k, v)
        return y / total

    make_loss = type(page["make_loss"])(page["make_loss"].__code__, own)
    grad = jax.jit(jax.value_and_grad(make_loss(whole)))
    state, losses = tx.init(params), []
    for tokens in batches:
        value, grads = grad(params, tokens)
        updates, state = tx.update(grads, state, params)
        params, losses = optax.apply_updates(params, updates), [*losses, float(value)]
    return losses, jax.device_get(params)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("name", "stage"), [("ring", 3), ("ulysses", 2)])
def test_the_page_is_exact_and_sends_what_theory_says(name, stage):
    page, tx = page_on(4), optax.adam(1e-2)
    rng = np.random.default_rng(0)
    width, heads, layers, length = 16, 4, 2, 16
    shapes = {x: (layers, width, heads, width // heads) for x in ("q", "k", "v")}
    shapes |= {"out": (layers, heads, width // heads, width)}
    shapes |= {"up": (layers, width, 64), "down": (layers, 64, width)}
    shapes = {"embed": (64, width), "head": (width, 64), "layers": shapes}
    draw = {"is_leaf": lambda x: isinstance(x, tuple)}
    params = jax.tree.map(lambda shape: jnp.asarray(0.3 * rng.normal(size=shape)), shapes, **draw)
    batches = rng.integers(0, 64, (3, 4, length + 1))
    losses, want = on_one_device(page, params, batches, tx)

    zero = shd.Zero(page["mesh"], stage, axis="data", min_shard_size=16)
    state = zero.init(lambda: (params, tx.init(params)), tx=tx)
    step = zero.train_step(page["make_loss"](page[name]), tx=tx)
    found = shd.audit(step.lower(state, zero.put(batches[0])), mesh=page["mesh"]).ledger().sent
    # Of each array of a layer a device has 2 rows of 8 tokens.
    array = 2 * (length // 2) * width * 8
    of_attention = {"ring": ("collective-permute", 2), "ulysses": ("all-to-all", 4 / 2)}
    op, times = of_attention[name]
    labels = 2 * 8 * (name == "ring")  # of each row the first one, to the device before
    assert found[f"{op} over sequence"] == 2 * layers * times * array + labels
    assert step.loss_program(state, zero.put(batches[0])).per_device
    for tokens, loss in zip(batches, losses, strict=True):
        state, metrics = step(state, zero.put(tokens))
        assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-13)
    for have, x in zip(jax.tree.leaves(state[0]), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(have, x, atol=1e-12)
