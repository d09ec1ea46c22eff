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
    INDEX,
    NUMBER,
    Coupled,
    Rows,
    RowsMeet,
    Shared,
    State,
    Value,
    Weight,
    common_power,
    join,
    meets_shared,
)

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Step:
    """An equation, beside the same one of a trace with twice the rows if there is one."""

    name: str
    params: dict[str, Any]
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    types: tuple[Any, ...]  # of operands
    result_types: tuple[Any, ...]
    equation: Any
    twin: "Step | None" = None

    def shape(self, operand: int) -> Shape:
        return tuple(getattr(self.types[operand], "shape", ()))

    @property
    def result_shape(self) -> Shape:
        return tuple(self.result_types[0].shape)

    def grown(self, operand: int) -> set[int]:
        """The dims of an operand that have another size with twice the rows."""
        if self.twin is None:
            return set()
        sizes = zip(self.shape(operand), self.twin.shape(operand), strict=True)
        return {d for d, (a, b) in enumerate(sizes) if a != b}


NOT_LINEAR = "a function of a sum over rows, or of a ratio of such sums, is not linear"
Rule = Callable[[Step, list[Any]], State]

# --- Elementwise ----------------------------------------------------------------------------------

# What is linear, and keeps each element: of an operand, of operands that are added.
_SAME = "convert_element_type copy copy_p neg real imag reduce_precision stop_gradient name reshard"
SAME = frozenset(f"{_SAME} sharding_constraint optimization_barrier device_put pvary".split())
ADDED = frozenset(("add", "sub", "add_any"))
# What a sum over rows that only divides may pass.
CLIPS = frozenset("add sub max min clamp eq ne lt le gt ge and or not select_n".split()) | SAME
COMPARED = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
_MORE = "erf erfc erf_inv lgamma digamma is_finite conj complex square exp2 add_any asinh name"
ELEMENTWISE = traced_graph.ELEMENTWISE | SAME | ADDED | frozenset(_MORE.split())


def elementwise(step: Step, ins: list[Any]) -> State:
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
        return _combined(step, ins) if is_linear else _clipped(step, ins)
    same_rows(ins)
    if any(v.is_linear for v in rows) and not _is_linear(step, ins):
        raise RowsMeet(NOT_LINEAR)
    return _combined(step, ins)


def _combined(step: Step, ins: list[Any]) -> State:
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


def _is_linear(step: Step, ins: list[Any]) -> bool:
    """Whether an elementwise equation is linear in its sums over rows, and in ratios of such."""
    rows = [v for v in ins if isinstance(v, Rows)]
    linear = [isinstance(v, Rows) and v.is_linear for v in ins]
    if step.name in SAME:
        inexact = [jnp.issubdtype(t.dtype, jnp.inexact) for t in (*step.types, *step.result_types)]
        return inexact != [True, False] and step.result_types[0].dtype != bool
    if step.name in ADDED:
        # What all rows share may be added to a sum over all rows, not to that of a group.
        in_groups = any(v.summed and v.dims for v in rows)
        return not in_groups or all(isinstance(v, Rows) or v.is_zero for v in ins)
    if step.name == "mul":
        return sum(linear) == 1
    if step.name == "div":
        return linear[0] and not linear[1]
    return step.name == "select_n" and not linear[0]


def power_of(step: Step, ins: Sequence[Any]) -> int | None:
    """The power of a function of elements; None where it is no power."""
    powers = [v.power for v in ins]
    if None in powers or (step.twin and step.twin.params != step.params):
        return None
    if step.name == "mul":
        return sum(powers)
    if step.name == "div":
        return powers[0] - powers[1]  # type: ignore[no-any-return]
    if step.name in ("integer_pow", "square"):
        return int(step.params.get("y", 2)) * powers[0]
    if step.name == "select_n":
        return common_power(list(ins[1:])) if powers[0] == 0 else None
    if step.name in COMPARED:
        return None if common_power(list(ins)) is None else 0
    if step.name in SAME | ADDED | {"max", "min", "abs", "clamp"}:
        return common_power(list(ins))
    return None if any(powers) else 0


def merged_dims(old: Shape, new: Shape, dims: Any) -> frozenset[int]:
    """The dims of a reshaped array that hold ``dims``, each beside those it is merged with."""
    found: set[int] = set()
    i = j = 0
    while i < len(old) or j < len(new):
        first, start, size, new_size = i, j, 1, 1
        while True:  # until a group of old dims has the size of one of new dims
            if i < len(old) and (size <= new_size or j == len(new)):
                size, i = size * old[i], i + 1
            elif j < len(new):
                new_size, j = new_size * new[j], j + 1
            if size == new_size or (i, j) == (len(old), len(new)):
                break
        if dims & set(range(first, i)):
            found |= set(range(start, j))
    return frozenset(found)


# --- Sums over rows -------------------------------------------------------------------------------


def _divided(step: Step, ins: list[Any]) -> State:
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


def _ratio(step: Step, k: int, ins: list[Any], sums: frozenset[Value], power: int) -> Rows:
    """Operand ``k``, which is rows, or a sum over them, over ``sums``."""
    over, by, sizes = ins[k], ins[1 - k], step.shape(1 - k)
    if any(d < 0 or (sizes and sizes[d] != 1 and d not in by.spread) for d in over.dims):
        raise RowsMeet("a sum over rows meets rows along one of its dims")
    if over.ratios or over.own is not None:
        raise RowsMeet("a ratio of sums over rows is divided again")
    pairs = frozenset((step.operands[k] if over.is_sum else None, weight) for weight in sums)
    return dataclasses.replace(over, ratios=pairs, power=over.power + power)


def _with_weight(step: Step, ins: list[Any]) -> State:
    """A function of a weight: another weight, or rows times its inverse."""
    weights = [v for v in ins if isinstance(v, Weight)]
    others = [v for v in ins if not isinstance(v, Weight)]
    sums = frozenset[Any]().union(*(v.sums for v in weights))
    if step.name == "mul" and weights[0].inverse and len(others) == 1:
        if isinstance(others[0], Rows):
            return _ratio(step, 0 if others[0] is ins[0] else 1, ins, sums, weights[0].power)
    if step.name == "select_n" and len(weights) == 1 and weights[0] is ins[0]:
        # A ratio, where its weight is not zero.
        ratios = [v for v in others if isinstance(v, Rows) and v.ratios]
        read = {weight for v in ratios for _, weight in v.ratios}
        if ratios and sums <= read and all(v in ratios or v.is_zero for v in others):
            return ratios[0] if len(ratios) == 1 else _combined(step, [Shared(), *ins[1:]])
    plain = [v for v in others if not isinstance(v, Shared) and not (is_sum(v) and not v.ratios)]
    if step.name not in CLIPS or plain or any(v.inverse for v in weights):
        raise RowsMeet(weights[0].cause.reason)
    return _clipped(step, ins)


def _clipped(step: Step, ins: list[Any]) -> State:
    """A function of sums over rows that is not linear: of use where it divides."""
    if step.name not in CLIPS or any(isinstance(v, Rows) and (v.ratios or v.random) for v in ins):
        raise RowsMeet(NOT_LINEAR)
    sums = frozenset[Any]()
    for operand, v in zip(step.operands, ins, strict=True):
        sums |= v.sums if isinstance(v, Weight) else {operand} if isinstance(v, Rows) else set()
    power = max(v.power for v in ins if not isinstance(v, Shared))
    reason = "a sum over rows is clipped, or added to what all rows share"
    return Weight(sums, power, Coupled(reason, step.name))


def _added_to_running(step: Step, ins: list[Any]) -> State:
    """A sum over the iterations of a loop over rows, of which some have run."""
    running = next(v for v in ins if isinstance(v, Rows) and v.running is not None)
    others = [v for v in ins if v is not running and not (isinstance(v, Shared) and v.is_zero)]
    if step.name in ADDED and running in ins[:1] + ins[1:] * (step.name != "sub"):
        if all(isinstance(v, Rows) and adds_to(running, v) for v in others):
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
        return dataclasses.replace(rows, dims=(), count=1, before=1, after=1, power=power, summed=True)
    count = math.prod(sizes[d] if d >= 0 else 1 for d in left)
    return dataclasses.replace(rows, dims=left, count=count, before=1, after=1, summed=True)


# --- Dims that move -------------------------------------------------------------------------------


def moved(rows: Rows, to: Any) -> Rows:
    """Rows whose dims are renumbered by a function."""
    return dataclasses.replace(rows, dims=tuple(d if d < 0 else to(d) for d in rows.dims))


def broadcast(step: Step, ins: list[Any]) -> State:
    rows = spread(step, ins[0]) if ins[0].is_sum else ins[0]
    return moved(rows, step.params["broadcast_dimensions"].__getitem__)


def spread(step: Step, given: Any) -> Any:
    """A sum over rows, or a weight, as it is broadcast: along which dims it is uniform."""
    if step.name != "broadcast_in_dim":
        return dataclasses.replace(given, spread=frozenset())
    to, sizes = step.params["broadcast_dimensions"], step.shape(0)
    varies = {to[d] for d in range(len(sizes)) if sizes[d] != 1 and d not in given.spread}
    return dataclasses.replace(given, spread=frozenset(range(len(step.result_shape))) - varies)


def transpose(step: Step, ins: list[Any]) -> State:
    return moved(ins[0], list(step.params["permutation"]).index)


def squeeze(step: Step, ins: list[Any]) -> State:
    gone = [d % len(step.shape(0)) for d in step.params["dimensions"]]
    return moved(ins[0], lambda d: d - sum(x < d for x in gone))


def reshape(step: Step, ins: list[Any]) -> State:
    """Dims are merged and split around the flat index that rows fill."""
    rows, old, new = ins[0], step.shape(0), step.result_shape
    dims = [d for d in rows.dims if d >= 0]
    if not dims:
        return rows  # type: ignore[no-any-return]
    in_loop = len(dims) < len(rows.dims)
    if dims != list(range(dims[0], dims[-1] + 1)) or (in_loop and dims[0]):
        raise RowsMeet("a reshape that mixes rows")
    before = math.prod(old[: dims[0]]) * rows.before
    after = math.prod(old[dims[-1] + 1 :]) * rows.after
    first, last = 0, len(new)
    # Dims that count within what is before all rows, or after one.
    while not in_loop and first < last and before % new[first] == 0:
        before //= new[first]
        first += 1
    while last > first and after % new[last - 1] == 0:
        after //= new[last - 1]
        last -= 1
    kept = tuple(d for d in rows.dims if d < 0) + tuple(range(first, last))
    return dataclasses.replace(rows, dims=kept, before=before, after=after)


def concatenate(step: Step, ins: list[Any]) -> State:
    rows, dim = [v for v in ins if isinstance(v, Rows)], step.params["dimension"]
    if dim in rows[0].dims:  # views of all rows, one after the other
        kinds = {(v.dims, v.count, v.after) if isinstance(v, Rows) else v for v in ins}
        if len(kinds) > 1 or len(rows[0].dims) > 1:
            raise RowsMeet("rows are one after the other")
        return dataclasses.replace(_combined(step, ins), before=sum(v.before for v in rows))  # type: ignore[type-var]
    own = None
    for k, v in enumerate(ins):
        if isinstance(v, Shared) and (v.counts,) == rows[0].dims and (rows[0].before, rows[0].after) == (1, 1):
            own = sum(step.shape(i)[dim] for i in range(k))
            ins = [*ins[:k], Shared(), *ins[k + 1 :]]
    out = _structural(step, ins)
    return dataclasses.replace(out, own=own) if own is not None else out


def slice_(step: Step, ins: list[Any]) -> State:
    """All rows, or all rows of some of their views."""
    rows, sizes, p = ins[0], step.shape(0), step.params
    strides = p["strides"] or (1,) * len(sizes)
    for d in (d for d in rows.dims if d >= 0):
        start, limit, view = p["start_indices"][d], p["limit_indices"][d], rows.count * rows.after
        if strides[d] == 1 and (start, limit) == (0, sizes[d]):
            continue
        if strides[d] != 1 or len(rows.dims) > 1 or start % view or limit % view:
            raise RowsMeet("some rows are taken by their index")
        rows = dataclasses.replace(rows, before=(limit - start) // view)
    return rows


def same_rows(ins: list[Any]) -> None:
    if len({(v.place, v.summed) for v in ins if isinstance(v, Rows)}) > 1:
        raise RowsMeet("rows meet rows that are along other dims, or a sum over rows")


def _structural(step: Step, ins: list[Any]) -> Any:
    """Elements are placed or added along other dims than those of rows."""
    same_rows(ins)
    return _combined(_as(step, "add"), ins)


def _as(step: Step, name: str) -> Step:
    twin = step.twin and _as(step.twin, name)
    return dataclasses.replace(step, name=name, params={}, twin=twin)


def along(dims_of: Callable[[dict[str, Any], int], Any], what: str, is_linear: bool = False) -> Rule:
    """The rule of what works along some dims, by itself for each index of the others."""

    def rule(step: Step, ins: list[Any]) -> State:
        rows = [v for v in ins if isinstance(v, Rows)]
        dims = {d % max(len(step.shape(0)), 1) for d in dims_of(step.params, len(step.shape(0)))}
        if any(dims & set(v.dims) for v in rows):
            raise RowsMeet(what)
        if any(v.is_linear for v in rows) and not is_linear:
            raise RowsMeet(NOT_LINEAR)
        if not is_linear and any(v.power for v in ins):
            raise RowsMeet(NUMBER)
        return _structural(step, ins)  # type: ignore[no-any-return]

    return rule


def reduce_sum(step: Step, ins: list[Any]) -> State:
    rows, axes = ins[0], set(step.params["axes"])
    return _without(sum_over(rows, axes, step.shape(0)) if axes & set(rows.dims) else rows, axes)


def _without(rows: Rows, gone: Any) -> Rows:
    return moved(rows, lambda d: d - sum(x < d for x in gone))


def reduce_other(step: Step, ins: list[Any]) -> State:
    axes = step.params.get("axes", step.params.get("dimensions"))
    out: Any = along(lambda p, n: axes, "rows are reduced, and not added")(step, ins)
    return _without(out, axes)


def dynamic_slice(step: Step, ins: list[Any]) -> State:
    operand, *starts = ins
    dims = operand.dims if isinstance(operand, Rows) else ()
    if any(d >= 0 and step.params["slice_sizes"][d] != step.shape(0)[d] for d in dims):
        raise RowsMeet("some rows are taken by their index")
    return _by_index(step, operand, starts)


def _by_index(step: Step, operand: State, starts: list[Any]) -> State:
    """What is read at scalar indices, which may be those of the row of a loop."""
    if any(isinstance(v, Rows) and (v.is_linear or v.power) for v in starts):
        raise RowsMeet("an index is computed from a sum over rows")
    rows = [v for v in (operand, *starts) if isinstance(v, Rows)]
    out = rows[0]
    if any(v.dims != out.dims for v in rows):
        raise RowsMeet("rows are taken by an index")
    for v in starts:
        out = meets_shared(out, v) if isinstance(v, Shared) else out
    if isinstance(operand, Shared):
        out = meets_shared(out, operand)
        return dataclasses.replace(out, power=operand.power or 0)
    return dataclasses.replace(out, power=operand.power)  # type: ignore[union-attr]


def dynamic_update_slice(step: Step, ins: list[Any]) -> State:
    operand, update, *starts = ins
    out = _structural(dataclasses.replace(step, types=step.types[:2]), [operand, update]) \
        if isinstance(operand, Rows) or isinstance(update, Rows) else operand
    dims = out.dims if isinstance(out, Rows) else ()
    if any(d >= 0 and step.shape(1)[d] != step.shape(0)[d] for d in dims):
        raise RowsMeet("some rows are written by their index")
    return _by_index(step, out, starts)
