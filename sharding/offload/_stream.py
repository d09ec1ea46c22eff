"""Evaluates a function whose large inputs are in host memory, few of them on the device at a time.

XLA sees a step as one graph and would load all inputs to the device first. Here the function is
traced and evaluated output by output: the inputs of the first one are loaded, every other output
that needs no more is computed too, new values of host inputs are stored, and the loads for the next
output wait for these stores. A stack of layers is loaded layer by layer, in a loop over the stack,
if every operation on it works on the layers one by one.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from optax_ext.execution_order import Graph, ScheduledRun
from sharding.offload._host_memory import DEVICE, HOST
from sharding.offload._layer_loop import LayerLoop


class StreamedRun(ScheduledRun):
    """A scheduled run whose deferred inputs, and their replacements, are in host memory.

    Args:
      graph: the function; all its equations run on the device.
      inputs: the arrays; an output returns to the memory of the input that it replaces.
      after: arrays that are computed before the first load.
      first_dim_free: whether no mesh axis shards the first dim of an input.

    Warns:
      UserWarning: if each of several roots needs most of what is in host memory.
    """

    def __init__(
        self,
        graph: Graph,
        inputs: Sequence[Any],
        after: Sequence[Any] = (),
        first_dim_free: Callable[[int], bool] = lambda i: True,
    ):
        super().__init__(graph, inputs, after)
        self._first_dim_free = first_dim_free

    def run(self, roots: Sequence[int]) -> list[jax.Array]:
        """Evaluates the graph, one group after the other; returns the outputs."""
        _warn_if_loaded_at_once(self.graph, roots)
        return super().run(roots)

    def run_group(self, outputs: list[int]) -> None:
        """Computes some outputs and stores those that replace host arrays."""
        # Unchanged arrays stay where they are.
        self.outputs |= {j: self.inputs[j] for j in outputs if self.graph.outputs[j] == j}
        outputs = [j for j in outputs if j not in self.outputs]

        loop = LayerLoop.find(self, outputs, self._first_dim_free)
        if loop is None:
            super().run_group(outputs)
            return
        # The loop after what it needs, and after the values of the outputs beside it.
        beside = [j for j in outputs if j not in loop.outputs]
        self.compute([*loop.prerequisites, *(self.graph.outputs[j] for j in beside)])
        self.outputs |= loop.run()
        before = self.barrier
        super().run_group(beside)

        # The next group waits for what both stored.
        stored = tuple(self.outputs[j] for j in loop.outputs if self.replaces_deferred(j))
        self.barrier = (*stored, *(() if self.barrier is before else self.barrier)) or before

    def load(self, arrays: list[Any]) -> list[Any]:
        """Moves arrays to the device."""
        return jax.device_put(arrays, DEVICE)

    def store(self, output: int, x: Any) -> Any:
        """Moves an output to host memory if it replaces an array there."""
        return jax.device_put(x, HOST) if self.replaces_deferred(output) else x


def _warn_if_loaded_at_once(graph: Graph, roots: Sequence[int]) -> None:
    """Warns if each root needs more than half of the bytes in host memory."""
    sizes = {
        i: math.prod(graph.shape(i)) * graph.types[i].dtype.itemsize
        for i, mask in enumerate(graph.reads)
        if mask == 1 << i
    }
    masks = [graph.reads[graph.outputs[j]] for j in roots]
    needed = [sum(sizes[i] for i in sizes if mask >> i & 1) for mask in masks if mask]
    if len(needed) > 2 and 2 * min(needed) > sum(sizes.values()):
        warnings.warn(
            "offload: the update of each parameter needs the state of most others, so all state is "
            "on the device at once. A clip by global norm after the moments has this effect, one "
            "before them does not.",
            stacklevel=2,
        )
