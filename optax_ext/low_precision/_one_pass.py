"""Updates of parameters with 8-bit state in one pass over memory, in programs for TPUs.

Between scales and codes XLA writes the scales of elements, or float32 moments. One pass reads the
moments, computes an element-wise update and quantizes the new moments: ``_tile_kernel``. Where the
update needs sums over rows or columns of moments, a pass before computes these. Here: which updates
they take, what they read and write.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_ext._types import Tree
from optax_ext.kernels import Path, Shards
from optax_ext.low_precision._formats import Quantized
from optax_ext.low_precision._quantize import BLOCK_ROWS, Blocks, dequantize
from optax_ext.low_precision._rounding import (
    hashes_of_matrices,
    next_key,
    numbers_matrices,
    salted,
)
from optax_ext.low_precision._stored_state import LowPrecisionState, flatten
from optax_ext.traced_graph import ELEMENTWISE, Equation, Graph, bind, evaluate

# Of the arrays that a pass reads and writes.
_DTYPES = frozenset(map(jnp.dtype, ("float32", "bfloat16", "int32")))
# Mosaic has no rule for these.
_UNKNOWN_TO_MOSAIC = """
acos acosh asin asinh atan atan2 atanh cbrt cosh digamma erf_inv erfc expm1 lgamma nextafter
population_count reduce_precision sinh
"""
_IN_KERNELS = ELEMENTWISE - frozenset(_UNKNOWN_TO_MOSAIC.split())
_LANES = 128  # of a TPU register; its rows are those of a block


class Operands(NamedTuple):
    """The arrays of one device that a pass reads."""

    small: list[jax.Array]  # numbers
    noise: list[jax.Array]  # two a stored array: the ``hashes_of_matrices``, of its leading dims
    places: list[jax.Array]  # indices in the full array of this device's rows, and of its columns
    rows: list[jax.Array]  # (..., rows)
    columns: list[jax.Array]  # (..., columns)
    full: list[jax.Array]  # of the parameter's shape, (..., rows, columns)
    stored: list[Quantized]  # of that shape


class OnePass(NamedTuple):
    """What one pass computes for one parameter; values have their numbers in ``graph``."""

    graph: Graph  # the inner update of dequantized moments; its output j replaces its input j
    root: int  # the output that is the parameter's update
    path: Path  # of the parameter
    shape: tuple[int, ...]  # of the parameter
    stored: dict[int, Quantized]  # inputs that it dequantizes
    interpret: bool  # whether a kernel is interpreted
    read_only: frozenset[int]  # inputs that it cannot overwrite without a copy
    # Those that it makes, as ``Quantized`` where the input is stored, and their values. The update
    # may be made of its value by XLA.
    outputs: dict[int, Any]
    sums: Sequence[Equation] = ()  # over rows or columns, which the next pass needs
    equations: Sequence[Equation] = ()  # in the order in which a slice of the arrays is evaluated
    full: Sequence[int] = ()  # values of that shape that the pass reads
    rows: Sequence[int] = ()  # values that it reads, the same in all columns
    columns: Sequence[int] = ()  # values that it reads, the same in all rows
    small: Sequence[int] = ()  # numbers that it reads
    literals: Sequence[tuple[int, Any]] = ()  # numbers that are known while tracing
    param: int | None = None  # where ``Operands.full`` has the parameter, if the pass updates it


class OnePassUpdates:
    """The parameters of a step that are updated in one pass each; traced with float32 moments."""

    def __init__(
        self,
        inner_update: Callable[..., tuple[Any, Any]],  # of updates, float32 state and parameters
        apply: bool,  # whether the passes update parameters, too
        shards: Shards,
        updates: Tree,
        state: LowPrecisionState,
        params: Any,
        read_only: frozenset[int],  # ids of arrays
    ):
        with_paths, updates_def = jax.tree.flatten_with_path(updates)
        moments, treedef = flatten(state.inner_state)
        num = len(with_paths)
        self._key = next_key(state.key)
        self._shards = shards
        self._params = jax.tree.leaves(params) if apply else [None] * num
        self._paths = {i: path for i, (path, _) in enumerate(moments, num)}
        stored = {i: x for i, (_, x) in enumerate(moments, num) if isinstance(x, Quantized)}
        inputs = [dequantized_type(x) for _, x in (*with_paths, *moments)]
        leaves = [jax.tree.leaves(x) for _, x in (*with_paths, *moments)]
        self._read_only = frozenset(
            i for i, own in enumerate(leaves) if not read_only.isdisjoint(map(id, own))
        )

        def flat_update(inputs: list[Any]) -> list[Any]:
            trees = jax.tree.unflatten(updates_def, inputs[:num]), treedef.unflatten(inputs[num:])
            new, inner_state = inner_update(*trees, params)
            return jax.tree.leaves(new) + treedef.flatten_up_to(inner_state)

        graph = Graph(flat_update, inputs, [i in stored for i in range(len(inputs))], portable=True)
        self._graph = graph
        self._values = graph.constants | {i: x for i, x in enumerate(inputs) if i not in stored}
        self._passes = {i: self._plan(i, path, stored) for i, (path, _) in enumerate(with_paths)}
        # Numbers of codes, scales and other arrays among the step's outputs, for each of `graph`.
        number = itertools.count(num + (self._key is not None))
        self._numbers = [[j] for j in range(num)]
        self._numbers += [[next(number) for _ in jax.tree.leaves(x)] for _, x in moments]

    def _plan(self, root: int, path: Path, stored: Any) -> tuple[list[int], list[OnePass]] | None:
        """Returns output ``root`` and all that share moments with it, and passes that make them."""
        graph = self._graph
        reads = graph.reads[graph.outputs[root]]
        shape = graph.shape(graph.outputs[root])
        outputs = [j for j, value in enumerate(graph.outputs) if graph.reads[value] & reads]
        read = {i: q for i, q in stored.items() if reads >> i & 1}
        if not read or any(q.shape != shape or not has_blocks(q) for q in read.values()):
            return None
        blocks = {blocks_of(q).rows_and_columns for q in read.values()}
        shard = self._shards.shape_of(path, shape)
        if len(blocks) > 1 or shard is None:
            return None
        if min(shard[-2:]) < BLOCK_ROWS or max(shard[-2:]) < _LANES:
            return None
        # No shard ends within a block.
        ends = zip(shard[-2:], shape[-2:], *blocks, strict=True)
        if any(n != full and n % size for n, full, size in ends):
            return None
        values = {j: graph.outputs[j] for j in outputs}
        if any(graph.reads[v] & ~reads for v in values.values()):
            return None
        full: dict[int, Any] = {j: v for j, v in values.items() if graph.shape(v) == shape}
        options = self._shards.interpret, self._read_only
        update = OnePass(graph, root, path, shape, read, *options, full)
        passes = _with_sums(update, [v for j, v in values.items() if j not in full])
        if passes is None:
            return None
        if self._params[root] is None:
            passes = _without_tail(passes)
        return outputs, passes

    def outputs_of(self, root: int) -> list[int]:
        """Returns the step's outputs that are made with an update; none if it takes no pass."""
        outputs, _ = self._passes.get(root) or ((), ())
        return [k for j in outputs for k in self._numbers[j]]

    def run(self, root: int) -> dict[int, jax.Array]:
        """Returns these outputs, computed on the shards of each device."""
        outputs, passes = self._passes[root] or ((), ())
        made: dict[int, jax.Array] = {}
        for update in passes:
            made |= self._run(update)
        for j in outputs:
            if self._numbers[j][0] not in made:  # a vector
                made |= zip(self._numbers[j], self._compute([self._graph.outputs[j]]), strict=True)
        return made

    def _compute(self, values: Sequence[int]) -> list[jax.Array]:
        equations, _ = self._graph.needed(values, self._values)
        evaluate(equations, self._values)
        return [self._values[v] for v in values]

    def _run(self, update: OnePass) -> dict[int, jax.Array]:
        """Returns the outputs of a pass; its sums become values."""
        every = tuple(range(len(update.shape)))
        *lead, row, column = every
        of_rows, of_columns = (*lead, row), (*lead, column)

        def vectors(values: Sequence[int], dims: Sequence[int], other: int) -> list[jax.Array]:
            shape = [update.shape[d] for d in dims]
            found = (jnp.squeeze(x, other) for x in self._compute(values))
            return [jnp.broadcast_to(x, shape).astype(jnp.float32) for x in found]

        full, small = self._compute(update.full), self._compute(update.small)
        rows = vectors(update.rows, of_rows, column)
        columns = vectors(update.columns, of_columns, row)
        param = self._params[update.root] if update.outputs else None
        if param is not None:
            # It may be one of these already, as with weight decay.
            at = next((k for k, x in enumerate(full) if x is param), len(full))
            full += [param] if at == len(full) else []
            update = update._replace(param=at)

        with jax.named_scope("low_precision"):
            noise = []
            if self._key is not None and update.outputs:
                for i in update.stored:
                    key = salted(self._key, self._paths[i])
                    hashes = hashes_of_matrices(key, update.shape)
                    noise += [x.reshape(update.shape[:-2]) for x in hashes]
            places = [jnp.arange(update.shape[d], dtype=jnp.int32) for d in (row, column)]
            stored = list(update.stored.values())
            operands = Operands(small, noise, places, rows, columns, full, stored)
            arrays, treedef = jax.tree.flatten(operands)
            dims = [()] * len(small) + [tuple(lead)] * len(noise) + [(row,), (column,)]
            dims += [of_rows] * len(rows) + [of_columns] * len(columns)
            dims += [every] * (len(arrays) - len(dims))

            def run(*arrays: jax.Array) -> list[jax.Array]:
                from optax_ext.low_precision import _tile_kernel  # loads Pallas, 0.3 s

                return _tile_kernel.update_tiles(update, treedef.unflatten(arrays))

            numbers = [k for j in update.outputs for k in self._numbers[j]]
            result_dims = [every] * len(numbers)
            for eqn in update.sums:  # of each tile: (..., tiles, columns) or (..., tiles, rows)
                result_dims += [every if sums_rows(eqn, every) else (*lead, column, row)]
            made = self._shards.run(update.path, run, arrays, dims, result_dims)
            for eqn, partial in zip(update.sums, made[len(numbers) :], strict=True):
                axes = eqn.params["axes"]
                axes = axes if sums_rows(eqn, every) else {*axes} - {column} | {row}
                self._values[eqn.results[0]] = jnp.sum(partial, tuple(axes))
        results = dict(zip(numbers, made, strict=False))
        value = self._graph.outputs[update.root]
        if update.outputs.get(update.root, value) != value:
            self._values[update.outputs[update.root]] = results[update.root]
            (results[update.root],) = self._compute([value])
        return results


# --- Which updates take a pass --------------------------------------------------------------------


def _with_sums(update: OnePass, needed: list[int]) -> list[OnePass] | None:
    """Returns a pass behind those of the sums that it or values ``needed`` read; None if XLA's."""
    complete = _with_operands(update)
    if complete is None:
        return None
    graph = update.graph
    sums = {}
    seen = set()
    pending = [*needed, *complete.rows, *complete.columns, *complete.small]
    while pending:
        value = pending.pop()
        if value in seen or not graph.reads[value]:
            continue
        seen.add(value)
        index = graph.producer[value]
        eqn = graph.equations[index]
        if all(graph.shape(v) != update.shape for v in eqn.operands):
            pending += eqn.operands
        elif _is_sum(eqn, graph, len(update.shape)):
            sums[index] = eqn
        else:
            return None
    if not sums:
        return [complete]
    before = _with_sums(update._replace(outputs={}, sums=list(sums.values())), [])
    return None if before is None else [*before, complete]


def _with_operands(update: OnePass) -> OnePass | None:
    """Adds what a pass computes and reads, from its outputs and sums back to the moments."""
    graph = update.graph
    shape = update.shape
    equations: set[int] = set()
    found: Any = {k: [] for k in ("full", "rows", "columns", "small", "literals")}
    made = list(update.outputs.values())
    if any(graph.types[v].dtype not in _DTYPES for v in made):
        return None
    seen = set(update.stored)
    pending = made + [eqn.operands[0] for eqn in update.sums]
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        index = graph.producer.get(value)
        constant = graph.constants.get(value)
        own = graph.shape(value)
        dtype = graph.types[value].dtype
        if own == shape and index is not None and _is_local(graph, index):
            equations.add(index)
            pending += graph.equations[index].operands
        elif own == shape and dtype in _DTYPES and not graph.reads[value]:
            found["full"].append(value)
        elif own == () and (constant is None or isinstance(constant, jax.core.Tracer)):
            found["small"].append(value)
        elif own == ():
            found["literals"].append((value, np.asarray(constant, dtype)[()]))
        elif len(own) == len(shape) and 1 in own[-2:] and dtype in (jnp.float32, jnp.bool_):
            found["columns" if own[-2] == 1 else "rows"].append(value)
        else:
            return None
    return update._replace(equations=[graph.equations[i] for i in sorted(equations)], **found)


def _without_tail(passes: list[OnePass]) -> list[OnePass]:
    """Leaves the last operations of an update to XLA where passes then read less.

    XLA reads what these need, such as parameters that decay, together with what applies updates.
    Where they alone need the last sums, the pass that makes these makes the outputs, too.
    """
    *before, last = passes
    graph = last.graph
    best = passes
    value: Any = last.outputs[last.root]
    while (value := _operand(last, value)) is not None:
        cut = _with_operands(last._replace(outputs=last.outputs | {last.root: value}))
        if cut is None:
            continue
        found = [*before, cut]
        if before:
            both = _with_operands(cut._replace(sums=before[-1].sums))
            needs, _ = graph.needed([*cut.rows, *cut.columns, *cut.small], ())
            if both is not None and not any(eqn in before[-1].sums for eqn in needs):
                found = [*before[:-1], both]
        if _num_read(found) < _num_read(best):
            best = found
    return best


def _operand(update: OnePass, value: int) -> int | None:
    """Returns the one operand of a value that a pass has to compute; None if there are others."""
    graph = update.graph

    def producer(v: Any) -> Equation | None:
        index = graph.producer.get(v)
        return graph.equations[index] if index is not None and _is_local(graph, index) else None

    eqn = producer(value)
    found = []
    for v in set(eqn.operands) if eqn else ():
        own = producer(v)
        is_vector = own is not None and own.primitive.name == "broadcast_in_dim"
        if graph.reads[v] and graph.shape(v) == update.shape and not is_vector:
            found.append(v)
    is_same = len(found) == 1 and graph.types[found[0]].dtype == graph.types[value].dtype
    return found[0] if is_same else None


def _num_read(passes: list[OnePass]) -> int:
    return sum(4 * len(update.full) + len(update.stored) for update in passes)


def dequantized_type(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, Quantized) else x


def has_blocks(q: Any) -> bool:
    """Whether an array of a state is stored in blocks that a pass can quantize."""
    if not isinstance(q, Quantized):
        return False
    is_other = getattr(q.format, "rank1", False) or getattr(q.format, "expand", False)
    return (
        (q.format.bits == 8 and not is_other)
        and len(q.shape) > 1
        and q.dtype == jnp.float32
        and blocks_of(q).dims[0] == len(q.shape) - 2
        and blocks_of(q).rows_and_columns in ((BLOCK_ROWS, 16), (BLOCK_ROWS, 32))
        and numbers_matrices(q.shape)
    )


def blocks_of(q: Quantized) -> Blocks:
    return Blocks(q.shape, q.format.block_size)  # type: ignore[arg-type, union-attr]


def _is_local(graph: Graph, index: int) -> bool:
    """Whether an equation makes each element of a slice from the elements at the same place."""
    eqn = graph.equations[index]
    if eqn.primitive.name == "broadcast_in_dim":
        return len(graph.shape(eqn.operands[0])) in (0, len(eqn.params["shape"]))
    return eqn.primitive.name in _IN_KERNELS and len(eqn.results) == 1


def _is_sum(eqn: Equation, graph: Graph, ndim: int) -> bool:
    """Whether an equation is a sum over rows or columns that a kernel makes."""
    return (
        eqn.primitive.name == "reduce_sum"
        and max(eqn.params["axes"], default=0) >= ndim - 2
        and graph.types[eqn.operands[0]].dtype == jnp.float32
    )


# --- In a pass ------------------------------------------------------------------------------------


def sums_rows(eqn: Equation, shape: Sequence[int]) -> bool:
    """Whether a sum is over rows, and perhaps also over columns."""
    return len(shape) - 2 in eqn.params["axes"]


def results_of(update: OnePass, operands: Operands) -> tuple[list[Any], dict[int, int]]:
    """Returns types of the outputs, and ``{leaf of (full, stored): leaf of types over it}``."""
    arrays = (operands.full, operands.stored)
    leaves, treedef = jax.tree.flatten(arrays)
    full_at, stored_at = jax.tree.unflatten(treedef, range(len(leaves)))
    stored = dict(zip(update.stored, operands.stored, strict=True))
    inputs = (*update.full, *update.stored)
    places: list[Any] = [*full_at[: len(update.full)], *stored_at]
    over = {j: at for j, at in zip(inputs, places, strict=True) if j not in update.read_only}
    if update.param is not None:
        over[update.root] = update.param
    types: list[Any] = []
    aliases = {}
    num = 0
    for j, value in update.outputs.items():
        dtype = update.graph.types[value].dtype
        if j == update.root and update.param is not None:
            dtype = leaves[update.param].dtype
        like: Any = stored.get(j, jax.ShapeDtypeStruct(operands.stored[0].codes.shape, dtype))
        types.append(like)
        new = jax.tree.leaves(like)
        for i, (k, x) in enumerate(zip(jax.tree.leaves(over.get(j)), new, strict=False)):
            if leaves[k].dtype == x.dtype:
                aliases[k] = num + i
        num += len(new)
    return types, aliases


def update_slice(
    update: OnePass,
    full: list[jax.Array],
    small: dict[int, jax.Array],  # by their numbers in the graph; also rows and columns
    stored: list[Quantized],
    shape: tuple[int, ...],  # of a slice
    blocks: Any = None,  # as for ``dequantize``
) -> list[jax.Array]:
    """Returns the outputs of a slice of dequantized arrays; the new parameter, not its update.

    Behind them are the arrays that are summed.
    """
    values: dict[int, Any] = dict(update.literals) | small
    values |= zip(update.full, full, strict=False)  # the parameter may be behind them
    values |= {v: dequantize(q, blocks) for v, q in zip(update.stored, stored, strict=True)}
    for eqn in update.equations:
        operands = [values[v] for v in eqn.operands]
        name = eqn.primitive.name
        if name == "broadcast_in_dim":
            operands = [jnp.broadcast_to(operands[0], shape)]
        elif name == "sign":  # Mosaic's rule asks for the chip that compiles
            (x,) = operands
            one = jnp.ones([], x.dtype)
            operands = [jnp.where(x > 0, one, jnp.where(x < 0, -one, x))]
        elif name not in ("copy", "copy_p", "optimization_barrier"):
            operands = list(bind(eqn, operands))
        values |= zip(eqn.results, operands, strict=True)
    made = {j: jnp.broadcast_to(values[v], shape) for j, v in update.outputs.items()}
    if update.param is not None:
        param = full[update.param]
        total = param.astype(jnp.float32) + made[update.root].astype(jnp.float32)
        made[update.root] = total.astype(param.dtype)  # as optax.apply_updates
    return [*made.values(), *(values[eqn.operands[0]] for eqn in update.sums)]
