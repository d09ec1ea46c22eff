"""Where jax's own error does not say what to do, ours does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import sharding as shd

from ...flax_nnx import needs_nnx, nnx

TX = optax.sgd(0.1)
PARAMS = {"w": np.ones((16, 8), np.float32)}
BATCH = np.ones((8, 16), np.float32)


def make():
    return jax.tree.map(jnp.asarray, PARAMS), TX.init(PARAMS)


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def zero_of(stage, kind):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,), devices=jax.devices()[:4])
    return shd.Zero(mesh, stage=stage, min_shard_size=0)


@pytest.mark.filterwarnings("ignore:stage 3 with a loss that gathers no layer")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_closure_over_an_array_on_the_mesh(stage, kind):
    zero = zero_of(stage, kind)
    table = zero.replicate(jnp.linspace(0.0, 1.0, 8))
    state, x = zero.init(make, tx=TX), zero.put(BATCH)

    def closing(params, x):
        return loss_fn(params, x) * table.sum()

    def given(params, x, table):
        return loss_fn(params, x) * table.sum(), table

    step = zero.train_step(closing, tx=TX, donate=False)
    if kind == AxisType.Explicit:
        with pytest.raises(ValueError, match=r"closes over an array .* model_state"):
            step(state, x)
    else:
        step(state, x)
    # What the error says to do.
    _, metrics = zero.train_step(given, tx=TX, model_state=True, donate=False)(
        state, x, model_state=table
    )
    on_host = np.asarray(table)
    _, other = zero.train_step(
        lambda params, x: loss_fn(params, x) * on_host.sum(), tx=TX, donate=False
    )(state, x)
    np.testing.assert_allclose(metrics["loss"], other["loss"], rtol=1e-6)


@needs_nnx
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_an_out_sharding_over_the_batch(kind):
    zero = zero_of(2, kind)
    graph, params, rest = nnx.split(nnx.Embed(16, 8, rngs=nnx.Rngs(0)), nnx.Param, ...)

    def run(out_sharding):
        def loss_fn(params, ids):
            embed = nnx.merge(graph, params, rest, copy=True)
            return jnp.mean(embed(ids, out_sharding=out_sharding) ** 2)

        state = zero.init(lambda: (jax.tree.map(jnp.array, params), TX.init(params)), tx=TX)
        return zero.train_step(loss_fn, tx=TX)(state, zero.put(np.arange(8)))

    with pytest.raises(ValueError, match=r"over the data axes \('data',\)"):
        run(PartitionSpec("data"))
    run(None)


def test_without_compiling():
    zero = zero_of(2, AxisType.Auto)
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
