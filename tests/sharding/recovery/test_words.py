"""Checksums of devices and hosts are equal, and see what can go wrong with bits."""

import itertools
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from sharding.recovery import _words
from sharding.recovery._words import as_words, checksum, host_checksum, stored_dtype

DTYPES = {
    "bool": "bool",
    **{name: name for name in ("int8", "int16", "int32", "uint8", "uint16", "uint32")},
    **dict.fromkeys(("int2", "int4"), "int8"),  # stored in eight bits
    **dict.fromkeys(("uint2", "uint4"), "uint8"),
    **{name: name for name in ("float16", "float32", "bfloat16")},
    **{name: name for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz")},
    **{name: name for name in ("float8_e3m4", "float8_e4m3", "float8_e8m0fnu")},
    **{name: name for name in ("int64", "uint64", "float64")},  # with x64
}
# The last one in two chunks of a host.
SHAPES = [(), (3, 0, 2), (3, 5, 7, 2), (3, _words._CHUNK // 3 + 5)]


def random_bits(dtype, shape, seed=0):
    """Of a stored dtype, with every bit that it has: NaNs, negative zeros, subnormal numbers."""
    name, rng = np.dtype(dtype).name, np.random.default_rng(seed)
    if name == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if name in ("int2", "int4", "uint2", "uint4"):
        info = ml_dtypes.iinfo(dtype)
        return rng.integers(int(info.min), int(info.max) + 1, shape).astype(dtype)
    size = np.dtype(dtype).itemsize
    raw = rng.integers(0, 256, (*shape, size), dtype=np.uint8)
    return raw.reshape(-1).view(dtype).reshape(shape)


def test_devices_compute_what_hosts_do(x64):
    """And the published sum, with the integers of Python."""
    arrays = {(d, s): random_bits(d, s, i) for d in DTYPES for i, s in enumerate(SHAPES)}

    @jax.jit
    def run(xs):
        words = [as_words(x) for x in xs]
        return words, [checksum(w) for w in words]

    found = zip(*jax.device_get(run(list(arrays.values()))), strict=True)
    for ((dtype, shape), array), (words, total) in zip(arrays.items(), found, strict=True):
        assert stored_dtype(jnp.dtype(dtype)).name == DTYPES[dtype]
        stored = np.asarray(array).astype(stored_dtype(dtype))
        raw = stored.tobytes()
        assert words.shape == shape
        assert words.tobytes() == raw
        assert total.dtype == np.uint32
        assert int(total) == host_checksum(stored), (dtype, shape)
        if shape != SHAPES[-1]:
            size = min(4, stored.itemsize)
            ints = [int.from_bytes(raw[i : i + size], "little") for i in range(0, len(raw), size)]
            assert int(total) == sum((2 * i + 1) * w for i, w in enumerate(ints)) % 2**32


@pytest.mark.parametrize("dtype", ["complex64", "float4_e2m1fn", "float6_e2m3fn"])
def test_other_dtypes_are_named(dtype):
    with pytest.raises(TypeError, match=f"snapshots cannot store {dtype}"):
        stored_dtype(jnp.dtype(dtype))


# --- What a checksum sees -------------------------------------------------------------------------


def corrupted(block, at):
    """The checksum with one byte changed by one bit: of each bit."""
    raw = bytearray(block.tobytes())
    for bit in range(8):
        raw[at] ^= 1 << bit
        yield host_checksum(np.frombuffer(raw, block.dtype))
        raw[at] ^= 1 << bit


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_flipped_bits_and_swapped_words_are_seen(size):
    """In all chunks of a host, and between them."""
    chunk, short = _words._CHUNK, random_bits(_words.WORDS[size], (24,))
    for at in range(short.nbytes):
        assert host_checksum(short) not in list(corrupted(short, at)), at
    block = random_bits(_words.WORDS[size], (chunk + 40,))
    expected = host_checksum(block)
    for at in (chunk * size - 1, chunk * size, block.nbytes - 1):
        assert expected not in list(corrupted(block, at)), at
    near = itertools.combinations(range(8), 2)
    far = [(i, chunk + j) for i, j in ((0, 0), (1, 0), (7, 39), (chunk - 1, 0))]
    for i, j in (*near, *far):
        swapped = block.copy()
        swapped[[i, j]] = block[[j, i]]
        assert block[i] == block[j] or host_checksum(swapped) != expected, (i, j)


def test_moved_and_lost_rows_and_halves_are_seen():
    block = random_bits("bfloat16", (16, 24))
    changed = [np.roll(block, 1, 0), np.roll(block, 1, 1), np.ascontiguousarray(block.T)]
    for row in range(16):
        changed.append(block.copy())
        changed[-1][row] = 0
    assert host_checksum(block) not in map(host_checksum, changed)
    wide = random_bits("float64", (9,))
    swapped = wide.view(np.uint32).reshape(-1, 2)[:, ::-1].copy().view(np.float64)
    assert host_checksum(swapped.reshape(-1)) != host_checksum(wide)


# --- Arrays of more than 2**32 words --------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        (1 << 17, 1 << 17),
        (9, 1 << 30),  # of a dim with a stride of 2**31
        (7, 65_537, 257, 99_991),
    ],
)
def test_factors_are_those_of_the_index_modulo_2_to_the_32(shape, monkeypatch):
    """Of some words of an array that no one allocates: an iota is their index in a dim."""
    rng = np.random.default_rng(0)
    at = [rng.integers(0, size, 9) for size in shape]
    for each, size in zip(at, shape, strict=True):
        each[:2] = 0, size - 1  # the first and the last word
    words = rng.integers(0, 2**32, 9, dtype=np.uint32)
    array = types.SimpleNamespace(
        dtype=np.dtype(np.uint32), shape=shape, ndim=len(shape), astype=lambda _: jnp.array(words)
    )
    iota = lambda dtype, _, d: jnp.asarray(at[d].astype(np.uint32), dtype)  # noqa: E731
    broadcast = lambda x, _: jnp.full(9, x)  # noqa: E731
    lax = types.SimpleNamespace(broadcasted_iota=iota, broadcast=broadcast)
    monkeypatch.setattr(_words, "lax", lax)
    index = [0] * 9
    for each, size in zip(at, shape, strict=True):
        index = [i * size + int(n) for i, n in zip(index, each, strict=True)]
    assert max(index) >= 2**32
    expected = sum((2 * i + 1) * int(w) for i, w in zip(index, words, strict=True)) % 2**32
    assert int(checksum(array)) == expected
