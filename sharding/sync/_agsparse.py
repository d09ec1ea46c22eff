"""SparseRows that are not zero, from all devices to all."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sharding.collectives._all_gather import all_gather_concat
from sharding.collectives._sparse_rows import (
    RowOwners,
    SendList,
    SparseRows,
    along_dim,
    candidates_of_round,
    for_rounds,
    in_rounds,
    list_capacity,
    rows_of_array,
    rows_of_lookups,
)
from sharding.placement._specs import Axes
from sharding.sync._dense import dense_mean, dense_method, dense_piece
from sharding.sync._interface import (
    GradientSync,
    Method,
    Noise,
    RowMethod,
    check_density,
    leafwise,
)


def agsparse(density: float = 0.01, *, min_size: int = 4096) -> GradientSync:
    r"""Gathers from all devices the rows that are not zero; each device adds them.

    On the wire (n - 1) d V (4 D + 4) bytes for V rows of D float32 numbers of which a part d is not
    zero: less than ``zen`` where devices are few, and growing with their number. Losslessness,
    rounds and the fallback to whole gradients are those of ``zen``.

    Args:
      density: what part of its rows are not zero on one device.
      min_size: smaller arrays, and arrays of one dim, are sent whole.

    Returns:
      A ``GradientSync`` without state.

    Raises:
      ValueError: if the density is not above 0 and at most 1.

    Example:
      >>> from sharding import sync
      >>> exchange = sync.by_path({"embedding": sync.agsparse(density=0.01)})
    """
    check_density(density)
    plain = dense_method()

    def reduced(rows: SparseRows, axes: Axes, dim: int | None) -> jax.Array:
        """The mean, or this device's piece of it along dim 0 or 1."""
        num, (height, *_) = lax.axis_size(axes), rows.shape
        owners = RowOwners(height, 1)
        room = list_capacity(min(density, rows.max_rows / height), height, num)
        shape = list(rows.shape)
        if dim is not None:
            shape[dim] //= num
            first = lax.axis_index(axes) * shape[dim]

        def send(send_list: SendList, rounds: int) -> jax.Array:
            def one(i: Any, total: jax.Array) -> jax.Array:
                picked = candidates_of_round(send_list, 1, room, i)
                row = jnp.take(send_list.slot, picked, fill_value=height)
                row, values = (
                    all_gather_concat(part, axes) for part in (row, send_list.values(picked))
                )
                if dim == 0:
                    row = jnp.where(row < first, height, row - first)
                elif dim == 1:
                    values = lax.dynamic_slice_in_dim(values, first, shape[1], 1)
                return total.at[row].add(values.astype(total.dtype) / num, mode="drop")

            kind = jnp.promote_types(rows.dtype, jnp.float32)
            return for_rounds(rounds, one, jnp.zeros(shape, kind))

        def whole() -> jax.Array:
            found = rows.dense()
            return dense_mean(found, axes) if dim is None else dense_piece(found, axes, dim)

        width = math.prod(rows.shape[1:])
        most = (2 if dim is None else 1) * height * width / (width + 1) / num
        return in_rounds(
            lambda: rows.send_list(owners), rows.max_rows, room, axes, send, whole, most
        )

    def mean(x: jax.Array, state: Any, axes: Axes, noise: Noise) -> tuple[jax.Array, Any]:
        return reduced(rows_of_array(x), axes, None), state

    def piece(
        x: jax.Array, state: Any, axes: Axes, noise: Noise, dim: int
    ) -> tuple[jax.Array, Any]:
        return along_dim(x, dim, lambda x, dim: reduced(rows_of_array(x), axes, dim)), state

    def reduce_rows(
        ids: jax.Array, rows: jax.Array, num_rows: int, axes: Axes, dim: int
    ) -> jax.Array:
        def of(x: jax.Array, dim: int | None) -> jax.Array:
            return reduced(rows_of_lookups(ids, num_rows, x), axes, dim)

        return along_dim(rows, dim, of) if dim else of(rows, None)

    method = Method(lambda x: (), mean, piece, is_linear=True, rows=RowMethod(reduce_rows, density))
    return leafwise(
        lambda path, x: method if len(x.shape) > 1 and math.prod(x.shape) >= min_size else plain
    )
