"""The time of a collective over a torus, or over nodes of a network."""

import dataclasses
import functools
import math
from typing import Any, Literal, get_args

from sharding.plan._format import check_choice, with_article
from sharding.plan.machine._devices import Achieved, DeviceKind, achieved

Operation = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute"]
OPERATIONS = get_args(Operation)


@dataclasses.dataclass(frozen=True)
class NodeGroup:
    """``size`` devices, ``inside`` of them in each node, joined by links; a network joins nodes."""

    size: int
    inside: int

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return math.ceil(self.size / self.inside)


@dataclasses.dataclass(frozen=True)
class TorusGroup:
    """Devices along axes of a torus, in one slice or the same places of several.

    An axis is its size, and whether its ends are joined; a network joins the slices.
    """

    axes: tuple[tuple[int, bool], ...]
    slices: int = 1

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(size for size, _ in self.axes) * self.slices


Group = NodeGroup | TorusGroup


@functools.lru_cache(maxsize=65536)
def collective_seconds(
    operation: Operation, nbytes: float, group: Group, device: DeviceKind, *, ideal: bool = False
) -> float:
    """The time of one collective.

    Over n devices that a switch joins, each of which sends W bytes per second, an all-gather or a
    reduce-scatter of b bytes takes b (n - 1) / n / W. Over nodes of g devices each it is a ring
    through all of them, at g W_network. Over k axes of a torus whose links send w one way it
    takes b (n - 1) / n / (2 k w), without the factor of two on axes whose ends are not joined.
    All-reduces take twice that, or less where a switch sums. Latency is that of a ring: a hop for
    each device of a node or axis, and one for each node.

    ``nbytes`` are those of the full array; of an all-to-all or a permute, of one device's operand.
    ``ideal`` links send at their peak, without latency, a lower bound. Over h nodes that gathers in
    both levels at once: b max((g - 1) / g / W, (h - 1) / h / (g W_network)).

    Raises:
      ValueError: the operation is unknown, or the group needs a network that the kind lacks.

    >>> from sharding.plan import kind_of
    >>> seconds = collective_seconds("all-gather", 1e9, NodeGroup(8, 8), kind_of("h100"))
    >>> round(1e3 * seconds, 2)
    2.57

    References:
      Austin et al.: How to Scale Your Model, 2025, chapters "How to Think About TPUs" and "GPUs".
    """
    check_choice("operation", operation, OPERATIONS)
    reached = achieved(device)
    if ideal:  # peak links without latency; a switch that sums sends each byte once
        none: dict[str, Any] = dict.fromkeys(("start", "link_hop", "network_hop", "ramp"), 0.0)
        summed = None if reached.all_reduce is None else 1.0
        reached = dataclasses.replace(reached, link=1.0, network=1.0, all_reduce=summed, **none)
    if group.size <= 1:
        return 0.0
    if isinstance(group, TorusGroup):
        return _over_torus(operation, nbytes, group, device, reached)
    return _over_nodes(operation, nbytes, group, device, reached, ideal)


def _network(device: DeviceKind, reached: Achieved) -> float:
    if device.network is None:
        raise ValueError(
            f"the group spans several nodes or slices, and the network of "
            f"{with_article(device.name)} is not known; give the DeviceKind one."
        )
    return device.network * reached.network


# --- Nodes ----------------------------------------------------------------------------------------


def _over_nodes(
    operation: Operation,
    nbytes: float,
    group: NodeGroup,
    device: DeviceKind,
    reached: Achieved,
    hierarchical: bool,
) -> float:
    inside = min(group.inside, group.size)
    nodes = group.nodes
    link = device.link * reached.link
    network = _network(device, reached) if nodes > 1 else math.inf
    last_hop = reached.network_hop if nodes > 1 else reached.link_hop  # to the next node, or around
    if operation == "permute":
        return reached.start + last_hop + nbytes / (link if nodes == 1 else network)
    full = nbytes + math.sqrt(reached.ramp * nbytes)
    between = nodes * ((inside - 1) * reached.link_hop + last_hop)
    hops = between if nodes > 1 else inside * last_hop
    if operation == "all-to-all":
        within = full * (inside - 1) / group.size / link
        return reached.start + hops + max(within, full * (1 - inside / group.size) / network)
    if hierarchical:
        between = full * (nodes - 1) / nodes / (inside * network)
        seconds = max(full * (inside - 1) / inside / link, between)
    else:
        # Between nodes, measured rings send as fast as the network even where a ring of one node
        # is slower than that.
        slowest = link if nodes == 1 else min(device.link, inside * network)
        seconds = full * (group.size - 1) / group.size / slowest
    if operation != "all-reduce":
        return reached.start + hops + seconds
    # A switch sums where that is faster: each device sends its array once, in one pass.
    if reached.all_reduce is not None and nodes == 1:
        return reached.start + hops + min(2 * seconds, full / (device.link * reached.all_reduce))
    return reached.start + 2 * hops + 2 * seconds


# --- Tori -----------------------------------------------------------------------------------------


def _over_torus(
    operation: Operation, nbytes: float, group: TorusGroup, device: DeviceKind, reached: Achieved
) -> float:
    link = device.link / device.num_links * reached.link
    axes = [(size, wrapped) for size, wrapped in group.axes if size > 1]
    if operation == "permute":
        if not axes:
            return reached.network_hop + nbytes / _network(device, reached)
        return reached.link_hop + nbytes / link
    devices = math.prod(size for size, _ in axes)
    # Each axis sends one share of the array at the same time, in both directions if it is a ring.
    speed = link * sum(2 if wrapped else 1 for _, wrapped in axes)
    hops = sum(size // 2 if wrapped else size - 1 for size, wrapped in axes) * reached.link_hop
    within = 0.0
    if axes and operation == "all-to-all":
        # A quarter of the gather of all operands on a ring, half of it on a line.
        longest, wrapped = max(axes)
        within = nbytes * longest / ((8 if wrapped else 4) * link)
    elif axes:
        within = nbytes * (devices - 1) / devices / speed
    between = 0.0
    if group.slices > 1:
        between = nbytes * (group.slices - 1) / group.slices / _network(device, reached)
        between /= 1 if operation == "all-to-all" else devices
        hops += group.slices * reached.network_hop
    rounds = 2 if operation == "all-reduce" else 1
    return reached.start + rounds * (hops + max(within, between))


# Smallest size of an axis whose ends are joined, by the pages of Google Cloud: full axes of the
# 16 x 16 tori, and multiples of the 4 x 4 x 4 cubes of others.
_WRAPS = {"v5e": 16, "v6e": 16}
_CUBE = 4


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices of all nodes or slices, and what joins them.

    ``torus`` is the shape of one slice, empty where a switch joins the devices of a node.
    """

    device: DeviceKind
    num_devices: int
    torus: tuple[int, ...] = ()
    slices: int = 1

    def groups(self, sizes: tuple[int, ...]) -> list[Group]:
        """One group for each kind of parallelism, the first over the nearest devices.

        In a torus each takes axes of its size, or a part of an axis, whose ends are then not
        joined; the last one takes the slices.

        Raises:
          ValueError: the product of the sizes is not the number of devices.

        >>> from sharding.plan import kind_of
        >>> Machine(kind_of("h100"), 64).groups((4, 16))
        [NodeGroup(size=4, inside=4), NodeGroup(size=16, inside=2)]
        >>> Machine(kind_of("v5e"), 256, (16, 16)).groups((16, 16))[1]
        TorusGroup(axes=((16, True),), slices=1)
        """
        if math.prod(sizes) != self.num_devices:
            raise ValueError(
                f"groups of {' x '.join(map(str, sizes))} need {math.prod(sizes)} devices, there "
                f"are {self.num_devices}."
            )
        if self.torus:
            return self._torus_groups(sizes)
        node = self.device.node_size
        inner = 1
        groups: list[Group] = []
        for size in sizes:
            groups.append(NodeGroup(size, max(1, min(size, node // inner))))
            inner *= size
        return groups

    def _torus_groups(self, sizes: tuple[int, ...]) -> list[Group]:
        # Axes that are left: what is not taken of each, and its full size.
        left = [[size, size] for size in self.torus if size > 1]
        per_slice = math.prod(self.torus)
        if self.num_devices != per_slice * self.slices:  # devices of a chip are nearest
            left.insert(0, [self.num_devices // (per_slice * self.slices)] * 2)
        slices = self.slices
        groups: list[Group] = []
        for size in sizes:
            axes: list[tuple[int, bool]] = []
            # A full axis of this size first, else the largest common part of each.
            for axis in sorted(left, key=lambda axis: axis[0] != size):
                part = math.gcd(axis[0], size)
                if part > 1:
                    smallest = _WRAPS.get(self.device.name, _CUBE)
                    wraps = part == axis[1] and part >= smallest and part % smallest == 0
                    axes.append((part, wraps))
                    axis[0] //= part
                    size //= part
            across = math.gcd(slices, size)
            slices //= across
            groups.append(TorusGroup(tuple(axes), across * (size // across)))
        return groups
