"""A file that holds one snapshot: what was written is read, or nothing is."""

import itertools
import struct

import numpy as np
import pytest

from sharding.recovery import _slot
from sharding.recovery._slot import BLOCK, Slot, SlotTable, SnapshotId, open_slot, slots_in
from sharding.recovery._stored_leaf import StoredLeaf, host_checksum

HEADER = _slot._HEADER.size + _slot._CRC.size
LEAVES = [
    StoredLeaf("['w']", (4, 6), "float32", (2, 1)),
    StoredLeaf("['b']", (5,), "bfloat16", (1,)),
    StoredLeaf("['n']", (), "int64", ()),
]
EXTRA = {"position": [3, 7], "text": "é\n\0", "none": None}
ID = SnapshotId(1_800_000_000, 41)


def content(seed=0):
    """The blocks of a snapshot, one of them damaged from the start, and their table."""
    rng = np.random.default_rng(seed)
    blocks, rows, offset = [], [], 0
    for leaf, number in ((0, 0), (0, 1), (1, 0), (2, 0)):
        shape, dtype = LEAVES[leaf].block_shape, np.dtype(LEAVES[leaf].dtype)
        size = int(np.prod(shape)) * dtype.itemsize
        block = rng.integers(0, 256, size, dtype=np.uint8).view(dtype).reshape(shape)
        blocks.append(block)
        rows.append((leaf, number, offset, host_checksum(block)))
        offset += -(-size // 8) * 8
    return blocks, np.array(rows, BLOCK), offset


def write(slot, number=ID, seed=0, *, reserve=None):
    """Commits a snapshot; returns its blocks and the bytes of data."""
    blocks, rows, num_bytes = content(seed)
    slot.clear()
    data = slot.reserve(num_bytes + 4096 if reserve is None else reserve)
    for block, row in zip(blocks, rows, strict=True):
        data[row["offset"] : row["offset"] + block.nbytes] = block.reshape(-1).view(np.uint8)
    slot.commit(SlotTable(number, LEAVES, rows, EXTRA), num_bytes)
    return blocks, num_bytes


def assert_holds(path, number, blocks):
    found = open_slot(path)
    assert found.id == found.table.id == number
    assert found.table.leaves == LEAVES
    assert found.table.extra == EXTRA
    assert found.intact().tolist() == [True] * len(blocks)
    for i, block in enumerate(blocks):
        assert found.block(i).dtype == block.dtype
        assert found.block(i).shape == block.shape
        assert found.block(i).tobytes() == block.tobytes()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "0-0.slot"


def test_a_slot_is_written_over(path):
    """By the process that wrote it, and by the next one, in the same pages."""
    slot = Slot(path)
    assert slot.snapshot is None
    blocks, _ = write(slot)
    assert slot.snapshot == Slot(path).snapshot == ID
    assert_holds(path, ID, blocks)
    size, inode = path.stat().st_size, path.stat().st_ino
    for step in (43, 44):
        blocks, _ = write(slot, SnapshotId(ID.attempt, step), seed=step)
        assert_holds(path, SnapshotId(ID.attempt, step), blocks)
    blocks, _ = write(Slot(path), SnapshotId(ID.attempt + 1, 1), seed=9)
    assert_holds(path, SnapshotId(ID.attempt + 1, 1), blocks)
    assert (path.stat().st_size, path.stat().st_ino) == (size, inode)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.fixture
def written(path):
    """The bytes of a file with a snapshot, and where its data and its table end."""
    _, num_bytes = write(Slot(path))
    raw = path.read_bytes()
    (table_bytes,) = struct.unpack_from("<Q", raw, _slot._HEADER.size - 12)
    return raw, 4096 + num_bytes, 4096 + num_bytes + table_bytes


def flipped(raw, at, bits):
    return raw[:at] + bytes([raw[at] ^ bits]) + raw[at + 1 :]


def test_every_flipped_bit_of_header_and_table_makes_it_unreadable(path, written):
    raw, table, end = written
    for at, bit in itertools.product(range(HEADER), range(8)):
        path.write_bytes(flipped(raw, at, 1 << bit))
        with pytest.raises(ValueError, match="has no snapshot"):
            open_slot(path)
    assert Slot(path).snapshot is None
    assert list(slots_in(path.parent)) == []
    for at in range(table, end):
        path.write_bytes(flipped(raw, at, 0x41))
        with pytest.raises(ValueError, match="is damaged"):
            open_slot(path)
    path.write_bytes(raw[:end] + b"other")  # behind it anything may follow
    assert open_slot(path).intact().all()


def test_parts_of_a_file_are_unreadable(path, written):
    """Truncated anywhere; killed in the header, of which no prefix before zeros is valid."""
    raw, _, end = written
    for size in (0, 1, HEADER - 1, HEADER, 4095, *range(4096, end)):
        path.write_bytes(raw[:size])
        with pytest.raises(ValueError, match=r"has no snapshot|is damaged"):
            open_slot(path)
    for size in range(HEADER):
        path.write_bytes(raw[:size] + bytes(HEADER - size) + raw[HEADER:])
        with pytest.raises(ValueError, match="has no snapshot"):
            open_slot(path)


def test_every_flipped_byte_of_the_data_is_found(path, written):
    """Of one block, and of no other; padding between blocks is none of them."""
    raw, table, _ = written
    rows, blocks = open_slot(path).table.blocks, content()[0]
    for at in range(table - 4096):
        path.write_bytes(flipped(raw, 4096 + at, 4))
        ends = [row["offset"] + b.nbytes for row, b in zip(rows, blocks, strict=True)]
        hit = [row["offset"] <= at < end for row, end in zip(rows, ends, strict=True)]
        assert (~open_slot(path).intact()).tolist() == hit
        assert sum(hit) <= 1


def test_other_formats_are_named(path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(_slot, "_VERSION", 7)
        write(Slot(path))
    with pytest.raises(ValueError, match="has format 7, this library reads 1"):
        open_slot(path)
    assert list(slots_in(path.parent)) == []
    write(Slot(path))  # it is written over
    assert open_slot(path).id == ID


def test_a_slot_grows(path):
    """Also for a table, when the data was written already; and it stays as large."""
    slot = Slot(path)
    write(slot)
    blocks, _ = write(slot, reserve=5 * 4096 + 1)
    assert path.stat().st_size >= 6 * 4096
    assert_holds(path, ID, blocks)
    _, num_bytes = write(slot, seed=2)
    slot.commit(SlotTable(ID, LEAVES, content(2)[1], "x" * 40_000), num_bytes)
    assert open_slot(path).intact().all()
    assert open_slot(path).table.extra == "x" * 40_000
    # Reserved before it is written: else the pages of a full tmpfs end the process with SIGBUS.
    assert len(slot.reserve(100_000)) >= 100_000
    assert path.stat().st_blocks * 512 >= 100_000
