"""What one device of a pipeline holds and sends, and how fast the links are that it sends over."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sharding._zero import Zero
from sharding.plan._devices import DeviceKind
from sharding.plan._models import Decoder
from sharding.plan._plan import Plan, estimate
from sharding.plan._stage_plan import StagePlan, name_of
from sharding.plan.pipelines._layer_costs import LayerCost


@dataclasses.dataclass(frozen=True)
class Links:
    """Groups of devices, such as hosts or slices, and the links within and between them.

    Attributes:
      groups: their number.
      devices: of all groups.
      link: bytes per second that a device sends within its group.
      network: bytes per second that it sends to other groups.
    """

    groups: int
    devices: int
    link: float
    network: float

    def permute_seconds(self, nbytes: float) -> float:
        """The time of sending to the next stage; the slowest link determines it."""
        return nbytes / (self.network if self.groups > 1 else self.link)

    def collective_seconds(self, nbytes: float, devices: int) -> float:
        """The time in which each of some neighbouring devices sends ``nbytes`` in collectives.

        Across h groups of g devices each array is reduced or gathered within the groups first: of
        (n - 1) / n of an array, (g - 1) / g stay within, and (h - 1) / (h g) leave.
        """
        inside = self.devices // self.groups
        if devices <= inside:
            return nbytes / self.link
        groups = math.ceil(devices / inside)
        outside = (groups - 1) / (groups * inside) / ((devices - 1) / devices)
        return max(nbytes * (1 - outside) / self.link, nbytes * outside / self.network)


def links_of(zero: Zero, device: DeviceKind) -> Links:
    """The links of a mesh whose axis of hosts or slices, if there are several, has that name."""
    shape = dict(zero.mesh.shape)
    groups = shape.get("host", 1) * shape.get("slice", 1)
    return Links(groups, math.prod(shape.values()), device.link, device.network or device.link)


@dataclasses.dataclass(frozen=True)
class PipelineStage:
    """One device of each stage of a pipeline; bytes, and seconds for one micro-batch.

    Attributes:
      layers: consecutive layers by chunk: the first, and the one after the last.
      forward: seconds of all chunks.
      backward: seconds of all chunks.
      in_flight: micro-batches whose activations it stores; chunks of them where it has several.
      params: parameters, with those that stage 3 gathers.
      grads: gradients that are accumulated over micro-batches, and their shards.
      state: optimizer state and master weights in device memory.
      activations: of the micro-batches in flight, and temporaries of one backward pass.
      batch: the device's part of the batch.
      permuted: bytes that it sends to other stages in a step.
      synced: bytes that it sends to the replicas of its stage in a step; those of a tied embedding,
        which the first stage and the last one sum, too.
    """

    layers: tuple[tuple[int, int], ...]
    forward: float
    backward: float
    in_flight: int
    params: float
    grads: float
    state: float
    activations: float
    batch: float
    permuted: float
    synced: float

    @property
    def memory(self) -> float:
        """All that it holds."""
        return self.params + self.grads + self.state + self.activations + self.batch


def params_of_layers(
    model: Decoder, dtype: Any, chunks: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """Abstract parameters of some layers as ``layer_costs`` numbers them; stacked ones as a stack.

    The head has the embedding of a tied model, too.
    """
    full = model.abstract(dtype)
    numbers = [layer for first, stop in chunks for layer in range(first, stop)]
    found: dict[str, Any] = {}
    if 0 in numbers:
        found |= {name: full[name] for name in ("embed", "positions") if name in full}
    if model.layers + 1 in numbers:
        found |= {name: full[name] for name in ("norm", "unembed") if name in full}
        found |= {"embed": full["embed"]} if model.tied else {}
    decoders = [layer - 1 for layer in numbers if 0 < layer <= model.layers]
    if not decoders:
        return found
    if model.scan:
        layers = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((len(decoders), *x.shape[1:]), x.dtype), full["layers"]
        )
    else:
        layers = [full["layers"][i] for i in decoders]
    return found | {"layers": layers}


class StageEstimates:
    """Plans of ZeRO over the replicas of a stage, computed once for equal stages.

    Args:
      model: the model.
      tx: the transformation.
      zero: over the replicas of a stage alone.
      device: its figures.
      dtype: of the parameters.
      batch: bytes of a device's part of the batch.
      state_format: as for ``estimate``.
    """

    def __init__(
        self,
        model: Decoder,
        tx: optax.GradientTransformation,
        zero: Zero,
        *,
        device: DeviceKind,
        dtype: Any,
        batch: float,
        state_format: str | None,
    ):
        self.model = model
        self.zero = zero
        self.dtype = dtype
        self._found: dict[tuple[bool, bool, int], Plan] = {}
        # A stage's parameters are gathered once in a step, as those outside the layers of a model.
        self._estimate = functools.partial(
            estimate,
            tx=tx,
            zero=zero,
            device=device,
            batch=batch,
            state_format=state_format,
            gathered_once="^" if zero.stage == 3 else None,
        )

    def of_layers(self, chunks: Sequence[tuple[int, int]]) -> Plan:
        """The plan of a device with these layers."""
        last = self.model.layers + 2
        key = (
            any(i == 0 for i, _ in chunks),
            any(j == last for _, j in chunks),
            sum(j - i for i, j in chunks),
        )
        if key not in self._found:
            params = params_of_layers(self.model, self.dtype, chunks)
            self._found[key] = self._estimate(params)
        return self._found[key]


def pipeline_stage(
    estimates: StageEstimates,
    costs: Sequence[LayerCost],
    chunks: Sequence[tuple[int, int]],
    *,
    in_flight: int,
    microbatches: int,
    ends: tuple[bool, bool],
) -> PipelineStage:
    """One device with some chunks of layers.

    Args:
      estimates: of the parameters and the state.
      costs: of all layers.
      chunks: the layers of the device: of each chunk the first, and the one after the last.
      in_flight: see ``PipelineStage``.
      microbatches: of a step.
      ends: whether it has the first chunk and the last one of the model.
    """
    zero, dtype = estimates.zero, estimates.dtype
    plan = estimates.of_layers(chunks)
    held = plan.stage(name_of(zero))

    # Gradients of all micro-batches are accumulated unsharded, and reduced once.
    wide = jnp.dtype(zero.precision.of_loss(jnp.dtype(dtype)))
    if microbatches > 1:
        wide = jnp.dtype(zero.precision.of_accumulator(wide))
    summed = jnp.dtype(zero.precision.of_sum(zero.precision.of_loss(jnp.dtype(dtype))))
    replicas = zero.num_devices
    accumulated = float(plan.num_params * wide.itemsize)
    sharded = replicas > 1 and zero.stage > 1
    unsharded = sum(cost.param_bytes for i, j in chunks for cost in costs[i:j])
    gathered = unsharded if replicas > 1 and zero.stage == 3 else 0.0

    # Activations: chunks in flight are at most as large as the largest one.
    own = [costs[i:j] for i, j in chunks]
    stored = max(sum(cost.activation_bytes for cost in chunk) for chunk in own)
    working = max(cost.working_bytes for chunk in own for cost in chunk)
    sent = max(cost.output_bytes for cost in costs)
    first, last = ends
    # The gradient of a tied embedding is summed over both ends.
    model = estimates.model
    tied = model.vocabulary * model.width * summed.itemsize if model.tied and any(ends) else 0
    return PipelineStage(
        layers=tuple(chunks),
        forward=sum(cost.forward for chunk in own for cost in chunk),
        backward=sum(cost.backward for chunk in own for cost in chunk),
        in_flight=in_flight,
        params=held.params + gathered,
        grads=accumulated + (held.grads if sharded else 0.0),
        state=_state_bytes(held),
        activations=in_flight * stored + working,
        batch=held.batch,
        permuted=microbatches * sent * (2 * len(chunks) - first - last),
        synced=held.wire + tied,
    )


def _state_bytes(held: StagePlan) -> float:
    """Optimizer state and master weights in device memory."""
    return held.opt_state + held.master - held.host
