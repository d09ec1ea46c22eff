"""examples/train_lm.py as users run it: stopped at any moment, resumed, misused."""

import argparse
import importlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

from sharding.plan import ParallelPlan, PlanFile

pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")

SCRIPT = pathlib.Path(__file__).parents[1] / "examples" / "train_lm.py"
STEPS, CHECKPOINT_EVERY = 120, 20
SECONDS = 300  # for one process, on a busy machine
THREE = ("--microbatches", "3")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    path.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(2000)))
    return path


@pytest.fixture(scope="module", autouse=True)
def environment():
    """No devices but those that the script requests."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", " ".join(flags))
        yield


def arguments(text):
    command = ("--smoke", "--devices", "2", "--data", text)
    return (*command, "--steps", str(STEPS), "--checkpoint-every", str(CHECKPOINT_EVERY))


def start(folder, text, *options, by=()):
    command = (*by, sys.executable, SCRIPT, *arguments(text), *options)
    return subprocess.Popen(
        [str(part) for part in command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process):
    output, _ = process.communicate(timeout=SECONDS)
    return process.returncode, output


def run(folder, text, *options):
    return finish(start(folder, text, *options))


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def wait_for_step(process, step):
    """Reads the process's output until it reports the step, or a later one."""
    watchdog = threading.Timer(SECONDS, process.kill)
    watchdog.start()
    output = ""
    for line in process.stdout:
        output += line
        found = re.match(r"step +(\d+)/", line)
        if found and int(found[1]) >= step:
            watchdog.cancel()
            return output
    raise AssertionError(f"the process ended before step {step}: {output}")


def checkpoints(folder):
    names = (path.name for path in (folder / "checkpoints").glob("*"))
    return sorted(int(name) for name in names if name.isdigit())


@pytest.fixture(scope="module")
def uninterrupted_run(tmp_path_factory, text):
    """The folder of an uninterrupted run, and what it printed."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    code, output = run(folder, text, "--audit")
    assert code == 0, output
    return folder / "runs" / "smoke-came-zero2", output


@pytest.fixture(scope="module")
def uninterrupted(uninterrupted_run):
    return uninterrupted_run[0]


@pytest.mark.slow
def test_a_run_stopped_in_every_way_has_the_losses_of_an_uninterrupted_one(
    tmp_path, text, uninterrupted
):
    folder = tmp_path / "runs" / "smoke-came-zero2"

    process = start(tmp_path, text)
    wait_for_step(process, 2 * CHECKPOINT_EVERY + 2)
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL
    last = checkpoints(folder)[-1]
    assert CHECKPOINT_EVERY <= last < STEPS
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1')  # what a process killed while writing leaves

    for stop, exit_code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        process = start(tmp_path, text)
        output = wait_for_step(process, last + 10)
        process.send_signal(stop)
        code, rest = finish(process)
        output += rest
        assert code == exit_code, output
        assert f"Resuming from the checkpoint at step {last}." in output
        assert "To resume: python" in output
        last = checkpoints(folder)[-1]
        assert rows(folder)[-1]["step"] == last < STEPS  # saved where it stopped

    code, output = run(tmp_path, text)
    assert code == 0, output
    assert f"Resuming from the checkpoint at step {last}." in output

    # Bit for bit on CPU: batches, and the order of every sum, are those of the uninterrupted run.
    assert [row["step"] for row in rows(folder)] == list(range(STEPS + 1))
    assert rows(folder) == rows(uninterrupted)


@pytest.mark.slow
def test_a_killed_run_resumes_from_memory_and_loses_no_step(tmp_path, text, uninterrupted):
    folder, memory = tmp_path / "runs" / "smoke-came-zero2", tmp_path / "memory"
    options = ("--peer-checkpoints", memory)
    supervisor = (sys.executable, SCRIPT.with_name("supervise.py"))

    process = start(tmp_path, text, *options, by=supervisor)
    output = wait_for_step(process, CHECKPOINT_EVERY + 12)
    done = rows(folder)[-1]["step"]
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    os.kill(int(children), signal.SIGKILL)
    output += wait_for_step(process, done + 8)
    process.terminate()
    code, rest = finish(process)
    output += rest
    assert code == 143, output
    assert "supervise.py: exit code 137; restart 1 of 100." in output
    assert "Peer checkpoints: 1 machine; two snapshots take" in output
    found = re.search(r"Resuming from the memory of machines at step (\d+)\.", output)
    assert int(found[1]) >= done - 1  # a snapshot is written beside the next step

    # A planned stop writes to disk, too: memory may be lost meanwhile.
    assert list(memory.glob("*/*.slot"))
    shutil.rmtree(memory)
    code, output = run(tmp_path, text, *options)
    assert code == 0, output
    assert "no snapshot in the memory of the machines is complete" in output
    assert "Resuming from the checkpoint at step " in output
    assert rows(folder) == rows(uninterrupted)
    assert not list(memory.glob("*/*.slot"))  # the memory of a finished run is free


@pytest.mark.slow
def test_snapshots_of_another_pipeline_are_not_restored(tmp_path, text):
    options = ("--peer-checkpoints", tmp_path / "memory", "--name", "run", "--microbatches", "2")
    process = start(tmp_path, text, *options, "--pipeline", "2")
    wait_for_step(process, 2 * CHECKPOINT_EVERY + 4)
    process.kill()
    finish(process)
    process = start(tmp_path, text, *options)
    output = wait_for_step(process, CHECKPOINT_EVERY + 1)
    process.kill()
    finish(process)
    reason = "in memory is that of a pipeline of 2 stages, 1f1b-aligned; this run has no pipeline."
    assert reason in output
    assert "Resuming from the checkpoint at step " in output


@pytest.mark.slow
def test_error_feedback_residuals_resume_on_other_devices(tmp_path, text):
    options = ("--sync", "topk", "--steps", "60", "--checkpoint-every", "10")
    process = start(tmp_path, text, *options)
    output = wait_for_step(process, 12)
    process.send_signal(signal.SIGINT)
    code, rest = finish(process)
    assert code == 130, output + rest
    folder = tmp_path / "runs" / "smoke-came-zero2-topk"
    last = checkpoints(folder)[-1]

    code, output = run(tmp_path, text, *options, "--devices", "4", "--audit")
    assert code == 0, output
    assert f"Resuming from the checkpoint at step {last}." in output
    assert "Bytes sent are those of dense gradients" in output
    assert "of theory" not in output
    val_losses = [row["val_loss"] for row in rows(folder) if "val_loss" in row]
    assert val_losses == sorted(val_losses, reverse=True)
    assert val_losses[-1] < 4.0


@pytest.mark.slow
def test_muon_resumes_on_other_devices_and_at_another_stage(tmp_path, text):
    """The state of its matrices, attention's too, does not depend on the mesh."""
    options = ("--optimizer", "muon", "--steps", "40", "--checkpoint-every", "10")
    names = ("--name", "full"), ("--name", "resumed")
    code, output = run(tmp_path, text, *options, *names[0])
    assert code == 0, output
    process = start(tmp_path, text, *options, *names[1])
    output = wait_for_step(process, 12)
    process.send_signal(signal.SIGINT)
    code, rest = finish(process)
    assert code == 130, output + rest
    code, output = run(tmp_path, text, *options, *names[1], "--devices", "4", "--stage", "3")
    assert code == 0, output
    assert "Resuming from the checkpoint" in output
    full, resumed = ([row["loss"] for row in rows(tmp_path / "runs" / n)[1:]] for _, n in names)
    np.testing.assert_allclose(resumed, full, rtol=1e-3)  # float32, rounded otherwise
    assert full[-1] < full[0] - 1


@pytest.mark.slow
def test_a_run_resumes_with_other_stages_of_a_pipeline_or_none(tmp_path, text):
    """Checkpoints hold the model's layers one by one, whatever pipeline wrote them."""
    options = ("--config", "smoke-deep", "--steps", "40", "--checkpoint-every", "10")
    code, output = run(tmp_path, text, *options, "--name", "full")
    assert code == 0, output
    full = rows(tmp_path / "runs" / "full")

    folder, last = tmp_path / "runs" / "pipelined", 0
    four = ("--devices", "4", "--pipeline", "4", "--microbatches", "4", "--audit")
    three = ("--devices", "3", "--pipeline", "3", "--schedule", "gpipe", "--stage", "1")
    outputs = []
    for devices in (four, (*three, "--microbatches", "4")):
        process = start(tmp_path, text, *options, "--name", folder.name, *devices)
        output = wait_for_step(process, last + 6)
        process.send_signal(signal.SIGINT)
        code, rest = finish(process)
        outputs.append(output + rest)
        assert code == 130, outputs[-1]
        last = checkpoints(folder)[-1]
    code, output = run(tmp_path, text, *options, "--name", folder.name)
    assert code == 0, output
    assert f"Resuming from the checkpoint at step {last}." in output

    first = "1f1b-aligned: 4 stages, 4 micro-batches, 20 ticks, bubble 42.9 %, live activations"
    assert f"Pipeline: {first} 4 4 3 1." in outputs[0]
    assert "collective-permute" in outputs[0]  # the audit counts what stages send
    assert 0.98 < float(re.search(r"(\S+) of theory", outputs[0])[1]) < 1.02
    assert re.search(r"permutes +20 +20 +\S+ KiB", outputs[0])
    assert "Pipeline: gpipe: 3 stages, 4 micro-batches" in outputs[1]
    # Three stages hold two layers each, of which two are padding.
    counts = [re.search(r"^(\S+) parameters on", text, re.MULTILINE)[1] for text in outputs]
    assert counts[0] == counts[1]
    for name in ("loss", "val_loss"):
        found, expected = ([row[name] for row in r if name in row] for r in (rows(folder), full))
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert full[-1]["loss"] < full[1]["loss"] - 1


@pytest.mark.slow
def test_a_run_with_planned_activations_has_the_losses_of_one_without(tmp_path, text):
    """At stages 2 and 3, with little memory and with much; it resumes without a plan."""
    options = ("--config", "smoke-deep", "--steps", "20", "--checkpoint-every", "10")
    code, output = run(tmp_path, text, *options, "--name", "plain")
    assert code == 0, output
    expected = rows(tmp_path / "runs" / "plain")
    name = ("--name", "planned")
    process = start(tmp_path, text, *options, *name, "--memory", "2MiB", "--microbatches", "2")
    output = wait_for_step(process, 4)
    process.send_signal(signal.SIGINT)
    code, rest = finish(process)
    assert code == 130, output + rest
    stored = r"^  blocks +(.*) +\(run again together\)$"
    assert "(" not in re.search(stored, output, re.M)[1]
    assert output.count("the plan holds on accelerators only.") == 1
    assert float(re.search(r"One device takes (\S+) MiB", output)[1]) <= 2.0

    devices = ("--devices", "4", "--stage", "3", "--memory", "1MiB", "--audit")
    process = start(tmp_path, text, *options, *name, *devices)
    output = wait_for_step(process, 12)
    process.send_signal(signal.SIGINT)
    code, rest = finish(process)
    assert code == 130, output + rest
    assert "((" in re.search(stored, output, re.M)[1]
    assert "of theory" not in output + rest

    code, output = run(tmp_path, text, *options, *name)
    assert code == 0, output
    assert "Resuming from the checkpoint" in output
    found = rows(tmp_path / "runs" / "planned")
    for key in ("loss", "val_loss"):
        got, want = ([row[key] for row in r if key in row] for r in (found, expected))
        np.testing.assert_allclose(got, want, rtol=1e-5)

    code, output = run(tmp_path, text, *options, "--name", "small", "--memory", "300KiB")
    assert code == 2
    last = output.splitlines()[-1]
    assert last.startswith("train_lm.py: error: ")
    assert "of a device, with the" in last


@pytest.mark.slow(keep=1)
@jax.numpy_rank_promotion("allow")  # as the script has it
@pytest.mark.parametrize(
    ("plan", "layers", "options"),
    [
        (
            ParallelPlan(data=2, stage=1, microbatch=2, microbatches=2, recompute="full"),
            (2,),
            ("--stage", "1", "--microbatches", "2"),
        ),
        (
            ParallelPlan(data=2, stage=3, microbatch=4, recompute="save_qkv_proj"),
            (2,),
            ("--stage", "3"),
        ),
        (
            ParallelPlan(data=4, stage=2, replicas=2, spread=True, microbatch=4),
            (2,),
            ("--stage", "2"),
        ),
        (
            ParallelPlan(pipe=2, microbatch=4, microbatches=2, recompute="none"),
            (1, 1),
            ("--stage", "0", "--pipeline", "2", "--microbatches", "2"),
        ),
        (
            ParallelPlan(pipe=2, microbatch=2, microbatches=4, schedule="zb-h1", recompute="none"),
            (1, 1),
            ("--stage", "0", "--microbatches", "4"),
        ),
    ],
    ids=["recomputed", "partly recomputed", "replicas", "pipeline", "split backward pass"],
)
def test_a_plan_decides_how_a_step_is_shared(tmp_path, text, plan, layers, options):
    """The losses are those of the same choices as options."""
    promised = {"memory": 1.0, "seconds": 1.0}
    file = PlanFile("smoke", "came", "cpu:2", 32, "float32", layers, plan, promised)
    file.write(tmp_path / "plan.json")
    losses = []
    for name, given in (("plan", ("--plan", "plan.json")), ("options", options)):
        done = start(tmp_path, text, "--steps", "6", "--name", name, "--batch-size", "8", *given)
        code, output = finish(done)
        assert code == 0, output
        rows = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        losses.append([row["loss"] for row in map(json.loads, rows) if "loss" in row])
    assert len(losses[0]) == 6
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_plan_decides_the_format_of_the_state(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    plan_option = importlib.import_module("_plan")
    plan = ParallelPlan(data=2, stage=1, state_format="8bit")
    PlanFile("smoke", "", "cpu:2", 32, "float32", (2,), plan, {}).write(tmp_path / "plan.json")
    none = dict.fromkeys(("pipeline", "microbatches", "schedule", "devices", "batch_size"))
    options = argparse.Namespace(
        **none, plan=tmp_path / "plan.json", config="smoke", state="float32"
    )
    plan_option.take_plan(options)
    assert (options.state, options.stage, options.replicas) == ("8bit", 1, 1)


def test_plans_that_the_script_cannot_run(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    plan_option = importlib.import_module("_plan")
    none = {"pipeline": None, "microbatches": None, "schedule": None, "config": "smoke"}
    for fields, layers, given, message in (
        ({"data": 4, "replicas": 2, "pipe": 2, "microbatches": 2}, (1, 1), {}, "has replicas"),
        ({"tensor": 2}, (2,), {}, "shares each layer"),
        ({"weights": "master"}, (2,), {}, "search without"),
        ({"sync": "qsgd(8)"}, (2,), {}, r"by qsgd\(8\): --keep sync=none"),
        ({"pipe": 2, "microbatches": 2, "schedule": "1f1b"}, (1, 1), {}, "schedule=aligned"),
        ({"pipe": 2, "microbatches": 3, "schedule": "2bw"}, (1, 1), {}, "schedule=aligned"),
        ({"pipe": 2, "chunks": 3, "schedule": "interleaved"}, (2,), {}, "--keep chunks=2"),
        ({"pipe": 2, "microbatches": 2}, (2, 2), {}, "has 4 layers, --config smoke has 2"),
        ({"data": 2}, (2,), {"microbatches": 2}, "leave them out"),
    ):
        file = PlanFile("smoke", "", "cpu:2", 32, "float32", layers, ParallelPlan(**fields), {})
        file.write(tmp_path / "plan.json")
        options = argparse.Namespace(**(none | given), plan=tmp_path / "plan.json")
        with pytest.raises(ValueError, match=message):
            plan_option.take_plan(options)


@pytest.mark.slow
@jax.numpy_rank_promotion("allow")  # as the script has it
def test_every_optimizer_sees_the_layers_in_the_stacks_of_a_pipeline(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import train_lm
    from _model import Config, TransformerLM
    from _pipeline import SCHEDULES, make_pipeline

    model = TransformerLM(Config(layers=3, width=16, heads=2, context=8, batch_size=1, steps=1))
    mesh = jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2])
    # The second stage has one layer, and a row of padding.
    pipeline = make_pipeline(model, mesh, SCHEDULES["1f1b"](2, 2))
    params = model.init(jax.random.key(0), np.zeros((1, 8), np.int32))["params"]
    rng = np.random.default_rng(0)
    gradients = [
        jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), params) for _ in range(3)
    ]

    def trained(tx, params, convert):
        @jax.jit
        def step(state, gradients):
            params, opt_state = state
            updates, opt_state = tx.update(gradients, opt_state, params)
            return train_lm.optax.apply_updates(params, updates), opt_state

        params = convert(params)
        state = params, tx.init(params)
        for each in gradients:
            state = step(state, convert(each))
        return state

    for name, (_, peak) in train_lm.OPTIMIZERS.items():
        tx, _ = train_lm.make_optimizer(name, peak, 30)
        expected = trained(tx, params, lambda tree: tree)
        found = pipeline.unstack(trained(tx, params, pipeline.stack))
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            error = np.linalg.norm(np.asarray(x, np.float64) - y)
            assert error <= 1e-5 * max(np.linalg.norm(y), 1e-30), name


@jax.numpy_rank_promotion("allow")  # as the script has it
def test_no_byte_changes_the_logits_before_it(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    from _model import Config, TransformerLM, ngram_rows

    model = TransformerLM(Config(1, 16, 1, 12, batch_size=1, steps=1, ngrams=64))
    tokens = np.random.default_rng(0).integers(0, 256, (1, 12))
    params = model.init(jax.random.key(0), tokens)["params"]
    params["ngram_embed"]["embedding"] = jax.random.normal(jax.random.key(1), (64, 16))
    logits = model.apply({"params": params}, tokens)
    read = np.asarray(ngram_rows(tokens, 64))
    for i in (0, 1, 6, 11):
        other = tokens.copy()
        other[0, i] ^= 1
        changed = model.apply({"params": params}, other)
        np.testing.assert_array_equal(changed[:, :i], logits[:, :i])
        assert np.all(np.any(changed[:, i:] != logits[:, i:], -1))
        # A bigram ends at a byte or at the next, a trigram one later still.
        others = np.asarray(ngram_rows(other, 64))
        assert set(np.nonzero(others != read)[1]) <= {i, i + 1, i + 2}


def test_it_learns(uninterrupted):
    val_losses = [row["val_loss"] for row in rows(uninterrupted) if "val_loss" in row]
    assert val_losses[0] == pytest.approx(5.55, abs=0.1)  # log(256): untrained
    assert val_losses[-1] < 3.0


def test_it_begins_with_a_plan_and_the_audit_of_its_step(uninterrupted_run):
    output = uninterrupted_run[1]
    plan, rest = output.split("* this run")
    audit, _ = rest.split("compiling the training step")
    assert re.search(r"stage 0 +stage 1 +stage 2 \* +stage 3 +adamw, no ZeRO *\n", plan)
    # The plan agrees with the program on arguments and bytes sent.
    held = [re.search(r"^ parameters +(.*)", text, re.MULTILINE)[1] for text in (plan, audit)]
    assert held[1].strip() in held[0]
    sent = re.search(r"sent in a step +(\S+ KiB) +(\S+ KiB) +(\S+ KiB)", plan)[3]
    ratio, theory = re.search(r"(\S+) of theory +(\S+ KiB)", audit).groups()
    assert theory == sent
    assert float(ratio) == pytest.approx(1.0, abs=0.05)


@pytest.mark.slow
def test_the_log_compares_the_batch_with_the_critical_size(tmp_path, text):
    options = ("--noise-scale", "--steps", "20", "--checkpoint-every", "10")
    code, output = run(tmp_path, text, *options)
    assert code == 0, output
    measured = rows(tmp_path / "runs" / "smoke-came-zero2")[-1]["noise_scale"]
    assert 0 < measured < 1000  # windows: such text is easy, and so is the beginning
    last = next(line for line in output.splitlines() if line.startswith("step 20/20"))
    found = re.search(r"batch (below|near|above) the critical size, ~(\d+\.\d) windows", last)
    assert found, output
    assert float(found[2]) == pytest.approx(measured, abs=0.05 + 1e-9)


def test_a_finished_run_is_reported_and_left_unchanged(uninterrupted, text):
    files = {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*") if path.is_file()}
    assert {"metrics.jsonl", "loss.png", "layout.txt", "summary.json"} <= {p.name for p in files}
    code, output = run(uninterrupted.parents[1], text)
    assert code == 0, output
    assert "is finished" in output
    assert "bits per byte" in output
    after = {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*") if path.is_file()}
    assert after == files


# Runs a script with each of several lists of arguments, in processes that are forked after the
# imports; they write to 0.txt, 1.txt, ... and must end with code 2.
FORKED = """
import json, os, runpy, sys, warnings
import flax.linen, flax.training.train_state, jax, matplotlib, optax, orbax.checkpoint, rich.console
warnings.filterwarnings("ignore", message=".*fork.*")
script, runs = sys.argv[1:]
for i, options in enumerate(json.loads(runs)):
    pid = os.fork()
    if not pid:
        file = os.open(f"{i}.txt", os.O_CREAT | os.O_WRONLY)
        os.dup2(file, 1), os.dup2(file, 2)
        sys.argv, sys.path[0] = [script, *options], os.path.dirname(script)
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2, (options, open(f"{i}.txt").read())
"""


def test_a_mistake_gives_one_line(uninterrupted, text):
    expected = {
        ("--optimizer", "adamm"): "invalid choice: 'adamm'",
        ("--compare", "came,adamm"): "no optimizer 'adamm'",
        ("--batch-size", "7"): "--batch-size 7 is not divisible by 2 (2 devices",
        ("--data", "nowhere"): "nowhere does not exist",
        ("--data", "small.txt"): "small.txt is too small",
        ("--steps", "200"): f"was started with --steps {STEPS}, not 200",
        ("--seed", "1", "--steps", "0"): "must be at least 1, got 0",
        ("--name", uninterrupted.name, "--sync", "topk"): "was started with --sync dense, not topk",
        ("--sync", "zen"): "--sync zen is for an n-gram table",
        ("--sync", "dgc"): "it needs --optimizer sgd",
        ("--sync", "qsgd8", "--stage", "3"): "which stage 3 does not support",
        ("--name", uninterrupted.name, "--noise-scale"): "with --noise-scale False, not True",
        ("--noise-scale", "--stage", "3"): "at stage 3 compares micro-batches",
        ("--noise-scale", "--devices", "1"): "needs two devices, or --microbatches 2",
        ("--schedule", "gpipe"): "give --pipeline STAGES",
        ("--pipeline", "2", "--schedule", "2f2b"): "invalid choice: '2f2b'",
        ("--pipeline", "4"): "has 4 groups of layers, but --config smoke has 2 layers",
        ("--pipeline", "2", "--schedule", "interleaved", "--config", "smoke-deep", *THREE): (
            "Use a multiple of 2."
        ),
        ("--pipeline", "2", "--schedule", "chimera", *THREE): "a multiple of it in micro-batches",
        ("--pipeline", "2", *THREE): "is not divisible by 3 (1 replicas of 2 stages x 3 micro",
        ("--pipeline", "2", "--devices", "3"): "--pipeline 2 does not divide the 3 devices",
        ("--pipeline", "2", "--state", "8bit"): "give --state float32",
        ("--pipeline", "2", "--sync", "zen", "--config", "ngrams-small"): "give --sync dense",
        ("--pipeline", "2", "--noise-scale"): "needs two replicas of the 2 stages",
        ("--pipeline", "2", "--noise-scale", "--stage", "3"): "give --stage 2",
        ("--pipeline", "2", "--memory", "1GiB"): "--memory is for runs without --pipeline",
        ("--memory", "lots"): "expected bytes, or a text such as '8GiB', got 'lots'",
    }
    folder = uninterrupted.parents[1]
    (folder / "small.txt").write_text("too small")
    mistakes = [[*arguments(text), *options] for options in expected]
    command = [
        sys.executable,
        "-c",
        FORKED,
        SCRIPT,
        json.dumps([list(map(str, m)) for m in mistakes]),
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    for i, message in enumerate(expected.values()):
        output = (folder / f"{i}.txt").read_text()
        assert output.startswith("train_lm.py: error: "), output
        assert message in output
        assert output.count("\n") == 1
