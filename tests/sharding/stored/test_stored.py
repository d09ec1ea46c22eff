"""Parameters in few bits, adapted or masked, against the same loss of what they decode to."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from sharding import stored

from .. import model

LAYERS, WIDTH, HIDDEN, WORDS, STEPS = 3, 64, 128, 64, 3
KEY = jax.random.key(0)
NF4_LORA = stored.frozen(4), stored.lora(4, alpha=8)


def is_form(x):
    return isinstance(x, stored.Form)


def arrays(dtype=np.float64):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) * shape[-2] ** -0.5, dtype)  # noqa: E731
    layers = {"up": draw(LAYERS, WIDTH, HIDDEN), "down": draw(LAYERS, HIDDEN, WIDTH)}
    layers["scale"] = jnp.ones((LAYERS, WIDTH), dtype)
    return {"embed": draw(WORDS, WIDTH), "layers": layers, "head": draw(WIDTH, WORDS)}


def trained_b(params):
    """With B that is not zero, as in the middle of a training run."""

    def of(x):
        if not isinstance(x, stored.Adapted):
            return x
        noise = np.random.default_rng(x.b.size).normal(size=x.b.shape) / 10
        return dataclasses.replace(x, b=jnp.asarray(noise, x.b.dtype))

    return jax.tree.map(of, params, is_leaf=is_form)


def layer(x, p):
    return x + jnp.tanh((x * p["scale"][None, None]) @ p["up"]) @ p["down"]


def scanned(params, batch):
    x = params["embed"][batch[:, :-1]]
    x, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])
    logits = x @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def checkpointed(params, batch):
    x = params["embed"][batch[:, :-1]]
    step = jax.checkpoint(lambda x, p: (layer(x, p), None))
    x, _ = jax.lax.scan(step, x, params["layers"])
    return jnp.mean((x @ params["head"]) ** 2)


def numbered(params, batch):
    """Layers of a stack by their indices, and casts of all of it."""
    x = params["embed"][batch[:, :-1]]
    layers = jax.tree.map(lambda w: w.astype(jnp.result_type(float)), params["layers"])
    for i in range(LAYERS):
        x = layer(x, jax.tree.map(lambda w, i=i: w[i], layers))
    return jnp.mean((x @ params["head"]) ** 2)


def tied(params, batch):
    """A table that is looked up; products over rows or columns, with the form first or last."""

    def product(x, y, *dims):
        return jax.lax.dot_general(x, y, (tuple((d,) for d in dims), ((), ())))

    table = params["embed"]
    x = table[batch[:, :-1]]
    for i in range(LAYERS):
        up, down = (params["layers"][name][i] for name in ("up", "down"))
        hidden = product(up, product(down, x @ up, 0, 2), 0, 0)  # (hidden, batch, length)
        x = x + product(hidden, down, 0, 0)
    scores = product(table, x, 1, 2) + jnp.moveaxis(product(x, table, 2, 1), -1, 0)
    return jnp.mean((x @ table.T) ** 2) + jnp.mean(scores**3)


def batch(step=0):
    return np.random.default_rng(step).integers(0, WORDS, (16, 9))


def differentiable(loss, params):
    """A loss of what is trained alone."""
    mask = stored.trained(params)
    chosen = jax.tree.map(lambda m, x: x if m else None, mask, params)

    def of_chosen(chosen, batch):
        full = jax.tree.map(
            lambda m, x, y: y if m else x, mask, params, chosen, is_leaf=lambda x: x is None
        )
        return loss(full, batch)

    return of_chosen, chosen


def of_decoded(loss):
    return lambda params, batch: loss(stored.merge(params), batch)


FORMS = {
    "NF4": {"layers/(up|down)": stored.frozen(4), "head": stored.lora(4)},
    "QLoRA": {"layers/(up|down)|embed": NF4_LORA, "head": stored.frozen(8)},
    "linear": {"layers/(up|down)": (stored.frozen(optax_ext.Linear(4)), stored.lora(4))},
    "fp8": {"layers/(up|down)|head": (stored.frozen(optax_ext.Float8()), stored.lora(4))},
    "masked": {"layers/up|head": stored.masked(0.5), "layers/down": stored.lora(4)},
    "DoRA": {
        "layers/(up|down)": (stored.frozen(4), stored.lora(4, dora=True)),
        "embed|head": stored.lora(4, dora=True),
    },
}


@pytest.mark.parametrize("loss", [scanned, checkpointed, numbered, tied])
@pytest.mark.parametrize("forms", FORMS.values(), ids=FORMS)
def test_value_and_gradients_are_those_of_what_is_decoded(loss, forms, x64):
    params = trained_b(stored.store(arrays(), forms, KEY))
    found, chosen = differentiable(stored.loss_of(loss), params)
    expected, _ = differentiable(of_decoded(loss), params)
    found = jax.jit(jax.value_and_grad(found))(chosen, batch())
    model.assert_close(found, jax.jit(jax.value_and_grad(expected))(chosen, batch()), 1e-12)


@pytest.mark.parametrize("loss", [scanned, checkpointed, numbered])
def test_one_layer_is_decoded_at_a_time(loss):
    """No loop of the gradient takes or gives the stack as the loss sees it, nor its gradient."""
    params = stored.store(arrays(np.float32), FORMS["QLoRA"], KEY)
    fn, chosen = differentiable(stored.loss_of(loss), params)
    compiled = jax.jit(jax.grad(fn)).lower(chosen, batch()).compile()
    for shape in ((WIDTH, HIDDEN), (HIDDEN, WIDTH)):
        for dtype in ("f32", "u8", "s8", "pred"):
            assert f"{dtype}[{LAYERS},{shape[0]},{shape[1]}]" not in compiled.as_text()


TX = optax.masked(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)), stored.trained)


@pytest.mark.parametrize(
    ("stage", "update", "microbatches", "offload"),
    [
        (0, "after", 1, None),
        (2, "after", 2, None),
        (3, "after", 1, None),
        (3, "backward", 2, None),
        (1, "backward", 2, "all"),
        (3, "backward", 1, "all"),
    ],
)
def test_steps_are_those_of_one_device(stage, update, microbatches, offload, x64):
    zero = model.zero_on(8, stage=stage, offload=offload, offload_min_size=0)
    params = trained_b(stored.store(arrays(), FORMS["QLoRA"], KEY))
    state = zero.init(lambda: (params, TX.init(params)), tx=TX)
    options = {"tx": TX, "update": update, "microbatches": microbatches}
    step = zero.train_step(stored.loss_of(scanned), **options)
    alone, opt_state = params, TX.init(params)
    for i in range(STEPS):
        state, metrics = step(state, zero.put(batch(i)))
        fn, chosen = differentiable(of_decoded(scanned), alone)
        value, grads = jax.value_and_grad(fn)(chosen, batch(i))
        found, treedef = iter(jax.tree.leaves(grads)), jax.tree.structure(alone)
        both = zip(jax.tree.leaves(stored.trained(alone)), jax.tree.leaves(alone), strict=True)
        grads = treedef.unflatten(next(found) if m else jnp.zeros_like(x) for m, x in both)
        updates, opt_state = TX.update(grads, opt_state, alone)
        alone = optax.apply_updates(alone, updates)
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-12)
    model.assert_close(state, (alone, opt_state), 1e-11)
    kinds = {(x.ndim > 2, x.sharding.memory_kind) for x in jax.tree.leaves(state)}
    assert kinds == {(True, "pinned_host" if offload else "device"), (False, "device")}
    # Codes are sharded at stage 3, and neither they nor their scales have a state.
    codes = state[0]["layers"]["up"].base.codes
    assert codes.addressable_shards[0].data.size * (8 if stage == 3 else 1) == codes.size
    sizes = {x.shape for x in jax.tree.leaves(state[1]) if x.ndim}
    assert sizes == {x.shape for x in jax.tree.leaves(differentiable(scanned, params)[1])}


@pytest.mark.parametrize("embed", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_loops_of_frozen_layers_alone_are_streamed(embed, microbatches, x64):
    """With trained parameters before the loop and behind it, or behind it alone."""
    params = stored.store(arrays(), {"layers/(up|down)": stored.frozen(4)}, KEY)
    trainable = {"embed": embed, "layers": False, "head": True}
    tx = optax.masked(optax.adamw(1e-2), trainable)
    runs = []
    for options in ({"offload": "all", "offload_min_size": 0}, {}):
        zero = model.zero_on(8, stage=2, **options)
        state = zero.init(lambda: (params, tx.init(params)), tx=tx)
        more = {"trainable": trainable, "microbatches": microbatches}
        step = zero.train_step(stored.loss_of(scanned), tx=tx, **more)
        for i in range(STEPS):
            state, metrics = step(state, zero.put(batch(i)))
        runs.append((jax.device_get(state), metrics["loss"]))
    model.assert_close(*runs, 1e-11)


# --- Forms ----------------------------------------------------------------------------------------


def nf4(w):
    """NF4 of one matrix in NumPy: QLoRA's quantiles, scales less their mean, in 8 bits."""
    quantile = jax.scipy.stats.norm.ppf
    offset = (1 - 1 / 32 + 1 - 1 / 30) / 2
    levels = [*quantile(np.linspace(offset, 0.5, 9)[:-1]), 0]
    levels = np.sort([*levels, *-quantile(np.linspace(offset, 0.5, 8)[:-1])])
    levels = levels / levels.max()
    blocks = np.asarray(w, np.float64).reshape(-1, 64)
    largest = np.abs(blocks).max(-1)
    mean = largest.mean()
    padded = np.pad(largest - mean, (0, -len(largest) % 256)).reshape(-1, 256)
    unit = np.maximum(np.abs(padded).max(-1, keepdims=True) / 127, 1e-300)
    scale = ((np.round(padded / unit) * unit).reshape(-1)[: len(largest)] + mean).clip(0)
    nearest = np.abs(blocks[..., None] - scale[:, None, None] * levels).argmin(-1)
    return (levels[nearest] * scale[:, None]).reshape(w.shape)


@pytest.mark.parametrize("shape", [(64, 64), (5, 192), (300, 128)])
def test_nf4_is_that_of_the_paper(shape, x64):
    rng = np.random.default_rng(0)
    w = rng.normal(size=shape) * 10.0 ** rng.uniform(-2, 0, (shape[0], 1))
    found = stored.store({"w": jnp.asarray(w)}, {"w": stored.frozen(4)})["w"]
    np.testing.assert_allclose(found.decode(), nf4(w), rtol=0, atol=1e-6 * np.abs(w).max())
    assert found.shape == shape
    assert not np.asarray(
        stored.store({"w": jnp.zeros(shape)}, {"w": stored.frozen(4)})["w"].decode()
    ).any()


def test_a_stack_is_encoded_array_by_array_on_the_host_or_a_device():
    rng = np.random.default_rng(0)
    w = rng.normal(size=(2, 3, 64, 128)).astype(np.float32)
    for form in (stored.frozen(4), stored.frozen(8), stored.frozen(optax_ext.Linear(4))):
        on_device = stored.store({"w": jnp.asarray(w)}, {"w": form})["w"]
        on_host = stored.store({"w": w}, {"w": form})["w"]
        assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(on_host))
        # Compiled, a few codes round to the level beside.
        codes = jax.tree.leaves(on_host)[0], jax.tree.leaves(on_device)[0]
        assert np.mean(codes[0] != codes[1]) < 1e-3
        alone = stored.store({"w": jnp.asarray(w[1, 2])}, {"w": form})["w"]
        np.testing.assert_array_equal(on_device.decode()[1, 2], alone.decode())
        assert on_device.shape == w.shape
        assert on_device.nbytes == sum(x.nbytes for x in jax.tree.leaves(on_host))


def test_kernels_of_more_dims_have_adapters_of_two():
    """As those of attention in nnx and linen: (width, heads, head_dim) and its inverse."""
    rng = np.random.default_rng(0)
    params = {"in": rng.normal(size=(32, 4, 64)), "out": rng.normal(size=(4, 64, 32))}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    forms = {"in": stored.lora(2, columns=2), "out": stored.lora(2, rows=2)}
    made = trained_b(stored.store(params, forms, KEY))

    def loss(p, x):
        return jnp.sum(jnp.einsum("bhk,hkd->bd", jnp.einsum("bd,dhk->bhk", x, p["in"]), p["out"]))

    x = jnp.asarray(rng.normal(size=(8, 32)), jnp.float32)
    np.testing.assert_allclose(
        stored.loss_of(loss)(made, x), loss(stored.merge(made), x), rtol=1e-4
    )
    products = str(jax.make_jaxpr(stored.loss_of(loss))(made, x))
    assert "f32[2,4,64]" in products  # B of the first, which no sum is formed with


def test_adapters_have_the_names_of_peft():
    params = trained_b(stored.store(arrays(np.float32), FORMS["QLoRA"], KEY))
    named, _ = stored.peft(params, lambda path, index: ".".join(["model", *map(str, index), path]))
    x = np.random.default_rng(0).normal(size=(5, WIDTH))
    prefix = "base_model.model.model.1.layers/up"
    a, b = (named[f"{prefix}.lora_{part}.weight"] for part in "AB")
    up = params["layers"]["up"]
    assert (a.shape, b.shape) == ((4, WIDTH), (HIDDEN, 4))
    added = (stored.merge(params)["layers"]["up"] - up.base.decode())[1]
    np.testing.assert_allclose(8 / 4 * (x @ a.T) @ b.T, x @ added, rtol=1e-4, atol=1e-5)
    assert len(named) == 2 * (2 * LAYERS + 1)


def test_dropout_is_of_the_input_of_an_adapter(x64):
    """With the same keys it is what it says, and each layer has its own mask."""
    params = trained_b(stored.store(arrays(), FORMS["linear"], KEY))
    fn = stored.loss_of(scanned, dropout=0.5)
    assert fn.rngs
    keys = jax.random.split(KEY, 200)
    values = jax.lax.map(lambda key: fn(params, batch(), key), keys)
    without = stored.loss_of(scanned)(params, batch())
    assert np.std(values) > 1e-4
    assert abs(np.mean(values) - without) < 0.1 * abs(without)
    np.testing.assert_array_equal(fn(params, batch(), KEY), fn(params, batch(), KEY))
    # A product with the columns of W has no input of A.
    products = lambda p, x: jnp.sum(jnp.einsum("bw,dw->bd", x, p["head"]))  # noqa: E731
    over_columns = stored.loss_of(products, dropout=0.5)
    head = stored.store(arrays(), {"head": stored.lora(4)}, KEY)
    with pytest.raises(ValueError, match="elsewhere than in a product with its rows"):
        over_columns(head, jnp.ones((2, WORDS)), KEY)


def test_pruned_values_stay_zero(x64):
    """Their gradient is zero, and what an optimizer does to them is not seen."""
    params = stored.store(arrays(), {"head|layers/(up|down)": stored.masked(0.75)})
    assert np.mean(params["head"].decode() == 0) == 0.75
    fn, chosen = differentiable(stored.loss_of(scanned), params)
    value, grads = jax.jit(jax.value_and_grad(fn))(chosen, batch())
    tx = optax.masked(optax.adamw(1e-2, weight_decay=0.1), stored.trained)
    zero = model.zero_on(8, stage=3, min_shard_size=0)
    state = zero.init(lambda: (params, tx.init(params)), tx=tx)
    options = {"tx": tx, "trainable": stored.trained, "update": "backward"}
    (after, _), metrics = zero.train_step(stored.loss_of(scanned), **options)(state, batch())
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-12)
    for old, new, grad in (
        (params["head"], after["head"], grads["head"]),
        (params["layers"]["up"], after["layers"]["up"], grads["layers"]["up"]),
    ):
        assert not np.any(np.asarray(grad.values)[~np.asarray(old.kept)])
        np.testing.assert_array_equal(new.kept, old.kept)
        np.testing.assert_array_equal(new.decode() == 0, old.decode() == 0)
        first = grad.values / (np.abs(grad.values) + 1e-8) + 0.1 * old.values  # of AdamW
        np.testing.assert_allclose(new.values, old.values - 1e-2 * first, rtol=1e-9)


def test_dora_is_that_of_the_paper(x64):
    """The sum, with columns of the trained norms; the norms of the sum are no function."""
    w, x = np.asarray(arrays()["layers"]["up"]), np.random.default_rng(0).normal(size=(5, WIDTH))
    form = stored.store({"w": w}, {"w": stored.lora(4, dora=True)}, KEY)["w"]
    np.testing.assert_allclose(form.decode(), w, rtol=1e-12)
    form = dataclasses.replace(trained_b(form), magnitude=form.magnitude + 1)
    total = w + np.asarray(form.a @ form.b)
    norms = np.linalg.norm(total, axis=1)
    m = np.asarray(form.magnitude)
    np.testing.assert_allclose(m, np.linalg.norm(w, axis=1) + 1, rtol=1e-12)
    np.testing.assert_allclose(form.decode(), total * (m / norms)[:, None], rtol=1e-12)

    def loss(params, x):
        return jax.lax.scan(lambda c, p: (c + jnp.sum(x @ p), None), 0.0, params["w"])[0]

    fn, chosen = differentiable(stored.loss_of(loss), {"w": form})
    found = jax.grad(fn)(chosen, x)["w"]
    of_sum = np.ones((5, HIDDEN)) * (m / norms)[:, None]  # of x V, of each layer
    np.testing.assert_allclose(found.b, np.einsum("lwr,bw,lbh->lrh", form.a, x, of_sum), rtol=1e-9)
    np.testing.assert_allclose(
        found.magnitude, np.einsum("bw,lwh->lh", x, total) / norms, rtol=1e-9, atol=1e-9
    )
    # Columns that are summed are scaled before.
    y = np.random.default_rng(1).normal(size=(5, HIDDEN))
    over_columns = lambda params, y: jnp.sum(  # noqa: E731
        jax.lax.dot_general(y, params["w"][1], (((1,), (1,)), ((), ()))) ** 2
    )
    value = over_columns(stored.merge({"w": form}), y)
    np.testing.assert_allclose(stored.loss_of(over_columns)({"w": form}, y), value, rtol=1e-12)
    named, config = stored.peft({"w": form})
    assert named["base_model.model.w.1.lora_magnitude_vector"].shape == (HIDDEN,)
    assert config["use_dora"]
    with pytest.raises(ValueError, match="peft takes adapters that all have DoRA, or none"):
        stored.peft({"w": form, "v": dataclasses.replace(form, magnitude=None)})


@pytest.mark.parametrize(
    ("forms", "message"),
    [
        ({"layrs": stored.frozen(4)}, "'layrs' matches no parameter"),
        ({"layers": {"head": stored.frozen(4)}}, "give stored.frozen(4), stored.lora(16)"),
        ({"head": stored.lora(65)}, "rank 65 is above a dim of head"),
        ({"ids": stored.frozen(4)}, "ids is an array of int"),
        ({"head": (stored.frozen(4), stored.frozen(4))}, "head is NormalFloat4"),
        ({"odd": stored.frozen(4)}, "NF4 needs rows of a multiple of 64"),
        ({"head": (stored.masked(0.5), stored.lora(4))}, "cannot get an adapter"),
        ({"head": (stored.lora(4), stored.frozen(4))}, "lora is last, as in (frozen(4), lora(16))"),
        ({"scale": stored.lora(4, rows=2)}, "needs an array, or frozen codes, of so many dims"),
        ({"[": stored.frozen(4)}, "not a regular expression"),
    ],
)
def test_bad_forms_raise(forms, message):
    params = arrays(np.float32) | {"ids": jnp.arange(8), "odd": jnp.ones((4, 65))}
    with pytest.raises(ValueError, match=re.escape(message)):
        stored.store(params, forms, KEY)


def test_bad_options_raise():
    step = model.zero_on(1, stage=0).value_and_grad(stored.loss_of(scanned))
    codes = stored.store(arrays(np.float32), {"head": stored.frozen(4)})
    for call, message in (
        (lambda: stored.frozen(5), "frozen takes 4 or 8 bits"),
        (lambda: stored.lora(0), "an integer of at least 1"),
        (lambda: stored.masked(1.0), "at least 0 and below 1"),
        (
            lambda: stored.store(arrays(np.float32), {"head": stored.lora(4)}),
            "give store(..., key)",
        ),
        (lambda: stored.loss_of(scanned, dropout=1.0), "dropout must be"),
        (lambda: step(codes, batch()), "nothing is trained: of parameters in stored forms"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
