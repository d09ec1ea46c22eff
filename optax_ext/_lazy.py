"""Rows that have no gradient stay as they are: for tables of which a step uses a few rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_ext import _validate
from optax_ext._leaves import path_name

Key = tuple[Any, ...]


def lazy_rows(
    inner: optax.GradientTransformation, mask: Any | Callable[[optax.Params], Any]
) -> optax.GradientTransformationExtraArgs:
    r"""Leaves the rows of a table whose gradient is zero, and what ``inner`` keeps of them.

    With :math:`u` and :math:`s'` the update and the state that ``inner`` makes, for each row r

    .. math::

      u_r, s_r \leftarrow \begin{cases} u_r, s'_r & g_r \ne 0 \\ 0, s_r & g_r = 0 \end{cases}

    Momentum, weight decay and decaying averages change every row of an embedding in every step, the
    rows of words that are rare mostly by what they remember. Here a row changes in the steps that
    use it: averages decay by its uses, not by steps, and words that are not used are not decayed.
    Bias correction still counts steps.

    What of the state belongs to a row is told by its place and its first dim: moments, and of
    factored ones the statistics of rows. Statistics of columns, and scalars, are of the whole table
    and change in every step: they see the rows without a gradient as zeros, as they do without
    this; so does a clip by the table's root mean square.

    The step reads and writes the whole table as before: this changes what is learned, not what it
    costs. What stores moments in blocks goes around it (``low_precision_state(lazy_rows(...))``);
    so does what adds up gradients of several steps.

    Args:
      inner: the transformation.
      mask: which parameters are tables: a bool for each, or for each part of the tree; or a
        function of the parameters that returns it. Rows are their first dim.

    Returns:
      A ``GradientTransformation`` with the state of ``inner``.

    Raises:
      ValueError: in ``init``, if the mask does not fit; if a table is a scalar, or has another dim
        as long as its rows, so that statistics of both cannot be told apart; if ``inner`` keeps
        something of it in another shape than the table's, or what is left of that without some
        dims.

    Example:
      >>> import jax.numpy as jnp, optax, optax_ext
      >>> tx = optax_ext.lazy_rows(optax.adamw(0.1, weight_decay=0.1), {"table": True})
      >>> params = {"table": jnp.ones((3, 2))}
      >>> grads = {"table": jnp.zeros((3, 2)).at[1].set(1.0)}
      >>> updates, state = tx.update(grads, tx.init(params), params)
      >>> optax.apply_updates(params, updates)["table"][:, 0].round(2).tolist()
      [1.0, 0.8899999856948853, 1.0]

    References:
      The lazy Adam of sparse gradients in TensorFlow Addons (``LazyAdam``) and PyTorch
      (``SparseAdam``).
    """
    inner = optax.with_extra_args_support(inner)

    def tables_of(tree: Any) -> dict[Key, Any]:
        """The tables of parameters or gradients, by path."""
        chosen = _validate.mask("lazy_rows: the mask", mask, tree)
        flat = jax.tree_util.tree_leaves_with_path(tree)
        return {path: x for (path, x), c in zip(flat, chosen, strict=True) if c}

    def init(params: optax.Params) -> optax.OptState:
        # optax's tree_map_params asks with placeholders for parameters.
        known = all(hasattr(x, "shape") for x in jax.tree.leaves(params))
        for path, x in tables_of(params).items() if known else ():
            if not x.ndim or x.shape[0] in x.shape[1:]:
                name = path_name(path)
                raise ValueError(
                    f"lazy_rows: {name!r} of shape {x.shape} needs a first dim of rows that is "
                    "unlike its others."
                )
        state = inner.init(params)
        if known:
            _check(state, tables_of(params), _paths(params))
        return state

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        out, new = inner.update(updates, state, params, **extra_args)
        with jax.named_scope("lazy_rows"):
            used = {
                path: jnp.any(g != 0, axis=tuple(range(1, g.ndim)))
                for path, g in tables_of(updates).items()
            }
            paths = _paths(updates)

            def keep(path: Key, new: Any, old: Any) -> Any:
                owner = _owner(path, paths)
                return _where(used[owner], new, old) if owner in used else new

            out = jax.tree_util.tree_map_with_path(
                lambda path, u: keep(path, u, jnp.zeros_like(u)), out
            )
            return out, jax.tree_util.tree_map_with_path(keep, new, state)

    return optax.GradientTransformationExtraArgs(init, update)


def _paths(tree: Any) -> list[Key]:
    return [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _check(state: Any, tables: dict[Key, Any], paths: list[Key]) -> None:
    """Raises if what is kept of a table has not its dims, in their order, or some of them."""
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        owner = _owner(path, paths)
        if owner not in tables:
            continue
        dims = iter(tables[owner].shape)
        if not all(size in dims for size in x.shape):
            raise ValueError(
                f"lazy_rows: {path_name(path)} of shape {x.shape} belongs to a table of "
                f"shape {tables[owner].shape}, but has no such dims: which of it belongs to a row "
                "cannot be told. Put what stores it so around: low_precision_state(lazy_rows(...))."
            )


def _where(rows: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """``new`` in these rows; all of it if it has no rows."""
    if not new.ndim or new.shape[0] != rows.size:
        return new
    return jnp.where(rows.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def _owner(path: Key, paths: list[Key]) -> Key | None:
    """The parameter whose path is in that of a leaf of the state: the longest of several."""
    found = [
        (len(own), i, own)
        for own in paths
        for i in range(len(path) - len(own) + 1)
        if path[i : i + len(own)] == own
    ]
    # Of parameters in a list, whose keys are numbers as those of a chain are, the last.
    return max(found, key=lambda match: match[:2], default=(0, 0, None))[2]
