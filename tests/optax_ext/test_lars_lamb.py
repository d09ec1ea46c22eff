"""LARS and LAMB against the papers in NumPy, against optax, and what is theirs alone."""

import functools

import jax
import numpy as np
import optax
import pytest

import optax_ext
from optax_ext import Factoring
from optax_ext._trust_ratio import norm

from ..contract.table import assert_close
from . import traces

SHAPES = {"w": (6, 4), "kernel": (3, 2, 5), "b": (4,), "gain": ()}
STEPS = 300


def example(seed=0):
    """(gradients of every step, parameters); gradients drift, and layers differ by decades."""
    rng = np.random.default_rng(seed)
    params = {k: np.asarray(rng.normal(size=s)) for k, s in SHAPES.items()}
    drift = np.cos(np.arange(STEPS) / 20)
    grads = {
        k: 10.0 ** rng.uniform(-3, 2)
        * (rng.normal(size=(STEPS, *s)) + drift.reshape(STEPS, *[1] * len(s)))
        for k, s in SHAPES.items()
    }
    return grads, params


def is_matrix(x):
    return np.ndim(x) > 1


def lars(w, grads, is_layer, lr, m, decay, trust, nesterov=False):
    """One array after each step of the paper's algorithm, or of its variant by Nesterov."""
    v, decay, seen = np.zeros(np.shape(w)), decay if is_layer else 0.0, []
    for t, g in enumerate(grads):
        local = 1.0
        if is_layer:
            w_norm, g_norm = (np.sqrt(x.ravel() @ x.ravel()) for x in (w, g))
            local = trust * w_norm / (g_norm + decay * w_norm)
        new = lr(t) * local * (g + decay * w)
        v = m * v + new
        w = w - (m * v + new if nesterov else v)
        seen.append(w)
    return np.stack(seen)


def lamb(w, grads, is_layer, lr, b1, b2, eps, decay):
    """One array after each step of the paper's algorithm 2."""
    m = v = np.zeros(np.shape(w))
    decay, seen = decay if is_layer else 0.0, []
    for t, g in enumerate(grads):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        r = m / (1 - b1 ** (t + 1)) / (np.sqrt(v / (1 - b2 ** (t + 1))) + eps)
        u = r + decay * w
        if is_layer:
            w_norm, u_norm = (np.sqrt(x.ravel() @ x.ravel()) for x in (w, u))
            u = w_norm / u_norm * u
        w = w - lr(t) * u
        seen.append(w)
    return np.stack(seen)


def falling(rate):
    return lambda t: rate / (1.0 + 0.02 * t)


def params_after(tx):
    grads, params = example()
    return traces.unroll(tx, grads, params)[1]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["lars", "lars, nesterov", "lamb"])
def test_every_step_is_the_papers(name):
    if name != "lamb":
        lr, more = falling(2.0), {"nesterov": name != "lars"}
        tx = optax_ext.lars(lr, 0.8, weight_decay=0.05, trust_coefficient=0.02, **more)
        make = functools.partial(lars, lr=lr, m=0.8, decay=0.05, trust=0.02, **more)
    else:
        lr = falling(0.05)
        tx = optax_ext.lamb(lr, 0.8, 0.98, 1e-5, weight_decay=0.1)
        make = functools.partial(lamb, lr=lr, b1=0.8, b2=0.98, eps=1e-5, decay=0.1)
    grads, params = example()
    have = params_after(tx)
    for k, w in params.items():
        assert_close(have[k], make(w, grads[k], is_matrix(w)))


@pytest.mark.usefixtures("x64")
def test_every_step_is_that_of_optax():
    """LAMB without masks, which decays by a schedule."""
    lr, decay = falling(0.05), falling(0.1)
    none = {"weight_decay_mask": None, "trust_ratio_mask": None}
    ours = optax_ext.lamb(lr, weight_decay=decay, **none)
    assert_close(params_after(ours), params_after(optax.lamb(lr, weight_decay=decay)))


MAKERS = {
    "lars": lambda **kw: optax_ext.scale_by_lars(0.1, weight_decay=0.5, **kw),
    "lamb": lambda **kw: optax_ext.scale_by_lamb(weight_decay=0.5, **kw),
}
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def firsts(make, params, grads, *options):
    """The first updates with each of these options, in one program."""
    txs = [make(**option) for option in options]
    updates = jax.jit(lambda p, g: [tx.update(g, tx.init(p), p)[0] for tx in txs])
    return jax.device_get(updates(params, grads))


@every_maker
@pytest.mark.usefixtures("x64")
def test_stacked_layers_have_norms_of_their_own(make):
    """As if they were apart; and a stack of biases is no matrix."""
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(3, 6, 4)), "b": rng.normal(size=(3, 4))}
    params["w"] *= np.array([1e-3, 1.0, 50.0])[:, None, None]
    grads = jax.tree.map(lambda x: rng.normal(size=x.shape), params)
    stacked, shared = firsts(make, params, grads, {"stacked": Factoring(batch=(0,))}, {})
    for i in range(3):
        [want] = firsts(make, *jax.tree.map(lambda x, i=i: x[i], (params, grads)), {})
        for k, x in want.items():
            np.testing.assert_allclose(stacked[k][i], x, rtol=1e-12)
    assert np.linalg.norm((shared["w"] - stacked["w"])[0]) > 0.1 * np.linalg.norm(shared["w"][0])


@every_maker
@pytest.mark.usefixtures("x64")
def test_biases_and_norms_are_excluded_unless_asked(make):
    grads, params = example()
    grads = {k: g[0] for k, g in grads.items()}
    matrices = {k: is_matrix(x) for k, x in params.items()}
    of = lambda decay, ratio: {"weight_decay_mask": decay, "trust_ratio_mask": ratio}  # noqa: E731
    none = dict.fromkeys(matrices, False)
    options = ({}, of(matrices, matrices), of(none, False), of(None, None), of(None, False))
    by_default, same, without, every, decay_alone = firsts(make, params, grads, *options)
    for k, is_layer in matrices.items():
        want = (every if is_layer else without)[k]
        for have in (by_default, same):
            np.testing.assert_allclose(have[k], want, rtol=1e-14)
        assert np.linalg.norm(every[k] - without[k]) > 1e-3 * np.linalg.norm(without[k])
        np.testing.assert_allclose(decay_alone[k], without[k] + 0.5 * params[k], rtol=1e-12)


@every_maker
def test_special_values(make):
    """A norm of zero means a ratio of one; NaN in one element is NaN in all."""
    zeros, ones = np.zeros((2, 3), "float32"), np.ones((2, 3), "float32")
    bad = np.where(np.arange(6).reshape(2, 3) == 0, np.nan, 1).astype("float32")
    params = {"no weights": zeros, "nothing": zeros, "bad": ones, "no gradient": ones}
    grads = {"no weights": ones, "nothing": zeros, "bad": bad, "no gradient": zeros}
    [have] = firsts(make, params, grads, {})
    # LAMB's first direction is the sign of the gradient.
    np.testing.assert_allclose(have["no weights"], ones, rtol=1e-5)
    np.testing.assert_array_equal(have["nothing"], zeros)
    assert np.isnan(have["bad"]).all()
    if make is MAKERS["lars"]:  # plain decay
        np.testing.assert_allclose(have["no gradient"], 0.5 * ones)


def test_norms_of_any_magnitude():
    """Of arrays of one element too: XLA would square the scale of a single square."""
    sizes = np.array([1e-34, 1e-30, 1e-12, 1e-9, 1.0, 1e9, 1e19, 1e30, 1e36])
    rng = np.random.default_rng(0)
    for shape, batch in (((40, 30), ()), ((1, 1), ()), ((1,), ()), ((), ()), ((5, 1), (0,))):
        x = rng.normal(size=shape) * sizes.reshape(-1, *[1] * len(shape))
        x = list(x.astype(np.float32))
        have = jax.jit(lambda xs, batch=batch: [norm(x, batch) for x in xs])(x)
        dims = tuple(d for d in range(len(shape)) if d not in batch)
        for one, n in zip(x, have, strict=True):
            want = np.sqrt(np.sum(np.square(one.astype(np.float64)), axis=dims, keepdims=True))
            assert n.shape == want.shape
            np.testing.assert_allclose(n, want, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (optax_ext.lars, {"weight_decay_mask": "vectors"}, "^weight_decay_mask must be 'm"),
        (optax_ext.lamb, {"trust_ratio_mask": "vectors"}, "^trust_ratio_mask must be 'mat"),
        (optax_ext.lamb, {"trust_ratio_mask": {}}, "^trust_ratio_mask does not fit the parameters"),
        (optax_ext.lamb, {"stacked": (0,)}, "^stacked must be a Factoring, a rule"),
    ],
)
def test_bad_input(make, options, message):
    params = {"w": np.ones((2, 3))}
    with pytest.raises(ValueError, match=message):
        firsts(make, params, params, {"learning_rate": 1.0} | options)
