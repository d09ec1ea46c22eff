"""Tables that a loss looks up rows of: only rows, and gradients of rows, cross the wire."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from sharding.collectives._reduce_scatter import all_gather_concat
from sharding.collectives._sparse_rows import (
    Loop,
    RowHash,
    RowOwners,
    SendList,
    SparseRows,
    in_rounds,
    unique_lookups,
)
from sharding.loss._declared_rows import keeps_rows_apart
from sharding.loss._marks import with_handles
from sharding.placement._on_mesh import over_other_axes
from sharding.placement._specs import of_last_dims
from sharding.step._gather_and_reduce import DeviceRule, ParamHandle, gather


def lookup(table: Any, ids: jax.Array, *, shuffled: bool = False) -> jax.Array:
    """Rows of a table, such as token embeddings; in a loss of ``Zero``, sparse on the wire.

    Equals ``jnp.take(table, ids, axis=0)``, whose derivative is a gradient of the table's size,
    nearly all zeros. If ``Zero(sync=...)`` syncs the table by rows (``sync.zen``,
    ``sync.agsparse``) and the loss uses it in no other way, only the rows that were looked up are
    synchronized, each once, and at stage 3 fetched. With :math:`T_1` distinct rows on a device, and
    D numbers a row, a device sends and receives about :math:`T_1 D` numbers for the gradient, and
    as many again at stage 3. Buffers are sized when the step is compiled, from the number of ids
    and the sync's density; more rows are sent in several rounds, or the full table is.

    The full gradient of a table is synchronized, with a warning, if the loss uses the table in
    another way as well (tied to the output, gathered, cast), or looks it up in a branch, in a loop
    that does more than look up, or within ``jax.vmap``: batch the ids.

    Args:
      table: (rows, ...), as the loss got it.
      ids: integers of any shape; negative ones count from the end. Rows outside the table are NaN.
      shuffled: the table is in the order of ``shuffle_rows``, which spreads frequent rows, in most
        vocabularies neighbors, over the devices.

    Returns:
      An array of the shape of ``ids`` and that of a row.

    Raises:
      ValueError: if ``ids`` are no integers, or the table has no rows.

    Example:
      >>> import jax.numpy as jnp, sharding as shd
      >>> table = jnp.arange(10.0).reshape(5, 2)
      >>> shd.lookup(shd.shuffle_rows(table), jnp.array([3, 0]), shuffled=True).tolist()
      [[6.0, 7.0], [0.0, 1.0]]
    """
    ids = jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"lookup: ids must be integers, got {ids.dtype}.")
    table = jnp.asarray(table)
    shape = table.shape
    if not shape or not shape[0]:
        raise ValueError(f"lookup: the table, of shape {shape}, has no rows.")
    if not ids.size:
        return jnp.zeros((*ids.shape, *shape[1:]), table.dtype)
    num_rows = shape[0]
    at = ids.astype(jnp.int32 if ids.dtype.itemsize < 4 else ids.dtype)
    at = jnp.where(at < 0, at + num_rows, at)
    inside = (at >= 0) & (at < num_rows)
    at = at.astype(jnp.int32)
    if shuffled:  # by a loop that ends for all numbers at once
        shuffle = RowHash(num_rows).apply
        shuffle = keeps_rows_apart(shuffle, in_dims=0, out_dims=0) if at.ndim else shuffle
        at = shuffle(jnp.where(inside, at, 0))
    at = jnp.where(inside, at, num_rows).ravel()
    rows = with_handles(_rows_of, table, at, by_rows=True)
    return rows.reshape(*ids.shape, *rows.shape[1:])


def _rows_of(table: Any, at: jax.Array) -> jax.Array:
    if not isinstance(table, ParamHandle):
        return jnp.take(table, at, axis=0)
    call = _Lookup(table.rule, table.tap.dtype, table.shape[0])
    return _table_rows(call, table.held, table.tap, at)


def shuffle_rows(table: jax.Array) -> jax.Array:
    """Permutes a table (rows, ...) into the order that ``lookup(..., shuffled=True)`` expects.

    Example:
      >>> import jax.numpy as jnp, sharding as shd
      >>> table = jnp.arange(8.0)[:, None]
      >>> shuffled = shd.shuffle_rows(table)
      >>> bool((shuffled == table).all()), bool((shd.unshuffle_rows(shuffled) == table).all())
      (False, True)
    """
    size = table.shape[0]
    return jnp.take(table, RowHash(size).invert(jnp.arange(size, dtype=jnp.int32)), axis=0)


def unshuffle_rows(table: jax.Array) -> jax.Array:
    """Undoes ``shuffle_rows`` of a ``table``."""
    size = table.shape[0]
    return jnp.take(table, RowHash(size).apply(jnp.arange(size, dtype=jnp.int32)), axis=0)


class _Lookup(NamedTuple):
    """The static arguments of a lookup."""

    rule: DeviceRule
    dtype: Any  # of the gradient
    num_rows: int  # of the unsharded table

    def on_columns(self, fn: Callable[..., jax.Array], x: jax.Array, ids: jax.Array) -> jax.Array:
        """``fn(call, x, ids)`` of each device's columns; not if other axes shard the rows."""
        rule = self.rule
        columns = of_last_dims(rule.entries, x.ndim)
        if columns[0] is not None:
            return fn(self, x, ids)
        own = self._replace(rule=rule._replace(entries=(None,) * x.ndim))
        run = functools.partial(fn, own)
        return over_other_axes(rule.layout, run, (columns, PartitionSpec()), columns)(x, ids)


def _reduce_columns(call: _Lookup, grad: jax.Array, ids: jax.Array) -> jax.Array:
    rule = call.rule
    assert rule.rows is not None
    return rule.rows.reduce(ids, grad, call.num_rows, rule.layout.axes, rule.dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _table_rows(call: _Lookup, held: jax.Array, tap: jax.Array, ids: jax.Array) -> jax.Array:
    """The rows: of the table that is here, at stage 3 from the devices that own them."""
    del tap
    if not call.rule.gathers:
        return jnp.take(held, ids, axis=0)
    return call.on_columns(_fetch_columns, held, ids)


def _table_rows_forward(call: _Lookup, held: jax.Array, tap: jax.Array, ids: jax.Array) -> Any:
    return _table_rows(call, held, tap, ids), ids  # with its rule, for derivatives within


def _table_rows_backward(call: _Lookup, ids: jax.Array, grad: jax.Array) -> Any:
    rule = call.rule
    with jax.named_scope("reduce_scatter"):  # this device's shard of the table's gradient
        mean = call.on_columns(_reduce_columns, grad.astype(rule.reduce_dtype or call.dtype), ids)
        return None, (mean * lax.axis_size(rule.layout.axes)).astype(call.dtype), None


_table_rows.defvjp(_table_rows_forward, _table_rows_backward)


# --- At stage 3: rows come from the devices that own them -----------------------------------------


def _fetch_columns(call: _Lookup, shard: jax.Array, ids: jax.Array) -> jax.Array:
    rule = call.rule
    assert rule.rows is not None
    axes, dim = rule.layout.axes, rule.dim % shard.ndim
    num, shard = lax.axis_size(axes), shard.astype(rule.dtype)
    # If another dim than the rows is sharded, every device holds a shard of every row.
    owners = RowOwners(call.num_rows, 1 if dim else num)
    firsts, first = unique_lookups(ids, owners)
    row_shape = ParamHandle(shard, shard, rule).shape[1:]

    def fetch_unique(send_list: SendList, loop: Loop) -> jax.Array:
        def one_round(picked: jax.Array, rows: jax.Array) -> jax.Array:
            # Send slots to the owners of the rows ...
            slots = jnp.take(send_list.slot, picked, fill_value=owners.num_slots)
            if dim:
                slots = all_gather_concat(slots, axes)
            else:
                slots = lax.all_to_all(slots, axes, split_axis=0, concat_axis=0, tiled=True)
            # ... which send the rows, or their shards of the rows, back.
            sent = jnp.take(shard, slots, axis=0, fill_value=0)
            fetched = lax.all_to_all(sent, axes, split_axis=0, concat_axis=dim, tiled=True)
            return rows.at[picked].set(fetched, mode="drop")

        rows = loop(one_round, jnp.zeros((ids.size, *row_shape), shard.dtype))  # at the firsts
        inside = ids < call.num_rows  # (lookups,)
        return jnp.take(rows, jnp.where(inside, first, ids.size), axis=0)

    def gather_table() -> jax.Array:
        return jnp.take(gather(ParamHandle(shard, shard, rule._replace(bits=None))), ids, axis=0)

    shape, max_rows = (call.num_rows, *row_shape), min(ids.size, call.num_rows)
    rows = SparseRows(shape, shard.dtype, max_rows, lambda owners: firsts, gather_table)
    args, indices = (rows, owners, rule.rows.density, axes), num if dim else 1
    with jax.named_scope("gather"):
        return in_rounds(*args, fetch_unique, gather_table, indices)
