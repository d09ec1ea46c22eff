"""Types that JAX traces arrays by, on Explicit axes and inside a ``shard_map``."""

from typing import Any

import jax
from jax import lax

from sharding._types import Array


def traced_type(t: Any) -> jax.ShapeDtypeStruct:
    """Of ``jax.typeof`` what traces differ by: shardings on Explicit axes, axes it varies over."""
    varies = t.manual_axis_type if t.manual_axis_type.varying else None
    sharding = t.sharding if varies or t.sharding.mesh.explicit_axes else None
    return jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=sharding, manual_axis_type=varies)


def varying_alike(arrays: list[Any]) -> list[Any]:
    """The same arrays, each over all axes of a ``shard_map`` that one of them varies over."""
    axes = list(map(_axes, arrays))
    lack = [tuple(frozenset[str]().union(*axes) - own) for own in axes]
    pairs = zip(arrays, lack, strict=True)
    return [lax.pcast(x, more, to="varying") if more else x for x, more in pairs]


def barrier(arrays: Any) -> Any:
    """The same behind one barrier; in a ``shard_map`` one for each type, which it would change."""
    leaves, treedef = jax.tree.flatten(arrays)
    axes = list(map(_axes, leaves))
    for own in dict.fromkeys(axes):
        at = [i for i, varying in enumerate(axes) if varying == own]
        for i, x in zip(at, lax.optimization_barrier([leaves[i] for i in at]), strict=True):
            leaves[i] = x
    return treedef.unflatten(leaves)


def _axes(x: Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying
