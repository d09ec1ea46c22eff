"""Checks of hyperparameters and trees, made at the call that brought them.

A hyperparameter may be traced (``optax.inject_hyperparams`` under ``jit``); only values that are
known are checked, and nothing here branches on one that is not.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def _known(value: Any) -> bool:
    return not isinstance(value, jax.core.Tracer)


def unit_interval(**values: Any) -> None:
    """Raises unless every value is in [0, 1), in a dtype that can tell it from 1."""
    for name, value in values.items():
        dtype = getattr(value, "dtype", None)
        if dtype is not None and jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize < 4:
            raise ValueError(
                f"{name} came as {dtype}, which rounds 0.999 to 1; under optax.inject_hyperparams "
                "pass hyperparam_dtype=jnp.float32."
            )
        if _known(value) and not 0 <= value < 1:
            raise ValueError(f"{name} must be in [0, 1), got {value}.")


def non_negative(**values: Any) -> None:
    """Raises if a value is negative or NaN."""
    for name, value in values.items():
        if _known(value) and not value >= 0:
            raise ValueError(f"{name} must not be negative, got {value}.")


def positive(**values: Any) -> None:
    """Raises unless every value that is not None is above zero."""
    for name, value in values.items():
        if value is not None and _known(value) and not value > 0:
            raise ValueError(f"{name} must be positive, got {value}.")


def as_dtype(name: str, value: Any) -> np.dtype | None:
    """The dtype that was meant, or None.

    ``inject_hyperparams`` takes a scalar type such as ``jnp.bfloat16`` for a schedule, calls it
    with the step count and passes on the array it gets: the array's dtype is what was meant.
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
    """A hyperparameter that does not change the dtype of what it multiplies."""
    if isinstance(value, float | int | np.generic | np.ndarray):
        return float(value)
    return jnp.asarray(value, dtype)


def floating(path: str, leaf: Any) -> None:
    """Raises unless a parameter is real and floating."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise ValueError(
            f"parameter {path!r} has dtype {leaf.dtype}; only real floating parameters can be "
            "optimized. Leave it out with optax.masked or optax.partition."
        )


def mask(name: str, value: Any, tree: Any) -> list[bool]:
    """The bool of each leaf, from a tree of bools, a prefix of one, or a function that makes it."""
    found = value(tree) if callable(value) else value
    try:
        return jax.tree.leaves(
            jax.tree.map(lambda m, part: jax.tree.map(lambda _: bool(m), part), found, tree)
        )
    except ValueError as error:
        raise ValueError(
            f"{name} does not fit the parameters; it needs a bool for each of them, or for each "
            f"part of their tree: {error}"
        ) from None


def keep_dtype(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Casts the updates of ``inner`` back to the dtype its gradients came in.

    A strongly typed float32 hyperparameter, as ``inject_hyperparams`` makes, would widen bfloat16
    updates.
    """
    inner = optax.with_extra_args_support(inner)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        out, state = inner.update(updates, state, params, **extra_args)
        return jax.tree.map(lambda o, u: o.astype(u.dtype), out, updates), state

    return optax.GradientTransformationExtraArgs(inner.init, update)
