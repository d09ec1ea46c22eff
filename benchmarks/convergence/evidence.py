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
import _rows
import _sizes
import _studies
import _tables
import report
import run
from _tasks import Corpus


def main() -> int:
    """Runs what is missing and compares, or is a worker."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="processes, one core each")
    parser.add_argument("--smoke", action="store_true", help="tiny, seconds; keeps nothing")
    parser.add_argument("--rows", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)  # this is a worker
    chosen = parser.parse_args()
    chosen.size, chosen.corpus, chosen.minutes = "smoke" if chosen.smoke else "cpu", None, None
    with tempfile.TemporaryDirectory() as folder:
        if chosen.rows is None:
            of = pathlib.Path(folder) if chosen.smoke else run.CLAIMS
            chosen.rows = of / f"rerun_{chosen.size}.jsonl"
            sys.argv += ["--rows", str(chosen.rows)]
        return again(chosen)


def again(chosen: argparse.Namespace) -> int:
    """Runs what is missing, then compares."""
    size = chosen.size
    if chosen.smoke:
        known = _made_up.rows("smoke", ["tuning", "final"], ["next_token"], _studies.RERUN)
    else:
        known = _rows.finished(_rows.path(size))
    configs = [_studies.rerun(known, size, name) for name in _studies.RERUN]

    def plans(rows: dict[str, _rows.Row]) -> list[_studies.Plan]:
        return [_studies.plan(f"rerun {c['contender']}", rows, [c], 1) for c in configs]

    if chosen.core is not None:
        if not chosen.smoke:
            os.sched_setaffinity(0, {chosen.core})
        run.work(chosen, plans)
        return 0
    if code := run.start_workers(chosen.workers):
        return code
    text_here = Corpus(None, _sizes.SIZES[size].context).checksum
    fresh = _rows.finished(chosen.rows, text_here)
    text = _tables.rerun(known, fresh, size)
    print(text)
    if not chosen.smoke:
        about = f"The comparison itself: [{size}.md]({size}.md)."
        _tables.write(f"rerun_{size}", "Run again", fresh, about, text, script="evidence")
        report.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
