"""Masks, and states whose arrays were cast: what cannot be meant raises where it is given."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext

PARAMS = {"w": jnp.ones((4, 8)), "b": jnp.ones(8)}
ZEROS = jax.tree.map(jnp.zeros_like, PARAMS)
MAKERS = {
    "came": lambda mask: optax_ext.came(0.1, weight_decay=0.1, weight_decay_mask=mask),
    "came8bit": lambda mask: optax_ext.came8bit(0.1, weight_decay=0.1, weight_decay_mask=mask),
    "adafactor": lambda mask: optax_ext.adafactor(
        0.1, weight_decay_rate=0.1, weight_decay_mask=mask, multiply_by_parameter_scale=False
    ),
    "lamb": lambda mask: optax_ext.lamb(0.1, weight_decay=0.1, weight_decay_mask=mask),
    "lars": lambda mask: optax_ext.lars(0.1, weight_decay=0.1, weight_decay_mask=mask),
}


def decays(tx, params=PARAMS):
    """Whether each parameter moves without a gradient."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = tx.update(zeros, tx.init(params), params)
    return jax.tree.map(lambda u: bool(np.any(u)), updates)


@pytest.mark.parametrize("name", MAKERS)
def test_forms_of_a_mask(name):
    make, want = MAKERS[name], {"w": True, "b": False}
    assert decays(make(want)) == want
    assert decays(make(lambda params: {"w": True, "b": False})) == want
    assert decays(make(optax_ext.decay_mask)) == want
    with pytest.raises(ValueError, match=r"weight_decay_mask must be .*got 'none'"):
        decays(make("none"))
    with pytest.raises(ValueError, match="must be a tree of bools; got 'no' in it"):
        decays(make({"w": True, "b": "no"}))
    with pytest.raises(ValueError, match="weight_decay_mask does not fit the parameters"):
        decays(make({"w": True}))


@pytest.mark.parametrize("name", MAKERS)
def test_a_tree_that_can_be_called_is_a_tree(name):
    net = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    params = eqx.filter(net, eqx.is_inexact_array)
    mask = jax.tree.map(lambda x: x.ndim > 1, params)
    assert callable(mask)
    assert jax.tree.leaves(decays(MAKERS[name](mask), params)) == jax.tree.leaves(mask)


def test_what_inject_hyperparams_takes_for_a_schedule():
    options = {"learning_rate": 0.1, "weight_decay": 0.1}
    for make, name in ((optax_ext.came, "weight_decay_mask"), (optax.adamw, "mask")):
        tx = optax.inject_hyperparams(make)(**options, **{name: optax_ext.decay_mask})
        with pytest.raises(ValueError, match=r"called with a step count: .*static_args="):
            tx.init(PARAMS)
        fixed = optax.inject_hyperparams(make, static_args=(name,))
        assert decays(fixed(**options, **{name: optax_ext.decay_mask})) == {"w": True, "b": False}
    for make in (optax_ext.came, optax_ext.lamb, optax_ext.lars):
        tx = optax.inject_hyperparams(make)(**options, weight_decay_mask=lambda p: jnp.ndim(p) > 1)
        with pytest.raises(ValueError, match=r"mask is False, neither .*static_args=\('weight_dec"):
            decays(tx)
    labels = {"hidden": optax.sgd(0.1)}, optax_ext.hidden_matrices
    with pytest.raises(ValueError, match="hidden_matrices was called with a step count"):
        optax.inject_hyperparams(optax.partition)(*labels).init(PARAMS)
    wrappers = {optax_ext.low_precision_state: "bits", optax_ext.stochastic_rounding: "seed"}
    for make, name in wrappers.items():
        tx = optax.inject_hyperparams(make)(optax.adamw(0.1))
        with pytest.raises(ValueError, match=f"{name} must be known .*static_args=.'{name}'"):
            tx.init(PARAMS)


CAST = {
    "came": optax_ext.scale_by_came(),
    "came's momentum": optax_ext.scale_by_came(mu_dtype="float32"),
    "adafactor": optax_ext.scale_by_adafactor(b2=0.999),
    "lamb": optax_ext.scale_by_lamb(),
    "lars": optax_ext.lars(0.1),
    "master": optax_ext.master_weights(optax.sgd(1e-3)),
    "discrepancy": optax_ext.discrepancy_correction(2.0, 0.1),
}


@pytest.mark.parametrize("name", CAST)
def test_a_state_that_was_cast_raises(name):
    """As when a checkpoint is restored in bfloat16: nothing would move any more."""
    tx = CAST[name]
    params = {"w": jnp.ones((4, 8), jnp.bfloat16)}
    state = tx.init(params)

    def cast(x):
        return x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x

    with pytest.raises(ValueError, match=r"has dtype bfloat16, and init made it float32"):
        tx.update(params, jax.tree.map(cast, state), params)
    tx.update(params, state, params)
