"""The layers of any loss, found in its trace, so that something else runs in their places.

They are the bodies of loops over stacked parameters, as ``find_stacks`` finds them. Where there are
none, a layer is what uses the parameters of one of ``numbered_layers``, from one point at which few
bytes are live to the next one; layers that share parameters, or overlap, are one.
"""

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from optax_ext.equations import Remat, record_of
from optax_ext.traced_graph import Graph, Value, evaluate
from sharding._jaxprs import all_equations
from sharding._types import Tree
from sharding.loss._derivatives import Differentiated, bits
from sharding.loss._stack import ParamNumber, Stack, cast_params, find_stacks, numbered_layers
from sharding.placement._specs import path_str
from sharding.plan.machine._devices import num_bytes

# Of the parameters of a layer, and of all else that it reads: what it hands on.
Run = Callable[[list[Any], list[Any]], list[Any]]


class Layer(NamedTuple):
    """Equations that are a layer, or a loop over some: of these one."""

    run: Run
    args: tuple[list[Any], list[Any]]  # the types of what it is called with
    times: int  # how often it runs, each time with other parameters
    code: str  # equal for layers of the same operations
    begin: int  # the first equation
    end: int  # the one after the last
    params: set[ParamNumber]  # that it reads
    enter: Callable[[Run, dict[Value, Any]], None]  # adds its results to values


class LossTrace:
    """A traced loss, to be run with other layers."""

    def __init__(self, fn: Callable[..., Any], params: Tree, *args: Any):
        given: Any
        inputs, given = jax.tree.flatten((params, *args))
        named = jax.tree_util.tree_leaves_with_path(params)
        names = [path_str(path) for path, _ in named]

        def on_inputs(inputs: list[Any]) -> Any:
            return fn(*given.unflatten(inputs))

        self.graph = Graph(on_inputs, inputs, [True] * len(inputs), exact=True)
        # Values that are parameters, cast or not; casts run first.
        self.params = {v: x.param for v, x in cast_params(self.graph, len(named)).items()}
        # What the loss returns needs, and what it prints.
        silent = [eqn for eqn in self.graph.equations if not eqn.results]
        read = [*self.graph.outputs, *(v for eqn in silent for v in eqn.operands)]
        needed = {eqn.results for eqn in self.graph.needed(read, self.graph.constants)[0]} | {()}
        eqns = [eqn for eqn in self.graph.equations if eqn.results in needed]
        self.eqns = sorted(eqns, key=lambda eqn: self.params.keys().isdisjoint(eqn.results[:1]))
        trained = bits(i for i, (_, x) in enumerate(named) if jnp.issubdtype(x.dtype, jnp.inexact))
        stacks = find_stacks(self.graph, len(named), Differentiated.of(self.graph, trained))
        stacks = [stack.of(self.params.values()) for stack in stacks]  # frozen ones, too
        stacks = [stack for stack in stacks if stack.own]
        self.has_loops = bool(stacks)
        if stacks:
            at = {eqn.results: i for i, eqn in enumerate(self.eqns)}
            self.layers = [_stack_layer(self.graph, x, at[x.eqn.results]) for x in stacks]
        else:
            self.layers = [self._layer(*ends) for ends in self._numbered(names)]
        own = {i for layer in self.layers for i in layer.params}
        self.outside = [name for i, name in enumerate(names) if i not in own]  # of all layers

    @property
    def num_layers(self) -> int:
        return sum(layer.times for layer in self.layers)

    @property
    def found(self) -> str:
        """In words, which layers were found."""
        if not self.layers:
            return (
                "No layers were found in the loss, neither loops over stacked parameters nor "
                "parameters with numbers: all of it is one layer."
            )
        by = "in loops over stacked parameters" if self.has_loops else "by numbers of parameters"
        return f"Layers were found in the loss, {by}: {self.num_layers}."

    @property
    def numbered_without_checkpoints(self) -> bool:
        """Whether layers with numbers store all that they compute."""
        again = any(isinstance(record_of(eqn), Remat) for eqn in all_equations(self.graph.jaxpr))
        return bool(self.layers) and not self.has_loops and not again

    def run(self, wrap: Callable[[Layer], Run], *args: Any) -> Any:
        """What the loss returns, with what ``wrap`` makes of its layers."""
        values: dict[Any, Any] = dict(enumerate(jax.tree.leaves(args)))
        values |= self.graph.constants
        done = 0
        for layer in self.layers:
            evaluate(self.eqns[done : layer.begin], values)
            layer.enter(wrap(layer), values)
            done = layer.end
        evaluate(self.eqns[done:], values)
        return jax.tree.unflatten(self.graph.out_treedef, [values[v] for v in self.graph.outputs])

    # --- Layers with numbers ----------------------------------------------------------------------

    def _layer(self, begin: int, end: int) -> Layer:
        eqns = self.eqns[begin:end]
        constants = self.graph.constants
        types = self.graph.types
        made = {v for eqn in eqns for v in eqn.results}
        reads = dict.fromkeys(v for eqn in eqns for v in eqn.operands if v not in made)
        own = [v for v in reads if v in self.params]
        others = [v for v in reads if v not in self.params and v not in constants]
        after = {v for eqn in self.eqns[end:] for v in eqn.operands} | set(self.graph.outputs)
        outs = [v for v in dict.fromkeys(v for eqn in eqns for v in eqn.results) if v in after]

        def run(params: list[Any], rest: list[Any]) -> list[Any]:
            values = constants | dict(zip([*own, *others], [*params, *rest], strict=True))
            evaluate(eqns, values)
            return [values[v] for v in outs]

        def enter(layer: Run, values: dict[Value, Any]) -> None:
            results = layer([values[v] for v in own], [values[v] for v in others])
            values |= zip(outs, results, strict=True)

        types_of = [types[v] for v in (*own, *others, *outs)]
        text = str(([(eqn.primitive, eqn.params) for eqn in eqns], types_of))
        params, rest = ([types[v].update(sharding=None) for v in x] for x in (own, others))
        code = re.sub(r"0x[0-9a-f]+", "", text)
        numbers = {self.params[v] for v in own}
        return Layer(run, (params, rest), 1, code, begin, end, numbers, enter)

    def _numbered(self, names: list[str]) -> list[tuple[int, int]]:
        """The first equation of each layer, and the one after its last."""
        of_param = numbered_layers(names)
        spans: dict[str, list[int]] = {}  # the equations that use the parameters of each
        for i, eqn in enumerate(self.eqns):
            for x in self.params.keys() & {*eqn.operands} if eqn.results else ():
                cast = eqn.results[0] in self.params
                spans.setdefault("" if cast else of_param[self.params[x]], []).append(i)
        others = spans.pop("", [])
        # Layers that overlap are one.
        uses: list[tuple[int, int]] = []
        for begin, *_, end in sorted([x[0], *x] for x in spans.values()):
            if uses and begin <= uses[-1][1]:
                begin, last = uses.pop()
                end = max(end, last)
            uses.append((begin, end))
        if not uses:
            return []
        live = self._live_bytes()
        before = max((i + 1 for i in others if i < uses[0][0]), default=0)
        after = min((i for i in others if i > uses[-1][1]), default=len(self.eqns))
        ends = [(before, uses[0][0]), *((a[1] + 1, b[0]) for a, b in itertools.pairwise(uses))]
        cuts = [
            min(range(begin, end + 1), key=lambda i: (live[i], -i))
            for begin, end in [*ends, (uses[-1][1] + 1, after)]
        ]
        return list(itertools.pairwise(cuts))

    def _live_bytes(self) -> np.ndarray:
        """Bytes of values that are computed before each equation, and read from it on."""
        made = {x: i for i, eqn in enumerate(self.eqns) for x in eqn.results}
        read = {x: i for i, eqn in enumerate(self.eqns) for x in eqn.operands}  # the last one
        live = np.zeros(len(self.eqns) + 1)
        for x in (made.keys() & read.keys()) - self.params.keys():
            live[made[x] + 1 : read[x] + 1] += num_bytes(self.graph.types[x])
        return live


def _stack_layer(graph: Graph, stack: Stack, at: int) -> Layer:
    """A loop over layers, which is one equation; what casts parameters for it is in its layers."""
    own = [*stack.own]
    others = [*stack.others]
    body = jaxpr_as_fun(stack.scan.body)

    def run(params: list[Any], rest: list[Any]) -> list[Any]:
        args = dict(zip(others, rest, strict=True))
        for k, x in zip(own, params, strict=True):
            view = stack.own[k]
            args[k] = view.change(view.cast(x))
        return list(body(*(args[k] for k in sorted(args))))

    def run_other(layer: Run, *args: Any) -> list[Any]:
        return layer([args[k] for k in own], [args[k] for k in others])

    def enter(layer: Run, values: dict[Value, Any]) -> None:
        read = stack.others | {k: view.param for k, view in stack.own.items()}
        operands = [values[read[k]] for k in sorted(read)]
        results = stack.run(operands, functools.partial(run_other, layer))
        values |= zip(stack.eqn.results, results, strict=True)

    rest = [stack.scan.body.in_avals[k].update(sharding=None) for k in others]
    stacks = [graph.types[i] for i in stack.params]
    params = [x.update(shape=x.shape[1:], sharding=None) for x in stacks]
    times = stack.scan.options["length"]
    numbers = {*stack.params}
    return Layer(run, (params, rest), times, f"loop {at}", at, at + 1, numbers, enter)
