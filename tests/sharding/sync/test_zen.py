"""ZEN is lossless wherever rows are, sends the bytes of its formula, and falls back to dense."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

import sharding as shd
from sharding import sync
from sharding.collectives._permutation import Permutation
from sharding.plan.program._wire import collectives, wire_bytes
from sharding.sync import _agsparse, _zen

from .harness import SyncRunner

# --- The permutation ------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 1000))
def test_the_permutation_and_its_inverse(size, seed):
    permutation, x = Permutation(size, seed), jnp.arange(size, dtype=jnp.int32)
    mixed = permutation.apply(x)
    assert mixed.dtype == jnp.int32
    np.testing.assert_array_equal(np.sort(mixed), x)
    np.testing.assert_array_equal(permutation.invert(mixed), x)


@pytest.mark.parametrize("size", [2**22, 50257, 2**20 + 1, 100_000])
@pytest.mark.parametrize("num", [8, 16, 64])
def test_the_permutation_balances_owners(size, num):
    """Rows that are neighbours, or a power of two apart, are spread evenly over owners."""
    permutation = Permutation(size)
    count = size // 16
    for name, rows in {
        "the first": np.arange(count),
        "the last": size - 1 - np.arange(count),
        "every second": 2 * np.arange(count),
        "every eighth": 8 * np.arange(count),
        "every sixteenth": 16 * np.arange(count),
    }.items():
        owners = np.asarray(permutation.apply(jnp.asarray(rows, jnp.int32))) // -(-size // num)
        share = np.bincount(owners, minlength=num) * num / count
        # A random hash would be off by more for one owner in 30,000.
        assert share.max() < 1 + 4.2 * np.sqrt(num / count), (name, share.max())


def test_seeds_select_permutations():
    x = jnp.arange(1000, dtype=jnp.int32)
    assert np.mean(Permutation(1000, 1).apply(x) == Permutation(1000, 2).apply(x)) < 0.05


# --- The mean -------------------------------------------------------------------------------------


def rows_to_one_owner(size, num, count):
    """Rows that the permutation gives to the first device."""
    mine = np.flatnonzero(np.asarray(Permutation(size).apply(jnp.arange(size))) < -(-size // num))
    return mine[:count]


def pick(kind, size, num, count, rng):
    return {
        "uniform": lambda: rng.choice(size, count, replace=False),
        "the first": lambda: np.arange(count),
        "the last": lambda: size - 1 - np.arange(count),
        "the very first": lambda: np.array([0]),
        "to one owner": lambda: rows_to_one_owner(size, num, count),
        "all": lambda: np.arange(size),
        "none": lambda: np.array([], int),
    }[kind]()


KINDS = ("uniform", "the first", "the last", "the very first", "to one owner", "all", "none")


def gradients(shape, num, count, kind, seed=0):
    """(devices, *shape) with ``count`` nonzero rows per device, of a different scale on each."""
    rng = np.random.default_rng(seed)
    grads = np.zeros((num, *shape))
    for i in range(num):
        rows = pick(kind, shape[0], num, count, rng)
        grads[i, rows] = rng.normal(size=(len(rows), *shape[1:])) * 10 ** (i / 3)
    return grads


def assert_mean(have, grads):
    want = grads.mean(0)
    assert np.linalg.norm(have - want) <= 1e-15 * np.linalg.norm(want)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("num", [1, 3, 8])
@pytest.mark.parametrize("name", ["rows", "elements", "agsparse"])
def test_equals_the_dense_mean(num, name, x64):
    """1009 is prime."""
    method, shape = {
        "rows": (sync.zen(0.05, min_size=1), (1009, 6)),
        "elements": (sync.zen(0.05, granularity="element", min_size=1), (1009,)),
        "agsparse": (sync.agsparse(0.05, min_size=1), (1009, 6)),
    }[name]
    runner = SyncRunner(method, {"w": shape}, num)
    for kind in KINDS:
        for seed in range(3):
            grads = gradients(shape, num, 50, kind, seed)
            assert_mean(runner({"w": grads})["w"], grads)


@pytest.mark.parametrize(("shape", "dim"), [((1024, 16), -2), ((1009, 16), -1), ((256, 4, 8), -1)])
def test_shards_equal_the_dense_mean(shape, dim, x64):
    runner = SyncRunner(sync.zen(0.05, min_size=1), {"w": shape}, 8, {"w": dim})
    for kind in KINDS:
        for seed in range(2):
            grads = gradients(shape, 8, 12, kind, seed)
            assert_mean(runner({"w": grads})["w"], grads)


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 300),
    width=st.integers(1, 9),
    num=st.sampled_from([1, 2, 3, 5, 8]),
    density=st.floats(0.001, 1.0),
    union=st.none() | st.floats(0.001, 1.0),
    real=st.floats(0.0, 1.0),
    seed=st.integers(0, 99),
)
def test_any_size_density_and_number_of_devices(rows, width, num, density, union, real, seed):
    rng = np.random.default_rng(seed)
    grads = rng.normal(size=(num, rows, width)) * (rng.random((num, rows, 1)) < real)
    with jax.enable_x64(True):
        method = sync.zen(density, union_density=union, min_size=1, seed=seed)
        runner = SyncRunner(method, {"w": (rows, width)}, num)
        assert_mean(runner({"w": grads})["w"], grads)


# --- Bytes on the wire ----------------------------------------------------------------------------


@pytest.fixture
def poisoned(monkeypatch):
    """Makes the result NaN if the full array is sent instead of rows."""

    def spoil(fn):
        def spoiled(*args):
            return jax.tree.map(lambda x: x * jnp.nan, fn(*args))

        return spoiled

    for module, name in (
        (_zen, "dense_mean"),
        (_zen, "dense_mean_shard"),
        (_agsparse, "dense_mean"),
    ):
        monkeypatch.setattr(module, name, spoil(getattr(module, name)))
    monkeypatch.setattr(_zen, "_pull_all_slots", spoil(_zen._pull_all_slots))


def assert_mean_or_poison(have, grads, is_sparse):
    if is_sparse:
        assert_mean(have, grads)
    else:
        assert np.isnan(have).all()


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(
    ("kind", "count", "options", "is_sparse"),
    [
        ("uniform", 50, {}, True),
        ("none", 50, {}, True),
        ("the first", 50, {"union_density": 0.06}, True),  # the same rows on all devices
        ("uniform", 50, {"union_density": 0.06}, False),  # the union is larger than expected
        ("uniform", 80, {}, True),  # in two rounds
        ("uniform", 170, {"union_density": 0.8}, True),  # in four
        ("uniform", 400, {}, False),
        ("to one owner", 25, {}, True),  # in four
        ("to one owner", 120, {}, False),
        ("all", 0, {}, False),
    ],
)
def test_when_an_all_reduce_is_dense(kind, count, options, is_sparse, poisoned, x64):
    runner = SyncRunner(sync.zen(0.05, min_size=1, **options), {"w": (1009, 16)}, 8)
    grads = gradients((1009, 16), 8, count, kind)
    assert_mean_or_poison(runner({"w": grads})["w"], grads, is_sparse)


@pytest.mark.parametrize("dim", [-2, -1])
@pytest.mark.parametrize(("kind", "count"), [("uniform", 50), ("the first", 50), ("the first", 90)])
def test_when_a_reduce_scatter_is_dense(dim, kind, count, poisoned, x64):
    """Sharded rows are not permuted, hence not balanced: the first ones have one owner."""
    runner = SyncRunner(sync.zen(0.05, min_size=1), {"w": (1024, 16)}, 8, {"w": dim})
    grads = gradients((1024, 16), 8, count, kind)
    is_sparse = count == 50 or dim == -1  # in four rounds, or in two
    assert_mean_or_poison(runner({"w": grads})["w"], grads, is_sparse)


def program(method, shape, num, dims=None):
    runner = SyncRunner(method, {"w": shape}, num, dims, jnp.float32)
    x = jax.ShapeDtypeStruct((num, *shape), jnp.float32)
    return jax.jit(runner.mapped).lower({"w": x}, runner.state).compile()


def capacity(expected, lists):
    """The capacity of lists in which so many rows are expected."""
    return expected + np.sqrt(2 * np.log(100 * lists) * expected)


@pytest.mark.parametrize("density", [0.01, 0.05])
def test_bytes_are_those_of_the_formula(density):
    """In the cheapest branch, within 3 %."""
    rows, width, num, union = 2**16, 32, 8, 4 * density
    compiled = program(sync.zen(density, union_density=union), (rows, width), num)
    places = rows // num
    push = (num - 1) * capacity(density * places, num**2) * (4 * width + 4)
    pull = (num - 1) * (capacity(union * places, num) * 4 * width + places / 8)
    have = wire_bytes(compiled, branches="cheapest")
    assert abs(have - push - pull) < 0.03 * (push + pull)
    dense = wire_bytes(program(sync.dense(), (rows, width), num))
    assert have < (density * 3.5 + 0.01) * dense
    assert wire_bytes(compiled) > dense  # with the counts and the full array
    kinds = {c.dtype for c in collectives(compiled, "cheapest") if c.op == "all-gather"}
    assert "u8" in kinds


@pytest.mark.parametrize(
    ("kind", "count", "is_sparse"),
    [("uniform", 10, True), ("to one owner", 20, True), ("uniform", 30, True), ("all", 0, False)],
)
def test_when_agsparse_is_dense(kind, count, is_sparse, poisoned, x64):
    runner = SyncRunner(sync.agsparse(0.01, min_size=1), {"w": (1009, 16)}, 8)
    grads = gradients((1009, 16), 8, count, kind)
    assert_mean_or_poison(runner({"w": grads})["w"], grads, is_sparse)


def test_bytes_of_agsparse():
    rows, width, num, density = 2**14, 64, 8, 0.02
    compiled = program(sync.agsparse(density), (rows, width), num)
    want = (num - 1) * capacity(density * rows, num) * 4 * (width + 1)
    have = wire_bytes(compiled, branches="cheapest")
    assert abs(have - want) < 0.03 * want


def test_narrow_gradients_are_sent_in_their_dtype():
    """And summed in float32."""
    runner = SyncRunner(sync.zen(0.05, min_size=1), {"w": (1024, 16)}, 8, dtype=jnp.bfloat16)
    text = str(
        jax.make_jaxpr(runner.mapped)({"w": jnp.ones((8, 1024, 16), jnp.bfloat16)}, runner.state)
    )
    sent = re.findall(r"(\w+)\[[\d,]*\] = all_(?:to_all|gather)\[", text)
    assert set(sent) == {"bf16", "i32", "u8"}
    grads = gradients((1024, 16), 8, 20, "uniform")
    narrow = np.asarray(jnp.asarray(grads, jnp.bfloat16), np.float32)
    have = np.asarray(runner({"w": narrow})["w"], np.float32)
    want = np.asarray(jnp.asarray(narrow.mean(0)).astype(jnp.bfloat16), np.float32)
    np.testing.assert_allclose(have, want, rtol=2**-7)
    assert np.mean(have == want) > 0.99


@pytest.mark.parametrize("dim", [-2, -1])
def test_shards_need_no_pull(dim):
    rows, width, num, density = 2**14, 64, 8, 0.02
    compiled = program(sync.zen(density), (rows, width), num, {"w": dim})
    if dim == -2:  # each owner's rows and their slots
        want = (num - 1) * capacity(density * rows / num, num**2) * 4 * (width + 1)
    else:  # a shard of each row, and its index to all devices
        want = (num - 1) * capacity(density * rows, num) * 4 * (width / num + 1)
    have = wire_bytes(compiled, branches="cheapest")
    assert abs(have - want) < 0.03 * want


def test_an_audit_of_a_program_with_branches():
    text = str(shd.audit(program(sync.zen(0.01), (4096, 16), 8)))
    assert "all-to-all" in text or "all-reduce" in text
    with pytest.raises(ValueError, match="branches must be one of dearest, cheapest"):
        wire_bytes(program(sync.dense(), (8, 8), 2), branches="first")


def test_nonfinite_numbers_stay_in_their_rows(x64):
    grads = gradients((1009, 6), 8, 40, "uniform")
    grads[3, 0] = 1.0
    grads[3, 0, 2] = np.inf
    grads[5, 77, 1] = np.nan
    have = SyncRunner(sync.zen(0.05, min_size=1), {"w": (1009, 6)}, 8)({"w": grads})["w"].copy()
    assert np.isinf(have[0, 2])
    assert np.isnan(have[77, 1])
    have[0, 2] = have[77, 1] = 0.0
    assert np.isfinite(have).all()


# --- Under ZeRO -----------------------------------------------------------------------------------


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("stage", "rows"), [(0, 509), (1, 512), (2, 509), (2, 512), (3, 512)])
def test_the_same_training(stage, rows, x64):
    """As without ZEN, up to rounding, for embeddings sharded along rows or the last dim."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

    def make_state():
        rng = np.random.default_rng(0)
        shapes = {"embedding": (rows, 16), "out": (16, 8)}
        params = {k: jnp.asarray(rng.normal(size=s)) for k, s in shapes.items()}
        return params, tx.init(params)

    def run(method):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        zero = shd.Zero(mesh, stage, min_shard_size=64, sync=method)

        def loss(params, ids):
            params = zero.gather(params)
            return jnp.mean(jnp.tanh(params["embedding"][ids] @ params["out"]) ** 2)

        state = zero.init(make_state, tx=tx)
        step = zero.train_step(loss, tx=tx, microbatches=2)
        for i in range(5):
            rng = np.random.default_rng(i)
            ids = np.minimum(rng.zipf(1.3, 128) - 1, rows - 1)
            state, _ = step(state, zero.put(jnp.asarray(ids)))
        return jax.device_get(state[0])

    method = sync.by_path({"embedding": sync.zen(0.02, min_size=64)})
    have, want, start = run(method), run(None), jax.device_get(make_state()[0])
    for k, x in want.items():
        assert np.linalg.norm(have[k] - x) < 1e-12 * np.linalg.norm(x - start[k]), k


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0.0}, "density must be above 0 and at most 1, got 0.0"),
        ({"density": 1.1}, "density must be above 0 and at most 1, got 1.1"),
        ({"union_density": 0}, "union_density must be above 0"),
        ({"granularity": "column"}, "granularity must be 'row' or 'element'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        sync.zen(**options)


def test_bad_density_of_agsparse():
    with pytest.raises(ValueError, match="density must be above 0 and at most 1, got 2"):
        sync.agsparse(2)
