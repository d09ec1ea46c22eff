"""The thread that writes snapshots into the slots of this process, and where in them it writes."""

import contextlib
import dataclasses
import math
import os
import pathlib
import threading
import time
from typing import Any

import jax
import numpy as np

from sharding._user_line import warn
from sharding.recovery._replica_program import ReplicaProgram, Replicas, Transfer
from sharding.recovery._slot import BLOCK, Slot, SlotTable, SnapshotId, lock_file, make_private
from sharding.recovery._stored_leaf import WORDS

_ALIGN = 8
OWN = -1  # in place of a round
_SLOW_SECONDS = 0.2  # a shorter wait is not reported
_GIVE_UP_SECONDS = 1800  # until processes that do not save count as lost
_POLL_SECONDS = 0.005


@dataclasses.dataclass
class SaveCounts:
    """What saving took in this process so far."""

    saved: int = 0  #: snapshots that were written
    failed: int = 0  #: snapshots that were not, each with a warning
    waited: float = 0.0  #: seconds for which ``save`` waited for the snapshot before to be written
    slow: int = 0  #: snapshots that another one waited for longer than training took
    written: int = 0  #: bytes
    sent: int = 0  #: bytes that other machines sent to this process


class SlotLayout:
    """Where in a slot this process writes each block of a program's snapshots."""

    def __init__(self, program: ReplicaProgram):
        self.leaves = program.leaves
        self.program = program
        self.num_bytes = self.received_bytes = 0  # of data, and of them what other machines sent
        self._places = {device: i for i, device in enumerate(program.mesh.devices.flat)}
        self._rows: dict[tuple[int, int, int], int] = {}  # by device, round and leaf
        rows: list[tuple[int, int, int, int]] = []
        local = [self._places[device] for device in program.mesh.local_devices]
        for i, (leaf, placement) in enumerate(zip(program.leaves, program.placements, strict=True)):
            if not leaf.block_bytes:
                continue
            sources = [(OWN, d, d) for d in local if placement.stored[d]]
            for number, pairs in enumerate(placement.sends):
                sources += [(number, source, d) for source, d in pairs if d in local]
            for number, source, device in sources:
                self._rows[device, number, i] = len(rows)
                rows.append((i, int(placement.block[source]), self.num_bytes, 0))
                self.num_bytes += -(-leaf.block_bytes // _ALIGN) * _ALIGN
                self.received_bytes += leaf.block_bytes * (number != OWN)
        self.blocks = np.array(rows, BLOCK)  # the table without checksums

    def fill(self, data: np.ndarray, replicas: Replicas) -> np.ndarray:
        """Writes the data; returns the blocks of the table, with checksums of their sources."""
        program = self.program
        for transfer, own, sent in zip(program.transfers, replicas.own, replicas.sent, strict=True):
            for number, words in ((OWN, own), *enumerate(sent)):
                for device, shard in self._shards(words).items():
                    self._write(data, transfer, device, number, shard)
        blocks = self.blocks.copy()
        own_sums = self._shards(replicas.sums)
        sent_sums = [[self._shards(sums) for sums in route] for route in replicas.sent_sums]
        for (device, number, i), row in self._rows.items():
            route = program.routes.index(program.placements[i].sends)
            sums = own_sums if number == OWN else sent_sums[route][number]
            blocks["checksum"][row] = sums[device][0, i]  # of [1, leaves]
        return blocks

    def _shards(self, x: jax.Array) -> dict[int, np.ndarray]:
        """Shards of this process, by the places of their devices in the mesh."""
        return {self._places[s.device]: np.asarray(s.data) for s in x.addressable_shards}

    def _write(
        self, data: np.ndarray, transfer: Transfer, device: int, number: int, words: np.ndarray
    ) -> None:
        """Writes what one transfer brought to one device: [1, elements] or [1, *box]."""
        start = 0
        for i in transfer.leaves:
            leaf = self.leaves[i]
            stop = start + math.prod(leaf.block_shape)
            row = self._rows.get((device, number, i))
            if row is not None:  # else another device of this machine stores the block
                offset = int(self.blocks["offset"][row])
                raw = data[offset : offset + leaf.block_bytes]
                block = raw.view(WORDS[np.dtype(leaf.dtype).itemsize])
                if transfer.box is None:
                    block[:] = words[0, start:stop]
                else:
                    block.reshape(leaf.block_shape)[transfer.box] = words[0]
            start = stop


class SnapshotWriter:
    """Writes a snapshot at a time, in a thread, into the older of two slots; locks the folder."""

    # The rank is that of this process among the mates on its machine.
    def __init__(self, folder: pathlib.Path, rank: int, num_mates: int, counts: SaveCounts):
        make_private(folder)
        self._lock, self._unlock = lock_file(folder / f"{rank}.lock", self, _lock_text(-1))
        self._folder = folder
        self._rank = rank
        self._num_mates = num_mates
        self._slots = [Slot(folder / f"{rank}-{i}.slot") for i in range(2)]
        self._counts = counts
        self.attempt = 0  # of the run, greater than those before it; set once it is known
        self.complete: SnapshotId | None = None  # of all processes, as far as known here
        self.newest: SnapshotId | None = None  # committed by this process
        self._written: SnapshotId | None = None  # the last one that was begun
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._started_at = self._copied_at = 0.0  # when a snapshot was dispatched, and was copied

    def start(self, layout: SlotLayout, replicas: Replicas, step: int, extra: Any) -> None:
        os.pwrite(self._lock, _lock_text(step), 0)
        self._written = SnapshotId(self.attempt, step)
        self._started_at = time.perf_counter()
        args = layout, replicas, self._written, extra
        self._thread = threading.Thread(target=self._write, args=args, name="peer-checkpoints")
        self._thread.start()

    def _write(
        self, layout: SlotLayout, replicas: Replicas, snapshot: SnapshotId, extra: Any
    ) -> None:
        try:
            # Waits for the program. If all had committed the snapshot before, it is complete, and
            # the slot with the one before it is free; else that one may be the last complete one.
            token = replicas.committed.addressable_data(0)
            self._await(token, snapshot.step)
            self._copied_at = time.perf_counter()
            if int(token) == layout.program.mesh.size:
                self.complete = self.newest
                self._remove_stale()
            slot = min(self._slots, key=lambda s: (s.snapshot == self.complete, s.snapshot or ()))
            slot.clear()
            table = SlotTable(snapshot, layout.leaves, layout.blocks, extra)
            data = slot.reserve(layout.num_bytes + len(table.pack()))
            table = table._replace(blocks=layout.fill(data, replicas))
            slot.commit(table, layout.num_bytes)
            self.newest = snapshot
            self._counts.saved += 1
            self._counts.written += layout.num_bytes
            self._counts.sent += layout.received_bytes
        except Exception as error:  # reported by the next call in the main thread
            self._error = error

    def _await(self, token: Any, step: int) -> None:
        """Returns once all processes have run the program, or raises."""
        # It warns as well: the main thread may wait for the devices forever.
        end = time.monotonic() + _GIVE_UP_SECONDS
        while time.monotonic() < end:
            if token.is_ready():
                return
            time.sleep(_POLL_SECONDS)
        behind = []
        for rank in range(self._num_mates):
            with contextlib.suppress(OSError, ValueError):
                process, last = (self._folder / f"{rank}.lock").read_text().split()
                behind += [process] if int(last) < step else []
        text = (
            f"process {jax.process_index()} called save({step}), and for {_GIVE_UP_SECONDS:g} s "
            "other processes have not, or have not finished the step before. Of this machine "
            f"{'process ' + ', '.join(behind) if behind else 'no process'} is behind. All "
            "processes must call save with the same steps."
        )
        self._copied_at = time.perf_counter()
        warn(text)
        raise RuntimeError(text)

    def _remove_stale(self) -> None:
        """Once a snapshot of this attempt is complete, deletes slots of processes that are gone."""
        if self._rank or self.complete is None or self.complete.attempt != self.attempt:
            return
        for path in self._folder.glob("*-*.slot"):
            if int(path.name.partition("-")[0]) >= self._num_mates:
                path.unlink(missing_ok=True)

    def wait(self, *, saving: bool) -> bool:
        """Joins the thread, reports its error, and returns whether its snapshot was committed."""
        if self._thread is not None:
            start = time.perf_counter()
            self._thread.join()
            self._thread = None
            self._count_waiting(start, time.perf_counter(), saving)
            self._report_error()
        return self.newest is not None and self.newest == self._written

    def _report_error(self) -> None:
        error, self._error = self._error, None
        if isinstance(error, OSError | MemoryError):
            self._counts.failed += 1
            kept = "none" if self.complete is None else f"that of step {self.complete.step}"
            warn(
                f"the snapshot of step {self._written and self._written.step} was not written to "
                f"{self._folder}: {error}. The last complete one that is known here is {kept}."
            )
        elif error is not None:
            raise error

    def _count_waiting(self, start: float, end: float, saving: bool) -> None:
        """Counts how long writing, not the device, was waited for; warns once if that is long."""
        waited = max(0.0, end - max(start, self._copied_at))
        self._counts.waited += waited
        if not saving or waited < max(_SLOW_SECONDS, (end - self._started_at) / 2):
            return
        self._counts.slow += 1
        if self._counts.slow == 1:
            warn(
                f"save waited {waited:.1f} s until the snapshot before was written to "
                f"{self._folder}, longer than training took. A larger interval saves time. "
                "This is reported once, and counted in counts.slow."
            )

    def return_to(self, snapshot: SnapshotId) -> None:
        """Takes a snapshot for the last complete one, and discards newer ones in the folder."""
        self.complete = snapshot
        self.newest = self._written = None  # may be of a newer snapshot, which is discarded
        own = {slot.path: slot for slot in self._slots}
        for path in self._folder.glob("*.slot"):
            slot = own.get(path) or Slot(path)
            if slot.snapshot is not None and slot.snapshot > snapshot:
                slot.clear()

    def close(self, *, delete: bool = False) -> None:
        if delete:
            for slot in self._slots:
                slot.path.unlink(missing_ok=True)
        self._unlock()


def _lock_text(step: int) -> bytes:
    """Shows the other processes of a machine who holds a lock, and the step it saves."""
    return f"{jax.process_index():10} {step:20}".encode()
