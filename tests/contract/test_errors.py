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


MAKERS = {
    "came": functools.partial(optax_ext.came, 1e-3),
    "adafactor": optax_ext.adafactor,
    "lars": functools.partial(optax_ext.lars, 1e-3),
    "lamb": functools.partial(optax_ext.lamb, 1e-3),
    "scale_by_delay": functools.partial(optax_ext.scale_by_delay, delays=1.0),
    "discrepancy_correction": functools.partial(optax_ext.discrepancy_correction, delays=5.0),
}

BETA, NOT_NEGATIVE, POSITIVE = "must be in [0, 1)", "must not be negative", "must be positive"
HYPERPARAMETERS = [
    ("came", BETA, "b1 b2 b3"),
    ("came", NOT_NEGATIVE, "eps eps_instability weight_decay"),
    ("came", POSITIVE, "clipping_threshold"),
    ("adafactor", BETA, "b2 beta2_cap momentum"),
    ("adafactor", NOT_NEGATIVE, "eps decay_offset weight_decay_rate"),
    ("adafactor", POSITIVE, "clipping_threshold decay_rate min_parameter_scale"),
    ("lars", BETA, "momentum"),
    ("lars", NOT_NEGATIVE, "weight_decay"),
    ("lars", POSITIVE, "trust_coefficient"),
    ("lamb", BETA, "b1 b2"),
    ("lamb", NOT_NEGATIVE, "weight_decay"),
    ("lamb", POSITIVE, "eps"),
    ("discrepancy_correction", BETA, "decay"),
    ("discrepancy_correction", NOT_NEGATIVE, "delays"),
    ("scale_by_delay", POSITIVE, "anneal_steps"),
]
OUTSIDE = {
    BETA: [-0.1, 1, 1.0, 1.5, np.nan, np.float32(1.0)],
    NOT_NEGATIVE: [-1e-8, -1, np.nan, -np.inf],
    POSITIVE: [0, 0.0, -1.0, np.nan],
}
INSIDE = {BETA: [0, 0.0, 0.999999], NOT_NEGATIVE: [0, 1e-8], POSITIVE: [1e-8, 1, 5.0]}
CASES = [
    pytest.param(maker, argument, rule, id=f"{maker} {argument}")
    for maker, rule, arguments in HYPERPARAMETERS
    for argument in arguments.split()
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
    jax.eval_shape(lambda value: MAKERS[maker](**{argument: value}).init(PARAMS), jnp.ones(()))


def test_dtypes():
    for bad in ("int32", jnp.int8, "complex64", bool, "bfloat", 3.5):
        with pytest.raises(ValueError, match=r"^mu_dtype must be a floating dtype, got "):
            optax_ext.came(1e-3, mu_dtype=bad)
        with pytest.raises(ValueError, match=r"^dtype_momentum must be a floating dtype, got "):
            optax_ext.adafactor(momentum=0.9, dtype_momentum=bad)


def test_decay_times_a_learning_rate_that_is_not_there():
    with pytest.raises(ValueError, match=r"weight_decay_times_lr=True needs a learning_rate"):
        optax_ext.adafactor(weight_decay_rate=0.1, weight_decay_times_lr=True)
    optax_ext.adafactor(weight_decay_rate=0.1, weight_decay_times_lr=True, relative_step=True)


NO_PARAMETERS = {
    "has dtype int32; only real floating .* Exclude it with optax.masked": np.ones(4, "int32"),
    "has dtype complex64; only real floating": np.ones(4, "complex64"),
    "has dtype float8_e4m3fn, which JAX .* Store it in bfloat16": jnp.ones(4, jnp.float8_e4m3fn),
    r"is 1\.5, of type float: make it an array": 1.5,
}


@every
def test_parameters_and_gradients_that_do_not_fit(name):
    """Broadcasting would take some; the rows and columns of (4, 6) fit those of (6, 4)."""
    tx = make(name)
    state = tx.init(PARAMS)
    for message, leaf in NO_PARAMETERS.items():
        bad = PARAMS | {"b": leaf}
        for call in (lambda bad=bad: tx.init(bad), lambda bad=bad: tx.update(bad, state, PARAMS)):
            with pytest.raises(ValueError, match=f"parameter 'b' {message}"):
                call()
    lacking = "there is no gradient of 'b', or it is None. Give zeros, or"
    for grads, message in (
        ({"w": PARAMS["w"]}, lacking),
        (PARAMS | {"b": None}, lacking),
        (PARAMS | {"c": PARAMS["b"]}, "there is a gradient of 'c', which has no state"),
    ):
        text = f"the gradients' tree does not match the state's field '.*': {message}"
        with pytest.raises(ValueError, match=text):
            tx.update(grads, state, PARAMS)
    for shape in ((4, 6), (6,), (2, 6, 4), (1, 4), ()):
        message = f"gradient 'w' of shape {re.escape(str(shape))} does not match"
        with pytest.raises(ValueError, match=message):
            tx.update(PARAMS | {"w": np.ones(shape, "float32")}, state, PARAMS)


@pytest.mark.parametrize("around", [optax_ext.low_precision_state, optax_ext.stochastic_rounding])
def test_numbers_in_place_of_arrays_in_wrappers_of_optax(around):
    with pytest.raises(ValueError, match=r"parameter 'a/b' is 1\.5, of type float: make it an"):
        around(optax.adam(1e-3)).init({"a": {"w": jnp.ones(3), "b": 1.5}})


@pytest.mark.parametrize("of", [optax_ext.scale_by_came, optax_ext.scale_by_adafactor])
def test_a_state_of_another_rule(of):
    state = of(factoring=last_two_dims()).init(PARAMS)
    for other in (None, Factoring((1,), (0,)), last_two_dims(batch=(0,))):
        with pytest.raises(ValueError, match=r"another factoring rule|names dim"):
            of(factoring=other).update(PARAMS, state)


@pytest.mark.parametrize("maker", ["adafactor", "lars", "lamb"])
def test_parameters_are_needed(maker):
    tx = MAKERS[maker]()
    with pytest.raises(ValueError, match="params"):
        tx.update(PARAMS, tx.init(PARAMS))
