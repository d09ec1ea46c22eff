"""Stacks of layers in host memory, as refs that the layers of a loop read and write.

Refs of JAX have no memory space: a loop that writes layers carries the stacks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from sharding.offload._host_memory import DEVICE, HOST


class HostStack:
    """A stack, a layer of which is loaded when it is first read, after what was stored before."""

    def __init__(self, stack: Any):
        self.begin(stack, [])

    def begin(self, stack: Any, stored: list[Any]) -> None:
        """Begins a layer; ``stored`` are the layers of other stacks that were written before."""
        self.stack, self.stored, self.loaded = stack, stored, None

    def __getitem__(self, layer: jax.Array) -> Any:
        if self.loaded is None:
            layer, *_ = lax.optimization_barrier([layer, *self.stored[-1:]])
            held = lax.dynamic_index_in_dim(self.stack, layer, keepdims=False)
            self.loaded = jax.device_put(held, DEVICE)
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
