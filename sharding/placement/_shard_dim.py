"""Which dim of a parameter is sharded, or why none."""

import math
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from sharding._types import Array

# Shards of the last dim are multiples of this many elements, or another dim is preferred: blocks of
# quantized state stay unsplit, and so do a TPU's registers (its compiler takes three times as long
# over narrower shards).
_LAST_DIM_MULTIPLE = 256
# A dim has to have this many elements to be sharded in place of the last one; a shorter one may be
# the dim of a stack of layers, which loops take off.
_MIN_OTHER_DIM = 64


def shard_dim(
    path: str,
    leaf: Array,
    spec: PartitionSpec,  # on the user's axes
    counts: Sequence[int],  # of shards, see ``choose_sharded_dim``
    min_size: int,
    unsharded: Sequence[str],
) -> tuple[int | None, str]:
    """The dim of a parameter to shard; else None, and the reason that ``describe`` shows."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return None, f"unsharded: {leaf.dtype} is not a number"
    pattern = next((p for p in unsharded if re.search(p, path)), None)
    if pattern is not None:
        return None, f"unsharded: requested by unsharded={pattern!r}"
    shape, size = tuple(leaf.shape), math.prod(leaf.shape)
    if size < max(min_size, 1):
        return None, f"unsharded: {size} elements, min_shard_size is {min_size}"
    free = [d for d in range(len(shape)) if d >= len(spec) or spec[d] is None]
    dim = choose_sharded_dim(shape, free, counts)
    none = f"unsharded: no free dim of {shape} divides by {counts[-1]}"
    return dim, none if dim is None else ""


def choose_sharded_dim(
    shape: Sequence[int], free: Sequence[int], shard_counts: Sequence[int]
) -> int | None:
    """The longest of the free dims that divides by the first count that any does; else None.

    If that is the last dim, and its shards would not be multiples of 256 elements, the longest
    other dim of at least 64 elements that divides is chosen instead, if there is one.
    """

    def length(dim: int) -> tuple[int, int]:
        return shape[dim], -dim

    last = len(shape) - 1
    for count in shard_counts:
        divisible = [dim for dim in free if shape[dim] and shape[dim] % count == 0]
        if not divisible:
            continue
        best = max(divisible, key=length)
        if best == last and shape[last] // count % _LAST_DIM_MULTIPLE:
            others = [d for d in divisible if d != last and shape[d] >= _MIN_OTHER_DIM]
            best = max(others, key=length, default=last)
        return best
    return None
