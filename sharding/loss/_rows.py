"""What a loss does with the rows of its batch, proven from its trace: no numbers are computed.

``rows_of_loss`` says it in one word:

| word | the loss | over devices, micro-batches and tiles |
|---|---|---|
| ``mean`` | is a mean of what each row gives alone | the mean is exact |
| ``sum`` | is a sum of that | the sum is exact |
| ``weighted`` | is made of ratios of two such sums | exact if sums and weights are added first |
| ``random`` | is one of these, and random numbers depend on the index of a row | other numbers |
| ``coupled`` | is none of these, or is not known to be | another loss |

The proof holds for a loss whose trace is the same program for any number of rows: it is traced with
n rows and 2 n, which must differ in sizes and numbers only. ``rows_of_equations`` answers for some
equations, from values of which rows are seeded along any dim. What has no rule counts as coupled.

Derivatives follow from values, except those that a user wrote. The rule of a ``custom_vjp`` or a
``custom_jvp`` is traced beside the function, and must give cotangents in which rows are apart.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from optax_ext import traced_graph
from optax_ext.traced_graph import Graph
from sharding._user_line import line_of
from sharding.loss import _row_rules as rules
from sharding.loss._declared_rows import DECLARED, declared
from sharding.loss._row_rules import Step
from sharding.loss._row_states import (
    INDEX,
    NUMBER,
    Coupled,
    Rows,
    RowsMeet,
    Shared,
    State,
    Value,
    Weight,
    join,
    meets_shared,
)
from sharding.loss._row_table import states_of

_CALLS = traced_graph.CALLS | dict.fromkeys(("remat2", "checkpoint"), "jaxpr")
_DERIVATIVES = ("custom_jvp_call", "custom_vjp_call")
_MOST_PASSES = 16  # over the body of a loop; states only ever lose what is known
_OTHER_PROGRAM = "the loss is another program for twice the rows"


@dataclasses.dataclass(frozen=True)
class LossRows:
    """What is proven of a loss."""

    word: str  # mean, sum, weighted, random or coupled
    states: list[State]  # of all that the loss returns, the loss first
    graph: Graph  # of the trace
    cause: Coupled | None = None  # why it is coupled

    @property
    def ratios(self) -> list[tuple[Value | None, Value]]:
        """Of a weighted loss: the sums over rows, each with the weight that it is over.

        These are values of ``graph``, or variables of a function inside of it. With the weights of
        the whole batch given, the loss is a mean. A sum is None where rows were divided before they
        were added.
        """
        loss = self.states[0]
        return sorted(loss.ratios, key=str) if isinstance(loss, Rows) else []

    def __str__(self) -> str:
        return f"{self.word}: {self.cause}" if self.cause else self.word


def rows_of_loss(fn: Any, args: Sequence[Any], has_rows: Sequence[bool]) -> LossRows:
    """What a loss does with the rows of those arguments that have rows, in their first dims."""
    leaves, treedef = jax.tree.flatten(tuple(args))
    rows = [x for has, arg in zip(has_rows, args, strict=True) for x in [has] * len(jax.tree.leaves(arg))]
    rows = [has and jnp.ndim(x) > 0 for has, x in zip(rows, leaves, strict=True)]
    counts = {x.shape[0] for x, has in zip(leaves, rows, strict=True) if has}
    if len(counts) > 1:
        raise ValueError(
            f"the arrays of a batch must have as many rows as each other; they have {counts}."
        )
    count = max(2, *counts, 2)  # one row cannot be told from what is broadcast

    def traced(count: int) -> Graph:
        types = [
            jax.ShapeDtypeStruct((count, *jnp.shape(x)[1:]) if has else jnp.shape(x), jnp.result_type(x) if isinstance(x, int | float) else x.dtype)
            for x, has in zip(leaves, rows, strict=True)
        ]
        flat = lambda leaves: fn(*jax.tree.unflatten(treedef, leaves))  # noqa: E731
        return Graph(flat, types, [False] * len(types), exact=True)

    graph = traced(count)
    try:
        twin = traced(2 * count)
    except Exception as error:  # of the user's function, whatever it raises
        reason = f"it cannot be traced with {2 * count} rows in place of {count}: {error}"
        return _in_a_word(graph, [Coupled(reason)] * len(graph.outputs))
    seeds = {k: Rows((0,), count) if has else _unknown(graph.types[k]) for k, has in enumerate(rows)}
    steps = _steps(graph.equations, twin.equations, graph.types, twin.types)
    if steps is None or len(graph.types) != len(twin.types):
        return _in_a_word(graph, [Coupled(_OTHER_PROGRAM)] * len(graph.outputs))
    known: dict[Any, State] = dict(seeds)
    for value, number in graph.constants.items():
        known[value] = _constant(number, twin.constants.get(value))
    _Walk().run(steps, known)
    return _in_a_word(graph, [known[value] for value in graph.outputs])


def _in_a_word(graph: Graph, states: list[State]) -> LossRows:
    loss = states[0]
    if isinstance(loss, Weight):
        loss = loss.cause
    elif isinstance(loss, Rows) and not loss.is_sum:
        loss = Coupled("it returns rows, and no sum over them")
    elif not isinstance(loss, Coupled) and loss.power not in ((0,) if getattr(loss, "ratios", ()) else (0, 1)):
        loss = Coupled(f"it grows with the number of rows as neither a mean nor a sum")
    if isinstance(loss, Coupled):
        return LossRows("coupled", states, graph, loss)
    if isinstance(loss, Rows) and loss.random:
        return LossRows("random", states, graph)
    if isinstance(loss, Rows) and loss.ratios:
        return LossRows("weighted", states, graph)
    return LossRows("sum" if loss.power else "mean", states, graph)


def rows_of_equations(
    equations: Iterable[Any], seeds: Mapping[Value, int | State], types: Sequence[Any] = ()
) -> dict[Value, State]:
    """The states of all values of some equations, if the ``seeds`` among these have rows.

    Equations are those of a jaxpr, or of a ``Graph``, whose ``types`` are given with them. A seed is
    the dim that rows are along, or a state; what is neither seeded nor computed is shared.
    """

    def state(value: Value, seed: int | State) -> State:
        aval = types[value] if types else value.aval
        return Rows((seed,), aval.shape[seed]) if isinstance(seed, int) else seed

    known = {value: state(value, seed) for value, seed in seeds.items()}
    steps = _steps(list(equations), None, types, ())
    _Walk().run(steps or [], known)
    return known


# --- The walk -------------------------------------------------------------------------------------


def _unknown(aval: Any) -> Shared:
    return Shared(frozenset(range(len(getattr(aval, "shape", ())))))


def _constant(value: Any, twin: Any = None) -> Shared:
    """A constant of the trace, beside that of the trace with twice the rows."""
    if isinstance(value, jax.core.Tracer) or jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended):
        return _unknown(jax.typeof(value))
    twin = value if twin is None else twin
    if np.size(value) != 1 or np.shape(value) != np.shape(twin):
        is_same = value is twin or np.array_equal(np.asarray(value), np.asarray(twin))
        return Shared(frozenset(range(np.ndim(value))), 0 if is_same else None)
    number, doubled = np.asarray(value).item(), np.asarray(twin).item()
    if number == doubled or (number != number and doubled != doubled):
        return Shared(number=number)
    powers = [k for k in (-2, -1, 1, 2) if doubled == number * 2.0**k]
    return Shared(power=powers[0] if powers else None)


def _steps(
    equations: Sequence[Any], twins: Sequence[Any] | None, types: Any = (), twin_types: Any = ()
) -> list[Step] | None:
    """Equations of a jaxpr or a graph, each with its twin; None if these are other equations."""

    def step(eqn: Any, types: Any, twin: Step | None) -> Step:
        is_graphs = isinstance(eqn, traced_graph.Equation)
        operands, results = (eqn.operands, eqn.results) if is_graphs else (eqn.invars, eqn.outvars)
        avals = [tuple(types[v] if is_graphs else v.aval for v in vs) for vs in (operands, results)]
        return Step(eqn.primitive.name, eqn.params, tuple(operands), tuple(results), *avals, eqn, twin)

    if twins is None:
        return [step(eqn, types, None) for eqn in equations]
    if [e.primitive for e in equations] != [e.primitive for e in twins]:
        return None
    return [
        step(eqn, types, step(twin, twin_types, None))
        for eqn, twin in zip(equations, twins, strict=True)
    ]


class _Walk:
    """The states of values, equation by equation."""

    def __init__(self) -> None:
        self.loops = 0  # over rows that the walk is inside of
        self.declared: dict[Any, Any] = {}  # what reached functions that are declared
        self.pullbacks: dict[int, Any] = {}

    def run(self, steps: Iterable[Step], known: dict[Any, State]) -> None:
        for step in steps:
            ins = [self._read(known, step, k) for k in range(len(step.operands))]
            known |= zip(step.results, self._located(step, ins), strict=True)

    def _read(self, known: dict[Any, State], step: Step, k: int) -> State:
        value = step.operands[k]
        if isinstance(value, Literal):
            return _constant(value.val, step.twin and getattr(step.twin.operands[k], "val", None))
        return known[value] if value in known else _unknown(step.types[k])

    def _located(self, step: Step, ins: list[Any]) -> list[State]:
        try:
            outs = self._equation(step, ins)
        except RowsMeet as meet:
            outs = [Coupled(str(meet))] * len(step.results)
        at = {"equation": step.name, "line": line_of(step.equation.source_info)}
        return [
            dataclasses.replace(v, **at) if isinstance(v, Coupled) and not v.equation else v
            for v in outs
        ]

    def _equation(self, step: Step, ins: list[Any]) -> list[State]:
        if step.equation.primitive is DECLARED:
            return [declared(step.params, ins[0], self.declared)]
        if step.name in _CALLS:
            return self._jaxpr(step, _CALLS[step.name], ins)
        if step.name in _DERIVATIVES:
            return self._with_own_derivative(step, ins)
        if step.name in ("scan", "while", "cond"):
            return {"scan": self._scan, "while": self._while, "cond": self._cond}[step.name](step, ins)
        return states_of(step, ins)

    def _jaxpr(self, step: Step, param: str, ins: list[State], branch: int | None = None) -> list[State]:
        """The states of the results of a function inside an equation."""
        given = [s and s.params[param] for s in (step, step.twin)]
        given = [x if branch is None or x is None else x[branch] for x in given]
        return self._closed(given[0], given[1], ins)

    def _closed(self, closed: Any, twin: Any, ins: list[State]) -> list[State]:
        jaxpr, other = (getattr(x, "jaxpr", x) for x in (closed, twin))
        steps = _steps(jaxpr.eqns, other and other.eqns)
        if steps is None:
            raise RowsMeet(_OTHER_PROGRAM)
        known: dict[Any, State] = dict(zip(jaxpr.invars, ins, strict=True))
        consts = getattr(closed, "consts", ())
        for k, (var, const) in enumerate(zip(jaxpr.constvars, consts, strict=False)):
            known[var] = _constant(const, twin and twin.consts[k])
        self.run(steps, known)
        outs = zip(jaxpr.outvars, other.outvars if other else jaxpr.outvars, strict=True)
        return [
            _constant(v.val, getattr(o, "val", None)) if isinstance(v, Literal) else known[v]
            for v, o in outs
        ]

    # --- Loops and branches

    def _scan(self, step: Step, ins: list[Any]) -> list[State]:
        p = step.params
        first, last = p["num_consts"], p["num_consts"] + p["num_carry"]
        over_rows = any(isinstance(v, Rows) and 0 in v.dims for v in ins[last:])
        is_grown = step.twin is not None and step.twin.params["length"] != p["length"]
        loop = -1 - self.loops if over_rows else None
        consts, items = ins[:first], [_of_iteration(v, loop) for v in ins[last:]]
        body = p["jaxpr"].jaxpr
        fixed = [body.outvars[k] is body.invars[first + k] for k in range(last - first)]
        carry = [
            dataclasses.replace(v, running=loop) if over_rows and rules.is_sum(v) else v
            for v in ins[first:last]
        ]
        self.loops += over_rows
        try:
            for _ in range(_MOST_PASSES):
                outs = self._jaxpr(step, "jaxpr", [*consts, *carry, *items])
                new = [
                    a if keep else _next(a, b, loop)
                    for a, b, keep in zip(carry, outs, fixed, strict=False)
                ]
                if new == carry:
                    break
                carry = new
            else:
                raise RowsMeet("what a loop does with rows is not known")
        finally:
            self.loops -= over_rows
        after = [
            v if keep else _after_loop(v, loop, over_rows or is_grown)
            for v, keep in zip(carry, fixed, strict=True)
        ]
        return after + [_of_loop(v, loop) for v in outs[last - first :]]

    def _while(self, step: Step, ins: list[Any]) -> list[State]:
        p = step.params
        first, last = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        carry, body = ins[last:], p["body_jaxpr"].jaxpr
        fixed = [o is i for o, i in zip(body.outvars, body.invars[last - first :], strict=True)]
        for _ in range(_MOST_PASSES):
            (goes_on,) = self._jaxpr(step, "cond_jaxpr", [*ins[:first], *carry])
            outs = self._jaxpr(step, "body_jaxpr", [*ins[first:last], *carry])
            new = [
                a if keep else _decided(goes_on, join(a, b))
                for a, b, keep in zip(carry, outs, fixed, strict=True)
            ]
            if new == carry:
                return new
            carry = new
        raise RowsMeet("what a loop does with rows is not known")

    def _cond(self, step: Step, ins: list[Any]) -> list[State]:
        count = len(step.params["branches"])
        each = [self._jaxpr(step, "branches", ins[1:], k) for k in range(count)]
        return [_decided(ins[0], functools.reduce(join, outs)) for outs in zip(*each, strict=True)]

    # --- Derivatives that a user wrote

    def _with_own_derivative(self, step: Step, ins: list[Any]) -> list[State]:
        outs = self._jaxpr(step, "call_jaxpr", ins)
        if all(isinstance(v, Shared | Coupled) for v in outs):
            return outs
        key = id(step.equation)
        if key not in self.pullbacks:
            twin = step.twin and _pullback(step.twin)
            self.pullbacks[key] = step.equation, _pullback(step), twin
        _, pullback, twin = self.pullbacks[key]
        if pullback is None:
            return outs
        floating = [k for k, t in enumerate(step.types) if _is_inexact(t)]
        cotangents = [_cotangent(v) for v, t in zip(outs, step.result_types, strict=True) if _is_inexact(t)]
        found = self._closed(pullback, twin, [*ins, *cotangents])
        for k, state in zip(floating, found, strict=True):
            if not isinstance(step.operands[k], Literal):
                _check_cotangent(ins[k], state)
        return outs


# --- Values of one iteration ----------------------------------------------------------------------


def _of_iteration(v: State, loop: int | None) -> State:
    """What an iteration reads of a scanned value; ``loop`` is its dim of rows if it has one."""
    if isinstance(v, Rows):
        return dataclasses.replace(v, dims=tuple((loop or 0) if d == 0 else d - (d > 0) for d in v.dims))
    if isinstance(v, Shared):
        varies = {d - (d > 0) for d in v.varies if d} | ({loop} & {loop if 0 in v.varies else None})
        counts = v.counts - 1 if v.counts else None
        return dataclasses.replace(v, varies=frozenset(varies - {None}), counts=counts)
    return v


def _of_loop(v: State, loop: int | None) -> State:
    """A value that all iterations return, one after the other."""
    if isinstance(v, Rows) and v.running is not None and v.running == loop:
        return Coupled("a loop over rows returns its sum over the rows so far")
    if isinstance(v, Rows):
        return rules.moved(dataclasses.replace(v, dims=tuple(-0 if d == loop else d for d in v.dims)), lambda d: d) if False else _shifted(v, loop)
    if isinstance(v, Shared):
        varies = {0} | {d + (d >= 0) for d in v.varies if d != loop}
        return Shared(frozenset(varies), v.power, v.random)
    return v.cause if isinstance(v, Weight) else v
