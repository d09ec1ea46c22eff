"""Master weights: parameters are the masters, rounded, and masters move as float32 does."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import optax_ext
import sharding as shd

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
NUM_STEPS = 300

INNER = {
    "sgd": lambda: optax.sgd(1e-3, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-3, weight_decay=0.1),
    "lamb": lambda: optax.lamb(1e-3),
    "came": lambda: optax_ext.came(1e-3),
    "adafactor": lambda: optax_ext.adafactor(1e-3, momentum=0.9),
}


def example(dtype):
    """Parameters over many decades, zeros among them, and float32 gradients of any step."""
    rng = np.random.default_rng(0)
    decades = 10 ** rng.uniform(-7, 3, (16, 24))
    params = {"w": rng.normal(size=(16, 24)) * decades, "b": np.zeros(24), "s": np.array(0.3)}
    params = {k: jnp.asarray(v, dtype) for k, v in params.items()}

    def grads(step):
        rng = np.random.default_rng(step)
        return {k: jnp.asarray(rng.normal(size=v.shape), "float32") for k, v in params.items()}

    return params, grads


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


def step_of(tx):
    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


# --- The law ---


@pytest.mark.slow(keep=3)
@every_dtype
@pytest.mark.parametrize("name", INNER)
def test_parameters_are_the_masters_rounded_under_jit(name, dtype):
    """For 300 steps, each one program; many updates are below the parameters' spacing."""
    params, grads = example(dtype)
    tx = optax_ext.master_weights(INNER[name]())
    step = jax.jit(step_of(tx), donate_argnums=(1, 2))
    state, start = tx.init(params), jax.tree.map(jnp.copy, params)
    for i in range(NUM_STEPS):
        params, state = step(grads(i), state, params)
        assert_law(params, state.master)
    assert (bits(params["w"]) != bits(start["w"])).any()


@pytest.mark.slow(keep=3)
@every_dtype
@pytest.mark.parametrize("name", INNER)
def test_parameters_are_the_masters_rounded_eagerly(name, dtype):
    """And where XLA fuses nothing, the masters are those of a float32 run in every bit."""
    params, grads = example(dtype)
    tx, plain = optax_ext.master_weights(INNER[name]()), INNER[name]()
    want = jax.tree.map(lambda p: p.astype("float32"), params)
    state, plain_state = tx.init(params), plain.init(want)
    for i in range(20):
        params, state = step_of(tx)(grads(i), state, params)
        want, plain_state = step_of(plain)(grads(i), plain_state, want)
        assert_law(params, state.master)
        for k in params:
            np.testing.assert_array_equal(bits(state.master[k]), bits(want[k]))


@every_dtype
def test_several_steps_in_one_program(dtype):
    """Where XLA may keep a parameter of the first step in float32, for the second."""
    params, grads = example(dtype)
    tx = optax_ext.master_weights(INNER["adamw"]())
    one, state = step_of(tx), tx.init(params)
    want_params, want_state = params, state

    @jax.jit
    def several(params, state, all_grads):
        seen = []
        for g in all_grads:
            params, state = one(g, state, params)
            seen.append((params, state.master))
        return params, state, seen

    for start in range(0, 40, 8):
        params, state, seen = several(params, state, [grads(start + i) for i in range(8)])
        for p, m in seen:
            assert_law(p, m)
        for i in range(8):
            want_params, want_state = jax.jit(one)(grads(start + i), want_state, want_params)
    for k in params:
        np.testing.assert_allclose(state.master[k], want_state.master[k], rtol=1e-6, atol=1e-9)


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
    """A step to any new master, and one more; eagerly and under jit."""
    step = step_of(optax_ext.master_weights(ADD))
    return step, jax.jit(step)


def check_law(old, update, dtype):
    params = jnp.asarray(old, jnp.float32).astype(dtype)
    for step in added():
        p, state = params, optax_ext.master_weights(ADD).init(params)
        for u in (update, np.zeros_like(update), -update):
            p, state = step(jnp.asarray(u), state, p)
            assert_law(p, state.master)


@st.composite
def any_float32(draw):
    """Every exponent as likely as the next; also ties between neighbours of either dtype."""
    exponent, sign = draw(st.integers(0, 254)), draw(st.integers(0, 1))
    mantissa = draw(
        st.one_of(
            st.integers(0, 2**23 - 1),
            st.sampled_from([0, 1, 2**12, 2**13, 2**15, 2**16, 2**23 - 2**15, 2**23 - 1]),
            st.integers(0, 127).map(lambda i: i << 16),
            st.integers(0, 255).map(lambda i: i << 15),
            st.integers(0, 2047).map(lambda i: i << 12),
        )
    )
    return np.uint32(sign << 31 | exponent << 23 | mantissa).view(np.float32)


EXTREME = st.one_of(
    any_float32(),
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-25, -(2.0**-25), 65504.0, 65520.0]),
)


@pytest.mark.slow(keep=1)
@every_dtype
@hypothesis.given(st.lists(st.tuples(EXTREME, EXTREME), min_size=16, max_size=16))
@hypothesis.settings(max_examples=100, deadline=None)
def test_the_law_holds_for_any_values(dtype, pairs):
    with np.errstate(over="ignore", invalid="ignore"):
        old, update = np.array(pairs, np.float32).T
        check_law(old, update, dtype)


@every_dtype
@pytest.mark.parametrize("exponents", [(-126, 127), (-30, 16)], ids=["all", "of float16"])
def test_the_law_holds_for_many_values(dtype, exponents):
    rng = np.random.default_rng(0)

    def values(n):
        x = np.ldexp(rng.uniform(1, 2, n), rng.integers(*exponents, n)) * rng.choice([-1, 1], n)
        return np.where(rng.random(n) < 0.05, 0, x).astype(np.float32)

    n = 50_000
    old, new = values(n), values(n)
    near = rng.random(n) < 0.5  # and to a new value near the old one
    new[near] = (old * (1 + 2.0 ** rng.integers(-12, 0, n) * rng.normal(size=n)))[near]
    old[:1000] = -0.0
    with np.errstate(over="ignore"):
        check_law(old, (new - old).astype(np.float32), dtype)


@every_dtype
def test_a_value_below_the_last_bit_of_the_sum(dtype):
    """1 + u is a multiple of 2^-24 where u is float32: the master says what was reached."""
    old = np.ones(6, np.float32)
    new = np.array([1e-10, -1e-10, 3e-8, 2.0**-24 * 1.25, 1e-4, 0.0], np.float32)
    params = {"w": jnp.asarray(old, dtype)}
    tx = optax_ext.master_weights(
        optax.GradientTransformation(
            optax.init_empty_state, lambda u, s, p=None: (jax.tree.map(lambda u, w: u - w, u, p), s)
        )
    )
    for step in (step_of(tx), jax.jit(step_of(tx))):
        p, state = step({"w": jnp.asarray(new)}, tx.init(params), params)
        assert_law(p, state.master)
        np.testing.assert_allclose(state.master["w"], new, rtol=0, atol=2.0**-24)


def test_float16_below_its_smallest_normal_still_moves():
    """From zero, by steps of 1e-9: subnormals, and what rounds to zero from either side."""
    params = jnp.zeros(2, jnp.float16)
    step = jnp.array([1e-9, -1e-9])
    tx = optax_ext.master_weights(ADD)
    for take in added():
        p, state, seen = params, tx.init(params), set()
        for i in range(1, 201):
            p, state = take(step, state, p)
            assert_law(p, state.master)
            np.testing.assert_allclose(state.master, i * step, rtol=1e-5)
            seen.add(float(p[0]))
        assert seen == {k * 2.0**-24 for k in range(4)}


def test_what_is_not_finite_flows_and_apply_if_finite_stops_it():
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
    guarded = optax.apply_if_finite(tx, 5)
    for w in (np.nan, np.inf):
        grads = {"w": jnp.full(4, w), "b": bad["b"]}
        p, state = jax.jit(step_of(guarded))(grads, guarded.init(params), params)
        assert_law(p, state.inner_state.master)
        np.testing.assert_array_equal(p["w"], params["w"])
        assert float(p["b"]) == 1


# --- What masters hold ---


def adamw(grads, w, lr=1e-3, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.1):
    """AdamW (Loshchilov and Hutter 2019) in float64."""
    w, mu, nu = np.asarray(w, np.float64), 0.0, 0.0
    for t, g in enumerate(grads, 1):
        g = np.asarray(g, np.float64)
        mu, nu = b1 * mu + (1 - b1) * g, b2 * nu + (1 - b2) * g**2
        hat = (mu / (1 - b1**t)) / (np.sqrt(nu / (1 - b2**t)) + eps)
        w = w - lr * (hat + weight_decay * w)
        yield w


@every_dtype
def test_masters_equal_an_independent_adamw(dtype):
    """300 steps. In float32 a step rounds by 2^-24 of the parameter, here below 4."""
    params, grads = example(dtype)
    params = jax.tree.map(lambda p: jnp.clip(p, -4, 4), params)
    tx = optax_ext.master_weights(INNER["adamw"]())
    step, state = jax.jit(step_of(tx)), tx.init(params)
    all_grads = [grads(i) for i in range(NUM_STEPS)]
    want = {k: adamw([g[k] for g in all_grads], params[k]) for k in params}
    for g in all_grads:
        params, state = step(g, state, params)
        for k, w in want.items():
            np.testing.assert_allclose(state.master[k], next(w), rtol=3e-6, atol=3e-6)


@pytest.mark.slow(keep=3)
@every_dtype
@pytest.mark.parametrize("name", INNER)
def test_masters_equal_a_float32_run(name, dtype):
    """300 steps on the same gradients, by the norm of each leaf: the two programs round apart."""
    params, grads = example(dtype)
    tx, plain = optax_ext.master_weights(INNER[name]()), INNER[name]()
    want = jax.tree.map(lambda p: p.astype("float32"), params)
    state, plain_state = tx.init(params), plain.init(want)
    step, plain_step = jax.jit(step_of(tx)), jax.jit(step_of(plain))
    for i in range(NUM_STEPS):
        params, state = step(grads(i), state, params)
        want, plain_state = plain_step(grads(i), plain_state, want)
    for k in params:
        error = np.linalg.norm(np.ravel(state.master[k] - want[k]))
        assert error <= 1e-6 * np.linalg.norm(np.ravel(want[k])), (k, error)
    assert jax.tree.map(jax.typeof, state.inner_state) == jax.tree.map(jax.typeof, plain_state)


def test_small_steps_are_lost_without_masters_and_not_with_them():
    params = jnp.ones(64, jnp.bfloat16)
    moved = {}
    for name, tx in {
        "plain": optax.sgd(1e-3),
        "ours": optax_ext.master_weights(optax.sgd(1e-3)),
    }.items():
        p, state, step = params, tx.init(params), jax.jit(step_of(tx))
        for _ in range(NUM_STEPS):
            p, state = step(jnp.ones_like(p), state, p)
        moved[name] = np.asarray(p, np.float32)
    np.testing.assert_array_equal(moved["plain"], 1)
    np.testing.assert_allclose(moved["ours"], 0.7, rtol=2.0**-8)


@pytest.mark.usefixtures("x64")
def test_float64_masters_of_float32_parameters():
    params, grads = example("float32")
    tx = optax_ext.master_weights(INNER["adamw"](), dtype=jnp.float64)
    step, state = jax.jit(step_of(tx)), tx.init(params)
    want = {k: adamw([grads(i)[k] for i in range(20)], params[k]) for k in params}
    for i in range(20):
        params, state = step(grads(i), state, params)
        assert_law(params, state.master)
        for k, w in want.items():
            np.testing.assert_allclose(state.master[k], next(w), rtol=1e-12, atol=1e-12)


# --- Trees ---


def test_only_narrow_floating_leaves_have_a_master():
    params = {
        "half": jnp.ones(3, jnp.bfloat16),
        "full": jnp.ones(3),
        "table": jnp.arange(3),
        "none": None,
    }
    seen = []

    def init(tree):
        seen.append(jax.tree.map(lambda x: x.dtype, tree))
        return optax.EmptyState()

    def update(updates, state, params=None, *, scale, **unknown):
        seen.append(jax.tree.map(lambda x: x.dtype, params))
        seen.append(jax.tree.map(lambda x: x.dtype, updates))
        return jax.tree.map(lambda u: scale * u, updates), state

    tx = optax_ext.master_weights(optax.GradientTransformationExtraArgs(init, update))
    state = tx.init(params)
    assert jax.tree.map(jnp.shape, state.master) == {
        "half": (3,),
        "full": None,
        "table": None,
        "none": None,
    }
    grads = {
        "half": params["half"],
        "full": params["full"],
        "table": jnp.zeros(3, int),
        "none": None,
    }
    updates, state = tx.update(grads, state, params, scale=2, unknown=None)
    assert seen == [{"half": "float32", "full": "float32", "table": "int32", "none": None}] * 3
    assert jax.tree.map(lambda u: u.dtype, updates) == seen[0]
    p = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(p["half"], 3)
    np.testing.assert_array_equal(p["full"], 3)
    np.testing.assert_array_equal(p["table"], params["table"])
    assert p["none"] is None
    assert jax.tree.map(jax.typeof, p) == jax.tree.map(jax.typeof, params)


def test_one_buffer_each_where_inner_keeps_its_parameters():
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    keeper = optax.GradientTransformation(lambda p: p, lambda u, s, p=None: (u, s))
    state = optax_ext.master_weights(keeper).init(params)
    assert len({x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)}) == 2


def test_specs_are_those_of_the_parameters():
    mesh = AbstractMesh((4, 2), ("data", "model"))
    params = {
        "w": jax.ShapeDtypeStruct((256, 512), jnp.bfloat16),
        "b": jax.ShapeDtypeStruct((512,), jnp.float16),
        "f": jax.ShapeDtypeStruct((512,), jnp.float32),
    }
    specs = {"w": P("data", "model"), "b": P("data"), "f": P("model")}
    tx = optax_ext.master_weights(optax.adamw(1e-3))
    have = shd.state_specs(tx, params, specs, mesh)
    assert have.master == specs | {"f": None}
    assert have.inner_state[0].mu == have.inner_state[0].nu == specs


def test_sharding_types_stay_on_an_explicit_mesh():
    mesh = jax.make_mesh((2,), ("x",), (jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        spec = jax.sharding.NamedSharding(mesh, P(None, "x"))
        params = {"w": jax.device_put(jnp.ones((6, 4), jnp.bfloat16), spec)}
        tx = optax_ext.master_weights(optax.adamw(1e-3))
        state = tx.init(params)
        new_params, new_state = jax.jit(step_of(tx))(params, state, params)
        assert jax.tree.map(jax.typeof, new_params) == jax.tree.map(jax.typeof, params)
        assert jax.tree.map(jax.typeof, new_state) == jax.tree.map(jax.typeof, state)
        assert jax.typeof(state.master["w"]).sharding.spec == P(None, "x")
    assert_law(new_params, new_state.master)


# --- Composition ---


def masters_of(state):
    """The masters, wherever in a state they are."""
    is_ours = lambda x: isinstance(x, optax_ext.MasterWeightsState)  # noqa: E731
    [ours] = [x for x in jax.tree.leaves(state, is_leaf=is_ours) if is_ours(x)]
    return ours.master


LABELS = {"w": "ours", "b": "ours", "s": "none"}
COMPOSED = {
    "chain": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax_ext.master_weights(optax.adamw(1e-2))
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax_ext.master_weights(optax.adamw(1e-2)), 3),
    "inject_hyperparams inside": lambda: optax_ext.master_weights(
        optax.inject_hyperparams(optax.adamw)(lambda count: 1e-2 / (1 + count))
    ),
    "inject_hyperparams around": lambda: optax.inject_hyperparams(
        lambda learning_rate: optax_ext.master_weights(optax.adamw(learning_rate)),
        hyperparam_dtype=jnp.float32,
    )(1e-2),
    "masked inside": lambda: optax_ext.master_weights(
        optax.masked(optax.adamw(1e-2), {"w": True, "b": True, "s": False})
    ),
    "masked": lambda: optax.masked(
        optax_ext.master_weights(optax.adamw(1e-2)), {"w": True, "b": True, "s": False}
    ),
    "partition": lambda: optax.partition(
        {"ours": optax_ext.master_weights(optax.adamw(1e-2)), "none": optax.set_to_zero()}, LABELS
    ),
    "partition inside": lambda: optax_ext.master_weights(
        optax.partition({"ours": optax.adamw(1e-2), "none": optax.set_to_zero()}, LABELS)
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(
        optax_ext.master_weights(optax.adamw(1e-2)), 3
    ),
    "schedule_free": lambda: optax_ext.master_weights(optax.contrib.schedule_free_adamw(1e-2)),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_composed(name):
    """The law, and that the state keeps its types, after each of 12 steps with donation."""
    params, grads = example("bfloat16")
    start = jax.tree.map(jnp.copy, params)
    tx = COMPOSED[name]()
    step, state = jax.jit(step_of(tx), donate_argnums=(1, 2)), tx.init(params)
    types = jax.tree.map(jax.typeof, state)
    for i in range(12):
        params, state = step(grads(i), state, params)
        assert jax.tree.map(jax.typeof, state) == types
        masters = masters_of(state)
        ours = [k for k in ("w", "b") if hasattr(masters[k], "dtype")]
        assert ours == ["w", "b"]
        assert_law({k: params[k] for k in ours}, {k: masters[k] for k in ours})
    assert not any((bits(params[k]) == bits(start[k])).all() for k in ("w", "b"))


# --- Errors ---


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.float16, "int32", None], ids=str)
def test_a_dtype_that_is_no_master(dtype):
    with pytest.raises(ValueError, match=r"^dtype must be "):
        optax_ext.master_weights(optax.sgd(1.0), dtype)


def test_errors():
    params = {"w": jnp.ones((4, 3), jnp.bfloat16)}
    tx = optax_ext.master_weights(optax.sgd(1.0))
    state = tx.init(params)
    with pytest.raises(ValueError, match="master_weights needs params"):
        tx.update(params, state)
    with pytest.raises(ValueError, match=r"gradient 'w' of shape \(1, 3\) does not match 'master'"):
        tx.update({"w": jnp.ones((1, 3))}, state, params)
    with pytest.raises(ValueError, match="does not match the state's field 'master'"):
        tx.update({"v": params["w"]}, state, params)
    with pytest.raises(ValueError, match="'w' has dtype float32 and a master in the state"):
        tx.update(params, state, {"w": jnp.ones((4, 3))})
    with pytest.raises(ValueError, match="'w' has dtype bfloat16 and no master in the state"):
        tx.update(params, tx.init({"w": jnp.ones((4, 3))}), params)
    with pytest.raises(ValueError, match="'w' has dtype float8_e4m3fn, to which JAX adds no"):
        tx.init({"w": jnp.ones(3, jnp.float8_e4m3fn)})
    with pytest.raises(ValueError, match="float64 needs jax_enable_x64"):
        optax_ext.master_weights(optax.sgd(1.0), jnp.float64).init(params)
