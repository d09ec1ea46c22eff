"""A plan beside the program of its step: memory, bytes sent and operations."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_ext import STATE_FORMATS, low_precision_state
from sharding.plan import targets
from sharding.plan._devices import DeviceKind
from sharding.plan._format import size
from sharding.plan._models import Decoder
from sharding.plan._plan import estimate
from sharding.plan.fastest._plan_file import PlanFile, lowered_step
from sharding.plan.pipelines._pipeline_flops import pipeline_flops
from sharding.plan.pipelines._pipeline_wire import pipeline_wire
from sharding.plan.program._audit import audit
from sharding.plan.timing._parallel_plan import ParallelPlan

# By how much bytes sent and operations may differ from those planned.
WIRE, FLOPS = 0.02, 0.01


@dataclasses.dataclass(frozen=True)
class Verification:
    """Figures of one device: as planned, and in the program.

    Attributes:
      planned_memory: bytes.
      memory: bytes.
      planned_wire: bytes sent in a step.
      wire: bytes sent in a step.
      planned_flops: operations of matrix products in a step.
      flops: operations of matrix products in a step.
      available: bytes that a plan may take.
    """

    planned_memory: float
    memory: float
    planned_wire: float
    wire: float
    planned_flops: float
    flops: float
    available: float

    @property
    def failures(self) -> tuple[str, ...]:
        """What does not hold; empty where the plan does."""
        found = []
        if self.memory > self.available:
            found.append(
                f"needs {size(self.memory)}, {size(self.memory - self.available)} too much"
            )
        if self.planned_wire and abs(self.wire / self.planned_wire - 1) > WIRE:
            found.append(f"sends {size(self.wire)}, {size(self.planned_wire)} were planned")
        if abs(self.flops / self.planned_flops - 1) > FLOPS:
            found.append(f"runs {self.flops / self.planned_flops:.3f} of the planned operations")
        return tuple(found)

    @property
    def summary(self) -> str:
        """The program over the plan, in one line."""
        wire = f"{self.wire / self.planned_wire:.3f}" if self.planned_wire else "-"
        return (
            f"program / plan: memory {self.memory / self.planned_memory:.3f}, wire {wire}, "
            f"operations {self.flops / self.planned_flops:.3f}"
        )


def verify(
    file: PlanFile,
    model: Decoder,
    tx: optax.GradientTransformation,
    *,
    memory: float,
    device: DeviceKind | None = None,
) -> Verification:
    """Compiles the step of a plan for its target, and compares; nothing is run.

    Args:
      file: the plan.
      model: the model.
      tx: the transformation, without the format of the plan's state.
      memory: bytes of a device that a plan may take.
      device: figures of the target, where they are not known.

    Raises:
      ValueError: the target cannot be compiled for, or the model does not fit the plan.
    """
    plan = file.plan
    if plan.state_format:
        tx = low_precision_state(tx, STATE_FORMATS[plan.state_format])
    model = dataclasses.replace(model, length=file.length)
    axes = file.mesh_axes
    mesh = targets.mesh(file.target, tuple(axes.values()), tuple(axes))
    found = audit(lowered_step(file, mesh, model, tx), mesh=mesh, device=device or file.target)
    return Verification(
        planned_memory=file.promised["memory"],
        memory=found.memory,
        planned_wire=planned_wire(file, mesh, model, tx),
        wire=found.wire_bytes,
        planned_flops=_planned_flops(file, model),
        flops=found.matmul_flops,
        available=memory,
    )


def planned_wire(
    file: PlanFile, mesh: Any, model: Decoder, tx: optax.GradientTransformation
) -> float:
    """Bytes that one device sends in a step, without what optimizers send."""
    plan, params, specs, sent = file.plan, model.abstract(jnp.dtype(file.dtype)), None, 0.0
    if plan.pipe > 1:
        pipeline = file.pipeline(mesh, model)
        params = pipeline.stack(params)
        specs = pipeline.param_specs(params)
        tokens = (plan.microbatches * plan.microbatch, file.length + 1)
        sent = pipeline_wire(pipeline, params, jax.ShapeDtypeStruct(tokens, jnp.int32))
    found = estimate(
        *(params, tx, file.zero(mesh)),
        param_specs=specs,
        microbatches=plan.microbatches if plan.pipe == 1 else 1,
        gathered_once=model.gathered_once if plan.pipe == 1 else "",
    )
    return found.stage(found.requested).wire + sent


def _planned_flops(file: PlanFile, model: Decoder) -> float:
    """Operations of matrix products of one device in a step, as ``audit`` counts them."""
    plan = file.plan
    if plan.pipe == 1:
        return planned_flops(model, plan)
    return pipeline_flops(
        *(model, file.schedule(), max(file.layers)),
        microbatch=plan.microbatch,
        recompute=plan.checkpoints_layers,
    )


def planned_flops(model: Decoder, plan: ParallelPlan) -> float:
    """Operations of matrix products of one device in a step, with those that run again.

    The last product of a layer does not run again: nothing needs its result.

    >>> from sharding.plan import MODELS
    >>> plans = [ParallelPlan(recompute=name) for name in ("none", "full")]
    >>> none, full = (planned_flops(MODELS["llama2-7b"], plan) for plan in plans)
    >>> round(full / none, 3)
    1.26
    """
    tokens = float(plan.microbatch * plan.microbatches * model.length)
    step = model.flops(tokens, model.length)
    if plan.recompute == "none":
        return step
    layers = step - dataclasses.replace(model, layers=0).flops(tokens, model.length)
    down = 2.0 * tokens * model.layers * model.width * model.hidden
    return step + layers / 3 - down
