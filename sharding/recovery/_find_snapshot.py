"""Agrees on the newest snapshot of which every block is intact on some machine."""

import dataclasses
import json
import os
import pathlib
from collections import defaultdict
from typing import Any

import jax
import numpy as np

from sharding.recovery._gather import gather_bytes, gather_json
from sharding.recovery._machines import Machines
from sharding.recovery._slot import OpenSlot, SnapshotId, slots_in
from sharding.recovery._stored_leaf import StoredLeaf

_FOUND = np.dtype([("file", "<u4"), ("row", "<u4"), ("leaf", "<u4"), ("block", "<u8")])


class NoCompleteCheckpoint(Exception):
    """No snapshot in the memory of the machines has all of its blocks."""


@dataclasses.dataclass(frozen=True)
class FoundSnapshot:
    """A complete snapshot.

    Attributes:
      id: its attempt and step.
      leaves: of the state.
      extra: the user's value.
      readers: of each block, (leaf, number): the processes that can read it.
      mine: of each block that this process can read: the file and the row of its table.
    """

    id: SnapshotId
    leaves: list[StoredLeaf]
    extra: Any
    readers: dict[tuple[int, int], list[int]]
    mine: dict[tuple[int, int], tuple[OpenSlot, int]]

    def block(self, leaf: int, number: int) -> np.ndarray:
        """A block that this process can read."""
        slot, row = self.mine[leaf, number]
        return slot.block(row)


def scan(folder: pathlib.Path, machines: Machines) -> tuple[list[OpenSlot], list[list[Any]]]:
    """This process's files, and those of each process: the file's identity, attempt and step.

    A collective. Processes of one machine see the same files if they share the folder.
    """
    slots = list(slots_in(folder))
    machine = machines.of_process[jax.process_index()]
    stats = [os.stat(slot.path) for slot in slots]
    mine = [
        [f"{machine}-{stat.st_dev}-{stat.st_ino}", *slot.id]
        for slot, stat in zip(slots, stats, strict=True)
    ]
    return slots, gather_json(mine)


def find_snapshot(folder: pathlib.Path, machines: Machines) -> FoundSnapshot:
    """The newest complete snapshot; a collective.

    Each block is verified by the first process that sees its file. One that fails is missing for
    all: no process decides alone.

    Raises:
      NoCompleteCheckpoint: if there is none; names what is missing by step.
    """
    slots, seen = scan(folder, machines)
    readers: dict[str, list[int]] = defaultdict(list)
    for process, files in enumerate(seen):
        for name, *_ in files:
            readers[name].append(process)
    missing = []
    for number in sorted({SnapshotId(a, s) for files in seen for _, a, s in files}, reverse=True):
        found = _verify(number, slots, seen, readers)
        if isinstance(found, FoundSnapshot):
            return found
        missing.append(found)
    text = "; ".join(missing) or "there are none for this run"
    raise NoCompleteCheckpoint(f"no snapshot in the memory of the machines is complete: {text}.")


def _verify(
    number: SnapshotId,
    slots: list[OpenSlot],
    seen: list[list[Any]],
    readers: dict[str, list[int]],
) -> FoundSnapshot | str:
    """The snapshot if it is complete, else what is missing."""
    me = jax.process_index()
    mine = [np.zeros(0, _FOUND)]
    about = b""
    for file, slot in enumerate(slots):
        if slot.id == number and readers[seen[me][file][0]][0] == me:
            rows = np.flatnonzero(slot.intact())
            found = np.zeros(len(rows), _FOUND)
            found["file"], found["row"] = file, rows
            for name in ("leaf", "block"):
                found[name] = slot.table.blocks[name][rows]
            mine.append(found)
            described = [dataclasses.astuple(leaf) for leaf in slot.table.leaves]
            about = json.dumps([described, slot.table.extra]).encode()
    tables = [np.frombuffer(raw, _FOUND) for raw in gather_bytes(np.concatenate(mine).tobytes())]
    # The table of leaves and the user's value are those of the first process that has them.
    first = next((p for p, each in enumerate(gather_json(bool(about))) if each), None)
    assert first is not None  # the file was seen, with its table
    raw = gather_bytes(about if me == first else b"")[first]
    described, extra = json.loads(raw)
    leaves = [StoredLeaf(p, tuple(s), dtype, tuple(g)) for p, s, dtype, g in described]

    local = {seen[me][file][0]: slot for file, slot in enumerate(slots)}
    where: dict[tuple[int, int], list[int]] = defaultdict(list)
    here: dict[tuple[int, int], tuple[OpenSlot, int]] = {}
    for process, table in enumerate(tables):
        names = [name for name, *_ in seen[process]]
        for file, row, leaf, block in table.tolist():
            name = names[file]
            where[leaf, block] += readers[name]
            if name in local:
                here.setdefault((leaf, block), (local[name], row))
    total = sum(leaf.num_blocks for leaf in leaves if leaf.block_bytes)
    if len(where) == total:
        return FoundSnapshot(number, leaves, extra, dict(where), here)
    lost = [
        f"{leaf.path} ({leaf.num_blocks - held} of {leaf.num_blocks})"
        for i, leaf in enumerate(leaves)
        if leaf.block_bytes and (held := sum(key[0] == i for key in where)) < leaf.num_blocks
    ]
    shown = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more leaves" if len(lost) > 3 else "")
    return f"step {number.step} has no intact replica of shards of {shown}"
