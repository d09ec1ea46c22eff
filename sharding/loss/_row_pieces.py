"""Pieces of a traced loss that keep rows apart: what each device can compute of its own rows.

The loss is traced with the rows of all devices, and with those of one. Its equations are of three
kinds. Some keep rows apart, as their states prove: a device computes its rows by the same equation
of its own trace. Some read no rows: all that needs them, a piece or what couples rows, computes its
own. The others are coupled, or not known not to be; in what they return, rows are where the two
traces have other sizes. A piece is all that can run between two of them. Bodies of loops and of
checkpoints that couple rows have pieces, too.
"""

import functools
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import jax

from optax_ext.equations import Remat, Scan, record_of
from optax_ext.traced_graph import Equation, Graph, Value
from sharding.loss._row_states import NUMBER, Coupled, Rows, RowsMeet, Shared, unknown
from sharding.loss._row_walk import OTHER_PROGRAM, Walk, constant, located, steps_of


class RowPieces:
    """The equations of a trace: which of them run per device, and in which piece.

    ``ready`` is, of each value, the first piece that can read it.
    """

    def __init__(self, closed: Any, twin: Any, devices: int, rows: int):
        """Of traces with the rows of all devices, so many, and with those of one.

        Raises:
          RowsMeet: if they are not the same program.
        """
        graph, other = self.graph, self.twin = Graph.of(closed), Graph.of(twin)
        values = [[(eqn.operands, eqn.results) for eqn in x.equations] for x in (graph, other)]
        if values[0] != values[1] or graph.constants.keys() != other.constants.keys():
            raise RowsMeet(OTHER_PROGRAM)
        self._devices, self._rows, self._growth = devices, rows, Fraction(1, devices)
        of_traces = graph.equations, other.equations, graph.types, other.types
        self._steps = steps_of(*of_traces, self._growth)
        self._readers: dict[Value, set[int]] = {v: {-1} for v in graph.outputs}
        for number, eqn in enumerate(graph.equations):
            for v in eqn.operands:
                self._readers.setdefault(v, set()).add(number)
        needed = graph.needed(graph.outputs, graph.constants)[0]
        self._needed = {graph.producer[v] for eqn in needed for v in eqn.results}
        self._left: set[int] = set()  # equations whose results could not leave a piece
        self._assign()
        while left := self._stuck():
            self._left |= left
            self._assign()
        self.inner = dict(self._inner())  # by the number of an equation: those of its body

    # --- Rows -------------------------------------------------------------------------------------

    def _shapes(self, value: Value) -> list[tuple[int, ...]]:
        return [tuple(getattr(x.types[value], "shape", ())) for x in (self.graph, self.twin)]

    def _is_same(self, value: Value) -> bool:
        """Whether it has as many elements in both traces."""
        return len(set(self._shapes(value))) == 1

    def row_dim(self, value: Value) -> int | None:
        """The one dim of a value of which each device has a shard."""
        shapes = self._shapes(value)
        if len(shapes[0]) != len(shapes[1]):
            return None
        sizes = enumerate(zip(*shapes, strict=True))
        differ = [(d, here, there) for d, (here, there) in sizes if here != there]
        if len(differ) != 1 or differ[0][1] != self._devices * differ[0][2]:
            return None
        return differ[0][0]

    def _give(self, value: Value, level: int) -> None:
        """Of an input, or of what the partitioner computes: its state, when it can be read."""
        self.ready[value] = level + 1
        aval, dim = self.graph.types[value], self.row_dim(value)
        if dim is not None:
            size = aval.shape[dim]
            after = size // self._rows if size % self._rows == 0 else 1
            self.states[value] = Rows((dim,), size // after, after=after)
        elif self._is_same(value):
            self.states[value] = unknown(aval)
        else:
            self.states[value] = Coupled("several dims depend on the number of rows")

    def _assign(self) -> None:
        """Finds for each equation where it runs, in order."""
        graph = self.graph
        self.states: dict[Value, Any] = {}
        self.ready: dict[Value, int] = {}
        self.free: set[Value] = set()  # of which all that read it compute their own
        self.piece: dict[int, int] = {}  # of an equation that runs per device
        self.level: dict[int, int] = {}  # of one that does not: the last piece that is before it
        self.causes: dict[int, Any] = {}  # why it does not
        for value in (*map(Value, range(len(graph.jaxpr.invars))), *graph.constants):
            self._give(value, -1)
            if self._is_same(value):
                self.free.add(value)
                if value in graph.constants:
                    self.states[value] = constant(graph.constants[value])
        walk = Walk(self._growth)
        for number, (eqn, step) in enumerate(zip(graph.equations, self._steps, strict=True)):
            walk.run([step], self.states)
            outs = [located(self.states[v], self._steps, number) for v in eqn.results]
            ready = max((self.ready[v] for v in eqn.operands), default=0)
            of_pieces = [v for v in eqn.operands if graph.producer.get(v) in self.piece]
            cause = self._cause(number, eqn, outs)
            if cause is not None:
                self.causes[number] = cause
                self.level[number] = max([ready - 1, *(self.ready[v] for v in of_pieces)])
                for v in eqn.results:
                    self._give(v, self.level[number])
                continue
            self.ready |= dict.fromkeys(eqn.results, ready)
            if of_pieces or any(isinstance(v, Rows) for v in outs):
                self.piece[number] = ready
            else:
                self.free |= {*eqn.results}

    def _cause(self, number: int, eqn: Equation, outs: list[Any]) -> Any:
        """Why an equation is left to the partitioner; None if it keeps rows apart."""
        reads_rows = any(isinstance(self.states[v], Rows) for v in eqn.operands)
        for v, state in zip(eqn.results, outs, strict=True):
            if isinstance(state, Coupled):
                return state
            is_linear = isinstance(state, Rows) and state.is_linear
            if is_linear or not isinstance(state, Rows | Shared):
                return "rows are summed"
            if state.power != 0:
                return NUMBER
            if state.random and (isinstance(state, Rows) or not self._is_same(v)):
                return "the random numbers of a row depend on its index"
        if reads_rows and not any(isinstance(state, Rows) for state in outs):
            return "no result has rows"
        return "its rows are not one part of those of all devices" if number in self._left else None

    def _stuck(self) -> set[int]:
        """Equations of pieces, of which a result is read elsewhere and is no array of shards."""
        return {
            number
            for number, piece in self.piece.items()
            for v in self.graph.equations[number].results
            if self._leaves(v, piece) and not self._can_leave(v)
        }

    def _leaves(self, value: Value, piece: int) -> bool:
        """Whether a result of a piece is read elsewhere."""
        return any(self.piece.get(number) != piece for number in self._readers.get(value, ()))

    def _can_leave(self, value: Value) -> bool:
        state, dim = self.states[value], self.row_dim(value)
        if isinstance(state, Shared):
            return self._is_same(value)
        is_shard = state.before == 1 and dim is not None and state.dims[:1] == (dim,)
        return is_shard and state.own is None  # a device counts its own rows

    def _inner(self) -> Iterable[tuple[int, "RowPieces"]]:
        for number in self.level:
            body, twin = (record_of(x.equations[number]) for x in (self.graph, self.twin))
            if not isinstance(body, Scan | Remat) or not isinstance(twin, Scan | Remat):
                continue
            if body.options.get("length") == twin.options.get("length"):
                yield number, RowPieces(body.body, twin.body, self._devices, self._rows)

    # --- What a piece has, given the inputs that are sharded parameters ---------------------------

    def needs(self, equations: Iterable[int]) -> list[int]:
        """These equations, and what they need that any piece computes for itself, in order."""
        found, pending, producer = set[int](), list(equations), self.graph.producer
        while pending:
            number = pending.pop()
            if number not in found:
                found.add(number)
                operands = self.graph.equations[number].operands
                pending += [producer[v] for v in operands if v in self.free and v in producer]
        return sorted(found)

    def reads(self, equations: Iterable[int]) -> list[Value]:
        """What comes from elsewhere, but for numbers that are part of it."""
        within = [self.graph.equations[number] for number in self.needs(equations)]
        made = {v for eqn in within for v in eqn.results}
        read = {v for eqn in within for v in eqn.operands} - made
        return sorted(v for v in read if v not in self.numbers)

    @functools.cached_property
    def numbers(self) -> dict[Value, Any]:
        """Constants that are no arrays of a device."""
        constants = self.graph.constants.items()
        return {v: x for v, x in constants if v in self.free and not isinstance(x, jax.Array)}

    def per_device(self, sharded: set[Value]) -> dict[int, list[int]]:
        """The equations of each piece that runs per device: those that read sharded parameters."""
        each: dict[int, list[int]] = {}
        for number in sorted(self._needed & self.piece.keys()):
            each.setdefault(self.piece[number], []).append(number)
        return {p: own for p, own in each.items() if sharded.intersection(self.reads(own))}

    def results(self, piece: int, own: Iterable[int]) -> list[Value]:
        """Of a piece, what is read elsewhere."""
        made = (v for number in own for v in self.graph.equations[number].results)
        return [v for v in made if self._leaves(v, piece)]

    def in_turn(self, sharded: set[Value]) -> dict[int, tuple[int | None, list[int]]]:
        """Pieces that run per device, and the equations between them, in order."""
        graph, pieces = self.graph, self.per_device(sharded)
        inside = {number for own in pieces.values() for number in own}
        outside = {i for i in self._needed - inside if i in self.piece or i in self.level}
        outside |= {graph.producer[v] for v in graph.outputs if v in self.free & {*graph.producer}}
        turns: dict[int, tuple[int | None, list[int]]] = {2 * p: (p, pieces[p]) for p in pieces}
        for number in self.needs(outside):
            # After all pieces up to this one.
            last = (self.piece | self.level).get(number)
            if last is None:
                last = self.ready[graph.equations[number].results[0]] - 1
            turns.setdefault(2 * last + 1, (None, []))[1].append(number)
        return dict(sorted(turns.items()))

    def is_parted(self, sharded: set[Value]) -> bool:
        """Whether any piece runs per device."""
        return bool(self.per_device(sharded)) or any(
            inner.is_parted(self._sharded_operands(number, sharded))
            for number, inner in self.inner.items()
        )

    def _sharded_operands(self, number: int, sharded: set[Value]) -> set[Value]:
        """The inputs of a body that are sharded parameters, or are made of some."""
        found, producer = set[Value](), self.graph.producer
        for k, v in enumerate(self.graph.equations[number].operands):
            read = self.reads([producer[v]]) if v in self.free and v in producer else [v]
            if sharded.intersection(read):
                found.add(Value(k))
        return found
