"""A pipeline beside ZeRO on the same devices: tables of what its stages hold, send and take."""

import dataclasses
from typing import Any

from sharding.plan._format import Printed, Table, count, layer_range, seconds, size
from sharding.plan.cost._pipeline_stages import PipelineStage
from sharding.plan.machine._devices import DeviceKind


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
    stages: tuple[PipelineStage, ...]  #: one device of each stage
    bubble: float  #: the idle share of a step with equal operations
    ideal: float  #: seconds of compute of one device, if all devices shared it equally
    lockstep: float  #: seconds of compute, with the bubble; see ``lockstep_seconds``
    transfers: float  #: seconds of the transfers between stages, one in each tick
    pipeline: StepTime  #: the step
    #: the fastest stage of ZeRO for the same sequences; if none fits, the smallest
    alternative: StepTime
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
        sizes = (held.params, held.grads, held.state, held.activations, held.memory)
        memory = [(*map(size, sizes), _left(self.device.memory - held.memory))]
        left = f"left of {size(self.device.memory)}"
        work = [
            (
                str(number),
                _layers_text(stage),
                seconds(stage.forward + stage.backward),
                str(stage.in_flight),
                size(stage.permuted),
                size(stage.synced),
                size(stage.summed),
            )
            for number, stage in enumerate(self.stages)
        ]
        columns = ("params", "gradients", "state", "activations", "total", left)
        headers = (
            "stage",
            "layers",
            "micro-batch",
            "in flight",
            "to stages",
            "to replicas",
            "summed",
        )
        return [
            Table(title, columns, memory),
            Table("Work and bytes sent in a step", headers, work),
            self._steps(),
        ]

    def _steps(self) -> Table:
        """Both steps side by side."""
        both = (self.pipeline, self.alternative)
        rows = [
            ("bubble of equal stages", f"{self.bubble:.1%}", ""),
            ("compute", seconds(self.ideal), seconds(self.alternative.compute)),
            ("+ unequal stages", seconds(self._unequal), ""),
            ("+ bubble", seconds(self._bubble_seconds), ""),
            ("+ transfers", seconds(self.transfers), ""),
            ("wire", *(seconds(step.wire) for step in both)),
            ("step, wire hidden", *(seconds(step.overlapped) for step in both)),
            ("step, nothing hidden", *(seconds(step.exposed) for step in both)),
            ("tokens/s, wire hidden", *(count(self.tokens / step.overlapped) for step in both)),
            ("memory", *(size(step.memory) for step in both)),
        ]
        names = [f"{x.name} *" if x.name == self.recommended else x.name for x in both]
        return Table("One step", ("", *names), rows)

    @property
    def _bubble_seconds(self) -> float:
        """The part of ``lockstep`` in which the slowest stage is idle."""
        slowest = max(stage.forward + stage.backward for stage in self.stages)
        return self.lockstep - self.microbatches * slowest

    @property
    def _unequal(self) -> float:
        return self.lockstep - self._bubble_seconds - self.ideal


def _left(nbytes: float) -> str:
    return size(nbytes) if nbytes >= 0 else "too much"


def _layers_text(stage: PipelineStage) -> str:
    """``0-9 20-29``; the number of layers where there are many chunks."""
    if len(stage.layers) > 2:
        return f"{sum(j - i for i, j in stage.layers)} in {len(stage.layers)}"
    return " ".join(layer_range(range(i, j)) for i, j in stage.layers)
