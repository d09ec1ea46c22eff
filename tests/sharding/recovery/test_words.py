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
SHAPES = [
    (),
    (3, 0, 2),
    (5, 1, 3),
    (3, 5, 7, 2),
    (_words._CHUNK,),  # a host's chunk
    (3, 2 * _words._CHUNK // 3 + 5),  # over several, odd
]


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


@pytest.fixture(scope="module")
def on_device():
    """Arrays of every dtype and shape, with the words and the checksum that a device computes."""
    with jax.enable_x64(True):
        found = {}
        for shape in SHAPES:
            arrays = {name: random_bits(name, shape, len(found)) for name in DTYPES}
            run = jax.jit(lambda x: {k: (as_words(v), checksum(as_words(v))) for k, v in x.items()})
            words = jax.device_get(run({k: jnp.asarray(v) for k, v in arrays.items()}))
            found[shape] = {name: (arrays[name], *words[name]) for name in DTYPES}
    return found


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_devices_compute_what_hosts_do(dtype, on_device):
    for shape in SHAPES:
        array, words, found = on_device[shape][dtype]
        stored = np.asarray(array).astype(stored_dtype(dtype))
        assert words.shape == shape
        assert words.tobytes() == stored.tobytes()
        assert found.dtype == np.uint32
        assert int(found) == host_checksum(stored), shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_is_the_published_one(dtype, on_device):
    """With the integers of Python."""
    for shape in SHAPES[:-2]:
        array, _, found = on_device[shape][dtype]
        raw = np.asarray(array).astype(stored_dtype(dtype)).tobytes()
        size = min(4, stored_dtype(dtype).itemsize)
        words = [int.from_bytes(raw[i : i + size], "little") for i in range(0, len(raw), size)]
        assert int(found) == sum((2 * i + 1) * w for i, w in enumerate(words)) % 2**32


@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_dtypes(dtype):
    assert stored_dtype(jnp.dtype(dtype)).name == DTYPES[dtype]


@pytest.mark.parametrize("dtype", ["complex64", "float4_e2m1fn", "float6_e2m3fn"])
def test_other_dtypes_are_named(dtype):
    with pytest.raises(TypeError, match=f"snapshots cannot store {dtype}"):
        stored_dtype(jnp.dtype(dtype))


# --- What a checksum sees -------------------------------------------------------------------------


def corrupted(block, at):
    """The checksum with one byte changed by the bits of ``flips``: of each flip."""
    raw = bytearray(block.tobytes())
    for bit in range(8):
        raw[at] ^= 1 << bit
        yield host_checksum(np.frombuffer(raw, block.dtype))
        raw[at] ^= 1 << bit


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_flipped_bit_is_seen(size):
    block = random_bits(_words.WORDS[size], (24,))
    expected = host_checksum(block)
    for at in range(block.nbytes):
        assert expected not in list(corrupted(block, at)), at


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_flipped_bits_behind_the_first_chunk_are_seen(size):
    block = random_bits(_words.WORDS[size], (2 * _words._CHUNK + 3,))
    expected = host_checksum(block)
    for at in (_words._CHUNK * size - 1, _words._CHUNK * size, block.nbytes - 1):
        assert expected not in list(corrupted(block, at)), at


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_swapped_words_are_seen(size):
    """Neighbours, and words of different chunks."""
    block = random_bits(_words.WORDS[size], (_words._CHUNK + 40,))
    expected = host_checksum(block)
    near = itertools.combinations(range(12), 2)
    far = [(i, _words._CHUNK + j) for i, j in ((0, 0), (1, 0), (7, 39), (_words._CHUNK - 1, 0))]
    for i, j in (*near, *far):
        swapped = block.copy()
        swapped[[i, j]] = block[[j, i]]
        assert block[i] == block[j] or host_checksum(swapped) != expected, (i, j)


def test_swapped_halves_of_wide_words_are_seen():
    block = random_bits("float64", (9,))
    swapped = block.view(np.uint32).reshape(-1, 2)[:, ::-1].copy().view(np.float64)
    assert host_checksum(swapped.reshape(-1)) != host_checksum(block)


def test_moved_and_lost_rows_are_seen():
    block = random_bits("bfloat16", (16, 24))
    expected = host_checksum(block)
    assert host_checksum(np.roll(block, 1, 0)) != expected
    assert host_checksum(np.roll(block, 1, 1)) != expected
    assert host_checksum(np.ascontiguousarray(block.T)) != expected
    for row in range(16):
        zeroed = block.copy()
        zeroed[row] = 0
        assert host_checksum(zeroed) != expected


# --- Arrays of more than 2**32 words --------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        (1 << 17, 1 << 17),
        (3, 1 << 31, 5),
        (9, 1 << 30),  # of a dim with a stride of 2**31
        (7, 65_537, 257, 99_991),
        (1 << 33,),
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
    monkeypatch.setattr(
        _words,
        "lax",
        types.SimpleNamespace(
            broadcasted_iota=lambda dtype, _, d: jnp.asarray(at[d].astype(np.uint32), dtype),
            broadcast=lambda x, _: jnp.full(9, x),
        ),
    )
    index = [0] * 9
    for each, size in zip(at, shape, strict=True):
        index = [i * size + int(n) for i, n in zip(index, each, strict=True)]
    assert max(index) >= 2**32
    expected = sum((2 * i + 1) * int(w) for i, w in zip(index, words, strict=True)) % 2**32
    assert int(checksum(array)) == expected


def test_large_arrays_are_traced():
    for dtype in (jnp.float32, jnp.bfloat16):
        huge = jax.ShapeDtypeStruct((1 << 17, 1 << 17), dtype)
        found = jax.eval_shape(lambda x: checksum(as_words(x)), huge)
        assert (found.shape, found.dtype) == ((), np.uint32)
