"""A state from the blocks of a snapshot, on any mesh: what is missing here is sent by others."""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from sharding._types import Array
from sharding.recovery._find_snapshot import FoundSnapshot
from sharding.recovery._machines import gather_json
from sharding.recovery._stored_leaf import (
    StoredLeaf,
    check_on_mesh,
    data_type,
    disjoint_rounds,
    is_key,
    leaf_paths,
    stored_dtype,
)

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
    targets = leaf_paths(abstract)
    for path, x in targets:
        check_on_mesh(path, x, mesh)
    numbered = _match(snapshot.leaves, [(path, data_type(x)) for path, x in targets])
    needed: Needed = {}
    for x, i in numbered:
        for box in set(_local_boxes(x).values()):
            needed[i, box] = list(_requests(snapshot, i, box))
    me = jax.process_index()
    missing = {r for requests in needed.values() for _, r in requests if r.source != me}
    received, num_bytes = exchange(mesh, snapshot, sorted(missing))
    data = [_assemble(x, i, needed, snapshot, received) for x, i in numbered]
    pairs = zip(targets, data, strict=True)
    leaves = [_as_keys(target, x) if is_key(target) else x for (_, target), x in pairs]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves), num_bytes


def _match(leaves: list[StoredLeaf], targets: list[tuple[str, Any]]) -> list[tuple[Any, int]]:
    """Pairs each target's type with the number of its leaf in the snapshot."""
    stored = {leaf.path: i for i, leaf in enumerate(leaves)}
    wrong = []
    for path, x in targets:
        if path not in stored:
            wrong.append(f"{path} is not in the snapshot")
            continue
        leaf = leaves[stored[path]]
        if (leaf.shape, leaf.dtype) != (x.shape, stored_dtype(x.dtype).name):
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
    for pairs in disjoint_rounds(large_first):
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
    permute, sharding = _permute(flat, links), NamedSharding(flat, P("all"))
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
            array, filled = array[taken:], filled + taken
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
