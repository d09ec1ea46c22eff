"""Files in memory that hold one snapshot of a process each, and the folder that they are in."""

import contextlib
import fcntl
import json
import mmap
import os
import pathlib
import stat
import struct
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from sharding.recovery._stored_leaf import StoredLeaf, host_checksum, leaves_from_json

_MAGIC = b"optaxsnp"
# Magic, version, attempt, step, bytes of data, bytes and CRC-32 of the table; then their CRC-32.
_HEADER = struct.Struct("<8sIQQQQI")
_CRC = struct.Struct("<I")
_VERSION = 1
_PAGE = 4096
_LOCKED: set[pathlib.Path] = set()  # by stores of this process

# A row for each block in a slot: its leaf, its number in the leaf, its first byte, its checksum.
BLOCK = np.dtype([("leaf", "<u4"), ("block", "<u8"), ("offset", "<u8"), ("checksum", "<u4")])


def open_own(path: str | os.PathLike[str], flags: int) -> int:
    """As ``os.open``; follows no link, and what it makes is for this user alone."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def make_private(folder: pathlib.Path) -> None:
    """Makes a folder for this user alone, or raises PermissionError for one that is not safe."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    me = os.geteuid()
    if not stat.S_ISDIR(status.st_mode):
        problem = "is a link or a file"
    elif status.st_uid != me:
        problem = f"is of user {status.st_uid}, and this process of user {me}"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
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
    status = entry.stat(follow_symlinks=False)
    return not stat.S_ISDIR(status.st_mode) and (entry.is_symlink() or status.st_nlink > 1)


def lock_file(path: pathlib.Path, owner: object, text: bytes) -> tuple[int, Callable[[], Any]]:
    """Locks a file until its owner or the process ends; returns it, and a call that unlocks it."""
    path = path.parent.resolve() / path.name
    if path in _LOCKED:
        raise OSError(
            f"an earlier PeerCheckpoints of this process uses {path.parent}: call its close() "
            "before you make another one."
        )
    file = open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(file, text, 0)
    except OSError as error:
        os.close(file)
        if not isinstance(error, BlockingIOError):
            raise
        raise OSError(
            f"another process uses {path.parent}: machines, and runs of the same run_id, need "
            "folders of their own."
        ) from error
    _LOCKED.add(path)
    return file, weakref.finalize(owner, _unlock, file, path)


def _unlock(file: int, path: pathlib.Path) -> None:
    os.close(file)
    _LOCKED.discard(path)


class SnapshotId(NamedTuple):
    """Names a snapshot; later ones are greater."""

    attempt: int  # of the run, in which it was saved
    step: int  # of training


class SlotTable(NamedTuple):
    id: SnapshotId  # of the snapshot
    leaves: list[StoredLeaf]  # of the state
    blocks: np.ndarray  # in this slot, as ``BLOCK``
    extra: Any  # the user's value

    def pack(self) -> bytes:
        """Writes the blocks behind their length in bytes, then the others as JSON."""
        blocks = self.blocks.tobytes()
        described = json.dumps({"leaves": self.leaves, "extra": self.extra}).encode()
        return struct.pack("<Q", len(blocks)) + blocks + described

    @staticmethod
    def unpack(snapshot: SnapshotId, raw: bytes) -> "SlotTable":
        (size,) = struct.unpack("<Q", raw[:8])
        blocks, described = np.frombuffer(raw[8 : 8 + size], BLOCK), json.loads(raw[8 + size :])
        leaves = leaves_from_json(described["leaves"])
        return SlotTable(snapshot, leaves, blocks, described["extra"])


class Slot:
    """A file that is written over again; its snapshot is valid once the header is written."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        self._memory: np.ndarray | None = None
        self.snapshot: SnapshotId | None = None  # also if the file has half of one
        with contextlib.suppress(OSError, ValueError):
            self.snapshot = open_slot(path).id

    def clear(self) -> None:
        """Discards the snapshot: the first thing that changes when it is written over."""
        if self.path.exists():
            with open(self.path, "r+b", opener=open_own) as file:
                file.write(bytes(_HEADER.size + _CRC.size))
        self.snapshot = None

    def reserve(self, num_bytes: int) -> np.ndarray:
        """Returns the bytes for data, in memory that the file has, or raises OSError."""
        # Without a reservation, the pages of a full tmpfs end the process with SIGBUS.
        size = _PAGE + num_bytes
        if self._memory is None or len(self._memory) < size:
            self._memory = None
            file = open_own(self.path, os.O_RDWR | os.O_CREAT)
            try:
                size = -(-size // _PAGE) * _PAGE
                before = os.fstat(file).st_size
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
        raw = table.pack()
        data = self.reserve(num_bytes + len(raw))
        data[num_bytes : num_bytes + len(raw)] = np.frombuffer(raw, np.uint8)
        fields = (*table.id, num_bytes, len(raw), zlib.crc32(raw))
        header = _HEADER.pack(_MAGIC, _VERSION, *fields)
        header += _CRC.pack(zlib.crc32(header))
        self._memory[: len(header)] = np.frombuffer(header, np.uint8)
        self.snapshot = table.id


class OpenSlot(NamedTuple):
    path: pathlib.Path  # of the file
    data: np.ndarray  # bytes of the blocks, a view of the file
    table: SlotTable  # what it holds

    @property
    def id(self) -> SnapshotId:
        return self.table.id

    def block(self, number: int) -> np.ndarray:
        row = self.table.blocks[number]
        leaf = self.table.leaves[row["leaf"]]
        start = int(row["offset"])
        raw = self.data[start : start + leaf.block_bytes]
        return raw.view(leaf.dtype).reshape(leaf.block_shape)

    def intact(self) -> np.ndarray:
        """Whether each block has its checksum: [blocks]."""
        sums = self.table.blocks["checksum"].tolist()
        return np.array([host_checksum(self.block(i)) == x for i, x in enumerate(sums)], bool)


def open_slot(path: pathlib.Path) -> OpenSlot:
    """Opens the snapshot in a file, or raises ValueError; its blocks are not verified."""
    with open(path, "rb", opener=open_own) as file:
        if os.fstat(file.fileno()).st_size < _PAGE:
            raise ValueError(f"{path} has no snapshot.")
        raw = np.memmap(file, np.uint8, "r")
    header = raw[:_PAGE].tobytes()
    magic, version, attempt, step, size, table_size, table_crc = _HEADER.unpack_from(header)
    (crc,) = _CRC.unpack_from(header, _HEADER.size)
    if magic != _MAGIC or crc != zlib.crc32(header[: _HEADER.size]):
        raise ValueError(f"{path} has no snapshot.")
    if version != _VERSION:
        raise ValueError(f"{path} has format {version}, this library reads {_VERSION}.")
    table = raw[_PAGE + size : _PAGE + size + table_size].tobytes()
    if len(table) != table_size or zlib.crc32(table) != table_crc:
        raise ValueError(f"the table of {path} is damaged.")
    data = raw[_PAGE : _PAGE + size]
    return OpenSlot(path, data, SlotTable.unpack(SnapshotId(attempt, step), table))


def slots_in(folder: pathlib.Path) -> Iterator[OpenSlot]:
    for path in sorted(folder.glob("*.slot")):
        try:
            yield open_slot(path)
        except (OSError, ValueError):
            continue
