"""PipeMare: smaller steps for delayed stages (T1), parameters of the forward pass (T2)."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_ext import _validate
from optax_ext._leaves import Leaves, at_least_float32, states_of, unboxed, wide_zeros
from optax_ext._types import Tree

_DECAY = math.exp(-2)  # D of the paper


class ScaleByDelayState(NamedTuple):
    """State of ``scale_by_delay``."""

    count: jax.Array  # type: ignore[assignment]  # (), int32, steps taken; hides tuple.count


def _divided(u: jax.Array, delay: Any, count: jax.Array, anneal_steps: Any) -> jax.Array:
    """Returns ``u / max(delay, 1) ** (1 - min(count / anneal_steps, 1))``."""
    dtype = at_least_float32(u.dtype)
    steps = _validate.hyperparameter(anneal_steps, dtype)
    power = 1 - jnp.minimum(count.astype(dtype) / steps, 1)
    scale = jnp.maximum(jnp.asarray(delay, dtype), 1) ** -power
    return (u.astype(dtype) * scale).astype(u.dtype)


def scale_by_delay(
    delays: Any, anneal_steps: jax.typing.ArrayLike
) -> optax.GradientTransformationExtraArgs:
    r"""Divides updates by their delay, less and less over the first steps (PipeMare's T1).

    In step k = 0, 1, ..., the update of a parameter with delay :math:`\tau` becomes

    .. math::

      u \leftarrow \frac{u}{\max(\tau, 1)^{p_k}}, \quad p_k = 1 - \min\left(\frac{k}{K}, 1\right)

    The largest stable rate of SGD is nearly proportional to :math:`1 / \tau`; after K steps the
    optimizer must be stable by itself. It goes after the optimizer, or after its learning rate.

    Args:
      delays: :math:`\tau`, in updates, in the forms of ``discrepancy_correction``.
      anneal_steps: K, in steps; above 0.

    Raises:
      ValueError: if a delay is negative, ``anneal_steps`` is not positive, the delays do not fit
        the parameters, or a parameter is not real and floating.

    Example:
      >>> import jax.numpy as jnp, optax, optax_ext
      >>> tx = optax.chain(optax.sgd(1.0), optax_ext.scale_by_delay({"a": 4.0, "b": 0.5}, 2))
      >>> ones = {"a": jnp.ones(()), "b": jnp.ones(())}
      >>> {name: float(u) for name, u in tx.update(ones, tx.init(ones))[0].items()}
      {'a': -0.25, 'b': -1.0}

    References:
      Yang et al.: PipeMare, MLSys 2021, arXiv 1910.05124. The maximum with 1 is not in the paper.
    """
    _check_delays(delays)
    _validate.positive(anneal_steps=anneal_steps)

    def init(params: optax.Params) -> ScaleByDelayState:
        _delays_of(delays, Leaves.of(params))  # raises unless they fit
        return ScaleByDelayState(jnp.zeros([], jnp.int32))

    def update(
        updates: Tree, state: ScaleByDelayState, params: Tree = None, **extra_args: Any
    ) -> tuple[Tree, ScaleByDelayState]:
        leaves = Leaves.of(updates)
        with jax.named_scope("scale_by_delay"):
            pairs = zip(leaves.arrays, _delays_of(delays, leaves), strict=True)
            out = [_divided(u, delay, state.count, anneal_steps) for u, delay in pairs]
        return leaves.unflatten(out), ScaleByDelayState(optax.safe_increment(state.count))

    return optax.GradientTransformationExtraArgs(init, update)


class DiscrepancyCorrectionState(NamedTuple):
    """State of ``discrepancy_correction``; float32, or wider if the parameter is."""

    correction: optax.Updates  # tau * delta: the parameter's shape


def _averaged(correction: jax.Array, u: jax.Array, delay: Any, decay: Any) -> jax.Array:
    """Returns the correction after a step of ``u``."""
    dtype = correction.dtype
    delay = jnp.asarray(delay, dtype)
    positive = delay > 0
    # 1 - decay ** (1 / delay), without the cancellation that float32 has for long delays.
    log_decay = jnp.log(jnp.asarray(decay, dtype))
    weight = -jnp.expm1(log_decay / jnp.where(positive, delay, 1))
    weight = jnp.where(positive, weight, 1)
    return correction + weight * (delay * u.astype(dtype) - correction)


def discrepancy_correction(
    delays: Any, decay: jax.typing.ArrayLike = _DECAY
) -> optax.GradientTransformationExtraArgs:
    r"""Averages updates, from which ``backward_params`` estimates the parameters of the past.

    In an asynchronous pipeline the parameters of a forward pass are :math:`\tau` updates older than
    those of its backward pass. PipeMare's technique T2 takes the backward pass at an estimate of
    the former:

    .. math::

      \gamma = D^{1 / \tau}, \quad
      \delta \leftarrow \gamma \delta + (1 - \gamma) (w_{t+1} - w_t), \quad
      u_\text{bkwd} = w - \tau \, \delta

    Updates pass unchanged, and count as :math:`w_{t+1} - w_t`: it goes last in a chain.

    Args:
      delays: :math:`\tau`, in updates: a number; a tree of numbers like the parameters, or a prefix
        of one. An array broadcasts against the leading dims of its
        parameter: (1, S) for parameters [V, S, ...] whose stages are dim 1.
      decay: D, the decay over the full delay, in [0, 1); exp(-2) in the paper.

    Raises:
      ValueError: if ``decay`` or a delay is out of range, the delays do not fit the parameters, a
        parameter is not real and floating, or gradients do not match the state.

    Example:
      >>> import jax.numpy as jnp, optax, optax_ext
      >>> tx = optax.chain(optax.sgd(1.0), optax_ext.discrepancy_correction(3.0))
      >>> params = jnp.asarray(10.0)
      >>> state = tx.init(params)
      >>> for _ in range(9):
      ...     updates, state = tx.update(jnp.ones(()), state)
      ...     params = optax.apply_updates(params, updates)
      >>> print(params, optax_ext.backward_params(params, state).round(2))  # 3 steps ago it was 4
      1.0 3.99

    References:
      Yang et al.: PipeMare, MLSys 2021, arXiv 1910.05124.
    """
    _check_delays(delays)
    _validate.unit_interval(decay=decay)

    def init(params: optax.Params) -> DiscrepancyCorrectionState:
        _delays_of(delays, Leaves.of(params))  # raises unless they fit
        return DiscrepancyCorrectionState(wide_zeros(params))

    def update(
        updates: Tree, state: DiscrepancyCorrectionState, params: Tree = None, **extra_args: Any
    ) -> tuple[Tree, DiscrepancyCorrectionState]:
        leaves = Leaves.of(updates)
        old = leaves.averages_in("correction", state.correction)
        with jax.named_scope("discrepancy_correction"):
            average = functools.partial(_averaged, decay=decay)
            new = list(map(average, old, leaves.arrays, _delays_of(delays, leaves)))
        return updates, DiscrepancyCorrectionState(leaves.unflatten(new))

    return optax.GradientTransformationExtraArgs(init, update)


def backward_params(params: optax.Params, state: optax.OptState) -> optax.Params:
    """Estimates the parameters of the forward pass, at which the backward pass is taken.

    ``params`` are the current parameters, ``state`` contains those of ``discrepancy_correction``,
    in a chain, under ``optax.masked``, ``optax.partition`` or other wrappers. Returns a tree like
    ``params``, in their dtypes; parameters that are masked out are unchanged.

    Raises:
      ValueError: if the state contains none of ``discrepancy_correction``, several for a parameter,
        or one of other parameters.

    Example:
      >>> import jax.numpy as jnp, optax_ext
      >>> tx, params = optax_ext.discrepancy_correction(1.0, decay=0.0), jnp.asarray(10.0)
      >>> _, state = tx.update(jnp.asarray(-2.0), tx.init(params))
      >>> print(optax_ext.backward_params(params - 2, state))  # those of one update ago
      10.0
    """
    states = states_of(DiscrepancyCorrectionState, state)
    if not states:
        raise ValueError(
            "backward_params reads the state of discrepancy_correction, of which this optimizer "
            "state contains none. Put discrepancy_correction last in the chain."
        )
    leaves = Leaves.of_any_dtype(params)
    found = list(leaves.arrays)
    corrected = set[int]()
    for own in states:
        for i, slot in enumerate(leaves.slots("discrepancy_correction", own.correction)):
            if not isinstance(slot, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
                _check_empty(slot)
                continue
            if i in corrected:
                raise ValueError(
                    "backward_params reads one state of discrepancy_correction for each parameter, "
                    f"found several for {leaves.paths[i]!r}. Pass the part that contains one."
                )
            corrected.add(i)
            found[i] = _corrected(leaves.paths[i], leaves.arrays[i], slot)
    return leaves.unflatten(found)


def _corrected(path: str, p: jax.Array, correction: Any) -> jax.Array:
    if correction.shape != p.shape:
        raise ValueError(
            f"parameter {path!r} of shape {tuple(p.shape)} does not match the state of "
            f"discrepancy_correction, where it has shape {tuple(correction.shape)}."
        )
    return (p.astype(correction.dtype) - correction).astype(p.dtype)


def _check_empty(slot: Any) -> None:
    """Raises unless the slot is that of a parameter that is masked out."""
    if jax.tree.leaves(slot):
        raise ValueError(
            f"backward_params needs the arrays of discrepancy_correction, found "
            f"{type(slot).__name__}. Put low_precision_state around the other transformations of "
            "the chain alone."
        )


def _check_delays(delays: Any) -> None:
    for value in jax.tree.leaves(delays):
        if not isinstance(value, jax.core.Tracer):
            _check_number(value)


def _check_number(value: Any) -> None:
    numeric = isinstance(value, int | float | np.ndarray | np.generic | jax.Array)
    kinds = (jnp.integer, jnp.floating)
    if not numeric or not any(jnp.issubdtype(np.asarray(value).dtype, k) for k in kinds):
        raise ValueError(f"delays must be a number or an array, got {value!r}.")
    array = np.asarray(value, np.float64)
    if not (array >= 0).all():
        raise ValueError(f"delays must not be negative, got {value}.")
    if not np.isfinite(array).all():
        raise ValueError(f"delays must be finite, got {value}.")


def _delays_of(delays: Any, leaves: Leaves) -> list[Any]:
    """Returns the delay of every leaf: a number, or an array of the leaf's rank."""
    if not leaves.arrays:  # also the placeholder that optax's tree_map_params passes to init
        return []
    tree = leaves.unflatten(leaves.arrays)
    try:
        own = list(map(unboxed, leaves.treedef.flatten_up_to(jax.tree.broadcast(delays, tree))))
    except ValueError as error:
        raise ValueError(
            "delays does not fit the parameters; it needs a number or an array for each of "
            f"them, or for each subtree: {error}"
        ) from None
    shapes = [tuple(x.shape) for x in leaves.arrays]
    return list(map(_fit, leaves.paths, own, shapes))


def _fit(path: str, delay: Any, shape: tuple[int, ...]) -> Any:
    """Returns the delay with a dim of size 1 for each trailing dim of ``shape`` that it lacks."""
    own = np.shape(delay)
    if not own:
        return delay
    if len(own) > len(shape) or any(n not in (1, m) for n, m in zip(own, shape, strict=False)):
        raise ValueError(
            f"delays has an array of shape {own} for parameter {path!r} of shape {shape}; an array "
            "must broadcast against the leading dims of its parameter. Give this one a delay of "
            "its own, in a tree of delays like the parameters."
        )
    return delay.reshape(own + (1,) * (len(shape) - len(own)))
