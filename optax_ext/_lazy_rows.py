"""Lazy rows: embedding tables whose rows change only in the steps that use them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_ext import _validate
from optax_ext._leaves import path_name
from optax_ext._types import Tree

Key = tuple[Any, ...]


def lazy_rows(
    inner: optax.GradientTransformation, mask: Any | Callable[[optax.Params], Any]
) -> optax.GradientTransformationExtraArgs:
    r"""Freezes the rows of a table whose gradient is zero, and their state.

    With :math:`u` and :math:`s'` the update and the new state of ``inner``, for each row r

    .. math::

      u_r, s_r \leftarrow \begin{cases} u_r, s'_r & g_r \ne 0 \\ 0, s_r & g_r = 0 \end{cases}

    Averages of a row decay per use, not per step; bias correction still counts steps, as do column
    statistics. Transformations that store moments in blocks or accumulate gradients go outside, as
    in ``low_precision_state(lazy_rows(...))``.

    Args:
      inner: the transformation.
      mask: which parameters are tables, whose rows are the first dim: a tree of bools, a prefix of
        one, or a function of the parameters that returns it.

    Raises:
      ValueError: in ``init``, if the mask does not fit; if a table is a scalar, or has another dim
        as long as its rows, so that statistics of the two are indistinguishable; if a state leaf of
        a table has dims that are not among the table's, in their order.

    Example:
      >>> import jax.numpy as jnp, optax, optax_ext
      >>> tx = optax_ext.lazy_rows(optax.adamw(0.1, weight_decay=0.1), {"table": True})
      >>> params = {"table": jnp.ones((3, 2))}
      >>> grads = {"table": jnp.zeros((3, 2)).at[1].set(1.0)}
      >>> updates, state = tx.update(grads, tx.init(params), params)
      >>> optax.apply_updates(params, updates)["table"][:, 0].round(2).tolist()
      [1.0, 0.8899999856948853, 1.0]

    References:
      ``LazyAdam`` of TensorFlow Addons, ``SparseAdam`` of PyTorch.
    """
    inner = optax.with_extra_args_support(inner)

    def tables_of(tree: Tree) -> dict[Key, Any]:
        chosen = _validate.mask("lazy_rows: the mask", mask, tree)
        flat = jax.tree.leaves_with_path(tree)
        return {path: x for (path, x), c in zip(flat, chosen, strict=True) if c}

    def init(params: optax.Params) -> optax.OptState:
        # optax's tree_map_params calls init with placeholders for parameters.
        concrete = all(hasattr(x, "shape") for x in jax.tree.leaves(params))
        for path, x in tables_of(params).items() if concrete else ():
            if not x.ndim or x.shape[0] in x.shape[1:]:
                name = path_name(path)
                raise ValueError(
                    f"lazy_rows: table {name!r} has shape {x.shape}; its first dim, of rows, must "
                    "differ from its other dims. Exclude it from the mask, or pad its rows."
                )
        state = inner.init(params)
        if concrete:
            _check(state, tables_of(params), _paths(params))
        return state

    def update(
        updates: Tree, state: optax.OptState, params: Tree = None, **extra_args: Any
    ) -> tuple[Tree, optax.OptState]:
        out, new = inner.update(updates, state, params, **extra_args)
        with jax.named_scope("lazy_rows"):
            tables = tables_of(updates).items()
            paths = _paths(updates)
            used = {path: jnp.any(g != 0, axis=tuple(range(1, g.ndim))) for path, g in tables}

            def select(path: Key, new: Tree, old: Tree) -> Any:
                owner = _owner(path, paths)
                return _where(used[owner], new, old) if owner in used else new

            map_leaves = jax.tree.map_with_path
            out = map_leaves(lambda path, u: select(path, u, jnp.zeros_like(u)), out)
            return out, map_leaves(select, new, state)

    return optax.GradientTransformationExtraArgs(init, update)


def _paths(tree: Tree) -> list[Key]:
    return [path for path, _ in jax.tree.leaves_with_path(tree)]


def _check(state: Tree, tables: dict[Key, Any], paths: list[Key]) -> None:
    """Raises unless the dims of a table's state leaves are some of its dims, in their order."""
    for path, x in jax.tree.leaves_with_path(state):
        owner = _owner(path, paths)
        if owner not in tables:
            continue
        dims = iter(tables[owner].shape)
        if not all(size in dims for size in x.shape):
            raise ValueError(
                f"lazy_rows: {path_name(path)} of shape {x.shape} belongs to a table of "
                f"shape {tables[owner].shape}, but has other dims, so its rows are unknown. Put "
                "the transformation that stores it outside: low_precision_state(lazy_rows(...))."
            )


def _where(rows: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns ``new`` in the given rows and ``old`` elsewhere; ``new`` if it has no rows."""
    if not new.ndim or new.shape[0] != rows.size:
        return new
    return jnp.where(rows.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def _owner(path: Key, paths: list[Key]) -> Key | None:
    """Returns the parameter that a state leaf belongs to: the longest path within its own."""
    # The last match, since parameters in a list have numbers as keys, as states of a chain do.
    places = ((own, i) for own in paths for i in range(len(path) - len(own) + 1))
    matches = [(len(own), i, own) for own, i in places if path[i : i + len(own)] == own]
    return max(matches, key=lambda match: match[:2], default=(0, 0, None))[2]
