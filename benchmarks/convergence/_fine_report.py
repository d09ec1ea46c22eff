"""The report of the study of fine-tuning."""

import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import _fine_study
import _length_plots
import _plots
import _results
import _rows
import _search
import _summary
import numpy as np
import report
from _fine_study import CELLS, CONTENDERS, Scale
from _rows import key_of
from _studies import Rows
from _summary import BASELINE
from _tables import table

STYLE = {**_length_plots.STYLE, "adafactor_plain": ("#E69F00", "s", ":")}
NEAR = 0.02  # of the best accuracy: a learning rate that is as good
ABOUT = f"""Held-out accuracy in points and loss in nats, minus AdamW's on the same seeds; AdamW's
row has its own. Means over three tasks and two models to start from; the width of the 95 %
intervals comes from all optimizers of a table. Good rates: the decades of learning rate in which
accuracy on validation files is within {100 * NEAR:.0f} points of the best. Early excess: the most
by which training loss exceeds AdamW's in one of the first 50 steps, a mean of all final runs."""
Found = Mapping[str, "Final"]


class Final(NamedTuple):
    """The final runs of an optimizer at one length, and its searches; all by cell."""

    losses: np.ndarray  # (cells, seeds), held-out
    accuracies: np.ndarray  # (cells, seeds), in points
    early: np.ndarray  # (steps,), mean of all
    rates: list[str]  # what the searches chose, with a star on an edge
    width: float  # decades of learning rates as good as the best, a mean


def final(rows: Rows, every: list[_fine_study.Cell]) -> Final | None:
    """None unless all runs are there."""
    runs = [[rows.get(key_of(config)) for config in cell.finals] for cell in every]
    if not all(of and all(of) for of in runs):
        return None
    rates, widths = [], []
    for cell in every:
        tried = {trial.exponent: rows[key_of(cell.config(trial))] for trial in cell.found}
        best = _search.best(cell.found).exponent
        rates.append(f"{10**best:.3g}{'*' * (best in (min(tried), max(tried)))}")
        least = max(row["accuracy"] for row in tried.values()) - NEAR
        good = [exponent for exponent, row in tried.items() if row["accuracy"] >= least]
        widths.append(max(good) - min(good))

    def numbers(name: str) -> np.ndarray:
        return np.array([_summary.numbers([row[name] for row in of if row]) for of in runs])

    early = [_summary.numbers(row["early_loss"]) for of in runs for row in of if row]
    mean = np.mean(early, axis=0)
    return Final(numbers("loss"), 100 * numbers("accuracy"), mean, rates, float(np.mean(widths)))


def parts(rows: Rows, scale: Scale, dtype: str, picture: pathlib.Path) -> list[str]:
    """The report's parts in order, none without AdamW; draws its picture."""
    every: dict[str, Found] = {}
    for mode, steps in [(mode, steps) for mode, of in scale.steps.items() for steps in of]:
        cells = {n: _fine_study.cells(rows, scale, dtype, n, mode, steps) for n in CONTENDERS}
        finals = {name: final(rows, of) for name, of in cells.items()}
        found = {name: one for name, one in finals.items() if one is not None}
        every |= {f"{mode}, {steps:,} steps": found} if BASELINE in found else {}
    if not every:
        return []
    _draw(every, picture)
    out = [ABOUT, f"![Accuracy minus AdamW's, and the loss of the first steps]({picture.name})"]
    for title, found in every.items():
        out += [f"## {title.capitalize()}", _differences(found)]
        out += ["Accuracy, and learning rates chosen (*: on an edge of the search):"]
        out += [_by_cell(found)]
        programs = _fine_study.programs(scale, CONTENDERS)
        missing = [f"`{name}`" for name, of in programs if of in title and name not in found]
        out += [f"Not there yet: {', '.join(missing)}."] if missing else []
    return out


def write(path: pathlib.Path, platform: str) -> None:
    """Writes the report of a platform's record and its picture."""
    rows, void = _rows.finished(path), {row.get("void", "") for row in _rows.read(path)}
    name, dtype = path.stem, _fine_study.DTYPES[platform]
    text = parts(rows, _fine_study.SCALES["cpu"], dtype, report.FOLDER / f"{name}.png")
    about = " ".join([report.where(rows), *sorted(void - {""}), f"Method: {report.METHOD}."])
    title = "Fine-tuning: which optimizer ends best?"
    _results.write(f"convergence/{name}", title, about, *text, script="convergence/fine_tuning")


def _half_width(runs: list[np.ndarray]) -> float:
    """Of the interval of a difference of means over the seeds, (optimizers, seeds)."""
    spread = _summary.spread(runs)
    return spread.half_width(len(runs[0])) if spread else float("nan")


def _differences(found: Found) -> str:
    base, lines = found[BASELINE], []
    halves = [_half_width([one[i].mean(0) for one in found.values()]) for i in (0, 1)]
    for name, one in found.items():
        cells = [f"`{name}`"]
        for i, digits in ((1, 2), (0, 3)):
            mean, less, half = one[i].mean(), (one[i] - base[i]).mean(), halves[i]
            interval = f"{less - half:+.{digits}f} to {less + half:+.{digits}f}"
            cells += [f"{mean:.{digits}f}" if one is base else f"{less:+.{digits}f} ({interval})"]
        lines.append([*cells, f"{one.width:.2f}", f"{(one.early - base.early).max():.2f}"])
    return table(["optimizer", "accuracy", "loss", "good rates", "early excess"], lines)


def _by_cell(found: Found) -> str:
    base, lines = found[BASELINE], []
    for name, one in found.items():
        less = (one.accuracies - (one is not base) * base.accuracies).mean(1)
        sign = "" if one is base else "+"
        cells = [f"{x:{sign}.1f}, {rate}" for x, rate in zip(less, one.rates, strict=True)]
        lines.append([f"`{name}`", *cells])
    halves = [_half_width([one.accuracies[i] for one in found.values()]) for i in range(len(CELLS))]
    of_cells = [f"{task} from {start}" for task, start in CELLS]
    header = [f"{cell}, ± {half:.1f}" for cell, half in zip(of_cells, halves, strict=True)]
    return table(["optimizer", *header], lines)


def _draw(every: Mapping[str, Found], path: pathlib.Path) -> None:
    """Accuracy minus AdamW's with intervals, and the first steps of the shortest length."""
    figure, (axes,) = _plots.new_axes(2)
    there = {name for found in every.values() for name in found} - {BASELINE}
    names = [name for name in CONTENDERS if name in there][::-1]
    for place, (title, found) in enumerate(every.items()):
        half = _half_width([one.accuracies.mean(0) for one in found.values()])
        marker = "osD"[place]
        for name, one in found.items():
            if name != BASELINE:
                less = (one.accuracies - found[BASELINE].accuracies).mean()
                style = {"color": STYLE[name][0], "marker": marker, "capsize": 2}
                axes[0].errorbar(less, names.index(name) + 0.22 * (1 - place), xerr=half, **style)
        axes[0].plot([], [], marker, color="grey", label=title)
    axes[0].axvline(0, color="black", linewidth=1)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set(xlabel="held-out accuracy minus AdamW's, points")
    axes[0].legend(fontsize=7, frameon=False)
    title, found = next(iter(every.items()))
    for name, one in found.items():
        style = {**_plots.look(name, STYLE), "marker": ""}
        axes[1].plot(np.arange(len(one.early)) + 1, one.early - found[BASELINE].early, **style)
    axes[1].set(title=title, xlabel="step", ylabel="training loss minus AdamW's, nats")
    ends = {name: axes[1].lines[i].get_xydata()[-1] for i, name in enumerate(found)}
    _plots.label_ends(axes[1], ends, STYLE)
    _plots.save(figure, path)
