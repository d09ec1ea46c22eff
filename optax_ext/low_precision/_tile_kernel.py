"""A Pallas kernel for 8-bit state on TPUs: dequantize, update and quantize, tile by tile.

A tile has some 64 rows by 4,096 columns; the kernel loops over slices of 64 x 128 elements, whose
values stay in registers. Blocks have 8 rows, so that the maximum of a block is one over sublanes,
then a butterfly over lanes. In the kernel each lane of a block has its scale. Matrices that memory
transposes, which has their rows as lanes, are transposed here: their blocks have four or two times
8 sublanes.
"""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from optax_ext._types import Array, DType, Tree
from optax_ext.low_precision import _one_pass
from optax_ext.low_precision._formats import Quantized
from optax_ext.low_precision._quantize import BLOCK_ROWS, quantize
from optax_ext.low_precision._rounding import uniform_at

_LANES, _ROWS = 128, 64  # of a slice: 8 registers of float32
_SLICE = (_ROWS, _LANES)
_GROUPS = (_ROWS // BLOCK_ROWS, _LANES)  # groups of 8 rows in a slice, with a scale in every lane
_TILE_SIZE = 64 * 4096  # elements: 1 MiB of float32, read while the previous tile is computed
_EXTRA_BYTES = 4 * 2**20  # of on-chip memory, beside two tiles of everything


def update_tiles(update: _one_pass.OnePass, operands: _one_pass.Operands) -> list[jax.Array]:
    """Returns the outputs of a pass, and its sums of each tile: (..., tiles, what is left)."""
    shape, blocks = operands.stored[0].codes.shape, _one_pass.blocks_of_pass(update)
    transposed = _is_transposed(*shape[-2:])
    if transposed:
        full, stored = _swapped((operands.full, operands.stored))
        operands = operands._replace(places=operands.places[::-1], full=full, stored=stored)
        operands = operands._replace(rows=operands.columns, columns=operands.rows)
        update = update._replace(rows=update.columns, columns=update.rows)
        shape, blocks = (*shape[:-2], shape[-1], shape[-2]), blocks[::-1]
    full, stored = operands.full, operands.stored
    tiling = _Tiling(shape, blocks, transposed)
    # In scalar memory: floats; integers, with a shard's first row and column; noise.
    is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in operands.small]
    floats, integers = ([k for k, x in enumerate(is_float) if x == kind] for kind in (True, False))
    numbers = [operands.small[k].astype(jnp.int32) for k in integers]
    scalars = [
        _stack([operands.small[k].astype(jnp.float32) for k in floats]),
        _stack(numbers + [x[:1] for x in operands.places]),
        _stack([jax.lax.bitcast_convert_type(x, jnp.int32) for x in operands.noise]),
    ]
    results, aliases = _one_pass.results_of(update, operands)
    num_matrices, (rows, columns) = tiling.matrices[0], tiling.tile
    sums = [tiling.vector(not over_rows, True) for over_rows in tiling.sums_rows(update)]

    def matrices(x: Array) -> tuple[int, ...]:
        return num_matrices, *x.shape[-2:]

    num_before = len(scalars) + len(operands.rows) + len(operands.columns)
    both = jax.tree.leaves((full, stored, results))
    tile_bytes = rows * columns * sum(x.dtype.itemsize for x in both)
    made = pl.pallas_call(
        functools.partial(_update_tile, update, operands, tiling, (floats, integers)),
        grid=tiling.grid,
        in_specs=(
            [pl.BlockSpec(memory_space=pltpu.SMEM)] * len(scalars),
            [tiling.vector(True, False)[1]] * len(operands.rows),
            [tiling.vector(False, False)[1]] * len(operands.columns),
            *jax.tree.map(tiling.spec, (full, stored)),
        ),
        out_specs=[*jax.tree.map(tiling.spec, results), *(spec for _, spec in sums)],
        out_shape=[
            *jax.tree.map(lambda x: jax.ShapeDtypeStruct(matrices(x), x.dtype), results),
            *(shape for shape, _ in sums),
        ],
        scratch_shapes=[
            [pltpu.VMEM((columns // _LANES, rows // BLOCK_ROWS, _LANES), jnp.float32)]
            * len(stored),
            [pltpu.VMEM(_SLICE, jnp.float32)] * len(stored),
        ],
        input_output_aliases={num_before + k: n for k, n in aliases.items()},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 3, vmem_limit_bytes=2 * tile_bytes + _EXTRA_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=len(update.equations) * math.prod(tiling.shape),
            transcendentals=0,
            bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in both),
        ),
        interpret=update.interpret,
        name="low_precision_step",
    )(
        scalars,
        list(map(tiling.by_slice, operands.rows)),
        [x.reshape(num_matrices, 1, 1, -1) for x in operands.columns],
        *jax.tree.map(lambda x: x.reshape(matrices(x)), (full, stored)),
    )
    leaves, types = jax.tree.leaves(made), jax.tree.leaves(results)
    out = [x.reshape(like.shape) for x, like in zip(leaves, types, strict=False)]
    out = _swapped(out) if transposed else out
    return out + list(map(tiling.by_tile, leaves[len(types) :]))


def _update_tile(
    update: _one_pass.OnePass,
    operands: _one_pass.Operands,  # of this device, of which types count
    tiling: "_Tiling",
    of_kinds: tuple[list[int], list[int]],  # which of operands.small are floats, which integers
    scalars: list[Any],  # floats; integers, with this device's first row and column; noise
    of_rows: list[Any],  # (slices, rows of a slice)
    of_columns: list[Any],  # (1, columns)
    full: list[Any],  # tiles
    stored: list[Quantized],  # of tiles
    *outputs: Any,  # tiles of the results, sums; memory for scales in every lane, and for a slice
) -> None:
    *made, spread, memory = outputs
    made, sums = made[: len(update.outputs)], made[len(update.outputs) :]
    over_rows = tiling.sums_rows(update)
    floats, integers, noise = scalars
    tile = [pl.program_id(d) for d in range(3)]
    for q, scales in zip(stored, spread, strict=True):
        _spread(q.scale[0][...], tiling.blocks, scales)

    # Slices that begin beyond the array are not computed, others are masked if they end there.
    extents = tiling.matrices[1:]
    num = [_num_slices(*x) for x in zip(extents, tiling.tile, _SLICE, tile[1:], strict=True)]
    # Of a slice's elements, in a matrix of the full array.
    strides = (update.shape[-1], 1)[:: -1 if tiling.transposed else 1]
    places = _iota(0) * strides[0] + _iota(1) * strides[1]

    for out in itertools.compress(sums, over_rows):
        out[...] = jnp.zeros(out.shape, out.dtype)

    def one_slice(i: Any, rows: list[jax.Array], j: Any, totals: list[jax.Array]) -> Any:
        columns = _window(j, _LANES)
        here, blocks = (_window(i, _ROWS), columns), (j, _window(i, _GROUPS[0]))
        # Its first row and column in this device's matrix.
        row, column = (
            k * size + t * extent
            for k, size, t, extent in zip((i, j), _SLICE, tile[1:], tiling.tile, strict=True)
        )
        inside = None  # all elements are
        if any(n % size for n, size in zip(extents, _SLICE, strict=True)):
            inside = (row + _iota(0) < extents[0]) & (column + _iota(1) < extents[1])

        # Dequantize and update.
        small = {
            update.small[k]: _as_dtype(ref[place], operands.small[k].dtype)
            for kind, ref in zip(of_kinds, (floats, integers), strict=True)
            for place, k in enumerate(kind)
        }
        vectors = [*rows, *(jnp.broadcast_to(x[:, columns], _SLICE) for x in of_columns)]
        for v, x in zip((*update.rows, *update.columns), vectors, strict=True):
            small[v] = _as_dtype(x, update.graph.types[v].dtype)
        slices = []
        for q, scales in zip(stored, spread, strict=True):
            arrays = q.codes[here], (scales[blocks],), None if q.rest is None else q.rest[here]
            slices.append(Quantized(*arrays, q.shape, q.dtype, q.format, q.signed))
        in_lanes = _SliceBlocks(tiling.blocks)
        news = _one_pass.update_slice(
            update, [x[here] for x in full], small, slices, _SLICE, in_lanes
        )

        # Quantize.
        for output, out, new in zip(update.outputs, made, news, strict=False):
            if output in update.stored:
                k, uniform = list(update.stored).index(output), None
                if operands.noise:
                    shard = [integers[len(of_kinds[1]) + d] for d in range(2)]
                    first = (row + shard[0]) * strides[0] + (column + shard[1]) * strides[1]
                    matrix = 2 * k * tiling.matrices[0] + tile[0]
                    first += noise[matrix + tiling.matrices[0]]
                    uniform = uniform_at(
                        (places + first).astype(jnp.uint32), noise[matrix].astype(jnp.uint32)
                    )
                # Beyond the array elements are 0: they must not be the largest of a block.
                new = new if inside is None else jnp.where(inside, new, 0)
                old, in_lanes = update.stored[output], _SliceBlocks(tiling.blocks, memory[k])
                q = quantize(new, old.format, old.signed, update.rounding, uniform, in_lanes)
                out.codes[here] = q.codes
                spread[k][blocks] = q.scale[0]
                if q.rest is not None:
                    out.rest[here] = q.rest
            else:
                out[here] = new

        # Sum.
        summed = [x if inside is None else jnp.where(inside, x, 0) for x in news[len(made) :]]
        for out, x in itertools.compress(zip(sums, summed, strict=True), over_rows):
            out[:, columns] += jnp.sum(x, 0, keepdims=True)
        along = (x for x, over in zip(summed, over_rows, strict=True) if not over)
        return [total + x for total, x in zip(totals, along, strict=True)]

    def slices_of_rows(i: Any, _: None) -> None:
        rows = [jnp.broadcast_to(_transposed(x[pl.ds(i, 1), :]), _SLICE) for x in of_rows]
        along = [out for out, over in zip(sums, over_rows, strict=True) if not over]
        totals = [jnp.zeros(_SLICE, jnp.float32)] * len(along)
        totals = jax.lax.fori_loop(0, num[1], functools.partial(one_slice, i, rows), totals)
        for out, total in zip(along, totals, strict=True):
            out[pl.ds(i, 1), :] = _transposed(jnp.sum(total, 1, keepdims=True))

    jax.lax.fori_loop(0, num[0], slices_of_rows, None)
    for output, out in zip(update.outputs, made, strict=True):
        if output in update.stored:
            k = list(update.stored).index(output)
            _gather_up(spread[k], tiling.blocks, out.scale[0])


# --- Tiles and slices -----------------------------------------------------------------------------


def _is_transposed(rows: int, columns: int) -> bool:
    """Whether rows are the minor dim in memory, where the least is added to fill registers."""

    def padded(rows: int, columns: int) -> int:
        return _multiple(rows, 8) * _multiple(columns, _LANES)

    return padded(columns, rows) < padded(rows, columns)


def _swapped(tree: Tree) -> Any:
    return jax.tree.map(lambda x: jnp.swapaxes(x, -1, -2), tree)


class _Tiling:
    """The tiles of a shard, taken as matrices of its last two dims."""

    def __init__(self, shape: tuple[int, ...], blocks: tuple[int, int], transposed: bool):
        self.shape, self.blocks, self.transposed = shape, blocks, transposed
        *lead, rows, columns = shape
        block_rows, block_columns = blocks
        self.matrices = math.prod(lead), rows, columns  # their number and dims
        # Where there are several tiles side by side, those of the scales have 128 columns, and
        # where there are several below each other, a multiple of 8 rows.
        width = min(_LANES * block_columns, _multiple(columns, _LANES))
        step = max(_ROWS, 8 * block_rows)
        height = min(_TILE_SIZE // width // step * step, _multiple(rows, _ROWS))
        self.tile = height, width  # multiples of those of a slice
        self.scale_tile = (
            min(height, _multiple(rows, block_rows)) // block_rows,
            min(width, _multiple(columns, block_columns)) // block_columns,
        )
        # Tiles along each dim of ``matrices``.
        self.grid = self.matrices[0], pl.cdiv(rows, height), pl.cdiv(columns, width)

    def sums_rows(self, update: _one_pass.OnePass) -> list[bool]:
        """Returns for each sum whether it is over rows of the tiles, otherwise over columns."""
        return [_one_pass.sums_rows(eqn, update.shape) != self.transposed for eqn in update.sums]

    def vector(self, has_rows: bool, of_tiles: bool) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
        """Returns type and blocks of a vector over rows, by slice, or columns; or of each tile's.

        The second dim are the tiles whose rows, or columns, are the same.
        """
        num, down, across = self.grid
        shape: Any = num, down if of_tiles else 1, 1, self.matrices[2]
        spec = pl.BlockSpec((None, None, 1, self.tile[1]), lambda m, i, j: (m, i * of_tiles, 0, j))
        if has_rows:
            shape = num, across if of_tiles else 1, down, self.tile[0] // _ROWS, _ROWS
            spec = pl.BlockSpec((None,) * 3 + shape[3:], lambda m, i, j: (m, j * of_tiles, i, 0, 0))
        return jax.ShapeDtypeStruct(shape, jnp.float32), spec

    def by_slice(self, x: jax.Array) -> jax.Array:
        """Returns a vector over rows, (..., rows), in such a form."""
        x = x.reshape(self.matrices[:2])
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % self.tile[0])))
        return x.reshape(self.vector(True, False)[0].shape)

    def by_tile(self, x: jax.Array) -> jax.Array:
        """Returns sums of each tile as (..., tiles, columns) or (..., tiles, rows)."""
        columns = self.matrices[2] if x.ndim == 4 else self.matrices[1]
        return x.reshape(*self.shape[:-2], x.shape[1], -1)[..., :columns]

    def spec(self, x: Array) -> pl.BlockSpec:
        is_full = tuple(x.shape[-2:]) == tuple(self.shape[-2:])
        tile = self.tile if is_full else self.scale_tile
        return pl.BlockSpec((None, *tile), lambda matrix, i, j: (matrix, i, j))


class _SliceBlocks:
    """``Blocks`` of a slice, of which each lane has its value; ``memory`` is for a slice."""

    def __init__(self, blocks: tuple[int, int], memory: Any = None):
        self._blocks, self._memory = blocks, memory

    def largest(self, x: jax.Array, signed: bool = True) -> jax.Array:
        """As ``Blocks.largest``, of floats: Mosaic has no maximum of uint32."""
        rows = self._rows(jnp.where(jnp.isnan(x), jnp.inf, x))
        high = self._over_blocks(functools.reduce(jnp.maximum, rows))
        if not signed:
            return high
        low = self._over_blocks(-functools.reduce(jnp.minimum, rows))
        return jnp.where(high >= low, high, -low)

    def _rows(self, x: jax.Array) -> list[jax.Array]:
        """Returns the first row of every group of 8, the second and so on: (groups, lanes)."""
        # Strided loads need no arithmetic; a maximum over sublanes rotates every register.
        self._memory[...] = x  # (64, 128)
        return [self._memory[pl.ds(k, _GROUPS[0], stride=BLOCK_ROWS), :] for k in range(BLOCK_ROWS)]

    def _over_blocks(self, x: jax.Array) -> jax.Array:
        """Returns the maximum of each block in all its groups and lanes, by butterflies."""
        for dim, num in enumerate((self._blocks[0] // BLOCK_ROWS, self._blocks[1])):
            place = jax.lax.broadcasted_iota(jnp.int32, _GROUPS, dim)
            step = 1
            while step < num:  # places whose numbers differ in one bit
                x = jnp.maximum(x, _take(x, place ^ step, dim))
                step *= 2
        return x

    def repeat(self, per_block: jax.Array) -> jax.Array:
        shape = (_GROUPS[0], BLOCK_ROWS, _LANES)
        return jnp.broadcast_to(per_block[:, None, :], shape).reshape(_SLICE)


def _spread(scale: jax.Array, blocks: tuple[int, int], out: Tree) -> None:
    """Writes the scales of a tile to every group of 8 rows and lane of their block in ``out``."""
    groups, lanes = blocks[0] // BLOCK_ROWS, blocks[1]
    lane = jax.lax.broadcasted_iota(jnp.int32, (scale.shape[0], _LANES), 1)
    scale = jnp.pad(scale, ((0, 0), (0, -scale.shape[1] % _LANES)))
    for place in range(out.shape[0]):
        first = place * _LANES // lanes  # block of the first lane
        group = first // _LANES * _LANES  # the register of scales that has it
        spread = _take(
            scale[:, group : group + _LANES],
            _quotient_and_remainder(lane, lanes)[0] + first % _LANES,
        )
        for k in range(groups):
            out.at[place][pl.ds(k, len(scale), stride=groups), :] = spread


def _gather_up(spread: Any, blocks: tuple[int, int], out: Tree) -> None:
    """Inverts ``_spread``: collects the scales of 128 blocks from as many registers as lanes."""
    rows, width = out.shape
    every, lanes = pl.ds(0, rows, stride=blocks[0] // BLOCK_ROWS), blocks[1]
    per_slice = _LANES // lanes  # blocks
    lane = jax.lax.broadcasted_iota(jnp.int32, (rows, _LANES), 1)
    place, block = _quotient_and_remainder(lane, per_slice)  # register and block in it, of a lane
    for group in range(0, width, _LANES):
        gathered = jnp.zeros((rows, _LANES), jnp.float32)
        for k in range(lanes):
            at = group * lanes // _LANES + k
            if at < spread.shape[0]:
                scales = _take(spread.at[at][every, :], block * lanes)
                gathered = jnp.where(place == k, scales, gathered)
        out[:, group : group + _LANES] = gathered[:, : min(_LANES, width - group)]


def _take(x: jax.Array, index: jax.Array, dim: int = 1) -> jax.Array:
    """Returns ``x[i, index[i, j]]``, or ``x[index[i, j], j]``; both (rows, 128)."""
    rows = x.shape[0]
    if rows == 1:  # of which jnp makes a gather that Mosaic does not know
        x, index = (jnp.broadcast_to(a, (BLOCK_ROWS, _LANES)) for a in (x, index))
    return jnp.take_along_axis(x, index, axis=dim, mode="promise_in_bounds")[:rows]


def _transposed(x: jax.Array) -> jax.Array:
    """Returns a row of a slice's rows as a column, or the reverse."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (_ROWS, _ROWS), d) for d in (0, 1))
    return jnp.sum(jnp.where(row == column, x, 0), x.shape.index(_ROWS), keepdims=True)


def _num_slices(extent: int, tile: int, slice_: int, at: Any) -> Any:
    """Returns how many slices of a tile begin in the array, along one dim."""
    if extent <= tile or extent % tile == 0:
        return pl.cdiv(min(extent, tile), slice_)
    inside = jnp.minimum(tile, extent - at * tile)
    return _quotient_and_remainder(inside + (slice_ - 1), slice_)[0]


def _window(i: Any, size: int) -> Any:
    return pl.ds(pl.multiple_of(i * size, size), size)


def _iota(dim: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, _SLICE, dim)


def _multiple(extent: int, of: int) -> int:
    return -(-extent // of) * of


def _stack(numbers: list[jax.Array]) -> jax.Array:
    """Returns one vector of numbers and vectors; a kernel takes no empty one."""
    return jnp.concatenate([x.reshape(-1) for x in numbers] or [jnp.zeros(1, jnp.int32)])


def _quotient_and_remainder(x: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    """Returns quotient and remainder of what is not negative; ``//`` asks for the sign."""
    number = jnp.asarray(by, jnp.int32)
    return jax.lax.div(x, number), jax.lax.rem(x, number)


def _as_dtype(x: jax.Array, dtype: DType) -> jax.Array:
    return x != 0 if dtype == jnp.bool_ else x.astype(dtype)
