"""A loop over the layers of stacked arrays, with two layers of the inputs on the device."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from optax_ext.execution_order import Equation, ScheduledRun
from sharding.offload._host_memory import on_host
from sharding.offload._layer_rules import (
    UNSLICED,
    bind_to_layer,
    is_stack,
    operand_dims,
    slice_layer,
)


class _NotLayerwiseError(Exception):
    """A part of a graph needs several layers of a stack at once."""


class _SlicedEquation(NamedTuple):
    """An equation that the loop evaluates for each layer.

    Attributes:
      eqn: the equation.
      dim: along which its results are sliced.
      operand_dims: along which each operand is sliced, or ``UNSLICED``.
    """

    eqn: Equation
    dim: int
    operand_dims: list[int]


class LayerLoop:
    """The part of a scheduled run that computes some outputs layer by layer.

    Attributes:
      outputs: the outputs that the loop computes.
      prerequisites: values that have to be computed before the loop, for all layers.
    """

    def __init__(
        self,
        run: ScheduledRun,
        outputs: list[int],
        stacks: list[int],
        first_dim_free: Callable[[int], bool],
    ):
        """Plans the loop.

        Args:
          run: the run that the loop is a part of.
          outputs: the outputs to compute, each with the layers along dim 0.
          stacks: the stacked inputs that they depend on.
          first_dim_free: whether no mesh axis shards the first dim of an input.

        Raises:
          _NotLayerwiseError: if a value that depends on the stacks needs several layers at once.
        """
        graph = run.graph
        self._run, self._first_dim_free, self.outputs = run, first_dim_free, outputs
        self._num_layers = graph.shape(stacks[0])[0]
        self._replaced = [self._replaced_input(j) for j in outputs]
        self.prerequisites: list[int] = []
        self._equations: list[_SlicedEquation] = []
        inputs, needed_dims = self._collect_equations(sum(1 << i for i in stacks))

        # Loaded layer by layer: the stacks, and smaller arrays with as many layers.
        self._sliced = [
            i
            for i in inputs
            if needed_dims[i] == {0} and graph.shape(i)[0] == self._num_layers and first_dim_free(i)
        ]
        self.prerequisites += [i for i in inputs if i not in self._sliced]
        if set(stacks) - set(self._sliced):
            raise _NotLayerwiseError

    @classmethod
    def find(
        cls, run: ScheduledRun, outputs: list[int], first_dim_free: Callable[[int], bool]
    ) -> "LayerLoop | None":
        """The loop for those of some outputs that depend on stacks; None if there is none."""
        graph = run.graph
        _, inputs = graph.needed([graph.outputs[j] for j in outputs], run.values)
        stacks = [i for i in inputs if is_stack(graph.shape(i))]
        if not stacks:
            return None
        mask = sum(1 << i for i in stacks)
        outputs = [j for j in outputs if graph.reads[graph.outputs[j]] & mask]
        try:
            return cls(run, outputs, stacks, first_dim_free)
        except _NotLayerwiseError:
            return None

    def _collect_equations(self, stacks: int) -> tuple[list[int], dict[int, set[int]]]:
        """Finds what the loop evaluates: backward from the outputs, each sliced along dim 0.

        Args:
          stacks: the stacked inputs, as the bits of an int.

        Returns:
          The inputs that the loop needs, and the dims along which each value is sliced.
        """
        graph = self._run.graph
        values = [graph.outputs[j] for j in self.outputs]
        needed_dims: dict[int, set[int]] = {value: {0} for value in values}
        equations, inputs = graph.needed(values, self._run.values)
        for eqn in reversed(equations):
            dims: set[int] = set().union(*(needed_dims.get(v, ()) for v in eqn.results))
            if not dims:
                continue  # only a prerequisite needs it
            operands = operand_dims(graph, eqn, *dims) if len(dims) == 1 else None
            if operands is not None:
                self._equations.insert(0, _SlicedEquation(eqn, dims.pop(), operands))
                for value, dim in zip(eqn.operands, operands, strict=True):
                    needed_dims.setdefault(value, set()).add(dim)
            elif any(graph.reads[v] & stacks for v in eqn.results):
                raise _NotLayerwiseError
            else:
                self.prerequisites += [v for v in eqn.results if v in needed_dims]
        return [i for i in inputs if i in needed_dims], needed_dims

    def _replaced_input(self, output: int) -> int | None:
        """The input whose buffer an output is written to; None if they differ in type."""
        graph = self._run.graph
        new, old = graph.types[graph.outputs[output]], graph.types[output]
        if new.shape[:1] != (self._num_layers,) or not self._first_dim_free(output):
            raise _NotLayerwiseError
        if (new.shape, new.dtype) == (old.shape, old.dtype):
            return output
        if self._run.replaces_deferred(output):
            raise _NotLayerwiseError
        return None

    # --- Execution --------------------------------------------------------------------------------

    def run(self) -> dict[int, Any]:
        """Evaluates all layers; returns the outputs by number."""
        run = self._run
        inputs = run.after_barrier([run.inputs[i] for i in self._sliced])
        stacked = dict(zip(self._sliced, inputs, strict=True))

        def load(buffers: list[Any], layer: Any) -> list[Any]:
            current = stacked | dict(zip(self._replaced, buffers, strict=True))
            return run.load([slice_layer(current[i], layer, 0) for i in self._sliced])

        def body(layer: Any, carry: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
            buffers, loaded = carry
            # The next layer is loaded while this one is computed.
            loaded_next = load(buffers, jnp.minimum(layer + 1, self._num_layers - 1))
            new = self._evaluate(layer, loaded, buffers)
            new = [run.store(j, x) for j, x in zip(self.outputs, new, strict=True)]
            return [
                lax.dynamic_update_slice_in_dim(old, x, layer, 0)
                for old, x in zip(buffers, new, strict=True)
            ], loaded_next

        buffers = self._initial_buffers(stacked)
        carry = (buffers, load(buffers, 0))
        buffers, _ = lax.fori_loop(0, self._num_layers, body, carry)
        return dict(zip(self.outputs, buffers, strict=True))

    def _initial_buffers(self, stacked: dict[int, Any]) -> list[Any]:
        """Where the layers of each output are written: over the old array, if types agree."""
        graph = self._run.graph
        buffers = []
        for output, replaced in zip(self.outputs, self._replaced, strict=True):
            if replaced is None:
                new = graph.types[graph.outputs[output]]
                buffers.append(jnp.zeros(new.shape, new.dtype))
            else:
                buffers.append(stacked.get(replaced, self._run.inputs[replaced]))
        return buffers

    def _evaluate(self, layer: Any, loaded: list[Any], buffers: list[Any]) -> list[Any]:
        """The outputs of one layer, given the layers of the sliced inputs."""
        values = dict(zip(self._sliced, loaded, strict=True))
        on_device = {
            replaced: buffer
            for replaced, buffer in zip(self._replaced, buffers, strict=True)
            if not on_host(buffer)
        }

        def operand(value: int, dim: int) -> Any:
            if value in values:
                return values[value]
            # Reading the buffer that is written, not the input, saves a copy of a parameter.
            in_buffer = value in on_device and dim == 0
            x = on_device[value] if in_buffer else self._run.values[value]
            return x if dim == UNSLICED else slice_layer(x, layer, dim)

        for eqn, dim, dims in self._equations:
            operands = [operand(v, d) for v, d in zip(eqn.operands, dims, strict=True)]
            values |= zip(eqn.results, bind_to_layer(eqn, dim, operands, layer), strict=True)
        return [operand(self._run.graph.outputs[j], 0) for j in self.outputs]
