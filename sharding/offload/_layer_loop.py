"""A loop over the layers of stacked arrays, with two layers of the inputs on the device."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext.leaf_by_leaf import ScheduledRun
from sharding.offload._host_memory import on_host
from sharding.offload._layer_rules import (
    UNSLICED,
    LayerGraph,
    NotLayerwiseError,
    is_stack,
    slice_layer,
)

Arrays = dict[int, jax.Array]  # by the number of a value of the graph, or of an output


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
        values, mask = [graph.outputs[j] for j in outputs], sum(1 << i for i in stacks)
        self._layers = LayerGraph(graph, values, run.values, mask)
        inputs, needed_dims = self._layers.inputs, self._layers.needed_dims

        # Loaded layer by layer: the stacks, and smaller arrays with as many layers.
        self._sliced = [
            i
            for i in inputs
            if needed_dims[i] == {0} and graph.shape(i)[0] == self._num_layers and first_dim_free(i)
        ]
        unsliced = [i for i in inputs if i not in self._sliced]
        self.prerequisites = [*self._layers.prerequisites, *unsliced]
        if set(stacks) - set(self._sliced):
            raise NotLayerwiseError

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
        except NotLayerwiseError:
            return None

    def _replaces_input(self, output: int, first_dim_free: bool) -> bool:
        """Whether an output has the type of the input that it replaces."""
        graph = self._run.graph
        new, old = graph.types[graph.outputs[output]], graph.types[output]
        if new.shape[:1] != (self._num_layers,) or not first_dim_free:
            raise NotLayerwiseError
        same = (new.shape, new.dtype) == (old.shape, old.dtype)
        if not same and self._run.replaces_deferred(output):
            raise NotLayerwiseError
        return same

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

        def read(value: int, dim: int) -> jax.Array:
            # Reading the buffer that is written, not the input, saves a copy of a parameter.
            in_buffer = value in on_device and dim == 0
            x = on_device[value] if in_buffer else self._run.values[value]
            return x if dim == UNSLICED else slice_layer(x, layer, dim)

        return dict(zip(self.outputs, self._layers.evaluate(layer, values, read), strict=True))
