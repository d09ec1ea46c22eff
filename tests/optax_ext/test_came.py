"""CAME against its authors' code and against the paper's formulas."""

import functools
import os
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import optax_ext

from . import dims, references, traces

STATE_FIELDS = ("mu", "nu", "nu_row", "nu_col", "instability_row", "instability_col")


def state_of(state):
    """The fields of the first stage of ``came``, or of ``scale_by_came``."""
    state = state if isinstance(state, optax_ext.ScaleByCameState) else state[0]
    return {field: getattr(state, field) for field in STATE_FIELDS}


# --- The authors' code ------------------------------------------------------------------------
# 1e-12 is relative for averages of squares, which span 20 decades. For momentum, parameters and
# updates it is absolute where an element is below 1 and relative above (updates reach 200). Both
# sides round differently, about 1e-16 at each operation.


@pytest.fixture(scope="module")
def golden():
    with np.load(pathlib.Path(__file__).parent / "golden" / "came.npz") as file:
        return dict(file)


@pytest.mark.usefixtures("x64")
def test_500_steps_equal_the_authors_code(golden):
    tx = optax_ext.came(1.0)
    seen = traces.run(tx, state_of, num_steps=500, from_zero=True, observe=traces.summary)
    traces.compare_to_golden(golden, "plain", seen, 1e-12)


@pytest.mark.usefixtures("x64")
def test_500_steps_with_weight_decay_equal_the_authors_code(golden):
    tx = optax_ext.came(1e-2, weight_decay=1e-2)
    shapes = {k: traces.SHAPES[k] for k in ("scalar", "stacked")}
    seen = traces.run(tx, lambda s: {}, num_steps=500, shapes=shapes, observe=traces.summary)
    traces.compare_to_golden(golden, "decay", seen, 1e-12)


# --- The paper's formulas ---------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
def test_any_factoring_equals_the_reference():
    cases = dims.CASES | dims.random_cases(2)
    traces.compare_to_reference(optax_ext.scale_by_came, references.Came, cases, 12)


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
    ids=["spike of 11.111", "debiased"],
)
def test_first_update_of_a_rank_one_gradient(debias, want):
    """In float32, where 1 - 0.9999 ** 1 would be off by 2e-4."""
    g = jnp.outer(jnp.arange(1.0, 6.0), jnp.array([1e-3, -0.5, 7.0]))
    tx = optax_ext.scale_by_came(debias_instability=debias)
    update, _ = jax.jit(lambda g: tx.update(g, tx.init(g)))(g)
    np.testing.assert_allclose(update, want * np.sign(g), rtol=2e-6)


# --- The alias ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("as_function", [False, True], ids=["mask tree", "mask function"])
def test_schedules_and_weight_decay_mask(as_function):
    """update = -lr(t) * (direction + weight_decay(t) * params), the decay where the mask says."""
    params = {k: traces.parameters(s) for k, s in {"w": (4, 3), "b": (3,)}.items()}
    grads = {k: traces.gradients(p.shape, 5) for k, p in params.items()}
    mask = {"w": True, "b": False}

    def lr(count):
        return 0.1 / (1 + count)

    def weight_decay(count):
        return 0.01 * (1 + count)

    given = (lambda p: {k: x.ndim > 1 for k, x in p.items()}) if as_function else mask
    tx = optax_ext.came(lr, weight_decay=weight_decay, weight_decay_mask=given)
    updates, after, _ = traces.unroll(tx, grads, params)
    for k, p in params.items():
        factored = {"rows": (0,), "cols": (1,)} if k == "w" else {}
        reference, before = references.Came(p.shape, **factored), p
        for t in range(5):
            decay = mask[k] * weight_decay(t) * before
            want = -lr(t) * (reference.step(grads[k][t]) + decay)
            np.testing.assert_allclose(updates[k][t], want, rtol=1e-11, atol=1e-14)
            before = after[k][t]


@pytest.mark.slow
def test_rounding_noise_of_key_biases_becomes_updates_unless_eps_is_above_it():
    """A bias of keys moves all logits of a query alike: its gradient is zero but for rounding.

    Noise n below sqrt(eps) becomes g / sqrt((1 - b2^i) eps) in step i, and the momentum of ten such
    steps has the RMS 2.97 n / sqrt(eps). How large n is depends on the processor.
    """
    # How sums are rounded is up to XLA's emitters: those that users have (see tests/conftest.py).
    old = "--xla_cpu_use_fusion_emitters=false" in os.environ["XLA_FLAGS"]
    emitters = {"xla_cpu_use_fusion_emitters": True} if old else {}
    attention = nn.MultiHeadDotProductAttention(num_heads=4)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 10, 8, 16, 32)).astype("float32")
    shapes = jax.eval_shape(attention.init, jax.random.key(1), x[0])["params"]
    params = jax.tree.map(lambda p: 0.2 * rng.normal(size=p.shape).astype("float32"), shapes)

    @functools.partial(jax.jit, compiler_options=emitters)
    def grads(params):
        def grad(at):
            return jax.grad(
                lambda p: jnp.mean((attention.apply({"params": p}, at[0]) - at[1]) ** 2)
            )(params)

        return jax.lax.map(grad, (x, y))

    grads = grads(params)

    def last(eps):
        tx = optax_ext.scale_by_came(
            eps=eps, factoring=optax_ext.flax_transformer(), debias_instability=True
        )
        return jax.tree.map(lambda u: u[-1], traces.unroll(tx, grads, params)[0])

    def size(x):
        return float(np.sqrt(np.mean(np.square(x))))

    noise = max(map(size, grads["key"]["bias"]))
    assert noise < 1e-6 * size(grads["value"]["bias"])
    eps = 1e-12
    updates, plain = last(eps), last(1e-30)
    assert 0.1 < size(plain["key"]["bias"]) < 1
    assert size(updates["key"]["bias"]) < 4 * noise / eps**0.5
    for name in ("query", "value", "out"):
        for field, x in updates[name].items():
            np.testing.assert_allclose(x, plain[name][field], rtol=1e-3, atol=1e-5)
