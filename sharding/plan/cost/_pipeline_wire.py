"""What the program of a pipeline sends: known from its schedule, before anything is compiled."""

from typing import Any

import jax
import jax.numpy as jnp

from sharding.pipeline._async_schedule import AsyncSchedule
from sharding.pipeline._instructions import Instructions
from sharding.pipeline._instructions import instructions as lowered
from sharding.pipeline._pipeline import Pipeline
from sharding.placement._specs import num_shards, only_axes
from sharding.plan.machine._tiles import num_bytes
from sharding.step._microbatches import split_microbatches


def pipeline_wire(pipeline: Pipeline, params: Any, batch: Any, *, specs: Any = None) -> float:
    """Bytes that one device sends for a pipeline in one step, beside what ``Zero`` sends.

    A permute of one activation in each tick and direction in which any stage sends; an all-reduce
    of
    the gradients of shared parameters over the stages; with two routes (Chimera) a permute of the
    layers, and one of their gradients; where stages have unequal numbers of layers, what of these
    and of their gradients is elsewhere. Added to ``StagePlan.wire`` it is what a step of
    ``Zero.train_step(pipeline.loss)`` sends, with ``gather="step"``.

    Args:
      pipeline: the pipeline. Its mesh may have data axes; an axis of tensor parallelism sends more.
      params: stacked, real or abstract; all of them trained.
      batch: real or abstract, of one replica of the pipeline: that of a step, divided by the sizes
        of the data axes.
      specs: of the parameters, as ``pipeline.param_specs`` makes them; None: other axes shard none.

    Raises:
      ValueError: if the parameters or the batch do not fit the pipeline.

    Example:
      >>> import jax, jax.numpy as jnp, sharding as shd
      >>> pipeline = shd.Pipeline(
      ...     jax.sharding.AbstractMesh((4,), ("pipe",)),
      ...     shd.pipeline.one_f_one_b(stages=4, microbatches=8),
      ...     num_layers=8,
      ...     embed=lambda shared, x: x @ shared["in"],
      ...     block=lambda w, x, _: x + jnp.tanh(x @ w),
      ...     head=lambda shared, x, _: (jnp.sum((x @ shared["out"]) ** 2), x.shape[0]),
      ... )
      >>> params = {"in": jnp.ones((3, 16)), "layers": jnp.ones((8, 16, 16)), "out": jnp.ones(16)}
      >>> shd.plan.pipeline_wire(pipeline, params, jnp.ones((32, 3)))  # 28 x 256 + 1.5 x 256
      7552.0
    """
    stages = pipeline.schedule.num_stages
    stacked = jax.eval_shape(lambda: params)
    specs = pipeline.param_specs(stacked) if specs is None else specs
    shared, of_shared = (
        {name: x for name, x in tree.items() if name != pipeline.layers}
        for tree in (stacked, specs)
    )

    def of_device(tree: Any, specs: Any) -> float:
        """Bytes of the shards of one device."""
        shards = jax.tree.map(lambda x, s: num_bytes(x) / num_shards(pipeline.mesh, s), tree, specs)
        return sum(jax.tree.leaves(shards))

    program = lowered(pipeline.schedule, pipeline.recompute)
    permuted = num_permutes(program) * num_bytes(_message(pipeline, shared, batch))
    summed = 2 * (stages - 1) / stages * of_device(jax.tree.map(_as_sum, shared), of_shared)
    layers, of_layers = stacked[pipeline.layers], specs[pipeline.layers]
    sums = jax.tree.map(_as_sum, layers)
    replicas = moved = 0.0  # moved: of stages with unequal numbers of layers
    if len(pipeline.schedule.routes) > 1:
        replicas = of_device(layers, of_layers) + of_device(sums, of_layers)
    for tree, back in ((layers, 0), (sums, 1)):

        def sent(x: Any, spec: Any, back: int = back) -> float:
            """Bytes of the layers that a device sends; other axes shard them."""
            others = num_shards(
                pipeline.mesh, only_axes(spec, {*pipeline.mesh.axis_names} - {pipeline.axis})
            )
            return pipeline._rows.sent(x.shape)[back] * num_bytes(x) / x.shape[0] / others

        moved += sum(jax.tree.leaves(jax.tree.map(sent, tree, of_layers)))
    return float(permuted + summed + replicas + moved)


def updates_wire(pipeline: Pipeline, schedule: AsyncSchedule, params: Any, batch: Any) -> float:
    """Bytes that one device sends for all updates of an asynchronous pipeline.

    A permute of one activation in each tick and direction; after the last update an all-reduce of
    the shared parameters, which one stage has, to all stages. ``batch`` is that of one update.
    """
    shared = {k: x for k, x in jax.eval_shape(lambda: params).items() if k != pipeline.layers}
    permuted = num_permutes(lowered(schedule, pipeline.recompute))
    stages = schedule.num_stages
    sent = permuted * num_bytes(_message(pipeline, shared, batch))
    return float(sent + 2 * (stages - 1) / stages * num_bytes(shared))


def num_permutes(program: Instructions) -> int:
    """How many activations a device permutes in a step.

    In each tick one in each direction, if any stage sends that way in the same phase of the loop.
    """
    return sum(
        len(segment.tables["code"]) * len({phase.right, phase.left} - {()})
        for segment in program.segments
        for phase in segment.phases
    )


def _message(pipeline: Pipeline, shared: Any, batch: Any) -> list[Any]:
    """The types of the activations of one micro-batch."""
    count = pipeline.schedule.num_microbatches

    def embedded(shared: Any, batch: Any) -> Any:
        microbatch = jax.tree.map(lambda x: x[0], split_microbatches(batch, count))
        key = (jax.random.key(0),) if pipeline.rngs else ()
        return pipeline.embed(shared, microbatch, *key)

    return jax.tree.leaves(jax.eval_shape(embedded, shared, batch))


def _as_sum(x: Any) -> jax.ShapeDtypeStruct:
    """The type of the accumulated gradient of a parameter."""
    return jax.ShapeDtypeStruct(x.shape, jnp.promote_types(x.dtype, jnp.float32))
