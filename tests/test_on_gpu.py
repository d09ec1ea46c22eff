"""What only a GPU can show: its programs' results beside a CPU's. `make test-gpu` runs it there."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
import sharding as shd
from sharding.plan import Decoder

pytestmark = pytest.mark.skipif(jax.default_backend() == "cpu", reason="needs a GPU")

MODEL = Decoder(3, 64, 4, 2, 128, 96, length=32)
BY_LAYER = optax_ext.by_path(
    {"^layers/": optax_ext.last_two_dims(batch=(0,))}, default=optax_ext.last_two_dims()
)
OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "adafactor": optax_ext.adafactor(1e-3, factoring=BY_LAYER),
    "came": optax_ext.came(1e-3, factoring=BY_LAYER),
    "came8bit": optax_ext.came8bit(1e-3, factoring=BY_LAYER),
    "adamw8bit": optax_ext.adamw8bit(1e-3),
    "adamw4bit": optax_ext.low_precision_state(optax.adamw(1e-3), 4, rounding="nearest"),
    "masters": optax_ext.master_weights(optax.adamw(1e-3)),
    "lamb": optax_ext.lamb(1e-3),
}
STEPS = {
    "plain": {},
    **{f"stage {stage}": {"stage": stage} for stage in (1, 2, 3)},
    "gathered": {"gathered": True, "stage": 3},
    "micro-batches": {"microbatches": 2},
    "backward": {"update": "backward"},
    "backward, micro-batches": {"update": "backward", "microbatches": 2},
    "optimizer in host memory": {"offload": "optimizer", "offload_min_size": 0},
    "all in host memory": {"offload": "all", "offload_min_size": 0, "update": "backward"},
    "updated on the host": {
        "offload": "optimizer",
        "offload_min_size": 0,
        "update_on": "host",
    },
}


# Of ten losses. Stochastic rounding turns a rounding error into a whole step of a code: on a CPU
# parameters that differ by 3e-7 change those of CAME in 8 bits by 5e-5, of CAME by 7e-7.
TOLERANCES = {"came8bit": 1e-4}


def losses(platform: str, tx: optax.GradientTransformation, **options) -> list[float]:
    """Of ten steps in float32 on the first device of a platform."""
    device, gathers = jax.devices(platform)[0], options.pop("gathered", False)
    of_step = {k: options.pop(k) for k in ("update", "microbatches") if k in options}
    with jax.default_device(device):
        mesh = jax.make_mesh((1,), ("data",), devices=[device])
        zero = shd.Zero(mesh, **options)

        def make():
            params = MODEL.init()
            return params, tx.init(params)

        state = zero.init(make, tx=tx)
        layer = MODEL.apply_layer
        layer = zero.gathered(layer) if gathers else jax.checkpoint(layer)
        step = zero.train_step(MODEL.make_loss(layer), tx=tx, **of_step)
        rng = np.random.default_rng(0)
        tokens = rng.integers(MODEL.vocabulary, size=(4, MODEL.length + 1), dtype=np.int32)
        found = []
        for _ in range(10):
            state, metrics = step(state, zero.put(tokens))
            found.append(float(metrics["loss"]))
    return found


@functools.cache
def on_cpu(name: str) -> list[float]:
    """Losses of the plain step of a CPU."""
    return losses("cpu", OPTIMIZERS[name])


def check(name, found):
    """Losses of a GPU beside those of a CPU."""
    np.testing.assert_allclose(found, on_cpu(name), rtol=TOLERANCES.get(name, 2e-5))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    check(name, losses("gpu", OPTIMIZERS[name]))


@pytest.mark.parametrize("name", STEPS)
def test_steps(name):
    check("adamw", losses("gpu", OPTIMIZERS["adamw"], **STEPS[name]))


@pytest.mark.parametrize("name", ["came8bit", "adafactor", "masters"])
@pytest.mark.parametrize("place", ["backward", "all in host memory", "updated on the host"])
def test_places_of_other_optimizers(name, place):
    check(name, losses("gpu", OPTIMIZERS[name], **STEPS[place]))


def test_bfloat16_learns():
    def make():
        params = MODEL.init(jnp.bfloat16)
        return params, tx.init(params)

    tx = optax_ext.stochastic_rounding(optax_ext.came(1e-3), seed=0)
    zero = shd.Zero(jax.make_mesh((1,), ("data",)), stage=3)
    model = dataclasses.replace(MODEL, scan=True)
    state = zero.init(make, tx=tx)
    step = zero.train_step(model.make_loss(zero.gathered(model.apply_layer)), tx=tx)
    tokens = zero.put(np.ones((4, model.length + 1), np.int32))
    for _ in range(50):
        state, metrics = step(state, tokens)
    assert float(metrics["loss"]) < 1.0  # from log(96) = 4.6
