"""Which operations work on each layer of a stack by itself, and how they run on one layer."""

import math
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext.traced_graph import ELEMENTWISE, REDUCTIONS, Equation, Graph, Value, bind
from sharding._types import Array

# Elements of one layer, on all devices together, from which on a stack is worth a loop.
MIN_LAYER_SIZE = 2**18
UNSLICED = -1  # in place of a dim: the operand has no layers, and all of them use it in full

# The parameter that holds the shape of the result.
_SHAPE_PARAMS = {
    "broadcast_in_dim": "shape",
    "iota": "shape",
    "reshape": "new_sizes",
    "slice": "limit_indices",
}


def is_stack(shape: tuple[int, ...]) -> bool:
    """Whether an array of this shape is worth a loop over its first dim."""
    return len(shape) > 1 and shape[0] > 2 and math.prod(shape[1:]) >= MIN_LAYER_SIZE


def slice_layer(x: Array, layer: Any, dim: int) -> Any:
    """One layer, with a dim of size 1 in place of that of the layers."""
    return lax.dynamic_index_in_dim(x, layer, dim, keepdims=True)


def operand_dims(graph: Graph, eqn: Equation, dim: int) -> list[int] | None:
    """Along which dim each operand is sliced, or ``UNSLICED``; None if that is not known."""
    name = eqn.primitive.name
    params = eqn.params
    shapes = [graph.shape(v) for v in eqn.operands]
    out = graph.shape(eqn.results[0])
    if dim == UNSLICED or dim >= len(out):
        return None

    # The operands have the dims of the result.
    if name in ELEMENTWISE:
        if any(s and len(s) != len(out) for s in shapes):
            return None
        return [dim if s and s[dim] == out[dim] else UNSLICED for s in shapes]
    if name == "sharding_constraint":
        spec = params["sharding"].spec
        return [dim] if dim >= len(spec) or spec[dim] is None else None
    if name == "concatenate" and params["dimension"] != dim:
        return [dim] * len(shapes)
    if name == "split" and params["axis"] != dim:
        return [dim]
    if name == "pad" and tuple(params["padding_config"][dim]) == (0, 0, 0):
        return [dim, UNSLICED]
    if name == "slice" and len(out) and out[dim] == shapes[0][dim]:
        return [dim]

    # Dims are added, removed or moved.
    if name == "broadcast_in_dim" and len(shapes) == 1:
        at = params["broadcast_dimensions"]
        same = dim in at and shapes[0][at.index(dim)] == out[dim]
        return [at.index(dim) if same else UNSLICED]
    if name in REDUCTIONS and len(shapes) == 1:
        return [_remaining(shapes[0], params["axes"])[dim]]
    if name == "squeeze":
        return [_remaining(shapes[0], params["dimensions"])[dim]]
    if name == "transpose":
        return [params["permutation"][dim]]
    if name == "reshape" and len(shapes) == 1 and params["dimensions"] is None:
        return _dim_before_reshape(shapes[0], out, dim)
    if name == "stack" and params["axis"] != dim:
        return [dim - (params["axis"] < dim)] * len(shapes)
    return [] if name == "iota" and not shapes else None


def _remaining(shape: tuple[int, ...], removed: Sequence[int]) -> list[int]:
    """The dims that an operation does not remove."""
    return [d for d in range(len(shape)) if d not in removed]


def _dim_before_reshape(shape: tuple[int, ...], out: tuple[int, ...], dim: int) -> list[int] | None:
    """The dim of the operand with the same size and as many elements before it."""
    before = math.prod(out[:dim])
    for d, size in enumerate(shape):
        if size == out[dim] and math.prod(shape[:d]) == before:
            return [d]
    return None


def bind_to_layer(eqn: Equation, dim: int, operands: list[Any], layer: Any) -> Sequence[Any]:
    """The results of an equation for one layer, from operands that are sliced to it."""
    name = eqn.primitive.name
    params = dict(eqn.params)
    if name == "iota" and params["dimension"] == dim:
        shape = (*params["shape"][:dim], 1, *params["shape"][dim + 1 :])
        return [jnp.full(shape, layer, params["dtype"])]
    if name in _SHAPE_PARAMS:
        sizes = list(params[_SHAPE_PARAMS[name]])
        sizes[dim] = 1
        params[_SHAPE_PARAMS[name]] = tuple(sizes)
    return bind(eqn, operands, params)


class NotLayerwiseError(Exception):
    """A part of a graph needs several layers of a stack at once. Its argument is an equation."""


class SlicedEquation(NamedTuple):
    """An equation that is evaluated for each layer."""

    eqn: Equation
    dim: int  # along which its results are sliced
    operand_dims: list[int]  # along which each operand is sliced, or ``UNSLICED``


class LayerGraph:
    """What computes some values of a graph layer by layer along dim 0.

    Attributes:
      inputs: of the graph, that are needed.
      needed_dims: along which dims each value is sliced.
      prerequisites: values that are to be computed before, for all layers.
    """

    def __init__(self, graph: Graph, values: list[Value], known: Container[Value], stacks: int):
        """Finds the equations, backward from ``values``.

        ``known`` needs no equation; ``stacks`` are the inputs, as the bits of an int, on which no
        prerequisite may depend.
        """
        self.values = values
        self.needed_dims: dict[Value, set[int]] = {value: {0} for value in values}
        self.prerequisites: list[Value] = []
        self._equations: list[SlicedEquation] = []
        equations, inputs = graph.needed(values, known)
        for eqn in reversed(equations):
            dims: set[int] = set().union(*(self.needed_dims.get(v, ()) for v in eqn.results))
            if not dims:
                continue  # only a prerequisite needs it
            operands = operand_dims(graph, eqn, *dims) if len(dims) == 1 else None
            if operands is not None:
                self._equations.insert(0, SlicedEquation(eqn, dims.pop(), operands))
                for value, dim in zip(eqn.operands, operands, strict=True):
                    self.needed_dims.setdefault(value, set()).add(dim)
            elif any(graph.reads[v] & stacks for v in eqn.results):
                raise NotLayerwiseError(eqn)
            else:
                self.prerequisites += [v for v in eqn.results if v in self.needed_dims]
        self.inputs = [i for i in inputs if i in self.needed_dims]

    def evaluate(
        self,
        layer: jax.Array,
        values: dict[Value, jax.Array],
        read: Callable[[Value, int], jax.Array],
        store: Callable[[Value, jax.Array], jax.Array] = lambda value, x: x,
    ) -> list[jax.Array]:
        """The values of one layer.

        ``values`` has those that are sliced to it already; of others ``read(value, dim)`` returns
        the slice along a dim, or with ``UNSLICED`` all of it. ``store(value, x)`` gets each that is
        computed, and returns what is computed with.
        """
        values = dict(values)

        def operand(value: Value, dim: int) -> jax.Array:
            return values[value] if value in values else read(value, dim)

        for eqn, dim, dims in self._equations:
            operands = [operand(v, d) for v, d in zip(eqn.operands, dims, strict=True)]
            results = bind_to_layer(eqn, dim, operands, layer)
            values |= {v: store(v, x) for v, x in zip(eqn.results, results, strict=True)}
        return [operand(value, 0) for value in self.values]
