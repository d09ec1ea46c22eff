"""Fine-tunes what the comparison needs and what is not there yet, from two pre-trained models.

Each finished run is a line of results/convergence/fine_tuning_<platform>.jsonl. A process for each
optimizer trains its runs side by side; the command can be stopped at any moment and given again,
and loses no more than one round of runs. --prepare writes what the others read, the windows and the
models to start from, to runs/convergence/fine_tuning/.

  python benchmarks/convergence/fine_tuning.py --prepare    # one core, 6 minutes
  python benchmarks/convergence/fine_tuning.py              # one GPU, minutes
  python benchmarks/convergence/fine_tuning.py --report gpu
  python benchmarks/convergence/fine_tuning.py --smoke      # tiny, seconds; keeps nothing
"""

import argparse
import datetime
import importlib.metadata
import os
import pathlib
import platform
import signal
import subprocess
import sys
import tempfile
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
import _fine_data
import _fine_starts
import _fine_study
import _results
import _rows

FOLDER = _results.ROOT / "runs" / "convergence" / "fine_tuning"
SMOKE = {"train": 60, "validation": 20, "held_out": 20}


def options() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prepare", action="store_true", help="write windows and starts, and end")
    parser.add_argument("--size", default="cpu", choices=_fine_study.SCALES, help="of the models")
    parser.add_argument("--modes", nargs="+", default=["full", "lora"], choices=["full", "lora"])
    parser.add_argument("--contenders", nargs="+", default=_fine_study.CONTENDERS)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="then stop")
    parser.add_argument("--at-once", type=int, default=10, help="processes")
    parser.add_argument("--rows", type=pathlib.Path, help="file of the runs")
    parser.add_argument("--commit", help="of the code, where there is no repository")
    parser.add_argument("--smoke", action="store_true", help="tiny, seconds; keeps nothing")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # this is a worker
    return parser.parse_args()


def prepare(folder: pathlib.Path, size: str) -> None:
    """Writes the windows and the starts; of made-up sizes from four packages."""
    if size == "cpu":
        _fine_starts.prepare(folder, size, _fine_data.texts())
    else:
        few = _fine_data.texts(("json", "http", "xml", "email"))
        _fine_starts.prepare(folder, size, few, sizes=SMOKE)


def work(chosen: argparse.Namespace, folder: pathlib.Path, contender: str, mode: str) -> None:
    """Runs what is ready, a round at a time, until nothing is or the time is over."""
    import _fine_runs
    import jax

    end = time.monotonic() + 60 * chosen.minutes
    device, backend = jax.devices()[0].device_kind, jax.default_backend()
    scale = _fine_study.SCALES[chosen.size]
    dtype = _fine_study.DTYPES[backend]
    path = chosen.rows or _results.RESULTS / "convergence" / f"fine_tuning_{backend}.jsonl"
    windows, starts, checksum = _fine_starts.load(folder, scale.size)
    about = {
        "commit": chosen.commit or _results.commit(),
        "jax": importlib.metadata.version("jax"),
        "optax": importlib.metadata.version("optax"),
        "python": platform.python_version(),
        "corpus": checksum,
        "machine": _results.machine(device),
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
    }
    lanes = None
    while ready := _fine_study.ready(_rows.finished(path, checksum), scale, dtype, contender, mode):
        if time.monotonic() > end:
            return
        lanes = lanes or _fine_runs.Lanes(ready[0], windows, starts, scale.lanes, scale.chunk)
        began = time.perf_counter()
        rows = lanes.run(ready[: scale.lanes], about)
        for row in rows:
            _rows.append(path, row)
        took = time.perf_counter() - began
        steps = ready[0]["steps"]
        print(
            f"{time.strftime('%X')} {contender} {mode} {steps} steps: {len(rows)} runs, "
            f"{took:.1f} s",
            flush=True,
        )


def start_workers(chosen: argparse.Namespace) -> int:
    """A process for each optimizer, all parameters first; returns how many failed."""
    waiting = [
        (contender, mode)
        for mode in chosen.modes
        for contender in chosen.contenders
        if mode == "full" or contender in _fine_study.LORA
    ]
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    running: list[subprocess.Popen] = []
    end, failed = time.monotonic() + 60 * chosen.minutes, 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        while running or (waiting and time.monotonic() < end):
            while waiting and len(running) < chosen.at_once and time.monotonic() < end:
                contender, mode = waiting.pop(0)
                left = (end - time.monotonic()) / 60
                command = [sys.executable, __file__, "--one", "--size", chosen.size]
                command += ["--contenders", contender, "--modes", mode, "--minutes", str(left)]
                command += ["--rows", str(chosen.rows)] if chosen.rows else []
                command += ["--commit", chosen.commit] if chosen.commit else []
                running.append(subprocess.Popen(command, env=environment))
            time.sleep(0.2)
            failed += sum(bool(one.poll()) for one in running)
            running = [one for one in running if one.poll() is None]
    finally:
        for worker in running:
            worker.terminate()
    return failed


def main() -> int:
    """Prepares, starts the workers, or is one."""
    chosen = options()
    if chosen.smoke:
        with tempfile.TemporaryDirectory() as name:
            folder, chosen.size, chosen.commit = pathlib.Path(name), "smoke", "smoke"
            chosen.rows = folder / "rows.jsonl"
            prepare(folder, chosen.size)
            work(chosen, folder, "adafactor_plain", "full")
        return 0
    folder = FOLDER / chosen.size
    if chosen.prepare:
        prepare(folder, chosen.size)
    elif chosen.one:
        work(chosen, folder, chosen.contenders[0], chosen.modes[0])
    else:
        return start_workers(chosen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
