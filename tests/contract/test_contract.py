"""What every transformation of the table does, whatever its algorithm.

Tests of single steps run operation by operation: each operation is compiled once for all rows.
Those of several steps share a jitted step per row.
"""

import functools
import itertools
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_ext

from .table import SHAPES, TRANSFORMATIONS, WIDE, assert_close, every, make, tree, types


def first(tx, grads, params, **extra):
    """(updates, state) of the first step, operation by operation."""
    return tx.update(grads, tx.init(params), params, **extra)


@functools.cache
def compiled(name, wide=False):
    """(jitted init, a jitted step that donates state and parameters, the list of its traces)."""
    tx, traces = make(name, wide=wide), []

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def step(grads, state, params):
        traces.append(name)
        updates, state = tx.update(grads, state, params)
        return updates, state, optax.apply_updates(params, updates)

    return jax.jit(tx.init), step, traces


def run(name, grads, params, wide=False):
    """(updates of every step, state, parameters) by the compiled step."""
    init, step, _ = compiled(name, wide)
    state, params = init(params), jax.tree.map(jnp.copy, params)
    seen = []
    for g in grads:
        updates, state, params = step(g, state, params)
        seen.append(updates)
    return seen, state, params


# --- Steps ---


@every
def test_one_program_for_all_steps(name):
    """Equal to eager steps, on donated states whose types stay, and after a checkpoint."""
    tx = make(name)
    params, grads = tree(0), [tree(i) for i in range(1, 5)]
    start = tx.init(params)
    buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((start, params))]
    assert len(set(buffers)) == len(buffers)  # else the state could not be donated beside them

    state, p, want = start, params, []
    for g in grads:
        updates, state = tx.update(g, state, p)
        p = optax.apply_updates(p, updates)
        want.append(updates)
    want_params, want_state = p, state

    init, step, traces = compiled(name)
    rtol = 2.0**-8 if "every option" in name else 1e-5
    state, p = init(params), jax.tree.map(jnp.copy, params)
    for i, (g, u) in enumerate(zip(grads, want, strict=True)):
        if i == 2:
            # Copies: jax 0.11 does not donate what NumPy has read.
            saved = pickle.dumps(jax.tree.map(jnp.copy, (state, p)))
        donated = jax.tree.leaves((state, p))
        updates, state, p = step(g, state, p)
        assert all(x.is_deleted() for x in donated)
        assert_close(updates, u, rtol)
        assert types(state) == types(start)
    assert len(traces) == 1
    assert types(state) == types(want_state)
    assert_close(p, want_params, rtol)

    # Leaves alone, into the structure of a fresh ``init``: bit for bit the same.
    leaves = [jnp.asarray(np.array(x)) for x in jax.tree.leaves(pickle.loads(saved))]
    resumed = jax.tree.unflatten(jax.tree.structure((tx.init(params), params)), leaves)
    for g in grads[2:]:
        _, *resumed = step(g, *resumed)
    chex.assert_trees_all_equal(tuple(resumed), (state, p))


# --- Composition ---


@every
def test_chain_and_extra_arguments(name):
    """Clipping before, scaling after: the same as by hand; unknown arguments are tolerated."""
    tx, params = make(name), tree(0)
    chained = optax.chain(optax.chain(optax.clip(0.5), tx, optax.scale(-2.0)))
    state, chain_state = tx.init(params), chained.init(params)
    for g in (tree(1), tree(2)):
        have, chain_state = chained.update(g, chain_state, params, value=1.0, key=None)
        clipped = jax.tree.map(lambda x: jnp.clip(x, -0.5, 0.5), g)
        u, state = optax.with_extra_args_support(tx).update(clipped, state, params, value=1.0)
        chex.assert_trees_all_equal(have, jax.tree.map(lambda x: -2.0 * x, u))
        params = optax.apply_updates(params, have)


@every
def test_parts_of_a_tree(name):
    """Masked, partitioned, beside None and in empty trees: what is left out has no state."""
    tx, params, grads = make(name, masks=False), tree(0), tree(1)
    alone = [{"w": x["w"]} for x in (grads, params)]
    want, want_state = first(tx, *alone)
    mask = {"w": True, "b": False}
    for given in (mask, lambda _: mask):
        have, state = first(optax.masked(tx, given), grads, params)
        chex.assert_trees_all_equal(have, want | {"b": grads["b"]})
        assert types(jax.tree.leaves(state)) == types(jax.tree.leaves(want_state))
    both = optax.partition({"ours": tx, "sgd": optax.sgd(1.0)}, {"w": "ours", "b": "sgd"})
    chex.assert_trees_all_equal(first(both, grads, params)[0], want | {"b": -grads["b"]})
    have, _ = first(tx, *(x | {"a": None} for x in alone))
    chex.assert_trees_all_equal(have, want | {"a": None})
    for empty in ({}, (), {"a": None, "b": []}):
        updates, state = first(tx, empty, empty)
        assert updates == empty
        assert all(x.ndim == 0 for x in jax.tree.leaves(state))


@every
def test_map_params(name):
    """Reaches what has a parameter's tree, and brings a spec to every slot, but not to None."""
    tx, params = make(name), tree(0)
    state = tx.init(params)
    if TRANSFORMATIONS[name].blocks:  # which have no parameter's spec
        marked = optax.tree.map_params(tx, lambda x: "b", state)
        assert {x for x in jax.tree.leaves(marked) if isinstance(x, str)} == {"b"}
        return
    marked = optax.tree.map_params(
        tx,
        lambda leaf, key: None if leaf is None else key,
        state,
        {"w": "w", "b": "b"},
        is_leaf=lambda x: x is None,
    )
    assert jax.tree.structure(marked) == jax.tree.structure(state)
    leaves = jax.tree.leaves_with_path(state)
    for (path, old), new in zip(leaves, jax.tree.leaves(marked), strict=True):
        assert (new == path[-1].key) if old.ndim else (new is old), path


# --- inject_hyperparams, under jit ---


@every
def test_injected_equals_plain_and_does_not_recompile(name, x64):
    """All arguments, rules and dtypes too, but for the mask's tree of bools."""
    params, grads = tree(0, "float64"), [tree(i, "float64") for i in (1, 2, 3)]
    row, traces = TRANSFORMATIONS[name], []
    masks = tuple({"weight_decay_mask"} & row.arguments.keys())
    arguments = row.arguments | WIDE.get(row.make, {})
    tx = optax.inject_hyperparams(row.make, static_args=masks)(**arguments)

    @jax.jit
    def step(g, state, params):
        traces.append(g)
        return tx.update(g, state, params)

    state = start = jax.jit(tx.init)(params)
    numbers = {k for k, v in arguments.items() if isinstance(v, float | int) and v is not True}
    assert numbers <= state.hyperparams.keys()
    want, plain, _ = run(name, grads, params, wide=True)
    p = params
    for g, u in zip(grads, want, strict=True):
        updates, state = step(g, state, p)
        assert types(updates) == types(params)
        assert_close(updates, u)
        p = optax.apply_updates(p, updates)
    if not any(callable(v) for v in arguments.values()):  # a schedule has a state of its own
        assert types(state.inner_state) == types(plain)
    if "learning_rate" in numbers:  # the first update is proportional to it
        rate = jnp.asarray(arguments["learning_rate"] * 0.25, jnp.float64)
        other = start._replace(hyperparams=start.hyperparams | {"learning_rate": rate})
        want = jax.tree.map(lambda u: 0.25 * u, want[0])
        assert_close(step(grads[0], other, params)[0], want)
    assert len(traces) == 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, "bfloat16"], ids=repr)
def test_injected_dtypes(dtype):
    """``jnp.bfloat16`` is callable: inject_hyperparams takes it for a schedule."""
    came = optax.inject_hyperparams(optax_ext.came)(0.1, mu_dtype=dtype)
    adafactor = optax.inject_hyperparams(optax_ext.adafactor)(momentum=0.9, dtype_momentum=dtype)
    for tx in (came, adafactor):
        state = jax.eval_shape(tx.init, tree(0))
        [mu] = [stage.mu for stage in state.inner_state if hasattr(stage, "mu")]
        assert {x.dtype for x in jax.tree.leaves(mu)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        *(("came", beta) for beta in ("b1", "b2", "b3")),
        *(("adafactor", beta) for beta in ("b2", "beta2_cap", "momentum")),
    ],
)
def test_a_beta_injected_as_bfloat16_is_refused_by_name(name, argument):
    """The betas come in the parameters' dtype, where 0.999 is 1."""
    # The other betas are out of the way in a function of this one.
    of = getattr(optax_ext, name)
    tx = optax.inject_hyperparams(lambda x: of(0.1, **{argument: x}))(0.999)
    with pytest.raises(ValueError, match=rf"^{argument} has dtype bfloat16.*hyperparam_dtype"):
        jax.jit(tx.init)(tree(0, jnp.bfloat16))


# --- Symmetries ---


@every
def test_scale_sign_and_permutation(name, x64):
    """Over 8 steps of full-rank gradients whose rows and columns differ by decades.

    Signs of the parameters too: weight decay follows them.
    """
    rng = np.random.default_rng(0)
    grads = rng.normal(size=(8, 6, 4)) * 10.0 ** rng.uniform(-3, 3, (6, 1))
    grads *= 10.0 ** rng.uniform(-3, 3, 4) * rng.choice([0.1, 1.0, 10.0], (8, 1, 1))
    params = rng.normal(size=(6, 4))
    tx, rows, cols = make(name, wide=True, masks=False), rng.permutation(6), rng.permutation(4)

    @jax.jit
    @jax.vmap
    def run(grads, params):
        def step(carry, g):
            params, state = carry
            updates, state = tx.update({"w": g}, state, params)
            return (optax.apply_updates(params, updates), state), updates["w"]

        params = {"w": params}
        return jax.lax.scan(step, (params, tx.init(params)), grads)[1]

    runs = [
        (grads, params),
        (1e-3 * grads, params),
        (1e4 * grads, params),
        (-grads, -params),
        (grads[:, rows][:, :, cols], params[rows][:, cols]),
    ]
    want, small, large, negated, permuted = np.asarray(run(*map(np.stack, zip(*runs, strict=True))))

    def assert_same(have, want):
        """Every element within 1e-12 of the largest of its step."""
        largest = np.abs(want).max(axis=(1, 2), keepdims=True)
        assert (np.abs(have - want) <= 1e-12 * largest).all()

    np.testing.assert_array_equal(negated, -want)
    assert_same(permuted, want[:, rows][:, :, cols])
    if TRANSFORMATIONS[name].scale_invariant:
        assert_same(small, want)
        assert_same(large, want)


# --- Dtypes and magnitudes ---


@every
def test_narrow_parameters(name):
    """Updates have the gradient's dtype, averages are float32.

    The updates of a transformation that rounds the parameters are float32, and what it gives are
    parameters.
    """
    dtype = "float16"
    row, params, grads = TRANSFORMATIONS[name], tree(0, dtype), [tree(1, dtype)] * 3
    tx = make(name)
    state, update, seen = jax.eval_shape(tx.init, params), jax.jit(tx.update), []
    found = jax.jit(tx.init)(params)
    for g in grads:
        updates, found = update(g, found, params)
        assert types(updates) == types(tree(0) if row.rounds_parameters else params)
        assert types(found) == types(state)
        seen.append(updates)
    stored = {row.arguments.get(k) for k in ("mu_dtype", "dtype_momentum")} - {None}
    allowed = {jnp.dtype(d) for d in ("float32", *stored)}
    allowed |= {jnp.dtype("uint8")} if row.blocks else set()
    assert {x.dtype for x in jax.tree.leaves(found) if x.ndim} == allowed

    # What float32 makes of the same numbers, to the rounding of the updates' own dtype.
    as_wide = functools.partial(jax.tree.map, lambda x: x.astype("float32"))
    want, _, p = run(name, as_wide(grads[:1]), as_wide(params))
    have = seen[0]
    if row.rounds_parameters:
        have, want = optax.apply_updates(params, have), [p]
    assert_close(have, want[0], rtol=8 * float(jnp.finfo(dtype).eps))


@every
def test_types_without_a_step(name):
    """Abstract states are those of ``init``; gradients may be wider than the parameters."""
    tx, params = make(name), tree(0)
    state = tx.init(params)
    placeholders = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    for p in (params, placeholders):
        assert types(jax.eval_shape(tx.init, p)) == types(state)
    assert types(tx.init(placeholders)) == types(state)
    narrow, grads = tree(0, "bfloat16"), tree(1)
    state = jax.eval_shape(tx.init, narrow)
    updates, new_state = jax.eval_shape(tx.update, grads, state, narrow)
    assert types(updates) == types(grads)
    assert types(new_state) == types(state)


def magnitudes():
    """id -> a (6, 4) gradient for each of 44 steps; the vector takes its first row."""
    huge, ones = 1e18, np.ones((6, 4))
    signs = np.where(np.random.default_rng(0).random((6, 4)) < 0.5, -1.0, 1.0)
    first_row, first_col, corner = np.zeros((3, 6, 4))
    first_row[0], first_col[:, 0], corner[0, 0] = 1, 1, 1
    checks = np.indices((6, 4)).sum(axis=0) % 2
    mixed = np.where(np.eye(6, 4), 0, np.resize([huge, 1.0, 1e-30], (6, 4)))
    kinds = {
        "zero": [0 * ones],
        "constant": [ones],
        "tiny": [1e-30 * signs],
        "huge": [huge * signs],
        "zero, then huge": [0 * ones] * 40 + [huge * signs],
        "huge, then zero": [huge * signs] * 4 + [0 * ones],
        "tiny, huge, tiny": [1e-30 * signs] * 8 + [huge * signs] * 2 + [1e-30 * signs],
        "a zero row beside huge ones": [huge * (1 - first_row)],
        "a zero column beside huge ones": [huge * (1 - first_col)],
        "one huge row, the others zero": [huge * first_row],
        "one huge column, the others zero": [huge * first_col],
        "one huge element, the others zero": [huge * corner],
        "the huge row moves": [np.roll(huge * first_row, i, axis=0) for i in range(12)],
        "the huge element moves": [np.roll(huge * corner, (i, i), (0, 1)) for i in range(12)],
        "huge and tiny, checkered": [np.where(checks, huge, 1e-30) * signs],
        "huge, one and tiny": [mixed],
    }
    return {k: np.stack(v + v[-1:] * (44 - len(v))) for k, v in kinds.items()}


@every
def test_any_magnitude_stays_finite(name):
    """And where the gradient has been zero throughout, nothing but weight decay moves."""
    tx, params = make(name), tree(0)
    kinds = magnitudes()

    @jax.jit
    @jax.vmap
    def run_all(grads):
        def step(state, g):
            updates, state = tx.update({"w": g, "b": g[0]}, state, params)
            finite = [jnp.isfinite(x).all() for x in jax.tree.leaves((updates, state))]
            return state, (updates["w"], jnp.stack(finite).all())

        return jax.lax.scan(step, tx.init(params), grads)[1]

    grads = np.stack(list(kinds.values())).astype("float32")
    updates, finite = jax.device_get(run_all(grads))
    moved = np.abs(updates) > 0.02 * np.abs(params["w"])
    was_zero = np.logical_and.accumulate(grads == 0, axis=1)
    for i, kind in enumerate(kinds):
        assert finite[i].all(), kind
        assert not (moved[i] & was_zero[i]).any(), kind
        assert moved[i].any() or kind in ("zero", "tiny"), kind  # tiny: below eps, as intended


def never(count):
    return 0.0 * count


@every
@pytest.mark.parametrize("injected", [False, True])
def test_infinite_weights_without_a_gradient_stay(name, injected):
    """Masks of -inf beside weights that move: a decay of 0, also one that is traced, is none."""
    arguments = TRANSFORMATIONS[name].arguments
    decay = {k: never for k in arguments if k in ("weight_decay", "weight_decay_rate")}
    tx = make(name, **decay)
    if injected and decay:
        maker = functools.partial(TRANSFORMATIONS[name].make, **arguments | dict.fromkeys(decay))
        tx = optax.inject_hyperparams(lambda rate: maker(**dict.fromkeys(decay, rate)))(rate=0.0)
    grads, params = tree(1), tree(0)
    masked = {k: np.arange(x.size).reshape(x.shape) % 5 == 1 for k, x in params.items()}
    params = {k: jnp.where(masked[k], -jnp.inf, x) for k, x in params.items()}
    grads = {k: jnp.where(masked[k], 0, x) for k, x in grads.items()}
    state, start = tx.init(params), params
    for _ in range(2):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    for k, now in params.items():
        np.testing.assert_array_equal(now[masked[k]], -np.inf)
        assert np.isfinite(now[~masked[k]]).all()
        assert (now != start[k])[~masked[k]].any()


@every
def test_the_last_count_of_steps(name):
    """Where counts stay: a step as any other."""
    tx, grads, params = make(name), tree(1), tree(0)
    state = jax.tree.map(
        lambda x: jnp.full_like(x, 2**31 - 1) if x.dtype == "int32" and not x.ndim else x,
        tx.init(params),
    )
    for _ in range(2):
        updates, state = tx.update(grads, state, params)
        for x in jax.tree.leaves((updates, state)):
            assert np.isfinite(x).all()


def test_injected_numbers_are_checked_within_a_trace():
    """``apply_if_finite`` traces the step of a state that is known."""
    inner = optax.inject_hyperparams(optax_ext.came)(0.1, weight_decay=0.1)
    tx, params = optax.apply_if_finite(inner, 3), tree(0)
    updates, _ = tx.update(params, tx.init(params), params)
    assert_close(updates, first(inner, params, params)[0], rtol=1e-6)


SMALL_SHAPES = [(), (1,), (1, 1), (6, 1), (2, 0, 3)]
LONG_SHAPES = [(2, 1000), (1000, 2)]


@every
def test_shapes(name):
    """Dims of zero and one; a plain sum of 1,000 squares of 1e18 leaves float32."""
    tx = make(name, masks=False)
    params = {str(shape): jnp.full(shape, 0.5, "float32") for shape in SMALL_SHAPES}
    grads = {key: -4 * p for key, p in params.items()}
    params |= {str(shape): jnp.ones(shape) for shape in LONG_SHAPES}
    grads |= {str(shape): jnp.full(shape, 1e18) for shape in LONG_SHAPES}
    state, update = jax.jit(tx.init)(params), jax.jit(tx.update)
    start = types(state)
    for _ in range(3):
        updates, state = update(grads, state, params)
        assert types(state) == start
        assert types(updates) == types(params)
        chex.assert_tree_all_finite((updates, state))
        for key, x in updates.items():
            assert (np.asarray(x) != 0).all(), key
        params = optax.apply_updates(params, updates)


# --- Placement ---


def shardings(tree):
    """(shape, dtype, axis of every dim) of all leaves, as their types have it."""

    def one(x):
        aval = jax.typeof(x)
        axes = tuple(aval.sharding.spec) + (None,) * aval.ndim
        return aval.shape, aval.dtype, axes[: aval.ndim]

    return jax.tree.map(one, tree)


@every
def test_sharding_types_on_an_explicit_mesh(name):
    """``jax.typeof`` has the sharding here: the same after ``init`` and after each update."""
    if TRANSFORMATIONS[name].blocks:
        pytest.skip("blocks have dims of their own")
    tx, mesh = make(name), jax.make_mesh((2,), ("x",), (AxisType.Explicit,))
    for dims in itertools.permutations(["x", None]):
        specs = {"w": P(*dims), "b": P("x")}
        with jax.set_mesh(mesh):
            params = {
                k: jax.ShapeDtypeStruct(s, "float32", sharding=jax.NamedSharding(mesh, specs[k]))
                for k, s in SHAPES.items()
            }
            state = jax.eval_shape(tx.init, params)
            updates, new_state = jax.eval_shape(tx.update, params, state, params)
        assert shardings(new_state) == shardings(state)
        assert shardings(updates) == shardings(params)
        for path, leaf in jax.tree.leaves_with_path(state):
            if leaf.ndim:
                shape, spec = SHAPES[path[-1].key], specs[path[-1].key]
                kept = [axis for n, axis in zip(shape, spec, strict=True) if n in leaf.shape]
                assert list(shardings(leaf)[-1]) == kept, jax.tree_util.keystr(path)
