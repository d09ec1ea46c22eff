"""``plan --pipeline``: what it prints, the options it reads, one sentence for wrong questions."""

import json
import re

import optax
import pytest
from jax.sharding import AbstractMesh

import optax_ext
import sharding as shd
from sharding.cli import main
from sharding.plan import MODELS, estimate_pipeline, kind_of


@pytest.fixture
def run(capsys):
    """Runs a command line: the exit code, and what it printed."""

    def run(line):
        code = main(line.split())
        return code, *capsys.readouterr()

    return run


def test_inside_one_node_zero_is_faster(run):
    code, out, err = run("plan --model llama2-7b --target h100x8 --pipeline 4")
    assert (code, err) == (0, "")
    shown = " ".join(out.split())
    assert "4 stages x 2 replicas, 16 micro-batches, aligned: one device" in out
    assert re.search(r"^ 0 +0-9 +65.3 ms +7 +256 MiB +3.88 GiB +1.46 GiB", out, re.MULTILINE)
    assert "pipeline stage 1 *" in out
    assert "Do not pipeline. On 8 devices that share fast links a step takes 995 ms" in shown
    assert "even if none of its wire time of 52.4 ms is hidden, and 1.22 s in the" in shown
    assert "bubble of equal stages 15.8%" in shown
    assert "Times assume 50% of the peak of a h100" in shown


def test_split_backward_passes_need_stored_activations(run):
    line = "plan --model llama2-7b --target h100x8 --pipeline 8 --length 512"
    code, out, _ = run(f"{line} --schedule zb-v --no-remat")
    assert code == 0
    assert "8 stages x 1 replicas, 32 micro-batches, zb-v: one device" in out
    assert re.search(r"^ 0 +0-2 31-33 ", out, re.MULTILINE)
    code, _, err = run(f"{line} --schedule zb-v")
    assert code == 2
    assert "--no-remat" in err


def test_between_nodes_on_a_slow_network_pipelines_are_faster(run):
    line = "plan --model llama2-13b --target l40sx64 --pipeline 8"
    code, out, _ = run(f"{line} --network 1.25")
    assert code == 0
    assert "pipeline *" in out
    shown = " ".join(out.split())
    assert "Pipeline. On 64 devices in 8 groups of fast links a step takes" in shown
    assert "cannot hide; the pipeline's is" in shown
    code, out, _ = run(line)
    assert "The network of a l40s is not known" in " ".join(out.split())
    assert "pipeline *" not in out


@pytest.mark.parametrize(
    "line",
    [
        "--model gpt2-small --target h100x8 --pipeline 4 --schedule interleaved",
        "--model llama2-70b --target h200x256 --pipeline 16 --stage 3 --master",
        "--model llama3-405b --target v5p:16x16x16*2 --pipeline 8 --stage 2 --memory 999999",
        "--model llama2-13b --target l40sx64 --pipeline 4 --schedule interleaved --chunks 4",
    ],
)
def test_it_fits_into_80_columns(run, line):
    _, out, _ = run(f"plan {line}")
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    for row in ("compute", r"\+ bubble", "wire", "step, wire hidden", "memory"):
        assert re.search(rf"^ ?{row} ", out, re.MULTILINE)


def test_json_has_the_numbers_of_estimate_pipeline(run):
    line = "plan --model gpt2-small --optimizer adam --master --target h100x64 --pipeline 4 --json"
    code, out, err = run(f"{line} --microbatches 12 --schedule interleaved --stage 2 --batch 2")
    assert (code, err) == (0, "")
    mesh = AbstractMesh((8, 8), ("host", "data"))
    zero = shd.Zero(mesh, stage=2, axis="data", replica_axis="host")
    expected = estimate_pipeline(
        MODELS["gpt2-small"],
        optax_ext.master_weights(optax.adam(1e-3)),
        zero,
        device=kind_of("h100x64"),
        num_stages=4,
        microbatches=12,
        schedule="interleaved",
        batch=2,
    )
    assert json.loads(out) == json.loads(json.dumps(expected.to_dict()))


def test_options_reach_the_plan(run):
    def figures(line):
        code, out, _ = run(f"plan --model llama2-7b --target h100x16 --pipeline 4 --json {line}")
        assert code == 0
        return json.loads(out)

    plain = figures("")
    assert (plain["microbatches"], plain["schedule"], plain["zero_stage"]) == (16, "aligned", 1)
    assert plain["num_replicas"] == 4
    fast = figures("--efficiency 1")
    assert fast["ideal"] == pytest.approx(plain["ideal"] / 2)
    stored = figures("--no-remat")
    assert stored["ideal"] == pytest.approx(plain["ideal"] * 3 / 4, rel=0.01)  # but for the head
    assert stored["stages"][0]["activations"] > 2 * plain["stages"][0]["activations"]
    assert figures("--length 512")["tokens"] == plain["tokens"] / 4
    assert figures("--chunks 3 --schedule interleaved")["chunks"] == 3
    assert figures("--offload")["stages"][0]["state"] < 0.1 * plain["stages"][0]["state"]
    wide, narrow = (figures(f"--master {x}") for x in ("", "--state bfloat16"))
    assert narrow["stages"][0]["state"] == pytest.approx(2 / 3 * wide["stages"][0]["state"], 0.01)
    slow = figures("--network 1")
    assert slow["transfers"] == pytest.approx(50 * plain["transfers"])


def test_nothing_fits(run):
    code, out, _ = run("plan --model llama2-70b --target rtx4090x8 --pipeline 8 --master")
    assert code == 2
    shown = " ".join(out.split())
    assert "Neither fits a rtx4090 with 22.4 GiB: the pipeline needs" in shown
    assert re.search(r"warning: the stages do not fit, by [\d.]+ GiB", shown)
    assert "*" not in out
    assert "too much" in out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--model llama2-7b --target h100x8 --pipeline 3", "8 devices cannot be shared equally by"),
        ("--model llama2-7b --target h100x8 --pipeline 1", "a pipeline needs at least 2 stages"),
        ("--model llama2-7b --target h100x8 --pipeline 0", "--pipeline must be above 0, got 0"),
        ("--model 7e9 --target h100x8 --pipeline 2", "needs a model whose layers are known"),
        ("--model gpt2-small --target cpu:8 --pipeline 2", "needs the figures of cpu:8"),
        (
            "--model gpt2-small --target h100x16 --pipeline 16",
            "16 stages with 1 groups of layers each need as many layers",
        ),
        (
            "--model llama2-7b --target h100x8 --pipeline 4 --schedule interleaved "
            "--microbatches 6",
            "multiples of its 4 stages, got 6; 8 are possible",
        ),
        ("--model llama2-7b --target h100x8 --pipeline 4 --chunks 2", "has one chunk on a device"),
        ("--model llama2-7b --target h100x8 --pipeline 4 --efficiency 2", "must be in (0, 1]"),
        ("--model llama2-7b --target h100x8 --pipeline 4 --mesh x=8", "--mesh cannot be combined"),
        ("--model llama2-7b --target h100x8 --pipeline 4 --plot a.png", "--plot cannot be"),
        ("--model llama2-7b --target h100x8 --schedule gpipe", "--schedule needs --pipeline N"),
        ("--model llama2-7b --target h100x8 --no-remat", "--no-remat needs --pipeline N"),
        ("--model llama2-7b --target h100x8 --stage 2", "--stage needs --pipeline N"),
    ],
)
def test_wrong_questions(run, line, message):
    code, out, err = run(f"plan {line}")
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_network_is_a_figure_of_a_device(run):
    line = "plan --model gpt2-small --target newx16 --memory 96 --tflops 1000 --link 450 --json"
    assert json.loads(run(line)[1])["device"]["network"] is None
    assert json.loads(run(f"{line} --network 50")[1])["device"]["network"] == 50e9
    found = json.loads(run(f"{line} --network 50 --pipeline 2")[1])
    assert found["device"]["network"] == 50e9
