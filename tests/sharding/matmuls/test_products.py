"""Quantized products: machinery that changes nothing by itself, and which products it takes."""

import functools
import re

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sharding as shd
from sharding import matmuls, stored
from sharding import pipeline as pipelines
from sharding.loss._rows import rows_of_loss

from ...flax_nnx import needs_nnx, nnx
from .. import model

LAYERS, WIDTH, HEADS, WORDS, BATCH, LENGTH = 3, 32, 4, 64, 16, 8


def draws(*shape, dtype=float, seed=0):
    rng = np.random.default_rng([seed, *shape])
    return jnp.asarray(rng.normal(size=shape) * shape[-2] ** -0.5, jnp.result_type(dtype))


def decoder_params(dtype=float):
    stack = functools.partial(draws, LAYERS, dtype=dtype)
    layers = {"qkv": stack(WIDTH, 3 * WIDTH), "out": stack(WIDTH, WIDTH)}
    layers |= {"up": stack(WIDTH, 4 * WIDTH), "down": stack(4 * WIDTH, WIDTH)}
    return {"embed": draws(WORDS, WIDTH, dtype=dtype), "layers": layers} | {
        "head": draws(WIDTH, WORDS, dtype=dtype, seed=1)
    }


def layer(x, p):
    q, k, v = jnp.split(x @ p["qkv"], 3, -1)
    weights = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k) / WIDTH**0.5)
    x = x + jnp.einsum("bts,bsd->btd", weights, v) @ p["out"]
    return x + jax.nn.silu(x @ p["up"]) @ p["down"]


def cross_entropy(params, x, tokens):
    logits = x @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def decoder(params, tokens):
    x = params["embed"][tokens[:, :-1]]
    x, _ = jax.lax.scan(jax.checkpoint(lambda x, p: (layer(x, p), None)), x, params["layers"])
    return cross_entropy(params, x, tokens)


def numbered(params, tokens):
    x = params["embed"][tokens[:, :-1]]
    for i in range(LAYERS):
        x = jax.checkpoint(layer)(x, {k: w[i] for k, w in params["layers"].items()})
    return cross_entropy(params, x, tokens)


def by_example(params, tokens):
    return jax.vmap(lambda row: decoder(params, row[None]))(tokens).mean()


def shared(params, tokens):
    """A weight in two products, once transposed, and one that is a function of weights."""
    x, p = params["embed"][tokens[:, :-1]], params["layers"]
    for _ in range(2):
        x = jnp.tanh(x @ p["up"][0] @ (p["up"][0].T * 0.5))
    x = jnp.einsum("de,btd->bte", p["out"][1].astype(jnp.result_type(float)), x)
    return cross_entropy(params, x @ jnp.tril(p["out"][0]), tokens)


def experts(params, tokens):
    """Batched products, of an expert each, in two layers with numbers."""
    x = params["embed"][tokens[:, :-1]].reshape(LAYERS + 1, -1, WIDTH)[:LAYERS]
    for i in range(2):
        x = jnp.tanh(jnp.einsum("etd,edf->etf", x, params[f"layer_{i}"]["up"]))
        x = jnp.einsum("efd,etf->etd", params[f"layer_{i}"]["down"], x)
    return jnp.mean(jnp.sum(x, 0) @ params["head"])


def experts_params():
    p = decoder_params()
    layers = {f"layer_{i}": {k: p["layers"][k] for k in ("up", "down")} for i in range(2)}
    return {"embed": p["embed"], "head": p["head"]} | layers


def convolutions(params, images):
    for i in range(2):
        p = params[f"conv_{i}"]
        images = jax.nn.relu(
            jax.lax.conv_general_dilated(
                images, p, (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        )
    grouped = jax.lax.conv_general_dilated(
        images,
        params["conv_2"],
        (1, 1),
        [(2, 1), (0, 1)],
        rhs_dilation=(2, 1),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=4,
    )
    return jnp.mean(grouped.mean((1, 2)) @ params["head"])


def tokens(step=0):
    return np.random.default_rng(step).integers(0, WORDS, (BATCH, LENGTH + 1))


def conv_case():
    params = {"conv_0": draws(3, 3, 5, 8), "conv_1": draws(3, 2, 8, 8), "conv_2": draws(2, 3, 2, 8)}
    return params | {"head": draws(8, 4)}, draws(6, 9, 7, 5)


CASES = {
    "a scan of checkpoints": lambda: (decoder, decoder_params(), tokens()),
    "numbers": lambda: (numbered, decoder_params(), tokens()),
    "vmap": lambda: (by_example, decoder_params(), tokens()),
    "shared": lambda: (shared, decoder_params(), tokens()),
    "experts": lambda: (experts, experts_params(), tokens()),
    "convolutions": lambda: (convolutions, *conv_case()),
}
EVERY = matmuls.RECIPES["identity"]


def low(loss, recipe="fp8", **options):
    return shd.quantized_matmuls(loss, recipe, **{"min_size": 0, "simulate": True} | options)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_with_quantizers_that_change_nothing_loss_and_gradients_are_the_same(case, x64):
    loss, params, batch = case()
    fn = low(loss, EVERY._replace(ends=EVERY))
    assert matmuls.report_products(fn, params, batch).share > 0.3
    found = jax.jit(jax.value_and_grad(fn))(params, batch)
    model.assert_close(found, jax.jit(jax.value_and_grad(loss))(params, batch), 1e-12)


NEAR = [("a scan of checkpoints", "fp8", 0.15), ("a scan of checkpoints", "int8", 0.05)]
NEAR += [("shared", "ufp4", 0.5), ("experts", "fp8", 0.15), ("convolutions", "fp8", 0.3)]
NEAR += [("shared", "int8", 0.05), ("convolutions", "ufp4", 0.5), ("vmap", "fp8", 0.15)]


@pytest.mark.parametrize(("case", "recipe", "most"), NEAR)
def test_gradients_of_few_bits_are_near(case, recipe, most):
    """A wrong dim, scale or transform has a gradient that is not near at all."""
    loss, params, batch = CASES[case]()
    found, expected = (jax.jit(jax.grad(fn))(params, batch) for fn in (low(loss, recipe), loss))
    distance, leaf = model.worst_leaf(found, expected)
    assert 1e-4 < distance < most, leaf


def zero_and_state(stage, params, tx):
    zero = model.zero_on(8, stage=stage)
    return zero, zero.init(lambda: (params, tx.init(params)), tx=tx)


STEPS = [(0, "after", 1, None), (1, "after", 1, False), (2, "after", 2, None)]
STEPS += [(3, "after", 1, False), (3, "backward", 2, None)]


@pytest.mark.parametrize(("stage", "update", "microbatches", "per_device"), STEPS)
def test_steps_on_devices(stage, update, microbatches, per_device, x64):
    """Of both programs of a loss."""
    tx, params = optax.adamw(1e-2), decoder_params()
    zero, state = zero_and_state(stage, params, tx)
    loss = shd.Loss(decoder, per_device=per_device)
    step = zero.train_step(low(loss, EVERY), tx=tx, update=update, microbatches=microbatches)
    alone, opt_state = params, tx.init(params)
    for i in range(2):
        state, metrics = step(state, zero.put(tokens(i)))
        value, grads = jax.value_and_grad(decoder)(alone, tokens(i))
        updates, opt_state = tx.update(grads, opt_state, alone)
        alone = optax.apply_updates(alone, updates)
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-12)
    model.assert_close(state, (alone, opt_state), 1e-10)


@pytest.mark.parametrize(("recipe", "stage"), [("fp8", 3), ("int8", 0)])
def test_the_loss_of_few_bits_is_the_same_on_any_number_of_devices(recipe, stage):
    """Forward, scales are of rows, which devices do not divide."""
    params = decoder_params(np.float32)
    zero = model.zero_on(8, stage=stage)
    tx = optax.identity()
    state = zero.init(lambda: (params, tx.init(params)), tx=tx)
    value, grads = zero.value_and_grad(low(decoder, recipe))(state[0], zero.put(tokens()))
    expected, of_one = jax.jit(jax.value_and_grad(low(decoder, recipe)))(params, tokens())
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert model.worst_leaf(grads, of_one)[0] < 0.1


@pytest.mark.parametrize("recipe", ["fp8", "int8", "sun4", "fp8_delayed"])
def test_rounding_is_no_coupling_of_rows(recipe):
    """So that such a loss runs in the program, and by the micro-batches, of the plain one."""
    fn, params = low(decoder, recipe), decoder_params(np.float32)
    scaled = matmuls.scaled_params(fn, params, tokens())
    found = rows_of_loss(fn, (scaled, tokens()), (False, True))
    assert found.word == "mean"


def test_rows_that_meet_are_found_through_products():
    def loss(params, x):
        y = x @ params["dense_0"]
        return jnp.mean(jax.nn.softmax(y @ y.T) @ params["dense_1"])

    params = {"dense_0": draws(8, 8, dtype=np.float32), "dense_1": draws(16, 8, dtype=np.float32)}
    found = rows_of_loss(low(loss), (params, draws(16, 8, dtype=np.float32)), (False, True))
    assert found.word == "coupled"


# --- On the wire of stage 3 -----------------------------------------------------------------------


def stack(shape=(2, 32, 64)):
    return {"layers": {"up": draws(*shape), "down": draws(shape[0], shape[2], shape[1])}}


def of_stack(body=lambda x, p: jnp.tanh(x @ p["up"]) @ p["down"]):
    def loss(params, x):
        step = jax.checkpoint(lambda x, p: (x + body(x, p), None))
        return jnp.mean(jax.lax.scan(step, x, params["layers"])[0] ** 2)

    return loss


def of_slices(params, x):
    layer = jax.checkpoint(lambda x, p: x + jnp.tanh(x @ p["up"]) @ p["down"])
    for i in range(2):
        x = layer(x, {name: w[i] for name, w in params["layers"].items()})
    return jnp.mean(x**2)


def contrastive(params, x):
    """The loop runs per device, without a checkpoint; what is after it meets all rows."""
    step = lambda x, p: (x + jnp.tanh(x @ p["up"]) @ p["down"], None)  # noqa: E731
    x, _ = jax.lax.scan(step, x, params["layers"])
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(x @ x.T / 32)))


def partitioned(x, p):
    y = jnp.tanh(x @ p["up"]) @ p["down"]
    return jax.lax.with_sharding_constraint(y, P("data"))  # so that nothing runs per device


def twice(x, p):
    return (jnp.tanh(x @ p["up"]) + x @ jnp.cos(p["up"])) @ p["down"]


ALONG_ROWS = {"layers": {"up": P(None, None, "data"), "down": P(None, None, "data")}}
OF_TENSORS = {"layers": {"up": P(None, None, "model"), "down": P(None, "model", None)}}
WIRE = {  # loss, param_specs, mesh, dtypes of all gathers of matrices, recipe
    "checkpoints": (of_stack(), None, (8,), {"s8"}),
    "pieces": (contrastive, None, (8,), {"s8"}),
    "slices": (of_slices, None, (8,), {"s8"}),
    "transposed": (of_stack(lambda x, p: x @ p["down"].T @ p["up"].T), None, (8,), {"s8"}),
    "scales of shards": (of_stack(), ALONG_ROWS, (8,), {"s8"}),
    "other axes": (of_stack(), OF_TENSORS, (4, 2), {"s8"}),
    "also read otherwise": (of_stack(twice), None, (8,), {"s8", "f64"}),
    "partitioned": (of_stack(partitioned), None, (8,), {"s8"}),
    "delayed": (of_stack(), None, (8,), {"s8"}, "fp8_delayed"),
    "delayed, partitioned": (
        shd.Loss(of_stack(), per_device=False),
        *(None, (8,), {"s8"}, "fp8_delayed"),
    ),
}


def largest(grads):
    """With the highest bin of a step: devices know of those of their shards, too."""
    seen = jax.tree.map(lambda x: [np.flatnonzero(layer)[-1] for layer in x], grads.delayed)
    return grads._replace(delayed=seen)


@pytest.mark.parametrize("case", WIRE.values(), ids=WIRE)
def test_stage_3_gathers_codes(case, x64):
    """Each gather is of 8 bits, and what is learned is that of stage 2 to the last bits."""
    loss, specs, shape, dtypes, *recipe = case
    params, x, found = stack(), draws(128, 32), []
    fn = low(loss, *recipe)
    if recipe:
        params = matmuls.scaled_params(fn, params, x)
    for stage in (3, 2):
        zero = model.zero_on(*shape, names=("data", "model")[: len(shape)], stage=stage)
        options = {"param_specs": specs} if stage == 3 or len(shape) == 2 else {}
        tx = optax.identity()
        state = zero.init(lambda tx=tx: (params, tx.init(params)), tx=tx, **options)
        run = zero.value_and_grad(fn, **options)
        value, grads = run(state[0], zero.put(x))
        found.append((value, largest(grads) if recipe else grads))
        if stage == 3:
            program = run.lower(state[0], zero.put(x)).compile().as_text()
    gathers = re.findall(r"= (\w+)\[(\d+),(\d+)\]\S* all-gather\(", program)
    gathers = [(dtype, sizes) for dtype, *sizes in gathers if not {"1", "128"} & {*sizes}]
    assert {dtype for dtype, _ in gathers} == dtypes  # without scales and rows
    model.assert_close(*found, 1e-12)


def test_layers_with_numbers_gather_codes_again_in_the_backward_pass():
    """Else each device would hold the codes of all layers, of which stage 3 warns."""

    def loss(params, x):
        for i in range(2):
            x = x + jnp.tanh(x @ params[f"layer_{i}"]["up"]) @ params[f"layer_{i}"]["down"]
        return jnp.mean((x @ params["head"]) ** 2)

    layer = {"up": jnp.ones((256, 512)), "down": jnp.ones((512, 256))}
    params = {"layer_0": layer, "layer_1": layer, "head": jnp.ones((256, 8))}
    run = (zero := model.zero_on(8, stage=3)).value_and_grad(low(loss))
    text = run.lower(zero.place(params), zero.put(jnp.ones((64, 256)))).as_text()
    of_codes = re.findall(r"all_gather\"?\(.*x(\d+)xi8>", text)
    # Twice each, but the first one, whose input has no gradient.
    assert len([n for n in of_codes if n != "1"]) == 2 * 4 - 1


def test_codes_of_a_parameter_that_is_not_finite_stay_so():
    params, x = stack(), draws(64, 32)
    params["layers"]["down"] = params["layers"]["down"].at[0, 3, 5].set(np.nan)
    zero = model.zero_on(8, stage=3)
    params, x = zero.place(jax.tree.map(jnp.float32, params)), zero.put(jnp.float32(x))
    assert not np.isfinite(zero.value_and_grad(low(of_stack(), "int8"))(params, x)[0])


# --- Which products -------------------------------------------------------------------------------


def reasons(fn, params, batch):
    return {row.parameter: row.reason for row in matmuls.report_products(fn, params, batch).rows}


def test_products_of_layers_are_quantized():
    params = decoder_params()
    found = matmuls.report_products(low(decoder), params, tokens())
    assert [row.parameter for row in found.rows if row.formats] == [
        f"layers/{name}" for name in ("qkv", "out", "up", "down")
    ]
    assert reasons(low(decoder), params, tokens()) == {
        "layers/qkv": "",
        "": "not between an activation and a parameter",
        "layers/out": "",
        "layers/up": "",
        "layers/down": "",
        "head": "the head: the last product outside of layers",
    }
    assert all("test_products.py:" in row.line for row in found.rows)
    # A scale is of what a product sums; stage 3 gathers the codes of these.
    assert found.coded == {f"layers/{name}": (-2,) for name in ("qkv", "out", "up", "down")}
    by_blocks = matmuls.report_products(low(decoder, "mxfp8"), params, tokens())
    both = matmuls.report_products(low(shared), params, tokens())
    assert by_blocks.coded == both.coded == {}
    words = str(found)
    assert "layers/up  e4m3 x e5m2  " in words
    assert "kept: the head" in words


def test_the_report_of_sharded_parameters_is_that_of_all():
    """Though on Explicit axes a sum over shards would have to say how its result is sharded."""
    mesh = model.mesh_of(kind=AxisType.Explicit, data=8)
    params, specs = {"w_0": draws(32, 64), "w_1": draws(64, 32)}, (P(None, "data"), P("data"))
    placed = {
        name: jax.device_put(w, NamedSharding(mesh, spec))
        for (name, w), spec in zip(params.items(), specs, strict=True)
    }
    loss, x = low(lambda p, x: jnp.mean(x @ p["w_0"] @ p["w_1"])), draws(16, 32)
    found, expected = (matmuls.report_products(loss, p, x) for p in (placed, params))
    assert found == expected


def test_what_is_kept():
    def loss(params, x):
        for i in range(2):
            router = jax.nn.softmax(x @ params[f"block_{i}"]["router"])
            x = x + jax.nn.relu(x @ params[f"block_{i}"]["up"]) @ params[f"block_{i}"]["down"]
            x = x * router[:, :1]
        x = x @ params["between"]
        return jnp.mean(jnp.abs(params["table"][jnp.arange(4)])) + jnp.mean(x @ params["table"].T)

    block = {"router": (256, 8), "up": (256, 512), "down": (512, 256)}
    shapes = {"block_0": block, "block_1": block, "between": (256, 256), "table": (1024, 256)}
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    params = jax.tree.map(lambda s: jnp.ones(s, jnp.bfloat16), shapes, is_leaf=is_shape)
    found = reasons(low(loss, keep="block_1/up", min_size=256), params, jnp.ones((256, 256)))
    assert found == {
        "block_0/router": "256 x 256 x 8: a size is below 256",
        "block_0/up": "",
        "block_0/down": "",
        "block_1/router": "256 x 256 x 8: a size is below 256",
        "block_1/up": "keep='block_1/up'",
        "block_1/down": "",
        "between": "outside of layers",
        "table": "rows of its table are looked up",
    }


def test_products_in_functions_that_run_as_a_whole_are_listed():
    def loss(params, x):
        x = jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ params["w_0"]), x)
        return jnp.mean(x @ params["w_1"])

    params = {"w_0": draws(8, 8), "w_1": draws(8, 8)}
    found = matmuls.report_products(low(loss), params, draws(8, 8))
    assert [row.reason for row in found.rows if not row.parameter] in (
        [],
        ["in a function that is run as a whole"],
    )


def test_integers_in_a_sum_that_could_overflow_are_kept():
    shapes = {"w_0": (133_200, 4), "w_1": (4, 4), "w_2": (4, 4)}
    params = {name: jax.ShapeDtypeStruct(s, jnp.bfloat16) for name, s in shapes.items()}
    loss = lambda p, x: jnp.mean(x @ p["w_0"] @ p["w_1"] @ p["w_2"])  # noqa: E731
    batch = jax.ShapeDtypeStruct((8, 133_200), jnp.bfloat16)
    assert "overflow" in reasons(low(loss, "int8"), params, batch)["w_0"]
    assert reasons(low(loss, "fp8"), params, batch)["w_0"] == ""


def test_the_first_and_the_last_layer_of_sun4_are_in_8_bits():
    found = matmuls.report_products(low(decoder, "sun4"), decoder_params(), tokens())
    formats = {row.parameter: row.formats for row in found.rows}
    assert formats["head"] == "e4m3 x e5m2"
    assert formats["layers/up"] == "int4 x powers of 4 x 2 times powers of 4 (simulated)"


def test_most_of_a_decoder_of_7b_is_quantized():
    """Of its shapes; nothing is computed."""
    layers, width, hidden, vocab, heads = 32, 4096, 11008, 32000, 32
    shapes = {"qkv": (width, 3 * width), "out": (width, width)}
    shapes |= {"gate": (width, 2 * hidden), "down": (hidden, width)}
    of = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)  # noqa: E731
    params = {"embed": of(vocab, width), "head": of(width, vocab)}
    params["layers"] = {name: of(layers, *shape) for name, shape in shapes.items()}

    def loss(params, tokens):
        def layer(x, p):
            q, k, v = (y.reshape(4, 2048, heads, -1) for y in jnp.split(x @ p["qkv"], 3, -1))
            y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            x = x + y.reshape(x.shape) @ p["out"]
            a, b = jnp.split(x @ p["gate"], 2, -1)
            return x + (jax.nn.silu(a) * b) @ p["down"], None

        x = params["embed"][tokens]
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
        return (x @ params["head"]).astype(jnp.float32).mean()

    batch = jax.ShapeDtypeStruct((4, 2048), jnp.int32)
    assert 0.85 < matmuls.report_products(shd.quantized_matmuls(loss), params, batch).share < 1


def test_of_stored_parameters_the_products_of_full_matrices_are_quantized():
    """A loss of forms is one of the quantized loss: its forms decode before the product."""
    params = decoder_params(np.float32)
    params = jax.tree.map(lambda x: jnp.tile(x, (*[1] * (x.ndim - 1), 2))[..., :64], params)
    params = {"embed": params["embed"], "layers": {"up": draws(LAYERS, 64, 64, dtype=np.float32)}}

    def loss(params, tokens):
        x = params["embed"][tokens]
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w["up"]), None), x, params["layers"])
        return jnp.mean(x**2)

    coded = stored.store(params, {"layers/up": stored.frozen(4)})
    found = jax.jit(stored.loss_of(low(loss)))
    expected = jax.jit(low(loss))(stored.merge(coded), tokens())
    np.testing.assert_allclose(found(coded, tokens()), expected, rtol=1e-6)
    assert "f8_e4m3fn" in str(jax.make_jaxpr(found)(coded, tokens()))


# --- What is refused ------------------------------------------------------------------------------


def test_a_loss_in_tiles_is_quantized_before():
    """In tiles themselves no product is seen, and none would be quantized."""

    def loss(params, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w) @ w.T, None), x, params["layers"])
        return jnp.mean(jax.nn.logsumexp(x @ params["head"], -1))

    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 4, jnp.float32)  # noqa: E731
    params, x = {"layers": draw(2, 16, 32), "head": draw(16, 64)}, draw(16, 16)
    low = lambda loss: shd.quantized_matmuls(loss, "int8", min_size=16)  # noqa: E731
    of_tiles = low(shd.tiled(loss, 4))
    assert (
        matmuls.report_products(of_tiles, params, x).share
        == matmuls.report_products(low(loss), params, x).share
    )
    program = str(jax.make_jaxpr(of_tiles)(params, x))
    assert program == str(jax.make_jaxpr(shd.tiled(low(loss), 4))(params, x))
    assert "i8[" in program


def test_bad_input():
    with pytest.raises(ValueError, match=r"recipe must be one of fp8, int8, .* got 'fp3'"):
        shd.quantized_matmuls(decoder, "fp3")
    with pytest.raises(ValueError, match=r"multiplies in sun4.*simulate=True"):
        shd.quantized_matmuls(decoder, "sun4")
    with pytest.raises(ValueError, match="min_size must be an integer of at least 0, got -1"):
        shd.quantized_matmuls(decoder, min_size=-1)
    with pytest.raises(ValueError, match="keep: pattern '\\(' is not a regular expression"):
        shd.quantized_matmuls(decoder, keep="(")
    with pytest.raises(ValueError, match="keep: 'heads' matches no parameter; there are embed, "):
        low(decoder, keep=["head", "heads"])(decoder_params(), tokens())
    with pytest.raises(ValueError, match="are quantized already, by fp8"):
        shd.quantized_matmuls(shd.quantized_matmuls(decoder), "int8")
    zero = model.zero_on(2)
    with pytest.raises(ValueError, match="recipe must be one of fp8"):
        zero.train_step(decoder, matmuls="fp")
    with pytest.raises(ValueError, match="are quantized already"):
        zero.train_step(low(decoder), matmuls="fp8")
    with pytest.raises(ValueError, match=r"a step with these options calls fn\(params, batch\)"):
        zero.train_step(low(lambda params, x, key: decoder(params, x)))
    with pytest.raises(ValueError, match=r"report takes what shd.quantized_matmuls returned, got"):
        matmuls.report_products(decoder, decoder_params(), tokens())


def test_a_loss_with_options_and_a_key():
    def loss(params, batch, key):
        noise = jax.random.normal(key, (), jnp.float32) * 0
        return (decoder(params, batch) + noise) * 2, {"aux": noise}

    made = low(shd.Loss(loss, has_aux=True, rngs=True), "int8")
    assert (made.has_aux, made.rngs) == (True, True)
    params = decoder_params(np.float32)
    run = jax.jit(jax.grad(made, has_aux=True))
    grads = [run(params, tokens(), jax.random.key(i))[0] for i in (0, 0, 1)]
    model.assert_close(grads[0], grads[1], 1e-9)
    assert 1e-4 < model.worst_leaf(grads[0], grads[2])[0] < 0.1


# --- In steps and pipelines -----------------------------------------------------------------------


def test_a_step_takes_a_recipe():
    tx, zero = optax.adam(1e-3), model.zero_on(8, stage=2)
    params = {"layers": jnp.zeros((2, 256, 256), jnp.bfloat16)}
    state = zero.init(lambda: (params, tx.init(params)), tx=tx)
    loss = lambda p, x: jnp.mean(jax.lax.scan(lambda x, w: (x @ w, None), x, p["layers"])[0])  # noqa: E731
    step = zero.train_step(loss, tx=tx, matmuls="fp8")
    x = zero.put(jnp.zeros((8 * 256, 256), jnp.bfloat16))
    assert {"f8E4M3FN", "f8E5M2"} <= set(re.findall(r"f8\w+", step.lower(state, x).as_text()))


def test_a_function_that_returns_no_scalar_is_a_layer():
    """So a pipeline takes one as its block, for which its loss has no loop over parameters."""
    block = lambda p, x, _: x + jnp.tanh(x @ p["up"]) @ p["down"]  # noqa: E731
    params, x, mesh = stack(), draws(8, 32, dtype=np.float32), model.mesh_of(pipe=2)
    params = jax.tree.map(jnp.float32, params)
    one = jax.tree.map(lambda w: w[0], params["layers"])
    assert matmuls.report_products(low(block, "int8"), one, x, None).share == 1

    def loss_of(layer):
        return shd.Pipeline(
            mesh,
            pipelines.one_f_one_b(2, 4),
            num_layers=2,
            embed=lambda p, x: x,
            block=layer,
            head=lambda p, x, _: (jnp.sum(x**2), 1.0 * len(x)),
        )

    found = []
    for layer in (block, low(block, EVERY), low(block, "int8")):
        pipeline = loss_of(layer)
        run = jax.grad(lambda p, x, pipeline=pipeline: pipeline.loss(p, x)[0])
        found.append(jax.jit(run)(pipeline.stack(params), x))
    model.assert_close(found[1], found[0], 1e-5)
    assert 1e-4 < model.worst_leaf(found[2], found[0])[0] < 0.1


# --- Frameworks -----------------------------------------------------------------------------------


@needs_nnx
def test_an_nnx_model_keeps_what_its_loss_changes():
    """Statistics and counts of a model that is changed in place, in a step of devices, too."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(3)])
            self.norm, self.head = nnx.BatchNorm(16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

        def __call__(self, x):
            for dense in self.layers:
                x = nnx.relu(dense(x))
            return self.head(self.norm(x))

    def make():
        made = Model(nnx.Rngs(0))
        return made, nnx.Optimizer(made, optax.adam(1e-2), wrt=nnx.Param)

    def loss(made, x):
        return jnp.mean(made(x) ** 2)

    x = draws(16, 16, dtype=np.float32)
    found = {}
    for name, fn in (("plain", loss), ("quantized", low(loss, EVERY))):
        with jax.numpy_rank_promotion("allow"):
            zero = model.zero_on(8, stage=3)
            made, optimizer = zero.nnx_init(make)
            zero.nnx_train_step(fn)(made, optimizer, zero.put(x))
            found[name] = jax.tree.leaves(nnx.state(made))
            assert matmuls.report_products(low(loss), made, x).share > 0.5
    model.assert_close(found["quantized"], found["plain"], 1e-5)


def test_a_linen_model_and_one_of_equinox():
    x = draws(16, 16, dtype=np.float32)

    class Dense(linen.Module):
        @linen.compact
        def __call__(self, x):
            for _ in range(3):
                x = linen.relu(linen.Dense(16)(x))
            return linen.Dense(4)(x)

    net = equinox.nn.MLP(16, 4, 16, 3, key=jax.random.key(0))
    with jax.numpy_rank_promotion("allow"):
        params = Dense().init(jax.random.key(0), x)
        fn = low(lambda p, x: jnp.mean(Dense().apply(p, x) ** 2), EVERY)
        expected = jax.grad(lambda p, x: jnp.mean(Dense().apply(p, x) ** 2))(params, x)
        model.assert_close(jax.grad(fn)(params, x), expected, 1e-6)
        assert matmuls.report_products(fn, params, x).share > 0.8
        plain = lambda net, x: jnp.mean(jax.vmap(net)(x) ** 2)  # noqa: E731
        found, expected = (equinox.filter_grad(f)(net, x) for f in (low(plain, EVERY), plain))
        model.assert_close(found.layers[1].weight, expected.layers[1].weight, 1e-6)
