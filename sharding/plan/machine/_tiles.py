"""Bytes of arrays in device memory that consists of tiles, as that of TPUs."""

import dataclasses
import itertools
import math

import jax
from jax.sharding import PartitionSpec

from sharding._types import Tree
from sharding.placement._describe import Description, Row
from sharding.placement._specs import num_shards


def num_bytes(tree: Tree) -> int:
    """Bytes of all arrays of a tree, real or abstract, without tiles."""
    arrays = [x for x in jax.tree.leaves(tree) if hasattr(x, "dtype")]
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


def padded_to_tiles(described: Description, tile: tuple[int, int] | None) -> Description:
    """Counts arrays with the bytes that they take in a memory of tiles.

    The compiler makes those two dims innermost that waste least. Few rows take tiles of 1, 2 or 4.
    """
    if tile is None:
        return described
    tile_rows, tile_columns = tile

    def pad(row: Row) -> Row:
        shards = [num_shards(described.mesh, PartitionSpec(entry)) for entry in row.spec]
        shards += [1] * (len(row.shape) - len(shards))
        shape = [size // num for size, num in zip(row.shape, shards, strict=True)]  # of one shard
        if len(shape) < 2 or not all(shape):
            return row

        def waste(second_last: int, last: int) -> float:
            """The factor by which memory grows with these two dims innermost."""
            height = min(tile_rows, 2 ** math.ceil(math.log2(shape[second_last])))
            padded = math.ceil(shape[second_last] / height) * height
            width = math.ceil(shape[last] / tile_columns) * tile_columns
            return padded / shape[second_last] * width / shape[last]

        least = min(waste(*dims) for dims in itertools.permutations(range(len(shape)), 2))
        return dataclasses.replace(row, bytes_per_device=round(row.bytes_per_device * least))

    return dataclasses.replace(described, rows=tuple(map(pad, described.rows)))
