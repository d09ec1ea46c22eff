"""Values of several micro-batches of a loss, stacked, and sums of their gradients."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Microbatches(NamedTuple):
    """Micro-batches, whose values are stacked if there are several."""

    number: int
    sum_dtype: Callable[[Any], Any]  # in which gradients of a dtype are accumulated
    in_turn: bool  # whether one runs forward before the next does

    @property
    def dims(self) -> int:
        """How many dims of stacked values are before those of one."""
        return int(self.number > 1)

    def each(self, one: Callable[[Any], Any], given: Any) -> Any:
        """The results of each micro-batch, stacked."""
        if self.number == 1:
            return one(given)
        return lax.scan(lambda _, x: (None, one(x)), None, given, self.number)[1]

    def zeros(self, x: jax.Array) -> jax.Array:
        """The start of a sum of gradients of an array."""
        return jnp.zeros_like(x, None if self.number == 1 else self.sum_dtype(x.dtype))

    def run(self, one: Callable[[Any], tuple[Any, Any]], each: Any, zeros: Any) -> tuple[Any, Any]:
        """The sums of gradients, which start as ``zeros``, and the other results, stacked."""
        if self.number == 1:
            return one(each)

        def step(sums: Any, x: Any) -> tuple[Any, Any]:
            grads, out = one(x)
            return jax.tree.map(_added, sums, grads), out

        # Without the barrier XLA makes all zeros of the same shape at once, before the first sum.
        zero, each = lax.optimization_barrier((jnp.zeros((), jnp.int8), each))
        return lax.scan(step, jax.tree.map(lambda x: x + zero.astype(x.dtype), zeros), each)


def _added(total: jax.Array, x: jax.Array) -> jax.Array:
    return total + x.astype(total.dtype)
