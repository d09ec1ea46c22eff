"""Gathers parameters where the loss uses them, at stage 3, and reduce-scatters their gradients.

Below it ``gather`` in the loss does the second alone, in the backward pass.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from optax_ext.kernels import calling_default
from sharding._types import Tree
from sharding.collectives._map_arrays import ArrayLayout
from sharding.collectives._reduce_scatter import all_gather_arrays, reduce_scatter_arrays
from sharding.placement._layout import Layout
from sharding.placement._specs import of_last_dims
from sharding.sync import RowMethod

# --- What the loss is traced for ------------------------------------------------------------------

# The name that marks, in a traced loss, the arrays that it passes to ``gather``.
MARK = "sharding.gather"
# The user's loss calls ``gather``, so that there is no argument for it.
_TRACED: contextvars.ContextVar[bool] = contextvars.ContextVar("traced", default=False)


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """A context in which calls of ``gather`` mark arrays, and ``with_handles`` leaves calls."""
    token = _TRACED.set(True)
    try:
        yield
    finally:
        _TRACED.reset(token)


def is_marking() -> bool:
    return _TRACED.get()


# A function in a traced loss, ``fn``, that takes handles in place of parameters where what runs the
# loss has them.
CALL = calling_default("with_handles")


def with_handles(fn: Callable[..., Any], *args: Any, by_rows: bool = False) -> Any:
    """``fn(*args)``, which gets a ``ParamHandle`` in place of each sharded parameter.

    ``by_rows`` says that it looks up rows of its first argument.
    """
    if not is_marking():
        return fn(*args)
    flat, treedef = jax.tree.flatten(args)
    closed, results = jax.make_jaxpr(fn, return_shape=True)(*args)
    if any(isinstance(x, jax.core.Tracer) for x in closed.consts):  # of this trace alone
        return fn(*args)

    def call(*flat: Any) -> list[Any]:
        return jax.tree.leaves(fn(*treedef.unflatten(flat)))

    out = CALL.bind(*flat, fn=call, default=closed, by_rows=by_rows)
    return jax.tree.unflatten(jax.tree.structure(results), out)


# --- Handles of sharded parameters ----------------------------------------------------------------


class GatherSpec(NamedTuple):
    """How a parameter is gathered, and its gradient reduced.

    Attributes:
      layout: the mesh.
      dim: the sharded dim, counted from the end: loops over layers take dims off the front.
      entries: per dim, the entry of the spec on the user's axes of the mesh.
      dtype: in which the parameter is gathered.
      reduce_dtype: in which its gradient is summed.
      reduce: ``reduce(gradient, dim)``, a gradient sync's own in place of the reduce-scatter.
      rows: the sync of rows that were looked up; None to sync the full gradient.
      bits: of the codes that a matrix is gathered in; None to gather it as it is.
    """

    layout: Layout
    dim: int
    entries: tuple[Any, ...]
    dtype: Any
    reduce_dtype: Any
    reduce: Callable[[jax.Array, int], jax.Array] | None = None
    rows: RowMethod | None = None
    bits: int | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class ParamHandle:
    """A parameter for ``gather`` or ``lookup``: it has a shape and a dtype, but is no array.

    Attributes:
      held: the parameter as this device holds it: a shard at stage 3, else unsharded.
      tap: zeros, of the shape and the dtype of this device's part of the gradient: what is
        differentiated in place of the parameter.
      spec: how it is gathered, and its gradient reduced.
    """

    held: jax.Array
    tap: jax.Array
    spec: GatherSpec = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the unsharded parameter."""
        shape, dim = list(self.held.shape), self.spec.dim
        if self.spec.layout.stage == 3 and dim and -dim <= len(shape):
            shape[dim] *= self.spec.layout.num_shards
        return tuple(shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the parameter as the loss sees it."""
        return self.spec.dtype

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return self.held.ndim


def is_handle(x: Any) -> bool:
    """Whether a tree's node is a handle."""
    return isinstance(x, ParamHandle)


# --- The gather and its transpose -----------------------------------------------------------------


def gather(tree: Tree) -> Any:
    """The tree with every handle gathered; the gradient is reduce-scattered in the backward pass.

    Arrays are marked, in a loss that is traced to run with parameters that are gathered there.
    """

    def gather_one(x: Any) -> Any:
        if is_handle(x):
            if -x.spec.dim > x.ndim:
                raise ValueError(
                    f"a parameter of shape {x.held.shape} is sharded along a dim that a loop over "
                    "layers slices off. Name the data axis on another dim of it in param_specs."
                )
            return _gather_array(x.spec, x.tap.dtype, x.held, x.tap)
        marked = is_marking() and isinstance(x, jax.Array | np.ndarray)
        return checkpoint_name(x, MARK) if marked else x

    return jax.tree.map(gather_one, tree, is_leaf=is_handle)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather_array(spec: GatherSpec, dtype: Any, held: jax.Array, tap: jax.Array) -> jax.Array:
    """The unsharded parameter; its gradient, reduced, becomes that of ``tap``, in ``dtype``."""
    del dtype, tap
    if spec.layout.stage < 3:
        return held
    with jax.named_scope("gather"):
        cast = held.astype(spec.dtype)
        return all_gather_arrays(spec.layout, [cast], [_array_layout(spec, cast)], spec.bits)[0]


def _gather_forward(spec: GatherSpec, dtype: Any, held: jax.Array, tap: jax.Array) -> Any:
    if spec.layout.stage < 3:
        # The very array: a loop over layers stores a copy of all that it did not get as it is.
        return held, None
    # With its rule: a loss may take a derivative by its input, within the one by parameters.
    return _gather_array(spec, dtype, held, tap), None


def _reduce_gradient(spec: GatherSpec, dtype: Any, _: None, grad: jax.Array) -> Any:
    layout = spec.layout
    with jax.named_scope("reduce_scatter"):
        grad = grad.astype(spec.reduce_dtype)
        if spec.reduce:
            return None, spec.reduce(grad, spec.dim).astype(dtype)
        sums = reduce_scatter_arrays(layout, layout.axes, [grad], [_array_layout(spec, grad)])
        return None, sums[0].astype(dtype)


_gather_array.defvjp(_gather_forward, _reduce_gradient)


def _array_layout(spec: GatherSpec, x: jax.Array) -> ArrayLayout:
    return ArrayLayout(spec.dim, of_last_dims(spec.entries, x.ndim))


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
