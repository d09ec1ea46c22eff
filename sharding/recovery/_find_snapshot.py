"""Agrees on the newest snapshot of which every block is intact on some machine."""

import os
import pathlib
from collections import defaultdict
from typing import Any, NamedTuple

import jax
import numpy as np

from sharding.recovery._machines import Machines, gather_json
from sharding.recovery._slot import OpenSlot, SnapshotId, slots_in
from sharding.recovery._stored_leaf import StoredLeaf, leaves_from_json

Block = tuple[int, int]  # a leaf, and the number of a block of it


class NoCompleteCheckpoint(Exception):
    """No snapshot in the memory of the machines has all of its blocks."""


class FoundSnapshot(NamedTuple):
    id: SnapshotId  # its attempt and step
    leaves: list[StoredLeaf]  # of the state
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
    leaves = leaves_from_json(rows_of_leaves)

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
