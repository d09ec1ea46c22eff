"""A state from the blocks of a snapshot, on any mesh, stage and number of processes."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from sharding.recovery._find_snapshot import FoundSnapshot
from sharding.recovery._replica_program import as_data, check_on_mesh, is_key, leaf_paths
from sharding.recovery._send_blocks import Request, exchange
from sharding.recovery._stored_leaf import StoredLeaf
from sharding.recovery._words import stored_dtype

Box = tuple[tuple[int, int], ...]


def load_state(mesh: Mesh, found: FoundSnapshot, abstract: Any) -> tuple[Any, int]:
    """The state, and the bytes that crossed links for it; a collective.

    Args:
      mesh: of the state.
      found: the snapshot.
      abstract: types with shardings.

    Raises:
      ValueError: if the snapshot is of another state; names the leaves that differ.
    """
    targets = leaf_paths(abstract)
    for path, x in targets:
        check_on_mesh(path, x, mesh)
    order = _match(found.leaves, targets)
    # By leaf and box: what it consists of, and where that comes from.
    needed: dict[tuple[int, Box], list[tuple[Box, Request]]] = {}
    for (_, x), i in zip(targets, order, strict=True):
        for box in set(_local_boxes(x).values()):
            needed[i, box] = list(_pieces(found, i, box))
    missing = {
        request
        for pieces in needed.values()
        for _, request in pieces
        if request.source != jax.process_index()
    }
    received, num_bytes = exchange(mesh, found, sorted(missing))
    leaves = [
        _assemble(x, i, needed, found, received) for (_, x), i in zip(targets, order, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves), num_bytes


def _match(leaves: list[StoredLeaf], targets: list[tuple[str, Any]]) -> list[int]:
    """The place of each target among the leaves of the snapshot."""
    stored = {leaf.path: i for i, leaf in enumerate(leaves)}
    wrong = []
    for path, x in targets:
        shape, dtype = _data_type(x)
        if path not in stored:
            wrong.append(f"{path} is not in the snapshot")
            continue
        leaf = leaves[stored[path]]
        if (leaf.shape, leaf.dtype) != (shape, stored_dtype(dtype).name):
            wrong.append(f"{path} is {leaf.dtype}{list(leaf.shape)}, not {dtype}{list(shape)}")
    wrong += [f"{path} is not in the state" for path in stored.keys() - dict(targets).keys()]
    if wrong:
        raise ValueError(
            f"the snapshot is of another state, in {len(wrong)} leaves: {'; '.join(wrong[:3])}."
        )
    return [stored[path] for path, _ in targets]


def _data_type(x: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of a leaf; of a random key, of its data."""
    data = as_data(jax.ShapeDtypeStruct(x.shape, x.dtype))
    return data.shape, data.dtype


def _local_boxes(x: Any) -> dict[Any, Box]:
    """What each device of this process holds of a leaf."""
    shape, _ = _data_type(x)
    indices = x.sharding.addressable_devices_indices_map(x.shape)
    found = {}
    for device, index in indices.items():
        edges = [s.indices(n) for s, n in zip(index, x.shape, strict=True)]
        data = ((0, n) for n in shape[len(edges) :])  # of random keys
        found[device] = (*((start, stop) for start, stop, _ in edges), *data)
    return found


def _pieces(found: FoundSnapshot, i: int, box: Box) -> Iterator[tuple[Box, Request]]:
    """The boxes of blocks that a box consists of, and where they are in it."""
    leaf = found.leaves[i]
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
        readers = found.readers[i, number]
        # Of several that have it, different ones for different blocks and receivers.
        source = me if me in readers else readers[(number + i + me) % len(readers)]
        yield tuple(place), Request(source, i, number, tuple(inside))


def _assemble(
    x: Any,
    i: int,
    needed: dict[tuple[int, Box], list[tuple[Box, Request]]],
    found: FoundSnapshot,
    received: dict[Request, np.ndarray],
) -> jax.Array:
    """One leaf, placed as the target is."""
    shape, dtype = _data_type(x)
    stored = found.leaves[i].dtype
    arrays: dict[Box, np.ndarray] = {}
    shards = []
    for device, box in _local_boxes(x).items():
        if box not in arrays:
            array = np.empty([stop - start for start, stop in box], stored)
            for place, request in needed[i, box]:
                if request in received:
                    piece = received[request]
                else:
                    edges = tuple(slice(*edge) for edge in request.box)
                    piece = found.block(i, request.block)[edges]
                array[tuple(slice(*edge) for edge in place)] = piece
            arrays[box] = array.astype(dtype, copy=False)
        memory = SingleDeviceSharding(device, memory_kind=x.sharding.memory_kind)
        shards.append(jax.device_put(arrays[box], memory))
    data = jax.make_array_from_single_device_arrays(shape, x.sharding, shards)
    return _as_keys(x, data) if is_key(x) else data


def _as_keys(x: Any, data: jax.Array) -> jax.Array:
    """Random keys of the type of ``x``."""
    impl = []
    jax.eval_shape(lambda keys: impl.append(jax.random.key_impl(keys)), x)
    wrap = functools.partial(jax.random.wrap_key_data, impl=impl[0])
    return jax.jit(wrap, out_shardings=x.sharding)(data)
