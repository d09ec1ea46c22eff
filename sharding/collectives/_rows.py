"""Gradients most of whose rows are zero: which are not, whose they are, and how they are sent."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sharding.collectives._permutation import Mixer
from sharding.placement._specs import Axes

_ROUNDS = (1, 2, 4)


class Owners:
    """Which device owns which row, and in which place of its memory.

    Args:
      rows: how many there are.
      num: how many devices.
      mixer: the permutation of rows that is cut into contiguous parts; None cuts them as they lie.

    Attributes:
      places: of an owner's memory.
    """

    def __init__(self, rows: int, num: int, mixer: Mixer | None = None):
        self.rows, self.num, self._mixer = rows, num, mixer
        self.places = -(-rows // num)

    def row_at(self) -> jax.Array:
        """The row in each place, owner after owner; ``rows`` where there is none."""
        at = jnp.arange(self.num * self.places, dtype=jnp.int32)
        if self._mixer is None:
            return jnp.minimum(at, self.rows)
        row = self._mixer.unmix(jnp.minimum(at, self.rows - 1))
        return jnp.where(at < self.rows, row, self.rows)

    def place_of(self, rows: jax.Array) -> jax.Array:
        """The place of each row, counted through all owners."""
        return rows if self._mixer is None else self._mixer.mix(rows)


class Entries(NamedTuple):
    """What a device has to send; lists have an entry for each.

    Attributes:
      owner: to which device.
      rank: how many before it go to the same device; of what is not sent -1.
      place: in that device's memory.
      values: ``values(indices)``, the rows of these entries, zeros where an index is too large.
    """

    owner: jax.Array
    rank: jax.Array
    place: jax.Array
    values: Callable[[jax.Array], jax.Array]


def room_for(density: float, places: int, lists: int) -> int:
    """How many of so many places are taken in the fullest of some lists, each a part of all.

    Chance is left one time in 100: a sum of independent choices exceeds its mean by z standard
    deviations with a chance of about exp(-z^2 / 2), each of the lists.
    """
    expected = density * places
    spread = math.sqrt(2 * math.log(100 * lists) * expected * (1 - density))
    return min(places, math.ceil(expected + spread) or 1)


class Rows(NamedTuple):
    """A gradient by rows, along its first dim.

    Attributes:
      shape: of the gradient.
      dtype: of it, too.
      limit: how many of its rows can be other than zero.
      entries: of ``Owners``.
      whole: the gradient.
    """

    shape: tuple[int, ...]
    dtype: Any
    limit: int
    entries: Callable[[Owners], Entries]
    whole: Callable[[], jax.Array]


def dense_rows(x: jax.Array) -> Rows:
    """A gradient in which rows that are zero have to be found."""

    def entries(owners: Owners) -> Entries:
        """One for each place of each owner."""
        row_at = owners.row_at()
        found = jnp.any(x != 0, axis=tuple(range(1, x.ndim)))
        found = jnp.take(found, row_at, fill_value=False).reshape(owners.num, owners.places)
        rank = jnp.where(found, jnp.cumsum(found, 1, dtype=jnp.int32) - 1, -1).ravel()
        at = jnp.arange(rank.size, dtype=jnp.int32)

        def values(indices: jax.Array) -> jax.Array:
            row = jnp.take(row_at, indices, fill_value=owners.rows)
            return jnp.take(x, row, axis=0, fill_value=0)

        return Entries(at // owners.places, rank, at % owners.places, values)

    return Rows(x.shape, x.dtype, x.shape[0], entries, lambda: x)


def looked_up_rows(ids: jax.Array, num_rows: int, rows: jax.Array) -> Rows:
    """The gradient of a table, from those of rows that were looked up, some more than once.

    Args:
      ids: (lookups,); those outside the table have no gradient.
      num_rows: of the table.
      rows: (lookups, ...).
    """
    kind = jnp.promote_types(rows.dtype, jnp.float32)

    def added(at: jax.Array, size: int) -> jax.Array:
        sums = jnp.zeros((size, *rows.shape[1:]), kind)
        return sums.at[at].add(rows.astype(kind), mode="drop").astype(rows.dtype)

    def entries(owners: Owners) -> Entries:
        """One for each lookup; the first of a row stands for all of them."""
        once = distinct(ids, owners)
        sums = added(once.first, ids.size)
        return once.entries._replace(values=lambda at: jnp.take(sums, at, axis=0, fill_value=0))

    def whole() -> jax.Array:
        return added(jnp.where(ids < 0, num_rows, ids), num_rows)

    limit = min(ids.size, num_rows)
    return Rows((num_rows, *rows.shape[1:]), rows.dtype, limit, entries, whole)


class Distinct(NamedTuple):
    """Rows that were looked up, each once.

    Attributes:
      entries: one for each lookup, of which the first of every row is sent; without values.
      first: of each lookup, which one that is.
    """

    entries: Entries
    first: jax.Array


def distinct(ids: jax.Array, owners: Owners) -> Distinct:
    """Which of the lookups (entries,) stand for their row, and who owns it."""
    valid = (ids >= 0) & (ids < owners.rows)
    place = owners.place_of(jnp.where(valid, ids, 0))
    place = jnp.where(valid, place, owners.num * owners.places)
    order = jnp.argsort(place, stable=True)
    place = place[order]
    new = jnp.concatenate([jnp.ones(1, bool), place[1:] != place[:-1]])
    taken = new & (place < owners.num * owners.places)
    owner = place // owners.places
    before = jnp.cumsum(taken, dtype=jnp.int32) - taken
    start = jnp.searchsorted(owner, jnp.arange(owners.num + 1, dtype=owner.dtype))
    rank = jnp.where(taken, before - before[start][owner], -1)
    of_row = lax.cummax(jnp.where(new, jnp.arange(place.size, dtype=jnp.int32), 0))

    def back(x: jax.Array) -> jax.Array:
        """In the order of the lookups."""
        return jnp.zeros_like(x).at[order].set(x)

    none = Entries(back(owner), back(rank), back(place % owners.places), lambda indices: indices)
    return Distinct(none, back(order[of_row].astype(jnp.int32)))


def along(x: jax.Array, dim: int, reduce: Callable[[jax.Array, int], jax.Array]) -> jax.Array:
    """A piece along any dim, by what makes one along dim 0 or 1."""
    if dim % x.ndim == 0:
        return reduce(x, 0)
    return jnp.moveaxis(reduce(jnp.moveaxis(x, dim, 1), 1), 1, dim)


def pick(entries: Entries, num: int, room: int, i: Any) -> jax.Array:
    """Indices of the entries of a round, ``room`` for each owner; too large where there is none."""
    size = entries.rank.size
    taken = (entries.rank >= 0) & (entries.rank // room == i)
    at = jnp.where(taken, entries.owner * room + entries.rank % room, num * room)
    empty = jnp.full(num * room, size, jnp.int32)
    return empty.at[at].set(jnp.arange(size, dtype=jnp.int32), mode="drop")


def in_rounds(
    entries: Callable[[], Entries],
    limit: int,
    room: int,
    axes: Axes,
    send: Callable[[Entries, int], jax.Array],
    whole: Callable[[], jax.Array],
    most: float,
) -> jax.Array:
    """What is made of some rows, in the fewest rounds that send them all.

    Args:
      entries: what is to be sent.
      limit: how many of them an owner can get from one device.
      room: how many it can in a round.
      axes: the devices, which all decide alike.
      send: of entries and the number of rounds.
      whole: what is done where more rounds were needed, or they would send as much.
      most: how many entries of an owner cost as much as ``whole``.
    """
    worst = -(-limit // room)
    if worst * room < most:  # then nobody makes room for the whole, either
        worth = [*(r for r in _ROUNDS if r < worst), worst]
    else:
        worth = [r for r in _ROUNDS if r * room < most]
    if not worth:
        return whole()
    found = entries()
    branches: list[Callable[[], jax.Array]] = [functools.partial(send, found, r) for r in worth]
    if worth[-1] != worst:
        branches.append(whole)
    if len(branches) == 1:
        return branches[0]()
    needed = lax.pmax(-(-(jnp.max(found.rank) + 1) // room), axes)
    return lax.switch(jnp.searchsorted(jnp.array(worth, jnp.int32), needed), branches)


def repeat(rounds: int, body: Callable[[Any, Any], Any], start: Any) -> Any:
    """``body(round, carry)`` for each round."""
    return lax.fori_loop(0, rounds, body, start) if rounds > 1 else body(0, start)
