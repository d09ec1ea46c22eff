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
from sharding.plan.cost._parallel_plan import ParallelPlan
from sharding.plan.cost._pipeline_schedules import schedule_of
from sharding.plan.cost._wire_and_flops import decoder_products
from sharding.plan.model._models import MODELS, Decoder
from sharding.plan.search._build import mesh_axes, zero_on
from sharding.plan.search._plan_file import PlanFile
from sharding.plan.search._search import search
from sharding.plan.search._verify import verify

from ...compilers import need
from ..model import make_of

SMALL = Decoder(3, 64, 8, 8, 128, 96, 32)
TX = optax.adamw(1e-3)
SLOW = pytest.mark.slow
PLANS = [
    ParallelPlan(data=4, tensor=2, stage=1, replicas=2, spread=True),
    ParallelPlan(data=8, stage=2, replicas=2, microbatches=2, sync="qsgd(8)"),
    ParallelPlan(data=8, stage=3, recompute="minimal_with_context"),
    ParallelPlan(data=8, stage=0, recompute="none"),
    ParallelPlan(data=8, stage=3, microbatches=2),
    ParallelPlan(data=2, tensor=4, stage=2, microbatches=2, recompute="full"),
    ParallelPlan(data=8, stage=2, replicas=4, spread=True, microbatches=2),
    ParallelPlan(data=8, stage=1, state_format="8bit"),
    ParallelPlan(data=8, stage=2, weights="stochastic"),
    ParallelPlan(data=8, stage=0, sync="powersgd(2)"),
    ParallelPlan(data=8, stage=3, replicas=4, microbatches=2, sync="qsgd(8)"),
]
OF_TWO = ParallelPlan(data=4, pipe=2, microbatches=4)
OF_FOUR = ParallelPlan(data=2, pipe=4, microbatches=8, stage=1, microbatch=2)
SHARED = ParallelPlan(*(2, 2, 2), microbatches=4)


def pipeline_of(plan, *layers, **fields):
    return dataclasses.replace(plan, **fields), layers


NONE, V = {"recompute": "none"}, {"schedule": "zb-v", "chunks": 2, "recompute": "none"}
INTERLEAVED = {"schedule": "interleaved", "chunks": 2}
# Each with the layers of its chunks.
PIPELINES = {
    "gpipe": pipeline_of(OF_TWO, 1, 2, microbatches=3, schedule="gpipe"),
    "1f1b": pipeline_of(OF_TWO, 2, 1, schedule="1f1b", stage=2, **NONE),
    "aligned": pipeline_of(OF_FOUR, 1, 2, 1, 2),
    "interleaved": pipeline_of(OF_TWO, 1, 1, 1, 1, stage=3, **INTERLEAVED),
    "partly again": pipeline_of(OF_TWO, 2, 1, stage=1, recompute="save_qkv_proj"),
    "shared layers": pipeline_of(SHARED, 2, 1, stage=2, schedule="1f1b"),
    "zb-h1": pipeline_of(OF_FOUR, 1, 2, 2, 1, schedule="zb-h1", **NONE),
    "zb-v": pipeline_of(OF_TWO, 1, 2, 2, 1, microbatches=5, stage=3, **V),
    "shared layers, zb-v": pipeline_of(SHARED, 1, 1, 1, 1, stage=2, **V),
    "one replica": (ParallelPlan(data=1, pipe=8, microbatches=8, recompute="none"), (1,) * 8),
}
CASES = [*((plan, (3,)) for plan in PLANS), *PIPELINES.values()]
OF_2BW = ParallelPlan(pipe=8, microbatches=15, schedule="2bw"), (1,) * 8


def some_of(*default):
    """These plans and their layers by default; the others are slow."""
    return [case if case in default else pytest.param(*case, marks=SLOW) for case in CASES]


def model_of(layers):
    return dataclasses.replace(SMALL, layers=sum(layers))


def file_of(plan, layers=(3,), target="cpu:8"):
    promised = {"memory": 2.0**20, "seconds": 1.0}
    return PlanFile("small", "adamw", target, SMALL.length, "float32", layers, plan, promised)


def test_a_file_is_read_as_it_was_written(tmp_path):
    keep = {"pipe": 1, "tensor": 1, "recompute": "full"}
    found = search(SMALL, TX, "h100x8", sequences=8, keep=keep)
    options = {"target": "h100x8", "length": 32, "dtype": "bfloat16"}
    file = PlanFile.of(found.best, model="small", optimizer="adamw", **options)
    file.write(tmp_path / "plan.json")
    assert PlanFile.read(tmp_path / "plan.json") == file
    assert file.promised["memory"] == found.best.memory
    assert file.promised["state"] == found.best.held["state"]
    figures = json.loads((tmp_path / "plan.json").read_text())
    assert figures["code"] == file.code()
    figures["plan"] |= {"param_bytes": 2.0, "grad_bytes": 2.0, "state_bytes": 4.0}  # of 0.1.0
    (tmp_path / "earlier.json").write_text(json.dumps(figures))
    assert PlanFile.read(tmp_path / "earlier.json") == file
    assert "tx = optax.set_to_zero()" in dataclasses.replace(file, optimizer="set_to_zero").code()


def test_other_files(tmp_path):
    path = tmp_path / "plan.json"
    for text, message in (("{}", "is no plan that search wrote"), ('{"version": 2}', "version 1")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            PlanFile.read(path)


@pytest.mark.parametrize(
    ("target", "sizes", "axes"),
    [
        ("h100x16", {"data": 16}, {"data": 16}),
        ("v5e:4x4", {"data": 16}, {"x": 4, "y": 4}),
        ("v5e:4x4", {"data": 8, "tensor": 2}, {"x": 4, "y": 2, "model": 2}),
        ("v5e:4x4", {"data": 2, "tensor": 8}, {"data": 2, "model": 8}),
        ("v5e:4x4*2", {"data": 32}, {"slice": 2, "x": 4, "y": 4}),
        ("v5e:4x4*2", {"data": 32, "replicas": 2}, {"replica": 2, "x": 4, "y": 4}),
        ("v5p:4x4x4", {"data": 16, "pipe": 4}, {"pipe": 4, "y": 4, "z": 4}),
    ],
)
def test_shards_span_the_axes_of_a_torus(target, sizes, axes):
    plan = ParallelPlan(stage=2, microbatches=4, **sizes)
    assert list(mesh_axes(plan, target).items()) == list(axes.items())
    others = ("pipe", "replica", "model")
    mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
    assert zero_on(plan, mesh).axis == tuple(axis for axis in axes if axis not in others)


ON_TORUS = (ParallelPlan(data=8, stage=2), (3,))


@pytest.mark.parametrize(
    ("plan", "layers"), [*some_of(CASES[1], PIPELINES["shared layers"]), ON_TORUS], ids=str
)
def test_the_code_builds_the_step_that_is_verified(plan, layers):
    target = "v5p:2x2x2" if (plan, layers) == ON_TORUS else "cpu:8"
    file, model = file_of(plan, layers, target), model_of(layers)
    names = {"model": model, "tx": TX}
    exec("\n".join(file.code(run=False)), names)
    built = names["built"]
    assert dict(built.zero.mesh.shape) == file.mesh_axes
    # Devices that share layers are nearest; stages come behind data parallelism.
    ids = np.array([d.id for d in built.zero.mesh.devices.flat])
    if plan.pipe > 1 and plan.tensor > 1:
        assert built.zero.mesh.axis_names == ("data", "pipe", "model")
        ids = ids.reshape(2, 2, 2).transpose(1, 0, 2).ravel()
    assert list(ids) == list(range(8))
    far = targets.mesh("cpu:8", tuple(file.mesh_axes.values()), tuple(file.mesh_axes))
    assert built.lower().as_text() == file.build(model, TX, far).lower().as_text()
    # By hand.
    if plan.sync == "qsgd(8)" and plan.stage == 2:
        sync = shd.sync.qsgd(8)
        zero = shd.Zero(names["mesh"], 2, axis="data", replica_axis="replica", sync=sync)
        loss = model.make_loss(jax.checkpoint(zero.gathered(model.apply_layer)))
        step = zero.train_step(loss, tx=TX, microbatches=plan.microbatches)
        make_state = make_of(lambda: model.init(jnp.float32), TX)
        tokens = jax.ShapeDtypeStruct((plan.sequences, SMALL.length + 1), jnp.int32)
        by_hand = step.lower(zero.abstract_state(make_state, tx=TX), tokens)
        assert by_hand.as_text() == built.lower().as_text()


@pytest.mark.parametrize("name", PIPELINES)
def test_the_code_of_a_pipeline(name):
    plan, layers = PIPELINES[name]
    file = file_of(plan, layers)
    names = {"model": model_of(layers), "tx": TX}
    exec("\n".join(file.code(run=False)), names)
    pipeline = names["built"].loss
    schedule = schedule_of(plan.schedule, plan.pipe, plan.microbatches, plan.chunks)
    assert pipeline.schedule.name == schedule.name
    assert np.array_equal(pipeline.schedule.op, schedule.op)
    assert pipeline.num_layers == layers
    others = {"replica": plan.replicas, "model": plan.tensor}
    sizes = {"pipe": plan.pipe, "data": plan.shards} | {k: n for k, n in others.items() if n > 1}
    assert dict(names["mesh"].shape) == file.mesh_axes == sizes


@pytest.mark.parametrize(
    ("plan", "layers"),
    [*some_of(CASES[0], CASES[2], PIPELINES["aligned"]), pytest.param(*OF_2BW, marks=SLOW)],
    ids=str,
)
def test_programs_send_and_compute_what_is_planned(request, plan, layers):
    """Bytes within 2 %, operations within 1 %; the estimates of activations are not these."""
    if (plan, layers) == PIPELINES["shared layers"]:
        why = "unequal stages gather layers over the tensor axis before they send them"
        request.applymarker(pytest.mark.xfail(strict=True, reason=why))
    options = {"memory": 2.0**40, "device": kind_of("h100")}  # CPUs, with the figures of a GPU
    found = verify(file_of(plan, layers), model_of(layers), TX, **options)
    assert not found.failures
    # Row by row; updated parameters of a state that replicas share are gathered over all at once.
    at_once = {f"all-gather over {axes}" for axes in ("data", "replica", "replica+data")}
    names = {row.name for row in found.differences}
    assert names == (at_once if plan.spread and plan.stage < 3 else set())
    assert found.wire == pytest.approx(found.planned_wire, rel=0.02)
    assert found.flops == pytest.approx(found.planned_flops, rel=0.01)
    assert found.memory > 0
    # Programs of other plans do not hold.
    small = dataclasses.replace(found, available=found.memory / 2)
    assert "too much" in small.failures[0]
    for factor in (1.5, 1 / 1.5):
        wrong = scaled(found, factor, lambda row: row.op != "products")
        assert "were planned" in wrong.failures[0]
        assert {row.name for row in wrong.differences} > names
    if plan.pipe == 1 and plan.recompute != "none":
        stored = dataclasses.replace(plan, recompute="none")
        every, fewer = (decoder_products(SMALL, x)[0].amount for x in (plan, stored))
        wrong = scaled(found, fewer / every, lambda row: row.part == "matmul")
        assert "of the planned operations" in wrong.failures[0]
    half = scaled(found, 0.5, lambda row: row.part == "matmul")
    assert {row.name for row in half.differences} == {"products", *names}


def scaled(verification, factor, chosen):
    """With so many times the amounts of chosen rows of the plan."""
    planned = verification.planned
    work = tuple(
        row._replace(amount=factor * row.amount) if chosen(row) else row for row in planned.work
    )
    return dataclasses.replace(verification, planned=dataclasses.replace(planned, work=work))


@pytest.mark.parametrize("scan", [True, False])
def test_an_update_in_the_backward_pass_computes_layers_again(scan):
    """Those that are scanned by itself, those with numbers by jax.checkpoint."""
    model, plan = dataclasses.replace(SMALL, scan=scan), ParallelPlan(stage=0, microbatch=8)
    file = file_of(dataclasses.replace(plan, update_in_backward=True), target="cpu:1")
    found = verify(file, model, TX, memory=2.0**40, device=kind_of("h100"))
    assert found.flops == pytest.approx(found.planned_flops, rel=0.01)


LLAMA = dataclasses.replace(shd.plan.MODELS["llama2-7b"], length=512)
DEEP = Decoder(8, 512, 8, 8, 2048, 8192, 256)
ON_FOUR = {"pipe": 4, "stage": 1, "recompute": "full", "microbatch": 2, "offload": False}


WIDE = Decoder(2, 256, 4, 4, 512, 96, 256)
FEW_BITS = [
    (ParallelPlan(data=8, stage=3, matmuls="int8"), "cpu:8", WIDE),
    (ParallelPlan(data=4, pipe=2, microbatches=4, matmuls="int8", recompute="none"), "cpu:8", WIDE),
    pytest.param(
        ParallelPlan(data=8, stage=3, matmuls="fp8"),
        "h100x8",
        dataclasses.replace(MODELS["llama2-7b"], layers=2, length=256),
        marks=SLOW,
    ),
]


@pytest.mark.parametrize(("plan", "target", "model"), FEW_BITS)
def test_products_in_few_bits_are_planned_as_they_run(plan, target, model):
    """Stage 3 gathers codes of layers; a pipeline sends what it does without them."""
    need(target)
    dtype = "float32" if target == "cpu:8" else "bfloat16"
    layers = (1, 1) if plan.pipe > 1 else (2,)
    file = file_of(plan, layers, target)
    file = dataclasses.replace(file, length=256, dtype=dtype)
    found = verify(file, model, TX, memory=2.0**40, device=kind_of("h100"))
    assert not found.failures
    assert found.wire == pytest.approx(found.planned_wire, rel=0.002)
    low, (planned,) = (
        [row.amount * row.times for row in ledger.work if row.on == (plan.matmuls,)]
        for ledger in (found.program, found.planned)
    )
    assert sum(low) == pytest.approx(planned, rel=0.01)


@pytest.mark.parametrize(
    ("model", "sequences", "keep", "error"),
    [
        (LLAMA, 8, {"pipe": 1, "stage": 2, "recompute": "full", "tensor": 2}, 0.06),
        (DEEP, 32, ON_FOUR | {"schedule": "aligned"}, 0.1),
    ],
)
def test_a_plan_on_a_target(model, sequences, keep, error):
    """The best plan, beside its program.

    Activations are small beside the update, which gathers the parameters; where devices share
    layers, they are a larger part of it. Of pipelines memory is mostly gradients that are
    accumulated, and messages.
    """
    need("h100x8")
    found = search(model, TX, "h100x8", sequences=sequences, keep=keep)
    options = {"target": "h100x8", "length": model.length, "dtype": "bfloat16"}
    file = PlanFile.of(found.best, model="", optimizer="", **options)
    verification = verify(file, model, TX, memory=found.memory)
    assert not verification.failures
    assert verification.wire == pytest.approx(verification.planned_wire, rel=0.02)
    assert verification.memory == pytest.approx(verification.planned_memory, rel=error)
