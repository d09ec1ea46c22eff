"""Fine-tunes what the comparison needs and what is not there yet, from two pre-trained models.

Each finished run is a line of results/convergence/fine_tuning_<platform>.jsonl. A process trains
the runs of an optimizer side by side; the command can be stopped at any moment and given again, and
loses no more than one round of runs. --prepare writes what the others read, the windows and the
models to start from, to runs/convergence/fine_tuning/.

  python benchmarks/convergence/fine_tuning.py --prepare    # one core, 6 minutes
  python benchmarks/convergence/fine_tuning.py              # one GPU, minutes
  python benchmarks/convergence/fine_tuning.py --report gpu
  python benchmarks/convergence/fine_tuning.py --smoke      # tiny, seconds; keeps nothing
"""

import argparse
import os
import pathlib
import sys
import tempfile
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
import _fine_data
import _fine_starts
import _fine_study
import _results
import _rows
import run

FOLDER = run.CLAIMS / "fine_tuning" / "cpu"
FEW = ("json", "http", "xml", "email")  # packages of the smoke


def options() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prepare", action="store_true", help="write windows and starts, and end")
    parser.add_argument("--report", choices=_fine_study.DTYPES, help="write tables, and end")
    parser.add_argument("--contenders", nargs="+", default=_fine_study.CONTENDERS)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing later")
    parser.add_argument("--at-once", type=int, default=10, help="processes")
    parser.add_argument("--rows", type=pathlib.Path, help="file of the runs")
    parser.add_argument("--smoke", action="store_true", help="tiny, seconds; keeps nothing")
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)  # this is a worker
    return parser.parse_args()


def rows_of(backend: str) -> pathlib.Path:
    """The record of a platform."""
    return _rows.FOLDER / f"fine_tuning_{backend}.jsonl"


def work(chosen: argparse.Namespace, folder: pathlib.Path, scale: _fine_study.Scale) -> None:
    """Runs round by round what is ready, of optimizers that no other process has."""
    import _fine_runs
    import _runs
    import jax

    backend, end = jax.default_backend(), time.monotonic() + 60 * chosen.minutes
    path, commit = chosen.rows or rows_of(backend), _results.commit()
    windows, starts, checksum = _fine_starts.load(folder)
    for name, mode in _fine_study.programs(scale, chosen.contenders):
        of, lanes = (scale, _fine_study.DTYPES[backend], name, mode), None
        with run.claimed(f"fine_tuning_{scale.size}_{name}_{mode}") as mine:
            while mine and time.monotonic() < end:
                ready = _fine_study.ready(_rows.finished(path, checksum), *of)[: scale.lanes]
                if not ready:
                    break
                lanes = lanes or _fine_runs.Lanes(ready[0], windows, starts, scale)
                began = time.perf_counter()
                for row in lanes.run(ready):
                    _rows.append(path, {**row, "commit": commit, **_runs.about(checksum)})
                took = f"{len(ready)} runs, {time.perf_counter() - began:.1f} s"
                print(time.strftime("%X"), name, mode, ready[0]["steps"], took, flush=True)


def smoke(chosen: argparse.Namespace, folder: pathlib.Path) -> None:
    """Prepares, runs AdamW, and reports it beside CAME, all of whose runs are made up."""
    import _fine_report

    scale = _fine_study.SCALES["smoke"]
    chosen.rows, chosen.contenders = folder / "rows.jsonl", ["adamw"]
    _fine_starts.prepare(folder, scale.size, _fine_data.texts(FEW), part=20)
    work(chosen, folder, scale)
    rows = _rows.finished(chosen.rows)
    row = next(iter(rows.values()))
    while ready := _fine_study.ready(rows, scale, "float32", "came", "full"):
        rows |= {_rows.key_of(config): row for config in ready}
    print("\n\n".join(_fine_report.parts(rows, scale, "float32", folder / "picture.png")))


def main() -> int:
    """Prepares, reports, starts the workers or is one."""
    chosen = options()
    if chosen.smoke:
        with tempfile.TemporaryDirectory() as folder:
            smoke(chosen, pathlib.Path(folder))
    elif chosen.prepare:
        _fine_starts.prepare(FOLDER, "cpu", _fine_data.texts(), part=1)
    elif chosen.report:
        import _fine_report  # draws, which workers need not

        _fine_report.write_of(chosen.report, rows_of(chosen.report))
    elif chosen.core is not None:
        work(chosen, FOLDER, _fine_study.SCALES["cpu"])
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        return run.start_workers(chosen.at_once)
    return 0


if __name__ == "__main__":
    sys.exit(main())
