"""Trains GPT-2 small with AdamW, CAME, Adafactor and 8-bit CAME on one GPU.

It reports loss, tokens per second, and the peak of memory that the device reports; each run has a
process of its own, so that the peak is its own. The text is that of the other studies, 16 million
bytes a run. The command can be stopped at any moment and given again: it goes on from the last
minute, as long as runs/ is there.

  python benchmarks/convergence/gpt2_small.py --minutes 8   # starts nothing that it cannot save
  python benchmarks/convergence/gpt2_small.py --report      # writes results/ from what is there
  python benchmarks/convergence/gpt2_small.py --smoke       # tiny, on any device; keeps nothing
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
import _gpt2
import _results
import _rows
import report
import run

LEAST = 1.0  # minutes that are worth a start


def options() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="stop, and save, after these")
    parser.add_argument("--corpus", type=pathlib.Path, help="text; the standard library's source")
    parser.add_argument("--rows", type=pathlib.Path, help="file of the runs")
    parser.add_argument("--report", action="store_true", help="write the table, and end")
    parser.add_argument("--smoke", action="store_true", help="tiny, seconds; keeps nothing")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # a run's process
    chosen = parser.parse_args()
    chosen.size = "smoke_gpt2" if chosen.smoke else "gpt2_small"
    chosen.rows = chosen.rows or _results.RESULTS / "convergence" / f"runs_{chosen.size}.jsonl"
    return chosen


def wanted(chosen: argparse.Namespace, rows: dict[str, _rows.Row]) -> list:
    """Plans; two of --smoke."""
    found = list(_gpt2.plans(rows, chosen.size))
    return found[:2] if chosen.smoke else found


def one_run(chosen: argparse.Namespace) -> None:
    """Trains one run in this process, as far as the time goes."""
    import jax

    programs = _results.ROOT / "runs" / "convergence" / "programs"
    jax.config.update("jax_compilation_cache_dir", str(programs))
    run.work(chosen, lambda rows: wanted(chosen, rows), with_parent=False, runs=1, speed=True)


def all_runs(chosen: argparse.Namespace) -> int:
    """A process for each run, until all are there, the time is over or one fails."""
    end = time.monotonic() + 60 * chosen.minutes
    while any(plan.ready for plan in wanted(chosen, _rows.finished(chosen.rows))):
        left = (end - time.monotonic()) / 60
        if left < LEAST:
            break
        command = [sys.executable, __file__, "--one", "--minutes", f"{left:.3f}"]
        command += ["--rows", str(chosen.rows), *(["--smoke"] if chosen.smoke else [])]
        command += ["--corpus", str(chosen.corpus)] if chosen.corpus else []
        code = subprocess.run(command, check=False).returncode
        if code:
            return code
    return 0


def write(chosen: argparse.Namespace) -> None:
    """Prints the table, and keeps it at whole size."""
    rows = _rows.finished(chosen.rows)
    text = _gpt2.report(rows, chosen.size)
    print(text)
    if rows and not chosen.smoke:
        about = (
            f"{report.where(rows)} One seed. Loss in nats on 512 held-out windows, at the best of "
            "the learning rates that were run; speed and memory are of that run. Tokens per second "
            "are of training alone, the median twentieth of the run. Peak memory is that which the "
            "device reports for the process of the run, activations included."
        )
        title = "GPT-2 small: loss, speed and memory"
        name = "convergence/gpt2_small"
        _results.write(name, title, about, text, script=name)


def main() -> int:
    """Runs what is missing, or is the process of a run."""
    chosen = options()
    if chosen.one:
        one_run(chosen)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        if chosen.smoke:
            chosen.rows = pathlib.Path(folder) / "rows.jsonl"
        code = 0 if chosen.report else all_runs(chosen)
        write(chosen)
    return code


if __name__ == "__main__":
    sys.exit(main())
