"""Parameters of earlier steps, at which delayed gradients are taken."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_ext._delays import check_delays, delays_of, map_slots, numbers_in, whole_number
from optax_ext._leaves import Leaves, check_shape
from optax_ext._types import Array, Tree


class ParamsHistoryState(NamedTuple):
    """Earlier versions of the parameters; the last are those that ``delayed_params`` returns."""

    # A tree per step, oldest last: the parameter's shape and dtype; None beyond its delay.
    versions: tuple[optax.Params, ...]


def _lags(num_versions: int) -> range:
    """Returns, for each version, after how many steps a value in it has been the oldest."""
    return range(num_versions, 0, -1)


def _shifted(delay: np.ndarray, versions: list[Any], p: jax.Array, u: jax.Array) -> list[Any]:
    """Returns the versions after a step from ``p`` to ``p + u``."""
    new: list[Any] = []
    before: jax.Array | None = None
    for lag, version in zip(_lags(len(versions)), versions, strict=True):
        if version is None:
            new.append(None)
            continue
        now = p.astype(version.dtype)
        # A buffer of its own: a state that is donated must not hold one that others hold.
        out = jnp.copy(now if before is None else before)
        if before is not None and (delay == lag).any():  # slices of delay n enter n before the end
            out = jnp.where(delay == lag, now, out)
        if lag == 1 and (delay == 0).any():  # slices without a delay, in an array that has others
            out = jnp.where(delay == 0, optax.apply_updates(now, u), out)
        new.append(out)
        before = version
    return new


def params_history(delays: Any) -> optax.GradientTransformationExtraArgs:
    r"""Stores earlier parameters, so that each gradient can be taken at parameters of the past.

    Updates pass unchanged. With ``delayed_params``, each parameter has a delay of its own:

    .. math::

      g_t &= \nabla f\left(w^{(1)}_{t - \tau_1}, \ldots, w^{(n)}_{t - \tau_n}; B_t\right), \quad
      w_s = w_0 \text{ for } s < 0 \\
      w_{t+1} &= w_t + \operatorname{optimizer}(g_t, w_t)

    Delays P - i for stage i of P are PipeDream with weight stashing; P - 1 for all, with vertical
    sync; 1 for all, PipeDream-2BW. It stores as many replicas of a parameter as its delay, goes
    last in a chain, and ``update`` must receive the current parameters.

    Args:
      delays: :math:`\tau`, whole numbers of updates, in the forms of ``discrepancy_correction``.
        They set the shapes of the state and cannot be traced.

    Raises:
      ValueError: if a delay is negative, fractional or traced, the delays do not fit the
        parameters, a parameter is not real and floating, ``update`` is called without ``params``,
        or gradients do not match the state.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_ext
      >>> tx = optax.chain(optax.sgd(0.5), optax_ext.params_history(1))
      >>> params = jnp.asarray(8.0)
      >>> state = tx.init(params)
      >>> for _ in range(3):
      ...     delayed = optax_ext.delayed_params(params, state)
      ...     updates, state = tx.update(jax.grad(lambda w: w**2 / 2)(delayed), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> print(delayed, params)
      4.0 -2.0
    """
    check_delays(delays)
    # Of the delays alone, not of the parameters: the state's structure is the same for any.
    num_versions = max((int(whole_number(d).max(initial=0)) for d in numbers_in(delays)), default=0)

    def lags_of(leaves: Leaves) -> list[np.ndarray]:
        return [whole_number(delay) for delay in delays_of(delays, leaves)]

    def init(params: optax.Params) -> ParamsHistoryState:
        leaves = Leaves.of(params)
        pairs = [(p, d.max(initial=0)) for p, d in zip(leaves.arrays, lags_of(leaves), strict=True)]
        versions = (
            leaves.unflatten([_replica(p) if lag <= longest else None for p, longest in pairs])
            for lag in _lags(num_versions)
        )
        return ParamsHistoryState(tuple(versions))

    def update(
        updates: Tree, state: ParamsHistoryState, params: Tree = None, **extra_args: Any
    ) -> tuple[Tree, ParamsHistoryState]:
        if params is None:
            raise ValueError("params_history needs params in update.")
        leaves = Leaves.of(updates)
        stored = [leaves.slots("versions", tree) for tree in state.versions]
        arrays, lags = leaves.arrays_in("params", params), lags_of(leaves)
        new = []
        with jax.named_scope("params_history"):
            for i, (path, u) in enumerate(zip(leaves.paths, leaves.arrays, strict=True)):
                versions = [tree[i] for tree in stored]
                _check(path, u, lags[i], versions)
                new.append(_shifted(lags[i], versions, arrays[i], u))
        columns = zip(*new, strict=True) if new else ([] for _ in stored)
        return updates, ParamsHistoryState(tuple(leaves.unflatten(list(c)) for c in columns))

    return optax.GradientTransformationExtraArgs(init, update)


def _replica(p: Any) -> jax.Array:
    return jnp.zeros_like(p) if isinstance(p, jax.ShapeDtypeStruct) else jnp.copy(p)


def _check(path: str, u: Array, delay: np.ndarray, versions: list[Any]) -> None:
    have = [version is not None for version in versions]
    if have != [lag <= delay.max(initial=0) for lag in _lags(len(versions))]:
        raise ValueError(
            f"parameter {path!r} has {sum(have)} versions in the state, but its largest delay is "
            f"{delay.max(initial=0)}; make a new state with init."
        )
    for version in versions:
        if version is not None:
            check_shape(path, u, "versions", version)


def delayed_params(params: optax.Params, state: optax.OptState) -> optax.Params:
    r"""Returns each parameter as it was :math:`\tau` updates ago, from ``params_history``.

    Arguments and errors are those of ``backward_params``.

    Example:
      >>> import jax.numpy as jnp, optax_ext
      >>> tx, params = optax_ext.params_history(1), jnp.asarray(8.0)
      >>> _, state = tx.update(jnp.asarray(-2.0), tx.init(params), params)
      >>> print(optax_ext.delayed_params(params - 2, state))
      8.0
    """

    def oldest(own: ParamsHistoryState) -> Any:
        return own.versions[-1] if own.versions else jax.tree.map(lambda _: None, params)

    names = "delayed_params", "params_history"
    return map_slots(names, lambda _, old: old, params, state, ParamsHistoryState, oldest)
