"""The plans that a search compares: every way to share a step among devices."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from sharding.plan._models import Decoder
from sharding.plan.fastest._traced_model import TracedModel
from sharding.plan.pipelines._pipeline_schedules import SCHEDULES
from sharding.plan.timing._parallel_plan import RECOMPUTE, ParallelPlan

# Forms of recomputation whose activations the planner knows.
SEARCHED = tuple(name for name in RECOMPUTE if name != "selective")
# What ``keep`` takes.
KEPT = (
    *("data", "tensor", "pipe", "microbatch", "microbatches", "stage", "replicas", "schedule"),
    *("chunks", "recompute", "offload", "state_format"),
)


@dataclasses.dataclass(frozen=True)
class PlanSpace:
    """All plans of a step.

    Devices are shared by stages of a pipeline and by data parallelism, in all divisors; sequences
    by micro-batches, likewise. Without a pipeline, each number of devices that divides the heads
    and the hidden values shares the layers. Stage 3 without a pipeline has all numbers of replicas,
    and layers that are computed again, but for what they save, as ``Zero.gathered`` does. A
    pipeline has each schedule, ``"interleaved"`` each number of chunks for which there are layers.

    Attributes:
      model: the model.
      num_devices: of the machine.
      sequences: of all devices in a step.
      recompute: what backward passes may compute again.
      offload: whether optimizer state may be in host memory.
      state_formats: formats of the optimizer state; others than None are lossy.
      param_bytes: of a parameter.
      state_bytes: of the state for one parameter, by format.
    """

    model: Decoder | TracedModel
    num_devices: int
    sequences: int
    recompute: tuple[str, ...] = SEARCHED
    offload: tuple[bool, ...] = (False, True)
    state_formats: tuple[str | None, ...] = (None,)
    param_bytes: float = 2.0
    state_bytes: Mapping[str | None, float] = dataclasses.field(default_factory=dict)

    def plans(self, keep: Mapping[str, Any] | None = None) -> Iterator[ParallelPlan]:
        """The plans; of those with the kept values only.

        Raises:
          ValueError: something is kept that plans do not have.
        """
        keep = dict(keep or {})
        for name in keep:
            if name not in KEPT:
                known = ", ".join(map(repr, KEPT))
                raise ValueError(f"keep has {name!r}; what can be kept is {known}.")
        for plan in self._all():
            if all(getattr(plan, name) == value for name, value in keep.items()):
                yield plan

    def _all(self) -> Iterator[ParallelPlan]:
        choices = itertools.product(self.recompute, self.offload, self.state_formats)
        common: list[dict[str, Any]] = [
            {
                "recompute": recompute,
                "offload": offload,
                "state_format": state_format,
                "param_bytes": self.param_bytes,
                "grad_bytes": self.param_bytes,
                "state_bytes": self.state_bytes.get(state_format, 12.0),
            }
            for recompute, offload, state_format in choices
        ]
        for pipe, tensor in self._meshes():
            data = self.num_devices // (pipe * tensor)
            if self.sequences % data:
                continue
            own = self.sequences // data
            for microbatch in divisors(own):
                sizes: dict[str, Any] = {
                    "data": data,
                    "tensor": tensor,
                    "pipe": pipe,
                    "microbatch": microbatch,
                    "microbatches": own // microbatch,
                }
                for form, rest in itertools.product([*self._forms(sizes)], common):
                    plan = ParallelPlan(**sizes, **form, **rest)
                    if plan.recompute != "none" or not plan.gathers_layers:
                        yield plan

    def _meshes(self) -> Iterator[tuple[int, int]]:
        """Stages of a pipeline, and devices that share each layer."""
        model = self.model
        shared = math.gcd(self.num_devices, model.heads, model.kv_heads, model.hidden)
        yield from ((1, tensor) for tensor in divisors(shared))
        yield from ((pipe, 1) for pipe in divisors(self.num_devices)[1:])

    def _forms(self, sizes: dict[str, int]) -> Iterator[dict[str, Any]]:
        """ZeRO stages with replicas, or with schedules and chunks of a pipeline."""
        pipe, count = sizes["pipe"], sizes["microbatches"]
        if pipe == 1:
            yield from ({"stage": stage} for stage in self._stages(sizes["data"]))
            if sizes["data"] > 1:
                yield from ({"stage": 3, "replicas": r} for r in divisors(sizes["data"])[1:-1])
            return
        for stage in self._stages(sizes["data"]):
            for schedule in SCHEDULES:
                if schedule != "interleaved":
                    if pipe <= self.model.layers:
                        yield {"stage": stage, "schedule": schedule}
                elif count % pipe == 0:
                    for chunks in range(2, self.model.layers // pipe + 1):
                        yield {"stage": stage, "schedule": schedule, "chunks": chunks}

    def _stages(self, data: int) -> tuple[int, ...]:
        return (0, 1, 2, 3) if data > 1 else (0,)


def divisors(number: int) -> list[int]:
    """All divisors, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [d for d in range(1, number + 1) if number % d == 0]


def check_recompute(recompute: tuple[str, ...]) -> None:
    """Raises unless the planner knows the activations of each form of recomputation."""
    unknown = [name for name in recompute if name not in SEARCHED]
    if unknown:
        known, found = (", ".join(map(repr, names)) for names in (SEARCHED, unknown))
        raise ValueError(f"recompute must be of {known}, got {found}.")
