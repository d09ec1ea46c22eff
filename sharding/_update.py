"""The optimizer step on shards."""

from typing import Any

import jax
import optax

from sharding._layout import Layout
from sharding._state import parts


def update(
    layout: Layout, state: Any, grads: Any, tx: Any, specs: Any, extra_args: dict[str, Any]
) -> Any:
    """A train state after one step: shards are updated, then parameters gathered once.

    The transformation sees arrays with their global shapes; sums over shards are the
    partitioner's. Runs inside ``on_mesh``.
    """
    params, opt_state, tx = parts(state, tx)
    param_specs, opt_specs, _ = parts(specs, tx)
    shard_specs, _, _ = layout.cuts(params, param_specs)
    with jax.named_scope("update"):
        shards = layout.constrain(params, shard_specs)
        grads = layout.constrain(grads, shard_specs)
        run = optax.with_extra_args_support(tx).update
        updates, opt_state = run(grads, opt_state, shards, **extra_args)
        shards = optax.apply_updates(shards, layout.constrain(updates, shard_specs))
        opt_state = layout.constrain(opt_state, opt_specs)
    with jax.named_scope("gather_params"):
        params = layout.constrain(layout.constrain(shards, shard_specs), param_specs)
    if isinstance(state, tuple):
        return (params, opt_state)
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state)
