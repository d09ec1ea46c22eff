"""Bad input raises at the call that made it, naming the argument and its value."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from optax_ext import Factoring, last_two_dims

from .table import every, make

PARAMS = {"w": jnp.ones((6, 4)), "b": jnp.ones(4)}


def came(**kwargs):
    return optax_ext.came(1e-3, **kwargs)


MAKERS = {
    "came": came,
    "scale_by_came": optax_ext.scale_by_came,
    "adafactor": optax_ext.adafactor,
    "scale_by_adafactor": optax_ext.scale_by_adafactor,
    "lars": functools.partial(optax_ext.lars, 1e-3),
    "scale_by_lars": optax_ext.scale_by_lars,
    "lamb": functools.partial(optax_ext.lamb, 1e-3),
    "scale_by_lamb": optax_ext.scale_by_lamb,
    "scale_by_delay": lambda delays=1.0, anneal_steps=10: optax_ext.scale_by_delay(
        delays, anneal_steps
    ),
    "discrepancy_correction": functools.partial(optax_ext.discrepancy_correction, delays=5.0),
}

BETA, NOT_NEGATIVE, POSITIVE = "must be in [0, 1)", "must not be negative", "must be positive"
HYPERPARAMETERS = [
    (("came", "scale_by_came"), ("b1", "b2", "b3"), BETA),
    (("adafactor", "scale_by_adafactor"), ("b2", "beta2_cap"), BETA),
    (("adafactor", "lars"), ("momentum",), BETA),
    (("lamb", "scale_by_lamb"), ("b1", "b2"), BETA),
    (("came", "scale_by_came"), ("eps", "eps_instability"), NOT_NEGATIVE),
    (("adafactor", "scale_by_adafactor"), ("eps", "decay_offset"), NOT_NEGATIVE),
    (("came", "lars", "scale_by_lars", "lamb", "scale_by_lamb"), ("weight_decay",), NOT_NEGATIVE),
    (("adafactor",), ("weight_decay_rate",), NOT_NEGATIVE),
    (("lars", "scale_by_lars"), ("trust_coefficient",), POSITIVE),
    (("lamb", "scale_by_lamb"), ("eps",), POSITIVE),
    (
        ("came", "scale_by_came", "adafactor", "scale_by_adafactor"),
        ("clipping_threshold",),
        POSITIVE,
    ),
    (("adafactor", "scale_by_adafactor"), ("decay_rate",), POSITIVE),
    (("adafactor",), ("min_parameter_scale",), POSITIVE),
    (("discrepancy_correction",), ("decay",), BETA),
    (("scale_by_delay", "discrepancy_correction"), ("delays",), NOT_NEGATIVE),
    (("discrepancy_correction",), ("backward_delays",), NOT_NEGATIVE),
    (("scale_by_delay",), ("anneal_steps",), POSITIVE),
]
OUTSIDE = {
    BETA: [-0.1, 1, 1.0, 1.5, np.nan, np.float32(1.0)],
    NOT_NEGATIVE: [-1e-8, -1, np.nan, -np.inf],
    POSITIVE: [0, 0.0, -1.0, np.nan],
}
INSIDE = {BETA: [0, 0.0, 0.999999], NOT_NEGATIVE: [0, 1e-8], POSITIVE: [1e-8, 1, 5.0]}
CASES = [
    pytest.param(maker, argument, rule, id=f"{maker} {argument}")
    for makers, arguments, rule in HYPERPARAMETERS
    for maker in makers
    for argument in arguments
]


@pytest.mark.parametrize(("maker", "argument", "rule"), CASES)
def test_hyperparameters(maker, argument, rule):
    """Numbers are judged, traced ones are not: under jit any may come."""
    for value in OUTSIDE[rule]:
        for given in (value, np.asarray(value, "float32"), jnp.asarray(value, "float32")):
            with pytest.raises(ValueError, match=rf"^{argument} {re.escape(rule)}") as error:
                MAKERS[maker](**{argument: given})
            assert f"got {given}" in str(error.value)
    for value in INSIDE[rule]:
        MAKERS[maker](**{argument: value})

    def init(value):
        return MAKERS[maker](**{argument: value}).init(PARAMS)

    jax.eval_shape(init, jax.ShapeDtypeStruct((), jnp.float32))


@pytest.mark.parametrize(
    ("maker", "argument"),
    [("came", "mu_dtype"), ("scale_by_came", "mu_dtype"), ("adafactor", "dtype_momentum")],
)
def test_dtypes(maker, argument):
    options = {"momentum": 0.9} if maker == "adafactor" else {}
    for bad in ("int32", jnp.int8, "complex64", bool, "bfloat", 3.5):
        with pytest.raises(ValueError, match=f"^{argument} must be a floating dtype, got "):
            MAKERS[maker](**options, **{argument: bad})


def test_decay_times_a_learning_rate_that_is_not_there():
    with pytest.raises(ValueError, match=r"weight_decay_times_lr=True needs a learning_rate"):
        optax_ext.adafactor(weight_decay_rate=0.1, weight_decay_times_lr=True)
    optax_ext.adafactor(weight_decay_rate=0.1, weight_decay_times_lr=True, relative_step=True)


@every
def test_parameters_and_gradients_that_do_not_fit(name):
    """Broadcasting would take some; the rows and columns of (4, 6) fit those of (6, 4)."""
    tx = make(name)
    state = tx.init(PARAMS)
    for dtype in ("int32", "bool", "complex64", "uint8"):
        bad = {"w": PARAMS["w"], "b": np.ones(4, dtype)}
        for call in (lambda bad=bad: tx.init(bad), lambda bad=bad: tx.update(bad, state, PARAMS)):
            with pytest.raises(ValueError, match=rf"parameter 'b' has dtype {dtype}"):
                call()
    for grads in (
        {"w": PARAMS["w"]},
        PARAMS | {"c": PARAMS["b"]},
        {"w": PARAMS["w"], "c": PARAMS["b"]},
        [PARAMS["w"], PARAMS["b"]],
    ):
        with pytest.raises(ValueError, match="the gradients' tree does not match the state's fi"):
            tx.update(grads, state, PARAMS)
    for shape in ((4, 6), (6, 5), (5, 4), (6,), (2, 6, 4), (1, 4), ()):
        with pytest.raises(ValueError, match=r"gradient 'w' of shape .* does not match") as error:
            tx.update(PARAMS | {"w": np.ones(shape, "float32")}, state, PARAMS)
        assert str(shape) in str(error.value)


@pytest.mark.parametrize("of", [optax_ext.scale_by_came, optax_ext.scale_by_adafactor])
def test_a_state_of_another_rule(of):
    state = of(factoring=last_two_dims()).init(PARAMS)
    for other in (None, Factoring((1,), (0,)), last_two_dims(batch=(0,))):
        with pytest.raises(ValueError, match=r"another factoring rule|names dim"):
            of(factoring=other).update(PARAMS, state)


@pytest.mark.parametrize("maker", ["came", "adafactor", "lars", "lamb"])
def test_parameters_are_needed(maker):
    tx = MAKERS[maker]()
    with pytest.raises(ValueError, match="params"):
        tx.update(PARAMS, tx.init(PARAMS))
    if maker == "adafactor":
        tx = optax_ext.adafactor(0.1, multiply_by_parameter_scale=False)
        tx.update(PARAMS, tx.init(PARAMS))


def test_errors_are_those_of_the_user_under_transformations():
    """The same messages through ``chain``, ``jit`` and ``eval_shape``."""
    tx = optax.chain(optax.clip(1.0), optax_ext.came(1e-3))
    state = tx.init(PARAMS)
    with pytest.raises(ValueError, match="does not match the state"):
        jax.jit(tx.update)({"w": PARAMS["w"]}, state, PARAMS)
    with pytest.raises(ValueError, match="parameter 'b' has dtype int32"):
        jax.eval_shape(tx.init, {"b": jax.ShapeDtypeStruct((4,), "int32")})
