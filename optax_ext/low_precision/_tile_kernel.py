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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from optax_ext._types import Array, DType, Tree
from optax_ext.low_precision import _one_pass
from optax_ext.low_precision._formats import Quantized
from optax_ext.low_precision._quantize import BLOCK_ROWS, quantize, rounding_of
from optax_ext.low_precision._rounding import uniform_at

_LANES, _ROWS = 128, 64  # of a slice: 8 registers of float32
_SLICE = (_ROWS, _LANES)
_GROUPS = (_ROWS // BLOCK_ROWS, _LANES)  # groups of 8 rows in a slice, with a scale in every lane
_TILE_SIZE = 64 * 4096  # elements: 1 MiB of float32, read while the previous tile is computed
_EXTRA_BYTES = 4 * 2**20  # of on-chip memory, beside two tiles of everything


class _Inputs(NamedTuple):
    """What the kernel reads: arrays, their blocks, or refs to these."""

    floats: Any  # those of ``Operands.small``; this and the next two are in scalar memory
    integers: Any  # the others of them; then this device's first row, and its first column
    noise: Any
    rows: list[Any]  # by slice; of a tile (slices, rows of a slice)
    columns: list[Any]  # of a tile (1, columns)
    full: list[Any]  # (matrices, rows, columns); a tile is two-dimensional
    stored: list[Quantized]


def update_tiles(update: _one_pass.OnePass, operands: _one_pass.Operands) -> list[jax.Array]:
    """Returns the outputs of a pass, and its sums of each tile: (..., tiles, what is left)."""
    shape = operands.stored[0].codes.shape
    blocks = _one_pass.blocks_of(operands.stored[0]).rows_and_columns
    transposed = _is_transposed(*shape[-2:])
    if transposed:
        full, stored = _swapped((operands.full, operands.stored))
        operands = operands._replace(places=operands.places[::-1], full=full, stored=stored)
        operands = operands._replace(rows=operands.columns, columns=operands.rows)
        update = update._replace(rows=update.columns, columns=update.rows)
        shape = (*shape[:-2], shape[-1], shape[-2])
        blocks = blocks[::-1]
    tiling = _Tiling(shape, blocks, transposed)
    types, aliases = _one_pass.results_of(update, operands)
    leaves = _call(update, operands, tiling, types, aliases)
    types = jax.tree.leaves(types)
    out = [x.reshape(like.shape) for x, like in zip(leaves, types, strict=False)]
    out = _swapped(out) if transposed else out
    return out + list(map(tiling.by_tile, leaves[len(types) :]))


def _inputs(operands: _one_pass.Operands, tiling: "_Tiling") -> _Inputs:
    floats = [x.astype(jnp.float32) for x in operands.small if _is_float(x)]
    integers = [x.astype(jnp.int32) for x in operands.small if not _is_float(x)]
    full, stored = jax.tree.map(tiling.matrices_of, (operands.full, operands.stored))
    return _Inputs(
        floats=_stack(floats),
        integers=_stack(integers + [x[:1] for x in operands.places]),
        noise=_stack([jax.lax.bitcast_convert_type(x, jnp.int32) for x in operands.noise]),
        rows=list(map(tiling.by_slice, operands.rows)),
        columns=[x.reshape(tiling.matrices[0], 1, 1, -1) for x in operands.columns],
        full=full,
        stored=stored,
    )


def _call(
    update: _one_pass.OnePass,
    operands: _one_pass.Operands,
    tiling: "_Tiling",
    results: list[Any],  # types
    aliases: dict[int, int],  # of leaves of the full and stored operands, and of results
) -> list[jax.Array]:
    """Runs the kernel; returns the arrays of the results, and sums of all tiles."""
    inputs = _inputs(operands, tiling)
    smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    of_rows = [tiling.vector(True, False)[1]] * len(inputs.rows)
    of_columns = [tiling.vector(False, False)[1]] * len(inputs.columns)
    full, stored = jax.tree.map(tiling.spec, (operands.full, operands.stored))
    sums = [tiling.vector(not over_rows, True) for over_rows in tiling.sums_rows(update)]
    rows, columns = tiling.tile
    num_stored = len(stored)
    both = jax.tree.leaves((operands.full, operands.stored, results))
    tile_bytes = rows * columns * sum(x.dtype.itemsize for x in both)
    num_before = 3 + len(of_rows) + len(of_columns)
    made = pl.pallas_call(
        functools.partial(_update_tile, update, operands, tiling),
        grid=tiling.grid,
        in_specs=[_Inputs(smem, smem, smem, of_rows, of_columns, full, stored)],
        out_specs=[*jax.tree.map(tiling.spec, results), *(spec for _, spec in sums)],
        out_shape=[*jax.tree.map(tiling.type_of_matrices, results), *(shape for shape, _ in sums)],
        scratch_shapes=[
            [pltpu.VMEM((columns // _LANES, rows // BLOCK_ROWS, _LANES), jnp.float32)] * num_stored,
            [pltpu.VMEM(_SLICE, jnp.float32)] * num_stored,
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
    )(inputs)
    return jax.tree.leaves(made)


# --- The kernel -----------------------------------------------------------------------------------


def _update_tile(
    update: _one_pass.OnePass,
    operands: _one_pass.Operands,
    tiling: "_Tiling",
    inputs: _Inputs,
    *outputs: Any,  # tiles of the results, sums; memory for scales in every lane, and for a slice
) -> None:
    *made, spread, memory = outputs
    sums = made[len(update.outputs) :]
    over_rows = tiling.sums_rows(update)
    at = [pl.program_id(d) for d in range(3)]
    strides = (update.shape[-1], 1)[:: -1 if tiling.transposed else 1]
    offsets = _iota(0) * strides[0] + _iota(1) * strides[1]
    tile = _Tile(update, operands, tiling, inputs, made, spread, memory, at, strides, offsets)
    for q, scales in zip(inputs.stored, spread, strict=True):
        _spread(q.scale[0][...], tiling.blocks, scales)
    for out in itertools.compress(sums, over_rows):
        out[...] = jnp.zeros(out.shape, out.dtype)
    # Slices that begin beyond the array are not computed, others are masked if they end there.
    down, across = map(_num_slices, tiling.matrices[1:], tiling.tile, _SLICE, at[1:])

    def slices_of_rows(i: Any, _: None) -> None:
        rows = [jnp.broadcast_to(_transposed(x[pl.ds(i, 1), :]), _SLICE) for x in inputs.rows]
        along = [out for out, over in zip(sums, over_rows, strict=True) if not over]
        totals = [jnp.zeros(_SLICE, jnp.float32)] * len(along)
        one_slice = functools.partial(tile.update_slice, i, rows)
        totals = jax.lax.fori_loop(0, across, one_slice, totals)
        for out, total in zip(along, totals, strict=True):
            out[pl.ds(i, 1), :] = _transposed(jnp.sum(total, 1, keepdims=True))

    jax.lax.fori_loop(0, down, slices_of_rows, None)
    for output, out in zip(update.outputs, made, strict=False):
        if output in update.stored:
            k = list(update.stored).index(output)
            _gather_up(spread[k], tiling.blocks, out.scale[0])


class _Place(NamedTuple):
    """Where a slice is."""

    here: Any  # its rows and columns in the tile
    blocks: Any  # those of its blocks in the memory for scales in every lane
    first: list[Any]  # its first row and column in this device's matrix
    inside: Any  # which of its elements are in the array; None: all of them


class _Tile(NamedTuple):
    """One tile: what is known while tracing, and refs."""

    update: _one_pass.OnePass
    operands: _one_pass.Operands  # of this device, of which types count
    tiling: "_Tiling"
    inputs: _Inputs
    made: list[Any]  # results, then sums
    spread: list[Any]  # by stored array, memory for scales in every lane
    memory: list[Any]  # likewise, for a slice
    at: list[Any]  # the number of the matrix, and of the tile down and across in it
    strides: tuple[int, ...]  # of rows and columns, in a matrix of the full array
    offsets: jax.Array  # there, of the elements of a slice

    def update_slice(
        self, i: Any, rows: list[jax.Array], j: Any, totals: list[jax.Array]
    ) -> list[jax.Array]:
        """Updates one slice; returns totals to which its sums over columns are added."""
        update = self.update
        place = self._place(i, j)
        slices = []
        for q, scales in zip(self.inputs.stored, self.spread, strict=True):
            rest = None if q.rest is None else q.rest[place.here]
            arrays = q.codes[place.here], (scales[place.blocks],), rest
            slices.append(Quantized(*arrays, q.shape, q.dtype, q.format, q.signed))
        full = [x[place.here] for x in self.inputs.full]
        values = self._values(rows, place)
        in_lanes = _SliceBlocks(self.tiling.blocks)
        news = _one_pass.update_slice(update, full, values, slices, _SLICE, in_lanes)
        num = len(update.outputs)
        for output, out, new in zip(update.outputs, self.made, news, strict=False):
            if output in update.stored:
                self._quantize(list(update.stored).index(output), out, new, place)
            else:
                out[place.here] = new

        summed = [x if place.inside is None else jnp.where(place.inside, x, 0) for x in news[num:]]
        over_rows = self.tiling.sums_rows(update)
        for out, x in itertools.compress(zip(self.made[num:], summed, strict=True), over_rows):
            out[:, place.here[1]] += jnp.sum(x, 0, keepdims=True)
        along = (x for x, over in zip(summed, over_rows, strict=True) if not over)
        return [total + x for total, x in zip(totals, along, strict=True)]

    def _place(self, i: Any, j: Any) -> _Place:
        here = (_window(i, _ROWS), _window(j, _LANES))
        tiles = zip((i, j), _SLICE, self.at[1:], self.tiling.tile, strict=True)
        row, column = (k * size + t * extent for k, size, t, extent in tiles)
        extents = self.tiling.matrices[1:]
        inside = None
        if any(n % size for n, size in zip(extents, _SLICE, strict=True)):
            inside = (row + _iota(0) < extents[0]) & (column + _iota(1) < extents[1])
        return _Place(here, (j, _window(i, _GROUPS[0])), [row, column], inside)

    def _values(self, rows: list[jax.Array], place: _Place) -> dict[int, jax.Array]:
        """Returns numbers, rows and columns, as large as a slice, by their numbers in the graph."""
        floats = (self.inputs.floats[k] for k in itertools.count())
        integers = (self.inputs.integers[k] for k in itertools.count())
        small = [next(floats if _is_float(x) else integers) for x in self.operands.small]
        columns = [jnp.broadcast_to(x[:, place.here[1]], _SLICE) for x in self.inputs.columns]
        numbers = (*self.update.small, *self.update.rows, *self.update.columns)
        dtypes = [self.update.graph.types[v].dtype for v in numbers]
        arrays = map(_as_dtype, [*small, *rows, *columns], dtypes)
        return dict(zip(numbers, arrays, strict=True))

    def _quantize(self, k: int, out: Any, new: jax.Array, place: _Place) -> None:
        """Writes stored array ``k`` of a slice; its scales to the memory for them."""
        old = self.inputs.stored[k]
        uniform = self._uniform(k, place) if self.operands.noise and old.rest is None else None
        # Beyond the array elements are 0: they must not be the largest of a block.
        new = new if place.inside is None else jnp.where(place.inside, new, 0)
        in_lanes = _SliceBlocks(self.tiling.blocks, self.memory[k])
        rounding = rounding_of(old, uniform)
        q = quantize(new, old.format, old.signed, rounding, uniform, in_lanes)
        out.codes[place.here] = q.codes
        self.spread[k][place.blocks] = q.scale[0]
        if q.rest is not None:
            out.rest[place.here] = q.rest

    def _uniform(self, k: int, place: _Place) -> jax.Array:
        """Returns the noise of stored array ``k`` in a slice, by places in the full array."""
        row, column = place.first
        num = self.inputs.integers.shape[0]
        shard = [self.inputs.integers[num - 2 + d] for d in range(2)]
        first = (row + shard[0]) * self.strides[0] + (column + shard[1]) * self.strides[1]
        matrix = 2 * k * self.tiling.matrices[0] + self.at[0]
        first += self.inputs.noise[matrix + self.tiling.matrices[0]]
        hashes = self.inputs.noise[matrix].astype(jnp.uint32)
        return uniform_at((self.offsets + first).astype(jnp.uint32), hashes)


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
        self.shape = shape
        self.blocks = blocks
        self.transposed = transposed
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

    def type_of_matrices(self, x: Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.matrices[0], *x.shape[-2:]), x.dtype)

    def matrices_of(self, x: jax.Array) -> jax.Array:
        return x.reshape(self.type_of_matrices(x).shape)

    def spec(self, x: Array) -> pl.BlockSpec:
        is_full = tuple(x.shape[-2:]) == tuple(self.shape[-2:])
        tile = self.tile if is_full else self.scale_tile
        return pl.BlockSpec((None, *tile), lambda matrix, i, j: (matrix, i, j))


class _SliceBlocks:
    """``Blocks`` of a slice, of which each lane has its value; ``memory`` is for a slice."""

    def __init__(self, blocks: tuple[int, int], memory: Any = None):
        self._blocks = blocks
        self._memory = memory

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
    groups = blocks[0] // BLOCK_ROWS
    lanes = blocks[1]
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
    every = pl.ds(0, rows, stride=blocks[0] // BLOCK_ROWS)
    lanes = blocks[1]
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


def _is_float(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _as_dtype(x: jax.Array, dtype: DType) -> jax.Array:
    return x != 0 if dtype == jnp.bool_ else x.astype(dtype)
