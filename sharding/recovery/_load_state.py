"""The newest snapshot whose blocks are all intact on some machine, and a state made of them.

The state is on any mesh: what is missing here is sent by others.
"""

import functools
import itertools
import math
import os
import pathlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from sharding._types import Array
from sharding.recovery import _stored_leaf
from sharding.recovery._machines import Machines, gather_json
from sharding.recovery._slot import OpenSlot, SnapshotId, slots_in

Block = tuple[int, int]  # a leaf, and the number of a block of it


class NoCompleteCheckpoint(Exception):
    """No snapshot in the memory of the machines has all of its blocks."""


class FoundSnapshot(NamedTuple):
    id: SnapshotId  # its attempt and step
    leaves: list[_stored_leaf.StoredLeaf]  # of the state
    extra: Any  # the user's value
    readers: dict[Block, list[int]]  # by block: the processes that can read it
    # By block that this process can read: the file and the row of its table.
    mine: dict[Block, tuple[OpenSlot, int]]

    def block(self, leaf: int, number: int) -> np.ndarray:
        slot, row = self.mine[leaf, number]
        return slot.block(row)


def scan(folder: pathlib.Path, machines: Machines) -> tuple[list[OpenSlot], list[list[Any]]]:
    """This process's files, and by process those of all: identity, attempt, step. A collective."""
    # Processes of one machine see the same files if they share the folder.
    slots = list(slots_in(folder))
    machine = machines.of_process[jax.process_index()]
    mine = []
    for slot in slots:
        stat = os.stat(slot.path)
        mine.append([f"{machine}-{stat.st_dev}-{stat.st_ino}", *slot.id])
    return slots, gather_json(mine)


def find_snapshot(folder: pathlib.Path, machines: Machines) -> FoundSnapshot:
    """Finds the newest complete snapshot, or raises NoCompleteCheckpoint; a collective."""
    # Each block is verified by the first process that sees its file. One that fails is missing for
    # all: no process decides alone.
    slots, seen = scan(folder, machines)
    readers: dict[str, list[int]] = defaultdict(list)  # by file
    for process, files in enumerate(seen):
        for name, *_ in files:
            readers[name].append(process)
    missing = []
    for number in sorted({SnapshotId(a, s) for files in seen for _, a, s in files}, reverse=True):
        snapshot = _verify(number, slots, seen, readers)
        if isinstance(snapshot, FoundSnapshot):
            return snapshot
        missing.append(snapshot)
    text = "; ".join(missing) or "there are none for this run"
    raise NoCompleteCheckpoint(f"no snapshot in the memory of the machines is complete: {text}.")


def _verify(
    number: SnapshotId, slots: list[OpenSlot], seen: list[list[Any]], readers: dict[str, list[int]]
) -> FoundSnapshot | str:
    """Finds the snapshot if it is complete, else says what is missing; a collective."""
    me = jax.process_index()
    names = [[name for name, *_ in files] for files in seen]
    intact: list[tuple[int, ...]] = []  # file, row of its table, leaf, block
    described: Any = None  # the leaves, and the user's value
    for file, slot in enumerate(slots):
        if slot.id == number and readers[names[me][file]][0] == me:
            blocks = slot.table.blocks[["leaf", "block"]].tolist()
            intact += [(file, row, *blocks[row]) for row in np.flatnonzero(slot.intact()).tolist()]
            described = slot.table.leaves, slot.table.extra
    tables = gather_json(intact)
    # The description is that of the first process that has one, which alone sends it.
    first = gather_json(described is not None).index(True)
    rows_of_leaves, extra = gather_json(described if me == first else None)[first]
    leaves = _stored_leaf.leaves_from_json(rows_of_leaves)

    local = dict(zip(names[me], slots, strict=True))
    processes: dict[Block, list[int]] = defaultdict(list)
    mine: dict[Block, tuple[OpenSlot, int]] = {}
    for process, table in enumerate(tables):
        for file, row, leaf, block in table:
            name = names[process][file]
            processes[leaf, block] += readers[name]
            if name in local:
                mine.setdefault((leaf, block), (local[name], row))
    if len(processes) == sum(leaf.num_blocks for leaf in leaves if leaf.block_bytes):
        return FoundSnapshot(number, leaves, extra, dict(processes), mine)
    lost = [
        f"{leaf.path} ({leaf.num_blocks - held} of {leaf.num_blocks})"
        for i, leaf in enumerate(leaves)
        if leaf.block_bytes and (held := sum(key[0] == i for key in processes)) < leaf.num_blocks
    ]
    shown = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more leaves" if len(lost) > 3 else "")
    return f"step {number.step} has no intact replica of shards of {shown}"


P = PartitionSpec
_MOST = 8 << 20  # bytes that a device sends at once
Box = tuple[tuple[int, int], ...]  # a start and a stop in each dim


class Request(NamedTuple):
    source: int  # the process that sends it
    leaf: int  # of the snapshot
    block: int  # of the leaf
    box: Box  # within the block


# By leaf and box of it: the boxes that it consists of, and where they come from.
Needed = dict[tuple[int, Box], list[tuple[Box, Request]]]


def load_state(mesh: Mesh, snapshot: FoundSnapshot, abstract: Any) -> tuple[Any, int]:
    """Builds a state of such types; also returns bytes that crossed links. A collective."""
    targets = _stored_leaf.leaf_paths(abstract)
    for path, x in targets:
        _stored_leaf.check_on_mesh(path, x, mesh)
    numbered = _match(snapshot.leaves, [(path, _stored_leaf.data_type(x)) for path, x in targets])
    needed: Needed = {}
    for x, i in numbered:
        for box in set(_local_boxes(x).values()):
            needed[i, box] = list(_requests(snapshot, i, box))
    me = jax.process_index()
    missing = {r for requests in needed.values() for _, r in requests if r.source != me}
    received, num_bytes = exchange(mesh, snapshot, sorted(missing))
    data = [_assemble(x, i, needed, snapshot, received) for x, i in numbered]
    pairs = zip(targets, data, strict=True)
    leaves = [_as_keys(target, x) if _stored_leaf.is_key(target) else x for (_, target), x in pairs]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves), num_bytes


def _match(
    leaves: list[_stored_leaf.StoredLeaf], targets: list[tuple[str, Any]]
) -> list[tuple[Any, int]]:
    """Pairs each target's type with the number of its leaf in the snapshot."""
    stored = {leaf.path: i for i, leaf in enumerate(leaves)}
    wrong = []
    for path, x in targets:
        if path not in stored:
            wrong.append(f"{path} is not in the snapshot")
            continue
        leaf = leaves[stored[path]]
        if (leaf.shape, leaf.dtype) != (x.shape, _stored_leaf.stored_dtype(x.dtype).name):
            wrong.append(f"{path} is {leaf.dtype}{list(leaf.shape)}, not {x.dtype}{list(x.shape)}")
    wrong += [f"{path} is not in the state" for path in stored.keys() - dict(targets).keys()]
    if wrong:
        raise ValueError(
            f"the snapshot is of another state, in {len(wrong)} leaves: {'; '.join(wrong[:3])}."
        )
    return [(x, stored[path]) for path, x in targets]


def _local_boxes(x: Array) -> dict[jax.Device, Box]:
    indices = x.sharding.addressable_devices_indices_map(x.shape)
    return {
        device: tuple(s.indices(n)[:2] for s, n in zip(index, x.shape, strict=True))
        for device, index in indices.items()
    }


def _requests(snapshot: FoundSnapshot, i: int, box: Box) -> Iterator[tuple[Box, Request]]:
    """Split a box of a leaf by blocks: the place of each piece in the box, and its source."""
    leaf = snapshot.leaves[i]
    if any(start == stop for start, stop in box):
        return
    ranges = [
        range(start // size, -(-stop // size))
        for (start, stop), size in zip(box, leaf.block_shape, strict=True)
    ]
    me = jax.process_index()
    for at in itertools.product(*ranges):
        number = int(np.ravel_multi_index(at, leaf.grid)) if at else 0
        inside, place = [], []
        for (start, stop), k, size in zip(box, at, leaf.block_shape, strict=True):
            low, high = max(start, k * size), min(stop, (k + 1) * size)
            inside.append((low - k * size, high - k * size))
            place.append((low - start, high - start))
        readers = snapshot.readers[i, number]
        # Of several that have it, different ones for different blocks and receivers.
        source = me if me in readers else readers[(number + i + me) % len(readers)]
        yield tuple(place), Request(source, i, number, tuple(inside))


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*edges) for edges in box)


def _assemble(
    x: Array, i: int, needed: Needed, snapshot: FoundSnapshot, received: dict[Request, np.ndarray]
) -> jax.Array:
    arrays: dict[Box, np.ndarray] = {}
    shards = []
    for device, box in _local_boxes(x).items():
        if box not in arrays:
            array = np.empty([stop - start for start, stop in box], snapshot.leaves[i].dtype)
            for place, request in needed[i, box]:
                piece = received[request] if request in received else _read_box(snapshot, request)
                array[_slices(place)] = piece
            arrays[box] = array.astype(x.dtype, copy=False)
        memory = SingleDeviceSharding(device, memory_kind=x.sharding.memory_kind)
        shards.append(jax.device_put(arrays[box], memory))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def _as_keys(x: Array, data: jax.Array) -> jax.Array:
    impl = []
    jax.eval_shape(lambda keys: impl.append(jax.random.key_impl(keys)), x)
    wrap = functools.partial(jax.random.wrap_key_data, impl=impl[0])
    return jax.jit(wrap, out_shardings=x.sharding)(data)


# --- Sending blocks between the host memories of processes, over the links of the devices ---------


def exchange(
    mesh: Mesh, snapshot: FoundSnapshot, requests: Sequence[Request]
) -> tuple[dict[Request, np.ndarray], int]:
    """Fetches boxes from other processes; also returns the bytes that all sent. A collective."""
    # In each round a process sends to one other at most, with all of its devices at once.
    me = jax.process_index()
    by_pair: dict[tuple[int, int], list[Request]] = defaultdict(list)
    for receiver, rows in enumerate(gather_json(requests)):
        for source, leaf, block, box in rows:
            request = Request(source, leaf, block, tuple(map(tuple, box)))
            by_pair[source, receiver].append(request)
    sizes = {pair: sum(_size(snapshot, r) for r in asked) for pair, asked in by_pair.items()}
    received: dict[Request, np.ndarray] = {}
    large_first = sorted(sizes, key=lambda pair: (-sizes[pair], pair))
    for pairs in _stored_leaf.disjoint_rounds(large_first):
        outgoing: Iterable[np.ndarray] = ()
        for source, receiver in pairs:
            if source == me:
                outgoing = (_padded_bytes(snapshot, r) for r in by_pair[source, receiver])
        raw = _send(mesh, pairs, outgoing, max(sizes[pair] for pair in pairs))
        for source, receiver in pairs:
            start = 0
            for request in by_pair[source, receiver] if receiver == me else ():
                dtype = np.dtype(snapshot.leaves[request.leaf].dtype)
                shape = [stop - low for low, stop in request.box]
                num_bytes = math.prod(shape) * dtype.itemsize
                received[request] = raw[start : start + num_bytes].view(dtype).reshape(shape)
                start += _size(snapshot, request)
    return received, sum(sizes.values())


def _send(
    mesh: Mesh, pairs: list[tuple[int, int]], outgoing: Iterable[np.ndarray], largest: int
) -> np.ndarray:
    """Runs one round; returns the bytes that this process receives, padded."""
    devices = list(mesh.devices.flat)
    places: dict[int, list[int]] = defaultdict(list)  # by process: its devices in the mesh
    for place, device in enumerate(devices):
        places[device.process_index].append(place)
    width = len(places[0])
    links = tuple(
        link
        for source, receiver in pairs
        for link in zip(places[source], places[receiver], strict=True)
    )
    flat = Mesh(np.array(devices), ("all",), axis_types=(AxisType.Auto,))
    permute = _permute(flat, links)
    sharding = NamedSharding(flat, P("all"))
    chunk = min(_MOST, -(-largest // width))  # bytes of one device
    chunks = _chunks(outgoing, chunk)
    arrived: list[np.ndarray] = []
    sent: jax.Array | None = None
    for _ in range(-(-largest // (chunk * width))):
        mine = [jax.device_put(next(chunks)[None], d) for d in flat.local_devices]
        shape = (len(devices), chunk)
        x = jax.make_array_from_single_device_arrays(shape, sharding, mine)
        before, sent = sent, permute(x)
        if before is not None:  # read while the next one is under way
            arrived += _local_rows(before)
    assert sent is not None
    return np.concatenate(arrived + _local_rows(sent))


def _local_rows(x: jax.Array) -> list[np.ndarray]:
    shards = sorted(x.addressable_shards, key=lambda s: s.index[0].start)
    return [np.asarray(shard.data).reshape(-1) for shard in shards]


@functools.lru_cache(maxsize=64)
def _permute(mesh: Mesh, links: tuple[tuple[int, int], ...]) -> Callable[[jax.Array], jax.Array]:
    send = functools.partial(lax.ppermute, axis_name="all", perm=links)
    return jax.jit(
        jax.shard_map(send, mesh=mesh, in_specs=P("all"), out_specs=P("all"), check_vma=False)
    )


def _chunks(arrays: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Joins bytes of arrays, and splits them into chunks of a size; zeros follow without end."""
    chunk, filled = np.zeros(size, np.uint8), 0
    for array in arrays:
        while len(array):
            taken = min(size - filled, len(array))
            chunk[filled : filled + taken] = array[:taken]
            array = array[taken:]
            filled = filled + taken
            if filled == size:
                yield chunk
                chunk, filled = np.zeros(size, np.uint8), 0
    while True:
        yield chunk
        chunk = np.zeros(size, np.uint8)


def _size(snapshot: FoundSnapshot, request: Request) -> int:
    """Bytes of a box on the way, padded so that arrays behind it are aligned."""
    itemsize = np.dtype(snapshot.leaves[request.leaf].dtype).itemsize
    size = math.prod(stop - start for start, stop in request.box) * itemsize
    return -(-size // 8) * 8


def _read_box(snapshot: FoundSnapshot, request: Request) -> np.ndarray:
    return snapshot.block(request.leaf, request.block)[_slices(request.box)]


def _padded_bytes(snapshot: FoundSnapshot, request: Request) -> np.ndarray:
    raw = np.ascontiguousarray(_read_box(snapshot, request)).reshape(-1).view(np.uint8)
    return np.pad(raw, (0, _size(snapshot, request) - len(raw)))
