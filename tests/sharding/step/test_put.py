"""Which rows of a batch each process gives, on made-up meshes; tests/multiprocess has real ones."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

import sharding as shd
from sharding.step import _put


class Device:
    """Of a process of a made-up mesh."""

    def __init__(self, process):
        self.process_index = process


def zero_of(processes, names, **options):
    """On a mesh of devices of these processes."""
    devices = np.vectorize(Device, otypes=[object])(processes)
    return shd.Zero(Mesh(devices, names), **options)


@pytest.mark.parametrize(
    ("processes", "names", "shards"),
    [
        ([0, 0, 1, 1], ["data"], [(0, 2), (1, 2)]),
        ([1, 1, 0, 0], ["data"], [(1, 2), (0, 2)]),
        ([1, 0, 1, 0], ["data"], [(1, 2), (0, 2)]),  # put has the rows 0, 2 and 1, 3
        ([[0, 0, 1, 1], [2, 2, 3, 3]], ["data", "pipe"], [(0, 2)] * 2 + [(1, 2)] * 2),
        ([[0, 0, 1, 1], [2, 2, 3, 3]], ["pipe", "data"], [(0, 2), (1, 2)] * 2),
        ([[0, 1], [0, 1]], ["data", "pipe"], [(0, 1)] * 2),
        ([[[0, 1], [2, 3]]] * 2, ["replica", "pipe", "data"], [(0, 2), (1, 2)] * 2),
    ],
)
def test_the_shard_of_each_process(monkeypatch, processes, names, shards):
    zero = zero_of(processes, names, replica_axis="replica" if "replica" in names else None)
    for me, (index, count) in enumerate(shards):
        monkeypatch.setattr(jax, "process_index", lambda me=me: me)
        assert zero.data_shard() == (index, count)
        others = [p for p, shard in enumerate(shards) if shard == (index, count) and p != me]
        same = f", the same rows as process {others[0]}" if others else ""
        assert (
            _put.describe_rows(zero._layout) == f"process {me} gives shard {index} of {count}{same}"
        )
    monkeypatch.setattr(jax, "process_index", lambda: 7)
    with pytest.raises(ValueError, match="process 7 has no device of the mesh"):
        zero.data_shard()


@pytest.mark.parametrize(
    ("processes", "names"),
    [([0, 0, 1], ["data"]), ([[0, 0, 1], [1, 2, 2]], ["data", "pipe"])],
    ids=["unequal", "overlapping"],
)
def test_processes_whose_rows_make_no_shards(processes, names):
    zero = zero_of(processes, names)
    with pytest.raises(ValueError, match="places of the axes") as error:
        zero.put(np.ones(6))
    assert _put.describe_rows(zero._layout) == str(error.value)


def test_one_process_gives_all():
    zero = shd.Zero(jax.make_mesh((1,), ("data",)))
    assert zero.data_shard() == (0, 1)
    abstract = shd.Zero(AbstractMesh((4,), ("data",)))
    with pytest.raises(ValueError, match="is abstract"):
        abstract.data_shard()
    assert _put.describe_rows(zero._layout) == _put.describe_rows(abstract._layout) == ""


def test_batches_of_processes_are_compared_by_all_that_they_hold():
    """One bit of the last row, a dtype, a name: whatever differs is found where it must not."""
    batch = {"x": np.arange(12.0).reshape(4, 3), "key": np.array([1, 2, 3, 4], "uint32"), "t": 0.5}
    changed = {
        "same rows": {"x": np.nextafter(batch["x"], batch["x"] + (batch["x"] == 11))},
        "dtypes": {"x": batch["x"].astype(np.float32)},
        "dims": {"x": batch["x"][:, :2]},
        "names": {"y": batch["x"]},
        "scalars": {"t": 0.25},
        "equally many rows; process 0 gives 4, process 2 3": {
            k: v[:3] for k, v in batch.items() if k != "t"
        },
    }

    def check(third, shards):
        batches = (batch, batch, third)
        facts = [_put._facts(jax.tree.map(np.asarray, b), shared=True) for b in batches]
        _put._check_facts(shards, dict(enumerate(facts)))

    check(batch, [(0, 1, 2)])
    for message, change in changed.items():
        with pytest.raises(ValueError, match=message):
            check(batch | change, [(0, 1, 2)])
    check(batch | changed["same rows"], [(0, 1), (2,)])  # other rows are another shard's
