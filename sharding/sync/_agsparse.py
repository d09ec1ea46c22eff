"""Rows that are not zero, from all devices to all."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sharding.sync._dense import dense_method
from sharding.sync._interface import (
    Axes,
    GradientSync,
    Method,
    Noise,
    check_density,
    leafwise,
    wide,
)
from sharding.sync._rows import Entries, Owners, in_rounds, pick, repeat, room_for


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

    def mean(x: jax.Array, state: Any, axes: Axes, noise: Noise) -> tuple[jax.Array, Any]:
        num, width = lax.axis_size(axes), x.size // x.shape[0]
        owners = Owners(x.shape[0], 1)
        room = room_for(density, x.shape[0])

        def send(entries: Entries, rounds: int) -> jax.Array:
            def one(i: Any, total: jax.Array) -> jax.Array:
                picked = pick(entries, 1, room, i)
                row = jnp.take(entries.place, picked, fill_value=x.shape[0])
                row, values = (
                    lax.all_gather(part, axes, tiled=True) for part in (row, entries.values(picked))
                )
                return total.at[row].add(values.astype(total.dtype), mode="drop")

            return repeat(rounds, one, jnp.zeros_like(wide(x))) / num

        def whole(rows: jax.Array) -> jax.Array:
            return plain.mean(rows, (), axes, noise)[0]

        most = 2 * x.shape[0] * width / (width + 1) / num
        return in_rounds(x, owners, room, axes, send, whole, most), state

    method = Method(lambda x: (), mean, is_linear=True)
    return leafwise(
        lambda path, x: method if len(x.shape) > 1 and math.prod(x.shape) >= min_size else plain
    )
