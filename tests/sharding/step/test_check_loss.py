"""Losses that couple the examples of a batch: found, and exact once they are written so."""

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

import sharding as shd
from sharding.step._eval_step import ValueAndGrad

from ...flax_nnx import needs_nnx, nnx
from .runs import ROWS, WIDTH, assert_close, batch, zero_of

pytestmark = pytest.mark.usefixtures("x64")

RNG = np.random.default_rng(1)
PARAMS = {"w": RNG.normal(size=(WIDTH, 8)) / 4, "unused": np.ones(3)}
# Its eighths have other numbers of ones, the first has none.
BATCH = batch(0) | {"mask": np.arange(ROWS) % 5 < np.arange(ROWS) // 4}
STATS = {"mean": np.zeros(8), "var": np.ones(8)}


def masked(params, batch):
    losses = jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2, axis=-1)
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])


def mean_of_masked(params, batch):
    total, weight = masked(params, batch)
    return total / weight


def contrastive(params, batch, gather=lambda x: x):
    u, v = batch["x"] @ params["w"], batch["y"]
    return jnp.mean(jax.nn.logsumexp(u @ gather(v).T / 8, axis=1) - jnp.sum(u * v, axis=1) / 8)


def with_norm(moments):
    def loss_fn(params, batch, stats):
        h = batch["x"] @ params["w"]
        mean, var = moments(h)
        new = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, stats, {"mean": mean, "var": var})
        return jnp.mean(jnp.tanh((h - mean[None]) * lax.rsqrt(var + 1e-5)[None]) ** 4), new

    return loss_fn


own_norm = with_norm(lambda h: (h.mean(0), h.var(0)))


# the loss, options, what differs beside the loss
COUPLED = {
    "masked": (mean_of_masked, {}, "gradient of 'w'"),
    "contrastive": (contrastive, {"microbatches": 2}, r"gradient of 'w' \([\d.]+ off its norm of"),
    "norm": (own_norm, {"model_state": STATS}, "gradient of 'w' .* model state of 'var'"),
    "slightly": (
        lambda p, b: jnp.mean((b["x"] @ p["w"]) ** 2) + 1e-6 * contrastive(p, b),
        {},
        "gradient of 'w'",
    ),
}


@pytest.mark.parametrize("name", COUPLED)
def test_what_differs_is_named(name):
    """Of the mean of the losses of each device's rows, where that is another loss."""
    loss_fn, options, gradient = COUPLED[name]
    args = [STATS] if "model_state" in options else []
    of = lambda batch: float(jax.tree.leaves(loss_fn(PARAMS, batch, *args))[0])  # noqa: E731
    count = 8 * options.get("microbatches", 1)
    parts = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), BATCH)
    found = np.mean([of(jax.tree.map(lambda x, i=i: x[i], parts)) for i in range(count)])
    values = rf"8 devices .* loss \({found:.6g} for {of(BATCH):.6g}\), {gradient}"
    remedy = r".*With per_device=True.*all_gather\(x, \('replica', 'data'\), tiled=True\)"
    zero = zero_of(2, "replicas")
    of_devices = shd.Loss(loss_fn, model_state=bool(args), per_device=True)
    with pytest.raises(ValueError, match=f"{values}{remedy}"):
        zero.check_loss(of_devices, (PARAMS, None), BATCH, **options)
    options = options | {"microbatches": 1}
    assert zero.check_loss(loss_fn, (PARAMS, None), BATCH, **options) != "mean"


def test_micro_batches_that_are_meant_differ():
    zero = zero_of(2, "replicas")
    with pytest.raises(ValueError, match="microbatches=2 would train another loss"):
        zero.check_loss(contrastive, (PARAMS, None), BATCH, microbatches=2)
    meant = shd.Loss(contrastive, coupled="by_microbatch")
    with pytest.raises(ValueError, match=r"differs .* with coupled='by_microbatch'"):
        zero.check_loss(meant, (PARAMS, None), BATCH, microbatches=2)


def test_the_remedies_equal_one_device():
    zero, axes = zero_of(2, "replicas", AxisType.Explicit), ("replica", "data")
    state = types.SimpleNamespace(params=zero.place(PARAMS), stats=STATS)
    zero.check_loss(masked, state, zero.put(BATCH), weighted=True, microbatches=2)

    def gathered(params, batch):
        every = lambda x: lax.all_gather(x, axes, tiled=True)  # noqa: E731
        return contrastive(params, batch, every), {"rows": len(batch["x"])}

    zero.check_loss(shd.Loss(gathered, has_aux=True, per_device=True), state, BATCH)
    synced = with_norm(lambda h: shd.batch_moments(h, axes))
    of_devices = shd.Loss(synced, model_state="stats", per_device=True)
    zero.check_loss(of_devices, state, BATCH)
    run = zero.value_and_grad(dataclasses.replace(of_devices, model_state=True))
    expected = jax.jit(jax.value_and_grad(own_norm, has_aux=True))(PARAMS, BATCH, STATS)
    assert_close(run(PARAMS, BATCH, model_state=STATS), expected)
    assert_close(synced(PARAMS, BATCH, STATS), expected[0])  # outside of a step
    wrong = with_norm(lambda h: shd.batch_moments(h, "rows"))
    with pytest.raises(ValueError, match="axis 'rows' is not among the axes"):
        zero.check_loss(dataclasses.replace(of_devices, fn=wrong), state, BATCH)


def test_rounding_is_no_difference():
    """Of a key's bias the true gradient is zero; a requested approximation is no error."""

    def loss_fn(params, batch, keys):
        kept = jax.vmap(lambda key, x: x * jax.random.bernoulli(key, 0.5, x.shape))
        x = kept(keys, batch["x"].astype(np.float32))
        logits = (x @ params["w"])[::-1][::-1] + jnp.sum(params["unused"])  # no trace proves it
        return jnp.mean(jax.nn.softmax(logits) ** 2)

    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), PARAMS)
    options = {"precision": shd.Precision(gather=jnp.int8), "sync": shd.sync.qsgd(4)}
    zero, key = zero_of(3, **options), jax.random.key(1)
    loss = shd.Loss(loss_fn, rngs="per_example", per_device=True)
    with pytest.warns(UserWarning, match="gathers no layer"):
        zero.check_loss(loss, (params, None), BATCH, key)


def test_what_is_proven_is_not_computed(monkeypatch):
    """The word of a loss, and where rows meet, are returned and are in the error."""
    zero, state = zero_of(2), (PARAMS, None)
    mean = lambda p, b: jnp.mean((b["x"] @ p["w"] - b["y"]) ** 2)  # noqa: E731
    joined = lambda p, b: (mean(p, b), {"x": jnp.tanh(b["x"]), "rows": mean(p, b)})  # noqa: E731
    said = zero.check_loss(contrastive, state, BATCH)
    assert re.match(r"coupled: dot_general: each row meets the others .*py:\d", said)
    with pytest.raises(ValueError, match="must be one floating scalar"):
        zero.check_loss(joined, state, BATCH)  # without has_aux
    with pytest.raises(ValueError, match="microbatches must be at least 1"):
        zero.check_loss(mean, state, BATCH, microbatches=0)
    monkeypatch.setattr(ValueAndGrad, "__call__", None)
    assert zero.check_loss(mean, state, BATCH, microbatches=2) == "mean"
    assert zero.check_loss(joined, state, BATCH, has_aux=True) == "mean"
    assert zero.check_loss(masked, state, BATCH, weighted=True) == "sum"
    with pytest.raises(TypeError):  # numbers are computed of a loss that counts rows
        zero.check_loss(lambda p, b: (mean(p, b), len(b["x"])), state, BATCH, has_aux=True)


@needs_nnx
def test_an_nnx_model():
    """Its norm is synchronized, as in a step of it."""
    model = nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0), param_dtype=jnp.float32)
    x = batch(0)["x"].astype(np.float32)
    zero_of(2).check_loss(lambda model, x: jnp.mean(jnp.tanh(model(x)) ** 4), model, x)
