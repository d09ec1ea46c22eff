"""What a step has to know of an update before it computes gradients, from the traced update."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sharding._jaxprs import all_equations
from sharding._types import OptState, Tree
from sharding.step._param_uses import uses_in
from sharding.step._precision import Precision


class UpdateTraits(NamedTuple):
    """Traits of the update of a transformation."""

    local_norm: bool  # whether it depends on its argument ``local_squared_norm``
    # Whether it reduces arrays, as the norm of a clip and the means of CAME do. Under ZeRO these
    # sums are over all devices: no parameter is updated before the last gradient is there.
    sums: bool


def update_traits(
    tx: Any, params: Tree, opt_state: OptState, precision: Precision, trained: Tree
) -> UpdateTraits:
    """Traces the update of a transformation for parameters of these types."""

    def types(tree: Tree) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)

    def update(local_norm: Any, grads: Tree, opt_state: OptState, params: Tree, value: Any) -> Any:
        extra_args = {"value": value, "local_squared_norm": local_norm, "num_pieces": 2}
        run = optax.with_extra_args_support(tx).update
        return run(grads, opt_state, params, **extra_args)

    grads = jax.tree.map(
        lambda x, t: jax.ShapeDtypeStruct(x.shape, precision.of_result(x.dtype) if t else x.dtype),
        params,
        trained,
    )
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    traced = jax.make_jaxpr(update)(scalar, grads, types(opt_state), types(params), scalar)
    reads = bool(uses_in(traced.jaxpr, 1).otherwise)
    return UpdateTraits(reads, any(map(_reduces, all_equations(traced.jaxpr))))


def _reduces(eqn: Any) -> bool:
    """Whether an equation makes arrays smaller: a sum, a largest element, a product of matrices."""
    name = eqn.primitive.name
    if name == "dot_general":
        return True
    return name.startswith("reduce_") and any(x.aval.ndim for x in eqn.invars)
