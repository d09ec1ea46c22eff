"""Whole arrays in host memory."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


def full_tree(tree: Any) -> Any:
    """A tree of global arrays as NumPy arrays, whole on every process."""
    return jax.tree.map(_full, tree)


def _full(x: Any) -> np.ndarray:
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_addressable:
        return np.asarray(jax.device_get(x))
    # One array at a time is whole on the devices, and freed when it is on the host.
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    return np.asarray(jax.jit(lambda x: x, out_shardings=whole)(x).addressable_data(0))
