"""Chooses which named values of one block are saved: the least time for their bytes.

A chain of blocks is solved in ``_chain_search``, a stack of equal ones in ``_stack_plan``.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from optax_ext.traced_graph import Graph
from sharding._types import Array, Tree
from sharding.plan.machine._devices import DeviceKind
from sharding.plan.machine._tiles import num_bytes
from sharding.plan.model._models import PRESETS
from sharding.plan.model._traced_model import work_of_equation
from sharding.remat._checkpoint import Fn

# Of the unit of time in a program: enough for ties to go to fewer operations and saved names.
_TIE = 1e-7
MAXTEXT_NAMES = frozenset((*PRESETS["minimal_with_context"][0], "decoder_layer_input"))
_PLACES = ("device", "offload", "remat")

Names = Collection[str] | Mapping[str, str] | str | None


class NameRequest(NamedTuple):
    allowed: Collection[str] | None = None  # names that may be saved; None for all
    saved: tuple[str, ...] | None = None  # names on the device; None where the planner chooses
    offloaded: tuple[str, ...] = ()  # names that are copied to host memory


def request_of(names: Names) -> NameRequest:
    """Reads the argument ``names``: a preset, a place for each name, or names that are allowed.

    >>> request_of({"mlpwi": "offload", "context": "device", "mlpwo": "remat"})
    NameRequest(allowed=None, saved=('context',), offloaded=('mlpwi',))
    """
    if isinstance(names, str):
        if names not in PRESETS:
            known = ", ".join(map(repr, PRESETS))
            raise ValueError(f"names={names!r} is no preset; known are {known}.")
        return NameRequest(None, *PRESETS[names])
    if isinstance(names, Mapping):
        for name, place in names.items():
            if place not in _PLACES:
                raise ValueError(
                    f"names: {name!r} must be in one of {', '.join(map(repr, _PLACES))}, got "
                    f"{place!r}."
                )
        saved, offloaded = (
            tuple(name for name, place in names.items() if place == wanted)
            for wanted in ("device", "offload")
        )
        return NameRequest(None, saved, offloaded)
    return NameRequest(names if names is None else frozenset(names))


class HostCopies(NamedTuple):
    """Copies of activations to host memory, beside a block's forward and backward pass."""

    names: Collection[str]  # of values that may be copied
    bandwidth: float  # bytes per second to the host; as many come back at the same time
    forward: float  # seconds of the block's forward pass
    backward: float  # seconds of its backward pass without recomputation
    input_bytes: int = 0  # of the block's input, if it is copied too

    def wait(self, nbytes: float, recompute: float) -> float:
        """Seconds by which copies of names outlast the passes that they run beside."""
        copy = (self.input_bytes + nbytes) / self.bandwidth
        return max(0.0, copy - self.forward) + max(0.0, copy - self.backward - recompute)


class SavedNames(NamedTuple):
    names: tuple[str, ...]  # of the values that are saved on the device
    nbytes: int  # that they take
    # Of operations that run again, by a model of the device, and of waiting for copies.
    seconds: float
    offloaded: tuple[str, ...] = ()  # names of the values that are copied to host memory
    host_bytes: int = 0  # that they take


@dataclasses.dataclass(frozen=True)
class NamedValues:
    """A block's forward pass, as far as its backward pass needs it.

    A value that the backward pass reads is saved, if it has a name that is chosen, or is computed
    again from what is saved, the parameters and the block's input: an integer program.
    """

    graph: Graph  # from parameters and input to what the backward pass reads
    seconds: tuple[float, ...]  # of each operation
    values: dict[str, tuple[int, ...]]  # for each name, the values that have it
    inputs: frozenset[int]  # the block's input, beside its parameters

    @staticmethod
    def of(
        fn: Fn, params: Tree, x: Array, kind: DeviceKind | None, names: Collection[str] | None
    ) -> "NamedValues":
        """Traces ``fn(params, x)`` and what its backward pass stores; ``names`` None takes all."""
        treedef: Any
        leaves, treedef = jax.tree.flatten((params, x))

        def residuals(inputs: list[Any]) -> list[Any]:
            arrays = jax.tree.leaves(jax.vjp(fn, *treedef.unflatten(inputs))[1])
            return [x for x in arrays if hasattr(x, "dtype")]

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
        inputs = frozenset(range(len(jax.tree.leaves(params)), len(leaves)))
        return NamedValues(graph, tuple(seconds), values, inputs)

    def nbytes(self, name: str) -> int:
        return num_bytes([self.graph.types[x] for x in self.values[name]])

    def recompute_seconds(self, saved: Collection[str]) -> float:
        """Time of the operations that run again if these names are saved, and no others."""
        stored = {value for name in saved for value in self.values[name]}
        run, _ = self.graph.needed(self.graph.outputs, stored)
        return sum(self.seconds[self.graph.producer[eqn.results[0]]] for eqn in run)

    def of_input(self) -> list[str]:
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

    def choose_names(self, budget: float, host: HostCopies | None = None) -> SavedNames:
        """The names of least time whose values take at most ``budget`` bytes of the device."""
        # With ``host``, values may be copied to host memory as well.
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
        solution = milp(
            cost,
            constraints=LinearConstraint(matrix, np.array(least), np.array(most)),
            integrality=np.append(np.ones(waits), [0, 0]),
            bounds=Bounds(0, upper),
            options={"mip_rel_gap": 1e-9},
        )
        chosen = solution.x > 0.5
        saved, offloaded = (
            tuple(n for n, c in zip(names, chosen[start : start + num_names], strict=True) if c)
            for start in (saves, offloads)
        )
        seconds = float(np.sum(np.array(self.seconds)[chosen[:num_equations]]))
        return self._choice(saved, offloaded, seconds, host)

    def fixed(
        self, saved: Collection[str], offloaded: Collection[str], host: HostCopies | None = None
    ) -> SavedNames:
        """Takes the choice of others, as far as this block has their names."""
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
        nbytes, host_bytes = (sum(map(self.nbytes, names)) for names in (saved, offloaded))
        wait = host.wait(host_bytes, seconds) if host else 0.0
        return SavedNames(saved, nbytes, seconds + wait, offloaded, host_bytes)

    def frontier(self, host: HostCopies | None = None) -> list[SavedNames]:
        """Every choice that no other one beats in bytes and time, from the most bytes to none."""
        choices = [self.choose_names(float("inf"), host)]
        while choices[-1].nbytes:
            # Below the last choice by more than the solver's tolerance.
            choices.append(self.choose_names(choices[-1].nbytes * (1 - 1e-5), host))
        slower = [*(choice.seconds for choice in choices[1:]), math.inf]
        pairs = zip(choices, slower, strict=True)
        return [choice for choice, other in pairs if choice.seconds < other * (1 - 1e-9)]
