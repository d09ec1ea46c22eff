"""What the program of a pipeline sends: known from its schedule, before anything is compiled."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from sharding.pipeline import Op, Schedule
from sharding.pipeline._instructions import Code, Instructions, instructions
from sharding.pipeline._instructions import instructions as lowered
from sharding.pipeline._pipeline import Pipeline
from sharding.pipeline.asynchronous._async_executor import versions_of
from sharding.pipeline.asynchronous._async_schedule import AsyncSchedule
from sharding.placement._specs import num_shards, only_axes
from sharding.plan.cost._parallel_plan import ParallelPlan
from sharding.plan.machine._tiles import num_bytes
from sharding.plan.model._models import Decoder
from sharding.plan.model._saved_names import attention_flops, flops_again, saved_parts
from sharding.step._microbatches import split_microbatches


def over_ticks(schedule: Schedule, of: Callable[[Code], float]) -> float:
    """The sum over all ticks of what their dearest branch takes.

    All devices run one program, and each tick of its loops counts as its dearest branch, whatever a
    stage runs there. Forward passes store residuals.
    """
    return sum(
        len(segment.tables["code"]) * sum(max(map(of, phase.codes)) for phase in segment.phases)
        for segment in instructions(schedule, recompute=False).segments
    )


def pipeline_flops(
    model: Decoder,
    schedule: Schedule,
    rows: int,
    *,
    microbatch: int,
    recompute: str,
    tensor: int = 1,
) -> float:
    """Operations of matrix products in a step's program, as ``audit`` counts them.

    Each tick counts as ``over_ticks`` says, and each chunk as the one with most layers: ``rows``.

    >>> from sharding.pipeline import one_f_one_b
    >>> from sharding.plan import MODELS
    >>> model, schedule = MODELS["llama2-7b"], one_f_one_b(4, 64)
    >>> flops = pipeline_flops(model, schedule, 8, microbatch=1, recompute="none")
    >>> round(flops * 4 / model.flops(2048.0 * 64, 2048), 2)
    1.51
    """
    tokens = float(microbatch * model.length)
    of_layer, head = model.layer_flops(tokens, model.length)
    layer = of_layer / 3 / tensor
    # Of a split backward pass gradients of matrices are the second half.
    weight = layer - tokens * attention_flops(model, model.length) / tensor
    first = 2 * layer - (weight if schedule.splits_backward else 0.0)
    again = 0.0 if recompute == "none" else tokens * flops_again(model, recompute, model.length)
    again /= tensor
    head /= model.shards_of_tokens(tensor)

    def of(code: Code) -> float:
        if code.op == Op.FORWARD:
            return rows * layer
        if code.op == Op.UPDATE:
            return 0.0
        if code.op == Op.WEIGHT:
            return rows * weight
        # The last chunk runs its forward pass in its backward pass, beside the head.
        return rows * (first + again) + (rows * layer + head if code.last else 0.0)

    return over_ticks(schedule, of)


def pipeline_wire(pipeline: Pipeline, params: Any, batch: Any, *, specs: Any = None) -> float:
    """Bytes that one device sends for a pipeline in one step, beside what ``Zero`` sends.

    A permute of one activation in each tick and direction in which any stage sends; an all-reduce
    of the gradients of shared parameters over the stages; with two routes (Chimera) a permute of
    the layers, and one of their gradients; where stages have unequal numbers of layers, what of
    these and of their gradients is elsewhere. Added to ``StagePlan.wire`` it is what a step of
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
    permuted = num_permutes(lowered(schedule, pipeline.recompute, versions_of(schedule)))
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


SCALAR = 4  # bytes: losses are computed in 32 bits


@dataclasses.dataclass(frozen=True)
class TensorSums:
    """All-reduces of one micro-batch among the devices that share each layer."""

    forward: int  # of the residual stream in the forward pass of a layer
    backward: int  # of it in the backward pass of a layer, with those that recomputation repeats
    lookup: int  # of it where the embedding is sharded
    head: int  # of it in the backward pass of a sharded output matrix
    scalars: int  # of one number a token in the loss of sharded logits


def tensor_sums(
    model: Decoder, plan: ParallelPlan, *, compiled: bool = True, adds_first: bool = True
) -> TensorSums:
    """How often devices that share each layer sum the residual stream.

    Forward: after ``out`` and after ``down``. Backward: the gradients of the input of attention and
    of that of the MLP. Recomputation of a layer repeats the first sum, unless its result is saved;
    in a step that is not one program (``compiled``) the second, too. A loss of sharded logits sums
    the exponentials and the logit of the label, and takes the maximum. XLA ``adds_first`` the
    gradients of one input, as by queries, keys and values, on GPUs and TPUs, not on CPUs.

    >>> from sharding.plan import MODELS
    >>> tensor_sums(MODELS["llama2-7b"], ParallelPlan(tensor=8, recompute="full"))
    TensorSums(forward=2, backward=3, lookup=1, head=1, scalars=3)
    """
    if plan.tensor == 1:
        return TensorSums(0, 0, 0, 0, 0)
    again = 1 if compiled else 2
    if plan.recompute in ("none", "selective") or "out" in saved_parts(plan.recompute):
        again = 0
    tables = int(model.shards_of_tokens(plan.tensor) > 1)
    inputs = 2 if adds_first else 3 + (2 if model.gated else 1)
    return TensorSums(2, inputs + again, tables, tables, 3 * tables)


def tensor_wire(
    model: Decoder,
    plan: ParallelPlan,
    *,
    length: int,
    itemsize: int,
    adds_first: bool = True,
    schedule: Schedule | None = None,
    rows: int = 0,
) -> float:
    """Bytes that one device of a compiled program sends for these sums in a step.

    In the ring convention: 2 (n - 1) / n of each array among n devices. Of a pipeline, the sums of
    each tick of its program, whose chunks have at most ``rows`` layers. There is no sequence
    parallelism; elements of the residual stream have ``itemsize`` bytes.
    """
    sums = tensor_sums(model, plan, adds_first=adds_first)
    stream = float(plan.microbatch * length * model.width * itemsize)
    head = sums.head * stream + sums.scalars * plan.microbatch * length * SCALAR

    def of(code: Code) -> float:
        if code.op == Op.WEIGHT:
            return 0.0
        if code.op == Op.FORWARD:
            return (rows * sums.forward + (sums.lookup if code.first else 0)) * stream
        # The last chunk runs its forward pass in its backward pass, beside the head.
        return rows * sums.backward * stream + (
            rows * sums.forward * stream + head if code.last else 0.0
        )

    if schedule is None:
        layers = model.layers * (sums.forward + sums.backward)
        nbytes = plan.microbatches * ((layers + sums.lookup) * stream + head)
    else:
        nbytes = over_ticks(schedule, of)
    return 2 * (plan.tensor - 1) / plan.tensor * nbytes
