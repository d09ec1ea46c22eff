"""A Pallas kernel for 8-bit state on TPUs: dequantize, update and quantize, tile by tile.

A tile has some 64 rows by 4,096 columns; the kernel loops over slices of 64 x 128 elements, whose
values stay in registers. Blocks have 8 rows, so that the maximum of a block is one over sublanes,
then a butterfly over lanes. In the kernel each lane of a block has its scale.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from optax_ext._types import Array, DType, Tree
from optax_ext.low_precision._formats import Quantized
from optax_ext.low_precision._one_pass import (
    OnePass,
    Operands,
    block_columns,
    results_of,
    update_slice,
)
from optax_ext.low_precision._quantize import BLOCK_ROWS, quantize
from optax_ext.low_precision._rounding import uniform_at

_LANES, _ROWS = 128, 64  # of a slice: 8 registers of float32
_SLICE = (_ROWS, _LANES)
_GROUPS = (_ROWS // BLOCK_ROWS, _LANES)  # rows of blocks in a slice, with a scale in every lane
_TILE_SIZE = 64 * 4096  # elements: 1 MiB of float32, read while the previous tile is computed
_EXTRA_BYTES = 4 * 2**20  # of on-chip memory, beside two tiles of everything


def update_tiles(update: OnePass, operands: Operands) -> list[jax.Array]:
    full, stored = operands.full, operands.stored
    tiling = _Tiling(stored[0].codes.shape, block_columns(update))
    # In scalar memory: floats; integers, with a shard's first row and column; noise.
    is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in operands.small]
    floats, integers = ([k for k, x in enumerate(is_float) if x == kind] for kind in (True, False))
    numbers = [operands.small[k].astype(jnp.int32) for k in integers]
    scalars = [
        _stack([operands.small[k].astype(jnp.float32) for k in floats]),
        _stack(numbers + [x[:1] for x in operands.places]),
        _stack([jax.lax.bitcast_convert_type(x, jnp.int32) for x in operands.noise]),
    ]
    results, aliases = results_of(update, operands)
    num_matrices, (rows, columns) = tiling.matrices[0], tiling.tile

    def matrices(x: Array) -> tuple[int, ...]:
        return num_matrices, *x.shape[-2:]

    both = jax.tree.leaves((full, stored, results))
    tile_bytes = rows * columns * sum(x.dtype.itemsize for x in both)
    made = pl.pallas_call(
        functools.partial(_update_tile, update, operands, tiling, (floats, integers)),
        grid=tiling.grid,
        in_specs=(
            [pl.BlockSpec(memory_space=pltpu.SMEM)] * len(scalars),
            *jax.tree.map(tiling.spec, (full, stored)),
        ),
        out_specs=jax.tree.map(tiling.spec, results),
        out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(matrices(x), x.dtype), results),
        scratch_shapes=[
            [pltpu.VMEM((rows // BLOCK_ROWS, columns), jnp.float32)] * len(stored),
            [pltpu.VMEM(_SLICE, jnp.float32)] * len(stored),
        ],
        input_output_aliases={len(scalars) + k: n for k, n in aliases.items()},
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
    )(scalars, *jax.tree.map(lambda x: x.reshape(matrices(x)), (full, stored)))
    pairs = zip(jax.tree.leaves(made), jax.tree.leaves(results), strict=True)
    return [x.reshape(like.shape) for x, like in pairs]


def _update_tile(
    update: OnePass,
    operands: Operands,  # of this device, of which types count
    tiling: "_Tiling",
    of_kinds: tuple[list[int], list[int]],  # which of operands.small are floats, which integers
    scalars: list[Any],  # floats; integers, with this device's first row and column; noise
    full: list[Any],  # tiles
    stored: list[Quantized],  # of tiles
    *outputs: Any,  # tiles of the results; memory for scales in every lane, and for a slice
) -> None:
    *made, spread, memory = outputs
    floats, integers, noise = scalars
    columns_per_block = tiling.block_columns
    tile = [pl.program_id(d) for d in range(3)]
    for q, scales in zip(stored, spread, strict=True):
        _spread(q.scale[0][...], columns_per_block, scales)

    # Slices that begin beyond the array are not computed, others are masked if they end there.
    extents = tiling.matrices[1:]
    num = [_num_slices(*x) for x in zip(extents, tiling.tile, _SLICE, tile[1:], strict=True)]
    places = _iota(0) * update.shape[-1] + _iota(1)  # of a slice's elements in a matrix

    def one_slice(at: Any, _: None) -> None:
        i, j = _quotient_and_remainder(at, num[1])
        columns = _window(j, _LANES)
        here, blocks = (_window(i, _ROWS), columns), (_window(i, _GROUPS[0]), columns)
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
        slices = []
        for q, scales in zip(stored, spread, strict=True):
            arrays = q.codes[here], (scales[blocks],), None if q.rest is None else q.rest[here]
            slices.append(Quantized(*arrays, q.shape, q.dtype, q.format, q.signed))
        in_lanes = _SliceBlocks(columns_per_block)
        news = update_slice(update, [x[here] for x in full], small, slices, _SLICE, in_lanes)

        # Quantize.
        for output, out, new in zip(update.outputs, made, news, strict=True):
            if output in update.stored:
                k, uniform = list(update.stored).index(output), None
                if operands.noise:
                    shard = [integers[len(of_kinds[1]) + d] for d in range(2)]
                    first = (row + shard[0]) * update.shape[-1] + column + shard[1]
                    matrix = 2 * k * tiling.matrices[0] + tile[0]
                    first += noise[matrix + tiling.matrices[0]]
                    uniform = uniform_at(
                        (places + first).astype(jnp.uint32), noise[matrix].astype(jnp.uint32)
                    )
                # Beyond the array elements are 0: they must not be the largest of a block.
                new = new if inside is None else jnp.where(inside, new, 0)
                old, in_lanes = update.stored[output], _SliceBlocks(columns_per_block, memory[k])
                q = quantize(new, old.format, old.signed, update.rounding, uniform, in_lanes)
                out.codes[here] = q.codes
                spread[k][blocks] = q.scale[0]
                if q.rest is not None:
                    out.rest[here] = q.rest
            else:
                out[here] = new

    jax.lax.fori_loop(0, num[0] * num[1], one_slice, None)
    for output, out in zip(update.outputs, made, strict=True):
        if output in update.stored:
            k = list(update.stored).index(output)
            _gather_up(spread[k], columns_per_block, out.scale[0])


# --- Tiles and slices -----------------------------------------------------------------------------


class _Tiling:
    """The tiles of a shard, taken as matrices of its last two dims."""

    def __init__(self, shape: tuple[int, ...], block_columns: int):
        self.shape, self.block_columns = shape, block_columns
        *lead, rows, columns = shape
        self.matrices = math.prod(lead), rows, columns  # their number and dims
        # Where there are several tiles side by side, those of the scales have 128 columns.
        width = min(_LANES * block_columns, _multiple(columns, _LANES))
        height = min(_TILE_SIZE // width // _ROWS * _ROWS, _multiple(rows, _ROWS))
        self.tile = height, width  # multiples of those of a slice
        num_blocks = min(width, _multiple(columns, block_columns)) // block_columns
        self.scale_tile = height // BLOCK_ROWS, num_blocks
        # Tiles along each dim of ``matrices``.
        self.grid = self.matrices[0], pl.cdiv(rows, height), pl.cdiv(columns, width)

    def spec(self, x: Array) -> pl.BlockSpec:
        is_full = tuple(x.shape[-2:]) == tuple(self.shape[-2:])
        tile = self.tile if is_full else self.scale_tile
        return pl.BlockSpec((None, *tile), lambda matrix, i, j: (matrix, i, j))


class _SliceBlocks:
    """``Blocks`` of a slice, of which each lane has its value; ``memory`` is for a slice."""

    def __init__(self, columns: int, memory: Any = None):
        self._columns, self._memory = columns, memory

    def largest(self, x: jax.Array, signed: bool = True) -> jax.Array:
        """As ``Blocks.largest``, of floats: Mosaic has no maximum of uint32."""
        rows = self._rows(jnp.where(jnp.isnan(x), jnp.inf, x))
        high = self._over_lanes(functools.reduce(jnp.maximum, rows))
        if not signed:
            return high
        low = self._over_lanes(-functools.reduce(jnp.minimum, rows))
        return jnp.where(high >= low, high, -low)

    def _rows(self, x: jax.Array) -> list[jax.Array]:
        """Returns the first row of every block, the second and so on: (rows of blocks, lanes)."""
        # Strided loads need no arithmetic; a maximum over sublanes rotates every register.
        self._memory[...] = x  # (64, 128)
        return [self._memory[pl.ds(k, _GROUPS[0], stride=BLOCK_ROWS), :] for k in range(BLOCK_ROWS)]

    def _over_lanes(self, x: jax.Array) -> jax.Array:
        """Returns the maximum of each block of lanes in all of them, by a butterfly."""
        lane = jax.lax.broadcasted_iota(jnp.int32, _GROUPS, 1)
        step = 1
        while step < self._columns:  # lanes whose numbers differ in one bit
            x = jnp.maximum(x, _lanes(x, lane ^ step))
            step *= 2
        return x

    def repeat(self, per_block: jax.Array) -> jax.Array:
        shape = (_GROUPS[0], BLOCK_ROWS, _LANES)
        return jnp.broadcast_to(per_block[:, None, :], shape).reshape(_SLICE)


def _spread(scale: jax.Array, block_columns: int, out: Tree) -> None:
    """Writes the scales of a tile, (rows, blocks), to every lane of their block in ``out``."""
    lane = jax.lax.broadcasted_iota(jnp.int32, (scale.shape[0], _LANES), 1)
    scale = jnp.pad(scale, ((0, 0), (0, -scale.shape[1] % _LANES)))
    for start in range(0, out.shape[1], _LANES):
        first = start // block_columns  # block of the first lane
        group = first // _LANES * _LANES  # the register of scales that has it
        out[:, start : start + _LANES] = _lanes(
            scale[:, group : group + _LANES],
            _quotient_and_remainder(lane, block_columns)[0] + first % _LANES,
        )


def _gather_up(spread: Any, block_columns: int, out: Tree) -> None:
    """Inverts ``_spread``: collects the scales of 128 blocks from ``block_columns`` registers."""
    rows, width = out.shape
    per_slice = _LANES // block_columns  # blocks
    lane = jax.lax.broadcasted_iota(jnp.int32, (rows, _LANES), 1)
    place, block = _quotient_and_remainder(lane, per_slice)  # register and block in it, of a lane
    for group in range(0, width, _LANES):
        gathered = jnp.zeros((rows, _LANES), jnp.float32)
        for k in range(block_columns):
            start = group * block_columns + k * _LANES
            if start < spread.shape[1]:
                scales = _lanes(spread[:, start : start + _LANES], block * block_columns)
                gathered = jnp.where(place == k, scales, gathered)
        out[:, group : group + _LANES] = gathered[:, : min(_LANES, width - group)]


def _lanes(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns ``x[i, index[i, j]]``; both (rows, 128)."""
    return jnp.take_along_axis(x, index, axis=1, mode="promise_in_bounds")


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
