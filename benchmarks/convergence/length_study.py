"""Trains what the studies of long runs need and what is not there yet.

Lengths: two tasks at 300, 1,000, 3,000 and 10,000 steps, the shorter length first. Formats: state
and parameters in few bits at 3,000 steps, once that length is tuned in float32. Rows go where
run.py's go. The command can be stopped at any moment and given again: finished runs stay, and one
that was under way goes on from its last minute.

  python benchmarks/convergence/length_study.py               # one core, for days
  taskset -c 1 python benchmarks/convergence/length_study.py  # beside another one on core 0
  python benchmarks/convergence/length_study.py --minutes 60  # stops, saved, after an hour
  python benchmarks/convergence/length_study.py --progress    # what is there and what it takes
  python benchmarks/convergence/length_study.py --study formats
  python benchmarks/convergence/length_study.py --smoke       # tiny, seconds; keeps nothing
"""

import argparse
import os
import pathlib
import sys
import tempfile

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
import _format_study
import _lengths
import _results
import _rows
import _studies
import run

STUDIES = ("lengths", "formats")


def options() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--study", nargs="+", default=list(STUDIES), choices=STUDIES)
    parser.add_argument("--lengths", nargs="+", type=int, choices=_lengths.LENGTHS["cpu"])
    parser.add_argument("--tasks", nargs="+", default=_lengths.TASKS, choices=_lengths.TASKS)
    parser.add_argument(
        "--contenders", nargs="+", default=_lengths.CONTESTED, choices=_lengths.CONTESTED
    )
    parser.add_argument("--minutes", type=float, help="stop, and save, after these")
    parser.add_argument("--corpus", type=pathlib.Path, help="text; the standard library's source")
    parser.add_argument("--rows", type=pathlib.Path, help="file of the runs")
    parser.add_argument("--progress", action="store_true", help="print what is there, and end")
    parser.add_argument("--smoke", action="store_true", help="tiny, seconds; keeps nothing")
    chosen = parser.parse_args()
    chosen.size = "smoke" if chosen.smoke else "cpu"
    if chosen.smoke:
        chosen.tasks, chosen.contenders, chosen.lengths = (
            ["next_token"],
            ["adafactor_momentum"],
            None,
        )
    chosen.rows = chosen.rows or _results.RESULTS / "convergence" / f"runs_{chosen.size}.jsonl"
    return chosen


def one_core() -> None:
    """This process and the threads that jax will start."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()
    import jax

    jax.config.update("jax_platforms", "cpu")


def in_order(
    lengths: list[_studies.Plan], formats: list[_studies.Plan], steps: int
) -> list[_studies.Plan]:
    """Formats behind the length that tunes them and before the longer ones."""
    first = [plan for plan in lengths if int(plan.name.split()[0]) <= steps]
    return [*first, *formats, *lengths[len(first) :]]


def main() -> None:
    """Runs what is missing."""
    chosen = options()
    one_core()
    asked = {
        "lengths": tuple(chosen.lengths) if chosen.lengths else None,
        "tasks": tuple(chosen.tasks),
        "contenders": tuple(chosen.contenders),
    }

    def plans(rows: dict[str, _rows.Row]) -> list[_studies.Plan]:
        lengths: list[_studies.Plan] = []
        formats: list[_studies.Plan] = []
        if "lengths" in chosen.study:
            print(_lengths.progress(rows, chosen.size, **asked)[-1], flush=True)
            lengths = list(_lengths.plans(rows, chosen.size, **asked))
        if "formats" in chosen.study:
            formats = list(_format_study.plans(rows, chosen.size))
        return in_order(lengths, formats, _format_study.STEPS[chosen.size])

    if chosen.progress:
        print("\n".join(_lengths.progress(_rows.finished(chosen.rows), chosen.size, **asked)))
        return
    with tempfile.TemporaryDirectory() as folder:
        if chosen.smoke:
            chosen.rows = pathlib.Path(folder) / "rows.jsonl"
        run.work(chosen, plans, with_parent=False)


if __name__ == "__main__":
    main()
