"""Gradients as products of two narrow matrices."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext import Factoring, FactoringRule, last_two_dims
from sharding.collectives._dtypes import sum_dtype, to_sum_dtype
from sharding.placement._specs import Axes, plain_path, rule_for_tree
from sharding.sync._dense import dense_method
from sharding.sync._interface import (
    GradientSync,
    Method,
    StepContext,
    SyncState,
    from_step,
    leafwise,
    named_leaves,
    path_hash,
)


def powersgd(
    rank: int = 4,
    *,
    start_step: int = 0,
    min_compression: float = 2.0,
    factoring: FactoringRule = last_two_dims(),
    error_feedback: bool = True,
    warm_start: bool = True,
    alternate: bool = False,
    seed: int = 0,
) -> GradientSync:
    r"""Sends a low-rank approximation of each matrix, found by one step of power iteration.

    With :math:`e_i` the error-feedback residual of device i and Q of the step before,

    .. math::

      M_i = g_i + e_i, \quad P = \operatorname{orth}\Big(\sum_i M_i Q\Big), \quad
      Q_i = M_i^\top P, \quad Q \leftarrow \frac 1n \sum_i Q_i, \quad
      \bar g = P Q^\top, \quad e_i \leftarrow M_i - P Q_i^\top

    where Q is orthogonalized before it is used. The usual residual, :math:`M_i - P Q^\top`, gives
    the same means, but it accumulates each device's own deviation and grows with the root of the
    number of steps; this one stays bounded.

    Wire bytes per device and matrix: 2 (n - 1) / n times those of rank x (rows + columns) numbers,
    in two all-reduces. State per device: the residual, as large as the gradients, and Q.

    ``alternate`` computes one of the two factors per step, as an alternating factorization does:
    one step multiplies by Q and sends P, the next multiplies by P and sends Q. It sends half the
    bytes in a single all-reduce per step; both factors are part of the state, and the approximation
    is less accurate.

    Args:
      rank: columns of P and Q.
      start_step: before this step gradients are sent in full.
      min_compression: matrices are compressed if rank x (rows + columns) times this is less than
        rows x columns; all others, and vectors, are sent in full.
      factoring: which dims are rows and columns, as for optimizers
        (``optax_ext.flax_transformer()``); all other dims stack matrices, each of which is
        compressed by itself, all at once.
      error_feedback: add the residual to the next gradient. Without it, much of the gradient is
        lost.
      warm_start: start from the Q of the step before instead of a random one.
      alternate: send P in even steps, Q in odd ones.
      seed: of the first Q; of every Q without ``warm_start``.

    Returns:
      A ``GradientSync``.

    Raises:
      ValueError: if ``rank`` is below 1, or so large that nothing is compressed; if ``alternate``
        has no warm start.

    Example:
      >>> from sharding import sync
      >>> grad_sync = sync.powersgd(rank=4, start_step=100)

    References:
      Vogels, Karimireddy, Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed
      Optimization, NeurIPS 2019, arXiv 1905.13727. Cho, Muthusamy, Nemanich, Puri: GradZip:
      Gradient Compression using Alternating Matrix Factorization for Large-scale Deep Learning,
      NeurIPS 2019 workshop.
    """
    _check_powersgd(rank, start_step, min_compression, warm_start, alternate)
    options = _PowerSGD(
        rank, min_compression, factoring, error_feedback, warm_start, alternate, seed
    )

    def of(tree: Any) -> tuple[_PowerSGD, GradientSync]:
        """The options and the sync of a tree."""
        of_tree = options._replace(factoring=rule_for_tree(factoring, tree))

        def choose(path: str, x: Any) -> Method:
            view = of_tree.view_of(path, x)
            if view is None:
                return dense_method()
            return from_step(start_step, of_tree.method_of(path, view), dense_method())

        return of_tree, leafwise(choose)

    def init(params: Any) -> SyncState:
        flat, _ = named_leaves(params)
        of_tree, inner = of(params)
        if not any(of_tree.view_of(path, x) for path, x in flat):
            raise ValueError(
                f"powersgd: rank {rank} compresses no parameter: rank x (rows + columns) x "
                f"{min_compression} is less than rows x columns for none of the shapes "
                f"{sorted({tuple(x.shape) for _, x in flat})}. Use a smaller rank, or sync.dense()."
            )
        return inner.init(params)

    return GradientSync(
        init,
        lambda grads, *args: of(grads)[1].all_reduce(grads, *args),
        lambda grads, *args: of(grads)[1].reduce_scatter(grads, *args),
    )


def _check_powersgd(
    rank: Any, start_step: int, min_compression: float, warm_start: bool, alternate: bool
) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank must be an integer of at least 1, got {rank!r}.")
    if start_step < 0:
        raise ValueError(f"start_step must not be negative, got {start_step}.")
    if not min_compression >= 1:
        raise ValueError(f"min_compression must be at least 1, got {min_compression}.")
    if alternate and not warm_start:
        raise ValueError(
            "alternate needs warm_start=True, since each step uses the factor of the step before; "
            f"got warm_start={warm_start}."
        )


class _PowerSGD(NamedTuple):
    """The options of ``powersgd``, and the method of one array."""

    rank: int
    min_compression: float
    factoring: FactoringRule
    error_feedback: bool
    warm_start: bool
    alternate: bool
    seed: int

    def view_of(self, path: str, x: Any) -> "_MatrixView | None":
        """The matrices of an array; None if it is sent in full."""
        dims = self.factoring.resolve(plain_path(path), tuple(x.shape))
        if dims is None or not dims.factored:
            return None
        view = _MatrixView(tuple(x.shape), dims)
        sent = self.rank * (view.rows + view.cols)
        small = sent * self.min_compression < view.rows * view.cols
        return view if small and jnp.issubdtype(x.dtype, jnp.floating) else None

    def method_of(self, path: str, view: "_MatrixView") -> Method:
        """The method of the array with this path and these matrices."""

        def random(key: jax.Array, size: int, dtype: Any) -> jax.Array:
            return jax.random.normal(key, (view.count, size, self.rank), dtype)

        def init(x: Any) -> dict[str, jax.Array]:
            dtype = sum_dtype(x.dtype)
            key = StepContext(None, path_hash(path)).key(self.seed)
            state = {"q": random(key, view.cols, dtype)} if self.warm_start else {}
            if self.alternate:
                state["p"] = random(jax.random.fold_in(key, 1), view.rows, dtype)
            return state | ({"error": jnp.zeros(x.shape, dtype)} if self.error_feedback else {})

        def all_reduce(
            x: jax.Array, state: Any, axes: Axes, context: StepContext
        ) -> tuple[jax.Array, Any]:
            x = to_sum_dtype(x)
            m = view.matrices(x + state["error"] if self.error_feedback else x)  # (count, ...)
            factors = {name: factor for name, factor in state.items() if name != "error"}
            if not self.warm_start:
                factors = {"q": random(context.key(self.seed), view.cols, x.dtype)}
            if self.alternate:
                updates = [functools.partial(f, axes) for f in (_update_p, _update_q)]
                mean, own, factors = lax.cond(context.step % 2 == 0, *updates, m, factors)
            else:
                mean, own, factors = _update_both(axes, m, factors)
            state = factors if self.warm_start else {}
            if self.error_feedback:
                state["error"] = view.array(m - own)
            return view.array(mean), state

        return Method(init, all_reduce, counts_steps=self.alternate or not self.warm_start)


class _MatrixView:
    """An array as a stack of matrices.

    Attributes:
      rows: rows of each matrix.
      cols: columns of each matrix.
      count: how many matrices there are.
    """

    def __init__(self, shape: tuple[int, ...], factoring: Factoring):
        sides = (factoring.rows, factoring.cols)
        rest = tuple(d for d in range(len(shape)) if d not in sides[0] + sides[1])
        self._order = (*rest, *sides[0], *sides[1])
        self._ordered = tuple(shape[d] for d in self._order)
        self.rows, self.cols = (math.prod(shape[d] for d in side) for side in sides)
        self.count = math.prod(shape[d] for d in rest)

    def matrices(self, x: jax.Array) -> jax.Array:
        """(count, rows, cols)."""
        return x.transpose(self._order).reshape(self.count, self.rows, self.cols)

    def array(self, m: jax.Array) -> jax.Array:
        """The inverse of ``matrices``."""
        inverse = sorted(range(len(self._order)), key=self._order.__getitem__)
        return m.reshape(self._ordered).transpose(inverse)


def orthonormal(x: jax.Array) -> jax.Array:
    """An orthonormal basis (count, size, rank) whose span contains the columns of each matrix.

    A zero or dependent column becomes an arbitrary one that is orthogonal to the others, never NaN.
    """
    return jnp.linalg.qr(x)[0]


# --- One step of power iteration ------------------------------------------------------------------
# On a stack of matrices m (count, rows, cols) of this device, with factors p (count, rows, rank)
# and q (count, cols, rank), each returns the mean approximation, this device's contribution to it
# (both like m), and the new factors.

_Update = tuple[jax.Array, jax.Array, dict[str, jax.Array]]


def _update_both(axes: Axes, m: jax.Array, factors: dict[str, jax.Array]) -> _Update:
    p = orthonormal(lax.psum(m @ orthonormal(factors["q"]), axes))  # (count, rows, rank)
    # Q transposed, (count, rank, cols): XLA:CPU would copy m to transpose it.
    own = _transposed(p) @ m
    q = lax.pmean(own, axes)
    return p @ q, p @ own, {"q": _transposed(q)}


def _update_p(axes: Axes, m: jax.Array, factors: dict[str, jax.Array]) -> _Update:
    basis = orthonormal(factors["q"])  # (count, cols, rank)
    own = m @ basis
    p = lax.pmean(own, axes)
    return p @ _transposed(basis), own @ _transposed(basis), {"p": p, "q": factors["q"]}


def _update_q(axes: Axes, m: jax.Array, factors: dict[str, jax.Array]) -> _Update:
    basis = orthonormal(factors["p"])  # (count, rows, rank)
    own = _transposed(basis) @ m  # (count, rank, cols)
    q = lax.pmean(own, axes)
    return basis @ q, basis @ own, {"p": factors["p"], "q": _transposed(q)}


def _transposed(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)
