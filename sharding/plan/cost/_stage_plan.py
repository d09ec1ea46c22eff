"""One stage of ZeRO in closed form: what a device holds, when that is most, and what it sends."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp
import optax

from optax_ext import flax_transformer
from sharding._types import DType, OptState, Tree
from sharding._zero import Zero
from sharding.collectives._reduce_scatter import BLOCK_SIZE
from sharding.collectives._sum_dtype import sum_dtype
from sharding.offload._host_update import check_host_state_of_tpus
from sharding.placement._describe import Description, Row
from sharding.placement._layout import GATHERED_LAYERS
from sharding.placement._specs import axes_of, by_dim
from sharding.plan.cost._ledger import HeldRow, Ledger, WorkRow, held_at, merged
from sharding.plan.cost._wire_and_flops import SyncWork
from sharding.plan.machine._devices import DeviceKind, padded_to_tiles
from sharding.plan.model._layer_costs import Activations

# Parameters that stage 3 gathers in codes, as ``matmuls.report_products(...).coded`` has them.
Coded: TypeAlias = Mapping[str, tuple[int, ...]]

# --- What ZeRO sends ------------------------------------------------------------------------------


class SentParams(NamedTuple):
    """A parameter, or several that are alike: bytes of full arrays."""

    summed: float  # of its gradient, in the dtype of sums; 0 of frozen ones
    stored: float  # of itself, as it is gathered once it is updated; likewise
    gathered: float  # of itself, as stage 3 gathers it
    layers: float = 1.0  # that stage 3 gathers one after the other
    once: bool = False  # whether stage 3 gathers it once for both passes
    whole: bool = False  # whether its gradient stays unsharded
    spread: bool = False  # whether replicas share it, or its state
    averaged: float = 0.0  # of a device, where replicas take local steps, in the dtype of sums


def zero_work(
    params: Iterable[SentParams],
    stage: int,
    shards: Mapping[str, int],
    replicas: Mapping[str, int],
    microbatches: int,
    sync: SyncWork | None = None,
    local_steps: int = 0,
) -> Iterator[WorkRow]:
    """What a stage sends for these parameters over the axes of shards and of replicas.

    A ``sync`` takes the place of the sums over replicas, or of all where there are none. Replicas
    that take ``local_steps`` average their parameters in the last of them.
    """
    own = tuple(shards)
    others = tuple(replicas)
    if local_steps and others:
        params = tuple(params)
        averaged = sum(x.averaged for x in params)
        yield WorkRow("data", "all-reduce", averaged, others, 1 / local_steps)
        others = ()
    everywhere = own if sync else own + others
    devices = math.prod(shards.values())
    backward = "backward" if stage == 2 else "last backward"
    for x in params:
        if sync and not others:
            if stage and not x.whole:
                yield WorkRow("data", "all-gather", x.stored, own, beside="update")
            continue
        if stage == 0 or x.whole:  # once in a step
            yield WorkRow("data", "all-reduce", x.summed, everywhere, beside=backward)
            continue
        # Within a replica; between replicas shards are summed, or scattered and gathered.
        if stage == 3:
            times = microbatches * x.layers
            fetched = times if x.once else 2 * times
            yield WorkRow("data", "all-gather", x.gathered / x.layers, own, fetched, "all")
            yield WorkRow("data", "reduce-scatter", x.summed / x.layers, own, times, "all")
        else:
            times = microbatches if stage == 2 else 1
            yield WorkRow("data", "reduce-scatter", x.summed, own, times, backward)
            yield WorkRow("data", "all-gather", x.stored, own, 1, backward)
        if x.spread:
            yield WorkRow("data", "reduce-scatter", x.summed / devices, others)
            yield WorkRow("data", "all-gather", x.stored / devices, others)
        elif others and not sync:
            yield WorkRow("data", "all-reduce", x.summed / devices, others)
    for op, nbytes in sync.sums if sync else ():
        yield WorkRow("data", op, nbytes, others or own)


# --- What a device holds --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagePlan(Ledger):
    """What one device holds and sends at one stage, all in bytes; see ``moments``."""

    name: str  #: ``"stage 2"``, ``"3 hybrid"``, ``"3 spread"`` (``shard_state_over_replicas``)
    params: float  #: parameters
    grads: float  #: gradients, as the stage stores them
    full_grads: float  #: gradients of one micro-batch, unsharded
    unreduced: float  #: gradients of one micro-batch that wait to be reduced, or added
    opt_state: float  #: optimizer state without master weights
    master: float  #: master weights
    batch: float  #: the device's part of the batch; 0 where it is unknown
    host: float  #: the part of parameters, state and master weights that is in host memory
    host_params: float = 0.0  #: of it, parameters
    sync: float  #: state of ``Zero.sync``, such as error-feedback residuals
    summed: float  #: gradients of the micro-batches before the last one
    updated: float  #: gradients, as the update gets them
    synced: float  #: gradients that ``Zero.sync`` takes; with its temporaries where they are known
    layer: float  #: parameters of the largest layer, if layers are known
    outside: float  #: parameters outside of the layers, if these are known
    #: new parameters of the group that is gathered beside the old ones, and those from the host
    new_params: float
    share: float  #: the share of the parameters that the device stores; below 1 it gathers them
    #: micro-batches that a layer has before its update, in the backward pass; 0: it is after that
    in_backward: int = 0
    decoded: float = 0.0  #: the state of a layer, as its update in the backward pass has it
    #: what one micro-batch stores for its backward pass, if ``estimate`` was given it
    activations: float | None = None
    working: float = 0.0  #: temporaries of the backward pass of a layer
    head: float = 0.0  #: temporaries of what follows the layers, such as logits
    logits: float = 0.0  #: their gradient, until that of the output matrix is made of it
    copied: float = 0.0  #: parameters in another layout
    work: tuple[WorkRow, ...]
    sizes: Mapping[str, int]
    far: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        return self.activations is not None

    @property
    def memory(self) -> float:
        """Arguments and gradients, which is what ZeRO counts: no activations, no temporaries."""
        return self.arguments + self.grads

    @property
    def held(self) -> tuple[HeldRow, ...]:
        of_state = self.host - self.host_params
        return (
            HeldRow("params", self.params - self.host_params),
            HeldRow("params", self.host_params, memory="host"),
            HeldRow("state", self.opt_state + self.master + self.sync - of_state),
            HeldRow("state", of_state, memory="host"),
            HeldRow("batch", self.batch),
            *(self._streamed if self.in_backward else self._beside),
        )

    @property
    def _beside(self) -> tuple[HeldRow, ...]:
        """What is beside the arguments, if the update is after the backward pass."""
        stored = self.activations or 0.0
        copied = self.copied * self.share
        gathers = self.share < 1
        outside = self.outside if gathers else 0.0
        gathered = max(self.layer, outside - self.working) if gathers else 0.0
        # Full gradients of what is outside of the layers have room for that of the logits.
        working = self.working + max(0.0, self.logits - (0.0 if gathers else self.outside))
        return held_at(
            head=(stored, self.head + copied, outside, self.summed),
            layers=(stored, working + copied, gathered, self.grads + self.unreduced),
            sync=(0.0, 0.0, 0.0, self.synced),
            update=(0.0, 0.0, self.new_params, self.updated),
        )

    @property
    def _streamed(self) -> tuple[HeldRow, ...]:
        """The same if each layer is updated as soon as its gradients exist."""
        stored = self.in_backward * (self.activations or 0.0)
        grads = self.grads + self.unreduced
        read = self.layer if self.host else max(0.0, self.layer - self.working)
        return held_at(
            head=(stored, self.head, 0.0, self.updated),
            layers=(stored, self.working, read, grads),
            update=(stored, self.decoded, 0.0, grads),
        )

    def to_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON."""
        derived = ("arguments", "memory", "moments", "peak")
        sums = ("wire", "network", "host_wire", "moved")
        figures = dataclasses.asdict(self) | {x: getattr(self, x) for x in (*derived, *sums)}
        fields = WorkRow._fields[:-1]
        work = [{x: getattr(row, x) for x in fields} | {"on": [*row.on]} for row in self.work]
        return figures | {"work": work, "far": [*self.far]}

    def with_activations(self, found: Activations | None) -> Self:
        """The same with other activations."""
        names = ("activations", "working", "head", "logits", "copied")
        parts: Any = zip(names, found or (None, 0.0, 0.0, 0.0, 0.0), strict=True)
        return dataclasses.replace(self, **dict(parts))


class _StageBytes:
    """The bytes of a ``StagePlan`` that are held, but for the batch and activations.

    ``local`` is the placement at stage 0, where the user's axes alone shard; the memory of TPUs has
    tiles.
    """

    def __init__(
        self,
        zero: Zero,
        placed: Description,
        local: Description,
        tile: tuple[int, int] | None,
        microbatches: int,
        gathered_once: str | None,
        in_backward: bool,
        coded: Coded,
    ):
        self.zero = zero
        self.local = local
        self.tile = tile
        self.several = microbatches > 1
        self.outside = gathered_once
        self.placed = padded_to_tiles(placed, tile)
        # Full parameters and gradients by their paths, in the dtypes of the loss.
        trained = trained_paths(local)
        self.used = {
            row.path: row.bytes_per_device / dtype.itemsize * zero.precision.of_loss(dtype).itemsize
            for row, dtype in floating_rows(local, "params")
        }
        self.full = {path: n for path, n in self.used.items() if path in trained}
        self.full_grads = sum(self.full.values())
        # No dim of some divides: their gradients are summed in place, and nothing is gathered.
        self.whole = set(self.used)
        if zero.num_shards > 1:
            self.whole = {row.path for row in self.placed.rows if row.note}
        divided = [n for path, n in self.full.items() if path not in self.whole]
        self.divided = sum(divided)
        of_layers = self.full
        if zero.stage == 3:  # frozen ones are gathered, too; codes have a byte
            rows = (x for x in floating_rows(local, "params") if x[0].path in coded)
            codes = {row.path: row.bytes_per_device / dtype.itemsize for row, dtype in rows}
            of_layers = self.used | codes
        if not in_backward:
            of_layers = {path: n for path, n in of_layers.items() if path not in self.whole}
        self.of_layers = sum(of_layers.values())
        self.layer, self.others, self.group = _layer_and_outside(
            of_layers, local, gathered_once, self.placed.gather_group
        )
        self.params = self.sum_of("params")

    def sum_of(self, part: str) -> float:
        return float(sum(row.bytes_per_device for row in self.placed.rows if row.part == part))

    def summed(self, placed: Description, shards: int = 1) -> float:
        """Bytes of gradients, as accumulated or as returned, whichever is wider."""
        total = 0.0
        for row, dtype in floating_rows(placed, "grads"):
            itemsize = self.zero.precision.of_accumulator(dtype).itemsize if self.several else 0
            nbytes = row.bytes_per_device / (1 if row.path in self.whole else shards)
            total += nbytes / dtype.itemsize * max(itemsize, dtype.itemsize)
        return total

    def arguments(self) -> dict[str, float]:
        """Bytes of parameters and state."""
        in_host = [row for row in self.placed.rows if row.memory == "host"]
        of_state = [row for row in self.placed.rows if row.part == "opt_state"]
        masters = [row for row in of_state if "master" in re.split(r"\W+", row.path)]
        master = sum(row.bytes_per_device for row in masters)
        return {
            "params": self.params,
            "opt_state": sum(row.bytes_per_device for row in of_state) - master,
            "master": master,
            "host": sum(row.bytes_per_device for row in in_host),
            "host_params": sum(row.bytes_per_device for row in in_host if row.part == "params"),
            "sync": self.sum_of("sync"),
        }

    def gradients(self) -> dict[str, float]:
        """Bytes of gradients as the stage stores them; and of what waits beside them.

        These are full ones to be reduced, and those of one micro-batch to be added.
        """
        zero = self.zero
        full = self.full_grads
        grads = sums = self.summed(self.placed)
        if zero.stage < 2:
            return {"grads": grads, "unreduced": full if self.several else 0.0, "summed": sums}
        undivided = full - self.divided
        sync_of_shards = zero.sync is not None and not zero.replica_axis
        own = float(sum(x.bytes_per_device for x, _ in floating_rows(self.placed, "grads")))
        if zero.shard_state_over_replicas:
            # Replicas that share the state each have a shard of their own until they are summed.
            own = undivided + self.divided / zero.num_shards
            sums = self.summed(self.local, zero.num_shards)
        unreduced = own if self.several else 0.0
        if zero.stage == 2 and (self.outside is None or sync_of_shards):
            unreduced = full if self.several else full - undivided
            if self.several and sync_of_shards:  # which comes after the last micro-batch
                sums = self.summed(self.local)
        elif zero.stage == 2:
            # At once where one is known, but programs for GPUs hold those outside until the end.
            unreduced += max(self.layer, self.others) if self.tile else self.layer + self.others
        return {"grads": grads, "unreduced": unreduced + sums - grads, "summed": sums}

    def after_backward(self) -> dict[str, float]:
        """The figures of a step that updates after the backward pass."""
        zero = self.zero
        found = self.gradients()
        new_params = self.params if zero.shard_state_over_replicas else 0.0
        if zero.stage in (1, 2) and zero.num_shards > 1:
            # Of the group that is gathered at once, and what no layer has.
            scale = self.params / sum(self.used.values()) if self.full_grads else 0.0
            new_params = scale * min(self.divided, self.others + self.group)
        synced = 0.0
        if zero.sync is not None:
            shards = zero.num_shards if zero.replica_axis else 1
            synced = found["grads"] if zero.stage == 3 else self.full_grads / shards
        known = self.outside is not None
        return found | {
            "summed": found["summed"] if self.several else 0.0,
            "updated": self.summed(self.placed, zero.num_shards if zero.stage == 1 else 1),
            "synced": synced,
            "layer": self.layer if known else 0.0,
            "outside": self.others if known else 0.0,
            "new_params": new_params,
        }

    def in_backward(self, host: float) -> dict[str, float]:
        """The figures that differ if each layer is updated in the backward pass."""
        # Gradients of one layer, and their sums over micro-batches; of a tied embedding, too.
        pattern = self.outside if self.outside is not None else "(?!)"
        rows = [x for x, _ in floating_rows(self.local, "grads") if re.search(pattern, x.path)]
        matrices = [self.full[row.path] for row in rows if len(row.shape) > 1]
        of_layer, *_ = _layer_and_outside(self.full, self.local, self.outside, 0.0)
        waiting = sum(matrices) if len(matrices) == 1 else 0.0
        layer = of_layer if self.several else 0.0
        found = {
            "grads": self.summed(self.placed) / self.full_grads * (layer + waiting),
            "unreduced": of_layer,
            "updated": max(matrices, default=0.0),
        }
        # State in 8 bits is computed with in 32; that of the host is loaded with the parameters.
        coded = sum(
            row.bytes_per_device
            for row in self.placed.rows
            if row.part == "opt_state" and jnp.dtype(row.dtype).itemsize == 1
        )
        found["decoded"] = 4 * coded * of_layer / self.full_grads
        if host:
            of_all = self.of_layers - self.others
            found["layer"] = host * (self.layer / of_all if of_all > 0 else 1.0)
        return found


def _layer_and_outside(
    nbytes: dict[str, float], local: Description, outside: str | None, group: float
) -> tuple[float, float, float]:
    """The part of some bytes by path that is the largest layer's, and that outside of all.

    And of the layers, what is gathered at once in groups of ``group`` bytes.
    """
    shapes = {row.path: row.shape for row, _ in floating_rows(local, "params")}
    pattern = flax_transformer().stacked or "(?!)"
    names = {path: path[: named.end()] for path in nbytes if (named := re.search(pattern, path))}
    modules = collections.defaultdict(list)
    for path, name in names.items():
        modules[name].append(shapes[path])

    def stacked(arrays: list[tuple[int, ...]]) -> bool:
        """Whether they have a first dim of one size, and others."""
        ranks = [len(shape) for shape in arrays]
        return len({x[:1] for x in arrays}) == 1 and (min(ranks) > 1 or max(ranks) > 2)

    layers: dict[str, float] = collections.defaultdict(float)
    others = alone = of_stacks = 0.0
    for path, size in nbytes.items():
        if outside is not None and re.search(outside, path):
            others += size
        elif path in names and stacked(modules[names[path]]):
            of_layer = size / max(shapes[path][0], 1)
            layers[names[path]] += of_layer
            of_stacks = max(of_stacks, of_layer, min(group, size, GATHERED_LAYERS * of_layer))
        else:
            numbered = re.match(r".*?\d+(?=/|$)", path)
            layers[numbered[0] if numbered else path] += size
            alone = max(alone, size, min(group, alone + size))
    return max(layers.values(), default=0.0), others, max(of_stacks, alone)


def trained_paths(placed: Description) -> set[str]:
    """The parameters that have gradients."""
    return {row.path for row in placed.rows if row.part == "grads"}


def floating_rows(placed: Description, part: str) -> Iterator[tuple[Row, Any]]:
    """Arrays of floating numbers, and their dtypes; of parameters, codes and masks, too.

    These are unsigned or bool. Other integers, such as counts of steps, no loss is taken to read.
    """
    for row in placed.rows:
        if row.part == part and not row.dtype.startswith("key<"):  # of random keys
            dtype = jnp.dtype(row.dtype)
            is_code = part == "params" and dtype.kind in "ub"
            if is_code or jnp.issubdtype(dtype, jnp.floating):
                yield row, dtype


def name_of(zero: Zero) -> str:
    """The name of the stage that a ``Zero`` runs."""
    if zero.replica_axis and zero.stage:  # stage 0 all-reduces over all devices alike
        return f"{zero.stage} {'spread' if zero.shard_state_over_replicas else 'hybrid'}"
    return f"stage {zero.stage}"


def variants_of(zero: Zero) -> dict[str, Zero]:
    """The Zeros to compare by name: stages 0 to 3, hybrids if there are replicas, and itself."""
    replicas = axes_of(zero.replica_axis)
    flat: dict[str, Any] = {"replica_axis": None, "shard_state_over_replicas": False}
    flat |= {"axis": (*replicas, *axes_of(zero.axis))}
    variants = [_at_stage(zero, stage, **flat) for stage in range(4)]
    for spread in (False, True) if replicas else ():
        variants.append(_at_stage(zero, 3, shard_state_over_replicas=spread))
    return {name_of(variant): variant for variant in variants} | {name_of(zero): zero}


def _at_stage(zero: Zero, stage: int, **fields: Any) -> Zero:
    """A ``Zero`` at another stage, without the options that this stage does not have."""
    precision = zero.precision
    sync = zero.sync
    if stage < 3:
        precision = dataclasses.replace(precision, gather=None)
    elif not fields.get("replica_axis", zero.replica_axis):
        sync = None  # may have a state, which stage 3 takes with replicas only
    return dataclasses.replace(zero, stage=stage, precision=precision, sync=sync, **fields)


def stage_plan(
    params: Tree,
    tx: optax.GradientTransformation,
    zero: Zero,
    *,
    opt_state: OptState = None,
    local: Description | None = None,
    param_specs: Tree = None,
    microbatches: int = 1,
    batch: float = 0.0,
    device: DeviceKind | None = None,
    gathered_once: str | None = None,
    activations: Activations | None = None,
    update: str = "after",
    temporaries: bool = True,
    trainable: Tree = None,
    sync: SyncWork | None = None,
    local_steps: int = 0,
    coded: Coded | None = None,
) -> StagePlan:
    """The stage that a ``Zero`` runs; options are those of ``estimate``.

    ``sync`` is what its ``Zero.sync`` sends; None: gradients are counted as if they were dense.
    """
    name = name_of(zero)
    in_backward = update == "backward"
    if in_backward or coded is None or zero.precision.gather_bits:  # which take their place
        coded = {}
    # Of one micro-batch, stages 1 and 2 reduce layers alike.
    by_layer = in_backward or (microbatches == 1 and gathered_once is not None)
    if zero.stage == 1 and by_layer:
        zero = dataclasses.replace(zero, stage=2)
    state = (params, jax.eval_shape(tx.init, params) if opt_state is None else opt_state)
    if zero.update_on == "host" and device and device.tile:
        check_host_state_of_tpus(state[1])
    described: Any = {"tx": tx, "param_specs": param_specs, "trainable": trainable}
    placed = zero.describe(state, **described)
    if local is None:  # where the user's axes alone shard
        local = variants_of(zero)["stage 0"].describe(state, **described)
    tile = device.tile if device else None
    held = _StageBytes(zero, placed, local, tile, microbatches, gathered_once, in_backward, coded)
    memory = held.arguments() | held.after_backward()
    if in_backward:
        memory |= held.in_backward(memory["host"])
    # Streamed parameters are read in the forward pass, too, once for all micro-batches.
    linked = 2 * memory["host"] + memory["host_params"]
    updated = memory["params"] + memory["opt_state"] + memory["master"] - memory["host"]
    updated -= _frozen_bytes(placed)
    if zero.update_on == "host":  # gradients go there, parameters come back
        shards = zero.num_shards if zero.stage == 1 else 1
        sent = [x for x in placed.rows if x.part == "grads"]
        back = sum(x.bytes_per_device / (1 if x.note else shards) for x in sent)
        memory["new_params"] = back + max(0.0, memory["new_params"] - memory["updated"])
        linked = 2 * back
    if not (temporaries or in_backward):
        memory |= dict.fromkeys(("unreduced", "layer", "outside", "new_params"), 0.0)
    shape = zero.mesh.shape
    shards_of, replicas = (
        {axis: shape[axis] for axis in axes_of(x)} for x in (zero.axis, zero.replica_axis)
    )
    params_sent = list(_sent_params(zero, placed, local, gathered_once, coded))
    if local_steps and replicas:  # what replicas last agreed on, and an outer momentum
        memory["sync"] += 2 * sum(x.averaged for x in params_sent)
    # At least parameters twice and gradients are moved, and what is updated twice.
    moved = microbatches * (2 * sum(held.used.values()) + held.full_grads) + 2 * updated
    work = (
        *zero_work(
            *(params_sent, zero.stage, shards_of, replicas, microbatches, sync, local_steps)
        ),
        WorkRow("data", "products", sync.flops if sync else 0.0, ("flops",)),
        WorkRow("host", "copies", linked, ("host_link",)),
        WorkRow("elementwise", "passes", moved, ("memory",)),
    )
    return StagePlan(
        name=name,
        batch=batch,
        **memory,
        full_grads=held.full_grads,
        share=1 / zero.num_shards if zero.stage == 3 else 1.0,
        in_backward=microbatches if in_backward else 0,
        work=merged(work),
        sizes=dict(shape),
        far=tuple(axis for axis in shape if axis in ("host", "slice")) or tuple(replicas),
    ).with_activations(activations)


def _frozen_bytes(placed: Description) -> float:
    """Bytes on a device of the parameters that are not trained."""
    trained = trained_paths(placed)
    params = (row for row in placed.rows if row.part == "params")
    return sum(row.bytes_per_device for row in params if row.path not in trained)


def _sent_params(
    zero: Zero, placed: Description, local: Description, outside: str | None, coded: Coded
) -> Iterator[SentParams]:
    """The parameters as full arrays, frozen ones without gradients."""
    replicas = set(axes_of(zero.replica_axis))
    rows = {(row.part, row.path): row for row in placed.rows}
    for row, dtype in floating_rows(local, "params"):
        grad = rows.get(("grads", row.path), rows["params", row.path])
        elements = row.bytes_per_device / dtype.itemsize
        trained = grad.part == "grads"
        itemsize = zero.precision.of_sum(zero.precision.of_loss(dtype)).itemsize
        named = outside is not None and re.search(outside, row.path)
        placed_bytes = rows["params", row.path].bytes_per_device
        yield SentParams(
            summed=elements * itemsize if trained else 0.0,
            stored=row.bytes_per_device if trained else 0.0,
            gathered=_gathered_bytes(zero, rows["params", row.path], dtype, elements, coded),
            once=bool(named) or not zero.reshard_after_forward,
            whole=bool(grad.note),
            spread=any(replicas & set(axes_of(entry)) for entry in grad.spec),
            averaged=placed_bytes * sum_dtype(dtype).itemsize / dtype.itemsize if trained else 0.0,
        )


def _gathered_bytes(zero: Zero, row: Row, dtype: DType, elements: float, coded: Coded) -> float:
    """Bytes of one full parameter as stage 3 gathers it: in the dtype of the loss, or in codes."""
    # Stacked layers count as one array, though a scan gathers them one by one.
    bits = zero.precision.gather_bits
    shard = row.bytes_per_device / dtype.itemsize  # elements
    if row.path in coded:
        dims = coded[row.path]
        entries = by_dim(row.spec, len(row.shape))
        # An all-reduce finds the scales of what several devices have shards of.
        several = any({*axes_of(entries[d])} & {*axes_of(zero.axis)} for d in dims)
        return elements * (1 + (8 if several else 4) / math.prod(row.shape[d] for d in dims))
    if not bits or len(row.shape) < 2 or shard < BLOCK_SIZE:
        return elements * zero.precision.of_loss(dtype).itemsize
    num_blocks = math.ceil(shard / BLOCK_SIZE)
    return zero.num_shards * num_blocks * (BLOCK_SIZE * bits / 8 + 4)  # codes, a float32 scale
