"""One stage of ZeRO in closed form: the bytes that one device holds and sends."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from optax_ext import flax_transformer
from sharding._types import DType
from sharding._zero import Zero
from sharding.collectives._all_gather import BLOCK_SIZE
from sharding.placement._describe import Description, Row
from sharding.placement._specs import axes_of
from sharding.plan.machine._tiles import padded_to_tiles


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """What one device holds and sends at one stage; all in bytes."""

    name: str  #: ``"stage 2"``, ``"3 hybrid"``, ``"3 spread"`` (``shard_state_over_replicas``)
    params: float  #: parameters
    grads: float  #: gradients, as the stage stores them
    unreduced: float  #: gradients of one micro-batch that wait to be reduced, or added
    opt_state: float  #: optimizer state without master weights
    master: float  #: master weights
    batch: float  #: the device's part of the batch; 0 where it is unknown
    host: float  #: the part of ``opt_state`` and ``master`` that is in host memory
    wire: float  #: bytes sent per step, in the ring convention; without what optimizers send
    #: the part of ``wire`` that leaves a host or slice, those of the mesh axis of that name; where
    #: there is none, the sums over replicas
    network: float
    host_wire: float  #: bytes that move to host memory and back per step
    moved: float  #: least traffic of device memory: parameters twice, gradients, twice the update
    sync: float = 0.0  #: state of ``Zero.sync``, such as error-feedback residuals
    activations: float | None = None  #: of one micro-batch, if ``estimate`` was given them

    @property
    def arguments(self) -> float:
        """Parameters, state and batch in device memory."""
        return self.params + self.opt_state + self.master + self.batch - self.host + self.sync

    @property
    def memory(self) -> float:
        """Arguments and gradients, which is what ZeRO counts: no activations, no temporaries."""
        return self.arguments + self.grads

    @property
    def peak(self) -> float:
        """``memory``, unreduced gradients, and activations if counted."""
        return self.memory + self.unreduced + (self.activations or 0.0)


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
    name: str,
    zero: Zero,
    placed: Description,
    *,
    local: Description,
    tile: tuple[int, int] | None,
    microbatches: int = 1,
    batch: float = 0.0,
    gathered_once: str | None = None,
    activations: float | None = None,
) -> StagePlan:
    """The plan of one stage, by its placement and that at stage 0, where the user's axes shard."""
    sent = _wire(zero, placed, local, microbatches, gathered_once)
    parts = _memory(zero, padded_to_tiles(placed, tile), local, microbatches, gathered_once)
    return StagePlan(name, batch=batch, activations=activations, **parts, **sent)


# --- Memory ---------------------------------------------------------------------------------------


def _memory(
    zero: Zero, placed: Description, local: Description, microbatches: int, outside: str | None
) -> dict[str, float]:
    """The fields of a ``StagePlan`` about memory, but for the batch."""
    # Optimizer state.
    rows = [row for row in placed.rows if row.part == "opt_state"]
    opt_state = sum(row.bytes_per_device for row in rows)
    masters = [row for row in rows if "master" in re.split(r"\W+", row.path)]
    master = sum(row.bytes_per_device for row in masters)

    # Gradients of one micro-batch, full, in the dtype of the loss.
    full: dict[str, tuple[float, tuple[int, ...]]] = {}  # bytes and shape, by path
    for row, dtype in _floating_rows(local, "params"):
        itemsize = zero.precision.of_loss(dtype).itemsize
        full[row.path] = (row.bytes_per_device / dtype.itemsize * itemsize, row.shape)
    full_grads = sum(nbytes for nbytes, _ in full.values())

    # Gradients as the stage stores them: the accumulator or the result, whichever is wider.
    grads = reduced = 0.0
    for row, dtype in _floating_rows(placed, "grads"):
        itemsize = zero.precision.of_accumulator(dtype).itemsize if microbatches > 1 else 0
        grads += row.bytes_per_device / dtype.itemsize * max(itemsize, dtype.itemsize)
        reduced += row.bytes_per_device

    # Beside them, what waits: full gradients to be reduced, reduced ones to be added. Replicas that
    # share the state each have theirs whole until they are summed.
    if zero.shard_state_over_replicas:
        reduced = full_grads / zero.num_shards
    added = reduced if microbatches > 1 else 0.0
    in_layers = zero.sync is None or zero.replica_axis  # a sync of replicas comes after that
    if zero.stage == 2 and outside is not None and in_layers:
        unreduced = _of_one_layer(full, outside) + added
    elif zero.stage == 2 or (zero.stage < 2 and microbatches > 1):
        unreduced = full_grads
    elif zero.stage == 3:
        unreduced = reduced if zero.shard_state_over_replicas else added
    else:
        unreduced = 0.0

    params, host = placed.bytes_per_device["params"], placed.host_bytes_per_device
    return {
        "params": params,
        "grads": grads,
        "unreduced": unreduced,
        "opt_state": opt_state - master,
        "master": master,
        "host": host,
        "host_wire": 2 * host,
        "moved": 3 * microbatches * full_grads + 2 * (params + opt_state - host),
        "sync": sum(row.bytes_per_device for row in placed.rows if row.part == "sync"),
    }


def _of_one_layer(full: dict[str, tuple[float, tuple[int, ...]]], outside: str) -> float:
    """Bytes of gradients that one backward pass holds unreduced, if layers are reduced in it."""
    pattern = flax_transformer().stacked or "(?!)"
    names = {path: path[: named.end()] for path in full if (named := re.search(pattern, path))}
    modules = collections.defaultdict(list)
    for path, name in names.items():
        modules[name].append(full[path][1])
    # Arrays of stacked layers have a first dim of one size, and others.
    stacked = {
        name
        for name, shapes in modules.items()
        if len({shape[:1] for shape in shapes}) == 1
        and (min(map(len, shapes)) > 1 or max(map(len, shapes)) > 2)
    }
    layers: dict[str, float] = collections.defaultdict(float)
    always = 0.0
    for path, (nbytes, shape) in full.items():
        if re.search(outside, path):
            always += nbytes
        elif names.get(path) in stacked:
            layers[names[path]] += nbytes / max(shape[0], 1)
        else:
            numbered = re.match(r".*?\d+(?=/|$)", path)
            layers[numbered[0] if numbered else path] += nbytes
    return always + max(layers.values(), default=0.0)


def _floating_rows(placed: Description, part: str) -> Iterator[tuple[Row, Any]]:
    """Arrays of floating numbers, and their dtypes."""
    for row in placed.rows:
        if row.part == part and not row.dtype.startswith("key<"):  # of random keys
            dtype = jnp.dtype(row.dtype)
            if jnp.issubdtype(dtype, jnp.floating):
                yield row, dtype


# --- Wire bytes -----------------------------------------------------------------------------------


def _wire(
    zero: Zero, placed: Description, local: Description, microbatches: int, outside: str | None
) -> dict[str, float]:
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
    for row, dtype in _floating_rows(local, "params"):
        grad = rows["grads", row.path]

        # Bytes of the full array: as stored, as gradients are summed.
        elements = row.bytes_per_device / dtype.itemsize
        stored = row.bytes_per_device
        summed = elements * zero.precision.of_sum(zero.precision.of_loss(dtype)).itemsize

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
