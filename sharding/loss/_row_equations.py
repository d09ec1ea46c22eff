"""What an equation without inner functions makes of the states of its operands.

Most follows from ``_row_dims``. The rest is here: sums over rows that divide, reshapes, views of
all rows one after the other, indices of rows, and dims that depend on the number of rows.
"""

import dataclasses
import itertools
import math
import operator
from typing import Any

import jax.numpy as jnp

from sharding.loss._row_dims import (
    ADDED,
    ELEMENTWISE,
    RANDOM,
    SAME,
    DimRule,
    RowStep,
    Shape,
    rule_of,
)
from sharding.loss._row_states import (
    CLIPPED,
    NUMBER,
    SO_FAR,
    Coupled,
    Kind,
    Rows,
    RowsMeet,
    Running,
    Shared,
    Value,
    Weight,
    added,
    combined,
    is_kept,
    is_total,
    moved,
    sum_over,
)


def states_of(step: RowStep, ins: list[Any]) -> list[Any]:
    """The states of the results of an equation without inner functions."""
    for v in ins:
        if isinstance(v, Coupled):
            return [v] * len(step.results)
    if any(hasattr(aval, "inner_aval") for aval in (*step.types, *step.result_types)):
        raise RowsMeet("what is written to a reference is not followed")
    if step.name in ("optimization_barrier", "device_put"):
        return ins
    return [_state_of(step, ins, k) for k in range(len(step.results))]


def _state_of(step: RowStep, ins: list[Any], k: int) -> Any:
    """The state of one result."""
    if step.name == "iota":
        dim = step.params["dimension"]
        counts = dim if step.result_shape(k)[dim] > 1 else None  # a single 0 may be repeated
        return Shared(frozenset([dim]) & _long_dims(step, k), counts=counts)
    if step.name == "select_n" and isinstance(ins[0], Shared) and ins[0].is_zero:
        return ins[1]
    if step.name == "lt" and all(isinstance(v, Shared) for v in ins):
        is_index = ins[0].counts is not None and ins[1].is_zero  # of which JAX asks the sign
        if is_index:
            return Shared(is_zero=True)
    if any(isinstance(v, Running) for v in ins):
        return _added_to_running(step, ins)
    if step.name == "reshape":
        return _reshaped(step, ins[0])
    if step.name == "concatenate":
        return _concatenated(step, ins, k)
    if step.name in ELEMENTWISE and any(map(is_total, ins)):
        return _of_sums(step, ins, k)
    return _by_dims(step, ins, k)


def _by_dims(step: RowStep, ins: list[Any], k: int) -> Any:
    """What follows from the dims of operands and the kind of the equation."""
    rule = _rule_of(step, ins)
    places = rule.places(step)
    if step.name == "div" and ins[1].power is not None:
        ins = [ins[0], dataclasses.replace(ins[1], power=-ins[1].power)]
    if rule.kind is Kind.MOVES and isinstance(ins[0], Weight):
        return moved(ins[0], places[0])
    if step.name in ("concatenate", "slice", "split", "tile"):
        ins = _views(step, places, ins, k)
    if step.name in ("gather", "scatter", "scatter-add", "scatter-sub"):
        ins = _own_entries(step, places, ins)
    read, places_read = ins, places
    of_key = str(step.types[0].dtype) if step.types and step.name in RANDOM else ""
    if of_key.startswith("key<") and of_key != "key<fry>" and isinstance(ins[0], Rows):
        raise RowsMeet("under vmap all rows draw from the key of the first one, unless by threefry")
    if step.name == "random_gamma":  # a key draws another number for each entry of other dims
        drawn = _long_dims(step, k) - set(range(len(step.types[0].shape)))
        read, places_read = [*ins, Shared(drawn, random=True)], [*places, places[-1]]
    chosen_by = [i for i in range(len(ins)) if i in rule.chosen_by]
    out = combined(read, rule.kind, places_read, chosen_by)
    out = _of_sizes(step, places, ins, out, k)
    if isinstance(out, Rows) and out.dims:
        summed = {d for d in out.dims if d < 0}
        return sum_over(out, summed, step.result_shape(k)) if summed else out
    made = frozenset[int]()
    if rule.kind is not Kind.MOVES:  # which makes no entries
        made = _long_dims(step, k) - {place for of_operand in places for place in of_operand}
    is_random = out.random or step.name in RANDOM
    return dataclasses.replace(out, varies=out.varies | made, random=is_random)


def _rule_of(step: RowStep, ins: list[Any]) -> DimRule:
    """The rule of an equation, which is of no kind where it rounds or divides by a sum."""
    rule, to = rule_of(step), step.result_types[0].dtype
    if step.name == "convert_element_type":
        of = step.types[0].dtype
        signs = [jnp.issubdtype(x, jnp.signedinteger) for x in (of, to)]
        is_wide = to.itemsize >= max(4, of.itemsize) and signs[0] <= signs[1]
        is_exact = of in (to, bool) or (jnp.issubdtype(of, jnp.integer) and is_wide)
        is_linear = is_exact or jnp.issubdtype(to, jnp.inexact)
    elif step.name == "div":
        is_by_sum = isinstance(ins[1], Rows) and ins[1].is_linear
        is_linear = jnp.issubdtype(to, jnp.inexact) and not is_by_sum
    else:
        is_linear = True
    return rule if is_linear else dataclasses.replace(rule, kind=Kind.OTHER)


# --- Dims that depend on the number of rows -------------------------------------------------------

# Parameters that are sizes: those of the results tell whether they double as they should.
_SIZE_NAMES = """
start_indices shape new_sizes sizes slice_sizes limit_indices feature_group_count reps
"""
_SIZES = frozenset(_SIZE_NAMES.split())


def _long_dims(step: RowStep, k: int) -> frozenset[int]:
    """The dims of a result that have more than one entry, with n rows or with 2 n."""
    shapes = [s.result_shape(k) for s in (step, step.twin or step)]
    return frozenset(d for d, sizes in enumerate(zip(*shapes, strict=True)) if set(sizes) != {1})


def _of_sizes(step: RowStep, places: list[Any], ins: list[Any], out: Any, k: int) -> Any:
    """The result, if twice the rows give the same function; of shared values the power changes."""
    if step.twin is None:
        return out
    dims = set(out.dims) if isinstance(out, Rows) else set()
    is_same, kept, summed = _has_same_params(step, step.twin), set(dims), set()
    for v, of_dims, *shapes in zip(ins, places, step.shapes, step.twin.shapes, strict=True):
        for d, (size, twice) in enumerate(zip(*shapes, strict=True)):
            place = of_dims[d]
            if size == twice or place in dims:
                continue
            if is_kept(place):
                kept.add(place)
                continue
            if isinstance(out, Rows):
                raise RowsMeet("rows meet along another dim that has their number")
            summed.add(place)
            is_uniform = isinstance(place, int) and d not in v.varies
            is_same = is_same and is_uniform and twice == step.growth * size
    both = zip(step.result_shape(k), step.twin.result_shape(k), strict=True)
    grown = {d for d, (size, twice) in enumerate(both) if size != twice}
    if step.name == "tile":
        kept |= {d for d, size in enumerate(step.shapes[0]) if size == 1}
    if step.name not in RANDOM | {"broadcast_in_dim"}:
        is_same = is_same and grown <= kept
    if isinstance(out, Shared):
        power = out.power + len(summed) if is_same and out.power is not None else None
        return dataclasses.replace(out, power=power)
    if not is_same:
        raise RowsMeet(NUMBER)
    return out


def _has_same_params(step: RowStep, twin: RowStep) -> bool:
    for name, given in step.params.items():
        other = twin.params.get(name)
        if name == "start_indices":  # which grow as their dims do
            sizes = zip(step.shapes[0], twin.shapes[0], given, other, strict=True)  # type: ignore
            if any(there * size != here * twice for size, twice, here, there in sizes):
                return False
        is_plain = isinstance(given, int | float | str | tuple) and name not in _SIZES
        if is_plain and repr(given) != repr(other):  # as NaN is NaN
            return False
    return True


# --- Sums over rows -------------------------------------------------------------------------------

# What a sum over rows that only divides may pass.
_CLIP_NAMES = "add sub max min clamp and or not select_n eq ne lt le gt ge"
_CLIPS = frozenset(_CLIP_NAMES.split()) | SAME


def _of_sums(step: RowStep, ins: list[Any], k: int) -> Any:
    """An equation of elements, some of which are sums over rows or functions of such."""
    if step.name == "div" and is_total(ins[1]):
        return _over(step.operands[0], ins[0], _inverse(step.operands[1], ins[1]))
    inverses = [isinstance(v, Weight) and v.is_inverse for v in ins]
    if step.name == "mul" and sum(inverses) == 1:
        by = inverses.index(True)
        return _over(step.operands[1 - by], ins[1 - by], ins[by])
    if step.name == "select_n" and isinstance(ins[0], Weight):
        # A ratio, where its weight is not zero.
        ratios = [v for v in ins[1:] if isinstance(v, Rows) and v.ratios]
        read = {weight for v in ratios for _, weight in v.ratios}
        zeros = [v for v in ins[1:] if isinstance(v, Shared) and v.is_zero]
        if ins[0].sums <= read and len(ratios) + len(zeros) == len(ins) - 1:
            return combined(ins[1:], Kind.LINEAR)
    if not any(isinstance(v, Weight) for v in ins):
        try:
            return _by_dims(step, ins, k)
        except RowsMeet:
            if step.name not in _CLIPS:
                raise
    return _clipped(step, ins)


def _clipped(step: RowStep, ins: list[Any]) -> Weight:
    """A function of sums over rows that is not linear: of use where it divides."""
    sums, powers = set[Value](), []
    for value, v in zip(step.operands, ins, strict=True):
        if isinstance(v, Shared):
            is_fit = v.power == 0 and not v.random
        elif isinstance(v, Weight):
            is_fit = not v.is_inverse
            sums |= v.sums
        else:
            is_fit = is_total(v) and not (v.ratios or v.random)
            sums.add(value)
        if not is_fit or step.name not in _CLIPS:
            raise RowsMeet(CLIPPED)
        powers += [] if isinstance(v, Shared) else [v.power]
    varies = frozenset[int]().union(*(v.varies for v in ins))
    return Weight(frozenset(sums), max(powers), varies=varies)


def _inverse(value: Value, v: Any) -> Weight:
    """What multiplies in the place of a function of sums over rows that divides."""
    if isinstance(v, Weight) and not v.is_inverse:
        return dataclasses.replace(v, power=-v.power, is_inverse=True)
    if isinstance(v, Weight) or v.ratios or v.random:
        raise RowsMeet("what divides is itself a ratio of sums over rows, or random")
    return Weight(frozenset([value]), -v.power, is_inverse=True, varies=v.varies)


def _over(value: Value, v: Any, weight: Weight) -> Any:
    """A value, over a function of sums over rows whose inverse is given."""
    if not isinstance(v, Shared | Rows) or v.power is None:
        raise RowsMeet(NUMBER if isinstance(v, Shared) else CLIPPED)
    power, varies = v.power + weight.power, v.varies | weight.varies
    if isinstance(v, Shared) and not v.random:
        return dataclasses.replace(weight, power=power, varies=varies)
    if isinstance(v, Shared) or v.ratios or v.own is not None:
        raise RowsMeet("a ratio of sums over rows is divided again, or is random")
    if weight.varies & set(v.dims):
        raise RowsMeet("a sum over rows meets rows along one of its dims")
    ratios = frozenset((value if v.is_sum else None, by) for by in weight.sums)
    varies = varies if v.is_sum else frozenset()
    return dataclasses.replace(v, ratios=ratios, power=power, varies=varies)


def _added_to_running(step: RowStep, ins: list[Any]) -> Any:
    """A sum over the iterations of a loop over rows, of which some have run."""
    if step.name in SAME and _rule_of(step, ins).kind is Kind.MOVES:
        return ins[0]
    if step.name not in ADDED or (step.name == "sub" and isinstance(ins[1], Running)):
        raise RowsMeet(SO_FAR)
    return added(*ins)


# --- Reshapes and views ---------------------------------------------------------------------------


def _reshaped(step: RowStep, v: Any) -> Any:
    old, new = step.shapes[0], step.result_shape()
    if isinstance(v, Rows) and v.dims:
        return _rows_reshaped(v, old, new)
    # Dims that are merged or split together lie between the same products of sizes.
    before = [list(itertools.accumulate(x, operator.mul, initial=1)) for x in (old, new)]
    common = set(before[0]) & set(before[1])
    groups = [[max(x for x in common if x <= size) for size in sizes] for sizes in before]
    varies = {groups[0][d] for d in v.varies}
    out = moved(v, [""] * len(old))
    return dataclasses.replace(
        out, varies=frozenset(d for d in _long_dims(step, 0) if groups[1][d] in varies)
    )


def _rows_reshaped(rows: Rows, old: Shape, new: Shape) -> Rows:
    """Dims are merged and split around the flat index that rows fill."""
    if 0 in (*old, *new):
        raise RowsMeet("a reshape of no elements")
    first, last = rows.dims[0], rows.dims[-1] + 1
    between = [d for d in range(first, last) if old[d] != 1 or d in rows.dims]
    if list(rows.dims) != between or rows.own is not None:
        raise RowsMeet("a reshape that mixes rows")
    before = math.prod(old[:first]) * rows.before
    after = math.prod(old[last:]) * rows.after
    first, last = 0, len(new)
    # Dims that count within what is before all rows, or after one.
    while first < last and before % new[first] == 0:
        before //= new[first]
        first += 1
    while last > first and after % new[last - 1] == 0:
        after //= new[last - 1]
        last -= 1
    dims = tuple(d for d in range(first, last) if new[d] != 1)
    return dataclasses.replace(rows, dims=dims, before=before, after=after)


def _views(step: RowStep, places: list[Any], ins: list[Any], k: int) -> list[Any]:
    """The operands, if views of all rows are joined, or some of them taken: as many views."""
    first, *others = ins
    if not all(isinstance(v, Rows) and len(v.dims) == 1 and not v.is_linear for v in ins):
        return ins
    if any((v.dims, v.count, v.after) != (first.dims, first.count, first.after) for v in others):
        return ins
    (dim,), p = first.dims, step.params
    start = sum(p["sizes"][:k]) if step.name == "split" and p["axis"] == dim else 0
    if step.name == "slice":
        start = p["start_indices"][dim]
    is_dense = step.name != "slice" or not p["strides"] or p["strides"][dim] == 1
    view, size = first.count * first.after, step.result_shape(k)[dim]
    if start % view or size % view or not is_dense:
        return ins
    for of_dims in places:
        of_dims[dim] = dim
    return [dataclasses.replace(v, before=size // view) for v in ins]


# --- Indices of rows ------------------------------------------------------------------------------


def _concatenated(step: RowStep, ins: list[Any], k: int) -> Any:
    """Columns of indices, of which one is the index of the row itself; or anything else."""
    dim = step.params["dimension"]
    columns = [i for i, v in enumerate(ins) if isinstance(v, Shared) and v.counts is not None]
    if len(columns) == 1 and step.shapes[columns[0]][dim] == 1:
        (i,) = columns
        out = _by_dims(step, [*ins[:i], Shared(), *ins[i + 1 :]], k)
        if isinstance(out, Rows) and out.dims == (ins[i].counts,):
            return dataclasses.replace(out, own=sum(shape[dim] for shape in step.shapes[:i]))
    return _by_dims(step, ins, k)


def _own_entries(step: RowStep, places: list[Any], ins: list[Any]) -> list[Any]:
    """The operands; by an index that has the index of the row, each row has entries of its own."""
    index, numbers = ins[1], step.params["dimension_numbers"]
    if not isinstance(index, Rows) or index.own is None or len(index.dims) != 1:
        return ins
    (i,) = index.dims
    if step.name == "gather":
        dim = numbers.start_index_map[index.own]
        if step.params["slice_sizes"][dim] != 1:
            return ins
        places[0][dim] = places[1][i]
    else:
        dim = numbers.scatter_dims_to_operand_dims[index.own]
        if dim not in numbers.inserted_window_dims:
            return ins
        of_index = [d for d in range(len(step.shapes[2])) if d not in numbers.update_window_dims]
        places[0][dim] = places[1][i] = places[2][of_index[i]] = dim
    return [ins[0], dataclasses.replace(index, own=None), *ins[2:]]
