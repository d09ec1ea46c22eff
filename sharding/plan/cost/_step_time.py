"""The time of one training step of a decoder under a plan, in closed form."""

import collections
import dataclasses
import functools
import operator
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from sharding.plan._format import with_article
from sharding.plan.cost import _pipeline_schedules as schedules
from sharding.plan.cost._ledger import WorkRow, merged
from sharding.plan.cost._parallel_plan import MATMULS, ParallelPlan
from sharding.plan.cost._stage_plan import SentParams, zero_work
from sharding.plan.cost._wire_and_flops import (
    EXCHANGES,
    TENSOR_AXIS,
    SyncWork,
    expert_work,
    tensor_work,
)
from sharding.plan.machine._collective_time import Machine, collective_seconds
from sharding.plan.machine._devices import achieved
from sharding.plan.model._experts import EXPERT_AXIS
from sharding.plan.model._layer_costs import (
    COMPILED,
    Implementation,
    KernelSeconds,
    Roofline,
    head_work,
    layer_work,
)
from sharding.plan.model._models import Decoder

# How much slower computing and sending are on GPUs while both run: Zhu et al., Mist, EuroSys 2025,
# factors that its code has for A100. TPUs send by engines of their own.
COMPUTE_SLOWDOWN = 1.286
WIRE_SLOWDOWN = 1.039
PARTS_OF_STEP = (
    *("matmul", "elementwise", "overhead", "tensor", "bubble", "transfers", "data", "update"),
    "host",
)


@dataclasses.dataclass(frozen=True)
class StepSeconds:
    """Seconds of one step on the slowest device."""

    matmul: float  #: of matrix products, with those that are computed again
    elementwise: float  #: of passes over memory in all other operations, likewise
    overhead: float  #: of kernels beside their rooflines, likewise
    tensor: float  #: of collectives among the devices that share a layer, or its experts
    bubble: float  #: idle, in a pipeline; without a flush for the updates of other stages
    transfers: float  #: of messages between stages
    data: float  #: of gathering parameters and reducing gradients over data-parallel devices
    update: float  #: of the optimizer, with its products
    #: of moving optimizer state, and streamed layers, to and from host memory; of an update there,
    #: and of moving gradients and parameters
    host: float
    hideable: float  #: of computing that can run at the same time as ``data``
    interference: bool  #: whether computing and sending slow each other down, as on GPUs
    exposed: float = 0.0  #: of ``data``, what nothing can hide: compressed gradients

    @property
    def compute(self) -> float:
        """Seconds of forward and backward passes without any wire."""
        return self.matmul + self.elementwise + self.overhead

    @property
    def no_overlap(self) -> float:
        """Seconds if nothing overlaps."""
        passes = self.compute + self.tensor + self.bubble + self.transfers
        return passes + self.data + self.update + self.host

    @property
    def seconds(self) -> float:
        """The prediction.

        ``hideable`` computing runs beside ``data``, and both slow each other down on GPUs; the host
        link runs beside the update. All else is waited for.
        """
        passes = self.compute + self.tensor + self.bubble + self.transfers
        both = self._both(self.data - self.exposed) + self.exposed
        return passes - self.hideable + both + max(self.update, self.host)

    def _both(self, data: float) -> float:
        """Seconds of collectives and ``hideable`` together."""
        if not self.interference:
            return max(data, self.hideable)
        compute = self.hideable * COMPUTE_SLOWDOWN
        wire = data * WIRE_SLOWDOWN
        if compute < wire:
            return compute + (wire - compute) / WIRE_SLOWDOWN
        return wire + (compute - wire) / COMPUTE_SLOWDOWN

    @property
    def full_overlap(self) -> float:
        """Seconds if computing, all wires and the host link overlap completely."""
        wires = self.tensor + self.transfers + self.data
        return max(self.compute + self.update, wires, self.host) + self.bubble

    @property
    def limit(self) -> str:
        """What takes longest: a name of the attributes."""
        return max(PARTS_OF_STEP, key=lambda name: float(getattr(self, name)))

    def to_dict(self) -> dict[str, Any]:
        """Its parts, the prediction as ``total``, and both ends of it."""
        ends = {name: getattr(self, name) for name in ("full_overlap", "no_overlap")}
        parts = {name: getattr(self, name) for name in PARTS_OF_STEP}
        return parts | {"total": self.seconds} | ends


_ITEM = 2  # bytes of an activation


@dataclasses.dataclass(frozen=True)
class Passes:
    """Forward and backward passes of all micro-batches of a step, whatever ZeRO does."""

    work: KernelSeconds  # of kernels
    layers: float  # that the device has, in as many parts ZeRO gathers and reduces
    params: float  # of the device
    own_experts: float = 0.0  # of these, experts that others on the expert axis do not have
    outside: float = 0.0  # of these, those that no layer has
    chunks: tuple[int, ...] = ()  # layers of each chunk of a pipeline, from the first to the last
    tensor: float = 0.0  # seconds of collectives among the devices that share a layer
    bubble: float = 0.0  # seconds, idle in a pipeline
    transfers: float = 0.0  # seconds of messages and sums of gradients between stages

    @property
    def least(self) -> float:
        """Seconds below which no step with these passes can be predicted to go."""
        return self.work.seconds + self.tensor + self.bubble + self.transfers

    @property
    def least_overlapped(self) -> float:
        """The same where all wires are hidden: below ``StepSeconds.full_overlap``."""
        return max(self.work.seconds, self.tensor + self.transfers) + self.bubble


class StateCosts(NamedTuple):
    """What parameters and their update take, whatever the passes do; of one parameter bytes."""

    param: float = 2.0  # of itself, as it is gathered
    grad: float = 2.0  # of its gradient, as it is summed
    state: float = 12.0  # of optimizer state and master weights
    trained: float | None = None  # of itself, as it is updated: the part that is; None: all
    moved: float = 0.0  # that the update reads and writes, if more than all of these once
    products: float = 0.0  # operations of the update on one device
    sync: SyncWork | None = None  # in place of sums of gradients
    spared: float = 0.0  # where layers are gathered in codes: bytes less than ``param``

    @property
    def updated(self) -> float:
        return self.param if self.trained is None else self.trained


class _Clock:
    """Seconds of rows on the devices of a plan."""

    def __init__(self, plan: ParallelPlan, machine: Machine, ideal: bool):
        self.device = machine.device
        self.ideal = ideal
        # Stages of a pipeline are where they are without replicas, further apart than shards.
        nearest = plan.tensor, plan.experts
        tensor, experts, data, pipe = machine.groups((*nearest, plan.data, plan.pipe))
        *_, shards, replicas, _ = machine.groups((*nearest, plan.shards, plan.replicas, plan.pipe))
        self.groups = {
            (TENSOR_AXIS,): tensor,
            (EXPERT_AXIS,): experts,
            ("shards",): shards,
            ("replicas",): replicas,
            ("shards", "replicas"): data,
            ("pipe",): pipe,
        }

    def __call__(self, row: WorkRow) -> float:
        group = self.groups.get(row.on)
        if group is None:
            return row.amount / self._speed(row.on[0])
        op: Any = row.op
        return collective_seconds(op, row.amount, group, self.device, ideal=self.ideal)

    def total(self, rows: Iterable[WorkRow]) -> float:
        return sum(row.times * self(row) for row in rows)

    def _speed(self, unit: str) -> float:
        """Bytes or operations a second."""
        device = self.device
        if unit in ("flops", *MATMULS):
            matmuls = None if unit == "flops" else unit
            return Roofline(device, COMPILED, ideal=self.ideal, matmuls=matmuls).flops
        reached = achieved(device)
        if unit == "memory":
            return device.bandwidth * (1.0 if self.ideal else reached.memory)
        figure: float | None = getattr(device, unit)
        if figure is None:
            words = "the " + unit.replace("_", " ")
            name = with_article(device.name)
            raise ValueError(f"{words} of {name} is not known; offload needs it.")
        return figure * (1.0 if self.ideal else getattr(reached, unit))


def step_seconds(
    model: Decoder,
    plan: ParallelPlan,
    machine: Machine,
    *,
    length: int | None = None,
    implementation: Implementation = COMPILED,
    ideal: bool = False,
    each: tuple[float, float, float] = (2.0, 2.0, 12.0),
) -> StepSeconds:
    """What a step takes; nothing is compiled, nothing is measured.

    Devices that share a layer are nearest to each other, then those of ZeRO, its replicas, and the
    stages of a pipeline, whose layers are shared so that a step is as fast as possible. A pipeline
    takes ``lockstep_seconds``, and a transfer in each tick; ZeRO sends what ``estimate`` says, once
    in a step of a pipeline. Products in the update, as in Muon's, are known to ``search`` alone.

    Args:
      model: its dims.
      plan: how it is shared.
      machine: the devices.
      length: tokens of a sequence; None: the model's.
      implementation: how the program computes a layer.
      ideal: whether everything reaches its peak without latency: for lower bounds.
      each: bytes of a parameter as it is gathered, of its gradient as it is summed, and of its
        optimizer state and master weights.

    Raises:
      ValueError: the plan does not fit the model or the number of devices.

    >>> from sharding.plan import MODELS, kind_of
    >>> plan = ParallelPlan(data=8, stage=3, microbatch=4, recompute="none")
    >>> found = step_seconds(MODELS["llama2-7b"], plan, Machine(kind_of("h100"), 8))
    >>> f"{found.full_overlap:.2f} {found.seconds:.2f} {found.no_overlap:.2f}"
    '0.77 0.79 0.87'
    """
    plan.check(model)
    if plan.sync:
        raise ValueError(
            f"step_seconds does not know the shapes of gradients, of which the time of {plan.sync} "
            "depends: search does."
        )
    options: Any = {"implementation": implementation, "ideal": ideal}
    of_step = passes(model, plan, machine, length=length or model.length, **options)
    return with_state(plan, machine, of_step, StateCosts(*each), ideal=ideal)


def passes(
    model: Decoder,
    plan: ParallelPlan,
    machine: Machine,
    *,
    length: int,
    implementation: Implementation = COMPILED,
    ideal: bool = False,
    item: float = 2.0,
) -> Passes:
    """The passes of a step, alike for plans that differ in ``OF_STATE`` alone.

    Parameters have so many bytes where stages send them.
    """
    clock = _Clock(plan, machine, ideal)
    options: Any = {"microbatch": plan.microbatch, "length": length}
    options |= {"implementation": implementation, "ideal": ideal}
    layer = layer_work(
        *(model, machine.device),
        tensor=plan.tensor,
        experts=plan.experts,
        sequence_parallel=plan.sequence_parallel,
        matmuls=plan.matmuls,
        **options,
    )
    head_forward, head_backward = head_work(
        model, machine.device, tensor=model.shards_of_tokens(plan.tensor), **options
    )
    again = layer.again(plan.recompute, implementation)
    sums = tensor_work(model, plan, length=length, compiled=implementation.lockstep)
    sent, sent_back, sent_head = map(clock.total, (sums.forward, sums.backward, sums.head))
    if plan.experts > 1:
        row = expert_work(model, plan, length=length)
        each = clock(row) * (1 - model.dense_layers / model.layers)
        sent += EXCHANGES * each
        sent_back += (row.times - EXCHANGES) * each
    if plan.pipe == 1:
        sent_head += clock.total(sums.lookup)
    if implementation.collective_matmul and plan.sequence_parallel:
        # Beside the products, but for the first shard of each; gradients are twice the products.
        products = sum(part.seconds for part in layer.products.values())
        sent = max(sent / plan.tensor, sent - products)
        sent_back = max(sent_back / plan.tensor, sent_back - 2 * products - again.matmul)

    # Layers by chunk: the last chunk has the head, too.
    weight = layer.weight if plan.splits_backward else KernelSeconds()
    backward = layer.backward - weight + again
    of_layer = schedules.LayerSeconds(
        layer.forward.seconds + sent, backward.seconds + sent_back, weight.seconds
    )
    sizes = plan.schedule, plan.pipe, plan.microbatches
    lockstep = functools.partial(schedules.lockstep_seconds, *sizes, chunks=plan.chunks)
    even = plan.even or plan.asynchronous
    by_time = lockstep if implementation.lockstep and not even else None
    head = (head_forward + head_backward).seconds + sent_head
    chunks = plan.pipe * plan.chunks
    counts = schedules.layers_of_chunks(model.layers, chunks, of_layer, head, by_time)
    launch = 0.0 if ideal else implementation.launch
    parts = _Part(layer.forward, sent), _Part(backward, sent_back), _Part(weight, 0.0)
    most = [part.of(max(counts[:-1] or counts), launch) for part in parts]
    end = _launched(head_forward, launch, 0.0) + _launched(head_backward, launch, 0.0)
    last = [_Part(end, sent_head), *(part.of(counts[-1], launch) for part in parts)]
    one_program = implementation.lockstep
    work, wires, bubble = _slowest(plan, most, last, lockstep, one_program)
    return Passes(
        *(work * plan.microbatches, *_held_by(model, plan, clock.ideal, counts, one_program)),
        chunks=counts,
        tensor=plan.microbatches * wires,
        bubble=bubble,
        transfers=clock.total(
            _between(model, plan, clock.ideal, length, counts, one_program, item)
        ),
    )


def _held_by(
    model: Decoder, plan: ParallelPlan, ideal: bool, counts: tuple[int, ...], one_program: bool
) -> tuple[float, float, float, float]:
    """Layers of a device, its parameters, and of these experts and tables.

    The first stage has the embedding; in one compiled program all have both tables, and share
    layers equally. A bound takes what the fullest stage has at least.
    """
    held = model.layers / plan.pipe
    tables = 1 if model.tied else 2
    if plan.pipe > 1 and not one_program:
        tables = 0 if ideal else 1
    if not ideal and (not one_program or plan.asynchronous):
        held = float(max(counts) * plan.chunks)
    outside = tables * model.vocabulary * model.width / model.shards_of_tokens(plan.tensor)
    own_experts = held * model.expert_elements / plan.experts
    params = held * model.elements_of_device(plan.experts) / plan.tensor + outside
    return held, params, own_experts, outside


def _between(
    model: Decoder,
    plan: ParallelPlan,
    ideal: bool,
    length: int,
    counts: tuple[int, ...],
    one_program: bool,
    item: float,
) -> list[WorkRow]:
    """What stages send each other: a message in each tick.

    Where they are one program that waits for all, also gradients of tables, and layers of unequal
    stages with their gradients.
    """
    if plan.pipe == 1:
        return []
    message = _ITEM * plan.microbatch * length * model.width / (1 if one_program else plan.tensor)
    ticks = schedules.num_ticks(plan.schedule, plan.pipe, plan.microbatches, plan.chunks)
    rows = [WorkRow("transfers", "permute", message, ("pipe",), ticks)]
    if one_program and not plan.asynchronous:
        uneven = max(counts) * plan.chunks * plan.pipe > model.layers and not ideal
        layer = model.layer_elements / plan.tensor
        tables = (1 if model.tied else 2) * model.vocabulary * model.width
        rows += schedules.moved_params(
            *(plan.schedule, plan.pipe, counts if uneven else (), item * layer, layer),
            shared=tables / model.shards_of_tokens(plan.tensor),
        )
    return rows


class _Part(NamedTuple):
    """Kernels of a chunk of layers, and seconds of collectives between them."""

    work: KernelSeconds
    wires: float

    def of(self, layers: int, launch: float) -> "_Part":
        """Those of so many layers."""
        wires = self.wires * layers
        return _Part(_launched(self.work * layers, launch, wires), wires)

    @property
    def seconds(self) -> float:
        return self.work.seconds + self.wires


def _slowest(
    plan: ParallelPlan, most: list[_Part], last: list[_Part], lockstep: Any, one_program: bool
) -> tuple[KernelSeconds, float, float]:
    """Kernels and wires of the device with most to do in a micro-batch, and the bubble of a step.

    Of chunks like the slowest one, or with the last one.

    Forward, backward and second backward passes of both; of the latter the head first.
    """
    count = plan.microbatches
    chunks = plan.chunks
    work = functools.reduce(operator.add, [part.work for part in most])
    wires = sum(part.wires for part in most)
    work_last = functools.reduce(operator.add, [part.work for part in last])
    wires_last = sum(part.wires for part in last)
    if work_last.seconds + wires_last > work.seconds + wires:
        work = work * (chunks - 1) + work_last
        wires = wires * (chunks - 1) + wires_last
    else:
        work = work * chunks
        wires = wires * chunks
    bubble = 0.0
    if plan.pipe > 1:
        first, second, third = (part.seconds for part in most)
        if one_program:
            head, forward, backward, weight = last
            both = (forward.work + backward.work + head.work).seconds + wires_last
            taken = lockstep(first, second, weight=third, last=(both, weight.seconds))
        else:
            taken = lockstep(first, second, weight=third)
            taken += count * max(0.0, work.seconds + wires - chunks * (first + second + third))
        bubble = taken - count * (work.seconds + wires)
    return work, wires, bubble


def with_state(
    plan: ParallelPlan,
    machine: Machine,
    step_passes: Passes,
    costs: StateCosts,
    *,
    ideal: bool = False,
) -> StepSeconds:
    """A step of these passes, with the collectives of ZeRO, the update and the host link."""
    clock = _Clock(plan, machine, ideal)
    seconds = collections.defaultdict[Any, float](float)
    for row in _state_rows(plan, step_passes, costs, ideal):
        seconds[row.part, row.beside] += row.times * clock(row)
    # Gradients are reduced beside the last backward pass, at least.
    last = 2 / 3 / plan.microbatches
    shares = {"last backward": last, "backward": 2 / 3, "all": 1.0}
    if plan.pipe > 1:
        shares = dict.fromkeys(shares, last)
    data = {beside: value for (part, beside), value in seconds.items() if part == "data"}
    copies = seconds["host", ""]
    on_cpu = seconds["host", "copies"]
    work = step_passes.work
    update = seconds["update", ""]
    # Stages update in ticks of their own, one after the other.
    waiting = (plan.pipe - 1) * update if plan.asynchronous else 0.0
    return StepSeconds(
        matmul=work.matmul,
        elementwise=work.elementwise,
        overhead=work.overhead,
        tensor=step_passes.tensor,
        bubble=step_passes.bubble + waiting,
        transfers=step_passes.transfers,
        data=sum(data.values()),
        exposed=data.get("", 0.0),
        update=update,
        host=max(copies, on_cpu) if ideal else copies + on_cpu,
        hideable=max((shares.get(x, 0.0) for x in data), default=0.0) * work.seconds,
        interference=not machine.torus,
    )


def _state_rows(
    plan: ParallelPlan, step_passes: Passes, costs: StateCosts, ideal: bool
) -> Iterator[WorkRow]:
    """What data parallelism sends, what an update touches and computes, what the host link moves.

    The update reads and writes parameters, gradients and state once, at least. On the CPU it does
    so in host memory, which its share of the cores keeps busy; what goes back to the device for
    sums is not counted.
    """
    params = step_passes.params
    sync = costs.sync
    if plan.data > 1:
        # Stage 3 gathers those of no layer once for both passes, like all those of a pipeline.
        outside = step_passes.outside if plan.stage == 3 else 0.0
        options: Any = {"spread": plan.spread}
        of_layers: Any = {"layers": step_passes.layers, "once": plan.pipe > 1}
        sent = [
            SentParams(
                number * costs.grad,
                number * costs.updated,
                number * costs.param - spared,
                **own,
                **options,
            )
            for number, spared, own in (
                (params - outside, params * costs.spared, of_layers),
                (outside, 0.0, {"once": True}),
            )
            if number
        ]
        replicas = {"replicas": plan.replicas} if plan.replicas > 1 else {}
        times = plan.microbatches if plan.pipe == 1 else 1  # of a pipeline once in a step
        rows = zero_work(sent, plan.stage, {"shards": plan.shards}, replicas, times, sync)
        yield from rows if sync else merged(rows)  # replicas sum both at once
    if plan.experts > 1:  # each micro-batch sums the gradients of what all have
        common = (params - step_passes.own_experts) * costs.grad
        of_experts = (EXPERT_AXIS,)
        yield WorkRow("data", "all-reduce", common, of_experts, plan.microbatches, "backward")
    shards = plan.shards_of_state
    on_cpu = plan.offload == "update"
    each = 2 * (costs.updated + costs.state) + costs.grad
    touched = params * (each if ideal else max(each, costs.moved)) / shards
    by_sync = sync.moved if sync and not ideal else 0.0
    yield WorkRow("update", "passes", by_sync + (0.0 if on_cpu else touched), ("memory",))
    yield WorkRow("update", "products", costs.products, ("flops",))
    # State from host memory, and back at the same time; streamed parameters once in the forward
    # passes of all micro-batches and once where they are updated.
    linked = params / shards * costs.state
    if plan.update_in_backward:
        read = 2 * costs.param / (plan.shards if plan.stage == 3 else 1)
        linked = (params - step_passes.outside) * (costs.state / shards + read)
    if on_cpu:  # all gradients first, and all parameters last: one call in compiled programs
        linked = params / shards * (costs.grad + costs.updated) / (1 + ideal)
        yield WorkRow("host", "passes", touched, ("host_bandwidth",), beside="copies")
    if plan.offload:
        yield WorkRow("host", "copies", linked, ("host_link",))


def _launched(work: KernelSeconds, launch: float, sent: float) -> KernelSeconds:
    """Kernels that the host issues no faster than it can, while collectives run, too."""
    waiting = max(0.0, work.kernels * launch - work.seconds - sent)
    return work._replace(overhead=work.overhead + waiting)
