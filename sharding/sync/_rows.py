"""Rows that are not zero: which, how many, to whom; and in how many rounds they are sent."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sharding.sync._interface import Axes
from sharding.sync._mixer import Mixer

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
      owner: to which device; sorted.
      rank: how many before it go to the same device; of what is not sent -1.
      place: in that device's memory.
      values: ``values(indices)``, the rows of these entries, zeros where an index is too large.
    """

    owner: jax.Array
    rank: jax.Array
    place: jax.Array
    values: Callable[[jax.Array], jax.Array]


def room_for(density: float, places: int) -> int:
    """Of so many places what part is expected to be taken, and three standard deviations."""
    expected = density * places
    return min(places, math.ceil(expected + 3 * math.sqrt(expected * (1 - density))) or 1)


def entries_of(rows: jax.Array, owners: Owners) -> Entries:
    """A dense gradient's, one for each place of each owner."""
    row_at = owners.row_at()
    found = jnp.any(rows != 0, axis=tuple(range(1, rows.ndim)))
    found = jnp.take(found, row_at, fill_value=False).reshape(owners.num, owners.places)
    rank = jnp.where(found, jnp.cumsum(found, 1, dtype=jnp.int32) - 1, -1).ravel()
    at = jnp.arange(rank.size, dtype=jnp.int32)

    def values(indices: jax.Array) -> jax.Array:
        row = jnp.take(row_at, indices, fill_value=owners.rows)
        return jnp.take(rows, row, axis=0, fill_value=0)

    return Entries(at // owners.places, rank, at % owners.places, values)


def pick(entries: Entries, num: int, room: int, i: Any) -> jax.Array:
    """Indices of the entries of a round, ``room`` for each owner; too large where there is none."""
    size = entries.rank.size
    taken = (entries.rank >= 0) & (entries.rank // room == i)
    at = jnp.where(taken, entries.owner * room + entries.rank % room, num * room)
    empty = jnp.full(num * room, size, jnp.int32)
    return empty.at[at].set(jnp.arange(size, dtype=jnp.int32), mode="drop")


def in_rounds(
    rows: jax.Array,
    owners: Owners,
    room: int,
    axes: Axes,
    send: Callable[[Entries, int], jax.Array],
    whole: Callable[[jax.Array], jax.Array],
    most: float,
) -> jax.Array:
    """What is made of rows where only some are not zero, in the fewest rounds that send all.

    Args:
      rows: (rows, ...).
      owners: of rows.
      room: of entries for an owner in a round.
      axes: the devices, which all decide alike.
      send: of entries and the number of rounds.
      whole: what is done where more rounds were needed, or they would send as much.
      most: how many entries of an owner cost as much as ``whole``.
    """
    worth = [r for r in _ROUNDS if r * room < most]
    if not worth:
        return whole(rows)
    entries = entries_of(rows, owners)
    needed = lax.pmax(-(-(jnp.max(entries.rank) + 1) // room), axes)
    branches = [functools.partial(send, entries, rounds) for rounds in worth]
    choice = jnp.searchsorted(jnp.array(worth, jnp.int32), needed)
    return lax.switch(choice, [*branches, functools.partial(whole, rows)])


def repeat(rounds: int, body: Callable[[Any, Any], Any], start: Any) -> Any:
    """``body(round, carry)`` for each round."""
    return lax.fori_loop(0, rounds, body, start) if rounds > 1 else body(0, start)
