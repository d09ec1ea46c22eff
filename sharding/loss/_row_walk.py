"""The states of values of a traced loss, equation by equation: calls, loops, branches, derivatives.

The walk reads each equation beside its twin, the same one of a trace with twice the rows.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from optax_ext import traced_graph
from optax_ext.equations import Call, CustomDerivative, Remat, Scan, name_of, params_of, record_of
from sharding._user_line import line_of
from sharding.loss import _row_rules as rules
from sharding.loss._declared_rows import DECLARED, through_declared
from sharding.loss._row_cotangents import check_cotangents, cotangents_of, pullback_of
from sharding.loss._row_rules import RowStep
from sharding.loss._row_states import (
    NUMBER,
    Coupled,
    Rows,
    RowsMeet,
    Shared,
    State,
    Weight,
    join,
    meets_shared,
)
from sharding.loss._row_table import states_of

_MOST_PASSES = 16  # over the body of a loop: a state changes a few times, and only loses knowledge
_INSIDE = {"composite": "jaxpr", "custom_vmap_call": "call"}
OTHER_PROGRAM = "the loss is another program for twice the rows"


def steps_of(
    equations: Sequence[Any], twins: Sequence[Any] | None, types: Any = (), twin_types: Any = ()
) -> list[RowStep]:
    """Equations of a jaxpr, or of a graph with these types of values, each with its twin."""

    def step(eqn: Any, types: Any, twin: RowStep | None) -> RowStep:
        if isinstance(eqn, traced_graph.Equation):
            operands, results = eqn.operands, eqn.results
        else:
            operands, results = tuple(eqn.invars), tuple(eqn.outvars)

        def avals(values: Any) -> tuple[Any, ...]:
            return tuple(v.aval if hasattr(v, "aval") else types[v] for v in values)

        sides = operands, results, avals(operands), avals(results)
        return RowStep(name_of(eqn), params_of(eqn), *sides, eqn, twin)

    if twins is None:
        return [step(eqn, types, None) for eqn in equations]
    if [name_of(eqn) for eqn in equations] != [name_of(eqn) for eqn in twins]:
        raise RowsMeet(OTHER_PROGRAM)
    both = zip(equations, twins, strict=True)
    steps = [step(eqn, types, step(twin, twin_types, None)) for eqn, twin in both]
    same: dict[Any, Any] = {}  # the values of the twin in the places of those here
    for x in steps:
        other: Any = x.twin
        values = zip(x.operands + x.results, other.operands + other.results, strict=False)
        for a, b in values:
            is_number = isinstance(a, Literal), isinstance(b, Literal)
            if is_number[0] != is_number[1] or (not is_number[0] and same.setdefault(a, b) != b):
                raise RowsMeet(OTHER_PROGRAM)
    return steps


def unknown(aval: Any) -> Shared:
    """What all rows share, and may be anything else."""
    return Shared(frozenset(range(len(getattr(aval, "shape", ())))))


def constant(value: Any, twin: Any = None) -> Shared:
    """A constant of the trace, beside that of the trace with twice the rows."""
    dtype = jax.typeof(value).dtype
    if isinstance(value, jax.core.Tracer) or jnp.issubdtype(dtype, jax.dtypes.extended):
        return unknown(jax.typeof(value))
    twin = value if twin is None else twin
    if np.size(value) != 1 or np.shape(value) != np.shape(twin):
        is_same = value is twin or np.array_equal(value, twin)
        return Shared(frozenset(range(np.ndim(value))), 0 if is_same else None)
    number, doubled = np.asarray(value).item(), np.asarray(twin).item()
    if number == doubled or number != number:
        return Shared(number=number)
    powers = [k for k in (-2, -1, 1, 2) if doubled == number * 2.0**k]
    return Shared(power=powers[0] if powers else None)


class Walk:
    """Finds the state of each value; ``run`` adds them to those that are known."""

    def __init__(self) -> None:
        self._loops = 0  # over rows that the walk is inside of
        self._declared: dict[Any, Any] = {}  # what reached functions that are declared
        self._pullbacks: dict[int, Any] = {}
        self._is_in_pullback = False

    def run(self, steps: Sequence[RowStep], known: dict[Any, State]) -> None:
        for number, step in enumerate(steps):
            ins = [self._read(known, step, k) for k in range(len(step.operands))]
            outs = self._equation(step, ins)
            if any(isinstance(v, Coupled | Weight) for v in outs):
                line = functools.partial(_line, steps, number)
                outs = [_located(v, step.name, line) for v in outs]
            known |= zip(step.results, outs, strict=True)

    def _read(self, known: dict[Any, State], step: RowStep, k: int) -> State:
        value = step.operands[k]
        if isinstance(value, Literal):
            return constant(value.val, step.twin and getattr(step.twin.operands[k], "val", None))
        return known[value] if value in known else unknown(step.types[k])

    def _equation(self, step: RowStep, ins: list[Any]) -> list[State]:
        try:
            outs = self._states(step, ins)
            for k, v in enumerate(outs):
                _check_doubled(step, k, v)
            return outs
        except RowsMeet as meet:
            return [Coupled(str(meet), step.name)] * len(step.results)

    def _states(self, step: RowStep, ins: list[Any]) -> list[State]:
        if step.equation.primitive is DECLARED:
            return [through_declared(step.equation, ins[0], self._declared)]
        record: Any = record_of(step.equation)
        twin: Any = step.twin and record_of(step.twin.equation)
        if isinstance(record, Call | Remat):
            return self.inside(record.body, twin and twin.body, ins)
        if isinstance(record, CustomDerivative):
            outs = self.inside(record.body, twin and twin.body, ins)
            self._check_derivative(step, ins, outs)
            return outs
        if step.name in _INSIDE:
            name = _INSIDE[step.name]
            return self.inside(step.params[name], step.twin and step.twin.params[name], ins)
        if step.name == "custom_linear_solve":
            return self._linear_solve(step, ins)
        if isinstance(record, Scan):
            return self._scan(record, twin, ins)
        if step.name in ("while", "cond"):
            return (self._while if step.name == "while" else self._cond)(step, ins)
        return states_of(step, ins)

    def inside(self, closed: Any, twin: Any, ins: list[State]) -> list[State]:
        """The states of the results of a function inside of an equation."""
        jaxpr, other = (getattr(x, "jaxpr", x) for x in (closed, twin))
        known: dict[Any, State] = dict(zip(jaxpr.invars, ins, strict=True))
        consts = [getattr(x, "consts", ()) for x in (closed, twin or closed)]
        for var, value, same in zip(jaxpr.constvars, *consts, strict=True):
            known[var] = constant(value, same)
        self.run(steps_of(jaxpr.eqns, other and other.eqns), known)
        outs = zip(jaxpr.outvars, (other or jaxpr).outvars, strict=True)
        return [
            constant(v.val, getattr(o, "val", None)) if isinstance(v, Literal) else known[v]
            for v, o in outs
        ]

    def _linear_solve(self, step: RowStep, ins: list[Any]) -> list[State]:
        """The solution, as the function that solves computes it."""
        p, twin = step.params, step.twin and step.twin.params["jaxprs"].solve
        counts = p["const_lengths"]
        first = counts.matvec + counts.vecmat
        given = [*ins[first : first + counts.solve], *ins[sum(counts) :]]
        return self.inside(p["jaxprs"].solve, twin, given)

    # --- Loops and branches -----------------------------------------------------------------------

    def _scan(self, scan: Any, twin: Any, ins: list[Any]) -> list[State]:
        first, last = scan.num_consts, scan.num_consts + scan.num_carry
        over_rows = any(isinstance(v, Rows) and 0 in v.dims for v in ins[last:])
        loop = -1 - self._loops if over_rows else None  # the dim of the rows in an iteration
        is_grown = twin is not None and twin.options["length"] != scan.options["length"]
        body = scan.body.jaxpr
        fixed = [o is i for o, i in zip(body.outvars, body.invars[first:last], strict=False)]
        items = [_of_iteration(v, loop) for v in ins[last:]]
        carry = ins[first:last]
        if over_rows:
            carry = [dataclasses.replace(v, running=loop) if rules.is_sum(v) else v for v in carry]
        self._loops += over_rows
        try:
            for _ in range(_MOST_PASSES):
                given = [*ins[:first], *carry, *items]
                outs = self.inside(scan.body, twin and twin.body, given)
                each = zip(carry, outs, fixed, strict=False)
                new = [_next_carried(a, b, keep, loop) for a, b, keep in each]
                if new == carry:
                    break
                carry = new
            else:
                raise RowsMeet("what a loop makes of rows is not known")
        finally:
            self._loops -= over_rows
        changes = over_rows or is_grown
        both = zip(carry, fixed, strict=True)
        after = [_after_loop(v, loop, changes and not keep) for v, keep in both]
        return after + [_of_all_iterations(v, loop) for v in outs[last - first :]]

    def _while(self, step: RowStep, ins: list[Any]) -> list[State]:
        p, twin = step.params, step.twin and step.twin.params
        first, last = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        carry, body = ins[last:], p["body_jaxpr"].jaxpr
        fixed = [o is i for o, i in zip(body.outvars, body.invars[last - first :], strict=True)]
        for _ in range(_MOST_PASSES):
            condition = p["cond_jaxpr"], twin and twin["cond_jaxpr"]
            (goes_on,) = self.inside(*condition, [*ins[:first], *carry])
            given = [*ins[first:last], *carry]
            outs = self.inside(p["body_jaxpr"], twin and twin["body_jaxpr"], given)
            new = [
                a if keep else _decided(goes_on, join(a, b))
                for a, b, keep in zip(carry, outs, fixed, strict=True)
            ]
            if new == carry:
                return new
            carry = new
        raise RowsMeet("what a loop makes of rows is not known")

    def _cond(self, step: RowStep, ins: list[Any]) -> list[State]:
        branches = step.params["branches"]
        twins = step.twin.params["branches"] if step.twin else [None] * len(branches)
        each = [self.inside(*both, ins[1:]) for both in zip(branches, twins, strict=True)]
        return [_decided(ins[0], functools.reduce(join, outs)) for outs in zip(*each, strict=True)]

    # --- Derivatives that a user wrote ------------------------------------------------------------

    def _check_derivative(self, step: RowStep, ins: list[Any], outs: list[State]) -> None:
        """Raises if the pullback of a function with its own derivative couples rows."""
        if self._is_in_pullback or not any(isinstance(v, Rows) for v in outs):
            return
        key = id(step.equation)
        if key not in self._pullbacks:
            twin = step.twin and pullback_of(step.twin)
            self._pullbacks[key] = step.equation, pullback_of(step), twin
        _, pullback, twin = self._pullbacks[key]
        if pullback is None:
            return
        self._is_in_pullback = True  # a loss with derivatives of derivatives has them in its trace
        try:
            found = self.inside(pullback, twin, [*ins, *cotangents_of(step, outs)])
        finally:
            self._is_in_pullback = False
        check_cotangents(step, ins, found)


def _check_doubled(step: RowStep, k: int, v: State) -> None:
    """Raises if the dims of rows do not have twice the entries with twice the rows."""
    if step.twin is None or not isinstance(v, Rows) or v.summed or min(v.dims) < 0:
        return
    sizes = [[s.result_types[k].shape[d] for d in v.dims] for s in (step, step.twin)]
    if 2 * math.prod(sizes[0]) != math.prod(sizes[1]):
        raise RowsMeet(OTHER_PROGRAM)


def _line(steps: Sequence[RowStep], number: int) -> str:
    """The user's line of a step, or of one before: what JAX traced earlier has none of its own."""
    lines = (line_of(step.equation.source_info) for step in reversed(steps[: number + 1]))
    return next(filter(None, lines), "")


def _located(v: Any, name: str, line: Callable[[], str]) -> Any:
    if isinstance(v, Coupled) and not v.line:
        return Coupled(v.reason, v.equation or name, line())
    if isinstance(v, Weight) and not v.cause.line:
        return dataclasses.replace(v, cause=_located(v.cause, name, line))
    return v


# --- Values of one iteration, and of all ----------------------------------------------------------


def _of_iteration(v: State, loop: int | None) -> State:
    """What an iteration reads of a scanned value; ``loop`` becomes its dim of rows."""
    if isinstance(v, Rows):
        dims = tuple(d - (d > 0) if d else loop for d in v.dims)
        return dataclasses.replace(v, dims=dims)  # type: ignore[arg-type]
    if isinstance(v, Shared):
        varies = {d - (d > 0) for d in v.varies if d}
        if loop is not None and 0 in v.varies:
            varies.add(loop)
        counts = v.counts - 1 if v.counts else None
        return dataclasses.replace(v, varies=frozenset(varies), counts=counts)
    return v


def _next_carried(a: State, b: State, is_fixed: bool, loop: int | None) -> State:
    """What an iteration reads of what is carried, given what it read last and returned."""
    if is_fixed:
        return a
    if loop is not None and isinstance(a, Shared) and isinstance(b, Rows) and loop in b.dims:
        if not a.is_zero:
            return Coupled("a loop over rows carries a row to the next one")
        return rules.summed_in_loop(b, loop)
    both = join(a, b)
    if isinstance(both, Coupled) and not isinstance(b, Coupled) and loop is not None:
        return Coupled("a loop over rows carries a row to the next one")
    if loop is not None and isinstance(both, Shared):  # a count, or keys that are split
        return Shared(both.varies | {loop}, both.power, both.random)
    return both


def _after_loop(v: State, loop: int | None, changes: bool) -> State:
    if isinstance(v, Rows) and v.running is not None and v.running == loop:
        return dataclasses.replace(v, running=None)
    if isinstance(v, Shared) and changes:
        return Shared(v.varies - {loop}, None, v.random)
    if isinstance(v, Rows) and changes:
        return Coupled("a loop that runs for each row returns what its last iteration gave")
    return v


def _of_all_iterations(v: State, loop: int | None) -> State:
    """What all iterations return, one after the other."""
    if isinstance(v, Rows):
        if v.running is not None and v.running == loop:
            return Coupled("a loop over rows returns its sum over the rows so far")
        dims = tuple(0 if d == loop else d + (d >= 0) for d in v.dims)
        return dataclasses.replace(v, dims=dims)
    if isinstance(v, Shared):
        varies = {d + (d >= 0) for d in v.varies if d != loop}
        return Shared(frozenset({0, *varies}), v.power, v.random)
    return v.cause if isinstance(v, Weight) else v


def _decided(by: Any, v: Any) -> State:
    """A value of a branch that ``by`` takes, or of a loop that goes on by it."""
    if isinstance(by, Coupled) or isinstance(v, Coupled):
        return by if isinstance(by, Coupled) else v
    if isinstance(by, Weight) or (isinstance(by, Rows) and (by.is_linear or by.power)):
        return Coupled("what runs is decided by a sum over rows")
    try:
        if isinstance(by, Shared) and isinstance(v, Shared):
            power = None if by.power != 0 else v.power
            return dataclasses.replace(
                v, varies=v.varies | by.varies, power=power, random=v.random or by.random
            )
        if isinstance(by, Shared) and isinstance(v, Rows):
            if by.power:
                raise RowsMeet(NUMBER)
            return meets_shared(v, by)
        if isinstance(by, Rows) and isinstance(v, Shared):
            return dataclasses.replace(meets_shared(by, v), power=v.power or 0)
        if isinstance(by, Rows) and isinstance(v, Rows) and v.place == by.place and not v.is_linear:
            return dataclasses.replace(v, random=v.random or by.random)
    except RowsMeet as meet:
        return Coupled(str(meet))
    return Coupled("what runs is decided by other rows")
