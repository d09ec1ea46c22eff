"""Which fields of a state are stored in low precision, of every optimizer of optax and others."""

import functools
import inspect
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib as oc
import pytest

import optax_ext
from optax_ext import low_precision_state
from optax_ext.low_precision import _roles

RATE, SIDE, STEPS = 1e-2, 64, 200

# --- Fields ---------------------------------------------------------------------------------------


def signs(tx, params):
    """Whether each array is signed, by path and shape; None for those left in float32."""
    tx = optax.with_extra_args_support(tx)
    state = jax.eval_shape(low_precision_state(tx, min_size=0).init, params).inner_state
    flat = jax.tree.leaves_with_path(state, is_leaf=lambda x: isinstance(x, optax_ext.Quantized))
    return {(path, x.shape): getattr(x, "signed", None) for path, x in flat}


def stored(tx):
    """Whether each field of one parameter is signed."""
    found = signs(tx, {"w": jnp.ones((SIDE, SIDE))}).items()
    key = functools.partial(jax.tree_util.keystr, simple=True)
    return {key(path[-2:-1]): x for (path, shape), x in found if shape == (SIDE, SIDE)}


def by_dict(params):
    """State in a dict: ``nu`` has signs, ``m`` has none, ``z`` is a sum, ``p`` a copy."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    return {"nu": zeros, "m": zeros, "z": zeros, "p": params}


def by_dict_update(g, state, params):
    new = {
        "nu": jax.tree.map(lambda a, g: 0.9 * a + 0.1 * g, state["nu"], g),
        "m": jax.tree.map(lambda a, g: 0.999 * a + 0.001 * g * g, state["m"], g),
        "z": jax.tree.map(jnp.add, state["z"], g),
        "p": params,
    }
    adam = lambda nu, m, z: -RATE * (nu / (jnp.sqrt(m) + 1e-8) + z)  # noqa: E731
    return jax.tree.map(adam, new["nu"], new["m"], new["z"]), new


BY_DICT = optax.GradientTransformation(by_dict, by_dict_update)
FIELDS = {
    "a dict": (BY_DICT, {"nu": True, "m": False, "z": None, "p": None}),
    "Adan": (optax.adan(RATE), {"m": True, "v": True, "n": False, "g": True}),
    "SM3, whose nu is a momentum": (optax.sm3(RATE), {"nu": True}),
    "MADGRAD": (oc.madgrad(RATE), {"grad_sum_sq": None, "s": None, "x0": None}),
    "copies in a wrapper": (oc.mechanize(optax.adamw(RATE)), {"mu": True, "nu": False, "x0": None}),
    "a small difference": (
        optax.chain(optax.scale_by_stddev(), optax.trace(0.9)),
        {"mu": None, "nu": None, "trace": True},
    ),
    "what asks for more": (oc.momo_adam(RATE), {"exp_avg": None, "exp_avg_sq": False}),
}


@pytest.mark.parametrize("case", FIELDS)
def test_fields_are_judged_by_what_they_do(case):
    tx, want = FIELDS[case]
    assert stored(tx) == want


def test_fields_that_are_known_are_as_if_they_were_tried():
    """Those of averages; on an Explicit mesh, in a trace, in float64."""
    txs = {
        "adam": optax.adam(RATE),
        "amsgrad": optax.amsgrad(RATE),
        "belief": optax.adabelief(RATE),
        "came": optax_ext.came(RATE),
        "ema": optax.ema(0.9),
        "factored": optax.adafactor(RATE),
        "lamb": optax_ext.lamb(RATE),
        "lars": optax_ext.lars(RATE),
        "lion": optax.lion(RATE),
        "momentum": optax_ext.adafactor(RATE, momentum=0.9),
        "rms": optax.rmsprop(RATE),
        "trace": optax.sgd(RATE, momentum=0.9),
    }
    params = {name: jnp.ones(SIDE) for name in txs}
    tx = optax.partition(txs, {name: name for name in txs})

    def judged():
        return {path: x for (path, _), x in signs(tx, params).items() if x is not None}

    known = judged()
    assert len(known) == 19
    with (
        mock.patch.object(_roles, "_AVERAGES", {}),
        jax.enable_x64(True),
        jax.set_mesh(jax.make_mesh((8,), ("data",))),
    ):
        tried = judged()
    assert {**known, **tried} == known
    assert [path[-2].name for path in known.keys() - tried.keys()] == ["nu_max"]


def test_what_cannot_be_tried_stays_in_float32():
    def refuse(*args, **kwargs):
        raise NotImplementedError

    tx = optax.GradientTransformation(by_dict, refuse)
    with pytest.warns(UserWarning, match="m, nu, p, z could not be tried .*: NotImplementedError"):
        assert set(stored(tx).values()) == {None}


# --- Training -------------------------------------------------------------------------------------

SGD = optax.sgd(0.1, momentum=0.9)
OTHERS = {
    "mechanize": lambda rate: oc.mechanize(optax.adamw(rate)),
    "polyak_sgd": lambda rate: optax.polyak_sgd(),
    "sgd": lambda rate: SGD,
    "sam": lambda rate: oc.sam(SGD, optax.sgd(rate)),
    "stddev": lambda rate: optax.chain(optax.scale_by_stddev(), optax.scale(-rate)),
    "ema": lambda rate: optax.chain(optax.ema(0.9), optax.scale(-rate)),
    "apply_every": lambda rate: optax.chain(optax.apply_every(2), optax.scale(-rate)),
    "lbfgs": lambda rate: optax.lbfgs(rate, linesearch=None),
    "dpsgd": None,  # takes a gradient of each example
    "_deprecated_dpsgd": None,
}
EVERY = {
    name: make
    for module in (optax, oc)
    for name, make in inspect.getmembers(module, inspect.isfunction)
    if next(iter(inspect.signature(make).parameters), "") == "learning_rate"
} | OTHERS
FEW = ("adan", "mechanize")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FEW else pytest.mark.slow) for n in EVERY if EVERY[n]]
)
@pytest.mark.filterwarnings("ignore:Specifying a key", "ignore:.optimistic_adam. is deprecated")
@pytest.mark.filterwarnings("ignore:low_precision_state. the state has no floating")
def test_eight_bits_train_as_sixteen(name):
    """Gradients of one array whose elements differ by decades, with noise."""
    rng = np.random.default_rng(0)
    target, noise = rng.normal(size=(SIDE, SIDE)), rng.normal(size=(STEPS, SIDE, SIDE))
    curvature = np.exp(2 * rng.normal(size=(SIDE, SIDE)))
    target, noise, curvature = (jnp.asarray(x, jnp.float32) for x in (target, noise, curvature))

    def loss(w):
        return jnp.mean(curvature * (w - target) ** 2)

    def trained(bits):
        tx = optax.with_extra_args_support(low_precision_state(EVERY[name](RATE), bits, min_size=0))

        def step(carry, noise):
            w, state = carry

            def noisy(w):
                return loss(w) + 0.1 * jnp.mean(curvature * noise * w)

            value, g = jax.value_and_grad(noisy)(w)
            extra = {"value": value, "grad": g, "value_fn": noisy, "obj_fn": noisy}
            updates, state = tx.update(g, state, w, **({} if name == "sam" else extra))
            return (optax.apply_updates(w, updates), state), None

        w = 0.01 * target
        (w, _), _ = jax.lax.scan(step, (w, tx.init(w)), noise)
        return loss(w)

    eight, sixteen = jax.jit(lambda: (trained(8), trained(16)))()
    assert 0 < eight <= 1.5 * sixteen
