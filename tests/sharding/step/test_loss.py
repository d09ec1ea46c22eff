"""What a loss gets beside the parameters, and errors where jax's own do not say what to do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import sharding as shd

from ..model import make_of
from .runs import assert_same, draw, make_train_state_of, train, train_alone, zero_of

TX = optax.sgd(0.1)
BATCH = np.ones((8, 16), np.float32)


def make_params():
    return {"w": np.linspace(-1.0, 1.0, 128, dtype=np.float32).reshape(16, 8)}


make, make_train_state = make_of(make_params, TX), make_train_state_of(make_params, TX)


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


@pytest.mark.parametrize(
    ("mesh", "microbatches", "rngs", "state"),
    [
        ("flat", 1, True, "train state"),
        ("four", 2, True, "train state without a key"),
        ("torus", 1, "per_example", "pair"),
    ],
)
def test_keys_are_folded_by_step_and_number(mesh, microbatches, rngs, state):
    """The number of the example, or of a device's own micro-batch, in the batch of all devices."""
    zero = zero_of(2, mesh)
    tx, init = (TX, make) if state == "pair" else (None, make_train_state)
    rows = 16 if rngs == "per_example" else zero.num_devices * microbatches

    def with_key(params, x, key):
        return loss_fn(params, x), jax.random.key_data(key.reshape(-1))

    loss = shd.Loss(with_key, has_aux=True, rngs=rngs, per_device=rngs is True or None)
    step = zero.train_step(loss, tx=tx, microbatches=microbatches)
    current, x = zero.init(init, tx=tx), zero.put(np.ones((16, 16), np.float32))
    if state == "pair":
        with pytest.raises(ValueError, match="a pair needs a new key in each call"):
            step(current, x)
    for i in range(2):
        key = jax.random.key(0 if "without" in state else 7)
        current, metrics = step(current, x, *([] if "without" in state else [key]))
        of_step = key if state == "pair" else jax.random.fold_in(key, i)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(of_step, jnp.arange(rows))
        np.testing.assert_array_equal(metrics["aux"], jax.random.key_data(keys))


@pytest.mark.parametrize(("stage", "least"), [(2, 0), (3, 0), (3, 1000)])
def test_accumulating_in_bfloat16_rounds_no_parameters(stage, least):
    """Sharded or, below the least size, not."""
    precision = shd.Precision(accumulate=jnp.bfloat16)
    zero = zero_of(stage, precision=precision, min_shard_size=least)

    def gathering(params, x):
        return loss_fn(zero.gather(params), x)

    params, _ = make()
    loss, grads = zero.value_and_grad(gathering)(params, BATCH)
    want, want_grads = jax.value_and_grad(loss_fn)(params, BATCH)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    np.testing.assert_allclose(grads["w"].astype(float), want_grads["w"], rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_loss_names_other_axes(stage, x64):
    """As under jit on the mesh; ``out_sharding=None`` on one device."""
    specs = {"table": P(None, "model"), "up": P(None, None, "model"), "down": P(None, "model")}
    shapes = {"table": (24, 16), "up": (2, 16, 32), "down": (2, 32, 16)}

    types = {k: jax.ShapeDtypeStruct(s, jnp.float64) for k, s in shapes.items()}
    init = make_train_state_of(lambda: draw(types))

    def data(step):
        return np.random.default_rng(step).integers(0, 24, (16, 4))

    def apply(gathered, named, params, ids):
        def block(p, x):
            h = jnp.einsum("bte,ef->btf", x, p["up"], out_sharding=named(None, None, "model"))
            return x + jnp.einsum("btf,fe->bte", jnp.tanh(h), p["down"], out_sharding=named())

        block = gathered(block)
        x = gathered(lambda p, i: p.at[i].get(out_sharding=named()))(params["table"], ids)
        layers = {name: params[name] for name in ("up", "down")}
        return jax.lax.scan(lambda x, p: (block(p, x), None), x, layers)[0]

    def mean(gathered, named, params, ids, *_):
        return jnp.mean((apply(gathered, named, params, ids) - ids[..., None]) ** 2)

    zero = zero_of(stage, "tensor", AxisType.Explicit)
    own_loss = functools.partial(mean, zero.gathered, P)
    options = {"data": data, "steps": 3, "param_specs": specs, "microbatches": 2}
    found = state, _ = train(zero, init, own_loss, **options)
    alone = functools.partial(mean, lambda fn: fn, lambda *_: None)
    expected = train_alone(init, lambda *args: (alone(*args), None), data, steps=3)
    assert_same(found, expected)
    outputs = zero.eval_step(
        lambda p, i: reshard(apply(zero.gathered, P, p, i), P(None, None, "model"))
    )(state, zero.put(data(3)))
    want = apply(lambda fn: fn, lambda *_: None, expected[0].params, data(3))
    np.testing.assert_allclose(outputs, want, rtol=1e-11)


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        (lambda x, mesh: x + jnp.zeros(x.shape, out_sharding=P("data")), AxisType.Explicit),
        (lambda x, mesh: reshard(x, P("data", "model")), AxisType.Explicit),
        (lambda x, mesh: jax.lax.with_sharding_constraint(x, P("data")), AxisType.Auto),
        (
            lambda x, mesh: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data"))),
            AxisType.Auto,
        ),
    ],
    ids=["out_sharding", "reshard", "constraint", "constraint on the mesh"],
)
def test_a_loss_that_names_the_data_axes(kind, request_):
    """It is partitioned, as under jit; no device places its rows alone."""
    zero = zero_of(2, "tensor", kind)
    state, x = zero.init(make, tx=TX), zero.put(BATCH)
    own_loss = lambda params, x: loss_fn(params, request_(x, zero.mesh))  # noqa: E731
    want, grads = jax.value_and_grad(loss_fn)(make()[0], BATCH)
    np.testing.assert_allclose(zero.eval_step(own_loss)(state, x), want, rtol=1e-5)
    found = zero.value_and_grad(own_loss)(state[0], x)
    np.testing.assert_allclose(found[0], want, rtol=1e-5)
    np.testing.assert_allclose(found[1]["w"], grads["w"], rtol=1e-5)
    alone = shd.Loss(own_loss, per_device=True)
    message = r"\('data',\), .* With per_device=True .* P\(None, 'model'\) for P\('data', 'model'\)"
    for call in (zero.train_step(alone, tx=TX), zero.eval_step(alone)):
        with pytest.raises(ValueError, match=message):
            call(state, x)


def test_a_closure_over_an_array_on_an_explicit_mesh():
    zero = zero_of(2, "four", AxisType.Explicit)
    table = zero.replicate(jnp.linspace(0.0, 1.0, 8))
    state, x = zero.abstract_state(make, tx=TX), zero.put(BATCH)
    closing = lambda params, x: loss_fn(params, x) * table.sum()  # noqa: E731
    zero.train_step(closing, tx=TX).lower(state, x)  # as under jit
    step = zero.train_step(shd.Loss(closing, per_device=True), tx=TX)
    with pytest.raises(ValueError, match=r"closes over an array .* model_state"):
        step.lower(state, x)
    # What the error says to do.
    given = zero.train_step(
        lambda params, x, table: (loss_fn(params, x) * table.sum(), table), tx=TX, model_state=True
    )
    given.lower(state, x, model_state=table)


def test_without_compiling():
    zero = zero_of(2, "four")
    state, x = zero.init(make, tx=TX), zero.put(BATCH)
    step = zero.train_step(loss_fn, tx=TX)
    with jax.disable_jit():
        for call in (lambda: step(state, x), lambda: zero.init(make, tx=TX)):
            with pytest.raises(ValueError, match=r"do not run under jax\.disable_jit"):
                call()
        with jax.disable_jit(False):
            step(state, x)
