"""Blocks on machines: each is stored once where it is, and sent only where it is needed."""

import itertools
import math
from collections import Counter

import jax
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding

from sharding.recovery import _machines
from sharding.recovery._machines import machines_of, this_machine
from sharding.recovery._peer_placement import PLACEMENTS, place_replicas
from sharding.recovery._stored_leaf import SPLIT_BYTES, StoredLeaf, block_placement

F32 = 4
# More elements than are split among the devices of a machine, in all of their shards.
LARGE = 8 * SPLIT_BYTES // F32


def sharding_of(mesh, spec):
    """On the first devices."""
    devices = jax.devices()[: math.prod(mesh.values())]
    return NamedSharding(jax.make_mesh(tuple(mesh.values()), tuple(mesh), devices=devices), spec)


def make_machines(layout, domains=None):
    """A machine for each letter of the layout, by device; a failure domain for each machine."""
    names = list(dict.fromkeys(layout))
    domain = dict(zip(names, domains or names, strict=True))
    return machines_of([(m, domain[m]) for m in layout], [(m, domain[m]) for m in names])


class Case:
    """The placement of a leaf, and who holds, stores and receives which block."""

    def __init__(
        self,
        mesh,
        spec,
        shape,
        layout,
        *,
        domains=None,
        replicas=2,
        placement="group",
        itemsize=F32,
    ):
        self.machines = make_machines(layout, domains)
        self.replicas = replicas
        self.holders = place_replicas(
            self.machines.domains, replicas, placement, spread=domains is not None
        )
        sharding = sharding_of(mesh, spec)
        self.found = block_placement(sharding, shape, itemsize, self.machines, self.holders)
        self.leaf = StoredLeaf("x", shape, "float32", self.found.grid)
        indices = sharding.devices_indices_map(shape)
        self.held = [
            tuple(slice(*s.indices(n)[:2]) for s, n in zip(indices[device], shape, strict=True))
            for device in sharding.mesh.devices.flat
        ]
        self.machine = self.machines.of_device.tolist()
        self.pairs = [pair for one in self.found.sends for pair in one]

    def domain(self, device):
        return self.machines.domains[self.machine[device]]

    def check(self):
        """Everything that holds for any leaf."""
        # The blocks of a machine are disjoint, and are all that its devices hold.
        for machine in range(len(self.machines.names)):
            holds, stores = (np.zeros(self.leaf.shape, np.int8) for _ in range(2))
            for d in (d for d, m in enumerate(self.machine) if m == machine):
                holds[self.held[d]] = 1
                box = self.leaf.box(int(self.found.block[d]))
                inside = zip(box, self.held[d], strict=True)
                assert all(o.start <= i.start and i.stop <= o.stop for i, o in inside)
                stores[box] += self.found.stored[d]
            np.testing.assert_array_equal(stores, holds)

        # Sent to as many domains as replicas, no more than that, and never to one that has it.
        for number in range(self.leaf.num_blocks):
            own = np.flatnonzero(self.found.stored & (self.found.block == number)).tolist()
            here = {self.domain(d) for d in own}
            sent = [(s, d) for s, d in self.pairs if self.found.block[s] == number]
            assert here
            assert len(sent) == max(0, self.replicas - len(here))
            assert len({self.domain(d) for _, d in sent} - here) == len(sent)
            assert all(self.found.stored[s] for s, _ in sent)

        # In permutations that ppermute takes.
        for one in self.found.sends:
            sources, destinations = zip(*one, strict=True)
            assert len(set(sources)) == len(set(destinations)) == len(one)
            assert set(sources + destinations) <= set(range(len(self.machine)))
        assert len(set(self.pairs)) == len(self.pairs)

    def stored_bytes(self):
        """Of each machine, those of its own blocks and of the peers' ones."""
        found = Counter(self.machine[d] for d in np.flatnonzero(self.found.stored).tolist())
        found.update(self.machine[d] for _, d in self.pairs)
        return {m: n * self.leaf.block_bytes for m, n in found.items()}


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
    (16,),  # small
    (16, 48),
    (48, 5),  # only one dim divides
    (7, 3),  # nothing divides
    (16, 0),  # empty
    (16, LARGE // 16),  # the devices of a machine split what all of them hold
    (LARGE // 4 + 1, 16),  # one dim divides
    (3, LARGE // 2 + 1),  # none does: stored by one of them
]


def specs_of(mesh, shape):
    """Every spec of up to two dims with the axes of a mesh, that divides the shape."""
    axes = [None, *mesh, *itertools.permutations(mesh, 2)]
    found = {P()}
    for entries in itertools.product(axes, repeat=min(2, len(shape))):
        names = [a for e in entries if e for a in (e if isinstance(e, tuple) else (e,))]
        sizes = [
            math.prod(mesh[a] for a in (e if isinstance(e, tuple) else (e,))) if e else 1
            for e in entries
        ]
        if len(set(names)) == len(names) and all(
            n % size == 0 for n, size in zip(shape, sizes, strict=False)
        ):
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


@pytest.mark.parametrize("domains", ["xxyy", "xyxy", "xyyy", "xyzz"])
def test_failure_domains(domains):
    """Of four machines with two devices each; of uneven domains some machine stores more."""
    for placement, mesh in itertools.product(PLACEMENTS, MESHES):
        for shape in [(16,), (7, 3)]:
            for spec in specs_of(mesh, shape):
                Case(mesh, spec, shape, "aabbccdd", domains=domains, placement=placement).check()


# --- Bytes ----------------------------------------------------------------------------------------

SHAPE = (16, LARGE // 16)


def test_nothing_is_sent_that_other_domains_hold():
    """Replicas on machines of their own; but not those that share a rack, and are lost together."""
    for mesh, spec, layout in [
        ({"data": 8}, P(), "aabbccdd"),
        ({"replica": 2, "data": 4}, P("data"), "aabbccdd"),
        ({"data": 4, "model": 2}, P("model"), "abcdabcd"),
    ]:
        assert Case(mesh, spec, SHAPE, layout).found.sends == ()
    mesh, spec = {"replica": 2, "data": 4}, P("data")
    assert Case(mesh, spec, SHAPE, "aabbccdd", domains="xxyy").found.sends == ()
    together = Case(mesh, spec, SHAPE, "aabbccdd", domains="xyxy")
    together.check()
    assert len(together.pairs) == together.leaf.num_blocks


@pytest.mark.parametrize("layout", ["aabbccdd", "badcdcba"])
def test_sharded_leaves_take_one_round_for_each_replica(layout):
    """All devices send at once, and each machine stores as many bytes."""
    for replicas, placement in itertools.product((1, 2, 3, 4), PLACEMENTS):
        case = Case(
            {"data": 8}, P("data"), (16, 48), layout, replicas=replicas, placement=placement
        )
        case.check()
        assert [len(one) for one in case.found.sends] == [8] * (replicas - 1)
        assert case.stored_bytes() == dict.fromkeys(range(4), replicas * 16 * 48 * F32 // 4)


def test_groups_that_are_left_over_take_no_more_rounds():
    for num, replicas, placement in itertools.product((5, 6, 7), (2, 3), PLACEMENTS):
        case = Case(
            {"data": num}, P("data"), (num, 4), range(num), replicas=replicas, placement=placement
        )
        case.check()
        assert len(case.found.sends) <= (1 if replicas == 2 else 2 * (replicas - 1) - 1)


@pytest.mark.parametrize(
    ("shape", "itemsize", "expected"),
    [
        ((16, LARGE // 16), F32, (1, 2)),  # the first dim that the devices can split
        ((7, LARGE // 4), F32, (2, 1)),
        ((7, LARGE // 4 + 1), F32, None),  # neither divides
        ((8, SPLIT_BYTES // 8), 1, (1, 2)),  # a block of just the limit
        ((8, SPLIT_BYTES // 8 - 2), 1, None),  # below it
        ((), F32, None),
    ],
)
def test_devices_of_a_machine_share_the_work(shape, itemsize, expected):
    """Of a replicated leaf two devices store half each, or one all of it."""
    case = Case({"data": 8}, P(), shape, "aabbccdd", itemsize=itemsize)
    if expected is None:
        assert case.found.stored.tolist() == [True, False] * 4
        assert case.found.grid == (1,) * len(shape)
        assert (case.found.dim, case.found.parts) == (-1, 1)
        return
    assert case.found.stored.all()
    dim = expected.index(1)
    assert (case.found.dim, case.found.parts) == (dim, 2)
    assert case.found.part.tolist() == [0, 1] * 4
    assert case.found.grid == tuple(2 if d == dim else 1 for d in range(len(shape)))


def test_work_is_shared_only_where_all_machines_can():
    """Devices that hold a block alone beside two that share one: no part of a shard is lost."""
    mesh, spec = {"replica": 2, "data": 4}, P("data")
    case = Case(mesh, spec, SHAPE, "abbcacdd")  # a holds one block twice, the others two
    case.check()
    assert case.found.dim == -1
    # Of blocks that two machines of a domain hold, each sends half.
    case = Case(mesh, spec, (8, 16), "aabbccdd", domains="xyxy")
    case.check()
    senders = Counter(case.machine[s] for s, _ in case.pairs)
    assert senders == dict.fromkeys(range(4), 1)


# --- Machines -------------------------------------------------------------------------------------


def test_machines_in_the_order_of_the_mesh():
    found = machines_of(
        [("c", "x"), ("a", "y"), ("c", "x"), ("a", "y")], [("a", "y"), ("a", "y"), ("c", "x")]
    )
    assert found.names == ("c", "a")
    assert found.domains == ("x", "y")
    assert found.of_device.tolist() == [0, 1, 0, 1]
    assert found.of_process == (1, 1, 0)
    assert found.devices.tolist() == [[0, 2], [1, 3]]


def test_errors_of_machines():
    with pytest.raises(ValueError, match="machine 'b' has 1 devices of the mesh, machine 'a'"):
        machines_of([("a", "a")] * 3 + [("b", "b")], [("a", "a"), ("b", "b")])
    with pytest.raises(ValueError, match="machine 'a' is in two failure domains, 'x' and 'y'"):
        machines_of([("a", "x")] * 2, [("a", "x"), ("a", "y")])


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
