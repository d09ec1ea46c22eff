"""Sparse gradient sync by all-gather: every device receives all nonzero rows and adds them."""

import jax
import jax.numpy as jnp
from jax import lax

from sharding.collectives._reduce_scatter import all_gather_concat
from sharding.collectives._sparse_rows import Loop, RowOwners, SendList, SparseRows, in_rounds
from sharding.collectives._sum_dtype import sum_dtype
from sharding.placement._specs import Axes
from sharding.sync._dense import dense_mean, dense_method
from sharding.sync._interface import GradientSync, by_size, check_density, row_method


def agsparse(density: float = 0.01, *, min_size: int = 4096) -> GradientSync:
    """Gathers the nonzero rows of all devices; each device adds them.

    Wire bytes per device: (n - 1) d V (4 D + 4) for V rows of D float32 numbers of which a fraction
    d is nonzero. That is less than ``zen`` sends if there are few devices, and grows with their
    number. Losslessness, rounds, the fallback to full gradients, arguments and errors are those of
    ``zen``.

    Example:
      >>> from sharding import sync
      >>> grad_sync = sync.by_path({"embedding": sync.agsparse(density=0.01)})
    """
    check_density(density)

    def mean(rows: SparseRows, axes: Axes, dim: int | None) -> jax.Array:
        return _gathered_mean(rows, density, axes, dim)

    return by_size("agsparse", row_method(mean, density), dense_method(), min_size, min_dims=2)


def _gathered_mean(rows: SparseRows, density: float, axes: Axes, dim: int | None) -> jax.Array:
    """The mean, or this device's shard of it along dim 0 or 1."""
    num, (num_rows, *_) = lax.axis_size(axes), rows.shape
    shape = list(rows.shape)  # of the result
    if dim is not None:
        shape[dim] //= num
        start = lax.axis_index(axes) * shape[dim]

    def send(send_list: SendList, loop: Loop) -> jax.Array:
        def add_round(chosen: jax.Array, mean: jax.Array) -> jax.Array:
            row = jnp.take(send_list.slot, chosen, fill_value=num_rows)
            parts = (row, send_list.values(chosen))
            row, values = (all_gather_concat(x, axes) for x in parts)  # (devices * capacity, ...)
            if dim == 0:
                row = jnp.where(row < start, num_rows, row - start)
            elif dim == 1:
                values = lax.dynamic_slice_in_dim(values, start, shape[1], 1)
            return mean.at[row].add(values.astype(mean.dtype) / num, mode="drop")

        return loop(add_round, jnp.zeros(shape, sum_dtype(rows.dtype)))

    def send_dense() -> jax.Array:
        return dense_mean(rows.dense(), axes, dim)

    owners = RowOwners(num_rows, 1)  # one list for all devices
    # An all-reduce sends all rows twice, a reduce-scatter once; a list goes to all devices.
    dense_cost = (2 if dim is None else 1) / num
    return in_rounds(rows, owners, density, axes, send, send_dense, dense_cost=dense_cost)
