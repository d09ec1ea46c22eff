"""Runs a function whose large inputs lie in the host's memory, few of them on the device at a time.

XLA sees a step as one graph, and left alone brings all inputs to the device first. Here the
function is traced, and run output by output: what the first one needs is loaded, with it every
other output is computed that needs no more, what replaces a host input goes back, and the loads for
the next output wait for that. A stack of layers is run layer by layer, in a loop over the stack,
where each operation is found to work on the layers one by one.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext.schedule import Equation, Graph, ScheduledRun
from sharding.offload._layer_rules import WHOLE, bind_layer, is_stack, layer_of, operand_dims

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def on_host(x: Any) -> bool:
    """Whether an array lies in the host's memory."""
    return jax.typeof(x).memory_space == HOST


def _warn_if_at_once(graph: Graph, roots: Sequence[int]) -> None:
    hosted = [i for i, mask in enumerate(graph.reads) if mask == 1 << i]
    sizes = {i: math.prod(graph.shape(i)) * graph.types[i].dtype.itemsize for i in hosted}
    masks = [graph.reads[graph.outputs[j]] for j in roots]
    needed = [sum(sizes[i] for i in hosted if mask >> i & 1) for mask in masks if mask]
    if len(needed) > 2 and 2 * min(needed) > sum(sizes.values()):
        warnings.warn(
            "offload: each parameter's update depends on the state of most others (such as a clip "
            "by global norm after the moments), so that all of it is on the device at once.",
            stacklevel=2,
        )


class Streamed(ScheduledRun):
    """A scheduled run whose deferred inputs, and their replacements, are in host memory.

    Args:
      graph: the function; all its equations run on the device.
      inputs: the arrays; an output returns to the memory of the input that it replaces.
      after: arrays that must be there before the first load.
      first_dim_free: whether the first dim of an input is in one piece on every device.

    Warns:
      UserWarning: if every one of several roots needs most of what is in the host's memory.
    """

    def __init__(
        self,
        graph: Graph,
        inputs: Sequence[Any],
        after: Sequence[Any] = (),
        first_dim_free: Callable[[int], bool] = lambda i: True,
    ):
        super().__init__(graph, inputs, after)
        self.first_dim_free = first_dim_free

    def run(self, roots: Sequence[int]) -> list[Any]:
        """Runs the graph, one group after the other; returns the outputs."""
        _warn_if_at_once(self.graph, roots)
        return super().run(roots)

    def run_group(self, outputs: list[int]) -> None:
        """Computes some outputs; those that replace an array of the host go there."""
        # What is not changed is not touched.
        same = [j for j in outputs if self.graph.outputs[j] == j]
        self.outputs |= {j: self.inputs[j] for j in same}
        outputs = [j for j in outputs if j not in same]
        loop = _Loop.find(self, outputs)
        if loop is None:
            super().run_group(outputs)
            return
        rest = [j for j in outputs if j not in loop.outputs]
        self.compute([*loop.whole, *(self.graph.outputs[j] for j in rest)])
        self.outputs |= loop.run()
        before = self.barrier
        super().run_group(rest)
        stored = tuple(self.outputs[j] for j in loop.outputs if self.replaces_deferred(j))
        self.barrier = (*stored, *(() if self.barrier is before else self.barrier)) or before

    def load(self, arrays: list[Any]) -> list[Any]:
        """From the host."""
        return jax.device_put(arrays, DEVICE)

    def store(self, output: int, x: Any) -> Any:
        """To the host, if it came from there."""
        return jax.device_put(x, HOST) if self.replaces_deferred(output) else x


# --- Layer by layer -------------------------------------------------------------------------------


class _CannotCutError(Exception):
    """A part of a graph does not work on the layers of a stack one by one."""


class _Loop:
    """A part of a graph that does the same to each layer of a stack, as a loop over the layers.

    Attributes:
      outputs: those that it makes.
      whole: values that must have been computed before.
    """

    def __init__(self, run: Streamed, outputs: list[int], stacks: list[int]):
        """Finds what to run in the loop: backward from the outputs, each cut along dim 0.

        Raises:
          _CannotCutError: if one that depends on the stacks must see several layers at once.
        """
        graph = run.graph
        self._run, self.outputs = run, outputs
        self._length = graph.shape(stacks[0])[0]
        needs_stacks = sum(1 << i for i in stacks)
        self._homes = [self._home(j) for j in outputs]
        self._equations: list[tuple[Equation, int, list[int]]] = []
        self.whole: list[int] = []
        demands: dict[int, set[int]] = {graph.outputs[j]: {0} for j in outputs}
        equations, inputs = graph.needed([graph.outputs[j] for j in outputs], run.values)
        for eqn in reversed(equations):
            dims: set[int] = set().union(*(demands.get(v, ()) for v in eqn.results))
            if not dims:
                continue  # needed by what is computed before
            operands = operand_dims(graph, eqn, *dims) if len(dims) == 1 else None
            if operands is not None:
                self._equations.insert(0, (eqn, dims.pop(), operands))
                for value, dim in zip(eqn.operands, operands, strict=True):
                    demands.setdefault(value, set()).add(dim)
            elif any(graph.reads[v] & needs_stacks for v in eqn.results):
                raise _CannotCutError
            else:
                self.whole += [v for v in eqn.results if v in demands]
        inputs = [i for i in inputs if i in demands]
        # What comes layer by layer: the stacks, and smaller arrays beside them.
        self._parts = [
            i
            for i in inputs
            if demands[i] == {0} and graph.shape(i)[0] == self._length and run.first_dim_free(i)
        ]
        self.whole += [i for i in inputs if i not in self._parts]
        if set(stacks) - set(self._parts):
            raise _CannotCutError

    def _home(self, output: int) -> int | None:
        """The input whose place an output takes layer by layer; None if they differ in type."""
        graph = self._run.graph
        made, old = graph.types[graph.outputs[output]], graph.types[output]
        if made.shape[:1] != (self._length,) or not self._run.first_dim_free(output):
            raise _CannotCutError
        if (made.shape, made.dtype) == (old.shape, old.dtype):
            return output
        if self._run.replaces_deferred(output):
            raise _CannotCutError
        return None

    @classmethod
    def find(cls, run: Streamed, outputs: list[int]) -> "_Loop | None":
        """The loop for what in a group of outputs is a stack; None if there is none."""
        graph = run.graph
        _, inputs = graph.needed([graph.outputs[j] for j in outputs], run.values)
        stacks = [i for i in inputs if is_stack(graph.shape(i))]
        if not stacks:
            return None
        loads = sum(1 << i for i in stacks)
        try:
            return cls(run, [j for j in outputs if graph.reads[graph.outputs[j]] & loads], stacks)
        except _CannotCutError:
            return None

    def run(self) -> dict[int, Any]:
        """All layers; returns the outputs."""
        run, types = self._run, self._run.graph.types
        held = dict(
            zip(self._parts, run.after_barrier([run.inputs[i] for i in self._parts]), strict=True)
        )
        made = [types[run.graph.outputs[j]] for j in self.outputs]
        buffers = [
            held[i] if i in held else jnp.zeros(t.shape, t.dtype) if i is None else run.inputs[i]
            for i, t in zip(self._homes, made, strict=True)
        ]

        def load(buffers: list[Any], layer: Any) -> list[Any]:
            now = held | dict(zip(self._homes, buffers, strict=True))
            return jax.device_put([layer_of(now[i], layer, 0) for i in self._parts], DEVICE)

        def body(layer: Any, carry: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
            buffers, parts = carry
            # The next layer is on its way while this one is computed.
            following = load(buffers, jnp.minimum(layer + 1, self._length - 1))
            new = self._evaluate(layer, parts, buffers)
            new = [
                jax.device_put(x, HOST) if run.replaces_deferred(j) else x
                for j, x in zip(self.outputs, new, strict=True)
            ]
            return [
                lax.dynamic_update_slice_in_dim(old, x, layer, 0)
                for old, x in zip(buffers, new, strict=True)
            ], following

        buffers, _ = lax.fori_loop(0, self._length, body, (buffers, load(buffers, 0)))
        return dict(zip(self.outputs, buffers, strict=True))

    def _evaluate(self, layer: Any, parts: list[Any], buffers: list[Any]) -> list[Any]:
        """The outputs of one layer, of what was loaded for it."""
        values = dict(zip(self._parts, parts, strict=True))
        replaced = {
            home: buffer
            for home, buffer in zip(self._homes, buffers, strict=True)
            if not on_host(buffer)
        }

        def operand(value: int, dim: int) -> Any:
            if value in values:
                return values[value]
            # Read where it is written, a parameter needs no copy.
            whole = replaced[value] if value in replaced and dim == 0 else self._run.values[value]
            return whole if dim == WHOLE else layer_of(whole, layer, dim)

        for eqn, dim, dims in self._equations:
            operands = [operand(v, d) for v, d in zip(eqn.operands, dims, strict=True)]
            values |= zip(eqn.results, bind_layer(eqn, dim, operands, layer), strict=True)
        return [operand(self._run.graph.outputs[j], 0) for j in self.outputs]
