"""The bytes that Pallas kernels move between main memory and the chip, counted from their grids.

The compiler sees a kernel as one instruction with operands and results. What it moves is in its
grid and block specs: their index maps are evaluated for every step of the grid, in its order.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.extend.core import jaxpr_as_fun, jaxprs_in_params

from optax_ext import kernels


class Moved(NamedTuple):
    """Bytes that a kernel reads from main memory and writes to it."""

    read: int
    written: int


def calls(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """The calls of kernels in the program for TPUs that ``fn`` becomes.

    Those in a loop of known length are there as often as it runs them; those under ``shard_map``
    are of one device.
    """

    def found(jaxpr: Any) -> Iterator[Any]:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "pallas_call":
                yield eqn
                continue
            if eqn.primitive is kernels.FOR_TPUS:
                types = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in eqn.invars]
                yield from found(jax.make_jaxpr(eqn.params["kernel"])(*types).jaxpr)
                continue
            inner = [call for one in jaxprs_in_params(eqn.params) for call in found(one)]
            if inner and eqn.primitive.name in ("while", "cond"):
                raise ValueError(
                    f"a kernel in a {eqn.primitive.name} runs an unknown number of times."
                )
            yield from inner * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)

    return list(found(jax.make_jaxpr(fn)(*args).jaxpr))


def moved(call: Any) -> Moved:
    """The bytes that one call of a kernel moves, clipped where a block ends beyond its array.

    On a TPU the steps of a grid run in order, the last dim fastest, and a block stays on the chip
    while the index of the next step is the same: it is read when its index changes, and written
    when its index is about to. Scalars have one block.

    Raises:
      ValueError: if a grid or an index map depends on data, or the kernel copies by itself.
    """
    grids = call.params["grid_mapping"]
    if grids.num_index_operands or not all(isinstance(n, int) for n in grids.grid):
        raise ValueError(f"the blocks of {call.params['name']} depend on data.")
    steps = np.indices(grids.grid).reshape(len(grids.grid), math.prod(grids.grid))
    num = [_bytes(x, steps) for x in grids.block_mappings]
    return Moved(sum(num[: grids.num_inputs]), sum(num[grids.num_inputs :]))


def _bytes(blocks: Any, steps: np.ndarray) -> int:
    """The bytes of one operand or result; ``steps`` is (dims of the grid, steps)."""
    space = str(getattr(blocks.block_aval, "memory_space", None))
    if space in ("any", "hbm"):
        raise ValueError(f"the kernel copies from {blocks.origin} by itself: no blocks to count.")
    array = blocks.array_aval
    index = np.empty((len(array.shape), steps.shape[1]), np.int64)
    at = jaxpr_as_fun(blocks.index_map_jaxpr)
    index[:] = np.reshape(
        jax.vmap(at)(*steps.astype(np.int32)) if len(steps) else at(), (len(index), -1)
    )
    # Whether a step's blocks are not those of the step before; of an array without dims they are.
    changes = np.any(index[:, 1:] != index[:, :-1], axis=0)
    is_new = np.append([True], changes)
    elements = np.ones(steps.shape[1], np.int64)
    for i, size, extent in zip(index, blocks.block_shape, array.shape, strict=True):
        start, length = _window(size, i)
        elements *= np.clip(np.minimum(start + length, extent) - np.maximum(start, 0), 0, None)
    return int(elements @ is_new) * array.dtype.itemsize


def _window(size: Any, index: np.ndarray) -> tuple[np.ndarray, int]:
    """The first elements of blocks along a dim, and how many they have."""
    match size:
        case pl.Blocked(block_size=n) | int(n):
            return index * n, n
        case pl.Squeezed() | None:
            return index, 1
        case pl.Element(block_size=n, padding=(before, _)):
            return index - before, n
    raise ValueError(f"blocks of {size} are not counted.")


def total(fn: Callable[..., Any], *args: Any) -> int:
    """The bytes that all kernels of a program move."""
    return sum(map(sum, map(moved, calls(fn, *args))))
