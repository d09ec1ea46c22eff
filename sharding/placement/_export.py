"""Export: unsharded arrays in host memory."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


def full_tree(tree: Any) -> Any:
    """A tree of global arrays as unsharded NumPy arrays, on every process."""
    return jax.tree.map(_full, tree)


def _full(x: Any) -> np.ndarray:
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_addressable:
        return np.asarray(jax.device_get(x))
    # The devices gather one array at a time, and free it when it is on the host.
    replicated = NamedSharding(sharding.mesh, PartitionSpec())
    return np.asarray(jax.jit(lambda x: x, out_shardings=replicated)(x).addressable_data(0))
