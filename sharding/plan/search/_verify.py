"""A plan beside the program of its step: memory, bytes sent and operations."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import optax

from sharding._types import DType, Tree
from sharding.pipeline import pipedream_2bw
from sharding.plan._format import size
from sharding.plan.audit._audit import audit
from sharding.plan.cost._ledger import (
    DIFFERS,
    Difference,
    Ledger,
    StepRows,
    WorkRow,
    differences,
    held_by_part,
)
from sharding.plan.cost._parallel_plan import ParallelPlan
from sharding.plan.cost._pipeline_schedules import schedule_of
from sharding.plan.cost._plan_costs import coded_in, sync_of_plan
from sharding.plan.cost._stage_plan import stage_plan
from sharding.plan.cost._wire_and_flops import (
    decoder_products,
    expert_rows,
    pipeline_work,
    products_of_units,
    tensor_row,
)
from sharding.plan.machine import targets
from sharding.plan.machine._devices import DeviceKind
from sharding.plan.model._models import Decoder
from sharding.plan.search._build import BuiltStep
from sharding.plan.search._plan_file import PlanFile
from sharding.plan.search._traced_model import AnyModel

# Updates of an asynchronous pipeline in the program that is verified.
LOWERED_UPDATES = 2
# By how much bytes sent and operations may differ from those planned.
WIRE = 0.02
FLOPS = 0.01


@dataclasses.dataclass(frozen=True)
class Verification:
    """The ledger of a plan and that of its program, of one device.

    What an optimizer sends and multiplies by itself, as Muon does, is not planned, and apart.
    """

    planned: Ledger  #: of a step; of an asynchronous pipeline of ``LOWERED_UPDATES``
    program: Ledger  #: likewise
    planned_memory: float  #: bytes
    memory: float  #: bytes
    available: float  #: bytes that a plan may take
    #: whether the compiler decides what is sent: 0.95 to 1.5 of what is planned
    partitioned: bool = False

    @property
    def planned_wire(self) -> float:
        """Bytes that are planned to be sent."""
        return self.planned.wire

    @property
    def wire(self) -> float:
        """Bytes that the program sends, but for the update."""
        return self.program.of_part("update", others=True).wire

    @property
    def update_wire(self) -> float:
        """Bytes that the update sends by itself, beside ``wire``."""
        return self.program.of_part("update").wire

    @property
    def planned_flops(self) -> float:
        """Operations of matrix products that are planned."""
        return self.planned.products

    @property
    def flops(self) -> float:
        """Operations of matrix products of the program, but for the update."""
        return self.program.of_part("update", others=True).products

    @property
    def update_flops(self) -> float:
        """Operations of matrix products of the update, beside ``flops``."""
        return self.program.of_part("update").products

    @property
    def differences(self) -> tuple[Difference, ...]:
        """Rows that differ by more than 3 %: by operation and axes, and parts of the memory."""
        return differences(self.planned, self.program)

    def to_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON."""
        names = ("planned_memory", "memory", "planned_wire", "wire", "planned_flops", "flops")
        others = ("available", "update_wire", "update_flops", "partitioned")
        found = {name: getattr(self, name) for name in (*names, *others)}
        found["differences"] = [row._asdict() for row in self.differences]
        return found | {"failures": [*self.failures]}

    @property
    def failures(self) -> tuple[str, ...]:
        """What does not hold; empty where the plan does."""
        excess = self.memory - self.available
        reasons = []
        if excess > 0:
            reasons.append(f"needs {size(self.memory)}, {size(excess)} too much")
        differs = self.planned_wire and abs(self.wire / self.planned_wire - 1) > WIRE
        if differs and not self.partitioned:
            reasons.append(f"sends {size(self.wire)}, {size(self.planned_wire)} were planned")
        if abs(self.flops / self.planned_flops - 1) > FLOPS:
            reasons.append(f"runs {self.flops / self.planned_flops:.3f} of the planned operations")
        return tuple(reasons)

    @property
    def correction(self) -> str:
        """What memory the program needs, if it is not that of the plan; else empty."""
        if abs(self.memory / self.planned_memory - 1) <= DIFFERS:
            return ""
        return f"needs {size(self.memory)}, {size(self.planned_memory)} were planned"

    @property
    def summary(self) -> str:
        """The program over the plan, in one line."""
        memory, wire, flops = self.ratios
        text = f"program / plan: memory {memory}, wire {wire}, operations {flops}"
        if not self.update_flops:
            return text
        share = self.update_flops / self.flops
        return f"{text}; the update runs {share:.1%} more and sends {size(self.update_wire)}"

    @property
    def ratios(self) -> tuple[str, str, str]:
        """Memory, bytes sent and operations of the program over those of the plan."""
        wire = f"{self.wire / self.planned_wire:.3f}" if self.planned_wire else "-"
        memory = self.memory / self.planned_memory
        flops = self.flops / self.planned_flops
        return f"{memory:.3f}", wire, f"{flops:.3f}"


def verify(
    file: PlanFile,
    model: AnyModel,
    tx: optax.GradientTransformation,
    *,
    memory: float,
    device: DeviceKind | None = None,
) -> Verification:
    """Compiles the step of a plan for its target, and compares; nothing is run.

    ``file`` is of a plan for ``model``, ``tx`` the transformation without the format of the plan's
    state and its weights; a plan may take ``memory`` bytes of a ``device``.

    Raises:
      ValueError: the target cannot be compiled for, or the model does not fit the plan.

    >>> import jax, jax.numpy as jnp
    >>> from sharding.plan import ParallelPlan, TracedModel, kind_of
    >>> init = lambda dtype: {"w": jnp.zeros((256, 256), dtype)}
    >>> batch = jax.ShapeDtypeStruct((8, 256), jnp.float32)
    >>> model = TracedModel(lambda params, x: jnp.mean((x @ params["w"]) ** 2), init, batch)
    >>> plan = ParallelPlan(microbatch=8, recompute="none")
    >>> file = PlanFile("mine", "adam", "cpu:1", 1, "float32", (), plan, {"memory": 2**20})
    >>> verify(file, model, optax.adam(1e-3), memory=2**30, device=kind_of("h100")).failures
    ()
    """
    plan = file.plan
    axes = file.mesh_axes
    if isinstance(model, Decoder):
        model = dataclasses.replace(model, length=file.length)
    devices = targets.mesh(file.target, tuple(axes.values()), tuple(axes))
    built = file.build(model, tx, devices, updates=LOWERED_UPDATES)
    mesh = built.zero.mesh
    audited = audit(built.lower(), mesh=mesh, device=device or file.target)
    program = audited.ledger()
    if plan.asynchronous:
        # An update is in each tick, of which the audit takes the dearest branch.
        program = program.of_part("update", others=True)
    planned = planned_rows(built, model, file.target, file.dtype, file.layers)
    if "activations" in file.promised:
        planned = dataclasses.replace(planned, buffers=held_by_part(file.promised))
    return Verification(
        planned=planned,
        program=program,
        planned_memory=file.promised["memory"],
        memory=audited.memory,
        available=memory,
        partitioned=built.is_partitioned,
    )


def planned_rows(
    built: BuiltStep, model: AnyModel, target: str, dtype: DType, layers: Sequence[int] = ()
) -> StepRows:
    """What one device sends and multiplies in a step, without what optimizers do by themselves.

    ``layers`` are those of the chunks of a pipeline, ``dtype`` is that of the parameters.
    """
    plan = built.plan
    mesh = built.zero.mesh
    dtype = jnp.dtype(dtype)
    params = model.abstract(dtype)
    schedule = _schedule(plan) if plan.pipe > 1 else None
    rows: list[WorkRow] = []
    if schedule is not None:
        pipeline = built.loss
        params = pipeline.stack(params)
        updates = schedule if plan.asynchronous else None
        batch = model.batch(plan.microbatches * plan.microbatch)
        rows += pipeline_work(pipeline, params, batch, specs=built.param_specs, updates=updates)
    if isinstance(model, Decoder):
        rows += decoder_products(model, plan, schedule, max(layers, default=0))
    else:
        options = plan.recompute, plan.tiles, plan.matmuls
        traced = model.traced(plan.microbatch * plan.data, dtype, *options)
        each = plan.microbatches / plan.data
        rows += products_of_units(traced.flops * each, traced.low * each, plan.matmuls)
    if isinstance(model, Decoder) and plan.experts > 1:
        sizes = {"itemsize": dtype.itemsize, "grad_itemsize": dtype.itemsize}
        rows += expert_rows(model, plan, **sizes)
    if isinstance(model, Decoder) and plan.tensor > 1:
        row = tensor_row(
            *(model, plan),
            itemsize=dtype.itemsize,
            adds_first=targets.parse(target).kind != "cpu",
            schedule=built.loss.schedule if plan.pipe > 1 else None,
            rows=max(layers, default=0),
        )
        rows.append(row)
    if not plan.asynchronous:
        rows += rows_of_zero(built, model, params, dtype)
    return StepRows(tuple(rows), dict(mesh.shape))


def rows_of_zero(
    built: BuiltStep, model: AnyModel, params: Tree, dtype: DType
) -> tuple[WorkRow, ...]:
    """What ZeRO sends in a step of these parameters, those of a pipeline once in it."""
    plan = built.plan
    options: Any = {"param_specs": built.param_specs, "gathered_once": ""}
    options |= {"sync": sync_of_plan(plan, model, dtype) if plan.sync else None}
    options |= {"trainable": model.trainable, "coded": coded_in(plan, model, dtype)}
    if plan.pipe == 1:
        options |= {"gathered_once": model.gathered_once, "microbatches": plan.microbatches}
    tx = built.tx or optax.identity()  # which sends nothing
    return stage_plan(params, tx, built.zero, **options).work


def _schedule(plan: ParallelPlan) -> Any:
    """Of the stages of a pipeline; without a flush of the updates in the program."""
    sizes = plan.pipe, plan.microbatches
    if plan.asynchronous:
        return pipedream_2bw(*sizes, LOWERED_UPDATES)
    return schedule_of(plan.schedule, *sizes, plan.chunks)
