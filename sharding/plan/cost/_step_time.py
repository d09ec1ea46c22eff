"""The time of one training step of a decoder under a plan, in closed form."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

from sharding.plan._format import with_article
from sharding.plan.cost import _pipeline_schedules as schedules
from sharding.plan.cost._parallel_plan import ParallelPlan
from sharding.plan.cost._wire_and_flops import SCALAR, SyncWork, tensor_sums
from sharding.plan.machine._collective_time import Machine, Operation, collective_seconds
from sharding.plan.machine._devices import DeviceKind, achieved
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
COMPUTE_SLOWDOWN, WIRE_SLOWDOWN = 1.286, 1.039
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
    tensor: float  #: of collectives among the devices that share a layer
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
        compute, wire = self.hideable * COMPUTE_SLOWDOWN, data * WIRE_SLOWDOWN
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
_GRADIENT_SUM = 4  # bytes of a gradient that is accumulated
# The share of a PCIe link that copies reach, 55 of 63 GB/s: Bekman, Machine Learning Engineering.
_HOST_LINK = 0.88
# The share of the bandwidth of host memory that CPUs reach: STREAM on a socket of DGX A100 by 32
# threads, 148 of 204.8 GB/s (gist.github.com/v0dro/0559e1d9b205ca9ac0ad1a29fe10377b).
_HOST_MEMORY = 0.72


@dataclasses.dataclass(frozen=True)
class Passes:
    """Forward and backward passes of all micro-batches of a step, whatever ZeRO does."""

    work: KernelSeconds  # of kernels
    layers: float  # that the device has, in as many parts ZeRO gathers and reduces
    params: float  # of the device
    chunks: tuple[int, ...] = ()  # layers of each chunk of a pipeline, from the first to the last
    tensor: float = 0.0  # seconds of collectives among the devices that share a layer
    bubble: float = 0.0  # seconds, idle in a pipeline
    transfers: float = 0.0  # seconds of messages and sums of gradients between stages
    outside: float = 0.0  # of the parameters, those that no layer has

    @property
    def least(self) -> float:
        """Seconds below which no step with these passes can be predicted to go."""
        return self.work.seconds + self.tensor + self.bubble + self.transfers

    @property
    def least_overlapped(self) -> float:
        """The same where all wires are hidden: below ``StepSeconds.full_overlap``."""
        return max(self.work.seconds, self.tensor + self.transfers) + self.bubble


# Seconds of a collective: of its operation, its bytes, and the kind of parallelism.
_Wire = Callable[[Operation, float, str], float]


def _wire_of(plan: ParallelPlan, machine: Machine, ideal: bool) -> _Wire:
    # Stages of a pipeline are where they are without replicas; these are further apart than shards.
    tensor, data, pipe = machine.groups((plan.tensor, plan.data, plan.pipe))
    _, shards, replicas, _ = machine.groups((plan.tensor, plan.shards, plan.replicas, plan.pipe))
    groups = {"tensor": tensor, "shards": shards, "replicas": replicas, "data": data, "pipe": pipe}

    def wire(operation: Operation, nbytes: float, over: str) -> float:
        return collective_seconds(operation, nbytes, groups[over], machine.device, ideal=ideal)

    return wire


def step_seconds(
    model: Decoder,
    plan: ParallelPlan,
    machine: Machine,
    *,
    length: int | None = None,
    implementation: Implementation = COMPILED,
    ideal: bool = False,
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
    return with_state(plan, machine, of_step, ideal=ideal)


def passes(
    model: Decoder,
    plan: ParallelPlan,
    machine: Machine,
    *,
    length: int,
    implementation: Implementation = COMPILED,
    ideal: bool = False,
) -> Passes:
    """The passes of a step, alike for plans that differ in ``OF_STATE`` alone."""
    wire, device = _wire_of(plan, machine, ideal), machine.device
    options: Any = {"microbatch": plan.microbatch, "length": length}
    options |= {"implementation": implementation, "ideal": ideal}
    layer = layer_work(
        model, device, tensor=plan.tensor, sequence_parallel=plan.sequence_parallel, **options
    )
    head_forward, head_backward = head_work(
        model, device, tensor=model.shards_of_tokens(plan.tensor), **options
    )
    again = layer.again(plan.recompute, implementation)
    sent, sent_back, sent_head = _tensor_seconds(model, plan, length, wire, implementation.lockstep)
    if implementation.collective_matmul and plan.sequence_parallel:
        # Beside the products, but for the first shard of each; gradients are twice the products.
        products = sum(part.seconds for part in layer.products.values())
        sent = max(sent / plan.tensor, sent - products)
        sent_back = max(sent_back / plan.tensor, sent_back - 2 * products - again.matmul)

    # Layers by chunk: the last chunk has the head, too.
    launch = 0.0 if ideal else implementation.launch
    weight = layer.weight if plan.splits_backward else KernelSeconds()
    of_layer = schedules.LayerSeconds(
        forward=layer.forward.seconds + sent,
        backward=(layer.backward - weight + again).seconds + sent_back,
        weight=weight.seconds,
    )
    count, chunks = plan.microbatches, plan.chunks
    lockstep = functools.partial(
        schedules.lockstep_seconds, plan.schedule, plan.pipe, count, chunks=chunks
    )
    even = plan.even or plan.asynchronous
    by_time = lockstep if implementation.lockstep and not even else None
    head = (head_forward + head_backward).seconds + sent_head
    counts = schedules.layers_of_chunks(model.layers, plan.pipe * chunks, of_layer, head, by_time)
    most, last = max(counts[:-1] or counts), counts[-1]
    parts = (layer.forward, sent), (layer.backward + again - weight, sent_back), (weight, 0.0)
    of_most, of_last = (
        [_launched(work * n, launch, wires * n) for work, wires in parts] for n in (most, last)
    )
    of_head = _launched(head_forward, launch, 0.0) + _launched(head_backward, launch, 0.0)

    # The device with most to do: of chunks like the slowest one, or with the last one.
    work, wires = functools.reduce(operator.add, of_most), (sent + sent_back) * most
    work_last = functools.reduce(operator.add, of_last, of_head)
    wires_last = (sent + sent_back) * last + sent_head
    first, second, third = (part.seconds for part in of_most)
    first, second = first + sent * most, second + sent_back * most
    final = of_last[0] + of_last[1] + of_head
    in_last = final.seconds + wires_last, of_last[2].seconds
    if work_last.seconds + wires_last > work.seconds + wires:
        work, wires = work * (chunks - 1) + work_last, wires * (chunks - 1) + wires_last
    else:
        work, wires = work * chunks, wires * chunks
    bubble = transfers = 0.0
    if plan.pipe > 1:
        if implementation.lockstep:
            taken = lockstep(first, second, weight=third, last=in_last)
        else:
            taken = lockstep(first, second, weight=third)
            taken += count * max(0.0, work.seconds + wires - chunks * (first + second + third))
        bubble = taken - count * (work.seconds + wires)
        message = float(_ITEM * plan.microbatch * length * model.width)
        message /= 1 if implementation.lockstep else plan.tensor
        ticks = schedules.num_ticks(plan.schedule, plan.pipe, count, chunks)
        transfers = ticks * wire("permute", message, "pipe")

    # ZeRO, the update, and host memory. The first stage has the embedding; in one compiled program
    # all stages have both tables, and sum their gradients, in 32 bits. A bound takes what
    # the fullest stage has at least, however layers are shared.
    held = model.layers / plan.pipe if ideal else max(most, last) * chunks
    tables = 1 if model.tied else 2
    table = model.vocabulary * model.width / model.shards_of_tokens(plan.tensor)  # parameters
    if plan.pipe > 1 and implementation.lockstep and not plan.asynchronous:
        transfers += wire("all-reduce", _GRADIENT_SUM * tables * table, "pipe")
        if held * plan.pipe > model.layers:  # unequal stages send each other their layers
            there, back = schedules.layers_sent(plan.schedule, plan.pipe, counts)
            moved = plan.param_bytes * there + _GRADIENT_SUM * back
            transfers += wire("permute", moved * (model.layer_elements / plan.tensor), "pipe")
            held = model.layers / plan.pipe
    elif plan.pipe > 1 and not implementation.lockstep:
        tables = 0 if ideal else 1
    outside = tables * table
    params = held * model.layer_elements / plan.tensor + outside
    return Passes(work * count, held, params, counts, count * wires, bubble, transfers, outside)


def with_state(
    plan: ParallelPlan,
    machine: Machine,
    step_passes: Passes,
    *,
    sync: SyncWork | None = None,
    products: float = 0.0,
    moved: float = 0.0,
    ideal: bool = False,
) -> StepSeconds:
    """A step of these passes, with the collectives of ZeRO, the update and the host link.

    The update reads and writes parameters, gradients and state once, or ``moved`` bytes for each
    parameter if these are more, and has ``products``. On the CPU it does so in host memory, which
    its share of the cores keeps busy; what goes back to the device for sums is not counted.
    """
    wire, device = _wire_of(plan, machine, ideal), machine.device
    work, params = step_passes.work, step_passes.params
    data, hideable, exposed = _data_seconds(plan, step_passes.layers, params, wire)
    over = "data" if plan.replicas == 1 else "replicas"  # of a compressed sync, which nothing hides
    exposed += sum(wire(*each, over) for each in sync.sums) if sync else 0.0
    shards = plan.shards_of_state
    touched = 2 * (plan.param_bytes + plan.state_bytes) + plan.grad_bytes
    touched = touched if ideal else max(touched, moved)
    on_cpu = plan.offload == "update"
    update = 0.0 if on_cpu else params * touched / shards
    update += sync.moved if sync and not ideal else 0.0
    update /= device.bandwidth * (1.0 if ideal else achieved(device).memory)
    update += products / Roofline(device, COMPILED, ideal=ideal).flops
    # State from host memory, and back at the same time; streamed parameters once in the forward
    # passes of all micro-batches and once where they are updated.
    host = 0.0
    if plan.offload:
        speed = _host_figure(device, "host_link") * (1.0 if ideal else _HOST_LINK)
        linked = params / shards * plan.state_bytes
        if plan.update_in_backward:
            read = 2 * plan.param_bytes
            read /= plan.shards if plan.stage == 3 else 1
            linked = (params - step_passes.outside) * (plan.state_bytes / shards + read)
        if on_cpu:  # all gradients first, and all parameters last: one call in compiled programs
            linked = params / shards * (plan.grad_bytes + plan.param_bytes) / (1 + ideal)
        host = linked / speed
    if on_cpu:
        speed = _host_figure(device, "host_bandwidth") * (1.0 if ideal else _HOST_MEMORY)
        host = (max if ideal else operator.add)(host, params * touched / shards / speed)
    # Stages update in ticks of their own, one after the other.
    waiting = (plan.pipe - 1) * update if plan.asynchronous else 0.0
    return StepSeconds(
        matmul=work.matmul,
        elementwise=work.elementwise,
        overhead=work.overhead,
        tensor=step_passes.tensor,
        bubble=step_passes.bubble + waiting,
        transfers=step_passes.transfers,
        data=data + exposed,
        exposed=exposed,
        update=update,
        host=host,
        hideable=hideable * work.seconds,
        interference=not machine.torus,
    )


def _host_figure(device: DeviceKind, name: str) -> float:
    figure: float | None = getattr(device, name)
    if figure is None:
        words = "the " + name.replace("_", " ")
        raise ValueError(f"{words} of {with_article(device.name)} is not known; offload needs it.")
    return figure


def _launched(work: KernelSeconds, launch: float, sent: float) -> KernelSeconds:
    """Kernels that the host issues no faster than it can, while collectives run, too."""
    waiting = max(0.0, work.kernels * launch - work.seconds - sent)
    return work._replace(overhead=work.overhead + waiting)


def _tensor_seconds(
    model: Decoder, plan: ParallelPlan, length: int, wire: _Wire, compiled: bool
) -> tuple[float, float, float]:
    """Collectives of devices that share layers: of a layer forward, backward, and of the ends."""
    if plan.tensor == 1:
        return 0.0, 0.0, 0.0
    sums = tensor_sums(model, plan, compiled=compiled)
    stream = float(_ITEM * plan.microbatch * length * model.width)
    summed = wire("all-reduce", stream, "tensor")
    ends = (sums.head + (sums.lookup if plan.pipe == 1 else 0)) * summed
    ends += sums.scalars * wire("all-reduce", float(SCALAR * plan.microbatch * length), "tensor")
    if not plan.sequence_parallel:
        return sums.forward * summed, sums.backward * summed, ends
    gather = wire("all-gather", stream, "tensor")
    forward = 2 * (wire("reduce-scatter", stream, "tensor") + gather)
    backward = forward + 2 * gather
    again = plan.recompute not in ("none", "selective")
    return forward, backward + (forward if again else 0.0), ends


def _data_seconds(
    plan: ParallelPlan, layers: float, params: float, wire: _Wire
) -> tuple[float, float, float]:
    """Collectives of data parallelism, the share of computing beside them, and those after it."""
    if plan.data == 1:
        return 0.0, 0.0, 0.0
    held, reduced = params * plan.param_bytes, params * plan.grad_bytes
    times = plan.microbatches if plan.pipe == 1 else 1
    last = 2 / 3 / plan.microbatches  # gradients are reduced beside the last backward pass
    if plan.sync and plan.replicas == 1:  # which takes the place of the sums
        return wire("all-gather", held, "data") if plan.stage else 0.0, 0.0, 0.0
    if plan.stage == 0:
        return wire("all-reduce", reduced, "data"), last, 0.0
    replicas = 0.0 if plan.sync else wire("all-reduce", reduced / plan.shards, "replicas")
    if plan.spread:
        replicas = wire("reduce-scatter", reduced / plan.shards, "replicas")
        replicas += wire("all-gather", held / plan.shards, "replicas")
    scatter = wire("reduce-scatter", reduced, "shards")
    if plan.stage == 3:
        # A layer at a time, for the forward pass and for the backward pass.
        gather = layers * wire("all-gather", held / layers, "shards")
        scatter = layers * wire("reduce-scatter", reduced / layers, "shards")
        return times * (2 * gather + scatter), 1.0 if plan.pipe == 1 else last, replicas
    gather = wire("all-gather", held, "shards")
    if plan.stage == 2 and plan.pipe == 1:  # reduces in every backward pass
        return times * scatter + gather, 2 / 3, replicas
    return scatter + gather, last, replicas
