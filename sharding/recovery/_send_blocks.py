"""Moves blocks between the host memories of processes, over the links of the devices."""

import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sharding.recovery._find_snapshot import FoundSnapshot
from sharding.recovery._gather import gather_bytes

P = PartitionSpec
_MOST = 8 << 20  # bytes that a device sends at once


class Request(NamedTuple):
    """A box of a block that a process needs.

    Attributes:
      source: the process that sends it.
      leaf: of the snapshot.
      block: of the leaf.
      box: starts and stops within the block.
    """

    source: int
    leaf: int
    block: int
    box: tuple[tuple[int, int], ...]


def exchange(
    mesh: Mesh, found: FoundSnapshot, requests: Sequence[Request]
) -> tuple[dict[Request, np.ndarray], int]:
    """What this process requested from others, and the bytes that all sent; a collective.

    In each round a process sends to one other at most, with all of its devices at once.
    """
    me = jax.process_index()
    every = [_unpack_requests(raw) for raw in gather_bytes(_pack_requests(requests))]
    by_pair: dict[tuple[int, int], list[Request]] = defaultdict(list)
    for receiver, asked in enumerate(every):
        for request in asked:
            by_pair[request.source, receiver].append(request)
    sizes = {pair: sum(_size(found, r) for r in asked) for pair, asked in by_pair.items()}
    received: dict[Request, np.ndarray] = {}
    for pairs in _rounds(sizes):
        outgoing: Iterator[np.ndarray] = iter(())
        for source, receiver in pairs:
            if source == me:
                outgoing = (_cut(found, r) for r in by_pair[source, receiver])
        largest = max(sizes[pair] for pair in pairs)
        raw = _send(mesh, pairs, outgoing, largest)
        for source, receiver in pairs:
            if receiver == me:
                at = 0
                for request in by_pair[source, receiver]:
                    size = _size(found, request)
                    leaf = found.leaves[request.leaf]
                    shape = [stop - start for start, stop in request.box]
                    num_bytes = math.prod(shape) * np.dtype(leaf.dtype).itemsize
                    block = raw[at : at + num_bytes].view(leaf.dtype).reshape(shape)
                    received[request] = block
                    at += size
    return received, sum(sizes.values())


def _rounds(sizes: dict[tuple[int, int], int]) -> Iterator[list[tuple[int, int]]]:
    """Pairs of processes in rounds in which each sends and receives once at most, large first."""
    rest = sorted(sizes, key=lambda pair: (-sizes[pair], pair))
    while rest:
        chosen: list[tuple[int, int]] = []
        for source, receiver in rest:
            if all(source != s and receiver != r for s, r in chosen):
                chosen.append((source, receiver))
        yield chosen
        rest = [pair for pair in rest if pair not in chosen]


def _send(
    mesh: Mesh,
    pairs: list[tuple[int, int]],
    outgoing: Iterator[np.ndarray],
    largest: int,
) -> np.ndarray:
    """One round: the bytes that this process receives, padded."""
    devices = list(mesh.devices.flat)
    flat = Mesh(np.array(devices), ("all",), axis_types=(AxisType.Auto,))
    places: dict[int, list[int]] = defaultdict(list)
    for place, device in enumerate(devices):
        places[device.process_index].append(place)
    width = len(places[0])
    chunk = min(_MOST, -(-largest // width))
    links = tuple(
        link
        for source, receiver in pairs
        for link in zip(places[source], places[receiver], strict=True)
    )
    sharding = NamedSharding(flat, P("all"))
    stream = _Stream(outgoing)
    parts: list[np.ndarray] = []
    sent: jax.Array | None = None

    def take(x: jax.Array) -> None:
        shards = sorted(x.addressable_shards, key=lambda s: s.index[0].start)
        parts.extend(np.asarray(shard.data).reshape(-1) for shard in shards)

    for _ in range(-(-largest // (chunk * width))):
        mine = [jax.device_put(stream.take(chunk)[None], d) for d in flat.local_devices]
        shape = (len(devices), chunk)
        x = jax.make_array_from_single_device_arrays(shape, sharding, mine)
        before, sent = sent, _permute(flat, links)(x)
        if before is not None:  # read while the next one is under way
            take(before)
    assert sent is not None
    take(sent)
    return np.concatenate(parts)


@functools.lru_cache(maxsize=64)
def _permute(mesh: Mesh, links: tuple[tuple[int, int], ...]) -> Any:
    """Sends each device's bytes along its link."""
    return jax.jit(
        jax.shard_map(
            lambda x: lax.ppermute(x, "all", links),
            mesh=mesh,
            in_specs=P("all"),
            out_specs=P("all"),
            check_vma=False,
        )
    )


class _Stream:
    """Bytes of arrays, one after the other, then zeros."""

    def __init__(self, arrays: Iterator[np.ndarray]):
        self._arrays = arrays
        self._rest = np.zeros(0, np.uint8)

    def take(self, size: int) -> np.ndarray:
        """The next bytes."""
        out = np.zeros(size, np.uint8)
        at = 0
        while at < size:
            if not len(self._rest):
                array = next(self._arrays, None)
                if array is None:
                    break
                self._rest = array
            n = min(size - at, len(self._rest))
            out[at : at + n] = self._rest[:n]
            self._rest = self._rest[n:]
            at += n
        return out


def _size(found: FoundSnapshot, request: Request) -> int:
    """Bytes of a box on the way, padded so that arrays behind it are aligned."""
    itemsize = np.dtype(found.leaves[request.leaf].dtype).itemsize
    size = math.prod(stop - start for start, stop in request.box) * itemsize
    return -(-size // 8) * 8


def _cut(found: FoundSnapshot, request: Request) -> np.ndarray:
    """The bytes of a box, padded."""
    block = found.block(request.leaf, request.block)
    box = block[tuple(slice(*edges) for edges in request.box)]
    raw = np.ascontiguousarray(box).reshape(-1).view(np.uint8)
    return np.pad(raw, (0, _size(found, request) - len(raw)))


def _pack_requests(requests: Sequence[Request]) -> bytes:
    """As rows of integers: source, leaf, block, number of dims, starts and stops."""
    rows = [(r.source, r.leaf, r.block, len(r.box), *sum(r.box, ())) for r in requests]
    return np.array([n for row in rows for n in row], np.int64).tobytes()


def _unpack_requests(raw: bytes) -> list[Request]:
    """Reads what ``_pack_requests`` wrote."""
    numbers = iter(np.frombuffer(raw, np.int64).tolist())
    found = []
    for source in numbers:
        leaf, block, ndim = next(numbers), next(numbers), next(numbers)
        box = tuple((next(numbers), next(numbers)) for _ in range(ndim))
        found.append(Request(source, leaf, block, box))
    return found
