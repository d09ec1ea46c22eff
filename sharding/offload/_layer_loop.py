"""A loop over the layers of stacked arrays, with two layers of the inputs on the device."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext.leaf_by_leaf import ScheduledRun
from optax_ext.traced_graph import Equation
from sharding.offload._host_memory import on_host
from sharding.offload._layer_rules import (
    UNSLICED,
    bind_to_layer,
    is_stack,
    operand_dims,
    slice_layer,
)

Arrays = dict[int, jax.Array]  # by the number of a value of the graph, or of an output


class _NotLayerwiseError(Exception):
    """A part of a graph needs several layers of a stack at once."""


class _SlicedEquation(NamedTuple):
    """An equation that the loop evaluates for each layer."""

    eqn: Equation
    dim: int  # along which its results are sliced
    operand_dims: list[int]  # along which each operand is sliced, or ``UNSLICED``


class LayerLoop:
    """The part of a scheduled run that computes some outputs, layer by layer along dim 0.

    ``stacks`` are the stacked inputs that they depend on; ``first_dim_free`` says whether no mesh
    axis shards the first dim of an input. ``prerequisites`` have to be computed before the loop.
    """

    def __init__(
        self,
        run: ScheduledRun,
        outputs: list[int],
        stacks: list[int],
        first_dim_free: Callable[[int], bool],
    ):
        graph = run.graph
        self._run, self.outputs = run, outputs
        self._num_layers = graph.shape(stacks[0])[0]
        # The outputs that are written over the input of their number, as their types agree.
        self._in_place = [j for j in outputs if self._replaces_input(j, first_dim_free(j))]
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

    def _replaces_input(self, output: int, first_dim_free: bool) -> bool:
        """Whether an output has the type of the input that it replaces."""
        graph = self._run.graph
        new, old = graph.types[graph.outputs[output]], graph.types[output]
        if new.shape[:1] != (self._num_layers,) or not first_dim_free:
            raise _NotLayerwiseError
        same = (new.shape, new.dtype) == (old.shape, old.dtype)
        if not same and self._run.replaces_deferred(output):
            raise _NotLayerwiseError
        return same

    def _collect_equations(self, stacks: int) -> tuple[list[int], dict[int, set[int]]]:
        """Finds what the loop evaluates: backward from the outputs, each sliced along dim 0.

        Returns the inputs that the loop needs, and the dims along which each value is sliced. The
        stacked inputs are the bits of an int.
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

    def run(self) -> Arrays:
        run = self._run
        inputs = run.after_barrier([run.inputs[i] for i in self._sliced])
        stacked = dict(zip(self._sliced, inputs, strict=True))

        def load(buffers: Arrays, layer: int | jax.Array) -> list[jax.Array]:
            current = stacked | {j: buffers[j] for j in self._in_place}
            return run.load([slice_layer(current[i], layer, 0) for i in self._sliced])

        def body(
            layer: jax.Array, carry: tuple[Arrays, list[jax.Array]]
        ) -> tuple[Arrays, list[jax.Array]]:
            buffers, loaded = carry
            # The next layer is loaded while this one is computed.
            loaded_next = load(buffers, jnp.minimum(layer + 1, self._num_layers - 1))
            new = self._evaluate(layer, loaded, buffers)
            new = {j: run.store(j, x) for j, x in new.items()}
            return {
                j: lax.dynamic_update_slice_in_dim(buffers[j], x, layer, 0) for j, x in new.items()
            }, loaded_next

        types = {j: run.graph.types[run.graph.outputs[j]] for j in self.outputs}
        buffers = {
            j: stacked.get(j, run.inputs[j])
            if j in self._in_place
            else jnp.zeros(types[j].shape, types[j].dtype)
            for j in self.outputs
        }
        buffers, _ = lax.fori_loop(0, self._num_layers, body, (buffers, load(buffers, 0)))
        return buffers

    def _evaluate(self, layer: jax.Array, loaded: list[jax.Array], buffers: Arrays) -> Arrays:
        """The outputs of one layer, given the layers of the sliced inputs."""
        values = dict(zip(self._sliced, loaded, strict=True))
        on_device = {j: buffers[j] for j in self._in_place if not on_host(buffers[j])}

        def operand(value: int, dim: int) -> jax.Array:
            if value in values:
                return values[value]
            # Reading the buffer that is written, not the input, saves a copy of a parameter.
            in_buffer = value in on_device and dim == 0
            x = on_device[value] if in_buffer else self._run.values[value]
            return x if dim == UNSLICED else slice_layer(x, layer, dim)

        for eqn, dim, dims in self._equations:
            operands = [operand(v, d) for v, d in zip(eqn.operands, dims, strict=True)]
            values |= zip(eqn.results, bind_to_layer(eqn, dim, operands, layer), strict=True)
        return {j: operand(self._run.graph.outputs[j], 0) for j in self.outputs}
