"""The planner of pipelines: stages, the time of a step, and whether ZeRO alone is faster."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sharding._types import DType
from sharding._zero import Zero
from sharding.plan._format import Printed, Table, count, layer_range, seconds, size
from sharding.plan.cost import _pipeline_schedules as schedules
from sharding.plan.cost import _pipeline_stages as stages_of
from sharding.plan.cost._estimate import Plan, estimate, with_state_format
from sharding.plan.machine._devices import DeviceKind
from sharding.plan.model._layer_costs import LayerCost, activations_of, layer_costs
from sharding.plan.model._models import Decoder


@dataclasses.dataclass(frozen=True)
class StepTime:
    """A step of one kind of training on all devices."""

    name: str  # ``"pipeline"``, or the stage of ZeRO
    compute: float  # seconds, of a pipeline with its bubble and the transfers between its stages
    wire: float  # seconds of collectives, which compute may hide
    memory: float  # bytes of the fullest device, with activations
    fits: bool  # whether the device has this memory

    @property
    def overlapped(self) -> float:
        """Seconds where compute hides the wire, or the wire compute."""
        return max(self.compute, self.wire)

    @property
    def exposed(self) -> float:
        """Seconds where nothing is hidden."""
        return self.compute + self.wire


@dataclasses.dataclass(frozen=True)
class PipelinePlan(Printed):
    """A pipeline, and the fastest stage of ZeRO; ``str()`` makes tables, ``to_dict()`` JSON."""

    device: DeviceKind  #: the figures of a device
    num_replicas: int  #: of each stage; the number of devices is that times the number of stages
    zero_stage: int  #: the stage of ZeRO over the replicas
    microbatches: int  #: of each replica in a step
    schedule: str  #: its name, as ``estimate_pipeline`` takes it
    chunks: int  #: of layers on each device
    stages: tuple[stages_of.PipelineStage, ...]  #: one device of each stage
    bubble: float  #: the idle share of a step with equal operations
    ideal: float  #: seconds of compute of one device, if all devices shared it equally
    lockstep: float  #: seconds of compute, with the bubble; see ``lockstep_seconds``
    transfers: float  #: seconds of the transfers between stages, one in each tick
    pipeline: StepTime  #: the step
    alternative: StepTime  #: the fastest stage of ZeRO; if none fits, the smallest
    tokens: float  #: of all devices in a step
    notes: tuple[str, ...] = ()  #: whether to pipeline, and what else is worth knowing

    @property
    def recommended(self) -> str:
        """The name of the faster step of those that fit, if compute hides the wire; else empty."""
        fitting = [step for step in (self.alternative, self.pipeline) if step.fits]
        return min(fitting, key=lambda step: step.overlapped).name if fitting else ""

    def to_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON."""
        figures = dataclasses.asdict(self) | {"recommended": self.recommended}
        for row, stage in zip(figures["stages"], self.stages, strict=True):
            row["memory"] = stage.memory
        for name in ("pipeline", "alternative"):
            step = getattr(self, name)
            figures[name] |= {"overlapped": step.overlapped, "exposed": step.exposed}
        return figures

    def tables(self) -> list[Table]:
        """The tables to print: memory of a device, work and traffic by stage, both steps."""
        title = (
            f"{len(self.stages)} stages x {self.num_replicas} replicas, {self.microbatches} "
            f"micro-batches, {self.schedule}: one device"
        )
        held = self.stages[0]  # all hold alike
        left = self.device.memory - held.memory
        memory = (
            *map(size, (held.params, held.grads, held.state, held.activations, held.memory)),
            size(left) if left >= 0 else "too much",
        )
        columns = ("params", "gradients", "state", "activations", "total")
        work = [
            (
                *(str(number), _layers_text(stage), seconds(stage.forward + stage.backward)),
                *(str(stage.in_flight), *map(size, (stage.permuted, stage.synced, stage.summed))),
            )
            for number, stage in enumerate(self.stages)
        ]
        sent = ("to stages", "to replicas", "summed")
        headers = ("stage", "layers", "micro-batch", "in flight", *sent)

        # Both steps side by side. The bubble is where the slowest stage is idle.
        both = (self.pipeline, self.alternative)
        slowest = max(stage.forward + stage.backward for stage in self.stages)
        bubble = self.lockstep - self.microbatches * slowest
        rows = [
            ("bubble of equal stages", f"{self.bubble:.1%}", ""),
            ("compute", seconds(self.ideal), seconds(self.alternative.compute)),
            ("+ unequal stages", seconds(self.lockstep - bubble - self.ideal), ""),
            ("+ bubble", seconds(bubble), ""),
            ("+ transfers", seconds(self.transfers), ""),
            ("wire", *(seconds(step.wire) for step in both)),
            ("step, wire hidden", *(seconds(step.overlapped) for step in both)),
            ("step, nothing hidden", *(seconds(step.exposed) for step in both)),
            ("tokens/s, wire hidden", *(count(self.tokens / step.overlapped) for step in both)),
            ("memory", *(size(step.memory) for step in both)),
        ]
        names = [f"{x.name} *" if x.name == self.recommended else x.name for x in both]
        return [
            Table(title, (*columns, f"left of {size(self.device.memory)}"), [memory]),
            Table("Work and bytes sent in a step", headers, work),
            Table("One step", ("", *names), rows),
        ]


def _layers_text(stage: stages_of.PipelineStage) -> str:
    """``0-9 20-29``; the number of layers where there are many chunks."""
    if len(stage.layers) > 2:
        return f"{sum(j - i for i, j in stage.layers)} in {len(stage.layers)}"
    return " ".join(layer_range(range(i, j)) for i, j in stage.layers)


def estimate_pipeline(
    model: Decoder,
    tx: optax.GradientTransformation,
    zero: Zero,
    *,
    device: DeviceKind,
    num_stages: int,
    microbatches: int | None = None,
    schedule: str = "aligned",
    chunks: int | None = None,
    batch: int = 1,
    length: int | None = None,
    dtype: DType = jnp.bfloat16,
    recompute: bool = True,
    efficiency: float = 0.5,
    state_format: str | None = None,
) -> PipelinePlan:
    """What a pipeline would hold, send and take, beside ZeRO on the same devices.

    The layers are shared among the stages so that a step is as fast as possible, with the embedding
    in the first and the head in the last chunk. Ticks end on all devices at once
    (``lockstep_seconds``), and wait for one transfer between stages. All devices hold what the
    fullest stage needs, and the embedding and the head. ``zero`` runs over the replicas of a stage,
    which are neighbours. ZeRO alone trains on the same sequences with all devices.

    Args:
      model: one of ``MODELS``.
      tx: the transformation.
      zero: on all devices; its mesh may be abstract, and has an axis ``"host"`` or ``"slice"``
        where there are several. Its stage is that of the pipeline.
      device: the figures of a device.
      num_stages: of the pipeline, at least 2.
      microbatches: of a pipeline in a step; None: four for each stage.
      schedule: ``"gpipe"``, ``"1f1b"``, ``"aligned"``, ``"interleaved"``, ``"zb-h1"`` or
        ``"zb-v"``; the last two without recomputation.
      chunks: of layers on each device; None: 2 for ``"interleaved"`` and ``"zb-v"``, else 1.
      batch: sequences in a micro-batch.
      length: tokens of a sequence; None: as the model has it.
      dtype: of the parameters.
      recompute: whether each layer stores its input only, and is computed again.
      efficiency: the share of the device's peak that compute reaches.
      state_format: as for ``estimate``.

    Raises:
      ValueError: the devices cannot be shared among the stages, there are fewer layers than chunks,
        or the schedule does not take these numbers.

    >>> from sharding.plan import MODELS, kind_of
    >>> zero = Zero(jax.sharding.AbstractMesh((8,), ("data",)), stage=1)
    >>> plan = estimate_pipeline(MODELS["llama2-7b"], optax.adamw(1e-3), zero,
    ...                          device=kind_of("h100x8"), num_stages=4)
    >>> plan.recommended, round(plan.bubble, 3)
    ('stage 1', 0.158)
    """
    chunks = schedules.chunks_of(schedule, chunks)
    microbatches = microbatches or 4 * num_stages
    if schedule in schedules.ASYNC_SCHEDULES:
        raise ValueError(
            f"schedule {schedule!r} has no flush: search(..., asynchronous=True) plans it."
        )
    schedules.check_schedule(schedule, num_stages, microbatches, chunks, model.layers)
    if schedule in schedules.SPLIT_SCHEDULES and recompute:
        raise ValueError(
            f"schedule {schedule!r} splits backward passes, and computes nothing again: use "
            "recompute=False, on the command line --no-remat."
        )
    shape, network = dict(zero.mesh.shape), device.network or device.link
    groups = shape.get("host", 1) * shape.get("slice", 1)
    links = stages_of.Links(groups, zero.mesh.size, device.link, network)
    if num_stages < 2:
        raise ValueError(f"a pipeline needs at least 2 stages, got {num_stages}.")
    if links.devices % num_stages:
        raise ValueError(
            f"{links.devices} devices cannot be shared equally by {num_stages} stages; the number "
            "of stages must divide that of the devices."
        )
    length = length or model.length
    options: Any = {"batch": batch, "length": length, "recompute": recompute}
    options |= {"dtype": zero.precision.of_loss(jnp.dtype(dtype)), "efficiency": efficiency}
    costs = layer_costs(model, device, **options)
    num_replicas = links.devices // num_stages
    mesh = jax.sharding.AbstractMesh((num_replicas,), ("data",))
    flat: Any = {"axis": "data", "replica_axis": None, "shard_state_over_replicas": False}
    replicas = dataclasses.replace(zero, mesh=mesh, **flat)
    row = 4.0 * batch * (length + 1)  # bytes of a micro-batch
    options = {"num_stages": num_stages, "device": device, "batch": microbatches * row}
    formatted = with_state_format(tx, state_format)
    estimates = stages_of.StageEstimates(model, formatted, replicas, dtype=dtype, **options)

    # A layer in the middle, and the head; lookups take no time.
    weight = costs[1].weight if schedule in schedules.SPLIT_SCHEDULES else 0.0
    layer = schedules.LayerSeconds(costs[1].forward, costs[1].backward - weight, weight)
    head = costs[-1].forward + costs[-1].backward
    number = num_stages * chunks
    lockstep = functools.partial(
        schedules.lockstep_seconds, schedule, num_stages, microbatches, chunks=chunks
    )
    fastest = schedules.layers_of_chunks(model.layers, number, layer, head, lockstep)
    message = max(cost.output_bytes for cost in costs)
    ticks = schedules.num_ticks(schedule, num_stages, microbatches, chunks)
    transfers = ticks * links.permute_seconds(message)

    # Every device holds as many layers as the largest chunk has, and stages of unequal numbers of
    # layers send them: fewer layers in all chunks but the last, which has the head, may be better.
    fewer = range(max(fastest) - 1, math.ceil(model.layers / number) - 1, -1)
    smaller = (schedules.shared_layers(model.layers, number, most) for most in fewer)
    steps = []
    for counts in (fastest, *smaller):
        taken = layer.step(lockstep, head, counts)
        stages = stages_of.pipeline_stages(
            estimates, costs, counts, schedule=schedule, microbatches=microbatches
        )
        # Collectives: with the replicas, which are neighbours, then over all stages.
        wire = links.collective_seconds(stages[0].synced, num_replicas)
        wire += links.permute_seconds(stages[0].summed)
        held = stages[0].memory
        step = StepTime("pipeline", taken + transfers, wire, held, held <= device.memory)
        steps.append((stages, taken, step))
    fitting = [step for step in steps if step[2].fits]
    stages, taken, pipeline = min(fitting or steps[:1], key=lambda step: step[2].exposed)

    # ZeRO, with the same sequences on all devices.
    per_device = math.ceil(microbatches / num_stages)
    alternatives = estimate(
        *(model.abstract(dtype), tx, zero),
        microbatches=per_device,
        batch=per_device * row,
        state_format=state_format,
        device=device,
        gathered_once=model.gathered_once,
        activations=activations_of(model, device, costs),
    )

    plan = PipelinePlan(
        device=device,
        num_replicas=num_replicas,
        zero_stage=zero.stage,
        microbatches=microbatches,
        schedule=schedule,
        chunks=chunks,
        stages=stages,
        bubble=schedules.bubble_share(schedule, num_stages, microbatches, chunks),
        ideal=microbatches * sum(x.forward + x.backward for x in costs) / num_stages,
        lockstep=taken,
        transfers=transfers,
        pipeline=pipeline,
        alternative=_fastest_zero(alternatives, costs, links, per_device),
        tokens=float(num_replicas * microbatches * batch * length),
    )
    return dataclasses.replace(plan, notes=tuple(_notes(plan, links, message, ticks, efficiency)))


def _fastest_zero(
    plan: Plan, costs: list[LayerCost], links: stages_of.Links, microbatches: int
) -> StepTime:
    """The fastest stage of ZeRO that fits, with compute hiding the wire; else the smallest one."""
    assert plan.device is not None
    compute = microbatches * sum(cost.forward + cost.backward for cost in costs)
    steps = []
    for stage in plan.stages:
        slow = stage.network if links.groups > 1 else 0.0
        wire = max((stage.wire - slow) / links.link, slow / links.network)
        fits = stage.peak <= plan.device.memory
        steps.append(StepTime(stage.name, compute, wire, stage.peak, fits))
    fitting = [step for step in steps if step.fits]
    if not fitting:
        return min(steps, key=lambda step: step.memory)
    return min(fitting, key=lambda step: (step.overlapped, step.exposed, step.memory))


def _verdict(plan: PipelinePlan, links: stages_of.Links) -> str:
    """Whether to pipeline, with figures."""
    pipe, zero, name = plan.pipeline, plan.alternative, plan.device.name
    memory, several = size(plan.device.memory), links.groups > 1
    if not pipe.fits and not zero.fits:
        return (
            f"Neither fits a {name} with {memory}: the pipeline needs {size(pipe.memory)} on its "
            f"fullest device, {zero.name} {size(zero.memory)}."
        )
    if not zero.fits:
        return (
            f"Pipeline: no stage of ZeRO alone fits a {name} with {memory}; {zero.name} needs "
            f"least, {size(zero.memory)}, the fullest device of the pipeline {size(pipe.memory)}."
        )
    if not pipe.fits:
        return (
            f"Do not pipeline: its fullest device needs {size(pipe.memory)} of {memory}; "
            f"{zero.name} needs {size(zero.memory)}."
        )
    how = f"in {links.groups} groups of fast links" if several else "that share fast links"
    where = f"On {links.devices} devices {how}"
    lost = plan.lockstep - plan.ideal + plan.transfers
    behind = f"bubble, unequal stages and transfers cost the pipeline {seconds(lost)}"
    if zero.exposed <= pipe.overlapped:
        return (
            f"Do not pipeline. {where} a step takes {seconds(zero.exposed)} at {zero.name} even if "
            f"none of its wire time of {seconds(zero.wire)} is hidden, and "
            f"{seconds(pipe.overlapped)} in the pipeline: {behind}."
        )
    if zero.overlapped <= pipe.overlapped:
        return (
            f"Do not pipeline if compute hides the wire. {where} a step then takes "
            f"{seconds(zero.overlapped)} at {zero.name} and {seconds(pipe.overlapped)} in the "
            f"pipeline: {behind}. If none of the wire time is hidden, they take "
            f"{seconds(zero.exposed)} and {seconds(pipe.exposed)}: measure both."
        )
    return (
        f"Pipeline. {where} a step takes {seconds(pipe.overlapped)}, and "
        f"{seconds(zero.overlapped)} at {zero.name}, whose wire time of {seconds(zero.wire)} its "
        f"compute of {seconds(zero.compute)} cannot hide; the pipeline's is {seconds(pipe.wire)}."
    )


def _notes(
    plan: PipelinePlan, links: stages_of.Links, message: float, ticks: int, efficiency: float
) -> list[str]:
    """The verdict, and what the figures assume."""
    notes, stages = [_verdict(plan, links)], len(plan.stages)
    excess = plan.stages[0].memory - plan.device.memory
    if excess > 0:
        notes.append(f"warning: the stages do not fit, by {size(excess)}.")
    if plan.microbatches % stages:
        notes.append(
            f"{plan.microbatches} micro-batches are no multiple of {stages} stages: with ZeRO each "
            f"device has {math.ceil(plan.microbatches / stages)}, and some of them are empty."
        )
    needed = size(max(stage.permuted for stage in plan.stages))
    notes += [
        f"Bytes to stages are those that the schedule needs, at most {needed}; a program that "
        f"permutes in both directions in each of its {ticks} ticks sends "
        f"{size(2 * ticks * message)}.",
        f"Times assume {efficiency:.0%} of the peak of a {plan.device.name}, and its peak links; "
        "every tick waits for its transfer. Activations are those that the code of the model "
        "stores: its attention materializes scores.",
    ]
    if links.groups > 1 and not plan.device.network:
        notes.append(
            f"The network of a {plan.device.name} is not known: the figure of its link is taken."
        )
    return notes
