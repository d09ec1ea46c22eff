"""Which devices of a machine work together: groups of tensor, data and pipeline parallelism."""

import dataclasses
import math

from sharding.plan.machine._collective_time import Group, NodeGroup, TorusGroup
from sharding.plan.machine._devices import DeviceKind

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

        In nodes, groups of the first size are neighbours, those of the second are as far from each
        other as the first is large, and so on. In a torus each takes axes of its size, or a part of
        an axis, whose ends are then not joined; the last one takes the slices.

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
        return self._torus_groups(sizes) if self.torus else self._node_groups(sizes)

    def _node_groups(self, sizes: tuple[int, ...]) -> list[Group]:
        node, inner = self.device.node_size, 1
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
                    axes.append((part, part == axis[1] and self._wraps(part)))
                    axis[0] //= part
                    size //= part
            across = math.gcd(slices, size)
            slices //= across
            groups.append(TorusGroup(tuple(axes), across * (size // across)))
        return groups

    def _wraps(self, size: int) -> bool:
        smallest = _WRAPS.get(self.device.name, _CUBE)
        return size >= smallest and size % smallest == 0
