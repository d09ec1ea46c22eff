"""Pieces of a loss of the whole batch that keep rows apart: each is a ``shard_map`` in its program.

In a piece a parameter is gathered, and its gradient reduce-scattered, by this library. What couples
rows between pieces is left to the partitioner, and so is a piece without sharded parameters.
"""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from optax_ext.equations import Scan, inner_jaxprs, name_of, record_of, trace
from optax_ext.traced_graph import Value
from sharding._jaxprs import all_equations
from sharding._types import Tree
from sharding.loss._evaluate import Evaluator, Param, is_param
from sharding.loss._row_pieces import RowPieces
from sharding.loss._row_states import RowsMeet
from sharding.loss._row_walk import last_line
from sharding.placement._layout import Layout
from sharding.placement._on_mesh import over_data_axes
from sharding.placement._specs import axes_of, by_dim, entry_of
from sharding.step._gather_and_reduce import DeviceRule

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


def _with_rows(layout: Layout, dim: int = 0) -> P:
    """The spec of an array of whose dim each device has a part."""
    return P(*[None] * dim, entry_of(layout.data_axes))


def _specs(x: Param) -> tuple[P, P]:
    """On the data axes: of what is held of it, and of its gradient."""
    held, shard = (
        x.rule.of_slice(x.rule.layout.manual_spec(spec), x.held.ndim)
        for spec in (x.rule.held, x.rule.shard)
    )
    return held, shard


def _rule_in_piece(x: Param) -> DeviceRule:
    """How a device gets, and reduces, what it has of a parameter of the whole mesh.

    What is not sharded of its gradient is summed where it leaves the piece.
    """
    leaf, dtype = x.rule, x.held.dtype
    shard = by_dim(leaf.shard, leaf.ndim)
    return DeviceRule(
        leaf.layout,
        leaf.dim,
        dtype,
        dtype,
        gathers=leaf.layout.stage == 3,
        entries=tuple(by_dim(leaf.used, leaf.ndim)),
        reduce_dtype=leaf.reduce_dtype if leaf.dim else None,
        reduce_axes=axes_of(shard[leaf.dim]) if leaf.dim else (),
        in_piece=True,
        again=leaf.again,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _of_devices(rule: DeviceRule, shard: P, tap: jax.Array) -> jax.Array:
    """A tap (devices, ...) for what each device makes of a gradient; its sum is that of ``tap``."""
    zeros = jnp.zeros((rule.layout.num_devices, *tap.shape), tap.dtype)
    return rule.layout.constrain(zeros, _with_rows(rule.layout))


def _reduce_once(rule: DeviceRule, shard: P, _: None, grads: jax.Array) -> tuple[jax.Array]:
    # Those of replicas.
    others = tuple(axis for axis in rule.layout.data_axes if axis not in rule.reduce_axes)

    def reduce(grad: jax.Array) -> jax.Array:
        own = rule.reduce(grad[0], grad)
        return lax.psum(own, others) if others else own

    return (over_data_axes(rule.layout, reduce, _with_rows(rule.layout), shard)(grads),)


_of_devices.defvjp(lambda rule, shard, tap: (_of_devices(rule, shard, tap), None), _reduce_once)


def _has_loop(eqn: Any) -> bool:
    """Whether an equation is a scan, or has one in it, as a checkpoint may."""
    inner = (x for jaxpr in inner_jaxprs(eqn) for x in all_equations(jaxpr))
    return any(isinstance(record_of(x), Scan) for x in (eqn, *inner))


# --- A loss in pieces -----------------------------------------------------------------------------


class PiecesEvaluator(Evaluator):
    """Evaluates a loss whose pieces run per device; ``report`` gets how each part ran."""

    def __init__(self, layout: Layout, pieces: RowPieces, report: list[DevicePiece]):
        super().__init__(layout.recomputes)
        self.layout, self._report = layout, report
        self._pieces = dict[int, RowPieces]()  # by the id of a jaxpr
        self._found = dict[Any, DevicePiece]()
        self._parted = set[int]()  # ids of those of which some ran per device
        pending = [pieces]
        while pending:
            pieces = pending.pop()
            self._pieces[id(pieces.graph.jaxpr)] = pieces
            pending += pieces.inner.values()

    def run(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], in_loop: bool = False
    ) -> list[Any]:
        pieces = self._pieces.get(id(jaxpr))
        sharded = {Value(i) for i, x in enumerate(args) if is_param(x) and x.rule.is_sharded}
        if pieces is None or not pieces.is_parted(sharded):
            return super().run(jaxpr, consts, args, in_loop)
        graph, outer = pieces.graph, self._eqn
        values: dict[Any, Any] = dict(graph.constants) | dict(enumerate(args))
        turns = pieces.in_turn(sharded)
        own = [numbers for piece, numbers in turns.values() if piece is not None]
        summed = self._summed(pieces, own, values)
        for turn, (piece, numbers) in turns.items():
            if piece is None:
                self.evaluate([graph.equations[i] for i in numbers], values, in_loop)
            else:
                self._run_piece(pieces, piece, numbers, values, summed, in_loop)
            self._say(pieces, turn, piece, numbers)
        self._eqn = outer
        self._parted.add(id(pieces))
        return [values[v] for v in graph.outputs]

    def _summed(
        self, pieces: RowPieces, own: list[list[int]], values: dict[Any, Any]
    ) -> dict[Any, jax.Array]:
        """Taps of what several pieces use, such as a table that is a head, too: sent once.

        Not of stacks that loops use, of whose gradients one layer is in memory.
        """
        uses = collections.Counter(v for numbers in own for v in set(pieces.reads(numbers)))
        equations = [pieces.graph.equations[i] for numbers in own for i in numbers]
        in_loops = {v for eqn in equations if _has_loop(eqn) for v in eqn.operands}
        params = {v: values[v] for v, n in uses.items() if n > 1 and is_param(values.get(v))}
        return {
            v: _of_devices(_rule_in_piece(x), _specs(x)[1], x.tap)
            for v, x in params.items()
            if x.tap is not None and x.rule.dim and v not in in_loops
        }

    def _run_piece(
        self,
        pieces: RowPieces,
        p: int,
        own: list[int],
        values: dict[Any, Any],
        summed: dict[Any, jax.Array],
        in_loop: bool,
    ) -> None:
        """Adds what a piece returns to ``values``; of ``summed`` a device keeps its gradient."""
        equations = [pieces.twin.equations[i] for i in pieces.needs(own)]
        results = pieces.results(p, own)
        inputs = pieces.reads(own)
        params = {v: values[v] for v in inputs if is_param(values[v])}
        others = [v for v in inputs if v not in params]

        def on_device(pairs: list[Any], arrays: list[Any]) -> list[Any]:
            known = pieces.numbers | dict(zip(others, arrays, strict=True))
            for (v, x), (held, tap) in zip(params.items(), pairs, strict=True):
                rule = _rule_in_piece(x)
                if v in summed:
                    rule, tap = rule._replace(reduce_dtype=None), tap[0]
                known[v] = x.of_held(held, tap)._replace(rule=rule)
            evaluator = Evaluator(self.recompute)
            evaluator.evaluate(equations, known, in_loop)
            return [evaluator.full(known[v]) for v in results]

        def spec(value: Any) -> P:
            dim = pieces.row_dim(value)
            return P() if dim is None else _with_rows(self.layout, dim)

        def specs(v: Any, x: Param) -> tuple[P, P | None]:
            held, shard = _specs(x)
            if v in summed:
                return held, _with_rows(self.layout)
            return held, None if x.tap is None else shard

        pairs = [(x.held, summed.get(v, x.tap)) for v, x in params.items()]
        in_specs = [specs(v, x) for v, x in params.items()], [spec(v) for v in others]
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
        self._report[:] = self._found.values()


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
