"""Checksums of devices and hosts are equal, and see what can go wrong with bits."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding.recovery import _stored_leaf
from sharding.recovery._stored_leaf import as_words, checksum, host_checksum, stored_dtype

from .states import random_bits

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
SHAPES = [(), (3, 0, 2), (3, 5, 7, 2), (3, _stored_leaf._CHUNK // 3 + 5)]


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
    chunk, short = _stored_leaf._CHUNK, random_bits(_stored_leaf.WORDS[size], (24,))
    for at in range(short.nbytes):
        assert host_checksum(short) not in list(corrupted(short, at)), at
    block = random_bits(_stored_leaf.WORDS[size], (chunk + 40,))
    expected = host_checksum(block)
    for at in (chunk * size - 1, chunk * size, block.nbytes - 1):
        assert expected not in list(corrupted(block, at)), at
    near = itertools.combinations(range(8), 2)
    far = [(i, chunk + j) for i, j in ((0, 0), (1, 0), (7, 39), (chunk - 1, 0))]
    for i, j in (*near, *far):
        swapped = block.copy()
        swapped[[i, j]] = block[[j, i]]
        assert block[i] == block[j] or host_checksum(swapped) != expected, (i, j)
