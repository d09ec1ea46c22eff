"""What a step reads from the traced update of a transformation."""

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_ext
import sharding as shd
from sharding.step._update_traits import update_traits

PARAMS = {"w": jnp.ones((16, 24)), "b": jnp.ones(24)}
ELEMENTWISE = {
    "adamw": optax.adamw(1e-3),
    "lion": optax.lion(1e-3),
    "schedule": optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(lambda count: 0.1)),
    "in a list": optax.partition({"a": optax.adam(1e-3)}, {"w": "a", "b": "a"}),
    "plain": optax.GradientTransformation(lambda p: (), lambda g, s, p=None: (g, s)),
}
WITH_SUMS = {
    "clip": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "came": optax_ext.came(1e-3),
    "adafactor": optax_ext.adafactor(1e-3),
    "lamb": optax.lamb(1e-3),
    "muon": optax.contrib.muon(1e-3),
    "in a branch": optax.MultiSteps(optax_ext.came(1e-3), 2).gradient_transformation(),
}


def traits(tx, params=PARAMS):
    state = jax.eval_shape(tx.init, params)
    trained = jax.tree.map(lambda _: True, params)
    return update_traits(tx, params, state, shd.Precision(), trained)


@pytest.mark.parametrize("name", ELEMENTWISE | WITH_SUMS)
def test_sums_are_found(name):
    assert traits((ELEMENTWISE | WITH_SUMS)[name]).sums == (name in WITH_SUMS)


def test_only_a_transformation_that_reads_the_norm_gets_it():
    noise = optax_ext.gradient_noise_scale(8)
    assert traits(optax.chain(noise, optax.adamw(1e-3))).local_norm
    assert not any(traits(tx).local_norm for tx in (ELEMENTWISE | WITH_SUMS).values())
