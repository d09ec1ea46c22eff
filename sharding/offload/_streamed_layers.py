"""A loop over layers whose parameters and state are in host memory, forward and backward.

Each pass loads one layer after the other to the device. Refs have no memory space: layers read and
write ``Cell`` objects in their place, and the loop backward carries the stacks, which it updates.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sharding._types import Array, Tree
from sharding.offload._host_memory import DEVICE


class Cell:
    """Holds a value as a ref does."""

    def __init__(self, value: Any = None):
        self.value = value

    def __getitem__(self, index: Any) -> Any:
        return self.value

    def __setitem__(self, index: Any, value: Any) -> None:
        self.value = value


class _Slice(Cell):
    """A layer of a stack, loaded when it is first read, after what was stored before."""

    def __init__(self, stack: Array, layer: jax.Array, stored: list[Any]):
        super().__init__()
        self.stack, self.layer, self.stored = stack, layer, stored

    def __getitem__(self, index: Any) -> Any:
        if self.value is None:
            layer, *_ = lax.optimization_barrier([self.layer, *self.stored[-1:]])
            held = lax.dynamic_index_in_dim(self.stack, layer, keepdims=False)
            self.value = jax.device_put(held, DEVICE)
        return self.value

    def __setitem__(self, index: Any, value: Any) -> None:
        self.value = value.astype(self.stack.dtype)
        self.new = jax.device_put(self.value, jax.typeof(self.stack).memory_space)
        self.stored.append(self.new)

    def updated(self) -> Any:
        """The stack with the layer that was written."""
        return lax.dynamic_update_index_in_dim(self.stack, self.new, self.layer, 0)


def run_streamed(
    layer: Callable[..., list[Any]],
    read: Callable[[Tree, jax.Array], list[jax.Array]],
    update: Callable[[Tree, jax.Array, list[jax.Array]], None],
    refs: Any,
    token: jax.Array,
    args: tuple[list[Any], list[Any], list[Any]],
    length: int,
    **order: Any,
) -> list[Any]:
    """The results of a loop over layers; ``refs.replaced`` has new stacks once it ran backward.

    Args:
      layer: ``layer(params, consts, carry, xs)``.
      read: of cells and the number of a layer: its parameters.
      update: of cells, the number, and gradients: writes the layer.
      refs: named cells: ``replaced``, stacks by number, and ``squares``, perhaps None.
      token: what is differentiated, so that layers run backward.
      args: the constants, carry and other xs of the loop.
      length: its number of layers.
      **order: of its scan.
    """
    num_carry, numbers = len(args[1]), jnp.arange(length)

    def cells(stacks: dict[int, Any], i: jax.Array, squares: Any) -> Any:
        stored: list[Any] = []
        replaced = {j: _Slice(x, i, stored) for j, x in stacks.items()}
        squares = None if squares is None else Cell(squares)
        return refs._replace(replaced=replaced, squares=squares)

    def forward(stacks: Any, token: jax.Array, consts: Any, carry: Any, xs: Any) -> Any:
        def step(carry: list[Any], x: Any) -> tuple[list[Any], Any]:
            i, rest = x
            out = layer(read(cells(stacks, i, None), i), consts, carry, rest)
            return out[:num_carry], (carry, out[num_carry:])

        carry, (entered, outs) = lax.scan(step, carry, (numbers, xs), **order)
        return [*carry, *outs], (stacks, consts, entered, xs)

    def backward(residuals: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        stacks, consts, entered, xs = residuals

        def step(carried: Any, x: Any) -> tuple[Any, Any]:
            stacks, squares, after, sums = carried
            i, carry, rest, of_outs = x
            own = cells(stacks, i, squares)
            outs, vjp = jax.vjp(layer, read(own, i), consts, carry, rest)
            grads, more, before, of_rest = vjp(_with_float0([*after, *of_outs], outs))
            update(own, i, grads)
            stacks = {j: x.updated() for j, x in own.replaced.items()}
            sums = [a if a is None else a + g for a, g in zip(sums, more, strict=True)]
            return (stacks, own.squares and own.squares.value, _real(before), sums), _real(of_rest)

        after, of_outs = _real(cotangents[:num_carry]), _real(cotangents[num_carry:])
        zeros = [x if x is None else jnp.zeros_like(x) for x in _real(consts)]
        start = stacks, refs.squares and refs.squares.value, after, zeros
        each, back = (numbers, entered, xs, of_outs), {"reverse": not order["reverse"]}
        (new, squares, after, sums), of_xs = lax.scan(step, start, each, **order | back)
        for j, x in new.items():
            refs.replaced[j].value = x
        if refs.squares is not None:
            refs.squares.value = squares
        return None, jnp.zeros(()), sums, after, of_xs

    call = jax.custom_vjp(lambda *args: forward(*args)[0])
    call.defvjp(forward, backward)
    return call({j: x.value for j, x in refs.replaced.items()}, token, *args)


def _real(xs: list[Any]) -> list[Any]:
    """Arrays that have cotangents, or these; None in place of integers and keys."""
    return [x if x is not None and jnp.issubdtype(x.dtype, jnp.inexact) else None for x in xs]


def _with_float0(cotangents: list[Any], outs: list[Any]) -> list[Any]:
    pairs = zip(cotangents, outs, strict=True)
    return [np.zeros(x.shape, jax.dtypes.float0) if g is None else g for g, x in pairs]
