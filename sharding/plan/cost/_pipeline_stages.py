"""What one device of a pipeline holds and sends."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sharding._types import Array
from sharding._zero import Zero
from sharding.pipeline._layers import other_dim
from sharding.placement._specs import expand_specs, with_axis
from sharding.plan.cost import _pipeline_schedules as schedules
from sharding.plan.cost._stage_plan import StagePlan, stage_plan
from sharding.plan.machine._devices import DeviceKind
from sharding.plan.machine._tiles import num_bytes
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


@dataclasses.dataclass(eq=False)
class StageEstimates:
    """Plans of ZeRO over the replicas of the stages of a pipeline, computed once for equal rows."""

    model: Decoder
    tx: optax.GradientTransformation
    zero: Zero  # of the replicas of a stage alone; devices that share layers are "model"
    num_stages: int
    device: DeviceKind
    dtype: Any

    def __post_init__(self) -> None:
        axes = {"pipe": self.num_stages} | dict(self.zero.mesh.shape)
        mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
        self.zero = dataclasses.replace(self.zero, mesh=mesh)
        self.tensor = axes.get("model", 1)
        # Parameters of a layer, and of the embedding and the head.
        one = dataclasses.replace(self.model, scan=True, layers=1)
        of_one = one.abstract(self.dtype, self.tensor)
        self.layer_bytes = num_bytes(of_one["layers"])
        self.shared_bytes = num_bytes(of_one) - self.layer_bytes
        self.of_rows = functools.cache(self._of_rows)  # of devices with so many layers

    def _of_rows(self, rows: float) -> StagePlan:
        layers = round(self.num_stages * rows)
        stacked = dataclasses.replace(self.model, scan=True, layers=layers)
        params = stacked.abstract(self.dtype)
        specs = stacked.specs(shards=self.tensor) if self.tensor > 1 else dict.fromkeys(params)
        specs = expand_specs(specs, params)

        def over_stages(x: Array, spec: Any) -> Any:
            uneven = layers % self.num_stages
            dim = other_dim(x.shape, self.num_stages, spec) if uneven else 0
            return spec if dim is None else with_axis(spec, x.ndim, dim, "pipe")

        specs["layers"] = jax.tree.map(over_stages, params["layers"], specs["layers"])
        return stage_plan(
            *(params, self.tx, self.zero),
            param_specs=specs,
            device=self.device,
            gathered_once="",  # stage 3 gathers all that a device has once in a step
        )


def pipeline_stages(
    estimates: StageEstimates,
    costs: Sequence[LayerCost],
    counts: Sequence[int],
    *,
    schedule: str,
    microbatches: int,
) -> tuple[PipelineStage, ...]:
    """The devices of a pipeline whose forward passes store what ``costs`` say."""
    model, zero, num_stages = estimates.model, estimates.zero, estimates.num_stages
    chunks = len(counts) // num_stages
    # The first layer of each chunk and the one after its last, with the embedding and the head.
    ends = [1 + number for number in itertools.accumulate(counts)]
    ranges = list(itertools.pairwise([0, *ends[:-1], ends[-1] + 1]))
    rows = max(counts)
    asynchronous = schedule in schedules.ASYNC_SCHEDULES
    held = estimates.of_rows(rows * chunks if asynchronous else model.layers / num_stages)
    layers, shared = rows * estimates.layer_bytes, estimates.shared_bytes  # layers of one chunk
    # Of unequal stages: rows beside the layers that a device holds, and what is sent for them.
    uneven = num_stages * chunks * rows > model.layers and not asynchronous
    moved = chunks * layers if uneven else 0.0
    to_stages, back = schedules.layers_sent(schedule, num_stages, counts) if uneven else (0.0, 0.0)

    # Sums over micro-batches; the program returns them from branches, which copies them elsewhere.
    item = jnp.dtype(estimates.dtype).itemsize
    wide = max(item, 4) / item
    sums = wide * (chunks * layers + shared)
    copied = sums if estimates.device.tile is None else 0.0
    gathered = chunks * layers + shared if zero.num_devices > 1 and zero.stage == 3 else 0.0

    # Slots: messages, what waits for a backward pass, and for its second half where it is split;
    # each has one for what nobody expects.
    layer, stream = costs[1], costs[0].output_bytes
    slots = schedules.slots_of(schedule, num_stages, microbatches, chunks)
    stored = (slots.residuals + 1) * rows * layer.activation_bytes + (slots.messages + 1) * stream
    crossing = rows * layer.crossing_bytes if schedule in schedules.SPLIT_SCHEDULES else 0.0
    stored += (slots.crossing + 1) * crossing

    # One backward pass: its residuals, beside the head or one layer. A loop over one layer is none:
    # nothing of it is stacked.
    vocabulary = model.vocabulary // model.shards_of_tokens(estimates.tensor)
    logits = costs[0].activation_bytes * vocabulary  # float32, as tokens are int32
    gradient = costs[-1].activation_bytes + costs[-1].working_bytes - stream - logits
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
    versions = 2 * held.params if asynchronous else 0.0
    stage_of = [schedules.stage_of_chunk(schedule, num_stages, v) for v in range(len(ranges))]

    summed = 2 * (num_stages - 1) / num_stages * wide * shared
    summed += (to_stages + wide * back) * estimates.layer_bytes

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
            in_flight=schedules.max_in_flight(schedule, num_stages, s, microbatches, chunks),
            params=held.params + gathered + moved + versions,
            grads=sums + copied,
            state=held.opt_state + held.master - held.host,
            activations=stored + working,
            permuted=microbatches * stream * sent,
            synced=held.wire,
            summed=0.0 if asynchronous else summed,
        )

    return tuple(map(of_stage, range(num_stages)))
