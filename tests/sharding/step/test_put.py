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
        text = f"process {me} gives shard {index} of {count}{same}"
        assert _put.describe_rows(zero._layout) == text
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
