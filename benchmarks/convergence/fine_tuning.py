"""Fine-tunes what the comparison needs and what is not there yet, from two pre-trained models.

Each finished run is a line of results/convergence/fine_tuning_<platform>.jsonl. The command can be
stopped at any moment and given again. --prepare writes what the runs read, the windows and the
models to start from, to runs/convergence/fine_tuning/.

  python benchmarks/convergence/fine_tuning.py --prepare    # one core, 6 minutes
  python benchmarks/convergence/fine_tuning.py              # one GPU
  python benchmarks/convergence/fine_tuning.py --stored --workers 1    # one core, 8 minutes
  python benchmarks/convergence/fine_tuning.py --stored --report cpu
  python benchmarks/convergence/fine_tuning.py --report gpu
  python benchmarks/convergence/fine_tuning.py --smoke      # tiny, seconds; keeps nothing
"""

import argparse
import functools
import os
import pathlib
import sys
import tempfile

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
import _fine_data
import _fine_runs
import _fine_study
import _rows
import jax
import run

FEW = ("json", "http", "xml", "email")  # packages of the smoke


def work(chosen: argparse.Namespace, folder: pathlib.Path, runs: float = float("inf")) -> None:
    """Runs what is missing."""
    all_of = _fine_study.stored_plans if chosen.stored else _fine_study.plans
    plans = functools.partial(all_of, size=chosen.size, backend=jax.default_backend())
    run.work(chosen, plans, runs=runs, trainer=_fine_runs.Trainer(folder, chosen.size))


def report(folder: pathlib.Path, backend: str, stored: bool = False) -> None:
    """Of a platform's record; its picture goes into ``folder``."""
    import _fine_report  # draws, which workers need not

    if stored:
        _fine_report.write_stored(backend)
    else:
        _fine_report.write_to(folder, backend)


def main() -> int:
    """Prepares, reports, starts the workers or is one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prepare", action="store_true", help="write windows and starts, and end")
    parser.add_argument("--report", choices=_fine_study.DTYPES, help="write tables, and end")
    parser.add_argument("--stored", action="store_true", help="adapters on stored parameters alone")
    parser.add_argument("--minutes", type=float, help="stop, and save, after these")
    parser.add_argument("--workers", type=int, default=10, help="processes")
    parser.add_argument("--smoke", action="store_true", help="tiny, seconds; keeps nothing")
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)  # this is a worker
    chosen, folder = parser.parse_args(), run.CLAIMS / "fine_tuning"
    chosen.size = "smoke" if chosen.smoke else "cpu"
    if chosen.report:
        report(_rows.FOLDER, chosen.report, chosen.stored)
    elif chosen.prepare:
        _fine_runs.prepare(folder, chosen.size, _fine_data.texts())
    elif chosen.smoke:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            chosen.rows = folder / "rows.jsonl"
            _fine_runs.prepare(folder, chosen.size, _fine_data.texts(FEW), part=20)
            work(chosen, folder, runs=2)
            chosen.stored = True
            work(chosen, folder, runs=2)
            report(folder, "cpu")
    elif chosen.core is not None:
        chosen.rows = _fine_study.record(jax.default_backend(), chosen.stored)
        work(chosen, folder)
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        return run.start_workers(chosen.workers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
