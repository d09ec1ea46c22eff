"""Which named values of a block to save: the least recomputation for the bytes they take."""

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import numpy as np

from optax_ext.execution_order import Graph
from sharding.plan.machine._devices import DeviceKind
from sharding.plan.machine._tiles import num_bytes
from sharding.plan.model._traced_model import work_of_equation

# Of the unit of time in a program: enough for ties to go to fewer operations and saved names.
_TIE = 1e-7


class HostCopies(NamedTuple):
    """Copies of activations to host memory, beside a block's forward and backward pass.

    Attributes:
      names: of values that may be copied.
      bandwidth: bytes per second to the host; as many come back at the same time.
      forward: seconds of the block's forward pass.
      backward: seconds of its backward pass without recomputation.
      input_bytes: of the block's input, which is copied too; 0 where it stays on the device.
    """

    names: Collection[str]
    bandwidth: float
    forward: float
    backward: float
    input_bytes: int = 0

    def wait(self, nbytes: float, recompute: float) -> float:
        """Seconds by which copies of names outlast the passes that they run beside."""
        copy = (self.input_bytes + nbytes) / self.bandwidth
        return max(0.0, copy - self.forward) + max(0.0, copy - self.backward - recompute)


class SavedNames(NamedTuple):
    """A choice of names.

    Attributes:
      names: of the values that are saved on the device.
      nbytes: that they take.
      seconds: that the operations take which are run again, by a model of the device, and that the
        copies to host memory take beyond it.
      offloaded: names of the values that are copied to host memory.
      host_bytes: that they take.
    """

    names: tuple[str, ...]
    nbytes: int
    seconds: float
    offloaded: tuple[str, ...] = ()
    host_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class NamedValues:
    """A block's forward pass, as far as its backward pass needs it.

    A value that the backward pass reads is saved, if it has a name that is chosen, or is computed
    again from what is saved, the parameters and the block's input: an integer program over the
    operations that run again and the names that are saved.

    Attributes:
      graph: from parameters and input to what the backward pass reads.
      seconds: of each operation.
      values: for each name, the values that have it.
      inputs: the block's input, beside its parameters.
    """

    graph: Graph
    seconds: tuple[float, ...]
    values: dict[str, tuple[int, ...]]
    inputs: frozenset[int]

    @staticmethod
    def of(
        vjp: Callable[..., Any],
        args: tuple[Any, ...],
        kind: DeviceKind | None,
        names: Collection[str] | None,
    ) -> "NamedValues":
        """Traces ``vjp(params, x)``, a function that backward passes; None takes all names."""
        treedef: Any
        leaves, treedef = jax.tree.flatten(args)

        def residuals(inputs: list[Any]) -> list[Any]:
            return [
                x for x in jax.tree.leaves(vjp(*treedef.unflatten(inputs))) if hasattr(x, "dtype")
            ]

        graph = Graph(residuals, leaves, [False] * len(leaves))
        seconds: list[float] = []
        values: dict[str, tuple[int, ...]] = {}
        for eqn in graph.equations:
            operands, results = ([graph.types[x] for x in xs] for xs in (eqn.operands, eqn.results))
            work = work_of_equation(eqn, operands, results, kind)
            seconds.append(work.seconds)
            if eqn.primitive.name == "name":
                name = eqn.params["name"]
                if names is None or name in names:
                    values[name] = (*values.get(name, ()), *eqn.results)
        count = len(jax.tree.leaves(args[-1]))
        inputs = frozenset(range(len(leaves) - count, len(leaves)))
        return NamedValues(graph, tuple(seconds), values, inputs)

    def nbytes(self, name: str) -> int:
        """Bytes of the values that have a name."""
        return num_bytes([self.graph.types[x] for x in self.values[name]])

    def recompute_seconds(self, saved: Collection[str]) -> float:
        """The time of the operations that run again if these names are saved, and no others."""
        have = {value for name in saved for value in self.values[name]}
        run: set[int] = set()
        todo = list(self.graph.outputs)
        while todo:
            value = todo.pop()
            producer = self.graph.producer.get(value)
            if value not in have and producer is not None and producer not in run:
                run.add(producer)
                todo.extend(self.graph.equations[producer].operands)
        return sum(self.seconds[i] for i in run)

    def of_input(self) -> list[str]:
        """Names that the block gives to its input."""
        graph = self.graph

        def operands(name: str) -> set[int]:
            equations = (graph.equations[graph.producer[value]] for value in self.values[name])
            return {operand for eqn in equations for operand in eqn.operands}

        return [name for name in self.values if operands(name) <= self.inputs]

    def useless(self) -> list[str]:
        """Names that spare no operation, alone or beside all others; that of the input aside."""
        every = set(self.values)
        nothing, everything = self.recompute_seconds(()), self.recompute_seconds(every)
        return [
            name
            for name in self.values
            if name not in self.of_input()
            and self.recompute_seconds({name}) >= nothing
            and self.recompute_seconds(every - {name}) <= everything
        ]

    def best(self, budget: float, host: HostCopies | None = None) -> SavedNames:
        """The names of least time whose values take at most ``budget`` bytes of the device.

        With ``host``, values may be copied to host memory as well. That takes the time by which
        the copies outlast the forward or the backward pass.
        """
        from scipy import sparse
        from scipy.optimize import Bounds, LinearConstraint, milp

        graph, names = self.graph, list(self.values)
        sizes = [self.nbytes(name) for name in names]
        scale = max(self.seconds, default=0.0) or 1.0
        # Columns: operations that run again, names that are saved, names that are offloaded, and
        # the times that copies take beyond the forward and the backward pass.
        num_equations, num_names = len(graph.equations), len(names)
        saves, offloads = num_equations, num_equations + num_names
        waits = offloads + num_names
        column = {value: i for i, name in enumerate(names) for value in self.values[name]}
        entries: list[tuple[int, int, float]] = []  # row, column, value
        least: list[float] = []
        most: list[float] = []

        def add(terms: dict[int, float], at_least: float, at_most: float = np.inf) -> None:
            entries.extend((len(least), at, value) for at, value in terms.items())
            least.append(at_least)
            most.append(at_most)

        def available(value: int, unless: int | None) -> None:
            """A row: the value is stored or computed again, unless operation ``unless`` is not."""
            if value not in graph.producer:
                return
            terms = {graph.producer[value]: 1.0}
            if value in column:
                terms |= {saves + column[value]: 1.0, offloads + column[value]: 1.0}
            if unless is not None:
                terms[unless] = -1.0
            add(terms, 0.0 if unless is not None else 1.0)

        for value in set(graph.outputs):
            available(value, None)
        for i, eqn in enumerate(graph.equations):
            for operand in set(eqn.operands):
                available(operand, i)
        unit = math.gcd(*sizes) or 1
        add({saves + i: size / unit for i, size in enumerate(sizes)}, -np.inf, budget / unit)
        if host is not None:
            copies = {offloads + i: -s / host.bandwidth / scale for i, s in enumerate(sizes)}
            copied = host.input_bytes / host.bandwidth
            add(copies | {waits: 1.0}, (copied - host.forward) / scale)
            again = {i: seconds / scale for i, seconds in enumerate(self.seconds)}
            add(copies | again | {waits + 1: 1.0}, (copied - host.backward) / scale)

        cost = np.full(waits + 2, _TIE)
        cost[:num_equations] += np.array(self.seconds) / scale
        cost[offloads:waits] += _TIE  # of equal times, that which stays on the device
        cost[waits:] = 1.0
        upper = np.ones(waits + 2)
        upper[offloads:waits] = [host is not None and name in host.names for name in names]
        upper[waits:] = np.inf
        rows, columns, coefficients = zip(*entries, strict=True) if entries else ((), (), ())
        matrix = sparse.csr_array((coefficients, (rows, columns)), shape=(len(least), waits + 2))
        found = milp(
            cost,
            constraints=LinearConstraint(matrix, np.array(least), np.array(most)),
            integrality=np.append(np.ones(waits), [0, 0]),
            bounds=Bounds(0, upper),
            options={"mip_rel_gap": 1e-9},
        )
        chosen = found.x > 0.5
        saved, offloaded = (
            tuple(n for n, c in zip(names, chosen[at : at + num_names], strict=True) if c)
            for at in (saves, offloads)
        )
        return self._choice(
            saved,
            offloaded,
            float(np.sum(np.array(self.seconds)[chosen[:num_equations]])),
            host,
        )

    def fixed(
        self, saved: Collection[str], offloaded: Collection[str], host: HostCopies | None = None
    ) -> SavedNames:
        """The choice that others made: those of their names that this block has."""
        saved, offloaded = (
            tuple(n for n in self.values if n in names) for names in (saved, offloaded)
        )
        seconds = self.recompute_seconds((*saved, *offloaded))
        return self._choice(saved, offloaded, seconds, host)

    def _choice(
        self,
        saved: tuple[str, ...],
        offloaded: tuple[str, ...],
        seconds: float,
        host: HostCopies | None,
    ) -> SavedNames:
        host_bytes = sum(map(self.nbytes, offloaded))
        wait = host.wait(host_bytes, seconds) if host else 0.0
        return SavedNames(
            saved, sum(map(self.nbytes, saved)), seconds + wait, offloaded, host_bytes
        )

    def frontier(self, host: HostCopies | None = None) -> list[SavedNames]:
        """Every choice that no other one beats in bytes and time, from the most bytes to none."""
        found = [self.best(float("inf"), host)]
        while found[-1].nbytes:
            # Below the last choice by more than the solver's tolerance.
            found.append(self.best(found[-1].nbytes * (1 - 1e-5), host))
        slower = [*(each.seconds for each in found[1:]), math.inf]  # those of the next choice
        return [
            each
            for each, other in zip(found, slower, strict=True)
            if each.seconds < other * (1 - 1e-9)
        ]
