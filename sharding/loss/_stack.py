"""Stacks: the loops of a traced loss over stacked parameters. How they are found, and how they run.

Remat and the planner run a stack's loop with layers of their own. The update in the backward pass
runs ``StackPasses``: a layer reads its parameters by its index, and hands their gradients on as the
loop runs backward. All micro-batches of a layer run before the next layer does. Layers with
numbers, of other operations each perhaps, are no stack: pieces of a loss, or layers of a plan.
"""

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from optax_ext.equations import Scan, record_of
from optax_ext.traced_graph import Equation, Graph, Value, bind
from sharding._jaxprs import run_scan, without_checkpoints
from sharding._traced_types import traced_type
from sharding.loss._derivatives import Differentiated
from sharding.loss._effects import Prints
from sharding.loss._evaluate import call
from sharding.loss._microbatch_values import Microbatches
from sharding.loss._numberings import Operand, ParamNumber, Result, param_numbers
from sharding.offload._host_memory import scan_streamed
from sharding.offload._layer_rules import UNSLICED, bind_to_layer, operand_dims

_KINDS = (jnp.floating, jnp.complexfloating)


class View(NamedTuple):
    """A parameter as a loss reads it."""

    param: ParamNumber
    casts: tuple[Equation, ...] = ()  # to other floats, before it is gathered
    # What changes each layer of it by itself, after that: equations, and their constant operands.
    changes: tuple[tuple[Equation, tuple[Any, ...]], ...] = ()

    def cast(self, x: jax.Array) -> jax.Array:
        for eqn in self.casts:
            (x,) = bind(eqn, [x])
        return x

    def change(self, x: jax.Array) -> jax.Array:
        """What the loop slices, of a parameter, for one layer: (...) to (...)."""
        if not self.changes:
            return x
        x = x[None]  # rules of layers are of arrays with a dim of layers
        for eqn, constants in self.changes:
            operands = [x if constant is None else constant for constant in constants]
            (x,) = bind_to_layer(eqn, 0, operands, None)
        return x[0]


class Stack(NamedTuple):
    """A loop over layers. Its operands are the inputs of its body, its results the outputs."""

    eqn: Equation
    own: dict[Operand, View]  # trained parameters that it slices, and that nothing else reads
    frozen: dict[Operand, ParamNumber]  # untrained parameters that it slices

    @property
    def scan(self) -> Scan:
        record = record_of(self.eqn)
        assert isinstance(record, Scan)
        return record

    @property
    def params(self) -> list[ParamNumber]:
        return [view.param for view in self.own.values()]

    @property
    def others(self) -> dict[Operand, Value]:
        """The operands that the loop gets as they are."""
        every = {Operand(k): v for k, v in enumerate(self.eqn.operands)}
        return {k: v for k, v in every.items() if k not in self.own}

    @property
    def carried(self) -> range:
        """The operands that are carried; constants are before them, slices behind them."""
        return range(self.scan.num_consts, self.scan.num_consts + self.scan.num_carry)

    def of(self, params: Container[ParamNumber]) -> "Stack":
        """With these parameters; it gets others as they are."""
        return self._replace(own={k: x for k, x in self.own.items() if x.param in params})

    def run(
        self,
        operands: Sequence[Any],
        layer: Callable[..., Sequence[Any]],
        segment: int = 1,
        **options: Any,
    ) -> list[Any]:
        """The results, with another function in the place of the body.

        So many layers as ``segment`` says are computed again as one.
        """
        scan, length = self.scan, self.scan.options["length"]
        if segment == 1:
            return run_scan(scan, operands, layer, **options)

        def layers(*args: Any) -> list[Any]:
            return run_scan(scan, args, layer, **options, length=segment)

        last, num_carry = self.carried.stop, scan.num_carry
        shape = length // segment, segment
        parts = [x.reshape(*shape, *x.shape[1:]) for x in operands[last:]]
        again = jax.checkpoint(layers, prevent_cse=False)
        outs = run_scan(scan, [*operands[:last], *parts], again, **options, length=shape[0])
        return [*outs[:num_carry], *(x.reshape(length, *x.shape[2:]) for x in outs[num_carry:])]


# --- Passes with layers that take gradients -------------------------------------------------------


# Of a StackUpdate, a layer and its gradients: what to stack over layers.
Take = Callable[[Any, jax.Array, dict[ParamNumber, jax.Array]], Any]


class StackPasses(NamedTuple):
    """How a stack runs where layers get their parameters from somewhere else than a slice."""

    stack: Stack
    loss: Any  # a GlobalLoss, which gathers parameters, and reduces their gradients
    update: Any  # a StackUpdate, which reads the parameters of layers, and takes their gradients
    stacked: frozenset[Operand] = frozenset()  # of which each micro-batch has its own

    def forward(
        self, operands: dict[Operand, Any], microbatches: Microbatches
    ) -> tuple[list[Any], dict[Operand, Any]]:
        """The results, and what enters each layer, stacked; see ``StackBackward``."""
        start = {k: x for k, x in operands.items() if k in self.stack.carried}
        for k in start if microbatches.dims else ():
            if k not in self.stacked:
                start[k] = jnp.broadcast_to(start[k], (microbatches.number, *jnp.shape(start[k])))
        step = functools.partial(self._layer_forward, operands, microbatches)
        carry, (entered, outs) = self.scan(step, start, backward=False)
        outs = [jnp.moveaxis(x, 0, microbatches.dims) for x in outs]  # ([microbatch,] layer, ...)
        return [*carry.values(), *outs], entered

    def _layer_forward(
        self, operands: dict[Operand, Any], microbatches: Microbatches, carry: Any, layer: jax.Array
    ) -> tuple[dict[Operand, Any], Any]:
        """All micro-batches of a layer: what is carried, and what is stacked."""
        held = self.read(layer)
        same, own = self.of_layer(layer, operands, microbatches)

        def one(each: dict[Operand, Any]) -> Any:
            out = self.run_layer(held, {}, same | each, Prints.ALL)
            return dict(zip(carry, out, strict=False)), out[len(carry) :]

        after, outs = microbatches.each(one, own | carry)
        return after, (carry, outs)

    def scan(self, step: Any, carry: Any, backward: bool) -> Any:
        """A loop over the indices of layers, from the last one on in the backward pass."""
        options = self.stack.scan.options
        order = {"reverse": options["reverse"] != backward, "unroll": options["unroll"]}
        layers = jnp.arange(options["length"])
        return scan_streamed(self.update.streamed, step, carry, layers, writes=backward, **order)

    def read(self, layer: jax.Array) -> dict[ParamNumber, jax.Array]:
        """The parameters of a layer, in the dtypes that the loss gets."""
        held = self.update.read(layer)
        return {i: x.astype(self.loss.leaves[i].dtype) for i, x in held.items()}

    def of_layer(
        self, layer: jax.Array, operands: dict[Operand, Any], microbatches: Microbatches
    ) -> tuple[dict[Operand, Any], dict[Operand, Any]]:
        """What a layer gets, but for what is carried: the same, and one each of micro-batches."""
        dims = {k: microbatches.dims * (k in self.stacked) for k in operands}
        args = {
            k: x if k < self.stack.carried.start else at_layer(layer, x, dims[k])
            for k, x in operands.items()
            if k not in self.stack.carried
        }
        own = {k: args.pop(k) for k in self.stacked & args.keys()}
        return args, own

    def run_layer(
        self,
        held: dict[ParamNumber, jax.Array],
        taps: dict[ParamNumber, jax.Array],
        operands: dict[Operand, Any],
        prints: Prints,
    ) -> list[Any]:
        """The outputs of the body; ``taps`` are differentiated in the place of ``held``."""
        use, own = self.loss.use, {}
        for k, view in self.stack.own.items():
            used = use(view.param, view.cast(held[view.param]), taps.get(view.param))
            own[k] = view.change(used)
        frozen = {k: use(i, operands[k]) for k, i in self.stack.frozen.items()}
        args = operands | frozen | own
        return call(self.stack.scan.body, [args[k] for k in sorted(args)], prints)


class StackBackward(NamedTuple):
    """The backward pass of a stack, layer by layer from the last to the first.

    A layer is computed again from what entered it. Cotangents of what is carried are handed to the
    layer before it, those of constants summed over layers, those of slices stacked.
    """

    passes: StackPasses
    operands: dict[Operand, Any]  # without what is carried
    # What the forward pass stacked: (layer, ...), of several micro-batches (layer, microbatch, ...)
    # or, if they ran in turn, (microbatch, layer, ...).
    entered: dict[Operand, Any]
    cotangents: dict[Result, Any]  # of the results on which the loss depends
    by: list[Operand]  # that are differentiated
    microbatches: Microbatches
    prints: Prints  # of layers, which run again

    def run(self, take: Take) -> tuple[dict[Operand, Any], Any]:
        """Cotangents of operands, and what ``take`` returns for each layer, stacked."""
        step = functools.partial(self._layer, take)
        (after, sums), (taken, slices) = self.passes.scan(step, self._start(), backward=True)
        dims = {k: self.microbatches.dims * (k in self.passes.stacked) for k in slices}
        slices = {k: jnp.moveaxis(x, 0, dims[k]) for k, x in slices.items()}
        return after | sums | slices, taken

    @property
    def _carried(self) -> dict[Operand, Result]:
        """Of what is carried and differentiated, what it is after the last layer."""
        carried = self.passes.stack.carried
        return {k: Result(k - carried.start) for k in self.by if k in carried}

    @property
    def _stacked_results(self) -> dict[Result, Any]:
        """Cotangents of the results that the loop stacks: ([microbatch,] layer, ...)."""
        num_carry = self.passes.stack.scan.num_carry
        return {j: x for j, x in self.cotangents.items() if j >= num_carry}

    @property
    def _layer_dim(self) -> int:
        """Of ``entered``."""
        return self.microbatches.dims * self.microbatches.in_turn

    def _start(self) -> tuple[dict[Operand, Any], dict[Operand, Any]]:
        """Cotangents of what the last layer carries on, and the sums for constants: zeros."""
        after = {}
        for k, j in self._carried.items():
            if j in self.cotangents:
                after[k] = self.cotangents[j]
            else:
                x = lax.index_in_dim(self.entered[k], 0, self._layer_dim, keepdims=False)
                after[k] = jnp.zeros_like(x)
        sums, of_each = {}, self.passes.stacked
        for k in (k for k in self.by if k < self.passes.stack.carried.start):
            x = self.operands[k]
            sums[k] = jnp.zeros_like(x) if k in of_each else self.microbatches.zeros(x)
        return after, sums

    def _layer(self, take: Take, carry: Any, layer: jax.Array) -> tuple[Any, Any]:
        """A step of the loop: all micro-batches of a layer, whose gradients ``take`` gets."""
        passes, microbatches, (after, sums) = self.passes, self.microbatches, carry
        # What enters the layer, and the cotangents of what it stacks.
        held = passes.read(layer)
        same, each = passes.of_layer(layer, self.operands, microbatches)
        each |= {k: at_layer(layer, x, self._layer_dim) for k, x in self.entered.items()}
        later = {j: at_layer(layer, x, microbatches.dims) for j, x in self._stacked_results.items()}
        # Gradients are summed over micro-batches, as are cotangents of what all of them share.
        dtype = microbatches.sum_dtype
        zeros = (
            {i: passes.loss.tap(i, x.shape, dtype(x.dtype)) for i, x in held.items()},
            {k: microbatches.zeros(x) for k, x in same.items() if k in self.by},
        )
        taps = {i: passes.loss.tap(i, x.shape) for i, x in held.items()}
        one = functools.partial(self._microbatch, held, taps, same)
        (grads, given), own = microbatches.run(one, (each, after, later), zeros)
        # On to the layer before it, to the sums over layers, and to the stacks.
        given |= own
        sums = {k: x + given[k].astype(x.dtype) for k, x in sums.items()}
        slices = {k: given[k] for k in self.by if k >= passes.stack.carried.stop}
        return ({k: given[k] for k in after}, sums), (take(passes.update, layer, grads), slices)

    def _microbatch(
        self,
        held: dict[ParamNumber, Any],
        taps: dict[ParamNumber, Any],
        same: dict[Operand, Any],
        each: tuple[dict[Operand, Any], dict[Operand, Any], dict[Result, Any]],
    ) -> tuple[tuple[dict[ParamNumber, Any], dict[Operand, Any]], dict[Operand, Any]]:
        """What is summed over micro-batches: gradients, cotangents of ``same``; and the others."""
        own, after, later = each
        args = same | own
        results = [*self._carried.values(), *self._stacked_results]

        def run(taps: dict[ParamNumber, Any], given: dict[Operand, Any]) -> list[Any]:
            outs = self.passes.run_layer(held, taps, args | given, self.prints)
            return [outs[j] for j in results]

        given = {k: args[k] for k in self.by}
        _, vjp = jax.vjp(run, taps, given)
        grads, found = vjp([*after.values(), *later.values()])
        shared = self.operands.keys() - self.passes.stacked
        of_all = {k: x for k, x in found.items() if k in shared}
        return (grads, of_all), {k: x for k, x in found.items() if k not in shared}


def at_layer(layer: jax.Array, x: jax.Array, dim: int) -> jax.Array:
    """One layer of an array whose layers are along a dim."""
    return lax.dynamic_index_in_dim(x, layer, dim, keepdims=False)


# --- How stacks are found -------------------------------------------------------------------------


def find_stacks(graph: Graph, num_params: int, differentiated: Differentiated) -> list[Stack]:
    """The loops of an exact graph, whose first inputs are parameters, over layers.

    A loop owns the trained parameters that it slices, cast or not, by which the first output has no
    other derivative. One that owns none is a stack, too.
    """
    equations = graph.needed(graph.outputs, graph.constants)[0]
    views = _layer_views(graph, num_params)
    values = differentiated.values - views.keys()
    active = {eqn.results: eqn for eqn in equations if values.intersection(eqn.results)}
    read = (v for eqn in active.values() for v in eqn.operands if v in views)
    uses = Counter(views[v].param for v in read)
    stacks: list[Stack] = []
    for eqn in equations:
        scan = record_of(eqn)
        if not isinstance(scan, Scan) or not scan.options["length"]:
            continue
        own, frozen = dict[Operand, View](), dict[Operand, ParamNumber]()
        first = scan.num_consts + scan.num_carry  # the first slice
        for k, v in enumerate(eqn.operands) if eqn.results in active else ():
            if k >= first and v in views:
                view, is_trained = views[v], differentiated.params >> views[v].param & 1
                if is_trained and uses[view.param] == 1:
                    own[Operand(k)] = view
                elif not is_trained and not view.changes:
                    frozen[Operand(k)] = view.param
        stacks.append(Stack(eqn, own, frozen))
    return stacks


def params_of_one_loop(closed: ClosedJaxpr, params: int) -> set[ParamNumber]:
    """Those parameters of a loss that one loop slices, cast or not, and nothing else reads.

    Args:
      closed: the traced loss, whose first inputs are parameters; checkpoints are looked into.
      params: the bits of inputs.
    """
    types, run = list(map(traced_type, closed.in_avals)), jaxpr_as_fun(without_checkpoints(closed))
    graph = Graph(lambda x: run(*x), types, [False] * len(types), exact=True)
    stacks = find_stacks(graph, params.bit_length(), Differentiated.of(graph, params))
    views = [view for stack in stacks for view in stack.own.values()]
    return {view.param for view in views if not view.changes}


def numbered_layers(names: Sequence[str]) -> list[str]:
    """The layer of each parameter, such as ``layers/3`` of ``layers/3/kernel``, or "" of none.

    It ends with the first number in the path that is one of several. Lists of modules have them,
    and modules of linen.
    """
    ends = [[x.span() for x in re.finditer(r"\d+(?=/|$)", name)] for name in names]
    numbers = defaultdict(set)
    for name, of_name in zip(names, ends, strict=True):
        for start, end in of_name:
            numbers[name[:start]].add(name[start:end])
    return [
        next((name[:end] for start, end in of_name if len(numbers[name[:start]]) > 1), "")
        for name, of_name in zip(names, ends, strict=True)
    ]


def cast_params(graph: Graph, num_params: int) -> dict[Value, View]:
    """Values of a graph that are parameters, its first inputs, cast or not."""
    views: dict[Value, View] = {i: View(i) for i in param_numbers(num_params)}
    for eqn in graph.equations:
        if _is_float_cast(graph, eqn) and eqn.operands[0] in views:
            view = views[eqn.operands[0]]
            views[eqn.results[0]] = view._replace(casts=(*view.casts, eqn))
    return views


def _layer_views(graph: Graph, num_params: int) -> dict[Value, View]:
    """Those, and others that operations make of each layer of a parameter by itself."""
    views = cast_params(graph, num_params)
    for eqn in graph.equations:
        changed = [k for k, v in enumerate(eqn.operands) if v in views]
        others = {v for v in eqn.operands if v not in views}
        if len(changed) != 1 or len(eqn.results) != 1 or eqn.results[0] in views:
            continue
        dims = operand_dims(graph, eqn, 0) if graph.constants.keys() >= others else None
        # All but the parameter is used in full.
        if dims and all((dim == UNSLICED) == (k not in changed) for k, dim in enumerate(dims)):
            view = views[eqn.operands[changed[0]]]
            change = eqn, tuple(map(graph.constants.get, eqn.operands))
            views[eqn.results[0]] = view._replace(changes=(*view.changes, change))
    return views


def _is_float_cast(graph: Graph, eqn: Equation) -> bool:
    """Whether an equation casts to what has a gradient, and from it."""
    if eqn.primitive.name != "convert_element_type":
        return False
    before, after = graph.types[eqn.operands[0]].dtype, eqn.params["new_dtype"]
    return any(jnp.issubdtype(before, kind) and jnp.issubdtype(after, kind) for kind in _KINDS)
