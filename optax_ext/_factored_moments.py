"""Factored second moments: decaying averages of row and column means, and updates scaled by them.

Their outer product, divided by the mean of the rows, estimates the full matrix. Shapes in comments
are those of an array (rows, cols).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_ext import _matrix_passes
from optax_ext._factoring import Dims, Factoring
from optax_ext._leaves import Leaves, at_least_float32, check_dtype
from optax_ext._matrix_passes import Function
from optax_ext._types import Array


class Moment(NamedTuple):
    """The second moment of one array: ``full``, or ``row`` and ``col``; the others are None."""

    full: jax.Array | None  # the parameter's shape
    row: jax.Array | None  # the parameter's shape without the column dims
    col: jax.Array | None  # the parameter's shape without the row dims

    @property
    def dtype(self) -> Any:
        return next(x.dtype for x in self if x is not None)


class Estimate(NamedTuple):
    """A second moment and, if it is factored, the mean of ``row`` that normalizes the product."""

    moment: Moment
    row_mean: jax.Array | None  # (1, 1)


class Leaf(NamedTuple):
    """One parameter in a step of CAME, or of Adafactor, which has no momentum and no instability.

    First its gradient and state, then what phases compute.
    """

    g: jax.Array  # (rows, cols), the gradient; after the last phase the update
    nu: Moment
    t: jax.Array  # (), int32, number of this step
    mu: Any = None  # (rows, cols)
    instability: Any = None  # Moment, without arrays if the parameter is not factored
    v: Any = None  # Estimate: nu of this step
    factors: tuple[jax.Array, ...] = ()  # (rows, 1), (1, cols), (1, 1): their product is u / g
    s: Any = None  # Estimate: instability of this step

    @property
    def dtype(self) -> Any:
        return self.nu.dtype


def init(like: Array, dims: Factoring) -> Moment:
    """Returns zeros; factored ones are sums of zeros like ``like``, to inherit its sharding."""
    zeros = jnp.zeros_like(like, dtype=at_least_float32(like.dtype))  # (rows, cols)
    if not dims.factored:
        return Moment(zeros, None, None)
    return Moment(None, jnp.sum(zeros, axis=dims.cols), jnp.sum(zeros, axis=dims.rows))


def average(
    moment: Moment, fn: Function, x: jax.Array, args: Any, eps: Any, weights: Any, dims: Factoring
) -> Estimate:
    """For ``y = fn(x, args)``: the average of ``moment`` and ``y + eps``."""
    decay, weight = weights  # of ``moment`` and of ``y``
    if moment.full is not None:
        full = decay * moment.full + weight * (fn(x, args) + eps)  # (rows, cols)
        return Estimate(Moment(full, None, None), None)
    row, col = _matrix_passes.sweep(fn, x, args, dims.cols, dims.rows)
    row = decay * moment.row + weight * (row + eps)  # (rows,)
    col = decay * moment.col + weight * (col + eps)  # (cols,)
    row_mean = _matrix_passes.mean(jnp.expand_dims(row, dims.cols), dims.rows, keepdims=True)
    return Estimate(Moment(None, row, col), row_mean)  # row_mean: (1, 1)


def average_squares(leaf: Leaf, eps: Any, weights: Any, dims: Factoring) -> Estimate:
    """Returns the average of ``leaf.nu`` and ``leaf.g**2 + eps``."""

    def square(g: jax.Array, _: Any) -> jax.Array:
        return jnp.square(g.astype(leaf.dtype))

    return average(leaf.nu, square, leaf.g, (), eps, weights, dims)


def inverse_root(estimate: Estimate, dims: Factoring) -> tuple[jax.Array, ...]:
    """Returns factors whose product is ``1 / sqrt(estimate)``."""
    (full, row, col), row_mean = estimate
    if full is not None:
        return (jax.lax.rsqrt(full),)
    assert row is not None and col is not None and row_mean is not None  # noqa: PT018
    row = jnp.expand_dims(row, dims.cols)  # (rows, 1)
    col = jnp.expand_dims(col, dims.rows)  # (1, cols)
    # row * col is not formed: it leaves float32's range where the quotient does not.
    return jax.lax.rsqrt(row) * jnp.sqrt(row_mean), jax.lax.rsqrt(col)


def multiply(x: jax.Array, factors: Sequence[jax.Array]) -> jax.Array:
    """Returns ``x`` times each factor: its row first, which keeps an all-zero row at zero."""
    for factor in factors:
        x = x * factor
    return x


def clip(hyper: Any, dims: Factoring, leaf: Leaf) -> Leaf:
    """Adds the factors of ``u``, which is ``g / sqrt(v)`` clipped by its RMS: a phase of a step."""
    factors = inverse_root(leaf.v, dims)
    threshold = hyper.clipping_threshold
    if threshold is not None and leaf.g.size:
        u = multiply(leaf.g.astype(leaf.dtype), _matrix_passes.recomputed(factors, factors))
        factors += (1.0 / jnp.maximum(1.0, rms(u, dims) / threshold),)  # (1, 1)
    return leaf._replace(factors=factors)


def rms(x: jax.Array, dims: Factoring) -> jax.Array:
    """Returns the root mean square of every batch slice, shaped to broadcast against ``x``."""
    reduced = tuple(d for d in range(x.ndim) if d not in dims.batch)
    # Divided last: XLA on CPUs would write a matrix of the scale that arrays share. By a float: JAX
    # converts integers to int32, and large models have arrays of more elements.
    count = float(math.prod(x.shape[d] for d in reduced))
    mean = jnp.sum(jnp.square(x), reduced, keepdims=True) / count
    zero = mean == 0  # where the derivative of the root is not finite
    return jnp.where(zero, 0.0, jnp.sqrt(jnp.where(zero, 1.0, mean)))


def split(leaves: Leaves, dims: Sequence[Factoring], moments: Sequence[Moment]) -> Any:
    """Returns trees of the full, row and col moments; None where a leaf has no such slot."""
    kept = [moment_dims(x.ndim, d) for x, d in zip(leaves.arrays, dims, strict=True)]
    full, row, col = ([m[i] for m in moments] for i in range(3))
    rows, cols = ([k[i] or () for k in kept] for i in (1, 2))
    return leaves.unflatten(full), leaves.unflatten(row, rows), leaves.unflatten(col, cols)


def join(leaves: Leaves, dims: Sequence[Factoring], state: Any, *fields: str) -> list[Moment]:
    """Returns each leaf's moment in fields of the state; raises unless they are of such leaves.

    The fields are those of ``Moment``, or the last two, where only factored leaves have one.
    """
    name = fields[0].removesuffix("_row")
    num = len(fields)
    columns = [leaves.slots(field, getattr(state, field)) for field in fields]
    moments = [Moment(*[None] * (3 - num), *slots) for slots in zip(*columns, strict=True)]
    for path, g, factoring, moment in zip(leaves.paths, leaves.arrays, dims, moments, strict=True):
        kept = moment_dims(g.ndim, factoring)[-num:]
        want = [None if own is None else tuple(g.shape[d] for d in own) for own in kept]
        have = [None if x is None else tuple(x.shape) for x in moment[-num:]]
        if want != have:
            raise ValueError(
                f"gradient {path!r} of shape {tuple(g.shape)} does not match the state: its "
                f"{fields} should have shapes {want}, found {have}. The state belongs to other "
                "parameters or another factoring rule."
            )
        for array in moment:
            if array is not None:
                check_dtype(path, name, array)
    return moments


def moment_dims(ndim: int, dims: Factoring) -> list[Dims | None]:
    """Returns the dims of the full, the row and the col moment; None for an unused one."""
    if not dims.factored:
        return [tuple(range(ndim)), None, None]
    return [None, *(tuple(d for d in range(ndim) if d not in s) for s in (dims.cols, dims.rows))]
