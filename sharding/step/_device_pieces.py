"""Pieces of a loss of the whole batch that keep rows apart: each is a ``shard_map`` in its program.

In a piece a parameter is gathered, and its gradient reduce-scattered, by this library. What couples
rows between pieces is left to the partitioner, and so is a piece without sharded parameters.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import PartitionSpec

from optax_ext.equations import Scan, name_of, record_of, trace
from optax_ext.traced_graph import Value, bind
from sharding._types import Tree
from sharding.collectives._reduce_scatter import (
    ArrayLayout,
    all_gather_arrays,
    reduce_scatter_arrays,
)
from sharding.loss._evaluate import Evaluator, Param, is_param
from sharding.loss._row_pieces import RowPieces
from sharding.loss._row_states import RowsMeet
from sharding.loss._row_walk import last_line
from sharding.placement._layout import Layout
from sharding.placement._on_mesh import over_data_axes
from sharding.placement._specs import axes_of, by_dim, entry_of, num_shards, of_last_dims

P = PartitionSpec


class DevicePiece(NamedTuple):
    """A part of a loss, and how it runs."""

    what: str  # its operations, or the operation that couples rows
    where: str  # the user's line of its first loop, or of its first operation
    per_device: bool  # or by the partitioner
    reason: str

    def __str__(self) -> str:
        how = "per device" if self.per_device else "partitioned"
        return f"{how}: {self.what}" + f" ({self.where})" * bool(self.where) + f": {self.reason}"


# --- Parameters in a piece ------------------------------------------------------------------------


class PieceRule(NamedTuple):
    """One parameter, or a slice of it, on one device."""

    leaf: Any  # its GlobalRule
    held: P  # on the data axes, of what devices hold; of all dims of the parameter
    shard: P  # the same of its gradient
    by_use: bool = False

    @classmethod
    def of(cls, leaf: Any) -> "PieceRule":
        def full(spec: P) -> P:
            return P(*by_dim(leaf.layout.manual_spec(spec), leaf.ndim))

        return cls(leaf, full(leaf.held), full(leaf.shard) if leaf.trained else full(P()))

    @property
    def again(self) -> bool:
        return bool(self.leaf.again)

    @property
    def is_sharded(self) -> bool:
        return any(self.held) or any(self.shard)

    def specs(self, x: Param) -> tuple[P, P | None]:
        """Of what is held of it, and of its tap."""
        held, shard = (of_last_dims(tuple(s), x.held.ndim) for s in (self.held, self.shard))
        return held, None if x.tap is None else shard

    def _array_layout(self, x: jax.Array, spec: P) -> ArrayLayout:
        """Of an array that lacks leading dims, which loops over layers took off."""
        return ArrayLayout(_dim_of_shards(spec), self.leaf.of_slice(self.leaf.used, x.ndim))

    def fetch(self, held: jax.Array) -> jax.Array:
        if not any(self.held):
            return held
        with jax.named_scope("gather"):
            layouts = [self._array_layout(held, self.held)]
            return all_gather_arrays(self.leaf.layout, [held], layouts)[0]

    def reduce(self, grad: jax.Array, tap: Any) -> jax.Array:
        """This device's shard; what is not sharded is summed where it leaves the piece."""
        del tap
        grad = grad.astype(self.leaf.reduce_dtype)
        if not any(self.shard):
            return grad
        with jax.named_scope("reduce_scatter"):
            if self.leaf.layout.platform == "tpu":
                # XLA:TPU lets some products transpose what they return, and then all-reduces it.
                grad = lax.optimization_barrier(grad)
            layouts = [self._array_layout(grad, self.shard)]
            axes = axes_of(self.shard[_dim_of_shards(self.shard)])
            return reduce_scatter_arrays(self.leaf.layout, axes, [grad], layouts)[0]

    def view(self, x: Param, eqn: Any, rest: list[Any]) -> list[Param] | None:
        is_part = eqn.primitive.name == "slice" and not x.moves
        views: list[Param] | None = self._part(x, eqn) if is_part else self.leaf.view(x, eqn, rest)
        return views

    def _part(self, x: Param, eqn: Any) -> list[Param] | None:
        """A slice, such as a layer, of what is held; None if it has a part of the sharded dim."""

        def of_shard(array: jax.Array, spec: P) -> jax.Array | None:
            dim, limits = _dim_of_shards(spec), list(eqn.params["limit_indices"])
            size = array.shape[dim] * num_shards(self.leaf.layout.mesh, spec)
            if dim:
                is_full = (eqn.params["start_indices"][dim], limits[dim]) == (0, size)
                if not is_full or eqn.params["strides"]:
                    return None
                limits[dim] = array.shape[dim]
            return bind(eqn, [array], eqn.params | {"limit_indices": tuple(limits)})[0]

        held = of_shard(x.held, self.held)
        tap = None if x.tap is None else of_shard(x.tap, self.shard)
        if held is None or (tap is None) != (x.tap is None):
            return None
        return [x.of_held(held, tap)._replace(is_part=True)]

    def stack(self, x: Param) -> Param | None:
        sliced = -x.held.ndim in (_dim_of_shards(self.held), _dim_of_shards(self.shard))
        return None if x.moves or sliced else x

    def layer(self, x: Param) -> Param:
        return x._replace(in_layer=True)


def _dim_of_shards(spec: P) -> int:
    """Counted from the end; 0 if there is none."""
    return next((d - len(spec) for d, entry in enumerate(spec) if entry), 0)


# --- A loss in pieces -----------------------------------------------------------------------------


class PiecesEvaluator(Evaluator):
    """Evaluates a loss whose pieces run per device; ``report`` says how each part ran."""

    def __init__(self, layout: Layout, pieces: RowPieces):
        super().__init__(layout.recomputes)
        self.layout = layout
        self._pieces = dict[int, RowPieces]()  # by the id of a jaxpr
        self._found = dict[Any, DevicePiece]()
        self._parted = set[int]()  # ids of those of which some ran per device
        pending = [pieces]
        while pending:
            pieces = pending.pop()
            self._pieces[id(pieces.graph.jaxpr)] = pieces
            pending += pieces.inner.values()

    @property
    def report(self) -> list[DevicePiece]:
        return list(self._found.values())

    def run(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], in_loop: bool = False
    ) -> list[Any]:
        pieces = self._pieces.get(id(jaxpr))
        sharded = {
            Value(i) for i, x in enumerate(args) if is_param(x) and PieceRule.of(x.rule).is_sharded
        }
        if pieces is None or not pieces.is_parted(sharded):
            return super().run(jaxpr, consts, args, in_loop)
        graph, outer = pieces.graph, self._eqn
        values: dict[Any, Any] = dict(graph.constants) | dict(enumerate(args))
        for turn, (piece, numbers) in pieces.in_turn(sharded).items():
            if piece is None:
                self.evaluate([graph.equations[i] for i in numbers], values, in_loop)
            else:
                self._run_piece(pieces, piece, numbers, values, in_loop)
            self._say(pieces, turn, piece, numbers)
        self._eqn = outer
        self._parted.add(id(pieces))
        return [values[v] for v in graph.outputs]

    def _run_piece(
        self, pieces: RowPieces, p: int, own: list[int], values: dict[Any, Any], in_loop: bool
    ) -> None:
        """Adds what a piece returns to ``values``."""
        equations = [pieces.twin.equations[i] for i in pieces.needs(own)]
        results = pieces.results(p, own)
        inputs = pieces.reads(own)
        params = {v: values[v] for v in inputs if is_param(values[v])}
        rules = {v: PieceRule.of(x.rule) for v, x in params.items()}
        others = [v for v in inputs if v not in params]

        def on_device(pairs: list[Any], arrays: list[Any]) -> list[Any]:
            known = pieces.numbers | dict(zip(others, arrays, strict=True))
            for (v, x), pair in zip(params.items(), pairs, strict=True):
                known[v] = x.of_held(*pair)._replace(rule=rules[v])
            evaluator = Evaluator(self.recompute)
            evaluator.evaluate(equations, known, in_loop)
            return [evaluator.full(known[v]) for v in results]

        def spec(value: Any) -> P:
            dim = pieces.row_dim(value)
            return P() if dim is None else P(*[None] * dim, entry_of(self.layout.data_axes))

        pairs = [(x.held, x.tap) for x in params.values()]
        specs = [rules[v].specs(x) for v, x in params.items()]
        in_specs = specs, [spec(v) for v in others]
        run = over_data_axes(self.layout, on_device, in_specs, [spec(v) for v in results])
        arrays = [self.full(values[v]) for v in others]
        values |= zip(results, run(pairs, arrays), strict=True)

    def _say(self, pieces: RowPieces, turn: int, piece: int | None, numbers: list[int]) -> None:
        """Adds to the report what ran, or the first cause why it was not per device."""
        equations = pieces.graph.equations
        if piece is not None:
            loops = [i for i in numbers if isinstance(record_of(equations[i]), Scan)]
            first, reason = [*loops, *numbers][0], "rows are kept apart"
            what = f"{len(numbers)} operations" + f", {len(loops)} of them loops" * bool(loops)
        else:
            parted = {i for i, inner in pieces.inner.items() if id(inner) in self._parted}
            causes = [i for i in numbers if i in pieces.causes and i not in parted]
            if not causes:
                return
            first, cause = causes[0], pieces.causes[causes[0]]
            what, reason = name_of(equations[first]), getattr(cause, "reason", cause)
        where = last_line(equations[: first + 1])
        self._found[id(pieces), turn] = DevicePiece(what, where, piece is not None, reason)


def pieces_of(
    layout: Layout, fn: Callable[..., Any], closed: Any, params: Tree, args: Any, specs: list[P]
) -> RowPieces | str:
    """The pieces of a loss, traced as ``closed`` of ``params`` and ``args`` of these specs.

    Or the reason that all of it is left to the partitioner.
    """
    devices = layout.num_devices
    both = zip(jax.tree.leaves(args), specs, strict=True)
    rows = [x.shape[0] for x, spec in both if any(spec)]
    if layout.stage < 1 or devices == 1:
        return f"no gradient is scattered at stage {layout.stage} on {devices} devices"
    if closed.jaxpr.effects:
        return "it has effects"
    if not rows or any(size % devices for size in rows):
        return "it has no batch whose rows the devices share"
    twins: list[Any] = []
    trace_on_device = lambda *args: twins.append(trace(fn, params, *args)[0])  # noqa: E731
    in_specs = jax.tree.unflatten(jax.tree.structure(args), specs)
    try:
        jax.eval_shape(over_data_axes(layout, trace_on_device, in_specs, P()), *args)
        return RowPieces(closed, twins[0], devices, max(rows))
    except RowsMeet as meet:
        return str(meet)
    except Exception as error:  # of the user's function, whatever it raises
        return f"it cannot be traced with the rows of one device: {error}"
