"""A sharded step equals the single-device step: what no row of ``test_covering`` has."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding.collectives import _reduce_scatter
from sharding.placement._layout import Layout

from ...tiers import slow
from .. import model

STEPS = 6
TX = model.OPTIMIZERS["adamw"]()
# Of parameters and losses, and of moments. Measured in float32: up to 2e-7, moments up to 5e-6.
TOLERANCE = {jnp.float32: (1e-6, 1e-5), jnp.float64: (1e-12, 1e-12)}
XYZ = ("x", "y", "z")
train_alone = functools.cache(model.train_alone)


def check(zero, dtype=jnp.float64, step=None):
    state = zero.init(model.make_state(TX, dtype), tx=TX)
    step = step or zero.train_step(model.make_loss(zero), tx=TX)
    losses = []
    for i in range(STEPS):
        state, metrics = step(state, zero.put(model.batch(i)))
        losses.append(float(metrics["loss"]))
    expected, expected_losses = train_alone(TX, dtype, STEPS)
    for have, want, tolerance in zip(state, expected, TOLERANCE[dtype], strict=True):
        model.assert_close(have, want, tolerance)
    np.testing.assert_allclose(losses, expected_losses, rtol=TOLERANCE[dtype][0])


def test_float32():
    check(model.zero_on(8, stage=3), jnp.float32)


@pytest.mark.parametrize("options", [slow({}), {"stage": 3, "reshard_after_forward": False}])
def test_one_device_and_gathered_parameters_kept_for_the_backward_pass(options, x64):
    check(model.zero_on(4 if options else 1, **options))


def test_scatter_and_gather_one_axis_after_the_other(monkeypatch, x64):
    """As on TPUs, whose platform the mesh pretends to be of."""
    monkeypatch.setattr(Layout, "platform", "tpu")
    monkeypatch.setattr(_reduce_scatter, "current_platform", lambda: "tpu")
    check(model.zero_on(2, 2, 2, names=XYZ, axis=XYZ, stage=3))


def test_a_step_of_ones_own(x64):
    """``value_and_grad`` and ``apply_gradients`` under jit are the same step."""
    zero = model.zero_on(2, 2, names=XYZ[:2], axis=XYZ[:2], stage=3)
    specs = zero.specs(jax.eval_shape(model.make_state(TX, jnp.float64)), tx=TX)[0]

    @jax.jit
    def step(state, batch):  # inside jit arrays have no specs
        loss_and_grad = zero.value_and_grad(model.make_loss(zero), param_specs=specs)
        loss, grads = loss_and_grad(state[0], batch)
        return zero.apply_gradients(state, grads, tx=TX, param_specs=specs), {"loss": loss}

    check(zero, step=step)
