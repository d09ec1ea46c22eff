"""CAME: confidence-guided adaptive memory-efficient optimization."""

import collections
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_ext import _matrix_passes, _phases, _validate
from optax_ext._bias_correction import one_minus_power
from optax_ext._factored_moments import (
    Estimate,
    Moment,
    average,
    average_squares,
    check_moments,
    clip,
    init_moment,
    inverse_root,
    join_moments,
    multiply,
    split_moments,
)
from optax_ext._factoring_rules import (
    Factoring,
    FactoringRule,
    check_rule,
    factorings,
    last_two_dims,
)
from optax_ext._leaves import Leaves, Tree, at_least_float32


class ScaleByCameState(NamedTuple):
    """State of CAME; averages are float32, or wider if the parameter is.

    Slots that a parameter does not use are None. Rows and cols are its factored dims.
    """

    count: jax.Array  # type: ignore[assignment]  # (), int32, steps taken; hides tuple.count
    mu: optax.Updates  # momentum: the parameter's shape, mu_dtype
    nu: optax.Updates  # full second moment of parameters that are not factored
    nu_row: optax.Updates  # second moment: the parameter's shape without its cols
    nu_col: optax.Updates  # second moment: the parameter's shape without its rows
    instability_row: optax.Updates  # instability: the parameter's shape without its cols
    instability_col: optax.Updates  # instability: the parameter's shape without its rows


_Hyperparameters = collections.namedtuple(
    "_Hyperparameters", "b1 b2 b3 eps eps_instability clipping_threshold debias_instability"
)


class _Leaf(NamedTuple):
    """One parameter (rows, cols) in a step: its gradient and state, then what phases compute."""

    g: jax.Array  # (rows, cols), the gradient; after the last phase the update
    mu: jax.Array  # (rows, cols)
    nu: Moment
    instability: Moment  # without arrays if the parameter is not factored
    t: jax.Array  # (), int32, number of this step
    v: Any = None  # Estimate: nu of this step
    factors: tuple[jax.Array, ...] = ()  # (rows, 1), (1, cols), (1, 1): their product is u / g
    s: Any = None  # Estimate: instability of this step
    m: jax.Array | None = None  # (rows, cols), mu of this step, unless it is computed again

    @property
    def dtype(self) -> Any:
        """The dtype in which the step is computed."""
        return self.nu.dtype


# The phases of Algorithm 2 of the paper. The default factoring makes a parameter (rows, cols).


def second_moment(hyper: _Hyperparameters, dims: Factoring, leaf: _Leaf) -> _Leaf:
    """Averages r_t and c_t, the row and column means of g^2 + eps."""
    b2 = hyper.b2
    v = average_squares(leaf.nu, leaf.g, eps=hyper.eps, decay=b2, weight=1 - b2, dims=dims)
    return leaf._replace(v=v)


def _average_updates(mu: jax.Array, args: Any) -> tuple[jax.Array, jax.Array]:
    """Returns u_t and m_t, element by element."""
    g, factors, (b1, weight) = args
    u = multiply(g.astype(b1.dtype), factors)
    return u, b1 * mu.astype(b1.dtype) + weight * u


def _weights(hyper: _Hyperparameters, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the weights of m_{t-1} and u_t as arrays: a pass takes them as operands."""
    return jnp.asarray(hyper.b1, dtype), jnp.asarray(1 - hyper.b1, dtype)


def confidence(hyper: _Hyperparameters, dims: Factoring, leaf: _Leaf) -> _Leaf:
    """Averages R_t and C_t, the row and column means of (u_t - m_t)^2 + eps."""
    if not dims.factored:
        return leaf._replace(s=Estimate(leaf.instability, None))

    def squares(mu: jax.Array, args: Any) -> tuple[jax.Array, jax.Array | None]:
        u, m = _average_updates(mu, args)
        return jnp.square(u - m), m if mu.dtype == m.dtype else None

    args, b3 = (leaf.g, leaf.factors, _weights(hyper, leaf.dtype)), hyper.b3
    options: Any = {"eps": hyper.eps_instability, "decay": b3, "weight": 1 - b3, "dims": dims}
    s, m = average(leaf.instability, squares, leaf.mu, args, **options)
    return leaf._replace(s=s, m=m)


def momentum(hyper: _Hyperparameters, dims: Factoring, leaf: _Leaf) -> _Leaf:
    """Returns the update m_t / sqrt(S_t), and the new state."""
    trust = inverse_root(leaf.s, dims) if dims.factored else ()  # (rows, 1), (1, cols)
    m = leaf.m
    if m is None:  # computed again, where storing it in another dtype would have rounded it
        small: Any = (leaf.factors, _weights(hyper, leaf.dtype))
        small = _matrix_passes.recomputed(small, trust) if trust else small
        _, m = _average_updates(leaf.mu, (leaf.g, *small))
    update = multiply(m, trust)  # (rows, cols)
    if dims.factored and hyper.debias_instability:
        update = update * jnp.sqrt(one_minus_power(hyper.b3, leaf.t, leaf.dtype))
    g, mu = update.astype(leaf.g.dtype), m.astype(leaf.mu.dtype)
    return _Leaf(g, mu, leaf.v.moment, leaf.s.moment, leaf.t)


# With the statistics that devices sum, of which one all-reduce a phase is made.
PHASES = ((second_moment, "v"), (clip, "factors"), (confidence, "s"), (momentum, None))


def scale_by_came(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    b3: jax.typing.ArrayLike = 0.9999,
    *,
    eps: jax.typing.ArrayLike = 1e-30,
    eps_instability: jax.typing.ArrayLike = 1e-16,
    clipping_threshold: jax.typing.ArrayLike | None = 1.0,
    factoring: FactoringRule | None = last_two_dims(),
    mu_dtype: Any | None = None,
    debias_instability: bool = False,
) -> optax.GradientTransformation:
    r"""Scales gradients by CAME: factored second moment, momentum, factored confidence.

    For the gradient :math:`g` of a factored parameter, with :math:`\operatorname{R}` and
    :math:`\operatorname{C}` the means of rows and columns and
    :math:`r \otimes c = r c^\top / \operatorname{mean}(r)`,

    .. math::

      r &\leftarrow \beta_2 r + (1 - \beta_2) \operatorname{R}(g^2 + \epsilon), \quad
      c \leftarrow \beta_2 c + (1 - \beta_2) \operatorname{C}(g^2 + \epsilon) \\
      u &= g / \sqrt{r \otimes c}, \quad u \leftarrow u / \max(1, \operatorname{RMS}(u) / d) \\
      m &\leftarrow \beta_1 m + (1 - \beta_1) u \\
      R &\leftarrow \beta_3 R + (1 - \beta_3) \operatorname{R}((u - m)^2 + \epsilon_U), \quad
      C \leftarrow \beta_3 C + (1 - \beta_3) \operatorname{C}((u - m)^2 + \epsilon_U) \\
      \text{update} &= m / \sqrt{R \otimes C}

    A parameter that is not factored has a full second moment; its update is :math:`m`.
    The defaults reproduce the authors' code to rounding. See ``came`` for what starting :math:`R`
    and :math:`C` at zero means for learning rate and warm-up.

    A sharded step equals the step of one device to rounding, except for parameters whose true
    gradient is zero, such as the biases of attention keys: an ``eps`` of 1e-30 normalizes their
    rounding noise to updates as large as all others, which change no output. With 1e-12 they are
    small.

    State for a matrix of n x m parameters: n m momentum elements and 2 (n + m) float32.

    Args:
      b1: decay of the momentum, in [0, 1). At 0 the instability is ``eps_instability`` alone, and
        updates become huge.
      b2: decay of the second moment, in [0, 1).
      b3: decay of the instability, in [0, 1); above ``b2``.
      eps: added to the squared gradient; at least 0, and 0 only if no row or column of a gradient
        is ever all zero. A larger value keeps updates of parameters without a gradient small.
      eps_instability: added to the squared instability; at least 0.
      clipping_threshold: the largest RMS of :math:`u`; None does not clip.
      factoring: the rule that selects the rows and columns of each parameter
        (``flax_transformer()`` for Flax models, ``two_largest_dims()``, ``by_path({...})``, or one
        ``Factoring``), or None to factor nothing. ``describe_factoring`` lists the result.
      mu_dtype: dtype in which the momentum is stored; None means float32, or wider if the
        parameter is. The instability is computed from the new momentum before the cast.
      debias_instability: divide :math:`R` and :math:`C` by :math:`1 - \beta_3^t`.

    Returns:
      A ``GradientTransformation``; updates have the dtype of the gradients and are not negated.

    Raises:
      ValueError: if a hyperparameter is out of range, a parameter is not real and floating, a rule
        does not fit a parameter's shape, or gradients do not match the state.

    Example:
      >>> import jax.numpy as jnp, optax, optax_ext
      >>> tx = optax.chain(optax_ext.scale_by_came(), optax.scale_by_learning_rate(1e-3))
      >>> params = {"w": jnp.ones((64, 128)), "b": jnp.zeros(128)}
      >>> state = tx.init(params)
      >>> state[0].nu_row["w"].shape, state[0].nu_col["w"].shape, state[0].nu["b"].shape
      ((64,), (128,), (128,))

    References:
      Luo et al.: CAME: Confidence-guided Adaptive Memory Efficient Optimization, ACL 2023, arXiv
      2307.02047.
    """
    _validate.unit_interval(b1=b1, b2=b2, b3=b3)
    _validate.non_negative(eps=eps, eps_instability=eps_instability)
    _validate.positive(clipping_threshold=clipping_threshold)
    mu_dtype = _validate.as_dtype("mu_dtype", mu_dtype)
    rule = check_rule("factoring", factoring)
    hyper = _Hyperparameters(
        b1, b2, b3, eps, eps_instability, clipping_threshold, debias_instability
    )

    def init(params: optax.Params) -> ScaleByCameState:
        leaves, count = Leaves.of(params), jnp.zeros([], jnp.int32)
        dims = factorings(rule, leaves)

        def zeros(p: Any, own: Factoring) -> _Leaf:
            dtype = at_least_float32(p.dtype)
            # Buffers of its own: a donated train state must not contain an array twice.
            instability = init_moment(p, own, dtype)._replace(full=None)
            mu = jnp.zeros_like(p, dtype=mu_dtype or dtype)
            return _Leaf(p, mu, init_moment(p, own, dtype), instability, count)

        return _state(count, leaves, dims, list(map(zeros, leaves.arrays, dims)))

    def update(updates: Tree, state: ScaleByCameState, params: Tree = None) -> tuple[Tree, Tree]:
        leaves = Leaves.of(updates)
        dims = factorings(rule, leaves)
        count = optax.safe_increment(state.count)
        nus = join_moments(leaves, dims, nu=state.nu, nu_row=state.nu_row, nu_col=state.nu_col)
        mus = leaves.averages_in("mu", state.mu, mu_dtype)
        rows = leaves.slots("instability_row", state.instability_row)
        cols = leaves.slots("instability_col", state.instability_col)
        instabilities = [Moment(None, *slots) for slots in zip(rows, cols, strict=True)]
        check_moments(leaves, "instability", instabilities)
        columns = zip(leaves.arrays, mus, nus, instabilities, strict=True)
        new = _phases.run(PHASES, hyper, dims, [_Leaf(*arrays, count) for arrays in columns])
        return leaves.unflatten([leaf.g for leaf in new]), _state(count, leaves, dims, new)

    return optax.GradientTransformation(init, update)


def _state(
    count: jax.Array, leaves: Leaves, dims: list[Factoring], step: list[_Leaf]
) -> ScaleByCameState:
    """Returns the state as trees, from the leaves of a step."""
    moments = split_moments(leaves, dims, [leaf.nu for leaf in step])
    _, *instability = split_moments(leaves, dims, [leaf.instability for leaf in step])
    mu = leaves.unflatten([leaf.mu for leaf in step])
    return ScaleByCameState(count, mu, *moments, *instability)


def came(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    b3: jax.typing.ArrayLike = 0.9999,
    *,
    eps: jax.typing.ArrayLike = 1e-30,
    eps_instability: jax.typing.ArrayLike = 1e-16,
    clipping_threshold: jax.typing.ArrayLike | None = 1.0,
    factoring: FactoringRule | None = last_two_dims(),
    mu_dtype: Any | None = None,
    debias_instability: bool = False,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""CAME: Adam's quality at little more than Adafactor's memory.

    Start at AdamW's learning rate with ``debias_instability=True``. Factor attention, too:
    ``factoring=flax_transformer()`` for Flax models; ``last_two_dims()``, the default, where these
    are rows and columns. ``describe_factoring`` lists what is factored.

    ``scale_by_came``, whose arguments it takes, then decoupled weight decay, then the learning rate
    :math:`\eta`:

    .. math::

      \theta \leftarrow \theta - \eta \, (m / \sqrt{R \otimes C} + \lambda \theta)

    How to choose, from 300-step runs of language models of 1.3M to 1.5M parameters on three tasks,
    each optimizer tuned by one search (``benchmarks/convergence``):

    - **Learning rate.** The authors advise 0.5 to 0.9 times AdamW's, for long runs. Without
      debiasing the updates of step t are :math:`1 / \sqrt{1 - \beta_3^t}` times as large as with
      it: 100 times at step 1, 10 times at step 100, 1.3 times at step 10,000. The best rate in runs
      of hundreds of steps was a tenth of AdamW's or less; debiased, it was AdamW's.
    - **Debiasing.** Set ``debias_instability=True`` in runs of fewer than
      :math:`1 / (1 - \beta_3)` steps: the final loss was 0.02 to 0.04 nats lower, and 0.08 lower
      after 200 large steps. After 12,800 steps the difference was 0.01.
    - **Warm-up.** Without debiasing the loss was up to 0.12 higher without a warm-up. Debiased runs
      did not need one.
    - **b3.** The authors use 0.9999. In short runs without debiasing the search chose 0.995 on all
      three tasks. Debiased, 0.9999 was as good on two of three.

    Other Parameters:
      learning_rate: a number or a schedule of the step count.
      weight_decay: :math:`\lambda`, multiplied by the learning rate; a number or a schedule.
      weight_decay_mask: a tree of bools like the parameters, or a function that makes one from
        them; True where weights decay.

    Returns:
      A ``GradientTransformation`` whose ``update`` needs ``params`` if weights decay.

    Raises:
      ValueError: as ``scale_by_came``; also if ``weight_decay`` is negative.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_ext
      >>> tx = optax_ext.came(optax.warmup_cosine_decay_schedule(0.0, 0.1, 10, 100))
      >>> params = {"w": jnp.ones((4, 8))}
      >>> state, loss = tx.init(params), lambda p: jnp.mean((p["w"] - 3.0) ** 2)
      >>> for _ in range(100):
      ...     updates, state = tx.update(jax.grad(loss)(params), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> bool(loss(params) < 1e-2)
      True
    """
    _validate.rate(weight_decay=weight_decay)
    decayed = _validate.mask_function("weight_decay_mask", weight_decay_mask)
    scaled = scale_by_came(
        b1,
        b2,
        b3,
        eps=eps,
        eps_instability=eps_instability,
        clipping_threshold=clipping_threshold,
        factoring=factoring,
        mu_dtype=mu_dtype,
        debias_instability=debias_instability,
    )
    decay = _validate.decayed_weights(weight_decay, decayed)
    rate = optax.scale_by_learning_rate(learning_rate)
    return _validate.keep_dtype(optax.chain(scaled, decay, rate))
