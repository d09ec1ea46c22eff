"""What of each leaf of a state each device stores, and which devices it sends that to."""

import dataclasses
import math
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh, NamedSharding

from sharding.placement._specs import axes_of
from sharding.recovery._machines import Machines
from sharding.recovery._peer_placement import Holders

# Smaller blocks that several devices of a machine hold are stored by one of them, larger by all.
SPLIT_BYTES = 64 * 1024
Pairs = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """A leaf in blocks of equal shape, independent of any mesh.

    Attributes:
      path: of the leaf in its tree.
      shape: of the leaf; of a random key, that of its data.
      dtype: its name.
      grid: the number of blocks in each dim.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    grid: tuple[int, ...]

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return math.prod(self.grid)

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The shape of a block."""
        return tuple(size // n for size, n in zip(self.shape, self.grid, strict=True))

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in host memory."""
        return math.prod(self.block_shape) * np.dtype(self.dtype).itemsize

    def box(self, block: int) -> tuple[slice, ...]:
        """Where a block is in the leaf."""
        at = np.unravel_index(block, self.grid) if self.grid else ()
        return tuple(
            slice(int(i) * size, (int(i) + 1) * size)
            for i, size in zip(at, self.block_shape, strict=True)
        )


class BlockPlacement(NamedTuple):
    """Which block of a leaf each device stores; devices by their places in the mesh.

    Attributes:
      grid: the number of blocks in each dim.
      dim: the dim that the devices of a machine split among themselves; -1 for none.
      parts: into how many parts they split it.
      part: the part of each device. [devices]
      block: the block of each device. [devices]
      stored: whether a device stores its block; not if another one of its machine does. [devices]
      sends: rounds of (source, destination), in which a device occurs once as either.
    """

    grid: tuple[int, ...]
    dim: int
    parts: int
    part: np.ndarray
    block: np.ndarray
    stored: np.ndarray
    sends: tuple[Pairs, ...]


def block_placement(
    sharding: NamedSharding,
    shape: tuple[int, ...],
    itemsize: int,
    machines: Machines,
    holders: Holders,
) -> BlockPlacement:
    """Places the blocks of a leaf: each machine stores once what its devices hold.

    A block is sent to peers only while fewer failure domains hold it than there are replicas.
    """
    grid, coordinates = _coordinates(sharding.mesh, sharding.spec, len(shape))
    block = _ravel(coordinates, grid, len(machines.of_device))
    # Devices of one machine that hold the same block share the work of storing it.
    seen: Counter[tuple[int, int]] = Counter()
    part = np.zeros(len(block), int)
    for device, held in enumerate(zip(machines.of_device.tolist(), block.tolist(), strict=True)):
        part[device] = seen[held]
        seen[held] += 1
    sizes = [size // n for size, n in zip(shape, grid, strict=True)]
    parts = seen.most_common(1)[0][1]
    dims = [d for d, size in enumerate(sizes) if size and size % parts == 0]
    split = parts > 1 and bool(dims) and len(set(seen.values())) == 1
    stored = np.ones(len(block), bool)
    dim = -1
    if split and math.prod(sizes) * itemsize >= SPLIT_BYTES:
        dim = dims[0]
        grid = tuple(n * parts if d == dim else n for d, n in enumerate(grid))
        coordinates[dim] = coordinates[dim] * parts + part
        block = _ravel(coordinates, grid, len(block))
    else:
        stored = part == 0
        part, parts = np.zeros(len(block), int), 1
    sends = _sends(block, stored, machines, holders)
    return BlockPlacement(grid, dim, parts, part, block, stored, sends)


def _coordinates(mesh: Any, spec: Any, ndim: int) -> tuple[tuple[int, ...], list[np.ndarray]]:
    """The number of blocks in each dim, and each device's block in each. [devices]."""
    place = dict(
        zip(
            mesh.axis_names, np.indices(mesh.axis_sizes).reshape(mesh.devices.ndim, -1), strict=True
        )
    )
    grid, coordinates = [], []
    for d in range(ndim):
        axes = axes_of(spec[d]) if d < len(spec) else ()
        size, at = 1, np.zeros(mesh.size, int)
        for axis in axes:
            at = at * mesh.shape[axis] + place[axis]
            size *= mesh.shape[axis]
        grid.append(size)
        coordinates.append(at)
    return tuple(grid), coordinates


def _ravel(coordinates: list[np.ndarray], grid: tuple[int, ...], num_devices: int) -> np.ndarray:
    """The number of each device's block, row by row: [devices]."""
    found = np.zeros(num_devices, int)
    for at, size in zip(coordinates, grid, strict=True):
        found = found * size + at
    return found


def _sends(
    block: np.ndarray, stored: np.ndarray, machines: Machines, holders: Holders
) -> tuple[Pairs, ...]:
    """Which device sends its block to which, until as many failure domains hold it as replicas."""
    replicas = len(holders[0])
    sources: dict[int, dict[int, int]] = {}  # of each block: the device of each machine
    for device in np.flatnonzero(stored).tolist():
        machine = int(machines.of_device[device])
        sources.setdefault(int(block[device]), {})[machine] = device
    rounds: list[dict[int, int]] = []
    for number, devices in sorted(sources.items()):
        held = {machines.domains[machine] for machine in devices}
        owner = sorted(devices)[number % len(devices)]
        others = [m for m in holders[owner] if machines.domains[m] not in held]
        for target in others[: max(0, replicas - len(held))]:
            source = devices[owner]
            place = int(np.flatnonzero(machines.devices[owner] == source)[0])
            destination = int(machines.devices[target][place])
            for one in rounds:
                if source not in one and destination not in one.values():
                    one[source] = destination
                    break
            else:
                rounds.append({source: destination})
    return tuple(tuple(sorted(one.items())) for one in rounds)


def mesh_positions(mesh: Mesh) -> dict[Any, int]:
    """The place of each device in the mesh."""
    return {device: i for i, device in enumerate(mesh.devices.flat)}
