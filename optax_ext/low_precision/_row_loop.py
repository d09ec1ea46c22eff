"""A loop over rows for 8-bit state of few columns on TPUs, by XLA: dequantize, update and quantize.

As one expression, XLA would write scales of all elements and float32 moments to main memory. The
intermediates of a step of the loop are so small that they stay in fast memory.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_ext.low_precision._one_pass import OnePass, Operands, results_of, update_slice
from optax_ext.low_precision._quantize import BLOCK_ROWS, quantize
from optax_ext.low_precision._rounding import uniform_at

_BLOCK = (BLOCK_ROWS, 32)  # rows and columns
_STEP_SIZE = 2**21  # elements that a step of the loop updates
_TILE_ROWS = 32  # of codes in memory
# Elements from which a loop is worth it: of a shard, of one whose last blocks end beyond it (XLA
# would write padded arrays), and of a matrix in a stack.
_MIN_SIZE, _MIN_PADDED, _MIN_STEP = 2**24, 2**22, 2**16


def takes(shard: Sequence[int]) -> bool:
    """Whether matrices are worth a loop."""
    matrix = shard[-2:]
    if any(n < size for n, size in zip(matrix, _BLOCK, strict=True)):
        return False
    is_padded = any(n % size for n, size in zip(matrix, _BLOCK, strict=True))
    return (
        math.prod(shard) >= (_MIN_PADDED if is_padded else _MIN_SIZE)
        and math.prod(matrix) >= _MIN_STEP
    )


def update_rows(update: OnePass, operands: Operands) -> list[jax.Array]:
    types, aliases = results_of(update, operands)
    types = jax.tree.leaves(types)
    *lead, rows, columns = operands.stored[0].codes.shape
    treedef: Any
    arrays, treedef = jax.tree.flatten((operands.full, operands.stored))
    arrays = list(map(_matrices, arrays))
    made = [_matrices(jnp.zeros(x.shape, x.dtype)) for x in types]
    for k, n in aliases.items():
        made[n] = arrays[k]

    def window(x: jax.Array, matrix: Any, row: Any, num: int) -> tuple[list[int], list[Any]]:
        """Returns the shape and start of ``num`` rows of a matrix, or of the rows' scales."""
        per_row = BLOCK_ROWS if x.shape[-2] < rows else 1
        outer = x.ndim - 2
        size = [*[1] * outer, -(-num // per_row), x.shape[-1]]
        return size, [*[matrix] * outer, row // per_row, 0]

    def update_block(made: list[jax.Array], matrix: Any, row: Any, num: int) -> list[jax.Array]:
        shape = (num, columns)

        # Dequantize and update.
        slices = []
        for k, x in enumerate(arrays):
            x = made[aliases[k]] if k in aliases else x
            size, start = window(x, matrix, row, num)
            slices.append(jax.lax.dynamic_slice(x, start, size).reshape(size[-2:]))
        full, stored = treedef.unflatten(slices)
        small = dict(zip(update.small, operands.small, strict=True))
        stored = [dataclasses.replace(q, shape=shape) for q in stored]
        news = update_slice(update, full, small, stored, shape)

        # Quantize.
        written: list[Any] = []
        for output, new in zip(update.outputs, news, strict=True):
            if output in update.stored:
                old, uniform = update.stored[output], None
                if operands.noise:
                    at = 2 * list(update.stored).index(output)
                    step, first = (
                        jax.lax.dynamic_index_in_dim(x.reshape(-1), matrix, keepdims=False)
                        for x in operands.noise[at : at + 2]
                    )
                    index = _index(shape, update.shape[-1], row, operands.places)
                    uniform = uniform_at(index + first, step)
                written.append(quantize(new, old.format, old.signed, update.rounding, uniform))
            else:
                written.append(new)
        results = []
        for x, new in zip(made, jax.tree.leaves(written), strict=True):
            size, start = window(x, matrix, row, num)
            results.append(jax.lax.dynamic_update_slice(x, new.reshape(size), start))
        return results

    num_matrices = math.prod(lead)
    height = min(rows, max(_TILE_ROWS, _STEP_SIZE // columns // _TILE_ROWS * _TILE_ROWS))
    num = rows // height
    num -= 0 < rows - num * height < BLOCK_ROWS  # the last rows are a full block at least
    made = jax.lax.fori_loop(
        0,
        num_matrices * num,
        lambda i, made: update_block(made, i // num, i % num * height, height),
        made,
    )
    if last := rows - num * height:
        made = jax.lax.fori_loop(
            0, num_matrices, lambda i, made: update_block(made, i, num * height, last), made
        )
    return [x.reshape(like.shape) for x, like in zip(made, types, strict=True)]


def _matrices(x: jax.Array) -> jax.Array:
    """Returns an array of at most three dims: a reshape next to the loop may cost a copy."""
    return x if x.ndim < 4 else x.reshape(-1, *x.shape[-2:])  # (matrices, rows, columns)


def _index(shape: Any, columns: int, row: Any, places: Sequence[jax.Array]) -> jax.Array:
    """Returns the index of each element in its matrix of the full array, modulo 2**32."""
    first, left = (place[0].astype(jnp.uint32) for place in places)
    rows, others = (jax.lax.broadcasted_iota(jnp.uint32, shape, d) for d in (0, 1))
    first += jnp.asarray(row, jnp.uint32)
    return (rows + first) * jnp.uint32(columns & 0xFFFFFFFF) + (others + left)
