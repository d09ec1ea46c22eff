"""What an equation does with the rows of its operands: a rule for each primitive.

A rule takes the equation and the states of its operands, of which one at least holds rows, and
returns the state of its results. Where rows meet it raises ``RowsMeet``.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from optax_ext import traced_graph
from sharding.loss._row_states import (
    NUMBER,
    Coupled,
    Rows,
    RowsMeet,
    Shared,
    State,
    Value,
    Weight,
    common_power,
    meets_shared,
)

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class RowStep:
    """An equation, beside the same one of a trace with twice the rows if there is one."""

    name: str
    params: dict[str, Any]
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    types: tuple[Any, ...]  # of operands
    result_types: tuple[Any, ...]
    equation: Any
    twin: "RowStep | None" = None

    def shape(self, operand: int) -> Shape:
        return tuple(getattr(self.types[operand], "shape", ()))

    @property
    def result_shape(self) -> Shape:
        return tuple(self.result_types[0].shape)

    def grown(self, operand: int, times: int | None = None) -> set[int]:
        """The dims of an operand that have another size with twice the rows, or that many times."""
        if self.twin is None:
            return set()
        sizes = zip(self.shape(operand), self.twin.shape(operand), strict=True)
        return {d for d, (a, b) in enumerate(sizes) if a != b and times in (None, b / max(a, 1))}


NOT_LINEAR = "a function of a sum over rows, or of a ratio of such sums, is not linear"
Rule = Callable[[RowStep, list[Any]], State]

# --- Elementwise ----------------------------------------------------------------------------------

# What is linear, and keeps each element: of an operand, of operands that are added.
_SAME_NAMES = """
convert_element_type copy copy_p device_put imag name neg optimization_barrier pvary real
reduce_precision reshard sharding_constraint stop_gradient
"""
SAME = frozenset(_SAME_NAMES.split())
ADDED = frozenset(("add", "sub", "add_any"))
# What a sum over rows that only divides may pass.
COMPARED = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
CLIPS = {"add", "sub", "max", "min", "clamp", "and", "or", "not", "select_n"} | COMPARED | SAME
_MORE_NAMES = """
bessel_i0e bessel_i1e clz complex conj igamma igamma_grad_a igammac log2 mulhi one_minus_square
polygamma regularized_incomplete_beta zeros_like zeta
"""
ELEMENTWISE = traced_graph.ELEMENTWISE | SAME | ADDED | frozenset(_MORE_NAMES.split())


def elementwise(step: RowStep, ins: list[Any]) -> State:
    rows = [v for v in ins if isinstance(v, Rows)]
    if any(isinstance(v, Shared) and v.power is None for v in ins):
        raise RowsMeet(NUMBER)
    if any(v.running is not None for v in rows):
        return _added_to_running(step, ins)
    if step.name == "div" and (isinstance(ins[1], Weight) or (rows and is_sum(ins[1]))):
        return _divided(step, ins)
    if any(isinstance(v, Weight) for v in ins):
        return _with_weight(step, ins)
    if rows[0].is_sum and all(isinstance(v, Shared) or is_sum(v) for v in ins):
        is_linear = _is_linear(step, ins) and power_of(step, ins) is not None
        return combined(step, ins) if is_linear else _clipped(step, ins)
    same_rows(ins)
    if any(v.is_linear for v in rows) and not _is_linear(step, ins):
        raise RowsMeet(NOT_LINEAR)
    return combined(step, ins)


def same_rows(ins: list[Any]) -> None:
    if len({(v.place, v.summed) for v in ins if isinstance(v, Rows)}) > 1:
        raise RowsMeet("rows meet rows that are along other dims, or a sum over rows")


def combined(step: RowStep, ins: list[Any]) -> Any:
    """Rows of a function of each element."""
    rows = [v for v in ins if isinstance(v, Rows)]
    out = rows[0]
    for k, v in enumerate(ins):
        if isinstance(v, Shared):
            sizes = step.shape(k)
            along = [d for d in out.dims if d < 0 or (sizes and sizes[d] != 1)]
            out = meets_shared(out, v, along)
    power = power_of(step, ins)
    if power is None:
        raise RowsMeet(NUMBER)
    ratios = frozenset[Any]().union(*(v.ratios for v in rows))
    is_random = out.random or any(v.random for v in rows)
    return dataclasses.replace(out, power=power, random=is_random, ratios=ratios)


def is_sum(state: Any) -> bool:
    return isinstance(state, Rows) and state.is_sum


def _is_linear(step: RowStep, ins: list[Any]) -> bool:
    """Whether an elementwise equation is linear in its sums over rows, and in ratios of such."""
    rows = [v for v in ins if isinstance(v, Rows)]
    linear = [isinstance(v, Rows) and v.is_linear for v in ins]
    if step.name in SAME:
        return not _rounds(step)
    if step.name in ADDED:
        # What all rows share may be added to a sum over all rows, not to that of a group.
        in_groups = any(v.summed and v.dims for v in rows)
        return not in_groups or all(isinstance(v, Rows) or v.is_zero for v in ins)
    if step.name == "mul":
        return sum(linear) == 1
    if step.name == "div":
        return linear[0] and not linear[1]
    return step.name == "select_n" and not linear[0]


def _rounds(step: RowStep) -> bool:
    """Whether an equation of elements casts or divides to whole numbers."""
    dtype = step.result_types[0].dtype
    is_cast = step.name == "convert_element_type" and step.types[0].dtype != dtype
    if jnp.issubdtype(dtype, jnp.inexact) or not (is_cast or step.name == "div"):
        return False
    is_whole = jnp.issubdtype(step.types[0].dtype, jnp.integer)
    return step.name == "div" or not is_whole or jnp.issubdtype(dtype, jnp.bool_)


def power_of(step: RowStep, ins: Sequence[Any]) -> Any:
    """The power of a function of elements; None where it is no power."""
    powers = [v.power for v in ins]
    if None in powers or (step.twin and step.twin.params != step.params):
        return None
    if _rounds(step) or not any(powers):
        return None if any(powers) else 0
    if step.name == "mul":
        return sum(powers)
    if step.name == "div":
        return powers[0] - powers[1]
    if step.name in ("integer_pow", "square"):
        return int(step.params.get("y", 2)) * powers[0]
    if step.name == "select_n":
        return common_power(list(ins[1:])) if powers[0] == 0 else None
    if step.name in COMPARED:
        return None if common_power(list(ins)) is None else 0
    if step.name in SAME | ADDED | {"max", "min", "abs", "clamp"}:
        return common_power(list(ins))
    return None if any(powers) else 0


# --- Sums over rows -------------------------------------------------------------------------------


def _divided(step: RowStep, ins: list[Any]) -> State:
    """A value over a sum over rows."""
    over, by = ins
    sums = by.sums if isinstance(by, Weight) else frozenset([step.operands[1]])
    if (isinstance(by, Weight) and by.inverse) or (isinstance(by, Rows) and by.ratios):
        raise RowsMeet("what divides is itself a ratio of sums over rows")
    if isinstance(over, Shared) and over.power is not None and not over.random:
        cause = Coupled(NOT_LINEAR, step.name)
        return Weight(sums, over.power - by.power, cause, inverse=True)
    if not isinstance(over, Rows):
        raise RowsMeet(NOT_LINEAR)
    return _ratio(step, 0, ins, sums, -by.power)


def _ratio(step: RowStep, k: int, ins: list[Any], sums: frozenset[Value], power: int) -> Rows:
    """Operand ``k``, which is rows, or a sum over them, over ``sums``."""
    over, by, sizes = ins[k], ins[1 - k], step.shape(1 - k)
    if any(d < 0 or (sizes and sizes[d] != 1 and d not in by.spread) for d in over.dims):
        raise RowsMeet("a sum over rows meets rows along one of its dims")
    if over.ratios or over.own is not None:
        raise RowsMeet("a ratio of sums over rows is divided again")
    pairs = frozenset((step.operands[k] if over.is_sum else None, weight) for weight in sums)
    return dataclasses.replace(over, ratios=pairs, power=over.power + power)


def _with_weight(step: RowStep, ins: list[Any]) -> State:
    """A function of a weight: another weight, or rows times its inverse."""
    weights = [v for v in ins if isinstance(v, Weight)]
    others = [v for v in ins if not isinstance(v, Weight)]
    sums = frozenset[Any]().union(*(v.sums for v in weights))
    rows = [k for k, v in enumerate(ins) if isinstance(v, Rows)]
    if step.name == "mul" and weights[0].inverse and len(rows) == 1:
        return _ratio(step, rows[0], ins, sums, weights[0].power)
    if step.name == "select_n" and len(weights) == 1 and weights[0] is ins[0]:
        # A ratio, where its weight is not zero.
        ratios = [v for v in others if isinstance(v, Rows) and v.ratios]
        read = {weight for v in ratios for _, weight in v.ratios}
        if ratios and sums <= read and all(v in ratios or v.is_zero for v in others):
            return ratios[0] if len(ratios) == 1 else combined(step, [Shared(), *ins[1:]])
    plain = [v for v in others if not isinstance(v, Shared) and not (is_sum(v) and not v.ratios)]
    if step.name not in CLIPS or plain or any(v.inverse for v in weights):
        raise RowsMeet(weights[0].cause.reason)
    return _clipped(step, ins)


def _clipped(step: RowStep, ins: list[Any]) -> State:
    """A function of sums over rows that is not linear: of use where it divides."""
    if step.name not in CLIPS or any(isinstance(v, Rows) and (v.ratios or v.random) for v in ins):
        raise RowsMeet(NOT_LINEAR)
    sums = frozenset[Any]()
    for operand, v in zip(step.operands, ins, strict=True):
        sums |= v.sums if isinstance(v, Weight) else {operand} if isinstance(v, Rows) else set()
    power = max(v.power for v in ins if not isinstance(v, Shared))
    reason = "a sum over rows is clipped, or added to what all rows share"
    return Weight(sums, power, Coupled(reason, step.name))


def _added_to_running(step: RowStep, ins: list[Any]) -> State:
    """A sum over the iterations of a loop over rows, of which some have run."""
    running = next(v for v in ins if isinstance(v, Rows) and v.running is not None)
    others = [v for v in ins if v is not running and not (isinstance(v, Shared) and v.is_zero)]
    is_added = step.name in ADDED and (step.name != "sub" or running is ins[0])
    if is_added and all(isinstance(v, Rows) and adds_to(running, v) for v in others):
        is_random = running.random or any(v.random for v in others)
        ratios = running.ratios.union(*(v.ratios for v in others))
        return dataclasses.replace(running, random=is_random, ratios=ratios)
    if not others and step.name in SAME - {"neg"} and _is_linear(step, ins):
        return running
    raise RowsMeet("a loop over rows reads its sum over the rows so far")


def adds_to(running: Rows, row: Rows) -> bool:
    """Whether a value of the present row is a term of a running sum."""
    return running == dataclasses.replace(
        summed_in_loop(row, running.running), random=running.random, ratios=running.ratios
    )


def summed_in_loop(row: Rows, loop: Any) -> Rows:
    """The sum of a value over the iterations of a loop."""
    if row.running is not None or loop not in row.dims:
        return row
    return dataclasses.replace(sum_over(row, {loop}), running=loop)


def sum_over(rows: Rows, dims: set[int], sizes: Shape = ()) -> Rows:
    """Rows, summed over some of their dims; those that are left are numbered as before."""
    left = tuple(d for d in rows.dims if d not in dims)
    power = rows.power + (not left)
    if not left:
        return dataclasses.replace(
            rows, dims=(), count=1, before=1, after=1, power=power, summed=True
        )
    count = math.prod(sizes[d] if d >= 0 else 1 for d in left)
    return dataclasses.replace(rows, dims=left, count=count, before=1, after=1, summed=True)
