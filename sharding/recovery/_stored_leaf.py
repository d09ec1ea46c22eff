"""Which block of each leaf a device stores and sends, and the checksum of a block."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from sharding._types import Array, DType, Tree
from sharding.recovery._machines import Machines

# Smaller blocks that several devices of a machine hold are stored by one of them, larger by all.
SPLIT_BYTES = 64 * 1024
_NARROW = {"int2": np.int8, "int4": np.int8, "uint2": np.uint8, "uint4": np.uint8}
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_CHUNK = 1 << 16  # elements that a host sums at a time, in its cache
Pairs = tuple[tuple[int, int], ...]


class StoredLeaf(NamedTuple):
    """A leaf in blocks of equal shape, independent of any mesh; a row of JSON in files."""

    path: str  # of the leaf in its tree
    shape: tuple[int, ...]  # of the leaf; of a random key, that of its data
    dtype: str  # its name
    grid: tuple[int, ...]  # the number of blocks in each dim

    @property
    def num_blocks(self) -> int:
        return math.prod(self.grid)

    @property
    def block_shape(self) -> tuple[int, ...]:
        return tuple(size // n for size, n in zip(self.shape, self.grid, strict=True))

    @property
    def block_bytes(self) -> int:
        return math.prod(self.block_shape) * np.dtype(self.dtype).itemsize


def leaves_from_json(rows: list[list[Any]]) -> list[StoredLeaf]:
    """Leaves that were written as JSON, which has lists for tuples."""
    return [StoredLeaf(p, tuple(shape), dtype, tuple(g)) for p, shape, dtype, g in rows]


class BlockPlacement(NamedTuple):
    """Which block of a leaf each device stores; devices by their places in the mesh."""

    grid: tuple[int, ...]  # the number of blocks in each dim
    dim: int  # the dim that the devices of a machine split among themselves; -1 for none
    parts: int  # into how many parts they split it
    part: np.ndarray  # the part of each device. [devices]
    block: np.ndarray  # the block of each device. [devices]
    stored: np.ndarray  # false if another device of its machine stores the block. [devices]
    # Rounds of (source, destination), in which a device occurs once at most as either.
    sends: tuple[Pairs, ...]


def block_placement(
    sharding: NamedSharding, shape: tuple[int, ...], itemsize: int, machines: Machines
) -> BlockPlacement:
    """Places the blocks of a leaf: each machine stores once what its devices hold."""
    # A block is sent to peers only while fewer failure domains hold it than there are replicas.
    grid, coordinates = _coordinates(sharding, shape)
    block = _block_numbers(coordinates, grid)
    # Devices of one machine that hold the same block share the work of storing it.
    seen: Counter[tuple[int, int]] = Counter()
    part = np.zeros(len(block), int)
    for device, held in enumerate(zip(machines.of_device.tolist(), block.tolist(), strict=True)):
        part[device] = seen[held]
        seen[held] += 1
    sizes = [size // n for size, n in zip(shape, grid, strict=True)]
    parts = max(seen.values())
    dims = [d for d, size in enumerate(sizes) if size and size % parts == 0]
    even = parts > 1 and len(set(seen.values())) == 1
    if even and dims and math.prod(sizes) * itemsize >= SPLIT_BYTES:
        dim = dims[0]
        stored = np.ones(len(block), bool)
        grid = (*grid[:dim], grid[dim] * parts, *grid[dim + 1 :])
        coordinates[dim] = coordinates[dim] * parts + part
        block = _block_numbers(coordinates, grid)
    else:
        dim = -1
        stored = part == 0
        part = np.zeros(len(block), int)
        parts = 1
    sends = _sends(block, stored, machines)
    return BlockPlacement(grid, dim, parts, part, block, stored, sends)


def _coordinates(sharding: NamedSharding, shape: tuple[int, ...]) -> tuple[Any, np.ndarray]:
    """Counts the blocks in each dim, and numbers each device's block in each: [dims, devices]."""
    sizes = [max(size, 1) for size in sharding.shard_shape(shape)]
    grid = tuple(max(n // size, 1) for n, size in zip(shape, sizes, strict=True))
    indices = sharding.devices_indices_map(shape)
    devices = sharding.mesh.devices.flat
    numbers = [
        [s.indices(n)[0] // size for s, n, size in zip(indices[d], shape, sizes, strict=True)]
        for d in devices
    ]
    return grid, np.array(numbers, int).reshape(len(devices), len(shape)).T


def _block_numbers(coordinates: np.ndarray, grid: tuple[int, ...]) -> np.ndarray:
    """Numbers each device's block, row by row: [devices]."""
    zeros = np.zeros(coordinates.shape[1], int)  # a scalar has no coordinates
    return np.ravel_multi_index((zeros, *coordinates), (1, *grid))


def _sends(block: np.ndarray, stored: np.ndarray, machines: Machines) -> tuple[Pairs, ...]:
    """Pairs senders and receivers until as many failure domains hold a block as replicas."""
    holders = machines.holders
    replicas = len(machines.holders[0])
    sources: dict[int, dict[int, int]] = {}  # by block and machine: the device that stores it
    for device in np.flatnonzero(stored).tolist():
        machine = int(machines.of_device[device])
        sources.setdefault(int(block[device]), {})[machine] = device
    pairs: list[tuple[int, int]] = []
    for number, devices in sorted(sources.items()):
        held = {machines.domains[machine] for machine in devices}
        owner = sorted(devices)[number % len(devices)]  # machines send about as many blocks each
        others = [m for m in holders[owner] if machines.domains[m] not in held]
        for target in others[: max(0, replicas - len(held))]:
            source = devices[owner]
            place = int(np.flatnonzero(machines.devices[owner] == source)[0])
            pairs.append((source, int(machines.devices[target][place])))
    return tuple(tuple(sorted(each)) for each in disjoint_rounds(pairs))


def disjoint_rounds(pairs: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Puts pairs into rounds in which each source and each destination occurs once at most."""
    rounds: list[dict[int, int]] = []
    for source, destination in pairs:
        # The first round in which neither is busy: ppermute takes permutations.
        free = (r for r in rounds if source not in r and destination not in r.values())
        first = next(free, None)
        if first is None:
            rounds.append(first := {})
        first[source] = destination
    return [list(each.items()) for each in rounds]


def leaf_paths(tree: Tree) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(path), x) for path, x in jax.tree.leaves_with_path(tree)]


def is_key(x: Array) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def as_data(x: Array) -> Any:
    """A leaf whose random keys are integers; other leaves as they are."""
    return jax.random.key_data(x) if is_key(x) and isinstance(x, jax.Array) else data_type(x)


def data_type(x: Array) -> Any:
    """``as_data`` that computes nothing: of random keys the type of their integers."""
    if not is_key(x):
        return x
    data = jax.eval_shape(jax.random.key_data, x)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=x.sharding)


def check_on_mesh(path: str, x: Array, mesh: Mesh) -> None:
    """Raises TypeError unless a leaf can be stored, and is on the devices of the mesh in order."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        raise TypeError(
            f"{path} is {type(x).__name__} without a sharding on the mesh: PeerCheckpoints stores "
            "arrays with a NamedSharding, as zero.init returns them; other values belong to extra."
        )
    same = sharding.mesh.axis_names == mesh.axis_names and sharding.mesh.size == mesh.size
    if not same or list(sharding.mesh.devices.flat) != list(mesh.devices.flat):
        raise TypeError(f"{path} is on the mesh {sharding.mesh}, not on {mesh}.")
    if not is_key(x):
        stored_dtype(x.dtype, path)


def stored_dtype(dtype: DType, path: str = "an array") -> np.dtype:
    """The dtype in which an array is stored: 8 bits for narrower integers."""
    dtype = np.dtype(dtype)
    narrow = _NARROW.get(dtype.name)
    wide = dtype.kind in "biuf" or dtype == ml_dtypes.bfloat16 or "float8" in dtype.name
    if not narrow and not wide:
        raise TypeError(
            f"{path} has dtype {dtype.name}, which snapshots do not store. Save it in another "
            "form, such as the real and imaginary parts of complex numbers."
        )
    return np.dtype(narrow or dtype)


# --- The checksum of a block, on its source device and in host memory ----------------------------

# ``OpenSlot.intact`` compares the two; ``_load_state.py`` takes no block where they differ, and
# refuses a snapshot that then lacks one.


def as_words(x: jax.Array) -> jax.Array:
    """The bits of an array as unsigned integers of its width."""
    x = x.astype(stored_dtype(x.dtype))
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    return lax.bitcast_convert_type(x, WORDS[x.dtype.itemsize])


def checksum(words: jax.Array) -> jax.Array:
    """Sums (2 i + 1) w_i modulo 2**32, i counting row by row; uint32."""
    # Odd factors make any change of one word change the sum; different ones, of two words' places.
    if words.dtype.itemsize == 8:  # two words, the low one first
        words = lax.bitcast_convert_type(words, jnp.uint32)
    factor = jnp.ones((), jnp.uint32)
    stride = 2
    for d in reversed(range(words.ndim)):
        index = lax.broadcasted_iota(jnp.uint32, words.shape, d)
        factor = lax.broadcast(factor, words.shape) if factor.ndim == 0 else factor
        factor = factor + index * jnp.uint32(stride % 2**32)
        stride *= words.shape[d]
    return jnp.sum(words.astype(jnp.uint32) * factor, dtype=jnp.uint32)


def host_checksum(block: np.ndarray) -> int:
    """``checksum`` of the words of a contiguous array in host memory."""
    raw = block.reshape(-1).view(np.uint8)
    words = raw.view(WORDS[min(4, block.dtype.itemsize)])
    factors = np.arange(1, 2 * _CHUNK, 2, dtype=np.uint32)
    total = 0
    for start in range(0, len(words), _CHUNK):
        chunk = words[start : start + _CHUNK].astype(np.uint32, copy=False)
        weighted = int((chunk * factors[: len(chunk)]).sum(dtype=np.uint32))
        total += weighted + 2 * start * int(chunk.sum(dtype=np.uint32))
    return total % 2**32
