"""``plan`` and ``audit``: what they print, and one sentence for every wrong question."""

import importlib
import json
import pathlib
import re
import runpy
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
from sharding.cli._load import optimizer_of
from sharding.plan import estimate
from sharding.plan._format import count
from sharding.plan.machine._devices import kind_of
from sharding.plan.model._models import MODELS, Decoder, count_to_params

from ...compilers import need

GPT2 = "--model gpt2-small"


def test_plan(run):
    code, out, err = run("plan --model llama2-7b --optimizer came --target v5e:16x16")
    assert (code, err) == (0, "")
    assert "6,738,415,616 parameters on x=16, y=16: one device" in out
    assert "\nstage 3 is recommended: its step is predicted to be the fastest, among" in out
    assert re.search(r"left of 16.0 GiB +too much too much too much +8.80 GiB", out)
    assert "At stage 3 came holds" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out


def test_json_has_the_numbers_of_estimate(figures):
    found = figures("plan --model 7.5e9 --optimizer adam --master --target h100x64")
    zero = sharding.Zero(AbstractMesh((8, 8), ("host", "data")), stage=3, replica_axis="host")
    tx = optax_ext.master_weights(optax.adam(1e-3))
    params = count_to_params(7_500_000_000)
    plan = estimate(params, tx, zero, device=kind_of("h100x64"), temporaries=False)
    rows = found["plans"]
    # The figures of the ZeRO paper: nothing of the full size is gathered or reduced at once.
    totals = [row["memory"]["total"] / 1e9 for row in rows[:4]]
    assert totals == pytest.approx([120, 31.4, 16.6, 1.88], rel=3e-3)
    assert "a decoder of 37 layers of width 4,096, without temporaries" in found["notes"][-1]
    assert [row | {"plan": None} for row in rows] == plan.to_dict()["plans"]
    assert [row["memory"]["total"] for row in rows] == [stage.peak for stage in plan.stages]
    shared = [(row["plan"]["stage"], row["plan"]["replicas"]) for row in rows]
    assert shared == [(0, 1), (1, 1), (2, 1), (3, 1), (3, 8), (3, 8)]
    assert {(row["plan"]["data"], row["plan"]["weights"]) for row in rows} == {(64, "master")}
    assert [row["fits"] for row in rows] == [False, True, True, True, True, True]
    assert rows[found["chosen"]]["name"] == "stage 2"
    assert found["model"]["num_params"] == 7_500_000_000


def test_options_reach_the_plan(figures):
    def stages(line):
        rows = figures(f"plan {GPT2} --target v5e:4x4 {line}")["plans"]
        return {row["name"]: row["zero"] for row in rows}

    plain, third = stages(""), "stage 3"
    assert plain[third]["batch"] == 4 * 1025
    assert stages("--batch 96 --microbatches 2 --length 99")[third]["batch"] == 3 * 2 * 4 * 100
    assert stages("--batch 32k-tokens")[third]["batch"] == 2 * 4 * 1025
    assert stages("--microbatches 2")[third]["wire"] > 1.99 * plain[third]["wire"]
    assert stages("--dtype float32")[third]["params"] == 2 * plain[third]["params"]
    both = stages("--dtype float32 --compute-dtype bfloat16 --reduce-dtype float32")[third]
    assert both["wire"] == pytest.approx(4 / 3 * plain[third]["wire"], rel=0.03)
    assert stages("--master")[third]["master"] == pytest.approx(2 * plain[third]["params"])
    # Momentum of 2 bytes an element, then half a byte and scales.
    assert 0.25 < stages("--state 4bit")[third]["opt_state"] / plain[third]["opt_state"] < 0.28
    # All but arrays smaller than offload_min_size.
    assert 0.99 < stages("--offload")[third]["host"] / plain[third]["opt_state"] < 1
    updated = stages("--offload --update-on-host --master")[third]
    assert stages("--update-on-host --master")[third] == updated  # which implies the other
    there_and_back = 2 * plain[third]["params"]  # gradients, parameters
    assert updated["host_wire"] == pytest.approx(there_and_back, rel=0.01)
    assert "3 hybrid" not in stages("--mesh x=16")
    swapped = stages("--replica-axis y --axis x --mesh x=8,y=2")["3 hybrid"]
    assert swapped["params"] == pytest.approx(plain["stage 0"]["params"] / 8, rel=0.01)


def test_figures_of_a_device(text, figures):
    """Those that are given replace those that are known, and make a new device known."""
    line = f"plan {GPT2} --target cpu:8"
    assert "What fits is not known: no figures of cpu:8. Give them: --memory GIB" in text(line)
    assert "stage 3 *" in text(f"{line} --memory 1")
    assert "stage 2 *" in text(f"{line} --memory 100")  # without speeds: it sends least

    def device(line):
        found = figures(line)["machine"]["device"]
        return [found[name] for name in ("memory", "bandwidth", "flops", "link")]

    assert device(f"{line} --memory 1")[:2] == [2**30, None]
    given = f"{line} --memory 2 --bandwidth 100 --tflops 3 --link 5"
    assert device(given) == [2 * 2**30, 100e9, 3e12, 5e9]
    known = device(f"plan {GPT2} --target v5e:4x4 --memory 1")
    assert known[:2] == [2**30, 819e9]
    line = f"plan {GPT2} --target newx16 --memory 96 --tflops 1000 --link 450"
    assert device(f"{line} --bandwidth 4000") == [96 * 2**30, 4e12, 1e15, 450e9]
    found = figures(line)
    assert (found["machine"]["num_devices"], found["machine"]["device"]["name"]) == (16, "new")
    assert found["plans"][3]["zero"]["network"] > 0  # to the other host
    assert set(found["plans"][3]["at_least"]) == {"total", "compute", "wire"}


@pytest.mark.parametrize(
    "line", ["a100-40x8 --microbatches 2", "v5e:4x4 --model gpt2-xl --master", "l40sx16 --offload"]
)
def test_the_most_sequences_that_fit(line, figures):
    """Planned with as many, 8 % of the memory are left; with the next more, less are."""
    line, stage, unit = f"plan --model llama2-7b --target {line}", 3, 16
    most = figures(line)["plans"][stage]["most_sequences"]
    assert most % unit == 0
    for batch, fits in ((most, True), (most + unit, False)):
        found = figures(f"{line} --batch {batch}")
        row, memory = found["plans"][stage], found["machine"]["device"]["memory"]
        assert (row["left"] >= 0.08 * memory) == fits
        assert row["most_sequences"] == most


def test_times_and_tokens_at_the_roofline(run, figures):
    line = "plan --model llama2-7b --target v5e:16x16 --batch 1536 --microbatches 3 --length 1024"
    found, kind = figures(line), kind_of("v5e:16x16")
    tokens = 2 * 3 * 1024
    # All but the embedding, which is looked up; two products of attention, there and back.
    flops = 6 * (6_738_415_616 - 32000 * 4096) * tokens + 12 * 32 * 4096 * 1024 * tokens
    assert (found["sequences"], found["model"]["length"]) == (1536, 1024)
    nbytes, stage = 2 * 6_738_415_616, found["plans"][3]
    assert stage["tokens"] == 256 * tokens
    moved = 3 * 3 * nbytes + 2 * (stage["zero"]["params"] + stage["zero"]["opt_state"])
    expected = {
        "compute": flops / kind.flops,
        "memory": moved / kind.bandwidth,
        "wire": stage["wire"] / kind.link,
    }
    expected["total"] = max(expected.values())
    assert stage["at_least"] == pytest.approx(expected, rel=1e-3)
    _, out, _ = run(line)
    most = re.search(r"^ +bound at the peak( +[\d.]+ M){3} +([\d.]+) M", out, re.MULTILINE)
    assert float(most[2]) == pytest.approx(256e-6 * tokens / expected["total"], rel=0.01)
    assert "6 sequences of 1,024 tokens on each device in a step" in " ".join(out.split())


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
        "--update-in-backward": "--target v5e:2x2 --update-in-backward",
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
    _, out, _ = run("plan --model 1e15 --target h100x8")
    assert "No change that is known here makes it fit: shard it over a model axis, too." in out
    line = "plan --model llama2-7b --length 1024 --optimizer came8bit --target"
    _, out, _ = run(f"{line} rtx4090x1")
    assert "makes it fit: 2 devices instead of 1; --update-in-backward." in out
    for network in ("", " --network 0.4"):
        _, out, _ = run(f"{line} l40sx64{network}")
        assert ("the speed between hosts is not known" in out) == (not network)


def test_a_model_and_an_optimizer_of_ones_own(figures, module):
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
    for model, optimizer in (("Model.init", "optimizer"), ("abstract", "made")):
        found = figures(f"{line} --model mine:{model} --optimizer mine:{optimizer}")
        unsharded = found["plans"][0]["zero"]
        assert found["model"]["num_params"] == 800_800
        assert unsharded["params"] == unsharded["opt_state"] == 800_000 * 4 + 800 * 2
        assert unsharded["batch"] == 0


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


CPU, V5E = f"{GPT2} --target cpu:8", f"{GPT2} --target v5e:4x4"
LLAMA = "--model llama2-7b --target h100x8"
AUDITED = "--step mine:lowered --target cpu:8"
WRONG = [
    (f"plan {CPU} --optimizer adamx", "'adamx' is no optimizer; nearest are .*adam"),
    (f"plan {CPU} --optimizer adamW", "is no optimizer; nearest are adamw, adam"),
    (f"plan {CPU} --memory 40GB", "--memory must be a number without a unit, got '40GB'"),
    (f"plan {GPT2} --target h100", "unknown target 'h100'; the devices are missing. Targets look"),
    (f"plan {GPT2} --target a100x8", "'a100x8'; nearest are a100-80, a100-40. Targets look"),
    (f"plan {CPU} --optimizer optax:adam", "must make one without arguments, .*'learning_rate'"),
    ("plan --model gpt2-tiny --target cpu:8", "is no number and no model; .*gpt2-small"),
    ("plan --model nosuch.module:f --target cpu:8", "nosuch.module:f: No module named 'no"),
    ("plan --model math:sin --target cpu:8", "--model math:sin must be a TracedModel"),
    (
        f"plan {GPT2} --target v7:2x2",
        "unknown target 'v7:2x2'; nearest are .*v4.* look like v5e:4x4 .* can be planned as "
        "NAMExNUMBER with its figures: --memory GIB, .*--tflops, --bandwidth and --link.$",
    ),
    (f"plan {V5E} --mesh x=4,y=2", r"4 \* 2 = 8 devices requested, but v5e:4x4 has 16.$"),
    ("plan --model gpt2-small --target cpu:0", "'cpu:0' has no devices: give each number as 1 or"),
    (f"plan {LLAMA} --batch=", "--batch is empty: give it a value, or leave it out.$"),
    (f"search {LLAMA} --batch 7K-tokens", "got '7K-tokens'; nearest is 7k-tokens.$"),
    (f"plan {CPU} --length 2000", "has 1024 positions, --length 2000 was requested"),
    (f"plan {CPU} --reduce-dtype int8", "--reduce-dtype must be a floating dtype"),
    ("plan --model 1e9 --target cpu:8 --batch 2", "--batch counts sequences, .* give --length"),
    (f"plan {LLAMA} --microbatches 0", "--microbatches must be from 1 to 1e.09, got 0"),
    (f"plan {LLAMA} --microbatches two", "--microbatches must be a whole number, got 'two'"),
    (f"plan {LLAMA} --memory nan", "--memory must be from 1e-09 to 1e.09, got nan"),
    (f"plan {LLAMA} --stat 8bi", "--state must be one of 'bfloat16', .*; nearest .*'8bit'"),
    (f"plan {LLAMA} --remat lots", "--remat expected bytes, or a text .* got 'lots'.$"),
    (f"audit {LLAMA} --stages 1", "--stages is no option; nearest are --stage"),
    (f"search {LLAMA} --batch 8 --headroom 1", "--headroom must be from 0 to 0.99, got 1"),
    (f"search {LLAMA}", "the following arguments are required --batch"),
    ("plan --model gpt2-small --target h100x99999999999", "has more than 10 million devices"),
    (f"search {LLAMA} --batch 1e30", "--batch must look like 1024 or 4M-tokens"),
    (f"search {LLAMA} --batch {10**30}", "--batch must be at most 1e9 sequences"),
    (f"search {CPU} --batch 8", "needs --memory, --bandwidth, --tflops, --link of a device of"),
    (f"search {LLAMA} --batch 8 --keep pipe=3", "pipe=3 is none of 1, 2, 4, 8"),
    (f"plan {LLAMA} --pipeline 4", "--pipeline is no option"),
    (
        f"plan {LLAMA} --batch 4",
        "of all devices in a step, .* of 8, got 4; 32 are 4 on each device",
    ),
    (f"audit {CPU} --batch 8 --microbatches 2", "must be a multiple of 16, got 8"),
    (
        f"audit {GPT2} --target a100-80x8",
        r"'a100-80x8' can be planned, not compiled for; .* CPUs, TPUs \(v4, .* \(h100, h200\)",
    ),
    (f"audit {GPT2} --target a100-80x8 --find-batch", "plan prints how many sequences fit"),
    (f"plan {V5E} --offload --update-on-host --state 8bit", "is not for 8-bit and 4-bit state on"),
    (f"audit {CPU} --stage 0 --no-remat --remat 1GiB", "--remat plans what --no-remat forbids"),
    (
        "audit --step math:sin --target cpu:8 --master --compute-dtype float32 --stage 2",
        "--master, --compute-dtype, --stage would be ignored: --step math:sin",
    ),
    (f"plan {LLAMA} --frozen 4bit", "--frozen trains nothing without adapters: give --lora RANK"),
    (f"plan {LLAMA} --frozen 2bit --lora 4", "--frozen must be one of '4bit', '8bit'"),
    ("plan --model 1e9 --target cpu:8 --lora 4", "--lora needs a model whose layers are known"),
    (f"plan {LLAMA} --lora 4 --master", "--lora is without --master: leave one of them out"),
    (f"search {LLAMA} --batch 8 --frozen 4bit", "--frozen trains nothing without adapters"),
    (
        f"search {LLAMA} --batch 8 --lora 4 --matmuls fp8",
        "--lora is without --matmuls: leave one of them out",
    ),
    (
        "search --model llama2-7b --target a100-80x8 --batch 8 --matmuls fp8",
        "products in fp8 are asked for, and a100-80 has none of a known rate: leave fp8 out",
    ),
    (f"plan {LLAMA} --matmuls nvfp4", "--matmuls must be one of 'fp8', 'int8'"),
    (f"plan {V5E} --matmuls fp8", "products in fp8 are asked for, and v5e has none"),
    ("plan --model 1e9 --target cpu:8 --matmuls fp8", "--matmuls needs a model whose layers are"),
    (
        "audit --step mine:without_memory --target cpu:8",
        "error: the step does not fit, so that its compiler gave up: it needs 17.0 GiB.",
    ),
    (
        "audit --step mine:uncompiled --target cpu:8",
        "error: the compiler of cpu:8 failed: INTERNAL: no such thing$",
    ),
]


@pytest.mark.parametrize(("line", "message"), WRONG)
def test_what_is_wrong_is_one_sentence(error, module, line, message):
    module(STEP)
    assert re.search(message, error(line))


@pytest.mark.parametrize("command", ["plan", "search", "audit"])
def test_no_command_looks_for_accelerators(run, command):
    """Where their compilers are installed and they are not, that takes jax 20 seconds."""
    jax.config.update("jax_platforms", None)
    run(f"{command} {CPU} --unknown")  # refused before anything starts
    assert not jax.config.jax_platforms
    run(f"{command} --model gpt2-small --batch 8 --target no-such-target")
    assert jax.config.jax_platforms == "cpu"


def test_without_optional_packages(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    _, _, err = run(f"plan {CPU}")
    how = "pip install '.[cli]' in a checkout (docs: start/install)"
    assert err == f"error: tables need rich: {how}. Or request --json.\n"
    assert run(f"plan {CPU} --json")[0] == 0


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

    def uncompiled(mesh):
        raise jax.errors.JaxRuntimeError("INTERNAL: no such thing\\nmore of it")
"""


def test_audit_of_a_step(run, figures, module):
    module(STEP)
    code, out, err = run(f"audit {AUDITED}")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    # The full gradient of 2 KiB is summed over eight devices.
    assert re.search(r"all-reduce +data +f32 +1 +3.50 KiB", out)
    assert re.search(r"parameters +2.00 KiB", out)

    (row,) = figures(f"audit {AUDITED} --mesh a=2,b=4")["plans"]
    found = row["program"]
    assert (row["name"], row["plan"], row["seconds"]) == ("mine:lowered", None, None)
    assert row["wire"] == found["wire_bytes"] == 2 * 7 / 8 * 2048
    assert row["memory"]["params"] == 2048
    assert [each["axes"] for each in found["traffic"]] == [["a", "b"]]
    assert found["arguments"]["parameters"] == 2048
    assert found["matmul_flops"] == 2 * (2 * 8 * 32 * 16)
    assert (found["devices"], found["fits"], found["seconds"]) == (8, None, {})

    line = f"audit {AUDITED} --tflops 1 --bandwidth 1 --link 1"
    (row,) = figures(f"{line} --memory 1")["plans"]
    assert row["fits"] is True
    assert row["left"] == 2**30 - row["memory"]["total"]
    np.testing.assert_allclose(row["at_least"]["wire"], 3584 / 1e9)
    code, out, _ = run(f"{line} --memory 1e-6")
    assert code == 2
    assert "a cpu has: DOES NOT FIT" in out
    assert "warning: the step needs" in out


def test_plan_of_several_hosts(text):
    """What leaves a host has a row and a time; without an axis of hosts the plan says so."""
    line = "plan --model gpt2-small --target h100x16"
    shown = text(line)
    assert re.search(r"to other hosts( [1-9][\d.]+ MiB){6} ", shown)
    assert re.search(r"network, at least( [\d.]+ [mu]s){6} ", shown)
    shown = text(f"{line} --mesh data=16")
    assert "not counted: it needs an axis, as in host=2,data=8." in shown
    assert "to other hosts" not in shown


def test_one_prediction_and_a_bound_that_is_called_so(text, figures):
    """The step and the tokens of it that plan prints are those that search finds."""
    shown = text("plan --model llama2-7b --target h100x8")
    steps, tokens = (
        re.search(rf"{name}, predicted +(.*)", shown)[1].split() for name in ("step", "tokens/s")
    )
    assert (steps[4:6], tokens[4:6]) == (["223", "ms"], ["73.6", "k"])
    assert re.search(r"bound at the peak +185 k", shown)
    assert "tokens/s, at most" not in shown
    found = figures("search --model llama2-7b --target h100x8 --batch 8 --top 1")["plans"][0]
    assert found["seconds"]["total"] == pytest.approx(0.223, rel=3e-3)
    assert found["tokens"] / found["seconds"]["total"] == pytest.approx(73.6e3, rel=1e-3)


def test_an_audit_has_the_prediction_of_its_plan(text, figures, monkeypatch):
    monkeypatch.setitem(MODELS, "gpt2-small", Decoder(4, 64, 4, 4, 256, 512, 16))
    line = f"{CPU} --memory 4 --bandwidth 20 --tflops 1 --link 10"
    found = figures(f"audit {line} --stage 2")["plans"][0]
    kept = "--keep stage=2 --keep replicas=1 --keep pipe=1 --keep tensor=1 --keep recompute=full"
    searched = figures(f"search {line} --batch 8 --no-offload {kept}")["plans"][0]
    assert found["seconds"] == searched["seconds"]
    shown = text(f"audit {line} --stage 2")
    rate = count(8 * 16 / found["seconds"]["total"])
    assert re.search(rf"tokens/s of all, predicted +{rate} ", shown)
    assert "layers store their input alone: plan and search" in shown
    assert re.search("bound at the peak +[0-9.]+", shown)


@pytest.mark.parametrize(
    "target",
    [
        "a100-40x2",
        pytest.param("newx2 --memory 40", marks=pytest.mark.slow),
        pytest.param("cpu:2 --memory 4", marks=pytest.mark.slow),
    ],
)
def test_remat_where_nothing_compiles_for_the_target(target, text, monkeypatch):
    """It plans what plan plans, by a program for what is likest, which it names."""
    monkeypatch.setitem(MODELS, "gpt2-small", Decoder(2, 64, 4, 4, 256, 512, 64))
    shown = " ".join(text(f"plan {GPT2} --target {target} --remat auto").split())
    compiled = re.search(r"in a program compiled for (.*?); \d+% of a step's time", shown)[1]
    name, *_ = target.split()
    elsewhere = [f"one h100 instead of {name[:-2]}"]
    elsewhere.append(f"one device of this machine's CPU, as nothing here compiles for {name}")
    here = ["one device of this machine's CPU"]
    assert compiled in (here if name.startswith("cpu") else elsewhere)


def test_names_of_stages_have_a_legend(text):
    shown = " ".join(text("plan --model llama2-7b --target h100x16").split())
    assert "The * marks it." in shown
    assert "3 hybrid is stage 3 within each replica; in 3 spread replicas share" in shown
    assert "3 hybrid is" not in text("plan --model llama2-7b --target h100x8")


def test_audit_of_the_update_in_backward(figures, monkeypatch):
    """Statistics are those of each layer; gradients of one layer are in memory."""
    need("h100x1")
    monkeypatch.setitem(MODELS, "gpt2-small", Decoder(8, 64, 4, 4, 256, 64, 32, scan=True))
    given = f"audit {GPT2} --target h100x1 --batch 1 --stage 0 --optimizer adafactor"
    (after,), (within,) = (figures(given + x)["plans"] for x in ("", " --update-in-backward"))
    after, within = (row["memory"]["total"] - row["memory"]["params"] for row in (after, within))
    assert within < 0.6 * after


def test_plan_of_the_update_in_backward(figures):
    """Layers are offloaded, too."""
    given = "plan --model llama2-7b --target h100x8 --batch 8 --length 1024"
    options = "", " --update-in-backward", " --update-in-backward --offload"
    after, within, streamed = (figures(given + x)["plans"][3] for x in options)
    assert [x["plan"]["update_in_backward"] for x in (after, within, streamed)] == [0, 1, 1]
    totals = [x["memory"]["total"] / 2**30 for x in (after, within, streamed)]
    # The first stores results of products. Programs need 10.4 and 5.59, of a v5e 1.28.
    assert after["plan"]["recompute"] == "minimal_with_context"
    assert totals == pytest.approx([9.83, 5.6, 1.3], rel=0.04)


def test_audit_of_offloaded_state(figures, monkeypatch):
    """With the update inside the backward pass the layers are offloaded, too."""
    need("v5e:1x1")
    monkeypatch.setitem(MODELS, "gpt2-small", Decoder(8, 64, 4, 4, 256, 64, 32, scan=True))
    given = f"audit {GPT2} --target v5e:1x1 --batch 1 --stage 0 --dtype bfloat16"
    in_backward, on_cpu = " --update-in-backward", " --offload --update-on-host"
    rows = [
        figures(given + options)["plans"][0]
        for options in (in_backward, f"{in_backward} --offload", on_cpu)
    ]
    plain, streamed, updated = (row["memory"] for row in rows)
    assert streamed["params"] < 0.2 * plain["params"] == 0.2 * updated["params"]
    assert max(streamed["state"], updated["state"]) < 0.2 * plain["state"]
    assert [row["plan"]["offload"] for row in rows] == [False, True, "update"]
    planned = rows[2]["program"]["expected_memory"]  # without the tables of so small arrays
    assert 0.88 < planned / rows[2]["program"]["memory"] < 1


def test_audit_of_a_model(figures, monkeypatch):
    tiny = Decoder(4, 64, 4, 4, 256, 512, 128, gated=False, tied=True, biased=True)
    monkeypatch.setitem(MODELS, "gpt2-small", tiny)
    (row,) = figures(f"audit {CPU} --batch 64 --stage 2 --no-remat")["plans"]
    plain, shared = row["program"], row["plan"]
    # Six operations per parameter and token, and attention.
    assert tiny.flops(8 * 128, 128) == pytest.approx(plain["matmul_flops"], rel=0.01)
    assert plain["wire_bytes"] == pytest.approx(plain["expected_wire"], rel=0.01)
    assert (row["name"], shared["stage"], shared["data"]) == ("stage 2", 2, 8)
    assert (shared["microbatch"], shared["recompute"]) == (8, "none")


def test_plan_and_audit_of_fine_tuning(figures, monkeypatch):
    """Frozen codes have no gradient and no state; both commands count the same."""
    tiny = Decoder(4, 64, 4, 4, 256, 512, 128)
    monkeypatch.setitem(MODELS, "llama2-7b", tiny)
    asked = "--model llama2-7b --target cpu:8 --batch 8 --frozen 4bit --lora 4"
    planned, (audited,) = (figures(f"{x} {asked}")["plans"] for x in ("plan", "audit"))
    shapes = jax.tree.leaves(tiny.abstract("float32")["layers"])
    matrices = [x for x in shapes if x.ndim == 3]
    adapters = sum(4 * 4 * 4 * sum(x.shape[1:]) for x in matrices)
    whole = planned[0]["memory"]
    assert whole["grads"] == adapters
    assert whole["state"] == pytest.approx(2 * adapters, rel=0.01)
    # Half a byte an element, and of each matrix scales and their two float32 groups and a mean.
    codes = sum(x.size / 2 + 4 * (512 + 2 * 4 + 4) for x in matrices)
    outside = 4 * (2 * 512 * 64 + 9 * 64)
    assert whole["params"] == pytest.approx(codes + outside + adapters, rel=1e-3)
    assert audited["memory"]["params"] == pytest.approx(planned[3]["memory"]["params"], rel=0.01)
    program = audited["program"]
    assert program["wire_bytes"] == pytest.approx(program["expected_wire"], rel=0.02)


def test_plan_of_products_in_few_bits(figures, monkeypatch):
    """The least time of products, and the predicted step, are shorter; bytes are as they were."""
    monkeypatch.setitem(MODELS, "llama2-7b", Decoder(4, 1024, 4, 4, 4096, 512, 1024))
    asked = "plan --model llama2-7b --target h100x8 --batch 64"
    both = [figures(f"{asked}{more}")["plans"] for more in ("", " --matmuls fp8")]
    plain, low = (plans[2] for plans in both)
    share = low["at_least"]["compute"] / plain["at_least"]["compute"]
    assert 0.5 < share < 0.7
    assert low["seconds"]["matmul"] < 0.8 * plain["seconds"]["matmul"]
    assert low["wire"] == plain["wire"]
    assert (plain["plan"]["matmuls"], low["plan"]["matmuls"]) == (None, "fp8")
    # Stage 3 gathers a byte less of each element of layers, twice, and some scales.
    wide, codes = (plans[3] for plans in both)
    layers = jax.tree.leaves(MODELS["llama2-7b"].abstract()["layers"])
    spared = 2 * 7 / 8 * sum(x.size for x in layers if x.ndim == 3)
    assert wide["wire"] - codes["wire"] == pytest.approx(spared, rel=0.01)
    assert wide["memory"]["total"] > codes["memory"]["total"]
    assert wide["seconds"]["data"] > codes["seconds"]["data"]
    assert wide["plan"]["recompute"] == codes["plan"]["recompute"]


def test_plan_of_local_steps(figures, error):
    """Replicas average parameters once in 8 steps, and hold what they agreed on and a momentum."""
    asked = "plan --model gpt2-small --target h100x16 --mesh host=2,data=8"
    plain, local = (figures(f"{asked}{more}")["plans"] for more in ("", " --local-steps 8"))
    assert [row["wire"] for row in local[:4]] == [row["wire"] for row in plain[:4]]
    assert plain[4]["zero"]["network"] == pytest.approx(4 * local[4]["zero"]["network"], 1e-3)
    assert local[4]["memory"]["state"] > plain[4]["memory"]["state"]
    assert plain[4]["seconds"] is not None
    assert local[4]["seconds"] is None
    asked = "plan --model gpt2-small --target h100x8 --local-steps 8"
    assert "local_steps are steps of replicas" in error(asked)


def test_find_batch_of_a_step_of_ones_own(run, module):
    module("""
        import jax, jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec as P

        def lowered(mesh, batch):
            over = NamedSharding(mesh, P(mesh.axis_names))
            x = jax.ShapeDtypeStruct((8 * batch, 1024), jnp.float32, sharding=over)
            return jax.jit(lambda x: x * 2, out_shardings=over).lower(x)
    """)
    line = f"audit {AUDITED} --find-batch --memory 0.001"  # of 8 KiB each
    code, out, _ = run(line)
    assert code == 0
    assert "mine:lowered, batch 120: Memory of one device" in out
    assert "mine:lowered: the largest batch that fits is 120\n" in out
    assert re.search(r"^ ?121 +968 KiB +too much", out, re.MULTILINE)
    _, out, _ = run(f"{line} --headroom 0.5")
    assert "the largest batch that fits is 65\n" in out
    code, out, _ = run(f"{line} --batch 200")
    assert code == 2
    assert "no batch fits: 200 needs 1.56 MiB" in out
    _, out, _ = run(f"{line} --batch 200 --json")
    (row,) = json.loads(out)["plans"]
    assert (row["find_batch"]["batch"], row["fits"], row["memory"]) == (0, False, {})
    code, out, _ = run(f"{line} --batch 120 --json")
    found = json.loads(out)
    (row,) = found["plans"]
    assert (row["find_batch"]["batch"], row["fits"], found["machine"]["headroom"]) == (
        120,
        True,
        0.08,
    )


PROJECT = pathlib.Path(__file__).parents[3] / "pyproject.toml"


def test_one_command_and_version_for_both_packages(monkeypatch, capsys):
    project = tomllib.loads(PROJECT.read_text())
    module, _, name = project["project"]["scripts"]["optax-ext"].partition(":")
    assert getattr(importlib.import_module(module), name) is main
    assert sharding.__version__ == optax_ext.__version__
    source = PROJECT.parent / project["tool"]["hatch"]["version"]["path"]
    assert f'__version__ = "{sharding.__version__}"' in source.read_text()
    # As python -m sharding.
    line = "sharding plan --target h100x8 --model 1e15 --json"
    monkeypatch.setattr(sys, "argv", line.split())
    with pytest.raises(SystemExit) as error:
        runpy.run_module("sharding", run_name="__main__")
    assert error.value.code == 2
    assert json.loads(capsys.readouterr().out)["model"]["num_params"] == 10**15
    for line, word in (("--version", sharding.__version__), ("--help", "rtx5090x8")):
        with pytest.raises(SystemExit):
            main([line])
        assert word in capsys.readouterr().out
