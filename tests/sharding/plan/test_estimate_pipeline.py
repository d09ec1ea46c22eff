"""A pipeline beside ZeRO alone: memory of its stages, and the seconds and bytes of ``search``."""

import random

import optax
import pytest

from sharding.plan import (
    estimate,
    estimate_pipeline,
    kind_of,
    layer_costs,
    search,
    step_seconds,
)
from sharding.plan.cost._plan_costs import PlanCosts, zero_of
from sharding.plan.model._models import Decoder
from sharding.plan.search._plan_space import KEPT
from sharding.plan.search._search import machine_of

ADAMW = optax.adamw(1e-3)


@pytest.mark.parametrize(
    ("stage", "kind", "schedule", "batch"),
    [
        (0, "h100x8", "aligned", 2),
        (1, "v5e:2x4", "aligned", 2),
        (2, "h100x8", "1f1b", 64),
        (3, "h100x8", "aligned", 2),
        (3, "v5e:2x4", "1f1b", 64),
    ],
)
def test_memory_of_a_stage(stage, kind, schedule, batch):
    """AdamW with bfloat16 parameters, on four stages with two replicas."""
    on_gpus = kind == "h100x8"
    number = 13 if on_gpus else 12  # not shared equally on GPUs
    model = Decoder(number, 128, 4, 4, 256, 1024, 64)
    keep = {"stage": stage, "microbatch": batch, "microbatches": 8, "schedule": schedule}
    keep |= {"replicas": 1, "recompute": "full", "offload": False}
    plan = estimate_pipeline(model, ADAMW, kind, num_stages=4, sequences=16 * batch, keep=keep)
    found = plan.stages[1]
    costs = layer_costs(model, kind_of(kind), batch=batch)
    numbers = plan.pipeline.layers
    rows = max(numbers)
    assert rows == (4 if on_gpus else 3)
    shared = costs[0].param_bytes + costs[-1].param_bytes
    layers = rows * costs[1].param_bytes
    params = layers + shared
    held = number / 4 * costs[1].param_bytes + shared  # no optimizer sees padding
    shard = held / 2
    norms = 8 * 16 * 128 * rows  # whose few elements may stay unsharded, or fill tiles
    # Parameters; at stage 3 the shard and what is gathered. The rows of unequal stages.
    moved = layers if on_gpus else 0
    full = params + shard if stage == 3 else held
    assert found.params == pytest.approx(full + moved, abs=norms)
    # Float32 accumulators; what branches return of them is copied, but not on TPUs.
    copied = 2 * params if on_gpus else 0
    assert found.grads == 2 * params + copied
    # Two moments.
    assert found.state == pytest.approx(2 * (held if stage == 0 else shard), abs=2 * norms)
    # Inputs of each layer: on the first stage of 2 (S - 1) + 1 or of S micro-batches, and one slot
    # more; three messages.
    stream = 2 * batch * 64 * 128
    in_flight = [7, 5, 3, 1] if schedule == "aligned" else [4, 3, 2, 1]
    assert [it.in_flight for it in plan.stages] == in_flight
    residuals, logits = rows * stream, 4 * batch * 64 * 1024
    head = logits + max(0, logits / 2 - copied)  # logits and their gradient
    working = layers + costs[1].working_bytes - (2 * layers if on_gpus else 0)
    backward = residuals + max(head, working)
    if schedule == "1f1b":  # backward passes return zeros beside their own residuals, but on TPUs
        of_head = (2 if on_gpus else 1) * residuals + 1.5 * logits - copied
        backward = max(backward, of_head)
    expected = (in_flight[0] + 1) * residuals + 3 * stream + backward
    assert found.activations == pytest.approx(expected)
    # Each micro-batch: an activation to the next stage, a gradient to the one before.
    assert found.permuted == 8 * 2 * stream
    assert plan.stages[0].permuted == plan.stages[3].permuted == 8 * stream
    # Two replicas: an all-reduce sends the array once, as do a reduce-scatter and a gather.
    assert found.synced == pytest.approx(held, rel=0.01)
    # Float32 sums over the stages; an all-to-all of the layers, and of their gradients.
    assert found.summed == 1.5 * 2 * shared + 0.75 * (1 + 2) * moved
    assert len({it.memory for it in plan.stages}) == 1
    # Seconds of its own layers; the head is on the last one.
    layer, head = (costs[k].forward + costs[k].backward for k in (1, -1))
    own = [n * layer + (head if s == 3 else 0) for s, n in enumerate(numbers)]
    assert [stage.forward + stage.backward for stage in plan.stages] == pytest.approx(own)


MACHINES = {"h100x8": 16, "v5e:2x4": 8, "a100-80x16": 32}  # and sequences


@pytest.mark.parametrize("target", MACHINES)
def test_all_commands_have_the_same_seconds_and_bytes(target):
    """Of 70 plans of a machine, with pipelines and without: as ``search`` lists them."""
    model, machine = Decoder(8, 256, 4, 4, 512, 1000, 128), machine_of(target)
    options = {"sequences": MACHINES[target], "headroom": 0.0}
    every = [x for pipe in (1, 2, 4) for x in search(
        *(model, ADAMW, target), keep={"pipe": pipe}, top=400, **options
    ).plans]  # fmt: skip
    chosen = random.Random(0).sample(every, 70)
    assert len({it.plan.schedule for it in chosen if it.plan.pipe > 1}) > 3
    assert {it.plan.stage for it in chosen if it.plan.pipe == 1} >= {1, 2, 3}
    costs = PlanCosts(model, ADAMW, machine)
    for it in chosen:
        assert step_seconds(model, it.plan, machine, each=costs.each(it.plan)) == it.seconds
    zeros = [it for it in chosen if it.plan.pipe * it.plan.tensor == 1]
    for it in random.Random(1).sample(zeros, 6):
        flops = model.flops(it.tokens, model.length) / machine.num_devices
        zero, params = zero_of(it.plan), model.abstract("bfloat16")
        bounds = estimate(params, ADAMW, zero, device=machine.device, flops=flops)
        least = bounds.seconds(bounds.stage(bounds.requested))
        assert 0 < max(least.values()) < it.seconds.seconds
    pipelines = [it for it in chosen if it.plan.pipe > 1]
    for it in random.Random(1).sample(pipelines, 6):
        keep = {name: getattr(it.plan, name) for name in KEPT}
        found = estimate_pipeline(
            model, ADAMW, target, num_stages=keep.pop("pipe"), keep=keep, **options
        )
        assert found.pipeline == it
        assert found.stages[0].memory < it.memory
        same = {name: keep[name] for name in ("tensor", "offload", "state_format", "weights")}
        zero = search(model, ADAMW, target, keep=same | {"pipe": 1}, top=1, **options).best
        assert found.alternative == zero
        faster = it.seconds.seconds < zero.seconds.seconds
        assert found.recommended == ("pipeline" if faster else "ZeRO")


def test_the_number_of_stages_is_the_fastest_if_it_is_left_out():
    model, options = Decoder(8, 256, 4, 4, 512, 1000, 128), {"sequences": 16, "headroom": 0.0}
    each = [estimate_pipeline(model, ADAMW, "h100x8", num_stages=n, **options) for n in (2, 4, 8)]
    found = estimate_pipeline(model, ADAMW, "h100x8", **options)
    assert found == min(each, key=lambda plan: plan.pipeline.seconds.seconds)
    with pytest.raises(ValueError, match="needs at least 2 devices, h100x1 has one"):
        estimate_pipeline(model, ADAMW, "h100x1", **options)
