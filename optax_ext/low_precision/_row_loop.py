"""A loop over rows for 8-bit state on TPUs, by XLA: decode, update and encode, block by block.

As one expression, XLA would write the scales of all elements, and float32 moments, to main memory.
Here each step of the loop updates rows of all arrays in place, and its intermediates are so small
that they stay in a TPU's fast memory.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_ext.low_precision._formats import BLOCK_ROWS, decode, encode
from optax_ext.low_precision._rounding import uniform_at
from optax_ext.low_precision._tile_kernel import Kernel, from_parts, on_slice, parts_of, sections

_BLOCK = (BLOCK_ROWS, 32)  # rows and columns
_STEP_SIZE = 2**21  # elements that a step of the loop updates
_MIN_STEP = 2**16  # fewer elements in a matrix of a stack make the loop slow
_TILE_ROWS = 32  # of codes in memory


class RowLoop(Kernel):
    """The function of a device's arrays that ``_tile_kernel.run`` calls, as a loop.

    Attributes:
      min_size: elements of a shard from which a loop is worth it.
      min_padded: the same where its last blocks end beyond it: XLA would write padded arrays.
    """

    min_size: float = 2**24
    min_padded = 2**22

    @classmethod
    def takes(cls, shard: Sequence[int]) -> bool:
        """Whether a matrix, or stack of matrices, is worth a loop."""
        pairs = list(zip(shard[-2:], _BLOCK, strict=False))
        padded = any(n % size for n, size in pairs)
        large = math.prod(shard) >= (cls.min_padded if padded else cls.min_size)
        has_blocks = len(shard) > 1 and all(n >= size for n, size in pairs)
        return has_blocks and large and math.prod(shard[-2:]) >= _MIN_STEP

    def __call__(self, *operands: jax.Array) -> list[jax.Array]:
        """Updates the arrays of one device."""
        num_noise = 2 * len(self._stored) * self._is_noisy
        small, noise, places, arrays = sections(
            operands, len(self._small_dtypes), num_noise, 2, self._num_arrays
        )
        results, aliases = self._result_types(arrays)
        arrays = [_matrices(x) for x in arrays]
        made = [_matrices(jnp.zeros(like.shape, like.dtype)) for like in results]
        for k, n in aliases.items():
            made[n] = arrays[k]
        *lead, rows, columns = arrays[self._parts_at[self._plan.stored[0]]].shape
        num_matrices = math.prod(lead)

        def update_rows(made: list[jax.Array], matrix: Any, row: Any, num: int) -> list[jax.Array]:
            """Updates ``num`` rows of a matrix in the results."""
            shape = (num, columns)

            def window(x: jax.Array) -> tuple[tuple[int, ...], tuple[Any, ...]]:
                """Returns the shape and start of these rows, or of their scales."""
                per_row = BLOCK_ROWS if x.shape[-2] < rows else 1
                lead = x.ndim - 2
                size = (*[1] * lead, -(-num // per_row), x.shape[-1])
                return size, (*[matrix] * lead, row // per_row, 0)

            def read(k: int) -> jax.Array:
                x = made[aliases[k]] if k in aliases else arrays[k]
                size, start = window(x)
                return jax.lax.dynamic_slice(x, start, size).reshape(size[-2:])

            # Decode.
            values: dict[int, Any] = dict(self._plan.literals)
            values |= zip(self._plan.small, small, strict=True)
            values |= {v: read(k) for k, v in enumerate(self._plan.full)}
            for v, q in self._stored.items():
                at = self._parts_at[v]
                parts = [read(k) for k in range(at, at + len(parts_of(q)))]
                values[v] = decode(dataclasses.replace(from_parts(parts, q), shape=shape))

            # Update.
            for eqn in self._plan.equations:
                values |= zip(eqn.results, on_slice(eqn, values, shape), strict=True)

            # Encode.
            written: list[jax.Array] = []
            for output in self._results_at:
                new = jnp.broadcast_to(values[self._graph.outputs[output]], shape)
                if output in self._stored:
                    old, uniform = self._stored[output], None
                    if self._is_noisy:
                        at = 2 * self._plan.stored.index(output)
                        step, first = (_element(x, matrix) for x in noise[at : at + 2])
                        index = _index(shape, self._plan.shape[-1], row, places)
                        uniform = uniform_at(index + first, step)
                    q = encode(new, old.format, old.signed, self._rounding, uniform)
                    written += parts_of(q)
                elif output == self._plan.root and self._param is not None:
                    param = read(self._param)
                    written.append((param + new).astype(param.dtype))  # as optax.apply_updates
                else:
                    written.append(new)
            windows = [window(x) for x in made]
            return [
                jax.lax.dynamic_update_slice(x, y.reshape(size), start)
                for x, y, (size, start) in zip(made, written, windows, strict=True)
            ]

        height = min(rows, max(_TILE_ROWS, _STEP_SIZE // columns // _TILE_ROWS * _TILE_ROWS))
        num = rows // height
        num -= 0 < rows - num * height < BLOCK_ROWS  # the last rows are a full block at least
        made = jax.lax.fori_loop(
            0,
            num_matrices * num,
            lambda i, made: update_rows(made, i // num, i % num * height, height),
            made,
        )
        if rest := rows - num * height:
            made = jax.lax.fori_loop(
                0, num_matrices, lambda i, made: update_rows(made, i, num * height, rest), made
            )
        return [x.reshape(like.shape) for x, like in zip(made, results, strict=True)]


class LoopOfUpdates(RowLoop):
    """A loop without the parameters inside; XLA adds the updates of unpadded arrays to them."""

    min_size = math.inf


def _matrices(x: jax.Array) -> jax.Array:
    """Returns an array of at most three dims: a reshape next to the loop may cost a copy."""
    return x if x.ndim < 4 else x.reshape(-1, *x.shape[-2:])


def _element(x: jax.Array, i: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x.reshape(-1), i, keepdims=False)


def _index(
    shape: tuple[int, int], columns: int, row: Any, places: Sequence[jax.Array]
) -> jax.Array:
    """Returns the index of each element in its matrix of the full array, modulo 2**32."""
    first, left = (place[0].astype(jnp.uint32) for place in places)
    rows, others = (jax.lax.broadcasted_iota(jnp.uint32, shape, d) for d in (0, 1))
    first += jnp.asarray(row, jnp.uint32)
    return (rows + first) * jnp.uint32(columns & 0xFFFFFFFF) + (others + left)
