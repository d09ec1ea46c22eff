"""Runs every benchmark with --smoke, and further commands of README.md and docs/: two at a time.

  python .ci/commands.py [TEXT]    # those that contain the text

They are forked from one process, which has imported JAX, and share their compiled programs, which
XLA does not optimize: nothing is measured here. Each prints its seconds; one that fails prints its
output, and the exit code is 1. What the tests run is not here: tests/examples/,
tests/test_train_lm.py, tests/test_notebooks.py and tests/test_docs.py.
"""

import importlib.util
import os
import pathlib
import runpy
import shlex
import shutil
import sys
import tempfile
import time
import warnings
from importlib import metadata

# Before JAX reads them. As tests/conftest.py says: older emitters compile in a third of the time.
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    + " --xla_cpu_parallel_codegen_split_count=1"
    + " --xla_cpu_use_fusion_emitters=false"
    * (metadata.version("jaxlib").startswith("0.10.") and not importlib.util.find_spec("libtpu")),
    "JAX_COMPILATION_CACHE_DIR": str(pathlib.Path(__file__).parents[1] / ".jax_cache"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "1",
    "MPLBACKEND": "agg",
}

import matplotlib.pyplot  # noqa: F401
import orbax.checkpoint  # noqa: F401
import rich.console  # noqa: F401

import optax_ext  # noqa: F401
import sharding.cli

ROOT = pathlib.Path(__file__).resolve().parents[1]
BENCHMARKS = sorted(ROOT.glob("benchmarks/[!_]*.py")) + sorted(
    [*ROOT.glob("benchmarks/convergence/[!_]*.py"), *ROOT.glob("benchmarks/peers/[!_]*.py")]
)
COMMANDS = """
python examples/train_lm.py --smoke --steps 10 --compare came,adafactor,adamw --name ci-compare
optax-ext plan --model llama2-7b --optimizer came --master --target v5e:16x16
optax-ext search --model llama2-13b --optimizer came --target h100x64 --batch 4M-tokens
optax-ext search --model llama2-70b --target v5p:4x4x4 --batch 256 --keep pipe=1
optax-ext search --model llama2-7b --target h100x64 --batch 256 --network 3.1 --sync 'qsgd(8)'
optax-ext audit --model gpt2-small --length 256 --target cpu:8 --stage 3
optax-ext check
"""


def all_commands():
    """The commands, those that take longest first."""
    found = [f"python {path.relative_to(ROOT)} --smoke" for path in BENCHMARKS]
    found += COMMANDS.strip().splitlines()
    slow = ("peer_checkpoints", "evidence", "whole_systems", "low_precision_training")
    return sorted(found, key=lambda command: not any(name in command for name in slow))


def run(command):
    """Runs a command in this process, which ends with it."""
    program, *arguments = shlex.split(command)
    if program == "optax-ext":
        sys.argv = [program, *arguments]
        sys.exit(sharding.cli.main())
    script = ROOT / arguments[0]
    sys.argv = [str(script), *arguments[1:]]
    sys.path[0] = str(script.parent)
    runpy.run_path(str(script), run_name="__main__")


def start(command, output):
    """The id of a process that runs the command and writes to a file."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
        run(command)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main():
    """Runs them; returns how many failed."""
    os.chdir(ROOT)
    warnings.filterwarnings("ignore", message=".*fork.*")
    for folder in (*ROOT.glob("runs/ci-*"), *ROOT.glob("runs/*smoke*")):
        shutil.rmtree(folder)
    waiting = [c for c in all_commands() if not sys.argv[1:] or sys.argv[1] in c][::-1]
    if not waiting:
        sys.exit(f"No command contains {sys.argv[1]!r}.")
    running, failed = {}, 0
    while waiting or running:
        while waiting and len(running) < 2:
            command, output = waiting.pop(), tempfile.TemporaryFile("w+")  # noqa: SIM115
            running[start(command, output)] = command, output, time.monotonic()
        pid, status = os.wait()
        command, output, since = running.pop(pid)
        print(f"{time.monotonic() - since:.0f} s  {command}", flush=True)
        if status:
            failed += 1
            output.seek(0)
            print(f"{output.read()}\nfailed: {command}", flush=True)
        output.close()
    return failed


if __name__ == "__main__":
    sys.exit(min(1, main()))
