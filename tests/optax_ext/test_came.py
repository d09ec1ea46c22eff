"""CAME against its authors' code and against the paper's formulas."""

import functools
import os
import pathlib

import flax.linen as nn
import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import optax_ext
from optax_ext import Factoring

from . import dims, references, traces
from .golden import make_came

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
    seen = traces.run(tx, lambda s: {}, num_steps=500, observe=traces.summary)
    traces.compare_to_golden(golden, "decay", seen, 1e-12)


def test_golden_projections_see_a_single_element():
    """The golden test's own test: one element in 4,608 wrong in the 11th digit is found."""
    x = np.abs(traces.parameters((3, 3, 16, 32)))
    for field, size in [("mu", x.size // 2), ("nu_row", 0)]:
        recorder = traces.Recorder("t")
        recorder.add("leaf", field, 1, x)
        wrong = x.copy()
        wrong.flat[size] += 1e-11 * (wrong.flat[size] if traces.positive(field) else 1)
        for y in (x, wrong):
            seen = {"leaf": {field: {"projection": np.array([traces.project(field, y)])}}}
            if y is x:
                traces.compare_to_golden(recorder.arrays(), "t", seen, 1e-12)
            else:
                with pytest.raises(AssertionError, match=f"t/leaf/{field}/projection"):
                    traces.compare_to_golden(recorder.arrays(), "t", seen, 1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("lr", "weight_decay"), [(1.0, 0.0), (1e-2, 1e-2)])
@pytest.mark.parametrize("leaf", traces.SHAPES)
def test_every_element_equals_the_live_authors_code(leaf, lr, weight_decay):
    pytest.importorskip("came_pytorch")
    shapes, from_zero = {leaf: traces.SHAPES[leaf]}, not weight_decay
    tx = optax_ext.came(lr, weight_decay=weight_decay)
    seen = traces.run(tx, state_of, num_steps=500, shapes=shapes, from_zero=from_zero)[leaf]
    num_steps = 0
    for step, fields in make_came.trace(
        shapes[leaf], 500, lr=lr, weight_decay=weight_decay, from_zero=from_zero
    ):
        assert fields.keys() == seen.keys()
        for field, want in fields.items():
            traces.compare(field, seen[field][step - 1], want, 1e-12, f"{field}, step {step}")
        num_steps = step
    assert num_steps == 500


# --- The paper's formulas ---------------------------------------------------------------------


def check_against_reference(shape, factoring, *, num_steps=12, reference=None, jit=True, **options):
    """Updates and state of ``scale_by_came`` within 1e-12 of the NumPy reference, every step."""
    tx = optax_ext.scale_by_came(factoring=factoring, **options)
    want = references.Came(shape, **dims.as_kwargs(factoring), **(reference or {}))
    traces.compare_to_reference(tx, want, shape, num_steps, jit=jit)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("case", dims.CASES)
def test_every_factoring_equals_the_reference(case):
    check_against_reference(*dims.CASES[case])


@hypothesis.settings(max_examples=10, deadline=None, derandomize=True)
@hypothesis.given(dims.shapes_and_factorings())
def test_any_factoring_equals_the_reference(case):
    with jax.enable_x64(True):
        check_against_reference(*case, num_steps=4)


# id -> options of the library, options of the reference
OPTIONS = {
    "other betas": ({"b1": 0.7, "b2": 0.9, "b3": 0.99},) * 2,
    "betas of zero keep the last step only": ({"b2": 0.0, "b3": 0.0},) * 2,
    "eps is inside the averages": ({"eps": 0.3},) * 2,
    "eps_instability is inside the averages": ({"eps_instability": 0.3},) * 2,
    "no clipping": ({"clipping_threshold": None}, {"clip": None}),
    "another clipping threshold": ({"clipping_threshold": 0.3}, {"clip": 0.3}),
    "debiased": ({"debias_instability": True}, {"debias": True}),
    "debiased, b3 of zero": ({"debias_instability": True, "b3": 0}, {"debias": True, "b3": 0}),
    "bfloat16 momentum": ({"mu_dtype": "bfloat16"}, {"mu_dtype": ml_dtypes.bfloat16}),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("case", ["batch and stacked", "vectors in a batch"])
def test_options_equal_the_reference(option, case):
    options, reference = OPTIONS[option]
    check_against_reference(
        *dims.CASES[case], num_steps=20, reference=reference, jit=False, **options
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, "float16", np.dtype("float32"), np.float32])
def test_mu_dtype_is_that_of_the_stored_momentum_alone(dtype):
    tx = optax_ext.scale_by_came(mu_dtype=dtype)
    params = {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}
    state = tx.init(params)
    for _ in range(2):
        assert {x.dtype for x in jax.tree.leaves(state.mu)} == {jnp.dtype(dtype)}
        rest = jax.tree.leaves(state._replace(mu=None, count=None))
        assert {x.dtype for x in rest} == {jnp.dtype("float32")}
        updates, state = tx.update(params, state)
        assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    ("debias", "want"),
    [(False, 0.1 / 0.9 / 1e-2), (True, 0.1 / 0.9)],
    ids=["spike of 11.111", "debiased"],
)
def test_first_update_of_a_rank_one_gradient(debias, want):
    """In float32, where 1 - 0.9999 ** 1 would be off by 2e-4."""
    g = jnp.outer(jnp.arange(1.0, 6.0), jnp.array([1e-3, -0.5, 7.0]))
    tx = optax_ext.scale_by_came(debias_instability=debias)
    update, _ = tx.update(g, tx.init(g))
    np.testing.assert_allclose(update, want * np.sign(g), rtol=2e-6)


def test_debiased_updates_of_a_constant_gradient_are_near_the_settled_size():
    """Without the spike: never above the size that 50,000 uncorrected steps settle at."""
    grads = jnp.asarray(traces.uniform((200, 8, 8), "noise"), jnp.float32)

    def sizes(debias):
        tx = optax_ext.scale_by_came(debias_instability=debias)
        updates, _, _ = traces.unroll(tx, grads, jnp.zeros((8, 8)))
        return np.sqrt(np.mean(np.square(updates), axis=(1, 2)))

    assert sizes(False)[0] > 10
    assert 0.1 < sizes(True)[0] < 0.12
    assert sizes(True).max() < 0.5


# --- The alias ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("as_function", [False, True], ids=["mask tree", "mask function"])
def test_schedules_and_weight_decay_mask(as_function):
    """update = -lr(t) * (direction + weight_decay(t) * params), the decay where the mask says."""
    params = {
        "w": jnp.asarray(traces.parameters((4, 3))),
        "b": jnp.asarray(traces.parameters((3,))),
    }
    grads = {k: jnp.asarray(traces.gradients(p.shape, 5)) for k, p in params.items()}
    mask = {"w": True, "b": False}

    def lr(count):
        return 0.1 / (1 + count)

    def weight_decay(count):
        return 0.01 * (1 + count)

    tx = optax_ext.came(
        lr,
        weight_decay=weight_decay,
        weight_decay_mask=(lambda p: {k: x.ndim > 1 for k, x in p.items()})
        if as_function
        else mask,
    )
    updates, after, _ = traces.unroll(tx, grads, params)
    directions, _, _ = traces.unroll(optax_ext.scale_by_came(), grads, params)
    for k in params:
        before = np.concatenate([params[k][None], after[k][:-1]])
        for t in range(5):
            want = -lr(t) * (directions[k][t] + mask[k] * weight_decay(t) * before[t])
            np.testing.assert_allclose(updates[k][t], want, rtol=1e-12, atol=1e-15)


@pytest.mark.usefixtures("x64")
def test_a_constant_schedule_equals_the_constant():
    params = {"w": jnp.asarray(traces.parameters((4, 3)))}
    grads = {"w": jnp.asarray(traces.gradients((4, 3), 5))}
    constant = traces.unroll(optax_ext.came(0.3, weight_decay=0.2), grads, params)
    schedule = traces.unroll(
        optax_ext.came(lambda _: 0.3, weight_decay=lambda _: 0.2), grads, params
    )
    for a, b in zip(constant[:2], schedule[:2], strict=True):
        np.testing.assert_array_equal(a["w"], b["w"])


def test_hyperparameters_reach_the_inner_transformation():
    """Each argument of ``came`` changes its updates as it changes those of ``scale_by_came``."""
    params = {"w": jnp.asarray(traces.parameters((3, 4, 5)), jnp.float32)}
    grads = {"w": jnp.asarray(traces.gradients((3, 4, 5), 3), jnp.float32)}
    default, _, _ = traces.unroll(optax_ext.came(1.0), grads, params, jit=False)
    for options in [
        {"b1": 0.5},
        {"b2": 0.5},
        {"b3": 0.5},
        {"eps": 1.0},
        {"eps_instability": 1.0},
        {"clipping_threshold": None},
        {"factoring": Factoring((0,), (2,), (1,))},
        {"mu_dtype": jnp.bfloat16},
        {"debias_instability": True},
    ]:
        have, _, _ = traces.unroll(optax_ext.came(1.0, **options), grads, params, jit=False)
        want, _, _ = traces.unroll(optax_ext.scale_by_came(**options), grads, params, jit=False)
        np.testing.assert_array_equal(have["w"], -want["w"], err_msg=str(options))
        assert not np.array_equal(have["w"], default["w"]), options


# --- Parameters without a gradient --------------------------------------------------------------


# How sums are rounded is up to XLA's emitters: those that users have (see tests/conftest.py).
OLD = "--xla_cpu_use_fusion_emitters=false" in os.environ["XLA_FLAGS"]
EMITTERS = {"xla_cpu_use_fusion_emitters": True} if OLD else {}


def test_rounding_noise_of_key_biases_becomes_updates_unless_eps_is_above_it():
    """A bias of keys moves all logits of a query alike: its gradient is zero but for rounding.

    Noise n below sqrt(eps) becomes g / sqrt((1 - b2^i) eps) in step i, and the momentum of ten such
    steps has the RMS 2.97 n / sqrt(eps). How large n is depends on the processor.
    """
    attention = nn.MultiHeadDotProductAttention(num_heads=4)
    x = jax.random.normal(jax.random.key(0), (8, 16, 32))
    params = attention.init(jax.random.key(1), x)["params"]
    noise = jax.random.normal(jax.random.key(2), (32,))
    params = jax.tree.map(lambda p: p + 0.1 * jnp.resize(noise, p.shape), params)

    @functools.partial(jax.jit, compiler_options=EMITTERS)
    def grad(key):
        x, y = jax.random.normal(key, (2, 8, 16, 32))
        return jax.grad(lambda p: jnp.mean((attention.apply({"params": p}, x) - y) ** 2))(params)

    def updates_of(eps):
        tx = optax_ext.scale_by_came(
            eps=eps, factoring=optax_ext.flax_transformer(), debias_instability=True
        )
        state, update = tx.init(params), jax.jit(tx.update)
        noise = []
        for i in range(10):
            grads = grad(jax.random.key(3 + i))
            updates, state = update(grads, state)
            noise.append(size(grads["key"]["bias"]))
        assert max(noise) < 1e-6 * size(grads["value"]["bias"])
        return max(noise), updates

    def size(x):
        return float(jnp.sqrt(jnp.mean(jnp.square(x))))

    eps = 1e-12
    (noise, updates), (_, plain) = updates_of(eps), updates_of(1e-30)
    assert 0.1 < size(plain["key"]["bias"]) < 1
    assert size(updates["key"]["bias"]) < 4 * noise / eps**0.5
    for name in ("query", "value", "out"):
        for field, x in updates[name].items():
            np.testing.assert_allclose(x, plain[name][field], rtol=1e-3, atol=1e-5)
