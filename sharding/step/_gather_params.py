"""``gather`` in a loss: of handles, or, in a trace, marks of places; layers that gather their own.

These free parameters after their forward pass, and gather them again in the backward pass.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from sharding._types import Tree
from sharding.loss._evaluate import after_input, use
from sharding.loss._marks import MARK, is_marking
from sharding.step._device_rules import DeviceRule


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class ParamHandle:
    """A parameter for ``gather`` or ``lookup``: it has a shape and a dtype, but is no array.

    Attributes:
      held: the parameter as this device holds it: a shard at stage 3, else unsharded.
      tap: zeros, of the shape and the dtype of this device's part of the gradient: what is
        differentiated in place of the parameter.
      rule: how it is gathered, and its gradient reduced.
    """

    held: jax.Array
    tap: jax.Array
    rule: DeviceRule = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the unsharded parameter."""
        return self.rule.full_shape(self.held)

    @property
    def dtype(self) -> Any:
        """The dtype of the parameter as the loss sees it."""
        return self.rule.dtype

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return self.held.ndim


def is_handle(x: Any) -> bool:
    """Whether a tree's node is a handle."""
    return isinstance(x, ParamHandle)


def gather(tree: Tree) -> Any:
    """The tree with every handle gathered; the gradient is reduce-scattered in the backward pass.

    Arrays are marked, in a loss that is traced to run with parameters that are gathered there.
    """

    def gather_one(x: Any) -> Any:
        if is_handle(x):
            if -x.rule.dim > x.ndim:
                raise ValueError(
                    f"a parameter of shape {x.held.shape} is sharded along a dim that a loop over "
                    "layers slices off. Name the data axis on another dim of it in param_specs."
                )
            return use(x.rule, x.held, x.tap)
        marked = is_marking() and isinstance(x, jax.Array | np.ndarray)
        return checkpoint_name(x, MARK) if marked else x

    return jax.tree.map(gather_one, tree, is_leaf=is_handle)


# --- Layers that gather their own parameters, and free them after their forward pass --------------


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
