"""A Triton kernel for GPUs: both sums of a matrix, over its rows and its columns, from one read.

XLA reads a matrix once for each sum. The kernel sums tiles, writes the sums of each tile, and XLA
adds these. Their order is fixed, as it would not be with atomics.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

Dims = tuple[int, ...]

_ROWS, _COLUMNS = 64, 256  # of a tile, whose sums are 1/64 and 1/256 of its elements
_MAX_SIZE = 2**31 - 1  # elements: Triton's offsets are int32
_PARAMS = triton.CompilerParams(num_warps=8, num_stages=2)


class _View(NamedTuple):
    """An array as (batch, rows, columns), each the product of adjacent dims."""

    batch: Dims
    rows: Dims
    columns: Dims

    def shape(self, x: Any) -> tuple[int, int, int]:
        """Returns the shape of an array, or of one that broadcasts against it."""
        if not x.ndim:
            return 1, 1, 1
        batch, rows, columns = (math.prod(x.shape[d] for d in dims) for dims in self)
        return batch, rows, columns


def _view(ndim: int, dims: Sequence[Dims]) -> _View | None:
    """Returns the view in which ``dims``, of two sums, are rows and columns."""
    if len(dims) != 2 or not all(dims):
        return None
    rows, columns = sorted(map(tuple, map(sorted, dims)))
    batch = tuple(range(rows[0]))
    return _View(batch, rows, columns) if batch + rows + columns == tuple(range(ndim)) else None


def applies(dims: Sequence[Dims], array: jax.Array, args: Any) -> bool:
    """Whether the kernel takes these sums of this array."""
    view = _view(array.ndim, dims)
    if view is None or array.size > _MAX_SIZE:
        return False
    full = view.shape(array)
    return all(
        n in (1, most)
        for x in jax.tree.leaves(args)
        for n, most in zip(view.shape(x), full, strict=True)
    )


def sweep(
    fn: Callable[[jax.Array, Any], tuple[jax.Array, jax.Array | None]],
    dims: Sequence[Dims],
    array: jax.Array,
    args: Any,
    interpret: bool = False,
) -> tuple[list[jax.Array], jax.Array | None]:
    """For ``(x, new) = fn(array, args)``: the means of ``x`` over each of ``dims``, and ``new``.

    Args:
      fn: an elementwise function.
      dims: of the two means; ``applies`` must hold.
      array: the matrix, over which ``new`` is written where it is the last use.
      args: a tree of arrays that broadcast against it.
      interpret: whether to run on any platform, uncompiled.
    """
    view = _view(array.ndim, dims)
    assert view is not None
    treedef: Any
    leaves, treedef = jax.tree.flatten(args)
    operands = [x.reshape(view.shape(x)) for x in (array, *leaves)]
    batch, rows, columns = full = operands[0].shape
    tile = tuple(
        min(size, pl.next_power_of_2(n)) for size, n in ((_ROWS, rows), (_COLUMNS, columns))
    )
    grid = (batch, pl.cdiv(rows, tile[0]), pl.cdiv(columns, tile[1]))
    x, new = jax.eval_shape(fn, array, args)

    def spec(shape: tuple[int, ...]) -> pl.BlockSpec:
        """The tiles of an operand; of a dim of size 1, the same for all."""
        wide = [n > 1 or most == 1 for n, most in zip(shape, full, strict=True)]
        block = (None, *(t if w else 1 for t, w in zip(tile, wide[1:], strict=True)))
        return pl.BlockSpec(
            block, lambda *at: tuple(i if w else 0 for i, w in zip(at, wide, strict=True))
        )

    def kernel(*refs: Any) -> None:
        inputs, (row_sums, column_sums, *rest) = refs[: len(operands)], refs[len(operands) :]
        row = pl.program_id(1) * tile[0] + jnp.arange(tile[0])[:, None]
        column = pl.program_id(2) * tile[1] + jnp.arange(tile[1])[None, :]
        inside = (row < rows) & (column < columns)

        def load(ref: Any) -> jax.Array:
            """Reads a tile; beyond the array 0, for memory there is not the array's."""
            mask = jnp.ones((1, 1), bool)
            mask = mask & (row < rows) if ref.shape[0] > 1 else mask
            mask = mask & (column < columns) if ref.shape[1] > 1 else mask
            mask = jnp.broadcast_to(mask, ref.shape)
            return triton.load(ref, mask=mask, other=0)

        a, *others = map(load, inputs)
        x, new = fn(a, treedef.unflatten(others))
        x = jnp.where(inside, jnp.broadcast_to(x, tile), 0)
        # Scaled before they are summed, as _matrix_passes.mean does.
        triton.store(row_sums, jnp.sum(x * (1.0 / columns), 1), mask=(row < rows)[:, 0])
        triton.store(column_sums, jnp.sum(x * (1.0 / rows), 0), mask=(column < columns)[0])
        if new is not None:
            triton.store(rest[0], new, mask=inside)

    results = [
        jax.ShapeDtypeStruct((grid[2], batch, rows), x.dtype),
        jax.ShapeDtypeStruct((grid[1], batch, columns), x.dtype),
    ]
    specs = [
        pl.BlockSpec((None, None, tile[0]), lambda k, i, j: (j, k, i)),
        pl.BlockSpec((None, None, tile[1]), lambda k, i, j: (i, k, j)),
    ]
    if new is not None:
        results.append(jax.ShapeDtypeStruct(full, new.dtype))
        specs.append(spec(full))
    sums = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[spec(x.shape) for x in operands],
        out_specs=specs,
        out_shape=results,
        input_output_aliases={0: 2} if new is not None else {},
        compiler_params=_PARAMS,
        interpret=interpret,
        name="sums_of_rows_and_columns",
    )(*operands)
    of_rows, of_columns = (jnp.sum(part, 0) for part in sums[:2])
    shapes = {
        view.columns: (of_rows, view.batch + view.rows),
        view.rows: (of_columns, view.batch + view.columns),
    }
    means = []
    for reduced in dims:
        total, kept = shapes[tuple(sorted(reduced))]
        means.append(total.reshape([array.shape[d] for d in kept]))
    return means, sums[2].reshape(array.shape) if new is not None else None
