"""What several processes find and send each other: they are threads here, with their own files."""

import concurrent.futures
import threading
import types

import jax
import numpy as np
import pytest

from sharding.recovery import _load_state
from sharding.recovery._load_state import NoCompleteCheckpoint, Request, exchange, find_snapshot
from sharding.recovery._slot import BLOCK, OpenSlot, Slot, SlotTable, SnapshotId
from sharding.recovery._stored_leaf import StoredLeaf, host_checksum

from .states import damage

LEAVES = [StoredLeaf("['w']", (4, 6), "float32", (2, 1))]


def write(folder, blocks, attempt=1, step=5, name="0-0.slot", seed=0):
    """A snapshot with some of the two blocks."""
    folder.mkdir(exist_ok=True)
    data = np.random.default_rng(seed).normal(size=(2, 2, 6)).astype(np.float32)
    slot = Slot(folder / name)
    raw = slot.reserve(4096)[: 48 * len(blocks)].view(np.float32).reshape(-1, 2, 6)
    raw[:] = data[blocks]
    rows = [(0, b, 48 * i, host_checksum(data[b])) for i, b in enumerate(blocks)]
    table = SlotTable(SnapshotId(attempt, step), LEAVES, np.array(rows, BLOCK), {"seed": seed})
    slot.commit(table, 48 * len(blocks))
    return slot.path


@pytest.fixture
def find(monkeypatch):
    """Runs ``find_snapshot`` in as many processes as there are folders; what each returns."""

    def run(folders, machines):
        num, me = len(folders), threading.local()
        barrier, shared = threading.Barrier(num), [b""] * num

        def gather(value):
            shared[me.rank] = value
            barrier.wait()
            values = list(shared)
            barrier.wait()
            return values

        def process(rank):
            me.rank = rank
            try:
                return find_snapshot(folders[rank], types.SimpleNamespace(of_process=machines))
            except NoCompleteCheckpoint as error:
                return str(error)

        monkeypatch.setattr(jax, "process_index", lambda: me.rank)
        monkeypatch.setattr(_load_state, "gather_json", gather)
        with concurrent.futures.ThreadPoolExecutor(num) as pool:
            found = list(pool.map(process, range(num)))
        monkeypatch.undo()
        return found

    return run


def test_blocks_of_two_machines(find, tmp_path, monkeypatch):
    """Of which each has one, in files of equal inode numbers."""
    folders = [tmp_path / name for name in "ab"]
    for block, folder in enumerate(folders):
        write(folder, [block])
    same = types.SimpleNamespace(st_dev=1, st_ino=7)
    monkeypatch.setattr(_load_state, "os", types.SimpleNamespace(stat=lambda _: same))
    for rank, found in enumerate(find(folders, (0, 1))):
        assert found.id == (1, 5)
        assert found.readers == {(0, 0): [0], (0, 1): [1]}
        assert list(found.mine) == [(0, rank)]
        assert found.extra == {"seed": 0}


def test_a_replica_takes_the_place_of_a_damaged_block(find, tmp_path):
    """For all processes; without one the snapshot before is restored."""
    folders = [tmp_path / name for name in "ab"]
    paths = [write(folder, [0, 1]) for folder in folders]
    damage(paths[1])
    for found in find(folders, (0, 1)):
        assert (found.id, found.readers[0, 0], found.readers[0, 1]) == ((1, 5), [0], [0, 1])
    damage(paths[0])
    write(folders[0], [0, 1], step=4, name="0-1.slot")
    for found in find(folders, (0, 1)):
        assert found.id == (1, 4)


def test_processes_of_one_machine_share_its_files(find, tmp_path):
    """The first one verifies them; what it finds damaged is missing for all."""
    folder = tmp_path / "a"
    write(folder, [0])
    path = write(folder, [1, 0], name="1-0.slot")
    for found in find([folder, folder], (0, 0)):
        assert found.readers[0, 1] == [0, 1]
        np.testing.assert_array_equal(found.block(0, 1), OpenSlot.block(found.mine[0, 1][0], 0))
    damage(path)
    for found in find([folder, folder], (0, 0)):
        assert found.endswith("step 5 has no intact replica of shards of ['w'] (1 of 2).")


def test_the_newest_complete_snapshot(find, tmp_path):
    """By attempt, then by step; blocks of different attempts do not pair."""
    a, b = folders = [tmp_path / name for name in "ab"]
    write(a, [0, 1], attempt=1, step=9)
    write(a, [0], attempt=2, step=4, name="0-1.slot", seed=2)
    write(b, [1], attempt=1, step=4)
    for found in find(folders, (0, 1)):
        assert found.id == (1, 9)
    write(b, [1], attempt=2, step=4, name="1-0.slot", seed=2)
    for found in find(folders, (0, 1)):
        assert (found.id, found.extra) == ((2, 4), {"seed": 2})
    write(a, [0], attempt=1, step=9)
    (b / "1-0.slot").unlink()
    for found in find(folders, (0, 1)):
        assert "step 4 has no intact replica" in found
        assert "step 9 has no intact replica" in found


def test_boxes_of_blocks_are_sent(monkeypatch):
    """Bit by bit, also behind boxes of odd length, and in several rounds."""
    monkeypatch.setattr(_load_state, "_MOST", 24)
    leaves = [
        StoredLeaf("a", (5, 7), "uint8", (1, 1)),
        StoredLeaf("b", (6, 5), "float32", (2, 1)),
        StoredLeaf("c", (3,), "bfloat16", (1,)),
        StoredLeaf("d", (), "float64", ()),
    ]
    rng, blocks = np.random.default_rng(0), {}
    for i, number in ((0, 0), (1, 1), (2, 0), (3, 0)):
        raw = rng.integers(0, 128, leaves[i].block_bytes, dtype=np.uint8)
        blocks[i, number] = raw.view(leaves[i].dtype).reshape(leaves[i].block_shape)
    found = types.SimpleNamespace(leaves=leaves, block=lambda i, number: blocks[i, number])
    boxes = [(0, 0, ((1, 4), (2, 5))), (2, 0, ((0, 1),)), (1, 1, ((0, 3), (1, 4))), (3, 0, ())]
    requests = [Request(0, *box) for box in boxes]
    received, num_bytes = exchange(jax.make_mesh((8,), ("data",)), found, requests)
    assert list(received) == requests
    for request, have in received.items():
        edges = tuple(slice(*edge) for edge in request.box)
        assert have.tobytes() == blocks[request.leaf, request.block][edges].tobytes()
    assert num_bytes == 16 + 8 + 40 + 8
