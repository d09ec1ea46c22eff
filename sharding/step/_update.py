"""The optimizer step on shards."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from sharding.collectives._all_gather import gather_axis_groups
from sharding.offload._transformation import streamed
from sharding.placement._layout import Layout, Placement
from sharding.placement._specs import is_spec
from sharding.step._compiled_step import parts


def update(
    layout: Layout,
    state: Any,
    grads: Any,
    tx: Any,
    placed: Placement,
    opt_specs: Any,
    trained: Any,
    extra_args: dict[str, Any],
) -> Any:
    """A train state after one step: shards are updated, then parameters gathered as they lay.

    The transformation sees arrays with their global shapes; sums over shards are the
    partitioner's. Parameters that are not trained stay what they are. Runs inside ``on_mesh``.
    """
    params, opt_state, tx = parts(state, tx)
    with jax.named_scope("update"):
        shards = layout.constrain(params, placed.shards)
        grads = layout.constrain(grads, placed.shards)
        run = optax.with_extra_args_support(tx).update

        def advance(shards: Any, opt_state: Any) -> tuple[Any, Any]:
            updates, opt_state = run(grads, opt_state, shards, **extra_args)
            shards = optax.apply_updates(shards, layout.constrain(updates, placed.shards))
            return shards, layout.constrain(opt_state, opt_specs)

        specs = (placed.shards, opt_specs)
        shards, opt_state = streamed(advance, shards, opt_state, grads, specs)
    with jax.named_scope("gather_params"):
        new = layout.constrain(shards, placed.shards)
        if layout.stage < 3:
            new = _gather(layout, new, placed)
        new = layout.constrain(new, placed.params)
        params = jax.tree.map(lambda t, x, old: x if t else old, trained, new, params)
    if isinstance(state, tuple):
        return (params, opt_state)
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state)


def global_norm(layout: Layout, grads: Any, placed: Placement) -> jax.Array:
    """The norm of all gradients together, in float32 or wider; inside ``on_mesh``."""
    with jax.named_scope("grad_norm"):
        grads = layout.constrain(grads, placed.shards)
        floating = [g for g in jax.tree.leaves(grads) if jnp.issubdtype(g.dtype, jnp.inexact)]
        wide = [g.astype(jnp.promote_types(g.dtype, jnp.float32)) for g in floating]
        return optax.tree.norm(wide)


def _gather(layout: Layout, shards: Any, placed: Placement) -> Any:
    """Gathers over all but the last group of axes; the last is the caller's constraint."""
    left = list(layout.axes)
    for axes in gather_axis_groups(layout)[:-1]:
        left = [axis for axis in left if axis not in axes]
        specs = jax.tree.map(
            lambda spec, left=left: layout.keep_axes(spec, left), placed.shards, is_leaf=is_spec
        )
        shards = layout.constrain(shards, specs)
    return shards
