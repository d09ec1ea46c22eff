"""Rules of products, windows and lookups: what an equation does with the rows of its operands."""

import dataclasses
from typing import Any

from sharding.loss._row_dims import moved
from sharding.loss._row_rules import NOT_LINEAR, RowStep, same_rows, sum_over
from sharding.loss._row_states import NUMBER, Rows, RowsMeet, Shared, State, meets_shared


def _having_rows(*states: Any) -> list[Rows]:
    return [v for v in states if isinstance(v, Rows)]


def _product(out: Rows, a: Any, b: Any) -> Rows:
    """``out`` with what is said of a product of both: its power, its ratios."""
    if None in (a.power, b.power):
        raise RowsMeet(NUMBER)
    rows = _having_rows(a, b)
    if sum(v.is_linear for v in rows) > 1:
        raise RowsMeet("a sum over rows, or a ratio of such, is multiplied with another")
    ratios = frozenset[Any]().union(*(v.ratios for v in rows))
    is_random = out.random or any(v.random for v in rows)
    return dataclasses.replace(out, power=a.power + b.power, random=is_random, ratios=ratios)


# --- Products -------------------------------------------------------------------------------------


def dot_general(step: RowStep, ins: list[Any]) -> State:
    """Rows stay apart along batch and free dims; contracted, they are summed."""
    contract, batch = step.params["dimension_numbers"]
    free = [
        [d for d in range(len(step.shape(k))) if d not in (*contract[k], *batch[k])] for k in (0, 1)
    ]
    order: list[Any] = [("batch", i) for i in range(len(batch[0]))]
    order += [(k, d) for k in (0, 1) for d in free[k]]

    def name(k: int, d: int) -> Any:
        """One name for what is one dim of the product, of either operand."""
        if d < 0:
            return "loop", d
        if d in contract[k]:
            return "contracted", list(contract[k]).index(d)
        return ("batch", list(batch[k]).index(d)) if d in batch[k] else (k, d)

    names = [[name(k, d) for d in v.dims] if isinstance(v, Rows) else [] for k, v in enumerate(ins)]
    k = 0 if names[0] or not isinstance(ins[1], Rows) else 1
    main, other = ins[k], ins[1 - k]
    for i, v in enumerate(ins):
        if isinstance(v, Rows) and step.grown(i) & set(contract[i]) - set(v.dims):
            raise RowsMeet(NUMBER)
    if isinstance(other, Rows):
        if names[0] != names[1] or any(n[0] in (0, 1) for n in names[0]):
            raise RowsMeet("each row meets the others in a product")
        if (main.before, main.after, main.summed) != (other.before, other.after, other.summed):
            raise RowsMeet("each row meets the others in a product")
    else:
        same = [
            (contract if n[0] == "contracted" else batch)[1 - k][n[1]]
            for n in names[k]
            if n[0] in ("contracted", "batch")
        ]
        main = meets_shared(main, other, [*same, *(d for d in main.dims if d < 0)])
    out = _product(main, *ins)
    summed = {d for d, n in zip(main.dims, names[k], strict=True) if n[0] == "contracted"}
    if summed:
        out = sum_over(out, summed, step.shape(k))
    return moved(out, lambda d: order.index(name(k, d)))


def convolution(step: RowStep, ins: list[Any]) -> State:
    """Rows are the batch of a convolution, or feature groups of it."""
    p, (lhs, rhs) = step.params, ins
    numbers, groups = p["dimension_numbers"], p["feature_group_count"]
    rows = _having_rows(lhs, rhs)
    batch, features = numbers.lhs_spec[:2]
    if p["batch_group_count"] != 1:
        raise RowsMeet("rows are groups of the batch of a convolution")
    if all(d < 0 for d in rows[0].dims):
        same_rows(ins)
        shared = [v for v in ins if isinstance(v, Shared)]
        out = meets_shared(rows[0], shared[0]) if shared else rows[0]
        return _product(out, lhs, rhs)
    if lhs in rows and lhs.dims == (batch,) and isinstance(rhs, Shared):
        return _product(moved(meets_shared(lhs, rhs, ()), lambda d: numbers.out_spec[0]), lhs, rhs)
    of_kernel = numbers.rhs_spec[0]
    if rhs in rows and rhs.dims == (of_kernel,) and isinstance(lhs, Shared) and groups == 1:
        return _product(moved(meets_shared(rhs, lhs, ()), lambda d: numbers.out_spec[1]), lhs, rhs)
    if len(rows) == 2 and groups % lhs.count == 0:
        # As vmap makes it of kernels that differ by row.
        places = [(v.dims, v.before, v.count) for v in rows]
        if places == [((features,), 1, lhs.count), ((of_kernel,), 1, lhs.count)]:
            return _product(moved(rhs, lambda d: numbers.out_spec[1]), lhs, rhs)
    raise RowsMeet("rows meet in a convolution")


def window(step: RowStep, ins: list[Any]) -> State:
    """A window that reaches over no rows."""
    p = step.params
    same_rows(ins)
    for v in _having_rows(*ins):
        if v.is_linear and step.name != "reduce_window_sum":
            raise RowsMeet(NOT_LINEAR)
        for d in (d for d in v.dims if d >= 0):
            given = (p["window_dimensions"][d], p["window_strides"][d], tuple(p["padding"][d]))
            if given != (1, 1, (0, 0)):
                raise RowsMeet("a window reaches over rows")
    out = _having_rows(*ins)[0]
    for v in ins:
        out = meets_shared(out, v) if isinstance(v, Shared) else out
    if any(v.power != out.power for v in ins if not (isinstance(v, Shared) and v.is_zero)):
        raise RowsMeet(NUMBER)
    return out


# --- Lookups --------------------------------------------------------------------------------------


def _check_index(index: Any) -> None:
    if isinstance(index, Rows) and (index.is_linear or index.power):
        raise RowsMeet("an index is computed from a sum over rows")
    if index.power is None:
        raise RowsMeet(NUMBER)


def gather_rows(step: RowStep, ins: list[Any]) -> State:
    """Rows of a table by the row's index; entries of a row by an index of all, or of its own."""
    (table, index), numbers, sizes = (
        ins,
        step.params["dimension_numbers"],
        step.params["slice_sizes"],
    )
    _check_index(index)
    of_index = [d for d in range(len(step.result_shape)) if d not in numbers.offset_dims]
    batched = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    gone = {*numbers.collapsed_slice_dims, *batched}
    kept = [d for d in range(len(step.shape(0))) if d not in gone]
    window = dict(zip(kept, numbers.offset_dims, strict=True))
    if isinstance(table, Shared):
        if step.grown(0):
            raise RowsMeet(NUMBER)
        if index.own is not None:
            raise RowsMeet("a shared table is read at the index of a row")
        loops = [d for d in index.dims if d < 0]
        of_table = [d for d, i in batched.items() if i in index.dims]
        out = meets_shared(index, table, [*loops, *of_table])
        out = dataclasses.replace(out, power=table.power or 0)
        return moved(out, of_index.__getitem__)
    if isinstance(index, Rows):
        own = index.own is not None and numbers.start_index_map[index.own]
        at = tuple(d if d < 0 else batched.get(d) for d in table.dims)
        if index.own is not None and table.dims == (own,) and sizes[own] == 1:
            at = index.dims if (table.before, table.after) == (1, 1) else ()
        if at != index.dims or table.place[1:] != index.place[1:]:
            raise RowsMeet("rows are taken by an index")
        is_random = table.random or index.random
        return moved(dataclasses.replace(table, dims=at, random=is_random), of_index.__getitem__)
    dims = [d for d in table.dims if d >= 0]
    if any(d in window and sizes[d] != step.shape(0)[d] for d in dims):
        raise RowsMeet("some rows are taken by an index")
    if any(d not in window and d not in batched for d in dims):
        raise RowsMeet("rows are taken by an index")
    loops = [d for d in table.dims if d < 0]
    out = meets_shared(table, index, [*loops, *(batched[d] for d in dims if d in batched)])
    return moved(out, lambda d: window[d] if d in window else of_index[batched[d]])


def scatter(step: RowStep, ins: list[Any]) -> State:
    """Entries of a row are written; or rows are added to a shared table, which is a sum."""
    (operand, index, update), numbers = ins, step.params["dimension_numbers"]
    _check_index(index)
    if any(v.random for v in _having_rows(*ins)) or (step.name == "scatter-mul" and update.power):
        raise RowsMeet("rows are scattered")
    batched = dict(
        zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    )
    kept = [
        d for d in range(len(step.shape(0))) if d not in {*numbers.inserted_window_dims, *batched}
    ]
    window = dict(zip(kept, numbers.update_window_dims, strict=True))
    of_index = [d for d in range(len(step.shape(2))) if d not in numbers.update_window_dims]
    # For each dim of the operand along which rows can be: the dims of them in index and update.
    full = [d for d in kept if step.shape(2)[window[d]] == step.shape(0)[d]]
    places: dict[int, Any] = {d: (None, window[d]) for d in full}
    places |= {d: (i, of_index[i]) for d, i in batched.items()}
    if isinstance(index, Rows) and index.own is not None and len(index.dims) == 1:
        i = index.dims[0]
        places = {numbers.scatter_dims_to_operand_dims[index.own]: (i, of_index[i])}
    for d, (i, u) in places.items():
        wanted = ((d,), None if i is None else (i,), (u,))
        if all(w == v.dims for w, v in zip(wanted, ins, strict=True) if isinstance(v, Rows)):
            return _written_within(wanted, ins)
    if any(v.dims == () or v.dims[0] < 0 for v in _having_rows(*ins)):
        raise RowsMeet("rows are scattered")
    if step.name in ("scatter-add", "scatter-sub") and isinstance(operand, Shared):
        return _added_to_table(of_index, ins)
    raise RowsMeet("rows are written by an index")


def _written_within(wanted: Any, ins: list[Any]) -> Rows:
    """Values written within rows, of which ``wanted`` are the dims in each operand."""
    rows = _having_rows(*ins)
    if len({(v.before, v.count, v.after, v.summed) for v in rows}) > 1:
        raise RowsMeet("rows meet rows that are along other dims, or a sum over rows")
    values = [v for v in (ins[0], ins[2]) if not (isinstance(v, Shared) and v.is_zero)]
    out = dataclasses.replace(rows[0], dims=wanted[0], own=None)
    for dims, v in zip(wanted, ins, strict=True):
        out = meets_shared(out, v, dims or ()) if isinstance(v, Shared) else out
    powers = {v.power for v in values}
    if len(powers) > 1 or any(v.is_linear for v in rows):
        raise RowsMeet(NUMBER if len(powers) > 1 else NOT_LINEAR)
    return dataclasses.replace(out, power=powers.pop() if powers else 0)


def _added_to_table(of_index: list[int], ins: list[Any]) -> Rows:
    """Rows added to the entries of a shared table: for each entry a sum over rows."""
    operand, index, update = ins
    rows = _having_rows(index, update)
    at = [moved(index, of_index.__getitem__)] if isinstance(index, Rows) else []
    at += [update] if isinstance(update, Rows) else []
    same_rows(at)
    out = at[0]
    if isinstance(update, Shared):
        out = dataclasses.replace(meets_shared(out, update), power=update.power or 0)
    else:
        out = update
    if isinstance(index, Shared):
        where = [of_index.index(d) for d in out.dims if d in of_index]
        out = meets_shared(out, index, where)
    if any(v.own is not None or v.is_linear for v in rows) or set(out.dims) - set(of_index):
        raise RowsMeet("rows are written by an index")
    out = sum_over(out, set(out.dims))
    if not operand.is_zero and operand.power != out.power:
        raise RowsMeet("a sum over rows is added to what all rows share")
    return out
