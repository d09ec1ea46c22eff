"""The interface of gradient sync, and how a sync of trees is made of methods for single arrays."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from sharding._types import Array, Tree
from sharding.collectives._reduce_scatter import own_shard
from sharding.collectives._sparse_rows import SparseRows, rows_of_array, rows_of_lookups
from sharding.placement._specs import Axes, Axis, axes_of, key_of_path, leaf_names

Reduced = tuple[jax.Array, Any]  # a mean, or a shard of it, and the new state


class GradientSync(NamedTuple):
    """How the gradients of several devices become their mean; used inside a ``shard_map``.

    Attributes:
      init: ``init(params) -> state``, the state of one device, from real or abstract parameters.
      all_reduce: ``all_reduce(grads, state, axis) -> (mean, state)``. ``grads`` is a tree like
        ``params``, with None for gradients that are not synchronized; ``axis`` may be a tuple.
      reduce_scatter: ``reduce_scatter(grads, state, axis, dims) -> (shards, state)``: this device's
        shard of each mean along a dim, counted from the end; 0 for the full mean.
      rows: ``rows(path, array) -> RowMethod``, how the gradient of a table is synchronized by
        looked-up rows; None if the full gradient is needed. None as a field: for all arrays.
    """

    init: Callable[[Any], Any]
    all_reduce: Callable[[Any, Any, Axis], tuple[Any, Any]]
    reduce_scatter: Callable[[Any, Any, Axis, Any], tuple[Any, Any]]
    rows: "Callable[[str, Any], RowMethod | None] | None" = None


class RowMethod(NamedTuple):
    """How the gradient of a table is synchronized by looked-up rows; stateless.

    Attributes:
      reduce: ``reduce(ids, rows, num_rows, axes, dim)``: from the gradients (lookups, ...) of rows
        the mean gradient of the table, or this device's shard of it, as in ``GradientSync``.
      density: the expected fraction of all rows that one device looks up.
    """

    reduce: Callable[..., jax.Array]
    density: float


class Method(NamedTuple):
    """How one array is synchronized."""

    init: Callable[[Any], Any]  # init(x) -> the state of one device, for a real or abstract array
    # reduce(x, state, axes, context, dim) -> (mean, state), or this device's shard of it along
    # a dim, counted from the end; 0 for the full mean.
    reduce: Callable[..., Reduced]
    is_linear: bool = False  # whether infinities and NaN propagate to the mean by themselves
    counts_steps: bool = False  # whether the method reads the step in its context
    in_full: bool = False  # whether it sends the array in full
    rows: RowMethod | None = None  # how it synchronizes looked-up rows; None if it does not


class StepContext(NamedTuple):
    """What random keys and schedules depend on; the same on all devices."""

    step: Any  # how many syncs there were before; None if no method counts steps
    path: str  # of the array

    def key(self, seed: int) -> jax.Array:
        """For this step and array, the same in every process."""
        key = key_of_path(jax.random.key(seed), self.path)
        return key if self.step is None else jax.random.fold_in(key, self.step)


class SyncState(NamedTuple):
    """The state of a sync that is made of methods for single arrays."""

    step: jax.Array | None  # int32; None unless a method counts steps
    arrays: Any  # a tree like the parameters: the state of each one's method


def leafwise(choose: Callable[[str, Any], Method], unmet: str = "") -> GradientSync:
    """The sync of a tree, of every array by the method that ``choose(path, array)`` returns.

    If the gradient of any device is not finite, all devices get NaN, and the state is unchanged.
    ``init`` raises if all are sent in full, and ``unmet`` states the condition that none meets.
    """

    def init(params: Tree) -> SyncState:
        flat, treedef = named_leaves(params)
        methods = [choose(path, x) for path, x in flat]
        if unmet and flat and all(method.in_full for method in methods):
            raise ValueError(
                f"{unmet} for none of the shapes {sorted({tuple(x.shape) for _, x in flat})}. Use "
                "a smaller one, or sync.dense()."
            )
        states = [method.init(x) for method, (_, x) in zip(methods, flat, strict=True)]
        counts = any(method.counts_steps for method in methods)
        return SyncState(jnp.zeros((), jnp.int32) if counts else None, treedef.unflatten(states))

    def reduce_scatter(
        grads: Tree, state: SyncState, axis: Axis, dims: Any
    ) -> tuple[Any, SyncState]:
        axes = check_axes(axis)
        flat, treedef = named_leaves(grads, is_leaf=is_none)
        out = [x for _, x in flat]
        states = treedef.flatten_up_to(state.arrays)
        dims = treedef.flatten_up_to(dims)
        methods = {i: choose(path, x) for i, (path, x) in enumerate(flat) if x is not None}

        # Lossy methods would turn NaN into finite numbers: one all-reduce of flags finds it first.
        lossy = [i for i, method in methods.items() if not method.is_linear]
        flags = dict(zip(lossy, _any_nonfinite([out[i] for i in lossy], axes), strict=True))

        for i, method in methods.items():
            context = StepContext(state.step, flat[i][0])
            x, old, dtype, nonfinite = out[i], states[i], out[i].dtype, flags.get(i)
            if nonfinite is not None:
                x = jnp.where(nonfinite, jnp.zeros_like(x), x)
            x, new = method.reduce(x, old, axes, context, dims[i])
            if nonfinite is not None:
                x = jnp.where(nonfinite, jnp.full_like(x, jnp.nan), x)
                new = jax.tree.map(lambda a, b, at=nonfinite: jnp.where(at, a, b), old, new)
            out[i], states[i] = x.astype(dtype), new
        step = None if state.step is None else state.step + 1
        return treedef.unflatten(out), SyncState(step, treedef.unflatten(states))

    return with_all_reduce(init, reduce_scatter, lambda path, x: choose(path, x).rows)


def by_size(
    name: str, method: Method, small: Method, min_size: int, min_dims: int = 0
) -> GradientSync:
    """The sync ``name``: a method for arrays of that size and number of dims, one for others."""

    def choose(path: str, x: Array) -> Method:
        return method if x.size >= min_size and len(x.shape) >= min_dims else small

    dims = f" in {min_dims} dims or more" if min_dims else ""
    unmet = f"{name}: min_size {min_size} compresses no parameter: there are as many elements{dims}"
    return leafwise(choose, unmet)


def with_all_reduce(
    init: Callable[[Any], Any],
    reduce_scatter: Callable[[Any, Any, Axis, Any], tuple[Any, Any]],
    rows: Callable[[str, Any], RowMethod | None],
) -> GradientSync:
    """A sync whose ``all_reduce`` is its ``reduce_scatter`` along no dim."""

    def all_reduce(grads: Tree, state: Tree, axis: Axis) -> tuple[Any, Any]:
        dims = jax.tree.map(lambda _: 0, grads, is_leaf=is_none)
        return reduce_scatter(grads, state, axis, dims)

    return GradientSync(init, all_reduce, reduce_scatter, rows)


def named_leaves(
    tree: Tree, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[tuple[str, Any]], Any]:
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_leaf)
    return list(zip(leaf_names(tree, is_leaf=is_leaf), leaves, strict=True)), treedef


def is_none(x: Any) -> bool:
    """Whether a gradient is left out of the sync."""
    return x is None


def _any_nonfinite(grads: list[jax.Array], axes: Axes) -> jax.Array:
    """Whether any device's gradient is not finite, (arrays,) bool."""
    if not grads:
        return jnp.zeros(0, bool)
    flags = jnp.stack([~jnp.all(jnp.isfinite(g)) for g in grads])
    return lax.pmax(flags.astype(jnp.int32), axes) > 0


# --- For methods ----------------------------------------------------------------------------------


def check_axes(axis: Axis) -> Axes:
    """The axes as a tuple, over all of which an enclosing ``shard_map`` must be manual."""
    axes, manual = axes_of(axis), jax.sharding.get_abstract_mesh().manual_axes
    if not axes:
        raise ValueError(f"gradient sync needs at least one mesh axis, got {axis!r}.")
    missing = [name for name in axes if name not in manual]
    if missing:
        raise ValueError(
            f"gradient sync over axis {axis!r} runs inside a shard_map that is manual over it, but "
            f"{', '.join(map(repr, missing))} is not one of the manual axes {tuple(manual)} here. "
            "Call it inside such a shard_map."
        )
    return axes


def stateless(mean: Callable[..., jax.Array], **options: Any) -> Method:
    """The method of ``mean(x, axes, context, dim)``: dim 0 for the full mean; see ``Method``."""

    def reduce(x: jax.Array, state: Tree, *args: Any) -> Reduced:
        return mean(x, *args), state

    return Method(lambda x: (), reduce, **options)


def sliced(all_reduce: Callable[..., Reduced]) -> Callable[..., Reduced]:
    """The ``reduce`` of a method that slices shards from the mean of ``all_reduce``."""

    def reduce(x: jax.Array, state: Tree, axes: Axes, context: StepContext, dim: int) -> Reduced:
        mean, state = all_reduce(x, state, axes, context)
        return (own_shard(mean, axes, dim) if dim else mean), state

    return reduce


def row_method(
    mean: Callable[[SparseRows, Axes, int | None], jax.Array], density: float, *, flat: bool = False
) -> Method:
    """A stateless method of ``mean(rows, axes, dim)``; ``flat``: for full means rows are vectors.

    ``dim`` is None for the full mean, or 0 or 1: other dims to shard are moved to 1.
    """

    def mean_of(
        x: jax.Array, rows_of: Callable[..., SparseRows], axes: Axes, dim: int
    ) -> jax.Array:
        if not dim:
            return mean(rows_of(x), axes, None)
        if dim == -x.ndim:
            return mean(rows_of(x), axes, 0)
        return jnp.moveaxis(mean(rows_of(jnp.moveaxis(x, dim, 1)), axes, 1), 1, dim)

    def of_array(x: jax.Array, axes: Axes, context: StepContext, dim: int) -> jax.Array:
        if flat and not dim:
            return mean(rows_of_array(x.reshape(x.shape[0], -1)), axes, None).reshape(x.shape)
        return mean_of(x, rows_of_array, axes, dim)

    def of_lookups(ids: jax.Array, x: jax.Array, num_rows: int, axes: Axes, dim: int) -> jax.Array:
        return mean_of(x, lambda x: rows_of_lookups(ids, num_rows, x), axes, dim)

    return stateless(of_array, is_linear=True, rows=RowMethod(of_lookups, density))


def check_density(density: float, name: str = "density") -> None:
    if not 0 < density <= 1:
        raise ValueError(f"{name} must be above 0 and at most 1, got {density!r}.")


# --- A gradient sync as a transformation: its state as global arrays, with a row for every device -


class SyncedState(NamedTuple):
    """The ``opt_state`` of a train state under ``Zero`` with a stateful gradient sync.

    Attributes:
      inner_state: the state of the transformation.
      sync_state: the state of the sync, [synchronizing devices, shards of a replica, ...]; on a
        mesh with other axes dim 2 is that of their devices.
    """

    inner_state: optax.OptState
    sync_state: Any


def transformation(
    sync: GradientSync, axis: Axis, num_devices: int
) -> optax.GradientTransformation:
    """A gradient sync as a gradient transformation, for a ``shard_map`` of one's own.

    ``init`` runs outside the ``shard_map`` and gives every array of the state a first dim of
    ``num_devices``. ``update`` runs inside, where that dim is 1: shard it over ``axis``.

    Args:
      sync: the gradient sync.
      axis: the mesh axis, or axes, over which gradients are averaged.
      num_devices: how many devices are on them.

    Raises:
      ValueError: in ``update``, if the ``shard_map`` is not manual over ``axis``.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> from sharding import sync
      >>> n = jax.device_count()
      >>> mesh = jax.make_mesh((n,), ("data",), axis_types=(AxisType.Auto,))
      >>> tx = sync.transformation(sync.top_k(0.1, min_size=1), "data", n)
      >>> def step(x, state):
      ...     return tx.update(x[0], state)
      >>> specs = (P("data"), P("data"))
      >>> step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(P(), P("data")),
      ...                              check_vma=False))
      >>> mean, state = step(jnp.ones((n, 10)), tx.init(jnp.ones(10)))
      >>> mean.shape, state.arrays["error"].shape == (n, 10)
      ((10,), True)
    """

    def init(params: optax.Params) -> Any:
        state = sync.init(params)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_devices, *x.shape)), state)

    def update(updates: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        mean, new = sync.all_reduce(updates, jax.tree.map(lambda x: x[0], state), axis)
        return mean, jax.tree.map(lambda x: x[None], new)

    return optax.GradientTransformation(init, update)


def resize(state: Tree, num_devices: int) -> Any:
    """The state of a gradient sync, arrays (devices, ...), for ``num_devices`` others.

    Every device starts with the mean of the residuals, so that what is sent later stays the same on
    average; integers are those of the first device. Runs inside ``jit`` too.

    Example:
      >>> import jax.numpy as jnp
      >>> from sharding import sync
      >>> sync.resize({"error": jnp.array([[1.0], [3.0]])}, 3)["error"].tolist()
      [[2.0], [2.0], [2.0]]
    """

    def resize_array(x: Array) -> jax.Array:
        floating = jnp.issubdtype(x.dtype, jnp.inexact)
        row = jnp.mean(x, axis=0) if floating else x[0]
        return jnp.broadcast_to(row, (num_devices, *x.shape[1:]))

    return jax.tree.map(resize_array, state)
