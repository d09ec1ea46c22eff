"""Where the rows of a batch are in a value of a traced loss: the states that are proven.

| state | the value | example |
|---|---|---|
| ``Shared`` | depends on no row | parameters, literals, masks of positions |
| ``Rows(dims)`` | holds, along ``dims``, for each row what this row alone gives | activations |
| ``Rows(summed=True)`` | is a sum of what rows give, by one factor; linear from here on | a loss |
| ``Weight`` | is such a sum, clipped or inverted; it may divide, and nothing else | ``max(n, 1)`` |
| ``Coupled`` | rows meet in another way, by the equation that it names | batch norm |

Rows fill the flat index over ``dims`` as ``(before, count, after)``: tokens ``(rows * tokens,)``
have ``after=tokens``, two views one after the other ``before=2``. A negative dim is the iteration
of a loop over rows. A sum over all rows has no dims left.

``power`` says how a value grows with the number of rows n, as ``n ** power``: a sum over rows has 1
and a mean 0. It is read from two traces, of n rows and of 2 n: a literal that halves is ``1 / n``,
one that is ``1 / n`` by chance stays. None is any other dependence.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeAlias

Value: TypeAlias = Any  # a variable of a jaxpr, or the number of a value of a ``Graph``


@dataclasses.dataclass(frozen=True)
class Shared:
    """A value that all rows share."""

    varies: frozenset[int] = frozenset()  # the dims along which it may not be uniform
    power: int | None = 0
    random: bool = False
    number: Any = None  # the number, if uniform and known
    counts: int | None = None  # the dim along which it is 0, 1, 2, ...

    @property
    def is_zero(self) -> bool:
        return self.number is not None and bool(self.number == 0)


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
    running: int | None = None  # the loop over rows that is adding to it
    own: int | None = None  # of indices: the column that is the index of the row itself
    spread: frozenset[int] = frozenset()  # of a sum: the dims along which it was broadcast

    @property
    def is_sum(self) -> bool:
        return self.summed and not self.dims

    @property
    def is_linear(self) -> bool:
        """Whether only linear functions of it keep rows apart."""
        return self.summed or bool(self.ratios)

    @property
    def place(self) -> tuple[Any, ...]:
        return self.dims, self.before, self.count, self.after


@dataclasses.dataclass(frozen=True)
class Coupled:
    """A value in which rows meet."""

    reason: str
    equation: str = ""  # the name of its primitive
    line: str = ""  # of the user

    def __str__(self) -> str:
        at = f"{self.equation}: " if self.equation else ""
        return f"{at}{self.reason}" + (f" ({self.line})" if self.line else "")


@dataclasses.dataclass(frozen=True)
class Weight:
    """A function of sums over rows that may divide what rows give."""

    sums: frozenset[Value]
    power: int
    cause: Coupled  # why it is no sum over rows
    inverse: bool = False
    spread: frozenset[int] = frozenset()  # the dims along which it was broadcast


State: TypeAlias = Shared | Rows | Weight | Coupled


class RowsMeet(Exception):
    """Raised by rules for an equation in which rows meet."""


EVERY_DIM = frozenset(range(64))  # of a shared value of which nothing is known
INDEX = "what is multiplied with a row, or added to it, depends on its index"
NUMBER = "rows meet a value that depends on their number"


def common_power(values: list[Shared | Rows]) -> int | None:
    """The power that added values share; zeros have any."""
    powers = {v.power for v in values if not (isinstance(v, Shared) and v.is_zero)}
    return 0 if not powers else powers.pop() if len(powers) == 1 else None


def meets_shared(rows: Rows, shared: Shared, along: Iterable[int] | None = None) -> Rows:
    """Rows, after an equation that reads a shared value, whose dims ``along`` are theirs."""
    if shared.power is None:
        raise RowsMeet(NUMBER)
    if shared.varies & set(rows.dims if along is None else along):
        if not shared.random:
            raise RowsMeet(INDEX)
        return dataclasses.replace(rows, random=True)
    return rows


def join(a: State, b: State) -> State:
    """A state of what is either of two values: results of branches, of iterations."""
    if a == b or isinstance(a, Coupled):
        return a
    if isinstance(b, Coupled):
        return b
    if isinstance(a, Shared) and isinstance(b, Shared):
        number = a.number if a.number == b.number else None
        counts = a.counts if a.counts == b.counts else None
        some_random = a.random or b.random
        return Shared(a.varies | b.varies, common_power([a, b]), some_random, number, counts)
    if isinstance(a, Weight) or isinstance(b, Weight):
        return next(v for v in (a, b) if isinstance(v, Weight)).cause
    rows = [v for v in (a, b) if isinstance(v, Rows)]
    kinds = {(v.place, v.summed, v.running, v.own) for v in rows}
    power = common_power([a, b])
    try:
        for shared in (v for v in (a, b) if isinstance(v, Shared)):
            rows[0] = meets_shared(rows[0], shared)
    except RowsMeet as meet:
        return Coupled(str(meet))
    if len(kinds) > 1 or power is None or any(v.own is not None or v.running for v in rows):
        return Coupled("one of two values is taken that hold their rows in different ways")
    both = frozenset[Any]().union(*(v.ratios for v in rows))
    some_random = any(v.random for v in rows)
    return dataclasses.replace(rows[0], power=power, random=some_random, ratios=both)
