"""examples/train_lm.py: what it reports, how a stopped run resumes, and what it rejects.

Runs are in this process, on the first of its devices; what must be killed is a process of its own.
"""

import argparse
import contextlib
import io
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import sys

import jax
import numpy as np
import optax
import pytest

pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")

import train_lm
from _corpus import Corpus
from _model import Config, TransformerLM
from _plan import take_plan

import optax_ext
from sharding.plan import ParallelPlan, PlanFile

from .multiprocess.processes import ROOT, output_of, wait_until

SCRIPT = ROOT / "examples" / "train_lm.py"
STEPS, EVERY = 40, 10  # steps of a run, and between its checkpoints
NAME = "smoke-came-zero2"
UPDATE = jax.config.update
pytestmark = [
    pytest.mark.script,
    # The process of a script ends soon after, with what it has open.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def arguments(text, *options):
    command = ("--smoke", "--devices", "2", "--data", text, "--steps", STEPS)
    return [str(x) for x in (*command, "--checkpoint-every", EVERY, *options)]


def train(folder, text, *options, stop=0, by=signal.SIGINT, sizes=None):
    """Runs the script in a folder, stopped in a step by a signal; its exit code and its output.

    The size of each batch is appended to ``sizes``.
    """

    def batch(corpus, seed, step, size):
        if sizes is not None:
            sizes.append(size)
        if step == stop:
            signal.raise_signal(by)
        return read(corpus, seed, step, size)

    def update(name, value):  # of the 8 devices the script takes the first
        if name != "jax_num_cpu_devices":
            UPDATE(name, value)

    read, output, code = Corpus.batch, io.StringIO(), 0
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        jax.numpy_rank_promotion("allow"),  # as the script has it
    ):
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["train_lm.py", *arguments(text, *options)])
        patch.setattr(Corpus, "batch", batch)
        patch.setattr(jax.config, "update", update)
        try:
            train_lm.main()
        except SystemExit as end:
            code = end.code
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return code, output.getvalue()


def succeed(*args, code=0, **kwargs):
    """The output of a run that ends with the code."""
    found, output = train(*args, **kwargs)
    assert found == code, output
    return output


def stopped(*args, stop, by=signal.SIGINT):
    """The output of a run that a signal stops in a step."""
    return succeed(*args, stop=stop, by=by, code=128 + by)


def rows(folder, name=NAME):
    """Those that are complete."""
    path = folder / "runs" / name / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def done(folder):
    """The last step of which there is a row."""
    return len(rows(folder)) - 1


def column(folder, key, name=NAME):
    return [row[key] for row in rows(folder, name) if key in row]


def checkpoints(folder, name=NAME):
    names = (path.name for path in (folder / "runs" / name / "checkpoints").glob("*"))
    return sorted(int(name) for name in names if name.isdigit())


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, text):
    """The folder of an uninterrupted run, and what it printed."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    return folder, succeed(folder, text, "--audit")


def test_it_learns(uninterrupted):
    val_losses = column(uninterrupted[0], "val_loss")
    assert val_losses[0] == pytest.approx(5.55, abs=0.1)  # log(256): untrained
    assert val_losses[-1] < 3.0


def test_it_begins_with_a_plan_and_the_audit_of_its_step(uninterrupted):
    plan, rest = uninterrupted[1].split("* this run")
    audit, _ = rest.split("compiling the training step")
    assert re.search(r"stage 0 +stage 1 +stage 2 \* +stage 3 +adamw, no ZeRO *\n", plan)
    # The plan agrees with the program on arguments and bytes sent.
    held = [re.search(r"^ parameters +(.*)", part, re.MULTILINE)[1] for part in (plan, audit)]
    assert held[1].strip() in held[0]
    sent = re.search(r"sent in a step +(\S+ KiB) +(\S+ KiB) +(\S+ KiB)", plan)[3]
    ratio, theory = re.search(r"(\S+) of theory +(\S+ KiB)", audit).groups()
    assert theory == sent
    assert float(ratio) == pytest.approx(1.0, abs=0.05)


def test_a_finished_run_is_reported_and_left_unchanged(uninterrupted, text):
    folder = uninterrupted[0] / "runs" / NAME

    def times():
        return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}

    before = times()
    files = {"metrics.jsonl", "loss.png", "layout.txt", "summary.json"}
    assert files <= {path.name for path in before}
    output = succeed(uninterrupted[0], text)
    assert "is finished" in output
    assert "bits per byte" in output
    assert times() == before


MISTAKES = {
    ("--optimizer", "adamm"): "invalid choice: 'adamm'",
    ("--batch-size", "7"): "--batch-size 7 is not divisible by 2 (2 devices",
    ("--data", "nowhere"): "nowhere does not exist",
    ("--steps", "200"): f"was started with --steps {STEPS}, not 200",
    ("--seed", "1", "--steps", "0"): "must be at least 1, got 0",
    ("--sync", "zen"): "--sync zen is for an n-gram table",
    ("--sync", "dgc"): "it needs --optimizer sgd",
    ("--noise-scale", "--stage", "3"): "at stage 3 compares micro-batches",
    ("--update-in-backward", "--sync", "qsgd8"): "does not go with --sync qsgd8",
    ("--update-in-backward", "--noise-scale"): "does not go with --noise-scale",
    ("--update-in-backward", "--offload"): "does not go with --offload",
    ("--schedule", "gpipe"): "give --pipeline STAGES",
    ("--pipeline", "4"): "has 4 groups of layers, but --config smoke has 2 layers",
    ("--pipeline", "2", "--state", "8bit"): "give --state float32",
    ("--pipeline", "2", "--memory", "1GiB"): "--memory is for runs without --pipeline",
    ("--plan", "auto"): "on CPUs needs the memory of a device: give --memory",
    ("--plan", "auto", "--sync", "zen"): "--plan auto does not go with --sync",
    ("--memory", "lots"): "expected bytes, or a text such as '8GiB', got 'lots'",
}


def test_a_mistake_gives_one_line(uninterrupted, text):
    for options, message in MISTAKES.items():
        output = succeed(uninterrupted[0], text, *options, code=2)
        assert output.startswith("train_lm.py: error: "), output
        assert message in output
        assert output.count("\n") == 1


def test_a_run_stopped_in_every_way_has_the_losses_of_an_uninterrupted_one(
    tmp_path, text, uninterrupted, processes
):
    """Bit for bit on CPU: batches, and the order of every sum, are those of the other run."""
    folder = tmp_path / "runs" / NAME
    (process,) = processes.start_python(None, SCRIPT, *arguments(text))
    wait_until(lambda: checkpoints(tmp_path) and done(tmp_path) > EVERY + 2, [process])
    process.kill()
    output_of(process, -signal.SIGKILL)
    last = checkpoints(tmp_path)[-1]
    assert EVERY <= last < STEPS
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1')  # what a process killed while writing leaves
    for by in (signal.SIGINT, signal.SIGTERM):
        output = stopped(tmp_path, text, stop=last + 4, by=by)
        assert f"Resuming from the checkpoint at step {last}." in output
        # That python, which has what the script imports, in one line to be copied.
        command = shlex.join([sys.executable, "train_lm.py", *arguments(text)])
        assert f"To resume: {command}\n" in output
        last += 4
        assert rows(tmp_path)[-1]["step"] == last == checkpoints(tmp_path)[-1]
    assert f"Resuming from the checkpoint at step {last}." in succeed(tmp_path, text)
    assert column(tmp_path, "step") == list(range(STEPS + 1))
    assert rows(tmp_path) == rows(uninterrupted[0])


def test_a_batch_that_doubles(tmp_path, text, monkeypatch):
    """By windows seen, for rates too; each size is measured as such."""
    measure, pieces, sizes = optax_ext.gradient_noise_scale, [], []

    def measure_and_note(batch_size):
        tx = measure(batch_size)

        def update(*args, num_pieces, **options):
            pieces.append((batch_size, num_pieces))
            return tx.update(*args, num_pieces=num_pieces, **options)

        return optax.GradientTransformationExtraArgs(tx.init, update)

    monkeypatch.setattr(optax_ext, "gradient_noise_scale", measure_and_note)
    options = (
        "--double-batch",
        "80,200",
        "--noise-scale",
        "--learning-rate",
        0.01,
        "--name",
        "run",
    )
    succeed(tmp_path, text, *options, sizes=sizes)
    batches = optax_ext.BatchSchedule({0: 8, 80: 16, 200: 32})
    assert sizes == [batches.size(i) for i in range(STEPS)]
    # Two devices; whether a transformation asks is found by a call with two pieces.
    assert {pair for pair in pieces if pair[1] > 2} == {(16, 4), (32, 8)}
    seen = batches.examples(STEPS) // 8
    base = optax.warmup_cosine_decay_schedule(0.0, 0.01, seen // 20, seen, 0.0005)
    want = [base(batches.examples(i) / 8) * (batches.size(i) / 8) ** 0.5 for i in range(STEPS)]
    np.testing.assert_allclose(column(tmp_path, "learning_rate", "run"), want, rtol=1e-5)


@pytest.mark.slow
def test_a_run_whose_batch_doubles_resumes(tmp_path, text):
    options = ("--double-batch", "80,200", "--noise-scale", "--name", "run")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    succeed(whole, text, *options)
    stopped(parts, text, *options, stop=14)
    succeed(parts, text, *options)
    assert rows(parts, "run") == rows(whole, "run")


def test_a_killed_run_resumes_from_memory_and_loses_no_step(
    tmp_path, text, uninterrupted, processes
):
    memory = tmp_path / "memory"
    options = ("--peer-checkpoints", memory)
    supervisor = SCRIPT.with_name("supervise.py")
    command = (supervisor, "--delay", "0", sys.executable, SCRIPT, *arguments(text, *options))
    (process,) = processes.start_python(None, *command)
    wait_until(lambda: done(tmp_path) > 5, [process])
    killed = done(tmp_path)
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    os.kill(int(children), signal.SIGKILL)
    wait_until(lambda: done(tmp_path) > killed + 3, [process])
    process.terminate()
    output = output_of(process, 143)
    assert "supervise.py: exit code 137; restart 1 of 100." in output
    assert "Peer checkpoints: 1 machine; two snapshots take" in output
    found = re.search(r"Resuming from the memory of machines at step (\d+)\.", output)
    assert int(found[1]) >= killed - 1  # a snapshot is written beside the next step

    # A planned stop writes to disk, too: memory may be lost meanwhile.
    assert list(memory.glob("*/*.slot"))
    shutil.rmtree(memory)
    output = succeed(tmp_path, text, *options)
    assert "no snapshot in the memory of the machines is complete" in output
    assert "Resuming from the checkpoint at step " in output
    assert rows(tmp_path) == rows(uninterrupted[0])
    assert not list(memory.glob("*/*.slot"))  # the memory of a finished run is free


def test_snapshots_of_another_pipeline_are_not_restored(tmp_path, text):
    options = ("--peer-checkpoints", tmp_path / "memory", "--name", "run", "--microbatches", "2")
    stopped(tmp_path, text, *options, "--pipeline", "2", stop=12)
    output = stopped(tmp_path, text, *options, stop=14)
    reason = "in memory is that of a pipeline of 2 stages, 1f1b-aligned; this run has no pipeline."
    assert reason in output
    assert "Resuming from the checkpoint at step 12." in output


@pytest.fixture(scope="module")
def deep(tmp_path_factory, text):
    """The folder of a run of six layers."""
    folder = tmp_path_factory.mktemp("deep")
    succeed(folder, text, "--config", "smoke-deep", "--name", "full")
    return folder


def assert_same_losses(folder, name, deep, steps):
    for key in ("loss", "val_loss"):
        found, expected = column(folder, key, name), column(deep, key, "full")
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert len(rows(folder, name)) == steps + 1


def test_a_run_resumes_with_other_stages_of_a_pipeline_or_none(tmp_path, text, deep):
    """Checkpoints hold the model's layers one by one, whatever pipeline wrote them."""
    options = ("--config", "smoke-deep", "--name", "pipelined")
    four = ("--devices", "4", "--pipeline", "4", "--microbatches", "4", "--audit")
    three = ("--devices", "3", "--pipeline", "3", "--schedule", "gpipe", "--stage", "1")
    outputs = [
        stopped(tmp_path, text, *options, *four, stop=6),
        stopped(tmp_path, text, *options, *three, "--microbatches", "4", stop=12),
    ]
    assert "Resuming from the checkpoint at step 12." in succeed(tmp_path, text, *options)
    first = "1f1b-aligned: 4 stages, 4 micro-batches, 20 ticks, bubble 42.9 %, live activations"
    assert f"Pipeline: {first} 4 4 3 1." in outputs[0]
    assert "collective-permute" in outputs[0]  # the audit counts what stages send
    assert 0.98 < float(re.search(r"(\S+) of theory", outputs[0])[1]) < 1.02
    assert "Pipeline: gpipe: 3 stages, 4 micro-batches" in outputs[1]
    counts = [re.search(r"(\S+) parameters on", text)[1] for text in outputs]
    assert counts[0] == counts[1]
    assert_same_losses(tmp_path, "pipelined", deep, STEPS)
    losses = column(deep, "loss", "full")
    assert losses[-1] < losses[0] - 1


@pytest.mark.slow
def test_a_run_with_planned_activations_has_the_losses_of_one_without(tmp_path, text, deep):
    """With little memory; it resumes without a plan."""
    options = ("--config", "smoke-deep", "--name", "planned")
    little = ("--devices", "4", "--memory", "1.35MiB", "--audit")
    output = stopped(tmp_path, text, *options, *little, stop=12)
    assert float(re.search(r"One device takes (\S+) MiB", output)[1]) <= 1.35
    assert float(re.search(r"^  extra time +(\S+) %", output, re.M)[1]) > 0
    assert "Resuming from the checkpoint" in succeed(tmp_path, text, *options)
    assert_same_losses(tmp_path, "planned", deep, STEPS)
    output = succeed(tmp_path, text, *options, "--name", "small", "--memory", "300KiB", code=2)
    assert re.search(r"train_lm.py: error: .* of a device, and .*\n\Z", output)


REPLICAS = ParallelPlan(data=4, stage=2, replicas=2, spread=True, microbatch=4)
SPLIT = ParallelPlan(pipe=2, microbatch=2, microbatches=4, schedule="zb-h1", recompute="none")


@pytest.mark.parametrize(
    ("plan", "layers", "options"),
    [
        pytest.param(REPLICAS, (2,), ("--stage", "2"), id="replicas"),
        pytest.param(
            *(SPLIT, (1, 1), ("--stage", "0", "--microbatches", "4")),
            id="split backward pass",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_plan_decides_how_a_step_is_shared(tmp_path, text, plan, layers, options):
    """Losses are those of the same choices as options, updated after or within."""
    promised = {"memory": 1.0, "seconds": 1.0}
    file = PlanFile("smoke", "came", "cpu:2", 32, "float32", layers, plan, promised)
    file.write(tmp_path / "plan.json")
    runs = {"plan": ("--plan", "plan.json"), "options": options}
    runs |= {"backward": (*options, "--update-in-backward")}
    runs |= {"auto": (*options, "--plan", "auto", "--memory", "1GiB")}
    for name, given in runs.items():
        succeed(tmp_path, text, "--steps", "6", "--name", name, "--batch-size", "8", *given)
    plan, *others = (column(tmp_path, "loss", name) for name in runs)
    assert len(plan) == 6
    for losses in others:
        assert losses == pytest.approx(plan, rel=1e-5)


def options_of(tmp_path, plan, layers=(2,), **given):
    """The options of the script after it has read the plan."""
    file = PlanFile("smoke", "", "cpu:2", 32, "float32", layers, plan, {})
    file.write(tmp_path / "plan.json")
    none = dict.fromkeys(("pipeline", "microbatches", "schedule", "devices", "batch_size"))
    fixed = {"plan": tmp_path / "plan.json", "config": "smoke", "state": "float32"}
    options = argparse.Namespace(**(none | fixed | given))
    take_plan(options)
    return options


def test_options_of_plans_and_plans_that_the_script_cannot_run(tmp_path):
    found = options_of(tmp_path, ParallelPlan(data=2, stage=1, state_format="8bit"))
    assert (found.state, found.stage, found.replicas) == ("8bit", 1, 1)
    for fields, layers, given, message in (
        ({"data": 4, "replicas": 2, "pipe": 2, "microbatches": 2}, (1, 1), {}, "has replicas"),
        ({"weights": "master"}, (2,), {}, "search without"),
        ({"sync": "qsgd(8)"}, (2,), {}, r"by qsgd\(8\): --keep sync=none"),
        ({"pipe": 2, "microbatches": 2, "schedule": "1f1b"}, (1, 1), {}, "schedule=aligned"),
        ({"pipe": 2, "microbatches": 2}, (2, 2), {}, "has 4 layers, --config smoke has 2"),
        ({"data": 2}, (2,), {"microbatches": 2}, "leave them out"),
        ({"state_format": "8bit"}, (2,), {"state": "4bit"}, "leave it out"),
    ):
        with pytest.raises(ValueError, match=message):
            options_of(tmp_path, ParallelPlan(**fields), layers, **given)


@jax.numpy_rank_promotion("allow")  # as the script has it
def test_no_byte_changes_the_logits_before_it():
    model = TransformerLM(Config(1, 16, 1, 12, batch_size=1, steps=1, ngrams=64))
    tokens = np.random.default_rng(0).integers(0, 256, (2, 12))
    tokens[1] = tokens[0] ^ (np.arange(12) == 6)
    params = model.init(jax.random.key(0), tokens)["params"]
    params["ngram_embed"]["embedding"] = jax.random.normal(jax.random.key(1), (64, 16))
    one, two = np.asarray(jax.jit(model.apply)({"params": params}, tokens))
    np.testing.assert_array_equal(one[:6], two[:6])
    assert np.all(np.any(one[6:] != two[6:], -1))
