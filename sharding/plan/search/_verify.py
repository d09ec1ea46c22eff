"""A plan beside the program of its step: memory, bytes sent and operations."""

import collections
import dataclasses
from typing import Any

import jax.numpy as jnp
import optax

from sharding.pipeline import pipedream_2bw
from sharding.plan._format import size
from sharding.plan.audit._audit import audit
from sharding.plan.cost._ledger import DIFFERS, Difference, WorkRow, differences, sent_over
from sharding.plan.cost._parallel_plan import ParallelPlan
from sharding.plan.cost._pipeline_schedules import schedule_of
from sharding.plan.cost._plan_costs import sync_of_plan
from sharding.plan.cost._stage_plan import stage_plan
from sharding.plan.cost._wire_and_flops import decoder_flops, pipeline_work, tensor_row
from sharding.plan.machine import targets
from sharding.plan.machine._devices import DeviceKind
from sharding.plan.model._models import Decoder
from sharding.plan.search._build import BuiltStep
from sharding.plan.search._plan_file import PlanFile
from sharding.plan.search._traced_model import AnyModel, TracedModel

# Updates of an asynchronous pipeline in the program that is verified.
LOWERED_UPDATES = 2
# By how much bytes sent and operations may differ from those planned.
WIRE, FLOPS = 0.02, 0.01


@dataclasses.dataclass(frozen=True)
class Verification:
    """Figures of one device: as planned, and in the program.

    What an optimizer sends and multiplies by itself, as Muon does, is not planned, and apart.
    """

    planned_memory: float  #: bytes
    memory: float  #: bytes
    planned_wire: float  #: bytes sent in a step; of an asynchronous pipeline in ``LOWERED_UPDATES``
    wire: float  #: bytes sent in a step
    planned_flops: float  #: operations of matrix products in a step, or in these updates
    flops: float  #: operations of matrix products in a step
    available: float  #: bytes that a plan may take
    update_wire: float = 0.0  #: bytes that the update sends by itself, beside ``wire``
    update_flops: float = 0.0  #: operations of matrix products of the update, beside ``flops``
    #: whether the compiler decides what is sent: 0.95 to 1.5 of what is planned
    partitioned: bool = False
    #: what is sent by operation and axes, and memory by part, where they differ by more than 3 %
    differences: tuple[Difference, ...] = ()

    @property
    def failures(self) -> tuple[str, ...]:
        """What does not hold; empty where the plan does."""
        excess, reasons = self.memory - self.available, []
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
        memory, flops = self.memory / self.planned_memory, self.flops / self.planned_flops
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
    plan, axes = file.plan, file.mesh_axes
    if isinstance(model, Decoder):
        model = dataclasses.replace(model, length=file.length)
    devices = targets.mesh(file.target, tuple(axes.values()), tuple(axes))
    built = file.build(model, tx, devices, updates=LOWERED_UPDATES)
    mesh = built.zero.mesh
    audited = audit(built.lower(), mesh=mesh, device=device or file.target)
    update_flops = audited.products.get("update", 0.0)
    sent: dict[str, float] = collections.defaultdict(float)
    of_program: dict[str, float] = collections.defaultdict(float)
    for work in planned_work(file, built, model):
        sent[sent_over(work.op, work.on, mesh.shape)] += work.sent(mesh.shape)
    update_wire = 0.0
    for row in audited.traffic:
        if row.phase == "update":
            update_wire += row.wire_bytes
        else:
            of_program[sent_over(row.op, row.axes, mesh.shape)] += row.wire_bytes
    # The plan's memory by part, if its file has it.
    held = {name: file.promised[name] for name in audited.by_part if name in file.promised}
    parts = {name: audited.by_part[name] for name in held}
    return Verification(
        planned_memory=file.promised["memory"],
        memory=audited.memory,
        planned_wire=sum(sent.values()),
        wire=audited.wire_bytes - update_wire,
        planned_flops=planned_flops(file, model),
        flops=audited.matmul_flops - update_flops,
        available=memory,
        update_wire=update_wire,
        partitioned=built.is_partitioned,
        # Without a flush an update is in each tick, of which the audit takes the dearest branch.
        update_flops=0.0 if plan.asynchronous else update_flops,
        differences=(*differences(sent, of_program), *differences(held, parts)),
    )


def planned_work(file: PlanFile, built: BuiltStep, model: AnyModel) -> tuple[WorkRow, ...]:
    """What one device sends in a step, without what optimizers send."""
    plan = file.plan
    dtype = jnp.dtype(file.dtype)
    params = model.abstract(dtype)
    rows: list[WorkRow] = []
    if plan.pipe > 1:
        pipeline, params = built.loss, built.loss.stack(params)
        updates = _schedule(plan) if plan.asynchronous else None
        batch = model.batch(plan.microbatches * plan.microbatch)
        rows += pipeline_work(pipeline, params, batch, specs=built.param_specs, updates=updates)
    if isinstance(model, Decoder) and plan.tensor > 1:
        row = tensor_row(
            *(model, plan),
            itemsize=dtype.itemsize,
            adds_first=targets.parse(file.target).kind != "cpu",
            schedule=built.loss.schedule if plan.pipe > 1 else None,
            rows=max(file.layers),
        )
        rows.append(row)
    if plan.asynchronous:
        return tuple(rows)
    options: Any = {"param_specs": built.param_specs, "gathered_once": ""}
    options |= {"sync": sync_of_plan(plan, params) if plan.sync else None}
    if plan.pipe == 1:
        options |= {"gathered_once": model.gathered_once, "microbatches": plan.microbatches}
    return (*rows, *stage_plan(params, built.tx, built.zero, **options).work)


def _schedule(plan: ParallelPlan) -> Any:
    """Of the stages of a pipeline; without a flush of the updates in the program."""
    sizes = plan.pipe, plan.microbatches
    if plan.asynchronous:
        return pipedream_2bw(*sizes, LOWERED_UPDATES)
    return schedule_of(plan.schedule, *sizes, plan.chunks)


def planned_flops(file: PlanFile, model: AnyModel) -> float:
    """Operations of matrix products of one device in a step, as ``audit`` counts them."""
    plan, dtype = file.plan, jnp.dtype(file.dtype)
    if isinstance(model, Decoder) and plan.pipe > 1:
        return decoder_flops(model, plan, _schedule(plan), max(file.layers))
    by_sync = sync_of_plan(plan, model.abstract(dtype)).flops if plan.sync else 0.0
    if isinstance(model, TracedModel):
        traced = model.traced(plan.microbatch * plan.data, dtype, plan.recompute)
        return plan.microbatches * traced.flops / plan.data + by_sync
    return decoder_flops(model, plan) + by_sync
