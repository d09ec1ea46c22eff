"""Chains: equations of a trace that keep the rows of some dim apart, and are large inside.

A chain is found from its largest value, of which each dim is tried: back to what is smaller and has
the same rows, then on through all that reads this and keeps rows apart, to where least of it is
read by the rest. What the rows of a sum give is added up; other values that have rows, as labels,
masks and positions, are taken tile by tile with them.
"""

import dataclasses
import heapq
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from optax_ext.equations import CustomDerivative, Remat, record_of
from optax_ext.traced_graph import ELEMENTWISE, REDUCTIONS, Equation, Graph, Value
from sharding.loss._row_dims import RANDOM, RowStep, rule_of
from sharding.loss._row_states import Coupled, Rows, RowsMeet, is_total
from sharding.loss._row_walk import Walk, constant, located, steps_of
from sharding.tiles._tile_equations import TileEvaluation, row_dim, tile_shape

LEAST = 4  # chains whose largest value is so many times smaller than that of another are left
_MOST_TRIED = 64  # values that are in no chain
_MOST_EQUATIONS = 256  # after the largest value
_CHEAP = ELEMENTWISE | REDUCTIONS | {"broadcast_in_dim", "iota", "reshape", "squeeze"}


@dataclasses.dataclass(frozen=True)
class Chain:
    """Equations that run in tiles."""

    equations: tuple[int, ...]  # numbers in the graph
    states: dict[Value, Any]
    sliced: tuple[Value, ...]  # what it reads of the rows of a tile
    shared: tuple[Value, ...]  # what it reads for all rows
    outputs: tuple[Value, ...]  # what others read: rows, or sums over all
    count: int  # of rows
    rows: int  # of a tile
    largest: Value  # inside

    @property
    def read(self) -> tuple[Value, ...]:
        return (*self.sliced, *self.shared)


@dataclasses.dataclass(frozen=True)
class NoChain:
    """A large value that no tiles were found for."""

    largest: Value
    cause: str
    is_coupled: bool  # whether rows meet in it, along some dim


class NoGain(RowsMeet):
    """Raised for a chain that would save nothing."""


class ChainSearch:
    """The chains of a graph for tiles of its rows, at least ``tiles`` of them."""

    def __init__(self, graph: Graph, tiles: int):
        self._graph, self._tiles = graph, tiles
        self._steps = steps_of(graph.equations, None, graph.types)
        self._readers: dict[Value, set[int]] = {v: {len(self._steps)} for v in graph.outputs}
        for number, eqn in enumerate(graph.equations):
            for v in eqn.operands:
                self._readers.setdefault(v, set()).add(number)
        self._constants = {v: constant(x) for v, x in graph.constants.items()}
        self._chain_of: dict[int, Chain] = {}  # by the numbers of equations
        self._free = set(graph.constants)  # and what is made of them alone, as masks of indices
        for step, eqn in zip(self._steps, graph.equations, strict=True):
            if step.name in _CHEAP and self._free.issuperset(eqn.operands):
                self._free.update(eqn.results)

    def nbytes(self, value: Value) -> int:
        aval = self._graph.types[value]
        size = math.prod(getattr(aval, "shape", ()))
        return int(size * aval.dtype.itemsize) if hasattr(aval.dtype, "itemsize") else 0

    def _is_known(self, value: Value) -> bool:
        """Whether it is a number or an array of the trace, which is not differentiated."""
        constants = self._graph.constants
        return value in constants and not isinstance(constants[value], jax.core.Tracer)

    def find(self, taken: set[int] | None = None) -> Iterator[Chain | NoChain]:
        """Chains that share no equation, those with the largest values first."""
        taken, least, tried = taken or set(), 0.0, 0
        made = self._graph.producer
        floating = [
            Value(v) for v in made if jnp.issubdtype(self._graph.types[v].dtype, jnp.inexact)
        ]
        for v in sorted(floating, key=lambda v: (-self.nbytes(v), v)):
            if self.nbytes(v) < least or not self._graph.shape(v) or tried == _MOST_TRIED:
                return
            if made[v] in taken:
                continue
            found = self._around(v, taken)
            if isinstance(found, Chain):
                # What is smaller than a tile of another one is no peak.
                least = max(least, self.nbytes(v) / max(LEAST, self._tiles))
                taken |= set(found.equations)
                self._chain_of |= dict.fromkeys(found.equations, found)
            tried += isinstance(found, NoChain)
            yield found

    def _around(self, value: Value, taken: set[int]) -> Chain | NoChain:
        """The chain with this largest value that reads and returns least."""
        shape, chains, is_coupled = self._graph.shape(value), list[Chain](), False
        dims_of: dict[str, list[int]] = {}  # by the cause
        # The last dim of as many rows first: the first one is that of the batch, over devices.
        fits = [d for d, size in enumerate(shape) if size >= self._tiles]
        for dim in reversed(fits):
            try:
                chains.append(self._along(value, dim, taken))
            except RowsMeet as meet:
                dims_of.setdefault(str(meet), []).append(dim)
                is_coupled |= not isinstance(meet, NoGain)
        if not chains:
            causes = [f"along {_dims(dims)}: {cause}" for cause, dims in dims_of.items()]
            none = f"no dim of {shape} has {self._tiles} rows"
            return NoChain(value, "; ".join(causes) or none, is_coupled)
        return min(chains, key=lambda c: self._total((*c.sliced, *c.outputs)))

    def _along(self, value: Value, dim: int, taken: set[int]) -> Chain:
        """The chain of the rows along a dim of its largest value.

        Raises:
          RowsMeet: if there is none, or it is no smaller outside than inside.
        """
        count = self._graph.shape(value)[dim]
        ahead = _Ahead(self, self._back(value, Rows((dim,), count), taken), taken)
        equations = ahead.equations_to(value)
        states, equations = self._with_inputs(ahead.states, equations, taken)
        own = [self._graph.equations[number] for number in equations]
        results = dict.fromkeys(v for eqn in own for v in eqn.results)
        read = dict.fromkeys(v for eqn in own for v in eqn.operands if v not in results)
        sliced = tuple(v for v in read if row_dim(states.get(v)) is not None)
        shared = tuple(v for v in read if v not in sliced and not self._is_known(v))
        outputs = tuple(v for v in results if self._readers.get(v, set()) - set(equations))
        outside = max(map(self.nbytes, (*sliced, *outputs)), default=0)
        if self.nbytes(value) <= outside and ahead.causes:
            raise RowsMeet(ahead.cause)
        if self.nbytes(value) <= outside:
            raise NoGain("what the chain reads or returns is as large as what is inside")
        narrow = [v for v in shared if self._graph.types[v].dtype in (jnp.bfloat16, jnp.float16)]
        if self.nbytes(value) <= 2 * self._total(narrow):
            raise NoGain("float32 sums of gradients are as large as what is inside")
        rows = math.ceil(count / self._tiles)
        chain = Chain(tuple(equations), states, sliced, shared, outputs, count, rows, value)
        if self._waits_for_itself(chain):
            raise NoGain("another chain reads what this one returns, and returns what it reads")
        self._try(chain)
        return chain

    def _waits_for_itself(self, chain: Chain) -> bool:
        """Whether what it reads is made of what it returns, through other chains."""
        own, seen = set(chain.equations), set[Value]()
        pending = [*chain.read]
        while pending:
            v = pending.pop()
            number = self._graph.producer.get(v)
            if number is None or v in seen:
                continue
            seen.add(v)
            if number in own:
                return True
            other = self._chain_of.get(number)
            pending += other.read if other else self._graph.equations[number].operands
        return False

    def _try(self, chain: Chain) -> None:
        """Raises ``RowsMeet`` if a tile cannot be traced."""
        rows, graph = chain.rows, self._graph
        values = (*chain.read, *chain.outputs)
        meshes = [graph.types[v].sharding.mesh for v in values]
        meshes.append(jax.sharding.get_abstract_mesh())
        if len({mesh.axis_types for mesh in meshes if not mesh.empty}) > 1:
            raise RowsMeet("a value that it reads or returns is on axes of another kind")

        equations = [graph.equations[number] for number in chain.equations]
        shapes = [tile_shape(graph.shape(v), chain.states.get(v), rows) for v in chain.read]
        dtypes = [graph.types[v].dtype for v in chain.read]

        def tile(given: list[Any]) -> None:
            values = graph.constants | dict(zip(chain.read, given, strict=True))
            TileEvaluation(graph, chain.states, 0, rows).run(equations, values)

        try:
            jax.eval_shape(tile, list(map(jax.ShapeDtypeStruct, shapes, dtypes)))
        except RowsMeet:
            raise
        except Exception as error:  # of an operation that has sizes in it
            raise RowsMeet(f"a tile cannot be traced: {error}") from error

    # --- Back from the largest value --------------------------------------------------------------

    def _back(self, value: Value, rows: Rows, taken: set[int]) -> dict[Value, Rows]:
        """Where a chain starts: the values of fewest bytes that have the same rows."""
        frontier, size = {value: rows}, self.nbytes(value)
        best, least, enough = dict(frontier), size, size / 2
        passed = set[tuple[Value, Rows]]()  # what it replaced, and no reader brings back
        pending = [(-size, value)]
        while pending:
            _, v = heapq.heappop(pending)
            before = self._before(v, frontier[v], taken)
            if before is None:
                continue
            before = {x: own for x, own in before.items() if (x, own) not in passed}
            new = [x for x in before if x not in frontier]
            size_before = size - self.nbytes(v) + self._total(new)
            is_cheap = self._name(v) in _CHEAP
            if size_before < size or (is_cheap and size_before == size) or size > enough:
                passed.add((v, frontier.pop(v)))
                frontier |= before
                for x in new:
                    heapq.heappush(pending, (-self.nbytes(x), x))
                size = size_before
            if size < least:
                best, least = frontier.copy(), size
        if least > enough:
            raise NoGain("nothing before it is smaller and has the same rows")
        return best

    def _name(self, value: Value) -> str:
        """Of the primitive that makes a value; empty for inputs."""
        number = self._graph.producer.get(value)
        return "" if number is None else self._steps[number].name

    def _total(self, values: Iterable[Value]) -> int:
        return sum(map(self.nbytes, values))

    def _before(self, value: Value, rows: Rows, taken: set[int]) -> dict[Value, Rows] | None:
        """What the equation that makes a value reads of its rows; None if that is not known."""
        number = self._graph.producer.get(value)
        return None if number is None or number in taken else self._operand_rows(number, rows)

    def _operand_rows(self, number: int, rows: Rows) -> dict[Value, Rows] | None:
        """The states of operands, if a result has these rows; None if that is not known."""
        eqn, step = self._graph.equations[number], self._steps[number]
        if len(eqn.results) != 1 or step.name in RANDOM:
            return None
        found = self._same_rows(number, rows, rows.dims[0], step.result_shape()[rows.dims[0]])
        is_made = step.name in ("broadcast_in_dim", "iota")  # whose rows may be equal
        return found if found or is_made else None

    def _same_rows(self, number: int, rows: Rows, place: Any, size: int) -> dict[Value, Rows]:
        """The operands of an equation that have as many rows, along dim ``place`` of its result."""
        step, found = self._steps[number], dict[Value, Rows]()
        for v, places, shape in zip(step.operands, _places(step), step.shapes, strict=True):
            at = [d for d, other in enumerate(places) if other == place and shape[d] == size]
            if at:
                found[v] = dataclasses.replace(rows, dims=(at[0],))
        return found

    def _with_inputs(
        self, states: dict[Value, Any], equations: list[int], taken: set[int]
    ) -> tuple[dict[Value, Any], list[int]]:
        """Also the equations before it that only it reads, and that make nothing smaller."""
        states, inside = dict(states), set(equations)
        pending = [v for number in equations for v in self._graph.equations[number].operands]
        while pending:
            v = pending.pop()
            number = self._graph.producer.get(v)
            if number is None or number in inside | taken or row_dim(states.get(v)) is None:
                continue
            before = self._operand_rows(number, states[v])
            is_cheap = self._steps[number].name in _CHEAP
            if before is None or not is_cheap or self._readers[v] - inside:
                continue
            more = [x for x in before if x not in states]
            if any(states.get(x, rows) != rows for x, rows in before.items()):
                continue
            if before and self._walked(number, before)[v] != states[v]:
                continue
            if v in self._free or self._total(more) <= self.nbytes(v):
                states |= before
                inside.add(number)
                pending += self._graph.equations[number].operands
        return states, sorted(inside)

    # --- What an equation makes of rows -----------------------------------------------------------

    def results_of(self, number: int, states: dict[Value, Any]) -> dict[Value, Any]:
        """The states of results, and of other operands that have the same rows.

        Raises:
          RowsMeet: if rows meet, or the equation is a loop or a branch.
        """
        eqn, step = self._graph.equations[number], self._steps[number]
        if step.name in ("while", "cond", "scan", "declared_rows", *RANDOM):
            at = located(Coupled("it is a loop, a branch, declared or random"), self._steps, number)
            raise RowsMeet(str(at))
        if not isinstance(record_of(eqn), CustomDerivative | Remat | None):
            return self._walked(number, states)
        own = next(v for v in eqn.operands if row_dim(states.get(v)) is not None)
        rows, dim = states[own], states[own].dims[0]
        place = _places(step)[eqn.operands.index(own)][dim]
        if not isinstance(place, str):
            states = self._same_rows(number, rows, place, self._graph.shape(own)[dim]) | states
        of_operands = {v: states[v] for v in eqn.operands if v in states}
        return of_operands | self._walked(number, states)

    def _walked(self, number: int, states: dict[Value, Any]) -> dict[Value, Any]:
        eqn, step = self._graph.equations[number], self._steps[number]
        known = {v: states[v] for v in eqn.operands if v in states}
        known |= {v: self._constants[v] for v in eqn.operands if v in self._constants}
        Walk().run([step], known)
        for v in eqn.results:
            state = located(known[v], self._steps, number)
            if isinstance(state, Coupled):
                raise RowsMeet(str(state))
            if not is_total(state) and row_dim(state) is None:
                raise RowsMeet(f"{step.name}: a result has its rows along several dims, or none")
        return {v: known[v] for v in eqn.results}


class _Ahead:
    """All equations after some values that keep their rows apart."""

    def __init__(self, search: ChainSearch, first: dict[Value, Rows], taken: set[int]):
        self._search, self._graph = search, search._graph
        self.states: dict[Value, Any] = dict(first)
        self.causes: list[str] = []
        self._numbers: list[int] = []
        self._taken = taken

    def equations_to(self, value: Value) -> list[int]:
        """Those up to where least is read by others, after the one that makes this value."""
        last = self._graph.producer[value]
        after = set[Value]()  # what depends on results of the chain in another way
        best: tuple[int, int] | None = None
        begin = min([last, *(min(self._search._readers[v]) for v in self.states)])
        for number in range(begin, min(len(self._graph.equations), last + _MOST_EQUATIONS)):
            self._add(number, after)
            if number >= last and value not in self.states:
                break
            if number >= last:
                live = self._live()
                if best is None or live < best[0]:
                    best = live, len(self._numbers)
        if best is None:
            raise RowsMeet(self.cause or "its rows are not kept apart")
        return self._numbers[: best[1]]

    @property
    def cause(self) -> str:
        return "; ".join(dict.fromkeys(self.causes))

    def _add(self, number: int, after: set[Value]) -> None:
        """Adds an equation, if it keeps rows apart."""
        eqn: Equation = self._graph.equations[number]
        own = [v for v in eqn.operands if row_dim(self.states.get(v)) is not None]
        is_later = any(v in after or is_total(self.states.get(v)) for v in eqn.operands)
        if not own and not is_later:
            return
        if is_later or number in self._taken:
            after |= set(eqn.results)
            if own and is_later and not self.causes:
                meet = Coupled("each row meets a sum over all rows, or what is made of it")
                self.causes.append(str(located(meet, self._search._steps, number)))
            return
        try:
            self.states |= self._search.results_of(number, self.states)
            self._numbers.append(number)
        except RowsMeet as meet:
            self.causes.append(str(meet))
            after |= set(eqn.results)

    def _live(self) -> int:
        """The bytes of what others read of the chain so far."""
        inside, readers = set(self._numbers), self._search._readers
        results = (v for number in inside for v in self._graph.equations[number].results)
        return sum(self._search.nbytes(v) for v in results if readers.get(v, set()) - inside)


def _dims(dims: list[int]) -> str:
    return f"dim {dims[0]}" if len(dims) == 1 else f"dims {', '.join(map(str, sorted(dims)))}"


def _places(step: RowStep) -> list[Any]:
    """What dims of operands are in a result; of functions, where that has as many dims."""
    if record_of(step.equation) is None and step.name != "reshape":
        return rule_of(step).places(step)
    out = step.result_shape()
    if step.name != "reshape":
        return [list(range(len(x))) if len(x) == len(out) else [""] * len(x) for x in step.shapes]
    (shape,), found = step.shapes, list[Any]()
    for d, size in enumerate(shape):
        same = [
            at
            for at, other in enumerate(out)
            if other == size and math.prod(out[:at]) == math.prod(shape[:d])
        ]
        found.append(same[0] if same else "")
    return [found]
