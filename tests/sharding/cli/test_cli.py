"""``plan`` and ``audit``: what they print, and one sentence for every wrong question."""

import importlib
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys
import tomllib

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh

import optax_ext
import sharding
from sharding.cli import main
from sharding.cli._options import optimizer_of
from sharding.plan import estimate
from sharding.plan._devices import kind_of
from sharding.plan._format import size
from sharding.plan._models import MODELS, Decoder, count_to_params

PNG = b"\x89PNG\r\n\x1a\n"
GPT2 = "--model gpt2-small"


@pytest.fixture
def tiny(monkeypatch):
    """A model that compiles fast, in place of gpt2-small."""
    model = Decoder(4, 64, 4, 4, 256, 512, 128, gated=False, tied=True, biased=True)
    monkeypatch.setitem(MODELS, "gpt2-small", model)
    return model


# --- plan -----------------------------------------------------------------------------------------


def test_plan(run, tmp_path):
    path = tmp_path / "plan.png"
    line = "plan --model llama2-7b --optimizer came --target v5e:16x16"
    code, out, err = run(f"{line} --plot {path}")
    assert (code, err) == (0, "")
    assert "6,738,415,616 parameters on x=16, y=16: one device" in out
    for name in ("stage 0", "stage 1", "stage 2", "stage 3", "3 hybrid", "3 spread *"):
        assert name in out
    assert out.count("*") == 1
    assert "\n3 spread is recommended: it sends least among the stages that leave 20%" in out
    assert re.search(r"left of 16.0 GiB +too much too much 2.43 GiB 15.8 GiB", out)
    assert "At 3 spread came holds" in out
    assert "DeepSpeed" not in out  # who knows of Adam alone
    assert path.read_bytes().startswith(PNG)
    assert path.stat().st_size > 10_000


@pytest.mark.parametrize(
    "line",
    [
        "--model 7.5e9 --optimizer adam --master --target h100x64",
        "--model llama2-13b --master --offload --target v5e:4x4*2 --microbatches 4",
        "--model 1e15 --target v5p:16x16x16*2 --memory 999999",
    ],
)
def test_it_fits_into_80_columns(run, line):
    _, out, _ = run(f"plan {line}")
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    for row in ("parameters", "gradients", "optimizer state", "total", "sent in a step"):
        assert re.search(rf"^ ?{row} ", out, re.MULTILINE)


def test_json_has_the_numbers_of_estimate(figures):
    found = figures("plan --model 7.5e9 --optimizer adam --master --target h100x64")
    zero = sharding.Zero(AbstractMesh((8, 8), ("host", "data")), stage=3, replica_axis="host")
    tx = optax_ext.master_weights(optax.adam(1e-3))
    params = count_to_params(7_500_000_000)
    expected = estimate(params, tx, zero, device=kind_of("h100x64")).to_dict()
    assert found["stages"] == list(expected["stages"])
    assert (found["num_params"], found["mesh"]) == (7_500_000_000, {"host": 8, "data": 8})
    assert [round(row["memory"] / 1e9, 1) for row in found["stages"][:4]] == [120, 31.4, 16.6, 1.9]
    assert (found["recommended"], found["device"]["name"]) == ("stage 1", "h100")


def test_options_reach_the_plan(figures):
    def stages(line):
        rows = figures(f"plan {GPT2} --target v5e:4x4 {line}")["stages"]
        return {row["name"]: row for row in rows}

    plain, third = stages(""), "stage 3"
    assert plain[third]["batch"] == 4 * 1025
    assert stages("--batch 3 --microbatches 2 --length 99")[third]["batch"] == 3 * 2 * 4 * 100
    assert stages("--microbatches 2")[third]["wire"] > 1.99 * plain[third]["wire"]
    assert stages("--dtype float32")[third]["params"] == 2 * plain[third]["params"]
    both = stages("--dtype float32 --compute-dtype bfloat16 --reduce-dtype float32")[third]
    assert both["wire"] == pytest.approx(4 / 3 * plain[third]["wire"], rel=0.03)
    assert stages("--master")[third]["master"] == pytest.approx(2 * plain[third]["params"])
    # Momentum of 2 bytes an element, then half a byte and scales.
    assert 0.25 < stages("--state 4bit")[third]["opt_state"] / plain[third]["opt_state"] < 0.28
    # All but arrays smaller than offload_min_size.
    assert 0.99 < stages("--offload")[third]["host"] / plain[third]["opt_state"] < 1
    assert "3 hybrid" not in stages("--mesh x=16")
    swapped = stages("--replica-axis y --axis x --mesh x=8,y=2")["3 hybrid"]
    assert swapped["params"] == pytest.approx(plain["stage 0"]["params"] / 8, rel=0.01)


def test_figures_of_a_device(text, figures):
    """Those that are given replace those that are known, and make a new device known."""
    line = f"plan {GPT2} --target cpu:8"
    shown = text(line)
    assert "What fits is not known: no figures of cpu:8. Give them: --memory GIB" in shown
    assert "left of" not in shown
    assert "*" not in shown
    shown = text(f"{line} --memory 1")
    assert "left of 1.00 GiB" in shown
    assert "stage 2 *" not in shown
    assert "stage 3 *" in shown

    def device(line):
        found = figures(line)["device"]
        return [found[name] for name in ("memory", "bandwidth", "flops", "link")]

    assert device(f"{line} --memory 1")[:2] == [2**30, None]
    given = f"{line} --memory 2 --bandwidth 100 --tflops 3 --link 5"
    assert device(given) == [2 * 2**30, 100e9, 3e12, 5e9]
    known = device(f"plan {GPT2} --target v5e:4x4 --memory 0.1")
    assert known[:2] == [0.1 * 2**30, 819e9]
    line = f"plan {GPT2} --target newx16 --memory 96 --tflops 1000 --link 450"
    assert device(f"{line} --bandwidth 4000") == [96 * 2**30, 4e12, 1e15, 450e9]
    found = figures(line)
    assert found["mesh"] == {"host": 2, "data": 8}
    assert found["device"]["name"] == "new"
    assert set(found["stages"][3]["seconds"]) == {"compute", "wire"}
    found = figures(f"{line} --bandwidth 4000")
    assert set(found["stages"][3]["seconds"]) == {"compute", "memory", "wire"}


def test_notes(run, text, figures):
    """On DeepSpeed's figures, on activations, and on stages that leave little room."""
    shown = text("plan --model 2.85e9 --optimizer adam --target h100x8")
    assert "15.9 GiB by its documentation and 11.3 GiB by its code" in shown
    line = f"plan {GPT2} --target cpu:8"
    _, out, _ = run(line)
    assert re.search(r"^ ?\+ activations +(\? +){3}\? *$", out, re.MULTILINE)
    assert "Activations are not counted (?): they depend on the code of the model." in out
    found = figures(f"{line} --memory 2")
    assert found["not_counted"] == ["activations"]
    assert [stage["activations"] for stage in found["stages"]] == [None] * 4
    # GPT-2 small holds 1.9 GiB at stage 0, 0.3 GiB at stage 3.
    warning = r"^warning: stage 0 leaves less than 10% of the memory"
    assert re.search(warning, run(f"{line} --memory 2")[1], re.MULTILINE)
    assert "less than 10%" not in run(f"{line} --memory 4")[1]
    stage = found["stages"][0]
    assert 0 < stage["headroom"] < 0.1
    assert stage["headroom"] == pytest.approx(1 - stage["peak"] / 2**31)
    assert found["fits"] is True


def test_times_and_tokens_at_the_roofline(run, figures):
    line = "plan --model llama2-7b --target v5e:16x16 --batch 2 --microbatches 3 --length 1024"
    found, kind = figures(line), kind_of("v5e:16x16")
    tokens = 2 * 3 * 1024
    # All but the embedding, which is looked up; two products of attention, there and back.
    flops = 6 * (6_738_415_616 - 32000 * 4096) * tokens + 12 * 32 * 4096 * 1024 * tokens
    assert found["flops"] == pytest.approx(flops, rel=1e-3)
    assert found["tokens"] == 256 * tokens
    nbytes, stage = 2 * 6_738_415_616, found["stages"][3]
    moved = 3 * 3 * nbytes + 2 * (stage["params"] + stage["opt_state"])
    expected = {
        "compute": flops / kind.flops,
        "memory": moved / kind.bandwidth,
        "wire": stage["wire"] / kind.link,
    }
    assert stage["seconds"] == pytest.approx(expected, rel=1e-3)
    slowest = max(stage["seconds"].values())
    assert stage["tokens_per_second"] == pytest.approx(256 * tokens / slowest)
    _, out, _ = run(line)
    for name in ("compute, at least", "memory, at least", "wire, at least", "tokens/s, at most"):
        assert re.search(rf"^ ?{name} +\d", out, re.MULTILINE)
    assert "6 sequences of 1,024 tokens on each device in a step" in " ".join(out.split())


@pytest.mark.parametrize(
    ("target", "stage", "network"),
    [
        ("v5e:4x4*2", "3 hybrid", True),
        ("h100x64", "3 spread", True),
        ("v5e:4x4", "3 hybrid", False),  # another axis of the torus
    ],
)
def test_the_network_counts_where_replicas_are_on_other_hosts(figures, target, stage, network):
    rows = figures(f"plan {GPT2} --target {target}")["stages"]
    (seconds,) = (row["seconds"] for row in rows if row["name"] == stage)
    assert set(seconds) == {"compute", "memory", "wire"} | ({"network"} if network else set())


def test_no_times_where_the_work_is_not_known(text, figures):
    line = "plan --model 1e9 --target h100x8"
    assert "at least" not in text(line)
    found = figures(f"{line} --length 512")
    assert found["flops"] == 6e9 * 512  # without attention: nothing is known of layers
    shown = text("plan --model 1e9 --length 512 --target cpu:8 --memory 40 --tflops 2")
    assert "compute, at least" in shown
    assert "wire, at least" not in shown  # its link is not known


def test_why_came_holds_more_than_adamw(text):
    """Where optax keeps moments in bfloat16, and only there."""
    line = f"plan {GPT2} --optimizer came --target v5e:2x2"
    shown = text(line)
    assert re.search(r"came holds .* more than adamw", shown)
    assert "adamw keeps its moments in bfloat16, the dtype of the parameters; came keeps" in shown
    for options in ("--master", "--dtype float32"):
        shown = text(f"{line} {options}")
        assert re.search(r"came holds .* less than adamw", shown)
        assert "keeps its moments" not in shown


# --- What does not fit ----------------------------------------------------------------------------


def test_changes_that_make_it_fit(run, module):
    """Those that are named do, and what is not named does not."""
    module("""
        import jax.numpy as jnp, optax_ext
        came = optax_ext.came(1e-3, mu_dtype=jnp.bfloat16)
    """)
    line = "plan --model 13e9"
    came = "CAME with a bfloat16 momentum and no master weights"
    changes = {
        "8 devices instead of 4": "--target v5e:2x4",
        "--state 8bit": "--target v5e:2x2 --state 8bit",
        "--offload": "--target v5e:2x2 --offload",
        came: "--target v5e:2x2 --optimizer mine:came",
    }
    code, out, err = run(f"{line} --target v5e:2x2 --memory 22")
    assert (code, err) == (2, "")
    assert "Does not fit a v5e: stage 3 needs least, 24.2 GiB of 22.0 GiB" in out
    assert "*" not in out
    assert f"fit, before activations: {'; '.join(changes)}." in " ".join(out.split())
    for options in changes.values():
        assert run(f"{line} {options} --memory 22")[0] == 0
    code, out, _ = run(f"{line} --target v5e:2x2 --memory 15.5")
    assert code == 2
    assert "--state 8bit" not in out
    assert "--offload" in out
    code, out, _ = run("plan --model 1e15 --target h100x8")
    assert code == 2
    assert "No change that is known here makes it fit: shard it over a model axis, too." in out


# --- The user's own -------------------------------------------------------------------------------


def test_a_model_and_an_optimizer_of_ones_own(run, figures, module):
    module("""
        import jax, jax.numpy as jnp, optax
        class Model:
            @staticmethod
            def init():
                return {"w": jnp.ones((1000, 800)), "b": jnp.ones(800, jnp.bfloat16)}
        def abstract():
            return jax.eval_shape(Model.init)
        def optimizer():
            return optax.sgd(0.1, momentum=0.9)
        made = optimizer()
    """)
    line = "plan --target h100x8"
    assert run(f"{line} --model mine:abstract --optimizer scale_by_muon")[0] == 0
    for model, optimizer in (("Model.init", "optimizer"), ("abstract", "made")):
        found = figures(f"{line} --model mine:{model} --optimizer mine:{optimizer}")
        unsharded = found["stages"][0]
        assert found["num_params"] == 800_800
        assert unsharded["params"] == unsharded["opt_state"] == 800_000 * 4 + 800 * 2
        assert unsharded["batch"] == 0


def test_from_the_working_directory(text, module, tmp_path, monkeypatch):
    module("def init():\n    import jax.numpy as jnp\n    return jnp.ones(5000)\n")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    monkeypatch.chdir(tmp_path)
    shown = text("plan --model mine:init --target h100x8")
    assert shown.startswith("5,000 parameters on data=8")


@pytest.mark.parametrize(("scan", "biased"), [(True, False), (False, True)])
def test_muon_is_for_the_matrices_of_the_layers(scan, biased):
    model = Decoder(2, 64, 4, 2, 96, 100, biased=biased, gated=not biased, scan=scan)
    params = model.abstract()
    state = jax.eval_shape(optimizer_of("muon").init, params)
    adam = optax.tree.get(state.inner_states[False], "nu")
    matrices = {"query", "key", "value", "out", "up", "down", "gate"}
    for path, leaf in jax.tree.leaves_with_path(adam, is_leaf=lambda x: isinstance(x, tuple)):
        names = [str(getattr(key, "key", "")) for key in path]
        muon = isinstance(leaf, optax.MaskedNode)
        assert muon is (names[0] == "layers" and names[-1] in matrices), names
    # Real matrices: one momentum of the shape of the parameter.
    query = state.inner_states[True].inner_state["layers"]
    query = (query if scan else query[0])["query"].inner_states["muon"].inner_state[0].mu
    assert query.shape == ((2, 64, 64) if scan else (64, 64))


# --- Bad input ------------------------------------------------------------------------------------

CPU, V5E = f"{GPT2} --target cpu:8", f"{GPT2} --target v5e:4x4"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{CPU} --optimizer adamx", "'adamx' is no optimizer; nearest are .*adam"),
        (f"{CPU} --optimizer optax:adam", "must make one without arguments, .*'learning_rate'"),
        (f"{CPU} --optimizer os:getcwd", "os:getcwd made no optimizer, but '/"),
        ("--model gpt2-tiny --target cpu:8", "'gpt2-tiny' is no number and no model; .*gpt2-small"),
        ("--model qwen --target cpu:8", "is no number and no model; known are gpt2-large, .*llama"),
        ("--model nosuch.module:f --target cpu:8", "--model nosuch.module:f: No module named 'no"),
        ("--model math:pi --target cpu:8", "--model math:pi must make parameters"),
        ("--model math:sin --target cpu:8", "--model math:sin must make parameters without"),
        ("--target cpu:8", "--model is missing: a number, a name, or module:function"),
        (
            f"{GPT2} --target v7:2x2",
            "unknown target 'v7:2x2'; known are v4:2x2x2, .*cpu:8.* a100-40x8.* can be planned as "
            "NAMExNUMBER with its figures: --memory GIB, .*--tflops, --bandwidth and --link.$",
        ),
        (f"{GPT2} --target newx8", "unknown target 'newx8'; known .* NAMExNUMBER .*--memory GIB"),
        (f"{V5E} --mesh x=4,y=2", r"x=4,y=2: 4 \* 2 = 8 devices requested, but v5e:4x4 has 16.$"),
        (f"{V5E} --mesh x=4,x=4", "axis 'x' is named twice"),
        (f"{V5E} --mesh 4x4", "must look like x=4,y=8, got '4x4'"),
        (f"{CPU} --length 2000", "has 1024 positions, --length 2000 was requested"),
        (f"{CPU} --memory nan", "--memory must be above 0, got nan"),
        (f"{CPU} --dtype int8", "--dtype must be a floating dtype, got int8"),
        (f"{CPU} --reduce-dtype int8", "--reduce-dtype must be a floating dtype"),
        (f"{CPU} --dtype half-ish", "--dtype 'half-ish' is no dtype"),
        ("--model 1e9 --target cpu:8 --batch 2", "--batch counts sequences, .* give --length"),
    ],
)
def test_bad_plans(error, line, message):
    assert re.search(message, error(f"plan {line}"))


def test_a_file_that_cannot_be_written(run):
    code, _, err = run(f"plan {CPU} --plot /nosuch/x.png")
    assert (code, err) == (2, "error: --plot /nosuch/x.png: No such file or directory.\n")


AUDITED = "--step mine:lowered --target cpu:8"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--model 7e9 --target cpu:8", "--model must be one of gpt2-small, .*the step: --step"),
        (
            f"{GPT2} --target a100-80x8",
            r"'a100-80x8' can be planned, not compiled for; .* CPUs, TPUs \(v4, .* \(h100, h200\)",
        ),
        (
            f"{CPU} --find-batch",
            "--find-batch needs the memory of a device, and none is known of cpu:8: .* --memory",
        ),
        (f"{CPU} --headroom 0.2", "read with --find-batch only"),
        (f"{CPU} --no-remat", "read at stages 0 to 2 only"),
        (f"{CPU} --stage 0 --no-remat --remat 1GiB", "--remat plans what --no-remat forbids"),
        (f"{CPU} --remat auto", "--remat auto needs the memory of cpu:8"),
        (f"{CPU} --remat=", "a text such as '8GiB', got ''"),
        (f"{CPU} --hybrid", "--hybrid needs an axis of replicas"),
        (f"{CPU} --mesh x=2,y=4 --replica-axis y", "--replica-axis is read with --hybrid only"),
        ("--step math:sin --target cpu:8 --batch 2", "--batch would be ignored: --step math:sin"),
        (
            "--step math:sin --target cpu:8 --master --compute-dtype float32 --stage 2",
            "--master, --compute-dtype, --stage would be ignored: --step math:sin",
        ),
        (AUDITED, "error: the compiler of cpu:8 failed: INTERNAL: no such thing$"),
    ],
)
def test_bad_audits(error, module, line, message):
    module("""
        import jax

        def lowered(mesh):
            raise jax.errors.JaxRuntimeError("INTERNAL: no such thing\\nmore of it")
    """)
    assert re.search(message, error(f"audit {line}"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan --model 1e9", "--target"),
        ("plan --model 1e9 --target cpu:8 --state 3bit", "'8bit'"),
        (f"audit {CPU} --stage 4", "invalid choice: '4'"),
        ("", "plan|audit"),
    ],
)
def test_bad_options(run, capsys, line, message):
    with pytest.raises(SystemExit) as error:
        run(line)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_without_optional_packages(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    code, out, err = run(f"plan {CPU}")
    assert (code, out) == (2, "")
    assert err == "error: tables need rich: pip install 'optax-ext[cli]'. Or request --json.\n"
    assert run(f"plan {CPU} --json")[0] == 0
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    code, _, err = run(f"plan {CPU} --json --plot x.png")
    assert code == 2
    assert re.fullmatch(r"error: .+ needs matplotlib: pip install 'optax-ext\[cli\]'\.\n", err)


# --- audit ----------------------------------------------------------------------------------------

STEP = """
    import jax, jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec as P

    def lowered(mesh):
        def step(params, x):
            return params - jax.grad(lambda p: jnp.sum((x @ p) ** 2))(params)

        params = jax.ShapeDtypeStruct((32, 16), jnp.float32, sharding=NamedSharding(mesh, P()))
        sharded = NamedSharding(mesh, P(mesh.axis_names))
        x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=sharded)
        return jax.jit(step, out_shardings=NamedSharding(mesh, P())).lower(params, x)

    def without_memory(mesh):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 17G of 15.75G hbm")
"""


def test_audit_of_a_step(run, error, figures, module, tmp_path):
    module(STEP)
    path = tmp_path / "audit.png"
    code, out, err = run(f"audit {AUDITED} --plot {path}")
    assert (code, err) == (0, "")
    assert path.read_bytes().startswith(PNG)
    assert max(map(len, out.splitlines())) <= 80
    for title in ("Memory of one device", "Sent by one device", "Work of one device"):
        assert f"mine:lowered: {title}" in " ".join(out.split())
    # The full gradient of 2 KiB is summed over eight devices.
    assert re.search(r"all-reduce +data +f32 +1 +3.50 KiB", out)
    assert re.search(r"parameters +2.00 KiB", out)

    found = figures(f"audit {AUDITED} --mesh a=2,b=4")["mine:lowered"]
    assert found["wire_bytes"] == 2 * 7 / 8 * 2048
    assert [each["axes"] for each in found["traffic"]] == [["a", "b"]]
    assert found["arguments"]["parameters"] == 2048
    assert found["matmul_flops"] == 2 * (2 * 8 * 32 * 16)
    assert (found["devices"], found["fits"], found["seconds"]) == (8, None, {})

    line = f"audit {AUDITED} --tflops 1 --bandwidth 1 --link 1"
    found = figures(f"{line} --memory 1")["mine:lowered"]
    assert found["fits"] is True
    np.testing.assert_allclose(found["seconds"]["wire"], 3584 / 1e9)
    code, out, _ = run(f"{line} --memory 1e-6")
    assert code == 2
    assert "a cpu has: DOES NOT FIT" in out
    assert "warning: the step needs" in out
    found = error("audit --step mine:without_memory --target cpu:8")
    assert found.startswith("error: the step does not fit, so that its compiler gave up: RES")
    # Nothing of it has changed the configuration of this process.
    assert jax.device_count() == jax.config.jax_num_cpu_devices == 8


def test_audit_of_a_pipeline(run, figures, module):
    """A step may come with its pipeline."""
    module("""
        import jax, jax.numpy as jnp, sharding as shd

        def lowered(mesh):
            pipeline = shd.Pipeline(
                mesh,
                shd.pipeline.one_f_one_b(stages=4, microbatches=4),
                num_layers=4,
                embed=lambda shared, x: x @ shared["in"],
                block=lambda w, x, _: x + jnp.tanh(x @ w),
                head=lambda shared, x, _: (jnp.sum(x**2), 1.0),
            )
            params = {"in": jnp.ones((8, 16)), "layers": jnp.ones((4, 16, 16))}
            grad = jax.jit(jax.grad(pipeline.loss, has_aux=True))
            return grad.lower(jax.eval_shape(lambda: params), jnp.ones((8, 8))), pipeline
    """)
    line = f"audit {AUDITED} --mesh data=2,pipe=4"
    code, out, err = run(line)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    title = "mine:lowered: Pipeline: 1f1b-aligned, 4 stages, 4 micro-batches, 20 ticks"
    assert title in " ".join(out.split())
    assert re.search(r"permutes +20 +20 +2.50 KiB", out)
    found = figures(line)["mine:lowered"]["pipeline"]
    assert (found["permutes"], found["live"]) == (20, [4, 4, 3, 1])


def test_audit_of_a_model(figures, tiny):
    plain = figures(f"audit {CPU} --batch 8 --stage 2 --no-remat")["stage 2"]
    # Six operations a parameter and token, and attention.
    assert tiny.flops(8 * 128, 128) == pytest.approx(plain["matmul_flops"], rel=0.01)
    assert plain["wire_bytes"] == pytest.approx(plain["expected_wire"], rel=0.01)


@pytest.mark.slow
def test_planned_activations(run, figures, text, tiny):
    """A step stores fewer bytes, and computes them again."""
    plain = figures(f"audit {CPU} --batch 8 --stage 2 --no-remat")["stage 2"]
    code, out, err = run(f"audit {CPU} --batch 8 --stage 2 --remat 20MiB --json")
    assert code == 0
    assert "Activations: layers store 4" in err
    found = json.loads(out)["stage 2"]
    assert found["matmul_flops"] > plain["matmul_flops"]
    assert found["temporaries"] < min(plain["temporaries"], 20 * 2**20)
    line, budget = f"plan {CPU} --batch 8 --memory 8", 20 * 2**20
    planned = figures(f"{line} --remat 20MiB")
    assert planned["not_counted"] == []
    for stage in planned["stages"]:
        assert 0.8 * budget < stage["activations"] <= budget
        left = 1 - (stage["memory"] + stage["unreduced"] + stage["activations"]) / (8 * 2**30)
        assert stage["headroom"] == pytest.approx(left)
    assert "Activations: layers store 4 query_proj" in text(f"{line} --remat auto")
    code, _, err = run(f"{line} --remat 1MiB")
    assert code == 2
    least = re.search(r"no plan fits 1.00 MiB: .* at least, ([\d,]+) bytes", err)[1]
    least = int(least.replace(",", ""))
    # Layers alone would do with fewer.
    code, _, err = run(f"{line} --remat {least - 2**20}")
    assert code == 2
    assert f"no plan fits {size(least - 2**20)}: " in err
    assert f"at least, {least:,} bytes" in err
    stages = figures(f"{line} --remat {least}")["stages"]
    assert {stage["activations"] for stage in stages} == {least}


def test_find_batch_of_a_step_of_ones_own(run, module):
    module("""
        import jax, jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec as P

        def lowered(mesh, batch):
            over = NamedSharding(mesh, P(mesh.axis_names))
            x = jax.ShapeDtypeStruct((8 * batch, 1024), jnp.float32, sharding=over)
            return jax.jit(lambda x: x * 2, out_shardings=over).lower(x)

        def failing(mesh, batch):
            raise jax.errors.JaxRuntimeError("INTERNAL: no such thing\\nmore of it")
    """)
    line = f"audit {AUDITED} --find-batch --memory 0.001"  # of 8 KiB each
    code, out, _ = run(line)
    assert code == 0
    assert "mine:lowered, batch 117: Memory of one device" in out
    assert "mine:lowered: the largest batch that fits is 117 on each device" in out
    assert re.search(r"^ ?118 +944 KiB +too much", out, re.MULTILINE)
    code, out, _ = run(f"{line} --headroom 0.5")
    assert "the largest batch that fits is 65 on each device" in out
    code, out, _ = run(f"{line} --batch 200")
    assert code == 2
    assert "no batch fits: 200 needs 1.56 MiB" in out
    code, _, err = run(line.replace("lowered", "failing"))
    assert code == 2
    assert err.splitlines()[-1] == "error: the compiler of cpu:8 failed: INTERNAL: no such thing"


# --- As a program ---------------------------------------------------------------------------------

PROJECT = pathlib.Path(__file__).parents[3] / "pyproject.toml"


def test_one_command_and_version_for_both_packages(monkeypatch, capsys):
    project = tomllib.loads(PROJECT.read_text())
    module, _, name = project["project"]["scripts"]["optax-ext"].partition(":")
    assert getattr(importlib.import_module(module), name) is main
    assert sharding.__version__ == optax_ext.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", sharding.__version__)
    assert "version" in project["project"]["dynamic"]
    source = PROJECT.parent / project["tool"]["hatch"]["version"]["path"]
    assert f'__version__ = "{sharding.__version__}"' in source.read_text()
    # As python -m sharding.
    monkeypatch.setattr(
        sys, "argv", ["sharding", "plan", "--target", "h100x8", "--model", "1e15", "--json"]
    )
    with pytest.raises(SystemExit) as error:
        runpy.run_module("sharding", run_name="__main__")
    assert error.value.code == 2
    assert json.loads(capsys.readouterr().out)["num_params"] == 10**15


@pytest.mark.script
def test_the_console_command(tmp_path):
    """Beside a ``sharding.py``, which ``python -m sharding`` runs instead."""
    # As installers write it.
    command, folder = tmp_path / "bin" / "optax-ext", tmp_path / "work"
    command.parent.mkdir()
    command.write_text("import sys\nfrom sharding.cli import main\nsys.exit(main())\n")
    folder.mkdir()
    (folder / "sharding.py").write_text("")
    path = os.pathsep.join(filter(None, [str(PROJECT.parent), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}

    def call(*args, cwd=folder, code=0):
        run = subprocess.run(
            [sys.executable, *args], capture_output=True, text=True, env=env, cwd=cwd, check=False
        )
        assert (run.returncode, run.stderr) == (code, "")
        return run.stdout

    plan = ("plan", "--target", "v5e:4x4", "--json", "--model")
    assert call("-m", "sharding", *plan, "1e9") == ""
    assert json.loads(call(str(command), *plan, "1e9"))["num_params"] == 10**9
    assert call(str(command), "--version") == f"optax-ext {optax_ext.__version__}\n"
    assert "usage: optax-ext [-h]" in call(str(command), "--help")
    found = call("-m", "sharding", *plan, "llama2-70b", cwd=tmp_path, code=2)
    assert json.loads(found)["num_params"] == 68_976_648_192


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", "the working folder has a file sharding.py, python -m sharding runs that"),
        ("", "python -m sharding plan --model llama2-7b"),
        ("", "rtx5090x8"),
        ("plan", "llama3-405b"),
        ("audit", "--find-batch find the largest"),
    ],
)
def test_help(run, capsys, command, words):
    with pytest.raises(SystemExit) as error:
        run(f"{command} --help")
    assert error.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert words in shown
    if not command:
        compiled, planned = shown.split("targets to plan only:")
        assert "v5e:4x4" in compiled
        assert "a100-40x8" in planned
        assert "NAMExNUMBER with its figures" in planned
