"""Which stage of an asynchronous pipeline updates a parameter that all stages share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from sharding.pipeline._async_schedule import AsyncSchedule
from sharding.pipeline._pipeline import Pipeline
from sharding.pipeline._stage import Arrays


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
    by_embed = _used(
        lambda leaves, *rest: pipeline.embed(treedef.unflatten(leaves), *rest), leaves, rest
    )
    by_head = _used(
        lambda leaves, x, *rest: pipeline.head(treedef.unflatten(leaves), x, *rest),
        leaves,
        (x, *rest),
    )
    last = schedule.num_stages - 1
    for (path, _), first_too, last_too in zip(
        jax.tree_util.tree_leaves_with_path(shared), by_embed, by_head, strict=True
    ):
        if last and first_too and last_too:
            raise ValueError(
                f"embed and head both use {jax.tree_util.keystr(path)}. In an asynchronous "
                "pipeline the first and the last stage would update it independently: give each a "
                "parameter of its own."
            )
    return [last if by_last else 0 for by_last in by_head]


def _used(fn: Callable[..., Any], leaves: Arrays, rest: tuple[Any, ...]) -> list[bool]:
    """For each leaf, whether the results of ``fn(leaves, *rest)`` depend on it."""
    jaxpr = jax.make_jaxpr(fn)(leaves, *rest).jaxpr
    return _used_inputs(jaxpr, [True] * len(jaxpr.outvars))[: len(leaves)]


def _used_inputs(jaxpr: Any, used_outputs: list[bool]) -> list[bool]:
    """For each input of a jaxpr, whether the outputs that are used depend on it."""
    pairs = zip(jaxpr.outvars, used_outputs, strict=True)
    used = {var for var, needed in pairs if needed and not isinstance(var, Literal)}
    for eqn in reversed(jaxpr.eqns):
        outputs = [var in used for var in eqn.outvars]
        if not any(outputs):
            continue
        # Of functions that are called, what they read; loops count as reading all.
        inner = [eqn.params.get(name) for name in ("jaxpr", "call_jaxpr")]
        inner = [*filter(None, inner), *eqn.params.get("branches", ())]
        inner = [getattr(each, "jaxpr", each) for each in inner]
        first = len(eqn.invars) - max((len(each.invars) for each in inner), default=0)
        reads = [True] * len(eqn.invars)
        if inner and eqn.primitive.name not in ("scan", "while") and 0 <= first <= 1:
            found = [_used_inputs(each, outputs) for each in inner]
            reads[first:] = [any(column) for column in zip(*found, strict=True)]
        operands = zip(eqn.invars, reads, strict=True)
        used |= {var for var, read in operands if read and not isinstance(var, Literal)}
    return [var in used for var in jaxpr.invars]
