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
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
import _fine_data
import _fine_starts
import _fine_study
import _results
import _rows

FOLDER = _results.ROOT / "runs" / "convergence" / "fine_tuning"
FEW = ("json", "http", "xml", "email")  # packages of made-up sizes


def options() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prepare", action="store_true", help="write windows and starts, and end")
    parser.add_argument("--report", choices=_fine_study.DTYPES, help="write tables, and end")
    parser.add_argument("--size", default="cpu", choices=_fine_study.SCALES, help="of the models")
    parser.add_argument("--modes", nargs="+", default=["full", "lora"], choices=["full", "lora"])
    parser.add_argument("--contenders", nargs="+", default=_fine_study.CONTENDERS)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing later")
    parser.add_argument("--at-once", type=int, default=10, help="processes")
    parser.add_argument("--rows", type=pathlib.Path, help="file of the runs")
    parser.add_argument("--commit", help="of the code, where there is no repository")
    parser.add_argument("--smoke", action="store_true", help="tiny, seconds; keeps nothing")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # this is a worker
    return parser.parse_args()


def prepare(folder: pathlib.Path, size: str) -> None:
    """Writes the windows and the models to start from; of made-up sizes few."""
    few = size != "cpu"
    _fine_starts.prepare(folder, size, _fine_data.texts(FEW * few), part=20 if few else 1)


def rows_of(backend: str) -> pathlib.Path:
    """The record of a platform."""
    return _results.RESULTS / "convergence" / f"fine_tuning_{backend}.jsonl"


def work(chosen: argparse.Namespace, folder: pathlib.Path, contender: str, mode: str) -> None:
    """Runs what is ready, a round at a time, until nothing is or the time is over."""
    import _fine_runs
    import jax

    end, backend = time.monotonic() + 60 * chosen.minutes, jax.default_backend()
    path = chosen.rows or rows_of(backend)
    windows, starts, checksum = _fine_starts.load(folder)
    about = {
        "commit": chosen.commit or _results.commit(),
        **{name: importlib.metadata.version(name) for name in ("jax", "optax")},
        "python": platform.python_version(),
        "corpus": checksum,
        "machine": _results.machine(jax.devices()[0].device_kind),
    }
    scale, dtype = _fine_study.SCALES[chosen.size], _fine_study.DTYPES[backend]
    lanes = None
    while ready := _fine_study.ready(_rows.finished(path, checksum), scale, dtype, contender, mode):
        if time.monotonic() > end:
            return
        lanes = lanes or _fine_runs.Lanes(ready[0], windows, starts, scale.lanes, scale.chunk)
        began = time.perf_counter()
        now = {"date": datetime.datetime.now().isoformat(timespec="seconds")}
        round_of = ready[: scale.lanes]
        for row in lanes.run(round_of):
            _rows.append(path, {**row, **about, **now})
        of = f"{contender} {mode} {ready[0]['steps']} steps: {len(round_of)} runs"
        print(f"{time.strftime('%X')} {of}, {time.perf_counter() - began:.1f} s", flush=True)


def start_workers(chosen: argparse.Namespace) -> int:
    """A process for each optimizer, all parameters before LoRA; returns how many failed."""
    waiting = [
        (contender, mode)
        for mode in chosen.modes
        for contender in chosen.contenders
        if mode == "full" or contender in _fine_study.LORA
    ]
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    running: list[subprocess.Popen[bytes]] = []
    end, failed = time.monotonic() + 60 * chosen.minutes, 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        while running or (waiting and time.monotonic() < end):
            while waiting and len(running) < chosen.at_once and time.monotonic() < end:
                contender, mode = waiting.pop(0)
                left = (end - time.monotonic()) / 60
                of: list[Any] = ["--size", chosen.size, "--contenders", contender, "--modes", mode]
                of += ["--minutes", left, *(["--rows", chosen.rows] if chosen.rows else [])]
                of += ["--commit", chosen.commit] if chosen.commit else []
                command = [sys.executable, __file__, "--one", *map(str, of)]
                running.append(subprocess.Popen(command, env=environment))
            time.sleep(0.2)
            failed += sum(bool(one.poll()) for one in running)
            running = [one for one in running if one.poll() is None]
    finally:
        for worker in running:
            worker.terminate()
    return failed


def main() -> int:
    """Prepares, starts the workers or is one, or reports."""
    chosen = options()
    folder = FOLDER / chosen.size
    if chosen.smoke:
        with tempfile.TemporaryDirectory() as name:
            folder, chosen.size, chosen.commit = pathlib.Path(name), "smoke", "smoke"
            chosen.rows = folder / "rows.jsonl"
            prepare(folder, chosen.size)
            work(chosen, folder, "adamw", "full")
            import _fine_report  # draws, which workers need not

            rows, scale = _rows.finished(chosen.rows), _fine_study.SCALES[chosen.size]
            row = next(iter(rows.values()))  # of all runs of an optimizer that does not run here
            while ready := _fine_study.ready(rows, scale, "float32", "came", "full"):
                rows |= {_rows.key_of(config): row for config in ready}
            print("\n\n".join(_fine_report.parts(rows, scale, "float32", folder / "picture.png")))
    elif chosen.prepare:
        prepare(folder, chosen.size)
    elif chosen.report:
        import _fine_report

        _fine_report.write(_rows.finished(rows_of(chosen.report)), chosen.report)
    elif chosen.one:
        work(chosen, folder, chosen.contenders[0], chosen.modes[0])
    else:
        return start_workers(chosen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
