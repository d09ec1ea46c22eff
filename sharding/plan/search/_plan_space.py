"""The plans that a search compares: every way to share a step among devices."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from optax_ext import STATE_FORMATS
from sharding.plan._format import check_choice
from sharding.plan.cost._parallel_plan import (
    MATMULS,
    OF_STATE,
    PLANNED,
    RECOMPUTE,
    WEIGHTS,
    ParallelPlan,
)
from sharding.plan.cost._pipeline_schedules import (
    ASYNC_SCHEDULES,
    SCHEDULES,
    SPLIT_SCHEDULES,
    chunks_of,
)
from sharding.plan.cost._plan_costs import PlanCosts
from sharding.plan.cost._wire_and_flops import sync_of
from sharding.plan.model._models import Decoder
from sharding.plan.search._traced_model import AnyModel

# Forms of recomputation whose activations the planner knows.
SEARCHED = tuple(name for name in RECOMPUTE if name != "selective")
# What ``keep`` takes.
KEPT = (
    *("data", "experts", "tensor", "pipe", "microbatch", "microbatches", "schedule", "chunks"),
    *("even", "recompute", "tiles", "matmuls", *OF_STATE),
)


@dataclasses.dataclass(frozen=True)
class PlanGroup:
    """Plans with the same forward and backward passes."""

    passes: ParallelPlan  # a plan without ZeRO
    variants: tuple[dict[str, Any], ...]  # the fields ``OF_STATE`` of the plans

    def plans(self) -> Iterator[ParallelPlan]:
        for variant in self.variants:
            yield dataclasses.replace(self.passes, **variant)

    def values(self, name: str) -> set[Any]:
        if name in OF_STATE:
            return {variant[name] for variant in self.variants}
        return {getattr(self.passes, name)}


@dataclasses.dataclass(frozen=True)
class PlanSpace:
    """All plans of a step: devices and sequences are shared in all divisors.

    Chunks of a pipeline have the layers with which a step is fastest, or equal ones where these are
    fewer.
    """

    model: AnyModel  # the model
    num_devices: int  # of the machine
    sequences: int  # of all devices in a step
    recompute: tuple[str, ...] = SEARCHED  # what backward passes may compute again
    tiles: tuple[int, ...] = (1,)  # in how many a traced loss may have its large values
    offload: tuple[bool | str, ...] = (False, True)  # whether state may be in host memory
    asynchronous: bool = False  # whether pipelines may run without a flush, which is lossy
    state_formats: tuple[str | None, ...] = (None,)  # others than None are lossy
    weights: tuple[str, ...] = ("plain",)  # what updates the parameters
    syncs: tuple[str | None, ...] = (None,)  # others than None are lossy
    matmuls: tuple[str | None, ...] = (None,)  # others than None are lossy
    in_backward: tuple[bool, ...] = (False,)  # whether layers are updated in the backward pass
    # of the plans: their bytes, and what is left out; None: the usual bytes, and nothing is
    costs: PlanCosts | None = None

    def plans(self, keep: Mapping[str, Any] | None = None) -> Iterator[ParallelPlan]:
        """The plans; of those with the kept values only, or with one of a tuple of them."""
        for group in self.groups(keep):
            yield from group.plans()

    def groups(self, keep: Mapping[str, Any] | None = None) -> Iterator[PlanGroup]:
        """The same plans, grouped by their forward and backward passes."""
        kept = {name: x if isinstance(x, tuple) else (x,) for name, x in (keep or {}).items()}
        for name in kept:
            check_choice("what is kept", name, KEPT)
        of_state = {name: values for name, values in kept.items() if name in OF_STATE}
        variants = functools.cache(self._variants)  # of data parallelism
        for passes in self._passes():
            if any(getattr(passes, k) not in kept[k] for k in kept if k not in OF_STATE):
                continue
            alone = passes.pipe * passes.tensor * passes.experts == 1
            possible = tuple(
                x
                for x in variants(passes.data)
                if allows(passes, self.model, x["stage"], x["update_in_backward"])
                and not (passes.asynchronous and (x["offload"] or x["weights"] != "plain"))
                and not (x["sync"] and (x["update_in_backward"] or not alone))
                and all(x[name] in values for name, values in of_state.items())
            )
            # Equal chunks are worth it where they have fewer layers than the fastest.
            spares = not passes.even or not self.costs or self.costs.spares(passes)
            if possible and spares:
                yield PlanGroup(passes, possible)

    def _passes(self) -> Iterator[ParallelPlan]:
        """Plans without ZeRO."""
        for pipe, tensor, experts in self._meshes():
            data = self.num_devices // (pipe * tensor * experts)
            if self.sequences % (data * experts):
                continue
            own = self.sequences // (data * experts)
            matmuls = self.matmuls if tensor * experts == 1 else (None,)
            every = itertools.product(self.recompute, self.tiles, matmuls)
            forms = [form for form in every if form[1] == 1 or form[0] not in PLANNED]
            for microbatch, (recompute, tiles, low) in itertools.product(divisors(own), forms):
                schedules = self._schedules(pipe, own // microbatch, recompute)
                for schedule, even in itertools.product(schedules, (False, True)[: min(pipe, 2)]):
                    yield ParallelPlan(
                        *(data, tensor, pipe, microbatch, own // microbatch),
                        **(schedule | {"even": even, "recompute": recompute, "tiles": tiles}),
                        experts=experts,
                        matmuls=low,
                    )

    def _variants(self, data: int) -> list[dict[str, Any]]:
        """ZeRO stages with their replicas, and where and in which format state is."""
        stages = [(stage, 1, False) for stage in (range(4) if data > 1 else [0])]
        stages += itertools.product((1, 2, 3), divisors(data)[1:-1], (False, True))
        others = (self.offload, self.state_formats, self.weights, self.syncs, self.in_backward)
        variants = []
        for (stage, replicas, spread), *values in itertools.product(stages, *others):
            every = (stage, replicas, spread, *values)
            variant: dict[str, Any] = dict(zip(OF_STATE, every, strict=True))
            form = variant["state_format"], variant["weights"]
            if variant["offload"] == "update":  # which the CPU cannot do for all states
                possible = not self.costs or self.costs.updates_on_host(*form)
                if variant["update_in_backward"] or not possible:
                    continue
            # A compressed sync is that of replicas, or of stages without gathered layers.
            if sync := variant["sync"]:
                plan = ParallelPlan(data, stage=stage, replicas=replicas, sync=sync)
                gathers = replicas > 1 and isinstance(self.model, Decoder)
                possible = data > 1 and not spread and (stage < 3 or gathers)
                # Left out, too, where it compresses no gradient.
                if not possible or (self.costs and not self.costs.sync(plan).moved):
                    continue
            variants.append(variant)
        return variants

    def _meshes(self) -> Iterator[tuple[int, int, int]]:
        """Numbers of stages, of devices that share each layer, and of those with other experts."""
        model = self.model
        if not isinstance(model, Decoder):  # its mesh says who shares a layer
            yield 1, model.tensor, 1
            return
        experts = math.gcd(self.num_devices, model.experts.number if model.experts else 1)
        yield from ((1, 1, devices) for devices in divisors(experts))
        alone = model.experts or model.latent  # no device shares a layer
        for pipe in divisors(self.num_devices):
            if pipe == 1 or (pipe <= model.layers and not model.dense_layers):
                others = 1 if alone else self.num_devices // pipe
                shared = math.gcd(others, model.heads, model.kv_heads, model.hidden)
                yield from ((pipe, x, 1) for x in divisors(shared) if pipe * x > 1)

    def _schedules(self, pipe: int, microbatches: int, recompute: str) -> Iterator[dict[str, Any]]:
        model = self.model
        if pipe == 1 or not isinstance(model, Decoder):
            yield {}
            return
        for schedule in SCHEDULES:
            if schedule in SPLIT_SCHEDULES and recompute != "none":
                continue
            first = last = chunks_of(schedule)
            if schedule == "interleaved":
                first = 2
                last = 0 if microbatches % pipe else model.layers
            for chunks in range(first, min(last, model.layers // pipe) + 1):
                yield {"schedule": schedule, "chunks": chunks}
        alone = pipe == self.num_devices and not model.tied
        fills = microbatches >= 2 * pipe - 1 and model.layers % pipe == 0
        if self.asynchronous and alone and fills:
            for schedule in ASYNC_SCHEDULES:
                yield {"schedule": schedule}


def allows(passes: ParallelPlan, model: AnyModel, stage: int, in_backward: bool) -> bool:
    """Whether layers can compute again what these passes do, at a stage."""
    # Layers of a Decoder that gather their parameters are computed again.
    named = isinstance(model, Decoder) and passes.pipe == 1
    gathers = named and stage == 3 and passes.recompute == "none"
    return not gathers and (passes.can_update_in_backward or not in_backward)


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def check_values(**searched: Sequence[str | None]) -> None:
    """Raises unless all that a search may choose is known, and there is one of each."""
    every = {
        "recompute": (*SEARCHED, *PLANNED),
        "state_formats": (None, *STATE_FORMATS),
        "weights": WEIGHTS,
        "matmuls": (None, *MATMULS),
    }
    for name, values in searched.items():
        if not values:
            raise ValueError(f"{name} must have at least one value, got none.")
        if unknown := [value for value in values if value not in every.get(name, values)]:
            known, given = (", ".join(map(repr, x)) for x in (every[name], unknown))
            raise ValueError(f"{name} must be of {known}, got {given}.")
    for sync in searched["syncs"]:
        if sync is not None:
            sync_of(sync)
