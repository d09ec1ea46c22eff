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
    """A layer, or the body of a loop over some."""

    run: Run
    args: tuple[list[Any], Any]  # the types of what it is called with
    times: int  # how often it runs, each time with other parameters
    code: str  # equal for layers that compute alike


class _Part(NamedTuple):
    """Equations that are a layer."""

    begin: int  # the first of them
    end: int  # the one after the last
    layer: Layer
    params: set[int]  # that it reads
    enter: Callable[[Run, dict[int, Any]], None]  # adds its results to values


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
        self.eqns = self.graph.needed(self.graph.outputs, self.graph.constants)[0]
        trained = [jnp.issubdtype(x.dtype, jnp.inexact) for _, x in named]
        loops = {loop.eqn.results: loop for loop in find_loops(self.graph, trained)}
        self.has_loops, self.moves = bool(loops), list[Equation]()
        if loops:
            found = [(i, loops.get(eqn.results)) for i, eqn in enumerate(self.eqns)]
            self.parts = [_loop_part(self.graph, loop, i) for i, loop in found if loop]
        else:
            self._move_params(len(names))
            self.parts = [self._numbered_part(*ends) for ends in self._numbered(names)]
        own = {i for part in self.parts for i in part.params}
        self.outside = [name for i, name in enumerate(names) if i not in own]  # of all layers

    @property
    def layers(self) -> list[Layer]:
        return [part.layer for part in self.parts]

    @property
    def num_layers(self) -> int:
        return sum(layer.times for layer in self.layers)

    def run(self, wrap: Callable[[Layer], Run], *args: Any) -> Any:
        """What the loss returns, with what ``wrap`` makes of its layers."""
        values = self.graph.constants | dict(enumerate(jax.tree.leaves(args)))
        evaluate(self.moves, values)
        done = 0
        for part in self.parts:
            evaluate(self.eqns[done : part.begin], values)
            part.enter(wrap(part.layer), values)
            done = part.end
        evaluate(self.eqns[done:], values)
        return jax.tree.unflatten(self.graph.out_treedef, [values[v] for v in self.graph.outputs])

    # --- Layers with numbers ----------------------------------------------------------------------

    def _move_params(self, count: int) -> None:
        """Divides equations into those that cast or move parameters, which run first, and others.

        Values that are parameters, moved or not, are ``params``.
        """
        self.params, eqns = dict(enumerate(range(count))), self.eqns
        self.eqns = []
        for eqn in eqns:
            moved = [self.params.get(v) for v in eqn.operands if v not in self.graph.constants]
            if eqn.primitive.name in MOVES and len(moved) == 1 and moved[0] is not None:
                self.params[eqn.results[0]] = moved[0]
                self.moves.append(eqn)
            else:
                self.eqns.append(eqn)

    def _numbered_part(self, begin: int, end: int) -> _Part:
        eqns, constants, types = self.eqns[begin:end], self.graph.constants, self.graph.types
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

        def enter(layer: Run, values: dict[int, Any]) -> None:
            results = layer([values[v] for v in own], [values[v] for v in others])
            values |= zip(outs, results, strict=True)

        # Values by the order of their first use.
        number = {v: i for i, v in enumerate(dict.fromkeys([*reads, *sorted(made)]))}
        code = [
            (
                eqn.primitive,
                eqn.params,
                *([number[v] for v in x] for x in (eqn.operands, eqn.results)),
            )
            for eqn in eqns
        ]
        text = str((code, [types[v] for v in reads], [number[v] for v in outs]))
        params, rest = ([types[v].update(sharding=None) for v in x] for x in (own, others))
        layer = Layer(run, (params, rest), 1, re.sub(r"0x[0-9a-f]+", "", text))
        return _Part(begin, end, layer, {self.params[v] for v in own}, enter)

    def _numbered(self, names: list[str]) -> list[tuple[int, int]]:
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
        made = {x: i for i, eqn in enumerate(self.eqns) for x in eqn.results}
        read = {x: i for i, eqn in enumerate(self.eqns) for x in eqn.operands}  # the last one
        changes = [0.0] * (len(self.eqns) + 2)
        for x in made.keys() & read.keys():
            changes[made[x] + 1] += num_bytes(self.graph.types[x])
            changes[read[x] + 1] -= num_bytes(self.graph.types[x])
        return list(itertools.accumulate(changes))


def _loop_part(graph: Graph, loop: LayerScan, at: int) -> _Part:
    """A loop over layers, which is one equation."""
    carried, options = loop.carried, loop.eqn.params

    def of_layer(k: int, v: int) -> Any:
        shape = graph.types[v].shape[1:] if k >= carried.stop else graph.types[v].shape
        return graph.types[v].update(shape=shape, sharding=None)

    def run(params: list[Any], rest: Any) -> list[Any]:
        own = dict(zip(loop.params, params, strict=True))
        return loop.layer(lambda number, held, tap=None: held, own, {}, rest)

    def enter(layer: Run, values: dict[int, Any]) -> None:
        operands = {k: values[v] for k, v in loop.others.items()}
        consts = {k: x for k, x in operands.items() if k < carried.start}
        slices = {k: x for k, x in operands.items() if k >= carried.stop}

        def step(carry: dict[int, Any], x: Any) -> tuple[dict[int, Any], list[Any]]:
            params, slices = x
            out = list(layer(params, consts | carry | slices))
            return dict(zip(carried, out, strict=False)), out[len(carried) :]

        xs = [values[i] for i in loop.params], slices
        order = {key: options[key] for key in ("reverse", "unroll")}
        carry, outs = lax.scan(step, {k: operands[k] for k in carried}, xs, **order)
        values |= zip(loop.eqn.results, [*carry.values(), *outs], strict=True)

    params = [of_layer(carried.stop, i) for i in loop.params]
    rest = {k: of_layer(k, v) for k, v in loop.others.items()}
    layer = Layer(run, (params, rest), options["length"], f"loop {at}")
    return _Part(at, at + 1, layer, {*loop.params}, enter)
