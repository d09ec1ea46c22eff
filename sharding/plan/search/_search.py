"""The fastest plan that fits, by comparing all plans, with a bound that no plan goes below."""

import contextlib
import dataclasses
import functools
import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import optax

from sharding._types import DType
from sharding.plan._format import (
    check_choice,
    size,
)
from sharding.plan.cost._parallel_plan import PLANNED, ParallelPlan
from sharding.plan.cost._pipeline_schedules import ASYNC_SCHEDULES
from sharding.plan.cost._plan_costs import PlanCosts, TracedCosts
from sharding.plan.cost._step_time import StepSeconds
from sharding.plan.machine import targets
from sharding.plan.machine._collective_time import Machine
from sharding.plan.machine._devices import HEADROOM, DeviceKind, kind_of
from sharding.plan.model._models import Decoder
from sharding.plan.search._chosen_plan import ChosenPlan, SearchResult
from sharding.plan.search._plan_space import SEARCHED, PlanGroup, PlanSpace, check_values
from sharding.plan.search._traced_model import AnyModel, TracedModel
from sharding.tiles._tiled_loss import TILES

# Of equal times the first.
_SMALLEST_FIRST = ("1f1b", "aligned", "zb-h1", "zb-v", "interleaved", "gpipe", "2bw")


_FEW_TILES = 2  # numbers of tiles that are tried first


class NoPlanFits(ValueError):
    """Raised by ``search`` where no plan fits the devices."""

    def __init__(self, message: str, smallest: ChosenPlan):
        super().__init__(message)
        self.smallest = smallest  #: the plan that needs least memory


def search(
    model: AnyModel,
    tx: optax.GradientTransformation,
    target: str,
    *,
    sequences: int,
    length: int | None = None,
    dtype: DType = jnp.bfloat16,
    device: DeviceKind | None = None,
    keep: Mapping[str, Any] | None = None,
    recompute: Sequence[str] = (*SEARCHED, *PLANNED),
    tiles: Sequence[int] = TILES,
    offload: bool | str = True,
    asynchronous: bool = False,
    update_in_backward: bool = False,
    state_formats: Sequence[str | None] = (None,),
    weights: Sequence[str] = ("plain",),
    syncs: Sequence[str | None] = (None,),
    matmuls: Sequence[str | None] = (None,),
    frozen: int = 0,
    lora: int = 0,
    headroom: float = HEADROOM,
    top: int = 5,
) -> SearchResult:
    """The fastest plans for a model on a machine.

    Plans are timed by ``step_seconds``; in the order of their times they are checked for memory,
    until ``top`` fit: the result is that of an exhaustive search. No plan that fits goes below
    ``bound``, whatever shares of the peak programs reach.

    Args:
      model: one of ``MODELS``, a ``Decoder`` of one's own, or a ``TracedModel``: any parameters and
        loss, for plans without pipelines.
      tx: the transformation.
      target: the name of a machine, one of ``sharding.targets``.
      sequences: of all devices in a step; of a ``TracedModel`` examples.
      length: tokens of a sequence; None: the model's.
      dtype: of the parameters, of 16 bits; on CPUs also of 32.
      device: other figures than those of the target's kind.
      keep: values that plans must have, such as ``{"stage": 3, "pipe": 1}``; one of a tuple.
      recompute: what backward passes may compute again; see ``ParallelPlan``.
      tiles: in how many a ``TracedModel`` may have its large values, where memory is short.
      offload: whether optimizer state may be in host memory; ``"update"``: and also where the CPU
        updates it, ``Zero(update_on="host")``.
      asynchronous: whether pipelines over all devices may run without a flush, with gradients that
        are one update late (PipeDream-2BW), which is lossy; their stages have as many layers each.
      update_in_backward: whether each layer may be updated in the backward pass, where its gradient
        is made: ``train_step(update="backward")``, which not all transformations can; with
        ``offload`` layers are in host memory, too.
      state_formats: of the optimizer state, of ``optax_ext.STATE_FORMATS``; lossy but for None.
      weights: what updates parameters of 16 bits; see ``ParallelPlan``.
      syncs: of gradients: ``"powersgd(RANK)"``, ``"qsgd(8)"`` or ``"qsgd(4)"``, which are lossy, in
        plans without pipelines and shared layers.
      matmuls: recipes of ``quantized_matmuls`` for the products of layers, ``"fp8"`` or ``"int8"``,
        which are lossy, likewise; the others must be None.
      frozen: bits of frozen matrices of layers, as for ``TracedModel.fine_tuned``.
      lora: the rank of their adapters, which alone are trained then.
      headroom: the share of a device's memory that is left to the allocator.
      top: how many plans to return.

    Raises:
      ValueError: no plan exists, with the constraint; or none fits (``NoPlanFits``), and by how
        much.

    Example:
      >>> import optax
      >>> from sharding.plan import MODELS, search
      >>> found = search(MODELS["llama2-7b"], optax.adamw(1e-3), "h100x8", sequences=64)
      >>> found.best.summary
      'stage 2 over 8; 1 micro-batch of 8; recompute minimal_with_context'
      >>> found.bound < found.best.seconds.full_overlap < found.best.seconds.seconds
      True
    """
    lossy: Any = {"state_formats": state_formats, "weights": weights, "matmuls": matmuls}
    check_values(recompute=recompute, syncs=syncs, **lossy)
    if not 0 <= headroom < 1:
        raise ValueError(f"headroom must be in [0, 1), got {headroom}.")
    check_choice("offload", offload, (False, True, "update"))
    if frozen or lora:
        _check_no_matmuls(matmuls)
        model, tx = TracedModel.fine_tuned(_of_length(model, length), tx, frozen=frozen, lora=lora)
    machine = machine_of(target, device)
    for low in filter(None, matmuls):
        machine.device.rate(low)  # raises where there is none
    _check_model(model, target, length, jnp.dtype(dtype), weights, asynchronous)
    length = length or model.length
    sized = dataclasses.replace(machine, device=dataclasses.replace(machine.device, memory=0.0))
    costs = costs_of(model, tx, sized, length, jnp.dtype(dtype))
    places = (False, True, "update") if offload == "update" else (False, True)
    space = PlanSpace(
        model,
        machine.num_devices,
        sequences,
        offload=places if offload and machine.device.host_link else (False,),
        asynchronous=asynchronous,
        state_formats=tuple(state_formats),
        weights=tuple(weights),
        syncs=tuple(syncs),
        matmuls=tuple(matmuls),
        in_backward=(False, True) if update_in_backward else (False,),
        costs=costs,
    )
    budget = machine.device.memory * (1 - headroom)
    for forms, counts in _rounds(model, recompute, tiles):
        tilings = costs.tilings(counts)
        space = dataclasses.replace(space, recompute=costs.forms(forms), tiles=tilings)
        groups = list(space.groups(keep))
        changes = _changes(space, keep or {})
        chosen, rejected, short_of = _that_fit(costs, groups, budget, top, changes)
        if (len(chosen) == top and not short_of) or (chosen and counts):
            break
    if not groups:
        raise ValueError(_no_plan(space, keep))
    compared = sum(len(group.variants) for group in groups)
    flops = costs.flops(sequences)
    chosen_plan = functools.partial(_chosen_plan, costs, float(sequences * length), flops)
    if not chosen:
        smallest = chosen_plan(_smallest(costs, groups))
        text = _why_none_fits(smallest, compared, target, budget, headroom)
        raise NoPlanFits(text, smallest)
    bounds = _in_order(costs, groups, lambda x: costs.least(x) > budget, ideal=True)
    bound = next(step.full_overlap for step, plan in bounds if costs.fullest(plan) <= budget)
    return SearchResult(
        *(target, machine.device, headroom),
        plans=tuple(map(chosen_plan, chosen)),
        rejected=tuple(chosen_plan(plan, change) for plan, change in rejected),
        bound=bound,
        compared=compared,
        sequences=sequences,
        length=length,
        about=_about(model, chosen[0]),
        of_update=costs.products(chosen[0]) / flops if flops else 0.0,
    )


def _check_no_matmuls(matmuls: Sequence[str | None]) -> None:
    if any(matmuls):
        raise ValueError(
            "products of frozen parameters in few bits are not planned by name: give fit "
            "stored.loss_of(shd.quantized_matmuls(loss)), or leave out matmuls."
        )


def _why_none_fits(
    smallest: ChosenPlan, compared: int, target: str, budget: float, headroom: float
) -> str:
    """That no plan fits, and by how much."""
    room = f"{size(budget)}, {headroom:.0%} of their memory left free"
    return (
        f"no plan fits {target}: its devices have {room}, and the smallest of {compared:,} "
        f"plans needs {size(smallest.memory)}, {size(smallest.memory - budget)} too much: "
        f"{smallest.summary} (docs: how_to/let_it_choose)."
    )


def _rounds(
    model: AnyModel, recompute: Sequence[str], tiles: Sequence[int]
) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Forms of recomputation and numbers of tiles, from those that are found at once on.

    Plans of a graph and tiles take seconds to find, and are of use where memory is short.
    """
    known = tuple(form for form in recompute if form not in PLANNED)
    if not isinstance(model, TracedModel):
        return [(known, ())]
    every = tuple(recompute)
    return [(known, ()), (every, tuple(tiles[:_FEW_TILES])), (every, tuple(tiles))]


def _of_length(model: AnyModel, length: int | None) -> AnyModel:
    """A decoder of so many tokens, where any are given."""
    if isinstance(model, Decoder) and length is not None:
        return dataclasses.replace(model, length=length)
    return model


def _about(model: AnyModel, plan: ParallelPlan) -> tuple[str, ...]:
    """What was found in a loss of one's own."""
    if isinstance(model, TracedModel):
        return model.about_layers(plan.update_in_backward)
    return ()


def _check_model(
    model: AnyModel,
    target: str,
    length: int | None,
    dtype: DType,
    weights: Sequence[str],
    asynchronous: bool,
) -> None:
    """Raises unless plans of a model can be timed as they are asked for."""
    if asynchronous and (isinstance(model, TracedModel) or model.tied):
        raise ValueError(
            "asynchronous pipelines need a Decoder whose embedding is not its output matrix, which "
            "the first and the last stage would update independently."
        )
    if isinstance(model, Decoder):
        check_dtype(target, dtype, weights)
    elif length not in (None, model.length):
        raise ValueError(f"length is that of the example, {model.length}, got {length}.")


def _chosen_plan(
    costs: PlanCosts, tokens: float, flops: float, plan: ParallelPlan, change: str = ""
) -> ChosenPlan:
    """A plan with its figures, of so many operations without recomputation."""
    step = costs.seconds(plan, costs.passes(plan))
    least = costs.seconds(plan, costs.passes(plan, ideal=True), ideal=True).full_overlap
    utilization = flops / costs.machine.device.flops / step.seconds
    held = costs.by_part(plan)
    layers = costs.passes(plan).chunks
    return ChosenPlan(plan, step, held, least, layers, tokens, utilization, change)


def _changes(space: PlanSpace, keep: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """What a search was not asked for, by its argument: what a plan has, which may then fit."""
    changes: list[tuple[str, dict[str, Any]]] = []
    machine = space.costs.machine if space.costs else None
    if True not in space.offload and machine and machine.device.host_link:
        changes.append(("offload", {"offload": True}))
    if "8bit" not in space.state_formats:
        changes.append(("state in 8bit", {"state_format": "8bit"}))
    if space.weights == ("master",):
        changes.append(("weights as they are", {"weights": "plain"}))
    return [(words, change) for words, change in changes if keep.keys().isdisjoint(change)]


def _that_fit(
    costs: PlanCosts,
    groups: Sequence[PlanGroup],
    budget: float,
    top: int,
    changes: list[tuple[str, dict[str, Any]]],
) -> tuple[list[ParallelPlan], list[tuple[ParallelPlan, str]], bool]:
    """The fastest plans; those before them that fit after a change; whether memory is short."""
    chosen: list[ParallelPlan] = []
    rejected: list[tuple[ParallelPlan, str]] = []
    short_of = False

    def skip(passes: ParallelPlan) -> bool:
        nonlocal short_of
        too_large = costs.least(passes) > budget
        short_of |= too_large
        return too_large

    def fits_with(plan: ParallelPlan) -> str:
        held = costs.by_part(plan)
        if held["total"] - held["state"] > budget:
            return ""
        for words, change in changes:
            with contextlib.suppress(ValueError):  # such as of a state with a format of its own
                if costs.fullest(dataclasses.replace(plan, **change)) <= budget:
                    return words
        return ""

    for _, plan in _in_order(costs, groups, skip):
        if costs.fullest(plan) <= budget:
            chosen.append(plan)
        else:
            short_of = True
            change = fits_with(plan) if len(rejected) < top else ""
            rejected += [(plan, change)] if change else []
        if len(chosen) == top:
            break
    return chosen, rejected, short_of


def _in_order(
    costs: PlanCosts,
    groups: Sequence[PlanGroup],
    skip: Callable[[ParallelPlan], bool],
    ideal: bool = False,
) -> Iterator[tuple[StepSeconds, ParallelPlan]]:
    """All plans by their times, or by bounds if ``ideal``; of equal ones the simpler first."""
    # A group is in the queue with the time of its passes, which none of its plans goes below; its
    # plans come into the queue when it has its turn, and is not skipped.
    passes = [costs.passes(group.passes, ideal=ideal) for group in groups]
    # Groups come before plans of the same time.
    queue: list[tuple[float, tuple[int, ...], int, tuple[StepSeconds, ParallelPlan] | None]] = [
        (work.least_overlapped if ideal else work.least, (), number, None)
        for number, work in enumerate(passes)
    ]
    heapq.heapify(queue)
    numbers = itertools.count(len(queue))
    while queue:
        _, _, i, timed = heapq.heappop(queue)
        if timed is not None:
            yield timed
        elif not skip(groups[i].passes):
            for plan in groups[i].plans():
                step = costs.seconds(plan, passes[i], ideal=ideal)
                time = step.full_overlap if ideal else step.seconds
                entry = (time, _simpler_first(plan), next(numbers), (step, plan))
                heapq.heappush(queue, entry)


@functools.lru_cache(maxsize=2)
def costs_of(
    model: AnyModel,
    tx: optax.GradientTransformation,
    machine: Machine,
    length: int,
    dtype: DType,
) -> PlanCosts:
    """Those of all searches of a model, whatever memory there is."""
    kind: Any = TracedCosts if isinstance(model, TracedModel) else PlanCosts
    return kind(model, tx, machine, length=length, dtype=dtype)


def machine_of(target: str, device: DeviceKind | None = None) -> Machine:
    parsed = targets.parse(target, other_gpus=device is not None)
    device = device or kind_of(target)
    if device is None:
        raise ValueError(f"a search needs the figures of {target}: give device=.")
    torus = (parsed.shape, parsed.groups) if parsed.is_torus else ()
    return Machine(device, parsed.num_devices, *torus)


def check_dtype(target: str, dtype: DType, weights: Sequence[str] = ()) -> None:
    """Raises for parameters whose products are not timed, or that rounding does not change."""
    cpu = targets.parse(target, other_gpus=True).kind == "cpu"
    if dtype.itemsize != 2 and not (cpu and dtype.itemsize == 4):
        raise ValueError(
            f"dtype must have 16 bits on {target}, got {dtype}: times are those of products of 16 "
            'bits. weights="master" adds float32 master weights.'
        )
    if dtype.itemsize > 2 and "stochastic" in weights:
        raise ValueError(f"stochastic rounding is for parameters of 16 bits, got {dtype}.")


def _simpler_first(plan: ParallelPlan) -> tuple[int, ...]:
    """What orders plans of equal time: the exact, the simpler one first, the smaller schedule."""
    schedule = _SMALLEST_FIRST.index(plan.schedule)
    devices = (plan.update_in_backward, plan.pipe, plan.tensor, plan.experts, plan.replicas)
    host = [False, True, "update"].index(plan.offload)
    return (plan.lossy, host, *devices, plan.spread, -plan.stage, plan.microbatch, schedule)


def _no_plan(space: PlanSpace, keep: Mapping[str, Any] | None) -> str:
    every = list(space.groups())
    if not every:
        shared = f"{space.sequences} sequences cannot be shared by {space.num_devices} devices"
        if not isinstance(space.model, Decoder):
            return f"{shared}: a multiple of these can."
        return (
            f"{shared}: with as many pipeline stages as {space.model.layers} layers allow, or "
            "devices that share each layer, data parallelism is left with more devices than divide "
            "them."
        )
    parts = []
    for name, value in (keep or {}).items():
        values = set().union(*(group.values(name) for group in every))
        known = sorted(values, key=lambda x: (x if isinstance(x, int) else 0, str(x)))
        asked = " that were asked for" * (name in ("state_format", "weights", "sync"))
        reason = f"is none of {', '.join(map(str, known))}{asked}"
        if name == "schedule" and value in ASYNC_SCHEDULES:
            reason = (
                "needs asynchronous=True (--asynchronous), as many stages as devices, 2 "
                "micro-batches a stage less one, and plain weights"
            )
        if name == "offload" and value in (True, "update"):
            option = " (--update-on-host)" * (value == "update")
            reason = f"needs offload={value!r}{option}, and a device with a known link to its host"
        allowed = value if isinstance(value, tuple) else (value,)
        parts += [] if any(x in known for x in allowed) else [f"{name}={value!r} {reason}"]
    if parts:
        return f"no plan has what is kept: {'; '.join(parts)}."
    kept = ", ".join(f"{name}={value!r}" for name, value in (keep or {}).items())
    return (
        f"no plan shares {space.sequences} sequences among {space.num_devices} devices with "
        f"{kept}: each of these is possible alone, not all of them together."
    )


def _smallest(costs: PlanCosts, groups: Sequence[PlanGroup]) -> ParallelPlan:
    """The plan that needs least memory."""
    first, *others = sorted(groups, key=lambda group: costs.least(group.passes))
    found = min(first.plans(), key=costs.fullest)
    for group in others:
        if costs.least(group.passes) < costs.fullest(found):
            found = min(found, *group.plans(), key=costs.fullest)
    return found
