"""The planner of pipelines: memory of stages, times of a step beside ZeRO alone."""

import dataclasses

import optax
import pytest
from jax.sharding import AbstractMesh

import sharding as shd
from sharding.plan import activations_of, estimate, estimate_pipeline, kind_of, layer_costs
from sharding.plan.cost._pipeline_schedules import schedule_of
from sharding.plan.model._models import Decoder

from ..pipeline.families import seconds_in_lockstep

ADAMW = optax.adamw(1e-3)
SMALL = Decoder(6, 64, 4, 2, 96, 1000, 32)


def zero_of(devices, stage=1):
    return shd.Zero(AbstractMesh((devices,), ("data",)), stage=stage)


def plan_of(model=SMALL, devices=8, stage=1, kind="h100x8", **kwargs):
    device = kwargs.pop("device", kind_of(kind))
    kwargs = {"num_stages": 4, "microbatches": 8} | kwargs
    return estimate_pipeline(model, ADAMW, zero_of(devices, stage), device=device, **kwargs)


def layers_of(plan):
    """Decoder layers of each stage, without the embedding and the head."""
    numbers = [j - i for stage in plan.stages for i, j in stage.layers]
    return [numbers[0] - 1, *numbers[1:-1], numbers[-1] - 1]


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
    plan = plan_of(model, stage=stage, batch=batch, kind=kind, schedule=schedule)
    found = plan.stages[1]
    costs = layer_costs(model, kind_of(kind), batch=batch)
    rows = max(layers_of(plan))
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


def test_fewer_layers_are_taken_where_the_fastest_stages_do_not_fit():
    """All devices have as many layers as the largest chunk, which the head makes larger."""
    model = Decoder(24, 256, 4, 4, 512, 8192, 512)
    options = {"devices": 4, "microbatches": 64, "schedule": "aligned"}
    free = plan_of(model, **options)
    rows = max(layers_of(free))
    assert rows > 6
    held = free.stages[0].memory
    device = dataclasses.replace(kind_of("h100x8"), memory=held - 1)
    tight = plan_of(model, device=device, **options)
    assert tight.pipeline.fits
    assert max(layers_of(tight)) == rows - 1
    assert tight.lockstep > free.lockstep


def test_times_of_a_step():
    plan = plan_of(microbatches=8)
    costs = layer_costs(SMALL, kind_of("h100x8"))
    layers = layers_of(plan)
    assert sum(layers) == 6
    expected = seconds_in_lockstep(
        *(schedule_of("aligned", 4, 8), [max(layers)] * 3 + layers[-1:]),
        forward=costs[1].forward,
        backward=costs[1].backward,
        head=costs[-1].forward + costs[-1].backward,
    )
    assert plan.lockstep == pytest.approx(expected)
    assert plan.ideal == pytest.approx(8 / 4 * sum(c.forward + c.backward for c in costs))
    message = 2 * 32 * 64
    assert plan.transfers == pytest.approx(22 * message / kind_of("h100x8").link)
    assert plan.pipeline.compute == plan.lockstep + plan.transfers
    assert plan.tokens == 2 * 8 * 32
    # With ZeRO each of 8 devices takes 2 of the 16 micro-batches.
    assert plan.alternative.compute == pytest.approx(plan.ideal)
    zero = estimate(
        SMALL.abstract("bfloat16"),
        ADAMW,
        zero_of(8),
        microbatches=2,
        batch=4 * 2 * 33,
        device=kind_of("h100x8"),
        gathered_once=SMALL.gathered_once,
        activations=activations_of(SMALL, kind_of("h100x8"), costs),
    ).stage(plan.alternative.name)
    assert plan.alternative.wire == zero.wire / kind_of("h100x8").link
    assert plan.alternative.memory == zero.peak
