"""What a loss gets beside the parameters, and errors where jax's own do not say what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sharding as shd

from ...flax_nnx import needs_nnx, nnx
from .runs import zero_of

TX = optax.sgd(0.1)
BATCH = np.ones((8, 16), np.float32)


def make():
    params = {"w": jnp.linspace(-1.0, 1.0, 128).reshape(16, 8)}
    return params, TX.init(params)


def make_train_state():
    return TrainState.create(apply_fn=None, params=make()[0], tx=TX)


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


# --- Random keys ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "microbatches", "rngs", "state"),
    [
        ("flat", 1, True, "train state"),
        ("four", 2, True, "train state without a key"),
        ("replicas", 2, True, "pair"),
        ("torus", 1, "per_example", "pair"),
        ("one", 2, "per_example", "train state"),
    ],
)
def test_keys_are_folded_by_step_and_number(mesh, microbatches, rngs, state):
    """The number of the micro-batch, or of the example, in the batch of all devices."""
    zero = zero_of(2, mesh)
    tx, init = (TX, make) if state == "pair" else (None, make_train_state)
    rows = 16 if rngs == "per_example" else zero.num_devices * microbatches

    def with_key(params, x, key):
        return loss_fn(params, x), jax.random.key_data(key.reshape(-1))

    step = zero.train_step(with_key, tx=tx, rngs=rngs, has_aux=True, microbatches=microbatches)
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


def test_keys_of_examples_need_examples():
    zero = zero_of(2)
    step = zero.train_step(lambda params, x, key: params["w"].sum() * x, tx=TX, rngs="per_example")
    with pytest.raises(ValueError, match="the batch holds only scalars, and no examples"):
        step.lower(zero.abstract_state(make, tx=TX), 1.0, jax.random.key(0))


# --- Parameters -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [2, 3])
def test_accumulating_in_bfloat16_rounds_no_parameters(stage):
    zero = zero_of(stage, precision=shd.Precision(accumulate=jnp.bfloat16))

    def gathering(params, x):
        return loss_fn(zero.gather(params), x)

    params, _ = make()
    loss, grads = zero.value_and_grad(gathering)(params, BATCH)
    want, want_grads = jax.value_and_grad(loss_fn)(params, BATCH)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    np.testing.assert_allclose(grads["w"].astype(float), want_grads["w"], rtol=1e-2, atol=1e-6)


# --- Errors that say what to do -------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:stage 3 with a loss that gathers no layer")
@pytest.mark.parametrize(
    ("stage", "kind"), [(2, AxisType.Auto), (2, AxisType.Explicit), (3, AxisType.Explicit)]
)
def test_a_closure_over_an_array_on_the_mesh(stage, kind):
    zero = zero_of(stage, "four", kind)
    table = zero.replicate(jnp.linspace(0.0, 1.0, 8))
    state, x = zero.abstract_state(make, tx=TX), zero.put(BATCH)
    step = zero.train_step(lambda params, x: loss_fn(params, x) * table.sum(), tx=TX)
    if kind == AxisType.Auto:
        step.lower(state, x)
        return
    with pytest.raises(ValueError, match=r"closes over an array .* model_state"):
        step.lower(state, x)
    # What the error says to do.
    given = zero.train_step(
        lambda params, x, table: (loss_fn(params, x) * table.sum(), table), tx=TX, model_state=True
    )
    given.lower(state, x, model_state=table)
    on_host = np.asarray(table)
    zero.train_step(lambda params, x: loss_fn(params, x) * on_host.sum(), tx=TX).lower(state, x)


@needs_nnx
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_an_out_sharding_over_the_batch(kind):
    zero = zero_of(2, "four", kind)
    graph, params, rest = nnx.split(nnx.Embed(16, 8, rngs=nnx.Rngs(0)), nnx.Param, ...)
    state = zero.abstract_state(lambda: (jax.tree.map(jnp.array, params), TX.init(params)), tx=TX)

    def lower(out_sharding):
        def loss_fn(params, ids):
            embed = nnx.merge(graph, params, rest, copy=True)
            return jnp.mean(embed(ids, out_sharding=out_sharding) ** 2)

        zero.train_step(loss_fn, tx=TX).lower(state, zero.put(np.arange(8)))

    with pytest.raises(ValueError, match=r"over the data axes \('data',\)"):
        lower(P("data"))
    lower(None)


def test_without_compiling():
    zero = zero_of(2, "four")
    state, x = zero.init(make, tx=TX), zero.put(BATCH)
    step = zero.train_step(loss_fn, tx=TX)
    with jax.disable_jit():
        for call in (
            lambda: step(state, x),
            lambda: zero.init(make, tx=TX),
            lambda: zero.value_and_grad(loss_fn)(state[0], x),
            lambda: zero.eval_step(loss_fn)(state, x),
        ):
            with pytest.raises(ValueError, match=r"do not run under jax\.disable_jit"):
                call()
        with jax.disable_jit(False):
            step(state, x)
