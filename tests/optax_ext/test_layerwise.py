"""LARS and LAMB against the papers in NumPy, against optax, and what is theirs alone."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from optax_ext import Factoring, by_path
from optax_ext._trust_ratio import norm

SHAPES = {"w": (6, 4), "kernel": (3, 2, 5), "b": (4,), "gain": ()}
STEPS = 300


def example(seed=0):
    """(gradients of every step, parameters); gradients drift, and layers differ by decades."""
    rng = np.random.default_rng(seed)
    params = {k: np.asarray(rng.normal(size=s)) for k, s in SHAPES.items()}
    sizes = {k: 10.0 ** rng.uniform(-3, 2) for k in SHAPES}
    grads = [
        {k: np.asarray(sizes[k] * (rng.normal(size=s) + np.cos(t / 20))) for k, s in SHAPES.items()}
        for t in range(STEPS)
    ]
    return grads, params


def run(tx, grads, params):
    """The parameters after every step."""
    params = jax.tree.map(jnp.asarray, params)

    @jax.jit
    def step(carry, g):
        params, state = carry
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *grads)
    return jax.device_get(jax.lax.scan(step, (params, tx.init(params)), stacked)[1])


def assert_same(have, want, rtol=1e-12):
    for k in want:
        error = np.linalg.norm(have[k] - want[k])
        assert error <= rtol * np.linalg.norm(want[k]), (k, error)


def is_matrix(x):
    return np.ndim(x) > 1


class Lars:
    """One array by the paper's algorithm."""

    def __init__(self, w, is_layer, lr, m, decay, trust):
        self.w, self.v = np.array(w, np.float64), np.zeros(np.shape(w))
        self.is_layer, self.lr, self.m, self.trust = is_layer, lr, m, trust
        self.decay = decay if is_layer else 0.0

    def step(self, g, t):
        local = 1.0
        if self.is_layer:
            w_norm, g_norm = (np.sqrt(x.ravel() @ x.ravel()) for x in (self.w, g))
            local = self.trust * w_norm / (g_norm + self.decay * w_norm)
        self.v = self.m * self.v + self.lr(t) * local * (g + self.decay * self.w)
        self.w = self.w - self.v
        return self.w


class Lamb:
    """One array by the paper's algorithm 2; ``phi`` clips."""

    def __init__(self, w, is_layer, lr, b1, b2, eps, decay, phi=lambda z: z):
        self.w = np.array(w, np.float64)
        self.m = self.v = np.zeros(np.shape(w))
        self.is_layer, self.lr, self.betas, self.eps = is_layer, lr, (b1, b2), eps
        self.decay, self.phi = decay if is_layer else 0.0, phi

    def step(self, g, t):
        b1, b2 = self.betas
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g**2
        r = self.m / (1 - b1 ** (t + 1)) / (np.sqrt(self.v / (1 - b2 ** (t + 1))) + self.eps)
        u = r + self.decay * self.w
        if self.is_layer:
            w_norm, u_norm = (np.sqrt(x.ravel() @ x.ravel()) for x in (self.w, u))
            u = self.phi(w_norm) / u_norm * u
        self.w = self.w - self.lr(t) * u
        return self.w


def by_paper(make, grads, params):
    """The parameters after every step, each array by a reference of its own."""
    arrays = {k: make(w, is_matrix(w)) for k, w in params.items()}
    steps = [{k: a.step(g[k], t) for k, a in arrays.items()} for t, g in enumerate(grads)]
    return {k: np.stack([s[k] for s in steps]) for k in params}


def falling(rate):
    return lambda t: rate / (1.0 + 0.02 * t)


# --- Against the papers, and against optax --------------------------------------------------------


@pytest.mark.usefixtures("x64")
def test_lars_is_the_papers():
    grads, params = example()
    lr = falling(2.0)
    tx = optax_ext.lars(lr, 0.8, weight_decay=0.05, trust_coefficient=0.02)
    want = by_paper(lambda w, layer: Lars(w, layer, lr, 0.8, 0.05, 0.02), grads, params)
    assert_same(run(tx, grads, params), want)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("bounds", [None, (2.0, 3.0)])
def test_lamb_is_the_papers(bounds):
    grads, params = example()
    lr = falling(0.05)
    tx = optax_ext.lamb(lr, 0.8, 0.98, 1e-5, weight_decay=0.1, norm_bounds=bounds)
    phi = (lambda z: min(max(z, bounds[0]), bounds[1])) if bounds else (lambda z: z)
    want = by_paper(lambda w, layer: Lamb(w, layer, lr, 0.8, 0.98, 1e-5, 0.1, phi), grads, params)
    assert_same(run(tx, grads, params), want)


@pytest.mark.usefixtures("x64")
def test_lamb_without_masks_is_that_of_optax():
    grads, params = example()
    lr, decay = falling(0.05), falling(0.1)
    ours = optax_ext.lamb(lr, weight_decay=decay, weight_decay_mask=None, trust_ratio_mask=None)
    theirs = optax.lamb(lr, weight_decay=decay)
    assert_same(run(ours, grads, params), run(theirs, grads, params))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_with_that_denominator_is_that_of_optax(nesterov):
    grads, params = example()
    lr, mask = falling(2.0), jax.tree.map(is_matrix, params)
    ours = optax_ext.lars(lr, weight_decay=0.05, denominator="optax", nesterov=nesterov)
    theirs = optax.lars(lr, 0.05, weight_decay_mask=mask, trust_ratio_mask=mask, nesterov=nesterov)
    assert_same(run(ours, grads, params), run(theirs, grads, params))


@pytest.mark.usefixtures("x64")
def test_the_denominators_differ_elevenfold_where_decay_is_against_the_gradient():
    """|w| = 1, |g| = 1.2, beta = 1: 1.2 + 1 in the paper, 1.2 - 1 in optax."""
    params = {"w": jnp.array([[0.6, 0.8]])}
    grads = {"w": -1.2 * params["w"]}
    paper, other = (
        optax_ext.scale_by_lars(0.001, weight_decay=1.0, denominator=name).update(
            grads, optax_ext.ScaleByLarsState(None), params
        )[0]["w"]
        for name in ("paper", "optax")
    )
    np.testing.assert_allclose(np.asarray(other) / np.asarray(paper), 11.0, rtol=1e-12)
    np.testing.assert_allclose(paper, 0.001 / 2.2 * -0.2 * params["w"], rtol=1e-12)


# --- Which arrays ---------------------------------------------------------------------------------

MAKERS = {
    "lars": lambda **kw: optax_ext.scale_by_lars(0.1, weight_decay=0.5, **kw),
    "lamb": lambda **kw: optax_ext.scale_by_lamb(weight_decay=0.5, **kw),
}
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def first(make, params, grads, **options):
    tx = make(**options)
    return jax.device_get(tx.update(grads, tx.init(params), params)[0])


@every_maker
@pytest.mark.usefixtures("x64")
def test_biases_and_norms_are_excluded_unless_asked(make):
    grads, params = example()
    params, grads = ({k: jnp.asarray(x) for k, x in tree.items()} for tree in (params, grads[0]))
    by_default = first(make, params, grads)
    for mask in (
        {k: is_matrix(x) for k, x in params.items()},
        lambda p: jax.tree.map(is_matrix, p),
    ):
        same = first(make, params, grads, weight_decay_mask=mask, trust_ratio_mask=mask)
        chex.assert_trees_all_equal(by_default, same)
    without = first(make, params, grads, weight_decay_mask=False, trust_ratio_mask=False)
    every = first(make, params, grads, weight_decay_mask=None, trust_ratio_mask=None)
    for k in params:
        np.testing.assert_array_equal(
            by_default[k], (every if is_matrix(params[k]) else without)[k]
        )
        assert np.linalg.norm(every[k] - without[k]) > 1e-3 * np.linalg.norm(without[k])
    decay_alone = first(make, params, grads, trust_ratio_mask=False, weight_decay_mask=None)
    for k in params:
        np.testing.assert_allclose(decay_alone[k], without[k] + 0.5 * params[k], rtol=1e-12)


@every_maker
@pytest.mark.usefixtures("x64")
def test_stacked_layers_have_norms_of_their_own(make):
    """As if they were apart; and a stack of biases is no matrix."""
    rng = np.random.default_rng(0)
    size = np.array([1e-3, 1.0, 50.0])
    params = {
        "block": {
            "w": rng.normal(size=(3, 6, 4)) * size[:, None, None],
            "b": rng.normal(size=(3, 4)),
        },
        "head": rng.normal(size=(4, 6)),
    }
    params = jax.tree.map(jnp.asarray, params)
    grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), params)
    rule = by_path({"block": Factoring(batch=(0,))}, default=None)
    have = first(make, params, grads, stacked=rule)
    for i in range(3):
        own = {"block": jax.tree.map(lambda x, i=i: x[i], params["block"]), "head": params["head"]}
        g = {"block": jax.tree.map(lambda x, i=i: x[i], grads["block"]), "head": grads["head"]}
        want = first(make, own, g)
        np.testing.assert_allclose(have["head"], want["head"], rtol=1e-12)
        for k in ("w", "b"):
            np.testing.assert_allclose(have["block"][k][i], want["block"][k], rtol=1e-12)
    shared, own = (tree["block"]["w"][0] for tree in (first(make, params, grads), have))
    assert np.linalg.norm(shared - own) > 0.1 * np.linalg.norm(shared)


@every_maker
def test_a_norm_of_zero_means_a_ratio_of_one(make):
    zeros, ones = jnp.zeros((2, 3)), jnp.ones((2, 3))
    # Zero weights: the direction as it is; LAMB's first is the sign of the gradient.
    np.testing.assert_allclose(first(make, {"w": zeros}, {"w": ones})["w"], ones, rtol=1e-5)
    # Zero gradients and weights: nothing.
    np.testing.assert_array_equal(first(make, {"w": zeros}, {"w": zeros})["w"], zeros)


def test_of_lars_without_a_gradient_only_plain_decay_is_left():
    ones = jnp.ones((2, 3))
    out = first(MAKERS["lars"], {"w": ones}, {"w": 0 * ones})["w"]
    np.testing.assert_allclose(out, 0.5 * ones)


@every_maker
def test_nan_in_one_element_is_nan_in_all(make):
    params = {"w": jnp.ones((2, 3))}
    bad = {"w": params["w"].at[0, 0].set(jnp.nan)}
    assert np.isnan(first(make, params, bad)["w"]).all()


# --- Norms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-34, 1e-30, 1e-12, 1e-9, 1.0, 1e9, 1e19, 1e30, 1e36])
def test_norms_of_any_magnitude(size):
    x = (np.random.default_rng(0).normal(size=(40, 30)) * size).astype(np.float32)
    want = np.linalg.norm(x.astype(np.float64))
    np.testing.assert_allclose(norm(jnp.asarray(x))[0, 0], want, rtol=1e-5)
    assert norm(jnp.asarray(x)).shape == (1, 1)


@every_maker
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_norms_of_narrow_parameters_are_summed_in_float32(make, dtype):
    """In float16 squares of 1e-4 are 0, and squares of 300 infinite."""
    params = {"w": jnp.full((64, 64), 1e-4, dtype)}
    grads = {"w": jnp.full((64, 64), 300.0, dtype)}
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (params, grads))
    have, want = first(make, params, grads)["w"], first(make, *wide)["w"]
    assert have.dtype == dtype
    assert np.all(want != 0)
    np.testing.assert_allclose(have.astype(np.float32), want, rtol=2.0**-8)


# --- In low precision -----------------------------------------------------------------------------


def test_8_bit_lamb_is_lamb():
    """It follows LAMB, and not Adam: bitsandbytes' LAMB8bit is its Adam8bit bit for bit."""
    rng = np.random.default_rng(0)
    start = {"w": jnp.asarray(rng.normal(size=(64, 128)) / 8, jnp.float32), "b": jnp.zeros(128)}
    x = jnp.asarray(rng.normal(size=(256, 64)), jnp.float32)
    y = jnp.tanh(x @ jnp.asarray(rng.normal(size=(64, 128)) / 4, jnp.float32))
    grad = jax.grad(lambda p: jnp.mean((jnp.tanh(x @ p["w"] + p["b"][None]) - y) ** 2))

    def train(tx):
        @jax.jit
        def step(carry, _):
            params, state = carry
            updates, state = tx.update(grad(params), state, params)
            return (optax.apply_updates(params, updates), state), None

        (params, _), _ = jax.lax.scan(step, (start, tx.init(start)), length=100)
        return np.asarray(params["w"])

    lamb = train(optax_ext.lamb(1e-2, weight_decay=0.01))
    path = np.linalg.norm(lamb - start["w"])
    lamb8, adam8 = (
        train(optax_ext.low_precision_state(tx))
        for tx in (optax_ext.lamb(1e-2, weight_decay=0.01), optax.adamw(1e-2, weight_decay=0.01))
    )
    assert not np.array_equal(lamb8, lamb)
    assert np.linalg.norm(lamb8 - lamb) < 0.05 * path
    assert np.linalg.norm(lamb8 - adam8) > 0.2 * path
    np.testing.assert_array_equal(lamb8, train(optax_ext.lamb8bit(1e-2, weight_decay=0.01)))


# --- Errors ---------------------------------------------------------------------------------------


@every_maker
def test_bad_masks_and_rules(make):
    params = {"w": jnp.ones((2, 3))}
    for argument in ("weight_decay_mask", "trust_ratio_mask"):
        with pytest.raises(ValueError, match=rf"^{argument} must be 'matrices', .*got 'vectors'"):
            make(**{argument: "vectors"})
        with pytest.raises(ValueError, match=rf"^{argument} does not fit the parameters"):
            first(make, params, params, **{argument: {"v": True}})
    with pytest.raises(ValueError, match=r"^stacked must be a Factoring, a rule"):
        make(stacked=(0,))


def test_bad_denominators_and_bounds():
    with pytest.raises(ValueError, match="denominator must be 'paper' or 'optax', got 'both'"):
        optax_ext.lars(1.0, denominator="both")
    for bounds in (1.0, (1.0,), (2.0, 1.0), (-1.0, 1.0), (0.0, 0.0)):
        with pytest.raises(ValueError, match="norm_bounds"):
            optax_ext.lamb(1.0, norm_bounds=bounds)
