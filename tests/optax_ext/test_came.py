"""CAME against its authors' code and against the paper's formulas."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import optax_ext

from . import dims, references, traces

STATE_FIELDS = ("mu", "nu", "nu_row", "nu_col", "instability_row", "instability_col")


# --- The authors' code ------------------------------------------------------------------------
# 1e-12 is relative for averages of squares, which span 20 decades. For momentum, parameters and
# updates it is absolute where an element is below 1 and relative above (updates reach 200). Both
# sides round differently, about 1e-16 at each operation.


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["plain", "decay"])
def test_500_steps_equal_the_authors_code(name):
    plain, shapes = name == "plain", traces.SHAPES
    tx = optax_ext.came(1.0) if plain else optax_ext.came(1e-2, weight_decay=1e-2)
    traces.compare_to_golden(
        "came.npz",
        name,
        tx,
        lambda state: {field: getattr(state[0], field) for field in STATE_FIELDS if plain},
        num_steps=500,
        shapes=shapes if plain else {k: shapes[k] for k in ("scalar", "stacked")},
        from_zero=plain,
    )


@pytest.mark.usefixtures("x64")
def test_any_factoring_equals_the_reference():
    traces.compare_to_reference(optax_ext.scale_by_came, references.Came, dims.CASES, 12)


# id -> options of the library, options of the reference
OPTIONS = {
    "other betas": ({"b1": 0.7, "b2": 0.9, "b3": 0.99},) * 2,
    "betas of zero keep the last step only": ({"b2": 0.0, "b3": 0.0},) * 2,
    "eps is inside the averages": ({"eps": 0.3, "eps_instability": 0.2},) * 2,
    "no clipping": ({"clipping_threshold": None}, {"clip": None}),
    "another clipping threshold": ({"clipping_threshold": 0.3}, {"clip": 0.3}),
    "debiased": ({"debias_instability": True}, {"debias": True}),
    "debiased, b3 of zero": ({"debias_instability": True, "b3": 0}, {"debias": True, "b3": 0}),
    "bfloat16 momentum": ({"mu_dtype": "bfloat16"}, {"mu_dtype": ml_dtypes.bfloat16}),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("option", OPTIONS)
def test_options_equal_the_reference(option):
    options, theirs = OPTIONS[option]
    cases = {k: dims.CASES[k] for k in ("batch and stacked", "vectors in a batch")}
    alias = functools.partial(optax_ext.came, 1.0)
    traces.compare_to_reference(alias, references.Came, cases, 20, options, theirs)


@pytest.mark.parametrize(
    ("debias", "want"),
    [(False, 0.1 / 0.9 / 1e-2), (True, 0.1 / 0.9)],
    ids=["spike of 11", "debiased"],
)
def test_first_update_of_a_rank_one_gradient(debias, want):
    """In float32, where 1 - 0.9999 ** 1 would be off by 2e-4."""
    g = jnp.outer(jnp.arange(1.0, 6.0), jnp.array([1e-3, -0.5, 7.0]))
    tx = optax_ext.scale_by_came(debias_instability=debias)
    update, _ = jax.jit(lambda g: tx.update(g, tx.init(g)))(g)
    np.testing.assert_allclose(update, want * np.sign(g), rtol=2e-6)


@pytest.mark.usefixtures("x64")
def test_schedules_and_weight_decay_mask():
    """update = -lr(t) * (direction + weight_decay(t) * params), the decay where the mask says."""
    params = {k: traces.parameters(s) for k, s in {"w": (4, 3), "b": (3,)}.items()}
    grads = {k: traces.gradients(p.shape, 5) for k, p in params.items()}
    mask = {"w": True, "b": False}
    lr, weight_decay = lambda t: 0.1 / (1 + t), lambda t: 0.01 * (1 + t)
    tx = optax_ext.came(lr, weight_decay=weight_decay, weight_decay_mask=mask)
    updates, after, _ = traces.unroll(tx, grads, params)
    for k, p in params.items():
        factored = {"rows": (0,), "cols": (1,)} if k == "w" else {}
        reference, before = references.Came(p.shape, **factored), p
        for t in range(5):
            decay = mask[k] * weight_decay(t) * before
            want = -lr(t) * (reference.step(grads[k][t]) + decay)
            np.testing.assert_allclose(updates[k][t], want, rtol=1e-11, atol=1e-14)
            before = after[k][t]


@pytest.mark.parametrize("mask", [None, lambda p: {"w": True, "b": False}])
@pytest.mark.parametrize(
    "make",
    [
        lambda decay, mask: optax_ext.came(0.1, weight_decay=decay, weight_decay_mask=mask),
        lambda decay, mask: optax_ext.adafactor(
            0.1, multiply_by_parameter_scale=False, weight_decay_rate=decay, weight_decay_mask=mask
        ),
    ],
)
def test_without_decay_no_parameters_are_needed(make, mask):
    """The updates are the same as with them, and the state has the structure of one with decay."""
    params = {"w": jnp.full((3, 4), 2.0), "b": jnp.ones(4)}
    tx = make(0.0, mask)
    state = tx.init(params)
    assert jax.tree.structure(state) == jax.tree.structure(make(0.1, mask).init(params))
    alone, _ = tx.update(jax.tree.map(jnp.sin, params), state)
    given, _ = tx.update(jax.tree.map(jnp.sin, params), state, params)
    jax.tree.map(np.testing.assert_array_equal, alone, given)
    with pytest.raises(ValueError, match="current value of parameters"):
        make(0.1, mask).update(params, state)
