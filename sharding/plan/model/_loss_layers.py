"""The layers of any loss, found in its trace, so that something else runs in their places.

They are the bodies of loops over stacked parameters, as ``find_loops`` finds them. Where there are
none, a layer is what uses the parameters of one number, such as ``block_3``, from one point at
which few bytes are live to the next one; layers that share parameters, or overlap, are one.
"""

import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext.traced_graph import Equation, Graph, evaluate
from sharding._types import Tree
from sharding.placement._specs import path_str
from sharding.plan.machine._tiles import num_bytes
from sharding.step._layer_hooks import MOVES
from sharding.step._layer_scan import LayerScan, find_loops

# Of the parameters of a layer, and of all else that it reads: what it hands on.
Run = Callable[[list[Any], Any], list[Any]]


class Layer(NamedTuple):
    """A layer, and the parameters that it reads by their numbers: of loops, stacks of them."""

    run: Run
    params: tuple[int, ...]
    times: int  # how often it runs, each time with other parameters


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
        self.equations = self.graph.needed(self.graph.outputs, self.graph.constants)[0]
        trained = [jnp.issubdtype(x.dtype, jnp.inexact) for _, x in named]
        loops = find_loops(self.graph, trained)
        self.loops = {loop.eqn.results: loop for loop in loops}
        self.num_layers = sum(loop.eqn.params["length"] for loop in loops)
        own = {i for loop in loops for i in loop.params}
        if not own:
            self.numbered = _Numbered(self.graph, self.equations, names)
            self.num_layers = len(self.numbered.layers)
            own = {i for each in self.numbered.layers for i in self.numbered.params_of(*each)}
        self.outside = [name for i, name in enumerate(names) if i not in own]  # of all layers

    def run(self, wrap: Callable[[Layer], Run], *args: Any) -> Any:
        """What the loss returns, with what ``wrap`` makes of its layers."""
        values = self.graph.constants | dict(enumerate(jax.tree.leaves(args)))
        if self.loops:
            for eqn in self.equations:
                if eqn.results in self.loops:
                    outs = _run_loop(wrap, self.loops[eqn.results], values)
                    values |= zip(eqn.results, outs, strict=True)
                else:
                    evaluate([eqn], values)
        else:
            self.numbered.run(values, wrap)
        return jax.tree.unflatten(self.graph.out_treedef, [values[v] for v in self.graph.outputs])


def _run_loop(wrap: Callable[[Layer], Run], loop: LayerScan, values: dict[int, Any]) -> list[Any]:
    """The results of a loop over layers."""
    carried, options = loop.carried, loop.eqn.params
    operands = {k: values[v] for k, v in loop.others.items()}
    consts = {k: x for k, x in operands.items() if k < carried.start}
    slices = {k: x for k, x in operands.items() if k >= carried.stop}

    def run(params: list[Any], rest: Any) -> list[Any]:
        own = dict(zip(loop.params, params, strict=True))
        return loop.layer(lambda number, held, tap=None: held, own, {}, rest)

    layer = wrap(Layer(run, tuple(loop.params), options["length"]))

    def step(carry: dict[int, Any], x: Any) -> tuple[dict[int, Any], list[Any]]:
        params, slices = x
        out = list(layer(params, consts | carry | slices))
        return dict(zip(carried, out, strict=False)), out[len(carried) :]

    xs = [values[i] for i in loop.params], slices
    order = {key: options[key] for key in ("reverse", "unroll")}
    carry, outs = lax.scan(step, {k: operands[k] for k in carried}, xs, **order)
    return [*carry.values(), *outs]


# --- Layers with numbers --------------------------------------------------------------------------


class _Numbered:
    """The equations of a loss between those of one number and those of the next."""

    def __init__(self, graph: Graph, equations: list[Equation], names: list[str]):
        self.graph = graph
        # Parameters, also where they are cast or moved, which is done before everything else.
        self.params = dict(enumerate(range(len(names))))
        self.moves, self.eqns = [], []
        for eqn in equations:
            moved = [self.params.get(v) for v in eqn.operands if v not in graph.constants]
            if eqn.primitive.name in MOVES and len(moved) == 1 and moved[0] is not None:
                self.params[eqn.results[0]] = moved[0]
                self.moves.append(eqn)
            else:
                self.eqns.append(eqn)
        self.layers = self._layers(names)

    def run(self, values: dict[int, Any], wrap: Callable[[Layer], Run]) -> None:
        """Adds all values of the loss."""
        evaluate(self.moves, values)
        done = 0
        for begin, end in [*self.layers, (len(self.eqns), len(self.eqns))]:
            evaluate(self.eqns[done:begin], values)
            if begin < end:
                self._run_layer(begin, end, values, wrap)
            done = end

    def params_of(self, begin: int, end: int) -> set[int]:
        """The parameters of a layer."""
        reads = (v for eqn in self.eqns[begin:end] for v in eqn.operands)
        return {self.params[v] for v in reads if v in self.params}

    def _run_layer(
        self, begin: int, end: int, values: dict[int, Any], wrap: Callable[[Layer], Run]
    ) -> None:
        eqns, constants = self.eqns[begin:end], self.graph.constants
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

        layer = wrap(Layer(run, tuple(self.params[v] for v in own), 1))
        results = layer([values[v] for v in own], [values[v] for v in others])
        values |= zip(outs, results, strict=True)

    def _layers(self, names: list[str]) -> list[tuple[int, int]]:
        """The first equation of each layer, and the one after its last."""
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        others = [0]  # the equations that use other parameters
        for i, eqn in enumerate(self.eqns):
            for x in eqn.operands:
                if x in self.params:
                    found = re.match(r".*?\d+(?=/|$)", names[self.params[x]])
                    if found:
                        first.setdefault(found[0], i)
                        last[found[0]] = i
                    else:
                        others.append(i)
        # Layers that overlap are one.
        uses: list[tuple[int, int]] = []
        for name in sorted(first, key=first.__getitem__):
            if uses and first[name] <= uses[-1][1]:
                uses[-1] = uses[-1][0], max(uses[-1][1], last[name])
            else:
                uses.append((first[name], last[name]))
        if not uses:
            return []
        live = self._live_bytes()
        before = max((i + 1 for i in others[1:] if i < uses[0][0]), default=0)
        after = min((i for i in others if i > uses[-1][1]), default=len(self.eqns))
        ends = [(before, uses[0][0]), *((a[1] + 1, b[0]) for a, b in itertools.pairwise(uses))]
        cuts = [
            min(range(begin, end + 1), key=lambda i: (live[i], -i))
            for begin, end in [*ends, (uses[-1][1] + 1, after)]
        ]
        return list(itertools.pairwise(cuts))

    def _live_bytes(self) -> list[float]:
        """Bytes of values that are computed before each equation, and read from it on."""
        live = [0.0] * (len(self.eqns) + 1)
        made = {x: i for i, eqn in enumerate(self.eqns) for x in eqn.results}
        read = {x: i for i, eqn in enumerate(self.eqns) for x in eqn.operands}  # the last one
        for x in made.keys() & read.keys():
            for i in range(made[x] + 1, read[x] + 1):
                live[i] += num_bytes(self.graph.types[x])
        return live
