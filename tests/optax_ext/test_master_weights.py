"""Master weights: parameters are the masters, rounded, and masters move as float32 does."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import optax_ext

from . import traces

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
NUM_STEPS = 300


def example(dtype, num_steps=NUM_STEPS):
    """Parameters over many decades, zeros among them, and float32 gradients of every step."""
    rng = np.random.default_rng(0)
    decades = 10 ** rng.uniform(-7, 3, (16, 24))
    params = {"w": rng.normal(size=(16, 24)) * decades, "b": np.zeros(24), "s": np.array(0.3)}
    params = {k: jnp.asarray(v, dtype) for k, v in params.items()}
    grads = {k: rng.normal(size=(num_steps, *v.shape)) for k, v in params.items()}
    return params, {k: g.astype("float32") for k, g in grads.items()}


def bits(x):
    x = np.asarray(x)
    return x.view(f"uint{8 * x.itemsize}")


def assert_law(params, master):
    """``params == master.astype(params.dtype)`` in bits; the cast is NumPy's, not XLA's."""

    def check(path, p, m):
        with np.errstate(over="ignore", invalid="ignore"):
            want = np.asarray(m).astype(p.dtype)
        p = np.asarray(p)
        nan = np.isnan(p.astype("float32")) & np.isnan(want.astype("float32"))
        wrong = (bits(p) != bits(want)) & ~nan
        assert not wrong.any(), (jax.tree_util.keystr(path), p[wrong], np.asarray(m)[wrong])

    jax.tree_util.tree_map_with_path(check, params, master)


def adamw(grads, w, lr=1e-3, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.1):
    """The weights after each step of AdamW (Loshchilov and Hutter 2019) in float64."""
    w, mu, nu, seen = np.asarray(w, np.float64), 0.0, 0.0, []
    for t, g in enumerate(np.asarray(grads, np.float64), 1):
        mu, nu = b1 * mu + (1 - b1) * g, b2 * nu + (1 - b2) * g**2
        hat = (mu / (1 - b1**t)) / (np.sqrt(nu / (1 - b2**t)) + eps)
        w = w - lr * (hat + weight_decay * w)
        seen.append(w)
    return np.stack(seen)


@every_dtype
def test_hundreds_of_steps_in_one_program(dtype):
    """Where XLA may keep a parameter of one step in float32 for the next; many steps are small.

    Masters are those of an independent AdamW. In float32 a step rounds by 2^-24 of the parameter,
    here below 4.
    """
    params, grads = example(dtype)
    params = jax.tree.map(lambda p: jnp.clip(p, -4, 4), params)
    tx = optax_ext.master_weights(optax.adamw(1e-3, weight_decay=0.1))
    _, seen, states = traces.unroll(tx, grads, params)
    assert_law(seen, states.master)
    assert (bits(seen["w"][-1]) != bits(params["w"])).any()
    for k, master in states.master.items():
        np.testing.assert_allclose(master, adamw(grads[k], params[k]), rtol=3e-6, atol=3e-6)


@every_dtype
def test_nothing_is_left_to_a_cast_that_may_be_dropped(dtype):
    """XLA may drop a cast to 16 bits and back (the CPU compiler does not): there is none."""
    params = jnp.ones(3, dtype)
    tx = optax_ext.master_weights(ADD)
    jaxpr = jax.make_jaxpr(tx.update)(jnp.ones(3), tx.init(params), params)

    def equations(jaxpr):
        for equation in jaxpr.eqns:
            yield equation
            if "jaxpr" in equation.params:
                yield from equations(equation.params["jaxpr"].jaxpr)

    found = list(equations(jaxpr.jaxpr))
    assert {"reduce_precision", "optimization_barrier"} <= {e.primitive.name for e in found}
    for equation in found:
        assert jnp.dtype(dtype) not in {v.aval.dtype for v in equation.outvars}


# An inner transformation that does nothing: masters plus what the test says.
ADD = optax.GradientTransformation(optax.init_empty_state, lambda u, s, p=None: (u, s))


@functools.cache
def added():
    """Eagerly and under jit."""
    step = traces.step_of(optax_ext.master_weights(ADD))
    return step, jax.jit(step)


def check_law(old, update, dtype):
    """A step to any new master, and one more."""
    params = jnp.asarray(old.astype(dtype))
    for step in added():
        p, state = params, optax_ext.master_weights(ADD).init(params)
        for u in (update, np.zeros_like(update), -update):
            p, state = step(u, state, p)
            assert_law(p, state.master)


@every_dtype
def test_the_law_holds_for_many_values(dtype):
    """Of all exponents, of those of float16, near each other, and special ones to each other.

    1 + u is a multiple of 2^-24 where u is float32: below that, masters are what was reached.
    """
    rng, n = np.random.default_rng(0), 50_000
    tie = 2.0**-25
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, tie, -tie, 65504, 65520], np.float32)

    def values(exponents):
        x = np.ldexp(rng.uniform(1, 2, n), rng.integers(*exponents, n)) * rng.choice([-1, 1], n)
        return np.where(rng.random(n) < 0.05, 0, x).astype(np.float32)

    with np.errstate(over="ignore", invalid="ignore"):
        for exponents in ((-126, 127), (-30, 16)):
            old, new = values(exponents), values(exponents)
            near = rng.random(n) < 0.5
            new[near] = (old * (1 + 2.0 ** rng.integers(-12, 0, n) * rng.normal(size=n)))[near]
            old[:1000] = -0.0
            update = (new - old).astype(np.float32)
            old[-81:], update[-81:] = np.repeat(special, 9), np.tile(special, 9)
            check_law(old, update, DTYPES[dtype])


def test_what_is_not_finite_flows():
    params = {"w": jnp.ones(4, jnp.float16), "b": jnp.ones((), jnp.float16)}
    tx = optax_ext.master_weights(optax.sgd(1.0))
    bad = {"w": jnp.array([np.nan, np.inf, -1e6, 1.0]), "b": jnp.array(0.5)}
    updates, state = jax.jit(tx.update)(bad, tx.init(params), params)
    p = optax.apply_updates(params, updates)
    assert_law(p, state.master)
    # 1e6 is finite, but not in float16: the update says so.
    np.testing.assert_array_equal(updates["w"], [np.nan, -np.inf, np.inf, -1])
    np.testing.assert_array_equal(p["w"], [np.nan, -np.inf, np.inf, 0])
    assert float(p["b"]) == 0.5


@every_dtype
def test_infinite_parameters_stay(dtype):
    """Masks of -inf, and what overflowed: a finite step moves neither, and NaN remains NaN."""
    inf, huge = np.inf, 3e38 if dtype == "bfloat16" else 65000
    params = jnp.array([-inf, inf, -inf, inf, -inf, inf, huge], dtype)
    update = np.array([0, 0, 1, -1, np.nan, -inf, huge], np.float32)
    want = [-inf, inf, -inf, inf, np.nan, np.nan, inf]
    for step in added():
        p, state = params, optax_ext.master_weights(ADD).init(params)
        for u in (update, np.zeros_like(update), np.where(np.isfinite(update), -update, 0)):
            p, state = step(u, state, p)
            assert_law(p, state.master)
            np.testing.assert_array_equal(np.asarray(p, np.float32), want)


def test_only_narrow_floating_leaves_have_a_master():
    """What is inside sees float32, and arguments go through."""
    params = {"half": jnp.ones(3, "bfloat16"), "full": jnp.ones(3), "table": jnp.arange(3)}
    params["none"] = None
    seen = []

    def init(tree):
        seen.append(jax.tree.map(lambda x: x.dtype, tree))
        return tree  # the parameters themselves

    def update(updates, state, params=None, *, scale, **unknown):
        seen.extend(jax.tree.map(lambda x: x.dtype, tree) for tree in (params, updates))
        return jax.tree.map(lambda u: scale * u, updates), state

    tx = optax_ext.master_weights(optax.GradientTransformationExtraArgs(init, update))
    state = tx.init(params)
    buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    assert len(set(buffers)) == len(buffers) == 4
    shapes = {"half": (3,), "full": None, "table": None, "none": None}
    assert jax.tree.map(jnp.shape, state.master) == shapes
    grads = params | {"table": jnp.zeros(3, int)}
    updates, state = tx.update(grads, state, params, scale=2, unknown=None)
    assert seen == [{"half": "float32", "full": "float32", "table": "int32", "none": None}] * 3
    p = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(p["half"], 3)
    np.testing.assert_array_equal(p["full"], 3)
    np.testing.assert_array_equal(p["table"], params["table"])
    assert jax.tree.map(jax.typeof, p) == jax.tree.map(jax.typeof, params)


def test_errors():
    with pytest.raises(ValueError, match=r"^dtype must be "):
        optax_ext.master_weights(optax.sgd(1.0), "bfloat16")
    params = {"w": jnp.ones((4, 3), jnp.bfloat16)}
    tx = optax_ext.master_weights(optax.sgd(1.0))
    state = tx.init(params)
    with pytest.raises(ValueError, match="master_weights needs params"):
        tx.update(params, state)
    with pytest.raises(ValueError, match="'w' has dtype float32 and a master in the state"):
        tx.update(params, state, {"w": jnp.ones((4, 3))})
    with pytest.raises(ValueError, match="'w' has dtype bfloat16 and no master in the state"):
        tx.update(params, tx.init({"w": jnp.ones((4, 3))}), params)
    with pytest.raises(ValueError, match="'w' has dtype float8_e4m3fn, which JAX promotes"):
        tx.init({"w": jnp.ones(3, jnp.float8_e4m3fn)})
    with pytest.raises(ValueError, match="float64 needs jax_enable_x64"):
        optax_ext.master_weights(optax.sgd(1.0), jnp.float64).init(params)
