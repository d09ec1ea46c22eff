"""Memory and time of plans of a model that is traced."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import optax

from sharding.plan.cost._parallel_plan import ParallelPlan
from sharding.plan.cost._plan_costs import PlanCosts
from sharding.plan.cost._step_time import Passes, traced_passes
from sharding.plan.machine._mesh_groups import Machine
from sharding.plan.machine._tiles import num_bytes
from sharding.plan.model._traced_model import Traced, TracedModel


class TracedCosts(PlanCosts):
    """Memory and time of plans of a ``TracedModel``; arguments as those of ``PlanCosts``.

    Two traces, of one and of two examples, are enough: everything is linear in the examples.
    """

    model: TracedModel  # type: ignore[assignment]

    def __init__(
        self, model: TracedModel, tx: optax.GradientTransformation, machine: Machine, **options: Any
    ):
        super().__init__(model, tx, machine, **options)  # type: ignore[arg-type]
        self._traced = functools.cache(lambda size, form: self.model.traced(size, self.dtype, form))
        params = jax.tree.leaves(model.abstract(self.dtype))
        self._sizes = [float(math.prod(x.shape)) for x in params]
        self._layer_bytes = functools.cache(lambda: self.model.layer_bytes(self.dtype))

    def traced(self, size: int, recompute: str) -> Traced:
        """A micro-batch of some examples of one device."""
        one, two = (self._traced(number, recompute) for number in (1, 2))
        return Traced(*(a + (size - 1) * (b - a) for a, b in zip(one, two, strict=True)))

    def forms(self, recompute: Sequence[str]) -> tuple[str, ...]:
        """Those that differ in what is stored or computed: a model may have none of the names."""
        found: dict[Traced, str] = {}
        for form in sorted(recompute, key=lambda form: form not in ("none", "full")):
            found.setdefault(self._traced(1, form), form)
        return tuple(form for form in recompute if form in found.values())

    def activations(self, plan: ParallelPlan, grads: float = 0.0) -> float:
        """Bytes of what is stored, of temporaries, and of what stage 3 gathers.

        These are a layer, or what is outside of layers, and gradients of the same size. ``grads``
        are beside the temporaries.
        """
        traced = self.traced(plan.microbatch, plan.recompute)
        layer, outside = self._layer_bytes() if plan.gathers_layers else (0.0, 0.0)
        return traced.stored + max(traced.working + 2 * layer + grads, 2 * outside)

    def batch(self, plan: ParallelPlan) -> float:
        """Bytes of a device's part of the batch."""
        return float(num_bytes(self.model.batch(plan.microbatch * plan.microbatches)))

    def _passes_of(self, plan: ParallelPlan, ideal: bool) -> Passes:
        traced = self.traced(plan.microbatch, plan.recompute)
        return traced_passes(
            self.machine,
            flops=plan.microbatches * traced.flops,
            moved=plan.microbatches * traced.moved,
            params=sum(self._sizes),
            gathers=len(self._sizes),
            ideal=ideal,
        )
