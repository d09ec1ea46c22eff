"""The planner of pipelines: memory of stages, times of a step, the verdict beside ZeRO alone."""

import dataclasses

import jax
import optax
import pytest
from jax.sharding import AbstractMesh

import sharding as shd
from sharding.plan import MODELS, estimate, estimate_pipeline, kind_of, layer_costs
from sharding.plan._models import Decoder
from sharding.plan.pipelines._estimate_pipeline import _verdict
from sharding.plan.pipelines._pipeline_plan import PipelinePlan, StepTime
from sharding.plan.pipelines._pipeline_stages import Links, params_of_layers

ADAMW = optax.adamw(1e-3)
SMALL = Decoder(6, 64, 4, 2, 96, 1000, 32)


def zero_of(devices, hosts=1, stage=1):
    """A ``Zero`` on hosts of GPUs."""
    if hosts == 1:
        return shd.Zero(AbstractMesh((devices,), ("data",)), stage=stage)
    mesh = AbstractMesh((hosts, devices // hosts), ("host", "data"))
    return shd.Zero(mesh, stage=stage, axis="data", replica_axis="host")


def plan_of(model=SMALL, tx=ADAMW, devices=8, hosts=1, stage=1, kind="h100x8", **kwargs):
    device = kwargs.pop("device", kind_of(kind))
    kwargs = {"num_stages": 4, "microbatches": 8} | kwargs
    return estimate_pipeline(model, tx, zero_of(devices, hosts, stage), device=device, **kwargs)


# --- Figures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scan", [False, True])
def test_stages_have_all_parameters_once(scan, tied):
    model = dataclasses.replace(SMALL, scan=scan, tied=tied, biased=True)
    plan = plan_of(model, devices=4, stage=0)
    found = sum(stage.params for stage in plan.stages)
    expected = 2 * sum(x.size for x in jax.tree.leaves(model.abstract()))
    tied_bytes = 2 * model.vocabulary * model.width if tied else 0
    assert found == expected + tied_bytes
    assert plan.stages[0].layers[0][0] == 0
    assert plan.stages[-1].layers[-1][1] == model.layers + 2
    # One replica: nothing is synchronized but what the two ends sum.
    assert [stage.synced for stage in plan.stages] == [tied_bytes, 0, 0, tied_bytes]


def test_params_of_chunks():
    found = params_of_layers(SMALL, "float32", [(0, 3), (6, 8)])
    assert set(found) == {"embed", "layers", "norm", "unembed"}
    assert found["layers"]["query"].shape == (3, 64, 64)  # layers 1 and 2 of 6, and the last


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_of_a_stage(stage):
    """AdamW with bfloat16 parameters, of the second of four stages with two replicas."""
    model = Decoder(12, 128, 4, 4, 256, 1000, 64)
    plan = plan_of(model, stage=stage, batch=2)
    found = plan.stages[1]
    costs = layer_costs(model, kind_of("h100x8"), batch=2)
    ((i, j),) = found.layers
    assert 0 < i < j < model.layers + 1
    params = sum(cost.param_bytes for cost in costs[i:j])
    shard = params / 2
    norms = (j - i) * 2 * 128 * 2  # whose few elements may stay unsharded
    # Parameters; at stage 3 the shard and what is gathered of it.
    assert found.params == pytest.approx(params + (shard if stage == 3 else 0), abs=norms)
    # Float32 accumulators, and the shard of the reduced gradient.
    assert found.grads == pytest.approx(2 * params + (shard if stage > 1 else 0), abs=norms)
    # Two moments.
    assert found.state == pytest.approx(2 * (params if stage == 0 else shard), abs=2 * norms)
    # 2 (S - 1 - s) + 1 inputs of each layer, and the temporaries of one.
    stream = 2 * 2 * 64 * 128
    assert found.in_flight == 5
    assert found.activations == 5 * (j - i) * stream + costs[i].working_bytes
    # Each micro-batch: an activation to the next stage, a gradient to the one before.
    assert found.permuted == 8 * 2 * stream
    assert plan.stages[0].permuted == plan.stages[3].permuted == 8 * stream
    # Two replicas: an all-reduce sends the array once, as do a reduce-scatter and a gather.
    assert found.synced == pytest.approx(params, rel=0.01)


def test_a_smaller_partition_is_taken_where_the_fastest_does_not_fit():
    """The first stage has most micro-batches in flight, and gets fewer layers."""
    model = Decoder(24, 256, 4, 4, 512, 100, 512)
    free = plan_of(model, ADAMW, devices=4, microbatches=64, schedule="aligned")
    held = [stage.memory for stage in free.stages]
    assert held[0] == max(held)
    device = dataclasses.replace(kind_of("h100x8"), memory=0.97 * held[0])
    tight = plan_of(model, ADAMW, devices=4, microbatches=64, device=device)
    assert tight.pipeline.fits
    assert max(stage.memory for stage in tight.stages) <= device.memory
    assert tight.lockstep > free.lockstep
    none = dataclasses.replace(device, memory=0.5 * held[0])
    tiny = plan_of(model, ADAMW, devices=4, microbatches=64, device=none)
    assert not tiny.pipeline.fits
    assert any(note.startswith("warning: stages") for note in tiny.notes)


def test_times_of_a_step():
    plan = plan_of(microbatches=8)
    costs = layer_costs(SMALL, kind_of("h100x8"))
    ranges = [stage.layers[0] for stage in plan.stages]
    slowest = [
        max(sum(getattr(cost, name) for cost in costs[i:j]) for i, j in ranges)
        for name in ("forward", "backward")
    ]
    assert plan.lockstep == pytest.approx((8 + 3) * sum(slowest))
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
    ).stage(plan.alternative.name)
    assert plan.alternative.wire == zero.wire / kind_of("h100x8").link
    activations = sum(c.activation_bytes for c in costs) + max(c.working_bytes for c in costs)
    assert plan.alternative.memory == zero.peak + activations


def test_empty_micro_batches_of_zero_are_counted():
    plan = plan_of(microbatches=5)
    assert plan.alternative.compute == pytest.approx(plan.ideal * 8 / 5)
    assert any("5 micro-batches are no multiple of 4 stages" in note for note in plan.notes)


def test_links():
    """All-gather of A bytes over 2 groups of 8: each device sends 7/8 A within, A / 16 outside."""
    array = 1600.0
    links = Links(2, 16, link=100.0, network=1.0)
    assert links.collective_seconds(15 / 16 * array, 16) == pytest.approx(array / 16)
    assert Links(2, 16, 10.0, 1e9).collective_seconds(15 / 16 * array, 16) == pytest.approx(140)
    assert links.collective_seconds(7 / 8 * array, 8) == pytest.approx(14)
    assert links.permute_seconds(5.0) == 5.0
    assert Links(1, 16, 100.0, 1.0).permute_seconds(5.0) == 0.05


def test_replicas_of_a_stage_are_neighbours():
    """On 2 hosts of 8, two stages have replicas within a host, and send to each other outside."""
    device = dataclasses.replace(kind_of("h100x8"), link=1e9, network=1e6)
    plan = plan_of(devices=16, hosts=2, num_stages=2, device=device)
    assert plan.pipeline.wire == max(stage.synced for stage in plan.stages) / 1e9
    assert plan.transfers == pytest.approx(2 * (8 + 1) * 2 * 32 * 64 / 1e6)


# --- The verdict ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pipe", "zero", "words", "recommended"),
    [
        # compute, wire and whether it fits
        ((3.0, 0.1, True), (2.0, 0.5, True), "Do not pipeline. On 8", "stage 1"),
        ((3.0, 0.1, True), (2.0, 1.5, True), "Do not pipeline if compute hides", "stage 1"),
        ((3.0, 0.1, True), (2.0, 3.5, True), "Pipeline. On 8 devices", "pipeline"),
        ((3.0, 0.1, True), (2.0, 0.5, False), "Pipeline: no stage of ZeRO alone", "pipeline"),
        ((1.0, 0.1, False), (2.0, 0.5, True), "Do not pipeline: its fullest", "stage 1"),
        ((3.0, 0.1, False), (2.0, 0.5, False), "Neither fits a h100", ""),
    ],
)
def test_verdicts(pipe, zero, words, recommended):
    plan: PipelinePlan = dataclasses.replace(
        plan_of(),
        pipeline=StepTime("pipeline", pipe[0], pipe[1], 2.0**30, pipe[2]),
        alternative=StepTime("stage 1", zero[0], zero[1], 2.0**31, zero[2]),
    )
    assert _verdict(plan, Links(1, 8, 1.0, 1.0)).startswith(words)
    assert plan.recommended == recommended


def test_a_plan_prints():
    text = str(plan_of(MODELS["llama2-7b"], schedule="1f1b"))
    assert "4 stages x 2 replicas, 8 micro-batches, 1f1b" in text
    assert "One step" in text
    assert "Do not pipeline" in text
