"""Loops over stacked parameters in a traced loss: found, and run so that layers take gradients.

A layer of such a loop reads its parameters by its index, and hands their gradients to a function as
the loop runs backward. All micro-batches of a layer run before the next layer does.
"""

import functools
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
            same, own = self.of_layer(layer, operands, microbatches)

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

    def of_layer(
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

    def backward(self, at: "LoopCotangents", take: Take) -> tuple[dict[int, Any], Any]:
        """Cotangents of operands, and what ``take`` returns for each layer, stacked."""
        (after, sums), (taken, slices) = self._scan(
            lambda carry, layer: at.of_layer(take, carry, layer), at.start(), backward=True
        )
        dims = {k: at.microbatches.dims * (k in self.stacked) for k in slices}
        slices = {k: jnp.moveaxis(x, 0, dims[k]) for k, x in slices.items()}
        return after | sums | slices, taken


class LoopCotangents(NamedTuple):
    """Cotangents of a loop's operands, layer by layer from the last to the first.

    A layer is computed again from what entered it. Cotangents of what is carried are handed to the
    layer before it, those of constants summed over layers, those of slices stacked.
    """

    loop: LayerScan
    operands: dict[int, Any]  # of the loop, those of ``carried`` perhaps absent
    entered: dict[int, Any]  # what ``forward`` stacked
    cotangents: dict[int, Any]  # of those results on which the loss depends
    wanted: set[int]  # the operands whose cotangents are returned, beside those that are carried
    carried: list[int]  # the operands that are, and are differentiated
    microbatches: Microbatches
    how: Run  # layers run again

    @classmethod
    def of(
        cls, loop: LayerScan, *given: Any, by: set[int], microbatches: Microbatches, how: Run
    ) -> "LoopCotangents":
        """``by``: the operands by which there is a derivative, beside those that layers read."""
        operands, entered, cotangents, wanted = given
        jaxpr, of_layers = loop.scan.body.jaxpr, by | loop.own.keys()
        carried = carried_derivatives(jaxpr, loop.carried, of_layers, cotangents)
        return cls(loop, operands, entered, cotangents, wanted, sorted(carried), microbatches, how)

    @property
    def _stacked_results(self) -> dict[int, Any]:
        """Cotangents of results that the loop stacks, by their numbers."""
        return {j: x for j, x in self.cotangents.items() if j >= len(self.loop.carried)}

    @property
    def _entered_dim(self) -> int:
        return self.microbatches.dims * self.microbatches.in_turn

    def start(self) -> tuple[dict[int, Any], dict[int, Any]]:
        """Cotangents of what the last layer carries on, and the sums for constants: zeros."""
        first, after = self.loop.carried.start, {}
        for k in self.carried:
            if k - first in self.cotangents:
                after[k] = self.cotangents[k - first]
            else:
                x = lax.index_in_dim(self.entered[k], 0, self._entered_dim, keepdims=False)
                after[k] = jnp.zeros_like(x)
        consts = {k: x for k, x in self.operands.items() if k < first and k in self.wanted}
        of_each = self.loop.stacked
        return after, {
            k: jnp.zeros_like(x) if k in of_each else self.microbatches.zeros(x)
            for k, x in consts.items()
        }

    def of_layer(self, take: Take, carry: Any, layer: jax.Array) -> tuple[Any, Any]:
        """A step of the loop: all micro-batches of a layer, whose gradients ``take`` gets."""
        loop, microbatches, (after, sums) = self.loop, self.microbatches, carry
        held = loop.read(loop.number, layer)
        same, each = loop.of_layer(layer, self.operands, microbatches)
        each |= {k: _at(layer, x, self._entered_dim) for k, x in self.entered.items()}
        later = {j: _at(layer, x, microbatches.dims) for j, x in self._stacked_results.items()}
        dtype = microbatches.sum_dtype
        zeros = (
            {i: loop.loss.tap(i, x.shape, dtype(x.dtype)) for i, x in held.items()},
            {k: microbatches.zeros(x) for k, x in same.items() if k in self.wanted},
        )
        taps = {i: loop.loss.tap(i, x.shape) for i, x in held.items()}
        one = functools.partial(self._of_microbatch, held, taps, same)
        (grads, given), own = microbatches.run(one, (each, after, later), zeros)
        given |= own
        sums = {k: x + given[k].astype(x.dtype) for k, x in sums.items()}
        slices = {k: given[k] for k in self.wanted if k >= loop.carried.stop}
        return ({k: given[k] for k in after}, sums), (take(loop.number, layer, grads), slices)

    def _of_microbatch(
        self, held: dict[int, Any], taps: dict[int, Any], same: dict[int, Any], each: Any
    ) -> tuple[Any, Any]:
        """What is summed over micro-batches: gradients, cotangents of ``same``; and the others."""
        loop, (own, after, later) = self.loop, each
        args = same | own
        first = loop.carried.start
        chosen = [*(k - first for k in self.carried), *self._stacked_results]

        def run(taps: dict[int, Any], given: dict[int, Any]) -> list[Any]:
            outs = loop.layer(loop.loss.use, held, taps, args | given, self.how)
            return [outs[j] for j in chosen]

        given = {k: args[k] for k in sorted(self.wanted.union(self.carried))}
        _, vjp = jax.vjp(run, taps, given)
        grads, found = vjp([*after.values(), *later.values()])
        shared = self.operands.keys() - loop.stacked
        return (grads, {k: x for k, x in found.items() if k in shared}), {
            k: x for k, x in found.items() if k not in shared
        }


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
