"""Tables and pictures of the comparison of optimizers, from the rows that run.py wrote.

It takes what is there, and says what is missing.

  python benchmarks/convergence/report.py            # writes benchmarks/results/convergence/
  python benchmarks/convergence/report.py --smoke       # of made-up rows, prints only
"""

import argparse
import json
import pathlib
import sys
import tempfile
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
import _long_report
import _made_up
import _plots
import _rows
import _studies
import _summary
import _tables
from _contenders import CONTENDERS
from _studies import Rows
from _tasks import TASKS


def parts(rows: Rows, size: str, folder: pathlib.Path, measured: dict[str, Any]) -> list[str]:
    """The report's parts in order; draws its pictures into ``folder``."""
    every = {task: _summary.finals(rows, size, task) for task in TASKS}
    found = {task: contenders for task, contenders in every.items() if contenders}
    todo = _tables.missing(_studies.plans(rows, size, _studies.STUDIES, TASKS, CONTENDERS))
    out = ["**Not finished**: what is missing is listed at the end."] if todo else []
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
        about = measured.get("about", "not measured yet (step_ratios.py).")
        out += [f"Time of a training step: {about}"]
    for task, contenders in found.items():
        out += [f"### {task}", _tables.losses(contenders, measured.get("ratios", {}))]
        out += ["What the search chose:", _tables.chosen(contenders)]
        few = _tables.parents(rows, size, task)
        out += ["State in 8 bits at the hyperparameters of float32:", few] if few else []
    if found:
        text = "Mean over the seeds, on fewer held-out windows; the band is from lowest to highest."
        out += ["## Learning curves", text, f"![Validation loss](curves_{size}.png)"]
    searched = [t for t in TASKS if any(_studies.cell(rows, size, t, c).found for c in CONTENDERS)]
    if searched:
        _plots.sensitivity(rows, size, searched, folder / f"learning_rates_{size}.png")
        text = (
            "The runs of the search, one seed. Lines have weight decay and betas as at its start; "
            "stars are the best of all; triangles at the top are runs that diverged or are above."
        )
        out += ["## Learning rates", text, f"![Loss](learning_rates_{size}.png)"]
    if at_batches := _summary.batches(rows, size):
        _plots.batches(at_batches, folder / f"batch_{size}.png")
        text = (
            "One seed. As published CAME's updates are larger than debiased, which counts for more "
            f"the fewer steps there are: {_tables.growths(size)} (mean of 1 / sqrt(1 - b3^t), "
            "weighted by the schedule). Triangles at the top are runs that diverged or are above."
        )
        out += ["## Batches at equal tokens", text, _tables.batches(at_batches)]
        out += [f"![Loss](batch_{size}.png)"]
        others = _tables.batch_finals(at_batches)
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


def write(size: str = "cpu") -> None:
    """Writes all reports of one size and their pictures."""
    rows, path = _rows.finished(_rows.path(size)), _rows.FOLDER / f"time_{size}.json"
    measured = json.loads(path.read_text()) if path.exists() else {}
    text = parts(rows, size, _rows.FOLDER, measured)
    print("\n\n".join(text))
    title = f"Optimizers compared, size {size}"
    _tables.write(size, title, rows, _tables.METHOD, *text, script="report")
    _long_report.write_both(rows, size)


def main() -> None:
    """Writes the report, or prints that of made-up rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="of made-up rows; keeps nothing")
    chosen = parser.parse_args()
    if not chosen.smoke:
        write()
        return
    with tempfile.TemporaryDirectory() as folder:
        to, rows, long = pathlib.Path(folder), _made_up.rows("smoke"), _made_up.long_rows("smoke")
        text = parts(rows, "smoke", to, {})
        text += _long_report.lengths(long, "smoke", to) + _long_report.formats(long, "smoke", to)
        print("\n\n".join(text))


if __name__ == "__main__":
    main()
