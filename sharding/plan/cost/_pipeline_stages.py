"""What one device of a pipeline holds and sends."""

import dataclasses
import itertools
from collections.abc import Sequence

import jax.numpy as jnp

from sharding._types import DType
from sharding.plan._format import memory_by_part
from sharding.plan.cost import _pipeline_schedules as schedules
from sharding.plan.cost._parallel_plan import ParallelPlan
from sharding.plan.cost._step_memory import StagePlan
from sharding.plan.machine._devices import DeviceKind
from sharding.plan.model._layer_costs import LayerCost
from sharding.plan.model._models import Decoder


@dataclasses.dataclass(frozen=True)
class PipelineStage:
    """One device of each stage of a pipeline; bytes, and seconds for one micro-batch.

    All devices run one program, and hold alike: layers of the largest chunk, which others pad, the
    embedding and the head, and slots of the stage with most in flight.
    """

    layers: tuple[tuple[int, int], ...]  #: by chunk: the first, and the one after the last
    forward: float  #: seconds of all chunks
    backward: float  #: seconds of all chunks
    in_flight: int  #: micro-batches whose activations it needs at once; chunks if it has several
    params: float  #: with those that stage 3 gathers, those of unequal stages, and versions
    grads: float  #: gradients that are accumulated, and what branches return of them but on TPUs
    state: float  #: optimizer state and master weights in device memory
    activations: float  #: of the micro-batches in flight, and temporaries of one backward pass
    permuted: float  #: bytes that it needs to send to other stages in a step
    synced: float  #: bytes that it sends to the replicas of its stage in a step
    summed: float  #: bytes that it sends for embedding and head, and layers of unequal stages

    @property
    def memory(self) -> float:
        """All that it holds, but for the batch."""
        return self.params + self.grads + self.state + self.activations

    def by_part(self, batch: float = 0.0) -> dict[str, float]:
        """``memory`` and the batch, by what they are."""
        parts = {"params": self.params, "grads": self.grads, "state": self.state}
        return memory_by_part(self.memory + batch, batch=batch, **parts)


def pipeline_stages(
    model: Decoder,
    plan: ParallelPlan,
    costs: Sequence[LayerCost],
    counts: Sequence[int],
    held: StagePlan,
    dtype: DType,
    device: DeviceKind,
) -> tuple[PipelineStage, ...]:
    """The devices of a pipeline whose forward passes store what ``costs`` say.

    ``counts`` are the layers of its chunks; ``held`` is the plan of ZeRO over its replicas.
    """
    schedule, num_stages, chunks = plan.schedule, plan.pipe, plan.chunks
    # The first layer of each chunk and the one after its last, with the embedding and the head.
    ends = [1 + number for number in itertools.accumulate(counts)]
    ranges = list(itertools.pairwise([0, *ends[:-1], ends[-1] + 1]))
    rows = max(counts)
    # Parameters of one chunk; of the embedding and the head, which are one matrix where tied.
    first, layer, *_, last = costs
    item = jnp.dtype(dtype).itemsize
    vocabulary = model.vocabulary // model.shards_of_tokens(plan.tensor)
    layers, shared = rows * layer.param_bytes, first.param_bytes + last.param_bytes
    shared -= vocabulary * model.width * item if model.tied else 0
    # Of unequal stages: rows beside the layers that a device holds, and what is sent for them.
    uneven = num_stages * chunks * rows > model.layers and not plan.asynchronous
    moved = chunks * layers if uneven else 0.0
    to_stages, back = schedules.layers_sent(schedule, num_stages, counts) if uneven else (0.0, 0.0)

    # Sums over micro-batches; the program returns them from branches, which copies them elsewhere.
    wide = max(item, 4) / item
    sums = wide * (chunks * layers + shared)
    copied = sums if device.tile is None else 0.0
    gathered = chunks * layers + shared if plan.data > 1 and plan.stage == 3 else 0.0

    # Slots: messages, what waits for a backward pass, and for its second half where it is split;
    # each has one for what nobody expects.
    stream, args = first.output_bytes, (plan.microbatches, chunks)
    slots = schedules.slots_of(schedule, num_stages, *args)
    stored = (slots.residuals + 1) * rows * layer.activation_bytes + (slots.messages + 1) * stream
    crossing = rows * layer.crossing_bytes if plan.splits_backward else 0.0
    stored += (slots.crossing + 1) * crossing

    # One backward pass: its residuals, beside the head or one layer. A loop over one layer is none:
    # nothing of it is stacked.
    logits = first.activation_bytes * vocabulary  # float32, as tokens are int32
    gradient = last.activation_bytes + last.working_bytes - stream - logits
    residuals, grads = (rows * layer.activation_bytes, layers) if rows > 1 else (0.0, 0.0)
    # Programs for GPUs hold a matrix of an odd vocabulary and its gradient once more.
    odd = 2.0 * vocabulary * model.width * item if copied and vocabulary % 8 else 0.0
    chunk = layers if chunks > 1 and rows > 1 else 0.0  # its parameters, taken out of all
    # Where ticks have forward passes, too, backward passes return zeros for the residuals of these,
    # beside their own, on all devices but TPUs; and copied sums not before their end.
    returned = 2 * residuals if copied else residuals
    at_head = returned + logits + max(odd, gradient) - copied
    if crossing:
        at_layers = returned + crossing + chunk + layer.working_bytes - copied
        working = max(at_head, at_layers, residuals + crossing, crossing + grads)
    else:
        of_head = logits + max(odd, gradient - copied)
        of_layers = grads + layer.working_bytes + chunk
        if copied and not chunk:
            of_layers = max(0.0, of_layers - wide * layers)  # not yet added to the copied sums
        working = residuals + max(of_head, of_layers)
        working = max(working, at_head) if schedule == "1f1b" else working

    # Without a flush: slots of two versions, beside the parameters that come and go.
    versions = 2 * held.params if plan.asynchronous else 0.0
    stage_of = [schedules.stage_of_chunk(schedule, num_stages, v) for v in range(len(ranges))]

    summed = 2 * (num_stages - 1) / num_stages * wide * shared
    summed += (to_stages + wide * back) * layer.param_bytes

    def of_stage(s: int) -> PipelineStage:
        numbers = [v for v, stage in enumerate(stage_of) if stage == s]
        own = tuple(ranges[v] for v in numbers)
        # Of activations, and of their gradients.
        sent = sum(stage_of[v + 1] != s for v in numbers if v + 1 < len(ranges))
        sent += sum(stage_of[v - 1] != s for v in numbers if v)
        mine = [cost for i, j in own for cost in costs[i:j]]
        return PipelineStage(
            layers=own,
            forward=sum(cost.forward for cost in mine),
            backward=sum(cost.backward for cost in mine),
            in_flight=schedules.max_in_flight(schedule, num_stages, s, *args),
            params=held.params + gathered + moved + versions,
            grads=sums + copied,
            state=held.opt_state + held.master - held.host,
            activations=stored + working,
            permuted=plan.microbatches * stream * sent,
            synced=held.wire,
            summed=0.0 if plan.asynchronous else summed,
        )

    return tuple(map(of_stage, range(num_stages)))
