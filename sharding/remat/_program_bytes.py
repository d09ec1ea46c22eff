"""Bytes of arrays of one device, and of a compiled program that runs a function both ways."""

import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, SingleDeviceSharding

from sharding._types import Array, Tree
from sharding.plan.audit._liveness import temporaries_of


def step_temporaries(
    fn: Callable[[Any, Any], Any], params: Tree, x: Array, device: jax.Device
) -> float:
    """Bytes of a compiled program that runs a function forward and backward."""
    # As in a training step, the cotangent of the result is computed from the result, unless it is a
    # loss, and that of the input is not returned. Infinite where the compiler gives up, as beyond a
    # TPU's memory.

    def loss(params: Tree, x: Array) -> Any:
        results = [y.astype(jnp.float32) for y in _floating(fn(params, x))]
        return sum(jnp.sum(jnp.square(y)) if y.ndim else y for y in results)

    def step(params: Tree, x: Array) -> Any:
        derivative = jax.vjp(lambda params: loss(params, x), params)[1]
        return _floating(derivative(jnp.float32(1.0)))

    args, shardings = (params, x), cast(Any, SingleDeviceSharding(device))
    if is_sharded(args):
        shardings = [t.sharding for t in _floating(params)]
    else:
        args = jax.tree.map(lambda t: t.update(sharding=shardings), args)
    try:
        return temporaries_of(jax.jit(step, out_shardings=shardings).lower(*args).compile())
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return math.inf


def _floating(tree: Tree) -> list[Any]:
    """The leaves that have gradients; those of integers are of dtype float0."""
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]


def is_sharded(tree: Tree) -> bool:
    return any(x.sharding is not None for x in jax.tree.leaves(tree))


def types_of(tree: Tree) -> Any:
    """Shapes, dtypes, and the shardings of arrays on several devices."""

    def type_of(x: Array) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
            sharding = None
        return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=sharding)

    return jax.tree.map(type_of, tree)
