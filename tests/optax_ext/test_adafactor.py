"""Adafactor against optax, Hugging Face and PyTorch where they agree, and the paper's formulas."""

import functools
import inspect

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import optax_ext
from optax_ext import last_two_dims, two_largest_dims

from . import dims, references, traces

STATE_FIELDS = ("nu", "nu_row", "nu_col")


SHAPES = {
    "vector": (40,),
    "tall: rows are the last dim": (24, 16),
    "square: equal sizes": (12, 12),
    "largest in the middle": (4, 16, 12),
    "equal sizes apart": (8, 3, 8),
}


@pytest.mark.usefixtures("x64")
def test_200_steps_equal_optax():
    """Within 1e-7: optax computes beta2_t in float32 even here.

    That is off by up to 6e-8, and a second moment by as much of itself: updates by 1e-7 while they
    are near 1, as those of gradients without outliers.
    """
    both = {
        "learning_rate": lambda t: 0.1 / (1 + t),
        "momentum": 0.5,
        "weight_decay_rate": 1e-3,
        "weight_decay_mask": lambda p: jax.tree.map(lambda x: x.ndim > 1, p),
        "decay_rate": 0.6,
        "clipping_threshold": 0.4,
        "eps": 1e-3,
    }
    params = {k: traces.parameters(s) for k, s in SHAPES.items()}
    grads = {k: traces.gradients(s, 200, jumps=0) for k, s in SHAPES.items()}
    tx = optax_ext.adafactor(factoring=two_largest_dims(1), **both)
    reference = optax.adafactor(min_dim_size_to_factor=1, dtype_momentum=jnp.float64, **both)
    have, _, states = traces.unroll(tx, grads, params)
    want, _, reference_states = traces.unroll(reference, grads, params)
    for k, x in have.items():
        np.testing.assert_allclose(x, want[k], rtol=0, atol=1e-7, err_msg=k)
        for field, reference_field in zip(STATE_FIELDS, ("v", "v_row", "v_col"), strict=True):
            nu = getattr(states[0], field)[k]
            nu_reference = getattr(reference_states[0], reference_field)[k]
            assert (nu is None) == (nu_reference.shape == (200, 1))  # optax's placeholder
            if nu is not None:
                np.testing.assert_allclose(nu, nu_reference, rtol=1e-6, err_msg=f"{k} {field}")


def test_the_options_of_optax_by_their_names():
    """Every parameter of its signature is one of ours, and does the same."""
    options = {"min_dim_size_to_factor": 13, "weight_decay_rate": lambda t: 0.1 / (1 + t)}
    names = inspect.signature(optax.adafactor).parameters
    assert set(names) <= set(inspect.signature(optax_ext.adafactor).parameters)
    shapes = [s for s in SHAPES.values() if len(s) > 1]
    params = [traces.parameters(s).astype("float32") for s in shapes]
    grads = [traces.gradients(s, 20).astype("float32") for s in shapes]
    ours, theirs = (
        traces.unroll(make(learning_rate=0.1, **options), grads, params)[0]
        for make in (optax_ext.adafactor, optax.adafactor)
    )
    for have, want in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(have, want, rtol=0, atol=2e-4 * np.abs(want).max())
    state = jax.eval_shape(optax_ext.adafactor(factored=False).init, params)
    assert all(x is not None for x in state[0].nu)


def test_bad_options():
    with pytest.raises(ValueError, match="factored=False both select what is factored; give one"):
        optax_ext.adafactor(0.1, factoring=optax_ext.last_two_dims(), factored=False)
    with pytest.raises(ValueError, match="factoring=None and min_dim_size_to_factor=64 both"):
        optax_ext.adafactor(0.1, factoring=None, min_dim_size_to_factor=64)


# --- Hugging Face and PyTorch -------------------------------------------------------------------
# Both decay the weights by the learning rate they were given. PyTorch's is not capped by 1/sqrt(t)
# there; at 0.01 the cap begins at step 10,000.

NO_SCALE = {"multiply_by_parameter_scale": False}
DECAYED = {"learning_rate": 1e-2, "weight_decay_rate": 1e-2, "weight_decay_times_lr": True}
SAME = {
    "hf": {"learning_rate": 1.0} | NO_SCALE,
    "hf momentum and decay": DECAYED | NO_SCALE | {"momentum": 0.9},
    "hf parameter scale": {"learning_rate": 1e-2},
    "torch": DECAYED | {"relative_step": True},
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", SAME)
def test_200_steps_equal_hugging_face_and_pytorch(name):
    """Within 1e-12, in the terms of the test of CAME: these compute beta2_t in float64."""

    def recorded(state):
        if name == "hf":
            return {field: getattr(state[0], field) for field in STATE_FIELDS}
        stages = [s for s in state if isinstance(s, optax_ext.MomentumState)]
        return {"mu": stages[0].mu} if stages else {}

    traces.compare_to_golden(
        "adafactor.npz",
        name,
        optax_ext.adafactor(factoring=last_two_dims(), **SAME[name]),
        recorded,
        num_steps=200,
        shapes={k: traces.SHAPES[k] for k in ("vector", "stacked", "single row")},
        from_zero=name == "hf",
    )


@pytest.mark.usefixtures("x64")
def test_any_factoring_equals_the_reference():
    make, reference = optax_ext.scale_by_adafactor, references.Adafactor
    traces.compare_to_reference(make, reference, dims.CASES, 12)


# id -> options of the library, options of the reference
OPTIONS = {
    "another decay rate": ({"decay_rate": 0.5}, {"decay_rate": 0.5}),
    "an offset and a cap": ({"decay_offset": 4, "beta2_cap": 0.6}, {"offset": 4, "cap": 0.6}),
    "a constant b2": ({"b2": 0.95}, {"b2": 0.95}),
    "eps is inside the averages": ({"eps": 0.3}, {"eps": 0.3}),
    "no clipping": ({"clipping_threshold": None}, {"clip": None}),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("option", OPTIONS)
def test_options_equal_the_reference(option):
    options, theirs = OPTIONS[option]
    cases = {k: dims.CASES[k] for k in ("batch and stacked", "vectors in a batch")}
    alias = functools.partial(optax_ext.adafactor, multiply_by_parameter_scale=False)
    traces.compare_to_reference(alias, references.Adafactor, cases, 20, options, theirs)


def halving(count):
    return 0.1 * 0.5**count


DECAY = {"weight_decay_rate": 0.02, "weight_decay_times_lr": True}
# id -> the options of the alias, and eta_t for t = 0, 1, ...
ALIAS = {
    "no learning rate": ({}, lambda t: 1.0),
    "relative step under a schedule": (
        {"relative_step": True, "learning_rate": lambda t: 0.2 * (t + 1)},
        lambda t: min(0.2 * (t + 1), (t + 1) ** -0.5),
    ),
    "no parameter scale": ({"learning_rate": 0.3} | NO_SCALE, lambda t: 0.3),
    "the least parameter scale": ({"learning_rate": 0.3, "min_parameter_scale": 5}, lambda t: 0.3),
    "bfloat16 momentum": (
        {"learning_rate": 0.3, "momentum": 0.6, "dtype_momentum": "bfloat16"},
        lambda t: 0.3,
    ),
    "decay times a schedule": ({"learning_rate": halving, "momentum": 0.6} | DECAY, halving),
    "decay times a step": ({"relative_step": True} | DECAY, lambda t: min(1e-2, (t + 1) ** -0.5)),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("option", ALIAS)
def test_the_alias_equals_the_reference(option):
    """Where the learning rate, the scale, the momentum and the decay come in; batch slices too."""
    options, eta = ALIAS[option]
    shape, factoring = dims.CASES["batch, a clip each"]
    # Slices of different scale, one below the least parameter scale.
    p = traces.parameters(shape) * np.array([1.0, 1e-5, 10.0])[:, None, None]
    grads = traces.gradients(shape, 8)
    tx = optax_ext.adafactor(factoring=factoring, **options)
    updates, _, states = traces.unroll(tx, grads, p)

    direction = references.Adafactor(shape, **dims.as_kwargs(factoring))
    mu = np.zeros(shape)
    stored = ml_dtypes.bfloat16 if "dtype_momentum" in options else np.float64
    for t, g in enumerate(grads):
        u = eta(t) * direction.step(g)
        if options.get("multiply_by_parameter_scale", True):
            u *= direction.parameter_scale(p, options.get("min_parameter_scale", 1e-3))
        if "momentum" in options:
            mu = options["momentum"] * mu + (1 - options["momentum"]) * u
            u = mu
            mu = mu.astype(stored).astype(np.float64)
        decay = options.get("weight_decay_rate", 0.0)
        if options.get("weight_decay_times_lr"):
            decay *= eta(t)
        update = -(u + decay * p)
        np.testing.assert_allclose(updates[t], update, rtol=1e-11, atol=1e-14)
        p = p + update
    if "momentum" in options:
        have = next(s for s in states if isinstance(s, optax_ext.MomentumState)).mu
        assert have.dtype == stored
        np.testing.assert_allclose(have[-1].astype(np.float64), mu, rtol=1e-11, atol=1e-14)


def test_the_relative_step_of_the_last_counts():
    """1 / sqrt(2^31) where counts stay; the decay of a count by the schedule, too."""
    tx = optax_ext.adafactor(relative_step=True, multiply_by_parameter_scale=False)
    params = jnp.ones((4, 8))
    for dtype in ("int32", "uint32"):
        last = np.iinfo(dtype).max
        state = jax.tree.map(
            lambda x: jnp.full_like(x, last, dtype) if x.dtype == "int32" else x,  # noqa: B023
            tx.init(params),
        )
        u, _ = tx.update(params, state, params)
        np.testing.assert_allclose(u / u[0, 0], 1, rtol=1e-6)
        direction, _ = optax_ext.scale_by_adafactor().update(params, state[0])
        np.testing.assert_allclose(u / direction, -(float(last) ** -0.5), rtol=1e-5)
