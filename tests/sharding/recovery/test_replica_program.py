"""The program that copies a state: bytes on the wire, bits at the other end, memory on devices."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding

import sharding as shd
from sharding.plan.audit._program_collectives import collectives
from sharding.recovery import _replica_program
from sharding.recovery._peer_placement import place_replicas
from sharding.recovery._replica_program import ReplicaProgram, _boxes
from sharding.recovery._slot import OpenSlot, SlotTable
from sharding.recovery._snapshot_writer import SlotLayout
from sharding.recovery._stored_leaf import as_words, leaf_paths

from .states import adamw, box_of, invented_machines, make_state, random_like

# Of its own bytes, what the program sends beside them: a checksum of each leaf in each round, and
# the all-reduce of the flags, 2 (n - 1) / n of four bytes.
FLAGS = 2 * 7 / 8 * 4


def run_program(mesh, layout, leaves, *, replicas=2, committed=True):
    """The program, how it is compiled, and what it returns."""
    machines = invented_machines(layout)
    holders = place_replicas(machines.domains, replicas)
    program = ReplicaProgram(mesh, dataclasses.replace(machines, holders=holders), leaves)
    arrays = [x for _, x in leaves]
    compiled = program.jitted.lower(program.flags(committed), *arrays).compile()
    return program, compiled, program(arrays, committed)


def written(program, replicas):
    """What is written of them, as a slot that was opened."""
    layout = SlotLayout(program)
    data = np.full(layout.num_bytes, 0xA5, np.uint8)
    return OpenSlot(None, data, SlotTable(None, layout.leaves, layout.fill(data, replicas), None))


def check_blocks(program, leaves, replicas):
    """Every stored block has the bits and the checksum of its source; returns how many there are.

    With one process its table has the blocks of all devices, own and received.
    """
    slot = written(program, replicas)
    assert slot.intact().all()
    seen = np.zeros(len(slot.data), bool)
    for i, row in enumerate(slot.table.blocks):
        leaf, (path, x) = program.leaves[row["leaf"]], leaves[row["leaf"]]
        words = np.asarray(as_words(jnp.asarray(np.asarray(x)[box_of(leaf, int(row["block"]))])))
        assert slot.block(i).tobytes() == words.tobytes(), (path, row)
        own = seen[int(row["offset"]) :][: leaf.block_bytes]
        assert not own.any()
        own[:] = True
    assert (~seen).sum() < 8 * len(slot.table.blocks)  # padding alone
    return len(slot.table.blocks)


CASES = {
    # stage, mesh, machines, how many replicas are sent of each shard
    "stage 2, permuted machines": (2, (8,), "badcabcd", {}, 1),
    "stage 3, three replicas": (3, (8,), "aabbccdd", {"replicas": 3}, 2),
    "hybrid, replicas on other machines": (3, (2, 4), "aabbccdd", {}, 0),
    "hybrid, replicas on the same machine": (3, (2, 4), "abcdabcd", {}, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_bytes_on_the_wire_and_bits_at_the_other_end(case):
    stage, mesh, layout, options, sent = CASES[case]
    axes = ("replica", "data")[-len(mesh) :]
    replica = "replica" if len(mesh) > 1 else None
    zero = shd.Zero(jax.make_mesh(mesh, axes), stage, replica_axis=replica, min_shard_size=0)
    leaves = leaf_paths(random_like(zero.abstract_state(make_state(), tx=adamw())))
    program, compiled, replicas = run_program(zero.mesh, layout, leaves, **options)
    scalars = 4 * len(leaves) * sum(map(len, program.routes)) + FLAGS
    shards = sum(x.nbytes / mesh[-1] for _, x in leaves if not x.sharding.is_fully_replicated)
    assert shd.wire_bytes(compiled) == sent * shards + scalars
    assert {c.op for c in collectives(compiled)} <= {"collective-permute", "all-reduce"}
    assert int(replicas.committed) == 8
    # Each block once on its machines, and once more for each replica that is sent.
    copies = 2 if layout == "aabbccdd" and len(mesh) == 2 else 1 + sent
    assert check_blocks(program, leaves, replicas) == sum(
        len(set(layout))
        if x.sharding.is_fully_replicated
        else len(set(place.block.tolist())) * copies
        for place, (_, x) in zip(program.placements, leaves, strict=True)
    )

    # A bit that flips on the way: the checksum is the source's, and differs.
    if sent:
        damaged = jax.tree.map(lambda x: np.array(x), replicas.sent)
        next(rounds for rounds in damaged if rounds)[0][3, 0] ^= 1
        placed = NamedSharding(program.mesh, P(program.mesh.axis_names))
        damaged = jax.device_put(damaged, placed)
        assert (~written(program, replicas._replace(sent=damaged)).intact()).sum() == 1


DTYPES = ["bool", "uint4", "uint16", "int32", "bfloat16", "float8_e5m2", "float64"]


def test_every_dtype_and_large_shards(monkeypatch, x64):
    """Bundles of several widths, boxes of large shards, empty leaves; two routes."""
    monkeypatch.setattr(_replica_program, "_LEAST", 600)
    monkeypatch.setattr(_replica_program, "_MOST", 600)
    mesh = jax.make_mesh((8,), ("data",))
    shapes = {"large": (16, 9, 37), "small": (8, 5), "replicated": (3, 11), "empty": (8, 0)}

    def abstract(name, dtype):
        sharding = NamedSharding(mesh, P() if name == "replicated" else P("data"))
        return jax.ShapeDtypeStruct(shapes[name], jnp.dtype(dtype), sharding=sharding)

    types = {d: {name: abstract(name, d) for name in shapes} for d in DTYPES}
    leaves = leaf_paths(random_like(types))
    program, compiled, replicas = run_program(mesh, "aabbccdd", leaves, committed=False)
    boxes = [t for t in program.transfers if t.box is not None]
    assert {len(t.leaves) for t in boxes} == {1}
    assert len(boxes) > len(DTYPES)
    assert max(len(t.leaves) for t in program.transfers) > 1
    assert int(replicas.committed) == 0
    pairs = zip(program.leaves, leaves, strict=True)
    sent = sum(leaf.block_bytes for leaf, (_, x) in pairs if not x.sharding.is_fully_replicated)
    assert shd.wire_bytes(compiled) == sent + 4 * len(leaves) + FLAGS
    # Eight devices' own blocks and their peers', of two leaves; one on each machine of another.
    assert check_blocks(program, leaves, replicas) == len(DTYPES) * (2 * 16 + 4)


@pytest.mark.parametrize(
    ("shape", "count"),
    [((16,), 3), ((5, 3), 4), ((3, 40), 10), ((1, 1), 9), ((7, 2, 3), 42), ((64, 64), 10)],
)
def test_boxes_cover_a_block_once(shape, count):
    covered = np.zeros(shape, int)
    found = list(_boxes(tuple(slice(0, n) for n in shape), count))
    for box in found:
        covered[box] += 1
        # Contiguous: one index of the first dims, a range of one dim, all of the others.
        partial = [s.stop - s.start < n for s, n in zip(box, shape, strict=True)]
        first = [s.stop - s.start == 1 for s in box[: max(0, sum(partial) - 1)]]
        assert partial == sorted(partial, reverse=True)
        assert all(first)
    assert (covered == 1).all()
    assert len(found) >= min(count, math.prod(shape))
    sizes = [covered[box].size for box in found]
    assert max(sizes) <= 2 * -(-math.prod(shape) // count)
