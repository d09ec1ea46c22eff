"""Master weights: low-precision parameters that are the rounding of wider ones."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_ext import _validate
from optax_ext._leaves import check_dtype, check_shape, path_name, slots


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
    ``master.astype(params.dtype)``, bit for bit, eagerly and under ``jit``. The update is exact in
    ``dtype``, unless the new value is below the last bit of :math:`\theta + u` (1 becomes 1e-10);
    then the master is set to a value that the parameter can reach, one rounding of that step away.

    Floating parameters narrower than ``dtype`` have a master; ``inner`` updates all others
    directly. Parameters follow their masters: a parameter changed elsewhere is reset by the next
    step. So no later transformation may change the updates: this one goes last in a chain. State
    beyond that of ``inner``: 4 bytes per element of a narrow parameter.

    Args:
      inner: the transformation; it receives masters instead of the parameters, and gradients in
        ``dtype``. Wrappers of optax that may skip an update, such as ``apply_if_finite``, go here:
        around ``master_weights`` their branches would differ in dtype.
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
      Micikevicius, Narang, Alben, Diamos, Elsen, Garcia, Ginsburg, Houston, Kuchaiev, Venkatesh,
      Wu: Mixed Precision Training, ICLR 2018, arXiv 1710.03740.
    """
    inner = optax.with_extra_args_support(inner)
    wide = _master_dtype(dtype)

    def init(params: optax.Params) -> MasterWeightsState:
        flat, treedef = _flatten(params)
        has_master = [_has_master(path, p, wide) for path, p in flat]

        def masters(others: list[Any]) -> Any:
            pairs = zip(flat, has_master, others, strict=True)
            return treedef.unflatten([jnp.asarray(p, wide) if m else o for (_, p), m, o in pairs])

        # Separate buffers for inner, whose state may contain them: a donated state must not contain
        # an array twice.
        inner_state = inner.init(masters([p for _, p in flat]))
        return MasterWeightsState(masters([None] * len(flat)), inner_state)

    def update(
        updates: optax.Updates,
        state: MasterWeightsState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MasterWeightsState]:
        if params is None:
            raise ValueError("master_weights needs params in update.")
        flat, treedef = _flatten(updates)
        masters = slots(treedef, "master", state.master)
        arrays = slots(treedef, "params", params)
        _check(flat, masters, arrays, wide)
        pairs = list(zip(masters, arrays, strict=True))
        grads = [
            g if m is None else jnp.asarray(g, wide)
            for (_, g), m in zip(flat, masters, strict=True)
        ]
        out, inner_state = inner.update(
            treedef.unflatten(grads),
            state.inner_state,
            treedef.unflatten([p if m is None else m for m, p in pairs]),
            **extra_args,
        )
        with jax.named_scope("master_weights"):
            moved = [
                (u, None) if m is None else _move(p, m, u)
                for (m, p), u in zip(pairs, treedef.flatten_up_to(out), strict=True)
            ]
        masters = treedef.unflatten([m for _, m in moved])
        return treedef.unflatten([u for u, _ in moved]), MasterWeightsState(masters, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _flatten(tree: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """(path, leaf) for every leaf, and the tree's structure."""
    return jax.tree_util.tree_flatten_with_path(tree)


def _master_dtype(value: Any) -> Any:
    dtype = _validate.as_dtype("dtype", value)
    if dtype is None or dtype.itemsize < 4:
        raise ValueError(f"dtype must be float32 or float64, got {value!r}.")
    return dtype


def _has_master(path: Any, p: Any, dtype: Any) -> bool:
    """Whether a parameter is floating and narrower than ``dtype``."""
    if not jnp.issubdtype(p.dtype, jnp.floating) or p.dtype.itemsize >= dtype.itemsize:
        return False
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"dtype {dtype} needs jax_enable_x64.")
    if p.dtype.itemsize < 2:
        raise ValueError(
            f"parameter {path_name(path)!r} has dtype {p.dtype}, to which JAX adds no {dtype} "
            "update; master_weights takes bfloat16 and float16. Store the parameter in one of "
            "them, and cast it where it is used."
        )
    return True


def _check(flat: list[Any], masters: list[Any], params: list[Any], dtype: Any) -> None:
    """Raises unless the gradients and the parameters fit the masters."""
    for (path, g), m, p in zip(flat, masters, params, strict=True):
        if (m is not None) != _has_master(path, p, dtype):
            raise ValueError(
                f"parameter {path_name(path)!r} has dtype {p.dtype} and "
                f"{'no' if m is None else 'a'} master in the state, which was made for parameters "
                "of another dtype; make a new state with init, and apply updates with "
                "optax.apply_updates, which keeps dtypes."
            )
        if m is not None:
            check_shape(path_name(path), g, "master", m)
            check_dtype(path_name(path), "master", m, dtype)
