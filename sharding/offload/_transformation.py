"""Optimizer state in host memory: a transformation, and how its state is streamed in a step.

XLA sees a step as one graph and would load all inputs to the device first. Here the function is
traced and evaluated output by output: the inputs of the first one are loaded, every other output
that needs no more is computed too, new values of host inputs are stored, and the loads for the next
output wait for these stores. Stacks of layers are loaded in a loop where operations allow it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_ext.leaf_by_leaf import ScheduledRun, run_by_leaf
from optax_ext.traced_graph import Graph
from sharding._types import Array, OptState, Tree
from sharding._user_line import warn
from sharding.offload import _layer_rules
from sharding.offload._host_memory import DEVICE, HOST, host_sharding, is_offloaded, on_host
from sharding.placement._specs import is_spec


def offload(
    inner: optax.GradientTransformation, *, min_size: int = 4096
) -> optax.GradientTransformationExtraArgs:
    """Places the state of any transformation in host memory and streams it in each step.

    The update is that of ``inner``. The state for one parameter is loaded to the device, updated
    and stored again before the state for the next but one is loaded, so that the state of about
    three parameters is on the device at a time. Stacks of layers (three or more along the first
    dim, of 2**18 elements or more each) are streamed layer by layer, if ``inner`` treats each layer
    by itself; a sum over the whole stack prevents that.

    For use inside ``jit`` on one device, or on arrays that are sharded along other dims than the
    first one of a stack; with ``Zero`` use ``Zero(offload="optimizer")``. A jitted step that
    donates the state needs all ``in_shardings`` and ``out_shardings``: without, JAX (0.10 to 0.12)
    may write a device result over a host array of the same shape, and abort.

    Args:
      inner: any transformation, such as a ``low_precision_state``.
      min_size: arrays of fewer elements stay on the device.

    Raises:
      ValueError: if the devices have no ``pinned_host`` memory.

    Warns:
      UserWarning: if the update of every parameter needs most of the state, so that all of it is on
        the device at once, as with a clip by global norm after the moments.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sharding as shd
      >>> tx = shd.offload(optax.adam(1e-3))
      >>> params = {"w": jnp.ones((64, 128)), "b": jnp.zeros(128)}
      >>> state = tx.init(params)
      >>> state[0].mu["w"].sharding.memory_kind, state[0].mu["b"].sharding.memory_kind
      ('pinned_host', 'device')
      >>> at, home = jax.tree.map(lambda x: x.sharding, (params, state))
      >>> placement = {"in_shardings": (at, home, at), "out_shardings": (at, home)}
      >>> updates, state = jax.jit(tx.update, donate_argnums=1, **placement)(params, state, params)

    References:
      Ren, Rajbhandari, Aminabadi et al.: ZeRO-Offload: Democratizing Billion-Scale Model Training,
      USENIX ATC 2021, arXiv 2101.06840.
    """
    inner = optax.with_extra_args_support(inner)

    def put(x: Array) -> Any:
        if not is_offloaded(x, "optimizer", min_size):
            return x
        if isinstance(x, jax.core.Tracer):
            return jax.device_put(x, HOST)
        return jax.device_put(x, host_sharding(x.sharding))

    def init(params: optax.Params) -> optax.OptState:
        return jax.tree.map(put, inner.init(params))

    def update(
        updates: Tree, state: OptState, params: Tree = None, **extra_args: Any
    ) -> tuple[Tree, OptState]:
        def run(updates: Tree, state: OptState) -> tuple[Tree, OptState]:
            return inner.update(updates, state, params, **extra_args)

        return streamed(run, updates, state, after=updates)

    return optax.GradientTransformationExtraArgs(init, update)


def streamed(
    fn: Callable[[Tree, Tree], tuple[Tree, Tree]],
    tree: Tree,
    state: Tree,
    after: Tree,
    specs: Tree = None,
) -> tuple[Tree, Tree]:
    """``fn(tree, state)``, a new tree and a new state, where host arrays of the state are streamed.

    Leaves of ``tree``, parameters or updates, are computed one after the other; nothing is loaded
    before ``after``, the gradients. ``specs`` place both on the mesh; None if that is unknown.
    """
    if not any(map(on_host, jax.tree.leaves(state))):
        return fn(tree, state)
    flat_specs = jax.tree.leaves(specs, is_leaf=is_spec)

    def first_dim_free(i: int) -> bool:
        return specs is None or not flat_specs[i] or flat_specs[i][0] is None

    def make_run(graph: Graph, inputs: list[Any]) -> StreamedRun:
        return StreamedRun(graph, inputs, jax.tree.leaves(after), first_dim_free)

    # Only operations that do not branch on the platform can be evaluated layer by layer.
    return run_by_leaf(fn, tree, state, on_host, make_run, portable=True)


class StreamedRun(ScheduledRun):
    """A scheduled run whose deferred inputs, and their replacements, are in host memory."""

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
        return jax.device_put(arrays, DEVICE)

    def store(self, output: int, x: Array) -> Any:
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
        warn(
            "offload: the update of each parameter needs the state of most others, so all state is "
            "on the device at once. A clip by global norm after the moments has this effect, one "
            "before them does not (docs: how_to/offload)."
        )


# --- The loop over the layers of stacked arrays, with two layers of the inputs on the device ------

Arrays = dict[Any, jax.Array]  # by the number of a value of the graph, or of an output


class LayerLoop:
    """The part of a scheduled run that computes some outputs, layer by layer along dim 0.

    ``stacks`` are the stacked inputs that they depend on; ``first_dim_free`` says whether no mesh
    axis shards the first dim of an input. ``prerequisites`` have to be computed before the loop.
    """

    def __init__(
        self,
        run: ScheduledRun,
        outputs: list[int],
        stacks: Sequence[int],
        first_dim_free: Callable[[int], bool],
    ):
        graph = run.graph
        self._run = run
        self.outputs = outputs
        self._num_layers = graph.shape(stacks[0])[0]
        # The outputs that are written over the input of their number, as their types agree.
        self._in_place = [j for j in outputs if self._replaces_input(j, first_dim_free(j))]
        values = [graph.outputs[j] for j in outputs]
        mask = sum(1 << i for i in stacks)
        self._layers = _layer_rules.LayerGraph(graph, values, run.values, mask)
        inputs = self._layers.inputs
        needed_dims = self._layers.needed_dims

        # Loaded layer by layer: the stacks, and smaller arrays with as many layers.
        self._sliced = [
            i
            for i in inputs
            if needed_dims[i] == {0} and graph.shape(i)[0] == self._num_layers and first_dim_free(i)
        ]
        unsliced = [i for i in inputs if i not in self._sliced]
        self.prerequisites = [*self._layers.prerequisites, *unsliced]
        if set(stacks) - set(self._sliced):
            raise _layer_rules.NotLayerwiseError

    @classmethod
    def find(
        cls, run: ScheduledRun, outputs: list[int], first_dim_free: Callable[[int], bool]
    ) -> "LayerLoop | None":
        """The loop for those of some outputs that depend on stacks; None if there is none."""
        graph = run.graph
        _, inputs = graph.needed([graph.outputs[j] for j in outputs], run.values)
        stacks = [i for i in inputs if _layer_rules.is_stack(graph.shape(i))]
        if not stacks:
            return None
        mask = sum(1 << i for i in stacks)
        outputs = [j for j in outputs if graph.reads[graph.outputs[j]] & mask]
        try:
            return cls(run, outputs, stacks, first_dim_free)
        except _layer_rules.NotLayerwiseError:
            return None

    def _replaces_input(self, output: int, first_dim_free: bool) -> bool:
        """Whether an output has the type of the input that it replaces."""
        graph = self._run.graph
        new, old = graph.types[graph.outputs[output]], graph.types[output]
        if new.shape[:1] != (self._num_layers,) or not first_dim_free:
            raise _layer_rules.NotLayerwiseError
        same = (new.shape, new.dtype) == (old.shape, old.dtype)
        if not same and self._run.replaces_deferred(output):
            raise _layer_rules.NotLayerwiseError
        return same

    def run(self) -> Arrays:
        run = self._run
        inputs = run.after_barrier([run.inputs[i] for i in self._sliced])
        stacked: Arrays = dict(zip(self._sliced, inputs, strict=True))

        def load(buffers: Arrays, layer: int | jax.Array) -> list[jax.Array]:
            current = stacked | {j: buffers[j] for j in self._in_place}
            return run.load([_layer_rules.slice_layer(current[i], layer, 0) for i in self._sliced])

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
            return x if dim == _layer_rules.UNSLICED else _layer_rules.slice_layer(x, layer, dim)

        return dict(zip(self.outputs, self._layers.evaluate(layer, values, read), strict=True))
