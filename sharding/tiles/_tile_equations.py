"""Equations of a chain, evaluated for the rows of one tile.

The trace has the shapes of all rows. Most equations name none of them; those that do, as a reshape
or a broadcast, get the shapes of a tile from the states of their results.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext.equations import Call, CustomDerivative, Remat, record_of
from optax_ext.traced_graph import Equation, Graph, Value, bind
from sharding._types import Array
from sharding.loss._row_dims import RowStep, rule_of
from sharding.loss._row_states import Rows, RowsMeet, unknown
from sharding.loss._row_walk import Walk, constant, inexact_of, pullback_of, steps_of


def row_dim(state: Any) -> int | None:
    """The one dim of a value in which rows are; None if there is no such, or are more."""
    is_apart = isinstance(state, Rows) and not state.summed and len(state.dims) == 1
    return state.dims[0] if is_apart else None


def part_of(x: Array, state: Any, start: Any, count: int) -> Array:
    """So many rows of a value, from one on."""
    dim = row_dim(state)
    if dim is None:
        return x
    first, last = x.shape[:dim], x.shape[dim + 1 :]
    split = x.reshape(*first, state.before, state.count, state.after, *last)
    rows = lax.dynamic_slice_in_dim(split, start, count, dim + 1)
    return rows.reshape(*first, -1, *last)


def with_part(x: Array, rows: Array, state: Any, start: Any, count: int) -> Array:
    """A value, in which these rows are written."""
    dim = row_dim(state)
    assert dim is not None
    first, last = x.shape[:dim], x.shape[dim + 1 :]
    split = x.reshape(*first, state.before, state.count, state.after, *last)
    rows = rows.reshape(*first, state.before, count, state.after, *last)
    return lax.dynamic_update_slice_in_dim(split, rows, start, dim + 1).reshape(x.shape)


def tile_shape(shape: Sequence[int], state: Any, count: int) -> tuple[int, ...]:
    """Of a value, the shape for a tile of so many rows."""
    dim = row_dim(state)
    if dim is None:
        return tuple(shape)
    return (*shape[:dim], state.before * count * state.after, *shape[dim + 1 :])


def for_each_tile(
    tile: Callable[[Any, Any, int], Any], carry: Any, count: int, size: int, reverse: bool = False
) -> Any:
    """What ``tile(carry, start, size)`` makes of all tiles, in order; the last may be smaller."""
    full, rest = divmod(count, size)
    if rest and reverse:
        carry = tile(carry, full * size, rest)
    step = lambda carry, start: (tile(carry, start, size), None)  # noqa: E731
    carry, _ = lax.scan(step, carry, jnp.arange(full) * size, reverse=reverse)
    return tile(carry, full * size, rest) if rest and not reverse else carry


class TileEvaluation:
    """The equations of a graph, whose values have these states, for ``count`` rows from ``start``.

    It is differentiated; of functions with derivatives of their own, these are kept.
    """

    def __init__(self, graph: Graph, states: dict[Value, Any], start: Any, count: int):
        self._graph, self._states = graph, states
        self._start, self._count = start, count

    def run(self, equations: Sequence[Equation], values: dict[Value, Any]) -> None:
        """Adds the results of equations to ``values``, which has their operands.

        Raises:
          RowsMeet: if a result has another shape than that of the tile.
        """
        steps = steps_of(equations, None, self._graph.types)
        for eqn, step in zip(equations, steps, strict=True):
            operands = [self._operand(step, k, values[v]) for k, v in enumerate(eqn.operands)]
            outs = self._results(eqn, step, operands)
            for v, out in zip(eqn.results, outs, strict=True):
                shape = tile_shape(self._graph.shape(v), self._states[v], self._count)
                if jnp.shape(out) != shape:
                    raise RowsMeet(f"{step.name} of a tile gives {jnp.shape(out)}, not {shape}")
                values[v] = out

    def _operand(self, step: RowStep, k: int, x: Any) -> Any:
        """An operand; of what all rows share, and has an equal entry for each, as many entries."""
        state, out = self._states.get(step.operands[k]), self._states[step.results[0]]
        dim = row_dim(out)
        if dim is None or row_dim(state) is not None or record_of(step.equation):
            return x
        for d, place in enumerate(rule_of(step).places(step)[k]):
            if place == dim and jnp.shape(x)[d] == self._graph.shape(step.results[0])[dim]:
                size = tile_shape(self._graph.shape(step.results[0]), out, self._count)[dim]
                return lax.slice_in_dim(x, 0, size, axis=d)
        return x

    def _results(self, eqn: Equation, step: RowStep, operands: list[Any]) -> Sequence[Any]:
        record = record_of(eqn)
        if isinstance(record, CustomDerivative):
            return self._with_derivative(eqn, step, record, operands)
        if isinstance(record, Call | Remat):  # a tile is computed again as a whole
            return self._inside(record.body, self._states_of(eqn.operands), operands)
        if step.name == "iota":
            return [self._iota(eqn)]
        return bind(eqn, operands, self._params(eqn, step))

    def _states_of(self, values: Sequence[Value]) -> list[Any]:
        return [self._states.get(v, unknown(self._graph.types[v])) for v in values]

    def _params(self, eqn: Equation, step: RowStep) -> dict[str, Any]:
        """The parameters of an equation, with the sizes of a tile."""
        params, state = dict(eqn.params), self._states[eqn.results[0]]
        shape = tile_shape(step.result_shape(), state, self._count)
        of_operand = self._states.get(eqn.operands[0]) if eqn.operands else None
        if step.name in ("broadcast_in_dim", "reshape"):
            params["shape" if step.name == "broadcast_in_dim" else "new_sizes"] = shape
        elif step.name == "slice" and (dim := row_dim(of_operand)) is not None:
            limits = list(params["limit_indices"])
            limits[dim] = tile_shape(step.shapes[0], of_operand, self._count)[dim]
            params["limit_indices"] = tuple(limits)
        elif step.name == "dynamic_slice":
            params["slice_sizes"] = shape
        elif step.name == "gather" and (dim := row_dim(of_operand)) is not None:
            sizes = list(params["slice_sizes"])
            if sizes[dim] == step.shapes[0][dim]:
                sizes[dim] = tile_shape(step.shapes[0], of_operand, self._count)[dim]
            params["slice_sizes"] = tuple(sizes)
        return params

    def _iota(self, eqn: Equation) -> Array:
        """The numbers of entries along a dim, which may be that of rows."""
        (value,) = eqn.results
        shape, state, p = self._graph.shape(value), self._states[value], eqn.params
        if row_dim(state) != p["dimension"]:
            of_tile = tile_shape(shape, state, self._count)
            return lax.broadcasted_iota(p["dtype"], of_tile, p["dimension"])
        line = Rows((0,), state.count, state.before, state.after)
        numbers = lax.iota(p["dtype"], shape[p["dimension"]])
        numbers = part_of(numbers, line, self._start, self._count)
        of_tile = tile_shape(shape, state, self._count)
        return lax.broadcast_in_dim(numbers, of_tile, (p["dimension"],))

    # --- Functions of the user --------------------------------------------------------------------

    def _inside(self, body: Any, ins: list[Any], operands: Sequence[Any]) -> list[Any]:
        """The results of a function of operands in these states."""
        graph = Graph.of(body)
        states: dict[Value, Any] = {Value(k): state for k, state in enumerate(ins)}
        states |= {v: constant(x) for v, x in graph.constants.items()}
        Walk().run(steps_of(graph.equations, None, graph.types), states)
        values: dict[Value, Any] = {Value(k): x for k, x in enumerate(operands)}
        values |= graph.constants
        TileEvaluation(graph, states, self._start, self._count).run(graph.equations, values)
        return [values[v] for v in graph.outputs]

    def _with_derivative(
        self, eqn: Equation, step: RowStep, record: CustomDerivative, operands: list[Any]
    ) -> list[Any]:
        """A function with a derivative of its own, which is traced for all rows."""
        ins, outs = self._states_of(eqn.operands), self._states_of(eqn.results)
        own, of_results = inexact_of(step.types), inexact_of(step.result_types)

        @jax.custom_vjp
        def run(*given: Any) -> list[Any]:
            return self._inside(record.body, ins, given)

        def back(given: Any, cotangents: list[Any]) -> tuple[Any, ...]:
            pull, of_given = pullback_of(step), dict[int, Any]()
            if pull is not None:
                states = [*ins, *(outs[k] for k in of_results)]
                given = [*given, *(cotangents[k] for k in of_results)]
                of_given = dict(zip(own, self._inside(pull, states, given), strict=True))
            return tuple(of_given.get(k) for k in range(len(ins)))

        run.defvjp(lambda *given: (run(*given), given), back)
        return list(run(*operands))
