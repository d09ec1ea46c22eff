"""Stage 3: parameters that are gathered where they are used, and let go of afterwards."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from sharding.collectives._all_gather import all_gather_arrays
from sharding.collectives._array_layout import ArrayLayout
from sharding.collectives._reduce_scatter import reduce_scatter_arrays
from sharding.placement._layout import Layout
from sharding.sync import RowMethod

# The name that marks, in a traced loss, what it passes to ``gather``; for ``uses``.
MARK = "sharding.gather"


class How(NamedTuple):
    """How a parameter is cut and gathered.

    Attributes:
      layout: the mesh.
      dim: the dim that is cut, counted from the end: loops over layers take dims off the front.
      entries: how each dim lies on the user's axes of the mesh.
      dtype: in which dtype the parameter is gathered.
      reduce_dtype: in which dtype its gradient is summed.
      sum_by: what sums it, in place of a reduce-scatter: of the gradient and the dim, the piece.
      rows: how that of rows that were looked up is exchanged; None for all of the gradient.
      bits: in which codes a matrix is gathered; None as it is.
    """

    layout: Layout
    dim: int
    entries: tuple[Any, ...]
    dtype: Any
    reduce_dtype: Any
    sum_by: Callable[[jax.Array, int], jax.Array] | None = None
    rows: RowMethod | None = None
    bits: int | None = None


class Handle:
    """A parameter for ``gather`` or ``lookup``: no array, but it can be asked what it will be."""

    value: jax.Array
    shape: tuple[int, ...]

    @property
    def dtype(self) -> Any:
        """Of the parameter as the loss sees it."""
        return self.value.dtype

    @property
    def ndim(self) -> int:
        """Its dims."""
        return self.value.ndim

    @property
    def size(self) -> int:
        """Its elements."""
        return math.prod(self.shape)

    def astype(self, dtype: Any) -> "Handle":
        """Itself, if that is its dtype."""
        if jnp.dtype(dtype) != self.dtype:
            raise TypeError(f"{_NO_ARRAY} It cannot become {jnp.dtype(dtype)}.")
        return self

    def __jax_array__(self) -> jax.Array:
        raise TypeError(_NO_ARRAY)

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(_NO_ARRAY)


_NO_ARRAY = "This parameter is not whole on the device: it is for gather and lookup alone."


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Shard(Handle):
    """This device's part of a parameter, until ``gather`` makes it whole."""

    value: jax.Array
    how: How = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Of the whole parameter."""
        shape, dim = list(self.value.shape), self.how.dim
        if -dim <= len(shape):
            shape[dim] *= self.how.layout.num_shards
        return tuple(shape)

    @property
    def dtype(self) -> Any:
        """In which it is gathered."""
        return self.how.dtype


class LeafShard(Shard):
    """A shard that is a leaf of a tree, as an array is; loops over layers do not take it."""


def call_with_shards(fn: Callable[..., Any], leaves: list[Any], *args: Any) -> Any:
    """``fn(leaves, *args)``, a loss that may match the tree of its parameters with another.

    Shards are nodes of a tree, so that loops over layers take a dim off what they hold. A function
    that matches trees by the first, such as ``equinox.combine(params, static)``, then finds a node
    where the other tree has a leaf or None: it is called again, with shards that are leaves.

    Raises:
      ValueError: if neither will do.
    """
    try:
        return fn(leaves, *args)
    except ValueError as error:
        if f"{Shard.__module__}.{Shard.__name__}" not in str(error):
            raise
        try:
            return fn([_as_leaf(x) for x in leaves], *args)
        except (TypeError, ValueError) as other:
            # As a loop over layers complains of what is neither an array nor a tree of them.
            if not any(part in str(other) for part in (_NO_ARRAY, "__jax_array__", "JAX type")):
                raise
            raise ValueError(
                "at stage 3 the loss matches the tree of its parameters with another, and loops "
                "over stacked parameters too. Name the parameters last where trees are matched: "
                "equinox.combine(static, params), not combine(params, static)."
            ) from error


def _as_leaf(x: Any) -> Any:
    return LeafShard(x.value, x.how) if is_shard(x) else x


def _as_node(x: Any) -> Any:
    return Shard(x.value, x.how) if isinstance(x, LeafShard) else x


def is_shard(x: Any) -> bool:
    """Whether a tree's node is a shard."""
    return isinstance(x, Shard)


def has_shards(tree: Any) -> bool:
    """Whether any leaf of a tree is a shard."""
    return any(is_shard(x) for x in jax.tree.leaves(tree, is_leaf=is_shard))


# --- Gathering ------------------------------------------------------------------------------------


def gather(tree: Any) -> Any:
    """The tree with every shard made whole; its gradient is reduce-scattered on the way back.

    Arrays that are whole already are only marked, for ``uses``.
    """
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_shard)
    shards = [x for x in leaves if is_shard(x)]
    for shard in shards:
        if -shard.how.dim > shard.value.ndim:
            raise ValueError(
                f"a parameter of shape {shard.value.shape} is cut along a dim that a loop over "
                "layers took off. Name the data axis on another dim of it in param_specs."
            )
    dtypes = tuple(shard.value.dtype for shard in shards)
    values = _gather(tuple(x.how for x in shards), dtypes, [x.value for x in shards])
    whole = iter(values)
    return treedef.unflatten([next(whole) if is_shard(x) else _mark(x) for x in leaves])


def _mark(x: Any) -> Any:
    return checkpoint_name(x, MARK) if isinstance(x, jax.Array | np.ndarray) else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(
    hows: tuple[How, ...], dtypes: tuple[Any, ...], values: list[jax.Array]
) -> list[jax.Array]:
    del dtypes
    if not hows:
        return []
    with jax.named_scope("gather"):
        cast = [x.astype(how.dtype) for x, how in zip(values, hows, strict=True)]
        return all_gather_arrays(hows[0].layout, cast, _cuts(hows, cast), hows[0].bits)


def _gather_forward(hows: Any, dtypes: Any, values: Any) -> tuple[list[jax.Array], None]:
    return _gather(hows, dtypes, values), None


def _gather_backward(
    hows: tuple[How, ...], dtypes: tuple[Any, ...], _: None, grads: list[jax.Array]
) -> tuple[list[jax.Array]]:
    if not hows:
        return ([],)
    layout = hows[0].layout
    with jax.named_scope("reduce_scatter"):
        cast = [g.astype(how.reduce_dtype) for g, how in zip(grads, hows, strict=True)]
        own = [how.sum_by(g, how.dim) for g, how in zip(cast, hows, strict=True) if how.sum_by]
        sums = own or reduce_scatter_arrays(layout, layout.axes, cast, _cuts(hows, cast))
        return ([g.astype(dtype) for g, dtype in zip(sums, dtypes, strict=True)],)


_gather.defvjp(_gather_forward, _gather_backward)


def _cuts(hows: Sequence[How], xs: Sequence[jax.Array]) -> list[ArrayLayout]:
    return [
        ArrayLayout(how.dim, PartitionSpec(*how.entries[len(how.entries) - x.ndim :]))
        for how, x in zip(hows, xs, strict=True)
    ]


def gathered(
    fn: Callable[..., Any], policy: Callable[..., bool] | None, reshard: bool
) -> Callable[..., Any]:
    """``fn(params, ...)`` that gathers its parameters, again in the backward pass if ``reshard``.

    Where ``params`` holds no shards, ``fn`` as it is.
    """

    @functools.wraps(fn)
    def call(params: Any, *args: Any, **kwargs: Any) -> Any:
        if not (has_shards(params) and reshard):
            return fn(gather(params), *args, **kwargs)
        # What is no array, such as the functions in a module that is a pytree, stays outside.
        own, join_params = split_arrays(params)
        arrays, join = split_arrays((args, kwargs))

        def run(own: list[Any], arrays: list[Any]) -> Any:
            own, arrays = together(own, arrays)
            args, kwargs = join(arrays)
            return fn(gather(join_params(own)), *args, **kwargs)

        return jax.checkpoint(run, policy=policy)(own, arrays)

    return call


def split_arrays(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The arrays and shards of a tree, and a function that puts others in their places."""
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_shard)
    places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray | Shard)]

    def join(arrays: list[Any]) -> Any:
        new = dict(zip(places, arrays, strict=True))
        return treedef.unflatten([new.get(i, x) for i, x in enumerate(leaves)])

    return [_as_node(leaves[i]) for i in places], join


def together(params: Any, arrays: list[Any]) -> tuple[Any, list[Any]]:
    """Parameters and the input of their layer behind one barrier.

    XLA cannot gather ahead of the input then, as it does to gain time; and because what follows
    uses both of the barrier's outputs, the transpose orders the backward pass alike.
    """
    floating = [jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays]
    moved = [x for f, x in zip(floating, arrays, strict=True) if f]
    params, moved = lax.optimization_barrier((params, moved))
    rest = iter(moved)
    return params, [next(rest) if f else x for f, x in zip(floating, arrays, strict=True)]
