"""Checks of hyperparameters and trees, made in the call that receives them.

A hyperparameter may be traced (``optax.inject_hyperparams`` under ``jit``). Only concrete values
are checked, and nothing here branches on a traced one.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_ext._types import Array, DType, Tree


def _check(values: dict[str, Any], holds: Callable[[Any], Any], rule: str) -> None:
    """Raises on the first value that is known while tracing and breaks a rule; None is no value."""
    for name, value in values.items():
        if value is None or isinstance(value, jax.core.Tracer):
            continue
        # In NumPy: within a trace, comparisons of a known jax.Array are traced.
        if not holds(np.asarray(value) if isinstance(value, jax.Array) else value):
            raise ValueError(f"{name} must {rule}, got {value}.")


def unit_interval(**values: Any) -> None:
    """Raises unless every value is in [0, 1), in a dtype that distinguishes it from 1."""
    for name, value in values.items():
        dtype = getattr(value, "dtype", None)
        if dtype is not None and jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize < 4:
            raise ValueError(
                f"{name} has dtype {dtype}, which rounds 0.999 to 1; under "
                "optax.inject_hyperparams pass hyperparam_dtype=jnp.float32."
            )
    _check(values, lambda value: 0 <= value < 1, "be in [0, 1)")


def non_negative(**values: Any) -> None:
    _check(values, lambda value: value >= 0, "not be negative")


def rate(**values: Any) -> None:
    non_negative(**{name: value for name, value in values.items() if not callable(value)})


def positive(**values: Any) -> None:
    _check(values, lambda value: value > 0, "be positive")


def value_at(value: Any, count: Any) -> Any:
    return value(count) if callable(value) else value


def as_dtype(name: str, value: Any) -> np.dtype | None:
    """Returns the dtype, or None; raises unless it is floating.

    ``inject_hyperparams`` mistakes a scalar type such as ``jnp.bfloat16`` for a schedule: of the
    array that it passes instead, the dtype is returned.
    """
    if value is None:
        return None
    try:
        dtype = jnp.dtype(value.dtype if isinstance(value, jax.Array | np.ndarray) else value)
    except TypeError:
        raise ValueError(f"{name} must be a floating dtype, got {value!r}.") from None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{name} must be a floating dtype, got {dtype}.")
    return dtype


def hyperparameter(value: Any, dtype: DType) -> Any:
    """Returns a hyperparameter that does not change the dtype of the arrays it multiplies."""
    if isinstance(value, float | int | np.generic | np.ndarray):
        return float(value)
    return jnp.asarray(value, dtype)


def cast(hyper: Any, dtype: DType) -> Any:
    """Returns a NamedTuple of hyperparameters for ``dtype``; bools, strings and None stay."""
    stays = (bool, str, type(None))
    return type(hyper)(*(h if isinstance(h, stays) else hyperparameter(h, dtype) for h in hyper))


def array(path: str, leaf: Array) -> None:
    if not hasattr(leaf, "dtype"):
        raise ValueError(
            f"parameter {path!r} is {leaf!r}, of type {type(leaf).__name__}: make it an array, as "
            "by jnp.asarray, or keep it out of the parameters."
        )


def floating(path: str, leaf: Array) -> None:
    """Raises unless a parameter is a real floating array of at least 16 bits."""
    array(path, leaf)
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise ValueError(
            f"parameter {path!r} has dtype {leaf.dtype}; only real floating parameters can be "
            "optimized. Exclude it with optax.masked or optax.partition."
        )
    if leaf.dtype.itemsize < 2:
        raise ValueError(
            f"parameter {path!r} has dtype {leaf.dtype}, which JAX promotes to no other. Store it "
            "in bfloat16 or float32, and cast it where it is used."
        )


def pattern(name: str, value: Any) -> None:
    try:
        re.compile(value)
    except (re.error, TypeError) as error:
        why = f"{name}: pattern {value!r} is not a regular expression: {error}."
        raise ValueError(why) from None


def known(**values: Any) -> None:
    """Raises on a value that ``optax.inject_hyperparams`` made an array, where it cannot be one."""
    for name, value in values.items():
        if isinstance(value, jax.Array):
            raise ValueError(
                f"{name} must be known while tracing, got {value}. Under optax.inject_hyperparams "
                f"add static_args=({name!r},)."
            )


def not_a_count(name: str, params: Tree) -> None:
    """Raises if ``optax.inject_hyperparams`` calls the function ``name`` of the parameters."""
    if jnp.issubdtype(getattr(params, "dtype", jnp.float32), jnp.integer):
        raise ValueError(
            f"{name} was called with a step count: optax.inject_hyperparams takes a function for "
            "a schedule. Name the argument that it was passed as, such as "
            "static_args=('weight_decay_mask',)."
        )


def not_called(name: str, value: Any) -> None:
    """Raises on a mask that is the value of a function, made by ``optax.inject_hyperparams``."""
    if isinstance(value, jax.Array | bool):
        raise ValueError(
            f"{name} is {value!r}, neither a tree of bools nor a function. If it was one, "
            "optax.inject_hyperparams took it for a schedule and called it: add "
            f"static_args=({name!r},)."
        )


def mask(name: str, value: Any, tree: Tree) -> list[bool]:
    """Returns a bool per leaf, from a tree of bools, a prefix of one, or a function of the tree."""
    if isinstance(value, str):
        raise ValueError(
            f"{name} must be a tree of bools, a function that makes one from the parameters, or "
            f"None for all parameters; got {value!r}."
        )
    # Modules that are trees are trees, whether or not they can be called.
    is_function = callable(value) and all(leaf is value for leaf in jax.tree.leaves(value))
    chosen = value(tree) if is_function else value
    strings = [x for x in jax.tree.leaves(chosen) if isinstance(x, str)]
    if strings:
        raise ValueError(f"{name} must be a tree of bools; got {strings[0]!r} in it.")
    try:
        return list(map(bool, jax.tree.leaves(jax.tree.broadcast(chosen, tree))))
    except ValueError as error:
        raise ValueError(
            f"{name} does not fit the parameters; it needs a bool for each of them, or for each "
            f"subtree: {error}"
        ) from None


def decayed_weights(rate: Any, weight_decay_mask: Any) -> optax.GradientTransformation:
    """``optax.add_decayed_weights``, which at a rate of 0 needs no parameters; the same state."""
    name = "weight_decay_mask"
    chosen = weight_decay_mask
    not_called(name, chosen)
    if isinstance(chosen, str):
        mask(name, chosen, ())

    def of_tree(tree: Tree) -> Any:
        return jax.tree.unflatten(jax.tree.structure(tree), mask(name, chosen, tree))

    as_function = None if chosen is None else of_tree
    if isinstance(rate, float | int) and rate == 0:
        nothing = optax.identity()
        return nothing if as_function is None else optax.masked(nothing, as_function)
    of_optax = optax.add_decayed_weights(rate)

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        no_params = None if params is None else ()
        _, new = of_optax.update((), state, no_params)  # counts, and raises without parameters
        now = value_at(rate, getattr(state, "count", None))
        is_none = lambda x: x is None  # noqa: E731
        out = jax.tree.map(
            lambda u, p: u if u is None else decayed(u, p, now), updates, params, is_leaf=is_none
        )
        return out, new

    decay = optax.GradientTransformation(of_optax.init, update)
    return decay if as_function is None else optax.masked(decay, as_function)


def decayed(u: jax.Array, w: jax.Array, rate: Any) -> jax.Array:
    """Returns ``u + rate * w``, and ``u`` at a rate of 0: of infinite weights 0 times is NaN."""
    if isinstance(rate, float | int):
        return u + rate * w if rate else u
    return jnp.where(rate == 0, u, u + rate * w)


def keep_dtype(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Casts updates back to the dtype of the gradients, which a float32 rate would widen."""
    inner = optax.with_extra_args_support(inner)

    def update(
        updates: Tree, state: optax.OptState, params: Tree = None, **extra_args: Any
    ) -> tuple[Tree, optax.OptState]:
        out, state = inner.update(updates, state, params, **extra_args)
        return jax.tree.map(lambda o, u: o.astype(u.dtype), out, updates), state

    return optax.GradientTransformationExtraArgs(inner.init, update)
