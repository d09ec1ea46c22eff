"""``plan --pipeline``: what it prints, and the options it reads."""

import json
import re

import optax
import pytest
from jax.sharding import AbstractMesh

import optax_ext
import sharding as shd
from sharding.plan import MODELS, estimate_pipeline, kind_of


def test_inside_one_node_zero_is_faster(run):
    code, out, err = run("plan --model llama2-7b --target h100x8 --pipeline 4")
    assert (code, err) == (0, "")
    shown = " ".join(out.split())
    assert "4 stages x 2 replicas, 16 micro-batches, aligned: one device" in out
    assert re.search(r"^ 0 +0-9 +65.3 ms +7 +256 MiB +3.50 GiB +4.86 GiB", out, re.MULTILINE)
    assert "pipeline stage 1 *" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "Do not pipeline. On 8 devices that share fast links a step takes 995 ms" in shown
    assert "even if none of its wire time of 52.4 ms is hidden, and 1.22 s in the" in shown
    assert "bubble of equal stages 15.8%" in shown
    assert "Times assume 50% of the peak of a h100" in shown


def test_between_nodes_on_a_slow_network_pipelines_are_faster(text):
    line = "plan --model llama2-13b --target l40sx64 --pipeline 8 --microbatches 64"
    shown = text(f"{line} --network 1.25")
    assert "pipeline *" in shown
    assert "Pipeline. On 64 devices in 8 groups of fast links a step takes" in shown
    assert "cannot hide; the pipeline's is" in shown
    shown = text(line)
    assert "The network of a l40s is not known" in shown
    assert "pipeline *" not in shown


def test_json_has_the_numbers_of_estimate_pipeline(figures):
    line = "plan --model gpt2-small --optimizer adam --master --target h100x64 --pipeline 4"
    found = figures(f"{line} --microbatches 12 --schedule interleaved --stage 2 --batch 2")
    mesh = AbstractMesh((8, 8), ("host", "data"))
    expected = estimate_pipeline(
        MODELS["gpt2-small"],
        optax_ext.master_weights(optax.adam(1e-3)),
        shd.Zero(mesh, stage=2, axis="data", replica_axis="host"),
        device=kind_of("h100x64"),
        num_stages=4,
        microbatches=12,
        schedule="interleaved",
        batch=2,
    )
    assert found == json.loads(json.dumps(expected.to_dict()))


def test_options_reach_the_plan(figures):
    def plan(line):
        return figures(f"plan --model llama2-7b --target h100x16 --pipeline 4 {line}")

    plain = plan("")
    assert (plain["microbatches"], plain["schedule"], plain["zero_stage"]) == (16, "aligned", 1)
    assert plain["num_replicas"] == 4
    assert plan("--efficiency 1")["ideal"] == pytest.approx(plain["ideal"] / 2)
    stored = plan("--no-remat")
    assert stored["ideal"] == pytest.approx(plain["ideal"] * 3 / 4, rel=0.01)  # but for the head
    assert stored["stages"][0]["activations"] > 2 * plain["stages"][0]["activations"]
    assert plan("--length 512")["tokens"] == plain["tokens"] / 4
    assert plan("--chunks 3 --schedule interleaved")["chunks"] == 3
    assert plan("--offload")["stages"][0]["state"] < 0.1 * plain["stages"][0]["state"]
    wide, narrow = (plan(f"--master {x}")["stages"][0] for x in ("", "--state bfloat16"))
    assert narrow["state"] == pytest.approx(2 / 3 * wide["state"], rel=0.01)
    assert plan("--network 1")["transfers"] == pytest.approx(50 * plain["transfers"])


def test_nothing_fits(run):
    code, out, _ = run("plan --model llama2-70b --target rtx4090x8 --pipeline 8 --master")
    assert code == 2
    shown = " ".join(out.split())
    assert "Neither fits a rtx4090 with 22.4 GiB: the pipeline needs" in shown
    assert re.search(r"warning: the stages do not fit, by [\d.]+ GiB", shown)
    assert "*" not in out
    assert "too much" in out
