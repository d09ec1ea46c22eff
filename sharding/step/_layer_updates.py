"""An update as a graph, and the part of it that is made layer by layer, beside gradients.

The update of a stacked parameter is made so if operations treat each layer by itself.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_ext.traced_graph import Graph
from sharding._types import Tree
from sharding.offload._layer_rules import UNSLICED, LayerGraph, NotLayerwiseError, slice_layer
from sharding.placement._specs import leaf_names
from sharding.step._step_plan import StepSpec
from sharding.step._update import params_update

OTHERWISE = "or make the step without update='backward'"
_FEW = 16  # at most one of so many elements of a loop is updated after it


class Update(NamedTuple):
    """An update as a graph of parameters, state, gradients and the loss, in this order.

    Its outputs are parameters and state: each replaces the input of its number.
    """

    graph: Graph
    names: list[str]  # of the outputs

    def grad(self, number: int) -> int:
        """The input that is the gradient of a parameter."""
        return len(self.names) + number

    @classmethod
    def trace(cls, spec: StepSpec, tx: Any, params: Tree, opt_state: Tree, loss: Any) -> "Update":
        of_result = spec.precision.of_result
        grads = jax.tree.map(
            lambda x, t: jax.ShapeDtypeStruct(x.shape, of_result(x.dtype) if t else x.dtype),
            params,
            spec.trained,
        )
        given: Any
        inputs, given = jax.tree.flatten((params, opt_state, grads, loss))
        update_params = params_update(tx)

        def update(inputs: list[Any]) -> list[Any]:
            params, opt_state, grads, value = given.unflatten(inputs)
            return jax.tree.leaves(update_params(grads, opt_state, params, value=value))

        names, count = leaf_names((params, opt_state)), len(jax.tree.leaves(params))
        is_grad = [len(names) <= i < len(names) + count for i in range(len(inputs))]
        # Only operations that do not branch on the platform can be evaluated layer by layer.
        return cls(Graph(update, inputs, is_grad, portable=True), names)


class Refs(NamedTuple):
    """What the backward pass of a loop reads and writes, by numbers of values of the update."""

    replaced: dict[int, Any]  # parameters and state
    early: dict[int, Any]  # computed before the first gradient
    squares: Any = None  # the sum of squares of all gradients, if asked for


class _NeedsMoreError(ValueError):
    """An update needs more than one layer of a parameter."""


class LayerUpdate(NamedTuple):
    """The part of an update that depends on the gradient of one stacked parameter."""

    grad: int  # the input that is its gradient
    outputs: list[int]
    layers: LayerGraph
    sliced: list[int]  # inputs of each layer, beside the gradient
    early: list[int]  # values that it needs of all layers together, before the first gradient

    @classmethod
    def find(cls, update: Update, number: int) -> "LayerUpdate":
        graph, names, grad = update.graph, update.names, update.grad(number)
        length = graph.shape(number)[0]
        outputs = [j for j, value in enumerate(graph.outputs) if graph.reads[value] >> grad & 1]
        values = [graph.outputs[j] for j in outputs]
        for value in values:
            others = graph.reads[value] & ~(1 << grad)
            if others:
                other = names[others.bit_length() - 1 - len(names)]
                raise _NeedsMoreError(
                    "update='backward' updates a layer before the next gradient exists, and the "
                    f"update of {names[number]!r} depends on the gradient of {other!r} too, as "
                    "with optax.clip_by_global_norm or optax.apply_if_finite. Leave these out, "
                    f"clip each layer by itself, as Adafactor and CAME do, {OTHERWISE}."
                )
        try:
            layers = LayerGraph(graph, values, graph.constants, 1 << grad)
        except NotLayerwiseError as error:
            eqn = error.args[0]
            found = f"{eqn.primitive.name} of {graph.types[eqn.operands[0]].str_short()}"
            raise _mixed(names[number], length, found) from None
        per_layer = {i for i in layers.inputs if layers.needed_dims[i] == {0}}
        per_layer = {i for i in per_layer if graph.shape(i)[0] == length}
        if any(graph.shape(value)[:1] != (length,) for value in values) or not (
            per_layer.issuperset({grad}.intersection(layers.inputs))
        ):
            raise _mixed(names[number], length, "state that layers share")
        sliced = [j for j in outputs if j in per_layer]
        early = [i for i in layers.inputs if i not in sliced and i != grad]
        return cls(grad, outputs, layers, sliced, [*layers.prerequisites, *early])

    def write(self, graph: Graph, refs: Refs, layer: jax.Array, grad: jax.Array) -> None:
        """Replaces a layer of the parameter and of its state."""
        values = {i: refs.replaced[i][layer][None] for i in self.sliced} | {self.grad: grad[None]}

        def read(value: int, dim: int) -> jax.Array:
            known = value in graph.constants
            x = graph.constants[value] if known else refs.early[value][...]
            return x if dim == UNSLICED else slice_layer(x, layer, dim)

        def store(value: int, x: jax.Array) -> jax.Array:
            for j in self.outputs:
                if graph.outputs[j] == value:
                    refs.replaced[j][layer] = x[0]
                    # Read again: XLA for CPUs would compute it again, from a copy of all layers.
                    x = refs.replaced[j][layer][None]
            return x

        store(self.grad, grad[None])  # for a state that has the gradient itself
        self.layers.evaluate(layer, values, read, store)


def by_layer(update: Update, loop: list[int]) -> dict[int, LayerUpdate]:
    """Of the parameters of a loop, those that are updated layer by layer.

    Few elements, such as those of stacked biases in 8-bit blocks over several layers, may be
    updated after the backward pass.
    """
    found: dict[int, LayerUpdate] = {}
    failed: dict[int, _NeedsMoreError] = {}
    for i in loop:
        try:
            found[i] = LayerUpdate.find(update, i)
        except _NeedsMoreError as error:
            failed[i] = error
    sizes = {i: math.prod(update.graph.shape(i)) for i in loop}
    if sum(sizes[i] for i in failed) * _FEW > sum(sizes.values()):
        raise failed[max(failed, key=lambda i: sizes[i])]
    return found


def _mixed(name: str, length: int, found: str) -> _NeedsMoreError:
    return _NeedsMoreError(
        f"update='backward' updates each of the {length} layers of {name!r} by itself, and their "
        f"update needs several: {found}. Give stacks batch dims where a transformation has them, "
        "as CAME, Adafactor and LAMB (factoring=optax_ext.flax_transformer(), or by path "
        f"last_two_dims(batch=(0,))), {OTHERWISE}."
    )


def make_refs(
    graph: Graph, updates: list[LayerUpdate], given: list[Any], squares: Any, make: Any
) -> Refs:
    """Refs or cells for these updates; those of early values are yet to be written."""
    replaced = {j: make(given[j]) for one in updates for j in one.outputs}
    types = {value: graph.types[value] for one in updates for value in one.early}
    early = {value: make(jnp.zeros(t.shape, t.dtype)) for value, t in types.items()}
    return Refs(replaced, early, squares)
