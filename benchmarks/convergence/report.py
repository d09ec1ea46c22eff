"""Tables and pictures of the comparison of optimizers, from the rows that run.py wrote.

It takes what is there, and says what is missing.

  python benchmarks/convergence/report.py --size cpu    # writes benchmarks/results/convergence/
  python benchmarks/convergence/report.py --smoke       # of a tiny comparison, prints only
"""

import argparse
import json
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
import _plots
import _results
import _rows
import _sizes
import _studies
import _summary
import _tables
from _contenders import CONTENDERS
from _tasks import TASKS


def where(rows: _summary.Rows) -> str:
    """Which machines, commits and text the rows come from."""

    def all_of(name: str) -> str:
        return ", ".join(sorted({str(row[name]) for row in rows.values()}))

    hours = sum(row["seconds"] for row in rows.values()) / 3600
    return (
        f"{len(rows)} runs, {hours:.1f} hours, on {all_of('machine')}; commits {all_of('commit')}, "
        f"jax {all_of('jax')}, checksum of the text {all_of('corpus')}."
    )


def parts(rows: _summary.Rows, size: str, folder: pathlib.Path) -> list[str]:
    """The report's parts in order; draws its pictures into ``folder``."""
    times = folder / f"time_{size}.json"
    ratios = json.loads(times.read_text())["ratios"] if times.exists() else {}
    found = {task: _summary.finals(rows, size, task, list(CONTENDERS)) for task in TASKS}
    found = {task: contenders for task, contenders in found.items() if contenders}
    out = []
    for task, contenders in found.items():
        out += [f"## {task}", _tables.losses(contenders, ratios), _tables.chosen(contenders)]
    if found:
        _plots.curves(found, folder / f"curves_{size}.png")
        out += ["## Learning curves", f"![Validation loss](curves_{size}.png)"]
    searched = [t for t in TASKS if any(_studies.tuned(rows, size, t, c)[0] for c in CONTENDERS)]
    if searched:
        _plots.sensitivity(rows, size, searched, folder / f"learning_rates_{size}.png")
        text = "Stars are what the whole search found best, with its weight decay and betas."
        out += ["## Learning rates", text, f"![Loss](learning_rates_{size}.png)"]
    table = _tables.batches(rows, size)
    if table:
        _plots.batches(rows, size, folder / f"batch_{size}.png")
        out += ["## Batches at equal tokens", table, f"![Loss](batch_{size}.png)"]
    for task in searched:
        if any(_studies.spike(rows, size, task, name).done for name in _studies.SPIKE):
            _plots.spike(rows, size, task, folder / f"spike_{task}_{size}.png")
            out += [f"## First steps, {task}", f"![Spike](spike_{task}_{size}.png)"]
    todo = _tables.missing(rows, size, list(TASKS))
    return out + (["## Not there yet", todo] if todo else [])


def main() -> None:
    """Writes the report of one size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = [name for name in _sizes.SIZES if not name.endswith("_batch")]
    parser.add_argument("--size", default="cpu", choices=sizes)
    size = parser.parse_args().size
    folder = _results.RESULTS / "convergence"
    rows = _rows.finished(folder / f"runs_{size}.jsonl")
    if not rows:
        raise SystemExit(f"{folder} has no runs of size {size}; start run.py --size {size}.")
    text = "\n\n".join(parts(rows, size, folder))
    print(text)
    about = f"{where(rows)} Method: [benchmarks/convergence](../../convergence/README.md)."
    title = f"Optimizers compared, size {size}"
    _results.write(f"convergence/{size}", title, about, text, script="convergence/report")


if __name__ == "__main__":
    main()
