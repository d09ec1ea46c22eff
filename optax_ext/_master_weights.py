"""Master weights: low-precision parameters that are the rounding of wider ones."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_ext import _validate
from optax_ext._leaves import Leaves, check_dtype, check_shape
from optax_ext._types import Array, DType, Tree


class MasterWeightsState(NamedTuple):
    """State of ``master_weights``."""

    master: optax.Params  # the parameter's shape, ``dtype``; None where a parameter has no master
    inner_state: optax.OptState

    def rounded(self, params: Tree) -> Any:
        """Returns parameters, of each that has a master its rounding, which it is after a step."""
        masters = dict(jax.tree.leaves_with_path(self.master))

        def of_master(path: Any, p: Array) -> Any:
            master = masters.get(path)
            if master is None or master.shape != p.shape:
                return p
            return _rounded(master, p.dtype).astype(p.dtype)

        return jax.tree.map_with_path(of_master, params)


def _rounded(x: jax.Array, dtype: DType) -> jax.Array:
    """Returns the nearest value of a narrower ``dtype``, in the dtype of ``x``."""
    narrow = jnp.finfo(dtype)
    wide = jnp.finfo(x.dtype)
    # XLA may remove a pair of casts, and few exponent bits have no subnormals here.
    out = jax.lax.reduce_precision(x, wide.nexp, narrow.nmant)
    smallest = float(narrow.smallest_normal)
    if smallest > float(wide.smallest_normal):
        step = float(narrow.smallest_subnormal)
        out = jnp.where(jnp.abs(x) < smallest, jnp.round(x / step) * step, out)
    return jnp.where(jnp.abs(out) > float(narrow.max), jnp.copysign(jnp.inf, x), out)


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def _move(p: jax.Array, master: jax.Array, update: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns ``u`` and the new master; ``p + u`` and the master round to the same bits."""
    dtype = master.dtype
    # One value for both results: two fusions that each compute it may contract it differently.
    new = jax.lax.optimization_barrier(master + update.astype(dtype))
    want = _rounded(new, p.dtype)
    wide = p.astype(dtype)
    # The difference of two narrow values is exact, unless one is far below the other's last bit. A
    # value that rounds to -0 is not rounded: 0 + -0 is 0, and only negative values round to -0.
    u = jnp.where(want == 0, new, want) - wide
    # No finite step leaves infinity, of which the difference is NaN.
    u = jnp.where(jnp.isinf(wide) & (wide + new == wide), 0, u)
    have = wide + u
    reached = _bits(_rounded(have, p.dtype)) == _bits(want)
    return u, jnp.where(reached, new, have)


def master_weights(
    inner: optax.GradientTransformation, dtype: DType = jnp.float32
) -> optax.GradientTransformationExtraArgs:
    r"""Runs ``inner`` on wide master weights, and makes low-precision parameters their rounding.

    Steps below half the spacing of bfloat16, 1/512 to 1/256 of the parameter, are not lost:

    .. math::

      w \leftarrow w + \operatorname{inner}(g, w), \quad
      u = \operatorname{round}(w) - \theta, \quad
      \theta \leftarrow \theta + u

    After every ``optax.apply_updates(params, updates)``, each parameter that has a master equals
    ``master.astype(params.dtype)``, bit for bit. Floating parameters narrower than ``dtype`` have
    one, of 4 bytes an element, and updates in ``dtype``. A parameter changed elsewhere is reset by
    the next step, so this transformation goes last in a chain.

    Args:
      inner: the transformation; it receives masters instead of the parameters, and gradients in
        ``dtype``. Wrappers of optax that may skip an update, such as ``apply_if_finite``, go here.
      dtype: dtype of the masters: float32, or float64 where ``jax_enable_x64`` is set.

    Raises:
      ValueError: if ``dtype`` is narrower than float32 or disabled in JAX, parameters have 8 bits
        (JAX adds no float32 to them), ``update`` is called without ``params``, or gradients or
        parameters do not match the state.

    Example:
      >>> import jax.numpy as jnp, optax, optax_ext
      >>> p = jnp.ones(3, jnp.bfloat16)
      >>> tx = optax_ext.master_weights(optax.sgd(1e-3))
      >>> state = tx.init(p)
      >>> for _ in range(500):
      ...     updates, state = tx.update(jnp.ones_like(p), state, p)
      ...     p = optax.apply_updates(p, updates)
      >>> print(p)
      [0.5 0.5 0.5]

    References:
      Micikevicius et al.: Mixed Precision Training, ICLR 2018, arXiv 1710.03740.
    """
    inner = optax.with_extra_args_support(inner)
    wide: Any = _validate.as_dtype("dtype", dtype)
    if wide is None or wide.itemsize < 4:
        raise ValueError(f"dtype must be float32 or float64, got {dtype!r}.")

    def init(params: optax.Params) -> MasterWeightsState:
        leaves = Leaves.of_any_dtype(params)
        named = list(zip(leaves.paths, leaves.arrays, strict=True))

        def masters(others: list[Any]) -> Any:
            columns = zip(named, others, strict=True)
            return leaves.unflatten(
                [jnp.asarray(x[1], wide) if _has_master(*x, wide) else o for x, o in columns]
            )

        # Separate buffers for inner, whose state may contain them: a donated state must not contain
        # an array twice.
        inner_state = inner.init(masters(leaves.arrays))
        return MasterWeightsState(masters([None] * len(named)), inner_state)

    def update(
        updates: Tree, state: MasterWeightsState, params: Tree = None, **extra_args: Any
    ) -> tuple[Tree, MasterWeightsState]:
        if params is None:
            raise ValueError("master_weights needs params in update.")
        leaves = Leaves.of_any_dtype(updates)
        masters = leaves.slots("master", state.master)
        arrays = leaves.slots("params", params)
        _check(leaves, masters, arrays, wide)
        columns = list(zip(leaves.arrays, masters, arrays, strict=True))
        grads = leaves.unflatten([g if m is None else jnp.asarray(g, wide) for g, m, _ in columns])
        weights = leaves.unflatten([p if m is None else m for _, m, p in columns])
        out, inner_state = inner.update(grads, state.inner_state, weights, **extra_args)
        with jax.named_scope("master_weights"):
            pairs = zip(columns, leaves.slots("updates", out), strict=True)
            moved = [(u, None) if m is None else _move(p, m, u) for (_, m, p), u in pairs]
        masters = leaves.unflatten([m for _, m in moved])
        return leaves.unflatten([u for u, _ in moved]), MasterWeightsState(masters, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _has_master(path: str, p: Any, dtype: Any) -> bool:
    if not jnp.issubdtype(getattr(p, "dtype", dtype), jnp.floating):
        return False
    _validate.floating(path, p)
    if p.dtype.itemsize >= dtype.itemsize:
        return False
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"dtype {dtype} needs jax_enable_x64.")
    return True


def _check(leaves: Leaves, masters: list[Any], params: list[Any], dtype: DType) -> None:
    for path, g, m, p in zip(leaves.paths, leaves.arrays, masters, params, strict=True):
        if (m is not None) != _has_master(path, p, dtype):
            raise ValueError(
                f"parameter {path!r} has dtype {p.dtype} and "
                f"{'no' if m is None else 'a'} master in the state, which was made for parameters "
                "of another dtype; make a new state with init, and apply updates with "
                "optax.apply_updates, which keeps dtypes."
            )
        if m is not None:
            check_shape(path, g, "master", m)
            check_dtype(path, "master", m, dtype)
