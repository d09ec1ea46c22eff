"""Which named values of a block to save: the least recomputation for the bytes they take."""

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import numpy as np

from optax_ext.execution_order import Graph
from sharding.plan._devices import DeviceKind
from sharding.plan._tiles import num_bytes
from sharding.remat._work import work_of_equation

# Of the unit of time in a program: enough for ties to go to fewer operations and saved names.
_TIE = 1e-7


class SavedNames(NamedTuple):
    """A choice of names.

    Attributes:
      names: of the values that are saved.
      nbytes: that they take.
      seconds: that the operations take which are run again, by a model of the device.
    """

    names: tuple[str, ...]
    nbytes: int
    seconds: float


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
    """

    graph: Graph
    seconds: tuple[float, ...]
    values: dict[str, tuple[int, ...]]

    @staticmethod
    def of(
        vjp: Callable[..., Any],
        args: tuple[Any, ...],
        kind: DeviceKind | None,
        names: Collection[str] | None,
    ) -> "NamedValues":
        """Traces ``vjp(*args)``, a function that backward passes; ``names`` of None takes all."""
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
            work = work_of_equation(eqn.primitive.name, eqn.params, operands, results, kind)
            seconds.append(work.seconds)
            if eqn.primitive.name == "name":
                name = eqn.params["name"]
                if names is None or name in names:
                    values[name] = (*values.get(name, ()), *eqn.results)
        return NamedValues(graph, tuple(seconds), values)

    def nbytes(self, name: str) -> int:
        """Bytes of the values that have a name."""
        return num_bytes([self.graph.types[x] for x in self.values[name]])

    def best(self, budget: float) -> SavedNames:
        """The names of least recomputation whose values take at most ``budget`` bytes."""
        from scipy import sparse
        from scipy.optimize import Bounds, LinearConstraint, milp

        graph, names = self.graph, list(self.values)
        num_equations, num_columns = len(graph.equations), len(graph.equations) + len(names)
        column = {
            value: num_equations + i for i, name in enumerate(names) for value in self.values[name]
        }
        entries: list[tuple[int, int, float]] = []  # row, column, value
        least: list[float] = []

        def available(value: int, unless: int | None) -> None:
            """A row: the value is saved or computed again, unless operation ``unless`` is not."""
            if value not in graph.producer:
                return
            row = len(least)
            entries.append((row, graph.producer[value], 1.0))
            if value in column:
                entries.append((row, column[value], 1.0))
            if unless is not None:
                entries.append((row, unless, -1.0))
            least.append(0.0 if unless is not None else 1.0)

        for value in set(graph.outputs):
            available(value, None)
        for i, eqn in enumerate(graph.equations):
            for operand in set(eqn.operands):
                available(operand, i)
        sizes = [self.nbytes(name) for name in names]
        unit = math.gcd(*sizes) or 1
        row = len(least)
        entries += [(row, num_equations + i, size / unit) for i, size in enumerate(sizes)]

        scale = max(self.seconds, default=0.0) or 1.0
        cost = np.full(num_columns, _TIE)
        cost[:num_equations] += np.array(self.seconds) / scale
        rows, columns, coefficients = zip(*entries, strict=True) if entries else ((), (), ())
        matrix = sparse.csr_array((coefficients, (rows, columns)), shape=(row + 1, num_columns))
        limits = LinearConstraint(
            matrix, np.array([*least, -np.inf]), np.array([np.inf] * row + [budget / unit])
        )
        found = milp(
            cost,
            constraints=limits,
            integrality=np.ones(num_columns),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": 1e-9},
        )
        chosen = found.x > 0.5
        saved = tuple(n for n, c in zip(names, chosen[num_equations:], strict=True) if c)
        return SavedNames(
            saved,
            sum(map(self.nbytes, saved)),
            float(np.sum(np.array(self.seconds)[chosen[:num_equations]])),
        )

    def frontier(self) -> list[SavedNames]:
        """Every choice that no other one beats in bytes and time, from the most bytes to none."""
        found = [self.best(float("inf"))]
        while found[-1].nbytes:
            # Below the last choice by more than the solver's tolerance.
            found.append(self.best(found[-1].nbytes * (1 - 1e-5)))
        slower = [*(each.seconds for each in found[1:]), math.inf]  # those of the next choice
        return [
            each
            for each, other in zip(found, slower, strict=True)
            if each.seconds < other * (1 - 1e-9)
        ]
