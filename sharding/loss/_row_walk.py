"""The states of values of a traced loss, equation by equation: calls, loops, branches, derivatives.

The walk reads each equation beside its twin, the same one of a trace with twice the rows. A loop
over rows is read as ``vmap`` computes it: all iterations side by side.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxpr_as_fun

from optax_ext import traced_graph
from optax_ext.equations import Call, CustomDerivative, Remat, Scan, name_of, params_of, record_of
from optax_ext.user_line import line_of
from sharding.loss._declared_rows import DECLARED, through_declared
from sharding.loss._row_dims import RowStep
from sharding.loss._row_equations import states_of
from sharding.loss._row_states import (
    CLIPPED,
    SO_FAR,
    Coupled,
    Kind,
    Rows,
    RowsMeet,
    Running,
    Shared,
    Weight,
    added,
    combined,
    is_total,
    moved,
    sum_over,
    unknown,
)

_MOST_PASSES = 16  # over the body of a loop: a state changes a few times, and only loses knowledge
# The function that an equation runs, or what does the same, by its parameter.
_FUNCTIONS = {
    "composite": "jaxpr",
    "custom_vmap_call": "call",
    "with_handles": "default",
    "for_tpus": "default",
}
_ALWAYS = Shared()
OTHER_PROGRAM = "the loss is another program for twice the rows"
# Where the dims of an iteration are in all iterations, one after the other; and the reverse.
_ALL: list[Any] = list(range(1, 64))
_ONE: list[Any] = ["each iteration has a row", *range(63)]


def steps_of(
    equations: Sequence[Any],
    twins: Sequence[Any] | None,
    types: Any = (),
    twin_types: Any = (),
    growth: Fraction | int = 2,
) -> list[RowStep]:
    """Equations of a jaxpr, or of a graph with these types of values, each with its twin.

    That has ``growth`` times the rows.
    """

    def step(eqn: Any, types: Any, twin: RowStep | None) -> RowStep:
        if isinstance(eqn, traced_graph.Equation):
            operands, results = eqn.operands, eqn.results
        else:
            operands, results = tuple(eqn.invars), tuple(eqn.outvars)

        def avals(values: Any) -> tuple[Any, ...]:
            return tuple(v.aval if hasattr(v, "aval") else types[v] for v in values)

        sides = operands, results, avals(operands), avals(results)
        return RowStep(name_of(eqn), params_of(eqn), *sides, eqn, twin, growth)

    if twins is None:
        return [step(eqn, types, None) for eqn in equations]
    if [name_of(eqn) for eqn in equations] != [name_of(eqn) for eqn in twins]:
        raise RowsMeet(OTHER_PROGRAM)
    both = zip(equations, twins, strict=True)
    steps = [step(eqn, types, step(twin, twin_types, None)) for eqn, twin in both]
    same: dict[Any, Any] = {}  # the values of the twin in the places of those here
    for x in steps:
        other: Any = x.twin
        values, others = x.operands + x.results, other.operands + other.results
        if len(values) != len(others):
            raise RowsMeet(OTHER_PROGRAM)
        for a, b in zip(values, others, strict=True):
            is_number = isinstance(a, Literal), isinstance(b, Literal)
            if is_number[0] != is_number[1] or (not is_number[0] and same.setdefault(a, b) != b):
                raise RowsMeet(OTHER_PROGRAM)
    return steps


def constant(value: Any, twin: Any = None, growth: Fraction | int = 2) -> Shared:
    """A constant of the trace, beside that of the trace with ``growth`` times the rows."""
    dtype = jax.typeof(value).dtype
    if isinstance(value, jax.core.Tracer) or jnp.issubdtype(dtype, jax.dtypes.extended):
        return unknown(jax.typeof(value))
    twin = value if twin is None else twin
    if np.size(value) != 1 or np.shape(value) != np.shape(twin):
        is_same = value is twin or np.array_equal(value, twin)
        return dataclasses.replace(unknown(jax.typeof(value)), power=0 if is_same else None)
    number, doubled = np.asarray(value).item(), np.asarray(twin).item()
    if number == doubled or number != number:
        return Shared(is_zero=number == 0)
    powers = [k for k in (-2, -1, 1, 2) if doubled == number * float(growth) ** k]
    return Shared(power=powers[0] if powers else None)


class Walk:
    """Finds the state of each value; ``run`` adds them to those that are known."""

    def __init__(self, growth: Fraction | int = 2) -> None:
        self._growth = growth  # the rows of twins, in those of their equations
        self._declared: dict[Any, Any] = {}  # what reached functions that are declared
        self._traced: dict[Any, Any] = {}  # pullbacks and loops side by side, by their equations
        self._is_in_pullback = False

    def run(
        self, steps: Sequence[RowStep], known: dict[Any, Any], given: Collection[Any] = ()
    ) -> None:
        """``given`` values are not those that the steps compute, but the same for all rows."""
        for number, step in enumerate(steps):
            others = step.twin.operands if step.twin else step.operands
            operands = zip(step.operands, others, step.types, strict=True)
            ins = [self._known_state(known, *operand) for operand in operands]
            try:
                outs = self._states(step, ins)
                for k, v in enumerate(outs):
                    _check_doubled(step, k, v)
            except RowsMeet as meet:
                outs = [Coupled(str(meet))] * len(step.results)
            for v, aval, out in zip(step.results, step.result_types, outs, strict=True):
                known[v] = unknown(aval) if v in given else located(out, steps, number)

    def _states(self, step: RowStep, ins: list[Any]) -> list[Any]:
        if step.equation.primitive is DECLARED:
            aval = step.result_types[0]
            return [through_declared(step.equation, aval, ins[0], self._declared)]
        record: Any = record_of(step.equation)
        twin: Any = step.twin and record_of(step.twin.equation)
        if isinstance(record, Call | Remat):
            return self.inside(record.body, twin and twin.body, ins)
        if isinstance(record, CustomDerivative):
            outs = self.inside(record.body, twin and twin.body, ins)
            if not any(isinstance(v, Coupled) for v in outs):  # whose cause is inside
                self._check_derivative(step, ins, outs)
            return outs
        if step.name in _FUNCTIONS:
            name = _FUNCTIONS[step.name]
            return self.inside(step.params[name], step.twin and step.twin.params[name], ins)
        if step.name == "quantized_product":  # rounding is no matter of rows; scales may be
            return states_of(_of_plain(step), ins[:2])
        if step.name == "linear_call":
            raise RowsMeet("its transpose is one that its author wrote")
        if step.name == "custom_linear_solve":
            return self._linear_solve(step, ins)
        if isinstance(record, Scan):
            slices = ins[record.num_consts + record.num_carry :]
            over_rows = any(isinstance(v, Rows) and 0 in v.dims for v in slices)
            return (self._loop_over_rows if over_rows else self._scan)(record, twin, ins)
        if step.name in ("while", "cond"):
            return (self._while if step.name == "while" else self._cond)(step, ins)
        return states_of(step, ins)

    def inside(self, closed: Any, twin: Any, ins: list[Any]) -> list[Any]:
        """The states of the results of a function inside of an equation."""
        jaxpr, other = (getattr(x, "jaxpr", x) for x in (closed, twin))
        known: dict[Any, Any] = dict(zip(jaxpr.invars, ins, strict=True))
        consts = [getattr(x, "consts", ()) for x in (closed, twin or closed)]
        for var, value, same in zip(jaxpr.constvars, *consts, strict=True):
            known[var] = constant(value, same, self._growth)
        self.run(steps_of(jaxpr.eqns, other and other.eqns, growth=self._growth), known)
        outs = zip(jaxpr.outvars, (other or jaxpr).outvars, strict=True)
        return [self._known_state(known, v, of_twin, v.aval) for v, of_twin in outs]

    def _known_state(self, known: dict[Any, Any], value: Any, of_twin: Any, aval: Any) -> Any:
        """The state of an operand, beside that of the twin."""
        if isinstance(value, Literal):
            return constant(value.val, getattr(of_twin, "val", None), self._growth)
        return known[value] if value in known else unknown(aval)

    def _linear_solve(self, step: RowStep, ins: list[Any]) -> list[Any]:
        """The solution, as the function that solves computes it."""
        p, twin = step.params, step.twin and step.twin.params["jaxprs"].solve
        counts = p["const_lengths"]
        first = counts.matvec + counts.vecmat
        last = first + counts.solve
        outs = self.inside(p["jaxprs"].solve, twin, [*ins[first:last], *ins[sum(counts) :]])
        # Its derivatives run other functions of its author.
        others = [("matvec", ins[: counts.matvec], outs)]
        others += [("transpose_solve", ins[last : sum(counts)], outs)]
        for name, consts, given in others:
            fn = getattr(p["jaxprs"], name)
            of_twin = step.twin and getattr(step.twin.params["jaxprs"], name)
            found = self.inside(fn, of_twin, [*consts, *given]) if fn else []
            outs = [v for v in found if isinstance(v, Coupled)][:1] * len(outs) or outs
        return outs

    # --- Loops and branches -----------------------------------------------------------------------

    def _scan(self, scan: Any, twin: Any, ins: list[Any]) -> list[Any]:
        """A loop of which each iteration has all rows."""
        first, last = scan.num_consts, scan.num_consts + scan.num_carry
        slices = [moved(v, _ONE) for v in ins[last:]]

        def iteration(carry: list[Any]) -> list[Any]:
            given = [*ins[:first], *carry, *slices]
            return self.inside(scan.body, twin and twin.body, given)

        fixed = _fixed(scan.body.jaxpr, first, scan.num_carry)
        after, outs = _repeated(iteration, ins[first:last], fixed, lambda _, *both: _chosen(both))
        if twin is not None and twin.options["length"] != scan.options["length"]:
            after = [v if keep else _last_of_n(v) for v, keep in zip(after, fixed, strict=True)]
        return after + list(map(_stacked, outs[last - first :]))

    def _loop_over_rows(self, scan: Any, twin: Any, ins: list[Any]) -> list[Any]:
        """A loop over rows, or over groups of them, which may add up what they give."""
        first, last = scan.num_consts, scan.num_consts + scan.num_carry
        fixed = _fixed(scan.body.jaxpr, first, scan.num_carry)
        mapped = (*[False] * first, *(not keep for keep in fixed), *[True] * len(ins[last:]))
        body = self._side_by_side(scan, mapped)
        body_of_twin = twin and self._side_by_side(twin, mapped)

        def iterations(carry: list[Any]) -> list[Any]:
            return self.inside(body, body_of_twin, [*ins[:first], *carry, *ins[last:]])

        sums = [Running(of) for of in body.jaxpr.invars[first:last]]
        carry = [
            v if keep else running if is_total(v) or isinstance(v, Running) else moved(v, _ALL)
            for v, running, keep in zip(ins[first:last], sums, fixed, strict=True)
        ]
        next_of = lambda k, a, b: _next_carried(a, b, sums[k])  # noqa: E731
        _, outs = _repeated(iterations, carry, fixed, next_of)
        after = ins[first:last]
        for k, (out, keep) in enumerate(zip(outs, fixed, strict=False)):
            if not keep:
                after[k] = _after_rows(after[k], out, body.jaxpr.outvars[k].aval.shape)
        each = outs[last - first :]
        return after + [Coupled(SO_FAR) if isinstance(v, Running) else v for v in each]

    def _side_by_side(self, scan: Any, mapped: tuple[bool, ...]) -> Any:
        """The body of a loop, traced for all its iterations at once."""
        length = scan.options["length"]
        key = id(scan.body), mapped, length
        if key not in self._traced:
            shapes = [
                (length, *aval.shape) if is_mapped else aval.shape
                for aval, is_mapped in zip(scan.body.in_avals, mapped, strict=True)
            ]
            types = map(jax.ShapeDtypeStruct, shapes, (aval.dtype for aval in scan.body.in_avals))
            run = jax.vmap(jaxpr_as_fun(scan.body), [0 if x else None for x in mapped])
            try:
                self._traced[key] = scan, jax.make_jaxpr(run)(*types)
            except Exception as error:  # of an operation that vmap does not take
                raise RowsMeet(f"a loop over rows cannot be mapped over them: {error}") from error
        return self._traced[key][1]

    def _while(self, step: RowStep, ins: list[Any]) -> list[Any]:
        p, twin = step.params, step.twin and step.twin.params
        first, last = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]

        def iteration(carry: list[Any]) -> list[Any]:
            of_cond, of_body = [*ins[:first], *carry], [*ins[first:last], *carry]
            (goes_on,) = self.inside(p["cond_jaxpr"], twin and twin["cond_jaxpr"], of_cond)
            outs = self.inside(p["body_jaxpr"], twin and twin["body_jaxpr"], of_body)
            return [_chosen(both, goes_on) for both in zip(carry, outs, strict=True)]

        fixed = _fixed(p["body_jaxpr"].jaxpr, last - first, len(ins) - last)
        return _repeated(iteration, ins[last:], fixed, lambda _, old, new: new)[0]

    def _cond(self, step: RowStep, ins: list[Any]) -> list[Any]:
        branches = step.params["branches"]
        twins = step.twin.params["branches"] if step.twin else [None] * len(branches)
        each = [self.inside(*both, ins[1:]) for both in zip(branches, twins, strict=True)]
        return [_chosen(outs, ins[0]) for outs in zip(*each, strict=True)]

    # --- Derivatives that a user wrote ------------------------------------------------------------

    def _check_derivative(self, step: RowStep, ins: list[Any], outs: list[Any]) -> None:
        """Raises if the pullback of a function with its own derivative couples rows."""
        # Of what all rows share, too, a rule may not be linear in the sum over rows that it gets.
        is_checked = name_of(step.equation) == "custom_vjp_call"
        is_checked = is_checked or any(isinstance(v, Rows) for v in outs)
        if self._is_in_pullback or not is_checked:
            return
        if any(isinstance(v, Weight) or (isinstance(v, Rows) and v.is_linear) for v in ins):
            raise RowsMeet("a derivative that its author wrote may read a sum over rows")
        key = id(step.equation)
        if key not in self._traced:
            twin = step.twin and pullback_of(step.twin)
            self._traced[key] = step.equation, pullback_of(step), twin
        (_, pullback, twin), types = self._traced[key], step.result_types
        if pullback is None:
            return
        self._is_in_pullback = True  # a loss with derivatives of derivatives has them in its trace
        try:
            cotangents = [_cotangent(outs[k], types[k]) for k in inexact_of(types)]
            found = self.inside(pullback, twin, [*ins, *cotangents])
        finally:
            self._is_in_pullback = False
        _check_cotangents(step, ins, found)


def _of_plain(step: RowStep) -> RowStep:
    """The product that a quantized one takes the place of."""
    plain, twin = step.params["plain"], step.twin and _of_plain(step.twin)
    own = {"name": plain.primitive.name, "params": plain.params, "twin": twin}
    return dataclasses.replace(step, **own, operands=step.operands[:2], types=step.types[:2])


def _check_doubled(step: RowStep, k: int, v: Any) -> None:
    """Raises if the dims of rows do not grow as the number of rows does."""
    if step.twin is None or not isinstance(v, Rows) or v.summed:
        return
    sizes = [[s.result_shape(k)[d] for d in v.dims] for s in (step, step.twin)]
    if step.growth * math.prod(sizes[0]) != math.prod(sizes[1]):
        raise RowsMeet(OTHER_PROGRAM)


def located(v: Any, steps: Sequence[RowStep], number: int) -> Any:
    """A result of a step, with the user's line where it is coupled."""
    if not isinstance(v, Coupled) or v.line:
        return v
    line = last_line(step.equation for step in steps[: number + 1])
    return Coupled(v.reason, v.equation or steps[number].name, line)


def last_line(equations: Iterable[Any]) -> str:
    """The user's line of the last equation that has one; what JAX traced earlier has none."""
    lines = (line_of(eqn.source_info) for eqn in reversed(list(equations)))
    return next(filter(None, lines), "")


# --- What iterations make of each other -----------------------------------------------------------


def _fixed(body: Any, first: int, count: int) -> list[bool]:
    """Which of the values that a loop carries are the same in all iterations."""
    carried = body.invars[first : first + count]
    return [out is given for out, given in zip(body.outvars, carried, strict=False)]


def _repeated(
    iteration: Any, carry: list[Any], fixed: list[bool], next_carried: Any
) -> tuple[list[Any], list[Any]]:
    """What every iteration reads of what is carried, and what it returns then."""
    for _ in range(_MOST_PASSES):
        outs = iteration(carry)
        each = enumerate(zip(carry, outs, fixed, strict=False))
        new = [a if keep else next_carried(k, a, b) for k, (a, b, keep) in each]
        if new == carry:
            return carry, outs
        carry = new
    raise RowsMeet("what a loop makes of rows is not known")


def _chosen(values: Sequence[Any], by: Any = _ALWAYS) -> Any:
    """What is one of some values, as ``by`` decides: of results of branches, of iterations."""
    for v in (by, *values):
        if isinstance(v, Coupled):
            return v
    try:
        return combined([by, *values], Kind.LINEAR, chosen_by=[0])
    except RowsMeet as meet:
        return Coupled(str(meet))


def _last_of_n(v: Any) -> Any:
    """What is carried, after an iteration for each row."""
    reason = "a loop that runs for each row returns what its last iteration gave"
    return v if isinstance(v, Coupled) else Coupled(reason)


def _stacked(v: Any) -> Any:
    """What all iterations return, one after the other."""
    if isinstance(v, Running):
        return Coupled(SO_FAR)
    out = moved(v, _ALL)
    return Shared(out.varies | {0}, out.power, out.random) if isinstance(out, Shared) else out


def _next_carried(a: Any, b: Any, running: Running) -> Any:
    """What the iterations of a loop over rows read, given what they read last and returned."""
    if isinstance(a, Coupled) or isinstance(b, Coupled):
        return a if isinstance(a, Coupled) else b
    if a == running and isinstance(b, Running) and b.of is running.of:
        return running
    if isinstance(a, Shared) and isinstance(b, Rows) and 0 in b.dims:
        return running
    if isinstance(a, Shared) and isinstance(b, Shared):  # a count, or keys that are split
        either = combined([a, b], Kind.LINEAR)
        return Shared(either.varies | {0}, either.power, either.random)
    return Coupled("a loop over rows carries a row to the next one")


def _after_rows(before: Any, out: Any, shape: Sequence[int]) -> Any:
    """What a loop over rows returns of what it carried, which its iterations changed."""
    if not isinstance(out, Running):
        return _last_of_n(out)
    if not isinstance(out.term, Rows) or 0 not in out.term.dims:
        return Coupled(SO_FAR)
    return added(before, moved(sum_over(out.term, {0}, shape), _ONE))


# --- Derivatives that a user wrote ----------------------------------------------------------------

# A cotangent of a result has rows where the result has; one of an operand must, too, or be a sum
# over rows where all rows share the operand. Their power says whether the rule is linear in them:
# it is ``_LOSS`` less that of the value, and no function that is not linear keeps it.
_LOSS = 1000  # the power of a loss that no value has by itself


def inexact_of(avals: Sequence[Any]) -> list[int]:
    return [k for k, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.inexact)]


def pullback_of(step: RowStep) -> Any:
    """The traced pullback, of operands and cotangents of results; None if it has no derivative."""
    eqn, inexact, results = step.equation, inexact_of(step.types), inexact_of(step.result_types)
    if not (inexact and results):
        return None

    def pull(operands: list[Any], cotangents: list[Any]) -> Any:
        def fn(*values: Any) -> list[Any]:
            given = dict(enumerate(operands)) | dict(zip(inexact, values, strict=True))
            outs = traced_graph.bind(eqn, list(given.values()))
            return [outs[k] for k in results]

        return jax.vjp(fn, *[operands[k] for k in inexact])[1](cotangents)

    def types(avals: Sequence[Any]) -> list[Any]:
        return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]

    given = types(step.types), types([step.result_types[k] for k in results])
    try:
        return jax.make_jaxpr(pull)(*given)
    except Exception as error:  # of the user's rule, whatever it raises
        raise RowsMeet(f"its own derivative cannot be traced: {error}") from error


def _cotangent(v: Any, aval: Any) -> Any:
    """The state of the cotangent of a result."""
    if isinstance(v, Rows) and v.dims:
        return _of_rows(v)
    if isinstance(v, Rows | Shared):
        return dataclasses.replace(unknown(aval), power=_LOSS - (v.power or 0))
    return Coupled(CLIPPED)


def _of_rows(v: Rows) -> Rows:
    return Rows(v.dims, v.count, v.before, v.after, power=_LOSS - v.power - 1)


def _check_cotangents(step: RowStep, ins: list[Any], found: list[Any]) -> None:
    """Raises if the cotangents ``found`` of operands ``ins`` do not keep rows apart as these do."""
    for k, state in zip(inexact_of(step.types), found, strict=True):
        if isinstance(state, Coupled):
            where = f" ({state.line})" if state.line else ""
            raise RowsMeet(f"in its own derivative, {state.equation}: {state.reason}{where}")
        is_fixed = isinstance(step.operands[k], Literal) or isinstance(ins[k], Coupled)
        if not is_fixed and not _is_cotangent(state, ins[k]):
            raise RowsMeet("its own derivative does not keep rows apart")


def _is_cotangent(found: Any, of: Any) -> bool:
    if isinstance(found, Shared) and found.is_zero:
        return True
    if not isinstance(found, Shared | Rows) or not isinstance(of, Shared | Rows):
        return False
    if isinstance(found, Rows) and found.random > of.random:
        return False
    if isinstance(of, Rows) and of.dims:
        return found == dataclasses.replace(_of_rows(of), random=found.random)
    # The sum over rows may be taken after the function.
    later = isinstance(found, Rows) and bool(found.dims)
    return found.power == _LOSS - (of.power or 0) - later
