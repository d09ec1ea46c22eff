"""Memory of the fullest device under a plan, by the planner."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sharding._zero import Zero
from sharding.plan._models import Decoder
from sharding.plan._plan import Plan, estimate
from sharding.plan._tiles import num_bytes
from sharding.plan.pipelines._layer_costs import LayerCost, layer_costs
from sharding.plan.pipelines._pipeline_stages import StageEstimates, pipeline_stages
from sharding.plan.timing._layer_time import Implementation
from sharding.plan.timing._mesh_groups import Machine
from sharding.plan.timing._parallel_plan import ParallelPlan
from sharding.plan.timing._step_time import chunk_layers

_TOKEN = 4  # bytes


def gathered_bytes(params: Any, layers: Any, num_layers: int) -> float:
    """Full parameters that stage 3 has at once, in bytes.

    Two layers, the gradients of one, and everything outside of the layers.

    >>> import jax
    >>> x = jax.ShapeDtypeStruct((8, 16), "float32")
    >>> gathered_bytes({"layers": x, "embed": x}, x, 8)
    704.0
    """
    stacked = num_bytes(layers)
    return 3 * stacked / num_layers + num_bytes(params) - stacked


class PlanMemory:
    """Memory of plans of one model; what plans share is computed once.

    Bytes of parameters, gradients, state and batch are those of ``estimate``; activations are those
    that the code of the model stores. They are freed before the update, as unreduced gradients are;
    at stages 1 and 2 it gathers the new parameters beside the old ones. All of a pipeline is that
    of ``pipeline_stages``.

    Args:
      model: the model.
      tx: the transformation.
      machine: the devices.
      length: tokens of a sequence.
      dtype: of the parameters.
      implementation: as for ``step_seconds``.
    """

    def __init__(
        self,
        model: Decoder,
        tx: optax.GradientTransformation,
        machine: Machine,
        *,
        length: int,
        dtype: Any,
        implementation: Implementation,
    ):
        self.model = model
        self.tx = tx
        self.machine = machine
        self.length = length
        self.dtype = jnp.dtype(dtype)
        self.implementation = implementation
        # Caches of this object alone.
        self._plan = functools.cache(self._estimate)
        self._stages = functools.cache(self._stage_estimates)
        self._costs = functools.cache(self._layer_costs)

    def state_bytes_in(self, state_format: str | None) -> float:
        """Bytes of optimizer state, in a format, and master weights for one parameter."""
        plan = self._plan(1, 1, False, state_format, False)
        stage = plan.stage("stage 0")
        return (stage.opt_state + stage.master) / plan.num_params

    def fullest(self, plan: ParallelPlan) -> float:
        """Bytes of the fullest device."""
        if plan.pipe > 1:
            return self.pipelined(plan)
        several = plan.microbatches > 1
        found = self._plan(plan.shards, plan.replicas, several, plan.state_format, plan.offload)
        costs = self._costs(plan.microbatch, plan.recompute != "none")
        activations = sum(cost.activation_bytes for cost in costs)
        activations += max(cost.working_bytes for cost in costs)
        if plan.gathers_layers:
            params = self.model.abstract(self.dtype)
            activations += gathered_bytes(params, params["layers"], self.model.layers)
        name = f"{plan.stage} hybrid" if plan.replicas > 1 else f"stage {plan.stage}"
        held = found.stage(name)
        backward = held.memory + held.unreduced + activations
        grads = held.grads / (plan.shards if plan.stage == 1 else 1)
        update = held.arguments + grads + _updated(plan, held.params)
        return max(backward, update) + self._batch(plan)

    def pipelined(self, plan: ParallelPlan) -> float:
        """Bytes of each device of a pipeline.

        The update needs less than what it takes the place of: accumulated gradients are float32.
        """
        estimates = self._stages(plan.pipe, plan.data, plan.stage, plan.state_format, plan.offload)
        stages = pipeline_stages(
            estimates,
            self._costs(plan.microbatch, plan.recompute != "none"),
            self.ranges(plan),
            schedule=plan.schedule,
            microbatches=plan.microbatches,
        )
        return stages[0].memory + self._batch(plan)

    def ranges(self, plan: ParallelPlan) -> list[tuple[int, int]]:
        """The first layer of each chunk and the one after its last, as ``layer_costs`` has them."""
        numbers = chunk_layers(
            *(self.model, plan, self.machine),
            length=self.length,
            implementation=self.implementation,
        )
        bounds = [0]
        for i, number in enumerate(numbers):
            bounds.append(bounds[-1] + number + (i == 0) + (i == len(numbers) - 1))
        return list(itertools.pairwise(bounds))

    def _batch(self, plan: ParallelPlan) -> float:
        return float(_TOKEN * plan.microbatches * plan.microbatch * (self.length + 1))

    def _layer_costs(self, microbatch: int, recompute: bool) -> Sequence[LayerCost]:
        return layer_costs(
            self.model,
            self.machine.device,
            batch=microbatch,
            length=self.length,
            dtype=self.dtype,
            recompute=recompute,
        )

    def _estimate(
        self, shards: int, replicas: int, several: bool, state_format: str | None, offload: bool
    ) -> Plan:
        zero = zero_of(shards, replicas, 3, offload)
        return estimate(
            *(self.model.abstract(self.dtype), self.tx, zero),
            microbatches=2 if several else 1,
            state_format=state_format,
            device=self.machine.device,
            gathered_once=self.model.gathered_once,
        )

    def _stage_estimates(
        self, pipe: int, data: int, stage: int, state_format: str | None, offload: bool
    ) -> StageEstimates:
        return StageEstimates(
            *(self.model, self.tx, zero_of(data, 1, stage, offload)),
            num_stages=pipe,
            device=self.machine.device,
            dtype=self.dtype,
            batch=0.0,
            state_format=state_format,
        )


def _updated(plan: ParallelPlan, params: float) -> float:
    """Bytes of updated parameters that are gathered while the old ones are still there."""
    return params if plan.stage in (1, 2) and plan.shards > 1 else 0.0


def zero_of(shards: int, replicas: int, stage: int, offload: bool) -> Zero:
    """The ``Zero`` of a plan, on an abstract mesh with an axis of shards, and one of replicas."""
    sizes = {"replica": replicas, "data": shards} if replicas > 1 else {"data": shards}
    return Zero(
        jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes)),
        stage=stage,
        axis="data",
        replica_axis="replica" if replicas > 1 else None,
        offload="optimizer" if offload else None,
    )
