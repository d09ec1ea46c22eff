"""Collectives of lists of arrays whose other dims other mesh axes may shard."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from sharding._types import DType
from sharding.placement._layout import Layout
from sharding.placement._on_mesh import over_other_axes


class ArrayLayout(NamedTuple):
    """How one array is sharded."""

    dim: int  # that ZeRO shards, counted from the end; 0 if the array is unsharded
    spec: PartitionSpec  # on the user's axes of the mesh


def map_arrays(
    layout: Layout,
    fn: Callable[[jax.Array, int], jax.Array],
    xs: Sequence[jax.Array],
    array_layouts: Sequence[ArrayLayout],
) -> list[jax.Array]:
    """``fn(x, dim)`` of every array, where ``fn`` runs collectives over ZeRO's axes."""

    def run(xs: list[jax.Array]) -> list[jax.Array]:
        return [fn(x, array.dim) for x, array in zip(xs, array_layouts, strict=True)]

    specs = [array.spec for array in array_layouts]
    return over_other_axes(layout, run, (specs,), specs)(list(xs))


# --- The dtype of sums over devices and of error-feedback residuals: float32 or wider -------------


def sum_dtype(dtype: DType) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def to_sum_dtype(x: jax.Array) -> jax.Array:
    return x.astype(sum_dtype(x.dtype))
