"""Model state: what a loss reads and returns beside parameters (statistics, counters, a teacher).

It is replicated. Where each device runs the loss, it computes a new value from its own rows,
micro-batch after micro-batch; then the values of all devices are reduced to one.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sharding._types import DType, Tree
from sharding.collectives._sum_dtype import to_sum_dtype
from sharding.placement._specs import KeyPath, path_str


def checked(old: Tree, new: Tree) -> Tree:
    """The new state in the dtypes of the old one; leaves that the loss left unchanged stay."""
    expected, structure = jax.tree.structure(old), jax.tree.structure(new)
    if structure != expected:
        raise ValueError(
            "with model_state a loss returns (loss, new_model_state), or with has_aux (loss, "
            "(new_model_state, aux)); the new state must have the structure of the old one: "
            f"{expected}, found {structure}."
        )
    return jax.tree.map_with_path(_as, old, new)


# Kinds of numbers: one is stored as the same kind, or one further down.
_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def _as(path: KeyPath, old: Tree, new: Tree) -> Any:
    """The new value in the dtype of the old one."""
    if jnp.shape(old) != jnp.shape(new):
        raise ValueError(
            f"the loss returned model state {path_str(path)!r} of shape {jnp.shape(new)}, and got "
            f"it with {jnp.shape(old)}."
        )
    if new is old:
        return new
    dtype, required = jnp.result_type(new), old.dtype
    is_number = _rank(dtype) >= 0
    if _rank(dtype) > _rank(required) or (not is_number and dtype != required):
        raise ValueError(
            f"the loss returned model state {path_str(path)!r} as {dtype}, and received it as "
            f"{required}, which cannot hold it. Start with an array of the wider dtype."
        )
    return jnp.asarray(new, required) if is_number else new


def _rank(dtype: DType) -> int:
    """The kind of a dtype; below 0 where it is no number, such as a key."""
    return next((i for i, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind)), -1)


def reduce_over_devices(
    old: Tree, new: Tree, unchanged: list[bool], reduction: Tree, axes: tuple[str, ...]
) -> Tree:
    """Reduces the model states of all devices to one; leaves that the loss left unchanged stay."""
    reduction = reduction(old) if callable(reduction) else reduction
    try:
        kinds = jax.tree.leaves(jax.tree.broadcast(reduction, old))
    except ValueError as error:
        raise ValueError(f"reduction does not match the model state: {error}") from None
    for (path, x), kind in zip(jax.tree.leaves_with_path(old), kinds, strict=True):
        if kind == "sum" and not jnp.issubdtype(x.dtype, jnp.number):
            raise ValueError(
                f"reduction: {path_str(path)!r} is {x.dtype}, of which there is no sum."
            )
    before, treedef = jax.tree.flatten(old)
    after = jax.tree.leaves(new)
    # By the number of a leaf; all are summed in one collective.
    terms = {
        i: _term(kinds[i], before[i], after[i], axes)
        for i, same in enumerate(unchanged)
        if not same and kinds[i] != "same"
    }
    sums = lax.psum(terms, axes) if terms else {}
    for i, total in sums.items():
        after[i] = _result(kinds[i], before[i], after[i], total, axes)
    return jax.tree.unflatten(treedef, after)


def _term(kind: str, old: jax.Array, new: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """What a device adds to the sum over devices."""
    if kind == "sum":
        return new - old
    if jnp.issubdtype(new.dtype, jnp.inexact):
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
    if jnp.issubdtype(new.dtype, jnp.inexact):
        return (total / lax.axis_size(axes)).astype(new.dtype)
    if jnp.issubdtype(new.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(total, impl=jax.random.key_impl(new))
    return total.astype(new.dtype)
