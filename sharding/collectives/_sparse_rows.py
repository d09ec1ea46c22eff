"""Gradients with mostly zero rows: which rows are sent, to which owner, in how many rounds."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sharding.collectives._sum_dtype import sum_dtype
from sharding.placement._specs import Axes

# Odd, hence invertible modulo 2**32; the bits of the golden ratio and of the square root of 3.
_FACTORS = (0x9E3779B1, 0xBB67AE85)


class RowHash:
    """The hash of rows: a pseudorandom permutation of 0, ..., size - 1, at most 2**31.

    Neighbours are far apart. Numbers of as many bits as size - 1 are multiplied by odd factors and
    xored with their own upper halves; both steps are invertible. A result of size or more is
    permuted again until it is less (cycle walking).
    """

    def __init__(self, size: int, seed: int = 0):
        self._size = size
        self._bits = max(2, math.ceil(math.log2(max(size, 2))))
        offsets = np.random.default_rng(seed).integers(0, 2**31, 2)
        self._factors = [(f + 2 * int(o)) % 2**32 for f, o in zip(_FACTORS, offsets, strict=True)]

    def apply(self, x: jax.Array) -> jax.Array:
        """The image of each number; int32."""
        return self._walk(x, self._forward)

    def invert(self, x: jax.Array) -> jax.Array:
        """The number whose image is each of these; int32."""
        return self._walk(x, self._backward)

    def _walk(self, x: jax.Array, step: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Repeats a step on the numbers that are outside the range."""
        size, x = self._size, step(x.astype(jnp.uint32))
        if size < 2**self._bits:
            again = lambda x: jnp.where(x < size, x, step(x))  # noqa: E731
            x = lax.while_loop(lambda x: jnp.any(x >= size), again, x)
        return x.astype(jnp.int32)

    def _forward(self, x: jax.Array) -> jax.Array:
        for factor in self._factors:
            x = self._fold(self._multiply(x, factor))
        return x

    def _backward(self, x: jax.Array) -> jax.Array:
        for factor in reversed(self._factors):
            x = self._multiply(self._fold(x), pow(factor, -1, 2**32))
        return x

    def _multiply(self, x: jax.Array, factor: int) -> jax.Array:
        return (x * jnp.uint32(factor)) & jnp.uint32(2**self._bits - 1)

    def _fold(self, x: jax.Array) -> jax.Array:
        """Xors the upper half into the lower one; its own inverse, as the upper half stays."""
        return x ^ (x >> ((self._bits + 1) // 2))


class RowOwners:
    """Which device owns each row of an array, and in which slot of its memory.

    The permutation maps rows to slots, counted over all owners; without one each owner has
    contiguous rows. Each owner has ``num_slots``; the last ones of the last owners may be empty.
    """

    def __init__(self, num_rows: int, num_owners: int, permutation: RowHash | None = None):
        self.num_rows, self.num_owners = num_rows, num_owners
        self.num_slots = -(-num_rows // num_owners)
        self._permutation = permutation

    def row_of_slots(self) -> jax.Array:
        """The row in every slot, owner after owner; ``num_rows`` in empty slots."""
        slot = jnp.arange(self.num_owners * self.num_slots, dtype=jnp.int32)
        if self._permutation is None:
            return jnp.minimum(slot, self.num_rows)
        row = self._permutation.invert(jnp.minimum(slot, self.num_rows - 1))
        return jnp.where(slot < self.num_rows, row, self.num_rows)

    def slot_of(self, rows: jax.Array) -> jax.Array:
        """The slot of each row, counted over all owners."""
        return rows if self._permutation is None else self._permutation.apply(rows)


# Numbers of rounds that a program may have a branch for, beside the one for the worst case.
_ROUND_COUNTS = (1, 2, 4)
# ``loop(body, init)``: a loop over rounds.
Loop = Callable[[Callable[[jax.Array, Any], Any], Any], Any]


class SendList(NamedTuple):
    """The rows that a device may have to send, its candidates; arrays are (candidates,), int32."""

    owner: jax.Array  # the device that owns the row
    rank: jax.Array  # the position of the row among those for its owner; -1 if it is not sent
    slot: jax.Array  # of the row in the owner's memory
    # The rows (indices, ...) of candidates by their indices; zeros where one is out of range.
    values: Callable[[jax.Array], jax.Array]


def list_capacity(density: float, num_slots: int, num_lists: int) -> int:
    """How many rows the fullest of several lists has, with ``density`` of the slots filled.

    Exceeded one time in 100: a sum of independent choices exceeds its mean by z standard deviations
    with a probability of about exp(-z^2 / 2), for each list of ``num_slots``.
    """
    expected = density * num_slots
    margin = math.sqrt(2 * math.log(100 * num_lists) * expected * (1 - density))
    return min(num_slots, math.ceil(expected + margin) or 1)


class SparseRows(NamedTuple):
    """A gradient of this shape and dtype that is sparse along its first dim."""

    shape: tuple[int, ...]
    dtype: Any
    max_rows: int  # at most so many rows are nonzero
    send_list: Callable[[RowOwners], SendList]
    dense: Callable[[], jax.Array]  # the gradient as one array


def rows_of_array(x: jax.Array) -> SparseRows:
    """A gradient (rows, ...) whose nonzero rows have to be found."""

    def send_list(owners: RowOwners) -> SendList:
        """Candidates are all slots of all owners."""
        row_of_slots = owners.row_of_slots()  # (owners * slots,)
        nonzero = jnp.any(x != 0, axis=tuple(range(1, x.ndim)))  # (rows,)
        nonzero = jnp.take(nonzero, row_of_slots, fill_value=False)
        nonzero = nonzero.reshape(owners.num_owners, owners.num_slots)
        rank = jnp.where(nonzero, jnp.cumsum(nonzero, 1, dtype=jnp.int32) - 1, -1).ravel()
        slot = jnp.arange(rank.size, dtype=jnp.int32)  # counted over all owners

        def values(indices: jax.Array) -> jax.Array:
            row = jnp.take(row_of_slots, indices, fill_value=owners.num_rows)
            return jnp.take(x, row, axis=0, fill_value=0)

        return SendList(slot // owners.num_slots, rank, slot % owners.num_slots, values)

    return SparseRows(x.shape, x.dtype, x.shape[0], send_list, lambda: x)


def rows_of_lookups(ids: jax.Array, num_rows: int, rows: jax.Array) -> SparseRows:
    """The gradient of a table, given those of looked-up rows (lookups, ...), which may repeat."""
    dtype = sum_dtype(rows.dtype)

    def scatter_add(index: jax.Array, size: int) -> jax.Array:
        """Adds up the rows with the same index: (size, ...)."""
        sums = jnp.zeros((size, *rows.shape[1:]), dtype)
        return sums.at[index].add(rows.astype(dtype), mode="drop").astype(rows.dtype)

    def send_list(owners: RowOwners) -> SendList:
        """Candidates are all lookups; the first one of a row holds the sum of all."""
        firsts, first = unique_lookups(ids, owners)
        sums = scatter_add(first, ids.size)  # (lookups, ...)
        return firsts._replace(values=lambda i: jnp.take(sums, i, axis=0, fill_value=0))

    def dense() -> jax.Array:
        return scatter_add(jnp.where(ids < 0, num_rows, ids), num_rows)

    shape, max_rows = (num_rows, *rows.shape[1:]), min(ids.size, num_rows)
    return SparseRows(shape, rows.dtype, max_rows, send_list, dense)


def unique_lookups(ids: jax.Array, owners: RowOwners) -> tuple[SendList, jax.Array]:
    """A candidate per lookup (lookups,), without ``values``; the first one of a row is sent.

    And, for each lookup, the index of the first one of the same row.
    """
    # Sort the lookups by slot, so that those of one row are neighbours, and those of one owner.
    valid = (ids >= 0) & (ids < owners.num_rows)
    slot = owners.slot_of(jnp.where(valid, ids, 0))  # counted over all owners
    slot = jnp.where(valid, slot, owners.num_owners * owners.num_slots)  # invalid ids come last
    order = jnp.argsort(slot, stable=True)
    slot = slot[order]

    # Of each row the first lookup is sent. Its rank: sent ones before it, less those of the owners
    # before its own. All arrays are (lookups,) in sorted order, except start.
    is_first = jnp.concatenate([jnp.ones(1, bool), slot[1:] != slot[:-1]])
    is_sent = is_first & (slot < owners.num_owners * owners.num_slots)
    owner = slot // owners.num_slots
    num_before = jnp.cumsum(is_sent, dtype=jnp.int32) - is_sent
    start = jnp.searchsorted(owner, jnp.arange(owners.num_owners + 1, dtype=owner.dtype))
    rank = jnp.where(is_sent, num_before - num_before[start][owner], -1)
    first = lax.cummax(jnp.where(is_first, jnp.arange(slot.size, dtype=jnp.int32), 0))

    def unsort(x: jax.Array) -> jax.Array:
        return jnp.zeros_like(x).at[order].set(x)

    send_list = SendList(
        unsort(owner), unsort(rank), unsort(slot % owners.num_slots), lambda indices: indices
    )
    return send_list, unsort(order[first].astype(jnp.int32))


# The size of what a device sends is fixed when a program is compiled: in one round up to `capacity`
# rows for each owner. A device with more rows for one owner sends them in further rounds.


def in_rounds(
    rows: SparseRows,
    owners: RowOwners,
    density: float,
    axes: Axes,
    send: Callable[[SendList, Loop], jax.Array],
    send_dense: Callable[[], jax.Array],
    num_indices: int = 1,
    dense_cost: float = 1.0,
) -> jax.Array:
    """``send(send_list, loop)`` in the fewest rounds that suffice for all devices of ``axes``.

    ``loop(body, init)`` is ``body(candidates, carry)`` for each round. Where more rounds are needed
    than pay off, ``send_dense()``: it costs ``dense_cost`` times all rows, which in rounds have
    ``num_indices`` each, as long as an element. ``density`` is that of a device's rows.
    """
    num_slots, row_size = owners.num_slots, math.prod(rows.shape[1:])
    num_lists = lax.axis_size(axes) * owners.num_owners
    capacity = list_capacity(min(density, rows.max_rows / rows.shape[0]), num_slots, num_lists)
    break_even = dense_cost * num_slots * row_size / (row_size + num_indices)  # rows per owner

    # Which numbers of rounds are cheaper than the full array.
    worst_rounds = -(-min(rows.max_rows, num_slots) // capacity)
    if worst_rounds * capacity < break_even:
        # Rounds always suffice: the program needs no branch, nor memory, for the full array.
        round_counts = [*(r for r in _ROUND_COUNTS if r < worst_rounds), worst_rounds]
    else:
        round_counts = [r for r in _ROUND_COUNTS if r * capacity < break_even]
    if not round_counts:
        return send_dense()

    # One branch for each of them, in ascending order, then the full array.
    send_list = rows.send_list(owners)

    def loop(num_rounds: int, body: Callable[[jax.Array, Any], Any], init: Any) -> Any:
        def run(i: Any, carry: Any) -> Any:
            return body(_candidates_of_round(send_list, owners.num_owners, capacity, i), carry)

        return lax.fori_loop(0, num_rounds, run, init) if num_rounds > 1 else run(0, init)

    loops = [functools.partial(loop, num_rounds) for num_rounds in round_counts]
    branches = [functools.partial(send, send_list, each) for each in loops]
    if round_counts[-1] != worst_rounds:
        branches.append(functools.partial(send_dense))
    if len(branches) == 1:
        return branches[0]()

    # The first branch that suffices for the longest list of any device.
    needed = lax.pmax(-(-(jnp.max(send_list.rank) + 1) // capacity), axes)
    return lax.switch(jnp.searchsorted(jnp.array(round_counts, jnp.int32), needed), branches)


def _candidates_of_round(
    send_list: SendList, num_owners: int, capacity: int, round_index: Any
) -> jax.Array:
    """The candidates that one round sends, (owners * capacity,); out of range in unused places."""
    owner, rank, size = send_list.owner, send_list.rank, num_owners * capacity
    chosen = (rank >= 0) & (rank // capacity == round_index)
    place = jnp.where(chosen, owner * capacity + rank % capacity, size)
    unused = jnp.full(size, rank.size, jnp.int32)
    return unused.at[place].set(jnp.arange(rank.size, dtype=jnp.int32), mode="drop")
