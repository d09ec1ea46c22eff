"""Memory and time of plans of one model, by the planner; what a device of a pipeline holds."""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

import optax_ext
from sharding._types import Array, DType, Tree
from sharding._zero import Zero
from sharding.matmuls._quantized_loss import quantized_matmuls
from sharding.matmuls._report import report_products
from sharding.pipeline._layers import other_dim
from sharding.placement._specs import expand_specs, leaf_names, num_shards, with_axis
from sharding.plan.cost import _pipeline_schedules as schedules
from sharding.plan.cost._estimate import with_state_format
from sharding.plan.cost._ledger import HeldRow, StepRows, held_at
from sharding.plan.cost._parallel_plan import OF_STATE, PLANNED, ParallelPlan
from sharding.plan.cost._stage_plan import Coded, StagePlan, stage_plan
from sharding.plan.cost._step_time import Passes, StateCosts, StepSeconds, passes, with_state
from sharding.plan.cost._wire_and_flops import (
    TENSOR_AXIS,
    SyncedArray,
    SyncWork,
    sync_of,
    sync_work,
)
from sharding.plan.machine._collective_time import Machine
from sharding.plan.machine._devices import DeviceKind, num_bytes
from sharding.plan.model._experts import EXPERT_AXIS
from sharding.plan.model._layer_costs import (
    COMPILED,
    Activations,
    KernelSeconds,
    LayerCost,
    Roofline,
    activations_of,
    layer_costs,
)
from sharding.plan.model._models import Decoder
from sharding.plan.model._traced_work import Traced, update_bytes, work_of


def held_by_pipeline(
    model: Decoder,
    plan: ParallelPlan,
    costs: Sequence[LayerCost],
    counts: Sequence[int],
    held: StagePlan,
    dtype: DType,
    device: DeviceKind,
) -> tuple[HeldRow, ...]:
    """What each device of a pipeline holds whose forward passes store what ``costs`` say.

    All run one program, and hold alike: layers of the largest chunk, which others pad, the
    embedding and the head, and slots of the stage with most in flight. ``counts`` are the layers of
    its chunks; ``held`` is the plan of ZeRO over its replicas.
    """
    chunks = plan.chunks
    # Parameters of one chunk; of the embedding and the head, which are one matrix where tied.
    first, layer, *_, last = costs
    item = jnp.dtype(dtype).itemsize
    table = float(model.vocabulary // model.shards_of_tokens(plan.tensor) * model.width * item)
    layers = max(counts) * layer.param_bytes
    shared = first.param_bytes + last.param_bytes - (table if model.tied else 0.0)
    # Of unequal stages: rows beside the layers that a device holds.
    uneven = plan.pipe * chunks * max(counts) > model.layers and not plan.asynchronous
    # Sums over micro-batches; the program returns them from branches, which copies them elsewhere.
    wide = max(item, 4) / item
    sums = wide * (chunks * layers + shared)
    copied = sums if device.tile is None else 0.0
    gathers = plan.data > 1 and plan.stage == 3
    # Without a flush: slots of two versions, beside the parameters that come and go.
    others = (chunks * layers + shared if gathers else 0.0) + (chunks * layers if uneven else 0.0)
    others += 2 * held.params if plan.asynchronous else 0.0
    stored, crossing = _stored_in_slots(plan, max(counts), layer, first.output_bytes)
    # Programs for GPUs hold a matrix of an odd vocabulary and its gradient once more.
    odd = 2.0 * table if copied and model.vocabulary % 8 else 0.0
    vocabulary = table / item / model.width
    working = _working(plan, costs, max(counts), vocabulary, crossing, odd, copied, wide)
    return (
        HeldRow("params", held.params + others),
        HeldRow("state", held.opt_state + held.master - held.host),
        *held_at(layers=(stored + working, 0.0, 0.0, sums + copied)),
    )


def _stored_in_slots(
    plan: ParallelPlan, rows: int, layer: LayerCost, message: float
) -> tuple[float, float]:
    """Bytes of all slots, and of what the second half of a split backward pass needs.

    Slots are for messages, for what waits for a backward pass, and for its second half where it is
    split; each kind has one for what nobody expects.
    """
    slots = schedules.slots_of(plan.schedule, plan.pipe, plan.microbatches, plan.chunks)
    stored = (slots.residuals + 1) * rows * layer.activation_bytes + (slots.messages + 1) * message
    crossing = rows * layer.crossing_bytes if plan.splits_backward else 0.0
    return stored + (slots.crossing + 1) * crossing, crossing


def _working(
    plan: ParallelPlan,
    costs: Sequence[LayerCost],
    rows: int,
    vocabulary: float,
    crossing: float,
    odd: float,
    copied: float,
    wide: float,
) -> float:
    """Temporaries of one backward pass: its residuals, beside the head or one layer.

    ``odd`` are bytes of a padded output matrix, ``copied`` those of sums that branches return, each
    so many times as ``wide`` as a parameter.
    """
    first, layer, *_, last = costs
    logits = first.activation_bytes * vocabulary  # float32, as tokens are int32
    gradient = last.activation_bytes + last.working_bytes - first.output_bytes - logits
    layers = rows * layer.param_bytes
    # A loop over one layer is none: nothing of it is stacked.
    residuals = rows * layer.activation_bytes if rows > 1 else 0.0
    grads = layers if rows > 1 else 0.0
    chunk = layers if plan.chunks > 1 and rows > 1 else 0.0  # its parameters, taken out of all
    # Where ticks have forward passes, too, backward passes return zeros for the residuals of these,
    # beside their own, on all devices but TPUs; and copied sums not before their end.
    returned = 2 * residuals if copied else residuals
    at_head = returned + logits + max(odd, gradient) - copied
    if crossing:
        at_layers = returned + crossing + chunk + layer.working_bytes - copied
        return max(at_head, at_layers, residuals + crossing, crossing + grads)
    of_head = logits + max(odd, gradient - copied)
    of_layers = grads + layer.working_bytes + chunk
    if copied and not chunk:
        of_layers = max(0.0, of_layers - wide * layers)  # not yet added to the copied sums
    working = residuals + max(of_head, of_layers)
    return max(working, at_head) if plan.schedule == "1f1b" else working


_TOKEN = 4  # bytes
# What of ``optax_ext`` wraps the transformation, by ``ParallelPlan.weights``.
WRAPPERS = {"master": "master_weights", "stochastic": "stochastic_rounding"}


class PlanCosts:
    """Memory and time of plans of one model; what plans share is computed once.

    Bytes of parameters, gradients, state and batch are those of ``estimate``, all of a pipeline
    those of ``held_by_pipeline``; activations are those that the code of the model stores.
    """

    _CACHED = (
        *("_tx", "_stage", "_rows", "_passes_of", "_costs", "_products", "_moved"),
        *("_spared", "fullest", "least", "state_bytes_in"),
    )

    def __init__(
        self,
        model: Decoder,
        tx: optax.GradientTransformation,
        machine: Machine,
        *,
        length: int | None = None,
        dtype: DType = jnp.bfloat16,
    ):
        self.model = model
        self.tx = tx
        self.machine = machine
        self.length = length or model.length
        self.dtype = jnp.dtype(dtype)
        params = model.abstract(self.dtype)
        self._sizes = [float(x.size) for x in jax.tree.leaves(params)]
        self.param_bytes = num_bytes(params) / sum(self._sizes)  # of one, on average
        trained = model.trained(params)
        self._trained_bytes = num_bytes(trained) / sum(self._sizes)  # likewise
        of_trained = sum(x.size for x in jax.tree.leaves(trained))
        self._trained_share = of_trained / sum(self._sizes)
        for name in self._CACHED:  # by this object alone
            setattr(self, name, functools.cache(getattr(self, name)))
        self._synced = functools.cache(lambda plan: sync_of_plan(plan, model, self.dtype))

    def state_bytes_in(self, state_format: str | None = None, weights: str = "plain") -> float:
        """Bytes of optimizer state, in a format, and master weights for one parameter."""
        stage = self._stage(ParallelPlan(state_format=state_format, weights=weights))
        return (stage.opt_state + stage.master) / sum(self._sizes)

    def each(self, plan: ParallelPlan) -> tuple[float, float, float]:
        """Bytes of one parameter of a plan, on average: itself, its gradient and its state."""
        state = self.state_bytes_in(plan.state_format, plan.weights)
        return self.param_bytes, self._trained_bytes, state

    def flops(self, sequences: int) -> float:
        """Operations of a device in a step of so many sequences: nothing is computed twice."""
        total = self.model.flops(float(sequences * self.length), self.length)
        return total / self.machine.num_devices

    def products(self, plan: ParallelPlan) -> float:
        """Operations of matrix products of a device in the update, which share the state."""
        layers, tables = self._products()
        if plan.pipe * plan.tensor * plan.experts > 1:
            layers /= plan.pipe * plan.tensor * plan.experts
            tables /= self.model.shards_of_tokens(plan.tensor)
        return (layers + tables) / plan.shards_of_state

    def _products(self) -> tuple[float, float]:
        """Products of the layers, and of all else; 0 where an update needs what a step has."""
        params = self.model.abstract(self.dtype)
        update = optax.with_extra_args_support(self.tx).update

        def of(params: Tree) -> float:
            state = jax.eval_shape(self.tx.init, params)
            return work_of(update, params, state, params, kind=self.machine.device).flops

        try:
            total = of(self.model.trained(params))
            if not total or not isinstance(params, dict) or "layers" not in params:
                return total, 0.0
            tables = of({name: x for name, x in params.items() if name != "layers"})
        except (TypeError, ValueError):
            return 0.0, 0.0
        return total - tables, tables

    def fullest(self, plan: ParallelPlan) -> float:
        """Bytes of the fullest device."""
        return self.by_part(plan)["total"]

    def by_part(self, plan: ParallelPlan) -> dict[str, float]:
        """The same by what they are."""
        if plan.pipe > 1:
            return self.pipeline(plan).by_part(self.batch(plan))
        held = self._stage(_placed(plan)).with_activations(self.activations(plan))
        if plan.sync:
            held = dataclasses.replace(held, synced=held.synced + self.sync(plan).held)
        return held.by_part(self.batch(plan))

    def activations(self, plan: ParallelPlan) -> Activations:
        """What a micro-batch stores and needs."""
        sizes = plan.tensor, plan.experts
        costs = self._costs(plan.microbatch, plan.recompute, *sizes, plan.matmuls)
        return activations_of(self.model, self.machine.device, costs, *sizes)

    def pipeline(self, plan: ParallelPlan) -> StepRows:
        """What each device of a pipeline holds, without the batch."""
        # The update needs less than what it takes the place of: accumulated gradients are float32.
        counts = self.passes(plan).chunks
        placed = dataclasses.replace(_placed(plan), microbatches=1)
        sizes = plan.tensor, plan.experts
        costs = self._costs(plan.microbatch, plan.recompute, *sizes, plan.matmuls)
        held = self._rows(placed, self.model.layers / plan.pipe)
        kinds = self.dtype, self.machine.device
        rows = held_by_pipeline(self.model, plan, costs, counts, held, *kinds)
        return StepRows(held.work, held.sizes, rows)

    def forms(self, recompute: Sequence[str]) -> tuple[str, ...]:
        """Forms of recomputation that differ in what is stored or computed."""
        return tuple(recompute)

    def tilings(self, counts: Sequence[int]) -> tuple[int, ...]:
        """In how many tiles large values can exist, of these numbers; 1: in none."""
        return (1,)

    def least(self, plan: ParallelPlan) -> float:
        """Bytes that the fullest device has at least, whatever ZeRO does."""
        if plan.pipe == 1:
            found = self.activations(plan)
            return found.stored + max(found.working, found.head) + self.batch(plan)
        rows = self.pipeline(plan)  # at stage 0
        return rows.peak - rows.arguments + self.batch(plan)

    def passes(self, plan: ParallelPlan, *, ideal: bool = False) -> Passes:
        """The passes of a step; see ``step_seconds``."""
        return self._passes_of(dataclasses.replace(plan, **_NO_STATE), ideal)

    def _passes_of(self, plan: ParallelPlan, ideal: bool) -> Passes:
        options: Any = {"length": self.length, "item": self.param_bytes}
        return passes(self.model, plan, self.machine, ideal=ideal, **options)

    def seconds(
        self,
        plan: ParallelPlan,
        work: Passes,
        *,
        ideal: bool = False,
        each: tuple[float, float, float] | None = None,
    ) -> StepSeconds:
        """A step of these passes; ``each`` in place of the bytes that belong to a parameter."""
        moved = 0.0 if ideal else self._moved(plan.state_format, plan.weights)
        sync = self.sync(plan) if plan.sync else None
        costs = StateCosts(
            *(each or self.each(plan)),
            trained=self._trained_bytes,
            moved=moved,
            products=self.products(plan),
            sync=sync,
            spared=self._spared(_placed(plan)),
        )
        return with_state(plan, self.machine, work, costs, ideal=ideal)

    def _spared(self, plan: ParallelPlan) -> float:
        """Bytes of one parameter, on average, that stage 3 need not gather: it gathers codes."""
        params = self.model.abstract(self.dtype)
        arrays = dict(zip(leaf_names(params), jax.tree.leaves(params), strict=True))
        coded = coded_in(plan, self.model, self.dtype)
        return sum(num_bytes(arrays[x]) - arrays[x].size for x in coded) / sum(self._sizes)

    def sync(self, plan: ParallelPlan) -> SyncWork:
        return self._synced(_placed(plan))

    def spares(self, plan: ParallelPlan) -> bool:
        """Whether the largest chunk has fewer layers than where a step is fastest."""
        equal, fastest = (self.passes(dataclasses.replace(plan, even=x)) for x in (True, False))
        return max(equal.chunks) < max(fastest.chunks)

    def updates_on_host(self, state_format: str | None = None, weights: str = "plain") -> bool:
        """Whether the CPU can update the state."""
        try:
            self._stage(ParallelPlan(state_format=state_format, weights=weights, offload="update"))
        except ValueError:
            return False
        return True

    def batch(self, plan: ParallelPlan) -> float:
        """Bytes of a device's part of the batch."""
        return float(_TOKEN * plan.microbatches * plan.microbatch * (self.length + 1))

    def _costs(
        self,
        microbatch: int,
        recompute: str,
        tensor: int,
        experts: int = 1,
        matmuls: str | None = None,
    ) -> Sequence[LayerCost]:
        options: Any = {"length": self.length, "dtype": self.dtype}
        options |= {"tensor": tensor, "experts": experts, "matmuls": matmuls}
        options |= {"batch": microbatch, "recompute": recompute}
        return layer_costs(self.model, self.machine.device, **options)

    def _tx(self, state_format: str | None, weights: str) -> optax.GradientTransformation:
        return transformation_of(state_format, weights, self.tx)

    def _moved(self, state_format: str | None, weights: str) -> float:
        """Bytes that the update reads and writes for one parameter."""
        params = self.model.trained(self.model.abstract(self.dtype))
        gpu = self.machine.device.tile is None
        of_trained = update_bytes(self._tx(state_format, weights), params, gpu=gpu)
        return of_trained * self._trained_share

    def _stage(self, plan: ParallelPlan) -> StagePlan:
        return stage_plan(
            self.model.abstract(self.dtype),
            self._tx(plan.state_format, plan.weights),
            self.zero(plan),
            param_specs=specs_of_plan(plan, self.model),
            microbatches=plan.microbatches,
            update="backward" if plan.update_in_backward else "after",
            device=self.machine.device,
            gathered_once=self.model.gathered_once,
            trainable=self.model.trainable,
            coded=coded_in(plan, self.model, self.dtype),
        )

    def zero(self, plan: ParallelPlan) -> Zero:
        """What places the arrays of a plan without a pipeline."""
        return zero_of(plan)

    def _rows(self, plan: ParallelPlan, rows: float) -> StagePlan:
        """ZeRO over the replicas of the stages of a pipeline, which have so many layers each."""
        zero = zero_of(plan)
        layers = round(plan.pipe * rows)
        axes = {"pipe": plan.pipe} | dict(zero.mesh.shape)
        mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
        stacked = dataclasses.replace(self.model, scan=True, layers=layers)
        params = stacked.abstract(self.dtype)
        specs = stacked.specs(shards=plan.tensor) if plan.tensor > 1 else dict.fromkeys(params)
        specs = expand_specs(specs, params)

        def over_stages(x: Array, spec: Any) -> Any:
            dim = other_dim(x.shape, plan.pipe, spec) if layers % plan.pipe else 0
            return spec if dim is None else with_axis(spec, x.ndim, dim, "pipe")

        specs["layers"] = jax.tree.map(over_stages, params["layers"], specs["layers"])
        return stage_plan(
            params,
            self._tx(plan.state_format, plan.weights),
            dataclasses.replace(zero, mesh=mesh),
            param_specs=specs,
            device=self.machine.device,
            gathered_once="",  # stage 3 gathers all that a device has once in a step
        )


_NO_STATE: dict[str, Any] = {name: getattr(ParallelPlan(), name) for name in OF_STATE}


def _placed(plan: ParallelPlan) -> ParallelPlan:
    """A plan with nothing but that on which the bytes of parameters, gradients and state depend."""
    # Replicas hold what devices without them do, unless they share the state or have a sync.
    alike = not plan.spread and not plan.sync
    same = {"tensor", "experts", "pipe", *OF_STATE} - {"replicas"}
    if plan.matmuls and plan.stage == 3:  # whose codes are gathered
        same |= {"matmuls", "microbatch"}
    return ParallelPlan(
        data=plan.shards if alike else plan.data,
        replicas=1 if alike else plan.replicas,
        microbatches=plan.microbatches if plan.update_in_backward else min(plan.microbatches, 2),
        **{name: getattr(plan, name) for name in same},
    )


def specs_of_plan(plan: ParallelPlan, model: Decoder) -> Tree:
    """How devices share the parameters of each layer, or its experts; None where they do not."""
    if plan.tensor * plan.experts == 1:
        return None
    return model.specs(TENSOR_AXIS, plan.tensor, plan.experts)


@functools.lru_cache(maxsize=64)
def coded_in(plan: ParallelPlan, model: Any, dtype: DType) -> Coded:
    """The parameters that stage 3 gathers in codes of products in few bits."""
    if not plan.matmuls or plan.stage < 3 or plan.update_in_backward or plan.pipe > 1:
        return {}
    loss = model.make_loss() if isinstance(model, Decoder) else model.loss_fn
    low = quantized_matmuls(loss, plan.matmuls)
    return report_products(low, model.abstract(dtype), model.batch(plan.microbatch)).coded


@functools.lru_cache(maxsize=32)  # jax traces the init of one object once for equal parameters
def transformation_of(
    state_format: str | None, weights: str, tx: optax.GradientTransformation
) -> optax.GradientTransformation:
    """The transformation of plans with this format of the state, and these weights."""
    tx = with_state_format(tx, state_format)
    wrap = WRAPPERS.get(weights)
    return getattr(optax_ext, wrap)(tx) if wrap else tx


def sync_of_plan(plan: ParallelPlan, model: Any, dtype: DType) -> SyncWork:
    """The compressed synchronization of a plan, of gradients in full, or of a replica."""
    assert plan.sync
    zero = dataclasses.replace(zero_of(plan), sync=None, stage=max(plan.stage, 2))
    state = model.abstract(dtype), optax.EmptyState()
    arrays = []
    for row in zero.describe(state, tx=optax.identity(), trainable=model.trainable).rows:
        if row.part == "grads" and plan.replicas > 1:
            shape = NamedSharding(zero.mesh, row.spec).shard_shape(row.shape)
            arrays.append(SyncedArray(shape, row.bytes_per_device, scattered=False))
        elif row.part == "grads":
            nbytes = row.bytes_per_device * num_shards(zero.mesh, row.spec)
            arrays.append(SyncedArray(row.shape, nbytes, plan.stage > 0 and not row.note))
    return sync_work(plan.sync, arrays, plan.synced_devices)


def shared_axes(plan: ParallelPlan) -> dict[str, int]:
    """The axes of devices that share layers or experts, the nearest last."""
    axes = {EXPERT_AXIS: plan.experts, TENSOR_AXIS: plan.tensor}
    return {name: size for name, size in axes.items() if size > 1}


_CHOSEN = ("stage", "shard_state_over_replicas", "offload", "update_on", "sync")


def zero_of(plan: ParallelPlan, own: Zero | None = None) -> Zero:
    """The ``Zero`` of a plan, on an abstract mesh without the stages of a pipeline.

    ``own`` is one of the user's, which keeps what plans do not choose, such as its mesh.
    """
    sizes = {"replica": plan.replicas} if plan.replicas > 1 else {}
    sizes |= {"data": plan.shards} | shared_axes(plan)
    made = Zero(
        jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes)),
        stage=plan.stage,
        axis="data",
        replica_axis="replica" if plan.replicas > 1 else None,
        shard_state_over_replicas=plan.spread,
        offload=("all" if plan.update_in_backward else "optimizer") if plan.offload else None,
        update_on="host" if plan.offload == "update" else "device",
        sync=sync_of(plan.sync) if plan.sync else None,
    )
    if own is None:
        return made
    return dataclasses.replace(own, **{name: getattr(made, name) for name in _CHOSEN})


# Of a product, with those of element-wise operations beside it: as in the layers of decoders.
_KERNELS = 1.8
_KEPT = 2**25  # bytes from which glibc returns what is freed to the system


class TracedCosts(PlanCosts):
    """Those of a ``TracedModel``, by traces of one and of two examples a device.

    All is linear in them: what does not grow, such as parameters that the loss casts, is on every
    device, all else on one. Plans of graphs, at powers of eight.
    """

    model: Any  # a TracedModel

    def traced(
        self, size: float, recompute: str, tiles: int = 1, matmuls: str | None = None
    ) -> Traced:
        """A micro-batch of some examples of one device."""
        low = max(1, int(size)) if matmuls else 1  # products of few rows are not quantized
        high = 2 * low
        devices = self.machine.num_devices
        if recompute in PLANNED:
            high = 8
            while size > high:
                low = high
                high = 8 * high
        options = self.dtype, recompute, tiles, matmuls
        one, two = (self.model.traced(n * devices, *options) for n in (low, high))
        growths = [(b - a) / (high - low) for a, b in zip(one, two, strict=True)]
        each = zip(one, growths, strict=True)
        return Traced(*(max(a - low * b, 0.0) + size * b / devices for a, b in each))

    def flops(self, sequences: int) -> float:
        return self.traced(sequences / self.machine.num_devices, "none").flops

    def zero(self, plan: ParallelPlan) -> Zero:
        return zero_of(plan, self.model.zero)

    def forms(self, recompute: Sequence[str]) -> tuple[str, ...]:
        names = self.model.names
        devices = self.machine.num_devices
        known = {"none": 0, "full": 1} | ({} if names else {"minimal": 2})
        kinds: dict[Traced, str] = {}  # of the names, a model may have none
        for form in sorted(recompute, key=lambda form: known.get(form, 3)):
            if form in known or (names and form not in PLANNED):
                one = self.model.traced(devices, self.dtype, form)
                kinds.setdefault(one, form)
        found = {*kinds.values()}
        if not PLANNED.keys().isdisjoint(recompute):
            found |= PLANNED.keys() if self.model.can_be_planned(devices, self.dtype) else set()
        return tuple(form for form in recompute if form in found)

    def tilings(self, counts: Sequence[int]) -> tuple[int, ...]:
        found = [1]
        for tiles in counts:
            with contextlib.suppress(ValueError):  # of a loss that has no so many rows
                self.model.traced(self.machine.num_devices, self.dtype, "none", tiles)
                found.append(tiles)
        return tuple(found)

    def activations(self, plan: ParallelPlan) -> Activations:
        rows = plan.microbatch / plan.tensor
        traced = self.traced(rows, plan.recompute, plan.tiles, plan.matmuls)
        stored = "none" if plan.recompute in PLANNED else plan.recompute
        kept = self.traced(0, stored, plan.tiles, plan.matmuls)
        # Programs may hold what layers gathered to the end, where these are no loop.
        whole = plan.recompute in ("none", *PLANNED) and not self.model.trace.has_loops
        held = sum(self._sizes) * self.param_bytes / plan.tensor * (plan.stage == 3 and whole)
        return Activations(traced.stored - kept.stored + held, traced.working, copied=kept.stored)

    def batch(self, plan: ParallelPlan) -> float:
        return float(num_bytes(self.model.batch(plan.microbatch * plan.microbatches)))

    def _passes_of(self, plan: ParallelPlan, ideal: bool) -> Passes:
        rows = plan.microbatch / plan.tensor
        traced = self.traced(rows, plan.recompute, plan.tiles, plan.matmuls)
        unit = Roofline(self.machine.device, COMPILED, ideal=ideal)
        low = Roofline(self.machine.device, COMPILED, ideal=ideal, matmuls=plan.matmuls)
        products = (traced.flops - traced.low - traced.convolved) / unit.flops
        products += traced.low / low.flops + traced.convolved / unit.convolutions
        products += (traced.touched - traced.filtered) / unit.operands
        products += traced.filtered / unit.images
        kernels = round(_KERNELS * traced.products)
        work = KernelSeconds(
            products, traced.moved / unit.bandwidth, kernels, kernels * unit.kernel
        )
        work *= plan.microbatches
        if unit.new_memory:
            held = self.activations(plan)
            temporaries = held.stored + held.working
            if temporaries >= _KEPT:  # once a program
                work += KernelSeconds(0.0, temporaries * unit.new_memory)
        layers = max(self.model.trace.num_layers, 1)  # as many gathers
        return Passes(work, layers, params=sum(self._sizes) / plan.tensor)
