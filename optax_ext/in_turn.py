"""Runs a function of many arrays one output after another, so that few intermediates live at once.

XLA sees a step as one graph and may compute every parameter's intermediates before it uses the
first. Here the function is traced, and run output by output: what reads marked inputs waits until
the outputs before have been made. For ``low_precision_state``, and for ``sharding``, which brings
marked inputs from the host.
"""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from optax_ext import _passes


@dataclasses.dataclass(frozen=True)
class Equation:
    """One operation, on values by number."""

    primitive: Any
    params: dict[str, Any]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    scope: str


class Graph:
    """A traced function without inner jits. Values are numbers, inputs the first of them.

    Args:
      fn: from a list of arrays to a list of arrays.
      inputs: the arrays.
      marked: which of them count in ``reads``.
      simple: whether passes over matrices take the form that has no branches for machines.

    Attributes:
      types: shape and dtype of every value.
      constants: the values that are known from the start.
      equations: in an order in which they can be evaluated.
      maker: of a value that is neither input nor constant, the number of its equation.
      reads: for each value the marked inputs that it depends on, as bits.
      outputs: the values that the function returns.
    """

    def __init__(
        self,
        fn: Callable[[list[Any]], list[Any]],
        inputs: Sequence[Any],
        marked: Sequence[bool],
        simple: bool = False,
    ):
        with _passes.apart(simple):
            closed = jax.make_jaxpr(fn)([_passes.abstract(jax.typeof(x)) for x in inputs])
        self.types: list[Any] = list(closed.in_avals)
        self.reads = [1 << i if mark else 0 for i, mark in enumerate(marked)]
        self.constants: dict[int, Any] = {}
        self.equations: list[Equation] = []
        self.maker: dict[int, int] = {}
        self.outputs = self._inline(closed, tuple(range(len(inputs))))

    def _inline(self, closed: Any, inputs: Sequence[int], outer: str = "") -> list[int]:
        jaxpr, consts = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
        known = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            known[var] = self._constant(const, var.aval)

        def read(atom: Any) -> int:
            return self._constant(atom.val, atom.aval) if isinstance(atom, Literal) else known[atom]

        for eqn in jaxpr.eqns:
            operands = tuple(map(read, eqn.invars))
            types = [var.aval for var in eqn.outvars]
            # Named scopes: profilers and the auditor tell phases by them.
            scope = "/".join(filter(None, (outer, str(eqn.source_info.name_stack))))
            inner = eqn.params.get(_INLINED.get(eqn.primitive.name, ""))
            if inner is not None:
                results = self._inline(inner, operands, scope)
            elif eqn.primitive.name == "optimization_barrier":
                # It keeps values apart from what is made of them, one by one as well as together.
                each = zip(operands, types, strict=True)
                results = [self._equation(eqn, (x,), [aval], scope)[0] for x, aval in each]
            else:
                results = self._equation(eqn, operands, types, scope)
            known |= zip(eqn.outvars, results, strict=True)
        return list(map(read, jaxpr.outvars))

    def _equation(
        self, eqn: Any, operands: tuple[int, ...], types: list[Any], scope: str
    ) -> list[int]:
        reads = functools.reduce(operator.or_, (self.reads[x] for x in operands), 0)
        results = [self._value(aval, reads) for aval in types]
        self.maker |= dict.fromkeys(results, len(self.equations))
        made = Equation(eqn.primitive, eqn.params, operands, tuple(results), scope)
        self.equations.append(made)
        return results

    def _value(self, aval: Any, reads: int) -> int:
        self.types.append(aval)
        self.reads.append(reads)
        return len(self.types) - 1

    def _constant(self, constant: Any, aval: Any) -> int:
        value = self._value(aval, 0)
        self.constants[value] = constant
        return value

    def shape(self, value: int) -> tuple[int, ...]:
        """The shape of a value."""
        return self.types[value].shape

    def needed(
        self, values: Iterable[int], known: Container[int]
    ) -> tuple[list[Equation], list[int]]:
        """The equations that lead from known values to these, in order; and the inputs needed."""
        equations, inputs, seen, left = set(), [], set(), list(values)
        while left:
            value = left.pop()
            if value in seen or value in known:
                continue
            seen.add(value)
            if value in self.maker:
                equations.add(self.maker[value])
                left += self.equations[self.maker[value]].operands
            else:
                inputs.append(value)
        return [self.equations[i] for i in sorted(equations)], sorted(inputs)


# Primitives that do something with each element by itself, and that take many together.
_NAMES = """
abs acos acosh add and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp
convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt
integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not
optimization_barrier or population_count pow reduce_precision rem round rsqrt select_n shift_left
shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor
"""
ELEMENTWISE = frozenset(_NAMES.split())
REDUCTIONS = frozenset(f"reduce_{kind}" for kind in ("sum", "max", "min", "prod", "and", "or"))

# Primitives that only call a function, and the parameter that holds it.
_INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


def bind(
    eqn: Equation, operands: Sequence[Any], params: dict[str, Any] | None = None
) -> Sequence[Any]:
    """The results of an equation's primitive, with other parameters than its own where given."""
    params = eqn.primitive.get_bind_params(eqn.params if params is None else params)
    with jax.named_scope(eqn.scope) if eqn.scope else contextlib.nullcontext():
        out = eqn.primitive.bind(*operands, **params)
    return out if eqn.primitive.multiple_results else [out]


def groups(graph: Graph, leaders: Sequence[int]) -> list[list[int]]:
    """All outputs by the leader after which they need no marked input that was not yet read."""
    found, read, left = [], 0, set(range(len(graph.outputs)))
    for leader in [*leaders, *range(len(graph.outputs))]:
        if leader not in left:
            continue
        read |= graph.reads[graph.outputs[leader]]
        ready = [j for j in sorted(left) if not graph.reads[graph.outputs[j]] & ~read]
        left -= set(ready)
        found.append(ready)
    return found


class Turns:
    """The values of a graph that have been computed, and its outputs: each replaces an input.

    Attributes:
      graph: the graph; as many outputs as inputs.
      inputs: what it is a function of.
      values: what is known.
      outputs: those that are made.
      awaited: what has to be there before the next marked input is read.
    """

    def __init__(self, graph: Graph, inputs: Sequence[Any], after: Sequence[Any] = ()):
        self.graph, self.inputs = graph, inputs
        self.values = dict(graph.constants)
        self.values |= {i: x for i, x in enumerate(inputs) if not graph.reads[i]}
        self.outputs: dict[int, Any] = {}
        self.awaited = tuple(after)

    def group(self, outputs: list[int]) -> None:
        """Computes some outputs, of marked inputs that are not read before it is their turn."""
        self.compute([self.graph.outputs[j] for j in outputs])
        self.outputs |= {j: self.store(j, self.values[self.graph.outputs[j]]) for j in outputs}
        made = tuple(self.outputs[j] for j in outputs if self.replaces_marked(j))
        self.awaited = made or self.awaited

    def load(self, arrays: list[Any]) -> list[Any]:
        """Marked inputs as the graph's equations take them."""
        return arrays

    def store(self, output: int, x: Any) -> Any:
        """An output as the caller takes it."""
        del output
        return x

    def replaces_marked(self, output: int) -> bool:
        """Whether an output is the new value of a marked input."""
        return self.graph.reads[output] == 1 << output

    def in_turn(self, arrays: Sequence[Any]) -> list[Any]:
        """Arrays that are not read before what is awaited is there."""
        return list(jax.lax.optimization_barrier((*arrays, *self.awaited))[: len(arrays)])

    def compute(self, values: list[int]) -> None:
        """Makes values known, reading what marked inputs they need."""
        equations, inputs = self.graph.needed(values, self.values)
        if inputs:
            held = self.in_turn([self.inputs[i] for i in inputs])
            self.values |= zip(inputs, self.load(held), strict=True)
        for eqn in equations:
            out = bind(eqn, [self.values[v] for v in eqn.operands])
            self.values |= zip(eqn.results, out, strict=True)

    def all(self, leaders: Sequence[int]) -> list[Any]:
        """Runs the graph, one group after the other; returns the outputs."""
        for group in groups(self.graph, leaders):
            self.group(group)
        return [self.outputs[j] for j in range(len(self.graph.outputs))]


def by_parameter(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    tree: Any,
    state: Any,
    is_marked: Callable[[Any], bool],
    turns: Callable[[Graph, list[Any]], Turns] = Turns,
    simple: bool = False,
) -> tuple[Any, Any]:
    """``fn(tree, state)``, a new tree and a new state, one leaf of the tree after the other.

    Args:
      fn: the function.
      tree: parameters or updates.
      state: the state; ``fn`` may not change its structure.
      is_marked: which arrays of the state are not to be read all at once.
      turns: what runs the graph.
      simple: as for ``Graph``.

    Raises:
      ValueError: if the structure changes.
    """
    inputs, treedef = jax.tree.flatten((tree, state))
    leaders = len(jax.tree.leaves(tree))
    marked = [i >= leaders and is_marked(x) for i, x in enumerate(inputs)]

    def flat_fn(inputs: list[Any]) -> list[Any]:
        leaves, found = jax.tree.flatten(fn(*jax.tree.unflatten(treedef, inputs)))
        if str(found) != str(treedef):
            raise ValueError(
                f"the transformation's state changes its structure: {treedef} became {found}."
            )
        return leaves

    run = turns(Graph(flat_fn, inputs, marked, simple), inputs)
    return jax.tree.unflatten(treedef, run.all(range(leaders)))
