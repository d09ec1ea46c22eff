"""Master weights: low-precision parameters that are the rounding of wider ones."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_ext import _validate
from optax_ext._leaves import Leaves, Tree, check_dtype, check_shape


class MasterWeightsState(NamedTuple):
    """The master weights, and the state of the transformation that updates them."""

    master: optax.Params  # the parameter's shape, ``dtype``; None where a parameter has no master
    inner_state: optax.OptState


def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns the nearest value of a narrower ``dtype``, in the dtype of ``x``.

    XLA may remove a pair of casts (``xla_allow_excess_precision``), and ``reduce_precision`` to few
    exponent bits has no subnormals and overflows as IEEE formats do.
    """
    narrow, wide = jnp.finfo(dtype), jnp.finfo(x.dtype)
    out = jax.lax.reduce_precision(x, wide.nexp, narrow.nmant)
    smallest = float(narrow.smallest_normal)
    if smallest > float(wide.smallest_normal):
        step = float(narrow.smallest_subnormal)
        out = jnp.where(jnp.abs(x) < smallest, jnp.round(x / step) * step, out)
    return jnp.where(jnp.abs(out) > float(narrow.max), jnp.copysign(jnp.inf, x), out)


def _bits(x: jax.Array) -> jax.Array:
    """Returns the bits, which distinguish signs of zero, subnormals and NaNs as floats do not."""
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def _move(p: jax.Array, master: jax.Array, update: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns ``u`` and the new master; ``p + u`` and the master round to the same bits."""
    dtype = master.dtype
    # One value for both results: two fusions that each compute it may contract it differently.
    new = jax.lax.optimization_barrier(master + update.astype(dtype))
    want, wide = _rounded(new, p.dtype), p.astype(dtype)
    # The difference of two narrow values is exact, unless one is far below the other's last bit. A
    # value that rounds to -0 is not rounded: 0 + -0 is 0, and only negative values round to -0.
    u = jnp.where(want == 0, new, want) - wide
    have = wide + u
    reached = _bits(_rounded(have, p.dtype)) == _bits(want)
    return u, jnp.where(reached, new, have)


def master_weights(
    inner: optax.GradientTransformation, dtype: Any = jnp.float32
) -> optax.GradientTransformationExtraArgs:
    r"""Runs ``inner`` on wide master weights, and makes low-precision parameters their rounding.

    A step below half the spacing of bfloat16, 1/512 to 1/256 of the parameter, is lost when it is
    added to the parameter. Here it is added to the master :math:`w`:

    .. math::

      w \leftarrow w + \operatorname{inner}(g, w), \quad
      u = \operatorname{round}(w) - \theta, \quad
      \theta \leftarrow \theta + u

    After every ``optax.apply_updates(params, updates)``, each parameter that has a master equals
    ``master.astype(params.dtype)``, bit for bit. Where the new value is below the last bit of
    :math:`\theta + u` (1 becomes 1e-10), the master is one rounding of that step away.

    Floating parameters narrower than ``dtype`` have a master; ``inner`` updates all others
    directly. Parameters follow their masters: a parameter changed elsewhere is reset by the next
    step. So no later transformation may change the updates: this one goes last in a chain. State
    beyond that of ``inner``: 4 bytes per element of a narrow parameter.

    Args:
      inner: the transformation; it receives masters instead of the parameters, and gradients in
        ``dtype``. Wrappers of optax that may skip an update, such as ``apply_if_finite``, go here.
      dtype: dtype of the masters: float32, or float64 where ``jax_enable_x64`` is set.

    Returns:
      A ``GradientTransformation`` whose ``update`` needs ``params``; the updates of parameters
      that have a master are in ``dtype``, whatever the gradients are.

    Raises:
      ValueError: if ``dtype`` is narrower than float32 or disabled in JAX, parameters have 8 bits
        (JAX adds no float32 to them), ``update`` is called without ``params``, or gradients or
        parameters do not match the state.

    Example:
      >>> import jax.numpy as jnp, optax, optax_ext
      >>> params = jnp.ones(3, jnp.bfloat16)
      >>> for tx in (optax.sgd(1e-3), optax_ext.master_weights(optax.sgd(1e-3))):
      ...     p, state = params, tx.init(params)
      ...     for _ in range(500):
      ...         updates, state = tx.update(jnp.ones_like(p), state, p)
      ...         p = optax.apply_updates(p, updates)
      ...     print(p)
      [1 1 1]
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
        arrays = leaves.arrays
        has_master = [
            _has_master(name, p, wide) for name, p in zip(leaves.paths, arrays, strict=True)
        ]

        def masters(others: list[Any]) -> Any:
            columns = zip(arrays, has_master, others, strict=True)
            return leaves.unflatten([jnp.asarray(p, wide) if m else o for p, m, o in columns])

        # Separate buffers for inner, whose state may contain them: a donated state must not contain
        # an array twice.
        inner_state = inner.init(masters(arrays))
        return MasterWeightsState(masters([None] * len(arrays)), inner_state)

    def update(
        updates: Tree, state: MasterWeightsState, params: Tree = None, **extra_args: Any
    ) -> tuple[Tree, MasterWeightsState]:
        if params is None:
            raise ValueError("master_weights needs params in update.")
        leaves = Leaves.of_any_dtype(updates)
        masters = leaves.slots("master", state.master)
        arrays = leaves.slots("params", params)
        _check(leaves, masters, arrays, wide)
        pairs = list(zip(masters, arrays, strict=True))
        grads = [
            g if m is None else jnp.asarray(g, wide)
            for g, m in zip(leaves.arrays, masters, strict=True)
        ]
        out, inner_state = inner.update(
            leaves.unflatten(grads),
            state.inner_state,
            leaves.unflatten([p if m is None else m for m, p in pairs]),
            **extra_args,
        )
        with jax.named_scope("master_weights"):
            moved = [
                (u, None) if m is None else _move(p, m, u)
                for (m, p), u in zip(pairs, leaves.slots("updates", out), strict=True)
            ]
        masters = leaves.unflatten([m for _, m in moved])
        return leaves.unflatten([u for u, _ in moved]), MasterWeightsState(masters, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _has_master(path: str, p: Any, dtype: Any) -> bool:
    """Whether a parameter is floating and narrower than ``dtype``."""
    if not jnp.issubdtype(getattr(p, "dtype", dtype), jnp.floating):
        return False
    _validate.floating(path, p)
    if p.dtype.itemsize >= dtype.itemsize:
        return False
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"dtype {dtype} needs jax_enable_x64.")
    return True


def _check(leaves: Leaves, masters: list[Any], params: list[Any], dtype: Any) -> None:
    """Raises unless the gradients and the parameters fit the masters."""
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
