"""The program that copies a state: bytes on the wire, bits at the other end, memory on devices."""

import functools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding

import sharding as shd
from sharding.plan.program._wire import collectives
from sharding.recovery import _replica_program
from sharding.recovery._machines import planned_machines
from sharding.recovery._peer_placement import place_replicas
from sharding.recovery._replica_program import ReplicaProgram, _boxes, leaf_paths
from sharding.recovery._slot_plan import SlotPlan
from sharding.recovery._words import as_words, host_checksum

from ...compilers import need
from .states import adamw, invented_machines, make_state, random_like

# Of its own bytes, what the program sends beside them: a checksum of each leaf in each round, and
# the all-reduce of the flags, 2 (n - 1) / n of four bytes.
FLAGS = 2 * 7 / 8 * 4


def program_of(zero, layout, leaves, *, replicas=2, placement="group"):
    machines = invented_machines(layout)
    holders = place_replicas(machines.domains, replicas, placement)
    return ReplicaProgram(zero.mesh, machines, holders, leaves)


def run_program(program, leaves, committed=True):
    """The compiled program, and what it returns."""
    arguments = program.flags(committed), *(x for _, x in leaves)
    compiled = program.jitted.lower(*arguments).compile()
    return compiled, program([x for _, x in leaves], committed)


def check_blocks(program, leaves, replicas):
    """Every stored block has the bits and the checksum of its source; returns how many there are.

    With one process its table has the blocks of all devices, own and received.
    """
    plan = SlotPlan(program)
    data = np.full(plan.num_bytes, 0xA5, np.uint8)
    blocks = plan.fill(data, replicas)
    seen = np.zeros(plan.num_bytes, bool)
    for row in blocks:
        leaf, (path, x) = program.leaves[row["leaf"]], leaves[row["leaf"]]
        start = int(row["offset"])
        raw = data[start : start + leaf.block_bytes]
        words = np.asarray(as_words(jnp.asarray(np.asarray(x)[leaf.box(int(row["block"]))])))
        assert raw.tobytes() == words.tobytes(), (path, row)
        assert host_checksum(raw.view(leaf.dtype)) == row["checksum"], (path, row)
        assert not seen[start : start + leaf.block_bytes].any()
        seen[start : start + leaf.block_bytes] = True
    assert (~seen).sum() < 8 * len(blocks)  # padding alone
    return len(blocks)


def rounds_of(program):
    return sum(len(route) for route in program.routes)


def zero_of(shape, stage, **options):
    axes = {1: ("data",), 2: ("replica", "data")}[len(shape)]
    mesh = jax.make_mesh(shape, axes)
    if len(shape) > 1:
        options = {"replica_axis": "replica"} | options
    return shd.Zero(mesh, stage, min_shard_size=0, **options)


def shard_bytes(leaves, axis="data"):
    """Bytes of one device's shards of the leaves that are sharded on an axis."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for _, x in leaves
        if axis in str(x.sharding.spec)
    )


CASES = {
    # stage, mesh, machines, how many replicas are sent of each shard
    "stage 2, permuted machines": (2, (8,), "badcabcd", {}, 1),
    "stage 3, three replicas": (3, (8,), "aabbccdd", {"replicas": 3, "placement": "ring"}, 2),
    "hybrid, replicas on other machines": (3, (2, 4), "aabbccdd", {}, 0),
    "hybrid, replicas on the same machine": (3, (2, 4), "abcdabcd", {}, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_bytes_on_the_wire_and_bits_at_the_other_end(case):
    stage, mesh, layout, options, sent = CASES[case]
    zero = zero_of(mesh, stage)
    leaves = leaf_paths(random_like(zero.abstract_state(make_state(), tx=adamw())))
    program = program_of(zero, layout, leaves, **options)
    compiled, replicas = run_program(program, leaves)
    scalars = 4 * len(leaves) * rounds_of(program) + FLAGS
    assert shd.wire_bytes(compiled) == sent * shard_bytes(leaves) + scalars
    assert {c.op for c in collectives(compiled)} <= {"collective-permute", "all-reduce"}
    assert int(replicas.committed) == 8

    # Each block once on its machines, and once more for each replica that is sent.
    machines = len(set(layout))
    expected = sum(
        len(set(program.placements[i].block.tolist())) * (1 + sent)
        if not x.sharding.is_fully_replicated
        else machines
        for i, (_, x) in enumerate(leaves)
    )
    if layout == "aabbccdd" and len(mesh) == 2:  # two machines have each shard
        expected += sum(4 for _, x in leaves if not x.sharding.is_fully_replicated)
    assert check_blocks(program, leaves, replicas) == expected

    # A bit that flips on the way: the checksum is the source's, and differs.
    if sent:
        damaged = jax.tree.map(lambda x: np.array(x), replicas.sent)
        next(rounds for rounds in damaged if rounds)[0][3, 0] ^= 1
        plan, placed = SlotPlan(program), NamedSharding(program.mesh, P(program.mesh.axis_names))
        put = functools.partial(jax.device_put, device=placed)
        data = np.zeros(plan.num_bytes, np.uint8)
        blocks = plan.fill(data, replicas._replace(sent=jax.tree.map(put, damaged)))
        rows = [program.leaves[row["leaf"]] for row in blocks]
        starts = [int(row["offset"]) for row in blocks]
        found = [
            host_checksum(data[at : at + leaf.block_bytes].view(leaf.dtype))
            for at, leaf in zip(starts, rows, strict=True)
        ]
        assert np.sum(np.array(found, np.uint32) != blocks["checksum"]) == 1


def test_tensor_parallel():
    """Leaves on both axes, on none, and on the one whose devices each machine has all of."""
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    zero = shd.Zero(mesh, 3, axis="data", min_shard_size=0)
    specs = {"up": P(None, None, "model"), "down": P(None, "model")}
    specs |= {"odd": P("model"), "prime": P(), "bias": P(), "gain": P()}
    leaves = leaf_paths(
        random_like(zero.abstract_state(make_state(), tx=adamw(), param_specs=specs))
    )
    kinds = {len([a for a in x.sharding.spec if a]) for _, x in leaves}
    assert kinds == {0, 1, 2}
    program = program_of(zero, "aabbccdd", leaves)
    compiled, replicas = run_program(program, leaves)
    scalars = 4 * len(leaves) * rounds_of(program) + FLAGS
    assert shd.wire_bytes(compiled) == shard_bytes(leaves) + scalars
    assert 0 < shard_bytes(leaves) < shard_bytes(leaves, "model") + shard_bytes(leaves)
    check_blocks(program, leaves, replicas)


DTYPES = ["bool", "uint4", "uint16", "int32", "bfloat16", "float8_e5m2", "float64"]


def test_every_dtype_and_large_shards(monkeypatch, x64):
    """Bundles of several widths, boxes of large shards, empty leaves; two routes."""
    monkeypatch.setattr(_replica_program, "_LEAST", 600)
    monkeypatch.setattr(_replica_program, "_MOST", 600)
    mesh = jax.make_mesh((8,), ("data",))
    shapes = {"large": (16, 9, 37), "small": (8, 5), "replicated": (3, 11), "empty": (8, 0)}

    def abstract(name, dtype):
        spec = P() if name == "replicated" else P("data")
        return jax.ShapeDtypeStruct(
            shapes[name], jnp.dtype(dtype), sharding=NamedSharding(mesh, spec)
        )

    types = {d: {name: abstract(name, d) for name in shapes} for d in DTYPES}
    leaves = leaf_paths(random_like(types))
    program = program_of(shd.Zero(mesh, 3), "aabbccdd", leaves)
    boxes = [t for t in program.transfers if t.box is not None]
    assert {len(t.leaves) for t in boxes} == {1}
    assert len(boxes) > len(DTYPES)
    assert max(len(t.leaves) for t in program.transfers) > 1
    compiled, replicas = run_program(program, leaves, committed=False)
    assert int(replicas.committed) == 0
    sent = sum(
        program.leaves[i].block_bytes
        for i, (_, x) in enumerate(leaves)
        if not x.sharding.is_fully_replicated
    )
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


def test_errors_name_the_leaf():
    zero = zero_of((8,), 3)
    good = jax.device_put(np.zeros(8), NamedSharding(zero.mesh, P("data")))
    other = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    reversed_ = jax.make_mesh((8,), ("data",), devices=jax.devices()[::-1])
    elsewhere = [jax.device_put(np.zeros(8), NamedSharding(m, P())) for m in (other, reversed_)]
    for bad, message in [
        (np.zeros(8), r"\['x'\] is ndarray without a sharding on the mesh"),
        (3, r"\['x'\] is int without a sharding"),
        (jnp.zeros(8), r"\['x'\] is ArrayImpl without a sharding"),
        *((x, r"\['x'\] is on the mesh .*, not on ") for x in elsewhere),
        (jax.device_put(np.zeros(8, np.complex64), good.sharding), "cannot store complex64"),
    ]:
        with pytest.raises(TypeError, match=message):
            program_of(zero, "aabbccdd", leaf_paths({"a": good, "x": bad}))


# --- Programs for TPUs and GPUs -------------------------------------------------------------------


def transformer_state(layers, width, hidden, vocab=32_000):
    """A function that makes the state of AdamW for scanned layers."""

    def make():
        params = {
            "embed": jnp.zeros((vocab, width)),
            "qkv": jnp.zeros((layers, width, 3 * width)),
            "out": jnp.zeros((layers, width, width)),
            "up": jnp.zeros((layers, width, 2 * hidden)),
            "down": jnp.zeros((layers, hidden, width)),
            "scales": jnp.zeros((layers, 2, width)),
            "norm": jnp.zeros((width,)),
            "unembed": jnp.zeros((width, vocab)),
        }
        return params, adamw().init(params)

    return make


MODELS = {"7B": (32, 4096, 11_008), "13B": (40, 5120, 13_824), "70B": (80, 8192, 28_672)}


def planned_program(target, num_devices, model):
    need(target)
    mesh = shd.targets.mesh(target, (num_devices,), ("data",))
    zero = shd.Zero(mesh, 3)
    leaves = leaf_paths(zero.abstract_state(transformer_state(*MODELS[model]), tx=adamw()))
    machines = planned_machines(mesh)
    holders = place_replicas(machines.domains, 2)
    return ReplicaProgram(mesh, machines, holders, leaves), leaves


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e:4x4", "h100x16"])
def test_programs_for_accelerators(target):
    """Few bytes on the device at a time, and on the wire what is sharded."""
    program, leaves = planned_program(target, 16, "7B")
    compiled = program.jitted.lower(program.flags(True), *(x for _, x in leaves)).compile()
    memory = compiled.memory_analysis()
    shards = program.bytes_per_device
    assert shards == pytest.approx(3 * 4 * 6.7e9 / 16, rel=0.01)
    assert memory.temp_size_in_bytes < 0.1 * shards
    assert memory.output_size_in_bytes < 1e6  # the rest is in host memory
    assert memory.host_output_size_in_bytes == pytest.approx(2 * shards, rel=0.01)
    sent = shard_bytes(leaves)
    scalars = 4 * len(leaves) * rounds_of(program) + 2 * 15 / 16 * 4
    assert sent <= shd.wire_bytes(compiled) <= sent + 2 * scalars


@pytest.mark.slow
@pytest.mark.parametrize("model", ["13B", "70B"])
def test_large_states_on_many_devices_are_planned(model, tmp_path):
    """Plans and traces take seconds, whatever the size."""
    program, leaves = planned_program("v5p:8x8x16", 1024, model)
    start = time.perf_counter()
    jax.eval_shape(program.trace, program.flags(True), *(x for _, x in leaves))
    store = shd.PeerCheckpoints(program.mesh, tmp_path, run_id="plan")
    found = store.describe(
        jax.tree.unflatten(jax.tree.structure([0] * len(leaves)), [x for _, x in leaves])
    )
    assert time.perf_counter() - start < 60
    assert len(found.machines) == 256
    assert found.host_bytes == pytest.approx(2 * 2 * 4 * program.bytes_per_device, rel=0.02)
    assert max(found.sent) == min(found.sent)
    assert found.recovery_probability(1) == 1.0
    assert found.recovery_probability(2) == 1 - 128 / math.comb(256, 2)
    assert list(tmp_path.iterdir()) == []
