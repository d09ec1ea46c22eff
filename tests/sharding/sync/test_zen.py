"""ZEN is lossless wherever rows are, sends the bytes of its formula, and falls back to dense."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding import audit, sync
from sharding.collectives._sparse_rows import RowHash
from sharding.plan.audit._program_collectives import collectives, wire_bytes
from sharding.sync import _agsparse, _zen

from .harness import SyncRunner, assert_close, room


@functools.cache
def permuted(size, seed=0):
    """The image of each number, and that of each image under the inverse."""
    permutation = RowHash(size, seed)

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


NUM = 8
KINDS = {  # of rows: some of so many, by a random number generator
    "uniform": lambda size, count, rng: rng.choice(size, count, replace=False),
    "the first": lambda size, count, rng: np.arange(count),
    "to one owner": lambda size, count, rng: rows_of_owner(size)[:count],
    "all": lambda size, count, rng: np.arange(size),
    "none": lambda size, count, rng: np.array([], int),
}


def rows_of_owner(size):
    """Rows that the permutation gives to the first device."""
    return np.flatnonzero(permuted(size)[0] < -(-size // NUM))


def gradients(shape, count, kind):
    """(devices, *shape) with ``count`` nonzero rows per device, of a different scale on each."""
    rng, grads = np.random.default_rng(0), np.zeros((NUM, *shape))
    for i in range(NUM):
        rows = KINDS[kind](shape[0], count, rng)
        grads[i, rows] = rng.normal(size=(len(rows), *shape[1:])) * 10 ** (i / 3)
    return grads


def check(runner, grads):
    assert_close(runner(grads), {k: g.mean(0) for k, g in grads.items()}, 1e-15)


LOSSLESS = {  # 1009 is prime
    "rows": (sync.zen(0.05, min_size=1), (1009, 16), 0),
    "shards of rows": (sync.zen(0.05, min_size=1), (1024, 16), -2),
    "one": (sync.zen(0.5, seed=3, min_size=1), (1, 1), 0),
}


@functools.cache
def lossless():
    method = sync.by_path({f"^{name}$": method for name, (method, *_) in LOSSLESS.items()})
    shapes = {name: shape for name, (_, shape, _) in LOSSLESS.items()}
    dims = {name: dim for name, (*_, dim) in LOSSLESS.items()}
    return SyncRunner(method, shapes, NUM, dims), shapes


def test_equals_the_dense_mean(x64):
    runner, shapes = lossless()
    for kind in KINDS:
        check(runner, {k: gradients(s, s[0] // 20, kind) for k, s in shapes.items()})


def test_any_number_of_rows_of_one_owner(x64):
    """None is lost where lists are just full, or not: in rounds, and pulled as rows or as slots.

    Owners have their own rows of a sharded dim, so that all devices send theirs to one.
    """
    push, pull = room(0.05, 128, 64), room(0.4, 127, 8)
    assert (push, pull) == (17, 71)
    counts = {n * push + i for n in (1, 2, 4) for i in range(3)} | set(range(pull - 2, pull + 3))
    (runner, shapes), rng = lossless(), np.random.default_rng(0)
    mine = rows_of_owner(1009)
    for count in sorted(counts | {1, 127}):
        grads = {k: np.zeros((8, *s)) for k, s in shapes.items()}
        grads["shards of rows"][:, :count] = rng.normal(size=(8, count, 16))
        for i in range(8):  # rows of no two devices, fewer than one round takes
            rows = mine[:count][i::8]
            grads["rows"][i, rows] = rng.normal(size=(len(rows), 16))
        check(runner, grads)


def test_when_the_full_array_is_sent(monkeypatch, x64):
    """It is NaN here: what is not was sent as rows alone."""

    def spoil(fn):
        return lambda *args: jax.tree.map(lambda x: x * jnp.nan, fn(*args))

    for name in ("dense_mean", "_pull_all_slots"):
        monkeypatch.setattr(_zen, name, spoil(getattr(_zen, name)))
    monkeypatch.setattr(_agsparse, "dense_mean", spoil(_agsparse.dense_mean))
    dims = {"mean": 0, "rows": -2, "columns": -1, "gathered": 0}
    rules = dict.fromkeys(dims, sync.zen(0.05, min_size=1))
    rules["gathered"] = sync.agsparse(0.01, min_size=1)
    runner = SyncRunner(sync.by_path(rules), dict.fromkeys(dims, (1024, 16)), NUM, dims)
    every, found = set(dims), {}
    for kind, count, expected in [  # nonzero rows of a device, and which methods send rows alone
        ("none", 0, every),
        ("uniform", 50, every),
        ("uniform", 80, every),  # in two rounds; four to all devices
        ("the first", 90, every - {"rows", "gathered"}),  # "rows": all have one owner
        ("uniform", 170, {"rows", "columns"}),  # in two and in four
        ("uniform", 400, {"rows"}),  # in four rounds
        ("to one owner", 120, {"rows", "columns"}),  # whose owners are others
        ("all", 0, set()),
    ]:
        grads = gradients((1024, 16), count, kind)
        have = runner(dict.fromkeys(dims, grads))
        sparse = {k for k, x in have.items() if not np.isnan(x).any()}
        assert_close(have, dict.fromkeys(sparse, grads.mean(0)), 1e-15)
        found[kind, count] = sorted(sparse ^ expected)
    assert not any(found.values()), found


def test_bytes_are_those_of_the_formula():
    """In the cheapest branch, within 3 %; and few beside a mean of full arrays."""
    rows, width, num, density = 2**14, 32, 8, 0.01
    method = sync.zen(density, union_density=4 * density)
    compiled = SyncRunner(method, {"w": (rows, width)}, num, dtype=jnp.float32).compiled
    places = rows // num
    push = (num - 1) * room(density, places, num**2) * (4 * width + 4)
    pull = (num - 1) * (room(4 * density, places, num) * 4 * width + places / 8)
    have = wire_bytes(compiled, branches="cheapest")
    assert abs(have - push - pull) < 0.03 * (push + pull)
    dense = 2 * (num - 1) / num * rows * width * 4
    assert have < (density * 3.5 + 0.01) * dense
    assert wire_bytes(compiled) > dense  # with the counts and the full array
    audited = audit(compiled)
    assert (audited.least_wire, audited.wire_bytes) == (have, wire_bytes(compiled))
    assert "by the branches that send least" in str(audited)
    kinds = {c.dtype for c in collectives(compiled, "cheapest") if c.op == "all-gather"}
    assert "u8" in kinds


def test_narrow_gradients_are_sent_in_their_dtype():
    """And summed in float32."""
    runner = SyncRunner(sync.zen(0.05, min_size=1), {"w": (1024, 16)}, 8, dtype=jnp.bfloat16)
    sent = re.findall(r"(\w+)\[[\d,]*\] = all_(?:to_all|gather)\[", runner.jaxpr())
    assert set(sent) == {"bf16", "i32", "u8"}
    grads = gradients((1024, 16), 20, "uniform")
    narrow = grads.astype(jnp.bfloat16).astype(np.float32)
    have = np.asarray(runner({"w": narrow})["w"], np.float32)
    want = narrow.mean(0).astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_allclose(have, want, rtol=2**-7)
    assert np.mean(have == want) > 0.99
