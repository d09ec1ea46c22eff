"""Where in a slot each block of a snapshot is written."""

import json
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from sharding.recovery._replica_program import ReplicaProgram, Replicas, Transfer
from sharding.recovery._slot import BLOCK
from sharding.recovery._stored_leaf import mesh_positions
from sharding.recovery._words import WORDS

_ALIGN = 8
OWN = -1  # in place of a round


class Entry(NamedTuple):
    """A block that one device of this process hands over.

    Attributes:
      row: in the table.
      offset: of its first byte.
    """

    row: int
    offset: int


class SlotPlan:
    """What this process writes in each snapshot of a program.

    Attributes:
      leaves: of the state.
      num_bytes: of data.
      received_bytes: of them, those that other machines sent.
    """

    def __init__(self, program: ReplicaProgram):
        self.leaves = program.leaves
        self.num_bytes = self.received_bytes = 0
        self._program = program
        self._places = mesh_positions(program.mesh)
        # By device, round and leaf.
        self._entries: dict[tuple[int, int, int], Entry] = {}
        rows: list[tuple[int, int, int, int]] = []
        local = [self._places[device] for device in program.mesh.local_devices]
        for i, (leaf, placement) in enumerate(zip(program.leaves, program.placements, strict=True)):
            owners = [(OWN, d, d) for d in local if placement.stored[d]]
            for number, pairs in enumerate(placement.sends):
                owners += [(number, source, d) for source, d in pairs if d in local]
            for number, source, device in owners:
                if not leaf.block_bytes:
                    continue
                self._entries[device, number, i] = Entry(len(rows), self.num_bytes)
                rows.append((i, int(placement.block[source]), self.num_bytes, 0))
                self.num_bytes += -(-leaf.block_bytes // _ALIGN) * _ALIGN
                self.received_bytes += leaf.block_bytes * (number != OWN)
        self._blocks = np.array(rows, BLOCK)

    def table_bytes(self, extra: Any) -> int:
        """An upper bound of the bytes of a table."""
        text = [[leaf.path, leaf.shape, leaf.dtype, leaf.grid] for leaf in self.leaves]
        return self._blocks.nbytes + len(json.dumps([text, extra])) + 4096

    def fill(self, data: np.ndarray, replicas: Replicas) -> np.ndarray:
        """Writes the data; returns the blocks of the table, with checksums of their sources."""
        for transfer, own, sent in zip(
            self._program.transfers, replicas.own, replicas.sent, strict=True
        ):
            for number, words in ((OWN, own), *enumerate(sent)):
                for device, shard in self._shards(words):
                    self._write(data, transfer, device, number, shard)
        blocks = self._blocks.copy()
        own_sums = dict(self._shards(replicas.sums))
        routes = [[dict(self._shards(x)) for x in rounds] for rounds in replicas.sent_sums]
        for (device, number, i), entry in self._entries.items():
            route = self._program.routes.index(self._program.placements[i].sends)
            sums = own_sums if number == OWN else routes[route][number]
            blocks["checksum"][entry.row] = sums[device][0, i]
        return blocks

    def _shards(self, x: jax.Array) -> list[tuple[int, np.ndarray]]:
        """What each device of this process has, with its place in the mesh."""
        return [
            (self._places[shard.device], np.asarray(shard.data)) for shard in x.addressable_shards
        ]

    def _write(
        self, data: np.ndarray, transfer: Transfer, device: int, number: int, words: np.ndarray
    ) -> None:
        """Writes what one transfer brought to one device."""
        at = 0
        for i in transfer.leaves:
            leaf = self.leaves[i]
            size = math.prod(leaf.block_shape)
            entry = self._entries.get((device, number, i))
            if entry is not None:
                raw = data[entry.offset : entry.offset + leaf.block_bytes]
                block = raw.view(WORDS[np.dtype(leaf.dtype).itemsize])
                if transfer.box is None:
                    block[:] = words[0, at : at + size]
                else:
                    block.reshape(leaf.block_shape)[transfer.box] = words[0]
            at += size
