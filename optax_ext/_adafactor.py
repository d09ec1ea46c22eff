"""Adafactor: adaptive learning rates with sublinear memory."""

import collections
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_ext import _bias_correction, _phases, _validate
from optax_ext import _factored_moments as _moments
from optax_ext._factored_moments import Leaf, clip, rms
from optax_ext._factoring import Factoring, FactoringRule, check_rule, factorings, two_largest_dims
from optax_ext._leaves import Leaves, at_least_float32
from optax_ext._types import DType, Tree


class ScaleByAdafactorState(NamedTuple):
    """State of Adafactor: float32, or wider if the parameter is; None in slots not used."""

    count: jax.Array  # type: ignore[assignment]  # (), int32, steps taken; hides tuple.count
    nu: optax.Updates  # full second moment of parameters that are not factored
    nu_row: optax.Updates  # second moment: the parameter's shape without its cols
    nu_col: optax.Updates  # second moment: the parameter's shape without its rows


class MomentumState(NamedTuple):
    """State of Adafactor's momentum."""

    mu: optax.Updates  # the parameter's shape, dtype_momentum


_Hyper = collections.namedtuple(
    "_Hyper", "decay_rate decay_offset beta2_cap b2 eps clipping_threshold"
)


def second_moment(hyper: _Hyper, dims: Factoring, leaf: Leaf) -> Leaf:
    """Averages r_t and c_t, the row and column means of g^2 + eps."""
    weights = _decay(hyper, leaf.t, leaf.dtype)
    return leaf._replace(v=_moments.average_squares(leaf, hyper.eps, weights, dims))


def normalize(hyper: _Hyper, dims: Factoring, leaf: Leaf) -> Leaf:
    """Returns u_t as the update, and the new second moment."""
    update = _moments.multiply(leaf.g.astype(leaf.dtype), leaf.factors).astype(leaf.g.dtype)
    return Leaf(update, leaf.v.moment, leaf.t)


# With the statistics that devices sum, of which one all-reduce a phase is made.
PHASES = ((second_moment, "v"), (clip, "factors"), (normalize, None))


def _decay(hyper: _Hyper, count: jax.Array, dtype: DType) -> tuple[jax.Array, jax.Array]:
    if hyper.b2 is not None:
        return jnp.asarray(hyper.b2, dtype), jnp.asarray(1 - hyper.b2, dtype)
    step = jnp.maximum(count.astype(dtype) - hyper.decay_offset, 1)
    weight = step**-hyper.decay_rate
    if hyper.beta2_cap is not None:
        weight = jnp.maximum(weight, 1 - hyper.beta2_cap)
    return 1 - weight, weight


def scale_by_adafactor(
    decay_rate: jax.typing.ArrayLike = 0.8,
    *,
    decay_offset: jax.typing.ArrayLike = 0,
    beta2_cap: jax.typing.ArrayLike | None = None,
    b2: jax.typing.ArrayLike | None = None,
    eps: jax.typing.ArrayLike = 1e-30,
    clipping_threshold: jax.typing.ArrayLike | None = 1.0,
    factoring: FactoringRule | None = two_largest_dims(),
) -> optax.GradientTransformation:
    r"""Scales gradients by the root of a factored second moment, and clips by RMS.

    With the means of rows :math:`\operatorname{R}` and columns :math:`\operatorname{C}`, and
    :math:`t` counted from 1,

    .. math::

      \beta_t &= \min(1 - (t - \text{offset})^{-\text{decay\_rate}}, \text{cap}) \\
      r &\leftarrow \beta_t r + (1 - \beta_t) \operatorname{R}(g^2 + \epsilon), \quad
      c \leftarrow \beta_t c + (1 - \beta_t) \operatorname{C}(g^2 + \epsilon) \\
      u &= g / \sqrt{r c^\top / \operatorname{mean}(r)}, \quad
      \text{update} = u / \max(1, \operatorname{RMS}(u) / d)

    A parameter that is not factored has a full second moment. State for a matrix of n x m
    parameters: n + m float32. Updates are not negated.

    Args:
      decay_rate: exponent of the decay schedule, above 0.
      decay_offset: steps taken before fine-tuning; :math:`\beta_t` is 0 while the count is below.
      beta2_cap: the largest :math:`\beta_t`, in [0, 1), as for large vision models; None: no cap.
      b2: a constant decay instead of the schedule, in [0, 1), without bias correction, as in CAME.
      eps: added to the squared gradient; at least 0.
      clipping_threshold: the largest RMS of an update; None does not clip.
      factoring: the rule that selects the rows and columns of each parameter, as for
        ``scale_by_came``; None factors nothing.

    Raises:
      ValueError: if a hyperparameter is out of range, a parameter is not real and floating, a rule
        does not fit a parameter's shape, or gradients do not match the state.

    Example:
      >>> import jax.numpy as jnp, optax_ext
      >>> tx = optax_ext.scale_by_adafactor(factoring=optax_ext.last_two_dims())
      >>> state = tx.init({"w": jnp.ones((64, 128), jnp.bfloat16)})
      >>> state.nu_row["w"].shape, state.nu_row["w"].dtype
      ((64,), dtype('float32'))

    References:
      Shazeer, Stern: Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, ICML 2018.
      The cap: Zhai et al.: Scaling Vision Transformers, arXiv 2106.04560.
    """
    hyper = _Hyper(decay_rate, decay_offset, beta2_cap, b2, eps, clipping_threshold)
    return _scale(hyper, check_rule("factoring", factoring))


def _scale(hyper: _Hyper, rule: FactoringRule | None) -> optax.GradientTransformation:
    _validate.positive(decay_rate=hyper.decay_rate, clipping_threshold=hyper.clipping_threshold)
    _validate.non_negative(decay_offset=hyper.decay_offset, eps=hyper.eps)
    _validate.unit_interval(beta2_cap=hyper.beta2_cap, b2=hyper.b2)

    def init(params: optax.Params) -> ScaleByAdafactorState:
        leaves = Leaves.of(params)
        dims = factorings(rule, leaves)
        nus = list(map(_moments.init, leaves.arrays, dims))
        return ScaleByAdafactorState(jnp.zeros([], jnp.int32), *_moments.split(leaves, dims, nus))

    def update(
        updates: Tree, state: ScaleByAdafactorState, params: Tree = None
    ) -> tuple[Tree, Tree]:
        leaves = Leaves.of(updates)
        dims = factorings(rule, leaves)
        nus = _moments.join(leaves, dims, state, "nu", "nu_row", "nu_col")
        count = optax.safe_increment(state.count)
        step = [Leaf(g, nu, count) for g, nu in zip(leaves.arrays, nus, strict=True)]
        step = _phases.run(PHASES, hyper, dims, step)
        moments = _moments.split(leaves, dims, [leaf.nu for leaf in step])
        updates = leaves.unflatten([leaf.g for leaf in step])
        return updates, ScaleByAdafactorState(count, *moments)

    return optax.GradientTransformation(init, update)


def _scale_by_parameter_rms(min_scale: Any, rule: Any) -> optax.GradientTransformation:
    """Multiplies updates by max(RMS(parameter), min_scale), each batch slice by its own."""

    def scaled(updates: Tree, params: Tree) -> Tree:
        if params is None:
            raise ValueError("adafactor with multiply_by_parameter_scale needs params in update.")
        leaves = Leaves.of(updates)
        arrays = leaves.arrays_in("params", params)

        def scale(u: jax.Array, p: jax.Array, dims: Factoring) -> jax.Array:
            if not p.size:
                return u
            dtype = at_least_float32(p.dtype)
            floor = _validate.hyperparameter(min_scale, dtype)
            factor = jnp.maximum(rms(p.astype(dtype), dims), floor)  # (1, 1)
            factor = jnp.where(jnp.isinf(factor), 1, factor)  # by which zeros would become NaN
            return (u.astype(dtype) * factor).astype(u.dtype)

        dims = factorings(rule, leaves)
        return leaves.unflatten(list(map(scale, leaves.arrays, arrays, dims)))

    return optax.stateless(scaled)


def adafactor(
    learning_rate: optax.ScalarOrSchedule | None = None,
    *,
    decay_rate: jax.typing.ArrayLike = 0.8,
    decay_offset: jax.typing.ArrayLike = 0,
    beta2_cap: jax.typing.ArrayLike | None = None,
    b2: jax.typing.ArrayLike | None = None,
    multiply_by_parameter_scale: bool = True,
    min_parameter_scale: jax.typing.ArrayLike = 1e-3,
    relative_step: bool = False,
    clipping_threshold: jax.typing.ArrayLike | None = 1.0,
    momentum: jax.typing.ArrayLike | None = None,
    dtype_momentum: Any | None = None,
    weight_decay_rate: optax.ScalarOrSchedule | None = None,
    weight_decay_times_lr: bool = False,
    weight_decay_mask: Any | None = None,
    eps: jax.typing.ArrayLike = 1e-30,
    factoring: FactoringRule | None = two_largest_dims(),
    min_dim_size_to_factor: int | None = None,
    factored: bool = True,
) -> optax.GradientTransformationExtraArgs:
    r"""Adafactor with every option of ``optax.adafactor``, and averages that do not stall.

    In this order: ``scale_by_adafactor``, whose arguments it takes, the learning rate
    :math:`\eta_t`, the parameter scale, momentum, weight decay:

    .. math::

      u &\leftarrow \eta_t \max(\operatorname{RMS}(\theta), \text{min}) \, u, \quad
      m \leftarrow \beta_1 m + (1 - \beta_1) u, \quad
      \theta \leftarrow \theta - m - \lambda \theta

    It equals ``optax.adafactor`` to rounding, except that averages are float32 whatever the
    parameters are, and ``decay_offset`` on a new state stays finite. With
    ``factoring=last_two_dims()`` it is the Adafactor of Hugging Face and, with
    ``relative_step=True``, that of PyTorch.

    Other Parameters:
      learning_rate: a number or a schedule. None means 1, so that the parameter scale alone sets
        the step, or with ``relative_step`` the paper's 0.01.
      multiply_by_parameter_scale: multiply by max(RMS(parameter), ``min_parameter_scale``); not of
        parameters with infinite elements, such as masks.
      min_parameter_scale: the smallest parameter scale, above 0.
      relative_step: use :math:`\eta_t = \min(\text{learning\_rate}, 1 / \sqrt t)`.
      momentum: decay of an average of the updates, in [0, 1); None means no momentum.
      dtype_momentum: dtype of the stored momentum; None: float32, or wider if the parameter is.
      weight_decay_rate: :math:`\lambda`, not multiplied by the learning rate; None does not decay.
      weight_decay_times_lr: multiply the decay by :math:`\eta_t`, as AdamW does.
      weight_decay_mask: a tree of booleans as the parameters, or a function that makes one.
      factoring: slices along ``batch`` dims also have their own parameter scales.
      min_dim_size_to_factor: optax's name for ``factoring=two_largest_dims(n)``.
      factored: False is optax's name for ``factoring=None``.

    Raises:
      ValueError: as ``scale_by_adafactor``; also if ``momentum`` is outside [0, 1),
        ``weight_decay_rate`` is negative, ``weight_decay_times_lr`` has no learning rate, or both
        ``factoring`` and one of optax's two names for it are given.

    Example:
      >>> import jax.numpy as jnp, optax_ext
      >>> tx = optax_ext.adafactor(0.1, momentum=0.9, dtype_momentum=jnp.bfloat16)
      >>> state = tx.init({"w": jnp.ones((4, 8))})
      >>> [x.mu["w"].dtype for x in state if isinstance(x, optax_ext.MomentumState)]
      [dtype(bfloat16)]
    """
    if weight_decay_times_lr and learning_rate is None and not relative_step:
        raise ValueError("weight_decay_times_lr=True needs a learning_rate or relative_step=True.")
    _validate.positive(min_parameter_scale=min_parameter_scale)
    rule = _rule(factoring, min_dim_size_to_factor, factored)
    step_size = _relative_step(learning_rate) if relative_step else learning_rate
    hyper = _Hyper(decay_rate, decay_offset, beta2_cap, b2, eps, clipping_threshold)
    stages = [_scale(hyper, rule)]
    if step_size is not None:
        stages.append(optax.scale_by_learning_rate(step_size, flip_sign=False))
    if multiply_by_parameter_scale:
        stages.append(_scale_by_parameter_rms(min_parameter_scale, rule))
    if momentum is not None:
        _validate.unit_interval(momentum=momentum)
        dtype = _validate.as_dtype("dtype_momentum", dtype_momentum)
        stages.append(_bias_correction.momentum(MomentumState, momentum, dtype, dampened=True))
    if weight_decay_rate is not None:
        _validate.rate(weight_decay_rate=weight_decay_rate)
        decay = _times(weight_decay_rate, step_size) if weight_decay_times_lr else weight_decay_rate
        stages.append(_validate.decayed_weights(decay, weight_decay_mask))
    stages.append(optax.scale(-1.0))
    return _validate.keep_dtype(optax.chain(*stages))


def _rule(factoring: Any, min_dim_size: int | None, factored: bool) -> FactoringRule | None:
    rule = check_rule("factoring", factoring)
    given = [f"min_dim_size_to_factor={min_dim_size}"] if min_dim_size is not None else []
    given += ["factored=False"] if not factored else []
    if given and rule != two_largest_dims():
        raise ValueError(
            f"factoring={rule} and {' and '.join(given)} both select what is factored; give one."
        )
    if not factored:
        return None
    return rule if min_dim_size is None else two_largest_dims(min_dim_size)


def _relative_step(learning_rate: optax.ScalarOrSchedule | None) -> optax.Schedule:
    def schedule(count: jax.Array) -> jax.Array:
        cap = 1e-2 if learning_rate is None else _validate.value_at(learning_rate, count)
        return jnp.minimum(cap, jax.lax.rsqrt(jnp.asarray(optax.safe_increment(count), float)))

    return schedule


def _times(rate: Any, step_size: Any) -> Any:
    if not callable(rate) and not callable(step_size):
        return rate * step_size
    return lambda count: _validate.value_at(rate, count) * _validate.value_at(step_size, count)
