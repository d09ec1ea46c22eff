"""Blocks on machines: each is stored once where it is, and sent only where it is needed."""

import itertools
import math
import types
from collections import Counter

import jax
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding

from sharding.recovery._machines import machines_of
from sharding.recovery._peer_placement import PLACEMENTS, place_replicas
from sharding.recovery._stored_leaf import SPLIT_BYTES, StoredLeaf, block_placement

F32 = 4
# More elements than are split among the devices of a machine, in all of their shards.
LARGE = 8 * SPLIT_BYTES // F32


def abstract_sharding(mesh, spec):
    """A sharding on devices that are not here: what block_placement reads of one."""
    shape = tuple(mesh.values())
    return types.SimpleNamespace(
        spec=spec,
        mesh=types.SimpleNamespace(
            axis_names=tuple(mesh),
            axis_sizes=shape,
            shape=mesh,
            size=math.prod(shape),
            devices=np.empty(shape),
        ),
    )


def held_boxes(mesh, spec, shape):
    """What each device holds, by brute force: the device's coordinates choose in each dim."""
    found = []
    for at in itertools.product(*map(range, mesh.values())):
        place = dict(zip(mesh, at, strict=True))
        box = []
        for d, size in enumerate(shape):
            start, stop = 0, size
            axes = spec[d] if d < len(spec) and spec[d] is not None else ()
            for axis in axes if isinstance(axes, tuple) else (axes,):
                width = (stop - start) // mesh[axis]
                start, stop = start + place[axis] * width, start + (place[axis] + 1) * width
            box.append(slice(start, stop))
        found.append(tuple(box))
    return found


def make_machines(layout, domains=None):
    """A machine for each letter of the layout, by device; a failure domain for each machine."""
    names = list(dict.fromkeys(layout))
    domain = dict(zip(names, domains or names, strict=True))
    return machines_of([(m, domain[m]) for m in layout], [(m, domain[m]) for m in names])


def edges(box):
    """A box that can be hashed."""
    return tuple((s.start, s.stop) for s in box)


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
        self.found = block_placement(
            abstract_sharding(mesh, spec), shape, itemsize, self.machines, self.holders
        )
        self.leaf = StoredLeaf("x", shape, "float32", self.found.grid)
        self.held = held_boxes(mesh, spec, shape)
        self.machine = self.machines.of_device.tolist()
        self.pairs = [pair for one in self.found.sends for pair in one]

    def domain(self, device):
        return self.machines.domains[self.machine[device]]

    def stored_by(self, number):
        """The devices that store a block of their own."""
        return [
            d for d in np.flatnonzero(self.found.stored).tolist() if self.found.block[d] == number
        ]

    def check(self):
        """Everything that holds for any leaf."""
        self.check_stored_once()
        self.check_sends()
        self.check_rounds()

    def check_stored_once(self):
        """The blocks of a machine are disjoint, and are all that its devices hold."""
        for machine in range(len(self.machines.names)):
            devices = [d for d, m in enumerate(self.machine) if m == machine]
            holds = np.zeros(self.leaf.shape, np.int8)
            stores = np.zeros(self.leaf.shape, np.int8)
            for d in devices:
                holds[self.held[d]] = 1
                box = self.leaf.box(int(self.found.block[d]))
                inside = zip(box, self.held[d], strict=True)
                assert all(o.start <= i.start and i.stop <= o.stop for i, o in inside)
                if self.found.stored[d]:
                    stores[box] += 1
            np.testing.assert_array_equal(stores, holds)

    def check_sends(self):
        """As many domains as replicas, no more than that, and never one that has it."""
        for number in range(self.leaf.num_blocks):
            here = {self.domain(d) for d in self.stored_by(number)}
            sent = [(s, d) for s, d in self.pairs if self.found.block[s] == number]
            there = [self.domain(d) for _, d in sent]
            assert here
            assert len(sent) == max(0, self.replicas - len(here))
            assert len(set(there) - here) == len(sent)
            assert all(self.found.stored[s] for s, _ in sent)

    def check_rounds(self):
        """Permutations that ppermute takes."""
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
    {"data": 16},
    {"replica": 4, "data": 2, "model": 2},
]
LAYOUTS = {  # of 8 devices, twice as many of each for 16
    "one each": "abcdefgh",
    "two each": "aabbccdd",
    "interleaved": "abcdabcd",
    "four each": "aaaabbbb",
    "permuted": "badcbadc",
    "one machine": "aaaaaaaa",
}
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


@pytest.mark.slow(keep=12)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(map(str, mesh.values())))
def test_every_mesh_spec_and_layout(mesh, layout):
    layout = "".join(name * (math.prod(mesh.values()) // 8) for name in layout)
    for shape in SHAPES:
        large = math.prod(shape) > 10_000
        for spec in specs_of(mesh, shape)[:: 3 if large else 1]:
            for replicas in range(1, 2 if large else min(3, len(set(layout))) + 1):
                Case(mesh, spec, shape, layout, replicas=replicas).check()


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    "domains", ["xxyy", "xyxy", "xyyy", "xyzz"], ids=lambda domains: f"domains {domains}"
)
def test_failure_domains(domains, placement):
    """Of four machines with two devices each; of uneven domains some machine stores more."""
    for mesh, shape in itertools.product(MESHES[:4], [(16,), (16, 48), (7, 3)]):
        for spec in specs_of(mesh, shape):
            Case(mesh, spec, shape, "aabbccdd", domains=domains, placement=placement).check()


@pytest.mark.parametrize("mesh", MESHES[:4], ids=lambda mesh: "x".join(map(str, mesh.values())))
def test_blocks_are_those_of_the_sharding(mesh):
    """jax itself says what a device holds."""
    real = jax.make_mesh(tuple(mesh.values()), tuple(mesh))
    for shape in [(16,), (16, 48), (48, 5)]:
        for spec in specs_of(mesh, shape):
            sharding = NamedSharding(real, spec)
            indices = sharding.devices_indices_map(shape)
            case = Case(mesh, spec, shape, "aabbccdd")
            found = block_placement(sharding, shape, F32, case.machines, case.holders)
            assert found.sends == case.found.sends
            for device, block in zip(real.devices.flat, found.block.tolist(), strict=True):
                box = [s.indices(n)[:2] for s, n in zip(indices[device], shape, strict=True)]
                assert edges(case.leaf.box(block)) == tuple(box)


# --- Bytes ----------------------------------------------------------------------------------------

SHAPE = (16, LARGE // 16)


@pytest.mark.parametrize(
    ("mesh", "spec", "layout", "why"),
    [
        ({"data": 8}, P(), "aabbccdd", "replicated, as parameters at stages 0 to 2"),
        ({"replica": 2, "data": 4}, P("data"), "aaaabbbb", "replicas on machines of their own"),
        ({"replica": 2, "data": 4}, P("data"), "aabbccdd", "each replica on two machines"),
        ({"replica": 2, "data": 4}, P(None, "data"), "abcdbadc", "the same, in another order"),
        ({"data": 4, "model": 2}, P("model"), "abcdabcd", "each machine has all of the other axis"),
        ({"data": 4, "model": 2}, P("model"), "aabbccdd", "each machine has all of it"),
    ],
)
def test_nothing_is_sent_that_other_machines_hold(mesh, spec, layout, why):
    case = Case(mesh, spec, SHAPE, layout)
    case.check()
    assert case.found.sends == (), why


def test_a_domain_that_holds_a_block_twice_needs_a_replica():
    """Hybrid sharding whose replicas share a rack: both would be lost together."""
    mesh, spec = {"replica": 2, "data": 4}, P("data")
    apart = Case(mesh, spec, SHAPE, "aabbccdd", domains="xxyy")
    assert apart.found.sends == ()
    together = Case(mesh, spec, SHAPE, "aabbccdd", domains="xyxy")
    together.check()
    assert len(together.pairs) == together.leaf.num_blocks


@pytest.mark.parametrize("layout", ["aabbccdd", "abcdabcd", "badcdcba"])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_sharded_leaves_take_one_round_for_each_replica(layout, replicas):
    """All devices send at once, and each machine stores as many bytes."""
    for placement in PLACEMENTS:
        case = Case({"data": 8}, P("data"), SHAPE, layout, replicas=replicas, placement=placement)
        case.check()
        assert [len(one) for one in case.found.sends] == [8] * (replicas - 1)
        each = replicas * math.prod(SHAPE) * F32 // 4
        assert case.stored_bytes() == dict.fromkeys(range(4), each)


@pytest.mark.parametrize("num_machines", [5, 6, 7, 12])
def test_groups_that_are_left_over_take_no_more_rounds(num_machines):
    for replicas, placement in itertools.product((2, 3), PLACEMENTS):
        mesh, layout = {"data": 2 * num_machines}, [m for m in range(num_machines) for _ in "ab"]
        shape = (2 * num_machines, 4)
        case = Case(mesh, P("data"), shape, layout, replicas=replicas, placement=placement)
        case.check()
        assert len(case.found.sends) <= 2 * (replicas - 1) - 1
        if replicas == 2:
            assert len(case.found.sends) == 1


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


def test_machines_send_a_share_each():
    """Of blocks that two machines of a domain hold, each sends half."""
    mesh, spec = {"replica": 2, "data": 8}, P("data")
    layout = [m for m in range(4) for _ in range(4)]
    case = Case(mesh, spec, (8, 16), layout, domains="xyxy")
    case.check()
    senders = Counter(case.machine[s] for s, _ in case.pairs)
    assert senders == dict.fromkeys(range(4), 2)


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
