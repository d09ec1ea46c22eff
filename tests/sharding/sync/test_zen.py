"""ZEN is lossless wherever rows are, sends the bytes of its formula, and falls back to dense."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding as shd
from sharding import sync
from sharding.collectives._permutation import Permutation
from sharding.plan.program._wire import collectives, wire_bytes
from sharding.sync import _agsparse, _zen

from .harness import SyncRunner, assert_close

# --- The permutation ------------------------------------------------------------------------------


@functools.cache
def permuted(size, seed=0):
    """The image of each number, and that of each image under the inverse."""
    permutation = Permutation(size, seed)

    @jax.jit
    def run():
        mixed = permutation.apply(jnp.arange(size, dtype=jnp.int32))
        return mixed, permutation.invert(mixed)

    return tuple(map(np.asarray, run()))


@pytest.mark.parametrize("size", [1, 2, 3, 100, 509, 1024, 5000])  # of even and odd numbers of bits
def test_the_permutation_and_its_inverse(size):
    mixed, back = permuted(size)
    assert mixed.dtype == np.int32
    np.testing.assert_array_equal(np.sort(mixed), np.arange(size))
    np.testing.assert_array_equal(back, np.arange(size))
    if size == 5000:
        assert np.mean(mixed == permuted(size, seed=1)[0]) < 0.05


@pytest.mark.parametrize(
    "size", [2**22, 50257, *(pytest.param(n, marks=pytest.mark.slow) for n in (2**20 + 1, 100_000))]
)
def test_the_permutation_balances_owners(size):
    """Rows that are neighbours, or a power of two apart, are spread evenly over owners."""
    count = size // 16
    for name, rows in {
        "the first": np.arange(count),
        "the last": size - 1 - np.arange(count),
        "every second": 2 * np.arange(count),
        "every eighth": 8 * np.arange(count),
        "every sixteenth": 16 * np.arange(count),
    }.items():
        for num in (8, 16, 64):
            owners = permuted(size)[0][rows] // -(-size // num)
            share = np.bincount(owners, minlength=num) * num / count
            # A random hash would be off by more for one owner in 30,000.
            assert share.max() < 1 + 4.2 * np.sqrt(num / count), (name, share.max())


# --- The mean -------------------------------------------------------------------------------------


def rows_of_owner(size, num):
    """Rows that the permutation gives to the first device."""
    return np.flatnonzero(permuted(size)[0] < -(-size // num))


def pick(kind, size, num, count, rng):
    return {
        "uniform": lambda: rng.choice(size, count, replace=False),
        "the first": lambda: np.arange(count),
        "the last": lambda: size - 1 - np.arange(count),
        "to one owner": lambda: rows_of_owner(size, num)[:count],
        "all": lambda: np.arange(size),
        "none": lambda: np.array([], int),
    }[kind]()


KINDS = ("uniform", "the first", "the last", "to one owner", "all", "none")


def gradients(shape, num, count, kind, seed=0):
    """(devices, *shape) with ``count`` nonzero rows per device, of a different scale on each."""
    rng = np.random.default_rng(seed)
    grads = np.zeros((num, *shape))
    for i in range(num):
        rows = pick(kind, shape[0], num, count, rng)
        grads[i, rows] = rng.normal(size=(len(rows), *shape[1:])) * 10 ** (i / 3)
    return grads


def room(density, slots, lists):
    """How many rows a list has room for: those of the fullest of so many."""
    expected = density * slots
    margin = np.sqrt(2 * np.log(100 * lists) * expected * (1 - density))
    return int(np.ceil(expected + margin))


def check(runner, grads):
    assert_close(runner(grads), {k: g.mean(0) for k, g in grads.items()}, 1e-15)


LOSSLESS = {  # 1009 is prime
    "rows": (sync.zen(0.05, min_size=1), (1009, 16), 0),
    "shards of rows": (sync.zen(0.05, min_size=1), (1024, 16), -2),
    "one": (sync.zen(0.5, seed=3, min_size=1), (1, 1), 0),
}


@functools.cache
def lossless(num):
    method = sync.by_path({f"^{name}$": method for name, (method, *_) in LOSSLESS.items()})
    shapes = {name: shape for name, (_, shape, _) in LOSSLESS.items()}
    dims = {name: dim for name, (*_, dim) in LOSSLESS.items()}
    return SyncRunner(method, shapes, num, dims), shapes


@pytest.mark.parametrize("num", [8, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4))])
def test_equals_the_dense_mean(num, x64):
    runner, shapes = lossless(num)
    for kind in KINDS:
        for seed in range(2):
            check(runner, {k: gradients(s, num, s[0] // 20, kind, seed) for k, s in shapes.items()})


def test_any_number_of_rows_of_one_owner(x64):
    """None is lost where lists are just full, or not: in rounds, and pulled as rows or as slots.

    Owners have their own rows of a sharded dim, so that all devices send theirs to one.
    """
    push, pull = room(0.05, 128, 64), room(0.4, 127, 8)
    assert (push, pull) == (17, 71)
    counts = {n * push + i for n in (1, 2, 4) for i in range(3)} | set(range(pull - 2, pull + 3))
    (runner, shapes), rng = lossless(8), np.random.default_rng(0)
    mine = rows_of_owner(1009, 8)
    for count in sorted(counts | {1, 127}):
        grads = {k: np.zeros((8, *s)) for k, s in shapes.items()}
        grads["shards of rows"][:, :count] = rng.normal(size=(8, count, 16))
        for i in range(8):  # rows of no two devices, fewer than one round takes
            rows = mine[:count][i::8]
            grads["rows"][i, rows] = rng.normal(size=(len(rows), 16))
        check(runner, grads)


# --- Which rows are sent --------------------------------------------------------------------------

SPARSE = {  # the method, and along which dim its mean is sharded
    "mean": (sync.zen(0.05, min_size=1), 0),
    "small union": (sync.zen(0.05, union_density=0.06, min_size=1), 0),
    "rows": (sync.zen(0.05, min_size=1), -2),
    "columns": (sync.zen(0.05, min_size=1), -1),
    "gathered": (sync.agsparse(0.01, min_size=1), 0),
}


@pytest.fixture
def poisoned(monkeypatch, x64):
    """All of ``SPARSE``, with NaN if the full array is sent instead of rows."""

    def spoil(fn):
        return lambda *args: jax.tree.map(lambda x: x * jnp.nan, fn(*args))

    for module, names in (
        (_zen, ("dense_mean", "dense_mean_shard", "_pull_all_slots")),
        (_agsparse, ("dense_mean",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, spoil(getattr(module, name)))
    method = sync.by_path({f"^{name}$": method for name, (method, _) in SPARSE.items()})
    dims = {name: dim for name, (_, dim) in SPARSE.items()}
    runner = SyncRunner(method, dict.fromkeys(SPARSE, (1024, 16)), 8, dims)
    return runner


def test_when_the_full_array_is_sent(poisoned):
    every = set(SPARSE)
    cases = [  # kind, nonzero rows of a device, and which methods send rows alone
        ("none", 0, every),
        ("uniform", 10, every),
        ("uniform", 50, every - {"small union"}),  # of 0.33 instead of 0.06
        ("the first", 50, every),  # the same rows on all devices
        ("uniform", 80, every - {"small union"}),  # in two rounds; four to all devices
        ("the first", 90, every - {"rows", "gathered"}),  # "rows": all have one owner
        ("uniform", 170, {"rows", "columns"}),  # in two and in four
        ("uniform", 400, {"rows"}),  # in four rounds
        ("to one owner", 25, every - {"small union"}),  # it may pull 18 rows of an owner
        ("to one owner", 120, {"rows", "columns"}),  # whose owners are others
        ("all", 0, set()),
    ]
    found = {}
    for kind, count, expected in cases:
        grads = gradients((1024, 16), 8, count, kind)
        have = poisoned(dict.fromkeys(SPARSE, grads))
        sparse = {k for k, x in have.items() if not np.isnan(x).any()}
        assert_close(have, dict.fromkeys(sparse, grads.mean(0)), 1e-15)
        assert all(np.isnan(have[k]).all() for k in have.keys() - sparse)
        found[kind, count] = sorted(sparse ^ expected)
    assert not any(found.values()), found


# --- Bytes on the wire ----------------------------------------------------------------------------


def program(method, shape, num, dims=None):
    return SyncRunner(method, {"w": shape}, num, dims, jnp.float32).compiled


def capacity(expected, lists):
    """The capacity of lists in which so many rows are expected."""
    return expected + np.sqrt(2 * np.log(100 * lists) * expected)


def test_bytes_are_those_of_the_formula():
    """In the cheapest branch, within 3 %; and few beside a mean of full arrays."""
    rows, width, num, density = 2**14, 32, 8, 0.01
    compiled = program(sync.zen(density, union_density=4 * density), (rows, width), num)
    places = rows // num
    push = (num - 1) * capacity(density * places, num**2) * (4 * width + 4)
    pull = (num - 1) * (capacity(4 * density * places, num) * 4 * width + places / 8)
    have = wire_bytes(compiled, branches="cheapest")
    assert abs(have - push - pull) < 0.03 * (push + pull)
    dense = 2 * (num - 1) / num * rows * width * 4
    assert have < (density * 3.5 + 0.01) * dense
    assert wire_bytes(compiled) > dense  # with the counts and the full array
    kinds = {c.dtype for c in collectives(compiled, "cheapest") if c.op == "all-gather"}
    assert "u8" in kinds
    text = str(shd.audit(compiled))
    assert "all-to-all" in text or "all-reduce" in text
    with pytest.raises(ValueError, match="branches must be one of dearest, cheapest"):
        wire_bytes(compiled, branches="first")


@pytest.mark.parametrize(
    ("method", "dim"),
    [(sync.agsparse, None), (sync.zen, -2), (sync.zen, -1)],
    ids=["agsparse", "zen, rows", "zen, columns"],
)
def test_bytes_without_a_pull(method, dim):
    rows, width, num, density = 2**14, 64, 8, 0.02
    compiled = program(method(density), (rows, width), num, dim and {"w": dim})
    want = (num - 1) * capacity(density * rows, num)  # rows to all devices
    if dim == -2:  # to their owners
        want = (num - 1) * capacity(density * rows / num, num**2)
    # With an index; of columns, a shard of each row.
    want *= 4 * (width / num + 1 if dim == -1 else width + 1)
    have = wire_bytes(compiled, branches="cheapest")
    assert abs(have - want) < 0.03 * want


def test_narrow_gradients_are_sent_in_their_dtype():
    """And summed in float32."""
    runner = SyncRunner(sync.zen(0.05, min_size=1), {"w": (1024, 16)}, 8, dtype=jnp.bfloat16)
    sent = re.findall(r"(\w+)\[[\d,]*\] = all_(?:to_all|gather)\[", runner.jaxpr())
    assert set(sent) == {"bf16", "i32", "u8"}
    grads = gradients((1024, 16), 8, 20, "uniform")
    narrow = grads.astype(jnp.bfloat16).astype(np.float32)
    have = np.asarray(runner({"w": narrow})["w"], np.float32)
    want = narrow.mean(0).astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_allclose(have, want, rtol=2**-7)
    assert np.mean(have == want) > 0.99

    # What is not finite stays in its row.
    grads[3, 0] = 1.0
    grads[3, 0, 2] = np.inf
    grads[5, 77, 1] = np.nan
    have = np.asarray(runner({"w": grads})["w"], np.float32)
    assert np.isinf(have[0, 2])
    assert np.isnan(have[77, 1])
    have[0, 2] = have[77, 1] = 0.0
    assert np.isfinite(have).all()
