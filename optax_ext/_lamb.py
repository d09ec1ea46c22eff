"""LAMB: Adam with a trust ratio for each layer, for large batches."""

import collections
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_ext import _phases, _validate
from optax_ext._bias_correction import one_minus_power
from optax_ext._factoring import FactoringRule, factorings
from optax_ext._leaves import Leaves, wide_zeros
from optax_ext._trust_ratio import Layer, Leaf, check_options, decayed, layers, norm, ratio, scale
from optax_ext._types import Tree


class ScaleByLambState(NamedTuple):
    """State of LAMB; averages are float32, or wider if the parameter is."""

    count: jax.Array  # type: ignore[assignment]  # (), int32, steps taken; hides tuple.count
    mu: optax.Updates  # momentum: the parameter's shape
    nu: optax.Updates  # second moment: the parameter's shape


_Hyper = collections.namedtuple("_Hyper", "b1 b2 eps weight_decay")


def moments(hyper: _Hyper, layer: Layer, leaf: Leaf) -> Leaf:
    """Returns ``r + lambda w`` and the new averages; r is Adam's direction."""
    b1 = hyper.b1
    b2 = hyper.b2
    g = leaf.u.astype(leaf.dtype)
    mu = b1 * leaf.mu + (1 - b1) * g
    nu = b2 * leaf.nu + (1 - b2) * jnp.square(g)
    mu_hat = mu / one_minus_power(b1, leaf.t, leaf.dtype)
    nu_hat = nu / one_minus_power(b2, leaf.t, leaf.dtype)
    u = decayed(mu_hat / (jnp.sqrt(nu_hat) + hyper.eps), leaf.w, layer, hyper.weight_decay)
    return leaf._replace(u=u, mu=mu, nu=nu)


def trust_ratio(hyper: _Hyper, layer: Layer, leaf: Leaf) -> Leaf:
    """Adds ``|w| / |u|``."""
    if not layer.has_ratio:
        return leaf
    w_norm = norm(leaf.w, layer.batch)
    u_norm = norm(leaf.u, layer.batch)
    return leaf._replace(ratio=ratio(w_norm, u_norm, w_norm, u_norm))


PHASES = ((moments, None), (trust_ratio, "ratio"), (scale, None))


def scale_by_lamb(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-6,
    *,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any | None = "matrices",
    trust_ratio_mask: Any | None = "matrices",
    stacked: FactoringRule | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Scales Adam's direction, with weight decay, to the norm of each layer's weights.

    With the norms of entire arrays and :math:`t` counted from 1,

    .. math::

      m &\leftarrow \beta_1 m + (1 - \beta_1) g, \quad
      v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
      r &= \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}, \quad
      \text{update} = \frac{\|w\|}{\|r + \lambda w\|} \, (r + \lambda w)

    Where a norm is 0 or that of the weights infinite, as of masks, and for arrays without a trust
    ratio, the update is :math:`r + \lambda w`. Updates are not negated; ``update`` needs
    ``params``.

    Args:
      b1: decay of the momentum, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      eps: added to the root of the second moment, above 0.
      weight_decay: :math:`\lambda`, a number or a schedule of the step count.
      weight_decay_mask: which weights decay: ``"matrices"``, arrays of at least two dims; None,
        all; or a tree of bools like the parameters, a prefix of one, or a function that makes one
        from them.
      trust_ratio_mask: which arrays have a trust ratio, in the same forms.
      stacked: a rule whose ``batch`` dims are stacks of layers, such as ``Factoring(batch=(0,))``
        or ``by_path({"block": Factoring(batch=(0,))}, default=None)``: each slice has its own
        norms, and batch dims do not count as dims of a matrix.

    Raises:
      ValueError: if a hyperparameter is out of range, a mask does not fit, a parameter is not real
        and floating, or gradients do not match the state.

    Example:
      >>> import jax.numpy as jnp, optax_ext
      >>> tx = optax_ext.scale_by_lamb()
      >>> params = {"w": jnp.full((2, 2), 3.0), "b": jnp.ones(2)}
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> round(float(jnp.linalg.norm(updates["w"])), 3), updates["b"].round(2).tolist()
      (6.0, [1.0, 1.0])

    References:
      You et al.: Large Batch Optimization for Deep Learning, ICLR 2020, arXiv 1904.00962.
    """
    masks = {"weight_decay_mask": weight_decay_mask, "trust_ratio_mask": trust_ratio_mask}
    return _scale(b1, b2, eps, weight_decay, stacked, masks)


def _scale(b1: Any, b2: Any, eps: Any, weight_decay: Any, stacked: Any, masks: Tree) -> Any:
    _validate.unit_interval(b1=b1, b2=b2)
    _validate.positive(eps=eps)
    check_options(weight_decay, stacked, **masks)

    def init(params: optax.Params) -> ScaleByLambState:
        factorings(stacked, Leaves.of(params))  # raises unless the rule fits
        return ScaleByLambState(jnp.zeros([], jnp.int32), wide_zeros(params), wide_zeros(params))

    def update(updates: Tree, state: ScaleByLambState, params: Tree = None) -> tuple[Tree, Tree]:
        leaves = Leaves.of(updates)
        mus = leaves.averages_in("mu", state.mu)
        nus = leaves.averages_in("nu", state.nu)
        kinds, grads, weights = layers("lamb", leaves, params, stacked, **masks)
        decay = _validate.value_at(weight_decay, state.count)
        count = optax.safe_increment(state.count)
        hyper = _Hyper(b1, b2, eps, decay)
        columns = zip(grads, weights, mus, nus, strict=True)
        step = _phases.run(PHASES, hyper, kinds, [Leaf(*arrays, count) for arrays in columns])
        fields = ([getattr(leaf, name) for leaf in step] for name in ("u", "mu", "nu"))
        out, mu, nu = map(leaves.unflatten, fields)
        return out, ScaleByLambState(count, mu, nu)

    return _validate.keep_dtype(optax.GradientTransformation(init, update))


def lamb(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-6,
    *,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any | None = "matrices",
    trust_ratio_mask: Any | None = "matrices",
    stacked: FactoringRule | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""LAMB: every layer moves by the learning rate times the norm of its weights.

    ``scale_by_lamb``, whose arguments it takes, then the learning rate :math:`\gamma`:

    .. math::

      w \leftarrow w - \gamma \frac{\|w\|}{\|r + \lambda w\|} \, (r + \lambda w)

    With both masks None it equals ``optax.lamb`` to rounding, but for its state in float32.

    Other Parameters:
      learning_rate: a number or a schedule of the step count.

    Example:
      >>> import jax.numpy as jnp, optax_ext
      >>> tx = optax_ext.lamb(0.1)
      >>> params = {"w": jnp.full((2, 2), 3.0), "b": jnp.ones(2)}
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> round(float(jnp.linalg.norm(updates["w"])), 3)  # a tenth of the norm of the weights
      0.6
    """
    masks = {"weight_decay_mask": weight_decay_mask, "trust_ratio_mask": trust_ratio_mask}
    scaled = _scale(b1, b2, eps, weight_decay, stacked, masks)
    return _validate.keep_dtype(optax.chain(scaled, optax.scale_by_learning_rate(learning_rate)))
