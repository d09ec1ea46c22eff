"""Parameters beside which the scales of a recipe are carried, and an optimizer of both."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from sharding._types import Tree
from sharding.loss._loss_options import Loss
from sharding.matmuls._carried import BINS, NEVER, ScaledParams
from sharding.matmuls._quantized_loss import made_by, trace_products

_COUNTED = "counted magnitudes"  # the label of what updates them


def scaled_params(loss: Loss, params: Tree, *args: Any) -> ScaledParams:
    """What a loss of ``"sun4"``, ``"fp8_delayed"`` or ``"int8_delayed"`` takes as parameters.

    PACT's clips start as SAWB's clips of these arguments, and delayed scales have the largest
    magnitudes of a step of them.

    Args:
      loss: what ``quantized_matmuls`` returned.
      params: the parameters of the loss that this was given.
      args: what else the loss takes: a batch, a key.

    Raises:
      ValueError: if the loss is none of ``quantized_matmuls``, or returns no scalar.

    Example:
      >>> import jax, jax.numpy as jnp, sharding as shd
      >>> from sharding import matmuls
      >>> def loss(params, x):
      ...     x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
      ...     return jnp.mean(x**2)
      >>> low = shd.quantized_matmuls(loss, "fp8_delayed", min_size=64)
      >>> params = {"layers": jnp.ones((2, 64, 64)) / 64}
      >>> scaled = matmuls.scaled_params(low, params, jnp.ones((64, 64)))
      >>> jax.tree.map(jnp.shape, scaled.delayed["layers"]["activation"])
      (2, 1021)
    """
    inner, options = made_by(loss, "scaled_params")

    def first(params: Tree, *args: Any) -> tuple[Any, Any]:
        traced = trace_products(inner, options, params, args)
        empty = ScaledParams(None, {}, {})
        for use in traced.uses:
            recipe = traced.chosen[use.key]
            for field, kind in () if isinstance(recipe, str) else recipe.carried.items():
                own = getattr(empty, kind).setdefault(traced.names[use.number], {})
                own[field] = jnp.zeros((*(use.stacks or ()), 1 if kind == "pact" else BINS))

        def total(pact: Any, delayed: Any) -> Any:
            seed = jnp.zeros((), jnp.uint32)
            out, _ = traced.run(seed, ScaledParams(params, pact, delayed), first=True)
            return inner.split(out)[0]

        pact, seen = jax.grad(total, (0, 1))(empty.pact, empty.delayed)
        return pact, jax.tree.map(lambda x: jnp.where(x > 0, 0.0, NEVER), seen)

    return ScaledParams(params, *jax.jit(first)(params, *args))


def scaled_optimizer(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """``tx`` for ``ScaledParams``: it trains parameters and PACT's clips, and magnitudes are kept.

    All transformations are inside of it, a clip by the global norm, too: what is chained after it
    would change the counts of magnitudes, and what is before it would read them as gradients.

    Example:
      >>> import optax
      >>> from sharding import matmuls
      >>> tx = matmuls.scaled_optimizer(optax.adamw(1e-3))
    """

    def age(seen: jax.Array, steps: jax.Array) -> jax.Array:
        return jnp.where(seen > 0, -steps, jnp.minimum(1.0, NEVER - steps))

    kinds = {"trained": tx, _COUNTED: optax.stateless_with_tree_map(age)}
    return optax.partition(kinds, ScaledParams("trained", "trained", _COUNTED))  # type: ignore[arg-type]


def check_counted(params: Tree, opt_state: Tree) -> None:
    """Raises if magnitudes of earlier steps are parameters like others to an optimizer."""
    if not isinstance(params, ScaledParams) or not params.delayed:
        return
    is_state = lambda x: _COUNTED in getattr(x, "inner_states", ())  # noqa: E731
    if not any(map(is_state, jax.tree.leaves(opt_state, is_leaf=is_state))):
        raise ValueError(
            "the magnitudes beside the parameters are counted, not trained: make the state and the "
            "step with tx = matmuls.scaled_optimizer(tx) (docs: how_to/few_bit_matmuls)."
        )
