"""Gathers parameters where the loss uses them, at stage 3, and reduce-scatters their gradients.

Below it ``gather`` in the loss does the second alone, in the backward pass.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from sharding._types import Array, DType, Tree
from sharding.collectives._all_gather import all_gather_arrays
from sharding.collectives._map_arrays import ArrayLayout
from sharding.collectives._reduce_scatter import reduce_scatter_arrays
from sharding.placement._layout import Layout
from sharding.sync import RowMethod

# --- Handles in place of parameters ---------------------------------------------------------------

# The name that marks, in a traced loss, the arrays that it passes to ``gather``; for ``find_uses``.
MARK = "sharding.gather"
# Those of them through which the loss takes a derivative by itself.
DERIVATIVE_MARK = "sharding.gather.derivative"
# As MARK, for the handles of stages 1 and 2.
HANDLE_MARK = "sharding.gather.handle"
# The same for handles that the loss uses as arrays.
FULL_MARK = "sharding.gather.full"
# What ``gather`` marks arrays for: "uses" in a trace that is read and not run, since a loop over
# layers would store what bears a mark; "hooks" in the trace of a ``HookedLoss``. The user's loss
# calls ``gather``, so that there is no argument for it.
_MARKS: contextvars.ContextVar[str] = contextvars.ContextVar("marks", default="")


@contextlib.contextmanager
def marking(how: str = "uses") -> Iterator[None]:
    """A context in which calls of ``gather`` mark arrays and handles."""
    token = _MARKS.set(how)
    try:
        yield
    finally:
        _MARKS.reset(token)


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
      moved: if the loss gathers a view in which the sharded dim is another one, the shape of the
        parameter and of its shard.
    """

    layout: Layout
    dim: int
    entries: tuple[Any, ...]
    dtype: Any
    reduce_dtype: Any
    reduce: Callable[[jax.Array, int], jax.Array] | None = None
    rows: RowMethod | None = None
    bits: int | None = None
    moved: tuple[tuple[int, ...], tuple[int, ...]] | None = None


_NOT_AN_ARRAY = (
    "This parameter is sharded, and not an array yet. Pass it to zero.gather first, or to "
    "sharding.lookup for rows of it."
)


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
        if self.spec.layout.stage < 3:
            return self.held.shape
        if self.spec.moved and self.held.shape == self.spec.moved[1]:
            return self.spec.moved[0]
        shape, dim = list(self.held.shape), self.spec.dim
        if dim and -dim <= len(shape):
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

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def astype(self, dtype: DType) -> "ParamHandle":
        """Itself, if that is its dtype."""
        if jnp.dtype(dtype) != self.dtype:
            raise TypeError(f"{_NOT_AN_ARRAY} It cannot be cast to {jnp.dtype(dtype)} before.")
        return self

    def __jax_array__(self) -> jax.Array:
        raise TypeError(_NOT_AN_ARRAY)

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(_NOT_AN_ARRAY)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Shard(ParamHandle):
    """The handle of a sharded parameter, for ``gather``; at stage 3 for ``lookup`` too."""

    # The plan of a step lets the loss compute from a handle only what it does not use.

    def __jax_array__(self) -> jax.Array:
        return _mark(gather(self) if self.spec.layout.stage == 3 else self.held, FULL_MARK)

    def __getitem__(self, index: Any) -> Any:
        entries = index if isinstance(index, tuple) else (index,)
        before = self.ndim + self.spec.dim  # the number of dims before the sharded one
        if len(entries) > before or not all(isinstance(i, slice) or _is_index(i) for i in entries):
            return self.__jax_array__()[index]
        return dataclasses.replace(self, held=self.held[index], tap=self.tap[index])

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(self.shape[0]))


def _is_index(index: Any) -> bool:
    is_integer = isinstance(index, int | np.integer | jax.Array) and not isinstance(index, bool)
    return is_integer and not np.ndim(index) and jnp.issubdtype(jnp.result_type(index), jnp.integer)


class LeafShard(Shard):
    """A shard that is a leaf of a tree, as an array is; loops over layers do not accept it."""


def is_shard(x: Any) -> bool:
    """Whether a tree's node is a shard."""
    return isinstance(x, Shard)


def in_global_view() -> bool:
    """Whether the loss is traced to run in the global view, where all parameters are arrays."""
    return _MARKS.get() == "hooks"


def has_shards(tree: Tree) -> bool:
    """Whether any leaf of a tree is a shard, or may be one in the global view."""
    leaves = jax.tree.leaves(tree, is_leaf=is_shard)
    return any(is_shard(x) or in_global_view() for x in leaves)


def call_with_shards(fn: Callable[..., Any], leaves: list[Any], *args: Any) -> Any:
    """``fn(leaves, *args)``, a loss that may match the tree of its parameters with another.

    Shards are nodes of a tree, so that loops over layers can slice the arrays in them. A function
    that matches trees by the first, such as ``equinox.combine(params, static)``, then finds a node
    where the other tree has a leaf or None. In that case the function is called again with shards
    that are leaves.

    Raises:
      ValueError: if neither form works.
    """
    try:
        return fn(leaves, *args)
    except ValueError as error:
        if f"{Shard.__module__}.{Shard.__name__}" not in str(error):
            raise
        try:
            return fn([_as_leaf(x) for x in leaves], *args)
        except (TypeError, ValueError) as other:
            # How a loop over layers rejects what is neither an array nor a tree of arrays.
            rejections = (_NOT_AN_ARRAY, "__jax_array__", "JAX type")
            if not any(text in str(other) for text in rejections):
                raise
            raise ValueError(
                "at stage 3 the loss matches the tree of its parameters with another, and loops "
                "over stacked parameters too. Name the parameters last where trees are matched: "
                "equinox.combine(static, params), not combine(params, static)."
            ) from error


def _as_leaf(x: Any) -> Any:
    return LeafShard(x.held, x.tap, x.spec) if is_shard(x) else x


def as_node(x: Any) -> Any:
    return Shard(x.held, x.tap, x.spec) if isinstance(x, LeafShard) else x


# --- The gather and its transpose -----------------------------------------------------------------


def gather(tree: Tree) -> Any:
    """The tree with every shard gathered; the gradient is reduce-scattered in the backward pass.

    Arrays are marked, while ``find_uses`` traces the loss.
    """
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_shard)
    shards = [x for x in leaves if is_shard(x)]
    for shard in shards:
        if -shard.spec.dim > shard.ndim:
            raise ValueError(
                f"a parameter of shape {shard.held.shape} is sharded along a dim that a loop over "
                "layers slices off. Name the data axis on another dim of it in param_specs."
            )
    specs = tuple(x.spec for x in shards)
    held, taps = [x.held for x in shards], [x.tap for x in shards]
    if shards and not (_MARKS.get() and specs[0].layout.stage < 3):
        held = _gather_arrays(specs, tuple(x.dtype for x in taps), held, taps)
    full = iter(held)
    return treedef.unflatten(
        [_mark(next(full), HANDLE_MARK) if is_shard(x) else _mark(x, MARK) for x in leaves]
    )


def _mark(x: Array, name: str) -> Any:
    if not (_MARKS.get() and isinstance(x, jax.Array | np.ndarray)):
        return x
    return checkpoint_name(x, name) if in_global_view() else _marked(name, x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _marked(name: str, x: jax.Array) -> jax.Array:
    return checkpoint_name(x, name)


@_marked.defjvp
def _marked_jvp(name: str, primals: tuple[Any], tangents: tuple[Any]) -> tuple[jax.Array, Any]:
    """Marks the derivative, too: only the loss itself asks for one in a trace that is read."""
    return checkpoint_name(_marked(name, *primals), DERIVATIVE_MARK), tangents[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather_arrays(
    specs: tuple[GatherSpec, ...],
    dtypes: tuple[Any, ...],
    held: list[jax.Array],
    taps: list[jax.Array],
) -> list[jax.Array]:
    """Unsharded parameters; their gradients, reduced, become those of ``taps``, in ``dtypes``."""
    del dtypes, taps
    layout = specs[0].layout
    if layout.stage < 3:
        return held
    with jax.named_scope("gather"):
        cast = [x.astype(spec.dtype) for x, spec in zip(held, specs, strict=True)]
        return all_gather_arrays(layout, cast, _array_layouts(specs, cast), specs[0].bits)


def _gather_forward(
    specs: tuple[GatherSpec, ...], dtypes: Any, held: list[jax.Array], taps: list[jax.Array]
) -> tuple[list[jax.Array], None]:
    if specs[0].layout.stage < 3:
        # The very arrays: a loop over layers stores a copy of all that it did not get as it is.
        return held, None
    # With its rule: a loss may take a derivative by its input, within the one by parameters.
    return _gather_arrays(specs, dtypes, held, taps), None


def _reduce_gradients(
    specs: tuple[GatherSpec, ...], dtypes: tuple[Any, ...], _: None, grads: list[jax.Array]
) -> tuple[None, list[jax.Array]]:
    layout = specs[0].layout
    with jax.named_scope("reduce_scatter"):
        cast = [g.astype(spec.reduce_dtype) for g, spec in zip(grads, specs, strict=True)]
        synced = [s.reduce(g, s.dim) for g, s in zip(cast, specs, strict=True) if s.reduce]
        sums = synced or reduce_scatter_arrays(
            layout, layout.axes, cast, _array_layouts(specs, cast)
        )
        return None, [g.astype(dtype) for g, dtype in zip(sums, dtypes, strict=True)]


_gather_arrays.defvjp(_gather_forward, _reduce_gradients)


def _array_layouts(specs: Sequence[GatherSpec], xs: Sequence[jax.Array]) -> list[ArrayLayout]:
    """Of arrays that may lack leading dims, which loops over layers took off."""
    return [
        ArrayLayout(spec.dim, PartitionSpec(*spec.entries[len(spec.entries) - x.ndim :]))
        for spec, x in zip(specs, xs, strict=True)
    ]
