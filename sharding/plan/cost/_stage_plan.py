"""One stage of ZeRO in closed form: what a device holds, when that is most, and what it sends."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax

from optax_ext import flax_transformer
from sharding._types import DType, OptState, Tree
from sharding._zero import Zero
from sharding.collectives._reduce_scatter import BLOCK_SIZE
from sharding.offload._host_update import check_host_state_of_tpus
from sharding.placement._describe import Description, Row
from sharding.placement._layout import GATHERED_LAYERS
from sharding.placement._specs import axes_of
from sharding.plan._format import memory_by_part
from sharding.plan.machine._devices import DeviceKind
from sharding.plan.machine._tiles import padded_to_tiles
from sharding.plan.model._layer_costs import Activations


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagePlan:
    """What one device holds and sends at one stage, all in bytes; see ``moments``."""

    name: str  #: ``"stage 2"``, ``"3 hybrid"``, ``"3 spread"`` (``shard_state_over_replicas``)
    params: float  #: parameters
    grads: float  #: gradients, as the stage stores them
    full_grads: float  #: gradients of one micro-batch, unsharded
    unreduced: float  #: gradients of one micro-batch that wait to be reduced, or added
    opt_state: float  #: optimizer state without master weights
    master: float  #: master weights
    batch: float  #: the device's part of the batch; 0 where it is unknown
    host: float  #: the part of ``opt_state`` and ``master`` that is in host memory
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
    wire: float  #: bytes sent per step, in the ring convention; without what optimizers send
    #: the part of ``wire`` that leaves a host or slice, those of the mesh axis of that name; where
    #: there is none, the sums over replicas
    network: float
    host_wire: float  #: bytes that move to host memory and back per step
    moved: float  #: least traffic of device memory: parameters twice, gradients, twice the update

    @property
    def arguments(self) -> float:
        """Parameters, state and batch in device memory."""
        return self.params + self.opt_state + self.master + self.batch - self.host + self.sync

    @property
    def memory(self) -> float:
        """Arguments and gradients, which is what ZeRO counts: no activations, no temporaries."""
        return self.arguments + self.grads

    @property
    def moments(self) -> dict[str, dict[str, float]]:
        """Bytes beside ``arguments`` at each moment that may be the fullest, by what they are.

        In the backward pass of the last micro-batch: at the head, before any of its gradients is
        there; and at the layers, where compilers hold those of all layers from the first one on.
        Then the compressed sync, and the update.
        """
        if self.in_backward:
            return self._moments_in_backward
        stored, copied = self.activations or 0.0, self.copied * self.share
        gathers = self.share < 1
        outside = self.outside if gathers else 0.0
        gathered = max(self.layer, outside - self.working) if gathers else 0.0
        # Full gradients of what is outside of the layers have room for that of the logits.
        working = self.working + max(0.0, self.logits - (0.0 if gathers else self.outside))
        return _moments(
            head=(stored, self.head + copied, outside, self.summed),
            layers=(stored, working + copied, gathered, self.grads + self.unreduced),
            sync=(0.0, 0.0, 0.0, self.synced),
            update=(0.0, 0.0, self.new_params, self.updated),
        )

    @property
    def _moments_in_backward(self) -> dict[str, dict[str, float]]:
        """The same if each layer is updated as soon as its gradients exist."""
        stored, grads = self.in_backward * (self.activations or 0.0), self.grads + self.unreduced
        read = self.layer if self.host else max(0.0, self.layer - self.working)
        return _moments(
            head=(stored, self.head, 0.0, self.updated),
            layers=(stored, self.working, read, grads),
            update=(stored, self.decoded, 0.0, grads),
        )

    @property
    def peak(self) -> float:
        """``arguments``, and what is beside them at the fullest of ``moments``."""
        return self.arguments + max(sum(parts.values()) for parts in self.moments.values())

    def by_part(self, batch: float = 0.0) -> dict[str, float]:
        """``peak`` by what it is, with ``batch`` more bytes of the batch."""
        return memory_by_part(
            self.peak + batch,
            params=self.params,
            grads=self.grads + self.unreduced,
            state=self.opt_state + self.master - self.host + self.sync,
            batch=self.batch + batch,
        )

    def with_activations(self, found: Activations | None) -> Self:
        """The same with other activations."""
        names = ("activations", "working", "head", "logits", "copied")
        parts: Any = zip(names, found or (None, 0.0, 0.0, 0.0, 0.0), strict=True)
        return dataclasses.replace(self, **dict(parts))


def _moments(**moments: tuple[float, ...]) -> dict[str, dict[str, float]]:
    names = ("activations", "temporaries", "gathered", "gradients")
    return {moment: dict(zip(names, parts, strict=True)) for moment, parts in moments.items()}


def step_memory(
    zero: Zero,
    placed: Description,
    local: Description,
    tile: tuple[int, int] | None,
    microbatches: int,
    gathered_once: str | None,
    in_backward: bool,
) -> dict[str, Any]:
    """The bytes of a ``StagePlan`` that are held, but for the batch and activations.

    ``local`` is the placement at stage 0, where the user's axes alone shard; the memory of TPUs has
    tiles.
    """
    placed = padded_to_tiles(placed, tile)
    rows = [row for row in placed.rows if row.part == "opt_state"]
    opt_state = sum(row.bytes_per_device for row in rows)
    masters = [row for row in rows if "master" in re.split(r"\W+", row.path)]
    master = sum(row.bytes_per_device for row in masters)
    params = float(sum(row.bytes_per_device for row in placed.rows if row.part == "params"))
    several, known = microbatches > 1, gathered_once is not None
    used, trained = _used_bytes(zero, local), trained_paths(local)
    full = {path: n for path, n in used.items() if path in trained}
    full_grads = sum(full.values())
    # No dim of some divides: their gradients are summed in place, and nothing of them is gathered.
    whole = {row.path for row in placed.rows if row.note} if zero.num_shards > 1 else used.keys()
    divided = {path: n for path, n in full.items() if path not in whole}
    undivided = full_grads - sum(divided.values())
    of_layers = used if zero.stage == 3 else full  # frozen ones are gathered, too
    if not in_backward:
        of_layers = {path: n for path, n in of_layers.items() if path not in whole}
    layer, outside, group = _layer_and_outside(of_layers, local, gathered_once, placed.gather_group)

    def held(placed: Description, shards: int = 1) -> float:
        """Bytes of gradients, as accumulated or as returned, whichever is wider."""
        total = 0.0
        for row, dtype in floating_rows(placed, "grads"):
            itemsize = zero.precision.of_accumulator(dtype).itemsize if several else 0
            nbytes = row.bytes_per_device / (1 if row.path in whole else shards)
            total += nbytes / dtype.itemsize * max(itemsize, dtype.itemsize)
        return total

    # Gradients as the stage stores them; and what waits beside them: full ones to be reduced, those
    # of one micro-batch to be added.
    grads = sums = held(placed)
    sync_of_shards = zero.sync is not None and not zero.replica_axis
    if zero.stage < 2:
        unreduced = full_grads if several else 0.0
    else:
        own = float(sum(row.bytes_per_device for row, _ in floating_rows(placed, "grads")))
        if zero.shard_state_over_replicas:
            # Replicas that share the state each have a shard of their own until they are summed.
            own = undivided + sum(divided.values()) / zero.num_shards
            sums = held(local, zero.num_shards)
        unreduced = own if several else 0.0
        if zero.stage == 2 and (not known or sync_of_shards):
            unreduced = full_grads - (0.0 if several else undivided)
            if several and sync_of_shards:  # which comes after the last micro-batch
                sums = held(local)
        elif zero.stage == 2:
            # At once where one is known, but programs for GPUs hold those outside until the end.
            unreduced += max(layer, outside) if tile else layer + outside
        unreduced += sums - grads

    new_params, synced = (params if zero.shard_state_over_replicas else 0.0), 0.0
    if zero.stage in (1, 2) and zero.num_shards > 1:
        # Of the group that is gathered at once, and what no layer has.
        scale = params / sum(used.values()) if full_grads else 0.0
        new_params = scale * min(sum(divided.values()), outside + group)
    if zero.sync is not None:
        shards = zero.num_shards if zero.replica_axis else 1
        synced = grads if zero.stage == 3 else full_grads / shards
    found: dict[str, Any] = {
        "params": params,
        "grads": grads,
        "full_grads": full_grads,
        "unreduced": unreduced,
        "opt_state": opt_state - master,
        "master": master,
        "host": placed.host_bytes_per_device,
        "sync": sum(row.bytes_per_device for row in placed.rows if row.part == "sync"),
        "summed": sums if several else 0.0,
        "updated": held(placed, zero.num_shards if zero.stage == 1 else 1),
        "synced": synced,
        "layer": layer if known else 0.0,
        "outside": outside if known else 0.0,
        "new_params": new_params,
        "share": 1 / zero.num_shards if zero.stage == 3 else 1.0,
    }
    if not in_backward:
        return found

    pattern = gathered_once if gathered_once is not None else "(?!)"
    # Gradients of one layer, and their sums over micro-batches; of a tied embedding, too.
    total = sum(of_layers.values())
    share = layer / (total - outside) if total > outside else 1.0
    outer = [row for row, _ in floating_rows(local, "params") if re.search(pattern, row.path)]
    matrices = [full[row.path] for row in outer if len(row.shape) > 1]
    waiting = sum(matrices) if len(matrices) == 1 else 0.0
    summed = held(placed) / full_grads * (layer * several + waiting)
    # The state in 8 bits is computed with in 32, that of the host is loaded with the parameters.
    coded = sum(row.bytes_per_device for row in rows if jnp.dtype(row.dtype).itemsize == 1)
    found |= {"grads": summed, "unreduced": layer, "updated": max(matrices, default=0.0)}
    found |= {"decoded": 4 * coded * layer / full_grads, "in_backward": microbatches}
    return found | ({"layer": share * found["host"]} if found["host"] else {})


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


def _used_bytes(zero: Zero, local: Description) -> dict[str, float]:
    """Bytes of the full parameters by their paths, in the dtypes of the loss."""
    return {
        row.path: row.bytes_per_device / dtype.itemsize * zero.precision.of_loss(dtype).itemsize
        for row, dtype in floating_rows(local, "params")
    }


def trained_paths(placed: Description) -> set[str]:
    """The parameters that have gradients."""
    return {row.path for row in placed.rows if row.part == "grads"}


def floating_rows(placed: Description, part: str) -> Iterator[tuple[Row, Any]]:
    """Arrays of floating numbers, and their dtypes."""
    for row in placed.rows:
        if row.part == part and not row.dtype.startswith("key<"):  # of random keys
            dtype = jnp.dtype(row.dtype)
            if jnp.issubdtype(dtype, jnp.floating):
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
    precision, sync = zero.precision, zero.sync
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
) -> StagePlan:
    """The stage that a ``Zero`` runs; options are those of ``estimate``."""
    name, options, in_backward = name_of(zero), (microbatches, gathered_once), update == "backward"
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
    memory = step_memory(
        zero, placed, local, device.tile if device else None, *options, in_backward
    )
    # Streamed parameters are read in the forward pass, too, once for all micro-batches.
    read = sum(x.bytes_per_device for x in placed.rows if (x.part, x.memory) == ("params", "host"))
    updated = memory["params"] + memory["opt_state"] + memory["master"] - memory["host"]
    trained = trained_paths(placed)
    updated -= sum(
        x.bytes_per_device for x in placed.rows if x.part == "params" and x.path not in trained
    )
    linked = 2 * memory["host"] + read
    if zero.update_on == "host":  # gradients go there, parameters come back
        shards = zero.num_shards if zero.stage == 1 else 1
        sent = [x for x in placed.rows if x.part == "grads"]
        back = sum(x.bytes_per_device / (1 if x.note else shards) for x in sent)
        memory["new_params"] = back + max(0.0, memory["new_params"] - memory["updated"])
        linked = 2 * back
    if not (temporaries or in_backward):
        memory |= dict.fromkeys(("unreduced", "layer", "outside", "new_params"), 0.0)
    return StagePlan(
        name=name,
        batch=batch,
        **memory,
        **_wire(zero, placed, local, *options),
        host_wire=linked,
        moved=microbatches * (2 * sum(_used_bytes(zero, local).values()) + memory["full_grads"])
        + 2 * updated,
    ).with_activations(activations)


def _wire(
    zero: Zero, placed: Description, local: Description, microbatches: int, outside: str | None
) -> dict[str, Any]:
    """Bytes that one device sends per step, and the part of them that takes the network.

    A collective over h hosts of g devices is one within each host, and one between hosts in which a
    device sends its part, 1 / g.
    """
    shape, replicas = zero.mesh.shape, axes_of(zero.replica_axis)
    within, n, total, network = axes_of(zero.axis), zero.num_shards, 0.0, 0.0
    far = {"host", "slice"} & set(shape) or set(replicas)

    def send(nbytes: float, axes: tuple[str, ...]) -> None:
        """Counts one pass of full arrays over these axes."""
        nonlocal total, network
        devices = math.prod(shape[axis] for axis in axes)
        hosts = math.prod(shape[axis] for axis in axes if axis in far)
        total += nbytes * (devices - 1) / devices
        network += nbytes * (hosts - 1) / devices

    rows = {(row.part, row.path): row for row in placed.rows}
    for row, dtype in floating_rows(local, "params"):
        grad = rows.get(("grads", row.path), rows["params", row.path])

        # Bytes of the full array: as stored, as gradients are summed. Frozen ones have none.
        elements = row.bytes_per_device / dtype.itemsize
        trained = grad.part == "grads"
        stored = row.bytes_per_device * trained
        summed = trained * elements * zero.precision.of_sum(zero.precision.of_loss(dtype)).itemsize

        # Unsharded gradients are all-reduced over all devices, once per step.
        if zero.stage == 0 or grad.note:
            send(2 * summed, within + replicas)
            continue

        # Within a replica: reduce-scatters of gradients, all-gathers of parameters.
        if zero.stage == 3:
            named = outside is not None and re.search(outside, row.path)
            once = named or not zero.reshard_after_forward
            gathered = _gathered_bytes(zero, rows["params", row.path], dtype, elements)
            passes = microbatches * ((1 if once else 2) * gathered + summed)
        else:
            passes = (microbatches if zero.stage == 2 else 1) * summed + stored
        send(passes, within)

        # Between replicas: an all-reduce of the gradient's shard; or a reduce-scatter of it and an
        # all-gather of the updated parameter.
        grad_axes = {axis for entry in grad.spec for axis in axes_of(entry)}
        second = stored if grad_axes & set(replicas) else summed
        send((summed + second) / n, replicas)
    return {"wire": total, "network": network}


def _gathered_bytes(zero: Zero, row: Row, dtype: DType, elements: float) -> float:
    """Bytes of one full parameter as stage 3 gathers it: in the dtype of the loss, or in codes."""
    # Stacked layers count as one array, though a scan gathers them one by one.
    bits = zero.precision.gather_bits
    shard = row.bytes_per_device / dtype.itemsize  # elements
    if not bits or len(row.shape) < 2 or shard < BLOCK_SIZE:
        return elements * zero.precision.of_loss(dtype).itemsize
    num_blocks = math.ceil(shard / BLOCK_SIZE)
    return zero.num_shards * num_blocks * (BLOCK_SIZE * bits / 8 + 4)  # codes, a float32 scale
