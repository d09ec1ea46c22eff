"""Adafactor against optax, Hugging Face and PyTorch where they agree, and the paper's formulas."""

import functools
import inspect
import pathlib

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import optax_ext
from optax_ext import last_two_dims, two_largest_dims

from . import dims, references, traces
from .golden import make_adafactor

STATE_FIELDS = ("nu", "nu_row", "nu_col")


def state_of(state):
    """The fields of the first stage of ``adafactor``, and the momentum if there is one."""
    fields = {field: getattr(state[0], field) for field in STATE_FIELDS}
    for stage in state:
        if isinstance(stage, optax_ext.MomentumState):
            fields["mu"] = stage.mu
    return fields


# --- optax --------------------------------------------------------------------------------------

SHAPES = {
    "vector": (40,),
    "tall: rows are the last dim": (24, 16),
    "square: equal sizes": (12, 12),
    "largest in the middle": (4, 16, 12),
    "equal sizes apart": (8, 3, 8),
}

# id -> what both take, what ours takes, what optax takes
OPTAX = {
    "plain": ({"learning_rate": 0.1, "multiply_by_parameter_scale": False}, {}, {}),
    "parameter scale, no clipping": (
        {"learning_rate": 0.1, "clipping_threshold": None},
        {},
        {},
    ),
    "everything": (
        {
            "learning_rate": lambda t: 0.1 / (1 + t),
            "momentum": 0.5,
            "weight_decay_rate": 1e-3,
            "weight_decay_mask": lambda p: jax.tree.map(lambda x: x.ndim > 1, p),
            "decay_rate": 0.6,
            "clipping_threshold": 0.4,
            "eps": 1e-3,
        },
        {},
        {"dtype_momentum": jnp.float64},
    ),
    "nothing factored": ({"learning_rate": 0.1}, {"factoring": None}, {"factored": False}),
    "only large dims factored": (
        {"learning_rate": 0.1},
        {"factoring": two_largest_dims(13)},
        {"min_dim_size_to_factor": 13},
    ),
}


@pytest.mark.slow(keep=2)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("option", OPTAX)
def test_200_steps_equal_optax(option):
    """Within 1e-7: optax computes beta2_t in float32 even here.

    That is off by up to 6e-8, so a second moment by 6e-8 * (1 - g^2 / nu) of itself: the floor is
    near 1e-7 for updates of size 1 and grows with the cube of an update. These gradients have no
    outliers, which keeps updates near 1; they have full rank and rows and columns of four decades.
    Momentum stored in bfloat16 is not compared: optax also multiplies it in bfloat16.
    """
    both, ours, theirs = OPTAX[option]
    params = {k: jnp.asarray(traces.parameters(s)) for k, s in SHAPES.items()}
    grads = {k: jnp.asarray(traces.gradients(s, 200, jumps=0)) for k, s in SHAPES.items()}
    tx = optax_ext.adafactor(**{"factoring": two_largest_dims(1)} | both | ours)
    reference = optax.adafactor(**{"min_dim_size_to_factor": 1} | both | theirs)
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


@pytest.mark.parametrize(
    "options",
    [
        {"min_dim_size_to_factor": 13},
        {"factored": False},
        {"factored": False, "min_dim_size_to_factor": 2},
        {"min_dim_size_to_factor": 2, "weight_decay_rate": lambda count: 0.1 / (1 + count)},
    ],
    ids=["least size", "nothing", "nothing, with a size", "decay by a schedule"],
)
def test_the_options_of_optax_by_their_names(options):
    """Every parameter of its signature is one of ours, and does the same."""
    names = inspect.signature(optax.adafactor).parameters
    assert set(names) <= set(inspect.signature(optax_ext.adafactor).parameters)
    params = {k: jnp.asarray(traces.parameters(s), jnp.float32) for k, s in SHAPES.items()}
    grads = {k: jnp.asarray(traces.gradients(s, 20), jnp.float32) for k, s in SHAPES.items()}
    have, want = (
        traces.unroll(make(learning_rate=0.1, **options), grads, params)[0]
        for make in (optax_ext.adafactor, optax.adafactor)
    )
    for k, x in have.items():
        np.testing.assert_allclose(x, want[k], rtol=0, atol=2e-4 * np.abs(want[k]).max())


def test_two_names_for_the_factoring_are_rejected():
    with pytest.raises(ValueError, match="factored=False both select what is factored; give one"):
        optax_ext.adafactor(0.1, factoring=optax_ext.last_two_dims(), factored=False)
    with pytest.raises(ValueError, match="factoring=None and min_dim_size_to_factor=64 both"):
        optax_ext.adafactor(0.1, factoring=None, min_dim_size_to_factor=64)


@pytest.mark.usefixtures("x64")
def test_decay_offset_on_a_restored_state_equals_optax():
    """Fine-tuning: 30 steps, then 30 more that count from there."""
    params = {"w": jnp.asarray(traces.parameters((8, 6)))}
    grads = {"w": jnp.asarray(traces.gradients((8, 6), 60))}
    first, second = ({"w": g} for g in jnp.split(grads["w"], 2))

    def both_phases(make):
        _, params_after, states = traces.unroll(make(decay_offset=0), first, params)
        params_after, state = jax.tree.map(lambda x: x[-1], (params_after, states))
        tx = make(decay_offset=30)
        tx = optax.GradientTransformation(lambda _: state, tx.update)
        return traces.unroll(tx, second, params_after)[0]["w"]

    ours = functools.partial(optax_ext.adafactor, 0.1, factoring=two_largest_dims(1))
    theirs = functools.partial(optax.adafactor, 0.1, min_dim_size_to_factor=1)
    np.testing.assert_allclose(both_phases(ours), both_phases(theirs), rtol=0, atol=1e-7)


@pytest.mark.usefixtures("x64")
def test_decay_offset_on_a_fresh_state_equals_a_start_at_the_offset():
    """Until the offset is reached each step forgets the last; then decay starts from its first."""
    grads = traces.gradients((4, 3), 8)
    have, _, states = traces.unroll(
        optax_ext.scale_by_adafactor(decay_offset=5, factoring=last_two_dims()),
        jnp.asarray(grads),
        jnp.zeros((4, 3)),
    )
    alone = references.Adafactor((4, 3), (0,), (1,))
    for i in range(6):
        alone = references.Adafactor((4, 3), (0,), (1,))
        np.testing.assert_allclose(have[i], alone.step(grads[i]), rtol=1e-12)
    for i in (6, 7):  # the second and third step of what began at the sixth
        np.testing.assert_allclose(have[i], alone.step(grads[i]), rtol=1e-12)
        np.testing.assert_allclose(states.nu_row[i], alone.state()["nu_row"], rtol=1e-12)


def test_bfloat16_parameters_do_not_freeze_the_second_moment():
    """Gradients drop tenfold at step 800: optax's bfloat16 row average never hears of it.

    At the default decay rate of 0.8 that takes 3,000 steps.
    """
    num_steps, drop = 1200, 800
    signs = np.sign(traces.uniform((num_steps, 4, 8), "signs"))
    grads = np.where(np.arange(num_steps)[:, None, None] < drop, 1.0, 0.1) * signs
    params = jnp.zeros((4, 8), jnp.bfloat16)

    def row_average(tx, field):
        _, _, states = traces.unroll(tx, jnp.asarray(grads, jnp.bfloat16), params)
        return getattr(states[0], field)

    exact, want = 0.0, []
    for t in range(1, num_steps + 1):
        g = float(np.asarray(grads[t - 1, 0, 0], ml_dtypes.bfloat16))
        exact += (g**2 - exact) / t
        want.append(exact)

    ours = row_average(
        optax_ext.adafactor(0.0, decay_rate=1.0, factoring=two_largest_dims(1)), "nu_row"
    )
    assert ours.dtype == jnp.float32
    assert want[-1] < 0.7 < 0.99 < want[drop - 1]
    for row in ours.T:
        np.testing.assert_allclose(row, want, rtol=1e-4)

    theirs = row_average(optax.adafactor(0.0, decay_rate=1.0, min_dim_size_to_factor=1), "v_row")
    assert theirs.dtype == jnp.bfloat16
    np.testing.assert_array_equal(theirs[-1], theirs[drop - 1])  # what is wrong with it


# --- Hugging Face and PyTorch -------------------------------------------------------------------
# Both decay the weights by the learning rate they were given. PyTorch's is not capped by 1/sqrt(t)
# there; at 0.01 the cap begins at step 10,000.

SAME = {
    "hf": {"learning_rate": 1.0, "multiply_by_parameter_scale": False},
    "hf momentum and decay": {
        "learning_rate": 1e-2,
        "multiply_by_parameter_scale": False,
        "momentum": 0.9,
        "weight_decay_rate": 1e-2,
        "weight_decay_times_lr": True,
    },
    "hf parameter scale": {"learning_rate": 1e-2},
    "torch": {
        "learning_rate": 1e-2,
        "relative_step": True,
        "weight_decay_rate": 1e-2,
        "weight_decay_times_lr": True,
    },
}


def same(name):
    return optax_ext.adafactor(factoring=last_two_dims(), **SAME[name])


@pytest.fixture(scope="module")
def golden():
    with np.load(pathlib.Path(__file__).parent / "golden" / "adafactor.npz") as file:
        return dict(file)


@pytest.mark.slow(keep=2)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", SAME)
def test_200_steps_equal_hugging_face_and_pytorch(golden, name):
    """Within 1e-12, in the terms of the test of CAME: these compute beta2_t in float64."""

    def recorded(state):
        fields = state_of(state)
        return fields if name == "hf" else {k: v for k, v in fields.items() if k == "mu"}

    seen = traces.run(
        same(name), recorded, num_steps=200, from_zero=name == "hf", observe=traces.summary
    )
    traces.compare_to_golden(golden, name, seen, 1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", SAME)
def test_every_element_equals_live_hugging_face_and_pytorch(name):
    pytest.importorskip("torch" if name == "torch" else "transformers")
    pytest.importorskip("torch")
    seen = traces.run(same(name), state_of, num_steps=200, from_zero=name == "hf")
    for leaf, shape in traces.SHAPES.items():
        num_steps = 0
        for step, fields in make_adafactor.trace(name, shape, 200):
            assert fields.keys() == seen[leaf].keys()
            for field, want in fields.items():
                have = seen[leaf][field][step - 1]
                traces.compare(field, have, want, 1e-12, f"{leaf} {field}, step {step}")
            num_steps = step
        assert num_steps == 200


# --- The paper's formulas -----------------------------------------------------------------------
# The factored moment is CAME's; its tests go through the whole table of factorings.


def check_against_reference(shape, factoring, *, num_steps=12, reference=None, jit=True, **options):
    """Updates and state of ``scale_by_adafactor`` within 1e-12 of the NumPy reference."""
    tx = optax_ext.scale_by_adafactor(factoring=factoring, **options)
    want = references.Adafactor(shape, **dims.as_kwargs(factoring), **(reference or {}))
    traces.compare_to_reference(tx, want, shape, num_steps, jit=jit)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("case", ["columns before rows", "everything at once", "a scalar"])
def test_several_factoring_equals_the_reference(case):
    check_against_reference(*dims.CASES[case])


@hypothesis.settings(max_examples=8, deadline=None, derandomize=True)
@hypothesis.given(dims.shapes_and_factorings())
def test_any_factoring_equals_the_reference(case):
    with jax.enable_x64(True):
        check_against_reference(*case, num_steps=4)


# id -> options of the library, options of the reference
OPTIONS = {
    "another decay rate": ({"decay_rate": 0.5}, {"decay_rate": 0.5}),
    "beta2_cap": ({"beta2_cap": 0.6}, {"cap": 0.6}),
    "decay_offset": ({"decay_offset": 4}, {"offset": 4}),
    "decay_offset and beta2_cap": (
        {"decay_offset": 4, "beta2_cap": 0.6},
        {"offset": 4, "cap": 0.6},
    ),
    "a constant b2": ({"b2": 0.95}, {"b2": 0.95}),
    "eps is inside the averages": ({"eps": 0.3}, {"eps": 0.3}),
    "no clipping": ({"clipping_threshold": None}, {"clip": None}),
    "another clipping threshold": ({"clipping_threshold": 0.3}, {"clip": 0.3}),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("case", ["batch and stacked", "vectors in a batch"])
def test_options_equal_the_reference(option, case):
    options, reference = OPTIONS[option]
    shape, factoring = dims.CASES[case]
    check_against_reference(
        shape, factoring, num_steps=20, reference=reference, jit=False, **options
    )


def halving(count):
    return 0.1 * 0.5**count


# id -> the options of the alias, and eta_t for t = 0, 1, ...
ALIAS = {
    "no learning rate": ({}, lambda t: 1.0),
    "number": ({"learning_rate": 0.3}, lambda t: 0.3),
    "schedule": ({"learning_rate": halving}, halving),
    "relative step alone": ({"relative_step": True}, lambda t: min(1e-2, (t + 1) ** -0.5)),
    "relative step under a number": (
        {"relative_step": True, "learning_rate": 0.6},
        lambda t: min(0.6, (t + 1) ** -0.5),
    ),
    "relative step under a schedule": (
        {"relative_step": True, "learning_rate": lambda t: 0.2 * (t + 1)},
        lambda t: min(0.2 * (t + 1), (t + 1) ** -0.5),
    ),
    "no parameter scale": (
        {"learning_rate": 0.3, "multiply_by_parameter_scale": False},
        lambda t: 0.3,
    ),
    "the least parameter scale": ({"learning_rate": 0.3, "min_parameter_scale": 5}, lambda t: 0.3),
    "momentum": ({"learning_rate": halving, "momentum": 0.6}, halving),
    "bfloat16 momentum": (
        {"learning_rate": 0.3, "momentum": 0.6, "dtype_momentum": "bfloat16"},
        lambda t: 0.3,
    ),
    "decay": ({"learning_rate": halving, "weight_decay_rate": 0.02}, halving),
    "decay times a number": (
        {"learning_rate": 0.3, "weight_decay_rate": 0.02, "weight_decay_times_lr": True},
        lambda t: 0.3,
    ),
    "decay times a schedule, and momentum": (
        {
            "learning_rate": halving,
            "momentum": 0.6,
            "weight_decay_rate": 0.02,
            "weight_decay_times_lr": True,
        },
        halving,
    ),
    "decay times the relative step": (
        {"relative_step": True, "weight_decay_rate": 0.02, "weight_decay_times_lr": True},
        lambda t: min(1e-2, (t + 1) ** -0.5),
    ),
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
    updates, _, states = traces.unroll(tx, jnp.asarray(grads), jnp.asarray(p), jit=False)

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


@pytest.mark.usefixtures("x64")
def test_weight_decay_mask():
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    grads = jax.tree.map(lambda p: jnp.asarray(traces.gradients(p.shape, 1)[0]), params)

    def update(**options):
        tx = optax_ext.adafactor(0.1, **options)
        return tx.update(grads, tx.init(params), params)[0]

    plain, mask = update(), {"w": True, "b": False}
    for given in (mask, lambda _: mask):
        decayed = update(weight_decay_rate=0.25, weight_decay_mask=given)
        np.testing.assert_allclose(decayed["w"], plain["w"] - 0.25, rtol=1e-12)
        np.testing.assert_array_equal(decayed["b"], plain["b"])


@pytest.mark.parametrize(
    "options",
    [
        {"decay_rate": 0.3},
        {"decay_offset": 2},
        {"beta2_cap": 0.1},
        {"b2": 0.5},
        {"eps": 1.0},
        {"clipping_threshold": 0.3},
        {"factoring": last_two_dims()},
    ],
    ids=lambda options: next(iter(options)),
)
def test_hyperparameters_reach_the_inner_transformation(options):
    """Each argument of ``adafactor`` changes its updates as those of ``scale_by_adafactor``."""
    params = jnp.asarray(traces.parameters((4, 5)), jnp.float32)
    grads = jnp.asarray(traces.gradients((4, 5), 4), jnp.float32)
    alias = functools.partial(optax_ext.adafactor, multiply_by_parameter_scale=False)
    default, _, _ = traces.unroll(alias(), grads, params, jit=False)
    have, _, _ = traces.unroll(alias(**options), grads, params, jit=False)
    inner = optax_ext.scale_by_adafactor(**options)
    want, _, _ = traces.unroll(inner, grads, params, jit=False)
    np.testing.assert_array_equal(have, -want)
    assert not np.array_equal(have, default)
