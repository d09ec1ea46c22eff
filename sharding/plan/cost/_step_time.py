"""The time of one training step of a decoder under a plan, in closed form."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from sharding.plan.cost import _pipeline_schedules as schedules
from sharding.plan.cost._compressed_sync import SyncWork
from sharding.plan.cost._parallel_plan import ParallelPlan
from sharding.plan.cost._wire_and_flops import SCALAR, tensor_sums
from sharding.plan.machine._collective_time import Group, Machine, Operation, collective_seconds
from sharding.plan.machine._devices import achieved
from sharding.plan.model import _layer_time as layer_time
from sharding.plan.model._models import Decoder
from sharding.plan.model._saved_names import saved_parts

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
    host: float  #: of moving optimizer state to and from host memory
    hideable: float  #: of computing that can run at the same time as ``data``
    interference: bool  #: whether computing and sending slow each other down, as on GPUs
    #: of ``data``, what nothing can hide: compressed gradients after all passes
    exposed: float = 0.0

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

        Computing that can run beside the collectives of data parallelism does, and both slow each
        other down on GPUs; the host link runs beside the update. All else is waited for.
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
        """All figures, ready for JSON."""
        totals = ("no_overlap", "seconds", "full_overlap", "limit")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in totals}


_ITEM = 2  # bytes of an activation
_GRADIENT_SUM = 4  # bytes of a gradient that is accumulated
# The share of a PCIe link that copies reach, 55 of 63 GB/s: Bekman, Machine Learning Engineering.
_HOST_LINK = 0.88


class _Groups(NamedTuple):
    """The devices of each kind of parallelism; ``replicas`` are further apart than ``shards``."""

    tensor: Group
    shards: Group
    replicas: Group
    data: Group
    pipe: Group


@dataclasses.dataclass(frozen=True)
class Passes:
    """Forward and backward passes of all micro-batches of a step, whatever ZeRO does."""

    work: layer_time.KernelSeconds  # of kernels
    layers: float  # that the device has, in as many parts ZeRO gathers and reduces
    params: float  # of the device
    chunks: tuple[int, ...] = ()  # layers of each chunk of a pipeline, from the first to the last
    tensor: float = 0.0  # seconds of collectives among the devices that share a layer
    bubble: float = 0.0  # seconds, idle in a pipeline
    # seconds of messages between stages, and of the sum of gradients that they share
    transfers: float = 0.0

    @property
    def least(self) -> float:
        """Seconds below which no step with these passes can be predicted to go."""
        return self.work.seconds + self.tensor + self.bubble + self.transfers

    @property
    def least_overlapped(self) -> float:
        """The same where all wires are hidden: below ``StepSeconds.full_overlap``."""
        return max(self.work.seconds, self.tensor + self.transfers) + self.bubble


# Seconds of a collective: of its operation, its bytes and its devices.
_Wire = Callable[[Operation, float, Group], float]


def _wire_of(machine: Machine, ideal: bool) -> _Wire:
    return functools.partial(collective_seconds, device=machine.device, ideal=ideal)


def step_seconds(
    model: Decoder,
    plan: ParallelPlan,
    machine: Machine,
    *,
    length: int | None = None,
    implementation: layer_time.Implementation = layer_time.COMPILED,
    ideal: bool = False,
) -> StepSeconds:
    """What a step takes; nothing is compiled, nothing is measured.

    Layers are shared so that a step is as fast as possible, with the head in the last chunk; if the
    implementation is not in lockstep, equally. Devices that share a layer are nearest to each
    other, then those of ZeRO, its replicas, and the stages of a pipeline.

    - Tensor parallelism: two all-reduces of the residual stream in a forward pass of a layer, two
      in a backward pass; with sequence parallelism a reduce-scatter and an all-gather each, and two
      gathers of inputs more in the backward pass. One more each for sharded tables.
    - Recomputation repeats the forward pass, but for products that are saved, or attention alone,
      and the collectives that ``tensor_sums`` counts.
    - A pipeline takes ``lockstep_seconds``, and a transfer in each tick. One compiled program holds
      the embedding and the head on all devices, which sum their gradients over the stages; stages
      of unequal numbers of layers send each other some, and their gradients.
    - ZeRO sends what ``estimate`` says; in a pipeline once in a step. Replicas reduce their shards,
      or reduce-scatter them and gather the new parameters. Stage 3 gathers layer by layer.
    - The update reads parameters, gradients and state and writes parameters and state. Products in
      it, as in Muon's, are known to ``search`` alone.

    Args:
      model: its dims.
      plan: how it is shared.
      machine: the devices.
      length: tokens of a sequence; None: the model's.
      implementation: how the program computes a layer.
      ideal: whether everything reaches its peak without latency: for lower bounds.

    Raises:
      ValueError: the plan does not fit the model or the number of devices.

    Example:
      >>> from sharding.plan import MODELS, kind_of
      >>> plan = ParallelPlan(data=8, stage=3, microbatch=4, recompute="none")
      >>> found = step_seconds(MODELS["llama2-7b"], plan, Machine(kind_of("h100"), 8))
      >>> f"{found.full_overlap:.2f} {found.seconds:.2f} {found.no_overlap:.2f}"
      '0.67 0.69 0.78'
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
    implementation: layer_time.Implementation = layer_time.COMPILED,
    ideal: bool = False,
) -> Passes:
    """The passes of a step, alike for plans that differ in ZeRO, replicas, offload and state alone.

    >>> from sharding.plan import MODELS, kind_of
    >>> plan, machine = ParallelPlan(pipe=8, microbatches=8), Machine(kind_of("h100"), 8)
    >>> passes(MODELS["llama3-8b"], plan, machine, length=2048).chunks
    (4, 4, 4, 4, 5, 5, 5, 1)
    """
    groups, wire = _groups(plan, machine), _wire_of(machine, ideal)
    options: Any = {
        "microbatch": plan.microbatch,
        "length": length,
        "implementation": implementation,
        "ideal": ideal,
    }
    layer = layer_time.layer_work(
        *(model, machine.device),
        tensor=plan.tensor,
        sequence_parallel=plan.sequence_parallel,
        **options,
    )
    head_forward, head_backward = layer_time.head_work(
        model, machine.device, tensor=model.shards_of_tokens(plan.tensor), **options
    )
    again = _recomputed(layer, plan, implementation)
    sent, sent_back, sent_head = _tensor_seconds(
        model, plan, length, groups.tensor, wire, implementation.lockstep
    )

    # Layers by chunk: the last chunk has the head, too.
    launch = 0.0 if ideal else implementation.launch
    weight = layer.weight if plan.splits_backward else layer_time.KernelSeconds()
    of_layer = schedules.LayerSeconds(
        forward=layer.forward.seconds + sent,
        backward=(layer.backward - weight + again).seconds + sent_back,
        weight=weight.seconds,
    )
    count, chunks = plan.microbatches, plan.chunks
    lockstep = functools.partial(
        schedules.lockstep_seconds, plan.schedule, plan.pipe, count, chunks=chunks
    )
    most, last = schedules.layers_of_chunks(
        model.layers,
        plan.pipe * chunks,
        of_layer,
        head=(head_forward + head_backward).seconds + sent_head,
        lockstep=lockstep if implementation.lockstep and not plan.even else None,
    )
    of_most, of_last = (
        tuple(
            _launched(work * number, launch)
            for work in (layer.forward, layer.backward + again - weight, weight)
        )
        for number in (most, last)
    )
    of_head = _launched(head_forward, launch) + _launched(head_backward, launch)

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
        transfers = ticks * wire("permute", message, groups.pipe)

    # ZeRO, the update, and host memory. The first stage has the embedding; in one compiled program
    # all stages have both tables, and sum their gradients, in 32 bits. A bound takes what
    # the fullest stage has at least, however layers are shared.
    held = model.layers / plan.pipe if ideal else max(most, last) * chunks
    tables = 1 if model.tied else 2
    if plan.pipe > 1 and implementation.lockstep and not plan.asynchronous:
        shared = _GRADIENT_SUM * tables * _table_params(model, plan)
        transfers += wire("all-reduce", shared, groups.pipe)
        if held * plan.pipe > model.layers:  # unequal stages send each other their layers
            counts = schedules.all_chunks(model.layers, plan.pipe * chunks, last)
            there, back = schedules.layers_sent(plan.schedule, plan.pipe, counts)
            sent = plan.param_bytes * there + _GRADIENT_SUM * back
            sent *= _stage_params(model, 1.0, plan, tables=0)
            transfers += wire("permute", sent, groups.pipe)
            held = model.layers / plan.pipe
    elif plan.pipe > 1 and not implementation.lockstep:
        tables = 0 if ideal else 1
    params = _stage_params(model, held, plan, tables=tables)
    return Passes(
        work=work * count,
        layers=held,
        params=params,
        chunks=schedules.all_chunks(model.layers, plan.pipe * plan.chunks, last),
        tensor=count * wires,
        bubble=bubble,
        transfers=transfers,
    )


def with_state(
    plan: ParallelPlan,
    machine: Machine,
    step_passes: Passes,
    *,
    sync: SyncWork | None = None,
    products: float = 0.0,
    ideal: bool = False,
) -> StepSeconds:
    """A step of these passes, with the collectives of ZeRO, the update and the host link.

    Nothing hides the compressed ``sync`` of the plan, and what it moves counts as part of the
    update, as do operations of matrix ``products`` of a device.
    """
    groups, wire = _groups(plan, machine), _wire_of(machine, ideal)
    work, params = step_passes.work, step_passes.params
    data, hideable = _data_seconds(plan, step_passes.layers, params, groups, wire)
    exposed = 0.0
    if sync is not None:
        over = groups.data if plan.replicas == 1 else groups.replicas
        exposed = sum(wire(operation, nbytes, over) for operation, nbytes in sync.sums)
    shards = plan.shards_of_state
    touched = 2 * (plan.param_bytes + plan.state_bytes) + plan.grad_bytes
    reached = 1.0 if ideal else achieved(machine.device).memory
    update = params * touched / shards
    if sync and not ideal:
        update += sync.moved
    update /= machine.device.bandwidth * reached
    update += products / layer_time.Roofline(machine.device, layer_time.COMPILED, ideal=ideal).flops
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
        host=_host_seconds(plan, params / shards, machine, ideal),
        hideable=hideable * work.seconds,
        interference=not machine.torus,
    )


def _groups(plan: ParallelPlan, machine: Machine) -> _Groups:
    # Stages of a pipeline are where they are without replicas.
    tensor, data, pipe = machine.groups((plan.tensor, plan.data, plan.pipe))
    _, shards, replicas, _ = machine.groups((plan.tensor, plan.shards, plan.replicas, plan.pipe))
    return _Groups(tensor, shards, replicas, data, pipe)


def _recomputed(
    layer: layer_time.LayerWork, plan: ParallelPlan, implementation: layer_time.Implementation
) -> layer_time.KernelSeconds:
    """What a layer computes again in its backward pass.

    All of its forward pass but the products that are saved, and in a compiled program the last one,
    whose result nothing reads.
    """
    if plan.recompute == "none":
        return layer_time.KernelSeconds()
    if plan.recompute == "selective":
        return layer.attention
    again = layer.forward
    for part in saved_parts(plan.recompute):
        again -= layer.products[part]
    return again - layer.products["down"] if implementation.lockstep else again


def _launched(work: layer_time.KernelSeconds, launch: float) -> layer_time.KernelSeconds:
    """Kernels that the host issues no faster than it can."""
    waiting = max(0.0, work.kernels * launch - work.seconds)
    return work._replace(overhead=work.overhead + waiting)


def _tensor_seconds(
    model: Decoder, plan: ParallelPlan, length: int, group: Group, wire: _Wire, compiled: bool
) -> tuple[float, float, float]:
    """Collectives among the devices that share layers: of a layer forward, backward, of the ends.

    The ends are the head, and without a pipeline the lookup in the embedding.
    """
    if plan.tensor == 1:
        return 0.0, 0.0, 0.0
    sums = tensor_sums(model, plan, compiled=compiled)
    stream = float(_ITEM * plan.microbatch * length * model.width)
    summed = wire("all-reduce", stream, group)
    ends = (sums.head + (sums.lookup if plan.pipe == 1 else 0)) * summed
    ends += sums.scalars * wire("all-reduce", float(SCALAR * plan.microbatch * length), group)
    if not plan.sequence_parallel:
        return sums.forward * summed, sums.backward * summed, ends
    gather = wire("all-gather", stream, group)
    forward = 2 * (wire("reduce-scatter", stream, group) + gather)
    backward = forward + 2 * gather
    again = plan.recompute not in ("none", "selective")
    return forward, backward + (forward if again else 0.0), ends


def _stage_params(model: Decoder, layers: float, plan: ParallelPlan, *, tables: int) -> float:
    """Parameters of a device with some layers and some of the embedding and the output matrix."""
    return layers * model.layer_elements / plan.tensor + tables * _table_params(model, plan)


def _table_params(model: Decoder, plan: ParallelPlan) -> float:
    """Parameters of the embedding on one device."""
    return model.vocabulary * model.width / model.shards_of_tokens(plan.tensor)


def _data_seconds(
    plan: ParallelPlan, layers: float, params: float, groups: _Groups, wire: _Wire
) -> tuple[float, float]:
    """Collectives of data parallelism, and the share of computing that can run beside them.

    Gradients of the last micro-batch are reduced beside its backward pass, two thirds of a
    micro-batch; stages 2 and 3 reduce in every one; stage 3 gathers in every pass.
    """
    if plan.data == 1:
        return 0.0, 0.0
    held, reduced = params * plan.param_bytes, params * plan.grad_bytes
    times = plan.microbatches if plan.pipe == 1 else 1
    last = 2 / 3 / plan.microbatches
    if plan.sync and plan.replicas == 1:  # which takes the place of the sums
        return wire("all-gather", held, groups.data) if plan.stage else 0.0, 0.0
    if plan.stage == 0:
        return wire("all-reduce", reduced, groups.data), last
    replicas = 0.0 if plan.sync else wire("all-reduce", reduced / plan.shards, groups.replicas)
    if plan.spread:
        replicas = wire("reduce-scatter", reduced / plan.shards, groups.replicas)
        replicas += wire("all-gather", held / plan.shards, groups.replicas)
    scatter = wire("reduce-scatter", reduced, groups.shards)
    if plan.stage == 3:
        # A layer at a time, for the forward pass and for the backward pass.
        gather = layers * wire("all-gather", held / layers, groups.shards)
        scatter = layers * wire("reduce-scatter", reduced / layers, groups.shards)
        return times * (2 * gather + scatter) + replicas, 1.0 if plan.pipe == 1 else last
    gather = wire("all-gather", held, groups.shards)
    if plan.stage == 2 and plan.pipe == 1:
        return times * scatter + gather + replicas, 2 / 3
    return scatter + gather + replicas, last


def _host_seconds(plan: ParallelPlan, params: float, machine: Machine, ideal: bool) -> float:
    """Optimizer state from host memory, and back at the same time."""
    if not plan.offload:
        return 0.0
    if machine.device.host_link is None:
        raise ValueError(
            f"the host link of a {machine.device.name} is not known; offload needs it."
        )
    return params * plan.state_bytes / (machine.device.host_link * (1.0 if ideal else _HOST_LINK))
