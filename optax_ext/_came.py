"""CAME: confidence-guided adaptive memory-efficient optimization."""

from collections.abc import Generator
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
    clipped_inverse_root,
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
from optax_ext._leaves import Leaves, at_least_float32


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


class _Hyperparameters(NamedTuple):
    b1: Any
    b2: Any
    b3: Any
    eps: Any
    eps_instability: Any
    clipping_threshold: Any | None
    debias_instability: bool


def _step(
    hyper: _Hyperparameters,
    dims: Factoring,
    g: jax.Array,
    mu: jax.Array,
    nu: Moment,
    instability: Moment,
    count: jax.Array,
) -> Generator[_phases.Phase, Any, tuple[jax.Array, jax.Array, Moment, Moment]]:
    """One step for a parameter (rows, cols): its update, and its new mu, nu and instability.

    The phases are those of the paper's Algorithm 2. Without factoring there is no instability.
    """
    dtype = nu.dtype
    hyper = _validate.cast(hyper, dtype)

    def second_moment() -> _phases.Result:  # r_t, c_t: row and column means of g^2 + eps, averaged
        b2 = hyper.b2
        return average_squares(nu, g, eps=hyper.eps, decay=b2, weight=1 - b2, dims=dims), None

    v, _ = yield second_moment

    def clip() -> _phases.Result:  # the factors that make u_t, g / sqrt(v_t) clipped by its RMS
        return clipped_inverse_root(v, g, hyper.clipping_threshold, dims), None

    factors, _ = yield clip  # (rows, 1), (1, cols), (1, 1)

    def weights() -> tuple[jax.Array, jax.Array]:  # b1, 1 - b1
        return jnp.asarray(hyper.b1, dtype), jnp.asarray(1 - hyper.b1, dtype)

    def average_momentum(mu: jax.Array, args: Any) -> tuple[jax.Array, jax.Array]:  # u_t, m_t
        g, factors, (b1, rest) = args
        u = multiply(g.astype(dtype), factors)  # (rows, cols)
        return u, b1 * mu.astype(dtype) + rest * u

    def square_instability(mu: jax.Array, args: Any) -> tuple[jax.Array, jax.Array | None]:
        u, m = average_momentum(mu, args)
        return jnp.square(u - m), m if mu.dtype == dtype else None

    def confidence() -> _phases.Result:  # R_t, C_t: row and column means of (u_t - m_t)^2, averaged
        if not dims.factored:
            return Estimate(instability, None), None
        eps, b3, args = hyper.eps_instability, hyper.b3, (g, factors, weights())
        return average(
            instability, square_instability, mu, args, eps=eps, decay=b3, weight=1 - b3, dims=dims
        )

    s, m = yield confidence

    def momentum() -> _phases.Result:  # m_t / sqrt(S_t)
        trust = inverse_root(s, dims) if dims.factored else ()  # (rows, 1), (1, cols)
        new = m
        if new is None:  # computed again, where storing it in another dtype would have rounded it
            small = (factors, weights())
            _, new = average_momentum(
                mu, (g, *(_matrix_passes.recomputed(small, trust) if trust else small))
            )
        update = multiply(new, trust)  # (rows, cols)
        if dims.factored and hyper.debias_instability:
            update = update * jnp.sqrt(one_minus_power(hyper.b3, count, dtype))
        return None, (update.astype(g.dtype), new.astype(mu.dtype))

    _, (update, mu) = yield momentum
    return update, mu, v.moment, s.moment


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
    implementation: str = "xla",
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
    The defaults reproduce the authors' code to rounding. It does not correct :math:`R` and
    :math:`C` for starting at zero: the updates of step t are :math:`1 / \sqrt{1 - \beta_3^t}`
    times as large as with ``debias_instability``. See ``came`` for the consequences for learning
    rate and warm-up.

    A sharded step equals the step of one device to rounding (1e-12 in float64), except for
    parameters whose true gradient is zero, such as the biases of attention keys or BatchNorm scales
    that start at zero. Their gradients are rounding noise, 1e-9 in float32 beside gradients of
    1e-2, and an ``eps`` of 1e-30 normalizes it to updates as large as all others. These change no
    output, but differ from mesh to mesh. An ``eps`` above the square of the noise damps them: key
    biases of a small attention layer in float32 had updates of RMS 0.3 up to 1e-16, 0.05 at 1e-14
    and 0.005 at 1e-12, while those of other parameters did not change.

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
        (``flax_transformer()`` for Flax models with attention or stacked layers,
        ``last_two_dims()``, ``two_largest_dims()``, ``by_path({...})``, or one ``Factoring`` for
        all parameters), or None to factor nothing. ``describe_factoring`` lists the result.
      mu_dtype: dtype in which the momentum is stored; None means float32, or wider if the
        parameter is. The instability is computed from the new momentum before the cast.
      debias_instability: divide :math:`R` and :math:`C` by :math:`1 - \beta_3^t`.
      implementation: ``"xla"``, or ``"pallas"``: programs for one NVIDIA GPU take the sums over
        rows and over columns from one read of a matrix, by a Triton kernel, but for arrays in a
        ``shard_map``. Opt-in, since it has been compiled for a GPU, but not yet run on one.

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
      Luo, Ren, Zheng, Jiang, Jiang, You: CAME: Confidence-guided Adaptive Memory Efficient
      Optimization, ACL 2023, arXiv 2307.02047.
    """
    _validate.unit_interval(b1=b1, b2=b2, b3=b3)
    _validate.non_negative(eps=eps, eps_instability=eps_instability)
    _validate.positive(clipping_threshold=clipping_threshold)
    mu_dtype = _validate.as_dtype("mu_dtype", mu_dtype)
    _validate.implementation(implementation)
    rule = check_rule("factoring", factoring)
    hyper = _Hyperparameters(
        b1, b2, b3, eps, eps_instability, clipping_threshold, debias_instability
    )

    def init(params: optax.Params) -> ScaleByCameState:
        leaves = Leaves.of(params)
        nus, instabilities, mus = [], [], []
        dims = factorings(rule, leaves)
        for p, d in zip(leaves.arrays, dims, strict=True):
            dtype = at_least_float32(p.dtype)
            mus.append(jnp.zeros_like(p, dtype=mu_dtype or dtype))
            nus.append(init_moment(p, d, dtype))
            # Buffers of its own: a donated train state must not contain an array twice.
            instabilities.append(init_moment(p, d, dtype)._replace(full=None))
        return _pack(jnp.zeros([], jnp.int32), leaves, dims, mus, nus, instabilities)

    def update(
        updates: optax.Updates, state: ScaleByCameState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByCameState]:
        del params
        leaves = Leaves.of(updates)
        dims = factorings(rule, leaves)
        count = optax.safe_increment(state.count)
        nus = join_moments(leaves, dims, nu=state.nu, nu_row=state.nu_row, nu_col=state.nu_col)
        mus = leaves.averages_in("mu", state.mu, mu_dtype)
        rows = leaves.slots("instability_row", state.instability_row)
        cols = leaves.slots("instability_col", state.instability_col)
        instabilities = [Moment(None, *slots) for slots in zip(rows, cols, strict=True)]
        check_moments(leaves, "instability", instabilities)
        counts = [count] * len(mus)
        with _matrix_passes.implemented_by(implementation):
            results = _phases.run(
                _step, hyper, dims, leaves.arrays, mus, nus, instabilities, counts
            )
        out, *new = (list(column) for column in zip(*results, strict=True)) if results else [[]] * 4
        return leaves.unflatten(out), _pack(count, leaves, dims, *new)

    return optax.GradientTransformation(init, update)


def _pack(
    count: jax.Array,
    leaves: Leaves,
    dims: list[Factoring],
    mus: list[jax.Array],
    nus: list[Moment],
    instabilities: list[Moment],
) -> ScaleByCameState:
    _, *instability = split_moments(leaves, dims, instabilities)
    return ScaleByCameState(
        count, leaves.unflatten(mus), *split_moments(leaves, dims, nus), *instability
    )


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
    implementation: str = "xla",
) -> optax.GradientTransformationExtraArgs:
    r"""CAME: Adam's quality at little more than Adafactor's memory.

    State of a matrix of n x m parameters: the momentum, n m elements of ``mu_dtype``, and 2 (n + m)
    float32. Start at AdamW's learning rate with ``debias_instability=True``; without it, at a tenth
    of that rate and with a warm-up, or for tens of thousands of steps at 0.5 to 0.9 times it.
    Factor matrices, of attention too: ``factoring=flax_transformer()`` for Flax models;
    ``last_two_dims()``, the default, where these are rows and columns. ``describe_factoring`` lists
    what is factored.

    ``scale_by_came``, then decoupled weight decay, then the learning rate :math:`\eta`:

    .. math::

      \theta \leftarrow \theta - \eta \, (m / \sqrt{R \otimes C} + \lambda \theta)

    How to choose, from 300-step runs of language models of 1.3M to 1.5M parameters on three tasks,
    each optimizer tuned by one search (``benchmarks/convergence``):

    - **Learning rate.** The authors advise 0.5 to 0.9 times AdamW's, for long runs. With their
      ``b3`` of 0.9999 and without debiasing, the updates of step t are
      :math:`1 / \sqrt{1 - \beta_3^t}` times as large as with it: 100 times at step 1, 10 times at
      step 100, 1.3 times at step 10,000, and 11.1 times on average over the first 300 steps. (The
      first update has an RMS of 11.1 learning rates; debiased, of 0.111.) The best rate in runs of
      hundreds of steps was a tenth of AdamW's or less; debiased, it was AdamW's. Search around
      these.
    - **Debiasing.** Set ``debias_instability=True`` in runs of fewer than
      :math:`1 / (1 - \beta_3)` steps: the final loss was 0.02 to 0.04 nats lower, and 0.08 lower
      after 200 large steps. After 12,800 steps the difference was 0.01.
    - **Warm-up.** Required without debiasing: the loss was up to 0.12 higher without a warm-up.
      Debiased runs did not need one.
    - **b3.** The authors use 0.9999. In short runs without debiasing the search chose 0.995 on all
      three tasks. Debiased, 0.9999 was as good on two of three.

    The defaults are the authors'.

    Args:
      learning_rate: a number or a schedule of the step count.
      b1: see ``scale_by_came``, as all arguments not listed here.
      b2: decay of the second moment.
      b3: decay of the instability.
      eps: added to the squared gradient.
      eps_instability: added to the squared instability.
      clipping_threshold: the largest RMS of an update before momentum.
      factoring: which dims of each parameter are factored.
      mu_dtype: dtype in which the momentum is stored.
      debias_instability: correct the instability for starting at zero; advised in short runs.
      weight_decay: :math:`\lambda`, multiplied by the learning rate; a number or a schedule.
      weight_decay_mask: a tree of bools like the parameters, or a function that makes one from
        them; True where weights decay.
      implementation: how passes over matrices run on GPUs.

    Returns:
      A ``GradientTransformation`` whose ``update`` needs ``params`` if weights decay.

    Raises:
      ValueError: as ``scale_by_came``; also if ``weight_decay`` is negative.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_ext
      >>> tx = optax_ext.came(optax.warmup_cosine_decay_schedule(0.0, 0.1, 10, 100))
      >>> params = {"w": jnp.ones((4, 8))}
      >>> state = tx.init(params)
      >>> loss = lambda p: jnp.mean((p["w"] - 3.0) ** 2)
      >>> for _ in range(100):
      ...     updates, state = tx.update(jax.grad(loss)(params), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> bool(loss(params) < 1e-2)
      True

    References:
      Luo, Ren, Zheng, Jiang, Jiang, You: CAME: Confidence-guided Adaptive Memory Efficient
      Optimization, ACL 2023, arXiv 2307.02047.
    """
    if not callable(weight_decay):
        _validate.non_negative(weight_decay=weight_decay)
    decayed = _validate.mask_function("weight_decay_mask", weight_decay_mask)
    return _validate.keep_dtype(
        optax.chain(
            scale_by_came(
                b1,
                b2,
                b3,
                eps=eps,
                eps_instability=eps_instability,
                clipping_threshold=clipping_threshold,
                factoring=factoring,
                mu_dtype=mu_dtype,
                debias_instability=debias_instability,
                implementation=implementation,
            ),
            _validate.decayed_weights(weight_decay, decayed),
            optax.scale_by_learning_rate(learning_rate),
        )
    )
