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

Tree = Any  # of parameters, updates or a state


def _check(values: dict[str, Any], holds: Callable[[Any], Any], rule: str) -> None:
    """Raises on the first value that is known while tracing and breaks a rule; None is no value."""
    for name, value in values.items():
        known = value is not None and not isinstance(value, jax.core.Tracer)
        if known and not holds(value):
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
    """Raises if a value is negative or NaN."""
    _check(values, lambda value: value >= 0, "not be negative")


def rate(**values: Any) -> None:
    """Raises if a value is negative, unless it is a schedule."""
    non_negative(**{name: value for name, value in values.items() if not callable(value)})


def positive(**values: Any) -> None:
    """Raises unless every value that is not None is above zero."""
    _check(values, lambda value: value > 0, "be positive")


def value_at(value: Any, count: Any) -> Any:
    """Returns a number, or the value of a schedule at a count."""
    return value(count) if callable(value) else value


def as_dtype(name: str, value: Any) -> np.dtype | None:
    """Returns the dtype, or None; raises unless it is floating.

    ``inject_hyperparams`` mistakes a scalar type such as ``jnp.bfloat16`` for a schedule, calls it
    with the step count and passes the resulting array: that array's dtype is returned.
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


def hyperparameter(value: Any, dtype: Any) -> Any:
    """Returns a hyperparameter that does not change the dtype of the arrays it multiplies."""
    if isinstance(value, float | int | np.generic | np.ndarray):
        return float(value)
    return jnp.asarray(value, dtype)


def cast(hyper: Any, dtype: Any) -> Any:
    """Returns a NamedTuple of hyperparameters for ``dtype``; bools, strings and None stay."""
    stays = [h is None or isinstance(h, bool | str) for h in hyper]
    values = zip(hyper, stays, strict=True)
    return type(hyper)(*(h if stay else hyperparameter(h, dtype) for h, stay in values))


def array(path: str, leaf: Any) -> None:
    """Raises unless a parameter is an array."""
    if not hasattr(leaf, "dtype"):
        raise ValueError(
            f"parameter {path!r} is {leaf!r}, of type {type(leaf).__name__}: make it an array, as "
            "by jnp.asarray, or keep it out of the parameters."
        )


def floating(path: str, leaf: Any) -> None:
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
    """Raises unless a value of the argument ``name`` is a regular expression."""
    try:
        re.compile(value)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"{name}: pattern {value!r} is not a regular expression: {error}."
        ) from None


def is_function(value: Any) -> bool:
    """Whether a mask is a function of the parameters; modules that are trees are trees."""
    return callable(value) and all(leaf is value for leaf in jax.tree.leaves(value))


def known(**values: Any) -> None:
    """Raises on a value that ``optax.inject_hyperparams`` made an array, where it cannot be one."""
    for name, value in values.items():
        if isinstance(value, jax.Array):
            raise ValueError(
                f"{name} must be known while tracing, got {value}. Under optax.inject_hyperparams "
                f"add static_args=({name!r},)."
            )


def not_a_count(name: str, params: Any) -> None:
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


def mask(name: str, value: Any, tree: Any) -> list[bool]:
    """Returns a bool per leaf, from a tree of bools, a prefix of one, or a function of the tree."""
    if isinstance(value, str):
        raise ValueError(
            f"{name} must be a tree of bools, a function that makes one from the parameters, or "
            f"None for all parameters; got {value!r}."
        )
    chosen = value(tree) if is_function(value) else value
    strings = [x for x in jax.tree.leaves(chosen) if isinstance(x, str)]
    if strings:
        raise ValueError(f"{name} must be a tree of bools; got {strings[0]!r} in it.")
    try:
        return jax.tree.leaves(
            jax.tree.map(lambda m, part: jax.tree.map(lambda _: bool(m), part), chosen, tree)
        )
    except ValueError as error:
        raise ValueError(
            f"{name} does not fit the parameters; it needs a bool for each of them, or for each "
            f"subtree: {error}"
        ) from None


def mask_function(name: str, value: Any) -> Callable[[Any], Any] | None:
    """Returns a mask as the function that optax takes; None, for all parameters, stays."""
    not_called(name, value)
    if value is None:
        return None
    if isinstance(value, str):
        mask(name, value, ())
    return lambda tree: jax.tree.unflatten(jax.tree.structure(tree), mask(name, value, tree))


def decayed_weights(rate: Any, mask: Any) -> optax.GradientTransformation:
    """``optax.add_decayed_weights``, which at a rate of 0 needs no parameters; the same state."""
    if isinstance(rate, float | int) and rate == 0:
        nothing = optax.identity()
        return nothing if mask is None else optax.masked(nothing, mask)
    return optax.add_decayed_weights(rate, mask)


def keep_dtype(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Casts the updates of ``inner`` back to the dtype of the gradients.

    A strongly typed float32 hyperparameter, such as those of ``inject_hyperparams``, would widen
    bfloat16 updates.
    """
    inner = optax.with_extra_args_support(inner)

    def update(
        updates: Tree, state: optax.OptState, params: Tree = None, **extra_args: Any
    ) -> tuple[Tree, optax.OptState]:
        out, state = inner.update(updates, state, params, **extra_args)
        return jax.tree.map(lambda o, u: o.astype(u.dtype), out, updates), state

    return optax.GradientTransformationExtraArgs(inner.init, update)
