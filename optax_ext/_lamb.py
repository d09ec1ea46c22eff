"""LAMB: Adam with a trust ratio for each layer, for large batches."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_ext import _validate
from optax_ext._bias_correction import one_minus_power
from optax_ext._factoring_rules import FactoringRule, check_rule, factorings
from optax_ext._leaves import Leaves, at_least_float32
from optax_ext._matrix_passes import barrier
from optax_ext._trust_ratio import (
    Layer,
    check_decay,
    check_masks,
    decay_rate,
    decayed,
    layers,
    norm,
    ratio,
)


class ScaleByLambState(NamedTuple):
    """State of LAMB; averages are float32, or wider if the parameter is."""

    count: jax.Array  # type: ignore[assignment]  # (), int32, steps taken; hides tuple.count
    mu: optax.Updates  # momentum: the parameter's shape
    nu: optax.Updates  # second moment: the parameter's shape


def _adam(
    g: jax.Array, mu: jax.Array, nu: jax.Array, count: jax.Array, b1: Any, b2: Any, eps: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns Adam's direction and the new averages."""
    b1, b2, eps = (_validate.hyperparameter(h, mu.dtype) for h in (b1, b2, eps))
    mu = b1 * mu + (1 - b1) * g
    nu = b2 * nu + (1 - b2) * jnp.square(g)
    mu_hat = mu / one_minus_power(b1, count, mu.dtype)
    nu_hat = nu / one_minus_power(b2, count, mu.dtype)
    return mu_hat / (jnp.sqrt(nu_hat) + eps), mu, nu


def _trust_ratio(u: jax.Array, layer: Layer, norm_bounds: Any) -> jax.Array | None:
    """Returns ``phi(|w|) / |u|``, shaped to broadcast against ``u``; None without a ratio."""
    if not layer.has_ratio:
        return None
    w_norm, u_norm = norm(layer.w, layer.batch), norm(u, layer.batch)
    zero = (w_norm == 0) | (u_norm == 0)
    if norm_bounds is not None:
        least, most = (_validate.hyperparameter(bound, w_norm.dtype) for bound in norm_bounds)
        w_norm = jnp.clip(w_norm, least, most)
    return ratio(w_norm, u_norm, zero)


def scale_by_lamb(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-6,
    *,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any | None = "matrices",
    trust_ratio_mask: Any | None = "matrices",
    norm_bounds: tuple[jax.typing.ArrayLike, jax.typing.ArrayLike] | None = None,
    stacked: FactoringRule | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Scales Adam's direction, with weight decay, to the norm of each layer's weights.

    With the norms of entire arrays and :math:`t` counted from 1,

    .. math::

      m &\leftarrow \beta_1 m + (1 - \beta_1) g, \quad
      v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
      r &= \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}, \quad
      \text{update} = \frac{\phi(\|w\|)}{\|r + \lambda w\|} \, (r + \lambda w)

    Where a norm is 0, and for arrays without a trust ratio, the update is :math:`r + \lambda w`.

    Args:
      b1: decay of the momentum, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      eps: added to the root of the second moment, above 0.
      weight_decay: :math:`\lambda`, a number or a schedule of the step count.
      weight_decay_mask: which weights decay: ``"matrices"``, arrays of at least two dims, hence
        neither biases nor norm scales; None, all; or a tree of bools like the parameters, a prefix
        of one, or a function that makes one from them.
      trust_ratio_mask: which arrays have a trust ratio, in the same forms.
      norm_bounds: the bounds of :math:`\phi(\|w\|)`; None means that :math:`\phi` is the
        identity.
      stacked: a rule whose ``batch`` dims are stacks of layers, such as ``Factoring(batch=(0,))``
        or ``by_path({"block": Factoring(batch=(0,))}, default=None)``: each slice has its own
        norms, and batch dims do not count as dims of a matrix.

    Returns:
      A ``GradientTransformation`` whose ``update`` needs ``params``; updates have the dtype of the
      gradients and are not negated.

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
      You, Li, Reddi, Hseu, Kumar, Bhojanapalli, Song, Demmel, Keutzer, Hsieh: Large Batch
      Optimization for Deep Learning: Training BERT in 76 minutes, ICLR 2020, arXiv 1904.00962.
    """
    _validate.unit_interval(b1=b1, b2=b2)
    _validate.positive(eps=eps)
    check_decay(weight_decay)
    check_masks(weight_decay_mask=weight_decay_mask, trust_ratio_mask=trust_ratio_mask)
    _check_bounds(norm_bounds)
    rule = check_rule("stacked", stacked)

    def init(params: optax.Params) -> ScaleByLambState:
        factorings(rule, Leaves.of(params))  # raises unless the rule fits

        def zeros(p: Any) -> jax.Array:
            return jnp.zeros_like(p, dtype=at_least_float32(p.dtype))

        return ScaleByLambState(
            jnp.zeros([], jnp.int32), jax.tree.map(zeros, params), jax.tree.map(zeros, params)
        )

    def update(
        updates: optax.Updates, state: ScaleByLambState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByLambState]:
        leaves = Leaves.of(updates)
        mus, nus = leaves.averages_in("mu", state.mu), leaves.averages_in("nu", state.nu)
        found = layers("lamb", leaves, params, rule, weight_decay_mask, trust_ratio_mask)
        count = optax.safe_increment(state.count)
        decay = decay_rate(weight_decay, state.count)
        with jax.named_scope("moments"):
            moved = [
                _adam(layer.g.astype(mu.dtype), mu, nu, count, b1, b2, eps)
                for layer, mu, nu in zip(found, mus, nus, strict=True)
            ]
        with jax.named_scope("trust_ratio"):
            out = [decayed(r, layer, decay) for (r, _, _), layer in zip(moved, found, strict=True)]
            ratios = barrier(
                [_trust_ratio(u, layer, norm_bounds) for u, layer in zip(out, found, strict=True)]
            )
            out = [u if s is None else u * s for u, s in zip(out, ratios, strict=True)]
        mus, nus = [mu for _, mu, _ in moved], [nu for _, _, nu in moved]
        return leaves.unflatten(out), ScaleByLambState(
            count, leaves.unflatten(mus), leaves.unflatten(nus)
        )

    return _validate.keep_dtype(optax.GradientTransformation(init, update))


def _check_bounds(norm_bounds: Any) -> None:
    if norm_bounds is None:
        return
    if not isinstance(norm_bounds, tuple | list) or len(norm_bounds) != 2:
        raise ValueError(f"norm_bounds must be a pair (least, most) or None, got {norm_bounds!r}.")
    least, most = norm_bounds
    _validate.non_negative(**{"norm_bounds[0]": least})
    _validate.positive(**{"norm_bounds[1]": most})
    if not any(isinstance(x, jax.core.Tracer) for x in norm_bounds) and least > most:
        raise ValueError(f"norm_bounds must be (least, most), got {norm_bounds!r}.")


def lamb(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-6,
    *,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any | None = "matrices",
    trust_ratio_mask: Any | None = "matrices",
    norm_bounds: tuple[jax.typing.ArrayLike, jax.typing.ArrayLike] | None = None,
    stacked: FactoringRule | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""LAMB: every layer moves by the learning rate times the norm of its weights.

    ``scale_by_lamb``, then the learning rate :math:`\gamma`:

    .. math::

      w \leftarrow w - \gamma \frac{\phi(\|w\|)}{\|r + \lambda w\|} \, (r + \lambda w)

    Biases and norm scales are trained by plain Adam and do not decay, unless the masks
    select them. With both masks None it equals ``optax.lamb`` to rounding, except that its
    state is float32 whatever the parameters are.

    Args:
      learning_rate: a number or a schedule of the step count.
      b1: see ``scale_by_lamb``, as all arguments not listed here.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: :math:`\lambda`; inside the trust ratio.
      weight_decay_mask: which weights decay.
      trust_ratio_mask: which arrays have a trust ratio.
      norm_bounds: the bounds of :math:`\phi(\|w\|)`.
      stacked: which dims are stacks of layers.

    Returns:
      A ``GradientTransformation`` whose ``update`` needs ``params``.

    Raises:
      ValueError: as ``scale_by_lamb``.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_ext
      >>> tx = optax_ext.lamb(optax.linear_schedule(0.1, 0.0, 100), weight_decay=1e-3)
      >>> params = {"w": jnp.ones((4, 8))}
      >>> state = tx.init(params)
      >>> loss = lambda p: jnp.mean((p["w"] - 3.0) ** 2)
      >>> for _ in range(100):
      ...     updates, state = tx.update(jax.grad(loss)(params), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> bool(loss(params) < 1e-2)
      True

    References:
      You, Li, Reddi, Hseu, Kumar, Bhojanapalli, Song, Demmel, Keutzer, Hsieh: Large Batch
      Optimization for Deep Learning: Training BERT in 76 minutes, ICLR 2020, arXiv 1904.00962.
    """
    return _validate.keep_dtype(
        optax.chain(
            scale_by_lamb(
                b1,
                b2,
                eps,
                weight_decay=weight_decay,
                weight_decay_mask=weight_decay_mask,
                trust_ratio_mask=trust_ratio_mask,
                norm_bounds=norm_bounds,
                stacked=stacked,
            ),
            optax.scale_by_learning_rate(learning_rate),
        )
    )
