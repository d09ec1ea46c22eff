"""The planner: what each stage of ZeRO holds and sends, in closed form."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax

from optax_ext import STATE_FORMATS, low_precision_state
from sharding._types import Tree
from sharding._zero import Zero
from sharding.plan._format import (
    Printed,
    Table,
    check_choice,
    count,
    document,
    entry,
    seconds,
    size,
    with_article,
)
from sharding.plan.cost._stage_plan import Coded, StagePlan, name_of, stage_plan, variants_of
from sharding.plan.cost._step_time import StepSeconds
from sharding.plan.machine._devices import HEADROOM, DeviceKind
from sharding.plan.model._layer_costs import Activations
from sharding.stored._forms import is_form

_NO_ACTIVATIONS = (
    "Activations are not counted (?): they depend on the code of the model. audit compiles a step, "
    "and reads them from its program."
)
_PLANNED_ACTIVATIONS = (
    "Activations are estimated, of one micro-batch, with temporaries and what is gathered at the "
    "fullest moment of a step. audit compiles a step, and reads them from its program."
)
_HYBRIDS = (
    "3 hybrid is stage 3 within each replica; in 3 spread replicas share gradients and optimizer "
    "state, too (shard_state_over_replicas)."
)
_DENSE_SYNC = (
    "Bytes sent are those of dense gradients: what another sync sends is not counted here. audit "
    "reads it from the program."
)


# Rows of memory in a table, and the fields of a stage that they show.
_PARTS = (
    *(("parameters", "params"), ("gradients", "grads"), ("optimizer state", "opt_state")),
    *(("master weights", "master"), ("- in host memory", "host"), ("gradient sync", "sync")),
    *(("batch", "batch"), ("total", "memory"), ("+ not yet reduced", "unreduced")),
)


@dataclasses.dataclass(frozen=True)
class Plan(Printed):
    """The stages side by side; ``str()`` makes a table of it, ``to_dict()`` JSON."""

    num_params: int  #: the number of parameters
    mesh: dict[str, int]  #: the sizes of the mesh's axes
    device: DeviceKind | None  #: the figures of a device, where they are known
    stages: tuple[StagePlan, ...]  #: 0 to 3, then hybrids
    recommended: str  #: the name of one; empty where none fits, or nothing is known of the device
    notes: tuple[str, ...]  #: the reason, and what else is worth knowing
    tokens: float = 0.0  #: of all devices in a step; 0 where that is unknown
    flops: float = 0.0  #: operations of one device in a step; 0 where that is unknown
    requested: str = ""  #: the name of the stage that the ``Zero`` runs
    #: what a step takes by the names of the stages; empty where it was not given
    predicted: Mapping[str, StepSeconds] = dataclasses.field(default_factory=dict)
    #: sequences of all devices that fit in a step, likewise
    most_sequences: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def stage(self, name: str) -> StagePlan:
        """The stage of this name, such as ``plan.requested``; a ``ValueError`` if there is none."""
        stages = {stage.name: stage for stage in self.stages}
        if name not in stages:
            names = ", ".join(map(repr, stages))
            raise ValueError(f"{name!r} is not in the plan; its stages are {names}.")
        return stages[name]

    @property
    def fits(self) -> bool | None:
        """Whether any stage fits; None where the device is unknown."""
        if self.device is None:
            return None
        return min(stage.peak for stage in self.stages) <= self.device.memory

    def headroom(self, stage: StagePlan) -> float | None:
        """The share of the device's memory that a stage leaves free."""
        return None if self.device is None else 1 - stage.peak / self.device.memory

    def seconds(self, stage: StagePlan) -> dict[str, float]:
        """The least time of a step by its bounds; empty where work or device is unknown.

        ``"network"`` is what leaves a host or slice, where the mesh has an axis of that name.
        """
        if self.device is None or not self.flops:
            return {}
        far = stage.network if {"host", "slice"} & set(self.mesh) else 0.0
        bounds = self.device.at_least(self.flops, stage.moved, stage.wire, far)
        return {name: value for name, value in bounds.items() if value}

    def tokens_per_second(self, stage: StagePlan) -> float | None:
        """The upper bound for all devices: computing, moving and sending overlap completely."""
        bounds = self.seconds(stage)
        return self.tokens / max(bounds.values()) if bounds and self.tokens else None

    def to_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON, in the form of all commands."""
        names = [stage.name for stage in self.stages]
        times = self.predicted
        return document(
            [
                entry(
                    stage.name,
                    stage.by_part(),
                    seconds=times[stage.name].to_dict() if times else None,
                    at_least=self.seconds(stage),
                    wire=stage.wire,
                    most_sequences=self.most_sequences.get(stage.name),
                    tokens=self.tokens or None,
                    zero=stage.to_dict(),
                )
                for stage in self.stages
            ],
            device=self.device,
            num_devices=math.prod(self.mesh.values()),
            chosen=names.index(self.recommended) if self.recommended else None,
            notes=[*self.notes],
            not_counted=[] if activations_counted(self.stages) else ["activations"],
        )

    def tables(self) -> list[Table]:
        # Memory: parts that no stage has are left out.
        rows = [
            (name, *(size(-value if field == "host" else value) for value in values))
            for name, field in _PARTS
            if any(values := [getattr(stage, field) for stage in self.stages])
        ]
        counted = activations_counted(self.stages)
        others = [stage.peak - stage.memory - stage.unreduced for stage in self.stages]
        rows.append(("+ activations", *(size(x) if counted else "?" for x in others)))
        if any(others) and not counted:
            rows.append(("+ gathered at the end", *map(size, others)))
        if self.device:
            left = [self.device.memory - stage.peak for stage in self.stages]
            name = f"left of {size(self.device.memory)}"
            rows.append((name, *(size(x) if x >= 0 else "too much" for x in left)))
        if most := self.most_sequences:
            rows.append(("sequences, at most", *(str(most[stage.name]) for stage in self.stages)))

        # Traffic, and lower bounds of times; unknown ones are left out.
        rows.append(("sent in a step", *(size(stage.wire) for stage in self.stages)))
        far = next((f"other {x}s" for x in ("slice", "host") if x in self.mesh), "replicas")
        for name, bytes_sent in ((far, "network"), ("host memory", "host_wire")):
            sent = [getattr(stage, bytes_sent) for stage in self.stages]
            rows += [(f"  to {name}", *map(size, sent))] if any(sent) else []
        bounds = [self.seconds(stage) for stage in self.stages]
        rows += [
            (f"{name}, at least", *(seconds(b[name]) if name in b else "" for b in bounds))
            for name in ("compute", "memory", "wire", "network")
            if any(name in b for b in bounds)
        ]
        if self.predicted:
            predicted = [self.predicted[stage.name].seconds for stage in self.stages]
            rows.append(("step, predicted", *map(seconds, predicted)))
        if self.predicted and self.tokens:
            rows.append(("tokens/s, predicted", *(count(self.tokens / x) for x in predicted)))
        best = [self.tokens_per_second(stage) for stage in self.stages]
        if any(best):
            rows.append(("  bound at the peak", *(count(x) if x else "" for x in best)))

        mesh = ", ".join(f"{axis}={number}" for axis, number in self.mesh.items())
        title = f"{self.num_params:,} parameters on {mesh}: one device"
        marked = [f"{s.name} *" if s.name == self.recommended else s.name for s in self.stages]
        return [Table(title, ("", *marked), rows)]


def estimate(
    params: Tree,
    tx: optax.GradientTransformation,
    zero: Zero,
    *,
    param_specs: Tree = None,
    microbatches: int = 1,
    batch: float = 0.0,
    state_format: str | None = None,
    device: DeviceKind | None = None,
    gathered_once: str | None = None,
    activations: Mapping[str, Activations] | Activations | float | None = None,
    update: str = "after",
    temporaries: bool = True,
    trainable: Tree = None,
    tokens: float = 0.0,
    flops: float = 0.0,
    predicted: Mapping[str, StepSeconds] | None = None,
    local_steps: int = 0,
    coded: Coded | None = None,
) -> Plan:
    """What a ``Zero`` would hold and send, beside the other stages; nothing is compiled.

    With S bytes of parameters on n devices and k micro-batches, a device sends, times (n-1)/n: 2 S
    at stages 0 and 1, (k+1) S at stage 2, 3 k S at stage 3; replicas sum their shards (Rajbhandari
    et al., ZeRO, SC 2020, section 5). With a ``replica_axis`` there are ``"3 hybrid"`` and ``"3
    spread"`` as well. The stage of ``zero`` itself is ``plan.stage(plan.requested)``.

    Args:
      params: parameters, abstract or real.
      tx: the transformation.
      zero: the ``Zero`` to plan; its mesh may be abstract.
      param_specs: how parameters are sharded over other axes, as for ``Zero.specs``.
      microbatches: how many are accumulated.
      batch: bytes of one device's batch.
      state_format: one of ``optax_ext.STATE_FORMATS``, as ``low_precision_state(tx, ...)`` has it.
      device: the device to compare with; arrays are counted as they fill its memory.
      gathered_once: a regular expression of the paths of parameters outside the layers that
        ``zero.gathered`` wraps, which stage 3 gathers once. All others are gathered twice, and
        stage 2, like stage 1 of one micro-batch, reduces their gradients layer by layer. None:
        stage 3 gathers all twice, the others reduce all after the backward pass.
      activations: of one device and one micro-batch, as ``activations_of`` counts them, or those of
        each stage by its name; or bytes of them and of temporaries, without parameters that stage 3
        gathers. None: they are not counted.
      update: ``"backward"`` where ``train_step`` updates each layer in the backward pass.
      temporaries: whether to count what is gathered and what waits to be reduced, too; False leaves
        them out, as the table of the ZeRO paper does.
      trainable: which parameters are trained, as in ``train_step``: others have no gradients.
      tokens: of all devices in a step, for an upper bound of the tokens per second.
      flops: floating-point operations of one device in a step, for a lower bound of its time.
      predicted: what a step takes by the names of the stages, such as ``step_seconds`` of each: the
        fastest is recommended. None: the stage that sends least.
      local_steps: of ``LocalSteps``, between two synchronizations of replicas: parameters are
        averaged in place of gradients, once in so many steps. 0: ordinary steps.
      coded: what stage 3 gathers in codes of products in few bits, as the report of
        ``matmuls.report_products`` has it; with an update after the backward pass.

    Raises:
      ValueError: as ``Zero.describe``; or the format is unknown; or ``activations`` is negative or
        not finite; or there are ``local_steps`` without a ``replica_axis``.

    >>> zero = Zero(jax.sharding.AbstractMesh((64,), ("data",)), stage=3)
    >>> params = {"w": jax.ShapeDtypeStruct((4096, 16384), "bfloat16")}
    >>> plan = estimate(params, optax.adam(1e-3), zero)
    >>> [round(stage.memory / 2**20) for stage in plan.stages]
    [512, 260, 134, 8]
    """
    tx = with_state_format(tx, state_format)
    if not isinstance(activations, Activations | Mapping | None):
        if not 0 <= activations < math.inf:
            raise ValueError(
                "activations must be None or a finite number of bytes, 0 or above, got "
                f"{activations}."
            )
        activations = Activations(float(activations))
    options: Any = {"param_specs": param_specs, "microbatches": microbatches, "batch": batch}
    options |= {"device": device, "gathered_once": gathered_once, "temporaries": temporaries}
    options |= {"update": update, "trainable": trainable, "local_steps": local_steps}
    options["coded"] = coded
    if local_steps < 0 or (local_steps and not zero.replica_axis):
        raise ValueError(
            f"local_steps are steps of replicas, 0 or more, got {local_steps} and "
            f"replica_axis={zero.replica_axis!r}: give Zero(replica_axis=...), or leave them out."
        )
    # The state is traced once, and placed once where the user's axes alone shard.
    variants = variants_of(zero)
    opt_state = jax.eval_shape(tx.init, params)
    placed: Any = {"tx": tx, "param_specs": param_specs, "trainable": trainable}
    unsharded = variants["stage 0"].describe((params, opt_state), **placed)
    options |= {"opt_state": opt_state, "local": unsharded}
    of_stages: Any = activations
    if not isinstance(activations, Mapping):
        of_stages = dict.fromkeys(variants, activations)
    stages = tuple(
        stage_plan(params, tx, each, activations=of_stages[name], **options)
        for name, each in variants.items()
    )
    recommended, notes = _recommend(stages, device, zero.mesh.shape, predicted or {})
    notes.append(_PLANNED_ACTIVATIONS if activations_counted(stages) else _NO_ACTIVATIONS)
    notes.append(_HYBRIDS * (zero.replica_axis is not None))
    return Plan(
        num_params=sum(math.prod(x.shape) for x in jax.tree.leaves(params, is_leaf=is_form)),
        mesh=dict(zero.mesh.shape),
        device=device,
        stages=stages,
        recommended=recommended,
        notes=(*filter(None, notes), *([_DENSE_SYNC] if zero.sync is not None else ())),
        tokens=tokens,
        flops=flops,
        requested=name_of(zero),
        predicted=predicted or {},
    )


def with_state_format(
    tx: optax.GradientTransformation, state_format: str | None
) -> optax.GradientTransformation:
    """The transformation with its state in one of ``optax_ext.STATE_FORMATS``; None: as it is."""
    if state_format is None:
        return tx
    check_choice("state_format", state_format, (None, *STATE_FORMATS))
    return low_precision_state(tx, STATE_FORMATS[state_format])


_ROOM = 0.2  # the share of the memory that a recommended stage leaves for activations


def activations_counted(stages: Sequence[StagePlan]) -> bool:
    """Whether activations are part of the stages."""
    return all(stage.activations is not None for stage in stages)


def _recommend(
    stages: Sequence[StagePlan],
    device: DeviceKind | None,
    mesh: Mapping[str, int],
    predicted: Mapping[str, StepSeconds],
) -> tuple[str, list[str]]:
    """The fastest stage of those that leave room, or the one that sends least; why, and a warning.

    The warning is of stages that leave hardly any.
    """
    if device is None:
        return "", ["What fits is not known: nothing is known of the device's memory."]
    counted = activations_counted(stages)
    room, use = (HEADROOM, "free") if counted else (_ROOM, "for activations")
    # Of equal ones the higher stage, then hybrids, as in search; a device alone has stage 0.
    several = max(mesh.values(), default=1) > 1
    ordered = (*stages[3::-1], *stages[4:]) if several else stages
    fitting = [stage for stage in ordered if stage.peak <= device.memory]
    if not fitting:
        least = min(stages, key=lambda stage: stage.peak)
        return "", [
            f"Does not fit {with_article(device.name)}: {least.name} needs least, "
            f"{size(least.peak)} of {size(device.memory)}, "
            f"{'with' if counted else 'before'} activations."
        ]
    roomy = [stage for stage in fitting if stage.peak <= (1 - room) * device.memory]
    best = min(fitting, key=lambda stage: stage.peak)
    if roomy and predicted:
        best = min(roomy, key=lambda stage: predicted[stage.name].seconds)
    elif roomy:
        # Within 1 % of the least time of sending, the smallest.
        far = bool({"host", "slice"} & set(mesh))
        sending = [max(device.at_least(0, 0, x.wire, far * x.network).values()) for x in roomy]
        if not any(sending):  # no speed is known
            sending = [float(x.wire) for x in roomy]
        most = 1.01 * min(sending)
        near = [stage for stage, taken in zip(roomy, sending, strict=True) if taken <= most]
        best = min(near, key=lambda stage: stage.peak)
    left = size(device.memory - best.peak)
    among = f"among the stages that leave {room:.0%} of the memory {use} ({left} here)"
    why = f"its step is predicted to be the fastest, {among}."
    if not roomy:
        why = f"it needs least; only {left} are left {use}."
    elif not predicted:
        why = (
            f"it sends least, to 1 %, {among}; ties go to the smaller. Steps are not timed: that "
            "needs the layers of a model, and all figures of a device."
        )
    notes = [f"{best.name} is recommended: {why} The * marks it."]
    least_free = (1 - HEADROOM) * device.memory
    tight = [stage.name for stage in stages if least_free < stage.peak <= device.memory]
    if tight:
        leave = "leaves" if len(tight) == 1 else "leave"
        uses = "free: hardly enough for what the allocator loses"
        if not counted:
            uses = "for activations and for what the allocator loses: hardly enough to train"
        names = ", ".join(tight)
        notes.append(f"warning: {names} {leave} less than {HEADROOM:.0%} of the memory {uses}.")
    return best.name, notes
