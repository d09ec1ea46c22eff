"""A traced function as a graph of equations, to evaluate in any order and in parts."""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NewType

import jax
import numpy as np
from jax.extend.core import Literal

from optax_ext import _matrix_passes, kernels
from optax_ext._types import Tree
from optax_ext.equations import Call, CustomDerivative, record_of, trace

Value = NewType("Value", int)  # the number of a value of a ``Graph``


@dataclasses.dataclass(frozen=True)
class Equation:
    """One operation of a ``Graph``."""

    primitive: Any
    params: dict[str, Any]
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    scope: str
    ctx: Any = None  # in which it was traced, if it is evaluated there
    source_info: Any = None  # where it was written


_SELECT = Equation(jax.lax.select_n_p, {}, (), (), "")
_BARRIER = Equation(jax.lax.optimization_barrier_p, {}, (), (), "")


class Graph:
    """A traced function with its inner jits inlined. Values are numbered, inputs first.

    An ``exact`` graph is to be differentiated: rules of derivatives, barriers, choices of platform
    and the contexts of equations stay as they are.
    """

    def __init__(
        self,
        fn: Callable[[list[Any]], Tree],
        inputs: Sequence[Any],
        deferred: Sequence[bool],  # for each input, whether it counts in ``reads``
        portable: bool = False,  # a choice of platform takes its default on all of them
        kept: Container[str] = (),  # names of jits that are one equation: nothing reads parts of it
        exact: bool = False,
        selects: bool = False,  # ``cond`` computes all branches, and selects from their results
    ):
        types = [_matrix_passes.abstract(jax.typeof(x)) for x in inputs]
        closed, results = trace(fn, types)
        self._portable = portable
        self._kept = kept
        self._exact = exact
        self._selects = selects
        # The deferred inputs that a value depends on, as the bits of an int.
        self.reads = [1 << i if wait else 0 for i, wait in enumerate(deferred)]
        self.out_treedef: Any = jax.tree.structure(results)
        self._read(closed)

    @classmethod
    def of(cls, closed: Any) -> "Graph":
        """The exact graph of a jaxpr."""
        graph = cls.__new__(cls)
        graph._portable = False
        graph._kept = ()
        graph._exact = True
        graph._selects = False
        graph.reads = [0] * len(getattr(closed, "jaxpr", closed).invars)
        graph._read(closed)
        return graph

    def _read(self, closed: Any) -> None:
        self.jaxpr = getattr(closed, "jaxpr", closed)  # the trace
        self.types = [x.aval for x in self.jaxpr.invars]  # shape and dtype of every value
        self.constants: dict[Value, Any] = {}  # the values that are known without evaluation
        self.equations: list[Equation] = []  # in an order in which they can be evaluated
        # The equation that computes a value, unless it is input or constant.
        self.producer: dict[int, int] = {}
        # The values that the function returns, and the tree that they are the leaves of.
        self.outputs = self._inline(closed, [Value(i) for i in range(len(self.types))])

    def _inline(self, closed: Any, inputs: Sequence[Value], outer: str = "") -> list[Value]:
        jaxpr = getattr(closed, "jaxpr", closed)
        consts = getattr(closed, "consts", ())
        known = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            known[var] = self._constant(const, var.aval)

        def read(atom: Any) -> Value:
            return self._constant(atom.val, atom.aval) if isinstance(atom, Literal) else known[atom]

        for eqn in jaxpr.eqns:
            operands = tuple(map(read, eqn.invars))
            types = [var.aval for var in eqn.outvars]
            # Named scopes: profilers and the auditor identify phases by them.
            scope = "/".join(filter(None, (outer, str(eqn.source_info.name_stack))))
            inner = None if eqn.params.get("name") in self._kept else called(eqn)
            if eqn.primitive is kernels.FOR_TPUS and self._portable:
                inner = eqn.params["default"]
            branch = _branch(eqn, self._portable)
            if self._exact:
                inner = inner if isinstance(record_of(eqn), Call) else None
                branch = None
            if inner is not None:
                results = self._inline(inner, operands, scope)
            elif branch is not None:
                results = self._inline(branch, operands[1:], scope)  # without the platform's index
            elif eqn.primitive.name == "cond" and self._selects:
                index, *given = operands
                each = [self._inline(branch, given, scope) for branch in eqn.params["branches"]]
                results = [
                    self._equation(_SELECT, (index, *cases), [aval], scope)[0]
                    for *cases, aval in zip(*each, types, strict=True)
                ]
            elif eqn.primitive.name == "optimization_barrier" and not self._exact:
                # One barrier per operand: a joint one would make every value depend on all inputs.
                pairs = zip(operands, types, strict=True)
                results = [self._equation(eqn, (x,), [aval], scope)[0] for x, aval in pairs]
            else:
                if eqn.params.get("branches_platforms"):
                    operands = self._apart(operands)
                results = self._equation(eqn, operands, types, scope)
            known |= zip(eqn.outvars, results, strict=True)
        return list(map(read, jaxpr.outvars))

    def _equation(
        self, eqn: Any, operands: tuple[Value, ...], types: list[Any], scope: str
    ) -> list[Value]:
        reads = functools.reduce(operator.or_, (self.reads[x] for x in operands), 0)
        results = [self._value(aval, reads) for aval in types]
        self.producer |= dict.fromkeys(results, len(self.equations))
        ctx = eqn.ctx if self._exact else None
        at = operands, tuple(results), scope, ctx, getattr(eqn, "source_info", None)
        equation = Equation(eqn.primitive, eqn.params, *at)
        self.equations.append(equation)
        return results

    def _apart(self, operands: tuple[Value, ...]) -> tuple[Value, ...]:
        """Returns operands; one that a kept jit made is made again where it is repeated."""
        apart: list[Value] = []
        for x in operands:
            made = self.equations[self.producer[x]] if x in self.producer else _BARRIER
            if x in apart and made.params.get("name") in self._kept and len(made.results) == 1:
                each = [self._equation(_BARRIER, (y,), [self.types[y]], "") for y in made.operands]
                (x,) = self._equation(made, tuple(y for (y,) in each), [self.types[x]], made.scope)
            apart.append(x)
        return tuple(apart)

    def _value(self, aval: Any, reads: int) -> Value:
        self.types.append(aval)
        self.reads.append(reads)
        return Value(len(self.types) - 1)

    def _constant(self, constant: Any, aval: Any) -> Value:
        value = self._value(aval, 0)
        self.constants[value] = constant
        return value

    def set_known(self, values: Container[int]) -> None:
        """Makes values known before the deferred inputs: ``reads`` no longer counts these."""
        for eqn in self.equations:
            reads = functools.reduce(operator.or_, (self.reads[x] for x in eqn.operands), 0)
            for value in eqn.results:
                self.reads[value] = 0 if value in values else reads

    def shape(self, value: int) -> tuple[int, ...]:
        """Returns the shape of a value."""
        return self.types[value].shape

    def needed(
        self, values: Iterable[int], known: Container[int]
    ) -> tuple[list[Equation], list[Value]]:
        """Returns what ``values`` need beyond ``known``: equations, in order, and inputs."""
        equations = set()
        inputs = []
        seen = set()
        pending = list(values)
        while pending:
            value = pending.pop()
            if value in seen or value in known:
                continue
            seen.add(value)
            if value in self.producer:
                equations.add(self.producer[value])
                pending += self.equations[self.producer[value]].operands
            else:
                inputs.append(Value(value))
        return [self.equations[i] for i in sorted(equations)], sorted(inputs)


# Primitives that map each element by itself, and those that reduce dims.
_ELEMENTWISE_NAMES = """
abs acos acosh add and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp complex conj
convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt
imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not
optimization_barrier or population_count pow real reduce_precision rem round rsqrt select_n
shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub
tan tanh xor
"""
ELEMENTWISE = frozenset(_ELEMENTWISE_NAMES.split())
REDUCTIONS = frozenset(f"reduce_{kind}" for kind in ("sum", "max", "min", "prod", "and", "or"))


def called(eqn: Any) -> Any | None:
    """Returns the jaxpr of an equation that only calls a function, with its derivatives or not."""
    record = record_of(eqn)
    return record.body if isinstance(record, Call | CustomDerivative) else None


def _branch(eqn: Any, portable: bool) -> Any | None:
    """Returns the branch that replaces a choice of platform: if ``portable``, the default.

    Barriers of some platforms are removed: leaves that are evaluated one by one must not wait.
    """
    if not eqn.params.get("branches_platforms"):  # not of jax.lax.platform_dependent
        return None
    branches = eqn.params["branches"]
    primitives = [{inner.primitive.name for inner in b.jaxpr.eqns} for b in branches]
    if set() in primitives and set().union(*primitives) <= {"optimization_barrier"}:
        return branches[primitives.index(set())]
    return branches[-1] if portable else None


def bind(eqn: Any, operands: Sequence[Any], params: Any = None) -> Sequence[Any]:
    """Evaluates an equation of a graph or of a jaxpr, on the mesh that it was traced on.

    ``params`` replaces the parameters of its primitive if given. A constant of a trace remembers
    the mesh on which it was made or first asked for its type; a view of it does not.
    """
    operands = [x.view() if isinstance(x, np.ndarray) else x for x in operands]
    scope = eqn.scope if isinstance(eqn, Equation) else str(eqn.source_info.name_stack)
    params = eqn.params if params is None else params
    params = eqn.primitive.get_bind_params(params)
    functions, params = params if isinstance(params, tuple) else ((), params)
    with (
        eqn.ctx.manager if eqn.ctx else contextlib.nullcontext(),
        jax.named_scope(scope) if scope else contextlib.nullcontext(),
    ):
        out = eqn.primitive.bind(*functions, *operands, **params)
    return out if eqn.primitive.multiple_results else [out]


def evaluate(equations: Iterable[Equation], values: dict[Any, Any]) -> None:
    """Adds the results of equations to ``values``, which holds their operands."""
    for eqn in equations:
        out = bind(eqn, [values[v] for v in eqn.operands])
        values |= zip(eqn.results, out, strict=True)
