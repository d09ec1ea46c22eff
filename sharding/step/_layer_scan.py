"""Loops over stacked parameters in a traced loss: found, and run so that layers take gradients.

A layer of such a loop reads its parameters by its index, and hands their gradients to a function as
the loop runs backward. All micro-batches of a layer run before the next layer does.
"""

from collections import Counter
from collections.abc import Callable, Container
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext.equations import Scan, record_of
from optax_ext.traced_graph import Equation, Graph, bind
from sharding.loss._derivatives import Differentiated, bits, carried_derivatives
from sharding.loss._effects import Run, call
from sharding.offload._host_memory import HostStack, scan_streamed
from sharding.offload._layer_rules import UNSLICED, bind_to_layer, operand_dims

_KINDS = (jnp.floating, jnp.complexfloating)

# Of the number of a loop and the index of a layer: its parameters, by number. And of their
# gradients, too: what to stack.
Read = Callable[[int, jax.Array], dict[int, jax.Array]]
Take = Callable[[int, jax.Array, dict[int, jax.Array]], Any]


class Microbatches(NamedTuple):
    """Micro-batches, whose values are stacked if there are several."""

    number: int
    sum_dtype: Callable[[Any], Any]  # in which gradients of a dtype are accumulated
    in_turn: bool  # whether one runs forward before the next does

    @property
    def dims(self) -> int:
        """How many dims of stacked values are before those of one."""
        return int(self.number > 1)

    def each(self, one: Callable[[Any], Any], given: Any) -> Any:
        """The results of each micro-batch, stacked."""
        if self.number == 1:
            return one(given)
        return lax.scan(lambda _, x: (None, one(x)), None, given, self.number)[1]

    def zeros(self, x: jax.Array) -> jax.Array:
        """The start of a sum of gradients of an array."""
        return jnp.zeros_like(x, None if self.number == 1 else self.sum_dtype(x.dtype))

    def run(self, one: Callable[[Any], tuple[Any, Any]], each: Any, zeros: Any) -> tuple[Any, Any]:
        """The sums of gradients, which start as ``zeros``, and the other results, stacked."""
        if self.number == 1:
            return one(each)

        def step(sums: Any, x: Any) -> tuple[Any, Any]:
            grads, out = one(x)
            return jax.tree.map(lambda a, g: a + g.astype(a.dtype), sums, grads), out

        # Without the barrier XLA makes all zeros of the same shape at once, before the first sum.
        zero, each = lax.optimization_barrier((jnp.zeros((), jnp.int8), each))
        return lax.scan(step, jax.tree.map(lambda x: x + zero.astype(x.dtype), zeros), each)


class View(NamedTuple):
    """A parameter as a loss reads it."""

    param: int  # its number
    casts: tuple[Equation, ...] = ()  # to other floats, before it is gathered
    # What changes each layer of it by itself, after that: equations, and their constant operands.
    changes: tuple[tuple[Equation, tuple[Any, ...]], ...] = ()

    def cast(self, x: jax.Array) -> jax.Array:
        for eqn in self.casts:
            (x,) = bind(eqn, [x])
        return x

    def of_layer(self, x: jax.Array) -> jax.Array:
        """What is read of one layer."""
        return self.change(self.cast(x))

    def change(self, x: jax.Array) -> jax.Array:
        if not self.changes:
            return x
        x = x[None]
        for eqn, constants in self.changes:
            operands = [x if constant is None else constant for constant in constants]
            (x,) = bind_to_layer(eqn, 0, operands, None)
        return x[0]


class LayerScan(NamedTuple):
    """A loop over stacked parameters. Operands and results are numbered by position."""

    number: int
    eqn: Equation
    scan: Scan  # the equation's record
    own: dict[int, View]  # operands that layers read
    frozen: dict[int, int]  # operands that it slices, and that are untrained parameters
    streamed: tuple[HostStack, ...] = ()  # what layers read, and in the backward pass write
    # Of a loss in pieces: how layers get parameters, and the operands that micro-batches have one
    # each of; so they have of all else.
    loss: Any = None
    read: Any = None
    stacked: frozenset[int] = frozenset()

    @property
    def params(self) -> list[int]:
        return [view.param for view in self.own.values()]

    def of(self, params: Container[int]) -> "LayerScan":
        """With these parameters; it gets others as they are."""
        return self._replace(own={k: x for k, x in self.own.items() if x.param in params})

    @property
    def others(self) -> dict[int, int]:
        """The operands that the loop gets as they are: their values in the graph."""
        return {k: v for k, v in enumerate(self.eqn.operands) if k not in self.own}

    @property
    def carried(self) -> range:
        return range(self.scan.num_consts, self.scan.num_consts + self.scan.num_carry)

    def layer(
        self,
        use: Callable[..., jax.Array],  # of GlobalLoss
        held: dict[int, jax.Array],
        taps: dict[int, jax.Array],
        operands: dict[int, Any],
        run: Run,
    ) -> list[Any]:
        own = {}
        for k, view in self.own.items():
            used = use(view.param, view.cast(held[view.param]), taps.get(view.param))
            own[k] = view.change(used)
        frozen = {k: use(i, operands[k]) for k, i in self.frozen.items()}
        args = operands | frozen | own
        return call(self.scan.body, [args[k] for k in sorted(args)], run)

    def forward(
        self, operands: dict[int, Any], microbatches: Microbatches
    ) -> tuple[list[Any], dict[int, Any]]:
        """The results, and what enters each layer, stacked; see ``backward``."""
        carried = self.carried

        def step(carry: dict[int, Any], layer: jax.Array) -> tuple[dict[int, Any], Any]:
            held = self.read(self.number, layer)
            same, own = self._of_layer(layer, operands, microbatches)

            def one(each: Any) -> Any:
                out = self.layer(self.loss.use, held, {}, same | each, Run.FIRST)
                return dict(zip(carried, out, strict=False)), out[len(carried) :]

            after, outs = microbatches.each(one, own | carry)
            return after, (carry, outs)

        start = {k: operands[k] for k in carried}
        for k in carried if microbatches.dims else ():
            if k not in self.stacked:
                start[k] = jnp.broadcast_to(start[k], (microbatches.number, *jnp.shape(start[k])))
        carry, (entered, outs) = self._scan(step, start, backward=False)
        outs = [jnp.moveaxis(x, 0, microbatches.dims) for x in outs]
        return [*carry.values(), *outs], entered

    def _of_layer(
        self, layer: jax.Array, operands: dict[int, Any], microbatches: Microbatches
    ) -> tuple[dict[int, Any], dict[int, Any]]:
        """What a layer gets, but for what is carried: the same, and one each of micro-batches."""
        dims = {k: microbatches.dims * (k in self.stacked) for k in operands}
        args = {
            k: x if k < self.carried.start else _at(layer, x, dims[k])
            for k, x in operands.items()
            if k not in self.carried
        }
        own = {k: args.pop(k) for k in self.stacked & args.keys()}
        return args, own

    def _scan(self, step: Any, carry: Any, backward: bool) -> Any:
        options = self.scan.options
        order = {"reverse": options["reverse"] != backward, "unroll": options["unroll"]}
        layers = jnp.arange(options["length"])
        return scan_streamed(self.streamed, step, carry, layers, writes=backward, **order)

    def backward(
        self,
        take: Take,
        operands: dict[int, Any],
        entered: dict[int, Any],
        cotangents: dict[int, Any],
        wanted: set[int],
        by: set[int],
        microbatches: Microbatches,
        how: Run,
    ) -> tuple[dict[int, Any], Any]:
        """Cotangents of operands, and what ``take`` returns for each layer, stacked.

        Args:
          take: takes the gradients of a layer.
          operands: of the loop, those of ``carried`` perhaps absent.
          entered: what ``forward`` stacked.
          cotangents: of those results on which the loss depends.
          wanted: the operands whose cotangents are to be returned, beside those that are carried.
          by: the operands by which there is a derivative, beside those that layers read.
          microbatches: how many.
          how: layers run again.
        """
        carried, dim, stacked = self.carried, microbatches.dims, self.stacked
        entered_dim = dim * microbatches.in_turn
        jaxpr = self.scan.body.jaxpr
        inner = carried_derivatives(jaxpr, carried, by | self.own.keys(), cotangents)
        consts = {k: x for k, x in operands.items() if k < carried.start}
        shared = operands.keys() - stacked
        of_outs = {j: x for j, x in cotangents.items() if j >= len(carried)}
        chosen = [*(k - carried.start for k in sorted(inner)), *of_outs]

        def step(carry: Any, layer: jax.Array) -> tuple[Any, Any]:
            after, sums = carry
            held = self.read(self.number, layer)
            taps = {i: self.loss.tap(i, x.shape) for i, x in held.items()}
            same, each = self._of_layer(layer, operands, microbatches)
            each |= {k: _at(layer, x, entered_dim) for k, x in entered.items()}
            later = {j: _at(layer, x, dim) for j, x in of_outs.items()}

            def one(each: Any) -> tuple[Any, Any]:
                each, after, later = each
                args = same | each

                def run(taps: dict[int, Any], given: dict[int, Any]) -> list[Any]:
                    outs = self.layer(self.loss.use, held, taps, args | given, how)
                    return [outs[j] for j in chosen]

                given = {k: args[k] for k in sorted(wanted | inner)}
                _, vjp = jax.vjp(run, taps, given)
                grads, given = vjp([*after.values(), *later.values()])
                return (grads, {k: g for k, g in given.items() if k in shared}), {
                    k: g for k, g in given.items() if k not in shared
                }

            dtype = microbatches.sum_dtype
            zeros = (
                {i: self.loss.tap(i, x.shape, dtype(x.dtype)) for i, x in held.items()},
                {k: microbatches.zeros(x) for k, x in same.items() if k in wanted},
            )
            (grads, given), own = microbatches.run(one, (each, after, later), zeros)
            given |= own
            sums = {k: x + given[k].astype(x.dtype) for k, x in sums.items()}
            after = {k: given[k] for k in after}
            return (after, sums), (
                take(self.number, layer, grads),
                {k: given[k] for k in wanted - consts.keys()},
            )

        after = {
            k: cotangents[k - carried.start]
            if k - carried.start in cotangents
            else jnp.zeros_like(lax.index_in_dim(entered[k], 0, entered_dim, keepdims=False))
            for k in sorted(inner)
        }
        sums = {
            k: jnp.zeros_like(x) if k in stacked else microbatches.zeros(x)
            for k, x in consts.items()
            if k in wanted
        }
        (after, sums), (taken, slices) = self._scan(step, (after, sums), backward=True)
        slices = {k: jnp.moveaxis(x, 0, dim * (k in stacked)) for k, x in slices.items()}
        return after | sums | slices, taken


def _at(layer: jax.Array, x: jax.Array, dim: int) -> jax.Array:
    return lax.dynamic_index_in_dim(x, layer, dim, keepdims=False)


def find_loops(graph: Graph, trained: list[bool]) -> list[LayerScan]:
    """The loops of an exact graph, whose first inputs are parameters, over stacks of layers.

    They slice trained parameters, cast or not, by which the first output has no other derivative.
    """
    equations = graph.needed(graph.outputs, graph.constants)[0]
    views = _layer_views(graph, len(trained))
    differentiated = Differentiated.of(graph, bits(i for i, x in enumerate(trained) if x)).values
    reads = [e for e in equations if differentiated.intersection(e.results) - views.keys()]
    read_views = (v for eqn in reads for v in eqn.operands if v in views)
    uses = Counter(views[v].param for v in read_views)
    loops: list[LayerScan] = []
    for eqn in reads:
        scan = record_of(eqn)
        if isinstance(scan, Scan) and scan.options["length"]:
            first = scan.num_consts + scan.num_carry
            found = {k: views[v] for k, v in enumerate(eqn.operands) if k >= first and v in views}
            own = {k: x for k, x in found.items() if trained[x.param] and uses[x.param] == 1}
            rest = {k: x for k, x in found.items() if not trained[x.param] and not x.changes}
            if own:
                frozen = {k: x.param for k, x in rest.items()}
                loops.append(LayerScan(len(loops), eqn, scan, own, frozen))
    return loops


def cast_params(graph: Graph, num_params: int) -> dict[int, View]:
    """Values of a graph that are parameters, its first inputs, cast or not."""
    views = {i: View(i) for i in range(num_params)}
    for eqn in graph.equations:
        if _is_float_cast(graph, eqn) and eqn.operands[0] in views:
            view = views[eqn.operands[0]]
            views[eqn.results[0]] = view._replace(casts=(*view.casts, eqn))
    return views


def _layer_views(graph: Graph, num_params: int) -> dict[int, View]:
    """Those, and others that operations make of each layer of a parameter by itself."""
    views = cast_params(graph, num_params)
    for eqn in graph.equations:
        changed = [k for k, v in enumerate(eqn.operands) if v in views]
        others = [v for v in eqn.operands if v not in views]
        if len(changed) != 1 or len(eqn.results) != 1 or eqn.results[0] in views:
            continue
        dims = operand_dims(graph, eqn, 0) if graph.constants.keys() >= set(others) else None
        if dims and all((dim == UNSLICED) == (k not in changed) for k, dim in enumerate(dims)):
            view, constants = (
                views[eqn.operands[changed[0]]],
                map(graph.constants.get, eqn.operands),
            )
            views[eqn.results[0]] = view._replace(changes=(*view.changes, (eqn, tuple(constants))))
    return views


def _is_float_cast(graph: Graph, eqn: Equation) -> bool:
    """Whether an equation casts to what has a gradient, and from it."""
    if eqn.primitive.name != "convert_element_type":
        return False
    before, after = graph.types[eqn.operands[0]].dtype, eqn.params["new_dtype"]
    return any(jnp.issubdtype(before, kind) and jnp.issubdtype(after, kind) for kind in _KINDS)
