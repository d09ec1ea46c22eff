"""Tables and pictures of the comparison of optimizers, from the rows that run.py wrote.

It takes what is there, and says what is missing.

  python benchmarks/convergence/report.py --size cpu    # writes benchmarks/results/convergence/
  python benchmarks/convergence/report.py --smoke       # of made-up rows, prints only
"""

import argparse
import json
import pathlib
import sys
import tempfile
from collections import Counter
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
import _format_report
import _format_study
import _length_report
import _lengths
import _made_up
import _plots
import _results
import _rows
import _sizes
import _studies
import _summary
import _tables
from _contenders import CONTENDERS
from _tasks import TASKS

METHOD = "[benchmarks/convergence](../../convergence/README.md)"
FOLDER = _results.RESULTS / "convergence"


def where(rows: _summary.Rows) -> str:
    """Which machines, commits and text the rows come from."""

    def all_of(name: str) -> str:
        return ", ".join(sorted({str(row[name]) for row in rows.values() if name in row}))

    hours = sum(row["cpu_seconds"] for row in rows.values()) / 3600
    commits = Counter(row["commit"] for row in rows.values()).most_common()
    of_commits = ", ".join(f"{name} ({number} runs)" for name, number in commits)
    return (
        f"{len(rows)} runs, {hours:.1f} hours of CPU time, on {all_of('machine')}; commits "
        f"{of_commits}, jax {all_of('jax')}, optax {all_of('optax')}, Python {all_of('python')}, "
        f"checksum of the text {all_of('corpus')}."
    )


def times(size: str, folder: pathlib.Path) -> dict[str, Any]:
    """What step_ratios.py measured; without ratios if it has not."""
    path = folder / f"time_{size}.json"
    return json.loads(path.read_text()) if path.exists() else {"ratios": {}}


def parts(
    rows: _summary.Rows, size: str, folder: pathlib.Path, measured: dict[str, Any]
) -> list[str]:
    """The report's parts in order; draws its pictures into ``folder``."""
    every = {task: _summary.finals(rows, size, task, list(CONTENDERS)) for task in TASKS}
    found = {task: contenders for task, contenders in every.items() if contenders}
    out = []
    todo = _tables.missing(rows, size, list(TASKS))
    if todo:
        out += ["**Not finished**: what is missing is listed at the end."]
    if found:
        _plots.finals(found, folder / f"finals_{size}.png")
        _plots.curves(found, folder / f"curves_{size}.png")
        out += [
            "## Final losses",
            "Cross entropy in nats on 512 held-out windows, lower is better. Each mark is a seed, "
            "each bar a mean; the line is AdamW's. Differences are taken seed by seed; the width "
            "of their intervals comes from all contenders together (what is left beside the means "
            "of contenders and of seeds). One that has 0 in it does not show a difference. They "
            "leave out that hyperparameters were chosen on one other seed, by the same windows. "
            "Steps to AdamW's loss are read from the curves, which have fewer windows.",
            f"![Final losses](finals_{size}.png)",
        ]
        if measured["ratios"]:
            out += [f"Time of a training step: {measured['about']}"]
        else:
            out += ["Time of a training step: not measured yet (step_ratios.py)."]
    for task, contenders in every.items():
        searching = _tables.searching(rows, size, task)
        if not contenders and not searching:
            continue
        out += [f"### {task}"]
        if contenders:
            out += [_tables.losses(contenders, measured["ratios"])]
            out += ["What the search chose:", _tables.chosen(contenders)]
            few = _tables.parents(rows, size, task)
            out += ["State in 8 bits at the hyperparameters of float32:", few] if few else []
        if searching:
            out += ["No final runs yet; the lowest loss of the search, on its one seed:", searching]
    if found:
        text = "Mean over the seeds, on fewer held-out windows; the band is from lowest to highest."
        out += ["## Learning curves", text, f"![Validation loss](curves_{size}.png)"]
    searched = [t for t in TASKS if any(_studies.tuned(rows, size, t, c)[0] for c in CONTENDERS)]
    if searched:
        _plots.sensitivity(rows, size, searched, folder / f"learning_rates_{size}.png")
        text = (
            "The runs of the search, one seed. Lines have weight decay and betas as at its start; "
            "stars are the best of all; triangles at the top are runs that diverged or are above."
        )
        out += ["## Learning rates", text, f"![Loss](learning_rates_{size}.png)"]
    table = _tables.batches(rows, size)
    if table:
        _plots.batches(rows, size, folder / f"batch_{size}.png")
        text = (
            "One seed. As published CAME's updates are larger than debiased, which counts for more "
            f"the fewer steps there are: {_tables.growths(size)} (mean of 1 / sqrt(1 - b3^t), "
            "weighted by the schedule). Triangles at the top are runs that diverged or are above."
        )
        out += ["## Batches at equal tokens", text, table, f"![Loss](batch_{size}.png)"]
        others = _tables.batch_finals(rows, size)
        of_others = "The best learning rates on seeds that did not choose them:"
        out += [of_others, others] if others else []
    for task in searched:
        table = _tables.spike(rows, size, task)
        if table:
            _plots.spike(rows, size, task, folder / f"spike_{task}_{size}.png")
            text = (
                "Learning rates as the search with warm-up chose them; for CAME also with the "
                "betas that its authors publish, as in the picture. Bands are from the lowest to "
                "the highest of the seeds."
            )
            out += [f"## First steps, {task}", table, text, f"![Spike](spike_{task}_{size}.png)"]
    return out + (["## Not there yet", todo] if todo else [])


def write(rows: _summary.Rows, size: str) -> None:
    """Writes the report of one size and its pictures."""
    text = "\n\n".join(parts(rows, size, FOLDER, times(size, FOLDER)))
    print(text)
    about = f"{where(rows)} Method: {METHOD}."
    title = f"Optimizers compared, size {size}"
    _results.write(f"convergence/{size}", title, about, text, script="convergence/report")
    write_long(rows, size)


def write_long(rows: _summary.Rows, size: str) -> None:
    """Writes the reports of the studies of long runs, where there are any."""
    if size not in _lengths.LENGTHS:
        return
    for name, title, found, used in (
        (
            "lengths",
            "How long until CAME has Adam's quality?",
            _length_report.parts,
            _lengths.used,
        ),
        (
            "formats",
            "State and parameters in few bits, in long runs",
            _format_report.parts,
            _format_study.used,
        ),
    ):
        text = "\n\n".join(found(rows, size, FOLDER))
        if text:
            about = f"{where(used(rows, size))} Method: {METHOD}."
            to = f"convergence/{name}_{size}"
            _results.write(to, title, about, text, script="convergence/report")


def main() -> None:
    """Writes the report, or prints that of made-up rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="cpu", choices=_sizes.CHOICES)
    parser.add_argument("--smoke", action="store_true", help="of made-up rows; keeps nothing")
    chosen = parser.parse_args()
    if chosen.smoke:
        with tempfile.TemporaryDirectory() as folder:
            none: dict[str, Any] = {"ratios": {}}
            to = pathlib.Path(folder)
            print("\n\n".join(parts(_made_up.rows("smoke"), "smoke", to, none)))
            long = _made_up.length_rows("smoke")
            for study in (_length_report, _format_report):
                print("\n\n".join(study.parts(long, "smoke", to)))
        return
    rows = _rows.finished(FOLDER / f"runs_{chosen.size}.jsonl")
    if not rows:
        raise SystemExit(f"{FOLDER} has no runs of size {chosen.size}: run.py makes them.")
    write(rows, chosen.size)


if __name__ == "__main__":
    main()
