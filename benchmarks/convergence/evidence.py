"""Runs the heart of the comparison again and draws all of its report anew.

Next token; AdamW, Adafactor, CAME, LAMB and Muon, each in its best known configuration; one seed
that no other run has. It says whether they agree with the rows that are committed, and draws the
whole report from those. What is finished is kept in runs/convergence/ until ``make clean``.

  python benchmarks/convergence/evidence.py           # two cores, 4 minutes
  python benchmarks/convergence/evidence.py --smoke   # tiny, seconds; prints only
"""

import argparse
import os
import pathlib
import sys
import tempfile

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
import _made_up
import _results
import _rows
import _sizes
import _studies
import _tables
import report
import run
from _tasks import Corpus

SIZE = "cpu"


def main() -> int:
    """Starts the workers and reports, or is a worker."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="processes, one core each")
    parser.add_argument("--smoke", action="store_true", help="tiny, seconds; keeps nothing")
    parser.add_argument("--rows", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)  # this is a worker
    chosen = parser.parse_args()
    chosen.size, chosen.corpus, chosen.minutes = "smoke" if chosen.smoke else SIZE, None, None
    if chosen.smoke and chosen.rows is None:
        with tempfile.TemporaryDirectory() as folder:
            sys.argv += ["--rows", f"{folder}/rerun.jsonl"]
            chosen.rows = pathlib.Path(folder) / "rerun.jsonl"
            return again(chosen)
    chosen.rows = chosen.rows or run.CLAIMS / f"rerun_{chosen.size}.jsonl"
    return again(chosen)


def again(chosen: argparse.Namespace) -> int:
    """Runs what is missing, then compares."""
    if chosen.smoke:
        known = _made_up.rows("smoke", ["tuning", "final"], ["next_token"], _studies.RERUN)
    else:
        known = _rows.finished(report.FOLDER / f"runs_{chosen.size}.jsonl")

    def plans(rows: dict[str, _rows.Row]) -> list[_studies.Plan]:
        return [_studies.rerun(known, rows, chosen.size, name) for name in _studies.RERUN]

    if chosen.core is not None:
        if not chosen.smoke:
            os.sched_setaffinity(0, {chosen.core})
        run.work(chosen, plans)
        return 0
    code = run.start_workers(chosen.workers)
    if code:
        return code
    text_here = Corpus(None, _sizes.SIZES[chosen.size].context).checksum
    fresh = _rows.finished(chosen.rows, text_here)
    text = _tables.rerun(known, fresh, chosen.size)
    print(text)
    if not chosen.smoke:
        _results.write(
            f"convergence/rerun_{chosen.size}",
            "Run again",
            f"{report.where(fresh)} The comparison itself: [{chosen.size}.md]({chosen.size}.md).",
            text,
            script="convergence/evidence",
        )
        if known:
            report.write(known, chosen.size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
