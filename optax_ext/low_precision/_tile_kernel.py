"""One pass over memory for 8-bit state on TPUs: decode, update and encode, tile by tile.

XLA computes scales in one pass and codes in another, and writes the scales of elements, or float32
moments, in between. Here a Pallas kernel reads a tile of the gradient and of the codes, evaluates
the equations of any element-wise transformation, and writes the update and new codes in place.

A kernel tile has some 64 rows by 4,096 columns; the kernel loops over slices of 64 x 128 elements,
whose values stay in registers. Blocks have 8 rows, so that the maximum of a block is one over
sublanes, then a butterfly over lanes. In the kernel each lane of a block has its scale.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from optax_ext import kernels
from optax_ext.execution_order import ELEMENTWISE, Equation, Graph, bind
from optax_ext.low_precision._formats import (
    BLOCK_ROWS,
    Blocks,
    Dynamic,
    Float8,
    Format,
    Linear,
    Quantized,
    decode,
    encode,
)
from optax_ext.low_precision._rounding import numbers_matrices, uniform_at

_LANES, _ROWS = 128, 64  # of a slice: 8 registers of float32
_SLICE = (_ROWS, _LANES)
_GROUPS = (_ROWS // BLOCK_ROWS, _LANES)  # rows of blocks in a slice, with a scale in every lane
_TILE_SIZE = 64 * 4096  # elements: 1 MiB of float32, read while the previous tile is computed
_EXTRA_BYTES = 4 * 2**20  # of on-chip memory, beside two tiles of everything

# Of the arrays that a kernel reads and writes.
_DTYPES = frozenset(map(jnp.dtype, ("float32", "bfloat16", "int32")))
# Mosaic has no rule for these.
_UNKNOWN_TO_MOSAIC = """
acos acosh asin asinh atan atan2 atanh cbrt cosh digamma erf_inv erfc expm1 lgamma nextafter
optimization_barrier population_count reduce_precision sinh
"""
_IN_KERNELS = ELEMENTWISE - frozenset(_UNKNOWN_TO_MOSAIC.split())


# --- Which parts of a transformation run in a kernel ----------------------------------------------


@dataclasses.dataclass(frozen=True)
class TilePlan:
    """What a kernel computes for one parameter, in numbers of values of a ``Graph``.

    Output ``j`` of the graph replaces its input ``j``, so that the number of an output is also that
    of the input that it replaces.

    Attributes:
      root: the output that is the parameter's update, by its index.
      path: the parameter's path.
      shape: its shape.
      equations: what is evaluated on each slice, in order.
      full: arrays of that shape that the kernel reads.
      small: numbers that the kernel reads.
      literals: numbers that are known now.
      stored: inputs of the graph that the kernel decodes.
      outputs: outputs of the graph, by their index, that the kernel makes.
    """

    root: int
    path: kernels.Path
    shape: tuple[int, ...]
    equations: tuple[Equation, ...]
    full: tuple[int, ...]
    small: tuple[int, ...]
    literals: tuple[tuple[int, Any], ...]
    stored: tuple[int, ...]
    outputs: tuple[int, ...]


def tile_plan(
    graph: Graph,
    root: int,
    path: kernels.Path,
    stored: Mapping[int, Quantized],
    form: "type[Kernel]",
) -> TilePlan | None:
    """Returns how a kernel computes one output and all that it shares moments with.

    Args:
      graph: the inner update, of decoded moments; the deferred inputs are those that are stored.
      root: the output that is the parameter's update.
      path: the parameter's path.
      stored: the stored arrays by the number of the input that they are decoded to.
      form: what computes them.

    Returns:
      The plan; None if a part is not element-wise, or no kernel takes a shape or format.
    """
    reads = graph.reads[graph.outputs[root]]
    outputs = [j for j, value in enumerate(graph.outputs) if graph.reads[value] & reads]
    shape = graph.shape(graph.outputs[root])
    read = [i for i in stored if reads >> i & 1]
    if not read or any(stored[i].shape != shape for i in read):
        return None
    if not all(_takes(stored[i], path, form) for i in read):
        return None
    if len({_block_columns(stored[i]) for i in read}) > 1:
        return None
    if any(graph.reads[graph.outputs[j]] & ~reads for j in outputs):
        return None
    if any(graph.types[graph.outputs[j]].dtype not in _DTYPES for j in outputs):
        return None

    equations: set[int] = set()
    full, small, literals = [], [], []
    seen, pending = set(read), [graph.outputs[j] for j in outputs]
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        index = graph.producer.get(value)
        if graph.shape(value) == shape and index is not None and _is_local(graph, index):
            equations.add(index)
            pending += graph.equations[index].operands
        elif graph.reads[value]:
            return None
        elif graph.shape(value) == shape and graph.types[value].dtype in _DTYPES:
            full.append(value)
        elif graph.shape(value) == ():
            constant = graph.constants.get(value)
            if constant is None or isinstance(constant, jax.core.Tracer):
                small.append(value)
            else:
                literals.append((value, np.asarray(constant, graph.types[value].dtype)[()]))
        else:
            return None
    return TilePlan(
        root,
        path,
        shape,
        tuple(graph.equations[i] for i in sorted(equations)),
        tuple(sorted(full)),
        tuple(sorted(small)),
        tuple(literals),
        tuple(read),
        tuple(outputs),
    )


def _takes(q: Quantized, path: kernels.Path, form: "type[Kernel]") -> bool:
    """Whether a kernel decodes and encodes an array of this shape and format."""
    if len(q.shape) < 2 or not _has_block_scales(q.format) or q.dtype != jnp.float32:
        return False
    shards = kernels.shards()
    shard = q.shape if shards is None else shards.shape_of(path, q.shape)
    blocks = _blocks(q)
    block = blocks.rows_and_columns
    return (
        shard is not None
        and blocks.dims[0] == len(q.shape) - 2
        and block in ((BLOCK_ROWS, 16), (BLOCK_ROWS, 32))
        # No shard ends within a block.
        and all(
            n == full or n % size == 0
            for n, full, size in zip(shard[-2:], q.shape[-2:], block, strict=True)
        )
        and numbers_matrices(q.shape)
        and form.takes(shard)
    )


def _has_block_scales(fmt: Format) -> bool:
    """Whether an array has codes of 8 bits and one scale per block."""
    if isinstance(fmt, Dynamic | Linear):
        return fmt.bits == 8 and not fmt.rank1
    return isinstance(fmt, Float8) and not fmt.expand


def _is_local(graph: Graph, index: int) -> bool:
    """Whether an equation makes each element of the tile from the elements at the same place."""
    eqn = graph.equations[index]
    name = eqn.primitive.name
    if name == "broadcast_in_dim":
        return graph.shape(eqn.operands[0]) == ()
    return name in _IN_KERNELS and len(eqn.results) == 1


# --- The kernel -----------------------------------------------------------------------------------


class _SliceBlocks:
    """``Blocks`` of a slice; what belongs to a block is stored in each of its lanes.

    Args:
      columns: columns of a block.
      memory: on-chip memory for a slice, which reductions use.
    """

    def __init__(self, columns: int, memory: Any = None):
        self._columns, self._memory = columns, memory

    def reduce(self, op: Any, x: jax.Array, neutral: float) -> jax.Array:
        """Returns the maximum of each block; (rows of blocks, lanes)."""
        assert op is jnp.max, op
        del neutral
        return self._over_lanes(functools.reduce(jnp.maximum, self._rows(x)))

    def largest(self, x: jax.Array) -> jax.Array:
        """Returns the element of largest magnitude of each block, with its sign.

        Mosaic has no maximum of uint32. As with ``Blocks``, positive elements win ties.
        """
        rows = self._rows(jnp.where(jnp.isnan(x), jnp.inf, x))
        high = self._over_lanes(functools.reduce(jnp.maximum, rows))
        low = self._over_lanes(-functools.reduce(jnp.minimum, rows))
        return jnp.where(high >= low, high, -low)

    def _rows(self, x: jax.Array) -> list[jax.Array]:
        """Returns the first row of every block, the second and so on; each (rows of blocks, lanes).

        Loads with a stride need no arithmetic; a maximum over sublanes rotates every register.
        """
        self._memory[...] = x
        return [self._memory[pl.ds(k, _GROUPS[0], stride=BLOCK_ROWS), :] for k in range(BLOCK_ROWS)]

    def _over_lanes(self, x: jax.Array) -> jax.Array:
        """Returns the maximum of each block of lanes in all of them."""
        lane = jax.lax.broadcasted_iota(jnp.int32, _GROUPS, 1)
        step = 1
        while step < self._columns:
            x = jnp.maximum(x, _lanes(x, lane ^ step))
            step *= 2
        return x

    def repeat(self, per_block: jax.Array) -> jax.Array:
        """Repeats the value of each block for its rows."""
        shape = (_GROUPS[0], BLOCK_ROWS, _LANES)
        return jnp.broadcast_to(per_block[:, None, :], shape).reshape(_SLICE)


def _lanes(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns ``x[i, index[i, j]]``; both (rows, 128)."""
    return jnp.take_along_axis(x, index, axis=1, mode="promise_in_bounds")


@dataclasses.dataclass(frozen=True)
class _Tiling:
    """The tiles of an array, taken as matrices of its last two dims.

    Attributes:
      shape: the array's shape.
      block_columns: columns of a block.
    """

    shape: tuple[int, ...]
    block_columns: int

    @property
    def matrices(self) -> tuple[int, int, int]:
        """The number of matrices, their rows and their columns."""
        return math.prod(self.shape[:-2]), self.shape[-2], self.shape[-1]

    @property
    def tile(self) -> tuple[int, int]:
        """The rows and columns of a tile: multiples of those of a slice."""
        _, rows, columns = self.matrices
        # Where there are several tiles side by side, those of the scales have 128 columns.
        width = min(_LANES * self.block_columns, _multiple(columns, _LANES))
        return min(_TILE_SIZE // width // _ROWS * _ROWS, _multiple(rows, _ROWS)), width

    @property
    def scale_tile(self) -> tuple[int, int]:
        """The rows and columns of a tile's scales."""
        rows, width = self.tile
        width = min(width, _multiple(self.matrices[2], self.block_columns))
        return rows // BLOCK_ROWS, width // self.block_columns

    @property
    def grid(self) -> tuple[int, int, int]:
        """Tiles along each dim."""
        num, rows, columns = self.matrices
        return num, pl.cdiv(rows, self.tile[0]), pl.cdiv(columns, self.tile[1])

    def spec(self, x: Any) -> pl.BlockSpec:
        """Returns the tiles of an array, or of the scales of one."""
        is_full = tuple(x.shape[-2:]) == tuple(self.shape[-2:])
        tile = self.tile if is_full else self.scale_tile
        return pl.BlockSpec((None, *tile), lambda matrix, i, j: (matrix, i, j))


def _multiple(extent: int, of: int) -> int:
    return -(-extent // of) * of


def _spread(scale: jax.Array, block_columns: int, out: Any) -> None:
    """Writes the scales of a tile, (rows, blocks), to every lane of ``out``, (rows, columns)."""
    lane = jax.lax.broadcasted_iota(jnp.int32, (scale.shape[0], _LANES), 1)
    scale = jnp.pad(scale, ((0, 0), (0, -scale.shape[1] % _LANES)))
    for start in range(0, out.shape[1], _LANES):
        first = start // block_columns
        group = first // _LANES * _LANES
        out[:, start : start + _LANES] = _lanes(
            scale[:, group : group + _LANES],
            _quotient_and_remainder(lane, block_columns)[0] + first % _LANES,
        )


def _gather_up(spread: Any, block_columns: int, out: Any) -> None:
    """Inverts ``_spread``."""
    rows, width = out.shape
    per_slice = _LANES // block_columns  # blocks
    lane = jax.lax.broadcasted_iota(jnp.int32, (rows, _LANES), 1)
    place, block = _quotient_and_remainder(lane, per_slice)
    for group in range(0, width, _LANES):
        found = jnp.zeros((rows, _LANES), jnp.float32)
        for k in range(block_columns):
            start = group * block_columns + k * _LANES
            if start < spread.shape[1]:
                scales = _lanes(spread[:, start : start + _LANES], block * block_columns)
                found = jnp.where(place == k, scales, found)
        out[:, group : group + _LANES] = found[:, : min(_LANES, width - group)]


def parts_of(q: Quantized) -> list[Any]:
    """Returns the arrays of a stored array: codes, scales, and rounding errors if it has them."""
    return [q.codes, q.scale[0], *([] if q.rest is None else [q.rest])]


def from_parts(parts: Sequence[Any], like: Quantized) -> Quantized:
    """Inverts ``parts_of``."""
    codes, scale, *rest = parts
    return dataclasses.replace(like, codes=codes, scale=(scale,), rest=rest[0] if rest else None)


def run(
    plan: TilePlan,
    graph: Graph,
    full: Sequence[jax.Array],
    small: Sequence[jax.Array],
    stored: Sequence[Quantized],
    noise: Sequence[Sequence[jax.Array]] | None,
    rounding: str,
    param: jax.Array | None,
    form: "type[Kernel]",
) -> list[Any]:
    """Computes the outputs of a plan in one pass over its arrays, by a kernel or another form.

    Args:
      plan: the plan.
      graph: the graph that it is of, whose outputs replace its inputs.
      full: the arrays of ``plan.full``.
      small: the numbers of ``plan.small``.
      stored: the arrays of ``plan.stored``.
      noise: for stochastic rounding, the ``hashes_of_matrices`` of each of ``stored``.
      rounding: how new values are rounded.
      param: if given, the parameter; the new one is returned in place of its update.
      form: what computes them.

    Returns:
      For each of ``plan.outputs`` an array, or a ``Quantized`` where it replaces one of ``stored``.
    """
    arrays, at = list(full), None
    if param is not None:
        # It may be one of these already, as with weight decay.
        at = next((k for k, x in enumerate(full) if x is param), len(full))
        if at == len(full):
            arrays.append(param)
    kernel = form(plan, graph, small, stored, rounding, noise is not None, len(arrays), at)
    lead, every = tuple(range(len(plan.shape) - 2)), tuple(range(len(plan.shape)))
    row, column = every[-2:]
    numbers = [x.reshape(plan.shape[:-2]) for pair in noise or () for x in pair]
    places = [jnp.arange(plan.shape[d], dtype=jnp.int32) for d in (row, column)]  # a shard's first
    arrays += [part for q in stored for part in parts_of(q)]
    operands = [*small, *numbers, *places, *arrays]
    dims: list[tuple[int, ...]] = [()] * len(small) + [lead] * len(numbers) + [(row,), (column,)]
    dims += [every] * len(arrays)
    result_dims: list[tuple[int, ...]] = [every] * kernel.num_results
    if (shards := kernels.shards()) is None:
        made = kernel(*operands)
    else:
        made = shards.run(plan.path, kernel, operands, dims, result_dims)
    return kernel.unflatten(made)


class Kernel:
    """The function of a device's arrays that ``run`` calls.

    Its arrays are ``num_full`` of the parameter's shape, the one at ``param`` the parameter itself,
    then the parts of those that are stored.
    """

    def __init__(
        self,
        plan: TilePlan,
        graph: Graph,
        small: Sequence[jax.Array],
        stored: Sequence[Quantized],
        rounding: str,
        is_noisy: bool,
        num_full: int,
        param: int | None,
    ):
        self._plan, self._graph, self._rounding, self._is_noisy = plan, graph, rounding, is_noisy
        self._stored = dict(zip(plan.stored, stored, strict=True))
        self._floats = [k for k, x in enumerate(small) if jnp.issubdtype(x.dtype, jnp.floating)]
        self._integers = [k for k in range(len(small)) if k not in self._floats]
        self._small_dtypes = [x.dtype for x in small]
        self._param = param
        # The position of the parts of each stored array among the arrays, and of each result.
        self._parts_at: dict[int, int] = {}
        at = num_full
        for i, q in self._stored.items():
            self._parts_at[i] = at
            at += len(parts_of(q))
        self._num_arrays = at
        self._results_at: dict[int, int] = {}
        at = 0
        for j in plan.outputs:
            self._results_at[j] = at
            at += len(parts_of(self._stored[j])) if j in self._stored else 1
        self.num_results = at

    @classmethod
    def takes(cls, shard: Sequence[int]) -> bool:
        """Whether a shard of a matrix, or of a stack of them, has the size for it."""
        return all(n >= least for n, least in zip(shard[-2:], (BLOCK_ROWS, _LANES), strict=True))

    def unflatten(self, made: Sequence[Any]) -> list[Any]:
        """Returns the results by output."""
        return [
            from_parts(made[at : at + len(parts_of(self._stored[j]))], self._stored[j])
            if j in self._stored
            else made[at]
            for j, at in self._results_at.items()
        ]

    def __call__(self, *operands: jax.Array) -> list[jax.Array]:
        """Runs the kernel on the arrays of one device."""
        num_noise = 2 * len(self._stored) * self._is_noisy
        small, noise, places, arrays = sections(
            operands, len(self._small_dtypes), num_noise, 2, self._num_arrays
        )
        shape = tuple(arrays[self._parts_at[self._plan.stored[0]]].shape)  # of codes
        tiling = _Tiling(shape, _block_columns(self._stored[self._plan.stored[0]]))
        scalars = [
            _stack([small[k].astype(jnp.float32) for k in self._floats]),
            _stack(
                [small[k].astype(jnp.int32) for k in self._integers]
                + [place[:1] for place in places]
            ),
            _stack([jax.lax.bitcast_convert_type(x, jnp.int32) for x in noise]),
        ]
        results, aliases = self._result_types(arrays)
        num_matrices, (rows, columns) = tiling.matrices[0], tiling.tile

        def matrices(x: Any) -> tuple[int, ...]:
            return num_matrices, *x.shape[-2:]

        per_element = sum(x.dtype.itemsize for x in [*arrays, *results])
        moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in [*arrays, *results])
        call = pl.pallas_call(
            functools.partial(self._tile, tiling),
            grid=tiling.grid,
            in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM)] * len(scalars)
            + [tiling.spec(x) for x in arrays],
            out_specs=[tiling.spec(x) for x in results],
            out_shape=[jax.ShapeDtypeStruct(matrices(x), x.dtype) for x in results],
            scratch_shapes=[pltpu.VMEM((rows // BLOCK_ROWS, columns), jnp.float32)]
            * len(self._stored)
            + [pltpu.VMEM(_SLICE, jnp.float32)] * len(self._stored),
            input_output_aliases={len(scalars) + k: n for k, n in aliases.items()},
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel",) * 3,
                vmem_limit_bytes=2 * rows * columns * per_element + _EXTRA_BYTES,
            ),
            cost_estimate=pl.CostEstimate(
                flops=len(self._plan.equations) * math.prod(tiling.shape),
                transcendentals=0,
                bytes_accessed=moved,
            ),
            interpret=kernels.is_interpreted(),
            name="low_precision_step",
        )
        made = call(*scalars, *(x.reshape(matrices(x)) for x in arrays))
        return [x.reshape(like.shape) for x, like in zip(made, results, strict=True)]

    def _result_types(self, arrays: Sequence[jax.Array]) -> tuple[list[Any], dict[int, int]]:
        """Returns shapes and dtypes, and which operand each result is written over."""
        plan, types = self._plan, self._graph.types
        results: list[Any] = []
        aliases = {}
        for j in plan.outputs:
            if j in self._stored:
                first = self._parts_at[j]
                for k in range(first, first + len(parts_of(self._stored[j]))):
                    aliases[k] = len(results)
                    results.append(arrays[k])
                continue
            dtype, over = types[self._graph.outputs[j]].dtype, None
            if j != plan.root:
                over = plan.full.index(j) if j in plan.full else None
            elif self._param is not None:
                over, dtype = self._param, arrays[self._param].dtype
            # Not over the gradient: XLA would copy one that the program may not overwrite.
            if over is not None and arrays[over].dtype == dtype:
                aliases[over] = len(results)
            results.append(
                jax.ShapeDtypeStruct(arrays[self._parts_at[plan.stored[0]]].shape, dtype)
            )
        return results, aliases

    def _tile(self, tiling: _Tiling, *refs: Any) -> None:
        """Reads, updates and writes one tile."""
        plan, graph = self._plan, self._graph
        numbers, operands, made, spread, memory = sections(
            refs, 3, self._num_arrays, self.num_results, *[len(self._stored)] * 2
        )
        floats, integers, noise = numbers
        tile = [pl.program_id(d) for d in range(3)]
        for (i, q), scales in zip(self._stored.items(), spread, strict=True):
            _spread(operands[self._parts_at[i] + 1][...], _block_columns(q), scales)
        spread_of = dict(zip(self._stored, spread, strict=True))

        # Slices that begin beyond the array are not computed, others are masked if they end there.
        extents = tiling.matrices[1:]
        num = [_num_slices(*x) for x in zip(extents, tiling.tile, _SLICE, tile[1:], strict=True)]
        places = _iota(0) * plan.shape[-1] + _iota(1)  # of a slice's elements in a matrix

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

            # Decode.
            values: dict[int, Any] = dict(plan.literals)
            values |= {v: operands[k][here] for k, v in enumerate(plan.full)}
            for which, ref in ((self._floats, floats), (self._integers, integers)):
                for place, k in enumerate(which):
                    values[plan.small[k]] = _as_dtype(ref[place], self._small_dtypes[k])
            for v, q in self._stored.items():
                parts = operands[self._parts_at[v] :][: len(parts_of(q))]
                codes = [
                    spread_of[v][blocks] if k == 1 else part[here] for k, part in enumerate(parts)
                ]
                values[v] = decode(from_parts(codes, q), _SliceBlocks(_block_columns(q)))

            # Update.
            for eqn in plan.equations:
                values |= zip(eqn.results, on_slice(eqn, values), strict=True)

            # Encode.
            for output, result in self._results_at.items():
                new = values[graph.outputs[output]]
                if output in self._stored:
                    k = plan.stored.index(output)
                    uniform = None
                    if self._is_noisy:
                        shard = [integers[len(self._integers) + d] for d in range(2)]
                        first = (row + shard[0]) * plan.shape[-1] + column + shard[1]
                        matrix = 2 * k * tiling.matrices[0] + tile[0]
                        first += noise[matrix + tiling.matrices[0]]
                        uniform = uniform_at(
                            (places + first).astype(jnp.uint32), noise[matrix].astype(jnp.uint32)
                        )
                    new = (
                        jnp.broadcast_to(new, _SLICE)
                        if inside is None
                        else jnp.where(inside, new, 0)
                    )
                    q = self._encode(output, new, uniform, memory[k])
                    for n, part in enumerate(parts_of(q)):
                        if n == 1:
                            spread_of[output][blocks] = part
                        else:
                            made[result + n][here] = part
                elif output == plan.root and self._param is not None:
                    old = operands[self._param][here]
                    total = old.astype(jnp.float32) + new.astype(jnp.float32)
                    made[result][here] = total.astype(old.dtype)  # as optax.apply_updates
                else:
                    made[result][here] = jnp.broadcast_to(new, _SLICE)

        jax.lax.fori_loop(0, num[0] * num[1], one_slice, None)
        for output, result in self._results_at.items():
            if output in self._stored:
                columns = _block_columns(self._stored[output])
                _gather_up(spread_of[output], columns, made[result + 1])

    def _encode(
        self, output: int, new: jax.Array, uniform: jax.Array | None, memory: Any
    ) -> Quantized:
        """Encodes a slice; beyond the array ``new`` must be 0."""
        old = self._stored[output]
        blocks = _SliceBlocks(_block_columns(old), memory)
        return encode(new, old.format, old.signed, self._rounding, uniform, blocks)


def _num_slices(extent: int, tile: int, slice_: int, at: Any) -> Any:
    """Returns how many slices of a tile begin in the array, along one dim."""
    if extent <= tile or extent % tile == 0:
        return pl.cdiv(min(extent, tile), slice_)
    inside = jnp.minimum(tile, extent - at * tile)
    return _quotient_and_remainder(inside + (slice_ - 1), slice_)[0]


def _iota(dim: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, _SLICE, dim)


def _block_columns(q: Quantized) -> int:
    return _blocks(q).rows_and_columns[1]


def _blocks(q: Quantized) -> Blocks:
    return Blocks(q.shape, q.format.block_size)  # type: ignore[arg-type, union-attr]


def _stack(numbers: list[jax.Array]) -> jax.Array:
    """Returns one vector of numbers and vectors; a kernel takes no empty one."""
    return jnp.concatenate([x.reshape(-1) for x in numbers] or [jnp.zeros(1, jnp.int32)])


def _quotient_and_remainder(x: jax.Array, by: Any) -> tuple[jax.Array, jax.Array]:
    """Returns quotient and remainder of what is not negative; ``//`` asks for the sign."""
    number = jnp.asarray(by, jnp.int32)
    return jax.lax.div(x, number), jax.lax.rem(x, number)


def _window(i: Any, size: int) -> Any:
    """Returns the ``i``-th window of a dim."""
    return pl.ds(pl.multiple_of(i * size, size), size)


def sections(refs: Sequence[Any], *sizes: int) -> Iterator[Sequence[Any]]:
    for end, size in zip(itertools.accumulate(sizes), sizes, strict=True):
        yield refs[end - size : end]


def _as_dtype(x: jax.Array, dtype: Any) -> jax.Array:
    return x != 0 if dtype == jnp.bool_ else x.astype(dtype)


def on_slice(
    eqn: Equation, values: dict[int, Any], shape: tuple[int, ...] = _SLICE
) -> Sequence[Any]:
    """Evaluates an equation on a slice of this shape."""
    operands = [values[v] for v in eqn.operands]
    if eqn.primitive.name == "broadcast_in_dim":
        return [jnp.broadcast_to(operands[0], shape)]
    if eqn.primitive.name in ("copy", "copy_p"):
        return operands
    if eqn.primitive.name == "sign":  # Mosaic's rule asks for the chip that compiles
        (x,) = operands
        one = jnp.ones([], x.dtype)
        return [jnp.where(x > 0, one, jnp.where(x < 0, -one, x))]
    return bind(eqn, operands)
