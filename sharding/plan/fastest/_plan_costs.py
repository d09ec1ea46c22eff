"""Memory and time of plans of one model, by the planner."""

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
from sharding.plan._saved_names import PARTLY
from sharding.plan.pipelines._layer_costs import LayerCost, layer_costs
from sharding.plan.pipelines._pipeline_stages import StageEstimates, pipeline_stages
from sharding.plan.timing._layer_time import Implementation
from sharding.plan.timing._mesh_groups import Machine
from sharding.plan.timing._parallel_plan import ParallelPlan
from sharding.plan.timing._step_seconds import StepSeconds
from sharding.plan.timing._step_time import chunk_layers, step_seconds

_TOKEN = 4  # bytes
TENSOR_AXIS = "model"  # of the devices that share each layer


class PlanCosts:
    """Memory and time of plans of one model; what plans share is computed once.

    Bytes of parameters, gradients, state and batch are those of ``estimate``; activations are those
    that the code of the model stores on one of the devices that share a layer. They are freed
    before the update, as unreduced gradients are; at stages 1 and 2 it gathers the new parameters
    beside the old ones. All of a pipeline is that of ``pipeline_stages``.

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
        plan = self._plan(1, 1, 1, False, state_format, False)
        stage = plan.stage("stage 0")
        return (stage.opt_state + stage.master) / plan.num_params

    def fullest(self, plan: ParallelPlan) -> float:
        """Bytes of the fullest device."""
        if plan.pipe > 1:
            return self.pipelined(plan)
        found = self._plan(
            *(plan.shards, plan.replicas, plan.tensor, plan.microbatches > 1),
            *(plan.state_format, plan.offload),
        )
        name = f"{plan.stage} hybrid" if plan.replicas > 1 else f"stage {plan.stage}"
        held = found.stage(name)
        backward = held.memory + held.unreduced + self.activations(plan)
        grads = held.grads / (plan.shards if plan.stage == 1 else 1)
        update = held.arguments + grads + _updated(plan, held.params)
        return max(backward, update) + self.batch(plan)

    def activations(self, plan: ParallelPlan) -> float:
        """Bytes of what is stored, temporaries, and gathered layers; without a pipeline."""
        costs = self._costs(plan.microbatch, _recompute(plan), plan.tensor)
        stored = sum(cost.activation_bytes for cost in costs)
        if not plan.gathers_layers:
            return stored + max(cost.working_bytes for cost in costs)
        # Stage 3 has full parameters of what it computes, and their gradients; beside the head, the
        # embedding is still there.
        most = [cost.working_bytes + 2 * cost.param_bytes for cost in costs]
        most[-1] += 0 if self.model.tied else costs[0].param_bytes
        return stored + max(most)

    def pipelined(self, plan: ParallelPlan) -> float:
        """Bytes of each device of a pipeline.

        The update needs less than what it takes the place of: accumulated gradients are float32.
        """
        assert plan.tensor == 1, "plans of the space have either"
        estimates = self._stages(plan.pipe, plan.data, plan.stage, plan.state_format, plan.offload)
        stages = pipeline_stages(
            estimates,
            self._costs(plan.microbatch, _recompute(plan), 1),
            self.ranges(plan),
            schedule=plan.schedule,
            microbatches=plan.microbatches,
        )
        return stages[0].memory + self.batch(plan)

    def forms(self, recompute: Sequence[str]) -> tuple[str, ...]:
        """The forms of recomputation that differ."""
        return tuple(recompute)

    def seconds(self, plan: ParallelPlan, *, ideal: bool = False) -> StepSeconds:
        """The time of a step; see ``step_seconds``."""
        return step_seconds(
            *(self.model, plan, self.machine),
            length=self.length,
            implementation=self.implementation,
            ideal=ideal,
        )

    def layers(self, plan: ParallelPlan) -> tuple[int, ...]:
        """Layers of each chunk."""
        return chunk_layers(
            *(self.model, plan, self.machine),
            length=self.length,
            implementation=self.implementation,
        )

    def ranges(self, plan: ParallelPlan) -> list[tuple[int, int]]:
        """The first layer of each chunk and the one after its last, as ``layer_costs`` has them."""
        numbers = self.layers(plan)
        bounds = [0]
        for i, number in enumerate(numbers):
            bounds.append(bounds[-1] + number + (i == 0) + (i == len(numbers) - 1))
        return list(itertools.pairwise(bounds))

    def batch(self, plan: ParallelPlan) -> float:
        """Bytes of a device's part of the batch."""
        return float(_TOKEN * plan.microbatches * plan.microbatch * (self.length + 1))

    def _layer_costs(
        self, microbatch: int, recompute: bool | str, tensor: int
    ) -> Sequence[LayerCost]:
        return layer_costs(
            self.model,
            self.machine.device,
            batch=microbatch,
            length=self.length,
            dtype=self.dtype,
            recompute=recompute,
            tensor=tensor,
        )

    def _estimate(
        self,
        shards: int,
        replicas: int,
        tensor: int,
        several: bool,
        state_format: str | None,
        offload: bool,
    ) -> Plan:
        zero = zero_of(shards, replicas, 3, offload, tensor)
        return estimate(
            *(self.model.abstract(self.dtype), self.tx, zero),
            param_specs=self.model.specs(TENSOR_AXIS, tensor) if tensor > 1 else None,
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


def _recompute(plan: ParallelPlan) -> bool | str:
    """The recomputation of a plan as ``layer_costs`` takes it."""
    return plan.recompute if plan.recompute in PARTLY else plan.recompute != "none"


def _updated(plan: ParallelPlan, params: float) -> float:
    """Bytes of updated parameters that are gathered while the old ones are still there."""
    return params if plan.stage in (1, 2) and plan.shards > 1 else 0.0


def zero_of(shards: int, replicas: int, stage: int, offload: bool, tensor: int = 1) -> Zero:
    """The ``Zero`` of a plan, on an abstract mesh.

    Its axes are those of replicas, of shards, and of devices that share each layer, if there are.
    """
    sizes = {"replica": replicas} if replicas > 1 else {}
    sizes |= {"data": shards} | ({TENSOR_AXIS: tensor} if tensor > 1 else {})
    return Zero(
        jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes)),
        stage=stage,
        axis="data",
        replica_axis="replica" if replicas > 1 else None,
        offload="optimizer" if offload else None,
    )
