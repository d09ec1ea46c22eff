"""plan.json, the code in it, and the program of the step."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sharding as shd
from sharding.plan import kind_of, targets
from sharding.plan._models import Decoder
from sharding.plan.fastest._plan_file import PlanFile, lowered_step
from sharding.plan.fastest._search import search
from sharding.plan.fastest._verify import Verification, planned_flops, verify
from sharding.plan.timing._parallel_plan import ParallelPlan

SMALL = Decoder(3, 64, 8, 8, 128, 96, 32)
TX = optax.adamw(1e-3)
PLANS = [
    ParallelPlan(data=8, stage=0, recompute="none"),
    ParallelPlan(data=8, stage=1, microbatches=2, recompute="full"),
    ParallelPlan(data=8, stage=2, microbatch=2, recompute="full"),
    ParallelPlan(data=8, stage=3, microbatches=2),
    ParallelPlan(data=8, stage=3, replicas=2),
    ParallelPlan(data=8, stage=0, recompute="save_out_proj"),
    ParallelPlan(data=8, stage=1, microbatches=2, recompute="minimal"),
    ParallelPlan(data=8, stage=2, microbatches=2, recompute="save_qkv_proj"),
    ParallelPlan(data=8, stage=3, recompute="minimal_with_context"),
    ParallelPlan(data=8, stage=3, recompute="save_dot_except_mlp"),
    ParallelPlan(data=4, tensor=2, stage=0, recompute="none"),
    ParallelPlan(data=2, tensor=4, stage=2, microbatches=2, recompute="full"),
    ParallelPlan(data=4, tensor=2, stage=3, replicas=2),
    ParallelPlan(tensor=8),
    ParallelPlan(data=8, stage=1, state_format="8bit"),
]


def file_of(plan, layers=(3,)):
    promised = {"memory": 2.0**20, "seconds": 1.0}
    return PlanFile("small", "adamw", "cpu:8", SMALL.length, "float32", layers, plan, promised)


def test_a_file_is_read_as_it_was_written(tmp_path):
    found = search(SMALL, TX, "h100x8", sequences=8)
    file = PlanFile.of(
        *(found.best,),
        model="small",
        optimizer="adamw",
        target="h100x8",
        length=32,
        dtype="bfloat16",
    )
    file.write(tmp_path / "plan.json")
    assert PlanFile.read(tmp_path / "plan.json") == file
    assert file.promised["memory"] == found.best.memory
    assert json.loads((tmp_path / "plan.json").read_text())["code"] == file.code()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no plan that search wrote"),
        ("{}", "is no plan that search wrote: 'version'"),
        ('{"version": 2}', "is not of version 1"),
        ('{"version": 1, "code": [], "plan": {"rows": 1}}', "is no plan that search wrote"),
    ],
)
def test_other_files(text, message, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        PlanFile.read(path)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_the_code_builds_the_step_that_is_verified(plan):
    file = file_of(plan)
    names = {"model": SMALL, "tx": TX}
    exec("\n".join(file.code()), names)
    zero, specs = names["zero"], names.get("param_specs")

    def make_state():
        params = SMALL.init(jnp.float32)
        return params, names["tx"].init(params)

    tokens = jax.ShapeDtypeStruct((plan.sequences, SMALL.length + 1), jnp.int32)
    mine = names["step"].lower(
        zero.abstract_state(make_state, tx=names["tx"], param_specs=specs), tokens
    )
    assert list(names["mesh"].shape.items()) == list(file.mesh_axes.items())
    theirs = lowered_step(file, names["mesh"], SMALL, names["tx"])
    assert mine.as_text() == theirs.as_text()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "aligned", "interleaved"])
def test_the_code_of_a_pipeline(schedule):
    chunks = 2 if schedule == "interleaved" else 1
    plan = ParallelPlan(
        data=4, pipe=2, microbatches=4, stage=1, schedule=schedule, chunks=chunks, recompute="none"
    )
    layers = (1,) * (2 * chunks)
    file = file_of(plan, layers)
    names = {"tx": TX, "embed": None, "block": None, "head": None}
    exec("\n".join(file.code()), names)
    made, schedule = names["pipeline"].schedule, file.schedule()
    assert made.name == schedule.name
    assert np.array_equal(made.op, schedule.op)
    assert names["pipeline"].num_layers == layers
    assert not names["pipeline"].recompute
    assert dict(names["mesh"].shape) == file.mesh_axes == {"pipe": 2, "data": 4}
    with pytest.raises(ValueError, match="a plan with a pipeline needs the embedding"):
        lowered_step(file, names["mesh"], SMALL, TX)


def test_no_pipeline_has_no_schedule():
    with pytest.raises(ValueError, match="the plan has no pipeline"):
        file_of(PLANS[0]).schedule()


def test_devices_that_share_a_layer_are_nearest():
    file = file_of(ParallelPlan(data=4, tensor=2, stage=3, replicas=2))
    assert list(file.mesh_axes.items()) == [("replica", 2), ("data", 2), ("model", 2)]
    mesh = targets.mesh("cpu:8", tuple(file.mesh_axes.values()), tuple(file.mesh_axes))
    ids = [device.id for device in mesh.devices.reshape(-1, 2)[0]]
    assert ids == [0, 1]


# --- Programs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [p for p in PLANS if not p.state_format], ids=str)
def test_programs_send_and_compute_what_is_planned(plan):
    """Bytes within 2 %, operations within 1 %; the estimates of activations are not these."""
    found = verify(file_of(plan), SMALL, TX, memory=2.0**40, device=kind_of("h100"))
    assert not found.failures
    assert found.wire == pytest.approx(found.planned_wire, rel=0.02)
    assert found.flops == pytest.approx(found.planned_flops, rel=0.01)
    assert found.memory > 0
    small = dataclasses.replace(found, available=found.memory / 2)
    assert "too much" in small.failures[0]


def test_a_program_of_another_plan_does_not_hold():
    """Without recomputation, and with twice the micro-batches."""
    plan = ParallelPlan(data=8, stage=2, microbatches=2, recompute="full")
    device = kind_of("h100")
    right = verify(file_of(plan), SMALL, TX, memory=2.0**40, device=device)
    none = dataclasses.replace(plan, recompute="none")
    wrong = dataclasses.replace(right, planned_flops=planned_flops(SMALL, none))
    assert "of the planned operations" in wrong.failures[0]
    wrong = dataclasses.replace(right, planned_wire=right.planned_wire * 1.5)
    assert "were planned" in wrong.failures[0]


def test_the_summary_of_one_device():
    found = Verification(2.0, 1.0, 0.0, 0.0, 4.0, 4.0, 8.0)
    assert found.summary == "program / plan: memory 0.500, wire -, operations 1.000"
    assert not found.failures


def skip_without_compiler(target):
    try:
        targets.topology(target)
    except ValueError as error:
        if "installed" in str(error) or "not found" in str(error):
            pytest.skip(str(error))
        raise


@pytest.mark.parametrize("plan", PLANS[5:9:2], ids=str)
def test_gpus_add_gradients_before_they_sum_them(plan):
    """Gradients of one input by several matrices: as many sums as in Megatron-LM."""
    skip_without_compiler("h100x8")
    file = dataclasses.replace(file_of(plan), target="h100x8", dtype="bfloat16")
    found = verify(file, SMALL, TX, memory=2.0**40)
    assert not found.failures
    assert found.wire == pytest.approx(found.planned_wire, rel=1e-3)


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_plan_on_a_target(tensor):
    """Activations are small beside the update, which gathers the parameters: 3 % of memory.

    Where devices share layers, they are a larger part of it.
    """
    target = "h100x8"
    skip_without_compiler(target)
    model = dataclasses.replace(shd.plan.MODELS["llama2-7b"], length=512)
    keep = {"pipe": 1, "stage": 2, "recompute": "full", "tensor": tensor}
    found = search(model, TX, target, sequences=8, keep=keep)
    file = PlanFile.of(
        found.best, model="", optimizer="", target=target, length=512, dtype="bfloat16"
    )
    verified = verify(file, model, TX, memory=found.memory)
    assert not verified.failures
    assert verified.wire == pytest.approx(verified.planned_wire, rel=0.02)
    assert verified.memory == pytest.approx(verified.planned_memory, rel=0.03 * tensor)
