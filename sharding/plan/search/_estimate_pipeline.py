"""Whether to pipeline: the fastest pipeline of some stages beside the fastest plan without one."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import optax

from sharding.plan._format import Printed, Table, count, document, layer_range, seconds, size
from sharding.plan.cost._parallel_plan import PLAN_COLUMNS, cells
from sharding.plan.cost._pipeline_schedules import bubble_share
from sharding.plan.cost._plan_costs import PipelineStage, PlanCosts
from sharding.plan.cost._step_time import PARTS_OF_STEP
from sharding.plan.machine._devices import HEADROOM, DeviceKind
from sharding.plan.model._models import Decoder
from sharding.plan.search._plan_space import divisors
from sharding.plan.search._search import ChosenPlan, NoPlanFits, machine_of, search

# What a pipeline and the plan without one have in common, if it is kept.
_OF_BOTH = ("tensor", "offload", "state_format", "weights")


@dataclasses.dataclass(frozen=True)
class PipelinePlan(Printed):
    """A pipeline beside ZeRO alone; ``str()`` makes tables, ``to_dict()`` JSON."""

    target: str  #: the name of the machine
    device: DeviceKind  #: its figures
    headroom: float  #: the share of its memory that plans leave free
    pipeline: ChosenPlan  #: the fastest pipeline that fits; if none does, the smallest
    #: likewise without a pipeline; None where its devices cannot share the sequences
    alternative: ChosenPlan | None
    stages: tuple[PipelineStage, ...]  #: one device of each stage
    bubble: float  #: the idle share of a step with equal operations

    @property
    def memory(self) -> float:
        """Bytes of a device that a plan may take."""
        return self.device.memory * (1 - self.headroom)

    @property
    def steps(self) -> dict[str, ChosenPlan]:
        """Both plans by name: ``"pipeline"``, ``"ZeRO"``."""
        named = {"pipeline": self.pipeline, "ZeRO": self.alternative}
        return {name: step for name, step in named.items() if step}

    @property
    def recommended(self) -> str:
        """The name of the faster plan of those that fit; else empty."""
        steps = self.steps
        fitting = [name for name, step in steps.items() if step.memory <= self.memory]
        # Of equally fast ones ZeRO alone.
        return min(fitting, key=lambda name: (steps[name].seconds.seconds, name), default="")

    def to_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON, in the form of all commands."""
        plans = [step.to_dict(name) for name, step in self.steps.items()]
        stages = [dataclasses.asdict(x) | {"memory": x.memory} for x in self.stages]
        plans[0] |= {"stages": stages, "bubble": self.bubble}
        names = [*self.steps]
        return document(
            plans,
            device=self.device,
            num_devices=self.pipeline.plan.num_devices,
            headroom=self.headroom,
            chosen=names.index(self.recommended) if self.recommended else None,
            notes=[*self.notes],
        )

    def tables(self) -> list[Table]:
        plan, held = self.pipeline.plan, self.stages[0]  # all hold alike
        left, whole = self.device.memory - self.pipeline.memory, self.device.memory
        title = f"{plan.pipe} stages x {plan.data} replicas, {plan.schedule}"
        parts = (held.params, held.grads, held.state, held.activations, self.pipeline.memory)
        fits = self.pipeline.memory <= self.memory
        memory = (*map(size, parts), size(left) if fits else "too much")
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

        # Both steps side by side.
        steps = self.steps
        words = zip(PLAN_COLUMNS, *(cells(step.plan) for step in steps.values()), strict=True)
        rows = [row for row in words if {*row[1:]} != {"-"}]
        rows.append(("bubble of equal stages", f"{self.bubble:.1%}", *[""] * (len(steps) - 1)))
        shown = {name: name for name in PARTS_OF_STEP} | {
            "seconds": "step",
            "full_overlap": "step, all wires hidden",
            "no_overlap": "step, nothing hidden",
        }
        for name, text in shown.items():
            values = [getattr(step.seconds, name) for step in steps.values()]
            rows += [(text, *map(seconds, values))] if any(values) else []
        rows.append(("tokens/s", *(count(step.tokens_per_second) for step in steps.values())))
        rows.append(("memory", *(size(step.memory) for step in steps.values())))
        names = [f"{name} *" if name == self.recommended else name for name in steps]
        return [
            Table(f"{title}: one device", (*columns, f"left of {size(whole)}"), [memory]),
            Table("Work and bytes sent in a step", headers, work),
            Table("One step", ("", *names), rows),
        ]

    @property
    def notes(self) -> tuple[str, ...]:
        """Whether to pipeline, and what the figures assume."""
        excess = self.pipeline.memory - self.memory
        return (
            self._verdict(),
            *([f"warning: the stages do not fit, by {size(excess)}."] if excess > 0 else []),
            *(f"{name}: {step.summary}." for name, step in self.steps.items()),
            "Times are those of search: predicted, not measured. Activations are those that the "
            "code of the model stores: its attention materializes scores."
            + " A * marks what is recommended."
            * bool(self.recommended),
        )

    def _verdict(self) -> str:
        """Whether to pipeline, with figures."""
        pipe, zero, plan = self.pipeline, self.alternative, self.pipeline.plan
        if zero is None:
            start = "Pipeline: without one" if self.recommended else "Neither fits: with ZeRO alone"
            return f"{start} {plan.num_devices} devices cannot share {plan.sequences} sequences."
        if max(pipe.memory, zero.memory) > self.memory:
            fit = {"pipeline": "Pipeline: ZeRO does", "ZeRO": "Do not pipeline: stages do"}
            return (
                f"{fit.get(self.recommended, 'Both do')} not fit. Of {size(self.memory)} on "
                f"{self.target} the pipeline needs {size(pipe.memory)}, ZeRO {size(zero.memory)}."
            )
        a, b, which = pipe.seconds, zero.seconds, ("seconds", "full_overlap", "no_overlap")
        both = [(getattr(a, name), getattr(b, name)) for name in which]
        _, hidden, exposed = (" and ".join(map(seconds, times)) for times in both)
        measure = ": measure both" if len({x < y for x, y in both}) > 1 else ""
        return (
            f"{'Pipeline' if self.recommended == 'pipeline' else 'Do not pipeline'}. On "
            f"{plan.num_devices} devices a step takes {seconds(a.seconds)} in the pipeline, and "
            f"{seconds(b.seconds)} with ZeRO alone. Bubble and transfers of the pipeline are "
            f"{seconds(a.bubble + a.transfers)}, the wire of ZeRO {seconds(b.data)}. With all "
            f"wires hidden they take {hidden}, with none {exposed}{measure}."
        )


def _layers_text(stage: PipelineStage) -> str:
    """``0-9 20-29``; the number of layers where there are many chunks."""
    if len(stage.layers) > 2:
        return f"{sum(j - i for i, j in stage.layers)} in {len(stage.layers)}"
    return " ".join(layer_range(range(i, j)) for i, j in stage.layers)


def estimate_pipeline(
    model: Decoder,
    tx: optax.GradientTransformation,
    target: str,
    *,
    sequences: int,
    num_stages: int | None = None,
    keep: Mapping[str, Any] | None = None,
    headroom: float = HEADROOM,
    **options: Any,
) -> PipelinePlan:
    """What the fastest pipeline takes, beside the fastest plan without one.

    Both are plans of ``search``, for the same sequences on the same devices, and are timed and
    measured by it. The embedding is in the first and the head in the last chunk of layers, and all
    devices hold what the fullest stage needs. Devices share no layers, unless ``keep`` says so.

    Args:
      model: one of ``MODELS``, or a ``Decoder`` of one's own.
      tx: the transformation.
      target: the name of a machine, one of ``sharding.targets``.
      sequences: of all devices in a step.
      num_stages: of the pipeline, at least 2; None: the fastest number.
      keep: values that the pipeline must have, such as ``{"schedule": "1f1b", "stage": 1}``; those
        of the optimizer's state and of shared layers hold for both.
      headroom: the share of a device's memory that is left to the allocator.
      **options: others of ``search``, such as ``length`` and ``device``.

    Raises:
      ValueError: as ``search``, but for plans that do not fit.

    >>> from sharding.plan import MODELS
    >>> plan = estimate_pipeline(
    ...     MODELS["llama2-7b"], optax.adamw(1e-3), "h100x8", sequences=32, num_stages=4,
    ...     keep={"schedule": "aligned", "microbatches": 16})
    >>> plan.recommended, round(plan.bubble, 3)
    ('ZeRO', 0.158)
    """
    if num_stages is not None and num_stages < 2:
        raise ValueError(f"a pipeline needs at least 2 stages, got {num_stages}.")
    if not isinstance(model, Decoder):
        raise ValueError("a pipeline needs a Decoder, whose embedding, layers and head are known.")
    keep = {"tensor": 1} | dict(keep or {})
    machine = machine_of(target, options.get("device"))
    stages = num_stages or tuple(divisors(machine.num_devices)[1:])
    if not stages:
        raise ValueError(f"a pipeline needs at least 2 devices, {target} has one.")
    options |= {"sequences": sequences, "headroom": headroom}

    def best(**kept: Any) -> ChosenPlan:
        try:
            return search(model, tx, target, keep=kept, top=1, **options).best
        except NoPlanFits as error:
            return error.smallest

    pipeline, alternative = best(**keep | {"pipe": stages}), None
    if sequences % (machine.num_devices // keep["tensor"]) == 0:
        of_both = {name: value for name, value in keep.items() if name in _OF_BOTH}
        alternative = best(**of_both, pipe=1)
    named = {x: options[x] for x in ("length", "dtype", "implementation") if x in options}
    costs = PlanCosts(model, tx, machine, **named)
    plan = pipeline.plan
    return PipelinePlan(
        target=target,
        device=machine.device,
        headroom=headroom,
        pipeline=pipeline,
        alternative=alternative,
        stages=tuple(costs.stages(plan)),
        bubble=bubble_share(plan.schedule, plan.pipe, plan.microbatches, plan.chunks),
    )
