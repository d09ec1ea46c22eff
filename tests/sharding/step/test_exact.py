"""A sharded step equals the single-device step: what no row of ``test_covering`` has."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding.placement._layout import Layout

from .. import model

STEPS = 6
TX = model.OPTIMIZERS["adamw"]()
# Of parameters and losses, and of the optimizer's state. Measured in float32: parameters differ by
# 2e-7 at most, moments by 5e-6. Moments are averages of gradients, whose own rounding is as large:
# on one device the moments of float32 are up to 8e-6 from those of float64.
TOLERANCE = {jnp.float32: (1e-6, 1e-5), jnp.float64: (1e-12, 1e-12)}
XYZ = ("x", "y", "z")


@functools.cache
def reference(dtype):
    """The single-device run; the caller has set the precision."""
    return model.train_alone(TX, dtype, STEPS)


def check(zero, dtype=jnp.float64, step=None):
    state = zero.init(model.make_state(TX, dtype), tx=TX)
    step = step or zero.train_step(model.make_loss(zero), tx=TX)
    losses = []
    for i in range(STEPS):
        state, metrics = step(state, zero.put(model.batch(i)))
        losses.append(float(metrics["loss"]))
    expected, expected_losses = reference(dtype)
    for have, want, tolerance in zip(state, expected, TOLERANCE[dtype], strict=True):
        model.assert_close(have, want, tolerance)
    np.testing.assert_allclose(losses, expected_losses, rtol=TOLERANCE[dtype][0])


def test_float32():
    check(model.zero_on(8, stage=3), jnp.float32)


@pytest.mark.parametrize("options", [{}, {"stage": 3, "reshard_after_forward": False}])
def test_one_device_and_gathered_parameters_kept_for_the_backward_pass(options, x64):
    check(model.zero_on(4 if options else 1, **options))


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_scatter_and_gather_one_axis_after_the_other(stage, monkeypatch, x64):
    """As on TPUs, whose platform the mesh pretends to be of."""
    monkeypatch.setattr(Layout, "platform", "tpu")
    check(model.zero_on(2, 2, 2, names=XYZ, axis=XYZ, stage=stage))


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
