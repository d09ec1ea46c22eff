"""An update as a graph, and the part of it that is made layer by layer, beside gradients.

The update of a stacked parameter is made so if operations treat each layer by itself. Norms of all
gradients are made of reductions of single ones, which are known before the update.
"""

import dataclasses
import itertools
import math
from collections.abc import Container, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint
from jax.sharding import PartitionSpec

from optax_ext.traced_graph import REDUCTIONS, Graph, Value, bind
from sharding._types import Tree
from sharding.collectives._sum_dtype import to_sum_dtype
from sharding.loss._derivatives import bits
from sharding.loss._stack import ParamNumber, Slot
from sharding.offload._host_memory import HostStack
from sharding.offload._layer_rules import UNSLICED, LayerGraph, NotLayerwiseError, slice_layer
from sharding.placement._layout import Layout
from sharding.placement._on_mesh import over_data_axes
from sharding.placement._specs import is_spec, leaf_names
from sharding.step._step_plan import StepSpec
from sharding.step._update import (
    NO_LOCAL_NORM,
    UNREAD,
    gather_shard,
    params_update,
    users_update,
)

OTHERWISE = "or make the step without update='backward' (docs: how_to/fit_7b)"
_FEW = 16  # at most one of so many elements of a loop is updated after it


class Update(NamedTuple):
    """An update as a graph of parameters, state, gradients, ``UNREAD`` and the loss, in this order.

    Its outputs are the new parameters and state, by their slots. ``Value`` numbers values of its
    graph alone, of which a slot is the input, too.
    """

    graph: Graph
    loss: Value  # the input that is the value of the loss
    names: list[str]  # of the outputs
    # Reductions of one gradient each, through which alone outputs depend on others, and what they
    # read, as in ``Graph.reads``. They are known before gradients, for the rest of the graph.
    terms: dict[Value, int]
    of_terms: set[Value]  # the values that depend on them: themselves, and others
    layout: Layout
    held: list[PartitionSpec]  # of the outputs, between steps
    shards: list[PartitionSpec]  # while they are updated
    refs: dict[Slot, Any]  # to stacks of parameters and state
    known: dict[Value, Any]  # values that layers share

    def grad(self, param: ParamNumber) -> Value:
        """The input that is the gradient of a parameter."""
        return Value(len(self.names) + param)

    def cast_grads(self, grads: dict[ParamNumber, jax.Array]) -> dict[ParamNumber, jax.Array]:
        """Gradients in the dtypes that the transformation gets."""
        return {i: x.astype(self.graph.types[self.grad(i)].dtype) for i, x in grads.items()}

    def ready(
        self, values: Iterable[Value], grads: set[ParamNumber], known: Container[Value]
    ) -> list[Value]:
        """Those of some values that depend on no other gradients, and are not known."""
        complete = bits(map(self.grad, grads))
        reads = {v: self.terms.get(v, self.graph.reads[v]) for v in values if v not in known}
        return [v for v, mask in reads.items() if not mask & ~complete]

    def shard(self, number: Slot, x: jax.Array) -> jax.Array:
        """An output, or the input that it replaces, as it is while it is updated."""
        return self.layout.constrain(x, self.shards[number])

    def read(self, number: Slot, layer: jax.Array) -> jax.Array:
        """One layer, of shape (1, ...), in the placement between steps."""
        return self.layout.constrain(self.refs[number][layer][None], _layer_spec(self.held[number]))

    def read_shard(self, number: Slot, layer: jax.Array) -> jax.Array:
        """One layer, of shape (1, ...), as it is while it is updated."""
        spec = _layer_spec(self.shards[number])
        x = self.layout.constrain(self.read(number, layer), spec)
        is_gathered = self.layout.platform == "gpu" and self.layout.mesh.size > 1
        return as_stored(self.layout, x, spec) if is_gathered else x

    def store(self, number: Slot, layer: jax.Array, x: jax.Array) -> None:
        """Replaces one layer, in the placement between steps."""
        held, shard = _layer_spec(self.held[number]), _layer_spec(self.shards[number])
        x = self.layout.constrain(x, shard)
        if held != shard:
            with jax.named_scope("gather_params"):
                x = gather_shard(self.layout, x, shard, held)
        self.refs[number][layer] = x[0]

    @classmethod
    def trace(
        cls,
        spec: StepSpec,
        tx: Any,
        params: Tree,
        opt_state: Tree,
        loss: Any,
        stacks: Iterable[ParamNumber],
    ) -> "Update":
        """Of parameters and state; ``stacks`` are parameters of which reductions are terms, too."""
        of_result = spec.precision.of_result
        grads = jax.tree.map(
            lambda x, t: jax.ShapeDtypeStruct(x.shape, of_result(x.dtype) if t else x.dtype),
            params,
            spec.trained,
        )
        inputs, given = jax.tree.flatten((params, opt_state, grads, UNREAD, loss))
        update_params = params_update(tx)

        def update(inputs: list[Any]) -> list[Any]:
            params, opt_state, grads, unread, loss = given.unflatten(inputs)
            return jax.tree.leaves(update_params(grads, opt_state, params, value=loss, **unread))

        names, count = leaf_names((params, opt_state)), len(jax.tree.leaves(params))
        of_loss = Value(len(inputs) - 1)
        # Gradients, and the norm that no step has that updates in its backward pass.
        deferred = [len(names) <= i < of_loss for i in range(len(inputs))]
        # Only operations that do not branch on the platform can be evaluated layer by layer.
        with users_update():
            graph = Graph(update, inputs, deferred, portable=True, selects=True)
        if any(graph.reads[v] >> len(names) + count for v in graph.outputs):
            raise ValueError(NO_LOCAL_NORM)
        of_stacks = bits(len(names) + i for i in stacks)
        terms = {v: graph.reads[v] for v in _find_terms(graph, of_stacks)}
        of_terms = _depending(graph, terms)
        graph.set_known(terms)
        held, shards = (
            jax.tree.leaves((of_params, spec.opt_specs), is_leaf=is_spec)
            for of_params in (spec.placed.params, spec.placed.shards)
        )
        known = dict(graph.constants)
        return cls(graph, of_loss, names, terms, of_terms, spec.layout, held, shards, {}, known)


def _find_terms(graph: Graph, stacks: int) -> list[Value]:
    """Scalar reductions of one gradient each, of which others are made that read several.

    And those of the gradients of ``stacks``, as the bits of an int. None depends on another.
    """

    def reduction(value: Value) -> Value | None:
        """The reduction that a number of one gradient is made of."""
        if graph.reads[value].bit_count() > 1:
            return None
        while value in graph.producer and math.prod(graph.shape(value)) == 1:
            eqn = graph.equations[graph.producer[value]]
            if eqn.primitive.name in REDUCTIONS and not graph.shape(value):
                return value
            reading = [v for v in eqn.operands if graph.reads[v]]
            if len(reading) != 1:
                return None
            (value,) = reading
        return None

    terms: dict[Value, None] = {}
    made: set[Value] = set()  # the values that depend on gradients through terms alone
    for eqn in graph.equations:
        reading = [v for v in eqn.operands if graph.reads[v]]
        if any(graph.reads[v].bit_count() > 1 for v in eqn.results):
            found = {v: reduction(v) for v in reading if v not in made}
            if None not in found.values():
                made.update(eqn.results)
                terms |= dict.fromkeys(v for v in found.values() if v is not None)
        elif eqn.primitive.name in REDUCTIONS and any(graph.reads[v] & stacks for v in reading):
            terms |= dict.fromkeys(v for v in eqn.results if not graph.shape(v))
    depending = _depending(graph, terms)
    return [v for v in terms if depending.isdisjoint(_operands(graph, v))]


def _operands(graph: Graph, value: Value) -> tuple[Value, ...]:
    return graph.equations[graph.producer[value]].operands


def _depending(graph: Graph, values: Iterable[Value]) -> set[Value]:
    """Some values, and those that depend on them."""
    found = set(values)
    for eqn in graph.equations:
        if found.intersection(eqn.operands):
            found.update(eqn.results)
    return found


class _NeedsMoreError(ValueError):
    """An update needs more than one layer of a parameter."""


class LayerValues(NamedTuple):
    """Values of an update that depend on the gradient of one stacked parameter alone."""

    grad: Value  # the input that is its gradient
    layers: LayerGraph
    sliced: list[Slot]  # inputs of each layer, beside the gradient, that the update replaces
    early: list[Value]  # values that it needs of all layers together, before the first gradient

    @classmethod
    def find(
        cls, update: Update, param: ParamNumber, values: list[Value], replaced: list[Slot]
    ) -> "LayerValues":
        """Of a parameter's gradient; ``replaced`` are the inputs that the update replaces."""
        graph, names, grad = update.graph, update.names, update.grad(param)
        length = graph.shape(param)[0]
        for value in values:
            others = graph.reads[value] & ~(1 << grad)
            if others:
                other = names[others.bit_length() - 1 - len(names)]
                raise _NeedsMoreError(
                    "update='backward' updates a layer before the next gradient exists, and the "
                    f"update of {names[param]!r} depends on the gradient of {other!r} too, in "
                    "another way than through a sum of each, as a global norm. Leave this out, "
                    f"clip each layer by itself, as Adafactor and CAME do, {OTHERWISE}."
                )
        try:
            layers = LayerGraph(graph, values, graph.constants, 1 << grad)
        except NotLayerwiseError as error:
            eqn = error.args[0]
            found = f"{eqn.primitive.name} of {graph.types[eqn.operands[0]].str_short()}"
            raise _mixed(names[param], length, found) from None
        per_layer = {i for i in layers.inputs if layers.needed_dims[i] == {0}}
        per_layer = {i for i in per_layer if graph.shape(i)[0] == length}
        if any(graph.shape(value)[:1] != (length,) for value in values) or not (
            per_layer.issuperset({grad}.intersection(layers.inputs))
        ):
            raise _mixed(names[param], length, "state that layers share")
        sliced = [j for j in replaced if j in per_layer]
        early = [i for i in layers.inputs if i not in sliced and i != grad]
        return cls(grad, layers, sliced, [*layers.prerequisites, *early])

    def of_layer(
        self, update: Update, layer: jax.Array, grad: jax.Array, store: Any = lambda value, x: x
    ) -> list[jax.Array]:
        """The values of one layer; ``store(value, x)`` gets each, and what they are made of."""
        known, values = update.known, {self.grad: grad[None]}
        values |= {i: update.read_shard(i, layer) for i in self.sliced}
        store(self.grad, grad[None])  # for a state that has the gradient itself

        def read(value: Value, dim: int) -> jax.Array:
            return known[value] if dim == UNSLICED else slice_layer(known[value], layer, dim)

        return self.layers.evaluate(layer, values, read, store)


class LayerUpdate(NamedTuple):
    """The part of an update that depends on the gradient of one stacked parameter."""

    outputs: list[Slot]
    new: LayerValues
    terms: list[Value]
    reduced: LayerValues  # what the terms are reductions of

    @classmethod
    def find(cls, update: Update, param: ParamNumber) -> "LayerUpdate":
        graph, bit = update.graph, 1 << update.grad(param)
        # The parameter, even if its gradient does not matter to it, as with optax.set_to_zero.
        replaced = [j for j, v in enumerate(graph.outputs) if j == param or graph.reads[v] & bit]
        outputs = [Slot(Value(j)) for j in replaced]
        new = LayerValues.find(update, param, [graph.outputs[j] for j in outputs], outputs)
        operand = {t: _operands(graph, t)[0] for t in update.terms}
        terms = [t for t, x in operand.items() if graph.reads[x] & bit]
        reduced = LayerValues.find(update, param, [operand[t] for t in terms], outputs)
        return cls(outputs, new, terms, reduced)

    def write(self, update: Update, layer: jax.Array, grad: jax.Array) -> None:
        """Replaces a layer of the parameter and of its state."""

        def store(value: Value, x: jax.Array) -> jax.Array:
            for j in self.outputs:
                if update.graph.outputs[j] == value:
                    update.store(j, layer, x)
                    # Read again: XLA for CPUs would compute it again, from a copy of all layers.
                    x = update.read_shard(j, layer)
            return x

        self.new.of_layer(update, layer, grad, store)

    def terms_of_layer(
        self, update: Update, layer: jax.Array, grad: jax.Array
    ) -> dict[Value, jax.Array]:
        """The terms, reduced over one layer."""
        values = self.reduced.of_layer(update, layer, grad)
        return {t: reduce(update.graph, t, x) for t, x in zip(self.terms, values, strict=True)}


def reduce(graph: Graph, term: Value, x: jax.Array) -> jax.Array:
    """A term, of what it is a reduction of, or of its values for all layers."""
    eqn = graph.equations[graph.producer[term]]
    return bind(eqn, [x], eqn.params | {"axes": tuple(range(x.ndim))})[0]


def _layer_spec(spec: PartitionSpec) -> PartitionSpec:
    """The spec of one layer of a stack, of shape (1, ...)."""
    return PartitionSpec(None, *spec[1:])


def as_stored(layout: Layout, x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """A layer in the order of its dims.

    Else XLA stores stacks of layers transposed, in a second buffer: on GPUs, as it gathers and
    reduces them along other dims than the first; on TPUs, as few-bit codes are decoded.
    """
    order = MemoryLayout(tuple(range(x.ndim)))
    stored = lambda x: with_layout_constraint(x, order)  # noqa: E731
    return over_data_axes(layout, stored, spec, spec, layout.mesh.axis_names)(x)


@dataclasses.dataclass
class StackUpdate:
    """The update of the parameters of a stack, layer by layer, while their gradients are made."""

    update: Update
    of: dict[ParamNumber, LayerUpdate]
    sums_squares: bool = False  # of gradients, too

    @classmethod
    def find(cls, update: Update, params: list[ParamNumber]) -> "StackUpdate":
        """Of some parameters, those that are updated layer by layer.

        Few elements, such as those of stacked biases in 8-bit blocks over several layers, may be
        updated after the backward pass.
        """
        found: dict[ParamNumber, LayerUpdate] = {}
        failed: dict[ParamNumber, _NeedsMoreError] = {}
        for i in params:
            try:
                found[i] = LayerUpdate.find(update, i)
            except _NeedsMoreError as error:
                failed[i] = error
        sizes = {i: math.prod(update.graph.shape(i)) for i in params}
        if sum(sizes[i] for i in failed) * _FEW > sum(sizes.values()):
            raise failed[max(failed, key=lambda i: sizes[i])]
        return cls(update, found)

    @property
    def outputs(self) -> list[Slot]:
        return [j for one in self.of.values() for j in one.outputs]

    @property
    def streamed(self) -> list[HostStack]:
        """The stacks in host memory."""
        refs = [self.update.refs[j] for j in self.outputs]
        return [ref for ref in refs if isinstance(ref, HostStack)]

    def read(self, layer: jax.Array) -> dict[ParamNumber, jax.Array]:
        """The parameters of a layer."""
        return {i: self.update.read(i, layer)[0] for i in self.of}

    def take(
        self, layer: jax.Array, grads: dict[ParamNumber, jax.Array], terms: bool, write: bool
    ) -> tuple[dict[Value, jax.Array], jax.Array]:
        """Makes terms of the gradients of a layer, updates it, or both; terms, and squares."""
        grads = self.update.cast_grads(grads)
        found: dict[Value, jax.Array] = {}
        for i, one in self.of.items() if terms else ():
            found |= one.terms_of_layer(self.update, layer, grads[i])
        with jax.named_scope("update"):
            for i, one in self.of.items() if write else ():
                one.write(self.update, layer, grads[i])
        return found, squared_norm(grads if write and self.sums_squares else {})


def squared_norm(grads: dict[ParamNumber, jax.Array]) -> jax.Array:
    """The sum of all squares."""
    squares: Any = optax.tree.norm([to_sum_dtype(g) for g in grads.values()], squared=True)
    return jnp.zeros(()) + squares


def plan_update(
    of_update: tuple[StepSpec, Any, Tree, Tree, Any], stacks: list[list[ParamNumber]]
) -> tuple[Update, list[StackUpdate]]:
    """An update by the arguments of its trace, and how it is made in the layers of each stack.

    Reductions of a stack's gradient are known before the update if that cannot be made without.
    """
    for of_stacks in ([], list(itertools.chain.from_iterable(stacks))):
        update = Update.trace(*of_update, of_stacks)
        try:
            return update, [StackUpdate.find(update, params) for params in stacks]
        except _NeedsMoreError as error:
            needs_more = str(error)
    raise ValueError(needs_more)


def _mixed(name: str, length: int, found: str) -> _NeedsMoreError:
    return _NeedsMoreError(
        f"update='backward' updates each of the {length} layers of {name!r} by itself, and their "
        f"update needs several: {found}. Give stacks batch dims where a transformation has them, "
        "as CAME, Adafactor and LAMB (factoring=optax_ext.flax_transformer(), or by path "
        f"last_two_dims(batch=(0,))), {OTHERWISE}."
    )
