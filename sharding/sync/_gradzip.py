"""Gradients as products of two narrow matrices, of which a step sends one."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext import FactoringRule, last_two_dims
from sharding._types import Tree
from sharding.placement._specs import Axes
from sharding.sync._interface import GradientSync, StepContext
from sharding.sync._powersgd import low_rank


def gradzip(
    rank: int = 4,
    *,
    min_compression: float = 2.0,
    factoring: FactoringRule = last_two_dims(),
    seed: int = 0,
) -> GradientSync:
    r"""Sends one factor of a low-rank approximation of each matrix, by alternating minimization.

    With :math:`e_i` the error-feedback residual of device i, :math:`M_i = g_i + e_i`, and the other
    factor fixed, which is the same on all devices, the least-squares solution of
    :math:`\min \sum_i \lVert M_i - P Q^\top \rVert^2` is a mean, so an all-reduce finds it. Steps
    alternate between the two factors:

    .. math::

      Q &\leftarrow \operatorname{orth}(Q), \quad P_i = M_i Q, \quad P = \frac 1n \sum_i P_i, \quad
      \bar g = P Q^\top, \quad e_i \leftarrow M_i - P_i Q^\top \qquad \text{(even steps)} \\
      P &\leftarrow \operatorname{orth}(P), \quad Q_i = M_i^\top P, \quad
      Q = \frac 1n \sum_i Q_i, \quad \bar g = P Q^\top, \quad
      e_i \leftarrow M_i - P Q_i^\top \qquad \text{(odd steps)}

    Both factors in one step are ``powersgd``, whose bytes are twice these and whose approximation
    is closer. This is written from the idea of the paper as later papers tell it: its regularizer
    is left out, which orthonormal factors do not need.

    Wire bytes per device and matrix, in one all-reduce: 2 (n - 1) / n times those of rank x rows
    numbers in even steps, of rank x columns in odd ones. State per device: the residual, as large
    as the gradients, and both factors.

    Args:
      rank: columns of both factors.
      min_compression: matrices are compressed if rank x (rows + columns) times this is less than
        rows x columns; all others, and vectors, are sent in full.
      factoring: which dims are rows and columns, as for optimizers; other dims stack matrices.
      seed: of the first factor.

    Raises:
      ValueError: if ``rank`` is below 1, or so large that nothing is compressed.

    Example:
      >>> from sharding import sync
      >>> grad_sync = sync.gradzip(rank=4)

    References:
      Cho, Muthusamy, Nemanich, Puri: GradZip: Gradient Compression using Alternating Matrix
      Factorization for Large-scale Deep Learning, NeurIPS 2019 workshop on systems for ML.
    """
    return low_rank("gradzip", _one_factor, rank, min_compression, factoring, seed, alternates=True)


def _one_factor(m: jax.Array, factors: Tree, axes: Axes, context: StepContext) -> tuple[Any, ...]:
    p, q = factors["p"], factors["q"]

    # The factors of the mean, those of what this device sends, and the new state.
    def new_rows() -> tuple[jax.Array, ...]:
        basis = _orthonormal(q)
        own = m @ basis  # (count, rows, rank)
        mean, across = lax.pmean(own, axes), jnp.swapaxes(basis, -1, -2)
        return mean, across, own, across, mean, q

    def new_cols() -> tuple[jax.Array, ...]:
        basis = _orthonormal(p)
        # Q transposed, (count, rank, cols): XLA:CPU would copy m to transpose it.
        own = jnp.swapaxes(basis, -1, -2) @ m
        mean = lax.pmean(own, axes)
        return basis, mean, basis, own, p, jnp.swapaxes(mean, -1, -2)

    left, right, own_left, own_right, p, q = lax.cond(context.step % 2 == 0, new_rows, new_cols)
    return left @ right, own_left @ own_right, {"p": p, "q": q}


def _orthonormal(factor: jax.Array) -> jax.Array:
    """A basis of its columns: for a zero or dependent column any, never NaN."""
    return jnp.linalg.qr(factor)[0]
