"""Gradients as products of two narrow matrices."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_ext import Factoring, FactoringRule, last_two_dims
from sharding.placement._specs import Axes, path_str
from sharding.sync._dense import dense_method
from sharding.sync._interface import (
    GradientSync,
    Method,
    Noise,
    SyncState,
    from_step,
    leafwise,
    salt,
    wide,
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
    r"""Sends of each matrix what one step of power iteration finds, and keeps the rest for later.

    With :math:`e_i` what device i has not sent yet and Q of the step before,

    .. math::

      M_i = g_i + e_i, \quad P = \operatorname{orth}\Big(\sum_i M_i Q\Big), \quad
      Q_i = M_i^\top P, \quad Q \leftarrow \frac 1n \sum_i Q_i, \quad
      \bar g = P Q^\top, \quad e_i \leftarrow M_i - P Q_i^\top

    where Q is orthogonalized before it is used. The usual error, :math:`M_i - P Q^\top`, gives the
    same means, but it keeps each device's own deviation for ever and grows with the root of the
    number of steps; this one stays bounded.

    On the wire two all-reduces of rank x (rows + columns) numbers a matrix, 2 (n - 1) / n times.
    State of a device: its error, as large as the gradients, and Q.

    ``alternate`` takes the two factors in turns, as an alternating factorization does: one step
    multiplies with Q alone and sends P, the next with P and sends Q. Half the bytes, and one
    all-reduce in a step; both factors are kept, and what is sent fits the gradient less well.

    Args:
      rank: columns of P and Q.
      start_step: before this step gradients are sent whole.
      min_compression: matrices are compressed if rank x (rows + columns) times this is less than
        rows x columns; all others, and vectors, are sent whole.
      factoring: which dims are rows and columns, as optimizers take it
        (``optax_ext.flax_transformer()``); all other dims stack matrices that are compressed one by
        one, all at once.
      error_feedback: keep what was not sent. Without, much of the gradient is lost.
      warm_start: begin with the Q of the step before, not with a random one.
      alternate: send P in steps of even number, Q in the others.
      seed: of the first Q, or of all.

    Returns:
      A ``GradientSync``.

    Raises:
      ValueError: if ``rank`` is below 1, or so large that it compresses nothing; if ``alternate``
        has no warm start.

    Example:
      >>> from sharding import sync
      >>> exchange = sync.powersgd(rank=4, start_step=100)

    References:
      Vogels, Karimireddy, Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed
      Optimization, NeurIPS 2019, arXiv 1905.13727. Cho, Muthusamy, Nemanich, Puri: GradZip:
      Gradient Compression using Alternating Matrix Factorization for Large-scale Deep Learning,
      NeurIPS 2019 workshop.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank must be an integer of at least 1, got {rank!r}.")
    if start_step < 0:
        raise ValueError(f"start_step must not be negative, got {start_step}.")
    if not min_compression >= 1:
        raise ValueError(f"min_compression must be at least 1, got {min_compression}.")
    if alternate and not warm_start:
        raise ValueError("alternate needs warm_start=True: it goes on with the factor before.")

    def view_of(path: str, x: Any) -> "_View | None":
        found = factoring.resolve(path, tuple(x.shape))
        if found is None or not found.factored:
            return None
        view = _View(tuple(x.shape), found)
        small = rank * (view.rows + view.cols) * min_compression < view.rows * view.cols
        return view if small and jnp.issubdtype(x.dtype, jnp.floating) else None

    def choose(path: str, x: Any) -> Method:
        view = view_of(path, x)
        if view is None:
            return dense_method()

        def init(x: Any) -> dict[str, jax.Array]:
            dtype = jnp.promote_types(x.dtype, jnp.float32)
            key = Noise(None, salt(path)).key(seed)
            state = {"q": _random(key, view, view.cols, rank, dtype)} if warm_start else {}
            if alternate:
                state["p"] = _random(jax.random.fold_in(key, 1), view, view.rows, rank, dtype)
            return state | ({"error": jnp.zeros(x.shape, dtype)} if error_feedback else {})

        def mean(x: jax.Array, state: Any, axes: Axes, noise: Noise) -> tuple[jax.Array, Any]:
            x = wide(x)
            m = view.matrices(x + state["error"] if error_feedback else x)
            factors = {name: factor for name, factor in state.items() if name != "error"}
            if not warm_start:
                factors = {"q": _random(noise.key(seed), view, view.cols, rank, x.dtype)}
            if alternate:
                kernels = [functools.partial(kernel, axes) for kernel in (_first, _second)]
                found, own, factors = lax.cond(noise.step % 2 == 0, *kernels, m, factors)
            else:
                found, own, factors = _both(axes, m, factors)
            state = factors if warm_start else {}
            if error_feedback:
                state["error"] = view.array(m - own)
            return view.array(found), state

        method = Method(init, mean, counts=alternate or not warm_start)
        return from_step(start_step, method, dense_method())

    inner = leafwise(choose)

    def init(params: Any) -> SyncState:
        flat = jax.tree_util.tree_leaves_with_path(params)
        if not any(view_of(path_str(path), x) for path, x in flat):
            raise ValueError(
                f"rank {rank} compresses no parameter: rank x (rows + columns) x "
                f"{min_compression} is less than rows x columns for none of "
                f"{sorted({tuple(x.shape) for _, x in flat})}."
            )
        return inner.init(params)

    return GradientSync(init, inner.all_reduce, inner.reduce_scatter)


class _View:
    """An array as a stack of matrices.

    Attributes:
      rows: of each.
      cols: of each.
      count: how many.
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
        """The array of such matrices."""
        order = sorted(range(len(self._order)), key=self._order.__getitem__)
        return m.reshape(self._ordered).transpose(order)


def orthonormal(x: jax.Array) -> jax.Array:
    """Orthonormal columns that span those of each matrix; of rank-deficient ones, and more.

    A zero or dependent column becomes any that is orthogonal to the others, never NaN.
    """
    return jnp.linalg.qr(x)[0]


# --- Of a stack of matrices: the mean that is found, this device's part in it, the factors --------

_Found = tuple[jax.Array, jax.Array, dict[str, jax.Array]]


def _both(axes: Axes, m: jax.Array, factors: dict[str, jax.Array]) -> _Found:
    p = orthonormal(lax.psum(m @ orthonormal(factors["q"]), axes))
    own = _turned(p) @ m  # Q transposed: XLA:CPU would copy m to transpose it
    q = lax.pmean(own, axes)
    return p @ q, p @ own, {"q": _turned(q)}


def _first(axes: Axes, m: jax.Array, factors: dict[str, jax.Array]) -> _Found:
    basis = orthonormal(factors["q"])
    own = m @ basis
    p = lax.pmean(own, axes)
    return p @ _turned(basis), own @ _turned(basis), {"p": p, "q": factors["q"]}


def _second(axes: Axes, m: jax.Array, factors: dict[str, jax.Array]) -> _Found:
    basis = orthonormal(factors["p"])
    own = _turned(basis) @ m
    q = lax.pmean(own, axes)
    return basis @ q, basis @ own, {"p": factors["p"], "q": _turned(q)}


def _turned(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)


def _random(key: jax.Array, view: _View, size: int, rank: int, dtype: Any) -> jax.Array:
    return jax.random.normal(key, (view.count, size, rank), dtype)
