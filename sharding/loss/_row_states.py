"""Where the rows of a batch are in a value of a traced loss: the states that are proven.

| state | the value | example |
|---|---|---|
| ``Shared`` | depends on no row | parameters, literals, masks of positions |
| ``Rows(dims)`` | holds, along ``dims``, for each row what this row alone gives | activations |
| ``Rows(summed=True)`` | is a sum of what rows give, by one factor; linear from here on | a loss |
| ``Weight`` | is such a sum, clipped or inverted; it may divide, and nothing else | ``max(n, 1)`` |
| ``Running`` | is a sum over the rows so far, in a loop over rows | its carry |
| ``Coupled`` | rows meet in another way, by the equation that it names | batch norm |

Rows fill the flat index over ``dims`` as ``(before, count, after)``: tokens ``(rows * tokens,)``
have ``after=tokens``, two views one after the other ``before=2``. A sum over all rows has no dims
left.

``power`` says how a value grows with the number of rows n, as ``n ** power``: a sum over rows has 1
and a mean 0. It is read from two traces, of n rows and of 2 n: a literal that halves is ``1 / n``,
one that is ``1 / n`` by chance stays. None is any other dependence.

``varies`` has the dims along which a value may not be uniform, if it is the same for all rows.
"""

import dataclasses
import enum
import math
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

Value: TypeAlias = Any  # a variable of a jaxpr, or the number of a value of a ``Graph``
# What a dim of an operand is in the result of an equation. From 0 on: the dim whose entries are
# computed one by one from those of this dim. Below 0: it is summed, with the dims of the same
# number of other operands. A text: its entries meet in the way that the text says.
Place: TypeAlias = int | str
Places: TypeAlias = list[Any]  # of all dims of an operand


@dataclasses.dataclass(frozen=True)
class Shared:
    """A value that all rows share."""

    varies: frozenset[int] = frozenset()
    power: int | None = 0
    random: bool = False
    is_zero: bool = False
    counts: int | None = None  # the dim along which it is 0, 1, 2, ...


@dataclasses.dataclass(frozen=True)
class Rows:
    """A value that holds what each row gives, or a sum of that."""

    dims: tuple[int, ...]
    count: int  # of rows, or of groups of them if they are summed in groups
    before: int = 1
    after: int = 1
    power: int = 0
    random: bool = False  # it read random numbers that depend on the index of a row
    summed: bool = False
    # Of a value that was divided: pairs of the sum, if it was one already, and the sum it is over.
    ratios: frozenset[tuple[Value | None, Value]] = frozenset()
    own: int | None = None  # of indices: the column that is the index of the row itself
    varies: frozenset[int] = frozenset()

    @property
    def is_sum(self) -> bool:
        return self.summed and not self.dims

    @property
    def is_linear(self) -> bool:
        """Whether only linear functions of it keep rows apart."""
        return self.summed or bool(self.ratios)


@dataclasses.dataclass(frozen=True)
class Weight:
    """A function of sums over rows that may divide what rows give."""

    sums: frozenset[Value]
    power: int
    is_inverse: bool = False
    varies: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Running:
    """A sum over the rows so far, to which an iteration has added a term."""

    of: Value  # of what the loop carries
    term: Shared | Rows = Shared(is_zero=True)


@dataclasses.dataclass(frozen=True)
class Coupled:
    """A value in which rows meet."""

    reason: str
    equation: str = ""  # the name of its primitive
    line: str = ""  # of the user

    def __str__(self) -> str:
        at = f"{self.equation}: " if self.equation else ""
        return f"{at}{self.reason}" + (f" ({self.line})" if self.line else "")


State: TypeAlias = Shared | Rows | Weight | Running | Coupled


class RowsMeet(Exception):
    """Raised by rules for an equation in which rows meet."""


CLIPPED = "a sum over rows is clipped, or added to what all rows share"
INDEX = "what is multiplied with a row, or added to it, depends on its index"
NOT_LINEAR = "a function of a sum over rows, or of a ratio of such sums, is not linear"
NUMBER = "rows meet a value that depends on their number"
SO_FAR = "a loop over rows reads its sum over the rows so far"


class Kind(enum.Enum):
    """What a function is of its operands, other than those that only choose entries."""

    MOVES = "the entries of one operand, in other places"
    LINEAR = "linear in all of them together"
    PRODUCT = "linear in each of them"
    OTHER = "neither"


def unknown(aval: Any) -> Shared:
    """What all rows share, and may be anything else."""
    sizes = enumerate(getattr(aval, "shape", ()))
    return Shared(frozenset(d for d, size in sizes if size != 1))


def is_total(v: Any) -> bool:
    """Whether a value is a function of sums over all rows."""
    return isinstance(v, Weight) or (isinstance(v, Rows) and v.is_sum)


def is_kept(place: Place) -> bool:
    """Whether a dim of an operand is one of the result."""
    return not isinstance(place, str) and place >= 0


def combined(
    ins: Sequence[Any],
    kind: Kind,
    places: Sequence[Places] | None = None,
    chosen_by: Collection[int] = (),
) -> Any:
    """The state of a function of values, of whose dims the result has those of ``places``.

    Operands ``chosen_by`` are predicates and indices. Dims of rows below 0 are yet to be summed.
    """
    places = places or [list(range(64))] * len(ins)
    for v in ins:
        if not isinstance(v, Shared | Rows):
            raise RowsMeet(SO_FAR if isinstance(v, Running) else CLIPPED)
    values = [v for k, v in enumerate(ins) if k not in chosen_by]
    power = _power(kind, values) if all(ins[k].power == 0 for k in chosen_by) else None
    varying = [{places[k][d] for d in v.varies} for k, v in enumerate(ins)]
    varies = frozenset(filter(is_kept, set[Any]().union(*varying)))
    rows = [v for v in ins if isinstance(v, Rows)]
    if not rows:
        is_zero = kind in (Kind.MOVES, Kind.LINEAR) and all(v.is_zero for v in values)
        counts = None
        if kind is Kind.MOVES and ins[0].counts is not None:
            at = places[0][ins[0].counts]
            counts = at if is_kept(at) else None
        return Shared(varies, power, any(v.random for v in ins), is_zero, counts)
    dims = _dims_of_rows(ins, places)
    _check_linear(ins, kind, places, chosen_by, dims)
    if power is None or None in {v.power for v in ins}:
        raise RowsMeet(NUMBER)
    is_random = any(v.random for v in rows)
    for v, of_value in zip(ins, varying, strict=True):
        if isinstance(v, Shared) and of_value & set(dims):
            if not v.random:
                raise RowsMeet(INDEX)
            is_random = True
    stays = kind is Kind.MOVES and list(places[0]) == list(range(len(places[0])))
    if any(v.own is not None for v in rows) and not stays:
        raise RowsMeet(INDEX)
    ratios = frozenset[Any]().union(*(v.ratios for v in rows))
    out = dataclasses.replace(rows[0], dims=dims, power=power, random=is_random, ratios=ratios)
    return dataclasses.replace(out, varies=frozenset() if dims else varies)


def _dims_of_rows(ins: Sequence[Any], places: Sequence[Places]) -> tuple[int, ...]:
    """The dims of the result that have the rows of all operands."""
    found = set()
    for v, of_dims in zip(ins, places, strict=True):
        if isinstance(v, Rows):
            dims = tuple(of_dims[d] for d in v.dims)
            for place in dims:
                if isinstance(place, str):
                    raise RowsMeet(place)
            found.add((dims, (v.before, v.count, v.after), v.summed))
    if len(found) > 1:
        is_sum = any(summed for _, _, summed in found)
        raise RowsMeet("rows meet a sum over rows" if is_sum else "each row meets the others")
    ((dims, _, _),) = found
    return dims


def _power(kind: Kind, values: Sequence[Any]) -> int | None:
    powers = [v.power for v in values]
    if None in powers:
        return None
    if kind is Kind.PRODUCT:
        return sum(powers)
    if kind is Kind.OTHER:
        return None if any(powers) else 0
    added = {v.power for v in values if not (isinstance(v, Shared) and v.is_zero)}
    return 0 if not added else added.pop() if len(added) == 1 else None


def _check_linear(
    ins: Sequence[Any], kind: Kind, places: Any, chosen_by: Collection[int], dims: tuple[int, ...]
) -> None:
    """Raises if a function of sums over rows, or of ratios of such, is not linear in them."""
    linear = {k for k, v in enumerate(ins) if isinstance(v, Rows) and v.is_linear}
    if linear & set(chosen_by):
        raise RowsMeet("what is taken, or what runs, is decided by a sum over rows")
    if kind is Kind.OTHER and linear:
        raise RowsMeet(NOT_LINEAR)
    if kind is Kind.PRODUCT and len(linear) > 1:
        raise RowsMeet("a sum over rows, or a ratio of such, is multiplied with another")
    # What all rows share may be added to a sum over all rows, not to that of a group.
    summed = {d for d in dims if d < 0}
    in_groups = dims and any(isinstance(v, Rows) and v.summed for v in ins)
    for k, v in enumerate(ins):
        is_beside = isinstance(v, Shared) and not v.is_zero and not summed & set(places[k])
        if kind is Kind.LINEAR and (summed or in_groups) and is_beside and k not in chosen_by:
            raise RowsMeet("a sum over rows is added to what all rows share")


def moved(v: Any, places: Places) -> Any:
    """A value whose dims are in other places of a result."""
    if isinstance(v, Weight):
        varies = filter(is_kept, (places[d] for d in v.varies))
        return dataclasses.replace(v, varies=frozenset(varies))
    return combined([v], Kind.MOVES, [places]) if isinstance(v, Shared | Rows) else v


def added(a: Any, b: Any) -> Any:
    """The sum of two values."""
    if isinstance(a, Running):
        return Running(a.of, combined([a.term, b], Kind.LINEAR))
    return added(b, a) if isinstance(b, Running) else combined([a, b], Kind.LINEAR)


def sum_over(rows: Rows, gone: Collection[int], shape: Sequence[int]) -> Rows:
    """Rows, summed over some of their dims, as a value of this shape."""
    dims = tuple(d for d in rows.dims if d not in gone)
    out = dataclasses.replace(rows, dims=dims, before=1, after=1, summed=True)
    if dims:
        return dataclasses.replace(out, count=math.prod(shape[d] for d in dims))
    varies = frozenset(d for d, size in enumerate(shape) if size != 1)
    return dataclasses.replace(out, count=1, power=rows.power + 1, varies=varies)
