"""One stage of ZeRO in closed form: the bytes that one device holds and sends."""

import dataclasses
import math
import re
from typing import Any

import jax
import optax

from sharding._types import DType, OptState, Tree
from sharding._zero import Zero
from sharding.collectives._all_gather import BLOCK_SIZE
from sharding.placement._describe import Description, Row
from sharding.placement._specs import axes_of
from sharding.plan.cost._step_memory import StagePlan, floating_rows, step_memory
from sharding.plan.machine._devices import DeviceKind
from sharding.plan.model._layer_costs import Activations


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
) -> StagePlan:
    """The stage that a ``Zero`` runs; options are those of ``estimate``."""
    name, options = name_of(zero), (microbatches, gathered_once)
    # Of one micro-batch, stages 1 and 2 reduce layers alike.
    if zero.stage == 1 and microbatches == 1 and gathered_once is not None:
        zero = dataclasses.replace(zero, stage=2)
    state = (params, jax.eval_shape(tx.init, params) if opt_state is None else opt_state)
    placed = zero.describe(state, tx=tx, param_specs=param_specs)
    if local is None:  # where the user's axes alone shard
        local = variants_of(zero)["stage 0"].describe(state, tx=tx, param_specs=param_specs)
    memory = step_memory(zero, placed, local, device.tile if device else None, *options)
    updated = memory["params"] + memory["opt_state"] + memory["master"] - memory["host"]
    return StagePlan(
        name=name,
        batch=batch,
        **memory,
        **_wire(zero, placed, local, *options),
        host_wire=2 * memory["host"],
        moved=3 * microbatches * memory["full_grads"] + 2 * updated,
    ).with_activations(activations)


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
    for row, dtype in floating_rows(local, "params"):
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
