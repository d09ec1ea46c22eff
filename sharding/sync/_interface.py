"""What a gradient exchange is, and how one is made of a method for single arrays."""

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sharding.collectives._reduce_scatter import own_shard
from sharding.placement._specs import Axes, Axis, axes_of, path_str


class GradientSync(NamedTuple):
    """How the gradients of several devices become their mean; used inside a ``shard_map``.

    Attributes:
      init: ``init(params) -> state``, one device's; real or abstract parameters, of which only
        paths, shapes and dtypes count.
      all_reduce: ``all_reduce(grads, state, axis) -> (mean, state)``. ``grads`` is a tree as
        ``params``, None in it for what is not exchanged; ``axis`` a mesh axis, or several.
      reduce_scatter: ``reduce_scatter(grads, state, axis, dims) -> (pieces, state)``: of each mean
        this device's piece along a dim, counted from the end; 0 for the whole mean.
      rows: ``rows(path, array) -> RowMethod``, how the gradient of a table is exchanged of which
        rows were looked up; None where it must be whole, as for ``GradientSync.rows``.
    """

    init: Callable[[Any], Any]
    all_reduce: Callable[[Any, Any, Axis], tuple[Any, Any]]
    reduce_scatter: Callable[[Any, Any, Axis, Any], tuple[Any, Any]]
    rows: "Callable[[str, Any], RowMethod | None] | None" = None


class RowMethod(NamedTuple):
    """How the gradient of a table is exchanged, given the rows that were looked up; no state.

    Attributes:
      reduce: ``reduce(ids, rows, num_rows, axes, dim)``: of the gradients (lookups, ...) of rows
        that were looked up, the mean of the table's, or this device's piece of it along a dim,
        counted from the end; 0 for the whole mean.
      density: how many of all rows a device looks up, as is expected.
    """

    reduce: Callable[..., jax.Array]
    density: float


class Method(NamedTuple):
    """How one array is exchanged.

    Attributes:
      init: of its type, the state that a device keeps for it.
      mean: ``mean(x, state, axes, noise) -> (mean, state)``.
      piece: ``piece(x, state, axes, noise, dim) -> (piece, state)``; None cuts it from the mean.
      is_linear: whether infinities and NaN pass through by themselves.
      counts: whether the method looks at the number of steps in ``noise``.
      rows: how it takes rows that were looked up; None if it does not.
    """

    init: Callable[[Any], Any]
    mean: Callable[..., tuple[jax.Array, Any]]
    piece: Callable[..., tuple[jax.Array, Any]] | None = None
    is_linear: bool = False
    counts: bool = False
    rows: RowMethod | None = None

    def reduce(
        self, x: jax.Array, state: Any, axes: Axes, noise: "Noise", dim: int
    ) -> tuple[jax.Array, Any]:
        """The mean, or this device's piece of it along a dim, counted from the end; 0 for none."""
        if dim and self.piece is not None:
            return self.piece(x, state, axes, noise, dim)
        x, state = self.mean(x, state, axes, noise)
        return (own_shard(x, axes, dim) if dim else x), state


class Noise(NamedTuple):
    """What randomness and schedules are made of; the same on all devices.

    Attributes:
      step: how many exchanges were before this one; None if no method counts.
      salt: a number that differs from array to array.
    """

    step: Any
    salt: int

    def key(self, seed: int) -> jax.Array:
        """A random key of this step and array."""
        key = jax.random.fold_in(jax.random.key(seed), self.salt)
        return key if self.step is None else jax.random.fold_in(key, self.step)


class SyncState(NamedTuple):
    """State of an exchange that is made of methods for single arrays."""

    step: jax.Array | None  # int32; None unless a method counts
    arrays: Any  # a tree as the parameters: each one's own


def leafwise(choose: Callable[[str, Any], Method]) -> GradientSync:
    """The exchange of a tree: of each array by the method that its path and type choose.

    Where a device's gradient is not finite, all devices get NaN, and the state stays what it was.
    """

    def init(params: Any) -> SyncState:
        flat, treedef = named_leaves(params)
        methods = [choose(path, x) for path, x in flat]
        arrays = [method.init(x) for method, (_, x) in zip(methods, flat, strict=True)]
        counts = any(method.counts for method in methods)
        return SyncState(jnp.zeros((), jnp.int32) if counts else None, treedef.unflatten(arrays))

    def reduce_scatter(
        grads: Any, state: SyncState, axis: Axis, dims: Any
    ) -> tuple[Any, SyncState]:
        axes = check_axes(axis)
        flat, treedef = named_leaves(grads, is_leaf=is_none)
        out = [x for _, x in flat]
        kept = treedef.flatten_up_to(state.arrays)
        dims = treedef.flatten_up_to(dims)
        chosen = {i: choose(path, x) for i, (path, x) in enumerate(flat) if x is not None}
        lossy = [i for i, method in chosen.items() if not method.is_linear]
        broken = dict(zip(lossy, _broken([out[i] for i in lossy], axes), strict=True))
        for i, method in chosen.items():
            noise = Noise(state.step, salt(flat[i][0]))
            x, old, dtype, bad = out[i], kept[i], out[i].dtype, broken.get(i)
            if bad is not None:
                x = jnp.where(bad, jnp.zeros_like(x), x)
            x, new = method.reduce(x, old, axes, noise, dims[i])
            if bad is not None:
                x = jnp.where(bad, jnp.full_like(x, jnp.nan), x)
                new = jax.tree.map(lambda a, b, bad=bad: jnp.where(bad, a, b), old, new)
            out[i], kept[i] = x.astype(dtype), new
        step = None if state.step is None else state.step + 1
        return treedef.unflatten(out), SyncState(step, treedef.unflatten(kept))

    return with_all_reduce(init, reduce_scatter, lambda path, x: choose(path, x).rows)


def with_all_reduce(
    init: Callable[[Any], Any],
    reduce_scatter: Callable[[Any, Any, Axis, Any], tuple[Any, Any]],
    rows: Callable[[str, Any], RowMethod | None],
) -> GradientSync:
    """An exchange whose ``all_reduce`` is its ``reduce_scatter`` along no dim."""

    def all_reduce(grads: Any, state: Any, axis: Axis) -> tuple[Any, Any]:
        dims = jax.tree.map(lambda _: 0, grads, is_leaf=is_none)
        return reduce_scatter(grads, state, axis, dims)

    return GradientSync(init, all_reduce, reduce_scatter, rows)


def named_leaves(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[tuple[str, Any]], Any]:
    """The leaves of a tree with their paths, and its structure."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [(path_str(path), x) for path, x in flat], treedef


# --- For methods ----------------------------------------------------------------------------------


def check_axes(axis: Axis) -> Axes:
    """The axes, all of which an enclosing ``shard_map`` has made manual.

    Raises:
      ValueError: if one is not.
    """
    axes, manual = axes_of(axis), jax.sharding.get_abstract_mesh().manual_axes
    missing = [name for name in axes if name not in manual]
    if missing or not axes:
        raise ValueError(
            f"gradients are exchanged over axis {axis!r} of a shard_map, but "
            f"{', '.join(map(repr, missing)) or 'no axis'} is not one of its manual axes "
            f"{tuple(manual)}."
        )
    return axes


def check_density(density: float, name: str = "density") -> None:
    """Raises unless it is a part of something."""
    if not 0 < density <= 1:
        raise ValueError(f"{name} must be above 0 and at most 1, got {density!r}.")


def wide(x: jax.Array) -> jax.Array:
    """In float32 at least, in which errors are kept and sums are made."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def from_step(start: int, method: Method, before: Method) -> Method:
    """A method that takes over at a step; until then its state stays what it was."""
    if not start:
        return method

    def reduce(x: jax.Array, state: Any, axes: Axes, noise: Noise, dim: int = 0) -> Any:
        def plain(x: jax.Array, state: Any) -> Any:
            return before.reduce(x, (), axes, noise, dim)[0], state

        def other(x: jax.Array, state: Any) -> Any:
            return method.reduce(x, state, axes, noise, dim)

        return lax.cond(noise.step >= start, other, plain, x, state)

    return Method(method.init, reduce, reduce, method.is_linear, counts=True)


def _broken(grads: list[jax.Array], axes: Axes) -> jax.Array:
    """Of each array, whether any device's is not finite."""
    if not grads:
        return jnp.zeros(0, bool)
    found = jnp.stack([~jnp.all(jnp.isfinite(g)) for g in grads])
    return lax.pmax(found.astype(jnp.int32), axes) > 0


def is_none(x: Any) -> bool:
    return x is None


def salt(path: str) -> int:
    """A number for a path: the same wherever the array lies in its tree."""
    return zlib.crc32(path.encode())
