"""The command line: what it prints, and one sentence for every wrong question."""

import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap
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


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs a command line: the exit code, and what it printed."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which the command adds the directory

    def run(line):
        code = main(line.split())
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of the user's, named ``mine``."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)

    def write(text):
        (tmp_path / "mine.py").write_text(textwrap.dedent(text))

    return write


# --- plan -----------------------------------------------------------------------------------------


def test_plan(run):
    code, out, err = run("plan --model llama2-7b --optimizer came --target v5e:16x16")
    assert (code, err) == (0, "")
    assert "6,738,415,616 parameters on x=16, y=16: one device" in out
    for name in ("stage 0", "stage 1", "stage 2", "stage 3", "3 hybrid", "3 spread *"):
        assert name in out
    assert out.count("*") == 1
    assert "\n3 spread is recommended: it sends least among the stages that leave 20%" in out
    assert re.search(r"left of 16.0 GiB +too much too much 2.43 GiB 15.8 GiB", out)
    assert "At 3 spread came holds" in out
    assert "DeepSpeed" not in out  # who knows of Adam alone


@pytest.mark.parametrize(
    "line",
    [
        "--model gpt2-small --target cpu:8",
        "--model 7.5e9 --optimizer adam --master --target h100x64",
        "--model llama2-70b --master --offload --target v5e:4x4*2 --microbatches 4",
        "--model 17e9 --optimizer adam --master --offload --target v5p:4x4x4*2",
        "--model 1e15 --target v5p:16x16x16*2 --memory 999999",
    ],
)
def test_it_fits_into_80_columns(run, line):
    _, out, _ = run(f"plan {line}")
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    for row in ("parameters", "gradients", "optimizer state", "total", "sent in a step"):
        assert re.search(rf"^ ?{row} ", out, re.MULTILINE)


def test_json_has_the_numbers_of_estimate(run):
    code, out, err = run("plan --model 7.5e9 --optimizer adam --master --target h100x64 --json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    zero = sharding.Zero(AbstractMesh((8, 8), ("host", "data")), stage=3, replica_axis="host")
    tx = optax_ext.master_weights(optax.adam(1e-3))
    expected = estimate(
        count_to_params(7_500_000_000),
        tx,
        zero,
        device=kind_of("h100x64"),
    ).to_dict()
    assert found["stages"] == list(expected["stages"])
    assert (found["num_params"], found["mesh"]) == (7_500_000_000, {"host": 8, "data": 8})
    assert [round(row["memory"] / 1e9, 1) for row in found["stages"][:4]] == [120, 31.4, 16.6, 1.9]
    assert (found["recommended"], found["device"]["name"]) == ("stage 1", "h100")


def test_options_reach_the_plan(run):
    """Each changes what it should: of two runs, whose first has the option."""

    def stages(line):
        code, out, _ = run(f"plan --model gpt2-small --target v5e:4x4 --json {line}")
        assert code == 0
        return {row["name"]: row for row in json.loads(out)["stages"]}

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


@pytest.mark.parametrize("target", ["v5e:4x4", "cpu:8"])
def test_plot(run, tmp_path, target):
    path = tmp_path / "plan.png"
    code, _, err = run(f"plan --model gpt2-small --target {target} --plot {path}")
    assert (code, err) == (0, "")
    assert path.read_bytes().startswith(PNG)
    assert path.stat().st_size > 10_000


def test_memory_makes_a_device_known(run):
    line = "plan --model gpt2-small --target cpu:8"
    code, out, _ = run(line)
    assert code == 0
    assert "What fits is not known: no figures of cpu:8. Give them: --memory GIB" in out
    assert "left of" not in out
    assert "*" not in out
    code, out, _ = run(f"{line} --memory 1")
    assert code == 0
    assert "left of 1.00 GiB" in out
    assert "stage 2 *" not in out
    assert "stage 3 *" in out
    code, out, _ = run(f"{line} --memory 1 --json")
    device = json.loads(out, parse_constant=pytest.fail)["device"]  # Infinity is no JSON
    assert (device["memory"], device["bandwidth"]) == (2**30, None)
    _, out, _ = run(f"{line} --memory 2 --bandwidth 100 --tflops 3 --link 5 --json")
    device = json.loads(out)["device"]
    figures = [device[name] for name in ("memory", "bandwidth", "flops", "link")]
    assert figures == [2 * 2**30, 100e9, 3e12, 5e9]


def test_figures_replace_those_that_are_known(run):
    _, out, _ = run("plan --model gpt2-small --target v5e:4x4 --memory 0.1 --json")
    device = json.loads(out)["device"]
    assert (device["memory"], device["bandwidth"]) == (0.1 * 2**30, 819e9)


def test_a_device_that_nobody_knows(run):
    line = "plan --model gpt2-small --target newx16 --memory 96 --tflops 1000 --link 450 --json"
    code, out, err = run(f"{line} --bandwidth 4000")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["mesh"] == {"host": 2, "data": 8}
    assert found["device"]["name"] == "new"
    figures = [found["device"][name] for name in ("memory", "flops", "link", "bandwidth")]
    assert figures == [96 * 2**30, 1e15, 450e9, 4e12]
    assert set(found["stages"][3]["seconds"]) == {"compute", "memory", "wire"}
    assert set(json.loads(run(line)[1])["stages"][3]["seconds"]) == {"compute", "wire"}


def test_deepspeed_is_quoted_beside_adam(run):
    _, out, _ = run("plan --model 2.85e9 --optimizer adam --target h100x8")
    assert "15.9 GiB by its documentation and 11.3 GiB by its code" in " ".join(out.split())


def test_activations_are_said_not_to_be_counted(run):
    line = "plan --model gpt2-small --target v5e:2x2"
    _, out, _ = run(line)
    assert re.search(r"^ ?\+ activations +(\? +){5}\? *$", out, re.MULTILINE)
    assert "Activations are not counted (?): they depend on the code of the model." in out
    _, out, _ = run(f"{line} --json")
    found = json.loads(out)
    assert found["not_counted"] == ["activations"]
    assert [stage["activations"] for stage in found["stages"]] == [None] * 6
    _, out, _ = run("plan --model 1e9 --target cpu:8")  # nothing is known of the device
    assert "Activations are not counted (?)" in out


def test_little_room_is_warned_of(run):
    """GPT-2 small holds 1.9 GiB at stage 0, 0.3 GiB at stage 3."""
    line = "plan --model gpt2-small --target cpu:8"
    _, out, _ = run(f"{line} --memory 2")
    assert re.search(r"^warning: stage 0 leaves less than 10% of the memory", out, re.MULTILINE)
    assert "less than 10%" not in run(f"{line} --memory 4")[1]
    _, out, _ = run(f"{line} --memory 2 --json")
    found = json.loads(out)
    stages = {stage["name"]: stage for stage in found["stages"]}
    assert 0 < stages["stage 0"]["headroom"] < 0.1
    assert stages["stage 0"]["headroom"] == pytest.approx(1 - stages["stage 0"]["peak"] / 2**31)
    assert found["fits"] is True


def test_times_and_tokens_at_the_roofline(run):
    line = "plan --model llama2-7b --target v5e:16x16 --batch 2 --microbatches 3 --length 1024"
    _, out, _ = run(f"{line} --json")
    found, kind = json.loads(out), kind_of("v5e:16x16")
    tokens = 2 * 3 * 1024
    # All but the embedding, which is looked up; two products of attention, there and back.
    flops = 6 * (6_738_415_616 - 32000 * 4096) * tokens + 12 * 32 * 4096 * 1024 * tokens
    assert found["flops"] == pytest.approx(flops, rel=1e-3)
    assert found["tokens"] == 256 * tokens
    size, stage = 2 * 6_738_415_616, found["stages"][3]
    moved = 3 * 3 * size + 2 * (stage["params"] + stage["opt_state"])
    assert stage["seconds"] == pytest.approx(
        {
            "compute": flops / kind.flops,
            "memory": moved / kind.bandwidth,
            "wire": stage["wire"] / kind.link,
        },
        rel=1e-3,
    )
    slowest = max(stage["seconds"].values())
    assert stage["tokens_per_second"] == pytest.approx(256 * tokens / slowest)
    _, out, _ = run(line)
    for name in ("compute, at least", "memory, at least", "wire, at least", "tokens/s, at most"):
        assert re.search(rf"^ ?{name} +\d", out, re.MULTILINE)
    assert "6 sequences of 1,024 tokens on each device in a step" in " ".join(out.split())


def test_the_network_counts_where_replicas_are_on_other_hosts(run):
    def seconds(target):
        _, out, _ = run(f"plan --model gpt2-small --target {target} --json")
        return {row["name"]: row["seconds"] for row in json.loads(out)["stages"]}

    assert set(seconds("v5e:4x4*2")["3 hybrid"]) == {"compute", "memory", "wire", "network"}
    assert "network" in seconds("h100x64")["3 spread"]
    assert "network" not in seconds("v5e:4x4")["3 hybrid"]  # another axis of the torus


def test_no_times_where_the_work_is_not_known(run):
    line = "plan --model 1e9 --target h100x8"
    assert "at least" not in run(line)[1]
    _, out, _ = run(f"{line} --length 512 --json")
    found = json.loads(out)
    assert found["flops"] == 6e9 * 512  # without attention: nothing is known of layers
    assert found["stages"][0]["seconds"]["compute"] == pytest.approx(6e9 * 512 / 989e12)
    _, out, _ = run("plan --model 1e9 --length 512 --target cpu:8 --memory 40 --tflops 2")
    assert "compute, at least" in out
    assert "wire, at least" not in out  # its link is not known


def test_operations_of_a_model_are_those_of_its_program(run):
    """Six a parameter and token, and attention: as compiled, without recomputation."""
    line = "audit --model gpt2-small --length 64 --target cpu:8 --stage 0 --no-remat --json"
    code, out, _ = run(line)
    assert code == 0
    found = json.loads(out)["stage 0"]["matmul_flops"]
    assert MODELS["gpt2-small"].flops(64, 64) == pytest.approx(found, rel=0.01)


SMALL = "--model gpt2-small --length 64 --batch 4 --target cpu:8"


@pytest.mark.slow
def test_activations_are_planned(run):
    """The row of activations is that of a program, and "left" is without them."""
    code, out, _ = run(f"plan {SMALL} --memory 8 --remat 180MiB --json")
    assert code == 0
    found = json.loads(out)
    assert found["not_counted"] == []
    for stage in found["stages"]:
        assert 100 * 2**20 < stage["activations"] <= 180 * 2**20
        left = 1 - (stage["memory"] + stage["unreduced"] + stage["activations"]) / (8 * 2**30)
        assert stage["headroom"] == pytest.approx(left)
    _, out, _ = run(f"plan {SMALL} --memory 8 --remat auto")
    assert "Activations: layers store 12 query_proj" in " ".join(out.split())
    code, _, err = run(f"plan {SMALL} --memory 8 --remat 1MiB")
    assert code == 2
    least = re.search(r"no plan fits 1.00 MiB: .* at least, ([\d,]+) bytes", err)[1]
    least = int(least.replace(",", ""))
    # Layers alone would do with fewer.
    code, _, err = run(f"plan {SMALL} --memory 8 --remat {least - 2**20}")
    assert code == 2
    assert f"no plan fits {size(least - 2**20)}: " in err
    assert f"at least, {least:,} bytes" in err
    code, out, _ = run(f"plan {SMALL} --memory 8 --remat {least} --json")
    assert code == 0
    assert {stage["activations"] for stage in json.loads(out)["stages"]} == {least}


def test_an_audited_step_stores_what_is_planned(run):
    """Fewer bytes, and operations that run again."""
    found = {}
    for budget in ("1GiB", "150MiB"):
        code, out, err = run(f"audit {SMALL} --stage 2 --remat {budget} --json")
        assert code == 0
        assert "Activations: layers store 12" in err
        found[budget] = json.loads(out)["stage 2"]
    assert found["150MiB"]["matmul_flops"] > found["1GiB"]["matmul_flops"]
    assert found["150MiB"]["temporaries"] < found["1GiB"]["temporaries"]


def test_why_came_holds_more_than_adamw(run):
    """Where optax keeps moments in bfloat16, and only there."""
    line = "plan --model gpt2-small --optimizer came --target v5e:2x2"
    _, out, _ = run(line)
    text = " ".join(out.split())
    assert re.search(r"came holds .* more than adamw", text)
    assert "adamw keeps its moments in bfloat16, the dtype of the parameters; came keeps" in text
    for options in ("--master", "--dtype float32"):
        text = " ".join(run(f"{line} {options}")[1].split())
        assert re.search(r"came holds .* less than adamw", text)
        assert "keeps its moments" not in text


# --- What does not fit ----------------------------------------------------------------------------


def test_more_devices_make_it_fit(run):
    line = "plan --model llama2-70b --optimizer adamw --master"
    code, out, err = run(f"{line} --target v5e:4x4")
    assert (code, err) == (2, "")
    assert "Does not fit a v5e: stage 3 needs least, 64.2 GiB of 16.0 GiB" in out
    assert "*" not in out
    assert "Each of these makes it fit, before activations: 128 devices instead of 16." in out
    assert run(f"{line} --target v5e:8x8")[0] == 2
    assert run(f"{line} --target v5e:8x16")[0] == 0


def test_what_is_named_does_fit(run, module):
    """And what is not named does not."""
    module("""
        import jax.numpy as jnp, optax_ext
        came = optax_ext.came(1e-3, mu_dtype=jnp.bfloat16)
    """)
    line = "plan --model llama2-70b"
    came = "CAME with a bfloat16 momentum and no master weights"
    changes = {
        "64 devices instead of 32": "--target v5e:8x8",
        "--state 8bit": "--target v5e:4x8 --state 8bit",
        "--offload": "--target v5e:4x8 --offload",
        came: "--target v5e:4x8 --optimizer mine:came",
    }
    code, out, _ = run(f"{line} --target v5e:4x8")
    assert code == 2
    assert f"fit, before activations: {'; '.join(changes)}." in " ".join(out.split())
    for options in changes.values():
        assert run(f"{line} {options}")[0] == 0
    code, out, _ = run(f"{line} --target v5e:4x8 --memory 12")
    assert code == 2
    assert "--state 8bit" not in out
    assert run(f"{line} --target v5e:4x8 --memory 12 --state 8bit")[0] == 2
    assert "--offload" in out
    assert run(f"{line} --target v5e:4x8 --memory 12 --offload")[0] == 0


def test_nothing_makes_it_fit(run):
    code, out, _ = run("plan --model 1e15 --target h100x8")
    assert code == 2
    assert "No change that is known here makes it fit: shard it over a model axis, too." in out


# --- The user's own -------------------------------------------------------------------------------


def test_a_model_and_an_optimizer_of_ones_own(run, module):
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
    line = "plan --json --target h100x8"
    assert run(f"{line} --model mine:abstract --optimizer scale_by_muon")[0] == 0
    for model in ("mine:Model.init", "mine:abstract"):
        for optimizer in ("mine:optimizer", "mine:made"):
            code, out, _ = run(f"{line} --model {model} --optimizer {optimizer}")
            found = json.loads(out)
            assert (code, found["num_params"]) == (0, 800_800)
            unsharded = found["stages"][0]
            assert unsharded["params"] == unsharded["opt_state"] == 800_000 * 4 + 800 * 2
            assert unsharded["batch"] == 0


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("biased", [True, False])
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


def test_from_the_working_directory(run, module, tmp_path, monkeypatch):
    module("def init():\n    import jax.numpy as jnp\n    return jnp.ones(5000)\n")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("plan --model mine:init --target h100x8")
    assert code == 0
    assert out.startswith("5,000 parameters on data=8")


# --- Bad input ------------------------------------------------------------------------------------

GPT2 = "--model gpt2-small"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{GPT2} --target cpu:8 --optimizer adamx", "'adamx' is no optimizer; nearest are .*adam"),
        (f"{GPT2} --target cpu:8 --optimizer chain", "'chain' is no optimizer"),
        (f"{GPT2} --target cpu:8 --optimizer optax:adm", "module 'optax' has no attribute 'adm'"),
        (
            f"{GPT2} --target cpu:8 --optimizer optax:adam",
            "must make one without arguments, .*'learning_rate'",
        ),
        (f"{GPT2} --target cpu:8 --optimizer os:getcwd", "os:getcwd made no optimizer, but '/"),
        ("--model gpt2-tiny --target cpu:8", "'gpt2-tiny' is no number and no model; .*gpt2-small"),
        ("--model qwen --target cpu:8", "is no number and no model; known are gpt2-large, .*llama"),
        ("--model 0.4 --target cpu:8", "'0.4': from 1 to 1e15 parameters"),
        ("--model 1e400 --target cpu:8", "'1e400': from 1 to 1e15 parameters"),
        ("--model nosuch.module:f --target cpu:8", "--model nosuch.module:f: No module named 'no"),
        ("--model math:nosuch --target cpu:8", "'math' has no attribute 'nosuch'"),
        ("--model math:pi --target cpu:8", "--model math:pi must make parameters"),
        ("--model math:sin --target cpu:8", "--model math:sin must make parameters without"),
        ("--target cpu:8", "--model is missing: a number, a name, or module:function"),
        (
            f"{GPT2} --target v7:2x2",
            "unknown target 'v7:2x2'; known are v4:2x2x2, .*cpu:8.* a100-40x8.* can be planned as "
            "NAMExNUMBER with its figures: --memory GIB, .*--tflops, --bandwidth and --link.$",
        ),
        (f"{GPT2} --target newx8", "unknown target 'newx8'; known .* NAMExNUMBER .*--memory GIB"),
        (f"{GPT2} --target newx12 --memory 8", "'newx12': .* must be a multiple of 8"),
        (f"{GPT2} --target h100x12 --memory 8", "'h100x12': .* must be a multiple of 8"),
        (f"{GPT2} --target v5e:3x3", "no slice 'v5e:3x3'; those of v5e are 1x1, .*, 16x16.$"),
        (
            f"{GPT2} --target v5e:4x4 --mesh x=4,y=2",
            r"--mesh x=4,y=2: 4 \* 2 = 8 devices requested, but v5e:4x4 has 16.$",
        ),
        (f"{GPT2} --target v5e:4x4 --mesh x=4,x=4", "axis 'x' is named twice"),
        (f"{GPT2} --target v5e:4x4 --mesh 4x4", "must look like x=4,y=8, got '4x4'"),
        (f"{GPT2} --target v5e:4x4 --mesh x=0,y=4", "must look like x=4,y=8, got 'x=0,y=4'"),
        (f"{GPT2} --target v5e:4x4 --axis z", r"axis 'z' is not in the mesh \('x', 'y'\)"),
        (f"{GPT2} --target v5e:4x4 --replica-axis x,y", "axis must name at least one"),
        (f"{GPT2} --target cpu:8 --length 2000", "has 1024 positions, --length 2000 was requested"),
        (f"{GPT2} --target cpu:8 --length -5", "--length must be above 0, got -5"),
        (f"{GPT2} --target cpu:8 --microbatches 0", "--microbatches must be above 0, got 0"),
        (f"{GPT2} --target cpu:8 --batch -1", "--batch must be above 0, got -1"),
        (f"{GPT2} --target cpu:8 --memory nan", "--memory must be above 0, got nan"),
        (f"{GPT2} --target cpu:8 --dtype int8", "--dtype must be a floating dtype, got int8"),
        (f"{GPT2} --target cpu:8 --reduce-dtype int8", "--reduce-dtype must be a floating dtype"),
        (f"{GPT2} --target cpu:8 --dtype half-ish", "--dtype 'half-ish' is no dtype"),
        ("--model 1e9 --target cpu:8 --batch 2", "--batch counts sequences, .* give --length"),
        (f"{GPT2} --target cpu:8 --plot /nosuch/x.png", "--plot /nosuch/x.png: No such file"),
    ],
)
def test_bad_input(run, line, message):
    code, _, err = run(f"plan {line}")
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert re.search(message, err.rstrip("\n"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan --model 1e9", "--target"),
        ("plan --model 1e9 --target cpu:8 --state 3bit", "'8bit'"),
        ("audit --model gpt2-small --target cpu:8 --stage 4", "invalid choice: '4'"),
        ("", "plan|audit"),
    ],
)
def test_bad_options(run, capsys, line, message):
    with pytest.raises(SystemExit) as error:
        run(line)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_without_rich(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    code, out, err = run("plan --model gpt2-small --target cpu:8")
    assert (code, out) == (2, "")
    assert err == "error: tables need rich: pip install 'optax-ext[cli]'. Or request --json.\n"
    assert run("plan --model gpt2-small --target cpu:8 --json")[0] == 0


def test_without_matplotlib(run, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    code, _, err = run("plan --model gpt2-small --target cpu:8 --plot x.png")
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
"""


def test_audit_of_a_step(run, module, tmp_path):
    module(STEP)
    line = "audit --step mine:lowered --target cpu:8"
    path = tmp_path / "audit.png"
    code, out, err = run(f"{line} --plot {path}")
    assert (code, err) == (0, "")
    assert path.read_bytes().startswith(PNG)
    assert max(map(len, out.splitlines())) <= 80
    for title in ("Memory of one device", "Sent by one device", "Work of one device"):
        assert f"mine:lowered: {title}" in " ".join(out.split())
    # The full gradient of 2 KiB is summed over eight devices.
    assert re.search(r"all-reduce +data +f32 +1 +3.50 KiB", out)
    assert re.search(r"parameters +2.00 KiB", out)

    code, out, _ = run(f"{line} --json --mesh a=2,b=4")
    assert code == 0
    found = json.loads(out)["mine:lowered"]
    assert found["wire_bytes"] == 2 * 7 / 8 * 2048
    assert [each["axes"] for each in found["traffic"]] == [["a", "b"]]
    assert found["arguments"]["parameters"] == 2048
    assert found["matmul_flops"] == 2 * (2 * 8 * 32 * 16)
    assert (found["devices"], found["fits"], found["seconds"]) == (8, None, {})


def test_audit_of_a_pipeline(run, module):
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
    line = "audit --step mine:lowered --target cpu:8 --mesh data=2,pipe=4"
    code, out, err = run(line)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    title = "mine:lowered: Pipeline: 1f1b-aligned, 4 stages, 4 micro-batches, 20 ticks"
    assert title in " ".join(out.split())
    assert re.search(r"permutes +20 +20 +2.50 KiB", out)
    code, out, _ = run(f"{line} --json")
    found = json.loads(out)["mine:lowered"]["pipeline"]
    assert (code, found["permutes"], found["live"]) == (0, 20, [4, 4, 3, 1])


def test_a_step_that_does_not_fit(run, module):
    module(STEP)
    line = "audit --step mine:lowered --target cpu:8 --tflops 1 --bandwidth 1 --link 1"
    code, out, _ = run(f"{line} --memory 1e-6")
    assert code == 2
    assert "a cpu has: DOES NOT FIT" in out
    assert "warning: the step needs" in out
    code, out, _ = run(f"{line} --memory 1 --json")
    found = json.loads(out)["mine:lowered"]
    assert (code, found["fits"]) == (0, True)
    np.testing.assert_allclose(found["seconds"]["wire"], 3584 / 1e9)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--model 7e9 --target cpu:8",
            "--model must be one of gpt2-small, .*give the step: --step",
        ),
        (
            "--model gpt2-small --target a100-80x8",
            r"'a100-80x8' can be planned, not compiled for; .* CPUs, TPUs \(v4, .* \(h100, h200\)",
        ),
        ("--step nosuch:f --target cpu:8", "--step nosuch:f: No module named 'nosuch'"),
        (
            "--model gpt2-small --target cpu:8 --find-batch",
            "--find-batch needs the memory of a device, and none is known of cpu:8: .* --memory",
        ),
        (
            "--model gpt2-small --target cpu:8 --find-batch --memory 1 --headroom 1.5",
            "headroom must be from 0 to below 1, got 1.5",
        ),
        ("--model gpt2-small --target cpu:8 --headroom 0.2", "read with --find-batch only"),
        ("--model gpt2-small --target cpu:8 --no-remat", "read at stages 0 to 2 only"),
        (
            "--model gpt2-small --target cpu:8 --stage 0 --no-remat --remat 1GiB",
            "--remat plans what --no-remat forbids",
        ),
        (
            "--model gpt2-small --target cpu:8 --remat auto",
            "--remat auto needs the memory of cpu:8",
        ),
        ("--model gpt2-small --target cpu:8 --remat=", "a text such as '8GiB', got ''"),
        ("--model gpt2-small --target cpu:8 --remat much", "a text such as '8GiB', got 'much'"),
        ("--model gpt2-small --target cpu:8 --hybrid", "--hybrid needs an axis of replicas"),
        (
            "--model gpt2-small --target cpu:8 --mesh x=2,y=4 --replica-axis y",
            "--replica-axis is read with --hybrid only",
        ),
        ("--step math:sin --target cpu:8 --batch 2", "--batch would be ignored: --step math:sin"),
        (
            "--step math:sin --target cpu:8 --master --compute-dtype float32 --stage 2",
            "--master, --compute-dtype, --stage would be ignored: --step math:sin",
        ),
        ("--step math:sin --target cpu:8 --mesh a=3", "a=3: 3 = 3 devices requested, but cpu:8"),
        ("--model gpt2-small --target cpu:8 --length 1025", "has 1024 positions"),
    ],
)
def test_bad_audits(run, line, message):
    code, out, err = run(f"audit {line}")
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert re.search(message, err)


@pytest.mark.slow
def test_find_batch(run):
    """Of two stages, each tried size with what it needs; the one found is audited."""
    line = "audit --model gpt2-small --length 32 --target cpu:8 --stage 3 --find-batch"
    code, out, err = run(f"{line} --memory 1 --json")
    assert code == 0
    found = json.loads(out)["stage 3"]
    search = found["find_batch"]
    assert (search["headroom"], search["usable"]) == (0.1, 0.9 * 2**30)
    sizes = {each["batch"]: each["memory"] for each in search["tried"]}
    best = search["batch"]
    assert sizes[best] <= 0.9 * 2**30 < sizes[best + 1]
    assert found["memory"] == sizes[best]
    assert all(each["fits"] == (each["memory"] <= 0.9 * 2**30) for each in search["tried"])
    for batch in sizes:
        assert re.search(rf"^  batch {batch}: [\d.]+ [MG]iB, (fits|too much)$", err, re.MULTILINE)
    # As one that is requested by its size.
    _, out, _ = run(line.replace("--find-batch", f"--batch {best} --json"))
    assert json.loads(out)["stage 3"]["memory"] == found["memory"]


def test_find_batch_of_a_step_of_ones_own(run, module):
    module("""
        import jax, jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec as P

        def lowered(mesh, batch):
            over = NamedSharding(mesh, P(mesh.axis_names))
            x = jax.ShapeDtypeStruct((8 * batch, 1024), jnp.float32, sharding=over)
            return jax.jit(lambda x: x * 2, out_shardings=over).lower(x)
    """)
    line = "audit --step mine:lowered --target cpu:8 --find-batch --memory 0.001"  # of 8 KiB each
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


@pytest.mark.parametrize("options", ["", "--find-batch --memory 1"])
def test_a_compiler_that_fails(run, module, options):
    """Its own words, in one line; one that runs out of memory is another case."""
    module("""
        import jax

        def lowered(mesh, batch=1):
            raise jax.errors.JaxRuntimeError("INTERNAL: no such thing\\nmore of it")
    """)
    code, out, err = run(f"audit --step mine:lowered --target cpu:8 {options}")
    assert (code, out) == (2, "")
    *_, last = err.splitlines()
    assert last == "error: the compiler of cpu:8 failed: INTERNAL: no such thing"
    module("""
        import jax

        def lowered(mesh):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 17G of 15.75G hbm")
    """)
    sys.modules.pop("mine")
    if not options:
        code, out, err = run("audit --step mine:lowered --target cpu:8")
        assert (code, out) == (2, "")
        assert err.startswith("error: the step does not fit, so that its compiler gave up: RES")


# --- As a program ---------------------------------------------------------------------------------


def test_as_a_program(tmp_path):
    command = [sys.executable, "-m", "sharding", "plan", "--target", "v5e:4x4"]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}

    def call(*args):
        return subprocess.run(
            [*command, *args], capture_output=True, text=True, env=env, cwd=tmp_path, check=False
        )

    found = call("--model", "llama2-70b", "--json")
    assert (found.returncode, found.stderr) == (2, "")
    assert json.loads(found.stdout)["num_params"] == 68_976_648_192


PROJECT = pathlib.Path(__file__).parents[3] / "pyproject.toml"


def test_the_console_command(tmp_path):
    """Beside a ``sharding.py``, which ``python -m sharding`` runs instead."""
    scripts = tomllib.loads(PROJECT.read_text())["project"]["scripts"]
    module, _, name = scripts["optax-ext"].partition(":")
    assert getattr(importlib.import_module(module), name) is main
    # As installers write it.
    command = tmp_path / "bin" / "optax-ext"
    command.parent.mkdir()
    command.write_text(f"import sys\nfrom {module} import {name}\nsys.exit({name}())\n")
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "sharding.py").write_text("")
    path = os.pathsep.join(filter(None, [str(PROJECT.parent), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}

    def call(*args):
        return subprocess.run(
            [sys.executable, *args], capture_output=True, text=True, env=env, cwd=folder, check=True
        ).stdout

    plan = ("plan", "--model", "1e9", "--target", "v5e:4x4", "--json")
    assert call("-m", "sharding", *plan) == ""
    assert json.loads(call(str(command), *plan))["num_params"] == 10**9
    assert call(str(command), "--version") == f"optax-ext {optax_ext.__version__}\n"
    assert "usage: optax-ext [-h]" in call(str(command), "--help")


def test_help_notes_the_pitfall(run, capsys):
    with pytest.raises(SystemExit) as error:
        run("--help")
    assert error.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "the working folder has a file sharding.py, python -m sharding runs that" in shown
    assert "python -m sharding plan --model llama2-7b" in shown
    compiled, planned = shown.split("targets to plan only:")
    for name in ("v4:2x2x2", "v5e:4x4", "v5p:4x4x4", "tpu7x:2x2x1", "h200x8", "cpu:8"):
        assert name in compiled
    for name in ("a100-40x8", "l40sx8", "rtx5090x8", "h100-pciex8", "gb200x8", "mi300xx8"):
        assert name in planned
    assert "NAMExNUMBER with its figures" in planned


@pytest.mark.parametrize("command", ["plan", "audit"])
def test_help_of_a_command(run, capsys, command):
    with pytest.raises(SystemExit) as error:
        run(f"{command} --help")
    assert error.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for word in ("model and optimizer:", "machine and sharding:", "batch:", "output:", "--target"):
        assert word in shown
    assert "llama3-405b" in shown
    assert ("--find-batch find the largest" in shown) == (command == "audit")


def test_one_version_for_both_packages():
    project = tomllib.loads(PROJECT.read_text())
    assert sharding.__version__ == optax_ext.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", sharding.__version__)
    assert "version" in project["project"]["dynamic"]
    source = PROJECT.parent / project["tool"]["hatch"]["version"]["path"]
    assert f'__version__ = "{sharding.__version__}"' in source.read_text()


def test_the_test_devices_are_kept(run, module):
    """An audit in this process leaves its configuration as it was."""
    module(STEP)
    assert run("audit --step mine:lowered --target cpu:8 --json")[0] == 0
    assert jax.device_count() == jax.config.jax_num_cpu_devices == 8
