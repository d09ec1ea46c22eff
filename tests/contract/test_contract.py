"""What every transformation of the table does, whatever its algorithm.

Most tests run operation by operation, on two small shapes: each operation is then compiled once for
the entire file. Those that are about ``jit`` say so.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from .table import TRANSFORMATIONS, WIDE, wide

NAMES = list(TRANSFORMATIONS)
every = pytest.mark.parametrize("name", NAMES)
# Whose state has arrays of the parameters' shapes, or of theirs without some dims.
shaped = pytest.mark.parametrize("name", [k for k in NAMES if not TRANSFORMATIONS[k].blocks])

SHAPES = {"w": (6, 4), "b": (4,)}


def tree(seed, dtype=jnp.float32, shapes=SHAPES):
    """Full-rank values near 1."""
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in shapes.items()}


def apply(tx, grads, params, state=None, *, jit=False):
    """(params, state, updates of every step) after a step for each of ``grads``."""
    state = tx.init(params) if state is None else state
    update = jax.jit(tx.update) if jit else tx.update
    seen = []
    for g in grads:
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
        seen.append(updates)
    return params, state, seen


def types(tree):
    """Shapes and dtypes; a weak type would become a strong one, and compile again."""
    return jax.tree.map(jax.typeof, tree)


def assert_close(have, want, rtol=1e-12):
    """By the norm of each leaf."""
    chex.assert_trees_all_equal_structs(have, want)

    def check(path, x, y):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        error = np.linalg.norm(x - y)
        assert error <= rtol * np.linalg.norm(y), (jax.tree_util.keystr(path), error)

    jax.tree_util.tree_map_with_path(check, have, want)


# --- Composition ---


@pytest.mark.slow(keep=6)
@every
def test_chain(name):
    """Clipping before, scaling after: the same as by hand."""
    tx, params, grads = TRANSFORMATIONS[name](), tree(0), [tree(1), tree(2)]
    chained = optax.chain(optax.clip(0.5), tx, optax.scale(-2.0))
    _, _, have = apply(optax.chain(chained), grads, params)
    state = tx.init(params)
    for g, updates in zip(grads, have, strict=True):
        u, state = tx.update(jax.tree.map(lambda x: jnp.clip(x, -0.5, 0.5), g), state, params)
        chex.assert_trees_all_equal(updates, jax.tree.map(lambda x: -2.0 * x, u))
        params = optax.apply_updates(params, updates)


@pytest.mark.slow(keep=6)
@every
def test_multi_steps(name, x64):
    """Two micro-steps are one step of the mean gradient."""
    tx, params, grads = wide(name)(), tree(0, "float64"), [tree(i, "float64") for i in range(1, 5)]
    # It has a lax.cond, which would be compiled in each step.
    every_2 = optax.MultiSteps(tx, 2, accumulator_dtype=jnp.float64)
    have, state, _ = apply(every_2, grads, params, jit=True)
    means = [jax.tree.map(lambda *x: sum(x) / 2, *grads[i : i + 2]) for i in (0, 2)]
    want, inner, _ = apply(tx, means, params)
    assert_close(have, want)
    assert_close(state.inner_opt_state, inner)


def without_mask(name):
    """For trees that have not all of the mask's leaves."""
    row = TRANSFORMATIONS[name]
    return row(**({"weight_decay_mask": None} if "weight_decay_mask" in row.arguments else {}))


@every
@pytest.mark.parametrize("as_function", [False, True], ids=["tree", "function"])
def test_masked(name, as_function):
    tx, params, grads = without_mask(name), tree(0), tree(1)
    mask = {"w": True, "b": False}
    masked = optax.masked(tx, (lambda _: mask) if as_function else mask)
    _, state, [have] = apply(masked, [grads], params)
    _, _, [want] = apply(tx, [{"w": grads["w"]}], {"w": params["w"]})
    chex.assert_trees_all_equal(have, want | {"b": grads["b"]})
    inner = tx.init({"w": params["w"]})
    assert list(map(jax.typeof, jax.tree.leaves(state))) == (
        list(map(jax.typeof, jax.tree.leaves(inner)))
    )


@every
def test_partition(name):
    tx, params, grads = without_mask(name), tree(0), tree(1)
    both = optax.partition({"ours": tx, "sgd": optax.sgd(1.0)}, {"w": "ours", "b": "sgd"})
    _, _, [have] = apply(both, [grads], params)
    _, _, [want] = apply(tx, [{"w": grads["w"]}], {"w": params["w"]})
    chex.assert_trees_all_equal(have, want | {"b": -grads["b"]})


@every
def test_map_params_reaches_what_has_a_parameters_tree_and_nothing_else(name):
    tx, params = TRANSFORMATIONS[name](), tree(0)
    state = tx.init(params)
    marked = optax.tree.map_params(tx, lambda x: "param", state)
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(marked), strict=True):
        assert (new == "param") if old.ndim else (new is old)


@shaped
def test_map_params_brings_a_spec_to_every_slot(name):
    """None, where a slot is not used, is not a leaf that needs one."""
    tx, params = TRANSFORMATIONS[name](), tree(0)
    state = tx.init(params)
    specs = {"w": P("x", None), "b": P("x")}
    mapped = optax.tree.map_params(
        tx,
        lambda leaf, spec: None if leaf is None else spec,
        state,
        specs,
        transform_non_params=lambda _: P(),
        is_leaf=lambda x: x is None,
    )
    is_spec = lambda x: isinstance(x, P)  # noqa: E731
    have = jax.tree.map(lambda _: P, state)
    assert jax.tree.structure(jax.tree.map(lambda _: P, mapped, is_leaf=is_spec)) == (
        jax.tree.structure(have)
    )
    for (path, leaf), spec in zip(
        jax.tree.leaves_with_path(state), jax.tree.leaves(mapped, is_leaf=is_spec), strict=True
    ):
        want = P() if not leaf.ndim else specs[path[-1].key]
        assert spec == want, path


@every
def test_extra_arguments_are_tolerated(name):
    tx, params, grads = TRANSFORMATIONS[name](), tree(0), tree(1)
    for tolerant in (optax.with_extra_args_support(tx), optax.chain(tx)):
        have, _ = tolerant.update(grads, tolerant.init(params), params, value=1.0, key=None)
        chex.assert_trees_all_equal(have, tx.update(grads, tx.init(params), params)[0])


# --- inject_hyperparams, under jit, with no static arguments ---


def injectable(name):
    """The row's arguments, with the values of the defaults that it leaves out."""
    row = TRANSFORMATIONS[name]
    mask = {"weight_decay_mask"} & row.arguments.keys()  # a tree of booleans is a tree of bools
    return row.make, {k: v for k, v in row.arguments.items() if k not in mask}


@pytest.mark.slow(keep=6)
@every
def test_injected_equals_plain_and_does_not_recompile(name, x64):
    """All arguments are injected, rules, dtypes and betas too; ``init`` is jitted as well."""
    make, arguments = injectable(name)
    arguments |= WIDE.get(make, {})
    params, grads = tree(0, "float64"), [tree(i, "float64") for i in (1, 2, 3)]
    tx = optax.inject_hyperparams(make)(**arguments)
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(g, state, params):
        return tx.update(g, state, params)

    state = jax.jit(tx.init)(params)
    numbers = {k for k, v in arguments.items() if isinstance(v, float | int) and v is not True}
    assert numbers <= state.hyperparams.keys()
    _, plain, want = apply(make(**arguments), grads, params)
    for g, u in zip(grads, want, strict=True):
        updates, state = step(g, state, params)
        assert_close(updates, u)
        params = optax.apply_updates(params, updates)
    if not any(callable(v) for v in arguments.values()):  # a schedule has a state of its own
        assert types(state.inner_state) == types(plain)
    if "learning_rate" in numbers:
        hyperparams = state.hyperparams | {"learning_rate": jnp.asarray(0.03, jnp.float64)}
        have, _ = step(grads[0], state._replace(hyperparams=hyperparams), params)
        other = make(**arguments | {"learning_rate": 0.03})
        assert_close(have, other.update(grads[0], state.inner_state, params)[0])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, "bfloat16", np.dtype("bfloat16")], ids=repr)
@pytest.mark.parametrize(
    ("name", "argument"), [("came", "mu_dtype"), ("adafactor", "dtype_momentum")]
)
def test_injected_dtypes(name, argument, dtype):
    """``jnp.bfloat16`` is callable: inject_hyperparams takes it for a schedule."""
    row = TRANSFORMATIONS[name]
    options = row.arguments | {argument: dtype} | ({"momentum": 0.9} if name == "adafactor" else {})
    tx = optax.inject_hyperparams(row.make)(**options)
    params = tree(0)
    state = jax.eval_shape(tx.init, params)
    _, new_state = jax.eval_shape(tx.update, params, state, params)
    for s in (state, new_state):
        [mu] = [stage.mu for stage in s.inner_state if hasattr(stage, "mu")]
        assert {x.dtype for x in jax.tree.leaves(mu)} == {jnp.dtype("bfloat16")}


@pytest.mark.slow(keep=6)
@every
def test_injected_with_bfloat16_parameters(name):
    """The betas would come in the parameters' dtype, where 0.999 is 1: float32 is asked for."""
    make, arguments = injectable(name)
    params, grads = tree(0, jnp.bfloat16), tree(1, jnp.bfloat16)
    tx = optax.inject_hyperparams(make, hyperparam_dtype=jnp.float32)(**arguments)
    state = tx.init(params)
    updates, new_state = jax.jit(tx.update)(grads, state, params)
    assert types(updates) == types(tree(1) if TRANSFORMATIONS[name].rounds_parameters else params)
    assert types(new_state) == types(state)
    want, _ = make(**arguments).update(grads, make(**arguments).init(params), params)
    assert_close(updates, want, rtol=2.0**-7)


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("came", "b1"),
        ("came", "b2"),
        ("came", "b3"),
        ("adafactor", "b2"),
        ("adafactor", "beta2_cap"),
        ("adafactor", "momentum"),
    ],
)
def test_a_beta_injected_as_bfloat16_is_refused_by_name(name, argument):
    row = TRANSFORMATIONS[name]
    params = tree(0, jnp.bfloat16)
    # The other betas are out of the way in a function of this one.
    tx = optax.inject_hyperparams(lambda x: row(**{argument: x}))(0.999)
    with pytest.raises(ValueError, match=rf"^{argument} has dtype bfloat16.*hyperparam_dtype"):
        jax.jit(tx.init)(params)


# --- jit ---


@functools.cache
def compiled(name):
    """A jitted step that donates the state, and the list of its traces."""
    tx, traces = TRANSFORMATIONS[name](), []

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def step(grads, state, params):
        traces.append(name)
        updates, state = tx.update(grads, state, params)
        return updates, state, optax.apply_updates(params, updates)

    return step, traces


@pytest.mark.slow(keep=6)
@every
def test_jit_equals_eager_compiles_once_and_donates(name):
    """Also that the state of ``init`` is that of ``update``, and holds no buffer twice."""
    tx, params = TRANSFORMATIONS[name](), tree(0)
    step, traces = compiled(name)
    grads = [tree(i) for i in range(1, 5)]
    want_params, want_state, want = apply(tx, grads, params)
    state, init_types = tx.init(params), types(tx.init(params))
    params = jax.tree.map(jnp.copy, params)
    for g, u in zip(grads, want, strict=True):
        donated = jax.tree.leaves((state, params))
        if TRANSFORMATIONS[name].keeps_parameters:  # the oldest are for the loss, not the update
            unread = jax.tree.leaves(optax.tree.get(state, "versions")[-1])
            donated = [x for x in donated if all(x is not y for y in unread)]
        updates, state, params = step(g, state, params)
        assert all(x.is_deleted() for x in donated)
        assert_close(updates, u, rtol=1e-5 if "every option" not in name else 2.0**-8)
        assert types(state) == init_types
    assert len(traces) == 1
    assert_close(params, want_params, rtol=1e-5 if "every option" not in name else 2.0**-8)
    assert types(state) == types(want_state)


@pytest.mark.slow(keep=6)
@every
def test_scan_with_cond_equals_the_loop(name, x64):
    """A step that is skipped under ``lax.cond`` needs a state of the same types on both sides."""
    tx, params = wide(name)(), tree(0, "float64")
    grads = [tree(i, "float64") for i in range(4)]
    want, want_state, _ = apply(tx, [grads[i] for i in (0, 1, 3)], params)

    def take(g, carry):
        params, state = carry
        updates, state = tx.update(g, state, params)
        return optax.apply_updates(params, updates), state

    def body(carry, i_and_g):
        i, g = i_and_g
        return jax.lax.cond(i == 2, lambda g, c: c, take, g, carry), None

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *grads)
    (have, state), _ = jax.jit(
        lambda c, xs: jax.lax.scan(body, c, xs),
    )((params, tx.init(params)), (jnp.arange(4), stacked))
    assert_close(have, want)
    assert_close(state, want_state)


def shardings(tree):
    """(shape, dtype, axis of every dim) of all leaves, as their types have it."""

    def one(x):
        aval = jax.typeof(x)
        spec = tuple(aval.sharding.spec)
        return aval.shape, aval.dtype, list(spec + (None,) * (aval.ndim - len(spec)))

    leaves = [one(x) for x in jax.tree.leaves(tree)]
    return leaves[0] if hasattr(tree, "shape") else (jax.tree.structure(tree), leaves)


@pytest.mark.slow(keep=12)
@shaped
@pytest.mark.parametrize("dim", [0, 1], ids=["rows sharded", "columns sharded"])
def test_sharding_types_on_an_explicit_mesh(name, dim):
    """``jax.typeof`` has the sharding here: the same after ``init`` and after each update."""
    tx, mesh = TRANSFORMATIONS[name](), jax.make_mesh((2,), ("x",), (AxisType.Explicit,))
    with jax.set_mesh(mesh):
        specs = {"w": P(*[["x", None], [None, "x"]][dim]), "b": P("x")}
        params = {k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in tree(0).items()}
        state = jax.eval_shape(tx.init, params)
        updates, new_state = jax.eval_shape(tx.update, params, state, params)
        assert shardings(new_state) == shardings(state)
        assert shardings(updates) == shardings(params)
        for path, leaf in jax.tree.leaves_with_path(state):
            if leaf.ndim:
                shape, spec = SHAPES[path[-1].key], specs[path[-1].key]
                kept = [axis for n, axis in zip(shape, spec, strict=True) if n in leaf.shape]
                assert shardings(leaf)[-1] == kept, jax.tree_util.keystr(path)
        # And what runs is what was foreseen.
        both = jax.jit(lambda g, p: (tx.init(p), tx.update(g, tx.init(p), p)[1]))(params, params)
        assert shardings(both) == shardings((state, state))


# --- init ---


@every
def test_abstract_init(name):
    tx, params = TRANSFORMATIONS[name](), tree(0)
    state = tx.init(params)
    abstract = jax.eval_shape(tx.init, params)
    assert types(state) == types(abstract)
    placeholders = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    assert types(tx.init(placeholders)) == types(state)
    assert types(jax.eval_shape(tx.init, placeholders)) == types(state)


@every
def test_init_holds_no_buffer_twice(name):
    leaves = jax.tree.leaves(TRANSFORMATIONS[name]().init(tree(0)))
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)


@every
def test_init_does_not_hold_the_parameters(name):
    """A state that shares a buffer with the parameters could not be donated beside them."""
    params = tree(0)
    ours = {
        x.unsafe_buffer_pointer() for x in jax.tree.leaves(TRANSFORMATIONS[name]().init(params))
    }
    assert not ours & {x.unsafe_buffer_pointer() for x in params.values()}


# --- Trees and shapes ---


@every
@pytest.mark.parametrize("empty", [{}, (), {"a": None, "b": []}], ids=repr)
def test_empty_trees(name, empty):
    _, state, [updates] = apply(without_mask(name), [empty], empty)
    assert updates == empty
    assert all(x.ndim == 0 for x in jax.tree.leaves(state))


@every
def test_none_leaves_are_left_out(name):
    tx, params, grads = without_mask(name), tree(0), tree(1)
    _, _, [have] = apply(tx, [grads | {"a": None}], params | {"a": None})
    _, _, [want] = apply(tx, [grads], params)
    chex.assert_trees_all_equal(have, want | {"a": None})


SMALL_SHAPES = [(), (1,), (1, 1), (1, 4), (6, 1), (0,), (0, 3), (3, 0), (2, 0, 3)]


@pytest.mark.slow(keep=6)
@every
def test_scalars_and_dims_of_zero_and_one(name):
    tx = without_mask(name)
    params = {str(shape): jnp.full(shape, 0.5, "float32") for shape in SMALL_SHAPES}
    grads = {key: jnp.full_like(p, -2.0) for key, p in params.items()}
    params["b"], grads["b"] = tree(0)["b"], tree(1)["b"]
    state = tx.init(params)
    _, new_state, seen = apply(tx, [grads] * 3, params, jit=True)
    assert types(new_state) == types(state)
    for updates in seen[TRANSFORMATIONS[name].idle_steps :]:
        assert types(updates) == types(params)
        chex.assert_tree_all_finite(updates)
        for key, x in updates.items():
            assert key == "b" or (np.asarray(x) != 0).all(), key
    chex.assert_tree_all_finite(new_state)
    _, _, [alone] = apply(tx, [{"b": grads["b"]}], {"b": params["b"]}, jit=True)
    chex.assert_trees_all_equal(seen[0]["b"], alone["b"])


# --- Dtypes and magnitudes ---


@pytest.mark.slow(keep=25)
@every
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_dtypes(name, dtype):
    """Updates have the gradient's dtype; averages are float32, or wider with the parameters.

    The updates of a transformation that rounds the parameters are float32 at least, and what it
    gives are parameters.
    """
    with jax.enable_x64(True):
        row, params, grads = TRANSFORMATIONS[name], tree(0, dtype), tree(1, dtype)
        stored = {row.arguments.get(k) for k in ("mu_dtype", "dtype_momentum")} - {None}
        tx = row()
        state = tx.init(params)
        _, new_state, [updates, _] = apply(tx, [grads] * 2, params)
        wide = jnp.promote_types(dtype, jnp.float32)
        assert types(updates) == types(tree(0, wide if row.rounds_parameters else dtype))
        assert types(new_state) == types(state)
        codes = {jnp.dtype("uint8")} if row.blocks else set()
        allowed = {wide, *(jnp.dtype(d) for d in stored)} | codes
        allowed |= {jnp.dtype(dtype)} if row.keeps_parameters else set()
        have = {x.dtype for x in jax.tree.leaves(new_state) if x.ndim}
        assert have == allowed
        # What float64 makes of the same numbers, to the rounding of the updates' own dtype.
        as_wide = functools.partial(jax.tree.map, lambda x: x.astype("float64"))
        _, _, [want] = apply(row(), [as_wide(grads)], as_wide(params))
        if row.rounds_parameters:
            updates = optax.apply_updates(params, updates)
            want = optax.apply_updates(as_wide(params), want)
        assert_close(updates, want, rtol=8 * float(jnp.finfo(dtype).eps))


@every
def test_gradients_wider_than_the_parameters(name):
    tx, params, grads = TRANSFORMATIONS[name](), tree(0, "bfloat16"), tree(1, "float32")
    state = tx.init(params)
    updates, new_state = tx.update(grads, state, params)
    assert types(updates) == types(grads)
    assert types(new_state) == types(state)


HUGE = {"float32": 1e18, "float64": 1e30}


def magnitudes(dtype):
    """id -> a (6, 4) gradient for each of several steps; the vector takes its first row."""
    huge, ones = HUGE[dtype], np.ones((6, 4))
    signs = np.where(np.random.default_rng(0).random((6, 4)) < 0.5, -1.0, 1.0)
    first_row, first_col, corner = np.zeros((3, 6, 4))
    first_row[0], first_col[:, 0], corner[0, 0] = 1, 1, 1
    checks = np.indices((6, 4)).sum(axis=0) % 2
    mixed = np.where(np.eye(6, 4), 0, np.resize([huge, 1.0, 1e-30], (6, 4)))
    return {
        "zero": [0 * ones] * 12,
        "constant": [ones] * 12,
        "tiny": [1e-30 * signs] * 12,
        "huge": [huge * signs] * 12,
        "zero, then huge": [0 * ones] * 40 + [huge * signs] * 4,
        "huge, then zero": [huge * signs] * 4 + [0 * ones] * 40,
        "tiny, huge, tiny": [1e-30 * signs] * 8 + [huge * signs] * 2 + [1e-30 * signs] * 8,
        "a zero row beside huge ones": [huge * (1 - first_row)] * 12,
        "a zero column beside huge ones": [huge * (1 - first_col)] * 12,
        "one huge row, the others zero": [huge * first_row] * 12,
        "one huge column, the others zero": [huge * first_col] * 12,
        "one huge element, the others zero": [huge * corner] * 12,
        "the huge row moves": [np.roll(huge * first_row, i, axis=0) for i in range(12)],
        "the huge element moves": [np.roll(huge * corner, (i, i), (0, 1)) for i in range(12)],
        "huge and tiny, checkered": [np.where(checks, huge, 1e-30) * signs] * 12,
        "huge, one and tiny": [mixed] * 12,
    }


@functools.cache
def jitted_update(name):
    """Compiled once for the steps of all magnitudes."""
    return jax.jit(TRANSFORMATIONS[name]().update)


@pytest.mark.slow(keep=152)
@every
@pytest.mark.parametrize("dtype", HUGE)
@pytest.mark.parametrize("kind", magnitudes("float32"))
def test_any_magnitude_stays_finite(name, kind, dtype):
    """And where the gradient has been zero throughout, nothing but weight decay moves."""
    with jax.enable_x64(True):
        tx, params = TRANSFORMATIONS[name](), tree(0, dtype)
        update, state = jitted_update(name), tx.init(params)
        was_zero, any_moved = np.ones((6, 4), bool), False
        for g in magnitudes(dtype)[kind]:
            was_zero &= g == 0
            grads = {"w": jnp.asarray(g, dtype), "b": jnp.asarray(g[0], dtype)}
            updates, state = update(grads, state, params)
            chex.assert_tree_all_finite((updates, state))
            assert types(updates) == types(params)
            moved = np.abs(updates["w"]) > 0.02 * np.abs(params["w"])
            assert not (moved & was_zero).any()
            any_moved |= bool(moved.any())
        assert any_moved or kind in ("zero", "tiny")  # tiny: below the root of eps, as intended


@pytest.mark.slow(keep=6)
@every
def test_huge_gradients_in_long_rows(name):
    """A plain sum of 1,000 squares of 1e18 leaves float32."""
    tx = TRANSFORMATIONS[name]()
    for shape in ((2, 1000), (1000, 2)):
        params = {"w": jnp.ones(shape), "b": jnp.ones(1000)}
        state = tx.init(params)
        huge = jax.tree.map(lambda p: 1e18 * p, params)
        updates, state = jax.jit(tx.update)(huge, state, params)
        chex.assert_tree_all_finite((updates, state))


@pytest.mark.slow(keep=6)
@every
def test_apply_if_finite_keeps_the_state_and_recovers(name):
    tx, params = TRANSFORMATIONS[name](), tree(0)
    guarded = optax.apply_if_finite(tx, max_consecutive_errors=5)
    step = jax.jit(guarded.update)
    good = [tree(1), tree(2)]
    _, state = step(good[0], guarded.init(params), params)
    want, _ = tx.update(good[1], state.inner_state, params)
    kept = state
    for bad in (np.nan, np.inf, -np.inf):
        poisoned = good[0] | {"w": good[0]["w"].at[1, 2].set(bad)}
        updates, kept = step(poisoned, kept, params)
        chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, params))
        chex.assert_trees_all_equal(kept.inner_state, state.inner_state)
        have, _ = step(good[1], kept, params)
        assert_close(have, want, rtol=1e-5)
        chex.assert_tree_all_finite(have)


# --- Checkpoints ---


@every
def test_resume_is_bit_for_bit(name):
    """The state through host memory, as leaves alone, into the structure of a fresh ``init``."""
    tx, params, grads = TRANSFORMATIONS[name](), tree(0), [tree(i) for i in range(1, 5)]
    want = apply(tx, grads, params)
    params, state, _ = apply(tx, grads[:2], params)
    leaves = [np.array(x) for x in jax.tree.leaves(state)]
    state = jax.tree.unflatten(jax.tree.structure(tx.init(params)), map(jnp.asarray, leaves))
    have = apply(tx, grads[2:], params, state)
    chex.assert_trees_all_equal(have[:2], want[:2])
