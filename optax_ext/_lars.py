"""LARS: layer-wise adaptive rate scaling, for large batches."""

import collections
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_ext import _bias_correction, _phases, _validate
from optax_ext._factoring import FactoringRule, factorings
from optax_ext._leaves import Leaves
from optax_ext._trust_ratio import Layer, Leaf, check_options, decayed, layers, norm, ratio, scale
from optax_ext._types import Tree


class ScaleByLarsState(NamedTuple):
    """State of LARS's local learning rates."""

    # (), int32, steps taken; None unless weight_decay is a schedule. Hides tuple.count.
    count: jax.Array | None  # type: ignore[assignment]


class LarsMomentumState(NamedTuple):
    """State of LARS's momentum; float32, or wider if the parameter is."""

    trace: optax.Updates  # the parameter's shape


_Hyper = collections.namedtuple("_Hyper", "trust_coefficient weight_decay")


def trust_ratio(hyper: _Hyper, layer: Layer, leaf: Leaf) -> Leaf:
    """Adds weight decay and the local learning rate."""
    u = decayed(leaf.u, leaf.w, layer, hyper.weight_decay)
    if not layer.has_ratio:
        return leaf._replace(u=u)
    w_norm = norm(leaf.w, layer.batch)
    g_norm = norm(leaf.u, layer.batch)
    denominator = decayed(g_norm, w_norm, layer, hyper.weight_decay)
    numerator = hyper.trust_coefficient * w_norm
    return leaf._replace(u=u, ratio=ratio(w_norm, g_norm, numerator, denominator))


PHASES = ((trust_ratio, "ratio"), (scale, None))


def _scale_by_local_rate(
    trust_coefficient: Any, weight_decay: Any, stacked: Any, **masks: Any
) -> optax.GradientTransformation:
    """``scale_by_lars`` whose updates stay float32."""
    _validate.positive(trust_coefficient=trust_coefficient)
    check_options(weight_decay, stacked, **masks)

    def init(params: optax.Params) -> ScaleByLarsState:
        factorings(stacked, Leaves.of(params))  # raises unless the rule fits
        return ScaleByLarsState(jnp.zeros([], jnp.int32) if callable(weight_decay) else None)

    def update(updates: Tree, state: ScaleByLarsState, params: Tree = None) -> tuple[Tree, Tree]:
        leaves = Leaves.of(updates)
        kinds, grads, weights = layers("lars", leaves, params, stacked, **masks)
        decay = _validate.value_at(weight_decay, state.count)
        hyper = _Hyper(trust_coefficient, decay)
        step = _phases.run(PHASES, hyper, kinds, list(map(Leaf, grads, weights)))
        count = None if state.count is None else optax.safe_increment(state.count)
        return leaves.unflatten([leaf.u for leaf in step]), ScaleByLarsState(count)

    return optax.GradientTransformation(init, update)


def scale_by_lars(
    trust_coefficient: jax.typing.ArrayLike = 0.001,
    *,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any | None = "matrices",
    trust_ratio_mask: Any | None = "matrices",
    stacked: FactoringRule | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Decays weights and scales each layer's gradient by its local learning rate.

    With the norms of entire arrays,

    .. math::

      \text{update} = \eta \frac{\|w\|}{\|g\| + \beta \|w\|} \, (g + \beta w)

    Where a norm is 0 or that of the weights infinite, as of masks, and for arrays without a trust
    ratio, the update is :math:`g + \beta w`. Updates are not negated; ``update`` needs ``params``.

    Args:
      trust_coefficient: :math:`\eta`, above 0.
      weight_decay: :math:`\beta`, a number or a schedule of the step count.
      weight_decay_mask: which weights decay, in the forms of ``scale_by_lamb``.
      trust_ratio_mask: which arrays have a local learning rate, likewise.
      stacked: a rule whose ``batch`` dims are stacks of layers, as in ``scale_by_lamb``.

    Raises:
      ValueError: if a hyperparameter is out of range, a mask does not fit, a parameter is not real
        and floating, or gradients do not match the parameters.

    Example:
      >>> import jax.numpy as jnp, optax_ext
      >>> tx = optax_ext.scale_by_lars(0.1)
      >>> params = {"w": jnp.full((2, 2), 3.0), "b": jnp.ones(2)}
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> round(float(jnp.linalg.norm(updates["w"])), 3), updates["b"].tolist()
      (0.6, [1.0, 1.0])

    References:
      You, Gitman, Ginsburg: Large Batch Training of Convolutional Networks, 2017, arXiv 1708.03888.
    """
    masks = {"weight_decay_mask": weight_decay_mask, "trust_ratio_mask": trust_ratio_mask}
    scaled = _scale_by_local_rate(trust_coefficient, weight_decay, stacked, **masks)
    return _validate.keep_dtype(scaled)


def lars(
    learning_rate: optax.ScalarOrSchedule,
    momentum: jax.typing.ArrayLike = 0.9,
    *,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    trust_coefficient: jax.typing.ArrayLike = 0.001,
    nesterov: bool = False,
    weight_decay_mask: Any | None = "matrices",
    trust_ratio_mask: Any | None = "matrices",
    stacked: FactoringRule | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""LARS: SGD with momentum and a learning rate for each layer.

    ``scale_by_lars``, whose arguments it takes, the learning rate :math:`\gamma`, then momentum:

    .. math::

      v \leftarrow m v + \gamma \, \eta \frac{\|w\|}{\|g\| + \beta \|w\|} \, (g + \beta w), \quad
      w \leftarrow w - v

    ``optax.lars`` divides by :math:`\|g + \beta w\|`, which is smaller where gradient and weights
    point in opposite directions.

    Other Parameters:
      learning_rate: a number or a schedule of the step count.
      momentum: :math:`m`, in [0, 1).
      nesterov: update by :math:`m v` plus the newest term once more.

    Raises:
      ValueError: as ``scale_by_lars``; also on a ``momentum`` outside [0, 1).

    Example:
      >>> import jax.numpy as jnp, optax_ext
      >>> tx = optax_ext.lars(1.0, trust_coefficient=0.1)
      >>> params = {"w": jnp.full((2, 2), 3.0), "b": jnp.ones(2)}
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> round(float(jnp.linalg.norm(updates["w"])), 3), updates["b"].tolist()
      (0.6, [-1.0, -1.0])
    """
    _validate.unit_interval(momentum=momentum)
    masks = {"weight_decay_mask": weight_decay_mask, "trust_ratio_mask": trust_ratio_mask}
    scaled = _scale_by_local_rate(trust_coefficient, weight_decay, stacked, **masks)
    rate = optax.scale_by_learning_rate(learning_rate)
    options: Any = {"dampened": False, "nesterov": nesterov}
    velocity = _bias_correction.momentum(LarsMomentumState, momentum, **options)
    return _validate.keep_dtype(optax.chain(scaled, rate, velocity))
