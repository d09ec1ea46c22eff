"""``plan --pipeline``: what it prints, and the options it reads."""

import json
import re

import optax
import pytest

from sharding.plan import MODELS
from sharding.plan.search._estimate_pipeline import estimate_pipeline

ALIGNED = "--schedule aligned --stage 1"


def test_inside_one_node_zero_is_faster(run):
    code, out, err = run(f"plan --model llama2-7b --target h100x8 --pipeline 4 {ALIGNED}")
    assert (code, err) == (0, "")
    shown = " ".join(out.split())
    assert "4 stages x 2 replicas, aligned: one device" in out
    # All of the memory is shown, as in a plan without a pipeline; plans leave 8 % of it free.
    assert re.search(r"total +left of 79.1 GiB *$", out, re.MULTILINE)
    assert re.search(r"^ 0 +0-9 +60.8 ms +7 +256 MiB +3.50 GiB +4.86 GiB", out, re.MULTILINE)
    assert "pipeline ZeRO *" in shown
    assert max(map(len, out.splitlines())) <= 80
    assert "Do not pipeline. On 8 devices a step takes" in shown
    assert "ms with ZeRO alone. Bubble and transfers of the pipeline are" in shown
    assert "measure both" not in shown
    assert "bubble of equal stages 15.8%" in shown


def test_with_few_sequences_on_a_slow_network_pipelines_are_faster(text):
    line = "plan --model llama2-13b --target l40sx64 --pipeline 8 --network 1.25"
    shown = text(f"{line} --batch 64")
    assert "pipeline *" in shown
    assert "Pipeline. On 64 devices a step takes" in shown
    shown = text(f"{line} --batch 32")
    assert "Pipeline: without one 64 devices cannot share 32 sequences." in shown
    shown = text(f"{line} --batch 128")
    assert "Do not pipeline." in shown
    assert "measure both" in shown  # the pipeline is faster if nothing is hidden


def test_json_has_the_numbers_of_estimate_pipeline(figures):
    line = "plan --model gpt2-small --optimizer adam --master --target h100x64 --pipeline 4"
    found = figures(f"{line} --microbatches 12 --schedule interleaved --stage 2 --batch 384")
    expected = estimate_pipeline(
        *(MODELS["gpt2-small"], optax.adam(1e-3), "h100x64"),
        num_stages=4,
        sequences=384,
        keep={"schedule": "interleaved", "stage": 2, "microbatches": 12, "offload": False},
        weights=("master",),
    )
    found["machine"].pop("target")
    expected = json.loads(json.dumps(expected.to_dict()))
    assert {name: found[name] for name in expected} == expected
    assert [row["name"] for row in found["plans"]] == ["pipeline", "ZeRO"]


def test_options_reach_the_plan(figures):
    def plan(line):
        return figures(f"plan --model llama2-7b --target h100x16 --pipeline 4 {line}")["plans"][0]

    plain = plan(ALIGNED)
    tokens, chosen = plain["tokens"], plain["plan"]
    assert (chosen["data"], chosen["schedule"], chosen["stage"]) == (4, "aligned", 1)
    assert tokens == 4 * 16 * 2048
    stored = plan(f"{ALIGNED} --no-remat --microbatches 16")["plan"]
    assert (stored["recompute"], stored["microbatches"]) == ("none", 16)
    assert plan(f"{ALIGNED} --length 512")["tokens"] == tokens / 4
    assert plan(f"{ALIGNED} --batch 128k-tokens")["tokens"] == tokens
    assert plan("--chunks 3 --stage 1")["plan"]["chunks"] == 3
    assert plan(f"{ALIGNED} --offload")["stages"][0]["state"] < 0.1 * plain["stages"][0]["state"]
    wide, narrow = (plan(f"--master {x} {ALIGNED}")["stages"][0] for x in ("", "--state bfloat16"))
    assert narrow["state"] == pytest.approx(2 / 3 * wide["state"], rel=0.01)
    slow = plan(f"--network 1 {ALIGNED}")["seconds"]
    assert slow["transfers"] > 10 * plain["seconds"]["transfers"]


def test_stages_are_chosen_if_their_number_is_left_out(figures):
    line = "plan --model gpt2-small --target h100x8 --schedule gpipe --pipeline"
    assert figures(line)["plans"][0] == figures(f"{line} 2 --batch 32")["plans"][0]


def test_nothing_fits(run):
    code, out, _ = run("plan --model llama2-70b --target rtx4090x8 --pipeline 8 --master")
    assert code == 2
    shown = " ".join(out.split())
    assert "Both do not fit. Of 20.6 GiB on rtx4090x8 the pipeline needs" in shown
    assert re.search(r"warning: the stages do not fit, by [\d.]+ GiB", shown)
    assert "*" not in out
    assert "too much" in out
