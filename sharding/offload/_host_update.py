"""The update on the CPU of the host, where offloaded state is: gradients go there, parameters back.

The CPU computes each element by itself. Sums and products over an array, whose shards may be on
several devices, are computed on the devices: an update that needs them of what the CPU computed, as
CAME does, goes on there after them.

There is no delay by one step, which would let the CPU update while the devices compute the next
gradients: programs for TPUs (libtpu 0.0.51) end each call of the CPU before they go on.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import compute_on

from optax_ext import MasterWeightsState
from optax_ext.leaf_by_leaf import ScheduledRun, output_groups, run_by_leaf
from optax_ext.traced_graph import ELEMENTWISE, REDUCTIONS, Equation, Graph, evaluate
from sharding._types import Array, OptState, Tree
from sharding._user_line import warn
from sharding.offload._host_memory import DEVICE, HOST, on_host
from sharding.placement._layout import Layout

# State with at most one element for so many of its parameter is updated on the device.
_FEW = 16
# The CPU reduces at most so many elements to one: the blocks of quantized state.
_MAX_BLOCK = 512
_CONSTRAINT = "sharding_constraint"
_LOCAL = ELEMENTWISE | {
    *("broadcast_in_dim", "concatenate", "iota", "pad", "reshape", "slice", "split", "squeeze"),
    *("stack", "transpose", _CONSTRAINT),
}


def updated_on_host(
    fn: Callable[[Tree, OptState], tuple[Tree, OptState]],
    params: Tree,
    opt_state: OptState,
    layout: Layout,
) -> tuple[Any, Any]:
    """``fn(params, opt_state)``, both new, where the CPU computes on arrays in host memory."""
    make_run = functools.partial(HostRun, layout=layout)
    if layout.platform == "tpu":
        check_host_state_of_tpus([*filter(on_host, jax.tree.leaves(opt_state))])

    def update(params: Tree, opt_state: OptState) -> tuple[Any, Any]:
        return fn(_rounded_masters(params, opt_state), opt_state)

    return run_by_leaf(update, params, opt_state, on_host, make_run, portable=True)


def check_host_state_of_tpus(opt_state: OptState) -> None:
    """Raises for state that the CPU cannot update beside TPUs."""
    if any(x.dtype.itemsize == 1 for x in jax.tree.leaves(opt_state)):
        raise ValueError(
            "update_on='host' is not for 8-bit and 4-bit state on TPUs, whose compiler (libtpu "
            "0.0.42) aborts on arrays of bytes that the CPU computes. Leave update_on out: the "
            "state is then streamed through the device; or use bfloat16 or float32 state."
        )


def _rounded_masters(params: Tree, opt_state: OptState) -> Any:
    """Parameters that have a master as its rounding: they need not be sent to the host."""

    def is_state(x: Any) -> bool:
        return isinstance(x, MasterWeightsState)

    for x in filter(is_state, jax.tree.leaves(opt_state, is_leaf=is_state)):
        params = x.rounded(params)
    return params


class HostRun(ScheduledRun):
    """A scheduled run whose deferred inputs, and their replacements, stay in host memory."""

    def __init__(self, graph: Graph, inputs: Sequence[Any], layout: Layout):
        super().__init__(graph, inputs)
        # A sum over shards would be a collective between hosts.
        self._sums_on_cpu = REDUCTIONS if layout.mesh.size == 1 else ()
        self._on_cpu: set[int] = set()  # values that the CPU reads where they are, or computes
        self._loaded: dict[int, jax.Array] = {}  # of these, what was moved to the device
        # What is sent to the CPU: it computes local values on the device again from these.
        local = {v for eqn in filter(self._is_local, graph.equations) for v in eqn.results}
        self._sources = set(range(len(graph.types))) - local

    def _size(self, value: int) -> int:
        return math.prod(self.graph.shape(value))

    def _is_local(self, eqn: Equation) -> bool:
        """Whether it computes each element by itself, or block by block."""
        if eqn.primitive.name in REDUCTIONS:
            return self._size(eqn.operands[0]) <= _MAX_BLOCK * self._size(eqn.results[0])
        return eqn.primitive.name in _LOCAL

    def run(self, roots: Sequence[int]) -> list[Any]:
        graph = self.graph
        cpu = self._on_cpu
        for group in output_groups(graph, roots):
            few = max(map(self._size, group)) / _FEW
            cpu.update(j for j in group if on_host(self.inputs[j]) and self._size(j) > few)
        before_stores, _ = graph.needed([graph.outputs[j] for j in cpu], ())
        stored = {v for eqn in before_stores for v in eqn.results}
        # From how many elements on the device each value is made.
        weights = {v: 0 if v in cpu else self._size(v) for v in self._sources}
        for eqn in graph.equations:
            local = self._is_local(eqn)
            weight = max((weights[v] for v in eqn.operands), default=0)
            # What is not stored goes to the device where it meets as much as the CPU has.
            few = weight * _FEW <= max(map(self._size, (*eqn.operands, *eqn.results)))
            on_cpu = cpu & set(eqn.operands) and (few or stored & set(eqn.results))
            if on_cpu and (local or eqn.primitive.name in self._sums_on_cpu):
                cpu.update(eqn.results)
                weights |= dict.fromkeys(eqn.results, 0)
            elif local:
                weights |= dict.fromkeys(eqn.results, weight)
        return super().run(roots)

    def compute(self, values: Sequence[int]) -> None:
        """Computes values, on the device and on the CPU in turn."""
        equations, inputs = self.graph.needed(values, self.values)
        loaded = [i for i in inputs if i not in self._on_cpu]
        moved = jax.device_put([self.inputs[i] for i in loaded], DEVICE)
        self.values |= {i: self.inputs[i] for i in inputs} | dict(zip(loaded, moved, strict=True))
        while equations:
            left = [eqn for eqn in equations if not self._evaluated_on_device(eqn)]
            equations = self._after_cpu(left, values) if left else []

    def _evaluated_on_device(self, eqn: Equation) -> bool:
        """Evaluates an equation if the device has to and can."""
        if self._on_cpu & set(eqn.results) or not self.values.keys() >= set(eqn.operands):
            return False
        for v in set(eqn.operands) - self._loaded.keys():
            if on_host(self.values[v]):
                self._loaded[v] = jax.device_put(self.values[v], DEVICE)
        operands = {v: self._loaded.get(v, self.values[v]) for v in eqn.operands}
        evaluate([eqn], operands)
        self.values |= {v: operands[v] for v in eqn.results}
        return True

    def _after_cpu(self, equations: list[Equation], values: Sequence[int]) -> list[Equation]:
        """Those of some equations that are left after all that the CPU can compute."""
        now: list[Equation] = []
        left: list[Equation] = []
        known = set(self.values)
        for eqn in equations:
            ready = self._on_cpu >= set(eqn.results) and known >= set(eqn.operands)
            (now if ready else left).append(eqn)
            known.update(eqn.results if ready else ())
        if any(self._on_cpu & set(eqn.results) for eqn in left):
            warn(
                "update_on='host': the update needs sums, over all devices, of what the CPU has, "
                "as those of CAME and of Adafactor with masters do. They are computed on the "
                "devices, and arrays as large as the state go there and back: without update_on "
                "less is moved."
            )
        used = {v for eqn in left for v in eqn.operands} | set(values)
        results = [v for eqn in now for v in eqn.results if v in used]
        stored = {v for eqn in left if self._on_cpu & set(eqn.results) for v in eqn.operands}
        stored |= {self.graph.outputs[j] for j in self._on_cpu if j < len(self.inputs)}
        # Scalars of the code are its constants.
        constants = {v: x for v, x in self.graph.constants.items() if not self.graph.shape(v)}
        known = (self._on_cpu | self._sources) & self.values.keys()
        now, _ = self.graph.needed(results, known)
        operands = sorted({v for eqn in now for v in eqn.operands} & known - constants.keys())

        def run(arrays: list[jax.Array]) -> list[jax.Array]:
            # As if in the device's memory: operations refuse operands in two memories.
            arrays = jax.device_put(arrays, DEVICE)
            own = constants | dict(zip(operands, arrays, strict=True))
            for eqn in now:
                if eqn.primitive.name == _CONSTRAINT:
                    own[eqn.results[0]] = own[eqn.operands[0]]
                else:
                    evaluate([eqn], own)
            return [own[v] for v in results]

        module: Any = compute_on
        on_cpu = getattr(module, "compute_on2", module.compute_on)  # its name in jax 0.10
        places = [HOST if v in stored else DEVICE for v in results]
        call = on_cpu(run, compute_type="device_host", out_memory_spaces=places)
        arrays = [self.values[v] for v in operands]
        self.values |= zip(results, call(jax.device_put(arrays, HOST)), strict=True)
        return left

    def store(self, output: int, x: Array) -> Any:
        return jax.device_put(x, HOST if on_host(self.inputs[output]) else DEVICE)
