"""Which operations work on the layers of a stack one by one, and how they run on one layer."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from optax_ext.schedule import ELEMENTWISE, REDUCTIONS, Equation, Graph, bind

# Elements of one layer, over all devices, from which on a stack is worth a loop.
MIN_LAYER_SIZE = 2**18
WHOLE = -1  # in place of the dim that an operand is cut along


def is_stack(shape: tuple[int, ...]) -> bool:
    return len(shape) > 1 and shape[0] > 2 and math.prod(shape[1:]) >= MIN_LAYER_SIZE


def layer_of(x: Any, layer: Any, dim: int) -> Any:
    return lax.dynamic_index_in_dim(x, layer, dim, keepdims=True)


def operand_dims(graph: Graph, eqn: Equation, dim: int) -> list[int] | None:
    """Along which dim each operand is cut where the result is along ``dim``; None if that fails."""
    name, params = eqn.primitive.name, eqn.params
    shapes = [graph.shape(v) for v in eqn.operands]
    out = graph.shape(eqn.results[0])
    if dim == WHOLE:
        return None
    if name in ELEMENTWISE:
        if any(s and len(s) != len(out) for s in shapes):
            return None
        return [dim if s and s[dim] == out[dim] else WHOLE for s in shapes]
    if name == "sharding_constraint":
        spec = params["sharding"].spec
        return [dim] if dim >= len(spec) or spec[dim] is None else None
    if name == "broadcast_in_dim" and len(shapes) == 1:
        at = params["broadcast_dimensions"]
        same = dim in at and shapes[0][at.index(dim)] == out[dim]
        return [at.index(dim) if same else WHOLE]
    if name in REDUCTIONS and len(shapes) == 1:
        return [[d for d in range(len(shapes[0])) if d not in params["axes"]][dim]]
    if name == "transpose":
        return [params["permutation"][dim]]
    if name == "squeeze":
        return [[d for d in range(len(shapes[0])) if d not in params["dimensions"]][dim]]
    if name == "reshape" and len(shapes) == 1 and params["dimensions"] is None:
        before = math.prod(out[:dim])
        fit = (
            d
            for d, n in enumerate(shapes[0])
            if n == out[dim] and math.prod(shapes[0][:d]) == before
        )
        found = next(fit, None)
        return None if found is None else [found]
    if name == "concatenate" and params["dimension"] != dim:
        return [dim] * len(shapes)
    if name == "stack" and params["axis"] != dim:
        return [dim - (params["axis"] < dim)] * len(shapes)
    if name == "split" and params["axis"] != dim:
        return [dim]
    if name == "pad" and tuple(params["padding_config"][dim]) == (0, 0, 0):
        return [dim, WHOLE]
    if name == "slice" and len(out) and out[dim] == shapes[0][dim]:
        return [dim]
    return [] if name == "iota" and not shapes else None


def bind_layer(eqn: Equation, dim: int, operands: list[Any], layer: Any) -> Sequence[Any]:
    """The results of an equation, of operands that are cut to one layer."""
    name, params = eqn.primitive.name, dict(eqn.params)
    if name == "iota" and params["dimension"] == dim:
        shape = (*params["shape"][:dim], 1, *params["shape"][dim + 1 :])
        return [jnp.full(shape, layer, params["dtype"])]
    key = {
        "broadcast_in_dim": "shape",
        "iota": "shape",
        "reshape": "new_sizes",
        "slice": "limit_indices",
    }
    if name in key:
        sizes = list(params[key[name]])
        sizes[dim] = 1
        params[key[name]] = tuple(sizes)
    return bind(eqn, operands, params)
