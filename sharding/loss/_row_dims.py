"""Rules of equations that move, merge, split or reduce dims: what they do with rows along these."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from sharding.loss._row_rules import NOT_LINEAR, RowStep, Rule, Shape, combined, same_rows, sum_over
from sharding.loss._row_states import NUMBER, Rows, RowsMeet, Shared, State, meets_shared

TAKEN = "some rows are taken by their index"


def moved(rows: Rows, to: Any) -> Rows:
    """Rows whose dims are renumbered by a function."""
    return dataclasses.replace(rows, dims=tuple(d if d < 0 else to(d) for d in rows.dims))


def broadcast(step: RowStep, ins: list[Any]) -> State:
    rows = spread(step, ins[0]) if ins[0].is_sum else ins[0]
    return moved(rows, step.params["broadcast_dimensions"].__getitem__)


def spread(step: RowStep, given: Any) -> Any:
    """A sum over rows, or a weight, as it is broadcast: along which dims it is uniform."""
    if step.name != "broadcast_in_dim":
        return dataclasses.replace(given, spread=frozenset())
    to, sizes = step.params["broadcast_dimensions"], step.shape(0)
    varies = {to[d] for d in range(len(sizes)) if sizes[d] != 1 and d not in given.spread}
    return dataclasses.replace(given, spread=frozenset(range(len(step.result_shape))) - varies)


def transpose(step: RowStep, ins: list[Any]) -> State:
    return moved(ins[0], list(step.params["permutation"]).index)


def squeeze(step: RowStep, ins: list[Any]) -> State:
    gone = [d % len(step.shape(0)) for d in step.params["dimensions"]]
    return moved(ins[0], lambda d: d - sum(x < d for x in gone))


def reshape(step: RowStep, ins: list[Any]) -> State:
    """Dims are merged and split around the flat index that rows fill."""
    rows, old, new = ins[0], step.shape(0), step.result_shape
    dims = [d for d in rows.dims if d >= 0]
    if not dims:
        return rows
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


def concatenate(step: RowStep, ins: list[Any]) -> State:
    rows, dim = [v for v in ins if isinstance(v, Rows)], step.params["dimension"]
    if dim in rows[0].dims:  # views of all rows, one after the other
        kinds = {(v.dims, v.count, v.after) if isinstance(v, Rows) else v for v in ins}
        if len(kinds) > 1 or len(rows[0].dims) > 1 or any(v.is_linear for v in rows):
            raise RowsMeet("rows are one after the other")
        before = sum(v.before for v in rows)
        return dataclasses.replace(combined(step, ins), before=before)
    out = rows[0]
    counts = [k for k, v in enumerate(ins) if isinstance(v, Shared) and v.counts is not None]
    if len(counts) == 1 and dim == len(step.result_shape) - 1 and step.shape(counts[0])[dim] == 1:
        # Indices of entries, of which one column is the index of the row itself.
        (k,) = counts
        if (ins[k].counts,) == out.dims and (out.before, out.after) == (1, 1):
            own = sum(step.shape(i)[dim] for i in range(k))
            given = [*ins[:k], Shared(), *ins[k + 1 :]]
            return dataclasses.replace(structural(step, given), own=own)
    return structural(step, ins)


def stack(step: RowStep, ins: list[Any]) -> State:
    axis = step.params["axis"]
    return moved(structural(step, ins), lambda d: d + (d >= axis))


def unstack(step: RowStep, ins: list[Any]) -> State:
    out: Any = along(lambda p, _: [p["axis"]], TAKEN, is_linear=True)(step, ins)
    return dims_without(out, [step.params["axis"]])


def tile(step: RowStep, ins: list[Any]) -> State:
    """Rows may be repeated as views of all of them."""
    rows, reps = ins[0], step.params["reps"]
    times = math.prod(reps[d] for d in rows.dims if d >= 0)
    if len(reps) != len(step.shape(0)) or (times > 1 and (len(rows.dims) > 1 or rows.is_linear)):
        raise RowsMeet("rows are repeated")
    return dataclasses.replace(rows, before=rows.before * times)


def slice_(step: RowStep, ins: list[Any]) -> State:
    """All rows, or all rows of some of their views."""
    rows, sizes = ins[0], step.shape(0)
    for d in range(len(sizes)):
        start, limit, stride = _taken(step, d)
        view = rows.count * rows.after
        if d not in rows.dims:
            if step.twin and _taken(step.twin, d) != (start, limit, stride):
                raise RowsMeet(NUMBER)
        elif (start, limit, stride) != (0, sizes[d], 1):
            if stride != 1 or len(rows.dims) > 1 or start % view or limit % view:
                raise RowsMeet(TAKEN)
            rows = dataclasses.replace(rows, before=(limit - start) // view)
    return rows


def split(step: RowStep, ins: list[Any]) -> State:
    """Views of all rows, or parts of each row."""
    rows, axis, sizes = ins[0], step.params["axis"], set(step.params["sizes"])
    if axis not in rows.dims:
        return rows
    view = rows.count * rows.after
    if rows.dims != (axis,) or len(sizes) > 1 or min(sizes) % view:
        raise RowsMeet(TAKEN)
    return dataclasses.replace(rows, before=min(sizes) // view)


def _taken(step: RowStep, d: int) -> tuple[int, int, int]:
    p = step.params
    return p["start_indices"][d], p["limit_indices"][d], p["strides"][d] if p["strides"] else 1


def structural(step: RowStep, ins: list[Any]) -> Any:
    """Elements are placed or added along other dims than those of rows."""
    same_rows(ins)
    return combined(_renamed(step, "add"), ins)


def _renamed(step: RowStep, name: str) -> RowStep:
    twin = step.twin and _renamed(step.twin, name)
    return dataclasses.replace(step, name=name, params={}, twin=twin)


def along(
    dims_of: Callable[[dict[str, Any], int], Any], what: str, is_linear: bool = False
) -> Rule:
    """The rule of what works along some dims, by itself for each index of the others."""

    def rule(step: RowStep, ins: list[Any]) -> State:
        rows = [v for v in ins if isinstance(v, Rows)]
        dims = {d % max(len(step.shape(0)), 1) for d in dims_of(step.params, len(step.shape(0)))}
        if any(dims & set(v.dims) for v in rows):
            raise RowsMeet(what)
        if any(v.is_linear for v in rows) and not is_linear:
            raise RowsMeet(NOT_LINEAR)
        if not is_linear and any(v.power for v in ins):
            raise RowsMeet(NUMBER)
        return structural(step, ins)

    return rule


def reduce_sum(step: RowStep, ins: list[Any]) -> State:
    rows, axes = ins[0], set(step.params["axes"])
    return dims_without(
        sum_over(rows, axes, step.shape(0)) if axes & set(rows.dims) else rows, axes
    )


def dims_without(rows: Rows, gone: Any) -> Rows:
    return moved(rows, lambda d: d - sum(x < d for x in gone))


def reduce_other(step: RowStep, ins: list[Any]) -> State:
    axes = step.params.get("axes", step.params.get("dimensions"))
    out: Any = along(lambda p, n: axes, "rows are reduced, and not added")(step, ins)
    return dims_without(out, axes)


def dynamic_slice(step: RowStep, ins: list[Any]) -> State:
    operand, *starts = ins
    dims = operand.dims if isinstance(operand, Rows) else ()
    if any(d >= 0 and step.params["slice_sizes"][d] != step.shape(0)[d] for d in dims):
        raise RowsMeet(TAKEN)
    return _by_index(step, operand, starts)


def _by_index(step: RowStep, operand: State, starts: list[Any]) -> State:
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


def dynamic_update_slice(step: RowStep, ins: list[Any]) -> State:
    operand, update, *starts = ins
    out = (
        structural(dataclasses.replace(step, types=step.types[:2]), [operand, update])
        if isinstance(operand, Rows) or isinstance(update, Rows)
        else operand
    )
    dims = out.dims if isinstance(out, Rows) else ()
    if any(d >= 0 and step.shape(1)[d] != step.shape(0)[d] for d in dims):
        raise RowsMeet("some rows are written by their index")
    return _by_index(step, out, starts)


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
