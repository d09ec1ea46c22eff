"""The planner: what each stage of ZeRO holds and sends, in closed form."""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from optax_ext import STATE_FORMATS, low_precision_state
from sharding._zero import Zero
from sharding.placement._describe import Description, Row
from sharding.placement._specs import AnyMesh, Axis, axes_of, num_shards
from sharding.plan._devices import DeviceKind
from sharding.plan._report import Table, count, seconds, size, text_of
from sharding.step._precision import Precision

# What is left for activations where a stage is recommended, as a share of the memory.
_ROOM = 0.2
_TIGHT = 0.1  # less than this share, and a warning is issued
_NO_ACTIVATIONS = (
    "Activations are not counted (?): they depend on the code of the model. audit compiles a step, "
    "and reads them from its program."
)


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """What one device holds and sends at one stage; all in bytes.

    Attributes:
      name: ``"stage 2"`` ...; ``"3 hybrid"`` cuts inside the copies, ``"3 spread"`` gradients and
        state over the copies, too.
      params: its parameters.
      grads: its gradients as the stage keeps them.
      unreduced: gradients of one micro-batch that are whole until they are reduced, beside them.
      opt_state: its optimizer state, without master weights.
      master: its master weights.
      batch: its part of the batch; 0 where that is not known.
      host: of the state, what lies in the host's memory instead.
      wire: what it sends in a step, in the ring convention; without what optimizers send.
      network: of that, what leaves a host or slice: the sums of a hybrid's copies.
      host_wire: what goes to the host's memory and comes from there in a step.
      moved: what it reads from and writes to its memory in a step, at least: parameters in the
        forward and the backward pass, gradients once, and twice what the update changes.
    """

    name: str
    params: float
    grads: float
    unreduced: float
    opt_state: float
    master: float
    batch: float
    host: float
    wire: float
    network: float
    host_wire: float
    moved: float

    @property
    def arguments(self) -> float:
        """What a step is given on the device: parameters, state and batch."""
        return self.params + self.opt_state + self.master + self.batch - self.host

    @property
    def memory(self) -> float:
        """That and gradients as ZeRO counts them, in bytes: no activations, nothing transient."""
        return self.arguments + self.grads

    @property
    def peak(self) -> float:
        """What a step needs at least: that and unreduced gradients."""
        return self.memory + self.unreduced


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the stages cost, side by side; ``str()`` makes a table of it, ``to_dict()`` JSON.

    Attributes:
      num_params: how many there are.
      mesh: the sizes of the mesh's axes.
      device: what a device can do, where that is known.
      stages: the stages.
      recommended: the name of one; empty where none fits, or nothing is known of the device.
      notes: why, and what else is worth knowing.
      tokens: of all devices in a step; 0 where that is not known.
      flops: floating-point operations of one device in a step; 0 where that is not known.
    """

    num_params: int
    mesh: dict[str, int]
    device: DeviceKind | None
    stages: tuple[StagePlan, ...]
    recommended: str
    notes: tuple[str, ...]
    tokens: float = 0.0
    flops: float = 0.0

    @property
    def fits(self) -> bool | None:
        """Whether any stage does; None where the device is not known."""
        if self.device is None:
            return None
        return min(stage.peak for stage in self.stages) <= self.device.memory

    def headroom(self, stage: StagePlan) -> float | None:
        """What a stage leaves for activations, as a share of the device's memory."""
        return None if self.device is None else 1 - stage.peak / self.device.memory

    def seconds(self, stage: StagePlan) -> dict[str, float]:
        """The least time of a step by what bounds it; empty where work or device is not known.

        A device computes, moves and sends at its peak; nothing is computed twice. What goes to
        other replicas takes the network where the mesh has an axis of hosts or slices.
        """
        if self.device is None or not self.flops:
            return {}
        slow = stage.network if {"host", "slice"} & set(self.mesh) and self.device.network else 0.0
        bounds = {
            "compute": self.flops / self.device.flops,
            "memory": stage.moved / self.device.bandwidth,
            "wire": (stage.wire - slow) / self.device.link,
        }
        if slow and self.device.network:
            bounds["network"] = slow / self.device.network
        return {name: value for name, value in bounds.items() if value}

    def tokens_per_second(self, stage: StagePlan) -> float | None:
        """Of all devices at best, where computing, moving and sending overlap completely."""
        bounds = self.seconds(stage)
        return self.tokens / max(bounds.values()) if bounds and self.tokens else None

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON takes it; ``activations``, which are not counted, are None."""
        found = dataclasses.asdict(self)
        for row, stage in zip(found["stages"], self.stages, strict=True):
            row |= {name: getattr(stage, name) for name in ("arguments", "memory", "peak")}
            row["activations"] = None
            row["headroom"] = self.headroom(stage)
            row["seconds"] = self.seconds(stage)
            row["tokens_per_second"] = self.tokens_per_second(stage)
        return found | {"fits": self.fits, "not_counted": ["activations"]}

    def tables(self) -> list[Table]:
        """What there is to show."""
        parts: list[tuple[str, Callable[[StagePlan], float]]] = [
            ("parameters", lambda s: s.params),
            ("gradients", lambda s: s.grads),
            ("optimizer state", lambda s: s.opt_state),
            ("master weights", lambda s: s.master),
            ("- on the host", lambda s: -s.host),
            ("batch", lambda s: s.batch),
            ("together", lambda s: s.memory),
            ("+ not yet reduced", lambda s: s.unreduced),
        ]
        rows = [
            (name, *(size(value(stage)) for stage in self.stages))
            for name, value in parts
            if any(value(stage) for stage in self.stages)
        ]
        rows.append(("+ activations", *("?" for _ in self.stages)))
        if self.device:
            left = [self.device.memory - stage.peak for stage in self.stages]
            name = f"left of {size(self.device.memory)}"
            rows.append((name, *(size(x) if x >= 0 else "too much" for x in left)))
        rows.append(("sent in a step", *(size(stage.wire) for stage in self.stages)))
        if any(stage.network for stage in self.stages):
            rows.append(("  to replicas", *(size(stage.network) for stage in self.stages)))
        if any(stage.host_wire for stage in self.stages):
            rows.append(("  to the host", *(size(stage.host_wire) for stage in self.stages)))
        rows += self._times()
        mesh = ", ".join(f"{axis}={number}" for axis, number in self.mesh.items())
        title = f"{self.num_params:,} parameters on {mesh}: one device"
        marked = [f"{s.name} *" if s.name == self.recommended else s.name for s in self.stages]
        return [Table(title, ("", *marked), rows)]

    def _times(self) -> list[tuple[str, ...]]:
        """Rows of lower bounds; a bound that nothing is known of is left out."""
        bounds = [self.seconds(stage) for stage in self.stages]
        names = ("compute", "memory", "wire", "network")
        rows = [
            (f"{name}, at least", *(seconds(each[name]) if name in each else "" for each in bounds))
            for name in names
            if any(name in each for each in bounds)
        ]
        best = [self.tokens_per_second(stage) for stage in self.stages]
        if any(best):
            rows.append(("tokens/s, at most", *(count(each) if each else "" for each in best)))
        return rows

    def __str__(self) -> str:
        return "\n".join([text_of(self.tables()), *self.notes])


def estimate(
    params: Any,
    tx: optax.GradientTransformation,
    mesh: AnyMesh,
    *,
    axis: Axis,
    replica_axis: Axis | None = None,
    param_specs: Any = None,
    precision: Precision = Precision(),
    microbatches: int = 1,
    min_shard_size: int = 4096,
    batch: float = 0.0,
    state_format: str | None = None,
    offload: bool = False,
    device: DeviceKind | None = None,
    gathered_once: str = "(?!)",
    tokens: float = 0.0,
    flops: float = 0.0,
) -> Plan:
    """What the stages of ZeRO would hold and send, without compiling anything.

    With S bytes of parameters on n devices and k micro-batches, a device sends, times (n-1)/n: 2 S
    at stages 0 and 1, (k+1) S at stage 2, 3 k S at stage 3; copies sum what each holds. Where a
    dim does not divide, the leaf stays whole, as ``Zero`` leaves it. State is that of
    ``tx.init``, whatever the transformation.

    Args:
      params: abstract parameters, or real ones.
      tx: the transformation.
      mesh: the mesh, real or abstract.
      axis: what ``Zero`` cuts over.
      replica_axis: what the hybrid rows take for copies; None for no such rows.
      param_specs: how parameters lie on other axes.
      precision: as ``Zero`` takes it.
      microbatches: how many are accumulated.
      min_shard_size: as ``Zero`` takes it.
      batch: bytes of one device's batch.
      state_format: one of ``optax_ext.STATE_FORMATS``: the plan is that of
        ``low_precision_state(tx, ...)``; None leaves the state as it is.
      offload: optimizer state and master weights lie in the host's memory.
      device: what to compare with; arrays are counted as they fill its memory.
      gathered_once: a pattern of the paths of parameters that stage 3 gathers once and keeps to the
        backward pass, as one outside its layers; all others are gathered twice.
      tokens: of all devices in a step, for the tokens per second at best.
      flops: floating-point operations of one device in a step, for the least time of a step.

    Returns:
      A ``Plan``; ``print`` it.

    Raises:
      ValueError: as ``Zero``; or the format is unknown.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from sharding.plan import estimate
      >>> mesh = jax.sharding.AbstractMesh((64,), ("data",))
      >>> params = {"w": jax.ShapeDtypeStruct((4096, 16384), jnp.bfloat16)}
      >>> found = estimate(params, optax.adam(1e-3), mesh, axis="data")
      >>> [round(stage.memory / 2**20) for stage in found.stages]
      [512, 260, 134, 8]

    References:
      Rajbhandari, Rasley, Ruwase, He: ZeRO: Memory Optimizations Toward Training Trillion
      Parameter Models, SC 2020, arXiv 1910.02054, section 5.
    """
    if state_format is not None and state_format not in STATE_FORMATS:
        known = ", ".join(map(repr, STATE_FORMATS))
        raise ValueError(f"state_format must be None or one of {known}, got {state_format!r}.")
    replicas = axes_of(replica_axis) if replica_axis else ()
    inner = axes_of(axis)
    if state_format is not None:
        tx = low_precision_state(tx, STATE_FORMATS[state_format])
    plain = Zero(
        mesh,
        3,
        (*replicas, *inner),
        min_shard_size=min_shard_size,
        precision=precision,
        offload="optimizer" if offload else None,
    )
    variants = [(f"stage {stage}", dataclasses.replace(plain, stage=stage)) for stage in range(4)]
    if replicas:
        hybrid = dataclasses.replace(plain, axis=inner, replica_axis=replicas)
        variants += [
            ("3 hybrid", hybrid),
            ("3 spread", dataclasses.replace(hybrid, shard_state_over_replicas=True)),
        ]
    state = (params, jax.eval_shape(tx.init, params))
    stages = []
    tile = device.tile if device else None
    described = [zero.describe(state, tx=tx, param_specs=param_specs) for _, zero in variants]
    local = described[0]  # at stage 0 nothing is cut but by the user's axes
    for (name, zero), found in zip(variants, described, strict=True):
        wire, network = _wire(zero, found, local, microbatches, gathered_once)
        filled = _in_tiles(found, tile)
        parts = _stage(name, zero, filled, local, microbatches)
        stages.append(StagePlan(**parts, batch=batch, wire=wire, network=network))
    num_params = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    recommended, reason = _recommend(stages, device)
    notes = (reason, *_tight(stages, device), _NO_ACTIVATIONS)
    return Plan(
        num_params, dict(mesh.shape), device, tuple(stages), recommended, notes, tokens, flops
    )


def _in_tiles(found: Description, tile: tuple[int, int] | None) -> Description:
    """The same arrays with the bytes that they take where memory is filled tile by tile.

    The compiler lays those dims innermost that waste least. Few rows take smaller tiles: 1, 2, 4.
    """
    if tile is None:
        return found

    def fill(row: Row) -> Row:
        cuts = [num_shards(found.mesh, PartitionSpec(entry)) for entry in row.spec]
        cuts += [1] * (len(row.shape) - len(cuts))
        shape = [extent // cut for extent, cut in zip(row.shape, cuts, strict=True)]
        if len(shape) < 2 or not all(shape):
            return row
        rows, columns = tile

        def waste(second: int, last: int) -> float:
            height = min(rows, 2 ** math.ceil(math.log2(shape[second])))
            filled = math.ceil(shape[second] / height) * height
            return filled / shape[second] * math.ceil(shape[last] / columns) * columns / shape[last]

        least = min(waste(*dims) for dims in itertools.permutations(range(len(shape)), 2))
        return dataclasses.replace(row, bytes_per_device=round(row.bytes_per_device * least))

    return dataclasses.replace(found, rows=tuple(map(fill, found.rows)))


def _stage(
    name: str,
    zero: Zero,
    found: Description,
    local: Description,
    microbatches: int,
) -> dict[str, Any]:
    """All of a ``StagePlan`` but the wire."""
    total = found.bytes_per_device
    rows = [row for row in found.rows if row.part == "opt_state"]
    master = sum(row.bytes_per_device for row in rows if _is_master(row))
    state = sum(row.bytes_per_device for row in rows if not _is_master(row))
    whole = 0.0  # gradients of one micro-batch
    for row in local.rows:
        dtype = _floating(row)
        if row.part == "params" and dtype is not None:
            width = zero.precision.of_loss(dtype).itemsize
            whole += row.bytes_per_device / dtype.itemsize * width
    grads = 0.0
    for row in found.rows:
        dtype = _floating(row)
        if row.part == "grads" and dtype is not None:
            width = zero.precision.of_accumulator(dtype).itemsize if microbatches > 1 else 0
            grads += row.bytes_per_device / dtype.itemsize * max(width, dtype.itemsize)
    if zero.stage == 2 or (zero.stage < 2 and microbatches > 1):
        unreduced = whole
    else:  # the copies' shard, until they have summed it
        unreduced = whole / zero.num_shards if zero.shard_state_over_replicas else 0.0
    host = found.host_bytes_per_device
    return {
        "name": name,
        "params": total["params"],
        "grads": grads,
        "unreduced": unreduced,
        "opt_state": state,
        "master": master,
        "host": host,
        "host_wire": 2 * host,
        "moved": 3 * microbatches * whole + 2 * (total["params"] + state + master - host),
    }


def _floating(row: Row) -> Any:
    """The dtype of an array of floating numbers; None for any other."""
    try:
        dtype = jnp.dtype(row.dtype)
    except TypeError:  # of random keys
        return None
    return dtype if jnp.issubdtype(dtype, jnp.floating) else None


def _is_master(row: Row) -> bool:
    return "master" in re.split(r"\W+", row.path)


def _wire(
    zero: Zero, found: Description, local: Description, k: int, gathered_once: str
) -> tuple[float, float]:
    """What one device sends in a step, and what of it goes to other copies."""
    n, copies = zero.num_shards, zero.num_devices // zero.num_shards
    total = outside = 0.0
    grads = {row.path: row for row in found.rows if row.part == "grads"}
    for row in local.rows:
        dtype = _floating(row)
        if row.part != "params" or dtype is None:
            continue
        elements = row.bytes_per_device / dtype.itemsize
        held = row.bytes_per_device
        seen = elements * zero.precision.of_loss(dtype).itemsize
        summed = elements * zero.precision.of_sum(zero.precision.of_loss(dtype)).itemsize
        if zero.stage == 0 or grads[row.path].note:
            total += 2 * summed * (n * copies - 1) / (n * copies)
            continue
        if zero.stage == 3:
            gathers = 1 if re.search(gathered_once, row.path) else 2
            passes = k * (gathers * seen + summed)
        else:
            passes = (k if zero.stage == 2 else 1) * summed + held
        total += passes * (n - 1) / n
        # The copies sum the shard; or each sums its part of it, and gathers what is new.
        cut_by = {axis for entry in grads[row.path].spec for axis in axes_of(entry)}
        second = held if cut_by & set(axes_of(zero.replica_axis)) else summed
        outside += (summed + second) / n * (copies - 1) / copies
    return total + outside, outside


def _recommend(stages: Sequence[StagePlan], device: DeviceKind | None) -> tuple[str, str]:
    """The stage that sends least among those that leave room, and why."""
    if device is None:
        return "", "What fits is not known: nothing is known of the device's memory."
    fitting = [stage for stage in stages if stage.peak <= device.memory]
    if not fitting:
        least = min(stages, key=lambda stage: stage.peak)
        return "", (
            f"Does not fit a {device.name}: {least.name} needs least, {size(least.peak)} of "
            f"{size(device.memory)}, before activations."
        )
    roomy = [stage for stage in fitting if stage.peak <= (1 - _ROOM) * device.memory]
    if not roomy:
        best = min(fitting, key=lambda stage: stage.peak)
        left = size(device.memory - best.peak)
        return best.name, (
            f"{best.name} is recommended: it needs least; only {left} are left for activations."
        )
    # Among equals the one that needs less.
    cheapest = min(stage.wire for stage in roomy)
    best = min(
        (stage for stage in roomy if stage.wire <= 1.01 * cheapest), key=lambda stage: stage.peak
    )
    left = size(device.memory - best.peak)
    return best.name, (
        f"{best.name} is recommended: it sends least among the stages that leave {_ROOM:.0%} of "
        f"the memory for activations ({left} here); ties go to the smaller."
    )


def _tight(stages: Sequence[StagePlan], device: DeviceKind | None) -> list[str]:
    """A warning of stages that fit, but leave next to nothing for activations."""
    if device is None:
        return []
    names = [s.name for s in stages if (1 - _TIGHT) * device.memory < s.peak <= device.memory]
    if not names:
        return []
    leave = "leaves" if len(names) == 1 else "leave"
    return [
        f"warning: {', '.join(names)} {leave} less than {_TIGHT:.0%} of the memory for activations "
        "and for what the allocator loses: hardly enough to train."
    ]


def count_to_params(count: int, dtype: Any = jnp.bfloat16) -> Any:
    """Abstract parameters of a number: matrices of (4096, 4096), and what is left."""
    side = 4096
    matrices, rest = divmod(count, side * side)
    rows, last = divmod(rest, side)
    shapes = {"matrices": (matrices, side, side), "rows": (rows, side), "rest": (last,)}
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items() if shape[0]}


def deepspeed_stage_2(num_params: float, devices: int) -> dict[str, float]:
    """What DeepSpeed says that Adam needs on a device at stage 2 without offload, in bytes.

    Its documentation counts 4 P + 16 P / n, its code 2 P + 18 P / n: two bytes a parameter of
    float16 weights; gradients in both float16 and float32, and float32 master and moments, cut.

    References:
      DeepSpeed's estimate_zero2_model_states_mem_needs and the page on memory requirements.
    """
    return {
        "documentation": 4 * num_params + 16 * num_params / devices,
        "code": 2 * num_params + 18 * num_params / devices,
    }


def saving_of(plan: Plan, other: Plan, name: str, names: tuple[str, str] = ("it", "AdamW")) -> str:
    """A sentence on what one optimizer saves beside another at a stage."""
    mine, theirs = (
        next(stage for stage in each.stages if stage.name == name) for each in (plan, other)
    )
    saved = theirs.memory - mine.memory
    share = saved / theirs.memory if theirs.memory else 0.0
    dominate = mine.params + mine.grads > 2 * (mine.opt_state + mine.master - mine.host)
    text = (
        f"At {name} {names[0]} holds {size(abs(saved))} {'less' if saved >= 0 else 'more'} than "
        f"{names[1]}: {abs(share):.0%} of a device's {size(theirs.memory)}."
    )
    if dominate and abs(share) < 0.1:
        text += " Parameters and gradients dominate; the optimizer hardly matters for memory here."
    return text


def why_wider(
    params: Any,
    tx: optax.GradientTransformation,
    other: optax.GradientTransformation,
    names: tuple[str, str] = ("it", "AdamW"),
) -> str:
    """A sentence where one optimizer keeps wider numbers than another; else empty.

    The moments of optax have the dtype of their parameters, bfloat16 as well.
    """
    mine, theirs = (_widest(params, each) for each in (tx, other))
    if theirs is None or mine is None or mine.itemsize <= theirs.itemsize:
        return ""
    return (
        f"{names[1]} keeps its moments in {theirs}, the dtype of the parameters; {names[0]} keeps "
        f"its averages in {mine}, so that small steps are not lost. With --master both are float32."
    )


def _widest(params: Any, tx: optax.GradientTransformation) -> Any:
    """The widest dtype of large floating arrays of the state, as wide parameters make them."""
    state = jax.tree.leaves(jax.eval_shape(tx.init, params))
    limit = max((math.prod(x.shape) for x in jax.tree.leaves(params)), default=0)
    wide = [
        jnp.dtype(x.dtype)
        for x in state
        if jnp.issubdtype(x.dtype, jnp.floating) and 2 * math.prod(x.shape) >= limit
    ]
    return max(wide, key=lambda dtype: dtype.itemsize, default=None)
