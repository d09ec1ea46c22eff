"""The optimizer step on shards: ``tx`` gets global arrays, so that a clip sees the global norm."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_ext import kernels
from sharding._types import OptState, Tree
from sharding.collectives._dtypes import to_sum_dtype
from sharding.offload._transformation import streamed
from sharding.placement._layout import Layout, Placement
from sharding.placement._train_state import parts
from sharding.step._gather_updated import gather_updated
from sharding.step._kernel_shards import KernelShards
from sharding.step._step_plan import StepSpec


def update(
    layout: Layout,
    spec: StepSpec,
    opt_specs: Tree,
    state: Tree,
    grads: Tree,
    tx: Any,
    extra_args: dict[str, Any],
    shards: Tree = None,
) -> Any:
    """A train state after one step: the shards are updated, then the parameters gathered.

    The transformation sees arrays with their global shapes; the partitioner inserts the sums over
    shards. Untrained parameters stay unchanged. Runs inside ``on_mesh``.

    Args:
      layout: the mesh and the stage.
      spec: how the parameters are placed and trained.
      opt_specs: the specs of the optimizer state.
      state: a ``TrainState``, or a pair ``(params, opt_state)``.
      grads: placed as ``spec.placed.shards``.
      tx: the transformation, for a pair.
      extra_args: of its update, such as ``value``.
      shards: of the parameters, if they are taken already.
    """
    placed = spec.placed
    params, opt_state, tx = parts(state, tx)
    with jax.named_scope("update"):
        shards = layout.constrain(params if shards is None else shards, placed.shards)
        grads = layout.constrain(grads, placed.shards)
        run, update_params = optax.with_extra_args_support(tx).update, kernels.update_params_of(tx)
        kernel_shards = KernelShards(layout, shards, placed.shards)

        def advance(shards: Tree, opt_state: OptState) -> tuple[Any, Any]:
            with kernels.kernels_on(kernel_shards):
                if update_params is not None:
                    shards, opt_state = update_params(grads, opt_state, shards, **extra_args)
                else:
                    updates, opt_state = run(grads, opt_state, shards, **extra_args)
                    shards = optax.apply_updates(shards, updates)
            return shards, layout.constrain(opt_state, opt_specs)

        # Offloaded state streams through the device.
        specs = (placed.shards, opt_specs)
        shards, opt_state = streamed(advance, shards, opt_state, grads, specs)
    with jax.named_scope("gather_params"):
        new = layout.constrain(shards, placed.shards)
        if layout.stage in (1, 2):
            new = gather_updated(layout, new, params, placed, spec.trained)
        new = layout.constrain(new, placed.params)
        params = jax.tree.map(lambda t, x, old: x if t else old, spec.trained, new, params)
    if isinstance(state, tuple):
        return (params, opt_state)
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state)


def global_norm(layout: Layout, grads: Tree, placed: Placement) -> jax.Array:
    """The norm of all gradients together, in float32 or wider; inside ``on_mesh``."""
    with jax.named_scope("grad_norm"):
        grads = layout.constrain(grads, placed.shards)
        floating = [g for g in jax.tree.leaves(grads) if jnp.issubdtype(g.dtype, jnp.inexact)]
        return optax.tree.norm([to_sum_dtype(g) for g in floating])
