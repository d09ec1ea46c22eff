"""Which arrays are placed in host memory, and their shardings there."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from sharding._types import Array, Tree

MEMORY_KIND = "pinned_host"
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def on_host(x: Array) -> bool:
    return jax.typeof(x).memory_space == HOST


def is_offloaded(x: Array, offload: str | None, min_size: int) -> bool:
    """Whether an array of optimizer state, or with ``"all"`` of parameters, is in host memory."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.extended)
    if offload is None or is_key or math.prod(x.shape) < min_size:
        return False
    # Of "all", stacks of matrices are streamed: XLA for TPUs slices none of vectors there.
    return offload == "optimizer" or len(x.shape) > 2


def host_shardings(shardings: Tree, tree: Tree, offload: str, min_size: int) -> Tree:
    def moved(sharding: Any, x: Array) -> Any:
        return host_sharding(sharding) if is_offloaded(x, offload, min_size) else sharding

    return jax.tree.map(moved, shardings, tree)


def host_sharding(sharding: Any) -> Any:
    """The sharding in host memory; devices without it raise."""
    moved = sharding.with_memory_kind(MEMORY_KIND)
    if moved.memory_kind != MEMORY_KIND:
        kinds = ", ".join(sorted({d.device_kind for d in sharding.device_set}))
        raise ValueError(
            f"offload needs devices with {MEMORY_KIND} memory, got {kinds} without it. "
            "Compile-only GPU targets do not report memory kinds and are rejected: use real GPUs, "
            "a compile-only TPU target, or no offload (docs: how_to/offload)."
        )
    return moved
