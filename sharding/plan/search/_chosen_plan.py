"""A plan with what it takes: its time, its memory, and the lines that build it."""

import dataclasses
from typing import Any

from sharding.plan._format import count, entry, seconds, size
from sharding.plan.cost._parallel_plan import ParallelPlan
from sharding.plan.cost._step_time import StepSeconds
from sharding.plan.machine._devices import DeviceKind
from sharding.plan.model._saved_names import PARTLY, saved_parts


@dataclasses.dataclass(frozen=True)
class ChosenPlan:
    """A plan that was compared."""

    plan: ParallelPlan  #: how the step is shared
    seconds: StepSeconds  #: what it takes, by what it waits for
    held: dict[str, float]  #: bytes of the fullest device by what they are, and their ``"total"``
    #: seconds that no program of this plan can go below: everything at its peak, at once
    bound: float
    layers: tuple[int, ...]  #: of each chunk, from the first to the last
    tokens: float  #: of all devices in a step
    utilization: float  #: the share of the peak, without recomputation (MFU)

    @property
    def lossy(self) -> bool:
        return self.plan.lossy

    @property
    def memory(self) -> float:
        """Bytes of the fullest device."""
        return self.held["total"]

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all devices per second."""
        return self.tokens / self.seconds.seconds

    @property
    def summary(self) -> str:
        """The plan in short.

        >>> short(ParallelPlan(data=64, stage=3, replicas=8, microbatches=2, recompute="full"))
        'stage 3 over 8, 8 replicas; 2 micro-batches of 1; recompute full'
        """
        return short(self.plan)

    def row(self) -> tuple[str, ...]:
        """Its cells under ``COLUMNS``."""
        return (
            *cells(self.plan),
            seconds(self.seconds.seconds),
            f"{100 * self.utilization:.0f} %",
            count(self.tokens_per_second),
            size(self.memory),
            self.seconds.limit,
        )

    def to_dict(self, name: str = "", *, device: DeviceKind, headroom: float) -> dict[str, Any]:
        """Its figures, ready for JSON; it fits if it leaves a share of the device free."""
        return entry(
            *(name or self.summary, self.held),
            device=device,
            headroom=headroom,
            plan=self.plan,
            seconds=self.seconds.to_dict(),
            at_least={"total": self.bound},
            tokens=self.tokens,
            layers=[*self.layers],
            utilization=self.utilization,
            lossy=self.lossy,
        )


PLAN_COLUMNS = ("ZeRO", "tensor", "pipeline", "micro", "stored")
COLUMNS = (*PLAN_COLUMNS, "step", "MFU", "tokens/s", "memory", "most")


def cells(plan: ParallelPlan) -> tuple[str, ...]:
    """A plan in the cells of a table, under ``PLAN_COLUMNS``."""
    zero = f"{plan.stage}: {plan.shards}" if plan.data > 1 else "-"
    zero += f" x {plan.replicas}" if plan.replicas > 1 else ""
    zero += ", spread" if plan.spread else ""
    zero += ", host" if plan.offload else ""
    zero += ", master" if plan.weights == "master" else ""
    lossy = [plan.state_format or "", "rounded" * (plan.weights == "stochastic"), plan.sync or ""]
    zero += "".join(f", {word} (lossy)" for word in lossy if word)
    chunks = f" x {plan.chunks}" if plan.chunks > 1 else ""
    pipeline = f"{plan.pipe}{chunks} {plan.schedule}" if plan.pipe > 1 else "-"
    pipeline += ", even" * plan.even + " (lossy)" * plan.asynchronous
    stored = {"none": "all", "full": "input"}.get(plan.recompute, plan.recompute)
    if plan.recompute in PARTLY:
        stored = ", ".join(saved_parts(plan.recompute))
    tensor = str(plan.tensor) if plan.tensor > 1 else "-"
    return zero, tensor, pipeline, f"{plan.microbatches} of {plan.microbatch}", stored


def short(plan: ParallelPlan) -> str:
    """A plan in one line."""
    words = []
    if plan.pipe > 1:
        chunks = f", {plan.chunks} chunks" if plan.chunks > 1 else ""
        late = ", gradients one update late" if plan.asynchronous else ""
        even = ", equal" * plan.even
        words.append(f"{plan.pipe} pipeline stages ({plan.schedule}{chunks}{even}{late})")
    if plan.tensor > 1:
        words.append(f"{plan.tensor} devices a layer")
    if plan.data > 1:
        replicas = f", {plan.replicas} replicas" if plan.replicas > 1 else ""
        replicas += " that share the state" if plan.spread else ""
        words.append(f"stage {plan.stage} over {plan.shards}{replicas}")
    noun = "micro-batch" if plan.microbatches == 1 else "micro-batches"
    words += [f"{plan.microbatches} {noun} of {plan.microbatch}", f"recompute {plan.recompute}"]
    weights = {"master": "master weights", "stochastic": "stochastic rounding"}
    words += [
        "offload" * plan.offload,
        f"state in {plan.state_format}" if plan.state_format else "",
        weights.get(plan.weights, ""),
        f"gradients by {plan.sync}" if plan.sync else "",
    ]
    return "; ".join(filter(None, words))
