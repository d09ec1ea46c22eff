"""Model state: what a loss reads and returns beside parameters (statistics, counters, a teacher).

The model state is replicated. Each device computes its own new value from its shard of the batch,
micro-batch after micro-batch; then the values of all devices are reduced to one.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sharding.collectives._dtypes import to_sum_dtype
from sharding.placement._specs import path_str

REDUCTIONS = ("mean", "sum", "same")


def check_reduction(reduction: Any) -> None:
    """Raises if a leaf of a tree is no reduction."""
    if callable(reduction):
        return
    for found in jax.tree.leaves(reduction):
        if found not in REDUCTIONS:
            raise ValueError(
                f"model_state_reduction must be one of {', '.join(map(repr, REDUCTIONS))}, or a "
                f"tree of them, got {found!r}."
            )


def checked(old: Any, new: Any) -> tuple[Any, list[bool]]:
    """The new state in the dtypes of the old one, and which leaves the loss returned unchanged.

    Raises:
      ValueError: if the structure or a shape differs.
    """
    expected: Any = jax.tree.structure(old)
    found: Any = jax.tree.structure(new)
    if found != expected:
        raise ValueError(
            "with model_state a loss returns (loss, new_model_state), or with has_aux (loss, "
            "(new_model_state, aux)); the new state must have the structure of the old one: "
            f"{expected}, found {found}."
        )
    before, after = jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new)
    for (path, x), y in zip(before, after, strict=True):
        if jnp.shape(x) != jnp.shape(y):
            raise ValueError(
                f"the loss returned model state {path_str(path)!r} of shape {jnp.shape(y)}, and "
                f"got it with {jnp.shape(x)}."
            )
    unchanged = [x is y for (_, x), y in zip(before, after, strict=True)]
    return jax.tree_util.tree_map_with_path(_as, old, new), unchanged


# Kinds of numbers: one is stored as the same kind, or one further down.
_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def _as(path: Any, old: Any, new: Any) -> Any:
    """The new value in the dtype of the old one."""
    if new is old:
        return new
    found, required = jnp.result_type(new), old.dtype
    if _rank(found) > _rank(required) or (_rank(found) < 0 and found != required):
        raise ValueError(
            f"the loss returned model state {path_str(path)!r} as {found}, and received it as "
            f"{required}, which cannot hold it. Start with an array of the wider dtype."
        )
    return new if _rank(found) < 0 else jnp.asarray(new, required)


def _rank(dtype: Any) -> int:
    """The kind of a dtype; below 0 where it is no number, such as a key."""
    return next((i for i, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind)), -1)


def reduce_over_devices(
    old: Any, new: Any, unchanged: list[bool], reduction: Any, axes: tuple[str, ...]
) -> Any:
    """Reduces the model states of all devices to one; inside a ``shard_map``.

    Args:
      old: the state before the step, the same on all devices.
      new: this device's.
      unchanged: which leaves the loss returned unchanged; they are not reduced.
      reduction: a prefix tree. ``"mean"``: the mean; for leaves that are not floating, the first
        device's value. ``"sum"``: the old value plus what each device added. ``"same"``: all
        devices have computed equal values.
      axes: the mesh axes to reduce over.
    """
    reduction = reduction(old) if callable(reduction) else reduction
    try:
        kinds = jax.tree.leaves(
            jax.tree.map(lambda kind, part: jax.tree.map(lambda _: kind, part), reduction, old)
        )
    except ValueError as error:
        raise ValueError(f"model_state_reduction does not match the model state: {error}") from None
    for (path, x), kind in zip(jax.tree_util.tree_leaves_with_path(old), kinds, strict=True):
        if kind == "sum" and not jnp.issubdtype(x.dtype, jnp.number):
            raise ValueError(
                f"model_state_reduction: {path_str(path)!r} is {x.dtype}, of which there is no sum."
            )
    treedef: Any
    before, treedef = jax.tree.flatten(old)
    after = jax.tree.leaves(new)
    chosen = [
        i
        for i, (kind, same) in enumerate(zip(kinds, unchanged, strict=True))
        if not same and kind != "same"
    ]
    terms = [_term(kinds[i], before[i], after[i], axes) for i in chosen]
    sums = lax.psum(terms, axes) if terms else []  # all leaves in one collective
    for i, total in zip(chosen, sums, strict=True):
        after[i] = _result(kinds[i], before[i], after[i], total, axes)
    return treedef.unflatten(after)


def _is_floating(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _term(kind: str, old: jax.Array, new: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """What a device adds to the sum over devices."""
    if kind == "sum":
        return new - old
    if _is_floating(new):
        return to_sum_dtype(new)
    plain = jax.random.key_data(new) if jnp.issubdtype(new.dtype, jax.dtypes.prng_key) else new
    wide = plain.astype(jnp.int32) if plain.dtype == jnp.bool_ else plain
    return jnp.where(lax.axis_index(axes) == 0, wide, jnp.zeros_like(wide))


def _result(
    kind: str, old: jax.Array, new: jax.Array, total: jax.Array, axes: tuple[str, ...]
) -> jax.Array:
    """The leaf that the sum over devices makes."""
    if kind == "sum":
        return old + total
    if _is_floating(new):
        return (total / lax.axis_size(axes)).astype(new.dtype)
    if jnp.issubdtype(new.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(total, impl=jax.random.key_impl(new))
    return total.astype(new.dtype)
