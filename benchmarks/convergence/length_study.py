"""Trains what the studies of long runs need and what is not there yet.

Lengths: two tasks at 300, 1,000, 3,000 and 10,000 steps, the shorter length first. Formats: state
and parameters in few bits at 3,000 steps, once that length is tuned in float32. Rows go where
run.py's go. The command can be stopped at any moment and given again: finished runs stay, and one
that was under way goes on from its last minute. report.py says what is missing.

  python benchmarks/convergence/length_study.py               # one core, for days
  taskset -c 1 python benchmarks/convergence/length_study.py  # beside another one on core 0
  python benchmarks/convergence/length_study.py --minutes 60  # stops, saved, after an hour
  python benchmarks/convergence/length_study.py --smoke       # tiny, seconds; keeps nothing
"""

import argparse
import os
import pathlib
import sys
import tempfile

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
import _long
import _rows
import run
from _studies import Plan, Rows


def main() -> None:
    """Runs what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, help="stop, and save, after these")
    parser.add_argument("--corpus", type=pathlib.Path, help="text; the standard library's source")
    parser.add_argument("--rows", type=pathlib.Path, help="file of the runs")
    parser.add_argument("--smoke", action="store_true", help="tiny, seconds; keeps nothing")
    chosen = parser.parse_args()
    chosen.size = "smoke" if chosen.smoke else "cpu"
    chosen.rows = chosen.rows or _rows.path(chosen.size)
    # This process and the threads that jax will start.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()
    import jax

    jax.config.update("jax_platforms", "cpu")

    def plans(rows: Rows) -> list[Plan]:
        every = list(_long.plans(rows, chosen.size))
        few = [plan for plan in every if plan.name.endswith("next_token adafactor_momentum")]
        return few if chosen.smoke else every

    with tempfile.TemporaryDirectory() as folder:
        if chosen.smoke:
            chosen.rows = pathlib.Path(folder) / "rows.jsonl"
        run.work(chosen, plans, with_parent=False)


if __name__ == "__main__":
    main()
