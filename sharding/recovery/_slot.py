"""A file in memory that holds one snapshot of this process at a time."""

import contextlib
import json
import mmap
import os
import pathlib
import stat
import struct
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from sharding.recovery._stored_leaf import StoredLeaf
from sharding.recovery._words import host_checksum

_MAGIC = b"optaxsnp"
# Magic, version, attempt, step, bytes of data, bytes and CRC-32 of the table; then their CRC-32.
_HEADER = struct.Struct("<8sIQQQQI")
_CRC = struct.Struct("<I")
_VERSION = 1
_PAGE = 4096

# Of each block in a slot: its leaf, its number in the leaf, its first byte, its checksum.
BLOCK = np.dtype([("leaf", "<u4"), ("block", "<u8"), ("offset", "<u8"), ("checksum", "<u4")])


def open_own(path: str | os.PathLike[str], flags: int) -> int:
    """As ``os.open``; follows no link, and what it makes is for this user alone."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def make_private(folder: pathlib.Path) -> None:
    """Makes a folder for this user alone.

    Raises:
      OSError: if it cannot be made, or is there and not safe.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found, me = folder.lstat(), os.geteuid()
    if not stat.S_ISDIR(found.st_mode):
        problem = "is a link or a file"
    elif found.st_uid != me:
        problem = f"is of user {found.st_uid}, and this process of user {me}"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"can be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    else:
        links = [entry.name for entry in os.scandir(folder) if _is_link(entry)]
        if not links:
            return
        problem = f"holds the link {links[0]!r}"
    raise PermissionError(
        f"{folder} {problem}: snapshots need a folder that this user alone can write, without "
        "links. Remove it, or give another run_id or folder."
    )


def _is_link(entry: os.DirEntry[str]) -> bool:
    found = entry.stat(follow_symlinks=False)
    return not stat.S_ISDIR(found.st_mode) and (entry.is_symlink() or found.st_nlink > 1)


class SnapshotId(NamedTuple):
    """Names a snapshot; later ones are greater.

    Attributes:
      attempt: of the run, in which it was saved.
      step: of training.
    """

    attempt: int
    step: int


class SlotTable(NamedTuple):
    """What a slot holds.

    Attributes:
      id: of the snapshot.
      leaves: of the state.
      blocks: in this slot, as ``BLOCK``.
      extra: the user's value.
    """

    id: SnapshotId
    leaves: list[StoredLeaf]
    blocks: np.ndarray
    extra: Any


class Slot:
    """A file that is kept and written over; a snapshot in it is valid once its header is written.

    Args:
      path: of the file; created by the first ``reserve``.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        self._memory: np.ndarray | None = None
        self.snapshot = self._read_id()

    def _read_id(self) -> SnapshotId | None:
        """Of the snapshot in the file; None if there is none, or half of one."""
        try:
            return open_slot(self.path).id
        except (OSError, ValueError):
            return None

    def clear(self) -> None:
        """Discards the snapshot: the first thing that changes when it is written over."""
        if self._memory is None and self.path.exists():
            with open(self.path, "r+b", opener=open_own) as file:
                file.write(bytes(_HEADER.size + _CRC.size))
        elif self._memory is not None:
            self._memory[: _HEADER.size + _CRC.size] = 0
        self.snapshot = None

    def reserve(self, num_bytes: int) -> np.ndarray:
        """The bytes for data, in memory that the file has.

        Raises:
          OSError: if there is not enough memory. Written without a reservation, the pages of a full
            tmpfs end the process with SIGBUS.
        """
        size = _PAGE + num_bytes
        if self._memory is None or len(self._memory) < size:
            self._memory = None
            file = open_own(self.path, os.O_RDWR | os.O_CREAT)
            try:
                size, before = -(-size // _PAGE) * _PAGE, os.fstat(file).st_size
                try:
                    os.posix_fallocate(file, 0, size)
                except OSError:
                    os.ftruncate(file, before)  # the rest of the memory is left to others
                    raise
                self._memory = np.frombuffer(mmap.mmap(file, size), np.uint8)
            finally:
                os.close(file)
        return self._memory[_PAGE:]

    def commit(self, table: SlotTable, num_bytes: int) -> None:
        """Makes the data a snapshot, by its table behind it and then its header."""
        assert self._memory is not None
        raw = _pack(table)
        data = self.reserve(num_bytes + len(raw))
        data[num_bytes : num_bytes + len(raw)] = np.frombuffer(raw, np.uint8)
        fields = (*table.id, num_bytes, len(raw), zlib.crc32(raw))
        header = _HEADER.pack(_MAGIC, _VERSION, *fields)
        header += _CRC.pack(zlib.crc32(header))
        self._memory[: len(header)] = np.frombuffer(header, np.uint8)
        self.snapshot = table.id


class OpenSlot:
    """A snapshot that is read.

    Attributes:
      path: of the file.
      id: of the snapshot.
      table: what it holds.
    """

    def __init__(self, path: pathlib.Path, raw: np.ndarray, table: SlotTable):
        self.path, self.table, self._raw = path, table, raw

    @property
    def id(self) -> SnapshotId:
        """Of the snapshot."""
        return self.table.id

    def block(self, number: int) -> np.ndarray:
        """The array of one of the table's blocks, a view of the file."""
        row = self.table.blocks[number]
        leaf = self.table.leaves[row["leaf"]]
        start = int(row["offset"])
        raw = self._raw[start : start + leaf.block_bytes]
        return raw.view(leaf.dtype).reshape(leaf.block_shape)

    def intact(self) -> np.ndarray:
        """Whether each block has its checksum: [blocks]."""
        rows = self.table.blocks
        return np.array(
            [host_checksum(self.block(i)) == rows[i]["checksum"] for i in range(len(rows))], bool
        )


def open_slot(path: pathlib.Path) -> OpenSlot:
    """The snapshot in a file; its blocks are not verified.

    Raises:
      ValueError: if no snapshot was committed, or its header or table are damaged.
      OSError: if there is no such file.
    """
    with open(path, "rb", opener=open_own) as file:
        if os.fstat(file.fileno()).st_size < _PAGE:
            raise ValueError(f"{path} has no snapshot.")
        raw = np.memmap(file, np.uint8, "r")
    header = raw[: _HEADER.size + _CRC.size].tobytes()
    (crc,) = _CRC.unpack(header[_HEADER.size :])
    magic, version, *number, size, table_size, table_crc = _HEADER.unpack(header[: _HEADER.size])
    if magic != _MAGIC or crc != zlib.crc32(header[: _HEADER.size]):
        raise ValueError(f"{path} has no snapshot.")
    if version != _VERSION:
        raise ValueError(f"{path} has format {version}, this library reads {_VERSION}.")
    table = raw[_PAGE + size : _PAGE + size + table_size].tobytes()
    if len(table) != table_size or zlib.crc32(table) != table_crc:
        raise ValueError(f"the table of {path} is damaged.")
    return OpenSlot(path, raw[_PAGE : _PAGE + size], _unpack(SnapshotId(*number), table))


def slots_in(folder: pathlib.Path) -> Iterator[OpenSlot]:
    """The snapshots in a folder, whoever wrote them."""
    for path in sorted(folder.glob("*.slot")):
        try:
            yield open_slot(path)
        except (OSError, ValueError):
            continue


def _pack(table: SlotTable) -> bytes:
    """Blocks behind a length, then the rest as JSON."""
    rest = {
        "leaves": [[x.path, x.shape, x.dtype, x.grid] for x in table.leaves],
        "extra": table.extra,
    }
    blocks = table.blocks.tobytes()
    return struct.pack("<Q", len(blocks)) + blocks + json.dumps(rest).encode()


def _unpack(number: SnapshotId, raw: bytes) -> SlotTable:
    """Reads what ``_pack`` wrote."""
    (size,) = struct.unpack("<Q", raw[:8])
    blocks = np.frombuffer(raw[8 : 8 + size], BLOCK)
    rest = json.loads(raw[8 + size :])
    leaves = [StoredLeaf(p, tuple(s), dtype, tuple(g)) for p, s, dtype, g in rest["leaves"]]
    return SlotTable(number, leaves, blocks, rest["extra"])
