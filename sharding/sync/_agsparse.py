"""Rows that are not zero, from all devices to all."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sharding.sync._dense import dense_mean, dense_method
from sharding.sync._interface import (
    Axes,
    GradientSync,
    Method,
    Noise,
    RowMethod,
    check_density,
    leafwise,
    own_piece,
)
from sharding.sync._rows import (
    Entries,
    Owners,
    Rows,
    dense_rows,
    in_rounds,
    looked_up_rows,
    pick,
    repeat,
    room_for,
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

    def mean_of(rows: Rows, axes: Axes) -> jax.Array:
        num, height = lax.axis_size(axes), rows.shape[0]
        owners = Owners(height, 1)
        room = room_for(min(density, rows.limit / height), height, num)

        def send(entries: Entries, rounds: int) -> jax.Array:
            def one(i: Any, total: jax.Array) -> jax.Array:
                picked = pick(entries, 1, room, i)
                row = jnp.take(entries.place, picked, fill_value=height)
                row, values = (
                    lax.all_gather(part, axes, tiled=True) for part in (row, entries.values(picked))
                )
                return total.at[row].add(values.astype(total.dtype) / num, mode="drop")

            kind = jnp.promote_types(rows.dtype, jnp.float32)
            return repeat(rounds, one, jnp.zeros(rows.shape, kind))

        def whole() -> jax.Array:
            return dense_mean(rows.whole(), axes)

        width = math.prod(rows.shape[1:])
        most = 2 * height * width / (width + 1) / num
        return in_rounds(lambda: rows.entries(owners), rows.limit, room, axes, send, whole, most)

    def mean(x: jax.Array, state: Any, axes: Axes, noise: Noise) -> tuple[jax.Array, Any]:
        return mean_of(dense_rows(x), axes), state

    def reduce_rows(
        ids: jax.Array, rows: jax.Array, num_rows: int, axes: Axes, dim: int
    ) -> jax.Array:
        total = mean_of(looked_up_rows(ids, num_rows, rows), axes)
        return own_piece(total, axes, dim) if dim else total

    of_rows = RowMethod(reduce_rows, density)
    method = Method(lambda x: (), mean, is_linear=True, rows=of_rows)
    return leafwise(
        lambda path, x: method if len(x.shape) > 1 and math.prod(x.shape) >= min_size else plain
    )
