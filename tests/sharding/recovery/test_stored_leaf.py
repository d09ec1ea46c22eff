"""Blocks on machines: each is stored once where it is, and sent only where it is needed.

Checksums of devices and hosts are equal, and see what can go wrong with bits.
"""

import dataclasses
import itertools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding

from sharding.recovery import _machines, _stored_leaf
from sharding.recovery._machines import machines_of, this_machine
from sharding.recovery._peer_placement import place_replicas
from sharding.recovery._stored_leaf import (
    SPLIT_BYTES,
    StoredLeaf,
    as_words,
    block_placement,
    checksum,
    host_checksum,
    stored_dtype,
)

from .states import box_of, random_bits

F32 = 4
# More elements than are split among the devices of a machine, in all of their shards.
LARGE = 8 * SPLIT_BYTES // F32


class Case:
    """The placement of a leaf, and who holds, stores and receives which block."""

    def __init__(self, mesh, spec, shape, layout, domains=None, replicas=2, itemsize=F32):
        names = list(dict.fromkeys(layout))
        domain = dict(zip(names, domains or names, strict=True))
        pairs = [[(m, domain[m]) for m in machines] for machines in (layout, names)]
        found = machines_of(*pairs)
        self.replicas = replicas
        self.holders = place_replicas(found.domains, replicas, spread=domains is not None)
        self.machines = dataclasses.replace(found, holders=self.holders)
        sharding = NamedSharding(jax.make_mesh(tuple(mesh.values()), tuple(mesh)), spec)
        self.found = block_placement(sharding, shape, itemsize, self.machines)
        self.leaf = StoredLeaf("x", shape, "float32", self.found.grid)
        indices = sharding.devices_indices_map(shape)
        self.held = [
            tuple(slice(*s.indices(n)[:2]) for s, n in zip(indices[device], shape, strict=True))
            for device in sharding.mesh.devices.flat
        ]
        self.machine = self.machines.of_device.tolist()
        self.domain = [self.machines.domains[machine] for machine in self.machine]
        self.pairs = [pair for one in self.found.sends for pair in one]

    def check(self):
        # The blocks of a machine are disjoint, and are all that its devices hold.
        for machine in range(len(self.machines.names)):
            holds, stores = (np.zeros(self.leaf.shape, np.int8) for _ in range(2))
            for d in (d for d, m in enumerate(self.machine) if m == machine):
                holds[self.held[d]] = 1
                box = box_of(self.leaf, int(self.found.block[d]))
                inside = zip(box, self.held[d], strict=True)
                assert all(o.start <= i.start and i.stop <= o.stop for i, o in inside)
                stores[box] += self.found.stored[d]
            np.testing.assert_array_equal(stores, holds)

        # Sent to as many domains as replicas, no more than that, and never to one that has it.
        for number in range(self.leaf.num_blocks):
            own = np.flatnonzero(self.found.stored & (self.found.block == number)).tolist()
            here = {self.domain[d] for d in own}
            sent = [(s, d) for s, d in self.pairs if self.found.block[s] == number]
            assert here
            assert len(sent) == max(0, self.replicas - len(here))
            assert len({self.domain[d] for _, d in sent} - here) == len(sent)
            assert all(self.found.stored[s] for s, _ in sent)

        # In permutations that ppermute takes.
        for one in self.found.sends:
            sources, destinations = zip(*one, strict=True)
            assert len(set(sources)) == len(set(destinations)) == len(one)
            assert set(sources + destinations) <= set(range(len(self.machine)))
        assert len(set(self.pairs)) == len(self.pairs)


MESHES = [
    {"data": 8},
    {"replica": 2, "data": 4},
    {"data": 4, "model": 2},
    {"replica": 2, "data": 2, "model": 2},
]
# Machines of 8 devices.
LAYOUTS = ["abcdefgh", "aabbccdd", "abcdabcd", "aaaabbbb", "badcbadc", "aaaaaaaa"]
SHAPES = [
    (),  # a scalar
    (16, 48),  # small
    (48, 5),  # only one dim divides
    (7, 3),  # nothing divides
    (16, 0),  # empty
    (16, LARGE // 16),  # the devices of a machine split what all of them hold
    (LARGE // 4 + 1, 16),  # one dim divides
    (3, LARGE // 2 + 1),  # none does: stored by one of them
]


def specs_of(mesh, shape):
    """Every spec of up to two dims with the axes of a mesh, that divides the shape."""
    groups = [(), *((axis,) for axis in mesh), *itertools.permutations(mesh, 2)]
    found = {P()}
    for entries in itertools.product(groups, repeat=min(2, len(shape))):
        names = sum(entries, ())
        sizes = [math.prod(mesh[axis] for axis in entry) for entry in entries]
        whole = all(n % size == 0 for n, size in zip(shape, sizes, strict=False))
        if whole and len(set(names)) == len(names):
            found.add(P(*entries))
    return sorted(found, key=str)


def test_every_mesh_spec_and_layout():
    """Each mesh with half of the layouts, and each layout with half of the meshes."""
    for i, mesh in enumerate(MESHES):
        for layout in LAYOUTS[i % 2 :: 2]:
            for shape in SHAPES:
                large = math.prod(shape) > 10_000
                for spec in specs_of(mesh, shape)[:: 5 if large else 2]:
                    for replicas in range(1, 2 if large else min(3, len(set(layout))) + 1):
                        Case(mesh, spec, shape, layout, replicas=replicas).check()


SHAPE = (16, LARGE // 16)


def test_nothing_is_sent_that_other_domains_hold():
    """Replicas on machines of their own; but not those that share a rack, and are lost together."""
    assert Case({"data": 8}, P(), SHAPE, "aabbccdd").found.sends == ()
    mesh, spec = {"replica": 2, "data": 4}, P("data")
    assert Case(mesh, spec, SHAPE, "aabbccdd", domains="xxyy").found.sends == ()
    together = Case(mesh, spec, SHAPE, "aabbccdd", domains="xyxy")
    together.check()
    assert len(together.pairs) == together.leaf.num_blocks


def test_sharded_leaves_take_one_round_for_each_replica():
    """All devices send at once, and each machine stores as many bytes."""
    for replicas in (1, 2, 3):
        case = Case({"data": 8}, P("data"), (16, 48), "badcdcba", replicas=replicas)
        assert [len(one) for one in case.found.sends] == [8] * (replicas - 1)
        stored = [*np.flatnonzero(case.found.stored).tolist(), *(d for _, d in case.pairs)]
        assert Counter(case.machine[d] for d in stored) == dict.fromkeys(range(4), 2 * replicas)


def test_containers_of_one_machine_are_one_machine(monkeypatch, tmp_path):
    """Their host names differ; the boot of their kernel does not."""
    boot = tmp_path / "boot_id"
    boot.write_text("7a3c\n")
    monkeypatch.setattr(_machines, "_BOOT_ID", boot)
    for name in ("one", "other"):
        monkeypatch.setattr("socket.gethostname", lambda name=name: name)
        assert this_machine() == "7a3c"
    boot.unlink()
    assert this_machine() == "other"


# Others than integers of few bits are stored as they are; those of 64 need x64.
STORED_AS = {"int2": "int8", "int4": "int8", "uint2": "uint8", "uint4": "uint8"}
DTYPES = [
    *["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", *STORED_AS],
    *["float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e3m4"],
    *["float8_e4m3", "float8_e4m3b11fnuz", "float8_e8m0fnu"],
]
# The last one in two chunks of a host.
CHECKED_SHAPES = [(), (3, 0, 2), (3, 5, 7, 2), (3, _stored_leaf._CHUNK // 3 + 5)]


def test_devices_compute_what_hosts_do(x64):
    """And the published sum, with the integers of Python."""
    arrays = {(d, s): random_bits(d, s, i) for d in DTYPES for i, s in enumerate(CHECKED_SHAPES)}

    @jax.jit
    def run(xs):
        words = [as_words(x) for x in xs]
        return words, [checksum(w) for w in words]

    found = zip(*jax.device_get(run(list(arrays.values()))), strict=True)
    for ((dtype, shape), array), (words, total) in zip(arrays.items(), found, strict=True):
        assert stored_dtype(jnp.dtype(dtype)).name == STORED_AS.get(dtype, dtype)
        stored = np.asarray(array).astype(stored_dtype(dtype))
        raw = stored.tobytes()
        assert words.shape == shape
        assert words.tobytes() == raw
        assert total.dtype == np.uint32
        assert int(total) == host_checksum(stored), (dtype, shape)
        if shape != CHECKED_SHAPES[-1]:
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
