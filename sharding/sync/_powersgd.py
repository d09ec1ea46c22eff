"""Gradients as products of two narrow matrices."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext import FactoringRule, last_two_dims
from sharding._types import Array, Tree
from sharding.collectives._sum_dtype import sum_dtype, to_sum_dtype
from sharding.placement._matrix_form import MatrixForm
from sharding.placement._specs import Axes, plain_path, rule_for_tree
from sharding.sync._dense import dense_method
from sharding.sync._interface import GradientSync, Method, Reduced, StepContext, leafwise, sliced


def powersgd(
    rank: int = 4,
    *,
    min_compression: float = 2.0,
    factoring: FactoringRule = last_two_dims(),
    seed: int = 0,
) -> GradientSync:
    r"""Sends a low-rank approximation of each matrix, found by one step of power iteration.

    With :math:`e_i` the error-feedback residual of device i and Q, orthogonalized, of the step
    before,

    .. math::

      M_i = g_i + e_i, \quad P = \operatorname{orth}\Big(\sum_i M_i Q\Big), \quad
      Q_i = M_i^\top P, \quad Q \leftarrow \frac 1n \sum_i Q_i, \quad
      \bar g = P Q^\top, \quad e_i \leftarrow M_i - P Q_i^\top

    The usual residual, :math:`M_i - P Q^\top`, gives the same means, but grows with the root of the
    number of steps; this one stays bounded.

    Wire bytes per device and matrix: 2 (n - 1) / n times those of rank x (rows + columns) numbers,
    in two all-reduces. State per device: the residual, as large as the gradients, and Q.

    Args:
      rank: columns of P and Q.
      min_compression: matrices are compressed if rank x (rows + columns) times this is less than
        rows x columns; all others, and vectors, are sent in full.
      factoring: which dims are rows and columns, as for optimizers; other dims stack matrices.
      seed: of the first Q.

    Raises:
      ValueError: if ``rank`` is below 1, or so large that nothing is compressed.

    Example:
      >>> from sharding import sync
      >>> grad_sync = sync.powersgd(rank=4)

    References:
      Vogels, Karimireddy, Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed
      Optimization, NeurIPS 2019, arXiv 1905.13727.
    """
    return low_rank("powersgd", _power_iteration, rank, min_compression, factoring, seed)


def low_rank(
    name: str,
    step: Callable[..., Any],
    rank: int,
    min_compression: float,
    factoring: FactoringRule,
    seed: int,
    alternates: bool = False,
) -> GradientSync:
    """Sends matrices by ``step`` where that pays off, others in full.

    ``step`` is ``(m, factors, axes, context) -> (mean, own contribution, factors)``, of m (count,
    rows, cols) and factors q (count, cols, rank); if it ``alternates``, p (count, rows, rank), too.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank must be an integer of at least 1, got {rank!r}.")
    if not min_compression >= 1:
        raise ValueError(f"min_compression must be at least 1, got {min_compression}.")

    def sync_of(tree: Tree) -> GradientSync:
        rule = rule_for_tree(factoring, tree)

        def choose(path: str, x: Array) -> Method:
            form = MatrixForm.of(rule, plain_path(path), tuple(x.shape))
            if form is None or not jnp.issubdtype(x.dtype, jnp.floating):
                return dense_method()
            *_, rows, cols = form.shape
            pays_off = rank * (rows + cols) * min_compression < rows * cols
            if not pays_off:
                return dense_method()
            return _method_of(step, path, form, rank, seed, alternates)

        return leafwise(
            choose,
            f"{name}: rank {rank} compresses no parameter: rank x (rows + columns) x "
            f"{min_compression} is less than rows x columns",
        )

    return GradientSync(
        lambda params: sync_of(params).init(params),
        lambda grads, *args: sync_of(grads).all_reduce(grads, *args),
        lambda grads, *args: sync_of(grads).reduce_scatter(grads, *args),
    )


def _method_of(
    step: Callable[..., Any], path: str, form: MatrixForm, rank: int, seed: int, alternates: bool
) -> Method:
    """The method of the array with this path and these matrices (stack..., rows, cols)."""
    *stack, rows, cols = form.shape
    count = math.prod(stack)

    def init(x: Array) -> dict[str, jax.Array]:
        dtype, key = sum_dtype(x.dtype), StepContext(None, path).key(seed)
        p = {"p": jnp.zeros((count, rows, rank), dtype)} if alternates else {}
        q = jax.random.normal(key, (count, cols, rank), dtype)
        return p | {"q": q, "error": jnp.zeros(x.shape, dtype)}

    def all_reduce(x: jax.Array, state: Tree, axes: Axes, context: StepContext) -> Reduced:
        m = form.to_matrices(to_sum_dtype(x) + state["error"]).reshape(count, rows, cols)
        mean, own, factors = step(m, state, axes, context)
        mean, error = (form.from_matrices(y.reshape(form.shape), x) for y in (mean, m - own))
        return mean, factors | {"error": error}

    return Method(init, sliced(all_reduce), counts_steps=alternates)


def _power_iteration(m: jax.Array, factors: Tree, axes: Axes, _: StepContext) -> tuple[Any, ...]:
    # Orthonormal bases: for a zero or dependent column any, never NaN.
    basis = jnp.linalg.qr(factors["q"])[0]
    p = jnp.linalg.qr(lax.psum(m @ basis, axes))[0]  # (count, rows, rank)
    # Q transposed, (count, rank, cols): XLA:CPU would copy m to transpose it.
    own = jnp.swapaxes(p, -1, -2) @ m
    q = lax.pmean(own, axes)
    return p @ q, p @ own, {"q": jnp.swapaxes(q, -1, -2)}
