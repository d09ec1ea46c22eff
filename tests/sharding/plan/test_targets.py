"""Targets that are not here; their programs, where their compilers are installed."""

import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
import zero as benchmark
from _steps import compiled, cost
from _transformer import apply_block, init, make_loss
from zero import Case

import optax_ext
import sharding as shd
from sharding.cli import main
from sharding.plan.program._wire import collectives

from ...compilers import need


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v9z:2x2", "unknown target 'v9z:2x2'; known are v4:2x2x2"),
        ("v5e:3x3", "no slice 'v5e:3x3'; those of v5e are 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16,"),
        ("v5p:0x4", "unknown target 'v5p:0x4'; known are v4"),
        ("v5p:2x2x2x2", "unknown target"),
        ("v5e:4x4*0", "unknown target"),
        ("h100x0", "unknown target"),
        ("cpu:0", "unknown target 'cpu:0'"),
        ("cpu:64", r"'cpu:64' was requested, 8 CPU devices were found; set jax.config.update"),
        ("h200x12", "more GPUs than one host's must be a multiple of 8"),
        ("a100-40x8", "'a100-40x8' can be planned, not compiled for; .* CPUs"),
        ("", "unknown target ''"),
    ],
)
def test_bad_names(name, message):
    with pytest.raises(ValueError, match=message):
        shd.targets.topology(name)
    with pytest.raises(ValueError, match=r"shape \(2, 2\) does not fit 'cpu:8', which has 8"):
        shd.targets.mesh("cpu:8", (2, 2), ("a", "b"))


@pytest.mark.script
def test_compilers_in_a_folder_of_their_own(tmp_path):
    """They are found when a target is requested, and do not affect other programs."""
    (tmp_path / "libtpu").mkdir()
    (tmp_path / "libtpu" / "__init__.py").write_text("raise RuntimeError('loaded')")
    code = (
        "import importlib.util, jax, sharding as shd\n"
        "assert jax.default_backend() == 'cpu'\n"
        "before = importlib.util.find_spec('libtpu')\n"
        "try:\n    shd.targets.topology('v5e:2x4')\n"
        "except Exception as error:\n    found = type(error)\n"
        "assert before is not None or found is not ValueError, 'the folder was not looked into'\n"
    )
    env = os.environ | {"SHARDING_COMPILERS": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("target", ["h200x8", "v5e:4x4", "v6e:16x16", "v5p:4x4x4", "v5e:4x4*2"])
def test_wire_bytes(target, stage):
    need(target)
    found = benchmark.measure(Case(target, stage, hybrid=target.endswith("*2")))
    assert found.wire == pytest.approx(found.wire_theory, rel=0.05)
    assert found.arguments == pytest.approx(found.arguments_theory, rel=0.02)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("target", ["h200x8", "v5e:4x4"])
def test_master_weights_are_never_gathered(target, stage):
    """Parameters travel as bfloat16, though the update makes them of float32."""
    need(target)
    case = Case(target, stage)
    zero, tx = case.zero(), optax_ext.master_weights(optax.adamw(1e-3))

    def make_state():
        params = init(case.config, jnp.bfloat16)
        return params, tx.init(params)

    step = zero.train_step(make_loss(zero.gathered(apply_block)), tx=tx)
    batch = jax.ShapeDtypeStruct((zero.num_devices, 65), jnp.int32)
    compiled = step.lower(zero.abstract_state(make_state, tx=tx), batch).compile()
    gathers = [c for c in collectives(compiled) if c.op == "all-gather" and c.elements > 1e6]
    assert {c.dtype for c in gathers} == {"bf16"}


@pytest.mark.parametrize("target", ["h200x8", "v5e:4x4"])
def test_unrolled_blocks_are_gathered_one_at_a_time(target):
    """XLA does not gather all blocks ahead: temporaries are far below the model's size."""
    need(target)
    found = benchmark.measure(Case(target, 3, scan=False))
    saved = benchmark.measure(Case(target, 3, scan=False, reshard=False))
    layer = 2 * 12 * 2048**2
    assert saved.temporaries - found.temporaries > 2 * layer


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("mesh", ["x=4,y=4", "data=16"])
def test_muon_sends_little_and_shares_its_work(mesh, stage, capsys):
    need("v5e:4x4")
    line = f"audit --model gpt2-small --optimizer muon --target v5e:4x4 --mesh {mesh} --json"
    assert main([*line.split(), "--length", "512", "--stage", str(stage)]) == 0
    found = json.loads(capsys.readouterr().out)[f"stage {stage}"]
    assert found["wire_bytes"] < 1.08 * found["expected_wire"]
    # Five Newton-Schulz steps on (n, m), n <= m: x x^T, its square, and a product with x.
    shapes = [(768, 768)] * 48 + [(768, 3072)] * 24
    work = sum(5 * (2 * n * n * m * 2 + 2 * n**3) for n, m in shapes)
    assert found["flops"]["update"] < 1.25 * work / 16
    moved = [t for t in found["traffic"] if t["phase"] == "update"]
    assert {t["op"] for t in moved if t["wire_bytes"] > 2**20} == {"all-to-all"}


@pytest.mark.parametrize(("wire", "dtype"), [(None, "f32"), (jnp.bfloat16, "bf16")])
@pytest.mark.parametrize("target", ["h200x8", "v5e:4x4"])
def test_matrices_are_sent_in_the_wire_dtype(target, wire, dtype):
    """The compiler does not move the conversion behind the all-to-all."""
    need(target)
    zero = Case(target, 2).zero()
    tx = shd.by_owner(optax.contrib.muon(1e-3), wire_dtype=wire)

    def make_state():
        params = {"layers": jnp.ones((16, 512, 1024), jnp.float32)}
        return params, tx.init(params)

    def loss(params, batch):
        return jnp.mean(jnp.cos(params["layers"])) + jnp.mean(batch)

    batch = jax.ShapeDtypeStruct((zero.num_devices,), jnp.float32)
    step = zero.train_step(loss, tx=tx)
    compiled = step.lower(zero.abstract_state(make_state, tx=tx), batch).compile()
    sent = [c for c in collectives(compiled) if "/by_owner/" in c.scope]
    assert {(c.op, c.dtype) for c in sent} == {("all-to-all", dtype)}
    n = zero.num_devices
    size = 16 * 512 * 1024 * (2 if wire else 4)
    assert sum(c.wire_bytes for c in sent) == 2 * size / n * (n - 1) / n


@pytest.mark.parametrize("shape", [(50257, 768), (4096, 11008)])
@pytest.mark.parametrize("target", ["v5e:1x1", "v6e:1x1"])
def test_8_bit_state_in_a_loop_over_rows_holds_few_temporaries(target, shape):
    """By XLA's form the step of the first holds 16 to 22 bytes a parameter, and moves 93 to 100."""
    need(target)
    tx = optax_ext.low_precision_state(optax.adamw(1e-3), implementation="rows")
    moved, held = cost(compiled(target, tx, [shape]), [shape])
    assert held < 0.1
    assert moved < 32


@pytest.mark.parametrize("target", ["v5e:2x4", "h200x8"])
def test_a_pipeline_keeps_what_its_schedule_says(target):
    """Its residuals too; no tick copies them, as GPUs copy sums, which branches return."""
    need(target)
    pipeline = shd.Pipeline(
        shd.targets.mesh(target, (2, 4), ("data", "pipe")),
        shd.pipeline.one_f_one_b(4, 8),
        num_layers=8,
        embed=lambda shared, x: x @ shared["shared"],
        block=lambda w, x, _: x + jnp.tanh(x @ w),
        head=lambda shared, x, _: (jnp.sum((x @ shared["shared"]) ** 2), jnp.float32(x.shape[0])),
        recompute=False,
    )
    tx, zero = optax.adam(1e-3), shd.Zero(pipeline.mesh, stage=1)

    def make_state():
        params = {"layers": jnp.ones((8, 256, 256)), "shared": jnp.ones((256, 256))}
        params = pipeline.stack(params)
        return params, tx.init(params)

    specs = pipeline.param_specs(jax.eval_shape(make_state)[0])
    step = zero.train_step(pipeline.loss, tx=tx, weighted=True)
    batch = jax.ShapeDtypeStruct((32, 64, 256), jnp.float32)
    lowered = step.lower(zero.abstract_state(make_state, tx=tx, param_specs=specs), batch)
    found = shd.audit(lowered, mesh=pipeline.mesh, pipeline=pipeline).pipeline
    assert (found.iterations, found.permutes) == ((14,), 28)
    assert [each.found for each in found.slots] == [each.scheduled for each in found.slots]
    assert found.slots[0].nbytes == found.slots[0].scheduled * 4 * 2 * 64 * 256
    assert found.excess == 0
    assert found.copied == 0
    assert (found.copied_sums > 0) == (target == "h200x8")


@pytest.mark.slow
def test_the_smoke_table(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["zero.py", "--target", "cpu:8"])
    monkeypatch.setattr(benchmark, "cases", lambda *_: [Case("cpu:8", 2)])
    benchmark.main()
    assert re.search(
        r"\| cpu:8 \| 2 \| adamw \| scan \| 1 \| [0-9.]+ \| 1\.00", capsys.readouterr().out
    )
