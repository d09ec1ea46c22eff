"""Which arrays are placed in host memory, and their shardings there."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

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


def copy_to(layout: Any, tree: Tree, shardings: Tree) -> Any:
    """As ``Layout.copy``; what is moved to host memory does not pass through a program."""
    leaves, treedef = jax.tree.flatten(tree)
    targets = treedef.flatten_up_to(shardings)
    hosted = [to.memory_kind == MEMORY_KIND for to in targets]
    if not any(hosted) or any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        return layout.copy(tree, shardings)
    others = [(x, to) for x, to, host in zip(leaves, targets, hosted, strict=True) if not host]
    copied = iter(layout.copy([x for x, _ in others], [to for _, to in others]))

    def copy(x: Array, to: Any) -> Any:
        return jax.device_put(jax.device_put(x, to), to, may_alias=False)

    pairs = zip(leaves, targets, hosted, strict=True)
    return treedef.unflatten(copy(x, to) if host else next(copied) for x, to, host in pairs)


# --- Stacks of layers there, as refs that the layers of a loop read and write ---------------------


def load_layer(stack: Any, layer: jax.Array) -> Any:
    """One layer of a stack, on the device."""
    held = lax.dynamic_index_in_dim(stack, layer, keepdims=False)
    return jax.device_put(held, DEVICE) if on_host(stack) else held


class HostStack:
    """A stack, a layer of which is loaded when it is first read, after what was stored before.

    Refs of JAX have no memory space: a loop that writes layers carries the stacks.
    """

    def __init__(self, stack: Any):
        self.begin(stack, [])

    def begin(self, stack: Any, stored: list[Any]) -> None:
        """Begins a layer; ``stored`` are the layers of other stacks that were written before."""
        self.stack = stack
        self.stored = stored
        self.loaded = None

    def __getitem__(self, layer: jax.Array) -> Any:
        if self.loaded is None:
            layer, *_ = lax.optimization_barrier([layer, *self.stored[-1:]])
            self.loaded = load_layer(self.stack, layer)
        return self.loaded

    def __setitem__(self, layer: jax.Array, value: Any) -> None:
        # Else XLA computes what reads it from the layer before it, which stays in memory.
        self.loaded = lax.optimization_barrier(value.astype(self.stack.dtype))
        new = jax.device_put(self.loaded, HOST)
        self.stored.append(new)
        self.stack = lax.dynamic_update_index_in_dim(self.stack, new, layer, 0)


def scan_streamed(
    stacks: Sequence[HostStack],
    step: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any,
    writes: bool,
    **options: Any,
) -> tuple[Any, Any]:
    """``lax.scan`` over layers, which read these stacks, and write them if ``writes``."""
    held = [stack.stack for stack in stacks]

    def streamed(carry: Any, x: Any) -> tuple[Any, Any]:
        carry, carried = carry
        stored: list[Any] = []
        for stack, own in zip(stacks, carried if writes else held, strict=True):
            stack.begin(own, stored)
        carry, out = step(carry, x)
        return (carry, [stack.stack for stack in stacks] if writes else []), out

    (carry, carried), out = lax.scan(streamed, (carry, held if writes else []), xs, **options)
    for stack, own in zip(stacks, carried if writes else held, strict=True):
        stack.begin(own, [])
    return carry, out
