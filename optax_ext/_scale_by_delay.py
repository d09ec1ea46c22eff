"""Smaller steps for delayed stages, early in training (PipeMare's T1)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_ext import _validate
from optax_ext._delays import check_delays, delays_of
from optax_ext._leaves import Leaves, at_least_float32
from optax_ext._types import Tree


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
    check_delays("delays", delays)
    _validate.positive(anneal_steps=anneal_steps)

    def init(params: optax.Params) -> ScaleByDelayState:
        delays_of("delays", delays, Leaves.of(params))  # raises unless they fit
        return ScaleByDelayState(jnp.zeros([], jnp.int32))

    def update(
        updates: Tree, state: ScaleByDelayState, params: Tree = None, **extra_args: Any
    ) -> tuple[Tree, ScaleByDelayState]:
        leaves = Leaves.of(updates)
        with jax.named_scope("scale_by_delay"):
            pairs = zip(leaves.arrays, delays_of("delays", delays, leaves), strict=True)
            out = [_divided(u, delay, state.count, anneal_steps) for u, delay in pairs]
        return leaves.unflatten(out), ScaleByDelayState(optax.safe_increment(state.count))

    return optax.GradientTransformationExtraArgs(init, update)
