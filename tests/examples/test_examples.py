"""The small files of examples/: each runs as its docstring says, and its loss falls."""

import re
import socket

import pytest

from ..flax_nnx import needs_nnx
from ..multiprocess.processes import ROOT, output_of, wait_until

pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")

EXAMPLES = ROOT / "examples"
NAMES = ("lost_time", "many_hosts", "nnx_model", "scanned_stack", "supervise", "zero_checkpoint")


def losses(output):
    """The printed losses by step."""
    return {int(i): float(x) for i, x in re.findall(r"^step (\d+): loss (\S+)", output, re.M)}


def run(processes, name, *options):
    return output_of(*processes.start_python(None, EXAMPLES / f"{name}.py", *options))


@pytest.mark.parametrize("name", NAMES)
def test_example_is_short_and_says_how_to_run_it(name):
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
    assert len(lines) <= 80
    assert any(line.startswith(f"  python examples/{name}.py") for line in lines)


@pytest.mark.script
@pytest.mark.parametrize("name", ["scanned_stack", pytest.param("nnx_model", marks=needs_nnx)])
def test_loss_falls(processes, name):
    found = list(losses(run(processes, name)).values())
    assert len(found) > 3
    assert found[-1] < 0.6 * found[0]


@pytest.mark.script
def test_checkpoint_resumes_at_another_stage_and_number_of_devices(processes):
    expected = losses(run(processes, "zero_checkpoint", "--folder", "one", "--steps", "40"))
    assert list(expected) == [10, 20, 30, 40]
    assert expected[40] < 0.7 * expected[10]

    first = run(processes, "zero_checkpoint", "--folder", "two", "--steps", "20")
    options = ("--folder", "two", "--steps", "40", "--stage", "3", "--devices", "4")
    second = run(processes, "zero_checkpoint", *options)
    assert "Resumed at step 20, at stage 3 on 4 devices." in second
    assert list(losses(second)) == [30, 40]
    assert losses(first) | losses(second) == pytest.approx(expected, rel=1e-3)


@pytest.mark.script
def test_two_processes_train_as_one(processes):
    expected = losses(run(processes, "many_hosts"))
    assert expected[50] < 0.6 * expected[10]

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        coordinator = f"localhost:{probe.getsockname()[1]}"
    options = ("--distributed", "--coordinator", coordinator, "--processes", "2", "--id")
    command = (EXAMPLES / "many_hosts.py", *options)
    both = [processes.start_python(None, *command, i) for i in (0, 1)]
    first, second = (output_of(process) for (process,) in both)
    assert "processes: 2, devices: 8" in first
    assert losses(first) == pytest.approx(expected, rel=1e-3)
    assert "step" not in second  # one process prints


SUPERVISOR = (EXAMPLES / "supervise.py", "--delay", "0", "--restarts", "3")


def supervised(processes, tmp_path, last):
    """A command that notes each start; it fails twice and then ends as told."""
    script = tmp_path / "script.sh"
    script.write_text(f"echo start >> starts; (($(wc -l < starts) < 3)) && kill -9 $$\n{last}\n")
    (process,) = processes.start_python(None, *SUPERVISOR, "bash", script)
    return process


@pytest.mark.parametrize(
    ("last", "code", "starts"),
    [("exit 0", 0, 3), ("exit 2", 2, 3), ("exit 143", 143, 3), ("exit 1", 1, 4)],
)
def test_supervisor_restarts_until_the_end(processes, tmp_path, last, code, starts):
    output_of(supervised(processes, tmp_path, last), code)
    assert (tmp_path / "starts").read_text().count("start") == starts


def test_supervisor_passes_a_stop_on(processes, tmp_path):
    trap = "trap 'exit 7' TERM; touch ready; while true; do sleep 0.05; done"
    process = supervised(processes, tmp_path, trap)
    wait_until((tmp_path / "ready").exists, [process])
    process.terminate()
    output_of(process, 7)
    assert (tmp_path / "starts").read_text().count("start") == 3
