"""Sparse gradient sync by owners: only nonzero rows are sent, and nothing is lost."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sharding.collectives._reduce_scatter import all_gather_concat
from sharding.collectives._sparse_rows import (
    Loop,
    RowHash,
    RowOwners,
    SendList,
    SparseRows,
    in_rounds,
    list_capacity,
)
from sharding.collectives._sum_dtype import sum_dtype
from sharding.placement._specs import Axes
from sharding.sync._dense import dense_mean, dense_method
from sharding.sync._interface import GradientSync, by_size, check_density, row_method


def zen(
    density: float = 0.01,
    *,
    union_density: float | None = None,
    min_size: int = 4096,
    seed: int = 0,
) -> GradientSync:
    r"""Sends each nonzero row to the device that owns it, and the nonzero sums back to all.

    A hash that all devices share, a permutation, distributes rows evenly over owners (*push*).
    Owners add them up and send all devices the nonzero sums, with one bit per row that flags these
    (*pull*). How much is sent is fixed when a program is compiled, from the expected density.
    Devices with more rows for one owner send them in 2 or 4 rounds; if these do not suffice, or
    would not send less, all devices send the full gradient. The mean equals that of ``dense`` up to
    the order of sums.

    A reduce-scatter (ZeRO) needs no pull. If rows are sharded, each device owns those of its shard,
    unpermuted; if another dim is sharded, each device receives its shard of every row.

    Wire bytes per device: (n - 1) / n times the following, with d the density, d_n that of the sum,
    V rows of D float32 numbers,

    .. math::

      \underbrace{d V (4 D + 4)}_{\text{push}} +
      \underbrace{d_n V \, 4 D + V / 8}_{\text{pull}}

    and a margin for the chance in a hash, :math:`\sqrt{2 \ln 100 n^2}` standard deviations of the
    rows that a device has for an owner: the longest list exceeds it in one step of 100.

    Args:
      density: the fraction of rows that are nonzero on one device: for an embedding, the distinct
        tokens of a batch over the vocabulary.
      union_density: the same of the sum over devices; None for ``density`` times the number of
        devices, at most 1, which is exact if no row is nonzero on two devices.
      min_size: smaller arrays, and arrays of one dim, are sent in full.
      seed: of the hash.

    Raises:
      ValueError: if a density is not above 0 and at most 1; in ``init``, if all arrays are small.

    Example:
      >>> from sharding import sync
      >>> grad_sync = sync.by_path({"embedding": sync.zen(density=0.01)})

    References:
      Wang, Xu, Xi, Wang, Shrivastava, Ng: ZEN: Empowering Distributed Training with Sparsity-driven
      Data Synchronization, OSDI 2025, arXiv 2309.13254.
    """
    check_density(density)
    if union_density is not None:
        check_density(union_density, "union_density")

    def mean(rows: SparseRows, axes: Axes, dim: int | None) -> jax.Array:
        """The full mean, pushed to permuted owners and pulled; a push alone along dim 0 or 1."""
        num, num_rows = lax.axis_size(axes), rows.shape[0]
        # Sharded rows have their shard's owner; along another dim one list goes to all devices.
        hashed = RowHash(num_rows, seed) if dim is None else None
        owners = RowOwners(num_rows, 1 if dim else num, hashed)

        def send(send_list: SendList, loop: Loop) -> jax.Array:
            if dim:
                return _push_columns(rows, send_list, loop, axes) / num
            total, touched = _push(rows, send_list, loop, owners, axes)
            if dim == 0:
                return total / num
            own_density = min(density, rows.max_rows / num_rows)
            sum_density = min(1.0, num * own_density) if union_density is None else union_density
            capacity = list_capacity(sum_density, owners.num_slots, num)
            return _pull((total / num).astype(rows.dtype), touched, owners, capacity, axes)

        def send_dense() -> jax.Array:
            full = dense_mean(rows.dense(), axes, dim)
            return full.astype(rows.dtype) if dim is None else full

        return in_rounds(rows, owners, density, axes, send, send_dense, num if dim else 1)

    method = row_method(mean, density, flat=True)
    return by_size("zen", method, dense_method(), min_size, min_dims=2)


def _push(
    rows: SparseRows, send_list: SendList, loop: Loop, owners: RowOwners, axes: Axes
) -> tuple[jax.Array, jax.Array]:
    """Sends rows to their owners: the sums in this device's slots, and which slots got a row."""

    def add_round(chosen: jax.Array, carry: tuple[jax.Array, jax.Array]) -> Any:
        total, touched = carry
        slot = jnp.take(send_list.slot, chosen, fill_value=owners.num_slots)
        slot, values = (  # (owners * capacity, ...)
            lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)
            for x in (slot, send_list.values(chosen))
        )
        total = total.at[slot].add(values.astype(total.dtype), mode="drop")
        return total, touched.at[slot].set(True, mode="drop")

    total = jnp.zeros((owners.num_slots, *rows.shape[1:]), sum_dtype(rows.dtype))
    return loop(add_round, (total, jnp.zeros(owners.num_slots, bool)))


def _push_columns(rows: SparseRows, send_list: SendList, loop: Loop, axes: Axes) -> jax.Array:
    """Sends every device its shard of the second dim of all rows: the sum (rows, shard, ...)."""
    num, (num_rows, width, *others) = lax.axis_size(axes), rows.shape
    shard = (width // num, *others)  # of one row

    def add_round(chosen: jax.Array, total: jax.Array) -> jax.Array:
        slot = jnp.take(send_list.slot, chosen, fill_value=num_rows)
        values = send_list.values(chosen).reshape(chosen.size, num, *shard)  # chosen: (capacity,)
        slot = all_gather_concat(slot, axes)  # (devices * capacity,)
        # The devices' dim is scattered; received rows are concatenated along the first.
        values = lax.all_to_all(values, axes, split_axis=1, concat_axis=0, tiled=True)
        values = values.reshape(-1, *shard).astype(total.dtype)
        return total.at[slot].add(values, mode="drop")

    return loop(add_round, jnp.zeros((num_rows, *shard), sum_dtype(rows.dtype)))


def _pull(
    total: jax.Array, touched: jax.Array, owners: RowOwners, capacity: int, axes: Axes
) -> jax.Array:
    """Gathers the sums from their owners, (rows, ...) in the order of the array.

    This device owns ``total`` (slots, ...), of which those ``touched`` (slots,) are nonzero. An
    owner with more than ``capacity`` of them makes all owners send all slots.
    """
    slot_of_row = owners.slot_of(jnp.arange(owners.num_rows, dtype=jnp.int32))  # (rows,)
    num, num_slots = owners.num_owners, owners.num_slots

    all_slots = functools.partial(_pull_all_slots, axes, total, slot_of_row)

    def rows_alone() -> jax.Array:
        # Send: the touched rows, moved to the front, and a bit for every slot.
        rank = jnp.cumsum(touched, dtype=jnp.int32) - 1  # (slots,)
        at = jnp.full(capacity, num_slots, jnp.int32)
        slots = jnp.arange(num_slots, dtype=jnp.int32)
        at = at.at[jnp.where(touched, rank, capacity)].set(slots, mode="drop")
        values = all_gather_concat(jnp.take(total, at, axis=0, fill_value=0), axes)
        bits = all_gather_concat(jnp.packbits(touched), axes)
        bits = bits.reshape(num, -1)  # (owners, slots / 8)

        # Receive: values are (owners * capacity, ...). Counting bits finds each slot in them.
        flags = jnp.unpackbits(bits, axis=1, count=num_slots).astype(bool)  # (owners, slots)
        rank = jnp.cumsum(flags, 1, dtype=jnp.int32) - 1
        owner = jnp.arange(num, dtype=jnp.int32)[:, None]
        index = jnp.where(flags, rank + capacity * owner, num * capacity).ravel()
        return jnp.take(values, jnp.take(index, slot_of_row), axis=0, fill_value=0)

    # In bits per owner: rows with a flag per slot have to be fewer than all slots.
    width = total.size // num_slots
    if capacity * width * 32 + num_slots >= num_slots * width * 32:
        return all_slots()
    most = lax.pmax(jnp.sum(touched, dtype=jnp.int32), axes)
    return lax.cond(most <= capacity, rows_alone, all_slots)


def _pull_all_slots(axes: Axes, total: jax.Array, slot_of_row: jax.Array) -> jax.Array:
    return jnp.take(all_gather_concat(total, axes), slot_of_row, axis=0)
