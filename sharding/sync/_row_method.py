"""Methods that send few rows of a gradient: of an array, or of looked-up rows of a table."""

from collections.abc import Callable

import jax

from sharding.collectives._sparse_rows import SparseRows, along_dim, rows_of_array, rows_of_lookups
from sharding.placement._specs import Axes
from sharding.sync._interface import Method, RowMethod, StepContext, stateless


def row_method(
    mean: Callable[[SparseRows, Axes, int | None], jax.Array], density: float, *, flat: bool = False
) -> Method:
    """A stateless method of ``mean(rows, axes, dim)``; ``flat``: for full means rows are vectors.

    ``dim`` is None for the full mean, or 0 or 1: other dims to shard are moved to 1.
    """

    def mean_of(
        x: jax.Array, rows_of: Callable[..., SparseRows], axes: Axes, dim: int
    ) -> jax.Array:
        if not dim:
            return mean(rows_of(x), axes, None)
        return along_dim(x, dim, lambda x, dim: mean(rows_of(x), axes, dim))

    def of_array(x: jax.Array, axes: Axes, context: StepContext, dim: int) -> jax.Array:
        del context
        if flat and not dim:
            return mean(rows_of_array(x.reshape(x.shape[0], -1)), axes, None).reshape(x.shape)
        return mean_of(x, rows_of_array, axes, dim)

    def of_lookups(ids: jax.Array, x: jax.Array, num_rows: int, axes: Axes, dim: int) -> jax.Array:
        return mean_of(x, lambda x: rows_of_lookups(ids, num_rows, x), axes, dim)

    return stateless(of_array, is_linear=True, rows=RowMethod(of_lookups, density))
