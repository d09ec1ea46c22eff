"""Updates of parameters with 8-bit state in one pass over memory, in programs for TPUs.

Between scales and codes XLA writes the scales of elements, or float32 moments. One pass reads the
moments, computes an element-wise update and quantizes the new moments: ``_tile_kernel``, or
``_row_loop`` for arrays of few columns. Here: which updates they take, what they read and write.
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
from optax_ext.low_precision._rounding import hashes_of_matrices, numbers_matrices, salted
from optax_ext.traced_graph import ELEMENTWISE, Equation, Graph, bind, evaluate

# Of the arrays that a pass reads and writes.
_DTYPES = frozenset(map(jnp.dtype, ("float32", "bfloat16", "int32")))
# Mosaic has no rule for these.
_UNKNOWN_TO_MOSAIC = """
acos acosh asin asinh atan atan2 atanh cbrt cosh digamma erf_inv erfc expm1 lgamma nextafter
optimization_barrier population_count reduce_precision sinh
"""
_IN_KERNELS = ELEMENTWISE - frozenset(_UNKNOWN_TO_MOSAIC.split())
_KERNEL_COLUMNS = 128  # the fewest for the kernel: those of a TPU register


class Operands(NamedTuple):
    """The arrays of one device that a pass reads."""

    small: list[jax.Array]  # numbers
    noise: list[jax.Array]  # two a stored array: the ``hashes_of_matrices``, of its leading dims
    places: list[jax.Array]  # indices in the full array of this device's rows, and of its columns
    full: list[jax.Array]  # of the parameter's shape, (..., rows, columns)
    stored: list[Quantized]  # of that shape


class OnePass(NamedTuple):
    """What one pass computes for one parameter; values have their numbers in ``graph``."""

    function: Callable[["OnePass", Operands], list[jax.Array]]  # of the arrays of one device
    graph: Graph  # the inner update of dequantized moments; its output j replaces its input j
    root: int  # the output that is the parameter's update
    path: Path  # of the parameter
    shape: tuple[int, ...]  # of the parameter
    equations: list[Equation]  # in the order in which a slice of the arrays is evaluated
    full: list[int]  # values of that shape that the pass reads
    small: list[int]  # numbers that it reads
    literals: dict[int, Any]  # numbers that are known while tracing
    stored: dict[int, Quantized]  # inputs that it dequantizes
    outputs: list[int]  # outputs that it makes, as ``Quantized`` where the input is stored
    rounding: str
    interpret: bool  # whether a kernel is interpreted
    param: int | None = None  # where ``Operands.full`` has the parameter, if the pass updates it


class OnePassUpdates:
    """The parameters of a step that are updated in one pass each; traced with float32 moments."""

    def __init__(
        self,
        inner_update: Callable[..., tuple[Any, Any]],  # of updates, float32 state and parameters
        updates: Tree,
        moments: Sequence[tuple[Path, Any]],  # the inner state
        treedef: Any,  # its structure
        key: jax.Array | None,  # of the step, for stochastic rounding
        rounding: str,
        params: Any,
        apply: bool,  # whether the passes update them, too
        shards: Shards,
    ):
        with_paths, updates_def = jax.tree_util.tree_flatten_with_path(updates)
        num = len(with_paths)
        self._key, self._shards, self._rounding = key, shards, rounding
        self._params = jax.tree.leaves(params) if apply else [None] * num
        self._paths = {i: path for i, (path, _) in enumerate(moments, num)}
        stored = {i: x for i, (_, x) in enumerate(moments, num) if isinstance(x, Quantized)}
        inputs = [dequantized_type(x) for _, x in (*with_paths, *moments)]

        def flat_update(inputs: list[Any]) -> list[Any]:
            trees = jax.tree.unflatten(updates_def, inputs[:num]), treedef.unflatten(inputs[num:])
            new, inner_state = inner_update(*trees, params)
            return jax.tree.leaves(new) + treedef.flatten_up_to(inner_state)

        graph = Graph(flat_update, inputs, [i in stored for i in range(len(inputs))])
        self._values = graph.constants | {i: x for i, x in enumerate(inputs) if i not in stored}
        passes = {
            i: self._one_pass(i, path, graph, stored) for i, (path, _) in enumerate(with_paths)
        }
        self._passes = {root: update for root, update in passes.items() if update is not None}
        # Numbers of codes, scales and other arrays among the step's outputs, for each of `graph`.
        number = itertools.count(num + (key is not None))
        self._numbers = [[j] for j in range(num)]
        self._numbers += [[next(number) for _ in jax.tree.leaves(x)] for _, x in moments]

    def _one_pass(self, root: int, path: Path, graph: Graph, stored: Any) -> OnePass | None:
        """Returns how one pass computes output ``root`` and all that share moments with it."""
        reads, shape = graph.reads[graph.outputs[root]], graph.shape(graph.outputs[root])
        outputs = [j for j, value in enumerate(graph.outputs) if graph.reads[value] & reads]
        read = {i: q for i, q in stored.items() if reads >> i & 1}
        if not read or any(q.shape != shape or not has_blocks(q) for q in read.values()):
            return None
        blocks = {blocks_of(q).rows_and_columns for q in read.values()}
        shard = self._shards.shape_of(path, shape)
        if len(blocks) > 1 or shard is None:
            return None
        function = _function_for(shard)
        # No shard ends within a block.
        ends = zip(shard[-2:], shape[-2:], *blocks, strict=True)
        if function is None or any(n != full and n % size for n, full, size in ends):
            return None

        # From the outputs back to the moments, and to what does not depend on any.
        equations: set[int] = set()
        full, small, literals = [], [], {}
        seen, pending = set(read), [graph.outputs[j] for j in outputs]
        if any(graph.reads[v] & ~reads or graph.types[v].dtype not in _DTYPES for v in pending):
            return None
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            index, constant = graph.producer.get(value), graph.constants.get(value)
            if graph.shape(value) == shape and index is not None and _is_local(graph, index):
                equations.add(index)
                pending += graph.equations[index].operands
            elif graph.reads[value]:
                return None
            elif graph.shape(value) == shape and graph.types[value].dtype in _DTYPES:
                full.append(value)
            elif graph.shape(value) != ():
                return None
            elif constant is None or isinstance(constant, jax.core.Tracer):
                small.append(value)
            else:
                literals[value] = np.asarray(constant, graph.types[value].dtype)[()]
        ordered = [graph.equations[i] for i in sorted(equations)]
        values = (ordered, sorted(full), sorted(small), literals, read, outputs)
        how = self._rounding, self._shards.interpret
        return OnePass(function, graph, root, path, shape, *values, *how)

    def outputs_of(self, root: int) -> list[int]:
        """Returns the step's outputs that are made with an update; none if it takes no pass."""
        update = self._passes.get(root)
        return [] if update is None else [k for j in update.outputs for k in self._numbers[j]]

    def run(self, root: int) -> dict[int, jax.Array]:
        """Returns these outputs, computed on the shards of each device."""
        update = self._passes[root]
        equations, _ = update.graph.needed([*update.full, *update.small], self._values)
        evaluate(equations, self._values)
        full, small = ([self._values[v] for v in which] for which in (update.full, update.small))
        param = self._params[root]
        if param is not None:
            # It may be one of these already, as with weight decay.
            at = next((k for k, x in enumerate(full) if x is param), len(full))
            full += [param] if at == len(full) else []
            update = update._replace(param=at)

        every = tuple(range(len(update.shape)))
        *lead, row, column = every
        with jax.named_scope("low_precision"):
            noise = []
            if self._key is not None:
                for i in update.stored:
                    key = salted(self._key, self._paths[i])
                    hashes = hashes_of_matrices(key, update.shape)
                    noise += [x.reshape(update.shape[:-2]) for x in hashes]
            places = [jnp.arange(update.shape[d], dtype=jnp.int32) for d in (row, column)]
            operands = Operands(small, noise, places, full, list(update.stored.values()))
            treedef: Any
            arrays, treedef = jax.tree.flatten(operands)
            dims = [()] * len(small) + [tuple(lead)] * len(noise) + [(row,), (column,)]
            dims += [every] * (len(arrays) - len(dims))

            def run(*arrays: jax.Array) -> list[jax.Array]:
                return update.function(update, treedef.unflatten(arrays))

            numbers = self.outputs_of(root)
            made = self._shards.run(update.path, run, arrays, dims, [every] * len(numbers))
        return dict(zip(numbers, made, strict=True))


# --- Which updates take a pass --------------------------------------------------------------------


def _function_for(shard: Sequence[int]) -> Any:
    """Returns what updates a shard in one pass; None where XLA's form is as good."""
    from optax_ext.low_precision import _row_loop  # imports this file

    if shard[-2] >= BLOCK_ROWS and shard[-1] >= _KERNEL_COLUMNS:
        from optax_ext.low_precision import _tile_kernel  # loads Pallas, a third of a second

        return _tile_kernel.update_tiles
    return _row_loop.update_rows if _row_loop.takes(shard) else None


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
        return graph.shape(eqn.operands[0]) == ()
    return eqn.primitive.name in _IN_KERNELS and len(eqn.results) == 1


# --- In a pass ------------------------------------------------------------------------------------


def block_columns(update: OnePass) -> int:
    return blocks_of(next(iter(update.stored.values()))).rows_and_columns[1]


def results_of(update: OnePass, operands: Operands) -> tuple[list[Any], dict[int, int]]:
    """Returns types of the outputs, and ``{leaf of (full, stored): leaf of types over it}``."""
    arrays = (operands.full, operands.stored)
    leaves, treedef = jax.tree.flatten(arrays)
    full_at, stored_at = jax.tree.unflatten(treedef, range(len(leaves)))
    stored = dict(zip(update.stored, zip(operands.stored, stored_at, strict=True), strict=True))
    shape = operands.stored[0].codes.shape
    types: list[Any] = []
    aliases, num = {}, 0
    like: Any
    for j in update.outputs:
        if j in stored:
            like, over = stored[j]
        else:
            dtype = update.graph.types[update.graph.outputs[j]].dtype
            over = full_at[update.full.index(j)] if j in update.full else None
            if j == update.root and update.param is not None:
                over = update.param
                dtype = leaves[over].dtype
            over = None if over is None or leaves[over].dtype != dtype else over
            like = jax.ShapeDtypeStruct(shape, dtype)
        types.append(like)
        for k in jax.tree.leaves(over):
            aliases[k] = num
            num += 1
        num += over is None
    return types, aliases


def update_slice(
    update: OnePass,
    full: list[jax.Array],
    small: dict[int, jax.Array],  # by their numbers in the graph
    stored: list[Quantized],
    shape: tuple[int, ...],  # of a slice
    blocks: Any = None,  # as for ``dequantize``
) -> list[jax.Array]:
    """Returns the outputs of a slice of dequantized arrays; the new parameter, not its update."""
    values: dict[int, Any] = update.literals | small
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
        elif name not in ("copy", "copy_p"):
            operands = list(bind(eqn, operands))
        values |= zip(eqn.results, operands, strict=True)
    made = {j: jnp.broadcast_to(values[update.graph.outputs[j]], shape) for j in update.outputs}
    if update.param is not None:
        param = full[update.param]
        total = param.astype(jnp.float32) + made[update.root].astype(jnp.float32)
        made[update.root] = total.astype(param.dtype)  # as optax.apply_updates
    return list(made.values())
