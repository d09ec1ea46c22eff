"""Which rows of a batch each process gives; its rows as global arrays, if all give theirs."""

import functools
import itertools
import zlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding._types import Array, Tree
from sharding.placement._layout import Layout
from sharding.placement._on_mesh import no_mesh
from sharding.placement._specs import AnyMesh, KeyPath, first_names
from sharding.step._checks import check_batch, check_numbers

P = PartitionSpec
Shards = tuple[tuple[int, ...], ...]  # of the rows of a batch: the processes that give each
Facts = tuple[int, ...]  # what processes compare of their rows, see ``_facts``
_FAILED = (1, 0, 0, 0, 0)  # of a process that could not use its rows
_DIFFERENCES = (  # by the place of a fact, after the first
    "all processes must give equally many rows; process {a} gives {x}, process {b} {y}. Fill up "
    "the last batch (shd.pad_rows), or leave it out (docs: how_to/log).",
    "the batches of processes {a} and {b} differ in names, dtypes or dims of their arrays.",
    "scalars of a batch are replicated; those of processes {a} and {b} differ. Give the same in "
    "all processes, or one for each row.",
    "processes {a} and {b} have the same rows of a batch, since other axes of the mesh span them, "
    "and gave others. Each must give the shard of zero.data_shard() (docs: how_to/clusters).",
)


def data_shard(layout: Layout) -> tuple[int, int]:
    shards, me = _row_shards(layout.mesh, layout.data_axes), jax.process_index()
    for index, processes in enumerate(shards):
        if me in processes:
            return index, len(shards)
    raise ValueError(
        f"process {me} has no device of the mesh, and no rows of a batch; those of "
        f"{_named(itertools.chain(*shards))} are in it."
    )


def pad_rows(batch: Tree, rows: int) -> tuple[Any, np.ndarray]:
    """A batch with as many rows as the others, such as a last one; and a mask of its own rows.

    The last row is repeated, as a loss may not be finite for zeros. Every process pads its own rows
    to those that it gives of any batch; one that has none left, to rows of weight 0 alone.

    Args:
      batch: a tree of arrays whose first dim is the batch; scalars stay.
      rows: the number of rows to have.

    Returns:
      The tree, of NumPy arrays, and a mask (rows,) of float32: 1 for a row of the batch, else 0.

    Raises:
      ValueError: if the batch has more rows, or arrays of different numbers of rows.

    Example:
      >>> import numpy as np, sharding as shd
      >>> padded, mask = shd.pad_rows({"x": np.array([[1.0], [2.0]])}, rows=4)
      >>> padded["x"].ravel().tolist(), mask.tolist()
      ([1.0, 2.0, 2.0, 2.0], [1.0, 1.0, 0.0, 0.0])
    """
    counts = {np.shape(x)[0] for x in jax.tree.leaves(batch) if np.ndim(x)}
    if len(counts) != 1 or max(counts) > rows:
        raise ValueError(
            f"pad_rows got arrays of {sorted(counts)} rows, to be padded to {rows}: they must "
            f"agree, and be at most {rows}."
        )
    (count,) = counts

    def pad(x: Array) -> np.ndarray:
        x = np.asarray(x)
        widths = [(0, rows - count)] + [(0, 0)] * (x.ndim - 1)
        return np.pad(x, widths, mode="edge" if count else "constant") if x.ndim else x

    return jax.tree.map(pad, batch), (np.arange(rows) < count).astype(np.float32)


def describe_rows(layout: Layout) -> str:
    """Which rows this process gives, in words; empty where one process gives all."""
    if not isinstance(layout.mesh, Mesh):
        return ""
    try:
        index, count = data_shard(layout)
    except ValueError as error:
        return str(error)
    me, processes = jax.process_index(), _row_shards(layout.mesh, layout.data_axes)[index]
    others = [process for process in processes if process != me]
    if not others and count == 1:
        return ""
    same = f", the same rows as {_named(others)}" if others else ""
    return f"process {me} gives shard {index} of {count}{same}"


def put(layout: Layout, batch: Tree, check: bool) -> Tree:
    _, count = data_shard(layout)
    shards = _row_shards(layout.mesh, layout.data_axes)
    several = check and sum(map(len, shards)) > 1
    try:
        batch = jax.tree.map_with_path(_as_numbers, batch)
        check_batch(batch, layout.num_devices // count, 1)
        facts = _facts(batch, shared=several and len(shards[0]) > 1)
    except Exception:
        if several:  # the others wait for the facts of this process
            _of_all_processes(layout.mesh, _FAILED)
        raise
    if several:
        _check_facts(shards, _of_all_processes(layout.mesh, facts))
    shardings = layout.batch_shardings(batch)
    return jax.tree.map(jax.make_array_from_process_local_data, shardings, batch)


def _as_numbers(path: KeyPath, x: Array) -> np.ndarray:
    check_numbers(path, x, keys=False)
    return np.asarray(x)


@functools.lru_cache(maxsize=16)
def _row_shards(mesh: AnyMesh, data_axes: tuple[str, ...]) -> Shards:
    """The processes that give each shard of the rows, in the order of the rows."""
    if not isinstance(mesh, Mesh):
        raise ValueError(f"{mesh} is abstract: rows of a batch go to the processes of devices.")
    dims = [mesh.axis_names.index(axis) for axis in data_axes]
    places = np.moveaxis(mesh.devices, dims, range(len(dims)))
    places = places.reshape(np.prod(places.shape[: len(dims)], dtype=int), -1)
    held: dict[int, list[int]] = {}  # by process, the places of its devices
    for place, devices in enumerate(places):
        for process in {device.process_index for device in devices}:
            held.setdefault(process, []).append(place)
    shards: dict[tuple[int, ...], list[int]] = {}
    for process, own in sorted(held.items(), key=lambda item: (item[1], item[0])):
        shards.setdefault(tuple(own), []).append(process)
    if len({len(own) for own in shards}) > 1 or sum(map(len, shards)) > len(places):
        shown = [f"{[*own]} for {_named(processes)}" for own, processes in [*shards.items()][:4]]
        raise ValueError(
            f"two processes must have devices at the same places of the axes {data_axes}, or at "
            f"different and equally many ones; of {len(places)} places got "
            f"{'; '.join(shown)}. Order the devices of the mesh by process."
        )
    return tuple(map(tuple, shards.values()))


def _named(processes: Iterable[int]) -> str:
    names = list(map(str, processes))
    return f"process{'es' if len(names) > 1 else ''} {first_names(names)}"


def _facts(batch: Tree, shared: bool) -> Facts:
    """What processes compare: 0, rows, and checksums of types, scalars and, if shared, rows."""
    leaves = jax.tree.leaves_with_path(batch)
    types = [(jax.tree_util.keystr(path), x.ndim, x.shape[1:], x.dtype.name) for path, x in leaves]
    scalars, arrays = ([x for _, x in leaves if bool(x.ndim) == rows] for rows in (False, True))
    num_rows, checksum = len(arrays[0]) if arrays else 0, zlib.crc32(repr(types).encode())
    return 0, num_rows, checksum, _checksum(scalars), _checksum(arrays) if shared else 0


def _checksum(arrays: list[np.ndarray]) -> int:
    total = 0
    for x in arrays:
        total = zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data, total)
    return total


def _of_all_processes(mesh: AnyMesh, facts: Facts) -> dict[int, Facts]:
    """The facts of each process of the mesh; a collective."""
    assert isinstance(mesh, Mesh)
    flat = Mesh(mesh.devices.reshape(-1), ("device",))
    row = np.asarray([facts], np.uint32)
    with no_mesh():
        table = jax.make_array_from_callback(
            (flat.size, len(facts)), NamedSharding(flat, P("device")), lambda _: row
        )
        # ``jnp.copy`` is one function, which is compiled once.
        table = jax.jit(jnp.copy, out_shardings=NamedSharding(flat, P()))(table)
    rows = np.asarray(table.addressable_data(0)).tolist()
    processes = [device.process_index for device in flat.devices]
    return dict(zip(processes, map(tuple, rows), strict=True))


def _check_facts(shards: Shards, facts: dict[int, Facts]) -> None:
    """Raises, in all processes alike, unless the batches of all processes make one."""
    failed = [process for process in sorted(facts) if facts[process] == _FAILED]
    if failed:
        raise ValueError(
            f"zero.put raised in {_named(failed)}, whose own error says why: a batch needs the "
            "rows of all processes."
        )
    everyone = (tuple(sorted(facts)),)
    for number, text in enumerate(_DIFFERENCES, 1):
        for processes in everyone if number < len(_DIFFERENCES) else shards:
            first: dict[int, int] = {}  # by value, the first process that has it
            for process in processes:
                first.setdefault(facts[process][number], process)
            if len(first) > 1:
                (x, a), (y, b) = [*first.items()][:2]
                raise ValueError("zero.put: " + text.format(a=a, b=b, x=x, y=y))
