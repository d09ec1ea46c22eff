"""Local processes that find each other as under SLURM: by its variables, which JAX reads."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[2]
SECONDS = 300  # until a process counts as hung, on a busy machine


def job_id():
    """A number for SLURM_JOB_ID of which JAX makes a free port."""
    for port in range(2**16 - 1 - os.getpid() % 2000, 2**16 - 2**12, -1):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", port))
            return port - (2**16 - 2**12)
    raise OSError("no free port")


def job(count):
    """What sbatch sets for a job of ``count`` tasks on this machine, and srun for its step."""
    return {
        "SLURM_JOB_ID": str(job_id()),
        "SLURM_NTASKS": str(count),
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }


class Processes:
    """Processes of one command, each the leader of a group; their output goes to files."""

    def __init__(self, folder):
        self.folder = folder
        self._started = []

    def start(self, command, **env):
        """Starts one process; returns it, with its output in ``.log``."""
        log = self.folder / f"output-{len(self._started)}.txt"
        with log.open("w") as file:
            process = subprocess.Popen(
                [str(part) for part in command],
                env=os.environ | env,
                cwd=self.folder,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        process.log = log
        self._started.append(process)
        return process

    def start_python(self, count, *arguments, **env):
        """Starts Python as the ``count`` processes of a job; without a job if that is None."""
        command = [sys.executable, *arguments]
        if count is None:
            return [self.start(command, **env)]
        env |= job(count)
        numbers = [str(i) for i in range(count)]
        return [self.start(command, **env, SLURM_PROCID=i, SLURM_LOCALID=i) for i in numbers]

    def kill(self):
        """Ends all that still runs, with its children."""
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def finish(process, seconds=SECONDS):
    code = process.wait(seconds)
    return code, process.log.read_text(errors="replace")


def output_of(process, code=0, seconds=SECONDS):
    """The output of a process that ends with the code."""
    found, output = finish(process, seconds)
    assert found == code, output
    return output


def wait_until(condition, processes, seconds=SECONDS):
    """Waits until the condition holds, while all processes run."""
    end = time.monotonic() + seconds
    while not condition():
        ended = [finish(process) for process in processes if process.poll() is not None]
        assert not ended, ended
        assert time.monotonic() < end, [process.log.read_text() for process in processes]
        time.sleep(0.02)
