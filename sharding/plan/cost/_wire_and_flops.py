"""What a step sends and computes beside ZeRO: pipelines, shared layers, compressed gradients."""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sharding import sync as methods
from sharding._types import Array, Batch, Tree
from sharding.pipeline import Op, Schedule
from sharding.pipeline._instructions import Code, Instructions, instructions
from sharding.pipeline._pipeline import Pipeline
from sharding.pipeline.asynchronous._async_schedule import AsyncSchedule
from sharding.placement._specs import num_shards, only_axes
from sharding.plan.cost._ledger import WorkRow
from sharding.plan.cost._parallel_plan import ParallelPlan
from sharding.plan.machine._collective_time import Operation
from sharding.plan.machine._devices import num_bytes
from sharding.plan.model._experts import EXPERT_AXIS
from sharding.plan.model._layer_costs import OPERATIONS, head_work, layer_work
from sharding.plan.model._models import Decoder, saved_parts
from sharding.step._loss import split_microbatches
from sharding.sync import GradientSync


def _over_ticks(
    schedule: Schedule, passes: Mapping[Op, float], head: float, lookup: float = 0.0
) -> float:
    """The sum over all ticks of what their dearest branch takes, which all devices count.

    The last chunk runs its forward pass in its backward pass, beside the head.
    """

    def of(code: Code) -> float:
        first = lookup if code.first and code.op == Op.FORWARD else 0.0
        last = passes[Op.FORWARD] + head if code.last and code.op == Op.BACKWARD else 0.0
        return passes.get(code.op, 0.0) + first + last

    return sum(
        len(segment.tables["code"]) * sum(max(map(of, phase.codes)) for phase in segment.phases)
        for segment in instructions(schedule, False).segments
    )


def decoder_products(
    model: Decoder, plan: ParallelPlan, schedule: Schedule | None = None, rows: int = 0
) -> tuple[WorkRow, ...]:
    """The matrix products that ``audit`` counts in a step, with those that run again.

    Chunks of a pipeline have ``rows`` layers. Of products in few bits there is a row of their own.
    """
    options: Any = {"microbatch": plan.microbatch, "ideal": True}
    sizes: Any = {"tensor": plan.tensor, "experts": plan.experts, "matmuls": plan.matmuls}
    of_head = head_work(model, OPERATIONS, tensor=model.shards_of_tokens(plan.tensor), **options)
    head = sum(part.matmul for part in of_head)
    found = []
    for rate in (1.0, 2.0):  # of products in few bits, which then take half the time
        device = dataclasses.replace(OPERATIONS, fp8=rate, int8=rate)
        work = layer_work(model, device, **sizes, **options)
        forward = work.forward.matmul
        backward = (work.backward + work.again(plan.recompute)).matmul
        if schedule is None:
            found.append(plan.microbatches * (model.layers * (forward + backward) + head))
            continue
        # Of a split backward pass gradients of matrices are the second half.
        weight = work.weight.matmul if schedule.splits_backward else 0.0
        parts = {Op.FORWARD: forward, Op.BACKWARD: backward - weight, Op.WEIGHT: weight}
        of_rows = {op: rows * part for op, part in parts.items()}
        found.append(_over_ticks(schedule, of_rows, head))
    return products_of_units(found[0], 2 * (found[0] - found[1]), plan.matmuls)


def products_of_units(flops: float, low: float, matmuls: str | None) -> tuple[WorkRow, ...]:
    """Rows of matrix products, of which some operations are in few bits."""
    plain = WorkRow("matmul", "products", flops - low, ("flops",))
    return (plain, plain._replace(amount=low, on=(matmuls,))) if matmuls else (plain,)


def pipeline_wire(pipeline: Pipeline, params: Tree, batch: Batch, *, specs: Tree = None) -> float:
    """Bytes that one device sends for a pipeline in one step, beside what ``Zero`` sends.

    A permute of one activation in each tick and direction in which any stage sends; an all-reduce
    of the gradients of shared parameters over the stages; with two routes (Chimera) a permute of
    the layers, and one of their gradients; where stages have unequal numbers of layers, what of
    these and of their gradients is elsewhere. Add it to ``StagePlan.wire``.

    Args:
      pipeline: the pipeline. Its mesh may have data axes; an axis of tensor parallelism sends more.
      params: stacked, real or abstract; all of them trained.
      batch: real or abstract, of one replica of the pipeline.
      specs: of the parameters, as ``pipeline.param_specs`` makes them; None: other axes shard none.

    Raises:
      ValueError: if the parameters or the batch do not fit the pipeline.

    >>> import sharding as shd
    >>> mesh = jax.sharding.AbstractMesh((4,), ("pipe",))
    >>> pipeline = shd.Pipeline(mesh, shd.pipeline.one_f_one_b(4, 8), num_layers=8,
    ...     embed=lambda shared, x: x @ shared["in"], block=lambda w, x, _: x + jnp.tanh(x @ w),
    ...     head=lambda shared, x, _: (jnp.sum((x @ shared["out"]) ** 2), x.shape[0]))
    >>> params = {"in": jnp.ones((3, 16)), "layers": jnp.ones((8, 16, 16)), "out": jnp.ones(16)}
    >>> shd.plan.pipeline_wire(pipeline, params, jnp.ones((32, 3)))  # 28 x 256 + 1.5 x 256
    7552.0
    """
    rows = pipeline_work(pipeline, params, batch, specs=specs)
    return float(sum(row.sent(pipeline.mesh.shape) for row in rows))


def pipeline_work(
    pipeline: Pipeline,
    params: Tree,
    batch: Batch,
    *,
    specs: Tree = None,
    updates: AsyncSchedule | None = None,
) -> list[WorkRow]:
    """What a device sends for a pipeline in one step, or for all ``updates`` without a flush.

    These exchange parameters, not sums of gradients, before and after all.
    """
    mesh = pipeline.mesh
    axis = pipeline.axis
    stacked = jax.eval_shape(lambda: params)
    specs = pipeline.param_specs(stacked) if specs is None else specs
    program = instructions(updates or pipeline.schedule, pipeline.recompute)
    shared = {name: x for name, x in stacked.items() if name != pipeline.layers}
    message = float(num_bytes(_message(pipeline, shared, batch)))
    rows = [WorkRow("transfers", "permute", message, (axis,), num_permutes(program))]

    def of_array(x: Array, spec: Any, is_layers: bool) -> None:
        own = num_bytes(x)
        back = own  # of a sum of gradients
        if updates is None:
            dtype = jnp.promote_types(x.dtype, jnp.float32)
            back = num_bytes(jax.ShapeDtypeStruct(x.shape, dtype))
        if not is_layers:
            rows.append(WorkRow("transfers", "all-reduce", back / num_shards(mesh, spec), (axis,)))
            return
        # Of unequal numbers of layers, those that are elsewhere; other axes shard them.
        others = num_shards(mesh, only_axes(spec, {*mesh.axis_names} - {axis}))
        to_stages, from_stages = pipeline._rows.sent(x.shape)
        moved = (to_stages * own + from_stages * back) / x.shape[0] / others
        op = {0: "permute", None: "all-gather"}.get(pipeline._rows.dim(x.shape), "all-to-all")
        if op != "permute":  # which count full arrays
            moved *= mesh.shape[axis] / (mesh.shape[axis] - 1)
        rows.append(WorkRow("transfers", op, moved, (axis,)))
        if len(pipeline.schedule.routes) > 1:
            replicas = (own + back) / num_shards(mesh, spec)
            rows.append(WorkRow("transfers", "permute", replicas, (axis,)))

    for name, tree in stacked.items():
        of = functools.partial(of_array, is_layers=name == pipeline.layers)
        jax.tree.map(of, tree, specs[name])
    return rows


def num_permutes(program: Instructions) -> int:
    """How many activations a device permutes in a step, wherever any stage sends in a phase."""
    return sum(
        len(segment.tables["code"]) * len({phase.right, phase.left} - {()})
        for segment in program.segments
        for phase in segment.phases
    )


def _message(pipeline: Pipeline, shared: Any, batch: Batch) -> list[Any]:
    """The types of the activations of one micro-batch."""

    def embedded(shared: Any, batch: Batch) -> Any:
        microbatches = split_microbatches(batch, pipeline.schedule.num_microbatches)
        key = (jax.random.key(0),) if pipeline.rngs else ()
        return pipeline.embed(shared, jax.tree.map(lambda x: x[0], microbatches), *key)

    return jax.tree.leaves(jax.eval_shape(embedded, shared, batch))


_ITEM = 2  # bytes of an activation
_SCALAR = 4  # bytes: losses are computed in 32 bits
TENSOR_AXIS = "model"  # of the devices that share each layer, as ``Decoder.specs`` names it


class TensorWork(NamedTuple):
    """What devices that share each layer send for one micro-batch."""

    forward: tuple[WorkRow, ...] = ()  # in the forward pass of a layer
    backward: tuple[WorkRow, ...] = ()  # in its backward pass, with what is repeated
    lookup: tuple[WorkRow, ...] = ()  # where the embedding is sharded
    head: tuple[WorkRow, ...] = ()  # where the output matrix is sharded, and its loss


def tensor_work(
    model: Decoder,
    plan: ParallelPlan,
    *,
    length: int = 0,
    itemsize: int = _ITEM,
    compiled: bool = True,
    adds_first: bool = True,
) -> TensorWork:
    """The sums of the residual stream over the devices that share each layer.

    Forward: after ``out`` and ``down``. Backward: the gradients of the inputs of attention and MLP,
    each added first by XLA on GPUs and TPUs (``adds_first``). Recomputation repeats the first sum,
    unless its result is saved; in a step that is not one ``compiled`` program the second, too. A
    loss of sharded logits sums exponentials and the logit of the label, and takes the maximum. With
    ``sequence_parallel`` each sum is a reduce-scatter and an all-gather, which is repeated.
    """
    if plan.tensor == 1:
        return TensorWork()
    tokens = plan.microbatch * (length or model.length)

    def row(op: str, times: int, nbytes: float) -> WorkRow:
        return WorkRow("tensor", op, nbytes, (TENSOR_AXIS,), times)

    stream = float(tokens * model.width * itemsize)
    again = 1 if compiled else 2
    if plan.recompute in ("none", "selective") or "out" in saved_parts(plan.recompute):
        again = 0
    inputs = 2 if adds_first else 3 + (2 if model.gated else 1)
    forward: tuple[WorkRow, ...] = (row("all-reduce", 2, stream),)
    backward: tuple[WorkRow, ...] = (row("all-reduce", inputs + again, stream),)
    if plan.sequence_parallel:
        times = 2 if plan.recompute in ("none", "selective") else 4
        forward = row("reduce-scatter", 2, stream), row("all-gather", 2, stream)
        backward = row("reduce-scatter", times, stream), row("all-gather", times + 2, stream)
    if model.shards_of_tokens(plan.tensor) == 1:
        return TensorWork(forward, backward)
    of_loss = row("all-reduce", 3, float(tokens * _SCALAR))
    summed = row("all-reduce", 1, stream)
    return TensorWork(forward, backward, (summed,), (summed, of_loss))


EXCHANGES = 2  # of a layer with experts, in its forward pass: to the experts and back


def expert_work(
    model: Decoder, plan: ParallelPlan, *, length: int = 0, itemsize: int = _ITEM
) -> WorkRow:
    """The all-to-alls of a layer with experts, for one micro-batch; see ``apply_experts``.

    As many in the backward pass as in the forward pass, and again where layers run again: their
    results are among what is read for gradients, whatever is saved.
    """
    assert model.experts
    slots = model.experts.number * model.experts.slots(length or model.length)
    sent = float(plan.microbatch * slots * model.width * itemsize)
    times = 2 if plan.recompute in ("none", "selective") else 3
    return WorkRow("tensor", "all-to-all", sent, (EXPERT_AXIS,), times * EXCHANGES)


def expert_rows(
    model: Decoder, plan: ParallelPlan, *, itemsize: int, grad_itemsize: int
) -> list[WorkRow]:
    """What devices with other experts send in a step: tokens, and gradients of all else."""
    row = expert_work(model, plan, itemsize=itemsize)
    layers = model.layers - model.dense_layers
    params = sum(x.size for x in jax.tree.leaves(model.abstract()))
    common = grad_itemsize * (params - model.layers * model.expert_elements)
    return [
        row._replace(times=row.times * layers * plan.microbatches),
        WorkRow("tensor", "all-reduce", common, (EXPERT_AXIS,), plan.microbatches),
    ]


def tensor_row(
    model: Decoder,
    plan: ParallelPlan,
    *,
    itemsize: int,
    adds_first: bool = True,
    schedule: Schedule | None = None,
    rows: int = 0,
) -> WorkRow:
    """These sums in a step, in bytes; chunks of a pipeline have ``rows`` layers."""
    work = tensor_work(model, plan, itemsize=itemsize, adds_first=adds_first)
    forward, backward, lookup, head = (sum(x.amount * x.times for x in part) for part in work)
    if schedule is None:
        nbytes = plan.microbatches * (model.layers * (forward + backward) + lookup + head)
    else:
        passes = {Op.FORWARD: rows * forward, Op.BACKWARD: rows * backward}
        nbytes = _over_ticks(schedule, passes, head, lookup)
    return WorkRow("tensor", "all-reduce", nbytes, (TENSOR_AXIS,))


_WIDE = 4  # bytes: gradients are compressed in 32 bits
_BLOCK = 512  # elements that share a scale, as ``qsgd`` has them
_LEAST = 4096  # elements of an array that ``qsgd`` quantizes
_COMPRESSION = 2.0  # at least, of what ``powersgd`` compresses
# Bytes of device memory for each element. PowerSGD reads the gradient and the residual, writes
# their sum, reads it for P, for Q and for the new residual, writes that, and writes the mean; QSGD
# reads the gradient and the noise, writes codes, reads those of all devices, and writes the mean.
_MOVED = {"powersgd": 2 + 4 + 4 + 3 * 4 + 4 + 4, "qsgd": 2 + 4 + 1 + 1 + 4}


class SyncedArray(NamedTuple):
    """A gradient as its synchronization gets it."""

    shape: tuple[int, ...]  # of one device's part
    nbytes: float  # of it
    scattered: bool  # whether each device needs its shard of the mean only


class SyncWork(NamedTuple):
    """A synchronization of all gradients, on one device, once in a step."""

    sums: tuple[tuple[Operation, float], ...]  # collectives, and bytes of their arrays
    moved: float  # bytes of device memory that it reads and writes
    held: float  # bytes of temporaries
    flops: float  # operations of matrix products


def sync_of(name: str) -> GradientSync:
    """The synchronization of a name: ``"powersgd(RANK)"``, ``"qsgd(8)"`` or ``"qsgd(4)"``."""
    kind, number = _kind_and_number(name)
    return methods.powersgd(number) if kind == "powersgd" else methods.qsgd(number)


def sync_work(name: str, arrays: Sequence[SyncedArray], devices: int) -> SyncWork:
    """What a synchronization of these gradients takes.

    PowerSGD of rank r sums r (rows + columns) numbers of each matrix, if that is less than half of
    it; QSGD exchanges codes and a scale for each block, and gathers those of the mean where all
    devices need it. Other gradients are summed. Leading dims are stacks of matrices.
    """
    kind, number = _kind_and_number(name)
    sums: list[tuple[Operation, float]] = []
    compressed: list[int] = []
    for shape, nbytes, scattered in arrays:
        size = math.prod(shape)
        rows, columns = shape[-2:] if len(shape) > 1 else (1, 1)
        if kind == "powersgd" and _COMPRESSION * number * (rows + columns) < rows * columns:
            count = size // (rows * columns) * number * _WIDE
            sums += [("all-reduce", float(count * side)) for side in (rows, columns)]
            compressed.append(size)
        elif kind == "qsgd" and size >= _LEAST:
            blocks = devices * math.ceil(math.ceil(size / devices) / _BLOCK)
            codes = blocks * (_BLOCK * number / 8 + _WIDE)
            sums.append(("all-to-all", codes))
            if not scattered:
                sums.append(("all-gather", codes))
            compressed.append(size)
        else:
            sums.append(("reduce-scatter" if scattered else "all-reduce", nbytes))
    largest = _WIDE * max(compressed, default=0)
    return SyncWork(
        sums=tuple(sums),
        moved=float(_MOVED[kind] * sum(compressed)),
        # The mean of all, and one array at a time; or the latter twice.
        held=float(largest + (_WIDE * sum(compressed) if kind == "powersgd" else largest)),
        # With both factors, of the mean, and of the residual.
        flops=8.0 * number * sum(compressed) if kind == "powersgd" else 0.0,
    )


def _kind_and_number(name: str) -> tuple[str, int]:
    match = re.fullmatch(r"(powersgd|qsgd)\(([1-9]\d*)\)", name)
    if not match or (match[1] == "qsgd" and match[2] not in ("4", "8")):
        raise ValueError(
            f"gradients can be synchronized by 'powersgd(RANK)', 'qsgd(8)' or 'qsgd(4)', got "
            f"{name!r}."
        )
    return match[1], int(match[2])
