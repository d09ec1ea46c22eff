"""Stage 3: layers that gather their own parameters, and free them after their forward pass.

``gather`` in ``_gather_params.py`` gathers; this file decides when.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sharding._types import Tree
from sharding.step._gather_params import gather, is_marking


def gathered(
    fn: Callable[..., Any], policy: Callable[..., bool] | None, reshard: bool
) -> Callable[..., Any]:
    """``fn(params, ...)`` that gathers its parameters, with ``reshard`` again in backward."""

    @functools.wraps(fn)
    def call(params: Tree, *args: Any, **kwargs: Any) -> Any:
        if not (is_marking() and reshard):
            return fn(gather(params), *args, **kwargs)
        # Leaves that are no arrays, such as functions in a module that is a pytree, stay outside.
        own, join_params = split_arrays(params)
        arrays, join_args = split_arrays((args, kwargs))

        def run(own: list[Any], arrays: list[Any]) -> Any:
            own, arrays = after_input(own, arrays)
            args, kwargs = join_args(arrays)
            return fn(gather(join_params(own)), *args, **kwargs)

        return jax.checkpoint(run, policy=policy)(own, arrays)

    return call


def split_arrays(tree: Tree) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The arrays of a tree, and a function that puts new ones in their places."""
    leaves, treedef = jax.tree.flatten(tree)
    places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray)]

    def join(arrays: list[Any]) -> Any:
        new = dict(zip(places, arrays, strict=True))
        return treedef.unflatten([new.get(i, x) for i, x in enumerate(leaves)])

    return [leaves[i] for i in places], join


def after_input(params: Tree, x: Tree) -> tuple[Any, Any]:
    """Parameters and the input of their layer behind one barrier.

    It keeps XLA from gathering the parameters of all layers before their inputs exist. The layer
    uses both outputs, so that the transpose orders the backward pass in the same way.
    """
    arrays, treedef = jax.tree.flatten(x)
    floating = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.inexact)]
    params, behind = lax.optimization_barrier((params, [arrays[i] for i in floating]))
    for i, array in zip(floating, behind, strict=True):
        arrays[i] = array
    return params, treedef.unflatten(arrays)
