"""The files of launch/, and examples/train_lm.py as many processes: stopped, killed, resumed.

By default their commands are read, and run with something quick in place of Python.
"""

import functools
import json
import os
import pathlib
import re
import shlex
import signal
import sys
import time

import pytest

from .. import test_train_lm
from ..multiprocess.processes import ROOT, Processes, finish, job, output_of, wait_until

yaml = pytest.importorskip("yaml")

SCRIPT = ROOT / "examples" / "train_lm.py"
STEPS, CHECKPOINT_EVERY = 40, 10
BOUND = 40  # seconds after which no process outlives another, as launch/README.md says


# srun on one node: all tasks of the step, each with its number.
SRUN = """#!/usr/bin/env bash
echo "$@" >> "$CALLS"
while [[ $1 == --* ]]; do shift; done
for ((i = 0; i < SLURM_NTASKS; i++)); do SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & done
for ((i = 0; i < SLURM_NTASKS; i++)); do wait -n || code=$?; done
exit ${code:-0}
"""
# Python, which writes what it should run and ends with the next of CODES.
PYTHON = """#!/usr/bin/env bash
echo "$SLURM_PROCID: $@" >> "$CALLS.tasks"
codes=($CODES)
exit ${codes[$(grep -c train_lm "$CALLS") - 1]}
"""
SPARES = {
    "SPARES": "0",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_JOB_NODELIST": "here",
    "SLURM_NTASKS_PER_NODE": "2",
}


def start_batch(processes, script, *options, python=sys.executable, **env):
    """Starts a batch script as SLURM does, as a job of two tasks."""
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/sh\necho here\n"}.items():
        (processes.folder / name).write_text(text)
        (processes.folder / name).chmod(0o755)
    env |= {"PATH": f"{processes.folder}:{os.environ['PATH']}", "PYTHON": str(python)}
    env |= job(2) | {"CALLS": str(processes.folder / "calls")}
    return processes.start(("bash", ROOT / "launch" / script, *options), **env)


@pytest.mark.parametrize(
    ("script", "codes", "ends", "added", "env"),
    [
        ("slurm.sbatch", "0", 0, "", {}),
        ("slurm.sbatch", "7", 7, "", {}),
        ("slurm_spares.sbatch", "7 1 143", 143, " --peer-checkpoints", SPARES),
        ("slurm_spares.sbatch", "7 7 7", 7, " --peer-checkpoints", SPARES | {"ATTEMPTS": "2"}),
    ],
    ids=["done", "failed", "restarted until stopped", "restarted too often"],
)
def test_a_batch_script_starts_the_command_in_every_task(
    processes, script, codes, ends, added, env
):
    python = processes.folder / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    started = start_batch(processes, script, "--name", "a b", python=python, CODES=codes, **env)
    output = output_of(started, ends)
    tasks = (processes.folder / "calls.tasks").read_text().splitlines()
    command = f"examples/train_lm.py --distributed{added} --name a b"
    attempts = min(len(codes.split()), int(env.get("ATTEMPTS", 100)))
    assert sorted(tasks) == sorted([f"{i}: {command}" for i in (0, 1)] * attempts)
    calls = (processes.folder / "calls").read_text().splitlines()
    assert all("--cpus-per-task=1" in call for call in calls if "train_lm" in call)
    assert ("resumes the run" in output) == (codes == "7")
    assert output.count("training starts again") == attempts - (codes[-3:] == "143" or not added)


def test_slurm_starts_one_process_per_gpu():
    text = (ROOT / "launch" / "slurm.sbatch").read_text()
    requested = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?", text, re.MULTILINE))
    assert requested["ntasks-per-node"] == requested["gpus-per-node"]
    # JAX assigns GPUs by the local task number, so each task must see all GPUs of its node.
    assert not {"gpus-per-task", "gpu-bind"} & set(requested)
    assert requested["signal"].startswith("TERM@")


def options(text, runs, stage):
    return shlex.split(
        f"--smoke --devices 2 --optimizer adamw --data {text} --runs-dir {runs}/runs --name run "
        f"--steps {STEPS} --checkpoint-every {CHECKPOINT_EVERY} --stage {stage}"
    )


rows, column, checkpoints = (
    functools.partial(of, name="run")
    for of in (test_train_lm.rows, test_train_lm.column, test_train_lm.checkpoints)
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, text):
    """The folder of an uninterrupted run: launch/slurm.sbatch, as SLURM runs it."""
    folder = tmp_path_factory.mktemp("slurm")
    processes = Processes(folder)
    try:
        output = output_of(start_batch(processes, "slurm.sbatch", *options(text, folder, 3)))
    finally:
        processes.kill()
    assert output.count("bits per byte on held-out text") == 1  # one process prints
    assert json.loads((folder / "runs" / "run" / "summary.json").read_text())["steps"] == STEPS
    assert len(rows(folder)) == STEPS + 1
    assert "ZeRO stage 3" in (folder / "runs" / "run" / "layout.txt").read_text()
    return folder


@pytest.mark.script
def test_a_stopped_and_killed_run_resumes_in_one_process(tmp_path, text, uninterrupted, processes):
    command = (SCRIPT, "--distributed", *options(text, tmp_path, 2))

    # A signal to one process stops both after the same step.
    both = processes.start_python(2, *command)
    wait_until(lambda: len(rows(tmp_path)) > CHECKPOINT_EVERY // 2, both)
    both[1].send_signal(signal.SIGTERM)
    for process in both:
        output_of(process, 128 + signal.SIGTERM)
    last = len(rows(tmp_path)) - 1
    assert last < STEPS
    assert checkpoints(tmp_path) == [last]

    # One process is killed: the other one ends with an error.
    both = processes.start_python(2, *command)
    wait_until(lambda: checkpoints(tmp_path)[-1] > last, both)
    both[1].kill()
    killed = time.monotonic()
    code, output = finish(both[0], BOUND)
    assert time.monotonic() - killed < BOUND
    assert code not in (0, None), output
    assert f"Resuming from the checkpoint at step {last}." in output
    assert re.search(
        r"^train_lm.py: error: process 0 of 2 ends, most likely because another process was lost .*"
        r"The same command, with as many processes or fewer, resumes from the last checkpoint\.$",
        output,
        re.MULTILINE,
    ), output
    last = checkpoints(tmp_path)[-1]
    assert len(rows(tmp_path)) <= STEPS

    # One process resumes, at another stage.
    (alone,) = processes.start_python(None, SCRIPT, *options(text, tmp_path, 3))
    assert f"Resuming from the checkpoint at step {last}." in output_of(alone)
    want = column(uninterrupted, "loss")
    assert len(want) == STEPS
    assert column(tmp_path, "loss") == pytest.approx(want, rel=1e-4)


@pytest.mark.script
def test_without_a_cluster_the_error_has_one_line(processes):
    (process,) = processes.start_python(None, SCRIPT, "--distributed", "--smoke")
    output = output_of(process, 2)
    assert output.startswith("train_lm.py: error: --distributed found no cluster")
    assert output.count("\n") == 1


def test_jobset_matches_how_jax_finds_processes_and_runs_the_script():
    """JAX takes the parallelism of one indexed job as the count, and the pod's index as the id."""
    text = (ROOT / "launch" / "jobset.yaml").read_text()
    manifests = {manifest["kind"]: manifest for manifest in yaml.safe_load_all(text)}
    spec = manifests["JobSet"]["spec"]
    (replicated,) = spec["replicatedJobs"]
    job_spec = replicated["template"]["spec"]
    assert replicated["replicas"] == 1
    assert job_spec["completionMode"] == "Indexed"
    assert job_spec["parallelism"] == job_spec["completions"] > 1
    assert job_spec["backoffLimit"] > 0  # a lost pod is replaced alone
    # The coordinator's address is POD-0.NAME OF THE JOBSET: by default the headless service.
    assert spec["network"]["enableDNSHostnames"] is True
    assert "subdomain" not in spec["network"]
    # JAX requests its own pod, and the job of the pod, from the API.
    pod = job_spec["template"]["spec"]
    account = manifests["ServiceAccount"]["metadata"]["name"]
    assert pod["serviceAccountName"] == account == manifests["RoleBinding"]["subjects"][0]["name"]
    assert manifests["RoleBinding"]["roleRef"]["name"] == manifests["Role"]["metadata"]["name"]
    allowed = {(rule["resources"][0], rule["verbs"][0]) for rule in manifests["Role"]["rules"]}
    assert allowed == {("pods", "list"), ("jobs", "get")}
    # The pod's container.
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] > 0
    assert pod["restartPolicy"] == "Never"
    python, supervisor, *command = container["command"]
    assert (python, supervisor) == ("python", "examples/supervise.py")
    python, script, *arguments = command
    assert python == "python"
    assert ROOT / script == SCRIPT
    assert {"--distributed", "--peer-checkpoints"} <= set(arguments)
    (runs,) = (part.split("=")[1] for part in arguments if part.startswith("--runs-dir="))
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounts[runs] in volumes
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"


def test_the_readme_describes_every_file():
    readme = (ROOT / "launch" / "README.md").read_text()
    for path in pathlib.Path(ROOT / "launch").glob("[!R]*"):
        assert f"launch/{path.name}" in readme
    assert "--worker=all" in readme
    assert str(BOUND) in readme
