"""Which stage of an asynchronous pipeline updates a parameter that all stages share."""

from typing import Any

import jax
import jax.numpy as jnp

from sharding.pipeline._async_schedule import AsyncSchedule
from sharding.pipeline._pipeline import Pipeline
from sharding.step._param_uses import find_uses


def owners_of_shared(
    pipeline: Pipeline, schedule: AsyncSchedule, params: Any, batches: Any, key: Any
) -> list[int]:
    """For each leaf of the shared parameters, the stage that updates it.

    Raises:
      ValueError: if ``embed`` and ``head`` both use one, on different stages.
    """

    def plain(x: Any) -> jax.ShapeDtypeStruct:  # without its sharding
        return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))

    def one(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(jnp.shape(x)[2:], jnp.result_type(x))

    shared = jax.tree.map(plain, pipeline._parts(params)[1])
    rest = (jax.tree.map(one, batches),) if key is None else (jax.tree.map(one, batches), key)
    treedef: Any
    leaves, treedef = jax.tree.flatten(shared)
    x = jax.eval_shape(pipeline.embed, shared, *rest)
    by_embed = find_uses(
        lambda leaves, *rest: pipeline.embed(treedef.unflatten(leaves), *rest), leaves, (), *rest
    ).otherwise
    by_head = find_uses(
        lambda leaves, x, *rest: pipeline.head(treedef.unflatten(leaves), x, *rest),
        leaves,
        (),
        x,
        *rest,
    ).otherwise
    last = schedule.num_stages - 1
    for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(shared)):
        if last and i in by_embed and i in by_head:
            raise ValueError(
                f"embed and head both use {jax.tree_util.keystr(path)}. In an asynchronous "
                "pipeline the first and the last stage would update it independently: give each a "
                "parameter of its own."
            )
    return [last if i in by_head else 0 for i in range(len(leaves))]
